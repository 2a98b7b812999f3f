"""Losses: the parts of a checkpoint that a format cannot hold, found before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from shlex import quote
from types import MappingProxyType
from typing import Final, TypeAlias

from ..base.errors import RefusedError, TargetError
from ..base.records import NamedTuple
from ..base.steps import option, suggested_output
from ..base.text import join_limited, pluralize
from ..checkpoint.checkpoint import Checkpoint, Target
from ..checkpoint.container import Manifest
from ..checkpoint.graph_editor import used_storages
from ..checkpoint.objects import mapping
from ..checkpoint.paths import as_children, joined, spell_key, within
from ..checkpoint.survey import StateDict
from ..checkpoint.tensors import Tensor, TensorReader, view_id
from ..pickles.nodes import Graph, List, Persistent, Ref

#: A description of each kind of loss, for messages.
KINDS: Final = {
    "entries": "entries outside the state dict",
    "keys": "keys that are tuples, bytes or objects",
    "containers": "empty dicts, and keys that are not strings",
    "shards": "the mark that tensors are only one rank's part",
    "strides": "the order of the elements of tensors that are not contiguous",
    "sharing": "shared memory between tensors",
    "dtypes": "tensors of some dtypes",
    "layouts": "tensors of some layouts",
    "attributes": "the classes of tensors, and attributes that were set on them",
    "requires-grad": "requires_grad, or the class Parameter",
    "devices": "device tags",
}

#: The report of each kind of loss that a conversion accepts unless it is strict: no tensor and no value is lost.
_ACCEPTED: Final = {
    "devices": "device tags dropped",
    "requires-grad": "requires_grad dropped",
    "strides": "made contiguous",
}

#: Kinds of loss that another option than ``--allow-loss`` allows.
_WAYS: Final = {"sharing": "`--tied keep-first`"}
#: Options that avoid a loss, and what they do.
_INSTEAD: Final = {"sharing": "`--tied clone` stores a copy under each name"}


class Loss(NamedTuple):
    """Content that the output would lack: its kind, and the paths or names that have it.

    ``drops``: tensors with values would be lost, so no option that allows the loss is suggested. ``minor``: entries
    that conversions leave out unless they are strict, because they hold no weights. ``key`` is the state dict to name
    in order to leave out other entries.
    """

    kind: str
    where: tuple[str, ...]
    drops: bool = False
    minor: bool = False
    key: str = ""

    @property
    def words(self) -> str:
        """A description of the loss."""
        return f"{KINDS[self.kind]}: {self._places(3)}"

    @property
    def accepted(self) -> bool:
        """Whether a conversion accepts the loss unless it is strict."""
        return self.minor or self.kind in _ACCEPTED

    @property
    def report(self) -> str:
        """What the report of a conversion says about the loss."""
        if self.kind == "entries":
            return f"left out: {self._places(6)}"
        return f"{_ACCEPTED.get(self.kind, 'without ' + KINDS[self.kind])}: {self._places(3)}"

    def _places(self, most: int) -> str:
        return join_limited([place or "(the whole file)" for place in self.where], most=most)


class Fit(NamedTuple):
    """How a checkpoint fits a format, apart from entries outside the chosen state dict.

    - ``holder``: the output, as the subject of "cannot hold".
    - ``losses``: what it would lack. ``ways``: the options that allow a kind of loss instead of ``allow_loss``.
    - ``notes``: what else is lost, or recorded in another way, for the report.
    - ``target``: the target with all details.
    - ``graph`` makes the object without its losses; None for the whole object.
    - ``relayout``: the bytes need a new layout.
    - ``size``: the bytes of the tensors, if they are divided into shards.
    """

    holder: str
    target: Target
    losses: Sequence[Loss] = ()
    notes: tuple[str, ...] = ()
    ways: Mapping[str, str] = _WAYS
    graph: Callable[[], Graph] | None = None
    relayout: bool = False
    size: int = 0


def storages_within(checkpoint: Checkpoint, ref: Ref) -> list[str]:
    """Return the nonempty storages within a value at any depth, each once and in order."""
    used = map(checkpoint.survey.reader.storage, checkpoint.graph.reachable(ref))
    return list(dict.fromkeys(storage.key for storage in used if storage is not None and storage.nbytes))


def refuse(
    losses: Sequence[Loss],
    allowed: Collection[str],
    path: str,
    target: str,
    ways: Mapping[str, str] = _WAYS,
    *,
    strict: bool = False,
) -> None:
    """Raise RefusedError unless every loss is allowed by its kind or accepted; the error names all other losses.
    ``ways`` has the options that allow a kind of loss; ``allow_loss`` allows any other kind. ``strict`` accepts none
    without such an option."""
    left = [loss for loss in losses if not {loss.kind, "all"} & {*allowed} and (strict or not loss.accepted)]
    places: dict[str, tuple[str, ...]] = {}
    for loss in left:
        places[loss.kind] = places.get(loss.kind, ()) + loss.where
    what = f"{target} cannot hold " + "; nor ".join(Loss(kind, where).words for kind, where in places.items())
    if any(loss.drops for loss in left):
        step = "torch's usual format (.pth) holds them; otherwise save plain tensors with the library that made them"
        raise RefusedError(what, path=path, next=step)
    key = next((loss.key for loss in left if loss.key), "")
    if key:
        raise RefusedError(what, path=path, next=f"{option('key', key)} writes this state dict without them")
    if left:
        kinds = dict.fromkeys(loss.kind for loss in left)
        instead = "".join(f" ({words})" for kind, words in _INSTEAD.items() if ways and kind in kinds)
        options = " ".join(ways.get(kind, option("allow_loss", kind)) for kind in kinds)
        raise RefusedError(what, path=path, next=f"to write the file without them{instead}: {options}")


def refuse_emptied(checkpoint: Checkpoint, kept: int | None = None) -> None:
    """Raise RefusedError for an output without tensors from an input with tensors, unless the user named what to
    remove. ``kept`` is the number of tensors in the output, or None if the output has all tensors of the checkpoint."""
    graph = checkpoint.graph
    if (
        kept
        or checkpoint.by_name
        or (kept is None and any(type(graph.nodes[ref]) is Persistent for ref in graph.reachable()))
    ):
        return
    if kept is None and checkpoint.survey.tensors:
        return
    own = Checkpoint.of(checkpoint.path, checkpoint.source, checkpoint.container).lenient()
    names = [entry.path for entry in own.survey.tensors]
    if names:
        what = f"the output would hold no tensor, and the input has {pluralize(len(names), 'tensor')}"
        step = "name the entries or keys that may go, without a pattern"
        raise RefusedError(f"{what}: {join_limited(names, most=3)}", path=checkpoint.path, next=step)


def refuse_edited(checkpoint: Checkpoint, losses: Callable[[], list[Loss]], output: str) -> None:
    """Raise RefusedError for edited content that the file's format cannot hold; ``convert`` has checked it before."""
    if checkpoint.target is None and (lost := losses()):
        raise _unfit(checkpoint, f"{output} cannot hold {lost[0].words}")


def refuse_texts(checkpoint: Checkpoint, target: Target) -> None:
    """Raise TargetError for texts that a torch.save file has no place for."""
    if target.metadata:
        message = "a torch.save file has no header for metadata"
        raise TargetError(message, path=checkpoint.path, next="set KEY=VALUE makes an entry of it")


def whole_state_dict(checkpoint: Checkpoint, target: Target, output: str) -> StateDict:
    """Return the state dict for an output that holds nothing else; raise RefusedError if it does not exist."""
    for state_dict in checkpoint.state_dicts:
        if state_dict.path == target.key:
            return state_dict
    raise _unfit(checkpoint, f"{output} holds tensors by their names and nothing else")


def _unfit(checkpoint: Checkpoint, what: str) -> RefusedError:
    """Return the error for an edit whose result does not fit the file's format, with torch's format as the next
    step."""
    step = f"call it {quote(suggested_output(checkpoint.path, extension='.pth'))}"
    added = [change.path for change in checkpoint.changes if change.edit == "set" and change.number]
    if checkpoint.container.holds_texts and added and not added[-1].startswith("__metadata__."):
        step = f"a text in the header is set as __metadata__.{added[-1]}; to add an entry, {step}"
    return RefusedError(what, path=checkpoint.path, next=step)


def entries_outside(
    checkpoint: Checkpoint, state_dict: StateDict, *, named: bool = False, training: Collection[Ref] = ()
) -> list[Loss]:
    """Return the losses of everything that is not a tensor of a state dict. ``named``: the user asked for this state
    dict, so entries outside it are not counted as lost. ``training`` holds the optimizer states."""
    graph = checkpoint.graph
    inside = {entry.key for entry in checkpoint.survey.tensors_in([state_dict.path])}
    places: dict[Loss, list[str]] = {}
    minor, other, dropped = Loss("entries", (), minor=True), Loss("entries", ()), Loss("entries", (), drops=True)
    beside = [] if named else outside(checkpoint, state_dict)
    tensors = {entry.ref: entry.tensor for entry in checkpoint.survey.tensors} if beside else {}
    barred = {*training, *(ref for ref, tensor in tensors.items() if not _may_be_weights(tensor))}
    storage = checkpoint.survey.reader.storage
    for path, ref in beside:
        held = () if path.rpartition(".")[2].lower().startswith("optim") else graph.reachable(ref, barred=barred)
        weights = any(part in tensors or ((bare := storage(part)) is not None and bare.nbytes) for part in held)
        places.setdefault(Loss("entries", (), key=state_dict.path or ".") if weights else minor, []).append(path)
    for key, ref in state_dict.items:
        if graph.nodes[key] not in inside:
            is_plain = isinstance(graph.nodes[ref], _PLAIN)
            is_minor = is_plain or _is_copy(checkpoint, state_dict, key, ref)
            kind = minor if is_minor else dropped if storages_within(checkpoint, ref) else other
            places.setdefault(kind, []).append(str(graph.nodes[key]))
    return [loss._replace(where=tuple(names)) for loss, names in places.items()]


#: Values in a state dict that are not tensors, and that no module needs for its weights.
_PLAIN: Final = (type(None), bool, int, float, str)


def _is_copy(checkpoint: Checkpoint, state_dict: StateDict, key: Ref, ref: Ref) -> bool:
    """Return whether an entry of a state dict holds only tensors that the state dict has under other names too."""
    survey, name = checkpoint.survey, checkpoint.graph.nodes[key]
    storages = storages_within(checkpoint, ref)
    if not storages or not isinstance(name, str):
        return False
    path = spell_key(state_dict.path, name)
    entries = [entry.tensor for entry in survey.tensors if within(entry.path, path)]
    own = {view_id(entry.tensor) for entry in survey.tensors_in([state_dict.path])}
    return all(view_id(tensor) in own for tensor in entries) and {*storages} <= {tensor.storage for tensor in entries}


def _may_be_weights(tensor: Tensor) -> bool:
    """Return whether a tensor outside the state dict may be a weight: it is of a special kind, a matrix, or has several
    floating-point elements. Others are metrics, counters and random states."""
    is_float = tensor.dtype.startswith(("float", "bfloat", "complex"))
    is_list = tensor.numel > 1 and (is_float or len(tensor.shape) > 1)
    return is_list or tensor.kind not in ("dense", "array", "meta")


def outside(checkpoint: Checkpoint, state_dict: StateDict) -> list[tuple[str, Ref]]:
    """Return the path and value of everything that is neither the state dict nor leads to it."""
    graph = checkpoint.graph
    entries = [(entry.path, entry.ref) for entry in checkpoint.survey.entries]
    if state_dict.path == "":
        own = {str(graph.nodes[key]) for key, _ in state_dict.items}
        return [(entry.path, entry.ref) for entry in checkpoint.survey.entries if entry.key not in own]
    found: list[tuple[str, Ref]] = []
    while entries:
        inner: list[tuple[str, Ref]] = []
        for path, ref in entries:
            if path == state_dict.path:
                continue
            node, items = graph.nodes[ref], mapping(graph, ref)
            if within(state_dict.path, path) and items is not None:
                inner = [(joined(path, child.step), child.ref) for child in as_children(graph, items)]
            elif within(state_dict.path, path) and isinstance(node, List):
                inner = [(f"{path}[{number}]", value) for number, value in enumerate(node.items)]
            else:
                found.append((path, ref))
        entries = inner
    return found


#: For each tensor name, the facts that the output must keep.
Facts: TypeAlias = Mapping[str, tuple[object, ...]]


class Promise(NamedTuple):
    """The content that a reader must find in an output. None or empty fields are not checked.

    - ``format``, ``graph``: the format of the file and the root object.
    - ``storages``: sizes in bytes and checksums (None if not recorded) by key. Keys may be renamed one to one.
    - ``beside``: all records of the archive's folder other than storages.
    - ``manifest``: the other stored entries. Names in ``replaced`` may differ; names in ``dropped`` (lower case) may be
      missing.
    - ``pickles``: further graphs by record name.
    - ``tensors``: facts by tensor name.
    - ``leaves``: objects that are separate items.
    - ``texts``: strings stored in the metadata.
    - ``odd``: codes of problems that the input already has.
    - ``checked``: whether the places of records are checked. False if the input's own places may be unusual.
    - ``known``: returns the graph of a pickle that differs from the input's in strings only, or None for any other.
    """

    format: str
    graph: Graph | None = None
    beside: frozenset[str] | None = None
    storages: Mapping[str, tuple[int, int | None]] | None = None
    manifest: Manifest | None = None
    replaced: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    pickles: Mapping[str, Graph] = MappingProxyType({})
    tensors: Facts | None = None
    leaves: Mapping[str, Graph] = MappingProxyType({})
    texts: Mapping[str, str] | None = None
    byteorder: str = ""
    odd: frozenset[str] = frozenset()
    checked: bool = True
    known: Callable[[bytes], Graph | None] | None = None


def storage_facts(checkpoint: Checkpoint, graph: Graph) -> dict[str, tuple[int, int | None]]:
    """Return the size in bytes and recorded checksum (or None) of every storage that an object uses."""
    bodies = {key: checkpoint.body(key) for key in used_storages(graph, checkpoint.path)}
    copied = not bodies.keys() <= checkpoint.added.keys()
    crcs = {record.key: record.crc for record in checkpoint.container.outer_records() if record.key} if copied else {}
    return {
        key: (body.size, (body.crc if key in checkpoint.added else crcs.get(key)) or None)
        for key, body in bodies.items()
        if body is not None
    }


def tensor_facts(items: Iterable[tuple[str, Ref]], reader: TensorReader, size: Callable[[str], int | None]) -> Facts:
    """Return everything about tensors except their values, including which of them share memory."""
    numbers: dict[str, int] = {}
    tensors: dict[str, tuple[object, ...]] = {}
    for name, ref in sorted(items):
        tensor = reader.tensor(ref)
        facts: list[object] = []
        for part in reader.parts(tensor) if tensor else ():
            storage = reader.storages.get(part.storage)
            filled = storage is not None and storage.nbytes > 0
            facts += part._replace(storage="", parts=())
            facts += (numbers.setdefault(part.storage, len(numbers)), size(part.storage)) if filled else (-1, 0)
        tensors[name] = tuple(facts)
    return tensors
