"""A file of a DCP folder was "damaged", config.json "a message of a server", one shard a whole checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import say
from conftest import FIXTURES


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp"])
@pytest.mark.parametrize("command", ["inspect", "keys", "validate"])
def test_the_folder_of_dcp_is_named(command: str, name: str) -> None:
    said = say(command, FIXTURES / "dcp4" / name)
    assert said.code == 3
    assert "a part of a DCP folder" in said.err
    assert said.err.endswith(f"  -> ckptool inspect {FIXTURES / 'dcp4'}\n")


def folder(tmp_path: Path) -> Path:
    out = tmp_path / "model"
    assert say("convert", FIXTURES / "model.safetensors", "-o", out, "--max-shard-size", "80").code == 0
    (out / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (out / "notes.json").write_text("{}")
    return out


def test_json_beside_weights_is_not_a_failed_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder(tmp_path)
    for name, words in (
        ("config.json", "JSON text, the model's configuration, not the weights"),
        ("notes.json", "JSON"),
    ):
        said = say("inspect", out / name)
        assert said.code == 3
        assert words in said.err and "server" not in said.err
        assert said.err.endswith(f"-> ckptool inspect {out}\n")
    monkeypatch.chdir(out)
    assert say("convert", "config.json", "-o", "x.pth").err.endswith("-> ckptool inspect .\n")
    alone = shutil.copy(out / "config.json", tmp_path)
    assert "a message of a server, or a configuration" in say("inspect", alone).err


def test_one_shard_says_that_it_is_one(tmp_path: Path) -> None:
    out = folder(tmp_path)
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 1
    said = say("inspect", shards[1])
    assert said.code == 0
    assert f"it is shard 2 of {len(shards)}: the rest of the checkpoint is in its folder" in said.out
    assert f"-> ckptool inspect {out}\n" in said.out
    assert "it is shard" not in say("inspect", out).out
    assert "it is shard" not in say("inspect", FIXTURES / "model.safetensors").out
