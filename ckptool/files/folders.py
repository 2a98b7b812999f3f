"""Folders whose files together form a checkpoint: listing them, and opening their files.

Formats get a ``Folder``, not a path, so they never ask the disk themselves.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import closing
from typing import cast

from ..base import lazy
from ..base.errors import UnreadableError
from ..base.steps import is_remote
from .pool import open_pooled
from .sources import Source


class Folder:
    """A folder. ``path`` is its path as the user may type it.

    Names are relative to the folder, with "/" between folders. Names from untrusted files must be among ``names``
    before they are opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def names(self, *, strict: bool = False) -> frozenset[str]:
        """Return the names of the files and folders in it.

        For a folder that cannot be listed, return an empty set, or raise UnreadableError if ``strict``.
        """
        raise NotImplementedError

    def is_folder(self, name: str) -> bool:
        """Return whether a name is a folder's."""
        raise NotImplementedError

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if there is no such file."""
        raise NotImplementedError

    def open(self, name: str) -> Source:
        """Open a file; raise UnreadableError if it is missing or cannot be read."""
        raise NotImplementedError

    def inner(self, name: str) -> Folder:
        """Return a folder in it, whether or not it exists."""
        raise NotImplementedError

    def outer(self) -> Folder:
        """Return the folder that contains it."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Its name in ``outer()``."""
        raise NotImplementedError

    def is_link(self, name: str) -> bool:
        """Return whether a name is a symbolic link; a store has none."""
        return False

    def walk(self, closed: list[UnreadableError] | None = None) -> Iterator[tuple[Folder, list[str], list[str]]]:
        """Yield (folder, names of folders, names of files) for the folder itself and for each folder in it.

        The outer folder comes first. The caller may remove names of folders, or sort them, before the next step. An
        error for each folder that cannot be listed is added to ``closed``. Links to folders are not followed.
        """
        work: list[Folder] = [self]
        while work:
            folder = work.pop()
            try:
                names = sorted(folder.names(strict=True))
            except UnreadableError as error:
                if closed is not None:
                    closed.append(error)
                continue
            folders = [name for name in names if folder.is_folder(name)]
            yield folder, folders, [name for name in names if folder.size(name) is not None]
            work += map(folder.inner, reversed(folders))

    def join(self, *names: str) -> str:
        """Return the path of a file or folder in it."""
        return os.path.join(self.path, *names)

    def read(self, name: str, limit: int) -> bytes:
        """Return the first ``limit`` bytes of a file; raise UnreadableError if it cannot be read."""
        with closing(self.open(name)) as source:
            return source.read(0, limit)


class LocalFolder(Folder):
    """A folder on a disk. Its files stay open from a pool, so there may be any number."""

    def names(self, *, strict: bool = False) -> frozenset[str]:
        try:
            return frozenset(os.listdir(self.path))
        except OSError as error:
            if strict:
                raise UnreadableError(f"it cannot be listed: {error.strerror}", path=self.path) from error
            return frozenset()

    def is_folder(self, name: str) -> bool:
        return os.path.isdir(self.join(name))

    def size(self, name: str) -> int | None:
        try:
            status = os.stat(self.join(name))
        except (OSError, ValueError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def open(self, name: str) -> Source:
        return open_pooled(self.join(name))

    def inner(self, name: str) -> LocalFolder:
        return LocalFolder(self.join(name))

    def outer(self) -> LocalFolder:
        return LocalFolder(os.path.dirname(os.path.realpath(self.path)))

    @property
    def name(self) -> str:
        return os.path.basename(os.path.realpath(self.path))

    def is_link(self, name: str) -> bool:
        return os.path.islink(self.join(name))

    def walk(self, closed: list[UnreadableError] | None = None) -> Iterator[tuple[Folder, list[str], list[str]]]:
        def failed(error: OSError) -> None:
            if closed is not None:
                path = str(error.filename)
                closed.append(UnreadableError(f"it cannot be listed: {error.strerror}", path=path))

        for root, folders, files in os.walk(self.path, onerror=failed):
            yield LocalFolder(root), folders, files


def open_folder(path: str) -> Folder:
    """Return the folder at a path or address, whether or not it exists; "" means the working folder."""
    if is_remote(path):
        return cast(Folder, lazy.module("remote.folder").open_folder(path))
    return LocalFolder(path or os.curdir)


def folder_at(path: str) -> Folder | None:
    """Return the folder at a path, or at an address that may lack its slash; None if no folder is there."""
    if is_remote(path):
        return cast("Folder | None", lazy.module("remote.folder").folder_at(path))
    return LocalFolder(path) if os.path.isdir(path) else None
