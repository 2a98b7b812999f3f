"""``undo``, ``history`` and ``repack``: what was edited in place, and the way back."""

from __future__ import annotations

from typing import Any

import click

import ckptool

from ..base.errors import CkptoolError
from ..base.text import human_bytes, pluralize, undo_step
from ..files.archives import is_address
from .editing import Job, edit_all
from .options import format_option, paths, worst, writing
from .render import clean, emit, emit_json, failure, say_error, table

UNDO_EPILOG = """\b
Examples:
  ckptool undo model.pth
  ckptool undo model.pth --all
  ckptool undo *.pth --dry-run
"""


@click.command(epilog=UNDO_EPILOG)
@paths
@click.option("--all", "everything", is_flag=True, help="Undo all edits in place, back to the original file.")
@click.option("--dry-run", is_flag=True, help="Only show what would be undone.")
@format_option()
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def undo(paths: tuple[str, ...], everything: bool, dry_run: bool, style: str, quiet: bool) -> int:
    """Undo the last edit in place: the file has its exact former bytes again.

    Repeat it as often as there were edits; an interrupted edit counts as one. Exit 1: there is nothing to undo.
    """
    reports = []
    codes = []
    for path in paths:
        try:
            report = ckptool.undo(path, everything=everything, dry_run=dry_run)
        except CkptoolError as error:
            say_error(error)
            codes.append(error.exit_code)
            reports.append(failure("undo", path, error))
            continue
        codes.append(0 if report["undone"] else 1)
        reports.append(report)
        if style == "table" and not quiet:
            emit("\n".join(_undone(report)))
    if style != "table" and not quiet:
        emit_json(reports, style, len(paths) > 1)
    return worst(codes)


def _undone(report: dict[str, Any]) -> list[str]:
    path = clean(report["path"])
    if not report["undone"]:
        return [f"{path}: no edit in place to take back"]
    would = "would be" if report["dry_run"] else "is"
    size = f"{report['bytes']:,} -> {report['output_bytes']:,} bytes"
    lines = [f"{path}: the former version {would} back, {size}"]
    for version in report["undone"]:
        unfinished = "" if version["finished"] else " (it was not finished)"
        lines.append(f"  taken back: {clean(version['edit'])}{unfinished}")
    if report["left"]:
        lines.append(f"  {pluralize(report['left'], 'edit')} before it can be taken back as well")
    return lines


HISTORY_EPILOG = """\b
Examples:
  ckptool history model.pth
  ckptool history model.pth --format json
"""


@click.command(epilog=HISTORY_EPILOG)
@paths
@format_option()
def history(paths: tuple[str, ...], style: str) -> int:
    """List the edits made in place, the oldest version first. Times are UTC."""
    reports = []
    codes = []
    for path in paths:
        try:
            report = ckptool.history(path)
        except CkptoolError as error:
            say_error(error)
            codes.append(error.exit_code)
            reports.append(failure("history", path, error))
            continue
        codes.append(0)
        if style == "table":
            emit(("\n" if reports else "") + "\n".join(_listed(report)))
        reports.append(report)
    if style != "table":
        emit_json(reports, style, len(paths) > 1)
    return worst(codes)


def _listed(report: dict[str, Any]) -> list[str]:
    path, found = clean(report["path"]), report["versions"]
    if len(found) == 1:
        return [f"{path}: never edited in place, {human_bytes(report['bytes'])}"]
    rows = [
        (
            str(version["version"]),
            (version["time"] or "").replace("T", " ").removesuffix("Z"),
            f"{version['bytes']:,}",
            (version["edit"] or "the file as it first was") + ("" if version["finished"] else " (not finished)"),
        )
        for version in found
    ]
    lines = [f"{path}: edited in place, {pluralize(len(found), 'version')}", ""]
    lines.append(table(("version", "time", "bytes", "what"), rows, right=(0, 2)))
    if is_address(report["path"]):
        return lines  # what is in an archive is not changed in place
    step = "take the unfinished edit back" if not found[-1]["finished"] else "go back by one version"
    return [*lines, "", f"  -> {step}: {clean(undo_step(report['path']))}"]


REPACK_EPILOG = """\b
Examples:
  ckptool repack edited.pth -o clean.pth
  ckptool repack zipped.pth -o mappable.pth
  ckptool repack *.pth --out-dir clean/
"""


@click.command(epilog=REPACK_EPILOG)
@paths
@writing
def repack(paths: tuple[str, ...], **how: Any) -> int:
    """Rewrite a file in torch's own layout: aligned, nothing compressed, nothing unused.

    Former versions and dropped bytes of edits in place are left out; torch.load(mmap=True) works on the output
    whatever the input was. A file that torch 2.7 or later wrote comes out byte for byte.
    """
    return edit_all(Job("repack", ckptool.repack), paths, **how)
