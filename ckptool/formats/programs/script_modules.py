"""The modules of a TorchScript program, and the tensors that they hold by name.

A module is an object whose class the code declares as one; what of it is a parameter or a buffer the code declares,
too. Before torch 1.6 it did not tell buffers from other attributes: for later ones none is a buffer then
(``import_source.cpp``, ``importClass``), and ``state_dict()`` has the parameters alone.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ...base.errors import MalformedError
from ...base.limits import LIMITS
from ...checkpoint.objects import callable_name, mapping
from ...checkpoint.tensors import TensorReader
from ...pickles.nodes import Call, Dict, Graph, Node, Ref
from ...pickles.opcodes import REDUCE
from .script_code import ClassCode, Code

#: How classes of a program begin, and what its own unpickler makes of lists; Python never resolves these.
SCRIPT_NAMES: Final = ("__torch__.", "torch.jit._pickle.")

#: Characters of all names together: 200,000 tensors under names of 100 take 20 million.
_CHARACTERS: Final = 64_000_000
#: Objects of C++, such as packed parameters of quantized layers.
_NATIVE: Final = "__torch__.torch.classes."
#: Modules that are visited: a shared one counts at every place.
_MODULES: Final = 1_000_000


class Held(NamedTuple):
    """The tensors of the modules, as (name, reference).

    ``state`` are those of the state dict in the order of ``state_dict()``, ``parameters`` whether each is a parameter;
    ``plain`` are mere attributes, ``untold`` those of them in modules whose code does not tell buffers. ``hidden`` are
    modules whose state only their code restores, ``guessed`` those whose code was not found.
    """

    state: list[tuple[str, Ref]]
    parameters: list[bool]
    plain: list[tuple[str, Ref]]
    untold: list[str]
    hidden: list[str]
    guessed: list[str]


def held_tensors(graph: Graph, reader: TensorReader, code: Code) -> Held:
    """Walk the modules from the root, parents before children; raises MalformedError for what never ends."""
    held = Held([], [], [], [], [], [])
    work = [(graph.root, "")]
    characters = visited = 0
    while work:
        ref, prefix = work.pop()
        visited += 1
        if visited > _MODULES or characters > _CHARACTERS or len(prefix) > LIMITS.path_chars:
            raise MalformedError("its modules nest without end", where="data.pkl")
        node = graph.nodes[ref]
        if type(node) is not Call:
            raise MalformedError("its root is no object of the program", where="data.pkl")
        items = _state(graph, node)
        where = prefix or "the whole program"
        if items is None:
            held.hidden.append(where.removesuffix("."))
            continue
        said = code.classes.get(callable_name(graph, node.func))
        if said is None and (items or not prefix):
            held.guessed.append(where.removesuffix("."))
        below = []
        buffers = []
        for name, value in items:
            if type(graph.nodes[value]) is not Call:
                continue
            full = prefix + name
            if reader.tensor(value) is not None:
                characters += len(full)
                kind = _kind(said, name)
                if kind == "parameter":
                    held.state.append((full, value))
                    held.parameters.append(True)
                elif kind == "buffer":
                    buffers.append((full, value))
                else:
                    held.plain.append((full, value))
                    if said is not None and said.buffers is None and name in said.tensors:
                        held.untold.append(full)
            elif _is_module(graph, value, code):
                below.append((value, f"{full}."))
            elif _name(graph, value).startswith(_NATIVE):
                held.hidden.append(full)
        held.state.extend(buffers)
        held.parameters.extend([False] * len(buffers))
        work.extend(reversed(below))
    return held


def state_dict(nodes: list[Node], reader: TensorReader, held: Held, base: int = 0) -> Ref:
    """A dict of the parameters and buffers, detached as ``state_dict()`` has them; behind the arena.

    ``base`` is where the graph of ``reader`` begins in the arena.
    """
    pairs: list[Ref] = []
    detached: dict[Ref, Ref] = {}
    no = -1
    for name, own in held.state:
        ref = base + own
        if ref not in detached:
            tensor = reader.tensor(own)
            detached[ref] = ref
            node = nodes[ref]
            args = nodes[node.args] if type(node) is Call else ()
            if type(node) is Call and type(args) is tuple and tensor is not None and tensor.requires_grad:
                at = 5 if tensor.kind == "quantized" else 4
                if no < 0:
                    no = len(nodes)
                    nodes.append(False)
                nodes.append((*args[:at], no, *args[at + 1 :]))
                nodes.append(Call(REDUCE, node.func, len(nodes) - 1))
                detached[ref] = len(nodes) - 1
        pairs += (len(nodes), detached[ref])
        nodes.append(name)
    nodes.append(Dict(pairs))
    return len(nodes) - 1


def _kind(said: ClassCode | None, name: str) -> str:
    if said is None or name in said.parameters:
        return "parameter"
    return "buffer" if said.buffers is not None and name in said.buffers else ""


def _name(graph: Graph, ref: Ref) -> str:
    node = graph.nodes[ref]
    return callable_name(graph, node.func) if type(node) is Call else ""


def _is_module(graph: Graph, ref: Ref, code: Code) -> bool:
    name = _name(graph, ref)
    said = code.classes.get(name)
    if said is None:
        return name.startswith("__torch__.") and not name.startswith(_NATIVE)
    return said.is_module


def _state(graph: Graph, node: Call) -> list[tuple[str, Ref]] | None:
    """The attributes in the order of the class; None where the state is none of attributes."""
    found: list[tuple[str, Ref]] = []
    for state in node.states:
        items = mapping(graph, state)
        if items is None:
            return None
        for key, value in items:
            name = graph.nodes[key]
            if type(name) is not str:
                return None
            found.append((name, value))
    return found
