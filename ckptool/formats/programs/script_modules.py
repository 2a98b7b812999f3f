"""The modules of a TorchScript program, and their tensors by name.

A module is an object whose class is declared as a module in the code. The code also declares which attributes are
parameters and buffers. Before torch 1.6 it did not distinguish buffers from other attributes: later versions then see
no buffers (``import_source.cpp``, ``importClass``), and ``state_dict()`` has only the parameters.

The code is searched as text; it is neither run nor parsed as Python. Source:
``torch/csrc/jit/serialization/python_print.cpp`` writes it, ``import_source.cpp`` reads it.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from ...base.errors import MalformedError
from ...base.lazy import regex
from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...checkpoint.objects import callable_name, mapping
from ...checkpoint.tensors import TensorReader
from ...files.zips.reader import Archive
from ...pickles.nodes import Call, Dict, Graph, Node, Ref
from ...pickles.opcodes import REDUCE

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
_DEVICE_TYPES: Final = "cpu|cuda|mps|xpu|hpu|npu|mtia|xla|ipu|musa|vulkan|privateuseone|meta"
#: ``torch.device("cuda:0")``, or any other string that is a device. The string ``"cpu"`` alone may mean anything. Torch
#: keeps the index in eight bits.
_DEVICE: Final = regex(
    rf'torch\.device\("((?:{_DEVICE_TYPES})(?::\d{{1,3}})?)"|"((?!cpu)(?:{_DEVICE_TYPES})(?::\d{{1,3}})?)"'
)

#: The most characters of all names together: 200,000 tensors with names of 100 characters take 20 million.
_MAX_CHARACTERS: Final = 64_000_000
#: C++ objects, such as packed parameters of quantized layers.
_NATIVE: Final = "__torch__.torch.classes."
#: The most modules that are visited; a shared module counts at every place.
_MAX_MODULES: Final = 1_000_000


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


def devices_in(text: str) -> Counter[str]:
    """Return how often a text of code names each device."""
    return Counter(match[1] or match[2] for match in _DEVICE.finditer(text))


def read_code(archive: Archive) -> ScriptCode:
    """Read the records ``code/**.py`` of an archive, bounded in number and size."""
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
            field = "parameters" if line["kind"] == "__parameters__" else "buffers"
            classes[name] = classes[name]._replace(**{field: names})
    return classes


class ModuleTensors(NamedTuple):
    """The tensors of the modules, as (name, reference).

    - ``state``: the state dict, in the order of ``state_dict()``; ``parameters`` tells whether each is a parameter.
    - ``plain``: other tensor attributes.
    - ``hidden``: modules whose state only their code restores; ``guessed``: modules whose code is missing.
    """

    state: list[tuple[str, Ref]]
    parameters: list[bool]
    plain: list[tuple[str, Ref]]
    hidden: list[str]
    guessed: list[str]


def module_tensors(graph: Graph, reader: TensorReader, code: ScriptCode) -> ModuleTensors:
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
        submodules = []
        buffers = []
        for name, value in attributes:
            node = graph.nodes[value]
            if type(node) is not Call:
                continue
            full = prefix + name
            if reader.tensor(value) is not None:
                characters += len(full)
                if script_class is None or name in script_class.parameters:
                    tensors.state.append((full, value))
                    tensors.parameters.append(True)
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
        tensors.parameters.extend([False] * len(buffers))
        work.extend(reversed(submodules))
    return tensors


def add_state_dict(nodes: list[Node], reader: TensorReader, state: list[tuple[str, Ref]]) -> Ref:
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
