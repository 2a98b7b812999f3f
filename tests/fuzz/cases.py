"""Inputs of the fuzzer: a case is a kind, a file to begin with, and one number for each mutation of it.

The text of a case, "zip:gan.pth:123.456", makes the same bytes on every machine. Leaving numbers out makes it smaller.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torture.rows import FIXTURES

from .folders import mutated_dcp, mutated_hf
from .ggufs import mutated_gguf
from .headers import mutated_safetensors
from .legacy import mutated_legacy
from .made import MADE
from .ranks import bases as rank_bases
from .ranks import mutated_ranks
from .tars import mutated_tar
from .texts import mutated_text
from .zips import mutated_object, mutated_zip

SEEDS = Path(__file__).parent / "seeds"
#: Files of a folder by name; a single file has the name "".
Files = dict[str, bytes]
_LARGEST = 20_000  # bytes of the fixtures to begin with: small ones give more files a second
#: What torch makes of it depends on what was imported before.
_LEFT_OUT = re.compile(r"jagged|dtensor|fsdp2|(fsdp_)?tp\.rank")
_MOST = 1 << 20  # bytes of what a mutation may make


class Case(NamedTuple):
    """One input: ``steps`` are the seeds of its mutations."""

    kind: str
    base: str
    steps: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}:{self.base}:{'.'.join(map(str, self.steps))}"


class Kind(NamedTuple):
    """A kind of input: the mutation, the fixtures to begin with, and how a file of it is called."""

    mutate: Callable[[Files, random.Random], Files]
    bases: Callable[[], list[str]]
    suffix: str


def parsed(text: str) -> Case:
    """The case of a text; raises ValueError for what is none."""
    kind, _, rest = text.partition(":")
    base, _, steps = rest.rpartition(":")
    if kind not in KINDS:
        raise ValueError(f"{text!r} is not a case: KIND:BASE:NUMBER.NUMBER")
    return Case(kind, base, tuple(int(step) for step in steps.split(".") if step))


def planned(kind: str, seed: int, number: int) -> Case:
    """The case with a number; the seed of a run gives other ones."""
    chance = random.Random(f"{seed} {kind} {number}")
    steps = tuple(chance.randrange(1 << 32) for _ in range(chance.choice((1, 1, 1, 1, 2, 2, 3))))
    return Case(kind, chance.choice(bases(kind)), steps)


def built(case: Case) -> Files:
    """The bytes of a case."""
    files = start(case.kind, case.base)
    for step in case.steps:
        try:
            changed = KINDS[case.kind].mutate(files, random.Random(step))
        except (ValueError, OverflowError, RecursionError):
            continue  # what an earlier mutation made is no longer what this one changes
        if sum(map(len, changed.values())) <= _MOST:
            files = changed
    return files


def put(path: Path, files: Files) -> None:
    """Write a file, or the files of a folder."""
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def known() -> list[Case]:
    """Inputs that showed something once, as files: each is tried first, and by make test."""
    return [Case(path.parent.name, f"seeds/{path.name}", ()) for path in sorted(SEEDS.glob("*/*"))]


@functools.cache
def bases(kind: str) -> list[str]:
    return KINDS[kind].bases()


@functools.lru_cache(maxsize=512)
def start(kind: str, base: str) -> Files:
    if base in MADE:
        return MADE[base].files()
    path = SEEDS / kind / base.removeprefix("seeds/") if base.startswith("seeds/") else FIXTURES / base
    if path.is_dir():
        return {
            str(inner.relative_to(path)): inner.read_bytes() for inner in sorted(path.rglob("*")) if inner.is_file()
        }
    return {"": path.read_bytes()}


def _single(mutate: Callable[[bytes, random.Random], bytes]) -> Callable[[Files, random.Random], Files]:
    return lambda files, chance: {"": mutate(files[""], chance)}


def _fixtures(kind: str, begins: Callable[[bytes], bool]) -> Callable[[], list[str]]:
    def found() -> list[str]:
        paths = [*FIXTURES.iterdir(), *(FIXTURES / "sharded").iterdir()]
        small = sorted(path for path in paths if path.is_file() and path.stat().st_size <= _LARGEST)
        names = [str(p.relative_to(FIXTURES)) for p in small if not _LEFT_OUT.match(p.name) and begins(p.read_bytes())]
        # Clean files that were made for this, as often as all fixtures together: most fixtures are odd.
        made = sorted(name for name, item in MADE.items() if item.kind == kind)
        return names + made * max(1, len(names) // max(1, len(made)))

    return found


def _is_torch_zip(data: bytes) -> bool:
    return data[:4] == b"PK\x03\x04" and b"data.pkl" in data


def _is_legacy(data: bytes) -> bool:
    return data[:1] == b"\x80" and b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19" in data[:40]


def _folders(kind: str) -> Callable[[], list[str]]:
    return lambda: sorted(name for name, item in MADE.items() if item.kind == kind)


KINDS: dict[str, Kind] = {
    "zip": Kind(_single(mutated_zip), _fixtures("zip", _is_torch_zip), ".pth"),
    "legacy": Kind(_single(mutated_legacy), _fixtures("legacy", _is_legacy), ".pth"),
    "tar": Kind(_single(mutated_tar), _fixtures("tar", lambda data: data[257:262] == b"ustar"), ".pth"),
    "pickle": Kind(_single(mutated_object), _fixtures("zip", _is_torch_zip), ".pth"),
    "safetensors": Kind(
        _single(mutated_safetensors), _fixtures("safetensors", lambda data: data[8:9] == b"{"), ".safetensors"
    ),
    "gguf": Kind(_single(mutated_gguf), _fixtures("gguf", lambda data: data[:4] == b"GGUF"), ".gguf"),
    "hf": Kind(mutated_hf, _folders("hf"), ""),
    "dcp": Kind(mutated_dcp, _folders("dcp"), ""),
    "text": Kind(_single(mutated_text), _folders("text"), ".json"),
    "ranks": Kind(mutated_ranks, rank_bases, ""),
}
