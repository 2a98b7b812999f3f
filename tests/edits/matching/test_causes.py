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
from conftest import sample
from torch import nn
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
from ckptool.edits.matching.causes import size_causes
from ckptool.edits.matching.state_dict_errors import Mismatch

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


def typed(command: str, out: Path) -> int:
    """Run a command line as a shell would, with another output."""
    words = shlex.split(command)
    assert words[0] == "ckptool" and words[-2] == "-o"
    return run([*words[1:-1], str(out), "-q"])


def with_prefix(state: State, prefix: str) -> State:
    return {prefix + name: value for name, value in state.items()}


def through_error(have: State, want: State, tmp_path: Path) -> dict[str, Any]:
    """Match with the message that torch prints, which says no shapes of missing keys."""
    model = nn.Module()
    for name, value in want.items():
        at = model
        *path, last = name.split(".")
        for part in path:
            if not hasattr(at, part):
                setattr(at, part, nn.Module())
            at = getattr(at, part)
        at.register_buffer(last, value)
    torch.save(have, tmp_path / "a.pth")
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(have)
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


# -- the other side


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("partitioned-model", [((8, 4), (0,)), ((8,), (0,))]),
        ("quantized-model", [((8, 4), (16, 1))]),
        ("flat-model", [((8, 4), (32,))]),
        ("part", [((4, 8), (8, 8)), ((4,), (8,)), ((8, 4), (8, 8))]),
        ("part", [((8, 8), (2, 8)), ((8, 8), (8, 2))]),
        ("configuration", [((4, 4), (8, 8)), ((4,), (8,)), ((8, 4), (16, 8))]),
        ("configuration", [((4, 8), (8, 8)), ((8, 2), (8, 8))]),
        ("classes", [((4, 8), (8, 8)), ((4,), (8,))]),
    ],
)
def test_the_model_is_cut_or_quantized(kind: str, sizes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    found = size_causes([Mismatch(f"head{number}.weight", *both) for number, both in enumerate(sizes)], 0)
    assert [cause.kind for cause in found] == [kind]
    assert found[0].replaceable == (kind == "classes")


# -- positions


class Table(nn.Module):
    """A model with patches of 16 pixels and a table of positions of any name."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 16, 16)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_parameter(name, nn.Parameter(torch.randn(shape)))


POSITIONS = [
    ("pos_embed", (1, 197, 8), (1, 577, 8)),
    ("positional_embedding", (50, 8), (82, 8)),
    ("pos_embed", (1, 8, 7, 7), (1, 8, 14, 14)),
    ("relative_position_bias_table", (169, 2), (529, 2)),
    ("rel_pos_h", (27, 8), (127, 8)),
    ("wpe", (512, 8), (1024, 8)),
]


@pytest.mark.parametrize(("name", "saved", "wanted"), POSITIONS)
def test_another_image_size(name: str, saved: tuple[int, ...], wanted: tuple[int, ...], tmp_path: Path) -> None:
    have, want = Table(name, saved).state_dict(), Table(name, wanted).state_dict()
    for report in (matched(have, want, tmp_path), through_error(have, want, tmp_path)):
        kind, message = cause(report)
        assert kind == "positions"
        assert all("x".join(map(str, shape)) in message for shape in (saved, wanted))
        assert "another image size or sequence length: build the model" in message


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


# -- what others add to the names


class LitEma(nn.Module):
    """As in ``ldm/modules/ema.py`` of Latent Diffusion: buffers, whose names have no dots."""

    def __init__(self, model: nn.Module, decay: float = 0.9999) -> None:
        super().__init__()
        self.register_buffer("decay", torch.tensor(decay, dtype=torch.float32))
        self.register_buffer("num_updates", torch.tensor(0, dtype=torch.int))
        for name, parameter in model.named_parameters():
            self.register_buffer(name.replace(".", ""), parameter.clone().detach().data)


class Latent(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.model_ema = LitEma(model)


def network() -> nn.Module:
    return nn.ModuleDict(
        {
            "input_blocks": nn.ModuleList(nn.ModuleList([nn.Linear(6, 6), nn.LayerNorm(6)]) for _ in range(3)),
            "out": nn.Linear(6, 4),
        }
    )


@pytest.mark.parametrize("prefix", ["", "diffusion_model."])
def test_averaged_weights_without_dots(prefix: str, tmp_path: Path) -> None:
    """The EMA of LitEma alone gets the names of the model; beside the weights it is named, and the way to it works."""
    model = network() if not prefix else nn.ModuleDict({"diffusion_model": network()})
    saved = Latent(model).state_dict()
    for name, value in saved.items():
        if name.startswith("model_ema.") and value.is_floating_point():
            value += 1
    ema = {name: value for name, value in saved.items() if name.startswith("model_ema.")}
    expected = {name: ema["model_ema." + name.replace(".", "")] for name in model.state_dict()}
    out = tmp_path / "out.pth"
    report = matched(ema, model.state_dict(), tmp_path)
    assert report["fix"]["complete"], report
    assert typed(report["fix"]["command"], out) == 0
    result = torch.load(out)
    assert result.keys() == expected.keys() and all(torch.equal(result[name], expected[name]) for name in expected)
    whole = matched({"state_dict": saved, "epoch": 1}, model.state_dict(), tmp_path)
    [note] = [note for note in whole["notes"] if "averaged weights" in note]
    assert typed(note[note.index("ckptool edit") :], tmp_path / "ema.pth") == 0
    report = ckptool.match(tmp_path / "ema.pth", tmp_path / "b.pth")
    assert report["fix"]["complete"] and typed(report["fix"]["command"], tmp_path / "named.pth") == 0
    result = torch.load(tmp_path / "named.pth")
    assert result.keys() == expected.keys() and all(torch.equal(result[name], expected[name]) for name in expected)


def profiled(model: nn.Module) -> State:
    """The state dict after ``thop.profile``, which registers two buffers in every module."""
    for module in [*model.modules()]:
        module.register_buffer("total_ops", torch.zeros(1, dtype=torch.float64))
        module.register_buffer("total_params", torch.zeros(1, dtype=torch.float64))
    return dict(model.state_dict())


@pytest.mark.parametrize("depth", [1, 90])
@pytest.mark.parametrize("prefix", ["", "module.", "model."])
def test_the_counters_of_thop(depth: int, prefix: str, tmp_path: Path) -> None:
    """One command drops them, and nothing else, however many there are."""

    def made() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(depth)))

    plain = made()
    have = with_prefix(profiled(made()), prefix)
    report = matched(have, plain.state_dict(), tmp_path)
    assert report["fix"]["complete"] and f"drops {2 * (3 * depth + 1)} keys" in str(report["fix"])
    assert typed(report["fix"]["command"], tmp_path / "out.pth") == 0
    plain.load_state_dict(torch.load(tmp_path / "out.pth"))


# -- adapters


def adapter(base: State, targets: tuple[str, ...], style: str, rank: int = 2) -> State:
    """The keys of LoRA for some modules of a base, as PEFT, kohya or torchtune name them."""
    result = State()
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets and weight.dim() == 2:
            first, second = torch.randn(rank, weight.shape[1]), torch.randn(weight.shape[0], rank)
            if style == "peft":
                module = f"base_model.model.{module}"
                result |= {f"{module}.lora_A.weight": first, f"{module}.lora_B.weight": second}
            elif style == "live":
                module = f"base_model.model.{module}"
                result |= {f"{module}.lora_A.default.weight": first, f"{module}.lora_B.default.weight": second}
            elif style == "kohya":
                module = f"lora_unet_{module.replace('.', '_')}"
                result |= {f"{module}.lora_down.weight": first, f"{module}.lora_up.weight": second}
                result[f"{module}.alpha"] = torch.tensor(1.0)
            else:
                result |= {f"{module}.lora_a.weight": first, f"{module}.lora_b.weight": second}
    return result


def llama(width: int = 16, layers: int = 2) -> State:
    config = LlamaConfig(vocab_size=40, **SMALL | {"hidden_size": width, "num_hidden_layers": layers})
    return dict(LlamaForCausalLM(config).state_dict())


def test_an_adapter_of_kohya_and_its_base(tmp_path: Path) -> None:
    base = llama()
    have = adapter(base, ("q_proj", "v_proj"), "kohya")
    report = matched(have, base, tmp_path)
    [one] = report["causes"]
    assert "LoRA of rank 2 on 4 modules of unet" in one["message"] and "4 weights of the target" in one["message"]
    assert report["next"].startswith("ckptool merge-lora ") and report["fix"] is None
    for other, reason in ((llama(24), "changes a weight of 16x16"), (llama(16, 1), "2 of 4 modules matched")):
        report = matched(have, other, tmp_path)
        [one] = report["causes"]
        assert not report["next"] and "does not fit the target" in one["message"] and reason in one["message"]


@pytest.mark.parametrize("style", ["peft", "live", "torchtune"])
def test_a_model_with_an_adapter_is_not_taken_for_its_base(style: str, tmp_path: Path) -> None:
    """No edit is offered that leaves the adapter out, and no count says that all keys load."""
    base = llama()
    trained = adapter(base, ("q_proj", "v_proj"), style)
    prefix = "" if style == "torchtune" else "base_model.model."
    wrapped = re.compile(r"(q_proj|v_proj)\.weight$") if prefix else re.compile(r"(?!)()")
    full = {prefix + wrapped.sub(r"\1.base_layer.weight", name): value for name, value in base.items()} | trained
    for report in (matched(full, base, tmp_path), through_error(full, base, tmp_path)):
        kind, message = cause(report)
        assert kind == "adapter" and report["fix"] is None
        assert "what was trained would be ignored" in message
        assert "LoRA of rank 2 on q_proj and v_proj" in message
    kind, message = cause(matched(base, full, tmp_path))
    assert kind == "adapter" and "the file is its base" in message


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


# -- programs


@pytest.mark.parametrize("prefix", ["", "module.", "net."])
def test_the_weights_of_a_program_are_taken_out_first(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    torch.jit.script(model).save("script.pt")
    torch.save(with_prefix(dict(model.state_dict()), prefix), "b.pth")
    report = ckptool.match("script.pt", "b.pth")
    assert not report["fits"] and report["fix"] is None
    words = shlex.split(report["next"])
    assert run(words[1:]) == 0
    taken = ckptool.match(words[-1], "b.pth")
    assert taken["fits"] or taken["fix"]["complete"]


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
