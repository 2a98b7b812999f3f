"""A pickle as terms that can be changed and written again: what it means, not how it is spelled.

Independent of ckptool on purpose: its own decoder is what is tested.
"""

from __future__ import annotations

import pickletools
import struct
from typing import Any


class Term:
    """``op`` is const, tuple, list, dict, set, frozenset, global, reduce, newobj, newobj_ex, obj, pid or text (bytes of
    Python 2); ``args`` are the terms it is made of, ``effects`` what is done to it afterwards: (kind, terms)."""

    __slots__ = ("args", "effects", "op", "value")

    def __init__(self, op: str, args: list[Term] | None = None, value: Any = None) -> None:
        self.op = op
        self.args = args or []
        self.value = value
        self.effects: list[tuple[str, list[Term]]] = []


def const(value: Any) -> Term:
    return Term("const", value=value)


def glob(module: str, name: str) -> Term:
    return Term("global", value=(module, name))


def sequence(op: str, items: list[Term]) -> Term:
    """A tuple, list, set or frozenset."""
    if op in ("tuple", "frozenset"):
        return Term(op, items)
    found = Term(op)
    found.effects.append(("appends" if op == "list" else "additems", items))
    return found


def mapping(pairs: list[Term]) -> Term:
    found = Term("dict")
    found.effects.append(("setitems", pairs))
    return found


def walk(root: Term) -> list[Term]:
    """Every term once, in the order in which they are made."""
    found: list[Term] = []
    seen: set[int] = set()
    work = [root]
    while work:
        term = work.pop()
        if id(term) in seen:
            continue
        seen.add(id(term))
        found.append(term)
        for _, items in reversed(term.effects):
            work.extend(reversed(items))
        work.extend(reversed(term.args))
    return found


_MARK = Term("mark")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_TUPLE": "tuple", "EMPTY_LIST": "list", "EMPTY_DICT": "dict", "EMPTY_SET": "set"}
_SHORT = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NUMBERS = ("INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_STRINGS = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_BYTES = ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
_TEXTS = ("STRING", "BINSTRING", "SHORT_BINSTRING")


def loads(data: bytes) -> tuple[Term, int]:
    """The term of a pickle, and where it ends. Raises ValueError for what this reader does not follow."""
    stack: list[Term] = []
    memo: dict[int, Term] = {}
    try:
        for op, arg, at in pickletools.genops(data):
            if op.name == "STOP":
                return stack[-1], (at or 0) + 1
            _step(op.name, arg, stack, memo)
    except (IndexError, KeyError, ValueError, UnicodeDecodeError, TypeError, OverflowError) as error:
        raise ValueError("not a pickle that is followed") from error
    raise ValueError("no STOP")


def pickles_in(data: bytes, most: int = 64) -> list[tuple[int, int]]:
    """The ranges of pickles that follow one another from the beginning."""
    found: list[tuple[int, int]] = []
    at = 0
    while len(found) < most:
        try:
            _, end = loads(data[at:])
        except ValueError:
            break
        found.append((at, at + end))
        at += end
    return found


def _marked(stack: list[Term]) -> list[Term]:
    at = max(i for i, term in enumerate(stack) if term is _MARK)
    items = stack[at + 1 :]
    del stack[at:]
    return items


def _step(name: str, arg: Any, stack: list[Term], memo: dict[int, Term]) -> None:
    if name in _CONSTANTS:
        stack.append(const(_CONSTANTS[name]))
    elif name in _NUMBERS or name in _STRINGS or name in _BYTES:
        stack.append(const(arg))
    elif name in _TEXTS:
        stack.append(Term("text", value=arg.encode("latin-1", "replace") if isinstance(arg, str) else arg))
    elif name in _EMPTY:
        stack.append(Term(_EMPTY[name]))
    elif name in _SHORT:
        items = stack[-_SHORT[name] :]
        del stack[-_SHORT[name] :]
        stack.append(Term("tuple", items))
    elif name == "MARK":
        stack.append(_MARK)
    elif name in ("TUPLE", "LIST", "DICT", "FROZENSET"):
        items = _marked(stack)
        made = mapping(items) if name == "DICT" else sequence(name.lower(), items)
        stack.append(made)
    elif name in ("APPEND", "SETITEM"):
        items = [stack.pop() for _ in range(1 if name == "APPEND" else 2)][::-1]
        stack[-1].effects.append((name.lower() + "s", items))
    elif name in ("APPENDS", "SETITEMS", "ADDITEMS"):
        items = _marked(stack)
        stack[-1].effects.append((name.lower(), items))
    elif name == "BUILD":
        state = stack.pop()
        stack[-1].effects.append(("build", [state]))
    elif name == "GLOBAL":
        module, _, rest = arg.partition(" ")
        stack.append(glob(module, rest))
    elif name == "STACK_GLOBAL":
        attribute, module_term = stack.pop(), stack.pop()
        stack.append(glob(str(module_term.value), str(attribute.value)))
    elif name in ("REDUCE", "NEWOBJ", "NEWOBJ_EX"):
        args = [stack.pop() for _ in range(3 if name == "NEWOBJ_EX" else 2)][::-1]
        stack.append(Term(name.lower(), args))
    elif name == "OBJ":
        stack.append(Term("obj", _marked(stack)))
    elif name == "INST":
        module, _, rest = arg.partition(" ")
        stack.append(Term("obj", [glob(module, rest), *_marked(stack)]))
    elif name == "BINPERSID":
        stack.append(Term("pid", [stack.pop()]))
    elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
        memo[int(arg)] = stack[-1]
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in ("GET", "BINGET", "LONG_BINGET"):
        stack.append(memo[int(arg)])
    elif name == "POP":
        stack.pop()
    elif name == "DUP":
        stack.append(stack[-1])
    elif name not in ("PROTO", "FRAME"):
        raise ValueError(name)


# -- writing --------------------------------------------------------------------------------------------------


def dumps(root: Term, protocol: int = 2) -> bytes:
    """The pickle of a term. Terms met more than once go through the memo, at the first place where they are met."""
    times: dict[int, int] = {}
    for term in walk(root):
        for part in _parts(term):
            times[id(part)] = times.get(id(part), 0) + 1
    out = [b"\x80" + bytes([protocol])] if protocol >= 2 else []
    _Writer(out, times, protocol).put(root, 0)
    return b"".join(out) + b"."


def _parts(term: Term) -> list[Term]:
    return term.args + [item for _, items in term.effects for item in items]


class _Writer:
    def __init__(self, out: list[bytes], times: dict[int, int], protocol: int) -> None:
        self.out = out
        self.times = times
        self.protocol = protocol
        self.memo: dict[int, int] = {}
        self.under_way: set[int] = set()

    def put(self, term: Term, depth: int) -> None:
        if id(term) in self.memo:
            number = self.memo[id(term)]
            self.out.append(b"g%d\n" % number if self.protocol == 0 else b"j" + struct.pack("<I", number))
            return
        if depth > 150 or id(term) in self.under_way:
            raise ValueError("a term within itself, or too deep")
        self.under_way.add(id(term))
        self.make(term, depth + 1)
        if self.times.get(id(term), 0) > 1:
            number = self.memo[id(term)] = len(self.memo)
            self.out.append(b"p%d\n" % number if self.protocol == 0 else b"r" + struct.pack("<I", number))
        for kind, items in term.effects:
            self.effect(kind, items, depth + 1)
        self.under_way.discard(id(term))

    def all(self, terms: list[Term], depth: int) -> None:
        for term in terms:
            self.put(term, depth)

    def effect(self, kind: str, items: list[Term], depth: int) -> None:
        if kind == "build":
            self.all(items, depth)
            self.out.append(b"b")
            return
        if self.protocol == 0 and kind != "additems":
            width = 1 if kind == "appends" else 2
            for at in range(0, len(items) - width + 1, width):
                self.all(items[at : at + width], depth)
                self.out.append(b"a" if width == 1 else b"s")
            return
        self.out.append(b"(")
        self.all(items, depth)
        self.out.append({"appends": b"e", "setitems": b"u", "additems": b"\x90"}[kind])

    def make(self, term: Term, depth: int) -> None:
        out, op = self.out, term.op
        if op == "const":
            out.append(_constant(term.value, self.protocol))
        elif op == "text":
            out.append(b"T" + struct.pack("<I", len(term.value)) + term.value)
        elif op == "tuple":
            if not term.args and self.protocol:
                out.append(b")")
                return
            short = self.protocol >= 2 and len(term.args) <= 3
            if not short:
                out.append(b"(")
            self.all(term.args, depth)
            out.append(b"t" if not short else b"\x85\x86\x87"[len(term.args) - 1 : len(term.args)])
        elif op in ("list", "dict"):
            empty = (b"]", b"}") if self.protocol else (b"(l", b"(d")
            out.append(empty[op == "dict"])
        elif op == "set":
            out.append(b"\x8f")
        elif op == "frozenset":
            out.append(b"(")
            self.all(term.args, depth)
            out.append(b"\x91")
        elif op == "global":
            module, name = (str(part).encode("utf-8", "surrogatepass") for part in term.value)
            if self.protocol >= 4:
                out.append(_constant(term.value[0], 4) + _constant(term.value[1], 4) + b"\x93")
            else:
                out.append(b"c" + module.replace(b"\n", b"") + b"\n" + name.replace(b"\n", b"") + b"\n")
        elif op == "obj":
            out.append(b"(")
            self.all(term.args, depth)
            out.append(b"o")
        else:
            self.all(term.args, depth)
            code = {"reduce": b"R", "newobj": b"\x81", "newobj_ex": b"\x92", "pid": b"Q"}.get(op)
            if code is None:  # a mark that nothing took away
                raise ValueError(op)
            out.append(code)


def _constant(value: Any, protocol: int) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return (b"\x88" if value else b"\x89") if protocol >= 2 else (b"I01\n" if value else b"I00\n")
    if isinstance(value, int):
        return _integer(value, protocol)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value) if protocol else b"F" + repr(value).encode() + b"\n"
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        if protocol == 0:
            return b"V" + value.encode("raw-unicode-escape", "replace").replace(b"\n", b"\\u000a") + b"\n"
        if protocol >= 4 and len(raw) < 256:
            return b"\x8c" + bytes([len(raw)]) + raw
        return b"X" + struct.pack("<I", len(raw)) + raw
    data = bytes(value)
    return b"B" + struct.pack("<I", len(data)) + data


def _integer(value: int, protocol: int) -> bytes:
    if protocol == 0:
        return b"I%d\n" % value if abs(value) < 1 << 31 else b"L%dL\n" % value
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw if len(raw) < 256 else b"\x8b" + struct.pack("<I", len(raw)) + raw
