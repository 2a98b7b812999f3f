"""Named tuples and typed dicts of ckptool are like those of ``typing``."""

from __future__ import annotations

import copy
import inspect
import pickle
import types
import typing
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest

from ckptool.base import records

_T = TypeVar("_T")


class Ours(records.NamedTuple):
    """A place."""

    row: int
    column: Unknown  # type: ignore[name-defined]  # noqa: F821
    name: str = "x"
    others: tuple[int, ...] = ()

    @property
    def next(self) -> Ours:
        return self._replace(row=self.row + 1)

    @classmethod
    def start(cls) -> Ours:
        return cls(0, 0)


class Theirs(typing.NamedTuple):
    """A place."""

    row: int
    column: Unknown  # type: ignore[name-defined]  # noqa: F821
    name: str = "x"
    others: tuple[int, ...] = ()

    @property
    def next(self) -> Theirs:
        return self._replace(row=self.row + 1)

    @classmethod
    def start(cls) -> Theirs:
        return cls(0, 0)


class Below(Ours):
    """A subclass with a constructor of its own."""

    def __new__(cls, row: int) -> Below:
        return super().__new__(cls, row, -row)


class Box(records.NamedTuple, Generic[_T]):
    inner: _T


def outcome(call: Callable[[Any], object], kind: Any) -> str:
    """Return the repr of a result or of the error, with one name for both classes."""
    try:
        text = repr(call(kind))
    except (TypeError, ValueError, AttributeError) as error:
        text = repr(error)
    return text.replace("Theirs", "Ours")


def matched(value: object) -> object:
    match value:
        case Ours(row, column) | Theirs(row, column):
            return row, column
    return None


CALLS: dict[str, Callable[[Any], object]] = {
    "positional": lambda kind: kind(1, 2, "y"),
    "named": lambda kind: kind(column=1, row=2, others=(3,)),
    "too few": lambda kind: kind(1),
    "unknown": lambda kind: kind(1, 2, other=3),
    "property": lambda kind: kind.start().next,
    "_make": lambda kind: kind._make(iter((1, 2, 3, 4))),
    "_replace": lambda kind: kind(1, 2)._replace(name="z"),
    "_replace unknown": lambda kind: kind(1, 2)._replace(other="z"),
    "_asdict": lambda kind: kind(1, 2)._asdict(),
    "copy": lambda kind: copy.deepcopy(kind(1, [2])),
    "pickle": lambda kind: pickle.loads(pickle.dumps(kind(1, 2))),
    "equal": lambda kind: kind(1, 2) == (1, 2, "x", ()) and hash(kind(1, 2)) == hash((1, 2, "x", ())),
    "facts": lambda kind: (kind._fields, kind._field_defaults, kind.__doc__, kind.__match_args__, kind.__mro__[1:]),
    "match": lambda kind: matched(kind(1, 2)),
    "no other attributes": lambda kind: setattr(kind(1, 2), "other", 3),
    "signature": lambda kind: [(each.name, each.default) for each in inspect.signature(kind).parameters.values()],
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_a_named_tuple(name: str) -> None:
    ours, theirs = outcome(CALLS[name], Ours), outcome(CALLS[name], Theirs)
    assert ours.replace("ckptool.base.records._Record'>, <class '", "") == theirs


@pytest.mark.parametrize("size", [0, 1, 2, 14, 15, 40])
def test_it_may_have_any_number_of_fields(size: int) -> None:
    fields = {f"field{number}": int for number in range(size)}
    made: Any = types.new_class("Made", (records.NamedTuple,), {}, lambda space: space.update(__annotations__=fields))
    assert made(*range(size)) == made(**dict(zip(fields, range(size)))) == tuple(range(size))
    assert made(*range(size))._asdict() == dict(zip(fields, range(size)))


def test_a_class_may_have_subclasses_and_parameters() -> None:
    assert Below(2) == (2, -2, "x", ())
    assert Ours(1, 1) == (1, 1, "x", ())
    assert Below(3).next == Ours(4, -3) and type(Below(3)) is Below
    assert Box[int](1) == Box(inner=1) == (1,)


class OurPart(records.TypedDict, total=False):
    """A part."""

    size: int


class OurOther(records.TypedDict):
    name: str


class OurWhole(OurOther, OurPart):
    last: list[int]


class TheirPart(typing.TypedDict, total=False):
    """A part."""

    size: int


class TheirOther(typing.TypedDict):
    name: str


class TheirWhole(TheirOther, TheirPart):
    last: list[int]


OurNamed = records.TypedDict("OurNamed", {"with": "str", "at": int}, total=False)
TheirNamed = typing.TypedDict("TheirNamed", {"with": "str", "at": int}, total=False)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(OurPart, TheirPart), (OurOther, TheirOther), (OurWhole, TheirWhole), (OurNamed, TheirNamed)]
)
def test_it_is_a_typed_dict(ours: Any, theirs: Any) -> None:
    assert list(typing.get_type_hints(ours).items()) == list(typing.get_type_hints(theirs).items())
    assert (ours.__optional_keys__, ours.__doc__) == (theirs.__optional_keys__, theirs.__doc__)
    assert ours.__name__.removeprefix("Our") == theirs.__name__.removeprefix("Their")
    assert type(ours(name="x")) is dict and ours(name="x") == {"name": "x"}
