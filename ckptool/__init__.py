"""ckptool: PyTorch checkpoints as metadata plus untouched bytes.

    >>> import ckptool
    >>> with ckptool.open("model.pth") as checkpoint:
    ...     ckptool.save(ckptool.strip_prefix(checkpoint), "plain.pth")

Nothing in a checkpoint is ever executed; torch is imported by what computes with values or really loads them:
``ckptool.load``, ``stats``, ``cast``, ``average``, and comparisons with a tolerance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import errors

if TYPE_CHECKING:
    from .api import (
        DeviceMap,
        Lost,
        ObjectValue,
        Policy,
        Salvaged,
        Saved,
        TensorValue,
        Written,
        add_module,
        add_prefix,
        average,
        cast,
        convert,
        diff,
        drop,
        edit,
        extract,
        get,
        hash,
        history,
        inspect,
        keep,
        keys,
        load,
        lock,
        match,
        merge,
        open,
        redact,
        remap,
        remap_devices,
        rename,
        repack,
        salvage,
        sanitize,
        save,
        save_in_place,
        set_entry,
        slim,
        stats,
        strip_module,
        strip_prefix,
        strip_wrappers,
        undo,
        unset,
        validate,
        wrap,
        write_lock,
    )
    from .base.errors import CkptoolError
    from .base.globs import Globs
    from .checkpoint.changes import Change
    from .checkpoint.checkpoint import Checkpoint
    from .checkpoint.survey import StateDict, TensorEntry
    from .checkpoint.tensors import Tensor

__version__ = "0.1.0"

__all__ = [
    "Change",
    "Checkpoint",
    "CkptoolError",
    "DeviceMap",
    "Globs",
    "Lost",
    "ObjectValue",
    "Policy",
    "Salvaged",
    "Saved",
    "StateDict",
    "Tensor",
    "TensorEntry",
    "TensorValue",
    "Written",
    "__version__",
    "add_module",
    "add_prefix",
    "average",
    "cast",
    "convert",
    "diff",
    "drop",
    "edit",
    "errors",
    "extract",
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
    "open",
    "redact",
    "remap",
    "remap_devices",
    "rename",
    "repack",
    "salvage",
    "sanitize",
    "save",
    "save_in_place",
    "set_entry",
    "slim",
    "stats",
    "strip_module",
    "strip_prefix",
    "strip_wrappers",
    "undo",
    "unset",
    "validate",
    "wrap",
    "write_lock",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # ``ckptool --help`` needs none of them.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import api

        found = globals()[name] = getattr(api, name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
