"""Put twenty faults into a copy of the package, one at a time, and say which of them the tests find (``make mutants``).

    python tests/mutants/run.py [NAME...], or make mutants MUTANTS="inert safety"

There is a fault for each law of ``docs/architecture.md`` and for each room. A fault replaces a text that stands exactly
once in a file or folder. It is found if one of its tests fails with it and passes without it. The script fails if a
fault is not found, or if its text is no longer there: then choose another text that breaks the same thing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
CORPUS = Path(os.environ.get("CKPTOOL_CORPUS", ROOT.parent / "shared" / "corpus"))

_FOUND, _SURVIVED = 1, 0  # exit codes of pytest; all others are errors of the run
_NOT_COPIED = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "scratch")


class Mutant(NamedTuple):
    """A fault: the law or room that it breaks, the file or folder in ``ckptool`` with the ``old`` text, the ``new``
    one, and the tests that must find it.
    """

    breaks: str
    place: str
    old: str
    new: str
    tests: str


LAWS = (
    Mutant(
        "inert",
        "pickles",
        "    _push_global(machine, Global(*known))",
        "    __import__(known[0])\n    _push_global(machine, Global(*known))",
        "tests/laws/test_inert.py",
    ),
    Mutant(
        "lossless",
        "files/zips",
        "return value if 0 < value < 0x10000 else 64",
        "return 32",
        "tests/laws/test_lossless.py tests/files/test_zip.py",
    ),
    Mutant(
        "light",
        "base",
        "class Limits(NamedTuple):",
        "import numpy\n\n\nclass Limits(NamedTuple):",
        "tests/laws/test_light.py",
    ),
    Mutant(
        "atomic",
        "files/write",
        "            _rename_new(temporary, target)",
        "            os.replace(temporary, target)",
        "tests/laws/test_atomic.py",
    ),
    Mutant(
        "frank",
        "formats",
        'if not {loss.kind, "all"} & {*allowed} and (strict or not loss.accepted)]',
        "if strict]",
        "tests/formats/test_losses.py",
    ),
    Mutant(
        "bounded", "base", "few_nodes: int = 250_000", "few_nodes: int = 40_000_000", "tests/pickles/test_machine.py"
    ),
    Mutant(
        "one way",
        "base",
        "LIMITS = Limits()",
        "LIMITS = Limits()\n\n\ndef _upwards() -> object:\n    from ..cli import render\n\n    return render",
        "tests/laws/test_layers.py",
    ),
    Mutant(
        "proven",
        "formats",
        "    if promised != read:\n        raise ReadBackError(",
        "    if False:\n        raise ReadBackError(",
        "tests/formats/test_readback.py",
    ),
)
ROOMS = (
    Mutant(
        "base",
        "base",
        'Dtype("int16", 2, "ShortStorage", "I16")',
        'Dtype("int16", 4, "ShortStorage", "I16")',
        "tests/values/test_elements.py",
    ),
    Mutant(
        "files", "files/write", "        if found != crc:", "        if False:", "tests/laws/test_recorded_checksums.py"
    ),
    Mutant(
        "pickles",
        "pickles",
        'int.from_bytes(key[1:], "little", signed=code == op.BININT)',
        'int.from_bytes(key[1:], "little")',
        "tests/pickles/test_differential.py tests/pickles/test_roundtrip.py",
    ),
    Mutant(
        "remote",
        "remote",
        "        if answer.facts[1:] != (self.size, self._etag):",
        "        if False:",
        "tests/remote/test_source.py",
    ),
    Mutant(
        "checkpoint",
        "checkpoint",
        "            offset += begin",
        "            offset += 0",
        "tests/values/test_views.py tests/values/test_lazy_tensor.py",
    ),
    Mutant(
        "values",
        "values",
        "key=lambda axis: (tensor.stride[axis], tensor.shape[axis]), reverse=True)",
        "key=lambda axis: (tensor.stride[axis], tensor.shape[axis]))",
        "tests/values",
    ),
    Mutant(
        "safety",
        "safety",
        "        return Verdict(UNSAFE, ",
        "        return Verdict(UNKNOWN, ",
        "tests/safety/test_globals.py",
    ),
    Mutant(
        "formats",
        "formats/safetensors",
        "        if entry.begin < at:",
        "        if False:",
        "tests/formats/test_safetensors.py",
    ),
    Mutant(
        "edits",
        "edits",
        "            if state_dict.metadata >= 0:\n                _rename_metadata(",
        "            if False:\n                _rename_metadata(",
        "tests/edits/test_metadata.py",
    ),
    Mutant(
        "reports",
        "reports/comparing",
        "if any(self.bits[job].first >= 0 for _, job in jobs)",
        "if any(self.bits[job].first > 0 for _, job in jobs)",
        "tests/reports/test_diff.py",
    ),
    Mutant(
        "saving",
        "saving.py",
        "            if not dry_run:\n                shorten(",
        "            if True:\n                shorten(",
        "tests/saving/test_in_place.py",
    ),
    Mutant(
        "cli",
        "cli",
        "return next((code for code in _GRAVITY if code in occurred), 0)",
        "return min(occurred, default=0)",
        "tests/cli/test_jobs.py tests/cli/test_fleets.py tests/cli/test_transcripts.py",
    ),
)
ALL = LAWS + ROOMS


def holder(package: Path, mutant: Mutant) -> Path | str:
    """Return the one file that has the text of a mutant, once, or why there is none."""
    place = package / mutant.place
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    counts = {path: path.read_text(encoding="utf-8").count(mutant.old) for path in files if path.is_file()}
    holders = [path for path, count in counts.items() if count]
    return holders[0] if len(holders) == 1 and sum(counts.values()) == 1 else f"its text occurs {sum(counts.values())}x"


def tested(copy: Path, *arguments: str) -> tuple[int, str]:
    """Run pytest in the copy; return its exit code and its last lines."""
    # Bytecode of the same second and size would hide a change.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "CKPTOOL_CORPUS": str(CORPUS)}
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    return done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-5:])


def found(copy: Path, mutant: Mutant) -> str:
    """Put a mutant in, run its tests and take it out; return "" if they found it, otherwise what went wrong."""
    path = holder(copy / "ckptool", mutant)
    if isinstance(path, str):
        return path
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        code, last = tested(copy, "-x", *mutant.tests.split())
    finally:
        path.write_text(text, encoding="utf-8")
    if code == _SURVIVED:
        return f"not found by {mutant.tests}"
    if code == _FOUND:  # the test that failed must pass without the fault
        code, last = tested(copy, "--last-failed", *mutant.tests.split())
    return f"pytest ended with {code}: {last}" if code else ""


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in ALL if not names or mutant.breaks in names]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        wrong = 0
        for mutant in chosen:
            start = time.monotonic()
            problem = found(copy, mutant)
            wrong += bool(problem)
            print(f"{mutant.breaks:<12}{problem or 'found'}  ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} faults found")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
