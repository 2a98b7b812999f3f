"""Spell and follow paths, the names of the nodes in an object graph.

Each kind of child adds its own step to a path::

    .name  ["a.b"]         the entry of a mapping under a string, or an attribute of an object
    [3]  [True]  [1.5]     the entry under another key, as Python writes it: [b"a"], [None], [("a", 1)],
                           [frozenset({1})], [torch.float32], [torch.device("cuda:1")], [module.Color(1)]
    [3]                    an element of a list or tuple, or of a set in the order of the file
    (0)  (keywords)        an argument of the call that made an object
    (state 0)              the state that BUILD gave an object, if it has no attributes by name
    (function)  (id)       a called function without a name; the persistent id of an object outside of the pickle
    [#3]                   the child with this number, under a key that cannot be spelled or is too long
    (#120)                 at the beginning of a path: node 120 of the pickle, in place of a path that is too long

No two children of a node have the same step. ``parse_path`` and ``child`` understand every path that is printed, and
any equal key: ``[True]`` finds the key 1, as in Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

from ..base.errors import TargetError
from ..base.lazy import regex
from ..base.limits import LIMITS
from ..base.records import NamedTuple
from ..pickles.nodes import Buffer, Call, FrozenSet, Global, Graph, Instance, List, Persistent, Ref, Set
from .objects import (
    attributes,
    callable_name,
    called_constant,
    copied_argument,
    device_text,
    key_identity,
    list_items,
    mapped_name,
    mapping,
)

_PLAIN_KEY: Final = regex(r"[A-Za-z_][A-Za-z0-9_-]*\Z")
#: A plain key, or one with dots, as nearly all module keys are.
_USUAL_KEY: Final = regex(r"[A-Za-z_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_.-]*)?\Z")
_DOTTED: Final = regex(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")
_INT64: Final = 1 << 63
#: The most levels of a key to spell, such as tuples in tuples.
_MAX_DEPTH: Final = 16
#: Classes that are called with a list of their elements.
_SEQUENCES: Final = frozenset(
    ("builtins.set", "builtins.frozenset", "builtins.list", "builtins.tuple", "torch.Size", "collections.deque")
)
_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


class Child(NamedTuple):
    """A child of a node: the ``step`` that leads to it, its reference, and the reference of its key, or -1."""

    step: str
    ref: Ref
    key: Ref = -1


def spell_key(base: str, key: str) -> str:
    """Return the path of a mapping's entry: ``base.key``, or ``base["a.b"]`` if the key is not a plain word."""
    if _PLAIN_KEY.match(key):
        return f"{base}.{key}" if base else key
    return f"{base}[{_quoted(key)}]"


def joined(base: str, step: str) -> str:
    """Return the path extended by one step."""
    return base + step if base or step[:1] != "." else step[1:]


def bounded(path: str, ref: Ref) -> str:
    """Return the path of a container, or ``(#N)`` with the number of its node if the path is too long to type."""
    return path if len(path) <= LIMITS.path_chars else f"(#{ref})"


def within(path: str, outer: str) -> bool:
    """Return whether ``path`` is ``outer`` or a path below it."""
    return not outer or path == outer or path.startswith((f"{outer}.", f"{outer}[", f"{outer}("))


def _quoted(text: str) -> str:
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '"' + "".join(char if char.isprintable() and char not in '"\\' else _escaped(char) for char in text) + '"'


def _escaped(char: str) -> str:
    code = ord(char)
    if char in _ESCAPES:
        return _ESCAPES[char]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def key_text(graph: Graph, ref: Ref) -> str:
    """Return a key as Python would write it; "" if it is too long or an object that cannot be spelled."""
    node = graph.nodes[ref]
    if type(node) is str:
        return _quoted(node) if len(node) <= LIMITS.path_chars else ""
    if type(node) is int and -_INT64 <= node < _INT64:
        return str(node)
    known: str | None = graph.cache.get(("text", ref))
    if known is None:
        text = _text(graph, ref, _MAX_DEPTH)
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
        return _enclosed(_tuple_text, _texts(graph, node, depth))
    if isinstance(node, FrozenSet):
        return _enclosed(_frozenset_text, _texts(graph, node.items, depth))
    if isinstance(node, Global):
        name = mapped_name(node)
        return name if _DOTTED.fullmatch(name) else None
    return _call_text(graph, ref, node, depth) if isinstance(node, Call) else None


def _bytes_text(data: bytes) -> str | None:
    if len(data) > LIMITS.path_chars:
        return None
    chars = (chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else _escaped(chr(byte)) for byte in data)
    return 'b"' + "".join(chars) + '"'


def _tuple_text(texts: list[str]) -> str:
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def _frozenset_text(texts: list[str]) -> str:
    # A set has no order, and its order in the file changes from run to run.
    return f"frozenset({{{', '.join(sorted(set(texts)))}}})" if texts else "frozenset()"


def _enclosed(spell: Callable[[list[str]], str], texts: list[str] | None) -> str | None:
    return None if texts is None else spell(texts)


def _texts(graph: Graph, parts: Sequence[Ref], depth: int) -> list[str] | None:
    """Return the text of each part; None if one cannot be spelled, or all together are too long."""
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
    value = called_constant(graph, ref)
    if isinstance(value, bytes):
        return _bytes_text(value)
    if value is not None:
        return f"complex({value.real!r}, {value.imag!r})"
    device = device_text(graph, ref)
    if device is not None:
        return f"torch.device({_quoted(device)})"
    identity = key_identity(graph, ref)
    name, args = callable_name(graph, node.func), graph.nodes[node.args]
    if not isinstance(identity, tuple) or identity[0] == "own" or type(args) is not tuple:
        return None
    inside = _called_elements(graph, ref)
    if inside is not None and name in ("builtins.tuple", "builtins.frozenset"):
        spell = _tuple_text if name == "builtins.tuple" else _frozenset_text
        return _enclosed(spell, _texts(graph, inside, depth))
    texts = _texts(graph, args, depth)
    return None if texts is None or not _DOTTED.fullmatch(name) else f"{name}({', '.join(texts)})"


# -- The children of a node


def _called_elements(graph: Graph, ref: Ref) -> list[Ref] | None:
    """Return the elements of a set, list or tuple that is called with a list of them; None for another node."""
    node = graph.nodes[ref]
    if not isinstance(node, Call) or node.states or node.pairs or node.kwargs >= 0:
        return None
    args = graph.nodes[node.args]
    if callable_name(graph, node.func) not in _SEQUENCES or type(args) is not tuple or not 1 <= len(args) <= 2:
        return None
    source = graph.nodes[args[0]]
    return [*list_items(source), *node.items] if isinstance(source, List | tuple) else None


def entries(graph: Graph, ref: Ref) -> list[Child]:
    """Return the entries of a mapping, each with a different step; [] for another node."""
    return as_children(graph, mapping(graph, ref) or ())


def as_children(graph: Graph, items: Iterable[tuple[Ref, Ref]], before: Sequence[Child] = ()) -> list[Child]:
    """Return (key, value) pairs as children, with steps that differ from each other and from the steps in ``before``.

    A key that cannot be spelled goes by its number; so does a second NaN, or an attribute named like a key.
    """
    nodes, most, plain = graph.nodes, LIMITS.path_chars, _USUAL_KEY.match
    new = tuple.__new__  # twice as fast as calling the class
    taken = {child.step for child in before}
    result = []
    for number, (key, value) in enumerate(items, len(before)):
        node = nodes[key]
        if type(node) is str and len(node) <= most and plain(node):
            step = f'["{node}"]' if "." in node else "." + node
        else:
            text = key_text(graph, key)
            step = f"[{text}]" if text else ""
        if not step or step in taken:
            step = f"[#{number}]"
        taken.add(step)
        result.append(new(Child, (step, value, key)))
    return result


def children(graph: Graph, ref: Ref) -> Iterator[Child]:
    """Return all children of a node: entries, elements, arguments, attributes, states."""
    inside = sequence(graph, ref)
    if inside is not None:
        return (Child(f"[{number}]", item) for number, item in enumerate(inside))
    items = entries(graph, ref)
    return chain(items, extra_children(graph, ref, items))


def sequence(graph: Graph, ref: Ref) -> Sequence[Ref] | None:
    """Return the elements of a list, tuple or set in any form; None for another node."""
    node = graph.nodes[ref]
    if isinstance(node, tuple):
        return node
    return node.items if isinstance(node, List | Set | FrozenSet) else _called_elements(graph, ref)


def extra_children(graph: Graph, ref: Ref, items: Sequence[Child]) -> Iterator[Child]:
    """Yield the children of a node other than its entries: keys that are objects, arguments, attributes, elements."""
    node = graph.nodes[ref]
    for number, item in enumerate(items):
        # There may be a tensor in such a key.
        if item.step[:2] == "[#" and not isinstance(graph.nodes[item.key], str | bytes | int | float):
            yield Child(f"(key {number})", item.key)
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
    fields = as_children(graph, attributes(graph, node), items) if node.states else []
    yield from (field._replace(key=-1) for field in fields)
    if not fields:
        yield from (Child(f"(state {number})", state) for number, state in enumerate(node.states))
    taken = {child.step for child in (*items, *fields)} if node.items else ()
    for place, element in enumerate(node.items):
        step = f"[{place}]"
        yield Child(step if step not in taken else f"[#{len(items) + len(fields) + place}]", element)


# -- Parsing and following paths

#: The value of a step that is not a key, or whose key has no value without the module it names.
NO_VALUE: Final = object()


class PathStep(NamedTuple):
    """A step as ``children`` spells it, and its key as a Python value or NO_VALUE."""

    step: str
    value: Any


def parse_path(text: str) -> list[Any]:
    """Return the keys of a path as Python values; raise TargetError if the path is invalid or has steps other than
    keys.
    """
    steps = parse_steps(text)
    if any(step.value is NO_VALUE for step in steps):
        raise TargetError(f"{text!r} leads through an object, not by keys alone")
    return [step.value for step in steps]


def parse_steps(text: str) -> list[PathStep]:
    """Return the steps of a path as ``inspect`` prints it; raise TargetError if it is invalid."""
    parser = _PathParser(text)
    steps: list[PathStep] = []
    while parser.at < len(text):
        steps.append(parser.step(first=not steps))
    return steps


_WORD: Final = regex(r"[A-Za-z_][A-Za-z0-9_-]*")
_CHILD_NUMBER: Final = regex(r"#\d{1,18}")
_NUMBER: Final = regex(r"[+-]?(?:inf\b|nan\b|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)")
_QUOTE: Final = regex(r"""b?(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""", re.DOTALL)
_ESCAPE: Final = regex(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_IN_PARENTHESES: Final = regex(r"\((?:#?\d{1,18}|state \d{1,18}|key \d{1,18}|function|keywords|id|buffer)\)")
_CONSTANTS: Final = {"True": True, "False": False, "None": None}


class _PathParser:
    """A parser that reads a path from left to right; ``at`` is its position."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def error(self, why: str = "") -> TargetError:
        step = 'paths look like state_dict, models[0].net, callbacks["a.b"]'
        return TargetError(f"{self.text!r} is not a path{why}", next="" if why else step)

    def take(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match.group()

    def skip(self, text: str) -> bool:
        """Skip this text if the rest starts with it; return whether it did."""
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def expect(self, text: str) -> None:
        """Skip this text; raise TargetError if the rest does not start with it."""
        if not self.skip(text):
            raise self.error()

    def step(self, first: bool) -> PathStep:
        if self.skip("["):
            number = self.take(_CHILD_NUMBER)
            text, value = (number, NO_VALUE) if number else self.key(_MAX_DEPTH)
            self.expect("]")
            plain = isinstance(value, str) and _PLAIN_KEY.match(value)
            return PathStep(f".{value}" if plain else f"[{text}]", value)
        text = self.take(_IN_PARENTHESES) or ""
        if text.startswith("(#") and not first:
            raise self.error()
        if text:
            return PathStep(text, NO_VALUE)
        dot = self.skip(".")
        word = None if dot and first else self.take(_WORD)
        if word is None:
            raise self.error()
        if not (dot or first):
            raise self.error(f": a dot is missing before {word!r}")
        return PathStep(f".{word}", word)

    def key(self, depth: int) -> tuple[str, Any]:
        """Read a key as ``key_text`` spells it; return its text and its value."""
        if depth == 0:
            raise self.error()
        quoted = self.take(_QUOTE)
        if quoted is not None:
            return self.quoted(quoted)
        number = self.take(_NUMBER)
        if number is not None:
            try:
                value: int | float = int(number)
            except ValueError:
                value = float(number) if len(number) < LIMITS.path_chars else 0.0
            return repr(value), value
        if self.skip("("):
            texts, values = self.parts(")", depth)
            return _tuple_text(texts), NO_VALUE if NO_VALUE in values else tuple(values)
        name = self.take(_DOTTED) or self.take(_WORD)
        if name in _CONSTANTS:
            return name, _CONSTANTS[name]
        if name == "frozenset" and self.skip("("):
            return self.frozenset(depth)
        if name is None or (name != "complex" and "." not in name):
            raise self.error()
        if not self.skip("("):
            return name, NO_VALUE
        texts, values = self.parts(")", depth)
        is_complex = name == "complex" and len(values) == 2 and all(type(value) is float for value in values)
        return f"{name}({', '.join(texts)})", complex(*values) if is_complex else NO_VALUE

    def quoted(self, quoted: str) -> tuple[str, Any]:
        try:
            text = _ESCAPE.sub(_unescaped, quoted[quoted.index(quoted[-1]) + 1 : -1])
            if quoted[0] != "b":
                return _quoted(text), text
            data = text.encode("latin-1")
        except (UnicodeEncodeError, ValueError, OverflowError):
            raise self.error() from None
        return _bytes_text(data) or "", data

    def frozenset(self, depth: int) -> tuple[str, Any]:
        if self.skip(")"):
            return "frozenset()", frozenset()
        self.expect("{")
        texts, values = self.parts("}", depth)
        self.expect(")")
        return _frozenset_text(texts), NO_VALUE if NO_VALUE in values else frozenset(values)

    def parts(self, end: str, depth: int) -> tuple[list[str], list[Any]]:
        texts: list[str] = []
        values: list[Any] = []
        while not self.skip(end):
            text, value = self.key(depth - 1)
            texts.append(text)
            values.append(value)
            if not self.skip(","):
                self.expect(end)
                break
            self.skip(" ")
        return texts, values


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code is not None:
        return chr(int(code, 16))
    return {"n": "\n", "r": "\r", "t": "\t"}.get(match[4], match[4])


def find(graph: Graph, step: PathStep, ref: Ref) -> Child | None:
    """Return the child of ``ref`` that a step names, or None. A step such as ``(#7)`` names any node by its number."""
    if not step.step.startswith("(#"):
        return child(graph, ref, step)
    place = int(step.step[2:-1])
    return Child(step.step, place) if place < len(graph.nodes) else None


def child(graph: Graph, ref: Ref, step: PathStep) -> Child | None:
    """Return the child that a step leads to, or None; in a list, a negative number counts from the end."""
    inside = sequence(graph, ref)
    if inside is not None:
        place = step.value
        if type(place) is not int or not -len(inside) <= place < len(inside):
            return None
        place %= len(inside)
        return Child(f"[{place}]", inside[place])
    return match_step(graph, children(graph, ref), step)


def match_step(graph: Graph, candidates: Iterable[Child], step: PathStep) -> Child | None:
    """Return the child with the same spelling as the step, else the first child with an equal key, else None."""
    equal: Child | None = None
    wanted = literal_identity(step.value)
    for item in candidates:
        if item.step == step.step:
            return item
        if item.key >= 0 and equal is None and step.value is not NO_VALUE and key_identity(graph, item.key) == wanted:
            equal = item
    return equal


def literal_identity(value: Any) -> Hashable:
    """Return the result of ``key_identity`` for a key with this value."""
    if isinstance(value, tuple):
        return ("tuple", *map(literal_identity, value))
    if isinstance(value, frozenset):
        return ("frozenset", frozenset(map(literal_identity, value)))
    return value  # type: ignore[no-any-return]
