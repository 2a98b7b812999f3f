"""How containers and objects are filled: the steps that CPython's pickler takes, and those that it did not take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import opcodes as op
from .nodes import Dict, Filling, Instance, List, Node, Ref, Set

#: What each filling instruction takes of a Filling.
_TAKES = {
    op.APPEND: "items",
    op.APPENDS: "items",
    op.ADDITEMS: "items",
    op.SETITEM: "pairs",
    op.SETITEMS: "pairs",
    op.BUILD: "states",
}


def usual_steps(node: Node, protocol: int) -> list[tuple[int, int]]:
    """How CPython's pickler fills a node: (opcode, number of elements) in order."""
    if isinstance(node, Dict):
        return op.pair_steps(len(node.pairs) >> 1, protocol, exact=True)
    if isinstance(node, List):
        return op.item_steps(len(node.items), protocol, exact=True)
    if isinstance(node, Set):
        return op.member_steps(len(node.items))
    assert isinstance(node, Instance)
    steps = op.item_steps(len(node.items), protocol, exact=False)
    steps += op.pair_steps(len(node.pairs) >> 1, protocol, exact=False)
    return steps + [(op.BUILD, 1)] * len(node.states)


def steps_so_far(filling: Filling, members: bool = False) -> list[tuple[int, int]]:
    """The steps that filled an object until now, if each was a usual one; ``members`` came by ADDITEMS."""
    items, pairs = len(filling.items), len(filling.pairs) >> 1
    steps = []
    if items:
        steps.append((op.ADDITEMS if members else op.APPEND if items == 1 else op.APPENDS, items))
    if pairs:
        steps.append((op.SETITEM if pairs == 1 else op.SETITEMS, pairs))
    return steps + [(op.BUILD, 1)] * len(filling.states)


def chunks(node: Node, noted: Sequence[tuple[int, int]] | None, protocol: int) -> Iterator[tuple[int, Sequence[Ref]]]:
    """How to fill a node: each opcode with the references that it takes.

    The steps that were noted when it was read count if they still fit, else the usual ones.
    """
    if noted is None and protocol:
        # Nearly every container is filled in one step.
        if isinstance(node, Dict) and len(node.pairs) < 2 * op.BATCH:
            if node.pairs:
                yield op.SETITEM if len(node.pairs) == 2 else op.SETITEMS, node.pairs
            return
        if isinstance(node, List) and len(node.items) <= op.BATCH:
            if node.items:
                yield op.APPEND if len(node.items) == 1 else op.APPENDS, node.items
            return
    if isinstance(node, Dict):
        filling = Filling(pairs=node.pairs)
    elif isinstance(node, List | Set):
        filling = Filling(items=node.items)
    else:
        assert isinstance(node, Instance) and node.filling is not None
        filling = node.filling
    steps = usual_steps(node, protocol)
    if noted is not None and _totals(noted) == _totals(steps):
        steps = list(noted)
    taken = {"items": 0, "pairs": 0, "states": 0}
    for code, number in steps:
        kind = _TAKES[code]
        begin = taken[kind]
        end = taken[kind] = begin + (2 * number if kind == "pairs" else number)
        yield code, getattr(filling, kind)[begin:end]


def _totals(steps: Sequence[tuple[int, int]]) -> dict[str, int]:
    totals = {"items": 0, "pairs": 0, "states": 0}
    for code, number in steps:
        totals[_TAKES[code]] += number
    return totals
