"""Random and hostile files: whatever they hold, only ckptool's own errors come out, soon, and in little memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fuzz.cases import built, planned

from ckptool.base.errors import CkptoolError
from ckptool.cli.main import COMMANDS

from .farm import farm
from .memory import EDITS, acting, edited, opened, tell
from .rows import Options, Tally
from .stage import answer

__all__ = ["SEEDS", "fuzz"]

#: Files that were found to break a promise once; each run begins with them.
SEEDS = Path(__file__).parent / "seeds"
_KINDS = ("zip", "pickle", "legacy", "tar", "safetensors")
_SECONDS = 1.0
_MEMORY = 256 << 20


class Case(NamedTuple):
    """A file, and where it comes from."""

    origin: str
    data: bytes


def fuzz(tally: Tally, options: Options) -> None:
    """The seeds first, then mutated fixtures as long as there is time."""
    counts: Counter[str] = Counter()
    found: set[tuple[str, str]] = set()
    until = time.monotonic() + 60 * options.minutes
    # The command line then passes on what it did not expect, with the place where it happened.
    os.environ["CKPTOOL_DEBUG"] = "1"
    work = partial(_work, options.scratch / "fuzzed.pth")
    for case, outcome in farm(_cases(options), work, seconds=_SECONDS, memory=_MEMORY, until=until):
        tally.case(case.origin)
        counts[outcome.result or "failed"] += 1
        if not outcome.failed:
            continue
        kind = (re.sub(r"\W.*", "", outcome.failed), outcome.where)
        if kind in found:  # the same bug once more
            continue
        found.add(kind)
        kept = "" if case.origin.startswith("seed ") else f"; kept as {_kept(case, outcome.where)}"
        tally.check(False, f"{outcome.failed} at {outcome.where}{kept}")
    del os.environ["CKPTOOL_DEBUG"]
    for words, number in counts.most_common():
        tally.note(f"{number:,} {words}")


def _cases(options: Options) -> Iterator[Case]:
    for path in sorted(SEEDS.glob("*.pth")):
        yield Case(f"seed {path.name}", path.read_bytes())
    # The inputs of `make fuzz`; what is looked at here is the command line, and what it prints.
    number = 0
    while True:
        number += 1
        case = planned(_KINDS[number % len(_KINDS)], options.seed, number)
        yield Case(f"make fuzz FUZZ='--case {case}'", built(case)[""])


def _work(path: Path, case: Case) -> str:
    """All that ckptool does with a file. Returns what became of it; raises what must not be raised."""
    told = tell(case.data)
    _check_harmless(told.words)
    path.write_bytes(case.data)
    out = path.with_name("out.pth")
    # Nothing here is about power failures, and waiting for the disk would take most of the time.
    os.fsync = _no_sync  # type: ignore[assignment]
    for call in _calls(str(path), str(out)):
        out.unlink(missing_ok=True)
        said = answer(call)
        _check_harmless(said.out + said.err)
        if "json" in call and said.out:
            json.loads(said.out)
        if said.code not in (0, 1, 3, 4):
            raise AssertionError(f"{call[0]} ends with {said.code}: {said.err.strip()[:200]}")
        if out.exists():
            _check_opens(call[0], out.read_bytes())
    if told.error:
        return "refused"
    done = 0
    for edit in EDITS:
        output = edited(case.data, edit)
        if output is None:
            continue
        done += 1
        _check_opens(edit, output)
    return "read and edited" if done else "read, but not edited"


def _no_sync(_fd: object) -> None:
    """In place of os.fsync."""


def _check_opens(command: str, output: bytes) -> None:
    try:
        opened(output)
    except CkptoolError as error:
        raise AssertionError(f"the output of {command} cannot be opened: {error}") from error


def _calls(name: str, out: str) -> list[list[str]]:
    """The commands of this version that do more than the edits, which ``_work`` makes in memory."""
    calls = [
        ["keys", "--format", "json", name],
        ["validate", "--format", "json", name],
        ["scan", "--format", "json", name],
        ["sanitize", name, "-o", out, "--force"],
        ["salvage", name, "-o", out, "--force"],
    ]
    return [call for call in calls if call[0] in COMMANDS]


def _check_harmless(text: str) -> None:
    if acting(text):
        raise AssertionError(f"control characters in what is printed: {acting(text)}")


def _kept(case: Case, where: str) -> str:
    """Save the file as a seed; its name says where it went wrong."""
    SEEDS.mkdir(exist_ok=True)
    place = re.sub(r"\W+", "-", where)
    path = SEEDS / f"{place}-{hashlib.sha256(case.data).hexdigest()[:8]}.pth"
    path.write_bytes(case.data)
    return f"seeds/{path.name}"
