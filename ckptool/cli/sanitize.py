"""The commands that prepare a file for others: sanitize and redact."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypedDict

import click

import ckptool

from ..base.globs import Globs
from ..base.text import pluralize
from ..checkpoint.checkpoint import Checkpoint
from ..edits.redact import KINDS, Kind, PrivateItem, find_private
from .edit_report import EditReport, change_lines
from .editing import Job, WithFields, edit_all
from .many.output import Outcomes
from .options import Writing, choosing, paths, writing
from .render import clean, emit, step_lines

SANITIZE_EPILOG = """\b
Examples:
  ckptool sanitize training.pth -o training.plain.pth
  ckptool sanitize training.pth --dry-run
  ckptool sanitize whole_model.pth --as-state-dict -o weights.pth
  ckptool sanitize strange.pth --drop-unknown -o plain.pth
  ckptool sanitize strange.pth --drop 'state_dict["fc.weight"]' -o plain.pth
  ckptool sanitize fsdp.rank0.pth --local-parts -o part0.pth
"""


@click.command(epilog=SANITIZE_EPILOG)
@paths
@click.option("--as-state-dict", is_flag=True, help="Replace a pickled module by its state dict.")
@click.option("--drop-unknown", is_flag=True, help="Drop what cannot be converted and holds no tensors, and name it.")
@click.option("--drop", multiple=True, metavar="PATH", help="Drop this too if it cannot be converted; repeatable.")
@click.option("--local-parts", is_flag=True, help="Replace a DTensor or ShardedTensor by the part of its rank.")
@writing
def sanitize(
    paths: tuple[str, ...],
    as_state_dict: bool,
    drop_unknown: bool,
    drop: tuple[str, ...],
    local_parts: bool,
    how: Writing,
) -> int:
    """Make a checkpoint that plain torch.load(path) of torch 2.6 and later loads, without running it.

    Objects of other classes become dicts of their attributes; numpy scalars become numbers, numpy arrays tensors, paths
    and dates strings, functions and classes their names, and pickle protocol 4 becomes 2. Tensors stay as they are.
    Each change is printed with its path. What has no plain form is refused. An object that holds values of tensors is
    never dropped unless --drop names its path.
    """

    options = {"as_state_dict": as_state_dict, "drop_unknown": drop_unknown, "drop": drop, "local_parts": local_parts}
    return edit_all(Job("sanitize", partial(_sanitized, options=options), lines=_sanitize_lines), paths, how)


class SanitizeReport(EditReport):
    """``ckptool.sanitize/1``: ``pickled`` is true if the input holds a pickle."""

    pickled: bool


def _sanitized(checkpoint: Checkpoint, options: dict[str, Any]) -> WithFields:
    return WithFields(ckptool.sanitize(checkpoint, **options), {"pickled": checkpoint.pickled})


def _sanitize_lines(report: SanitizeReport) -> list[str]:
    if report["changed"]:
        return change_lines(report)
    if report["pickled"] and (report["output"] or "").endswith(".safetensors"):
        return ["  nothing to do, except to rename it: torch.load reads a file named .safetensors as safetensors"]
    return ["  nothing to do: torch.load loads it; the output is the input, byte for byte"]


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
    return edit_all(Job("redact", partial(ckptool.redact, kinds=kinds, **only.patterns)), paths, how)


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

    options = [f"--{kind}" for kind in KINDS if any(item.kind == kind for item in items)]
    if not options:
        return [f"{clean(path)}: nothing private is recognised"]
    step = step_lines(edit_step("redact", path, *options, word="redacted").line)
    head = f"{clean(path)}: {pluralize(len(items), 'private item')}"
    return [head, *(f"  {clean(_line(item))}" for item in items), *step]


def _line(item: PrivateItem) -> str:
    new = "the entry is removed" if item.new is None else repr(item.new)
    where = f"{item.path}: " if item.path else ""
    return f"--{item.kind}  {where}{item.what} -> {new}"
