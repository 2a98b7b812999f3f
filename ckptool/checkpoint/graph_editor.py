"""The nodes that an edit changes and adds, until they become another graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain

from ..base.errors import RefusedError
from ..base.text import argument
from ..pickles.nodes import Call, Dict, FrozenSet, Global, Graph, List, Node, Persistent, Ref, Set
from .objects import callable_name, elements, initial_pairs, last_pairs, pair_list
from .tensors import Storage, TensorReader


class Rewrite:
    """Collects changes to a graph.

    A string can be one object with another string of the user's (``'cpu'`` is interned, a key may also stand
    in a config), so no string is changed itself: ``text`` gives another one to hold instead, the same one
    each time, so that places that shared a string still do.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.changed: dict[Ref, Node] = {}
        self._added: list[Node] = []
        self._like: dict[Ref, Ref] = {}
        self._texts: dict[tuple[Ref, str], Ref] = {}
        self._constants: dict[tuple[type, str], Ref] = {}

    def add(self, node: Node, like: Ref = -1) -> Ref:
        """A new node; ``like`` is the one whose manner of writing it takes over."""
        ref = len(self.graph.nodes) + len(self._added)
        self._added.append(node)
        if like >= 0:
            self._like[ref] = like
        return ref

    def put(self, ref: Ref, node: Node) -> None:
        """Let a reference, old or new, hold another node."""
        old = len(self.graph.nodes)
        if ref < old:
            self.changed[ref] = node
        else:
            self._added[ref - old] = node

    def node(self, ref: Ref) -> Node:
        """The node of a reference as it is by now."""
        if ref in self.changed:
            return self.changed[ref]
        old = len(self.graph.nodes)
        return self.graph.nodes[ref] if ref < old else self._added[ref - old]

    def constant(self, value: bool | int | float | str | tuple[()] | None) -> Ref:
        """A new constant, string or empty tuple, one for each value."""
        mark = (type(value), repr(value))
        known = self._constants.get(mark)
        if known is None:
            known = self._constants[mark] = self.add(value)
        return known

    def named(self, module: str, name: str) -> Ref:
        """A new global, one for each name."""
        mark = (Global, f"{module} {name}")
        known = self._constants.get(mark)
        if known is None:
            known = self._constants[mark] = self.add(Global(module, name))
        return known

    def text(self, ref: Ref, value: str) -> Ref:
        """The reference to hold in place of the string ``ref`` where ``value`` must stand."""
        if self.graph.nodes[ref] == value:
            return ref
        known = self._texts.get((ref, value))
        if known is None:
            known = self._texts[ref, value] = self.add(value, ref)
        return known

    def refill(self, ref: Ref, items: list[tuple[Ref, Ref]]) -> None:
        """Give a mapping other entries, in whichever form it is written."""
        node = self.graph.nodes[ref]
        if not isinstance(node, Call):
            self.changed[ref] = Dict([part for item in items for part in item])
            return
        flat = [part for item in items for part in item]
        listed = pair_list(self.graph, node)
        if listed is None and initial_pairs(self.graph, node):
            # Made of another mapping, which may stand elsewhere too: it is filled instead.
            kept = elements(self.graph.nodes[node.args])[:-1]
            empty = Call(node.op, node.func, self.add(kept) if kept else self.constant(()))
            self.changed[ref] = empty.filled(node.items, flat, node.states)
            return
        if listed is not None:
            # OrderedDict([[k, v], ...]): another one may be made of the same pairs, so this one gets others.
            nodes = self.graph.nodes
            pairs = [
                pair if elements(nodes[pair]) == item else self.add(_pair(nodes[pair], item), pair)
                for pair, item in zip(listed, items)
            ]
            if pairs != listed:
                (holder,) = elements(nodes[node.args])
                held = tuple(pairs) if type(nodes[holder]) is tuple else List(pairs)
                args = self.add((self.add(held, holder),), node.args)
                node = Call(node.op, node.func, args, node.kwargs).filled(node.items, node.pairs, node.states)
            flat = flat[2 * len(listed) :]
        self.changed[ref] = node.filled(node.items, flat, node.states)

    def done(self, root: Ref | None = None) -> Graph:
        """The edited graph; the old one when nothing changed. ``root`` is another root."""
        if not self.changed and root is None:
            return self.graph
        return self.graph.edited(self.changed, self._added, root, self._like)


def _pair(like: Node, item: tuple[Ref, Ref]) -> Node:
    """A key and a value as a tuple or a list, as another pair is."""
    return item if type(like) is tuple else List(list(item))


# -- Taking objects out of a graph without leaving holes that something falls into


def used_storages(graph: Graph, path: str = "") -> dict[str, Storage]:
    """The storages that the root leads to, by key, in the order in which a reader meets them.

    Raises RefusedError for what is outside of the pickle and is no storage as torch describes one: which bytes it needs
    is not known, and they must not be taken for unused. ``path`` is for that error.
    """
    reader, nodes = TensorReader(graph), graph.nodes
    modules = frozenset(reader.modules)
    found: dict[str, Storage] = {}
    for ref in graph.reachable():
        if type(nodes[ref]) is not Persistent or ref in modules:
            continue
        storage = reader.storage(ref)
        if storage is None:
            what = "it refers to a storage in a way that torch.save never does, so its bytes could be lost"
            step = f"see what torch makes of it: ckptool validate {argument(path)}" if path else ""
            raise RefusedError(what, path=path, next=step)
        found[storage.key] = storage
    return found


def fallen(graph: Graph, lost: Collection[Ref]) -> set[Ref]:
    """The references that cannot stay without ``lost``: these, and the calls that take one of them as an argument.

    Lists, mappings and sets stay, with fewer elements; so do tuples that are values.
    """
    nodes = graph.nodes
    gone = set(lost)
    holding: set[Ref] = set()
    before = -1
    places = range(len(nodes))
    # What a node is made of stands before it in a pickle, and behind it in what was taken from other graphs: a pass
    # to and fro finds nearly all of that.
    while before < len(gone) + len(holding):
        before = len(gone) + len(holding)
        for ref in chain(places, reversed(places)):
            node = nodes[ref]
            if type(node) is tuple:
                if any(part in gone or part in holding for part in node):
                    holding.add(ref)
            elif type(node) is Call and ref not in gone:
                made_of = (node.func, node.args, *node.states)
                if any(part in gone or part in holding for part in made_of):
                    gone.add(ref)
    return gone


def prune(rewrite: Rewrite, gone: Collection[Ref]) -> None:
    """Change every container so that it does not lead to what is gone; see ``fallen``."""
    graph = rewrite.graph
    none = -1

    def nothing() -> Ref:
        nonlocal none
        if none < 0:
            none = rewrite.add(None)
        return none

    rewrite.changed.update(_lost_pairs(graph, gone))
    rewrite.changed.update(_lost_members(graph, gone))
    for ref, old in enumerate(graph.nodes):
        if ref in gone:
            continue
        node = rewrite.changed.get(ref, old)
        new = _without(graph, node, gone, nothing)
        if new is not None:
            rewrite.changed[ref] = new


def _without(graph: Graph, node: Node, gone: Collection[Ref], nothing: Callable[[], Ref]) -> Node | None:
    """The node without references to what is gone; None where it has none."""
    if type(node) is tuple:
        return tuple(nothing() if part in gone else part for part in node) if _any(node, gone) else None
    if isinstance(node, List):
        return List([nothing() if part in gone else part for part in node.items]) if _any(node.items, gone) else None
    if isinstance(node, Set):
        return Set([part for part in node.items if part not in gone]) if _any(node.items, gone) else None
    if isinstance(node, FrozenSet):
        return FrozenSet([part for part in node.items if part not in gone]) if _any(node.items, gone) else None
    if isinstance(node, Dict):
        return Dict(_pairs(graph, node.pairs, gone)) if _any(node.pairs, gone) else None
    if isinstance(node, Call):
        items = [nothing() if part in gone else part for part in node.items]
        pairs = _pairs(graph, node.pairs, gone) if _any(node.pairs, gone) else node.pairs
        if list(node.items) != items or len(node.pairs) != len(pairs):
            return node.filled(items, pairs, node.states)
    return None


def _any(parts: Sequence[Ref], gone: Collection[Ref]) -> bool:
    return any(part in gone for part in parts)


def _pairs(graph: Graph, pairs: Sequence[Ref], gone: Collection[Ref]) -> list[Ref]:
    kept: list[Ref] = []
    # Of a key that is written twice the first value must not come back when the last one goes.
    for key, value in last_pairs(graph, pairs):
        if key not in gone and value not in gone:
            kept += (key, value)
    return kept


def _lost_pairs(graph: Graph, gone: Collection[Ref]) -> dict[Ref, Node]:
    """The lists of ``OrderedDict([[k, v], ...])`` without the pairs that lost their value."""
    changes: dict[Ref, Node] = {}
    for node in graph.nodes:
        listed = pair_list(graph, node) if type(node) is Call else None
        if listed is None or type(node) is not Call:
            continue
        kept = [pair for pair in listed if not _any(elements(graph.nodes[pair]), gone)]
        if len(kept) < len(listed):
            (holder,) = elements(graph.nodes[node.args])
            changes[holder] = tuple(kept) if type(graph.nodes[holder]) is tuple else List(kept)
    return changes


def _lost_members(graph: Graph, gone: Collection[Ref]) -> dict[Ref, Node]:
    """The lists of ``set([...])`` without the members that go: a set holds no places."""
    changes: dict[Ref, Node] = {}
    for node in graph.nodes:
        if type(node) is not Call or callable_name(graph, node.func) != "builtins.set":
            continue
        for holder in elements(graph.nodes[node.args])[:1]:
            members = elements(graph.nodes[holder])
            if _any(members, gone):
                changes[holder] = List([member for member in members if member not in gone])
    return changes
