"""Find the shortest edit of names that makes them fit: a beam search over steps that the names suggest.

Each step is an option of ``ckptool edit`` and a function of a name. The differences between corresponding names vote
for the steps worth trying.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final, TypeVar

from ...base.errors import RefusedError, TargetError
from ...base.lazy import regex
from ...base.prefixes import common_prefix, unwrapper
from ...base.records import NamedTuple
from ...base.steps import NextStep, Setting, command
from ..keys import Rename, parse_regex, stripping
from .names import (
    NOT_IN_GLOBS,
    WEIGHT_NORM,
    Score,
    Shape,
    agrees,
    name_difference,
    numbers_in,
    pair_in_order,
    pair_names,
    rename_globs,
    respelled_pairs,
    score,
    suffixes,
)
from .values import SYNONYMS, Sure

Key = TypeVar("Key")

#: Options that do not change names.
LAYOUT: Final = frozenset(
    ("extract", "wrap", "drop", "to", "sanitize", "as-state-dict", "drop-unknown", "local-parts", "merge-entry")
)
#: Options that move the elements of tensors.
REARRANGING: Final = frozenset(("recipe", "to-names"))
#: Options that apply to the whole file.
WHOLE: Final = LAYOUT - {"extract", "wrap", "drop"}
#: The cost of a step: among steps with the same effect, the simpler one is preferred.
_COSTS: Final = {
    "strip-module": 1.0,
    "wrappers": 1.1,
    "strip-prefix": 1.2,
    "add-prefix": 1.2,
    "rename": 1.5,
    "rename-regex": 2.0,
    "drop": 2.0,
    "extract": 1.0,
    "wrap": 1.0,
    "rename-like": 4.0,
    "by-order": 5.0,
}
#: Options whose value is the target, which may have any length.
FROM_TARGET: Final = frozenset(("rename-like", "by-order", "recipe"))


class FixStep(NamedTuple):
    """One step: an ``option`` of ``ckptool edit``, with ``value`` "" for a flag.

    The options "rename-like" and "by-order" take their names from the target, and the value of "recipe" is its text.
    ``guess`` says that only the order of the keys decided which name is which.
    """

    option: str
    value: str = ""
    guess: bool = False


def cost(steps: Sequence[FixStep]) -> float:
    """Return the cost of all steps: mostly their number, then their options, then their length."""
    return sum(
        _COSTS[step.option] + step.guess + (len(step.value) / 1000 if step.option not in FROM_TARGET else 0)
        for step in steps
    )


def renaming(step: FixStep, names: Iterable[str]) -> Rename:
    """Return the function by which a step renames one name, given all names in the state dict.

    Raise TargetError for a step that does not rename.
    """
    if step.option == "strip-module":
        return stripping("module.")
    if step.option == "strip-prefix":
        return stripping(step.value)
    if step.option == "wrappers":
        return unwrapper(names)
    if step.option == "add-prefix":
        return (step.value.rstrip(".") + ".").__add__
    if step.option == "rename":
        old, _, new = step.value.partition("=")
        return _glob_rename(old, new)
    if step.option == "rename-regex":
        pattern, new, count = parse_regex(step.value)
        return partial(pattern.sub, new, count=count)
    raise TargetError(f"{step.option!r} does not rename")


def _glob_rename(old: str, new: str) -> Rename:
    """Return the function for a glob made by this module, which has a star at the end of both sides or none."""
    head, star, _ = old.partition("*")
    into = new.partition("*")[0]

    def rename(name: str) -> str:
        if star:
            return into + name[len(head) :] if name.startswith(head) else name
        return into if name == head else name

    return rename


def edit_options(steps: Sequence[FixStep]) -> list[tuple[str, str | bool]]:
    """Return (option, value) pairs for ``ckptool edit`` and ``edits.pipeline.edit``; True for a flag."""
    options: list[tuple[str, str | bool]] = []
    for step in steps:
        if step.option == "by-order":
            options += [("rename-like", step.value), ("by-order", True)]
        else:
            options.append((step.option, step.value or True))
    return options


def edit_command(path: str, steps: Sequence[FixStep], output: str, key: str | None) -> NextStep:
    """Return the command that applies the steps."""
    settings: list[Setting] = []
    keyed = key is None
    for option, value in edit_options(steps):
        if option not in WHOLE and not keyed:
            settings.append(Setting("key", key or "."))  # it applies to the edits after it
            keyed = True
        settings.append(Setting(option, value))
    return command("edit", path, output=output, settings=settings)


# -- Proposals

#: Pairs of words that mean the same in different libraries, so the order of the keys is not needed to pair them.
_SYNONYM_PAIRS: Final = (*SYNONYMS, ("kernel", "weight"), ("scale", "weight"))
_SYNONYMS: Final = frozenset((*_SYNONYM_PAIRS, *((b, a) for a, b in _SYNONYM_PAIRS)))
#: Maximum number of partners tried for a name when nothing distinguishes them.
_PARTNERS: Final = 3
#: The weight of a vote from names; a vote from order has the weight 1.
_SURE: Final = 4
#: If there are many pairs, only every n-th votes. Rare differences get their turn after the common ones are settled.
#: The strides are primes, because names repeat from layer to layer.
_VOTERS: Final = 1_000
_STRIDES: Final = (1, 3, 7, 13, 29, 61, 127, 257)
#: Characters that prevent a name from being written in s/.../.../.
_NOT_IN_REGEX: Final = frozenset("/\\\n")
_NUMBERED: Final = regex(r"(.*?[^0-9])(\d+)\Z", re.DOTALL)


class NamePair(NamedTuple):
    """Two names that may correspond.

    ``sure`` means that the names show it, not only their order. ``only`` means that no other name has the same end and
    shape, whatever its numbers.
    """

    own: str
    other: str
    sure: bool
    only: bool = False


def proposals(names: Sequence[str], shapes: Sequence[Shape], wanted: Mapping[str, Shape], most: int) -> list[FixStep]:
    """Return up to ``most`` steps of each kind that may bring ``names`` nearer to ``wanted``, most votes first."""
    settled = {name for name, shape in zip(names, shapes) if name in wanted and agrees(shape, wanted[name])}
    free = [(name, shape) for name, shape in zip(names, shapes) if name not in settled]
    left = {name: shape for name, shape in wanted.items() if name not in settled}
    if not free or not left:
        return []
    votes = _Votes(Counter(), Counter(), Counter(), Counter(), set())
    stride = next((step for step in _STRIDES if len(free) <= step * _VOTERS), _STRIDES[-1])
    for pair in islice(_likely_pairs(free, left), 0, None, stride):
        votes.tally(pair)
    steps = [*_for_all_names(names, votes, most), *_to_old_weight_norm(names, left)]
    steps += [*_by_head(votes, most), *_by_middle(votes, most)]
    return list({step[:2]: step for step in reversed(steps)}.values())[::-1]


class _Votes(NamedTuple):
    """Differences between names, weighted by the pairs that have them; ``sure`` holds differences proven by names.

    ``heads`` are the parts before the common end, ``longer`` the same with one more segment, ``names`` whole names
    without a common end, ``middles`` the parts between the common beginning and end.
    """

    heads: Counter[tuple[str, str]]
    longer: Counter[tuple[str, str]]
    names: Counter[tuple[str, str]]
    middles: Counter[tuple[str, str, bool]]
    sure: set[tuple[str, str]]

    def tally(self, pair: NamePair) -> None:
        """Add the votes of one pair."""
        diff = name_difference(pair.own, pair.other)
        weight = _SURE if pair.sure else 1
        (self.heads if diff.end else self.names)[diff.head] += weight
        if diff.longer is not None:
            self.longer[diff.longer] += weight
        if diff.middle is not None:
            self.middles[(*diff.middle, not diff.end)] += weight
        # A single match of number and shape in one place may be coincidence.
        sure = pair.sure and (pair.only or diff.end > 1 or diff.begin > 0) and not diff.moved
        if sure or diff.middle in _SYNONYMS:
            self.sure.update(filter(None, (diff.head, diff.longer, diff.middle)))


def _top(votes: Counter[Key], most: int) -> list[Key]:
    """Return the keys with the most votes; among equals the first."""
    return [key for key, _ in votes.most_common(most)]


def _likely_pairs(free: Sequence[tuple[str, Shape]], left: Mapping[str, Shape]) -> Iterator[NamePair]:
    """Yield pairs of names with the longest common end and equal shape, or else in one module with equal shape."""
    ends: defaultdict[tuple[str, Shape], list[str]] = defaultdict(list)
    modules: defaultdict[tuple[str, Shape], list[str]] = defaultdict(list)
    for name, shape in left.items():
        modules[name.rpartition(".")[0], shape].append(name)
        for end in suffixes(name):
            ends[end, shape].append(name)
    groups: dict[tuple[str, Shape], list[str]] = {}
    alone: dict[tuple[str, Shape], list[str]] = {}
    for name, shape in free:
        best = None
        for end in suffixes(name):
            # A message about missing keys does not say their shapes.
            known = next(((end, each) for each in (shape, None) if (end, each) in ends), None)
            if known is None:
                break  # no longer end can match either
            best = known
        if best is not None:
            groups.setdefault(best, []).append(name)
        else:
            alone.setdefault((name.rpartition(".")[0], shape), []).append(name)
    for signature, own in groups.items():
        yield from _matched(own, ends[signature])
    for (module, shape), own in alone.items():
        others = modules.get((module, shape)) or modules.get((module, None))
        if others:
            yield from _zipped(own, others)


def _matched(own: list[str], others: list[str]) -> Iterator[NamePair]:
    """Yield pairs from two groups of names: first by the numbers in them, then by order."""
    if len(own) == len(others) == 1:
        yield NamePair(own[0], others[0], True, True)
        return
    groups: dict[tuple[str, ...], list[str]] = {}
    by_numbers: dict[tuple[str, ...], list[str]] = {}
    for side, table in ((own, groups), (others, by_numbers)):
        for name in side:
            table.setdefault(numbers_in(name), []).append(name)
    rest: list[str] = []
    for numbers, names in groups.items():
        if numbers in by_numbers:
            yield from _zipped(names, by_numbers[numbers])
        else:
            rest += names
    if rest:
        yield from _zipped(rest, others)


def _zipped(own: list[str], others: list[str]) -> Iterator[NamePair]:
    if len(own) == len(others):
        yield from (NamePair(a, b, len(own) == 1) for a, b in zip(own, others))
    else:
        yield from (NamePair(name, other, False) for name in own for other in others[:_PARTNERS])


def _for_all_names(names: Sequence[str], votes: _Votes, most: int) -> Iterator[FixStep]:
    """Yield steps for all names: remove wrappers or the common prefix, add or remove a prefix that heads suggest."""
    if any(name.startswith("module.") for name in names):
        yield FixStep("strip-module")
    unwrapped = unwrapper(names)
    if any(unwrapped(name) != name for name in names):
        yield FixStep("wrappers")
    shared = common_prefix(names)
    if shared:
        yield FixStep("strip-prefix", shared)
    # If one head ends with the other, a prefix was added to or stripped from all names.
    prefixes: Counter[tuple[str, str]] = Counter()
    for (own, other), weight in votes.heads.items():
        if own and other.endswith("." + own):
            prefixes["add-prefix", other[: -len(own)]] += weight
        elif other and own.endswith("." + other):
            prefixes["strip-prefix", own[: -len(other)]] += weight
    yield from (FixStep(*step) for step in _top(prefixes, most))


def _to_old_weight_norm(names: Sequence[str], left: Iterable[str]) -> Iterator[FixStep]:
    """Yield the steps that give tensors of weight_norm the names of torch 1; torch renames old ones to new itself."""
    for number, end in WEIGHT_NORM:
        new = rf"parametrizations\.(\w+)\.original{number}$"
        if any(re.search(new, name) for name in names) and any(name.endswith(end) for name in left):
            yield FixStep("rename-regex", rf"s/{new}/\1{end}/")


def _by_head(votes: _Votes, most: int) -> Iterator[FixStep]:
    for own, other in _top(votes.heads, most):
        if own == "module" and not other:
            yield FixStep("strip-module")
        elif own and not other:
            yield FixStep("strip-prefix", own + ".")
        elif other and not own:
            yield FixStep("add-prefix", other + ".")
        elif own:
            yield from _by_glob(votes, own, other, ".*")
    for own, other in _top(votes.longer, most):
        yield from _by_glob(votes, own, other, ".*")
    for own, other in _top(votes.names, most):
        yield from _by_glob(votes, own, other, "")


def _by_glob(votes: _Votes, own: str, other: str, end: str) -> Iterator[FixStep]:
    if not NOT_IN_GLOBS & set(own + other):
        yield FixStep("rename", f"{own}{end}={other}{end}", (own, other) not in votes.sure)


def _by_middle(votes: _Votes, most: int) -> Iterator[FixStep]:
    """Yield steps that rename segments anywhere; segments that end with a number share one step."""
    numbered: Counter[tuple[str, str, bool]] = Counter()
    sure: set[tuple[str, str]] = set()
    for (own, other, last), weight in votes.middles.items():
        a, b = _NUMBERED.match(own), _NUMBERED.match(other)
        if a and b and a[2] == b[2]:
            numbered[a[1], b[1], last] += weight
            if (own, other) in votes.sure:
                sure.add((a[1], b[1]))
    for (own, other, last), digits, proven in (
        *((middle, r"(\d+)", sure) for middle in _top(numbered, most)),
        *((middle, "", votes.sure) for middle in _top(votes.middles, most)),
    ):
        if not _NOT_IN_REGEX & set(own + other) and (other or not last):
            end, back = ("$", "") if last else (r"\.", "." if other else "")
            # \1 before a digit would name another group.
            group = r"\g<1>" if other[:1].isdigit() else r"\1"
            same = r"\g<2>" if digits else ""
            text = rf"s/(^|\.){re.escape(own)}{digits}{end}/{group}{other}{same}{back}/"
            yield FixStep("rename-regex", text, (own, other) not in proven)


# -- The search

#: Maximum number of steps in a row. If more are needed, taking the target's names is the better fix.
_DEPTH: Final = 4
#: Stop if a step solves fewer than one in this many problems, because more steps would not help.
_HOPELESS: Final = 100
#: Up to this many steps are easier to read than "like TARGET".
_FEW: Final = 2
#: The most steps that rename names one by one, where some names of a module lack a prefix and others have it.
_MOST_RENAMES: Final = 8
#: (names, candidates, steps): up to this many names, the candidates kept at each depth and the steps of each kind
#: tried.
_EFFORTS: Final = ((5_000, 4, 4), (50_000, 2, 3), (1 << 62, 1, 2))


class Candidate(NamedTuple):
    """The names after some steps, in the order of the checkpoint, and how well they fit."""

    steps: tuple[FixStep, ...]
    names: list[str]
    score: Score

    @property
    def rank(self) -> tuple[int, int, float]:
        """The quality of the fit, larger is better: more loads, fewer problems, cheaper steps."""
        return (*self.score.rank, -cost(self.steps))

    @property
    def guess(self) -> bool:
        """Whether any step is a guess."""
        return any(step.guess for step in self.steps)


def search(
    names: Sequence[str],
    shapes: Sequence[Shape],
    wanted: Mapping[str, Shape],
    filled: frozenset[str],
    target: str,
    sure: Sure | None = None,
) -> Candidate:
    """Return the best result of renaming; the unchanged names if nothing is better.

    ``target`` is the name that "rename-like" takes ("" for no name); ``filled`` are keys that may be missing. With
    ``sure`` every renamed key must surely mean its new name in the target.
    """
    space = _SearchSpace(shapes, wanted, filled, tuple(names), sure)
    start = Candidate((), list(names), score(names, shapes, wanted, filled))
    best = _by_steps(space, start)
    if best.score.problems:
        best = max((best, *_respelled(space, (start, best))), key=lambda candidate: candidate.rank)
    doubtful = best.score.problems or len(best.steps) > _FEW or best.guess
    if target and start.score.problems and doubtful:
        best = _preferred(best, _by_target(space, start, best, target))
    return _trimmed(space, start, best)


def fitting_pairs(
    original: Sequence[str], names: Sequence[str], shapes: Sequence[Shape], wanted: Mapping[str, Shape]
) -> Iterator[tuple[str, str]]:
    """Yield our names with the names that they get in the target, if the shape fits."""
    for own, name, shape in zip(original, names, shapes):
        if name in wanted and agrees(shape, wanted[name]):
            yield own, name


def renamed_pairs(
    original: Sequence[str], names: Sequence[str], shapes: Sequence[Shape], wanted: Mapping[str, Shape]
) -> Iterator[tuple[str, str]]:
    """Yield our names with the new names that fit the target, if they differ."""
    return ((own, name) for own, name in fitting_pairs(original, names, shapes, wanted) if own != name)


def doubts_about(
    best: Candidate, names: Sequence[str], shapes: Sequence[Shape], wanted: Mapping[str, Shape], sure: Sure
) -> int:
    """Return how many keys get a name in the target without certainty.

    Matrices whose shape is reversed in the target count too, because square ones may then also be transposed.
    """
    if not best.steps:
        return 0
    turned = (shape for name, shape in zip(best.names, shapes) if shape != wanted.get(name) == (shape or ())[::-1])
    doubts = sum(not sure(*pair) for pair in renamed_pairs(names, best.names, shapes, wanted))
    return doubts + sum(len(shape or ()) == 2 for shape in turned)


class _SearchSpace(NamedTuple):
    shapes: Sequence[Shape]
    wanted: Mapping[str, Shape]
    filled: frozenset[str]
    original: tuple[str, ...]
    sure: Sure | None = None

    def after(self, candidate: Candidate, step: FixStep) -> Candidate | None:
        """Return the candidate after a step, or None if it changes nothing or two names would become equal."""
        names = list(map(renaming(step, candidate.names), candidate.names))
        return None if "" in names else self.named(candidate, names, step)

    def named(self, candidate: Candidate, names: list[str], step: FixStep) -> Candidate | None:
        """Return the candidate with the names that a step gives it; None in the same cases as ``after``."""
        if names == candidate.names or len(set(names)) < len(names) or self.doubtful(names):
            return None
        return Candidate((*candidate.steps, step), names, score(names, self.shapes, self.wanted, self.filled))

    def doubtful(self, names: Sequence[str]) -> bool:
        """Return whether any name in the target is given to a key that does not surely mean it."""
        if self.sure is None:
            return False
        return any(not self.sure(*pair) for pair in renamed_pairs(self.original, names, self.shapes, self.wanted))

    def plausible(self, candidate: Candidate) -> bool:
        """Return whether enough keys load for the same model; two models share a few shapes by chance."""
        return candidate.score.loads * 2 >= min(len(self.shapes), len(self.wanted))


def _by_steps(space: _SearchSpace, start: Candidate) -> Candidate:
    """Return the best candidate by steps that need no target."""
    best = start
    width, most = next((width, most) for limit, width, most in _EFFORTS if len(start.names) <= limit)
    frontier = [start]
    # Wrappers hide the segments that would be recognised. Follow the names with them and without them.
    plain = space.after(start, FixStep("wrappers"))
    simpler = space.after(start, FixStep("strip-module"))
    if plain is not None and simpler is not None and simpler.names == plain.names:
        plain = simpler
    if plain is not None and start.score.problems:
        frontier.append(plain)
        best = max(best, plain, key=lambda candidate: candidate.rank)
    stalled = 0
    for depth in range(_DEPTH):
        # Always run the first round, because there may be a simpler step than removing wrappers.
        if not (best if depth else start).score.problems or stalled > 1:
            break
        reached: dict[int, Candidate] = {}
        for candidate in frontier:
            for step in proposals(candidate.names, space.shapes, space.wanted, most):
                new = space.after(candidate, step)
                if new is None:
                    continue
                if not new.score.problems and len(new.steps) == 1 and not step.guess:
                    # Proposals are ordered by simplicity, so no later step is cheaper.
                    return max(best, new, key=lambda candidate: candidate.rank)
                signature = hash(tuple(new.names))
                if signature not in reached or new.rank > reached[signature].rank:
                    reached[signature] = new
        frontier = sorted(reached.values(), key=lambda candidate: candidate.rank, reverse=True)[:width]
        if not frontier:
            break
        stalled = 0 if frontier[0].score.rank > best.score.rank else stalled + 1
        best = max(best, frontier[0], key=lambda candidate: candidate.rank)
        if (best.score.loads - start.score.loads) * _HOPELESS < start.score.problems:
            break
    return best


def _respelled(space: _SearchSpace, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the candidates after names get or lose segments one by one, which no pattern for a module can do.

    If the names need many steps, yield nothing for them.
    """
    for candidate in candidates:
        shapes = dict(zip(candidate.names, space.shapes))
        free = {name: shape for name, shape in shapes.items() if name not in space.wanted}
        left = {name: shape for name, shape in space.wanted.items() if name not in shapes}
        after: Candidate | None = candidate
        steps = [
            FixStep("rename", f"{old}={new}") for old, new in rename_globs(candidate.names, respelled_pairs(free, left))
        ]
        for step in steps if len(steps) <= _MOST_RENAMES else ():
            after = space.after(after, step) if after is not None else None
        if after is not None:
            yield after


def _by_target(space: _SearchSpace, start: Candidate, best: Candidate, target: str) -> list[Candidate]:
    """Return the candidates that take the target's names: by similarity, then by order."""
    candidates = []
    for candidate in (start, best) if best.steps else (start,):
        partners = pair_names(dict(zip(candidate.names, space.shapes)), space.wanted)
        if space.sure is not None and candidate is not start:
            continue  # the edit would pair renamed keys, but ``sure`` knows the original names only
        if space.sure is not None:
            partners = {name: other for name, other in partners.items() if space.sure(name, other)}
        names = [partners.get(name, name) for name in candidate.names]
        candidates.append(space.named(candidate, names, FixStep("rename-like", target)))
    try:
        ordered = pair_in_order(dict(zip(start.names, space.shapes)), space.wanted)
        candidates.append(space.named(start, list(ordered.values()), FixStep("by-order", target, space.sure is None)))
    except RefusedError:
        pass
    return [candidate for candidate in candidates if candidate is not None]


def _preferred(best: Candidate, others: Sequence[Candidate]) -> Candidate:
    """Prefer the target's names to the best steps if they fit better, or if they fit as well and are not a guess."""
    better = [other for other in others if other.score.rank > best.score.rank]
    if better:
        return max(better, key=lambda candidate: candidate.rank)
    for other in others if best.guess else ():
        if other.score != best.score:
            continue
        if other.names != best.names:
            # Steps guess from the order of a few keys; the order of all keys is better evidence.
            return other
        if not other.guess and len(best.steps) <= _FEW:
            return best._replace(steps=tuple(step._replace(guess=False) for step in best.steps))
    return max((best, *others), key=lambda candidate: candidate.rank)


def _trimmed(space: _SearchSpace, start: Candidate, best: Candidate) -> Candidate:
    """Remove the last steps of an incomplete fix if they rename many keys but gain few matches, which is chance."""
    if not best.score.problems or not best.steps:
        return best
    candidates = [start]
    if any(step.option in FROM_TARGET for step in best.steps):
        candidates.append(best)
    else:
        for step in best.steps:
            new = space.after(candidates[-1], step)
            candidates += [new] if new is not None else []
        while len(candidates) > 1:
            before, after = candidates[-2:]
            changed = sum(a != b for a, b in zip(before.names, after.names))
            gained = after.score.loads - before.score.loads
            # A profiler may have added more keys than the model has.
            possible = min(changed, len(space.wanted) - before.score.loads)
            if gained * 2 >= possible and not (after.steps[-1].guess and changed <= 2):
                break
            candidates.pop()
    return candidates[-1] if space.plausible(candidates[-1]) else start
