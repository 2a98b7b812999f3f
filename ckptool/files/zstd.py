"""A zstd stream within a file as a source of its inflated bytes, with the package of the extra ``ckptool[zstd]``."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import IO, Any, Final

from ..base.errors import MalformedError
from ..base.text import human_bytes
from .sources import Source, Span

#: The command to type if the package is missing.
INSTALL: Final = "pip install 'ckptool[zstd]'"
#: Whether Python has its own zstd module, as it does since 3.14.
_BUILT_IN: Final = sys.version_info >= (3, 14)
_CHUNK: Final = 1 << 20
#: The number of inflated streams to keep, and the most bytes of each in memory; larger ones go to unnamed files.
_KEPT: Final = 16
_IN_MEMORY: Final = 4 << 20


def available() -> bool:
    """Return whether a module is available that inflates zstd."""
    if not _BUILT_IN:
        try:
            import zstandard  # noqa: F401
        except ImportError:
            return False
    return True


class ZstdSource(Source):
    """The inflated content of ``length`` bytes of a source from ``at`` on.

    The bytes are inflated immediately, and again if they are read after many others. Raises MalformedError for damage,
    and for more than ``most`` bytes. Threads may share it.
    """

    def __init__(self, source: Source, at: int, length: int, most: int, name: str) -> None:
        self.name = name
        self.source, self.at, self.length, self.most = source, at, length, most
        with _LOCK:
            self.size = self._inflated()[1]

    def read(self, offset: int, size: int) -> bytes:
        with _LOCK:
            file, end = self._inflated()
            file.seek(offset)
            return file.read(max(min(size, end - offset), 0))

    def missing(self, ranges: Iterable[tuple[int, int]]) -> Iterable[Span]:
        return self.source.missing([(self.at, self.length)])

    def close(self) -> None:
        with _LOCK:
            kept = _INFLATED.pop(id(self), None)
            if kept is not None:
                kept[0].close()

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return ZstdSource, (self.source, self.at, self.length, self.most, self.name)

    def _inflated(self) -> tuple[IO[bytes], int]:
        """Return a file with the inflated bytes, and their number."""
        kept = _INFLATED.get(id(self))
        if kept is None:
            import tempfile  # takes milliseconds, and few folders are compressed

            file: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115  # closed with the last
            for chunk in _inflate(self.source, self.at, self.length, self.most):
                file.write(chunk)
            kept = _INFLATED[id(self)] = file, file.tell()
            if len(_INFLATED) > _KEPT:
                _INFLATED.popitem(last=False)[1][0].close()
        _INFLATED.move_to_end(id(self))
        return kept


_INFLATED: Final[OrderedDict[int, tuple[IO[bytes], int]]] = OrderedDict()
#: Reentrant, because garbage collection may close a source at any point.
_LOCK: Final = threading.RLock()


class _Packed:
    """A stretch of a source as a file that is read once."""

    def __init__(self, source: Source, at: int, length: int) -> None:
        self._source, self._at, self._end = source, at, at + length

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        left = self._end - self._at
        data = self._source.read(self._at, left if size < 0 else min(size, left))
        self._at += len(data)
        return data


def _inflate(source: Source, at: int, length: int, most: int) -> Iterator[bytes]:
    """Yield the content of the first frame, as torch reads it."""
    stream, failure = _stream(_Packed(source, at, length))
    size = 0
    try:
        while chunk := stream.read(_CHUNK):
            size += len(chunk)
            if size > most:
                what = f"its zstd data inflates to more than {human_bytes(most)}, which is more than it can hold"
                raise MalformedError(what, path=source.name)
            yield chunk
    except (failure, EOFError) as error:
        raise MalformedError(f"its zstd data is damaged: {error}", path=source.name) from error


def _stream(packed: Any) -> tuple[Any, type[Exception]]:
    """Return a reader of the inflated bytes, and the exception that it raises for damage."""
    if _BUILT_IN:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]

        return zstd.ZstdFile(packed), zstd.ZstdError
    import zstandard  # type: ignore[import-not-found,unused-ignore]

    return zstandard.ZstdDecompressor().stream_reader(packed), zstandard.ZstdError
