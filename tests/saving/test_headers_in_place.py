"""Headers edited in place: the library reads what the edit says, and every edit can be taken back, killed or not."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from command_line import say
from conftest import ROOT, WHOLE
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import ckptool
from ckptool.base.errors import RefusedError

TENSORS = {"m.weight": torch.arange(12.0).reshape(3, 4), "m.bias": torch.ones(3), "n": torch.zeros(2, dtype=torch.int8)}
TEXTS = {"format": "pt", "epoch": "3", "modelspec.title": "old \u00e4", "ss_dir": "/home/alice/out", "ss_steps": "7"}
JOURNAL = ".ckptool-undo"
Edited = Callable[[ckptool.Checkpoint], ckptool.Checkpoint]


def made(path: Path, texts: Mapping[str, str] | None = TEXTS) -> Path:
    save_file(TENSORS, path, metadata=None if texts is None else dict(texts))
    return path


def read(path: Path) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """The texts and the values, as the library reads them."""
    with safe_open(path, "pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118


VALUES = {name: tensor.tolist() for name, tensor in TENSORS.items()}


class Case(NamedTuple):
    steps: list[tuple[str, Any]]
    texts: dict[str, str | None]
    names: Mapping[str, str] = {}


CASES = {
    "set": Case([("set", "epoch=4")], {"epoch": "4"}),
    "text as typed": Case([("set", "__metadata__.epoch=1.10")], {"epoch": "1.10"}),
    "name with a dot": Case([("set", "modelspec.title=new")], {"modelspec.title": "new"}),
    "quoted": Case([("set", '__metadata__["modelspec.title"]=a=b')], {"modelspec.title": "a=b"}),
    "added": Case([("set", "__metadata__.a b.c=\u20ac")], {"a b.c": "\u20ac"}),
    "longer": Case([("set", "epoch=" + "x" * 5000)], {"epoch": "x" * 5000}),
    "dropped": Case([("drop", "epoch")], {"epoch": None}),
    "by pattern": Case([("drop", "__metadata__.ss_*")], {"ss_dir": None, "ss_steps": None}),
    "by expression": Case([("drop", r"re:__metadata__\.(ss_dir|epoch)")], {"ss_dir": None, "epoch": None}),
    "all": Case([("drop", "__metadata__")], {name: None for name in TEXTS if name != "format"}),
    "format": Case([("drop", "__metadata__.format")], {"format": None}),
    "redacted": Case([("redact", "paths")], {"ss_dir": "out"}),
    "renamed": Case([("rename", "m.*=a.m.*")], {}, {"m.weight": "a.m.weight", "m.bias": "a.m.bias"}),
    "stripped": Case([("strip-prefix", "m.")], {}, {"m.weight": "weight", "m.bias": "bias"}),
    "several": Case(
        [("set", "epoch=4"), ("drop", "__metadata__.ss_*"), ("strip-prefix", "m."), ("set", "__metadata__.by=me")],
        {"epoch": "4", "ss_dir": None, "ss_steps": None, "by": "me"}, {"m.weight": "weight", "m.bias": "bias"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_library_reads_what_the_edit_says(case: Case, tmp_path: Path) -> None:
    """In place and to a new file; then the former bytes are back."""
    path, out = made(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    whole, inode = path.read_bytes(), path.stat().st_ino
    texts = {name: text for name, text in {**TEXTS, **case.texts}.items() if text is not None}
    values = {case.names.get(name, name): value for name, value in VALUES.items()}
    with ckptool.open(path) as checkpoint:
        edited = ckptool.edit(checkpoint, case.steps)
        ckptool.save(edited, out)
        saved = ckptool.save_in_place(edited, force=True)
    assert read(path) == read(out) == (texts, values)
    size = int.from_bytes(whole[:8], "little")
    if saved.size == len(whole):
        assert path.stat().st_ino == inode and path.read_bytes()[8 + size :] == whole[8 + size :]
        assert path.read_bytes()[:8] == whole[:8]
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    assert Path(saved.journal) == path.with_name(path.name + JOURNAL) and ckptool.validate(path)["valid"]
    assert [version["bytes"] for version in ckptool.history(path)["versions"]] == [len(whole), saved.size]
    assert ckptool.undo(path)["output_bytes"] == len(whole)
    assert path.read_bytes() == whole and not Path(saved.journal).exists()
    assert [entry.name for entry in tmp_path.iterdir() if entry not in (path, out)] == []


@pytest.mark.parametrize("seed", range(6))
def test_many_edits_are_taken_back_one_by_one(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    path = made(tmp_path / "in.safetensors", {} if seed == 0 else TEXTS)
    texts, values = read(path)
    states = [path.read_bytes()]
    words = ["epoch", "a", "x" * 40, 'q"\\', "\u00e9\U0001f600", "tab\t", "__metadata__", "1"]
    for number in range(12):
        name, value = chance.choice([*texts, *words]), chance.choice(words) * chance.choice((0, 1, 30))
        old = chance.choice(sorted(values))
        edit: Edited
        if chance.random() < 0.3 and name in texts:
            del texts[name]
            edit = partial(ckptool.drop, globs=f"__metadata__.{name}")
        elif chance.random() < 0.7:
            texts[name] = value
            edit = partial(ckptool.set, key=f"__metadata__.{name}", value=value)
        else:
            values = {f"k{number}" if key == old else key: each for key, each in values.items()}
            edit = partial(ckptool.rename, table={old: f"k{number}"})
        with ckptool.open(path) as checkpoint:
            edited = edit(checkpoint)
            if not edited.edited:
                continue
            ckptool.save_in_place(edited, force=True)
        states.append(path.read_bytes())
        assert read(path) == (texts, values)
    assert [version["bytes"] for version in ckptool.history(path)["versions"]] == list(map(len, states))
    for left, state in reversed(list(enumerate(states[:-1]))):
        assert ckptool.undo(path)["left"] == left and path.read_bytes() == state
    assert len(ckptool.history(path)["versions"]) == 1


def test_a_header_that_does_not_fit_needs_a_word(tmp_path: Path) -> None:
    path = made(tmp_path / "in.safetensors")
    whole = path.read_bytes()
    line = ["edit", str(path), "--set", "epoch=" + "x" * 900, "--in-place"]
    refused = say(*line)
    assert refused.code == 4 and "must be written again; to do that, add --force" in refused.err
    assert path.read_bytes() == whole and [*tmp_path.iterdir()] == [path]
    other = tmp_path / "other"
    os.link(path, other)
    assert "has 2 names" in say(*line, "--force").err
    other.unlink()
    assert say(*line, "--force").code == 0 and read(path)[0]["epoch"] == "x" * 900
    assert say("undo", path).code == 0 and path.read_bytes() == whole
    for edit, what in (("drop", "n"), ("set", "new=1")):
        refused = say("edit", path, f"--{edit}", what, "--in-place", "--force")
        assert refused.code == 4 and path.read_bytes() == whole, refused
    assert say("edit", path, "--set", "__metadata__=1", "--in-place").code == 2


def test_a_file_that_another_program_wrote_since(tmp_path: Path) -> None:
    path = made(tmp_path / "in.safetensors")
    assert say("edit", path, "--set", "epoch=4", "--in-place").code == 0
    made(path, {"format": "pt", "other": "1"})
    assert len(ckptool.history(path)["versions"]) == 1 and ckptool.undo(path)["undone"] == []
    assert say("edit", path, "--set", "other=2", "--in-place").code == 0
    assert len(ckptool.history(path)["versions"]) == 2 and ckptool.undo(path)["left"] == 0
    assert read(path)[0]["other"] == "1"


def test_a_journal_is_no_link_and_of_no_hostile_size(tmp_path: Path) -> None:
    path, target = made(tmp_path / "in.safetensors"), tmp_path / "precious"
    journal = path.with_name(path.name + JOURNAL)
    target.write_text("precious")
    journal.symlink_to(target)
    assert say("edit", path, "--set", "epoch=4", "--in-place").code == 5
    assert target.read_text() == "precious" and read(path)[0]["epoch"] == "3"
    journal.unlink()
    for line in (
        b'[9e9, 1, 1, "", 1]\n',
        b"[" * 99999,
        b'[999999999999, 1, 1, "", 1]\n' + b"x" * 99,
        b"[-1,-1,0,0,0]\n",
    ):
        journal.write_bytes(b"\0ckptool-undo\n" + line)
        assert len(ckptool.history(path)["versions"]) == 1
        assert say("edit", path, "--set", "epoch=4", "--in-place").code == 0 and ckptool.undo(path)["left"] == 0


# -- shards


def sharded(folder: Path, texts: Mapping[str, str] = TEXTS) -> tuple[Path, Path]:
    """A folder of two shards, and their index as transformers writes it."""
    folder.mkdir()
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_file({name: TENSORS[name] for name in ("m.weight", "m.bias")}, folder / files[0], metadata=dict(texts))
    save_file({"n": TENSORS["n"]}, folder / files[1], metadata={"format": "pt"})
    places = {"m.bias": files[0], "m.weight": files[0], "n": files[1]}
    index = {"metadata": {"total_size": 62, "m.bias": "m.bias"}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return folder / files[0], folder / "model.safetensors.index.json"


def test_the_index_follows_a_shard(tmp_path: Path) -> None:
    shard, index = sharded(tmp_path / "model")
    former = shard.read_bytes(), index.read_bytes()
    assert say("rename", shard, "m.*=k\u00e4.*", "--in-place").code == 0
    assert ckptool.validate(shard.parent)["status"] == "valid" and say("scan", shard.parent).code == 0
    assert say("edit", shard.parent, "--drop", "n", "-o", tmp_path / "out").code == 0
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name.endswith(JOURNAL)]
    assert list(json.loads(index.read_text())["weight_map"]) == ["k\u00e4.bias", "k\u00e4.weight", "n"]
    assert json.loads(index.read_text())["metadata"] == {"m.bias": "m.bias", "total_size": 62}
    assert say("undo", shard).code == 0 and (shard.read_bytes(), index.read_bytes()) == former
    refused = say("rename", shard, "m.bias=n", "--in-place")
    assert refused.code == 4 and "names a tensor 'n' already" in refused.err
    assert (shard.read_bytes(), index.read_bytes()) == former
    assert say("edit", shard, "--set", "epoch=4", "--in-place").code == 0 and index.read_bytes() == former[1]


# -- kills and errors

KINDS = ["fits", "large", "rewritten"]
KILLER = """
import os, shutil, sys
import ckptool, ckptool.formats.headers

folder, shard, states, undo, force, step = sys.argv[1:]
path = os.path.join(folder, shard)
CALLS = ("open", "lseek", "write", "fsync", "ftruncate", "replace", "unlink", "close", "copy_file_range", "pwrite")

def arm(deadline):
    count = [0]
    def armed(name):
        real = getattr(os, name)
        def call(*arguments, **how):
            for when in ("before", "half", "after"):
                if when == "half" and (name != "write" or len(arguments[1]) <= 8):
                    continue  # a disk writes eight bytes at once
                count[0] += 1
                if count[0] == deadline:
                    if when == "half":
                        real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                    os._exit(9)
                if when == "before":
                    continue
                if when == "half" or not (name == "write" and len(arguments[1]) > 8):
                    result = real(*arguments, **how)
            return result
        return call
    for name in CALLS:
        setattr(os, name, armed(name))

def run(deadline):
    if undo == "True":
        arm(deadline)
        ckptool.undo(path)
    else:
        with ckptool.open(path) as checkpoint:
            text = "4" * (999 if force == "True" else 1)
            edited = ckptool.edit(checkpoint, [("set", "epoch=" + text), ("strip-prefix", "m.")])
            arm(deadline)
            ckptool.save_in_place(edited, force=True)
    os._exit(0)

shutil.copytree(folder, os.path.join(states, "whole"))
for deadline in range(1, 999, int(step)):
    child = os.fork()
    if not child:
        run(deadline)
    _, status = os.waitpid(child, 0)
    shutil.copytree(folder, os.path.join(states, f"{deadline:03}"))
    shutil.rmtree(folder)
    shutil.copytree(os.path.join(states, "whole"), folder)
    if os.waitstatus_to_exitcode(status) == 0:
        break
    assert os.waitstatus_to_exitcode(status) == 9
else:
    sys.exit("it never ends")
"""


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("force", "large"), [(False, False), (False, True), (True, False)], ids=KINDS)
@pytest.mark.parametrize("undo", [False, True], ids=["edit", "undo"])
def test_killed_at_every_call(undo: bool, force: bool, large: bool, tmp_path: Path) -> None:
    """Also halfway through each write: the file loads, or ``undo`` restores it; then everything is as before."""
    shard, index = sharded(tmp_path / "model", {**TEXTS, "notes": "n" * 9000} if large else TEXTS)
    former = shard.read_bytes(), index.read_bytes()
    if undo:
        with ckptool.open(shard) as checkpoint:
            steps = [("set", "epoch=" + "4" * (999 if force else 1)), ("strip-prefix", "m.")]
            ckptool.save_in_place(ckptool.edit(checkpoint, steps), force=True)
    states = tmp_path / "states"
    states.mkdir()
    step = 1 if WHOLE else 3
    options = (shard.parent, shard.name, states, undo, force, step)
    command = [sys.executable, "-c", KILLER, *map(str, options)]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    seen = [_after_a_kill(state, shard.name, former, large) for state in sorted(states.iterdir())]
    assert len(seen) > 30 // step and {"old", "new"} <= {*seen} and ("part" in seen) is not force
    order = ["new", "part", "old"] if undo else ["old", "part", "new"]
    assert [order.index(state) for state in seen[:-1]] == sorted(order.index(state) for state in seen[:-1])


def _after_a_kill(folder: Path, shard: str, former: tuple[bytes, bytes], large: bool) -> str:
    """Check one state, and the way back; return which header the file has."""
    path, index = folder / shard, folder / "model.safetensors.index.json"
    parts = {"m.weight": VALUES["m.weight"], "m.bias": VALUES["m.bias"]}
    whole = {"old": parts, "new": {name[2:]: value for name, value in parts.items()}}
    try:
        values = read(path)[1]
        state = next((state for state, each in whole.items() if each == values), "part")
    except SafetensorError:
        state = "part"
    if state == "part":
        refused = say("edit", path, "--set", "epoch=5", "--in-place")
        assert refused.code in (3, 4) and (f"ckptool undo {path}" in refused.err or not large)
    listed = ckptool.history(path)["versions"]
    assert len(listed) == 2 or path.read_bytes() == former[0]
    assert all(version["finished"] for version in listed[:-1]) and (listed[-1]["finished"] or state != "new")
    # An undo that was killed before it took its entry off the journal is done again.
    undone = ckptool.undo(path)["undone"]
    assert len(undone) == len(listed) - 1
    assert (path.read_bytes(), index.read_bytes()) == former
    assert ckptool.validate(folder)["valid"]
    assert len(ckptool.history(path)["versions"]) == 1
    return state


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("force", [False, True], ids=["fits", "rewritten"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_an_error_at_every_call(
    error: BaseException, force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has its former bytes, or ``undo`` gives them back, and the message says so."""
    shard, index = sharded(tmp_path / "model")
    former = shard.read_bytes(), index.read_bytes()
    for deadline in range(1, 400):
        count, called = 0, ""
        with ckptool.open(shard) as checkpoint, monkeypatch.context() as patch:
            edited = ckptool.edit(checkpoint, [("set", "epoch=" + "4" * (999 if force else 1)), ("strip-prefix", "m.")])

            def armed(name: str, real: Callable[..., Any], deadline: int = deadline) -> Callable[..., Any]:
                def call(*arguments: Any, **how: Any) -> Any:
                    nonlocal count, called
                    count += 1
                    if count == deadline:
                        called = name
                        raise error
                    return real(*arguments, **how)

                return call

            for name in ("open", "lseek", "write", "fsync", "ftruncate", "replace", "unlink"):
                patch.setattr(os, name, armed(name, getattr(os, name)))
            try:
                ckptool.save_in_place(edited, force=True)
                failed: BaseException | None = None
            except BaseException as caught:
                failed = caught
        if not called:
            assert failed is None and deadline > 15
            break
        if failed is not None and (shard.read_bytes(), index.read_bytes()) != former:
            assert "undo" in str(getattr(failed, "next", "")), (called, failed)
        if failed is None or (shard.read_bytes(), index.read_bytes()) != former:
            assert len(ckptool.undo(shard)["undone"]) == 1, (called, failed)
        assert (shard.read_bytes(), index.read_bytes()) == former, (called, failed)
        shard.with_name(shard.name + JOURNAL).unlink(missing_ok=True)
    else:
        pytest.fail("it never ends")


def test_a_copy_of_the_file_has_no_history(tmp_path: Path) -> None:
    path = made(tmp_path / "in.safetensors")
    say("edit", path, "--set", "epoch=4", "--in-place")
    copy = Path(shutil.copy(path, tmp_path / "copy.safetensors"))
    assert len(ckptool.history(copy)["versions"]) == 1 and say("undo", copy).code == 1
    link = tmp_path / "link.safetensors"
    link.symlink_to(path.name)
    assert say("undo", link).code == 0 and read(path)[0]["epoch"] == "3"
    with pytest.raises(RefusedError, match="removes or moves bytes"), ckptool.open(path) as checkpoint:
        ckptool.save_in_place(ckptool.drop(checkpoint, "n"))
