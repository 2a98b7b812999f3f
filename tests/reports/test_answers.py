"""What explain says of a file. That its commands run is tested with those of all commands (test_next_steps.py)."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.cli.main import run


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
