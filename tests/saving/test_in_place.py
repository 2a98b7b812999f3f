"""Edits in place: what torch reads is what the same edit to a new file gives, and every edit can be taken back."""

from __future__ import annotations

import shutil
from pathlib import Path

import oracle
import pytest
import torch
from conftest import FIXTURES, by_name, corpus_files, needs_corpus, sample
from in_place_edits import (
    EDITS,
    FIVE,
    MARK,
    NAMES,
    Edit,
    archive_of,
    by_offsets,
    check_edit,
    check_modes,
    copied,
    in_place,
)
from output_checks import WHOLE, saved

import ckptool
from ckptool.base.errors import CkptoolError, RefusedError
from ckptool.cli.main import run

ZIPS = [item for item in WHOLE if item.container == "torch-zip"]
each_edit = pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)


@pytest.mark.parametrize("item", ZIPS, ids=by_name)
def test_each_edit_in_place_is_the_edit_to_a_new_file(item: object, tmp_path: Path, out: Path) -> None:
    path = copied(item.path, tmp_path)  # type: ignore[attr-defined]
    done = [edit.name for edit in EDITS if check_edit(edit, path, out)]
    trailing = item.path.name == "zip_trailing.pth"  # type: ignore[attr-defined]
    assert trailing or {"wrap"} <= set(done)


@needs_corpus
@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("path", corpus_files(), ids=lambda path: path.name)
def test_edits_of_a_real_checkpoint(path: Path, tmp_path: Path, out: Path) -> None:
    """A third of the edits for each file, and ``wrap``; every edit in ``make torture``."""
    try:
        torch.load(path, map_location="cpu", weights_only=True)
        zipped = ckptool.inspect(path)["format"] == "torch-zip"
    except Exception:
        pytest.skip("torch or ckptool does not read it")
    copy = copied(path, tmp_path)
    copy.chmod(0o644)
    if not zipped:
        with pytest.raises(RefusedError, match=r"of the format torch-legacy|of the format safetensors"):
            in_place(copy, NAMES["wrap"].make)
        assert copy.read_bytes() == path.read_bytes()
        return
    chosen = {NAMES["wrap"], *sample(EDITS, 3, first=corpus_files().index(path))}
    assert [edit.name for edit in EDITS if edit in chosen and check_edit(edit, copy, out)]


@pytest.mark.parametrize("item", ZIPS, ids=by_name)
def test_five_edits_are_taken_back_one_by_one(item: object, tmp_path: Path, out: Path) -> None:
    source = item.path  # type: ignore[attr-defined]
    if source.name == "zip_trailing.pth":
        pytest.skip("refused")
    path, clean = copied(source, tmp_path), tmp_path / "clean.pth"
    shutil.copyfile(source, clean)
    states, told = [path.read_bytes()], []
    for name in FIVE:
        edit = NAMES[name].make
        with ckptool.open(clean) as checkpoint:
            try:
                edited = edit(checkpoint)
            except CkptoolError:
                continue
            if not edited.edited:
                continue
            ckptool.save(edited, out, force=True)
        shutil.copyfile(out, clean)
        assert in_place(path, edit) > 0
        assert path.read_bytes().startswith(states[-1])
        states.append(path.read_bytes())
        told.append(edited.changes[0].words)
        assert oracle.difference(oracle.load(path), oracle.load(clean)) == ""
        check_modes(path, source)
    listed = ckptool.history(path)["versions"]
    assert [version["bytes"] for version in listed] == list(map(len, states))
    assert [version["edit"] is None for version in listed] == [True] + [False] * len(told)
    assert all(version["finished"] for version in listed)
    assert ckptool.diff(path, clean)["same"]
    for left in range(len(states) - 2, -1, -1):
        report = ckptool.undo(path)
        assert report["left"] == left and len(report["undone"]) == 1
        assert path.read_bytes() == states[left]
    assert ckptool.undo(path)["undone"] == []
    assert path.read_bytes() == source.read_bytes()


def edited_often(folder: Path, name: str = "ddp4_training.pth") -> tuple[Path, Path]:
    """A file edited in place three times, and a clean one with the same content."""
    path, clean = copied(FIXTURES / name, folder), folder / "clean.pth"
    at = FIXTURES / name
    for number, edit in enumerate(("strip-module", "set", "remap")):
        in_place(path, NAMES[edit].make)
        clean = folder / f"clean{number}.pth"
        with ckptool.open(at) as checkpoint:
            ckptool.save(NAMES[edit].make(checkpoint), clean)
        at = clean
    return path, clean


OUTPUTS = {
    "add-module": ["add-module"],
    "drop": ["drop", "optimizer"],
    "extract": ["extract", "state_dict"],
    "keep": ["edit", "--keep", "state_dict,epoch"],
    "rename": ["rename", "--rename", "s/^/x./"],
    "repack": ["edit", "--repack"],
    "sanitize": ["sanitize"],
    "slim": ["slim"],
    "cast": ["cast", "--to-dtype", "float16"],
    "redact": ["redact", "--redact", "all"],
    "merge": ["merge"],
    "edit": ["edit", "--wrap", "a", "--slim"],
}


#: Files in which there is something to do for the command.
MADE_FOR = {"sanitize": "args_namespace.pth", "slim": "slice_of_big.pth"}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_leaves_former_versions_behind(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, *options = OUTPUTS[name]
    outs = []
    for path in edited_often(tmp_path, MADE_FOR.get(name, "ddp4_training.pth")):
        others = [str(FIXTURES / "bare.pth")] if command == "merge" else []
        out = tmp_path / f"{path.stem}.{name}.pth"
        assert run([command, str(path), *others, *options, "-o", str(out)]) == 0, capsys.readouterr().err
        outs.append(out)
        assert MARK not in out.read_bytes()
        assert len(ckptool.history(out)["versions"]) == 1
        assert ckptool.validate(out)["valid"]
    assert oracle.difference(*map(oracle.load, outs)) == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"], ["keys"], ["stats"], ["hash"], ["validate", "--strict"], ["undo", "--list"],
        ["lock", "-o", "LOCK"], ["undo", "--dry-run"], ["get", "epoch"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_other_command_reads_it(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, clean = edited_often(tmp_path)
    command, *rest = [str(tmp_path / "a.lock") if word == "LOCK" else word for word in arguments]
    assert run([command, str(path), *rest]) == 0, capsys.readouterr().err
    assert run(["diff", str(path), str(clean), "--quiet"]) == 0


def contract(path: Path) -> bool:
    return archive_of(path).find(".format_version") is not None


@pytest.mark.parametrize("edit", ["drop", "keep", "inner", "extract"])
def test_the_contract_of_the_layout_goes_when_it_does_not_hold(edit: str, tmp_path: Path) -> None:
    """First storage dropped, others stay: ``.format_version`` 1 would make torch compute offsets that are wrong."""
    value = {"a": {f"x{n}": torch.full((5,), float(n)) for n in range(3)}, "b": torch.arange(7.0), "c": torch.ones(9)}
    path = saved(value, tmp_path / "in.pth")
    steps = {
        "drop": lambda c: ckptool.drop(c, ["a"]),
        "keep": lambda c: ckptool.keep(c, ["b"]),
        "inner": lambda c: ckptool.drop(c, "a.x0"),
        "extract": lambda c: ckptool.extract(c, "b"),
    }
    whole = path.read_bytes()
    assert contract(path)
    in_place(path, steps[edit])
    assert not contract(path)
    before = tmp_path / "before.pth"
    before.write_bytes(whole)
    assert check_modes(path, before) == 5
    assert ckptool.undo(path)["output_bytes"] == len(whole) and contract(path)
    assert path.read_bytes() == whole


def test_the_contract_stays_where_it_holds(tmp_path: Path) -> None:
    path = saved({"a": torch.ones(3), "b": torch.ones(40), "c": torch.zeros(5)}, tmp_path / "in.pth")
    shutil.copyfile(path, tmp_path / "before.pth")
    in_place(path, lambda c: ckptool.drop(c, ["c"]))
    assert contract(path)
    assert check_modes(path, tmp_path / "before.pth") == 5
    assert list(by_offsets(path)) == ["a", "b"]


@each_edit
def test_a_mapped_tensor_keeps_its_values(edit: Edit, tmp_path: Path) -> None:
    import mmap

    path = copied(FIXTURES / "ddp4_training.pth", tmp_path)
    before = oracle.load(path)
    tensors = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        data = bytes(whole)
        assert in_place(path, edit.make) or edit.name == "strip-module"
        assert bytes(whole) == data and oracle.difference(before, tensors) == ""
        later = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
        expected = oracle.load(path)
        ckptool.undo(path)
        assert bytes(whole) == data and oracle.difference(before, tensors) == ""
        assert oracle.difference(expected, later) == ""  # the tensors of the version that is gone, too
