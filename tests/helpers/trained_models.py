"""Models and what training does to the names of their state dicts, made by torch itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, more: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width + more, 3, bias=False)
        self.bn = nn.BatchNorm2d(width + more)


class Backbone(nn.Module):
    """Layers of several sizes, some of them alike."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.layers = nn.ModuleList([Block(8), Block(8), Block(8, 4)])
        self.norm = nn.LayerNorm(12)


class Net(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(12, classes)


class Renamed(nn.Module):
    """Net, its backbone called otherwise."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.encoder = Backbone()
        self.head = nn.Linear(12, classes)


class Flat(nn.Module):
    """The layers of Net in their order, under other names altogether."""

    def __init__(self) -> None:
        super().__init__()
        net = Net()
        self.a = net.backbone.stem
        self.b = nn.ModuleList()
        for block in net.backbone.layers:
            assert isinstance(block, Block)
            self.b += [block.conv, block.bn]
        self.c = net.backbone.norm
        self.d = net.head


def filled(model: nn.Module) -> nn.Module:
    """The model with values of its own in every parameter and buffer."""
    torch.manual_seed(1)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.normal_()
            else:
                value.fill_(7)
    return model


def parallel(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model)  # type: ignore[return-value]


def lightning(model: nn.Module) -> dict[str, Any]:
    """What Trainer.save_checkpoint writes: the module that trains holds the model."""
    outer = nn.Module()
    outer.model = model
    return {"epoch": 3, "state_dict": outer.state_dict(), "optimizer_states": [{"step": torch.tensor(1.0)}]}


def fsdp(model: nn.Module) -> OrderedDict[str, torch.Tensor]:
    """The names that FullyShardedDataParallel gives where blocks are wrapped one by one."""
    state = OrderedDict()
    for name, value in model.state_dict().items():
        name = name.replace("layers.0.", "layers.0._fsdp_wrapped_module.")
        name = name.replace("layers.1.", "layers.1._fsdp_wrapped_module._checkpoint_wrapped_module.")
        state["_fsdp_wrapped_module." + name] = value
    return state


def state(made: Any) -> Any:
    """What is saved of a model: its state dict; anything else as it is."""
    return made.state_dict() if isinstance(made, nn.Module) else made


Make = Callable[[], Any]

#: What training leaves, by what was done: each makes, of a filled Net, what torch.save is given.
TRAINED: dict[str, Make] = {
    "plain": lambda: filled(Net()),
    "DataParallel": lambda: parallel(filled(Net())),
    "DataParallel twice": lambda: parallel(parallel(filled(Net()))),
    "torch.compile": lambda: compiled(filled(Net())),
    "compile of parallel": lambda: compiled(parallel(filled(Net()))),
    "parallel of compile": lambda: parallel(compiled(filled(Net()))),
    "FSDP": lambda: fsdp(filled(Net())),
    "Lightning": lambda: lightning(filled(Net())),
    "Lightning of compile": lambda: lightning(compiled(filled(Net()))),
    "wrapped": lambda: {"model": filled(Net()).state_dict(), "epoch": 1},
    "wrapped twice": lambda: {"checkpoint": {"model": parallel(filled(Net())).state_dict()}},
    "renamed backbone": lambda: filled(Renamed()),
    "other names": lambda: filled(Flat()),
    "plain dict": lambda: dict(filled(Net()).state_dict()),
}


def model_of(state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a model with parameters of these names and values."""
    model = nn.Module()
    for name, value in state.items():
        *path, last = name.split(".")
        module = model
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(value, requires_grad=False))
    return model
