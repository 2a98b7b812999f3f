"""From files, folders and globs to the files that claim to be checkpoints, by their content."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from shlex import quote
from typing import Final, NamedTuple

from .errors import MalformedError, NotACheckpointError, UnreadableError
from .formats import FORMATS
from .formats.identify import explain, zip_kind
from .human import listed
from .source import open_source
from .zips import read_archive

__all__ = ["Target", "explain_directory", "find_targets"]

#: Names under which a file that is something else altogether is a checkpoint that went wrong.
_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".pth.tar", ".th", ".bin")
#: What stands in place of a checkpoint after a bad clone or download.
_STAND_INS: Final = frozenset(("git-lfs-pointer", "html", "json", "text", "link-text", "empty", "zeros"))


#: Files of a folder that are looked at to say what is in it.
_LISTED: Final = 200


class Target(NamedTuple):
    """A file to look at; ``named`` whether the user named it, rather than a folder that it is in."""

    path: str
    named: bool


def find_targets(paths: Sequence[str]) -> Iterator[Target]:
    """The files behind the paths, in a stable order, each once.

    A folder is searched for checkpoints, hidden folders and symbolic links to folders left out; a path that does
    not exist and has ``*``, ``?`` or ``[`` in it is a glob, ``**`` any depth. A named file comes out whatever it is.
    """
    seen: set[str] = set()
    for path in paths:
        for target in _behind(path):
            if target.path not in seen:
                seen.add(target.path)
                yield target


def _behind(path: str) -> Iterator[Target]:
    if os.path.isdir(path):
        yield from (Target(found, False) for found in _walk(path) if _claims(found))
    elif not os.path.lexists(path) and any(mark in path for mark in "*?["):
        import glob

        matches = sorted(glob.glob(path, recursive=True))
        if not matches:
            raise UnreadableError("no file matches this pattern", path=path, next="quote it, or name the folder")
        for match in matches:
            yield from _behind(match)
    else:
        yield Target(path, True)


def _walk(folder: str) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(root, name) for name in sorted(files))


def _claims(path: str) -> bool:
    """Is it a checkpoint by its content, whole or not, or does something else stand where one should?"""
    try:
        source = open_source(path)
    except UnreadableError:
        return False
    try:
        head = source.read(0, 1024)
        known = next((item for item in FORMATS if item.sniff(head, source)), None)
        if known is None:
            name = path.lower()
            kind = getattr(explain(head, source), "kind", "") if name.endswith(_SUFFIXES) else ""
            # A .bin may be anything, but not a pointer to itself.
            return kind == "git-lfs-pointer" if name.endswith(".bin") else kind in _STAND_INS
        if known.name == "torch-zip":
            return zip_kind(read_archive(source)) is None
        return True
    except MalformedError:
        return True
    except UnreadableError:
        return False
    finally:
        source.close()


def explain_directory(path: str) -> UnreadableError:
    """The error for a folder where a file is wanted: what kind of folder it is, and what to name instead."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        return UnreadableError(f"it is a directory that cannot be listed: {error.strerror}", path=path)
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        what = "it is a directory of torch.distributed.checkpoint; ckptool does not read this format yet"
        step = "torch.distributed.checkpoint.format_utils.dcp_to_torch_save makes one file of it"
        return NotACheckpointError(what, kind="dcp", path=path, next=step)
    files = [os.path.join(path, name) for name in names[:_LISTED]]
    found = [file for file in files if os.path.isfile(file) and _claims(file)]
    if not found:
        return UnreadableError("it is a directory, not a file", path=path, next="name a checkpoint file in it")
    what = f"it is a directory; it holds {listed([os.path.basename(file) for file in found])}"
    return UnreadableError(what, path=path, next=f"name a file, such as {quote(found[0])}")
