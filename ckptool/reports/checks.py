"""The checks of ``validate``: whether a file is whole, unambiguous and loadable.

A check passes, warns, fails, or is not possible.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
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
from ..safety.torch_lists import VERSIONS, list_of
from ..safety.verdict import ExaminedPickle, examine, is_name
from ..safety.weights_only import ALLOWED, CALLED, LoadPrediction
from ..values.elements import storage_reader
from ..values.interpretation import Reading, excessive_repeats, numbers_in
from .facts import WEIGHTS_ONLY, Facts, dangerous_call, facts

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


class Checked(NamedTuple):
    """The checks of a checkpoint, the pickles in it, the prediction of torch.load, and problems of the container."""

    checks: list[Check]
    pickles: Sequence[ExaminedPickle]
    verdict: LoadPrediction
    problems: Sequence[Finding]


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
    checkpoint: Checkpoint, *, torch: str, quick: bool = False, steps: bool = True, progress: Progress | None = None
) -> Checked:
    """Check an open checkpoint. ``quick`` skips the checksums, for which every byte is read; ``steps`` as in
    ``facts``.
    """
    container, survey = checkpoint.container, checkpoint.survey
    if not quick:
        container.compare_copies()
    known = facts(checkpoint, read=True, torch=torch, steps=steps)
    notes: dict[str, list[Finding]] = defaultdict(list)
    for fact in (*(problem for problem in known.problems if problem.level != "note"), *known.others):
        check = "complete" if fact.check == "checksums" and checkpoint.traits.no_checksums else fact.check
        notes[check].append(fact)
    storages = survey.reader.storages
    stored = f"{pluralize(len(storages), 'storage')}, {human_bytes(sum(item.nbytes for item in storages.values()))}"
    # A format without checksums has no directory either.
    end_to_end = bool(checkpoint.traits.no_checksums)
    structure = (
        "the parts follow each other without gaps"
        if end_to_end
        else "every record is in the file once, where the zip directory says"
    )
    sizes = f"every storage has the size that the {checkpoint.traits.size_source} says"
    sets = [item.message for item in container.problems if item.code in (RANK_SETS, OTHER_FILES)]
    count = len(survey.tensors)
    geometry = f"{pluralize(count, 'tensor')} within {'its storage' if count == 1 else 'their storages'}"
    checks = [
        _unless_unchecked(judge("structure", "container", notes["structure"], structure)),
        _complete(checkpoint, notes["complete"], "; ".join((f"all there: {stored}", *sets))),
        _checksums(checkpoint, notes["checksums"], quick, progress),
        judge("sizes", "integrity", notes["sizes"], sizes),
        judge("geometry", "integrity", notes["geometry"], geometry),
        *_indices(checkpoint, torch, quick),
        *(judge(name, "container", notes[name], "") for name in ("shards", "part") if name in notes),
    ]
    if survey.unlisted:
        message = f"tensors are at more places than are listed: {survey.unlisted:,} were left out"
        checks.append(Check("places", "integrity", NOT_POSSIBLE, message))
    program = program_of(checkpoint)
    if program is not None:
        checks.append(judge("program", "safety", notes["program"], ""))
    own = program.own_names if program is not None else ()
    every = chain(container.pickles() if checkpoint.pickled else (), carried_pickles(checkpoint))
    pickles = list(examine(every, torch, own))
    if program is not None:  # its code and settings are text, by design
        pickles = [pickle._replace(note="") for pickle in pickles if not pickle.program]
    if checkpoint.pickled or pickles:
        checks += check_pickles(pickles, torch, notes["pickles"])
    else:
        whole = checkpoint.traits.loads == "file"
        none = "the file has no pickle: nothing in it" if whole else "the weights have no pickle: nothing in them"
        checks.append(Check("pickles", "safety", PASS, f"{none} can be run"))
    loads = _loads(checkpoint, known, notes[WEIGHTS_ONLY])
    if known.verdict.loads and any(check.name == _INDICES and check.status == FAIL for check in checks):
        loads = loads._replace(status=WARNING, message=f"torch.load of torch {torch} refuses it: see {_INDICES}")
    return Checked([*checks, loads], pickles, known.verdict, known.problems)


def _loads(checkpoint: Checkpoint, known: Facts, notes: Sequence[Finding]) -> Check:
    """Check whether loaders take the file; ``notes`` say why torch.load refuses it."""
    unsupported, verdict, problems = checkpoint.survey.unsupported, known.verdict, known.problems
    start = {"converted": "as one file: ", "each file": "each file: "}.get(checkpoint.traits.loads, "")
    call = f"torch.load(weights_only=True) of torch {verdict.torch}"
    loader, reported = checkpoint.traits.loader, {problem.message for problem in problems}
    if checkpoint.traits.loads == "converted" and not checkpoint.pickled:
        from ..formats.outputs import OUTPUTS  # imported late, as few folders have no pickle

        loader = OUTPUTS[checkpoint.traits.writes_as].loader
    by_name = f"{loader} takes it, torch.load of torch {verdict.torch} {'too' if verdict.loads else 'does not'}"
    good = f"{start}{call} takes it" if checkpoint.pickled else f"{start}{by_name}"
    check = judge(WEIGHTS_ONLY, "safety", notes, good)
    rules = [item.rule for item in verdict.blockers if item.rule]
    unclear = [item.message for item in problems if item.ambiguous] or [*unsupported.values()] * verdict.loads
    if checkpoint.pickled and unclear:
        return check._replace(status=NOT_POSSIBLE, notes=(), message=f"what torch reads is not clear: {unclear[0]}")
    if not notes and (checkpoint.pickled or {*rules} & reported) and not verdict.loads:
        rule = rules[0] if rules else "see globals"
        # torch.load reads one file: it knows no problem of a folder.
        no = "there is no whole to load" if start and rule in reported else f"{call} refuses it"
        message = f"{no}: {rule}" if checkpoint.pickled else rule
        step = next((problem.next for problem in problems if problem.next), "")
        note = Finding(WEIGHTS_ONLY, "warning", message, next=step)
        return check._replace(status=WARNING, message=message, notes=(note,))
    return check


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
            name, group, [Finding("checksum", "error", text) for text in wrong], "the checksum of the archive agrees"
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
        notes.append(Finding("checksum", "error", message, record.name, record.span.offset))
    return notes + [Finding("unreadable-record", "error", f"{quoted(name)}: {why}", name) for name, why in result.lost]


def check_pickles(pickles: Sequence[ExaminedPickle], torch: str, known: Sequence[Finding] = ()) -> list[Check]:
    """Check all pickles in a file, and the globals that they name; ``known`` are other findings about them."""
    notes = list(known)
    for number, pickle in enumerate(pickles):
        if pickle.program or pickle.note:
            code = CONFIGURATION if pickle.program else CARRIED
            notes.append(Finding(code, "warning", pickle.described(pickle.program or pickle.note), pickle.where))
        if pickle.unchecked:
            notes.append(Finding(UNCHECKED, "warning", f"skipped {pickle.where}: {pickle.error}", pickle.where))
        elif pickle.error:
            message = f"{pickle.where} cannot be followed to its end: {pickle.error}"
            notes.append(Finding("broken-pickle", "error", message, pickle.where))
        elif number:
            notes += [
                Finding("odd-pickle", "warning", f"{pickle.where} at byte {offset:,}: {text}", pickle.where, offset)
                for offset, text in pickle.oddities
            ]
            if pickle.rest:
                message = f"{pluralize(pickle.rest, 'byte')} after the end of the pickle in {pickle.where}"
                notes.append(Finding("after-stop", "warning", message, pickle.where))
    good = f"{pluralize(len(pickles), 'pickle')} parsed to the end, nothing executed"
    return [_unless_unchecked(judge("pickles", "safety", notes, good)), _globals(pickles, torch)]


def _globals(pickles: Sequence[ExaminedPickle], torch: str) -> Check:
    names = [item for pickle in pickles for item in pickle.names]
    outside = [item for item in names if item.word != ALLOWED]
    notes = [dangerous_call([call], pickle.where) for pickle in pickles for call in pickle.calls]
    for item in outside:
        words = "called when it is loaded without weights_only" if item.word == CALLED else "named"
        message = f"{item.mapped} is not on {list_of(torch, [item.mapped])}; {words}"
        notes.append(Finding("global", "warning", message, item.pickle))
    notes += [
        Finding("global-name", "error", f"{quoted(item.mapped)} is not a valid name in Python: damaged", item.pickle)
        for item in outside
        if not is_name(item)
    ]
    notes = list({(note.code, note.message): note for note in reversed(notes)}.values())[::-1]
    check = judge("globals", "safety", notes, f"no global outside torch {torch}'s weights_only list")
    if check.status == FAIL or not outside:
        return check
    unlisted = list(dict.fromkeys(item.mapped for item in outside))
    return check._replace(message=f"not on {list_of(torch, unlisted)}: {join_limited(unlisted)}")


def broken_check(error: MalformedError) -> Check:
    """Return the failed structure check of a file whose container cannot be read."""
    message = MalformedError.__str__(error).removeprefix(f"{error.path}: ")
    note = Finding("malformed", "error", message, error.where, error.offset)
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
            notes.append(Finding("sparse-index", level, message, path))
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
        numbers.append([number for some in numbers_in(reading) for number in some if isinstance(number, int)])
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
