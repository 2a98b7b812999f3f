"""The validate command: check checkpoint files, for CI.

A policy file is TOML, with sections for files by glob. --policy names one, or ckptool finds it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, Final

import click

from ..base import toml
from ..base.addresses import is_folder, is_remote
from ..base.engines import Precomputed
from ..base.errors import CkptoolError, MalformedError, TargetError, UnreadableError, refuse_remote
from ..base.globs import Glob
from ..base.records import NamedTuple
from ..base.steps import Line, as_step
from ..base.text import join_limited, pluralize, quoted
from ..files.archives import beside, file_of, read_bytes
from ..files.sources import open_source
from ..formats.checkpoint_search import (
    Candidate,
    SkippedFile,
    as_one,
    checkpoints_within,
    find_files,
    is_folder_of_checkpoints,
)
from ..reports.expectations import Policy, all_of, policy_of
from ..reports.file_rows import PASSED_OVER, UNREADABLE, FileVerdict
from ..reports.scan import passed_over_words, scan_file
from ..reports.validate import (
    ValidateReport,
    check_policy,
    missing_report,
    passed_over_report,
    unreadable_report,
    validation_report,
)
from ..safety.rules import UNSAFE
from ..safety.torch_lists import DEFAULT
from .help import GroupedCommand
from .inputs import FolderFile, Inputs, input_options
from .options import (
    InputPath,
    Workers,
    completed,
    exclude_option,
    format_option,
    include_option,
    repeatable,
    strict_option,
)
from .render import clean, emit
from .runner import KEPT, ROWS, WHOLE, Answer, ErrorLog, FileCommand, FileItem, Totals, report_text, run
from .terminal import on_terminal, progress_bar, watched, work_size
from .validation_formats import github_lines, is_notable, junit, sarif, short_lines, table_lines

FORMATS = ("table", "json", "jsonl", ROWS, "junit", "sarif", "github")
#: Formats that need all reports at once.
_WHOLE: Final = {"junit": junit, "sarif": sarif}
_CODES: Final = {"skipped": 0, "valid": 0, "invalid": 1, "unreadable": 3}


@click.command(cls=GroupedCommand)
@click.option("--policy", "policy_file", type=InputPath(), metavar="FILE", help="Read expectations from a TOML file.")
@click.option("--no-policy", is_flag=True, help="Ignore ckptool.toml and [tool.ckptool] in pyproject.toml.")
@click.option("--layout", type=click.Choice(("bare", "wrapped")), help="Expect this layout.")
@click.option("--prefix", metavar="none|PREFIX", help="Expect no prefix, or this one on every key.")
@repeatable("--device", metavar="TAG", help="Expect every storage on this device")
@repeatable("--dtype", metavar="DTYPE", help="Expect this floating-point dtype", shell_complete=completed("words"))
@repeatable("--require", metavar="GLOB", help="Expect a matching key")
@repeatable("--forbid", metavar="GLOB", help="Expect no matching key")
@include_option
@exclude_option
@click.option("--max-bytes", metavar="SIZE", help="Expect the file to be no larger: 4096, 500MB, 2GiB.")
@click.option("--weights-only", is_flag=True, help="Expect torch.load(weights_only=True) to take it.")
@click.option("--safe", is_flag=True, help="Expect the verdict weights-only of scan.")
@click.option(
    "--torch", metavar="VERSION", help="The torch version whose weights_only list applies.  [default: installed]"
)
@click.option("--finite", is_flag=True, help="Expect no NaN and no Inf; needs torch.")
@click.option("--load", is_flag=True, help="Also load it with torch, weights_only=True.")
@click.option("--map-location", metavar="SPEC", help="For --load: cpu, cuda:0, or cuda:1=cuda:0,cuda:2=cpu.")
@click.option("--lock", type=InputPath(), metavar="FILE", help="Expect what 'ckptool lock' recorded.")
@strict_option
@click.option("--quick", is_flag=True, help="Skip the checksums, which read every byte.")
@input_options
@format_option(FORMATS)
@click.option("-v", "--verbose", is_flag=True, help="List every file and check.")
@click.option("-q", "--quiet", is_flag=True, help="Print invalid files only.")
def validate(
    inputs: Inputs,
    policy_file: str | None,
    no_policy: bool,
    quick: bool,
    working: Workers,
    style: str,
    verbose: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Check that checkpoints are whole and unambiguous, what loading them would call, and what a release expects.

    Nothing in a file is run. A file that torch.load refuses by default is valid, with a warning: --weights-only or
    --strict demand more. --include and --exclude choose the keys and entries that --prefix, --dtype, --require,
    --forbid, --finite and --lock look at. For a folder, only the files that have a problem are listed; -v lists all.
    Exit 0: all are valid; 1: one is not; 3: one is not a checkpoint or cannot be read.
    """
    inputs = inputs._replace(paths=as_one(inputs.paths))
    policies = policy_set(policy_file, options, not no_policy)
    policy = policies.policy._replace(roots=tuple(path for path in inputs.paths if is_folder_of_checkpoints(path)))
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
    given = inputs.files(_files)
    first = list(islice(given, 2))
    shown = frozenset(inputs.paths)
    how = _How(style, verbose or len(first) < 2, verbose, quiet, style in _WHOLE, shown)
    every = chain(first, given)
    files: Iterator[FileItem] = _with_missing(every, policy, how) if locks and inputs.whole else every
    label = "" if quick or quiet or style == "github" or not watched() else "validating"
    each_written = style in ("table", "jsonl", ROWS) and on_terminal()
    own_bar = bool(label) and working.alone and (len(first) < 2 or each_written)
    work = partial(_validated, how=how, policies=policies, quick=quick, own_bar=own_bar)
    return run(
        FileCommand("validate", WHOLE if style in _WHOLE else style, work, partial(_lost, how)),
        inputs,
        files,
        working,
        bar="" if own_bar else label,
        errors=ErrorLog(KEPT),
        finish=partial(_end, inputs, how),
    )


def _files(paths: Sequence[str]) -> Iterator[str | UnreadableError]:
    """Yield the checkpoints, also in archives, then all other files of the folders: a program may load any of them."""
    for item in find_files(paths):
        if isinstance(item, UnreadableError):
            yield item
            continue
        inside = checkpoints_within(item.path) if isinstance(item, Candidate) and item.archive else []
        yield from inside
        yield FolderFile(item.path) if inside or isinstance(item, SkippedFile) else item.path


def _with_missing(files: Iterable[str | UnreadableError], policy: Policy, how: _How) -> Iterator[FileItem]:
    """Yield the files, then an answer for each further file that the lock of a folder names."""
    seen: list[str] = []
    for file in files:
        seen.append(file if isinstance(file, str) else file.path)
        yield file
    for lock in dict.fromkeys(item.lock for item in (policy, *policy.also) if item.lock and policy.roots):
        from ..reports.comparing.lock import read_lock

        for path in read_lock(lock).missing(seen, policy.roots):
            yield Precomputed(_answer(missing_report(path, policy), how)._replace(has_row=False))


class _How(NamedTuple):
    """How to print a report: its format, in full or short, with every detail, or only if the file is not valid.

    ``keep``: the end of the command needs the report. Other files than those in ``shown`` get no line if there is
    nothing to say but that they are valid.
    """

    style: str
    full: bool
    verbose: bool
    quiet: bool
    keep: bool
    shown: Collection[str]

    def says(self, report: ValidateReport) -> bool:
        """Return whether a report is printed."""
        if report["valid"] and self.quiet:
            return False
        listed = self.full or report["path"] in self.shown
        return listed or not report["valid"] or any(map(is_notable, report["checks"]))


def _validated(path: str, *, how: _How, policies: PolicySet, quick: bool, own_bar: bool) -> Answer:
    policy = policies.of(path)
    if isinstance(path, FolderFile):
        scan = scan_file(path, policy.torch or DEFAULT)
        if scan["verdict"] != UNSAFE:
            return _answer(passed_over_report(scan, policy), how)
    with progress_bar(work_size(path) if own_bar else 0, os.path.basename(path), own_bar) as progress:
        return _answer(validation_report(path, policy, quick=quick, progress=progress), how)


def _lost(how: _How, path: str, error: CkptoolError) -> Answer:
    answer = _answer(unreadable_report(path, error), how)
    # A folder without a checkpoint gets an error on stderr, but no line in the table.
    return answer if how.style != "table" or os.path.isfile(file_of(path)) else answer._replace(text="")


def _answer(report: ValidateReport, how: _How) -> Answer:
    path, text = report["path"], report_text(report, how.style)
    if report["status"] == PASSED_OVER:
        text = f"{clean(path)}: skipped ({_kind(report)})" if how.style == "table" and how.verbose else text
    elif how.style == "github":
        text = "\n".join(github_lines(report))
    elif how.style == "table" and how.says(report):
        text = "\n".join(table_lines(report, how.verbose) if how.full else short_lines(report))
    answer = Answer(_verdict(report), text, data=report if how.keep else None)
    if report["status"] != UNREADABLE:
        return answer
    error = UnreadableError(report["error"] or "", path=path, next=Line(report["next"]))
    # A folder without a checkpoint is not counted: its files are.
    return answer._replace(errors=(error,), parts=() if is_folder(path) else None)


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


def _end(inputs: Inputs, how: _How, totals: Totals) -> int:
    """Write the reports of a format that needs them all, errors, totals, and the skipped files."""
    style = how.style
    if style in _WHOLE:
        emit(_WHOLE[style](totals.data))
    totals.errors.close()
    good, files = totals.words["valid"], totals.words.total() - totals.words[PASSED_OVER]
    several = (len(inputs.paths) != 1 or files != 1) and totals.words[UNREADABLE] != files
    if several and style == "table" and not how.quiet:
        coverage = f"PARTIAL for {totals.partial:,}" if totals.partial else "COMPLETE"
        emit(f"{pluralize(files, 'file')}: {good:,} valid, {files - good:,} not; coverage {coverage}")
    over = passed_over_words(dict(totals.skipped))
    named = clean(join_limited(totals.named, totals.skipped.total()))
    if over and style == "github":
        emit(f"::notice title=ckptool::{clean(over)}: {named}")
    elif over and style == "table" and not how.quiet:
        emit(f"{over}: {named}")
    return totals.code()


# -- policy files

#: The policy files that ckptool finds by itself; in pyproject.toml the policy is the table [tool.ckptool].
_NAME: Final = "ckptool.toml"
_PROJECT: Final = "pyproject.toml"
#: The largest accepted policy file, in bytes. A policy is written by hand and much smaller.
_MAX_BYTES: Final = 1 << 20
#: Keys allowed only in a policy that --policy names: they may loosen the checks, or load files for real.
_NAMED_ONLY: Final = ("torch", "load", "map_location")


class PolicySet(NamedTuple):
    """The expectations for all files, and the additional ones for files that match a glob.

    ``path`` is the file in which ckptool found the policy, or "" if --policy named it or it came from options.
    Globs match paths relative to ``folder``, and an address or what follows any of its slashes.
    """

    path: str
    folder: str
    policy: Policy
    sections: tuple[tuple[Glob, Policy], ...] = ()

    @property
    def every(self) -> tuple[Policy, ...]:
        """All policies of the set: the general one and the one of each section."""
        return tuple(item for policy in (self.policy, *(item for _, item in self.sections)) for item in policy.each)

    def of(self, path: str) -> Policy:
        """Return the combined expectations for the file at ``path``."""
        if is_remote(path):
            parts = path.split("/")
            names = [path, *("/".join(parts[at:]) for at in range(2, len(parts)))]
        else:
            names = [os.path.relpath(_absolute(path), self.folder).replace(os.sep, "/")]
        return all_of(self.policy, *(policy for glob, policy in self.sections if any(map(glob.matches, names))))


def policy_set(path: str | None, options: Mapping[str, Any], search: bool) -> PolicySet:
    """Return the policy of the file ``path``, with the options overriding its values.

    Without a path, return the policy of the options; if ``search``, add the policy file found for the working folder.
    """
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items() if value}
    if path is not None:
        values = _toml(path)
        base, sections = _split(values, path)
        policy_of(base, path)
        policy = policy_of({key.replace("-", "_"): value for key, value in base.items()} | given)
        return PolicySet("", os.path.dirname(_absolute(path)), policy, sections)
    policy, found = policy_of(given), _found() if search else None
    if found is None:
        return PolicySet("", os.getcwd(), policy)
    return found._replace(policy=all_of(policy, found.policy)._replace(source=found.path))


def _split(values: Mapping[str, Any], path: str) -> tuple[dict[str, Any], tuple[tuple[Glob, Policy], ...]]:
    """Return the keys for all files, and the policies of the sections. Make locks relative to the policy file."""

    def placed(table: Mapping[str, Any]) -> dict[str, Any]:
        lock = table.get("lock")
        return {**table, "lock": beside(path, lock)} if isinstance(lock, str) else dict(table)

    files = values.get("files", {})
    if not isinstance(files, dict) or not all(isinstance(table, dict) for table in files.values()):
        raise TargetError("'files' is not a table of tables", path=path, next='write [files."detector/*.pth"]')
    sections = tuple((Glob(pattern), policy_of(placed(table), path)) for pattern, table in files.items())
    return placed({key: value for key, value in values.items() if key != "files"}), sections


def _found() -> PolicySet | None:
    """Return the policy nearest to the working folder, searched up to the root of its repository, or None."""
    for folder in _folders():
        for name in (_NAME, _PROJECT):
            path = os.path.join(folder, name)
            if not os.path.isfile(path):
                continue
            shown = os.path.relpath(path)
            try:
                values = _toml(path) if name == _NAME else _project_table(path)
                if values is None:
                    continue
                base, sections = _split(values, path)
                for table in (base, *values.get("files", {}).values()):
                    _check_adds(table)
                policies = PolicySet(shown, folder, policy_of(base), sections)
                for lock in filter(None, (item.lock for item in policies.every)):
                    _check_file(lock)
                return policies
            except TargetError as error:
                error.path = shown
                error.step = error.step if error.next else as_step("mend it, or leave it aside with --no-policy")
                raise
    return None


def _folders() -> list[str]:
    """Return the working folder and its parents up to the one with .git; without .git, only the working folder."""
    folder = os.getcwd()
    folders = [folder]
    while not os.path.exists(os.path.join(folder, ".git")):
        folder, before = os.path.dirname(folder), folder
        if folder == before:
            return folders[:1]
        folders.append(folder)
    return folders


def _check_adds(table: Mapping[str, Any]) -> None:
    """Raise TargetError if a policy that ckptool found by itself contains a key that could loosen the checks."""
    for key, value in table.items():
        if key.replace("-", "_") in _NAMED_ONLY or value is False:
            what = f"a policy that is found can only add requirements, and has {key!r}"
            raise TargetError(what, next="name it with --policy, or leave it aside with --no-policy")


def _check_file(lock: str) -> None:
    """Raise TargetError if the lock of a found policy is no regular file; that of --policy may be a descriptor."""
    try:
        refuse_remote(lock)
        open_source(file_of(lock)).close()
    except UnreadableError as error:
        raise TargetError(f"the lock {quoted(lock)} cannot be read: {error.what}", next=error.step) from error


def _project_table(path: str) -> dict[str, Any] | None:
    if b"ckptool" not in _content(path):
        return None
    table = _toml(path).get("tool", {})
    table = table.get("ckptool") if isinstance(table, dict) else None
    return table if isinstance(table, dict) else None


def _toml(path: str) -> dict[str, Any]:
    try:
        return toml.parsed(_content(path), path, "the policy")
    except MalformedError as error:
        raise TargetError(error.what, path=path) from error


def _content(path: str) -> bytes:
    try:
        return read_bytes(path, _MAX_BYTES)
    except UnreadableError as error:
        step = error.step or "a policy is a TOML file of expectations, such as: weights-only = true"
        raise TargetError(f"the policy cannot be read: {error.what}", path=path, next=step) from error


def _absolute(path: str) -> str:
    """Return the absolute path without resolving links, so that a link is matched by its own name."""
    return os.path.normpath(os.path.join(os.getcwd(), path))
