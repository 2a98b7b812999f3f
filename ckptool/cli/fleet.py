"""Commands over very many files: path lists, a journal of files already read, a row per file, and totals."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial, wraps
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

import click

from .. import __version__
from ..base.engines import Ready
from ..base.errors import CkptoolError, UnreadableError
from ..base.text import pluralize
from ..formats.checkpoint_search import names_one_file
from ..reports.rows import UNREADABLE, FileVerdict, Mark
from .jobs import Command, FolderFile, answers, engine_options
from .options import InputPath
from .render import emit, flush, say, say_error, tell, to_json
from .streams import BarUpdate, progress_bar
from .terminal import watched
from .working import Working

if TYPE_CHECKING:
    from ..files.write.journal import Journal

Answer = TypeVar("Answer")
File = TypeVar("File")

#: The output format with one row per file.
ROWS: Final = "rows"
#: Errors printed at the end; further errors are only counted.
KEPT: Final = 1000
#: Entries of a journal indexed in one step.
_BLOCK: Final = 10_000
#: Memory for the index of a journal, in KiB; the rest of the index is on the disk.
_CACHE: Final = 16_384
#: Up to this many files are listed before the first is read, so that the progress bar has a total.
COUNTED: Final = 100_000


class _Read(NamedTuple):
    """An answer and the stamp of its file, taken before the read; or the verdict that a journal recorded."""

    mark: Mark
    answer: Any
    recorded: FileVerdict | None = None


class Fleet(Working):
    """How a command works through very many files. Its memory does not grow with their number."""

    def __init__(
        self, jobs: int | None, engine: str, ordered: bool, files_from: str | None, null: bool, since: str | None
    ) -> None:
        super().__init__(jobs, engine, ordered)
        if null and files_from is None:
            raise click.UsageError("--null is for --files-from.")
        self.files_from, self.since = files_from, since
        self._null = null
        self._command = self._options = ""
        self._rows = False
        self._verdicts: Counter[str] = Counter()
        self._recorded = 0

    def begin(self, command: str, style: str, options: Mapping[str, Any], files: Iterable[str] = ()) -> None:
        """Record what the verdicts depend on: the options, and the files that options name."""
        self._command, self._rows = command, style == ROWS
        if self._rows or self.since is not None:
            from ..reports.rows import options_digest

            self._options = options_digest(command, options, files)

    @contextmanager
    def counted(self, files: Iterator[File], label: str, wanted: bool) -> Iterator[tuple[Iterator[File], BarUpdate]]:
        """Show a progress bar. Yield the files, and a function to call with 1 per file, or None without a bar."""
        if not wanted or not watched():
            yield files, None
            return
        if self.files_from is not None:
            from ..files.lists import listed_count

            total = listed_count(self.files_from, self._null)
        else:
            first = list(islice(files, COUNTED))
            total = len(first) if len(first) < COUNTED else -1
            files = chain(first, files)
        with progress_bar(total, label, unit="files") as step:
            yield files, step

    def several(self, paths: Sequence[str]) -> bool:
        """Return whether the command line may name more than one file."""
        return self.files_from is not None or not names_one_file(paths)

    def files(
        self, paths: Sequence[str], expand: Callable[[Sequence[str]], Iterable[File]], single: Callable[[str], File]
    ) -> Iterator[File]:
        """Yield the files that ``expand`` finds for the paths, then the listed files. Listed globs are not expanded."""
        yield from expand(paths)
        if self.files_from is None:
            return
        from ..files.lists import listed_paths

        for path in listed_paths(self.files_from, self._null):
            if os.path.isdir(path):
                yield from expand([path])
            else:
                yield single(path)

    def results(
        self,
        work: Callable[[str], Answer],
        files: Iterable[str | UnreadableError | Ready[Answer]],
        lost: Callable[[str, CkptoolError], Answer],
        judge: Callable[[Answer], FileVerdict],
    ) -> Generator[tuple[Answer | None, FileVerdict], None, None]:
        """Yield the answer of ``work`` and the verdict of ``judge`` for every file.

        The answer is None for a file that has not changed since the journal recorded its verdict.
        """
        with Known(self.since, self._is_current) as known:
            marks = self._rows or self.since is not None
            items = (self._item(file, known) for file in files)
            every = answers(partial(_read, work, marks), items, self, lambda path, error: _given(lost(path, error)))
            with closing(every):
                for item in every:
                    verdict = item.recorded or judge(item.answer)
                    self._verdicts[verdict.verdict] += 1
                    if item.recorded is not None:
                        self._recorded += 1
                    elif marks:
                        self._record(item.mark, verdict, known)
                    yield None if item.recorded is not None else item.answer, verdict

    def _item(self, file: str | UnreadableError | Ready[Any], known: Known) -> str | UnreadableError | Ready[_Read]:
        if isinstance(file, Ready):
            return Ready(_given(file.answer))
        if isinstance(file, UnreadableError):
            return file
        recorded = known.find(file, self._options_of(file))
        return file if recorded is None else Ready(_given(None, recorded))

    def _options_of(self, path: str) -> str:
        """Return the digest of the options; a ``FolderFile`` gets a mark, because it is judged by other rules."""
        return self._options + "-" * isinstance(path, FolderFile)

    def _is_current(self, value: Mapping[str, Any]) -> bool:
        """Return whether a journal entry holds a verdict of this command, with this version and these options."""
        return (
            value.get("command") == self._command
            and value.get("version") == __version__
            and str(value.get("options")).rstrip("-") == self._options
            and value.get("verdict") != UNREADABLE
        )

    def _record(self, mark: Mark, verdict: FileVerdict, known: Known) -> None:
        from ..reports.rows import file_row

        row = file_row(self._command, __version__, self._options_of(verdict.path), mark, verdict)
        if self._rows:
            emit(to_json(row, None))
            flush()
        known.add(row)

    def finish(self) -> None:
        """Print the totals to stderr, if the command may read very many files."""
        if self.files_from is None and self.since is None and not self._rows:
            return
        files = sum(self._verdicts.values())
        counts = ", ".join(f"{count:,} {word}" for word, count in self._verdicts.most_common())
        again = f"; {self._recorded:,} not read again (--since)" if self._recorded else ""
        tell(f"{pluralize(files, 'file')}{': ' * bool(counts)}{counts}{again}")


def _read(work: Callable[[str], Any], marks: bool, path: str) -> _Read:
    """Do the work on a file; if ``marks``, stamp the file first."""
    if not marks:
        return _given(work(path))
    from ..reports.rows import mark_of, settled

    mark = settled(mark_of(path))
    return _Read(mark, work(path))


def _given(answer: Any, recorded: FileVerdict | None = None) -> _Read:
    return _Read(Mark(), answer, recorded)


class Errors:
    """Collects errors to print at the end. Beyond ``KEPT`` errors it only counts."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[CkptoolError] = []

    def add(self, error: CkptoolError) -> None:
        self.count += 1
        if len(self._first) < KEPT:
            self._first.append(error)

    def say(self) -> None:
        """Print the collected errors to stderr."""
        for error in self._first:
            say_error(error)
        if self.count > len(self._first):
            say(f"{self.count - len(self._first):,} more could not be read: --format jsonl or rows says why")


class Known:
    """The journal of ``--since``, with an index on the disk: a million entries take 16 MB of memory."""

    def __init__(self, path: str | None, is_current: Callable[[Mapping[str, Any]], bool]) -> None:
        self._path, self._is_current = path, is_current
        self._journal: Journal | None = None
        self._index: Any = None

    def __enter__(self) -> Known:
        if self._path is None:
            return self
        import sqlite3  # only --since needs it

        from ..files.write.journal import Journal
        from ..reports.rows import SCHEMA

        self._journal = Journal(self._path, SCHEMA)
        # SQLite keeps a database without a name in a temporary file, which it deletes with the connection.
        self._index = sqlite3.connect("", isolation_level=None)
        for setting in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_CACHE}", "temp_store=FILE"):
            self._index.execute(f"PRAGMA {setting}")
        self._index.execute(
            "CREATE TABLE entries (path BLOB, options TEXT, begin INTEGER, end INTEGER, PRIMARY KEY (path, options))"
            " WITHOUT ROWID"
        )
        self._index.execute("BEGIN")
        damaged = 0
        for entry in self._journal.entries():
            if entry.value is None:
                damaged += 1
            elif self._is_current(entry.value) and isinstance(entry.value.get("path"), str):
                place = os.fsencode(entry.value["path"]), entry.value["options"], entry.begin, entry.end
                self._index.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", place)
        self._index.execute("COMMIT")
        if damaged:
            tell(f"ckptool: {self._path}: {pluralize(damaged, 'line')} cannot be read: their files are read again")
        return self

    def __exit__(self, *_: object) -> None:
        if self._journal is not None:
            self._index.close()
            self._journal.close()

    def find(self, path: str, options: str) -> FileVerdict | None:
        """Return the recorded verdict on a file, or None if the file is new to the journal or has changed."""
        if self._journal is None:
            return None
        from ..reports.rows import mark_of, mark_recorded, verdict_recorded

        query = "SELECT begin, end FROM entries WHERE path = ? AND options = ?"
        place = self._index.execute(query, (os.fsencode(path), options)).fetchone()
        value = self._journal.entry_at(*place) if place else None
        if value is None:
            return None
        mark = mark_of(path)
        same = mark.mtime_ns >= 0 and mark == mark_recorded(value)
        return verdict_recorded(value) if same else None

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row to the journal, if there is one."""
        if self._journal is not None:
            self._journal.add(row)


def fleet_options(command: Command) -> Command:
    """Add PATH, --files-from, --null, --since and ``engine_options``; the command gets ``paths`` and ``working``."""

    @wraps(command)
    def with_paths(*args: Any, paths: tuple[str, ...], working: Fleet, **options: Any) -> int:
        if not paths and working.files_from is None:
            context = click.get_current_context()
            raise click.MissingParameter(
                ctx=context, param=next(p for p in context.command.params if p.name == "paths")
            )
        code: int = command(*args, paths=paths, working=working, **options)
        return code

    lists = "Read a list of paths from a file, - for standard input: a line each, and none is a pattern."
    null = "The list has NUL between paths, as of find -print0."
    since = "Skip files that are unchanged since they were added to this journal; add those that are read."
    option: Any = engine_options(with_paths, Fleet, ("files_from", "null", "since"))
    option = click.option("--since", type=click.Path(), metavar="JOURNAL", help=since)(option)
    option = click.option("-0", "--null", is_flag=True, help=null)(option)
    option = click.option("--files-from", type=click.Path(), metavar="FILE", help=lists)(option)
    return cast(Command, click.argument("paths", nargs=-1, metavar="PATH...", type=InputPath())(option))
