"""The recorded checksums of the input bytes in a plan, to be verified while the output is written."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import accumulate
from typing import Final

from ..base.records import new_tuple
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import StoredRecord
from ..files.sources import (
    AssembledSource,
    Computed,
    ExpectedChecksum,
    FolderSource,
    MemberSource,
    Plan,
    SliceSource,
    Source,
    Span,
    origins,
    spans_read,
)
from .outputs import OutputFormat

#: The most ranges for which records are looked up one by one.
_FEW: Final = 16


def claims_of(
    checkpoint: Checkpoint, plans: Iterable[Plan], output: OutputFormat | None = None, *, whole: bool = False
) -> tuple[ExpectedChecksum, ...]:
    """Return the recorded checksums of all that the plans of an output read.

    A record that is copied whole from a single file is not verified if the output repeats its checksum: any damage
    stays visible. ``output`` is the format of the output, or None for an unchanged copy, and for other outputs. With
    ``whole``, the files of a folder are copied unchanged: raises MalformedError if the structure of one is damaged.
    """
    members = tuple(member_checksums(checkpoint))
    if all(each.traits.no_checksums for each in checkpoint.inputs):
        return members
    if whole:
        checkpoint.container.manifest(checked=True)
    folders = any(isinstance(source, FolderSource) for source in checkpoint.sources)
    reads = _Reads(plans, repeated=not folders and output is not None and output.checksums)
    if output is not None and output.every_record and not reads.others:
        return members
    # Assembled sources know their checksums only once their bytes are read.
    assembled = (
        ExpectedChecksum(Span(source, 0, source.size), source.size, False, None, f"the storage of {source.name}")
        for source in reads.assembled.values()
    )
    return (*members, *_of_records(checkpoint, reads, whole=whole), *assembled)


class _Reads:
    """The spans that plans read from the input files, separated into unchanged copies and other reads."""

    def __init__(self, plans: Iterable[Plan], *, repeated: bool) -> None:
        #: Sources that know more checksums than the containers, by id.
        self.assembled: dict[int, AssembledSource] = {}
        copied: dict[int, set[tuple[int, int]]] = {}
        others: dict[int, set[tuple[int, int]]] = {}
        for plan in plans:
            for piece in plan.pieces:
                if isinstance(piece, bytes) or (isinstance(piece, Computed) and piece.late):
                    continue  # a late piece depends on the numbers of earlier pieces, and reads nothing
                spans = copied if repeated and isinstance(piece, Span) else others
                for span in (piece,) if isinstance(piece, Span) else spans_read(piece):
                    for source, offset, size in origins(span):
                        if isinstance(source, AssembledSource):
                            self.assembled[id(source)] = source
                        elif size:
                            spans.setdefault(id(source), set()).add((offset, offset + size))
        #: Whether so little is read that few records are touched.
        self.few = sum(map(len, (*copied.values(), *others.values()))) <= _FEW
        self._copied = {source: _Ranges(ranges) for source, ranges in copied.items()}
        self.others = {source: _Ranges(ranges) for source, ranges in others.items()}

    def claims(self, source: Source, begin: int, end: int) -> bool:
        """Return whether a record is read, except by a copy of the whole record."""
        if self.others.get(id(source), _NOTHING).meet(begin, end):
            return True
        copied = self._copied.get(id(source), _NOTHING)
        return copied.meet(begin, end) and not copied.contain(begin, end)

    def touch(self, span: Span) -> bool:
        """Return whether any of these bytes are read."""
        return any(
            kind.get(id(source), _NOTHING).meet(begin, begin + size)
            for source, begin, size in origins(span)
            for kind in (self.others, self._copied)
        )


class _Ranges:
    def __init__(self, ranges: set[tuple[int, int]]) -> None:
        ordered = sorted(ranges)
        self._begins = [begin for begin, _ in ordered]
        self._reach = list(accumulate((end for _, end in ordered), max))

    def meet(self, begin: int, end: int) -> bool:
        """Return whether some range has bytes between ``begin`` and ``end``."""
        last = bisect_left(self._begins, end)
        return last > 0 and self._reach[last - 1] > begin

    def contain(self, begin: int, end: int) -> bool:
        """Return whether one range has all bytes from ``begin`` to ``end``."""
        last = bisect_right(self._begins, begin)
        return last > 0 and self._reach[last - 1] >= end


_NOTHING: Final = _Ranges(set())


def _of_records(checkpoint: Checkpoint, reads: _Reads, *, whole: bool) -> Iterator[ExpectedChecksum]:
    """Yield the recorded checksums of the records that are read; with ``whole``, also of parts of assembled tensors."""
    seen = set[int]()
    for each in checkpoint.inputs:
        if each.traits.no_checksums or id(each.container) in seen:
            continue
        seen.add(id(each.container))
        names = cache(partial(_storage_names, each))  # called when a message first needs one
        container = each.container
        for record in container.records() if whole else container.outer_records(reads.touch if reads.few else None):
            for source, at, size in origins(record.span) if record.crc else ():
                if reads.claims(source, at, at + size):
                    known = None if record.compressed else checkpoint.cache.checksums
                    facts = (record.span, record.size, record.compressed, record.crc, _Place(record, names), known)
                    yield new_tuple(ExpectedChecksum, facts)
                    break


def _storage_names(checkpoint: Checkpoint) -> Mapping[str, str]:
    survey = checkpoint.lenient().survey
    entries = reversed(survey.tensors)
    return {part.storage: entry.path for entry in entries for part in survey.reader.parts(entry.tensor)}


class _Place:
    """The words for a record in a message: its name, and a tensor whose storage it holds."""

    __slots__ = ("_names", "_record")

    def __init__(self, record: StoredRecord, names: Callable[[], Mapping[str, str]]) -> None:
        self._record, self._names = record, names

    def __str__(self) -> str:
        record, paths = self._record, self._names()
        keys = [key for key in (record.key, *record.part_of) if key]
        key = next((key for key in keys if key in paths), next(iter(keys), ""))
        name = record.name.removeprefix(f"{record.span.source.name.rpartition('/')[2]}: ")
        return f"record {name}: the storage of {paths.get(key, key)}" if key else f"record {name}"

    def __reduce__(self) -> tuple[object, ...]:
        return str, (str(self),)


def member_checksums(checkpoint: Checkpoint) -> Iterator[ExpectedChecksum]:
    """Yield the checksums that zip archives record for member inputs without checksums of their own."""
    for each in checkpoint.inputs:
        if each.traits.no_checksums and isinstance(each.source, MemberSource):
            inner = each.source.source
            if isinstance(inner, SliceSource) and inner.crc:
                where = f"the member {inner.name} of the archive"
                yield ExpectedChecksum(Span(each.source, 0, inner.size), inner.size, False, inner.crc, where)
