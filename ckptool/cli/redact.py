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
from ..edits.redact import KINDS, Kind, PrivateItem, find_private
from .editing import EditRequest, edit_all
from .many.output import Outcomes
from .options import Writing, choosing, paths, writing
from .render import clean, emit, step_lines


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


@click.command(epilog=REDACT_EPILOG)
@paths
@click.option("--paths", "take_paths", is_flag=True, help="Shorten absolute paths to their last part.")
@click.option("--users", is_flag=True, help="Replace names of users and hosts by 'user' and 'host'.")
@click.option("--sources", is_flag=True, help="Empty the module sources that old files carry.")
@click.option("--args", "arguments", is_flag=True, help="Remove entries with training arguments.")
@click.option("--everything", is_flag=True, help="All of these.")
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
        return _list(paths, only, how)
    edits = [Call("redact", {"kinds": kinds, **only.patterns})]
    return edit_all(EditRequest("redact", partial(applied, edits=edits)), paths, how)


def _list(paths: tuple[str, ...], only: Globs, how: Writing) -> int:
    """List the private items in each input."""
    outcomes = Outcomes("redact", paths, how.style, how.quiet)
    for path in paths:
        with outcomes.input(path):
            with ckptool.open(path) as checkpoint:
                items = find_private(checkpoint, only=only)
            report: PrivateReports = {
                "schema": "ckptool.redact/1",
                "path": path,
                "found": [{"kind": item.kind, "path": item.path, "what": item.what, "new": item.new} for item in items],
            }
            outcomes.add(report)
            if how.style == "table" and not how.quiet:
                emit("\n".join(_list_lines(path, items)))
    return outcomes.finish()


def _list_lines(path: str, items: list[PrivateItem]) -> list[str]:
    """Return the private items for people, and the command that removes them all."""
    from ..reports.findings import edit_step

    kinds = [Setting(kind) for kind in KINDS if any(item.kind == kind for item in items)]
    if not kinds:
        return [f"{clean(path)}: nothing private is recognised"]
    step = step_lines(edit_step("redact", path, word="redacted", settings=kinds).line)
    head = f"{clean(path)}: {pluralize(len(items), 'private item')}"
    return [head, *(f"  {clean(_line(item))}" for item in items), *step]


def _line(item: PrivateItem) -> str:
    new = "the entry is removed" if item.new is None else repr(item.new)
    where = f"{item.path}: " if item.path else ""
    return f"--{item.kind}  {where}{item.what} -> {new}"
