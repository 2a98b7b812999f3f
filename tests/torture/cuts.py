"""Files that end too early: every command says so, none goes on as if nothing were missing."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from ckptool import open as open_checkpoint

from .compare import same, tensors
from .rows import FIXTURES, Options, Tally
from .stage import Answer, answer

__all__ = ["cuts"]

#: Every offset of these, ...
_EVERY = ("tied.pth", "legacy_bare.pth", "legacy_protocol2.pth")
#: ... and random ones of training files.
_SOME = ("ddp4_training.pth", "lightning.ckpt", "legacy_cuda.pth", "legacy_dtypes.pt")
_SALVAGE_EVERY = 7  # each one is loaded by torch, which takes its time

#: Words for a file of which something is missing.
_INCOMPLETE = re.compile(
    r"\bcut\b|ends (with|after|at|before)|damaged|incomplete|truncated|is empty|missing|lost", re.I
)
#: From a head as short as this nobody can tell what the file was, only that it is nothing.
_HEAD = 32


def cuts(tally: Tally, options: Options) -> None:
    chance = random.Random(options.seed)
    for name in _EVERY:
        size = (FIXTURES / name).stat().st_size
        _cut(tally, options, name, range(size, -1, -options.amount(1, 61)))
    for name in _SOME:
        size = (FIXTURES / name).stat().st_size
        places = {chance.randrange(size) for _ in range(options.amount(50, 5))}
        _cut(tally, options, name, sorted({size, *places}, reverse=True))


def _cut(tally: Tally, options: Options, name: str, places: range | list[int]) -> None:
    """One file, shorter and shorter."""
    path, out = options.scratch / name, options.scratch / "out.pth"
    shutil.copyfile(FIXTURES / name, path)
    path.chmod(0o644)
    size = path.stat().st_size
    stored = list(_storages(FIXTURES / name))
    whole = tensors(torch.load(FIXTURES / name, map_location="cpu", weights_only=True))
    for number, place in enumerate(places):
        os.truncate(path, place)
        tally.case(f"{name} cut at {place:,} of {size:,} bytes")
        for call in (["inspect"], ["keys"], ["inspect", "--format", "json"]):
            said = _said(tally, [*call, str(path)])
            told = bool(_INCOMPLETE.search(said.out + said.err)) or (said.code == 3 and place < _HEAD)
            if place == size:
                tally.check(said.code == 0 and not told, f"{call} ends with {said.code}: {said.err.strip()!r}")
            else:
                tally.check(said.code in (0, 3), f"{call} ends with {said.code}")
                tally.check(told, f"{call} does not say that something is missing: {said.err.strip()!r}")
        for command in (["strip-module"], ["add-module"], ["remap", "--to", "cpu"]):
            said = _said(tally, [*command, str(path), "-o", str(out), "-q"])
            words = f"{command[0]} ends with {said.code}, {'with' if out.exists() else 'without'} an output"
            tally.check((said.code == 0) is (place == size) and out.exists() is (said.code == 0), words)
            out.unlink(missing_ok=True)
        if place < size:
            said = _said(tally, ["validate", str(path)])
            tally.check(said.code != 0, f"validate ends with {said.code}")
        said = _said(tally, ["scan", str(path)])
        # What is missing of a tensor runs nothing: validate tells it.
        tally.check(said.code in ((0, 1, 3) if place < size else (0,)), f"scan ends with {said.code}")
        if number % _SALVAGE_EVERY == 0:
            _salvaged(tally, path, out, place, stored, whole)


def _said(tally: Tally, call: list[str]) -> Answer:
    """The answer of a command, which is never a traceback."""
    try:
        said = answer(call)
    except Exception as error:
        tally.check(False, f"{call[0]} raises {type(error).__name__}: {error}")
        return Answer(70, "", "")
    wrong = said.code == 70 or "a bug in" in said.err or "Traceback" in said.err
    tally.check(not wrong, f"{call[0]} ends with {said.code}: {said.err.strip()!r}")
    return said


def _salvaged(
    tally: Tally, path: Path, out: Path, place: int, stored: list[tuple[str, int]], whole: dict[str, torch.Tensor]
) -> None:
    """What ``salvage`` saves: the tensors whose bytes lie before the cut, all of them and bit for bit."""
    said = _said(tally, ["salvage", str(path), "-o", str(out)])
    if not out.exists():
        tally.check(said.code in (1, 3, 4), f"salvage ends with {said.code} and without an output")
        return
    found = tensors(torch.load(out, map_location="cpu", weights_only=True))
    out.unlink()
    wrong = [key for key, tensor in found.items() if key not in whole or not same(tensor, whole[key])]
    tally.check(not wrong, f"salvage gives other tensors than the whole file: {wrong[:3]}")
    # A record counts as whole when its bytes are there; its descriptor behind it may be asked for, too.
    least = sum(end + 24 <= place for _, end in stored)
    most = sum(end <= place for _, end in stored)
    words = f"salvage saves {len(found)} tensors, between {least} and {most} lie before the cut"
    tally.check(least <= len(found) <= most, words)
    if len(found) < len(whole):
        tally.check(said.code != 0, f"salvage saves {len(found)} of {len(whole)} tensors and ends with 0")


def _storages(path: Path) -> Iterator[tuple[str, int]]:
    """Each tensor by its path, and where the bytes of its storage end; 0 for one without bytes."""
    with open_checkpoint(path) as checkpoint:
        for entry in checkpoint.survey.tensors:
            span = checkpoint.container.stored(entry.tensor.storage).span
            yield entry.path, 0 if span is None else span.offset + span.size
