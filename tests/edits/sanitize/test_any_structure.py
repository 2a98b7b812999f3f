"""Any nesting of objects, arrays and tensors, some of it shared, in any protocol: the naive conversion agrees."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import pathlib
import tempfile
import types
from pathlib import Path
from typing import Any

import foreign_objects as foreign
import numpy as np
import torch
from conftest import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive_sanitize import agrees, saved

KEYS = st.one_of(st.text(max_size=4), st.integers(-3, 3), st.tuples(st.integers(0, 2), st.text(max_size=2)))
NAMES = st.sampled_from(["a", "b", "weight", "lr"])
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
TENSORS = st.builds(
    lambda shape, dtype, grad: torch.ones(shape, dtype=dtype).requires_grad_(grad and dtype.is_floating_point),
    SHAPES,
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.booleans(),
)
ARRAYS = st.builds(
    lambda shape, code, order: np.asarray(np.ones(shape, dtype=code), order=order),
    SHAPES,
    st.sampled_from(["<f4", ">f8", "u2", "?", "c8", ">i2", "U3", "S2", "M8[s]", "O"]),
    st.sampled_from(["C", "F"]),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=6),
    st.binary(max_size=6),
    TENSORS,
    ARRAYS,
    st.builds(lambda code, value: np.dtype(code).type(value), st.sampled_from("fdeilBH?"), st.integers(0, 100)),
    st.sampled_from([pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("C:/x"), decimal.Decimal("1.5")]),
    st.sampled_from([foreign.Mode.EVAL, foreign.Level.LOW, foreign.make, foreign.Text("t"), torch.float16, range(3)]),
    st.builds(datetime.timedelta, seconds=st.integers(-10, 10)),
    st.datetimes(),
    st.frozensets(st.integers(0, 5), max_size=3),
    st.sets(st.text(max_size=2), max_size=3),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    entries = st.dictionaries(KEYS, inner, max_size=3)
    attributes = st.dictionaries(NAMES, inner, max_size=3)
    several = st.lists(inner, max_size=3)
    return st.one_of(
        entries,
        several,
        several.map(tuple),
        several.map(collections.deque),
        # Of an empty one nothing says that it is a list.
        st.lists(inner, min_size=1, max_size=3).map(foreign.Names),
        entries.map(collections.OrderedDict),
        entries.map(foreign.Table),
        entries.map(lambda found: collections.defaultdict(list, found)),
        attributes.map(lambda found: argparse.Namespace(**found)),
        attributes.map(lambda found: types.SimpleNamespace(**found)),
        attributes.map(lambda found: foreign.EasyDict(**found)),
        attributes.map(foreign.Munch),
        attributes.map(lambda found: foreign.DictConfig({name: _plain(value) for name, value in found.items()})),
        st.builds(foreign.Config, st.integers(0, 9), inner),
        st.builds(foreign.Slots, st.integers(0, 9), inner),
        st.builds(foreign.Pair, inner, inner),
        inner.map(lambda shared: [shared, {"again": shared}, shared]),
        inner.map(lambda shared: {"a": argparse.Namespace(x=shared), "b": (shared,)}),
    )


def _plain(value: Any) -> Any:
    """What omegaconf takes: no object stands in a node of its own."""
    return value if isinstance(value, bool | int | str | list) else None


@settings(max_examples=examples(150), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.recursive(LEAVES, containers, max_leaves=12), st.sampled_from([2, 3, 4, 5]), st.booleans())
def test_any_structure(value: Any, protocol: int, legacy: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = saved(Path(folder) / "in.pth", {"value": value, "w": torch.ones(2)}, protocol, legacy)
        agrees(path, Path(folder) / "out.pth")
