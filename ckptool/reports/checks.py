"""The checks of ``validate``: whether a file, and what is beside it in its folder, is whole, unambiguous and loadable.

A check passes, warns, fails, or is not possible.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice, pairwise
from math import prod
from typing import TYPE_CHECKING, Final

from ..base.errors import CkptoolError, MalformedError, UnreadableError
from ..base.findings import CARRIED, CONFIGURATION, OTHER_FILES, PROGRAM, RANK_SETS, UNCHECKED, Finding
from ..base.limits import LIMITS
from ..base.records import NamedTuple, TypedDict
from ..base.suffixes import WEIGHTS
from ..base.text import human_bytes, join_limited, pluralize, quoted, shape_text
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checksums import Checksums, checksums
from ..checkpoint.programs import program_of
from ..checkpoint.tensors import Tensor, rebuild_calls
from ..files.folders import Folder, open_folder
from ..files.sources import FolderSource, Source
from ..formats import carried_pickles, folder_format
from ..formats.checkpoint_search import GIT_FOLDER, LINKED_FOLDER
from ..formats.claims import member_checksums
from ..formats.opening import checkpoint_of
from ..formats.search.inert import code_kind, inert_kind
from ..formats.search.pickle_search import find_pickles
from ..pickles.nodes import Ref
from ..safety.torch_lists import VERSIONS, list_of
from ..safety.verdict import ExaminedPickle, examine, examine_all, is_name
from ..safety.weights_only import ALLOWED, CALLED, LoadPrediction
from ..values.elements import storage_reader
from ..values.interpretation import Reading, excessive_repeats, numbers_in
from .findings import WEIGHTS_ONLY, Facts, dangerous_call, facts

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
    """Check an open checkpoint. ``quick`` skips the checksums, which read every byte; ``steps`` as in ``facts``."""
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
    complete = judge("complete", "container", notes["complete"], "; ".join((f"all there: {stored}", *sets)))
    save = container.rank_save  # without a record of how many ranks saved, nobody knows what is missing
    if save is not None and not save.recorded and complete.status == PASS:
        complete = complete._replace(
            status=NOT_POSSIBLE, message=save.unsure
        )  # nothing records how many ranks saved it
    checks = [
        _unless_unchecked(judge("structure", "container", notes["structure"], structure)),
        complete,
        _checksums(checkpoint, notes["checksums"], quick, progress),
        judge("sizes", "integrity", notes["sizes"], sizes),
        judge("geometry", "integrity", notes["geometry"], geometry),
        *_indices(checkpoint, torch, quick),
        *(judge(name, "container", notes[name], "") for name in ("shards", "part") if name in notes),
        *([judge("adapter", "expectations", notes["adapter"], "")] if "adapter" in notes else ()),
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
    return judge("structure", "container", [Finding("malformed", "error", message, error.where, error.offset)], "")


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
    """Check compressed sparse indices. ``shapes``: of the compressed indices, the plain ones, and the values."""
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


# -- the other files in a checkpoint's folder: a program that is given the folder may load any of them

#: Kinds of files, named as in ``identify.explain``, from which nothing is loaded.
_NOT_LOADED: Final = frozenset(("empty", "git-lfs-pointer", "html", "json", "index", "text", "link-text"))
#: Kinds of files that stand where the name promises weights, which were not downloaded.
_POINTERS: Final = frozenset(("empty", "zeros", "git-lfs-pointer", "html", "link-text"))
#: First bytes that are searched for code.
_HEAD: Final = 512
#: Codes of notes about a file that is not torch's: a global that is not on the list, code, a pickle in a tensor.
_CODE: Final = ("global", CONFIGURATION, CARRIED)
_DANGEROUS: Final = ("dangerous-call", "global-name")


class Companion(NamedTuple):
    """A file beside the checkpoint: its ``name`` relative to the folder, with "/", and a description.

    ``reason`` says why its content was not examined ("" if it was). ``notes`` are its problems.
    """

    name: str
    description: str
    reason: str = ""
    notes: tuple[Finding, ...] = ()
    pickles: tuple[ExaminedPickle, ...] = ()


class CompanionReport(TypedDict):
    """A file beside the checkpoint, in the report of ``validate``.

    ``what`` is its kind; ``why`` says why its content was not examined ("" if it was).
    """

    name: str
    looked_at: bool
    what: str
    why: str


class Companions(NamedTuple):
    """All files beside a checkpoint, with the checks and pickles found in them."""

    files: list[CompanionReport]
    checks: list[Check]
    pickles: list[ExaminedPickle]


def check_companions(source: FolderSource, torch: str) -> Companions:
    """Check every file in a folder and its subfolders that is not part of the checkpoint there.

    If the checkpoint is in a subfolder of the folder that the user named, the files around it are checked too. The
    files of other checkpoints there, such as earlier steps, are not.
    """
    top = open_folder(source.folder)
    around = (os.path.relpath(path, top.path).replace(os.sep, "/") for path, whole in _around(source) if not whole)
    every = list(islice(chain(companion_names(top, source.parts), around), LIMITS.listed + 1))
    files = [check_companion(top, name, torch) for name in every[: LIMITS.listed]]
    named = open_folder(source.name)  # contains the folder of the checkpoint, or is it
    files += _unfollowed_folders(named if named.is_folder("") else top)
    if len(every) > LIMITS.listed:
        why = f"more than {LIMITS.listed:,} files"
        files.append(Companion(f"{every[-1]} and what follows it", "more files", reason=why))
    pickles = [pickle for item in files for pickle in item.pickles]
    checks = []
    notes = [note for item in files for note in item.notes]
    count = sum(not item.reason for item in files)
    if count or notes:
        good = f"{pluralize(count, 'other file')} looked at: nothing that is run or odd"
        checks.append(judge("beside", "safety", notes, good))
    skipped = [item for item in files if item.reason]
    if skipped:
        unread = tuple(
            Finding("not-looked-at", "warning", f"{item.name}: {item.reason}", item.name) for item in skipped
        )
        names = join_limited([f"{item.name} ({item.reason})" for item in skipped], most=5)
        checks.append(Check("unread files", "safety", NOT_POSSIBLE, f"not looked at: {names}", unread))
    reports: list[CompanionReport] = [
        {"name": item.name, "looked_at": not item.reason, "what": item.description, "why": item.reason}
        for item in files
    ]
    return Companions(reports, checks, pickles)


def companion_names(top: Folder, parts: Collection[str]) -> Iterator[str]:
    """Yield the names of the files in a folder, except those in ``parts`` and ``.git``. Links are not followed."""
    for inner, folders, files in top.walk():
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(files):
            own = os.path.relpath(inner.join(name), top.path).replace(os.sep, "/")
            if own not in parts:
                yield own


def other_checkpoints(source: Source) -> list[str]:
    """Return the folders of other checkpoints in the folder that the user named, such as earlier steps."""
    return [path for path, whole in _around(source) if whole] if isinstance(source, FolderSource) else []


def _around(source: FolderSource) -> Iterator[tuple[str, bool]]:
    """Yield (path, whether it is a checkpoint folder) for what is around the checkpoint in the named folder."""
    named, top = open_folder(source.name), os.path.realpath(source.folder)
    if not named.is_folder("") or os.path.realpath(named.path) == top:
        return
    for inner, folders, files in named.walk():
        paths = {name: inner.join(name) for name in folders}
        folders[:] = sorted(name for name in folders if name != ".git" and os.path.realpath(paths[name]) != top)
        whole = [name for name in folders if folder_format(paths[name])]
        yield from ((paths[name], True) for name in whole)
        yield from ((inner.join(name), False) for name in sorted(files))
        folders[:] = [name for name in folders if name not in whole]


def _unfollowed_folders(top: Folder) -> list[Companion]:
    folders = ((inner, name) for inner, names, _ in top.walk() for name in sorted(names))
    kinds = (
        (inner.join(name), GIT_FOLDER if name == ".git" else LINKED_FOLDER)
        for inner, name in folders
        if name == ".git" or inner.is_link(name)
    )
    names = ((os.path.relpath(path, top.path).replace(os.sep, "/"), why) for path, why in kinds)
    return [Companion(name, "a folder", reason=why) for name, why in islice(names, LIMITS.listed)]


def check_companion(folder: Folder, name: str, torch: str) -> Companion:
    """Check one file of a folder as ``validate`` does, without its checksums."""
    try:
        source = folder.open(name)
    except UnreadableError as error:
        return Companion(name, "a file that cannot be opened", reason=error.what)
    try:
        code = code_kind(name, source.read(0, _HEAD))
        if code:
            return Companion(name, code, reason=code, pickles=(ExaminedPickle(name, program=code),))
        return _checked(folder, source, name, torch)
    except CkptoolError as error:  # the file changed or shrank while it was read
        return Companion(name, "a file that cannot be read", reason=error.what)
    finally:
        source.close()


def _checked(folder: Folder, source: Source, name: str, torch: str) -> Companion:
    try:
        with checkpoint_of(folder.open(name)) as opened:
            checkpoint = opened.lenient()
            checked = check_checkpoint(checkpoint, torch=torch, quick=True, steps=False)
            program = program_of(checkpoint)
            unclear = next(iter(checkpoint.survey.unsupported.values()), "")
    except UnreadableError as error:
        return _not_a_checkpoint(source, name, torch, error)
    notes = []
    for note in (note for check in checked.checks for note in check.notes):
        if note.code in _DANGEROUS or note.ambiguous:
            notes.append(_located(name, note))
        elif note.level == "error" or note.code in _CODE:
            notes.append(_located(name, note)._replace(level="warning"))
    pickles = tuple(pickle.in_file(name) for pickle in checked.pickles)
    if program is not None:
        notes.append(Finding(PROGRAM, "warning", f"{name}: {program.kind}, which holds code", name))
        pickles += (ExaminedPickle(name, program=f"{program.kind}, read by {program.loader}"),)
    reason = f"{unclear}, which ckptool does not follow" if unclear else ""
    return Companion(name, checkpoint.format, reason, tuple(notes), pickles)


def _not_a_checkpoint(source: Source, name: str, torch: str, error: UnreadableError) -> Companion:
    kind = getattr(error, "kind", "")
    pickles = examine_all(find_pickles(source), torch)
    checks = check_pickles(pickles, torch)
    notes = [_located(name, note) for check in checks for note in check.notes if note.code in (*_DANGEROUS, *_CODE)]
    pickles = [pickle.in_file(name) for pickle in pickles]
    whole = bool(pickles) and not any(pickle.error for pickle in pickles) and not isinstance(error, MalformedError)
    data = kind in _NOT_LOADED or bool(inert_kind(source.read(0, _HEAD)))
    if not (data or (whole and kind == "pickle")):
        return Companion(name, kind or "damaged", error.what, tuple(notes), tuple(pickles))
    if kind in _POINTERS and name.lower().endswith((*WEIGHTS, ".pkl")):
        notes.append(Finding(kind, "warning", f"{name}: {error.what}", name))
    return Companion(name, kind, "", tuple(notes), tuple(pickles))


def _located(name: str, note: Finding) -> Finding:
    return note._replace(message=f"{name}: {note.message}", where=name)
