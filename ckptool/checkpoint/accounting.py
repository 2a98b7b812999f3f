"""Add up a survey: bytes by entry, device and dtype, shared storages, and storage bytes that no tensor uses."""

from __future__ import annotations

from collections import Counter
from math import prod

from ..base.records import NamedTuple
from .survey import Survey
from .tensors import Tensor, extent, view_id


class Share(NamedTuple):
    """The number of tensors and bytes on one device or of one dtype.

    A tensor at several paths counts once per path, its bytes once. ``others`` is the part of ``nbytes`` in storages
    that no tensor uses, such as the constants of a program.
    """

    name: str
    tensors: int
    nbytes: int
    others: int = 0


class Account(NamedTuple):
    """The sums over a survey.

    ``entry_bytes`` and ``entry_tensors`` have one number per top-level entry; a storage counts for the entry that
    mentions it first. ``wasteful`` lists the storages with unused bytes as (path, bytes used, bytes), the largest waste
    first.
    """

    devices: list[Share]
    dtypes: list[Share]
    entry_bytes: list[int]
    entry_tensors: list[int]
    storage_bytes: int
    unused_bytes: int
    shared_storages: int
    wasteful: list[tuple[str, int, int]]


def account(survey: Survey) -> Account:
    """Add up a survey."""
    reader, storages = survey.reader, survey.reader.storages
    entry_bytes, entry_tensors = [0] * len(survey.entries), [0] * len(survey.entries)
    located, others, users = Counter[str](), Counter[str](), Counter[str]()
    typed: dict[str, list[int]] = {}
    views: dict[str, list[tuple[int, int, int]]] = {}
    first: dict[str, str] = {}
    seen: set[object] = set()
    # Width of an element, extent and distinct bytes of a layout. Many tensors share one.
    sizes: dict[tuple[tuple[int, ...], tuple[int, ...], int], tuple[int, int, int]] = {}
    for entry in survey.tensors:
        tensor = entry.tensor
        located[tensor.location] += 1
        sums = typed.setdefault(tensor.dtype, [0, 0])
        sums[0] += 1
        identity = view_id(tensor) if tensor.storage else entry.ref
        if identity not in seen:
            seen.add(identity)
            sums[1] += tensor.own_bytes
        if entry.top >= 0:
            entry_tensors[entry.top] += 1
        for part in reader.parts(tensor) if tensor.parts else (tensor,):
            key = part.storage
            if not key:
                continue
            users[key] += 1
            if key not in first:
                first[key] = entry.path
                if entry.top >= 0:
                    entry_bytes[entry.top] += storages[key].nbytes
            layout = (part.shape, part.stride, part.own_bytes)
            if layout not in sizes:
                width = part.own_bytes // max(part.numel, 1) or 1
                sizes[layout] = (width, extent(part.shape, part.stride) * width, _distinct_elements(part) * width)
            width, size, distinct = sizes[layout]
            views.setdefault(key, []).append((part.offset * width, size, distinct))
    for path, ref, top in survey.storages:
        storage = reader.storage(ref)
        if storage is not None:
            if storage.key not in first and top >= 0:
                entry_bytes[top] += storage.nbytes
            first.setdefault(storage.key, path)
            views.setdefault(storage.key, []).append((0, storage.nbytes, storage.nbytes))
    devices = Counter[str](dict.fromkeys(located, 0))
    wasteful = []
    for key, storage in storages.items():
        nbytes = storage.nbytes
        devices[storage.location] += nbytes
        spans = views.get(key)
        if spans is None:
            others[storage.location] += nbytes
            continue
        waste = nbytes - min(_covered(spans), nbytes) if spans[0][2] != nbytes or len(spans) > 1 else 0
        if waste > 0:
            wasteful.append((first[key], nbytes - waste, nbytes))
    wasteful.sort(key=lambda item: item[1] - item[2])
    unused = sum(nbytes - used for _, used, nbytes in wasteful)
    by_device = [Share(name, located.get(name, 0), size, others[name]) for name, size in devices.items()]
    by_dtype = [Share(name, number, size) for name, (number, size) in typed.items()]
    shared = sum(number > 1 for number in users.values())
    return Account(by_device, by_dtype, entry_bytes, entry_tensors, devices.total(), unused, shared, wasteful)


def _distinct_elements(tensor: Tensor) -> int:
    """Return the number of distinct storage elements that a view reads; dimensions with stride 0 repeat elements."""
    return prod(size for size, step in zip(tensor.shape, tensor.stride or tensor.shape) if step or not size)


def _covered(spans: list[tuple[int, int, int]]) -> int:
    """Return how many bytes of a storage the views (offset, extent, distinct bytes) read.

    Where views overlap, this is an upper bound.
    """
    spans = sorted(spans)
    covered = 0
    begin, end, alone = 0, 0, 0
    for offset, size, distinct in spans:
        if offset < end:
            end, alone = max(end, offset + size), 0
            continue
        covered += min(alone, end - begin) if alone else end - begin
        begin, end, alone = offset, offset + size, distinct
    return covered + (min(alone, end - begin) if alone else end - begin)
