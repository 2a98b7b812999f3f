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
from ckptool.base.steps import suggested_output
from ckptool.cli.main import run
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
    assert said.code == 3 and "which are parts" in said.err
    assert steps(said.err) == ["ckptool inspect run/a.pth"]


def test_sizes_that_differ_are_not_rounded_to_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = torch.zeros(401)
    torch.save({"weight": whole[:400], "bias": torch.zeros(2)}, tmp_path / "a.pth")
    assert run(["inspect", str(tmp_path / "a.pth")]) == 0
    assert "uses 1,600 bytes of a storage of 1,604 bytes" in capsys.readouterr().out


def test_a_name_that_is_taken_is_not_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"module.weight": torch.zeros(2)}, "a.pth")
    for name in ("a.plain.pth", "a.plain.2.pth"):
        assert run(["inspect", "a.pth"]) == 0
        (step,) = steps(capsys.readouterr().out)
        assert shlex.split(step)[-1] == name
        assert run(shlex.split(step)[1:]) == 0
        capsys.readouterr()


def test_a_suggested_folder_keeps_its_whole_name(tmp_path: Path) -> None:
    (tmp_path / "v1.5").mkdir()
    assert suggested_output(f"{tmp_path}/v1.5", "plain") == f"{tmp_path}/v1.5.plain"
    assert suggested_output("outer.zip!run/a.pth.tar", "cpu") == "a.cpu.pth.tar"


# -- diff and match: what to do about a difference -------------------------------------------------------------


def test_the_same_in_another_container_has_a_next_step(tmp_path: Path) -> None:
    out = tmp_path / "a.pth"
    source = FIXTURES / "model.safetensors"
    assert say("convert", source, "-o", out).code == 0
    said = say("diff", source, out)
    assert said.code == 1
    options = said.out.rpartition("the rest is the same with ")[2]
    assert say("diff", source, out, *options.split()).code == 0


def test_other_values_have_no_next_step(tmp_path: Path) -> None:
    out = tmp_path / "a.pth"
    assert say("cast", FIXTURES / "bare.pth", "--to-dtype", "float16", "-o", out).code == 0
    said = say("diff", FIXTURES / "bare.pth", out)
    assert said.code == 1
    assert "the rest is the same" not in said.out


def test_a_tied_name_comes_with_its_tensor(tmp_path: Path) -> None:
    tied = FIXTURES / "tied.pth"
    out = tmp_path / "a.safetensors"
    assert say("convert", tied, "-o", out, "--tied", "keep-first").code == 0
    with ckptool.open(out) as written:
        ((other, kept),) = [pair for pair in written.container.metadata.items() if pair[0] != "format"]
    said = say("match", out, tied)
    assert said.code == 1
    assert f"{other} is missing, because the model ties it to {kept}, which the file has" in said.out
    assert "would keep" not in said.out
    assert say(*shlex.split(steps(said.out)[0])[1:-1], tmp_path / "whole.safetensors").code == 0
    assert say("match", tmp_path / "whole.safetensors", tied).code == 0


def test_match_says_how_many_keys_keep_their_values(tmp_path: Path) -> None:
    out = tmp_path / "a.pth"
    assert say("drop", FIXTURES / "bare.pth", "fc.bias", "-o", out).code == 0
    said = say("match", out, FIXTURES / "bare.pth").out
    assert "; 1 key of the model would stay untrained, with initial values: fc.bias" in said


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


def test_no_command_is_made_up_for_several_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURES)
    said = say("convert", "tied.pth", "bare.pth", "--to-format", "safetensors", "--out-dir", tmp_path)
    assert said.code == 4
    assert (
        "; to write the file without them (--tied clone stores a copy under each name): --tied keep-first\n" in said.err
    )


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


def test_parts_that_are_asked_for_are_written(tmp_path: Path) -> None:
    name = RANKS / "zero3_bf16" / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    said = say("convert", name, "-o", tmp_path / "a.safetensors", "--key", "module", "--allow-loss", "shards")
    assert said.code == 0 and "only one rank's part" in said.all


def test_a_part_fits_a_model_that_is_spread_likewise() -> None:
    one, other = (RANKS / "fsdp2_2" / f"model.rank{rank}.pth" for rank in (0, 1))
    assert say("match", one, one).out.startswith("fits")
    assert say("match", one, other).code == 1


@pytest.mark.parametrize("options", [["--key", "module"], ["--key", "module", "--deepspeed-16bit"]])
def test_a_folder_of_the_trainer_leads_to_that_of_deepspeed_in_it(options: list[str], tmp_path: Path) -> None:
    folder = RANKS / "trainer_zero2" / "checkpoint-2"
    assert f"-> ckptool inspect {folder / 'global_step2'}\n" in say("inspect", folder).out
    out = tmp_path / "a.safetensors"
    said = say("convert", folder, "-o", out, *options)
    assert said.code == 2
    (step,) = steps(said.err)
    assert shlex.split(step)[2] == str(folder / "global_step2")
    refused = say(*shlex.split(step)[1:-1], out)
    assert refused.code == 4 and refused.err.rstrip().endswith("--tied keep-first")
    assert say(*shlex.split(step)[1:-1], out, "--tied", "keep-first").code == 0
    dtypes = {str(value.dtype) for value in load_file(out).values()}
    assert dtypes == ({"torch.bfloat16"} if "--deepspeed-16bit" in options else {"torch.float32"})


@pytest.mark.parametrize("command", ["inspect", "keys", "stats", "validate", "scan", "hash"])
def test_no_arrow_leads_nowhere(command: str) -> None:
    """Nothing can be salvaged from some damaged folders, so no command is printed."""
    lines = say(command, FIXTURES / "ranks").all.splitlines()
    assert [line for line in lines if line.rstrip() == "  ->"] == []


@pytest.mark.parametrize("options", [[], ["--all"], ["--key", "state_dict"]])
@pytest.mark.parametrize("command", ["keys", "stats"])
def test_patterns_that_match_nothing_lead_to_every_key(command: str, options: list[str]) -> None:
    said = say(command, FIXTURES / "lightning.ckpt", "--include", "zzz", *options)
    assert said.code == 0
    (step,) = steps(said.err)
    again = say(*shlex.split(step)[1:])
    assert again.code == 0 and again.err == "" and "model.stem.0.weight" in again.out
