"""Facts about a checkpoint that ``inspect`` and ``validate`` both report: each is found and worded here, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

from ..base.findings import (
    CUT,
    DAMAGED,
    DANGEROUS_CALL,
    DEFLATED,
    EDITED,
    EMPTY_WEIGHTS,
    FLAT_PARAMETERS,
    INNER,
    JOINED,
    MISPLACED,
    NO_INDEX,
    OTHER_FILES,
    PROGRAM,
    STALE_INDEX,
    TRANSFORMED,
    UNJOINED,
    Effect,
    Finding,
    codes,
)
from ..base.records import NamedTuple
from ..base.steps import RENAME_BACK, AnyStep, command, rename_step, undo_step
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Checkpoint, rescue_step
from ..checkpoint.programs import convert_step
from ..files.sources import FolderSource
from ..formats.empty_weights import GATHER, empty_weights
from ..formats.rank_part import WHOLE, Part, part_of, shards_of
from ..safety.calls import has_acting_call, suspicious_calls
from ..safety.storages import storage_flaws
from ..safety.torch_lists import DEFAULT, list_of
from ..safety.weights_only import NOT_UTF8, WRONG_SUFFIX, LoadPrediction, weights_only
from .edit_steps import edit_step, sanitize_step, stops_edits, where_installed

#: The code of a file that torch.load refuses by default.
WEIGHTS_ONLY: Final = "weights-only"
#: Beginnings of classes that torch adds to its list when one of its modules is imported, and that module.
_REGISTERED: Final = (("torch.distributed.", "torch.distributed.tensor"), ("torch._dynamo.", "torch._dynamo"))
#: Codes of damage for which ``salvage`` helps. Compressed or encrypted values are not damaged.
_BLOCKING: Final = {name for name, code in codes().items() if Effect.BLOCKS_EDITS in code.effect} - {TRANSFORMED}


class Facts(NamedTuple):
    """The facts about a checkpoint, each with its next step.

    ``problems`` come from its container, ``others`` do not. ``verdict`` predicts torch.load.
    """

    problems: list[Finding]
    others: list[Finding]
    verdict: LoadPrediction


def facts(checkpoint: Checkpoint, *, read: bool = False, torch: str = DEFAULT, steps: bool = True) -> Facts:
    """Return what is wrong with a checkpoint, what is missing, and why torch.load may refuse it.

    With ``read`` the container is also searched for records and bytes that its directory does not list. Without
    ``steps`` no edit is tried to find a step. A finding of the check ``shards`` or ``part`` with the level "note" says
    that nothing is missing.
    """
    container, survey = checkpoint.container, checkpoint.survey
    flaws = storage_flaws(checkpoint)
    verdict = weights_only(checkpoint, flaws, torch)
    problems = [*container.problems, *(container.audit(survey.reader.storages) if read else ())]
    known = _problem_steps(checkpoint, {problem.code for problem in problems})
    found = []
    for problem in problems:
        elsewhere = problem.code in (INNER, "other-steps", OTHER_FILES) and problem.where
        step = command("inspect", problem.where) if elsewhere else known.get(problem.code, "")
        found.append(problem._replace(next=step))
    plain = sanitize_step(checkpoint) if steps and checkpoint.pickled and not verdict.loads else ""
    return Facts(found, [*_missing(checkpoint, flaws), *_loading(checkpoint, verdict, plain)], verdict)


def _missing(checkpoint: Checkpoint, flaws: Sequence[Finding]) -> Iterator[Finding]:
    survey = checkpoint.survey
    for key in sorted(survey.reader.disagreeing):
        message = f"storage {quoted(key)} is described in two ways; torch takes the first"
        yield Finding("storage-twice", "warning", message, key)
    if empty := empty_weights(checkpoint):
        yield Finding(EMPTY_WEIGHTS, "error", empty, next=GATHER)
    for message, count in Counter(survey.unsupported.values()).items():
        times = f" ({count:,} times)" if count > 1 else ""
        yield Finding("not-followed", "error", f"{message}{times}, which ckptool does not follow")
    if refused := [flaw for flaw in flaws if flaw.refused_by_torch]:
        rescue = rescue_step(checkpoint)
        yield from (flaw._replace(next=rescue) for flaw in refused)
    if (part := part_of(checkpoint)) is not None:
        yield _part(part)
    shards = shards_of(checkpoint)
    if shards is not None and not shards.partial:
        from ..edits.sharded import local_parts_step  # only for sharded tensors

        message = f"{pluralize(shards.tensors, 'tensor')} spread over {shards.over}, each of them whole in this file"
        yield Finding("shards", "note", message, next=local_parts_step(checkpoint))


def _part(part: Part) -> Finding:
    """Return the finding for a file that is one part of a checkpoint, with the command for the whole."""
    alone: AnyStep = part.whole if part.cut else "get the missing parts into this folder" if part.alone else ""
    step: AnyStep = command("inspect", part.folder) if part.folder else alone
    level = "error" if part.alone and part.level != "note" else part.level
    return Finding(part.code, level, part.message, next=step)


def dangerous_call(calls: Sequence[str], where: str = "", next: AnyStep = "") -> Finding:
    """Return the finding for functions that loading a pickle would call."""
    message = f"torch.load(weights_only=False) would run {join_limited(calls, most=3)}"
    return Finding(DANGEROUS_CALL, "error", message, where, next=next)


def _loading(checkpoint: Checkpoint, verdict: LoadPrediction, plain: AnyStep) -> Iterator[Finding]:
    """Yield what loading the file would run, or why torch.load refuses it by default; ``plain`` makes it loadable."""
    calls = suspicious_calls(checkpoint.graph)
    if calls and has_acting_call(checkpoint.graph):
        yield dangerous_call(calls, next="do not load it; delete it, or report it where it came from")
    elif calls:
        trust = "load it only if you trust the one who made it"
        yield dangerous_call(calls, next=plain or trust)
    if not checkpoint.pickled:
        suffix = checkpoint.container.misnamed(checkpoint.source)
        for rule in _rules(checkpoint, verdict) if suffix else ():
            yield Finding(WEIGHTS_ONLY, "warning", rule, next=rename_step(checkpoint.path, suffix))
    elif not verdict.loads:
        yield from _refusal(checkpoint, verdict, plain)


def _rules(checkpoint: Checkpoint, verdict: LoadPrediction) -> list[str]:
    """Return the rules that a file breaks, except those that problems of its container name."""
    known = {problem.message for problem in checkpoint.container.problems}
    return [blocker.rule for blocker in verdict.blockers if blocker.rule and blocker.rule not in known]


def _refusal(checkpoint: Checkpoint, verdict: LoadPrediction, plain: AnyStep) -> Iterator[Finding]:
    """Yield why torch.load refuses a pickle: the globals that it names, or else the rules that it breaks."""
    names = [blocker.name for blocker in verdict.blockers if blocker.name]
    rules, call = _rules(checkpoint, verdict), "torch.load(weights_only=True)"
    step: AnyStep = ""
    modules = [module for start, module in _REGISTERED if names and all(_begins(name, start) for name in names)]
    if modules:
        message = f"{call} takes {join_limited(names, most=2)} only when {modules[0]} is imported"
        step = f"import {modules[0]} before torch.load"
    elif names:
        message = f"{call} refuses it: {join_limited(names)} not on {list_of(verdict.torch, names)}"
        if any(blocker.called for blocker in verdict.blockers):
            message += f"; with weights_only=False {'its' if len(names) == 1 else 'their'} code runs"
        step = plain or where_installed(checkpoint, names)
    elif rules and not any(problem.refused_by_torch for problem in checkpoint.container.problems):
        message = f"{call} refuses it: {join_limited(_rule_texts(rules, checkpoint.graph.style.protocol))}"
        if any(rule.startswith("opcode") or rule in (NOT_UTF8, WRONG_SUFFIX) for rule in rules):
            step = plain
    else:
        return
    yield Finding(WEIGHTS_ONLY, "warning", message, next=step)


def _begins(name: str, start: str) -> bool:
    return name.startswith(start) and not name.startswith("torch.distributed._shard")


def _rule_texts(rules: Sequence[str], protocol: int) -> list[str]:
    """Return the rules that stop weights_only, with the opcodes of a newer protocol as one rule."""
    opcodes = [rule.removeprefix("opcode ") for rule in rules if rule.startswith("opcode ")]
    others = [rule for rule in rules if not rule.startswith("opcode ")]
    if len(opcodes) > 1 and protocol != 2:
        return [f"it was saved with pickle protocol {protocol}, weights_only reads protocol 2", *others]
    return [f"its pickle uses {join_limited(opcodes)}", *others] if opcodes else others


def _problem_steps(checkpoint: Checkpoint, codes: Collection[str]) -> dict[str, AnyStep]:
    """Map these codes of container problems to the next step; codes without a step may be missing or have ""."""
    path = checkpoint.path
    # Functions, because each step looks for a free file name, and most files have no problem.
    known: dict[str, Callable[[], AnyStep]] = {
        CUT: lambda: rescue_step(checkpoint),
        "legacy-untyped": lambda: sanitize_step(checkpoint),
        DAMAGED: lambda: "get the file again",
        UNJOINED: lambda: WHOLE,
        MISPLACED: lambda: RENAME_BACK,
        "torch-tar": lambda: edit_step("convert", path, word="converted"),
        "unpacked": lambda: edit_step("convert", path, extension=".pth"),
        "in-pieces": lambda: edit_step("convert", path, extension=".safetensors"),
        JOINED: lambda: weights_step(checkpoint),
        "unfinished-edit": lambda: undo_step(path),
        PROGRAM: lambda: convert_step(checkpoint) if checkpoint.survey.tensors else "",
        **dict.fromkeys(
            (DEFLATED, NO_INDEX, STALE_INDEX, "no-folder", EDITED),
            lambda: edit_step("edit", path, word="clean", repack=True),
        ),
    }
    if isinstance(checkpoint.source, FolderSource):
        known = {**dict.fromkeys(_BLOCKING, known[CUT]), **known}
    return {code: known[code]() for code in codes if code in known}


def weights_step(checkpoint: Checkpoint) -> AnyStep:
    """Return the command that makes one file of weights that are in pieces, or "" if some are missing."""
    survey = checkpoint.survey
    chosen = [item for item in survey.state_dicts if item.confidence == "high"]
    if not (checkpoint.container.in_pieces and chosen) or any(
        stops_edits(item) or item.code == FLAT_PARAMETERS for item in checkpoint.container.problems
    ):
        return ""
    path = chosen[0].path
    tensors = survey.tensors_in([path])
    storages = [entry.tensor.storage for entry in tensors if entry.tensor.storage]
    whole = len(chosen[0].items) if path else len(survey.entries)
    tied, others = len(set(storages)) < len(storages), len(tensors) < whole
    return edit_step(
        "convert",
        checkpoint.path,
        extension=".safetensors",
        key=path,
        tied="keep-first" if tied else "",
        allow_loss="entries" if others else "",
    )
