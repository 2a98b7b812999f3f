"""Compare two object graphs in step: pair values at the same place, and list values that only one graph has.

Cycles, shared objects and depth do not slow it down. Two containers that were already found to correspond, even
indirectly, are not entered again (the algorithm of Hopcroft and Karp for the equivalence of automata). So each of the n
+ m containers is entered at most once, and no difference is missed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final, TypeAlias

from ...base.errors import MalformedError
from ...base.globs import MATCH_ALL, Globs
from ...base.limits import LIMITS
from ...base.map_location import is_device
from ...base.prefixes import unwrapper
from ...base.records import NamedTuple, TypedDict
from ...checkpoint.objects import mapping, plain_parts
from ...checkpoint.paths import spell_key
from ...checkpoint.tensors import Tensor
from ...edits.keys import renamed_modules
from ...pickles.nodes import Node, Ref
from ...values.objects import ScalarValue
from .places import ChosenParts, Side, join_path, tensor_attributes


class Unpaired(NamedTuple):
    """The topmost place of something that only one graph has; ``tensors`` counts the tensors at or below it."""

    path: str
    ref: Ref
    tensors: int


class Mismatch(NamedTuple):
    """Values or types that differ at ``path``."""

    path: str
    a: ScalarValue
    b: ScalarValue


class InnerPair(NamedTuple):
    """Tensors inside two tensors, with the ``path`` inside them: values of a sparse one, scales of a quantized one."""

    path: str
    a: Tensor
    b: Tensor


class TensorPair(NamedTuple):
    """Two tensors at the same place or places; ``mismatches`` are the differences in their attributes."""

    refs: tuple[Ref, Ref]
    a: Tensor
    b: Tensor
    inner: list[InnerPair]
    mismatches: list[Mismatch]


class OrderDifference(TypedDict):
    """A mapping whose keys are in another order: the first position that differs, and the two keys there."""

    path: str
    place: int
    a: str
    b: str


class GraphComparison(NamedTuple):
    """The result. ``places`` has (path, index in ``tensors``); a tied tensor occurs at each of its places.

    ``unpaired`` and ``passed_over`` are by side. The latter counts tensors at or below an object whose type differs.
    """

    tensors: list[TensorPair]
    places: list[tuple[str, int]]
    unpaired: tuple[list[Unpaired], list[Unpaired]]
    mismatches: list[Mismatch]
    order: list[OrderDifference]
    passed_over: list[int]


#: A place to compare: two references, the path, and the index of the surrounding tensor pair, or -1. Inside tensors,
#: paths are relative.
_Task: TypeAlias = tuple[Ref, Ref, str, int]
_Renaming: TypeAlias = Callable[[dict[str, Ref]], dict[str, Ref]]

_DICTS: Final = frozenset(("dict", "OrderedDict"))
_SEQUENCES: Final = frozenset(("list", "tuple"))
#: Types whose equal values are identical. Float is not one of them: 0.0 equals -0.0.
_EXACT: Final = frozenset((int, bool, str, bytes, type(None)))
_NOTHING: Final = ScalarValue("nothing", None)


def compare_graphs(a: Side, b: Side, ignore: frozenset[str] = frozenset(), only: Globs = MATCH_ALL) -> GraphComparison:
    """Compare the parts of two graphs that ``only`` chooses; ``ignore`` may have prefix, device and container."""
    walk = _GraphWalk(a, b, ignore, only)
    walk.run()
    return walk.result


class _GraphWalk:
    def __init__(self, a: Side, b: Side, ignore: frozenset[str], only: Globs) -> None:
        self.a, self.b, self.ignore = a, b, ignore
        self.sides = (a, b)
        self.result = GraphComparison([], [], ([], []), [], [], [0, 0])
        self.numbers: dict[tuple[Ref, Ref], int] = {}
        self.inner: set[tuple[int, Ref, Ref]] = set()
        #: Union-find over the containers of a (their references) and of b (the complements of theirs).
        self.parents: dict[int, int] = {}
        self.entered: tuple[dict[Ref, dict[str, Ref]], dict[Ref, dict[str, Ref]]] = ({}, {})
        self.counts: tuple[dict[Ref, int], dict[Ref, int]] = ({}, {})
        self.counted: tuple[set[Ref], set[Ref]] = (set(), set())
        self.budget = [4 * len(side.graph.nodes) for side in (a, b)]
        self.renames = tuple(_renames(side) if "prefix" in ignore else {} for side in (a, b))
        members = [partial(self.members, number) for number in (0, 1)]
        self.choice = ChosenParts(self.sides, members, only) if only else None
        #: The paths of containers that are chosen in part.
        self.parts: Mapping[str, bool] = self.choice.containers if self.choice is not None else {}
        self.work: list[Iterator[_Task]] = [iter([(a.root, b.root, "", -1)])]
        #: How many more places of tensors may be compared.
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
                self.pass_over(left, right, path, owner)
                self.mismatch(path, owner, self.describe(0, left), self.describe(1, right))
            elif one is not None and other is not None:
                if not same(one, other) and not ("device" in self.ignore and _devices(one, other)):
                    self.mismatch(path, owner, one, other)
            elif (owner < 0 and path in self.parts) or self.union(left, ~right):
                self.containers(left, right, path, owner)

    def describe(self, number: int, ref: Ref) -> ScalarValue:
        side = self.sides[number]
        leaf = side.leaf(ref)
        if leaf is not None:
            return leaf
        tensor = side.tensor(ref)
        return ScalarValue(side.type(ref), f"{tensor.dtype} {list(tensor.shape)}" if tensor is not None else None)

    def pass_over(self, left: Ref, right: Ref, path: str, owner: int) -> None:
        if owner < 0:
            for number, ref in enumerate((left, right)):
                self.result.passed_over[number] += self.chosen_count(number, path, ref)

    def mismatch(self, path: str, owner: int, a: ScalarValue, b: ScalarValue) -> None:
        mismatches = self.result.tensors[owner].mismatches if owner >= 0 else self.result.mismatches
        mismatches.append(Mismatch(path, a, b))

    def one_sided(self, number: int, path: str, owner: int, value: ScalarValue) -> None:
        self.mismatch(path, owner, *((_NOTHING, value) if number else (value, _NOTHING)))

    def union(self, left: int, right: int) -> bool:
        """Join the classes of two containers; return False if they already were in one class."""
        parents = self.parents
        roots = []
        for item in (left, right):
            while (above := parents.get(item, item)) != item:
                parents[item] = parents.get(above, above)
                item = above
            roots.append(item)
        parents[roots[0]] = roots[1]
        return roots[0] != roots[1]

    def tensors(self, left: Ref, right: Ref, ours: Tensor, theirs: Tensor, path: str, owner: int) -> None:
        if owner >= 0:
            if (owner, left, right) in self.inner:
                return
            self.inner.add((owner, left, right))
            outer = self.result.tensors[owner]
            # A Parameter is a call that contains the tensor it wraps.
            if ours.storage != outer.a.storage or theirs.storage != outer.b.storage or not ours.storage:
                outer.inner.append(InnerPair(path, ours, theirs))
            self.attributes(left, right, path, owner)
            return
        number = self.numbers.get((left, right))
        if number is None:
            number = self.numbers[left, right] = len(self.result.tensors)
            self.result.tensors.append(TensorPair((left, right), ours, theirs, [], []))
            self.attributes(left, right, "", number)
        self.left -= 1
        if self.left < 0:
            raise MalformedError("its tensors are at too many places to compare", path=self.a.checkpoint.path)
        self.result.places.append((path, number))

    def attributes(self, left: Ref, right: Ref, path: str, owner: int) -> None:
        ours, theirs = tensor_attributes(self.a, left), tensor_attributes(self.b, right)
        if ours or theirs:
            self.below(ours, theirs, path, owner)

    def containers(self, left: Ref, right: Ref, path: str, owner: int) -> None:
        if _equal(plain_parts(self.a.graph, left), plain_parts(self.b.graph, right)):
            return
        one, other = self.a.type(left), self.b.type(right)
        loose = "container" in self.ignore and {one, other} <= _DICTS
        if one != other and not loose:
            self.mismatch(path, owner, self.describe(0, left), self.describe(1, right))
        # A container that is chosen in part has its own part at each place.
        in_part = owner < 0 and path in self.parts
        again = (left in self.entered[0] and not in_part, right in self.entered[1] and not in_part)
        alike = one == other or {one, other} <= _DICTS or {one, other} <= _SEQUENCES
        if not alike and (any(again) or not (self.a.is_mapping(left) and self.b.is_mapping(right))):
            self.pass_over(left, right, path, owner)
            return
        elements = self.a.elements(left), self.b.elements(right)
        if elements[0] is not None and elements[1] is not None and not in_part:
            self.sequences(elements[0], elements[1], path, owner, again)
            self.entered[0].setdefault(left, {})
            self.entered[1].setdefault(right, {})
            return
        ours, theirs = self.children(0, left, path, owner), self.children(1, right, path, owner)
        # A plain dict cannot have the _metadata that nn.Module.state_dict attaches.
        self.below(ours, theirs, path, owner, again, without="._metadata" if one != other and loose else "")
        if not any(again) and list(ours) != list(theirs) and self.a.is_mapping(left) and self.b.is_mapping(right):
            self.order(ours, theirs, path, owner)

    def sequences(
        self, ours: Sequence[Ref], theirs: Sequence[Ref], path: str, owner: int, again: tuple[bool, bool]
    ) -> None:
        """Compare element by element, without storing anything for millions of equal numbers."""
        self.work.append(self.pairs(ours, theirs, path, owner))
        common = min(len(ours), len(theirs))
        for number, items in enumerate((ours, theirs)):
            if len(items) > common and not again[number] and len(items) - common <= self.left:
                for place in range(common, len(items)):
                    self.unpaired(number, join_path(path, f"[{place}]"), items[place], owner)
            elif len(items) > common:
                self.one_sided(number, path, owner, ScalarValue("container", f"{len(items) - common:,} more values"))

    def pairs(self, ours: Sequence[Ref], theirs: Sequence[Ref], path: str, owner: int) -> Iterator[_Task]:
        nodes, others = self.a.graph.nodes, self.b.graph.nodes
        for place, (left, right) in enumerate(zip(ours, theirs)):
            node, other = nodes[left], others[right]
            if type(node) is type(other) and type(node) in _EXACT and node == other:
                continue
            yield left, right, join_path(path, f"[{place}]"), owner

    def children(self, number: int, ref: Ref, path: str, owner: int) -> dict[str, Ref]:
        if self.choice is not None and owner < 0 and path in self.parts:
            return self.choice.of(path, self.members(number, ref))
        if ref not in self.entered[number]:
            self.entered[number][ref] = self.members(number, ref)
        return self.entered[number][ref]

    def members(self, number: int, ref: Ref) -> dict[str, Ref]:
        """Return all children of a container, by the names under which they are compared."""
        children = self.sides[number].children(ref)
        rename = self.renames[number].get(ref)
        return children if rename is None else rename(children)

    def below(
        self,
        ours: Mapping[str, Ref],
        theirs: Mapping[str, Ref],
        path: str,
        owner: int,
        again: tuple[bool, bool] = (False, False),
        without: str = "",
    ) -> None:
        """Compare the members that both have; extra ones are listed where a container occurs first, then counted."""
        fewer = ours if len(ours) <= len(theirs) else theirs
        common = [step for step in fewer if step in ours and step in theirs and step != without]
        if fewer is theirs and not again[0]:
            common = [step for step in ours if step in theirs and step != without]
        self.work.append(iter([(ours[step], theirs[step], join_path(path, step), owner) for step in common]))
        for number, items, others in ((0, ours, theirs), (1, theirs, ours)):
            if len(items) == len(common):
                continue
            if not again[number]:
                for step, ref in items.items():
                    if step not in others and step != without:
                        self.unpaired(number, join_path(path, step), ref, owner)
            elif len(items) - (without in items) > len(common):
                rest = len(items) - len(common)
                self.one_sided(number, path, owner, ScalarValue("container", f"{rest:,} more values"))

    def unpaired(self, number: int, path: str, ref: Ref, owner: int) -> None:
        if owner >= 0:
            self.one_sided(number, path, owner, self.describe(number, ref))
        else:
            self.result.unpaired[number].append(Unpaired(path, ref, self.chosen_count(number, path, ref)))

    def chosen_count(self, number: int, path: str, ref: Ref) -> int:
        total = 0
        work = [(path, ref)]
        while work:
            path, ref = work.pop()
            if self.choice is None or path not in self.parts:
                total += self.count(number, ref)
            else:
                below = self.choice.of(path, self.members(number, ref))
                work += [(join_path(path, step), child) for step, child in below.items()]
        return total

    def count(self, number: int, root: Ref) -> int:
        """Count the tensors at or below a place; beyond the budget, shared containers count only at the first."""
        side, counts = self.sides[number], self.counts[number]
        total = 0
        seen: set[Ref] = set()
        work = [root]
        while work:
            ref = work.pop()
            if side.tensor(ref) is not None:
                total += 1
            elif ref in counts:
                total += counts[ref]
            elif ref not in seen and side.leaf(ref) is None:
                if self.budget[number] < 0 and ref in self.counted[number]:
                    continue
                seen.add(ref)
                self.counted[number].add(ref)
                below = side.children(ref)
                self.budget[number] -= len(below) + 1
                work += below.values()
        return counts.setdefault(root, total)

    def order(self, ours: Mapping[str, Ref], theirs: Mapping[str, Ref], path: str, owner: int) -> None:
        one, other = [s for s in ours if s in theirs], [s for s in theirs if s in ours]
        if one != other and owner < 0:
            place = next(number for number, (left, right) in enumerate(zip(one, other)) if left != right)
            a, b = join_path("", one[place]), join_path("", other[place])
            self.result.order.append({"path": path, "place": place, "a": a, "b": b})


def _equal(ours: list[Node] | None, theirs: list[Node] | None) -> bool:
    """Return whether these are the parts of two identical dicts; None means that a container is not a plain dict."""
    if ours is None or ours != theirs:
        return False
    types = [*map(type, ours)]
    return float not in types and types == [*map(type, theirs)]


def same(a: ScalarValue, b: ScalarValue) -> bool:
    """Return whether two values are identical, including type and the bits of a float."""
    if a.type != b.type:
        return False
    if isinstance(a.value, float | complex) and isinstance(b.value, float | complex):
        bits = [struct.pack(">2d", value.real, value.imag) for value in (a.value, b.value)]
        return bits[0] == bits[1]
    return a.value == b.value


def _devices(a: ScalarValue, b: ScalarValue) -> bool:
    texts = [str(leaf.value) if leaf.type in ("str", "torch.device") else "" for leaf in (a, b)]
    return a.type == b.type and all(map(is_device, texts))


def _renames(side: Side) -> dict[Ref, _Renaming]:
    renames: dict[Ref, _Renaming] = {}
    nodes = side.graph.nodes
    for state_dict in side.checkpoint.state_dicts:
        names = [str(nodes[key]) for key, _ in state_dict.items]
        unwrapped = unwrapper(names)
        shorter = [unwrapped(name) for name in names]
        if shorter == names:
            continue
        # Keys that would become equal keep their names.
        values = {name: ref for name, (_, ref) in zip(names, state_dict.items)}
        taken = [short for short in shorter if short not in values]
        clear = len(set(taken)) == len(taken)
        renamed = {
            short if clear and short not in values else name: values[name] for name, short in zip(names, shorter)
        }
        renames[state_dict.ref] = _replacing(renamed, names)
        if state_dict.metadata >= 0:
            items = mapping(side.graph, state_dict.metadata) or []
            paths = [nodes[key] for key, _ in items]
            if all(type(path) is str for path in paths):
                modules = renamed_modules([str(path) for path in paths], unwrapped)
                renamed = {path: items[source][1] for path, _, source in modules}
                renames[state_dict.metadata] = _replacing(renamed, map(str, paths))
    return renames


def _replacing(renamed: Mapping[str, Ref], names: Iterable[str]) -> _Renaming:
    """Return a function that replaces the entries with these names by the renamed ones; other entries stay."""
    old = {spell_key(".", name)[1:] for name in names}

    def replaced(children: dict[str, Ref]) -> dict[str, Ref]:
        fresh = iter([(spell_key(".", name)[1:], value) for name, value in renamed.items()])
        # Put one new entry in place of each old one, because a root has other entries between them.
        pairs = [pair for own in children.items() for pair in (islice(fresh, 1) if own[0] in old else (own,))]
        return dict([*pairs, *fresh])

    return replaced
