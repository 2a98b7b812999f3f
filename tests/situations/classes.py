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

from .situation import Situation, error_of, fits, holds, loaded, register

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
def namespace() -> str:
    torch.save({"model": state(), "args": argparse.Namespace(lr=0.1, layers=[1, 2])}, "model.pth")
    return error_of(torch.load, "model.pth")


@situation(ends=holds(entry="state_dict"))
def mmengine() -> str:
    history = instance(
        "mmengine.logging.history_buffer.HistoryBuffer",
        _max_length=1000000,
        _log_history=np.array([0.5, 0.25]),
        _count_history=np.array([1, 1]),
    )
    torch.save({"state_dict": state(), "message_hub": {"log_scalars": {"train/loss": history}}}, "epoch_12.pth")
    return error_of(torch.load, "epoch_12.pth")


class _Path:
    """A path, as Python 3.13 and other systems pickle it."""

    home = ""

    def __reduce__(self) -> Any:
        return type(self), ("runs", "train")


@situation(ends=holds(entry="model"))
def python_313_path() -> str:
    made = stand_in("pathlib._local.PosixPath", _Path)()
    torch.save({"model": state(), "opt": {"save_dir": made}}, "last.pt")
    return "ModuleNotFoundError: No module named 'pathlib._local'; 'pathlib' is not a package"


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


@situation(ends=holds())
def yolov5() -> str:
    torch.save({"model": module("models.yolo.Model"), "epoch": 3}, "md_v5a.0.0.pt")
    return error_of(torch.load, "md_v5a.0.0.pt", weights_only=False)


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


@situation(ends=lambda output: _embedding(output))
def textual_inversion() -> str:
    params = nn.ParameterDict({"*": nn.Parameter(torch.ones(2, 8))})
    torch.save({"string_to_token": {"*": 265}, "string_to_param": params, "name": "style", "step": 9}, "style.pt")
    return error_of(torch.load, "style.pt")


def _embedding(output: str) -> None:
    assert torch.equal(loaded(output)["string_to_param"]["*"], torch.ones(2, 8))


@situation(ends=holds(entry="network_weights"))
def nnunet() -> str:
    log = {"mean_fg_dice": [np.float64(0.8), np.float32(0.9)], "epoch_end_timestamps": [1.5]}
    torch.save({"network_weights": state(), "logging": log, "_best_ema": np.float64(0.85)}, "checkpoint_final.pth")
    return error_of(torch.load, "checkpoint_final.pth")


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


@situation(ends=holds(entry="model"))
def coqui() -> str:
    torch.save({"config": instance("TTS.tts.configs.xtts_config.XttsConfig", model="xtts"), "model": state()},
               "model.pth")  # fmt: skip
    return error_of(torch.load, "model.pth")


@situation(ends=holds(entry="policy"))
def lambda_by_cloudpickle() -> str:
    cloudpickle = pytest.importorskip("cloudpickle")
    torch.save({"policy": state(), "lr_schedule": lambda left: left * 0.1}, "model.pth", pickle_module=cloudpickle)
    return error_of(torch.load, "model.pth")


@situation(ends=fits(Net))
def whole_ddp_model() -> str:
    network = trained()
    network.__class__ = place("models.Net", type("Net", (Net,), {}))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        torch.save(nn.parallel.DistributedDataParallel(network), "model.pth")
    finally:
        torch.distributed.destroy_process_group()
    return "ValueError: Default process group has not been initialized, please make sure to call init_process_group."


@situation(ends=fits(Net))
def model_in_place_of_a_state_dict() -> str:
    torch.save(module("models.Net"), "model.pth")
    return "AttributeError: 'Net' object has no attribute 'copy'"


@situation()
def state_dict_in_place_of_a_model() -> str:
    torch.save(state(), "model.pth")
    return error_of(lambda: torch.load("model.pth").eval())


@situation(ends=holds())
def fastai() -> str:
    class Windows:
        def __reduce__(self) -> Any:
            return pathlib.WindowsPath, ("C:\\", "data")

    learner = instance("fastai.learner.Learner", model=trained(), path=Windows(), opt=None)
    torch.save(learner, "export.pkl")
    return "NotImplementedError: cannot instantiate 'WindowsPath' on your system"


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
def stylegan() -> str:
    networks = {"G": module("training.networks.Generator"), "G_ema": module("training.networks.Generator")}
    pathlib.Path("network-snapshot.pkl").write_bytes(pickle.dumps(networks))
    return "ModuleNotFoundError: No module named 'training'"


@situation(ends=holds())
def stylegan_persistence() -> str:
    attributes = stand_in("dnnlib.util.EasyDict", dict)
    meta = {"type": "class", "version": 6, "module_src": "import torch", "class_name": "Generator"}
    network = called(
        "torch_utils.persistence._reconstruct_persistent_obj", attributes(**meta, state=attributes(trained().__dict__))
    )
    pathlib.Path("network-snapshot.pkl").write_bytes(pickle.dumps({"G_ema": network, "training_set_kwargs": None}))
    return "ModuleNotFoundError: No module named 'torch_utils'"


@situation(ends=holds(entry="weights"))
def rllib() -> str:
    arrays = {key: value.numpy() for key, value in STATE.items()}
    spec = instance("ray.rllib.policy.policy.PolicySpec", policy_class=None)
    pathlib.Path("policy_state.pkl").write_bytes(pickle.dumps({"weights": arrays, "policy_spec": spec}))
    return "ModuleNotFoundError: No module named 'ray'"


@situation(ends=holds())
def detectron2() -> str:
    arrays = {key: value.numpy() for key, value in STATE.items()}
    pathlib.Path("model_final.pkl").write_bytes(pickle.dumps({"model": arrays, "__author__": "MSRA"}))
    return ""


@situation(ends=holds())
def model_by_pickle_dump() -> str:
    pathlib.Path("model.pkl").write_bytes(pickle.dumps(module("detectron2.modeling.meta_arch.rcnn.GeneralizedRCNN")))
    return error_of(torch.load, "model.pkl", weights_only=False)


@situation(ends=lambda output: _has_edges(output))
def geometric() -> str:
    storage = instance("torch_geometric.data.storage.GlobalStorage", _mapping={"edge_index": torch.ones(2, 3)})
    torch.save((instance("torch_geometric.data.data.Data", _store=storage), None), "processed.pt")
    return error_of(torch.load, "processed.pt")


def _has_edges(output: str) -> None:
    assert any(torch.equal(value, torch.ones(2, 3)) for value in _tensors(loaded(output)))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return [value] if isinstance(value, torch.Tensor) else []


@situation(ends=fits(Net))
def compiled_model() -> str:
    torch.save(torch.compile(module("models.Net")), "model.pth")
    return error_of(torch.load, "model.pth")


@situation(ends=lambda output: _has_linear(output))
def fx_model() -> str:
    torch.save(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 2))), "model.pth")
    return error_of(torch.load, "model.pth")


def _has_linear(output: str) -> None:
    nn.Sequential(nn.Linear(4, 2)).load_state_dict(loaded(output))


@situation(ends=lambda output: _has_rate(output))
def training_arguments() -> str:
    class Strategy(str, enum.Enum):
        NO = "no"

    strategy = place("transformers.trainer_utils.IntervalStrategy", Strategy)
    arguments = instance("transformers.training_args.TrainingArguments", learning_rate=5e-5, eval_strategy=strategy.NO)
    torch.save(arguments, "training_args.bin")
    return error_of(torch.load, "training_args.bin")


def _has_rate(output: str) -> None:
    assert loaded(output)["learning_rate"] == 5e-5


@situation(ends=holds())
def older_layers() -> str:
    torch.save({"model": module("models.yolo.Model"), "epoch": 3}, "best.pt")
    return "AttributeError: 'Upsample' object has no attribute 'recompute_scale_factor'"


@situation(ends=holds(entry="model"))
def numpy_2() -> str:
    torch.save({"model": state(), "mean": np.array([0.5, 0.25]), "best": np.float64(0.9)}, "model.pth")
    return "ModuleNotFoundError: No module named 'numpy._core'"


@situation(ends=holds())
def protocol_5() -> str:
    torch.save(state(), "model.pth", pickle_protocol=5)
    return "ValueError: unsupported pickle protocol: 5"
