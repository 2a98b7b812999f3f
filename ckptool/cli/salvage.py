"""The salvage command: recover the intact content of a damaged file."""

from __future__ import annotations

import click

from ..base.records import TypedDict
from ..base.text import join_limited, pluralize, shown
from ..checkpoint.checkpoint import Checkpoint
from ..edits.optimizers import drop_step
from ..edits.salvage import SalvagedState
from ..edits.salvage import salvage as salvaged
from .edit_report import EditReport, conversion_lines
from .editing import EditRequest, WithFields, edit_all
from .help import GroupedCommand
from .options import Writing, paths, writing
from .render import clean, step_lines

#: The most lost tensors, and the most states, listed for people; JSON lists all.
_SHOWN = 20


class LostReport(TypedDict):
    """A tensor or storage that could not be recovered."""

    path: str
    reason: str


class SalvageReport(EditReport):
    """``ckptool.salvage/1``: ``saved`` counts tensors, ``verified`` is true if checksums confirm them.

    ``refused`` lists the names that make torch.load(weights_only=True) refuse the output. ``states`` tells which parts
    are whole. If a model is, ``next`` drops the optimizers that are not.
    """

    saved: int
    lost: list[LostReport]
    verified: bool
    refused: list[str]
    states: tuple[SalvagedState, ...]


@click.command(cls=GroupedCommand)
@paths
@writing
def salvage(paths: tuple[str, ...], how: Writing) -> int:
    """Recover what is intact in a cut or damaged checkpoint.

    Every tensor whose bytes are complete and match their checksum is written to a new file, with everything that is not
    a tensor. Nothing is padded: a lost tensor is left out (None takes its place in a list) and named. Exit 0: nothing
    was lost; 1: something was; 3: nothing could be saved.
    """
    return edit_all(EditRequest("salvage", _unedited, _salvaged, _lines, _code, step=_step), paths, how)


def _salvaged(path: str) -> WithFields:
    result = salvaged(path)
    lost: list[LostReport] = [{"path": item.path, "reason": item.reason} for item in result.lost]
    refused = list(result.refused)
    fields = {"saved": result.saved, "lost": lost, "verified": result.verified, "refused": refused}
    return result.checkpoint, {**fields, "states": result.states}


def _unedited(checkpoint: Checkpoint) -> WithFields:
    return checkpoint, {}


def _step(report: SalvageReport) -> str:
    entries = [state["drop"] for state in report["states"] if state["drop"]]
    return "" if report["dry_run"] or not report["output"] else drop_step(report["output"], entries).line


def _code(report: SalvageReport) -> int:
    return 1 if report["lost"] else 0


def _lines(report: SalvageReport) -> list[str]:
    converted = conversion_lines(report)
    rest = "" if converted else ", and everything that is not a tensor"
    lines = [f"  saved: {pluralize(report['saved'], 'tensor')}{rest}", *converted]
    if not report["verified"]:
        lines.append("  the format has no checksums: the saved tensors could not be verified")
    if report["refused"]:
        lines.append(f"  torch.load(weights_only=True) refuses it: {clean(join_limited(report['refused']))}")
    lost = report["lost"]
    if not lost:
        return [*lines, "  lost: nothing" + ("" if report["changed"] else "; the output is the input, byte for byte")]
    lines.append(f"  lost: {pluralize(len(lost), 'tensor')}")
    lines += [f"    {clean(item['path'] or 'the tensor')}: {clean(item['reason'])}" for item in lost[: shown(_SHOWN)]]
    lines += [f"    and {len(lost) - shown(_SHOWN):,} more: --format json"] if len(lost) > shown(_SHOWN) else []
    return [*lines, *_state_lines(report)]


def _state_lines(report: SalvageReport) -> list[str]:
    """Return a line for each state, and how to train without an incomplete optimizer; [] if there is one state only."""
    states = report["states"]
    if not any(state["path"] for state in states):
        return []
    lines = []
    for path, saved, total in [(state["path"], state["saved"], state["total"]) for state in states[: shown(_SHOWN)]]:
        share = f"all {total:,} tensors" if saved == total > 1 else f"{saved:,} of {pluralize(total, 'tensor')}"
        lines.append(f"  {clean(path) or 'top level'}: {share}{'; incomplete' if saved < total else ''}")
    lines += [f"  and {len(states) - shown(_SHOWN):,} more: --format json"] if len(states) > shown(_SHOWN) else []
    if any(state["drop"] for state in states):
        errors = list(dict.fromkeys(f"KeyError: {name!r}" for state in states for name in state["lacks"]))
        raises = f"load_state_dict() or step() raises {clean(' or '.join(errors[:3]))}"
        lines.append(f"  do not resume the optimizer: {raises if errors else 'torch does not report its lost values'}")
    if step := _step(report):
        lines += ["  to train on from the weights without it:", *step_lines(step)]
    return lines
