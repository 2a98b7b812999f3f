"""Recognise a small file that is one pickle of plain data and nothing else, before any search for other content."""

from __future__ import annotations

from typing import Final

from ..base.errors import PickleError
from ..files.compressed import compression_of
from ..files.sources import BytesSource, Source
from ..pickles.decode import decode
from ..pickles.nodes import Dict, Graph, List
from ..safety.held_configuration import may_be_configuration
from . import BARE_PICKLE, FORMATS
from .foreign.frameworks import foreign_pickle
from .foreign.identification import explain_before_pickle
from .search.graph_parts import suspects
from .search.inert import active_parts

#: The most bytes of such a file. A larger one is rare, and its search costs little per byte.
_MOST: Final = 1 << 16
#: Endings of files that belong to a folder which is the checkpoint.
_PARTS: Final = (".distcp", ".metadata")
#: The bytes that begin the end record of a zip archive, which may be in any string.
_ZIP_END: Final = b"PK\x05\x06"
_PLAIN: Final = frozenset((type(None), bool, int, float, str, bytes, tuple, List, Dict))


def is_plain_pickle(source: Source) -> bool:
    """Return whether a file holds exactly one pickle of plain data, and no program takes it for anything else.

    Such a file has the kind "pickle". Its pickle names nothing, its strings and bytes hold neither pickles nor
    configuration, and the file fits no other format, so a search would find nothing that could run.
    """
    if source.size > _MOST or source.name.endswith(_PARTS):
        return False
    data = source.read(0, source.size)
    graph = _plain_graph(data)
    if graph is None or _ZIP_END in data or may_be_configuration(graph.strings):
        return False
    if any(True for _ in suspects(graph.strings, [value for _, value in graph.of_type(bytes)])):
        return False
    name = source.name
    whole, head = BytesSource(data, name), data[:1024]
    if compression_of(head) is not None or active_parts(name, head[:512], whole):
        return False
    if any(known.sniff(head, whole) for known in FORMATS if known.name != BARE_PICKLE):
        return False
    # Without a class, it has no tensors or arrays, so it is not the format BARE_PICKLE either.
    return explain_before_pickle(head, whole) is None and foreign_pickle((), whole) is None


def _plain_graph(data: bytes) -> Graph | None:
    """Return the graph of a pickle of constants, strings, bytes, tuples, lists and dicts alone that is all of ``data``;
    None for other bytes.
    """
    if data[:1] != b"\x80":
        return None  # other programs write texts that protocols 0 and 1 take for a pickle
    try:
        graph, end, memo = decode(data)
    except PickleError:
        return None
    usual = end == len(data) and memo <= len(data) and not graph.oddities
    return graph if usual and _PLAIN.issuperset(map(type, graph.nodes)) else None
