"""Tensors that are spread over ranks, in a file of torch.save: the part that one rank had, and what it is a part of.

Sources: ``DTensor`` and ``DTensorSpec`` (torch/distributed/tensor/_api.py, _dtensor_spec.py), ``DeviceMesh``
(torch/distributed/device_mesh.py), placement_types.py for what a placement cuts; ``ShardedTensor.__getstate__``
(torch/distributed/_shard/sharded_tensor/api.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

from ..base.limits import LIMITS
from ..base.text import counted, cut, listed
from ..pickles.nodes import Graph, Node, Ref
from .objects import class_name, elements, local_shards, mapping, named_attributes
from .survey import TensorEntry
from .tensors import Tensor, TensorReader, rebuild_calls

# -- Which indices of a tensor a rank has, by its place in a mesh: chunks of chunks

#: (begin, end) in a dimension of the whole tensor.
Range: TypeAlias = tuple[int, int]

#: Stretches of one dimension that are followed; torch makes as many as an inner dimension of the mesh has ranks.
_STRETCHES: Final = 256
#: Dimensions of a mesh.
_MESH: Final = 64


class Cut(NamedTuple):
    """A placement: its text, and the dimension that it cuts, -1 for none; into how many pieces it is cut before."""

    words: str
    dim: int = -1
    pieces: int = 1


def ranges_of(
    shape: tuple[int, ...], mesh: tuple[int, ...], place: tuple[int, ...], cuts: Sequence[Cut]
) -> tuple[tuple[Range, ...], ...] | None:
    """The indices of each dimension that the rank at ``place`` of the mesh has; None where that cannot be said.

    Each placement cuts what those before it left over.
    """
    if not len(mesh) == len(place) == len(cuts) <= _MESH:
        return None
    found: list[list[Range]] = [[(0, size)] if size else [] for size in shape]
    for one, size, at in zip(cuts, mesh, place):
        if one.dim < 0:
            continue
        if one.dim >= len(shape) or not 0 <= at < size:
            return None
        ranges = found[one.dim]
        if not 0 < max(len(ranges), 1) * one.pieces <= _STRETCHES:
            return None
        pieces = [_chunk(ranges, one.pieces, number) for number in range(one.pieces)]
        found[one.dim] = _joined(stretch for piece in pieces for stretch in _chunk(piece, size, at))
    return tuple(tuple(ranges) for ranges in found)


def _chunk(ranges: list[Range], count: int, number: int) -> list[Range]:
    """Of some stretches, laid end to end, one of so many chunks, as ``torch.chunk`` cuts them."""
    total = length(ranges)
    size = -(-total // count)
    begin, end = min(size * number, total), min(size * (number + 1), total)
    found = []
    at = 0
    for low, high in ranges:
        first, last = max(begin, at), min(end, at + high - low)
        if first < last:
            found.append((low + first - at, low + last - at))
        at += high - low
    return found


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Stretches that touch as one."""
    found: list[Range] = []
    for begin, end in ranges:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def length(ranges: Iterable[Range]) -> int:
    """How many indices these are."""
    return sum(end - begin for begin, end in ranges)


#: Characters of a name that are kept: it is told for every tensor.
_NAME: Final = 40


class Mesh(NamedTuple):
    """The ranks that a tensor is spread over: the kind of device, names and sizes of the dimensions.

    A ShardedTensor has one dimension, its process group. ``shape`` is () where it is not known.
    """

    device: str
    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """How many ranks there are, 0 where that is not known."""
        return prod(self.shape) if self.shape else 0

    @property
    def report(self) -> dict[str, Any]:
        """The mesh as reports in JSON have it."""
        return {"device": self.device, "names": list(self.names), "shape": list(self.shape), "ranks": self.ranks}

    @property
    def words(self) -> str:
        """Such as "dp=2, tp=4 on cuda", "2x4 on cuda"."""
        sizes = [str(size) for size in self.shape]
        named = len(self.names) == len(sizes)
        where = f" on {self.device}" if self.device else ""
        if not sizes:
            return f"a mesh{where}"
        if len(sizes) == 1 and not named:
            return f"{counted(self.shape[0], 'rank')}{where}"
        return (", ".join(map("=".join, zip(self.names, sizes))) if named else "x".join(sizes)) + where


class Part(NamedTuple):
    """A stretch of the whole tensor that is in the file: its tensor, and for each dimension the indices that it has.

    ``ranges`` is None where that is not known.
    """

    ref: Ref
    shape: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...] | None

    def offsets(self, whole: tuple[int, ...]) -> tuple[int, ...] | None:
        """Where it begins in the whole tensor; None where it is several blocks, or unknown. As in torch, a dimension
        of which it has nothing is begun at its end."""
        if self.ranges is None or any(len(ranges) > 1 for ranges in self.ranges):
            return None
        return tuple(ranges[0][0] if ranges else size for ranges, size in zip(self.ranges, whole))

    def slices(self, whole: tuple[int, ...]) -> str:
        """The indices as one writes them, such as "[2:4, :]"; "" where they are not known or there is none."""
        if self.ranges is None or 0 in self.shape:
            return ""
        texts = []
        for ranges, size in zip(self.ranges, whole):
            text = "+".join(f"{begin}:{end}" for begin, end in ranges[:3]) + ("+..." if len(ranges) > 3 else "")
            texts.append(":" if ranges == ((0, size),) else text)
        return f"[{', '.join(texts) or '...'}]"


class Sharding(NamedTuple):
    """``kind`` is "DTensor" or "ShardedTensor"; ``parts`` are those in the file.

    ``placements`` say for each dimension of the mesh how it was cut, such as "Shard(0)"; those of a ShardedTensor are
    its specification, "Chunk(0)" or "Enumerable". ``rank`` is the number of the process that saved it, -1 for unknown.
    ``parameter`` says that it is an nn.Parameter as well.
    """

    kind: str
    parts: tuple[Part, ...]
    placements: tuple[str, ...]
    mesh: Mesh
    rank: int
    parameter: bool = False

    @property
    def local_shape(self) -> tuple[int, ...] | None:
        """The shape of the one part, None where there are several or none."""
        return self.parts[0].shape if len(self.parts) == 1 else None

    def is_whole(self, whole: tuple[int, ...]) -> bool:
        """Is the whole tensor in the file, and not a term of a sum that is still to be taken?"""
        return self.local_shape == whole and not any(text.startswith("Partial") for text in self.placements)

    @property
    def here(self) -> str:
        """The shapes of the parts in the file: "2x6", "nothing"."""
        return listed(["x".join(map(str, part.shape)) or "scalar" for part in self.parts]) or "nothing"

    def slices(self, whole: tuple[int, ...]) -> str:
        """The indices of the parts as one writes them, "" where they are not known."""
        return listed([text for part in self.parts if (text := part.slices(whole))])

    @property
    def words(self) -> str:
        """How it is spread: "Shard(0) over dp=4 on cuda"."""
        return f"{', '.join(self.placements)} over {self.mesh.words}"


class Spread(NamedTuple):
    """The sharded tensors of a file together: how many, how many of them not whole in it, of which kinds, saved by
    which ranks, over which meshes."""

    tensors: int
    partial: int
    kinds: tuple[str, ...]
    ranks: tuple[int, ...]
    meshes: tuple[Mesh, ...]

    @property
    def owner(self) -> str:
        """ "rank 1 of 4", as far as it is known."""
        most = max((mesh.ranks for mesh in self.meshes), default=0)
        if len(self.ranks) != 1:
            return f"one rank of {most}" if most else "one rank"
        return f"rank {self.ranks[0]}" + (f" of {most}" if most > self.ranks[0] else "")

    @property
    def words(self) -> str:
        """ "16 tensors (DTensor) as rank 1 of 4 had them, spread over dp=4 on cpu"."""
        had = f"{counted(self.tensors, 'tensor')} ({listed(list(self.kinds))}) as {self.owner} had them"
        return f"{had}, spread over {self.over}" + ("" if self.partial else ", all of them whole")

    @property
    def over(self) -> str:
        """ "dp=2, tp=4 on cuda", and others where there are several."""
        return listed([mesh.words for mesh in self.meshes], most=3)


def is_sharded(tensor: Tensor) -> bool:
    """Is it what a rank had of a larger tensor?"""
    module, _, name = tensor.cls.rpartition(".")
    return tensor.kind == "wrapper" and module.startswith("torch.distributed.") and name in ("DTensor", "ShardedTensor")


def spread(reader: TensorReader, entries: Iterable[TensorEntry]) -> Spread | None:
    """The sharded tensors among these; None where there is none."""
    number = partial = 0
    kinds: dict[str, None] = {}
    ranks: dict[int, None] = {}
    meshes: dict[Mesh, None] = {}
    for entry in entries:
        found = sharding(reader, entry.ref, entry.tensor)
        if found is not None:
            number += 1
            partial += not found.is_whole(entry.tensor.shape)
            kinds[found.kind] = meshes[found.mesh] = None
            if found.rank >= 0:
                ranks[found.rank] = None
    return Spread(number, partial, tuple(kinds), tuple(ranks), tuple(meshes)) if number else None


def sharding(reader: TensorReader, ref: Ref, tensor: Tensor) -> Sharding | None:
    """What a DTensor or ShardedTensor is a part of; None for another tensor."""
    if not is_sharded(tensor):
        return None
    state = _state(reader.graph, ref)
    if state < 0:
        return None
    if tensor.cls.endswith("ShardedTensor"):
        return _sharded_tensor(reader, state, tensor)
    return _dtensor(reader, state, tensor)


def spread_state(reader: TensorReader, ref: Ref, tensor: Tensor) -> dict[str, Ref]:
    """What says which part a spread tensor is, and its parts, by name: without the rest that torch keeps, its hashes
    and the names of process groups. {} for another tensor."""
    found = sharding(reader, ref, tensor)
    if found is None:
        return {}
    graph, state = reader.graph, _state(reader.graph, ref)
    if found.kind == "ShardedTensor":
        held = elements(graph.nodes[state])
        named = {".sharding_spec": held[3]}
        for number, shard in enumerate(local_shards(graph, state)):
            placed = named_attributes(graph, shard["metadata"]) if "metadata" in shard else {}
            at = f".local_shards[{number}]"
            named |= {f"{at}.offsets": placed["shard_offsets"]} if "shard_offsets" in placed else {}
            named |= {f"{at}.tensor": shard["tensor"]} if "tensor" in shard else {}
        return named
    spec = named_attributes(graph, _held(graph, state)["_spec"])
    mesh = named_attributes(graph, spec["mesh"]) if "mesh" in spec else {}
    named = {".local_tensor": found.parts[0].ref}
    named |= {".placements": spec["placements"]} if "placements" in spec else {}
    return named | {f".mesh{name}": mesh[key] for key, name in _TOLD.items() if key in mesh}


#: What of a mesh says which part a tensor is.
_TOLD: Final = {
    "_device_type": ".device_type",
    "_layout": ".layout",
    "_mesh_dim_names": ".dim_names",
    "_rank": ".rank",
    "_coordinate_on_dim": ".coordinate",
}


def _held(graph: Graph, state: Ref) -> dict[str, Ref]:
    """What is in (dict, slots), or in a dict, by name."""
    node = graph.nodes[state]
    pairs = [pair for part in (node if type(node) is tuple else (state,)) for pair in mapping(graph, part) or ()]
    return {name: value for key, value in pairs if type(name := graph.nodes[key]) is str}


def _state(graph: Graph, ref: Ref) -> Ref:
    """The last argument of ``_rebuild_from_type_v2``, in a Parameter or not; -1 for none."""
    call = next((call for call in rebuild_calls(graph, ref) if not call.is_parameter), None)
    return call.state if call is not None else -1


# -- DTensor ----------------------------------------------------------------------------------------------------------


def _dtensor(reader: TensorReader, state: Ref, tensor: Tensor) -> Sharding | None:
    graph = reader.graph
    held = _held(graph, state)
    local = reader.tensor(held["_local_tensor"]) if "_local_tensor" in held else None
    spec = named_attributes(graph, held["_spec"]) if "_spec" in held else {}
    if local is None or not spec:
        return None
    described = named_attributes(graph, spec["mesh"]) if "mesh" in spec else {}
    mesh = _mesh(reader, described)
    cuts = [_cut(graph, part) for part in (_few(graph, spec["placements"]) if "placements" in spec else ())]
    place = _integers(graph, described["_coordinate_on_dim"]) if "_coordinate_on_dim" in described else None
    ranges = ranges_of(tensor.shape, mesh.shape, place, cuts) if place is not None else None
    if ranges is not None and tuple(length(each) for each in ranges) != local.shape:
        ranges = None  # made of parts that nobody asked to be even: DTensor.from_local
    rank = graph.nodes[described["_rank"]] if "_rank" in described else -1
    # torch/nn/parameter.py: a Parameter of another class than Tensor is one by this attribute.
    parameter = "_is_param" in held and graph.nodes[held["_is_param"]] is True
    part = Part(held["_local_tensor"], local.shape, ranges)
    return Sharding("DTensor", (part,), tuple(one.words for one in cuts), mesh, _number(rank), parameter)


def _mesh(reader: TensorReader, held: dict[str, Ref]) -> Mesh:
    graph = reader.graph
    device = graph.nodes[held["_device_type"]] if "_device_type" in held else ""
    names = _few(graph, held["_mesh_dim_names"]) if "_mesh_dim_names" in held else ()
    shape: tuple[int, ...] | None = None
    if "_layout" in held:
        layout = named_attributes(graph, held["_layout"])
        axes = _few(graph, layout["axes"]) if "axes" in layout else ()
        sizes = [_integers(graph, named_attributes(graph, axis).get("shape", axis)) for axis in axes]
        if axes and None not in sizes:
            shape = tuple(prod(size) for size in sizes if size is not None)
        elif "shape" in layout:
            shape = _integers(graph, layout["shape"])
    elif "mesh" in held:  # torch 2.8 and earlier: a tensor of ranks
        ranks = reader.tensor(held["mesh"])
        shape = ranks.shape if ranks is not None else None
    return Mesh(_name(device), tuple(_name(graph.nodes[name]) for name in names), shape or ())


def _cut(graph: Graph, ref: Ref) -> Cut:
    """``Shard(0)``, ``Replicate()``, ``Partial(sum)``, nearly as torch writes them."""
    held = named_attributes(graph, ref)
    name = class_name(graph, ref).rpartition(".")[2]
    dim = _number(graph.nodes[held["dim"]]) if "dim" in held else -1
    pieces = _number(graph.nodes[held["split_factor"]]) if "split_factor" in held else 1
    reduced = graph.nodes[held["reduce_op"]] if "reduce_op" in held else ""
    words = [str(dim)] if dim >= 0 else []
    words += [str(pieces)] if "split_factor" in held else []
    words += [_name(reduced)] if reduced else []
    return Cut(f"{cut(name, _NAME)}({', '.join(words)})", dim, pieces)


# -- ShardedTensor ----------------------------------------------------------------------------------------------------


def _sharded_tensor(reader: TensorReader, state: Ref, tensor: Tensor) -> Sharding | None:
    graph = reader.graph
    held = elements(graph.nodes[state])
    if len(held) != 5:  # shards, metadata, group, specification, remote references
        return None
    parts = []
    for shard in local_shards(graph, state):
        local = reader.tensor(shard["tensor"]) if "tensor" in shard else None
        if local is None:
            continue
        placed = named_attributes(graph, shard["metadata"]) if "metadata" in shard else {}
        offsets = _integers(graph, placed["shard_offsets"]) if "shard_offsets" in placed else None
        ranges = None
        if offsets is not None and len(offsets) == len(local.shape) == len(tensor.shape):
            ranges = tuple(((at, at + size),) if size else () for at, size in zip(offsets, local.shape))
        parts.append(Part(shard["tensor"], local.shape, ranges))
    group, spec = named_attributes(graph, held[2]), named_attributes(graph, held[3])
    rank = graph.nodes[group["global_rank"]] if "global_rank" in group else -1
    size = _number(graph.nodes[group["local_world_size"]]) if "local_world_size" in group else -1
    name = class_name(graph, held[3]).rpartition(".")[2].removesuffix("ShardingSpec") or "unknown"
    name = cut(name, _NAME)
    dim = _number(graph.nodes[spec["dim"]]) if "dim" in spec else -1
    placement = f"{name}({dim})" if dim >= 0 else name
    mesh = Mesh(tensor.location, (), (size,) if size > 0 else ())
    return Sharding("ShardedTensor", tuple(parts), (placement,), mesh, _number(rank))


def _integers(graph: Graph, ref: Ref) -> tuple[int, ...] | None:
    """Numbers in a list or tuple; None where something else is in it, or it is something else."""
    node = graph.nodes[ref]
    values = [_number(graph.nodes[item]) for item in _few(graph, ref)]
    return tuple(values) if -1 not in values and len(values) == len(elements(node)) and (values or node == ()) else None


def _few(graph: Graph, ref: Ref) -> tuple[Ref, ...]:
    """The references in a list or tuple of no more than a mesh or tensor has dimensions; nothing for a longer one."""
    refs = elements(graph.nodes[ref])
    return refs if len(refs) <= LIMITS.dimensions else ()


def _name(node: Node) -> str:
    return cut(node, _NAME) if type(node) is str else ""


def _number(node: Node) -> int:
    """A whole number that a size can be; -1 for anything else."""
    return node if type(node) is int and 0 <= node < 1 << 62 else -1
