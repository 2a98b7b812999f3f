"""The batches in which a pickle fills its containers and objects.

A batch is one opcode that fills an object, and the number of elements that it takes. By default, the batches are the
ones that the C pickler writes (``batch_list_exact``, ``batch_list``, ``batch_dict_exact``, ``batch_dict``, ``save_set``
in Modules/_pickle.c). The decoder records the batches of a pickle that differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from . import opcodes as op
from .nodes import Dict, Filling, Instance, List, Node, Ref, Set

Batch: TypeAlias = tuple[int, int]

#: The most elements in one APPENDS, SETITEMS or ADDITEMS (``BATCHSIZE`` in _pickle.c).
BATCH_SIZE: Final = 1000

#: The attribute of a Filling to which each opcode adds.
_ATTRIBUTES: Final = dict.fromkeys((op.APPEND, op.APPENDS, op.ADDITEMS), "items")
_ATTRIBUTES.update({op.SETITEM: "pairs", op.SETITEMS: "pairs", op.BUILD: "states"})


def _filling(node: Node) -> Filling:
    """Return the contents of an object or container."""
    if isinstance(node, Dict):
        return Filling(pairs=node.pairs)
    if isinstance(node, List | Set):
        return Filling(items=node.items)
    assert isinstance(node, Instance)
    return node.filling or Filling()


def default_batches(node: Node, protocol: int) -> list[Batch]:
    """Return the batches in which CPython's pickler fills a node."""
    filling = _filling(node)
    items, pairs = len(filling.items), len(filling.pairs) >> 1
    if isinstance(node, Set):
        # A full last batch is followed by an empty one.
        full, rest = divmod(items, BATCH_SIZE)
        return [(op.ADDITEMS, BATCH_SIZE)] * full + [(op.ADDITEMS, rest)] if items else []
    exact = not isinstance(node, Instance)
    batches = _split(items, protocol, op.APPEND, op.APPENDS, exact)
    batches += _split(pairs, protocol, op.SETITEM, op.SETITEMS, exact)
    return batches + [(op.BUILD, 1)] * len(filling.states)


def _split(count: int, protocol: int, single: int, many: int, exact: bool) -> list[Batch]:
    """Split ``count`` elements into batches as Python's pickler does.

    ``single`` is the opcode for one element, ``many`` for several. ``exact`` is True for a plain list or dict. Other
    containers (a deque, an OrderedDict) are written from an iterator: their last element gets ``single`` if it is alone
    in its batch.
    """
    if protocol == 0 or count <= 1:
        return [(single, 1)] * count
    full, rest = divmod(count, BATCH_SIZE)
    batches = [(many, BATCH_SIZE)] * full
    if rest == 1 and not exact:
        batches.append((single, 1))
    elif rest or (exact and many == op.SETITEMS):
        # The C loop over an exact dict notices the end only in the next, empty batch.
        batches.append((many, rest))
    return batches


def batched(node: Node, recorded: Sequence[Batch] | None, protocol: int) -> Iterator[tuple[int, Sequence[Ref]]]:
    """Yield each opcode that fills a node, with the references that it takes.

    Use the batches that the decoder recorded if they still fit, otherwise the default ones.
    """
    if recorded is None and protocol:
        # Nearly every container is filled in one batch.
        if isinstance(node, Dict) and len(node.pairs) < 2 * BATCH_SIZE:
            if node.pairs:
                yield op.SETITEM if len(node.pairs) == 2 else op.SETITEMS, node.pairs
            return
        if isinstance(node, List) and len(node.items) <= BATCH_SIZE:
            if node.items:
                yield op.APPEND if len(node.items) == 1 else op.APPENDS, node.items
            return
    filling, batches = _filling(node), default_batches(node, protocol)
    if recorded is not None and _totals(recorded) == _totals(batches):
        batches = list(recorded)
    ends: Counter[str] = Counter()
    for code, count in batches:
        attribute = _ATTRIBUTES[code]
        begin = ends[attribute]
        ends[attribute] += 2 * count if attribute == "pairs" else count
        yield code, getattr(filling, attribute)[begin : ends[attribute]]


def _totals(batches: Sequence[Batch]) -> Counter[str]:
    """Count the elements in each part of a filling."""
    totals: Counter[str] = Counter()
    for code, count in batches:
        totals[_ATTRIBUTES[code]] += count
    return totals
