"""torch.package archives: many pickles with shared storages, and the source of the modules they need.

Source: ``torch/package/package_exporter.py`` (``_persistent_id``, ``save_pickle``, ``close``).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from ...base.errors import MalformedError, PickleError
from ...base.findings import Finding
from ...base.lazy import regex
from ...base.limits import LIMITS
from ...base.text import join_limited, pluralize, quoted
from ...checkpoint.programs import ProgramFacts
from ...checkpoint.tensors import TensorReader
from ...files.zips.reader import Archive, Record
from ...pickles.decode import decode
from ...pickles.nodes import Graph, Persistent, Ref
from ..torch.zip_reader import version_problem
from .archive import ProgramArchive, append_graph, devices_in_sources, name_parts, without_numbers
from .script_modules import SCRIPT_NAMES, add_state_dict, module_tensors, read_code

_STORAGE: Final = ".data/"
_SUFFIX: Final = ".storage"
#: The folder of TorchScript modules that a pickle refers to.
_SCRIPTS: Final = ".data/ts_code/"
_SCRIPT: Final = regex(r"\.data/ts_code/\d{1,9}/data\.pkl")
#: The most bytes of the list of external modules.
_MAX_LIST: Final = 4 << 20
#: The most bytes of all pickles together, and the most pickles that are decoded.
_MAX_BYTES: Final = LIMITS.pickle_bytes
_MAX_PICKLES: Final = 100_000


class TorchPackage(ProgramArchive):
    """A torch.package archive. The keys of its root are the names of its pickles."""

    format = "torch-package"
    kind = "a torch.package archive"
    loader = "torch.package.PackageImporter"

    def __init__(self, archive: Archive) -> None:
        super().__init__(archive)
        #: The storages used by the code of TorchScript programs.
        self._in_code: set[str] = set()
        self._numbers: set[str] = set()
        items: list[tuple[str, Ref]] = []
        sources, others = [], []
        reduced = total = 0
        for record in archive.records:
            name = record.name.removeprefix(archive.prefix)
            if name.startswith(_STORAGE):
                if name.endswith(_SUFFIX):
                    self.records_of[name.removeprefix(_STORAGE).removesuffix(_SUFFIX)] = record
                continue
            if name.endswith(".py"):
                sources.append(name)
                continue
            total += record.size
            graph = self._decode(record, name) if total <= _MAX_BYTES and len(items) < _MAX_PICKLES else None
            if graph is None:
                others.append(name)
                continue
            base = append_graph(self.builder, graph) - graph.root
            for ref in _reduced_objects(graph):
                # Only the package's own loader can make it, and no other reader accepts its persistent id.
                self.builder.nodes[base + ref] = None
                reduced += 1
            items.append((name, base + graph.root))
        programs = self._add_programs(items)
        others = [name for name in others if name not in ("byteorder", "version")]
        self.graph = self.builder.graph(self.builder.mapping(items))
        reachable = {*self.graph.reachable()}
        used = {storage.key for ref, storage in TensorReader(self.graph).uses() if ref in reachable}
        unused = [key for key, record in self.records_of.items() if record.size and key not in used | self._numbers]
        if unused:
            self.unnamed = [f"{pluralize(len(unused), 'storage')} that only its own code uses"]
        extern = self._extern_modules()
        self.named_devices = devices_in_sources(archive, sources)
        version = (archive.text(".data/python_version") or b"").strip()[:20].decode("ascii", "replace")
        self.writer = "torch.package" + (f", Python {version}" if version else "")
        self.beside = [
            *name_parts("TorchScript program", programs),
            *([f"{pluralize(reduced, 'object')} that only its own code rebuilds, here None"] if reduced else []),
            *name_parts("file", sources, rest=" of Python source"),
            *name_parts("other file", others),
            *([f"the names of external modules ({join_limited(extern, most=4)})"] if extern else []),
        ]
        what = f"it is a torch.package archive of {pluralize(len(items), 'pickle')}, which holds code:"
        what += " torch.package.PackageImporter reads it and runs the code in it; torch.load does not"
        facts: ProgramFacts = {"pickles": [name for name, _ in items], "sources": len(sources), "extern": extern}
        self.describe(what, {**facts, "reduced": reduced, "programs": programs})
        if problem := version_problem(archive):
            self.problems.append(problem)
        self.warn_of_devices("neither remap nor map_location changes code")

    def _add_programs(self, items: list[tuple[str, Ref]]) -> list[str]:
        """Add each TorchScript program's state dict as an entry; return the names of the entries.

        The programs share the package's storages (``torch/csrc/jit/python/script_init.cpp``, ``PackageExporter``).
        """
        programs = [name for name in self.names() if _SCRIPT.fullmatch(name)]
        if not programs:
            return []
        self.own_names = SCRIPT_NAMES
        code = read_code(self.archive, f"{_SCRIPTS}code/")
        for name in programs:
            record = self.archive.find(name)
            assert record is not None
            graph = self._decode(record, name)
            if graph is None:
                continue
            reader = TensorReader(graph)
            try:
                modules = module_tensors(graph, reader, code)
            except MalformedError as error:
                self._add_broken_part(record, name, error.what)
                continue
            base = append_graph(self.builder, graph, _own_key) - graph.root
            state = add_state_dict(self.builder.nodes, reader, modules.state, base)
            items.append((name.removesuffix("/data.pkl"), state))
            constants = name.removesuffix("data.pkl") + "constants.pkl"
            record = self.archive.find(constants)
            graph = None if record is None else self._decode(record, constants)
            if graph is not None:
                reader = TensorReader(graph)
                self._in_code.update(map(_own_key, reader.storages))
                self._numbers.update(map(_own_key, {*reader.storages} - without_numbers(reader)))
        return [name.removesuffix("/data.pkl") for name in programs]

    def _decode(self, record: Record, name: str) -> Graph | None:
        """Return the graph of a resource, or None if it is not a readable pickle."""
        named = name.endswith(".pkl")
        if not named:
            span = self.archive.payload(record)
            if record.method or span.source.read(span.offset, min(span.size, 1)) != b"\x80":
                return None
        try:
            return decode(self.archive.read(record, LIMITS.pickle_bytes), where=name).graph
        except PickleError as error:
            if named:
                self._add_broken_part(record, name, str(error))
            return None

    def _add_broken_part(self, record: Record, name: str, why: str) -> None:
        what = f"{quoted(name)} cannot be decoded to its end: {why}"
        self.problems.append(Finding.of("broken-part", "error", what, record.name, refused=True))

    def _extern_modules(self) -> list[str]:
        record = self.archive.find(".data/extern_modules")
        if record is None or record.size > _MAX_LIST:
            return []
        return self.archive.read(record, _MAX_LIST).decode("utf-8", "replace").split()

    def audit(self, keys: Collection[str]) -> list[Finding]:
        problems = super().audit(keys)
        for key, record in self.records_of.items():
            if key not in keys and key not in self._in_code:
                what = f"the record {quoted(record.name)} is used by nothing"
                problems.append(Finding.of("unreferenced-record", "warning", what, record.name, record.header))
        return problems


def _own_key(key: str) -> str:
    """Return the package's key for a storage of a TorchScript program."""
    return key.removesuffix(_SUFFIX)


def _reduced_objects(graph: Graph) -> list[Ref]:
    """Return the objects that a packaged module rebuilds: ``("reduce_package", id, function, arguments)``."""
    persistent = ((ref, graph.nodes[node.pid]) for ref, node in enumerate(graph.nodes) if type(node) is Persistent)
    return [ref for ref, pid in persistent if type(pid) is tuple and pid and graph.nodes[pid[0]] == "reduce_package"]


def read(archive: Archive) -> TorchPackage:
    """Read every pickle of a package."""
    return TorchPackage(archive)
