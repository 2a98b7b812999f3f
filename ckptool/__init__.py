"""ckptool: PyTorch checkpoints as metadata plus untouched bytes.

    >>> import ckptool
    >>> with ckptool.open("model.pth") as checkpoint:
    ...     ckptool.save(ckptool.strip_prefix(checkpoint), "plain.pth")

Nothing in a checkpoint is ever executed; torch is imported by ``ckptool.load`` and
``ckptool.stats`` alone, and by checks that were asked to read values.
"""

from __future__ import annotations

import typing as _typing

from . import errors
from .api import (
    Change,
    Checkpoint,
    CkptoolError,
    DeviceMap,
    Lost,
    Policy,
    Salvaged,
    StateDict,
    Tensor,
    TensorEntry,
    Written,
    add_prefix,
    drop,
    extract,
    get,
    inspect,
    keep,
    keys,
    load,
    open,
    remap_devices,
    salvage,
    sanitize,
    save,
    set_entry,
    stats,
    strip_prefix,
    strip_wrappers,
    unset,
    validate,
    wrap,
)

if _typing.TYPE_CHECKING:
    from .getting import ObjectValue, TensorValue

__version__ = "0.1.0"

__all__ = [
    "Change",
    "Checkpoint",
    "CkptoolError",
    "DeviceMap",
    "Lost",
    "ObjectValue",
    "Policy",
    "Salvaged",
    "StateDict",
    "Tensor",
    "TensorEntry",
    "TensorValue",
    "Written",
    "__version__",
    "add_prefix",
    "drop",
    "errors",
    "extract",
    "get",
    "inspect",
    "keep",
    "keys",
    "load",
    "open",
    "remap_devices",
    "salvage",
    "sanitize",
    "save",
    "set_entry",
    "stats",
    "strip_prefix",
    "strip_wrappers",
    "unset",
    "validate",
    "wrap",
]


def __getattr__(name: str) -> object:
    """The classes of what ``get`` gives, which nothing else needs."""
    if name in ("ObjectValue", "TensorValue"):
        from . import getting

        return getattr(getting, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
