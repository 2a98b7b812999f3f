"""Compute pieces of an output before they are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from queue import Full, Queue
from threading import Event, Lock, Thread
from typing import Final, TypeAlias, TypeVar

from ..sources import Computed, Piece

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
                for data in piece.chunks():
                    if not self._put(chunks, data):
                        return
                if not self._put(chunks, None):
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
