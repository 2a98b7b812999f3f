"""The validate command: check checkpoint files, for CI."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import click

from ..base.errors import CkptoolError, OutputError, UnreadableError
from ..base.globs import SYNTAX
from ..base.steps import Line
from ..base.text import join_limited, pluralize
from ..files.archives import file_of
from ..formats.checkpoint_search import (
    SkippedFile,
    as_one,
    checkpoints_within,
    find_files,
    is_folder_of_checkpoints,
)
from ..reports.expectations import Policy
from ..reports.rows import PASSED_OVER, FileVerdict
from ..reports.scan import passed_over_words, scan_file
from ..reports.validate import (
    ValidateReport,
    check_policy,
    missing_report,
    passed_over_report,
    unreadable_report,
    validation_report,
)
from ..safety.outcomes import UNSAFE
from ..safety.torch_lists import NEWEST
from .fleet import COUNTED, ROWS, Errors, Fleet, fleet_options
from .jobs import FolderFile
from .options import (
    InputPath,
    exclude_option,
    format_option,
    include_option,
    progress_option,
    repeatable,
    worst,
)
from .policies import PolicySet, policy_set
from .render import clean, emit, emit_lines, flush, say_error
from .streams import Reports, progress_bar, report_text
from .terminal import on_terminal, watched
from .validation_formats import github_lines, github_summary, junit, sarif, short_lines, table_lines
from .working import Working

FORMATS = ("table", "json", "jsonl", ROWS, "junit", "sarif", "github")
#: Formats that need all reports at once.
_WHOLE: Final = {"junit": junit, "sarif": sarif}
#: The most skipped files named.
_NAMED: Final = 5
_CODES: Final = {"passed over": 0, "valid": 0, "invalid": 1, "unreadable": 3}

EPILOG = """\b
Examples:
  ckptool validate model.pth
  ckptool validate checkpoints/ --format junit > report.xml
  ckptool validate release.pth --layout bare --prefix none --device cpu --weights-only --finite
  ckptool validate release/ --policy ckptool.toml --format github
  ckptool validate model.pth --lock ckptool.lock.json
  ckptool validate training.pth --finite --exclude optimizer
  ckptool validate model.pth --load --map-location cpu
  ckptool validate --files-from list --since seen.jsonl --jobs 0 --format rows > rows.jsonl

\b
A policy file says the same as the options, in TOML, and for files by glob, relative
to its folder, what is expected in addition. Without --policy, ckptool.toml or
[tool.ckptool] in pyproject.toml is looked for in the working folder and those above
it, up to that with .git. One that is found can only add requirements.
  layout = "bare"
  prefix = "none"
  device = ["cpu"]
  dtype = ["float32", "bfloat16"]
  require = ["head.*"]
  max-bytes = "2GB"
  weights-only = true
  lock = "ckptool.lock.json"
  [files."detector/*.pth"]
  max-bytes = "500MB"
"""


@click.command(epilog=EPILOG)
@click.option("--policy", "policy_file", type=InputPath(), metavar="FILE", help="Read expectations from a TOML file.")
@click.option("--no-policy", is_flag=True, help="Look for no ckptool.toml and no [tool.ckptool] in pyproject.toml.")
@click.option("--layout", type=click.Choice(("bare", "wrapped")), help="Expect this layout.")
@click.option("--prefix", metavar="none|TEXT", help="Expect no prefix, or one such as 'module.' on every key.")
@repeatable("--device", metavar="TAG", help="Expect every storage on this device, such as cuda:*")
@repeatable("--dtype", metavar="DTYPE", help="Expect this dtype of floating-point tensors")
@repeatable("--require", metavar="KEYGLOB", help=f"Expect a matching key ({SYNTAX})")
@repeatable("--forbid", metavar="KEYGLOB", help=f"Expect no matching key ({SYNTAX})")
@include_option
@exclude_option
@click.option("--max-bytes", metavar="SIZE", help="Expect the file to be no larger: 4096, 500MB, 2GiB.")
@click.option("--weights-only", is_flag=True, help="Expect that torch.load(weights_only=True) takes it.")
@click.option("--safe", is_flag=True, help="Expect that scan calls it weights-only: no program, nothing unknown.")
@click.option(
    "--torch", metavar="VERSION", help="The torch version whose weights_only list applies.  [default: the newest]"
)
@click.option("--finite", is_flag=True, help="Read the values: expect no NaN and no Inf. Needs torch.")
@click.option("--load", is_flag=True, help="Load it for real with torch.load(weights_only=True). Needs torch.")
@click.option("--map-location", metavar="SPEC", help="For --load: cpu, cuda:0, or cuda:1=cuda:0,cuda:2=cpu.")
@click.option(
    "--lock",
    type=InputPath(),
    metavar="FILE",
    help="Expect what 'ckptool lock' recorded: keys, shapes, dtypes, devices ...",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Count warnings, and checks that could not be made, as failures; a format may lack checksums.",
)
@click.option("--quick", is_flag=True, help="Skip the checksums, which read every byte.")
@fleet_options
@format_option(FORMATS)
@click.option("-v", "--verbose", is_flag=True, help="Show every check and global, even for several files.")
@click.option("-q", "--quiet", is_flag=True, help="Print only what is not valid.")
@progress_option
def validate(
    paths: tuple[str, ...],
    policy_file: str | None,
    no_policy: bool,
    quick: bool,
    working: Fleet,
    style: str,
    verbose: bool,
    quiet: bool,
    no_progress: bool,
    **options: Any,
) -> int:
    """Check that checkpoints are whole and unambiguous, what loading them would call, and what a release expects.

    Takes files, folders (searched for checkpoints by content) and globs. Nothing in a file is run; torch is imported
    for --load and --finite only. A file that torch.load refuses by default is valid, with a warning: --weights-only or
    --strict demand more. --include and --exclude choose the keys and entries, with all that is in them, that --prefix,
    --dtype, --require, --forbid, --finite and --lock look at. JSON is an object for one named file, otherwise a list.
    Exit 0: all are valid; 1: one is not; 3: one is not a checkpoint or cannot be read.
    """
    paths = as_one(paths)
    policies = policy_set(policy_file, options, not no_policy)
    policy = policies.policy._replace(roots=tuple(path for path in paths if is_folder_of_checkpoints(path)))
    policies = policies._replace(policy=policy)
    if options["map_location"] and not policy.load:
        raise click.UsageError("--map-location is for --load.")
    for each in (policy, *(section for _, section in policies.sections)):
        check_policy(each)
    if policies.path and style == "github":
        emit(f"::notice title=ckptool::policy: {clean(policies.path)}, found")
    elif policies.path and style == "table" and not quiet:
        emit(clean(f"policy: {policies.path}, found; --no-policy leaves it aside"))
    locks = [lock for lock in dict.fromkeys(item.lock for item in policies.every) if lock]
    decisive = {**options, "quick": quick, "policy": [policies.path, policy_file or ""], "roots": locks and paths}
    working.begin("validate", style, decisive, [*filter(None, (policies.path, policy_file)), *locks])
    tally = _Tally()
    seen: list[str] = []
    files = working.files(paths, _files, str)
    files = _noted(files, seen) if locks else files
    bar = not (quick or quiet or no_progress or style == "github") and watched()
    first = list(islice(files, 2))
    how = _How(style, verbose or len(first) < 2, verbose, quiet)
    work = partial(_validated, how=how, policies=policies, quick=quick)
    reports = Reports(style, working.several(paths))
    whole: list[ValidateReport] = []
    summary = os.environ.get("GITHUB_STEP_SUMMARY", "") if style == "github" else ""
    results = _results(work, chain(first, files), working, how, bar)
    with closing(results):
        for item, verdict in chain(results, _missing(policy, seen, how, working)):
            tally.add(item, verdict)
            if item is None:
                continue
            if style in ("json", "jsonl"):
                reports.add(item.text)
            elif style in _WHOLE or summary:
                whole += [item.report] if item.report else []
            if style not in ("json", "jsonl") and item.text:
                emit_lines([item.text])
                flush()
    if style in _WHOLE:
        emit(_WHOLE[style](whole))
    if summary:
        _write_summary(summary, whole)
    reports.close()
    tally.write(len(paths) != 1 or tally.files != 1, style == "table" and not quiet)
    over = passed_over_words(tally.over)
    named = clean(join_limited(tally.named, sum(tally.over.values())))
    if over and style == "github":
        emit(f"::notice title=ckptool::{clean(over)}: {named}")
    elif over and not quiet and style not in ("json", "jsonl", ROWS, *_WHOLE):
        emit(f"{over}: {named}")
    return worst(tally.codes)


def _files(paths: Sequence[str]) -> Iterator[str | UnreadableError]:
    """Yield the checkpoints for the paths, also from archives in folders, then all other files of the folders.

    The other files matter because a program that is given a folder may load any of them.
    """
    for item in find_files(paths):
        if isinstance(item, UnreadableError):
            yield item
            continue
        inside = [] if isinstance(item, SkippedFile) or item.named else checkpoints_within(item.path)
        yield from inside
        yield FolderFile(item.path) if inside or isinstance(item, SkippedFile) else item.path


def _write_summary(path: str, reports: Sequence[ValidateReport]) -> None:
    """Append to the summary of a GitHub Actions job. A failure is printed and does not change the exit code."""
    from ..files.write.output import append_text

    try:
        append_text(path, github_summary(reports))
    except OutputError as error:
        say_error(error)


def _noted(files: Iterable[str | UnreadableError], seen: list[str]) -> Iterator[str | UnreadableError]:
    """Yield the files, and add their paths to ``seen``."""
    for file in files:
        seen.append(file if isinstance(file, str) else file.path)
        yield file


def _missing(
    policy: Policy, seen: list[str], how: _How, working: Working
) -> Iterator[tuple[_Answer | None, FileVerdict]]:
    """Yield an answer for each file that the lock of a folder names and that is not in ``seen``."""
    if working.error is not None:
        return  # the lost engine did not see all files, so any could seem missing
    for lock in dict.fromkeys(item.lock for item in (policy, *policy.also) if item.lock and policy.roots):
        from ..reports.comparing.lock import read_lock

        for path in read_lock(lock).missing(seen, policy.roots):
            answer = _answer(missing_report(path, policy), how)
            yield answer, answer.verdict


class _How(NamedTuple):
    """How to print a report: its format, in full or short, with every detail, or only if the file is not valid."""

    style: str
    full: bool
    verbose: bool
    quiet: bool


class _Answer(NamedTuple):
    """The kept part of a report: its text, and the data for totals and summaries."""

    text: str
    verdict: FileVerdict
    error: UnreadableError | None
    report: ValidateReport | None


def _validated(path: str, *, how: _How, policies: PolicySet, quick: bool, progress: Any = None) -> _Answer:
    policy = policies.of(path)
    if isinstance(path, FolderFile):
        scan = scan_file(path, policy.torch or NEWEST)
        if scan["verdict"] != UNSAFE:
            return _answer(passed_over_report(scan, policy), how)
    return _answer(validation_report(path, policy, quick=quick, progress=progress), how)


def _answer(report: ValidateReport, how: _How) -> _Answer:
    error, text = None, ""
    if report["status"] == "unreadable":
        error = UnreadableError(report["error"] or "", path=report["path"], next=Line(report["next"]))
    if how.style in ("json", "jsonl"):
        text = report_text(report, how.style)
    elif report["status"] == "passed over":
        text = f"{clean(report['path'])}: passed over ({_kind(report)})" if how.style == "table" and how.verbose else ""
    elif how.style == "github":
        text = "\n".join(github_lines(report))
    elif how.style == "table" and not (how.quiet and report["valid"]):
        text = "\n".join(table_lines(report, how.verbose) if how.full else short_lines(report))
    whole = report if how.style in (*_WHOLE, "github") else None
    return _Answer(text, _verdict(report), error, whole)


def _verdict(report: ValidateReport) -> FileVerdict:
    status = report["status"]
    if status == PASSED_OVER:
        message = _kind(report)
    elif report["error"] is not None:
        message = report["error"]
    else:
        bad = (check for check in report["checks"] if check["status"] in ("fail", "warning"))
        message = "; ".join(f"{check['name']}: {check['message']}" for check in bad)
    coverage, kind = report["coverage"], report["format"] or ""
    return FileVerdict(report["path"], status, _CODES[status], kind, coverage, message=message)


def _kind(report: ValidateReport) -> str:
    """Return the kind of a skipped file, such as "image", or "unread file" if nothing looked into it."""
    check = report["checks"][0]
    if check["status"] != "pass":
        return "unread file"
    return "other file" if report["safety"] is not None else check["message"]


def _results(
    work: partial[_Answer], files: Iterator[str | UnreadableError], working: Fleet, how: _How, bar: bool
) -> Generator[tuple[_Answer | None, FileVerdict], None, None]:
    """Yield the answers and verdicts. The bar moves while a file is read; with several jobs, after each file.

    If answers appear on the terminal one by one, each large file has its own bar instead.
    """

    def lost(path: str, error: CkptoolError) -> _Answer:
        answer = _answer(unreadable_report(path, error), how)
        # A folder without a checkpoint gets an error on stderr, but no line in the table.
        return answer if how.style != "table" or os.path.isfile(file_of(path)) else answer._replace(text="")

    def results(
        work: Callable[[str], _Answer], files: Iterable[str | UnreadableError]
    ) -> Generator[tuple[_Answer | None, FileVerdict], None, None]:
        return working.results(work, files, lost, _verdict_of)

    if bar and working.alone and how.style in ("table", "jsonl", ROWS) and on_terminal():
        yield from results(partial(_with_bar, work), files)
        return
    if bar and working.alone and working.files_from is None:
        known = list(islice(files, COUNTED))
        files = chain(known, files)
        if len(known) < COUNTED:
            with progress_bar(sum(map(_size, known)), "validating") as progress:
                yield from results(partial(work, progress=progress), files)
            return
    with working.counted(files, "validating", bar and not on_terminal()) as (items, step):
        for result in results(work, items):
            if step:
                step(1)
            yield result


def _verdict_of(answer: _Answer) -> FileVerdict:
    return answer.verdict


def _with_bar(work: Callable[..., _Answer], path: str) -> _Answer:
    """Validate a file with a bar that shows how much of it was read."""
    with progress_bar(_size(path), os.path.basename(path)) as progress:
        return work(path, progress=progress)


def _size(path: str | UnreadableError) -> int:
    return os.stat(path).st_size if isinstance(path, str) and os.path.isfile(path) else 0


class _Tally:
    """Totals over all reports."""

    def __init__(self) -> None:
        self.files = self.good = self.partial = self.unreadable = 0
        self.codes: set[int] = set()
        self.errors = Errors()
        #: Skipped files in folders: their number by kind, and the names of the first few.
        self.over: Counter[str] = Counter()
        self.named: list[str] = []

    def add(self, item: _Answer | None, verdict: FileVerdict) -> None:
        partial = verdict.coverage != "complete"
        if verdict.verdict == PASSED_OVER:
            self.over[verdict.message] += 1
            if len(self.named) < _NAMED:
                self.named.append(os.path.basename(verdict.path))
            self.partial += partial
            return
        self.codes.add(verdict.code)
        error = item.error if item is not None else None
        if error is not None:
            self.errors.add(error)
            if os.path.isdir(verdict.path):
                return  # a folder without a checkpoint is not counted: its files are
        self.files += 1
        self.good += verdict.verdict == "valid"
        self.unreadable += error is not None
        self.partial += partial

    def write(self, several: bool, words: bool) -> None:
        """Write the errors to stderr; if ``words`` are wanted for ``several`` files, also the totals to stdout."""
        self.errors.say()
        if not words or not several or self.unreadable == self.files:
            return
        sums = f"{pluralize(self.files, 'file')}: {self.good:,} valid, {self.files - self.good:,} not"
        emit(f"\n{sums}; coverage " + (f"PARTIAL for {self.partial:,}" if self.partial else "COMPLETE"))
