"""One walk over the object graph: where the tensors are, which mappings are state dicts, what else there is."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple, TypeAlias

from ..base.errors import MalformedError
from ..base.limits import LIMITS
from ..pickles.nodes import Call, Dict, Global, Graph, Node, Persistent, Ref, children
from .objects import attributes, callable_name, class_name, device_text, mapping, plain_parts
from .paths import Child, as_children, bounded, extra_children, joined, sequence
from .tensors import Tensor, TensorReader
from .unfollowed import unfollowed


class TensorEntry(NamedTuple):
    """A tensor where it stands: tied tensors have an entry for each place.

    ``path`` as ``inspect`` spells it; ``key`` its name in the state dict, or the last step of the path;
    ``state_dict`` the number of the state dict that it is a value of, -1 for none; ``top`` the number of
    the top-level entry it is under, -1 for the root; ``holder`` the reference of what holds it.
    """

    path: str
    key: str
    ref: Ref
    tensor: Tensor
    state_dict: int
    top: int
    holder: Ref = -1


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
    #: what holds each container, at its first place; -1 for the root
    holders: dict[Ref, Ref]
    #: places of tensors that are not listed: more than ``limits.places`` at which something stands again
    unlisted: int
    #: what is not followed, in words: see ``unfollowed``
    unfollowed: dict[Ref, str]

    def inside(self, ref: Ref) -> set[Ref]:
        """The node ``ref`` and the containers in it, each counted where it was first met."""
        found = {ref}
        for container, holder in self.holders.items():  # holders come first
            if holder in found:
                found.add(container)
        return found

    def tensors_in(self, paths: Collection[str] | None = None) -> list[TensorEntry]:
        """Return the tensors of the state dicts at these paths, of all state dicts for None."""
        numbers = {number for number, item in enumerate(self.state_dicts) if paths is None or item.path in paths}
        return [entry for entry in self.tensors if entry.state_dict in numbers]


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
#: What dicts of ``_metadata`` hold.
_PLAIN = _BARREN | {str}

#: Where training scripts keep a model; evidence beside the content, never instead of it.
_MODEL_KEY = re.compile(
    r"state_?dict|(?:\A|[_\-.])(?:model|net|network|module|weights|params|ema)(?=[_\-.\d]|\Z)", re.I
)


#: A place to go to: reference, path, last step, may there be state dicts, state dict it is a value of (or -1),
#: top-level entry, what holds it. A plain tuple, because there is one for every tensor.
_Task: TypeAlias = tuple[Ref, str, str, bool, int, int, Ref]


def survey(graph: Graph, reader: TensorReader | None = None, *, named: bool = False) -> Survey:
    """Walk the graph once. Each container is entered where it is first met; tensors count at every place.

    ``reader`` is one of this very graph that has read something of it already; ``named`` says that the format has
    state dicts at the root, whose keys may be any text. Raises MalformedError where lists are the content of so many
    mappings that their entries cannot be followed.
    """
    walk = _Walk(graph, reader or TensorReader(graph), named)
    walk.found.unfollowed.update(unfollowed(graph, walk.reader))
    walk.run()
    return walk.found._replace(unlisted=walk.unlisted)


class _Walk:
    def __init__(self, graph: Graph, reader: TensorReader, named: bool) -> None:
        self.named = named
        self.graph = graph
        self.reader = reader
        self.found = Survey(self.reader, [], [], [], [], [], {}, [], {}, 0, {})
        self.metadata_of: dict[int, Ref] = {}
        #: Tensors and names of devices that were met; how often one may be met again, and how often one was too often.
        self.met: set[Ref] = set()
        self.left = LIMITS.places
        self.unlisted = 0
        #: Entries that may be followed: one list can be the content of many OrderedDicts, or sets.
        self.entries_left = 4 * len(graph.nodes) + LIMITS.places
        self.counted = False

    def run(self) -> None:
        nodes, reader, found, holders = self.graph.nodes, self.reader, self.found, self.found.holders
        work: list[Iterator[_Task]] = [iter([(self.graph.root, "", "", True, -1, -1, -1)])]
        while work:
            task = next(work[-1], None)
            if task is None:
                work.pop()
                continue
            ref, path, key, _, state_dict, top, holder = task
            node = nodes[ref]
            kind = type(node)
            if kind in _BARREN:
                continue  # numbers and None can hold nothing
            if kind is Call:
                tensor = reader.tensor(ref)
                if tensor is not None:
                    if self.listed(ref, True):
                        found.tensors.append(TensorEntry(path, key, ref, tensor, state_dict, top, holder))
                    continue
            elif kind is str:
                if _DEVICE.match(node) and self.listed(ref, False):  # type: ignore[arg-type]
                    found.devices.append(DeviceName(path, ref, node, False))  # type: ignore[arg-type]
                continue
            elif kind is Global and node.filling is None:  # type: ignore[union-attr]
                continue  # a name: millions of them are nothing to enter
            if ref in holders:
                continue
            holders[ref] = holder
            if kind is Dict and self.is_barren(ref):
                continue
            below = self.enter(task, node)
            work.append(self.tops(below) if ref == self.graph.root else below)

    def is_barren(self, ref: Ref) -> bool:
        """Is it a dict below the root in which nothing can be found?"""
        parts = plain_parts(self.graph, ref) if ref != self.graph.root else None
        return parts is not None and not any(type(part) is str and _DEVICE.match(part) for part in parts[1::2])

    def listed(self, ref: Ref, tensor: bool) -> bool:
        """Is this place listed? The first one of everything is, and many of the others."""
        if ref not in self.met:
            self.met.add(ref)
        elif self.left > 0:
            self.left -= 1
        else:
            self.unlisted += tensor
            return False
        return True

    def tops(self, below: Iterator[_Task]) -> Iterator[_Task]:
        """The places below the root, each the beginning of an entry."""
        # All of them are there before the first one is entered.
        tasks = list(islice(below, len(self.graph.nodes) + LIMITS.places))
        self.found.entries.extend(Entry(task[2], task[1], task[0]) for task in tasks)
        yield from ((*task[:5], number, task[6]) for number, task in enumerate(tasks))
        yield from below

    def enter(self, task: _Task, node: Node) -> Iterator[_Task]:
        """The places below a node."""
        ref, path, _, eligible, _, top, _ = task
        inside = sequence(self.graph, ref)
        if inside is not None:
            if type(node) is Call:
                self.spend(len(inside))
            return self.elements(task, inside, eligible and type(node) is not Call)
        if isinstance(node, Persistent) and self.reader.storage(ref) is not None:
            self.found.storages.append((path, ref, top))
            return iter(())
        return self.call(task, node) if isinstance(node, Call) else self.filled(task, node)

    def spend(self, count: int) -> None:
        """Raise MalformedError once more entries were followed than four times those that there are."""
        self.entries_left -= count
        if self.entries_left < 0 and not self.counted:
            # A million zeros are one node.
            self.counted = True
            self.entries_left += 4 * sum(len(children(node)) for node in self.graph.nodes)
        if self.entries_left < 0:
            raise MalformedError("its containers share so many entries that they cannot all be followed")

    def elements(self, task: _Task, inside: Sequence[Ref], eligible: bool) -> Iterator[_Task]:
        """The places of elements. Of numbers there may be millions: those below the root alone are places."""
        nodes = self.graph.nodes
        own, path, _, _, _, top, _ = task
        base = bounded(path, own)
        for number, ref in enumerate(inside):
            if type(nodes[ref]) not in _BARREN or own == self.graph.root:
                step = f"[{number}]"
                yield ref, base + step, step, eligible, -1, top, own

    def filled(self, task: _Task, node: Node) -> Iterator[_Task]:
        """The places below a dict, and what else a node holds that no call made."""
        held = self.mapping(task, node, mapping(self.graph, task[0]) or [])
        return chain(self.entered(task, held), self.others(task, held[0]))

    def mapping(self, task: _Task, node: Node, items: list[tuple[Ref, Ref]]) -> tuple[list[Child], bool, int]:
        """The entries of a mapping, whether there may be state dicts in them, and its number if it is one, or -1."""
        nodes = self.graph.nodes
        own, base, step, eligible, _, _, _ = task
        self.spend(len(items))
        inside = -1
        metadata = self.metadata(node)
        confidence = self.judge(base, step, node, items, metadata) if eligible else ""
        if confidence:
            inside = len(self.found.state_dicts)
            container = class_name(self.graph, own)
            self.found.state_dicts.append(StateDict(bounded(base, own), own, container, items, metadata, confidence))
        if confidence or {"state", "param_groups"} <= {nodes[key] for key, _ in items if type(nodes[key]) is str}:
            eligible = False
        return as_children(self.graph, items), eligible, inside

    def entered(self, task: _Task, held: tuple[list[Child], bool, int]) -> Iterator[_Task]:
        nodes = self.graph.nodes
        own, path, _, _, _, top, _ = task
        entries, eligible, inside = held
        base, root = bounded(path, own), own == self.graph.root
        for step, ref, key_ref in entries:
            if type(nodes[ref]) in _BARREN and not root:
                continue  # there is nothing in it
            key = nodes[key_ref]
            where = joined(base, step)
            if type(key) is not str:
                yield ref, where, step, eligible, inside, top, own
            else:
                # A module's own state dict is one under any name.
                allowed = eligible and (not _OPTIMIZER_KEY.search(key) or self.metadata(nodes[ref]) >= 0)
                yield ref, where, key, allowed, inside, top, own

    def others(self, task: _Task, entries: list[Child]) -> Iterator[_Task]:
        """What a node holds beside its entries: there are no state dicts in it."""
        own, path, _, _, _, top, _ = task
        base = bounded(path, own)
        for step, ref, _ in extra_children(self.graph, own, entries):
            if step != "._metadata" or not self.is_plain(ref):
                yield ref, joined(base, step), step.removeprefix("."), False, -1, top, own

    def is_plain(self, metadata: Ref) -> bool:
        """Are there texts and numbers alone in the dicts of a ``_metadata``, as torch writes it?"""
        nodes = self.graph.nodes
        for _, ref in mapping(self.graph, metadata) or ():
            held = nodes[ref]
            if not isinstance(held, Dict) or not all(type(nodes[part]) in _PLAIN for part in held.pairs):
                return False
        return True

    def judge(self, path: str, step: str, node: Node, items: list[tuple[Ref, Ref]], metadata: Ref) -> str:
        """How surely it is a state dict: "high", "low", or "" for not at all."""
        nodes, reader = self.graph.nodes, self.reader
        if isinstance(node, Call) and callable_name(self.graph, node.func) != "collections.OrderedDict":
            return ""
        tensors = others = dotted = 0
        keys = [nodes[ref] for ref, _ in items]
        sure = self.named and path == ""
        for key in keys:
            if type(key) is not str or (not sure and ("/" in key or "\\" in key)):
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
            named = [value for key, value in attributes(self.graph, node) if nodes[key] == "_metadata"]
            found = next((value for value in reversed(named) if mapping(self.graph, value) is not None), -1)
            self.metadata_of[id(node)] = found
        return found

    def call(self, task: _Task, node: Call) -> Iterator[_Task]:
        graph = self.graph
        ref, path = task[:2]
        device = device_text(graph, ref)
        if device is not None:
            self.found.devices.append(DeviceName(path, ref, device, True))
            return iter(())
        name = class_name(graph, ref)
        items = mapping(graph, ref)
        held = self.mapping(task, node, items) if items is not None else ([], False, -1)
        if items is None and not name.startswith(("torch.", "numpy.", "collections.")) and "." in name:
            self.found.objects.setdefault(name, path)
        fields = attributes(graph, node) if node.states and name != "OrderedDict" else ()
        told = {graph.nodes[key] for key, _ in fields if type(graph.nodes[key]) is str}
        if {"_parameters", "_buffers", "_modules"} <= told:
            self.found.modules.append(path)
        return chain(self.entered(task, held), self.others(task, held[0]))
