"""Very many files: lists and rows, by every engine, in memory that does not grow with their number."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_line import program
from conftest import FIXTURES
from docs_modules import docs_module

from ckptool.base.errors import UnreadableError
from ckptool.cli.main import run
from ckptool.files.lists import listed_paths

NAMES = ["ddp4_training.pth", "lfs_pointer.pth", "legacy_bare.pth", "zip_wrong_crc.pth", "gan.pth", "truncated.pth"]
COMMANDS = ["inspect", "keys", "stats", "validate", "scan", "hash"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with old checkpoints, and what went wrong with some."""
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        shutil.copy(FIXTURES / name, name)
        os.utime(name, (1e9, 1e9))
    return tmp_path


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# -- engines


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_engine_gives_the_same(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [command, str(FIXTURES / "real"), *(str(FIXTURES / name) for name in NAMES), "--format", "jsonl"]
    code = run(words)
    one = capsys.readouterr()
    for how in (["--jobs", "2"], ["--jobs", "2", "--engine", "dask"]):
        assert run([*words, *how]) == code
        other = capsys.readouterr()
        if "dask" not in how:
            assert (other.out, other.err) == (one.out, one.err)
        assert sorted(other.out.splitlines()) == sorted(one.out.splitlines())
        assert sorted(other.err.splitlines()) == sorted(one.err.splitlines())


def test_a_lost_engine_ends_with_what_was_done(here: Path) -> None:
    """A worker of Dask that ends the scheduler: it runs in the process of the command."""
    code = """
import os, signal, sys
from ckptool.files import cluster
from ckptool.cli.main import main
real = cluster.Cluster.submit
seen = []
def submit(self, *call):
    seen.append(1)
    if len(seen) == 100:
        self._client.loop.add_callback(self._client.scheduler_comm.comm.abort)
    return real(self, *call)
cluster.Cluster.submit = submit
if __name__ == "__main__":
    main(["scan", "--files-from", "list", "--format", "json", "--engine", "dask", "--jobs", "1"])
"""
    (here / "list").write_text("gan.pth\n" * 3000, "utf-8")
    said = program(code=code)
    assert said.code == 3, said.err
    assert "the connection to the workers was lost" in said.err
    assert 5 <= len(json.loads(said.out)["files"]) < 3000


# -- lists


@pytest.mark.parametrize("null", [False, True])
def test_a_list_is_read_as_it_is(null: bool, tmp_path: Path) -> None:
    names = ["a", "b b", "a", "", " c ", "*", "\udcff", "d\rd", *(["x\ny", "\n", "d\r"] if null else [])]
    for end, last in (("\0", ""), ("\0", "\0")) if null else product(("\n", "\r\n"), ("", "\n", "\r\n")):
        (tmp_path / "list").write_bytes(os.fsencode(end.join(names) + last))
        assert list(listed_paths(str(tmp_path / "list"))) == [name for name in names if name]
    for content in (b"", b"\0\0" if null else b"\n\r\n"):
        (tmp_path / "list").write_bytes(content)
        with pytest.raises(UnreadableError, match="names no file"):
            list(listed_paths(str(tmp_path / "list")))


def test_slices_are_the_whole(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For every command, the answers for all slices are the answers for all inputs."""
    shutil.copytree(FIXTURES / "real", "real")
    for command in COMMANDS:
        found: list[list[str]] = []
        for how in ([], *(["--slice", f"{place}/3"] for place in (1, 2, 3))):
            run([command, "gan.pth", "real", "--format", "jsonl", *how])
            found.append(capsys.readouterr().out.splitlines())
        whole, *parts = found
        assert [parts[place % 3].pop(0) for place in range(len(whole))] == whole
        assert parts == [[], [], []]


def test_a_list_may_have_folders_and_comes_after_the_paths(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir()
    shutil.copy("gan.pth", "runs/1.pth")
    Path("list").write_text("runs\ngan.pth\n", "utf-8")
    for command in ("validate", "scan", "hash"):
        run([command, "legacy_bare.pth", "--files-from", "list", "--format", "jsonl"])
        assert [item["path"] for item in rows(capsys.readouterr().out)] == ["legacy_bare.pth", "runs/1.pth", "gan.pth"]


# -- rows


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("command", ["validate", "scan", "hash", "lock"])
@pytest.mark.parametrize("engine", [[], ["--engine", "dask", "--jobs", "2"]])
def test_rows_have_the_same_columns_and_types(
    command: str, engine: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(FIXTURES / "real", "real")
    run([command, "real", *NAMES, "nowhere.pth", "--format", "rows", *engine])
    said = rows(capsys.readouterr().out)
    schema = docs_module("schemas").schema(command)
    for item in said:
        jsonschema.validate(item, {"$defs": schema["$defs"], "$ref": "#/$defs/FileRow"})
        assert {name: type(value) for name, value in item.items()} == {name: type(v) for name, v in said[0].items()}
        assert list(item) == list(said[0]) and set(map(type, item.values())) == {int, str}
        assert all(-(1 << 63) <= value < 1 << 63 for value in item.values() if type(value) is int)
    by_path = {item["path"]: item for item in said}
    assert by_path["gan.pth"]["size"] == os.path.getsize("gan.pth")
    assert by_path["nowhere.pth"]["code"] == 3 and by_path["nowhere.pth"]["size"] == -1
    assert by_path["lfs_pointer.pth"]["verdict"] == "unreadable"


# -- memory


def peak(here: Path, *words: str) -> Iterator[int]:
    code = (
        "import os, resource, sys\nfrom ckptool.cli.main import run\nrun(sys.argv[1:])\nsys.stdout.flush()\n"
        "os.write(2, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss).encode())"
    )
    for count in (100, 5_000):
        (here / "list").write_text("note\n" * count, "utf-8")
        said = program(*words, "--files-from", "list", code=code)
        assert f"{count:,} files: {count:,} " in said.err
        yield int(said.err.splitlines()[-1])


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "words",
    [["scan"], ["scan", "--format", "rows"], ["scan", "--format", "jsonl", "--jobs", "2"], ["validate", "--quiet"]],
    ids=" ".join,
)
def test_memory_does_not_grow_with_the_files(words: list[str], here: Path) -> None:
    (here / "note").write_text("nothing to see", "utf-8")
    few, many = peak(here, *words)
    assert many < few + 2560, "KiB: 5,000 of them would be 500 bytes each"
