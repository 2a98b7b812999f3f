"""The checks of ``validate``: whether a file is whole, unambiguous and loadable.

A check passes, warns, fails, or is not possible.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import chain, pairwise
from math import prod
from typing import TYPE_CHECKING, Final

from ..base.errors import MalformedError
from ..base.findings import CARRIED, CONFIGURATION, OTHER_FILES, RANK_SETS, UNCHECKED, Finding
from ..base.records import NamedTuple
from ..base.text import human_bytes, join_limited, pluralize, quoted, shape_text
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checksums import Checksums, checksums
from ..checkpoint.programs import program_of
from ..checkpoint.tensors import Tensor, rebuild_calls
from ..formats import carried_pickles
from ..formats.claims import member_checksums
from ..pickles.nodes import Ref
from ..safety.storages import storage_flaws
from ..safety.torch_lists import VERSIONS, list_of
from ..safety.verdict import ALLOWED, CALLED, ExaminedPickle, examine, is_name
from ..safety.weights_only import LoadPrediction, weights_only
from ..values.elements import storage_reader
from ..values.interpretation import Reading, excessive_repeats, numbers_in
from .facts import facts
from .findings import rule_texts

if TYPE_CHECKING:
    from ..files.sources import ExpectedChecksum
    from ..files.write.copying import Progress


#: Bytes read at once.
_CHUNK: Final = 1 << 20
PASS: Final = "pass"
WARNING: Final = "warning"
FAIL: Final = "fail"
NOT_POSSIBLE: Final = "not possible"


#: The name of the check of sparse tensors' indices, and the first torch version that makes this check itself.
_INDICES: Final = "indices"
_CHECKS_INDICES: Final = "2.14"


class Check(NamedTuple):
    """One check: its ``group`` (container, integrity, safety, expectations), ``status``, and result as a message."""

    name: str
    group: str
    status: str
    message: str
    notes: tuple[Finding, ...] = ()


class Safety(NamedTuple):
    """The pickles in a file and the checks of them; ``verdict`` is None if torch would load no object.

    ``audited`` lists the problems that ``Container.audit`` found.
    """

    pickles: Sequence[ExaminedPickle] = ()
    verdict: LoadPrediction | None = None
    checks: Sequence[Check] = ()
    audited: Sequence[Finding] = ()


def judge(name: str, group: str, notes: Sequence[Finding], good: str) -> Check:
    """Return a check that fails if there are errors, warns if there are warnings, and passes otherwise.

    A finding with the level "note" is the message of a check that passes.
    """
    bad = [note for note in notes if note.level != "note"]
    if not bad:
        return Check(name, group, PASS, notes[0].message if notes else good)
    errors = [note for note in bad if note.level == "error"]
    more = f" (and {len(bad) - 1:,} more)" if len(bad) > 1 else ""
    return Check(name, group, FAIL if errors else WARNING, (errors or bad)[0].message + more, tuple(bad))


def check_checkpoint(
    checkpoint: Checkpoint, *, torch: str, quick: bool = False, progress: Progress | None = None
) -> tuple[list[Check], Safety]:
    """Check an open checkpoint. ``quick`` skips the checksums, for which every byte is read."""
    notes: dict[str, list[Finding]] = {"structure": [], "complete": [], "checksums": [], "sizes": [], "pickles": []}
    storages = checkpoint.survey.reader.storages
    program = program_of(checkpoint)
    if not quick:
        checkpoint.container.compare_copies()
    audited = checkpoint.container.audit(storages)
    for problem in (*checkpoint.container.problems, *audited):
        if problem.level == "note":
            continue
        check = "complete" if problem.check == "checksums" and checkpoint.traits.no_checksums else problem.check
        notes.setdefault(check, []).append(problem)
    notes["sizes"] += [
        Finding.of(
            "storage-twice", "warning", f"storage {quoted(key)} is described in two ways; torch takes the first", key
        )
        for key in sorted(checkpoint.survey.reader.disagreeing)
    ]
    unsupported = checkpoint.survey.unsupported
    flaws = storage_flaws(checkpoint)
    for fact in facts(checkpoint, flaws):
        notes.setdefault(fact.check, []).append(fact)
    stored = f"{pluralize(len(storages), 'storage')}, {human_bytes(sum(item.nbytes for item in storages.values()))}"
    # A format without checksums has no directory either.
    end_to_end = bool(checkpoint.traits.no_checksums)
    structure = (
        "the parts follow each other without gaps"
        if end_to_end
        else "every record is in the file once, where the zip directory says"
    )
    sizes = f"every storage has the size that the {checkpoint.traits.size_source} says"
    sets = [item.message for item in checkpoint.container.problems if item.code in (RANK_SETS, OTHER_FILES)]
    count = len(checkpoint.survey.tensors)
    geometry = f"{pluralize(count, 'tensor')} within {'its storage' if count == 1 else 'their storages'}"
    checks = [
        _unless_unchecked(judge("structure", "container", notes["structure"], structure)),
        _complete(checkpoint, notes["complete"], "; ".join((f"all there: {stored}", *sets))),
        _checksums(checkpoint, notes["checksums"], quick, progress),
        judge("sizes", "integrity", notes["sizes"], sizes),
        judge("geometry", "integrity", notes.get("geometry", []), geometry),
        *_indices(checkpoint, torch, quick),
        *(judge(name, "container", notes[name], "") for name in ("shards", "part") if name in notes),
        *_places(checkpoint),
    ]
    verdict = weights_only(checkpoint, flaws, torch)
    if not checkpoint.pickled:
        embedded = list(examine(carried_pickles(checkpoint), torch))
        checks_without = _checks_without_pickle(checkpoint, verdict)
        if embedded:
            checks_without[:1] = check_pickles(embedded, torch, None).checks
        safety = Safety(embedded, verdict, checks_without, audited)
        return [*checks, *safety.checks], safety
    own = program.own_names if program is not None else ()
    every = chain(checkpoint.container.pickles(), carried_pickles(checkpoint))
    pickles = list(examine(every, torch, own))
    if program is not None:  # its code and settings are text, by design
        pickles = [pickle._replace(note="") for pickle in pickles if not pickle.program]
    safety = check_pickles(pickles, torch, verdict, notes["pickles"])._replace(audited=audited)
    *others, loads = safety.checks
    ambiguous = [note for note in notes["structure"] if note.ambiguous]
    if ambiguous:
        message = f"it depends on which record torch reads: {ambiguous[0].message}"
        loads = loads._replace(status=NOT_POSSIBLE, notes=(), message=message)
    elif unsupported and verdict.loads:
        message = f"it depends on what ckptool does not follow: {next(iter(unsupported.values()))}"
        loads = loads._replace(status=NOT_POSSIBLE, notes=(), message=message)
    elif verdict.loads and any(check.name == _INDICES and check.status == FAIL for check in checks):
        loads = loads._replace(status=WARNING, message=f"torch.load of torch {torch} refuses it: see {_INDICES}")
    elif checkpoint.traits.loads == "converted":
        loads = loads._replace(message=f"as one file: {loads.message}")
    if program is not None:
        others.insert(0, judge("program", "safety", notes.get("program", []), ""))
    safety = safety._replace(checks=[*others, loads])
    return [*checks, *safety.checks], safety


def _checks_without_pickle(checkpoint: Checkpoint, verdict: LoadPrediction) -> list[Check]:
    where = " in the weights: nothing in them" if checkpoint.traits.loads != "file" else ": nothing in it"
    each = {"converted": "as one file: ", "each file": "each file: "}.get(checkpoint.traits.loads, "")
    by_torch = f"torch.load{verdict.versions} {'too' if verdict.loads else 'does not'}"
    loader = checkpoint.traits.loader
    if checkpoint.traits.loads == "converted":
        from ..formats.outputs import OUTPUTS  # imported late, as few folders have no pickle

        loader = OUTPUTS[checkpoint.traits.writes_as].loader
    loads = Check("weights-only", "safety", PASS, f"{each}{loader} takes it, {by_torch}")
    problems = {problem.message for problem in checkpoint.container.problems}
    misnamed = checkpoint.container.misnamed(checkpoint.source)
    bad = [item.rule for item in verdict.blockers if misnamed or item.rule in problems]
    if bad:
        loads = loads._replace(status=WARNING, message=bad[0])
    return [Check("pickles", "safety", PASS, f"there is none{where} can be run"), loads]


def _places(checkpoint: Checkpoint) -> list[Check]:
    """Check whether all places of tensors were listed; return no check if they were."""
    count = checkpoint.survey.unlisted
    message = f"tensors are at more places than are listed: {count:,} were left out"
    return [Check("places", "integrity", NOT_POSSIBLE, message)] if count else []


def _complete(checkpoint: Checkpoint, notes: Sequence[Finding], good: str) -> Check:
    """Check whether anything is missing; not possible if nothing records how many ranks saved the checkpoint."""
    check, save = judge("complete", "container", notes, good), checkpoint.container.rank_save
    if save is None or save.recorded or check.status != PASS:
        return check
    return check._replace(status=NOT_POSSIBLE, message=save.unsure)


def _unless_unchecked(check: Check) -> Check:
    """Return the check; mark it as not possible if a part of it was skipped because it would take too long."""
    open_ = [note for note in check.notes if note.code == UNCHECKED]
    return check if check.status == FAIL or not open_ else check._replace(status=NOT_POSSIBLE, message=open_[0].message)


def _checksums(checkpoint: Checkpoint, notes: Sequence[Finding], quick: bool, progress: Progress | None) -> Check:
    name, group = "checksums", "integrity"
    if quick:
        return judge(name, group, notes, "")._replace(
            status=FAIL if notes else NOT_POSSIBLE, message=notes[0].message if notes else "skipped by the quick check"
        )
    result = checksums(checkpoint.container, progress, checkpoint.cache.checksums)
    bad = _wrong(checkpoint, result)
    if bad:
        return judge(name, group, bad, "")
    members = list(member_checksums(checkpoint))
    wrong = [f"{item.where} does not match its checksum" for item in members if not _agrees(item)]
    if members:
        return judge(
            name, group, [Finding.of("checksum", "error", text) for text in wrong], "the checksum of the archive agrees"
        )
    if checkpoint.traits.no_checksums:
        message = f"{checkpoint.traits.no_checksums} has no checksums: a flipped bit cannot be seen"
        return Check(name, group, NOT_POSSIBLE, message)
    agree = f"{pluralize(result.checked, 'record')}, {human_bytes(result.nbytes)} agree with their CRC-32"
    if result.uncomputed:
        message = f"{pluralize(result.uncomputed, 'record')} have no checksum on record (0: not computed)"
        return Check(name, group, NOT_POSSIBLE, f"{message}; {agree}" if result.checked else message)
    return Check(name, group, PASS, agree)


def _agrees(expected: ExpectedChecksum) -> bool:
    source, offset, size = expected.span
    crc = 0
    for at in range(offset, offset + size, _CHUNK):
        crc = zlib.crc32(source.read(at, min(_CHUNK, offset + size - at)), crc)
    return crc == expected.crc


def _wrong(checkpoint: Checkpoint, result: Checksums) -> list[Finding]:
    users: dict[str, list[str]] = {record.key: [] for record in result.wrong if record.key}
    if users:
        for entry in checkpoint.survey.tensors:
            for part in checkpoint.survey.reader.parts(entry.tensor):
                if part.storage in users and entry.path not in users[part.storage]:
                    users[part.storage].append(entry.path)
    notes = []
    for record in result.wrong:
        message = f"{quoted(record.name)} has another checksum than the one on record"
        tensors = [path or "the tensor" for path in users.get(record.key, [])]
        if tensors:
            message += f": damaged {'tensor' if len(tensors) == 1 else 'tensors'} {join_limited(tensors)}"
        notes.append(Finding.of("checksum", "error", message, record.name, record.span.offset))
    return notes + [
        Finding.of("unreadable-record", "error", f"{quoted(name)}: {why}", name) for name, why in result.lost
    ]


def check_pickles(
    pickles: Sequence[ExaminedPickle], torch: str, verdict: LoadPrediction | None, notes: Sequence[Finding] = ()
) -> Safety:
    """Check all pickles in a file; with a ``verdict``, also whether torch would load the first one."""
    notes = list(notes)
    for number, pickle in enumerate(pickles):
        if pickle.program or pickle.note:
            code = CONFIGURATION if pickle.program else CARRIED
            notes.append(Finding.of(code, "warning", pickle.described(pickle.program or pickle.note), pickle.where))
        if pickle.unchecked:
            notes.append(Finding.of(UNCHECKED, "warning", f"skipped {pickle.where}: {pickle.error}", pickle.where))
        elif pickle.error:
            message = f"{pickle.where} cannot be followed to its end: {pickle.error}"
            notes.append(Finding.of("broken-pickle", "error", message, pickle.where))
        elif number:
            notes += [
                Finding.of("odd-pickle", "warning", f"{pickle.where} at byte {offset:,}: {text}", pickle.where, offset)
                for offset, text in pickle.oddities
            ]
            if pickle.rest:
                message = f"{pluralize(pickle.rest, 'byte')} after the end of the pickle in {pickle.where}"
                notes.append(Finding.of("after-stop", "warning", message, pickle.where))
    good = f"{pluralize(len(pickles), 'pickle')} parsed to the end, nothing executed"
    checks = [_unless_unchecked(judge("pickles", "safety", notes, good)), _globals(pickles, torch)]
    if verdict is not None:
        checks.append(_loads(verdict, pickles))
    return Safety(pickles, verdict, checks)


def _globals(pickles: Sequence[ExaminedPickle], torch: str) -> Check:
    names = [item for pickle in pickles for item in pickle.names]
    outside = [item for item in names if item.word != ALLOWED]
    notes = [
        Finding.of("dangerous-call", "error", f"loading it without weights_only runs {call}", pickle.where)
        for pickle in pickles
        for call in pickle.calls
    ]
    for item in outside:
        words = "called when it is loaded without weights_only" if item.word == CALLED else "named"
        message = f"{item.mapped} is not on {list_of(torch, [item.mapped])}; {words}"
        notes.append(Finding.of("global", "warning", message, item.pickle))
    notes += [
        Finding.of("global-name", "error", f"{quoted(item.mapped)} is not a valid name in Python: damaged", item.pickle)
        for item in outside
        if not is_name(item)
    ]
    notes = list({(note.code, note.message): note for note in reversed(notes)}.values())[::-1]
    check = judge("globals", "safety", notes, f"no global outside torch {torch}'s weights_only list")
    if check.status == FAIL or not outside:
        return check
    unlisted = list(dict.fromkeys(item.mapped for item in outside))
    return check._replace(message=f"not on {list_of(torch, unlisted)}: {join_limited(unlisted)}")


def _loads(verdict: LoadPrediction, pickles: Sequence[ExaminedPickle]) -> Check:
    call = f"torch.load(weights_only=True){verdict.versions}"
    if verdict.loads:
        return Check("weights-only", "safety", PASS, f"{call} takes it")
    names = [blocker.name for blocker in verdict.blockers if blocker.name]
    rules = rule_texts([b for b in verdict.blockers if b.rule], pickles[0].protocol if pickles else 2)
    listed = {item.mapped for pickle in pickles for item in pickle.names if item.word != ALLOWED}
    if len(names) > 1 and listed.issuperset(names):
        names = ["see globals"]  # that check lists them
    message = f"{call} refuses it: {join_limited(names + rules)}"
    return Check("weights-only", "safety", WARNING, message, (Finding.of("weights-only", "warning", message),))


def broken_check(error: MalformedError) -> Check:
    """Return the failed structure check of a file whose container cannot be read."""
    message = MalformedError.__str__(error).removeprefix(f"{error.path}: ")
    note = Finding.of("malformed", "error", message, error.where, error.offset)
    return Check("structure", "container", FAIL, message, (note,))


# Indices of sparse tensors. Torch 2.14 and later check in ``torch.load(weights_only=True)`` that they are within the
# tensor's size, and in order if the file says so: ``_validate_loaded_sparse_tensors`` in torch/_utils.py, which calls
# aten/src/ATen/native/sparse/SparseTensor.cpp and SparseCsrTensor.cpp.

#: Maximum number of indices checked in all tensors together, because they become Python numbers.
_MOST: Final = 1 << 20
#: Whether a layout is compressed along the rows, and whether its elements are blocks.
_COMPRESSED: Final = {
    "sparse_csr": (True, False),
    "sparse_csc": (False, False),
    "sparse_bsr": (True, True),
    "sparse_bsc": (False, True),
}


def _indices(checkpoint: Checkpoint, torch: str, quick: bool) -> list[Check]:
    """Check the indices of sparse tensors, as torch 2.14 and later do; return no check if there are none."""
    kinds, reader = ("sparse_coo", *_COMPRESSED), checkpoint.survey.reader
    paths = {entry.ref: entry.path for entry in reversed(checkpoint.survey.tensors) if entry.tensor.kind in kinds}
    if not paths:
        return []
    if quick:
        return [Check(_INDICES, "integrity", NOT_POSSIBLE, "skipped by the quick check")]
    level = "error" if VERSIONS.index(torch) >= VERSIONS.index(_CHECKS_INDICES) else "warning"
    notes: list[Finding] = []
    left, passed = _MOST, 0
    for ref, path in sorted(paths.items()):
        tensor = reader.tensor(ref)
        parts = [part for each in (tensor.parts if tensor is not None else ()) if (part := reader.tensor(each))]
        count = sum(part.numel for part in parts[:-1])
        if tensor is None or len(parts) < max(2, len(tensor.parts)) or count > left:
            passed += 1
            continue
        left -= count
        try:
            fit = _indices_fit(checkpoint, ref, tensor, parts)
        except MalformedError:
            passed += 1  # bytes are missing, which other checks report
            continue
        if not fit:
            message = f"{quoted(path)}: its indices are out of its shape {shape_text(tensor.shape)}, or out of order"
            notes.append(Finding.of("sparse-index", level, message, path))
    check = judge(_INDICES, "integrity", notes, f"{pluralize(len(paths), 'sparse tensor')}, no index out of range")
    if notes or not passed:
        return [check]
    message = f"those of {pluralize(passed, 'sparse tensor')} were not looked at: too many, or missing"
    return [check._replace(status=NOT_POSSIBLE, message=message)]


def _indices_fit(checkpoint: Checkpoint, ref: Ref, tensor: Tensor, parts: Sequence[Tensor]) -> bool:
    """Return whether the indices of a sparse tensor fit its shape. Raise MalformedError if bytes are missing."""
    numbers = []
    for part in parts[:-1]:
        if repeats := excessive_repeats(part.shape, part.stride):
            raise MalformedError(repeats, path=checkpoint.path)
        reading = Reading(part, storage_reader(checkpoint, part.storage), "elements")
        numbers.append([int(number) for some in numbers_in(reading) for number in some])
    shapes = [part.shape for part in parts]
    if tensor.kind == "sparse_coo":
        return _coordinates_fit(numbers[0], shapes, tensor.shape, _is_coalesced(checkpoint, ref))
    return len(numbers) != 2 or _compressed_fit(tensor.kind, numbers[0], numbers[1], shapes, tensor.shape)


def _is_coalesced(checkpoint: Checkpoint, ref: Ref) -> bool:
    """Return whether the file says that the indices are in order without duplicates."""
    nodes = checkpoint.graph.nodes
    *_, call = (None, *rebuild_calls(checkpoint.graph, ref))
    data = nodes[call.args[1]] if call is not None and len(call.args) > 1 else ()
    return type(data) is tuple and len(data) > 3 and nodes[data[3]] is True


def _coordinates_fit(
    indices: Sequence[int], shapes: Sequence[Sequence[int]], shape: Sequence[int], is_coalesced: bool
) -> bool:
    """Return whether the indices of a sparse COO tensor fit: all of the first dimension, then of the next."""
    own, values = shapes
    if len(own) != 2 or own[0] > len(shape) or tuple(values) != (own[1], *shape[own[0] :]):
        return False
    count = own[1]
    rows = [indices[at * count : (at + 1) * count] for at in range(own[0])]
    inside = all(0 <= index < size for row, size in zip(rows, shape) for index in row)
    return inside and not (is_coalesced and any(one >= other for one, other in pairwise(zip(*rows))))


def _compressed_fit(
    kind: str, compressed: Sequence[int], plain: Sequence[int], shapes: Sequence[Sequence[int]], shape: Sequence[int]
) -> bool:
    """Return whether the indices of a compressed sparse tensor fit.

    ``shapes`` are the shapes of the compressed indices, the plain indices, and the values.
    """
    by_rows, blocks = _COMPRESSED[kind]
    batches = len(shapes[0]) - 1
    least = batches + (3 if blocks else 1)  # dimensions that the values have
    if batches < 0 or len(shapes[1]) != batches + 1 or len(shape) < batches + 2 or len(shapes[2]) < least:
        return False
    sizes = list(shape[batches : batches + 2])
    if blocks:
        block = shapes[2][batches + 1 : batches + 3]
        if any(not part or size % part for size, part in zip(sizes, block)):
            return False
        sizes = [size // part for size, part in zip(sizes, block)]
    outer, inner = sizes if by_rows else reversed(sizes)
    step, count = shapes[0][-1], shapes[1][-1]
    outside = {tuple(part[:batches]) for part in (*shapes, shape)}
    dense = tuple(shapes[2][least:])
    if len(outside) > 1 or step != outer + 1 or count != shapes[2][batches] or dense != tuple(shape[batches + 2 :]):
        return False
    for batch in range(prod(shapes[0][:batches])):
        ends = compressed[batch * step : (batch + 1) * step]
        places = plain[batch * count : (batch + 1) * count]
        if ends[0] != 0 or ends[-1] != count or any(not 0 <= b - a <= inner for a, b in pairwise(ends)):
            return False
        if any(not 0 <= index < inner for index in places):
            return False
        if any(a >= b for begin, end in pairwise(ends) for a, b in pairwise(places[begin:end])):
            return False
    return True
