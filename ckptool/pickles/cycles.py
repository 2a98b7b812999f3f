"""What a graph shares, and the objects that are ingredients of themselves: a tuple with a list that holds the tuple.

CPython's pickler meets such a tuple again while it makes it, makes it a second time inside, and then throws
the outer parts away with POP. That is what ``encode`` does for a pickle that was written so. It cannot for one
that has no POP, because ``weights_only`` knows no such instruction, and not for a tuple with 100,000 such
lists, of which it would make 100,000 copies. There the ``knots`` of the graph are tied first: the tuples
are made with empty lists, and then the lists are filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .nodes import CONSTANTS, Graph, Ref, children, ingredients


def shared(graph: Graph) -> frozenset[Ref]:
    """What more than one place holds and has an identity: without a memo number it would become two objects."""
    nodes = graph.nodes
    seen, twice = bytearray(len(nodes)), set()
    seen[graph.root] = 1
    for ref in graph.reachable():
        for child in children(nodes[ref]):
            if not seen[child]:
                seen[child] = 1
            elif not isinstance(nodes[child], CONSTANTS) and nodes[child] != ():
                twice.add(child)
    return frozenset(twice)


class Knot(NamedTuple):
    """``members`` all lead to each other; ``made`` are those with an ingredient among them."""

    members: frozenset[Ref]
    made: tuple[Ref, ...]


def knots(graph: Graph) -> list[Knot]:
    """The knots of a graph, each after those that it leads to.

    They are the strongly connected components (Tarjan, without recursion) in which some member is an
    ingredient of itself, if only by way of what its ingredients are filled with.
    """
    nodes = graph.nodes
    found = []
    order: dict[Ref, int] = {}
    lowest: dict[Ref, int] = {}
    waiting: list[Ref] = []
    settled = bytearray(len(nodes))
    path: list[tuple[Ref, Iterator[Ref]]] = []

    def enter(ref: Ref) -> None:
        order[ref] = lowest[ref] = len(order)
        waiting.append(ref)
        path.append((ref, iter(children(nodes[ref]))))

    enter(graph.root)
    while path:
        ref, rest = path[-1]
        for child in rest:
            if child not in order:
                enter(child)
                break
            if not settled[child]:
                lowest[ref] = min(lowest[ref], order[child])
        else:
            path.pop()
            if path:
                parent = path[-1][0]
                lowest[parent] = min(lowest[parent], lowest[ref])
            if lowest[ref] == order[ref]:
                members = frozenset(_above(waiting, ref))
                for member in members:
                    settled[member] = 1
                made = tuple(sorted(r for r in members if not members.isdisjoint(ingredients(nodes[r]))))
                if made:
                    found.append(Knot(members, made))
    return found


def _above(waiting: list[Ref], ref: Ref) -> Iterator[Ref]:
    """Take everything from ``ref`` on off the list."""
    while True:
        last = waiting.pop()
        yield last
        if last == ref:
            return
