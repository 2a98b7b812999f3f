"""Find out whether ``sanitize`` makes a checkpoint loadable, and with which options, by trying the edit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from ...base.errors import CkptoolError
from ...base.steps import AnyStep, Step, command, suggested_output
from ...checkpoint.checkpoint import Checkpoint, away
from ...safety.storages import storage_flaws
from ...safety.weights_only import weights_only
from .sanitizer import sanitize

#: Maximum objects in a pickle for a trial, which takes as long as the edit.
_MOST: Final = 100_000


def options_that_work(checkpoint: Checkpoint) -> tuple[str, ...] | None:
    """Return the flags of ``sanitize`` that make plain ``torch.load(path)`` accept it, or None if none do."""
    stopped = any(problem.blocks_edits or problem.ambiguous for problem in checkpoint.container.problems)
    if stopped or len(checkpoint.graph.nodes) > _MOST:
        return None
    modules = bool(checkpoint.survey.modules)
    for drop_unknown in (False, True):
        with suppress(CkptoolError):
            sanitize(checkpoint, as_state_dict=modules, drop_unknown=drop_unknown)
            flags = {"as_state_dict": modules, "drop_unknown": drop_unknown}
            return tuple(name for name, wanted in flags.items() if wanted)
    return None


def loadable(checkpoint: Checkpoint) -> bool:
    """Return whether ``torch.load(weights_only=True)`` accepts the objects in a checkpoint."""
    return not checkpoint.pickled or not weights_only(checkpoint, storage_flaws(checkpoint)).blockers


def loadable_step(checkpoint: Checkpoint, more: Sequence[Step] = (), extension: str = "") -> AnyStep:
    """Return the command after which plain ``torch.load(path)`` works without a GPU, or "", with ``more`` settings."""
    options = options_that_work(checkpoint)
    if options is None:
        return ""
    path, moved = checkpoint.path, away(checkpoint)
    output = suggested_output(path, "loadable.cpu" if moved else "loadable", extension)
    if not (moved or more):
        return command("sanitize", path, output=output, steps=map(Step, options))
    cpu = [Step("to", "cpu")] if moved else []
    return command("edit", path, output=output, steps=[*map(Step, ("sanitize", *options)), *cpu, *more])
