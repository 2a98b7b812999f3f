"""Whole files: what is loadable stays as it is, protocols and containers, what is hostile ends soon."""

from __future__ import annotations

import argparse
import contextlib
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration import loops
from conftest import CHECKPOINTS, FIXTURES, LOADABLE, WHOLE, Fixture, by_name
from naive_sanitize import agrees, sanitized, saved

import ckptool
from ckptool import sanitize
from ckptool.base.errors import CkptoolError
from ckptool.pickles import opcodes as op

Namespace = argparse.Namespace

# -- what is loadable -------------------------------------------------------------------------------------------


def loads(path: Path) -> bool:
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fixture", LOADABLE, ids=by_name)
def test_what_torch_loads_stays_the_same_byte_for_byte(fixture: Fixture, out: Path) -> None:
    if not loads(fixture.path):
        pytest.skip("torch refuses it")
    if fixture.path.name == "nested.pt":
        pytest.skip("torch 2.15 refuses it")
    with ckptool.open(fixture.path) as checkpoint:
        again = sanitize(checkpoint)
        ckptool.save(again, out)
        deflated = any(
            (problem.code, problem.level) == ("deflated", "error") for problem in checkpoint.container.problems
        )
    # Deflated storages are stored plain, or torch.load(mmap=True) would read other values.
    assert (out.read_bytes() == fixture.path.read_bytes()) is not deflated


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fixture", CHECKPOINTS, ids=by_name)
def test_every_fixture_becomes_loadable_or_is_refused(fixture: Fixture, out: Path) -> None:
    try:
        with ckptool.open(fixture.path) as checkpoint:
            ckptool.save(sanitize(checkpoint, as_state_dict=True, drop_unknown=True), out)
    except CkptoolError as error:
        owns = "hold values of tensors" in error.what or "one rank had" in error.next
        assert owns or not loads(fixture.path), error
        return
    assert loads(out)
    with ckptool.open(out) as checkpoint:
        assert not sanitize(checkpoint).edited


def test_a_nested_tensor_is_refused_or_left_out(out: Path) -> None:
    """Torch 2.15 took it off its list; the tensor in it is not what it stands for."""
    path = str(FIXTURES / "nested.pt")
    with pytest.raises(CkptoolError, match=r"ragged .*_rebuild_nested_tensor"):
        sanitize(path)
    with pytest.raises(CkptoolError, match=r": ragged .*they hold values of tensors"):
        sanitize(path, drop_unknown=True)
    ckptool.save(sanitize(ckptool.drop(path, "ragged")), out)
    assert [*torch.load(out, weights_only=True)] == ["w"]


# -- protocols and containers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("protocol", [1, 3, 4, 5])
def test_every_protocol_becomes_2(protocol: int, legacy: bool, tmp_path: Path, out: Path) -> None:
    weight = torch.ones(2)
    value = {"w": weight, "v": weight[1:], "s": {1, (2,)}, "b": b"\x00\xff", "f": frozenset((1,)), "n": Namespace(x=1)}
    result = agrees(saved(tmp_path / "in.pth", value, protocol, legacy), out)
    with ckptool.open(out) as checkpoint:
        assert checkpoint.graph.style.protocol == 2 and not checkpoint.graph.refused
    assert "2" in result.what("") and "pickle protocol" in result.what("")


def test_strings_of_python_2(tmp_path: Path, out: Path) -> None:
    """Names, numbers and arrays as Python 2 wrote them, all of it in byte strings."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR(I1\n(I2\ntcnumpy\ndtype\n(U\x02f4I0\nI1\n"
        b"tR(I3\nU\x01<NNNI-1\nI-1\nI0\ntb\x89U\x08\x00\x00\x80?\x00\x00\x80\xbftb"
    )
    data = (
        b"\x80\x02}(U\x05arrayq\x00" + array + b"U\x04textU\x02abU\x03rawU\x02\xe9\xffU\x01dccollections\nOrderedDict\n"
    )
    data += b"(](](U\x01kcargparse\nNamespace\n)\x81}U\x01aK\x01sbeetRu."
    path = in_zip(tmp_path / "in.pth", data)
    result = sanitized(path, out)
    assert torch.equal(result.loaded["array"], torch.tensor([1.0, -1.0]))
    assert (result.loaded["text"], result.loaded["raw"]) == ("ab", "éÿ")
    assert result.loaded["d"] == {"k": {"a": 1}}
    assert result.what("d.k") == "argparse.Namespace -> dict, 1 entry"


# -- hostile ----------------------------------------------------------------------------------------------------


def in_zip(path: Path, data: bytes) -> Path:
    """A file of torch with this pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
    return path


def calls(module: str, name: str, *arguments: Any, state: Any = None) -> bytes:
    """A call with any arguments, in protocol 2, without PROTO and STOP."""
    parts = b"".join(_raw(argument) for argument in arguments)
    made = b"c%s\n%s\n(%stR" % (module.encode(), name.encode(), parts)
    return made + _raw(state) + b"b" if state is not None else made


def _raw(value: Any) -> bytes:
    if isinstance(value, Raw):
        return value.data
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_raw, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(_raw, value)) + b"e"
    return pickle.dumps(value, 2)[2:-1]


class Raw:
    def __init__(self, data: bytes) -> None:
        self.data = data


F8 = Raw(calls("numpy", "dtype", "f8", 0, 1, state=(3, "<", None, None, None, -1, -1, 0)))
HUGE = 10**5000
VALUES: tuple[Any, ...] = (
    *(0, -1, 1 << 62, HUGE, 1e308, float("nan"), "x", "\ud800", b"", b"\xff" * 10),
    *(None, (), [], {}),
)
NAMES = {
    "numpy": "dtype",
    "numpy.core.multiarray": "scalar _reconstruct",
    "numpy._core.numeric": "_frombuffer",
    "numpy.random._pickle": "__generator_ctor __randomstate_ctor",
    "datetime": "datetime date time timedelta timezone",
    "pathlib": "PosixPath PureWindowsPath",
    "builtins": "range slice frozenset set dict bytes getattr",
    "collections": "defaultdict deque OrderedDict",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "uuid": "UUID",
    "re": "_compile",
    "functools": "partial",
    "omegaconf.dictconfig": "DictConfig",
    "easydict": "EasyDict",
    "copyreg": "_reconstructor __newobj__ __newobj_ex__",
    "torch": "Generator",
    "torch._C": "Generator",
    "torch._utils": "_rebuild_tensor_v2",
    "torch._tensor": "_rebuild_from_type_v2",
    "torch.nn": "Parameter",
    "torch.autograd.variable": "Variable",
    "torch.storage": "UntypedStorage",
    "zoneinfo": "ZoneInfo",
}


def hostile(path: Path, data: bytes, out: Path) -> None:
    """With any options, the end is an output or an error of ours, in bounded time (see ``calibration.py``)."""
    in_zip(path, data)
    every: dict[str, Any] = {"drop_unknown": True, "as_state_dict": True}
    for options in ({}, every):

        def work(options: dict[str, Any] = options) -> None:
            with contextlib.suppress(CkptoolError), ckptool.open(path) as checkpoint:
                ckptool.save(sanitize(checkpoint, **options), out, force=True)

        assert loops(work)[1] < 300


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("module,name", [(module, name) for module in NAMES for name in NAMES[module].split()])
def test_wrong_arguments(module: str, name: str, tmp_path: Path, out: Path) -> None:
    """Every rule with every value at every place, and as a state: in one list, where each is a call of its own."""
    tries = [()] + [(value,) * count for value in VALUES for count in (1, 2, 3, 4, 5)]
    tries += [(first, second, 1) for first in VALUES for second in (0, "x", None, (), [])]
    tries += [(F8, value) for value in VALUES] + [(value, F8, (1,), "C") for value in VALUES]
    made = [calls(module, name, *arguments) for arguments in tries]
    for state in (*VALUES, (1, (2,), F8, False, b"x"), (1,) * 5, ("f", (), {}, None), ({}, None), {"_content": []}):
        made.append(calls(module, name, state=state))
        made.append(calls(module, name, 1, 2, 3, state=state))
    whole = b"\x80\x02](" + b"".join(made) + b"e."
    hostile(tmp_path / "in.pth", whole, out)
    assert out.exists()


def reconstruct(code: str, shape: tuple[int, ...], data: Any, fortran: bool = False) -> bytes:
    dtype = Raw(calls("numpy", "dtype", code, 0, 1, state=(3, "<", None, None, None, -1, -1, 0)))
    ndarray = Raw(b"cnumpy\nndarray\n")
    start = (ndarray, (0,), b"b")
    return calls("numpy.core.multiarray", "_reconstruct", *start, state=(1, shape, dtype, fortran, data))


ARRAYS: dict[str, bytes] = {
    "many empty strings": reconstruct("U0", (1 << 47,), b""),
    "more empty strings": reconstruct("S0", (1 << 30, 1 << 10), b""),
    "a width beyond sense": reconstruct("U999999999", (0,), b""),
    "digits that are no ASCII": reconstruct("f\u0668", (1,), b"12345678"),
    "no digits": reconstruct("f", (1,), b"12345678"),
    "no code": reconstruct("", (1,), b""),
    "many empty lists": reconstruct("O8", (1 << 47, 0), []),
    "lists in lists without elements": reconstruct("O8", (1 << 20, 1 << 20, 0), []),
    "strides beyond int64": reconstruct("f8", (0, 1 << 47, 1 << 47, 1 << 47), b""),
    "too many dimensions": reconstruct("f8", (1,) * 65, b"12345678"),
    "a negative dimension": reconstruct("f8", (-1, -1), b"12345678"),
    "a dimension too large": reconstruct("f8", (HUGE,), b"12345678"),
    "a bool as a dimension": reconstruct("f8", (True,), b"12345678"),
    "too few bytes": reconstruct("f8", (2,), b"12345678"),
    "too few objects": reconstruct("O8", (2,), [1]),
    "Fortran without elements": reconstruct("U1", (1 << 40, 0, 1 << 40), b"", True),
    "lone surrogates": reconstruct("U1", (2,), b"\x00\xd8\x00\x00\xff\xff\xff\xff"),
    "a surrogate as bytes": reconstruct("f8", (1,), "\ud800"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_absurd_arrays(name: str, tmp_path: Path, out: Path) -> None:
    hostile(tmp_path / "in.pth", b"\x80\x02](" + ARRAYS[name] + b"e.", out)


NAMESPACE = b"cargparse\nNamespace\n)\x81"
#: Objects in objects: several times the depth at which Python's own recursion ends, and far more in ``make torture``.
MANY = 20_000 if WHOLE else 2_500
DEEP: dict[str, bytes] = {
    "namespaces": (NAMESPACE + b"}X\x01\x00\x00\x00a") * MANY + b"K\x01" + b"sb" * MANY,
    "named tuples": b"cm\nPair\n(" * MANY + b"K\x01" + b"t\x81" * MANY,
    "partials": b"cfunctools\npartial\n" * MANY + b"(t" + b"R" * MANY,
    "calls of calls": b"cm\nf\n" + b")R" * MANY,
    "generators": b"cnumpy.random._pickle\n__generator_ctor\n(" * MANY + b"tR" * MANY,
    "getattr": b"c__builtin__\ngetattr\n(" * MANY + b"cm\nf\n" + b"X\x01\x00\x00\x00atR" * MANY,
    "zones": b"cdatetime\ntimezone\n(" * MANY + b"tR" * MANY,
    "keys": b"}" + b"(" * MANY + b"K\x01" + b"t" * MANY + b"K\x01s",
    "keys with a dict": b"}" + b"(" * MANY + NAMESPACE + b"t" * MANY + b"K\x01s",
    "sets": b"c__builtin__\nset\n(" * MANY + b"]" + b"tR" * MANY,
    "modules": b"cm\nNet\n)\x81}(X\x0b\x00\x00\x00_parameters}X\x08\x00\x00\x00_buffers}X\x08\x00\x00\x00_modules}"
    b"X\x01\x00\x00\x00a" * (MANY // 4) + b"N" + b"sub" * (MANY // 4),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", DEEP)
def test_objects_in_objects_without_end(name: str, tmp_path: Path, out: Path) -> None:
    hostile(tmp_path / "in.pth", b"\x80\x02" + DEEP[name] + b".", out)
    if name in ("namespaces", "named tuples"):
        assert out.exists() and loads(out)


def test_cycles_through_everything(tmp_path: Path, out: Path) -> None:
    """A slot that leads to itself: by way of its state, of what it is made of, of a list in a tuple."""
    cycles = (
        NAMESPACE + b"q\x00}X\x01\x00\x00\x00ah\x00sb",
        b"cm\nC\n)\x81q\x00](h\x00h\x00eb",
        b"comegaconf.nodes\nAnyNode\n)\x81q\x00}X\x04\x00\x00\x00_valh\x00sb",
        b"comegaconf.dictconfig\nDictConfig\n)\x81q\x00}X\x08\x00\x00\x00_contenth\x00sb",
        b"cnumpy.random._pickle\n__generator_ctor\n)Rq\x00h\x00b",
        b"cfunctools\npartial\n)Rq\x00(h\x00h\x00h\x00tb",
        b"]q\x00cm\nPair\n(h\x00t\x81q\x01a",
        b"c__builtin__\nset\n(]q\x00tRq\x01h\x00h\x01a0",
        b"cm\nNet\n)\x81q\x00}(X\x0b\x00\x00\x00_parameters}X\x08\x00\x00\x00_buffers}X\x08\x00\x00\x00_modules}"
        b"X\x01\x00\x00\x00ah\x00sub",
        b"\x8fq\x00(cm\nC\n)\x81q\x01](h\x00eb\x90",
    )
    for cycle in cycles:
        for protocol in (b"\x80\x02", b"\x80\x04"):
            hostile(tmp_path / "in.pth", protocol + cycle + b".", out)
    assert op.NAMES[0x8F] == "EMPTY_SET"
