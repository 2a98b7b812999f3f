"""config.json stays true: what transformers loads from an edited folder has every weight, and none that is new."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say

import ckptool
from ckptool.base.errors import RefusedError
from ckptool.checkpoint.checkpoint import Checkpoint

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HIDDEN: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
T5: dict[str, Any] = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 3, "num_decoder_layers": 4}
BART: dict[str, Any] = {"d_model": 16, "encoder_layers": 3, "decoder_layers": 4, "encoder_attention_heads": 2}
BART |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaForCausalLM", HIDDEN | {"tie_word_embeddings": False}, "model.layers"),
    "qwen2": ("Qwen2ForCausalLM", HIDDEN | {"num_key_value_heads": 2, "tie_word_embeddings": False}, "model.layers"),
    "bert": ("BertModel", HIDDEN, "encoder.layer"),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 4, "n_head": 2}, "transformer.h"),
    "opt": ("OPTForCausalLM", HIDDEN | {"ffn_dim": 32, "word_embed_proj_dim": 16}, "model.decoder.layers"),
    "t5": ("T5ForConditionalGeneration", T5, "decoder.block"),
    "bart": ("BartForConditionalGeneration", BART, "model.decoder.layers"),
}


def saved(name: str, folder: Path, **more: Any) -> Path:
    """A small model, as transformers saves it in shards."""
    kind, config, _ = MODELS[name]
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**SMALL | config | more))
    model.save_pretrained(folder, max_shard_size="10KB")
    return folder


def loaded(name: str, folder: Path) -> Any:
    """The model that transformers makes of a folder; every weight is from it, and all of it is used."""
    model_class = getattr(transformers, MODELS[name][0])
    model, info = model_class.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert {kind: list(keys) for kind, keys in info.items() if keys} == {}
    return model


def config_of(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_are_dropped(name: str, tmp_path: Path) -> None:
    folder, layers = saved(name, tmp_path / "in"), MODELS[name][2]
    before = loaded(name, folder).state_dict()
    call = ("drop", folder, f"{layers}.[23].*", "-o", tmp_path / "out")
    noted = say(*call, "--dry-run")
    assert "config.json no longer matches the weights; --update-config updates it:" in noted.out
    assert say(*call, "--update-config").code == 0
    model = loaded(name, tmp_path / "out")
    after = model.state_dict()
    assert not any(f"{layers}.{number}." in key for key in after for number in (2, 3))
    assert all(torch.equal(value, before[key]) for key, value in after.items())
    differ = {key for key, value in config_of(tmp_path / "out").items() if config_of(folder)[key] != value}
    assert len(differ & {"num_hidden_layers", "n_layer", "num_decoder_layers", "decoder_layers"}) == 1
    assert "encoder_layers" not in differ and "num_layers" not in differ


@pytest.mark.parametrize("name", MODELS)
def test_a_cast(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "in")
    assert say("cast", folder, "--to-dtype", "bf16", "-o", tmp_path / "out", "--update-config").code == 0
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"
    assert loaded(name, tmp_path / "out").dtype == torch.bfloat16


def test_a_head_that_is_dropped_is_the_embedding(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "in")
    said = say("drop", folder, "lm_head.weight", "-o", tmp_path / "out", "--update-config")
    assert '+ "tie_word_embeddings": true' in said.out
    model = loaded("llama", tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_vocabulary_that_grows(tmp_path: Path) -> None:
    folder, larger = saved("bert", tmp_path / "in"), saved("bert", tmp_path / "larger", vocab_size=60)
    with ckptool.open(folder) as checkpoint:
        others = ckptool.drop(larger, [f"{part}.*" for part in ("encoder", "pooler", "embeddings.[!w]*")])
        edited = ckptool.merge(ckptool.drop(checkpoint, ["embeddings.word_embeddings.*"]), others)
        ckptool.save(ckptool.update_config(edited), tmp_path / "out")
    assert config_of(tmp_path / "out")["vocab_size"] == 60
    assert loaded("bert", tmp_path / "out").embeddings.word_embeddings.weight.shape == (60, 16)


def test_inner_configs(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "in")
    config = config_of(folder)
    (folder / "config.json").write_text(json.dumps({"text_config": config, "vision_config": {"num_hidden_layers": 9}}))
    with ckptool.open(folder) as checkpoint:
        edited = ckptool.update_config(ckptool.drop(checkpoint, ["model.layers.3.*"]))
    assert edited.changes[-1].words == "config.json: text_config.num_hidden_layers 4 -> 3"


def test_layers_in_the_middle_have_no_true_config(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "in")
    with ckptool.open(folder) as checkpoint:
        edited = ckptool.drop(checkpoint, ["model.layers.1.*"])
        with pytest.raises(RefusedError, match=r"layers after model\.layers\.1 stay"):
            ckptool.update_config(edited)
        steps = [("rename", "model.layers.2.*=model.layers.1.*"), ("rename", "model.layers.3.*=model.layers.2.*")]
        renamed = ckptool.edit(edited, steps)
        ckptool.save(ckptool.update_config(renamed), tmp_path / "out")
    assert loaded("llama", tmp_path / "out").config.num_hidden_layers == 3


@pytest.mark.parametrize(
    "text", [None, "[1]", "no json", "[" * 100_000, '{"num_hidden_layers": "4"}', '{"a.b": {"num_hidden_layers": 4}}']
)
def test_other_configs_stay_as_they_are(text: str | None, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "in")
    if text is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(text)
    said = say("drop", folder, "model.layers.3.*", "-o", tmp_path / "out")
    assert said.code == 0 and "not true" not in said.all
    if text is None:
        again = say("drop", folder, "model.layers.3.*", "-o", tmp_path / "again", "--update-config")
        assert (again.code, "there is no config.json beside its weights" in again.err) == (4, True)
    else:
        assert (tmp_path / "out" / "config.json").read_text() == text


EDITS: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "slim": ckptool.slim,
    "redact": ckptool.redact,
    "sanitize": ckptool.sanitize,
    "repack": ckptool.repack,
    "remap": lambda checkpoint: ckptool.remap(checkpoint, "cpu"),
    "prefix and back": lambda checkpoint: ckptool.strip_module(ckptool.add_module(checkpoint)),
    "keep all": lambda checkpoint: ckptool.keep(checkpoint, ["*"]),
    "safetensors": lambda checkpoint: ckptool.convert(checkpoint, "safetensors", max_shard_size="20KB"),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_every_weight_after_each_edit(name: str, edit: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "in")
    before = loaded(name, folder).state_dict()
    with ckptool.open(folder) as checkpoint:
        edited = EDITS[edit](checkpoint)
        ckptool.save(ckptool.update_config(edited), tmp_path / "out")
    after = loaded(name, tmp_path / "out").state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in after.items())
