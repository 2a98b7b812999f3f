"""The inputs of a command on many files: paths, and lists of paths."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import chain, islice
from typing import Any, Final, TypeVar, cast

from ..base.addresses import conceal
from ..base.errors import UnreadableError
from ..base.records import NamedTuple
from .options import EVERY, Command, engine_options, list_options
from .terminal import BarUpdate, progress_bar, watched

File = TypeVar("File")

#: Up to this many files are listed before the first is read, so that the progress bar has a total.
COUNTED: Final = 100_000


class FolderFile(str):
    """A non-checkpoint file found in a folder: scanned, but not validated."""


class Inputs(NamedTuple):
    """The input paths of a command line.

    ``files_from`` is a list of further paths. Only the files in the slice ``chosen`` are read.
    """

    paths: tuple[str, ...]
    files_from: str | None = None
    chosen: slice = EVERY

    @property
    def whole(self) -> bool:
        """Whether all files of the paths and nothing else are read."""
        return self.files_from is None and self.chosen == EVERY

    @property
    def several(self) -> bool:
        """Whether the command line may name more than one file."""
        from ..formats.checkpoint_search import names_one_file

        return self.files_from is not None or not names_one_file(self.paths)

    def files(self, expand: Callable[[Sequence[str]], Iterable[File]]) -> Iterator[File | str]:
        """Yield the files that ``expand`` finds for the paths, then the listed files. Listed globs are not expanded."""
        return islice(self._every(expand), self.chosen.start, None, self.chosen.step)

    def _every(self, expand: Callable[[Sequence[str]], Iterable[File]]) -> Iterator[File | str]:
        yield from expand(self.paths)
        if self.files_from is None:
            return
        from ..files.lists import listed_paths

        for path in listed_paths(self.files_from):
            if os.path.isdir(path):
                yield from expand([path])
            else:
                yield conceal(path)

    def checkpoints(self) -> Iterator[str | UnreadableError]:
        """Yield the paths of all checkpoints, with errors in place of unreadable paths."""
        from ..formats.checkpoint_search import find_checkpoints  # imported only to search

        for item in self.files(find_checkpoints):
            yield item if isinstance(item, str | UnreadableError) else item.path

    @contextmanager
    def counted(self, files: Iterator[File], label: str) -> Iterator[tuple[Iterator[File], BarUpdate]]:
        """Show a progress bar, unless ``label`` is "". Yield the files, and a function to call with 1 per file or None.

        Memory does not grow with the number of files: for a list, and beyond ``COUNTED`` files, the bar has no total.
        """
        if not label or not watched():
            yield files, None
            return
        total = -1
        if self.files_from is None:
            first = list(islice(files, COUNTED))
            total = len(first) if len(first) < COUNTED else -1
            files = chain(first, files)
        with progress_bar(total, label, unit="files") as step:
            yield files, step


def input_options(command: Command) -> Command:
    """Add ``list_options`` and ``engine_options``; the command gets ``inputs`` and ``working``."""

    @wraps(command)
    def with_inputs(*args: Any, paths: tuple[str, ...], files_from: str | None, chosen: slice, **options: Any) -> Any:
        return command(*args, inputs=Inputs(paths, files_from, chosen), **options)

    return list_options(engine_options(cast(Command, with_inputs)))
