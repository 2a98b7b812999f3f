"""A folder of files, whole or not at all: it grows beside its place, and then takes its name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from shlex import quote

from ..errors import CkptoolError, OutputError, RefusedError
from ..source import Files, FileSource, Source
from .copying import Progress
from .output import Written, leftover_stem, sync_folder, write_plan

__all__ = ["check_folder", "write_files"]

_SUFFIX = ".ckptool-tmp"


def check_folder(path: str, sources: Sequence[Source], *, force: bool = False) -> str:
    """The real path of the folder to write; raises as ``check_output`` does.

    With ``force`` an existing folder is replaced only if it is empty or holds a checkpoint that we could have written:
    nobody loses a folder of other things to a slip of the hand.
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
    if not os.path.lexists(target):
        return target
    if not os.path.isdir(target):
        raise RefusedError(
            "the output is a folder, and a file of that name exists", path=path, next="choose another name"
        )
    there = os.listdir(target)
    if there and not force:
        raise RefusedError("the output exists", path=path, next="replace it with --force, or choose another name")
    strange = [name for name in there if not _is_ours(os.path.join(target, name))]
    if strange:
        what = f"the folder holds {strange[0]!r}, which is no part of a checkpoint, and would be lost"
        raise RefusedError(what, path=path, next="choose another name")
    return target


def _is_ours(path: str) -> bool:
    name = os.path.basename(path)
    ours = name.endswith((".metadata", ".distcp", ".safetensors", ".bin", ".pt", ".pth", ".index.json"))
    # An index of a variant: model.safetensors.index.fp16.json.
    return not os.path.isdir(path) and (ours or (".index." in name and name.endswith(".json")))


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
    parent, name = os.path.split(target)
    temporary = os.path.join(parent, leftover_stem(name) + os.urandom(6).hex() + _SUFFIX)
    try:
        os.mkdir(temporary)
        for file, plan in files.files:
            write_plan(plan, os.path.join(temporary, file), (), mode=mode, progress=progress)
        # Once for all files: of a thousand ranks each is looked at once, not once for each of the others.
        for source in sources:
            if isinstance(source, FileSource):
                source.check_unchanged()
        sync_folder(temporary)
        if os.path.isdir(target):
            aside = temporary + ".old"
            os.rename(target, aside)
            try:
                os.rename(temporary, target)
            except BaseException:
                os.rename(aside, target)
                raise
            _remove(aside)
        else:
            os.rename(temporary, target)
        sync_folder(parent)
    except OSError as error:
        _discard(temporary)
        raise OutputError(f"writing failed: {error.strerror or error}", path=path) from error
    except BaseException as error:
        _discard(temporary)
        if isinstance(error, CkptoolError):
            error.path = path
        raise
    return Written(path, files.size)


def _remove(folder: str) -> None:
    """Remove a folder of files."""
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))
    os.rmdir(folder)


def _discard(folder: str) -> None:
    """Remove what was begun; what cannot be removed is told by its name."""
    with suppress(OSError):
        _remove(folder)
