"""The nodes that an edit changes and adds, until they become another graph."""

from __future__ import annotations

from ..objects import elements, given_pairs, listed_pairs
from ..pickles.nodes import Call, Dict, Global, Graph, List, Node, Ref

__all__ = ["Rewrite"]


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
        listed = listed_pairs(self.graph, node)
        if listed is None and given_pairs(self.graph, node):
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
