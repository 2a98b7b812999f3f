"""An error of a reader hides nothing: what else is in the file or the folder is still looked at."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from conftest import FIXTURES, ROOT, WHOLE, sample
from crafted_files import (
    SYSTEM,
    TENSOR,
    Code,
    Entry,
    archive,
    by_key,
    call,
    dumped,
    entries,
    legacy,
    name,
    plain,
    put,
    with_record,
)
from packed_files import Recorded, object_array, tarred, zipped

import ckptool
from ckptool.formats import FOLDERS, folder_format
from ckptool.formats.foreign.identification import PLACEHOLDERS
from ckptool.reports.scan import scan_file
from ckptool.safety.calls import STANDARD_LIBRARY

EVIL = dumped(SYSTEM)


def scanned(path: Path, data: bytes, torch: str = "2.15") -> tuple[str | None, bool]:
    """Return the verdict on a file, and whether the call in it is named."""
    path.write_bytes(data)
    report = scan_file(str(path), torch)
    return report["verdict"], any("system" in reason for reason in report["reasons"])


# -- within one pickle -----------------------------------------------------------------------------------------------

_SET = name("torch", "FloatTensor")
#: Objects that torch would make, and that ckptool does not follow: each leaves one object on the stack.
UNFOLLOWED = {
    "SETITEM on a tensor": Code(TENSOR.raw + b"K\0K\5s"),
    "SETITEMS on a tensor": Code(TENSOR.raw + b"(K\0K\5u"),
    "APPEND to a tensor": Code(TENSOR.raw + b"K\5a"),
    "BUILD on a tensor": Code(TENSOR.raw + b"}b"),
    "a mapping made of a number": call(name("collections", "OrderedDict"), 5),
    "a mapping filled like a list": Code(b"ccollections\nOrderedDict\n)RK\5a"),
    "a mapping built twice": Code(b"ccollections\nOrderedDict\n)R}b}b"),
    "a tensor made by its class": call(_SET, 4),
    "a parameter without a tensor": call(name("torch._utils", "_rebuild_parameter"), None, True, Code(b"]")),
    "a list of a tensor": call(name("builtins", "list"), TENSOR),
    "a storage that is changed": Code(put(("storage", name("torch", "FloatStorage"), "0", "cpu", 4)) + b"Q}b"),
    "bytes from outside": Code(b"\x97"),
    "a persistent id of another kind": Code(put(("storage", 1)) + b"Q"),
}


@pytest.mark.parametrize("construct", by_key(UNFOLLOWED))
@pytest.mark.parametrize("torch_version", ["2.9", "2.15"])
def test_a_call_beside_what_is_not_followed_is_named(construct: Code, torch_version: str, tmp_path: Path) -> None:
    for number, value in enumerate(([construct, SYSTEM], [SYSTEM, construct], Code(construct.raw + b"0" + SYSTEM.raw))):
        path = tmp_path / f"{number}.pth"
        for data in (plain(value), legacy(value)):
            assert scanned(path, data, torch_version) == ("unsafe", True), number
            said = say("validate", path)
            assert said.code == 1 and "posix.system" in said.out


@pytest.mark.parametrize("construct", by_key(UNFOLLOWED))
@pytest.mark.parametrize("pack", [plain, legacy])
def test_what_is_not_followed_is_unknown(construct: Code, pack: Callable[[object], bytes], tmp_path: Path) -> None:
    assert scanned(tmp_path / "a.pth", pack([construct]))[0] == "unknown"
    assert say("scan", tmp_path / "a.pth").code == 1


def test_a_change_of_a_tensor_is_judged_by_the_torch_that_loads_it(tmp_path: Path) -> None:
    """weights_only of torch before 2.10 carries out SETITEM on a tensor: CVE-2026-24747."""
    path = tmp_path / "a.pth"
    path.write_bytes(plain({"w": UNFOLLOWED["SETITEM on a tensor"]}))
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    for version, found in (("2.9", True), ("2.6", True), ("2.10", False), ("2.15", False)):
        report = scan_file(str(path), version)
        assert report["verdict"] == "unknown"
        assert any("CVE-2026-24747" in reason for reason in report["reasons"]) is found
        assert any(reason.startswith("SETITEMS on") for reason in report["reasons"]) is not found


#: Instructions that no unpickler, or not ours, goes on after.
STOPPERS = {
    "an opcode of no protocol": b"\xff",
    "a protocol of the future": b"\x80\x09",
    "a memo that is not there": b"h\xff",
    "an empty stack": b"0000000000",
    "BUILD without an object": b"Nb",
    "a number that is none": b"Ix\n",
    "a string without quotes": b"Sx\n",
    "text that is not UTF-8": b"X\x02\0\0\0\xff\xfe",
    "a length beyond the end": b"B\xff\xff\xff\x7f",
    "a negative length": b"T\xff\xff\xff\xff",
    "SETITEM on a number": b"K\1K\2K\3s",
    "a call of a number": b"K\1)R",
    "an extension of code 0": b"\x82\0",
    "a key that is a list": b"}]K\1s",
    "a name that is none": b"K\1K\2\x93",
    "a buffer that is none": b"N\x98",
}


@pytest.mark.parametrize("stopper", by_key(STOPPERS))
def test_an_error_in_a_pickle_hides_no_call(stopper: bytes, tmp_path: Path) -> None:
    before = b"\x80\x02" + SYSTEM.raw + stopper + b"."
    after = b"\x80\x02" + stopper + SYSTEM.raw + b"."
    for wrap in (lambda raw: raw, lambda raw: plain(pickled=raw), lambda raw: legacy(object=raw), tarred, zipped):
        assert scanned(tmp_path / "a.pth", wrap(before)) == ("unsafe", True)
        assert scanned(tmp_path / "a.pth", wrap(after))[0] in ("unsafe", "unknown")
        assert scanned(tmp_path / "a.pth", wrap(after + EVIL))[0] in ("unsafe", "unknown")


# -- within one file -------------------------------------------------------------------------------------------------


#: Files of every kind of container, with the pickle stored in them as it is.
CONTAINERS: dict[str, bytes] = {
    "torch zip": archive([*entries({"w": TENSOR}).values(), Entry("seed/extra.pkl", EVIL)]),
    "torch zip, its own pickle": plain(SYSTEM),
    "torch legacy": legacy(SYSTEM),
    "behind a legacy file": legacy({"w": TENSOR}) + EVIL,
    "behind a torch zip": plain({"w": TENSOR}) + EVIL,
    "behind a torch tar": (FIXTURES / "torch01.tar").read_bytes() + EVIL,
    "tar": tarred(EVIL),
    "zip": zipped(EVIL),
    "zip in a tar": tarred(zipped(EVIL)),
    "tar in a zip": zipped(tarred(EVIL)),
    "array of objects": object_array(EVIL),
    "bare": dumped({"a": 1}) + EVIL,
    "two pickles": EVIL + dumped({"a": 1}),
    "behind safetensors": b"\x08\0\0\0\0\0\0\0{}      " + EVIL,
}


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Cut, overwrite, remove or insert bytes anywhere but in the pickle with the call."""
    at = data.index(EVIL)
    before, after = data[:at], data[at + len(EVIL) :]
    for _ in range(chance.choice((1, 1, 3))):
        part = before if chance.random() < len(before) / max(len(before) + len(after), 1) else after
        begin, size = chance.randrange(len(part) + 1), chance.choice((1, 2, 4, 30, 600))
        changed = {
            "cut": part[:begin] if part is after else part[begin:],
            "overwritten": part[:begin] + chance.randbytes(len(part[begin : begin + size])) + part[begin + size :],
            "removed": part[:begin] + part[begin + size :],
            "inserted": part[:begin] + chance.randbytes(size) + part[begin:],
        }[chance.choice(("cut", "overwritten", "overwritten", "removed", "inserted"))]
        before, after = (changed, after) if part is before else (before, changed)
    return before + EVIL + after


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_call_in_a_damaged_file_is_named_or_the_file_is_unknown(container: str, tmp_path: Path) -> None:
    data = CONTAINERS[container]
    assert scanned(tmp_path / "a.pth", data)[0] in (("unsafe", "unknown") if "behind" in container else ("unsafe",))
    chance = random.Random(container)
    for number in range(150):
        verdict, _ = scanned(tmp_path / "a.pth", damaged(data, chance))
        # torch.load reads no file that begins with zeros: it counts as unreadable.
        assert verdict in ("unsafe", "unknown") or (verdict is None and container == "behind a torch tar"), number


_SHORT: dict[str, bytes] = {
    "git-lfs-pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "html": b"<!DOCTYPE html><html><title>Not found</title></html>\n",
    "link-text": b"../../blobs/0123456789",
    "empty": b"",
    "zeros": bytes(5000),
}


def test_every_kind_of_placeholder_is_tried() -> None:
    assert _SHORT.keys() == PLACEHOLDERS


@pytest.mark.parametrize("kind", _SHORT)
@pytest.mark.parametrize("suffix", [".pth", ".bin", ".txt", ""])
def test_what_begins_like_a_placeholder_is_not_weights_only(kind: str, suffix: str, tmp_path: Path) -> None:
    for filler in (b"", b" " * 5000):
        assert scanned(tmp_path / f"a{suffix}", _SHORT[kind] + filler + EVIL)[0] in ("unsafe", "unknown", None)
        assert scanned(tmp_path / "a.zip", zipped(_SHORT[kind] + filler + EVIL))[0] in ("unsafe", "unknown")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_member_that_is_cut_is_unknown(method: int, tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as whole:
        whole.writestr("model.pkl", EVIL[:-1] + b"0" + put(random.Random(1).randbytes(5000)) + b".")
    data = bytearray(out.getvalue())
    data[2000:3000] = bytes(1000)
    assert scanned(tmp_path / "a.zip", bytes(data))[0] in ("unsafe", "unknown")
    assert scanned(tmp_path / "b.zip", bytes(data[:2500]))[0] == "unknown"


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc here")
def test_gzip_in_gzip_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(gzip.compress(bytes(256 << 20))))
    assert path.stat().st_size < 1000
    code = "import sys, ckptool; print(ckptool.scan(sys.argv[1])['verdict'])\n"
    code += "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    verdict, peak = done.stdout.split()
    assert verdict == "unknown"
    assert int(peak) << 10 < 256 << 20


# -- folders ---------------------------------------------------------------------------------------------------------


def folders() -> Iterator[Path]:
    """Yield two fixtures of every folder format, if there are so many."""
    seen: dict[str, int] = {}
    for base, inner, _ in os.walk(FIXTURES):
        known = folder_format(base)
        if known is not None:
            inner.clear()
            seen[known.name] = seen.get(known.name, 0) + 1
            if seen[known.name] <= 2:
                yield Path(base)


EVERY = list(folders())


def test_there_is_a_folder_of_nearly_every_format() -> None:
    found = {known.name for path in EVERY if (known := folder_format(str(path)))}
    assert found >= {known.name for known in FOLDERS} - {"dcp-safetensors", "torch-folder"}


#: Files with a call: a pickle, and what is not followed.
HIDDEN = (
    pickle.dumps(Recorded()),
    plain([UNFOLLOWED["SETITEM on a tensor"], SYSTEM]),
    legacy([UNFOLLOWED["APPEND to a tensor"], SYSTEM]),
)


def is_named(folder: Path, name: str = "") -> bool:
    """Return whether the scan of a folder names the call in a file of it, and the file if it has this name."""
    report = ckptool.scan(folder)
    reasons = [f"{item['path']}: {text}" for item in report["files"] for text in item["reasons"]]
    return report["verdict"] == "unsafe" and any("system" in text and name in text for text in reasons)


@pytest.mark.sampled
@pytest.mark.parametrize("folder", EVERY, ids=lambda path: str(path.relative_to(FIXTURES)))
def test_a_file_anywhere_in_a_folder_is_looked_at(folder: Path, tmp_path: Path) -> None:
    """Beside the checkpoint, in its folders, and around it: a file ``latest`` may lead into one of several folders.

    Each place has two kinds of files or one, other ones than the place before; in ``make torture`` it has all.
    """
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    places = [run, *(path for path in run.rglob("*") if path.is_dir())]
    for turn, place in enumerate(places, EVERY.index(folder)):
        for number, data in sample([*enumerate(HIDDEN)], 2, first=turn):
            evil = place / f"rng_state.{number}.pth"
            evil.write_bytes(data)
            assert is_named(run, evil.name), (place, number)
            assert say("validate", run, "--safe").code == 1
            evil.unlink()


@pytest.mark.parametrize("folder", EVERY, ids=lambda path: str(path.relative_to(FIXTURES)))
def test_every_part_of_a_folder_is_looked_at(folder: Path, tmp_path: Path) -> None:
    """A part that no reader opens, or that holds what is not followed."""
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    parts = sorted(path for path in run.rglob("*") if path.is_file())
    for part in random.Random(1).sample(parts, min(3, len(parts))):
        kept = part.read_bytes()
        for number, data in enumerate(HIDDEN):
            part.write_bytes(data)
            assert is_named(run), (part, number)
        part.write_bytes(kept)


BREAKS: dict[str, Callable[[Path], Any]] = {
    "removed": Path.unlink,
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "another pickle": lambda path: path.write_bytes(dumped({"a": 1})),
    "text": lambda path: path.write_text("hello\n"),
    "JSON": lambda path: path.write_text('{"weight_map": {"w": "/x", "v": "../y"}}'),
}


@pytest.mark.parametrize("change", BREAKS)
@pytest.mark.parametrize("folder", EVERY, ids=lambda path: str(path.relative_to(FIXTURES)))
def test_a_folder_that_does_not_open_hides_no_file(folder: Path, change: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    shutil.copytree(folder, run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    evil = run / "more_args.bin"
    evil.write_bytes(pickle.dumps(Recorded()))
    count = 3 if WHOLE else 1
    for number in random.Random(f"{change} {folder.name}").sample(range(len(files)), min(count, len(files))):
        kept = files[number].read_bytes()
        BREAKS[change](files[number])
        for path in (run, run.parent):
            assert is_named(path), files[number]
        files[number].write_bytes(kept)


# -- the Python that runs ckptool ------------------------------------------------------------------------------------


def test_the_modules_of_this_python_are_known() -> None:
    assert sys.stdlib_module_names <= STANDARD_LIBRARY


# -- validate --safe -------------------------------------------------------------------------------------------------

SAFE: dict[str, tuple[bytes, int]] = {
    "weights": (plain({"w": TENSOR}), 0),
    "a call": (plain(SYSTEM), 1),
    "a class": (plain(call(name("research.lib", "Thing"))), 1),
    "not followed": (plain([UNFOLLOWED["SETITEM on a tensor"]]), 1),
    "cut": (plain({"w": TENSOR})[:-30], 1),
    "an encrypted member": (with_record(Entry("seed/x.pkl", b"N.", listed={"flags": 1})), 1),
}


@pytest.mark.parametrize(("data", "code"), SAFE.values(), ids=SAFE)
def test_safe_fails_unless_the_verdict_is_weights_only(data: bytes, code: int, tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    path.write_bytes(data)
    assert say("validate", path, "--safe").code == code
    assert (scan_file(str(path))["verdict"] == "weights-only") is (code == 0)
    check = {item["name"]: item["status"] for item in ckptool.validate(path, {"safe": True})["checks"]}["verdict"]
    assert check == ("fail" if code else "pass")
