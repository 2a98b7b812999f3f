"""What explain says of a file. That its commands run is tested with those of all commands (test_next_steps.py)."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from command_line import say
from conftest import FIXTURES
from printed_commands import output_of, tensors
from trained_models import model_of

import ckptool
from ckptool.base.errors import CkptoolError
from ckptool.cli.main import run
from ckptool.reports.explaining.known_errors import KNOWN_ERRORS

#: Keys of a model with their shapes; most shapes are equal, so only names tell tensors apart.
KEYS = {
    "conv1.weight": (4, 4),
    "conv1.bias": (4,),
    "conv2.weight": (4, 4),
    "conv2.bias": (4,),
    "norm.weight": (4,),
    "head.0.weight": (2, 4),
}
#: Choices of keys with a prefix that the other side lacks.
MOVED = [each for number in (1, 3, 5, 6) for each in list(itertools.combinations(KEYS, number))[::4]]


def model_with(keys: dict[str, tuple[int, ...]]) -> torch.nn.Module:
    """Return a model with parameters of these names and shapes."""
    return model_of({key: torch.rand(shape) for key, shape in keys.items()})


@pytest.mark.parametrize("other_head", [False, True])
@pytest.mark.parametrize("lacking", ["file", "model"])
@pytest.mark.parametrize("prefix", ["module.", "backbone."])
def test_keys_that_lack_a_prefix_are_renamed_and_printed_python_loads_the_same(
    prefix: str, lacking: str, other_head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command makes all keys load; printed Python, with and without the file, fills the model of the message."""
    monkeypatch.chdir(tmp_path)
    for moved in MOVED:
        longer = {prefix + key if key in moved else key: shape for key, shape in KEYS.items()}
        ours, theirs = (KEYS, longer) if lacking == "file" else (longer, KEYS)
        if other_head:
            ours = {key.replace("head.0", "fc"): shape for key, shape in ours.items()}
        saved = model_with(ours).state_dict()
        torch.save(saved, "model.pth")
        with pytest.raises(RuntimeError) as error:
            model_with(theirs).load_state_dict(torch.load("model.pth"))
        about_file, alone = ckptool.explain(str(error.value), "model.pth"), ckptool.explain(str(error.value))
        for report in (about_file, alone):
            if report["python"] and "strict=False" not in report["python"]:
                model = model_with(theirs)
                exec(report["python"], {"torch": torch, "model": model})
                values = {key.removeprefix(prefix): value for key, value in model.state_dict().items()}
                assert all(torch.equal(values[key.removeprefix(prefix)], saved[key]) for key in saved)
        if not other_head:
            assert alone["python"]
            Path("error.txt").write_text(str(error.value), encoding="utf-8")  # the answer asks for it if many keys move
            words = shlex.split(about_file["next"] or about_file["why"].split("'")[-2])
            assert run(words[1:]) == 0
            model_with(theirs).load_state_dict(torch.load(words[-1]))
            os.remove(words[-1])


# -- what explain claims: every known message and unknown ones, for files that they are not about ----------------------

FILES = sorted(
    path.relative_to(FIXTURES).as_posix()
    for folder in (FIXTURES, FIXTURES / "real", FIXTURES / "ranks", FIXTURES / "sharded")
    for path in folder.iterdir()
    if path.suffix != ".tsv" and path.name not in ("real", "ranks", "sharded")
)
#: Messages of programs that the table does not know.
UNKNOWN = (
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x4 and 8x2)",
    "NotImplementedError: Architecture 'LlavaForConditionalGeneration' not supported!",
    "ERROR: Could not detect model type of: model.safetensors",
    "AssertionError: Torch not compiled with CUDA enabled",
    "KeyError: 'epohc'",
)
#: What a file that is not the cause must not be said to be.
TOO_MUCH = ("is fine", "comes from the code", "from the version of a library", "change the code", "upgrade torch:")


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files without any flaw, of three kinds, and one of a whole model."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    torch.save(model.state_dict(), "bare.pth")
    torch.save({"net": model.state_dict(), "note": 1}, "run.pth")
    torch.save(torch.optim.SGD(model.parameters(), momentum=0.9).state_dict(), "optimizer.pt")
    torch.save(model, "whole.pth")
    return {name: name for name in ("bare.pth", "run.pth", "optimizer.pt", "whole.pth")}


@pytest.mark.sampled(every=20)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_an_unknown_message_gets_findings_and_no_more(name: str, tmp_path: Path) -> None:
    path = str(FIXTURES / name)
    alone = ckptool.explain("", path)
    for text in UNKNOWN:
        report = ckptool.explain(text, path)
        assert report["why"].startswith(f"No explanation is known for this message. inspect says of {path}: ")
        assert (report["name"], report["cause"], report["python"]) == ("", "unknown", "")
        assert report["next"] in ("", alone["next"])
        assert not any(words in report["why"] for words in TOO_MUCH)


@pytest.mark.sampled(every=6)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("error", KNOWN_ERRORS, ids=lambda error: error.name)
def test_a_known_message_about_another_file_claims_nothing(error, plain: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    """The printed command runs and keeps every tensor; a class that the file does not name is not said to be in it."""
    for text in (error.message, *error.alike):
        for path in plain:
            report = ckptool.explain(text, path)
            assert not any(words in report["why"] for words in TOO_MUCH), (path, report["why"])
            if "does not name" in report["why"]:
                assert report["next"] == report["python"] == ""
            if report["cause"] == "elsewhere" and "bout another file" in report["why"]:
                assert report["next"] == ""
            if report["next"]:
                check(report["next"], path)


def check(line: str, path: str) -> None:
    """Run a printed command; its output has the tensors of its input, unless it takes an optimizer out."""
    words = shlex.split(line)
    said = say(*words[1:])
    assert said.code in (0, 1), (line, said.all)
    output = output_of(line)
    if output is None:
        return
    try:
        if words[1] not in ("drop", "extract"):
            assert not tensors(path, None, False) - tensors(str(output)), line
    except CkptoolError as error:
        raise AssertionError(f"{line}: {error}") from error
    finally:
        shutil.rmtree(output) if output.is_dir() else output.unlink()
