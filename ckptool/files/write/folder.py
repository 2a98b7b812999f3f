"""A folder of files, whole or not at all: it grows beside its place, and then takes its name."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from shlex import quote

from ...base.errors import CkptoolError, OutputError, RefusedError
from ..sources import Files, FileSource, Source, Span
from .copying import Progress, writing
from .output import (
    FolderCheck,
    Written,
    discard,
    exchange,
    lock,
    remove_leftovers,
    sync_folder,
    temporary_name,
    write_plan,
)


def check_folder(path: str, sources: Sequence[Source], *, force: bool = False) -> str:
    """The real path of the folder to write; raises as ``check_output`` does.

    With ``force`` an existing folder is replaced; ``write_files`` does so only if there is nothing in it but the parts
    of one checkpoint, and files that the new one has as well: a slip of the hand loses no folder of other things.
    """
    if not path or "\0" in path:
        raise OutputError("it is no name of a folder", path=repr(path))
    target = os.path.realpath(path)
    parent = os.path.dirname(target)
    if not os.path.isdir(parent):
        raise OutputError("its parent folder does not exist", path=path, next=f"mkdir -p {quote(parent)}")
    for source in sources:
        if isinstance(source, FileSource) and os.path.dirname(os.path.realpath(source.name)) == target:
            raise RefusedError("the output is the folder of an input", path=path, next="write to another one")
    if os.path.isdir(target):
        # A run that was killed between giving the folder its name and removing the former one.
        remove_leftovers(parent, os.path.basename(target))
    _check_what_is_there(target, path, force)
    return target


def _check_what_is_there(target: str, path: str, force: bool, names: Collection[str] | None = None) -> None:
    """Raise RefusedError for what a folder at ``target`` must not take the place of; ``names`` are the files that may
    go, where these are known."""
    if not os.path.lexists(target):
        return
    if not os.path.isdir(target):
        raise RefusedError(
            "the output is a folder, and a file of that name exists", path=path, next="choose another name"
        )
    there = os.listdir(target)
    if there and not force:
        raise RefusedError("the output exists", path=path, next="replace it with --force, or choose another name")
    if names is None:
        return
    lost = sorted(name for name in there if name not in names or os.path.isdir(os.path.join(target, name)))
    if lost:
        more = f" and {len(lost) - 1:,} more" if lost[1:] else ""
        what = f"the folder holds {lost[0]!r}{more}, which is no part of the checkpoint in it, and would be lost"
        raise RefusedError(what, path=path, next="choose another name")


def _nothing(path: str) -> Collection[str]:
    return ()


@writing()
def write_files(
    files: Files,
    path: str,
    sources: Sequence[Source],
    *,
    force: bool = False,
    mode: int = 0o644,
    progress: Progress | None = None,
    parts: Callable[[str], Collection[str]] = _nothing,
    check: FolderCheck | None = None,
) -> Written:
    """Write a folder. ``mode`` is for its files. Raises as ``write_plan`` does.

    ``parts`` says which files of a folder are the checkpoint that is replaced; another one in it is never lost.
    ``check`` is given the path of the folder that is about to take the name; each file must be what its plan says.
    """
    target = check_folder(path, sources, force=force)
    names = [file for file, _ in files.files]
    names += parts(target) if force else ()
    _check_what_is_there(target, path, force, names)
    parent, name = os.path.split(target)
    remove_leftovers(parent, name)
    temporary = temporary_name(parent, name)
    fd = -1
    try:
        os.mkdir(temporary)
        fd = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY) if hasattr(os, "O_DIRECTORY") else -1
        if fd >= 0:
            lock(fd)
        for file, plan in files.files:
            write_plan(plan, os.path.join(temporary, file), (), mode=mode, progress=progress)
        # Once for all files: of a thousand ranks each is looked at once, not once for each of the others.
        for source in {*sources, *_sources(files)}:
            if isinstance(source, FileSource):
                source.check_unchanged()
        sync_folder(temporary)
        if check is not None:
            check(temporary)
        # What came there while this was written must not be lost, either.
        _check_what_is_there(target, path, force, names)
        if os.path.isdir(target):
            os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
            former = os.listdir(target)
            exchange(target, temporary)
            names = former
            sync_folder(parent)
            discard(temporary, names)
        else:
            os.rename(temporary, target)
            sync_folder(parent)
    except OSError as error:
        left = discard(temporary, names)
        what = f"writing failed: {error.strerror or error}"
        raise OutputError(f"{what}; {left} is left behind" if left else what, path=path) from error
    except BaseException as error:
        discard(temporary, names)
        if isinstance(error, CkptoolError) and not _names_an_input(error, sources):
            error.path = path
        raise
    finally:
        if fd >= 0:
            with suppress(OSError):  # nothing was written to it
                os.close(fd)
    return Written(path, files.size)


def _sources(files: Files) -> Iterator[Source]:
    """Where the bytes of a folder come from."""
    return (piece.source for _, plan in files.files for piece in plan.pieces if isinstance(piece, Span))


def _names_an_input(error: CkptoolError, sources: Sequence[Source]) -> bool:
    """Is it about an input? Else it is about a file of the folder that nobody knows by its temporary name."""
    return any(source.name == error.path for source in sources)
