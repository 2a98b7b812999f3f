"""The commands on several checkpoints, and redact: merge, average, redact."""

from __future__ import annotations

from typing import Any

import click

from .. import api
from ..base.globs import Globs
from ..base.text import pluralize
from ..checkpoint.checkpoint import Checkpoint
from ..edits.redact import KINDS, PrivateItem, find_private
from .editing import Job, edit_all
from .options import choosing, key_option, one_path, paths, writing
from .render import clean, emit, emit_json, failure, say_error

MERGE_EPILOG = """\b
Examples:
  ckptool merge new_head.pth backbone.pth --exclude 'fc.*' -o model.pth
  ckptool merge training.pth ema.pth --entry ema_state_dict=state_dict -o model.pth
"""


@click.command(epilog=MERGE_EPILOG)
@one_path
@click.argument("other", metavar="OTHER", type=click.Path())
@click.option(
    "--entry", "entries", multiple=True, metavar="FROM[=TO]", help="Copy a whole entry of OTHER, by its path."
)
@click.option("--from", "other_key", metavar="PATH", help="Which state dict of OTHER, if it has several.")
@click.option("--no-new", is_flag=True, help="Replace existing keys only; add none.")
@key_option
@choosing
@writing
def merge(
    path: str,
    other: str,
    entries: tuple[str, ...],
    other_key: str | None,
    no_new: bool,
    key: str | None,
    only: Globs,
    **how: Any,
) -> int:
    """Copy the tensors of another checkpoint into this one: existing keys are replaced, others added.

    --include and --exclude select keys of OTHER. A key whose shape differs is refused. With --entry, whole entries
    are copied instead, tensors or not.
    """
    pairs = [(origin, target or origin) for origin, _, target in (text.partition("=") for text in entries)]
    if entries and only:
        raise click.UsageError("--entry takes whole entries: --include and --exclude do not go with it.")
    with api.open(other) as foreign:

        def run(checkpoint: Checkpoint) -> Checkpoint:
            return api.merge(
                checkpoint, foreign, entries=pairs, key=key, other_key=other_key, only=only, add=not no_new
            )

        return edit_all(Job("merge", run), (path,), **how)


AVERAGE_EPILOG = """\b
Examples:
  ckptool average epoch_1.pth epoch_2.pth epoch_3.pth -o average.pth
  ckptool average a.pth b.pth --weights 0.7,0.3 -o mixed.pth
"""


@click.command(epilog=AVERAGE_EPILOG)
@paths
@click.option("--weights", metavar="W,W...", help="One weight per checkpoint, normalized to a sum of 1.")
@click.option("--in", "dtype", type=click.Choice(["float64", "float32"]), default="float64", show_default=True,
              help="The dtype to sum in.")  # fmt: skip
@key_option
@choosing
@writing
def average(
    paths: tuple[str, ...],
    weights: str | None,
    dtype: Any,
    key: str | None,
    only: Globs,
    **how: Any,
) -> int:
    """Average the weights of several checkpoints of one model.

    The output is the first checkpoint with the mean of all in place of its floating-point tensors; integers, and
    everything outside of state dicts, stay as in the first. The mean is computed piece by piece while writing.
    """
    factors = _numbers(weights)
    others = [api.open(path) for path in paths[1:]]

    def run(checkpoint: Checkpoint) -> Checkpoint:
        return api.average([checkpoint, *others], weights=factors, dtype=dtype, key=key, only=only)

    return edit_all(Job("average", run), paths[:1], **how)


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} are no numbers, such as 0.7,0.3", param_hint="--weights") from None


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
    return edit_all(Job("redact", lambda checkpoint: api.redact(checkpoint, kinds, only=only)), paths, **how)


def _list(paths: tuple[str, ...], only: Globs, style: str, quiet: bool) -> int:
    reports, code = [], 0
    for path in paths:
        try:
            with api.open(path) as checkpoint:
                found = find_private(checkpoint, only=only)
        except api.CkptoolError as error:
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
