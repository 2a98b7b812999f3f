"""Messages about keys are read in every form in which libraries print them.

torch and transformers print them here. For the other libraries, each function repeats the format strings of the
library, whose file is named.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptool
from ckptool.cli.main import run
from ckptool.edits.matching.state_dict_errors import read_error

MISSING = ["stem.0.conv.weight", "stem.1.conv.weight", "head.weight", "head.bias"]
UNEXPECTED = ["model.stem.0.conv.weight", "model.stem.1.conv.weight", "model.head.weight", "model.head.bias"]


def torch_error(missing: list[str], unexpected: list[str]) -> str:
    """What ``load_state_dict`` raises for a model and a state dict with these keys."""
    try:
        modules(missing).load_state_dict({key: torch.ones(1) for key in unexpected})
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    raise AssertionError("it loads")


def modules(names: Collection[str]) -> nn.Module:
    """A model with parameters of these names."""
    root = nn.Module()
    for name in names:
        module = root
        *path, last = name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(torch.ones(1)))
    return root


def incompatible_keys(missing: list[str], unexpected: list[str]) -> str:
    """What ``load_state_dict`` with strict=False returns, as print shows it."""
    return str(modules(missing).load_state_dict({key: torch.ones(1) for key in unexpected}, strict=False))


def torch_03(missing: list[str], unexpected: list[str]) -> str:
    """torch/nn/modules/module.py before 0.4 stopped at the first unexpected key."""
    errors = [KeyError(f'unexpected key "{key}" in state_dict') for key in unexpected]
    errors.append(KeyError(f'missing keys in state_dict: "{set(missing)}"'))
    return "\n".join(f"KeyError: {error}" for error in errors)


def transformers_4(missing: list[str], unexpected: list[str]) -> str:
    """modeling_utils.py of transformers 4."""
    return (
        f"Some weights of the model checkpoint at ./out were not used when initializing BertModel: {unexpected}\n"
        "- This IS expected if you are initializing BertModel from the checkpoint of a model trained on another task.\n"
        f"Some weights of BertModel were not initialized from the model checkpoint at ./out and are newly initialized:"
        f" {missing}\nYou should probably TRAIN this model on a down-stream task."
    )


def transformers_5(missing: list[str], unexpected: list[str]) -> str:
    """The loading report of the installed transformers."""
    from transformers.utils.loading_report import LoadStateDictInfo

    report = LoadStateDictInfo(set(missing), set(unexpected), set(), [], {}, set()).create_loading_report()
    assert report is not None
    return f"BertModel LOAD REPORT from: ./out\n{report}"


def lightning(missing: list[str], unexpected: list[str]) -> str:
    """core/saving.py of Lightning, with strict=False."""
    return (
        f"saving.py:195: Found keys that are in the model state dict but not in the checkpoint: {missing}\n"
        f"saving.py:199: Found keys that are not in the model state dict but in the checkpoint: {unexpected}\n"
    )


def peft(missing: list[str], unexpected: list[str]) -> str:
    """peft_model.py of PEFT, and integrations/peft.py of transformers."""
    return (
        f"UserWarning: Found missing adapter keys while loading the checkpoint: {missing}.\n"
        f"Loading adapter weights from ./lora led to unexpected keys not found in the model:  {unexpected}. "
    )


def timm(missing: list[str], unexpected: list[str]) -> str:
    """models/_builder.py of timm."""
    return (
        f"Missing keys ({', '.join(missing)}) discovered while loading pretrained weights."
        " This is expected if model is being adapted.\n"
        f"Unexpected keys ({', '.join(unexpected)}) found while loading pretrained weights."
        " This may be expected if model is being adapted."
    )


def diffusers(missing: list[str], unexpected: list[str]) -> str:
    """models/modeling_utils.py and loaders/lora_base.py of diffusers."""
    return (
        "ValueError: Cannot load <class 'diffusers.models.autoencoder_kl.AutoencoderKL'> from ./vae because the"
        f" following keys are missing: \n {', '.join(missing)}. \n Please make sure to pass `low_cpu_mem_usage=False`\n"
        "Some weights of the model checkpoint were not used when initializing AutoencoderKL: \n"
        f" {[', '.join(unexpected)]}"
    )


def diffusers_lora(missing: list[str], unexpected: list[str]) -> str:
    """loaders/peft.py of diffusers."""
    return (
        f"Loading adapter weights from state_dict led to unexpected keys found in the model: {', '.join(unexpected)}. "
        f"Loading adapter weights from state_dict led to missing keys in the model: {', '.join(missing)}."
    )


def mmengine(missing: list[str], unexpected: list[str]) -> str:
    """runner/checkpoint.py of mmengine."""
    return "\n".join(
        [
            "06/15 18:31:58 - mmengine - WARNING - The model and loaded state dict do not match exactly\n",
            f"unexpected key in source state_dict: {', '.join(unexpected)}\n",
            f"missing keys in source state_dict: {', '.join(missing)}\n",
        ]
    )


def fvcore(missing: list[str], unexpected: list[str]) -> str:
    """common/checkpoint.py of fvcore, with its colours."""

    def grouped(keys: list[str], colour: int) -> str:
        groups = collections.defaultdict(list)
        for key in keys:
            groups[key.rpartition(".")[0]].append(key.rpartition(".")[2])
        texts = (
            f"{name}.{ends[0]}" if len(ends) == 1 else f"{name}.{{{', '.join(ends)}}}" for name, ends in groups.items()
        )
        return "\n".join(f"  \x1b[{colour}m{text}\x1b[0m" for text in texts)

    return (
        f"Some model parameters or buffers are not found in the checkpoint:\n{grouped(missing, 34)}\n"
        f"The checkpoint state_dict contains keys that are not used by the model:\n{grouped(unexpected, 35)}\n"
    )


def stable_diffusion(missing: list[str], unexpected: list[str]) -> str:
    """ldm/models/diffusion/ddpm.py of Stable Diffusion."""
    first = f"Restored from a.ckpt with {len(missing)} missing and {len(unexpected)} unexpected keys"
    return f"{first}\nMissing Keys: {missing}\nUnexpected Keys: {unexpected}"


def center_net(missing: list[str], unexpected: list[str]) -> str:
    """models/model.py of CenterNet."""
    return "\n".join([*(f"Drop parameter {key}." for key in unexpected), *(f"No param {key}." for key in missing)])


def speechbrain(missing: list[str], unexpected: list[str]) -> str:
    """utils/checkpoints.py of SpeechBrain."""
    return "\n".join(
        [
            *(
                "During parameter transfer to Net() loading from model.ckpt, the transferred parameters did not have"
                f" parameters for the key: {key}"
                for key in missing
            ),
            *(
                f"The param with the key: {key} is discarded as it is not used in the module to load parameters from"
                for key in unexpected
            ),
        ]
    )


FORMS: list[Callable[[list[str], list[str]], str]] = [
    *(torch_error, incompatible_keys, torch_03, transformers_4, transformers_5, lightning, peft, timm, diffusers),
    *(diffusers_lora, mmengine, fvcore, stable_diffusion, center_net, speechbrain),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_missing_and_unexpected_keys(form: Callable[[list[str], list[str]], str]) -> None:
    error = read_error(form(MISSING, UNEXPECTED))
    assert error is not None
    assert sorted(error.missing) == sorted(MISSING)
    assert sorted(error.unexpected) == sorted(UNEXPECTED)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_edit_is_found_from_each_form(
    form: Callable[[list[str], list[str]], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({key: torch.ones(1) for key in UNEXPECTED}, "model.pth")
    message = form(MISSING, UNEXPECTED)
    Path("error.txt").write_text(message, encoding="utf-8")
    report = ckptool.explain(message, "model.pth")
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
    "diffusers 0.30": "ValueError: Cannot load because head.weight expected shape torch.Size([2, 4]), but got"
    " torch.Size([10, 4]).",
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
    from transformers.utils.loading_report import LoadStateDictInfo

    keys = {(f"layers.{number}.head.weight", (10, 4), (2, 4)) for number in range(12)}
    report = LoadStateDictInfo(set(), set(), keys, [], {}, set()).create_loading_report()
    error = read_error(report or "")
    assert error is not None
    assert {tuple(item) for item in error.mismatched} == keys


def test_ranges_in_the_report_of_transformers() -> None:
    keys = [f"model.layers.{number}.mlp.weight" for number in range(16)]
    error = read_error(transformers_5(keys, ["a.0.b", "a.3.b"]))
    assert error is not None
    assert sorted(error.missing) == sorted(keys)
    assert sorted(error.unexpected) == ["a.0.b", "a.3.b"]


def test_a_whole_load_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    text = incompatible_keys(MISSING, MISSING)
    assert text == "<All keys matched successfully>"
    assert read_error(text) is None
    logging.getLogger(__name__).info(text)


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
