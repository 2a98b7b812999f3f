"""The salvage command: recover the intact content of a damaged file."""

from __future__ import annotations

from typing import TypedDict

import click

from ..base.text import join_limited, pluralize
from ..checkpoint.checkpoint import Checkpoint
from ..edits.salvage import salvage as salvaged
from .edit_report import EditReport, conversion_lines
from .editing import EditRequest, WithFields, edit_all
from .help import GroupedCommand
from .options import Writing, paths, writing
from .render import clean

#: The most lost tensors listed for people; JSON lists all.
_SHOWN = 20

EPILOG = """\b
Examples:
  ckptool salvage cut.pth -o saved.pth
  ckptool salvage cut.pth --dry-run
  ckptool salvage damaged/*.pth --out-dir saved/ --format jsonl
"""


class LostReport(TypedDict):
    """A tensor or storage that could not be recovered."""

    path: str
    reason: str


class SalvageReport(EditReport):
    """``ckptool.salvage/1``: ``saved`` counts tensors, ``verified`` is true if checksums confirm them.

    ``refused`` lists the names that make torch.load(weights_only=True) refuse the output.
    """

    saved: int
    lost: list[LostReport]
    verified: bool
    refused: list[str]


@click.command(cls=GroupedCommand, epilog=EPILOG)
@paths
@writing
def salvage(paths: tuple[str, ...], how: Writing) -> int:
    """Recover what is intact in a cut or damaged checkpoint.

    Every tensor whose bytes are complete and match their checksum is written to a new file, with everything that is not
    a tensor. Nothing is padded: a lost tensor is left out (None takes its place in a list) and named. Exit 0: nothing
    was lost; 1: something was; 3: nothing could be saved.
    """
    return edit_all(EditRequest("salvage", _unedited, _salvaged, _lines, _code), paths, how)


def _salvaged(path: str) -> WithFields:
    result = salvaged(path)
    lost: list[LostReport] = [{"path": item.path, "reason": item.reason} for item in result.lost]
    refused = list(result.refused)
    fields = {"saved": result.saved, "lost": lost, "verified": result.verified, "refused": refused}
    return WithFields(result.checkpoint, fields)


def _unedited(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint


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
    lines += [f"    {clean(item['path'] or 'the tensor')}: {clean(item['reason'])}" for item in lost[:_SHOWN]]
    return lines + ([f"    and {len(lost) - _SHOWN:,} more: --format json"] if len(lost) > _SHOWN else [])
