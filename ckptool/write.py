"""The only module that opens a file for writing: it runs a plan, whole or not at all.

The output grows in a temporary sibling ``.NAME.<random>.ckptool-tmp``, is brought to the disk, and only
then takes its name; then the folder is brought to the disk, too. Whatever happens before that, the path
holds what it held.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, Queue
from typing import Final, NamedTuple

from .errors import ChangedError, CkptoolError, OutputError, RefusedError, TargetError
from .source import Computed, FileSource, Piece, Plan, Source, Span

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["HASH", "Written", "check_output", "rehearse", "write_plan"]

#: Bytes moved by one call: large enough to cost nothing, small enough for progress and for ^C.
_CHUNK: Final = 16 << 20
#: The buffer where the kernel cannot copy.
_BUFFER: Final = 4 << 20
#: Pieces that are computed before they are written, and the bytes from which on that pays.
_AHEAD: Final = 4
_AHEAD_FROM: Final = 2 << 20
#: Outputs from this size on are brought to the disk while they grow.
_FLUSH_FROM: Final = 64 << 20
_SUFFIX: Final = ".ckptool-tmp"
#: In the name of an output: what the content decides.
HASH: Final = "{hash8}"
_PLACEHOLDER: Final = re.compile(r"\{hash\w*\}")

Progress = Callable[[int], None]


class Written(NamedTuple):
    """An output: its path and its size in bytes."""

    path: str
    size: int


def check_output(path: str, sources: Sequence[Source], *, force: bool = False) -> str:
    """The real path to write to, symbolic links followed.

    Raises RefusedError when it is one of the inputs (also by another name), or exists and ``force`` is not
    given; OutputError when nothing can be written there.
    """
    if not path or "\0" in path:
        raise OutputError("it is no file name", path=repr(path))
    unknown = next((found for found in _PLACEHOLDER.findall(os.path.basename(path)) if found != HASH), "")
    if unknown:
        raise TargetError(f"{unknown} stands for nothing, {HASH} is known", path=path, next="-o 'model-{hash8}.pth'")
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        step = "" if os.path.exists(folder) else f"mkdir -p {shlex.quote(os.path.dirname(path) or folder)}"
        what = "its folder is a file" if os.path.exists(folder) else "its folder does not exist"
        raise OutputError(what, path=path, next=step)
    try:
        status = os.stat(target)
    except FileNotFoundError:
        return target
    except OSError as error:
        raise OutputError(error.strerror or str(error), path=path) from error
    if stat.S_ISDIR(status.st_mode):
        raise OutputError("it is a directory", path=path, next="name a file in it")
    identity = (status.st_dev, status.st_ino)
    if any(isinstance(source, FileSource) and source.identity == identity for source in sources):
        raise RefusedError("the output is the input", path=path, next="write to another name, then rename it")
    if not stat.S_ISREG(status.st_mode):
        raise OutputError("it exists and is not a regular file", path=path)
    # A run that was killed between giving the file its name and removing the other one.
    _remove_leftovers(folder, os.path.basename(target))
    if not force:
        raise RefusedError("the output exists", path=path, next="replace it with --force, or choose another name")
    return target


def write_plan(
    plan: Plan,
    path: str,
    sources: Sequence[Source],
    *,
    force: bool = False,
    mode: int = 0o644,
    progress: Progress | None = None,
) -> Written:
    """Run a plan. ``mode`` is for a new file; one that is replaced keeps its own.

    ``{hash8}`` in the file's name becomes the first eight digits of the SHA-256 of its content, the form in which
    ``torch.hub.load_state_dict_from_url(check_hash=True)`` expects it. ``progress`` is called with the number of bytes
    of each step. Raises RefusedError and OutputError as ``check_output`` does, OutputError when the disk is full or
    fails, ChangedError when an input changed.
    """
    target = check_output(path, sources, force=force)
    if force and os.path.exists(target):
        mode = stat.S_IMODE(os.stat(target).st_mode)
    folder, name = os.path.split(target)
    _remove_leftovers(folder, name)
    temporary = os.path.join(folder, _stem(name) + os.urandom(6).hex() + _SUFFIX)
    try:
        # From the first moment on: a signal may come as soon as the file is there.
        _produce(plan, _opened(temporary), mode, sources, progress)
        if HASH in name:
            digest = _digest(temporary)
            path = os.path.join(os.path.dirname(path), os.path.basename(path).replace(HASH, digest))
            target = check_output(path, sources, force=force)
            if force and os.path.exists(target):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
        if force:
            os.replace(temporary, target)
        else:
            _take_name(temporary, target)
        _sync_folder(folder)
    except OSError as error:
        left = _discard(temporary)
        what = f"writing failed: {error.strerror or error}"
        raise OutputError(f"{what}; {left} is left behind" if left else what, path=path) from error
    except BaseException as error:
        _discard(temporary)
        if isinstance(error, CkptoolError) and not error.path:
            error.path = path
        raise
    return Written(path, plan.size)


def rehearse(plan: Plan, progress: Progress | None = None) -> None:
    """Compute what would be computed while the plan is written, and write nothing; raises what that raises."""
    with _Ahead(plan.pieces) as ahead:
        for piece in plan.pieces:
            for data in ahead.chunks(piece) if isinstance(piece, Computed) else ():
                if progress:
                    progress(len(data))


def _stem(name: str) -> str:
    """What temporary files of this output begin with; names are limited in bytes, not in characters."""
    return "." + os.fsencode(name)[:180].decode("utf-8", "ignore") + "."


def _opened(path: str) -> int:
    """A new file beside the output, locked as long as it is open."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    fd = os.open(path, flags, 0o600)
    if fcntl is not None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return fd  # a filesystem without locks: another run may take the file for a leftover, and fail
    return fd


def _produce(plan: Plan, fd: int, mode: int, sources: Sequence[Source], progress: Progress | None) -> None:
    try:
        with _Flusher(fd, plan.size), _Ahead(plan.pieces) as ahead:
            for piece in plan.pieces:
                if isinstance(piece, Computed):
                    _compute(piece, ahead.chunks(piece), fd, progress)
                else:
                    _copy(piece, fd, progress)
        if hasattr(os, "fchmod"):
            os.fchmod(fd, mode & 0o777)
        for source in sources:
            if isinstance(source, FileSource):
                source.check_unchanged()
        os.fsync(fd)
    finally:
        os.close(fd)


def _digest(path: str) -> str:
    """The first eight digits of the SHA-256 of a file's content."""
    from hashlib import sha256  # OpenSSL takes milliseconds to load

    digest = sha256()
    with open(path, "rb", buffering=0) as file:
        while data := file.read(_BUFFER):
            digest.update(data)
    return digest.hexdigest()[:8]


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


def _copy(piece: bytes | Span, fd: int, progress: Progress | None) -> None:
    if isinstance(piece, bytes):
        _write_all(fd, piece)
        if progress:
            progress(len(piece))
        return
    source = piece.source
    done = 0
    if isinstance(source, FileSource) and hasattr(os, "copy_file_range"):
        done = _kernel_copy(piece, source.fd, fd, progress)
    while done < piece.size:
        data = source.read(piece.offset + done, min(_BUFFER, piece.size - done))
        if not data:
            raise ChangedError("the input ends before the bytes that were to be copied")
        _write_all(fd, data)
        done += len(data)
        if progress:
            progress(len(data))


def _compute(piece: Computed, chunks: Iterable[bytes], fd: int, progress: Progress | None) -> None:
    left = piece.size
    for data in chunks:
        left -= len(data)
        if left < 0:
            break
        _write_all(fd, data)
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


def _kernel_copy(piece: Span, source: int, fd: int, progress: Progress | None) -> int:
    """Bytes that the kernel copied from file to file; it may not be able to, then the rest is up to the caller."""
    done = 0
    while done < piece.size:
        try:
            count = os.copy_file_range(source, fd, min(_CHUNK, piece.size - done), piece.offset + done)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF):
                return done
            raise
        if count == 0:
            return done
        done += count
        if progress:
            progress(count)
    return done


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _take_name(temporary: str, target: str) -> None:
    """Give the file its name without ever replacing another: link, where the filesystem has links."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise RefusedError("the output exists", path=target, next="replace it with --force") from None
    except OSError:
        if os.path.lexists(target):
            raise RefusedError("the output exists", path=target, next="replace it with --force") from None
        os.rename(temporary, target)
        return
    os.unlink(temporary)


def _sync_folder(folder: str) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return  # a folder that may be written to but not read: the output is there and whole
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network filesystems cannot sync a folder; the file itself is safe.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


def _discard(temporary: str) -> str:
    """Remove a temporary file; its name when that fails, so that a message can tell."""
    try:
        os.unlink(temporary)
    except FileNotFoundError:
        return ""
    except OSError:
        return temporary
    return ""


def _remove_leftovers(folder: str, name: str) -> None:
    """Remove what a killed run left for the same output. A run that is alive holds a lock on its file."""
    if fcntl is None:
        return
    head = _stem(name)
    try:
        names = [entry for entry in os.listdir(folder) if entry.startswith(head) and entry.endswith(_SUFFIX)]
    except OSError:
        return  # a folder that may be written to but not listed
    for entry in names:
        path = os.path.join(folder, entry)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        except OSError:
            continue
        finally:
            os.close(fd)
