"""Move the pieces of a plan into a file, with shared blocks if the filesystem has them, else copied by the kernel.

On XFS, btrfs and others two files can share blocks. ``copy_file_range`` does so if input and output have the same
offset within a block, starting with a whole block; plans are laid out for that (``zips.layout``). Bytes before the
first whole block are copied.
"""

from __future__ import annotations

import errno
import os
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Event, Lock
from typing import Final, TypeAlias

from ...base.errors import ChangedError, MalformedError, OutputError
from ...base.records import NamedTuple, new_tuple
from ...base.steps import salvage_step
from ..downloads import ahead as read_ahead
from ..downloads import expect_reads
from ..sources import (
    FILESYSTEM_BLOCK,
    AssembledSource,
    Computed,
    ExpectedChecksum,
    FileSource,
    FolderPlan,
    MemberSource,
    Piece,
    Plan,
    Seen,
    Source,
    Span,
    size_of,
)
from ..threads import READ_SIZE, Background, read_blocks, reused_block, run_in_threads
from ..zips.reader import Window, checksum, nearby
from ..zips.writer import combined_crc
from .planned import Prefetcher

#: Bytes moved by one call: large enough to cost nothing, small enough for progress and for ^C.
_COPY_SIZE: Final = 16 << 20
#: Shorter pieces are collected and written by one call, which is twice as fast for thousands of small tensors.
_SMALL: Final = 16 << 10
_COLLECTED: Final = 1 << 20
#: Bytes that are copied before the checksums of a source are verified, because other threads may still be copying it.
_LAG: Final = 4 * _COPY_SIZE
_MOST_RECENT: Final = 100
_MOST_CHECKS: Final = 10_000
#: Outputs of this size or more are synced while they grow.
_MIN_FLUSHED: Final = 64 << 20
#: Reading this many bytes again takes as long as combining their checksum with others.
_COMBINED: Final = 128 << 10
#: Reasons why the kernel may be unable to copy: another filesystem, an old one, a forbidden call.
_UNSUPPORTED: Final = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)

#: How an existing file is opened to write to it.
READ_WRITE: Final = os.O_RDWR | getattr(os, "O_BINARY", 0)

#: Called with the number of bytes that moved, from any thread.
Progress: TypeAlias = Callable[[int], None]
Buffer: TypeAlias = "bytes | bytearray | memoryview"


def ignore(size: int) -> None:
    """Report no progress."""


@contextmanager
def as_output_failure() -> Iterator[None]:
    """Give a ChangedError the exit code of OutputError, because an input changed while an output was made from it."""
    try:
        yield
    except ChangedError as error:
        error.exit_code = OutputError.exit_code
        raise


def write_pieces(plan: Plan, fd: int, progress: Progress | None = None) -> None:
    """Write all pieces of a plan to a file, without a final sync; the file must be empty, or have the same bytes.

    Verify the checksums that the plan expects. Holes of sparse inputs stay holes, except in short pieces. Raises
    OSError, ChangedError if an input ends too early, and MalformedError for a wrong checksum.
    """
    size, expected = plan.size, plan.expected_checksums
    writer = _Writer(fd, expected, progress or ignore)
    work = size + sum(checksum.span.size for checksum in expected)
    with _flushed(fd, size), Prefetcher(plan.pieces, _SMALL) as ahead:
        sizes = [work] if hasattr(os, "pwrite") else []
        run_in_threads(writer.steps(plan.pieces, ahead), lambda step: step(), sizes, writer.stopped)
    if os.fstat(fd).st_size < size:
        os.ftruncate(fd, size)  # it ends with a hole


def stream_pieces(plan: Plan, put: Callable[[Buffer], None]) -> None:
    """Pass the bytes of all pieces to ``put``, in order: the output is an object in a store, not a file.

    ``put`` must not keep the buffer that it is given. Verify the checksums that the plan expects, some of them after
    the last byte. Raises as ``write_pieces`` does; what ``put`` was given must be discarded then.
    """
    writer = _Streamer(put, plan.expected_checksums)
    with Prefetcher(plan.pieces, _SMALL) as ahead:
        for step in writer.steps(plan.pieces, ahead):
            step()
    writer.fill(plan.size)


def rehearse(plan: Plan | FolderPlan) -> None:
    """Compute everything that writing the plan would compute, but write nothing; raises the same errors."""
    pieces = plan.pieces if isinstance(plan, Plan) else [piece for _, file in plan.files for piece in file.pieces]
    expect_reads(piece for piece in pieces if isinstance(piece, Computed))
    with Prefetcher(pieces, _SMALL) as ahead:
        for piece in pieces:
            for _ in ahead.chunks(piece) if isinstance(piece, Computed) else ():
                pass


def data_and_holes(piece: Span) -> Iterator[tuple[Span, bool]]:
    """Split a piece into (part, whether it is a hole)."""
    source, at, end = piece
    if isinstance(source, AssembledSource):
        for stretch in source.stretches(at, end):
            if stretch.source is source:
                yield stretch, False
            else:
                yield from data_and_holes(stretch)
        return
    end += at
    file = source.local_file()
    if file is None or not file.sparse:
        yield piece, False
        return
    while at < end:
        data = min(file.next_data(at), end)
        if data > at:
            yield Span(source, at, data - at), True
        hole = min(file.next_hole(data), end)
        if hole > data:
            yield Span(source, data, hole - data), False
        elif data == at:  # the file changed under us, or the system cannot tell: copy the rest
            yield Span(source, at, end - at), False
            return
        at = hole


def wrong_checksum(expected: ExpectedChecksum) -> MalformedError:
    """Return the error for bytes that do not match their recorded checksum."""
    name = expected.span.source.name
    what = f"{expected.where} does not match its checksum: it is damaged"
    # the checksum covers all bytes, so no part is known to be intact
    of_archive = isinstance(expected.span.source, MemberSource)
    return MalformedError(what, path=name, next="get a whole copy of the archive" if of_archive else salvage_step(name))


class _Check(NamedTuple):
    """A checksum to verify, and the copied parts of its bytes as (offset, size, CRC-32)."""

    expected: ExpectedChecksum
    parts: list[tuple[int, int, int]]

    def takes(self, size: int) -> bool:
        """Return whether combining a part's checksum with others is faster than reading its ``size`` bytes again."""
        return size >= _COMBINED or size == self.expected.span.size


class _Writer:
    """Writes pieces to a file and verifies checksums, in steps that threads may share.

    Bytes that the kernel cannot share are checksummed while being copied; shared blocks are read once more for the
    checksum.
    """

    def __init__(self, fd: int, expected: Sequence[ExpectedChecksum], progress: Progress) -> None:
        self.stopped = Event()
        self._fd = fd
        self._done = progress
        self._computing, self._listing = Lock(), Lock()
        self._checks = [new_tuple(_Check, (item, [])) for item in expected if item.crc is not None]
        #: The checks of each source, ordered by offset.
        self._places: dict[Source, list[_Check]] = {}
        self._add(self._checks)
        #: The checksums of records that were copied whole in one short piece; -1 while it is not copied.
        self._copied = {check.expected.span: -1 for check in self._checks if check.expected.span.size < _SMALL}
        #: Sources that know more checksums, and were not asked yet.
        self._left = dict.fromkeys(item.span.source for item in expected if item.crc is None)
        #: Sources that were asked: their checksums, and the offset in the output after them. They are verified soon.
        self._recent: dict[Source, tuple[list[_Check], int]] = {}
        self._waiting = 0

    def _add(self, checks: Iterable[_Check]) -> None:
        by_source: dict[Source, list[_Check]] = {}
        for check in checks:
            by_source.setdefault(check.expected.span.source, []).append(check)
        with self._listing:
            for source, more in by_source.items():  # a new list, because another thread may be reading the old one
                both = [*self._places.get(source, ()), *more]
                self._places[source] = sorted(both, key=lambda check: check.expected.span.offset)

    def _verify_and_drop(self, check: _Check) -> None:
        """Verify a checksum from a source, and forget it, because a folder may have a million."""
        self._verify(check)
        source = check.expected.span.source
        with self._listing:
            self._places[source] = [other for other in self._places.get(source, ()) if other is not check]

    def _expect(self, source: AssembledSource, end: int) -> None:
        """Add the checksums that a source knows for a piece that ends at ``end`` in the output."""
        checks, _ = self._recent.pop(source, (None, 0))
        if checks is None:
            checks = [_Check(item, []) for item in source.checksums()]
            self._add(checks)
            self._left.pop(source, None)
            self._waiting += len(checks)
        self._recent[source] = checks, end

    def _due(self, before: int) -> Iterator[Callable[[], None]]:
        """Yield the steps that verify checksums of bytes copied to places before ``before``."""
        while self._recent:
            source, (checks, end) = next(iter(self._recent.items()))
            if end > before and len(self._recent) < _MOST_RECENT and self._waiting < _MOST_CHECKS:
                return
            del self._recent[source]
            self._waiting -= len(checks)
            for check in checks:
                yield partial(self._verify_and_drop, check)

    def steps(self, pieces: Sequence[Piece], ahead: Prefetcher) -> Iterator[Callable[[], None]]:
        """Yield the steps that write pieces; adjacent short pieces become one step."""
        at = 0
        collected, window = bytearray(), nearby()
        early = self._not_copied(pieces) if any(type(piece) is Computed for piece in pieces) else {}
        left = [check for check in self._checks if id(check) not in early]
        for piece in read_ahead(pieces, lambda piece: (piece,) if isinstance(piece, Span) else ()):
            size = size_of(piece)
            source = piece.source if isinstance(piece, Span) else None
            if isinstance(source, AssembledSource):
                self._expect(source, at + size)
                yield from self._due(at - _LAG)
            if size < _SMALL:
                if isinstance(piece, Computed):
                    collected += self._computed(piece, ahead)
                else:
                    collected += piece if isinstance(piece, bytes) else self._content(piece, window(piece.source))
                if len(collected) >= _COLLECTED:
                    yield partial(self._put, collected, at + size - len(collected))
                    collected = bytearray()
                at += size
                continue
            if collected:
                yield partial(self._put, collected, at - len(collected))
                collected = bytearray()
            if isinstance(piece, bytes):
                yield partial(self._put, piece, at)
            elif isinstance(piece, Computed):
                if early:  # while another thread waits for the piece before this one
                    yield partial(self._verify, early.pop(next(iter(early))))
                self._begin_computing()
                yield partial(self._compute, piece, ahead.chunks(piece), at)
            else:
                yield from self._copies(piece, at)
            at += size
        if collected:
            yield partial(self._put, collected, at - len(collected))
        for check in (*early.values(), *left):
            yield partial(self._verify, check)
        yield from self._due(at)
        for source in list(self._left):
            assert isinstance(source, AssembledSource)
            self._expect(source, at)
            yield from self._due(at)

    def _not_copied(self, pieces: Sequence[Piece]) -> dict[int, _Check]:
        """Return the checks, by their ids, to which neither copying nor computing contributes.

        The others must wait for the copied or computed bytes.
        """
        checks = {id(check): check for check in self._checks if check.expected.known is None}
        for piece in pieces if checks else ():
            if isinstance(piece, Span) and (copied := self._check_of(piece)) is not None:
                checks.pop(id(copied), None)
        return checks

    def _copies(self, piece: Span, at: int) -> Iterator[Callable[[], None]]:
        for stretch, hole in data_and_holes(piece):
            source, offset, size = stretch
            check = self._check_of(stretch)
            if check is not None and (not check.takes(size) or self._may_share(stretch, at)):
                check = None  # its bytes are read once more
            assembled = isinstance(source, AssembledSource)
            copy = self._assemble if assembled else partial(self._copy, check)
            most = _COPY_SIZE if assembled or check is not None else size or 1
            for begin in range(0, 0 if hole else size, most):
                yield partial(copy, Span(source, offset + begin, min(most, size - begin)), at + begin)
            if hole:
                self._done(size)
            at += size

    def _may_share(self, stretch: Span, at: int) -> bool:
        """Return whether the kernel might share the blocks of a stretch with the output."""
        return (stretch.offset - at) % FILESYSTEM_BLOCK == 0 and stretch.source.local_file() is not None

    def _check_of(self, stretch: Span) -> _Check | None:
        """Return the checksum that a stretch contributes to; None for none or several."""
        checks = self._places.get(stretch.source, ())
        place = bisect_right(checks, stretch.offset, key=lambda check: check.expected.span.offset) - 1
        if place < 0:
            return None
        expected = checks[place].expected
        span, end = expected.span, stretch.offset + stretch.size
        return None if expected.compressed or end > span.offset + span.size else checks[place]

    def _put(self, data: Buffer, at: int) -> None:
        """Write data at an offset, in as many calls as it takes."""
        left = memoryview(data)
        while left:
            if self.stopped.is_set():
                raise _Stopped
            count = _pwrite(self._fd, left, at)
            left, at = left[count:], at + count
        self._done(len(data))

    def _compute(self, piece: Computed, chunks: Iterable[bytes], at: int) -> None:
        """Write the bytes of a piece as they are computed."""
        try:
            self._advance(0)
            for data in _whole(piece, chunks):
                self._put(data, at)
                at += len(data)
        except BaseException:
            self.stopped.set()  # first, so that the next thread computes nothing more
            raise
        finally:
            self._computing.release()

    def _computed(self, piece: Computed, ahead: Prefetcher) -> bytearray:
        """Return the bytes of a short computed piece, after all pieces before it."""
        self._begin_computing()
        try:
            computed = bytearray()
            for data in _whole(piece, ahead.chunks(piece)):
                computed += data
            return computed
        finally:
            self._computing.release()

    def _begin_computing(self) -> None:
        """Wait until no other thread computes a piece, because pieces are computed one at a time, in their order."""
        while not self._computing.acquire(timeout=0.1):
            self._advance(0)  # a signal may have come before the other thread could release it

    def _assemble(self, part: Span, at: int) -> None:
        """Assemble bytes, and keep the checksums of adjacent bytes that are read for them."""
        source = part.source
        assert isinstance(source, AssembledSource)
        with self._tallied() as seen:
            for begin in range(0, part.size, READ_SIZE):
                buffer = memoryview(reused_block())[: part.size - begin]
                source.read_into(part.offset + begin, buffer, seen)
                self._put(buffer, at + begin)

    def _content(self, piece: Span, window: Window) -> bytes | bytearray:
        """Return the bytes of a short piece, read through the window of its source."""
        if not isinstance(piece.source, AssembledSource):
            content = window.read(piece.offset, piece.size)
            if len(content) < piece.size:
                raise ChangedError("the input ends before the bytes to copy")
            if piece in self._copied:
                self._copied[piece] = zlib.crc32(content)
            return content
        data = bytearray(piece.size)
        with self._tallied() as seen, memoryview(data) as buffer:
            piece.source.read_into(piece.offset, buffer, seen)
        return data

    @contextmanager
    def _tallied(self) -> Iterator[Seen]:
        """Yield a function to call with the bytes that are read; afterwards keep the checksums of adjacent bytes."""
        rows: dict[tuple[int, int], tuple[_Check, int, int]] = {}  # by their checks and ends

        def seen(read: Source, offset: int, data: bytes) -> None:
            check = self._check_of(Span(read, offset, len(data)))
            if check:
                _, begin, crc = rows.pop((id(check), offset), (check, offset, 0))
                rows[id(check), offset + len(data)] = check, begin, zlib.crc32(data, crc)

        yield seen
        for (_, end), (check, begin, crc) in rows.items():
            if check.takes(end - begin):
                check.parts.append((begin, end - begin, crc))

    def _copy(self, check: _Check | None, piece: Span, at: int) -> None:
        """Copy from file to file, through memory if the checksum is kept for a check."""
        source, offset, size = piece
        done = crc = 0
        file = source.local_file() if check is None else None
        if file is not None and hasattr(os, "copy_file_range"):
            with file.kept_open():
                if (offset - at) % FILESYSTEM_BLOCK == 0:
                    # A call that starts within a block copies everything. So this call ends at the start of a block.
                    done = self._kernel_copy(file, offset, at, min(-at % FILESYSTEM_BLOCK, size))
                done += self._kernel_copy(file, offset + done, at + done, size - done)
        for data in read_blocks(Span(source, offset + done, size - done)):
            crc = 0 if check is None else zlib.crc32(data, crc)
            self._put(data, at + done)
            done += len(data)
        if check is not None:
            check.parts.append((offset, size, crc))

    def _kernel_copy(self, source: FileSource, offset: int, at: int, size: int) -> int:
        """Let the kernel copy or share bytes; return how many, fewer if it is unable to."""
        done = 0
        while done < size:
            if self.stopped.is_set():
                raise _Stopped
            try:
                most = min(_COPY_SIZE, size - done)
                count = os.copy_file_range(source.fd, self._fd, most, offset + done, at + done)
            except OSError as error:
                if error.errno in _UNSUPPORTED:
                    return done
                raise
            if count == 0:
                return done
            done += count
            self._done(count)
        return done

    def _verify(self, check: _Check) -> None:
        """Verify a checksum from the checksums of the copied parts and the bytes between them."""
        span, size, compressed, crc, where, known = check.expected
        source, at, end = span.source, span.offset, span.offset + span.size
        parts = sorted(check.parts)  # other threads may add to them
        found = 0
        # Only these bytes may be impossible to read, and the words may take long to make.
        name = str(where) if compressed or end > source.size else ""
        if known is not None and span in known:
            found, parts = known[span], []
        elif not compressed and self._copied.get(span, -1) >= 0:
            found, parts = self._copied[span], []
        elif not parts:
            found = checksum(span, size, compressed, name, self._advance)
        for begin, length, part in [*parts, (end, 0, 0)] if parts else ():
            if begin < at:
                continue  # it was copied twice
            between = Span(source, at, begin - at)
            found = combined_crc(found, checksum(between, between.size, False, name, self._advance), between.size)
            found, at = combined_crc(found, part, length), begin + length
        if found != crc:
            raise wrong_checksum(check.expected)

    def _advance(self, size: int) -> None:
        if self.stopped.is_set():
            raise _Stopped


def _whole(piece: Computed, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the chunks of a computed piece; raise ChangedError if it has another size than planned."""
    left = piece.size
    for data in chunks:
        left -= len(data)
        if left < 0:
            break
        yield data
    if left:
        raise ChangedError("the input yielded another number of bytes than planned")


class _Streamer(_Writer):
    """Passes pieces to a function, in the order of their bytes. The steps must be done one after the other."""

    def __init__(self, put: Callable[[Buffer], None], expected: Sequence[ExpectedChecksum]):
        super().__init__(-1, expected, ignore)
        self._give = put
        self._at = 0

    def fill(self, at: int) -> None:
        """Pass zeros up to byte ``at``: a hole of the input."""
        while self._at < at:
            count = min(READ_SIZE, at - self._at)
            self._give(bytes(count))
            self._at += count

    def _put(self, data: Buffer, at: int) -> None:
        self.fill(at)
        self._give(data)
        self._at += len(data)

    def _may_share(self, stretch: Span, at: int) -> bool:
        return False

    def _kernel_copy(self, source: FileSource, offset: int, at: int, size: int) -> int:
        return 0


def _pwrite(fd: int, data: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, offset)
    os.lseek(fd, offset, os.SEEK_SET)  # Windows has no pwrite; one thread writes there
    return os.write(fd, data)


@contextmanager
def _flushed(fd: int, size: int) -> Iterator[None]:
    """Sync the written bytes while more are written, so that the disk is busy from the start.

    Copying first and syncing at the end would take the sum of both times.
    """

    def sync(stopped: Event) -> None:
        while not stopped.wait(0.01):
            os.fdatasync(fd)

    with Background(sync, size >= _MIN_FLUSHED and hasattr(os, "fdatasync")) as syncing:
        yield
    syncing.finish()  # the kernel reports a failed write-back only once, so the error must be raised here


def write_all(fd: int, data: bytes) -> None:
    """Write all of the data, in as many calls as it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class _Stopped(Exception):
    """Writing was stopped, so the result is no longer needed."""
