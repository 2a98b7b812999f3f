"""Quantized weights: recognised in every layout, counted as what they stand for, and never computed with."""

from __future__ import annotations

import json
import os
import sys
import types
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from lora_adapters import write_adapter
from quantized_layouts import (
    EVERY,
    LAYOUTS,
    OUT,
    PLAIN,
    UNKNOWN,
    K,
    M,
    Tensors,
    codes,
    floats,
    int8,
    int32,
    text,
    write,
)
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.checkpoint.quantized import quantization

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
GIVEN = Path(os.environ.get("CKPTOOL_QUANTIZED", Path(__file__).parents[2].parent / "shared" / "quantised" / "given"))


#: Layouts, and the files in which they are.
WAYS = [
    (name, how)
    for name, how in product(EVERY, ("safetensors", "folder", "bin", "training"))
    if how == "safetensors" or not (name.startswith("torchao") or (name in UNKNOWN and how == "training"))
]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def load(path: Path) -> Tensors:
    if path.is_dir():
        return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}
    if path.suffix == ".safetensors":
        return load_file(path)
    state = torch.load(path, weights_only=True)
    return state.get("model", state)


@pytest.mark.parametrize(("name", "how"), WAYS)
def test_a_cast_leaves_every_part_alone_and_says_so(name: str, how: str, tmp_path: Path) -> None:
    parts, path = EVERY[name], write(tmp_path / "in", name, how)
    out = tmp_path / ("out" + path.suffix)
    said = say("cast", path, "--to-dtype", "float16", "-o", out)
    assert said.code == 0 and "quantized" in said.all and name.partition(",")[0] in said.all, said.all
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


@pytest.mark.parametrize(("name", "how"), WAYS)
def test_edits_that_compute_refuse(name: str, how: str, tmp_path: Path) -> None:
    path = write(tmp_path / "in", name, how)
    other = write(tmp_path / "other", name, how, plain={key: value * 2 for key, value in PLAIN.items()})
    out = tmp_path / ("out" + path.suffix)
    names = {"A": floats(2, K), "B": floats(OUT, 2)}
    adapter = {f"base_model.model.{M}.lora_{side}.weight": value for side, value in names.items()}
    lora = write_adapter(tmp_path / "lora", adapter, target_modules=["down_proj"])
    lines = [
        ("average", path, other),
        ("average", path, other, "--base", path),
        ("average", path, other, "--weights", "1,3"),
        ("lora merge", path, lora),
        ("edit", path, "--to-names", "meta:llama3"),
    ]
    for line in lines:
        said = say(*line, "-o", out)
        assert said.code == 4 and "quantized" in said.all and not out.exists(), (line[0], said.all)


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    path, known = write(tmp_path / "in", name), name.partition(",")[0]
    report = ckptool.inspect(path)
    expected = OUT * K + sum(value.numel() for value in PLAIN.values())
    assert report["parameters"] == report["state_dicts"][0]["parameters"] == expected
    assert [(form.startswith(known), count) for form, count in report["quantized"]["formats"].items()] == [(True, 1)]
    assert (report["quantized"]["plain"], report["quantized"]["tensors"]) == (2, len(LAYOUTS[name]))
    assert not any(item["code"] == "quantized" for item in report["findings"])
    said = say("inspect", path).all
    assert f"{expected:,} parameters" in said and "1 of 3 weights" in said
    with ckptool.open(path) as checkpoint:
        (weight,) = quantization(checkpoint).weights
    assert sorted(weight.shape or ())[-1] == K
    assert name == "MXFP4, gpt-oss" or weight.shape in ((OUT, K), (2, OUT // 2, K)), weight.shape


@pytest.mark.parametrize("name", EVERY)
def test_a_lost_part_is_named_and_nothing_is_computed(name: str, tmp_path: Path) -> None:
    """Half a quantized weight is not a plain one: neither the code nor the scale that is left is cast or averaged."""
    optional = ("weight_format", "g_idx", "zero_point", "input", "k_scale", "input_scale", "output_scale")
    plain = ("s", "zero", "centroids", "codebooks", "SU", "SV", "Wscale", "wscales", "table", "w_scale", "qs")
    plain += ("weight.scale_inv_0", "weights_scaling", "weight._scale_of_rows")
    for number, lost in enumerate(end for end in EVERY[name] if not end.endswith(optional)):
        left = {end: value for end, value in EVERY[name].items() if end != lost}
        path = write(tmp_path / str(number), name, "folder", parts=left, method={"quant_method": "fp8"})
        if say("cast", path, "--to-dtype", "float64", "-o", tmp_path / f"out{number}").code == 0:
            result = load(tmp_path / f"out{number}")
            whole = {end: value.dtype for end, value in left.items() if not end.startswith(plain)}
            assert whole == {end: result[f"{M}.{end}"].dtype for end in whole}, lost


@pytest.mark.parametrize("name", [name for name, parts in LAYOUTS.items() if len(parts) > 1])
def test_merge_takes_a_weight_whole_or_not_at_all(name: str, tmp_path: Path) -> None:
    parts, path, out = LAYOUTS[name], write(tmp_path / "in", name), tmp_path / "out.safetensors"
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


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("module", ["model.embed_tokens", "lm_head"])
def test_rows_of_tokens_are_not_added_to_codes(name: str, module: str, tmp_path: Path) -> None:
    parts = LAYOUTS[name]
    plain = {key: value for key, value in PLAIN.items() if not key.startswith(module)}
    if not any(end.startswith(("weight", "q", "W_q", "_weight")) for end in parts):
        pytest.skip("names of experts")
    path, out = write(tmp_path / "in", name, module=module, plain=plain), tmp_path / "out.safetensors"
    said = say("resize", path, "--vocab", "64", "-o", out)
    assert said.code == 4 and "quantized" in said.all and not out.exists(), said.all
    path = write(tmp_path / "plain", name)
    assert say("resize", path, "--vocab", "16", "-o", out).code == 0
    result = load(out)
    assert result["lm_head.weight"].shape == (16, K)
    assert all(bits(result[f"{M}.{end}"]) == bits(value) for end, value in parts.items())


RECIPE = """
[[rule]]
a = "model.layers.{{L}}.mlp.down_proj.{end} : {axes}"
b = "blocks.{{L}}.down.{end} : {turned}"
"""


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_recipe_does_not_rearrange_or_part_the_tensors(name: str, tmp_path: Path) -> None:
    path, out = write(tmp_path / "in", name, plain={}), tmp_path / "out.safetensors"
    end, code = next(iter(LAYOUTS[name].items()))
    axes = "xyzuvw"[: code.dim()]
    turned = axes[1] + axes[0] + axes[2:]
    for shape, part in ((turned, "turned"), (axes, "renamed alone")):
        recipe = tmp_path / f"{part}.toml"
        recipe.write_text(f'rest = "keep"\n{RECIPE}'.format(end=end, axes=", ".join(axes), turned=", ".join(shape)))
        said = say("convert", path, "--recipe", recipe, "-o", out)
        assert said.code and not out.exists() and "quantized" in said.all, said.all
    renamed = say("rename", path, "--rename", "model.layers.*=blocks.*", "-o", out)
    assert renamed.code == 0
    with ckptool.open(out) as checkpoint:
        assert [weight.format for weight in quantization(checkpoint).weights] or name.startswith("torchao")


def test_plain_names_are_no_scales(tmp_path: Path) -> None:
    """A number is a code only beside its partner."""
    vectors = ("a.scale", "a.scales", "norm.weight_scale", "norm.zero", "c.bias", "attn.input_scale")
    state = {**PLAIN, "a.weight": floats(4, 4), **{name: floats(4) for name in vectors}, "c.weight": codes(4, 4)}
    state |= {"b.weight": floats(4, 4).to(torch.float8_e4m3fn), "ids": torch.arange(4, dtype=torch.int32)}
    others = ("attn.W_q", "attn.W_k", "emb", "emb.absmax", "attn.absmax", "t", "t_scale_inv")
    state |= {name: floats(4, 4) for name in (*others, "vq.codes", "vq.codebooks")}
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
    qdata, scale = int8(OUT, K), floats(OUT, 1)
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
    plain = tmp_path / "plain.safetensors"
    assert say("dequantize", path, "-o", plain).code == 0
    assert torch.equal(load_file(plain)["tied"], (qdata.float() * scale).bfloat16())
    assert say("average", path, path, "-o", tmp_path / "a.pth").code == 4
    assert say("lora", "merge", path, path, "-o", tmp_path / "a.pth").code in (1, 3, 4)


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


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bitsandbytes nf4, plain", {"weight.absmax": floats(7)}),
        ("bitsandbytes nf4, plain", {"weight.quant_state.bitsandbytes__nf4": text({})}),
        ("bitsandbytes int8", {"SCB": floats(3)}),
        ("GPTQ 4 bit", {"qzeros": int32(9, 9)}),
        ("AWQ 4 bit", {"qzeros": int32(9, 9)}),
        ("compressed-tensors int4", {"weight_shape": torch.tensor([OUT, 3 * K])}),
        ("compressed-tensors MXFP4", {"weight_scale": codes(3, 3)}),
        ("FP8 with 30x30 block scales", {"weight_scale_inv": floats(7, 5)}),
    ],
)
def test_shapes_that_do_not_fit_are_a_problem(name: str, change: Tensors, tmp_path: Path) -> None:
    path = write(tmp_path / "in", name, "folder", parts=LAYOUTS[name] | change)
    with ckptool.open(path) as checkpoint:
        (weight,) = quantization(checkpoint).weights
    assert ("cannot be read" if "quant_state" in next(iter(change)) else "does not fit") in weight.problem
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
