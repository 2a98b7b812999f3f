"""One side of a comparison: the values, containers and tensors in an object graph, and the paths that lead to them.

The survey enters each container once. Here a container counts at every place, because equal checkpoints may share their
objects differently. Patterns choose places too: by key or by whole path, a tensor, an entry, or a container with all
its content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from ...base.dtypes import BY_NAME
from ...base.errors import MalformedError, TargetError
from ...base.globs import Glob, Globs
from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...base.steps import tree_step
from ...base.text import join_limited
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.objects import attributes, class_name, holds_constants, list_items, mapping
from ...checkpoint.paths import Child, as_children, children, key_text, parse_steps, sequence, spell_key
from ...checkpoint.selection import selected
from ...checkpoint.sharding import sharding_state
from ...checkpoint.survey import StateDict
from ...checkpoint.tensors import OLD_PARAMETERS, Tensor, rebuild_calls
from ...pickles.nodes import Call, Instance, List, Node, Persistent, Ref
from ...values.objects import ScalarValue, scalar_value

_CONSTANTS = frozenset((type(None), bool, int, float, str, bytes))


class Place(NamedTuple):
    """A tensor at one of its places; ``path`` is spelled as in ``inspect``, relative to the chosen root."""

    path: str
    ref: Ref
    tensor: Tensor


class Side:
    """The part of a checkpoint that is compared: the whole object, or the state dict ``chosen``."""

    def __init__(self, checkpoint: Checkpoint, chosen: StateDict | None = None) -> None:
        self.checkpoint = checkpoint
        self.graph = checkpoint.graph
        self.reader = checkpoint.survey.reader
        self.root = self.graph.root if chosen is None else chosen.ref
        #: The path of ``root`` in the file.
        self.base = "" if chosen is None else chosen.path
        self._storages: dict[Ref, Tensor] = {}

    def path_in_file(self, path: str) -> str:
        """Return the path in the file for a path relative to the root."""
        joint = "." if self.base and path and not path.startswith("[") else ""
        return self.base + joint + path

    def tensor(self, ref: Ref) -> Tensor | None:
        """Return the tensor at ``ref``, or None. A bare storage is a one-dimensional tensor of the kind "storage".

        A tensor of unknown kind is compared as an object, by its content.
        """
        tensor = self.reader.tensor(ref)
        if tensor is not None and tensor.kind == "unknown":
            return None
        if tensor is not None or type(self.graph.nodes[ref]) is not Persistent:
            return tensor
        if ref not in self._storages:
            storage = self.reader.storage(ref)
            if storage is None:
                return None
            name = storage.dtype.name if storage.dtype.name in BY_NAME else "uint8"
            self._storages[ref] = Tensor(
                "storage", name, (storage.numel,), (1,), 0, storage.key, storage.location, False
            )
        return self._storages[ref]

    def leaf(self, ref: Ref) -> ScalarValue | None:
        """Return the value at ``ref``, or None for a container or tensor."""
        return scalar_value(self.graph, ref)

    def type(self, ref: Ref) -> str:
        """Return the type of the object at ``ref``, as a word or a dotted name."""
        tensor = self.tensor(ref)
        if tensor is not None:
            return "storage" if tensor.kind == "storage" else "Tensor"
        leaf = self.leaf(ref)
        if leaf is not None:
            return leaf.type
        name, node = class_name(self.graph, ref), self.graph.nodes[ref]
        if name == "collections.deque" and isinstance(node, Call):
            # The elements are compared one by one; the capacity is treated as part of the type.
            args = list_items(self.graph.nodes[node.args])
            return f"{name}(maxlen={self.graph.nodes[args[1]]!r})" if len(args) > 1 else name
        return name

    def is_mapping(self, ref: Ref) -> bool:
        """Return whether an object is filled by key, so that its keys have an order."""
        return mapping(self.graph, ref) is not None

    def elements(self, ref: Ref) -> Sequence[Ref] | None:
        """Return the elements of a list or tuple in order, or None for other objects."""
        node = self.graph.nodes[ref]
        if isinstance(node, tuple | List):
            return node if isinstance(node, tuple) else node.items
        return None if self.is_set(ref) else sequence(self.graph, ref)

    def is_set(self, ref: Ref) -> bool:
        """Return whether an object is a set or frozenset, however it was pickled."""
        return class_name(self.graph, ref) in ("set", "frozenset")

    def children(self, ref: Ref) -> dict[str, Ref]:
        """Return the members of a container, by the steps that are appended to its path."""
        graph = self.graph
        if self.is_set(ref):
            # A set has no order, so members are named by their values if these have a text.
            members: dict[str, Ref] = {}
            for step, item, _ in children(graph, ref):
                text = key_text(graph, item)
                members[f"[{{{text}}}]" if text and f"[{{{text}}}]" not in members else step] = item
            return members
        return {self.step(child): child.ref for child in children(graph, ref)}

    def step(self, child: Child) -> str:
        """Return the step to a child. A key too long for a path keeps its text here, as in the other file."""
        name = self.graph.nodes[child.key] if child.key >= 0 and child.step[:2] == "[#" else None
        return spell_key(".", name)[1:] if isinstance(name, str) else child.step

    def tensors(self) -> Iterator[Place]:
        """Yield every tensor at every place, in file order.

        Raise MalformedError beyond ``LIMITS.places`` plus four places per node: n nested containers that share members
        can have 2**n places.
        """
        left = LIMITS.places + 4 * len(self.graph.nodes)
        within: set[Ref] = set()
        work: list[Iterator[tuple[Ref, str]]] = [iter([(self.root, "")])]
        while work:
            place = next(work[-1], None)
            if place is None:
                work.pop()
                continue
            ref, path = place
            if ref < 0:
                within.discard(~ref)
                continue
            if type(self.graph.nodes[ref]) in _CONSTANTS:
                continue
            left -= 1
            if left < 0:
                raise MalformedError("its objects are at too many places to follow", path=self.checkpoint.path)
            tensor = self.tensor(ref)
            if tensor is not None:
                yield Place(path, ref, tensor)
                continue
            if ref in within or self.leaf(ref) is not None or holds_constants(self.graph, ref):
                continue
            within.add(ref)
            work.append(self._below(ref, path))

    def _below(self, ref: Ref, path: str) -> Iterator[tuple[Ref, str]]:
        """Yield the places below a container, then its complement, which means that the container is left."""
        elements = self.elements(ref)
        if elements is not None:
            yield from ((item, join_path(path, f"[{number}]")) for number, item in enumerate(elements))
        else:
            yield from ((child, join_path(path, step)) for step, child in self.children(ref).items())
        yield ~ref, ""


def join_path(base: str, step: str) -> str:
    """Return the path one step further. A very long one is cut, and a checksum keeps it unique."""
    path = base + step if base or step[:1] != "." else step[1:]
    if len(path) <= LIMITS.path_chars:
        return path
    from hashlib import sha256

    digest = sha256(path.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{path[: LIMITS.path_chars]}...#{digest}"


def side_of(checkpoint: Checkpoint, key: str | None) -> Side:
    """Return the whole object, or with ``key`` the state dict at that path; raise TargetError if it does not exist."""
    if key is None:
        return Side(checkpoint)
    chosen = selected(checkpoint, key)
    if len(chosen) != 1:  # one object is at two paths
        raise TargetError(f"{key!r} names {len(chosen)} state dicts", path=checkpoint.path)
    return Side(checkpoint, chosen[0])


#: The children of a container by the steps under which they are compared: without prefixes if these are ignored.
Children: TypeAlias = Callable[[Ref], Mapping[str, Ref]]

_METADATA: Final = "._metadata"


class ChosenParts:
    """The sub-objects chosen for comparison in two graphs, with the containers that lead to them.

    Elements of a list of plain values are chosen together. Raise TargetError if a pattern matches nothing in either
    graph or nothing is chosen, MalformedError beyond ``LIMITS.places`` plus four places per node.
    """

    def __init__(self, sides: Sequence[Side], children: Sequence[Children], only: Globs) -> None:
        self.only = only
        #: By path: True if all is chosen that is not in ``dropped``, False if only places in ``kept`` are.
        self.containers: dict[str, bool] = {}
        self.kept: set[str] = set()
        self.dropped: set[str] = set()
        self._bases = list({side.base: side for side in sides}.values())
        self._unmatched = [Glob(pattern) for pattern in (*only.include, *only.exclude)]
        self._names: dict[tuple[str, str], None] = {}
        self._holders: dict[str, str] = {}
        self._chosen = False
        for side, children_of in zip(sides, children):
            self._follow(side, children_of)
        if self._unmatched or not self._chosen:
            raise self._nothing_matches(sides[0])
        self._names.clear()

    def of(self, path: str, children: Mapping[str, Ref]) -> dict[str, Ref]:
        """Return the chosen children of a container, whose path is in ``containers``."""
        whole = self.containers[path]
        places = {step: join_path(path, step) for step in children}
        return {
            step: ref
            for step, ref in children.items()
            if (places[step] not in self.dropped if whole else places[step] in self.kept)
        }

    def _follow(self, side: Side, children: Children) -> None:
        """Follow one side, and note which places in its containers are chosen."""
        left = LIMITS.places + 4 * len(side.graph.nodes)
        metadata = {item.metadata for item in side.checkpoint.state_dicts}
        within: set[Ref] = set()
        # The containers to enter: chosen (True), not chosen (False), or excluded (None). A negative reference leaves
        # one.
        work: list[tuple[Ref, str, bool | None]] = []
        state = self._state("", "", not self.only.include)
        if self._is_entered(side, side.root, state):
            work.append((side.root, "", state))
        while work:
            ref, path, state = work.pop()
            if ref < 0:
                within.discard(~ref)
                continue
            if ref in within:
                self.containers.setdefault(path, False)
                continue
            within.add(ref)
            work.append((~ref, path, state))
            below = children(ref)
            left -= len(below)
            if left < 0:
                raise MalformedError("its objects are at too many places to follow", path=side.checkpoint.path)
            if state is not None:
                self.containers[path] = state
            chosen, inside = [], []
            for step, child in below.items():
                if step == _METADATA and child in metadata:
                    continue
                place, key = join_path(path, step), step_key(step)
                now = self._state(key, place, state)
                self._holders[place] = path
                if now:
                    chosen.append(key)
                    self._keep(place)
                elif now is None:
                    self.dropped.add(place)
                if self._is_entered(side, child, now):
                    inside.append((child, place, now))
            work += reversed(inside)
            if state is not None and below.get(_METADATA) in metadata:
                place = join_path(path, _METADATA)
                self._holders[place] = path
                self._modules(place, children(below[_METADATA]), state, chosen, map(step_key, below))

    def _keep(self, place: str) -> None:
        while place not in self.kept:
            self.kept.add(place)
            place = self._holders.get(place, "")

    def _is_entered(self, side: Side, ref: Ref, state: bool | None) -> bool:
        """Return whether the members of a container must be examined, because patterns may choose or exclude them."""
        if state is not False and not self._unmatched and not (state and self.only.exclude):
            return False
        if side.tensor(ref) is not None or side.leaf(ref) is not None or side.is_set(ref):
            return False
        return side.elements(ref) is None or not holds_constants(side.graph, ref)

    def _modules(
        self, path: str, modules: Mapping[str, Ref], whole: bool, chosen: Iterable[str], keys: Iterable[str]
    ) -> None:
        """Choose the entries of ``_metadata`` for modules with chosen keys; if ``whole``, also modules without keys."""
        self.containers[path] = whole
        inside, known = _modules_of(chosen), _modules_of(keys)
        if inside:
            self._keep(path)
        for step in modules:
            module = step_key(step)
            if module in inside or (whole and module not in known and self.only.decide(module) is not False):
                self.kept.add(join_path(path, step))
            else:
                self.dropped.add(join_path(path, step))

    def _state(self, key: str, place: str, outer: bool | None) -> bool | None:
        """Return whether a place in a container with the state ``outer`` is chosen; None if patterns exclude it."""
        paths = [side.path_in_file(place) for side in self._bases]
        if self._unmatched:
            self._names.update({(key, path): None for path in paths})
            self._unmatched = [glob for glob in self._unmatched if not any(glob.matches(key, path) for path in paths)]
        decided = {self.only.decide(key, path) for path in paths}
        if outer is None or False in decided:
            return None
        state = outer or True in decided
        self._chosen |= state
        return state

    def _nothing_matches(self, side: Side) -> TargetError:
        step = tree_step(side.checkpoint.path)
        if not self._unmatched:
            return TargetError("every key is excluded", next=step)
        from ...base.nearest import nearest_pattern

        missing = [glob.pattern for glob in self._unmatched]
        near = nearest_pattern(missing[0], [key for key, _ in self._names], [path for _, path in self._names])
        message = f"no key matches {join_limited([repr(pattern) for pattern in missing])} in either file"
        return TargetError(f"{message}; did you mean {near!r}?" if near else message, next=step)


def step_key(step: str) -> str:
    """Return the key of a step that leads to a string key, otherwise the step."""
    if step.startswith('["'):
        return str(parse_steps(step)[0].value)
    return step.removeprefix(".")


def _modules_of(keys: Iterable[str]) -> set[str]:
    modules: set[str] = set()
    for name in keys:
        while name not in modules:
            modules.add(name)
            name = name.rpartition(".")[0]
    return modules


# -- what tensors have apart from shape and storage

#: Arguments of torch's rebuild functions by position, except storage, offset, shape, stride and requires_grad.
_ARGUMENTS: Final[dict[str, dict[int, str]]] = {
    "_rebuild_tensor": {},
    "_rebuild_tensor_v2": {5: "hooks", 6: "flags"},
    "_rebuild_tensor_v3": {5: "hooks", 7: "flags"},
    "_rebuild_qtensor": {4: "quantizer", 6: "hooks"},
    "_rebuild_nested_tensor": {0: "buffer", 1: "sizes", 2: "strides", 3: "offsets"},
    "_rebuild_meta_tensor_no_storage": {},
    "_rebuild_wrapper_subclass": {},
}
_MEMBERS: Final = {"sparse_coo": ("indices", "values", "", "is_coalesced")}
_COMPRESSED: Final = ("compressed_indices", "plain_indices", "values")

#: Classes of tensors whose attributes do not affect their values.
_PLAIN: Final = ("", "Tensor", "Parameter", "Buffer")


def tensor_attributes(side: Side, ref: Ref) -> dict[str, Ref]:
    """Return what a tensor has apart from shape and storage, by name: flags, quantizer, members, hooks, attributes."""
    nodes = side.graph.nodes
    usual, carried = nodes[ref], dict[str, Ref]()
    if type(usual) is Call and not usual.states and side.reader.is_usual(usual):
        args = nodes[usual.args]
        if type(args) is tuple and len(args) == 6:
            return {} if _is_nothing(nodes, args[5]) else {".hooks": args[5]}
    for call in rebuild_calls(side.graph, ref):
        node = nodes[call.ref]
        if call.holder == call.ref and isinstance(node, Call) and node.states and call.name not in OLD_PARAMETERS:
            carried.update(_state_of(side, node))
        if call.short_name.startswith("_rebuild_from_type"):
            if call.state >= 0:
                tensor = side.tensor(ref)
                carried.update(sharding_state(side.reader, ref, tensor) if tensor is not None else {})
                carried.update({} if carried else {".state": call.state})
        elif not call.args or not call.is_parameter:
            return carried | _arguments(side, ref, call.short_name, call.args)
        else:
            labels = {2: "hooks", 3: "state"} if call.short_name.startswith("_") else {}
            carried.update(_labelled(nodes, call.args, labels))
    return carried


def attribute_names(side: Side, ref: Ref) -> set[str]:
    """Return which names in ``tensor_attributes`` are Python attributes that a program set on a plain tensor."""
    tensor, nodes, names = side.tensor(ref), side.graph.nodes, set[str]()
    for call in rebuild_calls(side.graph, ref) if tensor is not None and tensor.cls in _PLAIN else ():
        node = nodes[call.ref]
        if call.holder == call.ref and isinstance(node, Call) and node.states and call.name not in OLD_PARAMETERS:
            names.update(_state_of(side, node))
        if call.short_name.startswith("_rebuild_from_type") or call.short_name == "_rebuild_parameter_with_state":
            names.add(".state")
    return names


def _state_of(side: Side, node: Call) -> dict[str, Ref]:
    fields = as_children(side.graph, attributes(side.graph, node))
    if fields:
        return {field.step: field.ref for field in fields}
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
    labelled = _labelled(nodes, args, labels)
    # The flags conj and neg are compared by name; an absent flag is off.
    flags = labelled.pop(".flags", -1)
    return labelled | ({} if flags < 0 else side.children(flags))


def _labelled(nodes: Sequence[Node], args: tuple[Ref, ...], labels: Mapping[int, str]) -> dict[str, Ref]:
    return {
        f".{label}": args[number]
        for number, label in labels.items()
        if label and number < len(args) and not _is_nothing(nodes, args[number])
    }


def _is_nothing(nodes: Sequence[Node], ref: Ref) -> bool:
    node = nodes[ref]
    if isinstance(node, Instance):
        return isinstance(node, Call) and node.filling is None and nodes[node.args] == ()
    return node is None


def has_values(tensor: Tensor) -> bool:
    """Return whether the file has elements of the tensor itself."""
    return bool(tensor.storage) and tensor.location != "meta" and 0 not in tensor.shape
