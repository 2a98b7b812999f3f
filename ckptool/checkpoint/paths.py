"""Paths: the one name of every place in an object graph, and the way from a name to the place.

What a step adds to a path, by what it leads to::

    .name  ["a.b"]         the entry of a mapping under a string, or an attribute of an object
    [3]  [True]  [1.5]     the entry under another key, as Python writes it: [b"a"], [None], [("a", 1)],
                           [frozenset({1})], [torch.float32], [torch.device("cuda:1")], [module.Color(1)]
    [3]                    an element of a list or tuple, or of a set in the order of the file
    (0)  (keywords)        an argument of the call that made an object
    (state 0)              what BUILD gave an object where that names no attributes
    (function)  (id)       what is called, where that has no name; the persistent id of an object outside of the pickle
    [#3]                   the child with this number, whatever it is: under a key that has no spelling, or a long one
    (#120)                 at the beginning of a path: node 120 of the pickle, in place of a path that is too long

No two children of one node have the same step. ``parse_path`` and ``child`` understand every path that is printed,
and any equal key: ``[True]`` finds the key 1, as in Python.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

from ..base.errors import TargetError
from ..base.limits import LIMITS
from ..pickles.nodes import Buffer, Call, FrozenSet, Global, Graph, Instance, List, Persistent, Ref, Set
from .objects import attributes, callable_name, constant, copied_argument, device_text, mapped_name, mapping, same_key

_PLAIN_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")
_DOTTED: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")
_INT64: Final = 1 << 63
#: Levels of a key, such as tuples in tuples, that are spelled.
_DEPTH: Final = 16
#: Calls that are given the elements of what they make; one step leads to an element.
_SEQUENCES: Final = {
    "builtins.set": "set",
    "builtins.frozenset": "frozenset",
    "builtins.list": "list",
    "builtins.tuple": "tuple",
    "torch.Size": "tuple",
    "collections.deque": "deque",
}


class Child(NamedTuple):
    """What a node holds: the ``step`` that leads to it, its reference, and the key it is under, -1 for none."""

    step: str
    ref: Ref
    key: Ref = -1


# -- spelling ---------------------------------------------------------------------------------------------------------


def spell_key(base: str, key: str) -> str:
    """The path of a mapping's entry under a string: ``base.key``, or ``base["a.b"]`` where it is not a plain word."""
    if _PLAIN_KEY.match(key):
        return f"{base}.{key}" if base else key
    return f"{base}[{_quoted(key)}]"


def joined(base: str, step: str) -> str:
    """The path one step further on."""
    return base + step if base or step[:1] != "." else step[1:]


def bounded(path: str, ref: Ref) -> str:
    """The path of a container; one that nobody would type becomes the number of its node."""
    return path if len(path) <= LIMITS.path_chars else f"(#{ref})"


def within(path: str, outer: str) -> bool:
    """Is something at ``path`` the thing at ``outer``, or in it?"""
    return not outer or path == outer or path.startswith((f"{outer}.", f"{outer}[", f"{outer}("))


def _quoted(text: str) -> str:
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '"' + "".join(char if char.isprintable() and char not in '"\\' else _escaped(char) for char in text) + '"'


def _escaped(char: str) -> str:
    code = ord(char)
    if char in '"\\':
        return "\\" + char
    if char in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[char]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def key_text(graph: Graph, ref: Ref) -> str:
    """A key as Python would write it, "" for one that has no spelling: an object of its own, or too long."""
    node = graph.nodes[ref]
    if type(node) is str:
        return _quoted(node) if len(node) <= LIMITS.path_chars else ""
    if type(node) is int and -_INT64 <= node < _INT64:
        return str(node)
    known: str | None = graph.cache.get(("text", ref))
    if known is None:
        text = _text(graph, ref, _DEPTH)
        known = graph.cache["text", ref] = text if text is not None and len(text) <= LIMITS.path_chars else ""
    return known


def _text(graph: Graph, ref: Ref, depth: int) -> str | None:
    node = graph.nodes[ref]
    if node is None or isinstance(node, bool | float):
        return repr(node)
    if isinstance(node, int):
        return str(node) if node.bit_length() <= LIMITS.path_chars * 3 else None
    if isinstance(node, str):
        return _quoted(node) if len(node) <= LIMITS.path_chars else None
    if isinstance(node, bytes):
        return _bytes_text(node)
    if depth == 0:
        return None
    if isinstance(node, tuple):
        return _tuple_text(graph, node, depth)
    if isinstance(node, FrozenSet):
        return _frozenset_text(graph, node.items, depth)
    if isinstance(node, Global):
        name = mapped_name(node)
        return name if _DOTTED.fullmatch(name) else None
    return _call_text(graph, ref, node, depth) if isinstance(node, Call) else None


def _bytes_text(data: bytes) -> str | None:
    if len(data) > LIMITS.path_chars:
        return None
    chars = (chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else _escaped(chr(byte)) for byte in data)
    return 'b"' + "".join(chars) + '"'


def _tuple_text(graph: Graph, parts: tuple[Ref, ...] | list[Ref], depth: int) -> str | None:
    texts = _texts(graph, parts, depth)
    return None if texts is None else f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def _frozenset_text(graph: Graph, parts: Any, depth: int) -> str | None:
    texts = _texts(graph, parts, depth)
    if texts is None:
        return None
    # A set has no order, and the one in the file changes from run to run.
    return f"frozenset({{{', '.join(sorted(set(texts)))}}})" if texts else "frozenset()"


def _texts(graph: Graph, parts: Any, depth: int) -> list[str] | None:
    """The spelling of each part; None where one has none, or all together are too long."""
    if len(parts) > LIMITS.path_chars // 3:
        return None
    texts, size = [], 0
    for part in parts:
        text = _text(graph, part, depth - 1)
        size += len(text) + 2 if text is not None else LIMITS.path_chars
        if text is None or size > LIMITS.path_chars:
            return None
        texts.append(text)
    return texts


def _call_text(graph: Graph, ref: Ref, node: Call, depth: int) -> str | None:
    value = constant(graph, ref)
    if isinstance(value, bytes):
        return _bytes_text(value)
    if value is not None:
        return f"complex({value.real!r}, {value.imag!r})"
    device = device_text(graph, ref)
    if device is not None:
        return f"torch.device({_quoted(device)})"
    kind = same_key(graph, ref)
    if not isinstance(kind, tuple) or kind[0] == "own":
        return None
    name, args = callable_name(graph, node.func), graph.nodes[node.args]
    if type(args) is not tuple:
        return None
    held = seen_through(graph, ref)
    if held is not None and name == "builtins.tuple":
        return _tuple_text(graph, list(held), depth)
    if held is not None and name == "builtins.frozenset":
        return _frozenset_text(graph, held, depth)
    texts = _texts(graph, args, depth)
    return None if texts is None or not _DOTTED.fullmatch(name) else f"{name}({', '.join(texts)})"


# -- what a node holds ------------------------------------------------------------------------------------------------


def seen_through(graph: Graph, ref: Ref) -> list[Ref] | None:
    """The elements of a set, list or tuple that a call makes of a list of them; None for anything else."""
    node = graph.nodes[ref]
    if not isinstance(node, Call) or node.states or node.pairs or node.kwargs >= 0:
        return None
    args = graph.nodes[node.args]
    if callable_name(graph, node.func) not in _SEQUENCES or type(args) is not tuple or not 1 <= len(args) <= 2:
        return None
    inner = graph.nodes[args[0]]
    held = inner if type(inner) is tuple else inner.items if isinstance(inner, List) else None
    return None if held is None else [*held, *node.items]


def entries(graph: Graph, ref: Ref) -> list[Child]:
    """The entries of a mapping, each with a step of its own; nothing for what is none."""
    return as_children(graph, mapping(graph, ref) or ())


def as_children(graph: Graph, items: Iterable[tuple[Ref, Ref]], before: Sequence[Child] = ()) -> list[Child]:
    """The (key, value) pairs with a step for each that no other has, nor one of those ``before`` them.

    What has no spelling goes by its number, and so does the second NaN and an attribute that is called like a key.
    """
    taken = {one.step for one in before}
    found = []
    nodes, most, plain = graph.nodes, LIMITS.path_chars, _PLAIN_KEY.match
    for number, (key, value) in enumerate(items, len(before)):
        node = nodes[key]
        if type(node) is str and plain(node) and len(node) <= most:
            step = "." + node
        else:
            text = key_text(graph, key)
            step = f"[{text}]" if text else ""
        if not step or step in taken:
            step = f"[#{number}]"
        taken.add(step)
        found.append(Child(step, value, key))
    return found


def children(graph: Graph, ref: Ref) -> Iterator[Child]:
    """Everything that a node holds: entries, elements, arguments, attributes, states."""
    inside = sequence(graph, ref)
    if inside is not None:
        return (Child(f"[{number}]", item) for number, item in enumerate(inside))
    held = entries(graph, ref)
    return chain(held, beside(graph, ref, held))


def sequence(graph: Graph, ref: Ref) -> Sequence[Ref] | None:
    """The elements of a list, tuple or set, in whichever form it is written; None for anything else."""
    node = graph.nodes[ref]
    if isinstance(node, tuple):
        return node
    return node.items if isinstance(node, List | Set | FrozenSet) else seen_through(graph, ref)


def beside(graph: Graph, ref: Ref, held: Sequence[Child]) -> Iterator[Child]:
    """What a node holds beside its entries: keys that are objects, arguments, attributes, states, elements."""
    node = graph.nodes[ref]
    for number, one in enumerate(held):
        # There may be a tensor in such a key.
        if one.step[:2] == "[#" and not isinstance(graph.nodes[one.key], str | bytes | int | float):
            yield Child(f"(key {number})", one.key)
    if isinstance(node, Persistent):
        yield Child("(id)", node.pid)
    if isinstance(node, Buffer) and node.inner >= 0:
        yield Child("(buffer)", node.inner)
    if not isinstance(node, Instance):
        return
    if isinstance(node, Call):
        args = graph.nodes[node.args]
        if not callable_name(graph, node.func):
            yield Child("(function)", node.func)
        if isinstance(args, tuple) and args:
            copied = copied_argument(graph, node)
            yield from (Child(f"({number})", item) for number, item in enumerate(args) if number != copied)
        if node.kwargs >= 0:
            yield Child("(keywords)", node.kwargs)
    fields = as_children(graph, attributes(graph, node), held) if node.states else []
    yield from (field._replace(key=-1) for field in fields)
    if not fields:
        yield from (Child(f"(state {number})", state) for number, state in enumerate(node.states))
    if node.items:
        taken = {one.step for one in (*held, *fields)}
        number = len(held) + len(fields)
        for place, item in enumerate(node.items):
            step = f"[{place}]"
            yield Child(step if step not in taken else f"[#{number + place}]", item)


# -- from a text to a place -------------------------------------------------------------------------------------------

#: A step that is no key, or a key whose value has no place in Python without its module.
NO_VALUE: Final = object()


class Parsed(NamedTuple):
    """A step as it is spelled by ``children``, and the key as a Python value, NO_VALUE for one that has none."""

    step: str
    value: Any


def parse_path(text: str) -> list[Any]:
    """The keys of a path as Python values; raises TargetError for a path with other steps, or that is none."""
    steps = parsed(text)
    if any(step.value is NO_VALUE for step in steps):
        raise TargetError(f"{text!r} leads through an object, not by keys alone")
    return [step.value for step in steps]


def parsed(text: str) -> list[Parsed]:
    """The steps of a path as ``inspect`` prints it; raises TargetError if it is none."""
    reader = _Reader(text)
    steps: list[Parsed] = []
    while reader.at < len(text):
        steps.append(reader.step(first=not steps))
    return steps


_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_DIGITS: Final = re.compile(r"\d{1,18}")
_NUMBER: Final = re.compile(r"[+-]?(?:inf\b|nan\b|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)")
_QUOTE: Final = re.compile(r"""b?(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_AROUND: Final = re.compile(r"\((?:#?\d{1,18}|state \d{1,18}|key \d{1,18}|function|keywords|id|buffer)\)")
_CONSTANTS: Final = {"True": True, "False": False, "None": None}


class _Reader:
    """Reads a path from left to right; ``at`` is where it has come to."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def wrong(self, why: str = "") -> TargetError:
        step = 'paths look like state_dict, models[0].net, callbacks["a.b"]'
        return TargetError(f"{self.text!r} is not a path{why}", next="" if why else step)

    def take(self, form: re.Pattern[str]) -> str | None:
        found = form.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return found.group()

    def has(self, text: str) -> bool:
        """Does the text go on like this? Then it is read."""
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def step(self, first: bool) -> Parsed:
        if self.has("["):
            if self.has("#"):
                number = self.take(_DIGITS)
                if number is None:
                    raise self.wrong()
                found = Parsed(f"[#{number}]", NO_VALUE)
            else:
                text, value = self.key(_DEPTH)
                plain = isinstance(value, str) and _PLAIN_KEY.match(value)
                found = Parsed(f".{value}" if plain else f"[{text}]", value)
            if not self.has("]"):
                raise self.wrong()
            return found
        around = self.take(_AROUND)
        if around is not None:
            if around.startswith("(#") and not first:
                raise self.wrong()
            return Parsed(around, NO_VALUE)
        dot = self.has(".")
        if dot and first:
            raise self.wrong()
        word = self.take(_WORD)
        if word is None:
            raise self.wrong()
        if not (dot or first):
            raise self.wrong(f": a dot is missing before {word!r}")
        return Parsed(f".{word}", word)

    def key(self, depth: int) -> tuple[str, Any]:
        """A key as ``key_text`` spells it, and its value."""
        if depth == 0:
            raise self.wrong()
        quoted = self.take(_QUOTE)
        if quoted is not None:
            return self.quoted(quoted)
        number = self.take(_NUMBER)
        if number is not None:
            return self.number(number)
        if self.has("("):
            texts, values = self.parts(")", depth)
            text = f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"
            return text, NO_VALUE if NO_VALUE in values else tuple(values)
        name = self.take(_DOTTED) or self.take(_WORD)
        if name in _CONSTANTS:
            return name, _CONSTANTS[name]
        if name == "frozenset" and self.has("("):
            return self.frozenset(depth)
        if name is None or (name != "complex" and "." not in name):
            raise self.wrong()
        if not self.has("("):
            return name, NO_VALUE
        texts, values = self.parts(")", depth)
        whole = name == "complex" and len(values) == 2 and all(type(value) is float for value in values)
        return f"{name}({', '.join(texts)})", complex(*values) if whole else NO_VALUE

    def quoted(self, quoted: str) -> tuple[str, Any]:
        try:
            text = _ESCAPE.sub(_unescaped, quoted[quoted.index(quoted[-1]) + 1 : -1])
            if quoted[0] != "b":
                return _quoted(text), text
            data = text.encode("latin-1")
        except (UnicodeEncodeError, ValueError, OverflowError):
            raise self.wrong() from None
        return _bytes_text(data) or "", data

    def number(self, text: str) -> tuple[str, Any]:
        try:
            value: int | float = int(text)
        except ValueError:
            value = float(text) if len(text) < LIMITS.path_chars else 0.0
        return repr(value), value

    def frozenset(self, depth: int) -> tuple[str, Any]:
        if self.has(")"):
            return "frozenset()", frozenset()
        if not self.has("{"):
            raise self.wrong()
        texts, values = self.parts("}", depth)
        if not self.has(")"):
            raise self.wrong()
        text = f"frozenset({{{', '.join(sorted(set(texts)))}}})"
        return text, NO_VALUE if NO_VALUE in values else frozenset(values)

    def parts(self, end: str, depth: int) -> tuple[list[str], list[Any]]:
        texts: list[str] = []
        values: list[Any] = []
        while not self.has(end):
            text, value = self.key(depth - 1)
            texts.append(text)
            values.append(value)
            if not self.has(","):
                if not self.has(end):
                    raise self.wrong()
                break
            self.has(" ")
        return texts, values


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if code is not None:
        return chr(int(code, 16))
    return {"n": "\n", "r": "\r", "t": "\t"}.get(found[4], found[4])


def find(graph: Graph, step: Parsed, ref: Ref) -> Child | None:
    """The node that one step leads to from ``ref``: a child, or any node by its number."""
    if not step.step.startswith("(#"):
        return child(graph, ref, step)
    place = int(step.step[2:-1])
    return Child(step.step, place) if place < len(graph.nodes) else None


def child(graph: Graph, ref: Ref, step: Parsed) -> Child | None:
    """The child that a step leads to: the one that is spelled so, else that under an equal key, or counted from the
    end of a list."""
    inside = sequence(graph, ref)
    if inside is not None:
        place = step.value
        if type(place) is not int or not -len(inside) <= place < len(inside):
            return None
        place %= len(inside)
        return Child(f"[{place}]", inside[place])
    equal: Child | None = None
    wanted = literal(step.value)
    for one in children(graph, ref):
        if one.step == step.step:
            return one
        if one.key >= 0 and equal is None and step.value is not NO_VALUE and same_key(graph, one.key) == wanted:
            equal = one
    return equal


def literal(value: Any) -> Hashable:
    """What ``same_key`` gives for a key with this value."""
    if isinstance(value, tuple):
        return ("tuple", *map(literal, value))
    if isinstance(value, frozenset):
        return ("frozenset", frozenset(map(literal, value)))
    return value  # type: ignore[no-any-return]
