"""``validate``: checkpoint files in CI."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import click

from ..checks.policy import Policy, policy_of
from ..errors import CkptoolError, TargetError, UnreadableError
from ..human import counted
from ..searching import Target, find_targets
from ..validating import check_policy, unreadable_report, validation_report
from .options import paths, worst
from .render import emit, emit_json, say_error, to_json
from .validation_formats import github_lines, junit, sarif, short_lines, table_lines

__all__ = ["validate"]

FORMATS = ("table", "json", "jsonl", "junit", "sarif", "github")

#: From so many bytes on reading them is felt.
_PROGRESS_FROM = 200_000_000

EPILOG = """\b
Examples:
  ckptool validate model.pth
  ckptool validate checkpoints/ --format junit > report.xml
  ckptool validate release.pth --layout bare --prefix none --device cpu --weights-only --finite
  ckptool validate release/ --policy ckptool.toml --format github
  ckptool validate model.pth --lock ckptool.lock.json
  ckptool validate model.pth --load --map-location cpu

\b
A policy file says the same as the options, in TOML:
  layout = "bare"
  prefix = "none"
  device = ["cpu"]
  dtype = ["float32", "bfloat16"]
  require = ["head.*"]
  max-bytes = "2GB"
  weights-only = true
  lock = "ckptool.lock.json"
"""


@click.command(epilog=EPILOG)
@paths
@click.option("--policy", "policy_file", type=click.Path(), metavar="FILE", help="Expectations from a TOML file.")
@click.option("--layout", type=click.Choice(("bare", "wrapped")), help="Expect this layout.")
@click.option("--prefix", metavar="none|TEXT", help="Expect no prefix, or one such as 'module.' on every key.")
@click.option("--device", multiple=True, metavar="TAG", help="Expect every storage on it; repeatable; cuda:*.")
@click.option("--dtype", multiple=True, metavar="DTYPE", help="Expect floating-point tensors of it; repeatable.")
@click.option("--require", multiple=True, metavar="KEYGLOB", help="Expect a key that matches; repeatable.")
@click.option("--forbid", multiple=True, metavar="KEYGLOB", help="Expect no key that matches; repeatable.")
@click.option("--max-bytes", metavar="SIZE", help="Expect the file to have no more: 4096, 500MB, 2GiB.")
@click.option("--weights-only", is_flag=True, help="Expect that torch.load(weights_only=True) takes it.")
@click.option("--torch", metavar="VERSION", help="The torch whose weights_only list counts.  [default: the newest]")
@click.option("--finite", is_flag=True, help="Read the values: expect no NaN and no Inf. Needs torch.")
@click.option("--load", is_flag=True, help="Really load it with torch.load(weights_only=True). Needs torch.")
@click.option("--map-location", metavar="SPEC", help="For --load: cpu, cuda:0, or cuda:1=cuda:0,cuda:2=cpu.")
@click.option("--lock", metavar="FILE", help="Expect what 'ckptool lock' wrote down: keys, shapes, dtypes, devices ...")
@click.option("--strict", is_flag=True, help="Warnings, and what could not be checked, count as failures.")
@click.option("--quick", is_flag=True, help="Leave out the checksums, which need every byte.")
@click.option("--jobs", type=click.IntRange(min=0), default=1, show_default=True, help="Files at once; 0: one a core.")
@click.option(
    "--format", "style", type=click.Choice(FORMATS), default="table", show_default=True, help="Output format."
)
@click.option("-v", "--verbose", is_flag=True, help="Every check and global, also for several files.")
@click.option("-q", "--quiet", is_flag=True, help="Print only what is not valid.")
@click.option("--no-progress", is_flag=True, help="No progress bar.")
def validate(
    paths: tuple[str, ...],
    policy_file: str | None,
    quick: bool,
    jobs: int,
    style: str,
    verbose: bool,
    quiet: bool,
    no_progress: bool,
    **options: Any,
) -> int:
    """Say whether checkpoints are whole, unambiguous, what loading them would call, and what a release expects.

    Takes files, folders (searched for checkpoints by content) and globs. Nothing in a file is run, and torch is
    imported for --load and --finite only. A file is valid although torch.load refuses it by default, with a
    warning: --weights-only or --strict demands more. JSON is an object for one named file, else a list.
    Exit 0: all valid; 1: one is not; 3: one is no checkpoint or cannot be read.
    """
    policy = _policy(policy_file, options)
    if options["map_location"] and not policy.load:
        raise click.UsageError("--map-location is for --load.")
    check_policy(policy)
    reports: list[dict[str, Any]] = []
    targets = list(_targets(paths, reports))
    codes = [3] * len(reports)
    if style in ("github", "jsonl"):
        for nothing in reports:
            for line in github_lines(nothing) if style == "github" else [to_json(nothing, None)]:
                emit(line)
    bar = style != "github" and not (quiet or no_progress) and sys.stderr.isatty()
    for report in _reports(targets, policy, quick, jobs, bar):
        reports.append(report)
        codes.append({"valid": 0, "invalid": 1, "unreadable": 3}[report["status"]])
        if style == "table" and not (quiet and report["valid"]):
            whole = verbose or len(targets) == 1
            emit("\n".join(table_lines(report, verbose) if whole else short_lines(report)))
        elif style == "github":
            for line in github_lines(report):
                emit(line)
        elif style == "jsonl":
            emit_json([report], style, False)
    if style == "json":
        emit_json(reports, style, [target.path for target in targets] != list(paths) or len(paths) != 1)
    elif style == "junit":
        emit(junit(reports))
    elif style == "sarif":
        emit(sarif(reports))
    _summary(reports, len(paths) > 1 or len(reports) != 1, codes, style, quiet)
    return worst(codes)


def _policy(path: str | None, options: dict[str, Any]) -> Policy:
    """The policy file, with the options on top."""
    values: dict[str, Any] = {}
    if path is not None:
        values = {key.replace("-", "_"): value for key, value in _toml(path).items()}
        policy_of(values, path)
        if "lock" in values:
            # Beside the policy that names it, from wherever that is used.
            values["lock"] = os.path.join(os.path.dirname(path), values["lock"])
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items() if value}
    return policy_of(values | given)


def _toml(path: str) -> dict[str, Any]:
    try:
        if sys.version_info >= (3, 11):
            import tomllib as toml
        else:
            import tomli as toml
    except ImportError:
        what = "reading a policy needs Python 3.11 or the package tomli"
        raise TargetError(what, path=path, next="pip install tomli, or give the expectations as options") from None
    try:
        with open(path, "rb") as file:
            return dict(toml.load(file))
    except OSError as error:
        raise TargetError(f"the policy cannot be read: {error.strerror}", path=path) from error
    except ValueError as error:
        raise TargetError(f"the policy is no TOML: {error}", path=path) from error


def _targets(paths: Sequence[str], nothing: list[dict[str, Any]]) -> Iterator[Target]:
    """The files behind the paths; ``nothing`` gets a report for each path without one."""
    for path in paths:
        try:
            found = list(find_targets([path]))
            if not found:
                raise UnreadableError("there is no checkpoint in this folder", path=path, next="name a file")
        except CkptoolError as error:
            nothing.append(unreadable_report(path, error))
            continue
        yield from found


def _reports(targets: Sequence[Target], policy: Policy, quick: bool, jobs: int, bar: bool) -> Iterator[dict[str, Any]]:
    """The reports in the order of the targets, each as soon as it and those before it are there."""
    names = list(dict.fromkeys(target.path for target in targets))
    jobs = min(jobs or os.cpu_count() or 1, len(names))
    if jobs > 1:
        yield from _parallel(names, partial(validation_report, policy=policy, quick=quick), jobs)
        return
    total = 0 if quick else sum(os.stat(name).st_size for name in names if os.path.isfile(name))
    shown = bar and total >= _PROGRESS_FROM
    with click.progressbar(length=total, label="validating", file=sys.stderr) if shown else nullcontext() as progress:
        for name in names:
            yield validation_report(name, policy, quick=quick, progress=progress.update if progress else None)


def _parallel(names: Sequence[str], check: partial[dict[str, Any]], jobs: int) -> Iterator[dict[str, Any]]:
    """One process a core: decoding is Python, which runs on one core of each."""
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(jobs, initializer=_worker) as pool:
        try:
            yield from pool.map(check, names)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _worker() -> None:
    """A signal is for the parent, which ends its workers."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)


def _summary(reports: Sequence[dict[str, Any]], several: bool, codes: Sequence[int], style: str, quiet: bool) -> None:
    for report in reports:
        if report["status"] == "unreadable":
            say_error(UnreadableError(report["error"], path=report["path"], next=report["next"]))
    if style != "table" or quiet or not several or all(report["status"] == "unreadable" for report in reports):
        return
    good = sum(report["valid"] for report in reports)
    partial_ones = sum(report["coverage"] == "partial" for report in reports)
    words = f"{counted(len(reports), 'file')}: {good:,} valid, {len(reports) - good:,} not"
    coverage = f"PARTIAL for {partial_ones:,}" if partial_ones else "COMPLETE"
    emit(f"\n{words}; coverage {coverage}")
