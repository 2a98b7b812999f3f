"""A complete match: the intended state dict, the keys that fit unchanged, and the fix. Schema ``ckptool.match/1``.

The names, shapes and values of both sides are compared. Candidates for an edit come from a short list: wrappers and
prefixes, the names of the target, and the built-in tables of names. The values decide: what they contradict is not
offered, and where they do not tell, this is said.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ...base.addresses import is_remote
from ...base.errors import CkptoolError
from ...base.globs import escaped
from ...base.records import NamedTuple, TypedDict
from ...base.steps import STDIN, Step, advised, command, in_shell
from ...base.text import join_limited, pluralize
from ...checkpoint.checkpoint import Checkpoint, away
from ...checkpoint.paths import spell_key
from ...checkpoint.programs import convert_step, program_of
from ...checkpoint.tensors import is_sharded
from ...files.sources import FolderSource, MemberSource
from ...formats import folder_format
from ...formats.opening import CheckpointOrPath, opened
from ...formats.rank_part import GATHER, Part, empty_weights, part_of
from ..averages import averages_within, is_average
from ..convert import suggested_edit
from .candidates import Case, Steps, case_of, drop_steps, shared_shapes
from .causes import Cause, Side, causes_of, find_ties, tied_causes, with_own_step
from .pairing import Agreement, Comparison, MismatchReport, Pairing, family_of
from .targets import GroupSizes, MatchTarget, group_sizes, match_target, target_in_error
from .values import Values

if TYPE_CHECKING:
    import torch

#: The options that choose a state dict, for messages.
_KEY, _OTHER_KEY = in_shell("`--key`"), in_shell("`--other-key`")


class Match(NamedTuple):
    """The result of a match.

    ``report`` is the output of ``ckptool match --format json``. ``steps`` make the state dict at ``key`` fit as far as
    possible; they are None if nothing does.
    """

    report: MatchReport
    steps: Steps | None
    key: str | None


def match_checkpoint(
    checkpoint: Checkpoint, target: MatchTarget, *, key: str | None = None, anywhere: bool = False, strict: bool = True
) -> Match:
    """Match a checkpoint with a target.

    ``key`` is the path of the intended state dict (default: the one that fits best). ``anywhere`` ignores the place of
    the state dict in the file. Without ``strict``, missing and unexpected keys are ignored too. Raise TargetError if
    there is no state dict.
    """
    case = case_of(checkpoint, target, key, anywhere, strict)
    target, best = case.target, case.best
    now = best.start.fit
    likely = dict(zip(best.likely, best.space.specs.values()))
    rest = best.space.compared(likely)
    here = Side(likely, dict(zip(best.likely, best.space.specs)))
    causes = causes_of(here, Side(target.tensors, {}), rest)
    trained = any(cause.kind == "adapter" for cause in causes)  # no edit may leave it out, or ask for it
    causes, own_step = with_own_step(checkpoint, target, causes, now if case.placed else None)
    ties = find_ties(here, target, rest.missing) if strict else {}
    program = program_of(checkpoint)
    solvable = tied_causes(ties, here)
    is_folder = isinstance(checkpoint.source, FolderSource | MemberSource)
    # Transformers ties what a folder lacks, and copies no more.
    if program is None and (os.path.isfile(checkpoint.path) or (is_remote(checkpoint.path) and not is_folder)):
        best = best._replace(ties={name: here.label(source) for name, source in ties.items()})
        case = case._replace(best=best)
    other_model = not trained and _is_other_model(case, rest, causes)
    steps, fix = _fix(case) if not other_model and not trained else ((), None)
    as_it_is = case.placed and case.is_good(now)
    refuted = ""
    by_names = fix and fix["complete"] and not any(step.name == "rename-like" for step in steps)
    if not as_it_is and not by_names and not trained:
        by_table, refuted = _by_table(case)
        if by_table is not None:
            (steps, fix), other_model, solvable = by_table, False, causes
        elif fix and fix["complete"]:
            refuted = ""
        other_model = other_model and not refuted
    loads = as_it_is and not best.misplaced and program is None
    optimizers = compare_optimizers(group_sizes(checkpoint), target.groups)
    others = [item for item in optimizers if not item["fits"]]
    fits = loads and not others
    complete = fix is not None and fix["complete"]
    solved = loads or complete
    part = None if solved else part_of(checkpoint)
    if not complete and any(item is not None and not item.tensors_whole for item in (part, target.part)):
        steps, fix = (), None  # values that fit by shape, such as a bias, may be one part of a sum
    shown: list[Cause] = []
    if loads:
        next_step = _without_optimizers(case, others)
    elif part is not None:
        next_step = part.message if part.folder else f"{part.message}; {part.whole}", _whole_step(case, part)
    elif not solved and (empty := empty_weights(checkpoint)):
        next_step = advised(empty, GATHER), GATHER.line
    else:
        next_step = _next(case, steps, [*causes, *solvable], fix, other_model)
        next_step = ("", str(own_step)) if own_step and not complete else next_step
        shown = solvable if solved else [] if other_model and fix is None else [*causes, *solvable]
    if program is not None and not (other_model or part):
        step = convert_step(checkpoint)
        what = "it is a program, which torch.load does not give as a state dict"
        out = (f"{what}: take its weights out first", step.line)
        next_step = out if step.commands else (f"{what}: {step.advice}", "")
        steps, fix = (), None
    report: MatchReport = {
        "schema": "ckptool.match/1",
        "path": checkpoint.path,
        "target": target.source,
        "target_kind": target.kind,
        "state_dict": best.path,
        "target_state_dict": target.path,
        "strict": strict,
        "fits": fits,
        "placed": case.placed,
        "keys": len(best.space.specs),
        "wanted": len(target.tensors),
        **differences(now),
        "modules": module_reports(now),
        "optimizers": optimizers,
        "causes": [{"kind": cause.kind, "message": cause.message} for cause in shown],
        "fix": fix,
        "advice": next_step[0],
        "next": next_step[1],
        "notes": [*_notes(case), *([refuted] if refuted else [])],
    }
    return Match(report, None if fix is None and not fits else steps, case.edited_key(steps))


def _is_other_model(case: Case, rest: Comparison, causes: Sequence[Cause]) -> bool:
    """Return whether too few keys load, or are explained, for this to be the same model."""
    # Two models differ by these causes too, if all other keys have the same names.
    same = [cause for cause in causes if cause.kind not in ("configuration", "flat")]
    known = len(rest.loads) + max(sum(len(cause.keys) for cause in same), sum(len(cause.unused) for cause in same))
    return known * 2 < min(len(case.best.space.specs), len(case.target.tensors))


# -- the fix


def _fix(case: Case) -> tuple[Steps, Fix | None]:
    best = case.best
    # No edit restores a whole tensor from one rank's part, and no edit of names moves rows.
    if best.misplaced or not case.editable or any(spec.part for spec in best.space.specs.values()):
        return (), None
    after = best.space.compared(best.renamed)
    drops: Steps = ()
    dropped: list[str] = []
    if case.strict and after.loads and not (after.missing or after.sizes):
        drops = drop_steps(best.renamed, after.unexpected)
    if drops:
        dropped, after = after.unexpected, after._replace(unexpected=[])
    base = "" if best.before else best.path
    copies = (
        Step("merge-entry", f"{case.checkpoint.path}:{spell_key(best.path, source)}={spell_key(base, name)}")
        for name, source in best.ties.items()
    )
    steps = (*best.before, *best.best.steps, *copies, *drops, *best.after)
    if not steps or (not after.loads and not after.complete):
        return (), None
    before = _loadable(case.checkpoint)
    # A copy of an entry has the device of the file, so this comes last.
    last = tuple(step for step in before if best.ties and step.name == "to")
    steps = (*(step for step in before if step not in last), *steps, *last)
    return steps, _fix_report(case, steps, after, dropped, best.best.agreement)


def _fix_report(case: Case, steps: Steps, after: Comparison, dropped: list[str], agreement: Agreement) -> Fix:
    left_out = case.left_out
    notes = [f"leaves out the other entries: {join_limited(left_out)}"] if left_out else []
    if dropped:
        number = pluralize(len(dropped), "key")
        notes.append(f"drops {number} that the target does not have: {join_limited(dropped, most=3)}")
    if case.target.values is not None and not agreement.equal:
        notes.append("no values of the target are equal, as after another training: they cannot confirm this")
    return {
        "complete": case.is_good(after),
        "steps": [{"option": step.name, "value": step.value} for step in steps],
        **differences(after),
        "dropped": dropped,
        "left_out": left_out,
        "notes": notes,
        "command": _command(case, steps),
    }


def _by_table(case: Case) -> tuple[tuple[Steps, Fix] | None, str]:
    """Return the step to a built-in table's names that give the target, unless values contradict it: then why."""
    checkpoint, target, best = case.checkpoint, case.target, case.best
    in_parts = any(item and not item.tensors_whole for item in (part_of(checkpoint), target.part))
    if in_parts or any(spec.part for spec in best.space.specs.values()) or not case.editable:
        return None, ""  # shapes of one rank's part say nothing about the whole
    from ..recipes import leading_to, named_as  # imported late: it reads all recipes

    key = best.path or "."
    family, dropped = leading_to(checkpoint, key, target.shapes)
    if not family:
        return None, ""
    agreement = Agreement(0, ())
    if target.values is not None:
        try:
            made = named_as(checkpoint, family, key=key)
        except CkptoolError:
            return None, ""  # the table lacks a number
        # Of large computed tensors, one of each family is read.
        costly = {family_of(name): name for name in target.tensors}
        values = Values(made, best.path, target.values.rounding, {*costly.values()})
        agreement = Pairing(values, target.values).agreement((name, name) for name in target.tensors)
    if agreement.contradicted:
        return None, f"the names of {family} are not offered: {_in_wrong_place(agreement)}"
    steps = (*_loadable(checkpoint), *best.before, Step("to-names", family), *best.after)
    return (steps, _fix_report(case, steps, best.space.compared(target.tensors), dropped, agreement)), ""


def _in_wrong_place(agreement: Agreement) -> str:
    names = join_limited(agreement.contradicted, most=3)
    return f"the target has the same values in another order, or under another name: {names}"


def _loadable(checkpoint: Checkpoint) -> Steps:
    """Return the steps that make an output loadable by plain ``torch.load`` on a machine without a GPU."""
    steps = (Step("to", "cpu"),) if away(checkpoint) else ()
    from ..sanitize.sanitizer import loadable, options_that_work  # imported late: it needs the sanitizer

    options = None if loadable(checkpoint) else options_that_work(checkpoint)
    if options is None:
        return steps
    return (Step("sanitize"), *(Step(name.replace("_", "-")) for name in options), *steps)


def _command(case: Case, steps: Steps) -> str:
    """Return the command line of a fix; "" if the target is neither a file nor a named model."""
    target = case.target
    if not any(step.name == "rename-like" for step in steps) or (
        target.kind in ("checkpoint", "lock") and not target.others
    ):
        return case.edit_line(steps)
    if target.kind == "names":
        return ""
    # ``edit --rename-like`` takes a file with one state dict; only ``match`` can take names from other sources.
    output = suggested_edit(case.checkpoint, "fits")
    return _match_line(case, case.checkpoint.path, key=case.key, apply=True, output=output)


def _match_line(case: Case, path: str, **more: Any) -> str:
    target = case.target
    named = target.kind in ("model", "error")
    settings = [Step(target.kind, target.source)] if named else []
    more["other_key"] = (target.path or ".") if target.others else None
    return str(command("match", path, *([] if named else [target.source]), steps=settings, **more))


# -- what else helps


def _next(case: Case, steps: Steps, causes: Sequence[Cause], fix: Fix | None, other_model: bool) -> tuple[str, str]:
    """Return advice for problems that no edit solves, and a command ("" if none exists)."""
    best = case.best
    if fix is not None and fix["complete"]:
        return "", ""
    if best.misplaced:
        number = pluralize(len(best.misplaced), "key")
        return f"{number} would load with values in the wrong place: {_in_wrong_place(best.best.agreement)}", ""
    renamed = best.renamed if fix is not None else best.space.specs
    after = best.space.compared(renamed)
    if fix is None and other_model:
        most = f"{shared_shapes(best.space.specs, case.target):,} of its {pluralize(len(best.space.specs), 'value')}"
        return f"it is probably another model: {most} have a shape that the target wants", ""
    if not after.sizes:
        if causes or not after.loads:  # strict=False would hide them
            return "", ""
        return f"load_state_dict(..., strict=False) loads the other keys; {not_strict(after)}", ""
    bad = [item["key"] for item in after.sizes]
    drops = drop_steps(renamed, bad) if case.editable else ()
    if not drops or any(not cause.replaceable and cause.kind != "tied" for cause in causes):
        return "", ""
    last = best.after if fix is not None else ()
    words = (*(() if steps else _loadable(case.checkpoint)), *steps[: len(steps) - len(last)], *drops, *last)
    number = pluralize(len(bad), "key")
    message = f"without the {number} of another size, load_state_dict(..., strict=False) loads the others"
    return f"{message}; the rest of the model keeps its initial values", case.edit_line(words)


def _whole_step(case: Case, part: Part) -> str:
    """Return the command that matches the whole checkpoint, or shows which of its files are there; "" without any."""
    if not part.folder:
        return ""
    if case.target.kind == "names" or case.target.source == STDIN or folder_format(part.folder) is None:
        return str(command("inspect", part.folder))
    return _match_line(case, part.folder, anywhere=case.anywhere, lenient=not case.strict)


def _without_optimizers(case: Case, others: Sequence[OptimizerReport]) -> tuple[str, str]:
    """Return advice and a command for optimizers that do not fit although the weights do; both "" if there are none."""
    if not others:
        return "", ""
    paths = [escaped(item["path"]) for item in others]
    step = command("drop", case.checkpoint.path, *paths, output=suggested_edit(case.checkpoint, "fits"))
    message = "the weights load, and without the state of the optimizer a training starts with a fresh one"
    return message, str(step) if all(paths) and case.editable else ""


def _notes(case: Case) -> list[str]:
    notes = []
    checkpoint, target, best, path = case.checkpoint, case.target, case.best, case.best.path
    if case.key is None and len(case.attempts) > 1:
        equal = {one.path: " (fits as well)" * (one.best.fit.rank == best.best.fit.rank) for one in case.attempts}
        others = join_limited([repr(place or ".") + fits for place, fits in equal.items() if place != path])
        number = pluralize(len(checkpoint.state_dicts), "state dict")
        notes.append(f"there are {number}, and {path or '.'!r} is used; {_KEY} chooses another: {others}")
    averaged = [one.path for one in case.attempts if is_average(one.path) and not is_average(path)]
    if averaged:
        notes.append(f"averaged weights (EMA) are in {averaged[0]!r}: {_KEY} {averaged[0]} takes these instead")
    inside = next(averages_within(checkpoint, best.state_dict), "")
    if inside and best.best.fit.loads:
        step = command("edit", checkpoint.path, steps=[Step("use-ema")], output=suggested_edit(checkpoint, "ema"))
        notes.append(f"averaged weights (EMA) are in {inside}*: to load these, match a copy that has them: {step}")
    if target.others:
        others = join_limited([repr(other or ".") for other in target.others])
        notes.append(f"in the target {target.path or '.'!r} is used; {_OTHER_KEY} chooses another: {others}")
    if shards := sum(is_sharded(entry.tensor) for entry in checkpoint.survey.tensors_in([path])):
        notes.append(f"{pluralize(shards, 'sharded tensor')}: they load only into a model that is spread likewise")
    if target.part is not None and not target.part.tensors_whole:
        notes.append(f"the target: {target.part.message}")
    if best.state_dict.confidence == "low":
        notes.append(f"{path or '.'!r} may not be a state dict")
    return notes


def match(
    path: CheckpointOrPath,
    target: CheckpointOrPath | Mapping[str, Any] | torch.nn.Module | None = None,
    *,
    model: str | None = None,
    key: str | None = None,
    other_key: str | None = None,
    anywhere: bool = False,
    lenient: bool = False,
    error: str | None = None,
) -> MatchReport:
    """Return the JSON of ``ckptool match``, schema ``ckptool.match/1``: what would load, and the shortest edit.

    ``target`` is another checkpoint, a lock file, a model, or a mapping of names to tensors. ``model`` names a
    callable, "package.module:callable", that is imported and run. ``error`` is the message that ``load_state_dict``
    raised for this checkpoint; the keys of the model are read from it. ``key`` and ``other_key`` choose among several
    state dicts. ``anywhere`` ignores the place of the state dict in the file. ``lenient`` ignores missing and
    unexpected keys. Raise TargetError if the checkpoint or the target has no state dict.

    >>> report = ckptool.match("other.pth", "model.pth")
    >>> report["fits"], report["loads"]
    (True, 9)
    """
    wanted = None if error is not None else match_target(target, model, other_key)
    with opened(path) as checkpoint:
        wanted = wanted or target_in_error(checkpoint, error or "", "the message")
        return match_checkpoint(checkpoint, wanted, key=key, anywhere=anywhere, strict=not lenient).report


# -- the JSON, schema ``ckptool.match/1``


class Differences(TypedDict):
    """How many keys load, and which do not; ``filled_in`` are batch norm counters that torch fills in itself."""

    loads: int
    missing: list[str]
    unexpected: list[str]
    size_mismatches: list[MismatchReport]
    dtype_differences: list[MismatchReport]
    filled_in: list[str]


class ModuleReport(TypedDict):
    """Counts of a module's keys by outcome."""

    module: str
    loads: int
    missing: int
    unexpected: int
    size_mismatches: int


class CauseReport(TypedDict):
    """A reason why keys do not load, such as "vocabulary" or "transposed", and what helps."""

    kind: str
    message: str


class FixOption(TypedDict):
    """An option of ``ckptool edit``; a flag has the value true."""

    option: str
    value: str | bool


class Fix(Differences):
    """The edit that makes most keys load, and what remains; ``command`` is "" if no command can perform it."""

    complete: bool
    steps: list[FixOption]
    dropped: list[str]
    left_out: list[str]
    notes: list[str]
    command: str


class MatchAnswer(Differences):
    """Whether the checkpoint loads unchanged, and the differences.

    ``target_kind`` is checkpoint, lock, model, error or names. ``placed`` is true if the state dict is at the same path
    as the target's. ``keys`` and ``wanted`` count the keys in the file and in the target. ``optimizers`` lists the
    optimizers that both have. ``causes`` name the reasons for differences that no edit solves, and what helps;
    ``advice`` covers the others.
    """

    target: str
    target_kind: str
    state_dict: str
    target_state_dict: str
    strict: bool
    fits: bool
    placed: bool
    keys: int
    wanted: int
    modules: list[ModuleReport]
    optimizers: list[OptimizerReport]
    causes: list[CauseReport]
    fix: Fix | None
    advice: str
    notes: list[str]


class MatchReport(MatchAnswer):
    """The report of ``ckptool match``, schema ``ckptool.match/1``."""

    schema: Literal["ckptool.match/1"]
    path: str
    next: str


def differences(comparison: Comparison) -> Differences:
    """Return the differences of a comparison as JSON."""
    return {
        "loads": len(comparison.loads),
        "missing": comparison.missing,
        "unexpected": comparison.unexpected,
        "size_mismatches": comparison.sizes,
        "dtype_differences": comparison.dtypes,
        "filled_in": comparison.filled,
    }


def module_reports(comparison: Comparison) -> list[ModuleReport]:
    """Return counts by module, named by as many segments as give at most a dozen groups, but at least one."""
    outcomes = {
        "loads": comparison.loads,
        "missing": comparison.missing,
        "unexpected": comparison.unexpected,
        "size_mismatches": [item["key"] for item in comparison.sizes],
    }
    modules = {name: name.split(".")[:-1] for names in outcomes.values() for name in names}
    depth = 1
    while depth < 6 and len({tuple(parts[: depth + 1]) for parts in modules.values()}) <= 12:
        depth += 1
    groups: dict[str, Counter[str]] = {}
    for outcome, names in outcomes.items():
        for name in names:
            groups.setdefault(".".join(modules[name][:depth]), Counter())[outcome] += 1
    return [
        {
            "module": name,
            "loads": counts["loads"],
            "missing": counts["missing"],
            "unexpected": counts["unexpected"],
            "size_mismatches": counts["size_mismatches"],
        }
        for name, counts in groups.items()
    ]


class OptimizerReport(TypedDict):
    """An optimizer at ``path``: its group sizes here and in the target, and whether they are equal."""

    path: str
    have: list[int]
    wanted: list[int]
    fits: bool


def compare_optimizers(have: GroupSizes, wanted: GroupSizes) -> list[OptimizerReport]:
    """Compare the optimizers of two checkpoints at equal paths, or the only optimizer of each.

    Torch compares the number of groups and their sizes (torch/optim/optimizer.py, ``Optimizer.load_state_dict``).
    """
    partners = {path: path for path in have if path in wanted}
    if not partners and len(have) == len(wanted) == 1:
        partners = dict(zip(have, wanted))
    return [
        {"path": path, "have": [*have[path]], "wanted": [*wanted[other]], "fits": have[path] == wanted[other]}
        for path, other in partners.items()
    ]


def mismatch(report: OptimizerReport) -> str:
    """Describe how the groups differ."""
    have, wanted = ([f"{size:,}" for size in report[side]] for side in ("have", "wanted"))
    return (
        f"optimizer at {report['path'] or '.'!r}: groups of {join_limited(have)} parameters here, of"
        f" {join_limited(wanted)} in the target, which load_state_dict refuses"
    )


def not_strict(comparison: Comparison) -> str:
    """Describe what happens to missing or unexpected keys with strict=False."""
    if not comparison.missing:
        return f"{pluralize(len(comparison.unexpected), 'key')} would be ignored"
    number, names = pluralize(len(comparison.missing), "key"), join_limited(comparison.missing, most=3)
    return f"{number} of the model would stay untrained, with initial values: {names}"
