"""Tensors of quantized weights in every layout that libraries write, and models with one of them."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

OUT, K = 32, 64
M = "model.layers.0.mlp.down_proj"


def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).nbytes
    return (torch.arange(size) % 119).to(torch.uint8).view(dtype).reshape(shape)


def fp8(*shape: int) -> torch.Tensor:
    return codes(*shape).view(torch.float8_e4m3fn)


def int8(*shape: int) -> torch.Tensor:
    return codes(*shape).char()


def int32(*shape: int) -> torch.Tensor:
    return codes(*shape, dtype=torch.int32)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape).mul(0.01).add(0.001).to(dtype)


def e8m0(*shape: int) -> torch.Tensor:
    return torch.full(shape, 125, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def half(*shape: int) -> torch.Tensor:
    return floats(*shape, dtype=torch.float16)


def named(names: str, *tensors: torch.Tensor) -> Tensors:
    return dict(zip(names.split(), tensors, strict=True))


def text(content: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)


def bitsandbytes(kind: str, nested: bool, storage: torch.dtype = torch.uint8) -> Tensors:
    state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [OUT, K]}
    state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.0123} if nested else {}
    blocks = OUT * K // 64
    parts = {
        "weight": codes(OUT * K // 2).view(storage).reshape(-1, 1),
        "weight.absmax": codes(blocks) if nested else floats(blocks),
        "weight.quant_map": floats(16),
        f"weight.quant_state.bitsandbytes__{kind}": text(state),
    }
    more = {"weight.nested_absmax": floats(2), "weight.nested_quant_map": floats(256)}
    return parts | (more if nested else {})


def gptq(bits: int, g_idx: bool = True) -> Tensors:
    parts = {"qweight": int32(K * bits // 32, OUT), "scales": half(2, OUT), "qzeros": int32(2, OUT * bits // 32)}
    return parts | ({"g_idx": torch.arange(K, dtype=torch.int32) // 32} if g_idx else {})


def packed(bits: int) -> Tensors:
    width = -(-K * bits // 32)
    shape = {"weight_shape": torch.tensor([OUT, K])}
    return {"weight_packed": int32(OUT, width), "weight_scale": floats(OUT, 2), **shape}


#: The tensors of a module for each layout. A name begins with what ``inspect`` says about the format, up to a comma.
LAYOUTS: dict[str, Tensors] = {
    **{
        f"bitsandbytes {kind}, {'nested' if nested else 'plain'}": bitsandbytes(kind, nested)
        for kind, nested in product(("nf4", "fp4"), (False, True))
    },
    "bitsandbytes nf4, in bf16": bitsandbytes("nf4", True, torch.bfloat16),
    "bitsandbytes nf4, in f32": bitsandbytes("nf4", False, torch.float32),
    "bitsandbytes int8": {"weight": int8(OUT, K), "SCB": floats(OUT), "weight_format": torch.tensor(0).to(torch.uint8)},
    **{f"GPTQ {bits} bit": gptq(bits) for bits in (2, 3, 4, 8)},
    "GPTQ 8 bit, without g_idx": gptq(8, g_idx=False),
    "AWQ 4 bit": named("qweight qzeros scales", int32(K, OUT // 8), int32(2, OUT // 8), half(2, OUT)),
    **{f"compressed-tensors int{bits}": packed(bits) for bits in (2, 4, 8)},
    "compressed-tensors NVFP4": named(
        "weight_packed weight_scale weight_global_scale", codes(OUT, K // 2), fp8(OUT, K // 16), floats(1) * 1e6
    ),
    "compressed-tensors MXFP4": {"weight_packed": codes(OUT, K // 2), "weight_scale": codes(OUT, K // 32)},
    "modelopt NVFP4": named(
        "weight weight_scale weight_scale_2 input_scale", codes(OUT, K // 2), fp8(OUT, K // 16), floats(), floats()
    ),
    "MXFP4, gpt-oss": {"w_blocks": codes(2, OUT // 2, K // 32, 16), "w_scales": codes(2, OUT // 2, K // 32)},
    "MXFP4, openai": {"w.blocks": codes(2, OUT // 2, K // 32, 16), "w.scales": codes(2, OUT // 2, K // 32)},
    "FP8 with 30x30 block scales": {"weight": fp8(OUT, K), "weight_scale_inv": floats(2, 3)},
    "FP8 with one, no configuration": {"weight": fp8(OUT, K), "weight_scale_inv": floats(1, 1)},
    "FP8 with 8x32 block scales, experts": {"w": fp8(2, OUT // 2, K), "w_scale_inv": floats(2, 2, 2)},
    "FP8 with a scale for each slice, experts": {"w": fp8(2, OUT // 2, K), "w_scale_inv": floats(2)},
    "FP8 with 16x32 block scales, deepseek": {"weight": fp8(OUT, K), "scale": e8m0(2, 2)},
    "FP4, deepseek": {"weight": int8(OUT, K // 2), "scale": e8m0(OUT, K // 32)},
    "compressed-tensors FP8 with a scale for each channel": named(
        "weight weight_scale", fp8(OUT, K), floats(OUT, 1, dtype=torch.bfloat16)
    ),
    "modelopt FP8 with one scale": named(
        "weight weight_scale input_scale k_scale", fp8(OUT, K), floats(), floats(), floats()
    ),
    "fbgemm FP8": {"weight": fp8(OUT, K), "weight_scale": floats(OUT, 1), "input_scale_ub": floats(1)},
    "FP8 of ComfyUI": {"weight": fp8(OUT, K), "scale_weight": floats(), "scale_input": floats()},
    "int8 with a scale for each channel": named(
        "weight weight_scale weight_zero_point", int8(OUT, K), floats(OUT, 1), int8(OUT, 1)
    ),
    "torchao Int8Tensor": named(
        "_weight_qdata _weight_scale _weight_zero_point", int8(OUT, K), floats(OUT, 1), int8(OUT, 1)
    ),
    "optimum-quanto": named(
        "weight._data weight._scale input_scale output_scale", int8(OUT, K), floats(OUT, 1), floats(), floats()
    ),
    "EETQ": {"weight": int8(K, OUT), "weight_scales": half(OUT)},
    "HQQ": named(
        "W_q scale zero shape", codes(OUT * K // 128, 64), floats(32, 1), floats(32, 1), torch.tensor([OUT, K])
    ),
}
#: Layouts whose shape the tensors do not tell.
UNKNOWN: dict[str, Tensors] = {
    "bitnet, packed": {"weight": codes(OUT // 4, K), "weight_scale": floats(1)},
    "packed, int8 with scales": {"weight": int8(OUT, K), "scales": floats(OUT)},
    "AQLM": {"codes": int8(OUT, K // 8, 2), "codebooks": floats(2, 256, 1, 8), "scales": floats(OUT, 1, 1, 1)},
    "VPTQ": {"indices": int32(1, OUT, K // 8), "centroids.weight": floats(1, 2048)},
    "Marlin": {"B": int32(K // 16, OUT * 2), "s": floats(1, OUT)},
    "EXL3": {"trellis": codes(4, 4, 16, dtype=torch.int16), "suh": floats(K), "svh": floats(OUT)},
    "EXL2": {"q_weight": int32(K // 8, OUT), "q_scale": codes(2, OUT // 8), "q_scale_max": floats(2)},
    "QuIP": named("Qidxs SU SV Wscale", codes(OUT, K // 8, dtype=torch.int64), floats(K), floats(OUT), floats(1)),
    "SVDQuant": {"qweight": int8(OUT, K // 2), "wscales": floats(K // 16, OUT), "smooth_factor": floats(K)},
    **{
        f"packed {str(code.dtype).removeprefix('torch.')}, {end}": {"weight": code, end: floats(*shape)}
        for code, (end, shape) in product(
            (fp8(OUT, K), int8(OUT, K), codes(OUT, K // 8, dtype=torch.uint32)),
            {"w_scale": (1,), "weight.scale_inv_0": (2, 4), "qs": (OUT, 1), "weights_scaling_factor": ()}.items(),
        )
    },
    "packed uint8, MXFP4 with other names": {"w_blocks": codes(2, 16, 2, 16), "w_scale": codes(2, 16, 2)},
    "packed uint8, transformer engine": {"weight._data": codes(OUT, K), "weight._scale_of_rows": floats(1)},
    "packed uint8, flat": {"weight.quantized_data": codes(OUT * K // 2), "weight.quantized_scalers": int8(OUT)},
    "someones, a kernel's own codes": {"packed": codes(OUT, K // 2), "table": floats(16)},
}
EVERY = LAYOUTS | UNKNOWN
#: The configurations of layouts that have one.
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"quant_method": "bitsandbytes"} for name in LAYOUTS if name.endswith((", nested", ", plain"))},
    **{f"GPTQ {bits} bit": {"quant_method": "gptq", "bits": bits} for bits in (2, 3, 4, 8)},
    "AWQ 4 bit": {"quant_method": "awq", "version": "gemm"},
    "compressed-tensors int8": {"quant_method": "compressed-tensors", "config_groups": {"a": {"num_bits": 8}}},
    "FP8 with 30x30 block scales": {"quant_method": "fp8", "weight_block_size": [30, 30]},
    "compressed-tensors FP8 with a scale for each channel": {"quant_method": "compressed-tensors"},
    "modelopt FP8 with one scale": {"quant_method": "modelopt"},
    "fbgemm FP8": {"quant_method": "fbgemm_fp8"},
    "HQQ": {"quant_method": "hqq"},
    "bitnet, packed": {"quant_method": "bitnet"},
    "AQLM": {"quant_method": "aqlm"},
    "someones, a kernel's own codes": {"quant_method": "someones"},
}
TORCHAO = {"_type": "Int8Tensor", "_data": {"dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}}
PLAIN = {
    "model.embed_tokens.weight": floats(8, K),
    "model.layers.0.input_layernorm.weight": floats(K),
    "lm_head.weight": floats(8, K),
}


def write(
    folder: Path, name: str, how: str = "safetensors", module: str = M, plain: Tensors = PLAIN, **given: Any
) -> Path:
    """Write a model with one quantized module of a layout, and return its path. ``given`` may have other parts."""
    parts, config = given.get("parts", EVERY[name]), given.get("method", {}) | CONFIGS.get(name, {})
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
