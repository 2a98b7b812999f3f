"""One walk over the object graph: where the tensors are, which mappings are state dicts, what else there is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from .limits import LIMITS
from .objects import attributes, callable_name, class_name, device_text, mapping, spell_key
from .pickles.nodes import Call, Dict, FrozenSet, Graph, List, Node, Persistent, Ref, Set
from .tensors import Tensor, TensorReader

__all__ = ["DeviceName", "Entry", "StateDict", "Survey", "TensorEntry", "survey"]


class TensorEntry(NamedTuple):
    """A tensor where it stands: tied tensors have an entry for each place.

    ``path`` as ``inspect`` spells it; ``key`` its name in the state dict, or the last step of the path;
    ``state_dict`` the number of the state dict that it is a value of, -1 for none; ``top`` the number of
    the top-level entry it is under.
    """

    path: str
    key: str
    ref: Ref
    tensor: Tensor
    state_dict: int
    top: int


class StateDict(NamedTuple):
    """A mapping of parameter names to tensors.

    ``path`` is "" for the root; ``items`` are (key, value) references in order; ``metadata`` the
    reference of ``_metadata`` or -1; ``confidence`` "high" or "low".
    """

    path: str
    ref: Ref
    container: str
    items: list[tuple[Ref, Ref]]
    metadata: Ref
    confidence: str


class Entry(NamedTuple):
    """A top-level entry of the root: of a mapping by key, of a list by number, of an object by attribute."""

    key: str
    path: str
    ref: Ref


class DeviceName(NamedTuple):
    """A device that is named outside of storages: a ``torch.device`` object or a plain string."""

    path: str
    ref: Ref
    device: str
    is_object: bool


class Survey(NamedTuple):
    """What a walk found, in the order of the file."""

    reader: TensorReader
    tensors: list[TensorEntry]
    state_dicts: list[StateDict]
    entries: list[Entry]
    devices: list[DeviceName]
    #: bare storages: (path, reference, number of the top-level entry)
    storages: list[tuple[str, Ref, int]]
    #: objects of classes other than Python's and torch's own: path by class name, first place only
    objects: dict[str, str]
    modules: list[str]

    def within(self, entry: TensorEntry, path: str) -> bool:
        """Is a tensor in the state dict at ``path``?"""
        return entry.state_dict >= 0 and self.state_dicts[entry.state_dict].path == path


#: A device as torch spells it, alone in a string.
_DEVICE = re.compile(r"(cuda|mps|xpu|hpu|npu|mtia|xla|ipu|musa|vulkan|privateuseone|meta)(:\d+)?\Z")

#: Names under which training scripts keep optimizers; their states have parameter names as keys sometimes. Like every
#: expression that meets names from files it is searched for, without ``.*``: a name of 80 kB takes no longer for it.
_OPTIMIZER_KEY = re.compile(r"(?:\A|[_\-. ])[Oo]pt(?:im(?:i[sz]er)?)?s?(?=[_\-. A-Z0-9]|\Z)")

#: What torch.optim and its kin keep per parameter.
_SLOTS = frozenset(
    (
        *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta"),
        *("sum", "grad_avg", "eta", "mu", "ax", "prev", "step_size", "d", "d_numer", "h", "m", "v", "momentum"),
        *("variance", "exp_avg_diff", "neg_pre_grad", "mu_product", "exp_avg_sq_row", "exp_avg_sq_col", "RMS"),
        *("slow_buffer", "cached_p", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2", "master_param"),
    )
)

#: Last segments that name parameters and buffers of torch's own modules.
_PARAMETER = re.compile(
    r"(?:weights?|bias(?:es)?|gamma|beta|running_(?:mean|var)|num_batches_tracked"
    r"|(?:in_proj|weight|bias)_\w+|\w+_(?:weight|bias))\Z"
)

#: Last segments under which modules keep what is no tensor.
_NOT_TENSORS = frozenset(("_extra_state", "_packed_params", "dtype", "scale", "zero_point"))

#: Constants: there is nothing below them.
_BARREN = frozenset((int, float, bool, type(None)))

#: Where training scripts keep a model; evidence beside the content, never instead of it.
_MODEL_KEY = re.compile(
    r"state_?dict|(?:\A|[_\-.])(?:model|net|network|module|weights|params|ema)(?=[_\-.\d]|\Z)", re.I
)


#: A place to go to: reference, path, last step, may there be state dicts, state dict it is a value of (or -1),
#: top-level entry. A plain tuple, because there is one for every tensor.
_Task: TypeAlias = tuple[Ref, str, str, bool, int, int]


def survey(graph: Graph, reader: TensorReader | None = None) -> Survey:
    """Walk the graph once. Each container is entered where it is first met; tensors count at every place.

    ``reader`` is one of this very graph that has read something of it already.
    """
    walk = _Walk(graph, reader or TensorReader(graph))
    walk.run()
    return walk.found


class _Walk:
    def __init__(self, graph: Graph, reader: TensorReader) -> None:
        self.graph = graph
        self.reader = reader
        self.found = Survey(self.reader, [], [], [], [], [], {}, [])
        self.seen: set[Ref] = set()
        self.metadata_of: dict[int, Ref] = {}

    def run(self) -> None:
        nodes, reader, found = self.graph.nodes, self.reader, self.found
        work: list[_Task] = [(self.graph.root, "", "", True, -1, -1)]
        while work:
            task = work.pop()
            ref, path, key, _, state_dict, top = task
            node = nodes[ref]
            kind = type(node)
            if kind is Call:
                tensor = reader.tensor(ref)
                if tensor is not None:
                    found.tensors.append(TensorEntry(path, key, ref, tensor, state_dict, top))
                    continue
            elif kind is str:
                if _DEVICE.match(node):  # type: ignore[arg-type]
                    found.devices.append(DeviceName(path, ref, node, False))  # type: ignore[arg-type]
                continue
            if ref in self.seen:
                continue
            self.seen.add(ref)
            below = self.enter(task, node)
            if len(self.seen) == 1:
                found.entries.extend(Entry(child[2], child[1], child[0]) for child in below)
                for number, child in enumerate(below):
                    below[number] = (*child[:5], number)
            # Numbers and None can hold nothing.
            work += [child for child in reversed(below) if type(nodes[child[0]]) not in _BARREN]
            below.clear()  # a place is forgotten as soon as it was visited

    def enter(self, task: _Task, node: Node) -> list[_Task]:
        """The places below a node."""
        ref, path, _, _, _, top = task
        if isinstance(node, List | tuple | Set | FrozenSet):
            return self.elements(node if isinstance(node, tuple) else node.items, task)
        if isinstance(node, Dict):
            return self.mapping(task, node, mapping(self.graph, ref) or [])
        if isinstance(node, Persistent) and self.reader.storage(ref) is not None:
            self.found.storages.append((path, ref, top))
        if isinstance(node, Call):
            return self.call(task, node)
        return []

    def elements(self, refs: Sequence[Ref], task: _Task, shape: str = "[{}]") -> list[_Task]:
        _, path, _, eligible, _, top = task
        path = _bounded(path)
        steps = [shape.format(index) for index in range(len(refs))]
        return [(ref, path + step, step, eligible, -1, top) for step, ref in zip(steps, refs)]

    def mapping(self, task: _Task, node: Node, items: list[tuple[Ref, Ref]]) -> list[_Task]:
        nodes = self.graph.nodes
        own, base, step, eligible, _, top = task
        base = _bounded(base)
        inside = -1
        metadata = self.metadata(node)
        confidence = self.judge(base, step, node, items, metadata) if eligible else ""
        if confidence:
            inside = len(self.found.state_dicts)
            container = class_name(self.graph, own)
            self.found.state_dicts.append(StateDict(base, own, container, items, metadata, confidence))
        if confidence or {"state", "param_groups"} <= {nodes[key] for key, _ in items if type(nodes[key]) is str}:
            eligible = False
        below: list[_Task] = []
        for key_ref, ref in items:
            key = nodes[key_ref]
            if type(key) is not str:
                path = spell_key(base, key)
                below.append((ref, path, path[len(base) :], eligible, inside, top))
            else:
                path = spell_key(base, _bounded(key))
                # A module's own state dict is one under any name.
                allowed = eligible and (not _OPTIMIZER_KEY.search(key) or self.metadata(nodes[ref]) >= 0)
                below.append((ref, path, key, allowed, inside, top))
        return below

    def judge(self, path: str, step: str, node: Node, items: list[tuple[Ref, Ref]], metadata: Ref) -> str:
        """How surely it is a state dict: "high", "low", or "" for not at all."""
        nodes, reader = self.graph.nodes, self.reader
        if isinstance(node, Call) and callable_name(self.graph, node.func) != "collections.OrderedDict":
            return ""
        tensors = others = dotted = 0
        keys = [nodes[ref] for ref, _ in items]
        for key in keys:
            if type(key) is not str or "/" in key or "\\" in key:
                return ""
            dotted += "." in key
        if metadata >= 0:
            return "high"
        for key_ref, value in items:
            if reader.tensor(value) is not None:
                tensors += 1
            else:
                # Modules may keep anything under these (nn.Module.get_extra_state, quantized Linear).
                others += str(nodes[key_ref]).rpartition(".")[2] in _NOT_TENSORS
        if not tensors:
            return ""
        if tensors < len(items):
            return "high" if (tensors + others) * 2 > len(items) and dotted * 2 > len(items) else ""
        if _SLOTS.issuperset(keys) and path:
            return ""
        if dotted or path == "" or isinstance(node, Call) or _MODEL_KEY.search(step):
            return "high"
        known = sum(_PARAMETER.match(str(key)) is not None for key in keys)
        return "high" if known * 2 > len(items) else "low"

    def metadata(self, node: Node) -> Ref:
        """The reference of ``_metadata`` in the state of an OrderedDict, -1 for none."""
        if not isinstance(node, Call) or not node.states:
            return -1
        found = self.metadata_of.get(id(node))
        if found is None:
            nodes = self.graph.nodes
            named = (value for key, value in attributes(self.graph, node) if nodes[key] == "_metadata")
            found = next((value for value in named if mapping(self.graph, value) is not None), -1)
            self.metadata_of[id(node)] = found
        return found

    def call(self, task: _Task, node: Call) -> list[_Task]:
        graph = self.graph
        ref, path, key, _, _, top = task
        device = device_text(graph, ref)
        if device is not None:
            self.found.devices.append(DeviceName(path, ref, device, True))
            return []
        name = class_name(graph, ref)
        items = mapping(graph, ref)
        below = self.mapping(task, node, items) if items is not None else []
        if name == "OrderedDict":
            return below
        if items is None and not name.startswith(("torch.", "numpy.", "collections.")) and "." in name:
            self.found.objects.setdefault(name, path)
        hidden = (ref, path, key, False, -1, top)
        arguments = graph.nodes[node.args]
        if isinstance(arguments, tuple):
            below += self.elements(arguments, hidden, "({})")
        below += self.elements(node.items, hidden if items is None else task)
        names = set()
        for name_ref, value in attributes(graph, node):
            attribute = graph.nodes[name_ref]
            names.add(attribute if type(attribute) is str else None)
            name_text = _bounded(attribute) if type(attribute) is str else spell_key("", attribute)
            below.append((value, spell_key(_bounded(path), name_text), name_text, False, -1, top))
        if {"_parameters", "_buffers", "_modules"} <= names:
            self.found.modules.append(path)
        elif not names:
            states = enumerate(node.states)
            below += [(state, f"{path}(state {number})", "state", False, -1, top) for number, state in states]
        return below


def _bounded(text: str) -> str:
    """A path or key as far as a path shows it: a million nested lists must not make a million long paths."""
    return text if len(text) <= LIMITS.path_chars else text[: LIMITS.path_chars] + "..."
