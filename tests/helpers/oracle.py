"""The oracle: what torch itself gives, edited naively in Python, compared down to sharing and strides."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.checkpoint.paths import parse_path


def load(path: Path | str) -> Any:
    """What torch loads, on the CPU, under weights_only."""
    return torch.load(path, map_location="cpu", weights_only=True)


def at(loaded: Any, path: str) -> Any:
    """The tensor at a path in what torch loaded; None in an attribute, or under a key that no path spells."""
    try:
        for step in parse_path(path):
            loaded = loaded[step]
    except (KeyError, IndexError, TypeError, ckptool.CkptoolError):
        return None
    return loaded if isinstance(loaded, torch.Tensor) else None


def skip_unless_read(path: Path) -> None:
    """Skip the test of a file that torch does not load, or that ckptool refuses."""
    try:
        load(path)
        ckptool.keys(path)
    except ckptool.CkptoolError as error:
        pytest.skip(f"ckptool: {error.what}")
    except Exception as error:
        pytest.skip(f"torch: {error}")


def tags(path: Path | str) -> list[str]:
    """The location tags in the order in which torch meets them: a callable map_location is given each."""
    seen: list[str] = []

    def note(storage: Any, tag: str) -> Any:
        seen.append(tag)
        return storage

    torch.load(path, map_location=note, weights_only=True)
    return seen


def rename(loaded: Any, paths: list[list[str | int]], function: Callable[[str], str]) -> Any:
    """The naive edit: every state dict at ``paths`` gets other keys, in place of the old mapping."""
    for path in paths:
        state = loaded
        for step in path:
            state = state[step]
        renamed = [(function(key), value) for key, value in state.items()]
        state.clear()
        state.update(renamed)
    return loaded


def difference(a: Any, b: Any) -> str:
    """Where two loaded objects differ, "" when they do not: values bit for bit, types, key order, sharing."""
    return _Comparison().compare(a, b, "")


class _Comparison:
    def __init__(self) -> None:
        self.objects: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.back: dict[int, int] = {}
        self.keep: list[Any] = []

    def compare(self, a: Any, b: Any, path: str) -> str:
        if type(a) is not type(b):
            return f"{path}: {type(a).__name__} against {type(b).__name__}"
        if isinstance(a, torch.Tensor):
            return self.tensors(a, b, path)
        if isinstance(a, Mapping):
            if list(map(alike_key, a)) != list(map(alike_key, b)):
                return f"{path}: keys {list(a)[:5]} against {list(b)[:5]}"
            found = next(
                filter(None, (self.compare(x, y, f"{path}.{k}") for k, x, y in zip(a, a.values(), b.values()))), ""
            )
            return found or self.metadata(a, b, path)
        if isinstance(a, list | tuple):
            if len(a) != len(b):
                return f"{path}: {len(a)} elements against {len(b)}"
            return next(filter(None, (self.compare(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b)))), "")
        if isinstance(a, float) and a != a:
            return "" if b != b else f"{path}: nan against {b}"
        if type(a).__module__.startswith("torch") and hasattr(a, "_untyped_storage"):
            return self.storage(a._untyped_storage, b._untyped_storage, path)
        if isinstance(a, torch.UntypedStorage):
            return self.storage(a, b, path)
        if isinstance(a, BytesIO):
            a, b = a.getvalue(), b.getvalue()
        if type(a) is torch.serialization.StorageType:
            a, b = a.dtype, b.dtype  # such an object is equal to itself alone
        return "" if a == b else f"{path}: {a!r} against {b!r}"

    def metadata(self, a: Any, b: Any, path: str) -> str:
        if not isinstance(a, OrderedDict):
            return ""
        return self.compare(getattr(a, "__dict__", {}), getattr(b, "__dict__", {}), path + ".__dict__")

    def tensors(self, a: torch.Tensor, b: torch.Tensor, path: str) -> str:
        if a.is_nested or b.is_nested:
            return self.parts(a, b, path) if a.is_nested and b.is_nested else f"{path}: one of them is nested"
        for name in ("dtype", "shape", "layout", "device", "requires_grad"):
            if getattr(a, name) != getattr(b, name):
                return f"{path}: {name} {getattr(a, name)} against {getattr(b, name)}"
        if self.objects.setdefault(id(a), id(b)) != id(b):
            return f"{path}: the same tensor in one, two tensors in the other"
        self.keep += [a, b]
        if a.layout is not torch.strided:
            return self.parts(a, b, path)
        if a.device.type == "meta":
            return "" if a.stride() == b.stride() else f"{path}: stride"
        for name in ("stride", "storage_offset", "is_conj", "is_neg"):
            if getattr(a, name)() != getattr(b, name)():
                return f"{path}: {name}"
        if a.is_quantized and _scheme(a) != _scheme(b):
            return f"{path}: qscheme"
        return self.storage(a.untyped_storage(), b.untyped_storage(), path) or self.compare(
            dict(a.__dict__), dict(b.__dict__), path + ".__dict__"
        )

    def parts(self, a: torch.Tensor, b: torch.Tensor, path: str) -> str:
        if a.is_nested:
            pairs = list(zip(a.unbind(), b.unbind()))
        elif a.layout is torch.sparse_coo:
            pairs = [(a._indices(), b._indices()), (a._values(), b._values())]
        else:
            rows = (torch.sparse_csr, torch.sparse_bsr)
            names = ("crow_indices", "col_indices") if a.layout in rows else ("ccol_indices", "row_indices")
            pairs = [(getattr(a, name)(), getattr(b, name)()) for name in (*names, "values")]
        same = all(x.shape == y.shape and x.dtype == y.dtype and _bits(x) == _bits(y) for x, y in pairs)
        return "" if same else f"{path}: members differ"

    def storage(self, a: torch.UntypedStorage, b: torch.UntypedStorage, path: str) -> str:
        if a.nbytes() != b.nbytes():
            return f"{path}: a storage of {a.nbytes()} bytes against {b.nbytes()}"
        if not a.nbytes():
            return ""
        left, right = a.data_ptr(), b.data_ptr()
        if self.storages.setdefault(left, right) != right or self.back.setdefault(right, left) != left:
            return f"{path}: a storage is shared in one of them only"
        self.keep += [a, b]
        return "" if torch.equal(_bytes(a), _bytes(b)) else f"{path}: bytes differ"


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return bytes(torch.empty(len(plain), dtype=plain.dtype).copy_(plain).view(torch.uint8).tolist())


def _scheme(tensor: torch.Tensor) -> str:
    try:
        return str(tensor.qscheme())
    except RuntimeError:  # one of a quantized dtype without a scale, which torch makes of an id and cannot describe
        return "none"


def alike_key(key: Any) -> Any:
    """What of a key two files have in common; tensors, storages and NaN are equal to themselves alone."""
    if type(key) is tuple:
        return tuple(map(alike_key, key))
    own = isinstance(key, torch.Tensor | torch.TypedStorage | torch.UntypedStorage)
    spelled = own or (isinstance(key, float) and key != key)
    return (type(key), repr(key) if spelled else key)
