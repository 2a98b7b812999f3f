"""One part of a checkpoint never passes for the whole: by every naming scheme, for every command that writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from command_line import say
from conftest import FIXTURES
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.cli.main import cli
from ckptool.formats.rank_part import part_of

State = dict[str, torch.Tensor]


def whole() -> State:
    torch.manual_seed(0)
    return {"layer.weight": torch.randn(8, 4), "norm.weight": torch.ones(4), "head.weight": torch.randn(4, 4)}


def slices(state: State, number: int) -> State:
    """The half of a rank; what is no matrix, each rank has."""
    return {name: value.chunk(2)[number].clone() if value.dim() > 1 else value for name, value in state.items()}


def shards(state: State, number: int) -> State:
    return {name: value for at, (name, value) in enumerate(state.items()) if at % 2 == number}


#: The name of each part as its writer gives it, and what the part holds.
SCHEMES: Mapping[str, tuple[Callable[[int], str], Callable[[State, int], State]]] = {
    "Meta": (lambda number: f"consolidated.{number:02d}.pth", slices),
    "DeepSeek": (lambda number: f"model{number}-mp2.safetensors", slices),
    "nanotron": (lambda number: f"model_weight_pp-rank-0-of-1_tp-rank-{number}-of-2.safetensors", slices),
    "GPT-NeoX": (lambda number: f"layer_02-model_{number:02d}-model_states.pt", slices),
    "metaseq": (lambda number: f"reshard-model_part-{number}.pt", slices),
    "metaseq shards": (lambda number: f"checkpoint_last-model_part-{number}-shard0.pt", slices),
    "fairseq": (lambda number: f"checkpoint_last-shard{number}.pt", slices),
    "vLLM": (lambda number: f"model-rank-{number}-part-0.safetensors", slices),
    "rank": (lambda number: f"model_rank{number}.pt", slices),
    "rank with blanks": (lambda number: f"my model rank {number}.pt".replace("rank ", "rank_"), slices),
    "part": (lambda number: f"weights.part-{number}.safetensors", shards),
    "torchtune": (lambda number: f"hf_model_{number + 1:04d}_0.pt", shards),
    "Hugging Face": (lambda number: f"model-{number + 1:05d}-of-00002.safetensors", shards),
    "Hugging Face in torch": (lambda number: f"pytorch_model-{number + 1:05d}-of-00002.bin", shards),
    "like Hugging Face": (lambda number: f"weights_{number + 1:03d}-of-002.pt", shards),
    "from 0": (lambda number: f"weights-{number:05d}-of-00002.pt", shards),
}
#: Those of which a folder is read as the whole.
JOINED = ("torchtune", "Hugging Face", "Hugging Face in torch", "like Hugging Face", "from 0")


def save(state: State, path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)


def load(path: Path) -> State:
    loaded: State = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    return loaded


def parts(scheme: str, folder: Path) -> list[Path]:
    name, cut = SCHEMES[scheme]
    folder.mkdir()
    for number in range(2):
        save(cut(whole(), number), folder / name(number))
    return [folder / name(number) for number in range(2)]


#: What each command takes besides its input and its output.
ARGUMENTS: dict[str, Callable[[Path], list[str]]] = {
    "add-module": lambda path: [],
    "average": lambda path: [str(path)],
    "cast": lambda path: ["--to-dtype", "bfloat16"],
    "convert": lambda path: [],
    "drop": lambda path: ["head.weight"],
    "edit": lambda path: ["--add-prefix", "m."],
    "extract": lambda path: ["layer.weight"],
    "match": lambda path: [str(path), "--apply"],
    "merge": lambda path: [str(path)],
    "redact": lambda path: ["--redact", "all"],
    "remap": lambda path: ["--to", "cuda:1"],
    "rename": lambda path: ["--rename", "layer.*=block.*"],
    "salvage": lambda path: [],
    "sanitize": lambda path: [],
    "set": lambda path: ["epoch=3"],
    "slim": lambda path: [],
    "strip-module": lambda path: [],
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_part_is_said_to_be_one(scheme: str, tmp_path: Path) -> None:
    for number, path in enumerate(parts(scheme, tmp_path / "model")):
        for command in ("inspect", "validate"):
            said = say(command, path)
            assert said.code == 0
            assert f"part {number + 1} of 2" in said.out


@pytest.mark.parametrize("command", ARGUMENTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_command_passes_a_part_off_as_the_whole(scheme: str, command: str, tmp_path: Path) -> None:
    path, _ = parts(scheme, tmp_path / "model")
    suffix = ".pth" if path.suffix != ".safetensors" and command != "convert" else ".safetensors"
    out = tmp_path / f"whole{suffix}"
    words = [command, str(path), *ARGUMENTS[command](path), "-o", str(out)]
    said = say(*words)
    if command == "match":  # it fits as it is
        words += ["--key", "."]
    assert (said.code, out.exists()) == (4, False), said.all
    assert "part 1 of 2" in said.err
    assert "--allow-loss shards writes this part alone" in said.err or "-> ckptool convert" in said.err
    printed = [line.split("-> ", 1)[1] for line in said.err.splitlines() if "-> " in line]
    assert not any(path.name in line for line in printed)
    alone = say(*words, "--allow-loss", "shards")
    assert "part 1 of 2" not in alone.err
    if alone.code == 0:
        assert out.exists()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_folder_is_joined_or_refused(scheme: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    first, second = parts(scheme, folder)
    out = tmp_path / "out.safetensors"
    said = say("convert", folder, "-o", out)
    if scheme in JOINED:
        assert said.code == 0, said.err
        joined, expected = load_file(out), whole()
        assert joined.keys() == expected.keys()
        assert all(torch.equal(joined[name], value) for name, value in expected.items())
        second.unlink()
        lacking = say("convert", folder, "-o", tmp_path / "half.safetensors")
        assert lacking.code != 0
        assert not (tmp_path / "half.safetensors").exists()
    else:
        assert (said.code, out.exists()) == (3, False)
        assert first.name in said.err
        assert f"convert {first}" not in said.err


def test_shards_that_are_merged_are_the_whole(tmp_path: Path) -> None:
    first, second = parts("torchtune", tmp_path / "model")
    assert say("merge", first, second, "-o", tmp_path / "out.pth").code == 0
    assert load(tmp_path / "out.pth").keys() == whole().keys()


def test_the_last_epoch_of_torchtune_is_read(tmp_path: Path) -> None:
    for epoch in (0, 1, 10):
        for number in range(2):
            state = {name: value + epoch for name, value in shards(whole(), number).items()}
            (tmp_path / "model").mkdir(exist_ok=True)
            save(state, tmp_path / "model" / f"hf_model_{number + 1:04d}_{epoch}.pt")
    assert say("convert", tmp_path / "model", "-o", tmp_path / "out.pth").code == 0
    assert torch.equal(load(tmp_path / "out.pth")["norm.weight"], whole()["norm.weight"] + 10)
    assert "skipped: hf_model_0001_1.pt" in say("inspect", tmp_path / "model").out
    assert "files of 2 shards are there; nothing records" in say("validate", tmp_path / "model").out


@pytest.mark.parametrize("name", ["model_rank{}.pt", "fold-{}-of-2.pth", "ep1-ba5-rank{}.pt", "epoch_{:03d}_of_100.pt"])
def test_copies_and_files_of_their_own_are_no_parts(name: str, tmp_path: Path) -> None:
    """With data parallelism each rank may save the whole; five folds of one model are five models."""
    first = 1 if "fold" in name else 0
    for number in range(2):
        state = whole() if "rank" in name else {key: value + number for key, value in whole().items()}
        torch.save(state, tmp_path / name.format(first + number))
    with ckptool.open(tmp_path / name.format(first)) as checkpoint:
        assert part_of(checkpoint) is None


@pytest.mark.parametrize("name", ["consolidated.00.pth", "model_rank0.pt", "x_last-shard0.pt", "model0-mp1.pt"])
def test_a_lone_first_part_is_a_whole(name: str, tmp_path: Path) -> None:
    torch.save(whole(), tmp_path / name)
    with ckptool.open(tmp_path / name) as checkpoint:
        assert part_of(checkpoint) is None
    assert say("convert", tmp_path / name, "-o", tmp_path / "out.safetensors").code == 0


def _adapter(folder: Path) -> str:
    """A LoRA adapter of ``q_proj``."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file(
        {name.format("A"): torch.ones(2, 8), name.format("B"): torch.ones(8, 2)}, folder / "adapter_model.safetensors"
    )
    return str(folder)


#: Commands that refuse these files, or write an adapter.
OTHERS = {"dequantize", "lora convert", "lora extract", "lora resize"}
#: Commands that need a language model, with what they take besides it.
LANGUAGE: dict[str, Callable[[Path], list[str]]] = {
    "lora merge": lambda folder: [_adapter(folder / "adapter")],
    "resize": lambda folder: ["--vocab", "16"],
}


@pytest.mark.parametrize("command", LANGUAGE)
def test_no_command_passes_a_part_of_a_language_model_off_as_the_whole(command: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    state = {"model.embed_tokens.weight": torch.ones(12, 8), "model.layers.0.self_attn.q_proj.weight": torch.ones(8, 8)}
    for number in range(2):
        save({name: value + number for name, value in state.items()}, folder / f"consolidated.0{number}.pth")
    words = [command, folder / "consolidated.00.pth", *LANGUAGE[command](tmp_path), "-o", tmp_path / "out.pth"]
    said = say(*words)
    assert (said.code, (tmp_path / "out.pth").exists()) == (4, False), said.all
    assert "part 1 of 2" in said.err
    assert say(*words, "--allow-loss", "shards").code == 0


def test_every_command_that_writes_is_tried() -> None:
    with cli.make_context("ckptool", ["--help"], resilient_parsing=True) as ctx:
        writing = {
            name
            for name in cli.list_commands(ctx)
            if (command := cli.get_command(ctx, name)) is not None
            and any(parameter.name == "allow_loss" for parameter in command.params)
        }
    assert writing == {*ARGUMENTS, *LANGUAGE, *OTHERS}


#: One file of a save by several ranks, in ``fixtures/files/ranks``.
OF_ONE_RANK = (
    "fsdp2_3/model.rank0.pth", "hsdp1/checkpoint_rank1.pt", "local_2/pytorch_model_fsdp_rank0.bin",
    "tp_3/mp_rank_00.pt", "zero2_bf16/global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "zero3_bf16/global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt",
    "megatron_tp2/iter_0000002/mp_rank_01/model_optim_rng.pt",
)  # fmt: skip


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("name", OF_ONE_RANK)
def test_the_file_of_one_rank_is_refused_like_a_shard(name: str, suffix: str, tmp_path: Path) -> None:
    path, out = FIXTURES / "ranks" / name, tmp_path / f"out{suffix}"
    said = say("convert", path, "-o", out)
    assert (said.code, out.exists()) == (4, False), said.all
    assert "rank" in said.err and "  -> ckptool" in said.err
    assert str(path) not in said.err.partition("  -> ckptool")[2]
    alone = say("convert", path, "-o", tmp_path / "out.pth", "--allow-loss", "shards")
    assert alone.code == 0 and "still a part" in alone.out


@pytest.mark.parametrize(
    "name", ["llama_parts/consolidated.00.pth", "ranks/megatron_tp2/iter_0000002/mp_rank_01/model_optim_rng.pt",
             "ranks/zero2_bf16/global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
             "ranks/zero3_bf16/global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt",
             "ranks/fsdp2_3/model.rank0.pth", "sharded/tp.rank3.pth"]
)  # fmt: skip
def test_a_part_without_the_others_is_invalid(name: str, tmp_path: Path) -> None:
    """One file alone fails, by itself and in its folder; with all others beside it, it does not."""
    path = tmp_path / Path(name).name
    path.write_bytes((FIXTURES / name).read_bytes())
    for each in (path, tmp_path):
        said = say("validate", each)
        assert (said.code == 1 and "INVALID" in said.out) or (said.code == 3 and "missing" in said.err), said.all
    assert "sharded" in name or say("validate", FIXTURES / name).code == 0


@pytest.mark.parametrize(
    "names", [("lora_rank2",), ("lora_rank2", "lora_rank4"), ("adapter-rank-8", "adapter-rank-16")]
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("pair", [("lora_A", "lora_B"), ("lora_down", "lora_up")])
def test_the_rank_of_an_adapter_is_no_part_of_a_model(
    names: tuple[str, ...], suffix: str, pair: tuple[str, str], tmp_path: Path
) -> None:
    for name in names:
        rank = int("".join(filter(str.isdigit, name)))
        shapes = dict(zip(pair, ((rank, 8), (8, rank))))
        save(
            {f"layer.{half}.weight": torch.randn(shape) for half, shape in shapes.items()}, tmp_path / f"{name}{suffix}"
        )
    for path in tmp_path.iterdir():
        said = say("validate", path)
        assert said.code == 0 and "it is part" not in said.out, said.out
    assert say("convert", path, "-o", tmp_path / "out.pth").code == 0
