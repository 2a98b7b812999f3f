"""The part of a checkpoint that --include and --exclude choose, in diff and validate: as if the rest were not there."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_tensors import CUT, saved
from command_line import say
from conftest import CHECKPOINTS, Fixture, by_name, examples
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.base.errors import CkptoolError, TargetError

LISTS = ("only_in_a", "only_in_b", "changed", "values", "sharing", "entries", "order", "tensors", "same")


def told(report: Any) -> dict[str, Any]:
    """What differs, without the paths of the files."""
    return {name: report[name] for name in LISTS}


# -- diff

NAMES = ("stem.weight", "stem.bias", "head.weight", "head.bias", "ema.weight")
TENSORS = st.sampled_from([torch.zeros(2), torch.ones(2), torch.ones(3)])
STATE = st.dictionaries(st.sampled_from(NAMES), TENSORS, min_size=1)
WHOLE = st.fixed_dictionaries(
    {"model": STATE, "epoch": st.integers(0, 1)},
    optional={"hyper": st.fixed_dictionaries({"lr": st.sampled_from([0.1, 0.2]), "betas": st.just([0.9, 0.99])})},
)
PATTERNS = st.lists(
    st.sampled_from(["stem.*", "*.bias", "head.weight", "epoch", "lr", "hyper", "model", "*e*"]), max_size=2
)


def parts(values: list[Any], include: list[str], exclude: list[str], chosen: bool) -> list[Any]:
    """What patterns choose of two dicts, in Python and by keys alone; a dict is in both or in neither."""
    result: list[Any] = [{}, {}]
    for number, value in enumerate(values):
        for name, item in value.items():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude):
                continue
            now = chosen or any(fnmatch.fnmatchcase(name, pattern) for pattern in include)
            if isinstance(item, dict):
                inner = parts([each.get(name, {}) for each in values], include, exclude, now)
                if now or any(inner):
                    result[number][name] = inner[number]
            elif now:
                result[number][name] = item
    return result


@settings(max_examples=examples(200))
@given(WHOLE, WHOLE, PATTERNS, PATTERNS)
def test_it_is_the_difference_of_the_parts(
    tmp_path: Path, a: Any, b: Any, include: list[str], exclude: list[str]
) -> None:
    files = [saved(tmp_path / name, value) for name, value in (("a.pth", a), ("b.pth", b))]
    chosen = parts([a, b], include, exclude, not include)
    try:
        report = ckptool.diff(*files, include=include, exclude=exclude)
    except TargetError as error:
        assert error.what.startswith("no key matches") or (chosen == [{}, {}] and error.what == "every key is excluded")
        return
    cut = [saved(tmp_path / name, value) for name, value in (("c.pth", chosen[0]), ("d.pth", chosen[1]))]
    assert told(report) == told(ckptool.diff(*cut))


def glob_of(path: Path) -> str:
    """A pattern that matches some of the keys of a checkpoint, "" where there are none."""
    try:
        keys = [item["key"] for item in ckptool.keys(path)["tensors"]]
    except CkptoolError:
        return ""
    return f"{keys[len(keys) // 2].partition('.')[0]}*" if keys else ""


every = pytest.mark.parametrize("item", [i for i in CHECKPOINTS if i.path.name not in CUT], ids=by_name)


def test_what_one_file_shares_and_the_other_has_twice(tmp_path: Path) -> None:
    inner = {"w": torch.ones(2), "n": 1}
    shared = saved(tmp_path / "a.pth", {"a": {"x": inner}, "b": {"x": inner}})
    apart = saved(tmp_path / "b.pth", {"a": {"x": inner}, "b": {"x": dict(inner)}})
    for how in ({"include": "b.*"}, {"include": "a"}, {"include": "w"}, {"exclude": "b.x.n"}, {"exclude": "a"}):
        assert ckptool.diff(shared, apart, **how)["same"], how
        assert ckptool.diff(apart, shared, **how)["same"], how
    other = saved(tmp_path / "c.pth", {"a": {"x": inner}, "b": {"x": inner | {"n": 2}}})
    assert ckptool.diff(shared, other, include="a.*")["same"]
    assert [item["path"] for item in ckptool.diff(shared, other, include="n")["entries"]] == ["b.x.n"]
    assert ckptool.diff(shared, other, exclude="b.x.n")["same"]


def test_no_value_is_read_that_is_not_chosen(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.pth", {"x": torch.ones(9), "y": torch.ones(9)})
    b = saved(tmp_path / "b.pth", {"x": torch.zeros(9), "y": torch.ones(9)})
    read: list[int] = []
    assert ckptool.diff(a, b, include="y", progress=read.append)["same"] and sum(read) in (36, 72)


# -- validate

LOOKING = ("prefix", "dtype", "require", "forbid", "finite", "lock", "lock-content")


def looked(path: Path, **policy: Any) -> list[Any]:
    """What the checks say that look at keys."""
    report = ckptool.validate(path, policy)
    return [
        (check["name"], check["status"], [note["message"] for note in check["notes"]])
        for check in report["checks"]
        if check["name"] in LOOKING
    ]


@pytest.mark.sampled(every=4)
@every
def test_a_part_is_as_valid_as_the_kept_file(item: Fixture, tmp_path: Path, out: Path) -> None:
    glob = glob_of(item.path)
    with ckptool.open(item.path) as checkpoint:
        if not glob or [state.path for state in checkpoint.state_dicts] != [""]:
            pytest.skip("not a bare state dict")
        try:
            ckptool.save(ckptool.keep(checkpoint, glob), out)
        except CkptoolError:
            pytest.skip("it is not edited")
    policy: dict[str, Any] = {"prefix": "none", "dtype": ["float64"], "require": ["*bias"], "forbid": [glob[:1] + "*"]}
    assert looked(item.path, **policy, finite=True, include=[glob]) == looked(out, **policy, finite=True)
    assert looked(item.path, require=[glob], exclude=[glob])[0][1] == "fail"
    for file in (item.path, out):  # the lock of the whole, and that of the part
        lock = tmp_path / "lock.json"
        ckptool.write_lock(file, lock, content=True, force=True)
        found = looked(item.path, lock=str(lock), include=[glob])
        assert [(name, status) for name, status, _ in found] == [("lock", "pass"), ("lock-content", "pass")], found


def test_what_is_not_looked_at(tmp_path: Path) -> None:
    state = {"stem.weight": torch.tensor([1.0, float("nan")]), "head.weight": torch.ones(2, dtype=torch.float16)}
    optimizer = {"state": {0: {"exp_avg": torch.tensor([float("inf")])}}}
    path = saved(tmp_path / "a.pth", {"model": state, "optimizer": optimizer, "epoch": 1})
    assert [note for *_, note in looked(path, finite=True, exclude=["optimizer"])] == [['model["stem.weight"]: 1 NaN']]
    assert looked(path, finite=True, include=["head.*"]) == [("finite", "pass", [])]
    assert looked(path, dtype=["float32"], exclude=["head.*"])[0][1] == "pass"
    assert looked(path, forbid=["epoch"], include=["model"])[0][1] == "pass"
    assert looked(path, require=["head.*"], include=["optimizer"])[0][1] == "fail"
    lock = tmp_path / "lock.json"
    ckptool.write_lock(path, lock, content=True)
    other = saved(tmp_path / "b.pth", {"model": state | {"stem.weight": torch.ones(3)}, "optimizer": 3})
    assert [status for _, status, _ in looked(other, lock=str(lock))] == ["fail", "fail"]
    assert [status for _, status, _ in looked(other, lock=str(lock), include=["head.*"])] == ["pass", "pass"]
    more = ["stem.*", "optimizer", "epoch"]
    assert [status for _, status, _ in looked(other, lock=str(lock), exclude=more)] == ["pass", "pass"]
    assert [status for _, status, _ in looked(other, lock=str(lock), exclude=more[:2])] == ["fail", "pass"]


def test_a_pattern_that_matches_no_key_is_not_valid(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", {"head.weight": torch.ones(2)})
    said = say("validate", path, "--dtype", "float16", "--include", "haed.*")
    assert said.code == 1 and "no key matches 'haed.*'; did you mean 'head.*'?" in said.out
    assert say("validate", path, "--dtype", "float16", "--include", "*", "--exclude", "head.*").code == 1
    assert say("validate", path, "--dtype", "float16", "--exclude", "head.*").code == 0
    assert say("validate", path, "--include", "head.*").code == 2, "nothing looks at keys"


def test_a_lock_of_a_part_does_not_make_up_for_checksums(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    ckptool.save(
        ckptool.convert(saved(tmp_path / "a.pth", {"a": torch.ones(2), "b": torch.ones(2)}), "safetensors"), path
    )
    ckptool.write_lock(path, tmp_path / "lock.json", content=True)
    lock = {"lock": str(tmp_path / "lock.json")}
    assert ckptool.validate(path, lock)["inherent"] == []
    assert ckptool.validate(path, lock | {"include": ["a"]})["inherent"] == ["checksums"]
