"""DTensors and ShardedTensors in a torch.save file: the parts that one rank saved, and where they belong.

Sources: ``DTensor`` and ``DTensorSpec`` (torch/distributed/tensor/_api.py, _dtensor_spec.py), ``DeviceMesh``
(torch/distributed/device_mesh.py), placement_types.py for how a placement divides a dimension;
``ShardedTensor.__getstate__`` (torch/distributed/_shard/sharded_tensor/api.py).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any, Final, TypeAlias

from ..base.lazy import regex
from ..base.limits import LIMITS
from ..base.records import NamedTuple, TypedDict
from ..base.text import cut, join_limited, pluralize
from ..pickles.nodes import Call, Global, Graph, Node, Ref
from .container import Container
from .objects import by_name, class_name, list_items, local_shards, named_attributes, state_items
from .survey import TensorEntry
from .tensors import SHARDED_CLASSES, Tensor, TensorReader, contiguous_strides, is_contiguous, is_sharded, rebuild_calls

#: (begin, end) in a dimension of the whole tensor.
Range: TypeAlias = tuple[int, int]

#: The most ranges in one dimension. Torch makes as many as an inner dimension of the mesh has ranks.
_MAX_RANGES: Final = 256
_MAX_MESH_DIMENSIONS: Final = 64
#: The most characters of a name to keep, because it is repeated for every tensor.
_MAX_NAME: Final = 40
#: The most ranks of a mesh to read.
_MAX_RANKS: Final = 1 << 20
MESH_CLASS: Final = "torch.distributed.device_mesh.DeviceMesh"
#: Names of mesh dimensions whose ranks hold different layers.
_PIPELINE: Final = regex(r"(?:pp|pipe|pipeline|stages?)(?:_|\Z)", re.I)


class Placement(NamedTuple):
    """A placement: its text, the dimension that it divides (-1 if none), and its split factor. A strided placement
    divides a dimension that was already split into ``pieces``; otherwise ``pieces`` is 1."""

    words: str
    dim: int = -1
    pieces: int = 1


def ranges_of(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: Sequence[Placement]
) -> tuple[tuple[Range, ...], ...] | None:
    """Return the index ranges, per dimension, that the rank at ``coordinate`` of the mesh holds; None if unknown."""
    if not len(mesh) == len(coordinate) == len(placements) <= _MAX_MESH_DIMENSIONS:
        return None
    dimensions: list[list[Range]] = [[(0, size)] if size else [] for size in shape]
    for (_, dim, count), size, number in zip(placements, mesh, coordinate):
        if dim < 0:
            continue
        if dim >= len(shape) or not (0 <= number < size and 0 < max(len(dimensions[dim]), 1) * count <= _MAX_RANGES):
            return None
        joined: list[Range] = []
        for piece in range(count):
            for begin, end in _chunk(_chunk(dimensions[dim], count, piece), size, number):
                if joined and joined[-1][1] == begin:
                    begin = joined.pop()[0]
                joined.append((begin, end))
        dimensions[dim] = joined
    return tuple(tuple(ranges) for ranges in dimensions)


def _chunk(ranges: list[Range], count: int, number: int) -> list[Range]:
    total = _length(ranges)
    size = -(-total // count)
    begin, end = min(size * number, total), min(size * (number + 1), total)
    chunk = []
    at = 0
    for low, high in ranges:
        first, last = max(begin, at), min(end, at + high - low)
        if first < last:
            chunk.append((low + first - at, low + last - at))
        at += high - low
    return chunk


def _length(ranges: Iterable[Range]) -> int:
    return sum(end - begin for begin, end in ranges)


class MeshReport(TypedDict):
    """A mesh of ranks in JSON: device type, names and sizes of the dimensions, and number of ranks (0 if unknown)."""

    device: str
    names: list[str]
    shape: list[int]
    ranks: int


class Mesh(NamedTuple):
    """The mesh of ranks that hold a tensor: the device type, and names and sizes of the dimensions.

    A ShardedTensor has one dimension, its process group. ``shape`` is () if unknown. ``members`` lists the ranks in the
    order of the mesh; it is () if unknown. A mesh may be part of a larger one with ``world`` ranks, 0 if unknown.
    ``outer`` lists the dimension names of the larger mesh that this one lacks, such as "pp".
    """

    device: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    members: tuple[int, ...] = ()
    world: int = 0
    outer: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks, or 0 if unknown."""
        return prod(self.shape) if self.shape else 0

    @property
    def report(self) -> MeshReport:
        """The mesh for JSON reports."""
        return {"device": self.device, "names": list(self.names), "shape": list(self.shape), "ranks": self.ranks}

    @property
    def is_of_stage(self) -> bool:
        """Whether the mesh is one of several pipeline stages, judging by the dimension names."""
        return any(_PIPELINE.match(name) for name in self.outer)

    def is_ascending(self, placements: Sequence[str]) -> bool:
        """Return whether the ranks ascend along each mesh dimension that divides a tensor, or are unknown."""
        if not self.members or len(placements) != len(self.shape):
            return True
        steps = zip(placements, self.shape, contiguous_strides(self.shape))
        return all(
            self.members[at] < self.members[at + step]
            for placement, size, step in steps
            if "Shard(" in placement
            for at in range(len(self.members))
            if at // step % size < size - 1
        )

    @property
    def words(self) -> str:
        """The mesh as text, such as "dp=2, tp=4 on cuda" or "2x4 on cuda"."""
        sizes = [str(size) for size in self.shape]
        named = len(self.names) == len(sizes)
        words = ", ".join(map("=".join, zip(self.names, sizes))) if named else "x".join(sizes)
        words = pluralize(self.shape[0], "rank") if len(sizes) == 1 and not named else words or "a mesh"
        return words + (f" on {self.device}" if self.device else "")


class ShardPart(NamedTuple):
    """A part of a sharded tensor in the file: its local tensor, and its index ranges per dimension, None if unknown."""

    ref: Ref
    shape: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...] | None

    def offsets(self, whole: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the index in the whole tensor at which the part begins; None if the part has several blocks, or is
        unknown. As in torch, an empty range begins at the end of the dimension."""
        if self.ranges is None or any(len(ranges) > 1 for ranges in self.ranges):
            return None
        return tuple(ranges[0][0] if ranges else size for ranges, size in zip(self.ranges, whole))

    def slices(self, whole: tuple[int, ...]) -> str:
        """Return the index ranges as text, such as "[2:4, :]"; "" if they are unknown or the part is empty."""
        if self.ranges is None or 0 in self.shape:
            return ""
        texts = []
        for ranges, size in zip(self.ranges, whole):
            text = "+".join(f"{begin}:{end}" for begin, end in ranges[:3]) + ("+..." if len(ranges) > 3 else "")
            texts.append(":" if ranges == ((0, size),) else text)
        return f"[{', '.join(texts) or '...'}]"


class Sharding(NamedTuple):
    """How a tensor is sharded. ``kind`` is "DTensor" or "ShardedTensor"; ``parts`` are its parts in the file.

    ``placements`` has a text for each mesh dimension, such as "Shard(0)". A ShardedTensor has one, its specification:
    "Chunk(0)" or "Enumerable". ``rank`` is the rank that saved the tensor, or -1 if unknown. ``parameter`` says whether
    the tensor is also an nn.Parameter.
    """

    kind: str
    parts: tuple[ShardPart, ...]
    placements: tuple[str, ...]
    mesh: Mesh
    rank: int
    parameter: bool = False

    @property
    def local_shape(self) -> tuple[int, ...] | None:
        """The shape of the only part, or None unless there is exactly one."""
        return self.parts[0].shape if len(self.parts) == 1 else None

    def is_whole(self, whole: tuple[int, ...]) -> bool:
        """Return whether the file holds the whole tensor, and not just a term of a sum over the ranks."""
        return self.local_shape == whole and not any(text.startswith("Partial") for text in self.placements)

    @property
    def here(self) -> str:
        """The shapes of the parts in the file as text, such as "2x6" or "nothing"."""
        return join_limited(["x".join(map(str, part.shape)) or "scalar" for part in self.parts]) or "nothing"

    def slices(self, whole: tuple[int, ...]) -> str:
        """Return the index ranges of the parts as text; "" if unknown."""
        return join_limited([text for part in self.parts if (text := part.slices(whole))])

    @property
    def words(self) -> str:
        """The placements and the mesh as text, such as "Shard(0) over dp=4 on cuda"."""
        return f"{', '.join(self.placements)} over {self.mesh.words}"


class ShardingSummary(NamedTuple):
    """The sharded tensors of a file: their number, the number of incomplete ones, and their kinds, ranks and meshes."""

    tensors: int
    partial: int
    kinds: tuple[str, ...]
    ranks: tuple[int, ...]
    meshes: tuple[Mesh, ...]

    @property
    def members(self) -> set[int]:
        """The ranks that hold parts of the tensors, as far as known."""
        return {rank for mesh in self.meshes for rank in mesh.members}

    @property
    def expected(self) -> int:
        """The number of ranks that hold parts of the tensors, as far as known; 0 if unknown."""
        return max([len(self.members), *(mesh.ranks for mesh in self.meshes)])

    @property
    def owner(self) -> str:
        """The rank that saved the tensors, as text: "rank 1 of 4", as far as known."""
        rank = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else "one rank"
        return rank + (f" of {self.expected}" if self.expected > min(self.ranks, default=0) else "")

    @property
    def words(self) -> str:
        """The summary as text: "16 tensors (DTensor) as rank 1 of 4 had them, spread over dp=4 on cpu"."""
        had = f"{pluralize(self.tensors, 'tensor')} ({join_limited(list(self.kinds))}) as {self.owner} had them"
        return f"{had}, spread over {self.over}" + ("" if self.partial else ", all of them whole")

    @property
    def over(self) -> str:
        """The first three meshes as text, such as "dp=2, tp=4 on cuda", and the number of further ones."""
        return join_limited(list(dict.fromkeys(mesh.words for mesh in self.meshes)), most=3)


def has_sharded(graph: Graph) -> bool:
    """Return whether a pickle names the class DTensor or ShardedTensor; without either, no tensor is sharded."""
    return any(node.name.rpartition(".")[2] in SHARDED_CLASSES for _, node in graph.of_type(Global))


def sharding_summary(reader: TensorReader, entries: Iterable[TensorEntry]) -> ShardingSummary | None:
    """Summarize the sharded tensors among the entries; return None if there are none."""
    if not has_sharded(reader.graph):
        return None
    every = [(entry, how) for entry in entries if (how := sharding(reader, entry.ref, entry.tensor)) is not None]
    if not every:
        return None
    return ShardingSummary(
        len(every),
        sum(not how.is_whole(entry.tensor.shape) for entry, how in every),
        tuple(dict.fromkeys(how.kind for _, how in every)),
        tuple(dict.fromkeys(how.rank for _, how in every if how.rank >= 0)),
        tuple(dict.fromkeys(how.mesh for _, how in every)),
    )


def sharding(reader: TensorReader, ref: Ref, tensor: Tensor) -> Sharding | None:
    """Return how a DTensor or ShardedTensor is sharded; None for another tensor."""
    state = _state(reader.graph, ref) if is_sharded(tensor) else -1
    if state < 0:
        return None
    read = _sharded_tensor if tensor.cls.endswith("ShardedTensor") else _dtensor
    return read(reader, state, tensor)


#: Attributes of a mesh that identify the part of a tensor, without their underscores.
_MESH_ATTRIBUTES: Final = ("device_type", "layout", "mesh_dim_names", "rank", "coordinate_on_dim")


def sharding_state(reader: TensorReader, ref: Ref, tensor: Tensor) -> dict[str, Ref]:
    """Return the parts and placements of a sharded tensor by name, without its other state; {} for another tensor."""
    how = sharding(reader, ref, tensor)
    if how is None:
        return {}
    graph, state = reader.graph, _state(reader.graph, ref)
    if how.kind == "ShardedTensor":
        named = {".sharding_spec": list_items(graph.nodes[state])[3]}
        for number, shard in enumerate(local_shards(graph, state)):
            path, placed = f".local_shards[{number}]", _fields(graph, shard, "metadata")
            named |= {f"{path}.offsets": placed["shard_offsets"]} if "shard_offsets" in placed else {}
            named |= {f"{path}.tensor": shard["tensor"]} if "tensor" in shard else {}
        return named
    spec = _fields(graph, by_name(graph, state_items(graph, state)), "_spec")
    mesh = _fields(graph, spec, "mesh")
    named = {".local_tensor": how.parts[0].ref}
    named |= {".placements": spec["placements"]} if "placements" in spec else {}
    return named | {f".mesh.{name}": mesh[f"_{name}"] for name in _MESH_ATTRIBUTES if f"_{name}" in mesh}


def _state(graph: Graph, ref: Ref) -> Ref:
    return next((call.state for call in rebuild_calls(graph, ref) if not call.is_parameter), -1)


def _dtensor(reader: TensorReader, state: Ref, tensor: Tensor) -> Sharding | None:
    graph = reader.graph
    fields = by_name(graph, state_items(graph, state))
    local = reader.tensor(fields["_local_tensor"]) if "_local_tensor" in fields else None
    spec = _fields(graph, fields, "_spec")
    if local is None or not spec:
        return None
    mesh, coordinate, rank = _cached(graph, "place in a mesh", spec.get("mesh", -1), partial(_read_place, reader))
    placements = [
        _cached(graph, "placement", part, partial(_read_placement, graph)) for part in _few(graph, spec, "placements")
    ]
    ranges = ranges_of(tensor.shape, mesh.shape, coordinate, placements) if coordinate is not None else None
    if ranges is not None and tuple(map(_length, ranges)) != local.shape:
        ranges = None  # DTensor.from_local takes parts of uneven sizes
    # torch/nn/parameter.py: this attribute marks a Parameter of a class other than Tensor.
    parameter = _value(graph, fields, "_is_param") is True
    part = ShardPart(fields["_local_tensor"], local.shape, ranges)
    words = tuple(placement.words for placement in placements)
    return Sharding("DTensor", (part,), words, mesh, rank, parameter)


def read_mesh_ranks(container: Container, reader: TensorReader) -> None:
    """Read the ranks of the meshes in a file from torch 2.9 or earlier, which stores them in a tensor."""
    graph = reader.graph
    has_meshes = any(node.name.endswith("DeviceMesh") for _, node in graph.of_type(Global))
    for ref, node in graph.of_type(Call) if has_meshes else ():
        if not node.states or class_name(graph, ref) != MESH_CLASS:
            continue
        fields = named_attributes(graph, ref)
        tensor = reader.tensor(fields.get("_rank_map", fields.get("mesh", graph.root)))
        if tensor is not None and "_flatten_rank_map" not in fields:
            graph.cache["place in a mesh", ref] = _read_place(reader, ref, _stored_integers(container, tensor))


def _stored_integers(container: Container, tensor: Tensor) -> tuple[int, ...]:
    code = {"int32": "i", "int64": "q"}.get(tensor.dtype, "")
    if not code or not 0 < tensor.numel <= _MAX_RANKS or not is_contiguous(tensor):
        return ()
    order, size = ">" if container.byteorder == "big" else "<", tensor.own_bytes
    span, _, compressed, _ = container.stored(tensor.storage)
    at = tensor.offset * size // tensor.numel
    if span is None or compressed or at < 0 or at + size > span.size:
        return ()
    data = span.source.read(span.offset + at, size)
    return struct.unpack(f"{order}{tensor.numel}{code}", data) if len(data) == size else ()


def _read_place(
    reader: TensorReader, ref: Ref, ranks: tuple[int, ...] = ()
) -> tuple[Mesh, tuple[int, ...] | None, int]:
    """Read a mesh, and the coordinates and number of the rank that saved it. ``ranks`` stand in for a missing list."""
    graph = reader.graph
    fields = named_attributes(graph, ref) if ref >= 0 else {}
    coordinate = _integers(graph, fields.get("_coordinate_on_dim", -1))
    rank = _number(_value(graph, fields, "_rank"))
    ranks = _integers(graph, fields.get("_flatten_rank_map", -1), _MAX_RANKS) or ranks
    sizes: list[tuple[int, ...]] = []
    strides: list[tuple[int, ...]] = []
    if "_layout" in fields:
        sizes, strides = _layout(graph, fields["_layout"])
    elif "mesh" in fields and (tensor := reader.tensor(fields["mesh"])) is not None:
        sizes = [(size,) for size in tensor.shape]
        strides = [(stride,) for stride in contiguous_strides(tensor.shape)]
    shape = tuple(map(prod, sizes))
    members: tuple[int, ...] = ()
    if coordinate is not None and len(coordinate) == len(shape) and 0 < prod(shape) <= len(ranks):
        at = _offset(coordinate, sizes, strides)
        rank = ranks[at] if rank < 0 and "_layout" not in fields and 0 <= at < len(ranks) else rank
        begin = ranks.index(rank) - at if rank in ranks else -1
        places = [begin + _offset(place, sizes, strides) for place in product(*map(range, shape))]
        if begin >= 0 and len(set(places)) == len(places) and max(places) < len(ranks):
            members = tuple(ranks[place] for place in places)
    names = _dimension_names(graph, fields)
    above = _fields(graph, fields, "_root_mesh")
    outer = tuple(name for name in _dimension_names(graph, above) if name and name not in names)
    device = _name(_value(graph, fields, "_device_type"))
    return Mesh(device, names, shape, members, len(ranks), outer), coordinate, rank


def _dimension_names(graph: Graph, fields: dict[str, Ref]) -> tuple[str, ...]:
    return tuple(_name(graph.nodes[name]) for name in _few(graph, fields, "_mesh_dim_names"))


def _layout(graph: Graph, ref: Ref) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return sizes and strides of each mesh dimension, [] if unknown. Before torch 2.13, one tuple has all sizes."""
    layout = named_attributes(graph, ref)
    parts: dict[str, list[tuple[int, ...]]] = {"shape": [], "stride": []}
    for name, values in parts.items():
        refs = [named_attributes(graph, axis).get(name, -1) for axis in _few(graph, layout, "axes")]
        refs = refs or list(_few(graph, layout, name))
        whole = [_integers(graph, item) if item >= 0 and _number(graph.nodes[item]) < 0 else None for item in refs]
        single = [_number(graph.nodes[item]) if item >= 0 else -1 for item in refs]
        values += [part if part is not None else (number,) for part, number in zip(whole, single)]
    sizes, strides = parts["shape"], parts["stride"]
    known = [len(size) == len(stride) and min(size + stride, default=0) >= 0 for size, stride in zip(sizes, strides)]
    return (sizes, strides) if len(sizes) == len(strides) and all(known) else ([], [])


def _offset(place: Sequence[int], sizes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]) -> int:
    total = 0
    for at, size, stride in zip(place, sizes, strides):
        for count, step in zip(reversed(size), reversed(stride)):
            at, index = divmod(at, max(count, 1))
            total += index * step
    return total


def _cached(graph: Graph, what: str, ref: Ref, read: Callable[[Ref], Any]) -> Any:
    """Read a node once: most tensors share their mesh and placements."""
    if (what, ref) not in graph.cache:
        graph.cache[what, ref] = read(ref)
    return graph.cache[what, ref]


def _read_placement(graph: Graph, ref: Ref) -> Placement:
    """Read ``Shard(0)``, ``Replicate()`` or ``Partial(sum)``; the text nearly equals torch's."""
    fields = named_attributes(graph, ref)
    name = class_name(graph, ref).rpartition(".")[2]
    dim = _number(_value(graph, fields, "dim"))
    pieces = _number(_value(graph, fields, "split_factor")) if "split_factor" in fields else 1
    words = [str(dim)] * (dim >= 0) + [str(pieces)] * ("split_factor" in fields)
    words += [_name(reduced)] if (reduced := _value(graph, fields, "reduce_op")) else []
    return Placement(f"{cut(name, _MAX_NAME)}({', '.join(words)})", dim, pieces)


def _sharded_tensor(reader: TensorReader, state: Ref, tensor: Tensor) -> Sharding | None:
    graph = reader.graph
    members = list_items(graph.nodes[state])
    if len(members) != 5:  # shards, metadata, group, specification, remote references
        return None
    parts = []
    for shard in local_shards(graph, state):
        local = reader.tensor(shard["tensor"]) if "tensor" in shard else None
        if local is None:
            continue
        offsets = _integers(graph, _fields(graph, shard, "metadata").get("shard_offsets", -1))
        ranges = None
        if offsets is not None and len(offsets) == len(local.shape) == len(tensor.shape):
            ranges = tuple(((at, at + size),) if size else () for at, size in zip(offsets, local.shape))
        parts.append(ShardPart(shard["tensor"], local.shape, ranges))
    group, spec = named_attributes(graph, members[2]), named_attributes(graph, members[3])
    rank, size = _number(_value(graph, group, "global_rank")), _number(_value(graph, group, "local_world_size"))
    world = _number(_value(graph, group, "global_world_size"))
    name = class_name(graph, members[3]).rpartition(".")[2].removesuffix("ShardingSpec") or "unknown"
    dim = _number(_value(graph, spec, "dim"))
    placement = cut(name, _MAX_NAME) + (f"({dim})" if dim >= 0 else "")
    members = tuple(range(size)) if 0 < size == world <= _MAX_RANKS else ()
    mesh = Mesh(tensor.location, (), (size,) if size > 0 else (), members, max(world, 0))
    return Sharding("ShardedTensor", tuple(parts), (placement,), mesh, rank)


def _fields(graph: Graph, fields: dict[str, Ref], name: str) -> dict[str, Ref]:
    return named_attributes(graph, fields[name]) if name in fields else {}


def _value(graph: Graph, fields: dict[str, Ref], name: str) -> Node:
    return graph.nodes[fields[name]] if name in fields else None


def _few(graph: Graph, fields: dict[str, Ref], name: str) -> tuple[Ref, ...]:
    refs = list_items(_value(graph, fields, name))
    return refs if len(refs) <= LIMITS.dimensions else ()


def _integers(graph: Graph, ref: Ref, most: int = LIMITS.dimensions) -> tuple[int, ...] | None:
    """Return the sizes in a list or tuple with at most ``most`` elements; None for anything else."""
    node = graph.nodes[ref] if ref >= 0 else None
    refs = list_items(node)
    values = tuple(_number(graph.nodes[item]) for item in refs) if len(refs) <= most else (-1,)
    return values if -1 not in values and (values or node == ()) else None


def _name(node: Node) -> str:
    return cut(node, _MAX_NAME) if type(node) is str else ""


def _number(node: Node) -> int:
    return node if type(node) is int and 0 <= node < 1 << 62 else -1
