"""The benchmark: failures, targets and tables. That it measures well is seen by running it: no times here."""

from __future__ import annotations

import subprocess

import pytest
from conftest import ROOT

from bench import peaks, stale


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
