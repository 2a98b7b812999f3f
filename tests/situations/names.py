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

from .situation import Situation, error_of, fits, register

SITUATIONS: list[Situation] = []
situation = register(SITUATIONS)


def not_loading(model: nn.Module, path: str, entry: str = "") -> str:
    """Load a file into a model, and return the error of torch."""
    value = torch.load(path, weights_only=True)
    return error_of(model.load_state_dict, value[entry] if entry else value)


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


class Vit(nn.Module):
    """The layers of a ViT whose names and shapes matter here."""

    def __init__(self, tokens: int = 5) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, 8))
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.norm = nn.LayerNorm(8)


@situation(ends=fits(lambda: Vit(17)))
def image_size() -> str:
    torch.save(Vit(5).state_dict(), "vits14.pth")
    return not_loading(Vit(17), "vits14.pth")


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


class Llama(nn.Module):
    def __init__(self, rows: int = 32) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(rows, 4)
        self.model.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, rows, bias=False)


@situation(ends=fits(Llama))
def vocabulary() -> str:
    torch.save(Llama(33).state_dict(), "pytorch_model.bin")
    return not_loading(Llama(32), "pytorch_model.bin")


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.qkv = nn.Linear(4, 12)
        self.attn.proj = nn.Linear(4, 4)


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "proj"):
            self.attn.add_module(name, nn.Linear(4, 4))


@situation(ends=fits(Split))
def fused_qkv() -> str:
    torch.save(Fused().state_dict(), "sam_vit_b.pth")
    return not_loading(Split(), "sam_vit_b.pth")


class Conv1D(nn.Module):
    """A layer of GPT-2 in transformers, which stores the transpose."""

    def __init__(self, inside: int = 4, outside: int = 12) -> None:
        super().__init__()
        self.c_attn = nn.Module()
        self.c_attn.weight = nn.Parameter(torch.zeros(inside, outside))
        self.c_attn.bias = nn.Parameter(torch.zeros(outside))


@situation(ends=fits(lambda: Conv1D(12, 4)))
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
