"""Mutations of a pickle: of what it means (terms) and of how it is spelled (opcodes, in opcodes)."""

from __future__ import annotations

import random
from collections.abc import Callable

from .opcodes import pickled
from .terms import Term, const, dumps, glob, loads, mapping, sequence, walk

__all__ = ["mutated_pickle"]


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
    way = chance.randrange(14)
    if way < 3:
        return const(chance.choice(_INTS + _HUGE))
    if way < 5:
        return const(chance.choice(_STRINGS))
    if way == 5:
        return const(chance.choice((None, True, False)))
    if way == 6:
        return const(chance.choice((0.0, -0.0, 1.5, float("nan"), float("inf"), 1e300)))
    if way == 7:
        return const(chance.choice((b"", b"a", b"\xff", b"0")))
    if way == 8:
        return sequence("tuple", [const(chance.choice(_INTS)) for _ in range(chance.randrange(4))])
    if way == 9:
        kind = chance.choice(("list", "set", "frozenset"))
        return sequence(kind, [const(chance.choice(_INTS)) for _ in range(chance.randrange(3))])
    if way == 10:
        return mapping([const("a"), const(1)])
    if way == 11:
        return glob("torch", chance.choice(_DTYPES))
    if way == 12:
        return Term("text", value=chance.choice((b"a", b"", b"\xff\xfe", b"module.x", b"\xc3\xa9")))
    function = glob(*chance.choice(_LISTED))
    return Term("reduce", [function, sequence("tuple", [_value(chance) for _ in range(chance.randrange(3))])])


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
        twins = (
            const(number),
            Term("text", value=str(key).encode("utf-8", "replace")),
            const(str(key).encode("utf-8", "replace")),
        )
        args[2] = chance.choice(
            (*twins, const("0" + str(key)), const("../0"), const(str(key) + "/"), const(float(number)))
        )
    elif way == 6:
        args[3] = chance.choice(
            (*map(const, _STRINGS), const(None), const(0), const(b"cpu"), Term("text", value=b"cpu"))
        )
    elif way in (7, 8):
        numel = args[4].value if type(args[4].value) is int else 0
        args[4] = const(
            chance.choice((numel + 1, max(numel - 1, 0), numel * 2, -1, float(numel % 1000), True, None, *_HUGE))
        )
    elif way == 9:
        args.append(chance.choice((const(None), sequence("tuple", [const("1"), const(0), const(1)]), const(0))))
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
    listed = sequence(
        "list", [sequence(chance.choice(("tuple", "list")), pairs[at : at + 2]) for at in range(0, len(pairs) - 1, 2)]
    )
    rest = [effect for effect in term.effects if effect[0] != "setitems"]
    way = chance.randrange(6)
    term.effects = rest if way < 3 else term.effects
    if way == 0:
        term.op, term.args = "reduce", [cls, sequence("tuple", [listed])]
    elif way == 1:
        term.op, term.args = "reduce", [cls, sequence("tuple", [mapping(pairs)])]
    elif way == 2:
        term.op, term.args = "newobj", [cls, sequence("tuple", [listed])]
    elif way == 3:
        term.op, term.args = "newobj", [cls, Term("tuple")]
    elif way == 4:
        term.op, term.args = "reduce", [cls, sequence("tuple", [mapping(pairs[:2])])]
    else:
        term.op, term.args = "obj", [cls]


def _build(terms: list[Term], chance: random.Random) -> None:
    term = chance.choice(terms[1:])
    tensors = [t for t in terms[1:] if t.op == "reduce" and t is not term]
    states = [
        mapping([const("x"), const(1)]),
        mapping([const("data"), chance.choice(tensors) if tensors else const(1)]),
        mapping([]),
        sequence("tuple", [const(None), mapping([const("requires_grad"), const(True)])]),
        sequence("tuple", [mapping([const("a"), const(1)]), const(None)]),
        const(None),
        _value(chance),
        sequence("list", [const(1)]),
    ]
    if tensors:
        states.append(chance.choice(tensors))
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
    no_hooks = Term("reduce", [glob("collections", "OrderedDict"), Term("tuple")])
    dtype = glob("torch", chance.choice(_DTYPES))
    numbers = [sequence("tuple", [const(n) for n in (2, 2)]), sequence("tuple", [const(n) for n in (2, 1)])]
    utils = "torch._utils"
    way = chance.randrange(10)
    if way == 0:
        new = Term("reduce", [glob(utils, "_rebuild_parameter"), sequence("tuple", [inner, const(True), no_hooks])])
    elif way == 1:
        state = chance.choice(
            (mapping([const("tag"), const(1)]), const(None), sequence("tuple", [mapping([]), mapping([])]))
        )
        args = [inner, const(chance.choice((True, False, 1))), no_hooks, state]
        new = Term("reduce", [glob(utils, "_rebuild_parameter_with_state"), sequence("tuple", args)])
    elif way == 2:
        args = [dtype, *numbers, const(False)]
        new = Term("reduce", [glob(utils, "_rebuild_meta_tensor_no_storage"), sequence("tuple", args)])
    elif way == 3:
        args = [glob("torch", chance.choice(("Tensor", "float32"))), dtype, numbers[0], inner]
        new = Term(
            "reduce",
            [
                glob("torch._tensor", "_rebuild_from_type_v2"),
                sequence(
                    "tuple",
                    [
                        glob(utils, "_rebuild_tensor_v2"),
                        glob("torch", "Tensor"),
                        inner.args[1],
                        chance.choice((mapping([]), mapping([const("tag"), const(1)]), args[0])),
                    ],
                ),
            ],
        )
    elif way == 4:
        layout = Term(
            "reduce",
            [
                glob("torch.serialization", "_get_layout"),
                sequence(
                    "tuple", [const(chance.choice(("torch.sparse_coo", "torch.sparse_csr", "torch.strided", "x")))]
                ),
            ],
        )
        new = Term(
            "reduce",
            [
                glob(utils, "_rebuild_sparse_tensor"),
                sequence("tuple", [layout, sequence("tuple", [inner, inner, numbers[0], const(True)])]),
            ],
        )
    elif way == 5 and inner.args[1].args:
        new = Term(
            "reduce",
            [
                glob(utils, "_rebuild_tensor_v3"),
                sequence("tuple", [*inner.args[1].args[:6], dtype, *inner.args[1].args[6:]]),
            ],
        )
    elif way == 6 and inner.args[1].args:
        new = Term("reduce", [glob(utils, "_rebuild_tensor"), sequence("tuple", inner.args[1].args[:4])])
    elif way == 7 and inner.args[1].args:
        scheme = sequence(
            "tuple",
            [
                glob("torch", "per_tensor_affine"),
                const(chance.choice((0.5, 1, None))),
                const(chance.choice((0, 3, 1.5))),
            ],
        )
        new = Term(
            "reduce",
            [
                glob(utils, "_rebuild_qtensor"),
                sequence("tuple", [*inner.args[1].args[:4], scheme, const(False), no_hooks]),
            ],
        )
    elif way == 8 and inner.args[1].args:
        extra = chance.choice(
            (
                const(None),
                mapping([const("conj"), const(True)]),
                mapping([const("neg"), const(1)]),
                mapping([const("x"), const(1)]),
                const(True),
            )
        )
        new = Term("reduce", [glob(utils, "_rebuild_tensor_v2"), sequence("tuple", [*inner.args[1].args[:6], extra])])
    else:
        new = Term("reduce", [glob(utils, chance.choice(_REBUILDS)), inner.args[1]])
    term.op, term.args, term.value = new.op, new.args, new.value


def _dangerous(terms: list[Term], chance: random.Random) -> None:
    items, at = chance.choice(_slots(terms))
    function = glob(*chance.choice(_DANGEROUS))
    argument = const(_COMMAND)
    caller = glob(*chance.choice(_CALLERS))
    way = chance.randrange(9)
    if way <= 1:
        new = Term("reduce", [function, sequence("tuple", [argument])])
    elif way == 2:
        new = Term(chance.choice(("newobj", "obj")), [function, sequence("tuple", [argument])])
        if new.op == "obj":
            new.args = [function, argument]
    elif way == 3:
        inner = Term("reduce", [caller, sequence("tuple", [function, sequence("list", [argument])])])
        new = Term(
            "reduce",
            [glob("builtins", chance.choice(("list", "set", "sum", "tuple", "dict"))), sequence("tuple", [inner])],
        )
    elif way == 4:
        inner = Term("reduce", [caller, sequence("tuple", [function, argument])])
        new = Term("reduce", [inner, Term("tuple")])
    elif way == 5:
        new = _copy(items[at])
        new.effects.append(("build", [mapping([const("__setstate__"), function])]))
        new.effects.append(("build", [argument]))
    elif way == 6:
        new = Term("reduce", [glob("collections", "defaultdict"), sequence("tuple", [function])])
    elif way == 7:
        target = f"{function.value[0]}:{function.value[1]}"
        inner = Term("reduce", [glob("pkgutil", "resolve_name"), sequence("tuple", [const(target)])])
        new = Term("reduce", [inner, sequence("tuple", [argument])])
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
    items[at] = chance.choice(
        (
            sequence("tuple", [inner]),
            sequence("list", [inner, inner]),
            mapping([const("in"), inner]),
            Term("reduce", [glob(*chance.choice(_LISTED)), sequence("tuple", [inner])]),
        )
    )


def _new_entry(terms: list[Term], chance: random.Random) -> None:
    found = _dicts(terms)
    if not found:
        return
    key = const(chance.choice(("new", "module.new", "optimizer", "state_dict", 0, b"b", "a.b", 'a"b', "a[0]", "")))
    items = chance.choice(found)
    at = 2 * chance.randrange(len(items) // 2 + 1)
    items[at:at] = [key, _value(chance)]
