"""TorchScript archives, and PyTorch Mobile models in zip form: a program, with its parameters and buffers by name.

The graph is the state dict that ``torch.jit.load(f).state_dict()`` returns, built on the archive's own objects: it
follows ``data.pkl``, ``constants.pkl`` and the other pickles in the arena. So an edit of a location tag edits these
pickles. Source: ``torch/csrc/jit/serialization/export_module.cpp``, ``unpickler.cpp``, ``import.cpp``.

The code declares which attributes of modules are parameters and buffers. It is searched as text, neither run nor parsed
(``python_print.cpp`` writes it, ``import_source.cpp`` reads it). Before torch 1.6 it did not distinguish buffers from
other attributes: later versions then see no buffers (``importClass``), and ``state_dict()`` has only the parameters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from ...base.errors import MalformedError, PickleError
from ...base.findings import Finding
from ...base.lazy import regex
from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...base.steps import in_shell
from ...base.text import join_limited, pluralize, quoted
from ...checkpoint.container import FoundPickle, StoredRecord, Traits
from ...checkpoint.objects import callable_name, mapping
from ...checkpoint.programs import AttributeDevice, Program, ProgramFacts
from ...checkpoint.survey import survey
from ...checkpoint.tensors import TensorReader
from ...files.zips.reader import Archive, Record
from ...pickles.decode import decode
from ...pickles.nodes import Call, Dict, Graph, Node, Persistent, Ref, Style, relocated
from ...pickles.opcodes import REDUCE
from ..search.pickle_search import zip_pickles
from ..torch.zip_reader import TorchZip
from .archive import code_device, describe, devices_in

#: The folder of the storages of constants.pkl.
_CONSTANTS: Final = "constants/"
#: Other pickles whose storages have location tags, and the folders of these storages.
_OTHERS: Final = (("constants.pkl", _CONSTANTS), ("bytecode.pkl", "bytecode/"))
#: The example inputs of tracing. Their storages are written without bytes, and only
#: ``torch.jit.load(_restore_shapes=True)`` reads them.
_TRACED: Final = "traced_inputs.pkl"
#: The most bytes of inflated code that are read: real models have a few hundred thousand. It also bounds the classes
#: and names that are recorded.
_MAX_CODE: Final = 8 << 20

#: The relevant lines: a class begins a line, and its declarations are indented by two spaces.
_LINE: Final = regex(
    r"^(?:class (?P<head>.*)|  (?P<kind>__parameters__|__buffers__) = \[(?P<names>.*)\])$", re.MULTILINE
)
_CLASS: Final = regex(r"([^\s(]+)\((\w+)\):")
#: Names are not escaped: python_print.cpp writes them unchanged.
_QUOTED: Final = regex(r'"([^"]*)"')
#: The most characters of all names together: 200,000 tensors with names of 100 characters take 20 million.
_MAX_CHARACTERS: Final = 64_000_000
#: C++ objects, such as packed parameters of quantized layers.
_NATIVE: Final = "__torch__.torch.classes."
#: The most modules that are visited; a shared module counts at every place.
_MAX_MODULES: Final = 1_000_000


class ScriptPickle(NamedTuple):
    """A pickle of the archive: its record, its own graph, and its start in the arena. ``keys`` maps each of its
    persistent ids in the arena to the key that the pickle itself has there."""

    record: Record
    graph: Graph
    base: int
    keys: Mapping[Ref, Ref]


class TorchScript(TorchZip, Program):
    """A TorchScript archive. ``parts`` are its pickles, data.pkl first; ``code`` has the declarations of its code."""

    format = "torchscript"
    traits = Traits(writes_as="program", flat_names=True)
    deflates = True
    loader = "torch.jit.load"
    own_names = ("__torch__.", "torch.jit._pickle.")
    edits = frozenset(("remap",))

    def __init__(self, archive: Archive, record: Record, data: bytes) -> None:
        self.code = _read_code(archive)
        super().__init__(archive, record, data)
        self._check_protocol(record, data)
        self.mobile = archive.find("bytecode.pkl") is not None
        self.kind = "a PyTorch Mobile model" if self.mobile else "a TorchScript archive"
        own = _as_script(self.graph)
        self.parts = [ScriptPickle(record, own, 0, {})]
        nodes = list(own.nodes)
        for name, folder in _OTHERS:
            other = archive.find(name)
            if other is not None:
                self._append_pickle(nodes, other, folder)
        #: The start of the state dict in the arena; no pickle holds it.
        self.end_of_parts = len(nodes)
        # One reader for the whole arena: the survey uses it too, and the state dict adds no storage.
        self.reader = TensorReader(Graph(nodes, own.root, own.style))
        self.modules = _module_tensors(own, self.reader, self.code)
        root = _add_state_dict(nodes, self.reader, self.modules.state)
        # Only the styles of the parts matter; this style is used by conversions.
        self.graph = Graph(nodes, root, Style(2), own.refused, own.oddities)
        in_code = (part.graph for part in self.parts if part.record.name.endswith("/constants.pkl"))
        self.constants = sum(1 for graph in in_code for _ in graph.of_type(Persistent))
        self.others = ()
        self.attribute_devices = [
            name._replace(ref=part.base + name.ref, path=_path(part, name.path, number))
            for number, part in enumerate(self.parts)
            for name in survey(part.graph).devices
        ]
        literals = sorted(self.code.devices.items())
        self.named_devices = [code_device(f"code/{file}", device, number) for (file, device), number in literals]
        self.unnamed = self._unnamed(self.reader)
        self._add_problems()

    def _check_protocol(self, record: Record, data: bytes) -> None:
        """Report a pickle that does not name its protocol (0 or 1): Python reads it, TorchScript's C++ does not."""
        if data[:1] != b"\x80":
            what = f"{quoted(record.name)} does not begin with its protocol; {self.loader} refuses it"
            self._note("old-protocol", "error", what, True)

    def _append_pickle(self, nodes: list[Node], record: Record, folder: str) -> None:
        """Append another pickle to the arena, with its storages named after their records."""
        data = self.archive.read(record, LIMITS.pickle_bytes)
        self._check_protocol(record, data)
        try:
            graph = _as_script(decode(data, where=record.name).graph)
        except PickleError as error:
            self._note("broken-part", "error", f"{quoted(record.name)} cannot be decoded to its end: {error}", True)
            return
        base = len(nodes)
        places = range(base, base + len(graph.nodes))
        nodes += [relocated(node, places) for node in graph.nodes]
        keys: dict[Ref, Ref] = {}
        for _, node in graph.of_type(Persistent):
            pid, place = graph.nodes[node.pid], base + node.pid
            key = graph.nodes[pid[2]] if type(pid) is tuple and len(pid) > 2 else None
            if place in keys or type(key) is not str:
                continue
            name = f"{folder}{key}" if self.archive.find(f"{folder}{key}") is not None else f"{_CONSTANTS}{key}"
            copy = nodes[place]
            assert type(copy) is tuple
            keys[place] = copy[2]
            nodes[place] = (*copy[:2], len(nodes), *copy[3:])
            nodes.append(name)
        self.parts.append(ScriptPickle(record, graph, base, keys))

    def _unnamed(self, reader: TensorReader) -> list[str]:
        """Describe the storages that no tensor of the state dict uses."""
        tensors = filter(None, (reader.tensor(ref) for _, ref in self.modules.state))
        named = {part.storage for tensor in tensors for part in reader.parts(tensor)}
        # A number in traced code, such as ``x * 0.5``, is stored as a tensor of one float64, int64 or bool.
        numbers = ("float64", "int64", "bool")
        others = [item for item in reader.storages.values() if item.nbytes and item.key not in named]
        left = [
            item
            for item in others
            if not item.key.startswith((_CONSTANTS, "bytecode/"))
            or (item.key.startswith(_CONSTANTS) and (item.numel != 1 or item.dtype.name not in numbers))
        ]
        return [f"{pluralize(len(left), 'storage')} outside of its parameters and buffers"] if left else []

    def _add_problems(self) -> None:
        modules, start = self.modules, f"{self.archive.prefix}extra/"
        named = {ref for _, ref in modules.state}
        plain = [name for name, ref in modules.plain if ref not in named]
        what = f"it is {self.kind}, which holds code: torch.jit.load reads it, torch.load(weights_only=True) refuses"
        what += " it, and its code runs when it is called"
        devices: list[AttributeDevice] = [{"path": item.path, "device": item.device} for item in self.attribute_devices]
        facts: ProgramFacts = {
            "code_files": len(self.code.files),
            "parameters": len(modules.state) - len(modules.buffers),
            "buffers": len(modules.buffers),
            "attributes": plain,
            "constants": self.constants,
            "traced": self.archive.find(_TRACED) is not None,
            "mobile": self.mobile,
            "restored_by_code": self.modules.hidden,
            "extra_files": [name.removeprefix(start) for name in self.archive.by_name if name.startswith(start)],
        }
        known = plain or self.constants or modules.hidden
        describe(self, what, facts, () if known else self.unnamed, devices)
        if self.code.unread:
            names = join_limited([f"code/{name}" for name in self.code.unread], most=3)
            what = "too large or damaged, not searched to the end for devices and names of parameters"
            self._note("code-unread", "warning", f"{names}: {what}")
        if modules.guessed:
            names = join_limited(modules.guessed, most=3)
            what = f"the code of {names} is missing: every tensor there counts as a parameter"
            self._note("code-missing", "warning", what)
        if modules.hidden:
            what = "only code restores this state, and ckptool runs no code: its tensors have no names"
            self._note("hidden-state", "warning", f"{join_limited(modules.hidden, most=3)}: {what}")
        if self.attribute_devices:
            places = join_limited([f"{name.path} = {name.device}" for name in self.attribute_devices], most=5)
            what = f"attributes that are devices: {places}; remap changes the objects"
            if not all(name.is_object for name in self.attribute_devices):
                what += f", with {in_shell('`--strings`')} the strings, too"
            self._note("attribute-devices", "note", what)

    def storage_record(self, key: str) -> Record | None:
        return super().storage_record(key) or (self.archive.find(key) if "/" in key else None)

    def records(self) -> Iterator[StoredRecord]:
        for record in super().records():
            name = record.name.removeprefix(self.archive.prefix)
            part = any(name.startswith(folder) for _, folder in _OTHERS)
            yield record._replace(key=name) if part and not record.key else record

    def audit(self, keys: Collection[str]) -> list[Finding]:
        """Drop findings on unreferenced records, which the code may use, except storages that no pickle names."""
        root = self.archive.prefix
        used = {f"{root}{key}" for key in keys}
        return [
            problem
            for problem in super().audit(keys)
            if problem.code != "unreferenced-record" or (f"{root}data/" in problem.where and problem.where not in used)
        ]

    def pickles(self, *, quick: bool = False) -> Iterator[FoundPickle]:
        yield FoundPickle("data.pkl", self.parts[0].graph, "", self.record.size - self.end)
        audited = self._audit()
        yield from zip_pickles(self.archive, self.record, audited.hidden, audited.former)

    def _writer(self) -> str:
        version = (self.archive.text("version") or b"").strip()[:3].decode("ascii", "replace")
        if self.archive.find("byteorder") is not None:
            era = "torch 2.1 or later"
        elif self.code.files and any(item.buffers is not None for item in self.code.classes.values()):
            era = "torch 1.6 to 2.0"
        else:
            era = "torch 1.3 to 2.0"
        return f"{era} (TorchScript version {version})"


def _as_script(graph: Graph) -> Graph:
    """Return a graph in TorchScript's style: C++ writes objects differently than Python; see ``Style.late``."""
    return Graph(graph.nodes, graph.root, graph.style.replaced(memoize_late=True), graph.refused, graph.oddities)


def _path(part: ScriptPickle, path: str, number: int) -> str:
    """Return the path of a value in a pickle; for pickles other than data.pkl it begins with the record name."""
    path = path.replace("(0)", "")  # lists and dicts are arguments of a call that names their type
    name = part.record.name.rpartition("/")[2]
    return path if not number else name + path if path[:1] in ("[", "(") else f"{name}.{path}"


def read(archive: Archive) -> TorchScript:
    """Read an archive of ``torch.jit.save``; raise MalformedError if it does not describe its weights."""
    record = archive.find("data.pkl")
    if record is None:
        what = "it is a TorchScript archive without data.pkl, where its weights are described"
        raise MalformedError(what, path=archive.source.name, next="get a whole copy of the file")
    return TorchScript(archive, record, archive.read(record, LIMITS.pickle_bytes))


# -- the modules, and their tensors by name


class ScriptClass(NamedTuple):
    """A class of the program. ``buffers`` is None if the code does not declare buffers (before torch 1.6)."""

    is_module: bool
    parameters: frozenset[str]
    buffers: frozenset[str] | None


class ScriptCode(NamedTuple):
    """The code of a program: classes by qualified name, how often each (file, device) is named, and unread files."""

    files: list[str]
    classes: dict[str, ScriptClass]
    devices: Counter[tuple[str, str]]
    unread: list[str]


def _read_code(archive: Archive) -> ScriptCode:
    code = ScriptCode([], {}, Counter(), [])
    start = f"{archive.prefix}code/"
    left = _MAX_CODE
    for record in archive.records:
        if not (record.name.startswith(start) and record.name.endswith(".py")):
            continue
        file = record.name[len(start) :]
        code.files.append(file)
        try:
            text = archive.read(record, left).decode("utf-8", "replace")
        except MalformedError:
            code.unread.append(file)
            continue
        left -= record.size
        code.devices.update({(file, device): number for device, number in devices_in(text).items()})
        module = file.removesuffix(".py").replace("/", ".")
        code.classes.update((f"{module}.{name}", script_class) for name, script_class in _classes(text).items())
    return code


def _classes(text: str) -> dict[str, ScriptClass]:
    name, classes = "", dict[str, ScriptClass]()
    for line in _LINE.finditer(text):
        if line["head"] is not None:
            match = _CLASS.match(line["head"])
            name = match[1] if match else ""
            if match:
                classes[name] = ScriptClass(match[2] == "Module", frozenset(), None)
        elif name:
            names = frozenset(match[1] for match in _QUOTED.finditer(line["names"]))
            found = classes[name]
            is_parameters = line["kind"] == "__parameters__"
            classes[name] = found._replace(parameters=names) if is_parameters else found._replace(buffers=names)
    return classes


class ModuleTensors(NamedTuple):
    """The tensors of the modules, as (name, reference): in the order of ``state_dict()``, and ``plain`` attributes.
    ``hidden`` are modules whose state only their code restores, ``guessed`` those whose code is missing."""

    state: list[tuple[str, Ref]]
    buffers: list[tuple[str, Ref]]
    plain: list[tuple[str, Ref]]
    hidden: list[str]
    guessed: list[str]


def _module_tensors(graph: Graph, reader: TensorReader, code: ScriptCode) -> ModuleTensors:
    """Walk the modules from the root, parents before children; raise MalformedError for endless nesting."""
    tensors = ModuleTensors([], [], [], [], [])
    work = [(graph.root, "")]
    characters = visited = 0
    while work:
        ref, prefix = work.pop()
        visited += 1
        if visited > _MAX_MODULES or characters > _MAX_CHARACTERS or len(prefix) > LIMITS.path_chars:
            raise MalformedError("its modules nest endlessly", where="data.pkl")
        node = graph.nodes[ref]
        if type(node) is not Call:
            raise MalformedError("its root is not an object of the program", where="data.pkl")
        attributes = _attributes(graph, node)
        where = (prefix or "the whole program").removesuffix(".")
        if attributes is None:
            tensors.hidden.append(where)
            continue
        script_class = code.classes.get(callable_name(graph, node.func))
        if script_class is None and (attributes or not prefix):
            tensors.guessed.append(where)
        submodules, buffers = [], []
        for name, value in attributes:
            node = graph.nodes[value]
            if type(node) is not Call:
                continue
            full = prefix + name
            if reader.tensor(value) is not None:
                characters += len(full)
                if script_class is None or name in script_class.parameters:
                    tensors.state.append((full, value))
                elif script_class.buffers is not None and name in script_class.buffers:
                    buffers.append((full, value))
                else:
                    tensors.plain.append((full, value))
                continue
            class_name = callable_name(graph, node.func)
            declared = code.classes.get(class_name)
            native = class_name.startswith(_NATIVE)
            if declared.is_module if declared is not None else class_name.startswith("__torch__.") and not native:
                submodules.append((value, f"{full}."))
            elif native:
                tensors.hidden.append(full)
        tensors.state.extend(buffers)
        tensors.buffers.extend(buffers)
        work.extend(reversed(submodules))
    return tensors


def _add_state_dict(nodes: list[Node], reader: TensorReader, state: list[tuple[str, Ref]]) -> Ref:
    """Append a dict of the parameters and buffers to an arena, detached as in ``state_dict()``."""
    pairs: list[Ref] = []
    detached: dict[Ref, Ref] = {}
    false = len(nodes)
    nodes.append(False)
    for name, ref in state:
        if ref not in detached:
            tensor = reader.tensor(ref)
            detached[ref] = ref
            node = nodes[ref]
            args = nodes[node.args] if type(node) is Call else ()
            if type(node) is Call and type(args) is tuple and tensor is not None and tensor.requires_grad:
                at = 5 if tensor.kind == "quantized" else 4
                nodes.append((*args[:at], false, *args[at + 1 :]))
                nodes.append(Call(REDUCE, node.func, len(nodes) - 1))
                detached[ref] = len(nodes) - 1
        pairs += (len(nodes), detached[ref])
        nodes.append(name)
    nodes.append(Dict(pairs))
    return len(nodes) - 1


def _attributes(graph: Graph, node: Call) -> list[tuple[str, Ref]] | None:
    """Return the attributes in class order, or None if the state does not consist of attributes."""
    states = [mapping(graph, state) for state in node.states]
    named = [(graph.nodes[key], value) for items in states for key, value in items or ()]
    attributes = [(name, value) for name, value in named if type(name) is str]
    return attributes if None not in states and len(attributes) == len(named) else None
