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


@situation(
    "RVC-Project/Retrieval-based-Voice-Conversion-WebUI#2419, #2575",
    "hubert_base.pt of fairseq: a dictionary of fairseq, omegaconf and a Namespace beside the weights",
    "inspect hubert_base.pt",
    "explain MESSAGE hubert_base.pt",
    cause="fairseq",
    ends=holds(entry="model"),
)
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


@situation(
    "",
    "a script saved its argparse.Namespace",
    "inspect model.pth",
    "explain MESSAGE model.pth",
    cause=r"argparse\.Namespace",
    ends=holds(entry="model"),
)
def namespace() -> str:
    torch.save({"model": state(), "args": argparse.Namespace(lr=0.1, layers=[1, 2])}, "model.pth")
    return error_of(torch.load, "model.pth")


@situation(
    "open-mmlab/mmengine#1655, CAMMA-public/UltraSam#12",
    "mmengine keeps the history of the loss as objects",
    "inspect epoch_12.pth",
    "explain MESSAGE epoch_12.pth",
    cause=r"mmengine\.logging",
    ends=holds(entry="state_dict"),
)
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


@situation(
    "ultralytics/yolov5#13625, ultralytics/ultralytics#25258, aqlaboratory/openfold-3#314",
    "Python 3.13 saved a path, and an older Python has no pathlib._local",
    "inspect last.pt",
    "explain MESSAGE last.pt",
    cause=r"path",
    ends=holds(entry="model"),
)
def python_313_path() -> str:
    made = stand_in("pathlib._local.PosixPath", _Path)()
    torch.save({"model": state(), "opt": {"save_dir": made}}, "last.pt")
    return "ModuleNotFoundError: No module named 'pathlib._local'; 'pathlib' is not a package"


@situation(
    "microsoft/ai4g-flood#15, RCVLab/crowd_counting#3, ultralytics/yolov5#13578",
    "a path of Windows is loaded on Linux",
    "inspect last.pt",
    "explain MESSAGE last.pt",
    cause=r"WindowsPath",
    ends=holds(entry="model"),
)
def windows_path() -> str:
    class Windows:
        def __reduce__(self) -> Any:
            return pathlib.WindowsPath, ("C:\\", "runs")

    torch.save({"model": state(), "opt": {"save_dir": Windows()}}, "last.pt")
    return "NotImplementedError: cannot instantiate 'WindowsPath' on your system"


@situation(
    "ltdrdata/ComfyUI-Impact-Pack#1120, Comfy-Org/ComfyUI#7425",
    "a YOLOv8 best.pt holds the whole model",
    "inspect best.pt",
    "explain MESSAGE best.pt",
    "convert best.pt -o best.safetensors",
    cause=r"ultralytics\.nn\.tasks\.DetectionModel|pickled module",
    ends=holds(),
)
def yolov8() -> str:
    model = module("ultralytics.nn.tasks.DetectionModel")
    torch.save({"epoch": -1, "model": model, "ema": None, "train_args": {"imgsz": 640}}, "best.pt")
    return error_of(torch.load, "best.pt")


@situation(
    "agentmorris/MegaDetector#155",
    "a YOLOv5 file holds models.yolo.Model, and the code of YOLOv5 is not there",
    "inspect md_v5a.0.0.pt",
    "explain MESSAGE md_v5a.0.0.pt",
    cause="models.yolo|'models'",
    ends=holds(),
)
def yolov5() -> str:
    torch.save({"model": module("models.yolo.Model"), "epoch": 3}, "md_v5a.0.0.pt")
    return error_of(torch.load, "md_v5a.0.0.pt", weights_only=False)


@situation(
    "Lightning-AI/pytorch-lightning#4542, #21757",
    "an old Lightning: classes as keys of `callbacks`, AttributeDict, a loss and a partial in the hyperparameters",
    "inspect epoch=9.ckpt",
    "explain MESSAGE epoch=9.ckpt",
    cause="lightning",
    ends=holds(entry="state_dict"),
)
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


@situation(
    "huggingface/diffusers#7511, AUTOMATIC1111/stable-diffusion-webui#1023",
    "a textual inversion .pt holds a ParameterDict",
    "inspect style.pt",
    "explain MESSAGE style.pt",
    cause="ParameterDict",
    ends=lambda output: _embedding(output),
)
def textual_inversion() -> str:
    params = nn.ParameterDict({"*": nn.Parameter(torch.ones(2, 8))})
    torch.save({"string_to_token": {"*": 265}, "string_to_param": params, "name": "style", "step": 9}, "style.pt")
    return error_of(torch.load, "style.pt")


def _embedding(output: str) -> None:
    assert torch.equal(loaded(output)["string_to_param"]["*"], torch.ones(2, 8))


@situation(
    "nnU-Net v2",
    "checkpoint_final.pth of nnU-Net v2 has NumPy scalars in its log",
    "inspect checkpoint_final.pth",
    "explain MESSAGE checkpoint_final.pth",
    cause="numpy",
    ends=holds(entry="network_weights"),
)
def nnunet() -> str:
    log = {"mean_fg_dice": [np.float64(0.8), np.float32(0.9)], "epoch_end_timestamps": [1.5]}
    torch.save({"network_weights": state(), "logging": log, "_best_ema": np.float64(0.85)}, "checkpoint_final.pth")
    return error_of(torch.load, "checkpoint_final.pth")


@situation(
    "",
    "a scaler of scikit-learn and NumPy values of all kinds are kept with the weights",
    "inspect model.pth",
    "explain MESSAGE model.pth",
    cause="sklearn",
    ends=holds(entry="model"),
)
def scaler() -> str:
    fitted = instance("sklearn.preprocessing._data.StandardScaler", mean_=np.zeros(3), scale_=np.ones(3), n_samples_=9)
    values = {"int": np.int64(1), "float": np.float32(2.0), "bool": np.bool_(True), "dtype": np.dtype("float16")}
    torch.save({"model": state(), "scaler": fitted, "values": values}, "model.pth")
    return error_of(torch.load, "model.pth")


class _Phase(enum.Enum):
    TRAIN = 1


@situation(
    "",
    "configurations of EasyDict, addict, yacs, omegaconf, ml_collections and an enum",
    "inspect model.pth",
    "explain MESSAGE model.pth",
    cause=r"EasyDict|addict",
    ends=holds(entry="model"),
)
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


@situation(
    "Coqui XTTS",
    "XTTS of Coqui: XttsConfig",
    "inspect model.pth",
    "explain MESSAGE model.pth",
    cause=r"XttsConfig",
    ends=holds(entry="model"),
)
def coqui() -> str:
    torch.save({"config": instance("TTS.tts.configs.xtts_config.XttsConfig", model="xtts"), "model": state()},
               "model.pth")  # fmt: skip
    return error_of(torch.load, "model.pth")


@situation(
    "",
    "a schedule is a lambda, which cloudpickle saved as code",
    "inspect model.pth",
    "explain MESSAGE model.pth",
    cause="cloudpickle",
    ends=holds(entry="policy"),
)
def lambda_by_cloudpickle() -> str:
    cloudpickle = pytest.importorskip("cloudpickle")
    torch.save({"policy": state(), "lr_schedule": lambda left: left * 0.1}, "model.pth", pickle_module=cloudpickle)
    return error_of(torch.load, "model.pth")


@situation(
    "",
    "a whole DistributedDataParallel model",
    "inspect model.pth",
    "explain MESSAGE model.pth",
    cause="DistributedDataParallel|process group",
    ends=fits(Net),
)
def whole_ddp_model() -> str:
    network = trained()
    network.__class__ = place("models.Net", type("Net", (Net,), {}))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        torch.save(nn.parallel.DistributedDataParallel(network), "model.pth")
    finally:
        torch.distributed.destroy_process_group()
    return "ValueError: Default process group has not been initialized, please make sure to call init_process_group."


@situation(
    "atomistic-machine-learning/schnetpack#44",
    "the code takes a whole model for a state dict",
    "inspect model.pth",
    "explain MESSAGE model.pth",
    cause="whole model|pickled module",
    ends=fits(Net),
)
def model_in_place_of_a_state_dict() -> str:
    torch.save(module("models.Net"), "model.pth")
    return "AttributeError: 'Net' object has no attribute 'copy'"


@situation(
    "",
    "the code takes a state dict for a model",
    "explain MESSAGE model.pth",
    cause="holds a state dict",
    helps="load the state dict into it",
)
def state_dict_in_place_of_a_model() -> str:
    torch.save(state(), "model.pth")
    return error_of(lambda: torch.load("model.pth").eval())


@situation(
    "voila-dashboards/voila#819, Appsilon/mbaza#112, bearpelican/musicautobot#24",
    "export.pkl of fastai: the learner, with a path of Windows",
    "inspect export.pkl",
    "explain MESSAGE export.pkl",
    cause="fastai",
    ends=holds(),
)
def fastai() -> str:
    class Windows:
        def __reduce__(self) -> Any:
            return pathlib.WindowsPath, ("C:\\", "data")

    learner = instance("fastai.learner.Learner", model=trained(), path=Windows(), opt=None)
    torch.save(learner, "export.pkl")
    return "NotImplementedError: cannot instantiate 'WindowsPath' on your system"


@situation(
    "",
    "methods of built-in classes in a configuration: str.lower, dict.fromkeys, datetime.now",
    "inspect model.pth",
    "explain MESSAGE model.pth",
    cause="getattr|method",
    ends=holds(entry="model"),
)
def methods() -> str:
    torch.save({"model": state(), "clean": str.lower, "make": dict.fromkeys, "now": datetime.datetime.now}, "model.pth")
    return error_of(torch.load, "model.pth")


@situation(
    "",
    "4-bit parameters of bitsandbytes in a .pth",
    "inspect model.pth",
    "explain MESSAGE model.pth",
    cause="bitsandbytes",
    helps="load it where bitsandbytes is installed.*save its state dict",
)
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


@situation(
    "",
    "a newer torch saved the file with a function that the person's torch does not have",
    "explain MESSAGE model.pth",
    cause="newer torch",
    ends=holds(),
)
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


@situation(
    "",
    "a whole model quantized by torch.ao: its weights are packed",
    "inspect quantized.pth",
    "explain MESSAGE quantized.pth",
    cause="quant",
    helps="save its state dict",
)
def quantized_modules() -> str:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 2)), {nn.Linear}, dtype=torch.qint8)
    torch.save(model, "quantized.pth")
    return error_of(torch.load, "quantized.pth")


@situation(
    "rosinality/stylegan2-pytorch#250, GANInterface#17, dvschultz/ai#9",
    "a StyleGAN .pkl: pickle.dump of the networks, without their code",
    "inspect network-snapshot.pkl",
    "explain MESSAGE network-snapshot.pkl",
    cause="training.networks",
    ends=holds(),
)
def stylegan() -> str:
    networks = {"G": module("training.networks.Generator"), "G_ema": module("training.networks.Generator")}
    pathlib.Path("network-snapshot.pkl").write_bytes(pickle.dumps(networks))
    return "ModuleNotFoundError: No module named 'training'"


@situation(
    "StyleGAN2-ADA",
    "a StyleGAN .pkl of today: `torch_utils.persistence` keeps the source code beside the weights",
    "inspect network-snapshot.pkl",
    "explain MESSAGE network-snapshot.pkl",
    cause="torch_utils.persistence",
    ends=holds(),
)
def stylegan_persistence() -> str:
    attributes = stand_in("dnnlib.util.EasyDict", dict)
    meta = {"type": "class", "version": 6, "module_src": "import torch", "class_name": "Generator"}
    network = called(
        "torch_utils.persistence._reconstruct_persistent_obj", attributes(**meta, state=attributes(trained().__dict__))
    )
    pathlib.Path("network-snapshot.pkl").write_bytes(pickle.dumps({"G_ema": network, "training_set_kwargs": None}))
    return "ModuleNotFoundError: No module named 'torch_utils'"


@situation(
    "ray-project/ray#7489, ray-project/ray#11903",
    "policy_state.pkl of RLlib: NumPy arrays and a PolicySpec, and Ray is not there",
    "inspect policy_state.pkl",
    "explain MESSAGE policy_state.pkl",
    cause="ray.rllib",
    ends=holds(entry="weights"),
)
def rllib() -> str:
    arrays = {key: value.numpy() for key, value in STATE.items()}
    spec = instance("ray.rllib.policy.policy.PolicySpec", policy_class=None)
    pathlib.Path("policy_state.pkl").write_bytes(pickle.dumps({"weights": arrays, "policy_spec": spec}))
    return "ModuleNotFoundError: No module named 'ray'"


@situation(
    "facebookresearch/Mask2Former#85, facebookresearch/detectron2#450",
    "a .pkl of detectron2, NumPy arrays, should become a .pth",
    "inspect model_final.pkl",
    "convert model_final.pkl -o model_final.pth",
    cause="bare-pickle|tensors",
    ends=holds(),
)
def detectron2() -> str:
    arrays = {key: value.numpy() for key, value in STATE.items()}
    pathlib.Path("model_final.pkl").write_bytes(pickle.dumps({"model": arrays, "__author__": "MSRA"}))
    return ""


@situation(
    "facebookresearch/detectron2#3546",
    "the model was saved by pickle.dump, and torch.load refuses it",
    "inspect model.pkl",
    "explain MESSAGE model.pkl",
    cause="pickle",
    ends=holds(),
)
def model_by_pickle_dump() -> str:
    pathlib.Path("model.pkl").write_bytes(pickle.dumps(module("detectron2.modeling.meta_arch.rcnn.GeneralizedRCNN")))
    return error_of(torch.load, "model.pkl", weights_only=False)


@situation(
    "pytorch_geometric",
    "a data set of PyTorch Geometric is refused by weights_only",
    "inspect processed.pt",
    "explain MESSAGE processed.pt",
    cause="torch_geometric",
    ends=lambda output: _has_edges(output),
)
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


@situation(
    "",
    "a whole model after torch.compile was saved",
    "inspect model.pth",
    "explain MESSAGE model.pth",
    cause="OptimizedModule|pickled module",
    ends=fits(Net),
)
def compiled_model() -> str:
    torch.save(torch.compile(module("models.Net")), "model.pth")
    return error_of(torch.load, "model.pth")


@situation(
    "",
    "a model traced by torch.fx was saved",
    "inspect model.pth",
    "explain MESSAGE model.pth",
    cause=r"torch\.fx",
    ends=lambda output: _has_linear(output),
)
def fx_model() -> str:
    torch.save(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 2))), "model.pth")
    return error_of(torch.load, "model.pth")


def _has_linear(output: str) -> None:
    nn.Sequential(nn.Linear(4, 2)).load_state_dict(loaded(output))


@situation(
    "transformers",
    "training_args.bin of the Trainer is refused by weights_only",
    "inspect training_args.bin",
    "explain MESSAGE training_args.bin",
    cause=r"TrainingArguments",
    ends=lambda output: _has_rate(output),
)
def training_arguments() -> str:
    class Strategy(str, enum.Enum):
        NO = "no"

    strategy = place("transformers.trainer_utils.IntervalStrategy", Strategy)
    arguments = instance("transformers.training_args.TrainingArguments", learning_rate=5e-5, eval_strategy=strategy.NO)
    torch.save(arguments, "training_args.bin")
    return error_of(torch.load, "training_args.bin")


def _has_rate(output: str) -> None:
    assert loaded(output)["learning_rate"] == 5e-5


@situation(
    "YOLOv5",
    "a whole model of an older torch lacks an attribute that today's layers read",
    "explain MESSAGE best.pt",
    cause="lacks an attribute|pickled module",
    ends=holds(),
)
def older_layers() -> str:
    torch.save({"model": module("models.yolo.Model"), "epoch": 3}, "best.pt")
    return "AttributeError: 'Upsample' object has no attribute 'recompute_scale_factor'"


@situation(
    "",
    "NumPy 2 saved the file, and NumPy 1 loads it",
    "inspect model.pth",
    "explain MESSAGE model.pth",
    cause="numpy",
    ends=holds(entry="model"),
)
def numpy_2() -> str:
    torch.save({"model": state(), "mean": np.array([0.5, 0.25]), "best": np.float64(0.9)}, "model.pth")
    return "ModuleNotFoundError: No module named 'numpy._core'"


@situation(
    "",
    "pickle protocol 5 of a newer Python",
    "explain MESSAGE model.pth",
    cause="protocol",
    ends=holds(),
)
def protocol_5() -> str:
    torch.save(state(), "model.pth", pickle_protocol=5)
    return "ValueError: unsupported pickle protocol: 5"
