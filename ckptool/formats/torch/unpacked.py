"""An unpacked ``torch.save`` archive: a folder with ``data.pkl``, ``version``, and the storages in ``data``.

Such a folder results from unpacking a downloaded checkpoint, as some browsers do. ``torch.load`` does not read it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Final

from ...base.errors import MalformedError
from ...base.limits import LIMITS
from ...checkpoint.container import FoundPickle, StorageLocation, StoredRecord, Traits
from ...checkpoint.tensors import TensorReader
from ...files.folders import Folder
from ...files.sources import FolderSource, Source, Span
from ...pickles.decode import decode
from ..folders import ShardedContainer, opening
from ..search.pickle_search import bare_pickles, nested_pickles

_PICKLE: Final = "data.pkl"
_DATA: Final = "data"
#: A TorchScript program also has this file, and code.
_PROGRAM: Final = "constants.pkl"


class UnpackedArchive(ShardedContainer):
    """The folder as one checkpoint. Edits write a single file."""

    format = "torch-folder"
    traits = Traits(no_checksums="an unpacked archive", loads="converted", loader="", writes_as="")
    writer = "torch.save, unpacked since"

    def __init__(self, folder: Folder, stack: ExitStack) -> None:
        super().__init__()
        self.folder = folder
        main = folder.open(_PICKLE)
        stack.callback(main.close)
        self.files.append(main)
        if main.size > LIMITS.pickle_bytes:
            raise MalformedError(f"{main.size:,} bytes, the limit is {LIMITS.pickle_bytes:,}", where=_PICKLE)
        decoded = decode(main.read(0, main.size), where=_PICKLE)
        self.graph = decoded.graph
        self._end = decoded.end
        self._main = main
        self._storages: dict[str, Source] = {}
        names = folder.inner(_DATA).names(strict=folder.is_folder(_DATA))
        for key in TensorReader(self.graph).storages:
            # Keys are untrusted text: open only names that exist in the folder.
            if key in names:
                file = self._read_file(folder, f"{_DATA}/{key}", stack, lambda source, _: source, f"data/{key}")
                if file is not None:
                    self._storages[key] = file
        for name in sorted({"byteorder", "version"} & folder.names()):
            file = self._read_file(folder, name, stack, lambda source, _: source, name)
            if file is not None and name == "byteorder":
                self.byteorder = "big" if file.read(0, 8) == b"big" else "little"
        what = "it is an unpacked archive of torch.save: torch.load reads it as one file"
        self.note("unpacked", "warning", what)
        for offset, text in self.graph.oddities[: LIMITS.listed]:
            self.note("odd-pickle", "warning", f"{_PICKLE} at byte {offset:,}: {text}")

    def stored(self, key: str) -> StorageLocation:
        file = self._storages.get(key)
        return StorageLocation(None, 0) if file is None else StorageLocation(Span(file, 0, file.size), file.size)

    def records(self) -> Iterator[StoredRecord]:
        yield StoredRecord(_PICKLE, Span(self._main, 0, self._main.size), self._main.size, None, False, "")
        for key, file in self._storages.items():
            yield StoredRecord(f"{_DATA}/{key}", Span(file, 0, file.size), file.size, None, False, key)

    def pickles(self, *, quick: bool = False) -> Iterator[FoundPickle]:
        yield FoundPickle(_PICKLE, self.graph, "", self._main.size - self._end)
        yield from nested_pickles(self.graph, _PICKLE)
        if self._end < self._main.size:
            yield from bare_pickles(self._main, self._end, f"{_PICKLE}, after its end")


def sniff(folder: Folder, names: Collection[str]) -> bool:
    """Return whether a folder has the names of every torch.save archive, and is not a program."""
    return _PICKLE in names and "version" in names and _PROGRAM not in names


def read(folder: Folder) -> tuple[FolderSource, UnpackedArchive]:
    """Read a folder; raise MalformedError for a damaged one."""
    with opening(folder.path, "get the file again that it was") as stack:
        container = UnpackedArchive(folder, stack)
        return FolderSource(folder.path, container.files, folder=folder.path), container
