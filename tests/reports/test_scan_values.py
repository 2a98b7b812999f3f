"""``scan`` follows a pickle in any value to its end, whatever precedes it, encodes it or surrounds it."""

from __future__ import annotations

import base64
import bz2
import codecs
import gzip
import io
import json
import lzma
import pickle
import random
import shutil
import tarfile
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import sample
from packed_files import Recorded, tarred, zipped
from safetensors.torch import save

import ckptool
from ckptool.reports.scan import scan_file

#: Opcodes that leave the stack unchanged, as pairs or alone: every way of making an object, and of storing it.
TRIVIAL = (
    *(b"N0", b"(1", b"]0", b"}0", b")0", b"\x8f0", b"\x880", b"\x890", b"(l0", b"(d0", b"(t0", b"(\x910", b"N200"),
    b"N.",
    *(b"K\x010", b"M\x01\x020", b"J\x01\x02\x03\x040", b"G" + bytes(8) + b"0", b"\x8a\x01\x010", b"\x8b\1\0\0\0\x010"),
    *(b"I1\n0", b"L1L\n0", b"F1\n0", b"S'a'\n0", b"Va\n0", b"U\x01a0", b"T\1\0\0\0a0", b"X\1\0\0\0a0", b"\x8c\x01a0"),
    *(b"C\x01a0", b"B\1\0\0\0a0", *(code + (1).to_bytes(8, "little") + b"a0" for code in (b"\x8d", b"\x8e", b"\x96"))),
    *(b"\x80\x02", b"N\x940", b"Np1\n0", b"Nq\x010", b"Nr\1\0\0\0000", b"N\x850", b"NN\x860", b"NNN\x870", b"N]\x860"),
)
ENDINGS = (b"cposix\nsystem\n(S'true'\ntR.", pickle.dumps(Recorded(), 2), pickle.dumps(Recorded(), 4))


def _npy(array: Any) -> bytes:
    np.save(out := io.BytesIO(), array)
    return out.getvalue()


def _zip(data: bytes) -> bytes:
    return zipped(data, "x.bin", zipfile.ZIP_DEFLATED)


ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "hex": lambda data: data.hex().encode(),
    "spaced hex": lambda data: data.hex(" ").upper().encode(),
    "hex with colons": lambda data: data.hex(":").encode(),
    "hex as numbers": lambda data: ",   ".join(f"0x{byte:02x}" for byte in data).encode(),
    "escapes": lambda data: repr(data).encode(),
    "JSON": lambda data: json.dumps({"x": data.decode("latin-1")}).encode(),
    "base64 in JSON": lambda data: json.dumps([base64.encodebytes(data).decode()]).encode(),
    "base64 in words": lambda data: base64.encodebytes(data).replace(b"\n", b"  "),
    "an array": lambda data: _npy(np.frombuffer(data, "u1")),
    "base64": base64.b64encode,
    "urlsafe base64": lambda data: base64.urlsafe_b64encode(data).rstrip(b"="),
    "base64 in lines": base64.encodebytes,
    "a data URI": lambda data: b"data:application/x;base64," + base64.b64encode(data),
    "a headed block": lambda data: b"-----BEGIN MODEL-----\n" + base64.encodebytes(data),
    "zlib": zlib.compress,
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "zip": _zip,
    "pickle": lambda data: pickle.dumps({"x": data}),
}


def _torch(value: object, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save({"w": torch.ones(2), "x": value, "y._extra_state": value}, out, **options)
    return out.getvalue()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()


PLACES: dict[str, Callable[[bytes], bytes]] = {
    "a tensor": lambda data: _torch(_tensor(data)),
    "a tensor in a legacy file": lambda data: _torch(_tensor(data), _use_new_zipfile_serialization=False),
    "a tensor in safetensors": lambda data: save({"x": _tensor(data)}),
    "metadata of safetensors": lambda data: save({"w": torch.ones(2)}, {"x": data.decode("latin-1")}),
    "a key of metadata": lambda data: save({"w": torch.ones(2)}, {data.decode("latin-1"): "x"}),
    "floats": lambda data: save({"x._extra_state": _tensor(data + bytes(-len(data) % 4)).view(torch.float32)}),
    "bytes": _torch,
    "a tar as bytes": lambda data: _torch(tarred(data, "a")),
    "a tar as a tensor": lambda data: _torch(_tensor(tarred(data, "a"))),
    "bytes of protocol 4": lambda data: _torch(data, pickle_protocol=4),
    "a bytearray": lambda data: _torch(bytearray(data)),
    "a string": lambda data: _torch(data.decode("latin-1")),
    "a string in a bare pickle": lambda data: pickle.dumps([data.decode("latin-1")]),
    "bytes in a bare pickle": lambda data: pickle.dumps({"x": data}),
}
CONTAINERS: dict[str, Callable[[bytes], bytes]] = {
    "a file": lambda data: data,
    "a zip": _zip,
    "a tar.gz": lambda data: tarred(data, mode="w:gz"),
    "a tar in a zip": lambda data: _zip(tarred(data)),
}


def _judged(path: Path, data: bytes) -> str | None:
    path.write_bytes(data)
    return scan_file(str(path))["verdict"]


@pytest.mark.sampled
@pytest.mark.parametrize("place", PLACES)
def test_no_value_that_holds_a_call_is_weights_only(place: str, tmp_path: Path) -> None:
    chance = random.Random(place)
    for _ in sample(range(150), 4):
        steps = chance.sample(TRIVIAL, chance.choice((0, 1, 2, 4)))
        data = b"".join(step * chance.choice((1, 99, 512, 3000)) for step in steps) + chance.choice(ENDINGS)
        names = [chance.choice(list(ENCODINGS)) for _ in range(chance.choice((0, 1, 2, 3)))]
        for name in names:
            data = ENCODINGS[name](data)
        container = chance.choice(list(CONTAINERS))
        word = _judged(tmp_path / "file", CONTAINERS[container](PLACES[place](data)))
        assert word in ("unsafe", "unknown"), (steps, names, container)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_encoded_data_is_weights_only(encoding: str, tmp_path: Path) -> None:
    chance = random.Random(1)
    for data in (chance.randbytes(3000), b"the quick brown fox " * 99, bytes(500)):
        if encoding != "pickle":
            assert _judged(tmp_path / "file", _torch(ENCODINGS[encoding](data))) == "weights-only"
    words = {"num_batches_tracked": "running_mean_of_something", "hash": "0x" + "ab12" * 16}
    assert _judged(tmp_path / "file", _torch(words)) == "weights-only"


class Made(tuple[Any, ...]):
    """What a call returns: the function and its arguments."""

    def __reduce__(self) -> tuple[Any, ...]:
        return self[0], tuple(self[1:])


CODE = "__import__('posix').system('true')"
MADE: dict[str, tuple[Any, str]] = {
    "bytes of another codec": (Made((codecs.encode, ENDINGS[2].decode("cp437"), "cp437")), "unknown"),
    "bytes of numbers": (Made((bytearray, list(ENDINGS[1]))), "unknown"),
    "bytes of keys": (Made((bytearray, OrderedDict.fromkeys(ENDINGS[1]))), "unknown"),
    "a mapping of pairs": (Made((OrderedDict, [["_target_", "a.b.c"]])), "program"),
    "code that is also bytes": ({"cfg": CODE, "b": Made((codecs.encode, CODE, "latin1"))}, "unknown"),
    "plain bytes": ([b"a\xff", bytearray(b"b"), bytearray(), OrderedDict(a=1)], "weights-only"),
}


@pytest.mark.parametrize("made", MADE)
def test_what_calls_make_is_judged(made: str, tmp_path: Path) -> None:
    value, word = MADE[made]
    assert _judged(tmp_path / "file", _torch(value)) == word
    torch.load(tmp_path / "file", weights_only=True)


# -- files that count by their content, or are not followed ----------------------------------------------------------

_HDF5 = b"\x89HDF\r\n\x1a\n" + bytes(99)
_PNG = b"\x89PNG\r\n\x1a\n"


def _arrow(metadata: bytes) -> bytes:
    """The ends of an Arrow file: a schema message, and a footer with the schema."""
    return b"ARROW1\0\0\xff\xff\xff\xff" + bytes(40) + metadata + len(metadata).to_bytes(4, "little") + b"ARROW1"


def _parquet(footer: bytes) -> bytes:
    return b"PAR1" + bytes(50) + footer + len(footer).to_bytes(4, "little") + b"PAR1"


OPAQUE: dict[str, bytes] = {
    **{f"{size} bytes before HDF5": _PNG.ljust(size, b"\0") + _HDF5 for size in (512, 1024, 8192, 1 << 16)},
    "text before HDF5": b"hello\n".ljust(512) + _HDF5,
    "an extension type of Arrow": _arrow(b"ARROW:extension:name"),
    **{
        f"an extension type in Parquet, {shift}": _parquet(base64.b64encode(bytes(shift) + b"ARROW:extension:name"))
        for shift in range(3)
    },
    "7z": b"7z\xbc\xaf\x27\x1c" + bytes(50),
    "rar": b"Rar!\x1a\7\0" + bytes(50),
    "ar": b"!<arch>\na.txt/  0  0  0  644  5  `\nhello\n",
    "cpio": b"070707" + b"0" * 70 + b"abc",
    "cabinet": b"MSCF" + bytes(50),
    "lzip": b"LZIP\1" + bytes(50),
}


@pytest.mark.parametrize("what", OPAQUE)
def test_what_is_not_followed_is_unknown_under_every_name(what: str, tmp_path: Path) -> None:
    for name in ("a.png", "a.json", "a.parquet", "a", "a.bin"):
        assert _judged(tmp_path / name, OPAQUE[what]) == "unknown", name
        assert _judged(tmp_path / "whole", zipped(OPAQUE[what], name)) == "unknown", name
        assert _judged(tmp_path / "whole", tarred(OPAQUE[what], name)) == "unknown", name


def test_plain_tables_and_pictures_are_skipped(tmp_path: Path) -> None:
    for data in (_PNG + bytes(5000), _arrow(b"pandas"), _parquet(b"ARROW:schema " + base64.b64encode(bytes(99)))):
        (tmp_path / "a").write_bytes(data)
        assert scan_file(str(tmp_path / "a"))["passed_over"] in ("image", "table")


def test_a_link_in_a_tar_is_unknown(tmp_path: Path) -> None:
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            link = tarfile.TarInfo("weights")
            link.type, link.linkname = kind, "/etc/hostname"
            archive.addfile(link)
        report = scan_file(str(tmp_path / "a.tar"))
        assert (report["verdict"], report["reasons"]) == ("unknown", ["weights: a link, not followed"])


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("kind", ["link", ".git"])
def test_a_folder_that_is_not_entered_is_unknown(kind: str, checkpoint: bool, tmp_path: Path) -> None:
    """Alone, in a folder of files, and in a folder that is one checkpoint."""
    folder = tmp_path / "model"
    for inner in (folder, folder / "deep" / "er"):
        shutil.rmtree(folder, ignore_errors=True)
        inner.mkdir(parents=True)
        (folder / ("model.safetensors" if checkpoint else "other.safetensors")).write_bytes(save({"w": torch.ones(2)}))
        assert ckptool.scan(folder)["verdict"] == "weights-only"
        if kind == ".git":
            (inner / ".git" / "hooks").mkdir(parents=True)
        else:
            (inner / "link").symlink_to(tmp_path)
        report = ckptool.scan(folder)
        assert report["verdict"] == "unknown"
        assert any("not followed" in reason for item in report["files"] for reason in item["reasons"])
