"""lora merge with adapters of kohya and diffusers, against kohya's formula, and diffusers where it is installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.base.errors import RefusedError

State = dict[str, torch.Tensor]
ATTENTION = "down_blocks.0.attentions.0.transformer_blocks.0"
#: Weights of a U-Net by module: linear layers and convolutions.
UNET = {
    f"{ATTENTION}.attn1.to_q": (70, 8),
    f"{ATTENTION}.attn1.to_out.0": (8, 8),
    f"{ATTENTION}.ff.net.0.proj": (32, 8),
    "down_blocks.0.attentions.0.proj_in": (8, 8, 1, 1),
    "down_blocks.0.resnets.0.conv1": (8, 4, 3, 3),
    "time_embedding.linear_1": (8, 4),
}
TEXT = {f"text_model.encoder.layers.{n}.{name}": (8, 8) for n in (0, 1) for name in ("self_attn.q_proj", "mlp.fc1")}
#: Modules with another name in the first LoRAs of diffusers.
TO_OLD = {
    "to_q": "to_q",
    "to_out.0": "to_out",
    "q_proj": "to_q",
    "k_proj": "to_k",
    "v_proj": "to_v",
    "out_proj": "to_out",
}
KOHYA = {"text_encoder": "te", "text_encoder_1": "te1", "text_encoder_2": "te2"}


def weights(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> State:
    torch.manual_seed(len(shapes))
    state = {f"{module}.weight": torch.randn(shape) for module, shape in shapes.items()}
    return {name: value.to(dtype) for name, value in {**state, "norm.bias": torch.ones(3)}.items()}


def matrices(shape: tuple[int, ...], rank: int = 2, linear: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B for a weight; a convolution has A of the kernel's size, unless it is taken for a linear layer."""
    kernel = () if linear else shape[2:]
    return torch.randn(rank, shape[1], *kernel), torch.randn(shape[0], rank, *(1 for _ in kernel))


def named(style: str, model: str, module: str, which: str) -> str:
    """Return the name of A or B as a library writes it."""
    direction = "down" if which == "A" else "up"
    if style == "kohya":
        return f"lora_{KOHYA.get(model, model)}_{module.replace('.', '_')}.lora_{direction}.weight"
    if style == "PEFT":
        return f"{model}.{module}.lora_{which}.weight"
    last = next((name for name in TO_OLD if module.endswith(f".{name}")), "")
    if style == "processor" and last:
        processor = "processor." if model == "unet" else ""
        return f"{model}.{module.removesuffix(last)}{processor}{TO_OLD[last]}_lora.{direction}.weight"
    return f"{model}.{module}.{'lora_linear_layer' if model != 'unet' else 'lora'}.{direction}.weight"


def lora(style: str, model: str, shapes: dict[str, tuple[int, ...]], linear: bool = False) -> tuple[State, State]:
    """Return an adapter, and B @ A by the name of the weight, as kohya computes it."""
    adapter, deltas = State(), State()
    for module, shape in shapes.items():
        a, b = matrices(shape, linear=linear)
        adapter |= {named(style, model, module, "A"): a, named(style, model, module, "B"): b}
        if a.dim() > 2 and shape[2:] != (1, 1):
            delta = torch.nn.functional.conv2d(a.transpose(0, 1), b).transpose(0, 1)
        else:
            delta = (b.flatten(1) @ a.flatten(1)).reshape(shape)
        deltas[f"{module}.weight"] = delta
    return adapter, deltas


def merged(base: State | Path, adapter: State | Path, tmp_path: Path, **metadata: str) -> State:
    for name, item in (("base", base), ("adapter", adapter)):
        if isinstance(item, dict):
            save_file(item, tmp_path / f"{name}.safetensors", {"format": "pt", **metadata})
    paths = [item if isinstance(item, Path) else tmp_path / f"{name}.safetensors"
             for name, item in (("base", base), ("adapter", adapter))]  # fmt: skip
    with ckptool.open(paths[1]) as opened:
        ckptool.save(ckptool.merge_lora(paths[0], opened), tmp_path / "out.safetensors", force=True)
    return load_file(tmp_path / "out.safetensors")


def assert_merged(result: State, base: State, deltas: State, scale: float = 1.0) -> None:
    """Assert that a result is W + delta * scale, rounded once, and that all else is the same."""
    assert result.keys() == base.keys() and deltas.keys() <= base.keys()
    for name, value in base.items():
        wanted = (value.float() + deltas[name] * scale).to(value.dtype) if name in deltas else value
        assert torch.equal(result[name], wanted), name


# -- names


@pytest.mark.parametrize("style", ["kohya", "PEFT", "diffusers", "processor"])
@pytest.mark.parametrize(
    "model, dtype", [("unet", torch.bfloat16), ("unet", torch.float32), ("text_encoder", torch.half)]
)
def test_each_library_names_the_same_weights(style: str, model: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A narrow base is rounded once."""
    shapes = UNET if model == "unet" else TEXT
    base = weights(shapes, dtype)
    adapter, deltas = lora(style, model, shapes)
    assert_merged(merged(base, adapter, tmp_path), base, deltas)


@pytest.mark.parametrize("shorter", ["base", "adapter"])
@pytest.mark.parametrize("style", ["kohya", "PEFT"])
def test_text_encoders_have_a_prefix_or_lack_it(style: str, shorter: str, tmp_path: Path) -> None:
    """transformers 5 writes the names of CLIP without ``text_model.``."""
    short = {name.removeprefix("text_model."): shape for name, shape in TEXT.items()}
    base = weights(short if shorter == "base" else TEXT)
    adapter, deltas = lora(style, "text_encoder", short if shorter == "adapter" else TEXT)
    own = {
        next(name for name in base if name.endswith(key.removeprefix("text_model."))): d for key, d in deltas.items()
    }
    assert_merged(merged(base, adapter, tmp_path), base, own)


# -- scales


def with_alphas(adapter: State, alpha: torch.Tensor) -> State:
    downs = [name for name in adapter if name.endswith(".lora_down.weight")]
    return {**adapter, **{name.replace(".lora_down.weight", ".alpha"): alpha.clone() for name in downs}}


@pytest.mark.parametrize("alpha", [torch.tensor(3.0), torch.tensor([1.5]), torch.tensor(3).half(), torch.tensor(4)])
def test_kohya_divides_alpha_by_the_rank(alpha: torch.Tensor, tmp_path: Path) -> None:
    base = weights(UNET)
    adapter, deltas = lora("kohya", "unet", UNET)
    result = merged(base, with_alphas(adapter, alpha), tmp_path)
    assert_merged(result, base, deltas, float(alpha) / 2)


@pytest.mark.parametrize(("settings", "scale"), [({"use_rslora": True}, 3 / 2**0.5), ({}, 1.5)])
def test_diffusers_keeps_settings_in_the_header(settings: dict[str, Any], scale: float, tmp_path: Path) -> None:
    base = weights(UNET)
    adapter, deltas = lora("PEFT", "unet", UNET)
    own = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, **settings}
    text = json.dumps({f"unet.{name}": value for name, value in own.items()} | {"text_encoder.lora_alpha": 9})
    result = merged(base, adapter, tmp_path, lora_adapter_metadata=text)
    assert_merged(result, base, deltas, scale)


def test_kohya_may_scale_rows_to_a_magnitude(tmp_path: Path) -> None:
    shapes = {"time_embedding.linear_1": (8, 4)}
    base, (adapter, deltas) = weights(UNET), lora("kohya", "unet", shapes)
    magnitude = torch.rand(8, 1)
    adapter["lora_unet_time_embedding_linear_1.dora_scale"] = magnitude
    total = base["time_embedding.linear_1.weight"] + deltas["time_embedding.linear_1.weight"]
    wanted = (magnitude.flatten() / torch.linalg.norm(total, dim=1)).view(-1, 1) * total
    assert torch.equal(merged(base, adapter, tmp_path)["time_embedding.linear_1.weight"], wanted)


# -- one file with the whole pipeline


def res_block(name: str, shortcut: bool) -> dict[str, tuple[int, ...]]:
    shapes = {"in_layers.0": (4,), "in_layers.2": (4, 4, 3, 3), "emb_layers.1": (4, 8), "out_layers.0": (4,)}
    shapes |= {"out_layers.3": (4, 4, 3, 3), **({"skip_connection": (4, 4, 1, 1)} if shortcut else {})}
    return {f"{name}.{key}": shape for key, shape in shapes.items()}


def spatial(name: str) -> dict[str, tuple[int, ...]]:
    inner = {f"transformer_blocks.0.attn1.{key}": (4, 4) for key in ("to_q", "to_k", "to_v", "to_out.0")}
    return {
        f"{name}.{key}": shape for key, shape in {"norm": (4,), "proj_in": (4, 4), "proj_out": (4, 4), **inner}.items()
    }


def ldm_unet() -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tiny U-Net with two blocks, in the names of latent-diffusion."""
    shapes: dict[str, tuple[int, ...]] = {"time_embed.0": (8, 4), "time_embed.2": (8, 8), "out.0": (4,)}
    shapes |= {"input_blocks.0.0": (4, 4, 3, 3), "out.2": (4, 4, 3, 3), "input_blocks.3.0.op": (4, 4, 3, 3)}
    for at in (1, 2, 4, 5):
        shapes |= res_block(f"input_blocks.{at}.0", at == 4) | spatial(f"input_blocks.{at}.1")
    shapes |= res_block("middle_block.0", False) | spatial("middle_block.1") | res_block("middle_block.2", False)
    for at in range(6):
        shapes |= res_block(f"output_blocks.{at}.0", True) | spatial(f"output_blocks.{at}.1")
    return {**shapes, "output_blocks.2.2.conv": (4, 4, 3, 3)}


def both(shapes: dict[str, tuple[int, ...]], prefix: str) -> State:
    return {
        f"{prefix}{name}.{last}": torch.randn(shape if last == "weight" else shape[:1])
        for name, shape in shapes.items()
        for last in ("weight", "bias")
    }


def open_clip() -> State:
    """Return the second text encoder of SDXL: OpenCLIP, with fused projections."""
    prefix = "conditioner.embedders.1.model."
    layer = f"{prefix}transformer.resblocks.0"
    state = {f"{prefix}token_embedding.weight": torch.randn(9, 6), f"{prefix}positional_embedding": torch.randn(5, 6)}
    state |= {f"{layer}.attn.in_proj_weight": torch.randn(18, 6), f"{layer}.attn.in_proj_bias": torch.randn(18)}
    state |= both({"attn.out_proj": (6, 6), "mlp.c_fc": (12, 6), "mlp.c_proj": (6, 12)}, f"{layer}.")
    return state | both({"ln_1": (6,), "ln_2": (6,)}, f"{layer}.") | both({"ln_final": (6,)}, prefix)


def sdxl() -> State:
    torch.manual_seed(4)
    first = {"encoder.layers.0.self_attn.q_proj": (4, 4), "encoder.layers.0.mlp.fc1": (4, 4)}
    state = both(ldm_unet(), "model.diffusion_model.") | open_clip()
    return state | both(first, "conditioner.embedders.0.transformer.text_model.")


#: Modules of a LoRA for SDXL as diffusers names them, with the weights of the single file and their rows.
Rows = tuple[str, int, int]
PLACES: dict[tuple[str, str], Rows] = {
    ("unet", "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"): (
        "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_q.weight", 0, 4),
    ("unet", "up_blocks.0.resnets.1.conv1"): ("model.diffusion_model.output_blocks.1.0.in_layers.2.weight", 0, 4),
    ("unet", "down_blocks.0.downsamplers.0.conv"): ("model.diffusion_model.input_blocks.3.0.op.weight", 0, 4),
    ("text_encoder_1", "text_model.encoder.layers.0.self_attn.q_proj"): (
        "conditioner.embedders.0.transformer.text_model.encoder.layers.0.self_attn.q_proj.weight", 0, 4),
    ("text_encoder_2", "text_model.encoder.layers.0.self_attn.k_proj"): (
        "conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight", 6, 6),
    ("text_encoder_2", "text_model.encoder.layers.0.self_attn.v_proj"): (
        "conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight", 12, 6),
    ("text_encoder_2", "text_model.encoder.layers.0.mlp.fc1"): (
        "conditioner.embedders.1.model.transformer.resblocks.0.mlp.c_fc.weight", 0, 12),
}  # fmt: skip


def placed(style: str, base: State, places: dict[tuple[str, str], Rows]) -> tuple[State, State]:
    """Return an adapter for places of a base, and what it adds to each weight."""
    adapter, added = State(), State()
    for (model, module), (key, first, rows) in places.items():
        model = model.replace("_1", "") if style != "kohya" else model
        own, deltas = lora(style, model, {module: (rows, *base[key].shape[1:])})
        adapter |= own
        total = added.setdefault(key, torch.zeros_like(base[key]))
        total[first : first + rows] = deltas[f"{module}.weight"]
    return adapter, added


@pytest.mark.parametrize("style", ["kohya", "PEFT"])
def test_a_file_of_the_whole_pipeline_is_a_base(style: str, tmp_path: Path) -> None:
    base = sdxl()
    adapter, added = placed(style, base, PLACES)
    assert_merged(merged(base, adapter, tmp_path), base, added)


# -- refusals


def _with(key: str, *shape: int) -> Callable[[State], State]:
    return lambda adapter: {**adapter, key: torch.ones(shape)}


def _without(ending: str) -> Callable[[State], State]:
    return lambda adapter: {key: value for key, value in adapter.items() if not key.endswith(ending)}


LINEAR = "lora_unet_time_embedding_linear_1"
REFUSALS: dict[str, tuple[Callable[[State], State], str]] = {
    "LoCon with a middle": (_with(f"{LINEAR}.lora_mid.weight", 2, 2, 3, 3), "lora_mid.* is not known"),
    "an unknown tensor": (_with(f"{LINEAR}.more.weight", 2), "is not known, and would not be used"),
    "A without B": (_without("linear_1.lora_up.weight"), "no partner lora_B"),
    "an alpha alone": (_with("lora_unet_x.alpha"), "no matrices beside it"),
    "an alpha of NaN": (lambda adapter: with_alphas(adapter, torch.tensor(float("nan"))), "is not a finite number"),
    "magnitudes of columns": (_with(f"{LINEAR}.dora_scale", 1, 4), "norms of columns"),
    "an unknown module": (_with("lora_unet_mid_block_x.lora_down.weight", 2, 4), "no partner|6 of 7 modules"),
    "two names for a tensor": (_with(f"{LINEAR}.lora_A.weight", 2, 4), "mean the same tensor"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_what_is_wrong(name: str, tmp_path: Path) -> None:
    change, words = REFUSALS[name]
    with pytest.raises(RefusedError, match=words):
        merged(weights(UNET), change(lora("kohya", "unet", UNET)[0]), tmp_path)
    assert not (tmp_path / "out.safetensors").exists()


def _bases() -> Iterable[tuple[str, State, str]]:
    yield "another width", weights({**UNET, "time_embedding.linear_1": (8, 6)}), "weight of 8x4, and .* is 8x6"
    fewer = {name: shape for name, shape in UNET.items() if "ff" not in name}
    yield "fewer modules", weights(fewer), "5 of 6 modules matched"
    yield "a text encoder", weights(TEXT), r"0 of 6 modules matched \(wrong base\?\)"
    yield "another U-Net", both(ldm_unet(), "model.diffusion_model."), "changes a weight of 8x8x1x1, and .* is 4x4"


@pytest.mark.parametrize(("name", "base", "words"), [*_bases()], ids=lambda item: item if isinstance(item, str) else "")
def test_an_adapter_for_another_base_is_refused(name: str, base: State, words: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=words):
        merged(base, lora("kohya", "unet", UNET)[0], tmp_path)


# -- diffusers itself


@pytest.mark.parametrize("style", ["kohya", "PEFT", "processor"])
def test_diffusers_fuses_to_the_same_bytes(style: str, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    pytest.importorskip("peft")
    torch.manual_seed(1)
    model = diffusers.UNet2DConditionModel(
        down_block_types=["CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D"],
        block_out_channels=[64],
        norm_num_groups=8,
        attention_head_dim=8,
        cross_attention_dim=16,
    )
    model.save_pretrained(tmp_path / "base")
    ends = (".to_q", ".to_out.0", "proj_in", "ff.net.2", ".conv1") if style != "processor" else (".to_q", ".to_out.0")
    state = model.state_dict()
    names = [name for name in (key.removesuffix(".weight") for key in state) if name.endswith(ends)]
    shapes = {name: tuple(state[f"{name}.weight"].shape) for name in names}
    adapter, _ = lora(style, "unet", shapes)
    adapter = with_alphas(adapter, torch.tensor(3.0)) if style == "kohya" else adapter
    save_file(adapter, tmp_path / "pytorch_lora_weights.safetensors")
    parts = {"vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor"}
    pipe = diffusers.StableDiffusionPipeline(
        unet=model, scheduler=diffusers.DDIMScheduler(), requires_safety_checker=False, **dict.fromkeys(parts)
    )
    pipe.load_lora_weights(tmp_path)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    wanted = model.state_dict()
    result = merged(tmp_path / "base", tmp_path / "pytorch_lora_weights.safetensors", tmp_path)
    assert result.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(result[key], wanted[key])] == []


@pytest.mark.parametrize("prefix", ["diffusion_model.", "model.diffusion_model.", "transformer.", "unet.", ""])
def test_the_base_may_have_the_prefix_of_the_adapter(prefix: str, tmp_path: Path) -> None:
    shapes = {"blocks.0.attn.to_q": (70, 8), "blocks.1.attn.to_q": (70, 8)}
    model = prefix.removesuffix(".").rpartition(".")[2] or "diffusion_model"
    adapter, deltas = lora("PEFT", model, shapes)
    base = {f"{prefix}{name}": item for name, item in weights(shapes).items()}
    expected = {f"{prefix}{name}": item for name, item in deltas.items()}
    assert_merged(merged(base, adapter, tmp_path), base, expected)


def test_names_that_two_modules_share_are_refused(tmp_path: Path) -> None:
    """Without its dots, ``a_b.c`` is ``a.b_c``."""
    base = weights({"down_blocks.0_x.proj": (8, 4), "down_blocks.0.x_proj": (8, 4)})
    adapter, _ = lora("kohya", "unet", {"down_blocks.0_x.proj": (8, 4)})
    with pytest.raises(RefusedError, match="0 of 1 module matched"):
        merged(base, adapter, tmp_path)


def test_two_text_encoders_of_one_shape_are_refused(tmp_path: Path) -> None:
    """A text encoder in a file of its own does not say which one of the pipeline it is."""
    adapter = lora("kohya", "text_encoder_1", TEXT)[0] | lora("kohya", "text_encoder_2", TEXT)[0]
    with pytest.raises(RefusedError, match="its models te1 and te2 both fit"):
        merged(weights(TEXT), adapter, tmp_path)
    other = lora("kohya", "text_encoder_2", dict.fromkeys(TEXT, (10, 10)))[0]
    adapter, deltas = lora("kohya", "text_encoder_1", TEXT)
    assert_merged(merged(weights(TEXT), adapter | other, tmp_path), weights(TEXT), deltas)
