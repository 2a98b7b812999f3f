"""Walk the object graph once: tensors and their paths, state dicts, top-level entries, devices, and their sums."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice
from math import prod
from typing import Final, TypeAlias

from ..base.dtypes import BY_NAME
from ..base.errors import MalformedError
from ..base.lazy import regex
from ..base.limits import LIMITS
from ..base.records import NamedTuple
from ..base.text import words
from ..pickles.nodes import Call, Dict, Global, Graph, Node, Persistent, Ref, children
from .objects import (
    COMPILED,
    PLAIN,
    attributes,
    by_name,
    callable_name,
    class_name,
    device_text,
    mapping,
    module_fields,
    plain_parts,
)
from .paths import Child, as_children, bounded, extra_children, joined, sequence
from .tensors import Tensor, TensorReader, extent, view_id
from .unsupported import unsupported

#: The end of keys whose values TransformerEngine unpickles (transformer_engine/pytorch/module/base.py).
EXTRA_STATE = "_extra_state"
#: Dtypes with one-byte elements.
_BYTES: Final = frozenset(name for name, dtype in BY_NAME.items() if dtype.itemsize == 1)


class TensorEntry(NamedTuple):
    """A tensor at a path; tied tensors have an entry for each path.

    ``path`` is spelled as in ``inspect``. ``key`` is the name in the state dict, or the last step of the path.
    ``state_dict`` is the number of the state dict that holds it, or -1. ``top`` is the number of the top-level entry
    above it, or -1 for the root. ``holder`` is the reference of its container.

    >>> checkpoint = ckptool.open("training.pth")
    >>> entry = checkpoint.survey.tensors[0]
    >>> entry.path, entry.tensor.dtype
    ('state_dict["module.stem.0.weight"]', 'float32')
    """

    path: str
    key: str
    ref: Ref
    tensor: Tensor
    state_dict: int
    top: int
    holder: Ref = -1


class StateDict(NamedTuple):
    """A mapping from parameter names to tensors.

    ``path`` is "" for the root. ``items`` are (key, value) references in order; if a root mixes a model with other
    entries, only the entries of the model. ``metadata`` is the reference of ``_metadata``, or -1. ``confidence`` is
    "high" or "low".

    >>> [(item.path, len(item.items)) for item in ckptool.open("training.pth").state_dicts]
    [('state_dict', 14)]
    """

    path: str
    ref: Ref
    container: str
    items: list[tuple[Ref, Ref]]
    metadata: Ref
    confidence: str


class TopEntry(NamedTuple):
    """A child of the root: an entry of a mapping, an element of a list, or an attribute of an object."""

    key: str
    path: str
    ref: Ref


class DeviceName(NamedTuple):
    """A device named outside of storages: a ``torch.device`` object or a string."""

    path: str
    ref: Ref
    device: str
    is_object: bool


class Survey(NamedTuple):
    """The results of the walk, in the order of the file."""

    reader: TensorReader
    tensors: list[TensorEntry]
    state_dicts: list[StateDict]
    entries: list[TopEntry]
    devices: list[DeviceName]
    #: storages outside of tensors: (path, reference, number of the top-level entry)
    storages: list[tuple[str, Ref, int]]
    #: the first path of an object of each class, by class name; not for classes of Python, torch and numpy
    objects: dict[str, str]
    #: paths of pickled modules
    modules: list[str]
    #: for each container, the container that holds it at its first path; -1 for the root
    holders: dict[Ref, Ref]
    #: number of unlisted tensor paths, beyond the limit ``limits.places``
    unlisted: int
    #: descriptions of constructs that ckptool does not follow, by reference (see the module ``unsupported``)
    unsupported: dict[Ref, str]

    @property
    def may_be_quantized(self) -> bool:
        """Whether a tensor has a class, or a dtype in which libraries keep the codes of quantized weights."""
        kinds = {(entry.tensor.dtype, entry.tensor.cls) for entry in self.tensors}
        codes = ("int8", "int16", "int32", "uint8", "uint16", "float8", "float4", "q")
        return any(cls or dtype.startswith(codes) for dtype, cls in kinds)

    def byte_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor, tensor part and bare storage that may hold the bytes of a pickle, with its path.

        They have one-byte elements, or a key that ends with ``_extra_state``, which TransformerEngine unpickles.
        """
        for entry in self.tensors:
            extra = str(entry.key).endswith(EXTRA_STATE)
            if not extra and entry.tensor.kind == "dense" and entry.tensor.dtype not in _BYTES:
                continue  # most tensors
            for part in self.reader.parts(entry.tensor):
                dtype = BY_NAME.get(part.dtype)
                if part.storage and dtype is not None and (extra or dtype.itemsize == 1):
                    yield entry.path, part
        for path, ref, _ in self.storages:
            storage = self.reader.storage(ref)
            if storage is not None and storage.dtype.itemsize == 1:
                yield path, Tensor("dense", "uint8", (storage.nbytes,), (1,), 0, storage.key, storage.location, False)

    def inside(self, ref: Ref) -> set[Ref]:
        """Return ``ref`` and the containers that it is the first to hold."""
        containers = {ref}
        for container, holder in self.holders.items():  # holders come first
            if holder in containers:
                containers.add(container)
        return containers

    def tensors_in(self, paths: Collection[str] | None = None) -> list[TensorEntry]:
        """Return the tensors of the state dicts at these paths; for None, of all state dicts."""
        numbers = {number for number, item in enumerate(self.state_dicts) if paths is None or item.path in paths}
        return [entry for entry in self.tensors if entry.state_dict in numbers]


#: A string that is a device as torch spells it.
_DEVICE = regex(r"(cuda|mps|xpu|hpu|npu|mtia|xla|ipu|musa|vulkan|privateuseone|meta)(:\d+)?\Z")

#: Keys under which training scripts keep optimizers, whose states sometimes have parameter names as keys. This pattern,
#: like all patterns for names from files, has no ``.*``, so it takes linear time for a name of any length.
_OPTIMIZER_KEY = regex(r"(?:\A|[_\-. ])[Oo]pt(?:im(?:i[sz]er)?)?s?(?=[_\-. A-Z0-9]|\Z)")

#: Values that optimizers keep for each parameter.
_SLOTS = words("""
    step exp_avg exp_avg_sq max_exp_avg_sq exp_inf momentum_buffer square_avg acc_delta sum grad_avg eta mu ax prev
    step_size d d_numer h m v momentum variance exp_avg_diff neg_pre_grad mu_product exp_avg_sq_row exp_avg_sq_col RMS
    slow_buffer cached_p state1 state2 qmap1 qmap2 absmax1 absmax2 master_param
""")

#: Last segments of the names of parameters and buffers in torch's own modules.
_PARAMETER = regex(
    r"(?:weights?|bias(?:es)?|gamma|beta|running_(?:mean|var)|num_batches_tracked"
    r"|(?:in_proj|weight|bias)_\w+|\w+_(?:weight|bias))\Z"
)

#: Last segments under which modules keep values other than tensors (nn.Module.get_extra_state, quantized Linear).
_NOT_TENSORS = frozenset(("_extra_state", "_packed_params", "dtype", "scale", "zero_point"))

#: Names in an optimizer state that DCP or Megatron-LM flattened, such as "optimizer.state.exp_avg.weight", and of
#: objects that ranks save, such as "rng_state/shard_0.0_1.1" of Megatron-LM.
_BESIDE_MODEL = regex(
    r"(?:\A|\.)optim(?:izer)?s?\.(?:state|param_state|param_groups|distributed)(?=[._])"
    r"|/shard_[\d.]{1,40}_[\d.]{1,40}\Z|(?:\A|\.)rng_state\Z"
)

#: Types of constants that the walk skips.
_BARREN = frozenset((int, float, bool, type(None)))

#: Keys under which training scripts keep a model. They support the evidence of the content, and never replace it.
_MODEL_KEY = regex(r"state_?dict|(?:\A|[_\-.])(?:model|net|network|module|weights|params|ema)(?=[_\-.\d]|\Z)", re.I)


#: A node to visit: reference, path, last step, whether it may be or hold a state dict, number of the state dict that
#: holds it (or -1), top-level entry, container. A plain tuple, because there is one for every tensor.
_Task: TypeAlias = tuple[Ref, str, str, bool, int, int, Ref]


def survey(graph: Graph, reader: TensorReader | None = None, *, named: bool = False) -> Survey:
    """Walk the graph once, and return its tensors, state dicts and entries.

    A container that several paths reach is entered at the first; a tensor is listed at every path that points to it.
    ``reader`` may be an existing reader of this graph. ``named`` says that in this format the root is a state dict
    whose keys may be any text. Raises MalformedError if objects are shared so often that the walk would take too long.
    """
    walk = _SurveyWalk(graph, reader or TensorReader(graph), named)
    walk.survey.unsupported.update(unsupported(graph, walk.reader))
    walk.run()
    return walk.survey._replace(unlisted=walk.unlisted)


class _SurveyWalk:
    def __init__(self, graph: Graph, reader: TensorReader, named: bool) -> None:
        self.named = named
        self.graph = graph
        self.reader = reader
        self.survey = Survey(self.reader, [], [], [], [], [], {}, [], {}, 0, {})
        self.metadata_of: dict[int, Ref] = {}
        #: References that were listed once: tensors and device names. ``repetitions_left`` is the number of further
        #: paths that may be listed; ``unlisted`` counts the tensor paths beyond it.
        self.seen: set[Ref] = set()
        #: Tensors of unknown kind. Tensors among their arguments are their parts, and are not listed.
        self.unknown: set[Ref] = set()
        self.repetitions_left = LIMITS.places
        self.unlisted = 0
        #: The number of entries that may still be followed, because one list can fill many OrderedDicts or sets.
        self.entries_left = 4 * len(graph.nodes) + LIMITS.places
        self.counted = False

    def run(self) -> None:
        nodes, reader, result, holders = self.graph.nodes, self.reader, self.survey, self.survey.holders
        read, seen, add_tensor, new = reader.tensor, self.seen, result.tensors.append, tuple.__new__
        work: list[Iterator[_Task]] = [iter([(self.graph.root, "", "", True, -1, -1, -1)])]
        while work:
            for task in work[-1]:
                ref, path, key, _, state_dict, top, holder = task
                node = nodes[ref]
                node_type = type(node)
                if node_type in _BARREN:
                    continue
                if node_type is Call:
                    tensor = read(ref)
                    if tensor is not None:
                        if (ref not in seen or self.is_listed(ref, True)) and holder not in self.unknown:
                            seen.add(ref)
                            add_tensor(new(TensorEntry, (path, key, ref, tensor, state_dict, top, holder)))
                        if tensor.kind != "unknown":
                            continue
                        # List also the storages, devices and other objects that it holds.
                        self.unknown.add(ref)
                        task = (ref, path, key, False, state_dict, top, holder)
                elif node_type is str:
                    if _DEVICE.match(node) and self.is_listed(ref, False):  # type: ignore[arg-type]
                        result.devices.append(DeviceName(path, ref, node, False))  # type: ignore[arg-type]
                    continue
                elif node_type is Global and node.filling is None:  # type: ignore[union-attr]
                    continue  # there may be millions of names, and they hold nothing
                if ref in holders:
                    continue
                holders[ref] = holder
                if node_type is Dict and ref != self.graph.root:
                    parts = plain_parts(self.graph, ref)
                    if parts is not None and not any(type(part) is str and _DEVICE.match(part) for part in parts[1::2]):
                        continue  # it holds neither containers nor devices
                below = self.enter(task, node)
                work.append(self.tops(below) if ref == self.graph.root else below)
                break
            else:
                work.pop()
        if not any(item.confidence == "high" for item in result.state_dicts):
            self.find_mixed_root()

    def is_listed(self, ref: Ref, is_tensor: bool) -> bool:
        """Return whether to list this path of a node: always the first path, and a limited number of repetitions."""
        if ref not in self.seen:
            self.seen.add(ref)
        elif self.repetitions_left > 0:
            self.repetitions_left -= 1
        else:
            self.unlisted += is_tensor
            return False
        return True

    def tops(self, below: Iterator[_Task]) -> Iterator[_Task]:
        """List the children of the root as top-level entries, and yield them with their numbers."""
        tasks = list(islice(below, len(self.graph.nodes) + LIMITS.places))
        new = tuple.__new__
        self.survey.entries.extend([new(TopEntry, (task[2], task[1], task[0])) for task in tasks])
        for number, (ref, path, step, eligible, state_dict, _, holder) in enumerate(tasks):
            yield ref, path, step, eligible, state_dict, number, holder
        yield from below

    def enter(self, task: _Task, node: Node) -> Iterator[_Task]:
        """Return the children of a node; list it if it is a storage, a device or an object."""
        graph, found = self.graph, self.survey
        ref, path, _, eligible, _, top, _ = task
        inside = sequence(graph, ref)
        if inside is not None:
            if type(node) is Call:
                self.spend(len(inside))
            return self.elements(task, inside, eligible and type(node) is not Call)
        if isinstance(node, Persistent) and self.reader.storage(ref) is not None:
            found.storages.append((path, ref, top))
            return iter(())
        device = device_text(graph, ref)
        if device is not None:
            found.devices.append(DeviceName(path, ref, device, True))
            return iter(())
        items = mapping(graph, ref)
        name = class_name(graph, ref) if isinstance(node, Call) else ""
        if items is None and "." in name and not name.startswith(("torch.", "numpy.", "collections.")):
            found.objects.setdefault(name, path)
        if isinstance(node, Call) and (name == COMPILED or (name != "OrderedDict" and module_fields(graph, node))):
            found.modules.append(path)
        return self.filled(task, node, items)

    def spend(self, count: int) -> None:
        """Raise MalformedError once the walk has followed four times as many entries as the file has."""
        self.entries_left -= count
        if self.entries_left < 0 and not self.counted:
            # Nodes alone are a poor measure: a million zeros are one node. So count the references once.
            self.counted = True
            self.entries_left += 4 * sum(len(children(node)) for node in self.graph.nodes)
        if self.entries_left < 0:
            raise MalformedError("its containers share so many entries that they cannot all be followed")

    def elements(self, task: _Task, inside: Sequence[Ref], eligible: bool) -> Iterator[_Task]:
        """Yield the elements of a sequence; only the root lists numbers, because there may be millions of them."""
        nodes = self.graph.nodes
        own, path, _, _, _, top, _ = task
        base = bounded(path, own)
        for number, ref in enumerate(inside):
            if type(nodes[ref]) not in _BARREN or own == self.graph.root:
                step = f"[{number}]"
                yield ref, base + step, step, eligible, -1, top, own

    def filled(self, task: _Task, node: Node, items: list[tuple[Ref, Ref]] | None) -> Iterator[_Task]:
        """Return the entries of a mapping (``items`` is None for another node) and the other children of the node."""
        graph = self.graph
        own, path, step, eligible, _, _, _ = task
        number = -1
        model = items
        if items is not None:
            self.spend(len(items))
            metadata = self.metadata(node)
            confidence = self.judge(path, step, node, items, metadata) if eligible else ""
            if confidence:
                number, container = len(self.survey.state_dicts), class_name(graph, own)
                if path == "" and metadata < 0 and not self.named:
                    model = self.of_model(items) or items
                state_dict = StateDict(bounded(path, own), own, container, model or [], metadata, confidence)
                self.survey.state_dicts.append(state_dict)
            # The state dict of an optimizer holds no state dict of a model.
            eligible = eligible and not confidence and not {"state", "param_groups"} <= by_name(graph, items).keys()
        entries = as_children(graph, items or ())
        inside = None if model is items else {key for key, _ in model or ()}
        return chain(self.entries(task, entries, eligible, number, inside), self.others(task, entries))

    def of_model(self, items: list[tuple[Ref, Ref]]) -> list[tuple[Ref, Ref]]:
        """Return the entries of a root that belong to a model: no optimizer state, but other values of modules."""
        nodes, tensor = self.graph.nodes, self.reader.tensor
        own = [(item, key) for item in items if not _BESIDE_MODEL.search(key := str(nodes[item[0]]))]
        model = [item for item, key in own if tensor(item[1]) or key.rpartition(".")[2] in _NOT_TENSORS]
        return items if len(model) == len(items) else model

    def find_mixed_root(self) -> None:
        """List a root with a model and training state (of torchtitan, Megatron-LM) if nothing in it is a state dict."""
        graph, nodes, survey = self.graph, self.graph.nodes, self.survey
        cls, items = class_name(graph, graph.root), mapping(graph, graph.root)
        if not items or cls not in ("dict", "OrderedDict") or any(type(nodes[key]) is not str for key, _ in items):
            return
        model = self.of_model(items)
        names = [str(nodes[key]) for key, value in model if self.reader.tensor(value) is not None]
        dotted = sum("." in name for name in names)
        if dotted * 2 <= len(names) or any("/" in name or "\\" in name for name in names):
            return
        training = any(_BESIDE_MODEL.search(str(nodes[key])) for key, _ in items)
        if not (training or any("." in name and _PARAMETER.match(name.rpartition(".")[2]) for name in names)):
            return
        number, inside = len(survey.state_dicts), {str(nodes[key]) for key, _ in model}
        survey.state_dicts.append(StateDict("", graph.root, cls, model, -1, "high"))
        for place, entry in enumerate(survey.tensors):
            if entry.holder == graph.root and entry.key in inside:
                survey.tensors[place] = entry._replace(state_dict=number)

    def entries(
        self, task: _Task, entries: list[Child], eligible: bool, state_dict: int, inside: set[Ref] | None
    ) -> Iterator[_Task]:
        """Yield the entries of a mapping. Those with a key in ``inside``, or all for None, belong to ``state_dict``."""
        nodes = self.graph.nodes
        own, path, _, _, _, top, _ = task
        base, root = bounded(path, own), own == self.graph.root
        for step, ref, key_ref in entries:
            if type(nodes[ref]) in _BARREN and not root:
                continue
            key = nodes[key_ref]
            where = base + step if base or step[:1] != "." else step[1:]
            if type(key) is not str:
                yield ref, where, step, eligible, state_dict, top, own
            else:
                # A mapping with ``_metadata`` is a module's state dict, whatever its key.
                allowed = eligible and (not _OPTIMIZER_KEY.search(key) or self.metadata(nodes[ref]) >= 0)
                number = state_dict if inside is None or key_ref in inside else -1
                yield ref, where, key, allowed, number, top, own

    def others(self, task: _Task, entries: list[Child]) -> Iterator[_Task]:
        """Yield the children of a node other than its entries; they hold no state dicts."""
        own, path, _, _, _, top, _ = task
        base = bounded(path, own)
        for step, ref, _ in extra_children(self.graph, own, entries):
            if step != "._metadata" or not self.is_plain(ref):
                yield ref, joined(base, step), step.removeprefix("."), False, -1, top, own

    def is_plain(self, metadata: Ref) -> bool:
        """Return whether a ``_metadata`` has only dicts of numbers and strings, as torch writes about each module."""
        nodes = self.graph.nodes
        dicts = [nodes[ref] for _, ref in mapping(self.graph, metadata) or ()]
        pairs = [node.pairs for node in dicts if type(node) is Dict]
        kinds = map(type, map(nodes.__getitem__, chain.from_iterable(pairs)))
        return len(pairs) == len(dicts) and PLAIN.issuperset(kinds)

    def judge(self, path: str, step: str, node: Node, items: list[tuple[Ref, Ref]], metadata: Ref) -> str:
        """Return the confidence that a mapping is a state dict: "high", "low", or "" if it is not one."""
        nodes, tensor = self.graph.nodes, self.reader.tensor
        if isinstance(node, Call) and callable_name(self.graph, node.func) != "collections.OrderedDict":
            return ""
        dotted = 0
        keys = [nodes[ref] for ref, _ in items]
        sure = self.named and path == ""
        for key in keys:
            if type(key) is not str or (not sure and ("/" in key or "\\" in key)):
                return ""
            dotted += "." in key
        if metadata >= 0:
            return "high"
        others = [str(nodes[key_ref]) for key_ref, value in items if tensor(value) is None]
        tensors = len(items) - len(others)
        if not tensors:
            return ""
        if others:
            kept = sum(key.rpartition(".")[2] in _NOT_TENSORS for key in others)
            return "high" if (tensors + kept) * 2 > len(items) and dotted * 2 > len(items) else ""
        if _SLOTS.issuperset(keys) and path:
            return ""
        if dotted or path == "" or isinstance(node, Call) or _MODEL_KEY.search(step):
            return "high"
        known = sum(_PARAMETER.match(str(key)) is not None for key in keys)
        return "high" if known * 2 > len(items) else "low"

    def metadata(self, node: Node) -> Ref:
        """Return the reference of ``_metadata`` in the state of an OrderedDict, or -1."""
        if not isinstance(node, Call) or not node.states:
            return -1
        known = self.metadata_of.get(id(node))
        if known is None:
            nodes = self.graph.nodes
            named = [value for key, value in attributes(self.graph, node) if nodes[key] == "_metadata"]
            known = next((value for value in reversed(named) if mapping(self.graph, value) is not None), -1)
            self.metadata_of[id(node)] = known
        return known


# -- Sums


class Share(NamedTuple):
    """The number of tensors and bytes on one device or of one dtype.

    A tensor at several paths counts once per path, its bytes once. ``others`` is the part of ``nbytes`` in storages
    that no tensor uses, such as the constants of a program.
    """

    name: str
    tensors: int
    nbytes: int
    others: int = 0


class Account(NamedTuple):
    """The sums over a survey.

    ``entry_bytes`` and ``entry_tensors`` have one number per top-level entry; a storage counts for the entry that
    mentions it first. ``wasteful`` lists the storages with unused bytes as (path, bytes used, bytes), the largest waste
    first.
    """

    devices: list[Share]
    dtypes: list[Share]
    entry_bytes: list[int]
    entry_tensors: list[int]
    storage_bytes: int
    unused_bytes: int
    shared_storages: int
    wasteful: list[tuple[str, int, int]]


def account(survey: Survey) -> Account:
    """Add up a survey."""
    reader, storages = survey.reader, survey.reader.storages
    entry_bytes, entry_tensors = [0] * len(survey.entries), [0] * len(survey.entries)
    located, others, users = Counter[str](), Counter[str](), defaultdict[str, int](int)
    typed: dict[str, list[int]] = {}
    views = defaultdict[str, list[tuple[int, int, int]]](list)
    first: dict[str, str] = {}
    seen: set[object] = set()
    # Width of an element, extent and distinct bytes of a layout. Many tensors share one.
    sizes: dict[tuple[tuple[int, ...], tuple[int, ...], int], tuple[int, int, int]] = {}
    for entry in survey.tensors:
        tensor = entry.tensor
        located[tensor.location] += 1
        sums = typed.setdefault(tensor.dtype, [0, 0])
        sums[0] += 1
        identity = view_id(tensor) if tensor.storage else entry.ref
        if identity not in seen:
            seen.add(identity)
            sums[1] += tensor.own_bytes
        if entry.top >= 0:
            entry_tensors[entry.top] += 1
        for part in reader.parts(tensor) if tensor.parts else (tensor,):
            key = part.storage
            if not key:
                continue
            users[key] += 1
            if key not in first:
                first[key] = entry.path
                if entry.top >= 0:
                    entry_bytes[entry.top] += storages[key].nbytes
            layout = (part.shape, part.stride, part.own_bytes)
            if layout not in sizes:
                width = part.own_bytes // max(part.numel, 1) or 1
                # Dimensions with stride 0 repeat elements.
                steps = zip(part.shape, part.stride or part.shape)
                distinct = prod(size for size, step in steps if step or not size)
                sizes[layout] = (width, extent(part.shape, part.stride) * width, distinct * width)
                if part.own_bytes % max(part.numel, 1):  # several elements share bytes
                    sizes[layout] = (width, part.own_bytes, part.own_bytes)
            width, size, distinct = sizes[layout]
            views[key].append((part.offset * width, size, distinct))
    for path, ref, top in survey.storages:
        storage = reader.storage(ref)
        if storage is not None:
            if storage.key not in first and top >= 0:
                entry_bytes[top] += storage.nbytes
            first.setdefault(storage.key, path)
            views.setdefault(storage.key, []).append((0, storage.nbytes, storage.nbytes))
    devices = Counter[str](dict.fromkeys(located, 0))
    wasteful = []
    for key, storage in storages.items():
        nbytes = storage.nbytes
        devices[storage.location] += nbytes
        spans = views.get(key)
        if spans is None:
            others[storage.location] += nbytes
            continue
        waste = nbytes - min(_covered(spans), nbytes) if spans[0][2] != nbytes or len(spans) > 1 else 0
        if waste > 0:
            wasteful.append((first[key], nbytes - waste, nbytes))
    wasteful.sort(key=lambda item: item[1] - item[2])
    unused = sum(nbytes - used for _, used, nbytes in wasteful)
    by_device = [Share(name, located.get(name, 0), size, others[name]) for name, size in devices.items()]
    by_dtype = [Share(name, number, size) for name, (number, size) in typed.items()]
    shared = sum(number > 1 for number in users.values())
    return Account(by_device, by_dtype, entry_bytes, entry_tensors, devices.total(), unused, shared, wasteful)


def _covered(spans: list[tuple[int, int, int]]) -> int:
    """Return how many bytes the views (offset, extent, distinct bytes) read; at most, where they overlap."""
    stretches: list[list[int]] = []  # begin, end, bytes in use
    for offset, size, distinct in sorted(spans):
        if stretches and offset < stretches[-1][1]:
            begin, end, _ = stretches[-1]
            end = max(end, offset + size)
            stretches[-1] = [begin, end, end - begin]
        else:
            stretches.append([offset, offset + size, min(distinct, size)])
    return sum(used for _, _, used in stretches)
