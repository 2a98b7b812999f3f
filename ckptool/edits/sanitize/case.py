"""One object to be made plain, with the questions that rules ask about it, and the check that keys are hashable."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Final, TypeAlias

from ...base.records import NamedTuple
from ...base.text import pluralize, quoted
from ...checkpoint.graph_editor import GraphEditor
from ...checkpoint.objects import attributes, callable_name, mapped_name, mapping
from ...pickles import opcodes as op
from ...pickles.nodes import ByteArray, Call, Dict, Global, Graph, List, Node, Ref, Set


class Replacement(NamedTuple):
    """The node that replaces an object, a remark, and words in place of what the node shows (None: not reported)."""

    node: Node
    note: str = ""
    shown: str | None = ""

    @property
    def words(self) -> str:
        """Its description: "dict, 41 entries"; "" for none."""
        node = self.node
        if self.shown is None or self.shown:
            return "" if self.shown is None else self.shown + self.note
        if isinstance(node, Dict):
            return f"dict, {pluralize(len(node.pairs) // 2, 'entry')}{self.note}"
        if isinstance(node, List | tuple):
            items = node.items if isinstance(node, List) else node
            return f"{type(node).__name__.lower()}, {pluralize(len(items), 'element')}{self.note}"
        value = quoted(node) if isinstance(node, str) else node if isinstance(node, float) else ""
        return f"{type(node).__name__} {value}".rstrip() + self.note


#: A rule's answer if no plain value can hold the object.
UNKNOWN: Final = "unknown"
#: The result of a rule: None if it does not apply, ``UNKNOWN`` if no plain value can hold the object.
RuleResult: TypeAlias = "Replacement | str | None"


class Case:
    """A call and its context.

    ``name`` is the mapped name of the class or function, ``args`` the references of its arguments. For a call through
    ``copyreg`` both describe the object that it creates.
    """

    def __init__(self, editor: GraphEditor, ref: Ref, node: Call, storages: dict[str, bytes]) -> None:
        self.editor = editor
        self.graph: Graph = editor.graph
        self.ref = ref
        self.node = node
        #: Bytes of new storages by key; rules add to this dict.
        self.storages = storages
        self.name = called_name(editor, node.func) or self._method(node.func)
        self.args = _elements(editor, node.args)
        #: The value of a builtin base that ``copyreg._reconstructor`` was given, or -1.
        self.base = -1
        #: The keyword arguments of NEWOBJ_EX; -1 if there are none.
        self.keywords = node.kwargs
        self.is_class = node.op != op.REDUCE
        if self.name == "copyreg._reconstructor" and len(self.args) == 3:
            self.base = -1 if self.current(self.args[2]) is None else self.args[2]
            self._is_class(self.args[0], ())
        elif self.name in ("copyreg.__newobj__", "copyreg.__newobj_ex__") and self.args:
            inner = self.current(self.args[1]) if self.name.endswith("_ex__") and len(self.args) > 1 else None
            self.keywords = self.args[2] if type(inner) is tuple and len(self.args) > 2 else -1
            self._is_class(self.args[0], inner if type(inner) is tuple else self.args[1:])
        elif self.name == "" and not self.args:
            self._partial(self.current(node.func))

    def _is_class(self, cls: Ref, args: tuple[Ref, ...]) -> None:
        self.name, self.args, self.is_class = called_name(self.editor, cls), args, True

    def _method(self, func: Ref) -> str:
        """Return the dotted name of ``getattr(cls, name)``, as protocol 2 writes a method; "" for other nodes."""
        node = self.current(func)
        args = _elements(self.editor, node.args) if isinstance(node, Call) else ()
        if not isinstance(node, Call) or len(args) != 2 or called_name(self.editor, node.func) != "builtins.getattr":
            return ""
        owner, name = called_name(self.editor, args[0]), self.current(args[1])
        return f"{owner}.{name}" if owner and isinstance(name, str) else ""

    def _partial(self, func: Node) -> None:
        """Follow ``partial(cls.__new__, cls, ...)()``, protocol 2's form of keyword arguments of ``__new__``."""
        if not isinstance(func, Call) or called_name(self.editor, func.func) != "functools.partial" or not func.states:
            return
        state = _elements(self.editor, func.states[-1])
        args = _elements(self.editor, state[1]) if len(state) > 2 else ()
        if args and self._method(state[0]).endswith(".__new__"):
            self._is_class(args[0], args[1:])
            self.keywords = state[2]

    def inner(self, ref: Ref, node: Call) -> Case:
        """Return the case of another call in the same graph."""
        return Case(self.editor, ref, node, self.storages)

    def current(self, ref: Ref) -> Node:
        """Return the node of a reference, with the changes made so far."""
        return self.editor.node(ref)

    def text(self, index: int) -> str | None:
        """Return the argument at this index if it is a string, otherwise None."""
        node = self.current(self.args[index]) if index < len(self.args) else None
        return node if type(node) is str else None

    def state(self) -> list[tuple[Ref, Ref]] | None:
        """Return the (name, value) references of the attributes that BUILD sets; None if a state is not a mapping."""
        for ref in self.node.states:
            if ref >= len(self.graph.nodes):
                return None  # made by a rule: a state dict, which torch accepts
            value = self.graph.nodes[ref]
            parts = value if type(value) is tuple and len(value) == 2 else (ref,)
            if any(self.graph.nodes[part] is not None and mapping(self.graph, part) is None for part in parts):
                return None
        return attributes(self.graph, self.node)

    def last_state(self) -> tuple[Ref, ...]:
        """Return the references in the last state if it is a tuple, otherwise ()."""
        return _elements(self.editor, self.node.states[-1]) if self.node.states else ()

    def attribute(self, name: str) -> Ref:
        """Return the reference of one attribute's value, or -1."""
        return next((value for key, value in reversed(self.state() or ()) if self.graph.nodes[key] == name), -1)

    def strings(self, pairs: Sequence[tuple[Ref, Ref]] | None) -> dict[str, Ref]:
        """Return the values of a mapping by those keys that are strings."""
        return {name: value for key, value in pairs or () if isinstance(name := self.graph.nodes[key], str)}


def new_bytes(editor: GraphEditor, text: Ref) -> Call:
    """Return a call that makes bytes in the form torch accepts: ``_codecs.encode(text, 'latin1')``."""
    return editor.new_call("_codecs", "encode", (text, editor.constant("latin1")))


def dict_of(pairs: Sequence[tuple[Ref, Ref]]) -> Dict:
    """Return a dict with these (key, value) references."""
    return Dict([part for pair in pairs for part in pair])


def raw_bytes(editor: GraphEditor, ref: Ref) -> bytes | None:
    """Return the bytes in a node (also of bytearray, ``_codecs.encode`` and a Python 2 string), or None."""
    node = editor.node(ref)
    if isinstance(node, bytes):
        return node
    if isinstance(node, ByteArray):
        return node.data
    try:
        if isinstance(node, str):
            # The decoder reads a Python 2 str this way; other surrogates are not bytes.
            return node.encode("utf-8", "surrogateescape")
        if not isinstance(node, Call):
            return None
        name, args = called_name(editor, node.func), _elements(editor, node.args)
        if name in ("builtins.bytes", "builtins.bytearray") and not args:
            return b""
        if name == "builtins.bytearray" and len(args) == 1:
            return raw_bytes(editor, args[0])
        text = editor.node(args[0]) if name == "_codecs.encode" and args else None
        return text.encode("latin-1") if isinstance(text, str) else None
    except UnicodeEncodeError:
        return None


def _elements(editor: GraphEditor, ref: Ref) -> tuple[Ref, ...]:
    """Return the current elements of a tuple, or () for another node."""
    node = editor.node(ref)
    return node if type(node) is tuple else ()


def called_name(editor: GraphEditor, func: Ref) -> str:
    """Return the current mapped name of a call's function; "" if it is not a global."""
    node = editor.node(func)
    if isinstance(node, Global):
        return mapped_name(node)
    return callable_name(editor.graph, func) if func < len(editor.graph.nodes) else ""


#: Objects that torch accepts and Python cannot hash.
_UNHASHABLE: Final = frozenset(("collections.OrderedDict", "collections.Counter", "builtins.set", "builtins.bytearray"))
#: Limits for comparing keys: levels of nested tuples, and elements in total. Real keys have a few.
_DEPTH: Final = 8
_ELEMENTS: Final = 200


class Keys:
    """Check whether keys are hashable and distinct. Each tuple is examined once: a million keys may contain it."""

    def __init__(self, editor: GraphEditor) -> None:
        self.editor = editor
        self._hashable: dict[Ref, bool] = {}

    def hashable(self, ref: Ref) -> bool:
        """Return whether an object, as changed so far, can be a dict key; tuples may nest without end."""
        known = self._hashable
        path: list[tuple[Ref, Iterator[Ref]]] = [(-1, iter((ref,)))]
        while path:
            for part in path[-1][1]:
                node = self.editor.node(part)
                if part in known:
                    good = known[part]
                elif type(node) is tuple:
                    path.append((part, iter(node)))
                    break
                elif isinstance(node, Call):
                    good = called_name(self.editor, node.func) not in _UNHASHABLE
                else:
                    good = not isinstance(node, List | Dict | Set | ByteArray)
                if not good:
                    known.update((tuple_ref, False) for tuple_ref, _ in path)
                    return False
            else:
                known[path.pop()[0]] = True
        return True

    def duplicates(self, refs: Sequence[Ref]) -> list[int]:
        """Return the indices of keys that equal an earlier one because one of the two was made plain."""
        if not any(self._replaced(ref) for ref in refs):
            return []
        first: dict[Hashable, Ref] = {}
        indices = []
        for index, ref in enumerate(refs):
            other = first.setdefault(self._value(ref, _DEPTH, [_ELEMENTS]), ref)
            if other != ref and (self._replaced(ref) or self._replaced(other)):
                indices.append(index)
        return indices

    def _replaced(self, ref: Ref) -> bool:
        node, changed = self.editor.node(ref), self.editor.changed
        return ref in changed or (type(node) is tuple and any(part in changed for part in node[:_ELEMENTS]))

    def _value(self, ref: Ref, depth: int, budget: list[int]) -> Hashable:
        """Return a value that compares as the key does in Python: plain values by value, other objects by identity."""
        budget[0] -= 1
        node = self.editor.node(ref)
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if type(node) is tuple and depth and len(node) <= budget[0]:
            return tuple(self._value(part, depth - 1, budget) for part in node)
        if isinstance(node, Global):
            return (Global, node.module, node.name)
        data = raw_bytes(self.editor, ref) if isinstance(node, bytes | Call) else None
        return data if data is not None else (Ref, ref)
