"""``dequantize``: the values of every layout, computed here one at a time, and by the libraries of the formats."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from lora_adapters import write_adapter
from quantized_layouts import LAYOUTS, OUT, PLAIN, UNKNOWN, K, M, Tensors, codes, floats, fp8, half, int32, write
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.values import arrays

GIVEN = Path(os.environ.get("CKPTOOL_QUANTIZED", Path(__file__).parents[2].parent / "shared" / "quantised" / "given"))
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
#: Layouts that are recognised, and whose values no rule gives.
REFUSED = ("EETQ", "HQQ")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def low_first(tensor: torch.Tensor) -> torch.Tensor:
    """Return the two codes in each byte."""
    data = tensor.view(torch.uint8).long()
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def stream(words: torch.Tensor, bits: int, count: int) -> list[int]:
    """Return codes from a stream of bits."""
    number = sum((int(word) & 0xFFFFFFFF) << (32 * at) for at, word in enumerate(words))
    return [(number >> (bits * at)) & ((1 << bits) - 1) for at in range(count)]


def exponents(scale: torch.Tensor) -> torch.Tensor:
    return torch.pow(2.0, scale.view(torch.uint8).double() - 127).float()


def of_blocks(parts: Tensors, scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    code = next(iter(parts.values()))
    wide = scale.float().repeat_interleave(shape[0], -2).repeat_interleave(shape[1], -1)
    return code.float() * wide[..., : code.shape[-2], : code.shape[-1]]


def expected(name: str, parts: Tensors, dtype: torch.dtype) -> torch.Tensor:
    """Return the plain weight by the formula of its library."""
    if name.startswith("bitsandbytes int8"):
        return (parts["weight"].float() * parts["SCB"].reshape(-1, 1) * torch.tensor(1 / 127)).to(dtype)
    if name.startswith("bitsandbytes"):
        data = raw(parts["weight"]).long()
        maxima = parts["weight.absmax"]
        if "weight.nested_absmax" in parts:
            inner = parts["weight.nested_absmax"].repeat_interleave(16)[: len(maxima)]
            maxima = parts["weight.nested_quant_map"][maxima.long()] * inner + torch.tensor(0.0123)
        values = parts["weight.quant_map"][torch.stack((data >> 4, data & 15), -1).flatten()]
        return (values * maxima.repeat_interleave(64)).bfloat16().to(dtype).reshape(OUT, K)
    if name.startswith(("GPTQ", "AWQ")):
        scales, zeros = parts["scales"].float(), parts["qzeros"]
        if name.startswith("GPTQ"):
            bits = int(name.split()[1])
            code = torch.tensor([stream(column, bits, K) for column in parts["qweight"].T])
            zero = (torch.tensor([stream(row, bits, OUT) for row in zeros]) + 1) % (1 << bits)
        else:
            order = [0, 4, 1, 5, 2, 6, 3, 7]
            fields = [[stream(word.reshape(1), 4, 8) for word in row] for row in parts["qweight"]]
            code = torch.tensor([[word[at] for word in row for at in order] for row in fields]).T
            zero = torch.tensor([[stream(w.reshape(1), 4, 8)[at] for w in row for at in order] for row in zeros])
        group = (torch.arange(K) // 32).long()
        return (scales[group].T * (code - zero[group].T)).half().to(dtype)
    if name.startswith("compressed-tensors int"):
        bits = int(name.removeprefix("compressed-tensors int"))
        code = torch.tensor([stream(row, bits, K) for row in parts["weight_packed"]]) - (1 << (bits - 1))
        return (code * parts["weight_scale"].repeat_interleave(K // 2, 1)).to(dtype)
    if "NVFP4" in name:
        scale = parts["weight_scale"].float()
        if "weight_global_scale" in parts:
            scale, table = scale / parts["weight_global_scale"], E2M1
        else:
            scale, table = scale * parts["weight_scale_2"], E2M1.abs() * (E2M1 / E2M1.abs()).nan_to_num(0)
        values = table[low_first(next(iter(parts.values())))] * scale.repeat_interleave(16, 1)
        return (values.bfloat16() if "weight_global_scale" in parts else values).to(dtype)
    if name.startswith(("MXFP4", "compressed-tensors MXFP4", "FP4")):
        code, scale = parts.values()
        values = E2M1[low_first(code).reshape(*scale.shape, 32)] * exponents(scale).unsqueeze(-1)
        values = values.flatten(-2).bfloat16() if "MXFP4" in name else values.flatten(-2)
        return (values.transpose(-1, -2) if "gpt-oss" in name else values).to(dtype)
    if name.startswith("modelopt FP8"):
        return (parts["weight"].float() * parts["weight_scale"].to(dtype).float()).to(dtype)
    if name.startswith("torchao"):
        code, scale, zero = parts.values()
        return ((code.float() - zero.float()) * scale).bfloat16().to(dtype)
    if name.startswith("int8"):
        code, scale, zero = parts.values()
        return ((code.float() - zero.float()) * scale).to(dtype)
    if name.startswith("optimum-quanto") or "for each channel" in name or name.startswith("fbgemm"):
        code, scale, *_ = parts.values()
        return (code.float() * scale.float()).to(scale.dtype).to(dtype)
    if name.startswith("FP8 of ComfyUI"):
        return (parts["weight"].float() * parts["scale_weight"]).to(dtype)
    if "for each slice" in name:
        return (parts["w"].float() * parts["w_scale_inv"].reshape(2, 1, 1)).to(dtype)
    blocks = {"FP8 with 30x30 block scales": (30, 30), "FP8 with one, no configuration": (OUT, K)}
    blocks |= {"FP8 with 8x32 block scales, experts": (8, 32), "FP8 with 16x32 block scales, deepseek": (16, 32)}
    return of_blocks(parts, list(parts.values())[1], blocks[name]).to(dtype)


def plain_of(path: Path) -> Tensors:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if not name.startswith(REFUSED)])
def test_every_layout(name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NumPy and without it, from a file and a folder, as a command and as an option of edit."""
    parts, word = LAYOUTS[name], str(dtype).removeprefix("torch.")
    method = {} if not name.startswith("GPTQ") else {"quant_method": "gptq"}
    folder, out = write(tmp_path / "in", name, "folder", method=method), tmp_path / "out.safetensors"
    if dtype == torch.float32:
        monkeypatch.setattr(arrays, "numpy_module", lambda: None)
    said = say("dequantize", folder, word, "-o", out)
    assert said.code == 0 and "1 weight turned back" in said.all, said.all
    result, wanted = load_file(out), expected(name, parts, dtype)
    (made,) = result.keys() - PLAIN.keys()
    assert made.removeprefix(f"{M}.") in ("weight", "w")
    assert result[made].shape == wanted.shape and result[made].dtype == dtype
    assert torch.equal(raw(result[made]), raw(wanted)), (result[made] - wanted).abs().max()
    assert all(torch.equal(result[key], value.to(dtype)) for key, value in PLAIN.items())
    whole = say("edit", folder, "--dequantize", "-o", tmp_path / "edited")
    assert whole.code == 0 and not any("quant" in file.read_text() for file in (tmp_path / "edited").glob("*.json"))
    assert "quantized" not in ckptool.inspect(tmp_path / "edited")


@pytest.mark.parametrize("name", ["GPTQ 4 bit", "bitsandbytes nf4, nested", "FP8 with 30x30 block scales"])
def test_a_training_file_keeps_the_rest(name: str, tmp_path: Path) -> None:
    path, out = write(tmp_path / "in", name, "training"), tmp_path / "out.pth"
    assert say("dequantize", path, "bf16", "-o", out).code == 0
    saved = torch.load(out, weights_only=True)
    assert saved["epoch"] == 3
    assert torch.equal(saved["model"][f"{M}.weight"], expected(name, LAYOUTS[name], torch.bfloat16))


@pytest.mark.parametrize("name", [*UNKNOWN, *(name for name in LAYOUTS if name.startswith(REFUSED))])
def test_layouts_without_a_rule_are_refused(name: str, tmp_path: Path) -> None:
    path, out = write(tmp_path / "in", name, "folder"), tmp_path / "out.safetensors"
    said = say("dequantize", path, "-o", out)
    assert said.code == 4 and name.partition(",")[0].split()[0] in said.all and not out.exists(), said.all


@pytest.mark.parametrize("name", [name for name in LAYOUTS if not name.startswith(REFUSED)])
def test_a_lost_part_is_refused(name: str, tmp_path: Path) -> None:
    optional = ("weight_format", "g_idx", "zero_point", "input_scale", "k_scale", "scale_input", "output_scale", "ub")
    for number, lost in enumerate(end for end in LAYOUTS[name] if not end.endswith(optional)):
        left = {end: value for end, value in LAYOUTS[name].items() if end != lost}
        path = write(tmp_path / str(number), name, "folder", parts=left, method={"quant_method": "fp8"})
        said = say("dequantize", path, "-o", tmp_path / f"{number}.safetensors")
        assert said.code in (3, 4) and not (tmp_path / f"{number}.safetensors").exists(), (lost, said.all)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "change", "method", "word"),
    [
        ("GPTQ 4 bit", {"g_idx": torch.full((K,), 1000, dtype=torch.int32)}, {"quant_method": "gptq"}, "g_idx"),
        ("GPTQ 4 bit", {}, {"quant_method": "gptq", "checkpoint_format": "marlin"}, "marlin"),
        ("AWQ 4 bit", {}, {"version": "gemv"}, "gemv"),
        ("bitsandbytes int8", {"weight_format": torch.tensor(1, dtype=torch.uint8)}, {}, "GPU"),
        ("FP8 with 30x30 block scales", {"weight_scale_inv": torch.full((2, 3), torch.inf)}, {}, "not finite"),
        ("FP8 with 30x30 block scales", {"weight_scale_inv": torch.full((2, 3), 1e6)}, {}, "finite values"),
        ("fbgemm FP8", {"weight_scale": torch.full((OUT, 1), 1e6)}, {}, "finite values"),
        ("modelopt NVFP4", {"pre_quant_scale": floats(K)}, {}, "changes the inputs"),
        ("modelopt NVFP4", {"weight_scale_2": floats(4)}, {}, "does not fit"),
        ("modelopt NVFP4", {"weight_scale_2": torch.tensor(3e38)}, {}, "not finite"),
        ("fbgemm FP8", {"weight_scale": torch.full((OUT, 1), 3e38)}, {}, "would be infinite"),
        ("FP8 with one, no configuration", {"scale": floats(1, 1)}, {}, "belongs to another format"),
        ("compressed-tensors NVFP4", {"weight_global_scale": torch.zeros(1)}, {}, "is 0"),
        ("compressed-tensors int4", {"weight_scale": floats(2, OUT)}, {}, "does not fit"),
        ("compressed-tensors int4", {"weight_scale": floats(OUT, 3)}, {}, "do not divide"),
        ("compressed-tensors int4", {"weight_zero_point": codes(OUT, 2).char()}, {}, "is int8"),
        ("bitsandbytes nf4, plain", {"weight.absmax": floats(32, dtype=torch.float64)}, {}, "bitsandbytes writes"),
        ("MXFP4, gpt-oss", {"w_scales": codes(2, OUT // 2, K // 32).fill_(255)}, {}, "not finite"),
    ],
)
def test_values_that_make_no_sense(name: str, change: Tensors, method: Any, word: str, tmp_path: Path) -> None:
    path, out = write(tmp_path / "in", name, "folder", parts=LAYOUTS[name] | change), tmp_path / "out.safetensors"
    config = json.loads((path / "config.json").read_text()) if (path / "config.json").exists() else {}
    config["quantization_config"] = config.get("quantization_config", {}) | method
    (path / "config.json").write_text(json.dumps(config))
    said = say("dequantize", path, "float16", "-o", out)
    assert said.code in (3, 4) and word in said.all and not out.exists(), said.all


def test_gptq_without_its_version(tmp_path: Path) -> None:
    path, out = tmp_path / "model.safetensors", tmp_path / "out.safetensors"
    save_file({f"{M}.{end}": value for end, value in LAYOUTS["GPTQ 4 bit"].items()}, path)
    said = say("dequantize", path, "-o", out)
    assert said.code == 4 and "two versions" in said.all and not out.exists()
    results = []
    for byte in (0x77, 0x88):
        parts = LAYOUTS["GPTQ 4 bit"] | {"qzeros": torch.full((2, OUT // 2), byte, dtype=torch.uint8).view(torch.int32)}
        save_file({f"{M}.{end}": value for end, value in parts.items()}, path)
        assert say("dequantize", path, "--force", "-o", out).code == 0
        results.append(load_file(out)[f"{M}.weight"])
    assert torch.equal(*results)


def test_zero_points_that_are_all_ones_are_named(tmp_path: Path) -> None:
    for byte, said in ((0xFF, True), (0x77, False)):
        zeros = torch.full((2, OUT // 2), byte, dtype=torch.uint8).view(torch.int32)
        parts = LAYOUTS["GPTQ 4 bit"] | {"qzeros": zeros}
        path = write(tmp_path / "in", "GPTQ 4 bit", "folder", parts=parts)
        report = say("dequantize", path, "--force", "-o", tmp_path / "out.safetensors")
        assert report.code == 0 and ("all ones" in report.all) is said, report.all


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dense", [True, False])
def test_widths_of_codes_are_proved_or_refused(bits: int, dense: bool, tmp_path: Path) -> None:
    """Words of whole codes, as before compressed-tensors 0.20, have the width of other codes in one case."""
    values = torch.arange(OUT * K).reshape(OUT, K) % (1 << bits)
    width = -(-K * bits // 32) if dense else -(-K // (32 // bits))
    words = [0] * (OUT * width)
    for row in range(OUT):
        for at in range(K):
            place = at * bits if dense else at // (32 // bits) * 32 + at % (32 // bits) * bits
            words[row * width + place // 32] |= int(values[row, at]) << place % 32 & 0xFFFFFFFF
            if place % 32 + bits > 32:
                words[row * width + place // 32 + 1] |= int(values[row, at]) >> (32 - place % 32)
    packed = torch.tensor(words).to(torch.uint32).view(torch.int32).reshape(OUT, width)
    parts = {"weight_packed": packed, "weight_scale": floats(OUT, 1), "weight_shape": torch.tensor([OUT, K])}
    wanted, out = (values - (1 << (bits - 1))) * parts["weight_scale"], tmp_path / "out.safetensors"
    for number, method in enumerate(({}, {"config_groups": {"a": {"weights": {"num_bits": bits}}}})):
        path = write(tmp_path / str(number), "compressed-tensors int4", "folder", parts=parts, method=method)
        said = say("dequantize", path, "float32", "--force", "-o", out)
        if not method and width == K // 4:
            assert said.code == 4 and "7 bits padded to words" in said.all and "8 bits" in said.all, said.all
        else:
            assert said.code == 0 and torch.equal(load_file(out)[f"{M}.weight"], wanted), said.all


@pytest.mark.parametrize(
    ("shape", "scale"),
    [
        *[((2, 16, 64), scale) for scale in ((2,), (2, 1, 1), (2, 16), (2, 16, 1), (2, 1, 64), (2, 8, 4))],
        *[((8, 4, 3, 3), scale) for scale in ((8,), (8, 1, 1, 1), (8, 4), (1,), (8, 4, 3, 1))],
    ],
)
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_scales_of_slices(shape: Any, scale: Any, kind: torch.dtype, tmp_path: Path) -> None:
    code, scales = codes(*shape).view(kind), floats(*scale)
    save_file({"w": code, "w_scale": scales}, tmp_path / "in.safetensors")
    assert say("dequantize", tmp_path / "in.safetensors", "bf16", "-o", tmp_path / "out.safetensors").code == 0
    wide = scales.reshape(*scale, *[1] * (len(shape) - len(scale)))
    for axis, size in enumerate(shape):
        wide = wide.repeat_interleave(size // wide.shape[axis], axis)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], (code.float() * wide).bfloat16())


def test_groups_that_do_not_divide_and_int64_indices(tmp_path: Path) -> None:
    """The size of groups is in the configuration, or the file has the group of each input."""
    parts = LAYOUTS["GPTQ 4 bit"] | {"g_idx": torch.arange(K) // 48, "scales": half(2, OUT)}
    method, results = {"group_size": 48}, []
    for number, ends in enumerate((parts.keys(), parts.keys() - {"g_idx"})):
        some = {end: parts[end] for end in parts if end in ends}
        path = write(tmp_path / str(number), "GPTQ 4 bit", "folder", parts=some, method=method)
        said = say("dequantize", path, "-o", tmp_path / f"{number}.safetensors")
        assert said.code == 0, said.all
        results.append(load_file(tmp_path / f"{number}.safetensors")[f"{M}.weight"])
    assert torch.equal(*results)
    scale, code = parts["scales"], torch.tensor([stream(column, 4, K) for column in parts["qweight"].T])
    zero = (torch.tensor([stream(row, 4, OUT) for row in parts["qzeros"]]) + 1) % 16
    group = parts["g_idx"]
    assert torch.equal(results[0], (scale.float()[group].T * (code - zero[group].T)).half())


def test_a_tensor_that_shares_the_storage_of_a_scale(tmp_path: Path) -> None:
    base = torch.rand(64)
    state = {"a.weight": fp8(8, 8), "a.weight_scale_inv": base[:1].reshape(1, 1), "norm.weight": base[8:24]}
    torch.save(state, tmp_path / "in.pth")
    assert say("dequantize", tmp_path / "in.pth", "bf16", "-o", tmp_path / "out.pth").code == 0
    result = torch.load(tmp_path / "out.pth", weights_only=True)
    assert torch.equal(result["norm.weight"], state["norm.weight"].bfloat16()) and len(result) == 2
    said = say("cast", tmp_path / "in.pth", "bf16", "--force", "-o", tmp_path / "out.pth")
    assert "norm.weight" in said.all and "part of a quantized weight" in said.all


def test_a_file_has_the_dtype_of_the_configuration_beside_it(tmp_path: Path) -> None:
    save_file({"a.weight": fp8(8, 8), "a.weight_scale": floats(1)}, tmp_path / "model.safetensors")
    for number, field in enumerate(("torch_dtype", "dtype")):
        (tmp_path / "config.json").write_text(json.dumps({field: "float16", "quantization_config": {}}))
        out = tmp_path / f"{number}.safetensors"
        assert say("dequantize", tmp_path / "model.safetensors", "-o", out).code == 0
        assert load_file(out)["a.weight"].dtype == torch.float16


def test_plain_models_and_unknown_methods(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    path = tmp_path / "m" / "model.safetensors"
    save_file({**PLAIN, "a.scale": floats(4)}, path)
    said = say("dequantize", path, "-o", tmp_path / "out.safetensors")
    assert said.code == 4 and "none of its weights is quantized" in said.all
    (tmp_path / "m" / "config.json").write_text('{"quantization_config": {"quant_method": "aqlm"}}')
    said = say("dequantize", path, "-o", tmp_path / "out.safetensors")
    assert said.code == 4 and "aqlm" in said.all


def test_wide_weights_take_other_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are read in slices, and products by tables, give the values of one piece."""
    from ckptool.values import dequantized

    layouts = {
        "GPTQ 4 bit": {"qweight": int32(64, 700), "scales": floats(4, 700).half(), "qzeros": int32(4, 88)},
        "FP8 with 30x30 block scales": {"weight": fp8(270, 200), "weight_scale_inv": floats(9, 7)},
    }
    for number, (name, parts) in enumerate(layouts.items()):
        parts = {end: value[:, :87] if end == "qzeros" else value for end, value in parts.items()}
        parts = {
            end: value[:, :696].contiguous() if number == 0 and end != "qzeros" else value.contiguous()
            for end, value in parts.items()
        }
        path, results = write(tmp_path / str(number), name, "folder", parts=parts), []
        for kept, alike, step in ((1 << 24, 16, 1 << 16), (0, 1 << 20, 1 << 10), (1 << 24, 1, 777)):
            for each, value in (("_KEPT", kept), ("_ALIKE", alike), ("_STEP", step)):
                monkeypatch.setattr(dequantized, each, value)
            out = tmp_path / f"{number}{step}.safetensors"
            assert say("dequantize", path, "bf16", "-o", out).code == 0
            results.append(raw(load_file(out)[f"{M}.weight"]))
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("kind", sorted(GIVEN.iterdir()) if GIVEN.is_dir() else [], ids=lambda path: path.name)
def test_models_that_the_libraries_made(kind: Path, tmp_path: Path) -> None:
    case, wanted = json.loads((kind / "case.json").read_text()), load_file(kind / "expected.safetensors")
    said = say("dequantize", kind, "--to-dtype", case["dtype"], "-o", tmp_path / "out.safetensors")
    assert said.code == 0, said.all
    result = load_file(tmp_path / "out.safetensors")
    assert result.keys() == wanted.keys()
    assert all(torch.equal(result[key], value) and result[key].dtype == value.dtype for key, value in wanted.items())


def test_the_other_commands_take_the_plain_values(tmp_path: Path) -> None:
    name = "FP8 with 30x30 block scales"
    path, plain = write(tmp_path / "in", name, "folder"), tmp_path / "plain.safetensors"
    assert say("dequantize", path, "-o", plain).code == 0
    assert say("diff", path, plain).code == 1
    assert "are equal" in say("diff", path, plain, "--dequantized").all
    rows = ckptool.stats(plain)["tensors"]
    assert ckptool.stats(ckptool.dequantize(path))["tensors"][0]["mean"] == rows[0]["mean"]
    listed, every = say("keys", path).all, say("keys", path, "--all").all
    assert f"{OUT}x{K}" in listed and name in listed and "weight_scale_inv" not in listed and "--all" in listed
    assert "weight_scale_inv" in every and name not in every
    names = {"A": floats(2, K), "B": floats(OUT, 2)}
    adapter = {f"base_model.model.{M}.lora_{side}.weight": value for side, value in names.items()}
    lora = write_adapter(tmp_path / "lora", adapter, target_modules=["down_proj"])
    assert "--dequantize" in say("lora", "merge", path, lora, "-o", tmp_path / "a").all
    assert say("lora", "merge", path, lora, "--dequantize", "-o", tmp_path / "a").code == 0
    assert say("lora", "merge", plain, lora, "-o", tmp_path / "b.safetensors").code == 0
    one, other = load_file(next((tmp_path / "a").glob("*.safetensors"))), load_file(tmp_path / "b.safetensors")
    assert all(torch.equal(raw(one[key]), raw(value)) for key, value in other.items())


@pytest.mark.parametrize("name", [name for name, parts in LAYOUTS.items() if len(parts) > 1])
def test_edits_of_names_take_the_tensors_of_a_weight_together(name: str, tmp_path: Path) -> None:
    path, out = write(tmp_path / "in", name), tmp_path / "out.safetensors"
    optional = ("weight_format", "g_idx", "zero_point", "input_scale", "k_scale", "scale_input", "output_scale", "ub")
    if name.startswith(("torchao", "HQQ")):
        pytest.skip("its header, or the whole module, describes the weight")
    for end in [end for end in LAYOUTS[name] if not end.endswith(optional)]:
        for line in (("drop", path, f"{M}.{end}"), ("rename", path, f"{M}.{end}=other")):
            said = say(*line, "-o", out)
            assert said.code == 4 and "quantized weight" in said.all and not out.exists(), (line, said.all)
    assert say("drop", path, f"{M}*", "-o", out).code == 0
    assert say("rename", path, f"{M}*=other*", "--force", "-o", out).code == 0


def test_a_lost_part_is_a_warning_of_validate(tmp_path: Path) -> None:
    parts = {end: value for end, value in LAYOUTS["GPTQ 4 bit"].items() if end != "scales"}
    path = write(tmp_path / "in", "GPTQ 4 bit", parts=parts)
    checks = {each["name"]: each for each in ckptool.validate(path)["checks"]}
    assert checks["complete"]["status"] == "warning" and "scales is missing" in str(checks["complete"])


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_hold_the_tensors_of_a_weight_together(suffix: str, tmp_path: Path) -> None:
    name = "bitsandbytes nf4, nested"
    state = {f"layers.{n}.{end}": value.clone() for n in range(8) for end, value in LAYOUTS[name].items()}
    save_file(state, tmp_path / "model.safetensors")
    form = ("--to-format", "torch") if suffix == "bin" else ()
    line = ("convert", tmp_path / "model.safetensors", "-o", tmp_path / "out", "--max-shard-size", "3kB", *form)
    assert say(*line).code == 0
    index = json.loads(next((tmp_path / "out").glob("*.index.json")).read_text())["weight_map"]
    assert index.keys() == state.keys() and len({*index.values()}) > 3
    for number in range(8):
        assert len({file for key, file in index.items() if key.startswith(f"layers.{number}.")}) == 1


@pytest.mark.parametrize("name", [name for name in LAYOUTS if not name.startswith((*REFUSED, "torchao"))])
def test_a_flipped_bit_in_any_part_is_seen(name: str, tmp_path: Path) -> None:
    """The checksums of the parts are verified, although none is in the output; scales of activations are not read."""
    beside = ("input_scale", "k_scale", "ub", "scale_input", "output_scale")
    parts = {end: value for end, value in LAYOUTS[name].items() if not end.endswith(beside)}
    path, out = write(tmp_path / "in", name, "bin", parts=parts), tmp_path / "out.safetensors"
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        records = [info for info in archive.infolist() if "/data/" in info.filename and info.file_size]
    assert len(records) >= len(parts)
    for record in records:
        name_size, extra = struct.unpack_from("<HH", whole, record.header_offset + 26)
        place = record.header_offset + 30 + name_size + extra + record.file_size // 2
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        said = say("dequantize", path, "bf16", "-o", out)
        assert said.code and not out.exists(), (record.filename, said.all)


def test_objects_under_several_names_stay_under_all(tmp_path: Path) -> None:
    name, parts = "FP8 with 16x32 block scales, deepseek", LAYOUTS["FP8 with 16x32 block scales, deepseek"]
    scale, wanted = torch.ones(1), expected(name, parts, torch.bfloat16)
    state = {f"{module}.{end}": value for module in "ab" for end, value in parts.items()}
    state |= {"c.weight": fp8(4, 4), "c.weight_scale": scale, "logit_scale": scale}
    torch.save(state, tmp_path / "in.pth")
    assert say("dequantize", tmp_path / "in.pth", "-o", tmp_path / "out.pth").code == 0
    result = torch.load(tmp_path / "out.pth", weights_only=True)
    assert result.keys() == {"a.weight", "b.weight", "c.weight", "logit_scale"}
    assert torch.equal(result["a.weight"], wanted) and torch.equal(result["b.weight"], wanted)


def test_turned_codes_are_read_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptool.values import dequantized

    monkeypatch.setattr(dequantized, "_KEPT", 0)
    parts = LAYOUTS["GPTQ 4 bit"] | {"qzeros": torch.full((2, OUT // 8), 0x77777777, dtype=torch.int32)}
    results = []
    for code in (parts["qweight"], parts["qweight"].t().contiguous().t()):
        torch.save({f"{M}.{end}": value for end, value in (parts | {"qweight": code}).items()}, tmp_path / "in.pth")
        assert say("dequantize", tmp_path / "in.pth", "--force", "-o", tmp_path / "out.pth").code == 0
        results.append(torch.load(tmp_path / "out.pth", weights_only=True)[f"{M}.weight"])
    assert torch.equal(*results)


def converted(tmp_path: Path, state: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    (tmp_path / "in").mkdir()
    save_file(state, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    said = say("dequantize", tmp_path / "in", "-o", tmp_path / "out")
    assert said.code == 0, said.all
    return load_file(tmp_path / "out" / "model.safetensors"), json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_configuration_inside_another(tmp_path: Path) -> None:
    """The part that is quantized says what its dtype is; other parts keep theirs."""
    inner = {"quantization_config": {"quant_method": "fp8"}, "dtype": "bfloat16"}
    config = {"thinker_config": {"text_config": inner, "vision_config": {"dtype": "float32"}}}
    state = {"a.weight": fp8(8, 8), "a.weight_scale_inv": floats(1, 1), "vision.weight": floats(99, 99)}
    result, described = converted(tmp_path, state, config)
    assert result["a.weight"].dtype == torch.bfloat16 and result["vision.weight"].dtype == torch.float32
    parts = {"text_config": {"dtype": "bfloat16"}, "vision_config": {"dtype": "float32"}}
    assert described == {"thinker_config": parts, "torch_dtype": "bfloat16"}


def test_norms_that_are_called_scales_stay(tmp_path: Path) -> None:
    state = {"a.weight": fp8(8, 8), "a.weight_scale_inv": floats(1, 1), "a.k_scale": floats(64), "b.k_scale": floats(1)}
    result, _ = converted(tmp_path, state, {"compression_config": {"quant_method": "fp8"}, "dtype": "bfloat16"})
    assert result.keys() == {"a.weight", "a.k_scale"}


def test_block_sizes_of_every_group_are_tried(tmp_path: Path) -> None:
    code, scale = fp8(150, 150), floats(3, 3)
    groups = {"a": {"weights": {"block_structure": [128, 128]}}, "b": {"weights": {"block_structure": "64x64"}}}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}
    result, _ = converted(tmp_path, {"a.weight": code, "a.weight_scale": scale}, config | {"dtype": "float32"})
    assert torch.equal(result["a.weight"], of_blocks({"": code}, scale, (64, 64)))


def test_float8_without_a_scale(tmp_path: Path) -> None:
    """Beside quantized weights it is damage; with a scale in float8 it is a plain cast."""
    state = {"a.weight": fp8(8, 8), "a.weight_scale_inv": floats(1, 1), "norm.weight": fp8(8)}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    said = say("dequantize", tmp_path / "model.safetensors", "-o", tmp_path / "out.safetensors")
    assert said.code == 4 and "norm.weight" in said.all and not (tmp_path / "out.safetensors").exists()
    (tmp_path / "config.json").unlink()
    save_file({"gamma": fp8(8, 8), "gamma_scale": fp8(8)}, tmp_path / "model.safetensors")
    said = say("dequantize", tmp_path / "model.safetensors", "-o", tmp_path / "out.safetensors")
    assert said.code == 4 and "none of its weights is quantized" in said.all


def test_a_key_and_an_optimizer_limit_what_is_turned_back(tmp_path: Path) -> None:
    weight = {f"fc.{end}": value for end, value in LAYOUTS["bitsandbytes int8"].items()}
    state = {"state1": codes(4096), "absmax1": floats(16), "qmap1": floats(256)}
    optimizer = {"state": {0: state}, "param_groups": [{"params": [0]}]}
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    torch.save({"model": weight, "ema": {key: value.clone() for key, value in weight.items()}}, path)
    assert say("dequantize", path, "--key", "ema", "-o", out).code == 0
    saved = torch.load(out, weights_only=True)
    assert saved["model"].keys() == weight.keys() and saved["ema"].keys() == {"fc.weight"}
    torch.save({"model": weight, "optimizer": optimizer}, path)
    assert say("dequantize", path, "--force", "-o", out).code == 0
    for saved in ({"model": dict(PLAIN), "optimizer": optimizer}, optimizer):
        torch.save(saved, tmp_path / "plain.pth")
        assert say("stats", tmp_path / "plain.pth", "--dequantized").code == 0
    saved = torch.load(out, weights_only=True)
    assert saved["model"].keys() == {"fc.weight"} and saved["optimizer"]["state"][0].keys() == state.keys()
