"""Checkpoints for pages: names that try to act, and two versions of a model."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path

import torch

HOSTILE = (
    *("</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "line\u2028separator"),
    *("lone\ud800surrogate", "__proto__", "constructor.prototype", "reversed\u202eb.weight", "tab\tbell\x07"),
    *("x" * 300 + ".weight", '"quoted".bias', "it's.weight", "", "a..b", "toString", "&amp;.w", "{title}", "😀.weight"),
)


def hostile(folder: Path) -> Path:
    """A checkpoint whose names are hostile, and those of its entries and its values."""
    torch.manual_seed(0)
    state = OrderedDict((name, torch.randn(4, 3)) for name in HOSTILE)
    torch.save({"state_dict": state, "</td><script>": "<b>value</b>\u202e\ud800"}, folder / "hostile.pt")
    return folder / "hostile.pt"


def pair(folder: Path, layers: int = 4) -> tuple[Path, Path]:
    """A model with its optimizer, and a fine-tuned version with everything that can differ."""
    torch.manual_seed(0)
    state = OrderedDict[str, torch.Tensor]()
    state["embed.weight"] = torch.randn(50, 16)
    for layer in range(layers):
        state[f"layers.{layer}.attention.weight"] = torch.randn(16, 16)
        state[f"layers.{layer}.mlp.weight"] = torch.randn(24, 16)
        state[f"layers.{layer}.norm.weight"] = torch.ones(16)
    state["head.weight"] = state["embed.weight"]
    moments = {number: {"exp_avg": torch.randn_like(tensor)} for number, tensor in enumerate([*state.values()][:-1])}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": list(moments)}]}
    torch.save({"model": state, "optimizer": optimizer, "step": 1}, folder / "a.pt")
    tuned = OrderedDict((name, tensor.clone()) for name, tensor in state.items())
    for layer in range(layers):
        name = f"layers.{layer}.mlp.weight"
        tuned[name] = tuned[name] + torch.randn_like(tuned[name]) * 10.0 ** (layer - 4)
    tuned["layers.1.attention.weight"][0, 0] = math.nan
    tuned["layers.2.attention.weight"] = torch.randn(16, 20)
    tuned["layers.3.attention.weight"] = tuned["layers.3.attention.weight"].half()
    tuned["encoder.weight"] = tuned.pop("embed.weight")
    del tuned["layers.0.norm.weight"]
    tuned["new.weight"] = torch.randn(3, 16)
    torch.save({"model": tuned, "step": 2}, folder / "b.pt")
    return folder / "a.pt", folder / "b.pt"
