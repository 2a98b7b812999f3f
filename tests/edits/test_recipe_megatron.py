"""Models of Megatron-LM under the names of transformers: against Megatron's logits, and models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FIXTURES
from helpers.megatron_folders import arguments, save_megatron
from safetensors.torch import load_file

import ckptool
from ckptool.base.errors import RefusedError

RANKS = FIXTURES / "ranks"
#: The state dict in each, and whether its weights are of 16 bits.
LLAMAS = {
    "megatron_tp2": ("model", False),
    "megatron_pp2": ("model", True),
    "megatron_tp2_pp2": ("model", False),
    "megatron_dist_tp2/iter_0000002": (None, False),
    "megatron_dist_pp2/iter_0000002": (None, True),
}
HEADS, GROUPS, SIZE, WIDTH, INNER, LAYERS, ROWS = 4, 2, 2, 8, 6, 2, 13


def config(name: str, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": ROWS,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": SIZE,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    return getattr(transformers, f"{name}Config")(**(sizes | more))


def loaded(name: str, folder: Path, own: Any) -> Any:
    """The model that transformers makes of a folder, in which it misses nothing and leaves nothing over."""
    transformers = pytest.importorskip("transformers")
    own.save_pretrained(folder)
    model, info = getattr(transformers, f"{name}ForCausalLM").from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def as_megatron(state: dict[str, torch.Tensor], padding: int = 3) -> dict[str, torch.Tensor]:
    """The tensors of a model of transformers as Megatron-LM has them."""
    made = {}
    pad = torch.full((padding, WIDTH), 9.0)
    for name, value in state.items():
        start, _, rest = name.removeprefix("model.").rpartition("self_attn." if "self_attn" in name else "mlp.")
        layer = start.replace("layers.", "decoder.layers.")
        if rest.startswith("q_proj"):
            kind = rest.removeprefix("q_proj.")
            heads = [state[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            groups = zip(*(tensor.chunk(GROUPS) for tensor in heads))
            made[f"{layer}self_attention.linear_qkv.{kind}"] = torch.cat([part for group in groups for part in group])
        elif rest in ("q_norm.weight", "k_norm.weight"):
            made[f"{layer}self_attention.{rest[0]}_layernorm.weight"] = value
        elif rest == "o_proj.weight":
            made[layer + "self_attention.linear_proj.weight"] = value
        elif rest == "gate_proj.weight":
            made[layer + "mlp.linear_fc1.weight"] = torch.cat([value, state[name.replace("gate", "up")]])
        elif rest == "down_proj.weight":
            made[layer + "mlp.linear_fc2.weight"] = value
        elif name.endswith("input_layernorm.weight"):
            made[name.replace("model.", "decoder.")] = value
        elif name.endswith("post_attention_layernorm.weight"):
            made[name.replace("model.", "decoder.").replace("post_attention", "pre_mlp")] = value
        elif name == "model.norm.weight":
            made["decoder.final_layernorm.weight"] = value
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            own = "embedding.word_embeddings.weight" if "embed" in name else "output_layer.weight"
            made[own] = torch.cat([value, pad])
    return made


def run_of(tensor: int = 1, pipeline: int = 1, **more: object) -> Any:
    own = {"num_layers": LAYERS, "num_query_groups": GROUPS, "kv_channels": SIZE, "swiglu": True, "vocab_size": ROWS}
    return arguments(tensor, pipeline, **(own | {"group_query_attention": True} | more))


@pytest.mark.parametrize("name", LLAMAS)
def test_logits_are_those_of_megatron(name: str, tmp_path: Path) -> None:
    key, short = LLAMAS[name]
    made = ckptool.convert(
        RANKS / name, "safetensors", key=key, to_names="hf:llama", max_shard_size=1000, allow_loss=["entries"]
    )
    ckptool.save(made, tmp_path / "hf")
    oracle = load_file(RANKS / f"{name.partition('/')[0]}.safetensors")
    layers = len({key for key in ckptool.open(tmp_path / "hf") if "input_layernorm" in key})
    model = loaded("Llama", tmp_path / "hf", config("Llama", num_hidden_layers=layers))
    with torch.no_grad():
        logits = model(oracle["logits.input"]).logits
    wanted = oracle["logits.output"][..., :ROWS]
    assert torch.allclose(logits.float(), wanted.float(), atol=1e-2 if short else 1e-6, rtol=0)


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3")]
)
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (2, 2)])
def test_tensors_are_those_of_transformers(family: str, name: str, tensor: int, pipeline: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    own = config(name)
    torch.manual_seed(3)
    state = getattr(transformers, f"{name}ForCausalLM")(own).state_dict()
    state = {key: torch.randn_like(value) for key, value in state.items()}
    folder = save_megatron(tmp_path, as_megatron(state), run_of(tensor, pipeline), LAYERS)
    made = ckptool.convert(folder, "safetensors", key="model", to_names=f"hf:{family}", max_shard_size=1000)
    ckptool.save(made, tmp_path / "hf")
    model = loaded(name, tmp_path / "hf", own).state_dict()
    assert model.keys() == state.keys()
    assert all(torch.equal(model[key], value) for key, value in state.items())


def test_a_vocabulary_of_unknown_size_keeps_its_padding(tmp_path: Path) -> None:
    model = as_megatron(load_hf(tmp_path))
    folder = save_megatron(tmp_path / "run", model, run_of(vocab_size=None), LAYERS)
    made = ckptool.convert(folder, "safetensors", key="model", to_names="hf:llama")
    assert made["model"]["model.embed_tokens.weight"].shape == (ROWS + 3, WIDTH)
    assert any("keeps its 16 rows" in note for change in made.changes for note in change.notes)


def load_hf(tmp_path: Path) -> dict[str, torch.Tensor]:
    transformers = pytest.importorskip("transformers")
    return dict(transformers.LlamaForCausalLM(config("Llama")).state_dict())


def test_arguments_in_a_file_of_their_own(tmp_path: Path) -> None:
    """The distributed format of Megatron-core up to 0.16 has them in common.pt."""
    model = as_megatron(load_hf(tmp_path))
    folder = tmp_path / "iter_0000001"
    torch.save(model, tmp_path / "model.pth")
    ckptool.save(ckptool.convert(tmp_path / "model.pth", "dcp"), folder)
    with pytest.raises(RefusedError, match=r"kv_channels.* not known"):
        ckptool.convert(folder, "safetensors", to_names="hf:llama")
    torch.save({"args": run_of(), "iteration": 1}, folder / "common.pt")
    assert len(list(ckptool.convert(folder, "safetensors", to_names="hf:llama"))) == 21


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.pop("decoder.layers.1.mlp.linear_fc2.weight"), "linear_fc2.weight' is missing"),
        (lambda model: model.update({"decoder.adapter.weight": torch.ones(2)}), "has no name for"),
        (lambda model: model.update({"decoder.layers.0.mlp.linear_fc1.weight": torch.ones(3, 8)}), "does not fit rule"),
        (
            lambda model: model.update({"decoder.layers.0.self_attention.linear_qkv.weight": torch.ones(15, 8)}),
            "does not fit rule",
        ),
    ],
)
def test_another_model_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    model = as_megatron(load_hf(tmp_path))
    change(model)
    folder = save_megatron(tmp_path, model, run_of(), LAYERS)
    with pytest.raises(RefusedError, match=words):
        ckptool.convert(folder, "safetensors", key="model", to_names="hf:llama")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"swiglu": False}, "no gate"),
        ({"normalization": "LayerNorm"}, "LayerNorm"),
        ({"apply_layernorm_1p": True}, "minus 1"),
        ({"rotary_interleaved": True}, "interleaved"),
        ({"rotary_percent": 0.5}, "rotary_percent = 0.5"),
        ({"num_layers": 4}, "says 4"),
    ],
)
def test_arguments_of_another_model_are_refused(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = save_megatron(tmp_path, as_megatron(load_hf(tmp_path)), run_of(), LAYERS)
    for path in folder.glob("*/*.pt"):
        state = torch.load(path, weights_only=False)
        state["args"].__dict__.update(values)
        torch.save(state, path)
    with pytest.raises(RefusedError, match=words):
        ckptool.convert(folder, "safetensors", key="model", to_names="hf:llama")


def test_tensors_that_cannot_be_cut_are_refused(tmp_path: Path) -> None:
    model = as_megatron(load_hf(tmp_path))
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    model[name] = model[name].to_sparse()
    torch.save({"args": run_of(), "model": model}, tmp_path / "sparse.pt")
    with pytest.raises(RefusedError, match="it is sparse"):
        ckptool.convert(tmp_path / "sparse.pt", "safetensors", key="model", to_names="hf:llama")
    stacked = {"embedding.word_embeddings.weight": torch.ones(16, 8)}
    stacked["decoder.layers.mlp.linear_fc2.weight"] = torch.ones(1 << 40, 0)
    torch.save({"args": run_of(), "model": stacked}, tmp_path / "stacked.pt")
    with pytest.raises(RefusedError, match="nothing here becomes that"):
        ckptool.convert(tmp_path / "stacked.pt", "safetensors", key="model", to_names="hf:llama")
