"""Tensors of what torch loads, the bytes of storages that they read, and comparisons of both."""

from __future__ import annotations

from typing import Any

import oracle
import torch


def tensors(loaded: Any) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    work: list[tuple[str, Any]] = [("", loaded)]
    while work:
        name, value = work.pop()
        if isinstance(value, torch.Tensor):
            found.append((name, value))
        elif isinstance(value, dict):
            work += [(str(key), item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            work += [(name, item) for item in value]
    return found


def dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def reached(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte that a tensor reads, and the one behind the last."""
    if not tensor.numel():
        return 0, 0
    size = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride())) + 1
    begin = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    return begin, begin + size * tensor.element_size()


def same_values(before: Any, after: Any) -> None:
    """Equal tensors of equal kind in equal places, whatever storages they are views of; the rest is equal as it is."""
    old, new = tensors(before), tensors(after)
    assert [name for name, _ in old] == [name for name, _ in new]
    identities: dict[int, int] = {}
    for (name, one), (_, two) in zip(old, new):
        assert type(one) is type(two), name
        assert identities.setdefault(id(one), id(two)) == id(two), name
        for field in ("dtype", "shape", "layout", "requires_grad") if not one.is_nested else ("dtype",):
            assert getattr(one, field) == getattr(two, field), name
        if dense(one):
            assert (one.is_conj(), one.is_neg()) == (two.is_conj(), two.is_neg()), name
            plain = [t.int_repr() if t.is_quantized else t.detach() for t in (one, two)]
            views = [t.resolve_conj().resolve_neg().contiguous().clone() for t in plain]
            assert oracle.difference(*views) == "", name
        else:
            assert oracle.difference(one, two) == "", name


def same_sharing(before: Any, after: Any) -> None:
    """Two tensors read a byte of one storage exactly where they did."""
    pairs = [(one, two) for (_, one), (_, two) in zip(tensors(before), tensors(after)) if dense(one)]
    for number, (one, two) in enumerate(pairs):
        for other, twin in pairs[:number]:
            assert overlap(one, other) == overlap(two, twin)


def overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr():
        return False
    (a, b), (c, d) = reached(one), reached(two)
    return a < d and c < b


def needed(loaded: Any) -> int:
    """The bytes from the first to the last one that tensors read, storage by storage."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for _, tensor in tensors(loaded):
        if dense(tensor):
            spans.setdefault(tensor.untyped_storage().data_ptr(), []).append(reached(tensor))
    return sum(max(end for _, end in span) - min(begin for begin, _ in span) for span in spans.values())


def held(loaded: Any) -> int:
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in tensors(loaded) if dense(t)}
    return sum(found.values())
