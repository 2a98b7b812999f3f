"""What an output promises, as data: made of the checkpoint, never of the plan, which is what it is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import Manifest
from ..checkpoint.graph_editor import used_storages
from ..checkpoint.tensors import TensorReader
from ..pickles.nodes import Graph, Ref

#: By name, what is required of a tensor.
Facts: TypeAlias = Mapping[str, tuple[object, ...]]


class Promise(NamedTuple):
    """What a reader must find in the output.

    ``format`` is that of the file. ``graph`` is the object; with ``storages`` these may have other keys, one for each,
    and hold so many bytes with that checksum (None where nothing is on record), and ``beside`` are all other records
    in its folder. ``manifest`` is what is stored beside the object, but for the names in ``replaced``, and those in
    ``dropped`` (in lower case) may be gone. ``pickles`` are those of records by their names. ``tensors`` are facts by
    name, ``leaves`` the objects that are items of their own, ``texts`` the texts beside the tensors. ``odd`` are the
    codes of problems that the input has, too; not ``checked``, its places are as odd as those of the input. ``known``
    gives the graph of a pickle that is the input's but for texts.
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
    leaves: Mapping[str, Graph] | None = None
    texts: Mapping[str, str] | None = None
    byteorder: str = ""
    odd: frozenset[str] = frozenset()
    checked: bool = True
    known: Callable[[bytes], Graph | None] | None = None


def storage_facts(checkpoint: Checkpoint, graph: Graph) -> dict[str, tuple[int, int | None]]:
    """The bytes of every storage that an object uses, and their checksum where one is on record."""
    crcs = {record.key: record.crc for record in checkpoint.container.records() if record.key}
    found: dict[str, tuple[int, int | None]] = {}
    for key in used_storages(graph, checkpoint.path):
        body = checkpoint.body(key)
        if body is not None:
            found[key] = body.size, (body.crc if key in checkpoint.added else crcs.get(key)) or None
    return found


def tensor_facts(items: Iterable[tuple[str, Ref]], reader: TensorReader, size: Callable[[str], int | None]) -> Facts:
    """All that makes tensors what they are, but for their values: which of them share memory, too."""
    numbers: dict[str, int] = {}
    found: dict[str, tuple[object, ...]] = {}
    for name, ref in sorted(items):
        tensor = reader.tensor(ref)
        facts: list[object] = []
        for part in reader.parts(tensor) if tensor else ():
            known = reader.storages.get(part.storage)
            held = known is not None and known.nbytes > 0
            facts += part._replace(storage="", parts=())
            facts += (numbers.setdefault(part.storage, len(numbers)), size(part.storage)) if held else (-1, 0)
        found[name] = tuple(facts)
    return found
