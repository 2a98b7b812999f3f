"""A remote folder: one listing, which tells names, sizes and ETags of all files in it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Final

from ..base import addresses
from ..base.addresses import conceal, reveal
from ..base.errors import CkptoolError, UnreadableError
from ..base.lazy import regex
from ..files.folders import Folder
from .source import Allowance, Blocks, RemoteSource, is_file, meant, open_remote, open_store
from .store import Facts, Failed, Recent, Settings, Store, alone, at_once, current, error_of

_DIGITS: Final = regex(r"\d+")
#: Paths that lead to another folder, or that a path on the disk cannot have.
_ODD: Final = regex(r"(\A|/)\.{0,2}(/|\Z)")
_INDEX: Final = regex(r"(\.safetensors|\.bin)\.index\.json$")
#: Files whose ends are asked for at the same time: they take half of the memory for remote files.
_GROUP: Final = 64
#: Folders that somebody asked for, and those that are known to exist.
_OPENED: Final[Recent[RemoteFolder]] = Recent(64, seconds=2)
_FOUND: Final[Recent[RemoteFolder]] = Recent(64, seconds=2)


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
    if found := _FOUND.get(reveal(address)):
        return found
    if is_file(address):
        return None
    folder = open_folder(address)
    try:
        return _FOUND.keep(reveal(address), folder) if folder.files else None
    except UnreadableError as error:
        parts = addresses.parse(meant(address))
        if error.of_server or parts.path.endswith("/") or not parts.path:
            raise
        return None


def near(address: str) -> str:
    """Return the address of the file beside a missing one that has a similar name, or ""."""
    from ..base.nearest import nearest_file  # only for missing files

    folder = open_folder(addresses.parent(reveal(address)))
    if not addresses.parse(folder.path).path:
        return ""  # the listing of a whole bucket may be long
    try:
        name = nearest_file(addresses.name(address), sorted(folder.names()))
    except UnreadableError:
        return ""
    return folder.join(name) if name else ""


class RemoteFolder(Folder):
    """The files below an address, as they were when it was listed; reading one that was replaced fails.

    Files whose names differ in digits alone, such as shards, are asked for together once one of them is read.
    """

    def __init__(self, address: str, settings: Settings, allowance: Allowance) -> None:
        super().__init__(conceal(address))
        self._address, self._settings, self._allowance = address, settings, allowance
        self._listed: dict[str, Facts] | None = None
        self._folders: set[str] = set()
        self._store: Store | None = None
        self._blocks: dict[str, Blocks] = {}
        self._groups: dict[str, list[str]] = {}
        self._begun: set[str] = set()

    @property
    def files(self) -> dict[str, Facts]:
        """The facts of all files by their paths in the folder, with "/". Raises UnreadableError without a listing."""
        if self._listed is None:
            self._store, prefix = open_store(self._address, self._settings)
            prefix = prefix.strip("/")
            start = len(prefix) + 1 if prefix else 0
            try:
                listed = {facts.key[start:]: facts for facts in alone(partial(self._store.list, prefix))}
                if any(not facts.key.startswith(prefix) for facts in listed.values()):
                    raise Failed("answer")
                listed.pop("", None)  # an empty object that stands for the folder
                if any(_ODD.search(path) or addresses.parse(f"s3://b/{path}").query for path in listed):
                    raise Failed("key")
            except Failed as failed:
                found = failed
            else:
                return self._keep(listed)
            raise error_of(found, self._address)
        return self._listed

    def _keep(self, listed: dict[str, Facts]) -> dict[str, Facts]:
        """Keep the files of a listing; empty objects that stand for folders are left out."""
        paths = (path.split("/") for path in listed)
        self._folders = {"/".join(path[:end]) for path in paths for end in range(len(path))}
        self._listed = {path: facts for path, facts in listed.items() if path not in self._folders}
        if listed:
            addresses.found_folder(self.path)
        return self._listed

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
        assert self._store
        blocks = self._blocks.setdefault(name, Blocks(self._allowance))
        address = addresses.join(self._address, name)
        return RemoteSource(self._store, address, self._settings, self._allowance, self.files[name], blocks)

    def _begin(self, name: str) -> None:
        """Ask for the ends of a file, and of the files like it that nobody asked for yet."""
        if not self._groups:
            for path in sorted(self.files):
                self._groups.setdefault(_alike(path), []).append(path)
        others = [] if name in self._begun else self._groups[_alike(name)]
        batch = [name, *(other for other in others if other not in self._begun and other != name)][:_GROUP]
        self._begun.update(batch)
        at_once(batch, lambda each: self._begin_one(each, each == name))

    def _begin_one(self, name: str, wanted: bool) -> None:
        if wanted:
            self._source(name).begin()
        else:
            with suppress(CkptoolError):  # raised again when that file is read
                self._source(name).begin()

    def inner(self, name: str) -> RemoteFolder:
        found = RemoteFolder(addresses.join(self._address, name), self._settings, self._allowance)
        files = {path[len(name) + 1 :]: facts for path, facts in self.files.items() if path.startswith(f"{name}/")}
        found._store = self._store
        found._keep(files)
        return found

    def outer(self) -> RemoteFolder:
        return RemoteFolder(addresses.parent(self._address), self._settings, self._allowance)

    @property
    def name(self) -> str:
        return addresses.name(self._address)

    def mark(self) -> tuple[int, int, int]:
        """Return the total size in bytes, 0, and a digest of names, sizes and ETags."""
        from hashlib import sha256  # imported late: loads OpenSSL

        digest = sha256(repr(sorted(self.files.items())).encode("utf-8", "surrogateescape")).digest()
        return sum(facts.size for facts in self.files.values()), 0, int.from_bytes(digest[:8], "big")

    def join(self, *names: str) -> str:
        return conceal(addresses.join(self._address, *names))


def _alike(name: str) -> str:
    """Return what names of files that belong together have in common; shards belong to their index."""
    name = _INDEX.sub(r"-0-of-0\1", name)
    return _DIGITS.sub("0", name)
