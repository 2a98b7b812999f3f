"""Compare the names, shapes and dtypes of two state dicts, and pair them: by their values where both sides have them,
and by the names themselves.

Names and shapes do not reveal another order of rows (of heads, of gate and up), a square transpose, or another
numbering. Values do, if both sides come from one training run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product, zip_longest
from typing import Final, TypeAlias

from ...base.errors import RefusedError
from ...base.lazy import regex
from ...base.prefixes import common_prefix, unwrapper
from ...base.records import NamedTuple, TypedDict
from ...base.text import pluralize, quoted
from .values import TELLING, Sample, Values


class Agreement(NamedTuple):
    """The number of equal tensors, without constants, and the names in the target that values contradict."""

    equal: int
    contradicted: tuple[str, ...]


class Pairing:
    """Compares our values with the target's, which has none if it is a lock file or a model."""

    def __init__(self, own: Values, target: Values | None) -> None:
        self._own, self._target = own, target
        self._rearranged: dict[tuple[str, str], bool] = {}
        self._looks: dict[str, list[bool]] = {}

    def sure(self, name: str, other: str) -> bool:
        """Return whether values are equal (constants: of one training run), or names agree without contradiction."""
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

    def equal(self, ours: Iterable[str], theirs: Iterable[str], *, telling: bool = True) -> dict[str, str]:
        """Map our names to names in the target with the same values, which are no constants if ``telling``."""
        if self._target is None or not (telling or self._is_related()):
            return {}
        mine, others = {*ours}, {*theirs}
        pairs: dict[str, str] = {}
        for sample, names in self._own.by_content().items():
            if telling and not sample.is_telling:
                continue
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
        # All layers are arranged alike; 64 looks take a second for a large model.
        if True not in looks and len(looks) < 2 and sum(map(len, self._looks.values())) < 64:
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
        assert self._target is not None
        there = self._target.by_content()
        return any(sample.is_telling and sample in there for sample in self._own.by_content())


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

    Equal names are partners. Then tensors of equal values, names that agree and whose end no other name has, and equal
    constants, if other tensors are equal. Values that contradict a pair prevent it, and names that do not agree need
    equal values; with a ``pairing`` of None names and shapes decide.
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

    if pairing is not None:
        settle(pairing.equal(ours, theirs))
    while ours and theirs and settle(alike(ours, theirs, by_name=pairing is not None)):
        pass
    if pairing is not None:
        settle(pairing.equal(ours, theirs, telling=False))
    return pairs


def alike(ours: Mapping[str, Shape], theirs: Mapping[str, Shape], *, by_name: bool = True) -> dict[str, str]:
    """Pair names that agree, of equal shapes, the longest common end first; without ``by_name`` the end is enough."""
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


def pair_in_order(have: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> dict[str, str]:
    """Pair names by position; raise RefusedError at the first that lacks a partner, or has another shape."""
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


#: Sizes in elements. None for a value that is not a tensor, and for a parameter that gets its shape on first use.
Shape: TypeAlias = tuple[int, ...] | None

#: Maximum number of last segments of a name that are compared; no model nests its names deeper.
DEEPEST: Final = 24
_COUNTER: Final = "num_batches_tracked"
_NUMBER: Final = regex(r"\d+")
_SEPARATORS: Final = regex(r"[^0-9A-Za-z]")
#: The two tensors of weight_norm since torch 2.0, with the ends of their old names: ``weight_g`` and ``weight_v``.
_OLD_ENDS: Final = {"0": "_g", "1": "_v"}
_WEIGHT_NORM: Final = regex(r"(^|\.)parametrizations\.(\w+)\.original([01])\Z")
#: Last segments that mean the same in TensorFlow and in torch.
_SYNONYMS: Final = {
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
    "moving_var": "running_var",
}


class Spec(NamedTuple):
    """The shape and dtype of a tensor, or None and the type of another value; ``part``: of a sharded tensor, or ""."""

    shape: Shape
    dtype: str
    part: str = ""

    @property
    def words(self) -> str:
        """``64x3``, ``scalar``, or the type of a non-tensor value; ``32x3 of 64x3`` for a part."""
        whole = self.dtype if self.shape is None else "x".join(map(str, self.shape)) or "scalar"
        return f"{self.part} of {whole}" if self.part else whole


class MismatchReport(TypedDict):
    """A key in both, with the two descriptions that differ: 64x3 and 10x3, float16 and float32."""

    key: str
    have: str
    wanted: str


class Comparison(NamedTuple):
    """Keys by outcome. ``filled`` are missing keys that torch fills in itself."""

    loads: list[str]
    missing: list[str]
    unexpected: list[str]
    sizes: list[MismatchReport]
    dtypes: list[MismatchReport]
    filled: list[str]

    @property
    def complete(self) -> bool:
        """Whether ``load_state_dict(strict=True)`` would accept it."""
        return not (self.missing or self.unexpected or self.sizes)

    @property
    def rank(self) -> tuple[int, int]:
        """The quality of the fit, larger is better: more keys that load, then fewer problems."""
        return len(self.loads), -len(self.missing) - len(self.unexpected) - len(self.sizes)


def agrees(have: Shape, wanted: Shape) -> bool:
    """Return whether a value with one shape loads where the other shape is wanted.

    Torch accepts one element for a scalar, because torch 0.3 had no scalars (Module._load_from_state_dict).
    """
    return wanted is None or have == wanted or (wanted == () and have == (1,))


def compare(have: Mapping[str, Spec], wanted: Mapping[str, Spec], filled: frozenset[str]) -> Comparison:
    """Compare two state dicts; keys are in the order of the target, then of the checkpoint."""
    keys = Comparison([], [], [name for name in have if name not in wanted], [], [], [])
    for name, want in wanted.items():
        own = have.get(name)
        if own is None:
            # torch fills in a counter only if the rest of its module is there.
            (keys.filled if name in filled and _mean_of(name) in have else keys.missing).append(name)
        elif agrees(own.shape, want.shape) and own.part in ("", want.part):
            keys.loads.append(name)
            if own.shape is not None and want.shape is not None and own.dtype != want.dtype:
                keys.dtypes.append({"key": name, "have": own.dtype, "wanted": want.dtype})
        else:
            keys.sizes.append({"key": name, "have": own.words, "wanted": want.words})
    return keys


def fillable(wanted: Collection[str]) -> frozenset[str]:
    """Return the batch norm counters, which torch fills in for files from before 0.4.1 (_NormBase, version 2)."""
    return frozenset(name for name in wanted if name.rpartition(".")[2] == _COUNTER and _mean_of(name) in wanted)


def _mean_of(counter: str) -> str:
    return counter.removesuffix(_COUNTER) + "running_mean"


def as_torch_accepts(wanted: Mapping[str, Spec], have: Collection[str]) -> Mapping[str, Spec]:
    """Return what a model wants under the old names of weight_norm, if the checkpoint has them; torch accepts both.

    Source: ``_weight_norm_compat_hook`` in torch/nn/utils/parametrizations.py, which renames a complete pair.
    """
    ends = {name.rpartition(".")[2] for name in have}
    if not any(end.endswith("_g") and end[:-2] + "_v" in ends for end in ends):
        return wanted
    old = {name: _old_weight_norm(name) for name in wanted}
    first, second = ({name[:-2] for name in old.values() if name.endswith(end)} for end in _OLD_ENDS.values())
    return {old[name] if old[name][:-2] in first & second else name: spec for name, spec in wanted.items()}


def _old_weight_norm(name: str) -> str:
    """Return the old name of a tensor of weight_norm; any other name unchanged."""
    return _WEIGHT_NORM.sub(lambda match: f"{match[1]}{match[2]}{_OLD_ENDS[match[3]]}", name)


# -- names that agree


def names_agree(name: str, other: str) -> bool:
    """Return whether two names agree segment by segment, apart from a prefix, wrappers and known synonyms.

    A prefix may be added or removed. It may also be replaced by another, if neither has numbers and at least two equal
    segments follow. Names that differ only in dots agree, such as ``norm.1`` and ``norm1`` of torchvision's DenseNet,
    and averaged weights without dots agree with the names that they stand for.
    """
    if is_dotless(name, other):
        return True
    ours, theirs = (plain_segments(text) for text in (name, other))
    end = next((at for at, (a, b) in enumerate(zip(ours[::-1], theirs[::-1])) if a != b), min(len(ours), len(theirs)))
    return heads_agree(ours[: len(ours) - end], theirs[: len(theirs) - end], end)


def heads_agree(own: Sequence[str], other: Sequence[str], end: int) -> bool:
    """Return whether two beginnings are prefixes of one model, if ``end`` equal segments follow."""
    if not own or not other:
        return end > 0
    return end > 1 and own[0] != other[0] and not any(part.isdigit() for part in (*own, *other))


def plain_segments(name: str) -> list[str]:
    """Return the segments of a name without wrappers, in the spelling of torch before 2.0."""
    parts = _old_weight_norm(unwrapper([name])(name)).split(".")
    # A live PEFT model has the name of the adapter after each part of it: lora_A.default.weight.
    adapted = (
        before.startswith("lora_") and part not in ("weight", "bias") for before, part in zip(("", *parts), parts)
    )
    kept = [part for part, left_out in zip(parts, adapted) if not left_out]
    return [*kept[:-1], _SYNONYMS.get(kept[-1], kept[-1])]


def dotless(name: str) -> str:
    """Return the letters and digits of a name.

    LitEma (Latent Diffusion, Stable Diffusion) names averaged weights ``model_ema.blocks0weight`` for
    ``blocks.0.weight``, because a buffer has no dots in its name; others put "_" instead of dots.
    """
    return _SEPARATORS.sub("", name)


def is_dotless(name: str, other: str) -> bool:
    """Return whether only dots differ in two names, or the last segment of one is the other without its dots."""
    if dotless(name) == dotless(other):
        return _NUMBER.findall(name) == _NUMBER.findall(other)  # layers.1.2 is not layers.12
    module, _, last = name.rpartition(".")
    plain = dotless(last)
    end = next((end for end in suffixes(other) if "." in end and dotless(end) == plain), None)
    return end is not None and not numbers_in(module) and not numbers_in(other[: len(other) - len(end)])


def suffixes(name: str) -> list[str]:
    """Return the ends of a name in whole segments, the shortest first: ``weight``, ``conv.weight``, ..."""
    ends = []
    at = len(name)
    for _ in range(DEEPEST):
        at = name.rfind(".", 0, at)
        ends.append(name[at + 1 :])
        if at < 0:
            break
    return ends


def numbers_in(name: str) -> tuple[str, ...]:
    """Return the segments that are numbers, such as layer or block numbers."""
    return tuple(part for part in name.split(".") if part.isdigit())


def family_of(name: str) -> str:
    """Return a name with "#" for its numbers: ``layers.#.weight``."""
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def unique(items: Iterable[tuple[object, str]]) -> dict[object, str]:
    """Map each signature to its name, without signatures that several names have."""
    found: dict[object, str] = {}
    several = set()
    for signature, name in items:
        if found.setdefault(signature, name) != name:
            several.add(signature)
    return {signature: name for signature, name in found.items() if signature not in several}
