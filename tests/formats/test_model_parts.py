"""Folders with the parts of one model: joined bit for bit, or refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from conftest import CORPUS
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.base.errors import RefusedError

State = dict[str, torch.Tensor]
LAYERS, SIZE, GROUPS, HEADS, WIDTH, INNER, ROWS = 2, 4, 4, 8, 16, 24, 32


def randoms(shapes: Mapping[str, tuple[int, ...]]) -> State:
    """Random tensors; names with L stand for one of each layer."""
    torch.manual_seed(3)
    names = [
        (name.replace("{L}", str(layer)), shape)
        for name, shape in shapes.items()
        for layer in (range(LAYERS) if "{L}" in name else (0,))
    ]
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in names}


META = randoms(
    {
        "tok_embeddings.weight": (ROWS, WIDTH),
        "layers.{L}.attention.wq.weight": (HEADS * SIZE, WIDTH),
        "layers.{L}.attention.wk.weight": (GROUPS * SIZE, WIDTH),
        "layers.{L}.attention.wv.weight": (GROUPS * SIZE, WIDTH),
        "layers.{L}.attention.wo.weight": (WIDTH, HEADS * SIZE),
        "layers.{L}.feed_forward.w1.weight": (INNER, WIDTH),
        "layers.{L}.feed_forward.w2.weight": (WIDTH, INNER),
        "layers.{L}.feed_forward.w3.weight": (INNER, WIDTH),
        "layers.{L}.attention_norm.weight": (WIDTH,),
        "layers.{L}.ffn_norm.weight": (WIDTH,),
        "norm.weight": (WIDTH,),
        "output.weight": (ROWS, WIDTH),
    }
)
PARAMS = {"dim": WIDTH, "n_heads": HEADS, "n_kv_heads": GROUPS, "n_layers": LAYERS, "head_dim": SIZE}


def meta_cut(name: str, embedding: int = 0) -> int:
    """The dimension that Meta's parts cut, -1 for none (fairscale's layers in llama/model.py)."""
    if "norm" in name:
        return -1
    return embedding if "tok_" in name else int("wo." in name or "w2." in name)


def save_meta(folder: Path, parts: int, embedding: int = 0, params: Any = PARAMS) -> Path:
    folder.mkdir(parents=True)
    for part in range(parts):
        state = {
            name: value if (dim := meta_cut(name, embedding)) < 0 else value.chunk(parts, dim)[part].clone()
            for name, value in META.items()
        }
        torch.save(state, folder / f"consolidated.{part:02d}.pth")
    if params is not None:
        (folder / "params.json").write_text(json.dumps(params))
    return folder


def joined(folder: Path, out: Path, **more: Any) -> State:
    ckptool.save(ckptool.convert(folder, "safetensors", **more), out)
    return load_file(out)


def assert_equal(made: State, wanted: State) -> None:
    assert made.keys() == wanted.keys()
    for name, value in wanted.items():
        assert made[name].dtype == value.dtype
        assert torch.equal(made[name], value), name


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("embedding", [0, 1])
@pytest.mark.parametrize("params", [PARAMS, None])
def test_parts_of_meta_are_joined_bit_for_bit(parts: int, embedding: int, params: Any, tmp_path: Path) -> None:
    folder = save_meta(tmp_path / "in", parts, embedding, params)
    assert_equal(joined(folder, tmp_path / "out.safetensors"), META)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("embedding", [0, 1])
def test_joined_parts_have_the_names_of_transformers(parts: int, embedding: int, tmp_path: Path) -> None:
    whole = save_meta(tmp_path / "whole", 1)
    wanted = joined(whole / "consolidated.00.pth", tmp_path / "whole.safetensors", to_names="hf:llama")
    folder = save_meta(tmp_path / "in", parts, embedding)
    source = folder if parts > 1 else folder / "consolidated.00.pth"
    assert_equal(joined(source, tmp_path / "out.safetensors", to_names="hf:llama"), wanted)


def test_without_params_the_missing_number_is_named(tmp_path: Path) -> None:
    folder = save_meta(tmp_path / "in", 2, params=None)
    with pytest.raises(RefusedError, match=r"n_heads.* not known"):
        ckptool.convert(folder, "safetensors", to_names="hf:llama")
    (tmp_path / "own.json").write_text(json.dumps(PARAMS))
    made = ckptool.convert(folder, "safetensors", to_names="hf:llama", config=str(tmp_path / "own.json"))
    assert len(list(made)) == len(META)


def test_more_parts_than_heads_of_keys_are_refused(tmp_path: Path) -> None:
    """Llama 3.1 405B in 16 parts has 8 heads of keys and values, so two parts have the same head."""
    for params in (PARAMS, None):
        folder = tmp_path / str(params is None)
        folder.mkdir()
        for part in range(8):
            state = {}
            for name, value in META.items():
                dim = meta_cut(name)
                pieces = (
                    [piece for piece in value.chunk(GROUPS) for _ in range(2)]
                    if "wk" in name or "wv" in name
                    else [value] * 8
                    if dim < 0
                    else value.chunk(8, dim)
                )
                state[name] = pieces[part].clone()
            torch.save(state, folder / f"consolidated.{part:02d}.pth")
        if params is not None:
            (folder / "params.json").write_text(json.dumps(params))
        said = say("convert", folder, "-o", tmp_path / "out.safetensors")
        assert (said.code, (tmp_path / "out.safetensors").exists()) == (3, False)
        assert "4 heads for 8 parts" in said.err if params else "n_kv_heads is not known" in said.err


def damaged(change: Callable[[Path], object], folder: Path, out: Path) -> str:
    change(folder)
    said = say("convert", folder, "-o", out)
    assert said.code in (3, 4), said.all
    assert not out.exists()
    return said.err


def edit(path: Path, **values: torch.Tensor | None) -> None:
    state = torch.load(path)
    for name, value in values.items():
        name = name.replace("__", ".")
        state.pop(name)
        if value is not None:
            state[name] = value
    torch.save(state, path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "consolidated.01.pth").unlink(), "consolidated.01.pth is missing"),
        (lambda folder: (folder / "consolidated.00.pth").unlink(), "consolidated.00.pth is missing"),
        (lambda folder: edit(folder / "consolidated.02.pth", norm__weight=torch.ones(WIDTH).bfloat16()), "norm.weight"),
        (lambda folder: edit(folder / "consolidated.02.pth", norm__weight=torch.ones(3).bfloat16()), "norm.weight"),
        (lambda folder: edit(folder / "consolidated.02.pth", norm__weight=None), "has no 'norm.weight'"),
        (lambda folder: edit(folder / "consolidated.00.pth", norm__weight=None), "has no 'norm.weight'"),
        (
            lambda folder: edit(folder / "consolidated.01.pth", output__weight=torch.ones(8, WIDTH)),
            "'output.weight' is bfloat16",
        ),
        (
            lambda folder: edit(folder / "consolidated.01.pth", output__weight=torch.ones(9, WIDTH).bfloat16()),
            "'output.weight'",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(change: Any, words: str, tmp_path: Path) -> None:
    folder = save_meta(tmp_path / "in", 4)
    assert words in damaged(change, folder, tmp_path / "out.safetensors")


# vLLM

LLAMA = randoms(
    {
        "model.embed_tokens.weight": (ROWS, WIDTH),
        "model.layers.{L}.input_layernorm.weight": (WIDTH,),
        "model.layers.{L}.self_attn.q_proj.weight": (HEADS * SIZE, WIDTH),
        "model.layers.{L}.self_attn.k_proj.weight": (GROUPS * SIZE, WIDTH),
        "model.layers.{L}.self_attn.v_proj.weight": (GROUPS * SIZE, WIDTH),
        "model.layers.{L}.self_attn.o_proj.weight": (WIDTH, HEADS * SIZE),
        "model.layers.{L}.post_attention_layernorm.weight": (WIDTH,),
        "model.layers.{L}.mlp.gate_proj.weight": (INNER, WIDTH),
        "model.layers.{L}.mlp.up_proj.weight": (INNER, WIDTH),
        "model.layers.{L}.mlp.down_proj.weight": (WIDTH, INNER),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (ROWS, WIDTH),
    }
)


def vllm_rank(state: State, rank: int, ranks: int) -> State:
    """The tensors of a rank, as the weight loaders of vLLM's parallel layers cut them."""

    def share(name: str, dim: int = 0, copies: int = 1) -> torch.Tensor:
        return state[name].chunk(ranks // copies, dim)[rank // copies]

    made: State = {}
    copies = max(1, ranks // GROUPS)
    for name in state:
        if name.rpartition(".")[0].endswith("norm"):
            made[name] = state[name]
        elif "q_proj" in name:
            others = [share(name.replace("q_proj", part), copies=copies) for part in ("k_proj", "v_proj")]
            made[name.replace("q_proj", "qkv_proj")] = torch.cat([share(name), *others])
        elif "gate_proj" in name:
            up = share(name.replace("gate_proj", "up_proj"))
            made[name.replace("gate_proj", "gate_up_proj")] = torch.cat([share(name), up])
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            made[name] = share(name, int("o_proj" in name or "down_proj" in name))
    return {name: value.clone().contiguous() for name, value in made.items()}


def save_vllm(folder: Path, ranks: int, state: State = LLAMA, files: int = 2) -> Path:
    folder.mkdir()
    for rank in range(ranks):
        own = vllm_rank(state, rank, ranks)
        for part in range(files):
            some = dict(list(own.items())[part::files])
            save_file(some, folder / f"model-rank-{rank}-part-{part}.safetensors")
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_ranks_of_vllm_are_joined_by_their_sections(ranks: int, family: str, tmp_path: Path) -> None:
    state = dict(LLAMA)
    for layer in range(LAYERS):
        place = f"model.layers.{layer}.self_attn."
        for letter, rows in {"q": HEADS * SIZE, "k": GROUPS * SIZE, "v": GROUPS * SIZE}.items():
            if family == "qwen2":
                state[f"{place}{letter}_proj.bias"] = torch.randn(rows).bfloat16()
            if family == "qwen3" and letter != "v":
                state[f"{place}{letter}_norm.weight"] = torch.randn(SIZE).bfloat16()
    folder = save_vllm(tmp_path / "in", ranks, state)
    assert_equal(joined(folder, tmp_path / "out.safetensors", to_names=f"hf:{family}"), state)
    assert f"files of {ranks} rank" in say("validate", folder).out  # nothing records how many there were


def test_ranks_of_vllm_with_the_same_keys_are_refused(tmp_path: Path) -> None:
    folder = save_vllm(tmp_path / "in", 8)
    said = say("convert", folder, "-o", tmp_path / "out.safetensors", "--to-names", "hf:llama")
    assert said.code == 3
    assert "more parts than heads of keys" in said.err


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_constant_ranks_of_vllm_are_joined_by_the_configuration(ranks: int, tmp_path: Path) -> None:
    """Equal rows show no copies where all rows are equal; the number of heads does."""
    state = {name: torch.full_like(value, 0.5) for name, value in LLAMA.items()}
    folder = save_vllm(tmp_path / "in", ranks, state)
    numbers = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": SIZE}
    (folder / "config.json").write_text(json.dumps(numbers))
    if ranks <= GROUPS:
        assert_equal(joined(folder, tmp_path / "out.safetensors", to_names="hf:llama"), state)
    else:
        said = say("convert", folder, "-o", tmp_path / "out.safetensors", "--to-names", "hf:llama")
        assert said.code == 3
        assert "qkv_proj.weight' has the shape [12, 16] in model-rank-0-part-0" in said.err
        assert "unlike 8 parts of a model with k = 16 and q = 32" in said.err


def test_a_missing_file_of_a_rank_is_named(tmp_path: Path) -> None:
    folder = save_vllm(tmp_path / "in", 2)
    (folder / "model-rank-1-part-1.safetensors").unlink()
    said = say("convert", folder, "-o", tmp_path / "out.safetensors", "--to-names", "hf:llama")
    assert said.code != 0
    assert "model-rank-1-part-1.safetensors is missing" in said.err


# DeepSeek

#: Names in DeepSeek's own code, and the dimension that its ranks cut (DeepSeek-V3: inference/convert.py, mapping).
_CUT: dict[int | None, str] = {
    0: "embed_tokens=embed q_proj=wq q_b_proj=wq_b kv_b_proj=wkv_b gate_proj=w1 up_proj=w3 lm_head=head",
    1: "o_proj=wo down_proj=w2",
    None: "input_layernorm=attn_norm post_attention_layernorm=ffn_norm q_a_proj=wq_a q_a_layernorm=q_norm"
    " kv_a_proj_with_mqa=wkv_a kv_a_layernorm=kv_norm gate=gate norm=norm scale=scale",
}
DEEPSEEK = {name: (own, dim) for dim, text in _CUT.items() for name, own in (pair.split("=") for pair in text.split())}


def deepseek_rank(state: State, rank: int, ranks: int, experts: int) -> State:
    """The tensors of a rank, as convert.py of DeepSeek-V3 makes them."""
    made: State = {}
    for name, value in state.items():
        name = name.removeprefix("model.")
        name = name.replace("self_attn", "attn").replace("mlp", "ffn")
        name = name.replace("weight_scale_inv", "scale").replace("e_score_correction_bias", "bias")
        key = name.split(".")[-2]
        new, dim = DEEPSEEK[key]
        name = name.replace(key, new)
        if "experts" in name and "shared_experts" not in name:
            if int(name.split(".")[-3]) // (experts // ranks) == rank:
                made[name] = value
        else:
            made[name] = value if dim is None else value.chunk(ranks, dim)[rank]
    return {name: value.clone().contiguous() for name, value in made.items()}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("scales", [False, True])
def test_ranks_of_deepseek_have_experts_of_their_own(ranks: int, lora: bool, scales: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 12, "moe_intermediate_size": 4}
    sizes |= {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 4, "n_routed_experts": 4}
    sizes |= {"kv_lora_rank": 4, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 2}
    config = transformers.DeepseekV3Config(**sizes, q_lora_rank=4 if lora else None)
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path / "hf")
    state = load_file(tmp_path / "hf" / "model.safetensors")
    state = {name: torch.randn_like(value) for name, value in state.items()}
    if scales:
        more = {
            f"{name}_scale_inv": torch.randn(4, 4)
            for name in state
            if name.endswith("proj.weight") or "kv_a_proj" in name
        }
        state |= more
    folder = tmp_path / "in"
    folder.mkdir()
    for rank in range(ranks):
        save_file(deepseek_rank(state, rank, ranks, 4), folder / f"model{rank}-mp{ranks}.safetensors")
    source = folder if ranks > 1 else folder / "model0-mp1.safetensors"
    assert_equal(joined(source, tmp_path / "out.safetensors", to_names="hf:deepseek_v3"), state)
    if ranks > 1:
        last = folder / f"model{ranks - 1}-mp{ranks}.safetensors"
        whole = load_file(last)
        # All layers lack the last expert: the router has a row for it.
        save_file({name: value for name, value in whole.items() if ".experts.3." not in name}, last)
        said = say("convert", folder, "-o", tmp_path / "half.safetensors", "--to-names", "hf:deepseek_v3")
        assert said.code == 4 and "3 values of {e}" in said.err
        last.unlink()
        said = say("convert", folder, "-o", tmp_path / "half.safetensors", "--to-names", "hf:deepseek_v3")
        assert said.code != 0
        assert not (tmp_path / "half.safetensors").exists()


# GPT-NeoX


def neox_cut(name: str) -> int | str:
    """How the parts cut a tensor (GPT-NeoX: tools/ckpts/convert_neox_to_hf.py, MODEL_KEYS)."""
    if "norm" in name:
        return "mean"
    if name.endswith(("dense.bias", "dense_4h_to_h.bias")):
        return "sum"
    return int("dense.weight" in name or "4h_to_h" in name)


def neox_place(name: str, layers: int) -> tuple[int, str]:
    """The number of the file, and the name in it."""
    for begin, number in {
        "gpt_neox.embed_in": 0,
        "gpt_neox.final_layer_norm": layers + 3,
        "embed_out": layers + 4,
    }.items():
        if name.startswith(begin):
            own = {0: "word_embeddings", layers + 3: "norm", layers + 4: "final_linear"}[number]
            return number, name.replace(begin, own)
    _, _, layer, rest = name.split(".", 3)
    return int(layer) + 2, rest


def save_neox(state: State, folder: Path, parts: int) -> Path:
    folder.mkdir()
    for part in range(parts):
        files: dict[int, State] = {}
        for name, value in state.items():
            number, own = neox_place(name, LAYERS)
            how = neox_cut(name)
            if how in ("mean", "sum"):  # powers of two, so that the parts give the value exactly
                shares = (
                    [value / parts] * parts if how == "sum" else [value + at for at in (1.0, -1.0, 2.0, -2.0)[:parts]]
                )
                piece = shares[part] if parts > 1 else value
            else:
                piece = value.chunk(parts, int(how))[part]
            files.setdefault(number, {})[own] = piece.clone()
        for number, own_state in files.items():
            torch.save(own_state, folder / f"layer_{number:02d}-model_{part:02d}-model_states.pt")
    return folder


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_layers_of_neox_are_joined_and_summed(parts: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoXConfig(
        vocab_size=8, hidden_size=8, intermediate_size=16, num_hidden_layers=LAYERS, num_attention_heads=4
    )
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "hf")
    files = load_file(tmp_path / "hf" / "model.safetensors")
    state = {name: torch.randint(-64, 64, value.shape) / 16 for name, value in files.items()}
    folder = save_neox(state, tmp_path / "in", parts)
    assert_equal(joined(folder, tmp_path / "out.safetensors", to_names="hf:gpt_neox"), state)
    if parts > 1:
        words = ["convert", folder, "--to-names", "hf:gpt_neox", "--max-shard-size", "0.9kB"]
        assert say(*words, "-o", tmp_path / "shards", "--jobs", "2").code == 0
        shards = [load_file(path) for path in (tmp_path / "shards").glob("*.safetensors")]
        assert len(shards) > 2
        assert_equal({name: value for shard in shards for name, value in shard.items()}, state)
    for lost in folder.glob(f"layer_{LAYERS + 1:02d}-*"):  # the last layer, of all parts
        lost.unlink()
    assert f"layer_{LAYERS + 1:02d}-model_00-model_states.pt is missing" in say("validate", folder).out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sums_are_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(2)
    values = [torch.randn(3000).mul(10.0 ** torch.randint(-6, 5, (3000,)).double()).to(dtype) for _ in range(3)]
    norms = [torch.randn(3000).to(dtype) for _ in range(3)]
    for part in range(3):
        own = {"mlp.dense_4h_to_h.bias": values[part], "input_layernorm.weight": norms[part]}
        torch.save(own, tmp_path / f"layer_02-model_{part:02d}-model_states.pt")
    made = joined(tmp_path, tmp_path / "out.safetensors")
    total, mean = (torch.stack(each).double().sum(0) for each in (values, norms))
    mean = mean / 3
    narrow = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    for name, exact in (("2.mlp.dense_4h_to_h.bias", total), ("2.input_layernorm.weight", mean)):
        error = (made[name].double() - exact).abs()
        wanted = (exact.to(narrow).to(dtype).double() - exact).abs()
        assert (error <= wanted).all()


CASES = CORPUS.parent / "recipes"


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("vllm-sharded", "hf:llama"),
        ("neox-layers", "hf:gpt_neox"),
        ("meta-llama2", "hf:llama"),
        ("meta-llama3", "hf:llama"),
    ],
)
def test_parts_of_the_corpus(name: str, family: str, tmp_path: Path) -> None:
    if not (CASES / name).is_dir():
        pytest.skip("no corpus")
    wanted = load_file(CASES / name / "expected.safetensors")
    assert_equal(joined(CASES / name / "in", tmp_path / "out.safetensors", to_names=family), wanted)
