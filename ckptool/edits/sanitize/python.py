"""Python's own types: paths, dates, collections, enumerations of the standard library."""

from __future__ import annotations

import datetime
from pathlib import PurePosixPath, PureWindowsPath
from typing import Final

from ...base.text import counted, shown
from ...checkpoint.objects import elements, mapped_name, pair_list
from ...pickles.nodes import Call, Dict, Global, List, Ref
from .case import UNKNOWN, Case, Plain, Verdict, raw_bytes

#: The flags of a pattern of text that has none: re.UNICODE.
_NO_FLAGS: Final = 32
#: A range is written out up to so many numbers.
_RANGE: Final = 100_000


def _path(case: Case) -> Verdict:
    """``PosixPath('a', 'b')``, in Python 3.13 from ``pathlib._local``. The parts may be any text: they are joined."""
    module, _, name = case.name.rpartition(".")
    if module not in ("pathlib", "pathlib._local") or not name.endswith("Path"):
        return None
    parts = [case.text(number) for number in range(len(case.args))]
    if None in parts or case.node.states:
        return UNKNOWN
    kind = PureWindowsPath if "Windows" in name else PurePosixPath
    text = str(kind(*(part for part in parts if part is not None)))
    return Plain(text, f"str {shown(text)}")


def _date(case: Case) -> Verdict:
    """``datetime``, ``date`` and ``time`` hold their fields in a few bytes (CPython, Lib/_pydatetime.py)."""
    if case.name in ("datetime.timedelta", "datetime.timezone"):
        duration = _duration(case) if case.name == "datetime.timedelta" else None
        if duration is not None:
            total = duration.total_seconds()
            return Plain(total, f"float {total}, in seconds")
        offset = _fixed(case) if case.name == "datetime.timezone" else ""
        return Plain(offset, f"str {offset!r}") if offset else UNKNOWN
    if case.name == "zoneinfo.ZoneInfo._unpickle":
        key = case.text(0)
        return Plain(key, f"str {shown(key)}") if key is not None else UNKNOWN
    if case.name not in ("datetime.datetime", "datetime.date", "datetime.time"):
        return None
    raw = raw_bytes(case.rewrite, case.args[0]) if case.args else None
    text = _iso(case.name, raw) if raw is not None else None
    zone = _zone(case, case.args[1]) if len(case.args) > 1 else ""
    if text is None or zone is None:
        return UNKNOWN
    return Plain(text + zone, f"str {text + zone!r}")


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


def _zone(case: Case, ref: Ref) -> str | None:
    """What a date says about its zone: "+02:00", "[Europe/Berlin]" as in RFC 9557; None where that is not known.

    The zone may have been made plain already, at another place that holds it.
    """
    node = case.current(ref)
    if isinstance(node, str):
        return node if node[:1] in ("+", "-") else f"[{node}]"
    if not isinstance(node, Call):
        return "" if node is None else None
    inner = Case(case.rewrite, ref, node, case.storages)
    if inner.name == "datetime.timezone":
        return _fixed(inner) or None
    if inner.name in ("pytz._UTC", "dateutil.tz.tz.tzutc"):
        return "+00:00"
    if inner.name in ("zoneinfo.ZoneInfo._unpickle", "pytz._p") and inner.text(0) is not None:
        return f"[{inner.text(0)}]"
    return None


def _fixed(case: Case) -> str:
    """The offset of ``timezone(timedelta(...))`` as "+02:00", "" for none that there can be."""
    node = case.current(case.args[0]) if case.args else None
    duration = None
    if isinstance(node, Call):
        duration = _duration(Case(case.rewrite, case.args[0], node, case.storages))
    elif type(node) is float and abs(node) < 1e9:
        duration = datetime.timedelta(seconds=node)  # made plain already
    try:
        return "" if duration is None else datetime.time(tzinfo=datetime.timezone(duration)).isoformat()[8:]
    except ValueError:
        return ""


def _duration(case: Case) -> datetime.timedelta | None:
    """``timedelta(days, seconds, microseconds)``."""
    values = [case.current(ref) for ref in case.args]
    numbers = [value for value in values if type(value) is int]
    if case.name != "datetime.timedelta" or len(values) != 3 or len(numbers) != 3:
        return None
    try:
        return datetime.timedelta(*numbers)
    except OverflowError:
        return None


def _collection(case: Case) -> Verdict:
    """defaultdict, deque, frozenset, range, slice and the calls that make the builtin containers."""
    name, args = case.name, case.args
    if name == "collections.defaultdict":
        pairs = list(zip(case.node.pairs[::2], case.node.pairs[1::2]))
        return Plain(case.dict_of(pairs), f"dict, {_entries(len(pairs))}; its default is left out")
    if name == "collections.deque":
        first = elements(case.graph.nodes[args[0]]) if args else ()
        items = [*first, *case.node.items]
        bound = "; its bound is left out" if len(args) > 1 else ""
        return Plain(List(items), f"list, {counted(len(items), 'element')}{bound}")
    if name == "builtins.dict" and len(args) <= 1:
        listed = pair_list(case.graph, case.node) if args else []
        if listed is None:
            return UNKNOWN
        found = [part for pair in listed for part in elements(case.graph.nodes[pair])] + list(case.node.pairs)
        return Plain(Dict(found), f"dict, {_entries(len(found) // 2)}")
    if name == "builtins.bytes" and not args:
        # What protocol 2 makes of no bytes.
        text, latin = case.rewrite.constant(""), case.rewrite.constant("latin1")
        return Plain(case.call("_codecs", "encode", text, latin), "bytes, in the form that torch takes")
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
        return _numbers(case)
    return None


def _numbers(case: Case) -> Plain:
    """A range of some length as the numbers in it; one without end, and a slice, as what it is made of."""
    values = [case.current(ref) for ref in case.args]
    bounds = [value for value in values if type(value) is int and abs(value) < 1 << 62]
    if case.name == "builtins.range" and len(bounds) == len(values) == 3 and bounds[2]:
        found = range(*bounds)
        if found[:1] == found or abs((bounds[1] - bounds[0]) // bounds[2]) <= _RANGE:
            numbers = [case.rewrite.constant(number) for number in found]
            return Plain(List(numbers), f"list, {counted(len(numbers), 'element')}")
    return Plain(tuple(case.args), "tuple of start, stop and step")


def _entries(count: int) -> str:
    return counted(count, "entry")


def _texts(case: Case) -> Verdict:
    """What a string says as well: UUIDs, decimals, fractions, patterns."""
    if case.name in ("decimal.Decimal", "fractions.Fraction", "re._compile") and case.args:
        text = case.text(0)
        if case.name == "fractions.Fraction" and len(case.args) == 2:
            parts = [case.current(ref) for ref in case.args]
            if all(type(part) is int and abs(part) < 1 << 1024 for part in parts):
                text = "/".join(map(str, parts))
        lost = case.name == "re._compile" and len(case.args) > 1 and case.current(case.args[1]) != _NO_FLAGS
        return Plain(text, f"str {shown(text)}{'; its flags are left out' * lost}") if text is not None else UNKNOWN
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
