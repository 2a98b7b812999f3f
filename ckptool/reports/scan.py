"""The report of ``scan``: what loading each file may do. It reads pickles of every kind, not only torch's."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import chain
from typing import Final, Literal

from ..base.errors import CkptoolError, NotACheckpointError, UnreadableError, of_file
from ..base.records import TypedDict
from ..base.steps import advised
from ..base.suffixes import CHECKPOINTS, PICKLES
from ..base.text import pluralize
from ..checkpoint.checkpoint import Checkpoint
from ..files.archives import exists, file_name, open_any
from ..files.folders import folder_at
from ..files.sources import Source
from ..formats.checkpoint_search import SkippedFile, find_all
from ..formats.foreign.identification import PLACEHOLDERS
from ..formats.opening import CheckpointOrPath, file_of, in_several_files, open_checkpoint, read_checkpoint
from ..formats.plain_pickle import is_plain_pickle
from ..formats.search.inert import inert_kind
from ..formats.search.pickle_search import find_pickles, is_followed
from ..safety.rules import UNKNOWN, VERDICTS, WEIGHTS_ONLY
from ..safety.torch_lists import DEFAULT
from ..safety.verdict import Verdict, examine_all, verdict_of, worst_verdict
from .file_rows import PASSED_OVER, UNREADABLE, FileVerdict
from .loads import checkpoint_verdict

#: First bytes that ``inert_kind`` examines.
_HEAD: Final = 512


class FileScan(TypedDict):
    """One file, or one folder that is a checkpoint.

    ``verdict`` is None for a skipped file, for which ``passed_over`` names the kind, and for an unreadable file, for
    which ``error`` has the message. ``reasons`` explain the verdict; for weights-only, they name text that only other
    programs than torch.load read. ``bytes`` is None if the file cannot be opened.
    """

    path: str
    bytes: int | None
    kind: str
    verdict: str | None
    reasons: list[str]
    passed_over: str
    error: str | None
    next: str


class ScanLine(FileScan):
    """A line of ``ckptool scan --format jsonl``, schema ``ckptool.scan-file/1``."""

    schema: Literal["ckptool.scan-file/1"]


class ScanReport(TypedDict):
    """The report of ``scan``, schema ``ckptool.scan/1``.

    ``verdict`` is the worst of all verdicts, None without any verdict. ``passed_over`` counts skipped files by kind.
    """

    schema: Literal["ckptool.scan/1"]
    torch: str
    verdict: str | None
    files: list[FileScan]
    passed_over: dict[str, int]


def scan(*paths: CheckpointOrPath, torch: str = DEFAULT) -> ScanReport:
    """Return the report of ``ckptool scan`` on files and folders, schema ``ckptool.scan/1``.

    ``torch`` is the version whose weights_only list applies. Problems with a file are in the report; they raise no
    error.

    >>> report = ckptool.scan("training.pth", "args.pth")
    >>> report["verdict"], [item["verdict"] for item in report["files"]]
    ('unknown', ['weights-only', 'unknown'])
    """
    items = find_all([file_of(path) for path in paths])
    scans = (scan_path(item, torch) if isinstance(item, str) else [not_scanned(item.path, item)] for item in items)
    return scan_report(chain.from_iterable(scans), torch)


def scan_report(files: Iterable[FileScan], torch: str = DEFAULT) -> ScanReport:
    """Return the report on these files."""
    every = list(files)
    words = [item["verdict"] for item in every if item["verdict"] is not None]
    over = Counter(item["passed_over"] for item in every if item["passed_over"])
    verdict = worst_verdict(words) if words else None
    return {
        "schema": "ckptool.scan/1",
        "torch": torch,
        "verdict": verdict,
        "files": every,
        "passed_over": dict(over.most_common()),
    }


def passed_over_words(counts: dict[str, int]) -> str:
    """Return "skipped: 3 (2 images, 1 text)", or "" if no file was skipped."""
    if not counts:
        return ""
    kinds = ", ".join(pluralize(count, kind) for kind, count in counts.items())
    return f"skipped: {sum(counts.values()):,} ({kinds})"


def scan_verdict(item: FileScan) -> FileVerdict:
    """Return the scan of a file as a verdict."""
    path, kind = item["path"], item["kind"]
    if item["error"] is not None:
        return FileVerdict(path, UNREADABLE, UnreadableError.exit_code, kind, message=item["error"])
    if item["verdict"] is None:
        return FileVerdict(path, PASSED_OVER, 0, kind, message=item["passed_over"])
    code = 0 if item["verdict"] == WEIGHTS_ONLY else 1
    return FileVerdict(path, item["verdict"], code, kind, message="; ".join(item["reasons"]))


def path_verdict(scans: Sequence[FileScan]) -> FileVerdict:
    """Return the scans of one path as one verdict: the name of the first, and the worst result."""
    every = [scan_verdict(item) for item in scans]
    if len(every) == 1:
        return every[0]
    order = (*VERDICTS[:-1], UNREADABLE, WEIGHTS_ONLY, PASSED_OVER)
    worst = min(every, key=lambda item: order.index(item.verdict))
    message = "; ".join(f"{item.path}: {item.message}" for item in every if item.code)
    return worst._replace(path=every[0].path, code=max(item.code for item in every), message=message)


def not_scanned(path: str, reason: SkippedFile | CkptoolError) -> FileScan:
    """Return the scan of a folder that is not entered, or of a path that cannot be read."""
    if isinstance(reason, SkippedFile):
        return _scan(path, None, "", Verdict(UNKNOWN, (reason.why,)))
    kind = reason.kind if isinstance(reason, NotACheckpointError) else ""
    return _scan(path, None, kind, error=advised(reason.what, reason.step), next=reason.step.line)


def _scan(
    path: str,
    size: int | None,
    kind: str,
    verdict: Verdict | None = None,
    *,
    passed_over: str = "",
    error: str | None = None,
    next: str = "",
) -> FileScan:
    return {
        "path": path,
        "bytes": size,
        "kind": kind,
        "verdict": None if verdict is None else verdict.word,
        "reasons": [] if verdict is None else list(verdict.reasons),
        "passed_over": passed_over,
        "error": error,
        "next": next,
    }


def scan_path(path: str, torch: str = DEFAULT) -> list[FileScan]:
    """Scan one file, one folder that is a checkpoint, or one member of an archive.

    If a checkpoint in several files does not open, its scan has the reason, and scans of all files in its folder
    follow.
    """
    if not in_several_files(path) or not exists(path):
        return [scan_file(path, torch)]
    from .checks import other_checkpoints  # imported only for checkpoints in several files

    scans: list[FileScan] = []
    folders = [path]
    while folders:  # a checkpoint inside the folder may fail to open too
        whole = folders.pop()
        try:
            with open_checkpoint(whole) as checkpoint:
                scans.append(_checkpoint_scan(whole, checkpoint, torch))
                folders += other_checkpoints(checkpoint.source)
        except CkptoolError as error:
            folder = whole if folder_at(whole) is not None else os.path.dirname(whole) or os.curdir
            if error.path not in ("", whole):
                error.what = f"{os.path.relpath(error.path, folder)}: {error.what}"
            if error.of_server:
                scans.append(not_scanned(whole, error))
            else:
                kind = error.kind if isinstance(error, NotACheckpointError) else "damaged"
                scans.append(_scan(whole, None, kind, Verdict(UNKNOWN, (error.what,))))
            for item in find_all([folder], within=True):
                if isinstance(item, str) and folder_at(item) is not None:
                    folders.append(item)
                else:
                    scans.append(scan_file(item, torch) if isinstance(item, str) else not_scanned(item.path, item))
    return scans


def scan_file(path: str, torch: str = DEFAULT) -> FileScan:
    """Scan one file, or one member of an archive."""
    try:
        with closing(open_any(path)) as source:
            if is_plain_pickle(source):
                return _scan(path, source.size, "pickle", Verdict(WEIGHTS_ONLY))
            try:
                return _checkpoint_scan(path, read_checkpoint(source), torch)
            except CkptoolError as error:
                return _other_scan(path, source, of_file(error), torch)
    except CkptoolError as error:
        return not_scanned(path, error)


def _checkpoint_scan(path: str, checkpoint: Checkpoint, torch: str) -> FileScan:
    verdict = checkpoint_verdict(checkpoint.lenient(), torch)
    return _scan(path, checkpoint.source.size, checkpoint.format, verdict)


def _other_scan(path: str, source: Source, error: CkptoolError, torch: str) -> FileScan:
    kind = error.kind if isinstance(error, NotACheckpointError) else "damaged"
    pickles = examine_all(find_pickles(source), torch)
    verdict = verdict_of(pickles, torch, unclear=[] if kind != "damaged" else [error.what])
    if pickles or verdict.word != WEIGHTS_ONLY or is_followed(source):
        return _scan(path, source.size, kind, verdict)
    claims = file_name(path).lower().endswith((*CHECKPOINTS, *PICKLES))
    if kind in PLACEHOLDERS and claims:
        return not_scanned(path, error)
    inert = inert_kind(source.read(0, _HEAD))
    if inert and not claims:
        return _scan(path, source.size, kind, passed_over=inert)
    return _scan(path, source.size, kind, Verdict(UNKNOWN, (error.what,)))
