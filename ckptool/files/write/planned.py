"""Read or compute the bytes of a plan before they are written, and check a written file against its plan."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from queue import Full, Queue
from threading import Event, Lock, Thread
from typing import Final, TypeAlias, TypeVar

from ...base.errors import ReadBackError, UnreadableError
from ..sources import Computed, Piece, Plan, Source, Span, size_of
from ..zips.reader import Window, nearby

#: Raises ReadBackError if a staged file is wrong.
Check: TypeAlias = Callable[[Source], None]
#: Bytes compared at both ends of what was copied from a file, or written to a store.
COMPARED: Final = 4096
#: Bytes of a computed piece that is kept in memory while it is read.
_KEPT: Final = 64 << 20


class PlanSource(Source):
    """The bytes of a planned output, which need not be written for it. One thread reads them.

    Computed pieces are computed again when they are read. The numbers on which late pieces depend must be known: the
    plan was executed, or it has none.
    """

    def __init__(self, plan: Plan, name: str) -> None:
        self.name = name
        self.size = plan.size
        self._pieces = plan.pieces
        self._begins = [0, *accumulate(map(size_of, plan.pieces))]
        # The last computed piece: its place, its bytes as far as they were read, and the chunks behind these.
        self._computed: tuple[int, bytearray, Iterator[bytes]] = -1, bytearray(), iter(())

    def read(self, offset: int, size: int) -> bytes:
        parts, end = [], min(offset + size, self.size)
        place = bisect_right(self._begins, offset) - 1
        while offset < end:
            begin = self._begins[place]
            parts.append(self._part(place, offset - begin, min(end, self._begins[place + 1]) - offset))
            place, offset = place + 1, self._begins[place + 1]
        return b"".join(parts)

    def readily(self, offset: int, size: int) -> int:
        """Return how many of ``size`` bytes come before the next piece that is computed from the inputs."""
        place, end = bisect_right(self._begins, offset) - 1, offset
        while end < min(offset + size, self.size):
            piece = self._pieces[place]
            if isinstance(piece, Computed) and not piece.late:
                break
            place, end = place + 1, self._begins[place + 1]
        return min(end - offset, size)

    def _part(self, place: int, begin: int, size: int) -> bytes:
        piece = self._pieces[place]
        if isinstance(piece, Span):
            return piece.source.read(piece.offset + begin, size)
        if isinstance(piece, Computed):
            if piece.size > _KEPT:
                return _cut(piece.chunks(), begin, begin + size)
            if self._computed[0] != place:
                self._computed = place, bytearray(), iter(piece.chunks())
            _, data, chunks = self._computed
            while len(data) < begin + size and (chunk := next(chunks, None)) is not None:
                data += chunk
            return bytes(data[begin : begin + size])
        return piece[begin : begin + size]


def _cut(chunks: Iterable[bytes], begin: int, end: int) -> bytes:
    """Return the bytes from ``begin`` to ``end`` of the bytes in chunks."""
    parts, at = [], 0
    for data in chunks:
        parts.append(bytes(data[max(begin - at, 0) : max(end - at, 0)]))
        at += len(data)
        if at >= end:
            break
    return b"".join(parts)


def check_planned(plan: Plan, staged: Source) -> None:
    """Raise ReadBackError unless a file has the plan's size, its literal bytes, and both ends of the copied spans."""
    size = plan.size
    if staged.size != size:
        promised, read = f"{size:,} bytes", f"{staged.size:,} bytes"
        raise ReadBackError("it has another size than planned", promised=promised, read=read)
    at = 0
    written, copied = Window(staged), nearby()
    for piece in plan.pieces:
        try:
            matches = _is_there(piece, written, at, copied)
        except UnreadableError as error:
            if error.path == staged.name and isinstance(error.__cause__, OSError):
                raise error.__cause__ from None  # writing failed, and the disk reports it late
            raise
        if not matches:
            promised = f"{size_of(piece):,} bytes from byte {at:,} on"
            raise ReadBackError("it has other bytes than planned", promised=promised, read="other bytes there")
        at += size_of(piece)


def _is_there(piece: Piece, staged: Window, at: int, copied: Callable[[Source], Window]) -> bool:
    """Return whether the piece is at ``at``, checked without computing it or reading more than both ends."""
    if isinstance(piece, bytes):
        return staged.read(at, len(piece)) == piece
    if not isinstance(piece, Span):
        return True
    source, offset, size = piece
    count = min(size, COMPARED)
    origin = copied(source)
    return all(staged.read(at + end, count) == origin.read(offset + end, count) for end in {0, size - count})


# -- computing ahead

#: Pieces and chunks of each computed ahead of writing, and the number of bytes from which this pays off.
_QUEUE_SIZE: Final = 2
_MIN_AHEAD: Final = 2 << 20

_Chunks: TypeAlias = "Queue[bytes | BaseException | None]"
_Item = TypeVar("_Item")


class Prefetcher:
    """Computes pieces in threads while the caller writes finished chunks.

    Pieces of fewer than ``short`` bytes are not handed over between threads, which takes longer: they are computed when
    they are written. So are late pieces, because all pieces before them are complete then. There are only two threads,
    because torch starts a thread pool for each thread that computes.
    """

    def __init__(self, pieces: Sequence[Piece], short: int) -> None:
        self._size = short
        computed = [piece for piece in pieces if isinstance(piece, Computed) and self._is_ahead(piece)]
        self._left = iter(computed)
        self._taking = Lock()
        self._stopped = Event()
        #: The chunks of each piece, in the order of the plan.
        self._begun: Queue[_Chunks] = Queue(_QUEUE_SIZE)
        workers = 2 if sum(piece.size for piece in computed) >= _MIN_AHEAD else 0
        self._threads = [Thread(target=self._run, daemon=True) for _ in range(workers)]

    def __enter__(self) -> Prefetcher:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def chunks(self, piece: Computed) -> Iterable[bytes]:
        """Return the chunks of the next computed piece, in the order of the plan."""
        return self._taken() if self._threads and self._is_ahead(piece) else piece.chunks()

    def _taken(self) -> Iterator[bytes]:
        chunks = self._begun.get()
        while (data := chunks.get()) is not None:
            if isinstance(data, BaseException):
                raise data
            yield data

    def _run(self) -> None:
        while True:
            with self._taking:
                piece = next(self._left, None)
                if piece is None:
                    return
                chunks: _Chunks = Queue(_QUEUE_SIZE)
                if not self._put(self._begun, chunks):
                    return
            try:
                for data in chain(piece.chunks(), (None,)):
                    if not self._put(chunks, data):
                        return
            except BaseException as error:
                self._put(chunks, error)
                return

    def _put(self, queue: Queue[_Item], item: _Item) -> bool:
        """Put an item, and return True; False if the caller needs no more."""
        while not self._stopped.is_set():
            with suppress(Full):
                queue.put(item, timeout=0.01)
                return True
        return False

    def _is_ahead(self, piece: Computed) -> bool:
        """Return whether a piece is computed by a thread before it is written."""
        return not piece.late and piece.size >= self._size
