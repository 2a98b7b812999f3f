"""torch.package archives: many pickles over common storages, beside the source of modules that they need.

Source: ``torch/package/package_exporter.py`` (``_persistent_id``, ``save_pickle``, ``close``).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from ...base.errors import MalformedError, PickleError
from ...base.limits import LIMITS
from ...base.text import counted, listed, shown
from ...checkpoint.container import Problem
from ...checkpoint.tensors import TensorReader
from ...files.zips.reader import Archive, Record
from ...pickles.decode import decode
from ...pickles.nodes import Graph, Persistent, Ref
from ..torch.zip_reader import version_problem
from .archive import ProgramArchive, joined, source_devices
from .script_code import read_code
from .script_modules import SCRIPT_NAMES, held_tensors, state_dict

_STORAGE: Final = ".data/"
_SUFFIX: Final = ".storage"
#: Where TorchScript modules are, that a pickle of it names.
_SCRIPTS: Final = ".data/ts_code/"
_SCRIPT: Final = re.compile(r"\.data/ts_code/\d{1,9}/data\.pkl")
#: Bytes of the list of modules that are named, and of those that are printed.
_LIST: Final = 4 << 20
#: Bytes of all pickles together, and how many are followed.
_MOST: Final = LIMITS.pickle_bytes
_PICKLES: Final = 100_000


class TorchPackage(ProgramArchive):
    """A torch.package archive: ``resources`` are the names of its pickles, the keys of the root."""

    format = "torch-package"
    kind = "a torch.package archive"
    loader = "torch.package.PackageImporter"

    def __init__(self, archive: Archive) -> None:
        super().__init__(archive)
        self._in_code: set[str] = set()
        root = f"{archive.root}/" if archive.root else ""
        items: list[tuple[str, Ref]] = []
        sources, others = [], []
        reduced = left = 0
        for record in archive.records:
            name = record.name.removeprefix(root)
            if name.startswith(_STORAGE):
                if name.endswith(_SUFFIX):
                    self.records_of[name.removeprefix(_STORAGE).removesuffix(_SUFFIX)] = record
                continue
            if name.endswith(".py"):
                sources.append(name)
                continue
            left += record.size
            graph = self._pickled(record, name) if left <= _MOST and len(items) < _PICKLES else None
            if graph is None:
                others.append(name)
                continue
            base = joined(self.builder, graph) - graph.root
            for ref in _reduced(graph):
                # No load but that of the package makes it; as a persistent id no other reader takes it.
                self.builder.nodes[base + ref] = None
                reduced += 1
            items.append((name, base + graph.root))
        programs = self._programs(items)
        others = [name for name in others if name not in ("byteorder", "version")]
        self.graph = self.builder.graph(self.builder.mapping(items))
        self.resources = [name for name, _ in items]
        extern = self._extern()
        self.named_devices = source_devices(archive, sources)
        version = (archive.text(".data/python_version") or b"").strip()[:20].decode("ascii", "replace")
        self.writer = "torch.package" + (f", Python {version}" if version else "")
        held = f"{counted(len(programs), 'TorchScript program')} ({listed(programs, most=3)})"
        self.beside = [
            *[held for _ in programs[:1]],
            *([f"{counted(reduced, 'object')} that only its own code rebuilds, here None"] if reduced else []),
            *[f"{counted(len(sources), 'file')} of Python source ({listed(sources, most=3)})" for _ in sources[:1]],
            *[f"{counted(len(others), 'other file')} ({listed(others, most=3)})" for _ in others[:1]],
            *[f"the names of modules outside ({listed(extern, most=4)})" for _ in extern[:1]],
        ]
        self.described = {
            "kind": self.kind,
            "executable": True,
            "pickles": self.resources,
            "sources": len(sources),
            "extern": extern,
            "reduced": reduced,
            "programs": programs,
            "devices": {"code": [item._asdict() for item in self.named_devices]},
        }
        pickles = counted(len(items), "pickle")
        what = (
            f"it is a torch.package archive of {pickles}, executable by nature: torch.package.PackageImporter reads it"
            " and runs the code in it; torch.load does not"
        )
        self.tell(what)
        unread = version_problem(archive)
        if unread is not None:
            self.problems.append(unread)
        self.tell_devices("neither remap nor map_location changes code")

    def _programs(self, items: list[tuple[str, Ref]]) -> list[str]:
        """The TorchScript programs in it, each an entry more: the state dict of its module.

        Their storages are among those of the package (``torch/csrc/jit/python/script_init.cpp``, ``PackageExporter``).
        """
        found = [name for name in self.names() if _SCRIPT.fullmatch(name)]
        if not found:
            return []
        self.own_names = SCRIPT_NAMES
        code = read_code(self.archive, f"{_SCRIPTS}code/")
        for name in found:
            record = self.archive.find(name)
            assert record is not None
            graph = self._pickled(record, name)
            if graph is None:
                continue
            reader = TensorReader(graph)
            try:
                held = held_tensors(graph, reader, code)
            except MalformedError as error:
                what = f"{shown(name)} cannot be followed to its end: {error.what}"
                self.problems.append(Problem("broken-part", "error", what, True, record.name))
                continue
            base = joined(self.builder, graph, _own_key) - graph.root
            state = state_dict(self.builder.nodes, reader, held, base)
            items.append((name.removesuffix("/data.pkl"), state))
            self._in_code.update(self._constants(name.removesuffix("data.pkl") + "constants.pkl"))
        return [name.removesuffix("/data.pkl") for name in found]

    def _constants(self, name: str) -> set[str]:
        """The keys of the storages that the code of a program holds."""
        record = self.archive.find(name)
        graph = None if record is None else self._pickled(record, name)
        return set() if graph is None else {_own_key(key) for key in TensorReader(graph).storages}

    def _pickled(self, record: Record, name: str) -> Graph | None:
        """The graph of a resource; None for a file that is no pickle."""
        named = name.endswith(".pkl")
        if not named and (record.method or self._begin(record)[:1] != b"\x80"):
            return None
        try:
            return decode(self.archive.read(record, LIMITS.pickle_bytes), where=name).graph
        except PickleError as error:
            if named:
                what = f"{shown(name)} cannot be followed to its end: {error}"
                self.problems.append(Problem("broken-part", "error", what, True, record.name))
            return None

    def _begin(self, record: Record) -> bytes:
        span = self.archive.payload(record)
        return span.source.read(span.offset, min(span.size, 2))

    def _extern(self) -> list[str]:
        record = self.archive.find(".data/extern_modules")
        if record is None or record.size > _LIST:
            return []
        return self.archive.read(record, _LIST).decode("utf-8", "replace").split()

    def audit(self, keys: Collection[str]) -> list[Problem]:
        found = super().audit(keys)
        for key, record in self.records_of.items():
            if key not in keys and key not in self._in_code:
                what = f"the record {shown(record.name)} is used by nothing"
                found.append(Problem("unreferenced-record", "warning", what, False, record.name, record.header))
        return found


def _own_key(key: str) -> str:
    """The key that the package has for a storage of a TorchScript program."""
    return key.removesuffix(_SUFFIX)


def _reduced(graph: Graph) -> list[Ref]:
    """Objects that a packaged module rebuilds: ``("reduce_package", id, function, arguments)``."""
    found: list[Ref] = []
    for ref, node in enumerate(graph.nodes):
        pid = graph.nodes[node.pid] if type(node) is Persistent else ()
        if type(pid) is tuple and pid and graph.nodes[pid[0]] == "reduce_package":
            found.append(ref)
    return found


def read(archive: Archive) -> TorchPackage:
    """Read every pickle of a package."""
    return TorchPackage(archive)
