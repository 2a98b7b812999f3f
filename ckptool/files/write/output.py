"""A plan becomes a new file, whole or not at all.

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
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeAlias

from ...base.errors import CkptoolError, OutputError, ReadBackError, RefusedError, TargetError
from ..sources import FileSource, Piece, Plan, Source, Span, size_of
from .copying import Progress, Verifier, produce, writing

# -- Two names for each other's file or folder, in one step where the system has that

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_RENAME_SWAP: Final = 2


def exchange(one: str, other: str) -> None:
    """Let both paths, which must exist, stand for what the other one stood for.

    Where the filesystem cannot do that at once, ``one`` is away for a moment: a run that is killed right then leaves
    what it stood for under the name of ``other`` with ``.old`` behind it. Raises OSError.
    """
    if _at_once(os.fsencode(one), os.fsencode(other)):
        return
    aside = f"{other}.old"
    os.rename(one, aside)
    try:
        os.rename(other, one)
    except BaseException:
        os.rename(aside, one)
        raise
    os.rename(aside, other)


def _at_once(one: bytes, other: bytes) -> bool:
    """Did the system exchange them?"""
    try:
        import ctypes  # takes milliseconds to load, and some builds of Python lack it

        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            return bool(libc.renamex_np(one, other, _RENAME_SWAP) == 0)
        return bool(libc.renameat2(_AT_FDCWD, one, _AT_FDCWD, other, _RENAME_EXCHANGE) == 0)
    except (ImportError, OSError, AttributeError, TypeError):
        return False


# -- What is staged is looked at before it takes its name: nothing is committed that was not read back

#: Raises ReadBackError where a staged file, or a folder by its path, is not what it must be.
Check: TypeAlias = Callable[[Source], None]
FolderCheck: TypeAlias = Callable[[str], None]
#: Of what was copied from a file, bytes at both ends that are compared.
_ENDS: Final = 4096
#: Bytes from which on a thread of its own pays.
_WORTH_IT: Final = 1 << 20


def as_planned(plan: Plan) -> Check:
    """Is the file as long as the plan, with its literal bytes in their places, and the ends of those it copied?"""

    def check(staged: Source) -> None:
        if staged.size != plan.size:
            promised, read = f"{plan.size:,} bytes", f"{staged.size:,} bytes"
            raise ReadBackError("it has another size than planned", promised=promised, read=read)
        at = 0
        for piece in plan.pieces:
            if not _stands(piece, staged, at):
                words = f"{size_of(piece):,} bytes from byte {at:,} on"
                raise ReadBackError("it holds other bytes than planned", promised=words, read="other bytes there")
            at += size_of(piece)

    return check


def _stands(piece: Piece, staged: Source, at: int) -> bool:
    """Is the piece there, as far as that can be seen without computing or reading all of it?"""
    if isinstance(piece, bytes):
        return staged.read(at, len(piece)) == piece
    if not isinstance(piece, Span):
        return True
    source, offset, size = piece
    count = min(size, _ENDS)
    return all(staged.read(at + end, count) == source.read(offset + end, count) for end in {0, size - count})


class Synced:
    """Brings a file to the disk while something else is done with it. The error of either is raised."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True) if size >= _WORTH_IT else None

    def __enter__(self) -> None:
        if self._thread:
            self._thread.start()

    def __exit__(self, kind: object, *_: object) -> None:
        if self._thread:
            self._thread.join()
        elif kind is None:
            os.fsync(self._fd)
        if self._error and kind is None:
            raise self._error

    def _run(self) -> None:
        try:
            os.fsync(self._fd)
        except BaseException as error:
            self._error = error


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


#: Bytes read at once.
_BUFFER: Final = 4 << 20
_SUFFIX: Final = ".ckptool-tmp"
#: In the name of an output: what the content decides.
HASH: Final = "{hash8}"
_PLACEHOLDER: Final = re.compile(r"\{hash\w*\}")


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
    remove_leftovers(folder, os.path.basename(target))
    if not force:
        raise RefusedError("the output exists", path=path, next="replace it with --force, or choose another name")
    return target


@writing()
def write_plan(
    plan: Plan,
    path: str,
    sources: Sequence[Source],
    *,
    force: bool = False,
    mode: int = 0o644,
    progress: Progress | None = None,
    check: Check | None = None,
) -> Written:
    """Run a plan. ``mode`` is for a new file; one that is replaced keeps its own.

    ``{hash8}`` in the file's name becomes the first eight digits of the SHA-256 of its content, the form in which
    ``torch.hub.load_state_dict_from_url(check_hash=True)`` expects it. ``progress`` is called with the number of bytes
    of each step. ``check`` is given what is about to take the name, and raises ReadBackError where that is not what it
    must be; without one it must be what the plan says. Raises RefusedError and OutputError as ``check_output`` does,
    OutputError when the disk is full or fails, ChangedError when an input changed.
    """
    target = check_output(path, sources, force=force)
    if force and os.path.exists(target):
        mode = stat.S_IMODE(os.stat(target).st_mode)
    folder, name = os.path.split(target)
    remove_leftovers(folder, name)
    temporary = temporary_name(folder, name)
    try:
        # From the first moment on: a signal may come as soon as the file is there.
        _fill(plan, _opened(temporary), path, mode, sources, progress, check or as_planned(plan))
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
        sync_folder(folder)
    except OSError as error:
        left = discard(temporary)
        what = f"writing failed: {error.strerror or error}"
        raise OutputError(f"{what}; {left} is left behind" if left else what, path=path) from error
    except BaseException as error:
        discard(temporary)
        if isinstance(error, CkptoolError) and not error.path:
            error.path = path
        raise
    return Written(path, plan.size)


def temporary_name(folder: str, name: str) -> str:
    """A name beside the output ``name`` for what is to become it."""
    return os.path.join(folder, _leftover_stem(name) + os.urandom(6).hex() + _SUFFIX)


def _leftover_stem(name: str) -> str:
    """What temporary files of this output begin with; names are limited in bytes, not in characters."""
    return "." + os.fsencode(name)[:180].decode("utf-8", "ignore") + "."


def _opened(path: str) -> int:
    """A new file beside the output, locked as long as it is open."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    fd = os.open(path, flags, 0o600)
    lock(fd)  # on a filesystem without locks another run may take the file for a leftover, and fail
    return fd


def _fill(
    plan: Plan,
    fd: int,
    path: str,
    mode: int,
    sources: Sequence[Source],
    progress: Progress | None,
    check: Check,
) -> None:
    """Write the pieces to a new file and read them back; ``path`` is its name to be."""
    try:
        with Verifier(plan.claims) as verifier:
            produce(plan, fd, progress)
            verifier.finish()
        staged = FileSource(path, os.dup(fd), os.fstat(fd))
        try:
            if hasattr(os, "fchmod"):
                os.fchmod(fd, mode & 0o777)
            for source in sources:
                if isinstance(source, FileSource):
                    source.check_unchanged()
            with Synced(fd, plan.size):
                check(staged)
        finally:
            staged.close()
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


def sync_folder(folder: str) -> None:
    """Bring the names in a folder to the disk, where the system has that."""
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


def discard(temporary: str, names: Sequence[str] | None = None) -> str:
    """Remove a temporary file, or folder of files; its name when that fails, so that a message can tell.

    ``names`` are the files that may be in a folder: a disk that fails may not list them any more.
    """
    try:
        _remove(temporary, names)
    except FileNotFoundError:
        return ""
    except OSError:
        return temporary
    return ""


def lock(fd: int) -> bool:
    """Lock an open file or folder, as long as it is open; False where another run has, or nobody can."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(path: str, names: Sequence[str] | None = None) -> None:
    """Remove a file, or a folder of files. Raises OSError."""
    if not os.path.isdir(path) or os.path.islink(path):
        os.unlink(path)
        return
    for name in os.listdir(path) if names is None else names:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(path, name))
    os.rmdir(path)


def remove_leftovers(folder: str, name: str) -> None:
    """Remove what a killed run left for the same output. A run that is alive holds a lock on it."""
    if fcntl is None:
        return
    head = _leftover_stem(name)
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
            if lock(fd):
                _remove(path)
        except OSError:
            continue
        finally:
            os.close(fd)
