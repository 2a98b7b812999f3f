"""Small files that ask for much: each is answered in bounded time and 512 MB, without a traceback.

Time is counted in runs of the calibration loop of ``tests/helpers/calibration.py``, which runs in the same process: it
makes 200,000 short strings and counts them in a dict.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
from conftest import ROOT as PROJECT
from conftest import WHOLE
from crafted_files import ROOT, TENSOR, End, Entry, altered, archive, dumped, entries, legacy, plain, put, with_record

from ckptool.files.zips.versions import EditNote, encode_note

#: The most runs of the calibration loop that a command may take: three times what the slowest file takes today.
LOOPS = 300
#: Seconds to wait for each command. A command that takes longer hangs.
PATIENCE = 600
MEMORY = 512 << 20


def many(number: int) -> int:
    """Return ``number`` in ``make torture``, otherwise a quarter: of the files that take longest.

    Work that grows with the square of the number breaks the same bound.
    """
    return number if WHOLE else number // 4


def laughs() -> bytes:
    """Each list holds the one before it ten times: 10^59 leaves in 2 kB."""
    raw = b"\x80\x02](" + b"K\x01" * 10 + b"eq\x00"
    for level in range(59):
        raw += b"](" + (b"h" + bytes([level])) * 10 + b"eq" + bytes([level + 1])
    return raw + b"."


def itself() -> bytes:
    return b"\x80\x02]q\x00(h\x00h\x00e}q\x01(" + put("me") + b"h\x01" + put("list") + b"h\x00u\x86."


def many_entries(count: int) -> bytes:
    return archive([*entries().values(), *(Entry(f"{ROOT}/x{number}") for number in range(count))])


def bomb(short: str, size: int) -> bytes:
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    # A block that ends with a full flush can be repeated.
    block = squeeze.compress(bytes(1 << 20)) + squeeze.flush(zlib.Z_FULL_FLUSH)
    packed = block * (size >> 20) + squeeze.flush()
    told = {"method": 8, "packed": len(packed), "size": size, "crc": 1}
    found = entries()
    entry = found.get(short, Entry(f"{ROOT}/{short}"))
    found[short] = Entry(
        entry.name,
        packed,
        listed=told,
        local={"method": 8},
        descriptor=struct.pack("<4s3I", b"PK\x07\x08", 1, len(packed), size),
    )
    return archive(found.values())


def nested_archives(levels: int) -> bytes:
    data = plain()
    for _ in range(levels):
        data = with_record(Entry(f"{ROOT}/inner.pth", data, 8))
    return data


def shared_payloads(levels: int, names: int) -> bytes:
    """Archives in each other, in each of which many names lead to the one below."""
    data = dumped(1)
    for level in range(levels):
        name = "a/0.pkl" if not level else "a/x"
        data = archive([Entry(name, data), *[Entry(name, data, ghost=True, listed={"header": 0})] * (names - 1)])
    return with_record(Entry(f"{ROOT}/inner", data))


def shared_header(names: int) -> bytes:
    """One local header with 16,000 extra fields, under many names."""
    found = [Entry(f"{ROOT}/z", b"x", extra=bytes(64_000)), *entries().values()]
    ghosts = [Entry(f"{ROOT}/y{number}", b"x", ghost=True, listed={"header": 0}) for number in range(names)]
    return archive([*found, *ghosts])


def headers_within_headers(count: int) -> bytes:
    """Local headers, each with extra fields that reach over thousands of others."""
    header = struct.pack("<4s5H3I2H", b"PK\3\4", 0, 0, 0, 0, 0, 0, 0, 0, 0, 60_000)
    body = header * count + bytes(60_000)
    found = [*entries().values(), Entry(f"{ROOT}/big", body)]
    at = archive(found).index(header)
    ghosts = [Entry(f"{ROOT}/{n}.pkl", ghost=True, listed={"header": at + 30 * n, "flags": 0}) for n in range(count)]
    return archive([*found, *ghosts])


def hidden_pickles(count: int) -> bytes:
    """Headers that no directory lists, each of a pickle that runs over all the others."""
    header = struct.pack("<4s5H3I2H", b"PK\3\4", 0, 0, 0, 0, 0, 0, 0, 0, 5, 0) + b"x.pkl"
    pickled = b"\x80\x02" + b"B" + struct.pack("<I", len(header) + 3)
    return plain() + (header + pickled) * count + b"N" * 2_000_000


def bombs(count: int) -> bytes:
    """Many small records that inflate to a thousand times their size."""
    data = b"\x80\x02" + b"N" * (4 << 20)
    return archive([*entries().values(), *(Entry(f"{ROOT}/{number}.pkl", data, 8) for number in range(count))])


def forged_versions(count: int) -> bytes:
    """A chain of notes of edits in place that nobody made, each with a directory of many entries."""
    data = many_entries(2_000)
    end = data[-98:]
    parts = [data]
    size = len(data)
    for _ in range(count):
        note = encode_note(EditNote(size, zlib.crc32(end), "x", 0))
        parts += [note, end]
        size += len(note) + len(end)
    return b"".join(parts)


def safetensors(head: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(head) if length is None else length) + head


FILES: dict[str, Callable[[], bytes]] = {
    "a length of 2^62 in BINBYTES8": lambda: plain(pickled=b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"."),
    "a length of 2^62 in BINUNICODE8": lambda: plain(pickled=b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"."),
    "a length of 2^62 in FRAME": lambda: plain(pickled=b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N."),
    "a length of 2^31 in LONG4": lambda: plain(pickled=b"\x80\x02\x8b\xff\xff\xff\x7f."),
    "a negative length in LONG4": lambda: plain(pickled=b"\x80\x02\x8b\xff\xff\xff\xff."),
    "PUT 2^32-1": lambda: plain(pickled=b"\x80\x02Nr\xff\xff\xff\xffj\xff\xff\xff\xff."),
    "a million digits": lambda: plain(pickled=b"I" + b"9" * 1_000_000 + b"\n."),
    "an int of a million bytes": lambda: plain(
        pickled=b"\x80\x02}(" + put("w") + b"\x8b" + struct.pack("<I", 1_000_000) + b"\x7f" * 1_000_000 + b"u."
    ),
    "many short templates": lambda: plain(
        pickled=b"\x80\x02](" + b"".join(put(f"{{{{:{n:06d}") for n in range(many(700_000))) + b"e."
    ),
    "billion laughs": lambda: plain(pickled=laughs()),
    "a million nested tuples": lambda: plain(pickled=b"\x80\x02)" + b"\x85" * 1_000_000 + b"."),
    "a million nested lists": lambda: plain(pickled=b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b"."),
    "lists that contain themselves": lambda: plain(pickled=itself()),
    "many globals": lambda: plain(pickled=b"\x80\x02(" + b"ca\nb\n" * many(1_000_000) + b"t."),
    "a name of a megabyte": lambda: plain({"x" * 1_000_000: TENSOR}),
    "60,000 entries": lambda: many_entries(60_000),
    "many pickles": lambda: archive(
        [*entries().values(), *(Entry(f"{ROOT}/x{number}.pkl", b"\x80\x02N.") for number in range(many(60_000)))]
    ),
    "60,000 duplicates": lambda: archive([*entries().values(), *[Entry(f"{ROOT}/data/0", b"x" * 16)] * 60_000]),
    "a zip64 count of 2^40": lambda: archive(
        entries().values(), End(count=0xFFFF, zip64={"here": 1 << 40, "count": 1 << 40})
    ),
    "a record of 4 GB that is not there": lambda: altered(
        "data.pkl", listed={"size": 0xFFFFFFF0, "packed": 0xFFFFFFF0}
    ),
    "a zip bomb in data.pkl": lambda: bomb("data.pkl", 2 << 30),
    "a zip bomb in version": lambda: bomb("version", 512 << 20),
    "a zip bomb in a storage": lambda: bomb("data/0", 512 << 20),
    "a zip bomb that lies about its size": lambda: altered(
        "data.pkl", data=bytes(200 << 20), method=8, listed={"size": 9}
    ),
    "archives in archives": lambda: nested_archives(40),
    "archives in archives that share a payload": lambda: shared_payloads(8, 30),
    "1,000 names of one header with 16,000 fields": lambda: shared_header(1_000),
    "20,000 headers within each other": lambda: headers_within_headers(20_000),
    "hidden pickles, one over the others": lambda: hidden_pickles(many(5_000)),
    "small bombs": lambda: bombs(many(30)),
    "10,000 forged versions": lambda: forged_versions(10_000),
    "10,000 bare pickles": lambda: dumped(1) * 10_000,
    "local headers without an end": lambda: b"PK\x03\x04" * 250_000,
    "descriptors without an end": lambda: plain()[:400] + b"PK\x07\x08" * 250_000,
    "a legacy list of a million keys": lambda: legacy(keys=b"\x80\x02](" + b"K\x01" * 1_000_000 + b"e."),
    "a legacy count of 2^62": lambda: legacy(storages={"0": (1 << 62, b"")}),
    "safetensors, a head of 2^63": lambda: safetensors(b"{}", 1 << 63),
    "safetensors, holes and overlaps": lambda: (
        safetensors(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[8,12]},"b":{"dtype":"F32","shape":[9],"data_offsets":[9,45]}}'
        )
        + bytes(4)
    ),
    "YAML, 49,000 aliases without an anchor": lambda: b"_target_: *x\n" * 49_000 + b"y: aaaaaaaaaaaaa\n" * 400_000,
    "YAML, 20 keys before a template of 6 million tokens": lambda: (
        b"chat_template: 1\n" * 20 + b"x: {{ " + b"a b " * 1_500_000
    ),
    "YAML, strings in 190 brackets": lambda: (
        b"chat_template: 1\n" * 20 + b"x: {{ " + b"[" * 190 + b"'a' " * many(1_000_000)
    ),
    "JSON, a million brackets": lambda: b"[" * 1_000_000,
    "JSON, a weight_map that leads out": lambda: json.dumps(
        {"metadata": {}, "weight_map": {"a": "../../etc/passwd", "b": "/dev/zero"}}
    ).encode(),
}
#: These take long: one command stands for the others.
HEAVY = {
    "many short templates",
    *("a million nested tuples", "a million nested lists", "many globals"),
    *("60,000 entries", "many pickles", "60,000 duplicates"),
    *("a zip bomb in data.pkl", "a zip bomb in version", "a zip bomb in a storage"),
    *("archives in archives that share a payload", "1,000 names of one header with 16,000 fields"),
    *("20,000 headers within each other", "hidden pickles, one over the others"),
    *("small bombs", "10,000 forged versions"),
    *("a zip bomb that lies about its size", "a legacy list of a million keys", "descriptors without an end"),
}
COMMANDS = ("inspect", "keys", "validate", "salvage")
#: Each file in a fork of a process that has run the commands once, all under a limit on their memory.
ASKED = """
import contextlib, io, json, os, sys
from calibration import loops
from ckptool.cli.main import run

def answers(commands, path):
    found = {}
    for command in commands:
        out, err = io.StringIO(), io.StringIO()
        more = ["--dry-run"] if command == "salvage" else []
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code, took = loops(lambda: run([command, *more, path]))
        found[command] = code, took, err.getvalue()[-300:]
    return found

commands, harmless, *paths = sys.argv[1:]
answers(commands.split(), harmless)
for path in paths:
    child = os.fork()
    if not child:
        os.write(1, json.dumps([path, answers(commands.split(), path)]).encode() + b"\\n")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, path
"""
#: For each command the exit code, the runs of the calibration loop, and the end of its messages.
Answers: TypeAlias = "dict[str, tuple[int, float, str]]"


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def ask(paths: Sequence[Path], commands: Sequence[str]) -> dict[Path, Answers]:
    """Return the answers of commands about files."""
    harmless = paths[0].with_name("harmless")
    harmless.write_bytes(plain())
    done = subprocess.run(
        [sys.executable, "-c", ASKED, " ".join(commands), harmless, *paths],
        env=os.environ | {"PYTHONPATH": f"{PROJECT}{os.pathsep}{PROJECT / 'tests/helpers'}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE * len(commands),
        preexec_fn=limited,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    assert "Traceback" not in done.stderr
    return {Path(path): answers for path, answers in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    """The answers of all commands about the files that take them little time."""
    folder = tmp_path_factory.mktemp("quick")
    paths = {key: folder / f"{number}.pth" for number, key in enumerate(FILES) if key not in HEAVY}
    for key, path in paths.items():
        path.write_bytes(FILES[key]())
    found = ask([*paths.values()], COMMANDS)
    return {key: found[path] for key, path in paths.items()}


def check(answers: Answers) -> None:
    for command, (code, took, err) in answers.items():
        assert code in (0, 1, 3), (command, code, err)
        assert took < LOOPS, (command, took)


@pytest.mark.sampled
@pytest.mark.parametrize("key", [key for key in FILES if key not in HEAVY])
def test_an_answer_in_bounds(key: str, quick: dict[str, Answers]) -> None:
    assert [*quick[key]] == [*COMMANDS]
    check(quick[key])


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("key", [key for key in FILES if key in HEAVY])
def test_an_answer_in_bounds_to_a_file_that_takes_long(key: str, tmp_path: Path) -> None:
    path = tmp_path / "seed.pth"
    path.write_bytes(FILES[key]())
    check(ask([path], ["validate"])[path])
