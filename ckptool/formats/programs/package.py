"""torch.package archives: many pickles with shared storages, and the source of the modules they need.

Source: ``torch/package/package_exporter.py`` (``_persistent_id``, ``save_pickle``, ``close``).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from ...base.errors import PickleError
from ...base.findings import Finding
from ...base.limits import LIMITS
from ...base.text import pluralize, quoted
from ...checkpoint.programs import ProgramFacts
from ...checkpoint.tensors import TensorReader
from ...files.zips.reader import Archive, Record
from ...pickles.decode import decode
from ...pickles.nodes import Graph, Persistent, Ref
from ..torch.zip_reader import version_problem
from .archive import ProgramArchive, describe, name_parts

_STORAGE: Final = ".data/"
_SUFFIX: Final = ".storage"
_SCRIPTS: Final = ".data/ts_code/"
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
        items: list[tuple[str, Ref]] = []
        sources, others = [], []
        reduced = total = 0
        for record in archive.records:
            name = record.name.removeprefix(archive.prefix)
            if name.startswith(_STORAGE) and name.endswith(_SUFFIX):
                self.records_of[name.removeprefix(_STORAGE).removesuffix(_SUFFIX)] = record
            elif name.endswith(".py"):
                sources.append(name)
            elif not name.startswith(_STORAGE):
                total += record.size
                graph = self._decode(record, name) if total <= _MAX_BYTES and len(items) < _MAX_PICKLES else None
                if graph is not None:
                    # ("reduce_package", id, function, arguments): only the package's own loader can make it.
                    pids = ((ref, graph.nodes[node.pid]) for ref, node in graph.of_type(Persistent))
                    known = ((ref, pid[0]) for ref, pid in pids if type(pid) is tuple and pid)
                    gone = [ref for ref, first in known if graph.nodes[first] == "reduce_package"]
                    items.append((name, self.append_graph(graph.edited(dict.fromkeys(gone), []) if gone else graph)))
                    reduced += len(gone)
                elif name not in ("byteorder", "version"):
                    others.append(name)
        self.graph = self.builder.graph(self.builder.mapping(items))
        used = {storage.key for _, storage in TensorReader(self.graph).uses()}
        unused = [key for key, record in self.records_of.items() if record.size and key not in used]
        if unused:
            self.unnamed = [f"{pluralize(len(unused), 'storage')} that only its own code uses"]
        listed = archive.find(".data/extern_modules")
        readable = listed is not None and listed.size <= _MAX_LIST
        extern = archive.read(listed, _MAX_LIST).decode("utf-8", "replace").split() if listed and readable else []
        self.named_devices = self.devices_in_sources(sources)
        version = (archive.text(".data/python_version") or b"").strip()[:20].decode("ascii", "replace")
        self.writer = "torch.package" + (f", Python {version}" if version else "")
        what = f"it is a torch.package archive of {pluralize(len(items), 'pickle')}, which holds code:"
        what += " torch.package.PackageImporter reads it and runs the code in it; torch.load does not"
        facts: ProgramFacts = {"pickles": [name for name, _ in items], "sources": len(sources), "extern": extern}
        describe(self, what, {**facts, "reduced": reduced}, name_parts("other file", others))
        if problem := version_problem(archive):
            self.problems.append(problem)

    def _decode(self, record: Record, name: str) -> Graph | None:
        named = name.endswith(".pkl")
        if not named:
            span = self.archive.payload(record)
            if record.method or span.source.read(span.offset, min(span.size, 1)) != b"\x80":
                return None
        try:
            return decode(self.archive.read(record, LIMITS.pickle_bytes), where=name).graph
        except PickleError as error:
            if named:
                what = f"{quoted(name)} cannot be decoded to its end: {error}"
                self.problems.append(Finding("broken-part", "error", what, record.name, refused=True))
            return None

    def audit(self, keys: Collection[str]) -> list[Finding]:
        problems = super().audit(keys)
        scripts = any(name.startswith(_SCRIPTS) for name in self.names())  # TorchScript within the package uses some
        for key, record in self.records_of.items():
            if key not in keys and not scripts:
                what = f"the record {quoted(record.name)} is used by nothing"
                problems.append(Finding("unreferenced-record", "warning", what, record.name, record.header))
        return problems


#: Reads an archive; raises MalformedError if its description is damaged.
read: Final = TorchPackage
