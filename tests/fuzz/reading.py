"""What torch and others read: objects to compare, and where they differ from what ckptool reads."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import oracle
import torch

from ckptool.base.limits import LIMITS

from .asking import Entry

Steps = tuple[Any, ...]
_OWN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def load(path: str, *, weights_only: bool = True, mmap: bool | None = None) -> Any:
    """As people call it, on a machine without a GPU, in a process of its own: what an earlier load imported may have
    put more on the list (torch.distributed.tensor does)."""
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
    finally:
        torch.serialization.add_safe_globals(known)


def error_text(error: BaseException) -> str:
    """The sentence of an error of torch in which the cause is; the rest is advice."""
    text = str(error)
    if "WeightsUnpickler error:" in text:
        text = "WeightsUnpickler error: " + text.partition("WeightsUnpickler error:")[2]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else ""
    if first.endswith("WeightsUnpickler error:") and len(lines) > 1:
        first = f"{first} {lines[1]}"
    return f"{type(error).__name__}: {first[:300]}"


def undefined(path: str, loaded: Any) -> bool:
    """Whether torch gives out memory that was never written to: then it reads something else each time."""
    from torture.compare import same

    # M_PERTURB of glibc: what malloc gives out is filled with the complement of this byte.
    if not _is_small(loaded):
        return False
    perturb = ctypes.CDLL(None).mallopt
    try:
        for byte in (0xA5, 0xFF, 0x2A):  # the last leaves what is not UTF-8
            perturb(-6, byte)
            again = load(path)
            if not same(loaded, again) or oracle.difference(loaded, again):
                return True
    except Exception:
        return True
    finally:
        perturb(-6, 0)
    return False


def walked(value: Any, most: int = 2000) -> list[tuple[Steps, torch.Tensor]]:
    """Every tensor in mappings, lists and tuples; of a container at several places, the first place."""
    found: list[tuple[Steps, torch.Tensor]] = []
    work: list[tuple[Steps, Any]] = [((), value)]
    seen: set[int] = set()
    while work and len(found) < most:
        steps, inner = work.pop()
        if isinstance(inner, torch.Tensor):
            found.append((steps, inner))
            continue
        if not isinstance(inner, Mapping | list | tuple) or id(inner) in seen:
            continue
        seen.add(id(inner))
        parts = inner.items() if isinstance(inner, Mapping) else enumerate(inner)
        work += [((*steps, key), part) for key, part in reversed(list(parts))]
    return found


def comparable(value: Any) -> bool:
    """Whether all tensors are torch's own, as what subclasses do when they are looked at is theirs; and whether it is
    soon looked at, one list in another ten times over, and that in another, is not."""
    return _is_small(value) and all(type(tensor) in _OWN and not tensor.is_nested for _, tensor in walked(value))


def _is_small(value: Any) -> bool:
    """Whether it has few places, each thing counted as often as it is led to, and is not nested deeply."""
    left = [_PLACES]

    def spent(value: Any, depth: int) -> bool:
        left[0] -= 1
        if left[0] < 0 or depth > _LEVELS:
            return True
        if isinstance(value, Mapping):
            return any(spent(inner, depth + 1) for pair in value.items() for inner in pair)
        return isinstance(value, list | tuple | set | frozenset) and any(spent(inner, depth + 1) for inner in value)

    return not spent(value, 0)


_PLACES, _LEVELS = 20_000, 150
_LONGEST = LIMITS.path_chars


def difference(loaded: Any, entries: list[Entry], *, names: bool = True) -> str:
    """Where ckptool reads something else than what was loaded, "" for nowhere."""
    places = walked(loaded)
    if len(entries) >= 64 or len(places) >= 2000:
        return ""
    if len(places) > len(entries):
        return f"ckptool lists {len(entries)} tensors, there are {len(places)}"
    spelled = [entry.path for entry in entries]
    if len(set(spelled)) < len(spelled):
        return "ckptool lists two tensors at one path"
    by_steps = {_plain(steps): tensor for steps, tensor in places}
    known = {entry.steps: entry for entry in entries if entry.steps is not None}
    for steps, tensor in places:
        if _plain(steps) is None:
            continue
        entry = known.get(_plain(steps))  # type: ignore[arg-type]
        if entry is None:
            return "a tensor that is loaded is not listed" if names else ""
        told = _unlike(entry, tensor)
        if told:
            return told
    first: dict[str, int] = {}
    back: dict[int, str] = {}
    for entry in entries:
        tensor = by_steps.get(entry.steps) if entry.steps is not None else None
        if tensor is None or not _has_storage(tensor) or not entry.storage:
            continue
        # Where the storage begins if the tensor's offset is what ckptool says: torch's own offset counts from the view
        # in legacy files with views.
        address = tensor.data_ptr() - entry.offset * tensor.element_size()
        if tensor.storage_offset() == entry.offset and address != tensor.untyped_storage().data_ptr():
            continue  # an empty tensor
        if not tensor.numel() and tensor.storage_offset() != entry.offset:
            continue  # an empty one in a view: it has no address
        if (
            first.setdefault(entry.storage, address) != address
            or back.setdefault(address, entry.storage) != entry.storage
        ):
            return "a storage is shared in one of them only"
    return ""


def _plain(steps: Steps) -> tuple[str | int, ...] | None:
    """Steps that a path can spell without a type beside them."""
    return steps if all(map(_is_short, steps)) else None


def _is_short(step: Any) -> bool:
    return len(step) <= _LONGEST if type(step) is str else type(step) is int and step.bit_length() <= _LONGEST


def _has_storage(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_nested:
        return False
    return type(tensor) in _OWN and bool(tensor.untyped_storage().nbytes())


def _unlike(entry: Entry, tensor: torch.Tensor) -> str:
    if tensor.is_nested or type(tensor) not in _OWN:
        return ""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if entry.dtype != dtype:
        return f"dtype: ckptool {entry.dtype}, loaded {dtype}"
    if tuple(entry.shape) != tuple(tensor.shape):
        return f"shape: ckptool {entry.shape}, loaded {tuple(tensor.shape)}"
    if entry.requires_grad != tensor.requires_grad:
        return f"requires_grad: ckptool {entry.requires_grad}, loaded {tensor.requires_grad}"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return ""
    if tensor.numel() and tuple(entry.stride) != tuple(tensor.stride()):
        return f"stride: ckptool {entry.stride}, loaded {tensor.stride()}"
    if entry.content is not None and tensor.numel() <= 1 << 16:
        told = bytes(map(bool, entry.content)) if tensor.dtype is torch.bool else entry.content
        if told != content(tensor):
            return "values differ"
    return ""


def content(tensor: torch.Tensor) -> bytes:
    """Its elements in row-major order, as bytes: NaNs are compared, too."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.reshape(-1))  # one element may have any stride
    if not plain.numel():
        return b""
    stored = plain.view(torch.uint8)
    # A bool of another byte than 0 and 1 is whatever the processor makes of it.
    return bytes((stored != 0 if plain.dtype is torch.bool else stored).tolist())
