"""Salvage the intact parts of a damaged checkpoint as a new checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from functools import partial

from ..base.errors import MalformedError, NotACheckpointError, UnreadableError, adding_path
from ..base.records import NamedTuple, TypedDict
from ..base.steps import command
from ..base.text import pluralize
from ..checkpoint.checkpoint import Change, Checkpoint, rescue_step
from ..checkpoint.container import Container, StorageData
from ..checkpoint.graph_editor import GraphEditor, leading_to, prune, removed_with
from ..checkpoint.tensors import TensorReader
from ..files.archives import open_any
from ..files.sources import Source
from ..files.zips.reader import checksum, read_archive
from ..formats import folder_format, read_container
from ..formats.foreign.identification import explain, explain_zip
from ..formats.opening import CheckpointOrPath, file_of, open_checkpoint
from ..formats.rescue import Rescued, rescue_zip
from ..formats.safetensors import reader as safetensors_reader
from ..formats.torch import legacy_reader
from ..formats.torch.tar_reader import sniff
from ..pickles.nodes import Ref
from ..safety.weights_only import graph_blockers
from .optimizers import entries_to_drop, optimizers, parameter_states
from .recompute import misdescribed


class Lost(NamedTuple):
    """A tensor or storage that could not be saved: its path and the reason.

    >>> [item.path for item in ckptool.salvage("cut.pth").lost]
    ['state_dict["module.fc.weight"]', 'state_dict["module.fc.bias"]']
    """

    path: str
    reason: str


class SalvagedState(TypedDict):
    """A state dict, an optimizer or another top-level entry: ``saved`` of its ``total`` tensors are saved.

    ``path`` is "" for tensors at the top level. If a model is whole and an optimizer is not, ``drop`` is the entry to
    drop before training, and ``lacks`` has the names for which the optimizer's ``step()`` would raise KeyError.

    >>> [(state["path"], state["saved"], state["total"]) for state in ckptool.salvage("cut.pth").states]
    [('state_dict', 7, 9)]
    """

    path: str
    saved: int
    total: int
    drop: str
    lacks: list[str]


class Salvaged(NamedTuple):
    """The result of ``salvage``: ``checkpoint`` has the intact parts, ready to be saved; ``saved`` counts its tensors.

    ``verified`` says whether checksums confirm the bytes; the legacy format has no checksums. ``states`` counts the
    tensors of each state dict, optimizer and other entry.

    >>> salvaged = ckptool.salvage("cut.pth")
    >>> salvaged.saved, len(salvaged.lost)
    (7, 2)
    >>> salvaged.lost[0].reason
    'its bytes are not in the file'
    """

    checkpoint: Checkpoint
    saved: int
    lost: list[Lost]
    verified: bool
    #: Names for which torch.load(weights_only=True) still refuses the output.
    refused: tuple[str, ...] = ()
    states: tuple[SalvagedState, ...] = ()


def salvage(path: CheckpointOrPath, progress: Callable[[int], None] | None = None) -> Salvaged:
    """Return everything that is intact in a cut or damaged file.

    That is every tensor whose bytes are complete and match their checksum, if there is one, and all other objects.

    A lost tensor is removed from its mapping; in a list None takes its place. Nothing is padded. Raise MalformedError
    if nothing can be saved, NotACheckpointError if the file is not a checkpoint.

    >>> with ckptool.salvage("cut.pth").checkpoint as checkpoint:
    ...     saved = ckptool.save(checkpoint, "salvaged.pth")
    >>> ckptool.validate("salvaged.pth")["valid"]
    True
    """
    name = file_of(path)
    if folder_format(name) is not None:
        with open_checkpoint(name) as whole_folder:
            step = rescue_step(whole_folder)
            damaged = any(problem.blocks_edits for problem in whole_folder.container.problems)
        what = "it is a folder of several files, and salvage reads one"
        raise UnreadableError(what, path=name, next=step if damaged else command("inspect", name))
    source = open_any(name)
    try:
        with adding_path(source.name):
            container, whole = _container(source, progress)
            checkpoint = Checkpoint.of(source.name, source, container)
            salvaged = _without_lost(checkpoint, container.lost, whole)
    except BaseException:
        source.close()
        raise
    if not salvaged.lost and not whole and salvaged.verified and (sound := _sound_container(source)) is not None:
        # The file is sound, so the output is the input, byte for byte.
        salvaged = salvaged._replace(checkpoint=Checkpoint.of(source.name, source, sound))
    blockers = graph_blockers(salvaged.checkpoint.graph)
    return salvaged._replace(refused=tuple(blocker.name or blocker.rule for blocker in blockers))


def _container(source: Source, progress: Callable[[int], None] | None) -> tuple[Container, bool]:
    """Return the intact parts of a file, and whether they are the whole file."""
    head = source.read(0, 1024)
    is_zip = head[2:4] == b"\x03\x04" and head[8:9] != b"{"  # the first two bytes may be damaged
    if not is_zip and safetensors_reader.sniff(head, source):
        sound = _sound_container(source)
        return (sound, True) if sound else (_read(partial(safetensors_reader.read, cut=True), source), False)
    if not legacy_reader.sniff(head, source) and not sniff(head, source):
        _refuse_others(head, source)
        return rescue_zip(source, progress), False
    container = _read(read_container, source)
    if not any(problem.level == "error" for problem in container.problems):
        return container, True
    rescued = Rescued(source, "", container.graph, container.pickle, container.byteorder)
    rescued.format, rescued.traits = container.format, container.traits
    for record in container.records():
        rescued.intact[record.key] = container.stored(record.key)
    return rescued, False


def _read(read: Callable[[Source], Container], source: Source) -> Container:
    try:
        return read(source)
    except MalformedError as error:
        error.what = f"nothing can be saved: {error.what}"
        raise


def _refuse_others(head: bytes, source: Source) -> None:
    """Raise NotACheckpointError for a complete file of another kind. A zip may have lost its start or its directory."""
    try:
        other: UnreadableError | None = explain_zip(read_archive(source))
    except MalformedError:
        other = explain(head, source) if head[:4] != b"PK\x03\x04" else None
    if isinstance(other, NotACheckpointError):
        raise other


def _sound_container(source: Source) -> Container | None:
    """Return the file's ordinary container if it reads without an error, otherwise None."""
    try:
        container = read_container(source)
        problems = (*container.problems, *container.audit(TensorReader(container.graph).storages))
        if any(problem.level == "error" or problem.blocks_edits for problem in problems):
            return None
        # The storages' checksums were already verified. Verify the small records too.
        small = [record for record in container.records() if record.crc and not record.key]
        sound = all(checksum(each.span, each.size, each.compressed, each.name) == each.crc for each in small)
        return container if sound else None
    except UnreadableError:
        return None


def _without_lost(checkpoint: Checkpoint, reasons: Mapping[str, str], whole: bool) -> Salvaged:
    """Return the checkpoint without the tensors whose bytes are lost; ``whole`` says that its file is intact."""
    graph, survey = checkpoint.graph, checkpoint.survey
    container, reader = checkpoint.container, survey.reader
    verified = not checkpoint.traits.no_checksums
    cut_off = "its bytes are after the cut" if not verified else "its bytes are not in the file"
    missing: dict[str, str] = {}
    empty: dict[str, StorageData] = {}
    for key, storage in reader.storages.items():
        if container.stored(key).span is None and storage.location != "meta":
            if storage.nbytes:
                missing[key] = reasons.get(key, cut_off)
            else:
                empty[key] = StorageData(b"", 0, 0)  # an empty storage has nothing to lose
    flawed = misdescribed(checkpoint)
    if not missing and not flawed:
        kept = checkpoint if whole else checkpoint.changed(graph, [], empty, needs_relayout=True)
        return Salvaged(kept, len(survey.tensors), [], verified, states=_states(checkpoint, set()))
    cut = {ref for ref, storage in reader.uses() if storage.key in missing}
    # DTensors depend on their tensor and mesh, tensors of unknown kinds on anything.
    holders = {entry.ref for entry in survey.tensors if entry.tensor.parts or entry.tensor.kind == "unknown"}
    made_of = holders & leading_to(graph, cut) if holders and cut else set[Ref]()
    gone = removed_with(graph, cut | flawed.keys() | made_of)
    lost = []
    for entry in survey.tensors:
        if entry.ref in gone:
            keys = [part.storage for part in reader.parts(entry.tensor)]
            made = entry.tensor.parts or entry.tensor.kind == "unknown"
            other = "what it is made of is not in the file" if made else "its description is damaged"
            reason = next((missing[key] for key in keys if key in missing), other)
            lost.append(Lost(entry.path, reason))
    for path, ref, _ in survey.storages:
        if ref in gone:
            own = reader.storage(ref)
            lost.append(Lost(path, missing.get(own.key, cut_off) if own else cut_off))
    listed = {entry.ref for entry in survey.tensors}
    lost += [Lost(path, "its description is damaged") for ref, path in flawed.items() if ref not in listed]
    saved = len(survey.tensors) - sum(entry.ref in gone for entry in survey.tensors)
    if not saved or graph.root in gone:
        tensors = f"{'all ' if len(lost) > 1 else ''}{pluralize(len(lost), 'tensor')}"
        message = f"nothing can be saved: the bytes of {tensors} are lost"
        raise MalformedError(message, path=checkpoint.path, next="get another copy of the file")
    editor = GraphEditor(graph)
    prune(editor, gone)
    summary = f"{pluralize(len(lost), 'tensor')} left out, {pluralize(saved, 'tensor')} saved"
    change = Change("salvage", "", len(lost), saved, summary)
    kept = checkpoint.changed(editor.done(), [change], empty, needs_relayout=True)
    return Salvaged(kept, saved, lost, verified, states=_states(checkpoint, gone))


def _states(checkpoint: Checkpoint, gone: Set[Ref]) -> tuple[SalvagedState, ...]:
    """Count the tensors of each state dict, optimizer or top-level entry; ``gone`` are the lost references."""
    graph, survey = checkpoint.graph, checkpoint.survey
    weights = {item.ref: item.path for item in checkpoint.state_dicts if item.confidence == "high"}
    found = optimizers(graph)
    named = {} if "" in survey.modules[:1] else {entry.ref: entry.path for entry in reversed(survey.entries)}
    named |= {item.ref: item.path for item in found} | weights
    above: dict[Ref, str] = {}
    for container, holder in survey.holders.items():  # holders come first
        above[container] = named.get(container, above.get(holder, ""))
    places = [(above.get(entry.holder, ""), entry.ref in gone) for entry in survey.tensors]
    places += [(survey.entries[top].path if top >= 0 else "", True) for _, ref, top in survey.storages if ref in gone]
    total = Counter(path for path, _ in places)
    lost = Counter(path for path, is_lost in places if is_lost)
    states: dict[str, SalvagedState] = {
        path: {"path": path, "saved": number - lost[path], "total": number, "drop": "", "lacks": []}
        for path, number in total.items()
    }
    is_usable = any(total[path] and not lost[path] for path in (*weights.values(), *survey.modules[:1]))
    broken = [item for item in found if is_usable and lost[item.path]]
    lacks: dict[Ref, dict[str, None]] = {}  # several optimizers may share one state
    for item, drop in zip(broken, entries_to_drop(checkpoint, broken).values()):
        if item.state not in lacks:
            partial = [own for own in parameter_states(graph, item).values() if not gone >= {*own.values()}]
            lacks[item.state] = {name: None for own in partial for name, ref in own.items() if ref in gone}
        states[item.path] |= {"drop": drop, "lacks": [*lacks[item.state]]}
    return tuple(states.values())
