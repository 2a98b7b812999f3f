"""The commands that make a file fit for others: sanitize and redact."""

from __future__ import annotations

from typing import Any

import click

import ckptool

from ..base.globs import Globs
from ..base.text import pluralize
from ..checkpoint.checkpoint import Checkpoint
from ..edits.redact import KINDS, PrivateItem, find_private
from .editing import Job, account, edit_all
from .options import choosing, paths, writing
from .render import clean, emit, emit_json, failure, say_error

SANITIZE_EPILOG = """\b
Examples:
  ckptool sanitize training.pth -o training.plain.pth
  ckptool sanitize training.pth --dry-run
  ckptool sanitize whole_model.pth --as-state-dict -o weights.pth
  ckptool sanitize strange.pth --drop-unknown -o plain.pth
  ckptool sanitize fsdp.rank0.pth --local-parts -o part0.pth
"""


@click.command(epilog=SANITIZE_EPILOG)
@paths
@click.option("--as-state-dict", is_flag=True, help="Replace a pickled module by its state dict.")
@click.option("--drop-unknown", is_flag=True, help="Drop what cannot be converted, and name it.")
@click.option("--local-parts", is_flag=True, help="Replace a DTensor or ShardedTensor by the part of its rank.")
@writing
def sanitize(paths: tuple[str, ...], as_state_dict: bool, drop_unknown: bool, local_parts: bool, **how: Any) -> int:
    """Make a checkpoint that plain torch.load(path) of torch 2.6 and later loads, without running it.

    Objects of other classes become dicts of their attributes; numpy scalars become numbers, numpy arrays tensors, paths
    and dates strings, functions and classes their names, and pickle protocol 4 becomes 2. Tensors stay as they are.
    Each change is printed with its path. What has no plain form is refused.
    """

    pickled: dict[str, bool] = {}

    def edit(checkpoint: Checkpoint) -> Checkpoint:
        pickled[checkpoint.path] = checkpoint.pickled
        return ckptool.sanitize(
            checkpoint, as_state_dict=as_state_dict, drop_unknown=drop_unknown, local_parts=local_parts
        )

    def words(report: dict[str, Any]) -> list[str]:
        if report["changed"]:
            return account(report)
        if pickled[report["path"]] and (report["output"] or "").endswith(".safetensors"):
            return ["  nothing to do but to rename it: torch.load reads what ends in .safetensors as safetensors"]
        return ["  nothing to do: torch.load takes it; the output is the input, byte for byte"]

    return edit_all(Job("sanitize", edit, words=words), paths, **how)


REDACT_EPILOG = """\b
Examples:
  ckptool redact training.pth
  ckptool redact training.pth --paths --users -o published.pth
  ckptool redact training.pth --all --exclude model_args -o published.pth
"""


@click.command(epilog=REDACT_EPILOG)
@paths
@click.option("--paths", "take_paths", is_flag=True, help="Shorten absolute paths to their last part.")
@click.option("--users", is_flag=True, help="Replace names of users and hosts by 'user' and 'host'.")
@click.option("--sources", is_flag=True, help="Empty the module sources that old files carry.")
@click.option("--args", "arguments", is_flag=True, help="Remove entries with training arguments.")
@click.option("--all", "everything", is_flag=True, help="All of these.")
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
    **how: Any,
) -> int:
    """Find what a published file should not reveal, and remove what the options name.

    Without --paths, --users, --sources, --args or --all it only lists. --include and --exclude select by path. Read
    the list: no program can recognise everything that is private.
    """
    flags = dict(zip(KINDS, (take_paths, users, sources, arguments)))
    kinds = [kind for kind in KINDS if flags[kind] or everything]
    if not kinds:
        if how["output"] is not None or how["out_dir"] is not None:
            raise click.UsageError("Say what to take out: --all, or --paths, --users, --sources, --args.")
        return _list(paths, only, how["style"], how["quiet"])
    return edit_all(Job("redact", lambda checkpoint: ckptool.redact(checkpoint, kinds, only=only)), paths, **how)


def _list(paths: tuple[str, ...], only: Globs, style: str, quiet: bool) -> int:
    reports, code = [], 0
    for path in paths:
        try:
            with ckptool.open(path) as checkpoint:
                found = find_private(checkpoint, only=only)
        except ckptool.CkptoolError as error:
            say_error(error)
            reports.append(failure("redact", path, error))
            code = max(code, error.exit_code)
            continue
        reports.append({"schema": "ckptool.redact/1", "path": path, "found": [_as_dict(item) for item in found]})
        if style == "table" and not quiet:
            emit("\n".join([_head(path, found), *(f"  {clean(_line(item))}" for item in found), *_way(path, found)]))
    if style != "table" and not quiet:
        emit_json(reports, style, len(paths) > 1)
    return code


def _as_dict(finding: PrivateItem) -> dict[str, Any]:
    return {"kind": finding.kind, "path": finding.path, "what": finding.what, "new": finding.new}


def _head(path: str, found: list[PrivateItem]) -> str:
    kinds = [kind for kind in KINDS if any(item.kind == kind for item in found)]
    if not kinds:
        return f"{clean(path)}: nothing private is recognised"
    return f"{clean(path)}: {pluralize(len(found), 'private matter')}"


def _way(path: str, found: list[PrivateItem]) -> list[str]:
    """The command that takes all of them out."""
    from ..reports.findings import command

    options = [f"--{kind}" for kind in KINDS if any(item.kind == kind for item in found)]
    return [f"  -> {clean(command('redact', path, *options, word='redacted'))}"] if options else []


def _line(finding: PrivateItem) -> str:
    new = "the entry goes" if finding.new is None else repr(finding.new)
    where = f"{finding.path}: " if finding.path else ""
    return f"--{finding.kind}  {where}{finding.what} -> {new}"
