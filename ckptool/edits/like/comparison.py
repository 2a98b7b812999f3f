"""What ``load_state_dict`` would say of one mapping of names and shapes given to another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

#: Sizes in elements; None for what is no tensor, and for a parameter that takes its shape when it is first used.
Shape: TypeAlias = tuple[int, ...] | None


class Shaped(NamedTuple):
    """A value of a state dict: its shape and dtype; without a shape, ``dtype`` is the type of what is no tensor."""

    shape: Shape
    dtype: str


class Difference(NamedTuple):
    """A key that both have, with what differs in words: "64x3" and "10x3", "float16" and "float32"."""

    key: str
    have: str
    wanted: str


class Score(NamedTuple):
    """How well names fit: more keys that load, then fewer ``problems`` (missing, unexpected, of another size)."""

    loads: int
    problems: int

    @property
    def rank(self) -> tuple[int, int]:
        """Larger is better."""
        return self.loads, -self.problems


class Comparison(NamedTuple):
    """Keys by what becomes of them. ``filled`` are missing ones that torch makes up itself."""

    loads: list[str]
    missing: list[str]
    unexpected: list[str]
    sizes: list[Difference]
    dtypes: list[Difference]
    filled: list[str]

    @property
    def complete(self) -> bool:
        """Would ``load_state_dict(strict=True)`` take it?"""
        return not (self.missing or self.unexpected or self.sizes)


def agrees(have: Shape, wanted: Shape) -> bool:
    """Does a value of the one shape load where the other is wanted?

    Torch takes one element for a scalar, because torch 0.3 had no scalars (Module._load_from_state_dict).
    """
    return wanted is None or have == wanted or (wanted == () and have == (1,))


def fillable(wanted: Collection[str]) -> frozenset[str]:
    """The counters of batch norms, which torch fills in for files from before 0.4.1 (_NormBase, version 2)."""
    return frozenset(
        name
        for name in wanted
        if name.endswith("num_batches_tracked")
        and name.removesuffix("num_batches_tracked") + "running_mean" in wanted
        and (name == "num_batches_tracked" or name.endswith(".num_batches_tracked"))
    )


def score(names: Sequence[str], shapes: Sequence[Shape], wanted: Mapping[str, Shape], filled: frozenset[str]) -> Score:
    """The score of ``names`` with ``shapes`` against ``wanted``; ``filled`` are keys that may be missing."""
    loads = wrong = unexpected = made_up = 0
    for name, shape in zip(names, shapes):
        if name not in wanted:
            unexpected += 1
        elif agrees(shape, wanted[name]):
            loads += 1
        else:
            wrong += 1
        if name in filled:
            made_up += 1
    missing = len(wanted) - loads - wrong - (len(filled) - made_up)
    return Score(loads, missing + unexpected + wrong)


def compared(have: Mapping[str, Shaped], wanted: Mapping[str, Shaped], filled: frozenset[str]) -> Comparison:
    """Every key of both, in the order of the target, then of the checkpoint."""
    found = Comparison([], [], [name for name in have if name not in wanted], [], [], [])
    for name, want in wanted.items():
        own = have.get(name)
        if own is None:
            # Where the whole module is missing, nobody asks for its counter.
            made_up = name in filled and name.removesuffix("num_batches_tracked") + "running_mean" in have
            (found.filled if made_up else found.missing).append(name)
        elif agrees(own.shape, want.shape):
            found.loads.append(name)
            if own.shape is not None and want.shape is not None and own.dtype != want.dtype:
                found.dtypes.append(Difference(name, own.dtype, want.dtype))
        else:
            found.sizes.append(Difference(name, told(own), told(want)))
    return found


def told(value: Shaped) -> str:
    """``64x3``, ``scalar``, or the type of what is no tensor."""
    if value.shape is None:
        return value.dtype
    return "x".join(map(str, value.shape)) or "scalar"
