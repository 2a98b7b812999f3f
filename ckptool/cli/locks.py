"""The lock and hash commands: record the content of a checkpoint, or print its fingerprint."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import TYPE_CHECKING

import click

import ckptool

from ..base.errors import CkptoolError, UnreadableError
from ..base.findings import OTHER_FILES, RANK_SETS
from ..base.globs import Globs
from ..base.text import pluralize, shape_text
from ..formats.checkpoint_search import as_one
from ..reports.rows import UNREADABLE, FileVerdict
from .compare import label
from .fleet import ROWS, Errors, Fleet, fleet_options
from .jobs import attempt, checkpoints_of
from .options import (
    REPORT_FORMATS,
    choosing_keys,
    force_option,
    format_option,
    progress_option,
    quiet_options,
    worst,
)
from .render import clean, emit, emit_lines, problem_lines, say, tell
from .streams import BarUpdate, Outcomes, progress_bar

if TYPE_CHECKING:
    from ..files.write.output import Written
    from ..reports.comparing.fingerprint import HashReport, TensorHash
    from ..reports.comparing.lock import FolderLock, Lock

LOCK_EPILOG = """\b
Examples:
  ckptool lock model.pth -o ckptool.lock.json
  ckptool lock model.pth --content -o ckptool.lock.json
  ckptool validate model.pth --lock ckptool.lock.json
  ckptool lock release/ --content -o release.lock.json
  ckptool validate release/ --lock release.lock.json
"""


@click.command(epilog=LOCK_EPILOG)
@click.option("-o", "--output", type=click.Path(), metavar="FILE", help="The file to write.  [default: stdout]")
@click.option("--content", is_flag=True, help="Also lock the values: a hash per tensor.")
@click.option("--rows", is_flag=True, help="Print a line for each file, with the SHA-256 of its lock, and no lock.")
@force_option
@fleet_options
@quiet_options
def lock(
    paths: tuple[str, ...],
    output: str | None,
    content: bool,
    rows: bool,
    force: bool,
    working: Fleet,
    quiet: bool,
    no_progress: bool,
) -> int:
    """Record the content of a checkpoint, for 'validate --lock': keys, shapes, dtypes, devices, types of entries.

    The output is a small JSON file with one line per tensor, to keep beside the code: the same checkpoint gives the
    same bytes, and a review shows what changed. Of a folder it records each checkpoint by its relative name: a file
    that is missing or new is found, too. Of several paths it records each checkpoint by its path.
    """
    paths = as_one(paths)
    if rows and output is not None:
        raise click.UsageError("--rows go to standard output: -o is for a lock.")
    if not rows and working.since is not None:
        raise click.UsageError("--since leaves files out, and a lock has all of them: it is for --rows.")
    if rows or len(paths) != 1 or working.files_from is not None:
        return _lock_each(paths, output, content, rows, force, working, quiet, no_progress)
    (path,) = paths
    with _bar(path, content and not (quiet or no_progress)) as progress:
        if output is None or output == "-":
            _emit_lock(ckptool.lock(path, content=content, progress=progress), output, quiet)
            return 0
        written = ckptool.write_lock(path, output, content=content, force=force, progress=progress)
    _say_written(path, written, quiet)
    return 0


def _lock_each(
    paths: tuple[str, ...],
    output: str | None,
    content: bool,
    rows: bool,
    force: bool,
    working: Fleet,
    quiet: bool,
    no_progress: bool,
) -> int:
    """Lock every checkpoint of several paths. Write no lock unless all of them can be read."""
    from ..reports.comparing.lock import FOLDER_SCHEMA, write_locks

    working.ordered = working.ordered or not rows
    working.begin("lock", ROWS if rows else "json", {"content": content})
    locks: dict[str, Lock] = {}
    errors, codes = Errors(), set()
    files = working.files(paths, checkpoints_of, str)
    with working.counted(files, "locking", not (quiet or no_progress)) as (items, step):
        work = partial(attempt, partial(_locked, content=content))
        results = working.results(work, items, lambda path, error: (path, error), _lock_verdict)
        with closing(results):
            for item, verdict in results:
                codes.add(verdict.code)
                if step:
                    step(1)
                if item is None:
                    continue
                path, answer = item
                if isinstance(answer, CkptoolError):
                    errors.add(answer)
                elif not rows:
                    locks[os.path.normpath(path).replace(os.sep, "/")] = answer
    errors.say()
    code = worst(codes)
    if errors.count and not rows:
        say(f"no lock was made: {pluralize(errors.count, 'file')} could not be read")
    if rows or code or working.error is not None:
        return code
    if output is None or output == "-":
        _emit_lock({"schema": FOLDER_SCHEMA, "files": locks}, output, quiet)
    else:
        _say_written(pluralize(len(locks), "file"), write_locks(locks, output, force=force), quiet)
    return code


def _emit_lock(lock: Lock | FolderLock, output: str | None, quiet: bool) -> None:
    from ..reports.comparing.lock import lock_text

    if not quiet or output == "-":
        emit(lock_text(lock).rstrip("\n"))


def _say_written(what: str, written: Written, quiet: bool) -> None:
    if not quiet:
        emit(clean(f"{what} -> {written.path}: {written.size:,} bytes"))


def _locked(path: str, *, content: bool) -> Lock:
    from ..reports.comparing.lock import lock_of

    with ckptool.open(path) as checkpoint:
        return lock_of(checkpoint, content=content)


def _lock_verdict(item: tuple[str, Lock | CkptoolError]) -> FileVerdict:
    from hashlib import sha256

    from ..reports.comparing.lock import lock_text

    path, answer = item
    if isinstance(answer, CkptoolError):
        return _not_done(path, answer, "not locked")
    return FileVerdict(path, "locked", 0, hash=sha256(lock_text(answer).encode("ascii")).hexdigest())


def _not_done(path: str, error: CkptoolError, word: str) -> FileVerdict:
    word = UNREADABLE if isinstance(error, UnreadableError) else word
    return FileVerdict(path, word, error.exit_code, getattr(error, "kind", ""), message=error.what)


HASH_EPILOG = """\b
Examples:
  ckptool hash model.pth
  ckptool hash training.pth --key state_dict
  ckptool hash a.pth b.pth --structure
  ckptool hash model.pth --each

\b
What goes in (version 1 of the contract), for each tensor a line of compact JSON:
  [path, kind, dtype, shape, SHA-256 of its elements]
in the order of their bytes; the fingerprint is the SHA-256 of all lines. Elements
are taken in row-major order, little-endian. The path is that of inspect, from the
root of the file or of the state dict that --key names. Container, key order,
devices, compression, strides, sharing and what is not a tensor do not count.
"""


@click.command("hash", epilog=HASH_EPILOG)
@choosing_keys
@click.option("--structure", is_flag=True, help="Hash names, dtypes and shapes only; read no values.")
@click.option("--each", is_flag=True, help="Print the hash of every tensor, one per line.")
@fleet_options
@format_option((*REPORT_FORMATS, ROWS))
@progress_option
def hash_command(
    paths: tuple[str, ...],
    key: str | None,
    only: Globs,
    structure: bool,
    each: bool,
    working: Fleet,
    style: str,
    no_progress: bool,
) -> int:
    """Print a fingerprint of the content: names, shapes, dtypes and values, whatever the container.

    Two files with the same tensors under the same names have the same fingerprint, even if one is legacy, deflated, on
    another device, or in another order. With --key, names are relative to that state dict: a bare state dict (--key .)
    and the same one in a training checkpoint (--key state_dict) agree. --include and --exclude choose the tensors.
    Takes files, folders (searched for checkpoints by content) and globs. JSON is an object for one named file,
    otherwise a list.
    """
    paths = as_one(paths)
    bar = not (structure or no_progress) and working.alone
    work = partial(_hashed, key=key, only=only, structure=structure, each=each, bar=bar)
    outcomes = Outcomes("hash", paths, style, several=working.several(paths))
    working.begin("hash", style, {"key": key, "include": only.include, "exclude": only.exclude, "structure": structure})
    files = working.files(paths, checkpoints_of, str)
    results = working.results(partial(attempt, work), files, lambda path, error: (path, error), _verdict)
    with closing(results):
        for item, verdict in results:
            if item is None:
                outcomes.codes[verdict.code] += 1
                continue
            path, answer = item
            with outcomes.input(path):
                if isinstance(answer, CkptoolError):
                    raise answer
                report, remarks = answer
                for line in remarks:
                    tell(line)
                outcomes.add(report)
                if style == "table" and each:
                    emit_lines([clean(_each(tensor)) for tensor in report["each"]])
                elif style == "table":
                    emit(clean(f"{report['structure' if structure else 'content']}  {path}"))
    return outcomes.finish()


def _verdict(item: tuple[str, tuple[HashReport, list[str]] | CkptoolError]) -> FileVerdict:
    path, answer = item
    if isinstance(answer, CkptoolError):
        return _not_done(path, answer, "not hashed")
    report, _ = answer
    return FileVerdict(path, "hashed", 0, hash=report["content"] or report["structure"])


def _hashed(
    path: str, *, key: str | None, only: Globs, structure: bool, each: bool, bar: bool
) -> tuple[HashReport, list[str]]:
    from ..reports.comparing.fingerprint import hash_report

    with ckptool.open(path) as checkpoint, _bar(path, bar) as progress:
        report = hash_report(checkpoint, key=key, only=only, structure=structure, each=each, progress=progress)
        problems = checkpoint.container.problems
        sets = [f"note: {path}: {item.message}" for item in problems if item.code in (RANK_SETS, OTHER_FILES)]
        return report, [*problem_lines(checkpoint), *sets]


def _each(item: TensorHash) -> str:
    digest = item["hash"] + "  " if item["hash"] else ""
    return f"{digest}{item['dtype']} {shape_text(item['shape'])}  {label(item['path'])}"


def _bar(path: str, wanted: bool) -> AbstractContextManager[BarUpdate]:
    """Return a progress bar for hashing a file."""
    size = os.path.getsize(path) if wanted and os.path.isfile(path) else 0
    return progress_bar(size, "hashing")
