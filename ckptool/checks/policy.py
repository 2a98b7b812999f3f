"""What a release expects, as data: from options, or from a policy file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ..dtypes import BY_NAME, SHORT_NAMES
from ..errors import TargetError
from ..locations import is_device

__all__ = ["Policy", "policy_of"]

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class Policy(NamedTuple):
    """What is expected; an empty field expects nothing.

    ``layout`` "bare" or "wrapped"; ``prefix`` "none" or a prefix that every key must have; ``device`` and ``dtype``
    are what every storage, and every floating-point tensor of the state dicts, must be one of (``cuda:*`` is any
    cuda device); ``require`` and ``forbid`` are globs of keys or paths; ``max_bytes`` bounds the file.
    ``lock`` is the path of a lock file (``ckptool lock``) that the checkpoint must agree with.
    ``finite`` and ``load`` need torch; ``map_location`` is for ``load``. ``strict`` makes warnings failures.
    """

    layout: str = ""
    prefix: str = ""
    device: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    max_bytes: int = 0
    weights_only: bool = False
    finite: bool = False
    load: bool = False
    map_location: str = ""
    torch: str = ""
    lock: str = ""
    strict: bool = False


_TEXTS: Final = ("layout", "prefix", "map_location", "torch", "lock")
_LISTS: Final = ("device", "dtype", "require", "forbid")
_FLAGS: Final = ("weights_only", "finite", "load", "strict")


def policy_of(values: Mapping[str, Any], path: str = "") -> Policy:
    """A policy from named values, dashes or underscores alike; raises TargetError for what makes no sense."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in Policy._fields:
            known = ", ".join(field.replace("_", "-") for field in Policy._fields)
            raise TargetError(f"{key!r} is nothing that can be expected", path=path, next=f"there are: {known}")
        found[name] = _value(name, key, value, path)
    policy = Policy(**found)
    # As torch.__version__ says it: 2.13.0+cpu.
    policy = policy._replace(torch=".".join(policy.torch.partition("+")[0].split(".")[:2]))
    if policy.layout not in ("", "bare", "wrapped"):
        raise TargetError(f"the layout {policy.layout!r} is neither 'bare' nor 'wrapped'", path=path)
    policy = policy._replace(dtype=tuple(SHORT_NAMES.get(dtype, dtype) for dtype in policy.dtype))
    for dtype in policy.dtype:
        if dtype not in BY_NAME:
            step = "write float32, bfloat16, float8_e4m3fn ..."
            raise TargetError(f"{dtype!r} is not a dtype", path=path, next=step)
    for device in policy.device:
        joined = re.fullmatch(r"([a-z]+)(\d+)", device)
        if joined and is_device(joined[1]):
            step = f"write '{joined[1]}:{joined[2]}'"
            raise TargetError(f"{device!r} is not a device", path=path, next=step)
    return policy


def _value(name: str, key: str, value: Any, path: str) -> Any:
    if name in _FLAGS and isinstance(value, bool):
        return value
    if name in _TEXTS and isinstance(value, str):
        return value
    if name in _LISTS:
        texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
        if texts and all(isinstance(text, str) for text in texts):
            return texts
    if name == "max_bytes" and isinstance(value, int | str) and not isinstance(value, bool):
        return parse_bytes(str(value))
    kind = "true or false" if name in _FLAGS else "a text" if name in _TEXTS else "a list of texts"
    raise TargetError(f"{key} = {value!r} is not {kind}", path=path)


def parse_bytes(text: str) -> int:
    """A number of bytes: ``4096``, ``500MB``, ``1.5 GB``, ``2GiB``; raises TargetError."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]i?|)b?(?:ytes)?\s*", text, re.I)
    if not found or found[2].lower() not in _UNITS:
        raise TargetError(f"{text!r} is no number of bytes", next="write 4096, 500MB, 2GB or 2GiB")
    return int(float(found[1]) * _UNITS[found[2].lower()])
