"""A folder of files, whole or not at all: it grows beside its place, and then takes its name."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from shlex import quote

from ..errors import CkptoolError, OutputError, RefusedError
from ..source import Files, FileSource, Source, Span
from .copying import Progress, writing
from .exchange import exchange
from .output import Written, discard, lock, remove_leftovers, sync_folder, temporary_name, write_plan

__all__ = ["check_folder", "write_files"]


def check_folder(path: str, sources: Sequence[Source], *, force: bool = False) -> str:
    """The real path of the folder to write; raises as ``check_output`` does.

    With ``force`` an existing folder is replaced; ``write_files`` does so only if there is nothing in it but a
    checkpoint, and files that the new one has as well: nobody loses a folder of other things to a slip of the hand.
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
    """Raise RefusedError for what a folder at ``target`` must not take the place of; ``names`` are the files of the new
    one, where these are known."""
    if not os.path.lexists(target):
        return
    if not os.path.isdir(target):
        raise RefusedError(
            "the output is a folder, and a file of that name exists", path=path, next="choose another name"
        )
    there = os.listdir(target)
    if there and not force:
        raise RefusedError("the output exists", path=path, next="replace it with --force, or choose another name")
    strange = [name for name in there if not _is_ours(os.path.join(target, name)) and name not in (names or ())]
    if strange and names is not None:
        what = f"the folder holds {strange[0]!r}, which is no part of a checkpoint, and would be lost"
        raise RefusedError(what, path=path, next="choose another name")


def _is_ours(path: str) -> bool:
    name = os.path.basename(path)
    ours = name.endswith((".metadata", ".distcp", ".safetensors", ".bin", ".pt", ".pth", ".index.json"))
    # An index of a variant: model.safetensors.index.fp16.json.
    return not os.path.isdir(path) and (ours or (".index." in name and name.endswith(".json")))


@writing()
def write_files(
    files: Files,
    path: str,
    sources: Sequence[Source],
    *,
    force: bool = False,
    mode: int = 0o644,
    progress: Progress | None = None,
) -> Written:
    """Write a folder. ``mode`` is for its files. Raises as ``write_plan`` does."""
    target = check_folder(path, sources, force=force)
    names = [file for file, _ in files.files]
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
