"""Ways to rename the keys of a state dict: wrappers and prefixes, then the names of the target one by one; and the best
of them for each state dict of a checkpoint.

A way is made of steps: options of ``ckptool edit``, each a function of a name or a change of the whole file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final, TypeAlias

from ...base.errors import TargetError
from ...base.globs import Globs, escaped
from ...base.prefixes import WRAPPERS, unwrapper
from ...base.records import NamedTuple
from ...base.steps import NextStep, Step, command
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.objects import mapping
from ...checkpoint.paths import parse_path
from ...checkpoint.survey import StateDict
from ...safety.calls import suspicious_calls
from ...safety.storages import storage_flaws
from ..averages import is_average
from ..convert import suggested_edit
from ..keys import Rename, parse_regex, stripping
from .pairing import (
    Agreement,
    Comparison,
    Pairing,
    Spec,
    as_torch_accepts,
    compare,
    fillable,
    heads_agree,
    pair_names,
    suffixes,
)
from .targets import MatchTarget, candidate_dicts, comparable, specs_of
from .values import Values

#: Options that do not change names.
LAYOUT: Final = frozenset(
    ("extract", "wrap", "drop", "to", "sanitize", "as-state-dict", "drop-unknown", "local-parts", "merge-entry")
)
#: Options that apply to the whole file.
WHOLE: Final = LAYOUT - {"extract", "wrap", "drop"}
#: The most patterns by which a fix drops keys: more are no shorter than the list of keys.
_DROPS: Final = 4
#: Characters that prevent a prefix from being written as a glob.
NOT_IN_GLOBS: Final = frozenset("*?=[]{}\\")
#: Names that tools are known to change: weight_norm before torch 2.0, norms of TensorFlow, DenseNet in torchvision
#: before 0.3, and the adapter's name in a live PEFT model.
_KNOWN: Final = tuple(
    tuple(Step("rename", text) for text in texts)
    for texts in (
        (r"s/parametrizations\.(\w+)\.original0$/\1_g/", r"s/parametrizations\.(\w+)\.original1$/\1_v/"),
        (r"s/(^|\.)gamma$/\1weight/", r"s/(^|\.)beta$/\1bias/"),
        (r"s/(^|\.)(norm|conv)\.([12])\./\1\2\3./",),
        (r"s/\b(lora_\w+)\.default\b/\1/",),
    )
)

Steps: TypeAlias = tuple[Step, ...]


class Candidate(NamedTuple):
    """The names after some steps, how they fit, and what the values say of them."""

    steps: Steps
    names: list[str]
    fit: Comparison
    agreement: Agreement

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """The quality of the fit; larger is better: values in the right place, fewer problems, fewer steps."""
        loads, problems = self.fit.rank
        wrong = len(self.agreement.contradicted)
        return loads - wrong, problems, -wrong, -len(self.steps)


class Space(NamedTuple):
    """What renamings are compared with; ``filled`` are keys that may be missing."""

    specs: Mapping[str, Spec]
    wanted: Mapping[str, Spec]
    filled: frozenset[str]
    pairing: Pairing

    def compared(self, have: Mapping[str, Spec]) -> Comparison:
        return compare(have, self.wanted, self.filled)

    def candidate(self, steps: Steps, names: list[str]) -> Candidate:
        fit = self.compared(dict(zip(names, self.specs.values())))
        original = dict(zip(names, self.specs))
        return Candidate(steps, names, fit, self.pairing.agreement((original[name], name) for name in fit.loads))


def best_renaming(space: Space, start: Candidate, target: str) -> Candidate:
    """Return the best renaming of a state dict, or ``start``; ``target`` is the text for "rename-like", "" for none."""
    best = start
    # Wrappers hide the segments that would be recognised, so names without them are followed as well.
    for current in (start, *_after(space, start, [(Step("wrappers"),)])):
        for _ in range(2):  # the names of the target are easier to read than more changes of prefixes
            if not current.fit.complete:
                tries = (*((step,) for step in _prefix_steps(current.names, space.wanted)), *_KNOWN)
                current = max((current, *_after(space, current, tries)), key=lambda candidate: candidate.rank)
        best = max(best, current, key=lambda candidate: candidate.rank)
    if target and not best.fit.complete:
        have, wanted = ({name: spec.shape for name, spec in side.items()} for side in (space.specs, space.wanted))
        partners = pair_names(have, wanted, space.pairing)
        names = [partners.get(name, name) for name in space.specs]
        if names != start.names and len({*names}) == len(names):
            new = space.candidate((Step("rename-like", target),), names)
            best = max(best, new, key=lambda candidate: candidate.rank)
    return best


def _after(space: Space, candidate: Candidate, tries: Iterable[Steps]) -> Iterator[Candidate]:
    """Yield the candidate after each choice of steps that changes names, and makes no two names equal."""
    for steps in tries:
        names = candidate.names
        for step in steps:
            names = list(map(renaming(step, names), names))
        if names != candidate.names and len({*names}) == len(names) and "" not in names:
            yield space.candidate((*candidate.steps, *steps), names)


def _prefix_steps(names: Sequence[str], wanted: Mapping[str, Spec]) -> Iterator[Step]:
    """Yield the steps that remove, add or replace a prefix, as the ends of names suggest, the most frequent first."""
    have = {*names}
    free, left = [name for name in names if name not in wanted], [name for name in wanted if name not in have]
    votes: Counter[tuple[str, str]] = Counter()
    by_end: dict[str, str] = {}
    for name in left:
        for end in suffixes(name):
            by_end.setdefault(end, name)
            if end in have:
                votes["", name[: len(name) - len(end)]] += 1
    for name in free:
        longest = ""
        for end in suffixes(name):
            if end in wanted:
                votes[name[: len(name) - len(end)], ""] += 1
            longest = end if end in by_end else longest
        if longest:
            old, new = name[: len(name) - len(longest)], by_end[longest].removesuffix(longest)
            size = longest.count(".") + 1
            if old and new and heads_agree(old.split(".")[:-1], new.split(".")[:-1], size):
                votes[old, new] += 1
    # ``student.``, ``teacher.`` and the like have equal votes.
    for (old, new), _ in votes.most_common(4):
        if old == "module." and not new:
            yield Step("strip-module")
        elif old and not new and {*old[:-1].split(".")} <= WRAPPERS.keys():
            yield Step("wrappers")
        elif not new or not old:
            yield Step("strip-prefix", old) if old else Step("add-prefix", new)
        elif not NOT_IN_GLOBS & {*old, *new}:
            yield Step("rename", f"{old}*={new}*")


# -- steps


def renaming(step: Step, names: Iterable[str]) -> Rename:
    """Return the function by which a step renames one of these names; raise TargetError for other steps."""
    value = str(step.value)
    if step.name in ("strip-module", "strip-prefix"):
        return stripping("module." if step.name == "strip-module" else value)
    if step.name == "wrappers":
        return unwrapper(names)
    if step.name == "add-prefix":
        return value.__add__
    if step.name == "rename" and value.startswith("s/"):
        pattern, replacement, count = parse_regex(value)
        return partial(pattern.sub, replacement, count=count)
    if step.name == "rename":  # made by this package: a prefix, and a star on both sides
        old, new = (side.removesuffix("*") for side in value.split("=", 1))
        return lambda name: new + name.removeprefix(old) if name.startswith(old) else name
    raise TargetError(f"{step.name!r} does not rename")


def edit_command(path: str, steps: Sequence[Step], output: str, key: str | None) -> NextStep:
    """Return the command that applies the steps."""
    settings = [*steps]
    first = next((number for number, step in enumerate(steps) if step.name not in WHOLE), None)
    if key is not None and first is not None:
        settings.insert(first, Step("key", key or "."))  # it applies to the edits after it
    return command("edit", path, output=output, steps=settings)


def drop_steps(names: Collection[str], unexpected: Sequence[str]) -> Steps:
    """Return the steps that drop exactly the unexpected keys; empty if a few patterns cannot do that."""
    bad = set(unexpected)
    kept = [name for name in names if name not in bad]
    wanted = {name[:at] for name in kept for at, char in enumerate(name) if char == "."}
    modules: dict[str, None] = {}
    for name in unexpected:
        # The shortest prefix that no wanted key has; for a name alone in its module, the whole name.
        ends = (at for at, char in enumerate(name) if char == ".")
        head = next((name[:at] for at in ends if name[:at] not in wanted), None)
        modules[escaped(name) if head is None else escaped(head) + ".*"] = None
        if len(modules) > _DROPS:
            break
    # A profiler adds keys with ends of their own to every module.
    by_end = dict.fromkeys("*" + escaped(name.rpartition(".")[2]) for name in unexpected)
    for patterns in ([*modules], [*by_end]):
        if len(patterns) <= _DROPS:
            match = Globs(patterns)
            if {name for name in names if match.match(name)} == bad:
                return tuple(Step("drop", pattern) for pattern in patterns)
    return ()


#: The most state dicts of a file for which a fix is searched: those that share most shapes with the target.
_MOST_DICTS: Final = 4


class Attempt(NamedTuple):
    """One of our state dicts against the target; ``before`` and ``after`` are the steps that move it to its place.

    ``start`` has its own names, ``best`` those that may be offered. ``likely`` are the names for which reasons are
    sought. ``ties`` maps missing names to the names in the file that have their values.
    """

    state_dict: StateDict
    space: Space
    before: Steps
    after: Steps
    start: Candidate
    best: Candidate
    likely: list[str]
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
        second = {name: self.space.specs[source] for name, source in self.ties.items()}
        return dict(zip(self.best.names, self.space.specs.values())) | second


class Case(NamedTuple):
    """A checkpoint, its target, the attempts with its state dicts and the best of them, and what was asked."""

    checkpoint: Checkpoint
    target: MatchTarget
    attempts: Sequence[Attempt]
    best: Attempt
    key: str | None
    anywhere: bool
    strict: bool

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

    def edited_key(self, steps: Sequence[Step]) -> str | None:
        """Return the path of the state dict that the steps must name, or None if they need not.

        They must name it if there are others, if it is uncertain that this is one, or if entries beside it could have
        the names of dropped keys.
        """
        drops = any(step.name == "drop" for step in steps)
        if self.best.before or not (drops or any(step.name not in LAYOUT for step in steps)):
            return None
        sure = [item for item in self.checkpoint.state_dicts if item.confidence == "high"]
        return None if sure == [self.best.state_dict] and not (drops and self.best.path) else self.best.path or "."

    def edit_line(self, steps: Sequence[Step]) -> str:
        output = suggested_edit(self.checkpoint, "fits")
        return str(edit_command(self.checkpoint.path, steps, output, self.edited_key(steps)))


def case_of(checkpoint: Checkpoint, target: MatchTarget, key: str | None, anywhere: bool, strict: bool) -> Case:
    def rank(sides: tuple[StateDict, Mapping[str, Spec]]) -> tuple[bool, int]:
        return sides[0].path == target.path, shared_shapes(sides[1], target)

    sides = [(item, specs_of(checkpoint, item)) for item in candidate_dicts(checkpoint, key)]
    if len(sides) > _MOST_DICTS:
        sides = sorted(sides, key=rank, reverse=True)[:_MOST_DICTS]
    target = comparable(target, (spec for _, specs in sides for spec in specs.values()))
    target = target._replace(tensors=as_torch_accepts(target.tensors, {name for _, specs in sides for name in specs}))
    attempts = [_attempt(checkpoint, item, specs, target, anywhere) for item, specs in sides]
    best = max(attempts, key=lambda attempt: attempt.rank)
    return Case(checkpoint, target, attempts, best, key, anywhere, strict)


def shared_shapes(specs: Mapping[str, Spec], target: MatchTarget) -> int:
    """Return how many values have a shape that the target wants."""
    return (Counter(spec.shape for spec in specs.values()) & Counter(target.shapes.values())).total()


def _attempt(
    checkpoint: Checkpoint, item: StateDict, specs: dict[str, Spec], target: MatchTarget, anywhere: bool
) -> Attempt:
    filled = fillable(target.tensors) if _is_old(checkpoint, item) else frozenset[str]()
    before, after = ((), ()) if anywhere else _layout(item.path, target.path)
    values = Values(checkpoint, item.path, target.values.rounding if target.values is not None else "")
    space = Space(specs, target.tensors, filled, Pairing(values, target.values))
    start = space.candidate((), [*specs])
    best = best_renaming(space, start, target.source)
    likely = best.names
    if not best.fit.complete and len(best.fit.loads) * 2 < min(len(specs), len(target.tensors)):
        best = start  # two models share a few names and shapes by chance
    return Attempt(item, space, before, after, start, best, likely)


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
    try:
        keys = parse_path(wanted)
    except TargetError:
        keys = [-1]  # the path is too long to be spelled, or has a key without a text
    names = [key for key in keys if isinstance(key, str)]
    if have == wanted or len(names) < len(keys):
        # A state dict cannot be wrapped into a list. Then only names are compared, and a note says so.
        return (), ()
    return ((Step("extract", have),) if have else ()), tuple(Step("wrap", name) for name in reversed(names))
