"""A remote folder: one listing, which tells names, sizes and ETags of all files in it."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property, partial
from typing import Final

from ..base import addresses
from ..base.addresses import conceal
from ..base.errors import CkptoolError, UnreadableError
from ..base.lazy import regex
from ..base.text import quoted
from ..files.folders import Folder
from .source import Allowance, Blocks, RemoteSource, is_file, meant, open_remote, open_store
from .store import Facts, Failed, Recent, Settings, Store, at_once, current, error_of, together

#: Paths that lead to another folder, or that a path on the disk cannot have.
_ODD: Final = regex(r"(\A|/)\.{0,2}(/|\Z)")
#: Files whose ends are asked for at the same time: at most 32 MiB, of 40 MiB in ``LIMITS.remote_bytes``.
_GROUP: Final = 64
#: Addresses where there is a folder, and no file of the same name.
_ALONE: Final[Recent[bool]] = Recent(1000, seconds=30)
#: Folders that somebody asked for.
_OPENED: Final[Recent[RemoteFolder]] = Recent(64, seconds=2)


def open_folder(address: str, settings: Settings | None = None) -> RemoteFolder:
    """Return the folder at an address, whether or not it exists. It is listed when it is first asked.

    Without ``settings``, ``current`` tells them, and a folder that was opened just before is returned again.
    """
    if settings is not None:
        return RemoteFolder(meant(address), settings, Allowance(settings.max_download))
    known = meant(address).rstrip("/")
    return _OPENED.get(known) or _OPENED.keep(known, open_folder(address, current()))


def folder_at(address: str) -> RemoteFolder | None:
    """Return the folder at an address, which may lack its slash; None if it is empty, or there is a file.

    Raises UnreadableError if it can only be a folder, and cannot be listed, or if the server fails.
    """
    folder = open_folder(address)
    if not _ALONE.get(conceal(address)) and is_file(address):
        return None
    try:
        return folder if folder.files and _ALONE.keep(conceal(address), True) else None
    except UnreadableError as error:
        parts = addresses.parse(meant(address))
        if error.of_server or parts.path.endswith("/") or not parts.path:
            raise
        return None


class RemoteFolder(Folder):
    """The files below an address, as they were when it was listed; reading one that was replaced fails.

    Files whose names differ in digits alone, such as shards, are asked for together once one of them is read.
    """

    def __init__(
        self, address: str, settings: Settings, allowance: Allowance, listed: dict[str, Facts] | None = None
    ) -> None:
        super().__init__(conceal(address))
        self._address, self._settings, self._allowance, self._given = address, settings, allowance, listed
        self._blocks: dict[str, Blocks] = {}
        self._begun: set[str] = set()

    @cached_property
    def files(self) -> dict[str, Facts]:
        """The facts of all files by their paths in the folder, with "/". Raises UnreadableError without a listing.

        Empty objects that stand for folders are left out; another object with the name of a folder is an error.
        """
        for path in self._folders & self._listed.keys():
            if self._listed[path].size:
                raise error_of(Failed("both"), addresses.join(self._address, path))
        return {path: facts for path, facts in self._listed.items() if path not in self._folders}

    @cached_property
    def _folders(self) -> set[str]:
        paths = (path.split("/") for path in self._listed)
        return {"/".join(path[:end]) for path in paths for end in range(len(path))}

    @cached_property
    def _place(self) -> tuple[Store, str]:
        """The store, and the key of the folder without slashes at its ends."""
        store, key = open_store(self._address, self._settings)
        return store, key.strip("/")

    @cached_property
    def _listed(self) -> dict[str, Facts]:
        """What is below the address, also empty objects that stand for folders."""
        listed = self._ask() if self._given is None else self._given
        if listed:
            addresses.found_folder(self.path)
        if listed and self._given is not None:
            _ALONE.keep(self.path, True)  # a file of its name would have failed in the folder around it
        return listed

    def _ask(self) -> dict[str, Facts]:
        store, prefix = self._place
        start = len(prefix) + 1 if prefix else 0
        try:
            spend = partial(self._allowance.spend, path=self.path)
            listed = {facts.key[start:]: facts for facts in together([partial(store.list, prefix, spend)])[0]}
            if any(not facts.key.startswith(prefix) for facts in listed.values()):
                raise Failed("answer")
            itself = listed.pop("", None)
            if itself and itself.size:
                raise Failed("both")
        except Failed as failed:
            raise error_of(failed, self._address) from None
        odd = [path for path in listed if _ODD.search(path) or addresses.parse(f"s3://b/{path}").query]
        if odd:
            error = error_of(Failed("key"), self._address)
            error.what += f": {quoted(odd[0])}"
            raise error
        return listed

    def names(self, *, strict: bool = False) -> frozenset[str]:
        """Return the names of the files and folders in it; none for a web server, unless ``strict``.

        Raises UnreadableError if it cannot be listed.
        """
        return frozenset(path.partition("/")[0] for path in (() if self._on_web and not strict else self.files))

    def is_folder(self, name: str) -> bool:
        return not self._on_web and bool(self.files) and name in self._folders

    def size(self, name: str) -> int | None:
        if self._on_web:
            with suppress(UnreadableError):
                return open_remote(addresses.join(self._address, name), self._settings).size
            return None
        return self.files[name].size if name in self.files else None

    @property
    def _on_web(self) -> bool:
        """Whether it is on a web server, which lists no files: each is asked for by its name."""
        return addresses.parse(self._address).scheme in ("http", "https")

    def open(self, name: str) -> RemoteSource:
        """Open a file without a request: the first read asks for both its ends."""
        if self._on_web or name.startswith("../"):  # a file around a checkpoint
            return open_remote(addresses.join(self._address, name), self._settings)
        if name not in self.files:
            raise UnreadableError("no such file", path=self.join(name))
        source = self._source(name)
        source.start = lambda: self._begin(name)
        return source

    def _source(self, name: str) -> RemoteSource:
        blocks = self._blocks.setdefault(name, Blocks(self._allowance))
        address = addresses.join(self._address, name)
        return RemoteSource(self._place[0], address, self._settings, self._allowance, self.files[name], blocks)

    @cached_property
    def _groups(self) -> dict[str, list[str]]:
        """The files whose names differ in digits alone, by what is the same in their names."""
        groups: dict[str, list[str]] = {}
        for path in sorted(self.files):
            groups.setdefault(_alike(path), []).append(path)
        return groups

    def _begin(self, name: str) -> None:
        """Ask for the ends of a file, and of the files like it that nobody asked for yet."""
        others = [] if name in self._begun else self._groups[_alike(name)]
        batch = [name, *(other for other in others if other not in self._begun and other != name)][:_GROUP]
        self._begun.update(batch)

        def begin(each: str) -> None:
            try:
                self._source(each).begin()
            except CkptoolError:
                if each == name:  # errors of others are raised again when these are read
                    raise

        at_once(batch, begin)

    def inner(self, name: str) -> RemoteFolder:
        listed = {path[len(name) + 1 :]: facts for path, facts in self.files.items() if path.startswith(f"{name}/")}
        return RemoteFolder(addresses.join(self._address, name), self._settings, self._allowance, listed)

    def outer(self) -> RemoteFolder:
        return RemoteFolder(addresses.parent(self._address), self._settings, self._allowance)

    @property
    def name(self) -> str:
        return addresses.name(self._address)

    def join(self, *names: str) -> str:
        return conceal(addresses.join(self._address, *names))


def _alike(name: str) -> str:
    """Return the name of a file with 0 for every number; an index belongs to its shards."""
    shard = regex(r"(\.safetensors|\.bin)\.index\.json$").sub(r"-0-of-0\1", name)
    return regex(r"\d+").sub("0", shard)
