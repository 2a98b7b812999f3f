"""The other files in a checkpoint's folder: optimizers, arguments, code, data.

A program that is given the folder may load any of them. Each is checked like a standalone file, or reported as not
looked at.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from itertools import chain, islice
from typing import Final

from ..base.errors import CkptoolError, MalformedError, UnreadableError
from ..base.findings import CARRIED, CONFIGURATION, PROGRAM, Finding
from ..base.limits import LIMITS
from ..base.records import NamedTuple, TypedDict
from ..base.suffixes import WEIGHTS
from ..base.text import join_limited, pluralize
from ..checkpoint.programs import program_of
from ..files.folders import Folder, open_folder
from ..files.sources import FolderSource, Source
from ..formats import folder_format
from ..formats.checkpoint_search import GIT_FOLDER, LINKED_FOLDER
from ..formats.opening import checkpoint_of
from ..formats.search.inert import code_kind, inert_kind
from ..formats.search.pickle_search import find_pickles
from ..safety.verdict import ExaminedPickle, examine_all
from .checks import NOT_POSSIBLE, Check, check_checkpoint, check_pickles, judge

#: Kinds of files, named as in ``identify.explain``, from which nothing is loaded.
_NOT_LOADED: Final = frozenset(("empty", "zeros", "git-lfs-pointer", "html", "json", "index", "text", "link-text"))
#: Kinds of files that stand where the name promises weights, which were not downloaded.
_POINTERS: Final = frozenset(("empty", "zeros", "git-lfs-pointer", "html", "link-text"))
#: First bytes that are searched for code.
_HEAD: Final = 512
#: Codes of notes about a file that is not torch's: a global that is not on the list, code, a pickle in a tensor.
_CODE: Final = ("global", CONFIGURATION, CARRIED)
_DANGEROUS: Final = ("dangerous-call", "global-name")


class Companion(NamedTuple):
    """A file beside the checkpoint: its ``name`` relative to the folder, with "/", and a description.

    ``reason`` says why its content was not examined ("" if it was). ``notes`` are its problems.
    """

    name: str
    description: str
    looked_at: bool = False
    reason: str = ""
    notes: tuple[Finding, ...] = ()
    pickles: tuple[ExaminedPickle, ...] = ()


class CompanionReport(TypedDict):
    """A file beside the checkpoint, in the report of ``validate``.

    ``what`` is its kind; ``why`` says why its content was not examined ("" if it was).
    """

    name: str
    looked_at: bool
    what: str
    why: str


class Companions(NamedTuple):
    """All files beside a checkpoint, with the checks and pickles found in them."""

    files: list[CompanionReport]
    checks: list[Check]
    pickles: list[ExaminedPickle]


def check_companions(source: FolderSource, torch: str) -> Companions:
    """Check every file in a folder and its subfolders that is not part of the checkpoint there.

    If the checkpoint is in a subfolder of the folder that the user named, the files around it are checked too. The
    files of other checkpoints there, such as earlier steps, are not.
    """
    top = open_folder(source.folder)
    around = (os.path.relpath(path, top.path).replace(os.sep, "/") for path, whole in _around(source) if not whole)
    every = list(islice(chain(companion_names(top, source.parts), around), LIMITS.listed + 1))
    files = [check_companion(top, name, torch) for name in every[: LIMITS.listed]]
    named = open_folder(source.name)  # contains the folder of the checkpoint, or is it
    files += _unfollowed_folders(named if named.is_folder("") else top)
    if len(every) > LIMITS.listed:
        why = f"more than {LIMITS.listed:,} files"
        files.append(Companion(f"{every[-1]} and what follows it", "more files", reason=why))
    pickles = [pickle for item in files for pickle in item.pickles]
    checks = []
    notes = [note for item in files for note in item.notes]
    count = sum(item.looked_at for item in files)
    if count or notes:
        good = f"{pluralize(count, 'other file')} looked at: nothing that is run or odd"
        checks.append(judge("beside", "safety", notes, good))
    skipped = [item for item in files if not item.looked_at]
    if skipped:
        unread = tuple(
            Finding("not-looked-at", "warning", f"{item.name}: {item.reason}", item.name) for item in skipped
        )
        names = join_limited([f"{item.name} ({item.reason})" for item in skipped], most=5)
        checks.append(Check("unread files", "safety", NOT_POSSIBLE, f"not looked at: {names}", unread))
    reports: list[CompanionReport] = [
        {"name": item.name, "looked_at": item.looked_at, "what": item.description, "why": item.reason} for item in files
    ]
    return Companions(reports, checks, pickles)


def companion_names(top: Folder, parts: Collection[str]) -> Iterator[str]:
    """Yield the names of the files in a folder, except the files in ``parts`` and in ``.git``; links are
    not followed.
    """
    for inner, folders, files in top.walk():
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(files):
            own = os.path.relpath(inner.join(name), top.path).replace(os.sep, "/")
            if own not in parts:
                yield own


def other_checkpoints(source: Source) -> list[str]:
    """Return the folders of other checkpoints in the folder that the user named, such as earlier steps."""
    return [path for path, whole in _around(source) if whole] if isinstance(source, FolderSource) else []


def _around(source: FolderSource) -> Iterator[tuple[str, bool]]:
    """Yield (path, False) for each file in the folder that the user named, and (path, True) for each checkpoint folder.

    The folder of the checkpoint itself is left out, so nothing is yielded if the user named it.
    """
    named, top = open_folder(source.name), os.path.realpath(source.folder)
    if not named.is_folder("") or os.path.realpath(named.path) == top:
        return
    for inner, folders, files in named.walk():
        paths = {name: inner.join(name) for name in folders}
        folders[:] = sorted(name for name in folders if name != ".git" and os.path.realpath(paths[name]) != top)
        whole = [name for name in folders if folder_format(paths[name])]
        yield from ((paths[name], True) for name in whole)
        yield from ((inner.join(name), False) for name in sorted(files))
        folders[:] = [name for name in folders if name not in whole]


def _unfollowed_folders(top: Folder) -> list[Companion]:
    folders = ((inner, name) for inner, names, _ in top.walk() for name in sorted(names))
    kinds = (
        (inner.join(name), GIT_FOLDER if name == ".git" else LINKED_FOLDER)
        for inner, name in folders
        if name == ".git" or inner.is_link(name)
    )
    names = ((os.path.relpath(path, top.path).replace(os.sep, "/"), why) for path, why in kinds)
    return [Companion(name, "a folder", reason=why) for name, why in islice(names, LIMITS.listed)]


def check_companion(folder: Folder, name: str, torch: str) -> Companion:
    """Check one file of a folder as ``validate`` does, without its checksums."""
    try:
        source = folder.open(name)
    except UnreadableError as error:
        return Companion(name, "a file that cannot be opened", reason=error.what)
    try:
        code = code_kind(name, source.read(0, _HEAD))
        if code:
            return Companion(name, code, reason=code, pickles=(ExaminedPickle(name, program=code),))
        return _checked(folder, source, name, torch)
    except CkptoolError as error:  # the file changed or shrank while it was read
        return Companion(name, "a file that cannot be read", reason=error.what)
    finally:
        source.close()


def _checked(folder: Folder, source: Source, name: str, torch: str) -> Companion:
    try:
        with checkpoint_of(folder.open(name)) as opened:
            checkpoint = opened.lenient()
            checked = check_checkpoint(checkpoint, torch=torch, quick=True, steps=False)
            program = program_of(checkpoint)
            unclear = next(iter(checkpoint.survey.unsupported.values()), "")
    except UnreadableError as error:
        return _not_a_checkpoint(source, name, torch, error)
    notes = []
    for note in (note for check in checked.checks for note in check.notes):
        if note.code in _DANGEROUS or note.ambiguous:
            notes.append(_located(name, note))
        elif note.level == "error" or note.code in _CODE:
            notes.append(_located(name, note)._replace(level="warning"))
    pickles = tuple(pickle.in_file(name) for pickle in checked.pickles)
    if program is not None:
        notes.append(Finding(PROGRAM, "warning", f"{name}: {program.kind}, which holds code", name))
        pickles += (ExaminedPickle(name, program=f"{program.kind}, read by {program.loader}"),)
    reason = f"{unclear}, which ckptool does not follow" if unclear else ""
    return Companion(name, checkpoint.format, not unclear, reason, tuple(notes), pickles)


def _not_a_checkpoint(source: Source, name: str, torch: str, error: UnreadableError) -> Companion:
    kind = getattr(error, "kind", "")
    pickles = examine_all(find_pickles(source), torch)
    checks = check_pickles(pickles, torch)
    notes = [_located(name, note) for check in checks for note in check.notes if note.code in (*_DANGEROUS, *_CODE)]
    pickles = [pickle.in_file(name) for pickle in pickles]
    whole = bool(pickles) and not any(pickle.error for pickle in pickles) and not isinstance(error, MalformedError)
    data = kind in _NOT_LOADED or bool(inert_kind(source.read(0, _HEAD)))
    if not (data or (whole and kind == "pickle")):
        return Companion(name, kind or "damaged", False, error.what, tuple(notes), tuple(pickles))
    if kind in _POINTERS and name.lower().endswith((*WEIGHTS, ".pkl")):
        notes.append(Finding(kind, "warning", f"{name}: {error.what}", name))
    return Companion(name, kind, True, "", tuple(notes), tuple(pickles))


def _located(name: str, note: Finding) -> Finding:
    return note._replace(message=f"{name}: {note.message}", where=name)
