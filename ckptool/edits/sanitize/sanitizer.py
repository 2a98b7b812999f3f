"""Make a checkpoint loadable by plain ``torch.load(path)``: replace the objects that torch does not load by default.

The graph is walked from its root. Each object that is not on torch's list is replaced, in its own slot, by the nearest
plain value, so that shared objects stay shared. Nothing is executed to find this value. The result is checked as
``torch.load`` would read it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Final

from ...base.dtypes import BY_STORAGE
from ...base.errors import CkptoolError, MalformedError, RefusedError
from ...base.findings import CUT, DAMAGED, DEFLATED
from ...base.limits import LIMITS
from ...base.steps import AnyStep, Step, command, suggested_output
from ...base.text import join_limited, pluralize
from ...checkpoint.backends import (
    ARRAYS,
    BUFFERS,
    FROM_STORAGE,
    FROM_VALUES,
    QUANTIZERS,
    array_layout,
    backend_arguments,
)
from ...checkpoint.checkpoint import Change, Checkpoint, away, rescue_step
from ...checkpoint.graph_editor import GraphEditor, leading_to, prune, removed_with, used_storages
from ...checkpoint.objects import callable_name, list_items, mapped_name, pair_list
from ...checkpoint.paths import key_text, spell_key
from ...checkpoint.selection import Located
from ...checkpoint.tensors import is_sharded
from ...files.sources import FolderSource
from ...formats.opening import takes_path
from ...pickles import opcodes as op
from ...pickles.decode import decode
from ...pickles.encode import cycles, encode
from ...pickles.nodes import (
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
    non_utf8_strings,
)
from ...pickles.opcodes import PYTHON2_STRINGS
from ...safety.storages import storage_flaws
from ...safety.torch_lists import NEWEST, allowed
from ...safety.weights_only import WRONG_SUFFIX, weights_only
from ...values.elements import added_storages
from ..recompute import check_bytes, misdescribed
from ..sharded import local_parts_step
from .case import UNKNOWN, Case, Keys, Replacement, RuleResult, called_name, new_bytes
from .numpy_values import SCALARS, device_tensor
from .rules import ACTING, LARGEST, RENAMED, any_class, by_name, is_module, state_dict_of

_FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"
#: The function that makes a tensor of a device without storages from a CPU tensor.
_FROM_CPU: Final = "torch._utils._rebuild_device_tensor_from_cpu_tensor"
#: Arguments of ``_rebuild_tensor_v2`` without metadata; other devices add one argument.
_DENSE_ARGUMENTS: Final = 6


@takes_path
def sanitize(checkpoint: Checkpoint, *, as_state_dict: bool = False, drop_unknown: bool = False) -> Checkpoint:
    """Make everything plain that ``torch.load(path)`` in torch 2.6 and later does not load by default.

    ``as_state_dict`` turns pickled modules into their state dicts. ``drop_unknown`` drops objects that cannot be made
    plain (an entry of a mapping is dropped, in a list None takes its place), but never an object with tensor values.
    Each change is in ``changes`` with its path. Raise RefusedError for other objects that cannot be replaced by plain
    values, or if torch would still refuse the result. Raise MalformedError for a damaged file.

    >>> ckptool.sanitize("args.pth")["args"]["lr"]
    0.01
    """
    # Use the newest list: the dtypes in it have no older form. Globals that only some programs register are not on it.
    names = allowed(NEWEST)
    edited = checkpoint.lenient()
    # Torch may fail at a replacement, which the next round then finds.
    for _ in range(3 if drop_unknown else 1):
        edited = _make_plain(edited, names, _unloadable(edited), as_state_dict, drop_unknown).lenient()
        if not _unloadable(edited):
            break
    whole = _checked(edited)
    if not isinstance(checkpoint.source, FolderSource):
        return whole
    from .companions import with_plain_companions  # only folders have files beside their weights

    return with_plain_companions(whole, partial(sanitize, as_state_dict=as_state_dict, drop_unknown=drop_unknown))


def _unloadable(checkpoint: Checkpoint) -> set[Ref]:
    """Return the objects that cannot be made loadable: calls at which torch fails, and unsupported data."""
    return {*checkpoint.survey.unsupported, *misdescribed(checkpoint)}


def _checked(edited: Checkpoint) -> Checkpoint:
    """Return the checkpoint as it would be read back; raise RefusedError if ``validate`` would refuse it."""
    decoded = decode(encode(edited.graph)).graph if edited.edited else edited.graph
    written = edited.replace(graph=decoded, is_lenient=edited.edited or edited.is_lenient)
    flaws = storage_flaws(written)
    blockers = weights_only(written, flaws).blockers
    left = [blocker.name or blocker.rule for blocker in blockers if blocker.rule != WRONG_SUFFIX]
    left += dict.fromkeys(written.survey.unsupported.values())
    if left:
        step = rescue_step(edited) if flaws else command("validate", edited.path)
        raise RefusedError(f"torch.load would still refuse it: {join_limited(left)}", path=edited.path, next=step)
    return written


def _make_plain(
    checkpoint: Checkpoint, names: frozenset[str], unloadable: Collection[Ref], as_state_dict: bool, drop_unknown: bool
) -> Checkpoint:
    container, path = checkpoint.container, checkpoint.path
    for problem in container.problems:
        if problem.code in (CUT, DAMAGED):  # torch refuses it, whatever its pickle says
            raise MalformedError(problem.message, path=path, next=rescue_step(checkpoint))
    sanitizer = _Sanitizer(checkpoint, names, unloadable, as_state_dict)
    sanitizer.run()
    unknown, storages, changes = sanitizer.unknown, sanitizer.storages, sanitizer.changes
    if checkpoint.graph.root in unknown:
        raise _refusal(checkpoint, sanitizer, True)
    graph = sanitizer.editor.done()
    _refuse_cycles(checkpoint, sanitizer, graph)
    # Protocol 2, as CPython would write it: it does not need the two strings of a STACK_GLOBAL.
    nodes = [Global(n.module, n.name) if type(n) is Global and n.parts is not None else n for n in graph.nodes]
    graph = Graph(nodes, graph.root, Style(2), None, ())
    kept, gone = graph, set[Ref]()
    if unknown:
        gone = removed_with(graph, unknown.keys())
        if graph.root in gone:
            raise _refusal(checkpoint, sanitizer, True)
        editor = GraphEditor(graph)
        prune(editor, gone)
        kept = editor.done()
    lost = _lost_values(checkpoint, kept, gone) - sanitizer.converted
    owners = unknown.keys() & leading_to(checkpoint.graph, lost) if lost else set[Ref]()
    if owners or ((unknown or sanitizer.bad_keys) and not drop_unknown):
        raise _refusal(checkpoint, sanitizer, False, owners)
    known = [ref for ref in gone if ref < len(checkpoint.graph.nodes)]
    rest = lost.difference(checkpoint.graph.reachable(*known) if known else ())
    if rest:
        leading = leading_to(checkpoint.graph, rest)
        paths = [entry.path for entry in checkpoint.survey.tensors if entry.ref in leading]
        paths += [place for place, ref, _ in checkpoint.survey.storages if ref in rest]
        words = join_limited(paths or ["arrays among the attributes of an object"], most=3)
        if not sanitizer.state_dicts:
            message = f"values of tensors are among what a plain form leaves out: {words}"
            raise RefusedError(message, path=path, next=command("inspect", path))
        # as_state_dict keeps a module's parameters and persistent buffers only, and the user asked for that.
        note = f"left out with its attributes: {words}"
        sanitizer.note(sanitizer.state_dicts[0], pluralize(len(paths), "tensor"), note)
    if unknown:
        others = sanitizer.places(gone - unknown.keys()) if len(gone) > len(unknown) else []
        graph = kept
        changes += [Change("drop", path, 1, 0, f"{name}: dropped") for path, name in unknown.values()]
        changes += [Change("drop", path, 1, 0, f"{name}: dropped with a part of it") for path, name in others]
    changes += [Change("drop", path, 1, 0, f"{name}: dropped") for path, name in sanitizer.bad_keys]
    before, after = used_storages(checkpoint.graph, path), used_storages(graph, path)
    if before.keys() & storages.keys():
        raise MalformedError("it has storages under names that no torch writes", path=path)
    check_bytes(checkpoint, [storage for key, storage in after.items() if key not in storages])
    refused = checkpoint.graph.refused
    relayout = (
        bool(storages)
        # Plain torch.load accepts deflated storages, but not with mmap=True.
        or any(
            item.refused_by_torch or (item.code == DEFLATED and item.level == "error") for item in container.problems
        )
        # Dropped bytes must not stay in the file unused.
        or bool(before.keys() - after.keys())
        # The layout contract of .format_version requires storages in the order in which a reader meets them.
        or (container.keeps_format and list(before) != [key for key in after if key in before])
    )
    if checkpoint.traits.storages_in_sequence:
        # A legacy file has five pickles of one protocol, and some storages do not fit it: lay everything out again.
        untyped = any(problem.code == "legacy-untyped" for problem in container.problems)
        relayout = bool(relayout or untyped or refused)
    if not (changes or sanitizer.editor.changed or refused or relayout):
        return checkpoint
    if refused:
        protocol = checkpoint.graph.style.protocol
        summary = f"pickle protocol {protocol} -> 2" if protocol != 2 else "instructions that weights_only refuses"
        changes.insert(0, Change("protocol", "", 1, 0, summary))
    if relayout and not changes and container.keeps_format:
        changes = [Change("repack", "", 1, 0, "rewritten in the layout of torch.save")]
    added = added_storages(checkpoint, storages, after)
    return checkpoint.changed(graph, changes, added, needs_relayout=relayout)


def _refuse_cycles(checkpoint: Checkpoint, sanitizer: _Sanitizer, graph: Graph) -> None:
    """Raise RefusedError for a set, or an object that became a tuple, which contains itself: neither can be made."""
    may_cycle = sanitizer.tuples or (checkpoint.graph.refused and sanitizer.editor.changed)
    for ref in [ref for cycle in cycles(graph) for ref in cycle.dependent] if may_cycle else ():
        node = graph.nodes[ref]
        if type(node) is Call and callable_name(graph, node.func) == "builtins.set":
            raise RefusedError("a set contains itself, which has no plain form", path=checkpoint.path)
        if ref in sanitizer.tuples:
            what = f"{sanitizer.tuples[ref] or 'the root'} contains itself, and has no plain form but a tuple"
            raise RefusedError(what, path=checkpoint.path)


def _refusal(
    checkpoint: Checkpoint, sanitizer: _Sanitizer, root_goes: bool, owners: Collection[Ref] = ()
) -> RefusedError:
    """Describe the objects without plain values; ``owners`` hold tensors; ``root_goes``: nothing would be left."""
    path, rooted = checkpoint.path, [path or "the root" for path in sanitizer.modules]
    if rooted:
        message = f"it holds a pickled module at {join_limited(rooted)}"
        return RefusedError(message, path=path, next="`--as-state-dict` makes it its state dict")
    spread = any(is_sharded(entry.tensor) for entry in checkpoint.survey.tensors)
    unknown = [*sanitizer.unknown.values(), *sanitizer.bad_keys]
    if owners and not (spread or sanitizer.packed):
        unknown = [found for ref, found in sanitizer.unknown.items() if ref in owners]
    places = [f"{place or 'the root'} ({name})" for place, name in unknown]
    message = f"{pluralize(len(places), 'object')} cannot be replaced by plain values: {join_limited(places)}"
    if spread:
        return RefusedError(message, path=path, next=local_parts_step(checkpoint))
    if not (owners or root_goes):
        return RefusedError(message, path=path, next="`--drop-unknown` leaves them out")
    message += "; they hold values of tensors" if owners else ""
    step = "load it where its classes are, if you trust it, and save plain tensors: module.state_dict() of a module"
    return RefusedError(message, path=path, next=step)


def _lost_values(checkpoint: Checkpoint, kept: Graph, gone: Collection[Ref]) -> set[Ref]:
    """Return the storages, arrays and tensors with bytes that are not in ``kept``, the graph without ``gone``."""
    graph, survey = checkpoint.graph, checkpoint.survey
    left = used_storages(kept, checkpoint.path)
    reachable = set(kept.reachable())
    lost = {ref for ref, storage in survey.reader.uses() if storage.key not in left and storage.nbytes}
    calls = dict(graph.of_type(Call))
    arrays = {ref for ref in calls.keys() - reachable if (layout := array_layout(graph, ref)) and layout.nbytes}
    if arrays:
        # A generator's seed array goes with it, because only its state matters.
        random = [ref for ref, node in calls.items() if callable_name(graph, node.func).startswith("numpy.random.")]
        lost |= arrays.difference(graph.reachable(*random)) if random else arrays
    lost.update(entry.ref for entry in survey.tensors if entry.ref in gone and entry.tensor.own_bytes)
    return lost.intersection(graph.reachable()) if lost else lost


class _Sanitizer:
    """Visits everything that the root leads to: first makes a slot plain, then visits its new content."""

    def __init__(
        self, checkpoint: Checkpoint, names: frozenset[str], unloadable: Collection[Ref], as_state_dict: bool
    ) -> None:
        self.checkpoint = checkpoint
        self.names = names
        self.as_state_dict = as_state_dict
        self.reader = checkpoint.survey.reader
        self.unloadable = unloadable
        self.editor = GraphEditor(checkpoint.graph)
        self.storages: dict[str, bytes] = {}
        self.not_utf8 = frozenset(non_utf8_strings(checkpoint.graph))
        self.changes: list[Change] = []
        #: Objects that cannot be replaced by plain values: path and name, by reference.
        self.unknown: dict[Ref, tuple[str, str]] = {}
        #: Arrays that became tensors together with the call around them.
        self.converted: set[Ref] = set()
        #: Paths of modules that became state dicts.
        self.state_dicts: list[str] = []
        #: Paths of modules that could become state dicts, but the user did not ask for it.
        self.modules: list[str] = []
        #: Paths of modules whose state dict only their classes can make.
        self.packed: list[str] = []
        #: Entries whose key cannot stay: the path of the mapping, and the reason.
        self.bad_keys: list[tuple[str, str]] = []
        #: Paths of objects that became tuples: an object can contain itself, a tuple cannot.
        self.tuples: dict[Ref, str] = {}
        #: Mappings and sets, whose keys and members must be hashable in the end.
        self._hashed: list[Located] = []

    @cached_property
    def _owners(self) -> set[Ref]:
        return leading_to(self.checkpoint.graph, [ref for ref, _ in self.reader.uses()])

    def run(self) -> None:
        """Make everything plain."""
        self._rename_storage_classes()
        for visit in self._visits():
            self._make_plain(visit)
        keys = Keys(self.editor)
        for visit in self._hashed:
            self._check_keys(visit, keys)

    def _visits(self) -> Iterator[Located]:
        """Yield every slot with its path, parents before children; the caller may change each slot when it gets it."""
        seen: set[Ref] = set()
        work = [Located(self.checkpoint.graph.root, "")]
        while work:
            visit = work.pop()
            if visit.ref not in seen:
                seen.add(visit.ref)
                yield visit
                if visit.ref not in self.unknown:
                    work += reversed(self._below(visit))

    def places(self, refs: Collection[Ref]) -> list[tuple[str, str]]:
        """Return the path and current name of each of these references."""
        return [(visit.path, self._name(self.editor.node(visit.ref))) for visit in self._visits() if visit.ref in refs]

    def note(self, path: str, name: str, words: str) -> None:
        """Record that the object called ``name`` became the value that ``words`` describe."""
        self.changes.append(Change("sanitize", path, 1, 0, f"{name} -> {words}"))

    def _make_plain(self, visit: Located) -> None:
        # A slot may need several replacements, such as for an enumeration within a config.
        for _ in range(8 if visit.ref not in self.unloadable else 0):
            node = self.editor.node(visit.ref)
            result = self._call(visit, node) if type(node) is Call else self._value(visit, node)
            if result is None:
                return
            if isinstance(result, str):
                break
            if result.words:
                self.note(visit.path, self._name(node), result.words)
            if type(result.node) is tuple and type(node) is Call:
                self.tuples[visit.ref] = visit.path
            self.editor.changed[visit.ref] = result.node
        else:
            node = self.editor.node(visit.ref)
        self.unknown[visit.ref] = (visit.path, self._name(node))

    def _name(self, node: Node) -> str:
        if isinstance(node, Call):
            case = Case(self.editor, -1, node, self.storages)
            cls = self.editor.node(case.args[1]) if case.name == _FROM_TYPE and len(case.args) > 1 else None
            if case.name in (*SCALARS, *ARRAYS, *BUFFERS):
                return "numpy scalar" if case.name in SCALARS else "numpy array"
            return mapped_name(cls) if isinstance(cls, Global) else case.name or "a call"
        if isinstance(node, Global):
            return mapped_name(node)
        if isinstance(node, Persistent):
            return "an object outside of the pickle"
        return f"extension {node.code}" if isinstance(node, Extension) else type(node).__name__.lower()

    def _value(self, visit: Located, node: Node) -> RuleResult:
        editor, ref = self.editor, visit.ref
        if isinstance(node, Global):
            name = mapped_name(node)
            return None if name in self.names and not node.states else Replacement(name, shown="its name")
        if isinstance(node, FrozenSet | Set):
            # Protocol 2 writes sets as calls; torch accepts no form of a frozenset.
            if isinstance(node, FrozenSet):
                self.note(visit.path, "frozenset", f"set, {pluralize(len(node.items), 'element')}")
            editor.changed[ref] = editor.new_call("__builtin__", "set", (editor.sequence(node.items),))
        elif isinstance(node, bytes | ByteArray):
            data = node if isinstance(node, bytes) else node.data
            encoded = new_bytes(editor, editor.add(data.decode("latin-1")))
            if isinstance(node, ByteArray):
                encoded = editor.new_call("builtins", "bytearray", (editor.add(encoded),))
            editor.changed[ref] = encoded
        elif isinstance(node, str):
            if ref in self.not_utf8 and ref not in editor.changed:
                text = node.encode("utf-8", "surrogateescape").decode("latin-1")
                return Replacement(text, shown="str, read as Latin-1")
        elif type(node) is int and abs(node) >= LARGEST:
            return Replacement(hex(node), shown=f"str, an integer of {node.bit_length():,} bits in hexadecimal")
        elif isinstance(node, Persistent):
            is_new = ref >= len(self.checkpoint.graph.nodes)
            return None if is_new or self.reader.storage(ref) is not None else UNKNOWN
        elif isinstance(node, Buffer | Extension):
            return UNKNOWN
        return None

    def _call(self, visit: Located, node: Call) -> RuleResult:
        """Make an object plain. It stays if torch accepts it, otherwise the first rule that applies decides."""
        editor = self.editor
        function = called_name(editor, node.func)
        if function in RENAMED:
            module, name = RENAMED[function]
            node = Call(op.REDUCE, editor.named(module, name), node.args).filled(node.items, node.pairs, node.states)
            if f"{module}.{name}" != function:
                self.note(visit.path, function, f"{module}.{name}")
            editor.changed[visit.ref] = node
            function = f"{module}.{name}"
        case = Case(editor, visit.ref, node, self.storages)
        if function == _FROM_TYPE:
            return self._from_type(visit, case)
        backend = backend_arguments(function)
        if backend == FROM_STORAGE and len(case.args) > _DENSE_ARGUMENTS:
            dense = editor.named("torch._utils", "_rebuild_tensor_v2")
            return Replacement(Call(op.REDUCE, dense, editor.add(case.args[:_DENSE_ARGUMENTS])), shown="plain tensor")
        held = self._kind(case.args[0]) if case.args else ""
        if backend == FROM_VALUES and held not in ("", "unknown"):
            if function == _FROM_CPU:
                return None
            made = Call(op.REDUCE, editor.named(*_FROM_CPU.rsplit(".", 1)), node.args)
            return Replacement(made, shown=f"{_FROM_CPU}, of the tensor in it")
        if backend == FROM_VALUES:
            made_of_array = device_tensor(case)
            self.converted |= {case.args[0]} if isinstance(made_of_array, Replacement) else set()
            return made_of_array
        if function in self.names and type(editor.node(node.func)) is Global:
            return self._allowed(case, node)
        if is_module(case):
            state_dict = state_dict_of(case, self.reader)
            if self.as_state_dict and not isinstance(state_dict, str):
                self.state_dicts.append(visit.path)
                return state_dict
            (self.packed if isinstance(state_dict, str) else self.modules).append(visit.path)
            return UNKNOWN
        kind = self._kind(visit.ref)
        if kind in ("nested", "jagged", "unknown") and not case.name.startswith("pandas."):
            return UNKNOWN  # pandas has functions that make objects of the arrays in their arguments
        if kind not in ("", "unknown") and held not in ("", "unknown"):
            # Old files wrap tensors: Variable(data), Parameter(data).
            return Replacement(editor.node(case.args[0]), shown="the tensor in it")
        if (result := by_name(case)) is not None:
            return result
        module, _, last = case.name.partition(".")
        if case.name == "" or (module in ACTING and not (module == "builtins" and last[:1].isupper())):
            return UNKNOWN  # builtins with capital letters are exceptions, which are only data
        # No rule knows the result of other numpy functions.
        return UNKNOWN if case.name.startswith("numpy.") and not case.is_class else any_class(case)

    def _kind(self, ref: Ref) -> str:
        tensor = self.reader.tensor(ref) if ref < len(self.checkpoint.graph.nodes) else None
        return tensor.kind if tensor is not None else ""

    def _from_type(self, visit: Located, case: Case) -> RuleResult:
        """Replace a tensor of a subclass that torch does not know by a plain one; its attributes are lost."""
        if len(case.args) < 4:
            return UNKNOWN
        func, cls = self.editor.node(case.args[0]), self.editor.node(case.args[1])
        if not isinstance(func, Global) or mapped_name(func) not in self.names:
            return UNKNOWN
        if isinstance(cls, Global) and mapped_name(cls) in self.names:
            return None
        if mapped_name(func) == "torch._utils._rebuild_wrapper_subclass":
            return UNKNOWN
        name = mapped_name(cls) if isinstance(cls, Global) else "a subclass"
        if name.partition(".")[0] in QUANTIZERS or case.args[3] in self._owners:
            return UNKNOWN
        self.note(visit.path, name, "plain tensor; its attributes are left out")
        return Replacement(Call(op.REDUCE, case.args[0], case.args[2]), shown=None)

    def _allowed(self, case: Case, node: Call) -> RuleResult:
        """Convert a call that torch allows to a form that it accepts; UNKNOWN if that is impossible."""
        if node.op not in (op.REDUCE, op.NEWOBJ):
            if node.kwargs >= 0 and self.editor.node(node.kwargs) is not None:
                return UNKNOWN
            reduced = Call(op.REDUCE, node.func, node.args).filled(node.items, node.pairs, node.states)
            self.editor.changed[case.ref] = reduced
        if node.items or (node.pairs and case.name not in ("collections.OrderedDict", "collections.Counter")):
            return UNKNOWN
        return None

    def _rename_storage_classes(self) -> None:
        """Rename storage classes that torch does not list; only the name of the class matters to torch."""
        graph = self.checkpoint.graph
        for ref, node in enumerate(graph.nodes):
            if type(node) is not Persistent or self.reader.storage(ref) is None:
                continue
            pid = graph.nodes[node.pid]
            cls = graph.nodes[pid[1]] if type(pid) is tuple else None
            if type(pid) is not tuple or not isinstance(cls, Global) or (name := mapped_name(cls)) in self.names:
                continue
            new = RENAMED.get(name) or (("torch", cls.name) if cls.name in BY_STORAGE else None)
            if new is not None:
                self.editor.changed[node.pid] = (pid[0], self.editor.named(*new), *pid[2:])
                self.note("", name, ".".join(new))

    def _check_keys(self, visit: Located, keys: Keys) -> None:
        """Drop entries whose keys cannot be hashed any more or became equal; make a set with such members a list."""
        node = self.editor.node(visit.ref)
        if isinstance(node, Call) and called_name(self.editor, node.func) == "builtins.set":
            args = list_items(self.editor.node(node.args))
            members = list_items(self.editor.node(args[0])) if args else ()
            hashable = all(keys.hashable(member) for member in members)
            if not hashable or keys.duplicates(members):
                self.editor.changed[visit.ref] = List(list(members))
                why = "some of its members are equal now" if hashable else "its members can no longer be hashed"
                self.note(visit.path, "set", f"list, {why}")
            return
        if not isinstance(node, Dict | Call):
            return
        names, values = node.pairs[::2], node.pairs[1::2]
        bad = {index: "a key that cannot be hashed" for index, key in enumerate(names) if not keys.hashable(key)}
        bad = bad or dict.fromkeys(keys.duplicates(names), "a key that equals another one now")
        if bad:
            pairs = [part for index, pair in enumerate(zip(names, values)) if index not in bad for part in pair]
            kept = Dict(pairs) if isinstance(node, Dict) else node.filled(node.items, pairs, node.states)
            self.editor.changed[visit.ref] = kept
            self.bad_keys += ((visit.path, why) for why in bad.values())

    def _below(self, visit: Located) -> list[Located]:
        node = self.editor.node(visit.ref)
        path = visit.path if len(visit.path) <= LIMITS.path_chars else visit.path[: LIMITS.path_chars] + "..."
        if isinstance(node, tuple | List | Set | FrozenSet):
            items = node if isinstance(node, tuple) else node.items
            return [Located(ref, f"{path}[{number}]") for number, ref in enumerate(items)]
        if isinstance(node, Dict):
            self._hashed.append(visit)
            return self._entries(path, node.pairs)
        if isinstance(node, Call):
            if node.pairs or called_name(self.editor, node.func) == "builtins.set":
                self._hashed.append(visit)
            return self._in_call(node, path)
        return [Located(ref, path) for ref in node.states] if isinstance(node, Instance) else []

    def _in_call(self, node: Call, path: str) -> list[Located]:
        nodes = self.checkpoint.graph.nodes
        states = [Located(state, path) for state in node.states]
        given = pair_list(self.checkpoint.graph, node) if max(node.args, node.func) < len(nodes) else None
        if given:
            # OrderedDict([[key, value], ...]): the lists are only notation, and have no path.
            pairs = [part for pair in given for part in list_items(nodes[pair])]
            return self._entries(path, [*pairs, *node.pairs]) + states
        # The function and the class of a tensor are names that torch checks, not objects.
        skip = 2 if called_name(self.editor, node.func) == _FROM_TYPE else 0
        visits = [Located(ref, path) for ref in list_items(self.editor.node(node.args))[skip:]]
        return visits + self._entries(path, node.pairs) + states

    def _entries(self, path: str, pairs: Sequence[Ref]) -> list[Located]:
        visits = []
        graph = self.checkpoint.graph
        for number, (key, value) in enumerate(zip(pairs[::2], pairs[1::2])):
            name = self.editor.node(key)
            if type(name) is not str or graph.style.forms.get(key) in PYTHON2_STRINGS:
                visits.append(Located(key, path))
            if type(name) is str:
                visits.append(Located(value, spell_key(path, name)))
            else:
                text = key_text(graph, key) if key < len(graph.nodes) else ""
                visits.append(Located(value, f"{path}[{text or f'#{number}'}]"))
        return visits


# -- trials


def options_that_work(checkpoint: Checkpoint) -> tuple[str, ...] | None:
    """Return the flags of ``sanitize`` that make plain ``torch.load(path)`` accept it, or None if none do."""
    stopped = any(problem.blocks_edits or problem.ambiguous for problem in checkpoint.container.problems)
    if stopped or len(checkpoint.graph.nodes) > 100_000:  # a trial takes as long as the edit
        return None
    modules = bool(checkpoint.survey.modules)
    for drop_unknown in (False, True):
        with suppress(CkptoolError):
            sanitize(checkpoint, as_state_dict=modules, drop_unknown=drop_unknown)
            flags = {"as_state_dict": modules, "drop_unknown": drop_unknown}
            return tuple(name for name, wanted in flags.items() if wanted)
    return None


def loadable(checkpoint: Checkpoint) -> bool:
    """Return whether ``torch.load(weights_only=True)`` accepts the objects in a checkpoint."""
    return not checkpoint.pickled or not weights_only(checkpoint, storage_flaws(checkpoint)).blockers


def loadable_step(checkpoint: Checkpoint, more: Sequence[Step] = (), extension: str = "") -> AnyStep:
    """Return the command after which plain ``torch.load(path)`` works without a GPU, or "", with ``more`` settings."""
    options = options_that_work(checkpoint)
    if options is None:
        return ""
    path, moved = checkpoint.path, away(checkpoint)
    output = suggested_output(path, "loadable.cpu" if moved else "loadable", extension)
    if not (moved or more):
        return command("sanitize", path, output=output, steps=map(Step, options))
    cpu = [Step("to", "cpu")] if moved else []
    return command("edit", path, output=output, steps=[*map(Step, ("sanitize", *options)), *cpu, *more])
