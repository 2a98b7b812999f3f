"""Check with torch that an edited checkpoint holds what it should. Exit 1 with a sentence if it does not.

`python -m bench.correctness CHECK ORIGINAL RESULT`. Files are read through mmap, one tensor at a time. Checks that end
in -meta read no values. `same` compares bytes, `safetensors` reads the result with that library, and `tensors` reads
both with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.files import PREFIX, TAG, tensor_names, zero_parts

_BLOCK = 1 << 24


def _load(path: str) -> tuple[dict[str, Any], set[str]]:
    """Return the state dict, and the location tags of its storages in the file."""
    import torch

    tags: set[str] = set()

    def keep_on_cpu(storage: Any, tag: str) -> Any:
        tags.add(tag)
        return storage

    state: dict[str, Any] = torch.load(path, map_location=keep_on_cpu, mmap=True)
    return state, tags


def _load_metadata(path: str) -> tuple[dict[str, Any], set[str]]:
    """Return the same for files too large to map: fake tensors without values, on the devices that the file names."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        state: dict[str, Any] = torch.load(path)
    return state, {str(tensor.device) for tensor in state.values()}


def check(edit: str, source: str, output: str) -> str:
    """Return what is wrong with `output` as a sentence, or "" if it is right."""
    if edit == "same":
        return _same(source, output)
    if edit == "safetensors":
        return _safetensors(source, output)
    if edit == "tensors":
        return _tensors(source, output)
    if edit == "convert":
        return _safetensors(source, output, whole=True)
    if edit in ("zero2", "zero3"):
        return _joined(source, output, int(edit[-1]))
    edit, _, meta = edit.partition("-")
    load = _load_metadata if meta else _load
    found, tags = load(output)
    if edit == "loads":
        return "" if found else "there is nothing in it"
    expected, _ = load(source)
    wanted_tags = {"cpu"} if edit in ("remap", "five") else {TAG}
    if tags != wanted_tags:
        return f"the location tags are {sorted(tags)}, not {sorted(wanted_tags)}"
    if edit == "five":
        found = found["state_dict"]
        expected = {f"model.net.{name}": tensor for name, tensor in _stripped(expected).items()}
        return "" if list(found) == list(expected) and _equal(expected, found) == "" else "the five edits are not done"
    if edit == "strip":
        expected = _stripped(expected)
    if list(found) != list(expected):
        return "the keys, or their order, are not the expected ones"
    if getattr(found, "_metadata", None) != getattr(expected, "_metadata", None):
        return "_metadata is not as expected"
    return _equal(expected, found, cast=edit == "cast", values=not meta)


def _stripped(state: dict[str, Any]) -> dict[str, Any]:
    """Strip the prefix as torch does, also from `_metadata`."""
    from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

    consume_prefix_in_state_dict_if_present(state, PREFIX)
    return state


def _equal(expected: dict[str, Any], found: dict[str, Any], cast: bool = False, values: bool = True) -> str:
    import torch

    for name, tensor in expected.items():
        wanted = tensor.to(torch.bfloat16) if cast else tensor
        other = found[name]
        if (wanted.dtype, wanted.shape, wanted.stride()) != (other.dtype, other.shape, other.stride()):
            return f"the tensor {name} has another dtype or shape"
        if values and not torch.equal(wanted, other):
            return f"the tensor {name} differs"
    return ""


def _safetensors(source: str, output: str, whole: bool = False) -> str:
    """Check names and values of a safetensors file against the checkpoint, without its prefix unless ``whole``."""
    import torch
    from safetensors import safe_open

    state, _ = _load(source)
    expected = state if whole else _stripped(state)
    with safe_open(output, "pt") as found:
        if set(found.keys()) != set(expected):
            return "the keys are not the expected ones"
        for name, tensor in expected.items():
            if not torch.equal(tensor, found.get_tensor(name)):
                return f"the tensor {name} differs"
    return ""


def _tensors(source: str, output: str) -> str:
    """Compare the tensors of two safetensors files."""
    import torch
    from safetensors import safe_open

    with safe_open(source, "pt") as expected, safe_open(output, "pt") as found:
        names = list(expected.keys())
        if set(found.keys()) != set(names):
            return "the keys are not the expected ones"
        for name in names:
            wanted, tensor = expected.get_tensor(name), found.get_tensor(name)
            if wanted.dtype != tensor.dtype or not torch.equal(wanted, tensor):
                return f"the tensor {name} differs"
    return ""


def _joined(source: str, output: str, stage: int) -> str:
    """Check the tensors made from a DeepSpeed folder. All of them must have the same size."""
    import torch
    from safetensors import safe_open

    parts = [torch.load(path, mmap=True)["optimizer_state_dict"] for path in zero_parts(Path(source))]
    flats = [part["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"][0] for part in parts]
    with safe_open(output, framework="pt") as file:
        names = tensor_names(len(file.keys()))
        if set(file.keys()) != set(names):
            return "the names are not the expected ones"
        for number, name in enumerate(names):
            found = file.get_tensor(name).flatten()
            size = len(found) // (len(flats) if stage == 3 else 1)
            row, at = (flats, number * size) if stage == 3 else (_of(flats, number * size), number * size)
            expected = [flat[at % len(flat) :][:size] for flat in row]
            if not torch.equal(found, torch.cat(expected)):
                return f"{name} has other values"
    return ""


def _of(flats: list[Any], at: int) -> list[Any]:
    """Return the one partition that contains the element at ``at``, in a list."""
    return [flats[at // len(flats[0])]]


def _same(one: str, other: str) -> str:
    """Return how two files or folders differ, or "" if their bytes are equal. Skip spans that are holes in both."""
    if os.path.isdir(one):
        names = sorted(os.listdir(one))
        if names != sorted(os.listdir(other)):
            return "it has other files"
        return next(filter(None, (_same(os.path.join(one, name), os.path.join(other, name)) for name in names)), "")
    sizes = os.stat(one).st_size, os.stat(other).st_size
    if sizes[0] != sizes[1]:
        return f"it has {sizes[1]:,} bytes, not {sizes[0]:,}"
    with open(one, "rb") as first, open(other, "rb") as second:
        for spans in (_data(first.fileno()), _data(second.fileno())):
            for start, end in spans:
                for place in range(start, end, _BLOCK):
                    length = min(_BLOCK, end - place)
                    if os.pread(first.fileno(), length, place) != os.pread(second.fileno(), length, place):
                        return f"it differs after byte {place:,}"
    return ""


def _data(file: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the spans of a file that are not holes."""
    end, size = 0, os.fstat(file).st_size
    while end < size:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError:  # the rest of the file is a hole
            return
        end = os.lseek(file, start, os.SEEK_HOLE)
        yield start, end


if __name__ == "__main__":
    sys.exit(check(*sys.argv[1:]) or 0)
