"""A complete match: the intended state dict, the keys that fit unchanged, and the fix. Schema ``ckptool.match/1``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ...base.errors import CkptoolError
from ...base.patterns import escaped
from ...base.records import NamedTuple
from ...base.steps import STDIN, Setting, advised, command, is_remote, suggested_output
from ...base.text import join_limited, pluralize
from ...checkpoint.checkpoint import Checkpoint, away
from ...checkpoint.paths import spell_key
from ...checkpoint.programs import convert_step, program_of
from ...checkpoint.sharding import sharding_summary
from ...checkpoint.tensors import is_sharded
from ...files.sources import FolderSource, MemberSource
from ...formats import folder_format
from ...formats.empty_weights import empty_weights, gather_step
from ...formats.opening import CheckpointOrPath, opened
from ...formats.rank_part import Part, part_of
from ...safety.calls import suspicious_calls
from ...safety.storages import storage_flaws
from ..averages import is_average
from ..outputs import suggested_edit
from .attempts import Attempt, Steps, attempt, likely_dicts, shared_shapes, string_keys
from .causes import causes_of, with_own_step
from .drops import drop_steps
from .fused import Side
from .inferred import inferred_recipe
from .names import (
    Cause,
    Comparison,
    as_torch_accepts,
    averaged_without_dots,
    compare,
    family_of,
    renamed_module,
    renamed_weight_norm,
)
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
from .search import (
    FROM_TARGET,
    LAYOUT,
    FixStep,
    edit_command,
    edit_options,
)
from .targets import MatchTarget, comparable, match_target, specs_of, target_in_error
from .ties import find_ties, tied_causes
from .values import Agreement, Pairing, Values

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
    dicts = likely_dicts(checkpoint, key, target)
    ours = [spec for item in dicts for spec in specs_of(checkpoint, item).items()]
    target = comparable(target, (spec for _, spec in ours))
    target = target._replace(tensors=as_torch_accepts(target.tensors, {name for name, _ in ours}))
    attempts = [attempt(checkpoint, item, target, anywhere) for item in dicts]
    best = max(attempts, key=lambda candidate: candidate.rank)
    placed = not best.before and not best.after
    now = compare(best.specs, target.tensors, best.filled)
    likely = dict(zip(best.likely, best.specs.values()))
    rest = compare(likely, target.tensors, best.filled)
    here = Side(likely, best.values, dict(zip(best.likely, best.specs)))
    there = Side(target.tensors, target.values, {})
    causes = causes_of(here, there, rest)
    trained = any(cause.kind == "adapter" for cause in causes)  # no edit may leave it out, or ask for it
    causes, own_step = with_own_step(checkpoint, target, causes, now if placed else None)
    ties = find_ties(here, there, target.tied, rest.missing) if strict else []
    solvable = [*tied_causes(ties, here), *renamed_weight_norm(zip(best.specs, best.best.names))]
    best = best._replace(ties={tie.name: here.label(tie.source) for tie in ties if _can_copy(checkpoint)})
    other_model = _is_other_model(rest, causes, best, target)
    steps, fix = _fix(checkpoint, target, best, strict) if not other_model and not trained else ((), None)
    refuted: list[str] = []
    if not (placed and _is_good(now, strict)) and not (fix and fix["complete"]) and not trained:
        by_recipe = _by_recipe(checkpoint, target, best, inferred_recipe(here, there, rest), refuted)
        if by_recipe is not None:
            (steps, fix), other_model, solvable, refuted = by_recipe, False, causes, []
        other_model = other_model and not refuted
    program = program_of(checkpoint)
    loads = placed and _is_good(now, strict) and not best.misplaced and program is None
    groups = group_sizes(checkpoint)
    optimizers = compare_optimizers(groups, target.groups)
    others = [item for item in optimizers if not item["fits"]]
    fits = loads and not others
    solved = loads or (fix is not None and fix["complete"])
    part = None if solved else part_of(checkpoint)
    incomplete = fix is not None and not fix["complete"]
    if incomplete and any(item is not None and not item.tensors_whole for item in (part, target.part)):
        steps, fix = (), None  # values that fit by shape, such as a bias, may be one part of a sum
    edited = _edited_key(checkpoint, best, steps)
    if fix is not None:
        fix["command"] = _command(checkpoint, target, steps, edited, key)
    shown: list[Cause] = []
    renaming: tuple[str, str] | None = None
    if loads:
        next_step = _without_optimizers(checkpoint, others)
    elif part is not None:
        advice = part.message if part.folder else f"{part.message}; {part.whole}"
        next_step = advice, _whole_step(part, target, anywhere, strict)
    elif not solved and (empty := empty_weights(checkpoint)):
        gather = gather_step(checkpoint)
        next_step = advised(empty, gather), gather.line
    else:
        renaming = _renaming(checkpoint, target, best, steps, fix)
        next_step = _next(checkpoint, target, best, steps, [*causes, *solvable], fix, other_model, renaming)
        next_step = ("", str(own_step)) if own_step else next_step
        shown = solvable if solved else [] if other_model and fix is None else [*causes, *solvable]
    if program is not None and not (other_model or part):
        complete = fix is not None and fix["complete"]
        next_step = _from_program(checkpoint, target, steps if complete else (), complete or _is_good(now, strict))
        steps, fix = (), None
    notes = _notes(checkpoint, target, best, attempts, key, doubts=best.doubts if renaming is None else 0)
    notes += refuted
    if not target.groups and target.kind != "error" and (loads or (fix is not None and fix["complete"])):
        notes += other_number(groups, target.tensors, target.tied)
    report: MatchReport = {
        "schema": "ckptool.match/1",
        "path": checkpoint.path,
        "target": target.source,
        "target_kind": target.kind,
        "state_dict": best.state_dict.path,
        "target_state_dict": target.path,
        "strict": strict,
        "fits": fits,
        "placed": placed,
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


def _fix(checkpoint: Checkpoint, target: MatchTarget, best: Attempt, strict: bool) -> tuple[Steps, Fix | None]:
    """Return the steps and their result. The result is None if there is nothing to do, or nothing helps."""
    if not _is_editable(checkpoint) or any(spec.part for spec in best.specs.values()):
        return (), None  # no edit restores a whole tensor from one rank's part
    if best.misplaced:
        return (), None  # no edit of names moves rows
    after = compare(best.renamed, target.tensors, best.filled)
    drops: Steps = ()
    dropped: list[str] = []
    counters = [name for name in after.unexpected if name.rpartition(".")[2] in _PROFILED]
    rest = [name for name in after.unexpected if name.rpartition(".")[2] not in _PROFILED]
    surplus = counters if after.missing or after.sizes else after.unexpected
    if strict and surplus and after.loads:
        drops = drop_steps(best.renamed, surplus)
        if drops:
            dropped = surplus
            after = after._replace(unexpected=[] if surplus == after.unexpected else rest)
    steps = (*best.before, *best.best.steps, *_copies(checkpoint, best), *drops, *best.after)
    if steps:
        before = _loadable(checkpoint)
        # A copy of an entry has the device of the file, so this comes last.
        last = tuple(step for step in before if best.ties and step.option == "to")
        steps = (*(step for step in before if step not in last), *steps, *last)
    if not steps or (not after.loads and not after.complete):
        return (), None
    left_out = _left_out(checkpoint, best) if best.before else []
    guess = any(step.guess for step in steps)
    notes = _losses(left_out, dropped) + _unproven(target, best.agreement)
    if guess:
        notes.append("the order of the keys says which is which, their names do not: check a value or two")
    fix: Fix = {
        "complete": _is_good(after, strict),
        "steps": [{"option": option, "value": value} for option, value in edit_options(steps)],
        **differences(after),
        "dropped": dropped,
        "left_out": left_out,
        "guess": guess,
        "notes": notes,
        "command": "",  # see ``match_checkpoint``
    }
    return steps, fix


def _losses(left_out: Sequence[str], dropped: Sequence[str]) -> list[str]:
    """Return the notes on entries and keys that the output of a fix lacks."""
    notes = [f"leaves out the other entries: {join_limited(left_out)}"] if left_out else []
    if dropped:
        profiled = all(name.rpartition(".")[2] in _PROFILED for name in dropped)
        number = pluralize(len(dropped), "counter" if profiled else "key") + " of the profiler thop" * profiled
        notes.append(f"drops {number} that the target does not have: {join_limited(dropped, most=3)}")
    return notes


def _in_wrong_place(agreement: Agreement) -> str:
    names = join_limited(list(agreement.contradicted), most=3)
    return f"the target has the same values in another order, or under another name: {names}"


def _unproven(target: MatchTarget, agreement: Agreement) -> list[str]:
    """Return a note if the target has values, and none of them shows whether a fit is right."""
    note = "no values of the target are equal, as after another training: they cannot confirm this"
    return [] if target.values is None or agreement.equal else [note]


def _by_recipe(
    checkpoint: Checkpoint, target: MatchTarget, best: Attempt, inferred: str, refuted: list[str]
) -> tuple[Steps, Fix] | None:
    """Return the step to the layout of the target and its result: by a built-in recipe that leads there exactly, or by
    the inferred one; None without either.

    The values of the result are compared with the target's. What they contradict is added to ``refuted`` instead.
    """
    in_parts = any(item and not item.tensors_whole for item in (part_of(checkpoint), target.part))
    if in_parts or any(spec.part for spec in best.specs.values()) or not _is_editable(checkpoint):
        return None  # shapes of one rank's part say nothing about the whole
    from ..recipes import leading_to  # imported late: it reads all recipes

    wanted = {name: spec.shape for name, spec in target.tensors.items()}
    family, dropped = leading_to(checkpoint, best.state_dict.path or ".", wanted)
    choices = [FixStep("to-names", family)] if family else []
    for step in (*choices, FixStep("recipe", inferred)) if inferred else choices:
        try:
            agreement = _agreement_after(checkpoint, target, best, step)
        except CkptoolError:
            continue  # the recipe lacks a number
        if not agreement.contradicted:
            break
        what = f"the names of {step.value}" if step.option == "to-names" else "the rules that the shapes suggest"
        refuted.append(f"{what} are not offered: {_in_wrong_place(agreement)}")
    else:
        return None
    left_out = _left_out(checkpoint, best) if best.before else []
    fix: Fix = {
        "complete": True,
        "steps": [],
        **differences(compare(target.tensors, target.tensors, best.filled)),
        "dropped": dropped,
        "left_out": left_out,
        "guess": False,
        "notes": _losses(left_out, dropped) + _unproven(target, agreement),
        "command": "",  # see ``match_checkpoint``
    }
    steps = (*_loadable(checkpoint), *best.before, step, *best.after)
    fix["steps"] = [{"option": option, "value": value} for option, value in edit_options(steps)]
    return steps, fix


def _agreement_after(checkpoint: Checkpoint, target: MatchTarget, best: Attempt, step: FixStep) -> Agreement:
    """Compare the values that a recipe makes with the target's; of large computed tensors, read one of each family."""
    if target.values is None:
        return Agreement(0, ())
    from ...formats.recipes.recipe import parsed_recipe
    from ..recipes import apply_recipe, named_as

    place, inferred = best.state_dict.path, step.option == "recipe"
    recipe = parsed_recipe(step.value) if inferred else ""
    key = place or "."
    made = apply_recipe(checkpoint, recipe, key=key) if inferred else named_as(checkpoint, step.value, key=key)
    families = {family_of(name): name for name in target.tensors}
    values = Values(made, place, target.values.rounding, {*families.values()})
    return Pairing(values, target.values).agreement((name, name) for name in target.tensors)


def _can_copy(checkpoint: Checkpoint) -> bool:
    """Return whether a tensor may get a second name: transformers ties what a folder lacks, and copies no more."""
    remote = is_remote(checkpoint.path) and not isinstance(checkpoint.source, FolderSource | MemberSource)
    return (remote or os.path.isfile(checkpoint.path)) and program_of(checkpoint) is None


def _copies(checkpoint: Checkpoint, best: Attempt) -> Steps:
    """Return the steps that give tensors a second name, as copies, after the state dict was extracted and renamed."""
    place = best.state_dict.path
    return tuple(
        FixStep(
            "merge-entry",
            f"{checkpoint.path}:{spell_key(place, source)}={spell_key('' if best.before else place, name)}",
        )
        for name, source in best.ties.items()
    )


def _from_program(checkpoint: Checkpoint, target: MatchTarget, steps: Steps, fits: bool) -> tuple[str, str]:
    """Return advice and the commands for a program: take its weights out first, then edit these or match them."""
    step = convert_step(checkpoint)
    what = "it is a program, which torch.load does not give as a state dict: "
    if not step.commands:
        return what + step.advice, ""
    output, words = step.commands[0].output, [step.line]
    if steps:
        words.append(str(edit_command(output, steps, suggested_output(output, "fits"), None)))
    elif not fits and target.kind in ("checkpoint", "lock"):
        words.append(str(command("match", output, target.source)))
    return f"{what}take its weights out first", " && ".join(words)


def _loadable(checkpoint: Checkpoint) -> Steps:
    """Return the steps that make an output loadable by plain ``torch.load`` on a machine without a GPU."""
    steps = (FixStep("to", "cpu"),) if away(checkpoint) else ()
    from ..sanitize.trial import loadable, options_that_work  # imported late: it needs the sanitizer

    options = None if loadable(checkpoint) else options_that_work(checkpoint)
    if options is None:
        return steps
    return (FixStep("sanitize"), *(FixStep(name.replace("_", "-")) for name in options), *steps)


def _is_editable(checkpoint: Checkpoint) -> bool:
    """Return whether an edit may be suggested: the file is whole, and its pickle runs no command."""
    problems = checkpoint.container.problems
    whole = not any(problem.blocks_edits or problem.ambiguous for problem in problems)
    return whole and not storage_flaws(checkpoint) and not suspicious_calls(checkpoint.graph)


def _is_good(comparison: Comparison, strict: bool) -> bool:
    if strict:
        return comparison.complete
    return bool(comparison.loads or not comparison.missing) and not comparison.sizes


def _is_other_model(rest: Comparison, causes: Sequence[Cause], best: Attempt, target: MatchTarget) -> bool:
    """Return whether too few keys load, or are explained, for this to be the same model."""
    if any(cause.kind == "adapter" for cause in causes):
        return False
    same = [cause for cause in causes if cause.kind not in _OTHER_MODELS]
    known = len(rest.loads) + max(sum(len(cause.keys) for cause in same), sum(len(cause.unused) for cause in same))
    return known * 2 < min(len(best.specs), len(target.tensors))


def _left_out(checkpoint: Checkpoint, best: Attempt) -> list[str]:
    """Return the top-level entries that are lost when the state dict is extracted."""
    path = best.state_dict.path
    return [
        entry.key
        for entry in checkpoint.survey.entries
        if not (path.startswith(entry.path) and path[len(entry.path) : len(entry.path) + 1] in ("", ".", "["))
    ]


def _edited_key(checkpoint: Checkpoint, best: Attempt, steps: Sequence[FixStep]) -> str | None:
    """Return the path of the state dict that the steps must name, or None if they need not.

    They must name it if there are others, if it is uncertain that this is one, or if entries beside it could have the
    names of dropped keys.
    """
    renames = any(step.option not in LAYOUT for step in steps)
    drops = any(step.option == "drop" for step in steps)
    if best.before or not (renames or drops):
        return None
    sure = [item for item in checkpoint.state_dicts if item.confidence == "high"]
    path = best.state_dict.path
    return None if sure == [best.state_dict] and not (drops and path) else path or "."


def _command(
    checkpoint: Checkpoint, target: MatchTarget, steps: Sequence[FixStep], edited: str | None, key: str | None
) -> str:
    """Return the command line of a fix; "" if the target is neither a file nor a named model."""
    output = suggested_edit(checkpoint, "fits")
    from_target = any(step.option in FROM_TARGET for step in steps)
    has_file = not any(step.option == "recipe" for step in steps)  # an inferred recipe has none
    if not from_target or (has_file and target.kind in ("checkpoint", "lock") and not target.others):
        return str(edit_command(checkpoint.path, steps, output, edited))
    if target.kind == "names":
        return ""
    # ``edit --rename-like`` takes a file with one state dict; only ``match`` can take names from other sources.
    paths = [checkpoint.path, *([] if target.kind in ("model", "error") else [target.source])]
    named = [Setting(target.kind, target.source)] if target.kind in ("model", "error") else []
    other_key = (target.path or ".") if target.others else None
    return str(command("match", *paths, output=output, settings=named, key=key, other_key=other_key, apply=True))


def _renaming(
    checkpoint: Checkpoint, target: MatchTarget, best: Attempt, steps: Steps, fix: Fix | None
) -> tuple[str, str] | None:
    """Return advice and the command to rename the only module whose name differs; None if there is no such module."""
    specs = best.renamed if fix is not None else best.specs
    after = compare(specs, target.tensors, best.filled)
    names = renamed_module(after, {name: spec.shape for name, spec in specs.items()}, target.shapes)
    if names is None or not _is_editable(checkpoint) or best.misplaced:
        return None
    own, other = names
    pairing, original = Pairing(best.values, target.values), dict(zip(specs, best.specs))
    if any(pairing.rearranged(original[name], other + name.removeprefix(own)) for name in after.unexpected):
        return None
    step = FixStep("rename", f"{own}.*={other}.*")
    words = (*steps, step) if steps else (*_loadable(checkpoint), *best.before, step, *best.after)
    edited = _edited_key(checkpoint, best, words)
    line = str(edit_command(checkpoint.path, words, suggested_edit(checkpoint, "fits"), edited))
    return f"the file has {own} where the target has {other}; if both are the same layer, rename it", line


def _next(
    checkpoint: Checkpoint,
    target: MatchTarget,
    best: Attempt,
    steps: Steps,
    causes: Sequence[Cause],
    fix: Fix | None,
    other_model: bool,
    renaming: tuple[str, str] | None,
) -> tuple[str, str]:
    """Return advice for problems that no edit solves, and a command ("" if none exists).

    Both are "" if the fix is complete, or if the causes say what helps. ``renaming`` comes from ``_renaming``.
    """
    if fix is not None and fix["complete"]:
        return "", ""
    if best.misplaced:
        number = pluralize(len(best.misplaced), "key")
        return f"{number} would load with values in the wrong place: {_in_wrong_place(best.agreement)}", ""
    renamed = best.renamed if fix is not None else best.specs
    after = compare(renamed, target.tensors, best.filled)
    if renaming is not None:
        return renaming
    if fix is None and other_model:
        count = pluralize(len(best.specs), "value")
        same = [name for name in best.specs if name in target.tensors]
        if len(same) * 2 >= min(len(best.specs), len(target.tensors)):
            sizes = compare(best.specs, target.tensors, best.filled).sizes
            agree = f"{pluralize(len(same), 'name')} agree, and {len(sizes):,} have another size"
            return f"{agree}: it is another size of the model", ""
        if target.kind == "error" and len(best.specs) == len(target.tensors):
            return "all names differ, and the message says no shapes: match it with a file of the model instead", ""
        most = f"{shared_shapes(best.specs, target):,} of its {count} have a shape that the target wants"
        return f"it is probably another model: {most}", ""
    if not after.sizes:
        if causes or not after.loads:  # strict=False would hide them
            return "", ""
        return f"load_state_dict(..., strict=False) loads the other keys; {not_strict(after, target.tied)}", ""
    bad = [mismatch.key for mismatch in after.sizes]
    drops = drop_steps(renamed, bad) if _is_editable(checkpoint) else ()
    others = [cause for cause in causes if not cause.replaceable and cause.kind not in _SOLVED]
    if not drops or others:
        return "", ""
    last = best.after if fix is not None else ()
    edited = _edited_key(checkpoint, best, (*steps, *drops))
    words = (*(() if steps else _loadable(checkpoint)), *steps[: len(steps) - len(last)], *drops, *last)
    number = pluralize(len(bad), "key")
    message = (
        f"without the {number} of another size, load_state_dict(..., strict=False) loads the others;"
        f" {'this key stays' if len(bad) == 1 else 'these keys stay'} untrained in the model, with initial values"
    )
    return message, str(edit_command(checkpoint.path, words, suggested_edit(checkpoint, "fits"), edited))


def _whole_step(part: Part, target: MatchTarget, anywhere: bool, strict: bool) -> str:
    """Return the command that matches the whole checkpoint, if the file is one part of it; "" if it is unknown."""
    if not part.folder:
        return ""
    if target.kind == "names" or target.source == STDIN or folder_format(part.folder) is None:
        return str(command("inspect", part.folder))  # shows which files are there, and which are missing
    files = [] if target.kind in ("model", "error") else [target.source]
    source = [] if files else [Setting(target.kind, target.source)]
    other_key = (target.path or ".") if target.others else None
    more: dict[str, Any] = {"other_key": other_key, "anywhere": anywhere, "lenient": not strict}
    return str(command("match", part.folder, *files, settings=source, **more))


def _without_optimizers(checkpoint: Checkpoint, others: Sequence[OptimizerReport]) -> tuple[str, str]:
    """Return advice and a command for optimizers that do not fit although the weights do; both "" if there are none."""
    if not others:
        return "", ""
    paths = [escaped(item["path"]) for item in others]
    step = command("drop", checkpoint.path, *paths, output=suggested_edit(checkpoint, "fits"))
    possible = all(paths) and _is_editable(checkpoint)
    message = "the weights load, and without the state of the optimizer a training starts with a fresh one"
    return message, str(step) if possible else ""


def _notes(
    checkpoint: Checkpoint,
    target: MatchTarget,
    best: Attempt,
    attempts: Sequence[Attempt],
    key: str | None,
    doubts: int,
) -> list[str]:
    notes = []
    path = best.state_dict.path
    if key is None and len(attempts) > 1:
        others = join_limited(
            [
                repr(one.state_dict.path or ".") + " (fits as well)" * (one.best.score == best.best.score)
                for one in attempts
                if one.state_dict is not best.state_dict
            ]
        )
        number = pluralize(len(checkpoint.state_dicts), "state dict")
        notes.append(f"there are {number}, and {path or '.'!r} is used; {_KEY} chooses another: {others}")
    averaged = [one.state_dict.path for one in attempts if is_average(one.state_dict.path) and not is_average(path)]
    if averaged:
        notes.append(f"averaged weights (EMA) are in {averaged[0]!r}: {_KEY} {averaged[0]} takes these instead")
    inside = averaged_without_dots([name for name in best.renamed if name not in target.tensors], target.tensors)
    if inside and best.best.score.loads:
        steps = (FixStep("use-ema"), *best.before)
        place = None if best.before else path or "."
        step = edit_command(checkpoint.path, steps, suggested_edit(checkpoint, "ema"), place)
        notes.append(
            f"averaged weights (EMA) are in {inside}* under names without dots; to load these, match a copy with them"
            f" under the names of the model: {step}"
        )
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
            f"{keys} by order or shape under other names, which show neither the order of rows nor a transpose,"
            " and no equal rows prove it: no edit is offered for that"
        )
    if best.state_dict.confidence == "low":
        notes.append(f"{path or '.'!r} may not be a state dict")
    if string_keys(target.path) is None and path != target.path:
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
