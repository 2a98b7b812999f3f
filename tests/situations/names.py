"""Situations in which the names or shapes in the file are not those of the model."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from stand_ins import STATE, Net, state, trained
from torch import nn
from torch.nn.utils import parametrizations, weight_norm
from trained_models import model_of

from .situation import Situation, error_of, fits, register

SITUATIONS: list[Situation] = []
situation = register(SITUATIONS)


def not_loading(model: nn.Module, path: str, entry: str = "") -> str:
    """Load a file into a model, and return the error of torch."""
    value = torch.load(path, weights_only=True)
    return error_of(model.load_state_dict, value[entry] if entry else value)


def of_shapes(name: str, shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """Return a model of a class with this name, with parameters of these shapes."""
    model = model_of({key: torch.rand(shape) for key, shape in shapes.items()})
    model.__class__ = type(name, (nn.Module,), {})
    return model


@situation(ends=fits(Net))
def data_parallel() -> str:
    torch.save(state("module."), "model.pth")
    return not_loading(Net(), "model.pth")


@situation(ends=fits(Net))
def compiled() -> str:
    torch.save(torch.compile(trained()).state_dict(), "model.pth")
    return not_loading(Net(), "model.pth")


class Counted(Net):
    """The model with the counters that thop leaves in each layer."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            module.register_buffer("total_ops", torch.zeros(1, dtype=torch.float64))
            module.register_buffer("total_params", torch.zeros(1, dtype=torch.float64))


class Large(nn.Module):
    """A model of many layers, so that torch's message names hundreds of counters."""

    def __init__(self, layer: Callable[[], nn.Module] = lambda: nn.Linear(1, 1)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(180))


class _CountedLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_buffer("total_ops", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("total_params", torch.zeros(1, dtype=torch.float64))


@situation(ends=fits(Large))
def thop_many() -> str:
    torch.save(Large(_CountedLinear).state_dict(), "model.pth")
    return not_loading(Large(), "model.pth")


def vit(tokens: int) -> nn.Module:
    """Return the layers of a ViT whose names and shapes matter here."""
    shapes = {"cls_token": (1, 1, 8), "pos_embed": (1, tokens, 8), "blocks.0.weight": (8, 8), "blocks.0.bias": (8,)}
    return of_shapes("Vit", {**shapes, "norm.weight": (8,), "norm.bias": (8,)})


@situation(ends=fits(lambda: vit(17)))
def image_size() -> str:
    torch.save(vit(5).state_dict(), "vits14.pth")
    return not_loading(vit(17), "vits14.pth")


def in_a_file(message: str) -> str:
    """Save the message as error.txt, as the answer asks."""
    Path("error.txt").write_text(message, encoding="utf-8")
    return message


class OldNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.dec = weight_norm(nn.Conv1d(2, 2, 3))


class NewNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dec = parametrizations.weight_norm(nn.Conv1d(2, 2, 3))


@situation(ends=fits(OldNorm))
def weight_norm_new_to_old() -> str:
    torch.save(NewNorm().state_dict(), "model.pth")
    return in_a_file(not_loading(OldNorm(), "model.pth"))


@situation()
def weight_norm_old_to_new() -> str:
    torch.save(OldNorm().state_dict(), "model.pth")
    torch.save(NewNorm().state_dict(), "new.pth")
    return ""


class Dense(nn.Module):
    """A layer of torchvision's densenet121."""

    def __init__(self, norm: str = "norm1", conv: str = "conv1") -> None:
        super().__init__()
        self.features = nn.Module()
        for block in range(2):
            layer = nn.Module()
            layer.add_module(norm, nn.BatchNorm2d(3))
            layer.add_module(conv, nn.Conv2d(3, 3, 1))
            self.features.add_module(f"denselayer{block}", layer)


@situation(ends=fits(Dense))
def densenet() -> str:
    old = OrderedDict((key.replace("norm1", "norm.1").replace("conv1", "conv.1"), value)
                      for key, value in Dense().state_dict().items())  # fmt: skip
    torch.save(old, "densenet121-a639ec97.pth")
    torch.save(Dense().state_dict(), "names.pth")  # as the answer asks
    return not_loading(Dense(), "densenet121-a639ec97.pth")


@situation(ends=fits(Net, missing=("bn1.num_batches_tracked",)))
def no_counters() -> str:
    old = trained().state_dict()
    del old["bn1.num_batches_tracked"]
    torch.save(old, "model.pth")
    return not_loading(Net(), "model.pth")


def llama(rows: int = 32) -> nn.Module:
    shapes = {"model.embed_tokens.weight": (rows, 4), "model.norm.weight": (4,), "model.norm.bias": (4,)}
    return of_shapes("Llama", {**shapes, "lm_head.weight": (rows, 4)})


@situation(ends=fits(llama))
def vocabulary() -> str:
    torch.save(llama(33).state_dict(), "pytorch_model.bin")
    return not_loading(llama(32), "pytorch_model.bin")


def attention(name: str, rows: dict[str, int]) -> nn.Module:
    """Return an attention with linear layers of these numbers of rows."""
    weights: dict[str, tuple[int, ...]] = {f"attn.{key}.weight": (size, 4) for key, size in rows.items()}
    return of_shapes(name, weights | {f"attn.{key}.bias": (size,) for key, size in rows.items()})


def split() -> nn.Module:
    return attention("Split", {"q_proj": 4, "k_proj": 4, "v_proj": 4, "proj": 4})


@situation(ends=fits(split))
def fused_qkv() -> str:
    torch.save(attention("Fused", {"qkv": 12, "proj": 4}).state_dict(), "sam_vit_b.pth")
    return not_loading(split(), "sam_vit_b.pth")


@situation(ends=fits(lambda: of_shapes("Conv1D", {"c_attn.weight": (12, 4), "c_attn.bias": (4,)})))
def conv1d() -> str:
    torch.save({"c_attn.weight": torch.ones(4, 12), "c_attn.bias": torch.ones(12)}, "gpt2.bin")
    model = nn.Module()
    model.c_attn = nn.Linear(4, 12)
    return not_loading(model, "gpt2.bin")


@situation()
def newly_initialized() -> str:
    torch.save({"conv.weight_g": torch.ones(1, 1, 3), "conv.weight_v": torch.ones(4, 2, 3),
                "conv.bias": torch.zeros(4)}, "model.bin")  # fmt: skip
    return (
        "Some weights of the model checkpoint at ./out were not used when initializing HubertModel: "
        "['conv.weight_g', 'conv.weight_v'] Some weights of HubertModel were not initialized from the model checkpoint "
        "at ./out and are newly initialized: ['conv.parametrizations.weight.original0', "
        "'conv.parametrizations.weight.original1']"
    )


@situation(ends=fits(lambda: Task(), missing=("classifier.weight", "classifier.bias")))
def base_to_task_model() -> str:
    torch.save(Net().state_dict(), "bert.pth")
    return not_loading(Task(), "bert.pth")


class Task(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = Net()
        self.classifier = nn.Linear(4, 2)


class Other(nn.Module):
    """Other names of the same layers, which no rule explains."""

    def __init__(self, names: tuple[str, ...] = ("stem", "mixer", "out")) -> None:
        super().__init__()
        for name, layer in zip(names, (nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 2))):
            self.add_module(name, layer)


@situation(ends=fits(Other))
def renamed_one_by_one() -> str:
    torch.save(Other(("first", "second", "last")).state_dict(), "model.pth")
    torch.save(Other().state_dict(), "names.pth")  # as the answer asks
    return not_loading(Other(), "model.pth")


@situation(ends=fits(Net))
def names_without_dots() -> str:
    averaged = {f"model_ema.{key.replace('.', '')}": value for key, value in STATE.items()}
    counters = {"model_ema.decay": torch.tensor(0.9999), "model_ema.num_updates": torch.tensor(5)}
    torch.save({"state_dict": {**averaged, **counters}}, "model.ckpt")
    torch.save(state(), "target.pth")
    return ""


@situation(ends=fits(lambda: Plain()))
def match_of_torchscript() -> str:
    torch.jit.script(Plain()).save("model.torchscript")
    torch.save(Plain().state_dict(), "target.pth")
    return ""


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)
