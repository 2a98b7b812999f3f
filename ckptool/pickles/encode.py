"""From a graph to bytes.

A pickle that ``torch.save`` wrote comes out byte for byte, and one by another writer as near as it goes,
always equal as a graph. When things were filled that a call took is no part of the graph: what a call takes
is filled before it, as every pickler does it.
"""

from __future__ import annotations

from collections.abc import Sequence

from .nodes import Graph, Ref
from .sharing import Knot, knots, shared
from .writer import SharedError, TangledError, Writer

__all__ = ["encode"]


def encode(graph: Graph) -> bytes:
    """The pickle of a graph, PROTO and STOP included, in the style that the graph carries.

    Raises ValueError for a graph that no pickle can express, such as a tuple that holds itself, or a name
    that no opcode can spell; ``decode`` gives no such graph.
    """
    return _attempt(graph, None, None)


def _attempt(graph: Graph, keep: frozenset[Ref] | None, tangled: Sequence[Knot] | None) -> bytes:
    # A second and third attempt are seldom. The first goes without the walk over the graph that would tell
    # beforehand whether they are needed.
    try:
        return Writer(graph, keep, tangled).run()
    except SharedError:
        pass
    except TangledError:
        tangled = knots(graph)
    return _attempt(graph, shared(graph).union(*(knot.members for knot in tangled or ())), tangled)
