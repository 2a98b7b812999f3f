"""Quantized weights: recognised in every layout, counted as what they stand for, and never computed with."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.checkpoint.quantized import quantization

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Tensors = dict[str, torch.Tensor]


OUT, K = 32, 64
M = "model.layers.0.mlp.down_proj"
GIVEN = Path(os.environ.get("CKPTOOL_QUANTIZED", Path(__file__).parents[2].parent / "shared" / "quantised" / "given"))


def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).nbytes
    return (torch.arange(size) % 119).to(torch.uint8).view(dtype).reshape(shape)


def fp8(*shape: int) -> torch.Tensor:
    return codes(*shape).view(torch.float8_e4m3fn)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape).mul(0.01).add(0.001).to(dtype)


def e8m0(*shape: int) -> torch.Tensor:
    return torch.full(shape, 125, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def text(content: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)


def bitsandbytes(kind: str, nested: bool, storage: torch.dtype = torch.uint8) -> Tensors:
    state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [OUT, K]}
    blocks = OUT * K // 64
    parts = {
        "weight": codes(OUT * K // 2).view(storage).reshape(-1, 1),
        "weight.absmax": codes(blocks) if nested else floats(blocks),
        "weight.quant_map": floats(16),
        f"weight.quant_state.bitsandbytes__{kind}": text(state),
    }
    more = {"weight.nested_absmax": floats(1), "weight.nested_quant_map": floats(256)}
    return parts | (more if nested else {})


def gptq(bits: int, g_idx: bool = True) -> Tensors:
    half = torch.float16
    parts = {"qweight": codes(K * bits // 32, OUT, dtype=torch.int32), "scales": floats(2, OUT, dtype=half)}
    parts["qzeros"] = codes(2, OUT * bits // 32, dtype=torch.int32)
    return parts | ({"g_idx": torch.arange(K, dtype=torch.int32) // 32} if g_idx else {})


def packed(bits: int) -> Tensors:
    width = -(-K * bits // 32)
    shape = {"weight_shape": torch.tensor([OUT, K])}
    return {"weight_packed": codes(OUT, width, dtype=torch.int32), "weight_scale": floats(OUT, 2), **shape}


#: For each layout: the tensors of a module, the configuration, and what ``inspect`` says about the format.
LAYOUTS: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    **{
        f"bitsandbytes {kind}, {'nested' if nested else 'plain'}": (
            bitsandbytes(kind, nested),
            {"quant_method": "bitsandbytes"},
            f"bitsandbytes {kind}",
        )
        for kind, nested in product(("nf4", "fp4"), (False, True))
    },
    "bitsandbytes in bf16": (bitsandbytes("nf4", True, torch.bfloat16), {}, "bitsandbytes nf4"),
    "bitsandbytes in f32": (bitsandbytes("nf4", False, torch.float32), {}, "bitsandbytes nf4"),
    "bitsandbytes int8": (
        {
            "weight": codes(OUT, K, dtype=torch.int8),
            "SCB": floats(OUT),
            "weight_format": torch.tensor(0).to(torch.uint8),
        },
        {},
        "bitsandbytes int8",
    ),
    **{
        f"gptq {bits}": (gptq(bits), {"quant_method": "gptq", "bits": bits}, f"GPTQ {bits} bit")
        for bits in (2, 3, 4, 8)
    },
    "gptq without g_idx": (gptq(8, g_idx=False), {}, "GPTQ 8 bit"),
    "awq": (
        {
            "qweight": codes(K, OUT // 8, dtype=torch.int32),
            "qzeros": codes(2, OUT // 8, dtype=torch.int32),
            "scales": floats(2, OUT, dtype=torch.float16),
        },
        {"quant_method": "awq", "version": "gemm"},
        "AWQ 4 bit",
    ),
    **{f"packed int{bits}": (packed(bits), {}, f"compressed-tensors int{bits}") for bits in (2, 4, 8)},
    "nvfp4 of compressed-tensors": (
        {"weight_packed": codes(OUT, K // 2), "weight_scale": fp8(OUT, K // 16), "weight_global_scale": floats(1)},
        {},
        "compressed-tensors NVFP4",
    ),
    "mxfp4 of compressed-tensors": (
        {"weight_packed": codes(OUT, K // 2), "weight_scale": codes(OUT, K // 32)},
        {},
        "compressed-tensors MXFP4",
    ),
    "nvfp4 of modelopt": (
        {
            "weight": codes(OUT, K // 2),
            "weight_scale": fp8(OUT, K // 16),
            "weight_scale_2": floats(),
            "input_scale": floats(),
        },
        {},
        "modelopt NVFP4",
    ),
    "mxfp4 of gpt-oss": (
        {"w_blocks": codes(2, OUT // 2, K // 32, 16), "w_scales": codes(2, OUT // 2, K // 32)},
        {},
        "MXFP4",
    ),
    "mxfp4 of openai": (
        {"w.blocks": codes(2, OUT // 2, K // 32, 16), "w.scales": codes(2, OUT // 2, K // 32)},
        {},
        "MXFP4",
    ),
    "fp8 in blocks": (
        {"weight": fp8(OUT, K), "weight_scale_inv": floats(2, 3)},
        {"quant_method": "fp8", "weight_block_size": [30, 30]},
        "FP8 with 30x30 block scales",
    ),
    "fp8 in blocks without configuration": (
        {"weight": fp8(OUT, K), "weight_scale_inv": floats(1, 1)},
        {},
        "FP8 with one",
    ),
    "fp8 experts": ({"w": fp8(2, OUT // 2, K), "w_scale_inv": floats(2, 2, 2)}, {}, "FP8 with 8x32 block scales"),
    "fp8 of deepseek": ({"weight": fp8(OUT, K), "scale": e8m0(2, 2)}, {}, "FP8 with 16x32 block scales"),
    "fp4 of deepseek": ({"weight": codes(OUT, K // 2, dtype=torch.int8), "scale": e8m0(OUT, K // 32)}, {}, "FP4"),
    "fp8 by channel": (
        {"weight": fp8(OUT, K), "weight_scale": floats(OUT, 1, dtype=torch.bfloat16)},
        {"quant_method": "compressed-tensors"},
        "compressed-tensors FP8 with a scale for each channel",
    ),
    "fp8 of modelopt": (
        {"weight": fp8(OUT, K), "weight_scale": floats(), "input_scale": floats(), "k_scale": floats()},
        {"quant_method": "modelopt"},
        "modelopt FP8 with one scale",
    ),
    "fp8 of fbgemm": (
        {"weight": fp8(OUT, K), "weight_scale": floats(OUT, 1), "input_scale_ub": floats(1)},
        {"quant_method": "fbgemm_fp8"},
        "fbgemm FP8",
    ),
    "fp8 of comfyui": (
        {"weight": fp8(OUT, K), "scale_weight": floats(), "scale_input": floats()},
        {},
        "FP8 of ComfyUI",
    ),
    "int8": (
        {
            "weight": codes(OUT, K, dtype=torch.int8),
            "weight_scale": floats(OUT, 1),
            "weight_zero_point": codes(OUT, 1).char(),
        },
        {},
        "int8 with a scale for each channel",
    ),
    "torchao": (
        {
            "_weight_qdata": codes(OUT, K).char(),
            "_weight_scale": floats(OUT, 1),
            "_weight_zero_point": codes(OUT, 1).char(),
        },
        {},
        "torchao Int8Tensor",
    ),
    "optimum-quanto": (
        {
            "weight._data": codes(OUT, K).char(),
            "weight._scale": floats(OUT, 1),
            "input_scale": floats(),
            "output_scale": floats(),
        },
        {},
        "optimum-quanto",
    ),
    "EETQ": ({"weight": codes(K, OUT).char(), "weight_scales": floats(OUT, dtype=torch.float16)}, {}, "EETQ"),
    "HQQ": (
        {
            "W_q": codes(OUT * K // 128, 64),
            "scale": floats(32, 1),
            "zero": floats(32, 1),
            "shape": torch.tensor([OUT, K]),
        },
        {"quant_method": "hqq"},
        "HQQ",
    ),
}
#: Layouts whose shape the tensors do not tell.
UNKNOWN: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "bitnet": ({"weight": codes(OUT // 4, K), "weight_scale": floats(1)}, {"quant_method": "bitnet"}, "packed"),
    "int8 with scales": ({"weight": codes(OUT, K).char(), "scales": floats(OUT)}, {}, "packed"),
    "aqlm": (
        {"codes": codes(OUT, K // 8, 2).char(), "codebooks": floats(2, 256, 1, 8), "scales": floats(OUT, 1, 1, 1)},
        {"quant_method": "aqlm"},
        "AQLM",
    ),
    "vptq": (
        {"indices": codes(1, OUT, K // 8, dtype=torch.int32), "centroids.weight": floats(1, 2048)},
        {},
        "VPTQ",
    ),
    "marlin": (
        {"B": codes(K // 16, OUT * 2, dtype=torch.int32), "s": floats(1, OUT)},
        {},
        "Marlin",
    ),
    "exl3": (
        {"trellis": codes(4, 4, 16, dtype=torch.int16), "suh": floats(K), "svh": floats(OUT)},
        {},
        "EXL3",
    ),
    "exl2": (
        {"q_weight": codes(K // 8, OUT, dtype=torch.int32), "q_scale": codes(2, OUT // 8), "q_scale_max": floats(2)},
        {},
        "EXL2",
    ),
    "quip": (
        {"Qidxs": codes(OUT, K // 8, dtype=torch.int64), "SU": floats(K), "SV": floats(OUT), "Wscale": floats(1)},
        {},
        "QuIP",
    ),
    "svdquant": (
        {"qweight": codes(OUT, K // 2).char(), "wscales": floats(K // 16, OUT), "smooth_factor": floats(K)},
        {},
        "SVDQuant",
    ),
    "a kernel's own codes": (
        {"packed": codes(OUT, K // 2), "table": floats(16)},
        {"quant_method": "someones"},
        "someones",
    ),
}
TORCHAO = {"_type": "Int8Tensor", "_data": {"dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}}
PLAIN = {
    "model.embed_tokens.weight": floats(8, K),
    "model.layers.0.input_layernorm.weight": floats(K),
    "lm_head.weight": floats(8, K),
}


def write(
    folder: Path, parts: Tensors, config: dict[str, Any], how: str, module: str = M, plain: Tensors = PLAIN
) -> Path:
    """Write a model with one quantized module, and return its path."""
    state = {**plain, **{f"{module}.{name}": value for name, value in parts.items()}}
    folder.mkdir(exist_ok=True)
    if config:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    if how == "training":
        torch.save({"model": state, "epoch": 3}, folder / "model.pth")
        return folder / "model.pth"
    if how == "bin":
        torch.save(state, folder / "pytorch_model.bin")
        return folder / "pytorch_model.bin"
    header = {"format": "pt", f"{module}.weight": json.dumps(TORCHAO)} if "_weight_qdata" in parts else {"format": "pt"}
    save_file(state, folder / "model.safetensors", header)
    return folder if how == "folder" else folder / "model.safetensors"


def every() -> Iterator[Any]:
    for name, (parts, config, known) in {**LAYOUTS, **UNKNOWN}.items():
        for how in ("safetensors", "folder", "bin", "training"):
            if how == "safetensors" or not (name == "torchao" or (name in UNKNOWN and how == "training")):
                yield pytest.param(parts, config, known, how, name, id=f"{name}-{how}")


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def load(path: Path) -> Tensors:
    if path.is_dir():
        return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}
    if path.suffix == ".safetensors":
        return load_file(path)
    state = torch.load(path, weights_only=True)
    return state.get("model", state)


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize(("parts", "config", "known", "how", "name"), [*every()])
def test_a_cast_leaves_every_part_alone_and_says_so(
    parts: Tensors, config: dict[str, Any], known: str, how: str, name: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "in", parts, config, how)
    out = tmp_path / ("out" + path.suffix)
    said = say("cast", path, "--to-dtype", "float16", "-o", out)
    assert said.code == 0 and "quantized" in said.all and known in said.all, said.all
    result = load(out)
    for end, value in parts.items():
        found = result[f"{M}.{end}"]
        assert (found.dtype, found.shape, bits(found)) == (value.dtype, value.shape, bits(value)), end
    assert all(result[key].dtype == torch.float16 for key in PLAIN)
    assert say("edit", path, "--to-dtype", "bfloat16", "-o", tmp_path / f"b{path.suffix}").code == 0
    some = next((end for end, value in parts.items() if value.is_floating_point()), next(iter(parts)))
    named = say("cast", path, "--to-dtype", "float64", "--include", f"*{some}", "-o", tmp_path / f"c{path.suffix}")
    assert named.code == 0, named.all
    result = load(tmp_path / f"c{path.suffix}")
    assert all(result[f"{M}.{end}"].dtype == value.dtype for end, value in parts.items())


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize(("parts", "config", "known", "how", "name"), [*every()])
def test_edits_that_compute_refuse(
    parts: Tensors, config: dict[str, Any], known: str, how: str, name: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "in", parts, config, how)
    other = write(tmp_path / "other", parts, config, how, plain={key: value * 2 for key, value in PLAIN.items()})
    out = tmp_path / ("out" + path.suffix)
    lora = tmp_path / "lora"
    lora.mkdir()
    names = {"A": floats(2, K), "B": floats(OUT, 2)}
    adapter = {f"base_model.model.{M}.lora_{side}.weight": value for side, value in names.items()}
    save_file(adapter, lora / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["down_proj"], "bias": "none"}
    (lora / "adapter_config.json").write_text(json.dumps({**settings, "fan_in_fan_out": False}))
    lines = [
        ("average", path, other),
        ("average", path, other, "--base", path),
        ("average", path, other, "--weights", "1,3"),
        ("merge-lora", path, lora),
        ("edit", path, "--to-names", "meta:llama3"),
    ]
    for line in lines:
        said = say(*line, "-o", out)
        assert said.code == 4 and "quantized" in said.all and not out.exists(), (line[0], said.all)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    parts, config, known = LAYOUTS[name]
    path = write(tmp_path / "in", parts, config, "safetensors")
    report = ckptool.inspect(path)
    expected = OUT * K + sum(value.numel() for value in PLAIN.values())
    assert report["parameters"] == report["state_dicts"][0]["parameters"] == expected
    assert [(form.startswith(known), count) for form, count in report["quantized"]["formats"].items()] == [(True, 1)]
    assert (report["quantized"]["plain"], report["quantized"]["tensors"]) == (2, len(parts))
    assert not any(item["code"] == "quantized" for item in report["findings"])
    said = say("inspect", path).all
    assert f"{expected:,} parameters" in said and "1 of 3 weights" in said
    with ckptool.open(path) as checkpoint:
        (weight,) = quantization(checkpoint).weights
    turned = name in ("mxfp4 of gpt-oss",)
    assert sorted(weight.shape or ())[-1] == K and (turned or weight.shape in ((OUT, K), (2, OUT // 2, K))), (
        weight.shape
    )


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", {**LAYOUTS, **UNKNOWN})
def test_a_lost_part_is_named_and_nothing_is_computed(name: str, tmp_path: Path) -> None:
    """Half a quantized weight is not a plain one: neither the code nor the scale that is left is cast or averaged."""
    parts, config, _ = {**LAYOUTS, **UNKNOWN}[name]
    method = {"quant_method": "fp8", **config}
    needed = [end for end in parts if not end.endswith(("weight_format", "g_idx", "zero_point", "input", "k_scale"))]
    for number, lost in enumerate(needed):
        if lost.startswith(("input_scale", "output_scale")):
            continue
        left = {end: value for end, value in parts.items() if end != lost}
        path = write(tmp_path / str(number), left, method, "folder")
        out = tmp_path / f"out{number}"
        said = say("cast", path, "--to-dtype", "float64", "-o", out)
        if said.code == 0:
            result = load(out)
            whole = {
                end: value
                for end, value in left.items()
                if not end.startswith(("s", "zero", "centroids", "codebooks", "SU", "SV", "Wscale", "wscales", "table"))
            }
            wrong = [end for end, value in whole.items() if result[f"{M}.{end}"].dtype != value.dtype]
            assert not wrong, (lost, wrong)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", [name for name, (parts, *_) in LAYOUTS.items() if len(parts) > 1])
def test_merge_takes_a_weight_whole_or_not_at_all(name: str, tmp_path: Path) -> None:
    parts, config, _ = LAYOUTS[name]
    path, out = write(tmp_path / "in", parts, config, "safetensors"), tmp_path / "out.safetensors"
    plain = tmp_path / "plain.safetensors"
    code = next(iter(parts))
    for taken in ({code: parts[code].clone()}, dict(list(parts.items())[1:])):
        save_file({f"{M}.{end}": value for end, value in taken.items()}, plain)
        beside = [end for end in parts if not end.startswith(("input", "output", "k_", "scale_input"))]
        if set(taken) >= set(beside):
            continue
        said = say("merge", path, plain, "-o", out)
        assert said.code == 4 and "quantized" in said.all and not out.exists(), said.all
    whole = say("merge", path, path, "-o", out)
    assert whole.code == 0, whole.all
    left = say("merge", path, path, "--include", f"*{code}", "-o", tmp_path / "o.safetensors")
    assert left.code == 4 and not (tmp_path / "o.safetensors").exists(), left.all


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("module", ["model.embed_tokens", "lm_head"])
def test_rows_of_tokens_are_not_added_to_codes(name: str, module: str, tmp_path: Path) -> None:
    parts, config, _ = LAYOUTS[name]
    plain = {key: value for key, value in PLAIN.items() if not key.startswith(module)}
    if not any(end.startswith(("weight", "q", "W_q", "_weight")) for end in parts):
        pytest.skip("names of experts")
    path, out = write(tmp_path / "in", parts, config, "safetensors", module, plain), tmp_path / "out.safetensors"
    said = say("resize", path, "--vocab", "64", "-o", out)
    assert said.code == 4 and "quantized" in said.all and not out.exists(), said.all
    path = write(tmp_path / "plain", parts, config, "safetensors")
    assert say("resize", path, "--vocab", "16", "-o", out).code == 0
    result = load(out)
    assert result["lm_head.weight"].shape == (16, K)
    assert all(bits(result[f"{M}.{end}"]) == bits(value) for end, value in parts.items())


RECIPE = """
[[rule]]
a = "model.layers.{{L}}.mlp.down_proj.{end} : {axes}"
b = "blocks.{{L}}.down.{end} : {turned}"
"""


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_recipe_does_not_rearrange_or_part_the_tensors(name: str, tmp_path: Path) -> None:
    parts, config, _ = LAYOUTS[name]
    path, out = write(tmp_path / "in", parts, config, "safetensors", plain={}), tmp_path / "out.safetensors"
    end, code = next(iter(parts.items()))
    axes = "xyzuvw"[: code.dim()]
    turned = axes[1] + axes[0] + axes[2:]
    for shape, part in ((turned, "turned"), (axes, "renamed alone")):
        recipe = tmp_path / f"{part}.toml"
        text = f'rest = "keep"\n{RECIPE}'.format(end=end, axes=", ".join(axes), turned=", ".join(shape))
        recipe.write_text(text)
        said = say("convert", path, "--recipe", recipe, "-o", out)
        assert said.code and not out.exists() and "quantized" in said.all, said.all
    renamed = say("rename", path, "--rename", "model.layers.*=blocks.*", "-o", out)
    assert renamed.code == 0
    with ckptool.open(out) as checkpoint:
        assert [weight.format for weight in quantization(checkpoint).weights] or name == "torchao"


def test_plain_names_are_no_scales(tmp_path: Path) -> None:
    """A number is a code only beside its partner."""
    state = {
        **PLAIN,
        "a.weight": floats(4, 4),
        "a.scale": floats(4),
        "a.scales": floats(4),
        "norm.weight_scale": floats(2),
        "norm.zero": floats(2),
        "b.weight": floats(4, 4).to(torch.float8_e4m3fn),
        "ids": torch.arange(4, dtype=torch.int32),
        "c.weight": codes(4, 4),
        "c.bias": floats(4),
        "attn.input_scale": floats(1),
    }
    path, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(state, path)
    said = say("cast", path, "--to-dtype", "bf16", "-o", out)
    assert said.code == 0 and "quantized" not in said.all
    result = load_file(out)
    assert {key for key, value in result.items() if value.dtype != torch.bfloat16} == {"ids", "c.weight"}
    assert "quantized" not in ckptool.inspect(path)
    assert ckptool.average([path, path]).changes[0].number == len(state) - 2


class Wrapper(torch.Tensor):
    """A subclass as torchao makes them: a shape and dtype, and tensors as attributes."""

    __module__, __qualname__ = "torchao.quantization", "Int8Tensor"

    @staticmethod
    def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=torch.bfloat16)

    def __init__(self, qdata: torch.Tensor, scale: torch.Tensor) -> None:
        self.qdata, self.scale = qdata, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.detach.default else NotImplemented


def test_subclasses_of_torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchao", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["torchao.quantization"], "Int8Tensor", Wrapper, raising=False)
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    qdata, scale = codes(OUT, K).char(), floats(OUT, 1)
    torch.save(
        {**PLAIN, f"{M}.weight": Wrapper(qdata, scale), "tied": torch.nn.Parameter(Wrapper(qdata, scale), False)}, path
    )
    with ckptool.open(path) as checkpoint:
        found = quantization(checkpoint)
        assert [weight.format for weight in found.weights] == ["torchao Int8Tensor"] * 2
        weight = found.weights[0]
        assert {role for role, _ in weight.parts} == {"code", "qdata", "scale"} and weight.shape == (OUT, K)
        storages = {part.storage: checkpoint.body(part.storage) for _, entry in weight.parts for part in [entry.tensor]}
    said = say("cast", path, "--to-dtype", "float64", "--include", "*", "-o", out)
    assert said.code == 0 and "quantized" in said.all and "torchao" in said.all
    with ckptool.open(out) as checkpoint:
        found = quantization(checkpoint)
        inner = {role: entry.tensor.dtype for role, entry in found.weights[0].parts}
        assert inner == {"code": "bfloat16", "qdata": "int8", "scale": "float32"} and storages
    assert "2 of 4 weights" in say("inspect", path).all
    assert say("average", path, path, "-o", tmp_path / "a.pth").code == 4
    assert say("merge-lora", path, path, "-o", tmp_path / "a.pth").code in (1, 3, 4)


def test_layers_of_torch_ao(tmp_path: Path) -> None:
    """The scale of a quantized layer is a float tensor beside the packed weight."""
    model = torch.ao.nn.quantized.Linear(4, 2)
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    torch.save({"fc": model.state_dict(), "plain": {"weight": floats(4, 4), "bias": floats(4)}}, path)
    assert say("cast", path, "--to-dtype", "bf16", "-o", out).code == 0
    before, after = torch.load(path, weights_only=False), torch.load(out, weights_only=False)
    assert after["fc"]["scale"].dtype == before["fc"]["scale"].dtype == torch.float32
    assert after["plain"]["weight"].dtype == torch.bfloat16


def test_states_of_an_8_bit_optimizer(tmp_path: Path) -> None:
    state = {"state1": codes(256, 2), "state2": codes(256, 2), "absmax1": floats(2), "absmax2": floats(2)}
    state |= {"qmap1": floats(256), "qmap2": floats(256), "step": 3}
    optimizer = {"state": {0: state}, "param_groups": [{"params": [0], "lr": 0.1}]}
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    torch.save({"model": dict(PLAIN), "optimizer": optimizer}, path)
    said = say("cast", path, "--to-dtype", "bf16", "--optimizer", "-o", out)
    assert said.code == 0 and "8-bit optimizer" in said.all
    result = torch.load(out, weights_only=True)
    assert all(
        torch.equal(value, state[name]) for name, value in result["optimizer"]["state"][0].items() if name != "step"
    )
    assert result["model"]["lm_head.weight"].dtype == torch.bfloat16


def test_parts_in_other_shards(tmp_path: Path) -> None:
    """Weights and scales are paired by name over the whole folder; a single shard is not plain either."""
    first = {**PLAIN, f"{M}.weight": fp8(OUT, K)}
    second = {f"{M}.weight_scale_inv": floats(2, 2)}
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name, state in zip(names, (first, second)):
        save_file(state, tmp_path / name, {"format": "pt"})
    index = {key: name for name, state in zip(names, (first, second)) for key in state}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    with ckptool.open(tmp_path) as checkpoint:
        (weight,) = quantization(checkpoint).weights
        assert (weight.shape, weight.problem, len(weight.parts)) == ((OUT, K), "", 2)
    alone = say("cast", tmp_path / names[1], "--to-dtype", "bf16", "-o", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists() or "quantized" in alone.all
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 32]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with ckptool.open(tmp_path / names[0]) as checkpoint:
        assert [weight.problem for weight in quantization(checkpoint).weights] == ["its scale is missing"]


def test_one_weight_without_its_scale_is_not_plain(tmp_path: Path) -> None:
    other = M.replace("down", "up")
    state = {f"{M}.weight": fp8(OUT, K), f"{M}.weight_scale_inv": floats(1, 1), f"{other}.weight": fp8(OUT, K), **PLAIN}
    path, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(state, path)
    assert say("cast", path, "--to-dtype", "bf16", "-o", out).code == 0
    assert load_file(out)[f"{other}.weight"].dtype == torch.float8_e4m3fn
    assert f"1 quantized weight cannot be understood: {other}.weight: its scale is missing" in say("inspect", path).all


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("bitsandbytes nf4, plain", {"weight.absmax": floats(7)}, "does not fit"),
        ("bitsandbytes nf4, plain", {"weight.quant_state.bitsandbytes__nf4": text({})}, "cannot be read"),
        ("bitsandbytes int8", {"SCB": floats(3)}, "does not fit"),
        ("gptq 4", {"qzeros": codes(9, 9, dtype=torch.int32)}, "does not fit"),
        ("awq", {"qzeros": codes(9, 9, dtype=torch.int32)}, "does not fit"),
        ("packed int4", {"weight_shape": torch.tensor([OUT, 3 * K])}, "does not fit"),
        ("mxfp4 of compressed-tensors", {"weight_scale": codes(3, 3)}, "does not fit"),
        ("fp8 in blocks", {"weight_scale_inv": floats(7, 5)}, "does not fit"),
    ],
)
def test_shapes_that_do_not_fit_are_a_problem(name: str, change: Tensors, problem: str, tmp_path: Path) -> None:
    parts, config, _ = LAYOUTS[name]
    path = write(tmp_path / "in", {**parts, **change}, config, "folder")
    with ckptool.open(path) as checkpoint:
        (weight,) = quantization(checkpoint).weights
    assert problem in weight.problem
    assert "cannot be understood" in say("inspect", path).all


@pytest.mark.parametrize("kind", sorted(GIVEN.iterdir()) if GIVEN.is_dir() else [], ids=lambda path: path.name)
def test_models_that_the_libraries_made(kind: Path) -> None:
    case = json.loads((kind / "case.json").read_text())
    names = {**load_file(kind / "expected.safetensors")}
    files = [path.name for path in kind.iterdir() if path.name not in ("case.json", "expected.safetensors")]
    weights = [name for name in files if name.endswith((".safetensors", ".bin"))]
    with ckptool.open(kind if "model.safetensors.index.json" in files else kind / weights[0]) as checkpoint:
        found = quantization(checkpoint)
        assert ckptool.inspect(checkpoint)["parameters"] == case["parameters"]
    assert not found.problems and len(found.weights) == case["dequantised"]
    assert all(names[weight.name].shape == weight.shape for weight in found.weights)
    assert {weight.dtype or case["dtype"] for weight in found.weights} == {case["dtype"]}
    assert not {entry.key for entry in (*found.others, *found.left_over)} & names.keys()


def test_modules_of_hqq_in_nested_dicts(tmp_path: Path) -> None:
    """HQQ saves a dict for each module, with its scales in another dict."""
    meta = {"nbits": 4, "scale": floats(32, 1), "zero": floats(32, 1), "shape": torch.Size([OUT, K])}
    module = {"W_q": codes(16, K), "meta": meta, "bias": floats(OUT)}
    path, out = tmp_path / "in.pt", tmp_path / "out.pt"
    torch.save({M: module, "lm_head": {"weight": floats(8, K)}}, path)
    said = say("cast", path, "--to-dtype", "bf16", "-o", out)
    assert said.code == 0 and "3 tensors of quantized weights not cast (HQQ)" in said.all
    result = torch.load(out, weights_only=True)
    assert {result[M]["meta"][name].dtype for name in ("scale", "zero")} == {torch.float32}
    assert result[M]["bias"].dtype == result["lm_head"]["weight"].dtype == torch.bfloat16
