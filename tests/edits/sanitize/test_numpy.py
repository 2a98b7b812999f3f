"""NumPy: scalars become Python numbers, arrays tensors with their bytes in a storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from naive_sanitize import agrees, sanitized, saved

from ckptool.base.errors import RefusedError

CODES = "?bhilqBHILQefdFD"
DTYPES = [np.dtype(code).newbyteorder(order) for code in CODES for order in "<>"]  # type: ignore[call-overload]


def by_str(dtype: Any) -> str:
    return f"{dtype.char}{dtype.str}"


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=by_str)
def test_numbers_of_every_dtype(dtype: Any, protocol: int, tmp_path: Path, out: Path) -> None:
    array = np.array([[0, 1, 100], [3, 2, 1]]).astype(dtype)
    value = {
        "array": array,
        "scalar": array[0, 2],
        "none": np.empty((0, 3), dtype),
        "no dimension": np.array(7, dtype),
        "fortran": np.asfortranarray(array),
        "cut": np.arange(24).astype(dtype).reshape(4, 6)[::2, ::3],
        "turned": np.arange(24).astype(dtype).reshape(2, 3, 4).transpose(2, 0, 1),
        "w": torch.ones(2),
    }
    result = agrees(saved(tmp_path / "in.pth", value, protocol), out)
    assert type(result.loaded["scalar"]) is type(array[0, 2].item())
    assert "tensor, " in result.what("array")


OTHERS: dict[str, Any] = {
    "bool": np.bool_(True),
    "str": np.str_("añ"),
    "bytes": np.bytes_(b"a\xff"),
    "nan": [np.float64("nan"), np.float32("-inf"), np.float16(0.1)],
    "datetime64": [np.datetime64("2020-01-01"), np.datetime64("2020-01-01T01", "ns"), np.timedelta64(5, "s")],
    "dates": np.array(["2020-01-01", "NaT"], "M8[D]"),
    "strings": np.array([["ab", "c"], ["", "añ"]]),
    "strings in Fortran's order": np.asfortranarray(np.arange(24).reshape(2, 3, 4).astype("U2")),
    "big-endian strings": np.array(["ab", "c"], ">U2"),
    "byte strings": np.array([b"ab", b"c\xff"]),
    "objects": np.array([[1, "a", None], [[1], {"k": np.float32(2)}, np.arange(2)]], dtype=object),
    "objects in Fortran's order": np.asfortranarray(np.array([[1, 2, 3], ["a", "b", "c"]], dtype=object)),
    "one object": np.array({"a": 1}, dtype=object),
    "no objects": [np.empty(shape, dtype=object) for shape in ((0,), (0, 2), (2, 0), (2, 0, 3))],
    "matrix": np.matrix([[1, 2]]),
    "random state": np.random.RandomState(3).get_state(legacy=True),
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_that_has_a_plain_form(name: str, protocol: int, tmp_path: Path, out: Path) -> None:
    agrees(saved(tmp_path / "in.pth", {"v": OTHERS[name], "w": torch.ones(2)}, protocol), out)


def test_dtypes_and_generators(tmp_path: Path, out: Path) -> None:
    value = {
        "dtype": [np.dtype("f4"), np.dtype(">i8"), np.dtype("U5"), np.dtype(bool)],
        "class": np.float32,
        "function": np.add,
        "state": np.random.RandomState(1),
        "generator": np.random.default_rng(1),
        "polynomial": np.polynomial.Polynomial([1, 2]),
    }
    result = sanitized(saved(tmp_path / "in.pth", value), out).loaded
    assert result["dtype"] == ["float32", ">i8", "<U5", "bool"]
    assert (result["class"], result["function"]) == ("numpy.float32", "numpy.add")
    assert result["state"]["bit_generator"] == "MT19937"
    expected = np.random.RandomState(1).get_state(legacy=False)["state"]["key"]  # type: ignore[index, call-overload]
    assert np.array_equal(result["state"]["state"]["key"].numpy(), expected)
    generator = np.random.default_rng()
    generator.bit_generator.state = result["generator"]
    assert generator.random() == np.random.default_rng(1).random()
    assert torch.equal(result["polynomial"]["coef"], torch.tensor([1.0, 2.0], dtype=torch.float64))


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("legacy", [False, True])
def test_an_array_at_two_places_stays_one_tensor(legacy: bool, protocol: int, tmp_path: Path, out: Path) -> None:
    array, weight = np.arange(4.0), torch.ones(3)
    value = {"a": array, "b": [array], "c": array[1:], "w": weight, "x": weight[1:]}
    loaded = agrees(saved(tmp_path / "in.pth", value, protocol, legacy), out).loaded
    assert loaded["a"] is loaded["b"][0]
    assert loaded["a"].data_ptr() + 8 != loaded["c"].data_ptr()
    assert loaded["w"].data_ptr() + 4 == loaded["x"].data_ptr()


REFUSED: dict[str, Any] = {
    "long double": np.longdouble(1.5),
    "array of long doubles": np.array([1.5], "g"),
    "fields": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "void": np.array([b"abc"], "V3"),
    "masked": np.ma.masked_array([1, 2], [0, 1]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_plain_form(name: str, tmp_path: Path, out: Path) -> None:
    path = saved(tmp_path / "in.pth", {"v": REFUSED[name], "w": 1})
    with pytest.raises(RefusedError, match=r"v \(numpy"):
        sanitized(path, out)
    if np.ndim(REFUSED[name]) and name != "masked":
        with pytest.raises(RefusedError, match=r": v .*they hold values of tensors"):
            sanitized(path, out, drop_unknown=True)
    else:
        assert sanitized(path, out, drop_unknown=True).loaded == {"w": 1}
