"""Every command that is printed as the next step works as it is: it is run, and what it writes is loaded."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from command_line import say
from conftest import FIXTURES, corpus_files, needs_corpus
from generated_checkpoints import generated
from printed_commands import FIRST, POLICIES, Walk, output_of, steps
from safetensors.torch import load_file

import ckptool
from ckptool.reports.explaining.known_errors import KNOWN_ERRORS

#: Folders: of DCP, of Hugging Face in .bin, of DeepSpeed.
FOLDERS = (
    *("dcp4", "real/lightning_sharded", "real/megatron_core", "real/accelerate_bin", "real/lora_bin"),
    *("real/sentences", "real/zero0", "real/zero3", "ranks/moe", "ranks/moe_zero2", "ranks/accelerate_fsdp"),
    *("ranks/fsdp2_tied", "ranks/verl_fsdp1", "ranks/local_orig_2", "ranks/partial"),
    *(
        "ranks/megatron_tp2_pp2",
        "ranks/megatron_gpt",
        "ranks/megatron_dist_tp2",
        "ranks/zero_universal",
        "real/pipeline",
    ),
)

# -- every command that is printed -------------------------------------------------------------------------------------

GROUPS = ("ranks", "sharded", "real")
FILES = sorted(path.name for path in FIXTURES.iterdir() if path.suffix != ".tsv" and path.name not in GROUPS)
FILES += sorted(
    f"{group}/{path.name}" for group in GROUPS for path in (FIXTURES / group).iterdir() if path.suffix != ".tsv"
)
#: How many checkpoints are generated.
GENERATED = 500
#: One message for each way to answer: errors with the same topic and the same function have the same commands.
WAYS = {(error.topic, error.answer or len(error.cases)): error.message for error in KNOWN_ERRORS}
MESSAGES = (*WAYS.values(), "KeyError: 'params_ema'", "KeyError: 'step'", "a strange message")


def walk(place: Callable[[Path], str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow everything that the commands print for the checkpoint that ``place`` writes into a folder."""
    monkeypatch.chdir(folder)
    shutil.copy(FIXTURES / "bare.pth", "target.pth")
    for name, text in POLICIES.items():
        Path(name).write_text(text)
    name = place(Path())
    lines = [*map(shlex.split, FIRST.strip().splitlines()), *(["explain", text, "FILE"] for text in MESSAGES)]
    walked = Walk()
    walked.follow([tuple(name if word == "FILE" else word for word in line) for line in lines])
    print(f"{walked.commands} commands were printed and run")
    assert walked.problems == []


def copied(source: Path) -> Callable[[Path], str]:
    def place(folder: Path) -> str:
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / source.name)
        return source.name

    return place


@pytest.mark.sampled(every=45)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_what_is_printed_for_fixtures(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk(copied(FIXTURES / name), tmp_path, monkeypatch)


@needs_corpus
@pytest.mark.sampled(every=45)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", corpus_files(), ids=lambda path: path.name)
def test_what_is_printed_for_real_files(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk(copied(path), tmp_path, monkeypatch)


@pytest.mark.sampled(every=250)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(GENERATED))
def test_what_is_printed_for_generated_checkpoints(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk(partial(generated, number), tmp_path, monkeypatch)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", FOLDERS)
def test_from_within_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is suggested for the folder that one is in works there, and writes nothing into the checkpoint."""
    inner = Path(shutil.copytree(FIXTURES / name, tmp_path / "above/whole"))
    for folder in (inner, *(path for path in inner.rglob("*") if path.is_dir())):
        monkeypatch.chdir(folder)
        before = set(folder.iterdir())
        said = say("inspect", ".")
        for step in steps(said.all):
            assert step != "ckptool inspect ."  # it leads nowhere
            again = say(*shlex.split(step)[1:])
            assert again.code == 0, (folder, step, again.all)
        assert set(folder.iterdir()) == before or not said.out.startswith(".: ")  # a file in it


@pytest.mark.parametrize("folder", ["ranks/torchtitan", "ranks/trainer_zero2"])
@pytest.mark.parametrize("line", ["get F .", "convert F -o out.pth", "match F target.pth", "diff F target.pth"])
def test_the_folder_of_a_checkpoint_leads_to_it_in_the_same_command(
    line: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(FIXTURES / "bare.pth", "target.pth")
    shutil.copytree(FIXTURES / folder, "run")
    (inner,) = Path("run").iterdir()
    said = say(*line.replace("F", "run").split())
    assert said.code == 3
    assert str(inner) in said.err
    shutil.copytree(inner, Path("run", inner.name.partition("-")[0] + "-10"))
    said = say(*line.replace("F", "run").split())
    assert str(inner).replace("-2", "-10") in said.err


@pytest.mark.parametrize("above", ["run", "run/global_step_10"])
def test_folders_of_a_run_lead_to_the_weights_of_its_last_step(
    above: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As verl has them: rank files of several models in the folder of a step, beside the state of the data."""
    monkeypatch.chdir(tmp_path)
    for step in (5, 10):
        for name in ("actor", "critic"):
            shutil.copytree(FIXTURES / "ranks/fsdp2_2", f"run/global_step_{step}/{name}")
        torch.save({"position": 7, "seen": torch.zeros(2)}, f"run/global_step_{step}/data.pt")
    said = say("convert", above, "-o", "out.pth")
    assert said.code == 3
    assert "run/global_step_10/actor" in said.err


def test_a_folder_of_parts_leads_to_no_conversion_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    for rank in range(2):  # the file of another rank is not there
        shutil.copy(FIXTURES / f"ranks/fsdp2_3/model.rank{rank}.pth", f"run/{'ab'[rank]}.pth")
    said = say("convert", "run", "-o", "out.pth")
    assert said.code == 3
    assert steps(said.err) == ["ckptool inspect run/a.pth"]


# -- diff and match: what to do about a difference -------------------------------------------------------------


# -- a next step is a whole command ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("convert tied.pth -o OUT/a.safetensors", "--tied keep-first"),
        ("convert wrapped.pth -o OUT/a.safetensors --strict", "--allow-loss entries"),
        ("convert bare.pth -o OUT/folder", "--to-format safetensors"),
        ("convert bare.pth -o OUT/folder/", "--to-format safetensors --max-shard-size 5GB"),
        ("edit lightning.ckpt --to cpu -o OUT/a.safetensors --strict", "--allow-loss entries"),
        ("strip-module gan.pth -o OUT/a.safetensors", "--key netG"),
        ("sanitize unknown_classes.pth -o OUT/a.pth", "--drop-unknown"),
        ("sanitize whole_in_dict.pth -o OUT/a.pth", "--as-state-dict"),
    ],
)
def test_a_refusal_names_the_options_that_help(
    line: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FIXTURES)
    words = line.replace("OUT", str(tmp_path)).split()
    said = say(*words)
    assert said.code in (2, 4) and options in said.err, said.all
    assert say(*words, *options.split()).code == 0
    assert list(tmp_path.iterdir())


# -- a part of a checkpoint leads to the whole ------------------------------------------------------------------------

RANKS = FIXTURES / "ranks"
#: A file that one rank wrote, the folder of all, and the state dict there; names of fixtures.
PARTS = [
    ("fsdp1/checkpoint_rank0.pt", "fsdp1", "model"),
    ("verl_fsdp1/model_world_size_2_rank_0.pt", "verl_fsdp1", "model"),
    ("tp_2/*1.p*", "tp_2", "state_dict"),
    ("zero3_bf16/global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt", "zero3_bf16/global_step3", "module"),
    ("zero3_bf16/global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero3_bf16/global_step3", "module"),
    ("zero2_bf16/global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero2_bf16/global_step3", "module"),
    ("megatron_tp2/iter_0000002/mp_rank_00/model_optim_rng.pt", "megatron_tp2/iter_0000002", "model"),
    ("megatron_pp2/iter_0000002/mp_rank_00_001/model_optim_rng.pt", "megatron_pp2/iter_0000002", "model"),
]


@pytest.mark.parametrize(("name", "folder", "key"), PARTS)
def test_the_file_of_a_rank_leads_to_the_folder(
    name: str, folder: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is asked of it, the next step is one that works on the whole, and on nothing else."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RANKS / folder.split("/")[0], folder.split("/")[0])
    (part,) = map(str, Path().glob(name))
    assert steps(say("inspect", part).out)[0] == f"ckptool inspect {folder}"
    said = say("validate", part)
    assert steps(said.out) == [f"ckptool inspect {folder}"]
    assert re.search(r"^(part|shards) +warning ", said.out, re.M), said.out
    for options in ([], ["--allow-loss", "entries"], ["--to-format", "safetensors", "--max-shard-size", "5GB"]):
        out = "shards" if "--max-shard-size" in options else "whole.safetensors"
        said = say("convert", part, "-o", out, *options)
        assert said.code == 4 and not Path(out).exists(), said.all
        (step,) = steps(said.err)
        assert shlex.split(step)[2] == folder
        out = str(output_of(step))
        again = say(*shlex.split(step)[1:])
        assert again.code == 0, again.all
        with ckptool.open(folder) as checkpoint, ckptool.open(out) as written:
            shapes = {entry.key: entry.tensor.shape for entry in checkpoint.survey.tensors_in([key])}
            made = {entry.key: entry.tensor.shape for entry in written.survey.tensors}
            assert made.items() <= shapes.items()
            assert len(made) > 1 and all(0 not in shape for shape in made.values())
        if Path(out).is_file():
            target = Path(out).rename("target.safetensors")
    said = say("match", part, target)
    assert said.code in (1, 2) and "fits" not in said.out.partition("\n")[0].removeprefix("does not fit"), said.all
    (step,) = steps(said.all)
    if said.code == 2:  # an optimizer's file has no state dict
        assert step == f"ckptool inspect {folder}"
        return
    assert step == f"ckptool match {folder} {target}" and "local-parts" not in said.all
    (step,) = steps(say(*shlex.split(step)[1:]).out)[:1] or [f"ckptool match {folder} {target}"]
    out = output_of(step)
    assert say(*shlex.split(step)[1:]).code == 0
    if out is not None:
        number = len(load_file(target))
        assert f": {number} of {number} keys" in say("match", out, target).out
