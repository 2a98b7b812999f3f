"""The undo command: list the edits made in place, and undo them."""

from __future__ import annotations

from functools import partial

import click

import ckptool

from ..base.steps import undo_step
from ..base.text import human_bytes, pluralize
from ..files.archives import is_address
from ..saving import HistoryReport, UndoReport
from .help import GroupedCommand
from .options import Workers, dry_run_option, format_option, paths, quiet_option
from .render import clean, step_lines, table
from .runner import Answer, FileCommand, reported, run_each


@click.command(cls=GroupedCommand)
@partial(paths, local=True)
@click.option("--list", "listed", is_flag=True, help="List the edits made in place, the oldest version first.")
@dry_run_option
@format_option()
@quiet_option
def undo(paths: tuple[str, ...], listed: bool, dry_run: bool, style: str, quiet: bool) -> int:
    """Undo the last edit in place: the file has its exact former bytes again.

    Repeat it as often as there were edits; an interrupted edit counts as one. --list only lists them; times are UTC.
    Exit 1: there is nothing to undo.
    """
    style = "quiet" if quiet else style
    if listed:
        work = partial(_history, style=style)
        return run_each(FileCommand("undo", style, work), paths, Workers(), spaced=True)
    work = partial(_undo, dry_run=dry_run, style=style)
    return run_each(FileCommand("undo", style, work), paths, Workers())


def _undo(path: str, *, dry_run: bool, style: str) -> Answer:
    report = ckptool.undo(path, dry_run=dry_run)
    return reported(report, style, _undone, 0 if report["undone"] else 1)


def _undone(report: UndoReport) -> list[str]:
    path = clean(report["path"])
    if not report["undone"]:
        return [f"{path}: there is no edit in place to undo"]
    would = "would be" if report["dry_run"] else "is"
    size = f"{report['bytes']:,} -> {report['output_bytes']:,} bytes"
    lines = [f"{path}: the former version {would} restored, {size}"]
    for version in report["undone"]:
        unfinished = "" if version["finished"] else " (it was not finished)"
        lines.append(f"  undone: {clean(version['edit'] or '')}{unfinished}")
    if report["left"]:
        lines.append(f"  {pluralize(report['left'], 'edit')} before it can be undone as well")
    return lines


def _history(path: str, *, style: str) -> Answer:
    return reported(ckptool.history(path), style, _listed)


def _listed(report: HistoryReport) -> list[str]:
    path, versions = clean(report["path"]), report["versions"]
    if len(versions) == 1:
        return [f"{path}: never edited in place, {human_bytes(report['bytes'])}"]
    rows = [
        (
            str(version["version"]),
            (version["time"] or "").replace("T", " ").removesuffix("Z"),
            f"{version['bytes']:,}",
            (version["edit"] or "the original file") + ("" if version["finished"] else " (not finished)"),
        )
        for version in versions
    ]
    lines = [f"{path}: edited in place, {pluralize(len(versions), 'version')}", ""]
    lines.append(table(("version", "time", "bytes", "what"), rows, right=(0, 2)))
    if is_address(report["path"]):
        return lines  # a member of an archive is never changed in place, so there is nothing to undo
    what = "undo the unfinished edit" if not versions[-1]["finished"] else "go back by one version"
    return [*lines, "", f"{what}:", *step_lines(undo_step(report["path"]).line)]
