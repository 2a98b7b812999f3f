"""Write edited programs: the same archive with other location tags, otherwise unchanged."""

from __future__ import annotations

from typing import Final

from ...base.errors import RefusedError
from ...base.steps import command
from ...checkpoint.checkpoint import Checkpoint, Target
from ...checkpoint.programs import NO_WEIGHTS, convert_step, program_of
from ...files.sources import Plan
from ...files.zips.layout import plan_rewrite
from ...pickles.encode import encode
from ...pickles.nodes import Graph, Node, Ref, relocated
from .. import repickled
from ..losses import Promise
from ..repickled import prove
from .torchscript import ScriptPickle, TorchScript

#: The edits that only change pickles. Everything else is also named by the code of the program.
_TAGS: Final = frozenset(("remap", "remap-objects", "device-string"))


def plan(checkpoint: Checkpoint, target: Target) -> tuple[Plan, bool]:
    """Return the archive with other location tags, and whether its unedited pickles are reproduced byte for byte."""
    container = editable(checkpoint)
    exact = True
    pickles: dict[str, bytes] = {}
    for part, graph in _edited_parts(checkpoint, container):
        again = encode(part.graph)
        data = pickles[part.record.name] = encode(graph)
        if not container.archive.read(part.record, part.record.size).startswith(again):
            exact = False
            prove(part.graph, again, "unedited", checkpoint.path)
            prove(graph, data, "edited", checkpoint.path)
    return plan_rewrite(container.archive, pickles), exact


def promise(checkpoint: Checkpoint, target: Target | None = None) -> Promise:
    """Promise the input with other pickles."""
    pickles = {part.record.name: graph for part, graph in _edited_parts(checkpoint, editable(checkpoint))}
    return repickled.promise(checkpoint)._replace(graph=None, pickles=pickles, replaced=frozenset(pickles))


def editable(checkpoint: Checkpoint) -> TorchScript:
    """Return the container of a program with only tags edited; raise RefusedError for any other edit."""
    container, program = checkpoint.container, program_of(checkpoint)
    assert program is not None
    step = convert_step(checkpoint)
    if step.commands:
        step = "take the weights out first: " + step
    if not checkpoint.survey.tensors:
        step = f"{NO_WEIGHTS} that could be taken out: " + command("inspect", checkpoint.path)
    if not isinstance(container, TorchScript):
        raise RefusedError(f"{program.kind} is read-only in ckptool", path=checkpoint.path, next=step)
    # No edit may change the nodes of the state dict.
    nodes, old = checkpoint.graph.nodes, container.graph
    kept = all(nodes[ref] is old.nodes[ref] for ref in range(container.end_of_parts, len(old.nodes)))
    others = any(change.number and change.edit not in _TAGS for change in checkpoint.changes) or checkpoint.others
    if others or checkpoint.needs_relayout or checkpoint.added or not kept or checkpoint.graph.root != old.root:
        what = f"{program.kind} is a program: its code names what is in it, so only location tags can be edited"
        raise RefusedError(what, path=checkpoint.path, next=step)
    return container


def _edited_parts(checkpoint: Checkpoint, container: TorchScript) -> list[tuple[ScriptPickle, Graph]]:
    graphs = ((part, _edited(checkpoint.graph, container.graph, part)) for part in container.parts)
    return [(part, graph) for part, graph in graphs if graph is not None]


class _Places(dict[Ref, Ref]):
    """Maps arena references to references of one part: the part's nodes keep their numbers, new nodes follow."""

    def __init__(self, part: ScriptPickle) -> None:
        super().__init__()
        self.part = part
        self.wanted: list[Ref] = []

    def __missing__(self, ref: Ref) -> Ref:
        size = len(self.part.graph.nodes)
        place = ref - self.part.base
        if not 0 <= place < size:
            # A node made by the edit, or a constant of another pickle.
            place = size + len(self.wanted)
            self.wanted.append(ref)
        self[ref] = place
        return place


def _edited(graph: Graph, before: Graph, part: ScriptPickle) -> Graph | None:
    end = part.base + len(part.graph.nodes)
    changed = [ref for ref in range(part.base, end) if graph.nodes[ref] is not before.nodes[ref]]
    if not changed:
        return None
    places = _Places(part)
    changes: dict[Ref, Node] = {}
    for ref in changed:
        node = graph.nodes[ref]
        if ref in part.keys:
            # The storage has another key in this pickle than in the arena.
            assert type(node) is tuple
            node = (*node[:2], part.keys[ref], *node[3:])
        changes[ref - part.base] = relocated(node, places)
    added: list[Node] = []
    while len(added) < len(places.wanted):
        added.append(relocated(graph.nodes[places.wanted[len(added)]], places))
    return part.graph.edited(changes, added)
