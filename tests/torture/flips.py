"""One flipped bit: no foreign exception, and no edit that turns it into a wrong tensor under a right checksum."""

from __future__ import annotations

import io
import os
import random
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckptool.cli.main import COMMANDS

from .compare import same, same_values, stripped, tensors
from .farm import farm
from .memory import acting, edited, tell, torch_loads
from .rows import FIXTURES, Options, Tally
from .stage import answer

__all__ = ["flips"]

#: A zip of about 2.5 KB of which every bit is flipped, and larger ones of which some are.
_SMALL = "zip_extra_records.pth"
_SALVAGED = 3  # one in so many is salvaged, too: each is a file that is written and loaded
_LARGER = ("ddp4_training.pth", "legacy_cuda.pth", "lightning.ckpt")


class Flip(NamedTuple):
    """A file in which one bit is another."""

    name: str
    bit: int


def flips(tally: Tally, options: Options) -> None:
    chance = random.Random(options.seed)
    data = {name: (FIXTURES / name).read_bytes() for name in (_SMALL, *_LARGER)}
    chosen = [Flip(_SMALL, bit) for bit in range(0, 8 * len(data[_SMALL]), options.amount(1, 37))]
    chosen += [
        Flip(name, chance.randrange(8 * len(data[name]))) for _ in range(options.amount(500, 20)) for name in _LARGER
    ]
    covered = {name: _checksummed(content) for name, content in data.items()}
    counts: Counter[str] = Counter()
    covered_flips = 0
    validates = "validate" in COMMANDS
    path = options.scratch / "flipped.pth"

    def work(flip: Flip) -> tuple[list[str], str]:
        flipped = _flipped(data[flip.name], flip.bit)
        broken, word = _judged(data[flip.name], flipped)
        changed = flip.bit // 8 in covered[flip.name] or (word in (_OTHER, _UNDEFINED) and flipped[:2] == b"PK")
        if validates and changed:
            path.write_bytes(flipped)
            said = answer(["validate", str(path)])
            if said.code == 0:
                broken.append("torch reads something else than before, or a checksum is wrong, and validate is content")
        if "salvage" in COMMANDS and flip.bit % _SALVAGED == 0:
            path.write_bytes(flipped)
            broken += _salvaged(path, data[flip.name], flipped)
        return broken, word

    for flip, outcome in farm(iter(chosen), work, seconds=5, memory=1 << 30):
        tally.case(f"{flip.name}, bit {flip.bit % 8} of byte {flip.bit // 8:,}")
        tally.check(not outcome.failed, f"{outcome.failed} at {outcome.where}")
        broken, word = outcome.result or ([], "failed")
        for words in broken:
            tally.check(False, words)
        counts[word] += 1
        covered_flips += flip.bit // 8 in covered[flip.name]
    for words, number in counts.most_common():
        tally.note(f"{number:,} {words}")
    found = "given to `validate`, too" if validates else "not given to `validate`, which is not there yet"
    tally.note(f"{covered_flips:,} in content that has a checksum, {found}")


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _judged(whole: bytes, flipped: bytes) -> tuple[list[str], str]:
    """What is wrong about ckptool's behaviour on a flipped file, and what became of its edits in a word."""
    told = tell(flipped)
    broken = [f"control characters in what is printed: {acting(told.words)}"] if acting(told.words) else []
    outputs = {edit: edited(flipped, edit) for edit in ("strip-module", "remap")}
    if all(output is None for output in outputs.values()):
        return broken, "edits refused"
    before = torch_loads(flipped)
    # Some flips make torch give out memory that it never wrote to, another one each time.
    _disturb_memory()
    if before is not None and not same(before, torch_loads(flipped)):
        return broken, _UNDEFINED
    for edit, output in outputs.items():
        after = torch_loads(output) if output is not None else None
        if before is None and after is not None:
            # The flip was in what an edit makes anew, such as sizes in headers. Then the output must be that of the
            # whole file: anything else would be made up.
            if not same_values(after, torch_loads(whole)):
                broken.append(f"torch refuses the input, but takes the output of {edit}, with other tensors")
        elif before is not None and output is not None and after is None:
            broken.append(f"torch takes the input, but not the output of {edit}")
        elif after is not None and not _right(edit, before, after):
            broken.append(f"the output of {edit} holds something else than the input")
    return broken, _SAME if before is None or same(before, torch_loads(whole)) else _OTHER


_UNDEFINED = "after which torch gives out memory that it never wrote to: edits not compared"
_OTHER = "edited; torch reads other content from input and output, the same from both"
_SAME = "edited; torch reads what it read before, or refuses the input"


def _salvaged(path: Path, whole: bytes, flipped: bytes) -> list[str]:
    """What is wrong about ``salvage``: each tensor in its output is that of the whole file, or what torch reads."""
    out = path.with_name("salvaged.pth")
    out.unlink(missing_ok=True)
    # In the child of the farm only: nothing here is about power failures.
    os.fsync = _no_sync  # type: ignore[assignment]
    said = answer(["salvage", str(path), "-o", str(out)])
    broken = [f"salvage ends with {said.code}: {said.err.strip()}"] if said.code not in (0, 1, 3, 4) else []
    after = torch_loads(out.read_bytes()) if out.exists() else None
    if after is not None:
        right, read = tensors(torch_loads(whole)), tensors(torch_loads(flipped))
        for where, tensor in tensors(after).items():
            if not any(where in known and same(tensor, known[where]) for known in (right, read)):
                broken.append(f"salvage gives another tensor at {where}")
    return broken


def _no_sync(_fd: object) -> None:
    """In place of os.fsync."""


def _right(edit: str, before: Any, after: Any) -> bool:
    """Is this what an edit gives? A flipped key may make a mapping one that is no state dict, and is left alone."""
    if edit == "strip-module" and same(after, stripped(before)):
        return True
    return same(after, before) if edit == "remap" else same_values(after, before)


def _disturb_memory() -> None:
    """Leave other bytes in the memory that the next tensors will get."""
    junk = [torch.full((size,), 0xA5, dtype=torch.uint8) for size in range(8, 4096, 8)]
    junk.clear()


def _checksummed(data: bytes) -> set[int]:
    """The offsets of bytes that a checksum on record covers."""
    found: set[int] = set()
    if data[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                at = info.header_offset
                begin = at + 30 + sum(int.from_bytes(data[at + n : at + n + 2], "little") for n in (26, 28))
                if info.CRC:
                    found.update(range(begin, begin + info.compress_size))
    return found
