"""Calls that do not belong in a checkpoint, and run when it is loaded without weights_only."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import Final

from ..base.lazy import table
from ..base.limits import LIMITS
from ..base.text import cut, words
from ..checkpoint.objects import mapped_name
from ..pickles.nodes import Call, Dict, Extension, FrozenSet, Global, Graph, List, Node, Ref, Set, children
from ..pickles.opcodes import NEWOBJ
from .torch_lists import NEWEST, allowed

#: The lists of names in ``calls.json``, which says what each holds. They decide how severely a call is reported, and
#: never make a call harmless: every global that is not on torch's list is reported in any case.
_LISTS: Final = table("safety/calls")
_ACTING_MEMBERS: Final = {name: words(text) for name, text in _LISTS.pop("members").items() if name != "about"}
_NAMES: Final = {name: words(" ".join(part["names"])) for name, part in _LISTS.items()}
_MODULES, _BUILTINS, _FUNCTIONS = _NAMES["modules"], _NAMES["builtins"], _NAMES["functions"]
#: Python modules in which every public function is harmless, unless ``_FUNCTIONS`` names it. All functions of Python,
#: torch and NumPy are known: one that none of the following lists names is not harmless.
_HARMLESS, _TYPES, _REBUILDING = _NAMES["harmless"], _NAMES["types"], _NAMES["rebuilding"]
_TORCH, _NUMPY, _WAYS_OUT = _NAMES["torch"], _NAMES["numpy"], _NAMES["ways_out"]
_CONTAINERS, _SHARED, _WITH_MORE = _NAMES["containers"], _NAMES["shared"], _NAMES["with_more"]
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
    return any(map(_is_capitalised, module.split(".")))


#: The effects of a global: it acts wherever it is passed, it runs when it is called, or it looks up a class.
ACTS, RUNS, LOOKS_UP = "acts", "runs", "looks up"


def effect_of(module: str, name: str) -> str:
    """Return the effect of a global, one of the three above, or ""."""
    full = mapped_name(Global(module, name))
    leads_out = not _WAYS_OUT.isdisjoint(name.split("."))  # function.__globals__ and the like
    anywhere = name in _ANYWHERE and full.partition(".")[0] in _KNOWN
    if acts(full) or leads_out or anywhere or ("." in name and _acts_within(name)):
        return ACTS
    return RUNS if _runs(full) else LOOKS_UP if full == _TYPE_LOOKUP else ""


#: The top-level modules of every version of Python.
STANDARD_LIBRARY: Final = words(" ".join(table("safety/standard_library")["names"]))
_LISTED: Final = allowed(NEWEST)
_KNOWN: Final = STANDARD_LIBRARY | {"torch", "numpy"}


def suspicious_calls(graph: Graph) -> list[str]:
    """Return the suspicious calls as a reader would write them, ``posix.system('echo')``, in pickle order.

    These include calls with an acting function in an argument, container or state, such as ``map(posix.system, ...)``,
    and changes to a module, class or function, such as ``setattr(torch.serialization, 'load', ...)``. Their function is
    known to act on the machine, or no object needs it and its effect is unknown.
    """
    return list(_found(graph)[0])


def has_acting_call(graph: Graph) -> bool:
    """Return whether any of the suspicious calls is known to act."""
    return _found(graph)[1]


def _found(graph: Graph) -> tuple[list[str], bool]:
    found: tuple[list[str], bool] | None = graph.cache.get(("suspicious calls", graph.root))
    if found is None:
        found = graph.cache["suspicious calls", graph.root] = _suspicious_calls(graph)
    return found


def _suspicious_calls(graph: Graph) -> tuple[list[str], bool]:
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
    called = {node.func for _, node in calls}
    names = {ref: _name_of(nodes[ref]) for ref in doing} | _attributes(graph, calls)
    names |= {ref: f"copyreg extension {node.code}" for ref, node in graph.of_type(Extension) if ref in called}
    shared |= lookups
    # Calls of the result of another call: (the call, the other call, the function of the other call).
    results = [(ref, node.func, inner.func) for ref, node in calls if type(inner := nodes[node.func]) is Call]
    changed = {ref for ref, node in graph.of_type(Global) if _is_changed(graph, node)}
    changed |= {ref for ref, node in calls if node.func in shared and _is_changed(graph, node)}
    if not (names or running or results or changed or with_more):
        return [], False
    harmless = {ref for ref, node in calls if node.func in names and _is_harmless(graph, ref, node, names, called)}
    acting = {ref for ref, node in calls if node.func in names and ref not in harmless}
    suspects = {ref for ref, node in calls if node.func in running and node.op != NEWOBJ}
    suspects |= {ref for ref, node in calls if node.func in with_more and len(_arguments(graph, node)) != 1}
    # A function that receives another function may call it.
    passing = [(ref, node) for ref, node in calls if running and node.op != NEWOBJ and node.func not in keeping]
    suspects |= {ref for ref, node in passing if not running.isdisjoint(_arguments(graph, node)[:2])}
    # The result of another call is unknown, unless it is a class that was looked up by name.
    suspects |= {ref for ref, result, func in results if result not in harmless and func not in lookups}
    acting |= changed | _recipients(graph, names, acting | suspects, harmless)
    suspects |= acting
    found = [_call_text(graph, nodes[ref], names) for ref in sorted(suspects)[: LIMITS.listed]]
    others = len(suspects) - len(found)
    return found + [f"{others:,} more calls"] * bool(others), bool(acting)


def _arguments(graph: Graph, node: Call) -> Sequence[Ref]:
    args = graph.nodes[node.args]
    return args if type(args) is tuple else ()


def _attributes(graph: Graph, calls: Sequence[tuple[Ref, Call]]) -> dict[Ref, str]:
    """Return the functions that BUILD makes methods of an object which the unpickler then calls."""
    nodes, found = graph.nodes, dict[Ref, str]()
    filled = (call for _, call in calls if call.filling is not None and (call.items or len(call.states) > 1))
    for attributes in (part for call in filled for state in call.states for part in _states(graph, state)):
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
    """Write a call, or a change of an existing module, class or other object, like Python code."""
    text = mapped_name(node) if isinstance(node, Global) else ""
    if isinstance(node, Call):
        func = graph.nodes[node.func]
        name = names.get(node.func) or (mapped_name(func) if isinstance(func, Global) else "")
        if not name:
            inner = isinstance(func, Call) and type(graph.nodes[func.func]) is Global
            name = _call_text(graph, func, names) if inner else "..."
        text = f"{name}({cut(', '.join(_spelled(graph, arg) for arg in _arguments(graph, node)[:4]))})"
        if not (isinstance(func, Global) and mapped_name(func) in _SHARED):
            return text
    if not isinstance(node, Call | Global):
        return text
    states = [part for state in node.states for part in _states(graph, state) if part.pairs]
    if node.items:
        return f"{text}.append({_spelled(graph, node.items[0])})"
    if node.pairs:
        return f"{text}[{_spelled(graph, node.pairs[0])}] = {_spelled(graph, node.pairs[1])}"
    values = ", ".join(_spelled(graph, ref) for ref in states[0].pairs[:2]) if states else "..."
    return f"setattr({text}, {values})"


def _states(graph: Graph, state: Ref) -> list[Dict]:
    """Return the dicts of attributes in a state: itself, or the parts of a tuple."""
    part = graph.nodes[state]
    parts = map(graph.nodes.__getitem__, part) if type(part) is tuple else (part,)
    return [attributes for attributes in parts if isinstance(attributes, Dict)]


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
    args = [graph.nodes[arg] for arg in _arguments(graph, node)[:2]]
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
    # What torch loads from bytes is searched like every value.
    is_bytes = len(args) == 1 and bytes_at(graph, _arguments(graph, node)[0]) is not None
    return func == "torch.storage._load_from_bytes" and node.filling is None and is_bytes


def _looks_up_member(graph: Graph, ref: Ref, node: Call, names: Container[Ref], called: Container[Ref]) -> bool:
    """Return whether ``getattr(Class, 'name')`` names a torch class, or a method or nested class that nothing calls.

    Python pickles methods and nested classes this way. If the result is called, or something is called with it, the
    call must be judged separately.
    """
    args = _arguments(graph, node)
    if len(args) != 2:
        return False
    owner, name = graph.nodes[args[0]], graph.nodes[args[1]]
    if type(name) is not str or not name.isidentifier() or name.startswith("__") or node.filling is not None:
        return False
    if type(owner) is not Global:
        return ref not in called and not (isinstance(owner, Call) and owner.func in names)
    if (mapped_name(owner), name) in _NESTED:
        return True
    # Modules and functions are lower case, so a capitalised name is a class, or at least named like one. Creating an
    # object of a nested class runs no more than with any other class.
    is_class = mapped_name(owner) in _METHODS_OF or (
        all(map(_is_capitalised, owner.name.split("."))) and owner.module != "builtins"
    )
    return is_class and args[0] not in names and (ref not in called or _is_capitalised(name))


def _is_capitalised(word: str) -> bool:
    return word.lstrip("_")[:1].isupper()


def bytes_at(graph: Graph, ref: Ref) -> bytes | None:
    """Return the bytes in a node, or None for other nodes; protocols 0 to 2 write bytes as text."""
    node = graph.nodes[ref]
    if isinstance(node, Call) and isinstance(func := graph.nodes[node.func], Global):
        args = [graph.nodes[arg] for arg in _arguments(graph, node)[:2]]
        is_text = mapped_name(func) == "_codecs.encode" and args[1:] in (["latin1"], ["latin-1"])
        node = args[0] if is_text and node.filling is None else None
    if isinstance(node, str):
        try:
            return node.encode("latin-1")
        except UnicodeError:
            return None
    return node if isinstance(node, bytes) else None


def _spelled(graph: Graph, ref: Ref) -> str:
    value = graph.nodes[ref]
    if isinstance(value, Global):
        return mapped_name(value)
    return cut(repr(value), 80) if isinstance(value, str | bytes | float | bool) else type(value).__name__
