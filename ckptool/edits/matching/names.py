"""Compare names and shapes with other names and shapes, as ``load_state_dict`` does, and pair names that correspond."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from os.path import commonprefix
from typing import Final, TypeAlias

from ...base.errors import RefusedError
from ...base.lazy import regex
from ...base.prefixes import common_length, common_prefix, unwrapper
from ...base.records import NamedTuple
from ...base.text import pluralize, quoted

#: Sizes in elements. None for a value that is not a tensor, and for a parameter that gets its shape on first use.
Shape: TypeAlias = tuple[int, ...] | None

#: Maximum number of last segments of a name that are compared; no model nests its names deeper.
_DEEPEST: Final = 24
_COUNTER: Final = "num_batches_tracked"
_NUMBER: Final = regex(r"\d+")
_SEPARATORS: Final = regex(r"[^0-9A-Za-z]")
#: Characters that prevent a name from being written in a glob.
NOT_IN_GLOBS: Final = frozenset("*?=[]{}\\")
#: The two tensors of weight_norm since torch 2.0, with the ends of their old names: ``weight_g`` and ``weight_v``.
WEIGHT_NORM: Final = (("0", "_g"), ("1", "_v"))
_WEIGHT_NORM: Final = regex(r"(^|\.)parametrizations\.(\w+)\.original([01])\Z")


class Spec(NamedTuple):
    """The shape and dtype of a value in a state dict; without a shape, ``dtype`` is the type of a non-tensor value.

    ``part`` describes the part of a sharded tensor that is in the file; "" for a whole tensor.
    """

    shape: Shape
    dtype: str
    part: str = ""

    @property
    def words(self) -> str:
        """``64x3``, ``scalar``, or the type of a non-tensor value; ``32x3 of 64x3`` for a part."""
        whole = self.dtype if self.shape is None else "x".join(map(str, self.shape)) or "scalar"
        return f"{self.part} of {whole}" if self.part else whole


class Mismatch(NamedTuple):
    """A key in both, with the two descriptions that differ: "64x3" and "10x3", "float16" and "float32"."""

    key: str
    have: str
    wanted: str


class Score(NamedTuple):
    """How well names fit: more keys that load, then fewer ``problems`` (missing, unexpected, of another size)."""

    loads: int
    problems: int

    @property
    def rank(self) -> tuple[int, int]:
        """The quality of the fit; larger is better."""
        return self.loads, -self.problems


class Comparison(NamedTuple):
    """Keys by outcome. ``filled`` are missing keys that torch fills in itself."""

    loads: list[str]
    missing: list[str]
    unexpected: list[str]
    sizes: list[Mismatch]
    dtypes: list[Mismatch]
    filled: list[str]

    @property
    def complete(self) -> bool:
        """Whether ``load_state_dict(strict=True)`` would accept it."""
        return not (self.missing or self.unexpected or self.sizes)


class Cause(NamedTuple):
    """A reason why keys do not load, with what helps, as a clause for a message.

    ``keys`` are the keys of the model that it explains, and ``unused`` the keys of the file that have no place there.
    ``replaceable`` says that a copy without the keys loses nothing, because they are computed or trained again.
    """

    kind: str
    message: str
    keys: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    replaceable: bool = False


def agrees(have: Shape, wanted: Shape) -> bool:
    """Return whether a value with one shape loads where the other shape is wanted.

    Torch accepts one element for a scalar, because torch 0.3 had no scalars (Module._load_from_state_dict).
    """
    return wanted is None or have == wanted or (wanted == () and have == (1,))


def renamed_module(after: Comparison, have: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> tuple[str, str] | None:
    """Return the only layer that the target does not have, and the only one that it lacks, if their shapes agree.

    Shapes do not prove that they are the same layer, so this is a question. Nothing is returned for square matrices,
    which may also be transposed.
    """
    if after.sizes or not (after.loads and after.missing) or len(after.missing) != len(after.unexpected):
        return None
    own, other = ({name.rpartition(".")[0] for name in names} for names in (after.unexpected, after.missing))
    if len(own) != 1 or len(other) != 1:
        return None
    [old], [new] = own, other
    pairs = {name: new + name.removeprefix(old) for name in after.unexpected}
    fits = {*pairs.values()} == {*after.missing} and all(
        agrees(have[name], wanted[renamed]) and not _is_square(have[name]) for name, renamed in pairs.items()
    )
    return (old, new) if fits and old and new and not NOT_IN_GLOBS & {*old, *new} else None


def _is_square(shape: Shape) -> bool:
    return shape is not None and len(shape) == 2 and shape[0] == shape[1]


def fillable(wanted: Collection[str]) -> frozenset[str]:
    """Return the batch norm counters, which torch fills in for files from before 0.4.1 (_NormBase, version 2)."""
    return frozenset(name for name in wanted if name.rpartition(".")[2] == _COUNTER and _mean_of(name) in wanted)


def _mean_of(counter: str) -> str:
    return counter.removesuffix(_COUNTER) + "running_mean"


def old_weight_norm(name: str) -> str:
    """Return the old name of a tensor of weight_norm; any other name unchanged."""
    return _WEIGHT_NORM.sub(lambda match: f"{match[1]}{match[2]}{dict(WEIGHT_NORM)[match[3]]}", name)


def renamed_weight_norm(pairs: Iterable[tuple[str, str]]) -> list[Cause]:
    """Return the reason why tensors of weight_norm get their old names; ``pairs`` are old and new names of tensors."""
    renamed = tuple(new for name, new in pairs if _WEIGHT_NORM.search(name) and not _WEIGHT_NORM.search(new))
    if not renamed:
        return []
    message = (
        "the file has the names of weight_norm since torch 2.0 (parametrizations.weight.original0 and original1), and"
        " the model those before (weight_g and weight_v)"
    )
    return [Cause("weight_norm", message, renamed)]


def as_torch_accepts(wanted: Mapping[str, Spec], have: Collection[str]) -> Mapping[str, Spec]:
    """Return what a model wants under the old names of weight_norm, if the checkpoint has them; torch accepts both.

    Source: ``_weight_norm_compat_hook`` in torch/nn/utils/parametrizations.py, which renames a complete pair.
    """
    ends = {name.rpartition(".")[2] for name in have}
    if not any(end.endswith("_g") and end[:-2] + "_v" in ends for end in ends):
        return wanted
    old = {name: old_weight_norm(name) for name in wanted}
    pairs = {name[:-2] for name in old.values() if name.endswith("_g")} & {
        name[:-2] for name in old.values() if name.endswith("_v")
    }
    return {old[name] if old[name][:-2] in pairs else name: spec for name, spec in wanted.items()}


def score(names: Sequence[str], shapes: Sequence[Shape], wanted: Mapping[str, Shape], filled: frozenset[str]) -> Score:
    """Return the score of ``names`` with ``shapes`` against ``wanted``; ``filled`` are keys that may be missing."""
    loads = wrong = unexpected = present = 0
    for name, shape in zip(names, shapes):
        if name not in wanted:
            unexpected += 1
        elif agrees(shape, wanted[name]):
            loads += 1
        else:
            wrong += 1
        if name in filled:
            present += 1
    missing = len(wanted) - loads - wrong - (len(filled) - present)
    return Score(loads, missing + unexpected + wrong)


def compare(have: Mapping[str, Spec], wanted: Mapping[str, Spec], filled: frozenset[str]) -> Comparison:
    """Compare all keys of both sides, in the order of the target, then of the checkpoint."""
    keys = Comparison([], [], [name for name in have if name not in wanted], [], [], [])
    for name, want in wanted.items():
        own = have.get(name)
        if own is None:
            # torch fills in a counter only if the rest of its module is there.
            (keys.filled if name in filled and _mean_of(name) in have else keys.missing).append(name)
        elif agrees(own.shape, want.shape) and own.part in ("", want.part):
            keys.loads.append(name)
            if own.shape is not None and want.shape is not None and own.dtype != want.dtype:
                keys.dtypes.append(Mismatch(name, own.dtype, want.dtype))
        else:
            keys.sizes.append(Mismatch(name, own.words, want.words))
    return keys


def pair_names(have: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> dict[str, str]:
    """Map our names to their partners in ``wanted``; names without a certain partner are left out.

    Names are paired in this order. First equal names, then names that are equal without wrappers. Then, the longest
    common end first, families of names that differ only in numbers and have equal shapes at equal numbers, and single
    names of equal shape; in both cases only if no other on either side has this end and shape. Then, the other
    parameters of paired modules. Last, names of averaged weights without dots, and names that differ by segments before
    them. No two names get the same partner.
    """
    equal = {name: name for name in have if name in wanted}
    own_names = _by_unwrapped_name(name for name in have if name not in equal)
    other_names = _by_unwrapped_name(name for name in wanted if name not in equal)
    ours = {plain: have[name] for plain, name in own_names.items()}
    theirs = {plain: wanted[name] for plain, name in other_names.items()}
    partners: dict[str, str] = {}

    def settle(pairs: Iterable[tuple[str, str]]) -> int:
        before = len(partners)
        for own, other in pairs:
            if own in ours and other in theirs:
                partners[own] = other
                del ours[own], theirs[other]
        return len(partners) - before

    settle([(name, name) for name in ours if name in theirs])
    deepest = min(max((min(name.count(".") + 1, _DEEPEST) for name in side), default=0) for side in (ours, theirs))
    for depth in range(deepest, 0, -1):
        if not ours or not theirs:
            break
        settle(_family_pairs(ours, theirs, depth))
        pairs = _pair_unique(_by_end(ours, depth), _by_end(theirs, depth))
        # Names that differ only in numbers are different places in one sequence, so they are not partners.
        settle([(own, other) for own, other in pairs if family_of(own) != family_of(other)])
    while ours and theirs and settle(_sibling_pairs({**equal, **partners}, ours, theirs)):
        pass
    settle(_dotless_pairs(ours, theirs))
    settle(respelled_pairs(ours, theirs))
    return equal | {own_names[own]: other_names[other] for own, other in partners.items()}


def _by_unwrapped_name(names: Iterable[str]) -> dict[str, str]:
    """Map names without wrappers to the original names; names that would become equal stay unchanged."""
    originals = list(names)
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for plain, name in zip(map(unwrapper(originals), originals), originals):
        groups[plain].append(name)
    return {plain if len(same) == 1 else name: name for plain, same in groups.items() for name in same}


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


def averaged_without_dots(names: Collection[str], wanted: Collection[str]) -> str:
    """Return the module that holds averaged weights of a model under names without dots, with its dot, or ""."""
    prefix = common_prefix(list(wanted))
    plain = {dotless(name[start:]) for name in wanted for start in {0, len(prefix)} if "." in name[start:]}
    heads = Counter(f"{head}." for head, _, last in (name.rpartition(".") for name in names) if dotless(last) in plain)
    head, number = max(heads.items(), key=lambda item: item[1], default=("", 0))
    return head if number * 2 > len(wanted) and not numbers_in(head) else ""


def _dotless_pairs(ours: Mapping[str, Shape], theirs: Mapping[str, Shape]) -> list[tuple[str, str]]:
    """Return pairs of names without dots with the names that they stand for, in the same model or its part."""
    prefix = common_prefix(list(theirs))
    known = None not in theirs.values()  # a message about missing keys does not say their shapes
    groups: defaultdict[str, list[tuple[Hashable, str]]] = defaultdict(list)
    for name, shape in ours.items():
        module, _, last = name.rpartition(".")
        groups[module].append(((dotless(last), shape if known else None), name))
    pairs = []
    for start in {0, len(prefix)}:
        index = _unique(((dotless(name[start:]), shape if known else None), name) for name, shape in theirs.items())
        for own in groups.values():
            found = [(one, there) for signature, one in _unique(own).items() if one and (there := index.get(signature))]
            # Without a name that lost dots, it is only the end that is equal.
            if any("." in there[start:] for _, there in found):
                pairs += found
    return pairs


def respelled_pairs(ours: Mapping[str, Shape], theirs: Mapping[str, Shape]) -> list[tuple[str, str]]:
    """Return pairs of names where one is the other with segments added before it, and no other name could be meant.

    The shapes are equal, or the shape in the target is not known.
    """
    partners: defaultdict[str, list[str]] = defaultdict(list)
    for name, shape in ours.items():
        for end in suffixes(name)[:-1]:
            if end in theirs and agrees(shape, theirs[end]):
                partners[name].append(end)
    for other, shape in theirs.items():
        for end in suffixes(other)[:-1]:
            if end in ours and agrees(ours[end], shape):
                partners[end].append(other)
    taken = Counter(other for others in partners.values() for other in others)
    return [(own, others[0]) for own, others in partners.items() if len(others) == 1 == taken[others[0]]]


def rename_globs(names: Collection[str], pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return old and new names that rename ``pairs`` and no other of ``names``; a pair that no glob can spell is left
    out.

    Both end with a star where the old names have a common beginning that no other name has.
    """
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for own, other in pairs:
        size = min(len(own), len(other))
        groups[own[: len(own) - size], other[: len(other) - size]].append(own)
    globs = []
    for (fewer, more), together in groups.items():
        begun = [together]
        while begun:
            group = begun.pop(0)
            head = commonprefix(group)  # noqa: RUF071 (character by character is what is wanted)
            if len(group) == 1 or (sum(name.startswith(head) for name in names) == len(group) and head != fewer):
                star = "*" if len(group) > 1 else ""
                if not NOT_IN_GLOBS & set(head + more):
                    globs.append((head + star, f"{more}{head[len(fewer) :]}{star}"))
                continue
            parts: defaultdict[str, list[str]] = defaultdict(list)
            for name in group:
                parts[name[: len(head) + 1]].append(name)
            begun += parts.values()
    return globs


class NameDifference(NamedTuple):
    """How two names differ.

    ``head`` is the part before the common end of ``end`` segments, and ``longer`` has one segment more (None if that
    does not exist). ``middle`` also lacks the common beginning of ``begin`` segments (None if it has only numbers or is
    empty). ``moved`` says that they differ only in numbers: another place in a sequence, which may be coincidence.
    """

    head: tuple[str, str]
    longer: tuple[str, str] | None
    middle: tuple[str, str] | None
    begin: int
    end: int
    moved: bool


def name_difference(own: str, other: str) -> NameDifference:
    """Compare two names segment by segment, from both ends."""
    a, b = own.split("."), other.split(".")
    end = common_length(a[::-1], b[::-1])
    begin = min(common_length(a, b), len(a) - end, len(b) - end)
    to_a, to_b = len(a) - end, len(b) - end
    longer = (".".join(a[: to_a + 1]), ".".join(b[: to_b + 1])) if end > 1 else None
    middle = (".".join(a[begin:to_a]), ".".join(b[begin:to_b]))
    plain = all(part.isdigit() for part in a[begin:to_a])
    moved = plain and begin < to_a and all(part.isdigit() for part in b[begin:to_b])
    head = (".".join(a[:to_a]), ".".join(b[:to_b]))
    return NameDifference(head, longer, None if plain else middle, begin, end, moved)


def suffixes(name: str) -> list[str]:
    """Return the ends of a name in whole segments, the shortest first: ``weight``, ``conv.weight``, ..."""
    ends = []
    at = len(name)
    for _ in range(_DEEPEST):
        at = name.rfind(".", 0, at)
        ends.append(name[at + 1 :])
        if at < 0:
            break
    return ends


def numbers_in(name: str) -> tuple[str, ...]:
    """Return the segments that are numbers, such as layer or block numbers."""
    return tuple(part for part in name.split(".") if part.isdigit())


def _by_end(side: Mapping[str, Shape], depth: int) -> Iterator[tuple[Hashable, str]]:
    """Yield each name with its last ``depth`` segments and its shape."""
    for name, shape in side.items():
        ends = suffixes(name)
        if len(ends) >= depth:
            yield (ends[depth - 1], shape), name


def _unique(side: Iterable[tuple[Hashable, str]]) -> dict[Hashable, str | None]:
    """Map each signature of a side, (signature, item), to its item; to None if it occurs more than once."""
    unique: dict[Hashable, str | None] = {}
    for signature, item in side:
        unique[signature] = None if signature in unique else item
    return unique


def _pair_unique(ours: Iterable[tuple[Hashable, str]], theirs: Iterable[tuple[Hashable, str]]) -> list[tuple[str, str]]:
    """Pair the items whose signature occurs exactly once on either side; the sides are (signature, item)."""
    others = _unique(theirs)
    return [(own, other) for signature, own in _unique(ours).items() if own and (other := others.get(signature))]


def family_of(name: str) -> str:
    """Return a name with "#" for its numbers: ``layers.#.weight``."""
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _families(side: Mapping[str, Shape]) -> dict[str, dict[tuple[str, ...], tuple[Shape, str]]]:
    """Return (shape, name) by family (see ``family_of``) and by numbers."""
    families: dict[str, dict[tuple[str, ...], tuple[Shape, str]]] = {}
    for name, shape in side.items():
        numbers = numbers_in(name)
        if numbers:
            families.setdefault(family_of(name), {})[numbers] = (shape, name)
    return families


def _family_pairs(ours: Mapping[str, Shape], theirs: Mapping[str, Shape], depth: int) -> Iterator[tuple[str, str]]:
    """Yield the pairs in families with a common end of ``depth`` segments and equal shapes at equal numbers.

    A single name with the same number and shape proves little: layer 1 of one model may be layer 3 of the other. A
    whole family with equal numbers and shapes is good evidence.
    """
    here, there = _families(ours), _families(theirs)

    def signatures(families: Mapping[str, dict[tuple[str, ...], tuple[Shape, str]]]) -> Iterator[tuple[Hashable, str]]:
        for family, members in families.items():
            ends = suffixes(family)
            if len(ends) >= depth:
                shapes = frozenset((numbers, shape) for numbers, (shape, _) in members.items())
                yield (ends[depth - 1], shapes), family

    for own, other in _pair_unique(signatures(here), signatures(there)):
        yield from ((name, there[other][numbers][1]) for numbers, (_, name) in here[own].items())


def _sibling_pairs(
    paired: Mapping[str, str], ours: Mapping[str, Shape], theirs: Mapping[str, Shape]
) -> list[tuple[str, str]]:
    """Return pairs with equal last segment and shape, in modules that were paired one to one."""
    forth: dict[str, set[str]] = {}
    back: dict[str, set[str]] = {}
    for own, other in paired.items():
        (a, _, end), (b, _, other_end) = own.rpartition("."), other.rpartition(".")
        if end == other_end:
            forth.setdefault(a, set()).add(b)
            back.setdefault(b, set()).add(a)
    pairs = []
    for name, shape in ours.items():
        module, dot, end = name.rpartition(".")
        others = forth.get(module, set())
        if dot and len(others) == 1:
            (there,) = others
            other = f"{there}.{end}" if there else end
            if len(back[there]) == 1 and other in theirs and theirs[other] == shape:
                pairs.append((name, other))
    return pairs
