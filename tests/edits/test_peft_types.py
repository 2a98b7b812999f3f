"""merge-lora with AdaLoRA and LoHa, against the formulas of PEFT, and PEFT itself where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lora_adapters import write_adapter
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.base.errors import RefusedError

State = dict[str, torch.Tensor]
MODULE = "layer.proj"
PREFIX = f"base_model.model.{MODULE}"
OUT, INNER, RANK = 150, 96, 4


def merged(base: State, adapter: State, tmp_path: Path, weight: float = 1, **settings: Any) -> torch.Tensor:
    save_file(base, tmp_path / "base.safetensors")
    folder = write_adapter(tmp_path / "adapter", adapter, **settings)
    with ckptool.open(folder) as opened:
        edited = ckptool.merge_lora(tmp_path / "base.safetensors", opened, weights=[weight])
        ckptool.save(edited, tmp_path / "out.safetensors", force=True)
    return load_file(tmp_path / "out.safetensors")[f"{MODULE}.weight"]


def adalora(out: int = OUT, inner: int = INNER) -> State:
    torch.manual_seed(6)
    a, b, e = torch.randn(RANK, inner), torch.randn(out, RANK), torch.randn(RANK, 1)
    return {f"{PREFIX}.lora_A": a, f"{PREFIX}.lora_B": b, f"{PREFIX}.lora_E": e}


def loha(out: int = OUT, inner: int = INNER) -> State:
    torch.manual_seed(7)
    shapes = {"a": (out, RANK), "b": (RANK, inner)}
    return {f"{PREFIX}.hada_w{n}_{which}": torch.randn(shapes[which]) for n in (1, 2) for which in "ab"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [8, -1])
def test_adalora_is_divided_by_its_first_rank(alpha: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """An alpha of 0 or less means the rank. The file may hold fewer values than ``init_r``, after pruning."""
    weight = torch.randn(OUT, INNER).to(dtype)
    a, b, e = adalora().values()
    settings = {"peft_type": "ADALORA", "init_r": 12, "lora_alpha": alpha, "r": 8}
    result = merged({f"{MODULE}.weight": weight}, adalora(), tmp_path, **settings)
    delta = b @ (a * e) * (alpha if alpha > 0 else 12) / (torch.tensor([12.0]) + 1e-5)
    assert torch.equal(result, (weight.float() + delta).to(dtype))


def test_adalora_of_conv1d_is_transposed(tmp_path: Path) -> None:
    weight = torch.randn(INNER, OUT)
    a, b, e = adalora().values()
    settings = {"peft_type": "ADALORA", "init_r": 4, "lora_alpha": 2, "fan_in_fan_out": True}
    result = merged({f"{MODULE}.weight": weight}, adalora(), tmp_path, **settings)
    assert torch.equal(result, weight + (b @ (a * e)).T * 2 / (torch.tensor([4.0]) + 1e-5))


@pytest.mark.parametrize("weight", [1, 0.5])
def test_loha_multiplies_two_products(weight: float, tmp_path: Path) -> None:
    base = torch.randn(OUT, INNER)
    a, b, c, d = loha().values()
    settings = {"peft_type": "LOHA", "r": RANK, "alpha": 3, "lora_alpha": 99}
    result = merged({f"{MODULE}.weight": base}, loha(), tmp_path, weight, **settings)
    assert torch.equal(result, base + ((a @ b) * (c @ d)) * (3 / RANK * weight))


LOHA = {"peft_type": "LOHA", "r": RANK, "lora_alpha": None}
ADALORA = {"peft_type": "ADALORA"}


@pytest.mark.parametrize(
    ("adapter", "settings", "words"),
    [
        (dict([*loha().items()][:3]), LOHA, "has no partners"),
        ({**loha(), f"{PREFIX}.hada_t1": torch.ones(2, 2)}, LOHA, "is not known"),
        (loha(), {**LOHA, "r": 5}, "has the rank 4"),
        (loha(inner=7), LOHA, "another base"),
        (loha(), {**LOHA, "alpha": "much"}, "is not a number"),
        (dict([*adalora().items()][:2]), ADALORA, "needs lora_E with AdaLoRA"),
        (adalora(), {}, "needs lora_E with AdaLoRA"),
        ({**adalora(), f"{PREFIX}.lora_E": torch.ones(3, 1)}, ADALORA, "3 elements where 4 are needed"),
        (adalora(), {**ADALORA, "init_r": "x"}, "its init_r .* is not a number"),
        (adalora(inner=7), ADALORA, "another base"),
    ],
)
def test_a_refusal_says_what_is_wrong(adapter: State, settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=words):
        merged({f"{MODULE}.weight": torch.ones(OUT, INNER)}, adapter, tmp_path, **settings)


@pytest.mark.parametrize("kind", ["AdaLora", "LoHa"])
def test_peft_merges_to_the_same_bytes(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 131, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=150)).bfloat16()
    model.save_pretrained(tmp_path / "base")
    own = {"target_r": 2, "init_r": 4, "tinit": 1, "tfinal": 2, "total_step": 10} if kind == "AdaLora" else {"r": 4}
    wrapped = peft.get_peft_model(model, getattr(peft, f"{kind}Config")(target_modules=["q_proj", "up_proj"], **own))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name or "hada_" in name:
            parameter.data = torch.randn(parameter.shape) * 0.1
    wrapped.save_pretrained(tmp_path / "adapter")
    again = type(model).from_pretrained(tmp_path / "base", dtype="auto")
    peft.PeftModel.from_pretrained(again, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    with ckptool.open(tmp_path / "adapter") as opened:
        ckptool.save(ckptool.merge_lora(tmp_path / "base", opened), tmp_path / "out")
    result, wanted = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "merged"))
    assert result.keys() == wanted.keys() and [key for key in wanted if not torch.equal(result[key], wanted[key])] == []
