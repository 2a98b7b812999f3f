"""Run an edit on every input: open, edit, check, write, report."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from itertools import chain
from typing import Any, Final, TypeAlias, cast

import click

import ckptool

from ..base.addresses import is_remote
from ..base.errors import CkptoolError, OutputError, RefusedError
from ..base.findings import EDITED, RANK_SETS
from ..base.globs import MATCH_ALL, Globs
from ..base.records import NamedTuple
from ..base.steps import as_step
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.selection import dotted
from ..edits.convert import Conversion, refuse_key
from ..files.archives import file_name, file_of, refuse_address
from ..files.sources import FolderPlan, FolderSource
from ..formats.opening import open_checkpoint
from ..formats.planning import blaming_damage, companions
from ..saving import check_new, save, save_in_place
from .edit_report import ChangeReport, EditReport, OutputReport, UntrueReport, change_lines, edit_head
from .options import Workers, Writing
from .render import clean, say, say_problems, schema_of, tell_step
from .runner import Answer, FileCommand, Totals, failed, reported, run_each
from .terminal import copying_bar, watched

#: The checkpoints of the last input: freeing them takes time, and the program ends without that.
_KEPT: Final[list[object]] = []


#: A checkpoint, and the fields that a command adds to its report.
WithFields: TypeAlias = tuple[Checkpoint, Mapping[str, Any]]


def _opened(path: str) -> WithFields:
    return open_checkpoint(path), {}


class EditRequest(NamedTuple):
    """How a command edits each input: plain data that other processes can take.

    ``edit`` edits a checkpoint that ``opener`` opened. ``lines`` turns the report into lines for people, and ``code``
    into an exit code. ``inputs`` are other files that the command reads and must not overwrite. ``of_keys`` is true if
    the command edits keys; it then leaves state dicts of low confidence alone. ``keyed`` is true if --key chooses which
    part it edits. ``only`` holds the patterns that choose keys; each should match a key. ``step`` returns the next
    command for a report, or "". Each function is a module's own, or a ``partial`` of one with plain data.
    """

    command: str
    edit: Callable[[Checkpoint], WithFields]
    opener: Callable[[str], WithFields] = _opened
    lines: Callable[[Any], list[str]] = change_lines
    code: Callable[[Any], int] | None = None
    inputs: tuple[str, ...] = ()
    of_keys: bool = False
    keyed: bool = False
    only: Globs = MATCH_ALL
    step: Callable[[Any], str] | None = None


def edit_all(request: EditRequest, paths: tuple[str, ...], how: Writing) -> int:
    """Edit every input and return the worst exit code. An input that fails does not stop the others."""
    if how.in_place and (how.output is not None or how.out_dir is not None):
        raise click.UsageError("--in-place edits the file itself: -o and --out-dir do not go with it.")
    if how.in_place and how.conversion != Conversion():
        raise click.UsageError("--in-place keeps the format of the file: name another output with -o.")
    if how.reclaim and not how.in_place:
        raise click.UsageError("--reclaim is for --in-place: a new file has no dropped bytes.")
    if how.output is not None and len(paths) > 1:
        from ..formats.checkpoint_search import as_one  # only several files need it

        paths = as_one(paths)
    targets = [None] * len(paths) if how.in_place else _targets(request, paths, how)
    style = "quiet" if how.quiet else how.style
    here = len(paths) == 1 or how.working.alone or how.in_place or how.dry_run
    workers, how = (Workers(), how) if here else (how.working, how._replace(working=Workers()))
    work = partial(_edited if here else _elsewhere, request, dict(zip(paths, targets)), how, style)
    try:
        return run_each(
            FileCommand(request.command, style, work), paths, workers, finish=partial(_end, how.quiet, len(paths))
        )
    except BaseException:
        if not here:
            _remove_unfinished(targets)
        raise


def _end(quiet: bool, inputs: int, totals: Totals) -> int:
    totals.errors.close()
    done = sum(count for code, count in totals.codes.items() if code < 2)
    if done < inputs > 1 and not quiet:
        say(f"{done:,} of {inputs:,} done, {inputs - done:,} not")
    return totals.code()


def _edited(request: EditRequest, places: Mapping[str, str | None], how: Writing, style: str, path: str) -> Answer:
    report = _edit_one(request, path, how, places[path])
    code = request.code(report) if request.code else 0
    return reported(report, style, lambda report: [edit_head(report), *request.lines(report)], code)


def _elsewhere(request: EditRequest, places: Mapping[str, str | None], how: Writing, style: str, path: str) -> Answer:
    """Edit an input in a worker process, whose lines for stderr become remarks."""
    with redirect_stderr(StringIO()) as said:
        try:
            answer = _edited(request, places, how, style, path)
        except CkptoolError as error:
            answer = failed(request.command, style, path, error)
    return answer._replace(remarks=tuple(said.getvalue().splitlines()))


def _targets(request: EditRequest, paths: tuple[str, ...], how: Writing) -> Sequence[str | None]:
    output, out_dir = how.output, how.out_dir
    if output is not None and out_dir is not None:
        raise click.UsageError("-o and --out-dir exclude each other.")
    if out_dir is not None:
        names = [how.conversion.called(file_name(path)) for path in paths]
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise click.UsageError(f"Two inputs are called {clean(twice)!r}: their outputs would be one file.")
        refuse_address(out_dir)
        if not how.dry_run:
            make_folder(out_dir)
        return [os.path.join(out_dir, name) for name in names]
    if output is not None:
        if output == "-":
            raise click.UsageError("ckptool does not write to stdout: name a file.")
        if len(paths) > 1:
            raise click.UsageError("Several inputs need --out-dir DIR instead of -o.")
        return [output]
    if not how.dry_run:
        context = click.get_current_context()
        on_disk = "in_place" in context.params and not any(map(is_remote, paths))
        itself = ", edit the file itself with --in-place," if on_disk else ","
        raise click.UsageError(f"Missing option '-o' / '--output': say where to write{itself} or try --dry-run.")
    return [None] * len(paths)


def make_folder(path: str) -> None:
    """Create the folder of several outputs; raise OutputError if that is not possible."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        what = "it is a file, not a folder" if os.path.isfile(path) else error.strerror or str(error)
        raise OutputError(what, path=path) from error


def _edit_one(request: EditRequest, path: str, how: Writing, target: str | None) -> EditReport:
    _KEPT.clear()
    checkpoint, opened_fields = request.opener(path)
    with checkpoint:
        place = target or ""
        in_folder = not how.dry_run or is_remote(place) or os.path.isdir(os.path.dirname(place) or os.curdir)
        if target is not None and in_folder:
            folder = how.conversion.makes_folder(checkpoint, target)
            check_new(target, checkpoint.sources, folder=folder, force=how.force)
        if target is not None:
            _refuse_inputs(request, target)
        if not request.code:
            say_problems(checkpoint)
        for problem in checkpoint.container.problems:
            if problem.code == RANK_SETS:
                say(f"note: {checkpoint.path}: {problem.message}")
        with blaming_damage(checkpoint):
            edited, fields = request.edit(checkpoint)
            if how.in_place:
                refuse_key(checkpoint, None if request.keyed else how.key)
            else:
                edited = how.conversion.applied(edited, target or "", how.key, edited=request.keyed)
                how.conversion.refuse_part(edited, target)
        if target is not None and not edited.edited:
            _say_versions(checkpoint)
        untrue = _untrue(edited)
        if how.update_config:
            edited = ckptool.update_config(edited)
        _say_unmatched(request.only, checkpoint, edited)
        _KEPT.extend((checkpoint, edited))
        low = [item.path for item in checkpoint.state_dicts if request.of_keys and item.confidence == "low"]
        checkpoint.forget_survey()  # the output needs this memory
        outcome = _in_place(request, edited, how) if how.in_place else _to_file(edited, target, how)
        stays = "config.json" in outcome.get("copied", ())
        done = {change.path for change in edited.changes}
        changes = chain(edited.changes, *(deferred() for deferred in edited.deferred_changes))
        report: EditReport = {
            "schema": schema_of(request.command),
            "path": checkpoint.path,
            "bytes": checkpoint.source.size,
            "dry_run": how.dry_run,
            "in_place": how.in_place,
            "changed": edited.edited or bool(edited.companions),
            **outcome,
            "changes": [cast("ChangeReport", change.in_shell._asdict()) for change in changes],
            "pickled_modules": _modules(edited),
            "next": _module_step(edited),
            "left_alone": [path for path in low if path not in done],
        }
        if how.update_config or stays:
            report["config"], report["config_updated"] = untrue, how.update_config
        full = cast("EditReport", {**report, **opened_fields, **fields})
        if request.step is not None:
            full["next"] = request.step(full) or full["next"]
        return full


def _untrue(edited: Checkpoint) -> list[UntrueReport]:
    if not isinstance(edited.source, FolderSource) or not edited.edited:
        return []
    from ..edits.model_config import untrue_fields

    return [{"field": item.field, "old": item.old, "new": item.new} for item in untrue_fields(edited)]


def _say_unmatched(only: Globs, *checkpoints: Checkpoint) -> None:
    """Name the included patterns that match no key before or after the edit, and suggest similar keys."""
    names: list[tuple[str, str]] = []
    for survey in [checkpoint.survey for checkpoint in checkpoints if only.include]:
        names += [(tensor.key, tensor.path) for tensor in survey.tensors]
        names += [(entry.key, entry.path) for entry in survey.entries]
    for pattern in only.include:
        glob = dotted(Globs([pattern]), *checkpoints)
        if not any(glob.match(*pair) for pair in names):
            from ..base.nearest import did_you_mean

            near = did_you_mean(pattern, [key for key, _ in names], [path for _, path in names])
            say(f"{checkpoints[0].path}: no key matches {pattern!r}{near}")


def _modules(edited: Checkpoint) -> list[str]:
    """Return the path of the first pickled module in a list if no state dict is left, otherwise []."""
    # A graph without the name "_modules" has no module; this saves the survey.
    if "_modules" not in edited.graph.nodes or edited.state_dicts:
        return []
    return edited.survey.modules[:1]


def _module_step(edited: Checkpoint) -> str:
    if not _modules(edited):
        return ""
    from ..edits.sanitize.sanitizer import loadable_step

    return as_step(loadable_step(edited)).line


def _say_versions(checkpoint: Checkpoint) -> None:
    from ..reports.edit_steps import edit_step

    for problem in checkpoint.container.problems:
        if problem.code == EDITED:
            say(f"note: {checkpoint.path}: {problem.message}, and the output contains all of it; without it")
            tell_step(edit_step("edit", checkpoint.path, word="clean", repack=True))


def _to_file(edited: Checkpoint, target: str | None, how: Writing) -> OutputReport:
    shown = not how.quiet and watched()
    with copying_bar(os.path.basename(target or ""), shown) as on_progress:
        saved = save(
            edited,
            target or "",
            force=how.force,
            follow_links=how.follow_links,
            dry_run=how.dry_run or target is None,
            on_progress=on_progress,
            workers=None if how.working.alone else how.working.open,
        )
    assert saved.plan is not None
    beside = companions(edited, saved.plan)
    # Leave out the files copied along with a checkpoint, because the size of the input excludes them too.
    size = saved.size
    if isinstance(saved.plan, FolderPlan):
        size -= sum(part.size for name, part in saved.plan.files if name in beside.copied)
    output = target if how.dry_run or target is None else saved.path
    report: OutputReport = {"output": output, "output_bytes": size, "exact": saved.exact}
    if beside.copied:
        report["copied"] = beside.copied
    left = tuple(name for name in beside.not_copied if name != os.path.basename(output or "") or how.dry_run)
    if left:
        report["not_copied"] = left
    if beside.links:
        report["links"] = beside.links
    if saved.shortage:
        report["shortage"] = saved.shortage
    if saved.traffic:
        report["traffic"] = saved.traffic._asdict()
    return report


def _remove_unfinished(targets: Sequence[str | None]) -> None:
    from ..files.write.output import remove_leftovers

    for target in targets:
        if target is not None:
            remove_leftovers(*os.path.split(os.path.realpath(target)))


def _in_place(request: EditRequest, edited: Checkpoint, how: Writing) -> OutputReport:
    saved = save_in_place(edited, command=request.command, reclaim=how.reclaim, force=how.force, dry_run=how.dry_run)
    source = edited.source.local_file()
    assert source is not None
    report: OutputReport = {
        "output": saved.path,
        "output_bytes": saved.size,
        "exact": saved.exact,
        "names": source.links,
        "unused_bytes": saved.unused_bytes,
    }
    if saved.shortage:
        report["shortage"] = saved.shortage
    if how.reclaim:
        report["reclaimed"] = saved.reclaimed
    if saved.journal:
        report["journal"] = saved.journal
    return report


def _refuse_inputs(request: EditRequest, target: str) -> None:
    for path in request.inputs:
        file = file_of(path)
        if os.path.exists(target) and os.path.exists(file) and os.path.samefile(target, file):
            raise RefusedError("the output is one of the inputs", path=target, next="write to another name")
