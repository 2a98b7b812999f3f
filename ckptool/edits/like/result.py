"""A whole match: which state dict is meant, what fits as it stands, and the fix. Schema ``ckptool.match/1``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence
from shlex import quote
from typing import Any, Final, NamedTuple

from ...base.errors import TargetError
from ...base.globs import Globs
from ...base.text import counted, listed
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.objects import mapping
from ...checkpoint.paths import parse_path
from ...checkpoint.sharding import is_sharded, sharding_summary
from ...checkpoint.survey import StateDict
from .comparison import Comparison, Difference, Shaped, compared, fillable
from .search import Found, search
from .steps import LAYOUT, Step, command_words, cost, pairs_of
from .wanted import Wanted, chosen_of, names_of

#: State dicts that a fix is searched for; the rest is judged by its shapes.
_TRIED: Final = 4
#: Patterns that a fix may drop keys by.
_DROPS: Final = 4
#: Modules of which a table is drawn, and the segments of their names.
_GROUPS: Final = 12
_DEEPEST: Final = 6


class Match(NamedTuple):
    """``report`` is what ``ckptool match --format json`` prints; ``steps`` make it fit as far as it can, on the state
    dict at ``key``; None where nothing does."""

    report: dict[str, Any]
    steps: tuple[Step, ...] | None
    key: str | None


class _Tried(NamedTuple):
    """One state dict of ours against the target: ``layout`` are the steps that bring it to its place, before and
    after the others; None where no step does."""

    item: StateDict
    names: dict[str, Shaped]
    filled: frozenset[str]
    before: tuple[Step, ...]
    after: tuple[Step, ...]
    found: Found

    @property
    def rank(self) -> tuple[bool, int, int, float]:
        """Larger is better; of two that fit as well the one with fewer steps."""
        steps = (*self.before, *self.found.steps, *self.after)
        return (not self.found.score.problems, *self.found.score.rank, -cost(steps))


def match_checkpoint(
    checkpoint: Checkpoint,
    wanted: Wanted,
    *,
    key: str | None = None,
    anywhere: bool = False,
    strict: bool = True,
) -> Match:
    """Match a checkpoint with a target.

    ``key`` is the path of the state dict that is meant (default: the one that fits best). With ``anywhere`` it does
    not matter where in the file it stands. Without ``strict`` missing and unexpected keys are no obstacle.
    Raises TargetError where there is no state dict.
    """
    tried = [_try(checkpoint, item, wanted, anywhere) for item in _likely(checkpoint, key, wanted)]
    best = max(tried, key=lambda one: one.rank)
    placed = not best.before and not best.after
    now = compared(best.names, wanted.tensors, best.filled)
    steps, fix = _fix(checkpoint, wanted, best, now, strict)
    fits = placed and _good(now, strict)
    asked = _edited_key(checkpoint, best, steps)
    report = {
        "schema": "ckptool.match/1",
        "path": checkpoint.path,
        "target": wanted.source,
        "target_kind": wanted.kind,
        "state_dict": best.item.path,
        "target_state_dict": wanted.path,
        "strict": strict,
        "fits": fits,
        "placed": placed,
        "keys": len(best.names),
        "wanted": len(wanted.tensors),
        "loads": len(now.loads),
        **_account(now),
        "modules": _modules(now),
        "fix": None if fix is None else fix | {"command": _command(checkpoint, wanted, steps, asked, key)},
        **dict(zip(("next", "next_command"), ("", "") if fits else _next(checkpoint, wanted, best, steps, now, fix))),
        "notes": _notes(checkpoint, wanted, best, tried, key),
    }
    return Match(report, None if fix is None and not fits else steps, asked)


def _likely(checkpoint: Checkpoint, key: str | None, wanted: Wanted) -> list[StateDict]:
    """The state dicts that may be meant; of many those that share most shapes with the target."""
    found = chosen_of(checkpoint, key)
    if len(found) <= _TRIED:
        return found
    there = Counter(value.shape for value in wanted.tensors.values())

    def shared(item: StateDict) -> tuple[bool, int]:
        shapes = Counter(value.shape for value in names_of(checkpoint, item).values())
        return item.path == wanted.path, (shapes & there).total()

    return sorted(found, key=shared, reverse=True)[:_TRIED]


def _try(checkpoint: Checkpoint, item: StateDict, wanted: Wanted, anywhere: bool) -> _Tried:
    names = names_of(checkpoint, item)
    filled = fillable(wanted.tensors) if _old(checkpoint, item) else frozenset[str]()
    before, after = ((), ()) if anywhere else _layout(item.path, wanted.path)
    shapes = {name: value.shape for name, value in wanted.tensors.items()}
    found = search(list(names), [value.shape for value in names.values()], shapes, filled, wanted.source)
    return _Tried(item, names, filled, before, after, found)


def _old(checkpoint: Checkpoint, item: StateDict) -> bool:
    """Are the modules that wrote it of a version, if any, from before the counters of batch norms?"""
    graph = checkpoint.graph
    entries = mapping(graph, item.metadata) if item.metadata >= 0 else None
    for _, value in entries or ():
        for name, version in mapping(graph, value) or ():
            number = graph.nodes[version]
            if graph.nodes[name] == "version" and type(number) is int and number >= 2:
                return False
    return True


def _layout(have: str, wanted: str) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps that take a state dict out at the one path, and put it where the other is."""
    keys = _keys(wanted)
    if have == wanted or keys is None:
        # Nothing is wrapped into a list: then only names count, and a note says so.
        return (), ()
    return ((Step("extract", have),) if have else ()), tuple(Step("wrap", key) for key in reversed(keys))


def _keys(path: str) -> list[str] | None:
    """The keys that a path leads by, None where there are others than texts."""
    try:
        steps = parse_path(path)
    except TargetError:
        return None  # a path that is too long to be spelled, or has a key that is no text
    keys = [step for step in steps if isinstance(step, str)]
    return keys if len(keys) == len(steps) else None


def _fix(
    checkpoint: Checkpoint, wanted: Wanted, best: _Tried, now: Comparison, strict: bool
) -> tuple[tuple[Step, ...], dict[str, Any] | None]:
    """The steps, and what they come to; None where there is nothing to do, or nothing helps."""
    renamed = dict(zip(best.found.names, best.names.values()))
    after = compared(renamed, wanted.tensors, best.filled)
    drops: tuple[Step, ...] = ()
    dropped: list[str] = []
    if strict and after.unexpected and not after.missing and not after.sizes and after.loads:
        drops = _drops(renamed, after.unexpected)
        if drops:
            dropped = after.unexpected
            after = after._replace(unexpected=[])
    steps = (*best.before, *best.found.steps, *drops, *best.after)
    worth = len(after.loads) * 2 >= min(len(best.names), len(wanted.tensors))
    if not steps or not worth or (not after.loads and not after.complete):
        return (), None
    gone = _left_out(checkpoint, best) if best.before else []
    notes = []
    if gone:
        notes.append(f"leaves out what stands beside it: {listed(gone)}")
    if dropped:
        notes.append(f"drops {counted(len(dropped), 'key')} that the target does not have: {listed(dropped, most=3)}")
    if any(step.guess for step in steps):
        notes.append("the order of the keys says which is which, their names do not: check a value or two")
    return steps, {
        "complete": _good(after, strict),
        "steps": [{"option": option, "value": value} for option, value in pairs_of(steps)],
        "loads": len(after.loads),
        **_account(after),
        "dropped": dropped,
        "left_out": gone,
        "guess": any(step.guess for step in steps),
        "notes": notes,
    }


def _good(found: Comparison, strict: bool) -> bool:
    return found.complete if strict else bool(found.loads or not found.missing) and not found.sizes


def _drops(names: Collection[str], unexpected: Sequence[str]) -> tuple[Step, ...]:
    """Steps that drop exactly the unexpected keys; none where a few patterns cannot."""
    bad = set(unexpected)
    wanted = {name[:at] for name in names if name not in bad for at, sign in enumerate(name) if sign == "."}
    patterns: dict[str, None] = {}
    for name in unexpected:
        # The shortest beginning that nothing wanted has; of a name alone in its module the whole name.
        ends = (at for at, sign in enumerate(name) if sign == ".")
        head = next((name[:at] for at in ends if name[:at] not in wanted), None)
        patterns[name if head is None else head + ".*"] = None
        if len(patterns) > _DROPS:
            return ()
    match = Globs(list(patterns))
    if {name for name in names if match.match(name)} != bad:
        return ()
    return tuple(Step("drop", pattern) for pattern in patterns)


def _left_out(checkpoint: Checkpoint, best: _Tried) -> list[str]:
    """The top-level entries that taking the state dict out leaves behind."""
    path = best.item.path
    return [
        entry.key
        for entry in checkpoint.survey.entries
        if not (path.startswith(entry.path) and path[len(entry.path) : len(entry.path) + 1] in ("", ".", "["))
    ]


def _edited_key(checkpoint: Checkpoint, best: _Tried, steps: Sequence[Step]) -> str | None:
    """The state dict that the steps must name: because there are others, it is not surely one, or entries beside it
    could have the names of keys that go."""
    names = [step for step in steps if step.option not in LAYOUT]
    drops = [step for step in steps if step.option == "drop"]
    if best.before or not (names or drops):
        return None
    sure = [item for item in checkpoint.state_dicts if item.confidence == "high"]
    return None if sure == [best.item] and not (drops and best.item.path) else best.item.path or "."


def _command(
    checkpoint: Checkpoint, wanted: Wanted, steps: tuple[Step, ...], asked: str | None, key: str | None
) -> str:
    """The command line of a fix; "" where there is none, because the target is no file and has no name."""
    output = _output(checkpoint.path)
    named = any(step.option in ("like", "by-order") for step in steps)
    if not named or (wanted.kind in ("checkpoint", "lock") and not wanted.others):
        return command_words(checkpoint.path, steps, output, asked)
    if wanted.kind == "names":
        return ""
    # ``edit --like`` takes a file with one state dict; what else names come from is known here alone.
    words = ["ckptool match", quote(checkpoint.path)]
    words += [f"--model {quote(wanted.source)}"] if wanted.kind == "model" else [quote(wanted.source)]
    words += [f"--key {quote(key)}"] if key is not None else []
    words += [f"--target-key {quote(wanted.path or '.')}"] if wanted.others else []
    return " ".join([*words, "--apply", "-o", quote(output)])


def _output(path: str) -> str:
    stem, suffix = os.path.splitext(os.path.basename(path))
    return f"{stem}.fits{suffix}"


def _account(found: Comparison) -> dict[str, Any]:
    def told(differences: list[Difference]) -> list[dict[str, str]]:
        return [difference._asdict() for difference in differences]

    return {
        "missing": found.missing,
        "unexpected": found.unexpected,
        "size_mismatches": told(found.sizes),
        "dtype_differences": told(found.dtypes),
        "filled_in": found.filled,
    }


def _modules(found: Comparison) -> list[dict[str, Any]]:
    """The same by module: so many segments of names that there are a dozen groups at most, one segment at least."""
    kinds = {
        "loads": found.loads,
        "missing": found.missing,
        "unexpected": found.unexpected,
        "size_mismatches": [difference.key for difference in found.sizes],
    }
    modules = {name: name.split(".")[:-1] for names in kinds.values() for name in names}
    depth = 1
    while depth < _DEEPEST and len({tuple(parts[: depth + 1]) for parts in modules.values()}) <= _GROUPS:
        depth += 1
    groups: dict[str, Counter[str]] = {}
    for kind, names in kinds.items():
        for name in names:
            groups.setdefault(".".join(modules[name][:depth]), Counter())[kind] += 1
    return [{"module": module} | {kind: counts[kind] for kind in kinds} for module, counts in groups.items()]


def _next(
    checkpoint: Checkpoint,
    wanted: Wanted,
    best: _Tried,
    steps: tuple[Step, ...],
    now: Comparison,
    fix: dict[str, Any] | None,
) -> tuple[str, str]:
    """What the user can do about what no edit mends, and the command that does it; "" where the fix is a whole one."""
    if fix is not None and fix["complete"]:
        return "", ""
    if fix is None and len(now.loads) * 2 < min(len(best.names), len(wanted.tensors)):
        there = Counter(value.shape for value in wanted.tensors.values())
        shared = (Counter(value.shape for value in best.names.values()) & there).total()
        most = f"{shared:,} of its {counted(len(best.names), 'value')} have a shape that the target wants"
        return f"it is probably another model: by shape alone, {most}", ""
    renamed = dict(zip(best.found.names, best.names.values())) if fix is not None else best.names
    after = compared(renamed, wanted.tensors, best.filled)
    if not after.sizes:
        here = {*after.loads}
        tied = [name for name in after.missing if wanted.tied.get(name) in here]
        kept = len(after.missing) - len(tied)
        parts = (
            [f"{counted(kept, 'key')} of the model would keep {'its' if kept == 1 else 'their'} values"] if kept else []
        )
        if tied:
            pairs = listed([f"{name} is {wanted.tied[name]} under another name" for name in tied], most=3)
            parts.append(f"{pairs}: it loads with that where the model ties them")
        left = "; ".join(parts)
        if not after.missing:
            left = f"{counted(len(after.unexpected), 'key')} would be left aside"
        return f"load_state_dict(..., strict=False) takes it so; {left}", ""
    bad = [difference.key for difference in after.sizes]
    drops = _drops(renamed, bad)
    last = best.after if fix is not None else ()
    asked = _edited_key(checkpoint, best, (*steps, *drops))
    what = f"without the {counted(len(bad), 'key')} of another size load_state_dict(..., strict=False) takes the others"
    if not drops:
        return what, ""
    words = (*steps[: len(steps) - len(last)], *drops, *last)
    return what, command_words(checkpoint.path, words, _output(checkpoint.path), asked)


def _notes(checkpoint: Checkpoint, wanted: Wanted, best: _Tried, tried: Sequence[_Tried], key: str | None) -> list[str]:
    notes = []
    if key is None and len(tried) > 1:
        others = [
            repr(one.item.path or ".") + (" (fits as well)" if one.found.score == best.found.score else "")
            for one in tried
            if one is not best
        ]
        number = counted(len(checkpoint.state_dicts), "state dict")
        notes.append(f"of {number} {best.item.path or '.'!r} is taken; --key takes another: {listed(others)}")
    if wanted.others:
        others = [repr(path or ".") for path in wanted.others]
        notes.append(f"of the target {wanted.path or '.'!r} is taken; --target-key takes another: {listed(others)}")
    survey = checkpoint.survey
    ours = survey.tensors_in([best.item.path])
    shards = sharding_summary(survey.reader, ours) if any(is_sharded(entry.tensor) for entry in ours) else None
    if shards is not None:
        tensors = counted(shards.tensors, "tensor")
        where = f"{tensors} as {shards.owner} had them, with the sizes of the whole" if shards.partial else tensors
        notes.append(f"{where} ({listed(list(shards.kinds))}): load_state_dict takes them only into a model spread so")
    if best.item.confidence == "low":
        notes.append(f"{best.item.path or '.'!r} is not surely a state dict")
    if _keys(wanted.path) is None and best.item.path != wanted.path:
        notes.append(f"the target's is at {wanted.path!r}, in a list: where ours stands is not looked at")
    return notes
