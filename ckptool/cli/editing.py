"""What all commands that write do: open, edit, check, write, account."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import click

import ckptool

from ..base.errors import CkptoolError, OutputError, RefusedError
from ..base.text import human_bytes, join_limited, pluralize, undo_step
from ..checkpoint.changes import Change
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import EDITED
from ..files.archives import file_name
from ..files.sources import Files, FileSource
from ..files.write.output import check_folder, check_output
from ..formats.planning import companions, makes_folder
from ..saving import save, save_in_place
from .next_steps import retype
from .options import worst
from .render import clean, emit, emit_json, failure, say, say_error, say_problems, tell
from .streams import copying_bar, watched

#: Commands that leave mappings of low confidence alone.
_ON_STATE_DICTS = ("strip-module", "add-module", "rename")

#: Changes that are named one by one for people; JSON names all.
_SHOWN = 40


class Job(NamedTuple):
    """What one command does to each input.

    ``opener`` makes a checkpoint of a path, ``edit`` another one of that. ``more`` are fields of the report beside
    the usual ones, ``words`` the lines for people, ``code`` the exit code that a report stands for. ``inputs`` are
    other files that it reads, which must not be the output either; ``folder`` says whether the output of that name is
    one; ``called`` makes the name of an output in ``--out-dir`` of that of its input.
    """

    command: str
    edit: Callable[[Checkpoint], Checkpoint]
    opener: Callable[[str], Checkpoint] = ckptool.open
    more: Callable[[Checkpoint], dict[str, Any]] | None = None
    words: Callable[[dict[str, Any]], list[str]] | None = None
    code: Callable[[dict[str, Any]], int] | None = None
    inputs: tuple[str, ...] = ()
    folder: Callable[[Checkpoint, str], bool] = makes_folder
    called: Callable[[str], str] = str


def edit_all(
    job: Job,
    paths: tuple[str, ...],
    *,
    output: str | None,
    out_dir: str | None,
    force: bool,
    dry_run: bool,
    style: str,
    quiet: bool,
    no_progress: bool,
    in_place: bool = False,
    follow_links: bool = False,
) -> int:
    """Edit every input; each output is written, or each failure said, before the worst code is returned."""
    if in_place and (output is not None or out_dir is not None or force):
        raise click.UsageError("--in-place edits the file itself: -o, --out-dir and --force do not go with it.")
    targets: list[str | None] = [None] * len(paths) if in_place else _targets(job, paths, output, out_dir, dry_run)
    reports = []
    codes = []
    for path, target in zip(paths, targets):
        bar = not (quiet or no_progress) and watched()
        try:
            how = _How(force, dry_run, in_place, bar, follow_links)
            report = _edit_one(job, path, target, how)
        except CkptoolError as error:
            if len(paths) == 1:  # of several some are done
                retype(error, click.get_current_context().obj)
            say_error(error)
            codes.append(error.exit_code)
            reports.append(failure(job.command, path, error))
            continue
        codes.append(job.code(report) if job.code else 0)
        reports.append(report)
        if style == "table" and not quiet:
            emit("\n".join([_head(report), *(job.words or account)(report)]))
    if style != "table" and not quiet:
        emit_json(reports, style, len(paths) > 1)
    if len(paths) > 1 and not quiet and any(code > 1 for code in codes):
        done = sum(code < 2 for code in codes)
        say(f"{done:,} of {len(paths):,} done, {len(paths) - done:,} not")
    return worst(codes)


def _targets(
    job: Job, paths: tuple[str, ...], output: str | None, out_dir: str | None, dry_run: bool
) -> list[str | None]:
    if output is not None and out_dir is not None:
        raise click.UsageError("-o and --out-dir exclude each other.")
    if out_dir is not None:
        names = [job.called(file_name(path)) for path in paths]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise click.UsageError(f"Two inputs are called {clean(twice)!r}: their outputs would be one file.")
        if not dry_run:
            try:
                os.makedirs(out_dir, exist_ok=True)
            except OSError as error:
                what = "it is a file, not a folder" if os.path.isfile(out_dir) else error.strerror or str(error)
                raise OutputError(what, path=out_dir) from error
        return [os.path.join(out_dir, name) for name in names]
    if output is not None:
        if output == "-":
            raise click.UsageError("ckptool does not write to stdout: name a file.")
        if len(paths) > 1:
            raise click.UsageError("Several inputs need --out-dir DIR instead of -o.")
        return [output]
    if not dry_run:
        raise click.UsageError("Missing option '-o' / '--output': say where to write, or try --dry-run.")
    return [None] * len(paths)


class _How(NamedTuple):
    """What the options say of the output; ``bar`` whether progress is shown."""

    force: bool
    dry_run: bool
    in_place: bool
    bar: bool
    follow_links: bool


def _edit_one(job: Job, path: str, target: str | None, how: _How) -> dict[str, Any]:
    with job.opener(path) as checkpoint:
        if target is not None and (not how.dry_run or os.path.isdir(os.path.dirname(target) or os.curdir)):
            folder = job.folder(checkpoint, target)
            check = check_folder if folder else check_output
            check(target, checkpoint.sources, force=how.force)
            _refuse_inputs(job, target)
        if not job.code:
            say_problems(checkpoint)
        edited = job.edit(checkpoint)
        if target is not None and not edited.edited:
            _say_versions(checkpoint)
        outcome = _in_place(job, edited, how) if how.in_place else _to_file(edited, target, how)
        done = {change.path for change in edited.changes}
        low = [item.path for item in checkpoint.state_dicts if item.confidence == "low" and item.path not in done]
        return {
            "schema": f"ckptool.{job.command}/1",
            "path": path,
            "bytes": checkpoint.source.size,
            "dry_run": how.dry_run,
            "in_place": how.in_place,
            "changed": edited.edited,
            **outcome,
            "changes": [
                change._asdict()
                for change in (*edited.changes, *(c for tell in edited.deferred_changes for c in tell()))
            ],
            "modules": _modules(edited),
            "left_alone": low if job.command in _ON_STATE_DICTS else [],
            **(job.more(edited) if job.more else {}),
        }


def _modules(edited: Checkpoint) -> list[str]:
    """The first module where no state dict is left. Without this name there is none, and no survey is needed."""
    if "_modules" not in edited.graph.nodes or edited.state_dicts:
        return []
    return edited.survey.modules[:1]


def _say_versions(checkpoint: Checkpoint) -> None:
    """An output that is its input, byte for byte, holds what that was before edits in place, too."""
    from ..reports.findings import command

    for problem in checkpoint.container.problems:
        if problem.code == EDITED:
            say(f"note: {checkpoint.path}: {problem.message}, and the output has all of it")
            tell(f"  -> without it: {clean(command('repack', checkpoint.path, word='clean'))}")


def _to_file(edited: Checkpoint, target: str | None, how: _How) -> dict[str, Any]:
    """Write a new file, and say what came of it."""
    label = os.path.basename(target or "")
    with copying_bar(label, how.bar) as on_progress:
        saved = save(
            edited,
            target or "",
            force=how.force,
            follow_links=how.follow_links,
            dry_run=how.dry_run or target is None,
            on_progress=on_progress,
        )
    assert saved.plan is not None
    beside = companions(edited, saved.plan)
    others = {name: names for name, names in beside._asdict().items() if names}
    # Of the checkpoint, as of the input.
    size = saved.size
    if isinstance(saved.plan, Files):
        size -= sum(part.size for name, part in saved.plan.files if name in beside.copied)
    output = target if how.dry_run or target is None else saved.path
    return {"output": output, "output_bytes": size, "exact": saved.exact, **others}


def _in_place(job: Job, edited: Checkpoint, how: _How) -> dict[str, Any]:
    """Append the edit to its own file, and say what came of it."""
    saved = save_in_place(edited, command=job.command, dry_run=how.dry_run)
    source = edited.source
    assert isinstance(source, FileSource)
    outcome = {"output": saved.path, "output_bytes": saved.size, "exact": saved.exact}
    return outcome | {"names": source.links, "unused_bytes": saved.unused_bytes}


def _refuse_inputs(job: Job, target: str) -> None:
    for path in job.inputs:
        if os.path.exists(target) and os.path.exists(path) and os.path.samefile(target, path):
            raise RefusedError("the output is one of the inputs", path=target, next="write to another name")


def _head(report: dict[str, Any]) -> str:
    """From where to where, and how large."""
    if report["in_place"]:
        more = human_bytes(report["output_bytes"] - report["bytes"])
        if not report["changed"]:
            return f"{clean(report['path'])}: {human_bytes(report['bytes'])}"
        if report["dry_run"]:
            return f"{clean(report['path'])}: nothing is written, {more} would be appended in place"
        return f"{clean(report['path'])}: edited in place, {human_bytes(report['bytes'])} + {more}"
    if report["dry_run"]:
        size = human_bytes(report["output_bytes"])
        return f"{clean(report['path'])}: nothing is written, the output would be {size}"
    sizes = f"{human_bytes(report['bytes'])} -> {human_bytes(report['output_bytes'])}"
    return f"{clean(report['path'])} -> {clean(report['output'])}: {sizes}"


def _told(change: Change) -> list[str]:
    """One change; several remarks get a line each."""
    if len(change.notes) < 2:
        return [f"  {clean(change.words)}"]
    return [f"  {clean(change.head)}", *(f"    {clean(note)}" for note in change.notes)]


def account(report: dict[str, Any]) -> list[str]:
    """What was done, for people."""
    changes = report["changes"]
    lines = [line for change in changes[:_SHOWN] for line in _told(Change(**change))]
    if len(changes) > _SHOWN:
        lines.append(f"  and {pluralize(len(changes) - _SHOWN, 'more change')}: --format json")
    if not changes:
        lines.append(
            "  there is no state dict in it" if "module" in report["schema"] else "  there is no storage in it"
        )
    if not report["changed"]:
        what = "the file stays as it is" if report["in_place"] else "the output is the input, byte for byte"
        lines.append(f"  nothing to do: {what}")
        lines += [
            f"  note: it holds a pickled module at {clean(path or 'the root')}: its names are attributes, not keys"
            for path in report["modules"]
        ]
    if report.get("copied"):
        lines.append(f"  copied as they are: {clean(join_limited(report['copied']))}")
    if report.get("not_copied"):
        lines.append(f"  note: not copied: {clean(join_limited(report['not_copied']))}")
    if report.get("links"):
        lines.append(f"  note: links out of the folder, not followed: {clean(join_limited(report['links']))}")
        lines.append("  -> with what they lead to: --follow-links")
    if report["changed"] and not report["exact"]:
        lines.append("  note: a foreign pickle, written anew; it is equal as an object, not byte for byte")
    for path in report["left_alone"]:
        lines.append(f"  note: {clean(repr(path))} may be a state dict; it stays unless --key names it")
    if report["in_place"] and report["changed"]:
        lines += _ways_back(report)
    return lines


def _ways_back(report: dict[str, Any]) -> list[str]:
    """What an edit in place leaves in the file, and the commands that deal with it."""
    from ..reports.findings import command

    path = report["path"]
    lines = []
    if report["names"] > 1:
        lines.append(f"  note: the file has {report['names']:,} names (hard links): it changed under all of them")
    if report["unused_bytes"]:
        lines.append(f"  note: the {human_bytes(report['unused_bytes'])} of what was left out stay in the file")
    if not report["dry_run"]:
        lines.append(f"  -> take it back: {clean(undo_step(path))}")
        lines.append(f"  -> without the former version: {clean(command('repack', path, word='clean'))}")
    return lines
