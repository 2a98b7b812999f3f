"""Is the file whole, unambiguous and loadable? Each check passes, warns, fails, or could not be made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ..base.errors import MalformedError
from ..base.text import counted, human_bytes, listed, shown
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import AMBIGUOUS, CUT, DAMAGED, UNCHECKED, FoundPickle, Problem
from ..checkpoint.programs import PROGRAM_CODES, program_of
from ..checkpoint.sharding import sharding_summary
from ..pickles.nodes import Ref
from ..safety.checksums import Checksums, checksums
from ..safety.named_globals import ALLOWED, CALLED, NamedGlobal, dangerous_calls, is_name, named_globals
from ..safety.storages import Flaw, storage_flaws
from ..safety.weights_only import MISNAMED, LoadPrediction, weights_only
from .findings import rule_words

PASS: Final = "pass"
WARNING: Final = "warning"
FAIL: Final = "fail"
NOT_POSSIBLE: Final = "not possible"


class Note(NamedTuple):
    """One thing found: ``level`` "error" or "warning"; ``where`` a record or path, ``offset`` in bytes, -1 for none."""

    code: str
    level: str
    message: str
    where: str = ""
    offset: int = -1


class Check(NamedTuple):
    """One check: its ``group`` (container, integrity, safety, expectations), ``status``, and what it says."""

    name: str
    group: str
    status: str
    message: str
    notes: tuple[Note, ...] = ()


class Safety(NamedTuple):
    """What the pickles of a file name; ``verdict`` is None where there is no object that torch would load."""

    globals: list[NamedGlobal]
    pickles: list[FoundPickle]
    verdict: LoadPrediction | None
    checks: list[Check]


#: The code of a meaning that is not followed: see ``unfollowed``.
NOT_FOLLOWED: Final = "not-followed"

#: The checks that problems of a container belong to; the others are about its structure.
_CHECK_OF: Final = {
    "incomplete": "complete",
    "missing-storage": "complete",
    "unreferenced-storage": "complete",
    "unreferenced-record": "complete",
    **dict.fromkeys(("missing-file", "short-file", "bad-item", "missing-item", "chunk-hole"), "complete"),
    "storage-size": "sizes",
    "odd-pickle": "pickles",
    "after-stop": "pickles",
}


#: Formats of pickles that have no checksums, in words.


def judged(name: str, group: str, notes: Iterable[Note], good: str) -> Check:
    """A check from what was found: it fails with errors, warns with warnings, passes with nothing."""
    found = tuple(notes)
    errors = [note for note in found if note.level == "error"]
    if not found:
        return Check(name, group, PASS, good)
    first = (errors or list(found))[0].message
    rest = len(found) - 1
    message = f"{first} (and {rest:,} more)" if rest else first
    return Check(name, group, FAIL if errors else WARNING, message, found)


def validation(
    checkpoint: Checkpoint,
    *,
    torch: str,
    quick: bool = False,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[Check], Safety]:
    """Check a checkpoint that could be opened. ``quick`` leaves out the checksums, which need every byte."""
    notes: dict[str, list[Note]] = {"structure": [], "complete": [], "checksums": [], "sizes": [], "pickles": []}
    keys = checkpoint.survey.reader.storages
    program = program_of(checkpoint)
    for problem in (*checkpoint.container.problems, *checkpoint.container.audit(keys)):
        if problem.code in PROGRAM_CODES:
            notes.setdefault("program", []).extend([_note(problem)] if problem.level != "note" else [])
        elif problem.code in (CUT, DAMAGED):
            notes["complete" if checkpoint.traits.unsummed else "checksums"].append(_note(problem))
        elif problem.level != "note":
            notes[_CHECK_OF.get(problem.code, "structure")].append(_note(problem))
    notes["sizes"] += [
        Note("storage-twice", "warning", f"storage {shown(key)} is described in two ways; torch takes the first", key)
        for key in sorted(checkpoint.survey.reader.disagreeing)
    ]
    unfollowed = checkpoint.survey.unfollowed
    notes["pickles"] += [
        Note(NOT_FOLLOWED, "error", f"{what}, which ckptool does not follow") for what in _each(unfollowed)
    ]
    flaws = storage_flaws(checkpoint)
    for flaw in (flaw for flaw in flaws if flaw.refused):
        notes.setdefault(_CHECK_OF.get(flaw.code, "geometry"), []).append(_of_flaw(flaw))
    count, size = len(keys), sum(storage.nbytes for storage in keys.values())
    stored = f"{counted(count, 'storage')}, {human_bytes(size)}"
    # What has no checksums has no directory, either.
    end_to_end = bool(checkpoint.traits.unsummed)
    structure = "end to end, nothing between" if end_to_end else "every record once, where the directory says"
    says = "pickle" if checkpoint.pickled else "header"
    checks = [
        _unless_unchecked(judged("structure", "container", notes["structure"], structure)),
        judged("complete", "container", notes["complete"], f"all there: {stored}"),
        _checksums(checkpoint, notes["checksums"], quick, progress),
        judged("sizes", "integrity", notes["sizes"], f"every storage has the size that the {says} says"),
        judged(
            "geometry",
            "integrity",
            notes.get("geometry", []),
            f"{counted(len(checkpoint.survey.tensors), 'tensor')} within their storages",
        ),
    ]
    checks += [*_shards(checkpoint), *_places(checkpoint)]
    verdict = weights_only(checkpoint, flaws, torch)
    if not checkpoint.pickled:
        where = " in the weights: nothing in them" if checkpoint.traits.loads != "file" else ": nothing in it"
        found = Safety([], [], verdict, [Check("pickles", "safety", PASS, f"there is none{where} can be run")])
        each = {"converted": "as one file: ", "each file": "each file: "}.get(checkpoint.traits.loads, "")
        takes = f"{each}safetensors.torch.load_file takes it, {_by_torch(verdict)}"
        loads = Check("weights-only", "safety", PASS, takes)
        gone = {problem.message for problem in checkpoint.container.problems}
        odd = [rule.rule for rule in verdict.blockers if rule.rule.startswith(MISNAMED) or rule.rule in gone]
        found.checks.append(loads if not odd else loads._replace(status=WARNING, message=odd[0]))
        return checks + found.checks, found
    own = program.own_names if program is not None else ()
    found = safety(checkpoint.container.pickles(), torch, verdict, notes["pickles"], own)
    if checkpoint.traits.loads == "converted":
        found.checks[-1] = found.checks[-1]._replace(message=f"as one file: {found.checks[-1].message}")
    if program is not None:
        found.checks.insert(0, judged("program", "safety", notes["program"], ""))
    either = [note for note in notes["structure"] if note.code in AMBIGUOUS]
    if either:
        what = f"it depends on which record torch reads: {either[0].message}"
        found.checks[-1] = Check("weights-only", "safety", NOT_POSSIBLE, what)
    elif unfollowed and verdict.loads:
        what = f"it depends on what ckptool does not follow: {next(iter(unfollowed.values()))}"
        found.checks[-1] = Check("weights-only", "safety", NOT_POSSIBLE, what)
    return checks + found.checks, found


def _each(unfollowed: Mapping[Ref, str]) -> list[str]:
    """What is not followed, each sentence once, with how often."""
    times = Counter(unfollowed.values())
    return [f"{what} ({count:,} times)" if count > 1 else what for what, count in times.items()]


def _shards(checkpoint: Checkpoint) -> list[Check]:
    """Is it a whole checkpoint, or what one rank had? Nothing is said where nothing is spread over ranks."""
    survey = checkpoint.survey
    found = sharding_summary(survey.reader, survey.tensors)
    if found is None:
        return []
    if not found.partial:
        what = f"{counted(found.tensors, 'tensor')} spread over {found.over}, each of them whole in this file"
        return [Check("shards", "container", PASS, what)]
    share = "its" if found.partial == len(survey.tensors) else f"{found.partial:,} of its {len(survey.tensors):,}"
    what = (
        f"{share} tensors are what {found.owner} had of larger ones,"
        f" spread over {found.over}; the files of the other ranks were not looked at"
    )
    return [Check("shards", "container", WARNING, what, (Note("shards", "warning", what),))]


def _places(checkpoint: Checkpoint) -> list[Check]:
    """Were all places of tensors followed? Nothing is said where they were."""
    count = checkpoint.survey.unlisted
    what = f"tensors stand at more places than are listed: {count:,} were left out"
    return [Check("places", "integrity", NOT_POSSIBLE, what)] if count else []


def _unless_unchecked(check: Check) -> Check:
    """The check, which is none where a part of it would have taken too long."""
    open_ = [note for note in check.notes if note.code == UNCHECKED]
    return check if check.status == FAIL or not open_ else check._replace(status=NOT_POSSIBLE, message=open_[0].message)


def _by_torch(verdict: LoadPrediction) -> str:
    """Does torch.load pass it on?"""
    return f"torch.load of torch {verdict.torch} {'too' if verdict.loads else 'does not'}"


def _note(problem: Problem) -> Note:
    return Note(problem.code, problem.level, problem.message, problem.where, problem.offset)


def _of_flaw(flaw: Flaw) -> Note:
    return Note(flaw.code, "error", flaw.message, flaw.path)


def _checksums(
    checkpoint: Checkpoint, notes: Sequence[Note], quick: bool, progress: Callable[[int], None] | None
) -> Check:
    name, group = "checksums", "integrity"
    if quick:
        return judged(name, group, notes, "")._replace(
            status=FAIL if notes else NOT_POSSIBLE, message=notes[0].message if notes else "left out by --quick"
        )
    found = checksums(checkpoint.container, progress)
    bad = [*_wrong(checkpoint, found)]
    if bad:
        return judged(name, group, bad, "")
    if checkpoint.traits.unsummed:
        what = f"{checkpoint.traits.unsummed} has no checksums: what a flipped bit changed cannot be seen"
        return Check(name, group, NOT_POSSIBLE, what)
    agree = f"{counted(found.checked, 'record')}, {human_bytes(found.nbytes)} agree with their CRC-32"
    if found.uncomputed:
        what = f"{counted(found.uncomputed, 'record')} have no checksum on record (0: not computed)"
        return Check(name, group, NOT_POSSIBLE, f"{what}; {agree}" if found.checked else what)
    return Check(name, group, PASS, agree)


def _wrong(checkpoint: Checkpoint, found: Checksums) -> list[Note]:
    users: dict[str, list[str]] = {record.key: [] for record in found.wrong if record.key}
    if users:
        for entry in checkpoint.survey.tensors:
            for part in checkpoint.survey.reader.parts(entry.tensor):
                if part.storage in users and entry.path not in users[part.storage]:
                    users[part.storage].append(entry.path)
    notes = []
    for record in found.wrong:
        what = f"{shown(record.name)} has another checksum than the one on record"
        tensors = [path or "the tensor" for path in users.get(record.key, [])]
        if tensors:
            what += f": damaged {'tensor' if len(tensors) == 1 else 'tensors'} {listed(tensors)}"
        notes.append(Note("checksum", "error", what, record.name, record.span.offset))
    return notes + [Note("unreadable-record", "error", f"{shown(name)}: {why}", name) for name, why in found.lost]


def safety(
    pickles: Iterable[FoundPickle],
    torch: str,
    verdict: LoadPrediction | None,
    notes: Sequence[Note] = (),
    own: tuple[str, ...] = (),
) -> Safety:
    """What all the pickles of a file name, and what torch would do with the first.

    ``own`` are the beginnings of names that stand for what is in the file itself.
    """
    found = list(pickles)
    named = [item for item in named_globals(found, torch) if not item.mapped.startswith(own)]
    odd = list(notes)
    for number, pickle in enumerate(found):
        if pickle.unchecked:
            odd.append(Note(UNCHECKED, "warning", f"{pickle.where} was not looked at: {pickle.error}", pickle.where))
        elif pickle.error:
            what = f"{pickle.where} cannot be followed to its end: {pickle.error}"
            odd.append(Note("broken-pickle", "error", what, pickle.where))
        elif number and pickle.graph is not None:
            odd += [
                Note("odd-pickle", "warning", f"{pickle.where} at byte {offset:,}: {text}", pickle.where, offset)
                for offset, text in pickle.graph.oddities
            ]
            if pickle.rest:
                what = f"{counted(pickle.rest, 'byte')} stand behind the end of the pickle in {pickle.where}"
                odd.append(Note("after-stop", "warning", what, pickle.where))
    checks = [
        _unless_unchecked(
            judged("pickles", "safety", odd, f"{counted(len(found), 'pickle')} followed to the end, nothing run")
        ),
        _globals(found, named, torch),
    ]
    if verdict is not None:
        checks.append(_loads(verdict, found))
    return Safety(named, found, verdict, checks)


def _globals(pickles: Sequence[FoundPickle], named: Sequence[NamedGlobal], torch: str) -> Check:
    outside = [item for item in named if item.word != ALLOWED]
    calls = dangerous_calls(pickles)
    notes = [
        Note("dangerous-call", "error", f"loading it without weights_only runs {call}", where) for where, call in calls
    ]
    for item in outside:
        words = "called when it is loaded without weights_only" if item.word == CALLED else "named"
        what = f"{item.mapped} is not on torch {torch}'s list; {words}"
        notes.append(Note("global", "warning", what, item.pickle))
    notes += [
        Note("global-name", "error", f"{shown(item.mapped)} is no name that Python could write: damaged", item.pickle)
        for item in outside
        if not is_name(item)
    ]
    good = f"no global outside torch {torch}'s weights_only list"
    check = judged("globals", "safety", notes, good)
    if check.status == FAIL or not outside:
        return check
    names = list(dict.fromkeys(item.mapped for item in outside))
    return check._replace(message=f"not on torch {torch}'s list: {listed(names)}")


def _loads(verdict: LoadPrediction, pickles: Sequence[FoundPickle]) -> Check:
    call = f"torch.load(weights_only=True) of torch {verdict.torch}"
    if verdict.loads:
        return Check("weights-only", "safety", PASS, f"{call} takes it")
    names = [blocker.name for blocker in verdict.blockers if blocker.name]
    graph = pickles[0].graph if pickles else None
    rules = rule_words([b for b in verdict.blockers if b.rule], graph.style.protocol if graph else 2)
    what = f"{call} refuses it: {listed(names + rules)}"
    return Check("weights-only", "safety", WARNING, what, (Note("weights-only", "warning", what),))


def broken(error: MalformedError) -> Check:
    """The check of the structure of a file whose container cannot be read."""
    note = Note(
        "malformed", "error", MalformedError.__str__(error).removeprefix(f"{error.path}: "), error.where, error.offset
    )
    return Check("structure", "container", FAIL, note.message, (note,))
