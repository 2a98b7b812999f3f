"""hash: names, shapes, dtypes and values decide, and nothing else. The contract is written out here once more."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_tensors import KINDS, as_big_endian, bumped, saved
from command_line import say
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_files import save_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from zip_copies import deflated

import ckptool
from ckptool.base.errors import MalformedError


def content(path: Path, key: str | None = None) -> str:
    return str(ckptool.hash(path, key=key)["content"])


def contract(tensors: dict[str, torch.Tensor]) -> str:
    """The fingerprint of plain tensors by their paths, as the documentation says it is made."""
    lines = []
    for path, tensor in tensors.items():
        digest = hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        line = [path, "dense", str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest]
        lines.append(json.dumps(line, separators=(",", ":")) + "\n")
    return "ckptool:1:" + hashlib.sha256("".join(sorted(lines)).encode("ascii")).hexdigest()


def test_the_contract(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.randn(2, 6).t(), "d": torch.zeros(0, 2)}
    tensors["\u03b1"] = torch.ones(2, dtype=torch.bfloat16)
    path = saved(tmp_path / "a", {**tensors, "n": 3})
    assert content(path) == contract(
        {key: value for key, value in tensors.items() if key != "\u03b1"} | {'["\u03b1"]': tensors["\u03b1"]}
    )
    # Never to change: whoever wrote a fingerprint down relies on it.
    fixed = saved(tmp_path / "b", {"w": torch.arange(6.0).reshape(2, 3)})
    report = ckptool.hash(fixed)
    assert report["content"] == "ckptool:1:dc80263264d5603f3b2c90d39b7700cbcba2da581a9ee9fb8121f108d1994aa9"
    assert report["structure"] == "ckptool-structure:1:a3cd8da0674276fe55231475ee446c716f33e9c23e7b19c72c110c58b0cfc4a9"


STATE = OrderedDict(
    [
        ("conv.weight", torch.randn(4, 3)),
        ("conv.bias", torch.randn(4)),
        ("count", torch.tensor(7)),
        ("e", torch.ones(0)),
    ]
)


def retagged(path: Path) -> Path:
    with ckptool.open(saved(path.with_suffix(".x"), STATE)) as checkpoint:
        ckptool.save(ckptool.remap(checkpoint, "cuda:1"), path)
    return path


def swapped(path: Path) -> Path:
    as_big_endian(saved(path.with_suffix(".x"), STATE), path, {"0": 4, "1": 4, "2": 8})
    return path


POOL = torch.cat([STATE["conv.weight"].flatten(), STATE["conv.bias"]])
SHARED = {"conv.weight": POOL[:12].view(4, 3), "conv.bias": torch.nn.Parameter(POOL[12:])}
STRIDED = {"conv.weight": STATE["conv.weight"].t().contiguous().t()}
#: Other files with the same tensors.
VARIANTS: dict[str, Callable[[Path], Path]] = {
    "legacy": lambda path: saved(path, STATE, _use_new_zipfile_serialization=False),
    "in another order": lambda path: saved(path, OrderedDict(reversed(STATE.items()))),
    "a plain dict with an entry": lambda path: saved(path, dict(STATE) | {"epoch": 3}),
    "with other strides": lambda path: saved(path, STATE | STRIDED),
    "in one storage": lambda path: saved(path, STATE | SHARED),
    "on another device": retagged,
    "deflated": lambda path: deflated(saved(path.with_suffix(".x"), STATE), path),
    "big-endian": swapped,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_else_counts(variant: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", STATE)
    other = VARIANTS[variant](tmp_path / "b.pth")
    assert content(other) == content(path)
    assert ckptool.hash(other, no_values=True)["structure"] == ckptool.hash(path)["structure"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_element_of_any_tensor(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    tensor = KINDS[kind]()
    one, other = saved(tmp_path / "a", {"x": tensor}), saved(tmp_path / "b", {"x": bumped(tensor)})
    assert content(one) != content(other)
    assert ckptool.hash(one)["structure"] == ckptool.hash(other)["structure"]


@settings(max_examples=examples(60))
@given(st.sampled_from(["value", "name", "shape", "dtype", "missing"]), st.data())
def test_each_of_these_counts(tmp_path: Path, what: str, data: Any) -> None:
    name = data.draw(st.sampled_from(["conv.weight", "conv.bias", "count"]))
    state = {key: value.clone() for key, value in STATE.items()}
    if what == "value":
        flat = state[name].view(-1)
        flat[data.draw(st.integers(0, len(flat) - 1))] += 1
    elif what == "name":
        state[name + "x"] = state.pop(name)
    elif what == "shape":
        state[name] = state[name].unsqueeze(0)
    elif what == "dtype":
        state[name] = state[name].view(torch.int32 if name != "count" else torch.float64)
    else:
        del state[name]
    before, after = ckptool.hash(saved(tmp_path / "a", STATE)), ckptool.hash(saved(tmp_path / "b", state))
    assert before["content"] != after["content"]
    assert (before["structure"] == after["structure"]) == (what == "value")


def test_containers_that_hold_each_other_are_refused_in_time(tmp_path: Path) -> None:
    wide: Any = [torch.ones(1)]
    for _ in range(60):
        wide = [wide, wide]
    with pytest.raises(MalformedError, match="too many places"):
        ckptool.hash(saved(tmp_path / "a", wide))
    cycle: list[Any] = [torch.ones(1)]
    cycle.append(cycle)
    assert ckptool.hash(saved(tmp_path / "b", cycle))["tensors"] == 1


def test_copies_that_differ_are_an_answer_of_no(tmp_path: Path) -> None:
    def state(rank: int) -> object:
        mesh = init_device_mesh("cpu", (2,))
        copies = {"w.weight": DTensor.from_local(torch.full((4,), float(rank)), mesh, [Replicate()], run_check=False)}
        return {"model": {"a.weight": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None)}} | (
            {"ema": copies} if differing else {}
        )

    for differing in (False, True):
        folder = save_ranks(tmp_path / f"run{differing}", 2, state)
        said = say("hash", folder)
        assert said.code == differing
        assert said.out.startswith("ckptool:1:")
        assert ("the fingerprint is made of the first copies; which copy is right" in said.err) == differing
        assert ("ema" in str(ckptool.hash(folder).get("unequal_copies"))) == differing
    for options in (["--key", "model"], ["--no-values"]):
        assert say("hash", folder, *options).code == 0
