"""The match command: show what would load into a model, and the edit that makes the rest load."""

from __future__ import annotations

from functools import partial
from typing import Final, Literal, TypeAlias

import click

import ckptool

from ..base.errors import RefusedError, UnreadableError
from ..base.records import NamedTuple
from ..base.steps import Line, NextStep
from ..base.text import cut, join_limited, pluralize, shortened, shown
from ..checkpoint.checkpoint import KEY_EDITS, Checkpoint
from ..edits.matching.match import Differences, Match, MatchAnswer, MatchReport, match_checkpoint, mismatch
from ..edits.matching.targets import MatchTarget, match_target, target_in_error
from .edit_report import EditReport, conversion_lines
from .editing import EditRequest, WithFields, edit_all
from .explain import read_message
from .help import GroupedCommand
from .options import (
    AnyPath,
    InputPath,
    Writing,
    as_writing,
    converting,
    force_option,
    format_option,
    key_option,
    model_option,
    one_path,
    other_key_option,
    quiet_option,
)
from .render import advised_step, clean, emit_report, say_model, say_problems, step_lines, table, unreadable
from .terminal import judged

Kind: TypeAlias = Literal["loads", "missing", "unexpected", "size_mismatches"]
#: What can happen to a key, with the headers of the columns.
_KINDS: Final[dict[Kind, str]] = {
    "loads": "loads",
    "missing": "missing",
    "unexpected": "unexpected",
    "size_mismatches": "other size",
}
#: Bytes read from the end of a log, where the message is.
_LOG: Final = 16 << 20
#: Differences and modules listed; the rest are counted.
_LINES = 12


class AppliedReport(EditReport, MatchAnswer):
    """The ``ckptool.match/1`` report with --apply. ``next`` is the next step of the match, not of the edit."""


@click.command(cls=GroupedCommand)
@one_path
@click.argument("target", metavar="[TARGET]", type=InputPath(), required=False)
@model_option
@click.option(
    "--error",
    metavar="FILE",
    type=InputPath(),
    help="Take the keys of the model from the message of load_state_dict in a file, or - for standard input: nobody"
    " needs the model.",
)
@key_option
@other_key_option
@click.option(
    "--anywhere", is_flag=True, help="Accept a state dict anywhere in the file, because your code extracts it."
)
@click.option("--lenient", is_flag=True, help="Accept missing and unexpected keys, like load_state_dict(strict=False).")
@click.option("--apply", "applied", is_flag=True, help="Apply the edit that was found; needs -o.")
@click.option("-o", "--output", type=AnyPath(), metavar="OUT", help="With --apply: the file to write.")
@converting
@force_option
@format_option()
@quiet_option
@as_writing
def match(
    path: str,
    target: str | None,
    model: str | None,
    error: str | None,
    other_key: str | None,
    anywhere: bool,
    lenient: bool,
    applied: bool,
    how: Writing,
) -> int:
    """Show what would load into a model and what would not, and find the shortest edit that makes it fit.

    TARGET gives the expected names and shapes: another checkpoint, or a lock file. Without --key the state dict that
    fits best counts, without --other-key the one of TARGET with the most keys. Names, shapes and a
    few rows are read, so "Missing key(s), Unexpected key(s), size mismatch" is answered in a second, without torch.
    Where both files hold values, tensors that would come to the wrong place are named: in another order of rows,
    transposed, or under another name. Only these rows are compared: to compare all values, use diff.
    """
    if sum(given is not None for given in (target, model, error)) != 1:
        raise click.UsageError("Name a TARGET, a model with --model, or a file with an error message with --error.")
    if applied and how.output is None:
        raise click.UsageError("--apply writes a file: name it with -o.")
    if not applied and (how.output is not None or how.force):
        raise click.UsageError("-o and --force need --apply.")
    if model is not None:
        say_model(model)
    try:
        text = "" if error is None else read_message(error, _LOG)
        known = match_target(target, model, other_key) if error is None else None
    except UnreadableError as failed:
        return unreadable("match", error or target or path, failed, how.style, how.quiet)
    asked = Question(known, text, error or "", how.key, anywhere, not lenient)
    if applied:
        inputs = (target,) if target else ()
        work = partial(_fitted, asked=asked)
        request = EditRequest("match", work, lines=_applied, code=_code, inputs=inputs, keyed=True)
        return edit_all(request, (path,), how)
    try:
        with ckptool.open(path) as checkpoint:
            report = asked.match(checkpoint)[0].report
            say_problems(checkpoint)
    except UnreadableError as failed:
        return unreadable("match", path, failed, how.style, how.quiet)
    emit_report(report, partial(_words, report), how.style, how.quiet)
    return 0 if report["fits"] else 1


class Question(NamedTuple):
    """The question of the command line. ``known`` is the target, or None if the error message ``text`` describes it."""

    known: MatchTarget | None
    text: str
    error: str
    key: str | None
    anywhere: bool
    strict: bool

    def match(self, checkpoint: Checkpoint) -> tuple[Match, MatchTarget]:
        """Match a checkpoint, and return the target, too."""
        target = self.known or target_in_error(checkpoint, self.text, self.error)
        match = match_checkpoint(checkpoint, target, key=self.key, anywhere=self.anywhere, strict=self.strict)
        return match, target


def _fitted(checkpoint: Checkpoint, asked: Question) -> WithFields:
    """Match the checkpoint and apply the edit that makes it fit. The report also has the fields of the match."""
    from ..edits.pipeline import apply_fix  # imports every edit, so only --apply pays for it

    say_problems(checkpoint)
    result, target = asked.match(checkpoint)
    if result.steps is None:
        what = f"no edit makes it fit {result.report['target']}; nothing is written"
        advice, line = result.report["advice"], result.report["next"]
        step = NextStep((f"{advice}: ", Line(line))) if line else advice
        raise RefusedError(what, path=checkpoint.path, next=step)
    return apply_fix(checkpoint, result.steps, target, key=result.key), result.report


def _code(report: AppliedReport) -> int:
    return 0 if report["fits"] or (report["fix"] and report["fix"]["complete"]) else 1


def _applied(report: AppliedReport) -> list[str]:
    lines = []
    for change in (change for change in report["changes"] if change["edit"] != "convert"):
        where = f"{change['path']}: " if change["path"] else ""
        number = f" {pluralize(change['number'], 'key')}" if change["edit"] in KEY_EDITS and change["number"] else ""
        lines.append(f"  {clean(where + change['what'] + number)}")
    lines += conversion_lines(report)
    fix = report["fix"]
    if fix is None:
        return [*lines, "  nothing to do: it fits as it is", *_remarks(report["notes"])]
    lines.append(f"  {_share(fix['loads'], report)} load now" + ("" if fix["complete"] else "; what remains:"))
    if fix["complete"]:
        return [*lines, *_remarks(fix["notes"])]
    return [*lines, *(f"  {line}" for line in _differences(fix)), *_remarks(fix["notes"]), *_onward(report)]


def _words(report: MatchReport) -> list[str]:
    fix = report["fix"]
    verdict, rest = _verdict(report)
    lines = [judged(verdict) + rest, *_remarks(report["notes"])]
    # If no key loads and a fix exists, all modules differ: a table of them would say nothing.
    differs = any(item[kind] for item in report["modules"] for kind in _KINDS if kind != "loads")
    if differs and (report["loads"] or fix is None):
        lines += ["", _modules(report)]
    optimizers = [clean(mismatch(item)) for item in report["optimizers"] if not item["fits"]]
    details = [*_differences(report), *optimizers]
    lines += ["", *details] if details else []
    if fix is not None:
        # The next step includes this fix, and one command for a file is enough.
        command = [] if report["next"] else step_lines(fix["command"])
        after = f"{_share(fix['loads'], report)} load after {'this command:' if command else 'an edit'}"
        lines += ["", after, *command, *_remarks(fix["notes"])]
        if not fix["complete"]:
            lines += ["", "what remains then:", *(f"  {line}" for line in _differences(fix))]
        elif fix["dtype_differences"]:
            lines += [f"  {line}" for line in _dtypes(fix)]
    return [*lines, *_onward(report)]


def _verdict(report: MatchReport) -> tuple[str, str]:
    share = _share(report["loads"], report)
    if report["fits"]:
        return "fits", f": {share}"
    if report["placed"]:
        return "does not fit", f": {share} would load"
    places = (report["state_dict"], report["target_state_dict"])
    have, wanted = (f"at {place!r}" if place else "the whole file" for place in places)
    text = f": the state dict is {have}, in the target it is {wanted}; by name {share} would load"
    return "does not fit", clean(text)


def _share(loads: int, report: MatchAnswer) -> str:
    return f"{loads:,} of {pluralize(report['wanted'], 'key')}"


def _modules(report: MatchReport) -> str:
    kinds = [kind for kind in _KINDS if any(item[kind] for item in report["modules"])]
    rows = [
        (cut(item["module"] or ".", 60), *(f"{item[kind]:,}" if item[kind] else "" for kind in kinds))
        for item in report["modules"]
    ]
    headers = ("module", *(_KINDS[kind] for kind in kinds))
    drawn = table(headers, rows[: shown(_LINES)], right=range(1, len(headers)))
    more = len(rows) - shown(_LINES)
    return drawn if more <= 0 else f"{drawn}\n... and {pluralize(more, 'more module')}"


def _differences(report: Differences) -> list[str]:
    """Return lines about other sizes, missing and unexpected keys, and other dtypes; each names the first few keys."""
    lines = [
        clean(f"other size: {cut(item['key'])} is {cut(item['have'])} here, {cut(item['wanted'])} in the target")
        for item in report["size_mismatches"][: shown(_LINES)]
    ]
    more = len(report["size_mismatches"]) - shown(_LINES)
    lines += [f"other size: {more:,} more"] if more > 0 else []
    named = [
        (kind, keys) for kind, keys in (("missing", report["missing"]), ("unexpected", report["unexpected"])) if keys
    ]
    lines += [clean(f"{kind}: {join_limited(keys, most=3)}") for kind, keys in named]
    return lines + _dtypes(report)


def _dtypes(report: Differences) -> list[str]:
    """Return lines about dtypes that torch converts and counters that it fills in. Both load without an edit."""
    groups: dict[tuple[str, str], list[str]] = {}
    for item in report["dtype_differences"]:
        groups.setdefault((item["have"], item["wanted"]), []).append(item["key"])
    lines = [
        clean(f"other dtype: {have} here, {wanted} in the target, converted on loading: {join_limited(names, most=3)}")
        for (have, wanted), names in groups.items()
    ]
    if report["filled_in"] and report["loads"]:
        count = pluralize(len(report["filled_in"]), "counter")
        lines.append(f"filled in by torch: {count} of batch norms, not in the file")
    return lines


def _remarks(notes: list[str]) -> list[str]:
    return [shortened(clean(f"  note: {note}")) for note in notes]


def _onward(report: MatchReport | AppliedReport) -> list[str]:
    causes = [shortened(clean(f"  why: {item['message']}")) for item in report["causes"]]
    return [*causes, *advised_step(report["advice"], report["next"])]
