"""Every global of every pickle is named, however it is spelled and wherever the pickle hides."""

from __future__ import annotations

import bz2
import collections
import datetime
import functools
import gc
import gzip
import io
import json
import lzma
import os
import pickle
import re
import struct
import typing
import zipfile
import zlib
import zoneinfo
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from command_line import say
from conftest import CORPUS, MANIFEST, Fixture, by_name, corpus_files, needs_corpus
from crafted_files import (
    ROOT,
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
    named,
    notes,
    plain,
    put,
    report_of,
    with_record,
)
from packed_files import tarred, zipped

from ckptool.pickles.nodes import Graph
from ckptool.reports.scan import scan_file
from ckptool.reports.validate import validation_report
from ckptool.safety.verdict import Verdict, verdict_of

CALLED, NAMED, ALLOWED = "called when loaded", "not on torch's list", "allowed"
EVIL = dumped(SYSTEM)
#: The same in protocol 0, which begins like text.
EVIL0 = b"cposix\nsystem\n(S'true'\ntR."


def text(value: str) -> bytes:
    """SHORT_BINUNICODE."""
    return b"\x8c" + bytes([len(value)]) + value.encode()


class Spelling(NamedTuple):
    """A pickle, and the global that it names, with its word."""

    raw: bytes
    mapped: str = "posix.system"
    word: str = CALLED


# -- how a global may be spelled --------------------------------------------------------------------------------

SYS = b"cposix\nsystem\n"
SPELLINGS = {
    "GLOBAL alone": Spelling(b"\x80\x02" + SYS + b".", word=NAMED),
    "GLOBAL, popped": Spelling(b"\x80\x02" + SYS + b"0N.", word=NAMED),
    "GLOBAL, dropped with its MARK": Spelling(b"\x80\x02(" + SYS + b"1N.", word=NAMED),
    "REDUCE": Spelling(EVIL),
    "REDUCE, the result popped": Spelling(EVIL[:-1] + b"0N."),
    "REDUCE, protocol 0": Spelling(EVIL0),
    "INST": Spelling(b"(S'true'\niposix\nsystem\n."),
    "OBJ": Spelling(b"\x80\x02(" + SYS + b"S'true'\no."),
    "NEWOBJ": Spelling(b"\x80\x02" + SYS + put(("true",)) + b"\x81."),
    "NEWOBJ_EX": Spelling(b"\x80\x04" + SYS + put(("true",)) + b"}\x92."),
    "BUILD": Spelling(b"\x80\x02" + SYS + b"}(" + put("a") + put(1) + b"ub."),
    "BUILD of a class that is on the list": Spelling(
        b"\x80\x02ccollections\nOrderedDict\n}(" + put("a") + put(1) + b"ub.", "collections.OrderedDict", ALLOWED
    ),
    "STACK_GLOBAL": Spelling(b"\x80\x04" + text("posix") + text("system") + b"\x93" + put(("true",)) + b"R."),
    "STACK_GLOBAL, operands from the memo by MEMOIZE": Spelling(
        b"\x80\x04" + text("system") + b"\x940" + text("posix") + b"\x940h\x01h\x00\x93" + put(("true",)) + b"R."
    ),
    "STACK_GLOBAL, operands from the memo by PUT": Spelling(
        b"\x80\x04" + put("system") + b"q\x070" + put("posix") + b"p99\n0g99\nh\x07\x93)R."
    ),
    "STACK_GLOBAL, operands duplicated": Spelling(b"\x80\x04" + text("posix") + b"2\x93)R.", "posix.posix"),
    "STACK_GLOBAL, operands out of a popped list": Spelling(
        b"\x80\x04](" + text("posix") + b"\x94" + text("system") + b"\x94e0h\x00h\x01\x93)R."
    ),
    "STACK_GLOBAL in a memo slot that is taken twice": Spelling(
        b"\x80\x04" + text("math") + b"q\x000" + text("posix") + b"q\x000h\x00" + text("system") + b"\x93)R."
    ),
    "text that decodes": Spelling(b"\x80\x04V\\u0070osix\nVsys\\u0074em\n\x93)R."),
    "MEMOIZE inside a MARK": Spelling(b"\x80\x04(" + text("posix") + b"\x941h\x00" + text("system") + b"\x93)R."),
    "PUT of a MARKed object": Spelling(b"\x80\x02(" + SYS + b"q\x011h\x01)R."),
    "POP of a MARK": Spelling(b"\x80\x02(0" + SYS + b")R."),
    "a frame that ends within the name": Spelling(
        b"\x80\x04\x95" + struct.pack("<Q", 4) + text("posix") + text("system") + b"\x93)R."
    ),
    "a frame within a frame": Spelling(
        b"\x80\x04\x95" + struct.pack("<Q", 40) + b"\x95" + struct.pack("<Q", 30) + SYS + put(("x" * 9,)) + b"R."
    ),
    "in a dict key": Spelling(b"\x80\x02}(" + SYS + b")RK\x01u."),
    "in a tuple of a tuple": Spelling(dumped(((((SYSTEM,),),),))),
    "in kwargs of NEWOBJ_EX": Spelling(
        b"\x80\x04" + put(name("collections", "OrderedDict")) + b")}(" + put("a") + put(SYSTEM) + b"u\x92."
    ),
    "in a state": Spelling(b"\x80\x02ccollections\nOrderedDict\n)R}(" + put("a") + put(SYSTEM) + b"ub."),
    "in a persistent id": Spelling(b"\x80\x02" + put(("storage", SYSTEM)) + b"Q."),
    "the function out of another call": Spelling(
        b"\x80\x02" + put(call(name("builtins", "getattr"), name("os", "x"), "system")) + b")R.", "builtins.getattr"
    ),
    "EXT1": Spelling(b"\x80\x02\x82\x07)R.", "copyreg extension.7"),
    "EXT2": Spelling(b"\x80\x02\x83\x07\x01)R.", "copyreg extension.263"),
    "EXT4": Spelling(b"\x80\x02\x84\x07\x00\x01\x00)R.", "copyreg extension.65543"),
    "Python 2's eval": Spelling(dumped(call(name("__builtin__", "eval"), "1")), "builtins.eval"),
    "Python 2's commands": Spelling(dumped(call(name("commands", "getoutput"), "1")), "subprocess.getoutput"),
    "Python 2's urllib": Spelling(dumped(call(name("urllib2", "urlopen"), "1")), "urllib.request.urlopen"),
    "a dotted name": Spelling(
        b"\x80\x04" + text("os") + text("path.join.__globals__") + b"\x93)R.", "os.path.join.__globals__"
    ),
    "a name that only looks allowed": Spelling(
        dumped(call(name("torch._utils ", "_rebuild_tensor_v2"))), "torch._utils ._rebuild_tensor_v2"
    ),
    "a name in other case": Spelling(
        dumped(call(name("torch._utils", "_Rebuild_tensor_v2"))), "torch._utils._Rebuild_tensor_v2"
    ),
    "allowed": Spelling(dumped(call(name("collections", "OrderedDict"))), "collections.OrderedDict", ALLOWED),
    # What follows breaks, after the global.
    "then a bad opcode": Spelling(EVIL[:-1] + b"\xff."),
    "then no STOP": Spelling(EVIL[:-1]),
    "then the end of an instruction": Spelling(EVIL[:-1] + b"X\xff\xff"),
    "then a long announcement": Spelling(EVIL[:-1] + b"\x8e" + struct.pack("<Q", 1 << 62)),
    "then nothing on the stack": Spelling(EVIL[:-1] + b"00000."),
    "then a memo slot that is empty": Spelling(EVIL[:-1] + b"h\xee."),
    "then an int of too many digits": Spelling(EVIL[:-1] + b"I" + b"9" * 100_000 + b"\n."),
}


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("found", SPELLINGS.values(), ids=SPELLINGS.keys())
@pytest.mark.parametrize("place", ["bare", "zip", "legacy"])
def test_a_global_is_named_however_it_is_spelled(found: Spelling, place: str, tmp_path: Path) -> None:
    data = {"bare": found.raw, "zip": plain(pickled=found.raw), "legacy": legacy(object=found.raw)}[place]
    report = report_of(tmp_path / "seed.pth", data)
    assert named(report).get(found.mapped) == found.word, (named(report), report["error"])
    for item in report["globals"]:
        assert set(item) == {"module", "name", "mapped", "word", "times", "pickle"}
        assert item["word"] in (CALLED, NAMED, ALLOWED)


ODD = {
    "POP of a MARK": b"\x80\x02(0N.",
    "MEMOIZE of a MARK": b"\x80\x04N(\x941.",
    "PUT of a MARK": b"\x80\x02N(q\x001.",
    "PUT on nothing": b"\x80\x02q\x00N.",
    "a frame that ends within an instruction": b"\x80\x04\x95" + struct.pack("<Q", 2) + text("posix") + b".",
    "a frame beyond STOP": b"\x80\x04\x95" + struct.pack("<Q", 3) + b"N.NNN",
    "a frame within a frame": b"\x80\x04\x95" + struct.pack("<Q", 12) + b"\x95" + struct.pack("<Q", 2) + b"N..",
    "values left": b"\x80\x02NN.",
    "a MARK left": b"\x80\x02(N.",
    "a slot filled twice": b"\x80\x02K\x01q\x00K\x02q\x000.",
    "a second PROTO": b"\x80\x02\x80\x02N.",
}


@pytest.mark.parametrize("raw", by_key(ODD))
def test_what_no_pickler_writes_is_said(raw: bytes, tmp_path: Path) -> None:
    report = report_of(tmp_path / "seed.pth", plain(pickled=raw))
    assert notes(report) & {"odd-pickle", "after-stop", "malformed", "broken-pickle"}, report["checks"]


# -- where a pickle may hide ------------------------------------------------------------------------------------


def deep(levels: int) -> bytes:
    inner = EVIL
    for _ in range(levels):
        inner = dumped(call(name("pickle", "loads"), inner))
    return inner


def loads_of(data: object, function: str = "pickle.loads") -> bytes:
    return plain({"x": call(name(*function.rsplit(".", 1)), data)})


EVIL_ZIP = plain({"x": SYSTEM})
PLACES = {
    "a bare pickle": EVIL,
    "a bare pickle of protocol 0": EVIL0,
    "the second of two bare pickles": dumped(1) + EVIL,
    "the second of two, protocol 0": dumped(1) + EVIL0,
    "behind STOP in data.pkl": plain(pickled=dumped({"w": TENSOR}) + EVIL),
    "behind STOP in data.pkl, protocol 0": plain(pickled=dumped({"w": TENSOR}) + EVIL0),
    "another .pkl": with_record(Entry(f"{ROOT}/more.pkl", EVIL)),
    "another .pkl, protocol 0": with_record(Entry(f"{ROOT}/more.pkl", EVIL0)),
    "another .pkl, deflated": with_record(Entry(f"{ROOT}/more.pkl", EVIL, 8)),
    "another .PKL": with_record(Entry(f"{ROOT}/MORE.PKL", EVIL)),
    "another record that begins like a pickle": with_record(Entry(f"{ROOT}/weights.bin", EVIL)),
    "another record, deflated": with_record(Entry(f"{ROOT}/weights.bin", EVIL, 8)),
    "another record of protocol 0": with_record(Entry(f"{ROOT}/weights.bin", EVIL0)),
    "a tar in a record": with_record(Entry(f"{ROOT}/inner.bin", tarred(EVIL))),
    "another root": with_record(Entry("other/data.pkl", EVIL)),
    "another root's text-like pickle": with_record(Entry("other/data.pkl", EVIL0)),
    "a copy of data.pkl": with_record(Entry(f"{ROOT}/data.pkl", EVIL)),
    "a case twin of data.pkl": with_record(Entry(f"{ROOT}/Data.Pkl", EVIL)),
    "a record that is not listed": with_record(Entry(f"{ROOT}/evil.pkl", EVIL, unlisted=True)),
    "a record that is not listed, deflated": with_record(Entry(f"{ROOT}/evil.pkl", EVIL, 8, unlisted=True)),
    "the first of two archives": EVIL_ZIP + plain(),
    "the second of two archives": plain() + EVIL_ZIP,
    "the third of three archives": plain() + plain() + EVIL_ZIP,
    "the second of two archives, offsets from the file": plain()
    + archive(entries({"x": SYSTEM}).values(), shift=len(plain())),
    "an archive within an archive": with_record(Entry(f"{ROOT}/inner.pth", EVIL_ZIP)),
    "an archive within an archive, deflated": with_record(Entry(f"{ROOT}/inner.pth", EVIL_ZIP, 8)),
    "an archive in a zip that is none of torch's": zipped(EVIL_ZIP, "model.pth"),
    "a pickle in a zip that is none of torch's": zipped(EVIL, "a/b.pkl", zipfile.ZIP_DEFLATED),
    "a cut archive": EVIL_ZIP[:-30],
    "a cut archive, another .pkl": with_record(Entry(f"{ROOT}/more.pkl", EVIL))[:-30],
    "an archive behind other bytes": b"#!/bin/sh\n" + EVIL_ZIP,
    "a tar": tarred(EVIL),
    "a tar with an archive in it": tarred(EVIL_ZIP),
    "legacy: the magic number's pickle": legacy(magic=EVIL[:-1] + b"0" + legacy()[2:15]),
    "legacy: protocol version": legacy(version=EVIL),
    "legacy: system info": legacy(system=EVIL),
    "legacy: object": legacy(object=EVIL),
    "legacy: keys": legacy(keys=b"\x80\x02]" + put(SYSTEM) + b"0" + put("0") + b"a."),
    "legacy: behind the last storage": legacy(tail=EVIL),
    "legacy: cut": legacy({"x": SYSTEM})[:-20],
    "legacy: cut within the object": legacy(storages={}, object=EVIL[:-1], keys=b""),
    "bytes for pickle.loads": loads_of(EVIL),
    "bytes for pickle.loads, protocol 0": loads_of(EVIL0),
    "bytes for torch.storage._load_from_bytes": loads_of(EVIL, "torch.storage._load_from_bytes"),
    "bytes for _load_from_bytes, an archive": loads_of(EVIL_ZIP, "torch.storage._load_from_bytes"),
    "bytes for _load_from_bytes, a legacy file": loads_of(legacy({"x": SYSTEM}), "torch.storage._load_from_bytes"),
    "text for pickle.loads": loads_of(EVIL.decode("latin-1"), "cPickle.loads"),
    "bytes through codecs.encode": plain(
        {"x": call(name("pickle", "loads"), call(name("_codecs", "encode"), EVIL.decode("latin-1"), "latin1"))}
    ),
    "bytes in a bytearray": plain(
        pickled=b"\x80\x05cpickle\nloads\n(\x96" + struct.pack("<Q", len(EVIL)) + EVIL + b"tR."
    ),
    "bytes that nobody calls": plain({"x": EVIL}),
    "pickle in pickle in pickle": plain({"x": Code(deep(3)[2:-1])}),
    "bytes in a broken pickle": plain(pickled=dumped({"x": call(name("pickle", "loads"), EVIL)})[:-1]),
    "bytes in another .pkl": with_record(Entry(f"{ROOT}/more.pkl", deep(1))),
    "gzip in another record": with_record(Entry(f"{ROOT}/more.bin", gzip.compress(EVIL))),
    "bzip2 in another record": with_record(Entry(f"{ROOT}/more.bin", bz2.compress(EVIL))),
    "xz in another record": with_record(Entry(f"{ROOT}/more.bin", lzma.compress(EVIL))),
    "lzma in another record": with_record(Entry(f"{ROOT}/more.bin", lzma.compress(EVIL, lzma.FORMAT_ALONE))),
    "zlib in another record": with_record(Entry(f"{ROOT}/more.bin", zlib.compress(EVIL))),
}


#: Places of which no reader knows where they begin or end; they are not searched, and said to be there.
UNSEARCHED = ("not listed", "two archives", "three archives", "a cut archive", "behind other bytes")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("place", PLACES)
def test_a_pickle_is_found_wherever_it_hides(place: str, tmp_path: Path) -> None:
    path = tmp_path / "seed.pth"
    report = report_of(path, PLACES[place])
    if any(part in place for part in UNSEARCHED) and "offsets" not in place:
        assert scan_file(str(path))["verdict"] in ("unsafe", "program", "unknown")
        assert say("validate", path, "--safe").code in (1, 3)
        return
    assert named(report).get("posix.system") == CALLED, (report["status"], report["pickles"], report["error"])
    assert report["status"] != "valid"
    said = say("validate", path)
    assert said.code in (1, 3)
    assert "posix.system" in said.out


COMPRESSED = {"zstd": b"\x28\xb5\x2f\xfd", "lz4": b"\x04\x22\x4d\x18", "7z": b"7z\xbc\xaf\x27\x1c"}


@pytest.mark.parametrize("magic", by_key(COMPRESSED))
def test_what_cannot_be_unpacked_is_not_looked_at(magic: bytes, tmp_path: Path) -> None:
    report = report_of(tmp_path / "seed.pth", with_record(Entry(f"{ROOT}/more.bin", magic + bytes(40))))
    assert (report["status"], report["coverage"]) == ("valid", "partial")


def test_what_an_unpickler_takes_is_not_passed_over(tmp_path: Path) -> None:
    """The decoder refuses BUILD on a dict; CPython passes over one without a state, and goes on."""
    lenient = b"}Nb0" + dumped(call(name("posix", "system"), "true"))[2:]
    called = []

    class Recorder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return lambda *args: called.append((module, name, args))

    Recorder(io.BytesIO(lenient)).load()
    assert called
    report = report_of(tmp_path / "seed.pth", with_record(Entry(f"{ROOT}/more.bin", lenient)))
    assert report["status"] == "invalid"


# -- the words --------------------------------------------------------------------------------------------------


SAFE = re.compile(r"\bsafe(ly)?\b", re.I)


@pytest.mark.parametrize("style", ["table", "json", "jsonl", "github", "junit", "sarif"])
def test_nothing_is_called_harmless(style: str, tmp_path: Path) -> None:
    """The word that nobody can stand up for is in no report."""
    paths = [item.path for item in MANIFEST]
    for key, data in {"bad": EVIL, "zip": EVIL_ZIP, "good": plain(), "legacy": legacy()}.items():
        path = tmp_path / f"{key}.pth"
        path.write_bytes(data)
        paths.append(path)
    said = say("validate", "-v", "--format", style, *paths).all
    assert [line for line in said.splitlines() if SAFE.search(line)] == []


def test_the_report_is_json_whatever_a_global_is_called(tmp_path: Path) -> None:
    path = tmp_path / "seed.pth"
    odd = name("a\x1b[2J\u202e", "b\ufeff")
    path.write_bytes(plain({"x": call(odd), "y": Code(b"\x8c\x03\xed\xa0\x80\x8c\x01x\x93")}))
    said = say("validate", path, "--format", "json")
    assert "a\x1b[2J\u202e.b\ufeff" in {item["mapped"] for item in json.loads(said.out)["globals"]}


# -- what acts, however it is reached ---------------------------------------------------------------------------

ECHO = name("posix", "system")


def built(made: Code, state: object) -> Code:
    """An object, and its state by BUILD."""
    return Code(made.raw + put(state) + b"b")


REACHED = {
    "map of Python 2": call(name("itertools", "imap"), ECHO, ["true"]),
    "an unknown function": call(name("some.module", "each"), ["true"], ECHO),
    "in a list": call(name("some.module", "each"), [["true"], [ECHO]]),
    "in a dict": call(name("some.module", "each"), {"then": ECHO}),
    "in an OrderedDict": call(name("some.module", "each"), call(name("collections", "OrderedDict"), [["a", ECHO]])),
    "in a state": built(call(name("some.module", "Later")), {"then": ECHO}),
    "partial of a name that is not listed": call(call(name("functools", "partial"), name("a", "b")), "true"),
    "breakpoint": call(name("builtins", "breakpoint")),
    "open": call(name("io", "open"), "/dev/null"),
    "_io's open": call(name("_io", "open"), "/dev/null"),
    "getattr of a method that is called": call(call(name("builtins", "getattr"), name("a", "B"), "run"), "true"),
    "NEWOBJ": Code(name("subprocess", "Popen").raw + put(("true",)) + b"\x81"),
    "a state of a class": Code(name("pkg", "Config").raw + put((None, {"__setstate__": ECHO})) + b"b"),
    "the factory of a defaultdict": call(name("collections", "defaultdict"), name("os", "getcwd")),
    "the element of a deque": call(name("collections", "deque"), [ECHO]),
    "through another module": Code(b"\x8c\x08argparse\x8c\x0a_os.remove\x93" + put(("gone",)) + b"R"),
    "a method of a path": Code(b"\x8c\x07pathlib\x8c\x0aPath.touch\x93" + put(("new",)) + b"R"),
    **{
        full: call(name(*full.rpartition(".")[::2]), "true")
        for full in (
            *("ctypes.CDLL", "_ctypes.dlopen", "os.remove", "gzip.open", "zipfile.ZipFile", "tarfile.open"),
            *("sqlite3.connect", "glob.glob", "imp.load_source", "numpy.fromfile", "torch.save", "yaml.unsafe_load"),
            *("concurrent.futures.process.ProcessPoolExecutor", "torch._C._load_for_lite_interpreter"),
            *("torch.fx.graph_module._exec_with_source", "torch.fx.graph_module.reduce_graph_module"),
            *("torch._inductor.cpp_builder.run_compile_cmd", "torch.testing._internal.common_utils.shell"),
            *("typing.get_type_hints", "dataclasses._create_fn", "distutils.spawn.spawn", "copy._reconstruct"),
            *("setuptools._distutils.spawn.spawn", "numpy.distutils.exec_command.exec_command", "numpy.memmap"),
            *("logging.config.dictConfig", "transformers.dynamic_module_utils.get_class_in_module"),
            *("torch._C.PyTorchFileWriter", "numpy.lib._npyio_impl.load", "pandas.core.computation.eval.eval"),
            *("torch._ops._Ops.load_library", "numpy.ctypeslib._ctypeslib.load_library", "unittest.mock._importer"),
        )
    },
    **{
        f"{module} with {path}": Code(text(module) + text(path) + b"\x93" + put(("true",)) + b"R")
        for module, path in (
            ("torch._utils", "_rebuild_tensor.__builtins__.__getitem__"),
            ("collections", "OrderedDict.__class__.__subclasses__"),
            ("torch", "UntypedStorage.from_file"),
            ("some.module", "Class.method.__globals__.get"),
        )
    },
    "what a call gave": call(call(name("some.module", "make")), "true"),
    "what a call of a call gave": call(call(call(name("some.module", "make"))), "true"),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("made", by_key(REACHED))
def test_what_acts_counts_as_run_however_it_is_reached(made: Code, tmp_path: Path) -> None:
    report = report_of(tmp_path / "seed.pth", plain({"x": made}))
    assert report["status"] == "invalid"
    assert "dangerous-call" in notes(report, "error")


HARMLESS = {
    "a class within a class": Code(
        call(name("builtins", "getattr"), name("pkg", "Outer"), "Block").raw + b")\x81" + put({"a": 1}) + b"b"
    ),
    "a class that is not listed": call(name("pkg", "Config"), 1),
    "a partial of a class, which nothing calls": call(name("functools", "partial"), name("torch.nn", "LayerNorm")),
    "what acts in a dict, which nothing gets": {"f": ECHO},
    "a file in memory": call(name("_io", "BytesIO")),
    "a class that cloudpickle names": call(call(name("cloudpickle.cloudpickle", "_builtin_type"), "CodeType"), 1),
    **{
        full: call(name(*full.rpartition(".")[::2]), "true")
        for full in (
            *("datetime.datetime", "uuid.UUID", "re._compile", "decimal.Decimal", "fractions.Fraction", "array.array"),
            *("logging.getLogger", "types.SimpleNamespace", "ipaddress.IPv4Address", "random.Random", "numpy.dtype"),
            *(
                "numpy.core.multiarray._reconstruct",
                "numpy._core.multiarray.scalar",
                "numpy.random._pickle.__generator_ctor",
            ),
            *("numpy.ma.core._mareconstruct", "numpy._core.numeric._frombuffer", "numpy.float32", "torch.nn.Linear"),
            *("torch._C.Generator", "torch.nn.functional.relu", "torch.tensor", "sklearn.tree._tree.Tree"),
            *("pandas._libs.internals._unpickle_block", "torch.distributed.remote_device._remote_device"),
        )
    },
}


class Config:
    """A class of a program, with a method that it may keep."""

    def step(self) -> None:
        pass


#: What torch.save writes by a call of a function that could do worse: getattr, getitem, reduce, iter, type.
KEPT = {
    "a method of str": str.lower,
    "a class method of dict": dict.fromkeys,
    "a class method of datetime": datetime.datetime.now,
    "a class method of int": int.from_bytes,
    "a method of a string": "text".lower,
    "a method of a list": [1].append,
    "a method of an object": Config().step,
    "a method of an array": np.ndarray.sum,
    "a method of a tensor": torch.Tensor.add,
    "a generic type": list[int],
    "a type of typing": typing.Optional[int],  # noqa: UP045
    "a union": int | str,
    "the type of None": type(None),
    "an iterator": iter([1, 2]),
    "a time with a zone": datetime.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
    "a partial": functools.partial(torch.nn.functional.relu, inplace=True),
    "a defaultdict": collections.defaultdict(list),
    "a path": Path("runs"),
    "a pattern": re.compile("a+"),
    "a generator": torch.Generator(),
    "a random state": np.random.RandomState(0),
    "a function of NumPy": np.add,
    "the result of max": torch.ones(2, 2).max(0),
}


@pytest.mark.parametrize("key", KEPT)
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_configurations_keep_is_no_attack(key: str, protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save({"model": {"w": torch.ones(2)}, "config": {"kept": KEPT[key]}}, path, pickle_protocol=protocol)
    report = validation_report(str(path))
    assert report["status"] == "valid", report["checks"]
    assert report["safety"]["verdict"] in ("unknown", "weights-only")
    assert "delete it" not in say("inspect", path).out


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_pickled_tensors_are_judged_by_what_is_in_them(protocol: int, tmp_path: Path) -> None:
    """pickle.dump writes each storage as a legacy torch file in bytes; so does a zip file in them."""
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps({"w": torch.zeros(4), "v": torch.ones(2)}, protocol))
    report = validation_report(str(path))
    assert "dangerous-call" not in notes(report, "error")
    said = say("scan", path).out
    assert "unknown: not on torch" in said and "_load_from_bytes" in said
    assert "of unrecognised data" not in said


@pytest.mark.parametrize("inner", [plain({"w": TENSOR}), legacy({"w": TENSOR})], ids=["zip", "legacy"])
def test_bytes_that_torch_loads_are_clean_or_not(inner: bytes, tmp_path: Path) -> None:
    def verdict_on(data: bytes) -> str | None:
        path = tmp_path / "model.pkl"
        path.write_bytes(dumped({"x": call(name("torch.storage", "_load_from_bytes"), data)}))
        return scan_file(str(path))["verdict"]

    nested = inner
    assert verdict_on(inner) == "unknown"
    for _ in range(2):
        nested = legacy({"x": call(name("torch.storage", "_load_from_bytes"), nested)})
        assert verdict_on(nested) == "unknown"
    for _ in range(9):
        nested = legacy({"x": call(name("torch.storage", "_load_from_bytes"), nested)})
    bad = (
        *(nested, inner[:-40] if inner[:2] == b"PK" else inner[:60], b"", b"text", EVIL0, EVIL, EVIL_ZIP),
        *(
            legacy({"x": SYSTEM}),
            legacy(system=EVIL),
            legacy(keys=b"\x80\x02]" + put(SYSTEM) + b"0" + put("0") + b"a."),
        ),
        *(with_record(Entry(f"{ROOT}/more.pkl", EVIL)), with_record(Entry(f"{ROOT}/Data.Pkl", EVIL))),
        *(EVIL_ZIP + plain(), plain() + EVIL_ZIP, legacy({"x": call(name("pkg", "run"))})),
    )
    found = {verdict_on(data) for data in bad}
    assert found <= {"unsafe", "unknown"} and "unsafe" in found


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("made", by_key(HARMLESS))
def test_what_runs_nothing_is_a_warning(made: Any, tmp_path: Path) -> None:
    report = report_of(tmp_path / "seed.pth", plain({"x": made}))
    assert report["status"] == "valid", report["checks"]
    assert "dangerous-call" not in notes(report, "error")


# -- pickles in torch.export archives --------------------------------------------------------------------------
# Constants that are not tensors are pickles, which torch.export.load runs. They are where files of torch.save have
# storages.


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("echo attacked",)


def export_archive(path: Path, name: str, data: bytes) -> Path:
    config = json.dumps({"config": {}})
    inputs = io.BytesIO()
    torch.save(((), {}), inputs)
    records = {
        "data/weights/model_weights_config.json": config,
        "data/constants/model_constants_config.json": config,
        "data/sample_inputs/model.pt": inputs.getvalue(),
        "models/model.json": "{}",
        "archive_format": "pt2",
        "archive_version": "0",
    }
    with zipfile.ZipFile(path, "w") as target:
        for record, content in (records | {name: data}).items():
            target.writestr(f"m/{record}", content)
    return path


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_pickled_constants_of_exports_are_followed(protocol: int, tmp_path: Path) -> None:
    path = export_archive(tmp_path / "m.pt2", "data/constants/opaque_obj_0", pickle.dumps(Attack(), protocol))
    said = say("validate", path)
    assert said.code == 1 and "echo attacked" in said.all
    assert "1 pickled object (data/constants/opaque_obj_0)" in say("inspect", path).all


def test_sample_inputs_of_exports_are_followed(tmp_path: Path) -> None:
    """These torch.export.load reads with weights_only first, and without where that refuses."""
    data = io.BytesIO()
    torch.save(((Attack(),), {}), data)
    said = say("validate", export_archive(tmp_path / "m.pt2", "data/sample_inputs/model.pt", data.getvalue()))
    assert said.code == 1 and "echo attacked" in said.all


@pytest.mark.parametrize("command", ["validate", "scan", "inspect"])
def test_the_graphs_of_many_pickles_are_not_kept(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pickle is examined when it is found. Then its graph is dropped: 60,000 of them are half a gigabyte."""
    path = tmp_path / "many.pth"
    path.write_bytes(archive([*entries().values(), *(Entry(f"{ROOT}/x{n}.pkl", dumped([n])) for n in range(100))]))
    alive: list[int] = []

    def judged(*given: Any, **named: Any) -> Verdict:
        alive.append(sum(type(thing) is Graph for thing in gc.get_objects()))
        return verdict_of(*given, **named)

    monkeypatch.setattr("ckptool.reports.loads.verdict_of", judged)
    before = sum(type(thing) is Graph for thing in gc.get_objects())
    assert say(command, str(path)).code == 0
    assert alive and max(alive) - before < 5


# -- A clean file is valid, and nothing is said of it but what torch's list does not have.


#: What torch.save wrote, and nobody meddled with; protocol 0 of the old format is broken by torch itself.
CLEAN = [
    item
    for item in MANIFEST
    if item.container in ("torch-zip", "torch-legacy")
    # No torch reads UntypedStorage back from the legacy format, although it writes it.
    and not item.path.name.startswith(("hostile_", "zip_", "truncated", "legacy_untyped"))
    and item.path.name != "legacy_protocol0.pth"
]
#: Checks that may say something of a file that nothing is wrong with.
UNDECIDED = {"globals", "program", "weights-only"}


def complaints(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (check["name"], check["message"])
        for check in report["checks"]
        if check["status"] == "fail" or (check["status"] == "warning" and check["name"] not in UNDECIDED)
    ]


@pytest.mark.parametrize("item", CLEAN, ids=by_name)
def test_a_clean_fixture_is_valid(item: Fixture) -> None:
    report = validation_report(str(item.path))
    assert (complaints(report), report["status"]) == ([], "valid")
    if item.loads and item.container == "torch-zip":
        assert {check["name"]: check["status"] for check in report["checks"]}["weights-only"] == "pass"


def test_there_are_clean_fixtures() -> None:
    assert len(CLEAN) > 70


@needs_corpus
@pytest.mark.parametrize("path", corpus_files(), ids=lambda path: str(path.name))
def test_a_real_checkpoint_is_valid(path: Path) -> None:
    """Or it is no torch checkpoint at all, and named so."""
    assert path.parent == CORPUS
    report = validation_report(str(path))
    if report["status"] == "unreadable":
        assert report["format"] not in (None, "torch-zip", "torch-legacy")
        return
    assert (complaints(report), report["status"]) == ([], "valid")
