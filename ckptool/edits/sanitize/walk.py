"""The walk over a graph that makes everything plain, each object in its own slot, so that what was shared still is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

from ...base.dtypes import BY_STORAGE
from ...base.limits import LIMITS
from ...base.text import counted
from ...checkpoint.changes import Change
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.graph_editor import Rewrite
from ...checkpoint.objects import elements, mapped_name, pair_list
from ...checkpoint.paths import key_text, spell_key
from ...pickles import opcodes as op
from ...pickles.nodes import (
    Buffer,
    ByteArray,
    Call,
    Dict,
    Extension,
    FrozenSet,
    Global,
    Instance,
    List,
    Node,
    Persistent,
    Ref,
    Set,
)
from ...pickles.uncommon_opcodes import PYTHON2, not_utf8
from .case import UNKNOWN, Case, Plain, Verdict, called
from .classes import CLASS_RULES, of_class
from .hashing import Keys
from .modules import is_module, state_dict_of
from .numpy_values import ARRAYS, BUFFERS, SCALARS, array, numpy_object, numpy_scalar
from .python import PYTHON_RULES

#: Names of older and newer torch for what is on the list under another name; the arguments are the same.
_RENAMED: Final = {
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
_LARGEST: Final = 1 << 2000
_FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"


#: Modules whose functions act on the machine: what they would give is nothing to carry.
_ACTING: Final = frozenset(
    ("os", "posix", "nt", "subprocess", "sys", "shutil", "socket", "importlib", "pickle", "builtins")
)
_RULES: Final = (numpy_scalar, array, numpy_object, *PYTHON_RULES, *CLASS_RULES)


class _Step(NamedTuple):
    ref: Ref
    path: str


class Walk:
    """From the root to everything that it leads to. A slot is made plain first, then what it holds now is looked at."""

    def __init__(
        self, checkpoint: Checkpoint, names: frozenset[str], unfit: Collection[Ref], as_state_dict: bool
    ) -> None:
        self.checkpoint = checkpoint
        self.names = names
        self.as_state_dict = as_state_dict
        self.reader = checkpoint.survey.reader
        self.unfit = unfit
        self.rewrite = Rewrite(checkpoint.graph)
        self.storages: dict[str, bytes] = {}
        self.stray = frozenset(not_utf8(checkpoint.graph))
        self.changes: list[Change] = []
        #: What cannot be carried: its path and name, by reference.
        self.unknown: dict[Ref, tuple[str, str]] = {}
        #: Paths of modules that are not to become state dicts.
        self.modules: list[str] = []
        #: Paths of modules whose state dict their classes alone can make.
        self.packed: list[str] = []
        #: Entries of mappings that cannot stay because of their key: the path of the mapping, and why.
        self.lost: list[tuple[str, str]] = []
        #: Objects that became tuples: those can be in themselves, tuples cannot.
        self.tuples: dict[Ref, str] = {}
        #: Mappings and sets, whose keys and members must have a hash in the end.
        self._hashed: list[_Step] = []

    def run(self) -> None:
        """Make everything plain."""
        self._storage_classes()
        for step in self._steps():
            self.visit(step)
        keys = Keys(self.rewrite)
        for step in self._hashed:
            self._check_keys(step, keys)

    def _steps(self) -> Iterator[_Step]:
        """Every slot with its path, parents before children; what a slot holds is asked for after it was given."""
        seen: set[Ref] = set()
        work = [_Step(self.checkpoint.graph.root, "")]
        while work:
            step = work.pop()
            if step.ref not in seen:
                seen.add(step.ref)
                yield step
                if step.ref not in self.unknown:
                    work += reversed(self.below(step))

    def places(self, refs: Collection[Ref]) -> list[tuple[str, str]]:
        """The path and name of each of these references, as it is by now."""
        return [(step.path, self.named(self.rewrite.node(step.ref))) for step in self._steps() if step.ref in refs]

    # -- one slot -------------------------------------------------------------------------------

    def visit(self, step: _Step) -> None:
        """Make one slot plain; a rule's result may need another, such as an enumeration within a config."""
        if step.ref in self.unfit:
            self.unknown[step.ref] = (step.path, self.named(self.rewrite.node(step.ref)))
            return
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
            if type(found.node) is tuple and type(node) is Call:
                self.tuples[step.ref] = step.path
            self.rewrite.changed[step.ref] = found.node
        self.unknown[step.ref] = (step.path, self.named(self.rewrite.node(step.ref)))

    def note(self, path: str, name: str, words: str) -> None:
        self.changes.append(Change("sanitize", path, 1, 0, f"{name} -> {words}"))

    def named(self, node: Node) -> str:
        """What an object is called: its class or function."""
        if isinstance(node, Call):
            case = Case(self.rewrite, -1, node, self.storages)
            cls = self.rewrite.node(case.args[1]) if case.name == _FROM_TYPE and len(case.args) > 1 else None
            if case.name in SCALARS or case.name in ARRAYS or case.name in BUFFERS:
                return "numpy scalar" if case.name in SCALARS else "numpy array"
            return mapped_name(cls) if isinstance(cls, Global) else case.name or "a call"
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
        if isinstance(node, str):
            if step.ref in self.stray and step.ref not in self.rewrite.changed:
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
            module, name = _RENAMED[direct]
            func = self.rewrite.named(module, name)
            node = Call(op.REDUCE, func, node.args).filled(node.items, node.pairs, node.states)
            if f"{module}.{name}" != direct:
                self.note(step.path, direct, f"{module}.{name}")
            self.rewrite.changed[step.ref] = node
            direct, case = f"{module}.{name}", Case(self.rewrite, step.ref, node, self.storages)
        if direct == _FROM_TYPE:
            return self._from_type(step, case)
        if direct in self.names and type(self.rewrite.node(node.func)) is Global:
            return self._allowed(case, node)
        if is_module(case):
            made = state_dict_of(case, self.reader)
            if self.as_state_dict and not isinstance(made, str):
                return made
            (self.packed if isinstance(made, str) else self.modules).append(step.path)
            return UNKNOWN
        if self._is_tensor(step.ref) and case.args and self._is_tensor(case.args[0]):
            # A wrapper of old: Variable(data), Parameter(data).
            inner = self.rewrite.node(case.args[0])
            return Plain(inner, "the tensor in it")
        for rule in _RULES:
            found = rule(case)
            if found is not None:
                return found
        module, _, last = case.name.partition(".")
        if case.name == "" or (module in _ACTING and not (module == "builtins" and last[:1].isupper())):
            return UNKNOWN  # of the builtins the exceptions are what they say
        # A function of numpy makes of its arguments what no rule knows.
        return UNKNOWN if case.name.startswith("numpy.") and not case.is_class else of_class(case)

    def _is_tensor(self, ref: Ref) -> bool:
        return ref < len(self.checkpoint.graph.nodes) and self.reader.tensor(ref) is not None

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

    def _check_keys(self, step: _Step, keys: Keys) -> None:
        """What became a dict or list can be no key and no member of a set: the set becomes a list, the key goes.

        So it is with two that have become equal: torch would keep one of them.
        """
        node = self.rewrite.node(step.ref)
        if isinstance(node, Call) and called(self.rewrite, node.func) == "builtins.set":
            args = self.rewrite.node(node.args)
            members = elements(self.rewrite.node(args[0])) if type(args) is tuple and args else ()
            hashed = all(keys.hashable(member) for member in members)
            if not hashed or keys.twins(members):
                self.rewrite.changed[step.ref] = List(list(members))
                why = "some of its members are equal by now" if hashed else "its members have no hash any more"
                self.note(step.path, "set", f"list, {why}")
            return
        if not isinstance(node, Dict | Call):
            return
        names, values = node.pairs[::2], node.pairs[1::2]
        bad = {place: "a key without a hash" for place, key in enumerate(names) if not keys.hashable(key)}
        if not bad:
            bad = dict.fromkeys(keys.twins(names), "a key that is equal to another one by now")
        if bad:
            pairs = [part for place, pair in enumerate(zip(names, values)) if place not in bad for part in pair]
            twin = Dict(pairs) if isinstance(node, Dict) else node.filled(node.items, pairs, node.states)
            self.rewrite.changed[step.ref] = twin
            self.lost += ((step.path, why) for why in bad.values())

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
        nodes = self.checkpoint.graph.nodes
        written = max(node.args, node.func) < len(nodes)
        listed = pair_list(self.checkpoint.graph, node) if written else None
        if listed:
            # OrderedDict([[key, value], ...]): the lists are a manner of writing, and have no path.
            pairs = [part for pair in listed for part in elements(nodes[pair])]
            return self._entries(path, [*pairs, *node.pairs]) + [_Step(state, path) for state in node.states]
        args = self.rewrite.node(node.args)
        # The function and the class of a tensor are names that torch looks at, not objects.
        skip = 2 if called(self.rewrite, node.func) == _FROM_TYPE else 0
        found = [_Step(ref, path) for ref in args[skip:]] if type(args) is tuple else []
        return found + self._entries(path, node.pairs) + [_Step(state, path) for state in node.states]

    def _entries(self, path: str, pairs: Sequence[Ref]) -> list[_Step]:
        found = []
        graph = self.checkpoint.graph
        for number, (key, value) in enumerate(zip(pairs[::2], pairs[1::2])):
            name = self.rewrite.node(key)
            if type(name) is not str or self.checkpoint.graph.style.forms.get(key) in PYTHON2:
                found.append(_Step(key, path))
            if type(name) is str:
                found.append(_Step(value, spell_key(path, name)))
            else:
                text = key_text(graph, key) if key < len(graph.nodes) else ""
                found.append(_Step(value, f"{path}[{text or f'#{number}'}]"))
        return found
