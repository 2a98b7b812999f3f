"""Compare what ckptool scan, picklescan, modelscan, fickling and modelaudit say of the same files (bench/samples.py).

`python -m bench.scanners --python VENV/bin/python` runs the command line of each scanner on each sample, as a user
would, and prints a Markdown table. Scanners whose dependencies conflict need separate environments, so `--python` can
be given several times. Scanners that no environment has are left out. Only the answers are compared, not the times.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from bench.samples import Sample, samples

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "scanners.md"
_BEGIN, _END = "<!-- scanners: made by bench/scanners.py --page -->", "<!-- end of scanners -->"

#: The answers of a scanner: code runs; doubtful; nothing is wrong; not looked into; the scanner failed.
ALARM, DOUBT, QUIET, SILENT, FAILED = range(5)
#: The words for these answers, for hostile files (True) and clean files (False).
_WORDS: Final = {
    True: ("found", "flagged", "missed", "no answer", "error"),
    False: ("false alarm", "flagged", "clean", "no answer", "error"),
}


class Said(NamedTuple):
    """The output of a scanner: exit code (None after the time limit), stdout, and the text of its report file."""

    code: int | None
    out: str
    report: str


class Scanner(NamedTuple):
    """A scanner: its package, its arguments for a file and a report, and the function that reads its answer."""

    package: str
    arguments: Callable[[str, str], list[str]]
    read: Callable[[Said], int]


def read_ckptool(said: Said) -> int:
    """Read the verdict from the JSON on stdout. The exit code does not suffice: several verdicts give 1."""
    if said.code not in (0, 1, 3):
        return FAILED
    [item] = json.loads(said.out)["files"]
    if item["error"] is not None:
        return FAILED
    return {"unsafe": ALARM, "program": DOUBT, "unknown": DOUBT, "weights-only": QUIET, None: SILENT}[item["verdict"]]


def read_picklescan(said: Said) -> int:
    """Read the counts of globals in the summary. Exit code 2 is an error, but "could not parse" exits with 0."""
    counts = dict(re.findall(r"^(Scanned files|Suspicious globals|Dangerous globals): (\d+)$", said.out, re.MULTILINE))
    if int(counts.get("Dangerous globals", 0)):
        return ALARM
    if said.code not in (0, 1) or not counts:
        return FAILED
    if int(counts["Suspicious globals"]):
        return DOUBT
    looked = int(counts["Scanned files"]) and not re.search("^WARNING: could not parse ", said.out, re.MULTILINE)
    return QUIET if looked else SILENT


def read_modelscan(said: Said) -> int:
    """Read the issues and errors from the JSON report, then the exit code: 3 means that no file was scanned."""
    report = json.loads(said.report or "{}")
    if report.get("issues"):
        return ALARM
    if said.code not in (0, 3) or report.get("errors", True):
        return FAILED
    return SILENT if said.code == 3 else QUIET


def read_fickling(said: Said) -> int:
    """Read the severities from the JSON reports, one per pickle. No severity means that it could not parse the file.

    fickling says "likely unsafe" for any class outside the standard library, and for an unknown opcode.
    """
    severities = set(re.findall(r'^    "severity": "(\w+)"', said.report, re.MULTILINE))
    if severities & {"LIKELY_OVERTLY_MALICIOUS", "OVERTLY_MALICIOUS"}:
        return ALARM
    if said.code not in (0, 1) or not severities:
        return FAILED
    return DOUBT if severities & {"POSSIBLY_UNSAFE", "SUSPICIOUS", "LIKELY_UNSAFE"} else QUIET


def read_modelaudit(said: Said) -> int:
    """Read the severities "critical" and "warning" of the issues in the JSON report; "info" is not a complaint."""
    report = json.loads(said.report or "{}")
    severities = {issue["severity"] for issue in report.get("issues", ())}
    if "critical" in severities:
        return ALARM
    if said.code not in (0, 1) or report.get("has_errors", True):
        return FAILED
    if "warning" in severities:
        return DOUBT
    return QUIET if set(report["scanner_names"]) - {"unknown"} else SILENT


CKPTOOL: Final = Scanner("ckptool", lambda file, report: ["scan", file, "--format", "json"], read_ckptool)
OTHERS: Final = (
    Scanner("picklescan", lambda file, report: ["--path", file], read_picklescan),
    Scanner("modelscan", lambda file, report: ["-p", file, "-r", "json", "-o", report], read_modelscan),
    Scanner("fickling", lambda file, report: ["--check-safety", "--json-output", report, file], read_fickling),
    Scanner(
        "modelaudit",
        lambda file, report: ["scan", file, "--no-cache", "--format", "json", "--output", report],
        read_modelaudit,
    ),
)
#: Without this, modelaudit reports each run to its makers, and waits until that is done.
_QUIET_RUNS: Final = {"PROMPTFOO_DISABLE_TELEMETRY": "1"}


def answer(scanner: Scanner, command: Sequence[str], file: Path, limit: float) -> int:
    """Run a scanner on a file, in a new folder. Return its answer."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        try:
            done = subprocess.run(
                [*command, *scanner.arguments(str(file), str(report))],
                cwd=folder, capture_output=True, text=True, errors="replace", timeout=limit, check=False,
                env=os.environ | ({"PYTHONPATH": str(ROOT)} if scanner is CKPTOOL else _QUIET_RUNS),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return SILENT
        text = report.read_text(encoding="utf-8") if report.exists() else ""
        return scanner.read(Said(done.returncode, done.stdout, text))


def version(python: Path, package: str) -> str:
    """Return the version of a package that a Python has, or "" if it does not have it."""
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    done = subprocess.run([str(python), "-c", code, package], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def table(every: Sequence[Sample], answers: Mapping[str, Mapping[str, int]], each: bool = False) -> str:
    """Return the answers (by scanner, then by sample name) as a table: a row per kind, or per sample if ``each``."""
    lines: list[tuple[str, ...]] = []
    for hostile in (True, False):
        group = [item for item in every if item.hostile == hostile]
        word = "hostile" if hostile else "clean"
        lines.append((f"**{word}, {len(group)} samples**", *(_cell(group, hostile, said) for said in answers.values())))
        for row in dict.fromkeys(item.name if each else item.kind for item in group):
            members = [item for item in group if row in (item.name, item.kind)]
            count = f" ({len(members)})" if len(members) > 1 else ""
            lines.append((f"{row}{count}", *(_cell(members, hostile, said) for said in answers.values())))
    header = ("sample", *answers)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ("---",) * len(header), *lines))


def _cell(members: Iterable[Sample], hostile: bool, said: Mapping[str, int]) -> str:
    """Return a cell: "found" if all answers are the same, otherwise counts such as "found 3, missed 1"."""
    if not said:
        return "not installed"
    counts = Counter(said[item.name] for item in members)
    if len(counts) == 1 and sum(counts.values()) < 20:
        return _WORDS[hostile][next(iter(counts))]
    return ", ".join(f"{_WORDS[hostile][kind]} {counts[kind]}" for kind in sorted(counts))


def compare(pythons: Sequence[Path], limit: float, each: bool = False) -> str:
    """Run every scanner on every sample. Return the versions that ran, and the table."""
    every = list(samples())
    answers: dict[str, Mapping[str, int]] = {}
    versions = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        paths = written(every, Path(folder))
        for scanner in (CKPTOOL, *OTHERS):
            name = scanner.package
            if scanner is CKPTOOL:
                from ckptool import __version__ as found

                command = [sys.executable, "-m", "ckptool"]
            else:
                python, found = next(((path, text) for path in pythons if (text := version(path, name))), (Path(), ""))
                command = [str(python.parent / name)]
            versions.append(f"{name} {found}" if found else f"{name} (not installed)")
            print(versions[-1], file=sys.stderr, flush=True)
            runs = {item.name: pool.submit(answer, scanner, command, path, limit) for item, path in paths if found}
            answers[name] = {sample: run.result() for sample, run in runs.items()}
    day = time.strftime("%d %B %Y").lstrip("0")
    torch = importlib.metadata.version("torch")
    facts = (
        f"{', '.join(versions)}; on {day}, ckptool and samples with Python {platform.python_version()}, torch {torch}."
    )
    return f"{facts}\n\n{table(every, answers, each)}"


def written(every: Iterable[Sample], folder: Path) -> list[tuple[Sample, Path]]:
    """Write samples into a folder. Return them with their paths."""
    paths = [(item, folder / item.name) for item in every]
    for item, path in paths:
        path.write_bytes(item.data)
    return paths


def rewrite(text: str) -> None:
    """Replace the text between the two marks of the page."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} has lost the marks between which the table stands")
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main() -> None:
    """Compare, and print the table or write it into the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.scanners", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--python", type=Path, action="append", metavar="FILE", help="a Python that has some of the others"
    )
    parser.add_argument("--limit", type=float, default=60, metavar="S", help="seconds for each file (default: 60)")
    parser.add_argument("--each", action="store_true", help="a row for each sample, not for each kind")
    parser.add_argument("--samples", type=Path, metavar="DIR", help="write the samples into DIR, and do nothing else")
    parser.add_argument("--page", action="store_true", help="write the table into docs/scanners.md")
    given = parser.parse_args()
    if given.samples:
        given.samples.mkdir(parents=True, exist_ok=True)
        written(samples(), given.samples)
        return
    text = compare([path.absolute() for path in given.python or [Path(sys.executable)]], given.limit, given.each)
    if given.page:
        rewrite(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
