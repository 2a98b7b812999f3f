"""The benchmark: failures, targets and tables. That it measures well is seen by running it: no times here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FIXTURES, ROOT

from bench import figures, groups, instant, peaks, peers, remote, stale, tables
from bench.files import BIG, LARGE, MANY, REMOTE, SPARSE_100, flipped
from bench.jobs import Each, Group, Job, Row, Target
from bench.measure import JobError, Result, Sample, measure

PYTHON = (sys.executable, "-I", "-S", "-c")


def run(group: Group, folder: Path, repeat: int = 1) -> dict[str, Result]:
    return measure(group, repeat, folder / "log", lambda text: None)


def group_of(*jobs: Job, rows: tuple[Row, ...] = ()) -> Group:
    return Group("read", "a file", jobs, rows)


def result(name: str, seconds: float, peak: int = 0) -> Result:
    return Result(name, (Sample(seconds, seconds, peak),))


def test_a_failing_job_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="exit code 3"):
        run(group_of(Job("fails", (*PYTHON, "raise SystemExit(3)"))), tmp_path)


def test_the_exit_code_that_counts_as_success(tmp_path: Path) -> None:
    done = run(group_of(Job("differs", (*PYTHON, "raise SystemExit(1)"), code=1)), tmp_path, repeat=2)
    assert len(done["differs"].samples) == 2


def test_a_peer_that_fails_has_a_reason_and_no_path(tmp_path: Path) -> None:
    source = tmp_path / "model.pth"
    source.touch()
    code = "import sys; sys.exit('cannot read ' + sys.argv[1])"
    row = Row("peer", "other")
    group = group_of(
        Job("peer", (*PYTHON, code, str(source)), (source,), may_fail=True),
        Job("other", (*PYTHON, ""), proof=lambda: "says nothing", may_fail=True),
        rows=(row,),
    )
    done = run(group, tmp_path)
    assert done["peer"].fails == "cannot read model.pth"
    [made] = figures.figures_of(group, "ext4", done, 0)
    assert made["fails"] == "cannot read model.pth" and made["against"]["fails"] == "says nothing"
    assert made["ratio"] is None and made["met"] is None


def test_a_wrong_output_ends_the_run(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"1")
    group = instant.Group("in place", "a file", (_copying(one, other, b"2"),), ())
    with pytest.raises(JobError, match="wrong file: it differs after byte 0"):
        run(group, tmp_path)


def test_a_right_output_passes_and_is_removed(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"1")
    assert run(group_of(_copying(one, other, b"1")), tmp_path)["copy"].samples
    assert not other.exists()


def _copying(one: Path, other: Path, data: bytes) -> Job:
    code = f"import sys; open(sys.argv[1], 'wb').write({data!r})"
    return Job("copy", (*PYTHON, code, str(other)), (one,), other, instant.Check("same", one, other))


def test_resets_come_before_every_run(tmp_path: Path) -> None:
    seen: list[int] = []
    run(group_of(Job("job", (*PYTHON, ""), reset=lambda: seen.append(1))), tmp_path, repeat=3)
    assert len(seen) == 4  # the warm-up, too


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target(ratio=2.0), True),
        (Target(ratio=1.9), False),
        (Target(seconds=2.0), True),
        (Target(seconds=1.9), False),
        (Target(ratio=2.0, peak=30), True),
        (Target(ratio=2.0, peak=29), False),
        (Target(each=0.001), True),
        (Target(each=0.0009), False),
    ],
)
def test_targets(target: Target, met: bool) -> None:
    rows = (Row("mine", "other", target, Each("start", 1000)),)
    results = {"mine": result("mine", 2.0, 30_000_000), "other": result("other", 1.0), "start": result("start", 1.0)}
    [row] = figures.figures_of(group_of(rows=rows), "ext4", results, 0)
    assert row["met"] is met
    document = {"machine": [], "peers": [], "rows": [row], "left_out": []}
    for text in (tables.plain(document), tables.sections(document)):
        assert ("met" if met else "missed") in text and "2.00x" in text


def test_every_row_names_jobs_of_its_group(tmp_path: Path) -> None:
    tool = ["ckptool"]
    scan = peers.over_folder(tmp_path, groups.small_folder(tmp_path, 10))
    everything = [
        *(group for spec in (BIG, MANY, LARGE) for group in groups.of(tool, spec, tmp_path)),
        *(group for group in instant.sharing(tool, "xfs", BIG, SPARSE_100, tmp_path)),
        *(group for heavy in (True, False) for group in peers.groups(tool, BIG, tmp_path, heavy)),
        groups.small(tool, tmp_path, 10, scan),
        peers.start_up(tool, tmp_path),
        groups.linear(tool, tmp_path, tmp_path / "out"),
        peaks.group(tool, BIG, tmp_path),
        remote.group(tool, REMOTE, tmp_path),
    ]
    for group in everything:
        names = [job.name for job in group.jobs]
        assert len(names) == len(set(names))
        wanted = {row.job for row in group.rows} | {row.against for row in group.rows if row.against}
        assert wanted <= set(names)


def test_every_command_has_its_peak_measured() -> None:
    from ckptool.cli.main import COMMANDS

    measured = {command.name.split()[0] for command in peaks.COMMANDS}
    assert measured <= set(COMMANDS)
    # One is measured where files are edited in place, two read no checkpoint, and one needs an adapter.
    elsewhere = {"completion", "explain", "undo", "merge-lora"}
    assert set(COMMANDS) - measured <= elsewhere, "add it to bench/peaks.py"


def test_flipped_differs_in_one_bit_of_a_tensor(tmp_path: Path) -> None:
    source, other = FIXTURES / "ddp4_training.pth", tmp_path / "other"
    flipped(source)(other)
    one, two = source.read_bytes(), other.read_bytes()
    assert [a ^ b for a, b in zip(one, two, strict=True) if a != b] == [1]


def test_the_published_figures_say_nothing_of_a_place() -> None:
    text = (ROOT / "bench" / "figures.json").read_text(encoding="utf-8")
    assert json.loads(text)["schema"] == figures.SCHEMA
    assert not re.search(r"/(tmp|home|root|mnt|work)/", text)


def test_a_group_takes_the_place_of_its_former_run() -> None:
    def row(group: str, job: str, seconds: float) -> dict[str, object]:
        return {"group": group, "file": "2 GB", "filesystem": "ext4", "job": job, "seconds": seconds}

    rows = [row("read", "keys", 1), row("edit", "a", 2), row("edit", "b", 3), row("end", "z", 4)]
    left_out = [{"what": f"{name}, 2 GB", "why": "not installed"} for name in ("new", "other")]
    known = {"machine": ["this"], "rows": rows, "left_out": left_out}
    measured = {"machine": ["this"], "rows": [row("new", "n", 7), row("edit", "a", 5), row("edit", "c", 6)]}
    found = figures.put_into(measured, known)
    assert [(one["group"], one["job"], one["seconds"]) for one in found["rows"]] == [
        *(("read", "keys", 1), ("edit", "a", 5), ("edit", "c", 6), ("end", "z", 4), ("new", "n", 7)),
    ]
    assert [gone["what"] for gone in found["left_out"]] == ["other, 2 GB"]


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


def test_the_modules_that_a_command_imports_are_noted(tmp_path: Path) -> None:
    words = (sys.executable, "-m", "ckptool", "keys", str(FIXTURES / "bare.pth"))
    [found] = run(group_of(Job("keys", words)), tmp_path).values()
    assert {"ckptool", "ckptool.cli.main", "ckptool.files.zips.reader"} <= set(found.modules)
    assert "ckptool.edits" not in found.modules


def test_the_server_of_remote_files_runs_while_its_group_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    words = (sys.executable, "-m", "ckptool", "keys", remote.ADDRESS)
    before = dict(os.environ)
    with remote.serving(FIXTURES / "bare.pth"):
        [found] = run(group_of(Job("keys", words)), tmp_path).values()
    assert "ckptool.remote.source" in found.modules
    assert dict(os.environ) == before
