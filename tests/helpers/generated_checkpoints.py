"""Checkpoints put together at random from what people save: names, devices, objects, formats."""

from __future__ import annotations

import argparse
import copy
import datetime
import decimal
import enum
import functools
import json
import pathlib
import pickle
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_objects as foreign
import numpy
import pytest
import torch
from changed_tensors import KINDS
from safetensors.torch import save_file
from torch import nn
from trained_models import TRAINED, state

__all__ = ["generated"]


class Colour(enum.Enum):
    RED = 1


Colour.__module__, Colour.__qualname__ = "research_lab.things", "Colour"
foreign.HOMES[Colour] = "research_lab.things.Colour"

#: What lies beside the weights in checkpoints of training.
BESIDE: dict[str, Callable[[], Any]] = {
    "args": lambda: argparse.Namespace(lr=0.1, out=pathlib.PosixPath("runs/1")),
    "path": lambda: pathlib.PurePosixPath("data"),
    "config": lambda: foreign.EasyDict(width=3, inner=foreign.EasyDict(depth=2)),
    "cfg": lambda: foreign.CfgNode(width=3),
    "hydra": lambda: foreign.DictConfig({"a": 1, "b": {"c": [1, 2]}}),
    "munch": lambda: foreign.Munch(a=1),
    "dataclass": lambda: foreign.Config(2, foreign.Frozen(3)),
    "slots": lambda: foreign.WithSlots(1, 2),
    "enumeration": lambda: Colour.RED,
    "made": lambda: foreign.Made(),
    "stateful": lambda: foreign.Stateful(1, 2),
    "holder": lambda: foreign.Config(2, torch.arange(3.0)),
    "keywords": lambda: foreign.Keywords(k=1),
    "boxes": lambda: torch.arange(4.0).as_subclass(foreign.Boxes),
    "pair": lambda: foreign.Pair(1, torch.ones(2)),
    "array": lambda: numpy.arange(3.0),
    "strings": lambda: numpy.array(["a", "b"]),
    "best": lambda: numpy.float64(0.5),
    "random": lambda: numpy.random.RandomState(1).get_state(),
    "python random": lambda: random.Random(1).getstate(),
    "rng_state": torch.get_rng_state,
    "generator": torch.Generator,
    "date": lambda: datetime.datetime(2024, 1, 1),
    "decimal": lambda: decimal.Decimal("1.5"),
    "partial": lambda: functools.partial(max, 1),
    "function": lambda: torch.nn.functional.relu,
    "class": lambda: foreign.Empty,
    "method": lambda: str.lower,
    "counts": lambda: defaultdict(list, a=[1]),
    "device": lambda: torch.device("cuda:1"),
    "where": lambda: "cuda:0",
    "head": lambda: nn.Linear(2, 2),
    "model_ema": lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
    "optimizer": lambda: _optimizer(nn.Linear(3, 2)),
    "scheduler": lambda: {"last_epoch": 3, "_step_count": 4},
    "epoch": lambda: 3,
    "storage": lambda: torch.arange(3.0).untyped_storage(),
    "slice": lambda: torch.randn(500)[:5],
}
EXTENSIONS = (".pth", ".pt", ".ckpt", ".bin", ".pth.tar", ".pkl", ".model", "")
DEVICES = ("cpu", "cpu", "cpu", "cuda:0", "cuda:1", "mps", "xla:0", "npu:0", "hpu:0", "privateuseone:0")


def _optimizer(model: nn.Module) -> Any:
    optimizer = torch.optim.Adam(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return optimizer.state_dict()


def generated(number: int, folder: Path) -> str:
    """Write the checkpoint with this number into a folder; return its name there."""
    rng = random.Random(number)
    torch.manual_seed(number)
    make = rng.choices((_pickled, _safetensors, _shards, _bare_pickle), (75, 10, 10, 5))[0]
    return make(rng, folder)


def _weights(rng: random.Random) -> Any:
    made = TRAINED[rng.choice(list(TRAINED))]()
    return state(made)


def _content(rng: random.Random) -> Any:
    kind = rng.choice(
        ("state", "wrapped", "wrapped", "training", "training", "module", "gan", "tensors", "list", "deep")
    )
    own = _weights(rng)
    if kind == "module":
        model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
        return rng.choice((model, {"model": model, "epoch": 3}, nn.DataParallel(model), [model, 1]))
    if kind == "tensors":
        names = rng.sample(list(KINDS), 4)
        return {name: KINDS[name]() for name in names}
    if kind == "list":
        return [own, _weights(rng)]
    if kind == "gan":
        return {"netG": own, "netD": _weights(rng), "epoch": 1}
    if kind == "deep":
        return {"checkpoint": {"state": {"net": own}}, "epoch": 1}
    if kind != "state":
        own = own if set(own) & {"state_dict", "model", "checkpoint"} else {rng.choice(WRAPPERS): own}
    if rng.random() < 0.2 and kind != "state":
        own["ema"] = {name: value.clone() for name, value in _flat(own).items()}
    if rng.random() < 0.2:
        name, value = next(iter(_flat(own).items()))
        _flat(own)[name + "_tied"] = value
    if kind == "training":
        for name in rng.sample(list(BESIDE), rng.randint(1, 4)):
            own[name] = BESIDE[name]()
    return own


WRAPPERS = ("state_dict", "model", "net", "params_ema", "weight", "model_state_dict", "module")


def _flat(own: Any) -> Any:
    while all(not isinstance(value, torch.Tensor) for value in own.values()):
        own = next(value for value in own.values() if isinstance(value, dict))
    return own


def _pickled(rng: random.Random, folder: Path) -> str:
    value = _content(rng)
    tags = rng.choices(DEVICES, k=2)
    name = f"file{rng.choice(EXTENSIONS)}" if rng.random() < 0.9 else "file.safetensors"
    with foreign.importable(), pytest.MonkeyPatch.context() as patch:
        numbers: dict[int, int] = {}

        def tag(storage: Any) -> str:
            return tags[numbers.setdefault(storage.data_ptr(), len(numbers)) % 2]

        patch.setattr(torch.serialization, "location_tag", tag)
        legacy, protocol = rng.random() < 0.15, rng.choice((2, 2, 2, 2, 3, 4, 5))
        torch.save(value, folder / name, _use_new_zipfile_serialization=not legacy, pickle_protocol=protocol)
    return name


def _tensors(rng: random.Random) -> dict[str, torch.Tensor]:
    own = _flat(copy.deepcopy(_weights(rng)))
    return {name: value.contiguous() for name, value in own.items()}


def _safetensors(rng: random.Random, folder: Path) -> str:
    own = _tensors(rng)
    if rng.random() < 0.2:
        name = next(iter(own))
        own[name + ".empty"] = torch.empty(0)
    path = "model.safetensors" if rng.random() < 0.7 else f"model{rng.choice(EXTENSIONS)}"
    save_file(own, folder / path, rng.choice((None, {"format": "pt"})))
    return path


def _shards(rng: random.Random, folder: Path) -> str:
    own = list(_tensors(rng).items())
    root = folder / "hf"
    root.mkdir()
    half, ending = len(own) // 2, rng.choice((".safetensors", ".bin"))
    stem = "model" if ending == ".safetensors" else "pytorch_model"
    listed: dict[str, str] = {}
    for number, part in enumerate((own[:half], own[half:]), 1):
        name = f"{stem}-{number:05}-of-00002{ending}"
        if ending == ".bin":
            torch.save(OrderedDict(part), root / name)
        else:
            save_file(dict(part), root / name, {"format": "pt"})
        listed |= {key: name for key, _ in part}
    size = sum(value.nbytes for _, value in own)
    if rng.random() < 0.8:
        index = {"metadata": {"total_size": size}, "weight_map": listed}
        (root / f"{stem}{ending}.index.json").write_text(json.dumps(index))
    if rng.random() < 0.3:
        (root / "config.json").write_text(json.dumps({"model_type": "net"}))
    return "hf"


def _bare_pickle(rng: random.Random, folder: Path) -> str:
    arrays = {f"layer{number}.weight": numpy.ones((2, 3), "f4") * number for number in range(3)}
    name = rng.choice(list(BESIDE))
    value: Any = rng.choice(
        (arrays, {"weights": arrays, "policy_spec": foreign.Config(1)}, {"model": arrays, name: BESIDE[name]()})
    )
    with foreign.importable():
        (folder / "weights.pkl").write_bytes(pickle.dumps(value, protocol=rng.choice((2, 4))))
    return "weights.pkl"
