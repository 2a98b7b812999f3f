"""Every command that inspect and validate print as the next step works: it is run, and what it writes is valid."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from conftest import CHECKPOINTS, FIXTURES, by_name, corpus_files, needs_corpus

from ckptool.base.text import suggested_output
from ckptool.cli.main import run

#: Damage that only ``validate`` sees, as it reads every byte: what ``inspect`` advises carries it on, and says nothing.
UNSEEN = ("zip_wrong_crc.pth",)
#: Of DCP, of Hugging Face in .bin, of DeepSpeed.
FOLDERS = (
    *("dcp4", "real/lightning_sharded", "real/megatron_core", "real/accelerate_bin", "real/lora_bin"),
    *("real/sentences", "real/zero3"),
)


def steps(text: str) -> list[str]:
    """The commands behind the arrows."""
    lines = (re.match(r"\s*-> .*?\b(ckptool .*)", line) for line in text.splitlines())
    return list(dict.fromkeys(found.group(1) for found in lines if found))


def check(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    (shutil.copytree if path.is_dir() else shutil.copy)(path, path.name)
    for command in (["inspect"], ["validate"], ["validate", "--weights-only"]):
        run([*command, path.name])
        told = capsys.readouterr()
        for step in steps(told.out + told.err):
            words = shlex.split(step)[1:]
            assert "OUT" not in words
            code = run(words)
            # Exit 1 of salvage: something was lost, and the rest is written.
            assert code == 0 or (words[0] == "salvage" and code == 1), (step, capsys.readouterr().err)
            if "-o" in words:
                out = Path(words[words.index("-o") + 1])
                assert run(["validate", str(out)]) == 0, (step, capsys.readouterr().out)
                shutil.rmtree(out) if out.is_dir() else out.unlink()
            capsys.readouterr()


@pytest.mark.parametrize("item", [item for item in CHECKPOINTS if item.path.name not in UNSEEN], ids=by_name)
def test_on_fixtures(
    item: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(item.path, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("name", ["fastai_learner.pkl", "fastai_model.pth", "ppo_policy.pt", "lightning_one.ckpt"])
def test_on_files_of_frameworks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(FIXTURES / "real" / name, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("name", FOLDERS)
def test_on_folders(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(FIXTURES / name, tmp_path, monkeypatch, capsys)


@needs_corpus
@pytest.mark.parametrize("path", corpus_files(), ids=lambda path: path.name)
def test_on_real_files(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(path, tmp_path, monkeypatch, capsys)


def test_sizes_that_differ_are_not_rounded_to_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = torch.zeros(401)
    torch.save({"weight": whole[:400], "bias": torch.zeros(2)}, tmp_path / "a.pth")
    assert run(["inspect", str(tmp_path / "a.pth")]) == 0
    assert "uses 1,600 bytes of a storage of 1,604 bytes" in capsys.readouterr().out


def test_a_name_that_is_taken_is_not_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"module.weight": torch.zeros(2)}, "a.pth")
    for name in ("a.plain.pth", "a.plain.2.pth"):
        assert run(["inspect", "a.pth"]) == 0
        (step,) = steps(capsys.readouterr().out)
        assert shlex.split(step)[-1] == name
        assert run(shlex.split(step)[1:]) == 0
        capsys.readouterr()


def test_a_suggested_folder_keeps_its_whole_name(tmp_path: Path) -> None:
    (tmp_path / "v1.5").mkdir()
    assert suggested_output(f"{tmp_path}/v1.5", "plain") == f"{tmp_path}/v1.5.plain"
    assert suggested_output("outer.zip!run/a.pth.tar", "cpu") == "a.cpu.pth.tar"
