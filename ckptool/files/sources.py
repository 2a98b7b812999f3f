"""Byte sources, spans of them, and plans: the pieces that make up an output."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain
from types import FunctionType
from typing import Final, TypeAlias

from ..base.dtypes import Dtype
from ..base.errors import ChangedError, MalformedError, UnreadableError
from ..base.records import NamedTuple
from ..base.steps import AnyStep, command, undo_step

#: The path of a file or folder.
FilePath: TypeAlias = str | os.PathLike[str]
#: Bytes of a block, the unit that filesystems share between files; the page size on most systems.
FILESYSTEM_BLOCK: Final = 4096
#: The suffix of the file beside another one that has its former header, after an edit in place.
JOURNAL: Final = ".ckptool-undo"
#: The first bytes of a header while an edit in place replaces the rest.
UNFINISHED: Final = b"\xff" * 8
#: The bytes at the start of a file that are read at once and kept.
_START: Final = FILESYSTEM_BLOCK
#: A file of at most so many bytes is read at once and kept: fewer calls of the system save more time than bytes do.
_WHOLE: Final = 1 << 16


class Source:
    """Random access to ``size`` bytes; ``name`` is the name that the user gave.

    ``identity`` is equal for two sources of one file, whatever their names; None for bytes without a file of their own.
    """

    name: str
    size: int
    identity: object = None

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly ``size`` bytes from ``offset``, or fewer at the end of the source."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file. By default the source has no file of its own."""

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce that the (offset, size) ranges are read next. A source of a slow store fetches them together."""

    def check_unchanged(self) -> None:
        """Raise ChangedError if the bytes changed since the source was opened."""

    def missing(self, ranges: Iterable[tuple[int, int]]) -> Iterable[Span]:
        """Return what reading these (offset, size) ranges would download; nothing for a file on a disk."""
        return ()

    def readily(self, offset: int, size: int) -> int:
        """Return how many of ``size`` bytes from ``offset`` can be read in advance: all, unless they are computed."""
        return size

    def local_file(self) -> FileSource | None:
        """Return the open file if the source is a whole file on a disk, for work that needs its descriptor, or None."""
        return None


class FileSource(Source):
    """A regular file, read with ``pread`` so that no position is shared between readers."""

    def __init__(self, name: str, fd: int, status: os.stat_result) -> None:
        self.name = name
        self.fd = fd
        self.size = status.st_size
        self.mode = stat.S_IMODE(status.st_mode)
        self.identity = (status.st_dev, status.st_ino)
        #: The number of hard links to the file.
        self.links = status.st_nlink
        #: The same as long as nobody writes to the file: (device, inode, size, modification time in ns).
        self.signature = signature(status)
        #: Whether the file may have holes or is compressed: its blocks (512 bytes each) have fewer bytes than its size.
        self.sparse = hasattr(status, "st_blocks") and status.st_blocks * 512 < status.st_size
        self._start = b""  # the first bytes, or all bytes of a small file, read once

    def kept_open(self) -> AbstractContextManager[object]:
        """Return a context in which ``fd`` is open."""
        return nullcontext()

    def read(self, offset: int, size: int) -> bytes:
        if self.fd < 0:
            raise UnreadableError("the checkpoint is closed", path=self.name, next="save it before it is closed")
        if size <= 0 or offset >= self.size:
            return b""
        if self.size <= _WHOLE or offset + size <= _START:
            self._start = self._start or self._read(0, self.size if self.size <= _WHOLE else _START)
            return self._start[offset : offset + size]
        return self._read(offset, size)

    def _read(self, offset: int, size: int) -> bytes:
        parts, got = [], 0
        try:
            while got < size and (data := _pread(self.fd, size - got, offset + got)):
                parts.append(data)
                got += len(data)
        except OSError as error:
            raise UnreadableError(f"reading failed at byte {offset:,}: {error.strerror}", path=self.name) from error
        if got < size and offset + size <= self.size:
            # Virtual files of the kernel (/sys) are shorter than declared from the start.
            raise self._changed(f"it ends at byte {offset + got:,} of {self.size:,}: it shrank while it was read")
        return b"".join(parts)

    def read_into(self, offset: int, buffer: bytearray | memoryview) -> None:
        """Fill a reusable buffer with the bytes from ``offset`` on; raises ChangedError if the file has fewer."""
        done = 0
        if hasattr(os, "preadv"):
            with suppress(OSError), self.kept_open():  # ``read`` then raises the reason
                done = os.preadv(self.fd, [buffer], offset)
        if done < len(buffer):
            data = self.read(offset + done, len(buffer) - done)
            if len(data) < len(buffer) - done:
                raise self._changed("the file shrank while it was read")
            buffer[done:] = data

    def next_data(self, offset: int) -> int:
        """Return the first offset, from ``offset`` on, that is not in a hole; ``offset`` if the system cannot tell."""
        if not hasattr(os, "SEEK_DATA"):
            return offset
        try:
            with self.kept_open():
                return os.lseek(self.fd, offset, os.SEEK_DATA)
        except OSError as error:
            # ENXIO: only a hole follows, up to the end. Some filesystems cannot tell at all.
            return self.size if error.errno == errno.ENXIO else offset

    def next_hole(self, offset: int) -> int:
        """Return the first offset, from ``offset`` on, that is in a hole; the end of the file if no hole follows."""
        with suppress(OSError), self.kept_open():
            return os.lseek(self.fd, offset, os.SEEK_HOLE) if hasattr(os, "SEEK_HOLE") else self.size
        return self.size

    def local_file(self) -> FileSource:
        return self

    def check_unchanged(self) -> None:
        """Raise ChangedError if the file changed since it was opened."""
        status = os.fstat(self.fd)
        if signature(status) != self.signature:
            raise self._changed("the file changed while it was read")

    def _changed(self, what: str) -> ChangedError:
        return ChangedError(what, path=self.name, next="try again when nobody writes to it")

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with suppress(OSError):  # nothing was written through it, so nothing can be lost
                os.close(fd)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        # A descriptor is meaningless in another process, which opens the file by path and refuses a changed one.
        return _reopened, (type(self), self.name, os.path.realpath(self.name), self.signature)


def signature(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return (device, inode, size, modification time in ns), which changes when the file is written or replaced."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _reopened(kind: type[FileSource], name: str, path: str, marks: tuple[int, int, int, int]) -> FileSource:
    """Reopen the file of a pickled source; raises ChangedError if it is a different file."""
    fd, status = open_file(path)
    if signature(status) != marks:
        os.close(fd)
        raise ChangedError("the file changed since the plan was made", path=name, next="try again")
    return kind(name, fd, status)


def links_outside(path: str) -> bool:
    """Return whether the path is a link to a file outside its folder.

    Links into ``../../blobs`` do not count: huggingface_hub makes such links in its own cache.
    """
    if not os.path.islink(path):
        return False
    folder = os.path.realpath(os.path.dirname(path))
    target = os.path.dirname(os.path.realpath(path))
    above, name = os.path.split(os.path.dirname(folder))
    blobs = os.path.join(above, "blobs") if name == "snapshots" else folder
    return target not in (folder, blobs) and not target.startswith(os.path.join(folder, ""))


def is_unfinished(source: Source) -> bool:
    """Return whether an edit in place of a header was not finished."""
    return source.read(0, len(UNFINISHED)) == UNFINISHED and os.path.lexists(source.name + JOURNAL)


def refuse_unfinished(source: Source) -> None:
    """Raise MalformedError if an edit in place of a header was not finished."""
    if is_unfinished(source):
        raise MalformedError("an edit in place was not finished", path=source.name, next=undo_step(source.name))


class FolderSource(Source):
    """A folder of files that form one checkpoint. It has no bytes of its own; its size is the sum of its files.

    ``beside`` are the paths of other files that belong to the folder, which an edit copies; ``links`` are those among
    them that lead out of the folder to something unknown. ``folder`` is the folder that contains the files, by default
    the folder of the first one. ``parts`` are their names in it, with "/", without unreferenced files (``strays``).
    """

    def __init__(
        self,
        name: str,
        files: Sequence[Source],
        beside: Sequence[str] = (),
        strays: Collection[str] = (),
        *,
        folder: str = "",
    ) -> None:
        self.name = name
        self.files = tuple(files)
        self.folder = folder or os.path.dirname(self.files[0].name) or os.curdir
        self.links = tuple(path for path in beside if links_outside(path))
        self.beside = tuple(path for path in beside if path not in self.links)
        names = (os.path.relpath(file.name, self.folder).replace(os.sep, "/") for file in files)
        self.parts = frozenset(names) - {*strays}
        self.size = sum(file.size for file in files)

    def read(self, offset: int, size: int) -> bytes:
        raise UnreadableError("it is a folder, not a file", path=self.name)

    def close(self) -> None:
        for file in self.files:
            file.close()


class BytesSource(Source):
    """Bytes in memory."""

    def __init__(self, data: bytes, name: str = "<bytes>") -> None:
        self.name = name
        self.data = data
        self.size = len(data)

    def read(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + max(size, 0)]


class SliceSource(Source):
    """A range of another source: a file within a file. Closing it does not close that source.

    ``crc`` is the CRC-32 that an archive records for it, or 0.
    """

    def __init__(self, source: Source, offset: int, size: int, name: str = "", crc: int = 0) -> None:
        self.crc = crc
        self.name = name or source.name
        self.source = source
        self.offset = offset
        self.size = max(min(size, source.size - offset), 0)

    def read(self, offset: int, size: int) -> bytes:
        if offset >= self.size or size <= 0:
            return b""
        return self.source.read(self.offset + offset, min(size, self.size - offset))

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        self.source.prefetch([(self.offset + offset, min(size, self.size - offset)) for offset, size in ranges])

    def missing(self, ranges: Iterable[tuple[int, int]]) -> Iterable[Span]:
        return self.source.missing([(self.offset + offset, size) for offset, size in ranges])

    def origins(self, offset: int, size: int) -> Iterator[Span]:
        yield Span(self.source, self.offset + offset, size)


class MemberSource(SliceSource):
    """A member of an archive. ``source`` holds its bytes; ``file`` is the archive, which is closed with the member.

    ``unpack`` is the command that extracts it.
    """

    def __init__(self, source: Source, file: Source, name: str, unpack: str) -> None:
        super().__init__(source, 0, source.size, name)
        self.file = file
        self.unpack = unpack

    def close(self) -> None:
        self.file.close()


if hasattr(os, "pread"):
    _pread = os.pread
else:  # Windows has no pread; one thread reads one source, so a seek works as well.

    def _pread(fd: int, size: int, offset: int, /) -> bytes:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, size)


_FILE_TYPES: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def open_source(path: FilePath) -> FileSource:
    """Open a regular file for reading; raises UnreadableError for anything else, and never blocks."""
    name = os.fspath(path)
    return FileSource(name, *open_file(name))


def open_file(name: str) -> tuple[int, os.stat_result]:
    """Return a descriptor of a regular file, and its status; raises as ``open_source`` does."""
    # O_NONBLOCK: opening a FIFO without a writer would hang.
    try:
        fd = os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        raise not_opened(error, name) from error
    status = os.fstat(fd)
    if kind := _FILE_TYPES.get(stat.S_IFMT(status.st_mode)):
        os.close(fd)
        hint = "name a checkpoint file in it" if stat.S_ISDIR(status.st_mode) else "copy its content to a file first"
        raise UnreadableError(f"it is {kind}, not a file", path=name, next=hint)
    return fd, status


def not_opened(error: OSError | ValueError, name: str) -> UnreadableError:
    """Return the error for a file that cannot be opened; a missing one may be meant for another in its folder."""
    step: AnyStep
    reason, step = open_error(error, name)
    if isinstance(error, FileNotFoundError) and not step:
        from glob import iglob  # only for missing files

        from ..base.nearest import file_near

        if any(iglob(name)):
            step = "the shell expands a pattern without quotes"
        elif near := file_near(name):
            reason, step = f"{reason}; is it {near!r}?", command("inspect", near)
    return UnreadableError(reason, path=name, next=step)


def open_error(error: OSError | ValueError, name: str) -> tuple[str, str]:
    """Return the reason why a file cannot be opened, and the next step, or ""."""
    if not isinstance(error, OSError):
        return f"not a file name: {error}", ""
    if error.errno == errno.ENOENT:
        if os.path.islink(name):
            return "the link points to nothing", f"see where it leads: ls -l {name}"
        return "no such file", ""
    if error.errno in (errno.EACCES, errno.EPERM):
        if os.path.isdir(name):
            return "it is a directory, not a file", "name a checkpoint file in it"
        return "no permission to read it", ""
    if error.errno == errno.ENXIO:
        return "it is a socket or a device without its driver, not a file", ""
    return error.strerror or str(error), ""


class Span(NamedTuple):
    """``size`` bytes of a source from ``offset``, to be copied unchanged."""

    source: Source
    offset: int
    size: int


def origins(span: Span) -> Iterable[Span]:
    """Return the spans of the files, or other original sources, from which the bytes of a span come.

    A source that makes its bytes from others has a method ``origins``. It yields the spans that it reads for some of
    its bytes; they may cover more than that.
    """
    of = getattr(span.source, "origins", None)
    return (span,) if of is None else chain.from_iterable(map(origins, of(span.offset, span.size)))


#: Types of parameters that hold no spans.
_LEAVES: Final = frozenset((int, float, bool, str, bytes, type(None), Dtype, FunctionType))


def spans_read(piece: object) -> Iterator[Span]:
    """Yield every span that is read to make the bytes of a piece, in no order.

    The parameters of a computed piece are data, so they contain all spans that it reads, at any depth.
    """
    work = [piece]
    while work:
        part = work.pop()
        kind = type(part)
        if kind in _LEAVES:
            continue
        if isinstance(part, Span):
            yield part
        elif isinstance(part, Computed):
            work.append(part.parameters)
        elif isinstance(part, (tuple, list)):  # twice as fast as ``tuple | list``
            work += part
        else:
            assert not hasattr(part, "read"), f"{kind.__name__}: a piece reads spans, not sources"


#: Called with each (source, offset, bytes) that was read.
Seen: TypeAlias = "Callable[[Source, int, bytes], None]"


class AssembledSource(Source):
    """A source that assembles its bytes from other sources.

    ``has_crc`` says that the input may record the CRC-32 of all its bytes.
    """

    has_crc: bool = False

    def stretches(self, offset: int, size: int) -> Iterator[Span]:
        """Yield ``size`` bytes as spans: of another source where it has many bytes in a row, else of this source."""
        raise NotImplementedError

    def read_into(self, offset: int, buffer: memoryview, seen: Seen | None = None) -> None:
        """Fill a buffer with the bytes from ``offset`` on, which must all exist; call ``seen`` with the bytes read."""
        raise NotImplementedError

    def checksums(self) -> Sequence[ExpectedChecksum]:
        """Return the checksums that the input records for the sources of these bytes."""
        return ()

    def crc(self) -> int:
        """Return the CRC-32 of all bytes: the recorded one, or the one computed from the bytes read."""
        raise NotImplementedError


class Deferred:
    """A number that is known once the bytes of a computed piece are known; ``value`` is valid from then on."""

    def __init__(self) -> None:
        self.value = 0

    def __index__(self) -> int:
        return self.value


class Computed(NamedTuple):
    """``size`` bytes that are computed while the output is written: ``operation(*parameters)`` yields them in order.

    It is plain data: the operation is a module-level function, which a pickle stores by name. Every call yields the
    same bytes; a ``Deferred`` number starts again. ``late`` says that the bytes depend on numbers from earlier pieces.
    """

    size: int
    operation: Callable[..., Iterable[bytes]]
    parameters: tuple[object, ...]
    late: bool = False

    def chunks(self) -> Iterable[bytes]:
        """Return the bytes, in chunks."""
        return self.operation(*self.parameters)


Piece: TypeAlias = "bytes | Span | Computed"


def size_of(piece: Piece) -> int:
    """Return the size of a piece in bytes."""
    return len(piece) if isinstance(piece, bytes) else piece.size


class ExpectedChecksum(NamedTuple):
    """The recorded CRC-32 ``crc`` of an input's ``span``, for bytes whose checksum the output does not repeat.

    ``size`` is in bytes, inflated if the span is ``compressed``; ``where`` names the bytes in messages. ``crc`` is None
    as a placeholder for all of ``AssembledSource.checksums``, which the source of the span knows once its bytes are
    read. ``where`` may be an object that makes the words when it is converted to a string. ``known`` has the checksums
    of spans that were already read, to compute a piece.
    """

    span: Span
    size: int
    compressed: bool
    crc: int | None
    where: object
    known: Mapping[Span, int] | None = None


class Plan(NamedTuple):
    """An output file as data: its pieces in order, and its size in bytes. Only ``write`` executes it.

    ``expected_checksums`` are verified while the file is written; if one does not match, there is no output.
    """

    pieces: tuple[Piece, ...]
    expected_checksums: tuple[ExpectedChecksum, ...] = ()

    @property
    def size(self) -> int:
        return sum([len(piece) if isinstance(piece, bytes) else piece.size for piece in self.pieces])


class FolderPlan(NamedTuple):
    """An output folder as data: the name and plan of each file, in the order in which they are written."""

    files: tuple[tuple[str, Plan], ...]

    @property
    def size(self) -> int:
        return sum(plan.size for _, plan in self.files)


class AppendPlan(NamedTuple):
    """A new version of a file after its ``old_size`` bytes, as data. Only ``write`` executes it.

    ``body`` follows the existing bytes. The file then ends with ``provisional_end``, at most one sector of 512 bytes,
    which leads readers to the former version. Then ``final_end`` replaces it; the two differ in one byte.
    """

    old_size: int
    body: bytes
    provisional_end: bytes
    final_end: bytes

    @property
    def size(self) -> int:
        """The size of the file afterwards, in bytes."""
        return self.old_size + len(self.body) + len(self.provisional_end)


class HeaderPlan(NamedTuple):
    """A new header for a file, as data. Only ``write`` executes it.

    ``new`` replaces ``old``, the first bytes of the file. If their sizes differ, the file must be written again, as
    ``whole`` says. ``edit`` describes the edit; ``time`` is in seconds since 1970.
    """

    old: bytes
    new: bytes
    whole: Plan
    edit: str
    time: int

    @property
    def fits(self) -> bool:
        """Whether the new header goes where the old one is."""
        return len(self.new) == len(self.old)


def merge_pieces(pieces: Iterator[Piece] | Sequence[Piece]) -> tuple[Piece, ...]:
    """Return the same bytes in as few pieces as possible: adjacent pieces joined, empty ones removed."""
    result: list[Piece] = []
    literal = bytearray()
    for piece in pieces:
        if isinstance(piece, bytes):
            literal += piece
            continue
        if piece.size == 0:
            continue
        if literal:
            result.append(bytes(literal))
            literal.clear()
        last = result[-1] if result else b""
        if isinstance(piece, Span) and isinstance(last, Span) and piece[:2] == (last.source, last.offset + last.size):
            result[-1] = last._replace(size=last.size + piece.size)
        else:
            result.append(piece)
    if literal:
        result.append(bytes(literal))
    return tuple(result)
