"""The library: ``import ckptool`` gives these. Neither torch nor click is imported by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..base import lazy
from ..base.errors import CkptoolError
from ..base.globs import Globs
from ..checkpoint.changes import Change
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.survey import StateDict, TensorEntry
from ..checkpoint.tensors import Tensor
from ..formats.opening import open_checkpoint

if TYPE_CHECKING:
    from ..edits.convert import convert
    from ..edits.devices import DeviceMap, remap, remap_devices
    from ..edits.entries import Scalar, drop, extract, keep, set_entry, unset, wrap
    from ..edits.keys import add_module, add_prefix, strip_module, strip_prefix, strip_wrappers
    from ..edits.repack import repack
    from ..edits.salvage import Lost, Salvaged, salvage
    from ..files.write.output import Written
    from ..reports.expectations import Policy
    from ..reports.get import ObjectValue, TensorValue
    from ..saving import Saved, history, load, save, save_in_place, undo
    from .edits import average, cast, edit, merge, redact, rename, sanitize, slim
    from .reports import diff, get, hash, inspect, keys, lock, match, stats, validate, write_lock

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
    "Scalar",
    "StateDict",
    "Tensor",
    "TensorEntry",
    "TensorValue",
    "Written",
    "add_module",
    "add_prefix",
    "average",
    "cast",
    "convert",
    "diff",
    "drop",
    "edit",
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

open = open_checkpoint

#: Names whose modules are imported when they are first asked for: a command needs one or two of them.
_LATE: Final = {
    **dict.fromkeys(("Policy",), "reports.expectations"),
    **dict.fromkeys(("convert",), "edits.convert"),
    **dict.fromkeys(("DeviceMap", "remap", "remap_devices"), "edits.devices"),
    **dict.fromkeys(("Scalar", "drop", "extract", "keep", "set_entry", "unset", "wrap"), "edits.entries"),
    **dict.fromkeys(("add_module", "add_prefix", "strip_module", "strip_prefix", "strip_wrappers"), "edits.keys"),
    **dict.fromkeys(("repack",), "edits.repack"),
    **dict.fromkeys(("ObjectValue", "TensorValue"), "reports.get"),
    **dict.fromkeys(("Lost", "Salvaged", "salvage"), "edits.salvage"),
    **dict.fromkeys(("Written",), "files.write.output"),
    **dict.fromkeys(
        ("diff", "get", "hash", "inspect", "keys", "lock", "match", "stats", "validate", "write_lock"), "api.reports"
    ),
    **dict.fromkeys(("average", "cast", "edit", "merge", "redact", "rename", "sanitize", "slim"), "api.edits"),
    **dict.fromkeys(("Saved", "history", "load", "save", "save_in_place", "undo"), "saving"),
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(lazy.module(_LATE[name]), name)
        return found
