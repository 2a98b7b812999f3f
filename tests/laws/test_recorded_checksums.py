"""Damage is not passed on: a flipped bit in a record that a command reads ends it with 3, and there is no output.

The cases come from the tables of the code: every folder fixture that a format of ``FOLDERS`` reads, every record with
a recorded checksum in it, every command that writes. A record is read by a command if flipping a bit of it could
change the output, so each case allows one of two results: the command names the record and writes nothing, or the
output is the one of the undamaged folder.
"""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import torch
from command_line import Said, say
from conftest import FIXTURES, WHOLE
from safetensors.torch import load_file

import ckptool
from ckptool.cli.main import COMMANDS, cli
from ckptool.files.compressed import ZstdSource
from ckptool.formats import FOLDERS, folder_format

#: Folder formats whose files have no checksums.
UNSUMMED = {"dcp-safetensors", "torch-folder"}
#: Commands that write something else than what they take from the records, or that edit files only.
#: ``lora merge`` needs an adapter for each model, and ``dequantize`` quantized weights: see their own tests.
OTHERS = {"report", "match", "lock", "lora merge", "lora convert", "lora extract", "lora resize"}
OTHERS |= {"dequantize", "resize", "set"}


class Record(NamedTuple):
    """A record with a checksum: a byte within it, in a file of the folder, and its name."""

    file: str
    at: int
    name: str


class Folder(NamedTuple):
    """A copy of a folder fixture, and facts for the command lines: a state dict, an entry and a key in it."""

    path: Path
    records: tuple[Record, ...]
    state_dict: str
    entry: str
    key: str


Words = Sequence[str | Path]


def ways(folder: Folder, other: Path) -> dict[str, list[Words]]:
    """The command lines, without an output, of each command that writes; ``other`` is an undamaged copy."""
    path = folder.path
    some = ("--key", folder.state_dict) if folder.state_dict else ()
    whole = ("--allow-loss", "all", "--tied", "clone")
    return {
        "strip-module": [(path,)],
        "add-module": [(path, *some)],
        "rename": [(path, "weight=w*", *some)],
        "remap": [(path, "--to", "cuda:1")],
        "extract": [(path, folder.entry)],
        "drop": [(path, folder.key)],
        "slim": [(path,), (path, "--dedupe")],
        "cast": [(path, "--to-dtype", "float64")],
        "edit": [
            (path, "--keep", folder.key),
            (path, "--set", "of_the_test=1"),
            (path, "--add-prefix", "net.", "--wrap", "all", *some),
            (path, "--to-dtype", "float16"),
        ],
        "merge": [(path, other), (other, path)],
        "average": [(path, other), (other, path)],
        "convert": [
            (path, "--to-format", "torch", *whole),
            (path, "--to-format", "legacy", *whole),
            (path, "--to-format", "dcp", *whole),
            (path, "--to-format", "safetensors", *whole, *some),
            (path, "--max-shard-size", "2kB", *whole, *some),
            (path, "--key", "module", "--deepspeed-16bit", *whole),
            (path, "--to-names", "hf:llama"),
            (path, "--to-names", "hf:qwen2"),
            (path, "--unflatten", other.with_suffix(".like.pth")),
        ],
        "sanitize": [(path,)],
        "redact": [(path,)],
        "salvage": [(path,)],
        "get": [(path, folder.key)],
    }


def outermost() -> Iterator[Path]:
    """The folders that are one checkpoint, without those within another one."""
    work = [FIXTURES]
    while work:
        for path in sorted(work.pop().iterdir()):
            if path.is_dir() and folder_format(str(path)):
                yield path
            elif path.is_dir():
                work.append(path)


def has_checksums(path: Path) -> bool:
    with ckptool.open(path) as checkpoint:
        return any(record.crc for record in checkpoint.container.records())


SUMMED = ["shards", *(str(path.relative_to(FIXTURES)) for path in outermost() if has_checksums(path))]


@functools.cache
def source(name: str) -> Path:
    """The folder of a name: a fixture, or one of .bin shards."""
    if name != "shards":
        return FIXTURES / name
    path = Path(tempfile.mkdtemp()) / name
    tensors = {f"module.{letter}": torch.randn(30, 30) for letter in "abc"}
    torch.save(tensors, path.with_suffix(".pth"))
    with ckptool.open(path.with_suffix(".pth")) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch", max_shard_size="4KB"), path)
    return path


def test_the_cases_have_every_format_and_every_command() -> None:
    formats = {known.name for name in SUMMED if (known := folder_format(str(source(name))))}
    assert formats == {known.name for known in FOLDERS} - UNSUMMED
    writing = {name for name in COMMANDS if "output" in {option.name for option in command_of(name).params}}
    folder = Folder(Path("in"), (), "", "", "")
    assert ways(folder, Path("other")).keys() == writing - OTHERS


def command_of(name: str) -> click.Command:
    found = cli.get_command(None, name)
    assert found is not None
    return found


@functools.cache
def facts(name: str) -> tuple[tuple[Record, ...], str, str, str]:
    """What ``Folder`` has of a fixture."""
    path = source(name)
    records = []
    with ckptool.open(path) as checkpoint:
        for record in checkpoint.container.records():
            if record.crc and record.span.size:
                file, at = record.span.source, record.span.offset + record.span.size // 2
                if isinstance(file, ZstdSource):  # what it inflates to is not in a file
                    file, at = file.source, file.at + file.length // 2
                records.append(Record(str(Path(file.name).relative_to(path)), at, record.name))
        best = max(checkpoint.state_dicts, key=lambda found: len(found.items), default=None)
        state_dict = best.path if best else ""
        tensors = [entry for entry in checkpoint.survey.tensors if entry.tensor.numel > 1 and entry.key]
        key = max(tensors, key=lambda entry: entry.tensor.numel).path
        entry = next(entry.path for entry in checkpoint.survey.entries if key.startswith(entry.path))
    return tuple(records), state_dict, entry, key


@pytest.fixture
def folder(name: str, tmp_path: Path) -> Folder:
    path, other = tmp_path / "in", tmp_path / "other"
    shutil.copytree(source(name), path)
    shutil.copytree(source(name), other)
    weights = (FIXTURES / name).with_name(Path(name).name + ".safetensors")
    if weights.exists():
        order = ("short", "scale", "seen", "first.weight", "first.bias", "second.weight", "second.bias")
        tensors = load_file(weights)
        if {f"weights.{part}" for part in order} <= tensors.keys():
            torch.save({part: tensors[f"weights.{part}"] * 0 for part in order}, tmp_path / "other.like.pth")
    return Folder(path, *facts(name))


def content(path: Path) -> dict[str, bytes]:
    """The bytes of a file, or of the files of a folder by their names."""
    files = path.rglob("*") if path.is_dir() else [path]
    return {str(file.relative_to(path)): file.read_bytes() for file in files if file.is_file()}


def written(command: str, words: Words, out: Path) -> tuple[Said, dict[str, bytes]]:
    """Run a command that writes; return what it said, and the output, which is removed."""
    said = say(command, *words, "-o", out)
    if not out.exists():
        return said, {}
    found = content(out)
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    return said, found


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ 0x10]))


def check(folder: Folder, command: str, words: Words, out: Path, record: Record, want: dict[str, bytes]) -> bool:
    """Check the law for one record; return whether it is read."""
    flip(folder.path / record.file, record.at)
    try:
        said, found = written(command, words, out)
    finally:
        flip(folder.path / record.file, record.at)
    label = f"{command} {words[1:]} {record}\n{said.all}"
    if command == "salvage":
        # What is lost is left out and named.
        assert said.code in (1, 3) or found == want, label
        return said.code != 0
    if said.code == 0:
        assert found == want, label
        return False
    assert said.code == 3 and not found, label
    # A folder with one file of weights has its name.
    assert {Path(record.file).name, record.name.rpartition("/")[2]} & {*re.split(r"[\s:,;/]+", said.err)}, label
    return True


def suffix(command: str, words: Words) -> str:
    """What the name of the output ends with."""
    return ".npy" if command == "get" else "" if {"dcp", "--max-shard-size"} & {*map(str, words)} else ".pth"


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", SUMMED)
def test_a_flipped_bit_is_not_passed_on(name: str, folder: Folder, tmp_path: Path) -> None:
    """Each folder with a part of the command lines, and other records for each; together with all of them."""
    lines = [(command, words) for command, lines in ways(folder, tmp_path / "other").items() for words in lines]
    for number, (command, words) in enumerate(lines):
        if (number + SUMMED.index(name)) % 4:
            continue
        out = tmp_path / ("out.safetensors" if "safetensors" in words else f"out{suffix(command, words)}")
        said, want = written(command, words, out)
        if said.code == 0:
            record = folder.records[zlib.crc32(f"{name} {number}".encode()) % len(folder.records)]
            check(folder, command, words, out, record, want)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", SUMMED)
def test_every_record_of_a_folder_counts(name: str, folder: Folder, tmp_path: Path) -> None:
    """Some records of each folder with the conversion that takes all of it, and with those that cut tensors.

    ``make torture`` takes all records.
    """
    out = tmp_path / "out.pth"
    first, *rest = ways(folder, tmp_path / "other")["convert"]
    for words in (first, *(words for words in rest if {"--to-names", "--unflatten"} & {*map(str, words)})):
        said, want = written("convert", words, out)
        if said.code == 0:
            records = folder.records[:: 1 if WHOLE else len(folder.records) // 6 + 1]
            read = [record for record in records if check(folder, "convert", words, out, record, want)]
            assert read


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("how", ["files", "jobs"])
@pytest.mark.parametrize("name", ["shards", "dcp4", "ranks/local_3", "ranks/zero3_groups", "ranks/megatron_tp2"])
def test_a_flipped_bit_is_found_by_other_processes(name: str, how: str, folder: Folder, tmp_path: Path) -> None:
    """A command that hands each file of a folder to a process, or each of several inputs."""
    every, out = tmp_path / "all", tmp_path / "out"

    def run(command: str, words: Words) -> tuple[Said, dict[str, bytes]]:
        if how == "jobs":
            said = say(command, words[0], tmp_path / "other", *words[1:], "--out-dir", every, "--jobs", "2")
            found = [path for path in every.iterdir() if not path.name.startswith("other")]
        else:
            said = say(command, *words, "--max-shard-size", "0.3kB", "-o", out, "--jobs", "2")
            found = [path for path in [out] if path.exists()]
        result = content(found[0]) if found else {}
        for path in (*tmp_path.glob("all/*"), *found):
            if path.exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return said, result

    written = 0
    for command, (words, *_) in ways(folder, tmp_path / "other").items():
        if command == "salvage" or "paths" not in {option.name for option in command_of(command).params}:
            continue
        said, want = run(command, words)
        if said.code == 0:
            record = folder.records[zlib.crc32(f"{name} {command}".encode()) % len(folder.records)]
            flip(folder.path / record.file, record.at)
            said, found = run(command, words)
            flip(folder.path / record.file, record.at)
            label = f"{command} {words[1:]} {record}\n{said.all}"
            assert (said.code, found) in ((3, {}), (0, want)), label
            written += 1
    assert written
