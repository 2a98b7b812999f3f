"""``match`` against the values of both sides: casts, tables, constants, ties, and messages about other files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import model_layouts as layouts
import pytest
import torch
from model_layouts import FAMILIES, REARRANGED
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.cli.main import run

Q, K, V = (f"self_attn.{part}_proj" for part in "qkv")
#: Other places of the rows than those of the table that has these names and shapes.
ORDERS = [
    *(("qkv_proj", order) for order in itertools.permutations("qkv")),
    *(("gate_up_proj", order) for order in itertools.permutations(("gate", "up"))),
]


def made(path: Path) -> dict[str, torch.Tensor]:
    """Save a Llama as transformers does, with a configuration."""
    torch.manual_seed(0)
    heads = {"q": 32, "k": 16, "v": 16}
    own = {"model.embed_tokens.weight": torch.randn(64, 32), "lm_head.weight": torch.randn(64, 32)}
    own["model.norm.weight"] = torch.randn(32)
    for n in range(2):
        at = f"model.layers.{n}."
        own |= {f"{at}self_attn.{part}_proj.weight": torch.randn(rows, 32) for part, rows in heads.items()}
        own |= {f"{at}self_attn.o_proj.weight": torch.randn(32, 32), f"{at}mlp.down_proj.weight": torch.randn(32, 48)}
        own |= {f"{at}mlp.{part}_proj.weight": torch.randn(48, 32) for part in ("gate", "up")}
        own |= {f"{at}{norm}_layernorm.weight": torch.randn(32) for norm in ("input", "post_attention")}
    path.mkdir()
    save_file(own, path / "model.safetensors", metadata={"format": "pt"})
    numbers = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = {"model_type": "llama", "intermediate_size": 48, "vocab_size": 64, **numbers}
    (path / "config.json").write_text(json.dumps(config))
    return own


def fused(own: dict[str, torch.Tensor], orders: dict[str, tuple[str, ...]]) -> dict[str, torch.Tensor]:
    """Return the tensors with q, k, v and gate, up in one tensor each, in these orders."""
    for whole, parts in orders.items():
        own = layouts.fused(own, r"\.(q|k|v|gate|up)_proj", parts, whole.removesuffix("_proj"))
    return own


@pytest.mark.parametrize(("whole", "order"), ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_values_decide_about_the_rows_of_a_table(
    whole: str, order: tuple[str, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    own = made(tmp_path / "llama")
    orders = {"qkv_proj": ("q", "k", "v"), "gate_up_proj": ("gate", "up")} | {whole: order}
    target = {name: value.to(dtype).contiguous() for name, value in fused(own, orders).items()}
    save_file(target, tmp_path / "t.safetensors")
    out = tmp_path / "o.safetensors"
    call = ["match", str(tmp_path / "llama"), str(tmp_path / "t.safetensors"), "--apply", "-o", str(out), "-q"]
    if order not in (("q", "k", "v"), ("gate", "up")):  # the table has these names and shapes, and another order
        assert run(call) == 4 and not out.exists()
        notes = ckptool.match(tmp_path / "llama", tmp_path / "t.safetensors")["notes"]
        assert any("not offered: the target has the same values in another order" in note for note in notes)
        return
    assert run(call) == 0
    got = load_file(out)
    assert got.keys() == target.keys() and all(torch.equal(got[name].to(dtype), target[name]) for name in target)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_rows_that_no_rule_moves_are_not_offered(heads: int, tmp_path: Path) -> None:
    """q, k and v that alternate by head, and values of another training, of which nothing is claimed."""
    own = made(tmp_path / "llama")
    orders: dict[str, tuple[str, ...]] = {"qkv_proj": ("q", "k", "v"), "gate_up_proj": ("gate", "up")}
    target = fused(own, orders)
    for name in [name for name in target if "qkv" in name]:
        q, k, v = target[name].split([32, 16, 16])
        groups = zip(q.chunk(heads * 2), k.chunk(heads * 2), v.chunk(heads * 2))
        target[name] = torch.cat([rows for group in groups for rows in group]).contiguous()
    save_file(target, tmp_path / "t.safetensors")
    report = ckptool.match(tmp_path / "llama", tmp_path / "t.safetensors")
    assert report["fix"] is None and any("not offered" in note for note in report["notes"])
    other = {name: torch.randn(value.shape) for name, value in target.items()}
    save_file(other, tmp_path / "t.safetensors")
    fix = ckptool.match(tmp_path / "llama", tmp_path / "t.safetensors")["fix"]
    assert fix is not None and any("cannot confirm" in note for note in fix["notes"])


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["queries and keys exchanged", "layers reversed", "one square transposed"])
def test_a_cast_hides_no_wrong_place(
    how: str, family: str, dtypes: tuple[torch.dtype, torch.dtype], tmp_path: Path
) -> None:
    state = FAMILIES[family][0]()
    wrong = REARRANGED[how](state)
    for source, fits in ((state, True), (wrong, all(torch.equal(wrong[name], state[name]) for name in state))):
        half = min(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
        sides = [
            {name: value.to(half).to(dtype) for name, value in side.items()}
            for side, dtype in zip((source, state), dtypes)
        ]
        torch.save(sides[0], tmp_path / "a.pth")
        torch.save(sides[1], tmp_path / "b.pth")
        report = ckptool.match(tmp_path / "a.pth", tmp_path / "b.pth")
        assert ("wrong place" not in report["advice"]) == fits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_rounded_as_torch_rounds(dtype: torch.dtype, tmp_path: Path) -> None:
    """Equal values under other names, in another dtype: ties, large numbers and infinities included."""
    edges = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 7e4, -1e30, float("inf"), 6e-8, 1e-40, 0.1])
    source = {f"a{n}.weight": torch.cat([edges * (n + 1), torch.randn(7)]) for n in range(3)}
    torch.save(source, tmp_path / "a.pth")
    torch.save({f"b{n}.weight": source[f"a{n}.weight"].to(dtype) for n in range(3)}, tmp_path / "b.pth")
    fix = ckptool.match(tmp_path / "a.pth", tmp_path / "b.pth")["fix"]
    assert fix is not None and fix["complete"] and not any("cannot confirm" in note for note in fix["notes"])


def test_constants_prove_nothing(tmp_path: Path) -> None:
    """Norms of ones and zero biases are equal in any two models."""
    ours = {"x.scale_a": torch.ones(8), "y.shift_b": torch.zeros(8), "w.weight": torch.randn(8, 8)}
    torch.save(ours, tmp_path / "a.pth")
    theirs = {"norm.gain": torch.ones(8), "norm.offset": torch.zeros(8), "w.weight": torch.randn(8, 8)}
    torch.save(theirs, tmp_path / "b.pth")
    assert ckptool.match(tmp_path / "a.pth", tmp_path / "b.pth")["fix"] is None


@pytest.mark.parametrize("head", [torch.zeros(16, 8), torch.randn(16, 8)])
def test_a_head_that_the_target_does_not_tie_is_no_copy(head: torch.Tensor, tmp_path: Path) -> None:
    own = {"embed_tokens.weight": torch.randn(16, 8), "norm.weight": torch.randn(8)}
    torch.save(own, tmp_path / "a.pth")
    torch.save({**own, "lm_head.weight": head}, tmp_path / "b.pth")
    assert ckptool.match(tmp_path / "a.pth", tmp_path / "b.pth")["fix"] is None
