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
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

from ..base.errors import TargetError
from ..base.lazy import regex
from ..base.limits import LIMITS
from ..base.records import NamedTuple
from ..pickles.nodes import Buffer, Call, FrozenSet, Global, Graph, Instance, List, Persistent, Ref, Set
from ..pickles.opcodes import REDUCE
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
    numbered = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return _ESCAPES.get(char, numbered)


def key_text(graph: Graph, ref: Ref) -> str:
    """Return a key as Python would write it; "" if it is too long or an object that cannot be spelled."""
    node = graph.nodes[ref]
    if type(node) is str:
        return _quoted(node) if len(node) <= LIMITS.path_chars else ""
    if type(node) is int and -_INT64 <= node < _INT64:
        return str(node)
    known: str | None = graph.cache.get(("text", ref))
    if known is None:
        known = graph.cache["text", ref] = _text(graph, ref, _MAX_DEPTH) or ""
    return known if len(known) <= LIMITS.path_chars else ""


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
    if isinstance(node, Global):
        name = mapped_name(node)
        return name if _DOTTED.fullmatch(name) else None
    if isinstance(node, Call):
        return _call_text(graph, ref, node, depth)
    if not isinstance(node, tuple | FrozenSet):
        return None
    return _members_text(graph, node if isinstance(node, tuple) else node.items, isinstance(node, tuple), depth)


def _bytes_text(data: bytes) -> str | None:
    if len(data) > LIMITS.path_chars:
        return None
    chars = (chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else _escaped(chr(byte)) for byte in data)
    return 'b"' + "".join(chars) + '"'


def _members_text(graph: Graph, parts: Sequence[Ref], is_tuple: bool, depth: int) -> str | None:
    texts = _texts(graph, parts, depth)
    if texts is None:
        return None
    if is_tuple:
        return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"
    # A set has no order, and its order in the file changes from run to run.
    return f"frozenset({{{', '.join(sorted(set(texts)))}}})" if texts else "frozenset()"


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
    name, inside = callable_name(graph, node.func), _called_elements(graph, ref)
    if inside is not None and name in ("builtins.tuple", "builtins.frozenset"):
        return _members_text(graph, inside, name == "builtins.tuple", depth)
    args = graph.nodes[node.args]
    if node.op != REDUCE or node.filling is not None or type(args) is not tuple or not _DOTTED.fullmatch(name):
        return None
    texts = _texts(graph, args, depth)
    return None if texts is None else f"{name}({', '.join(texts)})"


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
    """Return the keys of a path as Python values; raise TargetError for an invalid path, or one with other steps."""
    steps = parse_steps(text)
    if any(step.value is NO_VALUE for step in steps):
        raise TargetError(f"{text!r} leads through an object, not by keys alone")
    return [step.value for step in steps]


def parse_steps(text: str) -> list[PathStep]:
    """Return the steps of a path as ``inspect`` prints it; raise TargetError if it is invalid."""
    steps: list[PathStep] = []
    at = 0
    while at < len(text):
        match = _STEP.match(text, at)
        kind = match.lastgroup if match is not None else None
        if match is None or (kind == "word" and bool(match[1]) is not bool(at)) or (kind == "node" and at):
            step = 'paths look like state_dict, models[0].net, callbacks["a.b"]'
            raise TargetError(f"{text!r} is not a path", next=step)
        at = match.end()
        if kind == "number":
            steps.append(PathStep(f"[{int(match['number'])}]", int(match["number"])))
        elif kind in ("word", "text", "key"):
            value = _key_value(text, match["key"]) if kind == "key" else match[kind]
            steps.append(PathStep(spell_key(".", value)[1:] if isinstance(value, str) else match[0], value))
        else:
            steps.append(PathStep(match[0], NO_VALUE))
    return steps


#: One step: a word, without a dot only at the beginning; in brackets a number, the number of a child, a string without
#: escapes, or another key; a step of an object; the number of a node, only at the beginning.
_STEP: Final = regex(
    r"""(\.?)(?P<word>[A-Za-z_][A-Za-z0-9_-]*)|\[(?:(?P<number>-?\d{1,18})|(?P<child>#\d{1,18})|"(?P<text>[^"\\]*)"|"""
    r"""(?P<key>(?:[^]["']|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')+))\]|"""
    r"""(?P<inner>\((?:(?:state |key )?\d{1,18}|function|keywords|id|buffer)\))|(?P<node>\(#\d{1,18}\))""",
    re.DOTALL,
)


def _key_value(path: str, text: str) -> Any:
    """Return the value of a key, or NO_VALUE unless it is a Python literal. Raise TargetError for other text."""
    import ast
    import warnings

    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.literal_eval(text)
    except ValueError:
        return NO_VALUE
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise TargetError(f"{path!r} is not a path: {text!r} is not a key") from None


def child(graph: Graph, ref: Ref, step: PathStep) -> Child | None:
    """Return the child of a step, or None. ``(#7)`` is any node; a negative number counts from the end of a list."""
    if step.step.startswith("(#"):
        place = int(step.step[2:-1])
        return Child(step.step, place) if place < len(graph.nodes) else None
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
    return ("tuple", *map(literal_identity, value)) if isinstance(value, tuple) else value
