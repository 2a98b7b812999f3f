"""ckptool: PyTorch checkpoints as metadata plus untouched bytes.

    >>> import ckptool
    >>> with ckptool.open("model.pth") as checkpoint:
    ...     ckptool.save(ckptool.strip_module(checkpoint), "plain.pth")

Nothing in a checkpoint is ever executed. Only functions that compute with values or really load them import torch:
``ckptool.load``, ``stats``, ``cast``, ``average``, and comparisons with a tolerance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import errors
from .base import lazy as _lazy

if TYPE_CHECKING:
    from .base.errors import CkptoolError
    from .checkpoint.checkpoint import Change, Checkpoint
    from .checkpoint.survey import StateDict, TensorEntry
    from .checkpoint.tensors import Tensor
    from .edits.averages import wrap
    from .edits.cast import cast
    from .edits.combine import average, merge
    from .edits.convert import convert
    from .edits.dequantize import dequantize
    from .edits.devices import DeviceMap, remap
    from .edits.entries import Scalar, drop, extract, keep
    from .edits.entries import set_entry as set
    from .edits.keys import add_prefix as add_module
    from .edits.keys import strip_prefix as strip_module
    from .edits.keys import strip_wrappers
    from .edits.lora import merge_lora
    from .edits.lora_layouts import convert_lora
    from .edits.matching.match import match
    from .edits.model_config import update_config
    from .edits.pipeline import edit, rename
    from .edits.ranks import extract_lora, resize_lora
    from .edits.redact import redact
    from .edits.resize import resize
    from .edits.salvage import Lost, Salvaged, SalvagedState, salvage
    from .edits.sanitize.sanitizer import sanitize
    from .edits.slim import repack, slim
    from .files.write.output import Written
    from .formats.opening import open_checkpoint as open
    from .reports.comparing.diff import diff
    from .reports.comparing.fingerprint import hash
    from .reports.comparing.lock import lock, write_lock
    from .reports.entries import get
    from .reports.expectations import Policy
    from .reports.explaining.explanation import explain
    from .reports.inspection import inspect
    from .reports.keys import keys
    from .reports.page.page import report
    from .reports.scan import scan
    from .reports.stats import stats
    from .reports.validate import validate
    from .saving import Saved, history, load, save, save_in_place, undo
    from .values.lazy_tensor import TensorValue
    from .values.objects import ListView, MappingView, ObjectValue

__version__ = "0.1.0"

__all__ = [
    "Change",
    "Checkpoint",
    "CkptoolError",
    "DeviceMap",
    "ListView",
    "Lost",
    "MappingView",
    "ObjectValue",
    "Policy",
    "Salvaged",
    "SalvagedState",
    "Saved",
    "Scalar",
    "StateDict",
    "Tensor",
    "TensorEntry",
    "TensorValue",
    "Written",
    "__version__",
    "add_module",
    "average",
    "cast",
    "convert",
    "convert_lora",
    "dequantize",
    "diff",
    "drop",
    "edit",
    "errors",
    "explain",
    "extract",
    "extract_lora",
    "get",
    "hash",
    "history",
    "inspect",
    "keep",
    "keys",
    "load",
    "lock",
    "match",
    "merge",
    "merge_lora",
    "open",
    "redact",
    "remap",
    "rename",
    "repack",
    "report",
    "resize",
    "resize_lora",
    "salvage",
    "sanitize",
    "save",
    "save_in_place",
    "scan",
    "set",
    "slim",
    "stats",
    "strip_module",
    "strip_wrappers",
    "undo",
    "update_config",
    "validate",
    "wrap",
    "write_lock",
]

#: The public names by module. A module is imported when one of its names is first used.
_NAMES = {
    "base.errors": ("CkptoolError",),
    "checkpoint.checkpoint": ("Change", "Checkpoint"),
    "checkpoint.survey": ("StateDict", "TensorEntry"),
    "checkpoint.tensors": ("Tensor",),
    "edits.cast": ("cast",),
    "edits.combine": ("average", "merge"),
    "edits.convert": ("convert",),
    "edits.devices": ("DeviceMap", "remap"),
    "edits.entries": ("Scalar", "drop", "extract", "keep", "set"),
    "edits.keys": ("add_module", "strip_module", "strip_wrappers"),
    "edits.lora": ("merge_lora",),
    "edits.ranks": ("extract_lora", "resize_lora"),
    "edits.lora_layouts": ("convert_lora",),
    "edits.matching.match": ("match",),
    "edits.model_config": ("update_config",),
    "edits.pipeline": ("edit", "rename"),
    "edits.averages": ("wrap",),
    "edits.redact": ("redact",),
    "edits.dequantize": ("dequantize",),
    "edits.resize": ("resize",),
    "edits.salvage": ("Lost", "Salvaged", "SalvagedState", "salvage"),
    "edits.sanitize.sanitizer": ("sanitize",),
    "edits.slim": ("repack", "slim"),
    "files.write.output": ("Written",),
    "reports.comparing.diff": ("diff",),
    "reports.comparing.fingerprint": ("hash",),
    "reports.comparing.lock": ("lock", "write_lock"),
    "reports.expectations": ("Policy",),
    "reports.explaining.explanation": ("explain",),
    "reports.entries": ("get",),
    "reports.inspection": ("inspect",),
    "reports.keys": ("keys",),
    "reports.page.page": ("report",),
    "reports.scan": ("scan",),
    "reports.stats": ("stats",),
    "reports.validate": ("validate",),
    "saving": ("Saved", "history", "load", "save", "save_in_place", "undo"),
    "values.lazy_tensor": ("TensorValue",),
    "values.objects": ("ListView", "MappingView", "ObjectValue"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names} | {"open": "formats.opening"}

#: Public names of functions that have another name in their module.
_FUNCTIONS = {"add_module": "add_prefix", "open": "open_checkpoint", "set": "set_entry", "strip_module": "strip_prefix"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(_lazy.module(_MODULES[name]), _FUNCTIONS.get(name, name))
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted(__all__)
