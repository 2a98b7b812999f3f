"""Plan outputs: the input with another pickle, or a file or folder in another layout."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from shlex import quote
from typing import Final, TypeAlias

from ..base import lazy
from ..base.errors import CkptoolError, MalformedError, RefusedError, TargetError
from ..base.findings import COPIES, CUT, TRANSFORMED, UNJOINED
from ..base.records import NamedTuple
from ..base.steps import as_step, salvage_step
from ..base.suffixes import WEIGHTS
from ..base.text import quoted
from ..checkpoint.checkpoint import Checkpoint, Target, damage_of, rescue_step, wanted_storages
from ..checkpoint.graph_editor import used_storages
from ..checkpoint.objects import mapping
from ..checkpoint.programs import program_of
from ..checkpoint.tensors import TensorReader
from ..files.folders import open_folder
from ..files.sources import (
    AppendPlan,
    ExpectedChecksum,
    FolderPlan,
    FolderSource,
    HeaderPlan,
    Plan,
    Source,
    Span,
    links_outside,
)
from ..pickles.nodes import Call, Dict, Graph, Ref, children
from ..safety.storages import storage_flaws
from . import may_be_pattern, read_folder, repickled
from .claims import claims_of
from .losses import Promise, refuse_emptied
from .outputs import OUTPUTS, OutputFormat, named_format
from .repickled import verified_pickle

#: The default shard size in bytes, as in huggingface_hub.
DEFAULT_SHARD_SIZE: Final = 5 * 10**9
#: The output, and whether its pickle is proven byte-exact.
_Planned: TypeAlias = tuple[Plan | FolderPlan, bool]
#: Files of DeepSpeed and Megatron-LM that name the folder of the latest step.
_STEP_FILES: Final = frozenset(("latest", "latest_universal", "latest_checkpointed_iteration.txt"))
#: A record that an in-place edit may remove: without it torch looks up storage offsets instead of computing them.
_CONTRACT: Final = "/.format_version"


def promise_of(checkpoint: Checkpoint, output: str) -> Promise | None:
    """Return what an output of this name must hold; None if it is a byte-for-byte copy of the input."""
    target = target_of(checkpoint, output)
    if target is None:
        return None
    writer = OUTPUTS[target.format].writer(target.shard_size)
    return writer.promise(checkpoint, target)._replace(odd=_odd(checkpoint))


def promise_in_place(checkpoint: Checkpoint) -> Promise:
    """Return what the file must hold after an in-place edit."""
    container = checkpoint.container
    gone = TensorReader(container.graph).storages.keys() - used_storages(checkpoint.graph, checkpoint.path).keys()
    dropped = {f"{container.root}/data/{key}".lower() for key in gone} | {f"{container.root}{_CONTRACT}".lower()}
    return repickled.promise(checkpoint)._replace(odd=_odd(checkpoint), dropped=frozenset(dropped))


def _odd(checkpoint: Checkpoint) -> frozenset[str]:
    return frozenset(problem.code for problem in checkpoint.container.problems)


def plan_of(checkpoint: Checkpoint, output: str = "", *, follow_links: bool = False) -> _Planned:
    """Return the output of a checkpoint, and whether its pickle is proven byte-exact (see ``verified_pickle``).
    ``output`` is the output name, "" if unknown. Raises MalformedError for a damaged file, and RefusedError if
    something would be lost or the name has the suffix of another format."""
    files = checkpoint.source.files if isinstance(checkpoint.source, FolderSource) and not follow_links else ()
    if link := next((file.name for file in files if links_outside(file.name)), ""):  # it could lead to any file
        what = f"{os.path.basename(link)} is a link out of the folder, to {os.path.realpath(link)}"
        step = "if its content may go into the output, add `--follow-links`"
        raise RefusedError(what, path=checkpoint.path, next=step)
    target = target_of(checkpoint, output)
    if checkpoint.target is not None and target is not None:
        _check_target(target, output)
    if target is not None or checkpoint.changes:
        refuse_damage(checkpoint)
        refuse_emptied(checkpoint)
    for other in checkpoint.inputs[1:]:
        # A finding that names its storages may not concern those taken from this input, so only others are refused
        # here.
        other.container.compare_copies()
        if any(problem.storages is None or problem.code == COPIES for problem in damage_of(other)):
            refuse_damage(other)
    if target is None:
        source = checkpoint.source
        planned: Plan | FolderPlan = Plan((Span(source, 0, source.size),))
        if isinstance(source, FolderSource):
            planned = _with_claims(checkpoint, _whole_files(source.files), whole=True)
        planned = _with_companions(checkpoint, planned, follow_links)
        _refuse_folder_name(output, planned, os.path.splitext(checkpoint.path)[1])
        return planned, True
    written_as = OUTPUTS[target.format]
    with blaming_damage(*checkpoint.inputs):
        planned, exact = written_as.writer(target.shard_size).plan(checkpoint, target)
    _refuse_folder_name(output, planned, written_as.extension)
    if not exact:
        _refuse_discarded(checkpoint)
    planned = _with_claims(checkpoint, planned, written_as)
    own = target.format == checkpoint.traits.writes_as or (_in_files(checkpoint) and target.shard_size)
    if own or checkpoint.companions:
        planned = _with_companions(checkpoint, planned, follow_links)
    return planned, exact


def target_of(checkpoint: Checkpoint, output: str) -> Target | None:
    """Return the target for an output name; None if the input is copied unchanged."""
    made, named = checkpoint.target, named_format(output)
    if made is not None and made.stem == "adapter_model" and named is not None and named.name == made.format:
        return made._replace(shard_size=0)  # an adapter is a folder, unless the name says that it is a file
    # An unedited folder is also rewritten if the output is a single file, or if files in several folders have the same
    # name, so that no folder can hold copies of them all.
    joins = _in_files(checkpoint) and not makes_folder(checkpoint, output)
    files = checkpoint.source.files if isinstance(checkpoint.source, FolderSource) else ()
    if not (checkpoint.edited or joins or len({os.path.basename(file.name) for file in files}) < len(files)):
        return None
    own, metadata = checkpoint.traits.writes_as or "torch", checkpoint.metadata
    if checkpoint.target is None and checkpoint.traits.sharded:
        layout = checkpoint.container.shard_layout
        size = layout.size or DEFAULT_SHARD_SIZE if makes_folder(checkpoint, output) else 0
        return Target(own, "", "", metadata, size, layout.stem, layout.variant)
    moved = own == "same" and checkpoint.needs_relayout
    return checkpoint.target or Target("torch" if moved else own, metadata=metadata)


def _in_files(checkpoint: Checkpoint) -> bool:
    return checkpoint.traits.sharded or not checkpoint.traits.writes_as


def makes_folder(checkpoint: Checkpoint, output: str) -> bool:
    """Return whether an edit writes a folder under this name."""
    if checkpoint.traits.sharded:
        return not output.endswith(WEIGHTS)
    return isinstance(checkpoint.source, FolderSource) and bool(checkpoint.traits.writes_as)


def makes_shards(checkpoint: Checkpoint, output: str) -> bool:
    """Return whether an edit writes a folder of shards again under this name."""
    return checkpoint.traits.sharded and makes_folder(checkpoint, output)


def parts_of(folder: str) -> frozenset[str]:
    """Return the file names listed in a folder's index or ``.metadata``; an empty set if it is unreadable."""
    try:
        opened = read_folder(folder)
    except CkptoolError:
        opened = None
    if opened is None:
        return frozenset()
    opened[0].close()
    return opened[0].parts


class Companions(NamedTuple):
    """Names of files in a folder that are not part of the checkpoint. ``copied`` are copied unchanged into the output,
    ``not_copied`` are not. ``links`` are skipped because they point out of the folder."""

    copied: tuple[str, ...] = ()
    not_copied: tuple[str, ...] = ()
    links: tuple[str, ...] = ()


def companions(checkpoint: Checkpoint, planned: Plan | FolderPlan) -> Companions:
    """Return which of a folder's companion files are copied into the output."""
    source = checkpoint.source
    if not isinstance(source, FolderSource) or may_be_pattern(source.name):
        return Companions()  # a pattern selects its files only
    names = {name for name, _ in planned.files} if isinstance(planned, FolderPlan) else set[str]()
    taken = names.difference(checkpoint.companions)
    paths = [path for path in (*source.beside, *source.links) if os.path.basename(path) in taken]
    copied = tuple(map(os.path.basename, paths))
    used = (*paths, *(file.name for file in source.files))
    own = {os.path.relpath(path, source.folder).partition(os.sep)[0] for path in used}
    others = {name for name in open_folder(source.folder).names(strict=True) if not name.startswith(".")} - own
    links = set(map(os.path.basename, source.links)) if isinstance(planned, FolderPlan) else set()
    folder = os.path.realpath(source.folder)
    here = {os.path.basename(path) for path in paths if os.path.realpath(os.path.dirname(path)) == folder}
    left = others.difference(here, checkpoint.companions) - links
    return Companions(copied, tuple(sorted(left)), tuple(sorted(links.difference(copied))))


def _refuse_discarded(checkpoint: Checkpoint) -> None:
    """Raise RefusedError if torch fails at an object that the pickle discards: rewritten, the file would load."""
    if any(change.edit == "sanitize" for change in checkpoint.changes):
        return
    own = Checkpoint.of(checkpoint.path, checkpoint.source, checkpoint.container).lenient()
    kept = _kept(own.graph)
    used = {storage.key for ref, storage in own.survey.reader.uses() if ref in kept}
    for flaw in storage_flaws(own):
        of_storage = flaw.code in ("missing-storage", "storage-size")
        if flaw.refused_by_torch and (flaw.where not in used if of_storage else flaw.ref >= 0 and flaw.ref not in kept):
            what = f"torch fails at an object that its pickle builds and discards: {flaw.message}"
            raise RefusedError(what, path=checkpoint.path)


def _kept(graph: Graph) -> set[Ref]:
    """Return the nodes that make up the root object, without values that a later entry for the same key replaces."""
    kept, work = set[Ref](), [graph.root]
    while work:
        ref = work.pop()
        if ref in kept:
            continue
        kept.add(ref)
        node = graph.nodes[ref]
        if isinstance(node, Dict | Call) and (pairs := mapping(graph, ref)) is not None:
            work += [part for pair in pairs for part in pair]
            work += () if isinstance(node, Dict) else (node.func, *node.items, *node.states)
        else:
            work += children(node)
    return kept


def _with_companions(checkpoint: Checkpoint, planned: Plan | FolderPlan, follow_links: bool) -> Plan | FolderPlan:
    if not isinstance(planned, FolderPlan):
        return planned
    source = checkpoint.source
    changed = ((name, Plan((data,))) for name, data in checkpoint.companions.items() if data)
    files = dict((*planned.files, *changed))
    every: tuple[str, ...] = ()
    if isinstance(source, FolderSource):
        every = (*source.beside, *(source.links if follow_links else ()))
    places = [(open_folder(os.path.dirname(path)), os.path.basename(path)) for path in every]
    there = {*files, *checkpoint.companions}
    beside = [place for place in places if place[1] not in there and place[0].size(place[1]) is not None]
    return FolderPlan((*files.items(), *_whole_files(folder.open(name) for folder, name in beside).files))


def _whole_files(files: Iterable[Source]) -> FolderPlan:
    return FolderPlan(tuple((os.path.basename(file.name), Plan((Span(file, 0, file.size),))) for file in files))


def _with_claims(
    checkpoint: Checkpoint, planned: Plan | FolderPlan, written_as: OutputFormat | None = None, *, whole: bool = False
) -> Plan | FolderPlan:
    if isinstance(planned, Plan):
        return planned._replace(expected_checksums=claims_of(checkpoint, [planned], written_as))
    plans = [plan for _, plan in planned.files]
    spans = ((piece, n) for n, plan in enumerate(plans) for piece in plan.pieces if isinstance(piece, Span))
    readers: dict[int, int] = {}
    for piece, number in spans:
        readers.setdefault(id(piece.source), number)
    claims: dict[int, list[ExpectedChecksum]] = {}
    for claim in claims_of(checkpoint, plans, written_as, whole=whole):
        # Verified with the first file that copies from the source, so that its bytes are read once.
        claims.setdefault(readers.get(id(claim.span.source), 0), []).append(claim)
    files = enumerate(planned.files)
    return FolderPlan(
        tuple((name, plan._replace(expected_checksums=tuple(claims.get(n, ())))) for n, (name, plan) in files)
    )


def _check_target(target: Target, output: str) -> None:
    stem = os.path.splitext(output)[0]
    named, written_as = named_format(output), OUTPUTS[target.format]
    if output.endswith(WEIGHTS) and (target.shard_size or written_as.folder):
        raise _misnamed("the name says one file, and the output is a folder", output, stem)
    if named is not None and named.misread and written_as.extension not in named.suffixes:
        what = f"the name says {named.name}, and the format is {target.format}: {named.misread}"
        raise _misnamed(what, output, stem + written_as.extension)


def _refuse_folder_name(output: str, planned: Plan | FolderPlan, suffix: str) -> None:
    """Raise RefusedError if a single file would be written under a folder name; ``suffix`` completes a better name."""
    if output.endswith(os.sep) and isinstance(planned, Plan) and not os.path.isdir(output):
        raise _misnamed("the name says a folder, and the output is one file", output, output.rstrip(os.sep) + suffix)


def refuse_step_file(path: str) -> None:
    """Raise RefusedError for an output that would replace the file which names the step that training resumes from."""
    if os.path.basename(path) in _STEP_FILES and os.path.isfile(path):
        from .folders import read_tag  # imported late, because few outputs have such a name

        step = read_tag(open_folder(os.path.dirname(path)), os.path.basename(path))
        if step and step.isprintable():  # a checkpoint with that name would not be a printable text
            what = f"this file says that the latest step is {quoted(step)}, and training resumes from it"
            raise RefusedError(what, path=path, next="choose another name")


def _misnamed(what: str, output: str, called: str) -> RefusedError:
    return RefusedError(what, path=output, next=f"call it {quote(called)}")


class InPlace(NamedTuple):
    """An in-place edit. ``appending`` is None if nothing changed, and a ``HeaderPlan`` for a format that has its
    metadata in front; ``exact`` as in ``plan_of``. ``unused_bytes`` counts the bytes of removed storages, which stay in
    the file. ``dropped`` are their places, empty if records overlap."""

    appending: AppendPlan | HeaderPlan | None
    exact: bool = True
    unused_bytes: int = 0
    dropped: tuple[Span, ...] = ()


def in_place_of(checkpoint: Checkpoint, edit: str, time: int) -> InPlace:
    """Return the edited checkpoint as a new version to append to its file. ``edit`` describes the edit, ``time`` is in
    seconds since 1970. Raises RefusedError if the edit needs new tensor bytes or the format cannot be appended to."""
    if not checkpoint.edited:
        return InPlace(None)
    refuse_damage(checkpoint)
    refuse_emptied(checkpoint)
    what = "the edit makes new bytes of tensors, which need a new file" if checkpoint.added or checkpoint.others else ""
    program = program_of(checkpoint)
    if program is not None and not what:
        lazy.module("formats.programs.writer").editable(checkpoint)
        what = f"{program.kind} is not edited in place"
    if what:
        raise RefusedError(what, path=checkpoint.path, next="write it with `-o=`")
    if checkpoint.container.header_size:
        return InPlace(_header_plan(checkpoint, edit, time))
    used, before = used_storages(checkpoint.graph, checkpoint.path), TensorReader(checkpoint.container.graph).storages
    gone = before.keys() - used.keys()
    data, exact = verified_pickle(checkpoint)
    if not exact:
        _refuse_discarded(checkpoint)
    appending = checkpoint.container.append(data, list(used), gone, edit, time)
    return InPlace(appending, exact, sum(before[key].nbytes for key in gone), _dropped_spans(checkpoint, gone))


def _header_plan(checkpoint: Checkpoint, edit: str, time: int) -> HeaderPlan:
    """Return the plan of a new header; raise RefusedError if other bytes of the file would change as well."""
    source, size = checkpoint.source, checkpoint.container.header_size
    planned, _ = plan_of(checkpoint)
    rest = (Span(source, size, source.size - size),) if size < source.size else ()
    head = planned.pieces[0] if isinstance(planned, Plan) and planned.pieces[1:] == rest else None
    if not isinstance(planned, Plan) or not isinstance(head, bytes):
        what = "the edit removes or moves bytes of tensors, which need a new file"
        raise RefusedError(what, path=checkpoint.path, next="write it with `-o=`")
    return HeaderPlan(source.read(0, size), checkpoint.container.fitted(head), planned, edit, time)


def _dropped_spans(checkpoint: Checkpoint, gone: Collection[str]) -> tuple[Span, ...]:
    dropped: list[Span] = []
    end = 0
    for record in sorted(checkpoint.container.records(), key=lambda record: record.span.offset):
        if record.span.offset < end or record.span.source is not checkpoint.source:
            return ()
        end = record.span.offset + record.span.size
        dropped += [record.span] if record.key and record.key in gone else []
    return tuple(dropped)


@contextmanager
def blaming_damage(*checkpoints: Checkpoint) -> Iterator[None]:
    """Raise MalformedError for a damaged input instead of the refusal that the damage causes."""
    try:
        yield
    except (RefusedError, TargetError):
        for checkpoint in checkpoints:
            refuse_damage(checkpoint)
        raise


def refuse_damage(checkpoint: Checkpoint) -> None:
    """Raise MalformedError for a damaged input, RefusedError for an ambiguous one that readers may read differently."""
    if checkpoint.traits.assembled:
        checkpoint.container.compare_copies(wanted_storages(checkpoint))
    damage = damage_of(checkpoint)
    if damage:
        step = as_step("get a whole copy of the file")
        if damage[0].code == TRANSFORMED:
            raise MalformedError(damage[0].message, path=checkpoint.path)  # the message names the remedy
        if damage[0].code == UNJOINED:
            step = as_step("have the job save whole tensors")
        elif isinstance(checkpoint.source, FolderSource):
            step = rescue_step(checkpoint)
        elif damage[0].code == CUT:
            step += ", or " + salvage_step(checkpoint.path)
        raise MalformedError(damage[0].message, path=checkpoint.path, next=step)
    ambiguous = [problem for problem in checkpoint.container.problems if problem.ambiguous]
    if ambiguous:
        raise RefusedError(f"the archive is ambiguous: {ambiguous[0].message}", path=checkpoint.path)
