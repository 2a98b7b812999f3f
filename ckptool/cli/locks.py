"""The lock and hash commands: record the content of a checkpoint, or print its fingerprint."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import click

import ckptool

from ..base.findings import OTHER_FILES, RANK_SETS
from ..base.globs import Globs
from ..base.steps import ONE_SAVE
from ..base.text import pluralize, shape_text
from ..formats.checkpoint_search import as_one, expanded
from ..reports.file_rows import FileVerdict
from .compare import label
from .help import GroupedCommand
from .inputs import Inputs, input_options
from .options import (
    REPORT_FORMATS,
    AnyPath,
    Workers,
    choosing_keys,
    force_option,
    format_option,
    no_values_option,
    quiet_option,
)
from .render import clean, emit, problem_lines, say
from .runner import KEPT, ROWS, WHOLE, Answer, ErrorLog, FileCommand, Totals, failed, report_text, run
from .terminal import progress_bar, watched, work_size

if TYPE_CHECKING:
    from ..files.write.output import Written
    from ..reports.comparing.fingerprint import TensorHash
    from ..reports.comparing.lock import FolderLock, Lock


@click.command(cls=GroupedCommand)
@click.option("-o", "--output", type=AnyPath(), metavar="OUT", help="The file to write.  [default: stdout]")
@click.option("--content", is_flag=True, help="Also lock the values: a hash per tensor.")
@force_option
@input_options
@format_option(("json", ROWS), "json")
@quiet_option
def lock(
    inputs: Inputs, output: str | None, content: bool, force: bool, working: Workers, style: str, quiet: bool
) -> int:
    """Record the content of a checkpoint, for 'validate --lock': keys, shapes, dtypes, devices, types of entries.

    The output is a small JSON file with one line per tensor, to keep beside the code: the same checkpoint gives the
    same bytes, and a review shows what changed. Of a folder it records each checkpoint by its relative name: a file
    that is missing or new is found, too. Of several paths it records each checkpoint by its path. --format rows prints
    a line for each file instead, with the SHA-256 of its lock.
    """
    rows = style == ROWS
    inputs = inputs._replace(paths=as_one(expanded(inputs.paths)))
    if rows and output is not None:
        raise click.UsageError("--format rows prints to standard output: -o is for a lock.")
    not_locked = partial(failed, "lock", WHOLE, word="not locked")
    if rows or len(inputs.paths) != 1 or not inputs.whole:
        return run(
            FileCommand("lock", ROWS if rows else WHOLE, partial(_locked, content=content, rows=rows), not_locked),
            inputs,
            inputs.checkpoints(),
            working,
            bar="" if quiet else "locking",
            errors=ErrorLog(KEPT),
            finish=Totals.code if rows else partial(_end_lock, output, force, quiet, working),
        )
    (path,) = inputs.paths
    with progress_bar(work_size(path) if content and watched() else 0, "hashing", not quiet) as progress:
        if output is None or output == "-":
            _emit_lock(ckptool.lock(path, content=content, progress=progress), output, quiet)
            return 0
        written = ckptool.write_lock(path, output, content=content, force=force, progress=progress)
    _say_written(path, written, quiet)
    return 0


def _locked(path: str, *, content: bool, rows: bool) -> Answer:
    from hashlib import sha256

    from ..reports.comparing.lock import lock_text, whole_lock

    with ckptool.open(path) as checkpoint:
        lock = whole_lock(checkpoint, content)
    if not rows:
        return Answer(FileVerdict(path, "locked", 0), data=(os.path.normpath(path).replace(os.sep, "/"), lock))
    return Answer(FileVerdict(path, "locked", 0, hash=sha256(lock_text(lock).encode("ascii")).hexdigest()))


def _end_lock(output: str | None, force: bool, quiet: bool, working: Workers, totals: Totals) -> int:
    """Write the lock of all checkpoints, or none unless all of them could be read."""
    from ..reports.comparing.lock import FOLDER_SCHEMA, write_locks

    totals.errors.close()
    if totals.errors.count:
        say(f"no lock was made: {pluralize(totals.errors.count, 'file')} could not be read")
    if totals.code() or working.error is not None:
        return totals.code()
    locks: dict[str, Lock] = dict(totals.data)
    if output is None or output == "-":
        _emit_lock({"schema": FOLDER_SCHEMA, "files": locks}, output, quiet)
    else:
        _say_written(pluralize(len(locks), "file"), write_locks(locks, output, force=force), quiet)
    return 0


def _emit_lock(lock: Lock | FolderLock, output: str | None, quiet: bool) -> None:
    from ..reports.comparing.lock import lock_text

    if not quiet or output == "-":
        emit(lock_text(lock).rstrip("\n"))


def _say_written(what: str, written: Written, quiet: bool) -> None:
    if not quiet:
        emit(clean(f"{what} -> {written.path}: {written.size:,} bytes"))


@click.command("hash", cls=GroupedCommand)
@choosing_keys
@no_values_option
@click.option("--each", is_flag=True, help="Print the hash of every tensor, one per line.")
@input_options
@format_option((*REPORT_FORMATS, ROWS))
def hash_command(
    inputs: Inputs, key: str | None, only: Globs, no_values: bool, each: bool, working: Workers, style: str
) -> int:
    """Print a fingerprint of the content: names, shapes, dtypes and values, whatever the container.

    Two files with the same tensors under the same names have the same fingerprint, even if one is legacy, deflated, on
    another device, or in another order. With --key, names are relative to that state dict: a bare state dict (--key .)
    and the same one in a training checkpoint (--key state_dict) agree. --include and --exclude choose the tensors.
    Takes files, folders (searched for checkpoints by content) and globs. JSON is an object for one named file,
    otherwise a list.

    Exit 1: copies of a tensor in several files differ, and the fingerprint is made of the first ones.
    """
    inputs = inputs._replace(paths=as_one(inputs.paths))
    own_bar = not no_values and working.alone
    return run(
        FileCommand(
            "hash",
            style,
            partial(_hashed, key=key, only=only, no_values=no_values, each=each, style=style, own_bar=own_bar),
            partial(failed, "hash", style, word="not hashed"),
        ),
        inputs,
        inputs.checkpoints(),
        working,
    )


def _hashed(
    path: str, *, key: str | None, only: Globs, no_values: bool, each: bool, style: str, own_bar: bool
) -> Answer:
    how: dict[str, Any] = {"key": key, "no_values": no_values, "each": each, **only.patterns}
    with ckptool.open(path) as checkpoint, progress_bar(checkpoint.source.size, "hashing", own_bar) as progress:
        report = ckptool.hash(checkpoint, progress=progress, **how)
        problems = checkpoint.container.problems
        sets = [f"note: {path}: {item.message}" for item in problems if item.code in (RANK_SETS, OTHER_FILES)]
        remarks = [*problem_lines(checkpoint), *sets]
    text = report_text(report, style)
    if style == "table":
        fingerprint = report["structure" if no_values else "content"]
        text = "\n".join(clean(_each(tensor)) for tensor in report["each"]) if each else clean(f"{fingerprint}  {path}")
    unequal = bool(report.get("unequal_copies"))
    if unequal:
        remarks.append(f"note: {path}: the fingerprint is made of the first copies; {ONE_SAVE}")
    verdict = FileVerdict(path, "hashed", int(unequal), hash=report["content"] or report["structure"])
    return Answer(verdict, text, remarks=tuple(remarks))


def _each(item: TensorHash) -> str:
    digest = item["hash"] + "  " if item["hash"] else ""
    return f"{digest}{item['dtype']} {shape_text(item['shape'])}  {label(item['path'])}"
