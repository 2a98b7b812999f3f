"""Files that are cut or have a flipped bit, judged as the fuzzer judges: no edit makes a wrong tensor of them."""

from __future__ import annotations

import io
import os
import random
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fuzz.cases import Case
from fuzz.finds import CLASSES, EDIT, OTHER, Find, Verdict
from fuzz.judging import judged, prepared
from fuzz.reading import load
from fuzz.workers import work

from ckptool import open as open_checkpoint

from .compare import same, tensors
from .rows import FIXTURES, Options, Tally
from .stage import answer

State = dict[str, torch.Tensor]
#: A zip of about 2.5 KB of which every bit is flipped, and larger ones of which some are.
_SMALL = "zip_extra_records.pth"
_LARGER = ("ddp4_training.pth", "legacy_cuda.pth", "lightning.ckpt")
#: Files that are cut at every offset, and training files that are cut at random ones.
_EVERY = ("tied.pth", "legacy_bare.pth", "legacy_protocol2.pth")
_SOME = ("ddp4_training.pth", "lightning.ckpt", "legacy_cuda.pth", "legacy_dtypes.pt")
_SALVAGED = 5  # one in so many is salvaged, too: each is a file that is written and loaded
#: Words for a file of which something is missing.
_INCOMPLETE = re.compile(
    r"\bcut\b|ends (with|after|at|before)|damaged|incomplete|truncated|is empty|missing|lost", re.I
)
#: From a head as short as this nobody can tell what the file was, only that it is nothing.
_HEAD = 32


def flips(tally: Tally, options: Options) -> None:
    chance = random.Random(options.seed)
    sizes = {name: 8 * (FIXTURES / name).stat().st_size for name in (_SMALL, *_LARGER)}
    chosen = [(_SMALL, bit) for bit in range(0, sizes[_SMALL], options.amount(1, 37))]
    for _ in range(options.amount(500, 20)):
        chosen += [(name, chance.randrange(sizes[name])) for name in _LARGER]
    covered = {name: _checksummed((FIXTURES / name).read_bytes()) for name in sizes}

    def flipped(data: bytes, bit: int) -> bytes:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    def check(case: Case, verdict: Verdict, path: Path, read: State, whole: State) -> Iterator[Find]:
        (bit,) = case.steps
        changed = case.kind == "zip" and read and not same(read, whole)
        if verdict.valid and (changed or bit // 8 in covered[case.base]):
            yield Find(OTHER, "valid", "torch reads something else than before, or a checksum is wrong")
        if bit % _SALVAGED == 0:
            found, code = _salvage(path)
            if code not in (0, 1, 3, 4):
                yield Find(EDIT, "salvage", f"it ends with {code}")
            for where, tensor in found.items():
                if not any(where in known and same(tensor, known[where]) for known in (whole, read)):
                    yield Find(EDIT, "salvage", f"it gives another tensor at {where}")

    _tried(tally, options, chosen, flipped, check)
    summed = sum(bit // 8 in covered[name] for name, bit in chosen)
    tally.counts["in content that has a checksum, which `validate` finds"] = summed


def cuts(tally: Tally, options: Options) -> None:
    """Every command says that something is missing, and none goes on as if nothing were."""
    chance = random.Random(options.seed)
    sizes = {name: (FIXTURES / name).stat().st_size for name in (*_EVERY, *_SOME)}
    chosen = [(name, place) for name in _EVERY for place in range(0, sizes[name], options.amount(1, 61))]
    chosen += [(name, chance.randrange(sizes[name])) for name in _SOME for _ in range(options.amount(50, 5))]
    stored = {name: list(_storages(FIXTURES / name)) for name in sizes}

    def check(case: Case, verdict: Verdict, path: Path, read: State, whole: State) -> Iterator[Find]:
        (place,) = case.steps
        if verdict.valid:
            yield Find(OTHER, "valid", "it is cut")
        for call in (["inspect"], ["keys"], ["inspect", "--format", "json"], ["scan"]):
            said = answer([*call, str(path)])
            told = call == ["scan"] or _INCOMPLETE.search(said.out + said.err) or (said.code == 3 and place < _HEAD)
            if said.code not in (0, 1, 3) or not told:
                yield Find(OTHER, f"{call} ends with {said.code}", "it does not say that something is missing")
        for command in (["strip-module"], ["add-module"], ["remap", "--to", "cpu"]):
            out = path.with_name("out.pth")
            said = answer([*command, str(path), "-o", str(out), "-q"])
            if said.code == 0 or out.exists():
                yield Find(EDIT, f"{command[0]} ends with {said.code}", "there is an output")
        if place % _SALVAGED == 0:
            found, code = _salvage(path)
            # A record counts as whole when its bytes are there; its descriptor behind it may be asked for, too.
            ends = stored[case.base]
            least, most = (sum(end + more <= place for end in ends) if found else 0 for more in (24, 0))
            right = all(where in whole and same(tensor, whole[where]) for where, tensor in found.items())
            if not (right and least <= len(found) <= most and (len(found) == len(whole) or code in (1, 3, 4))):
                yield Find(EDIT, f"salvage ends with {code}", f"{len(found)} tensors, {most} lie before the cut")

    _tried(tally, options, chosen, lambda data, place: data[:place], check)


Check = Callable[[Case, Verdict, Path, State, State], Iterator[Find]]


def _tried(
    tally: Tally, options: Options, chosen: list[tuple[str, int]], damage: Callable[[bytes, int], bytes], check: Check
) -> None:
    """Damage files at their places, and judge each."""
    data = {name: (FIXTURES / name).read_bytes() for name, _ in chosen}
    whole = {name: _tensors(FIXTURES / name) for name in data}
    cases = [Case("legacy" if "legacy" in name else "zip", name, (place,)) for name, place in chosen]

    def judge(case: Case, worker: int, tell: Callable[[str], None]) -> Verdict:
        folder = options.scratch / str(worker)
        (folder / "input").mkdir(parents=True, exist_ok=True)
        tempfile.tempdir = str(folder)
        os.fsync = _no_sync  # type: ignore[assignment]  # nothing here is about power failures
        path = folder / "damaged.pth"
        path.write_bytes(damage(data[case.base], *case.steps))
        verdict = judged(case, {"": path.read_bytes()}, str(folder / "input"), tell)
        finds = [find for find in verdict.finds if CLASSES[find.kind]]
        finds += check(case, verdict, path, _tensors(path), whole[case.base])
        return verdict._replace(finds=tuple(finds))

    for kind in ("zip", "legacy"):
        prepared(kind, tempfile.mkdtemp(dir=options.scratch))
    plan = partial(dict(enumerate(cases)).get)
    for case, verdict in work(plan, judge, workers=len(os.sched_getaffinity(0))):
        tally.case(f"{case.base} at {case.steps[0]:,}")
        tally.counts.update(verdict.words)
        for find in verdict.finds:
            tally.check(False, f"{find.kind}: {find.says} | {find.reader}")
        tally.check(not any("the fuzzer failed" in word for word in verdict.words), str(verdict.words))


def _no_sync(_fd: Any) -> None:
    """In place of os.fsync."""


def _salvage(path: Path) -> tuple[State, int]:
    """The tensors that are saved of a file, none if there is no output, and the exit code."""
    out = path.with_name("salvaged.pth")
    out.unlink(missing_ok=True)
    code = answer(["salvage", str(path), "-o", str(out)]).code
    return _tensors(out), code


def _tensors(path: Path) -> State:
    """The tensors that torch loads; none where it refuses the file, with any class of exception there is."""
    try:
        return tensors(load(str(path)))
    except Exception:
        return {}


def _storages(path: Path) -> Iterator[int]:
    """Of each tensor, where the bytes of its storage end; 0 for one without bytes."""
    with open_checkpoint(path) as checkpoint:
        for entry in checkpoint.survey.tensors:
            span = checkpoint.container.stored(entry.tensor.storage).span
            yield 0 if span is None else span.offset + span.size


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
