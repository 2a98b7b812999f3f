"""Search files, folders and globs for files whose content claims to be a checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from shlex import quote
from typing import TYPE_CHECKING, Final

from ..base import lazy
from ..base.addresses import is_remote
from ..base.errors import MalformedError, NotACheckpointError, UnreadableError, lost_a_slash
from ..base.records import NamedTuple
from ..base.steps import NextStep, command
from ..base.suffixes import CHECKPOINTS
from ..base.text import join_limited, quoted
from ..files.archives import SEPARATOR, checkpoints_in, is_address, open_any
from ..files.zips.reader import read_archive
from . import BARE_PICKLE, FORMATS, as_folder, folder_format, may_be_pattern
from .zip_kinds import kind_of

if TYPE_CHECKING:
    from ..files.folders import Folder

#: Archives whose members may be checkpoints.
_ARCHIVES: Final = frozenset(("zip", "tar", "gzip"))
#: A .bin file may be anything: it counts as a damaged checkpoint only if it is of one of these kinds.
_BIN: Final = frozenset(("git-lfs-pointer", "empty", "zeros", "html"))
#: SpeechBrain writes this file into a folder of .ckpt files, among them counters as text.
_SPEECHBRAIN: Final = "CKPT.yaml"
#: The most files of a folder that are examined for an error message.
_EXAMINED: Final = 200
#: The most checkpoints of one archive that are checked: finding each takes a scan of all members.
_MEMBERS: Final = 100
#: The most foreign files that are named for a folder without a checkpoint.
_NAMED: Final = 3


#: Folders that a scan does not enter, so what is in them is unknown.
GIT_FOLDER: Final = "a folder of Git, not followed: it may hold programs (hooks) and any object"
LINKED_FOLDER: Final = "a link to a folder, not followed"


class SkippedFile(NamedTuple):
    """A file in a folder that is skipped, and the reason."""

    path: str
    why: str


class Candidate(NamedTuple):
    """A path to read. ``named`` tells whether the user typed it, or it was found in a folder. ``archive``: it was found
    in a folder, and is an archive of other files, which may be checkpoints."""

    path: str
    named: bool
    archive: bool = False


def names_one_file(paths: Sequence[str]) -> bool:
    """Return whether the paths name exactly one checkpoint (a file, a folder or a pattern of rank files), with nothing
    to search."""
    if len(paths) != 1:
        return False
    if _is_folder(paths[0]):
        return folder_format(paths[0]) is not None
    return is_address(paths[0]) or not _is_glob(paths[0]) or _is_rank_pattern(paths[0])


def as_one(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths; if they are the rank files of one save, all of them, return their pattern as the only path."""
    if len(paths) > 1 and all(re.search(r"\d", os.path.basename(path)) for path in paths):
        from .fsdp.meshes import pattern_of  # only for such names

        if pattern := pattern_of(paths):
            return (pattern,)
    return tuple(paths)


def expanded(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths with each glob replaced by what it matches, as a shell does; a pattern of one save's rank files
    is kept."""
    if not any(map(_is_glob, paths)):
        return tuple(paths)
    files: list[str] = []
    for path in paths:
        plain = not _is_glob(path) or is_address(path) or _is_rank_pattern(path)
        files += [path] if plain else _matching(path) or [path]
    return tuple(files)


def _is_rank_pattern(path: str) -> bool:
    return may_be_pattern(path) and bool(lazy.module("formats.fsdp.meshes").of_one_save(path))


def is_folder_of_checkpoints(path: str) -> bool:
    """Return whether the path is a folder to search for checkpoints, rather than one checkpoint."""
    return _is_folder(path) and not names_one_file([path])


def _is_folder(path: str) -> bool:
    if not is_remote(path):
        return os.path.isdir(path)
    from ..files.folders import folder_at

    if _is_glob(path) or is_address(path) or path.endswith(CHECKPOINTS):
        return False  # no request: opening tells whether it is a folder of that name
    return folder_at(path) is not None


def find_checkpoints(paths: Sequence[str]) -> Iterator[Candidate | UnreadableError]:
    """Yield the checkpoints found by ``find_files``, without the skipped files."""
    return (item for item in find_files(paths) if not isinstance(item, SkippedFile))


def find_files(paths: Sequence[str]) -> Iterator[Candidate | SkippedFile | UnreadableError]:
    """Yield the files that the paths lead to, in a stable order, and an error for each path without a checkpoint.

    A folder that is one checkpoint is yielded itself, and so is a pattern of one save's rank files. Other folders are
    searched, except hidden folders and symbolic links to folders. A path that does not exist and contains ``*``, ``?``
    or ``[`` is a glob, with ``**`` for any depth. A file named by the user is always yielded, once per mention; other
    files are yielded once.
    """
    seen: set[str] = set()
    for path in paths:
        empty = True
        try:
            for item in _expand(path):
                empty = empty and isinstance(item, SkippedFile)
                if item.path == path or item.path not in seen:
                    seen.add(item.path)
                    yield item
            if empty:
                plain = UnreadableError("the folder holds no checkpoint", path=path, next="name a file")
                yield explain_directory(path) if _is_folder(path) else plain
        except UnreadableError as error:
            yield error


def find_all(paths: Iterable[str], *, within: bool = False) -> Iterator[str | SkippedFile | UnreadableError]:
    """Yield every file that the paths lead to, of any kind, and an error for each folder that cannot be listed.

    A folder that its file names show to be one checkpoint is yielded itself; its files are scanned with it. Rank files
    are scanned one by one, like the other files beside them. A link to a folder, and ``.git``, is skipped with the
    reason. ``within``: the paths are folders to enter, even if each is one checkpoint.
    """
    for path in paths:
        if within:
            yield from _all_in(path)
        elif is_address(path) or not (_is_folder(path) or _is_glob(path)):
            yield path
        elif _is_folder(path):
            yield from [path] if folder_format(path, by_names=True) else _all_in(path)
        else:
            matches = _matching(path)
            yield from matches if path in matches else find_all(matches)
            if not matches:
                yield UnreadableError("no file matches this pattern", path=path)


def _all_in(folder: str) -> Iterator[str | SkippedFile | UnreadableError]:
    closed: list[UnreadableError] = []
    for place, folders, files in as_folder(folder).walk(closed):
        for name in sorted(folders):
            path = place.join(name)
            if place.is_link(name) or name == ".git":
                yield SkippedFile(path, GIT_FOLDER if name == ".git" else LINKED_FOLDER)
                folders.remove(name)
            elif folder_format(place.inner(name), by_names=True):
                yield path
                folders.remove(name)
        folders.sort()
        yield from (place.join(name) for name in sorted(files))
    yield from closed


def _is_glob(path: str) -> bool:
    if (is_remote(path) and path.startswith("http")) or lost_a_slash(path):
        return False  # a web server lists no files, and an address without a slash is refused when it is opened
    return any(character in path for character in "*?[") and not os.path.lexists(path)


def _matching(pattern: str) -> list[str]:
    if not is_remote(pattern):
        import glob

        return sorted(glob.glob(pattern, recursive=True))
    start = re.split(r"[^/]*[*?\[]", pattern, maxsplit=1)[0]
    parts = pattern[len(start) :].split("/")
    closed: list[UnreadableError] = []
    every = as_folder(start).walk(closed)
    paths = [place.join(name) for place, folders, files in every for name in (*folders, *files)]
    if closed:
        raise closed[0]
    if pattern in paths:  # a name with such characters
        return [pattern]
    matches = [path for path in paths if _fits(path[len(start) :].split("/"), parts)]
    return sorted([*matches, start] if _fits((), parts) else matches)


def _fits(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether names of folders and a file match the parts of a glob; ``**`` is any number of folders."""
    from fnmatch import fnmatchcase  # only for remote globs

    if not names or not parts:
        return not names and all(part == "**" for part in parts)
    hidden = names[0].startswith(".") and not parts[0].startswith(".")  # as in a shell, hidden files need a dot
    if parts[0] == "**":
        return _fits(names, parts[1:]) or (not hidden and _fits(names[1:], parts))
    return not hidden and fnmatchcase(names[0], parts[0]) and _fits(names[1:], parts[1:])


def _expand(path: str) -> Iterator[Candidate | SkippedFile | UnreadableError]:
    if _is_folder(path):
        whole = _whole_folder(as_folder(path), named=True)
        yield from walk_folder(path) if whole is None else [whole]
    elif _is_rank_pattern(path):
        yield Candidate(path, True)
    elif _is_glob(path) and not is_address(path):
        matches = _matching(path)
        if not matches:
            # Many file names contain brackets.
            what = "no file matches this pattern" if set("*?") & set(path) else "no such file, and no pattern of one"
            raise UnreadableError(what, path=path, next="name the folder to search all of it")
        for match in matches:
            yield from [Candidate(match, True)] if match == path else _expand(match)
    else:
        yield Candidate(path, True)


def _whole_folder(folder: Folder, named: bool = False) -> Candidate | UnreadableError | None:
    """Return a folder that is one checkpoint, an error for a training folder that ckptool only recognises, or None."""
    from .names.training import training_folder  # only for folders

    return Candidate(folder.path, named) if folder_format(folder) else training_folder(folder)


def walk_folder(folder: str) -> Iterator[Candidate | SkippedFile | UnreadableError]:
    """Yield everything in a folder: checkpoints, files named like one, skipped files, and subfolders that cannot be
    listed. A subfolder that is one checkpoint is not entered."""
    closed: list[UnreadableError] = []
    for place, folders, files in as_folder(folder).walk(closed):
        visible = sorted(name for name in folders if not name.startswith("."))
        whole = {name: item for name in visible if (item := _whole_folder(place.inner(name))) is not None}
        folders[:] = [name for name in visible if name not in whole]
        yield from whole.values()
        for name in sorted(files):
            path = place.join(name)
            why, archive = recognised(path)
            yield SkippedFile(path, why) if why else Candidate(path, False, archive)
    yield from (Candidate(error.path, False) for error in closed)


def _foreign_files(folder: Folder, path: str) -> UnreadableError | None:
    # not needed for a checkpoint
    from .foreign.frameworks import foreign_folder, foreign_kinds
    from .foreign.identification import explain, explain_zip

    named: list[tuple[str, NextStep | None]] = []
    for name in sorted(folder.names())[:_EXAMINED]:
        if folder.is_folder(name):
            foreign = foreign_folder(folder.inner(name).names())
            named += [(f"{quoted(name)} is {foreign.description}", None)] if foreign is not None else []
            continue
        try:
            with closing(open_any(folder.join(name))) as source:
                head = source.read(0, 1024)
                is_zip = head[:4] == b"PK\x03\x04"  # which may be a checkpoint
                error = explain_zip(read_archive(source)) if is_zip else explain(head, source)
        except UnreadableError:
            continue
        if error is not None and getattr(error, "kind", "") in _ARCHIVES | foreign_kinds():
            kind = re.split(r"[,:]| that holds", error.what.removeprefix("it is "), maxsplit=1)[0]
            named.append((f"{quoted(name)} is {kind}", error.step if error.step.commands else None))
    if not named:
        return None
    what = f"there is no torch checkpoint in this folder: {join_limited([text for text, _ in named[:_NAMED]])}"
    what += ", among others" * (len(named) > _NAMED)
    own = named[0][1] if len(named) == 1 else None
    return UnreadableError(what, path=path, next=own or command("scan", path))


def recognised(path: str) -> tuple[str, bool]:
    """Return why a file found in a folder is skipped, or "", and whether it is an archive but no checkpoint. Not
    skipped are files with the content of a checkpoint, whole or not, archives that hold one, and files named like a
    checkpoint that are not a complete file of another kind."""
    # not needed for a checkpoint
    from .foreign.frameworks import foreign_kinds
    from .foreign.identification import explain, explain_zip

    others = foreign_kinds()
    name = path.lower()
    named = name.endswith(CHECKPOINTS)  # a file of unknown format is then a damaged checkpoint
    try:
        source = open_any(path)
    except UnreadableError as error:
        # A dangling link or an unreadable file counts as a checkpoint that is missing.
        claims = named and not name.endswith(".bin") and (os.path.isfile(path) or not os.path.exists(path))
        return "" if claims else error.what, False
    try:
        head = source.read(0, 1024)
        known = next((item for item in FORMATS if item.sniff(head, source)), None)
        if known is None:
            refusal = explain(head, source)
            kind = getattr(refusal, "kind", "")
            if kind == "text" and as_folder(os.path.dirname(path)).size(_SPEECHBRAIN) is not None:
                return "text of SpeechBrain", False
            claims = named and (kind in _BIN if name.endswith(".bin") else kind not in others or name.endswith(".ptl"))
            if claims or (kind in _ARCHIVES and checkpoints_in(source)):
                return "", kind in _ARCHIVES
            return refusal.what if kind != "unknown" else "neither its name nor its content means a checkpoint", False
        if known.name == BARE_PICKLE:
            return "" if named else "a bare pickle", False
        # A checkpoint of torch needs no further look, and most files are one.
        archive = read_archive(source) if known.name == "torch-zip" and not _begins_with_pickle(head) else None
        plain = archive is None or archive.find("data.pkl") is not None or kind_of(archive) is not None
        other = None if archive is None or plain else explain_zip(archive)
        if other is None:
            return "", False
        claims = (named and other.kind not in others) or bool(checkpoints_in(source))
        return "" if claims else other.what, other.kind in _ARCHIVES
    except MalformedError:
        return "", False
    except UnreadableError as error:
        return "" if named else error.what, False
    finally:
        source.close()


def _begins_with_pickle(head: bytes) -> bool:
    """Return whether the first record of a zip archive is data.pkl, as ``torch.save`` writes it."""
    folder, _, name = head[30 : 30 + int.from_bytes(head[26:28], "little")].partition(b"/")
    return bool(folder) and name == b"data.pkl"


def checkpoints_within(path: str) -> list[str]:
    """Return the addresses of the checkpoints in an archive, at most ``_MEMBERS``."""
    try:
        with closing(open_any(path)) as source:
            return [f"{path}{SEPARATOR}{member.name}" for member in checkpoints_in(source)[:_MEMBERS]]
    except UnreadableError:
        return []


def explain_directory(path: str) -> UnreadableError:
    """Return the error for a folder given in place of a file: the kind of folder, and a path to use instead."""
    from .foreign.frameworks import foreign_folder
    from .names.hf import side_files
    from .names.training import training_folder

    folder = as_folder(path)
    try:
        names = sorted(folder.names(strict=True))
    except UnreadableError as error:
        return UnreadableError(f"it is a directory that {error.what.removeprefix('it ')}", path=path)
    if (known := training_folder(folder)) is not None:
        return known
    if (foreign := foreign_folder(names)) is not None:
        what = f"it is {foreign.description}, not a torch checkpoint"
        return NotACheckpointError(what, kind=foreign.kind, path=path, next=foreign.tool)
    files = [name for name in names[:_EXAMINED] if folder.size(name) is not None]
    checkpoints = [name for name in files if not recognised(os.path.join(path, name))[0]]
    # Subfolders may be checkpoints, as in a diffusers pipeline or a training run with other files next to them.
    folders = [name for name in names[:_EXAMINED] if folder_format(folder.inner(name))]
    checkpoints.sort(key=lambda name: bool(side_files([name])))
    if not folders and not checkpoints:
        deeper = (item for item in walk_folder(path) if isinstance(item, Candidate) and _is_folder(item.path))
        folders = [os.path.relpath(item.path, path) for item in islice(deeper, _EXAMINED)]
    if folders:
        what = f"it is {'a diffusers pipeline' if 'model_index.json' in names else 'a directory'} "
        what += f"with checkpoints in its folders: {join_limited(folders)}"
        latest = max(folders, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
        return UnreadableError(what, path=path, next=f"name {quote(os.path.join(path, latest))}")
    if checkpoints:
        what = f"it is a directory; it holds {join_limited(checkpoints)}"
        return UnreadableError(what, path=path, next=command("inspect", os.path.join(path, checkpoints[0])))
    plain = UnreadableError("the folder holds no checkpoint", path=path, next="name a file")
    return _foreign_files(folder, path) or plain
