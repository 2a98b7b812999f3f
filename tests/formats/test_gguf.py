"""GGUF: the gguf package writes the files and is the oracle for what is in them; transformers is one for the names."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from conftest import FIXTURES, ROOT
from gguf_files import ARRAY, STRING, entry, made, tensor, text, written
from safetensors.torch import load_file
from saving.test_headers_in_place import KILLER

import ckptool
from ckptool.base.dtypes import BLOCKS
from ckptool.base.errors import CkptoolError, MalformedError, RefusedError, TargetError
from ckptool.formats.gguf import header

gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")

TYPES = list(gguf.GGMLQuantizationType)
PLAIN = {"F32": "float32", "F16": "float16", "F64": "float64", "BF16": "bfloat16"}
PLAIN |= {f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}


def blocks(kind: Any, rows: int, columns: int, seed: int = 0) -> Any:
    """Random bytes of a type, with scales that are finite."""
    chance = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = chance.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
    if kind.name == "F32":
        return chance.standard_normal((rows, columns), dtype=np.float32).view(np.uint8)
    return data & 0x3F if kind.name in ("F16", "BF16", "F64") else data


# -- reading: what GGUFReader reads


def test_the_table_of_types_is_that_of_the_package() -> None:
    sizes = {dtype.name: (dtype.packed, dtype.itemsize) for dtype in BLOCKS}
    assert sizes == {kind.name: gguf.GGML_QUANT_SIZES[kind] for kind in TYPES if kind.name not in PLAIN}
    assert {number: dtype.name for number, dtype in header.TENSOR_TYPES.items()} == {
        kind.value: PLAIN.get(kind.name, kind.name) for kind in TYPES
    }


@pytest.mark.parametrize("order", ["LITTLE", "BIG"])
@pytest.mark.parametrize("alignment", [8, 32, 128, 4096])
def test_tensors_of_every_type_are_where_the_reader_finds_them(alignment: int, order: str, tmp_path: Path) -> None:
    tensors = {f"{kind.name}.{n}": (blocks(kind, n + 1, 256, n), kind) for n, kind in enumerate(TYPES)}
    if order == "BIG":  # the writer swaps arrays of numbers
        tensors = {name: pair for name, pair in tensors.items() if pair[1].name not in PLAIN}
    how = {"custom_alignment": alignment, "block_count": 1}
    path = written(tmp_path / "all.gguf", tensors, how, endianess=gguf.GGUFEndian[order])
    reader = gguf.GGUFReader(path)
    with ckptool.open(path) as checkpoint:
        assert ckptool.validate(path)["valid"]
        found = {each.key: each for each in checkpoint.survey.tensors}
        assert [*found] == [each.name for each in reader.tensors]
        for each in reader.tensors:
            own = found[each.name].tensor
            assert own.dtype == PLAIN.get(each.tensor_type.name, each.tensor_type.name)
            assert own.shape == tuple(reversed(each.shape.tolist()))
            body = checkpoint.body(own.storage)
            assert body is not None
            assert (body.piece.offset, body.size) == (each.data_offset, each.n_bytes)  # type: ignore[union-attr]


VALUES: dict[str, tuple[str, Any]] = {
    **{f"a.{kind}.{n}": (kind, n) for kind in ("uint8", "uint16", "uint32", "uint64") for n in (0, 7, 255)},
    **{f"a.{kind}.{n}": (kind, n) for kind in ("int8", "int16", "int32", "int64") for n in (-128, -1, 0, 127)},
    **{f"a.float32.{n}": ("float32", n) for n in (0.0, 1e-5, -0.1, 3e38, 500000.0)},
    **{f"a.float64.{n}": ("float64", n) for n in (1e-300, 0.1)},
    "a.bool": ("bool", True),
    "a.text": ("string", "h\u00e9llo \u202e\x1b[31m"),
    "a.numbers": ("array", [1, 2, 3]),
    "a.floats": ("array", [0.5, -0.1]),
    "a.flags": ("array", [True, False]),
    "a.texts": ("array", ["a", "", "\u4e2d"]),
    "a.nested": ("array", [[1, 2], [3, 4, 5]]),
    "a.many": ("array", [f"token {n}" for n in range(3000)]),
    "a.long": ("array", ["x" * n for n in range(1200)]),
    "a.scores": ("array", [n / 8 for n in range(2000)]),
}


@pytest.mark.parametrize("order", ["LITTLE", "BIG"])
def test_values_of_every_type_are_read(order: str, tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian[order])
    for name, (kind, value) in VALUES.items():
        getattr(writer, f"add_{kind}")(name, value)
    writer.add_tensor("t", np.arange(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name, (kind, value) in VALUES.items():
        found = ckptool.get(path, name)
        if kind == "float32":
            assert np.float32(found) == np.float32(value) and len(repr(found)) <= len(repr(value)) + 1
        elif name == "a.floats":
            assert [*map(np.float32, found)] == [*map(np.float32, value)]
        else:
            assert found == value and type(found) is type(value), name


def test_inspect_describes_the_model_in_one_line(tmp_path: Path) -> None:
    how = {"context_length": 4096, "tokenizer_model": "gpt2", "token_list": [f"t{n}" for n in range(3000)]}
    path = written(tmp_path / "m.gguf", {"t": np.zeros(4, np.float32)}, {**how, "size_label": "7B"})
    line = "llama, size 7B, context 4,096, tokenizer gpt2, vocabulary 3,000"
    assert ckptool.inspect(path)["model"] == line and line in say("inspect", path).out


def test_arrays_are_decoded_within_bounds(tmp_path: Path) -> None:
    short, path = struct.pack("<IQ", 0, 1000) + bytes(1000), tmp_path / "short.gguf"
    path.write_bytes(made([entry(f"a{n}", ARRAY, short) for n in range(300)]))
    with ckptool.open(path) as checkpoint:
        assert len(checkpoint.graph.nodes) < 250_000
        assert ckptool.get(checkpoint, "a0") == ckptool.get(checkpoint, "a299") == [0] * 1000
    path.write_bytes(made([entry("a", ARRAY, struct.pack("<IQ", 0, 64 << 20) + bytes(64 << 20))]))
    with pytest.raises(MalformedError, match="33,554,432 are read at most"):
        ckptool.get(path, "a")
    assert not ckptool.inspect(path)["tensors"]


def test_a_change_in_a_long_array_is_seen(tmp_path: Path) -> None:
    tokens = [f"t{n}" for n in range(2000)]
    one, two = (
        written(tmp_path / f"{last}.gguf", {"t": np.zeros(4, np.float32)}, {"token_list": [*tokens, last]})
        for last in "ab"
    )
    assert ckptool.diff(one, one)["same"]
    assert not ckptool.diff(one, two)["same"]
    assert "tokenizer.ggml.tokens" in say("diff", one, two).out


def test_the_files_of_a_split_are_one_checkpoint(tmp_path: Path) -> None:
    tensors = {f"blk.{n}.attn_norm.weight": np.full(8, n, np.float32) for n in range(5)}
    written(tmp_path / "m.gguf", tensors, {"block_count": 5}, split_max_tensors=2)
    first, second = (tmp_path / f"m-0000{n}-of-00003.gguf" for n in (1, 2))
    with ckptool.open(first) as checkpoint:
        assert [each.key for each in checkpoint.survey.tensors] == [*tensors]
        assert ckptool.get(checkpoint, "blk.4.attn_norm.weight").tolist() == [4.0] * 8
    assert ckptool.get(first, "general.architecture") == "llama"
    assert "file 2 of the 3" in say("inspect", second).out
    ckptool.save(ckptool.convert(first, "safetensors"), tmp_path / "m.safetensors")
    assert len(load_file(tmp_path / "m.safetensors")) == 5
    second.unlink()
    assert not ckptool.validate(first)["valid"]
    with pytest.raises(MalformedError, match=r"m-00002-of-00003\.gguf"):
        ckptool.save(ckptool.convert(first, "safetensors"), tmp_path / "n.safetensors")


# -- hostile and damaged files


def nested(depth: int) -> bytes:
    return b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(depth)) + struct.pack("<IQ", 4, 0)


BROKEN: dict[str, tuple[bytes, str]] = {
    "version 1": (made(version=1), "version 1"),
    "version 4": (made(version=4), "version 4"),
    "nothing behind the magic": (b"GGUF", "version 0"),
    "counts that the file has not": (made(counts=(2**63, 2**63)), "declares"),
    "a key of 2**62 bytes": (made([struct.pack("<Q", 2**62)]), "65,535 are the most"),
    "a text of 2**63 bytes": (made([entry("a", STRING, struct.pack("<Q", 2**63))]), "are the most"),
    "an array of 2**62 numbers": (made([entry("a", ARRAY, struct.pack("<IQ", 4, 2**62))]), "declares"),
    "an array of 2**62 texts": (made([entry("a", ARRAY, struct.pack("<IQ", STRING, 2**62))]), "declares"),
    "a million tensors": (made(counts=(1_000_000, 0), data=bytes(64)), "200,000 are the most"),
    "a million arrays": (made([entry("a", ARRAY, struct.pack("<IQ", ARRAY, 10**6) + bytes(10**8))]), "200,000 arrays"),
    "an array of unknown type": (made([entry("a", ARRAY, struct.pack("<IQ", 77, 1))]), "type 77 is unknown"),
    "a value of unknown type": (made([entry("a", 77, b"")]), "unknown type 77"),
    "arrays nested 100 deep": (made([entry("a", ARRAY, nested(100))]), "8 deep"),
    "an entry twice": (made([entry("a", 4, bytes(4))] * 2), "'a' is in it twice"),
    "a tensor twice": (made([], [tensor("t", (4,)), tensor("t", (4,), offset=32)], bytes(64)), "'t' is in it twice"),
    "an entry and a tensor": (made([entry("t", 4, bytes(4))], [tensor("t", (4,))], bytes(16)), "are called 't'"),
    "an alignment of 0": (made([entry("general.alignment", 4, bytes(4))]), "not a power of two"),
    "an alignment of 48": (made([entry("general.alignment", 4, struct.pack("<I", 48))]), "not a power of two"),
    "an alignment of a byte": (made([entry("general.alignment", 0, b"\x20")]), "of the type uint32"),
    "an empty tensor of 2**63 rows": (made([], [tensor("t", (2**63, 0))], b""), "larger than any"),
    "a removed type": (made([], [tensor("t", (4,), 4)], bytes(16)), "of type 4"),
    "a tensor of 2**80 elements": (made([], [tensor("t", (2**40, 2**40))], b""), "larger than any"),
    "an offset of 2**63": (made([], [tensor("t", (4,), offset=2**63)], bytes(16)), "larger than any"),
    "an offset behind the end": (made([], [tensor("t", (4,), offset=4096)], bytes(16)), "it is cut"),
    "a cut tensor": (made([], [tensor("t", (4,)), tensor("u", (400,), offset=32)], bytes(40)), "1 of 2 tensors"),
    "2**31 dimensions": (made([], [text("t") + struct.pack("<I", 2**31)]), "dimensions"),
    "rows that are no blocks": (made([], [tensor("t", (4, 48), 8)], bytes(400)), "blocks of 32"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_breaks_a_rule_is_refused_with_it(name: str, tmp_path: Path) -> None:
    data, rule = BROKEN[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    start = time.process_time()
    with pytest.raises(MalformedError) as caught:
        ckptool.open(path)
    assert rule in caught.value.what
    assert caught.value.path == str(path)
    assert time.process_time() - start < 1


NOTED: dict[str, tuple[bytes, str]] = {
    "an overlap": (made([], [tensor("t", (40,)), tensor("u", (4,), offset=32)], bytes(160)), "begins within tensor"),
    "no multiple of the alignment": (made([], [tensor("t", (4,), offset=4)], bytes(32)), "not at a multiple of 32"),
    "a gap": (made([], [tensor("t", (4,)), tensor("u", (4,), offset=64)], bytes(96)), "expects it at 32"),
    "five dimensions": (made([], [tensor("t", (1, 1, 1, 1, 4))], bytes(16)), "5 dimensions"),
    "a name of 64 bytes": (made([], [tensor("t" * 64, (4,))], bytes(16)), "more than 63 bytes"),
    "bytes behind the last tensor": (made([], [tensor("t", (4,))], bytes(4096)), "follow the last tensor"),
}


@pytest.mark.parametrize("name", NOTED)
def test_what_llama_cpp_refuses_is_noted(name: str, tmp_path: Path) -> None:
    data, message = NOTED[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    findings = ckptool.inspect(path)["findings"]
    assert any(message in each["message"] for each in findings if each["code"] == "gguf-layout")
    assert ckptool.validate(path)["valid"] is (name == "bytes behind the last tensor")


def test_every_cut_is_an_error_of_ours(tmp_path: Path) -> None:
    whole = (FIXTURES / "real" / "tiny.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CkptoolError):
            ckptool.open(path)


@pytest.mark.parametrize(
    ("template", "verdict"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "weights-only"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unknown"),
    ],
)
def test_a_chat_template_is_judged_as_one(template: str, verdict: str, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", {"t": np.zeros(4, np.float32)}, {"chat_template": template})
    assert ckptool.scan(path)["verdict"] == verdict, say("scan", path).all


# -- converting: what gguf.dequantize computes, under the names that transformers reads


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_values_are_those_of_the_package_bit_for_bit(kind: Any, tmp_path: Path) -> None:
    data = blocks(kind, 300, 1024)
    path, out = tmp_path / "m.gguf", tmp_path / "m.safetensors"
    array = data.view(np.dtype(PLAIN[kind.name].replace("bfloat", "uint"))) if kind.name in PLAIN else data
    written(path, {"t.weight": array if kind.name in PLAIN and kind.name != "BF16" else (data, kind)}, arch="other")
    if kind.name in ("Q8_1", "Q8_K", "Q1_0"):
        with pytest.raises(RefusedError, match=f"package does not dequantize {kind.name}"):
            ckptool.convert(path, "safetensors")
        return
    ckptool.save(ckptool.convert(path, "safetensors"), out)
    found = load_file(out)["t.weight"]
    assert found.shape == (300, 1024)
    if kind.name in PLAIN:
        assert str(found.dtype) == f"torch.{PLAIN[kind.name]}"
        assert found.view(torch.uint8).numpy().tobytes() == data.tobytes()
    else:
        assert found.numpy().tobytes() == gguf.dequantize(data, kind).tobytes()


#: The architectures of names.toml, by the package.
ARCHES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gemma": "GEMMA", "gemma2": "GEMMA2", "phi3": "PHI3"}


@pytest.mark.parametrize("arch", ARCHES)
def test_the_names_are_those_of_the_package(arch: str) -> None:
    """Each tensor of an architecture gets a name of Hugging Face that the package maps back to it."""
    from ckptool.formats.gguf.names import KNOWN, originals

    assert {*KNOWN} == {*ARCHES}
    kind = gguf.MODEL_ARCH[ARCHES[arch]]
    names = gguf.get_tensor_name_map(kind, 3)
    left = "rope_freqs attn_rot_embd rope_factors_long rope_factors_short attn_qkv ffn_gate ffn_sub_norm attn_sub_norm"
    skipped = {*left.split()} - ({"attn_qkv"} if arch == "phi3" else {"ffn_gate"})
    for number in gguf.MODEL_TENSORS[kind]:
        name = gguf.TENSOR_NAMES[number].format(bid=1, xid=2)
        if name.split(".")[-1] in skipped | {"ffn_gate_up_exps", "ffn_norm_exps"}:
            continue
        values = {"general.architecture": arch, "llama.attention.head_count": 2}
        found = originals(values, {f"{name}.weight": (4, 4)})[f"{name}.weight"]
        for before in found:
            mapped = names.get_name(before.name.removesuffix(".weight"))
            if ".experts." in before.name:  # the package knows the stack of experts only
                assert before.name.startswith("model.layers.1.block_sparse_moe.experts.")
            else:
                assert mapped == name, before


def llama(experts: int = 0) -> dict[str, Any]:
    """A model as transformers names it: two layers, 8 heads, 4 for keys and values."""
    chance = np.random.default_rng(1)
    shapes = {"model.embed_tokens": (64, 256), "model.norm": (256,), "lm_head": (64, 256)}
    for layer in range(2):
        for name, shape in (
            *(("input_layernorm", (256,)), ("post_attention_layernorm", (256,)), ("self_attn.q_proj", (256, 256))),
            *(("self_attn.k_proj", (128, 256)), ("self_attn.v_proj", (128, 256)), ("self_attn.o_proj", (256, 256))),
        ):
            shapes[f"model.layers.{layer}.{name}"] = shape
        for expert in range(experts):
            for name, shape in (("w1", (512, 256)), ("w2", (256, 512)), ("w3", (512, 256))):
                shapes[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"] = shape
        if experts:
            shapes[f"model.layers.{layer}.block_sparse_moe.gate"] = (experts, 256)
        for name, shape in (("gate", (512, 256)), ("up", (512, 256)), ("down", (256, 512))) if not experts else ():
            shapes[f"model.layers.{layer}.mlp.{name}_proj"] = shape
    return {f"{name}.weight": chance.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def permuted(weights: Any, heads: int) -> Any:
    """convert_hf_to_gguf.py of llama.cpp: LlamaModel.permute."""
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


HOW = {
    **{"context_length": 128, "embedding_length": 256, "block_count": 2, "head_count": 8, "head_count_kv": 4},
    **{"layer_norm_rms_eps": 1e-6, "feed_forward_length": 512, "vocab_size": 64, "rope_freq_base": 10000.0},
    **{"tokenizer_model": "gpt2", "token_list": [f"t{n}" for n in range(64)], "name": "tiny"},
}


def converted(state: dict[str, Any], kind: Any) -> dict[str, Any]:
    """What convert_hf_to_gguf.py makes of a model of the architecture llama."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    tensors: dict[str, Any] = {}
    stacks: dict[str, list[Any]] = {}
    for name, values in state.items():
        if ".experts." in name:
            layer, _, part = name.removeprefix("model.layers.").partition(".block_sparse_moe.experts.")
            new = {"w1": "gate", "w2": "down", "w3": "up"}[part.split(".")[1]]
            stacks.setdefault(f"blk.{layer}.ffn_{new}_exps.weight", []).append(values)
            continue
        values = permuted(values, 8) if "q_proj" in name else permuted(values, 4) if "k_proj" in name else values
        tensors[names.get_name(name.removesuffix(".weight")) + ".weight"] = values
    tensors |= {name: np.stack(values) for name, values in stacks.items()}
    return {
        name: values if values.ndim == 1 else (gguf.quantize(values, kind), kind) for name, values in tensors.items()
    }


@pytest.mark.parametrize("experts", [0, 3])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_a_model_gets_its_names_and_the_order_of_its_rows_back(kind: str, experts: int, tmp_path: Path) -> None:
    state, number = llama(experts), gguf.GGMLQuantizationType[kind]
    path, out = written(tmp_path / "m.gguf", converted(state, number), HOW), tmp_path / "m.safetensors"
    said = say("convert", path, "-o", out)
    assert said.code == 0 and "names of GGUF kept" not in said.out, said.all
    found = load_file(out)
    assert found.keys() == state.keys()
    for name, values in state.items():
        wanted = values if values.ndim == 1 else gguf.dequantize(gguf.quantize(values, number), number)
        assert found[name].float().numpy().tobytes() == wanted.astype(np.float32).tobytes(), name


def test_transformers_reads_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reading = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    path = written(tmp_path / "m.gguf", converted(llama(), gguf.GGMLQuantizationType.Q8_0), HOW)
    out = tmp_path / "m.safetensors"
    ckptool.save(ckptool.convert(path, "safetensors"), out)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    theirs = reading.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    ours = load_file(out)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_the_converter_of_gemma_added_is_subtracted(tmp_path: Path) -> None:
    norm = np.random.default_rng(0).standard_normal(8, np.float32)
    tensors = {"blk.0.attn_norm.weight": norm + 1, "token_embd.weight": np.zeros((2, 8), np.float32)}
    path = written(tmp_path / "m.gguf", tensors, arch="gemma")
    ckptool.save(ckptool.convert(path, "safetensors"), tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")["model.layers.0.input_layernorm.weight"]
    assert found.numpy().tobytes() == (norm + 1 - 1).astype(np.float32).tobytes()


def test_names_that_no_table_has_are_kept_and_said(tmp_path: Path) -> None:
    tensors = {"enc.blk.0.x.weight": np.zeros((2, 32), np.float32), "rope_freqs.weight": np.ones(4, np.float32)}
    path = written(tmp_path / "m.gguf", tensors, arch="t5")
    said = say("convert", path, "-o", tmp_path / "m.safetensors")
    assert "names of GGUF kept, because no table has them: enc.blk.0.x.weight and rope_freqs.weight" in said.out
    assert load_file(tmp_path / "m.safetensors").keys() == {*tensors}


def test_heads_that_the_header_lacks_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", {"blk.0.attn_q.weight": np.zeros((8, 32), np.float32)})
    with pytest.raises(MalformedError, match=r"llama.attention.head_count is missing"):
        ckptool.convert(path, "safetensors")


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    path = written(tmp_path / "m.gguf", {"t.weight": (blocks(kind, 2, 32), kind)}, arch="other")
    plain = written(tmp_path / "p.gguf", {"t.weight": np.zeros((2, 32), np.float32)}, arch="other")
    monkeypatch.setitem(sys.modules, "gguf", None)
    said = say("convert", path, "-o", tmp_path / "m.safetensors")
    assert said.code and "pip install 'ckptool[gguf]'" in said.err
    assert not (tmp_path / "m.safetensors").exists()
    assert say("convert", plain, "-o", tmp_path / "p.safetensors").code == 0


def test_big_endian_blocks_are_refused(tmp_path: Path) -> None:
    said = say("convert", FIXTURES / "real" / "big_endian.gguf", "-o", tmp_path / "m.safetensors")
    assert said.code and "big-endian" in said.err


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
@pytest.mark.parametrize("line", ["cast --to-dtype bf16", "average IN"])
def test_what_needs_plain_values_names_convert(line: str, suffix: str, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", converted(llama(), gguf.GGMLQuantizationType.Q8_0), HOW)
    name, *more = line.replace("IN", str(path)).split()
    said = say(name, path, *more, "-o", tmp_path / f"o.{suffix}")
    assert said.code and f"ckptool convert {path} -o {tmp_path / 'm.plain.safetensors'}" in said.err, said.all
    assert [each.name for each in tmp_path.iterdir()] == ["m.gguf"]


# -- editing: metadata and names, with all else as it was


def fields(path: Path) -> tuple[dict[str, bytes], dict[str, tuple[Any, ...]]]:
    """What the reader of the package finds: the bytes of each entry, and each tensor with its bytes."""
    reader = gguf.GGUFReader(path)
    entries = {
        name: b"".join(part.tobytes() for part in field.parts[1:])
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    tensors = {each.name: (each.tensor_type, each.shape.tolist(), each.data.tobytes()) for each in reader.tensors}
    return entries, tensors


@pytest.mark.parametrize("order", ["LITTLE", "BIG"])
@pytest.mark.parametrize("alignment", [32, 256])
def test_an_edit_changes_what_it_names_and_nothing_else(alignment: int, order: str, tmp_path: Path) -> None:
    path, out, back = (tmp_path / f"{name}.gguf" for name in ("m", "out", "back"))
    how = {**HOW, "custom_alignment": alignment, "array": ("a.nested", [[1, 2], [3]]), "chat_template": "{{ x }}"}
    how["token_list"] = [f"t{n}" for n in range(2000)]
    written(path, converted(llama(), gguf.GGMLQuantizationType.Q4_0), how, endianess=gguf.GGUFEndian[order])
    before = fields(path)
    with ckptool.open(path) as checkpoint:
        edited = ckptool.set(checkpoint, "general.name", "another, and longer" * 9)
        edited = ckptool.set(edited, "llama.context_length", 1 << 20)
        edited = ckptool.set(edited, "llama.rope.freq_base", 5e5)
        edited = ckptool.set(edited, "general.new", "text")
        edited = ckptool.set(edited, "llama.attention.layer_norm_rms_epsilon", float("nan"))
        edited = ckptool.drop(edited, ["tokenizer.chat_template", "blk.1.attn_q.weight"])
        edited = ckptool.rename(edited, {"output.weight": "head.weight"})
        ckptool.save(edited, out)
    entries, tensors = fields(out)
    assert ckptool.validate(out)["valid"]
    wanted = {name: value for name, value in before[0].items() if name != "tokenizer.chat_template"}
    edits = {"general.name", "llama.context_length", "llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon"}
    assert entries.keys() == wanted.keys() | {"general.new"}
    assert {name for name, value in wanted.items() if entries[name] != value} == edits
    assert gguf.GGUFReader(out).fields["llama.rope.freq_base"].contents() == 5e5
    names = {name: "head.weight" if name == "output.weight" else name for name in before[1]}
    del names["blk.1.attn_q.weight"]
    assert tensors == {new: before[1][old] for old, new in names.items()}
    # The reverse of an edit gives the same bytes.
    one = ckptool.set(path, "general.name", "other")
    ckptool.save(one, out, force=True)
    ckptool.save(ckptool.set(out, "general.name", "tiny"), back)
    assert back.read_bytes() == path.read_bytes() != out.read_bytes()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("llama.context_length", "long", "of the type uint32"),
        ("llama.context_length", -1, "of the type uint32"),
        ("llama.context_length", 1 << 32, "of the type uint32"),
        ("llama.rope.freq_base", 0.1234567891, "of the type float32"),
        ("general.name", 7, "of the type string"),
        ("general.alignment", 64, "where the tensors are"),
        ("general.new", None, "texts, numbers, bools"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: Any, words: str, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", {"t": np.zeros(4, np.float32)}, HOW)
    with pytest.raises(RefusedError, match=words):
        ckptool.save(ckptool.set(path, name, value), tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
    with pytest.raises(TargetError, match="no mapping can hold"):
        ckptool.set(path, "tokenizer.ggml.tokens[0]", 5)


def test_a_device_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", {"t": np.zeros(4, np.float32)}, HOW)
    with pytest.raises(RefusedError, match="no place for devices"):
        ckptool.save(ckptool.remap(path, {"cpu": "cuda:0"}), tmp_path / "out.gguf")


def test_an_edit_in_place_is_taken_back(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", converted(llama(), gguf.GGMLQuantizationType.Q4_0), HOW)
    whole, before = path.read_bytes(), fields(path)
    for line, changed in (
        (["edit", path, "--set", "llama.context_length=4096", "--in-place"], "llama.context_length"),
        (["edit", path, "--set", "general.name=tony", "--in-place"], "general.name"),
        (["edit", path, "--set", "general.name=" + "n" * 999, "--in-place", "--force"], "general.name"),
        (["edit", path, "--drop", "general.name", "--in-place", "--force"], "general.name"),
    ):
        assert say(*line).code == 0
        entries, tensors = fields(path)
        assert tensors == before[1]
        assert {name for name, value in before[0].items() if entries.get(name) != value} == {changed}
        assert ckptool.undo(path)["left"] == 0 and path.read_bytes() == whole
    assert "shorter than the old one" in say("drop", path, "llama.rope.freq_base", "--in-place").err
    assert say("edit", path, "--drop", "output.weight", "--in-place").code == 4
    assert path.read_bytes() == whole


def test_killed_at_every_call_of_an_edit_in_place(tmp_path: Path) -> None:
    """The file has its old header or its new one, or ``undo`` gives the old one back."""
    path, states = tmp_path / "model" / "m.gguf", tmp_path / "states"
    path.parent.mkdir()
    states.mkdir()
    how = {"uint32": ("epoch", 3), "token_list": [f"token {n}" for n in range(2000)]}
    written(path, {"m.weight": np.arange(8, dtype=np.float32), "m.bias": np.ones(4, np.float32)}, how)
    whole = path.read_bytes()
    command = [sys.executable, "-c", KILLER, *map(str, (path.parent, path.name, states, False, False, 2))]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    seen = []
    for state in sorted(states.iterdir()):
        file = state / path.name
        try:
            values = ckptool.get(file, "epoch"), *ckptool.open(file).survey.tensors
            seen.append((values[0], values[1].key))
        except CkptoolError as error:
            assert error.next == f"ckptool undo {file}"
            seen.append((0, ""))
        ckptool.undo(file)
        assert file.read_bytes() == whole
    assert {*seen} == {(3, "m.weight"), (4, "weight"), (0, "")}


def test_private_texts_of_the_metadata_are_redacted(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", {"t": np.zeros(4, np.float32)}, {"name": "/home/jdoe/models/tiny"})
    ckptool.save(ckptool.redact(path), tmp_path / "out.gguf")
    assert b"jdoe" not in (tmp_path / "out.gguf").read_bytes()
    assert fields(path)[1] == fields(tmp_path / "out.gguf")[1]
