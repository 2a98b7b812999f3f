"""Promises of outputs, as data: derived from the checkpoint, never from the plan, which they check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import Manifest
from ..checkpoint.graph_editor import used_storages
from ..checkpoint.tensors import TensorReader
from ..pickles.nodes import Graph, Ref

#: The required facts of tensors, by name.
Facts: TypeAlias = Mapping[str, tuple[object, ...]]


class Promise(NamedTuple):
    """The contents that a reader must find in the output; None or empty for what is not promised.

    ``format`` is that of the file, ``graph`` the object. ``storages`` are sizes in bytes and checksums (None where none
    is on record) by keys, which may differ in the output, one to one; ``beside`` are then all other records of its
    folder. ``manifest`` lists what is stored beside the object, except for the names in ``replaced``; those in
    ``dropped`` (in lower case) may be missing. ``pickles`` are graphs by the names of their records. ``tensors`` are
    facts by name, ``leaves`` objects that are items of their own, ``texts`` strings beside the tensors. ``odd`` are the
    codes of problems that the input has as well. Where ``checked`` is false, the places of records are not checked, as
    they may be as odd as in the input. ``known`` returns the graph of a pickle that differs from the input's in strings
    alone, None for any other.
    """

    format: str
    graph: Graph | None = None
    beside: frozenset[str] | None = None
    storages: Mapping[str, tuple[int, int | None]] | None = None
    manifest: Manifest | None = None
    replaced: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    pickles: Mapping[str, Graph] = MappingProxyType({})
    tensors: Facts | None = None
    leaves: Mapping[str, Graph] = MappingProxyType({})
    texts: Mapping[str, str] | None = None
    byteorder: str = ""
    odd: frozenset[str] = frozenset()
    checked: bool = True
    known: Callable[[bytes], Graph | None] | None = None


def storage_facts(checkpoint: Checkpoint, graph: Graph) -> dict[str, tuple[int, int | None]]:
    """Return the size in bytes of every storage that an object uses, and its checksum where one is on record."""
    crcs = {record.key: record.crc for record in checkpoint.container.outer_records() if record.key}
    bodies = ((key, checkpoint.body(key)) for key in used_storages(graph, checkpoint.path))
    return {
        key: (body.size, (body.crc if key in checkpoint.added else crcs.get(key)) or None)
        for key, body in bodies
        if body is not None
    }


def tensor_facts(items: Iterable[tuple[str, Ref]], reader: TensorReader, size: Callable[[str], int | None]) -> Facts:
    """Return all that makes tensors what they are, except for their values: which of them share memory, too."""
    numbers: dict[str, int] = {}
    tensors: dict[str, tuple[object, ...]] = {}
    for name, ref in sorted(items):
        tensor = reader.tensor(ref)
        facts: list[object] = []
        for part in reader.parts(tensor) if tensor else ():
            storage = reader.storages.get(part.storage)
            filled = storage is not None and storage.nbytes > 0
            facts += part._replace(storage="", parts=())
            facts += (numbers.setdefault(part.storage, len(numbers)), size(part.storage)) if filled else (-1, 0)
        tensors[name] = tuple(facts)
    return tensors
