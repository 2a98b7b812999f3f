"""Opening things to read: byte sources, spans of them, and the pieces that an output is made of."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple, Protocol, TypeAlias

from ..base.errors import ChangedError, UnreadableError

#: Bytes of a block that filesystems share between files: the page of most systems.
BLOCK: Final = 4096


class Source(Protocol):
    """Bytes at offsets. ``size`` in bytes; ``name`` as the user gave it."""

    name: str
    size: int

    def read(self, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes from ``offset``, or fewer where the source ends."""
        ...

    def close(self) -> None: ...


class FileSource:
    """A regular file, read with ``pread`` so that no position is shared between readers."""

    def __init__(self, name: str, fd: int, status: os.stat_result) -> None:
        self.name = name
        self.fd = fd
        self.size = status.st_size
        self.mode = stat.S_IMODE(status.st_mode)
        self.identity = (status.st_dev, status.st_ino)
        #: How many names it has.
        self.links = status.st_nlink
        self._mtime = status.st_mtime_ns
        #: May it have holes? Fewer blocks (of 512 bytes) than it has bytes; compression makes such files, too.
        self.sparse = hasattr(status, "st_blocks") and status.st_blocks * 512 < status.st_size

    def held(self) -> AbstractContextManager[object]:
        """As long as this lasts, ``fd`` is the open file."""
        return nullcontext()

    def read(self, offset: int, size: int) -> bytes:
        if self.fd < 0:
            raise UnreadableError("the checkpoint is closed", path=self.name, next="save it before it is closed")
        if size <= 0 or offset >= self.size:
            return b""
        try:
            first = _pread(self.fd, size, offset)
            if len(first) == size:
                return first
            parts = [first]
            got = len(first)
            while got < size and parts[-1]:
                parts.append(_pread(self.fd, size - got, offset + got))
                got += len(parts[-1])
        except OSError as error:
            raise UnreadableError(f"reading failed at byte {offset:,}: {error.strerror}", path=self.name) from error
        if got < size and offset + size <= self.size:
            # Files that the kernel makes up (/sys) are shorter than they say from the start.
            what = f"it ends at byte {offset + got:,} of {self.size:,}: it shrank while it was read"
            raise ChangedError(what, path=self.name, next="try again when nobody writes to it")
        return b"".join(parts)

    def read_into(self, offset: int, buffer: bytearray) -> None:
        """Fill a buffer, which can be used again, with the bytes from ``offset`` on; all of them must be there."""
        done = _preadv(self.fd, buffer, offset) if self.fd >= 0 else 0
        if done < len(buffer):
            data = self.read(offset + done, len(buffer) - done)
            if len(data) < len(buffer) - done:
                what = "the file shrank while it was read"
                raise ChangedError(what, path=self.name, next="try again when nobody writes to it")
            buffer[done:] = data

    def next_data(self, offset: int) -> int:
        """The first offset from here on that is not in a hole of a sparse file, where the system can tell."""
        if not hasattr(os, "SEEK_DATA"):
            return offset
        try:
            return os.lseek(self.fd, offset, os.SEEK_DATA)
        except OSError as error:
            # ENXIO: nothing but a hole up to the end. Some filesystems cannot tell at all.
            return self.size if error.errno == errno.ENXIO else offset

    def next_hole(self, offset: int) -> int:
        """The first offset from here on that is in a hole, or the end of the file; the end where nobody can tell."""
        if not hasattr(os, "SEEK_HOLE"):
            return self.size
        try:
            return os.lseek(self.fd, offset, os.SEEK_HOLE)
        except OSError:
            return self.size

    def check_unchanged(self) -> None:
        """Raise ChangedError if somebody wrote to the file since it was opened."""
        status = os.fstat(self.fd)
        if (status.st_size, status.st_mtime_ns) != (self.size, self._mtime):
            raise ChangedError(
                "the file changed while it was read", path=self.name, next="try again when nobody writes to it"
            )

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        try:
            os.close(fd)
        except OSError:
            return  # nothing was written through it: there is nothing to lose

    def __del__(self) -> None:
        self.close()


def leads_out(path: str) -> bool:
    """Is it a link to a file that is not in its folder? The cache of huggingface_hub is a folder of links into
    ``../../blobs``, which it filled itself."""
    if not os.path.islink(path):
        return False
    folder = os.path.realpath(os.path.dirname(path))
    target = os.path.dirname(os.path.realpath(path))
    above, name = os.path.split(os.path.dirname(folder))
    blobs = os.path.join(above, "blobs") if name == "snapshots" else folder
    return target not in (folder, blobs) and not target.startswith(os.path.join(folder, ""))


class FolderSource:
    """A folder of files that are one checkpoint: its size is the sum of theirs. It has no bytes of its own.
    ``beside`` are the paths of other files that belong to it: an edit of the folder takes them along. ``links`` are
    such that are links out of the folder: nothing is known of what they lead to. ``parts`` are the names of the files
    that are the checkpoint, but for ``strays``, which nothing in it names."""

    def __init__(
        self,
        name: str,
        files: Sequence[FileSource],
        beside: Sequence[str] = (),
        strays: Collection[str] = (),
    ) -> None:
        self.name = name
        self.files = tuple(files)
        self.links = tuple(path for path in beside if leads_out(path))
        self.beside = tuple(path for path in beside if path not in self.links)
        self.parts = frozenset(os.path.basename(file.name) for file in files) - {*strays}
        self.size = sum(file.size for file in files)

    def read(self, offset: int, size: int) -> bytes:
        raise UnreadableError("it is a folder, not a file", path=self.name)

    def close(self) -> None:
        for file in self.files:
            file.close()


class BytesSource:
    """Bytes in memory."""

    def __init__(self, data: bytes, name: str = "<bytes>") -> None:
        self.name = name
        self.data = data
        self.size = len(data)

    def read(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + max(size, 0)]

    def close(self) -> None:
        pass


class SliceSource:
    """A stretch of another source: a file within a file. It neither owns nor closes the other."""

    def __init__(self, source: Source, offset: int, size: int, name: str = "") -> None:
        self.name = name or source.name
        self.source = source
        self.offset = offset
        self.size = max(min(size, source.size - offset), 0)

    def read(self, offset: int, size: int) -> bytes:
        if offset >= self.size or size <= 0:
            return b""
        return self.source.read(self.offset + offset, min(size, self.size - offset))

    def close(self) -> None:
        pass


class ContainedSource:
    """A file within an archive: ``inner`` are its bytes, ``file`` is the archive, which is closed with it.

    ``unpack`` is the command that makes a file of its own of it.
    """

    def __init__(self, inner: Source, file: FileSource, name: str, unpack: str) -> None:
        self.name = name
        self.size = inner.size
        self.inner = inner
        self.file = file
        self.unpack = unpack

    def read(self, offset: int, size: int) -> bytes:
        return self.inner.read(offset, size)

    def close(self) -> None:
        self.file.close()


if hasattr(os, "pread"):
    _pread = os.pread
else:  # Windows has no pread; one thread reads one source, so a seek is as good.

    def _pread(fd: int, size: int, offset: int, /) -> bytes:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, size)


def _preadv(fd: int, buffer: bytearray, offset: int) -> int:
    """Bytes read right into a buffer, 0 where that is not possible: then ``read`` says why."""
    if not hasattr(os, "preadv"):
        return 0
    try:
        return os.preadv(fd, [buffer], offset)
    except OSError:
        return 0


_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def open_source(path: str | os.PathLike[str]) -> FileSource:
    """Open a regular file for reading; raises UnreadableError for anything else, and never waits."""
    name = os.fspath(path)
    return FileSource(name, *open_file(name))


def open_file(name: str) -> tuple[int, os.stat_result]:
    """A descriptor of a regular file, and what the system says of it; raises as ``open_source`` does."""
    # O_NONBLOCK: opening a FIFO that nobody writes to would hang.
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        fd = os.open(name, flags)
    except (OSError, ValueError) as error:
        reason, hint = _why(error, name)
        raise UnreadableError(reason, path=name, next=hint) from error
    status = os.fstat(fd)
    for test, words in _KINDS:
        if test(status.st_mode):
            os.close(fd)
            if test is stat.S_ISDIR:
                raise UnreadableError(f"it is {words}, not a file", path=name, next="name a checkpoint file in it")
            raise UnreadableError(f"it is {words}, not a file", path=name, next="copy its content to a file first")
    return fd, status


def _why(error: OSError | ValueError, name: str) -> tuple[str, str]:
    if not isinstance(error, OSError):
        return f"no file name: {error}", ""
    if error.errno == errno.ENOENT:
        if os.path.islink(name):
            return "the link points to nothing", f"see where it leads: ls -l {name}"
        return "no such file", ""
    if error.errno in (errno.EACCES, errno.EPERM) and os.path.isdir(name):
        return "it is a directory, not a file", "name a checkpoint file in it"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "no permission to read it", ""
    if error.errno == errno.ENXIO:
        return "it is a socket or a device without its driver, not a file", ""
    return error.strerror or str(error), ""


class Span(NamedTuple):
    """Bytes of a source, to be carried over as they are: ``size`` bytes from ``offset``."""

    source: Source
    offset: int
    size: int


class Computed(NamedTuple):
    """``size`` bytes that come into being while the output is written.

    ``chunks`` gives them in order, and the same ones whenever it is called: a checksum that it keeps begins anew.
    """

    size: int
    chunks: Callable[[], Iterable[bytes]]


Piece: TypeAlias = "bytes | Span | Computed"


def size_of(piece: Piece) -> int:
    """The bytes of a piece."""
    return len(piece) if isinstance(piece, bytes) else piece.size


class Claim(NamedTuple):
    """What an input says of bytes of its own, and an output will not: ``span`` holds ``size`` bytes, inflated where it
    is ``compressed``, whose CRC-32 is ``crc``. ``where`` names them in words."""

    span: Span
    size: int
    compressed: bool
    crc: int
    where: str


class Plan(NamedTuple):
    """An output file as data: its pieces in order, and its size in bytes. Only ``write`` executes it.

    ``claims`` must turn out to be true while it is written, or there is no output.
    """

    pieces: tuple[Piece, ...]
    claims: tuple[Claim, ...] = ()

    @property
    def size(self) -> int:
        return sum(map(size_of, self.pieces))


class Files(NamedTuple):
    """An output folder as data: the plan of each file by its name, in the order in which they are written."""

    files: tuple[tuple[str, Plan], ...]

    @property
    def size(self) -> int:
        return sum(plan.size for _, plan in self.files)


class Appending(NamedTuple):
    """A new version of a file behind its ``at`` bytes, as data: only ``write`` executes it.

    ``body`` follows what is there. The file then ends with ``holding``, at most a sector of 512 bytes, which leads
    readers to the former version until ``ending`` takes the place of its last bytes. Those differ in one byte.
    """

    at: int
    body: bytes
    holding: bytes
    ending: bytes

    @property
    def size(self) -> int:
        """The bytes of the file afterwards."""
        return self.at + len(self.body) + len(self.holding)


def merged(pieces: Iterator[Piece] | Sequence[Piece]) -> tuple[Piece, ...]:
    """The same bytes in as few pieces as possible: neighbours join, empty pieces go."""
    result: list[Piece] = []
    literal = bytearray()
    for piece in pieces:
        if isinstance(piece, bytes):
            literal += piece
            continue
        if piece.size == 0:
            continue
        if isinstance(piece, Computed):
            if literal:
                result.append(bytes(literal))
                literal.clear()
            result.append(piece)
            continue
        if literal:
            result.append(bytes(literal))
            literal.clear()
        last = result[-1] if result else b""
        if isinstance(last, Span) and last.source is piece.source and last.offset + last.size == piece.offset:
            result[-1] = Span(last.source, last.offset, last.size + piece.size)
        else:
            result.append(piece)
    if literal:
        result.append(bytes(literal))
    return tuple(result)
