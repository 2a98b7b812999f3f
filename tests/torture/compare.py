"""Objects that torch loaded: are two of them the same, and what does a naive edit make of one?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def same(one: Any, other: Any) -> bool:
    """Equal in types, keys, order, shapes, dtypes and values, NaN included."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _same_tensor(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, set | frozenset):
        return bool(one == other)
    if type(one).__eq__ is object.__eq__:  # such as the StorageType that weights_only makes of a class
        return str(one) == str(other)
    try:
        return bool(one == other) or (one != one and other != other)
    except (RuntimeError, TypeError, ValueError):
        return repr(one) == repr(other)


def same_values(one: Any, other: Any) -> bool:
    """The same tensors in the same order, whatever they are called: an edit that left a mapping alone, or not."""
    return same(_values(one), _values(other))


def _values(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [_values(inner) for inner in value.values()]
    return [_values(inner) for inner in value] if isinstance(value, list | tuple) else value


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    facts = (one.dtype, one.shape, one.layout, one.is_quantized, one.requires_grad)
    if facts != (other.dtype, other.shape, other.layout, other.is_quantized, other.requires_grad):
        return False
    if one.layout != torch.strided or one.is_quantized or one.device.type == "meta":
        return _shown(one) == _shown(other)
    if one.numel() > 1 << 20:  # a view that repeats itself: it is not spelled out
        return one.stride() == other.stride() and one.storage_offset() == other.storage_offset()
    # Bytes: a flipped bit may make NaNs, of which there are many.
    # In memory of their own: where there is one element, contiguous() leaves it any stride.
    try:
        first, second = (tensor.detach().resolve_conj().resolve_neg().reshape(-1) for tensor in (one, other))
        return torch.equal(*(torch.empty(len(t), dtype=t.dtype).copy_(t).view(torch.uint8) for t in (first, second)))
    except NotImplementedError:  # dtypes of less than a byte are neither copied nor negated
        return _shown(one) == _shown(other)


def _shown(tensor: torch.Tensor) -> str:
    try:
        return repr(tensor)
    except RuntimeError as error:  # a quantized one without its scale, which torch makes and cannot show
        return f"{tensor.dtype} {tuple(tensor.shape)}: {type(error).__name__}"


def stripped(loaded: Any, prefix: str = "module.") -> Any:
    """What ``strip-module`` promises, done the naive way: the prefix goes from every key of every dict of tensors."""
    if not isinstance(loaded, dict):
        return [stripped(value) for value in loaded] if type(loaded) is list else loaded
    holds = any(isinstance(value, torch.Tensor) for value in loaded.values())
    found = type(loaded)()
    for key, value in loaded.items():
        name = key[len(prefix) :] if holds and isinstance(key, str) and key.startswith(prefix) else key
        found[name] = value if isinstance(value, torch.Tensor) else stripped(value)
    return found


def tensors(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """The tensors in dicts, lists and tuples, by where they are."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    return {where: tensor for key, inner in items for where, tensor in tensors(inner, f"{path}/{key}").items()}
