"""diff: what torch says of the same two files, tensor by tensor; and its laws."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_tensors import CUT, KINDS, as_big_endian, bumped, copied, saved
from conftest import CHECKPOINTS, FIXTURES, Fixture, by_name, examples
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.base.errors import CkptoolError, MalformedError, TargetError
from ckptool.cli.main import run

LISTS = ("container", "only_in_a", "only_in_b", "changed", "values", "sharing", "entries", "order")
every = pytest.mark.parametrize("item", [i for i in CHECKPOINTS if i.path.name not in CUT], ids=by_name)


def found(report: dict[str, Any]) -> dict[str, Any]:
    """The lists that are not empty."""
    return {name: report[name] for name in LISTS if report[name]}


@pytest.fixture
def two(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Save two objects and compare the files."""

    def compare(a: Any, b: Any, **how: Any) -> dict[str, Any]:
        one, other = saved(tmp_path / "a.pth", a), saved(tmp_path / "b.pth", b)
        return ckptool.diff(one, other, **how)

    return compare


# -- the same ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(every=9)
@every
def test_a_file_is_the_same_as_itself_and_as_its_copy(item: Fixture, tmp_path: Path) -> None:
    try:
        ckptool.open(item.path).close()
    except CkptoolError:
        pytest.skip("ckptool does not open it")
    twin = tmp_path / "twin"
    twin.write_bytes(item.path.read_bytes())
    for other in (item.path, twin):
        report = ckptool.diff(item.path, other)
        assert report["same"], found(report)
        assert found(report) == {} and report["tensors"]["differ"] == 0
        assert report["tensors"]["in_a"] == report["tensors"]["in_b"] == report["tensors"]["in_both"]


@pytest.mark.parametrize("name", ["ddp4_training.pth", "bare_module.pth", "fsdp_wrapped.pth", "orig_mod_module.pth"])
def test_without_wrappers_it_is_the_same_but_for_the_prefix(name: str, out: Path) -> None:
    with ckptool.open(FIXTURES / name) as checkpoint:
        ckptool.save(ckptool.strip_wrappers(checkpoint), out)
    assert ckptool.diff(FIXTURES / name, out, ignore=["prefix"])["same"]
    report = ckptool.diff(FIXTURES / name, out)
    assert not report["same"] and "--ignore prefix" in report["hint"]
    assert all("state_dict" in item["path"] or "[" in item["path"] or item["path"] for item in report["only_in_a"])


def test_across_containers(tmp_path: Path) -> None:
    value = {"state_dict": OrderedDict(a=torch.arange(6.0).reshape(2, 3), b=torch.ones(2, dtype=torch.float16))}
    zipped = saved(tmp_path / "a", value)
    legacy = saved(tmp_path / "b", value, _use_new_zipfile_serialization=False)
    report = ckptool.diff(zipped, legacy)
    assert found(report) == {"container": [{"path": "", "what": "format", "a": "torch-zip", "b": "torch-legacy"}]}
    assert ckptool.diff(zipped, legacy, ignore=["container"])["same"]


def test_a_wrapper_is_part_of_the_container(tmp_path: Path) -> None:
    state = OrderedDict(a=torch.arange(6.0), b=torch.ones(2))
    bare, wrapped = saved(tmp_path / "a", state), saved(tmp_path / "b", {"epoch": 3, "model": dict(state)})
    assert not ckptool.diff(bare, wrapped)["same"]
    assert ckptool.diff(bare, wrapped)["hint"] == "" or "--key" in ckptool.diff(bare, wrapped)["hint"]
    assert ckptool.diff(bare, wrapped, ignore=["container"])["same"]
    assert ckptool.diff(bare, wrapped, ignore=["container"])["other_key"] == "model"
    report = ckptool.diff(bare, wrapped, key=".", other_key="model")
    assert [(item["a"]["type"], item["b"]["type"]) for item in report["entries"]] == [("OrderedDict", "dict")]
    with pytest.raises(TargetError):
        ckptool.diff(bare, wrapped, key="nowhere")


def test_big_endian_values_are_the_same_values(tmp_path: Path) -> None:
    little = saved(tmp_path / "a", {"x": torch.randn(100), "y": torch.arange(9), "z": torch.ones(3, dtype=torch.uint8)})
    big = tmp_path / "b"
    as_big_endian(little, big, {"0": 4, "1": 8})
    report = ckptool.diff(little, big)
    assert [item["what"] for item in report["container"]] == ["byte order"]
    assert set(found(report)) == {"container"}
    as_big_endian(little, big, {"0": 4, "1": 1})
    assert [item["path"] for item in ckptool.diff(little, big)["values"]] == ["y"]


# -- what differs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_one_element_of_any_tensor(kind: str, two: Callable[..., dict[str, Any]]) -> None:
    torch.manual_seed(1)
    tensor, rest = KINDS[kind](), torch.arange(50.0)
    a = {"x": rest, "it": tensor, "y": rest.clone()}
    assert two(a, copied(a))["same"]
    report = two(a, a | {"it": bumped(tensor)})
    assert set(found(report)) == {"values"}, found(report)
    assert [(item["path"], item["differing"]) for item in report["values"]] == [("it", 1)]


def test_quantizers_flags_and_attributes_count(two: Callable[..., dict[str, Any]]) -> None:
    x = torch.randn(8)
    a, b = (torch.quantize_per_tensor(x, scale, 3, torch.qint8) for scale in (0.5, 0.5000001))
    b = torch._make_per_tensor_quantized_tensor(a.int_repr(), 0.25, 3)
    (only,) = two({"q": a}, {"q": b})["changed"]
    assert (only["what"], only["a"], only["b"]) == ("quantizer[1]", 0.5, 0.25)
    z = torch.randn(4, dtype=torch.complex64)
    assert [item["what"] for item in two({"z": z}, {"z": z.conj()})["changed"]] == ["conj"]
    one, other = torch.nn.Parameter(x), torch.nn.Parameter(x)
    one.note, other.note = 1, 2  # type: ignore[attr-defined]
    assert [(i["what"], i["a"], i["b"]) for i in two({"p": one}, {"p": other})["changed"]] == [("state.note", 1, 2)]


def test_a_view_and_its_copy_differ_in_strides_only(two: Callable[..., dict[str, Any]]) -> None:
    x = torch.randn(300, 500).t()
    report = two({"x": x}, {"x": x.contiguous()})
    assert found(report) == {"changed": [{"path": "x", "what": "stride", "a": [1, 500], "b": [300, 1]}]}
    assert two({"x": x}, {"x": x.contiguous()}, ignore=["stride"])["same"]
    y = x.contiguous()
    y[123, 45] += 1
    (value,) = two({"x": x}, {"x": y})["values"]
    assert (value["first"], value["differing"]) == ([123, 45], 1)


def test_ties(two: Callable[..., dict[str, Any]]) -> None:
    x = torch.randn(5)
    tied, apart = {"a": x, "b": x}, {"a": x, "b": x.clone()}
    report = two(tied, apart)
    assert found(report) == {"sharing": [{"path": "b", "with": "a", "only_in": "a"}]}
    assert two(apart, tied)["sharing"] == [{"path": "b", "with": "a", "only_in": "b"}]
    assert two(tied, apart, ignore=["sharing"])["same"] and two(tied, copy.deepcopy(tied))["same"]
    y = x + 1
    assert [item["path"] for item in two(tied, {"a": y, "b": y})["values"]] == ["a", "b"]


def test_keys_entries_order_and_metadata(two: Callable[..., dict[str, Any]]) -> None:
    x = torch.ones(2)
    a = {
        "state_dict": OrderedDict([("a.w", x), ("b.w", x + 1)]),
        "epoch": 3,
        "extra": [1, (2.0, "x")],
        "gone": {"k": x},
    }
    b = {
        "state_dict": OrderedDict([("b.w", x + 1), ("a.w", x)]),
        "extra": [1, (2, "y"), None],
        "epoch": 3,
        "new": b"ab",
    }
    a["state_dict"]._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    b["state_dict"]._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    report = two(a, b)
    assert [(i["path"], i["type"], i["tensors"]) for i in report["only_in_a"]] == [("gone", "dict", 1)]
    only_b = [(i["path"], i["type"], i.get("value")) for i in report["only_in_b"]]
    assert only_b == [("new", "bytes", "b'ab'"), ("extra[2]", "None", None)]
    entries = {item["path"]: (item["a"].get("value"), item["b"].get("value")) for item in report["entries"]}
    version = 'state_dict._metadata[""].version'
    assert entries == {version: (1, 2), "extra[1][0]": (2.0, 2), "extra[1][1]": ("x", "y")}
    assert {item["path"] for item in report["order"]} == {"", "state_dict"}
    assert not report["same"] and not two(a, b, ignore=["order"])["order"]


def test_cycles_sharing_and_depth(two: Callable[..., dict[str, Any]]) -> None:
    one: list[Any] = [torch.ones(2)]
    one.append(one)
    other: list[Any] = [torch.ones(2)]
    other.append([other[0], other])
    # Unfolded they are the same; only which list is which differs.
    assert two({"x": one}, {"x": other})["same"]
    other[1].append(5)
    assert [item["path"] for item in two({"x": one}, {"x": other})["only_in_b"]] == ["x[1][2]"]
    shared = [1, 2]
    assert not two({"a": shared, "b": shared}, {"a": [1, 2], "b": [1, 3]})["same"]
    deep: Any = 1
    wide: Any = [torch.ones(1)]
    for _ in range(200):
        deep, wide = [deep], [wide, wide]
    assert two({"d": deep, "w": wide}, {"d": copy.deepcopy(deep), "w": wide})["same"]


# -- tolerance ------------------------------------------------------------------------------------------------


@settings(max_examples=examples(40))
@given(
    st.lists(st.tuples(*[st.floats(width=32) | st.sampled_from([0.0, 1.0, -1.0])] * 2), min_size=1, max_size=9),
    st.sampled_from([0.0, 1e-6, 0.1]),
    st.sampled_from([0.0, 1e-3, 1.0]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_close_is_what_allclose_says(
    tmp_path: Path, numbers: list[tuple[float, float]], rtol: float, atol: float, dtype: torch.dtype
) -> None:
    a, b = (torch.tensor(side, dtype=torch.float64).to(dtype) for side in zip(*numbers))
    one, other = saved(tmp_path / "a", {"x": a}), saved(tmp_path / "b", {"x": b})
    expected = torch.allclose(a.double(), b.double(), rtol=rtol, atol=atol, equal_nan=True)
    report = ckptool.diff(one, other, rtol=rtol, atol=atol)
    assert report["same"] == expected
    for value in report["values"] + report["within_tolerance"]:
        distance = (a.double() - b.double()).abs()
        distance = torch.where(a.double() == b.double(), 0.0, distance)
        finite = distance[torch.isfinite(a) & torch.isfinite(b)]
        assert value["max_abs"] == (pytest.approx(float(finite.max())) if len(finite) else None)
        assert value["mean_abs"] == (pytest.approx(float(finite.mean())) if len(finite) else None)


# -- laws -------------------------------------------------------------------------------------------------

SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, 1.5, float("nan"), "a", "cuda:0", b"x"])
)
NAMES = st.sampled_from(["a", "b", "c.d", "module.e", "x y"])
TENSORS = st.builds(
    lambda fill, shape, dtype: torch.full(shape, fill, dtype=dtype),
    st.integers(0, 1),
    st.sampled_from([(), (2,), (2, 3), (0,)]),
    st.sampled_from([torch.float32, torch.int64]),
)
VALUES = st.recursive(
    SCALARS | TENSORS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(NAMES, below, max_size=3) | st.tuples(below),
    max_leaves=8,
)
OBJECTS = st.dictionaries(NAMES, VALUES, min_size=1, max_size=4)


def plain(value: Any, ordered: bool) -> Any:
    """What makes two objects the same: types, values, order of keys. (Sharing is left out.)"""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, tuple(value.shape), value.numpy().tobytes())
    if isinstance(value, dict):
        items = [(key, plain(item, ordered)) for key, item in value.items()]
        return ("dict", tuple(items if ordered else sorted(items, key=lambda item: item[0])))
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(plain(item, ordered) for item in value))
    return (type(value).__name__, repr(value))


@settings(max_examples=examples(120))
@given(OBJECTS, OBJECTS, st.booleans())
def test_same_is_what_python_says(tmp_path: Path, a: Any, b: Any, ordered: bool) -> None:
    ignore = ["sharing"] if ordered else ["sharing", "order"]
    for one, other in ((a, b), (a, copy.deepcopy(a)), (a, dict(reversed(a.items())))):
        left, right = saved(tmp_path / "a", one), saved(tmp_path / "b", other)
        report = ckptool.diff(left, right, ignore=ignore)
        assert report["same"] == (plain(one, ordered) == plain(other, ordered)), found(report)


@settings(max_examples=examples(60))
@given(st.lists(st.integers(1, 600_000), min_size=1, max_size=4), st.data())
def test_any_elements_are_found(tmp_path: Path, sizes: list[int], data: Any) -> None:
    """Shares and blocks: whatever the sizes, every element that differs is counted, and the first one named."""
    tensors = {f"t{number}": torch.zeros(size) for number, size in enumerate(sizes)}
    other = {name: tensor.clone() for name, tensor in tensors.items()}
    wanted: dict[str, set[int]] = {}
    for name, tensor in tensors.items():
        places = data.draw(st.sets(st.integers(0, len(tensor) - 1), max_size=3))
        other[name][list(places)] = 1.0
        wanted |= {name: places} if places else {}
    report = ckptool.diff(saved(tmp_path / "a", tensors), saved(tmp_path / "b", other))
    told = {item["path"]: (item["first"], item["differing"]) for item in report["values"]}
    assert told == {name: ([min(places)], len(places)) for name, places in wanted.items()}


# -- the command line -----------------------------------------------------------------------------------------


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[31mred\u202e" + "n" * 5000
    a, b = ({name: torch.full((2,), fill), name + "!": 1, f"only{fill}\x07": 2} for fill in (0.0, 1.0))
    one, other = saved(tmp_path / "a", a), saved(tmp_path / "b", b)
    assert run(["diff", str(one), str(other)]) == 1
    told = capsys.readouterr().out
    assert "\x1b" not in told and "\u202e" not in told and "\x07" not in told
    report = ckptool.diff(one, other)
    assert len(report["values"]) == 1 and len(report["values"][0]["path"]) < 700


def test_a_few_bytes_expanded_to_very_many_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", {"x": torch.ones(1).expand(1 << 50)})
    twin = tmp_path / "b"
    twin.write_bytes(path.read_bytes())
    with pytest.raises(MalformedError, match="too large to be read"):
        ckptool.diff(path, twin)
    with pytest.raises(MalformedError, match="too large to be read"):
        ckptool.hash(path)


def test_somebody_who_writes_meanwhile_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", {"x": torch.zeros(5_000_000)})
    twin = tmp_path / "b"
    twin.write_bytes(path.read_bytes())
    with pytest.raises(CkptoolError, match=r"shrank|ends too early|changed"):
        ckptool.diff(path, twin, progress=lambda _: os.truncate(twin, 1000))


# -- bounds -----------------------------------------------------------------------------------------------


def test_what_many_share_is_listed_once(two: Callable[..., dict[str, Any]]) -> None:
    """Lists that meet each other in every combination: what is told grows with their sizes, not with their product."""
    size = 400
    large = list(range(size))
    for turned in (False, True):
        a, b = [large] * size, [[] for _ in range(size)]
        report = two(*((b, a) if turned else (a, b)))
        assert not report["same"]
        assert len(report["only_in_b" if turned else "only_in_a"]) == size and len(report["entries"]) < size
    rings = []
    for length, number in ((101, 1), (103, 2)):
        first = last = [number]
        for _ in range(length - 1):
            last.append([number])  # type: ignore[arg-type]
            last = last[1]  # type: ignore[assignment]
        last.append(first)  # type: ignore[arg-type]
        rings.append(first)
    assert 0 < len(two(*({"x": ring} for ring in rings))["entries"]) <= 101 + 103


# -- folders -------------------------------------------------------------------------------------------------


def test_attributes_of_tensors_are_apart_from_their_values(tmp_path: Path) -> None:
    values = {"parameter": torch.nn.Parameter(torch.randn(3)), "tensor": torch.randn(3)}
    torch.save(values, tmp_path / "a.pth")
    for value in values.values():
        value._has_been_cloned = True  # type: ignore[attr-defined]
    torch.save(values, tmp_path / "b.pth")
    report = ckptool.diff(tmp_path / "a.pth", tmp_path / "b.pth")
    counts = report["tensors"]
    assert (report["same"], counts["differ"], counts["values_differ"], counts["attributes_differ"]) == (False, 0, 0, 2)
    assert [item["path"] for item in report["changed"]] == ["parameter", "tensor"]
    assert report["stat"] == "0 of 2 tensors differ, attributes of 2 tensors differ"
    ignoring = ckptool.diff(tmp_path / "a.pth", tmp_path / "b.pth", ignore=["attributes"])
    assert (ignoring["same"], ignoring["changed"], ignoring["verdict"]) == (True, [], "the same except for attributes")
    with torch.no_grad():
        values["tensor"][1] += 1
    torch.save(values, tmp_path / "c.pth")
    assert [item["path"] for item in ckptool.diff(tmp_path / "a.pth", tmp_path / "c.pth")["values"]] == ["tensor"]
