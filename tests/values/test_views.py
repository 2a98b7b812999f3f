"""A checkpoint as a mapping: what torch loads, by the same keys, read-only and read on access."""

from __future__ import annotations

import argparse
import gc
import os
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import FIXTURES, LOADABLE, Fixture, by_name, corpus_files, examples, needs_corpus
from crafted_files import Code, legacy
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptool

pytestmark = pytest.mark.filterwarnings("ignore")

#: Torch reads another pickle of it than the one that counts.
WHOLE = [item for item in LOADABLE if item.path.name != "zip_two_pickles.pth"]
every = pytest.mark.parametrize("item", WHOLE, ids=by_name)


def difference(mine: Any, theirs: Any, path: str = "") -> str:
    """Where a view and what torch loads differ; objects are not compared, tensors by dtype, shape and device."""
    if isinstance(theirs, torch.Tensor):
        if not isinstance(mine, ckptool.TensorValue):
            return f"{path}: {mine!r} is not a tensor"
        ours = (mine.dtype, None if theirs.is_nested else mine.shape)
        return "" if ours == (str(theirs.dtype)[6:], None if theirs.is_nested else theirs.shape) else f"{path}: {mine}"
    if isinstance(theirs, dict):
        if not isinstance(mine, Mapping) or isinstance(mine, ckptool.ObjectValue):
            return f"{path}: {mine!r} is not a mapping"
        if list(map(typed, mine)) != list(map(typed, theirs)) or len(mine) != len(theirs):
            return f"{path}: keys {list(mine)[:5]} against {list(theirs)[:5]}"
        pairs = zip(mine.items(), theirs.values())
        return next(filter(None, (difference(value, other, f"{path}.{key}") for (key, value), other in pairs)), "")
    if type(theirs) in (list, tuple, torch.Size):
        expected = ckptool.ListView if type(theirs) is list else tuple
        if not isinstance(mine, expected) or len(mine) != len(theirs):
            return f"{path}: {mine!r} against {theirs!r}"
        return next(filter(None, (difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(mine, theirs)))), "")
    if isinstance(theirs, set):
        return "" if mine == theirs else f"{path}: {mine!r} against {theirs!r}"
    if theirs is None or type(theirs) in (bool, int, float, str, bytes, complex):
        same = type(mine) is type(theirs) and (mine == theirs or mine != mine)
        return "" if same else f"{path}: {mine!r} against {theirs!r}"
    return ""


def typed(key: Any) -> Any:
    """A key and its type; NaN by its name, others that need a module not at all."""
    if isinstance(key, tuple):
        return tuple(map(typed, key))
    plain = key is None or isinstance(key, bool | int | float | str | bytes | complex | frozenset)
    return (type(key), repr(key)) if plain and not isinstance(key, str) else key if plain else "other"


def compare(path: Path) -> None:
    loaded = oracle.load(path)
    with ckptool.open(path) as checkpoint:
        if isinstance(loaded, list | tuple):
            loaded = dict(enumerate(loaded))
        if isinstance(loaded, dict):
            assert difference(checkpoint, loaded) == ""
        elif isinstance(loaded, torch.Tensor):
            assert (len(checkpoint), list(checkpoint)) == (0, [])


@every
def test_every_fixture_is_the_mapping_that_torch_loads(item: Fixture) -> None:
    compare(item.path)


@needs_corpus
@pytest.mark.parametrize("path", corpus_files(), ids=lambda path: path.name)
def test_every_real_checkpoint_is(path: Path) -> None:
    oracle.skip_unless_read(path)
    compare(path)


KEYS = st.one_of(
    st.text(max_size=4),
    st.integers(-3, 3),
    st.booleans(),
    st.none(),
    st.binary(max_size=3),
    st.floats(allow_nan=False),
    st.sampled_from(("0", "1", "True", "None", "[0]", "#0", "a.b", b"a", "b'a'")),
    st.tuples(st.integers(0, 2), st.text(max_size=2)),
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(st.one_of(st.integers(0, 3), st.text(max_size=2)), max_size=3),
    ),
    max_leaves=12,
)


@settings(max_examples=examples(200))
@given(value=st.dictionaries(KEYS, VALUES, max_size=5), protocol=st.integers(2, 5))
def test_any_dict_is_itself(value: dict[Any, Any], protocol: int, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "a.pth", pickle_protocol=protocol)
    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        assert difference(checkpoint, value) == ""
        for key in value:
            assert key in checkpoint and key in list(checkpoint.keys())
            assert difference(checkpoint.get(key), value[key]) == ""
        assert "no such key" not in checkpoint and checkpoint.get("no such key", 7) == 7
        assert repr(checkpoint) and all(repr(item) for item in checkpoint.values())


def test_keys_keep_their_types(tmp_path: Path) -> None:
    value = {0: "int", "0": "text", b"0": "bytes", (0,): "tuple", None: "none", 0.5: "float"}
    torch.save({"in": value, **value}, tmp_path / "a.pth")
    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        for key, text in value.items():
            assert checkpoint[key] == checkpoint["in"][key] == text
        assert checkpoint["in"] == value
        with pytest.raises(KeyError):
            checkpoint["absent"]
        with pytest.raises(TypeError):
            checkpoint[[]]  # type: ignore[index]


def test_it_is_read_only() -> None:
    with ckptool.open(FIXTURES / "ddp4_training.pth") as checkpoint:
        for place in (checkpoint, checkpoint["state_dict"], checkpoint["optimizer"]["param_groups"]):
            with pytest.raises(TypeError):
                place[0] = 1
        assert checkpoint["state_dict"] is checkpoint["state_dict"]


def test_objects_are_mappings_of_their_attributes(tmp_path: Path) -> None:
    torch.save({"args": argparse.Namespace(lr=0.1, nested=argparse.Namespace(x=[1]))}, tmp_path / "a.pth")
    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        args = checkpoint["args"]
        assert (args.cls, list(args), args["lr"]) == ("argparse.Namespace", ["lr", "nested"], 0.1)
        assert args["nested"]["x"] == [1] and args["nested"].attributes["x"][0] == 1
        assert "Namespace, 2 attributes" in repr(args)


def test_what_is_in_itself_ends(tmp_path: Path) -> None:
    loop: dict[str, Any] = {"a": [1, {}]}
    loop["a"].append(loop["a"])
    loop["self"] = loop
    torch.save(loop, tmp_path / "a.pth")
    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        assert checkpoint["self"]["self"]["a"][2][2][0] == 1
        assert len(repr(checkpoint["self"])) < 200


def test_depth_is_no_recursion(tmp_path: Path) -> None:
    depth = 10_000
    (tmp_path / "a.pth").write_bytes(legacy({"a": Code(b"(" * depth + b"K\x01" + b"t" * depth)}, {}))
    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        value, levels = checkpoint["a"], 0
        while isinstance(value, tuple):
            value, levels = value[0], levels + 1
        assert (value, levels) == (1, depth)


def test_what_is_not_followed_raises_and_still_has_a_repr() -> None:
    with ckptool.open(FIXTURES / "legacy_protocol0.pth") as checkpoint:
        assert repr(checkpoint)
    for item in sorted(FIXTURES.iterdir()):
        try:
            opened = ckptool.open(item)
        except ckptool.CkptoolError:
            continue
        with opened as checkpoint:
            assert repr(checkpoint).startswith("<Checkpoint ")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="there is no list of open files")
def test_a_file_that_is_no_longer_used_is_closed_at_once() -> None:
    gc.disable()
    try:
        checkpoint = ckptool.open(FIXTURES / "ddp4_training.pth")
        assert checkpoint["epoch"] == 41 and checkpoint["state_dict"]["module.head.bias"].numel
        source = weakref.ref(checkpoint.source)
        del checkpoint
        assert source() is None
    finally:
        gc.enable()
