"""The report of ``validate`` on one file: every check, every global, and the checks that were not possible."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from ..base.dtypes import BY_NAME, is_complex
from ..base.errors import (
    CkptoolError,
    MalformedError,
    NotACheckpointError,
    PickleError,
    RefusedError,
    TargetError,
    UnreadableError,
)
from ..base.findings import DANGEROUS_CALL, FLAT_PARAMETERS, Finding
from ..base.globs import Globs
from ..base.limits import LIMITS
from ..base.map_location import parse_map_location
from ..base.records import TypedDict
from ..base.steps import AnyStep, advised, as_step
from ..base.text import join_limited, pluralize
from ..checkpoint.checkpoint import Checkpoint, away, rescue_step
from ..checkpoint.programs import program_of
from ..checkpoint.selection import ChosenKeys, dotted
from ..checkpoint.tensors import Tensor, ViewId, view_id
from ..files.archives import open_any
from ..files.downloads import check_unchanged, expect_reads
from ..files.folders import folder_at
from ..files.sources import FolderSource
from ..formats import folder_format
from ..formats.opening import CheckpointOrPath, checkpoint_of, file_of, in_several_files, open_checkpoint
from ..formats.search.pickle_search import find_pickles
from ..safety.calls import has_acting_call
from ..safety.rules import UNKNOWN, WEIGHTS_ONLY
from ..safety.torch_lists import DEFAULT, VERSIONS
from ..safety.verdict import ExaminedPickle, examine_all, verdict_of
from ..values.elements import elements, in_storage_order, read_for, storage_reader
from ..values.torch.loads import need_torch
from .checks import (
    FAIL,
    NOT_POSSIBLE,
    PASS,
    WARNING,
    Check,
    CompanionReport,
    Companions,
    broken_check,
    check_checkpoint,
    check_companion,
    check_companions,
    check_pickles,
    companion_names,
    judge,
    other_checkpoints,
)
from .edit_steps import as_one_file, companions_step, edit_step, together
from .expectations import Policy, expectations, policy_of
from .file_rows import PASSED_OVER, UNREADABLE
from .loads import VerdictReport, checkpoint_verdict, load_report, verdict_report
from .scan import FileScan, scan_path
from .summary import safety_words

if TYPE_CHECKING:
    from ..files.write.copying import Progress

INVALID: Final = "invalid"
VALID: Final = "valid"

#: Checks after whose failure ``salvage`` may still save something.
_SALVAGE: Final = ("structure", "complete", "checksums", "sizes")


class NoteReport(TypedDict):
    """A problem: ``offset`` in bytes, -1 if unknown."""

    code: str
    level: str
    message: str
    where: str
    offset: int


class CheckReport(TypedDict):
    """A check; ``notes_in_all`` also counts the notes beyond the listed ones."""

    name: str
    group: str
    status: str
    message: str
    notes: list[NoteReport]
    notes_in_all: int


class GlobalReport(TypedDict):
    """A global as one pickle names it; see ``NamedGlobal``."""

    module: str
    name: str
    mapped: str
    word: str
    times: int
    pickle: str


class ValidateReport(TypedDict):
    """The report of ``validate``, schema ``ckptool.validate/1``.

    A file may be damaged, run code, both or neither. A missing or unreadable file, or an intact one of another kind, is
    not damaged; an empty one is. ``bytes`` and ``format`` are None if the file cannot be opened. ``status`` is valid,
    invalid, unreadable, or "skipped" for a file in a folder that is not a checkpoint. ``safety`` is None if nothing was
    examined.
    """

    schema: Literal["ckptool.validate/1"]
    path: str
    bytes: int | None
    format: str | None
    status: str
    valid: bool
    damaged: bool
    runs_code: bool
    strict: bool
    policy: str
    coverage: str
    inherent: list[str]
    not_checked: list[str]
    failures: int
    warnings: int
    torch: str
    safety: VerdictReport | None
    checks: list[CheckReport]
    pickles: list[str]
    globals: list[GlobalReport]
    globals_in_all: int
    files: list[CompanionReport]
    error: str | None
    advice: str
    next: str


def check_policy(policy: Policy) -> None:
    """Raise TargetError for a policy that no file can meet: unknown torch, bad map_location, unreadable lock."""
    if policy.torch and policy.torch not in VERSIONS:
        known = join_limited(VERSIONS, most=len(VERSIONS))
        raise TargetError(f"the list of torch {policy.torch!r} is not known", next=f"known are {known}")
    parse_map_location(policy.map_location or None)
    for item in policy.each:
        if item.only and not any((item.prefix, item.dtype, item.require, item.forbid, item.finite, item.lock)):
            what = "include and exclude are about keys, and nothing is expected of any"
            raise TargetError(what, next="add one of prefix, dtype, require, forbid, finite and lock")
        if item.lock:
            from .comparing.lock import read_lock

            read_lock(item.lock)


def validation_report(
    path: str, policy: Policy = Policy(), *, quick: bool = False, progress: Progress | None = None
) -> ValidateReport:
    """Return the report of ``validate``. Problems with the file are in the report; they raise no error.

    ``quick`` skips the checksums; ``progress`` is called with numbers of bytes. Raise TargetError for a policy that no
    file can meet.
    """
    name = os.fspath(path)
    check_policy(policy)
    size: int | None = None
    file_format: str | None = None
    try:
        if in_several_files(name):
            opened = open_checkpoint(name)
        else:
            source = open_any(name)
            size = source.size
            opened = checkpoint_of(source)
        with opened as checkpoint:
            size, file_format = checkpoint.source.size, checkpoint.format
            return report_on(checkpoint, policy, name, quick=quick, progress=progress)
    except MalformedError as error:
        # A broken checkpoint is still an answer.
        report = _without_container(name, broken_check(error), error, policy, INVALID)
    except CkptoolError as error:  # this includes ChangedError: another process writes to the file
        if isinstance(error, NotACheckpointError):
            file_format = error.kind
        if error.path.startswith(folder := os.path.join(name, "")) and error.path != folder:
            error.what, error.path = f"{error.path.removeprefix(folder)}: {error.what}", name
        report = _without_container(name, _unreadable(error), error, policy, UNREADABLE)
        report["damaged"] = file_format in ("empty", "zeros")
    report["bytes"], report["format"] = size, file_format
    return report


def report_on(
    checkpoint: Checkpoint,
    policy: Policy = Policy(),
    path: str = "",
    *,
    quick: bool = False,
    progress: Progress | None = None,
) -> ValidateReport:
    """Return the report of ``validate`` on an open checkpoint, which ``path`` names, by default its own path."""
    path = path or checkpoint.path
    try:
        report = _checked(path, checkpoint, policy, quick, progress)
    except MalformedError as error:
        report = _without_container(path, broken_check(error), error, policy, INVALID)
    report["bytes"], report["format"] = checkpoint.source.size, checkpoint.format
    return report


def unreadable_report(path: str, error: CkptoolError) -> ValidateReport:
    """Return the report on a path that leads to no file: an empty folder, or a glob without a match."""
    report = _report(path, [_unreadable(error)], None, Policy(), UNREADABLE)
    report["damaged"] = False
    report["error"], report["next"] = advised(error.what, error.step), error.step.line
    return report


def missing_report(path: str, policy: Policy) -> ValidateReport:
    """Return the report on a missing file that a folder's lock names."""
    note = Finding("lock-file-missing", "error", "the lock names it, and there is no such checkpoint")
    return _report(path, [judge("lock", "expectations", [note], "")], None, policy, INVALID)


def passed_over_report(scan: FileScan, policy: Policy) -> ValidateReport:
    """Return the report on a file in a folder that is not a checkpoint and, as far as is known, runs nothing.

    With ``policy.strict`` or ``policy.safe`` a file that could not be examined is invalid.
    """
    words = scan["error"] or scan["passed_over"] or next(iter(scan["reasons"]), "nothing in it can run")
    known = scan["verdict"] == WEIGHTS_ONLY or bool(scan["passed_over"])
    checks = [Check("other file", "safety", PASS if known else NOT_POSSIBLE, words)]
    safe = any(item.safe for item in policy.each)
    if safe and not known:
        checks.append(_safe({"verdict": scan["verdict"] or UNKNOWN, "reasons": [words]}))
    status = INVALID if (policy.strict or safe) and not known else PASSED_OVER
    report = _report(scan["path"], checks, None, policy, status)
    report["bytes"], report["format"] = scan["bytes"], scan["kind"] or None
    if scan["verdict"] is not None:
        report["safety"] = {"verdict": scan["verdict"], "reasons": scan["reasons"]}
    report["coverage"], report["not_checked"] = ("complete", []) if known else ("partial", ["other file"])
    return report


def _unreadable(error: CkptoolError) -> Check:
    return judge("readable", "container", [Finding("unreadable", "error", error.what)], "")


def _checked(
    path: str, checkpoint: Checkpoint, policy: Policy, quick: bool, progress: Progress | None
) -> ValidateReport:
    checkpoint, torch = checkpoint.lenient(), policy.torch or DEFAULT
    checked = check_checkpoint(checkpoint, torch=torch, quick=quick, progress=progress)
    checks = [*checked.checks, *expectations(checkpoint, policy, checked.verdict)]
    content = False
    for lock, include, exclude in dict.fromkeys((item.lock, item.include, item.exclude) for item in policy.each):
        if not lock:
            continue
        from .comparing.lock import lock_checks, not_locked, read_lock

        locked = read_lock(lock).of(path, policy.roots)
        only = Globs(include, exclude)
        found = [not_locked(path)] if locked is None else lock_checks(checkpoint, locked, only, quick=quick)
        content |= not only and any((check.name, check.status) == ("lock-content", PASS) for check in found)
        checks += found
    finite = [item.only for item in policy.each if item.finite]
    if finite:
        checks.append(_finite(checkpoint, finite, progress))
    if policy.load:
        checks.append(_loads(checkpoint, policy.map_location))
    check_unchanged(checkpoint.sources)
    files: list[CompanionReport] = []
    companions: Companions | None = None
    pickles = [*checked.pickles]
    if isinstance(checkpoint.source, FolderSource):
        companions = check_companions(checkpoint.source, torch)
        files = companions.files
        checks += companions.checks
        pickles += companions.pickles
    inherent = [] if quick or not checkpoint.traits.no_checksums else ["checksums"]
    if inherent and content:
        checks, inherent = [_as_locked(check) for check in checks], []
    verdict = checkpoint_verdict(checkpoint, torch, checked=checked, companions=companions)
    if any(item.safe for item in policy.each):
        others = [scan for folder in other_checkpoints(checkpoint.source) for scan in scan_path(folder, torch)]
        checks.append(_safe(verdict_report(verdict), others))
    report = _report(path, checks, pickles, policy, "", inherent)
    step = as_step(_next_step(checkpoint, policy, checks))
    report["files"], report["advice"], report["next"] = files, step.advice, step.line
    report["safety"] = verdict_report(verdict)
    return report


def _safe(verdict: VerdictReport, others: Sequence[FileScan] = ()) -> Check:
    bad = [] if verdict["verdict"] == WEIGHTS_ONLY else [safety_words(verdict)]
    unsafe = (scan for scan in others if scan["verdict"] not in (None, WEIGHTS_ONLY) or scan["error"] is not None)
    bad += [f"{scan['path']}: {scan['error'] or scan['verdict']}" for scan in unsafe]
    notes = tuple(Finding("verdict", "error", text) for text in bad)
    message = join_limited(bad, most=3) if bad else "nothing in it can run"
    return Check("verdict", "expectations", FAIL if bad else PASS, message, notes)


def _as_locked(check: Check) -> Check:
    """Return the check of checksums that the format lacks as passed, because the content matches the lock."""
    if (check.name, check.status) != ("checksums", NOT_POSSIBLE):
        return check
    return check._replace(status=PASS, message="none in this format; the content of every tensor is as locked")


def _next_step(checkpoint: Checkpoint, policy: Policy, checks: Sequence[Check]) -> AnyStep:
    path, problems = checkpoint.path, checkpoint.container.problems
    bad = [(check, note) for check in checks if check.status in (FAIL, WARNING) for note in check.notes]
    damage = [note for check, note in bad if check.status == FAIL and check.name in _SALVAGE and note.level == "error"]
    if any(problem.ambiguous for problem in problems):
        return ""
    if damage:
        whole = checkpoint.pickled or isinstance(checkpoint.source, FolderSource)
        return next(
            (note.next for note in damage if note.next), rescue_step(checkpoint) if whole else "get the file again"
        )
    if has_acting_call(checkpoint.graph) and any(note.code == DANGEROUS_CALL for _, note in bad):
        return ""  # a file that runs a command when it is loaded should be deleted, not repaired
    if any(problem.code == FLAT_PARAMETERS for problem in problems):
        return ""  # its message says what to do
    for check, note in bad:
        if note.next and check.name in ("program", "part", "shards"):
            return note.next  # an edit of a part alone would be useless
    if program_of(checkpoint) is not None:
        return ""
    # Two policies may expect the same thing differently.
    times = Counter(check.name for check in checks)
    steps = [note.next for check, note in bad if note.next and times[check.name] == 1]
    if any(check.name == "beside" for check, _ in bad):
        steps.append(companions_step(checkpoint))
    edits = [step for step in steps if as_step(step).commands]
    if edits and not any(item.device for item in policy.each) and not policy.map_location and away(checkpoint):
        edits.append(edit_step("remap", path, word="cpu", to="cpu"))  # without it only a machine with a GPU loads it
    outputs = [command.output for step in edits for command in as_step(step).commands]
    extension = ".pth" if any(name.endswith(".pth") for name in outputs) and not path.endswith(".pth") else ""
    step = together(path, edits, extension) or next(iter(edits), "")
    return as_one_file(checkpoint, step) or next((step for step in steps if step), "")


def _finite(checkpoint: Checkpoint, choices: Sequence[Globs], progress: Progress | None) -> Check:
    """Check that the chosen tensors are finite, each view once. Other checks report missing bytes."""
    name, group, survey = "finite", "expectations", checkpoint.survey
    chosen = {entry.path for only in choices for entry in ChosenKeys(dotted(only, checkpoint)).tensors(survey)}
    parts: dict[ViewId, tuple[str, Tensor]] = {}
    for entry in survey.tensors:
        for part in survey.reader.parts(entry.tensor) if entry.path in chosen else ():
            if _may_be_nonfinite(part):
                parts.setdefault(view_id(part), (entry.path, part))
    expect_reads(read_for(storage_reader(checkpoint, part.storage), part) for _, part in parts.values())
    counts: dict[str, Counter[str]] = {}
    try:
        for path, part in parts.values():
            counts.setdefault(path, Counter()).update(_count_nonfinite(checkpoint, part, progress))
    except UnreadableError as error:  # torch is not installed
        return Check(name, group, NOT_POSSIBLE, error.what)
    texts = {
        path: " and ".join(f"{number:,} {word}" for word, number in found.items()) for path, found in counts.items()
    }
    notes = [
        Finding("nonfinite", "error", f"{path or 'the tensor'}: {text}", path) for path, text in texts.items() if text
    ]
    if not notes:
        of = f", of {' and of '.join(only.words for only in choices)}" if all(choices) else ""
        return Check(name, group, PASS, f"no NaN and no Inf in any tensor{of}")
    notes[0] = notes[0]._replace(next="no edit mends NaN and Inf: take a checkpoint from before they appeared")
    listed = join_limited([note.message for note in notes], most=3)
    return Check(name, group, FAIL, f"{pluralize(len(notes), 'tensor')} with NaN or Inf: {listed}", tuple(notes))


def _may_be_nonfinite(tensor: Tensor) -> bool:
    dtype = BY_NAME.get(tensor.dtype)
    if not tensor.storage or tensor.location == "meta" or dtype is None or 0 in tensor.shape:
        return False
    # This dtype has no code for NaN or Inf.
    return (dtype.floating or is_complex(dtype.name)) and dtype.name != "float4_e2m1fn_x2"


def _count_nonfinite(checkpoint: Checkpoint, tensor: Tensor, progress: Progress | None) -> Counter[str]:
    from ..values.torch.compute import count_nonfinite

    found: Counter[str] = Counter()
    stored, times = in_storage_order(tensor)
    try:
        for data in elements(storage_reader(checkpoint, stored.storage), stored):
            nans, infs = count_nonfinite(data, stored.dtype)
            found += Counter(NaN=nans * times, Inf=infs * times)
            if progress:
                progress(len(data))
    except MalformedError:
        pass
    return found


def _loads(checkpoint: Checkpoint, map_location: str) -> Check:
    name, group = "load", "expectations"
    path, loads = checkpoint.path, checkpoint.traits.loads
    if loads == "converted":
        message = f"torch.load does not read the format {checkpoint.format}"
        step: AnyStep = edit_step("convert", path, extension=".pth")
        if checkpoint.container.in_blocks:
            from ..edits.recompute import plain_step  # imported only for GGUF

            step = plain_step(checkpoint, ".pth")
        return Check(name, group, FAIL, message, (Finding("load", "error", message, next=step),))
    try:
        need_torch("really loading it", path)
    except UnreadableError as error:
        return Check(name, group, NOT_POSSIBLE, error.what)
    report = load_report(path, parse_map_location(map_location or None))
    if report["error"] is not None:
        return judge(name, group, [Finding("load", "error", report["error"])], "")
    where = join_limited([f"{pluralize(count, 'tensor')} on {device}" for device, count in report["devices"].items()])
    message = f"torch.load loads {'it' if loads == 'file' else 'each file'}: {where or 'no tensors'}"
    return Check(name, group, PASS, message)


def _pickles_at(path: str, torch: str) -> list[ExaminedPickle]:
    try:
        folder = folder_at(path)
        if folder is not None and folder_format(folder) is not None:
            names = islice(companion_names(folder, ()), LIMITS.listed)
            return [pickle for name in names for pickle in check_companion(folder, name, torch).pickles]
        with closing(open_any(path)) as source:
            return examine_all(find_pickles(source), torch)
    except UnreadableError:
        return []


def _without_container(path: str, check: Check, error: CkptoolError, policy: Policy, status: str) -> ValidateReport:
    """Return the report on a file that is not a whole checkpoint; its pickles are checked if it can be read."""
    torch = policy.torch or DEFAULT
    pickles = [] if isinstance(error, RefusedError) else _pickles_at(path, torch)
    checks = [check, *(check_pickles(pickles, torch) if pickles else [])]
    locked, finite = (any(wanted) for wanted in zip(*((item.lock, item.finite) for item in policy.each)))
    wanted = {"lock": locked, "finite": finite, "load": policy.load}
    expected = [name for name, asked in wanted.items() if asked]
    checks += [Check(name, "expectations", NOT_POSSIBLE, "the file cannot be opened") for name in expected]
    unclear = [] if isinstance(error, NotACheckpointError) else [error.what]
    verdict = verdict_of(pickles, torch, unclear=unclear)
    if any(item.safe for item in policy.each) and (pickles or unclear):
        checks.append(_safe(verdict_report(verdict)))
    if isinstance(error, PickleError):
        checks = [item for item in checks if item.name != "pickles"]
    if any(note.code == "dangerous-call" for item in checks for note in item.notes):
        status = INVALID  # whatever the file is, that is an answer
    report = _report(path, checks, pickles, policy, status, whole=False)
    if pickles:
        report["safety"] = verdict_report(verdict)
    what = str(error).removeprefix(f"{error.path}: ")
    report["error"], report["next"] = advised(what, error.step), error.step.line
    report["advice"] = error.step.advice if status == INVALID else ""  # otherwise ``error`` has the advice
    return report


def _report(
    path: str,
    checks: list[Check],
    pickles: Sequence[ExaminedPickle] | None,
    policy: Policy,
    status: str,
    inherent: Sequence[str] = (),
    *,
    whole: bool = True,
) -> ValidateReport:
    """Return the report on these checks, which decide a ``status`` of ""; ``inherent`` are impossible in the format."""
    failures = sum(check.status == FAIL for check in checks)
    warnings = sum(check.status == WARNING for check in checks)
    skipped = [check.name for check in checks if check.status == NOT_POSSIBLE]
    names = [item for pickle in pickles or () for item in pickle.names]
    complete = not status and not skipped
    if not status:
        strict = policy.strict and (warnings or set(skipped) - set(inherent))
        status = INVALID if failures or strict else VALID
    return {
        "schema": "ckptool.validate/1",
        "path": path,
        "bytes": None,
        "format": None,
        "status": status,
        "valid": status == VALID,
        "damaged": any(check.status == FAIL and check.group in ("container", "integrity") for check in checks),
        "runs_code": any(note.code == "dangerous-call" for check in checks for note in check.notes),
        "strict": policy.strict,
        "policy": policy.source,
        "coverage": "complete" if complete else "partial",
        "inherent": [name for name in inherent if name in skipped],
        "not_checked": skipped if whole and pickles is not None else ["everything that needs a whole container"],
        "failures": failures,
        "warnings": warnings,
        "torch": policy.torch or DEFAULT,
        "safety": None,
        "checks": [_check_report(check) for check in checks],
        "pickles": [pickle.where for pickle in pickles or ()],
        "globals": [cast("GlobalReport", item._asdict()) for item in names[: LIMITS.listed]],
        "globals_in_all": len(names),
        "files": [],
        "error": None,
        "advice": "",
        "next": "",
    }


def _check_report(check: Check) -> CheckReport:
    notes = [{key: getattr(note, key) for key in NoteReport.__annotations__} for note in check.notes[: LIMITS.listed]]
    return cast("CheckReport", {**check._asdict(), "notes": notes, "notes_in_all": len(check.notes)})


def validate(
    path: CheckpointOrPath,
    policy: Policy | Mapping[str, Any] | None = None,
    *,
    quick: bool = False,
    progress: Progress | None = None,
) -> ValidateReport:
    """Return the JSON of ``ckptool validate`` on one file, schema ``ckptool.validate/1``.

    ``policy`` holds the expectations, as a Policy or with the keys of a policy file. ``quick`` skips the checksums.
    Raise TargetError for an invalid policy; problems with the file are in the report.

    >>> report = ckptool.validate("training.pth", {"device": "cpu"})
    >>> report["valid"], [check["name"] for check in report["checks"] if check["status"] == "fail"]
    (False, ['device'])
    """
    if not isinstance(policy, Policy):
        values = (policy or {}).items()
        policy = policy_of({name: os.fspath(each) if isinstance(each, os.PathLike) else each for name, each in values})
    return validation_report(file_of(path), policy, quick=quick, progress=progress)
