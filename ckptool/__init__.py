"""ckptool: PyTorch checkpoints as metadata plus untouched bytes.

    >>> import ckptool
    >>> with ckptool.open("model.pth") as checkpoint:
    ...     ckptool.save(ckptool.strip_prefix(checkpoint), "plain.pth")

Nothing in a checkpoint is ever executed; torch is imported by ``ckptool.load`` alone.
"""

from __future__ import annotations

from . import errors
from .api import (
    Change,
    Checkpoint,
    CkptoolError,
    DeviceMap,
    Globs,
    Lost,
    Policy,
    Salvaged,
    StateDict,
    Tensor,
    TensorEntry,
    Written,
    add_prefix,
    average,
    cast,
    drop,
    edit,
    extract,
    inspect,
    keep,
    keys,
    load,
    match,
    merge,
    open,
    redact,
    remap_devices,
    rename,
    salvage,
    sanitize,
    save,
    set_entry,
    slim,
    strip_prefix,
    strip_wrappers,
    unset,
    validate,
    wrap,
)

__version__ = "0.1.0"

__all__ = [
    "Change",
    "Checkpoint",
    "CkptoolError",
    "DeviceMap",
    "Globs",
    "Lost",
    "Policy",
    "Salvaged",
    "StateDict",
    "Tensor",
    "TensorEntry",
    "Written",
    "__version__",
    "add_prefix",
    "average",
    "cast",
    "drop",
    "edit",
    "errors",
    "extract",
    "inspect",
    "keep",
    "keys",
    "load",
    "match",
    "merge",
    "open",
    "redact",
    "remap_devices",
    "rename",
    "salvage",
    "sanitize",
    "save",
    "set_entry",
    "slim",
    "strip_prefix",
    "strip_wrappers",
    "unset",
    "validate",
    "wrap",
]
