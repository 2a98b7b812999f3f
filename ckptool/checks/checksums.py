"""The one check that reads everything: each record against its checksum, each byte once, in order."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ..checkpoint import Container, StoredRecord
from ..errors import MalformedError
from ..zips import contents

__all__ = ["Checksums", "checksum", "checksums"]

#: More threads than these do not read faster than memory gives.
_THREADS: Final = 4
#: Bytes from which on another thread is worth its start.
_WORTH_IT: Final = 16 << 20


class Checksums(NamedTuple):
    """``checked`` records of ``nbytes`` bytes agree or are in ``wrong``; ``uncomputed`` have no checksum on record
    although the format has them; ``without`` are records of a format that has none. ``lost`` are records that
    cannot be read, with the reason."""

    checked: int
    nbytes: int
    wrong: list[StoredRecord]
    lost: list[tuple[str, str]]
    uncomputed: int
    without: int


def checksums(container: Container, progress: Callable[[int], None] | None = None) -> Checksums:
    """Read every record that has a checksum; ``progress`` is called with numbers of bytes."""
    lost: list[tuple[str, str]] = []
    summed: list[StoredRecord] = []
    uncomputed = without = 0
    try:
        for record in container.records():
            if record.crc is None:
                without += bool(record.size)
            elif record.crc == 0 and record.size:
                uncomputed += 1
            else:
                summed.append(record)
    except MalformedError as error:
        lost.append((error.where, str(error)))
    sums = _Sums(summed, progress)
    sums.run()
    lost += sums.lost
    wrong = [record for number, record in enumerate(summed) if sums.found.get(number, record.crc) != record.crc]
    return Checksums(len(summed), sum(record.size for record in summed), wrong, lost, uncomputed, without)


class _Sums:
    """The checksums of records, by two threads where that pays: reading and summing leave Python's lock alone."""

    def __init__(self, records: Sequence[StoredRecord], progress: Callable[[int], None] | None) -> None:
        self.records = records
        self.progress = progress
        self.found: dict[int, int] = {}
        self.lost: list[tuple[str, str]] = []
        self._next = iter(range(len(records)))
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Fill ``found`` and ``lost``; raises what a thread raised."""
        total = sum(record.size for record in self.records)
        workers = min(_THREADS, os.cpu_count() or 1) if total >= _WORTH_IT else 1
        others = [threading.Thread(target=self._work, daemon=True) for _ in range(workers - 1)]
        for thread in others:
            thread.start()
        try:
            self._work()
        finally:
            # After ^C the others stop at their next record.
            self._next = iter(())
            for thread in others:
                thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while self._error is None:
            with self._lock:
                number = next(self._next, None)
            if number is None:
                return
            try:
                self.found[number] = checksum(self.records[number], self._progressed if self.progress else None)
            except MalformedError as error:
                self.lost.append((self.records[number].name, error.what))
            except BaseException as error:
                self._error = error

    def _progressed(self, size: int) -> None:
        with self._lock:
            if self.progress:
                self.progress(size)


def checksum(record: StoredRecord, progress: Callable[[int], None] | None = None) -> int:
    """The CRC-32 of a record's bytes, inflated; raises MalformedError where they do not inflate to their size."""
    crc = 0
    for data in contents(record.span, record.size, record.compressed, record.name):
        crc = zlib.crc32(data, crc)
        if progress:
            progress(len(data))
    return crc
