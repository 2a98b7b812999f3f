"""A checkpoint that plain ``torch.load(path)`` takes: everything that torch does not load by default made plain.

The graph is walked from its root; each object that is not on torch's list is replaced, in its own slot, by the
nearest plain thing (``plain``), so that what was shared still is. Nothing is run to find out what that is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..checkpoint import Change, Checkpoint
from ..dtypes import BY_STORAGE
from ..errors import RefusedError
from ..human import counted, listed
from ..limits import LIMITS
from ..objects import elements, mapped_name, spell_key
from ..pickles import opcodes as op
from ..pickles.nodes import (
    Buffer,
    ByteArray,
    Call,
    Dict,
    Extension,
    FrozenSet,
    Global,
    Graph,
    Instance,
    List,
    Node,
    Persistent,
    Ref,
    Set,
    Style,
)
from ..tensors import TensorReader
from .plain import (
    CLASS_RULES,
    PYTHON_RULES,
    UNKNOWN,
    Case,
    Plain,
    Verdict,
    array,
    called,
    hashable,
    is_module,
    numpy_scalar,
    of_class,
    state_dict_of,
)
from .prune import fallen, prune
from .rewrite import Rewrite

__all__ = ["sanitize"]

#: Names of older and newer torch for what is on the list under another name; the arguments are the same.
_RENAMED = {
    "torch.UntypedStorage": ("torch.storage", "UntypedStorage"),
    "torch.storage._UntypedStorage": ("torch.storage", "UntypedStorage"),
    "torch._UntypedStorage": ("torch.storage", "UntypedStorage"),
    "torch.nn.Parameter": ("torch.nn.parameter", "Parameter"),
    "torch.tensor._rebuild_from_type_v2": ("torch._tensor", "_rebuild_from_type_v2"),
    "torch._tensor._rebuild_from_type": ("torch._tensor", "_rebuild_from_type_v2"),
    "torch.tensor._rebuild_from_type": ("torch._tensor", "_rebuild_from_type_v2"),
    "torch._utils._rebuild_xla_tensor": ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"),
}
#: Largest integer that torch reads: LONG4 is refused.
_LARGEST = 1 << 2000
#: The opcodes of Python 2 strings.
_PYTHON2 = frozenset((op.STRING, op.BINSTRING, op.SHORT_BINSTRING))
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"


class _Step(NamedTuple):
    ref: Ref
    path: str


def sanitize(
    checkpoint: Checkpoint,
    listed_names: Collection[str],
    *,
    as_state_dict: bool = False,
    drop_unknown: bool = False,
) -> Checkpoint:
    """Make everything plain that is not on the list ``listed_names`` of torch's globals ("module.name").

    ``as_state_dict`` turns pickled modules into their state dicts; ``drop_unknown`` leaves out what cannot be carried
    (an entry of a mapping goes, in a list None takes its place). Each change is in ``changes`` with its path.
    Raises RefusedError for what cannot be carried otherwise.
    """
    walk = _Sanitizer(checkpoint, frozenset(listed_names), as_state_dict)
    walk.run()
    unknown = walk.unknown
    if unknown and (not drop_unknown or checkpoint.graph.root in unknown):
        raise _refusal(checkpoint, walk)
    graph = _plain_style(walk.graph())
    changes = walk.changes
    if unknown:
        gone = fallen(graph, unknown.keys())
        if graph.root in gone:
            raise _refusal(checkpoint, walk)
        rewrite = Rewrite(graph)
        prune(rewrite, gone)
        graph = rewrite.done()
        changes += [Change("drop", path, 1, 0, f"{name}: dropped") for path, name in unknown.values()]
    anew = bool(walk.storages) or any(problem.refused for problem in checkpoint.container.problems)
    # What is left out must not stay behind as bytes that nothing uses.
    anew = anew or _storages(checkpoint.graph) - _storages(graph) != set()
    untyped = any(storage.dtype.name == "untyped" for storage in checkpoint.survey.reader.storages.values())
    if checkpoint.format == "torch-legacy" and (untyped or anew or checkpoint.graph.refused):
        # Five pickles in one protocol, and storages that it cannot hold: all of it is laid out anew.
        anew = True
        changes.append(Change("container", "", 1, 0, "legacy format -> zip"))
    if not changes and not checkpoint.graph.refused and not anew:
        return checkpoint
    if checkpoint.graph.refused:
        protocol = checkpoint.graph.style.protocol
        what = f"pickle protocol {protocol} -> 2" if protocol != 2 else "instructions that weights_only refuses"
        changes.insert(0, Change("protocol", "", 1, 0, what))
    return checkpoint.changed(graph, changes, walk.storages, anew=anew)


def _storages(graph: Graph) -> set[str]:
    """The keys of the storages that the root leads to."""
    reader = TensorReader(graph)
    return {found.key for ref in graph.reachable() if (found := reader.storage(ref)) is not None}


def _refusal(checkpoint: Checkpoint, walk: _Sanitizer) -> RefusedError:
    places = [f"{path or 'the root'} ({name})" for path, name in walk.unknown.values()]
    what = f"{counted(len(places), 'object')} cannot be made plain: {listed(places)}"
    if walk.modules:
        what = f"it holds a pickled module at {listed([path or 'the root' for path in walk.modules])}"
        return RefusedError(what, path=checkpoint.path, next="--as-state-dict makes it its state dict")
    return RefusedError(what, path=checkpoint.path, next="--drop-unknown leaves them out")


def _plain_style(graph: Graph) -> Graph:
    """The graph in the protocol that torch reads, written as CPython would."""
    # The two strings of a STACK_GLOBAL have no place there.
    nodes = [Global(n.module, n.name) if type(n) is Global and n.parts is not None else n for n in graph.nodes]
    return Graph(nodes, graph.root, Style(2), None, ())


class _Sanitizer:
    def __init__(self, checkpoint: Checkpoint, names: frozenset[str], as_state_dict: bool) -> None:
        self.checkpoint = checkpoint
        self.names = names
        self.as_state_dict = as_state_dict
        self.reader = checkpoint.survey.reader
        self.rewrite = Rewrite(checkpoint.graph)
        self.storages: dict[str, bytes] = {}
        self.changes: list[Change] = []
        #: What cannot be carried: its path and name, by reference.
        self.unknown: dict[Ref, tuple[str, str]] = {}
        #: Paths of modules that are not to become state dicts.
        self.modules: list[str] = []
        #: Mappings and sets, whose keys and members must have a hash in the end.
        self._hashed: list[_Step] = []

    def graph(self) -> Graph:
        return self.rewrite.done()

    def run(self) -> None:
        """Walk from the root. A slot is made plain first, then what it holds now is looked at."""
        self._storage_classes()
        seen: set[Ref] = set()
        work = [_Step(self.checkpoint.graph.root, "")]
        while work:
            step = work.pop()
            if step.ref in seen:
                continue
            seen.add(step.ref)
            self.visit(step)
            if step.ref not in self.unknown:
                work += reversed(self.below(step))
        for step in self._hashed:
            self._check_hash(step)

    # -- one slot -------------------------------------------------------------------------------

    def visit(self, step: _Step) -> None:
        """Make one slot plain; a rule's result may need another, such as an enumeration within a config."""
        for _ in range(8):
            node = self.rewrite.node(step.ref)
            if type(node) is Call:
                found = self.call(step, node)
            else:
                found = self.value(step, node)
            if found is None:
                return
            if isinstance(found, str):
                self.unknown[step.ref] = (step.path, self.named(node))
                return
            if found.words:
                self.note(step.path, self.named(node), found.words)
            self.rewrite.changed[step.ref] = found.node
        self.unknown[step.ref] = (step.path, self.named(self.rewrite.node(step.ref)))

    def note(self, path: str, name: str, words: str) -> None:
        self.changes.append(Change("sanitize", path, 1, 0, f"{name} -> {words}"))

    def named(self, node: Node) -> str:
        """What an object is called: its class or function."""
        if isinstance(node, Call):
            return Case(self.rewrite, -1, node, self.storages).name or "a call"
        if isinstance(node, Global):
            return mapped_name(node)
        if isinstance(node, Persistent):
            return "an object outside of the pickle"
        return f"extension {node.code}" if isinstance(node, Extension) else type(node).__name__.lower()

    def value(self, step: _Step, node: Node) -> Verdict:
        """Everything but calls."""
        rewrite = self.rewrite
        if isinstance(node, Global):
            name = mapped_name(node)
            if name in self.names and not node.states:
                return None
            return Plain(name, "its name")
        if isinstance(node, FrozenSet | Set):
            self._container(step, node)
            return None
        if isinstance(node, bytes | ByteArray):
            data = node if isinstance(node, bytes) else node.data
            case = Case(rewrite, step.ref, Call(op.REDUCE, rewrite.constant(None), rewrite.constant(())), {})
            text, latin = rewrite.add(data.decode("latin-1")), rewrite.constant("latin1")
            encoded = case.call("_codecs", "encode", text, latin)
            if isinstance(node, ByteArray):
                encoded = case.call("builtins", "bytearray", rewrite.add(encoded))
            rewrite.changed[step.ref] = encoded
            return None
        if isinstance(node, str) and self.checkpoint.graph.style.forms.get(step.ref) in _PYTHON2:
            if any("\udc80" <= char <= "\udcff" for char in node):
                return Plain(node.encode("utf-8", "surrogateescape").decode("latin-1"), "str, read as Latin-1")
            return None
        if type(node) is int and abs(node) >= _LARGEST:
            return Plain(hex(node), f"str, an integer of {node.bit_length():,} bits in hexadecimal")
        if isinstance(node, Persistent):
            made = step.ref >= len(self.checkpoint.graph.nodes)
            return None if made or self.reader.storage(step.ref) is not None else UNKNOWN
        return UNKNOWN if isinstance(node, Buffer | Extension) else None

    def _container(self, step: _Step, node: FrozenSet | Set) -> None:
        """Sets are calls in protocol 2; a frozen one has no form that torch takes."""
        rewrite = self.rewrite
        case = Case(rewrite, step.ref, Call(op.REDUCE, rewrite.constant(None), rewrite.constant(())), {})
        if isinstance(node, FrozenSet):
            self.note(step.path, "frozenset", f"set, {counted(len(node.items), 'element')}")
        rewrite.changed[step.ref] = case.call("__builtin__", "set", rewrite.add(List(list(node.items))))

    def call(self, step: _Step, node: Call) -> Verdict:
        """An object: one that torch takes, or the first rule that has something to say."""
        case = Case(self.rewrite, step.ref, node, self.storages)
        direct = called(self.rewrite, node.func)
        if direct in _RENAMED:
            self.rewrite.changed[step.ref] = self._renamed(node, direct)
            return None
        if direct == _FROM_TYPE:
            return self._from_type(step, case)
        if direct in self.names and type(self.rewrite.node(node.func)) is Global:
            return self._allowed(case, node)
        if is_module(case):
            if self.as_state_dict:
                return state_dict_of(case, self.reader)
            self.modules.append(step.path)
            return UNKNOWN
        tensor = self.reader.tensor(step.ref) if step.ref < len(self.checkpoint.graph.nodes) else None
        if tensor is not None and case.args and self.reader.tensor(case.args[0]) is not None:
            # A wrapper of old: Variable(data), Parameter(data).
            inner = self.rewrite.node(case.args[0])
            return Plain(inner, "the tensor in it")
        for rule in (numpy_scalar, array, *PYTHON_RULES, *CLASS_RULES):
            found = rule(case)
            if found is not None:
                return found
        if case.name == "" or case.name.startswith("numpy.") or _acts(case.name):
            return UNKNOWN
        return of_class(case)

    def _renamed(self, node: Call, name: str) -> Call:
        func = self.rewrite.named(*_RENAMED[name])
        return Call(op.REDUCE, func, node.args).filled(node.items, node.pairs, node.states)

    def _from_type(self, step: _Step, case: Case) -> Verdict:
        """A tensor of a subclass, or with attributes: a subclass that torch does not know becomes a plain tensor."""
        if len(case.args) < 4:
            return UNKNOWN
        func, cls = self.rewrite.node(case.args[0]), self.rewrite.node(case.args[1])
        if not isinstance(func, Global) or mapped_name(func) not in self.names:
            return UNKNOWN
        if isinstance(cls, Global) and mapped_name(cls) in self.names:
            return None
        name = mapped_name(cls) if isinstance(cls, Global) else "a subclass"
        if mapped_name(func) == "torch._utils._rebuild_wrapper_subclass":
            return UNKNOWN
        self.note(step.path, name, "plain tensor; its attributes are left out")
        return Plain(Call(op.REDUCE, case.args[0], case.args[2]), "")

    def _allowed(self, case: Case, node: Call) -> Verdict:
        """A call that torch takes, in a form that it takes."""
        if node.op not in (op.REDUCE, op.NEWOBJ):
            if node.kwargs >= 0 and self.rewrite.node(node.kwargs) is not None:
                return UNKNOWN
            self.rewrite.changed[case.ref] = Call(op.REDUCE, node.func, node.args).filled(
                node.items, node.pairs, node.states
            )
        if node.items or (node.pairs and case.name not in ("collections.OrderedDict", "collections.Counter")):
            return UNKNOWN
        return None

    def _storage_classes(self) -> None:
        """Storage classes under names that torch does not list: only the class name counts to it."""
        graph = self.checkpoint.graph
        for ref, node in enumerate(graph.nodes):
            if type(node) is not Persistent or self.reader.storage(ref) is None:
                continue
            pid = graph.nodes[node.pid]
            cls = graph.nodes[pid[1]] if type(pid) is tuple else None
            if type(pid) is not tuple or not isinstance(cls, Global) or mapped_name(cls) in self.names:
                continue
            name = mapped_name(cls)
            module = _RENAMED.get(name, ("torch", cls.name) if cls.name in BY_STORAGE else ("", ""))
            if module[0]:
                self.rewrite.changed[node.pid] = (pid[0], self.rewrite.named(*module), *pid[2:])
                self.note("", name, ".".join(module))

    # -- keys and members -----------------------------------------------------------------------

    def _check_hash(self, step: _Step) -> None:
        """What became a dict or list can be no key and no member of a set: the set becomes a list, the key goes."""
        node = self.rewrite.node(step.ref)
        if isinstance(node, Call) and called(self.rewrite, node.func) == "builtins.set":
            args = self.rewrite.node(node.args)
            members = elements(self.rewrite.node(args[0])) if type(args) is tuple and args else ()
            if not all(hashable(self.rewrite, member) for member in members):
                self.rewrite.changed[step.ref] = List(list(members))
                self.note(step.path, "set", "list, its members have no hash any more")
            return
        pairs = node.pairs if isinstance(node, Dict | Call) else ()
        for key in pairs[::2]:
            if not hashable(self.rewrite, key):
                self.unknown[key] = (step.path, "a key without a hash")

    # -- what a slot holds ----------------------------------------------------------------------

    def below(self, step: _Step) -> list[_Step]:
        """The references that a slot holds by now, with their paths."""
        node = self.rewrite.node(step.ref)
        path = step.path if len(step.path) <= LIMITS.path_chars else step.path[: LIMITS.path_chars] + "..."
        found: list[_Step] = []
        if type(node) is tuple:
            found += (_Step(ref, f"{path}[{number}]") for number, ref in enumerate(node))
        elif isinstance(node, List | Set | FrozenSet):
            found += (_Step(ref, f"{path}[{number}]") for number, ref in enumerate(node.items))
        elif isinstance(node, Dict):
            self._hashed.append(step)
            found += self._entries(path, node.pairs)
        elif isinstance(node, Call):
            if node.pairs or called(self.rewrite, node.func) == "builtins.set":
                self._hashed.append(step)
            found += self._held(node, path)
        elif isinstance(node, Instance):
            found += (_Step(ref, path) for ref in node.states)
        return found

    def _held(self, node: Call, path: str) -> list[_Step]:
        args = self.rewrite.node(node.args)
        # The function and the class of a tensor are names that torch looks at, not objects.
        skip = 2 if called(self.rewrite, node.func) == _FROM_TYPE else 0
        found = [_Step(ref, path) for ref in args[skip:]] if type(args) is tuple else []
        return found + self._entries(path, node.pairs) + [_Step(state, path) for state in node.states]

    def _entries(self, path: str, pairs: Sequence[Ref]) -> list[_Step]:
        found = []
        for key, value in zip(pairs[::2], pairs[1::2]):
            name = self.rewrite.node(key)
            if type(name) is not str or self.checkpoint.graph.style.forms.get(key) in _PYTHON2:
                found.append(_Step(key, path))
            found.append(_Step(value, spell_key(path, name)))
        return found


#: Modules whose functions act on the machine: what they would give is nothing to carry.
_ACTING = frozenset(("os", "posix", "nt", "subprocess", "sys", "shutil", "socket", "importlib", "pickle", "builtins"))


def _acts(name: str) -> bool:
    return name.partition(".")[0] in _ACTING
