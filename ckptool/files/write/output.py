"""Create files and folders atomically from plans.

The output is written to a temporary sibling ``.NAME.<random>.ckptool-tmp``, read back, synced, and only then renamed.
Then its folder is synced. If anything fails before the renaming, the path keeps its former content.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, TypeAlias

from ...base.errors import CkptoolError, OutputError, RefusedError
from ...base.records import NamedTuple
from ...base.steps import Line
from ...base.text import join_limited
from ..archives import refuse_address
from ..downloads import check_unchanged
from ..sources import FileSource, FolderPlan, Plan, Source, Span
from ..threads import Background
from .copying import READ_WRITE, Progress, as_output_failure, write_pieces
from .planned import Check, check_planned
from .space import allocate, opened

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_RENAME_SWAP: Final = 2
#: The number of bytes from which syncing in a thread pays off.
_MIN_SYNCED: Final = 1 << 20
#: The suffix of temporary files.
TEMPORARY: Final = ".ckptool-tmp"


#: Writes the files of a staged folder in other processes, by their paths. They exist in their full size.
Fill: TypeAlias = Callable[[Sequence[tuple[str, Plan]]], None]
#: Raises ReadBackError if a staged folder, given by its path, is wrong.
FolderCheck: TypeAlias = Callable[[str], None]


class Written(NamedTuple):
    """An output: its path and its size in bytes.

    >>> ckptool.write_lock("model.pth", "written.lock.json").path
    'written.lock.json'
    """

    path: str
    size: int


def exchange(one: str, other: str) -> None:
    """Exchange two existing paths.

    If the filesystem cannot do that atomically, ``one`` is missing for a moment. If the process is killed at that
    moment, the content of ``one`` remains under the name of ``other`` with ``.old`` appended. Raises OSError.
    """
    if _exchange_atomically(os.fsencode(one), os.fsencode(other)):
        return
    aside = f"{other}.old"
    os.rename(one, aside)
    try:
        os.rename(other, one)
    except BaseException:
        os.rename(aside, one)
        raise
    os.rename(aside, other)


def _exchange_atomically(one: bytes, other: bytes) -> bool:
    """Exchange two paths atomically; return whether the system did."""
    try:
        import ctypes  # takes milliseconds to load, and some builds of Python lack it

        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            return bool(libc.renamex_np(one, other, _RENAME_SWAP) == 0)
        return bool(libc.renameat2(_AT_FDCWD, one, _AT_FDCWD, other, _RENAME_EXCHANGE) == 0)
    except (ImportError, OSError, AttributeError, TypeError):
        return False


def check_output(path: str, sources: Sequence[Source], *, force: bool = False) -> str:
    """Return the real path to write to, with symbolic links followed.

    Raises RefusedError if it is one of the inputs (also under another name), or if it exists without ``force``. Raises
    OutputError if nothing can be written there.
    """
    if not path or "\0" in path:
        raise OutputError("it is not a file name", path=repr(path))
    refuse_address(path)
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise OutputError("its folder is a file", path=path)
    if not os.path.exists(folder):
        create_it = Line(f"mkdir -p {shlex.quote(os.path.dirname(path) or folder)}")
        raise OutputError("its folder does not exist", path=path, next=create_it)
    try:
        status = os.stat(target)
    except FileNotFoundError:
        return target
    except OSError as error:
        raise OutputError(error.strerror or str(error), path=path) from error
    if stat.S_ISDIR(status.st_mode):
        raise OutputError("it is a directory", path=path, next="name a file in it")
    identity = (status.st_dev, status.st_ino)
    if any(source.identity == identity for source in sources):
        step = "write to another name, or use `--in-place=` if the command has it"
        raise RefusedError("the output is the input", path=path, next=step)
    if not stat.S_ISREG(status.st_mode):
        raise OutputError("it exists and is not a regular file", path=path)
    # A run may have been killed between linking the file and removing its temporary name.
    remove_leftovers(folder, os.path.basename(target))
    if not force:
        raise output_exists(path)
    return target


@as_output_failure()
def write_file(
    plan: Plan,
    path: str,
    sources: Sequence[Source],
    *,
    force: bool = False,
    mode: int = 0o644,
    progress: Progress | None = None,
    check: Check | None = None,
) -> Written:
    """Execute a plan. ``mode`` applies to a new file; a replaced file keeps its own.

    ``progress`` is called with the number of bytes of each step. ``check`` is called with the staged file, and raises
    ReadBackError if that is wrong; by default, the file must match the plan.

    Raises RefusedError and OutputError as ``check_output`` does, OutputError if the disk is full or fails, and
    ChangedError if an input changed.
    """
    target = check_output(path, sources, force=force)
    if force and os.path.exists(target):
        mode = stat.S_IMODE(os.stat(target).st_mode)
    folder, name = os.path.split(target)
    remove_leftovers(folder, name)
    temporary = temporary_name(folder, name)
    with discarded_on_error(temporary, path):
        # Within the context, because a signal may come as soon as the file exists.
        fd = create(temporary)
        try:
            allocate(plan, fd, folder)
            write_pieces(plan, fd, progress)
            size = _check_and_sync(fd, path, mode, sources, check or partial(check_planned, plan))
        finally:
            os.close(fd)
        if force:
            os.replace(temporary, target)
        else:
            _rename_new(temporary, target)
        sync_folder(folder)
    return Written(path, size)


@contextmanager
def discarded_on_error(temporary: str, path: str, names: Sequence[str] | None = None) -> Iterator[None]:
    """Discard the temporary file, or the folder with the files ``names``, if writing the output ``path`` fails.

    An OSError becomes an OutputError. Errors without a path, and errors about a file in a temporary folder, get the
    path of the output, because users never see temporary names. Callers may change the list ``names`` within the
    context.
    """
    try:
        yield
    except OSError as error:
        left = remove_temporary(temporary, names)
        what = f"writing failed: {error.strerror or error}"
        raise OutputError(f"{what}; {left} is left behind" if left else what, path=path) from error
    except BaseException as error:
        remove_temporary(temporary, names)
        if isinstance(error, CkptoolError):
            staged = os.path.realpath(error.path).startswith(temporary) if error.path else True
            error.path = path if staged else error.path
        raise


def temporary_name(folder: str, name: str) -> str:
    """Return a temporary name next to the output ``name``."""
    return os.path.join(folder, _leftover_stem(name) + os.urandom(6).hex() + TEMPORARY)


def _leftover_stem(name: str) -> str:
    """Return the start of this output's temporary names; file names are limited in bytes, not in characters."""
    return "." + os.fsencode(name)[:180].decode("utf-8", "ignore") + "."


def create(path: str) -> int:
    """Create a new file, locked as long as it is open."""
    fd = os.open(path, READ_WRITE | os.O_CREAT | os.O_EXCL, 0o600)
    lock(fd)  # without it, another run would treat the file as a leftover
    return fd


def _check_and_sync(fd: int, path: str, mode: int, sources: Sequence[Source], check: Check) -> int:
    """Read a written file back, sync it, and return its size in bytes; ``path`` is its final name."""
    staged = FileSource(path, os.dup(fd), os.fstat(fd))
    try:
        if hasattr(os, "fchmod"):
            os.fchmod(fd, mode & 0o777)
        check_unchanged(sources)
        with Background(lambda stopped: os.fsync(fd), staged.size >= _MIN_SYNCED) as syncing:
            check(staged)
            syncing.finish()
        return staged.size
    finally:
        staged.close()


def _rename_new(temporary: str, target: str) -> None:
    """Rename a file without ever replacing another: by a hard link, if the filesystem has them."""
    try:
        os.link(temporary, target)
    except OSError as error:
        if isinstance(error, FileExistsError) or os.path.lexists(target):
            raise RefusedError("the output exists", path=target, next="replace it with `--force`") from None
        os.rename(temporary, target)
        return
    os.unlink(temporary)


def sync_folder(folder: str) -> None:
    """Sync the names in a folder, if the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return  # a folder that may be written to but not read: the output is complete
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network filesystems cannot sync a folder; the file itself is safe.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


def remove_temporary(temporary: str, names: Sequence[str] | None = None) -> str:
    """Remove a temporary file, or folder of files; return its name for a message if that fails, else "".

    ``names`` are the possible files in a folder, because a failing disk may no longer list them.
    """
    try:
        with suppress(FileNotFoundError):
            _remove(temporary, names)
    except OSError:
        return temporary if os.path.lexists(temporary) else ""
    return ""


def lock(fd: int, how: str = "LOCK_EX") -> bool | None:
    """Lock a file or folder as long as it is open; return False if another process locked it, None without locks."""
    try:
        import fcntl

        fcntl.flock(fd, getattr(fcntl, how) | fcntl.LOCK_NB)
    except ImportError:  # Windows
        return None
    except OSError as error:  # or the filesystem has no locks
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
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
    """Remove leftovers of a killed run for the same output. A live run holds a lock on its files."""
    if not hasattr(os, "O_NOFOLLOW"):
        return  # Windows, which has no such locks either
    head = _leftover_stem(name)
    try:
        names = [entry for entry in os.listdir(folder) if entry.startswith(head) and entry.endswith(TEMPORARY)]
    except OSError:
        return  # a folder that may be written to but not listed
    for entry in names:
        path = os.path.join(folder, entry)
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW) as fd, suppress(OSError):
            if fd >= 0 and lock(fd):
                _remove(path)


def output_exists(path: str) -> RefusedError:
    """Return the error for an output that exists and may not be replaced."""
    return RefusedError("the output exists", path=path, next="replace it with `--force`, or choose another name")


def check_folder_target(path: str, sources: Sequence[Source], *, force: bool = False) -> str:
    """Return the real path of the folder to write; raises as ``check_output`` does.

    With ``force`` an existing folder is replaced. But ``write_folder`` does so only if the folder contains nothing
    except the parts of one checkpoint, and files that the new folder also has. So a typing error never deletes other
    files.
    """
    if not path or "\0" in path:
        raise OutputError("it is not a folder name", path=repr(path))
    refuse_address(path)
    target = os.path.realpath(path)
    parent = os.path.dirname(target)
    if not os.path.isdir(parent):
        raise OutputError("its parent folder does not exist", path=path, next=Line(f"mkdir -p {shlex.quote(parent)}"))
    for source in sources:
        if source.local_file() is not None and os.path.dirname(os.path.realpath(source.name)) == target:
            raise RefusedError("the output is the folder of an input", path=path, next="write to another one")
    if os.path.isdir(target):
        # A run may have been killed between renaming the folder and removing the former one.
        remove_leftovers(parent, os.path.basename(target))
    _check_replaceable(target, path, force)
    return target


def _check_replaceable(target: str, path: str, force: bool, names: Collection[str] | None = None) -> None:
    """Raise RefusedError if a folder must not replace ``target``; ``names`` are the files that may be deleted, if
    known.
    """
    if not os.path.lexists(target):
        return
    if not os.path.isdir(target):
        what = "the output is a folder, and a file of that name exists"
        raise RefusedError(what, path=path, next="choose another name")
    there = os.listdir(target)
    if there and not force:
        raise output_exists(path)
    if names is None:
        return
    lost = sorted(name for name in there if name not in names or os.path.isdir(os.path.join(target, name)))
    if lost:
        names = join_limited(list(map(repr, lost)), most=1)
        what = f"the folder contains {names}, which is not part of its checkpoint, and would be lost"
        raise RefusedError(what, path=path, next="choose another name")


def _fill_folder(files: FolderPlan, folder: str, mode: int, fill: Fill) -> None:
    """Create the files of a staged folder, let ``fill`` write them, then read each back."""
    staged = [(os.path.join(folder, name), plan) for name, plan in files.files]
    for path, plan in staged:
        fd = create(path)
        os.ftruncate(fd, plan.size)
        os.close(fd)
    fill(staged)
    for path, plan in staged:
        fd = os.open(path, READ_WRITE)
        try:
            _check_and_sync(fd, path, mode, (), partial(check_planned, plan))
        finally:
            os.close(fd)


@as_output_failure()
def write_folder(
    files: FolderPlan,
    path: str,
    sources: Sequence[Source],
    *,
    force: bool = False,
    mode: int = 0o644,
    progress: Progress | None = None,
    parts: Callable[[str], Collection[str]] = lambda path: (),
    check: FolderCheck | None = None,
    fill: Fill | None = None,
) -> Written:
    """Write a folder. ``mode`` applies to its files, ``fill`` writes them instead of this process, and the errors are
    as for ``write_file``.

    ``parts`` returns the files of a folder that form the checkpoint to replace; any other file in it is never deleted.
    ``check`` is called with the path of the staged folder; each file must also match its plan.
    """
    target = check_folder_target(path, sources, force=force)
    names = [file for file, _ in files.files]
    names += parts(target) if force else ()
    _check_replaceable(target, path, force, names)
    parent, name = os.path.split(target)
    remove_leftovers(parent, name)
    temporary = temporary_name(parent, name)
    fd = -1
    try:
        with discarded_on_error(temporary, path, names):
            os.mkdir(temporary)
            fd = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY) if hasattr(os, "O_DIRECTORY") else -1
            if fd >= 0:
                lock(fd)
            if fill is None:
                for file, plan in files.files:
                    write_file(plan, os.path.join(temporary, file), (), mode=mode, progress=progress)
            else:
                _fill_folder(files, temporary, mode, fill)
            # Once for all files: with a thousand ranks, each source is checked once, not once per file.
            copied = {piece.source for _, plan in files.files for piece in plan.pieces if isinstance(piece, Span)}
            check_unchanged({*sources, *copied})
            sync_folder(temporary)
            if check is not None:
                check(temporary)
            # Files that were put there in the meantime must not be lost either.
            _check_replaceable(target, path, force, names)
            if os.path.isdir(target):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
                former = os.listdir(target)
                exchange(target, temporary)
                names[:] = former  # these are discarded from now on, also on an error
                sync_folder(parent)
                remove_temporary(temporary, names)
            else:
                os.rename(temporary, target)
                sync_folder(parent)
    finally:
        if fd >= 0:
            with suppress(OSError):  # nothing was written to it
                os.close(fd)
    return Written(path, files.size)
