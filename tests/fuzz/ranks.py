"""Folders of rank files: mutations of them, and the tensors that the real libraries gathered as the judge.

DeepSpeed, torch and Megatron-core wrote the fixtures, and beside each the whole tensors in a file of safetensors. After
a bit was flipped, or files were exchanged, removed, or taken from another run, an output of ckptool may be refused; if
it is written, each weight in it has the values that the library gathered: of the run, or where files of two runs were
mixed, each element of one of them.
"""

from __future__ import annotations

import functools
import os
import random
import tempfile
from typing import Any

import torch
from safetensors.torch import load_file
from torture.rows import FIXTURES

import ckptool

from .asking import Said, guarded
from .finds import EDIT, VALID_FAILS, Find, Verdict
from .folders import moved_files
from .reading import load, walked

Files = dict[str, bytes]
_LARGEST = 150_000  # bytes of a folder
_RANKS = FIXTURES / "ranks"
#: Files with weights or with what a rank has of an optimizer.
_ENDINGS = (".pt", ".pth", ".bin", ".distcp", ".metadata")


def bases() -> list[str]:
    """The folders to begin with: those whose whole tensors a library gathered, and that convert to these."""
    paths = sorted(path for path in _RANKS.iterdir() if path.is_dir() and _size(path) <= _LARGEST)
    return [f"ranks/{path.name}" for path in paths if _whole(path.name) and _places(path.name)]


def _size(path: Any) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@functools.cache
def _whole(name: str) -> dict[str, torch.Tensor]:
    path = _RANKS / f"{name}.safetensors"
    tensors = load_file(path) if path.exists() else {}
    return {key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")}


@functools.cache
def _places(name: str) -> dict[tuple[Any, ...], str]:
    """Where the gathered tensors are in what ckptool makes of the undamaged folder."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out.pth")
        try:
            with ckptool.open(_RANKS / name) as checkpoint:
                ckptool.save(ckptool.convert(checkpoint, "torch", allow_loss=["all"]), out)
        except ckptool.CkptoolError:
            return {}
        found = dict(walked(load(out, weights_only=False)))
    whole = _whole(name)
    return {
        steps: str(steps[-1])
        for steps, tensor in found.items()
        if steps and str(steps[-1]) in whole and _are_same(tensor, whole[str(steps[-1])])
    }


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1, 1).view(torch.uint8)


@functools.cache
def _files(base: str) -> Files:
    path = FIXTURES / base
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def mutated_ranks(files: Files, chance: random.Random) -> Files:
    """A folder after one mutation: a bit, two names, a file less, a copy, or a file of another run."""
    files = dict(files)
    names = sorted(name for name in files if name.endswith(_ENDINGS) and files[name])
    if not names:
        return files
    name = chance.choice(names)
    way = chance.randrange(10)
    if way < 3:
        data = bytearray(files[name])
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        files[name] = bytes(data)
    elif way < 5:
        runs = [base for base in bases() if name in _files(base) and _files(base)[name] != files[name]]
        if runs:
            files[name] = _files(chance.choice(runs))[name]
    else:
        stem, dot, ending = name.rpartition(".")
        digits = [at for at, char in enumerate(stem) if char.isdigit()]
        at = chance.choice(digits) if digits else len(stem)
        moved_files(files, names, (f"{stem[:at]}{chance.randrange(12)}{stem[at + 1 :]}{dot}{ending}",), chance)
    return files


def judged_ranks(base: str, path: str, folder: str, said: Said) -> Verdict:
    """Convert the folder, and compare the weights with those that the library gathered."""
    out = os.path.join(folder, "out.pth")
    opened = False
    try:
        with guarded("convert torch"), ckptool.open(path) as checkpoint:
            opened = True
            ckptool.save(ckptool.convert(checkpoint, "torch", allow_loss=["all"]), out, force=True)
    except ckptool.CkptoolError as error:
        finds = (Find(VALID_FAILS, "valid", f"convert ends with {error.exit_code}: {error.what}"),)
        return Verdict(said.valid, opened, ("refused",), finds if said.valid and error.exit_code == 3 else ())
    found = dict(walked(load(out, weights_only=False)))
    name = base.partition("/")[2]
    places = {steps: key for steps, key in _places(name).items() if steps in found}
    runs = [whole for whole in map(_whole, (other.partition("/")[2] for other in bases())) if whole]
    mixed = name.startswith("zero")
    wrong = [key for steps, key in places.items() if not _is_of(key, found[steps], runs, mixed)]
    words = ["converted"]
    if all(_are_same(found[steps], _whole(name)[key]) for steps, key in places.items()):
        words.append("the same weights")
    finds = tuple(Find(EDIT, "convert torch ends with 0", f"{key} has values of no run") for key in wrong[:1])
    lost = sorted(set(_places(name).values()) - set(places.values()))
    if places and lost and not any(_is_run(other.partition("/")[2], found) for other in bases()):
        finds += (Find(EDIT, "convert torch ends with 0", f"{lost[0]} is not in the output"),)
    return Verdict(said.valid, True, tuple(words), finds)


def _is_run(name: str, found: dict[tuple[Any, ...], torch.Tensor]) -> bool:
    """Return whether an output has all weights of one run: mixing may put every file of that run into a folder."""
    places, whole = _places(name), _whole(name)
    return bool(places) and all(steps in found and _are_same(found[steps], whole[key]) for steps, key in places.items())


def _is_of(key: str, tensor: torch.Tensor, runs: list[dict[str, torch.Tensor]], mixed: bool) -> bool:
    """Return whether each element is that of one of the runs.

    ``mixed``: the model is in 16 bits, and the optimizer has its weights in 32. Where two parameters are equal in 16
    bits, no file tells which weights in 32 bits belong to which.
    """
    if mixed and tensor.dtype == torch.float32:
        rounded = tensor.bfloat16()
        if any(key in run and _are_same(rounded, run[key].bfloat16()) for run in runs):
            return True
    alike = [run[key] for run in runs if key in run and run[key].dtype == tensor.dtype]
    fits = [_bytes(other) for other in alike if other.shape == tensor.shape]
    if not fits:
        return False
    rows = _bytes(tensor)
    return bool(torch.stack([(rows == other).all(1) for other in fits]).any(0).all())
