"""Run a function on many files, one after the other or in parallel, with the engine that the command line names."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial, wraps
from itertools import chain, islice
from typing import Any, Final, TypeVar, cast

from ..base.engines import LOCAL, Ready
from ..base.errors import CkptoolError, EngineError, UnreadableError
from ..files.archives import file_of
from .options import worst
from .render import say_error
from .terminal import Face, face, seen_as
from .working import Working, work_options

Answer = TypeVar("Answer")
Command = TypeVar("Command", bound=Callable[..., Any])

#: Garbage is collected once per this many files.
_TIDY: Final = 1000


def engine_options(command: Command, kind: type[Working] = Working, more: Sequence[str] = ()) -> Command:
    """Add --jobs, --engine and --ordered to a command; it gets them as ``working``, an object of class ``kind``.

    ``kind`` also takes the parameters named in ``more``. A lost engine counts as an input that could not be read.
    """

    @wraps(command)
    def with_engine(*args: Any, jobs: int | None, engine: str, ordered: bool, **options: Any) -> int:
        working = kind(jobs, engine, ordered, **{name: options.pop(name) for name in more})
        code: int = command(*args, working=working, **options)
        working.finish()
        if working.error is None:
            return code
        say_error(working.error)
        return worst((code, working.error.exit_code))

    return cast(Command, work_options(with_engine))


def answers(
    work: Callable[[str], Answer],
    files: Iterable[str | UnreadableError | Ready[Answer]],
    how: Working,
    lost: Callable[[str, CkptoolError], Answer],
) -> Generator[Answer, None, None]:
    """Yield the answer of ``work`` for every file, in input order unless the engine yields answers as they finish.

    ``lost`` makes the answer for an error that stands in place of a file, and for a file whose process died. Errors of
    ``work`` are raised here. When the generator ends, the worker processes have ended. If the engine is lost, the
    generator ends and ``how.error`` holds the error.
    """

    def given(file: UnreadableError | Ready[Answer]) -> Answer:
        return file.answer if isinstance(file, Ready) else lost(file.path, file)

    rest = iter(files)
    # A single file does not need a pool.
    first = [] if how.alone or how.engine != LOCAL else list(islice(rest, 2))
    if how.alone or (how.engine == LOCAL and len(first) < 2):
        for number, file in enumerate(chain(first, rest), 1):
            _tidy(number)
            yield work(file) if isinstance(file, str) else given(file)
        return

    from ..files.engine import each_answer, open_engine  # only several files need an engine

    def died(path: str, error: CkptoolError) -> Answer:
        error.path = path
        return lost(path, error)

    items: Iterable[str | Ready[Answer]] = (
        file if isinstance(file, str) else Ready(given(file)) for file in chain(first, rest)
    )
    with open_engine(how.engine, how.jobs or 0) as engine:
        call = work if how.engine == LOCAL else partial(_as_here, work, face())
        ordered = how.ordered or engine.ordered
        try:
            yield from each_answer(engine, call, items, died, ordered=ordered, size_of=_size)
        except EngineError as error:
            how.error = error


def _as_here(work: Callable[[str], Answer], here: Face, path: str) -> Answer:
    """Do the work in another process, with messages laid out for the terminal of this one."""
    with seen_as(here):
        return work(path)


def _size(path: str) -> int:
    try:
        return os.stat(file_of(path)).st_size
    except OSError:
        return 0


def each_input(
    work: Callable[[str], Answer], files: Iterable[str | UnreadableError], how: Working
) -> Generator[tuple[str, Answer | CkptoolError], None, None]:
    """Yield the path of every file with the answer of ``work``, or with its error."""
    with closing(answers(partial(attempt, work), files, how, lambda path, error: (path, error))) as every:
        yield from every


def attempt(work: Callable[[str], Answer], path: str) -> tuple[str, Answer | CkptoolError]:
    """Return the path with the answer of ``work``, or with its error."""
    try:
        return path, work(path)
    except CkptoolError as error:
        return path, error


def checkpoints_of(paths: Sequence[str]) -> Iterable[str | UnreadableError]:
    """Return the paths of all checkpoints in files, folders and globs; an unreadable path gives an error instead."""
    from ..formats.checkpoint_search import find_checkpoints

    return (item if isinstance(item, UnreadableError) else item.path for item in find_checkpoints(paths))


def _tidy(number: int) -> None:
    """Collect garbage now and then: ``main`` turns the collector off, but indented JSON leaves a few cycles."""
    if number % _TIDY == 0:
        gc.collect()


class FolderFile(str):
    """A non-checkpoint file found in a folder: scanned, but not validated."""
