"""Moving the pieces of a plan into a file: with shared blocks if the filesystem has them, else copied by the kernel.

On XFS, btrfs and others two files can share blocks. ``copy_file_range`` does so if input and output have the same
offset within a block, from the start of a block on; plans are laid out for that (``zips.layout``). Anything before the
first whole block is copied.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, Queue
from typing import Final, TypeAlias

from ...base.errors import ChangedError, MalformedError, OutputError
from ...base.steps import salvage_step
from ..sources import (
    FILESYSTEM_BLOCK,
    AssembledSource,
    Computed,
    ExpectedChecksum,
    FileSource,
    FolderPlan,
    Piece,
    Plan,
    Span,
    size_of,
)
from ..threads import Background
from ..zips.reader import Nearby, checksum

#: Bytes moved by one call: large enough to cost nothing, small enough for progress and for ^C.
_COPY_SIZE: Final = 16 << 20
#: The buffer used if the kernel cannot copy.
_BUFFER: Final = 4 << 20
#: Shorter pieces are collected, to be written by one call: twice as fast for thousands of small tensors.
_SMALL: Final = 16 << 10
_COLLECTED: Final = 1 << 20
#: Chunks computed ahead of writing, and the bytes from which this pays off.
_QUEUE_SIZE: Final = 4
_MIN_AHEAD: Final = 2 << 20
#: Outputs of this size or more are synced while they grow.
_MIN_FLUSHED: Final = 64 << 20
#: Bytes from which verifying checksums in a thread pays off.
_MIN_VERIFIED: Final = 2 << 20
#: Why the kernel may be unable to copy: another filesystem, an old one, a forbidden call.
_UNSUPPORTED: Final = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)

Progress: TypeAlias = Callable[[int], None]


def _ignore(size: int) -> None:
    """Report no progress."""


@contextmanager
def as_output_failure() -> Iterator[None]:
    """Give a ChangedError the exit code of OutputError: an input changed while an output was made of it."""
    try:
        yield
    except ChangedError as error:
        error.exit_code = OutputError.exit_code
        raise


def write_pieces(plan: Plan, fd: int, progress: Progress | None = None) -> None:
    """Write all pieces of a plan to an empty file, without a final sync.

    Holes of sparse inputs stay holes, but in short pieces. Raises OSError, and ChangedError if an input ends too early.
    """
    with _Flusher(fd, plan.size), _Prefetcher(plan.pieces) as ahead:
        writer = _Writer(fd, progress or _ignore)
        for piece in plan.pieces:
            if isinstance(piece, Computed):
                writer.compute(piece, ahead.chunks(piece))
            elif size_of(piece) < _SMALL:
                writer.collect(piece)
            else:
                writer.write(piece)
        writer.finish()


def rehearse(plan: Plan | FolderPlan) -> None:
    """Compute everything that writing the plan would compute, but write nothing; raises what that raises."""
    pieces = plan.pieces if isinstance(plan, Plan) else [piece for _, file in plan.files for piece in file.pieces]
    with _Prefetcher(pieces) as ahead:
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
    if not isinstance(source, FileSource) or not source.sparse:
        yield piece, False
        return
    while at < end:
        data = min(source.next_data(at), end)
        if data > at:
            yield Span(source, at, data - at), True
        hole = min(source.next_hole(data), end)
        if hole > data:
            yield Span(source, data, hole - data), False
        elif data == at:  # the file changed under us, or the system cannot tell: copy the rest
            yield Span(source, at, end - at), False
            return
        at = hole


class _Writer:
    """Writes pieces to a file, one after the other; short ones are collected, to be written by one call."""

    def __init__(self, fd: int, progress: Progress) -> None:
        self._fd = fd
        self._progress = progress
        #: The offset in the file of the next piece.
        self._at = 0
        self._collected = bytearray()
        self._nearby = Nearby()
        #: Used again for what is put together: a new one for each part would take as long as filling it.
        self._buffer = bytearray()

    def collect(self, piece: bytes | Span) -> None:
        """Write a short piece, sooner or later."""
        self._collected += piece if isinstance(piece, bytes) else self._nearby.content(piece)
        if len(self._collected) >= _COLLECTED:
            self._empty()

    def write(self, piece: bytes | Span) -> None:
        """Write a piece."""
        self._empty()
        if isinstance(piece, bytes):
            self._put(piece)
            return
        for stretch, hole in data_and_holes(piece):
            if hole:
                os.lseek(self._fd, stretch.size, os.SEEK_CUR)
                self._done(stretch.size)
            elif isinstance(stretch.source, AssembledSource):
                self._assemble(stretch, stretch.source)
            else:
                self._copy(stretch)

    def compute(self, piece: Computed, chunks: Iterable[bytes]) -> None:
        """Write the bytes of a piece as they are computed."""
        self._empty()
        left = piece.size
        for data in chunks:
            left -= len(data)
            if left < 0:
                break
            self._put(data)
        if left:
            raise ChangedError("the input yielded another number of bytes than planned")

    def finish(self) -> None:
        """Write what is left, and a hole at the end."""
        self._empty()
        if os.fstat(self._fd).st_size < self._at:
            os.ftruncate(self._fd, self._at)

    def _empty(self) -> None:
        if self._collected:
            self._put(self._collected)
            self._collected.clear()

    def _put(self, data: bytes | bytearray | memoryview) -> None:
        write_all(self._fd, data)
        self._done(len(data))

    def _done(self, size: int) -> None:
        self._at += size
        self._progress(size)

    def _assemble(self, piece: Span, source: AssembledSource) -> None:
        size = min(_BUFFER, piece.size)
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        with memoryview(self._buffer) as buffer:
            for begin in range(0, piece.size, size):
                part = buffer[: min(size, piece.size - begin)]
                source.read_into(piece.offset + begin, part)
                self._put(part)

    def _copy(self, piece: Span) -> None:
        """Copy from file to file."""
        source, end = piece.source, self._at + piece.size
        shift = piece.offset - self._at
        if isinstance(source, FileSource) and hasattr(os, "copy_file_range"):
            with source.kept_open():
                if shift % FILESYSTEM_BLOCK == 0:
                    # A call that starts within a block copies everything: this one ends at the start of a block.
                    self._kernel_copy(source, shift, min(end, self._at + -self._at % FILESYSTEM_BLOCK))
                self._kernel_copy(source, shift, end)
        while self._at < end:
            data = source.read(self._at + shift, min(_BUFFER, end - self._at))
            if not data:
                raise ChangedError("the input ends before the bytes to copy")
            self._put(data)

    def _kernel_copy(self, source: FileSource, shift: int, end: int) -> None:
        """Let the kernel copy or share bytes up to ``end`` of the output; it copies fewer if it is unable to.

        ``shift`` is how much further they are in the source than in the output.
        """
        while self._at < end:
            try:
                count = os.copy_file_range(source.fd, self._fd, min(_COPY_SIZE, end - self._at), self._at + shift)
            except OSError as error:
                if error.errno in _UNSUPPORTED:
                    return
                raise
            if count == 0:
                return
            self._done(count)


class _Prefetcher(Background):
    """Computes pieces in a thread while the caller writes those that are ready.

    One thread for all of them: torch starts a new thread pool for each thread that computes.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = [piece for piece in pieces if isinstance(piece, Computed)]
        self._ready: Queue[bytes | BaseException | None] = Queue(_QUEUE_SIZE)
        super().__init__(sum(piece.size for piece in self._pieces) >= _MIN_AHEAD)

    def __exit__(self, kind: object, *_: object) -> None:
        self._stopped.set()
        while self._thread and self._thread.is_alive():
            with suppress(Empty):
                self._ready.get(timeout=0.01)  # it may be waiting for room to put one more
        super().__exit__(kind)

    def chunks(self, piece: Computed) -> Iterable[bytes]:
        """Return the chunks of the next computed piece, in the order of the plan."""
        return self._taken() if self._thread else piece.chunks()

    def _taken(self) -> Iterator[bytes]:
        while (data := self._ready.get()) is not None:
            if isinstance(data, BaseException):
                raise data
            yield data

    def _run(self) -> None:
        try:
            for piece in self._pieces:
                for data in piece.chunks():
                    self._ready.put(data)
                    if self._stopped.is_set():
                        return
                self._ready.put(None)
        except BaseException as error:
            self._ready.put(error)


class _Flusher(Background):
    """Syncs the written bytes while more are written: the disk is busy from the first byte on.

    Copying first and syncing at the end would take the time of both.
    """

    def __init__(self, fd: int, size: int) -> None:
        super().__init__(size >= _MIN_FLUSHED and hasattr(os, "fdatasync"))
        self._fd = fd

    def __exit__(self, kind: object, *_: object) -> None:
        super().__exit__(kind)
        # The kernel reports a failed write-back only once: it must not get lost here.
        if self._error and kind is None:
            raise self._error

    def _run(self) -> None:
        while not self._stopped.wait(0.01):
            os.fdatasync(self._fd)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of the data, in as many calls as it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class _Stopped(Exception):
    """The result is not needed any more."""


class Verifier(Background):
    """Verifies the checksums recorded in an input while its bytes are copied.

    ``finish`` raises MalformedError for the first that is wrong, and what reading raises.
    """

    def __init__(self, expected_checksums: Sequence[ExpectedChecksum]) -> None:
        super().__init__(sum(expected.span.size for expected in expected_checksums) >= _MIN_VERIFIED)
        self._expected = expected_checksums

    def _run(self) -> None:
        for expected in self._expected:
            if (
                checksum(expected.span, expected.size, expected.compressed, expected.where, self._advance)
                != expected.crc
            ):
                path = expected.span.source.name
                what = f"{expected.where} does not match its checksum: it is damaged"
                raise MalformedError(what, path=path, next=salvage_step(path))

    def _advance(self, size: int) -> None:
        if self._stopped.is_set():
            raise _Stopped
