"""Rules for Python's own types, for objects of any class, and for pickled modules.

A rule takes a ``Case`` and returns a ``RuleResult``. A module becomes the state dict that ``module.state_dict()`` would
return. Sources: ``torch/nn/modules/module.py`` (``state_dict``, ``_save_to_state_dict``), and ``_version`` in torch's
modules.
"""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Final

from ...base.lazy import regex
from ...base.text import join_limited, pluralize
from ...checkpoint.backends import ARRAYS, BUFFERS
from ...checkpoint.objects import COMPILED, list_items, mapped_name, mapping, module_fields, pair_list
from ...checkpoint.tensors import TensorReader
from ...pickles import opcodes as op
from ...pickles.nodes import Call, Dict, Global, List, Ref, Set
from .case import UNKNOWN, Case, Replacement, RuleResult, dict_of, new_bytes, raw_bytes
from .numpy_values import SCALARS, numpy_array, numpy_dtype, numpy_generator, numpy_scalar

#: Modules whose functions act on the machine. Their results are not in the file.
ACTING: Final = ("os", "posix", "nt", "subprocess", "sys", "shutil", "socket", "importlib", "pickle", "builtins")
#: Integers of this size or larger become text, because torch refuses LONG4.
LARGEST: Final = 1 << 2000
#: Names in older and newer torch for functions that torch allows under another name; the arguments are the same.
RENAMED: Final = {
    "torch.UntypedStorage": ("torch.storage", "UntypedStorage"),
    "torch.storage._UntypedStorage": ("torch.storage", "UntypedStorage"),
    "torch._UntypedStorage": ("torch.storage", "UntypedStorage"),
    "torch.nn.Parameter": ("torch.nn.parameter", "Parameter"),
    "torch.tensor._rebuild_from_type_v2": ("torch._tensor", "_rebuild_from_type_v2"),
    "torch._tensor._rebuild_from_type": ("torch._tensor", "_rebuild_from_type_v2"),
    "torch.tensor._rebuild_from_type": ("torch._tensor", "_rebuild_from_type_v2"),
}
_SCALARS: Final = (bool, int, float, str)


def _path(case: Case) -> RuleResult:
    """Replace ``PosixPath('a', 'b')`` by its text; Python 3.13 writes it as ``pathlib._local.PosixPath``."""
    parts = [case.text(number) for number in range(len(case.args))]
    if not case.name.endswith("Path") or None in parts or case.node.states:
        return UNKNOWN if case.name.endswith("Path") else None
    cls = PureWindowsPath if case.name.endswith("WindowsPath") else PurePosixPath
    return Replacement(str(cls(*(part for part in parts if part is not None))))


def _string(text: str | None, note: str = "") -> RuleResult:
    return UNKNOWN if text is None else Replacement(text, note)


def _date(case: Case) -> RuleResult:
    """Replace a date or time by its ISO form; a few bytes hold the fields (CPython, Lib/_pydatetime.py)."""
    raw = raw_bytes(case.editor, case.args[0]) if case.args else None
    zone = _zone_after(case, case.args[1]) if len(case.args) > 1 else ""
    kind: Any = getattr(datetime, case.name.rpartition(".")[2])
    try:
        # Python reads its own bytes without a check of each field; a text is checked.
        text = kind.fromisoformat(kind(raw).isoformat()).isoformat()
    except (TypeError, ValueError):
        return UNKNOWN
    return UNKNOWN if zone is None else Replacement(text + zone)


def _zone_after(case: Case, ref: Ref) -> str | None:
    """Return the time zone after a date: "+02:00", "[Europe/Berlin]" (RFC 9557), "" without one; None if unknown."""
    node = case.current(ref)
    if node is None:
        return ""
    zone = _zone(case.inner(ref, node)) if isinstance(node, Call) else node
    if not isinstance(zone, str):
        return None
    return zone if zone[:1] in ("+", "-") else f"[{zone}]"


def _zone(case: Case) -> str | None:
    if case.name == "datetime.timezone":
        return _offset(case) or None
    if case.name in ("pytz._UTC", "dateutil.tz.tz.tzutc"):
        return "+00:00"
    return case.text(0) if case.name in ("zoneinfo.ZoneInfo._unpickle", "pytz._p") else None


def _offset(case: Case) -> str:
    """Return the offset of ``timezone(timedelta(...))`` as "+02:00", or "" if it is invalid."""
    node = case.current(case.args[0]) if case.args else None
    duration = None
    if isinstance(node, Call):
        duration = _duration(case.inner(case.args[0], node))
    elif type(node) is float and abs(node) < 1e9:
        duration = datetime.timedelta(seconds=node)  # already made plain
    try:
        return "" if duration is None else datetime.time(tzinfo=datetime.timezone(duration)).isoformat()[8:]
    except ValueError:
        return ""


def _duration(case: Case) -> datetime.timedelta | None:
    numbers = [value for ref in case.args if type(value := case.current(ref)) is int]
    if case.name != "datetime.timedelta" or not len(case.args) == len(numbers) == 3:
        return None
    try:
        return datetime.timedelta(*numbers)
    except OverflowError:
        return None


def _seconds(case: Case) -> RuleResult:
    duration = _duration(case)
    return UNKNOWN if duration is None else Replacement(duration.total_seconds(), ", in seconds")


def _dict(case: Case) -> RuleResult:
    given = pair_list(case.graph, case.node) if case.args else []
    if len(case.args) > 1 or given is None:
        return UNKNOWN if given is None else None
    parts = (part for pair in given for part in list_items(case.graph.nodes[pair]))
    return Replacement(Dict([*parts, *case.node.pairs]))


def _sequence(case: Case) -> RuleResult:
    """Replace a list, tuple, deque or frozenset that a call makes of one argument."""
    name, args = case.name.rpartition(".")[2], case.args
    if len(args) > 1 and name != "deque":
        return None
    first = list_items(case.graph.nodes[args[0]]) if args and args[0] < len(case.graph.nodes) else ()
    items = [*first, *case.node.items]
    if name == "frozenset":
        members = case.editor.new_call("__builtin__", "set", (case.editor.sequence(items),))
        return Replacement(members, shown=f"set, {pluralize(len(items), 'element')}")
    if name == "tuple":
        return Replacement(tuple(items))
    return Replacement(List(items), "; its bound is left out" if len(args) > 1 else "")


def _range(case: Case) -> Replacement:
    """Replace a range by the list of its numbers; keep only the bounds of a very long range, and of a slice."""
    bounds = [value for ref in case.args if type(value := case.current(ref)) is int and abs(value) < 1 << 62]
    if case.name == "builtins.range" and len(bounds) == len(case.args) == 3 and bounds[2]:
        numbers = range(*bounds)
        if numbers[:1] == numbers or abs((bounds[1] - bounds[0]) // bounds[2]) <= 100_000:
            return Replacement(List([case.editor.constant(number) for number in numbers]))
    return Replacement(tuple(case.args), shown="tuple of start, stop and step")


def _text(case: Case) -> RuleResult:
    text = case.text(0)
    if case.name == "fractions.Fraction" and len(case.args) == 2:
        parts = [case.current(ref) for ref in case.args]
        if all(type(part) is int and abs(part) < 1 << 1024 for part in parts):
            text = "/".join(map(str, parts))
    lost = case.name == "re._compile" and len(case.args) > 1 and case.current(case.args[1]) != re.UNICODE
    return _string(text, "; its flags are left out" * lost) if case.args else None


def _uuid(case: Case) -> RuleResult:
    ref = case.attribute("int")
    value = case.current(ref) if ref >= 0 else None
    return Replacement(str(uuid.UUID(int=value))) if type(value) is int and 0 <= value < 1 << 128 else UNKNOWN


def _member(case: Case) -> RuleResult:
    """Replace ``getattr(owner, name)`` by its name: Python 3.11 pickles some Enum members so."""
    owner, member = (case.current(case.args[0]), case.text(1)) if len(case.args) == 2 else (None, None)
    return _string(f"{mapped_name(owner)}.{member}" if isinstance(owner, Global) and member is not None else None)


def _partial(case: Case) -> RuleResult:
    state = case.last_state()
    if len(state) < 3:
        return UNKNOWN
    names = [case.editor.constant(name) for name in ("func", "args", "keywords")]
    return Replacement(dict_of(list(zip(names, state[:3]))), shown="dict of func, args and keywords")


def _generator(case: Case) -> RuleResult:
    state = case.last_state()
    shown = "its state, a ByteTensor for set_state"
    return Replacement(case.current(state[2]), shown=shown) if len(state) == 3 else UNKNOWN


def _omegaconf(case: Case) -> RuleResult:
    """Replace DictConfig and ListConfig by their ``_content``, and their value nodes by ``_val``."""
    content, value = case.attribute("_content"), case.attribute("_val")
    if content >= 0:
        node, items = case.current(content), mapping(case.graph, content)
        if items is not None:
            return Replacement(dict_of(items))
        if isinstance(node, List):
            return Replacement(List(list(node.items)))
        return Replacement(node) if node is None or isinstance(node, str) else UNKNOWN
    if value >= 0:
        node = case.current(value)
        copied = node.filled(node.items, node.pairs, node.states) if isinstance(node, Call) else node
        return Replacement(copied, shown=None)
    return None


_RULES: Final[Mapping[str, Callable[[Case], RuleResult]]] = {
    **dict.fromkeys(SCALARS, numpy_scalar),
    **dict.fromkeys((*ARRAYS, *BUFFERS), numpy_array),
    "numpy.dtype": numpy_dtype,
    **dict.fromkeys(("datetime.datetime", "datetime.date", "datetime.time"), _date),
    "datetime.timedelta": _seconds,
    **dict.fromkeys(("datetime.timezone", "zoneinfo.ZoneInfo._unpickle"), lambda case: _string(_zone(case))),
    "collections.defaultdict": lambda case: Replacement(Dict(list(case.node.pairs)), "; its default is left out"),
    **dict.fromkeys(("collections.deque", "builtins.list", "builtins.tuple", "builtins.frozenset"), _sequence),
    "builtins.dict": _dict,
    # Protocol 2 writes empty bytes as a call.
    "builtins.bytes": lambda case: None if case.args else Replacement(new_bytes(case.editor, case.editor.constant(""))),
    **dict.fromkeys(("builtins.range", "builtins.slice"), _range),
    **dict.fromkeys(("decimal.Decimal", "fractions.Fraction", "re._compile"), _text),
    "uuid.UUID": _uuid,
    "builtins.getattr": _member,
    "functools.partial": _partial,
    "torch._C.Generator": _generator,
}
#: Rules for all names that begin so.
_PREFIXES: Final = (("pathlib.", _path), ("omegaconf.", _omegaconf), ("numpy.random.", numpy_generator))


def by_name(case: Case) -> RuleResult:
    """Apply the rule for the name of a class or function; return None without one."""
    prefixes = (rule for begin, rule in _PREFIXES if case.name.startswith(begin))
    rule = _RULES.get(case.name) or next(prefixes, None)
    return rule(case) if rule is not None else None


# -- Objects of any class

#: Functions that make an object of their arguments alone, by the last segment of their names: pandas has
#: ``_unpickle_block``, ``_new_Index`` and ``__pyx_unpickle_NDArrayBacked``.
_FROM_ARGUMENTS: Final = regex(r"unpickle|rebuild|reconstruct|restore|\A_*new_|\A(?:array|count)\Z", re.I)


def any_class(case: Case) -> RuleResult:
    """Replace an object of an unknown class by its mapping, list or scalar, or by a dict of its attributes."""
    node, nodes = case.node, case.graph.nodes
    if case.name.startswith("torch.nn.parameter.Uninitialized"):
        return UNKNOWN  # a placeholder without a value
    if case.base >= 0:
        return _with_base(case)
    state = case.state()
    if state is None:
        return _slot_values(case)
    given = mapping(case.graph, case.keywords) if 0 <= case.keywords < len(nodes) else None
    if given:
        present = case.strings(state)
        state = [(key, value) for key, value in given if nodes[key] not in present] + state
    if node.pairs:
        return _dict_subclass(case, list(zip(node.pairs[::2], node.pairs[1::2])), state)
    if node.items:
        return Replacement(List(list(node.items)), f"; its attributes are left out: {len(state)}" if state else "")
    if case.args:
        return _with_arguments(case, state)
    # A function without arguments has a result that is not in the file.
    return Replacement(dict_of(state)) if case.is_class or node.states else UNKNOWN


def _dict_subclass(case: Case, pairs: Sequence[tuple[Ref, Ref]], state: Sequence[tuple[Ref, Ref]]) -> Replacement:
    """Replace a dict subclass by a dict, adding the attributes that are not also entries."""
    nodes = case.graph.nodes
    present = case.strings(pairs)
    extra = [(key, value) for key, value in state if nodes[key] not in present]
    # Internal attributes: yacs has ``__immutable__`` and others, addict has ``__frozen``.
    internal = {key: name for key, _ in extra if isinstance(name := nodes[key], str) and name.startswith("__")}
    more = [item for item in extra if item[0] not in internal]
    note = f", {len(more):,} of them attributes" if more else ""
    left_out = f"; left out: {join_limited([*internal.values()])}" if internal else ""
    return Replacement(dict_of([*pairs, *more]), note + left_out)


def _with_arguments(case: Case, state: list[tuple[Ref, Ref]]) -> RuleResult:
    """Replace a named tuple, an enumeration member or a subclass of a builtin type by its arguments."""
    last = case.name.rpartition(".")[2]
    sequence = case.name.startswith(("torch.return_types.", "time.struct_time"))
    if not (case.is_class or last[:1].isupper() or sequence or _FROM_ARGUMENTS.search(last)):
        return UNKNOWN  # a function, whose result is not in the file
    if state:
        if any(case.graph.nodes[key] == "args" for key, _ in state):
            return Replacement(dict_of(state), "; its arguments are left out")
        args = (case.editor.constant("args"), case.editor.add(tuple(case.args)))
        return Replacement(dict_of([*state, args]), "; args are its arguments")
    first = case.current(case.args[0])
    if len(case.args) == 1 and type(first) in _SCALARS:
        return Replacement(first)
    # A single tuple argument is the value of a tuple subclass. A class that is called is an enumeration, an exception
    # or a set subclass: its argument is the value. Named tuples have their fields as arguments. torch.return_types.max
    # and time.struct_time have (values, values without an index).
    is_value = type(first) is tuple or (isinstance(first, List | Dict) and case.node.op == op.REDUCE)
    alone = len(case.args) == 1 or (len(case.args) == 2 and sequence)
    return Replacement(first if alone and is_value else tuple(case.args))


def _slot_values(case: Case) -> RuleResult:
    """Replace an object whose state is not a mapping but the values of its slots, in order."""
    last = case.name.rpartition(".")[2]
    made = bool(_FROM_ARGUMENTS.search(last))
    if len(case.node.states) > 1 or (case.args and not made) or not (case.is_class or last[:1].isupper() or made):
        return UNKNOWN
    items = list_items(case.current(case.node.states[-1]))
    items = (*case.args, *items) if items else ()
    # Use a tuple, because frozen dataclasses may be set members and dict keys.
    return Replacement(items) if items else UNKNOWN


def _with_base(case: Case) -> RuleResult:
    """Replace ``copyreg._reconstructor(cls, dict, {...})`` by the value of the builtin base."""
    state = case.state()
    base = case.current(case.base)
    items = mapping(case.graph, case.base) if case.base < len(case.graph.nodes) else None
    if state is None:
        return UNKNOWN
    if items is not None:
        return _dict_subclass(case, items, state)
    return Replacement(base) if isinstance(base, List) or type(base) in (*_SCALARS, tuple) else UNKNOWN


# -- Modules

#: Buffers of norm modules. With a batch counter the version is 2.
_NORM: Final = frozenset(("running_mean", "running_var", "num_batches_tracked"))
#: Torch's own modules whose version is not 1, by the beginning of their names.
_VERSIONS: Final = (
    (("torch.nn.modules.batchnorm.", "torch.nn.modules.instancenorm."), 2),
    (tuple(f"torch.ao.nn.intrinsic.qat.modules.conv_fused.ConvBn{end}" for end in ("1d", "2d", "3d", "ReLU")), 2),
    (
        tuple(
            f"{module}.observer.{name}"
            for module in ("torch.ao.quantization", "torch.quantization")
            for name in ("MinMax", "MovingAverage", "PerChannelMinMax", "Histogram")
        ),
        3,
    ),
)
#: Modules whose state dict also has packed weights, which are not stored as tensors.
_PACKED: Final = (
    *("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.", "torch.ao.nn.sparse.quantized."),
    *("torch.nn.quantized.", "torch.nn.intrinsic.quantized.", "bitsandbytes.nn."),
)


def is_module(case: Case) -> bool:
    """Return whether an object has the attributes of every nn.Module, or is a compiled module."""
    return case.name == COMPILED or bool(module_fields(case.graph, case.node))


def state_dict_of(case: Case, reader: TensorReader) -> RuleResult:
    """Replace a module by its parameters and persistent buffers under their dotted names, with ``_metadata``."""
    entries: list[tuple[str, Ref]] = []
    facts: list[tuple[str, int]] = []
    if not _collect(case, reader, "", entries, facts, set()):
        return UNKNOWN
    editor = case.editor
    pairs = [part for name, ref in entries for part in (editor.add(name), ref)]
    versions = [(path, Dict([editor.constant("version"), editor.constant(version)])) for path, version in facts]
    modules = [part for path, version in versions for part in (editor.add(path), editor.add(version))]
    metadata = editor.new_call("collections", "OrderedDict").filled((), modules, ())
    attributes = Dict([editor.constant("_metadata"), editor.add(metadata)])
    state_dict = editor.new_call("collections", "OrderedDict").filled((), pairs, (editor.add(attributes),))
    words = f"state dict, {pluralize(len(entries), 'tensor')}; other attributes of the module are left out"
    return Replacement(state_dict, shown=words)


def _collect(
    case: Case,
    reader: TensorReader,
    prefix: str,
    entries: list[tuple[str, Ref]],
    versions: list[tuple[str, int]],
    within: set[Ref],
) -> bool:
    """Add the entries and versions of a module and its submodules; return False for another structure.

    ``within`` are the modules around it: a shared module is entered under each name, but never within itself.
    """
    nodes = case.graph.nodes
    parts = case.strings(module_fields(case.graph, case.node))
    compiled = case.name == COMPILED and len(case.args) > 0 and not parts
    if case.ref in within or len(within) > 200 or case.name.startswith(_PACKED) or not (parts or compiled):
        return False
    parameters, buffers, modules = (
        case.strings(mapping(case.graph, parts[part])) if parts else {}
        for part in ("_parameters", "_buffers", "_modules")
    )
    modules = {"_orig_mod": case.args[0]} if compiled else modules
    skipped = {nodes[ref] for ref in _members(case, parts.get("_non_persistent_buffers_set", -1))}
    for name, ref in parameters.items():
        # A state dict holds the tensor of a Parameter.
        node = nodes[ref]
        args = list_items(nodes[node.args]) if isinstance(node, Call) else ()
        if node is not None:
            entries.append((prefix + name, args[0] if args and reader.tensor(args[0]) is not None else ref))
    entries += ((prefix + name, ref) for name, ref in buffers.items() if nodes[ref] is not None and name not in skipped)
    versions.append((prefix.removesuffix("."), _version(case.name, {*buffers})))
    inside = {name: (ref, nodes[ref]) for name, ref in modules.items() if nodes[ref] is not None}
    return all(
        isinstance(node, Call)
        and _collect(case.inner(ref, node), reader, f"{prefix}{name}.", entries, versions, {*within, case.ref})
        for name, (ref, node) in inside.items()
    )


def _members(case: Case, ref: Ref) -> tuple[Ref, ...]:
    node = case.graph.nodes[ref] if ref >= 0 else None
    if isinstance(node, Set):
        return tuple(node.items)
    args = list_items(case.graph.nodes[node.args]) if isinstance(node, Call) else ()
    return list_items(case.graph.nodes[args[0]]) if args else ()


def _version(name: str, buffers: set[str]) -> int:
    """Return the ``_version`` of a class, known for torch's own; otherwise 2 if it counts batches as norms do, or 1."""
    if name.startswith("torch."):
        version = next((number for names, number in _VERSIONS if name.startswith(names)), 1)
        return version if version != 2 or "num_batches_tracked" in buffers or not buffers & _NORM else 1
    return 2 if buffers >= _NORM else 1
