"""Names of weights besides the usual ones: variants, adapters, diffusers, several sets in one folder."""

from __future__ import annotations

import json
from pathlib import Path

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.base.errors import UnreadableError
from ckptool.cli.main import run
from ckptool.formats.checkpoint_search import find_checkpoints

STATE = {f"layers.{n}.weight": torch.full((3, 2), float(n)) for n in range(4)}


def save(path: Path, state: dict[str, torch.Tensor]) -> None:
    (save_file if path.suffix == ".safetensors" else torch.save)(state, path)


def shards(folder: Path, pattern: str, index: str) -> Path:
    """Two shards: ``pattern`` has a place for the number."""
    folder.mkdir(exist_ok=True, parents=True)
    places = {}
    for number in (1, 2):
        part = dict(list(STATE.items())[(number - 1) * 2 : number * 2])
        save(folder / pattern.format(number), part)
        places |= dict.fromkeys(part, pattern.format(number))
    (folder / index).write_text(json.dumps({"metadata": {"total_size": 96}, "weight_map": places}))
    return folder


def notes(folder: Path) -> dict[str, str]:
    with ckptool.open(folder) as checkpoint:
        return {problem.code: problem.message for problem in checkpoint.container.problems}


#: Shards of transformers, and of newer and older versions of diffusers.
SHARDED = {
    "model.fp16-{:05d}-of-00002.safetensors": "model.safetensors.index.fp16.json",
    "pytorch_model.fp16-{:05d}-of-00002.bin": "pytorch_model.bin.index.fp16.json",
    "diffusion_pytorch_model.fp16-{:05d}-of-00002.safetensors": "diffusion_pytorch_model.safetensors.index.fp16.json",
    "diffusion_pytorch_model-{:05d}-of-00002.fp16.safetensors": "diffusion_pytorch_model.safetensors.index.fp16.json",
    "model.non_ema-{:05d}-of-00002.safetensors": "model.safetensors.index.non_ema.json",
}


@pytest.mark.parametrize("pattern", SHARDED)
def test_shards_of_a_variant(pattern: str, tmp_path: Path) -> None:
    folder = shards(tmp_path / "in", pattern, SHARDED[pattern])
    told = notes(folder)
    variant = "non_ema" if "non_ema" in pattern else "fp16"
    assert set(told) == {"variant"} and f"variant='{variant}'" in told["variant"]
    for path in (folder, folder / SHARDED[pattern]):
        with ckptool.open(path) as checkpoint:
            assert [entry.key for entry in checkpoint.survey.tensors] == list(STATE)
    assert ckptool.validate(folder)["status"] == "valid"
    (folder / SHARDED[pattern]).unlink()
    (folder / pattern.format(1)).unlink()
    told = notes(folder)
    assert f"{pattern.format(1)} is not there" in told["incomplete"] and SHARDED[pattern] in told["no-index"]


@pytest.mark.parametrize("pattern", list(SHARDED)[:3])
def test_an_edit_keeps_the_names_of_a_variant(pattern: str, tmp_path: Path) -> None:
    folder = shards(tmp_path / "in", pattern, SHARDED[pattern])
    with ckptool.open(folder) as checkpoint:
        ckptool.save(ckptool.add_module(checkpoint), tmp_path / "out")
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    # Another one takes its place: nothing in it is foreign.
    with ckptool.open(folder) as checkpoint:
        ckptool.save(ckptool.add_module(checkpoint), tmp_path / "out", force=True)


@pytest.mark.parametrize(
    "name",
    [
        *("adapter_model.safetensors", "adapter_model.bin", "diffusion_pytorch_model.bin", "model.fp16.safetensors"),
        "diffusion_pytorch_model.fp16.safetensors",
    ],
)
def test_an_edit_keeps_the_name_of_a_file(name: str, tmp_path: Path) -> None:
    """peft looks for adapter_model.safetensors, and finds no model.safetensors."""
    folder = tmp_path / "in"
    folder.mkdir()
    save(folder / name, STATE)
    (folder / "config.json").write_text("{}")
    with ckptool.open(folder) as checkpoint:
        ckptool.save(ckptool.add_module(checkpoint), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {name, "config.json"}


def test_a_conversion_of_diffusers_keeps_its_name(tmp_path: Path) -> None:
    folder = shards(
        tmp_path / "in", "diffusion_pytorch_model-{:05d}-of-00002.bin", "diffusion_pytorch_model.bin.index.json"
    )
    assert run(["convert", str(folder), "-o", str(tmp_path / "out"), "--to-format", "safetensors"]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["diffusion_pytorch_model.safetensors"]
    folder = shards(tmp_path / "two", "pytorch_model-{:05d}-of-00002.bin", "pytorch_model.bin.index.json")
    assert run(["convert", str(folder), "-o", str(tmp_path / "out2"), "--to-format", "safetensors"]) == 0
    assert [path.name for path in (tmp_path / "out2").iterdir()] == ["model.safetensors"]


def test_weights_of_no_variant_come_first(tmp_path: Path) -> None:
    """As from_pretrained without ``variant`` has it: a .bin rather than a variant in safetensors."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    half = {name: tensor.half() for name, tensor in STATE.items()}
    save(folder / "model.fp16.safetensors", half)
    assert "variant='fp16'" in notes(folder)["variant"]
    save(folder / "pytorch_model.bin", STATE)
    told = notes(folder)
    assert "variant" not in told
    assert (
        "loaded from pytorch_model.bin" in told["other-weights"] and "model.fp16.safetensors" in told["other-weights"]
    )
    save(folder / "model.safetensors", STATE)
    told = notes(folder)
    assert "loaded from model.safetensors" in told["other-weights"]
    assert "pytorch_model.bin" in told["other-weights"] and "model.fp16.safetensors" in told["other-weights"]


def test_a_pipeline_of_diffusers_is_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = tmp_path / "pipeline"
    for part, name in (
        ("unet", "diffusion_pytorch_model"),
        ("vae", "diffusion_pytorch_model"),
        ("text_encoder", "model"),
    ):
        (top / part).mkdir(parents=True)
        (top / part / "config.json").write_text("{}")
        save(top / part / f"{name}.safetensors", STATE)
        save(top / part / f"{name}.fp16.safetensors", {key: value.half() for key, value in STATE.items()})
    (top / "scheduler").mkdir()
    (top / "scheduler" / "scheduler_config.json").write_text("{}")
    (top / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    found = [Path(target.path).name for target in find_checkpoints([str(top)])]  # type: ignore[union-attr]
    assert found == ["text_encoder", "unet", "vae"]
    assert run(["inspect", str(top)]) == 0
    told = capsys.readouterr().out
    assert all(part in told for part in found) and "3 files" in told
    assert run(["validate", str(top)]) == 0
    with pytest.raises(UnreadableError, match=r"diffusers pipeline with .*: text_encoder, unet and vae"):
        ckptool.open(top)
    assert run(["add-module", str(top / "unet"), "-o", str(tmp_path / "out")]) == 0
    found_there = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    wanted = {f"module.{name}": tensor for name, tensor in STATE.items()}
    assert oracle.difference({name: found_there[name] for name in wanted}, wanted) == ""
