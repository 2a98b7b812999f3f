"""One flipped bit, judged as the fuzzer judges: no edit turns it into a wrong tensor under a right checksum."""

from __future__ import annotations

import io
import os
import random
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from fuzz.cases import Case
from fuzz.finds import CLASSES, EDIT, OTHER, Find, Verdict
from fuzz.judging import judged, prepared
from fuzz.reading import load
from fuzz.workers import work

from .compare import same, tensors
from .rows import FIXTURES, Options, Tally
from .stage import answer

__all__ = ["flips"]

#: A zip of about 2.5 KB of which every bit is flipped, and larger ones of which some are.
_SMALL = "zip_extra_records.pth"
_SALVAGED = 3  # one in so many is salvaged, too: each is a file that is written and loaded
_LARGER = ("ddp4_training.pth", "legacy_cuda.pth", "lightning.ckpt")


def flips(tally: Tally, options: Options) -> None:
    chance = random.Random(options.seed)
    data = {name: (FIXTURES / name).read_bytes() for name in (_SMALL, *_LARGER)}
    whole = {name: tensors(load(str(FIXTURES / name))) for name in data}
    covered = {name: _checksummed(content) for name, content in data.items()}
    chosen = [(_SMALL, bit) for bit in range(0, 8 * len(data[_SMALL]), options.amount(1, 37))]
    for _ in range(options.amount(500, 20)):
        chosen += [(name, chance.randrange(8 * len(data[name]))) for name in _LARGER]
    cases = [Case("legacy" if "legacy" in name else "zip", name, (bit,)) for name, bit in chosen]

    def judge(case: Case, worker: int, tell: Callable[[str], None]) -> Verdict:
        folder = options.scratch / str(worker)
        (folder / "input").mkdir(parents=True, exist_ok=True)
        tempfile.tempdir = str(folder)
        os.fsync = _no_sync  # type: ignore[assignment]  # nothing here is about power failures
        (bit,) = case.steps
        flipped = bytearray(data[case.base])
        flipped[bit // 8] ^= 1 << bit % 8
        verdict = judged(case, {"": bytes(flipped)}, str(folder / "input"), tell)
        path = folder / "flipped.pth"
        path.write_bytes(flipped)
        read = _tensors(path)
        finds = [find for find in verdict.finds if CLASSES[find.kind]]
        changed = case.kind == "zip" and read and not same(read, whole[case.base])
        if verdict.valid and (changed or bit // 8 in covered[case.base]):
            finds.append(Find(OTHER, "valid", "torch reads something else than before, or a checksum is wrong"))
        if bit % _SALVAGED == 0:
            finds += _salvaged(path, read, whole[case.base])
        return verdict._replace(finds=tuple(finds))

    for kind in ("zip", "legacy"):
        prepared(kind, tempfile.mkdtemp(dir=options.scratch))
    plan = dict(enumerate(cases)).get
    for case, verdict in work(plan, judge, workers=len(os.sched_getaffinity(0))):
        (bit,) = case.steps
        tally.case(f"{case.base}, bit {bit % 8} of byte {bit // 8:,}")
        tally.counts.update(verdict.words)
        tally.counts["in content that has a checksum, which `validate` finds"] += bit // 8 in covered[case.base]
        for find in verdict.finds:
            tally.check(False, f"{find.kind}: {find.says} | {find.reader}")
        tally.check(not any("the fuzzer failed" in word for word in verdict.words), str(verdict.words))


def _no_sync(_fd: object) -> None:
    """In place of os.fsync."""


def _salvaged(path: Path, read: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> list[Find]:
    """What is wrong about ``salvage``: each tensor in its output is that of the whole file, or what torch reads."""
    out = path.with_name("salvaged.pth")
    out.unlink(missing_ok=True)
    said = answer(["salvage", str(path), "-o", str(out)])
    broken = [f"it ends with {said.code}: {said.err.strip()}"] if said.code not in (0, 1, 3, 4) else []
    if out.exists():
        for where, tensor in _tensors(out).items():
            if not any(where in known and same(tensor, known[where]) for known in (whole, read)):
                broken.append(f"it gives another tensor at {where}")
    return [Find(EDIT, "salvage", told) for told in broken]


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors that torch loads; none where it refuses the file, with any class of exception there is."""
    try:
        return tensors(load(str(path)))
    except Exception:
        return {}


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
