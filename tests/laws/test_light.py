"""Law 3, light: no command imports torch or numpy unless it really loads, memory is bounded by the metadata and not by
the file, and files beyond 4 GiB, with storages beyond 4 GiB, are like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import FIXTURES, ROOT
from process_probe import HEAVY, command, probe

import ckptool
from ckptool.cli.main import COMMANDS, run
from ckptool.files.sources import FileSource

GIB = 1 << 30
MIB = 1 << 20
DEMO = str(FIXTURES / "ddp4_training.pth")

#: What a bare interpreter takes is about 9 MiB, click and tabulate 8 more; torch would be 200.
PEAK = 48 * MIB


def test_importing_the_library_is_cheap() -> None:
    found = probe("import ckptool")
    assert found.wanted == []
    assert found.modules & {*HEAVY, "click", "tabulate", "ckptool.cli", "ckptool.values.torch"} == set()
    assert found.peak < 32 * MIB


CALLS: list[list[str]] = [
    ["--version"],
    ["--help"],
    *([name, "--help"] for name in COMMANDS),
    ["inspect", DEMO],
    ["inspect", DEMO, "--map-location", "cpu", "--format", "json"],
    ["keys", DEMO],
    ["keys", DEMO, "--all", "--format", "markdown"],
    ["keys", DEMO, "--format", "jsonl", "--include", "*weight", "--sort", "name"],
    ["strip-module", DEMO, "-o", "OUT"],
    ["strip-module", DEMO, "-o", "OUT", "--wrappers", "--format", "json"],
    ["add-module", DEMO, "-o", "OUT"],
    ["remap", DEMO, "--to", "cpu", "-o", "OUT"],
    ["remap", str(FIXTURES / "numpy_objects.pth"), "--to", "cuda:0", "--include-cpu", "--strings", "-o", "OUT"],
    ["match", DEMO, DEMO],
    ["match", str(FIXTURES / "bare_module.pth"), str(FIXTURES / "bare.pth"), "--apply", "-o", "OUT"],
    ["inspect", str(FIXTURES / "legacy_cuda.pth")],
    ["diff", DEMO, DEMO],
    ["hash", DEMO, "--each"],
    ["lock", DEMO, "--content"],
    ["strip-module", str(FIXTURES / "legacy_cuda.pth"), "-o", "OUT"],
]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("arguments", CALLS, ids=lambda call: " ".join(part.rpartition("/")[2] for part in call))
def test_no_command_needs_torch_or_numpy(arguments: list[str], out: Path) -> None:
    found = command(*(str(out) if part == "OUT" else part for part in arguments))
    assert (found.code, found.err) == (0, "")
    assert found.out
    assert found.wanted == []
    assert found.modules.isdisjoint(HEAVY)
    assert found.peak < PEAK


def test_tabulate_is_imported_for_markdown_only() -> None:
    for style, expected in {"table": False, "json": False, "markdown": True}.items():
        assert ("tabulate" in command("keys", DEMO, "--format", style).modules) is expected


#: What ``keys`` of a local file imports, in addition to click. Every module takes a quarter of a millisecond.
KEYS_IMPORTS = {
    "base": "addresses dtypes engines errors findings globs lazy limits map_location records steps suffixes text",
    "checkpoint": "backends checkpoint container objects paths selection survey tensors unsupported",
    "cli": "help inputs main options render runner show terminal",
    "files": "archives sources tars threads zips zips.reader zips.versions",
    "formats": "checkpoint_search opening torch torch.zip_reader zip_kinds",
    "pickles": "batches decode fast_decode machine nodes opcodes uncommon_opcodes",
    "reports": "file_rows",
}
#: Modules of the standard library that these import, and click does not.
STANDARD_IMPORTS = {"array", "contextvars", "gc", "heapq", "shlex", "signal", "struct", "zlib"}
#: Prints the modules that a command imports, in addition to click.
IMPORTED = """
import sys, click
before = set(sys.modules)
from ckptool.cli.main import run
run(sys.argv[1:])
print(*sorted(set(sys.modules) - before), file=sys.stderr)
"""


def test_keys_imports_what_one_file_needs() -> None:
    call = [sys.executable, "-c", IMPORTED, "keys", DEMO]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=600, check=True)
    rooms = {f"ckptool.{room}" for room in KEYS_IMPORTS}
    ours = {f"ckptool.{room}.{name}" for room, names in KEYS_IMPORTS.items() for name in names.split()}
    imported = {name for name in done.stderr.split() if not name.startswith("_")}
    assert imported - rooms - ours - STANDARD_IMPORTS - {"ckptool"} == set()
    assert ours <= imported, "shorten the list"


# -- larger than 32 bits ------------------------------------------------------------------------------------------


class Huge(NamedTuple):
    """A checkpoint of 4.8 GB with 12 kB of data: a storage beyond 4 GiB, and records that begin behind it."""

    path: Path
    keys: list[str]


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Huge]:
    torch = pytest.importorskip("torch")
    if not hasattr(torch.serialization, "skip_data"):
        pytest.skip("this torch cannot save without data")
    path = tmp_path_factory.mktemp("huge") / "huge.pth"
    state = OrderedDict(
        [
            ("module.first.weight", torch.zeros(4)),
            ("module.huge.weight", torch.empty(4 * GIB + 4096, dtype=torch.uint8)),
            ("module.large.weight", torch.empty(GIB // 8, dtype=torch.float32)),
            ("module.last.weight", torch.empty(5)),
            ("module.last.bias", torch.empty(3, dtype=torch.float64)),
        ]
    )
    with torch.serialization.skip_data():
        torch.save({"epoch": 3, "state_dict": state, "device": "cuda:0"}, path)
    # Some bytes to recognise: at the very end of the huge storage, and in those behind it.
    with ckptool.open(path) as checkpoint, path.open("r+b") as file:
        for key, at, data in ((1, 4 * GIB, b"\x07" * 4096), (3, 0, b"\x00\x00\x80\x3f" * 5), (4, 0, b"\x05" * 24)):
            span = checkpoint.container.stored(str(key)).span
            assert span is not None
            file.seek(span.offset + at)
            file.write(data)
    if path.stat().st_blocks * 512 > 64 * MIB:
        path.unlink()
        pytest.skip("this file system has no holes")
    yield Huge(path, list(state))
    path.unlink()


@pytest.fixture
def holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the kernel's copy keep holes: 5 GB of zeros take 20 seconds, and would show nothing more."""
    real = os.copy_file_range

    def copy(source: int, target: int, count: int, offset: int, at: int) -> int:
        try:
            begin = os.lseek(source, offset, os.SEEK_DATA)
        except OSError:  # nothing but a hole up to the end
            begin = offset + count
        if begin == offset:
            end = os.lseek(source, offset, os.SEEK_HOLE)
            return real(source, target, min(count, end - offset), offset, at)
        skipped = min(count, begin - offset)
        os.ftruncate(target, max(os.fstat(target).st_size, at + skipped))
        return skipped

    monkeypatch.setattr(os, "copy_file_range", copy)


def records(path: Path) -> dict[str, zipfile.ZipInfo]:
    """The records of a zip as another reader sees them, by their names below the root folder."""
    with zipfile.ZipFile(path) as archive:
        return {info.filename.partition("/")[2]: info for info in archive.infolist()}


def test_a_huge_file_really_has_zip64_headers(huge: Huge) -> None:
    found = records(huge.path)
    assert found["data/1"].file_size > 4 * GIB > found["data/1"].header_offset
    assert found["data/2"].header_offset > 4 * GIB and found["data/4"].header_offset > 4 * GIB
    assert huge.path.stat().st_size > 4.5 * GIB


@pytest.mark.parametrize("call", [["inspect"], ["keys", "--all"], ["strip-module", "--dry-run"]])
def test_memory_is_bounded_by_the_metadata(call: list[str], huge: Huge) -> None:
    found = command(*call, str(huge.path))
    assert (found.code, found.err) == (0, "")
    assert found.peak < PEAK


@pytest.mark.parametrize("edit", ["inspect", "keys", "strip"])
def test_only_the_metadata_of_a_huge_file_is_read(edit: str, huge: Huge, monkeypatch: pytest.MonkeyPatch) -> None:
    read, real = [0], FileSource.read

    def counting(self: FileSource, offset: int, size: int) -> bytes:
        data = real(self, offset, size)
        read[0] += len(data)
        return data

    monkeypatch.setattr(FileSource, "read", counting)
    if edit == "inspect":
        ckptool.inspect(huge.path)
    elif edit == "keys":
        ckptool.keys(huge.path, all=True)
    else:
        with ckptool.open(huge.path) as checkpoint:
            assert ckptool.strip_module(checkpoint).edited
    assert 1000 < read[0] < 1 * MIB


def test_a_huge_file_is_stripped_and_torch_loads_the_result(
    huge: Huge, out: Path, holes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    assert run(["strip-module", str(huge.path), "-o", str(out)]) == 0
    assert "removed from 5 keys" in capsys.readouterr().out
    before, after = (torch.load(path, mmap=True, weights_only=True) for path in (huge.path, out))
    assert list(after["state_dict"]) == [key.removeprefix("module.") for key in huge.keys]
    assert after["epoch"] == 3
    for key in huge.keys:
        a, b = before["state_dict"][key], after["state_dict"][key.removeprefix("module.")]
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        for part in (slice(0, 4096), slice(max(len(a) - 4096, 0), None)):
            assert torch.equal(a[part], b[part])
    assert after["state_dict"]["huge.weight"][-4096:].tolist() == [7] * 4096
    assert after["state_dict"]["last.weight"].tolist() == [1.0] * 5
    # Another reader finds the same records, with the same sizes and checksums.
    old, new = records(huge.path), records(out)
    facts = [{name: (info.file_size, info.CRC) for name, info in found.items()} for found in (old, new)]
    assert [name for name in facts[0] if facts[0][name] != facts[1].get(name)] == ["data.pkl"]
    assert list(old) == list(new)


def test_memory_is_bounded_while_bytes_are_copied_through_a_buffer(tmp_path: Path) -> None:
    """Where the kernel cannot copy, 256 MiB go through a buffer of 4."""
    torch: Any = pytest.importorskip("torch")
    source, out = tmp_path / "in.pth", tmp_path / "out.pth"
    with torch.serialization.skip_data():
        torch.save({"module.weight": torch.empty(256 * MIB, dtype=torch.uint8)}, source)
    call = ["strip-module", str(source), "-o", str(out), "-q"]
    found = probe(f"import os; del os.copy_file_range; from ckptool.cli.main import main; main({call!r})")
    assert (found.code, found.err) == (0, "")
    assert out.stat().st_size > 256 * MIB
    assert found.peak < PEAK


def test_memory_for_each_tensor_of_a_safetensors_file(tmp_path: Path) -> None:
    """An edit holds the header once, not also parsed again and as nested dicts."""
    path, count = tmp_path / "in.safetensors", 20_000
    entries = ((f"module.layers.{at}.weight", [4 * at, 4 * at + 4]) for at in range(count))
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": place} for name, place in entries}
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4 * count))
    found = command("strip-module", str(path), "-o", str(tmp_path / "out.safetensors"), "--quiet")
    assert (found.code, found.err) == (0, "")
    assert found.peak < 24 * MIB + 4200 * count


def test_a_format_is_imported_only_when_a_file_may_be_of_it(tmp_path: Path) -> None:
    found = command("strip-module", DEMO, "-o", str(tmp_path / "out.pth"))
    formats = {name for name in found.modules if name.startswith("ckptool.formats.")}
    others = ("safetensors", "hf", "dcp", "programs", "foreign")
    assert found.code == 0
    assert [name for name in formats if name.split(".")[2] in others or "legacy" in name or "tar_reader" in name] == []


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "call",
    [["stats", "bare.pth"], ["validate", "--load", "bare.pth"], ["cast", "bare.pth", "bf16", "-o", "OUT"]],
    ids=" ".join,
)
def test_torch_says_nothing_of_a_missing_numpy(call: list[str], tmp_path: Path) -> None:
    words = [
        str(FIXTURES / word) if word.endswith(".pth") else word.replace("OUT", str(tmp_path / "o.pth")) for word in call
    ]
    code = f"import sys; sys.modules['numpy'] = None; from ckptool.cli.main import run; sys.exit(run({words!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
