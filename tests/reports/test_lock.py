"""lock, and validate --lock: a file that says what a checkpoint holds, and what has moved since."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from changed_tensors import CUT, saved
from command_line import say
from conftest import CHECKPOINTS, FIXTURES, Fixture, by_name

import ckptool
from ckptool.base.errors import CkptoolError, OutputError, RefusedError, TargetError
from ckptool.cli.main import run
from ckptool.reports.comparing.lock import lock_text, read_lock

every = pytest.mark.parametrize("item", [i for i in CHECKPOINTS if i.path.name not in CUT], ids=by_name)


def checked(path: Path, lock: Path, **how: Any) -> dict[str, dict[str, Any]]:
    """The checks of the lock, by name."""
    report = ckptool.validate(path, {"lock": str(lock)}, **how)
    return {check["name"]: check for check in report["checks"] if check["name"].startswith("lock")}


def said(path: Path, lock: Path) -> list[str]:
    """What has moved."""
    return [note["message"] for check in checked(path, lock).values() for note in check["notes"]]


@pytest.mark.sampled(every=9)
@every
def test_a_checkpoint_is_as_it_was_locked(item: Fixture, tmp_path: Path) -> None:
    lock = tmp_path / "lock.json"
    try:
        ckptool.write_lock(item.path, lock, content=True)
    except CkptoolError as error:
        assert error.exit_code == 3
        pytest.skip("ckptool does not open it")
    assert {name: check["status"] for name, check in checked(item.path, lock).items()}["lock"] == "pass"
    assert said(item.path, lock) == []
    text = lock.read_text(encoding="ascii")
    found = ckptool.lock(item.path, content=True)
    assert json.loads(text) == found == read_lock(str(lock)).files[""] and lock_text(found) == text


BEFORE: dict[str, Any] = {
    "net": {"z.w": torch.ones(1), "a.w": torch.zeros(2, 3), "a.b": torch.zeros(2)},
    "epoch": 3,
    "ema": [torch.ones(1)],
}


def net(**more: Any) -> dict[str, Any]:
    return BEFORE | {"net": {"z.w": torch.ones(1)} | {name.replace("_", "."): value for name, value in more.items()}}


MOVES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "missing": (net(a_w=torch.zeros(2, 3)), ["net: a.b is missing"]),
    "added": (net(a_w=torch.zeros(2, 3), a_b=torch.zeros(2), c=torch.ones(1)), ["net: c is new: float32 1"]),
    "shape": (net(a_w=torch.zeros(3, 2), a_b=torch.zeros(2)), ["net: a.w: shape 3x2, the lock says 2x3"]),
    "dtype": (
        net(a_w=torch.zeros(2, 3).half(), a_b=torch.zeros(2)),
        ["net: a.w: dtype float16, the lock says float32"],
    ),
    "kind": (
        net(a_w=torch.zeros(2, 3).to_sparse(), a_b=torch.zeros(2)),
        ["net: a.w: kind sparse_coo, the lock says dense"],
    ),
    "type": (net(a_w=torch.zeros(2, 3), a_b="x"), ["net: a.b is str, the lock says float32 2"]),
    "entry type": (BEFORE | {"epoch": 3.0}, ["the entry 'epoch' is float, the lock says int"]),
    "entry missing": ({k: v for k, v in BEFORE.items() if k != "epoch"}, ["the entry 'epoch' is missing"]),
    "entry new": (BEFORE | {"step": 1}, ["the entry 'step' is new: int"]),
    "outside": (BEFORE | {"ema": [torch.ones(2)]}, ["ema[0]: shape 2, the lock says 1"]),
    "root": (OrderedDict(BEFORE), ["the root is OrderedDict, the lock says dict"]),
    "order": (net(a_b=torch.zeros(2), a_w=torch.zeros(2, 3)), []),
    "value": (net(a_w=torch.ones(2, 3), a_b=torch.zeros(2)), []),
}


@pytest.mark.parametrize("name", MOVES)
def test_exactly_what_moved_is_named(name: str, tmp_path: Path) -> None:
    after, expected = MOVES[name]
    lock = tmp_path / "lock.json"
    ckptool.write_lock(saved(tmp_path / "a", BEFORE), lock)
    path = saved(tmp_path / "b", after)
    assert said(path, lock) == expected
    assert run(["validate", str(path), "--lock", str(lock), "-q"]) == bool(expected)


def test_content_is_compared_where_it_is_locked(tmp_path: Path) -> None:
    plain, full = tmp_path / "plain.json", tmp_path / "full.json"
    path = saved(tmp_path / "a", BEFORE)
    ckptool.write_lock(path, plain)
    ckptool.write_lock(path, full, content=True)
    other = saved(tmp_path / "b", net(a_w=torch.zeros(2, 3), a_b=torch.tensor([0.0, 1.0])))
    assert said(other, plain) == [] and said(path, full) == []
    assert said(other, full) == ["net: a.b has other content"]
    quick = checked(other, full, quick=True)
    assert (quick["lock"]["status"], quick["lock-content"]["status"]) == ("pass", "not possible")
    broken = checked(FIXTURES / "zip_missing_storage.pth", full)
    assert broken["lock-content"]["status"] == "fail" and "cannot be read" in broken["lock-content"]["message"]


def damaged(change: Callable[[dict[str, Any]], Any]) -> str:
    lock = ckptool.lock(FIXTURES / "bare.pth")
    return json.dumps(change(lock) or lock)


NO_LOCKS = {
    "empty": "",
    "no JSON": "{",
    "a list": "[]",
    "deep": "[" * 100_000,
    "another schema": damaged(lambda lock: lock.update(schema="ckptool.lock/9")),
    "no layout": damaged(lambda lock: lock.pop("layout") and None),
    "tensors": damaged(lambda lock: lock.update(tensors=[])),
    "a state dict": damaged(lambda lock: lock["state_dicts"].update({"x": 3})),
    "a tensor": damaged(
        lambda lock: lock["tensors"].update({"x": {"dtype": "float32", "shape": "2", "device": "cpu"}})
    ),
    "a shape": damaged(
        lambda lock: lock["tensors"].update({"x": {"dtype": "float32", "shape": [1.5], "device": "cpu"}})
    ),
    "no device": damaged(lambda lock: lock["tensors"].update({"x": {"dtype": "float32", "shape": []}})),
    "an entry": damaged(lambda lock: lock["entries"].update({"x": {}})),
}


@pytest.mark.parametrize("name", NO_LOCKS)
def test_what_is_no_lock_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "lock.json"
    lock.write_text(NO_LOCKS[name], encoding="utf-8")
    with pytest.raises(TargetError):
        ckptool.validate(FIXTURES / "bare.pth", {"lock": str(lock)})
    assert run(["validate", str(FIXTURES / "bare.pth"), "--lock", str(lock)]) == 2
    assert "ckptool lock CHECKPOINT -o LOCK" in capsys.readouterr().err


def test_it_is_written_like_every_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "a.pth", BEFORE)
    with pytest.raises(RefusedError):
        ckptool.write_lock(path, path, force=True)
    with pytest.raises(OutputError):
        ckptool.write_lock(path, tmp_path / "no" / "lock.json")
    lock = tmp_path / "lock.json"
    assert run(["lock", str(path), "-o", str(lock), "-q"]) == 0
    assert run(["lock", str(path), "-o", str(lock)]) == 4
    assert capsys.readouterr().out == ""
    assert run(["lock", str(path)]) == run(["lock", str(path), "-o", "-"]) == 0
    assert capsys.readouterr().out == lock.read_text(encoding="ascii") * 2
    assert sorted(place.name for place in tmp_path.iterdir()) == ["a.pth", "lock.json"]


# -- a folder of releases -------------------------------------------------------------------------------------


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A folder with two checkpoints, one in a subfolder, and its lock beside it."""
    folder = tmp_path / "release"
    (folder / "sub").mkdir(parents=True)
    shutil.copy(FIXTURES / "bare.pth", folder / "a.pth")
    shutil.copy(FIXTURES / "bare_module.pth", folder / "sub" / "b.pth")
    (folder / "README.md").write_text("a release")
    ckptool.write_lock(folder, tmp_path / "lock.json", content=True)
    return folder


def validated(capsys: pytest.CaptureFixture[str], *paths: Path, lock: Path) -> tuple[int, dict[str, list[str]]]:
    """The exit code, and for each file the codes of the notes of its lock checks."""
    capsys.readouterr()
    code = run(["validate", *map(str, paths), "--lock", str(lock), "--format", "jsonl"])
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return code, {
        Path(report["path"]).name: [
            note["code"] for check in report["checks"] if check["name"].startswith("lock") for note in check["notes"]
        ]
        for report in reports
        if report["status"] != "skipped"
    }


def test_a_folder_agrees_with_its_lock_wherever_it_is(
    release: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = release.parent / "lock.json"
    found = json.loads(lock.read_text())
    assert list(found["files"]) == ["a.pth", "sub/b.pth"]
    assert found["files"]["a.pth"] == ckptool.lock(release / "a.pth", content=True)
    assert lock_text(ckptool.lock(release, content=True)) == lock.read_text()
    assert lock.read_text().count('"conv1.weight": {"dtype"') == 1, "a line for each tensor"
    assert validated(capsys, release, lock=lock) == (0, {"a.pth": [], "b.pth": []})
    monkeypatch.chdir(release)
    assert validated(capsys, Path("."), lock=lock)[0] == 0
    moved = release.rename(release.parent / "moved")
    assert validated(capsys, moved, lock=lock)[0] == 0
    # A single file is found by the longest name that its path ends with.
    assert validated(capsys, moved / "sub" / "b.pth", lock=lock) == (0, {"b.pth": []})


def test_missing_and_new_and_changed_files_are_found(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = release.parent / "lock.json"
    shutil.copy(release / "a.pth", release / "new.pth")
    (release / "sub" / "b.pth").rename(release / "b.pth")
    shutil.copy(FIXTURES / "orig_mod_module.pth", release / "a.pth")
    code, found = validated(capsys, release, lock=lock)
    assert code == 1 and set(found["a.pth"]) >= {"lock-missing", "lock-added"}
    assert found["new.pth"] == ["lock-file-added"]
    assert found["b.pth"] == ["lock-file-missing"], "reported last"
    assert run(["validate", str(release), "--lock", str(lock)]) == 1
    out = capsys.readouterr().out
    assert "the lock does not name this file" in out and "there is no such checkpoint" in out
    assert run(["validate", str(release / "new.pth"), "--lock", str(lock)]) == 1


def test_the_lock_of_a_folder_never_replaces_a_checkpoint(release: Path) -> None:
    with pytest.raises(RefusedError):
        ckptool.write_lock(release, release / "a.pth", force=True)
    with pytest.raises(RefusedError):
        ckptool.write_lock(release, release.parent / "lock.json")
    ckptool.write_lock(release, release.parent / "lock.json", force=True)


@pytest.mark.parametrize("inside", [False, True])
def test_a_lock_with_content_covers_storages_that_are_entries(inside: bool, tmp_path: Path) -> None:
    lock = tmp_path / "lock.json"
    for name, more in (("a", 0), ("b", 1)):
        storage = (torch.arange(4.0) + more).untyped_storage()
        value = {"list": [storage]} if inside else {"s": storage}
        torch.save({**value, "w": torch.ones(2)}, tmp_path / f"{name}.pth")
    with ckptool.open(tmp_path / "a.pth") as checkpoint:
        ckptool.write_lock(checkpoint, lock, content=True)
    path = "list[0]" if inside else "s"
    assert json.loads(lock.read_text())["tensors"][path]["kind"] == "storage"
    assert checked(tmp_path / "a.pth", lock)["lock-content"]["status"] == "pass"
    notes = checked(tmp_path / "b.pth", lock)["lock-content"]["notes"]
    assert [note["where"] for note in notes] == [path]
    assert ckptool.diff(tmp_path / "a.pth", tmp_path / "b.pth")["same"] is False


def test_a_part_of_a_model_has_no_lock(tmp_path: Path) -> None:
    """A lock of the other shards would pass for a lock of the whole model."""
    names = [f"model-0000{at}-of-00002.safetensors" for at in (1, 2)]
    index = {"metadata": {}, "weight_map": {f"layer{at}.weight": name for at, name in enumerate(names)}}
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    for at, name in enumerate(names):
        safetensors.torch.save_file({f"layer{at}.weight": torch.zeros(3)}, tmp_path / "m" / name)
    assert say("lock", tmp_path / "m").code == 0
    (tmp_path / "m" / names[1]).unlink()
    for words in ([tmp_path / "m"], [tmp_path / "m", "-o", tmp_path / "lock.json"], [tmp_path / "m", tmp_path / "m"]):
        said = say("lock", *words)
        assert said.code in (3, 4) and "a lock of the rest would pass for the whole" in said.all, said.all
        assert not (tmp_path / "lock.json").exists()
