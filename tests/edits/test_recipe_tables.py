"""Built-in recipes: each against the model of its own library, on the CPU, in both directions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.recipes import assert_equal, converted
from safetensors.torch import load_file

import ckptool
from ckptool.base.errors import RefusedError

State = dict[str, torch.Tensor]


def tiny(name: str, head: str = "ForCausalLM", **more: Any) -> Any:
    """A model of transformers with random weights, also where it begins with zeros and ones."""
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": 11,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    own = getattr(transformers, f"{name}Config")(**(sizes | more))
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}{head}")(own).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_()
    return model


def files_of(model: Any, folder: Path) -> State:
    """The tensors that transformers writes."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 3, "intermediate_size": 6, "num_key_value_heads": 2}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 3, "moe_intermediate_size": 6, "mlp_only_layers": [0]}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 3, "moe_intermediate_size": 8, "num_key_value_heads": 2}),
    "olmoe": ("Olmoe", {"num_experts": 3, "intermediate_size": 6}),
    "deepseek_v2": ("DeepseekV2", {"n_routed_experts": 4, "moe_intermediate_size": 6, "first_k_dense_replace": 1}),
    "deepseek_v3": (
        "DeepseekV3",
        {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
        | {"first_k_dense_replace": 1},
    ),
    "glm4_moe": ("Glm4Moe", {"n_routed_experts": 4, "moe_intermediate_size": 6, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_stacked_as_in_the_memory_of_transformers(family: str, tmp_path: Path) -> None:
    """If all layers lack the last expert, the router says so."""
    name, sizes = EXPERTS[family]
    model = tiny(name, **sizes)
    memory = {key: value for key, value in model.state_dict().items() if "rotary" not in key}
    files = files_of(model, tmp_path / "hf")
    assert len(files) > len(memory)
    assert_equal(converted(files, f"stacked:{family}", tmp_path / "a", model.config), memory)
    assert_equal(converted(memory, f"hf:{family}", tmp_path / "b", model.config), files)
    assert_equal(converted(memory, f"hf:{family}", tmp_path / "c"), files)
    last = max(int(number) for key in files for number in re.findall(r"experts\.(\d+)\.", key))
    fewer = {key: value for key, value in files.items() if f".experts.{last}." not in key}
    shorter = {key: value[:-1].clone() if ".mlp.experts." in key else value for key, value in memory.items()}
    for state, target in ((fewer, f"stacked:{family}"), (shorter, f"hf:{family}")):
        with pytest.raises(RefusedError, match=rf"have {last} values of {{e}}, .* says {last + 1}"):
            converted(state, target, tmp_path / "out")


@pytest.mark.parametrize("family", ["hf:mixtral", "hf:qwen3_moe"])
@pytest.mark.parametrize(
    ("names", "shapes"),
    [
        (("gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias"), ((3, 16, 1, 4), (3, 16, 1), (3, 16))),
        (("gate_up_proj", "gate_up_proj_bias", "down_proj"), ((3, 8, 16), (3, 16), (3, 8, 8))),
        (("gate_up_proj", "down_proj"), ((3, 8, 10), (3, 5, 8))),
    ],
)
@pytest.mark.parametrize("place", ["mlp", "feed_forward"])
def test_experts_in_another_order_are_refused(
    family: str, names: tuple[str, ...], shapes: Any, place: str, tmp_path: Path
) -> None:
    """GPT-OSS interleaves gate and up, Llama 4 stores its experts transposed."""
    state = {f"model.layers.0.{place}.experts.{name}": torch.ones(shape) for name, shape in zip(names, shapes)}
    state |= {"model.layers.0.mlp.gate.weight": torch.ones(3, 8), "model.norm.weight": torch.ones(8)}
    words = "no rule describes" if len(names) == 3 or place == "feed_forward" else "does not fit"
    with pytest.raises(RefusedError, match=words):
        converted(state, family, tmp_path)


Heads = list[torch.Tensor]


def spied(model: Any, fused: Any, attention: Any) -> tuple[torch.Tensor, Heads]:
    """The input of a fused layer for one token, and the queries, keys and values that the model makes of it.

    For the first token the rotary embedding changes nothing.
    """
    transformers = pytest.importorskip("transformers")
    seen: list[torch.Tensor] = []
    heads: list[Heads] = []

    def spy(module: Any, query: Any, key: Any, value: Any, *args: Any, **more: Any) -> Any:
        if module is attention:
            heads.append([query, key, value])
        return query.transpose(1, 2), None

    handle = fused.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for method in ("_reshape", "_split_heads"):
        if hasattr(attention, method):
            own = getattr(attention, method)
            setattr(attention, method, lambda value, own=own: heads.append(list(own(value))) or own(value))
    if not any(hasattr(attention, method) for method in ("_reshape", "_split_heads")):
        transformers.AttentionInterface.register("spy", spy)
        model.config._attn_implementation = "spy"
    with torch.no_grad():
        model(torch.tensor([[3]]))
    handle.remove()
    return seen[0].reshape(-1), [tensor.reshape(-1) for tensor in heads[0]]


#: The configuration and its class, the module with the fused layer in the model, and the name of that layer.
FUSED: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "gpt2": ("gpt2", "GPT2", {"n_embd": 8, "n_head": 4}, "transformer.h.1.attn", "c_attn"),
    "gpt_neox": ("gpt_neox", "GPTNeoX", {"intermediate_size": 6}, "gpt_neox.layers.1.attention", "query_key_value"),
    "bloom": ("bloom", "Bloom", {"n_head": 4, "n_layer": 2}, "transformer.h.1.self_attention", "query_key_value"),
    "falcon-40b": (
        "falcon",
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        "transformer.h.1.self_attention",
        "query_key_value",
    ),
    "falcon-7b": ("falcon", "Falcon", {"multi_query": True}, "transformer.h.1.self_attention", "query_key_value"),
    "falcon-rw": (
        "falcon",
        "Falcon",
        {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True},
        "transformer.h.1.self_attention",
        "query_key_value",
    ),
}


@pytest.mark.parametrize("kind", FUSED)
def test_split_projections_compute_what_the_model_computes(kind: str, tmp_path: Path) -> None:
    family, name, sizes, place, layer = FUSED[kind]
    model = tiny(name, "LMHeadModel" if name == "GPT2" else "ForCausalLM", **sizes)
    files = files_of(model, tmp_path / "hf")
    split = converted(files, f"split:{family}", tmp_path / "a", model.config)
    attention = model.get_submodule(place)
    token, heads = spied(model, attention.get_submodule(layer), attention)
    for letter, wanted in zip("qkv", heads):
        weight = split[f"{place}.{letter}_proj.weight"]
        bias = split.get(f"{place}.{letter}_proj.bias")
        value = torch.nn.functional.linear(token, weight, bias).view(-1, 2)
        if letter != "q" and kind == "falcon-40b":  # its method repeats the keys and values of a group
            value = value.repeat_interleave(2, 0)
        assert torch.allclose(value.reshape(-1), wanted, atol=1e-5)
    assert not any(layer in name for name in split)
    assert_equal(converted(split, f"hf:{family}", tmp_path / "b", model.config), files)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])).logits


def llama_of(state: State, name: str = "Llama", **sizes: Any) -> Any:
    model = tiny(name, **sizes)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("config", [True, False])
def test_phi3_is_llama_in_two_pieces(groups: int, config: bool, tmp_path: Path) -> None:
    sizes = {"num_key_value_heads": groups, "intermediate_size": 6, "rms_norm_eps": 1e-5}
    phi = tiny("Phi3", **sizes)
    files = files_of(phi, tmp_path / "hf")
    own = phi.config if config else None
    llama = converted(files, "hf:llama", tmp_path / "a", own)
    assert torch.allclose(logits(llama_of(llama, **sizes)), logits(phi), atol=1e-4)
    assert_equal(converted(llama, "hf:phi3", tmp_path / "b", own), files)


def test_the_folder_that_comes_out_loads_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    phi = tiny("Phi3", num_key_value_heads=2, intermediate_size=6)
    files_of(phi, tmp_path / "hf")
    made = ckptool.convert(tmp_path / "hf", "safetensors", to_names="hf:llama", max_shard_size=1500)
    ckptool.save(made, tmp_path / "out")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == "LlamaForCausalLM"
    assert torch.allclose(logits(model), logits(phi), atol=1e-4)
    ckptool.save(
        ckptool.convert(tmp_path / "out", "safetensors", to_names="hf:phi3", max_shard_size=1500), tmp_path / "back"
    )
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    assert type(again).__name__ == "Phi3ForCausalLM"
    assert torch.equal(logits(again), logits(phi))
    with pytest.raises(RefusedError, match=r"for hf:internlm2 it is not made: the fields of hf:internlm2 not known"):
        ckptool.convert(tmp_path / "out", "safetensors", to_names="hf:internlm2", max_shard_size=1500)


def internlm_heads(token: torch.Tensor, weight: torch.Tensor, groups: int, size: int) -> Heads:
    """Queries, keys and values, as InternLM2Attention.forward takes them from the output of wqkv."""
    states = (weight @ token).view(groups, -1, size)
    return [states[:, :-2].reshape(-1), states[:, -2].reshape(-1), states[:, -1].reshape(-1)]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_internlm2_is_llama_with_grouped_rows(groups: int, tmp_path: Path) -> None:
    sizes = {"num_key_value_heads": groups, "intermediate_size": 6}
    llama = files_of(tiny("Llama", **sizes), tmp_path / "hf")
    own = {"num_attention_heads": 4, "num_key_value_heads": groups, "hidden_size": 8}
    intern = converted(llama, "hf:internlm2", tmp_path / "a", own)
    token = torch.randn(8)
    for layer in range(2):
        heads = internlm_heads(token, intern[f"model.layers.{layer}.attention.wqkv.weight"], groups, 2)
        for letter, value in zip("qkv", heads):
            assert torch.allclose(
                llama[f"model.layers.{layer}.self_attn.{letter}_proj.weight"] @ token, value, atol=1e-6
            )
        for name, other in {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.items():
            place = f"model.layers.{layer}."
            assert torch.equal(intern[f"{place}feed_forward.{name}.weight"], llama[f"{place}mlp.{other}.weight"])
    assert_equal(converted(intern, "hf:llama", tmp_path / "b", own), llama)


def test_baichuan_is_llama_with_packed_projections(tmp_path: Path) -> None:
    llama = files_of(tiny("Llama", num_key_value_heads=4, intermediate_size=6), tmp_path / "hf")
    packed = converted(llama, "hf:baichuan", tmp_path / "a")
    token = torch.randn(8)
    # Attention.forward: unflatten(-1, (3, hidden_size)), then the first, second and third
    heads = (packed["model.layers.1.self_attn.W_pack.weight"] @ token).unflatten(-1, (3, 8))
    for letter, value in zip("qkv", heads):
        assert torch.allclose(llama[f"model.layers.1.self_attn.{letter}_proj.weight"] @ token, value, atol=1e-6)
    assert_equal(converted(packed, "hf:llama", tmp_path / "b"), llama)
    with pytest.raises(RefusedError, match="Baichuan 2"):
        converted(packed, "hf:llama", tmp_path / "c", {"z_loss_weight": 0})


def test_projections_of_torch_attention(tmp_path: Path) -> None:
    attention = torch.nn.MultiheadAttention(8, 2, dtype=torch.float64)
    torch.nn.init.normal_(attention.in_proj_bias)
    state = {f"blocks.0.attn.{name}": value.detach() for name, value in attention.state_dict().items()}
    split = converted(state, "split:mha", tmp_path / "a")
    inputs = [torch.randn(3, 1, 8, dtype=torch.float64) for _ in range(3)]
    packed = torch.nn.functional._in_projection_packed(*inputs, attention.in_proj_weight, attention.in_proj_bias)
    for letter, value, wanted in zip("qkv", inputs, packed):
        weight, bias = (split[f"blocks.0.attn.{letter}_proj.{kind}"] for kind in ("weight", "bias"))
        assert torch.allclose(torch.nn.functional.linear(value, weight, bias), wanted)
    assert_equal(converted(split, "torch:mha", tmp_path / "b"), state)


class Meta:
    """Meta's model: rotary embeddings as complex numbers, of neighbours in a head (llama/model.py)."""

    def __init__(self, state: State, heads: int, groups: int) -> None:
        self.state, self.heads, self.groups = state, heads, groups

    def linear(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return value @ self.state[f"{name}.weight"].T

    def norm(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-6) * self.state[f"{name}.weight"]

    def rotated(self, value: torch.Tensor) -> torch.Tensor:
        size = value.shape[-1]
        frequencies = 1.0 / (10000.0 ** (torch.arange(0, size, 2).float() / size))
        angles = torch.outer(torch.arange(len(value)).float(), frequencies)
        turned = torch.view_as_complex(value.view(*value.shape[:-1], -1, 2)) * torch.polar(
            torch.ones_like(angles), angles
        ).unsqueeze(1)
        return torch.view_as_real(turned).flatten(2)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.state["tok_embeddings.weight"][tokens]
        layers = 1 + max(int(name.split(".")[1]) for name in self.state if name.startswith("layers."))
        for layer in range(layers):
            place = f"layers.{layer}"
            value = self.norm(f"{place}.attention_norm", hidden)
            query = self.rotated(self.linear(f"{place}.attention.wq", value).unflatten(-1, (self.heads, -1)))
            key = self.rotated(self.linear(f"{place}.attention.wk", value).unflatten(-1, (self.groups, -1)))
            values = self.linear(f"{place}.attention.wv", value).unflatten(-1, (self.groups, -1))
            key, values = (each.repeat_interleave(self.heads // self.groups, 1) for each in (key, values))
            mixed = torch.nn.functional.scaled_dot_product_attention(
                *(each.transpose(0, 1) for each in (query, key, values)), is_causal=True
            )
            hidden = hidden + self.linear(f"{place}.attention.wo", mixed.transpose(0, 1).flatten(1))
            value = self.norm(f"{place}.ffn_norm", hidden)
            gate = torch.nn.functional.silu(self.linear(f"{place}.feed_forward.w1", value))
            hidden = hidden + self.linear(
                f"{place}.feed_forward.w2", gate * self.linear(f"{place}.feed_forward.w3", value)
            )
        name = "output" if "output.weight" in self.state else "tok_embeddings"
        return self.linear(name, self.norm("norm", hidden))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("name", "family"), [("Llama", "meta:llama2"), ("Llama", "meta:llama3"), ("Mistral", "mistral")]
)
def test_logits_are_those_of_metas_model(
    name: str, family: str, groups: int, size: int, tied: bool, tmp_path: Path
) -> None:
    sizes = {"num_key_value_heads": groups, "head_dim": size, "intermediate_size": 6, "tie_word_embeddings": tied}
    model = tiny(name, **sizes)
    files = files_of(model, tmp_path / "hf")
    assert ("lm_head.weight" in files) is not tied
    meta = converted(files, family, tmp_path / "a", model.config)
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    made = Meta(meta, 4, groups).logits(tokens)
    assert torch.allclose(made, logits(model)[0], atol=1e-4)
    assert_equal(converted(meta, f"hf:{name.lower()}", tmp_path / "b", {"n_heads": 4, "n_kv_heads": groups}), files)


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    files = files_of(tiny("Qwen3Moe", **EXPERTS["qwen3_moe"][1]), tmp_path / "hf")
    del files["model.layers.1.mlp.experts.1.up_proj.weight"]
    with pytest.raises(RefusedError, match=r"experts\.1\.up_proj\.weight' is missing"):
        converted(files, "stacked:qwen3_moe", tmp_path)


@pytest.mark.parametrize("numbers", [{"num_attention_heads": 4}, {"num_attention_heads": 4, "multi_query": True}])
def test_falcon_without_its_configuration_is_refused(numbers: Any, tmp_path: Path) -> None:
    state = {"transformer.h.0.self_attention.query_key_value.weight": torch.ones(12, 8)}
    with pytest.raises(RefusedError, match="new_decoder_architecture is not known"):
        converted(state, "split:falcon", tmp_path, numbers)


def test_phi4_mini_rotates_only_some_of_a_head(tmp_path: Path) -> None:
    phi = tiny("Phi3", num_key_value_heads=2, intermediate_size=6)
    files = files_of(phi, tmp_path / "hf")
    for config in ({"partial_rotary_factor": 0.75}, {"rope_parameters": {"partial_rotary_factor": 0.75}}):
        with pytest.raises(RefusedError, match=r"partial_rotary_factor = 0\.75"):
            converted(files, "hf:llama", tmp_path, config)
