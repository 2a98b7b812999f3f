"""The library: ``import ckptool`` gives these. Neither torch nor click is imported by it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from ..changes import Change
from ..checkpoint import Checkpoint
from ..errors import CkptoolError
from ..names import Globs
from ..opening import open_checkpoint
from ..survey import StateDict, TensorEntry
from ..tensors import Tensor

if TYPE_CHECKING:
    from ..checks.policy import Policy
    from ..converting import convert
    from ..edits.devices import DeviceMap, remap, remap_devices
    from ..edits.entries import Scalar, drop, extract, keep, set_entry, unset, wrap
    from ..edits.keys import add_module, add_prefix, strip_module, strip_prefix, strip_wrappers
    from ..edits.repack import repack
    from ..getting import ObjectValue, TensorValue
    from ..salvaging import Lost, Salvaged, salvage
    from ..write import Written
    from .edits import average, cast, edit, merge, redact, rename, sanitize, slim
    from .files import load, save
    from .in_place import history, save_in_place, undo
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
    **dict.fromkeys(("Policy",), "checks.policy"),
    **dict.fromkeys(("convert",), "converting"),
    **dict.fromkeys(("DeviceMap", "remap", "remap_devices"), "edits.devices"),
    **dict.fromkeys(("Scalar", "drop", "extract", "keep", "set_entry", "unset", "wrap"), "edits.entries"),
    **dict.fromkeys(("add_module", "add_prefix", "strip_module", "strip_prefix", "strip_wrappers"), "edits.keys"),
    **dict.fromkeys(("repack",), "edits.repack"),
    **dict.fromkeys(("ObjectValue", "TensorValue"), "getting"),
    **dict.fromkeys(("Lost", "Salvaged", "salvage"), "salvaging"),
    **dict.fromkeys(("Written",), "write"),
    **dict.fromkeys(
        ("diff", "get", "hash", "inspect", "keys", "lock", "match", "stats", "validate", "write_lock"), "api.reports"
    ),
    **dict.fromkeys(("average", "cast", "edit", "merge", "redact", "rename", "sanitize", "slim"), "api.edits"),
    **dict.fromkeys(("load", "save"), "api.files"),
    **dict.fromkeys(("history", "save_in_place", "undo"), "api.in_place"),
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"ckptool.{_LATE[name]}"), name)
        return found
