"""The report of ``validate`` on one file: every check, every global, and what could not be checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, Final

from ..base.errors import CkptoolError, MalformedError, NotACheckpointError, PickleError, TargetError, UnreadableError
from ..base.limits import LIMITS
from ..base.map_location import parse_map_location
from ..base.text import counted, listed, rename_step
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import AMBIGUOUS, DEFLATED, NO_INDEX
from ..checkpoint.programs import convert_step
from ..files.archives import open_any
from ..files.sources import ContainedSource, FileSource, FolderSource
from ..formats import folder_format
from ..formats.opening import checkpoint_of, in_several_files, open_checkpoint
from ..formats.pickle_search import find_pickles
from ..safety.torch_lists import NEWEST, VERSIONS
from ..values.torch.loads import need_torch
from .beside import files_beside, look, look_beside
from .checks import FAIL, NOT_POSSIBLE, PASS, WARNING, Check, Note, Safety, broken, safety, validation
from .expectations import Policy, expectations
from .findings import command, rescue_step, sanitize_step
from .loading import load_report
from .nonfinite import nonfinite

INVALID: Final = "invalid"
VALID: Final = "valid"
UNREADABLE: Final = "unreadable"


def check_policy(policy: Policy) -> None:
    """Raise TargetError for a policy that no file can meet: an unknown torch, a bad map_location, no lock."""
    if policy.torch and policy.torch not in VERSIONS:
        what = f"the list of torch {policy.torch!r} is not known"
        raise TargetError(what, next=f"known are {listed(VERSIONS, most=len(VERSIONS))}")
    parse_map_location(policy.map_location or None)
    if policy.lock:
        from .comparing.lock import read_lock

        read_lock(policy.lock)


def validation_report(
    path: str, policy: Policy = Policy(), *, quick: bool = False, progress: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """The report of ``validate``, schema ``ckptool.validate/1``. Raises nothing about the file: that is its answer.

    ``quick`` leaves out the checksums; ``progress`` is called with numbers of bytes.
    """
    name = os.fspath(path)
    check_policy(policy)
    torch = policy.torch or NEWEST
    report: dict[str, Any] = {"schema": "ckptool.validate/1", "path": name, "bytes": None, "format": None}
    source: FileSource | ContainedSource | None = None
    try:
        if in_several_files(name):
            opened = open_checkpoint(name)
        else:
            source = open_any(name)
            report["bytes"] = source.size
            opened = checkpoint_of(source)
        with opened as checkpoint:
            report["bytes"] = checkpoint.source.size
            report["format"] = checkpoint.format
            return report | _checked(checkpoint, policy, torch, quick, progress)
    except MalformedError as error:
        # It is a checkpoint, and it is broken: that is an answer.
        return report | _without_container(name, broken(error), error, policy, torch, INVALID)
    except CkptoolError as error:  # also ChangedError: somebody writes to it
        if isinstance(error, NotACheckpointError):
            report["format"] = error.kind
        note = Note("unreadable", "error", error.what)
        check = Check("readable", "container", FAIL, error.what, (note,))
        return report | _without_container(name, check, error, policy, torch, UNREADABLE)


def _checked(
    checkpoint: Checkpoint, policy: Policy, torch: str, quick: bool, progress: Callable[[int], None] | None
) -> dict[str, Any]:
    checkpoint = checkpoint.tolerating()
    checks, found = validation(checkpoint, torch=torch, quick=quick, progress=progress)
    assert found.verdict is not None
    checks += expectations(checkpoint, policy, found.verdict)
    if policy.lock:
        from .comparing.lock import lock_checks, read_lock

        checks += lock_checks(checkpoint, read_lock(policy.lock), quick=quick)
    if policy.finite:
        checks.append(_finite(checkpoint, progress))
    if policy.load:
        checks.append(_loads(checkpoint, policy.map_location))
    for source in checkpoint.sources:
        if isinstance(source, FileSource):
            source.check_unchanged()
    beside = look_beside(checkpoint.source, torch) if isinstance(checkpoint.source, FolderSource) else None
    if beside is not None:
        checks += beside.checks
        named = [*found.globals, *beside.globals]
        found = found._replace(pickles=[*found.pickles, *beside.pickles], globals=named)
    report = _summed(checks, found, policy, torch, "")
    report["files"] = beside.as_json() if beside is not None else []
    unclear = any(problem.code in AMBIGUOUS for problem in checkpoint.container.problems)
    broken_by = {
        note.code
        for check in checks
        if check.status == FAIL and check.name in _SALVAGE
        for note in check.notes
        if note.level == "error"
    }
    if broken_by and broken_by <= {DEFLATED, NO_INDEX}:
        report["next"] = command("repack", checkpoint.path, word="clean")
    elif not unclear and any(check.status == FAIL and check.name in _SALVAGE for check in checks):
        folder = isinstance(checkpoint.source, FolderSource)
        step = "get the files again that are missing or damaged" if folder or not checkpoint.pickled else ""
        report["next"] = step or rescue_step(checkpoint)
    elif not unclear:
        bad = {check.name: check.status for check in checks if check.status in (FAIL, WARNING)}
        report["next"] = _remedy(checkpoint, policy, bad)
    return report


def _remedy(checkpoint: Checkpoint, policy: Policy, bad: Mapping[str, str]) -> str:
    """The command that mends what is not as expected, "" where there is none."""
    if "program" in bad:
        return convert_step(checkpoint.path) if checkpoint.survey.tensors else ""
    if "prefix" in bad:
        if policy.prefix == "none":
            return command("strip-module", checkpoint.path, word="plain")
        return command("add-module", checkpoint.path, "--prefix", policy.prefix, word="prefixed")
    if "device" in bad and not any(mark in policy.device[0] for mark in "*?"):
        return command("remap", checkpoint.path, "--to", policy.device[0], word=policy.device[0].replace(":", ""))
    if "load" in bad and checkpoint.traits.loads == "converted":
        return command("convert", checkpoint.path, extension=".pth")
    if "weights-only" in bad and not checkpoint.pickled:
        return rename_step(checkpoint.path, ".safetensors")
    # A file that runs a command when it is loaded is not to be mended but to be thrown away.
    return sanitize_step(checkpoint) if "weights-only" in bad and bad.get("globals") != FAIL else ""


#: Checks after whose failure something may still be saved.
_SALVAGE: Final = ("structure", "complete", "checksums", "sizes")


def unreadable_report(path: str, error: CkptoolError) -> dict[str, Any]:
    """The report on a path behind which there is no file to look at: an empty folder, a glob that nothing matches."""
    check = Check("readable", "container", FAIL, error.what, (Note("unreadable", "error", error.what),))
    report: dict[str, Any] = {"schema": "ckptool.validate/1", "path": path, "bytes": None, "format": None}
    summed = _summed([check], Safety([], [], None, []), Policy(), NEWEST, UNREADABLE)
    return report | summed | {"error": error.what, "next": error.next}


def _finite(checkpoint: Checkpoint, progress: Callable[[int], None] | None) -> Check:
    name, group = "finite", "expectations"
    try:
        found = nonfinite(checkpoint, progress)
    except UnreadableError as error:
        return Check(name, group, NOT_POSSIBLE, error.what)
    if not found:
        return Check(name, group, PASS, "no NaN and no Inf in any tensor")
    notes = []
    for item in found:
        words = [f"{count:,} {kind}" for count, kind in ((item.nans, "NaN"), (item.infs, "Inf")) if count]
        notes.append(Note("nonfinite", "error", f"{item.path or 'the tensor'}: {' and '.join(words)}", item.path))
    message = f"{counted(len(found), 'tensor')} with NaN or Inf: {listed([note.message for note in notes], most=3)}"
    return Check(name, group, FAIL, message, tuple(notes))


def _loads(checkpoint: Checkpoint, map_location: str) -> Check:
    name, group = "load", "expectations"
    path, how = checkpoint.path, checkpoint.traits.loads
    if how == "converted":
        what = "torch.load reads files, and this is a folder of parts"
        return Check(name, group, FAIL, what, (Note("load", "error", what),))
    try:
        need_torch("loading it with torch.load", path)
    except UnreadableError as error:
        return Check(name, group, NOT_POSSIBLE, error.what)
    loaded = load_report(path, parse_map_location(map_location or None))
    if not loaded["ok"]:
        return Check(name, group, FAIL, loaded["error"], (Note("load", "error", loaded["error"]),))
    where = listed([f"{counted(count, 'tensor')} on {device}" for device, count in loaded["devices"].items()])
    return Check(
        name, group, PASS, f"torch.load loads {'it' if how == 'file' else 'each file'}: {where or 'no tensors'}"
    )


def _without_container(
    path: str, check: Check, error: CkptoolError, policy: Policy, torch: str, status: str
) -> dict[str, Any]:
    """What can be said of a file that is no whole checkpoint: its pickles are looked at all the same."""
    found = Safety([], [], None, [])
    try:
        if os.path.isdir(path) and folder_format(path) is not None:
            files = (look(os.path.join(path, name), name, torch) for name in files_beside(path, ()))
            found = safety([pickle for file in files for pickle in file.pickles], torch, None)
        else:
            with closing(open_any(path)) as source:
                found = safety(find_pickles(source), torch, None)
    except (PickleError, MalformedError) as problem:
        found = Safety([], [], None, [broken(problem)])
    except UnreadableError:
        pass
    checks = [check, *(found.checks if found.pickles else [])]
    wanted = [name for name in ("lock", "finite", "load") if getattr(policy, name)]
    checks += [Check(name, "expectations", NOT_POSSIBLE, "the file cannot be opened") for name in wanted]
    if isinstance(error, PickleError):
        checks = [item for item in checks if item.name != "pickles"]
    report = _summed(checks, found, policy, torch, status)
    return report | {"error": str(error).removeprefix(f"{error.path}: "), "next": error.next}


def _summed(checks: list[Check], found: Safety, policy: Policy, torch: str, status: str) -> dict[str, Any]:
    failures = sum(check.status == FAIL for check in checks)
    warnings = sum(check.status == WARNING for check in checks)
    skipped = [check.name for check in checks if check.status == NOT_POSSIBLE]
    if not status:
        bad = failures or (policy.strict and (warnings or skipped))
        status = INVALID if bad else VALID
        complete = not skipped
    else:
        complete = False
    return {
        "status": status,
        "valid": status == VALID,
        # Two things, of which a file may be neither, one or both.
        "damaged": any(check.status == FAIL and check.group in ("container", "integrity") for check in checks),
        "runs_code": any(note.code == "dangerous-call" for check in checks for note in check.notes),
        "strict": policy.strict,
        "coverage": "complete" if complete else "partial",
        "not_checked": skipped if found.verdict is not None else ["everything that needs a whole container"],
        "failures": failures,
        "warnings": warnings,
        "torch": torch,
        "checks": [_check(check) for check in checks],
        "pickles": [pickle.where for pickle in found.pickles],
        "globals": [item._asdict() for item in found.globals[: LIMITS.listed]],
        "globals_in_all": len(found.globals),
        "files": [],
        "error": None,
        "next": "",
    }


def _check(check: Check) -> Mapping[str, Any]:
    return {
        "name": check.name,
        "group": check.group,
        "status": check.status,
        "message": check.message,
        "notes": [note._asdict() for note in check.notes[: LIMITS.listed]],
        "notes_in_all": len(check.notes),
    }
