"""From files, folders and globs to the files that claim to be checkpoints, by their content."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from shlex import quote
from typing import Final, NamedTuple

from ..base.errors import MalformedError, NotACheckpointError, UnreadableError
from ..base.text import listed, shown
from ..files.archives import checkpoints_in, is_address
from ..files.sources import open_source
from ..files.zips.reader import read_archive
from . import FORMATS, folder_format
from .foreign.files import KINDS as FOREIGN
from .foreign.files import named_folder
from .foreign.identification import explain, zip_kind
from .zip_kinds import kind_of

#: Names under which a file that is something else altogether is a checkpoint that went wrong.
_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".pth.tar", ".th", ".bin", ".safetensors", ".ptl", ".pt2", ".mar")
#: Whole files of other kinds, which may be called like a checkpoint and are none of ours.
_OTHERS: Final = frozenset(
    (
        *("mobile-flatbuffer", "executorch"),
        *FOREIGN,
    )
)
#: Archives with files in them that may be checkpoints.
_ARCHIVES: Final = frozenset(("zip", "tar", "gzip"))
#: Of files called .bin, which may be anything, only these claim to be a checkpoint.
_BIN: Final = frozenset(("git-lfs-pointer", "empty", "zeros", "html"))


#: Files of a folder that are looked at to say what is in it.
_LISTED: Final = 200
#: Files of other kinds that are named where there is no checkpoint.
_NAMED: Final = 3


class Passed(NamedTuple):
    """A file of a folder that is passed over, and why."""

    path: str
    why: str


class Target(NamedTuple):
    """A file to look at; ``named`` whether the user named it, rather than a folder that it is in."""

    path: str
    named: bool


def names_one_file(paths: Sequence[str]) -> bool:
    """Is it one file that the user named, or a folder that is one checkpoint: nothing that is searched?"""
    if len(paths) != 1:
        return False
    if os.path.isdir(paths[0]):
        return folder_format(paths[0]) is not None
    return is_address(paths[0]) or not _is_glob(paths[0])


def find_targets(paths: Sequence[str]) -> Iterator[Target | UnreadableError]:
    """The checkpoints of ``find_files``, without what is passed over."""
    return (item for item in find_files(paths) if not isinstance(item, Passed))


def find_files(paths: Sequence[str]) -> Iterator[Target | Passed | UnreadableError]:
    """The files behind the paths as they are found, in a stable order; an error for a path without a checkpoint.

    A folder that is one checkpoint comes out itself; any other is searched for checkpoints, hidden folders and
    symbolic links to folders left out; a path that does not exist and has ``*``, ``?`` or ``[`` in it is a glob,
    ``**`` any depth. A named file comes out whatever it is, and as often as it is named; another one once.
    """
    seen: set[str] = set()
    for path in paths:
        nothing = True
        try:
            for target in _behind(path):
                nothing = nothing and isinstance(target, Passed)
                if target.path == path or target.path not in seen:
                    seen.add(target.path)
                    yield target
            if nothing:
                yield _without_checkpoint(path)
        except UnreadableError as error:
            yield error


def _is_glob(path: str) -> bool:
    return any(mark in path for mark in "*?[") and not os.path.lexists(path)


def _behind(path: str) -> Iterator[Target | Passed | UnreadableError]:
    if os.path.isdir(path):
        whole = _whole(path, named=True)
        yield from walk_folder(path) if whole is None else [whole]
    elif _is_glob(path) and not is_address(path):
        import glob

        matches = sorted(glob.glob(path, recursive=True))
        if not matches:
            # Brackets are part of many a name that is just not there.
            what = "no file matches this pattern" if set("*?") & set(path) else "no such file, and no pattern of one"
            raise UnreadableError(what, path=path, next="name the folder to search all of it")
        for match in matches:
            yield from _behind(match)
    else:
        yield Target(path, True)


def _whole(folder: str, named: bool = False) -> Target | UnreadableError | None:
    """A folder that is one checkpoint as a whole, or one of a kind that is only named; None for any other."""
    from .foreign.training_folders import training_folder  # for folders alone

    return Target(folder, named) if folder_format(folder) else training_folder(folder)


def walk_folder(folder: str) -> Iterator[Target | Passed | UnreadableError]:
    """Everything in a folder: the checkpoints, what is called like one, and the files that are passed over; and the
    folders in it that cannot be looked into. What is in a folder that is one checkpoint is up to that."""
    closed: list[OSError] = []
    for root, folders, files in os.walk(folder, onerror=closed.append):
        seen = [name for name in folders if not name.startswith(".")]
        whole = {name: one for name in sorted(seen) if (one := _whole(os.path.join(root, name))) is not None}
        folders[:] = sorted(set(seen) - whole.keys())
        yield from whole.values()
        for name in sorted(files):
            path = os.path.join(root, name)
            why = why_passed(path)
            yield Passed(path, why) if why else Target(path, False)
    yield from (Target(str(error.filename), False) for error in closed)


def _without_checkpoint(path: str) -> UnreadableError:
    special = explain_directory(path) if os.path.isdir(path) else None
    if isinstance(special, NotACheckpointError):
        return special
    return _inside(path) or UnreadableError("there is no checkpoint in this folder", path=path, next="name a file")


def _inside(path: str) -> UnreadableError | None:
    """What a folder without a checkpoint holds instead: models of other frameworks, archives, folders of such."""
    try:
        names = sorted(os.listdir(path))[:_LISTED]
    except OSError:
        return None
    known = ((name, what) for name in names if (what := _kind(os.path.join(path, name))))
    found = list(islice(known, _NAMED + 1))
    if not found:
        return None
    words = [f"{shown(name)} is {what}" for name, what in found[:_NAMED]]
    what = f"there is no torch checkpoint in this folder: {listed(words)}{', among others' * (len(found) > _NAMED)}"
    return UnreadableError(what, path=path, next=f"ckptool inspect {quote(os.path.join(path, found[0][0]))}")


def _kind(path: str) -> str:
    """What a file or folder of another framework is, in a few words; "" for what is none, or not known."""
    if os.path.isdir(path):
        try:
            folder = named_folder(os.listdir(path))
        except OSError:
            return ""
        return folder.what if folder is not None else ""
    try:
        source = open_source(path)
    except UnreadableError:
        return ""
    try:
        head = source.read(0, 1024)
        archive = head[:4] == b"PK\x03\x04"
        error = zip_kind(read_archive(source)) if archive else explain(head, source)
    except UnreadableError:
        return ""
    finally:
        source.close()
    kind = getattr(error, "kind", "")
    if error is None or kind not in _ARCHIVES | FOREIGN:
        return ""
    return re.split(r"[,:]| that holds", error.what.removeprefix("it is "), maxsplit=1)[0]


def why_passed(path: str) -> str:
    """Why a file of a folder is passed over; "" for a checkpoint by its content, whole or not, for an archive that
    holds some, and for what is called like one and is no whole file of another kind."""
    name = path.lower()
    named = name.endswith(_SUFFIXES)
    unknown = "it is not called like a checkpoint, and its content is of no format of one"
    try:
        source = open_source(path)
    except UnreadableError as error:
        # A link to nothing, a file that may not be read: a checkpoint that is not there.
        claims = named and not name.endswith(".bin") and (os.path.isfile(path) or not os.path.exists(path))
        return "" if claims else error.what
    try:
        head = source.read(0, 1024)
        known = next((item for item in FORMATS if item.sniff(head, source)), None)
        if known is None:
            found = explain(head, source)
            kind = getattr(found, "kind", "")
            if kind in _ARCHIVES and checkpoints_in(source):
                return ""
            claims = named and (kind in _BIN if name.endswith(".bin") else kind not in _OTHERS or name.endswith(".ptl"))
            return "" if claims else found.what if kind != "unknown" else unknown
        if known.name == "torch-zip":
            archive = read_archive(source)
            other = zip_kind(archive) if kind_of(archive) is None else None
            claims = other is None or (named and other.kind not in _OTHERS) or bool(checkpoints_in(source))
            return "" if claims or other is None else other.what
        return ""
    except MalformedError:
        return ""
    except UnreadableError as error:
        return "" if named else error.what
    finally:
        source.close()


def _claims(path: str) -> bool:
    return not why_passed(path)


def explain_directory(path: str) -> UnreadableError:
    """The error for a folder where a file is wanted: what kind of folder it is, and what to name instead."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        return UnreadableError(f"it is a directory that cannot be listed: {error.strerror}", path=path)
    from .foreign.training_folders import training_folder

    known = training_folder(path)
    if known is not None:
        return known
    other = named_folder(names)
    if other is not None:
        what = f"it is {other.what}, not a torch checkpoint"
        return NotACheckpointError(what, kind=other.kind, path=path, next=other.tool)
    files = [os.path.join(path, name) for name in names[:_LISTED]]
    found = [file for file in files if os.path.isfile(file) and _claims(file)]
    if not found:
        return _explain_folders(path, names)
    what = f"it is a directory; it holds {listed([os.path.basename(file) for file in found])}"
    return UnreadableError(what, path=path, next=f"name a file, such as {quote(found[0])}")


def _explain_folders(path: str, names: Sequence[str]) -> UnreadableError:
    """The error for a folder that has no checkpoint itself; its folders may be some, as in a pipeline of diffusers."""
    inside = [name for name in names[:_LISTED] if folder_format(os.path.join(path, name))]
    if not inside:
        return UnreadableError("it is a directory, not a file", path=path, next="name a checkpoint file in it")
    kind = "a pipeline of diffusers" if "model_index.json" in names else "a directory"
    what = f"it is {kind}, a checkpoint in each of its folders: {listed(inside)}"
    step = f"name one, such as {quote(os.path.join(path, inside[0]))}, or all: ckptool inspect {quote(path)}"
    return UnreadableError(what, path=path, next=step)
