"""The state dicts of a checkpoint against a target: the best renaming of each, and how well it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from ...base.errors import TargetError
from ...base.records import NamedTuple
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.objects import mapping
from ...checkpoint.paths import parse_path
from ...checkpoint.survey import StateDict
from ..averages import is_average
from .names import Spec, fillable, score
from .search import Candidate, FixStep, cost, doubts_about, fitting_pairs, search
from .state_dict_errors import prefix_between
from .targets import MatchTarget, candidate_dicts, specs_of
from .values import Agreement, Pairing, Values, names_agree

Steps: TypeAlias = tuple[FixStep, ...]

#: Maximum number of state dicts for which a fix is searched. The best are chosen by their shapes.
_TRIED: Final = 4


class Attempt(NamedTuple):
    """One of our state dicts against the target; ``before`` and ``after`` are the steps that move it to its place.

    ``values`` are ours; ``agreement`` is what they say of the new names. ``doubts`` counts keys that fit under other
    names only by order or shape, for which no step is offered. ``likely`` are the names for which reasons are sought;
    no step is offered for some of them. ``ties`` maps missing names to the names in the file that have their values.
    """

    state_dict: StateDict
    specs: dict[str, Spec]
    values: Values
    filled: frozenset[str]
    before: Steps
    after: Steps
    best: Candidate
    likely: Sequence[str]
    agreement: Agreement
    doubts: int = 0
    ties: Mapping[str, str] = MappingProxyType({})

    @property
    def misplaced(self) -> tuple[str, ...]:
        """The names of the target that would get its values in another order, or the values of another name."""
        return self.agreement.contradicted

    @property
    def rank(self) -> tuple[bool, int, int, bool, float]:
        """The quality of the fit, larger is better; among equal fits, weights before averages, then fewer steps."""
        steps = (*self.before, *self.best.steps, *self.after)
        asked = not (self.before or self.after) or not is_average(self.state_dict.path)
        return (not self.best.score.problems and not self.misplaced, *self.best.score.rank, asked, -cost(steps))

    @property
    def renamed(self) -> dict[str, Spec]:
        """Our values under the names that the best steps give them, and under second names."""
        second = {name: self.specs[source] for name, source in self.ties.items()}
        return dict(zip(self.best.names, self.specs.values())) | second


def likely_dicts(checkpoint: Checkpoint, key: str | None, target: MatchTarget) -> list[StateDict]:
    """Return the possible state dicts; if there are many, the ones that share most shapes with the target."""
    candidates = candidate_dicts(checkpoint, key)
    if len(candidates) <= _TRIED:
        return candidates

    def rank(item: StateDict) -> tuple[bool, int]:
        return item.path == target.path, shared_shapes(specs_of(checkpoint, item), target)

    return sorted(candidates, key=rank, reverse=True)[:_TRIED]


def shared_shapes(specs: Mapping[str, Spec], target: MatchTarget) -> int:
    """Return how many values have a shape that the target wants."""
    return (Counter(spec.shape for spec in specs.values()) & Counter(target.shapes.values())).total()


def attempt(checkpoint: Checkpoint, item: StateDict, target: MatchTarget, anywhere: bool) -> Attempt:
    specs = specs_of(checkpoint, item)
    filled = fillable(target.tensors) if _is_old(checkpoint, item) else frozenset[str]()
    before, after = ((), ()) if anywhere else _layout(item.path, target.path)
    names, shapes = list(specs), [spec.shape for spec in specs.values()]
    values = Values(checkpoint, item.path, target.values.rounding if target.values is not None else "")
    pairing = Pairing(values, target.values)
    sure = pairing.sure
    best = search(names, shapes, target.shapes, filled, target.source)
    doubts = doubts_about(best, names, shapes, target.shapes, sure)
    first = best
    if doubts:
        best = search(names, shapes, target.shapes, filled, target.source, sure)
        if doubts_about(best, names, shapes, target.shapes, sure):  # even the unchanged names are in doubt
            best = best._replace(steps=(), names=names, score=score(names, shapes, target.shapes, filled))
    elif best.guess:
        best = best._replace(steps=tuple(step._replace(guess=False) for step in best.steps))
    pairs = fitting_pairs(names, best.names, shapes, target.shapes)
    agreement = pairing.agreement(pairs)
    likely = _likely_names(names, first.names, target.shapes) if doubts else best.names
    return Attempt(item, specs, values, filled, before, after, best, likely, agreement, doubts)


def _likely_names(names: Sequence[str], new_names: Sequence[str], wanted: Collection[str]) -> list[str]:
    """Return the new names that are wanted and agree with the old ones, and the others without or with a prefix."""
    likely = [new if new in wanted and names_agree(own, new) else own for own, new in zip(names, new_names)]
    left, others = [name for name in likely if name not in wanted], {*wanted}.difference(likely)
    fewer, more = prefix_between(others, left), prefix_between(left, others)
    moved = [name if name in wanted else more + name.removeprefix(fewer) for name in likely]
    return next(every for every in (moved, likely, list(names)) if len({*every}) == len(every))


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
    keys = string_keys(wanted)
    if have == wanted or keys is None:
        # A state dict cannot be wrapped into a list. Then only names are compared, and a note says so.
        return (), ()
    return ((FixStep("extract", have),) if have else ()), tuple(FixStep("wrap", key) for key in reversed(keys))


def string_keys(path: str) -> list[str] | None:
    """Return the keys of a path, or None if not all of them are strings."""
    try:
        steps = parse_path(path)
    except TargetError:
        return None  # the path is too long to be spelled, or has a key without a text
    keys = [step for step in steps if isinstance(step, str)]
    return keys if len(keys) == len(steps) else None
