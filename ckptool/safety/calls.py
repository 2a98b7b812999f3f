"""Calls that do not belong in a checkpoint, and run when it is loaded without weights_only."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import Final

from ..base.limits import LIMITS
from ..base.records import NamedTuple
from ..base.standard_library import STANDARD_LIBRARY
from ..base.text import cut, words
from ..checkpoint.objects import mapped_name
from ..pickles.nodes import Call, Dict, Extension, FrozenSet, Global, Graph, List, Node, Ref, Set, children
from ..pickles.opcodes import NEWOBJ
from .rules import table
from .torch_lists import NEWEST, allowed

#: The lists of names in ``calls.json``, which says what each holds. They decide how severely a call is reported, and
#: never make a call harmless: every global that is not on torch's list is reported in any case.
_LISTS: Final = table("calls")
_ACTING_MEMBERS: Final = {name: words(text) for name, text in _LISTS.pop("members").items() if name != "about"}
_NAMES: Final = {name: words(" ".join(part["names"])) for name, part in _LISTS.items()}
_MODULES, _BUILTINS, _FUNCTIONS = _NAMES["modules"], _NAMES["builtins"], _NAMES["functions"]
#: Python modules in which every public function is harmless, unless ``_FUNCTIONS`` names it. All functions of Python,
#: torch and NumPy are known: one that none of the following lists names is not harmless.
_HARMLESS, _TYPES, _REBUILDING = _NAMES["harmless"], _NAMES["types"], _NAMES["rebuilding"]
_TORCH, _NUMPY, _WAYS_OUT = _NAMES["torch"], _NAMES["numpy"], _NAMES["ways_out"]
_CONTAINERS, _MAKING, _SHARED, _WITH_MORE = (_NAMES[name] for name in ("containers", "making", "shared", "with_more"))
_KEEPING: Final = _CONTAINERS | _NAMES["keeping"]
_CALLED_ATTRIBUTES, _TELLING, _METHODS_OF = _NAMES["called_attributes"], _NAMES["telling"], _NAMES["methods_of"]
_ANYWHERE: Final = _NAMES["anywhere"] | {
    last for name in _FUNCTIONS if (last := name.rpartition(".")[2]).lstrip("_")[:1].isupper()
}
#: Number of components in the longest name in these lists.
_DEEPEST: Final = max(name.count(".") + 1 for name in _MODULES | _FUNCTIONS)
#: The function by which cloudpickle writes a Python class by name and then calls it; common in fastai files.
_TYPE_LOOKUP: Final = "cloudpickle.cloudpickle._builtin_type"


def acts(name: str) -> bool:
    """Return whether a function acts on the machine, or takes a function or name that it may call."""
    module, _, function = name.rpartition(".")
    if module == "builtins":
        return function in _BUILTINS
    if name in _FUNCTIONS:
        return True
    # Check the package and its submodules: os.path, or STACK_GLOBAL's os with path.join.__globals__.
    parts = module.split(".", _DEEPEST)
    for end in range(1, min(len(parts), _DEEPEST) + 1):
        root = ".".join(parts[:end])
        if root in _MODULES:
            members = _ACTING_MEMBERS.get(root)
            return members is None or (end == len(parts) and function in members)
    return False


def _acts_within(path: str) -> bool:
    """Return whether a dotted name leads into another module, as ``_os.remove`` in ``argparse`` does."""
    parts = [part.lstrip("_") for part in path.split(".")]
    # Limit each slice to the length of the longest listed name plus one part, which shows that a name is longer. Every
    # part of a megabyte of dots is checked, but not the whole remainder each time.
    return any(acts(".".join(parts[at : at + _DEEPEST + 2])) for at in range(len(parts) - 1))


def _runs(name: str) -> bool:
    """Return whether this is a function of Python, torch or NumPy that no library uses to rebuild a pickled object.

    Functions of other packages count if their name suggests that they run something.
    """
    module, _, last = name.rpartition(".")
    package = module.partition(".")[0]
    if package not in _KNOWN:
        return last in _TELLING
    if name in _REBUILDING or not last.lstrip("_")[:1].islower():
        return False
    if package == "numpy":
        return last not in _NUMPY and not last.startswith("__")
    if package == "torch":
        if name in _LISTED or (last.startswith("_rebuild") and not _is_method(module)):
            return False
        harmless = module in _TORCH and module != "torch._utils"
        return not harmless or last.startswith("_") or _is_method(module)
    if package == "builtins":
        return module != package or last not in _TYPES
    return module not in _HARMLESS or (last.startswith("_") and module != "_codecs")


def _is_method(module: str) -> bool:
    """Return whether the "module" of a function ends in a class, such as ``torch.UntypedStorage`` for ``from_file``."""
    return any(part.lstrip("_")[:1].isupper() for part in module.split("."))


#: The effects of a global: it acts wherever it is passed, it runs when it is called, or it looks up a class.
ACTS, RUNS, LOOKS_UP = "acts", "runs", "looks up"


def effect_of(module: str, name: str) -> str:
    """Return the effect of a global, one of the three above, or ""."""
    full = mapped_name(Global(module, name))
    leads_out = not _WAYS_OUT.isdisjoint(name.split("."))  # function.__globals__ and the like
    if acts(full) or leads_out or ("." in name and _acts_within(name)):
        return ACTS
    if name in _ANYWHERE and full.partition(".")[0] in _KNOWN:
        return ACTS
    return RUNS if _runs(full) else LOOKS_UP if full == _TYPE_LOOKUP else ""


_LISTED: Final = allowed(NEWEST)
_KNOWN: Final = STANDARD_LIBRARY | {"torch", "numpy"}


class SuspiciousCall(NamedTuple):
    """A call as a reader would write it, and whether it is known to act on the machine.

    Other suspicious calls use a function that no object needs, and whose effect is unknown.
    """

    text: str
    acts: bool


def suspicious_calls(graph: Graph) -> list[str]:
    """Return the suspicious calls as a reader would write them, ``posix.system('echo')``, in pickle order.

    These include calls with an acting function in an argument, container or state, such as ``map(posix.system, ...)``,
    and changes to a module, class or function, such as ``setattr(torch.serialization, 'load', ...)``.
    """
    return [call.text for call in _found(graph)]


def has_acting_call(graph: Graph) -> bool:
    """Return whether any of the suspicious calls is known to act."""
    return any(call.acts for call in _found(graph))


def _found(graph: Graph) -> list[SuspiciousCall]:
    found: list[SuspiciousCall] | None = graph.cache.get((_SUSPICIOUS, graph.root))
    if found is None:
        found = graph.cache[_SUSPICIOUS, graph.root] = _suspicious_calls(graph)
    return found


_SUSPICIOUS: Final = "suspicious calls"


def _suspicious_calls(graph: Graph) -> list[SuspiciousCall]:
    nodes = graph.nodes
    doing, running, lookups, with_more, keeping, shared = (set[Ref]() for _ in range(6))
    by_effect = {ACTS: (doing,), RUNS: (running,), LOOKS_UP: (lookups,)}
    kinds: dict[tuple[str, str], tuple[set[Ref], ...]] = {}  # a million globals may share one name
    for ref, node in graph.of_type(Global):
        spelling = (node.module, node.name)
        sets = kinds.get(spelling)
        if sets is None:
            full = mapped_name(node)
            more = ((_WITH_MORE, with_more), (_KEEPING, keeping), (_SHARED, shared))
            sets = by_effect.get(effect_of(*spelling), ()) + tuple(refs for some, refs in more if full in some)
            kinds[spelling] = sets
        for refs in sets:
            refs.add(ref)
    calls = list(graph.of_type(Call))
    names = {ref: _name_of(nodes[ref]) for ref in doing} | _extensions(graph, calls) | _attributes(graph, calls)
    shared |= lookups
    # Calls of the result of another call: (the call, the other call, the function of the other call).
    results = [(ref, node.func, inner.func) for ref, node in calls if type(inner := nodes[node.func]) is Call]
    changed = {ref for ref, node in graph.of_type(Global) if _is_changed(graph, node)}
    changed |= {ref for ref, node in calls if node.func in shared and _is_changed(graph, node)}
    if not (names or running or results or changed or with_more):
        return []
    called = {node.func for _, node in calls}
    harmless = {ref for ref, node in calls if node.func in names and _is_harmless(graph, ref, node, names, called)}
    acting = {ref for ref, node in calls if node.func in names and ref not in harmless}
    suspects = {ref for ref, node in calls if node.func in running and node.op != NEWOBJ}
    suspects |= {ref for ref, node in calls if node.func in with_more and _count(graph, node) > 1}
    # A function that receives another function may call it.
    suspects |= {
        ref
        for ref, node in calls
        if running and node.op != NEWOBJ and node.func not in keeping and not running.isdisjoint(_first(graph, node))
    }
    # The result of another call is unknown, unless it is a class that was looked up by name.
    suspects |= {ref for ref, result, func in results if result not in harmless and func not in lookups}
    acting |= changed | _recipients(graph, names, acting | suspects, harmless)
    suspects |= acting
    found = [SuspiciousCall(_call_text(graph, nodes[ref], names), ref in acting) for ref in _listed(suspects)]
    others = len(suspects) - len(found)
    return [*found, SuspiciousCall(f"{others:,} more calls", bool(acting))] if others else found


def _listed(suspects: Collection[Ref]) -> list[Ref]:
    return sorted(suspects)[: LIMITS.listed]


def _count(graph: Graph, node: Call) -> int:
    """Return the number of arguments, or 2 if it is unknown."""
    args = graph.nodes[node.args]
    return len(args) if type(args) is tuple else 2


def _first(graph: Graph, node: Call) -> Sequence[Ref]:
    """Return the first two arguments of a call."""
    args = graph.nodes[node.args]
    return args[:2] if type(args) is tuple else ()


def _extensions(graph: Graph, calls: Sequence[tuple[Ref, Call]]) -> dict[Ref, str]:
    """Return the copyreg extension codes that are called, with their names.

    A pickle may register a function (``copyreg.add_extension``) and then call it by its code.
    """
    codes = {ref: node.code for ref, node in graph.of_type(Extension)}
    if not codes:
        return {}
    known: dict[int, str] = {}
    for _, call in calls:
        func, args = graph.nodes[call.func], graph.nodes[call.args]
        if isinstance(func, Global) and mapped_name(func) == "copyreg.add_extension" and type(args) is tuple:
            values = [graph.nodes[ref] for ref in args]
            if len(values) == 3 and type(values[2]) is int:
                known[values[2]] = f"{_plain(values[0])}.{_plain(values[1])}"
    called = {call.func for _, call in calls}
    return {ref: known.get(code, f"copyreg extension {code}") for ref, code in codes.items() if ref in called}


def _plain(node: Node) -> str:
    return node if isinstance(node, str) else "?"


def _attributes(graph: Graph, calls: Sequence[tuple[Ref, Call]]) -> dict[Ref, str]:
    """Return the functions that BUILD makes methods of an object which the unpickler then calls."""
    nodes, found = graph.nodes, dict[Ref, str]()
    for _, call in calls:
        if call.filling is None:
            continue
        for state in call.states if call.items or len(call.states) > 1 else ():
            part = nodes[state]
            for attributes in map(nodes.__getitem__, part if type(part) is tuple else (state,)):
                if not isinstance(attributes, Dict):
                    continue
                for key, value in zip(attributes.pairs[::2], attributes.pairs[1::2], strict=False):
                    if nodes[key] in _CALLED_ATTRIBUTES and isinstance(nodes[value], Global | Call):
                        found[value] = _name_of(nodes[value])
    return found


def _name_of(node: Node) -> str:
    return mapped_name(node) if isinstance(node, Global) else "..."


def _is_changed(graph: Graph, node: Global | Call) -> bool:
    """Return whether a pickle changes an existing object: an attribute of a module or class, an item of a
    list or dict.
    """
    if node.filling is None:
        return False
    states = (graph.nodes[state] for state in node.states)
    filled = any(not isinstance(state, Dict) or state.pairs for state in states if state is not None)
    return bool(node.items or node.pairs or filled)


def _call_text(graph: Graph, node: Node, names: Mapping[Ref, str]) -> str:
    """Write a call, or a change of an existing module, class or other object, as Python code."""
    if isinstance(node, Call):
        text = f"{_callee(graph, node, names)}({_arguments(graph, node)})"
        func = graph.nodes[node.func]
        is_shared = isinstance(func, Global) and mapped_name(func) in _SHARED
        return _change_text(graph, node, text) if is_shared else text
    return _change_text(graph, node, mapped_name(node)) if isinstance(node, Global) else ""


def _change_text(graph: Graph, node: Global | Call, name: str) -> str:
    values = graph.nodes
    if node.items:
        return f"{name}.append({cut(_spelled(values[node.items[0]]), 80)})"
    if node.pairs:
        return f"{name}[{cut(_spelled(values[node.pairs[0]]), 80)}] = {cut(_spelled(values[node.pairs[1]]), 80)}"
    for state in node.states:
        part = values[state]
        for attributes in map(values.__getitem__, part if type(part) is tuple else (state,)):
            if isinstance(attributes, Dict) and attributes.pairs:
                key, value = (values[ref] for ref in attributes.pairs[:2])
                return f"setattr({name}, {cut(_spelled(key), 80)}, {cut(_spelled(value), 80)})"
    return f"setattr({name}, ...)"


def _callee(graph: Graph, node: Call, names: Mapping[Ref, str]) -> str:
    """Write the function of a call as Python code: a name, or the result of another call."""
    if node.func in names:
        return names[node.func]
    func = graph.nodes[node.func]
    if not isinstance(func, Call):
        return mapped_name(func) if isinstance(func, Global) else type(func).__name__.lower()
    if type(graph.nodes[func.func]) is not Global:
        return "..."
    return _call_text(graph, func, names)


def _recipients(
    graph: Graph, acting: Collection[Ref], suspects: Collection[Ref], harmless: Collection[Ref]
) -> set[Ref]:
    """Return the calls and classes that receive an acting global, directly or inside other objects.

    ``harmless`` calls pass nothing on.
    """
    nodes = graph.nodes
    seen, work = set(acting), list(acting)
    if all(seen.isdisjoint(_members(node)) for node in nodes):
        return set()
    seen.update(harmless)
    holders: dict[Ref, list[Ref]] = {}
    for ref, node in enumerate(nodes):
        for child in _members(node):
            holders.setdefault(child, []).append(ref)
    recipients: set[Ref] = set()
    while work:
        for ref in holders.get(work.pop(), ()):
            if ref in seen:
                continue
            seen.add(ref)
            work.append(ref)
            node = nodes[ref]
            if isinstance(node, Call) and ref not in suspects:
                func = nodes[node.func]
                if not (isinstance(func, Global) and mapped_name(func) in _CONTAINERS):
                    recipients.add(ref)
            elif isinstance(node, Global) and node.filling is not None:
                recipients.add(ref)  # BUILD on a class: its objects call its __setstate__
    return recipients


def _members(node: Node) -> Sequence[Ref]:
    """Return the references in a node, without a call's function, which is already checked."""
    if type(node) is tuple:  # there may be a million tuples and calls
        return node
    if type(node) is Call and node.filling is None and node.kwargs < 0:
        return (node.args,)
    if isinstance(node, Call):
        return [part for part in children(node) if part != node.func]
    return children(node) if isinstance(node, (List, Dict, Set, FrozenSet, Global)) else ()


#: Members of classes that torch and Python pickle themselves; protocol 2 writes ``getattr(outer, name)``, which runs
#: nothing. (outer class, name): ``ShardedTensor.__getstate__`` in torch/distributed/_shard/sharded_tensor/api.py.
_NESTED: Final = frozenset(
    (f"torch.distributed.{module}.ShardedTensor", "ProcessGroupState")
    for module in ("_shard.sharded_tensor.api", "_sharded_tensor.api")
) | {("zoneinfo.ZoneInfo", "_unpickle")}


def _is_harmless(graph: Graph, ref: Ref, node: Call, names: Mapping[Ref, str], called: Container[Ref]) -> bool:
    """Return whether the arguments of an acting function show that the call runs nothing."""
    func = names[node.func]
    if func == "builtins.getattr":
        return _looks_up_member(graph, ref, node, names, called)
    args = [graph.nodes[arg] for arg in _first(graph, node)]
    if func in ("operator.getitem", "_operator.getitem"):
        # Optional[int] is pickled as getitem(Union, ...).
        return ref not in called and isinstance(args[0], Global) and args[0].module == "typing" if args else False
    if func in ("functools.reduce", "_functools.reduce"):
        # int | str is pickled as reduce(or_, (int, str)).
        is_or = len(args) == 2 and isinstance(args[0], Global) and args[0].name == "or_"
        return is_or and type(args[1]) is tuple and names.keys().isdisjoint(args[1]) and ref not in called
    if func == "cloudpickle.cloudpickle.subimport":
        # A function pickled by cloudpickle names the modules that it uses.
        return len(args) == 1 and isinstance(args[0], str) and not acts(f"{args[0]}.function") and node.filling is None
    return func == "torch.storage._load_from_bytes" and node.filling is None and _loads_cleanly(graph, node)


def _looks_up_member(graph: Graph, ref: Ref, node: Call, names: Container[Ref], called: Container[Ref]) -> bool:
    """Return whether ``getattr(Class, 'name')`` names a torch class, or a method or nested class that nothing calls.

    Python pickles methods and nested classes this way. If the result is called, or something is called with it, the
    call must be judged separately.
    """
    args = graph.nodes[node.args]
    if type(args) is not tuple or len(args) != 2:
        return False
    owner, name = graph.nodes[args[0]], graph.nodes[args[1]]
    if type(name) is not str or not name.isidentifier() or name.startswith("__") or node.filling is not None:
        return False
    if type(owner) is not Global:
        return ref not in called and _is_plain_object(graph, owner, names)
    full = mapped_name(owner)
    if (full, name) in _NESTED:
        return True
    if args[0] in names:
        return False
    if full in _METHODS_OF:
        return ref not in called
    # Modules and functions are lower case, so a capitalised name is a class, or at least named like one.
    if full.partition(".")[0] == "builtins" or not _looks_like_class(owner):
        return False
    # Creating an object of a nested class runs no more than with any other class.
    return ref not in called or name.lstrip("_")[:1].isupper()


def _looks_like_class(node: Global) -> bool:
    return all(word.lstrip("_")[:1].isupper() for word in node.name.split("."))


def _is_plain_object(graph: Graph, node: Node, names: Container[Ref]) -> bool:
    """Return whether a node is a value of a Python type or an object of a class: Python pickles their methods."""
    if isinstance(node, str | bytes | int | float | tuple | List | Dict | Set | FrozenSet):
        return True
    if not isinstance(node, Call) or node.func in names:
        return False
    func = graph.nodes[node.func]
    return isinstance(func, Global) and (_looks_like_class(func) or mapped_name(func) in _MAKING)


def _loads_cleanly(graph: Graph, node: Call) -> bool:
    """Return whether ``torch.load`` finds a torch file in the given bytes, which also runs nothing."""
    from .torch_bytes import is_clean  # imported only for tensors pickled without torch.save

    args = graph.nodes[node.args]
    data = bytes_at(graph, args[0]) if type(args) is tuple and len(args) == 1 else None
    return data is not None and is_clean(data, suspicious_calls)


def bytes_at(graph: Graph, ref: Ref) -> bytes | None:
    """Return the bytes in a node, or None for other nodes; protocols 0 to 2 write bytes as text."""
    node = graph.nodes[ref]
    if isinstance(node, Call) and isinstance(func := graph.nodes[node.func], Global):
        args = [graph.nodes[arg] for arg in _first(graph, node)]
        is_text = mapped_name(func) == "_codecs.encode" and args[1:] in (["latin1"], ["latin-1"])
        node = args[0] if is_text and node.filling is None else None
    if isinstance(node, str):
        try:
            return node.encode("latin-1")
        except UnicodeError:
            return None
    return node if isinstance(node, bytes) else None


def _arguments(graph: Graph, node: Call) -> str:
    refs = graph.nodes[node.args]
    values = [graph.nodes[ref] for ref in refs[:4]] if type(refs) is tuple else []
    return cut(", ".join(cut(_spelled(value), 80) for value in values))


def _spelled(value: Node) -> str:
    if isinstance(value, Global):
        return mapped_name(value)
    return repr(value) if isinstance(value, str | bytes | float | bool) else type(value).__name__
