"""Two object graphs, gone through in step: what stands at the same place in both, and what in one only.

Neither cycles, nor shared objects, nor depth make it long: two containers that were found to stand for each other,
also by way of others, are not entered again (the algorithm of Hopcroft and Karp for the equivalence of automata).
So each of n + m containers is entered at most once, and a difference that is there is found.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ...base.errors import MalformedError
from ...base.limits import LIMITS
from ...base.map_location import is_device
from ...base.prefixes import unwrapping
from ...checkpoint.objects import mapping, plain_parts
from ...checkpoint.paths import entries, spell_key
from ...checkpoint.tensors import Tensor
from ...edits.keys import renamed_modules
from ...pickles.nodes import Node, Ref
from .belongings import belongings
from .places import Leaf, Side, joined


class Only(NamedTuple):
    """What stands in one of them only: the topmost place of it, and how many ``tensors`` are there or below."""

    path: str
    ref: Ref
    tensors: int


class Facet(NamedTuple):
    """Something at ``path`` that differs: ``a`` in one, ``b`` in the other, as values or types."""

    path: str
    a: Leaf
    b: Leaf


class Part(NamedTuple):
    """Tensors within two tensors, at ``path`` within them: values of a sparse one, scales of a quantized one."""

    path: str
    a: Tensor
    b: Tensor


class Both(NamedTuple):
    """Two tensors that stand at the same place or places; ``facets`` are what differs in what belongs to them."""

    refs: tuple[Ref, Ref]
    a: Tensor
    b: Tensor
    places: list[str]
    parts: list[Part]
    facets: list[Facet]


class Order(NamedTuple):
    """A mapping whose keys have another order: the first place where they part, and the two keys there."""

    path: str
    place: int
    a: str
    b: str


class Walked(NamedTuple):
    """What came of it. ``pairs`` are (path, number in ``tensors``), a tied tensor at each of its places.

    ``passed_over`` counts the tensors of each that stand against something else, or below it.
    """

    tensors: list[Both]
    pairs: list[tuple[str, int]]
    only_a: list[Only]
    only_b: list[Only]
    entries: list[Facet]
    order: list[Order]
    passed_over: list[int]


#: A place to go to: the two references, the path, and the number of the tensors that they belong to, or -1. Within
#: tensors paths begin anew.
_Task = tuple[Ref, Ref, str, int]

_DICTS = frozenset(("dict", "OrderedDict"))
_SEQUENCES = frozenset(("list", "tuple"))
#: Kinds of values that are the same when they are equal: 0.0 and -0.0 are not.
_EXACT = frozenset((int, bool, str, bytes, type(None)))


def walked(a: Side, b: Side, ignore: frozenset[str] = frozenset()) -> Walked:
    """Go through both. Of ``ignore`` the words prefix, device and container count here."""
    walk = _Walk(a, b, ignore)
    walk.run()
    return walk.found


class _Walk:
    def __init__(self, a: Side, b: Side, ignore: frozenset[str]) -> None:
        self.a, self.b, self.ignore = a, b, ignore
        self.found = Walked([], [], [], [], [], [], [0, 0])
        self.numbers: dict[tuple[Ref, Ref], int] = {}
        self.inner: set[tuple[int, Ref, Ref]] = set()
        #: Union-find over the containers of a (their references) and of b (complements of them).
        self.parents: dict[int, int] = {}
        self.entered: tuple[dict[Ref, dict[str, Ref]], dict[Ref, dict[str, Ref]]] = ({}, {})
        self.counts: tuple[dict[Ref, int], dict[Ref, int]] = ({}, {})
        self.counted: tuple[set[Ref], set[Ref]] = (set(), set())
        self.patience = [4 * len(side.graph.nodes) for side in (a, b)]
        self.renames = tuple(_renames(side) if "prefix" in ignore else {} for side in (a, b))
        self.work: list[Iterator[_Task]] = [iter([(a.root, b.root, "", -1)])]
        #: Pairs of tensors that may be met again.
        self.left = LIMITS.places + 4 * min(len(a.graph.nodes), len(b.graph.nodes))

    def run(self) -> None:
        while self.work:
            task = next(self.work[-1], None)
            if task is None:
                self.work.pop()
                continue
            left, right, path, owner = task
            ours, theirs = self.a.tensor(left), self.b.tensor(right)
            if ours is not None and theirs is not None:
                self.tensors(left, right, ours, theirs, path, owner)
                continue
            one, other = self.a.leaf(left), self.b.leaf(right)
            if ours is not None or theirs is not None or (one is None) != (other is None):
                self.pass_over(left, right, owner)
                self.facet(path, owner, self.whole(0, left), self.whole(1, right))
            elif one is not None and other is not None:
                if not same(one, other) and not ("device" in self.ignore and _devices(one, other)):
                    self.facet(path, owner, one, other)
            elif self.union(left, ~right):
                self.containers(left, right, path, owner)

    def whole(self, number: int, ref: Ref) -> Leaf:
        """A container, or a tensor that stands against something else, in words."""
        side = (self.a, self.b)[number]
        leaf = side.leaf(ref)
        if leaf is not None:
            return leaf
        tensor = side.tensor(ref)
        return Leaf(side.type(ref), f"{tensor.dtype} {list(tensor.shape)}" if tensor is not None else None)

    def pass_over(self, left: Ref, right: Ref, owner: int) -> None:
        """Count the tensors of what stands against something that cannot be compared with it."""
        if owner < 0:
            for number, ref in enumerate((left, right)):
                self.found.passed_over[number] += self.count(number, ref)

    def facet(self, path: str, owner: int, a: Leaf, b: Leaf) -> None:
        (self.found.tensors[owner].facets if owner >= 0 else self.found.entries).append(Facet(path, a, b))

    def union(self, left: int, right: int) -> bool:
        """Join the classes of two containers; False where they are one already."""
        parents = self.parents
        roots = []
        for item in (left, right):
            while (above := parents.get(item, item)) != item:
                parents[item] = parents.get(above, above)
                item = above
            roots.append(item)
        parents[roots[0]] = roots[1]
        return roots[0] != roots[1]

    # -- tensors --------------------------------------------------------------------------------

    def tensors(self, left: Ref, right: Ref, ours: Tensor, theirs: Tensor, path: str, owner: int) -> None:
        if owner >= 0:
            if (owner, left, right) in self.inner:
                return
            self.inner.add((owner, left, right))
            outer = self.found.tensors[owner]
            # A Parameter is a call with the tensor that it is.
            if ours.storage != outer.a.storage or theirs.storage != outer.b.storage or not ours.storage:
                outer.parts.append(Part(path, ours, theirs))
            self.within(left, right, path, owner)
            return
        number = self.numbers.get((left, right))
        if number is None:
            number = self.numbers[left, right] = len(self.found.tensors)
            self.found.tensors.append(Both((left, right), ours, theirs, [], [], []))
            self.within(left, right, "", number)
        self.left -= 1
        if self.left < 0:
            what = "its tensors stand at too many places to be compared"
            raise MalformedError(what, path=self.a.checkpoint.path)
        self.found.tensors[number].places.append(path)
        self.found.pairs.append((path, number))

    def within(self, left: Ref, right: Ref, path: str, owner: int) -> None:
        """Go to what tensors hold beside shape and storage: hooks, conjugation, scales, members, attributes."""
        ours, theirs = belongings(self.a, left), belongings(self.b, right)
        if ours or theirs:
            self.below(ours, theirs, path, owner)

    # -- containers -----------------------------------------------------------------------------

    def containers(self, left: Ref, right: Ref, path: str, owner: int) -> None:
        if _equal(plain_parts(self.a.graph, left), plain_parts(self.b.graph, right)):
            return
        one, other = self.a.type(left), self.b.type(right)
        loose = "container" in self.ignore and {one, other} <= _DICTS
        if one != other and not loose:
            self.facet(path, owner, self.whole(0, left), self.whole(1, right))
        again = (left in self.entered[0], right in self.entered[1])
        alike = one == other or {one, other} <= _DICTS or {one, other} <= _SEQUENCES
        if not alike and (any(again) or not (self.a.is_mapping(left) and self.b.is_mapping(right))):
            self.pass_over(left, right, owner)
            return
        elements = self.a.elements(left), self.b.elements(right)
        if elements[0] is not None and elements[1] is not None:
            self.sequences(elements[0], elements[1], path, owner, again)
            self.entered[0].setdefault(left, {})
            self.entered[1].setdefault(right, {})
            return
        ours, theirs = self.children(0, left), self.children(1, right)
        # A plain dict cannot have what nn.Module.state_dict puts beside the keys.
        self.below(ours, theirs, path, owner, again, without="._metadata" if one != other and loose else "")
        if not any(again) and list(ours) != list(theirs) and self.a.is_mapping(left) and self.b.is_mapping(right):
            self.order(ours, theirs, path, owner)

    def sequences(
        self, ours: Sequence[Ref], theirs: Sequence[Ref], path: str, owner: int, again: tuple[bool, bool]
    ) -> None:
        """Compare element by element; of millions of equal numbers nothing is kept."""
        self.work.append(self.pairs(ours, theirs, path, owner))
        common = min(len(ours), len(theirs))
        for number, mine in enumerate((ours, theirs)):
            if len(mine) > common and not again[number] and len(mine) - common <= self.left:
                for place in range(common, len(mine)):
                    self.only(number, joined(path, f"[{place}]"), mine[place], owner)
            elif len(mine) > common:
                self.more(number, len(mine) - common, path, owner)

    def pairs(self, ours: Sequence[Ref], theirs: Sequence[Ref], path: str, owner: int) -> Iterator[_Task]:
        nodes, others = self.a.graph.nodes, self.b.graph.nodes
        for place, (left, right) in enumerate(zip(ours, theirs)):
            node, other = nodes[left], others[right]
            if type(node) is type(other) and type(node) in _EXACT and node == other:
                continue
            yield left, right, joined(path, f"[{place}]"), owner

    def more(self, number: int, count: int, path: str, owner: int) -> None:
        """Note that one of two containers holds more, without naming each."""
        there, nothing = Leaf("container", f"{count:,} more values"), Leaf("nothing", None)
        self.facet(path, owner, *((nothing, there) if number else (there, nothing)))

    def children(self, number: int, ref: Ref) -> dict[str, Ref]:
        known = self.entered[number].get(ref)
        if known is not None:
            return known
        found = (self.a, self.b)[number].children(ref)
        rename = self.renames[number].get(ref)
        if rename is not None:
            found = rename(found)
        self.entered[number][ref] = found
        return found

    def below(
        self,
        ours: Mapping[str, Ref],
        theirs: Mapping[str, Ref],
        path: str,
        owner: int,
        again: tuple[bool, bool] = (False, False),
        without: str = "",
    ) -> None:
        """Go on to what both hold, and note what only one does.

        What a container lacks or has too much is listed where it is first met, and counted after that: so this takes
        as long as what is met for the first time is large, or as the smaller of the two.
        """
        fewer = ours if len(ours) <= len(theirs) else theirs
        common = [step for step in fewer if step in ours and step in theirs and step != without]
        if fewer is theirs and not again[0]:
            common = [step for step in ours if step in theirs and step != without]
        self.work.append(iter([(ours[step], theirs[step], joined(path, step), owner) for step in common]))
        for number, mine, other in ((0, ours, theirs), (1, theirs, ours)):
            if len(mine) == len(common):
                continue
            if not again[number]:
                for step, ref in mine.items():
                    if step not in other and step != without:
                        self.only(number, joined(path, step), ref, owner)
            elif len(mine) - (without in mine) > len(common):
                self.more(number, len(mine) - len(common), path, owner)

    def only(self, number: int, path: str, ref: Ref, owner: int) -> None:
        if owner >= 0:
            there, nothing = self.whole(number, ref), Leaf("nothing", None)
            self.facet(path, owner, *((nothing, there) if number else (there, nothing)))
            return
        (self.found.only_b if number else self.found.only_a).append(Only(path, ref, self.count(number, ref)))

    def count(self, number: int, ref: Ref) -> int:
        counts = self.counts[number]
        if ref not in counts:
            counts[ref] = self.tensors_below(number, (self.a, self.b)[number], ref)
        return counts[ref]

    def tensors_below(self, number: int, side: Side, root: Ref) -> int:
        """The tensors at or below a place, each container entered once.

        Containers that many of these places share are counted at the first of them, once that takes too long.
        """
        total = 0
        seen: set[Ref] = set()
        work = [root]
        while work:
            ref = work.pop()
            if side.tensor(ref) is not None:
                total += 1
            elif ref in self.counts[number]:
                total += self.counts[number][ref]
            elif ref not in seen and side.leaf(ref) is None:
                if self.patience[number] < 0 and ref in self.counted[number]:
                    continue
                seen.add(ref)
                self.counted[number].add(ref)
                below = side.children(ref)
                self.patience[number] -= len(below) + 1
                work += below.values()
        return total

    def order(self, ours: Mapping[str, Ref], theirs: Mapping[str, Ref], path: str, owner: int) -> None:
        one, other = [s for s in ours if s in theirs], [s for s in theirs if s in ours]
        if one != other and owner < 0:
            place = next(number for number, (a, b) in enumerate(zip(one, other)) if a != b)
            self.found.order.append(Order(path, place, joined("", one[place]), joined("", other[place])))


def _equal(ours: list[Node] | None, theirs: list[Node] | None) -> bool:
    """Are these the parts of two dicts that are the same in every way?"""
    if ours is None or ours != theirs:
        return False
    kinds = [*map(type, ours)]
    return float not in kinds and kinds == [*map(type, theirs)]


def same(a: Leaf, b: Leaf) -> bool:
    """Are two values the same, down to their type and the bits of a float?"""
    if a.type != b.type:
        return False
    parts = [_numbers(leaf.value) for leaf in (a, b)]
    if parts[0] and parts[1]:
        return struct.pack(">2d", *parts[0]) == struct.pack(">2d", *parts[1])
    return a.value == b.value


def _numbers(value: object) -> tuple[float, float] | None:
    """The floats in a value, real and imaginary."""
    if isinstance(value, float | complex):
        return value.real, value.imag
    return None


def _devices(a: Leaf, b: Leaf) -> bool:
    """Are both devices, as torch.device objects or as texts?"""
    texts = [str(leaf.value) if leaf.type in ("str", "torch.device") else "" for leaf in (a, b)]
    return a.type == b.type and all(map(is_device, texts))


# -- names without prefixes ----------------------------------------------------------------------------


def _renames(side: Side) -> dict[Ref, Callable[[dict[str, Ref]], dict[str, Ref]]]:
    """How the names of each state dict, and of its ``_metadata``, are compared: without what wrappers put in."""
    found: dict[Ref, Callable[[dict[str, Ref]], dict[str, Ref]]] = {}
    nodes = side.graph.nodes
    for state_dict in side.checkpoint.state_dicts:
        names = [str(nodes[key]) for key, _ in state_dict.items]
        unwrapped = unwrapping(names)
        shorter = [unwrapped(name) for name in names]
        if shorter != names:
            # Of two keys that would become one the names stay.
            values = {name: ref for name, (_, ref) in zip(names, state_dict.items)}
            taken = [short for short in shorter if short not in values]
            clear = len(set(taken)) == len(taken)
            fresh = {
                short if clear and short not in values else name: values[name] for name, short in zip(names, shorter)
            }
            found[state_dict.ref] = _replacing(side, fresh, state_dict.ref)
        if state_dict.metadata >= 0 and shorter != names:
            items = mapping(side.graph, state_dict.metadata) or []
            paths = [nodes[key] for key, _ in items]
            if all(type(path) is str for path in paths):
                moved = renamed_modules([str(path) for path in paths], unwrapped)
                fresh = {path: items[source][1] for path, _, source in moved}
                found[state_dict.metadata] = _replacing(side, fresh, state_dict.metadata)
    return found


def _replacing(side: Side, fresh: Mapping[str, Ref], ref: Ref) -> Callable[[dict[str, Ref]], dict[str, Ref]]:
    """Puts the renamed entries in the place of the old ones; attributes stay."""
    old = {side.step(one) for one in entries(side.graph, ref)}

    def replaced(children: dict[str, Ref]) -> dict[str, Ref]:
        made = {spell_key(".", name)[1:]: value for name, value in fresh.items()}
        made.update({step: value for step, value in children.items() if step not in old})
        return made

    return replaced
