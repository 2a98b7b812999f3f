"""Files that are programs, after an edit: the same archive with other location tags, and nothing else."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from shlex import quote
from typing import Final, NamedTuple

from ...base.errors import RefusedError
from ...checkpoint.checkpoint import Checkpoint, Target
from ...checkpoint.programs import NO_WEIGHTS, convert_step, program_of
from ...files.sources import Appending, Plan
from ...files.zips.layout import plan_append, plan_rewrite
from ...files.zips.reader import Archive
from ...files.zips.writer import RecordContent, plan_archive
from ...pickles.encode import encode
from ...pickles.nodes import Graph, Node, Ref, relocated
from .. import repickled
from ..promises import Promise
from ..repickled import prove
from .torchscript import ScriptPickle, TorchScript

#: What is done by an edit of the pickles alone; the program names everything else, too.
_TAGS: Final = frozenset(("remap", "remap-objects", "device-string", "remap-code", "repack"))


class _Contents(NamedTuple):
    """The pickles that an edit changed, by the name of their record; ``exact`` whether the unedited ones come out byte
    for byte."""

    pickles: dict[str, bytes]
    exact: bool


def plan(checkpoint: Checkpoint, target: Target) -> tuple[Plan, bool]:
    """The archive with the edited pickles; raises RefusedError for an edit of anything but tags."""
    container = _editable(checkpoint)
    found = _contents(checkpoint, container)
    if checkpoint.needs_relayout:
        return plan_archive(_records(container.archive, found.pickles)), found.exact
    return plan_rewrite(container.archive, found.pickles), found.exact


def _records(archive: Archive, pickles: dict[str, bytes]) -> Iterator[RecordContent]:
    """Every record of the archive in its order, deflated ones as they are; the edited pickles in their places."""
    for record in archive.records:
        data = pickles.get(record.name)
        if data is not None:
            yield RecordContent(record.name, data, zlib.crc32(data), len(data))
        else:
            yield RecordContent(record.name, archive.payload(record), record.crc, record.size, record.method != 0)


def promise(checkpoint: Checkpoint, target: Target | None = None) -> Promise:
    """The input with other pickles."""
    pickles = edited_pickles(checkpoint)
    return repickled.promise(checkpoint)._replace(graph=None, pickles=pickles, replaced=frozenset(pickles))


def append(checkpoint: Checkpoint, edit: str, time: int) -> tuple[Appending, bool]:
    """The same as a version behind the file."""
    container = _editable(checkpoint)
    found = _contents(checkpoint, container)
    return plan_append(container.archive, found.pickles, set(), edit, time), found.exact


def _editable(checkpoint: Checkpoint) -> TorchScript:
    """The container of a program whose tags alone were edited; raises RefusedError for everything else."""
    container, program = checkpoint.container, program_of(checkpoint)
    assert program is not None
    step = f"take the weights out first: {convert_step(checkpoint.path)}"
    if not checkpoint.survey.tensors:
        step = f"{NO_WEIGHTS} that could be taken out: ckptool inspect {quote(checkpoint.path)}"
    if not isinstance(container, TorchScript):
        what = f"{program.kind} is read here, and not written again"
        raise RefusedError(what, path=checkpoint.path, next=step)
    other = any(change.number and change.edit not in _TAGS for change in checkpoint.changes)
    anew = checkpoint.needs_relayout and not any(change.edit == "repack" for change in checkpoint.changes)
    if other or anew or checkpoint.added or checkpoint.extra_sources or not _kept(checkpoint.graph, container):
        what = f"{program.kind} is a program: its code names what is in it, so only location tags can be edited"
        raise RefusedError(what, path=checkpoint.path, next=step)
    return container


def _kept(graph: Graph, container: TorchScript) -> bool:
    """Is the state dict that stands behind the pickles as it was?"""
    old = container.graph
    same = all(graph.nodes[ref] is old.nodes[ref] for ref in range(container.end_of_parts, len(old.nodes)))
    return same and graph.root == old.root


def _contents(checkpoint: Checkpoint, container: TorchScript) -> _Contents:
    exact = True
    pickles: dict[str, bytes] = {}
    for part in container.parts:
        graph = _edited(checkpoint.graph, container.graph, part)
        if graph is None:
            continue
        before = container.archive.read(part.record, part.record.size)
        again = encode(part.graph)
        data = encode(graph)
        if not before.startswith(again):
            exact = False
            prove(part.graph, again, "unedited", checkpoint.path)
            prove(graph, data, "edited", checkpoint.path)
        pickles[part.record.name] = data
    return _Contents(pickles, exact)


def edited_pickles(checkpoint: Checkpoint) -> dict[str, Graph]:
    """The pickles that an edit changed as graphs, by the names of their records."""
    container = _editable(checkpoint)
    found = {part.record.name: _edited(checkpoint.graph, container.graph, part) for part in container.parts}
    return {name: graph for name, graph in found.items() if graph is not None}


class _Places(dict[Ref, Ref]):
    """Where the nodes of the arena stand in one part: those of the part at their own numbers, new ones behind them."""

    def __init__(self, part: ScriptPickle) -> None:
        super().__init__()
        self.part = part
        self.wanted: list[Ref] = []

    def __missing__(self, ref: Ref) -> Ref:
        size = len(self.part.graph.nodes)
        place = ref - self.part.base
        if not 0 <= place < size:
            # A node that the edit made, or the constant of another pickle.
            place = size + len(self.wanted)
            self.wanted.append(ref)
        self[ref] = place
        return place


def _edited(graph: Graph, before: Graph, part: ScriptPickle) -> Graph | None:
    """The graph of a part after the edit; None where nothing of it changed."""
    end = part.base + len(part.graph.nodes)
    changed = [ref for ref in range(part.base, end) if graph.nodes[ref] is not before.nodes[ref]]
    if not changed:
        return None
    places = _Places(part)
    changes: dict[Ref, Node] = {}
    for ref in changed:
        node = graph.nodes[ref]
        if ref in part.keys:
            # A storage of this pickle has its own key there, whatever it is called here.
            assert type(node) is tuple
            node = (*node[:2], part.keys[ref], *node[3:])
        changes[ref - part.base] = relocated(node, places)
    added: list[Node] = []
    while len(added) < len(places.wanted):
        added.append(relocated(graph.nodes[places.wanted[len(added)]], places))
    return part.graph.edited(changes, added)
