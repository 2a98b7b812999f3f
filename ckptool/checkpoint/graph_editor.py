"""Editing a graph: collecting changed and added nodes, and removing objects from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain

from ..base.errors import RefusedError
from ..base.text import argument
from ..pickles.nodes import Call, Dict, FrozenSet, Graph, List, Node, Persistent, Ref, Set
from .graph_builder import Constants
from .objects import callable_name, elements, initial_pairs, last_pairs, pair_list
from .tensors import Storage, TensorReader


class GraphEditor(Constants):
    """Collects changes to a graph.

    A string may be the same object as a string of the user's (``'cpu'`` is interned, a key may also be part of a
    config), so no string is changed in place: ``text`` returns another one to hold instead, the same one each time, so
    that places that shared a string still do.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.changed: dict[Ref, Node] = {}
        self._added: list[Node] = []
        self._like: dict[Ref, Ref] = {}
        self._texts: dict[tuple[Ref, str], Ref] = {}

    def add(self, node: Node, like: Ref = -1) -> Ref:
        """Add a node, written in the style of the node ``like``."""
        ref = len(self.graph.nodes) + len(self._added)
        self._added.append(node)
        if like >= 0:
            self._like[ref] = like
        return ref

    def put(self, ref: Ref, node: Node) -> None:
        """Replace the node of an old or new reference."""
        old = len(self.graph.nodes)
        if ref < old:
            self.changed[ref] = node
        else:
            self._added[ref - old] = node

    def node(self, ref: Ref) -> Node:
        """Return the current node of a reference."""
        if ref in self.changed:
            return self.changed[ref]
        old = len(self.graph.nodes)
        return self.graph.nodes[ref] if ref < old else self._added[ref - old]

    def text(self, ref: Ref, value: str) -> Ref:
        """Return the reference to hold instead of the string ``ref`` where its value becomes ``value``."""
        if self.graph.nodes[ref] == value:
            return ref
        known = self._texts.get((ref, value))
        if known is None:
            known = self._texts[ref, value] = self.add(value, ref)
        return known

    def refill(self, ref: Ref, items: list[tuple[Ref, Ref]]) -> None:
        """Replace the entries of a mapping, in whichever form it is written."""
        nodes = self.graph.nodes
        node = nodes[ref]
        flat = [part for item in items for part in item]
        if not isinstance(node, Call):
            self.changed[ref] = Dict(flat)
            return
        listed = pair_list(self.graph, node)
        if listed is None and initial_pairs(self.graph, node):
            # Constructed from another mapping, which may be held elsewhere, too: it is filled instead.
            kept = elements(nodes[node.args])[:-1]
            empty = Call(node.op, node.func, self.add(kept) if kept else self.constant(()))
            self.changed[ref] = empty.filled(node.items, flat, node.states)
            return
        if listed is not None:
            # OrderedDict([[k, v], ...]): another one may be constructed from the same pairs, so this one gets others.
            pairs = [
                pair if elements(nodes[pair]) == item else self.add(_sequence(nodes[pair], item), pair)
                for pair, item in zip(listed, items)
            ]
            if pairs != listed:
                (holder,) = elements(nodes[node.args])
                args = self.add((self.add(_sequence(nodes[holder], pairs), holder),), node.args)
                node = Call(node.op, node.func, args, node.kwargs).filled(node.items, node.pairs, node.states)
            flat = flat[2 * len(listed) :]
        self.changed[ref] = node.filled(node.items, flat, node.states)

    def done(self, root: Ref | None = None) -> Graph:
        """Return the edited graph, or the old one if nothing changed; ``root`` is another root."""
        if not self.changed and root is None:
            return self.graph
        return self.graph.edited(self.changed, self._added, root, self._like)


def _sequence(like: Node, refs: Sequence[Ref]) -> Node:
    """Return a tuple or a list, whichever ``like`` is."""
    return tuple(refs) if type(like) is tuple else List(list(refs))


# -- removing objects


def used_storages(graph: Graph, path: str = "") -> dict[str, Storage]:
    """Return the storages that the root leads to, by key, in the order in which a reader meets them.

    Raises RefusedError for a persistent id that does not describe a storage as torch does: which bytes it needs is
    unknown, and they must not be taken for unused. ``path`` is for that error.
    """
    reader, nodes = TensorReader(graph), graph.nodes
    modules = frozenset(reader.modules)
    storages: dict[str, Storage] = {}
    for ref in graph.reachable():
        if type(nodes[ref]) is not Persistent or ref in modules:
            continue
        storage = reader.storage(ref)
        if storage is None:
            message = "it refers to a storage in a way that torch.save never does, so its bytes could be lost"
            step = f"see what torch makes of it: ckptool validate {argument(path)}" if path else ""
            raise RefusedError(message, path=path, next=step)
        storages[storage.key] = storage
    return storages


def removed_with(graph: Graph, lost: Collection[Ref]) -> set[Ref]:
    """Return the references that cannot stay without ``lost``: these, and the calls that depend on one of them.

    Lists, mappings and sets stay, with fewer elements; so do tuples that are values.
    """
    nodes = graph.nodes
    gone = set(lost)
    holding: set[Ref] = set()
    before = -1
    refs = range(len(nodes))
    # What a node depends on comes before it in a pickle, and after it in what was copied from other graphs: a pass
    # forward and one backward find nearly all of that.
    while before < len(gone) + len(holding):
        before = len(gone) + len(holding)
        for ref in chain(refs, reversed(refs)):
            node = nodes[ref]
            if type(node) is tuple:
                if any(part in gone or part in holding for part in node):
                    holding.add(ref)
            elif (
                type(node) is Call
                and ref not in gone
                and any(part in gone or part in holding for part in (node.func, node.args, *node.states))
            ):
                gone.add(ref)
    return gone


def prune(editor: GraphEditor, gone: Collection[Ref]) -> None:
    """Change every container so that it does not lead to what is gone; see ``removed_with``."""
    graph = editor.graph
    none = -1

    def placeholder() -> Ref:
        nonlocal none
        if none < 0:
            none = editor.add(None)
        return none

    editor.changed.update(_without_lost(graph, gone))
    for ref, old in enumerate(graph.nodes):
        if ref in gone:
            continue
        new = _without(graph, editor.changed.get(ref, old), gone, placeholder)
        if new is not None:
            editor.changed[ref] = new


def _without(graph: Graph, node: Node, gone: Collection[Ref], placeholder: Callable[[], Ref]) -> Node | None:
    """Return the node without references to what is gone; None where it has none."""
    if isinstance(node, Call):
        if not (_any(node.items, gone) or _any(node.pairs, gone)):
            return None
        items = [placeholder() if part in gone else part for part in node.items]
        pairs = _pairs(graph, node.pairs, gone) if _any(node.pairs, gone) else node.pairs
        return node.filled(items, pairs, node.states)
    if isinstance(node, Dict):
        return Dict(_pairs(graph, node.pairs, gone)) if _any(node.pairs, gone) else None
    if not isinstance(node, tuple | List | Set | FrozenSet):
        return None
    parts = node if isinstance(node, tuple) else node.items
    if not _any(parts, gone):
        return None
    if isinstance(node, Set | FrozenSet):
        return type(node)([part for part in parts if part not in gone])
    return _sequence(node, [placeholder() if part in gone else part for part in parts])


def _any(parts: Sequence[Ref], gone: Collection[Ref]) -> bool:
    return any(part in gone for part in parts)


def _pairs(graph: Graph, pairs: Sequence[Ref], gone: Collection[Ref]) -> list[Ref]:
    kept: list[Ref] = []
    # Of a key that is written twice the first value must not come back when the last one goes.
    for key, value in last_pairs(graph, pairs):
        if key not in gone and value not in gone:
            kept += (key, value)
    return kept


def _without_lost(graph: Graph, gone: Collection[Ref]) -> dict[Ref, Node]:
    """Return the changed lists of ``OrderedDict([[k, v], ...])`` and ``set([...])``, which hold no placeholders."""
    nodes = graph.nodes
    changes: dict[Ref, Node] = {}
    sets: dict[Ref, Node] = {}
    for node in nodes:
        if type(node) is not Call:
            continue
        listed = pair_list(graph, node)
        kept = [pair for pair in listed or () if not _any(elements(nodes[pair]), gone)]
        if len(kept) < len(listed or ()):
            (holder,) = elements(nodes[node.args])
            changes[holder] = _sequence(nodes[holder], kept)
        if callable_name(graph, node.func) == "builtins.set":
            for holder in elements(nodes[node.args])[:1]:
                members = elements(nodes[holder])
                if _any(members, gone):
                    sets[holder] = List([member for member in members if member not in gone])
    return changes | sets
