"""Names, shapes and dtypes of a state dict, compared with others as ``load_state_dict`` does."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from ...base.lazy import regex
from ...base.prefixes import unwrapper
from ...base.records import NamedTuple

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
                keys.dtypes.append(Mismatch(name, own.dtype, want.dtype))
        else:
            keys.sizes.append(Mismatch(name, own.words, want.words))
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


def is_new_weight_norm(name: str) -> bool:
    """Return whether a tensor of weight_norm has the name that it has since torch 2.0."""
    return bool(_WEIGHT_NORM.search(name))


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
