"""What explain says of a file. That its commands run is tested with those of all commands (test_next_steps.py)."""

from __future__ import annotations

import itertools
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


#: Keys of a model with their shapes; most shapes are equal, so only names tell tensors apart.
KEYS = {
    "conv1.weight": (4, 4),
    "conv1.bias": (4,),
    "conv2.weight": (4, 4),
    "conv2.bias": (4,),
    "norm.weight": (4,),
    "head.0.weight": (2, 4),
}
#: Every choice of keys with a prefix that the other side lacks.
MOVED = [each for number in range(1, 7) for each in itertools.combinations(KEYS, number)]


def model_with(keys: dict[str, tuple[int, ...]]) -> torch.nn.Module:
    """Return a model with parameters of these names and shapes."""
    model = torch.nn.Module()
    for key, shape in keys.items():
        *modules, last = key.split(".")
        place = model
        for name in modules:
            if not hasattr(place, name):
                place.add_module(name, torch.nn.Module())
            place = getattr(place, name)
        place.register_parameter(last, torch.nn.Parameter(torch.rand(shape)))
    return model


@pytest.mark.parametrize("other_head", [False, True])
@pytest.mark.parametrize("lacking", ["file", "model"])
@pytest.mark.parametrize("prefix", ["module.", "backbone.", "_orig_mod."])
def test_keys_that_lack_a_prefix_are_renamed_and_printed_python_loads_the_same(
    prefix: str, lacking: str, other_head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command makes all keys load; printed Python, with and without the file, fills the model of the message."""
    monkeypatch.chdir(tmp_path)
    for moved in MOVED:
        longer = {prefix + key if key in moved else key: shape for key, shape in KEYS.items()}
        ours, theirs = (KEYS, longer) if lacking == "file" else (longer, KEYS)
        if other_head:
            ours = {key.replace("head.0", "fc"): shape for key, shape in ours.items()}
        saved = model_with(ours).state_dict()
        torch.save(saved, "model.pth")
        with pytest.raises(RuntimeError) as error:
            model_with(theirs).load_state_dict(torch.load("model.pth"))
        about_file, alone = ckptool.explain(str(error.value), "model.pth"), ckptool.explain(str(error.value))
        for report in (about_file, alone):
            if report["python"] and "strict=False" not in report["python"]:
                model = model_with(theirs)
                exec(report["python"], {"torch": torch, "model": model})
                values = {key.removeprefix(prefix): value for key, value in model.state_dict().items()}
                assert all(torch.equal(values[key.removeprefix(prefix)], saved[key]) for key in saved)
        if not other_head:
            assert alone["python"]
            Path("error.txt").write_text(str(error.value), encoding="utf-8")  # the answer asks for it if many keys move
            words = shlex.split(about_file["next"] or about_file["why"].split("'")[-2])
            assert run(words[1:]) == 0
            model_with(theirs).load_state_dict(torch.load(words[-1]))
            os.remove(words[-1])


def test_missing_weights_are_said_to_stay_untrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(model_with(KEYS).state_dict(), "model.pth")
    with pytest.raises(RuntimeError) as error:
        model_with(KEYS | {"new.weight": (3, 3)}).load_state_dict(torch.load("model.pth"))
    why = ckptool.explain(str(error.value), "model.pth")["why"]
    assert "1 key of the model would stay untrained, with initial values: new.weight" in why
