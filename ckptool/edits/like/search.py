"""The shortest edit of names that makes them fit: a beam search over the steps that the names themselves propose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ...base.errors import RefusedError
from .comparison import Score, Shape, score
from .pairing import in_order, paired
from .proposals import proposals
from .steps import Step, cost, renaming

#: Steps in a row; who needs more is better served by the names of the target.
_DEPTH: Final = 4
#: Where no more than one in so many problems is mended by a step, a few steps lead nowhere.
_HOPELESS: Final = 100
#: Steps that are easier to read than "like TARGET".
_FEW: Final = 2
#: States that are followed at each depth, and steps of each kind tried on each, by the number of names.
_EFFORTS: Final = ((5_000, 4, 4), (50_000, 2, 3), (1 << 62, 1, 2))


class Found(NamedTuple):
    """Names after steps: ``names`` in the order of the checkpoint, and how well they fit."""

    steps: tuple[Step, ...]
    names: list[str]
    score: Score

    @property
    def rank(self) -> tuple[int, int, float]:
        """Larger is better: more loads, fewer problems, cheaper steps."""
        return (*self.score.rank, -cost(self.steps))


def search(
    names: Sequence[str], shapes: Sequence[Shape], wanted: Mapping[str, Shape], filled: frozenset[str], target: str
) -> Found:
    """The best that renaming can do; ``target`` is what "like" is to name, "" where nothing can be.

    The names as they are, where nothing is better. ``filled`` are keys that may be missing.
    """
    space = _Space(shapes, wanted, filled)
    start = Found((), list(names), score(names, shapes, wanted, filled))
    best = _explicit(space, start)
    doubtful = best.score.problems or len(best.steps) > _FEW or any(step.guess for step in best.steps)
    if target and start.score.problems and doubtful:
        best = _settled(best, _like(space, start, best, target))
    return _trimmed(space, start, best)


class _Space(NamedTuple):
    shapes: Sequence[Shape]
    wanted: Mapping[str, Shape]
    filled: frozenset[str]

    def after(self, state: Found, step: Step) -> Found | None:
        """The state after a step; None where it changes nothing, or two names would become one."""
        rename = renaming(step, state.names)
        names = [rename(name) for name in state.names]
        if names == state.names or len(set(names)) < len(names) or "" in names:
            return None
        return Found((*state.steps, step), names, score(names, self.shapes, self.wanted, self.filled))

    def named(self, state: Found, names: list[str], step: Step) -> Found | None:
        """The state with other names altogether."""
        if names == state.names or len(set(names)) < len(names):
            return None
        return Found((*state.steps, step), names, score(names, self.shapes, self.wanted, self.filled))


def _explicit(space: _Space, start: Found) -> Found:
    """The best by steps that say themselves what they do."""
    best = start
    width, most = next((width, most) for limit, width, most in _EFFORTS if len(start.names) <= limit)
    frontier = [start]
    # What wrappers add stands between the segments that would be recognised: both ways are followed.
    plain = space.after(start, Step("wrappers"))
    simpler = space.after(start, Step("strip-module"))
    if plain is not None and simpler is not None and simpler.names == plain.names:
        plain = simpler
    if plain is not None and start.score.problems:
        frontier.append(plain)
        best = max(best, plain, key=lambda found: found.rank)
    stalled = 0
    for depth in range(_DEPTH):
        # The first round is gone through in any case: there may be a simpler step than that about wrappers.
        if not (best if depth else start).score.problems or stalled > 1:
            break
        reached: dict[int, Found] = {}
        for state in frontier:
            for step in proposals(state.names, space.shapes, space.wanted, most):
                found = space.after(state, step)
                if found is not None:
                    if not found.score.problems and len(found.steps) == 1 and not step.guess:
                        # Proposals come with the simplest first: no other step is cheaper.
                        return max(best, found, key=lambda one: one.rank)
                    mark = hash(tuple(found.names))
                    if mark not in reached or found.rank > reached[mark].rank:
                        reached[mark] = found
        frontier = sorted(reached.values(), key=lambda found: found.rank, reverse=True)[:width]
        if not frontier:
            break
        stalled = 0 if frontier[0].score.rank > best.score.rank else stalled + 1
        best = max(best, frontier[0], key=lambda found: found.rank)
        if (best.score.loads - start.score.loads) * _HOPELESS < start.score.problems:
            break
    return best


def _like(space: _Space, start: Found, best: Found, target: str) -> list[Found]:
    """The states in which the target gives the names: by what they have in common, then by their order."""
    found = []
    for state in (start, best) if best.steps else (start,):
        pairs = paired(dict(zip(state.names, space.shapes)), space.wanted)
        names = [pairs.get(name, name) for name in state.names]
        found.append(space.named(state, names, Step("like", target)))
    try:
        ordered = in_order(dict(zip(start.names, space.shapes)), space.wanted)
    except RefusedError:
        pass
    else:
        found.append(space.named(start, list(ordered.values()), Step("by-order", target, True)))
    return [state for state in found if state is not None]


def _settled(best: Found, others: Sequence[Found]) -> Found:
    """The best by steps, or what the target's own names give: where that is better, or as good and no guess."""
    better = [found for found in others if found.score.rank > best.score.rank]
    if better:
        return max(better, key=lambda found: found.rank)
    if any(step.guess for step in best.steps):
        for found in others:
            if found.score != best.score:
                continue
            if found.names != best.names:
                # Steps guess by the order of a few keys; the order of all at once is the better witness.
                return found
            if not any(step.guess for step in found.steps) and len(best.steps) <= _FEW:
                return best._replace(steps=tuple(step._replace(guess=False) for step in best.steps))
    return max((best, *others), key=lambda found: found.rank)


def _trimmed(space: _Space, start: Found, best: Found) -> Found:
    """A fix that is none, without the steps of which most names gain nothing: they fit something by chance."""
    if not best.score.problems or not best.steps:
        return best
    if any(step.option in ("like", "by-order") for step in best.steps):
        return best if _worth(space, best) else start
    states = [start]
    for step in best.steps:
        found = space.after(states[-1], step)
        states += [found] if found is not None else []
    while len(states) > 1:
        before, after = states[-2:]
        changed = sum(a != b for a, b in zip(before.names, after.names))
        gained = after.score.loads - before.score.loads
        if gained * 2 >= changed and not (after.steps[-1].guess and changed <= 2):
            break
        states.pop()
    return states[-1] if _worth(space, states[-1]) else start


def _worth(space: _Space, found: Found) -> bool:
    """Does it load enough to be the same model? Two models have a few shapes in common by chance."""
    return found.score.loads * 2 >= min(len(space.shapes), len(space.wanted))
