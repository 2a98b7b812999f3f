"""The ``scan`` verdict on a checkpoint, which ``inspect`` and ``validate`` also show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, TypedDict

from ..base.findings import Finding
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.programs import program_of
from ..files.sources import FolderSource
from ..formats import carried_pickles
from ..safety.torch_lists import NEWEST
from ..safety.verdict import ExaminedPickle, Verdict, examine, verdict_of

if TYPE_CHECKING:
    from .companions import Companions


class VerdictReport(TypedDict):
    """What loading may run: ``verdict`` is weights-only, unsafe, program or unknown. ``reasons`` is empty for
    weights-only.
    """

    verdict: str
    reasons: list[str]


def checkpoint_verdict(
    checkpoint: Checkpoint,
    torch: str = NEWEST,
    *,
    quick: bool = False,
    pickles: Sequence[ExaminedPickle] | None = None,
    audited: Sequence[Finding] | None = None,
    companions: Companions | None = None,
) -> Verdict:
    """Return the verdict on a checkpoint and, if that is a folder, on all files in it.

    ``pickles``, ``audited`` (the problems that ``Container.audit`` found) and ``companions`` can be passed if they are
    already known. ``quick`` relies on the directory, without searching every header for records that it does not list.
    """
    program = program_of(checkpoint)
    container = checkpoint.container
    if audited is None:
        audited = () if quick else container.audit(checkpoint.survey.reader.storages)
    unclear = [problem.message for problem in (*container.problems, *audited) if problem.ambiguous]
    unclear += [
        f"{text}, which ckptool does not follow" for text in dict.fromkeys(checkpoint.survey.unfollowed.values())
    ]
    if pickles is None:
        own = program.own_names if program is not None else ()
        every = container.pickles(quick=quick) if checkpoint.pickled else ()
        pickles = list(examine(chain(every, carried_pickles(checkpoint)), torch, own))
    if isinstance(checkpoint.source, FolderSource):
        from .companions import check_companions  # imported only for folders

        beside = companions or check_companions(checkpoint.source, torch)
        pickles = [*pickles, *beside.pickles]
        unclear += [f"{item['name']}: {item['why']}" for item in beside.files if not item["looked_at"]]
    kind = f"{program.kind}, read by {program.loader}" if program is not None else ""
    return verdict_of(pickles, torch, program=kind, unclear=unclear)


def verdict_report(verdict: Verdict) -> VerdictReport:
    """Return the verdict in the form of a report."""
    return {"verdict": verdict.word, "reasons": list(verdict.reasons)}
