"""One object to be made plain, and the few questions that rules ask about it."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from ...checkpoint.graph_editor import GraphEditor
from ...checkpoint.objects import attributes, callable_name, mapped_name, mapping
from ...pickles import opcodes as op
from ...pickles.nodes import ByteArray, Call, Dict, Global, Graph, Node, Ref


class Plain(NamedTuple):
    """The node that takes an object's place, and what it is now, in words: "dict, 41 entries"."""

    node: Node
    words: str


#: Nothing plain carries this object.
UNKNOWN: Final = "unknown"
Verdict: TypeAlias = "Plain | str | None"


class Case:
    """A call and what surrounds it.

    ``name`` is the mapped name of the class or function, ``args`` the references of its arguments; where the call
    goes through ``copyreg`` both are those of the object that comes of it.
    """

    def __init__(self, rewrite: GraphEditor, ref: Ref, node: Call, storages: dict[str, bytes]) -> None:
        self.rewrite = rewrite
        self.graph: Graph = rewrite.graph
        self.ref = ref
        self.node = node
        #: Bytes of new storages by key; rules add to it.
        self.storages = storages
        self.name = called(rewrite, node.func) or self._method(node.func)
        args = self.current(node.args)
        self.args: tuple[Ref, ...] = args if type(args) is tuple else ()
        #: What ``copyreg._reconstructor`` was given as the value of a builtin base, -1 for none.
        self.base = -1
        #: The keyword arguments of NEWOBJ_EX, -1 for none.
        self.keywords = node.kwargs
        self.is_class = node.op != op.REDUCE
        if self.name == "copyreg._reconstructor" and len(self.args) == 3:
            self.base = -1 if self.value(self.args[2]) is None else self.args[2]
            self.name, self.args, self.is_class = called(rewrite, self.args[0]), (), True
        elif self.name in ("copyreg.__newobj__", "copyreg.__newobj_ex__") and self.args:
            inner = self.value(self.args[1]) if self.name.endswith("_ex__") and len(self.args) > 1 else None
            self.keywords = self.args[2] if type(inner) is tuple and len(self.args) > 2 else -1
            rest = inner if type(inner) is tuple else self.args[1:]
            self.name, self.args, self.is_class = called(rewrite, self.args[0]), rest, True
        elif self.name == "" and not self.args:
            self._partial(self.current(node.func))

    def _method(self, func: Ref) -> str:
        """The dotted name of ``getattr(cls, name)``, which protocol 2 has for a method; "" for something else."""
        node = self.current(func)
        args = self.current(node.args) if isinstance(node, Call) else ()
        if not isinstance(node, Call) or type(args) is not tuple or len(args) != 2:
            return ""
        owner, name = called(self.rewrite, args[0]), self.current(args[1])
        if called(self.rewrite, node.func) != "builtins.getattr" or not owner or not isinstance(name, str):
            return ""
        return f"{owner}.{name}"

    def _partial(self, func: Node) -> None:
        """``functools.partial(cls.__new__, cls, ...)()``: how protocol 2 gives keyword arguments to ``__new__``."""
        if not isinstance(func, Call) or called(self.rewrite, func.func) != "functools.partial" or not func.states:
            return
        state = self.current(func.states[-1])
        args = self.current(state[1]) if type(state) is tuple and len(state) > 2 else ()
        if type(state) is tuple and type(args) is tuple and args and self._method(state[0]).endswith(".__new__"):
            self.name, self.args, self.is_class = called(self.rewrite, args[0]), args[1:], True
            self.keywords = state[2]

    def current(self, ref: Ref) -> Node:
        """The node of a reference, as changed so far."""
        return self.rewrite.node(ref)

    def value(self, ref: Ref) -> object:
        """A constant, string, bytes or the tuple of references; the node itself for everything else."""
        return self.current(ref)

    def text(self, index: int) -> str | None:
        """The argument of this number if it is a string."""
        found = self.current(self.args[index]) if index < len(self.args) else None
        return found if type(found) is str else None

    def state(self) -> list[tuple[Ref, Ref]] | None:
        """The (name, value) references of the attributes that BUILD sets; None when a state is no mapping."""
        for ref in self.node.states:
            if ref >= len(self.graph.nodes):
                return None  # made by a rule: a state dict, which torch takes
            value = self.graph.nodes[ref]
            parts = value if type(value) is tuple and len(value) == 2 else (ref,)
            if any(self.graph.nodes[part] is not None and mapping(self.graph, part) is None for part in parts):
                return None
        return attributes(self.graph, self.node)

    def attribute(self, name: str) -> Ref:
        """The reference of one attribute, -1 for none."""
        found = [value for key, value in self.state() or () if self.graph.nodes[key] == name]
        return found[-1] if found else -1

    def call(self, module: str, name: str, *args: Ref) -> Call:
        """A call of a global that torch allows."""
        func = self.rewrite.named(module, name)
        return Call(op.REDUCE, func, self.rewrite.add(tuple(args)) if args else self.rewrite.constant(()))

    def dict_of(self, pairs: list[tuple[Ref, Ref]]) -> Dict:
        return Dict([part for pair in pairs for part in pair])


def raw_bytes(rewrite: GraphEditor, ref: Ref) -> bytes | None:
    """The bytes in a node: of bytes or bytearray, of ``_codecs.encode(text, 'latin1')``, of a Python 2 string."""
    node = rewrite.node(ref)
    if isinstance(node, bytes):
        return node
    if isinstance(node, ByteArray):
        return node.data
    if isinstance(node, str):
        # As the machine reads the str of Python 2; other surrogates are no bytes.
        try:
            return node.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return None
    if isinstance(node, Call):
        name = called(rewrite, node.func)
        args = rewrite.node(node.args)
        if type(args) is not tuple:
            return None
        if name in ("builtins.bytes", "builtins.bytearray") and not args:
            return b""
        if name == "builtins.bytearray" and len(args) == 1:
            return raw_bytes(rewrite, args[0])
        if name == "_codecs.encode" and args:
            text = rewrite.node(args[0])
            try:
                return text.encode("latin-1") if isinstance(text, str) else None
            except UnicodeEncodeError:
                return None
    return None


def called(rewrite: GraphEditor, func: Ref) -> str:
    """The mapped name of what a call calls, as it is by now; "" when it is no global."""
    node = rewrite.node(func)
    if isinstance(node, Global):
        return mapped_name(node)
    return callable_name(rewrite.graph, func) if func < len(rewrite.graph.nodes) else ""
