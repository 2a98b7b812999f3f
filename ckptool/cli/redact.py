"""The redact command: find and remove what a published file should not reveal."""

from __future__ import annotations

from functools import partial
from typing import Literal, TypedDict

import click

import ckptool

from ..base.globs import Globs
from ..base.steps import Setting
from ..base.text import pluralize
from ..edits.pipeline import Call, applied
from ..edits.redact import KINDS, Kind, find_private
from .editing import EditRequest, edit_all
from .help import GroupedCommand
from .many.runner import Answer, FileCommand, reported, run_each
from .options import Workers, Writing, choosing, paths, writing
from .render import clean, step_lines


class PrivateReport(TypedDict):
    """A private item: ``new`` is the text that would replace it, or None if the whole entry would be removed."""

    kind: Kind
    path: str
    what: str
    new: str | None


class PrivateReports(TypedDict):
    """``ckptool.redact/1`` when redact only lists private items."""

    schema: Literal["ckptool.redact/1"]
    path: str
    found: list[PrivateReport]


REDACT_EPILOG = """\b
Examples:
  ckptool redact training.pth
  ckptool redact training.pth --paths --users -o published.pth
  ckptool redact training.pth --everything --exclude model_args -o published.pth
"""


@click.command(cls=GroupedCommand, epilog=REDACT_EPILOG)
@paths
@click.option("--paths", "take_paths", is_flag=True, help="Shorten absolute paths to their last part.")
@click.option("--users", is_flag=True, help="Replace names of users and hosts by 'user' and 'host'.")
@click.option("--sources", is_flag=True, help="Empty the module sources that old files carry.")
@click.option("--args", "arguments", is_flag=True, help="Remove entries with training arguments.")
@click.option("--everything", is_flag=True, help="Remove all of these.")
@choosing
@writing
def redact(
    paths: tuple[str, ...],
    take_paths: bool,
    users: bool,
    sources: bool,
    arguments: bool,
    everything: bool,
    only: Globs,
    how: Writing,
) -> int:
    """Find what a published file should not reveal, and remove what the options name.

    Without --paths, --users, --sources, --args or --everything it only lists. --include and --exclude select by path.
    Read the list: no program can recognise everything that is private.
    """
    flags = dict(zip(KINDS, (take_paths, users, sources, arguments)))
    kinds = [kind for kind in KINDS if flags[kind] or everything]
    if not kinds:
        if how.output is not None or how.out_dir is not None:
            raise click.UsageError("Say what to remove: --everything, or --paths, --users, --sources, --args.")
        style = "quiet" if how.quiet else how.style
        return run_each(FileCommand("redact", style, partial(_list, only=only, style=style)), paths, Workers())
    edits = [Call("redact", {"kinds": kinds, **only.patterns})]
    return edit_all(EditRequest("redact", partial(applied, edits=edits)), paths, how)


def _list(path: str, *, only: Globs, style: str) -> Answer:
    """List the private items in an input."""
    with ckptool.open(path) as checkpoint:
        items = find_private(checkpoint, only=only)
    found: list[PrivateReport] = [
        {"kind": item.kind, "path": item.path, "what": item.what, "new": item.new} for item in items
    ]
    report: PrivateReports = {"schema": "ckptool.redact/1", "path": path, "found": found}
    return reported(report, style, _list_lines)


def _list_lines(report: PrivateReports) -> list[str]:
    """Return the private items for people, and the command that removes them all."""
    from ..reports.findings import edit_step

    path, items = report["path"], report["found"]
    kinds = [Setting(kind) for kind in KINDS if any(item["kind"] == kind for item in items)]
    if not kinds:
        return [f"{clean(path)}: nothing private is recognised"]
    step = step_lines(edit_step("redact", path, word="redacted", settings=kinds).line)
    head = f"{clean(path)}: {pluralize(len(items), 'private item')}"
    return [head, *(f"  {clean(_line(item))}" for item in items), *step]


def _line(item: PrivateReport) -> str:
    new = "the entry is removed" if item["new"] is None else repr(item["new"])
    where = f"{item['path']}: " if item["path"] else ""
    return f"--{item['kind']}  {where}{item['what']} -> {new}"
