"""Two object graphs, gone through in step: what stands at the same place in both, and what in one only.

Neither cycles, nor shared objects, nor depth make it long: two containers that were found to stand for each other,
also by way of others, are not entered again (the algorithm of Hopcroft and Karp for the equivalence of automata).
So each of n + m containers is entered at most once, and a difference that is there is found.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..edits.keys import renamed_modules
from ..locations import is_device
from ..objects import attributes, callable_name, mapped_name, mapping
from ..pickles.nodes import Call, Global, Instance, Node, Ref
from ..prefixes import without_wrappers
from ..tensors import Tensor
from .places import Leaf, Side, joined, spelled, unique

__all__ = ["Both", "Facet", "Only", "Order", "Part", "Walked", "walked"]


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
    """What came of it. ``pairs`` are (path, number in ``tensors``), a tied tensor at each of its places."""

    tensors: list[Both]
    pairs: list[tuple[str, int]]
    only_a: list[Only]
    only_b: list[Only]
    entries: list[Facet]
    order: list[Order]


#: A place to go to: the two references, the path, and the number of the tensors that they belong to, or -1. Within
#: tensors paths begin anew.
_Task = tuple[Ref, Ref, str, int]

_DICTS = frozenset(("dict", "OrderedDict"))


def walked(a: Side, b: Side, ignore: frozenset[str] = frozenset()) -> Walked:
    """Go through both. Of ``ignore`` the words prefix, device and container count here."""
    walk = _Walk(a, b, ignore)
    walk.run()
    return walk.found


class _Walk:
    def __init__(self, a: Side, b: Side, ignore: frozenset[str]) -> None:
        self.a, self.b, self.ignore = a, b, ignore
        self.found = Walked([], [], [], [], [], [])
        self.numbers: dict[tuple[Ref, Ref], int] = {}
        self.inner: set[tuple[int, Ref, Ref]] = set()
        #: Union-find over the containers of a (their references) and of b (complements of them).
        self.parents: dict[int, int] = {}
        self.entered: tuple[dict[Ref, dict[str, Ref]], dict[Ref, dict[str, Ref]]] = ({}, {})
        self.counts: tuple[dict[Ref, int], dict[Ref, int]] = ({}, {})
        self.renames = tuple(_renames(side) if "prefix" in ignore else {} for side in (a, b))
        self.work: list[_Task] = [(a.root, b.root, "", -1)]

    def run(self) -> None:
        while self.work:
            left, right, path, owner = self.work.pop()
            ours, theirs = self.a.tensor(left), self.b.tensor(right)
            if ours is not None and theirs is not None:
                self.tensors(left, right, ours, theirs, path, owner)
                continue
            one, other = self.a.leaf(left), self.b.leaf(right)
            if ours is not None or theirs is not None or (one is None) != (other is None):
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
        self.found.tensors[number].places.append(path)
        self.found.pairs.append((path, number))

    def within(self, left: Ref, right: Ref, path: str, owner: int) -> None:
        """Go to what tensors hold beside shape and storage: hooks, conjugation, scales, members, attributes."""
        ours, theirs = _belongings(self.a, left), _belongings(self.b, right)
        if ours or theirs:
            self.below(ours, theirs, path, owner)

    # -- containers -----------------------------------------------------------------------------

    def containers(self, left: Ref, right: Ref, path: str, owner: int) -> None:
        one, other = self.a.type(left), self.b.type(right)
        if one != other and not ("container" in self.ignore and {one, other} <= _DICTS):
            self.facet(path, owner, Leaf(one, None), Leaf(other, None))
            if not {one, other} <= _DICTS and not {one, other} <= {"list", "tuple"}:
                return
        again = left in self.entered[0] and right in self.entered[1]
        ours, theirs = self.children(0, left), self.children(1, right)
        if one != other and "container" in self.ignore:
            # A plain dict cannot have what nn.Module.state_dict puts beside the keys.
            ours, theirs = ({step: ref for step, ref in d.items() if step != "._metadata"} for d in (ours, theirs))
        self.below(ours, theirs, path, owner, again)
        if not again and list(ours) != list(theirs) and self.a.is_mapping(left) and self.b.is_mapping(right):
            self.order(ours, theirs, path, owner)

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
        self, ours: Mapping[str, Ref], theirs: Mapping[str, Ref], path: str, owner: int, again: bool = False
    ) -> None:
        if again and len(ours) != len(theirs):
            # What is missing was told where they were first met; the shorter one decides how long this takes.
            self.facet(
                path, owner, Leaf("container", f"{len(ours)} values"), Leaf("container", f"{len(theirs)} values")
            )
        fewer = ours if not again or len(ours) <= len(theirs) else theirs
        common = [step for step in fewer if step in ours and step in theirs]
        self.work += [(ours[step], theirs[step], joined(path, step), owner) for step in reversed(common)]
        if again or len(common) == len(ours) == len(theirs):
            return
        for number, mine, other in ((0, ours, theirs), (1, theirs, ours)):
            for step, ref in mine.items():
                if step not in other:
                    self.only(number, joined(path, step), ref, owner)

    def only(self, number: int, path: str, ref: Ref, owner: int) -> None:
        if owner >= 0:
            there, nothing = self.whole(number, ref), Leaf("nothing", None)
            self.facet(path, owner, *((nothing, there) if number else (there, nothing)))
            return
        side = (self.a, self.b)[number]
        counts = self.counts[number]
        if ref not in counts:
            counts[ref] = _tensors_below(side, ref, counts)
        (self.found.only_b if number else self.found.only_a).append(Only(path, ref, counts[ref]))

    def order(self, ours: Mapping[str, Ref], theirs: Mapping[str, Ref], path: str, owner: int) -> None:
        one, other = [s for s in ours if s in theirs], [s for s in theirs if s in ours]
        if one != other and owner < 0:
            place = next(number for number, (a, b) in enumerate(zip(one, other)) if a != b)
            self.found.order.append(Order(path, place, joined("", one[place]), joined("", other[place])))


def same(a: Leaf, b: Leaf) -> bool:
    """Are two values the same, down to their type and the bits of a float?"""
    if a.type != b.type:
        return False
    if isinstance(a.value, float) and isinstance(b.value, float):
        return struct.pack(">d", a.value) == struct.pack(">d", b.value)
    return a.value == b.value


def _devices(a: Leaf, b: Leaf) -> bool:
    """Are both devices, as torch.device objects or as texts?"""
    texts = [str(leaf.value) if leaf.type in ("str", "torch.device") else "" for leaf in (a, b)]
    return a.type == b.type and all(map(is_device, texts))


def _tensors_below(side: Side, root: Ref, counts: Mapping[Ref, int]) -> int:
    """The tensors at or below a place, each container entered once."""
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
            seen.add(ref)
            work += side.children(ref).values()
    return total


# -- names without prefixes ----------------------------------------------------------------------------


def _renames(side: Side) -> dict[Ref, Callable[[dict[str, Ref]], dict[str, Ref]]]:
    """How the names of each state dict, and of its ``_metadata``, are compared: without what wrappers put in."""
    found: dict[Ref, Callable[[dict[str, Ref]], dict[str, Ref]]] = {}
    nodes = side.graph.nodes
    for state_dict in side.checkpoint.state_dicts:
        names = [str(nodes[key]) for key, _ in state_dict.items]
        shorter = [without_wrappers(name) for name in names]
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
                moved = renamed_modules([str(path) for path in paths], without_wrappers)
                fresh = {path: items[source][1] for path, _, source in moved}
                found[state_dict.metadata] = _replacing(side, fresh, state_dict.metadata)
    return found


def _replacing(side: Side, fresh: Mapping[str, Ref], ref: Ref) -> Callable[[dict[str, Ref]], dict[str, Ref]]:
    """Puts the renamed entries in the place of the old ones; attributes stay."""
    old = {side.step(key) for key, _ in mapping(side.graph, ref) or ()}

    def replaced(children: dict[str, Ref]) -> dict[str, Ref]:
        made: dict[str, Ref] = {}
        for name, value in fresh.items():
            made[unique(made, spelled(name))] = value
        made.update({step: value for step, value in children.items() if step not in old})
        return made

    return replaced


# -- what belongs to tensors ---------------------------------------------------------------------------

#: Arguments of the functions that make tensors, by place, beside storage, offset, shape, stride and requires_grad.
_ARGUMENTS: dict[str, dict[int, str]] = {
    "_rebuild_tensor": {},
    "_rebuild_tensor_v2": {5: "hooks", 6: "flags"},
    "_rebuild_tensor_v3": {5: "hooks", 7: "flags"},
    "_rebuild_qtensor": {4: "quantizer", 6: "hooks"},
    "_rebuild_nested_tensor": {0: "buffer", 1: "sizes", 2: "strides", 3: "offsets"},
    "_rebuild_meta_tensor_no_storage": {},
    "_rebuild_wrapper_subclass": {},
}
_MEMBERS = {"sparse_coo": ("indices", "values", "", "is_coalesced")}
#: Parameters within parameters, as far as they are followed.
_DEPTH = 8
_OLD_PARAMETERS = frozenset(("torch.nn.parameter.Parameter", "torch.autograd.variable.Variable"))
_COMPRESSED = ("compressed_indices", "plain_indices", "values")


def _belongings(side: Side, ref: Ref) -> dict[str, Ref]:
    """What belongs to a tensor and is told nowhere else, by name."""
    nodes, node = side.graph.nodes, side.graph.nodes[ref]
    found: dict[str, Ref] = {}
    # A Parameter is made of the tensor that it is, a subclass of the call that makes a plain tensor.
    for _ in range(_DEPTH):
        if not isinstance(node, Call):
            return found
        name, args = callable_name(side.graph, node.func), nodes[node.args]
        if node.states and name not in _OLD_PARAMETERS:
            found.update(_state_of(side, node))
        while name.endswith(("_rebuild_from_type_v2", "_rebuild_from_type")) and type(args) is tuple and len(args) > 2:
            if len(args) > 3:
                found[".state"] = args[3]
            func, args = nodes[args[0]], nodes[args[2]]
            name = mapped_name(func) if isinstance(func, Global) else ""
        if type(args) is not tuple:
            return found
        short = name.rpartition(".")[2]
        if not args or not (short.startswith("_rebuild_parameter") or name in _OLD_PARAMETERS):
            return found | _arguments(side, ref, short, args)
        found.update(_labelled(nodes, args, {2: "hooks", 3: "state"} if short.startswith("_") else {}))
        node = nodes[args[0]]
    return found


def _state_of(side: Side, node: Call) -> dict[str, Ref]:
    named = attributes(side.graph, node)
    if named:
        return {spelled(side.graph.nodes[key]): value for key, value in named}
    return {f"(state {number})": state for number, state in enumerate(node.states)}


def _arguments(side: Side, ref: Ref, name: str, args: tuple[Ref, ...]) -> dict[str, Ref]:
    nodes = side.graph.nodes
    if name == "_rebuild_sparse_tensor" and len(args) >= 2:
        tensor, members = side.tensor(ref), nodes[args[1]]
        names = _MEMBERS.get(tensor.kind if tensor else "", _COMPRESSED)
        return _labelled(nodes, members if type(members) is tuple else (), dict(enumerate(names)))
    labels = _ARGUMENTS.get(name)
    if labels is None:
        return {f"({number})": item for number, item in enumerate(args)}
    found = _labelled(nodes, args, labels)
    # Flags that are not there are off: conj and neg, each by its name.
    flags = found.pop(".flags", -1)
    return found | ({} if flags < 0 else side.children(flags))


def _labelled(nodes: Sequence[Node], args: tuple[Ref, ...], labels: Mapping[int, str]) -> dict[str, Ref]:
    return {
        f".{label}": args[number]
        for number, label in labels.items()
        if label and number < len(args) and not _is_nothing(nodes, args[number])
    }


def _is_nothing(nodes: Sequence[Node], ref: Ref) -> bool:
    """An empty OrderedDict of hooks, or None."""
    node = nodes[ref]
    if isinstance(node, Instance):
        return isinstance(node, Call) and node.filling is None and nodes[node.args] == ()
    return node is None
