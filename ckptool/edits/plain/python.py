"""Python's own types: paths, dates, collections, enumerations of the standard library."""

from __future__ import annotations

import datetime
from typing import Final

from ...human import counted, shown
from ...objects import elements, mapped_name
from ...pickles.nodes import Call, Global, List, Ref
from .case import UNKNOWN, Case, Plain, Verdict, raw_bytes

__all__ = ["PYTHON_RULES"]

#: A range is written out up to so many numbers.
_RANGE: Final = 100_000


def _path(case: Case) -> Verdict:
    """``PosixPath('a', 'b')``, in Python 3.13 from ``pathlib._local``."""
    module, _, name = case.name.rpartition(".")
    if module not in ("pathlib", "pathlib._local") or "Path" not in name:
        return None
    parts = [case.text(number) for number in range(len(case.args))]
    if None in parts:
        return UNKNOWN
    mark = "\\" if "Windows" in name else "/"
    words = [part for part in parts if part]
    head = words[0] if words else "."
    text = head + ("" if head.endswith(mark) else mark) * (len(words) > 1) + mark.join(words[1:])
    return Plain(text, f"str {shown(text)}")


def _date(case: Case) -> Verdict:
    """``datetime``, ``date`` and ``time`` hold their fields in a few bytes (CPython, Lib/_pydatetime.py)."""
    if case.name == "datetime.timedelta":
        values = [case.value(ref) for ref in case.args]
        if len(values) != 3 or not all(type(value) is int and abs(value) < 1 << 40 for value in values):
            return UNKNOWN
        days, seconds, micro = (int(str(value)) for value in values)
        total = days * 86400 + seconds + micro / 1e6
        return Plain(total, f"float {total}, in seconds")
    if case.name == "datetime.timezone":
        found = _zone(case)
        return Plain(found, f"str {found!r}") if found else UNKNOWN
    if case.name not in ("datetime.datetime", "datetime.date", "datetime.time"):
        return None
    if len(case.args) >= 3 and all(type(case.value(ref)) is int for ref in case.args[:3]):
        return UNKNOWN
    raw = raw_bytes(case.rewrite, case.args[0]) if case.args else None
    text = _iso(case.name, raw) if raw is not None else None
    if text is None:
        return UNKNOWN
    if len(case.args) > 1:
        zone = case.value(case.args[1])
        text += zone if type(zone) is str else _zone_of(case, case.args[1]) or ""
    return Plain(text, f"str {text!r}")


def _iso(name: str, raw: bytes) -> str | None:
    try:
        if name == "datetime.date" and len(raw) == 4:
            return datetime.date(raw[0] << 8 | raw[1], raw[2] & 0x7F, raw[3]).isoformat()
        if name == "datetime.time" and len(raw) == 6:
            return datetime.time(raw[0] & 0x7F, raw[1], raw[2], int.from_bytes(raw[3:6], "big")).isoformat()
        if name == "datetime.datetime" and len(raw) == 10:
            year, micro = raw[0] << 8 | raw[1], int.from_bytes(raw[7:10], "big")
            return datetime.datetime(year, raw[2] & 0x7F, raw[3], raw[4], raw[5], raw[6], micro).isoformat()
    except ValueError:
        return None
    return None


def _zone(case: Case) -> str:
    return _offset(case, case.args[0]) if case.args else ""


def _zone_of(case: Case, ref: Ref) -> str:
    """The offset of ``timezone(timedelta(...))`` as "+02:00", "" for another zone."""
    node = case.current(ref)
    args = case.current(node.args) if isinstance(node, Call) else ()
    return _offset(case, args[0]) if type(args) is tuple and args else ""


def _offset(case: Case, ref: Ref) -> str:
    value: object = case.current(ref)
    if isinstance(value, Call):
        parts = case.current(value.args)
        numbers = [case.value(part) for part in parts] if type(parts) is tuple else []
        if len(numbers) != 3 or not all(type(number) is int for number in numbers[:2]):
            return ""
        value = float(int(str(numbers[0])) * 86400 + int(str(numbers[1])))
    if type(value) is not float or abs(value) > 86400:
        return ""
    minutes = abs(int(value)) // 60
    return f"{'-' if value < 0 else '+'}{minutes // 60:02}:{minutes % 60:02}"


def _collection(case: Case) -> Verdict:
    """defaultdict, deque, frozenset, range, slice and the calls that make the builtin containers."""
    name, args = case.name, case.args
    if name == "collections.defaultdict":
        pairs = list(zip(case.node.pairs[::2], case.node.pairs[1::2]))
        return Plain(case.dict_of(pairs), f"dict, {_entries(len(pairs))}; its default is left out")
    if name == "collections.deque":
        first = elements(case.graph.nodes[args[0]]) if args else ()
        items = [*first, *case.node.items]
        return Plain(List(items), f"list, {counted(len(items), 'element')}")
    if name in ("builtins.frozenset", "builtins.list", "builtins.tuple") and len(args) <= 1:
        members = elements(case.graph.nodes[args[0]]) if args else ()
        items = [*members, *case.node.items]
        if name == "builtins.tuple":
            return Plain(tuple(items), f"tuple, {counted(len(items), 'element')}")
        if name == "builtins.list":
            return Plain(List(items), f"list, {counted(len(items), 'element')}")
        held = case.rewrite.add(List(items))
        return Plain(case.call("__builtin__", "set", held), f"set, {counted(len(items), 'element')}")
    if name in ("builtins.range", "builtins.slice"):
        values = [case.value(ref) for ref in args]
        if name == "builtins.range" and len(values) == 3 and all(type(value) is int for value in values):
            found = range(*(int(str(value)) for value in values))
            if len(found) <= _RANGE:
                numbers = [case.rewrite.constant(number) for number in found]
                return Plain(List(numbers), f"list, {counted(len(numbers), 'element')}")
        return Plain(tuple(args), "tuple of start, stop and step")
    return None


def _entries(count: int) -> str:
    return counted(count, "entry")


def _texts(case: Case) -> Verdict:
    """What a string says as well: UUIDs, decimals, fractions, patterns."""
    if case.name in ("decimal.Decimal", "fractions.Fraction", "re._compile") and case.args:
        text = case.text(0)
        return Plain(text, f"str {shown(text)}") if text is not None else UNKNOWN
    if case.name == "uuid.UUID":
        value = case.value(case.attribute("int")) if case.attribute("int") >= 0 else None
        if type(value) is int and 0 <= value < 1 << 128:
            digits = f"{value:032x}"
            text = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
            return Plain(text, f"str {text!r}")
        return UNKNOWN
    if case.name == "builtins.getattr" and len(case.args) == 2:
        # An Enum member by its name, as Python 3.11 pickles some.
        owner, member = case.current(case.args[0]), case.text(1)
        if member is None or not isinstance(owner, Global):
            return UNKNOWN
        text = f"{mapped_name(owner)}.{member}"
        return Plain(text, f"str {shown(text)}")
    return None


def _partial(case: Case) -> Verdict:
    """``functools.partial``: its state is (function, arguments, keywords, attributes)."""
    if case.name != "functools.partial":
        return None
    state = case.value(case.node.states[-1]) if case.node.states else ()
    if type(state) is not tuple or len(state) < 3:
        return UNKNOWN
    names = [case.rewrite.constant(name) for name in ("func", "args", "keywords")]
    return Plain(case.dict_of(list(zip(names, state[:3]))), "dict of func, args and keywords")


def _generator(case: Case) -> Verdict:
    """``torch.Generator``: (seed, offset, state as a ByteTensor); the state alone says all."""
    if case.name != "torch._C.Generator":
        return None
    state = case.value(case.node.states[-1]) if case.node.states else ()
    if type(state) is not tuple or len(state) != 3:
        return UNKNOWN
    return Plain(case.current(state[2]), "its state, a ByteTensor for set_state")


PYTHON_RULES: Final = (_path, _date, _collection, _texts, _partial, _generator)
