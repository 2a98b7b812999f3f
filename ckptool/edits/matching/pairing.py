"""Pair the names of two state dicts: by their values where both sides have them, and by the names themselves.

Names and shapes do not reveal another order of rows (of heads, of gate and up), a square transpose, or another
numbering. Values do, if both sides come from one training run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product, zip_longest
from typing import Final

from ...base.errors import RefusedError
from ...base.prefixes import common_prefix
from ...base.records import NamedTuple
from ...base.text import pluralize, quoted
from .names import DEEPEST, Shape, Spec, agrees, dotless, family_of, names_agree, plain_segments, unique
from .values import TELLING, Sample, Values

#: How many tensors of a family (names that differ only in numbers) have whole lines read, to see whether rows moved:
#: all layers are arranged alike.
_OF_FAMILY: Final = 2
#: The same for all families: a second for a large model.
_LOOKS: Final = 64


class Agreement(NamedTuple):
    """What the values say of a mapping of names: the number of tensors that are equal on both sides, leaving out
    constants, which prove nothing, and the names in the target whose values contradict the mapping.
    """

    equal: int
    contradicted: tuple[str, ...]


class Pairing:
    """Compares our values with the target's, which has none if it is a lock file or a model."""

    def __init__(self, own: Values, target: Values | None) -> None:
        self._own, self._target = own, target
        self._rearranged: dict[tuple[str, str], bool] = {}
        self._looks: dict[str, list[bool]] = {}

    def sure(self, name: str, other: str) -> bool:
        """Return whether a few rows are equal, or the names agree and no values contradict them.

        Equal constants count only if other tensors show that both sides come from one training run.
        """
        samples = self._samples(name, other)
        if samples is not None and samples[0].equals(samples[1]) and (samples[0].is_telling or self._is_related()):
            return True
        return names_agree(name, other) and not self.rearranged(name, other)

    def agreement(self, pairs: Iterable[tuple[str, str]]) -> Agreement:
        """Compare our names with the names that they get in the target."""
        equal, contradicted = 0, []
        for name, other in pairs:
            samples = self._samples(name, other)
            equal += samples is not None and samples[0].is_telling and samples[0].equals(samples[1])
            contradicted += [other] if self.rearranged(name, other) else []
        return Agreement(equal, tuple(contradicted))

    def rearranged(self, name: str, other: str) -> bool:
        """Return whether our tensor has the target's values in another order, or the values of another tensor there."""
        pair = (name, other)
        if pair not in self._rearranged:
            samples = self._samples(name, other)
            differ = samples is not None and samples[0].dtype == samples[1].dtype and not samples[0].equals(samples[1])
            moved = differ and samples is not None and samples[0].is_telling and self._moved(name, other)
            self._rearranged[pair] = moved or (differ and samples is not None and self._is_elsewhere(name, samples[0]))
        return self._rearranged[pair]

    def equal(self, ours: Iterable[str], theirs: Iterable[str]) -> dict[str, str]:
        """Map our names to names in the target with the same values, which must identify the tensor.

        Several tensors with the same values are paired by their names, and then in any order.
        """
        if self._target is None:
            return {}
        mine, others = {*ours}, {*theirs}
        pairs: dict[str, str] = {}
        for sample, names in self._own.by_content().items():
            own = {name: sample.shape for name in names if name in mine}
            there = {name: sample.shape for name in self._target.by_content().get(sample, ()) if name in others}
            found = alike(own, there)
            taken = {*found.values()}
            rest = zip((name for name in own if name not in found), (name for name in there if name not in taken))
            pairs |= found | dict(rest)
        return pairs

    def _samples(self, name: str, other: str) -> tuple[Sample, Sample] | None:
        ours = self._own.sample(name) if self._target is not None else None
        theirs = self._target.sample(other) if self._target is not None and ours is not None else None
        return (ours, theirs) if ours is not None and theirs is not None else None

    def _moved(self, name: str, other: str) -> bool:
        """Return whether lines of two tensors moved, judging from the few members of their family that are read."""
        assert self._target is not None
        looks = self._looks.setdefault(family_of(name), [])
        if True not in looks and len(looks) < _OF_FAMILY and sum(map(len, self._looks.values())) < _LOOKS:
            looks.append(_lines_moved(self._own.lines(name), self._target.lines(other)))
        return True in looks

    def _is_elsewhere(self, name: str, ours: Sample) -> bool:
        """Return whether the target has these values under a name that agrees with no equal tensor of ours."""
        if not ours.is_telling or self._target is None:
            return False
        same = [own for own in self._own.by_content().get(ours, ()) if own != name]
        there = self._target.by_content().get(ours, ())
        return any(not any(names_agree(own, other) for own in same) for other in there)

    def _is_related(self) -> bool:
        """Return whether any of our tensors can be recognised in the target."""
        assert self._target is not None
        return not self._own.by_content().keys().isdisjoint(self._target.by_content())


def _lines_moved(ours: Sequence[list[bytes]], theirs: Sequence[list[bytes]]) -> bool:
    """Return whether a line of one side is on the other with its elements in another order, or along another axis."""
    for (axis, one), (other_axis, other) in product(enumerate(ours), enumerate(theirs)):
        telling = len(one) == len(other) and len({*one}) >= TELLING
        if telling and (one != other and sorted(one) == sorted(other) if axis == other_axis else one == other):
            return True
    return False


def pair_names(
    have: Mapping[str, Shape], wanted: Mapping[str, Shape], pairing: Pairing | None = None
) -> dict[str, str]:
    """Map our names to their partners in ``wanted``; names without a certain partner are left out.

    Equal names are partners. Then tensors of equal values, names that agree and whose end no other name has, the other
    parameters of the modules of such pairs, and what is left, if its shapes agree one by one. Values that contradict a
    pair prevent it, and names that do not agree need equal values; with a ``pairing`` of None names and shapes decide.
    """
    pairs = {name: name for name in have if name in wanted}
    ours = {name: shape for name, shape in have.items() if name not in wanted}
    theirs = {name: shape for name, shape in wanted.items() if name not in have}

    def settle(found: Mapping[str, str]) -> bool:
        sure = {own: other for own, other in found.items() if pairing is None or pairing.sure(own, other)}
        pairs.update(sure)
        for own, other in sure.items():
            del ours[own], theirs[other]
        return bool(sure)

    steps: tuple[Callable[[], dict[str, str]], ...] = (
        lambda: pairing.equal(ours, theirs) if pairing is not None else {},
        lambda: alike(ours, theirs, by_name=pairing is not None),
        lambda: _siblings(pairs, ours, theirs),
        lambda: _in_order(ours, theirs) if pairing is not None else {},
    )
    for find in steps:
        while ours and theirs and settle(find()):
            pass
    return pairs


def alike(ours: Mapping[str, Shape], theirs: Mapping[str, Shape], *, by_name: bool = True) -> dict[str, str]:
    """Pair names that agree and have equal shapes, the longest common end first, where no other name has this end.

    Without ``by_name``, the end and the shape are enough.
    """
    known = None not in theirs.values()  # a message about missing keys does not say their shapes
    left = [{name: plain_segments(name) for name in side} for side in (ours, theirs)]
    pairs: dict[str, str] = {}

    def settle(here: Mapping[object, str], there: Mapping[object, str]) -> None:
        for signature, own in here.items():
            other = there.get(signature)
            if own not in left[0] or other is None or other not in left[1]:
                continue
            if agrees(ours[own], theirs[other]) and (not by_name or names_agree(own, other)):
                pairs[own] = other
                del left[0][own], left[1][other]

    deepest = min(max(map(len, side.values()), default=0) for side in left)
    for depth in range(min(deepest, DEEPEST), 0, -1):
        ends = [
            unique(
                ((*parts[-depth:], shapes[name] if known else None), name)
                for name, parts in side.items()
                if len(parts) >= depth
            )
            for side, shapes in zip(left, (ours, theirs))
        ]
        settle(ends[0], ends[1])
    # Names without dots, such as those of averaged weights in a module of their own, of the model or of its part.
    modules: dict[str, list[tuple[object, str]]] = {}
    for name in left[0]:
        module, _, last = name.rpartition(".")
        modules.setdefault(module, []).append((dotless(last), name))
    for begin in {0, len(common_prefix(list(theirs)))}:
        there = unique((dotless(name[begin:]), name) for name in left[1])
        for own in modules.values():
            settle(unique(own), there)
    return pairs


def _siblings(pairs: Mapping[str, str], ours: Mapping[str, Shape], theirs: Mapping[str, Shape]) -> dict[str, str]:
    """Pair names with equal last segment and shape, in modules that are paired one to one."""
    forth: dict[str, set[str]] = {}
    back: dict[str, set[str]] = {}
    for own, other in pairs.items():
        (a, _, end), (b, _, other_end) = own.rpartition("."), other.rpartition(".")
        if end == other_end:
            forth.setdefault(a, set()).add(b)
            back.setdefault(b, set()).add(a)
    found = {}
    for name, shape in ours.items():
        module, dot, end = name.rpartition(".")
        there = next(iter(forth[module])) if len(forth.get(module, ())) == 1 else None
        other = f"{there}.{end}" if there else end
        if dot and there is not None and len(back[there]) == 1 and other in theirs and theirs[other] == shape:
            found[name] = other
    return found


def _in_order(ours: Mapping[str, Shape], theirs: Mapping[str, Shape]) -> dict[str, str]:
    try:
        return pair_in_order(ours, theirs)
    except RefusedError:
        return {}


def pair_in_order(have: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> dict[str, str]:
    """Pair our names with theirs by position.

    Raise RefusedError at the first disagreement if the numbers of keys or two shapes differ.
    """
    step = "names can be taken by order only where the shapes agree one by one"
    for number, (own, other) in enumerate(zip_longest(have, wanted)):
        if own is None or other is None:
            sides = f"{pluralize(len(have), 'key')} here, {len(wanted):,} there"
            raise RefusedError(f"{sides}; the first without a partner is {quoted(own or other or '')}", next=step)
        if have[own] != wanted[other]:
            here, there = f"{quoted(own)} {_shape_words(have[own])}", f"{quoted(other)} {_shape_words(wanted[other])}"
            raise RefusedError(f"key {number + 1:,} is {here} here, {there} there", next=step)
    return dict(zip(have, wanted))


def _shape_words(shape: Shape) -> str:
    return "without a shape" if shape is None else f"of shape {Spec(shape, '').words}"
