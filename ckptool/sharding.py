"""A DTensor in a file of torch.save: the part that one rank had, and what it is a part of.

Source: ``DTensor`` and ``DTensorSpec`` (torch/distributed/tensor/_api.py, _dtensor_spec.py), ``DeviceMesh``
(torch/distributed/device_mesh.py).
"""

from __future__ import annotations

from typing import NamedTuple

from .objects import attributes, class_name, elements, mapping
from .pickles.nodes import Call, Graph, Ref
from .tensors import Tensor, TensorReader

__all__ = ["Sharding", "is_sharded", "sharding"]


class Sharding(NamedTuple):
    """``local_shape`` is that of the part in the file; ``placements`` say for each dimension of the mesh how it was
    cut, such as "Shard(0)"; ``device`` is the kind of device of the mesh, ``names`` those of its dimensions, ``ranks``
    how many there are (0: not known)."""

    local_shape: tuple[int, ...]
    placements: tuple[str, ...]
    device: str
    names: tuple[str, ...]
    ranks: int


def is_sharded(tensor: Tensor) -> bool:
    """Is it what a rank had of a larger tensor?"""
    return tensor.kind == "wrapper" and tensor.cls.startswith("torch.distributed.")


def sharding(reader: TensorReader, ref: Ref, tensor: Tensor) -> Sharding | None:
    """What a DTensor is a part of; None for another tensor."""
    if not is_sharded(tensor):
        return None
    graph = reader.graph
    held = _state(graph, ref)
    local = reader.tensor(held["_local_tensor"]) if "_local_tensor" in held else None
    spec = _attributes(graph, held["_spec"]) if "_spec" in held else {}
    mesh = _attributes(graph, spec["mesh"]) if "mesh" in spec else {}
    if local is None or not spec:
        return None
    placements = tuple(_placement(graph, part) for part in elements(graph.nodes[spec.get("placements", ref)]))
    device = graph.nodes[mesh["_device_type"]] if "_device_type" in mesh else ""
    names = elements(graph.nodes[mesh["_mesh_dim_names"]]) if "_mesh_dim_names" in mesh else ()
    known = mesh.get("mesh", -1)
    older = reader.tensor(known) if known >= 0 else None  # torch 2.8 and earlier: a tensor of ranks
    flat = elements(graph.nodes[mesh["_flatten_rank_map"]]) if "_flatten_rank_map" in mesh else ()
    ranks = older.numel if older else len(flat)
    return Sharding(
        local.shape,
        placements,
        device if isinstance(device, str) else "",
        tuple(str(graph.nodes[name]) for name in names),
        ranks,
    )


def _state(graph: Graph, ref: Ref) -> dict[str, Ref]:
    """What ``_rebuild_from_type_v2`` puts into the object: its last argument, (dict, slots) or a dict."""
    node = graph.nodes[ref]
    args = elements(graph.nodes[node.args]) if isinstance(node, Call) else ()
    if len(args) != 4:  # function, type, arguments, state
        return {}
    state = graph.nodes[args[3]]
    parts = state if isinstance(state, tuple) else (args[3],)
    return {str(graph.nodes[key]): value for part in parts for key, value in mapping(graph, part) or ()}


def _attributes(graph: Graph, ref: Ref) -> dict[str, Ref]:
    node = graph.nodes[ref]
    return {str(graph.nodes[key]): value for key, value in attributes(graph, node)} if isinstance(node, Call) else {}


def _placement(graph: Graph, ref: Ref) -> str:
    """``Shard(0)``, ``Replicate()``, as torch writes them."""
    held = _attributes(graph, ref)
    dim = graph.nodes[held["dim"]] if "dim" in held else None
    return f"{class_name(graph, ref).rpartition('.')[2]}({dim if type(dim) is int else ''})"
