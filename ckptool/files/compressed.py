"""Compressed data: recognise the format by the first bytes, and inflate the content within a limit.

A zstd stream within a file is a source of its inflated bytes, with the package of the extra ``ckptool[zstd]``.
"""

from __future__ import annotations

import sys
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import IO, Any, Final

from ..base.errors import MalformedError, UnreadableError
from ..base.records import NamedTuple
from ..base.text import human_bytes
from .sources import Source, Span

#: The most bytes of memory for the dictionary of xz data.
_MAX_DICTIONARY: Final = 256 << 20
#: The most bytes of damaged data to inflate, and the bytes to feed at a time.
_START: Final = 16 << 20
_STEP: Final = 512
#: The most concatenated streams, because each one copies all bytes after it.
_MAX_STREAMS: Final = 100


class Compression(NamedTuple):
    """A compression format: its name, whether Python inflates it, whether other data may start alike, and the command
    that unpacks a file."""

    name: str
    inflates: bool = True
    doubtful: bool = False
    unpack: str = ""


#: (magic, compression). ``lzma`` has a byte of parameters and a power of two, the size of its dictionary.
_MAGIC: Final = (
    (b"\x1f\x8b\x08", Compression("gzip", unpack="gunzip")),
    (b"BZh", Compression("bzip2", unpack="bunzip2")),
    (b"\xfd7zXZ\0", Compression("xz", unpack="unxz")),
    (b"\x28\xb5\x2f\xfd", Compression("zstd", False, unpack="unzstd")),
    (b"\x04\x22\x4d\x18", Compression("lz4", False, unpack="unlz4")),
    (b"7z\xbc\xaf\x27\x1c", Compression("7z", False, unpack="7z x")),
    (b"Rar!", Compression("rar", False, unpack="unrar x")),
    *((bytes((0x1F, 0x9D, 0x80 | bits)), Compression("compress", False)) for bits in range(9, 17)),
    (b"ZF0x", Compression("joblib's old zlib", False)),
    (b"!<arch>\n", Compression("ar", False)),
    (b"07070", Compression("cpio", False)),
)
_MAGIC_BYTES: Final = tuple(magic for magic, _ in _MAGIC)


def compression_of(head: bytes) -> Compression | None:
    """Return the compression of data that begins with these bytes (16 or more), or None."""
    if head.startswith(_MAGIC_BYTES):
        return next(compression for magic, compression in _MAGIC if head.startswith(magic))
    # RFC 1950: method 8, a window of up to 32 KiB, and a checksum over the two bytes.
    if len(head) > 2 and head[0] & 0x8F == 8 and int.from_bytes(head[:2], "big") % 31 == 0:
        return Compression("zlib", doubtful=True, unpack="zlib-flate -uncompress")
    if head[13:14] == b"\0" and head[0] < 9 * 5 * 5:
        # liblzma accepts a dictionary of 2**n or 2**n + 2**(n - 1) bytes, or an unlimited one.
        size = int.from_bytes(head[1:5], "little")
        accepted = size > 0 and (size in (size & -size, 3 * (size & -size)) or size == 0xFFFFFFFF)
        if accepted and (head[5:13] == b"\xff" * 8 or head[10:13] == b"\0\0\0"):
            return Compression("lzma", doubtful=True)
    return None


def _inflaters(name: str) -> tuple[Callable[[], Any], type[Exception]]:
    """Return a function that makes a decompressor, and the exception that the decompressor raises for damage.

    A decompressor has ``decompress(data, max_length)``, ``eof`` and ``unused_data``.
    """
    if name == "bzip2":
        from bz2 import BZ2Decompressor

        return BZ2Decompressor, OSError
    if name in ("xz", "lzma"):
        import lzma

        form = lzma.FORMAT_XZ if name == "xz" else lzma.FORMAT_ALONE
        return partial(lzma.LZMADecompressor, form, _MAX_DICTIONARY), lzma.LZMAError
    return partial(zlib.decompressobj, {"gzip": 31, "zlib": 15}[name]), zlib.error


def inflate(source: Source, compression: Compression, limit: int) -> bytes:
    """Return the content of compressed data, with all concatenated streams.

    Raises UnreadableError for a compression that Python lacks and for more than ``limit`` bytes. Raises MalformedError
    for damage, and for bytes other than zeros after the last stream.
    """
    if not compression.inflates:
        raise UnreadableError(f"it is compressed ({compression.name}): unpack it first", path=source.name)
    if source.size > limit:
        raise _too_large(source, compression, limit)
    data = source.read(0, source.size)
    parts: list[bytes] = []
    where = f"{compression.name} data"
    make, failure = _inflaters(compression.name)
    while data.strip(b"\0"):
        if len(parts) == _MAX_STREAMS:
            raise UnreadableError(f"it is more than {_MAX_STREAMS} compressed parts: unpack it first", path=source.name)
        inflater = make()
        try:
            parts.append(inflater.decompress(data, limit + 1))
        except (failure, EOFError, MemoryError) as error:
            raise MalformedError(f"damaged: {error}", where=where) from error
        if sum(map(len, parts)) > limit:
            raise _too_large(source, compression, limit)
        if not inflater.eof:
            raise MalformedError("it is cut: it ends too early", where=where)
        data = inflater.unused_data
    return b"".join(parts)


def _too_large(source: Source, compression: Compression, limit: int) -> UnreadableError:
    what = f"it is compressed ({compression.name}), and larger than {human_bytes(limit)}: unpack it first"
    return UnreadableError(what, path=source.name)


def inflate_start(source: Source, compression: Compression) -> bytes:
    """Return the first megabytes of damaged data, as far as they inflate; b"" for a compression that Python lacks."""
    if not compression.inflates:
        return b""
    make, failure = _inflaters(compression.name)
    inflater, streams = make(), 1
    data = source.read(0, _START)
    parts: list[bytes] = []
    left = _START
    try:
        for at in range(0, len(data), _STEP):
            step = data[at : at + _STEP]
            while step and left > 0 and streams <= _MAX_STREAMS:
                parts.append(inflater.decompress(step, left))
                left -= len(parts[-1])
                step = inflater.unused_data.lstrip(b"\0") if inflater.eof else b""
                if inflater.eof:
                    inflater, streams = make(), streams + 1
    except (failure, EOFError, MemoryError):
        pass
    return b"".join(parts)


# -- zstd streams

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
