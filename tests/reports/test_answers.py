"""Every command that explain prints for a file runs as printed, keeps the weights, and ends the trouble."""

from __future__ import annotations

import collections
import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES, sample

import ckptool
from ckptool.cli.main import run
from ckptool.reports.explaining.finders import KnownError
from ckptool.reports.explaining.known_errors import KNOWN_ERRORS

#: Copies keep all weights, except those of a damaged file, in another dtype, or without a layer that a message names.
LESS = {"salvage", "cast"}


def messages() -> list[KnownError]:
    """One error for each way to answer: errors with the same topic and the same function have the same commands."""
    ways = {(error.topic, error.answer, error.answer and error.name): error for error in KNOWN_ERRORS}
    return list(ways.values())


GROUPS = ("ranks", "sharded", "real")
FILES = sorted(path.name for path in FIXTURES.iterdir() if path.suffix != ".tsv" and path.name not in GROUPS)
FILES += sorted(f"{group}/{path.name}" for group in GROUPS for path in (FIXTURES / group).iterdir())
TEXTS = [error.message for error in messages()] + ["KeyError: 'params_ema'", "KeyError: 'step'", "a strange message"]


def tensors(path: str, everywhere: bool = True) -> collections.Counter[tuple[str, tuple[int, ...]]]:
    """The dtypes and shapes of the tensors with values, tied ones once; otherwise only those in state dicts."""
    with ckptool.open(path) as checkpoint:
        survey = checkpoint.lenient().survey
        sure = {number for number, item in enumerate(survey.state_dicts) if item.confidence == "high"}
        views = {
            (entry.tensor.storage, entry.tensor.offset, entry.tensor.dtype, tuple(entry.tensor.shape))
            for entry in survey.tensors
            if (everywhere or entry.state_dict in sure) and entry.tensor.location != "meta"
        }
        return collections.Counter((dtype, shape) for _, _, dtype, shape in views)


def outputs(line: str, damaged: bool) -> list[str]:
    """Run the commands of a line; return what they wrote. An edit copies no damage that its checksums show."""
    written = []
    for part in line.split(" && "):
        words = shlex.split(part)
        code = run(words[1:])
        if code == 3 and damaged:
            continue
        assert code in ((0,) if "-o" in words and words[1] != "salvage" else (0, 1)), part
        written += [words[words.index("-o") + 1]] if "-o" in words else []
    return written


def follow(text: str, path: str, commands: dict[str, list[str]], most: int = 4) -> None:
    """Explain the message for the file, run the command, and go on with its output until no command is printed."""
    report = ckptool.explain(text, path)
    line = report["next"]
    assert line.startswith(("ckptool ", "mv ")) or not line
    if line in commands or not line.startswith("ckptool "):
        return
    assert most, f"a circle: {list(commands)}"
    commands[line] = outputs(line, "wrong_crc" in path)
    verbs = {part.split()[1] for part in line.split(" && ")}
    if commands[line] and not verbs & LESS and "size mismatch" not in text:
        kept = sum((tensors(output) for output in commands[line]), start=collections.Counter())
        assert not tensors(path, everywhere=False) - kept, line
    if "size mismatch" not in text and verbs != {"salvage"}:
        for output in commands[line]:
            follow(text, output, commands, most - 1)


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sample(FILES, 5))
def test_every_printed_command_runs_and_keeps_the_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FIXTURES / name
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    commands: dict[str, list[str]] = {}
    for text in TEXTS:
        follow(text, name, commands)


def test_an_entry_is_renamed_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"fc.weight": torch.ones(2, 3)}
    torch.save({"weight": state, "config": [1], "optimizer": {"a": torch.zeros(5)}}, "rvc.pth")
    assert run(shlex.split(ckptool.explain("KeyError: 'state_dict'", "rvc.pth")["next"])[1:]) == 0
    loaded = torch.load("rvc.renamed.pth")
    assert list(loaded) == ["config", "optimizer", "state_dict"]
    assert torch.equal(loaded["state_dict"]["fc.weight"], state["fc.weight"])


@pytest.mark.parametrize("whole", [True, False])
def test_what_lightning_reads_is_added(whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"fc.weight": torch.ones(2, 3)}
    torch.save(state if whole else {"model": state, "epoch": 7}, "net.pth")
    assert run(shlex.split(ckptool.explain("KeyError: 'pytorch-lightning_version'", "net.pth")["next"])[1:]) == 0
    loaded = torch.load("net.lightning.ckpt")
    assert loaded["pytorch-lightning_version"] == "2.0.0"
    assert (loaded["epoch"], loaded["global_step"]) == (0 if whole else 7, 0)
    assert list(loaded["state_dict"]) == ["fc.weight"]


@pytest.mark.parametrize(
    ("key", "saved", "wanted", "words"),
    [
        ("model.embed_tokens.weight", (32001, 8), (32000, 8), "resize_token_embeddings"),
        ("pos_embed", (1, 197, 8), (1, 577, 8), "img_size"),
        ("layers.0.q.lora_A.default.weight", (16, 8), (8, 8), "rank"),
        ("h.0.attn.c_attn.weight", (8, 24), (24, 8), "transposed"),
        ("layers.0.mlp.weight", (32, 1), (8, 8), "bitsandbytes"),
        ("emb_g.weight", (109, 8), (10, 8), "speaker"),
        ("conv1.weight", (8, 1, 3, 3), (8, 3, 3, 3), "channels"),
        ("layers.0.weight", (64,), (8, 8), "FSDP"),
        ("layers.0.weight", (0,), (8, 8), "ZeRO"),
    ],
)
def test_a_size_is_explained_and_nothing_is_dropped(
    key: str,
    saved: tuple[int, ...],
    wanted: tuple[int, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {f"module.{key}": torch.zeros(saved), "module.norm.weight": torch.ones(8)}}, "a.pth")
    text = (
        f"RuntimeError: size mismatch for {key}: copying a param with shape {torch.Size(saved)} from checkpoint, the"
        f" shape in current model is {torch.Size(wanted)}."
    )
    report = ckptool.explain(text, "a.pth")
    assert words in report["why"]
    assert key in report["why"]
    assert report["next"] == ""


def test_the_users_own_message_is_repeated() -> None:
    long = "KeyError: 'state_dict' " + "x" * 1000
    report = ckptool.explain(f'Traceback (most recent call last):\n  File "load.py", line 1\n{long}')
    assert report["message"].startswith("KeyError: 'state_dict' xxx")
    assert len(report["message"]) <= 240


def test_a_file_that_the_message_names_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("last.ckpt").write_bytes(b"")
    report = ckptool.explain("RuntimeError: unexpected EOF, expected 4 more bytes in last.ckpt")
    assert report["next"].endswith(" last.ckpt")
    assert os.path.exists("last.ckpt")


def test_the_words_of_an_unknown_message_decide() -> None:
    assert "ckptool validate FILE" in ckptool.explain("the archive seems corrupt")["why"]
    assert "ckptool keys FILE" in ckptool.explain("bad dtype float16 somewhere")["why"]
    assert ckptool.explain("nothing to see here")["name"] == ""


@pytest.mark.filterwarnings("ignore")
def test_counters_that_torch_does_not_call_missing_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message about a dict around the state dict lists no num_batches_tracked."""
    monkeypatch.chdir(tmp_path)
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    torch.save({"params": dict(state)}, "net.pth")
    with pytest.raises(RuntimeError) as error:
        torch.nn.Sequential(torch.nn.BatchNorm1d(2)).load_state_dict(torch.load("net.pth"))
    assert run(shlex.split(ckptool.explain(str(error.value), "net.pth")["next"])[1:]) == 0
    assert torch.load("net.fits.pth").keys() == state.keys()
