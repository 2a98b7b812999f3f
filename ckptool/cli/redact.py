"""The redact command: find and remove what a published file should not reveal."""

from __future__ import annotations

from functools import partial
from typing import Literal

import click

import ckptool

from ..base.globs import Globs
from ..base.records import TypedDict
from ..base.steps import Step
from ..base.text import pluralize
from ..edits.pipeline import Call, applied
from ..edits.redact import KINDS, Kind, parse_kinds, private_and_left
from ..edits.table import EDITS
from .editing import EditRequest, edit_all
from .edits import Ordered, step_option, take_bare
from .options import Workers, Writing, choosing, paths, writing
from .render import clean, step_lines
from .runner import Answer, FileCommand, reported, run_each


class PrivateReport(TypedDict):
    """A private item: ``new`` is the text that would replace it, or None if the whole entry would be removed."""

    kind: Kind
    path: str
    what: str
    new: str | None


class PrivateReports(TypedDict):
    """``ckptool.redact/1`` when redact only lists private items; ``left`` says where something may stay."""

    schema: Literal["ckptool.redact/1"]
    path: str
    found: list[PrivateReport]
    left: list[str]


@click.command(cls=Ordered)
@paths
@step_option("redact")
@choosing
@writing
def redact(paths: tuple[str, ...], redact: tuple[str, ...], only: Globs, how: Writing, typed: object) -> int:
    """Find what a published file should not reveal, and remove what --redact names.

    Without --redact it only lists. --include and --exclude select by path. Read the list: no program can recognise
    everything that is private.
    """
    if not redact:
        if how.output is not None or how.out_dir is not None:
            message = f"Say what to remove: --redact all, or some of {', '.join(KINDS)}."
            raise click.UsageError(message)
        style = "quiet" if how.quiet else how.style
        return run_each(FileCommand("redact", style, partial(_list, only=only, style=style)), paths, Workers())
    named = {kind for words in redact for kind in parse_kinds(words)}
    kinds = [kind for kind in KINDS if kind in named]
    edits = [Call("redact", {"kinds": kinds, **only.patterns})]
    return edit_all(EditRequest("redact", partial(applied, edits=edits)), paths, how)


take_bare(redact, EDITS["redact"].parameters[0])


def _list(path: str, *, only: Globs, style: str) -> Answer:
    """List the private items in an input."""
    with ckptool.open(path) as checkpoint:
        items, left = private_and_left(checkpoint, only=only)
    found: list[PrivateReport] = [
        {"kind": item.kind, "path": item.path, "what": item.what, "new": item.new} for item in items
    ]
    report: PrivateReports = {"schema": "ckptool.redact/1", "path": path, "found": found, "left": left}
    return reported(report, style, _list_lines)


def _list_lines(report: PrivateReports) -> list[str]:
    """Return the private items for people, and the command that removes them all."""
    from ..reports.edit_steps import edit_step

    path, items, left = report["path"], report["found"], [f"  left: {clean(text)}" for text in report["left"]]
    kinds = [kind for kind in KINDS if any(item["kind"] == kind for item in items)]
    if not kinds:
        return [f"{clean(path)}: nothing private is recognised{' that redact changes' if left else ''}", *left]
    step = step_lines(edit_step("redact", path, word="redacted", steps=[Step("redact", ",".join(kinds))]).line)
    head = f"{clean(path)}: {pluralize(len(items), 'private item')}"
    return [head, *(f"  {clean(_line(item))}" for item in items), *left, *step]


def _line(item: PrivateReport) -> str:
    new = "the entry is removed" if item["new"] is None else repr(item["new"])
    where = f"{item['path']}: " if item["path"] else ""
    return f"{item['kind']}  {where}{item['what']} -> {new}"
