"""Moving the pieces of a plan into a file: shared blocks where the filesystem has them, the kernel's copy elsewhere.

XFS, btrfs and others can let two files share blocks. ``copy_file_range`` does so where input and output stand at the
same place within a block, both from the beginning of a block on; plans are laid out for that (``zips.layout``). What
stands before the first whole block is copied.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, Queue
from typing import Final, TypeAlias

from ...base.errors import ChangedError, MalformedError, OutputError
from ...base.text import salvage_step
from ..sources import BLOCK, Claim, Computed, Files, FileSource, Piece, Plan, Span
from ..zips.reader import checksum

#: Bytes moved by one call: large enough to cost nothing, small enough for progress and for ^C.
_CHUNK: Final = 16 << 20
#: The buffer where the kernel cannot copy.
_BUFFER: Final = 4 << 20
#: Pieces that are computed before they are written, and the bytes from which on that pays.
_AHEAD: Final = 4
_AHEAD_FROM: Final = 2 << 20
#: Outputs from this size on are brought to the disk while they grow.
_FLUSH_FROM: Final = 64 << 20
#: Why the kernel may not be able to copy: another filesystem, an old one, a forbidden call.
_UNABLE: Final = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)

Progress: TypeAlias = Callable[[int], None]


@contextmanager
def writing() -> Iterator[None]:
    """An input that changes while an output is made of it is a failure of the output, and exits as one."""
    try:
        yield
    except ChangedError as error:
        error.exit_code = OutputError.exit_code
        raise


def produce(plan: Plan, fd: int, progress: Progress | None = None) -> None:
    """Write all pieces of a plan to an empty file; nothing is synced yet.

    Holes of sparse inputs become holes. Raises OSError, and ChangedError where an input ends too early.
    """
    with _Flusher(fd, plan.size), _Ahead(plan.pieces) as ahead:
        at = 0
        for piece in plan.pieces:
            if isinstance(piece, bytes):
                write_all(fd, piece)
                at += len(piece)
                if progress:
                    progress(len(piece))
            elif isinstance(piece, Computed):
                _compute(piece, ahead.chunks(piece), fd, progress)
                at += piece.size
            else:
                for stretch, hole in _stretches(piece):
                    if hole:
                        os.lseek(fd, stretch.size, os.SEEK_CUR)
                        if progress:
                            progress(stretch.size)
                    else:
                        _copy(stretch, fd, at, progress)
                    at += stretch.size
        if os.fstat(fd).st_size < at:
            os.ftruncate(fd, at)  # it ends with a hole


def rehearse(plan: Plan | Files, progress: Progress | None = None) -> None:
    """Compute what would be computed while the plan is written, and write nothing; raises what that raises."""
    pieces = plan.pieces if isinstance(plan, Plan) else [piece for _, file in plan.files for piece in file.pieces]
    with _Ahead(pieces) as ahead:
        for piece in pieces:
            for data in ahead.chunks(piece) if isinstance(piece, Computed) else ():
                if progress:
                    progress(len(data))


def _stretches(piece: Span) -> Iterator[tuple[Span, bool]]:
    """The piece in turns of data and holes: (stretch, whether it is a hole)."""
    source, at, end = piece
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
        elif data == at:  # the file changed under us, or the system cannot tell: copy what is left
            yield Span(source, at, end - at), False
            return
        at = hole


def _copy(piece: Span, fd: int, at: int, progress: Progress | None) -> None:
    """Copy from file to file; ``at`` is the place in the output, in bytes."""
    source = piece.source
    done = 0
    if isinstance(source, FileSource) and hasattr(os, "copy_file_range"):
        with source.held():
            if (piece.offset - at) % BLOCK == 0:
                # A call that begins within a block copies everything: this one ends where a block begins.
                done = _kernel_copy(piece._replace(size=min(-at % BLOCK, piece.size)), source.fd, fd, progress)
            done += _kernel_copy(Span(source, piece.offset + done, piece.size - done), source.fd, fd, progress)
    while done < piece.size:
        data = source.read(piece.offset + done, min(_BUFFER, piece.size - done))
        if not data:
            raise ChangedError("the input ends before the bytes that were to be copied")
        write_all(fd, data)
        done += len(data)
        if progress:
            progress(len(data))


def _kernel_copy(piece: Span, source: int, fd: int, progress: Progress | None) -> int:
    """Bytes that the kernel copied or shared; it may not be able to, then the rest is up to the caller."""
    done = 0
    while done < piece.size:
        try:
            count = os.copy_file_range(source, fd, min(_CHUNK, piece.size - done), piece.offset + done)
        except OSError as error:
            if error.errno in _UNABLE:
                return done
            raise
        if count == 0:
            return done
        done += count
        if progress:
            progress(count)
    return done


def _compute(piece: Computed, chunks: Iterable[bytes], fd: int, progress: Progress | None) -> None:
    left = piece.size
    for data in chunks:
        left -= len(data)
        if left < 0:
            break
        write_all(fd, data)
        if progress:
            progress(len(data))
    if left:
        raise ChangedError("the input gave another number of bytes than were to be written")


class _Ahead:
    """Computes pieces in one thread of its own while another writes what is there already.

    One thread for all: what torch computes in a new thread makes it start a new pool of threads.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = [piece for piece in pieces if isinstance(piece, Computed)]
        self._ready: Queue[bytes | BaseException | None] = Queue(_AHEAD)
        self._stopped = threading.Event()
        worth_it = sum(piece.size for piece in self._pieces) >= _AHEAD_FROM
        self._thread = threading.Thread(target=self._run, daemon=True) if worth_it else None

    def __enter__(self) -> _Ahead:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        while self._thread and self._thread.is_alive():
            with suppress(Empty):
                self._ready.get(timeout=0.01)  # it may wait for room to put one more
        if self._thread:
            self._thread.join()

    def chunks(self, piece: Computed) -> Iterable[bytes]:
        """The bytes of the next computed piece; to be asked for in the order of the plan."""
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


class _Flusher:
    """Brings what is written to the disk while more is written: the disk works from the first byte on.

    A copy that is synced only at its end takes the time of both, one after the other.
    """

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._done = threading.Event()
        self._error: OSError | None = None
        worth_it = size >= _FLUSH_FROM and hasattr(os, "fdatasync")
        self._thread = threading.Thread(target=self._run, daemon=True) if worth_it else None

    def __enter__(self) -> None:
        if self._thread:
            self._thread.start()

    def __exit__(self, kind: object, *_: object) -> None:
        self._done.set()
        if self._thread:
            self._thread.join()
        # The kernel reports a failed write-back once: it must not get lost here.
        if self._error and kind is None:
            raise self._error

    def _run(self) -> None:
        while not self._done.wait(0.01):
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                self._error = error
                return


def write_all(fd: int, data: bytes) -> None:
    """All of it, in as many calls as it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# -- The claims of an input are looked at while its bytes are copied, by a thread of its own

#: Bytes from which on a thread of its own pays.
_WORTH_IT: Final = 2 << 20


class _Stop(Exception):
    """Nobody waits for the answer any more."""


class Verifier:
    """Checks claims in the background, as a context; ``finish`` waits for the answer."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        self._claims = claims
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        worth_it = sum(claim.span.size for claim in claims) >= _WORTH_IT
        self._thread = threading.Thread(target=self._run, daemon=True) if worth_it else None

    def __enter__(self) -> Verifier:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._thread:
            self._thread.join()

    def finish(self) -> None:
        """Wait for the last claim; raises MalformedError for the first that is not true, and what reading raises."""
        if self._thread:
            self._thread.join()
        else:
            self._run()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for claim in self._claims:
                if checksum(claim.span, claim.size, claim.compressed, claim.where, self._advance) != claim.crc:
                    path = claim.span.source.name
                    what = f"{claim.where} does not agree with its checksum: it is damaged"
                    raise MalformedError(what, path=path, next=salvage_step(path))
        except _Stop:
            pass
        except BaseException as error:
            self._error = error

    def _advance(self, size: int) -> None:
        if self._stopped.is_set():
            raise _Stop
