"""A complete match: the intended state dict, the keys that fit unchanged, and the fix. Schema ``ckptool.match/1``.

The names, shapes and values of both sides are compared. Candidates for an edit come from a short list: wrappers and
prefixes, the names of the target, and the built-in tables of names. The values decide: what they contradict is not
offered, and where they do not tell, this is said.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from ...base.errors import CkptoolError, RefusedError, TargetError
from ...base.patterns import escaped
from ...base.records import NamedTuple
from ...base.steps import STDIN, Setting, advised, command, is_remote, suggested_output
from ...base.text import join_limited, pluralize
from ...checkpoint.checkpoint import Checkpoint, away
from ...checkpoint.objects import mapping
from ...checkpoint.paths import parse_path, spell_key
from ...checkpoint.programs import convert_step, program_of
from ...checkpoint.sharding import sharding_summary
from ...checkpoint.survey import StateDict
from ...checkpoint.tensors import is_sharded
from ...files.sources import FolderSource, MemberSource
from ...formats import folder_format
from ...formats.empty_weights import empty_weights, gather_step
from ...formats.opening import CheckpointOrPath, opened
from ...formats.rank_part import Part, part_of
from ...safety.calls import suspicious_calls
from ...safety.storages import storage_flaws
from ..averages import averages_within, is_average
from ..outputs import suggested_edit
from .candidates import NOT_IN_GLOBS, Candidate, Space, best_renaming
from .causes import Side, causes_of, find_ties, tied_causes, weight_norm_causes, with_own_step
from .names import Comparison, Spec, agrees, as_torch_accepts, compare, family_of, fillable
from .pairing import Agreement, Pairing, pair_in_order
from .report import (
    Fix,
    MatchReport,
    OptimizerReport,
    compare_optimizers,
    differences,
    group_sizes,
    module_reports,
    not_strict,
    other_number,
)
from .sizes import Cause
from .steps import FROM_TARGET, LAYOUT, FixStep, Steps, drop_steps, edit_command, edit_options
from .targets import MatchTarget, candidate_dicts, comparable, match_target, specs_of, target_in_error
from .values import Values

if TYPE_CHECKING:
    import torch

#: The options that choose a state dict, for messages.
_KEY, _OTHER_KEY = Setting("key").option, Setting("other_key").option
#: What thop adds to every module.
_PROFILED: Final = ("total_ops", "total_params")
#: Causes by which two models differ too, if all other keys have the same names.
_OTHER_MODELS: Final = frozenset(("configuration", "flat"))
#: Causes that an edit of names or a copy of a tensor removes.
_SOLVED: Final = frozenset(("tied", "weight_norm"))
#: The most state dicts of a file for which a fix is searched: those that share most shapes with the target.
_TRIED: Final = 4


class Match(NamedTuple):
    """The result of a match.

    ``report`` is the output of ``ckptool match --format json``. ``steps`` make the state dict at ``key`` fit as far as
    possible; they are None if nothing does.
    """

    report: MatchReport
    steps: Steps | None
    key: str | None


class _Attempt(NamedTuple):
    """One of our state dicts against the target; ``before`` and ``after`` are the steps that move it to its place.

    ``start`` has its own names, ``best`` those that may be offered. ``likely`` are the names for which reasons are
    sought. ``doubts`` counts keys that would fit in order alone. ``ties`` maps missing names to the names in the file
    that have their values.
    """

    state_dict: StateDict
    specs: dict[str, Spec]
    values: Values
    pairing: Pairing
    filled: frozenset[str]
    before: Steps
    after: Steps
    start: Candidate
    best: Candidate
    likely: list[str]
    doubts: int
    ties: Mapping[str, str] = MappingProxyType({})

    @property
    def path(self) -> str:
        return self.state_dict.path

    @property
    def misplaced(self) -> tuple[str, ...]:
        """The names of the target that would get its values in another order, or the values of another name."""
        return self.best.agreement.contradicted

    @property
    def rank(self) -> tuple[object, ...]:
        """The quality of the fit, larger is better; among equal fits, weights before averages, then fewer steps."""
        moves = len(self.before) + len(self.after)
        asked = not moves or not is_average(self.path)
        return self.best.fit.complete and not self.misplaced, *self.best.rank[:-1], asked, self.best.rank[-1] - moves

    @property
    def renamed(self) -> dict[str, Spec]:
        """Our values under the names that the best steps give them, and under second names."""
        second = {name: self.specs[source] for name, source in self.ties.items()}
        return dict(zip(self.best.names, self.specs.values())) | second


class _Case(NamedTuple):
    """A checkpoint, its target, the attempts with its state dicts and the best of them, and what was asked."""

    checkpoint: Checkpoint
    target: MatchTarget
    attempts: Sequence[_Attempt]
    best: _Attempt
    key: str | None
    anywhere: bool
    strict: bool

    def compared(self, have: Mapping[str, Spec]) -> Comparison:
        return compare(have, self.target.tensors, self.best.filled)

    def is_good(self, fit: Comparison) -> bool:
        return fit.complete if self.strict else bool(fit.loads or not fit.missing) and not fit.sizes

    @property
    def placed(self) -> bool:
        """Whether the state dict is where the target has it."""
        return not self.best.before and not self.best.after

    @property
    def editable(self) -> bool:
        """Whether an edit may be suggested: the file is whole, and its pickle runs no command."""
        problems = self.checkpoint.container.problems
        whole = not any(problem.blocks_edits or problem.ambiguous for problem in problems)
        return whole and not storage_flaws(self.checkpoint) and not suspicious_calls(self.checkpoint.graph)

    @property
    def left_out(self) -> list[str]:
        """The top-level entries that are lost when the state dict is extracted."""
        path = self.best.path
        return [
            entry.key
            for entry in self.checkpoint.survey.entries
            if not (path.startswith(entry.path) and path[len(entry.path) : len(entry.path) + 1] in ("", ".", "["))
        ] * bool(self.best.before)

    def edited_key(self, steps: Sequence[FixStep]) -> str | None:
        """Return the path of the state dict that the steps must name, or None if they need not.

        They must name it if there are others, if it is uncertain that this is one, or if entries beside it could have
        the names of dropped keys.
        """
        drops = any(step.option == "drop" for step in steps)
        if self.best.before or not (drops or any(step.option not in LAYOUT for step in steps)):
            return None
        sure = [item for item in self.checkpoint.state_dicts if item.confidence == "high"]
        return None if sure == [self.best.state_dict] and not (drops and self.best.path) else self.best.path or "."

    def edit_line(self, steps: Sequence[FixStep]) -> str:
        output = suggested_edit(self.checkpoint, "fits")
        return str(edit_command(self.checkpoint.path, steps, output, self.edited_key(steps)))


def match_checkpoint(
    checkpoint: Checkpoint, target: MatchTarget, *, key: str | None = None, anywhere: bool = False, strict: bool = True
) -> Match:
    """Match a checkpoint with a target.

    ``key`` is the path of the intended state dict (default: the one that fits best). ``anywhere`` ignores the place of
    the state dict in the file. Without ``strict``, missing and unexpected keys are ignored too. Raise TargetError if
    there is no state dict.
    """
    case = _case(checkpoint, target, key, anywhere, strict)
    target, best = case.target, case.best
    now = best.start.fit
    likely = dict(zip(best.likely, best.specs.values()))
    rest = case.compared(likely)
    here = Side(likely, best.values, dict(zip(best.likely, best.specs)))
    there = Side(target.tensors, target.values, {})
    causes = causes_of(here, there, rest)
    trained = any(cause.kind == "adapter" for cause in causes)  # no edit may leave it out, or ask for it
    causes, own_step = with_own_step(checkpoint, target, causes, now if case.placed else None)
    ties = find_ties(here, there, target.tied, rest.missing) if strict else []
    solvable = [*tied_causes(ties, here), *weight_norm_causes(zip(best.specs, best.best.names))]
    best = best._replace(ties={tie.name: here.label(tie.source) for tie in ties if _can_copy(checkpoint)})
    case = case._replace(best=best)
    other_model = not trained and _is_other_model(case, rest, causes)
    steps, fix = _fix(case) if not other_model and not trained else ((), None)
    as_it_is = case.placed and case.is_good(now)
    refuted = ""
    by_names = fix and fix["complete"] and not any(step.option in FROM_TARGET for step in steps)
    if not as_it_is and not by_names and not trained:
        by_table, refuted = _by_table(case)
        if by_table is not None:
            (steps, fix), other_model, solvable = by_table, False, causes
        elif fix and fix["complete"]:
            refuted = ""
        other_model = other_model and not refuted
    program = program_of(checkpoint)
    loads = as_it_is and not best.misplaced and program is None
    groups = group_sizes(checkpoint)
    optimizers = compare_optimizers(groups, target.groups)
    others = [item for item in optimizers if not item["fits"]]
    fits = loads and not others
    complete = fix is not None and fix["complete"]
    solved = loads or complete
    part = None if solved else part_of(checkpoint)
    if not complete and any(item is not None and not item.tensors_whole for item in (part, target.part)):
        steps, fix = (), None  # values that fit by shape, such as a bias, may be one part of a sum
    edited = case.edited_key(steps)
    if fix is not None:
        fix["command"] = _command(case, steps)
    shown: list[Cause] = []
    renaming: tuple[str, str] | None = None
    if loads:
        next_step = _without_optimizers(case, others)
    elif part is not None:
        next_step = part.message if part.folder else f"{part.message}; {part.whole}", _whole_step(case, part)
    elif not solved and (empty := empty_weights(checkpoint)):
        gather = gather_step(checkpoint)
        next_step = advised(empty, gather), gather.line
    else:
        renaming = _renaming(case, steps, fix)
        next_step = renaming or _next(case, steps, [*causes, *solvable], fix, other_model)
        next_step = ("", str(own_step)) if own_step and not complete else next_step
        shown = solvable if solved else [] if other_model and fix is None else [*causes, *solvable]
    if program is not None and not (other_model or part):
        next_step = _from_program(case, steps if complete else (), complete or case.is_good(now))
        steps, fix = (), None
    notes = [*_notes(case, best.doubts if renaming is None else 0), *([refuted] if refuted else [])]
    if not target.groups and target.kind != "error" and solved:
        notes += other_number(groups, target.tensors, target.tied)
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
        "keys": len(best.specs),
        "wanted": len(target.tensors),
        **differences(now),
        "modules": module_reports(now),
        "optimizers": optimizers,
        "causes": [{"kind": cause.kind, "message": cause.message} for cause in shown],
        "fix": fix,
        "advice": next_step[0],
        "next": next_step[1],
        "notes": notes,
    }
    return Match(report, None if fix is None and not fits else steps, edited)


# -- the state dicts of the checkpoint


def _case(checkpoint: Checkpoint, target: MatchTarget, key: str | None, anywhere: bool, strict: bool) -> _Case:
    dicts = candidate_dicts(checkpoint, key)
    if len(dicts) > _TRIED:

        def rank(item: StateDict) -> tuple[bool, int]:
            return item.path == target.path, _shared_shapes(specs_of(checkpoint, item), target)

        dicts = sorted(dicts, key=rank, reverse=True)[:_TRIED]
    specs = [specs_of(checkpoint, item) for item in dicts]
    target = comparable(target, (spec for each in specs for spec in each.values()))
    target = target._replace(tensors=as_torch_accepts(target.tensors, {name for each in specs for name in each}))
    attempts = [_attempt(checkpoint, item, each, target, anywhere) for item, each in zip(dicts, specs)]
    best = max(attempts, key=lambda attempt: attempt.rank)
    return _Case(checkpoint, target, attempts, best, key, anywhere, strict)


def _shared_shapes(specs: Mapping[str, Spec], target: MatchTarget) -> int:
    """Return how many values have a shape that the target wants."""
    return (Counter(spec.shape for spec in specs.values()) & Counter(target.shapes.values())).total()


def _attempt(
    checkpoint: Checkpoint, item: StateDict, specs: dict[str, Spec], target: MatchTarget, anywhere: bool
) -> _Attempt:
    filled = fillable(target.tensors) if _is_old(checkpoint, item) else frozenset[str]()
    before, after = ((), ()) if anywhere else _layout(item.path, target.path)
    values = Values(checkpoint, item.path, target.values.rounding if target.values is not None else "")
    pairing = Pairing(values, target.values)
    space = Space(specs, target.tensors, filled, pairing)
    start = space.candidate((), [*specs])
    best = best_renaming(space, start, target.source)
    likely, doubts = best.names, 0
    if not best.fit.complete:
        if len(best.fit.loads) * 2 < min(len(specs), len(target.tensors)):
            best = start  # two models share a few names and shapes by chance
        names = dict(zip(likely, specs.values()))
        left = [{name: spec.shape for name, spec in names.items() if name not in target.tensors}]
        left.append({name: shape for name, shape in target.shapes.items() if name not in names})
        with suppress(RefusedError):
            doubts = len(pair_in_order(*left))
    return _Attempt(item, specs, values, pairing, filled, before, after, start, best, likely, doubts)


def _is_old(checkpoint: Checkpoint, item: StateDict) -> bool:
    """Return whether all modules have versions from before batch norms had counters, or no versions."""
    graph = checkpoint.graph
    entries = mapping(graph, item.metadata) if item.metadata >= 0 else None
    for _, value in entries or ():
        for name, version in mapping(graph, value) or ():
            number = graph.nodes[version]
            if graph.nodes[name] == "version" and type(number) is int and number >= 2:
                return False
    return True


def _layout(have: str, wanted: str) -> tuple[Steps, Steps]:
    """Return the steps that extract a state dict from one path, and the steps that wrap it to be at the other."""
    keys = _string_keys(wanted)
    if have == wanted or keys is None:
        # A state dict cannot be wrapped into a list. Then only names are compared, and a note says so.
        return (), ()
    return ((FixStep("extract", have),) if have else ()), tuple(FixStep("wrap", key) for key in reversed(keys))


def _string_keys(path: str) -> list[str] | None:
    """Return the keys of a path, or None if not all of them are strings."""
    try:
        steps = parse_path(path)
    except TargetError:
        return None  # the path is too long to be spelled, or has a key without a text
    keys = [step for step in steps if isinstance(step, str)]
    return keys if len(keys) == len(steps) else None


def _is_other_model(case: _Case, rest: Comparison, causes: Sequence[Cause]) -> bool:
    """Return whether too few keys load, or are explained, for this to be the same model."""
    same = [cause for cause in causes if cause.kind not in _OTHER_MODELS]
    known = len(rest.loads) + max(sum(len(cause.keys) for cause in same), sum(len(cause.unused) for cause in same))
    return known * 2 < min(len(case.best.specs), len(case.target.tensors))


# -- the fix


def _fix(case: _Case) -> tuple[Steps, Fix | None]:
    """Return the steps and their result. The result is None if there is nothing to do, or nothing helps."""
    best = case.best
    # No edit restores a whole tensor from one rank's part, and no edit of names moves rows.
    if best.misplaced or not case.editable or any(spec.part for spec in best.specs.values()):
        return (), None
    after = case.compared(best.renamed)
    drops: Steps = ()
    dropped: list[str] = []
    counters = [name for name in after.unexpected if name.rpartition(".")[2] in _PROFILED]
    surplus = counters if after.missing or after.sizes else after.unexpected
    if case.strict and surplus and after.loads and (drops := drop_steps(best.renamed, surplus)):
        dropped = surplus
        after = after._replace(unexpected=[name for name in after.unexpected if name not in {*surplus}])
    steps = (*best.before, *best.best.steps, *_copies(case), *drops, *best.after)
    if not steps or (not after.loads and not after.complete):
        return (), None
    before = _loadable(case.checkpoint)
    # A copy of an entry has the device of the file, so this comes last.
    last = tuple(step for step in before if best.ties and step.option == "to")
    steps = (*(step for step in before if step not in last), *steps, *last)
    return steps, _fix_report(case, steps, after, dropped, best.best.agreement)


def _fix_report(case: _Case, steps: Steps, after: Comparison, dropped: list[str], agreement: Agreement) -> Fix:
    left_out = case.left_out
    notes = [f"leaves out the other entries: {join_limited(left_out)}"] if left_out else []
    if dropped:
        profiled = all(name.rpartition(".")[2] in _PROFILED for name in dropped)
        number = pluralize(len(dropped), "counter" if profiled else "key") + " of the profiler thop" * profiled
        notes.append(f"drops {number} that the target does not have: {join_limited(dropped, most=3)}")
    if case.target.values is not None and not agreement.equal:
        notes.append("no values of the target are equal, as after another training: they cannot confirm this")
    return {
        "complete": case.is_good(after),
        "steps": [{"option": option, "value": value} for option, value in edit_options(steps)],
        **differences(after),
        "dropped": dropped,
        "left_out": left_out,
        "notes": notes,
        "command": "",  # see ``match_checkpoint``
    }


def _by_table(case: _Case) -> tuple[tuple[Steps, Fix] | None, str]:
    """Return the step to the names of a built-in table that lead exactly to the target, and its result; None without.

    The values of the result are compared with the target's: what they contradict is not offered, but named.
    """
    checkpoint, target, best = case.checkpoint, case.target, case.best
    in_parts = any(item and not item.tensors_whole for item in (part_of(checkpoint), target.part))
    if in_parts or any(spec.part for spec in best.specs.values()) or not case.editable:
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
    steps = (*_loadable(checkpoint), *best.before, FixStep("to-names", family), *best.after)
    return (steps, _fix_report(case, steps, case.compared(target.tensors), dropped, agreement)), ""


def _in_wrong_place(agreement: Agreement) -> str:
    names = join_limited(list(agreement.contradicted), most=3)
    return f"the target has the same values in another order, or under another name: {names}"


def _can_copy(checkpoint: Checkpoint) -> bool:
    """Return whether a tensor may get a second name: transformers ties what a folder lacks, and copies no more."""
    remote = is_remote(checkpoint.path) and not isinstance(checkpoint.source, FolderSource | MemberSource)
    return (remote or os.path.isfile(checkpoint.path)) and program_of(checkpoint) is None


def _copies(case: _Case) -> Steps:
    """Return the steps that give tensors a second name, as copies, after the state dict was extracted and renamed."""
    path, place = case.checkpoint.path, case.best.path
    base = "" if case.best.before else place
    return tuple(
        FixStep("merge-entry", f"{path}:{spell_key(place, source)}={spell_key(base, name)}")
        for name, source in case.best.ties.items()
    )


def _loadable(checkpoint: Checkpoint) -> Steps:
    """Return the steps that make an output loadable by plain ``torch.load`` on a machine without a GPU."""
    steps = (FixStep("to", "cpu"),) if away(checkpoint) else ()
    from ..sanitize.trial import loadable, options_that_work  # imported late: it needs the sanitizer

    options = None if loadable(checkpoint) else options_that_work(checkpoint)
    if options is None:
        return steps
    return (FixStep("sanitize"), *(FixStep(name.replace("_", "-")) for name in options), *steps)


def _command(case: _Case, steps: Steps) -> str:
    """Return the command line of a fix; "" if the target is neither a file nor a named model."""
    target = case.target
    if not any(step.option in FROM_TARGET for step in steps) or (
        target.kind in ("checkpoint", "lock") and not target.others
    ):
        return case.edit_line(steps)
    if target.kind == "names":
        return ""
    # ``edit --rename-like`` takes a file with one state dict; only ``match`` can take names from other sources.
    return _match_line(
        case, case.checkpoint.path, key=case.key, apply=True, output=suggested_edit(case.checkpoint, "fits")
    )


def _match_line(case: _Case, path: str, **more: Any) -> str:
    """Return the command that matches a path with the same target."""
    target = case.target
    named = target.kind in ("model", "error")
    settings = [Setting(target.kind, target.source)] if named else []
    more["other_key"] = (target.path or ".") if target.others else None
    return str(command("match", path, *([] if named else [target.source]), settings=settings, **more))


# -- what else helps


def _from_program(case: _Case, steps: Steps, fits: bool) -> tuple[str, str]:
    """Return advice and the commands for a program: take its weights out first, then edit these or match them."""
    step = convert_step(case.checkpoint)
    what = "it is a program, which torch.load does not give as a state dict: "
    if not step.commands:
        return what + step.advice, ""
    output, words = step.commands[0].output, [step.line]
    if steps:
        words.append(str(edit_command(output, steps, suggested_output(output, "fits"), None)))
    elif not fits and case.target.kind in ("checkpoint", "lock"):
        words.append(str(command("match", output, case.target.source)))
    return f"{what}take its weights out first", " && ".join(words)


def _renaming(case: _Case, steps: Steps, fix: Fix | None) -> tuple[str, str] | None:
    """Return advice and the command to rename the only layer that the target does not have, if it lacks only one whose
    shapes agree; None otherwise.

    Shapes do not prove that they are the same layer, so this is a question. It is not asked for square matrices, which
    may also be transposed.
    """
    best = case.best
    specs = best.renamed if fix is not None else best.specs
    after = case.compared(specs)
    modules = [{name.rpartition(".")[0] for name in names} for names in (after.unexpected, after.missing)]
    if after.sizes or not after.loads or [len(each) for each in modules] != [1, 1] or best.misplaced:
        return None
    old, new = (each.pop() for each in modules)
    pairs = {name: new + name.removeprefix(old) for name in after.unexpected}
    original = dict(zip(specs, best.specs))
    if not old or not new or NOT_IN_GLOBS & {*old, *new} or {*pairs.values()} != {*after.missing} or not case.editable:
        return None
    for name, other in pairs.items():
        shape = specs[name].shape or ()
        square = len(shape) == 2 and shape[0] == shape[1]
        if square or not agrees(specs[name].shape, case.target.shapes[other]):
            return None
        if best.pairing.rearranged(original[name], other):
            return None
    step = FixStep("rename", f"{old}.*={new}.*")
    words = (*steps, step) if steps else (*_loadable(case.checkpoint), *best.before, step, *best.after)
    what = f"the file has {old} where the target has {new}; if both are the same layer, rename it"
    return what, case.edit_line(words)


def _next(case: _Case, steps: Steps, causes: Sequence[Cause], fix: Fix | None, other_model: bool) -> tuple[str, str]:
    """Return advice for problems that no edit solves, and a command ("" if none exists).

    Both are "" if the fix is complete, or if the causes say what helps.
    """
    best, target = case.best, case.target
    if fix is not None and fix["complete"]:
        return "", ""
    if best.misplaced:
        number = pluralize(len(best.misplaced), "key")
        return f"{number} would load with values in the wrong place: {_in_wrong_place(best.best.agreement)}", ""
    renamed = best.renamed if fix is not None else best.specs
    after = case.compared(renamed)
    if fix is None and other_model:
        return _of_other_model(case), ""
    if not after.sizes:
        if causes or not after.loads:  # strict=False would hide them
            return "", ""
        return f"load_state_dict(..., strict=False) loads the other keys; {not_strict(after, target.tied)}", ""
    bad = [mismatch.key for mismatch in after.sizes]
    drops = drop_steps(renamed, bad) if case.editable else ()
    if not drops or any(not cause.replaceable and cause.kind not in _SOLVED for cause in causes):
        return "", ""
    last = best.after if fix is not None else ()
    words = (*(() if steps else _loadable(case.checkpoint)), *steps[: len(steps) - len(last)], *drops, *last)
    number = pluralize(len(bad), "key")
    message = (
        f"without the {number} of another size, load_state_dict(..., strict=False) loads the others;"
        f" {'this key stays' if len(bad) == 1 else 'these keys stay'} untrained in the model, with initial values"
    )
    return message, case.edit_line(words)


def _of_other_model(case: _Case) -> str:
    """Say why it is not the model of the target."""
    specs, tensors = case.best.specs, case.target.tensors
    same = [name for name in specs if name in tensors]
    if len(same) * 2 >= min(len(specs), len(tensors)):
        sizes = len(case.best.start.fit.sizes)
        return f"{pluralize(len(same), 'name')} agree, and {sizes:,} have another size: it is another size of the model"
    if case.target.kind == "error" and len(specs) == len(tensors):
        return "all names differ, and the message says no shapes: match it with a file of the model instead"
    most = f"{_shared_shapes(specs, case.target):,} of its {pluralize(len(specs), 'value')}"
    return f"it is probably another model: {most} have a shape that the target wants"


def _whole_step(case: _Case, part: Part) -> str:
    """Return the command that matches the whole checkpoint, if the file is one part of it; "" if it is unknown."""
    if not part.folder:
        return ""
    if case.target.kind == "names" or case.target.source == STDIN or folder_format(part.folder) is None:
        return str(command("inspect", part.folder))  # shows which files are there, and which are missing
    return _match_line(case, part.folder, anywhere=case.anywhere, lenient=not case.strict)


def _without_optimizers(case: _Case, others: Sequence[OptimizerReport]) -> tuple[str, str]:
    """Return advice and a command for optimizers that do not fit although the weights do; both "" if there are none."""
    if not others:
        return "", ""
    paths = [escaped(item["path"]) for item in others]
    step = command("drop", case.checkpoint.path, *paths, output=suggested_edit(case.checkpoint, "fits"))
    message = "the weights load, and without the state of the optimizer a training starts with a fresh one"
    return message, str(step) if all(paths) and case.editable else ""


def _notes(case: _Case, doubts: int) -> list[str]:
    notes = []
    checkpoint, target, best, path = case.checkpoint, case.target, case.best, case.best.path
    if case.key is None and len(case.attempts) > 1:
        others = join_limited(
            [
                repr(one.path or ".") + " (fits as well)" * (one.best.fit.rank == best.best.fit.rank)
                for one in case.attempts
                if one.state_dict is not best.state_dict
            ]
        )
        number = pluralize(len(checkpoint.state_dicts), "state dict")
        notes.append(f"there are {number}, and {path or '.'!r} is used; {_KEY} chooses another: {others}")
    averaged = [one.path for one in case.attempts if is_average(one.path) and not is_average(path)]
    if averaged:
        notes.append(f"averaged weights (EMA) are in {averaged[0]!r}: {_KEY} {averaged[0]} takes these instead")
    inside = next(averages_within(checkpoint, best.state_dict), "")
    if inside and best.best.fit.loads:
        steps = (FixStep("use-ema"), *best.before)
        output = suggested_edit(checkpoint, "ema")
        step = edit_command(checkpoint.path, steps, output, None if best.before else path or ".")
        notes.append(f"averaged weights (EMA) are in {inside}*: to load these, match a copy that has them: {step}")
    if target.others:
        others = join_limited([repr(other or ".") for other in target.others])
        notes.append(f"in the target {target.path or '.'!r} is used; {_OTHER_KEY} chooses another: {others}")
    survey = checkpoint.survey
    ours = survey.tensors_in([path])
    shards = sharding_summary(survey.reader, ours) if any(is_sharded(entry.tensor) for entry in ours) else None
    if shards is not None:
        tensors, kinds = pluralize(shards.tensors, "tensor"), join_limited(list(shards.kinds))
        where = f"{tensors} as {shards.owner} had them" if shards.partial else tensors
        notes.append(f"{where} ({kinds}): load_state_dict takes them only into a model that is spread likewise")
    if target.part is not None and not target.part.tensors_whole:
        notes.append(f"the target: {target.part.message}")
    if doubts:
        keys = "1 key would fit" if doubts == 1 else f"{doubts:,} keys would fit"
        notes.append(
            f"{keys} by order and shape under other names, which show neither the order of rows nor a transpose,"
            " and no equal rows prove it: no edit is offered for that"
        )
    if best.state_dict.confidence == "low":
        notes.append(f"{path or '.'!r} may not be a state dict")
    if _string_keys(target.path) is None and path != target.path:
        notes.append(f"the target's is at {target.path!r}, in a list: the place of ours is not compared")
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
