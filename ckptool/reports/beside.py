"""What stands beside the files of a checkpoint in a folder: each is looked at like a file alone, or named as not looked
at. A program that is given the folder loads from there what it likes: an optimizer, arguments, code."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from ..base.errors import CkptoolError, MalformedError, UnreadableError
from ..base.limits import LIMITS
from ..base.text import counted, listed
from ..checkpoint.container import AMBIGUOUS, FoundPickle
from ..files.sources import FileSource, FolderSource, open_source
from ..formats.opening import checkpoint_of
from ..formats.pickle_search import find_pickles
from ..safety.named_globals import NamedGlobal, named_globals
from .checks import NOT_POSSIBLE, Check, Note, judged, safety, validation

#: What no program runs: text, pictures, tables, vocabularies. Told by the name where the content is no text.
_DATA: Final = (
    *(".json", ".jsonl", ".txt", ".md", ".rst", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".jinja"),
    *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".pdf", ".mp4", ".wav", ".mp3", ".flac", ".parquet", ".arrow"),
    *(".model", ".tiktoken", ".bpe", ".vocab", ".log", ".lock", ".html", ".xml", ".distcp.index"),
)
#: Code, by the end of the name: what a program does with it is up to the program.
_CODE: Final = {
    ".py": "Python code, which transformers runs with trust_remote_code",
    ".pyc": "compiled Python code",
    ".ipynb": "a notebook: code",
    ".sh": "a shell script",
    ".so": "a compiled library",
    ".dll": "a compiled library",
    ".dylib": "a compiled library",
    ".jar": "a compiled library",
}
#: Kinds of files (as ``identify.explain`` calls them) that hold nothing that is loaded.
_NOTHING: Final = frozenset(("empty", "zeros", "git-lfs-pointer", "html", "json", "index", "text", "link-text"))


class Seen(NamedTuple):
    """A file beside the checkpoint: ``name`` from its folder on, with "/"; ``looked`` whether its content was looked
    at, and where not, ``why``; ``what`` it is in words. ``notes`` are what a look at it found."""

    name: str
    looked: bool
    what: str
    why: str = ""
    notes: tuple[Note, ...] = ()
    pickles: tuple[FoundPickle, ...] = ()


class Beside(NamedTuple):
    """What all the files beside a checkpoint come to."""

    files: list[Seen]
    checks: list[Check]
    pickles: list[FoundPickle]
    globals: list[NamedGlobal]

    def as_json(self) -> list[dict[str, Any]]:
        """The files of a report."""
        return [
            {"name": item.name, "looked_at": item.looked, "what": item.what, "why": item.why} for item in self.files
        ]


def look_beside(source: FolderSource, torch: str) -> Beside:
    """Look at every file of a folder, and of the folders in it, that is no part of the checkpoint there."""
    top = os.path.dirname(source.files[0].name) or os.curdir
    files = [look(os.path.join(top, name), name, torch) for name in files_beside(top, source.parts)]
    files += _links(top)
    pickles = [pickle for item in files for pickle in item.pickles]
    checks = []
    notes = [note for item in files for note in item.notes]
    looked = sum(item.looked for item in files)
    if looked or notes:
        good = f"{counted(looked, 'other file')} looked at: nothing that is run or odd"
        checks.append(judged("beside", "safety", notes, good))
    passed = [item for item in files if not item.looked]
    if passed:
        unread = tuple(Note("not-looked-at", "warning", f"{item.name}: {item.why}", item.name) for item in passed)
        names = listed([f"{item.name} ({item.why})" for item in passed], most=5)
        checks.append(Check("unread files", "safety", NOT_POSSIBLE, f"not looked at: {names}", unread))
    return Beside(files, checks, pickles, named_globals(pickles, torch))


def files_beside(top: str, own: Collection[str]) -> Iterator[str]:
    """The files in a folder but those of the checkpoint, those of git and links to folders left out."""
    found = _walk(top, own)
    yield from islice(found, LIMITS.listed)


def _walk(top: str, own: Collection[str]) -> Iterator[str]:
    for base, folders, files in os.walk(top):
        folders[:] = sorted(name for name in folders if name != ".git")  # no loader opens what git keeps there
        inner = os.path.relpath(base, top)
        for name in sorted(files):
            if base != top or name not in own:
                yield name if base == top else f"{inner}/{name}".replace(os.sep, "/")


def _links(top: str) -> list[Seen]:
    """The links to folders, which are not followed."""
    try:
        entries = [entry for entry in os.scandir(top) if entry.is_symlink() and entry.is_dir()]
    except OSError:
        return []
    return [Seen(entry.name, False, "a link to a folder", "a link to a folder, not followed") for entry in entries]


def look(path: str, name: str, torch: str) -> Seen:
    """Look at one file as ``validate`` does, its checksums left out."""
    code = next((words for suffix, words in _CODE.items() if name.lower().endswith(suffix)), "")
    if code:
        return Seen(name, False, code, code)
    try:
        source = open_source(path)
    except UnreadableError as error:
        return Seen(name, False, "a file that cannot be opened", error.what)
    try:
        return _looked(source, name, torch)
    except CkptoolError as error:  # it changed, or shrank, while it was read
        return Seen(name, False, "a file that cannot be read", error.what)
    finally:
        source.close()


def _looked(source: FileSource, name: str, torch: str) -> Seen:
    try:
        checkpoint = checkpoint_of(open_source(source.name))
    except UnreadableError as error:
        return _no_checkpoint(source, name, torch, error)
    with checkpoint:
        checks, found = validation(checkpoint, torch=torch, quick=True)
        notes = []
        for note in (note for check in checks for note in check.notes):
            if note.code in ("dangerous-call", "global-name", *AMBIGUOUS):
                notes.append(_of(name, note))
            elif note.level == "error" or note.code == "global":
                notes.append(_of(name, note)._replace(level="warning"))
        pickles = tuple(pickle._replace(where=f"{name}: {pickle.where}") for pickle in found.pickles)
        return Seen(name, True, checkpoint.format, "", tuple(notes), pickles)


def _no_checkpoint(source: FileSource, name: str, torch: str, error: UnreadableError) -> Seen:
    """A file that is no checkpoint, or a broken one: its pickles are looked at all the same."""
    kind = getattr(error, "kind", "")
    try:
        pickles = list(find_pickles(source))
    except MalformedError as broken:
        pickles = [FoundPickle(name, None, broken.what)]
    found = safety(pickles, torch, None)
    notes = [
        _of(name, note)
        for check in found.checks
        for note in check.notes
        if note.code in ("dangerous-call", "global-name", "global")
    ]
    named = tuple(pickle._replace(where=f"{name}: {pickle.where}") for pickle in pickles)
    whole = bool(pickles) and not any(pickle.error for pickle in pickles) and not isinstance(error, MalformedError)
    data = kind in _NOTHING or (kind == "unknown" and (name.lower().endswith(_DATA) or "." not in name))
    if data or (whole and kind == "pickle"):
        more = _pointer(name, kind, error)
        return Seen(name, True, kind, "", (*notes, *more), named)
    return Seen(name, False, kind or "damaged", error.what, tuple(notes), named)


def _pointer(name: str, kind: str, error: UnreadableError) -> Sequence[Note]:
    """What should have been a file of weights or objects, and is a pointer, a page or nothing."""
    if kind not in ("empty", "zeros", "git-lfs-pointer", "html", "link-text") or name.lower().endswith(_DATA):
        return ()
    if kind in ("empty", "link-text") and not name.endswith((".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl")):
        return ()
    return (Note(kind, "warning", f"{name}: {error.what}", name),)


def _of(name: str, note: Note) -> Note:
    return note._replace(message=f"{name}: {note.message}", where=name)
