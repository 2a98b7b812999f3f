"""A bare pickle of NumPy arrays, as ``pickle.dump`` of a dict of arrays writes it: weights of detectron2 and others.

``torch.load`` refuses it; ``sanitize`` converts the arrays to tensors. ``foreign`` names other bare pickles.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from ..base.errors import PickleError, RefusedError
from ..base.findings import Finding
from ..base.limits import LIMITS
from ..base.steps import OUTPUT, advice
from ..checkpoint.container import Container, FoundPickle, StorageLocation, StoredRecord, Traits
from ..files.sources import AppendPlan, Plan, Source, Span
from ..pickles.decode import Decoded, decode
from ..pickles.nodes import Extension, Global
from .search.pickle_search import nested_pickles

#: The globals of pickled arrays. A pickle with any other global does not only hold arrays.
_ARRAY: Final = r"numpy\.(?:_?core\.(?:multiarray\._reconstruct|numeric\._frombuffer)|ndarray)"
_VALUES: Final = r"numpy\.(?:dtype|_?core\.multiarray\.scalar)|_codecs\.encode|(?:__builtin__|builtins)\.bytes"
_PLAIN: Final = rf"(?:{_ARRAY}|{_VALUES}|collections\.OrderedDict)\Z"
#: The first array names NumPy within this many bytes.
_SEARCHED: Final = 1 << 16


class NumpyPickle(Container):
    """The pickle. An edit writes it as a torch.save zip."""

    format = "numpy-pickle"
    traits = Traits(no_checksums="a bare pickle", writes_as="torch", legacy_name="bare pickle")
    writer = "pickle.dump"

    def __init__(self, source: Source, decoded: Decoded) -> None:
        self.source = source
        self.graph = decoded.graph
        what = "it is a bare pickle of NumPy arrays, written by pickle.dump: torch.load refuses it"
        self.problems = [Finding.of("bare-pickle", "warning", what, refused=True)]

    @property
    def pickle(self) -> bytes:
        return self.source.read(0, self.source.size)

    def stored(self, key: str) -> StorageLocation:
        return StorageLocation(None, 0)

    def records(self) -> Iterator[StoredRecord]:
        yield StoredRecord("the pickle", Span(self.source, 0, self.source.size), self.source.size, None, False, "")

    def pickles(self, *, quick: bool = False) -> Iterator[FoundPickle]:
        yield FoundPickle("pickle 1", self.graph)
        yield from nested_pickles(self.graph, "pickle 1")

    def plan(self, pickle: bytes | None) -> Plan:
        if pickle is not None:
            raise AssertionError("a bare pickle is not written again: an edit makes a zip")
        return Plan((Span(self.source, 0, self.source.size),))

    def append(self, pickle: bytes, keys: Sequence[str], gone: Collection[str], edit: str, time: int) -> AppendPlan:
        what = "a bare pickle is read only"
        raise RefusedError(
            what, path=self.source.name, next=advice("write a new file with ", OUTPUT, ", which is a zip")
        )


def sniff(head: bytes, source: Source) -> bool:
    """Return whether a source is one pickle with arrays and no other classes."""
    return _decoded(source) is not None


def read(source: Source) -> NumpyPickle:
    """Read a pickle that was recognised."""
    decoded = _decoded(source)
    assert decoded is not None
    return NumpyPickle(source, decoded)


def _decoded(source: Source) -> Decoded | None:
    """Return the decoded pickle, or None for any other source."""
    if source.size > LIMITS.pickle_bytes or b"numpy" not in source.read(0, _SEARCHED):
        return None
    try:
        decoded: Decoded = decode(source.read(0, source.size))
    except PickleError:
        return None
    nodes = decoded.graph.nodes
    names = {f"{node.module}.{node.name}" for node in nodes if type(node) is Global}
    plain = all(re.match(_PLAIN, name) for name in names) and not any(type(node) is Extension for node in nodes)
    arrays = any(re.match(_ARRAY, name) for name in names)
    if not (plain and arrays and decoded.end == source.size):
        return None
    from .foreign.frameworks import foreign_pickle  # only for pickles of arrays

    return decoded if foreign_pickle(nodes, source) is None else None
