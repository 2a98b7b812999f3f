"""A remote folder: one listing, which tells names, sizes and ETags of all files in it."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from ..base import addresses
from ..base.addresses import conceal
from ..base.errors import CkptoolError, UnreadableError
from ..base.lazy import regex
from ..files.folders import Folder
from .source import Allowance, Blocks, RemoteSource, meant, open_store
from .store import Facts, Failed, Settings, Store, at_once, current, error_of

_DIGITS: Final = regex(r"\d+")
_INDEX: Final = regex(r"(\.safetensors|\.bin)\.index\.json$")
#: Files whose ends are asked for at the same time: they take half of the memory for remote files.
_GROUP: Final = 64


def open_folder(address: str, settings: Settings | None = None) -> RemoteFolder:
    """Return the folder at an address, whether or not it exists. It is listed when it is first asked."""
    settings = settings or current()
    return RemoteFolder(meant(address), settings, Allowance(settings.max_download))


class RemoteFolder(Folder):
    """The files below an address, as they were when it was listed; reading one that was replaced fails.

    Files whose names differ in digits alone, such as shards, are asked for together once one of them is read.
    """

    def __init__(self, address: str, settings: Settings, allowance: Allowance) -> None:
        super().__init__(conceal(address))
        self._address, self._settings, self._allowance = address, settings, allowance
        self._listed: dict[str, Facts] | None = None
        self._store: Store | None = None
        self._blocks: dict[str, Blocks] = {}

    @property
    def files(self) -> dict[str, Facts]:
        """The facts of all files by their paths in the folder, with "/". Raises UnreadableError without a listing."""
        if self._listed is None:
            self._store, prefix = open_store(self._address, self._settings)
            prefix = prefix.strip("/")
            start = len(prefix) + 1 if prefix else 0
            try:
                listed = at_once([prefix], self._store.list)[0]
            except Failed as failed:
                found = failed
            else:
                self._listed = {facts.key[start:]: facts for facts in listed if facts.key[start:]}
                return self._listed
            raise error_of(found, self._address)
        return self._listed

    def names(self, *, strict: bool = False) -> frozenset[str]:
        """Return the names of the files and folders in it; raise UnreadableError if it cannot be listed."""
        return frozenset(path.partition("/")[0] for path in self.files)

    def is_folder(self, name: str) -> bool:
        return name not in self.files and any(path.startswith(f"{name}/") for path in self.files)

    def size(self, name: str) -> int | None:
        return self.files[name].size if name in self.files else None

    def open(self, name: str) -> RemoteSource:
        """Open a file without a request: the first read asks for both its ends."""
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
        alike = _alike(name)
        others = [other for other in sorted(self.files) if other not in self._blocks and _alike(other) == alike]
        at_once([name, *others][:_GROUP], lambda each: self._begin_one(each, each == name))

    def _begin_one(self, name: str, wanted: bool) -> None:
        if wanted:
            self._source(name).begin()
        else:
            with suppress(CkptoolError):  # raised again when that file is read
                self._source(name).begin()

    def inner(self, name: str) -> RemoteFolder:
        found = RemoteFolder(addresses.join(self._address, name), self._settings, self._allowance)
        files = {path[len(name) + 1 :]: facts for path, facts in self.files.items() if path.startswith(f"{name}/")}
        found._store, found._listed = self._store, files
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
