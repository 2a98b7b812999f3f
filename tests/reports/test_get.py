"""get against torch and NumPy: text, JSON, .npy and Python values, for every dtype, without importing either."""

from __future__ import annotations

import base64
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import FIXTURES, LOADABLE, Fixture, by_name, examples
from crafted_files import Code, legacy
from hypothesis import given, settings
from hypothesis import strategies as st
from process_probe import command
from random_tensors import any_tensor

import ckptool
from ckptool.base.errors import TargetError
from ckptool.cli.main import run
from ckptool.values.numeric import to_numbers

pytestmark = pytest.mark.filterwarnings("ignore")

FLOAT8 = ("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu")
WIDER = {"complex32": "complex64", **dict.fromkeys((*FLOAT8, "bfloat16"), "float32")}
#: Torch reads another pickle of it than the one that counts.
WHOLE = [item for item in LOADABLE if item.path.name != "zip_two_pickles.pth"]
every = pytest.mark.parametrize("item", WHOLE, ids=by_name)


def same(mine: Any, theirs: Any) -> bool:
    """Equal numbers in equal lists, NaN and the signs of zeros too."""
    if isinstance(theirs, list):
        return isinstance(mine, list) and len(mine) == len(theirs) and all(map(same, mine, theirs))
    if isinstance(theirs, complex):
        return same(mine.real, theirs.real) and same(mine.imag, theirs.imag)
    if isinstance(theirs, float):
        return type(mine) is float and (
            (mine != mine and theirs != theirs)
            or (mine == theirs and math.copysign(1, mine) == math.copysign(1, theirs))
        )
    return type(mine) is type(theirs) and bool(mine == theirs)


def from_json(value: Any, like: Any) -> Any:
    """What JSON has, in the types that ``tolist()`` gives."""
    if isinstance(like, list):
        return [from_json(*pair) for pair in zip(value, like, strict=True)]
    if isinstance(like, complex):
        return complex(float(value[0]), float(value[1]))
    return float(value) if isinstance(like, float) else value


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert run(["get", *arguments]) == 0
    return capsys.readouterr().out


# -- the codes of every dtype -----------------------------------------------------------------------------------------


def test_halves_and_quarters_of_bytes() -> None:
    assert to_numbers(b"\x21\xf0", "quint4x2") == [1, 2, 0, 15]
    assert to_numbers(b"\xe4", "quint2x4") == [0, 1, 2, 3]


# -- every tensor of every file ---------------------------------------------------------------------------------------


def reached(path: Path) -> list[tuple[str, torch.Tensor]]:
    """The tensors at paths that keys and numbers lead to."""
    loaded = oracle.load(path)
    every = ((entry["path"], oracle.at(loaded, entry["path"])) for entry in ckptool.keys(path, all=True)["tensors"])
    return [(name, tensor) for name, tensor in every if tensor is not None]


def is_plain(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type == "meta":
        return False
    return "bits" not in str(tensor.dtype) and "float4" not in str(tensor.dtype)


def listed(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (tensor.to(torch.complex64) if tensor.dtype is torch.complex32 else tensor).tolist()


def compare(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Python values, as JSON and as .npy every tensor is what torch loads."""
    with ckptool.open(path) as checkpoint:
        for name, tensor in reached(path):
            if tensor.is_nested or tensor.numel() > 1 << 16:
                continue
            value = ckptool.get(checkpoint, name or ".")
            assert (tuple(value.shape), value.numel) == (tuple(tensor.shape), tensor.numel())
            if not is_plain(tensor):
                continue
            theirs = listed(tensor)
            assert same(value.tolist(), theirs)
            array = np.asarray(value, dtype=WIDER.get(value.dtype))
            assert array.shape == tuple(tensor.shape)
            assert same(array.tolist(), theirs) or tensor.dtype is torch.complex32
    plain = [(name, tensor) for name, tensor in reached(path) if is_plain(tensor) and tensor.numel() < 1 << 14]
    for name, tensor in plain[:12]:
        theirs = listed(tensor)
        assert same(from_json(strict(told(capsys, str(path), name or ".", "--json")), theirs), theirs)
        out = tmp_path / "out.npy"
        told(capsys, str(path), name or ".", "-o", str(out), "--force")
        array = np.load(out, allow_pickle=False)
        assert same(array.tolist(), theirs)
        assert array.shape == tuple(tensor.shape) and out.stat().st_size % 64 == array.nbytes % 64


@every
def test_every_fixture(item: Fixture, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if item.path.name == "zip_wrong_crc.pth":
        assert run(["get", str(item.path), '["module.b"]', "-o", str(tmp_path / "out.npy")]) == 3
        assert "does not match its checksum" in capsys.readouterr().err and not (tmp_path / "out.npy").exists()
        return
    compare(item.path, tmp_path, capsys)


@every
def test_the_whole_file_is_strict_json(item: Fixture, capsys: pytest.CaptureFixture[str]) -> None:
    loaded, mine = oracle.load(item.path), strict(told(capsys, str(item.path), ".", "--json"))
    if isinstance(loaded, dict) and isinstance(mine, dict) and "class" not in mine:
        assert list(mine) == [key if isinstance(key, str) else repr(key) for key in loaded]


@every
def test_the_whole_file_as_python_values(item: Fixture) -> None:
    assert equal(ckptool.get(item.path, "."), oracle.load(item.path))


def equal(mine: Any, theirs: Any) -> bool:
    """The same structure; tensors by their shape, objects not at all."""
    if isinstance(theirs, torch.Tensor):
        return isinstance(mine, ckptool.TensorValue) and (theirs.is_nested or tuple(mine.shape) == tuple(theirs.shape))
    if isinstance(theirs, dict) and isinstance(mine, dict):
        return list(mine) == list(theirs) and all(equal(mine[key], theirs[key]) for key in theirs)
    if isinstance(theirs, torch.Size):
        return mine == tuple(theirs)
    if type(theirs) in (list, tuple):
        return type(mine) is type(theirs) and len(mine) == len(theirs) and all(map(equal, mine, theirs))
    if theirs is None or type(theirs) in (bool, int, float, str, bytes, complex, set):
        return type(mine) is type(theirs) and (mine == theirs or mine != mine)
    return True


@settings(max_examples=examples(150))
@given(tensor=any_tensor())
def test_any_tensor(tensor: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "any.pth", tmp_path / "any.npy"
    torch.save(tensor, path)
    theirs = listed(tensor)
    assert same(ckptool.get(path, ".").tolist(), theirs)
    assert same(from_json(strict(told(capsys, str(path), ".", "--json")), theirs), theirs)
    told(capsys, str(path), ".", "-o", str(out), "--force")
    assert same(np.load(out).tolist(), theirs)


# -- .npy -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOAT8, "bfloat16", "complex32"])
def test_what_numpy_lacks_is_widened_and_said(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "a.pth", tmp_path / "a.npy"
    size = getattr(torch, dtype).itemsize
    raw = bytearray(np.arange(1 << 16, dtype="<u2").tobytes()) if size > 1 else bytearray(range(256))
    tensor = torch.frombuffer(raw, dtype=getattr(torch, dtype))
    torch.save(tensor, path)
    assert run(["get", str(path), ".", "-o", str(out)]) == 0
    array = np.load(out)
    wide = torch.complex64 if dtype == "complex32" else torch.float32
    assert array.dtype == (np.complex64 if dtype == "complex32" else np.float32)
    assert same(array.tolist(), tensor.to(wide).tolist())
    assert f"{dtype} becomes {'complex64' if dtype == 'complex32' else 'float32'}" in capsys.readouterr().err


def test_a_bool_is_zero_or_one(tmp_path: Path) -> None:
    torch.save({"flag": torch.tensor([True, False, True])}, tmp_path / "a.pth")
    data = (tmp_path / "a.pth").read_bytes()
    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        span = checkpoint.container.stored("0").span
        assert span is not None
        (tmp_path / "b.pth").write_bytes(data[: span.offset] + b"\x07\x00\xff" + data[span.offset + 3 :])
    assert np.asarray(ckptool.get(tmp_path / "b.pth", "flag")).view(np.uint8).tolist() == [1, 0, 1]
    assert ckptool.get(tmp_path / "b.pth", "flag").tolist() == [True, False, True]


def test_an_output_is_never_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.npy"
    out.write_bytes(b"old")
    call = ["get", str(FIXTURES / "bare.pth"), "conv1.weight", "-o", str(out)]
    assert run(call) == 4
    assert out.read_bytes() == b"old"
    assert run([*call, "--force"]) == 0
    assert np.load(out).shape == (4, 3, 1, 1)
    assert run(["get", str(FIXTURES / "bare.pth"), "conv1.weight", "-o", str(tmp_path / "no" / "out.npy")]) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.npy"]


#: Fixtures with what is no array.
NO_ARRAYS = {
    **{"sparse.pt": "coo", "quantized.pt": "qint8", "nested.pt": "ragged", "meta.pt": "shape_only"},
    **{"dtypes_untyped.pt": "bits8 float4_e2m1fn_x2", "ddp4_training.pth": "state_dict epoch"},
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in NO_ARRAYS for key in NO_ARRAYS[name].split()])
def test_what_is_no_array_is_refused(name: str, key: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["get", str(FIXTURES / name), key, "-o", str(out)]) == 4
    assert "ckptool get" in capsys.readouterr().err
    assert not out.exists()


def test_a_tensor_without_end_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(1).expand(1 << 20, 1 << 20)}, tmp_path / "a.pth")
    for option in (["--json"], ["-o", str(tmp_path / "out.npy")]):
        assert run(["get", str(tmp_path / "a.pth"), "w", *option]) == 4
    assert "1., 1., 1., ..., 1., 1., 1." in told(capsys, str(tmp_path / "a.pth"), "w")


# -- where a key leads ------------------------------------------------------------------------------------------------


def test_an_exact_path_counts_first_and_two_readings_are_refused(tmp_path: Path) -> None:
    torch.save({"a": {"b": 1, "b.c": 2}, "a.b": {"c": 3}, "x.y": {"z": 4}, "x": {"y.z": 5}}, tmp_path / "a.pth")
    path = tmp_path / "a.pth"
    assert ckptool.get(path, "a.b") == 1
    assert ckptool.get(path, '["a.b"].c') == 3
    assert ckptool.get(path, 'x["y.z"]') == 5
    with pytest.raises(TargetError, match="can be read as"):
        ckptool.get(path, "a.b.c")
    with pytest.raises(TargetError, match="can be read as"):
        ckptool.get(path, "x.y.z")


@settings(max_examples=examples(200))
@given(
    keys=st.lists(st.text("ab.[]\"'0\\ é\n", max_size=6), min_size=1, max_size=5, unique=True), text=st.text('ab.[]"0')
)
def test_any_key_is_found_by_its_path(keys: list[str], text: str, tmp_path: Path) -> None:
    torch.save({key: {"in": number} for number, key in enumerate(keys)}, tmp_path / "a.pth")
    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        for number, entry in enumerate(checkpoint.survey.entries):
            assert ckptool.get(checkpoint, f"{entry.path}.in") == number
        try:
            ckptool.get(checkpoint, text)
        except TargetError:
            return


# -- what is no tensor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text", "as_json"),
    [
        ("a text", "a text", "a text"),
        ("two\nlines", "two\nlines", "two\nlines"),
        ("\x1b[31mred\x7f", "\\x1b[31mred\\x7f", "\x1b[31mred\x7f"),
        (41, "41", 41),
        (1 << 80, str(1 << 80), 1 << 80),
        (0.1, "0.1", 0.1),
        (math.nan, "nan", "nan"),
        (-math.inf, "-inf", "-inf"),
        (True, "True", True),
        (None, "None", None),
        (1 + 2j, "(1+2j)", [1.0, 2.0]),
        (b"\x00\xff", "b'\\x00\\xff'", {"base64": base64.b64encode(b"\x00\xff").decode()}),
        ({}, "an empty dict", {}),
        ([], "an empty list", []),
        ([1, "a", None], '[0]: 1\n[1]: "a"\n[2]: None', [1, "a", None]),
        ({"a": (1, 2), 3: {None: {5}}}, "a: (1, 2)\n3: dict, 1 entry\n  None: {5}", {"a": [1, 2], "3": {"None": [5]}}),
    ],
    ids=repr,
)
def test_values(value: Any, text: str, as_json: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.pth"
    torch.save({"value": value}, path)
    assert told(capsys, str(path), "value") == text + "\n"
    assert strict(told(capsys, str(path), "value", "--json")) == as_json
    found = ckptool.get(path, "value")
    assert found == value or (value != value and found != found)


def test_what_is_in_itself_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop: dict[str, Any] = {"a": [1, {}]}
    loop["a"].append(loop["a"])
    loop["self"] = loop
    torch.save(loop, tmp_path / "a.pth")
    assert strict(told(capsys, str(tmp_path / "a.pth"), ".", "--json")) == {
        "a": [1, {}, {"ref": "a"}],
        "self": {"ref": ""},
    }
    assert "the same list as a" in told(capsys, str(tmp_path / "a.pth"), ".")
    found = ckptool.get(tmp_path / "a.pth", ".")
    assert found["self"] is found and found["a"][2] is found["a"]


def test_depth_and_doubling_are_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    doubled: list[Any] = ["x" * 20]
    for _ in range(60):
        doubled = [doubled, doubled]
    pickled = tmp_path / "a.pth"
    torch.save({"a": 1}, pickled)
    for value in (deep, doubled):
        write_pickle(pickled, value)
        text = told(capsys, str(pickled), ".", "--json")
        assert len(text) < 200_000
        strict(text)
        assert len(told(capsys, str(pickled), ".")) < 200_000
        assert isinstance(ckptool.get(pickled, "."), list)


def write_pickle(path: Path, value: Any) -> None:
    """A legacy file around a pickle that the pickler itself cannot write, because it nests too deep."""
    depth = 0
    inner = value
    while isinstance(inner, list) and len(inner) == 1 and isinstance(inner[0], list):
        inner, depth = inner[0], depth + 1
    body = pickle.dumps(inner, 2)
    path.write_bytes(legacy(Code(b"]" * depth + body[2:-1] + b"a" * depth), {}))


# -- a tensor as text -------------------------------------------------------------------------------------------------


PRINTED = [
    *map(
        torch.tensor, (1.5, [1.0, 2.0, -3.0], [0.5, -1.25, 100.0], [1e-8, 1.0], [math.nan, 1.0, -math.inf], [1e10, 1.0])
    ),
    *(torch.tensor([True, False]), torch.arange(12).view(3, 4), torch.arange(8000).view(20, 20, 20)),
    *(torch.linspace(-1, 1, 60), torch.linspace(0, 1, 5000), torch.linspace(0, 1, 4000).view(40, 100)),
    *(torch.zeros(2, 0, 3), torch.linspace(0, 1, 8, dtype=torch.float16).view(2, 2, 2), torch.zeros(1100, 2)[::3].t()),
]


@pytest.mark.parametrize("tensor", PRINTED, ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}")
def test_a_tensor_looks_as_torch_prints_it(
    tensor: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(tensor, tmp_path / "a.pth")
    head, _, body = told(capsys, str(tmp_path / "a.pth"), ".").partition("\n")
    assert head.startswith(str(tensor.dtype).removeprefix("torch."))
    mine = "".join(body.split())
    theirs = "".join(str(tensor).removeprefix("tensor(").split())
    assert theirs.startswith(mine if tensor.numel() else "[]")


@pytest.mark.parametrize("dimensions", [6, 12, 40, 70])
def test_many_dimensions_are_bounded(dimensions: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = [2 if axis < 11 else 1 for axis in range(min(dimensions, 60))]
    torch.save(torch.zeros(shape), tmp_path / "a.pth")
    assert len(told(capsys, str(tmp_path / "a.pth"), ".").splitlines()) < 4_000


def test_neither_torch_nor_numpy_is_wanted(out: Path) -> None:
    path = str(FIXTURES / "ddp4_training.pth")
    for arguments in ([], ["--json"], ["-o", str(out.with_suffix(".npy"))]):
        found = command("get", path, "state_dict.module.head.weight", *arguments)
        assert (found.code, found.err, found.wanted) == (0, "", [])
