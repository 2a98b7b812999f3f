"""``scan`` finds what is run in any file, whatever its name and archive, and names what it did not look into."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import say
from conftest import FIXTURES, MANIFEST, corpus_files, needs_corpus
from crafted_files import SYSTEM, TENSOR, by_key, call, dumped, legacy, name, plain
from packed_files import Recorded, object_array, tarred, zipped

import ckptool
from ckptool.reports.scan import scan_file

SHELL = b"cposix\nsystem\n(S'true'\ntR."
EVIL = {
    "zip": plain(SYSTEM),
    "legacy": legacy(SYSTEM),
    "bare": dumped(SYSTEM),
    "protocol 0": SHELL,
    "protocol 4": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    "broken behind the call": dumped(SYSTEM)[:-1] + b"\xff",
    "after a pickle": dumped({"lr": 1}) + dumped(SYSTEM),
    "after a small pickle": b"N." + dumped(SYSTEM),
    "in another": dumped({"x": call(name("pickle", "loads"), dumped(SYSTEM))}),
}


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "zip": zipped,
    "deflated zip": lambda data: zipped(data, method=zipfile.ZIP_DEFLATED),
    "zip behind other bytes": lambda data: b"junk" * 30 + zipped(data),
    "zip in a zip": lambda data: zipped(zipped(data), "inner.bin"),
    "zip behind other bytes in a zip": lambda data: zipped(b"junk" + zipped(data), "inner.bin"),
    "tar": tarred,
    "tar.gz": lambda data: tarred(data, mode="w:gz"),
    "tar in a tar": lambda data: tarred(tarred(data)),
    "tar in a zip": lambda data: zipped(tarred(data)),
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "zlib": zlib.compress,
    "gzip in a tar": lambda data: tarred(gzip.compress(data)),
    "cut gzip": lambda data: gzip.compress(data + os.urandom(4000))[:-100],
    "npy of objects": object_array,
    "npy of objects in a zip": lambda data: zipped(object_array(data), "x.npy"),
    "npy of objects in a tar": lambda data: tarred(object_array(data), "x.npy"),
    "after an array": lambda data: array() + data,
}
SUFFIXES = (".pkl", ".bin", ".joblib", ".dat", ".pt", ".pth.tar", ".ckpt", ".zip", ".png", ".txt", ".md", "", ".gguf")


def array() -> bytes:
    out = io.BytesIO()
    np.save(out, np.arange(5.0))
    return out.getvalue()


def verdict(path: Path) -> str | None:
    return scan_file(str(path))["verdict"]


# -- unsafe --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", by_key(EVIL))
def test_a_hostile_file_is_unsafe_under_every_name(data: bytes, tmp_path: Path) -> None:
    for number, suffix in enumerate(SUFFIXES):
        path = tmp_path / f"file{number}{suffix}"
        path.write_bytes(data)
        report = scan_file(str(path))
        assert report["verdict"] == "unsafe", (suffix, report)
        assert report["reasons"][-1].startswith("posix.system('true')")


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("pack", by_key(PACKED))
@pytest.mark.parametrize("data", by_key(EVIL))
def test_a_hostile_file_is_found_in_whatever_it_is_packed(
    data: bytes, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "download"
    path.write_bytes(pack(data))
    # What begins behind other bytes is not searched: it is unknown.
    allowed = ("unsafe", "unknown") if b"PK\3\4" in pack(data)[1:] or data[:2] == b"PK" else ("unsafe",)
    assert verdict(path) in allowed


def test_what_an_unpickler_runs_is_unsafe_or_unknown(tmp_path: Path) -> None:
    """Where the decoder gives up before it comes to the call, it says so."""
    rest = dumped(SYSTEM)[2:]
    cases = {
        "BUILD without a state": b"}Nb0" + rest,
        "too many objects": b"\x80\x02" + b"N0" * 400_000 + b"N" * 700_000 + rest,
        "a number of many digits": b"I" + b"1" * 5000 + b"\n0" + rest,
        "long text before it": b"\x80\x02X" + (65 << 20).to_bytes(4, "little") + bytes(65 << 20) + b"0" + rest,
        "bytes between pickles": dumped({"a": 1}) + b"\1\2\3" + dumped(SYSTEM),
        "blocks of dbm.dumb": (dumped({"a": 1}).ljust(512, b" ")) + dumped(SYSTEM),
    }
    for what, data in cases.items():
        path = tmp_path / "file.pkl"
        path.write_bytes(data)
        assert verdict(path) in ("unsafe", "unknown"), what
        path.write_bytes(zipped(data))
        assert verdict(path) in ("unsafe", "unknown"), what


# -- unknown -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_member_that_is_not_inflated_is_unknown(method: int, tmp_path: Path) -> None:
    path = tmp_path / "file.zip"
    path.write_bytes(zipped(b"words", "a.txt", method))
    assert verdict(path) == "unknown"


UNKNOWN = {
    "noise": bytes(range(128, 256)) * 3,
    "zstd": b"\x28\xb5\x2f\xfd" + bytes(50),
    "noise in a zip": zipped(bytes(range(128, 256))),
    "noise in a tar": tarred(bytes(range(128, 256))),
    "sqlite": b"SQLite format 3\0" + bytes(200),
    "a class outside the list": dumped({"x": call(name("research.lib", "Thing"))}),
    "a change to a class of the list": dumped({"x": name("collections", "OrderedDict")})[:-1] + b"}b.",
    "thirty archives": __import__("functools").reduce(lambda data, _: zipped(data, "a.zip"), range(30), SHELL),
}


@pytest.mark.parametrize("data", by_key(UNKNOWN))
def test_what_is_not_followed_is_unknown_and_the_reason_is_given(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(data)
    report = scan_file(str(path))
    assert report["verdict"] == "unknown"
    assert report["reasons"]


# -- weights-only --------------------------------------------------------------------------------------------------

GOOD = {
    "plain values": pickle.dumps({"a": [1, 2.0, "x", None]}),
    "a zip of good files": zipped(plain(TENSOR), "model.pth"),
    "a zip of a legacy file": zipped(legacy(), "model.pth"),
    "a tar of good files": tarred(plain(TENSOR)),
    "an array": array(),
    "arrays one after the other": array() * 3,
    "an array in a zip": zipped(array(), "a.npy"),
    "gzipped": gzip.compress(plain(TENSOR)),
}


@pytest.mark.parametrize("data", by_key(GOOD))
def test_nothing_can_run_in_these(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(data)
    assert scan_file(str(path)) | {"kind": "", "bytes": 0} == {
        **{"path": str(path), "bytes": 0, "kind": "", "verdict": "weights-only", "reasons": []},
        **{"passed_over": "", "error": None, "next": ""},
    }


#: But for one in which readers see different things, and one with what torch takes no more since 2.15.
CLEAN = [item for item in MANIFEST if item.loads and item.path.name not in ("zip_two_pickles.pth", "nested.pt")]


@pytest.mark.parametrize("item", CLEAN, ids=lambda item: item.path.name)
def test_what_torch_loads_with_weights_only_is_not_unknown(item: Any) -> None:
    try:
        torch.load(item.path, weights_only=True, map_location="cpu")
    except Exception:
        assert not item.path.name.startswith("hostile") or verdict(item.path) == "unsafe"
        return
    assert verdict(item.path) == "weights-only"


@needs_corpus
def test_no_real_checkpoint_is_unsafe_and_none_that_loads_is_unknown() -> None:
    for path in corpus_files():
        word = verdict(path)
        assert word != "unsafe", path
        try:
            torch.load(path, weights_only=True, map_location="cpu")
        except Exception:
            continue
        assert word == "weights-only", path


# -- folders, words and codes --------------------------------------------------------------------------------------


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    folder = tmp_path / "dl"
    folder.mkdir()
    torch.save({"w": torch.ones(3)}, folder / "just.pt")
    evil = pickle.dumps(Recorded())
    (folder / "evil.pkl").write_bytes(evil)
    (folder / "model.bin").write_bytes(evil)
    (folder / "agent.zip").write_bytes(zipped(evil))
    (folder / "m.tar.gz").write_bytes(tarred(evil, mode="w:gz"))
    (folder / "notes.md").write_text("hello\n")
    for letter in "ab":
        (folder / f"{letter}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    (folder / ".git").mkdir()
    (folder / ".git" / "hook").write_text("#!/bin/sh\n")
    return folder


def test_every_file_of_a_folder_is_looked_at(downloads: Path) -> None:
    report = ckptool.scan(downloads)
    verdicts = {Path(item["path"]).name: item["verdict"] for item in report["files"] if item["verdict"]}
    evil = dict.fromkeys(("evil.pkl", "model.bin", "agent.zip", "m.tar.gz"), "unsafe")
    assert verdicts == {"just.pt": "weights-only", ".git": "unknown"} | evil
    assert report["passed_over"] == {"image": 2, "text file": 1}
    assert report["verdict"] == "unsafe"
    said = say("scan", downloads)
    assert said.code == 1
    assert "6 files: 4 unsafe, 1 unknown, 1 weights-only" in said.out
    assert "skipped: 3 (2 images, 1 text file): a.png, b.png and notes.md" in said.out


# -- validate of a folder --------------------------------------------------------------------------------------------


def test_what_validate_passes_over_is_named_in_every_format(downloads: Path) -> None:
    for evil in ("evil.pkl", "model.bin", "agent.zip", "m.tar.gz"):
        (downloads / evil).unlink()
    (downloads / "good.zip").write_bytes(zipped(plain(TENSOR), "model.pth"))
    (downloads / "noise").write_bytes(bytes(range(128, 256)))
    assert say("validate", downloads).code == 0
    over = {"a.png", "b.png", "good.zip", "noise", "notes.md"}
    for style in ("json", "jsonl"):
        out = say("validate", downloads, "--format", style).out
        reports = json.loads(out) if style == "json" else [json.loads(line) for line in out.splitlines()]
        found = {Path(item["path"]).name: item["status"] for item in reports}
        assert found == dict.fromkeys(over, "skipped") | {"just.pt": "valid", "good.zip!model.pth": "valid"}
    for style in ("junit", "sarif", "github", "table"):
        out = say("validate", downloads, "--format", style).out
        assert all(other in out for other in over), style
    strict = say("validate", downloads, "--strict")
    assert strict.code == 1
    assert f"{downloads}/noise: INVALID" in strict.out


def test_files_that_no_one_joins_are_looked_into(tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(FIXTURES / "real" / "pipeline", folder)
    for path in sorted(folder.glob("*/layer_*")):  # of tensor-parallel ranks
        path.rename(path.with_name(path.name.replace("-model", "-model_00-model")))
    assert say("scan", folder).code == 0
    (folder / "global_step0" / "layer_00-model_00-model_states.pt").write_bytes(pickle.dumps(Recorded()))
    said = say("scan", folder)
    assert said.code == 1 and "layer_00-model_00-model_states.pt: unsafe" in said.out
