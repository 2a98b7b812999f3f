"""Find shared objects, and objects that depend on themselves, such as a tuple with a list that holds the tuple.

CPython's pickler meets such a tuple again while writing it. It writes the tuple a second time inside, and then removes
the outer elements with POP. ``encode`` does the same for a pickle that was written this way.

It does not do so for a pickle without POP, because torch's restricted unpickler does not know that opcode. Nor does it
for a tuple with 100,000 such lists, because it would write 100,000 copies. In these cases it writes the ``cycles`` of
the graph first: the tuples with empty lists, then the contents of the lists.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..base.records import NamedTuple
from .nodes import CONSTANTS, Graph, Ref, children, dependencies


def shared_refs(graph: Graph) -> frozenset[Ref]:
    """Return the nodes with identity that have several parents; without a memo index, a pickle would duplicate them."""
    nodes = graph.nodes
    seen, shared = bytearray(len(nodes)), set()
    seen[graph.root] = 1
    for ref in graph.reachable():
        for child in children(nodes[ref]):
            if not seen[child]:
                seen[child] = 1
            elif not isinstance(nodes[child], CONSTANTS) and nodes[child] != ():
                shared.add(child)
    return frozenset(shared)


class Cycle(NamedTuple):
    """Nodes that all lead to each other; ``dependent`` are the members that depend on another member."""

    members: frozenset[Ref]
    dependent: tuple[Ref, ...]


def cycles(graph: Graph) -> list[Cycle]:
    """Return the cycles of a graph that contain a dependency, each after the cycles that it leads to.

    They are the strongly connected components (Tarjan, without recursion) in which a member depends on another one.
    """
    nodes = graph.nodes
    result = []
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
            if lowest[ref] < order[ref]:
                continue
            component: set[Ref] = set()
            while ref not in component:
                member = waiting.pop()
                settled[member] = 1
                component.add(member)
            dependent = [member for member in component if not component.isdisjoint(dependencies(nodes[member]))]
            if dependent:
                result.append(Cycle(frozenset(component), tuple(sorted(dependent))))
    return result
