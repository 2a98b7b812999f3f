"""lora merge against PEFT's formulas, its own results, and PEFT itself where it is installed."""

from __future__ import annotations

import itertools
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from conftest import ROOT
from lora_adapters import factors, write_adapter
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.base.errors import RefusedError, TargetError
from ckptool.values.torch.loads import float32_product, one_thread

#: Adapters made by PEFT, with its own results; see their README.
KINDS = Path(os.environ.get("CKPTOOL_ADAPTERS", ROOT.parent / "shared" / "adapters"))
#: Kinds without a merge, and words of the refusal. PEFT refuses half of them, too. It merges ``bad-half-pair`` with the
#: values that the initialization left, ``bad-nan`` into NaN, and PiSSA after a change of the base.
REFUSED = {
    "bad-half-pair": "no partner lora_B",
    "bad-nan": "NaN or infinity",
    "bad-vocab": "34 tokens",
    "bad-zero3": "empty",
    "layer-replication": "repeats layers",
    "pissa": "PEFT changes the base",
    "prompt-tuning": "has no merge",
}
#: Kinds whose result PEFT computed in another way than by default.
OTHERWISE = {"linear-bf16-safe"}
EVERY = sorted(path.name for path in KINDS.iterdir() if path.is_dir()) if KINDS.is_dir() else []
LAYER = "model.layers.0.mlp.up_proj"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(item.contiguous().view(-1).view(torch.uint8) for item in (one, other)))


def assert_same(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert result.keys() == expected.keys()
    assert [key for key in expected if not is_same(result[key], expected[key])] == []


def merged(base: Path, *adapters: Path, out: Path, **how: Any) -> dict[str, torch.Tensor]:
    opened = [ckptool.open(adapter) for adapter in adapters]
    with ckptool.open(base) as checkpoint:
        ckptool.save(ckptool.merge_lora(checkpoint, *opened, **how), out)
    for adapter in opened:
        adapter.close()
    if out.is_dir():
        return {key: item for file in out.glob("*.safetensors") for key, item in load_file(file).items()}
    return load_file(out) if out.suffix == ".safetensors" else torch.load(out)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder of Hugging Face with a tiny language model in bfloat16, more than a block of rows high."""
    folder = tmp_path / "base"
    folder.mkdir()
    torch.manual_seed(5)
    tensors = {
        EMBEDDING: torch.randn(32, 8),
        f"{LAYER}.weight": torch.randn(150, 8),
        f"{LAYER}.bias": torch.randn(150),
        "model.norm.weight": torch.randn(8),
        HEAD: torch.randn(32, 8),
    }
    save_file({key: item.bfloat16() for key, item in tensors.items()}, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "vocab_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def weights_of(base: Path) -> dict[str, torch.Tensor]:
    return load_file(base / "model.safetensors")


def tied(base: Path) -> Path:
    """Let a base tie its head to the embedding."""
    tensors = weights_of(base)
    del tensors[HEAD]
    save_file(tensors, base / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return base


def delta(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    a, b = (tensors[f"base_model.model.{module}.lora_{which}.weight"] for which in "AB")
    return b @ a


# -- PEFT's own results


@pytest.mark.parametrize("kind", EVERY or [pytest.param("", marks=pytest.mark.skip(reason="the folder is not here"))])
def test_the_result_has_the_bytes_of_peft(kind: str, tmp_path: Path) -> None:
    folder, out = KINDS / kind, tmp_path / "out"
    if kind in REFUSED:
        with pytest.raises(RefusedError, match=REFUSED[kind]):
            merged(folder / "base", folder / "adapter", out=out)
        return
    result = merged(folder / "base", folder / "adapter", out=out)
    expected = load_file(folder / "merged" / "model.safetensors")
    if kind in OTHERWISE:
        assert result.keys() == expected.keys() and any(not is_same(result[key], expected[key]) for key in result)
    elif kind == "boft":  # the order of sums depends on the CPU
        assert result.keys() == expected.keys()
        for key in result:
            torch.testing.assert_close(result[key], expected[key])
    elif kind == "conv2d":  # its linear layers are so small that the bits of torch depend on the CPU
        assert is_same(result["c3.weight"], expected["c3.weight"])
    else:
        assert_same(result, expected)
        names = "config.json" if (folder / "base" / "config.json").exists() else ""
        here, there = ((place / names).read_text() if names else "" for place in (out, folder / "merged"))
        tie = [json.loads(text or "{}").get("tie_word_embeddings") for text in (here, there)]
        assert tie[0] == tie[1]


def _llama(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 96, "intermediate_size": 131, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=150, num_key_value_heads=2, **more)
    return transformers.LlamaForCausalLM(config).to(dtype)


def _gpt2(dtype: torch.dtype = torch.float32) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=96, n_layer=1, n_head=4, vocab_size=150, n_positions=16)
    return transformers.GPT2LMHeadModel(config).to(dtype)


ALL = {"target_modules": "all-linear"}
SOME = {"target_modules": ["q_proj", "embed_tokens"]}
CONV1D = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
PEFT_CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "bfloat16": (_llama, ALL),
    "float32": (lambda: _llama(torch.float32), {**ALL, "r": 32, "use_rslora": True}),
    "float64": (lambda: _llama(torch.float64), ALL),
    "DoRA": (lambda: _llama(torch.float32), {**ALL, "use_dora": True}),
    "DoRA in bfloat16": (_llama, {**ALL, "use_dora": True}),
    "DoRA of an embedding": (_llama, {**SOME, "use_dora": True}),
    "Conv1D": (_gpt2, CONV1D),
    "DoRA of Conv1D": (_gpt2, {**CONV1D, "use_dora": True}),
    "biases": (lambda: _llama(attention_bias=True), {**ALL, "bias": "all"}),
    "patterns": (_llama, {**ALL, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {r"^model\.layers.0.*v_proj": 5}}),
    "tokens of a tied model": (
        lambda: _llama(tie_word_embeddings=True),
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 140]},
    ),
    "a saved embedding of a tied model": (
        lambda: _llama(tie_word_embeddings=True),
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "IA3": (
        lambda: _llama(attention_bias=True),
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "IA3 of Conv1D": (lambda: _gpt2(torch.bfloat16), {**CONV1D, "feedforward_modules": ["c_proj"]}),
}


def _with_random_adapter(peft: Any, model: Any, config: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Save a model, an adapter for it, and the merge of both by PEFT, which is returned."""
    model.save_pretrained(folder / "base")
    wrapped = peft.get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if any(word in name for word in ("lora_", "ia3_", "trainable_tokens", "modules_to_save")):
            shift = 1 if "magnitude" in name or "ia3" in name else 0
            parameter.data = (torch.randn(parameter.shape) * 0.1 + shift).to(parameter.dtype)
    wrapped.save_pretrained(folder / "adapter")
    again = type(model).from_pretrained(folder / "base", dtype="auto")
    result = peft.PeftModel.from_pretrained(again, folder / "adapter").merge_and_unload()
    result.save_pretrained(folder / "merged")
    return load_file(folder / "merged" / "model.safetensors")


@pytest.mark.parametrize("name", PEFT_CASES)
def test_peft_merges_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    make, settings = PEFT_CASES[name]
    lora = {"r": 8, "lora_alpha": 12, "init_lora_weights": False}
    config = peft.IA3Config(**settings) if "IA3" in name else peft.LoraConfig(**{**lora, **settings})
    expected = _with_random_adapter(peft, make(), config, tmp_path)
    assert_same(merged(tmp_path / "base", tmp_path / "adapter", out=tmp_path / "out"), expected)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have another BLAS")
def test_the_blas_inside_torch_gives_the_bits_of_torch() -> None:
    blas = float32_product()
    assert blas is not None
    for rows, rank, columns in itertools.product((1, 2, 3, 48, 65, 320), (1, 2, 7, 16, 33, 128), (2, 5, 16, 768, 1025)):
        b, a = torch.randn(rows, rank), torch.randn(rank, columns)
        with one_thread(torch):
            assert blas(b.numpy(), a.numpy()).tobytes() == (b @ a).numpy().tobytes(), (rows, rank, columns)


# -- what changes, and what stays


def test_a_pickled_adapter_is_read_without_running_it(base: Path, tmp_path: Path) -> None:
    tensors = factors(LAYER, 150, 8)
    folder = write_adapter(tmp_path / "adapter", tensors)
    expected = merged(base, folder, out=tmp_path / "expected")
    (folder / "adapter_model.safetensors").unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    assert_same(merged(base, folder, out=tmp_path / "out"), expected)
    assert_same(merged(base, folder / "adapter_model.bin", out=tmp_path / "again"), expected)


def test_shards_and_single_files_are_bases_too(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", factors(LAYER, 150, 8))
    expected = merged(base, adapter, out=tmp_path / "expected")
    with ckptool.open(base) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "safetensors", max_shard_size="1KB"), tmp_path / "shards")
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 1
    assert_same(merged(tmp_path / "shards", adapter, out=tmp_path / "out"), expected)
    assert_same(merged(base / "model.safetensors", adapter, out=tmp_path / "one.safetensors"), expected)
    said = say("lora", "merge", base, adapter, "-o", tmp_path / "many", "--max-shard-size", "2KB")
    assert said.code == 0
    parts = [load_file(file) for file in (tmp_path / "many").glob("*.safetensors")]
    assert len(parts) > 1
    assert_same({key: item for part in parts for key, item in part.items()}, expected)


@pytest.mark.parametrize("legacy", [False, True])
def test_torch_files_keep_what_shares_a_storage_apart(legacy: bool, base: Path, tmp_path: Path) -> None:
    """A weight that another name also has, or that is a view, gets a storage of its own."""
    whole = torch.randn(40, 8)
    state = {"a.weight": whole, "b.weight": whole, "c.weight": torch.randn(40, 16)[:, ::2], "rest": torch.ones(3)}
    torch.save({"model": state, "epoch": 3}, tmp_path / "in.pth", _use_new_zipfile_serialization=not legacy)
    tensors = {**factors("a", 40, 8), **factors("c", 40, 8)}
    adapter = write_adapter(tmp_path / "adapter", tensors)
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        ckptool.save(ckptool.merge_lora(checkpoint, adapter, key="model"), tmp_path / "out.pth")
    result = torch.load(tmp_path / "out.pth")
    for name in "ac":
        assert is_same(result["model"][f"{name}.weight"], state[f"{name}.weight"] + delta(tensors, name) * 1.5)
    assert is_same(result["model"]["b.weight"], whole)
    assert result["epoch"] == 3 and torch.equal(result["model"]["rest"], torch.ones(3))


@pytest.mark.parametrize("where", ["head", "embedding", "both"])
def test_a_tied_head_gets_weights_of_its_own(where: str, base: Path, tmp_path: Path) -> None:
    tied(base)
    old = weights_of(base)[EMBEDDING]
    a, b = torch.randn(2, 32), torch.randn(8, 2)
    tensors = factors("lm_head", 32, 8) if where != "embedding" else {}
    if where != "head":
        name = "base_model.model.model.embed_tokens.lora_embedding_"
        tensors |= {f"{name}A": a, f"{name}B": b}
    result = merged(base, write_adapter(tmp_path / "adapter", tensors), out=tmp_path / "out")
    head = old if where == "embedding" else (old.float() + delta(tensors, "lm_head") * 1.5).bfloat16()
    embedding = old if where == "head" else old + ((b @ a).T * 1.5).bfloat16()
    assert is_same(result[HEAD], head) and is_same(result[EMBEDDING], embedding)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


TWO = [f"model.layers.{number}.mlp.up_proj" for number in (0, 1)]


@pytest.mark.parametrize(
    ("settings", "complete"),
    [
        ({"target_modules": ["up_proj"]}, False),
        ({"target_modules": r".*layers\.[01]\.mlp\.up_proj"}, False),
        ({"target_modules": r".*layers\.0\.mlp\.up_proj"}, True),
        ({"target_modules": "all-linear"}, True),
        ({"target_modules": ["up_proj"], "layers_to_transform": [0]}, True),
        ({"target_modules": ["up_proj"], "layers_to_transform": [0, 1]}, False),
        ({"target_modules": ["up_proj"], "exclude_modules": [TWO[1]]}, True),
        ({"target_modules": ["up_proj"], "exclude_modules": r".*\.1\..*"}, True),
        ({"target_modules": None}, True),
    ],
)
def test_an_adapter_without_tensors_for_a_target_is_refused(
    settings: dict[str, Any], complete: bool, base: Path, tmp_path: Path
) -> None:
    save_file(weights_of(base) | {f"{TWO[1]}.weight": torch.ones(150, 8)}, base / "model.safetensors")
    adapter = write_adapter(tmp_path / "adapter", factors(TWO[0], 150, 8), **settings)
    if complete:
        merged(base, adapter, out=tmp_path / "out")
        return
    with pytest.raises(RefusedError, match=rf"targets 1 module of .* for which it has no tensors: {TWO[1]}"):
        merged(base, adapter, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("header", "alpha", "scale"),
    [
        ({}, None, None),
        ({}, 6, 3.0),
        ({"lora_alpha": "3"}, None, 1.5),
        ({"lora_alpha": "3", "r": "2"}, 6, 1.5),
        ({"ss_network_alpha": "1.0", "ss_network_dim": "2"}, None, 0.5),
        ({"alpha": "5", "rank": "9"}, None, None),
        ({"alpha": "None"}, None, None),
    ],
)
def test_alpha_of_the_header_or_the_command(
    header: dict[str, str], alpha: float | None, scale: float | None, base: Path, tmp_path: Path
) -> None:
    """A PEFT adapter without its settings: alpha of the header, else the one that was given; never a guess."""
    tensors = factors(LAYER, 150, 8)
    save_file(tensors, tmp_path / "adapter.safetensors", metadata=header)
    given = ["--alpha", str(alpha)] if alpha else []
    said = say("lora", "merge", base, tmp_path / "adapter.safetensors", *given, "-o", tmp_path / "out")
    if scale is None:
        assert said.code == 4
        assert "--alpha" in said.err or "rank" in said.err
        return
    assert said.code == 0, said.err
    old = weights_of(base)[f"{LAYER}.weight"].float()
    result = load_file(tmp_path / "out" / "model.safetensors")[f"{LAYER}.weight"]
    assert is_same(result, (old + delta(tensors, LAYER) * scale).bfloat16())


# -- blocks, processes, damage


@pytest.mark.parametrize(("edit", "damaged"), (("merge", "base"), ("merge", "adapter"), ("resize", "adapter")))
def test_a_flipped_bit_is_found(edit: str, damaged: str, tmp_path: Path) -> None:
    tensors = factors("a", 300, 300)
    folder = write_adapter(tmp_path / "adapter", tensors)
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"a.weight": torch.randn(300, 300)}, tmp_path / "in.pth")
    torch.save(tensors, folder / "adapter_model.bin")
    path = tmp_path / "in.pth" if damaged == "base" else folder / "adapter_model.bin"
    data = bytearray(path.read_bytes())
    data[data.index(b"data/0") + 1200] ^= 1
    path.write_bytes(data)
    inputs = (tmp_path / "in.pth", folder) if edit == "merge" else (folder, "--rank", "2")
    said = say("lora", edit, *inputs, "-o", tmp_path / "out.safetensors")
    assert said.code == 3 and "checksum" in said.err and not (tmp_path / "out.safetensors").exists(), said


# -- refusals


def _nan(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.full_like(item, float("nan")) for key, item in tensors.items()}


GOOD = factors(LAYER, 150, 8)
NAME = f"base_model.model.{LAYER}"
REFUSALS: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]] = {
    "an unknown type": (GOOD, {"peft_type": "NEW"}, 'of the type "NEW" are not supported'),
    "PiSSA": (GOOD, {"init_lora_weights": "pissa_niter_4"}, "PEFT changes the base"),
    "aLoRA": (GOOD, {"alora_invocation_tokens": [1]}, "aLoRA"),
    "replicated layers": (GOOD, {"layer_replication": [[0, 1]]}, "repeats layers"),
    "parameters that are not a list": (GOOD, {"target_parameters": "mlp.experts"}, "target_parameters are not a list"),
    "another rank": (GOOD, {"r": 4}, "has the rank 2, and adapter_config.json says 4"),
    "no scale": (GOOD, {"lora_alpha": "much"}, 'lora_alpha "much" is not a number'),
    "integers": ({key: item.int() for key, item in GOOD.items()}, {}, "no floating-point values"),
    "a long pattern": (GOOD, {"alpha_pattern": {"*" + "a" * 10**6: 3}}, "too complex"),
    "DoRA without magnitudes": (GOOD, {"use_dora": True}, "no lora_magnitude_vector"),
    "magnitudes alone": (GOOD | {f"{NAME}.lora_magnitude_vector": torch.ones(150)}, {"use_dora": False}, "not set"),
    "a broken pattern": (GOOD, {"alpha_pattern": {"(": 3}}, "is not valid"),
    "A without B": ({f"{NAME}.lora_A.weight": torch.ones(2, 8)}, {}, "no partner lora_B"),
    "another rank in B": (
        {f"{NAME}.lora_A.weight": torch.ones(2, 8), f"{NAME}.lora_B.weight": torch.ones(150, 3)},
        {},
        "do not fit together: .*lora_B.weight' is 150x3",
    ),
    "NaN": (_nan(GOOD), {}, "NaN or infinity"),
    "another shape": (factors(LAYER, 150, 9), {}, "changes a weight of 150x9, and .* is 150x8"),
    "another base": (factors("h.0.mlp", 8, 8), {}, r"0 of 1 module matched \(wrong base\?\); not in .*: 'h.0.mlp'"),
    "a tensor that is not known": ({**GOOD, f"{NAME}.hada_t3": torch.ones(2)}, {}, "is not known"),
    "tokens outside": (
        {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 8)},
        {"trainable_token_indices": [40]},
        "token 40, and the base has 32",
    ),
    "two adapters in one": (
        {f"{NAME}.lora_A.one.weight": torch.ones(2, 8), f"{NAME}.lora_A.two.weight": torch.zeros(2, 8)},
        {},
        "several adapters",
    ),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_what_is_wrong(name: str, base: Path, tmp_path: Path) -> None:
    tensors, settings, words = REFUSALS[name]
    adapter = write_adapter(tmp_path / "adapter", tensors, **settings)
    with pytest.raises(RefusedError, match=words):
        merged(base, adapter, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert say("lora", "merge", base, adapter, "-o", tmp_path / "out").code == 4


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, float("nan")], [1, 2, 3]])
def test_weights_that_do_not_fit_are_refused(weights: list[float], base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", GOOD)
    with pytest.raises(TargetError):
        merged(base, adapter, adapter, out=tmp_path / "out", weights=weights)


@pytest.mark.filterwarnings("error")  # of NumPy
def test_an_overflow_is_refused(base: Path, tmp_path: Path) -> None:
    tensors = {key: item.half() for key, item in weights_of(base).items()}
    save_file(tensors, base / "model.safetensors")
    adapter = write_adapter(tmp_path / "adapter", {key: item * 1000 for key, item in GOOD.items()})
    with pytest.raises(RefusedError, match="would hold NaN or infinity"):
        merged(base, adapter, out=tmp_path / "out")
    tensors[f"{LAYER}.weight"][3, 3] = float("inf")
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(RefusedError, match="of the base holds NaN or infinity"):
        merged(base, write_adapter(tmp_path / "adapter", GOOD), out=tmp_path / "out")


def test_what_is_not_an_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="not an adapter"):
        merged(base, base, out=tmp_path / "out")
    folder = write_adapter(tmp_path / "adapter", GOOD)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(RefusedError, match=r"no adapter_config.json beside it"):
        merged(base, folder, out=tmp_path / "out")
    other = {f"{LAYER}.lora_a": torch.ones(8, 2), f"{LAYER}.lora_b": torch.ones(2, 150)}
    save_file(other, tmp_path / "mlx.safetensors")
    with pytest.raises(RefusedError, match="the names of mlx or torchtune"):
        merged(base, tmp_path / "mlx.safetensors", out=tmp_path / "out")


@pytest.mark.parametrize("where", ["base", "adapter"])
def test_tensors_without_values_are_refused(where: str, base: Path, tmp_path: Path) -> None:
    tensors, weights = dict(GOOD), {f"{LAYER}.weight": torch.ones(150, 8)}
    chosen = tensors if where == "adapter" else weights
    chosen[next(iter(chosen))] = next(iter(chosen.values())).to("meta")
    folder = write_adapter(tmp_path / "adapter", GOOD)
    (folder / "adapter_model.safetensors").unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    torch.save(weights, tmp_path / "in.pth")
    with pytest.raises(RefusedError, match=r"has no (floating-point|plain) values"):
        merged(tmp_path / "in.pth", folder, out=tmp_path / "out.pth")


def test_a_weight_of_other_tensors_than_products_is_refused(base: Path, tmp_path: Path) -> None:
    tensors = {**GOOD, f"base_model.model.{HEAD}": torch.ones(32, 8)}
    adapter = write_adapter(tmp_path / "adapter", tensors, modules_to_save=["lm_head"])
    with pytest.raises(RefusedError, match=r"replaces or multiplies 'lm_head.weight'"):
        merged(base, adapter, out=tmp_path / "out", weights=[0.5])
