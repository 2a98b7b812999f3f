"""The verdict of ``scan`` on a checkpoint, which ``inspect`` and ``validate`` show, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import AMBIGUOUS, FoundPickle
from ..checkpoint.programs import program_of
from ..files.sources import FolderSource
from ..safety.named_globals import named_globals
from ..safety.torch_lists import NEWEST
from ..safety.verdict import Verdict, verdict_of

if TYPE_CHECKING:
    from .companions import Companions


class VerdictReport(TypedDict):
    """What loading may run: ``verdict`` is weights-only, unsafe, program or unknown, ``reasons`` those of any but the
    first."""

    verdict: str
    reasons: list[str]


def checkpoint_verdict(
    checkpoint: Checkpoint,
    torch: str = NEWEST,
    *,
    quick: bool = False,
    pickles: Sequence[FoundPickle] | None = None,
    companions: Companions | None = None,
) -> Verdict:
    """Return the verdict on a checkpoint and, if that is a folder, on all the files in it.

    ``pickles`` and ``companions`` are those of the checkpoint, where they are known already.
    ``quick``: by what its directory lists, without a look at every header for what it does not list.
    """
    program = program_of(checkpoint)
    container = checkpoint.container
    problems = list(container.problems)
    if not quick:
        problems += container.audit(checkpoint.survey.reader.storages)
    unclear = [problem.message for problem in problems if problem.code in AMBIGUOUS]
    if pickles is None:
        pickles = list(container.pickles(quick=quick)) if checkpoint.pickled else []
    names = named_globals(pickles, torch)
    if program is not None:
        names = [item for item in names if not item.mapped.startswith(program.own_names)]
    if isinstance(checkpoint.source, FolderSource):
        from .companions import check_companions  # for folders alone

        beside = companions or check_companions(checkpoint.source, torch)
        pickles = [*pickles, *beside.pickles]
        names += beside.globals
        unclear += [f"{item['name']}: {item['why']}" for item in beside.files if not item["looked_at"]]
    kind = f"{program.kind}, read by {program.loader}" if program is not None else ""
    return verdict_of(pickles, names, torch, program=kind, unclear=unclear)


def verdict_report(verdict: Verdict) -> VerdictReport:
    """Return the verdict as a report."""
    return {"verdict": verdict.word, "reasons": list(verdict.reasons)}
