"""lora convert: every layout and back over all families, and against diffusers' converters where it is installed."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.base.errors import RefusedError, TargetError
from ckptool.edits.adapters import description
from ckptool.edits.lora_layouts import LAYOUTS
from ckptool.edits.model_config import LOOKUP
from ckptool.formats.recipes.loras import Family, ModuleRule, families

State = dict[str, torch.Tensor]
RANK = 2
#: How each layout spells the two matrices.
SPELLED = {"kohya": ("lora_down.weight", "lora_up.weight")}
SPELLED |= dict.fromkeys(("comfyui", "diffusers", "peft"), ("lora_A.weight", "lora_B.weight"))


def side_of(family: Family, layout: str) -> int:
    return {"kohya": family.kohya, "comfyui": family.comfyui}.get(layout, 1)


def modules(family: Family, layout: str) -> dict[str, int]:
    """Return the name and the rows of every module that two layers of a family have, in a layout."""
    side, found = side_of(family, layout), {}
    for rule in family.rules:
        symbols = sorted(rule.a.symbols)
        for numbers in product((0, 1), repeat=len(symbols)):
            values = dict(zip(symbols, numbers))
            names = [pattern.filled(values) for pattern in rule.b]
            if rule.one_way or any(map(family.lacks, names)) or not known(family, rule, values, side):
                continue
            if family.model in ("text_encoder", "model") and LOOKUP.search(names[0]):
                continue  # a table, which only kohya and ComfyUI have
            shares = rule.shares if len(rule.shares) > 1 else (4,)
            if side:
                found |= {name: 2 * share for name, share in zip(names, shares)}
            else:
                found[rule.a.filled(values)] = 2 * sum(shares)
    return found


def known(family: Family, rule: ModuleRule, values: dict[str, int], side: int) -> bool:
    """Return whether a family has the module that a rule makes of these numbers, and no other rule has it too."""
    name = rule.sides[side][0].filled(values)
    return {place.rule for place in family.places(name, dotless=False)} == {rule}


def prefix(family: Family, layout: str) -> str:
    if layout == "peft":
        return "base_model.model."
    if family.model == "text_encoder":
        encoder = "t5" if family.key == "t5" else "clip"
        return {
            "kohya": {"t5": "lora_te3_", "clip": "lora_te_"}[encoder],
            "comfyui": {"t5": "text_encoders.t5xxl.transformer.", "clip": "text_encoders.clip_l.transformer."}[encoder],
            "diffusers": "text_encoder.",
        }[layout]
    return {"kohya": "lora_unet_", "comfyui": "diffusion_model.", "diffusers": f"{family.model}."}[layout]


def adapter(family: Family, layout: str, scale: float, dtype: torch.dtype = torch.float16) -> State:
    """Return a LoRA of all modules of a family, as a program with this layout writes it."""
    torch.manual_seed(len(layout))
    state: State = {}
    down, up = SPELLED[layout]
    for name, rows in modules(family, layout).items():
        spelled = prefix(family, layout) + (name.replace(".", "_") if layout == "kohya" else name)
        state[f"{spelled}.{down}"] = torch.randn(RANK, 6).to(dtype)
        state[f"{spelled}.{up}"] = torch.randn(rows, RANK).to(dtype)
        if layout == "kohya" or (layout == "comfyui" and scale != 1):
            state[f"{spelled}.alpha"] = torch.tensor(scale * RANK).to(dtype)
    return state


def written(folder: Path, state: State, layout: str, scale: float) -> Path:
    if layout != "peft":
        save_file(state, folder / "lora.safetensors", {"format": "pt"})
        return folder / "lora.safetensors"
    folder = folder / "adapter"
    folder.mkdir()
    save_file(state, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": scale * RANK}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def converted(path: Path, layout: str, output: Path, **how: object) -> Path:
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.convert_lora(checkpoint, layout, **how), output)  # type: ignore[arg-type]
    return output


def loaded(path: Path) -> State:
    return load_file(path / "adapter_model.safetensors" if path.is_dir() else path)


def suffix(layout: str) -> str:
    return "" if layout == "peft" else ".safetensors"


def lossless(family: Family, one: str, other: str) -> bool:
    """Return whether a program has a place for the model, and names of both are known."""
    if family.model == "model":
        return {one, other} <= {"kohya", "peft"}
    return family.key != "t5" or "diffusers" not in (one, other)


@pytest.mark.parametrize("key", families())
def test_every_layout_and_back_is_the_same_bit_for_bit(key: str, tmp_path: Path) -> None:
    family = families()[key]
    for number, (one, other) in enumerate((a, b) for a in LAYOUTS for b in LAYOUTS if a != b):
        if not lossless(family, one, other):
            continue
        scale = 1.0 if "diffusers" in (one, other) else 0.5
        folder = tmp_path / str(number)
        folder.mkdir()
        state = adapter(family, one, scale)
        path = written(folder, state, one, scale)
        wanted = f":{key}" if family.model in ("unet", "transformer") else ""
        there = converted(path, other + wanted, folder / f"there{suffix(other)}")
        back = loaded(converted(there, one + wanted, folder / f"back{suffix(one)}"))
        first, last = ({name: tensor.tolist() for name, tensor in each.items()} for each in (state, back))
        assert first == last, f"{one} to {other} and back"
        assert {tensor.dtype for tensor in back.values()} == {torch.float16}


@pytest.mark.parametrize("key", families())
def test_no_two_modules_have_the_same_name_without_dots(key: str) -> None:
    family = families()[key]
    for layout in ("kohya", "diffusers"):
        names = list(modules(family, layout))
        assert len({name.replace(".", "_") for name in names}) == len(names)
        assert all(family.places(name.replace(".", "_"), dotless=True) for name in names)


def effect(state: State, down: str, up: str) -> torch.Tensor:
    return state[up].double() @ state[down].double()


def flux(rank: int = 6, alpha: float = 3.0, up: torch.Tensor | None = None) -> State:
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    torch.manual_seed(rank)
    up = torch.randn(24, rank) if up is None else up
    down = torch.randn(rank, 8)
    return {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(alpha)}


def blockwise(rank: int = 6) -> torch.Tensor:
    """Return a matrix with values in the diagonal blocks alone; the zeros have both signs."""
    return torch.randn(24, rank) * torch.block_diag(*(torch.ones(8, rank // 3) for _ in range(3)))


@pytest.mark.parametrize("up", (None, blockwise()))
def test_a_fused_module_is_split_without_a_change_of_its_effect(up: torch.Tensor | None, tmp_path: Path) -> None:
    state = flux(up=up)
    save_file(state, tmp_path / "lora.safetensors")
    split = loaded(converted(tmp_path / "lora.safetensors", "diffusers:flux", tmp_path / "out.safetensors"))
    names = [f"transformer.transformer_blocks.0.attn.to_{each}" for each in "qkv"]
    product = 0.5 * effect(state, *list(state)[:2])
    assert split[f"{names[0]}.lora_A.weight"].shape == ((6 if up is None else 2), 8)
    parts = [effect(split, f"{name}.lora_A.weight", f"{name}.lora_B.weight") for name in names]
    torch.testing.assert_close(torch.cat(parts), product, rtol=1e-6, atol=1e-6)


def test_parts_with_different_scales_and_a_missing_one_are_joined(tmp_path: Path) -> None:
    state, products = {}, []
    for number, each in enumerate("qv"):
        name = f"base_model.model.transformer_blocks.0.attn.to_{each}"
        state |= {f"{name}.lora_A.weight": torch.randn(2, 8), f"{name}.lora_B.weight": torch.randn(8, 2)}
        products.append((0.5, 2.0)[number] * effect(state, f"{name}.lora_A.weight", f"{name}.lora_B.weight"))
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(state, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "alpha_pattern": {"to_v": 4}}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    made = loaded(converted(folder, "kohya:flux", tmp_path / "out.safetensors"))
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    scale = float(made[f"{name}.alpha"]) / len(made[f"{name}.lora_down.weight"])
    product = scale * effect(made, f"{name}.lora_down.weight", f"{name}.lora_up.weight")
    torch.testing.assert_close(product[:8], products[0], rtol=1e-6, atol=1e-6)
    assert not product[8:16].any()
    torch.testing.assert_close(product[16:], products[1], rtol=1e-6, atol=1e-6)


def test_peft_loads_the_folder_and_merges_the_same_product(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    name, state = "model_layers_{}_mlp_down_proj", {}
    for layer, alpha in ((0, 1.0), (1, 3.0)):
        spelled = f"lora_unet_{name.format(layer)}"
        state |= {f"{spelled}.lora_down.weight": torch.randn(2, 6), f"{spelled}.lora_up.weight": torch.randn(4, 2)}
        state[f"{spelled}.alpha"] = torch.tensor(alpha)
    save_file(state, tmp_path / "lora.safetensors")
    converted(tmp_path / "lora.safetensors", "peft", tmp_path / "adapter")
    layer = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"down_proj": torch.nn.Linear(6, 4)})})
    inner = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer, deepcopy(layer)])})
    model = torch.nn.ModuleDict({"model": inner})
    model.forward = lambda x: x  # type: ignore[method-assign]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    merged = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter")).merge_and_unload().state_dict()
    for number, scale in ((0, 0.5), (1, 1.5)):
        spelled, key = f"lora_unet_{name.format(number)}", f"model.layers.{number}.mlp.down_proj.weight"
        product = scale * effect(state, f"{spelled}.lora_down.weight", f"{spelled}.lora_up.weight")
        torch.testing.assert_close((merged[key] - before[key]).double(), product, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "converter", "source"),
    (
        ("flux", "_convert_kohya_flux_lora_to_diffusers", "kohya"),
        ("wan", "_convert_musubi_wan_lora_to_diffusers", "kohya"),
        ("wan", "_convert_non_diffusers_wan_lora_to_diffusers", "comfyui"),
        ("qwen-image", "_convert_non_diffusers_qwen_lora_to_diffusers", "kohya"),
    ),
)
def test_diffusers_converts_to_the_same_bits(key: str, converter: str, source: str, tmp_path: Path) -> None:
    library = pytest.importorskip("diffusers.loaders.lora_conversion_utils")
    family = families()[key]
    scale = 1.0 if source == "comfyui" else 1.5
    state = adapter(family, source, scale, torch.bfloat16)
    # Modules outside of the blocks lose their prefix in diffusers, or their scale; linear1 has the size of the model,
    # and norms have no matrices.
    state = {name: tensor for name, tensor in state.items() if "blocks" in name}
    state = {name: tensor for name, tensor in state.items() if "linear1" not in name and "norm" not in name}
    path = written(tmp_path, state, source, scale)
    made = loaded(converted(path, f"diffusers:{key}", tmp_path / "out.safetensors"))
    expected = getattr(library, converter)(dict(state))
    expected = {name if name.startswith("transformer.") else f"transformer.{name}": t for name, t in expected.items()}
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in made)


# -- refused


def refusal(state: State, layout: str, folder: Path, **how: object) -> str:
    save_file(state, folder / "lora.safetensors")
    with pytest.raises(RefusedError) as caught:
        converted(folder / "lora.safetensors", layout, folder / "out.safetensors", **how)
    return str(caught.value)


def pair(name: str, shape: tuple[int, int] = (8, 8)) -> State:
    return {f"{name}.lora_down.weight": torch.ones(2, shape[1]), f"{name}.lora_up.weight": torch.ones(shape[0], 2)}


def test_what_a_layout_cannot_hold_is_refused(tmp_path: Path) -> None:
    encoder = "lora_te3_encoder_block_0_layer_0_SelfAttention_q"
    assert "diffusers has no place" in refusal(pair(encoder), "diffusers", tmp_path)
    kronecker = {f"lora_unet_double_blocks_0_img_attn_qkv.lokr_w{n}": torch.ones(3 * n, 2 * n) for n in (1, 2)}
    assert "only plain matrices can" in refusal(kronecker, "diffusers", tmp_path)
    proj = "lora_unet_double_blocks_0_img_attn_proj"
    columns = {**pair(proj), f"{proj}.dora_scale": torch.ones(1, 8)}
    assert "dora_scale" in refusal(columns, "peft", tmp_path)
    assert ".diff" in refusal({**pair(proj), f"{proj}.diff": torch.ones(8, 8)}, "diffusers", tmp_path)
    save_file({**pair(proj), f"{proj}.diff": torch.zeros(8, 8)}, tmp_path / "lora.safetensors")
    made = loaded(converted(tmp_path / "lora.safetensors", "diffusers", tmp_path / "zero.safetensors"))
    assert len(made) == 2


def test_with_allow_loss_the_rest_is_written_and_named(tmp_path: Path) -> None:
    proj = "lora_unet_double_blocks_0_img_attn_proj"
    save_file({**pair(proj), f"{proj}.diff": torch.ones(8, 8)}, tmp_path / "lora.safetensors")
    with ckptool.open(tmp_path / "lora.safetensors") as checkpoint:
        edited = ckptool.convert_lora(checkpoint, "diffusers", allow_loss=["entries"])
        assert any("left out" in note and ".diff" in note for note in edited.changes[-1].notes)
        ckptool.save(edited, tmp_path / "out.safetensors")
    assert len(loaded(tmp_path / "out.safetensors")) == 2


def test_zeros_that_a_training_left_have_no_loss(tmp_path: Path) -> None:
    state = pair("lora_unet_double_blocks_0_img_attn_proj")
    for name in ("lora_te3_encoder_block_0_layer_0_SelfAttention_q", "lora_te1_text_model_embeddings_token_embedding"):
        assert "has no place" in refusal({**state, **pair(name)}, "diffusers", tmp_path)
        left = {key: torch.zeros_like(tensor) for key, tensor in pair(name).items()}
        save_file({**state, **left}, tmp_path / "left.safetensors")
        made = converted(tmp_path / "left.safetensors", "diffusers", tmp_path / f"{name}.safetensors")
        assert len(loaded(made)) == 2


def test_norms_of_wan_move_and_a_module_of_no_model_is_named(tmp_path: Path) -> None:
    state = {**pair("diffusion_model.blocks.0.ffn.0"), "diffusion_model.blocks.0.norm3.diff": torch.ones(8)}
    assert "'diffusion_model.blocks.0.norm3.diff'" in refusal(state, "diffusers", tmp_path)
    made = loaded(converted(tmp_path / "lora.safetensors", "kohya", tmp_path / "out.safetensors"))
    assert "lora_unet_blocks_0_norm3.diff" in made
    other = {**state, **pair("diffusion_model.blocks.0.other")}
    assert "the module 'blocks.0.other' beside" in refusal(other, "kohya", tmp_path)
    assert "SDXL has no module 'blocks.0.ffn.0'" in refusal(state, "kohya:sdxl", tmp_path)


def test_a_part_of_a_fused_module_is_padded_with_zeros(tmp_path: Path) -> None:
    names = [f"single_blocks.0.processor.qkv_lora.{part}.weight" for part in ("down", "up")]
    state = {names[0]: torch.randn(2, 8), names[1]: torch.randn(24, 2)}
    save_file(state, tmp_path / "lora.safetensors")
    made = loaded(converted(tmp_path / "lora.safetensors", "kohya", tmp_path / "out.safetensors"))
    up = made["lora_unet_single_blocks_0_linear1.lora_up.weight"]
    assert torch.equal(up, torch.cat([state[names[1]], torch.zeros(32, 2)]))
    assert torch.equal(made["lora_unet_single_blocks_0_linear1.lora_down.weight"], state[names[0]])


@pytest.mark.parametrize(
    ("down", "up"), (((), ()), ((4,), (8,)), ((0, 8), (8, 0)), ((4, 0), (8, 4)), ((4, 8), (8, 3))), ids=str
)
def test_matrices_without_a_product_are_refused(down: tuple[int, ...], up: tuple[int, ...], tmp_path: Path) -> None:
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    state = {f"{name}.lora_down.weight": torch.ones(down), f"{name}.lora_up.weight": torch.ones(up)}
    assert "do not fit together" in refusal(state, "diffusers", tmp_path)
    with pytest.raises(RefusedError, match="do not fit together"):
        ckptool.resize_lora(tmp_path / "lora.safetensors", 2)


@pytest.mark.parametrize("kind", ("LOHA", "IA3", "ADALORA"))
def test_settings_of_another_kind_are_refused(kind: str, tmp_path: Path) -> None:
    adapter_path = written(tmp_path, adapter(families()["llama"], "peft", 1.0), "peft", 1.0)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"peft_type": kind, "r": RANK, "lora_alpha": 1}), encoding="utf-8")
    for layout in ("kohya", "peft"):
        with pytest.raises(RefusedError, match=f"it is {kind}"):
            converted(adapter_path, layout, tmp_path / f"out{suffix(layout)}", config=str(config))


def test_settings_beside_count_and_single_tokens_stay_in_peft(tmp_path: Path) -> None:
    folder = written(tmp_path, adapter(families()["llama"], "peft", 1.0), "peft", 1.0)
    with ckptool.open(folder) as checkpoint:
        ckptool.save(ckptool.resize_lora(checkpoint, 1), tmp_path / "one")
    config, weights = tmp_path / "one/adapter_config.json", tmp_path / "one/adapter_model.safetensors"
    config.write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 7}), encoding="utf-8")
    copied = Path(shutil.copy(weights, folder / "copied.safetensors"))
    for path, alpha in ((tmp_path / "one", 7), (weights, 7), (copied, 1)):
        made = loaded(converted(path, "kohya", tmp_path / f"{path.name}.{alpha}.safetensors"))
        assert {tensor.item() for key, tensor in made.items() if key.endswith("alpha")} == {alpha}
    key, half = next(iter(load_file(path).items()))
    save_file({key: half}, weights)
    with ckptool.open(weights) as checkpoint:
        assert "an adapter, not a model:" in description(checkpoint) and "no partner" in description(checkpoint)
    tokens = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    save_file({**load_file(path), tokens: torch.ones(1, 6)}, weights)
    with pytest.raises(RefusedError, match="no place for 1 tensor"):
        converted(weights, "comfyui", tmp_path / "no.safetensors")
    assert tokens in loaded(converted(weights, "peft", tmp_path / "peft"))


def test_a_scale_that_a_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    name = "lora_unet_double_blocks_0_img_attn_proj"
    state = {key: tensor.half() for key, tensor in pair(name).items()}
    save_file({**state, f"{name}.alpha": torch.tensor(1e30)}, tmp_path / "lora.safetensors")
    with pytest.raises(RefusedError, match="does not fit into float16"):
        converted(tmp_path / "lora.safetensors", "diffusers", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_other_state_dicts_and_parts_of_glora_keep_their_names(tmp_path: Path) -> None:
    name = "lora_unet_double_blocks_0_img_attn_proj"
    parts = {f"{name}.{part}.weight": torch.ones(2, 2) for part in ("a1", "a2", "b1", "b2")}
    torch.save({"one": parts, "other": {key: 2 * tensor for key, tensor in parts.items()}}, tmp_path / "two.pth")
    made = loaded(converted(tmp_path / "two.pth", "kohya", tmp_path / "out.safetensors", key="other"))
    assert made.keys() == parts.keys()
    assert all((tensor == 2).all() for tensor in made.values())


def test_half_a_pair_and_unknown_underscores_are_refused(tmp_path: Path) -> None:
    whole = pair("lora_unet_double_blocks_0_img_attn_proj")
    assert "has no partner" in refusal(dict([next(iter(whole.items()))]), "diffusers", tmp_path)
    assert 'which "_" stand for dots' in refusal(pair("lora_unet_new_block_1_to_q"), "diffusers", tmp_path)


def test_names_of_several_models_are_asked_for(tmp_path: Path) -> None:
    state = pair("unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q")
    assert "fit several models" in refusal(state, "kohya", tmp_path)
    for key, start in (("sd1", "lora_unet_mid_block"), ("sdxl", "lora_unet_middle_block")):
        made = converted(tmp_path / "lora.safetensors", f"kohya:{key}", tmp_path / f"{key}.safetensors")
        assert all(each.startswith(start) for each in loaded(made))
    assert loaded(converted(tmp_path / "lora.safetensors", "comfyui", tmp_path / "c.safetensors"))
    with pytest.raises(TargetError):
        converted(tmp_path / "lora.safetensors", "kohya:sd9", tmp_path / "no.safetensors")


def test_the_header_keeps_what_stays_true(tmp_path: Path) -> None:
    texts = {"ss_network_module": "networks.lora_flux", "sshs_model_hash": "0123", "format": "pt"}
    texts |= {"ss_network_alpha": "1", "ss_network_dim": "2"}
    save_file(pair("lora_unet_double_blocks_0_img_attn_proj"), tmp_path / "lora.safetensors", texts)
    with safe_open(converted(tmp_path / "lora.safetensors", "diffusers", tmp_path / "out.safetensors"), "pt") as opened:
        assert opened.metadata() == {"ss_network_module": "networks.lora_flux", "format": "pt"}
    start = "transformer.transformer_blocks.0.attn.to_"
    parts = {key: at * value for at in (1, 2, 3) for key, value in pair(f"{start}{'_qkv'[at]}").items()}
    save_file(parts, tmp_path / "parts.safetensors", texts)
    with safe_open(converted(tmp_path / "parts.safetensors", "kohya:flux", tmp_path / "k.safetensors"), "pt") as opened:
        assert (opened.metadata()["ss_network_dim"], opened.metadata()["ss_network_alpha"]) == ("6", "6")
