"""lora merge with PEFT's ``target_parameters``: experts in one tensor, or in a tensor each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_adapters import write_adapter
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.base.errors import RefusedError

State = dict[str, torch.Tensor]
EXPERTS, HIDDEN, INNER, RANK = 3, 8, 12, 2
MODULE = "model.layers.0.mlp.experts"
TARGETS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
SHAPES = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def matrices(out: int, inner: int, name: str = MODULE) -> tuple[State, torch.Tensor]:
    """Return the two matrices of all experts, and what they add to each expert, as PEFT computes it.

    They hold small integers, so that the order of sums does not matter.
    """
    a, b = (torch.randint(-9, 9, shape).float() for shape in ((RANK * EXPERTS, inner), (out, RANK * EXPERTS)))
    each = torch.einsum("ore,eri->eoi", b.reshape(out, RANK, EXPERTS), a.reshape(EXPERTS, RANK, inner))
    return {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}, each * 1.5


def trained() -> tuple[State, dict[str, torch.Tensor]]:
    """Return an adapter for both parameters; PEFT puts the wrapper of the first into that of the second."""
    torch.manual_seed(3)
    first, gate_up = matrices(*SHAPES["gate_up_proj"], f"{MODULE}.base_layer")
    second, down = matrices(*SHAPES["down_proj"])
    return {**first, **second}, {"gate_up_proj": gate_up, "down_proj": down}


def merged(base: State, adapter: State, tmp_path: Path, **settings: Any) -> State:
    save_file(base, tmp_path / "base.safetensors")
    folder = write_adapter(tmp_path / "adapter", adapter, **{**TARGETS, **settings})
    with ckptool.open(folder) as opened:
        ckptool.save(ckptool.merge_lora(tmp_path / "base.safetensors", opened), tmp_path / "out.safetensors")
    return load_file(tmp_path / "out.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["out, in", "in, out"])
def test_experts_in_one_tensor(order: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """PEFT rounds what it adds to the dtype of the weight first."""
    adapter, deltas = trained()
    base = {"model.norm.weight": torch.ones(HIDDEN)}
    for name, (out, inner) in SHAPES.items():
        base[f"{MODULE}.{name}"] = torch.randn(EXPERTS, *((out, inner) if order == "out, in" else (inner, out))).to(
            dtype
        )
    result = merged(base, adapter, tmp_path)
    assert torch.equal(result.pop("model.norm.weight"), base.pop("model.norm.weight"))
    for name, value in base.items():
        delta = deltas[name.rpartition(".")[2]]
        delta = delta if order == "out, in" else delta.transpose(1, 2)
        assert torch.equal(result[name], value + delta.to(dtype)), name


def mixtral() -> State:
    module = "model.layers.0.block_sparse_moe"
    shapes = {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}
    each = {
        f"{module}.experts.{number}.{name}.weight": torch.randn(shape)
        for number in range(EXPERTS)
        for name, shape in shapes.items()
    }
    return {**each, f"{module}.gate.weight": torch.randn(EXPERTS, HIDDEN)}


def test_experts_in_a_tensor_each(tmp_path: Path) -> None:
    """Files have the tensors of each expert, and a recipe says which rows of the parameter they are."""
    adapter, deltas = trained()
    base = mixtral()
    result = merged(base, adapter, tmp_path)
    gates, ups = deltas["gate_up_proj"].split(INNER, 1)
    of_kind = {"w1": gates, "w3": ups, "w2": deltas["down_proj"]}
    assert result.keys() == base.keys()
    for name, value in base.items():
        *_, number, kind, _ = name.split(".")
        wanted = value + of_kind[kind][int(number)] if kind in of_kind else value
        assert torch.equal(result[name], wanted), name


def test_a_square_parameter_has_the_order_of_its_neighbour(tmp_path: Path) -> None:
    first, gate_up = matrices(2 * HIDDEN, HIDDEN, f"{MODULE}.base_layer")
    second, down = matrices(HIDDEN, HIDDEN)
    base = {f"{MODULE}.gate_up_proj": torch.randn(EXPERTS, HIDDEN, 2 * HIDDEN)}
    base[f"{MODULE}.down_proj"] = torch.randn(EXPERTS, HIDDEN, HIDDEN)
    result = merged(base, {**first, **second}, tmp_path)
    for name, delta in (("gate_up_proj", gate_up), ("down_proj", down)):
        assert torch.equal(result[f"{MODULE}.{name}"], base[f"{MODULE}.{name}"] + delta.transpose(1, 2))
    with pytest.raises(RefusedError, match="in several ways, and the file does not say which"):
        merged(base, second, tmp_path)


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ({f"{MODULE}.down_proj": torch.ones(EXPERTS, HIDDEN + 1, INNER)}, "do not fit .*another base"),
        ({f"{MODULE}.down_proj": torch.ones(EXPERTS + 2, HIDDEN, INNER)}, "do not fit .*another base"),
        ({"model.layers.0.mlp.down_proj.weight": torch.ones(HIDDEN, INNER)}, "nor experts that make it up"),
    ],
)
def test_another_base_is_refused(base: State, words: str, tmp_path: Path) -> None:
    adapter, _ = matrices(HIDDEN, INNER)
    with pytest.raises(RefusedError, match=words):
        merged(base, adapter, tmp_path)


def test_a_claim_of_very_many_experts_is_refused(tmp_path: Path) -> None:
    """Expanded tensors take no space in a file of torch."""
    many, prefix = 1 << 40, f"base_model.model.{MODULE}"
    torch.save({f"{MODULE}.down_proj": torch.ones(1).expand(many, HIDDEN, INNER)}, tmp_path / "base.pth")
    folder = write_adapter(tmp_path / "adapter", {}, **TARGETS)
    (folder / "adapter_model.safetensors").unlink()
    a, b = torch.ones(1).expand(many * RANK, INNER), torch.ones(1).expand(HIDDEN, many * RANK)
    torch.save({f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}, folder / "adapter_model.bin")
    with pytest.raises(RefusedError, match="are the most"), ckptool.open(folder) as opened:
        ckptool.merge_lora(tmp_path / "base.pth", opened)


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_peft_merges_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "head_dim": 16}
    make = getattr(transformers, f"{name}ForCausalLM")
    model = make(getattr(transformers, f"{name}Config")(**sizes, **heads)).bfloat16()
    model.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], init_lora_weights=False, **TARGETS)
    wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(tmp_path / "adapter")
    again = make.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    peft.PeftModel.from_pretrained(again, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    with ckptool.open(tmp_path / "adapter") as opened:
        ckptool.save(ckptool.merge_lora(tmp_path / "base", opened), tmp_path / "out")
    result, wanted = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "merged"))
    assert result.keys() == wanted.keys() and [key for key in wanted if not torch.equal(result[key], wanted[key])] == []
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"]
