"""Verify each record's checksum, reading each byte once, in order. This is the only check that reads everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ..base.errors import MalformedError
from ..base.records import NamedTuple
from ..files.downloads import expect_reads
from ..files.sources import Span
from ..files.threads import from_threads, run_in_threads
from ..files.zips.reader import checksum
from .container import Container, StoredRecord

#: Maximum number of records held at a time; a folder may have millions.
_BATCH: Final = 50_000


class Checksums(NamedTuple):
    """The outcome of the check.

    ``checked`` records with ``nbytes`` bytes were read; ``wrong`` are the records that do not match. ``lost`` are the
    names of unreadable records, with the reason. ``uncomputed`` counts records without a checksum in a format that has
    checksums, ``without`` records in a format that has none.
    """

    checked: int
    nbytes: int
    wrong: list[StoredRecord]
    lost: list[tuple[str, str]]
    uncomputed: int
    without: int


def checksums(
    container: Container, progress: Callable[[int], None] | None = None, known: Mapping[Span, int] | None = None
) -> Checksums:
    """Read every record that has a checksum, except ``known`` spans; ``progress`` is called with numbers of bytes."""
    lost: list[tuple[str, str]] = []
    wrong: list[StoredRecord] = []
    uncomputed = without = checked = nbytes = 0
    batch: list[StoredRecord] = []
    advance = from_threads(progress)

    def read_batch() -> None:
        results: dict[int, int | str] = {}  # a checksum, or why it is missing

        def read(number: int) -> None:
            record = batch[number]
            whole = not record.compressed and record.size == record.span.size
            crc = known.get(record.span) if known and whole else None
            stored, tell = (record.span, record.size, record.compressed, record.name), advance if progress else None
            try:
                results[number] = crc if crc is not None else checksum(*stored, tell)
            except MalformedError as error:
                results[number] = error.what

        expect_reads(record.span for record in batch)
        run_in_threads(range(len(batch)), read, [record.size for record in batch])
        for record, result in ((record, results[number]) for number, record in enumerate(batch)):
            if isinstance(result, str):
                lost.append((record.name, result))
            elif result != record.crc:
                wrong.append(record)
        batch.clear()

    try:
        for record in container.records():
            if record.crc is None:
                without += bool(record.size)
            elif record.crc == 0 and record.size:
                uncomputed += 1
            else:
                batch.append(record)
                checked, nbytes = checked + 1, nbytes + record.size
            if len(batch) >= _BATCH:
                read_batch()
    except MalformedError as error:
        lost.append((error.where, str(error)))
    read_batch()
    return Checksums(checked, nbytes, wrong, lost, uncomputed, without)
