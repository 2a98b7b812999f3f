"""Objects become the nearest plain thing: dicts of attributes, lists, tuples, strings, numbers."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import functools
import pathlib
import re
import shlex
import types
import uuid
import zoneinfo
from pathlib import Path
from typing import Any

import foreign_objects as foreign
import numpy
import pytest
import torch
from command_line import say
from naive_sanitize import agrees, original, sanitized, saved
from safetensors.torch import save_file
from stand_ins import called, place, put_away

import ckptool
from ckptool.base.errors import RefusedError

Namespace = argparse.Namespace
HOUR = datetime.timedelta(hours=1)

#: Objects that the naive conversion knows: an argument parser's, dataclasses, mappings of other packages.
NAIVE: dict[str, Any] = {
    "namespace": Namespace(lr=0.1, layers=[1, 2], inner=Namespace(w=torch.ones(2)), none=None),
    "simple namespace": types.SimpleNamespace(a=1, b=types.SimpleNamespace(c="x")),
    "dataclass": foreign.Config(3, foreign.Config(4, torch.ones(2))),
    "dataclass with slots": foreign.Slots(3, foreign.Slots(5)),
    "slots": foreign.WithSlots(1, torch.ones(2)),
    "slots and dict": foreign.SlotsAndDict(1, 2, 3),
    "EasyDict": foreign.EasyDict(a=1, b=foreign.EasyDict(c=[foreign.EasyDict(d=2)])),
    "addict": foreign.AddictDict(a=1, b=foreign.AddictDict(c=2)),
    "CfgNode": foreign.CfgNode(A=1, B=foreign.CfgNode(C=[1, 2])),
    "omegaconf": foreign.DictConfig({"a": 1, "b": {"c": [1, {"d": "x"}], "n": None}, "i": "${a}", "m": "???", 3: 1.5}),
    "omegaconf list": foreign.ListConfig([1, [2], {}, "x"]),
    "omegaconf tensor": foreign.DictConfig({"w": torch.ones(2)}),
    "mode": [foreign.Mode.TRAIN, foreign.Mode.EVAL, foreign.Mode.PAIR, foreign.Level.LOW, foreign.Bits.A],
    "mode by name": {foreign.Mode.TRAIN: 1, foreign.Mode.EVAL: 2},
    "named tuple": foreign.Pair(1, [foreign.Pair(2, 3)]),
    "list subclass": foreign.Names([1, 2]),
    "tuple subclass": foreign.Sizes((1, 2)),
    "dict subclass": foreign.Table(a=1),
    "str subclass": foreign.Text("x"),
    "float subclass": foreign.Number(2.5),
    "path": [pathlib.PurePosixPath("/a/b"), pathlib.PosixPath("."), pathlib.PurePosixPath("//a/b")],
    "windows path": [pathlib.PureWindowsPath(text) for text in ("C:/a/b", "C:a", "//server/share/x", "/a", "a")],
    "defaultdict": collections.defaultdict(list, {1: [2], "a": []}),
    "deque": collections.deque([1, "a", torch.ones(1)]),
    "set": {1, "a", (2, b"x")},
    "bytes": [b"", b"a\xff", bytearray(b"xy"), bytearray()],
    "complex": 1 + 2j,
    "datetime": datetime.datetime(2020, 1, 2, 3, 4, 5, 6),
    "datetime in UTC": datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc),
    "datetime with offset": datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone(-5.5 * HOUR)),
    "datetime with microseconds of offset": datetime.datetime(
        2020, 1, 2, tzinfo=datetime.timezone(-datetime.timedelta(seconds=3661, microseconds=5))
    ),
    "time": [datetime.time(1, 2, 3, 4), datetime.time(1, 2, tzinfo=datetime.timezone.utc)],
    "timedelta": [datetime.timedelta(days=-1, microseconds=3), 1000 * HOUR],
    "UUID": uuid.UUID(int=1 << 100),
    "Decimal": decimal.Decimal("1.50"),
    "Fraction": fractions.Fraction(-1, 3),
    "range": [range(3), range(5, 0, -2), range(0)],
    "slice": slice(1, None, 2),
    "pattern": re.compile("a+"),
    "partial": functools.partial(foreign.make, 1, b=torch.ones(2)),
    "function": [foreign.make, len, foreign.Outer],
}
HOWS = [(2, False), (4, False), (5, False), (2, True), (4, True)]


@pytest.mark.parametrize("protocol,legacy", HOWS)
@pytest.mark.parametrize("name", NAIVE)
def test_objects_become_what_a_user_would_make_of_them(
    name: str, protocol: int, legacy: bool, tmp_path: Path, out: Path
) -> None:
    value = {"first": 1, "v": NAIVE[name], "w": torch.ones(2), "again": NAIVE[name]}
    result = agrees(saved(tmp_path / "in.pth", value, protocol, legacy), out)
    assert result.edited or name in ("set", "complex", "bytes")


#: What has no counterpart in Python that one would write: the object, what becomes of it, and what the report says.
SAID: dict[str, tuple[Any, Any, str]] = {
    "frozen dataclass with slots": (foreign.FrozenSlots(3, 4), (3, 4), "research_lab.things.FrozenSlots -> tuple"),
    "a list as state": (foreign.Stateful(1, 2), (1, 2), "Stateful -> tuple, 2 elements"),
    "keywords": (foreign.Keywords(k=3), {"k": 3}, "Keywords -> dict, 1 entry"),
    "exception": (ValueError("x"), "x", "ValueError -> str"),
    "class in a class": (foreign.Outer.Inner, "research_lab.things.Outer.Inner", "research_lab.things.Outer.Inner"),
    "method": (foreign.Outer.method, "research_lab.things.Outer.method", "research_lab.things.Outer.method"),
    "pattern with flags": (re.compile("a", re.I), "a", "its flags are left out"),
    "bounded deque": (collections.deque([1], 5), [1], "list, 1 element; its bound is left out"),
    "zone": (zoneinfo.ZoneInfo("Europe/Berlin"), "Europe/Berlin", "str 'Europe/Berlin'"),
    "range without end": (range(10**9), (0, 10**9, 1), "tuple of start, stop and step"),
    "large integer": (-(1 << 3000), hex(-(1 << 3000)), "an integer of 3,001 bits in hexadecimal"),
    "ellipsis": (..., "builtins.Ellipsis", "builtins.Ellipsis -> its name"),
    "set of what has no hash": ({foreign.Frozen(1)}, [{"width": 1, "inner": None}], "set -> list, its members"),
    "frozen set in a set": ({frozenset((1,))}, [{1}], "set -> list, its members can no longer be hashed"),
    "yacs": (foreign.CfgNode(A=1), {"A": 1}, "dict, 1 entry; left out: __immutable__ and __deprecated_keys__"),
    "struct sequence": (torch.ones(2).max(0), (torch.tensor(1.0), torch.tensor(0)), "torch.return_types.max -> tuple"),
}


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("name", SAID)
def test_what_is_said_of_objects_without_a_counterpart(name: str, protocol: int, tmp_path: Path, out: Path) -> None:
    value, expected, words = SAID[name]
    result = sanitized(saved(tmp_path / "in.pth", {"v": value, "w": torch.ones(2)}, protocol), out)
    assert repr(result.loaded["v"]) == repr(expected)
    assert words.replace("builtins.frozenset", "frozenset") in result.what("v")


def test_objects_that_lead_to_themselves_still_do(tmp_path: Path, out: Path) -> None:
    config = Namespace(name="x")
    config.me, config.list = config, [config]
    loaded = sanitized(saved(tmp_path / "in.pth", {"v": config}), out, loops=True).loaded
    assert loaded["v"]["me"] is loaded["v"] is loaded["v"]["list"][0]


REFUSED: dict[str, tuple[Any, str]] = {
    "what a function makes": ({"v": foreign.Made()}, "v (research_lab.things.make)"),
    "a key that is a dict by now": ({"v": {foreign.Frozen(1): 2}}, "v (a key that cannot be hashed)"),
    "a frozen set as a key": ({"v": {frozenset((1,)): 2}}, "v (a key that cannot be hashed)"),
    "two keys that are one by now": ({foreign.Mode.TRAIN: 1, 1: 2}, "the root (a key that equals another one"),
    "a path and its text as keys": ({"v": {pathlib.PurePosixPath("a"): 1, "a": 2}}, "v (a key that equals"),
    "a method of an object": ({"v": [1].append}, "v (builtins.getattr)"),
    "a parameter without a value": (torch.nn.LazyLinear(2).state_dict(), "UninitializedParameter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_is_refused_and_named(name: str, tmp_path: Path, out: Path) -> None:
    value, words = REFUSED[name]
    path = saved(tmp_path / "in.pth", value)
    with pytest.raises(RefusedError) as refusal:
        sanitized(path, out)
    assert words in str(refusal.value)
    assert refusal.value.next == "drop_unknown=True leaves them out"
    assert not out.exists()


def test_drop_unknown_takes_entries_out_of_mappings_and_leaves_none_in_lists(tmp_path: Path, out: Path) -> None:
    made = foreign.Made()
    tagged = torch.nn.Parameter(torch.ones(2))
    tagged.tag = made
    value = {
        "v": made,
        "list": [1, made, 2],
        "tuple": (made, 1),
        "set": {made, 2},
        "key": {made: 1, "k": 2},
        "ordered": collections.OrderedDict(a=made, b=1),
        "object": Namespace(x=made, y=1),
        "default": collections.defaultdict(int, {"a": made, "b": 2}),
        "tagged": tagged,
        "w": torch.ones(2),
    }
    result = sanitized(saved(tmp_path / "in.pth", value), out, drop_unknown=True)
    loaded = result.loaded
    assert torch.equal(loaded.pop("w"), torch.ones(2))
    assert torch.equal(loaded["tagged"], torch.ones(2)) and not hasattr(loaded.pop("tagged"), "tag")
    assert loaded == {
        "list": [1, None, 2],
        "tuple": (None, 1),
        "set": {2},
        "key": {"k": 2},
        "ordered": {"b": 1},
        "object": {"y": 1},
        "default": {"b": 2},
    }
    assert result.what("v") == "research_lab.things.make: dropped"


@pytest.mark.parametrize("protocol", [2, 4])
def test_subclasses_of_tensors_become_plain_tensors(protocol: int, tmp_path: Path, out: Path) -> None:
    boxes = torch.arange(8.0).reshape(2, 4).as_subclass(foreign.Boxes)
    boxes.order = "xyxy"
    path = saved(tmp_path / "in.pth", {"v": boxes, "w": boxes.as_subclass(torch.Tensor)[1:]}, protocol)
    result = sanitized(path, out)
    assert type(result.loaded["v"]) is torch.Tensor and not hasattr(result.loaded["v"], "order")
    assert torch.equal(result.loaded["v"], original(path)["w"].new_tensor(range(8)).reshape(2, 4))
    assert result.what("v") == "research_lab.things.Boxes -> plain tensor; its attributes are left out"
    assert result.loaded["w"].data_ptr() == result.loaded["v"].data_ptr() + 16


class Backed:
    """As Cython pickles a class: a function, its arguments, and a state that is a tuple."""

    def __reduce__(self) -> Any:
        function = place("pandas._libs.internals.pyx_unpickle_Backed", lambda *_: None)
        return function, (Namespace, 7, None), ("dtype", numpy.arange(2))


def test_what_a_function_makes_of_its_arguments_alone_becomes_these(tmp_path: Path, out: Path) -> None:
    """As pandas pickles a block, and Cython a class."""
    block = called("pandas._libs.internals._unpickle_block", numpy.arange(3.0), slice(0, 1), 2)
    torch.save({"block": block, "backed": Backed()}, tmp_path / "in.pth")
    put_away()
    loaded = sanitized(tmp_path / "in.pth", out).loaded
    values, rows, dimensions = loaded["block"]
    assert values.tolist() == [0, 1, 2] and rows == (0, 1, None) and dimensions == 2
    assert [*loaded["backed"][1:4], loaded["backed"][4].tolist()] == [7, None, "dtype", [0, 1]]


def test_a_parameter_that_sets_its_own_values_again_is_followed(tmp_path: Path, out: Path) -> None:
    """``Params4bit`` of bitsandbytes has its values among its attributes."""
    weight = torch.nn.Parameter(torch.arange(4.0), requires_grad=False)
    weight.quant_state = {"absmax": torch.ones(2)}  # type: ignore[attr-defined]
    state = {**weight.__dict__, "data": weight.data, "requires_grad": False}
    weight.__getstate__ = lambda: state  # type: ignore[method-assign]
    torch.save({"w": SetsItself(weight, state), "x": 1}, tmp_path / "in.pth")
    loaded = sanitized(tmp_path / "in.pth", out).loaded
    assert loaded["w"].tolist() == [0, 1, 2, 3] and loaded["w"].quant_state["absmax"].tolist() == [1, 1]
    torch.save({"w": SetsItself(weight, {**state, "data": torch.zeros(4)})}, tmp_path / "other.pth")
    with pytest.raises(ckptool.CkptoolError, match="special attribute"):
        ckptool.convert(tmp_path / "other.pth", "safetensors")


class SetsItself:
    def __init__(self, weight: torch.Tensor, state: dict[str, Any]) -> None:
        self.weight, self.state = weight, state

    def __reduce__(self) -> Any:
        rebuild = torch._utils._rebuild_parameter_with_state
        return rebuild, (self.weight.data, False, collections.OrderedDict(), self.state)


def test_files_beside_the_weights_become_plain_too(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    save_file({"a.weight": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    state = {"numpy": numpy.random.RandomState(1).get_state(), "cpu": torch.get_rng_state()}
    torch.save(state, folder / "rng_state.pth")
    torch.save({"state": {}}, folder / "optimizer.pt")
    (finding,) = [item for item in ckptool.inspect(folder)["findings"] if item["code"] == "weights-only"]
    assert "rng_state.pth" in finding["message"] and "optimizer.pt" not in finding["message"]
    line = finding["next"]
    assert line == ckptool.validate(folder)["next"] and say(*shlex.split(line)[1:]).code == 0
    out = tmp_path / "checkpoint-5.loadable"
    loaded = torch.load(out / "rng_state.pth")
    numpy.random.RandomState().set_state(loaded["numpy"])
    assert torch.equal(loaded["cpu"], state["cpu"])
    assert (out / "optimizer.pt").read_bytes() == (folder / "optimizer.pt").read_bytes()
    assert all(item["code"] != "weights-only" for item in ckptool.inspect(out)["findings"])
    assert ckptool.validate(out)["warnings"] == 0


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_of_python_3_13_have_their_raw_parts(module: str, tmp_path: Path, out: Path) -> None:
    class PosixPath:
        def __reduce__(self) -> Any:
            return PosixPath, ("/a/b/", "c//d", "./e")

    PosixPath.__module__, PosixPath.__qualname__ = module, "PosixPath"
    made = types.ModuleType(module)
    made.PosixPath = PosixPath  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, module, made)
        torch.save({"p": PosixPath()}, tmp_path / "in.pth")
    assert sanitized(tmp_path / "in.pth", out).loaded == {"p": "/a/b/c/d/e"}
