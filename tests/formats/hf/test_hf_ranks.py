"""Folders of ``HuggingFaceStorageWriter``: what each rank had, read as whole tensors; torch is the oracle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import hf_rank_files
import oracle
import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import say
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.base.errors import MalformedError, RefusedError
from ckptool.cli.main import run

WHOLE = hf_rank_files.whole()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("saved")
    hf_rank_files.write(top, 3)
    return {mode: top / mode for mode in hf_rank_files.MODES}


@pytest.fixture
def folder(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to be spoilt, of three ranks with two files each."""
    return Path(shutil.copytree(saved["files"], tmp_path / "in"))


def read(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    with ckptool.open(folder) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch"), out)
    return dict(oracle.load(out))


def by_torch(folder: Path) -> dict[str, torch.Tensor]:
    made = {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
    dcp.load(made, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return made


def problems(folder: Path) -> dict[str, str]:
    with ckptool.open(folder) as checkpoint:
        return {problem.code: problem.message for problem in checkpoint.container.problems}


@pytest.mark.parametrize("mode", hf_rank_files.MODES)
def test_it_is_what_was_saved(mode: str, saved: dict[str, Path], tmp_path: Path) -> None:
    found = read(saved[mode], tmp_path / "x.pth")
    wanted = WHOLE
    if mode == "consolidated":
        # torch 2.13 leaves scalars zero when it consolidates.
        wanted = load_file(saved[mode] / "model-00001-of-00001.safetensors")
        assert all(torch.equal(wanted[name], WHOLE[name]) for name in WHOLE.keys() - {"one"})
    assert oracle.difference({name: found[name] for name in WHOLE}, {name: wanted[name] for name in WHOLE}) == ""
    assert ckptool.validate(saved[mode])["status"] == "valid"
    assert run(["inspect", str(saved[mode])]) == run(["stats", str(saved[mode])]) == 0


@pytest.mark.parametrize("mode", ["ranks", "files"])
def test_torch_reads_the_same(mode: str, saved: dict[str, Path], tmp_path: Path) -> None:
    found = read(saved[mode], tmp_path / "x.pth")
    assert oracle.difference({name: found[name] for name in WHOLE}, by_torch(saved[mode])) == ""


def test_an_edit_gives_whole_tensors(saved: dict[str, Path], tmp_path: Path) -> None:
    with ckptool.open(saved["ranks"]) as checkpoint:
        edited = ckptool.add_module(checkpoint)
        ckptool.save(edited, tmp_path / "out")
        ckptool.save(edited, tmp_path / "x.safetensors")
        ckptool.save(edited, tmp_path / "x.pth")
    for path in (tmp_path / "out" / "model.safetensors", tmp_path / "x.safetensors", tmp_path / "x.pth"):
        found = oracle.load(path) if path.suffix == ".pth" else load_file(path)
        assert len(found) == len(WHOLE)
        assert oracle.difference({name: found[f"module.{name}"] for name in WHOLE}, WHOLE) == ""


@pytest.mark.parametrize("mode", ["rank0", "consolidated"])
def test_places_under_old_names_are_not_carried_over(mode: str, saved: dict[str, Path], tmp_path: Path) -> None:
    """torch looks every tensor up in them, and does not load what it does not find."""
    with ckptool.open(saved[mode]) as checkpoint:
        ckptool.save(ckptool.rename(checkpoint, {"up": "over"}), tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*.safetensors")
    with safe_open(path, "pt") as file:
        assert not (file.metadata() or {}).keys() & {"DCP_SHARDING_INFO", "DCP_VERSION"}
    made = {"over": torch.zeros(7, 5)}
    dcp.load(made, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "out")), no_dist=True)
    assert torch.equal(made["over"], WHOLE["up"])


def test_the_file_of_a_rank_keeps_its_places(folder: Path, tmp_path: Path) -> None:
    path = folder / "shard-00002-model-00001-of-00002.safetensors"
    with ckptool.open(path) as checkpoint:
        assert "what one rank had" in checkpoint.container.problems[0].message
        ckptool.save(ckptool.cast(checkpoint, "float64"), tmp_path / "cast.safetensors")
        with pytest.raises(RefusedError, match="does not say where module"):
            ckptool.save(ckptool.add_module(checkpoint), tmp_path / "renamed.safetensors")
    with safe_open(tmp_path / "cast.safetensors", "pt") as file:
        assert json.loads(file.metadata()["DCP_SHARDING_INFO"]) == {"up": {"saved_offsets": [3, 0]}}


# -- what is wrong with it ----------------------------------------------------------------------------------------


def refused(folder: Path, out: Path) -> str:
    """It is not valid, and nothing is made of it; what is said."""
    report = ckptool.validate(folder)
    assert report["status"] == "invalid"
    with pytest.raises((MalformedError, RefusedError)):
        read(folder, out)
    with pytest.raises((MalformedError, RefusedError)), ckptool.open(folder) as checkpoint:
        ckptool.save(ckptool.add_module(checkpoint), out)
    assert not out.exists()
    return "\n".join(note["message"] for check in report["checks"] for note in check["notes"])


def test_a_copy_of_another_rank(folder: Path, tmp_path: Path) -> None:
    one, two = (folder / f"shard-0000{rank}-model-00001-of-00002.safetensors" for rank in (1, 2))
    shutil.copy(one, two)
    text = refused(folder, tmp_path / "x")
    assert f"overlap: {one.name} and {two.name}" in text


@pytest.mark.parametrize(
    "told",
    [
        *("", "[]", "{", "{}", '{"up": 1}', '{"up": {"saved_offsets": [0]}}', '{"up": {"saved_offsets": [0, -1]}}'),
        *('{"up": {"saved_offsets": ["0", 1]}}', '{"up": {"saved_offsets": [0, 9223372036854775807]}}', "[" * 100_000),
    ],
)
def test_places_that_make_no_sense(told: str, folder: Path, tmp_path: Path) -> None:
    path = placed(folder, torch.zeros(2, 5), told)
    assert f"{path.name} cannot be read: DCP_SHARDING_INFO" in refused(folder, tmp_path / "x")
    ckptool.validate(path)


@pytest.mark.parametrize(
    ("value", "row", "words"),
    [
        (torch.zeros(2, 5), 1 << 61, "is larger than any tensor can be"),
        (torch.zeros(3, 5).half(), 3, "in shard-00002-model-00001-of-00002.safetensors than in"),
    ],
)
def test_pieces_that_are_of_no_tensor(value: torch.Tensor, row: int, words: str, folder: Path, tmp_path: Path) -> None:
    placed(folder, value, json.dumps({"up": {"saved_offsets": [row, 0]}}))
    assert words in refused(folder, tmp_path / "x")


def placed(folder: Path, value: torch.Tensor, places: str) -> Path:
    """Write the file of rank 2 with a piece of "up", and what it says of its place."""
    path = folder / "shard-00002-model-00001-of-00002.safetensors"
    save_file({"up": value}, path, {"DCP_SHARDING_INFO": places, "format": "pt"})
    return path


#: The only file of the consolidated folder.
FILE = "model-00001-of-00001.safetensors"

# -- files that are lost, and pieces under the names of whole files ------------------------------------------------


@pytest.mark.parametrize("mode", ["ranks", "files"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("number", [1, 2])
def test_no_lost_file_is_called_complete(
    mode: str, rank: int, number: int, saved: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    shutil.copytree(saved[mode], folder)
    lost = next(iter(folder.glob(f"shard-{rank:05d}-model-{number:05d}-of-*")), None)
    if lost is None:
        pytest.skip("this mode has one file for each rank")
    lost.unlink()
    checks = {check["name"]: check for check in ckptool.validate(folder)["checks"]}
    said = say("convert", folder, "-o", tmp_path / "out.safetensors")
    if mode == "ranks" and rank == 3:  # the files of the other ranks show nothing of the last one
        assert checks["complete"]["status"] == "not possible"
        assert said.code == 0
        assert "files of 2 ranks are there; nothing records how many there were" in " ".join(said.out.split())
    else:
        assert checks["complete"]["status"] == "fail"
        assert (said.code, (tmp_path / "out.safetensors").exists()) == (3, False)


def test_a_sound_folder_with_the_files_of_ranks_beside_it_has_no_warning(saved: dict[str, Path]) -> None:
    folder = saved["consolidated"]
    report = ckptool.validate(folder)
    assert {check["status"] for check in report["checks"]} <= {"pass", "not possible"}
    assert say("validate", "--strict", folder).code == 0
    for path in (folder / "sharded").iterdir():
        assert "shard-00000" not in say("inspect", path).out
        assert "part 1 of 3" in say("inspect", path).out or not path.name.startswith("shard-00001")


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_pieces_under_the_name_of_a_whole_file(rank: int, saved: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(saved["consolidated"], folder)
    shutil.copy(folder / f"sharded/shard-{rank:05d}-model-00001-of-00001.safetensors", folder / FILE)
    said = say("validate", folder)
    assert said.code == 1
    assert FILE in said.out
    assert say("convert", folder, "-o", tmp_path / "out.pth").code == 3
    assert not (tmp_path / "out.pth").exists()
