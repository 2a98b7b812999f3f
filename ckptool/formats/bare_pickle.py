"""A bare pickle of tensors or NumPy arrays, as ``pickle.dump`` writes it: detectron2, StyleGAN, RLlib and others.

``torch.load`` refuses it; ``sanitize`` makes a torch file of it. ``foreign`` names other bare pickles. A pickled tensor
calls ``torch.storage._load_from_bytes`` with the bytes of a torch file that holds its storage
(``TypedStorage.__reduce__`` in torch/storage.py); such calls are read as storages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final

from ..base.errors import CkptoolError, PickleError
from ..base.findings import Finding
from ..base.lazy import regex
from ..base.limits import LIMITS
from ..checkpoint.container import Container, FoundPickle, StorageLocation, StoredRecord, Traits
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.objects import mapped_name
from ..checkpoint.survey import survey
from ..files.sources import BytesSource, Source, Span
from ..pickles.decode import Decoded, decode
from ..pickles.nodes import Call, Global, Graph, Persistent, Ref
from ..safety.calls import bytes_at
from .search.pickle_search import nested_pickles
from .torch import legacy_reader, zip_reader

#: What pickled arrays and tensors name within the first bytes of the pickle.
_NAMES: Final = (b"numpy", b"torch")
_SEARCHED: Final = 1 << 16
#: The functions that pickled arrays call, and the dtypes of numbers.
_ARRAY: Final = regex(r"numpy\.(?:_?core\.(?:multiarray\._reconstruct|numeric\._frombuffer)|ndarray)\Z")
_NUMBERS: Final = r"[<>=|]?[biufc]\d+\Z"
_STORAGE: Final = "torch.storage._load_from_bytes"
#: The first bytes of a torch file, enough to identify it.
_HEAD: Final = 1024


class BarePickle(Container):
    """The pickle. An edit writes it as a torch.save zip."""

    format = "bare-pickle"
    traits = Traits(no_checksums="a bare pickle", writes_as="torch", legacy_name="bare pickle")
    writer = "pickle.dump"

    def __init__(self, source: Source, decoded: Decoded) -> None:
        self.source = source
        self._saved = decoded.graph
        self._storages: dict[str, StorageLocation] = {}
        #: Whether all calls that load a storage were understood.
        self.is_complete = True
        self.graph = self._with_storages(decoded.graph)
        what = "it is a bare pickle, written by pickle.dump and not by torch.save: torch.load refuses it"
        self.problems = [Finding("bare-pickle", "warning", what, refused=True)]

    def _with_storages(self, graph: Graph) -> Graph:
        """Return the graph with persistent ids in place of the calls that load storages from bytes."""
        editor = GraphEditor(graph)
        for ref, node in graph.of_type(Call):
            func, args = graph.nodes[node.func], graph.nodes[node.args]
            if type(func) is not Global or mapped_name(func) != _STORAGE or type(args) is not tuple or len(args) != 1:
                continue
            data = bytes_at(graph, args[0])
            pid = self._persistent_id(editor, data) if data is not None else None
            if pid is not None:
                editor.changed[ref] = Persistent(pid)
            else:
                self.is_complete = False
        return editor.done()

    def _persistent_id(self, editor: GraphEditor, data: bytes) -> Ref | None:
        """Add the persistent id of the storage in a torch file, and remember its bytes; return None for any other file,
        also for views of storages and big-endian numbers, which no version of torch pickles this way."""
        try:
            file = BytesSource(data, self.source.name)
            reader = zip_reader if zip_reader.sniff(file.read(0, _HEAD), file) else legacy_reader
            inner: Container = reader.read(file)
        except CkptoolError:
            return None
        nodes = inner.graph.nodes
        root = nodes[inner.graph.root]
        pid = nodes[root.pid] if type(root) is Persistent else None
        if inner.problems or inner.byteorder == "big" or type(pid) is not tuple or len(pid) < 5:
            return None
        if any(nodes[part] is not None for part in pid[5:]):
            return None
        _, cls, key, location, numel = (nodes[part] for part in pid[:5])
        if type(cls) is not Global or type(key) is not str or type(location) is not str or type(numel) is not int:
            return None
        name = str(len(self._storages))
        self._storages[name] = inner.stored(key)
        parts = editor.constant("storage"), editor.named(cls.module, cls.name), editor.constant(name)
        return editor.group((*parts, editor.constant(location), editor.constant(numel)))

    @property
    def pickle(self) -> bytes:
        return self.source.read(0, self.source.size)

    def stored(self, key: str) -> StorageLocation:
        return self._storages.get(key, StorageLocation(None, 0))

    def records(self) -> Iterator[StoredRecord]:
        yield StoredRecord("the pickle", Span(self.source, 0, self.source.size), self.source.size, None, False, "")

    def pickles(self, *, quick: bool = False) -> Iterator[FoundPickle]:
        yield FoundPickle("pickle 1", self._saved)
        yield from nested_pickles(self._saved, "pickle 1")


def sniff(head: bytes, source: Source) -> bool:
    """Return whether a source is one pickle with tensors or arrays, and not of another framework."""
    return _recognise(source) is not None


def read(source: Source) -> BarePickle:
    """Read a pickle that was recognised."""
    container = _recognise(source)
    assert container is not None
    return container


def _recognise(source: Source) -> BarePickle | None:
    if source.size > LIMITS.pickle_bytes or not any(name in source.read(0, _SEARCHED) for name in _NAMES):
        return None
    try:
        decoded: Decoded = decode(source.read(0, source.size))
    except PickleError:
        return None
    if decoded.end != source.size:
        return None
    from .foreign.frameworks import foreign_pickle  # only for pickles with arrays or tensors

    if foreign_pickle(decoded.graph.nodes, source) is not None:
        return None
    container = BarePickle(source, decoded)
    has_values = _has_numbers(decoded.graph) or survey(container.graph).tensors
    return container if has_values and container.is_complete else None


def _has_numbers(graph: Graph) -> bool:
    nodes = graph.nodes
    for _, node in graph.of_type(Call):
        func, args = nodes[node.func], nodes[node.args]
        if type(func) is Global and mapped_name(func) == "numpy.dtype" and type(args) is tuple and args:
            name = nodes[args[0]]
            if isinstance(name, str | bytes) and re.match(_NUMBERS, os.fsdecode(name)):
                return any(_ARRAY.match(mapped_name(node)) for _, node in graph.of_type(Global))
    return False
