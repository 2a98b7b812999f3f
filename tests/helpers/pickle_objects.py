"""Python objects to pickle: shared, cyclic, of every kind that has a pickle form of its own."""

from __future__ import annotations

import argparse
import collections
import enum
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

__all__ = ["Pid", "Plain", "dump", "graphs", "python_dump"]


class Pid:
    """An object that lives outside of the pickle."""

    def __init__(self, key: Any) -> None:
        self.key = key


class Plain:
    """NEWOBJ and BUILD."""

    class Inner:
        """A class that protocols below 4 fetch by ``getattr``."""


class Slots:
    """BUILD with a pair of states."""

    __slots__ = ("a", "b")


class Keywords(Plain):
    """NEWOBJ_EX."""

    def __new__(cls, *, size: int = 0) -> Keywords:
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"size": 1}


class Filled:
    """REDUCE, then APPENDS, SETITEMS and BUILD on one object."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __reduce__(self) -> Any:
        return Filled, (), {"x": 1}, iter(self.kept), iter((number, item) for number, item in enumerate(self.kept))


class Holder:
    """REDUCE with arguments that may lead back to it."""

    def __init__(self, held: list[Any]) -> None:
        self.held = held

    def __reduce__(self) -> Any:
        return Holder, (self.held,)


class Colour(enum.Enum):
    """REDUCE of a class with a value."""

    RED = 1


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.key if isinstance(obj, Pid) else None


class _PythonPickler(pickle._Pickler):  # type: ignore[name-defined, misc]
    def persistent_id(self, obj: Any) -> Any:
        return obj.key if isinstance(obj, Pid) else None


def dump(obj: Any, protocol: int) -> bytes:
    """The pickle that CPython's C pickler writes, which is the one of torch.save."""
    file = io.BytesIO()
    _Pickler(file, protocol).dump(obj)
    return file.getvalue()


def python_dump(obj: Any, protocol: int) -> bytes:
    """The pickle that the pure Python pickler writes."""
    file = io.BytesIO()
    _PythonPickler(file, protocol).dump(obj)
    return file.getvalue()


_ATOMS: list[Any] = [None, True, False, 0, 255, 256, 65_535, 65_536, -1, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1]
_ATOMS += [2**63, -(2**2039), 2**2039, 0.0, -0.0, 1.5, float("inf"), float("nan"), complex(1, -0.0), (), "", "weight"]
_ATOMS += [
    "naïve \ud800\n\\\r\x1a\0 \U0001f600",
    "x" * 255,
    "x" * 256,
    b"",
    b"bytes\n",
    b"b" * 256,
    bytearray(b"array"),
]
_ATOMS += [Colour.RED, Plain, Plain.Inner, len, dump, random.Random, ..., NotImplemented, type(None), range(3)]
_ATOMS += [frozenset(), collections.Counter("abca"), pickle.PickleBuffer(b"read only"), Keywords(), b"y" * 70_000]


def _instance(make: Callable[[], Any], attributes: tuple[str, ...]) -> Callable[[list[Any]], Any]:
    def fill(items: list[Any]) -> Any:
        made = make()
        for name, item in zip(attributes, items):
            setattr(made, name, item)
        return made

    return fill


def _filled(items: list[Any]) -> Filled:
    made = Filled()
    made.kept = items
    return made


#: How to make an object of others.
_MAKERS: list[Callable[[list[Any]], Any]] = [
    list,
    list,
    tuple,
    tuple,
    lambda items: dict(enumerate(items)),
    lambda items: {f"key{number}": item for number, item in enumerate(items)},
    lambda items: collections.OrderedDict(enumerate(items)),
    lambda items: collections.defaultdict(list, enumerate(items)),
    lambda items: collections.deque(items, maxlen=99),
    lambda items: set(filter(_plain, items)),
    lambda items: frozenset(filter(_plain, items)),
    lambda items: argparse.Namespace(**{f"key{number}": item for number, item in enumerate(items)}),
    lambda items: Pid(tuple(items) or ("storage",)),
    _instance(Plain, ("a", "b", "c")),
    _instance(Slots, ("a", "b")),
    _filled,
    Holder,
]


def _plain(item: Any) -> bool:
    return isinstance(item, int | float | str | bytes | Plain | frozenset)


@st.composite
def graphs(draw: st.DrawFn) -> list[Any]:
    """A list of objects that hold each other: each holds earlier ones, and the mutable ones also later ones."""
    made: list[Any] = [draw(st.sampled_from(_ATOMS)) for _ in range(draw(st.integers(0, 6)))]
    for _ in range(draw(st.integers(0, 12))):
        held = draw(st.lists(st.integers(0, 30), max_size=5))
        made.append(draw(st.sampled_from(_MAKERS))([made[number] for number in held if number < len(made)]))
    for _ in range(draw(st.integers(0, 6)) if made else 0):
        holder, held = draw(st.sampled_from(made)), draw(st.sampled_from(made))
        if isinstance(holder, list | collections.deque):
            holder.append(held)
        elif isinstance(holder, dict) and not isinstance(holder, collections.Counter):
            holder["later"] = held
        elif isinstance(holder, Plain):
            holder.later = held  # type: ignore[attr-defined]
        elif isinstance(holder, Holder):
            holder.held.append(held)
    return made if draw(st.booleans()) else made[-1:]
