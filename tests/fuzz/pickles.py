"""Mutations of a pickle: of what it means (terms) and of how it is spelled (opcodes, in opcodes)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from .opcodes import pickled
from .terms import Term, const, dumps, glob, loads, mapping, sequence, walk


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _pairs_of(text: str) -> tuple[tuple[str, str], ...]:
    """Globals as pairs of module and name."""
    return tuple((module, name) for module, _, name in (word.partition(":") for word in text.split()))


_INTS = (-1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 64, 255, 256, 65535, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 32, 1 << 40)
_HUGE = ((1 << 61), (1 << 63) - 1, 1 << 63, -(1 << 63), (1 << 64) - 1, 1 << 100)
_STRINGS = (
    *("", "0", "1", "cpu", "cuda:0", "cuda", "meta", "mps", "cuda:-1", "cuda:99", "module.", "storage", "00"),
    *("\u00e9", "\u212a", "a.b", "weight", "archive", "\x00", "x" * 300, "\ud800", "FloatStorage", "hpu:1", "CPU"),
    *("cpu:0", "cpu:1", "xyz", "module.module."),
)
_STORAGES = _words(
    """
    FloatStorage DoubleStorage HalfStorage BFloat16Storage LongStorage IntStorage ShortStorage CharStorage
    ByteStorage BoolStorage ComplexFloatStorage ComplexDoubleStorage QInt8Storage QUInt8Storage QInt32Storage
    UntypedStorage storage.UntypedStorage cuda.FloatStorage
    """
)
_DTYPES = _words(
    """
    float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 qint8 quint8 qint32
    float8_e4m3fn float8_e5m2 uint16 uint32 uint64 per_tensor_affine per_channel_affine strided sparse_coo
    sparse_csr contiguous_format float4_e2m1fn_x2 int4
    """
)
_REBUILDS = _words(
    """
    _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_parameter_with_state
    _rebuild_qtensor _rebuild_sparse_tensor _rebuild_meta_tensor_no_storage _rebuild_nested_tensor
    _rebuild_sparse_csr_tensor _rebuild_wrapper_subclass _rebuild_device_tensor_from_numpy
    _rebuild_device_tensor_from_cpu_tensor
    """
)


_LISTED = _pairs_of(
    """
    collections:OrderedDict collections:Counter collections:defaultdict builtins:set builtins:frozenset
    builtins:bytearray builtins:complex builtins:dict builtins:list builtins:tuple builtins:int builtins:float
    builtins:str builtins:slice builtins:range torch:Size torch:device torch:Tensor
    torch.nn.parameter:Parameter torch.nn.parameter:Buffer torch.storage:UntypedStorage
    torch.storage:TypedStorage torch.serialization:_get_layout torch._tensor:_rebuild_from_type_v2
    torch.jit._pickle:build_tensor_from_id torch:Generator _codecs:encode copyreg:_reconstructor
    builtins:object torch:_utils torch.random:Generator torch.distributed.tensor:DTensor numpy:dtype
    numpy.core.multiarray:_reconstruct numpy.core.multiarray:scalar datetime:datetime pathlib:PosixPath
    argparse:Namespace __builtin__:set torch._C:_VariableFunctions torch.backends.cuda:SDPAParams
    """
)
#: What a hostile file names. Nothing of this is ever called: the sandbox stops the process before.
_DANGEROUS = _pairs_of(
    """
    os:system posix:system builtins:eval builtins:exec subprocess:Popen subprocess:check_output
    builtins:__import__ importlib:import_module runpy:_run_code webbrowser:open shutil:rmtree
    socket:create_connection builtins:compile os:remove ctypes:CDLL pty:spawn timeit:timeit code:interact
    pdb:run cProfile:run builtins:open io:open torch.storage:_load_from_bytes torch:load pickle:loads
    _pickle:loads nt:system __builtin__:eval operator:attrgetter types:FunctionType torch.hub:load
    torch.jit:load numpy:load numpy.testing._private.utils:runstring logging.config:_resolve
    multiprocessing.util:spawnv_passfds os:popen os:execv builtins:breakpoint builtins:getattr builtins:setattr
    functools:reduce
    """
)
#: What calls another function that it is given.
_CALLERS = _pairs_of(
    """
    builtins:map builtins:filter functools:partial operator:methodcaller pkgutil:resolve_name builtins:sorted
    itertools:starmap functools:partialmethod builtins:max collections:defaultdict itertools:accumulate
    functools:reduce threading:Timer weakref:finalize concurrent.futures.thread:ThreadPoolExecutor
    builtins:property contextlib:ExitStack
    """
)
#: An argument with which none of them would do harm, were one ever called.
_COMMAND = "true"


def mutated_pickle(data: bytes, chance: random.Random) -> bytes:
    """A pickle after one mutation: mostly of its terms, sometimes of its opcodes. What follows it is kept."""
    if chance.random() < 0.2:
        return pickled(data, chance)
    try:
        root, end = loads(data)
        protocol = data[1] if data[:1] == b"\x80" else 0
        if chance.random() < 0.07:
            protocol = chance.choice((0, 1, 2, 3, 4, 5))
        for _ in range(chance.choice((1, 1, 1, 2))):
            root = _changed(root, chance)
        return dumps(root, protocol) + data[end:]
    except (ValueError, RecursionError):
        return pickled(data, chance)


def _changed(root: Term, chance: random.Random) -> Term:
    terms = walk(root)
    ways: list[Callable[[list[Term], random.Random], None]] = [
        *(_other_constant, _other_constant, _other_type, _arguments, _arguments, _numbers, _numbers, _storage_id),
        *(_storage_id, _pairs, _pairs, _ordered, _build, _other_global, _other_rebuild, _dangerous, _alias, _wrapped),
        *(_new_entry, _apart),
    ]
    holder = Term("tuple", [root])
    chance.choice(ways)([holder, *terms], chance)
    return holder.args[0]


def _pick(terms: list[Term], chance: random.Random, *ops: str) -> Term | None:
    found = [term for term in terms[1:] if term.op in ops]
    return chance.choice(found) if found else None


def _slots(terms: list[Term]) -> list[tuple[list[Term], int]]:
    """Every place that holds a term."""
    return [
        (items, at)
        for term in terms
        for items in (term.args, *(items for _, items in term.effects))
        for at in range(len(items))
    ]


def _value(chance: random.Random) -> Term:
    """A value of any kind."""
    numbers = _consts(*(chance.choice(_INTS) for _ in range(chance.randrange(4))))
    made: tuple[Term, ...] = (
        *_consts(*(chance.choice(_INTS + _HUGE) for _ in range(3))),
        *_consts(*(chance.choice(_STRINGS) for _ in range(2))),
        const(chance.choice((None, True, False))),
        const(chance.choice((0.0, -0.0, 1.5, float("nan"), float("inf"), 1e300))),
        const(chance.choice((b"", b"a", b"\xff", b"0"))),
        _tuple(*numbers),
        sequence(chance.choice(("list", "set", "frozenset")), numbers),
        mapping(_consts("a", 1)),
        glob("torch", chance.choice(_DTYPES)),
        Term("text", value=chance.choice((b"a", b"", b"\xff\xfe", b"module.x", b"\xc3\xa9"))),
    )
    if chance.randrange(14) == 0:
        return _call(*chance.choice(_LISTED), *(_value(chance) for _ in range(chance.randrange(3))))
    return chance.choice(made)


def _other_constant(terms: list[Term], chance: random.Random) -> None:
    term = _pick(terms, chance, "const", "text")
    if term is None:
        return
    value = term.value
    if isinstance(value, bool) or value is None:
        term.value = chance.choice((True, False, None, 0, 1))
    elif isinstance(value, int):
        term.value = chance.choice((value + 1, value - 1, -value, value * 2, *_INTS, *_HUGE))
    elif isinstance(value, str):
        others = [t.value for t in terms if t.op == "const" and isinstance(t.value, str)]
        term.value = chance.choice((*_STRINGS, value.upper(), value + "x", "module." + value, *others[:30]))
    elif isinstance(value, float):
        term.value = chance.choice((0.0, -0.0, float("nan"), float("inf"), -1.0, 1e300))
    else:
        term.value = chance.choice((b"", b"\xff", value + b"\x80", value[:1]))


def _other_type(terms: list[Term], chance: random.Random) -> None:
    items, at = chance.choice(_slots(terms))
    value = items[at].value if items[at].op == "const" else None
    if isinstance(value, str) and chance.random() < 0.6:
        raw = value.encode("utf-8", "surrogatepass")
        twins = [const(raw), Term("text", value=raw), sequence("tuple", [const(value)])]
        items[at] = chance.choice([*twins, const(int(value))] if value.isdecimal() and value.isascii() else twins)
    elif isinstance(value, int) and chance.random() < 0.6:
        wide = abs(value) < 1 << 60
        items[at] = const(chance.choice((str(value), float(value) if wide else 0.5, bool(value), None)))
    else:
        items[at] = _value(chance)


def _arguments(terms: list[Term], chance: random.Random) -> None:
    """One argument more, one less, two of them exchanged."""
    calls = [term for term in terms[1:] if term.op in ("reduce", "newobj") and term.args[1].op == "tuple"]
    calls += [Term("reduce", [term, term]) for term in terms[1:] if term.op == "tuple" and chance.random() < 0.2]
    if not calls:
        return
    args = chance.choice(calls).args[1].args
    way = chance.randrange(5)
    at = chance.randrange(len(args) + 1)
    if way == 0 and args:
        del args[min(at, len(args) - 1)]
    elif way == 1:
        args.insert(at, _value(chance))
    elif way == 2 and len(args) > 1:
        other = chance.randrange(len(args))
        at = min(at, len(args) - 1)
        args[at], args[other] = args[other], args[at]
    elif way == 3:
        args.append(chance.choice((const(None), mapping([]), const(True))))
    elif args:
        args[min(at, len(args) - 1)] = _value(chance)


def _numbers(terms: list[Term], chance: random.Random) -> None:
    """Sizes, strides, offsets: tuples of numbers that say something else."""
    found = [
        term for term in terms[1:] if term.op == "tuple" and term.args and all(type(a.value) is int for a in term.args)
    ]
    if not found:
        return
    args = chance.choice(found).args
    at = chance.randrange(len(args))
    way = chance.randrange(6)
    if way == 0:
        del args[at]
    elif way == 1:
        args.insert(at, const(chance.choice((0, 1, 2, -1))))
    elif way == 2:
        args.reverse()
    elif way == 3:
        args[at] = const(chance.choice((float(args[at].value % 1000), True, None, str(args[at].value))))
    else:
        args[at] = const(chance.choice((args[at].value + 1, max(args[at].value - 1, 0), *_INTS, *_HUGE)))


def _storage_id(terms: list[Term], chance: random.Random) -> None:
    pid = _pick(terms, chance, "pid")
    if pid is None or pid.args[0].op != "tuple" or len(pid.args[0].args) < 5:
        return
    args = pid.args[0].args = list(pid.args[0].args)
    others = [t.args[0].args for t in terms if t.op == "pid" and t.args[0].op == "tuple" and len(t.args[0].args) >= 5]
    way = chance.randrange(11)
    if way == 0:
        args[0] = chance.choice((const("module"), const(b"storage"), Term("text", value=b"storage"), const("Storage")))
    elif way in (1, 2):
        args[1] = glob("torch", chance.choice(_STORAGES))
    elif way in (3, 4):
        args[2] = chance.choice(others)[2]
    elif way == 5:
        key = args[2].value
        number = int(key) if isinstance(key, str) and key.isdecimal() and key.isascii() else 0
        raw = str(key).encode("utf-8", "replace")
        others_of_key = _consts(number, raw, "0" + str(key), "../0", str(key) + "/", float(number))
        args[2] = chance.choice((*others_of_key, Term("text", value=raw)))
    elif way == 6:
        args[3] = chance.choice((*_consts(*_STRINGS, None, 0, b"cpu"), Term("text", value=b"cpu")))
    elif way in (7, 8):
        numel = args[4].value if type(args[4].value) is int else 0
        near = (numel + 1, max(numel - 1, 0), numel * 2, -1, float(numel % 1000), True, None)
        args[4] = const(chance.choice((*near, *_HUGE)))
    elif way == 9:
        args.append(chance.choice((*_consts(None, 0), _tuple(*_consts("1", 0, 1)))))
    else:
        del args[chance.randrange(len(args))]


def _dicts(terms: list[Term]) -> list[list[Term]]:
    return [items for term in terms[1:] for kind, items in term.effects if kind == "setitems" and len(items) > 1]


def _pairs(terms: list[Term], chance: random.Random) -> None:
    """Keys twice, keys of other types, pairs in another order."""
    found = _dicts(terms)
    if not found:
        return
    items = chance.choice(found)
    at = 2 * chance.randrange(len(items) // 2)
    other = 2 * chance.randrange(len(items) // 2)
    key = items[at].value
    way = chance.randrange(8)
    if way == 0:
        items[other] = items[at]
    elif way == 1:
        items += [items[at], items[other + 1]]
    elif way == 2:
        items[at:at] = [_copy(items[at]), items[other + 1]]
    elif way == 3:
        items[at], items[other] = items[other], items[at]
    elif way == 4:
        items[at] = _value(chance)
    elif way == 5 and isinstance(key, str):
        raw = key.encode("utf-8", "surrogatepass")
        twin = chance.choice((const(raw), Term("text", value=raw), sequence("tuple", [const(key)])))
        items += [twin, items[other + 1]]
    elif way == 6:
        number = chance.choice((0, 1))
        items += [const(number), items[at + 1]]
        items += [const(chance.choice((str(number), float(number), bool(number)))), items[other + 1]]
    else:
        del items[at : at + 2]


def _copy(term: Term) -> Term:
    found = Term(term.op, list(term.args), term.value)
    found.effects = [(kind, list(items)) for kind, items in term.effects]
    return found


def _ordered(terms: list[Term], chance: random.Random) -> None:
    """A mapping of another class, or made in another way."""
    found = [term for term in terms[1:] if any(kind == "setitems" for kind, _ in term.effects)]
    if not found:
        return
    term = chance.choice(found)
    pairs = [item for kind, items in term.effects if kind == "setitems" for item in items]
    cls = glob(*chance.choice(_LISTED[:3] + _LISTED[7:8]))
    kind = chance.choice(("tuple", "list"))
    listed = sequence("list", [sequence(kind, pairs[at : at + 2]) for at in range(0, len(pairs) - 1, 2)])
    rest = [effect for effect in term.effects if effect[0] != "setitems"]
    way = chance.randrange(6)
    term.effects = rest if way < 3 else term.effects
    term.op = ("reduce", "reduce", "newobj", "newobj", "reduce", "obj")[way]
    given = (_tuple(listed), _tuple(mapping(pairs)), _tuple(listed), Term("tuple"), _tuple(mapping(pairs[:2])))
    term.args = [cls, given[way]] if way < 5 else [cls]


def _build(terms: list[Term], chance: random.Random) -> None:
    term = chance.choice(terms[1:])
    tensors = [t for t in terms[1:] if t.op == "reduce" and t is not term]
    states = [mapping(_consts("x", 1)), mapping([]), const(None), _value(chance), sequence("list", _consts(1))]
    states.append(mapping([const("data"), chance.choice(tensors) if tensors else const(1)]))
    states.append(_tuple(const(None), mapping(_consts("requires_grad", True))))
    states.append(_tuple(mapping(_consts("a", 1)), const(None)))
    states += [chance.choice(tensors)] if tensors else []
    effect = ("build", [chance.choice(states)])
    if chance.random() < 0.2:
        effect = ("appends", [_value(chance)])
    elif chance.random() < 0.2:
        effect = ("setitems", [const("new"), _value(chance)])
    term.effects.insert(chance.randrange(len(term.effects) + 1), effect)


def _other_global(terms: list[Term], chance: random.Random) -> None:
    term = _pick(terms, chance, "global")
    if term is None:
        return
    module, name = term.value
    near = [(module, chance.choice(_REBUILDS)), ("torch", chance.choice(_STORAGES)), ("torch", chance.choice(_DTYPES))]
    near += [
        (module + ".x", name),
        (module, name + ".x"),
        (module.upper(), name),
        ("torch", name),
        (module, name + " "),
    ]
    term.value = chance.choice((*near, *_LISTED))


def _tuple(*items: Term) -> Term:
    return sequence("tuple", list(items))


def _call(module: str, function: str, *args: Term) -> Term:
    return Term("reduce", [glob(module, function), _tuple(*args)])


def _consts(*values: Any) -> list[Term]:
    return [const(value) for value in values]


def _other_rebuild(terms: list[Term], chance: random.Random) -> None:
    """A tensor made by another function, or what another function is given."""
    found = [
        t for t in terms[1:] if t.op == "reduce" and t.args[0].op == "global" and "rebuild" in str(t.args[0].value[1])
    ]
    if not found:
        return
    term = chance.choice(found)
    inner = _copy(term)
    inner.effects = []
    args = inner.args[1].args
    utils = "torch._utils"
    no_hooks = _call("collections", "OrderedDict")
    dtype = glob("torch", chance.choice(_DTYPES))
    shape, strides = _tuple(*_consts(2, 2)), _tuple(*_consts(2, 1))
    tag = mapping(_consts("tag", 1))
    way = chance.randrange(10)
    if way == 0:
        new = _call(utils, "_rebuild_parameter", inner, const(True), no_hooks)
    elif way == 1:
        state = chance.choice((tag, const(None), _tuple(mapping([]), mapping([]))))
        grad = const(chance.choice((True, False, 1)))
        new = _call(utils, "_rebuild_parameter_with_state", inner, grad, no_hooks, state)
    elif way == 2:
        new = _call(utils, "_rebuild_meta_tensor_no_storage", dtype, shape, strides, const(False))
    elif way == 3:
        state = chance.choice((mapping([]), tag, glob("torch", chance.choice(("Tensor", "float32")))))
        function = glob(utils, "_rebuild_tensor_v2")
        new = _call("torch._tensor", "_rebuild_from_type_v2", function, glob("torch", "Tensor"), inner.args[1], state)
    elif way == 4:
        named = const(chance.choice(("torch.sparse_coo", "torch.sparse_csr", "torch.strided", "x")))
        layout = _call("torch.serialization", "_get_layout", named)
        new = _call(utils, "_rebuild_sparse_tensor", layout, _tuple(inner, inner, shape, const(True)))
    elif way == 5 and args:
        new = _call(utils, "_rebuild_tensor_v3", *args[:6], dtype, *args[6:])
    elif way == 6 and args:
        new = _call(utils, "_rebuild_tensor", *args[:4])
    elif way == 7 and args:
        numbers = _consts(chance.choice((0.5, 1, None)), chance.choice((0, 3, 1.5)))
        scheme = _tuple(glob("torch", "per_tensor_affine"), *numbers)
        new = _call(utils, "_rebuild_qtensor", *args[:4], scheme, const(False), no_hooks)
    elif way == 8 and args:
        flags = [mapping(_consts(*pair)) for pair in (("conj", True), ("neg", 1), ("x", 1))]
        new = _call(utils, "_rebuild_tensor_v2", *args[:6], chance.choice((*_consts(None, True), *flags)))
    else:
        new = Term("reduce", [glob(utils, chance.choice(_REBUILDS)), inner.args[1]])
    term.op, term.args, term.value = new.op, new.args, new.value


def _dangerous(terms: list[Term], chance: random.Random) -> None:
    items, at = chance.choice(_slots(terms))
    named = chance.choice(_DANGEROUS)
    function, argument, caller = glob(*named), const(_COMMAND), chance.choice(_CALLERS)
    way = chance.randrange(9)
    if way <= 1:
        new = _call(*named, argument)
    elif way == 2:
        new = chance.choice((Term("newobj", [function, _tuple(argument)]), Term("obj", [function, argument])))
    elif way == 3:
        inner = _call(*caller, function, sequence("list", [argument]))
        new = _call("builtins", chance.choice(("list", "set", "sum", "tuple", "dict")), inner)
    elif way == 4:
        new = Term("reduce", [_call(*caller, function, argument), Term("tuple")])
    elif way == 5:
        new = _copy(items[at])
        new.effects += [("build", [mapping([const("__setstate__"), function])]), ("build", [argument])]
    elif way == 6:
        new = _call("collections", "defaultdict", function)
    elif way == 7:
        inner = _call("pkgutil", "resolve_name", const(":".join(named)))
        new = Term("reduce", [inner, _tuple(argument)])
    else:
        new = function
    if chance.random() < 0.3:  # made and thrown away, or beside what was there
        new = sequence("list", [items[at], new])
    items[at] = new


def _alias(terms: list[Term], chance: random.Random) -> None:
    """One object at two places."""
    slots = _slots(terms)
    items, at = chance.choice(slots)
    other, there = chance.choice(slots)
    if items[at] not in walk(other[there]):
        items[at] = other[there]


def _apart(terms: list[Term], chance: random.Random) -> None:
    """Two objects where there was one."""
    items, at = chance.choice(_slots(terms))
    items[at] = _copy(items[at])


def _wrapped(terms: list[Term], chance: random.Random) -> None:
    items, at = chance.choice(_slots(terms))
    inner = items[at]
    twice, within = sequence("list", [inner, inner]), mapping([const("in"), inner])
    items[at] = chance.choice((_tuple(inner), twice, within, _call(*chance.choice(_LISTED), inner)))


def _new_entry(terms: list[Term], chance: random.Random) -> None:
    found = _dicts(terms)
    if not found:
        return
    key = const(chance.choice(("new", "module.new", "optimizer", "state_dict", 0, b"b", "a.b", 'a"b', "a[0]", "")))
    items = chance.choice(found)
    at = 2 * chance.randrange(len(items) // 2 + 1)
    items[at:at] = [key, _value(chance)]
