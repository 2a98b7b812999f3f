"""Facts about a checkpoint that ``inspect`` and ``validate`` both report: each is found and worded here, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..base.findings import EMPTY_WEIGHTS, Finding
from ..base.steps import AnyStep, command
from ..base.text import pluralize
from ..checkpoint.checkpoint import Checkpoint, rescue_step
from ..formats.empty_weights import empty_weights, gather_step
from ..formats.rank_part import Part, part_of, shards_of


def facts(checkpoint: Checkpoint, flaws: Sequence[Finding]) -> list[Finding]:
    """Return what is missing from a checkpoint and what cannot be followed, each with its next step.

    ``flaws`` are the flaws of its storages. A finding of the check ``shards`` or ``part`` with the level "note" says
    that nothing is missing.
    """
    found = []
    if empty := empty_weights(checkpoint):
        found.append(Finding.of(EMPTY_WEIGHTS, "error", empty, next=gather_step(checkpoint)))
    for message, count in Counter(checkpoint.survey.unsupported.values()).items():
        times = f" ({count:,} times)" if count > 1 else ""
        found.append(Finding.of("not-followed", "error", f"{message}{times}, which ckptool does not follow"))
    if refused := [flaw for flaw in flaws if flaw.refused]:
        rescue = rescue_step(checkpoint)
        found += [flaw._replace(next=rescue) for flaw in refused]
    if (part := part_of(checkpoint)) is not None:
        found.append(_part(part))
    shards = shards_of(checkpoint)
    if shards is not None and not shards.partial:
        from ..edits.sharded import local_parts_step  # only for sharded tensors

        message = f"{pluralize(shards.tensors, 'tensor')} spread over {shards.over}, each of them whole in this file"
        found.append(Finding.of("shards", "note", message, next=local_parts_step(checkpoint)))
    return found


def _part(part: Part) -> Finding:
    """Return the finding for a file that is one part of a checkpoint, with the command for the whole."""
    step: AnyStep = command("inspect", part.folder) if part.folder else part.whole if part.cut else ""
    level = "error" if part.alone and part.level != "note" else part.level
    return Finding.of(part.code, level, part.message, next=step)
