"""Keys of mappings and members of sets: have they a hash by now, and are they still different?"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Final

from ...checkpoint.graph_editor import GraphEditor
from ...pickles.nodes import ByteArray, Call, Dict, Global, List, Node, Ref, Set
from .case import called, raw_bytes

#: What torch takes and Python does not hash.
_WITHOUT_HASH: Final = frozenset(
    ("collections.OrderedDict", "collections.Counter", "builtins.set", "builtins.bytearray")
)
#: Tuples in tuples that are compared, and elements of all of them: a key has a few.
_DEPTH: Final = 8
_ELEMENTS: Final = 200


class Keys:
    """What is known about keys. Each tuple is looked into once: it may be in a million keys."""

    def __init__(self, rewrite: GraphEditor) -> None:
        self.rewrite = rewrite
        self._hashable: dict[Ref, bool] = {}

    def hashable(self, ref: Ref) -> bool:
        """Can it be a key of a dict, as it is by now? No recursion: tuples may be in tuples without end."""
        known = self._hashable
        path: list[tuple[Ref, Iterator[Ref]]] = [(-1, iter((ref,)))]
        while path:
            for part in path[-1][1]:
                node = self.rewrite.node(part)
                if part in known:
                    good = known[part]
                elif type(node) is tuple:
                    path.append((part, iter(node)))
                    break
                else:
                    good = not self._without_hash(node)
                if not good:
                    known.update((tuple_ref, False) for tuple_ref, _ in path)
                    return False
            else:
                known[path.pop()[0]] = True
        return True

    def _without_hash(self, node: Node) -> bool:
        if isinstance(node, Call):
            return called(self.rewrite, node.func) in _WITHOUT_HASH
        return isinstance(node, List | Dict | Set | ByteArray)

    def twins(self, refs: Sequence[Ref]) -> list[int]:
        """The places of those that are equal to an earlier one, because one of the two was made plain."""
        if not any(self._made(ref) for ref in refs):
            return []
        first: dict[Hashable, Ref] = {}
        found = []
        for place, ref in enumerate(refs):
            other = first.setdefault(self._value(ref), ref)
            if other != ref and (self._made(ref) or self._made(other)):
                found.append(place)
        return found

    def _made(self, ref: Ref) -> bool:
        """Was it made plain, or an element of it?"""
        node = self.rewrite.node(ref)
        return ref in self.rewrite.changed or (
            type(node) is tuple and any(part in self.rewrite.changed for part in node[:_ELEMENTS])
        )

    def _value(self, ref: Ref) -> Hashable:
        """What Python compares: values by value, everything else by identity."""
        budget = [_ELEMENTS]
        return self._part(ref, _DEPTH, budget)

    def _part(self, ref: Ref, depth: int, budget: list[int]) -> Hashable:
        budget[0] -= 1
        node = self.rewrite.node(ref)
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if type(node) is tuple and depth and len(node) <= budget[0]:
            return tuple(self._part(part, depth - 1, budget) for part in node)
        if isinstance(node, Global):
            return (Global, node.module, node.name)
        data = raw_bytes(self.rewrite, ref) if isinstance(node, bytes | Call) else None
        return data if data is not None else (Ref, ref)
