"""Objects of any class: what they hold, without what they are."""

from __future__ import annotations

from typing import Final

from ...base.text import counted, listed
from ...checkpoint.objects import elements, mapping
from ...pickles import opcodes as op
from ...pickles.nodes import Call, Dict, List, Node, Ref
from .case import UNKNOWN, Case, Plain, Verdict

_SCALARS: Final = (bool, int, float, str)
#: What has no value yet, so that nothing says what it is.
_UNMADE: Final = frozenset(f"torch.nn.parameter.Uninitialized{name}" for name in ("Parameter", "Buffer", "TensorMixin"))
_SEQUENCES: Final = ("torch.return_types.", "time.struct_time")


def _omegaconf(case: Case) -> Verdict:
    """DictConfig and ListConfig keep their entries in ``_content``, each value in a node of its own as ``_val``."""
    if not case.name.startswith("omegaconf."):
        return None
    content, value = case.attribute("_content"), case.attribute("_val")
    if content >= 0:
        held = case.current(content)
        items = mapping(case.graph, content)
        if items is not None:
            return Plain(case.dict_of(items), f"dict, {counted(len(items), 'entry')}")
        if isinstance(held, List):
            return Plain(List(list(held.items)), f"list, {counted(len(held.items), 'element')}")
        return Plain(held, type(held).__name__) if held is None or isinstance(held, str) else UNKNOWN
    if value >= 0:
        held = case.current(value)
        if isinstance(held, Call):
            held = held.filled(held.items, held.pairs, held.states)
        return Plain(held, "")
    return None


def of_class(case: Case) -> Verdict:
    """An object of an unknown class: the mapping, list or scalar that it is, or its attributes as a dict."""
    node = case.node
    if case.name in _UNMADE:
        return UNKNOWN
    if case.base >= 0:
        return _based(case)
    state = case.state()
    if state is None:
        return _odd_state(case)
    given = mapping(case.graph, case.keywords) if 0 <= case.keywords < len(case.graph.nodes) else None
    if given:
        nodes = case.graph.nodes
        there = {nodes[key] for key, _ in state if isinstance(nodes[key], str)}
        state = [(key, value) for key, value in given if nodes[key] not in there] + state
    if node.pairs:
        return _mapping(case, list(zip(node.pairs[::2], node.pairs[1::2])), state)
    if node.items:
        lost = f"; its attributes are left out: {len(state)}" if state else ""
        return Plain(List(list(node.items)), f"list, {counted(len(node.items), 'element')}{lost}")
    if case.args:
        return _with_arguments(case, state)
    if not (case.is_class or node.states):
        # A function without arguments: what it gives is not in the file.
        return UNKNOWN
    return Plain(case.dict_of(state), f"dict, {counted(len(state), 'entry')}")


def _mapping(case: Case, pairs: list[tuple[Ref, Ref]], state: list[tuple[Ref, Ref]]) -> Plain:
    """A dict of another class. Many keep their entries as attributes a second time; what is not there twice comes."""
    nodes = case.graph.nodes
    there = {nodes[key] for key, _ in pairs if isinstance(nodes[key], str)}
    extra = [(key, value) for key, value in state if nodes[key] not in there]
    # yacs keeps books in ``__immutable__`` and the like, addict in ``__frozen``.
    more = [(key, value) for key, value in extra if not _bookkeeping(nodes[key])]
    words = f"dict, {counted(len(pairs) + len(more), 'entry')}"
    words += f", {len(more):,} of them attributes" if more else ""
    lost = [str(nodes[key]) for key, _ in extra if _bookkeeping(nodes[key])]
    return Plain(case.dict_of(pairs + more), words + (f"; left out: {listed(lost)}" if lost else ""))


def _bookkeeping(name: Node) -> bool:
    return isinstance(name, str) and name.startswith("__")


def _with_arguments(case: Case, state: list[tuple[Ref, Ref]]) -> Verdict:
    """A named tuple, an enumeration member, a subclass of a builtin type: the arguments say what it is."""
    last = case.name.rpartition(".")[2]
    if not (case.is_class or last[:1].isupper() or case.name.startswith(_SEQUENCES)):
        return UNKNOWN  # a function: what it gives is not in the file
    if state:
        words = f"dict, {counted(len(state), 'entry')}"
        if any(case.graph.nodes[key] == "args" for key, _ in state):
            return Plain(case.dict_of(state), f"{words}; its arguments are left out")
        args = (case.rewrite.constant("args"), case.rewrite.add(tuple(case.args)))
        return Plain(case.dict_of([*state, args]), f"{words}, and its arguments as args")
    first = case.current(case.args[0])
    if len(case.args) == 1 and type(first) in _SCALARS:
        assert isinstance(first, bool | int | float | str)
        return Plain(first, type(first).__name__)
    # A single tuple is the value of a subclass of tuple. A class that is called is an enumeration, an exception, a
    # subclass of set: of these the argument is the value. Named tuples come with their fields as arguments.
    # torch.return_types.max and time.struct_time have (values, values without a place).
    alone = len(case.args) == 1 or (len(case.args) == 2 and case.name.startswith(_SEQUENCES))
    if alone and type(first) is tuple:
        return Plain(first, f"tuple, {counted(len(first), 'element')}")
    if alone and isinstance(first, List) and case.node.op == op.REDUCE:
        return Plain(first, f"list, {counted(len(first.items), 'element')}")
    if alone and isinstance(first, Dict) and case.node.op == op.REDUCE:
        return Plain(first, f"dict, {counted(len(first.pairs) // 2, 'entry')}")
    return Plain(tuple(case.args), f"tuple, {counted(len(case.args), 'element')}")


def _odd_state(case: Case) -> Verdict:
    """A state that is no mapping: the values of slots, in order."""
    state = case.current(case.node.states[-1])
    called_class = case.name.rpartition(".")[2][:1].isupper()
    if len(case.node.states) > 1 or case.args or not (case.is_class or called_class):
        return UNKNOWN
    items = elements(state)
    # A tuple, because frozen dataclasses stand in sets and as keys.
    return Plain(items, f"tuple, {counted(len(items), 'element')}") if items else UNKNOWN


def _based(case: Case) -> Verdict:
    """``copyreg._reconstructor(cls, dict, {...})``: the value of the builtin base."""
    state = case.state()
    held = case.current(case.base)
    items = mapping(case.graph, case.base) if case.base < len(case.graph.nodes) else None
    if state is None:
        return UNKNOWN
    if items is not None:
        return _mapping(case, items, state)
    if isinstance(held, List):
        return Plain(List(list(held.items)), f"list, {counted(len(held.items), 'element')}")
    if type(held) in _SCALARS or type(held) is tuple:
        return Plain(held, type(held).__name__)
    return UNKNOWN


CLASS_RULES: Final = (_omegaconf,)
