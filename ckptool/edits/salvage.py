"""What is whole in a damaged checkpoint, as a checkpoint of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ..base.errors import MalformedError, NotACheckpointError, UnreadableError
from ..base.text import counted
from ..checkpoint.changes import Change
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import UNEDITABLE, Body, Container
from ..checkpoint.graph_editor import Rewrite, fallen, prune
from ..checkpoint.tensors import TensorReader
from ..files.archives import open_any
from ..files.sources import Source
from ..files.zips.reader import read_archive
from ..formats import read_container
from ..formats.foreign.identification import explain, explain_zip
from ..formats.rescue import Rescued, rescue_zip
from ..formats.safetensors import reader as safetensors_reader
from ..formats.torch import legacy_reader
from ..formats.torch.tar_reader import sniff
from ..pickles.nodes import Ref, children
from ..safety.checksums import checksum
from ..safety.storages import storage_flaws
from ..safety.weights_only import graph_blockers


class Lost(NamedTuple):
    """A tensor or storage that could not be saved: its path, and why."""

    path: str
    reason: str


class Salvaged(NamedTuple):
    """``checkpoint`` is what is whole, ready to be saved; ``saved`` counts its tensors.

    ``verified`` whether checksums say so: the legacy format has none.
    """

    checkpoint: Checkpoint
    saved: int
    lost: list[Lost]
    verified: bool
    #: Names for which torch.load(weights_only=True) still refuses the output.
    refused: tuple[str, ...] = ()


def salvage(path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> Salvaged:
    """Everything whole in a cut or damaged file: every tensor whose bytes are all there and agree with their
    checksum where there is one, and all other objects.

    A tensor that is lost leaves its mapping; in a list None takes its place. Nothing is padded. Raises
    MalformedError when nothing can be saved, NotACheckpointError when the file is something else.
    """
    source = open_any(path)
    try:
        container, whole = _container(source, progress)
        checkpoint = Checkpoint(source.name, source, container)
        found = _without_lost(checkpoint, getattr(container, "lost", {}), whole)
    except UnreadableError as error:
        source.close()
        error.path = error.path or source.name
        raise
    except BaseException:
        source.close()
        raise
    if not found.lost and not whole and found.verified:
        sound = _sound(source)
        if sound is not None:
            # Nothing is wrong with it: the output is the input.
            found = found._replace(checkpoint=Checkpoint(source.name, source, sound))
    blockers = graph_blockers(found.checkpoint.graph)
    return found._replace(refused=tuple(blocker.name or blocker.rule for blocker in blockers))


def _container(source: Source, progress: Callable[[int], None] | None) -> tuple[Container, bool]:
    """The whole parts of a file, and whether that is all of it; one of torch 0.1 is whole, or cannot be read."""
    head = source.read(0, 1024)
    if safetensors_reader.sniff(head, source):
        sound = _sound(source)
        return (sound, True) if sound else (_read(safetensors_reader.read_cut, source), False)
    if not legacy_reader.sniff(head, source) and not sniff(head, source):
        _refuse_others(head, source)
        return rescue_zip(source, progress), False
    container = _read(read_container, source)
    if not any(problem.level == "error" for problem in container.problems):
        return container, True
    rescued = Rescued(
        source, "", container.graph, container.pickle, container.byteorder, container.format, container.traits
    )
    for record in container.records():
        rescued.keep(record.key, container.stored(record.key))
    return rescued, False


def _read(read: Callable[[Source], Container], source: Source) -> Container:
    try:
        return read(source)
    except MalformedError as error:
        error.what = f"nothing can be saved: {error.what}"
        raise


def _refuse_others(head: bytes, source: Source) -> None:
    """Raise NotACheckpointError for a whole file of another kind; a zip may have lost its start or its directory."""
    try:
        other: UnreadableError | None = explain_zip(read_archive(source))
    except MalformedError:
        other = explain(head, source) if head[:4] != b"PK\x03\x04" else None
    if isinstance(other, NotACheckpointError):
        raise other


def _sound(source: Source) -> Container | None:
    """The container as it is, where it reads without an error."""
    try:
        container = read_container(source)
        return container if _without_errors(container) else None
    except UnreadableError:
        return None


def _without_errors(container: Container) -> bool:
    problems = (*container.problems, *container.audit(TensorReader(container.graph).storages))
    if any(problem.level == "error" or problem.code in UNEDITABLE for problem in problems):
        return False
    # The storages are summed already; the small records beside them are not.
    small = [record for record in container.records() if record.crc and not record.key]
    return all(checksum(record) == record.crc for record in small)


def _without_lost(checkpoint: Checkpoint, reasons: Mapping[str, str], whole: bool) -> Salvaged:
    """The checkpoint less the tensors whose bytes are not there; ``whole`` says that nothing is wrong with its file."""
    graph, survey = checkpoint.graph, checkpoint.survey
    container, reader = checkpoint.container, survey.reader
    verified = not checkpoint.traits.unsummed
    behind = "its bytes are behind the cut" if not verified else "its bytes are not in the file"
    missing: dict[str, str] = {}
    empty: dict[str, Body] = {}
    for key, storage in reader.storages.items():
        if container.stored(key).span is None and storage.location != "meta":
            if storage.nbytes:
                missing[key] = reasons.get(key, behind)
            else:
                empty[key] = Body(b"", 0, 0)  # of it nothing can be lost
    nonsense = _nonsense(checkpoint)
    if not missing and not nonsense:
        kept = checkpoint if whole else checkpoint.changed(graph, [], empty, anew=True)
        return Salvaged(kept, len(survey.tensors), [], verified)
    cut = {ref for ref, storage in reader.uses() if storage.key in missing}
    gone = fallen(graph, cut | nonsense.keys() | _made_of(checkpoint, cut))
    lost = []
    for entry in survey.tensors:
        if entry.ref in gone:
            keys = [part.storage for part in reader.parts(entry.tensor)]
            held = "what it is made of is not in the file" if entry.tensor.parts else "its description is damaged"
            reason = next((missing[key] for key in keys if key in missing), held)
            lost.append(Lost(entry.path, reason))
    for path, ref, _ in survey.storages:
        if ref in gone:
            bare = reader.storage(ref)
            lost.append(Lost(path, missing.get(bare.key, behind) if bare else behind))
    named = {entry.ref for entry in survey.tensors}
    lost += [Lost(place, "its description is damaged") for ref, place in nonsense.items() if ref not in named]
    saved = len(survey.tensors) - sum(entry.ref in gone for entry in survey.tensors)
    if not saved or graph.root in gone:
        what = f"nothing can be saved: the bytes of {'all ' if len(lost) > 1 else ''}{counted(len(lost), 'tensor')} are"
        raise MalformedError(f"{what} lost", path=checkpoint.path, next="get another copy of the file")
    rewrite = Rewrite(graph)
    prune(rewrite, gone)
    what = f"{counted(len(lost), 'tensor')} left out, {counted(saved, 'tensor')} saved"
    change = Change("salvage", "", len(lost), saved, what)
    return Salvaged(checkpoint.changed(rewrite.done(), [change], empty, anew=True), saved, lost, verified)


def _made_of(checkpoint: Checkpoint, lost: Collection[Ref]) -> set[Ref]:
    """The tensors that hold others, or objects, which lead to something lost: a DTensor to its local tensor and mesh.

    They keep these in dicts and lists, which elsewhere go on with what is left.
    """
    holders = {entry.ref for entry in checkpoint.survey.tensors if entry.tensor.parts}
    if not (holders and lost):
        return set()
    nodes = checkpoint.graph.nodes
    above: dict[Ref, list[Ref]] = {}
    for ref, node in enumerate(nodes):
        for child in children(node):
            above.setdefault(child, []).append(ref)
    leading = set(lost)
    work = list(lost)
    while work:
        fresh = [ref for ref in above.get(work.pop(), ()) if ref not in leading]
        leading.update(fresh)
        work += fresh
    return holders & leading


def _nonsense(checkpoint: Checkpoint) -> dict[int, str]:
    """Tensors and storages that the pickle describes in a way that torch cannot read, by reference."""
    flaws = storage_flaws(checkpoint)
    return {
        flaw.ref: flaw.path or "a tensor" for flaw in flaws if flaw.code in ("geometry", "arguments") and flaw.refused
    }
