"""Two forms of one model: ``match`` names what differs, and what it says is true of real modules and of the values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration import loops
from command_line import typed
from conftest import sample
from torch import nn
from trained_models import model_of
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import ckptool
from ckptool.cli.main import run

State = dict[str, torch.Tensor]


def matched(have: Any, want: Any, tmp_path: Path, **how: Any) -> dict[str, Any]:
    torch.save(have, tmp_path / "a.pth")
    torch.save(want, tmp_path / "b.pth")
    return ckptool.match(tmp_path / "a.pth", tmp_path / "b.pth", **how)


def cause(report: Mapping[str, Any]) -> tuple[str, str]:
    """The only cause of a report that does not fit, and offers no command but more rows."""
    assert not report["fits"] and "another model" not in report["advice"]
    assert not report["next"] or report["next"].startswith("ckptool resize ")
    assert not (report["fix"] and report["fix"]["complete"])
    [one] = report["causes"]
    return one["kind"], one["message"]


def with_prefix(state: State, prefix: str) -> State:
    return {prefix + name: value for name, value in state.items()}


def through_error(have: State, want: State, tmp_path: Path) -> dict[str, Any]:
    """Match with the message that torch prints, which says no shapes of missing keys."""
    torch.save(have, tmp_path / "a.pth")
    with pytest.raises(RuntimeError) as error:
        model_of(want).load_state_dict(have)
    return ckptool.match(tmp_path / "a.pth", error=str(error.value))


# -- vocabularies

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
LANGUAGE: dict[str, Callable[[int], nn.Module]] = {
    "llama": lambda rows: LlamaForCausalLM(LlamaConfig(vocab_size=rows, tie_word_embeddings=False, **SMALL)),
    "tied llama": lambda rows: LlamaForCausalLM(LlamaConfig(vocab_size=rows, tie_word_embeddings=True, **SMALL)),
    "bert": lambda rows: BertForMaskedLM(BertConfig(vocab_size=rows, max_position_embeddings=8, **SMALL)),
    "gpt2": lambda rows: GPT2LMHeadModel(GPT2Config(vocab_size=rows, n_embd=16, n_layer=1, n_head=2, n_positions=8)),
}


@pytest.mark.parametrize("name", LANGUAGE)
@pytest.mark.parametrize(("saved", "wanted"), [(100, 101), (101, 100), (40, 48)])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_rows_of_a_vocabulary(name: str, saved: int, wanted: int, prefix: str, tmp_path: Path) -> None:
    """The call that is named, on the real model, makes it take the file; no command drops the embedding."""
    have, model = LANGUAGE[name](saved).state_dict(), LANGUAGE[name](wanted)
    report = matched(with_prefix(have, prefix), model.state_dict(), tmp_path)
    kind, message = cause(report)
    assert kind == "vocabulary" and f"{saved} rows in the file and {wanted} in the model" in message
    model.resize_token_embeddings(int(re.findall(r"resize_token_embeddings\((\d+)\) before", message)[0]))
    model.load_state_dict(have)
    if prefix:
        return
    explained = through_error(have, LANGUAGE[name](wanted).state_dict(), tmp_path)
    assert cause(explained) == (kind, message)
    for answer in (report, explained):  # more rows can be added; rows that are lost need a person
        assert answer["next"].startswith("ckptool resize") == (wanted > saved)
    if wanted > saved:
        assert run(shlex.split(report["next"])[1:]) == 0
        LANGUAGE[name](wanted).load_state_dict(torch.load(shlex.split(report["next"])[-1]))


# -- fused, split, and transposed

#: Names for the whole, and for its parts.
FUSIONS = {
    "timm": ("attn.qkv", ("attn.q", "attn.k", "attn.v")),
    "other modules": ("attention.self_attn.Wqkv", ("attention.q_proj", "attention.k_proj", "attention.v_proj")),
    "baichuan": ("self_attn.W_pack", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "two": ("attn.to_kv", ("attn.to_k", "attn.to_v")),
    "mlp": ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    "glu": ("ff.wg1_fused", ("ff.wg", "ff.w1")),
}
SIZE = 8


def layers(whole: str, names: tuple[str, ...], heads: int, axis: int) -> tuple[State, State]:
    """The state dicts of one model: with the whole tensors, and with their parts.

    With ``heads`` the rows of the parts alternate; with ``axis`` 1 they stand side by side, as in Conv1D.
    """
    fused, split = State(), State()
    for layer in range(2):
        common = {f"layers.{layer}.norm.weight": torch.randn(SIZE), f"layers.{layer}.out.weight": torch.randn(4, SIZE)}
        parts = [torch.randn((SIZE, 12) if axis == 0 else (12, SIZE)) for _ in names]
        blocks = [block for rows in zip(*(part.chunk(heads, axis) for part in parts)) for block in rows]
        fused |= {**common, f"layers.{layer}.{whole}.weight": torch.cat(blocks, axis)}
        split |= common | {f"layers.{layer}.{name}.weight": part for name, part in zip(names, parts)}
    return fused, split


@pytest.mark.parametrize("family", FUSIONS)
@pytest.mark.parametrize("prefix", sample(["", "module.", "model."], 2))
@pytest.mark.parametrize("axis", [0, 1])
def test_fused_and_split_projections(family: str, prefix: str, axis: int, tmp_path: Path) -> None:
    """Both are named with an example, and nothing is claimed about the order of rows."""
    whole, names = FUSIONS[family]
    fused, split = layers(whole, names, 1, axis)
    for kind, have, want in (("fused", fused, split), ("split", split, fused)):
        found, message = cause(matched(with_prefix(have, prefix), want, tmp_path))
        assert found == kind
        assert f"layers.0.{whole}.weight" in message and "the order of rows is not known" in message
        assert all(name.rpartition(".")[2] in message for name in names)


# -- tied weights

TIED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "llama": (lambda: LANGUAGE["tied llama"](40), ("lm_head.weight",)),
    "gpt2": (lambda: LANGUAGE["gpt2"](40), ("lm_head.weight",)),
    "bert": (lambda: LANGUAGE["bert"](40), ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")),
    "t5": (
        lambda: T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1)),
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
    ),
}


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("form", ["plain", "module", "training", "message", "lock"])
def test_a_tied_weight_that_is_missing(name: str, form: str, tmp_path: Path) -> None:
    """The printed command adds the second name, with the values of the first, and torch takes the result."""
    made, lost = TIED[name]
    model, fresh = made(), made()
    state = {key: value for key, value in model.state_dict().items() if key not in lost}
    have: Any = with_prefix(state, "module.") if form == "module" else state
    have = {"epoch": 1, "model": have} if form == "training" else have
    if form == "message":
        report = through_error(have, dict(model.state_dict()), tmp_path)
    elif form == "lock":
        torch.save(have, tmp_path / "a.pth")
        torch.save(model.state_dict(), tmp_path / "b.pth")
        assert run(["lock", str(tmp_path / "b.pth"), "-o", str(tmp_path / "b.lock"), "-q"]) == 0
        report = ckptool.match(tmp_path / "a.pth", tmp_path / "b.lock")
    else:
        report = matched(have, model.state_dict(), tmp_path)
    assert [one["kind"] for one in report["causes"]] == ["tied"] and "transformers ties" in str(report["causes"])
    assert report["fix"]["complete"]
    assert typed(report["fix"]["command"], tmp_path / "out.pth") == 0
    fresh.load_state_dict(torch.load(tmp_path / "out.pth"))
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in fresh.state_dict().items())


# -- time


def test_the_work_does_not_grow_with_the_square_of_the_keys(tmp_path: Path) -> None:
    """Two models of 3,000 keys without a common name take 25 loops; comparing all with all would take 500."""
    have, want = ({f"{side}{at}.proj.weight": torch.zeros(at % 7 + 1) for at in range(3_000)} for side in "ab")
    torch.save(have, tmp_path / "a.pth")
    torch.save(dict(reversed(want.items())), tmp_path / "b.pth")
    report, count = loops(lambda: ckptool.match(tmp_path / "a.pth", tmp_path / "b.pth"))
    assert not report["fits"]
    assert count < 100


@pytest.mark.parametrize("part", ["emb", "1", "q", "a.", "lora_A.", "x.lora_A.a", ".modules_to_save", "a_b"])
@pytest.mark.parametrize("end", ["", ".weight", "-"])
def test_a_name_of_any_length_takes_linear_time(part: str, end: str, tmp_path: Path) -> None:
    name = part * (200_000 // len(part)) + end
    torch.save({name: torch.zeros(3, 2), "b.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "a.pth")
    torch.save({name: torch.zeros(4, 2), f"{name}x": torch.zeros(2), "b.weight": torch.zeros(2, 2)}, tmp_path / "b.pth")
    report, count = loops(lambda: ckptool.match(tmp_path / "a.pth", tmp_path / "b.pth"))
    assert not report["fits"]
    assert all(len(one["message"]) < 2_000 for one in report["causes"])
    assert count < 60
