"""Folders that are one checkpoint: opening their files, and common parts of their containers."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, TypeVar

from ..base.errors import CkptoolError, MalformedError, UnreadableError, of_file
from ..base.findings import INCOMPLETE, Finding
from ..base.limits import LIMITS
from ..base.steps import as_step
from ..base.text import join_limited, pluralize
from ..checkpoint.container import Container, FoundPickle, RankSave, is_complete
from ..checkpoint.objects import callable_name
from ..checkpoint.tensors import TensorReader
from ..files.folders import Folder
from ..files.sources import Source
from ..pickles.nodes import Call, Global, Graph, Node, Persistent, Ref
from .foreign.identification import explain_placeholder

T = TypeVar("T")

#: A tensor with at least this many bytes is hostile: torch counts in int64.
TOO_LARGE = 1 << 62
#: The most bytes that are read from a file that names a step.
_MAX_TAG: Final = 200


class ShardedContainer(Container):
    """A container of several files."""

    errors: list[CkptoolError]

    def __init__(self) -> None:
        self.problems: list[Finding] = []
        self.files: list[Source] = []
        self.errors = []

    def note(
        self,
        code: str,
        level: str,
        message: str,
        where: str = "",
        offset: int = -1,
        *,
        refused: bool = False,
        storages: Collection[str] | None = None,
    ) -> None:
        """Add a problem of the whole checkpoint, or of these ``storages``."""
        if len(self.problems) < LIMITS.listed:
            self.problems.append(Finding(code, level, message, where, offset, refused=refused, storages=storages))

    @property
    def completeness(self) -> str:
        """Whether all parts are there, as text."""
        return "all there" if is_complete(self.problems) else "incomplete"

    def note_lost(self, message: str, where: str = "") -> None:
        """Report that a part is missing, damaged, or from another save."""
        self.note(INCOMPLETE, "error", message, where, refused=True)

    def note_unrecorded(self, shards: int) -> None:
        """Report that nothing records how many shards there were."""
        self.rank_save = RankSave(shards, recorded=False, kind="shard")

    def _read_file(
        self, folder: Folder, name: str, stack: ExitStack, read: Callable[[Source, str], T], subject: str
    ) -> T | None:
        """Read a file of the folder; report a problem and return None if it cannot be read."""
        try:
            source = folder.open(name)
            stack.callback(source.close)
            content = read(source, name)
        except CkptoolError as error:
            self.errors.append(of_file(error))
            self.note_lost(f"{subject} cannot be read: {error.what}", name)
            return None
        self.files.append(source)
        return content


def in_file(problem: Finding, name: str) -> Finding:
    """Return the problem of one file as a problem of the folder."""
    return problem._replace(message=f"{name}: {problem.message}", where=name)


def other_steps_note(path: str, latest: str, others: Sequence[str]) -> Finding:
    """Return the note on other step folders next to the one that the file ``latest`` names. ``where`` is the path of a
    later step, or ""."""
    name = os.path.basename(path)
    what = f"this is {name}, which {latest} names; also there: {join_limited(others)}"
    last = max((*others, name), key=lambda step: (len(step), step))
    where = "" if last == name else os.path.join(os.path.dirname(path), last)
    return Finding("other-steps", "note", what, where)


@contextmanager
def opening(folder: str, next: str = "") -> Iterator[ExitStack]:
    """Close the opened files if an error is raised; add the folder and the next step to the error."""
    with ExitStack() as stack:
        try:
            yield stack
        except CkptoolError as error:
            error.path = error.path or folder
            if isinstance(error, MalformedError):
                error.step = error.step or as_step(next)
            raise
        stack.pop_all()


def open_listing(folder: Folder, name: str, stack: ExitStack, subject: str) -> Source:
    """Open the file that lists the content of a folder; raise UnreadableError, or MalformedError for a placeholder."""
    try:
        listing = folder.open(name)
    except UnreadableError as error:
        error.what, error.path = f"{subject} cannot be read: {error.what}", folder.path
        raise
    stack.callback(listing.close)
    placeholder = explain_placeholder(listing)
    if placeholder is not None:
        what = f"{subject} is not there: {placeholder.what.removeprefix('it is ')}"
        raise MalformedError(what, path=folder.path, next=placeholder.step)
    return listing


def grouped(pickles: Iterable[tuple[Hashable, FoundPickle]], noun: str) -> Iterator[FoundPickle]:
    """Yield the pickles. Of thousands that have equal keys, and name and call the same globals, yield the first."""
    alike: dict[object, tuple[FoundPickle, int]] = {}
    for own, pickle in pickles:
        if own is None or pickle.graph is None or pickle.graph.oddities or pickle.rest:
            yield pickle
            continue
        named = {(f"{node.module} {node.name}", False) for _, node in pickle.graph.of_type(Global)}
        called = {(callable_name(pickle.graph, node.func), True) for _, node in pickle.graph.of_type(Call)}
        key = own, frozenset(named | called)
        first, count = alike.get(key, (pickle, 0))
        alike[key] = first, count + 1
    for pickle, count in alike.values():
        more = "" if count == 1 else f" and {pluralize(count - 1, noun)} like it"
        yield pickle._replace(where=pickle.where + more)


def with_storage_keys(reader: TensorReader, key_of: Callable[[str], str]) -> Graph:
    """Return the reader's graph with other storage keys in its persistent ids."""
    graph = reader.graph
    changes: dict[Ref, Node] = {}
    added: list[Node] = []
    for ref, storage in reader.uses():
        node = graph.nodes[ref]
        assert isinstance(node, Persistent)
        pid = graph.nodes[node.pid]
        assert isinstance(pid, tuple)
        changes[node.pid] = (*pid[:2], len(graph.nodes) + len(added), *pid[3:])
        added.append(key_of(storage.key))
    return graph.edited(changes, added)


def read_tag(folder: Folder, name: str) -> str:
    """Return the step name stored in a file, or "" if it has none."""
    try:
        text = folder.read(name, _MAX_TAG).decode("utf-8", "replace").strip()
    except CkptoolError:
        return ""
    return text if text == os.path.basename(text) else ""
