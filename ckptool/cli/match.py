"""``match``: what would load, what would not, and the edit that makes it fit."""

from __future__ import annotations

from typing import Any

import click

import ckptool

from ..base.errors import RefusedError
from ..base.text import cut, join_limited, pluralize
from ..checkpoint.checkpoint import Checkpoint
from ..edits.like.match import Match, match_checkpoint
from ..edits.like.targets import MatchTarget, match_target
from .editing import Job, edit_all
from .options import format_option, one_path
from .render import clean, emit, emit_json, say, say_problems, table

#: What becomes of keys, and the heads of the columns.
_KINDS = {
    "loads": "loads",
    "missing": "missing",
    "unexpected": "unexpected",
    "size_mismatches": "other size",
}
#: Lines of differences, and modules, before the rest is counted.
_LINES = 12

EPILOG = """\b
Examples:
  ckptool match model.pth other.pth
  ckptool match model.pth --model mypackage.models:build
  ckptool match model.pth other.pth --apply -o fits.pth
  ckptool match training.ckpt release.lock.json --no-strict --format json

\b
Exit codes: 0 it fits as it is (with --apply: the output does), 1 it does not, 4 --apply found nothing that helps.
"""


@click.command(epilog=EPILOG)
@one_path
@click.argument("target", metavar="[TARGET]", type=click.Path(), required=False)
@click.option(
    "--model",
    metavar="MODULE:CALLABLE",
    help="Use the model that this callable makes, on the meta device, as TARGET. This imports and runs your code; no"
    " other option does.",
)
@click.option(
    "--key",
    metavar="PATH",
    help="The state dict of PATH, as inspect prints it ('.' for the root). Default: the one that fits best.",
)
@click.option("--target-key", metavar="PATH", help="The state dict of TARGET. Default: the one with the most keys.")
@click.option(
    "--anywhere",
    is_flag=True,
    help="Ignore where in the file the state dict is: your code extracts it.",
)
@click.option(
    "--strict/--no-strict",
    default=True,
    show_default=True,
    help="Count missing and unexpected keys as failures, like load_state_dict(strict=True).",
)
@click.option("--apply", "applied", is_flag=True, help="Apply the edit that was found; needs -o.")
@click.option("-o", "--output", type=click.Path(), metavar="OUT", help="With --apply: the file to write.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@format_option()
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
@click.option("--no-progress", is_flag=True, help="Show no progress bar.")
def match(
    path: str,
    target: str | None,
    model: str | None,
    key: str | None,
    target_key: str | None,
    anywhere: bool,
    strict: bool,
    applied: bool,
    output: str | None,
    force: bool,
    style: str,
    quiet: bool,
    no_progress: bool,
) -> int:
    """Show what would load into a model and what would not, and find the shortest edit that makes it fit.

    TARGET gives the expected names and shapes: another checkpoint, or a lock file. Only names and shapes are read, so
    "Missing key(s), Unexpected key(s), size mismatch" is answered in a second, without torch.
    """
    if (target is None) == (model is None):
        raise click.UsageError("Name a TARGET, or a model with --model: one of them.")
    if applied and output is None:
        raise click.UsageError("--apply writes a file: say where with -o.")
    if not applied and (output is not None or force):
        raise click.UsageError("-o and --force go with --apply.")
    if model is not None:
        say(f"--model imports and runs {model}")
    wanted = match_target(target, model, target_key)

    def matched(checkpoint: Checkpoint) -> Match:
        return match_checkpoint(checkpoint, wanted, key=key, anywhere=anywhere, strict=strict)

    if applied:
        how: dict[str, Any] = {"output": output, "out_dir": None, "force": force, "dry_run": False}
        job = _job(matched, wanted, target)
        return edit_all(job, (path,), **how, style=style, quiet=quiet, no_progress=no_progress)
    with ckptool.open(path) as checkpoint:
        report = matched(checkpoint).report
        say_problems(checkpoint)
    if not quiet:
        if style == "table":
            emit("\n".join(_words(report)))
        else:
            emit_json([report], style, False)
    return 0 if report["fits"] else 1


def _job(matched: Any, wanted: MatchTarget, target: str | None) -> Job:
    """Match, and do what was found; the report of the match is part of that of the edit."""
    from ..edits.pipeline import apply_fix  # with all edits there are: for --apply only

    reports: list[dict[str, Any]] = []
    shapes = wanted.shapes

    def edit(checkpoint: Checkpoint) -> Checkpoint:
        say_problems(checkpoint)
        found: Match = matched(checkpoint)
        reports.append(found.report)
        if found.steps is None:
            what = f"no edit makes it fit {wanted.source}; nothing is written"
            raise RefusedError(what, path=checkpoint.path, next=found.report["next"])
        return apply_fix(checkpoint, found.steps, shapes, key=found.key)

    def more(edited: Checkpoint) -> dict[str, Any]:
        return {name: value for name, value in reports[-1].items() if name not in ("schema", "path")}

    def code(report: dict[str, Any]) -> int:
        return 0 if report["fits"] or report["fix"]["complete"] else 1

    return Job("match", edit, inputs=(target,) if target else (), more=more, words=_applied, code=code)


#: Edits whose account ends with a number of keys.
_OF_KEYS = ("strip-prefix", "strip-wrappers", "add-prefix", "rename")


def _applied(report: dict[str, Any]) -> list[str]:
    """What was done, and what it comes to."""
    lines = []
    for change in report["changes"]:
        where = f"{change['path']}: " if change["path"] else ""
        number = f" {pluralize(change['number'], 'key')}" if change["edit"] in _OF_KEYS and change["number"] else ""
        lines.append(f"  {clean(where + change['what'] + number)}")
    fix = report["fix"]
    if fix is None:
        return [*lines, "  nothing to do: it fits as it is", *_remarks(report["notes"])]
    lines.append(f"  {_share(fix['loads'], report)} load now" + ("" if fix["complete"] else "; what remains:"))
    rest = [] if fix["complete"] else _differences(fix)
    return [*lines, *(f"  {line}" for line in rest), *_remarks(fix["notes"]), *_onward(report)]


def _words(report: dict[str, Any]) -> list[str]:
    """The whole report for people: the verdict, what differs, the fix."""
    fix = report["fix"]
    lines = [_verdict(report), *_remarks(report["notes"])]
    # Where a fix turns every name around, a table of them all is no news.
    differs = any(item[kind] for item in report["modules"] for kind in _KINDS if kind != "loads")
    if differs and (report["loads"] or fix is None):
        lines += _section([_modules(report)])
    lines += _section(_differences(report))
    if fix is not None:
        lines += ["", f"{_share(fix['loads'], report)} after:", f"  {clean(fix['command'])}", *_remarks(fix["notes"])]
        if not fix["complete"]:
            lines += ["", "what remains then:", *(f"  {line}" for line in _differences(fix))]
        elif fix["dtype_differences"]:
            lines += [f"  {line}" for line in _dtypes(fix)]
    return [*lines, *_onward(report)]


def _section(lines: list[str]) -> list[str]:
    return ["", *lines] if lines else []


def _verdict(report: dict[str, Any]) -> str:
    share = _share(report["loads"], report)
    if report["fits"]:
        return f"fits: {share}"
    if report["placed"]:
        return f"does not fit: {share} would load"
    have, wanted = (_place(report[name]) for name in ("state_dict", "target_state_dict"))
    return clean(f"does not fit: the state dict is {have}, the target's {wanted}; by name {share} would load")


def _place(path: str) -> str:
    return f"at {path!r}" if path else "the whole file"


def _share(loads: int, report: dict[str, Any]) -> str:
    return f"{loads:,} of {pluralize(report['wanted'], 'key')}"


def _modules(report: dict[str, Any]) -> str:
    """A line for each module, a column for each kind that there is."""
    kinds = [kind for kind in _KINDS if any(item[kind] for item in report["modules"])]
    rows = [
        (cut(item["module"] or ".", 60), *(f"{item[kind]:,}" if item[kind] else "" for kind in kinds))
        for item in report["modules"]
    ]
    headers = ("module", *(_KINDS[kind] for kind in kinds))
    drawn = table(headers, rows[:_LINES], right=range(1, len(headers)))
    more = len(rows) - _LINES
    return drawn if more <= 0 else f"{drawn}\n... and {pluralize(more, 'more module')}"


def _differences(found: dict[str, Any]) -> list[str]:
    """What is missing, unexpected, of another size or dtype, the first few by name."""
    lines = [
        clean(f"other size: {cut(item['key'])} is {cut(item['have'])} here, {cut(item['wanted'])} in the target")
        for item in found["size_mismatches"][:_LINES]
    ]
    more = len(found["size_mismatches"]) - _LINES
    lines += [f"other size: {more:,} more"] if more > 0 else []
    lines += [
        clean(f"{kind}: {join_limited(found[kind], most=3)}") for kind in ("missing", "unexpected") if found[kind]
    ]
    return lines + _dtypes(found)


def _dtypes(found: dict[str, Any]) -> list[str]:
    """What torch converts and makes up: no obstacle, but worth a line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for item in found["dtype_differences"]:
        groups.setdefault((item["have"], item["wanted"]), []).append(item["key"])
    lines = [
        clean(f"other dtype: {have} here, {wanted} in the target, converted on loading: {join_limited(names, most=3)}")
        for (have, wanted), names in groups.items()
    ]
    if found["filled_in"] and found["loads"]:
        lines.append(
            f"filled in by torch: {pluralize(len(found['filled_in']), 'counter')} of batch norms, not in the file"
        )
    return lines


def _remarks(notes: list[str]) -> list[str]:
    return [clean(f"  note: {note}") for note in notes]


def _onward(report: dict[str, Any]) -> list[str]:
    """What to do about what is left, and the command for it."""
    if not report["next"]:
        return []
    command = [clean(f"     {report['next_command']}")] if report["next_command"] else []
    return [clean(f"  -> {report['next']}{':' if command else ''}"), *command]
