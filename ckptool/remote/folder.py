"""A remote folder: one listing, which tells names, sizes and ETags of all files in it."""

from __future__ import annotations

from collections.abc import Iterable

from ..base.addresses import conceal, join, reveal
from ..base.errors import UnreadableError
from ..base.text import human_bytes
from .source import Allowance, RemoteSource, open_store
from .store import Facts, Failed, Settings, Store, at_once, error_of


def open_folder(address: str, settings: Settings | None = None) -> RemoteFolder:
    """List a remote folder: one request for every 1000 files. Raises UnreadableError; a missing folder is empty."""
    settings, address = settings or Settings(), reveal(address)
    store, prefix = open_store(address, settings)
    prefix = prefix.strip("/")
    try:
        listed = at_once([prefix], store.list)[0]
    except Failed as failed:
        found = failed
    else:
        start = len(prefix) + 1 if prefix else 0
        files = {facts.key[start:]: facts for facts in listed if facts.key[start:]}
        return RemoteFolder(store, address, settings, Allowance(settings.max_download), files)
    raise error_of(found, address)


class RemoteFolder:
    """The files below an address, as they were when it was listed; opening one that was replaced fails.

    ``files`` holds their facts by their paths in the folder, with "/".
    """

    def __init__(
        self, store: Store, address: str, settings: Settings, allowance: Allowance, files: dict[str, Facts]
    ) -> None:
        self.name = conceal(address)
        self.files = files
        self._store, self._address, self._settings, self._allowance = store, address, settings, allowance

    def names(self) -> list[str]:
        """Return the names of the files and folders in it, sorted."""
        return sorted({path.partition("/")[0] for path in self.files})

    def is_folder(self, name: str) -> bool:
        return name not in self.files and any(path.startswith(f"{name}/") for path in self.files)

    def folder(self, name: str) -> RemoteFolder:
        """Return a folder in it, from the same listing."""
        start = len(name) + 1
        files = {path[start:]: facts for path, facts in self.files.items() if path.startswith(f"{name}/")}
        return RemoteFolder(self._store, join(self._address, name), self._settings, self._allowance, files)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; raises UnreadableError if there is no such file."""
        return self._facts(name).size

    def open(self, name: str) -> RemoteSource:
        """Open a file without a request; the first read asks for both ends."""
        facts = self._facts(name)
        return RemoteSource(self._store, join(self._address, name), self._settings, self._allowance, facts)

    def open_all(self, names: Iterable[str]) -> list[RemoteSource]:
        """Open several files and ask for their ends, all at the same time."""
        sources = [self.open(name) for name in names]
        at_once(sources, lambda source: source.begin())
        return sources

    def read(self, name: str, limit: int) -> bytes:
        """Return the bytes of a small file; raises UnreadableError if it has more than ``limit``."""
        source = self.open(name)
        if source.size > limit:
            raise UnreadableError(f"it is too large: {human_bytes(source.size)}", path=source.name)
        data = source.read(0, source.size)
        source.close()
        return data

    def mark(self) -> tuple[Facts, ...]:
        """Return what changes when any file is added, removed or replaced."""
        return tuple(facts for _, facts in sorted(self.files.items()))

    def _facts(self, name: str) -> Facts:
        if name not in self.files:
            raise UnreadableError("no such file", path=conceal(join(self._address, name)))
        return self.files[name]
