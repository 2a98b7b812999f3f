"""Hostile and clean samples for scanners. The hostile ones run `true` in every way in which a loader meets a pickle.

A sample is hostile if the program that opens such a file (torch.load, pickle.load, joblib.load or numpy.load) runs
the call; a packed sample is unpacked first. tests/project/test_scanners.py opens them and checks that the call runs.
"""

from __future__ import annotations

import bz2
import cProfile
import datetime
import gzip
import io
import lzma
import os
import pickle
import struct
import tarfile
import timeit
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

FIXTURES: Final = Path(__file__).resolve().parent.parent / "fixtures" / "files"

_COMMAND: Final = "true"
_CODE: Final = "__import__('os').system('true')"
#: The magic number, two option bytes (blocks of 64 KiB, no checksums), and the checksum of these two bytes.
_LZ4_HEADER: Final = b"\x04\x22\x4d\x18\x60\x40\x82"


class Sample(NamedTuple):
    """A sample file: its kind, under which the table counts it, its name and bytes, and whether it is hostile."""

    kind: str
    name: str
    data: bytes
    hostile: bool


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.made = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.made


def samples() -> Iterator[Sample]:
    """Yield every sample, hostile ones first. All names are different."""
    for hostile, kinds in ((True, _hostile()), (False, _clean())):
        for kind, files in kinds:
            yield from (Sample(kind, name, data, hostile) for name, data in files.items())


# -- hostile ---------------------------------------------------------------------------------------------------------


def _hostile() -> Iterator[tuple[str, dict[str, bytes]]]:
    evil, model, old = _pickled(_evil()), _saved(_training(_evil())), _saved(_training(_evil()), old=True)
    yield "bare pickle, protocols 0 to 5", {f"protocol{n}.pkl": _pickled(_evil(), n) for n in range(6)}
    yield (
        "bare pickle, behind another",
        {"second.pkl": _pickled({"lr": 0.1}) + evil, "behind_none.pkl": b"N." + evil},
    )
    yield (
        "bare pickle, broken behind the call",
        {"bad_opcode.pkl": evil[:-1] + b"\xff", "cut.pkl": _pickled([_evil(), "x" * 300], 2)[:-100]},
    )
    yield (
        "pickle in bytes, for another to load",
        {
            "nested.pkl": _pickled({"x": Call(pickle.loads, evil)}),
            "nested_twice.pkl": _pickled(Call(pickle.loads, _pickled(Call(pickle.loads, evil)))),
            "nested.pth": _fixture("hostile_nested.pth"),
        },
    )
    yield (
        "other functions that run code",
        {
            "exec.pkl": _pickled(Call(exec, _CODE)),
            "eval.pkl": _pickled(Call(eval, _CODE)),
            "timeit.pkl": _pickled(Call(timeit.timeit, _CODE, "pass", timeit.default_timer, 1)),
            "profile.pkl": _pickled(Call(cProfile.run, _CODE, os.devnull)),
            "getattr.pkl": b"cbuiltins\ngetattr\n(cimportlib\nimport_module\n(S'os'\ntRS'system'\ntR(S'true'\ntR.",
            "map.pkl": b"cbuiltins\nlist\n(cbuiltins\nmap\n(cposix\nsystem\n(S'true'\nltRtR.",
        },
    )
    yield from _ways_to_a_call()
    yield "torch.save, zip", {f"zip.{suffix}": model for suffix in ("pth", "pt", "bin", "ckpt")}
    yield (
        "torch.save, zip with a header that lies",
        {
            "other_crc.pth": _with_checksum(model, b"\1\2\3\4"),
            "other_name.pth": model.replace(b"/data.pkl", b"/data.txt", 1),
        },
    )
    yield "torch.save, legacy", {f"legacy.{suffix}": old for suffix in ("pth", "pt", "bin", "ckpt")}
    yield "legacy, call before the object", _legacy_parts()
    yield (
        "two formats in one file",
        {
            "legacy_and_zip.pth": old + _saved(_state()),
            "pickle_and_zip.pkl": evil + _zipped({"weights.txt": b"0.1 0.2"}),
            "pickle_and_model.pth": evil + _saved(_state()),
        },
    )
    yield (
        "tar of torch 0.1",
        {f"torch01.{suffix}": _tarred({"sys_info": _pickled({}), "storages": evil}) for suffix in ("tar", "pth")},
    )
    yield "joblib", {"plain.joblib": evil}
    yield "joblib, each compression", {f"{name}.joblib": pack(evil) for name, pack in _COMPRESSIONS.items()}
    yield "npy and npz of objects", {"objects.npy": _npy([_evil()]), "objects.npz": _npz([_evil()])}
    yield "in a zip", {"pickle.zip": _zipped({"policy.pkl": evil}), "model.zip": _zipped({"policy.pth": model})}
    yield (
        "in a zip in a zip",
        {
            "pickle_twice.zip": _zipped({"inner.zip": _zipped({"policy.pkl": evil})}),
            "model_twice.zip": _zipped({"inner.zip": _zipped({"policy.pth": model})}),
        },
    )
    yield "in a tar", {"pickle.tar": _tarred({"a.pkl": evil}), "model.pth.tar": _tarred({"a.pth": model})}
    yield (
        "in a compressed tar",
        {f"pickle.tar.{mode}": _tarred({"a.pkl": evil}, mode) for mode in ("gz", "bz2", "xz")},
    )
    yield (
        "compressed",
        {"pickle.pkl.gz": gzip.compress(evil), "pickle.pkl.bz2": bz2.compress(evil), "model.pth": gzip.compress(model)},
    )
    wrong = ("png", "txt", "safetensors", "gguf", "onnx", "weights", "zip")
    yield "bare pickle with a wrong suffix", {f"wrong.{suffix}": evil for suffix in wrong} | {"without": evil}
    yield (
        "torch.save with a wrong suffix",
        {"zip.png": model, "zip.h5": model, "zip_without": model, "legacy.png": old, "legacy_without": old},
    )


def _ways_to_a_call() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield pickles that call ``system`` or run code without naming the usual functions for it."""
    system, namespace, text = _named("posix", "system"), _named("argparse", "Namespace"), _text(_COMMAND)
    run = text + b"\x85R"
    yield (
        "methods and aliases that lead to a call",
        {
            "partial.pkl": _stream(_named("functools", "partial") + system + b"\x85R" + run),
            "attrgetter.pkl": _stream(
                _named("operator", "attrgetter")
                + _text("system")
                + b"\x85R"
                + _named("argparse", "_os")
                + b"\x85R"
                + run
            ),
            "alias.pkl": _stream(_named("argparse", "_os.system") + run),
            "append.pkl": _stream(namespace + b")\x81}" + _text("append") + system + b"sb" + text + b"a"),
            "interpreter.pkl": _stream(
                _named("code", "InteractiveInterpreter.runsource")
                + (_named("code", "InteractiveInterpreter") + b")R" + _text(_CODE) + b"\x86R")
            ),
        },
    )
    yield (
        "changes to a module or class",
        {
            "module.pkl": _stream(
                _named("json", "decoder")
                + b"}"
                + _text("scan")
                + system
                + b"sb0"
                + _named("json.decoder", "scan")
                + run
            ),
            "class.pkl": _stream(
                namespace + b"N}" + _text("__setstate__") + system + b"s\x86b0" + namespace + b")\x81" + text + b"b"
            ),
        },
    )
    codes = {7: b"\x82\x07", 700: b"\x83\xbc\x02", 70000: b"\x84\x70\x11\x01\x00"}
    yield (
        "extension codes of copyreg",
        {
            f"extension{code}.pkl": _stream(
                _named("copyreg", "add_extension")
                + (_text("posix") + _text("system") + b"J" + struct.pack("<i", code) + b"\x87R0" + opcode + run)
            )
            for code, opcode in codes.items()
        },
    )
    inner = b"C" + bytes([len(_pickled(_evil()))]) + _pickled(_evil())
    yield (
        "functions of torch and NumPy that run code",
        {
            "graph_module.pkl": _stream(
                _named("torch.fx.graph_module", "_exec_with_source") + _text(_CODE) + b"}\x86R"
            ),
            "unsupported.pkl": _stream(
                _named("torch.jit.unsupported_tensor_ops", "execWrapper") + _text(_CODE) + b"}}\x87R"
            ),
            "decoder.pkl": _stream(
                _named("torch.utils.data.datapipes.utils.decoder", "basichandlers") + _text("pickle") + inner + b"\x86R"
            ),
            "datapipe.pkl": _stream(
                _named("torch.utils.data.datapipes.datapipe", "_IterDataPipeSerializationWrapper")
                + (b")\x81" + inner + b"\x89\x86b")
            ),
            "runstring.pkl": _stream(_named("numpy.testing._private.utils", "runstring") + _text(_CODE) + b"}\x86R"),
            "crackfortran.pkl": _stream(_named("numpy.f2py.crackfortran", "myeval") + _text(_CODE) + b"\x85R"),
        },
    )


def _stream(opcodes: bytes) -> bytes:
    return b"\x80\x04" + opcodes + b"."


def _named(module: str, path: str) -> bytes:
    """Return the opcodes that push a global. Its name may be dotted."""
    return _text(module) + _text(path) + b"\x93"


def _text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def _evil() -> Call:
    return Call(os.system, _COMMAND)


def _training(value: object) -> dict[str, object]:
    return {"epoch": 3, "state_dict": _state(), "extra": value}


def _legacy_parts() -> dict[str, bytes]:
    """Return legacy files whose object is harmless, but where a pickle before or after it makes a call."""
    whole = io.BytesIO(_saved(_state(), old=True))
    parts = []
    for _ in range(3):  # magic number, protocol version, sizes
        start = whole.tell()
        pickle.load(whole)
        parts.append(whole.getvalue()[start : whole.tell()])
    rest = whole.getvalue()[whole.tell() :]
    before = b"cposix\nsystem\n(S'true'\ntR0"
    called = {f"legacy_part{n}.pth": [*parts[:n], before + parts[n], *parts[n + 1 :]] for n in range(3)}
    return {name: b"".join([*some, rest]) for name, some in called.items()}


# -- clean -----------------------------------------------------------------------------------------------------------


def _clean() -> Iterator[tuple[str, dict[str, bytes]]]:
    yield "state dict, zip", {f"good.{suffix}": _saved(_state()) for suffix in ("pth", "pt", "bin", "ckpt")}
    yield "state dict, legacy", {f"good_old.{suffix}": _saved(_state(), old=True) for suffix in ("pth", "pt", "bin")}
    yield "state dict, tar of torch 0.1", _fixtures("torch01.tar")
    yield (
        "training checkpoint",
        {"training.pth": _saved(_training(None))} | _fixtures("ddp4_training.pth", "optimizer.pt", "lightning.ckpt"),
    )
    yield (
        "checkpoint with objects of other classes",
        _fixtures("args_namespace.pth", "numpy_objects.pth", "whole_model.pth", "whole_model_legacy.pth"),
    )
    yield (
        "checkpoint with methods and types in its configuration",
        {
            f"kept_{name}.pth": _saved(_training(value))
            for name, value in (("str", str.lower), ("dict", dict.fromkeys), ("datetime", datetime.datetime.now))
        }
        | {"kept_union.pth": _saved(_training(int | str))},
    )
    yield "bare pickle of tensors", {f"tensors{n}.pkl": _pickled(_state(), n) for n in (2, 4)}
    values = {"lr": 0.1, "steps": [1, 2], "name": "adam", "on": True}
    yield "bare pickle of plain values, protocols 0 to 5", {f"values{n}.pkl": _pickled(values, n) for n in range(6)}
    yield "TorchScript", _fixtures("torchscript.pt", "script_net.pt")
    yield "safetensors", _fixtures("model.safetensors")
    yield "npy and npz of numbers", _fixtures("array.npy", "arrays.npz")
    yield "npy and npz of plain objects", {"words.npy": _npy(["a", {"b": 1}]), "words.npz": _npz(["a", {"b": 1}])}
    yield "joblib of arrays", _fixtures("real/arrays.joblib")
    yield "scikit-learn model", _fixtures("real/logistic.pkl", "real/logistic.joblib", "real/logistic.z")
    yield "checkpoint in a zip, tar or gzip", _fixtures("zipped.pth", "tarred.pth.tar", "gzipped.pth", "real/ppo.zip")
    yield "GGUF, ONNX, HDF5", _fixtures("real/tiny.gguf", "real/net.onnx", "real/net.h5")


def _state() -> dict[str, torch.Tensor]:
    return {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.zeros(2)}


def _fixtures(*paths: str) -> dict[str, bytes]:
    return {f"fixture_{Path(path).name}": _fixture(path) for path in paths}


def _fixture(path: str) -> bytes:
    return (FIXTURES / path).read_bytes()


# -- formats ---------------------------------------------------------------------------------------------------------


def _pickled(value: object, protocol: int = 4) -> bytes:
    return pickle.dumps(value, protocol)


def _saved(value: object, old: bool = False) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=not old)
    return out.getvalue()


def _with_checksum(archive: bytes, checksum: bytes) -> bytes:
    """Overwrite the checksum of data.pkl in the zip directory, which torch does not check."""
    at = archive.rindex(b"archive/data.pkl") - 30
    return archive[:at] + checksum + archive[at + 4 :]


def _zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def _tarred(members: dict[str, bytes], packing: str = "") -> bytes:
    out = io.BytesIO()
    mode: Any = f"w:{packing}"
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _objects(values: list[Any]) -> Any:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _npy(values: list[Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, _objects(values), allow_pickle=True)
    return out.getvalue()


def _npz(values: list[Any]) -> bytes:
    out = io.BytesIO()
    np.savez(out, weights=np.ones(3), extra=_objects(values))
    return out.getvalue()


def _lz4(data: bytes) -> bytes:
    """Return an LZ4 frame with a single uncompressed block, which the format allows."""
    return _LZ4_HEADER + struct.pack("<I", len(data) | 1 << 31) + data + bytes(4)


#: How joblib.dump(compress=(name, 3)) packs the pickle of an object without arrays.
_COMPRESSIONS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "zlib": zlib.compress,
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "xz": lzma.compress,
    "lz4": _lz4,
}
