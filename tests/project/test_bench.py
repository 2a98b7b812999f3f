"""The benchmark: failures, targets and tables. That it measures well is seen by running it: no times here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from bench import instant, peaks, stale
from bench.jobs import Group, Job, Row
from bench.measure import JobError, Result, measure

PYTHON = (sys.executable, "-I", "-S", "-c")


def run(group: Group, folder: Path, repeat: int = 1) -> dict[str, Result]:
    return measure(group, repeat, folder / "log", lambda text: None)


def group_of(*jobs: Job, rows: tuple[Row, ...] = ()) -> Group:
    return Group("read", "a file", jobs, rows)


def test_a_failing_job_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="exit code 3"):
        run(group_of(Job("fails", (*PYTHON, "raise SystemExit(3)"))), tmp_path)


def test_a_wrong_output_ends_the_run(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"1")
    group = instant.Group("in place", "a file", (_copying(one, other, b"2"),), ())
    with pytest.raises(JobError, match="wrong file: it differs after byte 0"):
        run(group, tmp_path)


def _copying(one: Path, other: Path, data: bytes) -> Job:
    code = f"import sys; open(sys.argv[1], 'wb').write({data!r})"
    return Job("copy", (*PYTHON, code, str(other)), (one,), other, instant.Check("same", one, other))


def test_every_command_has_its_peak_measured() -> None:
    from ckptool.cli.main import COMMANDS

    measured = {command.name.split()[0] for command in peaks.COMMANDS}
    assert measured <= set(COMMANDS)
    # One is measured where files are edited in place, two read no checkpoint, and one needs an adapter.
    elsewhere = {"completion", "explain", "undo", "merge-lora"}
    assert set(COMMANDS) - measured <= elsewhere, "add it to bench/peaks.py"


def test_a_figure_is_stale_once_a_module_that_its_command_imported_has_changed() -> None:
    def row(commit: str, modules: str) -> dict[str, str]:
        return {"group": "read", "file": "2 GB", "job": "keys", "commit": commit, "modules": modules}

    first = subprocess.run(
        ("git", "rev-list", "--max-parents=0", "HEAD"), cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not first:
        pytest.skip("not in a repository")
    rows = [row("", ""), row("0" * 12, ""), row(first[0], "ckptool.cli.main"), row(first[0], "ckptool.nowhere")]
    whys = [line.partition("keys: ")[2] for line in stale.described({"rows": rows})]
    assert [why.split()[0] for why in whys] == ["it", "the", "since"]
    assert whys[2].endswith(": ckptool.cli.main")
