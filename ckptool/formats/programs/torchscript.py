"""TorchScript archives, and PyTorch Mobile models in zip form: a program, with its parameters and buffers by name.

The graph is the state dict that ``torch.jit.load(f).state_dict()`` gives, over the very objects of the archive: behind
it in the arena stand ``data.pkl``, ``constants.pkl`` and the other pickles, so an edit of a location tag is an edit of
these. Source: ``torch/csrc/jit/serialization/export_module.cpp``, ``unpickler.cpp``, ``import.cpp``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

from ...base.errors import PickleError
from ...base.limits import LIMITS
from ...base.text import counted, listed, shown
from ...checkpoint.container import FoundPickle, Problem, StoredRecord, Traits
from ...checkpoint.programs import NO_WEIGHTS, PROGRAM, NamedDevice, Program
from ...checkpoint.survey import DeviceName, survey
from ...checkpoint.tensors import TensorReader
from ...files.zips.reader import Archive, Record
from ...pickles.decode import decode
from ...pickles.nodes import Global, Graph, Node, Persistent, Ref, Style
from ...pickles.relocate import moved
from ..pickle_search import zip_pickles
from ..torch.zip_reader import TorchZip
from .script_code import read_code
from .script_modules import SCRIPT_NAMES, held_tensors, state_dict

#: The pickles whose storages have tags, beside data.pkl, and the folder of their storages.
_OTHERS: Final = (("constants.pkl", "constants/"), ("bytecode.pkl", "bytecode/"))
#: The examples that it was traced with: their storages are written without bytes, and only
#: ``torch.jit.load(_restore_shapes=True)`` looks at them.
_TRACED: Final = "traced_inputs.pkl"


class Part(NamedTuple):
    """A pickle of the archive: its record, its graph as it is, where it stands in the arena, and for each persistent
    id in the arena the key that it has in the pickle."""

    record: Record
    graph: Graph
    base: int
    keys: Mapping[Ref, Ref]


class TorchScript(TorchZip, Program):
    """A TorchScript archive. ``parts`` are its pickles, data.pkl first; ``code`` what its code says as text."""

    format = "torchscript"
    traits = Traits(written="program", named=True)
    deflates = True
    loader = "torch.jit.load"
    own_names = SCRIPT_NAMES
    edits = frozenset(("remap", "repack"))

    def __init__(self, archive: Archive, record: Record, data: bytes) -> None:
        self.code = read_code(archive)
        super().__init__(archive, record, data)
        own = self.graph
        self._check_beginning(record, data)
        mobile = archive.find("bytecode.pkl") is not None
        self.kind = "a PyTorch Mobile model" if mobile else "a TorchScript archive"
        #: C++ writes objects otherwise than Python does; see ``Style.late``.
        own = Graph(own.nodes, own.root, own.style.later(True), own.refused, own.oddities)
        self.parts = [Part(record, own, 0, {})]
        nodes = list(own.nodes)
        for name, folder in _OTHERS:
            found = archive.find(name)
            if found is not None:
                self._join(nodes, found, folder)
        #: Where what the archive does not have begins in the arena: the state dict.
        self.end_of_parts = len(nodes)
        # One reader for all of the arena: the survey goes on with it, the state dict makes no storage.
        self.reader = TensorReader(Graph(nodes, own.root, own.style))
        self.held = held_tensors(own, self.reader, self.code)
        root = state_dict(nodes, self.reader, self.held)
        # Only the style of the parts matters: this is what a conversion is written in.
        self.graph = Graph(nodes, root, Style(2), own.refused, own.oddities)
        names = {ref for _, ref in self.held.state}
        in_code = [part.graph.nodes for part in self.parts if part.record.name.endswith("/constants.pkl")]
        self.constants = sum(type(node) is Persistent for inside in in_code for node in inside)
        self.others = ()
        self.attribute_devices = [
            name._replace(ref=part.base + name.ref, path=_path(part, name.path, number))
            for number, part in enumerate(self.parts)
            for name in _devices(part.graph)
        ]
        literals = sorted(self.code.devices.items())
        self.named_devices = [NamedDevice(f"code/{file}", device, number) for (file, device), number in literals]
        self.named_devices += self._traced()
        start = f"{archive.root}/extra/" if archive.root else "extra/"
        self.extra = [name.removeprefix(start) for name in archive.by_name if name.startswith(start)]
        self.plain = [name for name, ref in self.held.plain if ref not in names]
        self.beside = self._beside()
        self.described = self._described()
        self._tell()

    def _check_beginning(self, record: Record, data: bytes) -> None:
        """Pickles of protocol 0 and 1 begin with no mark: Python reads them, and the C++ of TorchScript does not."""
        if data[:1] != b"\x80":
            what = f"{shown(record.name)} does not begin with its protocol; {self.loader} refuses it"
            self._note("old-protocol", "error", what, True)

    def _join(self, nodes: list[Node], record: Record, folder: str) -> None:
        """Put another pickle behind what is in the arena; its storages are called as their records are."""
        data = self.archive.read(record, LIMITS.pickle_bytes)
        self._check_beginning(record, data)
        try:
            graph = decode(data, where=record.name).graph
        except PickleError as error:
            self._note("broken-part", "error", f"{shown(record.name)} cannot be followed to its end: {error}", True)
            return
        graph = Graph(graph.nodes, graph.root, graph.style.later(True), graph.refused, graph.oddities)
        base = len(nodes)
        places = range(base, base + len(graph.nodes))
        nodes += [moved(node, places) for node in graph.nodes]
        keys: dict[Ref, Ref] = {}
        for node in graph.nodes:
            pid = graph.nodes[node.pid] if type(node) is Persistent else None
            if type(node) is not Persistent or type(pid) is not tuple or len(pid) < 3:
                continue
            place, key = base + node.pid, graph.nodes[pid[2]]
            if place in keys or type(key) is not str:
                continue
            there = f"{folder}{key}" if self.archive.find(f"{folder}{key}") is not None else f"constants/{key}"
            whole = nodes[place]
            assert type(whole) is tuple
            keys[place] = whole[2]
            nodes[place] = (*whole[:2], len(nodes), *whole[3:])
            nodes.append(there)
        self.parts.append(Part(record, graph, base, keys))

    def _traced(self) -> list[NamedDevice]:
        """The tags of the inputs that it was traced with."""
        record = self.archive.find(_TRACED)
        if record is None:
            return []
        try:
            graph = decode(self.archive.read(record, LIMITS.pickle_bytes), where=record.name).graph
        except PickleError:
            return []  # it is among the pickles, and said to be broken there
        tags = Counter(storage.location for _, storage in TensorReader(graph).uses())
        return [NamedDevice(_TRACED, tag, number, "an example input") for tag, number in sorted(tags.items())]

    # -- what it is --------------------------------------------------------------------------------------

    def _beside(self) -> list[str]:
        found = [f"the program ({counted(len(self.code.files), 'file')} of code)"]
        if self.plain:
            found.append(f"{counted(len(self.plain), 'tensor')} in plain attributes ({listed(self.plain, most=3)})")
        if self.constants:
            frozen = "" if self.held.state else ", its weights among them: it is frozen"
            found.append(f"{counted(self.constants, 'constant')} of the code{frozen}")
        if self.held.hidden:
            found.append(f"what only code restores ({listed(self.held.hidden, most=3)})")
        if self.extra:
            found.append(f"{counted(len(self.extra), 'extra file')} ({listed(self.extra, most=3)})")
        return found

    def _described(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "executable": True,
            "code_files": len(self.code.files),
            "parameters": sum(self.held.parameters),
            "buffers": len(self.held.state) - sum(self.held.parameters),
            "attributes": self.plain,
            "constants": self.constants,
            "traced": self.archive.find("traced_inputs.pkl") is not None,
            "mobile": self.archive.find("bytecode.pkl") is not None,
            "restored_by_code": self.held.hidden,
            "extra_files": self.extra,
            "devices": {
                "attributes": [{"path": name.path, "device": name.device} for name in self.attribute_devices],
                "code": [item._asdict() for item in self.named_devices],
            },
        }

    def _tell(self) -> None:
        """What a user should know, as problems of the container."""
        what = (
            f"it is {self.kind}, executable by nature: torch.jit.load reads it, torch.load(weights_only=True) refuses"
            " it, and its code runs when it is called"
        )
        self.problems.insert(0, Problem(PROGRAM, "warning", what, True))
        beside = "beside its parameters and buffers it holds " if self.held.state else f"{NO_WEIGHTS}; it holds "
        self._note("program-parts", "note", beside + "; ".join(self.beside))
        if self.held.untold:
            what = (
                f"its code, of torch before 1.6, does not say which tensors are buffers: the state_dict() of later"
                f" versions is without {listed(self.held.untold, most=3)}"
            )
            self._note("untold-buffers", "warning", what)
        if self.code.unread:
            files = listed([f"code/{name}" for name in self.code.unread], most=3)
            what = f"{files}: too large or damaged, not searched to the end for devices and names of parameters"
            self._note("code-unread", "warning", what)
        if self.held.guessed:
            modules = listed(self.held.guessed, most=3)
            what = f"the code does not say what is in {modules}: every tensor there counts as a parameter"
            self._note("code-missing", "warning", what)
        if self.held.hidden:
            modules = listed(self.held.hidden, most=3)
            what = f"{modules}: only code restores the state, and no code is run: no tensor of it has a name"
            self._note("hidden-state", "warning", what)
        found = Counter[str]()
        in_code = [item for item in self.named_devices if item.where != _TRACED]
        for item in in_code:
            found[item.device] += item.number
        if found:
            away = [device for device in found if device != "cpu"]
            devices = listed([f"{device} ({counted(count, 'time')})" for device, count in found.items()])
            files = listed(list(dict.fromkeys(item.where for item in in_code)), most=3)
            what = f"its code names devices: {devices} in {files}; neither remap nor map_location changes code"
            self._note("code-devices", "warning" if away else "note", what)
        if self.attribute_devices:
            places = listed([f"{name.path} = {name.device}" for name in self.attribute_devices], most=5)
            what = f"attributes that are devices: {places}; remap changes the objects"
            if not all(name.is_object for name in self.attribute_devices):
                what += ", with --strings the strings, too"
            self._note("attribute-devices", "note", what)

    # -- the container -----------------------------------------------------------------------------------

    def storage_record(self, key: str) -> Record | None:
        return super().storage_record(key) or (self.archive.find(key) if "/" in key else None)

    def records(self) -> Iterator[StoredRecord]:
        root = f"{self.archive.root}/" if self.archive.root else ""
        for record in super().records():
            name = record.name.removeprefix(root)
            part = any(name.startswith(folder) for _, folder in _OTHERS)
            yield record._replace(key=name) if part and not record.key else record

    def audit(self, keys: Collection[str]) -> list[Problem]:
        """The records of a program are used by its code: only storages that no pickle names stand out."""
        root = f"{self.archive.root}/" if self.archive.root else ""
        used = {f"{root}{key}" for key in keys}
        return [
            problem
            for problem in super().audit(keys)
            if problem.code != "unreferenced-record" or (f"{root}data/" in problem.where and problem.where not in used)
        ]

    def pickles(self) -> Iterator[FoundPickle]:
        first = self.parts[0]
        yield FoundPickle("data.pkl", first.graph, "", self.record.size - self.end)
        found = self._audit()
        yield from zip_pickles(self.archive, self.record, found.hidden, found.former)

    def _writer(self) -> str:
        version = (self.archive.text("version") or b"").strip()[:3].decode("ascii", "replace")
        if self.archive.find("byteorder") is not None:
            era = "torch 2.1 or later"
        elif self.code.files and any(said.buffers is not None for said in self.code.classes.values()):
            era = "torch 1.6 to 2.0"
        else:
            era = "torch 1.3 to 2.0"
        return f"{era} (TorchScript version {version})"


def _path(part: Part, path: str, number: int) -> str:
    """The path of something in a pickle; one beside data.pkl is named by its record.

    Lists and dicts are arguments of a call that says their type: that is no step of the path.
    """
    path = path.replace("(0)", "")
    name = part.record.name.rpartition("/")[2]
    return path if not number else name + path if path[:1] in ("[", "(") else f"{name}.{path}"


def _devices(graph: Graph) -> list[DeviceName]:
    """``torch.device`` objects and strings that name one, with their paths."""
    for node in graph.nodes:
        kind = type(node)
        if kind is str:
            if node[:1] in _FIRST and node.partition(":")[0] in _KINDS:  # type: ignore[arg-type, index, operator, union-attr]
                return survey(graph).devices
        elif kind is Global and (node.module, node.name) == ("torch", "device"):  # type: ignore[union-attr]
            return survey(graph).devices
    return []


_KINDS: Final = frozenset(("cuda", "mps", "xpu", "hpu", "npu", "mtia", "xla", "ipu", "musa", "vulkan", "meta"))
_FIRST: Final = frozenset(kind[0] for kind in _KINDS)
