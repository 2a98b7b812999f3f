"""lora extract and lora resize: planted ranks, the best error by torch's SVD, the formulas of sd-scripts, and PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_adapters import factors, write_adapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.base.errors import RefusedError, TargetError

State = dict[str, torch.Tensor]
EMBEDDING, LAYER, CONV = "model.embed_tokens.weight", "model.layers.0.q_proj.weight", "conv.weight"
NORM, BIAS = "model.norm.weight", "model.layers.0.q_proj.bias"


def models(tmp_path: Path, rank: int = 3, dtype: torch.dtype = torch.float32) -> tuple[State, State]:
    """Write and return a base and a tuned model, whose matrices differ by products of ``rank``."""
    torch.manual_seed(rank)
    shapes = {EMBEDDING: (40, 24), LAYER: (300, 280), "model.layers.1.q_proj.weight": (300, 280), CONV: (8, 6, 3, 3)}
    base = {name: torch.randn(shape) for name, shape in {**shapes, NORM: (24,), BIAS: (300,)}.items()}
    tuned = {name: value + 0.1 for name, value in base.items()}
    for name, (rows, *inner) in shapes.items():
        inside = torch.Size(inner).numel()
        tuned[name] = base[name] + 0.01 * (torch.randn(rows, rank) @ torch.randn(rank, inside)).view(rows, *inner)
    for name, state in (("base", base), ("tuned", tuned)):
        save_file({key: value.to(dtype) for key, value in state.items()}, tmp_path / f"{name}.safetensors")
    return base, tuned


def saved(checkpoint: ckptool.Checkpoint, path: Path) -> State:
    ckptool.save(checkpoint, path)
    return load_file(path / "adapter_model.safetensors" if path.is_dir() else path)


def extracted(tmp_path: Path, rank: int, name: str = "adapter", **how: Any) -> State:
    made = ckptool.extract_lora(tmp_path / "tuned.safetensors", tmp_path / "base.safetensors", rank, **how)
    return saved(made, tmp_path / name)


def kept(checkpoint: ckptool.Checkpoint) -> dict[str, float]:
    """Return the part of the norm that the report says each module keeps."""
    changes = [change for deferred in checkpoint.deferred_changes for change in deferred()]
    return {change.path: float(change.what.split()[-4].removesuffix("%")) / 100 for change in changes}


def product(state: State, module: str) -> torch.Tensor:
    a, b = (state[f"{module}.{part}"].double() for part in ("lora_A.weight", "lora_B.weight"))
    return b.flatten(1) @ a.flatten(1)


@pytest.mark.parametrize("name", ["adapter", "adapter.safetensors"])
def test_a_planted_rank_is_recovered(name: str, tmp_path: Path) -> None:
    base, tuned = models(tmp_path)
    extracted(tmp_path, 4, name)
    merged = saved(ckptool.merge_lora(tmp_path / "base.safetensors", tmp_path / name), tmp_path / "merged.safetensors")
    assert merged.keys() == tuned.keys()
    for key in tuned:
        assert (merged[key] - tuned[key]).norm() <= 1e-5 * (tuned[key] - base[key]).norm(), key
    assert torch.equal(merged[NORM], tuned[NORM]) and torch.equal(merged[BIAS], tuned[BIAS])


def test_peft_loads_and_merges_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, tuned = models(tmp_path)
    extracted(tmp_path, 300)  # more than the smaller sides
    layers = [torch.nn.Module() for _ in range(2)]
    for number, layer in enumerate(layers):
        layer.q_proj = torch.nn.Linear(280, 300, bias=not number)
    inner, outer = torch.nn.Module(), torch.nn.Module()
    inner.embed_tokens, inner.norm = torch.nn.Embedding(40, 24), torch.nn.LayerNorm(24, bias=False)
    inner.layers, outer.model, outer.conv = torch.nn.ModuleList(layers), inner, torch.nn.Conv2d(6, 8, 3, bias=False)
    outer.load_state_dict(base)
    merged = peft.PeftModel.from_pretrained(outer, tmp_path / "adapter").merge_and_unload().state_dict()
    assert merged.keys() == tuned.keys()
    for key in tuned:
        torch.testing.assert_close(merged[key], tuned[key], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.5])
def test_the_error_is_the_best_of_its_rank(decay: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sides = [torch.linalg.qr(torch.randn(400, 400)).Q for _ in range(2)]
    delta = (sides[0] * torch.arange(1, 401) ** -decay) @ sides[1]
    delta = delta if decay else torch.randn(400, 400)
    save_file({"fc.weight": torch.zeros(400, 400)}, tmp_path / "base.safetensors")
    save_file({"fc.weight": delta}, tmp_path / "tuned.safetensors")
    checkpoint = ckptool.extract_lora(tmp_path / "tuned.safetensors", tmp_path / "base.safetensors", 32)
    state = saved(checkpoint, tmp_path / "adapter")
    values = torch.linalg.svdvals(delta.double())
    best = values[32:].square().sum().sqrt()
    error = (product(state, "base_model.model.fc") - delta.double()).norm()
    assert best * (1 - 1e-6) <= error <= best * (1 + 1e-3)
    assert kept(checkpoint)["fc"] == pytest.approx(float(values[:32].norm() / values.norm()), abs=2e-3)
    again = ckptool.extract_lora(tmp_path / "tuned.safetensors", tmp_path / "base.safetensors", 32)
    ckptool.save(again, tmp_path / "again")
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("adapter", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_gpt2_keeps_its_transposed_weights(tmp_path: Path) -> None:
    base = {"h.0.attn.c_attn.weight": torch.randn(20, 60), "h.0.attn.c_proj.weight": torch.randn(20, 20)}
    tuned = {name: value + torch.randn(len(value), 1) @ torch.randn(1, value.shape[1]) for name, value in base.items()}
    for name, state in (("base", base), ("tuned", tuned)):
        save_file(state, tmp_path / f"{name}.safetensors")
    state = extracted(tmp_path, 1)
    assert state["base_model.model.h.0.attn.c_attn.lora_A.weight"].shape == (1, 20)
    merged = saved(ckptool.merge_lora(tmp_path / "base.safetensors", tmp_path / "adapter"), tmp_path / "m.safetensors")
    for key in tuned:
        torch.testing.assert_close(merged[key], tuned[key], atol=1e-5, rtol=1e-5)


def test_rounding_alone_is_no_difference(tmp_path: Path) -> None:
    base, _ = models(tmp_path)
    save_file({key: value.bfloat16() for key, value in base.items()}, tmp_path / "tuned.safetensors")
    with pytest.raises(RefusedError, match="no difference"):
        extracted(tmp_path, 4)


def test_names_and_shapes_that_differ_are_refused(tmp_path: Path) -> None:
    base, tuned = models(tmp_path)
    head = {**tuned, "lm_head.weight": tuned[EMBEDDING].clone()}
    save_file(head, tmp_path / "tuned.safetensors")
    assert "base_model.model.lm_head.lora_A.weight" not in extracted(tmp_path, 2)  # a copy of the embedding
    for changed, message in (
        ({**tuned, "extra.weight": torch.ones(2, 2)}, "'extra.weight'"),
        ({**tuned, EMBEDDING: torch.ones(44, 24)}, "44.*40"),
        ({**base, NORM: tuned[NORM]}, "only biases and norms"),
        ({**tuned, "table": torch.ones(3, 3)}, "'table'"),
        ({**tuned, LAYER: tuned[LAYER] / 0}, "infinity"),
    ):
        save_file(changed, tmp_path / "tuned.safetensors")
        save_file({**base, "table": torch.zeros(3, 3)} if "table" in changed else base, tmp_path / "base.safetensors")
        with pytest.raises(RefusedError, match=message):
            extracted(tmp_path, 2, "refused")
    assert not (tmp_path / "refused").exists()
    with pytest.raises(TargetError, match="rank"):
        extracted(tmp_path, 0)


# -- resize


def fro_rank(values: torch.Tensor, part: float) -> int:
    """Return the rank of ``index_sv_fro`` in sd-scripts."""
    sums = torch.cumsum(values.square(), 0) / values.square().sum()
    return max(1, min(int(torch.searchsorted(sums, part**2)) + 1, len(values)))


def kohya(alpha: torch.Tensor, metadata: dict[str, str], path: Path) -> State:
    torch.manual_seed(1)
    state = {}
    for module, shape in {
        "lora_unet_down_to_q": (30, 20),
        "lora_te_mlp_fc1": (20, 50),
        "lora_unet_conv": (8, 6, 3, 3),
    }.items():
        kernel = shape[2:]
        state[f"{module}.lora_down.weight"] = (
            torch.randn(6, shape[1], *kernel) * torch.arange(1, 7).view(6, *(1 for _ in shape[1:])) ** -2.0
        )
        state[f"{module}.lora_up.weight"] = torch.randn(shape[0], 6, *(1 for _ in kernel))
        state[f"{module}.alpha"] = alpha.clone()
    save_file(state, path, metadata)
    return state


@pytest.mark.parametrize("alpha", [torch.tensor(3.0), torch.tensor(0.7, dtype=torch.bfloat16), torch.tensor(4)])
@pytest.mark.parametrize("how", [{"rank": 2}, {"rank": 9}, {"keep": 0.9}, {"keep": 0.999, "rank": 3}])
def test_kohya_is_resized_as_sd_scripts_does(how: dict[str, Any], alpha: torch.Tensor, tmp_path: Path) -> None:
    metadata = {"ss_network_dim": "6", "ss_network_alpha": "3", "sshs_model_hash": "0", "title": "kept"}
    state = kohya(alpha, metadata, tmp_path / "lora.safetensors")
    checkpoint = ckptool.resize_lora(tmp_path / "lora.safetensors", **how)
    result = saved(checkpoint, tmp_path / "out.safetensors")
    assert result.keys() == state.keys()
    ranks = set()
    for module in (name.removesuffix(".alpha") for name in state if name.endswith(".alpha")):
        down, up = (f"{module}.lora_{which}.weight" for which in ("down", "up"))
        full = state[up].double().flatten(1) @ state[down].double().flatten(1)
        u, values, v = torch.linalg.svd(full, full_matrices=False)
        rank = min(how.get("rank", 99), fro_rank(values[:6], how["keep"])) if "keep" in how else how["rank"]
        ranks.add(rank)
        assert result[up].shape == (len(state[up]), rank, *state[up].shape[2:])
        assert result[down].shape == (rank, *state[down].shape[1:]) and result[f"{module}.alpha"].dtype == alpha.dtype
        wanted = float(alpha) / 6 * (u[:, :rank] * values[:rank]) @ v[:rank]
        got = (
            float(result[f"{module}.alpha"]) / rank * result[up].double().flatten(1) @ result[down].double().flatten(1)
        )
        assert (got - wanted).norm() <= 1e-6 * wanted.norm()
        label = module.replace("lora_unet_", "unet.").replace("lora_te_", "te.")
        assert kept(checkpoint)[label] == pytest.approx(float(values[:rank].norm() / full.norm()), abs=2e-4)
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        header = file.metadata()
    assert header["ss_network_dim"] == (str(ranks.pop()) if len(ranks) == 1 else "Dynamic")
    assert header["title"] == "kept" and "sshs_model_hash" not in header


@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True}, {"rank_pattern": {"b.fc": 4}, "alpha_pattern": {"b.fc": 7}}]
)
@pytest.mark.parametrize("how", [{"rank": 3}, {"keep": 0.8}])
def test_peft_keeps_its_effect_with_new_settings(how: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(3)
    names = {"a.fc": 2, "b.fc": 4 if settings.get("rank_pattern") else 2, "fc": 2}
    tensors = {
        key: value
        for seed, (name, rank) in enumerate(names.items())
        for key, value in factors(name, 30, 20, rank, seed).items()
    }
    tensors["base_model.model.norm.weight"] = torch.ones(4)
    folder = write_adapter(tmp_path / "adapter", tensors, target_modules=["fc"], modules_to_save=["norm"], **settings)
    (folder / "README.md").write_text("kept")
    save_file(
        {f"{name}.weight": torch.zeros(30, 20) for name in names} | {"norm.weight": torch.zeros(4)},
        tmp_path / "base.safetensors",
    )
    merges = []
    for adapter in (folder, tmp_path / "out"):
        if adapter != folder:
            checkpoint = ckptool.resize_lora(folder, **how)
            ckptool.save(checkpoint, adapter)
        path = tmp_path / f"{adapter.name}.safetensors"
        merges.append(saved(ckptool.merge_lora(tmp_path / "base.safetensors", adapter), path))
    assert (tmp_path / "out" / "README.md").read_text() == "kept"
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "pt") as file:
        header = file.metadata()["adapter_config.json"]
    assert header == (tmp_path / "out" / "adapter_config.json").read_text()
    parts = kept(checkpoint)
    for name in names:
        before, after = (merge[f"{name}.weight"] for merge in merges)
        lost = (after - before).norm() / before.norm()
        assert lost <= (1 - parts[name] ** 2) ** 0.5 + 1e-5
        assert parts[name] >= how.get("keep", 0)
    assert torch.equal(merges[1]["norm.weight"], torch.ones(4))


def test_diffusers_gets_its_scale_into_the_matrices(tmp_path: Path) -> None:
    torch.manual_seed(2)
    state = {
        "unet.mid_block.to_q.lora_A.weight": torch.randn(4, 20),
        "unet.mid_block.to_q.lora_B.weight": torch.randn(30, 4),
    }
    settings = {"unet.r": 4, "unet.lora_alpha": 2, "unet.target_modules": ["to_q"]}
    save_file(state, tmp_path / "lora.safetensors", {"lora_adapter_metadata": json.dumps(settings)})
    result = saved(ckptool.resize_lora(tmp_path / "lora.safetensors", 4), tmp_path / "out.safetensors")
    assert result.keys() == state.keys()
    torch.testing.assert_close(
        product(result, "unet.mid_block.to_q"), product(state, "unet.mid_block.to_q") / 2, atol=1e-5, rtol=1e-5
    )
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert "lora_adapter_metadata" not in (file.metadata() or {})


def test_what_has_no_rank_is_refused(tmp_path: Path) -> None:
    tensors = {f"base_model.model.fc.hada_w{n}_{s}": torch.ones(2, 2) for n in (1, 2) for s in "ab"}
    folder = write_adapter(tmp_path / "adapter", tensors, peft_type="LOHA")
    with pytest.raises(RefusedError, match="only LoRA"):
        ckptool.resize_lora(folder, 1)
    with pytest.raises(TargetError, match="rank is missing"):
        ckptool.resize_lora(folder)
    with pytest.raises(TargetError, match="not a part of the norm"):
        ckptool.resize_lora(folder, keep=2)
