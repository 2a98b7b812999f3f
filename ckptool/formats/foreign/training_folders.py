"""Folders that training frameworks write for themselves, one part per rank, with the parts that are missing.

They are named, not read: a tensor in them is split over many files in ways that only the framework knows. Sources:
Megatron-LM (``megatron/training/checkpointing.py``); for DeepSpeed see ``ranks.deepspeed_files``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from itertools import product
from math import prod
from typing import Final, TypeAlias

from ...base.errors import NotACheckpointError
from ...base.steps import command
from ...base.text import join_limited, quoted
from ..ranks import deepspeed_files
from ..ranks.deepspeed_files import listed, read_tag

_RANK: Final = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?\Z")
_ITERATION: Final = re.compile(r"(?:iter_\d+|release)\Z")
_TAG: Final = re.compile(r"global_step\d+\Z")
#: The most ranks that are checked for completeness.
_MAX_RANKS: Final = 1 << 16


def training_folder(path: str) -> NotACheckpointError | None:
    """Return the error that names a folder of DeepSpeed or Megatron, or None.

    Reads names, and one file of each kind.
    """
    names = listed(path)
    if error := deepspeed_files.explain(path, names) or _megatron(path, names):
        return error
    if "latest" in names or "zero_to_fp32.py" in names:
        return _latest_step(path, names, "latest", _TAG, deepspeed_files.explain)
    if "latest_checkpointed_iteration.txt" in names:
        return _latest_step(path, names, "latest_checkpointed_iteration.txt", _ITERATION, _megatron)
    return None


_Explain: TypeAlias = "Callable[[str, Collection[str]], NotACheckpointError | None]"


def _latest_step(
    path: str, names: Collection[str], tag_file: str, pattern: re.Pattern[str], explain: _Explain
) -> NotACheckpointError | None:
    """Explain the step that ``tag_file`` names as the latest, or the last one that is there."""
    steps = sorted((name for name in names if pattern.match(name)), key=lambda name: (len(name), name))
    tag = read_tag(os.path.join(path, tag_file)) if tag_file in names else ""
    tag = f"iter_{int(tag):07d}" if tag.isascii() and tag.isdigit() and len(tag) < 12 else tag
    step = tag if tag in names else next(reversed(steps), "")
    error = explain(os.path.join(path, step), listed(os.path.join(path, step))) if step else None
    if error is not None:
        error.what += f"; the step is {quoted(step)}" + (f", one of {len(steps):,}" if len(steps) > 1 else "")
        error.what += f", and {tag_file} says {quoted(tag)}, which is not there" if tag and tag != step else ""
        error.path = path
    return error


def _megatron(path: str, names: Collection[str]) -> NotACheckpointError | None:
    if ".metadata" in names:
        return None  # the distributed format of newer versions is torch's
    ranks = _ranks(names)
    if not ranks or not any(os.path.isdir(os.path.join(path, name)) for name in ranks.values()):
        return None
    length = max(map(len, ranks))
    sizes = [max(rank[place] + 1 for rank in ranks if len(rank) > place) for place in range(length)]
    total = prod(sizes)
    grid = product(*map(range, sizes)) if total <= _MAX_RANKS else ()
    missing = [
        "mp_rank_" + "_".join(f"{number:0{3 if place else 2}d}" for place, number in enumerate(rank))
        for rank in grid
        if rank not in ranks
    ]
    empty = [name for name in sorted(ranks.values()) if not _WEIGHTS & listed(os.path.join(path, name))]
    words = [f"{size} {kind}-parallel" for size, kind in zip(sizes, ("tensor", "pipeline", "expert"))]
    what = f"it is a Megatron-LM checkpoint of {join_limited(words)} ranks: {len(ranks):,} of {total:,} folders"
    what += f"; missing: {join_limited(missing)}" if missing else ""
    what += f"; without a file of weights: {join_limited(empty)}" if empty else ""
    what += "" if missing or empty else ", all there"
    whole = "" if missing or empty else "tools/checkpoint/convert.py of Megatron-LM makes one of it; "
    step = f"{whole}its files: " + command("inspect", os.path.join(path, "*/*.pt"))
    return NotACheckpointError(what, kind="megatron", path=path, next=step)


def _ranks(names: Collection[str]) -> dict[tuple[int, ...], str]:
    """Return the folders of ranks by their numbers; numbers from a million on are not ranks."""
    matches = [match for match in map(_RANK.match, names) if match]
    small = [match for match in matches if all(len(group or "") < 7 for group in match.groups())]
    return {tuple(int(group) for group in match.groups() if group is not None): match[0] for match in small}


_WEIGHTS: Final = frozenset(("model_optim_rng.pt", "model_rng.pt", "model_states.pt"))
