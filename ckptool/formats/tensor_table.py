"""Files that begin with a table of their tensors, safetensors and GGUF: the tensors in the table, and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from ..base.errors import MalformedError
from ..base.findings import TWO_FORMATS, Finding
from ..base.records import NamedTuple
from ..base.steps import WHOLE_COPY, as_step, by_place, salvage_step
from ..base.text import pluralize
from ..checkpoint.container import Container, Manifest, StorageLocation, StoredRecord
from ..files.sources import Source, Span
from ..files.zips.reader import ends_in_directory


class TensorEntry(NamedTuple):
    """A tensor. ``dtype`` is the format's name; ``begin`` and ``end`` are bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TableContainer(Container):
    """The tensors of one or more files by the keys of their storages. ``traits.no_checksums`` names the format."""

    sources: Sequence[Source]
    entries: dict[str, TensorEntry]

    def source_of(self, key: str) -> Source:
        """Return the file that has the bytes of a tensor."""
        return self.sources[0]

    def stored(self, key: str) -> StorageLocation:
        entry = self.entries.get(key)
        if entry is None or entry.end > self.source_of(key).size:
            return StorageLocation(None, 0)
        size = entry.end - entry.begin
        return StorageLocation(Span(self.source_of(key), entry.begin, size), size)

    def records(self) -> Iterator[StoredRecord]:
        for key, entry in self.entries.items():
            span, size, *_ = self.stored(key)
            if span is not None:
                yield StoredRecord(entry.name, span, size, None, False, key)

    def manifest(self, *, checked: bool = False) -> Manifest:
        return {entry.name: (entry.dtype, entry.shape) for entry in self.entries.values()}

    def audit(self, keys: Collection[str]) -> Sequence[Finding]:
        if not any(map(ends_in_directory, self.sources)):
            return []
        twins = f"it is a {self.traits.no_checksums} file and a zip archive at once"
        what = f"{twins}: zipfile, and what uses it, takes it for the archive"
        return [Finding(TWO_FORMATS, "error", what, refused=True)]


def repeated(names: Iterable[str]) -> str | None:
    """Return the first name that occurs again, or None."""
    seen = set[str]()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def cut_error(
    source: Source,
    entries: Sequence[TensorEntry],
    broken: Callable[[str], MalformedError],
    why: str,
    *,
    salvaged: bool = False,
) -> MalformedError:
    """Return the error ``broken(rule)`` for a file that ends before its tensors. The next step is to get the file
    again, or to salvage whole tensors if the format can be ``salvaged``."""
    end, left = max(entry.end for entry in entries), sum(entry.end <= source.size for entry in entries)
    rule = f"its tensors end at byte {end:,}, the file has {source.size:,}: {why}"
    error = broken(f"{rule} {left:,} of {pluralize(len(entries), 'tensor')} are whole")
    again = as_step(by_place(source.name, "download it again", WHOLE_COPY))
    error.step = again + (", or " + salvage_step(source.name) if salvaged and left else "")
    return error
