"""Very many files: lists, journals and rows, by every engine, in memory that does not grow with their number."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import FIXTURES, ROOT

from ckptool.base.errors import UnreadableError
from ckptool.cli.main import run
from ckptool.cli.many import journal
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


@pytest.mark.parametrize("command", COMMANDS)
def test_every_engine_gives_the_same(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [command, str(FIXTURES / "real"), *(str(FIXTURES / name) for name in NAMES), "--format", "jsonl"]
    code = run(words)
    one = capsys.readouterr()
    for how in (["--jobs", "2"], ["--jobs", "2", "--engine", "dask", "--ordered"], ["--jobs", "2", "--engine", "dask"]):
        assert run([*words, *how]) == code
        other = capsys.readouterr()
        if "--ordered" in how or "dask" not in how:
            assert (other.out, other.err) == (one.out, one.err)
        assert sorted(other.out.splitlines()) == sorted(one.out.splitlines())
        assert sorted(other.err.splitlines()) == sorted(one.err.splitlines())


def test_a_lost_engine_ends_with_what_was_done(here: Path) -> None:
    """A worker of Dask that ends the scheduler: it runs in the process of the command."""
    code = """
import os, signal, sys
from ckptool.files import cluster
from ckptool.cli.main import main
real = cluster.Cluster._pass_on
seen = []
async def pass_on(self, future, inner):
    await real(self, future, inner)
    seen.append(1)
    if len(seen) == 5:
        await self._client.scheduler_comm.comm.close()
        self._fail(self._lost("it was lost"))
cluster.Cluster._pass_on = pass_on
if __name__ == "__main__":
    main(["scan", "--files-from", "list", "--format", "json", "--engine", "dask", "--jobs", "1"])
"""
    (here / "main.py").write_text(code, "utf-8")
    (here / "list").write_text("gan.pth\n" * 3000, "utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "main.py"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 3, done.stderr
    assert "the scheduler at tcp://" in done.stderr and "was lost" in done.stderr
    assert 5 <= len(json.loads(done.stdout)["files"]) < 3000


# -- lists


@pytest.mark.parametrize("null", [False, True])
def test_a_list_is_read_as_it_is(null: bool, tmp_path: Path) -> None:
    names = ["a", "b b", "a", "", " c ", "*", "\udcff", "d\rd", *(["x\ny", "\n", "d\r"] if null else [])]
    for end, last in (("\0", ""), ("\0", "\0")) if null else product(("\n", "\r\n"), ("", "\n", "\r\n")):
        (tmp_path / "list").write_bytes(os.fsencode(end.join(names) + last))
        assert list(listed_paths(str(tmp_path / "list"), null)) == [name for name in names if name]
    for content in (b"", b"\0\0" if null else b"\n\r\n"):
        (tmp_path / "list").write_bytes(content)
        with pytest.raises(UnreadableError, match="names no file"):
            list(listed_paths(str(tmp_path / "list"), null))


def test_names_that_only_nul_can_separate(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["new\nline.pth", "star*.pth", "[1].pth"]
    for name in names:
        shutil.copy("gan.pth", name)
    Path("list").write_bytes("\0".join([*names, "gone*.pth", names[0]]).encode())
    assert run(["validate", "--files-from", "list", "-0", "--format", "jsonl"]) == 3
    said = rows(capsys.readouterr().out)
    assert [item["path"] for item in said] == [*names, "gone*.pth", names[0]]
    assert [item["status"] for item in said] == ["valid"] * 3 + ["unreadable", "valid"]


@pytest.mark.parametrize(
    "words", ["validate", "validate --format rows", "scan --since journal", "lock --format rows", "hash"]
)
def test_a_list_with_nul_needs_its_option(words: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("list").write_bytes(b"gan.pth\0bare.pth\n")
    assert run([*words.split(), "--files-from", "list"]) == 2
    assert capsys.readouterr().err.endswith("if NUL separates them, add --null\n")


def test_a_list_may_have_folders_and_comes_after_the_paths(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir()
    shutil.copy("gan.pth", "runs/1.pth")
    Path("list").write_text("runs\ngan.pth\n", "utf-8")
    for command in ("validate", "scan", "hash"):
        run([command, "legacy_bare.pth", "--files-from", "list", "--format", "jsonl"])
        assert [item["path"] for item in rows(capsys.readouterr().out)] == ["legacy_bare.pth", "runs/1.pth", "gan.pth"]


# -- rows


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("command", ["validate", "scan", "hash", "lock"])
@pytest.mark.parametrize("engine", [[], ["--engine", "dask", "--jobs", "2", "--ordered"]])
def test_rows_have_the_same_columns_and_types(
    command: str, engine: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(FIXTURES / "real", "real")
    run([command, "real", *NAMES, "nowhere.pth", "--format", "rows", *engine])
    said = rows(capsys.readouterr().out)
    schema = json.loads((ROOT / "docs" / "schemas" / f"{command}.json").read_text("utf-8"))
    for item in said:
        jsonschema.validate(item, {"$defs": schema["$defs"], "$ref": "#/$defs/FileRow"})
        assert {name: type(value) for name, value in item.items()} == {name: type(v) for name, v in said[0].items()}
        assert list(item) == list(said[0]) and set(map(type, item.values())) == {int, str}
        assert all(-(1 << 63) <= value < 1 << 63 for value in item.values() if type(value) is int)
    by_path = {item["path"]: item for item in said}
    assert by_path["gan.pth"]["size"] == os.path.getsize("gan.pth")
    assert by_path["gan.pth"]["mtime_ns"] == os.stat("gan.pth").st_mtime_ns == 10**18
    assert by_path["nowhere.pth"]["code"] == 3 and by_path["nowhere.pth"]["size"] == -1
    assert by_path["lfs_pointer.pth"]["verdict"] == "unreadable"


# -- journals


def since(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str], int]:
    """Run validate with a journal: the exit code, the files that were read, and how many were not read again."""
    code = run(["validate", *words, "--since", "journal", "--format", "jsonl"])
    said = capsys.readouterr()
    sums = said.err.splitlines()[-1]
    again = sums.partition("; ")[2].partition(" ")[0]
    return code, [item["path"] for item in rows(said.out)], int(again or 0)


def test_what_has_not_changed_is_not_read_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = ["gan.pth", "legacy_bare.pth"]
    assert since(capsys, *good, "zip_wrong_crc.pth") == (1, [*good, "zip_wrong_crc.pth"], 0)
    assert since(capsys, *good, "zip_wrong_crc.pth") == (1, [], 3), "the verdict counts all the same"
    assert since(capsys, *good) == (0, [], 2)
    assert since(capsys, *good, "--jobs", "2") == (0, [], 2)
    assert since(capsys, *good, "--engine", "dask", "--jobs", "1") == (0, [], 2)
    assert since(capsys, *good, "truncated.pth", "nowhere.pth")[1] == ["truncated.pth", "nowhere.pth"]
    with open("gan.pth", "r+b") as file:  # in place, of the same size
        file.write(b"PK")
    assert since(capsys, *good) == (0, ["gan.pth"], 1)
    os.utime("gan.pth", (2e9 - 1e9 + 5, 1e9 + 5))
    assert since(capsys, *good) == (0, ["gan.pth"], 1)
    assert since(capsys, *good) == (0, [], 2)
    shutil.copy2("gan.pth", "other")
    os.replace("other", "gan.pth")  # another inode
    assert since(capsys, *good) == (0, ["gan.pth"], 1)


def test_what_cannot_be_read_is_tried_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert since(capsys, "lfs_pointer.pth", "gan.pth") == (3, ["lfs_pointer.pth", "gan.pth"], 0)
    assert since(capsys, "lfs_pointer.pth", "gan.pth") == (3, ["lfs_pointer.pth"], 1)


def test_a_file_that_just_changed_is_read_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may change once more without another time."""
    os.utime("gan.pth")
    assert since(capsys, "gan.pth") == (0, ["gan.pth"], 0)
    assert since(capsys, "gan.pth") == (0, ["gan.pth"], 0)
    os.utime("gan.pth", (time.time() - 5,) * 2)
    assert since(capsys, "gan.pth") == (0, ["gan.pth"], 0)
    assert since(capsys, "gan.pth") == (0, [], 1)


def test_other_options_and_versions_read_again(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["lock", "gan.pth", "-o", "lock.json"]) == 0
    capsys.readouterr()
    for words in ([], ["--quick"], ["--weights-only"], ["--device", "cpu"], ["--lock", "lock.json"], ["--strict"]):
        assert since(capsys, "gan.pth", *words)[1:] == (["gan.pth"], 0), words
        assert since(capsys, "gan.pth", *words)[1:] == ([], 1), words
    Path("lock.json").write_text(Path("lock.json").read_text("utf-8").replace("netG", "netX"), "utf-8")
    assert since(capsys, "gan.pth", "--lock", "lock.json") == (1, ["gan.pth"], 0), "another lock in the same file"
    for expected, code in (("*", 0), ("no.such.key", 1)):  # a policy that can be read once, as of <(echo ...)
        reading, writing = os.pipe()
        os.write(writing, f"require = ['{expected}']\n".encode())
        os.close(writing)
        assert since(capsys, "gan.pth", "--policy", f"/dev/fd/{reading}")[0] == code
        os.close(reading)
    assert run(["scan", "gan.pth", "--since", "journal"]) == 0
    assert "not read again" not in capsys.readouterr().err, "another command"
    Path("ckptool.toml").write_text('require = ["no.such.key"]\n', "utf-8")
    assert since(capsys, "gan.pth") == (1, ["gan.pth"], 0), "a policy that is found"
    Path("ckptool.toml").unlink()
    assert since(capsys, "gan.pth") == (0, [], 1)
    monkeypatch.setattr(journal, "__version__", "99")
    assert since(capsys, "gan.pth") == (0, ["gan.pth"], 0)


def test_a_line_that_was_cut_costs_itself(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["gan.pth", "legacy_bare.pth", "zip_wrong_crc.pth"]
    assert since(capsys, *names)[1] == names
    whole = Path("journal").read_bytes()
    for size in range(len(whole)):
        left = (whole[:size] + whole[size : size + 1].replace(b" ", b"")).count(b"\n")
        if size % 97 and whole[size - 1 : size] != b"\n":
            continue
        Path("journal").write_bytes(whole[:size])
        assert since(capsys, *names) == (1, names[left:], left)
        assert Path("journal").read_bytes().startswith(whole[:size] if size > 30 else b"")
        assert since(capsys, *names) == (1, [], 3)


def test_rows_are_a_journal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "gan.pth", "--format", "rows"]) == 0
    Path("journal").write_text(capsys.readouterr().out, "utf-8")
    assert since(capsys, "gan.pth") == (0, [], 1)


def test_a_checkpoint_in_several_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(FIXTURES / "dcp_flat", "dcp")
    for path in Path("dcp").rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert since(capsys, "dcp")[1] == ["dcp"]
    assert since(capsys, "dcp")[1:] == ([], 1)
    Path("dcp/note.txt").write_text("a program may load it", "utf-8")
    os.utime("dcp/note.txt", (1e9, 1e9))
    assert since(capsys, "dcp")[1] == ["dcp"]


@pytest.mark.parametrize("content", [b"PK\x03\x04", b"hello\nworld\n", b'{"schema": "other/1"}\n', b"[1]\n"])
def test_no_other_file_is_taken_for_a_journal(content: bytes, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other").write_bytes(content)
    assert run(["scan", "gan.pth", "--since", "other"]) == 4
    assert "it is not a journal of ckptool" in capsys.readouterr().err
    assert Path("other").read_bytes() == content


def test_a_journal_that_cannot_be_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["scan", "gan.pth", "--since", "no/such/folder/journal"]) == 5
    assert "its folder does not exist\n  -> mkdir -p no/such/folder" in capsys.readouterr().err
    Path("journal").mkdir()
    assert run(["scan", "gan.pth", "--since", "journal"]) == 5
    assert "the journal cannot be written" in capsys.readouterr().err


# -- memory


def peak(here: Path, *words: str) -> Iterator[int]:
    code = (
        "import os, resource, sys\nfrom ckptool.cli.main import run\nrun(sys.argv[1:])\nsys.stdout.flush()\n"
        "os.write(2, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss).encode())"
    )
    for count in (100, 5_000):
        (here / "list").write_text("note\n" * count, "utf-8")
        done = subprocess.run(
            [sys.executable, "-c", code, *words, "--files-from", "list"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=300,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=False,
        )
        assert f"{count:,} files: {count:,} ".encode() in done.stderr
        yield int(done.stderr.splitlines()[-1])


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "words",
    [
        ["scan"],
        ["scan", "--format", "rows", "--since", "journal"],
        ["scan", "--format", "jsonl", "--jobs", "2"],
        ["validate", "--quiet"],
    ],
    ids=" ".join,
)
def test_memory_does_not_grow_with_the_files(words: list[str], here: Path) -> None:
    (here / "note").write_text("nothing to see", "utf-8")
    few, many = peak(here, *words)
    assert many < few + 2560, "KiB: 5,000 of them would be 500 bytes each"
