"""Situations about classes of other packages in the pickle."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import functools
import pathlib
import pickle
from typing import Any

import foreign_objects
import numpy as np
import pytest
import torch
from stand_ins import STATE, Net, called, instance, place, stand_in, state, trained
from torch import nn

from .situation import Situation, error_of, fits, holds, register

SITUATIONS: list[Situation] = []
situation = register(SITUATIONS)


def module(name: str, base: type[nn.Module] = Net) -> Any:
    """Return the trained model as an object of a class with this full name."""
    model = trained()
    model.__class__ = stand_in(name, base)
    return model


@situation(ends=holds(entry="model"))
def fairseq() -> str:
    with foreign_objects.importable():
        value = {
            "args": argparse.Namespace(arch="hubert"),
            "cfg": foreign_objects.DictConfig({"model": {"layers": 12}}),
            "model": state(),
            "task_state": {"dictionaries": [instance("fairseq.data.dictionary.Dictionary", symbols=["<s>"])]},
        }
        torch.save(value, "hubert_base.pt")
    return error_of(torch.load, "hubert_base.pt")


@situation(ends=holds(entry="model"))
def windows_path() -> str:
    class Windows:
        def __reduce__(self) -> Any:
            return pathlib.WindowsPath, ("C:\\", "runs")

    torch.save({"model": state(), "opt": {"save_dir": Windows()}}, "last.pt")
    return "NotImplementedError: cannot instantiate 'WindowsPath' on your system"


@situation(ends=holds())
def yolov8() -> str:
    model = module("ultralytics.nn.tasks.DetectionModel")
    torch.save({"epoch": -1, "model": model, "ema": None, "train_args": {"imgsz": 640}}, "best.pt")
    return error_of(torch.load, "best.pt")


@situation(ends=holds(entry="state_dict"))
def old_lightning() -> str:
    stopping = stand_in("pytorch_lightning.callbacks.early_stopping.EarlyStopping")
    attributes = stand_in("pytorch_lightning.utilities.parsing.AttributeDict", dict)
    hparams = attributes(lr=0.1, loss=nn.CrossEntropyLoss(), activation=functools.partial(torch.relu))
    value = {
        "epoch": 9,
        "global_step": 90,
        "pytorch-lightning_version": "1.0.0",
        "callbacks": {stopping: {"wait_count": 1}},
        "hyper_parameters": hparams,
        "state_dict": state(),
    }
    torch.save(value, "epoch=9.ckpt")
    return error_of(torch.load, "epoch=9.ckpt")


@situation(ends=holds(entry="model"))
def scaler() -> str:
    fitted = instance("sklearn.preprocessing._data.StandardScaler", mean_=np.zeros(3), scale_=np.ones(3), n_samples_=9)
    values = {"int": np.int64(1), "float": np.float32(2.0), "bool": np.bool_(True), "dtype": np.dtype("float16")}
    torch.save({"model": state(), "scaler": fitted, "values": values}, "model.pth")
    return error_of(torch.load, "model.pth")


class _Phase(enum.Enum):
    TRAIN = 1


@situation(ends=holds(entry="model"))
def configurations() -> str:
    with foreign_objects.importable():
        value = {
            "model": state(),
            "easydict": foreign_objects.EasyDict(lr=1),
            "addict": foreign_objects.AddictDict(lr=1),
            "yacs": foreign_objects.CfgNode(lr=1),
            "omegaconf": foreign_objects.DictConfig({"lr": 1}),
            "ml_collections": instance("ml_collections.config_dict.config_dict.ConfigDict", _fields={"lr": 1}),
            "phase": place("project.phases.Phase", _Phase).TRAIN,
        }
        torch.save(value, "model.pth")
    return error_of(torch.load, "model.pth")


@situation(ends=holds(entry="policy"))
def lambda_by_cloudpickle() -> str:
    cloudpickle = pytest.importorskip("cloudpickle")
    torch.save({"policy": state(), "lr_schedule": lambda left: left * 0.1}, "model.pth", pickle_module=cloudpickle)
    return error_of(torch.load, "model.pth")


@situation(ends=holds(entry="model"))
def methods() -> str:
    torch.save({"model": state(), "clean": str.lower, "make": dict.fromkeys, "now": datetime.datetime.now}, "model.pth")
    return error_of(torch.load, "model.pth")


@situation()
def params4bit() -> str:
    cls = place("bitsandbytes.nn.modules.Params4bit", type("Params4bit", (nn.Parameter,), {}))
    quant_state = instance("bitsandbytes.functional.QuantState", absmax=torch.ones(4), blocksize=64, quant_type="nf4")

    class Weight:
        def __reduce__(self) -> Any:
            attributes = {"blocksize": 64, "quant_type": "nf4", "quant_state": quant_state, "bnb_quantized": True}
            rebuilt = (torch.ones(32, 1, dtype=torch.uint8), False, collections.OrderedDict())
            return torch._tensor._rebuild_from_type_v2, (torch._utils._rebuild_parameter, cls, rebuilt, attributes)

    torch.save({"fc.weight": Weight(), "norm.weight": torch.ones(4)}, "model.pth")
    return error_of(torch.load, "model.pth")


@situation(ends=holds())
def newer_torch() -> str:
    tensors = {}
    for key, value in STATE.items():
        made = nn.Parameter(value.clone()) if value.is_floating_point() else value
        if isinstance(made, nn.Parameter):
            made.note = "set by the training"
        tensors[key] = made
    torch.save(tensors, "model.pth")
    return (
        "AttributeError: Can't get attribute '_rebuild_parameter_with_state' on <module 'torch._utils' from "
        "'torch/_utils.py'>"
    )


@situation()
def quantized_modules() -> str:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 2)), {nn.Linear}, dtype=torch.qint8)
    torch.save(model, "quantized.pth")
    return error_of(torch.load, "quantized.pth")


@situation(ends=holds())
def stylegan_persistence() -> str:
    attributes = stand_in("dnnlib.util.EasyDict", dict)
    meta = {"type": "class", "version": 6, "module_src": "import torch", "class_name": "Generator"}
    network = called(
        "torch_utils.persistence._reconstruct_persistent_obj", attributes(**meta, state=attributes(trained().__dict__))
    )
    pathlib.Path("network-snapshot.pkl").write_bytes(pickle.dumps({"G_ema": network, "training_set_kwargs": None}))
    return "ModuleNotFoundError: No module named 'torch_utils'"


@situation(ends=holds())
def detectron2() -> str:
    arrays = {key: value.numpy() for key, value in STATE.items()}
    pathlib.Path("model_final.pkl").write_bytes(pickle.dumps({"model": arrays, "__author__": "MSRA"}))
    return ""


@situation(ends=fits(Net))
def compiled_model() -> str:
    torch.save(torch.compile(module("models.Net")), "model.pth")
    return error_of(torch.load, "model.pth")


@situation(ends=holds())
def protocol_5() -> str:
    torch.save(state(), "model.pth", pickle_protocol=5)
    return "ValueError: unsupported pickle protocol: 5"
