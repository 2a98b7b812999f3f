"""The command validate: checks of checkpoint files, in CI."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
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
    checkpoints_within,
    find_files,
    is_folder_of_checkpoints,
    names_one_file,
)
from ..reports.expectations import Policy
from ..reports.scan import passed_over_words, scan_file
from ..reports.validate import (
    ValidateReport,
    check_policy,
    missing_report,
    passed_over_report,
    unreadable_report,
    validation_report,
)
from ..safety.torch_lists import NEWEST
from ..safety.verdict import UNSAFE
from .jobs import FolderFile, answers, engine_options
from .options import (
    InputPath,
    exclude_option,
    format_option,
    include_option,
    paths,
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

FORMATS = ("table", "json", "jsonl", "junit", "sarif", "github")
#: Formats made of all reports together.
_WHOLE: Final = {"junit": junit, "sarif": sarif}
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
@paths
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
@engine_options
@format_option(FORMATS)
@click.option("-v", "--verbose", is_flag=True, help="Show every check and global, even for several files.")
@click.option("-q", "--quiet", is_flag=True, help="Print only what is not valid.")
@progress_option
def validate(
    paths: tuple[str, ...],
    policy_file: str | None,
    no_policy: bool,
    quick: bool,
    working: Working,
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
    one = names_one_file(paths)
    tally = _Tally()
    seen: list[str] = []
    files = _noted(_files(paths), seen)
    bar = not (quick or quiet or no_progress or style == "github") and watched()
    files = iter(list(files)) if bar else files  # a bar needs the total
    first = list(islice(files, 2))
    how = _How(style, verbose or len(first) < 2, verbose, quiet)
    work = partial(_validated, how=how, policies=policies, quick=quick)
    reports = Reports(style, not one)
    whole: list[ValidateReport] = []
    summary = os.environ.get("GITHUB_STEP_SUMMARY", "") if style == "github" else ""
    with closing(_answers(work, chain(first, files), working, how, bar)) as results:
        for item in chain(results, _missing(policy, seen, how)):
            tally.add(item)
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
    tally.write(len(paths) > 1 or tally.files != 1, style == "table" and not quiet)
    over = passed_over_words(tally.over)
    if over and style == "github":
        emit(f"::notice title=ckptool::{clean(over)}: {clean(join_limited(tally.named))}")
    elif over and not quiet and style not in ("json", "jsonl", *_WHOLE):
        emit(f"{over}: {clean(join_limited(tally.named))}")
    return worst(tally.codes)


def _files(paths: Sequence[str]) -> Iterator[str | UnreadableError]:
    """Yield the checkpoints for the paths, those in archives of their folders, and all other files of the folders.

    A program that is given a folder may load any of them.
    """
    for item in find_files(paths):
        if isinstance(item, UnreadableError):
            yield item
            continue
        inside = [] if isinstance(item, SkippedFile) or item.named else checkpoints_within(item.path)
        yield from inside
        yield FolderFile(item.path) if inside or isinstance(item, SkippedFile) else item.path


def _write_summary(path: str, reports: Sequence[ValidateReport]) -> None:
    """Append to the summary of a job of GitHub; the answer stands if that is not possible."""
    from ..files.write.output import append_text

    try:
        append_text(path, github_summary(reports))
    except OutputError as error:
        say_error(error)


def _noted(files: Iterable[str | UnreadableError], seen: list[str]) -> Iterator[str | UnreadableError]:
    """Yield the files, and note their paths in ``seen``."""
    for file in files:
        seen.append(file if isinstance(file, str) else file.path)
        yield file


def _missing(policy: Policy, seen: list[str], how: _How) -> Iterator[_Answer]:
    """Yield an answer for each file that the lock of a folder names, and that was not among the files ``seen``."""
    for lock in dict.fromkeys(item.lock for item in (policy, *policy.also) if item.lock and policy.roots):
        from ..reports.comparing.lock import read_lock

        for path in read_lock(lock).missing(seen, policy.roots):
            yield _answer(missing_report(path, policy), how)


class _How(NamedTuple):
    """How to print a report: its format, whether in full, with every detail, or only if it is bad."""

    style: str
    full: bool
    verbose: bool
    quiet: bool


class _Answer(NamedTuple):
    """The part of a report that is kept: its text, and what the summary needs."""

    text: str
    status: str
    complete: bool
    error: UnreadableError | None
    report: ValidateReport | None
    over: str = ""
    path: str = ""


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
    over = _kind(report) if report["status"] == "passed over" else ""
    return _Answer(text, report["status"], report["coverage"] == "complete", error, whole, over, report["path"])


def _kind(report: ValidateReport) -> str:
    """Return what a file is that was passed over: "image", or "unread file" where it was not looked into."""
    check = report["checks"][0]
    if check["status"] != "pass":
        return "unread file"
    return "other file" if report["safety"] is not None else check["message"]


def _answers(
    work: partial[_Answer], files: Iterable[str | UnreadableError], working: Working, how: _How, bar: bool
) -> Generator[_Answer, None, None]:
    """Yield the answers; with a bar that moves while a file is read or, with several jobs, after each file.

    If the answers appear on the terminal one by one, each large file has a bar of its own.
    """

    def lost(path: str, error: CkptoolError) -> _Answer:
        answer = _answer(unreadable_report(path, error), how)
        # A folder without a checkpoint is an error on stderr only.
        return answer if how.style != "table" or os.path.isfile(file_of(path)) else answer._replace(text="")

    if not bar:
        yield from answers(work, files, working, lost)
        return
    items = list(files)
    sizes = [os.stat(file).st_size if isinstance(file, str) and os.path.isfile(file) else 0 for file in items]
    if working.alone and how.style in ("table", "jsonl") and on_terminal():
        for file, size in zip(items, sizes):
            with progress_bar(size, os.path.basename(str(file))) as progress:
                answer = work(file, progress=progress) if isinstance(file, str) else lost(file.path, file)
            yield answer
        return
    with progress_bar(sum(sizes), "validating", working.alone or not on_terminal()) as progress:
        if working.alone:
            yield from answers(partial(work, progress=progress), items, working, lost)
            return
        for answer, size in zip(answers(work, items, working, lost), sizes):
            if progress:
                progress(size)
            yield answer


class _Tally:
    """The sums over all reports."""

    def __init__(self) -> None:
        self.files = self.good = self.partial = self.unreadable = 0
        self.codes: set[int] = set()
        self.errors: list[UnreadableError] = []
        #: Files of folders that were passed over, by their kinds.
        self.over: Counter[str] = Counter()
        self.named: list[str] = []

    def add(self, item: _Answer) -> None:
        if item.over:
            self.over[item.over] += 1
            self.named.append(os.path.basename(item.path))
            self.partial += not item.complete
            return
        self.codes.add(_CODES[item.status])
        self.errors += [item.error] if item.error is not None else []
        if item.error is not None and os.path.isdir(item.path):
            return  # a folder without a checkpoint: its files are counted
        self.files += 1
        self.good += item.status == "valid"
        self.partial += not item.complete
        self.unreadable += item.error is not None

    def write(self, several: bool, words: bool) -> None:
        """Write the errors to stderr, and for ``several`` files the sums to stdout if ``words`` are wanted."""
        for error in self.errors:
            say_error(error)
        if not words or not several or self.unreadable == self.files:
            return
        sums = f"{pluralize(self.files, 'file')}: {self.good:,} valid, {self.files - self.good:,} not"
        emit(f"\n{sums}; coverage " + (f"PARTIAL for {self.partial:,}" if self.partial else "COMPLETE"))
