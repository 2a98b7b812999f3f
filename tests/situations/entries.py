"""Situations in which code looks for the weights at another place than where the file has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from stand_ins import Net, state, trained

import ckptool

from .situation import Situation, error_of, fits, holds, register

SITUATIONS: list[Situation] = []
situation = register(SITUATIONS)


@situation(ends=holds(entry="state_dict"))
def bare_state_dict() -> str:
    torch.save(state(), "merged.ckpt")
    return error_of(lambda: torch.load("merged.ckpt")["state_dict"])


@situation(ends=holds(entry="params_ema"))
def params_ema() -> str:
    torch.save({"params": state()}, "net_g_5000.pth")
    return error_of(lambda: torch.load("net_g_5000.pth")["params_ema"])


@situation(ends=holds())
def params_and_params_ema() -> str:
    torch.save({"params": state(), "params_ema": state()}, "realesrgan.pth")
    return error_of(Net().load_state_dict, torch.load("realesrgan.pth"))


@situation(ends=holds())
def state_dict_inside_state_dict() -> str:
    inner = state()
    torch.save({"state_dict": {**inner, "state_dict": {**inner}}}, "animefull.ckpt")
    return error_of(save_file, torch.load("animefull.ckpt")["state_dict"], "animefull.safetensors")


@situation(ends=fits(Net, extra=True))
def f5_tts() -> str:
    averaged = {"initted": torch.tensor(True), "step": torch.tensor(9), **state("ema_model.")}
    torch.save(
        {"ema_model_state_dict": averaged, "optimizer_state_dict": {"state": {}, "param_groups": []}, "step": 9},
        "model_1200000.pt",
    )
    return error_of(Net().load_state_dict, torch.load("model_1200000.pt")["ema_model_state_dict"])


def _timm() -> dict[str, object]:
    model = trained()
    optimizer = torch.optim.AdamW(model.parameters())
    sum(value.sum() for value in model.parameters()).backward()
    optimizer.step()
    return {
        "epoch": 299,
        "arch": "resnet18",
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "state_dict_ema": state(),
        "metric": 81.2,
    }


@situation(ends=lambda output: _is_slim(output))
def timm_slim() -> str:
    torch.save(_timm(), "model_best.pth.tar")
    return ""


def _is_slim(output: str) -> None:
    fits(Net)(output)
    assert "optimizer" not in torch.load(output, weights_only=True)


@situation(ends=lambda output: _lightning(output))
def not_from_lightning() -> str:
    torch.save(state(), "model.pth")
    return error_of(lambda: torch.load("model.pth")["pytorch-lightning_version"])


def _lightning(output: str) -> None:
    """Check the entries that Lightning's own loader reads."""
    value = torch.load(output, weights_only=True)
    assert value["pytorch-lightning_version"].count(".") == 2
    assert value["epoch"] == value["global_step"] == 0
    Net().load_state_dict(value["state_dict"])


@situation(ends=holds({"lm_head.weight": torch.ones(8, 4), "model.embed_tokens.weight": torch.ones(8, 4)}))
def tied_head() -> str:
    torch.save({"model.embed_tokens.weight": torch.ones(8, 4), "model.norm.weight": torch.ones(4)}, "pytorch_model.bin")
    return error_of(lambda: torch.load("pytorch_model.bin")["lm_head.weight"])


@situation()
def only_the_optimizer() -> str:
    model = trained()
    optimizer = torch.optim.Adam(model.parameters())
    sum(value.sum() for value in model.parameters()).backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), "optimizer.pt")
    return error_of(Net().load_state_dict, torch.load("optimizer.pt"))


def _stepped(cls: type[torch.optim.Optimizer], state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train for one step, with an optimizer that begins with this state."""
    model = trained()
    optimizer = cls(model.parameters(), **({"lr": 0.1, "momentum": 0.9} if cls is torch.optim.SGD else {}))
    if state is not None:
        optimizer.load_state_dict(state)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    sum(value.sum() for value in model.parameters()).backward()
    optimizer.step()
    return {"model": start, "optimizer": optimizer.state_dict()}


def _weights_alone(output: str) -> None:
    holds(entry="model")(output)
    assert "optimizer" not in torch.load(output, weights_only=True)


@situation(ends=_weights_alone)
def optimizer_of_another_kind() -> str:
    torch.save(_stepped(torch.optim.SGD), "checkpoint.pth")
    return error_of(_stepped, torch.optim.Adam, torch.load("checkpoint.pth")["optimizer"])


@situation(ends=_weights_alone)
def half_an_optimizer() -> str:
    run = _stepped(torch.optim.Adam)
    torch.save(run, "cut.pth")
    data = Path("cut.pth").read_bytes()
    Path("cut.pth").write_bytes(data[: data.rindex(run["optimizer"]["state"][4]["exp_avg_sq"].numpy().tobytes())])
    with ckptool.salvage("cut.pth").checkpoint as checkpoint:
        checkpoint.save("resumed.pth")
    return error_of(_stepped, torch.optim.Adam, torch.load("resumed.pth")["optimizer"])


@situation()
def path_in_place_of_a_state_dict() -> str:
    torch.save(state(), "model.pth")
    return "Traceback (most recent call last):\n  File \"load.py\", line 3, in <module>\n" \
        "    model.load_state_dict('model.pth')\nAttributeError: 'str' object has no attribute 'copy'"  # fmt: skip


@situation(ends=lambda output: _without_averages(output))
def stable_diffusion_slim() -> str:
    averages = {f"model_ema.{key.replace('.', '')}": value for key, value in state().items()}
    model = {f"model.{key}": value for key, value in state().items()}
    torch.save({"state_dict": {**model, **averages, "model_ema.decay": torch.tensor(0.9999)}, "epoch": 3}, "sd.ckpt")
    return ""


def _without_averages(output: str) -> None:
    value = torch.load(output, weights_only=True)["state_dict"]
    assert value.keys() == {f"model.{key}" for key in state()}
