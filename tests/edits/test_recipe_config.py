"""A recipe makes the ``config.json`` with which transformers loads the model, or says what is not known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import FIXTURES

import ckptool

PARTS = FIXTURES / "llama_parts"


def converted(folder: Path, out: Path) -> ckptool.Checkpoint:
    made = ckptool.convert(folder, "safetensors", to_names="hf:llama", max_shard_size=1000)
    ckptool.save(made, out)
    return made


def test_transformers_loads_the_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    converted(PARTS, tmp_path / "hf")
    model, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()), info
    assert (model.config.hidden_size, model.config.num_key_value_heads, model.config.vocab_size) == (8, 2, 12)
    assert str(model.dtype) == "torch.bfloat16"


@pytest.mark.parametrize(
    ("change", "unknown"), [({"use_scaled_rope": True}, "rope_scaling"), ({"norm_eps": None}, "rms")]
)
def test_a_field_that_is_not_known_is_named(change: dict[str, object], unknown: str, tmp_path: Path) -> None:
    shutil.copytree(PARTS, tmp_path / "parts")
    params = tmp_path / "parts" / "params.json"
    params.write_text(json.dumps(json.loads(params.read_text()) | change))
    made = converted(tmp_path / "parts", tmp_path / "hf")
    assert not (tmp_path / "hf" / "config.json").exists()
    assert any("config.json is not made" in note and unknown in note for each in made.changes for note in each.notes)


def test_a_config_that_is_there_is_kept(tmp_path: Path) -> None:
    shutil.copytree(PARTS, tmp_path / "parts")
    text = '{"model_type": "llama", "mine": 1}'
    (tmp_path / "parts" / "config.json").write_text(text)
    converted(tmp_path / "parts", tmp_path / "hf")
    assert (tmp_path / "hf" / "config.json").read_text() == text
