"""The state of a tensor that holds others: what one rank had of a tensor that is spread over several, for one.

Sources: ``_rebuild_from_type_v2`` (torch/_tensor.py), ``ShardedTensor.__getstate__`` and ``Shard``
(torch/distributed/_shard/sharded_tensor/api.py, shard.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from .objects import attributes, class_name, elements, mapping
from .pickles.nodes import Call, Graph, Ref

__all__ = ["held_values", "local_shards", "named_attributes"]

#: The class of a local shard; torch 1.10 had it elsewhere.
_SHARDS: Final = frozenset(
    f"torch.distributed.{module}.Shard"
    for module in ("_shard.sharded_tensor.shard", "_sharded_tensor.api", "_shard.sharded_tensor.api")
)


def held_values(graph: Graph, state: Ref) -> Iterator[Ref]:
    """What may be a tensor in the state of a wrapper: the values of a dict, or of (dict, slots), or local shards."""
    node = graph.nodes[state]
    for part in node if type(node) is tuple else (state,):
        yield from (value for _, value in mapping(graph, part) or ())
    yield from (shard["tensor"] for shard in local_shards(graph, state) if "tensor" in shard)


def local_shards(graph: Graph, state: Ref) -> list[dict[str, Ref]]:
    """The shards of a ShardedTensor in its state, (shards, metadata, group, spec, rrefs): "tensor" and "metadata"."""
    parts = graph.nodes[state]
    shards = elements(graph.nodes[parts[0]]) if type(parts) is tuple and parts else ()
    return [named_attributes(graph, shard) for shard in shards if class_name(graph, shard) in _SHARDS]


def named_attributes(graph: Graph, ref: Ref) -> dict[str, Ref]:
    """The attributes of an object by their names; nothing for what is no object."""
    node = graph.nodes[ref]
    pairs = attributes(graph, node) if isinstance(node, Call) else ()
    return {name: value for key, value in pairs if type(name := graph.nodes[key]) is str}
