"""The state dicts of a checkpoint against a target: the best renaming of each, and how well it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Final

from ...base.errors import RefusedError, TargetError
from ...base.records import NamedTuple
from ...base.steps import Step
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.objects import mapping
from ...checkpoint.paths import parse_path
from ...checkpoint.survey import StateDict
from ...safety.calls import suspicious_calls
from ...safety.storages import storage_flaws
from ..averages import is_average
from ..outputs import suggested_edit
from .candidates import LAYOUT, Candidate, Space, Steps, best_renaming, edit_command
from .pairing import Comparison, Pairing, Spec, as_torch_accepts, compare, fillable, pair_in_order
from .targets import MatchTarget, candidate_dicts, comparable, specs_of
from .values import Values

#: The most state dicts of a file for which a fix is searched: those that share most shapes with the target.
_TRIED: Final = 4


class Attempt(NamedTuple):
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


class Case(NamedTuple):
    """A checkpoint, its target, the attempts with its state dicts and the best of them, and what was asked."""

    checkpoint: Checkpoint
    target: MatchTarget
    attempts: Sequence[Attempt]
    best: Attempt
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
    dicts = candidate_dicts(checkpoint, key)
    if len(dicts) > _TRIED:

        def rank(item: StateDict) -> tuple[bool, int]:
            return item.path == target.path, shared_shapes(specs_of(checkpoint, item), target)

        dicts = sorted(dicts, key=rank, reverse=True)[:_TRIED]
    specs = [specs_of(checkpoint, item) for item in dicts]
    target = comparable(target, (spec for each in specs for spec in each.values()))
    target = target._replace(tensors=as_torch_accepts(target.tensors, {name for each in specs for name in each}))
    attempts = [_attempt(checkpoint, item, each, target, anywhere) for item, each in zip(dicts, specs)]
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
    return Attempt(item, specs, values, pairing, filled, before, after, start, best, likely, doubts)


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
    return ((Step("extract", have),) if have else ()), tuple(Step("wrap", key) for key in reversed(keys))


def _string_keys(path: str) -> list[str] | None:
    """Return the keys of a path, or None if not all of them are strings."""
    try:
        steps = parse_path(path)
    except TargetError:
        return None  # the path is too long to be spelled, or has a key without a text
    keys = [step for step in steps if isinstance(step, str)]
    return keys if len(keys) == len(steps) else None
