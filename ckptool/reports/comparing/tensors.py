"""Compare tensors: their attributes, and their elements bit for bit.

Bits are compared as stored, as fast as the files can be read and without torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from ...base.dtypes import BY_NAME
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.objects import attributes
from ...checkpoint.paths import as_children
from ...checkpoint.sharding import sharding_state
from ...checkpoint.tensors import OLD_PARAMETERS, Tensor, rebuild_calls
from ...files.downloads import expect_reads
from ...files.threads import READ_SIZE, read_blocks, run_in_threads
from ...pickles.nodes import Call, Instance, Node, Ref
from ...values.elements import BitDifference, elements, read_for, reblocked, storage_reader, stored_span, tensor_size
from ...values.interpretation import Reading, resolved_bytes
from .places import Side

if TYPE_CHECKING:
    from ...files.write.copying import Progress

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
    """Return whether a node is None or an empty OrderedDict of hooks."""
    node = nodes[ref]
    if isinstance(node, Instance):
        return isinstance(node, Call) and node.filling is None and nodes[node.args] == ()
    return node is None


# -- elements


def has_values(tensor: Tensor) -> bool:
    """Return whether the file has elements of the tensor itself."""
    return bool(tensor.storage) and tensor.location != "meta" and 0 not in tensor.shape


# -- bit for bit


@dataclass
class BitComparison:
    """A comparison of pairs of tensors with equal dtype and shape. NaNs with equal bits are equal.

    ``readings`` says how to read some of the pairs, by number. Without ``count`` differing elements are not counted:
    the number is then -1.
    ``progress`` is called with numbers of bytes on one side.
    """

    a: Checkpoint
    b: Checkpoint
    pairs: Sequence[tuple[Tensor, Tensor]]
    readings: Mapping[int, tuple[Reading, Reading]]
    count: bool
    progress: Progress | None
    differences: dict[int, BitDifference] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    buffers: threading.local = field(default_factory=threading.local)

    def run(self) -> list[BitDifference]:
        """Return the difference of each pair. Raise MalformedError if bytes are missing."""
        both = ((side, tensor) for pair in self.pairs for side, tensor in zip((self.a, self.b), pair))
        expect_reads(read_for(storage_reader(side, tensor.storage), tensor) for side, tensor in both)
        run_in_threads(range(len(self.pairs)), self.compare, [tensor_size(left) for left, _ in self.pairs])
        return [self.differences.get(number, BitDifference()) for number in range(len(self.pairs))]

    def compare(self, number: int) -> None:
        """Compare a pair up to its end, or to the first difference if differing elements are not counted."""
        left = self.pairs[number][0]
        dtype, at, total = BY_NAME.get(left.dtype), 0, tensor_size(left)
        width = dtype.itemsize if dtype else 1
        for ours, theirs in self.blocks(number):
            size = max(len(ours), len(theirs))
            if ours != theirs:
                padded = ours.ljust(size, b"\0"), theirs.ljust(size, b"\0")
                first, differing = _differing(*padded, width, self.count)
                known = self.differences.get(number, BitDifference(first + at // width))
                self.differences[number] = BitDifference(known.first, known.differing + differing)
                if not self.count:
                    break
            at += size
            self.advance(size)
        self.advance(max(total - at, 0))

    def blocks(self, number: int) -> Iterator[tuple[bytes | bytearray, bytes | bytearray]]:
        """Yield the bytes of both tensors of a pair, block by block; each is valid until the next one is requested.

        Yield nothing if they are the same bytes in the same file.
        """
        if number in self.readings:
            computed = (reblocked(resolved_bytes(reading), READ_SIZE) for reading in self.readings[number])
            yield from zip_longest(*computed, fillvalue=b"")
            return
        pair = [(storage_reader(side, t.storage), t) for side, t in zip((self.a, self.b), self.pairs[number])]
        one, other = (stored_span(*each) for each in pair)
        file = other.source.local_file() if other is not None else None
        if one is None or other is None or file is None:
            yield from zip_longest(*(reblocked(elements(*each), READ_SIZE) for each in pair), fillvalue=b"")
            return
        if one[1:] == other[1:] and one.source.identity == file.identity:
            return
        if not hasattr(self.buffers, "block"):
            self.buffers.block = bytearray(READ_SIZE)
        at = other.offset
        for ours in read_blocks(one):
            theirs = self.buffers.block if len(ours) == READ_SIZE else bytearray(len(ours))
            file.read_into(at, theirs)
            yield ours, theirs
            at += len(ours)

    def advance(self, size: int) -> None:
        if self.progress:
            with self.lock:
                self.progress(size)


def _differing(a: bytes | bytearray, b: bytes | bytearray, width: int, count: bool) -> tuple[int, int]:
    """Return the number of the first element of ``width`` bytes that differs, and how many differ (-1: not counted).

    Operations on large integers run in C; a Python loop over bytes would take a hundred times longer.
    """
    size = len(a)
    differ = (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(size, "little")
    first = (size - len(differ.lstrip(b"\0"))) // width
    if not count:
        return first, -1
    begin = first * width
    any_bit = 0
    for byte in range(width):
        any_bit |= int.from_bytes(differ[begin + byte :: width], "little")
    elements = -(-(size - begin) // width)
    return first, elements - any_bit.to_bytes(elements, "little").count(0)
