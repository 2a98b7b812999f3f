"""DeepSpeed files with numbers in their names, whose content must be what the name says."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Final

from ...base.lazy import regex
from ...checkpoint.objects import mapping, values_of
from ..joined.container import RankFile, RankFiles
from ..names.deepspeed import EXPERT, EXPERT_OPTIMIZER, LAYER, MODEL, OPTIMIZER

#: The expert number in a tensor name.
EXPERT_KEY: Final = regex(r"\.deepspeed_experts\.(\d{1,6})\.")


class NumberedFiles(RankFiles):
    """Files with numbers in their names, checked against the names under which they were saved."""

    def open_as(self, kind: re.Pattern[str], name: str, numbers: tuple[int, ...], stack: ExitStack) -> RankFile | None:
        """Open a file of one kind; None if it cannot be read or was saved with other numbers, reported as a problem."""
        file = self.open_file(name, stack)
        saved = kind.match(f"{file.container.root}.pt") if file is not None else None
        what = ""
        if saved and numbers_in(saved) != numbers:
            what = f"it was saved as {saved[0]}: that of another place under this name"
        elif file is not None and (own := _kind_of(file)) is not kind:
            what = f"it holds {_KINDS[own]}, not {_KINDS[kind]}"
        if what:
            self.note_lost(f"{name}: {what}", name)
            return None
        return file


#: Content by the pattern of the file names that have it.
_KINDS: Final = {
    MODEL: "a model file of DeepSpeed",
    OPTIMIZER: "a partition of an optimizer",
    EXPERT_OPTIMIZER: "the state of an optimizer",
    EXPERT: "the tensors of one expert",
    LAYER: "the state dict of a layer",
    None: "no state dict",
}


def _kind_of(file: RankFile) -> re.Pattern[str] | None:
    """Return the pattern of the names that DeepSpeed gives to files with this content; None for other content."""
    values = values_of(file.graph, file.graph.root)
    kinds = {"module": MODEL, "optimizer_state_dict": OPTIMIZER, "optimizer": EXPERT_OPTIMIZER}
    kind = next((kind for entry, kind in kinds.items() if entry in values), None)
    if kind is None and values and all(map(EXPERT_KEY.search, values)):
        return EXPERT
    return kind or (LAYER if mapping(file.graph, file.graph.root) is not None else None)


def numbers_in(match: re.Match[str]) -> tuple[int, ...]:
    """Return the numbers in a file name, 0 for an absent group."""
    return tuple(int(group or 0) for group in match.groups())
