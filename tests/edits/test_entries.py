"""extract, wrap, drop, keep and set against the same edits in Python on what torch loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import FIXTURES, Fixture
from output_checks import at, edited, every, saved

import ckptool
from ckptool.base.errors import RefusedError, TargetError
from ckptool.checkpoint.paths import parse_path


@every
def test_extract_and_wrap(item: Fixture, out: Path) -> None:
    with ckptool.open(item.path) as checkpoint:
        paths = [found.path for found in checkpoint.state_dicts if found.path]
    for path in paths:
        found = edited(item.path, out, lambda checkpoint, path=path: ckptool.extract(checkpoint, path))
        assert oracle.difference(at(oracle.load(item.path), parse_path(path)), found) == ""
    found = edited(item.path, out, lambda checkpoint: ckptool.wrap(checkpoint, "inner"))
    assert oracle.difference({"inner": oracle.load(item.path)}, found) == ""


def first_keys(path: Path) -> list[str]:
    loaded = oracle.load(path)
    return [key for key in loaded if isinstance(key, str)] if isinstance(loaded, dict) else []


@every
def test_drop_and_keep(item: Fixture, out: Path) -> None:
    names = [name for name in first_keys(item.path) if not set(name) & set("*?")]
    if len(names) < 2:
        pytest.skip("it has no two entries")
    gone = names[0]
    with ckptool.open(item.path) as checkpoint:
        bare = any(found.path == "" for found in checkpoint.state_dicts)
        inner = any(entry.key == gone for entry in checkpoint.survey.tensors if entry.path != gone)
    if inner and not bare:
        pytest.skip("a key within a state dict has the same name, and goes too")
    expected = oracle.load(item.path)
    del expected[gone]
    assert oracle.difference(expected, edited(item.path, out, lambda c: ckptool.drop(c, [gone]))) == ""
    kept = oracle.load(item.path)
    for name in list(kept):
        if name != gone:
            del kept[name]
    assert oracle.difference(kept, edited(item.path, out, lambda c: ckptool.keep(c, [gone]))) == ""


def test_keep_keeps_what_matches_and_is_no_tensor(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "model.pth"
    state = {"net.weight": torch.ones(2), "net._extra_state": {"scale": 2}, "head.weight": torch.ones(2)}
    torch.save(state, path)
    ckptool.save(ckptool.keep(path, "net.*"), out)
    assert list(torch.load(out)) == ["net.weight", "net._extra_state"]


def test_an_entry_whose_name_begins_another_goes(tmp_path: Path, out: Path) -> None:
    value = {"net": {"a.w": torch.ones(1)}, "net_ema": {"b.w": torch.ones(2), "c.w": torch.ones(3)}, "epoch": 1}
    path = saved(value, tmp_path / "in.pth")
    found = edited(path, out, lambda c: ckptool.keep(c, ["b.*", "epoch"]))
    assert oracle.difference({"net_ema": {"b.w": torch.ones(2)}, "epoch": 1}, found) == ""


@pytest.mark.parametrize("value", [None, True, 7, -(1 << 70), 0.25, "text", ""])
def test_set_and_drop(value: Any, out: Path) -> None:
    path = FIXTURES / "ddp4_training.pth"
    expected = oracle.load(path)
    expected["epoch"] = value
    expected["added"] = value
    result = edited(path, out, lambda c: ckptool.set(ckptool.set(c, "epoch", value), "added", value))
    assert oracle.difference(expected, result) == ""
    del expected["added"], expected["epoch"], expected["optimizer"]["param_groups"][0]["lr"]
    inside = 'optimizer.param_groups[0]["lr"]'
    assert oracle.difference(expected, edited(path, out, lambda c: ckptool.drop(c, ["epoch", inside]))) == ""


def test_the_bytes_of_what_is_dropped_are_gone(out: Path, tmp_path: Path) -> None:
    path = tmp_path / "secret.pth"
    secret = torch.frombuffer(bytearray(b"a secret that must go" * 9), dtype=torch.uint8)
    torch.save({"keep": torch.ones(3), "gone": {"secret": secret, "name": "nobody knows"}}, path)
    edited(path, out, lambda c: ckptool.drop(c, ["gone"]))
    assert b"a secret" in path.read_bytes()
    assert b"a secret" not in out.read_bytes()
    assert b"nobody knows" not in out.read_bytes()


def test_what_matches_nothing_is_refused() -> None:
    with ckptool.open(FIXTURES / "bare.pth") as checkpoint:
        for edit in (ckptool.drop, ckptool.keep):
            with pytest.raises(RefusedError, match="nothing matches 'no'"):
                edit(checkpoint, ["conv1.*", "no"])
        with pytest.raises(TargetError):
            ckptool.extract(checkpoint, "nowhere")
        with pytest.raises(TargetError):
            ckptool.set(checkpoint, "nowhere.at.all", 3)


def test_dotted_paths_are_taken_where_no_key_matches_them(tmp_path: Path) -> None:
    """``model.fc.*`` means ``model["fc.*"]``, unless keys begin with ``model.`` themselves."""
    inside, plain = {"fc.weight": torch.ones(2), "head.weight": torch.ones(2)}, tmp_path / "plain.pth"
    torch.save({"model": inside, "epoch": 1}, plain)
    assert [*ckptool.drop(plain, "model.fc.*")["model"]] == ["head.weight"]
    assert [*ckptool.keep(plain, "model.fc.*")["model"]] == ["fc.weight"]
    assert [*ckptool.drop(plain, "model.*", exclude="model.fc.*")["model"]] == ["fc.weight"]
    assert [each["key"] for each in ckptool.keys(plain, include="model.fc.*")["tensors"]] == ["fc.weight"]
    assert [each["key"] for each in ckptool.keys(plain, exclude="model.fc.*")["tensors"]] == ["head.weight"]
    half = ckptool.cast(plain, torch.float16, include="model.fc.*")["model"]
    assert (half["fc.weight"].dtype, half["head.weight"].dtype) == ("float16", "float32")
    other = tmp_path / "other.pth"
    torch.save({"model": {**inside, "fc.weight": torch.zeros(2)}, "epoch": 1}, other)
    assert ckptool.diff(plain, other, include="model.head.*")["same"]
    assert not ckptool.diff(plain, other, include="model.fc.*")["same"]
    mixed = tmp_path / "mixed.pth"  # a key without a dot has a path that the pattern matches as it is typed
    torch.save({"model": {**inside, "token": torch.ones(2)}, "epoch": 1}, mixed)
    assert [*ckptool.keep(mixed, "model.*")["model"]] == ["fc.weight", "head.weight", "token"]
    assert not ckptool.drop(mixed, "model.*").survey.tensors
    assert len(ckptool.keys(mixed, include="model.*")["tensors"]) == 3
    assert [each["key"] for each in ckptool.keys(mixed, exclude="model.{fc.*,token}")["tensors"]] == ["head.weight"]
    own = tmp_path / "own.pth"
    torch.save({"model": {"model.fc": torch.ones(2), "lm_head.weight": torch.ones(2)}}, own)
    assert [*ckptool.drop(own, "model.*")["model"]] == ["lm_head.weight"]


def test_patterns_to_keep_in_a_row_are_one_edit() -> None:
    """Otherwise the second would drop the weights that the first kept."""
    path = FIXTURES / "ddp4_training.pth"
    row = ckptool.edit(path, [("keep", "*.head.*"), ("keep", "epoch"), ("keep", "state_dict")])
    assert (row.survey.tensors, list(row)) == (
        (one := ckptool.edit(path, [("keep", "*.head.*,epoch,state_dict")])).survey.tensors,
        list(one),
    )
    assert {entry.key for entry in row.survey.tensors} == {"module.head.weight", "module.head.bias"}
    apart = [("keep", "epoch,state_dict"), ("key", "state_dict"), ("keep", "*.head.*")]
    assert len(ckptool.edit(path, apart).survey.tensors) == 2


def test_the_path_of_an_entry_is_no_pattern_for_others(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(2)}, 5: torch.ones(2), "5": torch.ones(2)}, tmp_path / "five.pth")
    assert [*ckptool.drop(tmp_path / "five.pth", "[5]")] == ["model", "5"]
