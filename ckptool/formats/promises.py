"""Promises of outputs, as data. They are derived from the checkpoint, never from the plan that they check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from ..base.records import NamedTuple
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import Manifest
from ..checkpoint.graph_editor import used_storages
from ..checkpoint.tensors import TensorReader
from ..pickles.nodes import Graph, Ref

#: For each tensor name, the facts that the output must keep.
Facts: TypeAlias = Mapping[str, tuple[object, ...]]


class Promise(NamedTuple):
    """The content that a reader must find in an output. None or empty fields are not checked.

    - ``format``, ``graph``: the format of the file and the root object.
    - ``storages``: sizes in bytes and checksums (None if not recorded) by key. Keys may be renamed one to one.
    - ``beside``: all records of the archive's folder other than storages.
    - ``manifest``: the other stored entries. Names in ``replaced`` may differ; names in ``dropped`` (lower case) may be
      missing.
    - ``pickles``: further graphs by record name.
    - ``tensors``: facts by tensor name.
    - ``leaves``: objects that are separate items.
    - ``texts``: strings stored in the metadata.
    - ``odd``: codes of problems that the input already has.
    - ``checked``: whether the places of records are checked. False if the input's own places may be unusual.
    - ``known``: returns the graph of a pickle that differs from the input's in strings only, or None for any other.
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
    """Return the size in bytes and recorded checksum (or None) of every storage that an object uses."""
    bodies = {key: checkpoint.body(key) for key in used_storages(graph, checkpoint.path)}
    copied = not bodies.keys() <= checkpoint.added.keys()
    crcs = {record.key: record.crc for record in checkpoint.container.outer_records() if record.key} if copied else {}
    return {
        key: (body.size, (body.crc if key in checkpoint.added else crcs.get(key)) or None)
        for key, body in bodies.items()
        if body is not None
    }


def tensor_facts(items: Iterable[tuple[str, Ref]], reader: TensorReader, size: Callable[[str], int | None]) -> Facts:
    """Return everything about tensors except their values, including which of them share memory."""
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
