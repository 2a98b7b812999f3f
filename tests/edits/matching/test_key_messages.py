"""Messages about keys are read in every form in which libraries print them.

torch and transformers print them here. The messages of the other libraries repeat the format strings of the file that
is named above them.
"""

from __future__ import annotations

import collections
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from torch import nn
from trained_models import model_of
from transformers.utils.loading_report import LoadStateDictInfo

import ckptool
from ckptool.cli.main import run
from ckptool.edits.matching.state_dict_errors import read_error

MISSING = ["stem.0.conv.weight", "stem.1.conv.weight", "head.weight", "head.bias"]
UNEXPECTED = ["model.stem.0.conv.weight", "model.stem.1.conv.weight", "model.head.weight", "model.head.bias"]


def modules(names: Collection[str]) -> nn.Module:
    """A model with parameters of these names."""
    return model_of({name: torch.ones(1) for name in names})


def torch_error() -> str:
    """What ``load_state_dict`` raises for a model and a state dict with these keys."""
    with pytest.raises(RuntimeError) as error:
        modules(MISSING).load_state_dict({key: torch.ones(1) for key in UNEXPECTED})
    return f"RuntimeError: {error.value}"


def transformers_report() -> str:
    """The loading report of the installed transformers."""
    report = LoadStateDictInfo(set(MISSING), set(UNEXPECTED), set(), [], {}, set()).create_loading_report()
    return f"BertModel LOAD REPORT from: ./out\n{report}"


def fvcore(keys: list[str], colour: int) -> str:
    """Keys as common/checkpoint.py of fvcore groups them, with its colours."""
    groups = collections.defaultdict(list)
    for key in keys:
        groups[key.rpartition(".")[0]].append(key.rpartition(".")[2])
    texts = (
        f"{name}.{ends[0]}" if len(ends) == 1 else f"{name}.{{{', '.join(ends)}}}" for name, ends in groups.items()
    )
    return "\n".join(f"  \x1b[{colour}m{text}\x1b[0m" for text in texts)


COMMAS, OTHER_COMMAS = ", ".join(MISSING), ", ".join(UNEXPECTED)
#: Messages by the library that prints them: each has the missing and the unexpected keys.
FORMS = {
    "load_state_dict": torch_error(),
    "load_state_dict with strict=False": str(
        modules(MISSING).load_state_dict({key: torch.ones(1) for key in UNEXPECTED}, strict=False)
    ),
    # torch/nn/modules/module.py before 0.4 stopped at the first unexpected key.
    "torch 0.3": "\n".join(f"KeyError: 'unexpected key \"{key}\" in state_dict'" for key in UNEXPECTED)
    + "\nKeyError: "
    + repr(f'missing keys in state_dict: "{set(MISSING)}"'),
    # modeling_utils.py of transformers 4
    "transformers 4": f"Some weights of the model checkpoint at ./out were not used when initializing BertModel:"
    f" {UNEXPECTED}\n- This IS expected if you are initializing BertModel from the checkpoint of a model trained on\n"
    "Some weights of BertModel were not initialized from the model checkpoint at ./out and are newly initialized:"
    f" {MISSING}\nYou should probably TRAIN this model on a down-stream task.",
    "transformers 5": transformers_report(),
    # core/saving.py of Lightning, with strict=False
    "lightning": f"saving.py:195: Found keys that are in the model state dict but not in the checkpoint: {MISSING}\n"
    f"saving.py:199: Found keys that are not in the model state dict but in the checkpoint: {UNEXPECTED}\n",
    # peft_model.py of PEFT, and integrations/peft.py of transformers
    "peft": f"UserWarning: Found missing adapter keys while loading the checkpoint: {MISSING}.\n"
    f"Loading adapter weights from ./lora led to unexpected keys not found in the model:  {UNEXPECTED}. ",
    # models/_builder.py of timm
    "timm": f"Missing keys ({COMMAS}) discovered while loading pretrained weights. This is expected if model is being"
    f" adapted.\nUnexpected keys ({OTHER_COMMAS}) found while loading pretrained weights.",
    # models/modeling_utils.py, loaders/lora_base.py and loaders/peft.py of diffusers
    "diffusers": "ValueError: Cannot load <class 'diffusers.models.autoencoder_kl.AutoencoderKL'> from ./vae because"
    f" the following keys are missing: \n {COMMAS}. \n Please make sure to pass `low_cpu_mem_usage=False`\n"
    f"Some weights of the model checkpoint were not used when initializing AutoencoderKL: \n {[OTHER_COMMAS]}",
    "diffusers, LoRA": "Loading adapter weights from state_dict led to unexpected keys found in the model:"
    f" {OTHER_COMMAS}. Loading adapter weights from state_dict led to missing keys in the model: {COMMAS}.",
    # runner/checkpoint.py of mmengine
    "mmengine": "06/15 18:31:58 - mmengine - WARNING - The model and loaded state dict do not match exactly\n\n"
    f"unexpected key in source state_dict: {OTHER_COMMAS}\n\nmissing keys in source state_dict: {COMMAS}\n",
    "fvcore": f"Some model parameters or buffers are not found in the checkpoint:\n{fvcore(MISSING, 34)}\n"
    f"The checkpoint state_dict contains keys that are not used by the model:\n{fvcore(UNEXPECTED, 35)}\n",
    # ldm/models/diffusion/ddpm.py of Stable Diffusion
    "stable diffusion": "Restored from a.ckpt with 4 missing and 4 unexpected keys\n"
    f"Missing Keys: {MISSING}\nUnexpected Keys: {UNEXPECTED}",
    # models/model.py of CenterNet
    "CenterNet": "\n".join(
        [*(f"Drop parameter {key}." for key in UNEXPECTED), *(f"No param {key}." for key in MISSING)]
    ),
    # utils/checkpoints.py of SpeechBrain
    "SpeechBrain": "".join(
        f"During parameter transfer to Net() loading from model.ckpt, the transferred parameters did not have"
        f" parameters for the key: {key}\n"
        for key in MISSING
    )
    + "".join(
        f"The param with the key: {key} is discarded as it is not used in the module to load parameters from\n"
        for key in UNEXPECTED
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_missing_and_unexpected_keys(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys are read, and the edit is found that makes the model take the file."""
    error = read_error(FORMS[form])
    assert error is not None
    assert sorted(error.missing) == sorted(MISSING)
    assert sorted(error.unexpected) == sorted(UNEXPECTED)
    monkeypatch.chdir(tmp_path)
    torch.save({key: torch.ones(1) for key in UNEXPECTED}, "model.pth")
    Path("error.txt").write_text(FORMS[form], encoding="utf-8")
    report = ckptool.explain(FORMS[form], "model.pth")
    assert report["cause"] == "file"
    assert run(["match", "model.pth", "--error", "error.txt"]) == 1
    assert run(report["next"].split()[1:]) == 0
    modules(MISSING).load_state_dict(torch.load(report["next"].split()[-1]))


SIZES = {
    "torch": "\tsize mismatch for head.weight: copying a param with shape torch.Size([10, 4]) from checkpoint, the"
    " shape in current model is torch.Size([2, 4]).",
    "torch 0.4": 'While copying the parameter named "head.weight", whose dimensions in the model are torch.Size([2, 4])'
    " and whose dimensions in the checkpoint are torch.Size([10, 4]).",
    "transformers 4": "Some weights of Net were not initialized from the model checkpoint at ./out and are newly"
    " initialized because the shapes did not match:\n- head.weight: found shape torch.Size([10, 4]) in the checkpoint"
    " and torch.Size([2, 4]) in the model instantiated",
    "diffusers": "ValueError: Cannot load ./unet because head.weight expected shape tensor(..., device='meta', size=(2,"
    " 4)), but got torch.Size([10, 4]). If you want to instead overwrite randomly initialized weights",
    "fvcore": "Skip loading parameter 'head.weight' to the model due to incompatible shapes: (10, 4) in the checkpoint"
    " but (2, 4) in the model! You might want to double check if this is expected.",
    "CenterNet": "Skip loading parameter head.weight, required shapetorch.Size([2, 4]), loaded shape"
    "torch.Size([10, 4]).",
    "mmcv": "The following keys have mismatched shape:\n+-------------+-----+\n"
    "| key | expected shape | loaded shape |\n"
    "| head.weight | torch.Size([2, 4]) | torch.Size([10, 4]) |\n+------------+",
}


SIZES["torch 1.0, which swaps the shapes"] = (
    "Error(s) in loading state_dict for Net:\n\tsize mismatch for head.weight: copying a param of torch.Size([2, 4])"
    " from checkpoint, where the shape is torch.Size([10, 4]) in current model."
)


@pytest.mark.parametrize("name", SIZES)
def test_other_sizes(name: str) -> None:
    error = read_error(SIZES[name])
    assert error is not None
    assert [tuple(item) for item in error.mismatched] == [("head.weight", (10, 4), (2, 4))]
    assert not (error.missing or error.unexpected)


def test_equal_sizes_are_no_mismatch() -> None:
    model = torch.nn.Linear(4, 2)
    model.weight = torch.nn.Parameter(torch.zeros(1, 1).expand(2, 4))
    with pytest.raises(RuntimeError, match="an exception occurred") as caught:
        model.load_state_dict(torch.nn.Linear(4, 2).state_dict())
    assert read_error(str(caught.value)) is None


def test_other_sizes_in_the_report_of_transformers() -> None:
    keys = {(f"layers.{number}.head.weight", (10, 4), (2, 4)) for number in range(12)}
    report = LoadStateDictInfo(set(), set(), keys, [], {}, set()).create_loading_report()
    error = read_error(report or "")
    assert error is not None
    assert {tuple(item) for item in error.mismatched} == keys


@pytest.mark.parametrize(
    "text",
    [
        "missing keys: please check the configuration",
        "KeyError: 'missing'",
        "Unexpected key: none",
        "a | b | MISSING",
        "Drop parameters that are not needed",
        "No parameters were given.",
    ],
)
def test_prose_has_no_keys(text: str) -> None:
    assert read_error(text) is None


def test_a_hostile_text_takes_bounded_memory() -> None:
    error = read_error("x.{0...400000}.{0...400000} | MISSING | ")
    assert error is not None and len(error.missing) <= 500_000


@pytest.mark.parametrize(
    "text",
    [
        " " * 50_000 + "|",
        "keys that are not used by the model:\n" + " " * 50_000,
        "missing_keys=" + " " * 50_000,
        ("a " * 300 + "|\n") * 300,
        "size mismatch for " * 5_000,
        "missing keys: [" + "'a', " * 20_000,
    ],
    ids=["blanks", "blanks after a list", "blanks in a list", "columns", "messages", "no end"],
)
def test_a_hostile_text_is_read_to_its_end(text: str) -> None:
    """With a pattern that tries every start and every end, each of these takes minutes."""
    ckptool.explain(text)


def test_a_shortened_list_is_refused(tmp_path: Path) -> None:
    torch.save({name: torch.ones(1) for name in UNEXPECTED}, tmp_path / "saved.pth")
    message = (
        f'Missing key(s) in state_dict: "body.weight", ... Unexpected key(s) in state_dict: "{UNEXPECTED[0]}", ...'
    )
    with pytest.raises(ckptool.errors.TargetError, match="only some of the keys"):
        ckptool.match(tmp_path / "saved.pth", error=message)
