"""safetensors, in and out: the library itself is the oracle, on the very same bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import CORPUS, FIXTURES, examples, needs_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, load_model, save_file

import ckptool
from ckptool.base.errors import MalformedError, NotACheckpointError, RefusedError, UnreadableError
from ckptool.base.limits import LIMITS
from ckptool.cli.main import run
from ckptool.files.sources import BytesSource
from ckptool.formats import read_container
from ckptool.formats.safetensors import header as safetensors_header
from ckptool.reports.inspection import inspection
from ckptool.reports.validate import validation_report


def made(header: Any, data: bytes = b"", *, size: int | None = None) -> bytes:
    """A file of a header, text or what becomes JSON; ``size`` is what it says of its header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
ENTRY = b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
EIGHT = bytes(8)


def more(text: bytes) -> bytes:
    """A file of one tensor, with a field of somebody else."""
    return made(b'{"a":' + ENTRY[:-1] + b',"x":' + text + b"}}", EIGHT)


#: What no reader takes: the bytes, and the words of our refusal.
BROKEN = {
    "no room for a length": (b"\1\0\0", "fewer than the 8 bytes"),
    "nothing but a length of 0": (bytes(8), "zeros"),
    "a length of 0": (bytes(8) + b"x", "must begin with '{'"),
    "a header too long for the library": (made({}, size=100_000_001), "100,000,000 are the most"),
    "the longest length": (made({}, size=2**64 - 1), "100,000,000 are the most"),
    "a header that the file has not": (made({}, size=500), "the file ends after 2"),
    "not UTF-8": (made(b'{"\xff":{}}'), "not UTF-8 at byte 10"),
    "a list": (made(b"[]"), "must begin with '{'"),
    "a byte order mark": (made(b"\xef\xbb\xbf{}"), "must begin with '{'"),
    "junk behind the JSON": (made(b"{}x"), "not JSON"),
    "zeros behind the JSON": (made(b"{}\0\0"), "not JSON"),
    "NaN": (made(b'{"a":NaN}'), "not JSON"),
    "a control character": (made(b'{"a\1":' + ENTRY + b"}", EIGHT), "not JSON"),
    "half of a character": (made(b'{"\\ud800":' + ENTRY + b"}", EIGHT), "half of a character"),
    "brackets without end": (made(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "not JSON"),
    "a hole": (made({"a": {**A, "data_offsets": [8, 16]}}, bytes(16)), "a hole of 8 bytes before tensor 'a'"),
    "a hole in between": (made({"a": A, "b": {**A, "data_offsets": [12, 20]}}, bytes(20)), "a hole of 4 bytes"),
    "an overlap": (made({"a": A, "b": {**A, "data_offsets": [4, 12]}}, bytes(12)), "begins within"),
    "one range twice": (made({"a": A, "b": A}, EIGHT), "begins within"),
    "bytes behind the end": (made({"a": A}, bytes(9)), "1 byte after the last tensor"),
    "no byte behind a header": (made({"a": A}), "it is cut"),
    "a byte too few": (made({"a": A}, bytes(7)), "it is cut"),
    "offsets the wrong way round": (made({"a": {**A, "data_offsets": [8, 0]}}, EIGHT), "are reversed"),
    "offsets far away": (made({"a": {**A, "data_offsets": [2**63, 2**63 + 8]}}, EIGHT), "a hole"),
    "three offsets": (made({"a": {**A, "data_offsets": [0, 4, 8]}}, EIGHT), "two integers"),
    "an unknown dtype": (made({"a": {**A, "dtype": "F33"}}, EIGHT), "'F33' is unknown"),
    "a dtype that torch lacks": (
        made({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, bytes(3)),
        "a dtype that torch does not have",
    ),
    "half a byte": (made({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"\0"), "do not end on a byte"),
    "a size that overflows": (made({"a": {**A, "shape": [2**32, 2**32]}}, EIGHT), "too many elements"),
    "an overflow with a zero behind it": (
        made({"a": {"dtype": "F32", "shape": [2**63, 2**63, 0], "data_offsets": [0, 0]}}),
        "too many elements",
    ),
    "a size beyond 64 bits": (made({"a": {**A, "shape": [2**64]}}, EIGHT), "integers of at least 0"),
    "a negative size": (made({"a": {**A, "shape": [-2]}}, EIGHT), "integers of at least 0"),
    "a size that is a float": (made({"a": {**A, "shape": [2.0]}}, EIGHT), "integers of at least 0"),
    "a size that is true": (made({"a": {**A, "shape": [True, 2]}}, EIGHT), "integers of at least 0"),
    "a shape of another size": (made({"a": {**A, "shape": [3]}}, EIGHT), "takes 12 bytes, its data_offsets span 8"),
    "no data_offsets": (made({"a": {"dtype": "F32", "shape": [2]}}, EIGHT), "data_offsets is missing"),
    "a field twice": (made(b'{"a":{"dtype":"F32",' + ENTRY[1:] + b"}", EIGHT), "'dtype' is in the header twice"),
    "an entry that is a list": (made({"a": []}), "must be an object"),
    "an entry that is null": (made({"a": None}), "must be an object"),
    "__metadata__ with a number": (made({"__metadata__": {"a": 1}}), "values are all strings"),
    "__metadata__ that is a list": (made({"__metadata__": []}), "values are all strings"),
    "minus zero as an offset": (
        made(b'{"a":' + ENTRY.replace(b"[0,", b"[-0,") + b"}", EIGHT),
        "integers of at least 0",
    ),
    "minus zero as a size": (
        made(b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'),
        "integers of at least 0",
    ),
    "a float out of range": (more(b"1e999"), "out of range"),
    "an integer out of range": (more(b"9" * 400), "out of range"),
    "a deep number out of range": (more(b'[{"y":[-1e400]}]'), "out of range"),
    "half of a character in a field": (more(b'"\\ud800"'), "half of a character"),
    "half of a character in the name of one": (more(b'[{"\\udc00":1}]'), "half of a character"),
    "lists too deep": (more(b"[" * 126 + b"]" * 126), "more than 127 deep"),
    "objects too deep": (more(b'{"x":' * 126 + b"1" + b"}" * 126), "more than 127 deep"),
}

#: What the library takes and we do not, with the reason: a name twice is two answers to one question. The library takes
#: the last one, other readers the first, and a file whose tensors depend on who reads it is no release.
STRICTER = {
    "a name twice": made(b'{"a":' + ENTRY + b',"a":' + ENTRY + b"}", EIGHT),
    "a text twice": made(b'{"__metadata__":{"a":"1","a":"2"}}'),
}

#: What every reader takes.
ODD = {
    "no tensor": made({}),
    "only texts": made({"__metadata__": {"format": "pt"}}),
    "null for no texts": made({"__metadata__": None, "a": A}, EIGHT),
    "leading blanks": made(b'  {"a":' + ENTRY + b"}", EIGHT),
    "a leading tab": made(b'\t{"a":' + ENTRY + b"}", EIGHT),
    "blanks and a line break behind it": made(b'{"a":' + ENTRY + b"}  \n", EIGHT),
    "a field of somebody else": more(b'{"y":[1,-0,"-0",1e308,null]}'),
    "one as deep as may be": more(b"[" * 125 + b"]" * 125),
    "one with a whole character": more(b'"\\ud83d\\ude00"'),
    "minus zero in a name": made({"layer-0": A}, EIGHT),
    "an empty name": made({"": A}, EIGHT),
    "hostile names": made({"a\x1b[31m\n\0": A}, EIGHT),
    "empty tensors": made({"b": A, "a": {"dtype": "I64", "shape": [3, 0], "data_offsets": [8, 8]}}, EIGHT),
    "a scalar": made({"a": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]}}, EIGHT),
    "another order in the file": made({"b": {**A, "data_offsets": [8, 16]}, "a": A}, struct.pack("<4f", 1, 2, 3, 4)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_the_library_refuses_is_refused_with_the_rule(name: str) -> None:
    data, words = BROKEN[name]
    with pytest.raises((SafetensorError, KeyError)):
        load(data)
    with pytest.raises((MalformedError, NotACheckpointError)) as caught:
        read_container(BytesSource(data, "x.safetensors"))
    assert words in str(caught.value)


@pytest.mark.parametrize("name", STRICTER)
def test_what_two_readers_read_in_two_ways_is_refused(name: str) -> None:
    load(STRICTER[name])
    with pytest.raises(MalformedError, match="'a' is in the header twice"):
        read_container(BytesSource(STRICTER[name], "x.safetensors"))


@pytest.mark.parametrize("name", ODD)
def test_what_the_library_takes_is_read_as_it_reads_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(ODD[name])
    expected = load_file(path)
    with ckptool.open(path) as checkpoint:
        assert {entry.key for entry in checkpoint.survey.tensors} == set(expected)
        ckptool.save(ckptool.convert(checkpoint, "torch"), tmp_path / "x.pth")
    assert oracle.difference(dict(expected), dict(oracle.load(tmp_path / "x.pth"))) == ""
    assert run(["inspect", str(path)]) == run(["keys", str(path)]) == run(["validate", str(path)]) == 0


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("cut", range(8, 345, 7))
def test_what_stands_before_a_cut_is_saved(cut: int, tmp_path: Path) -> None:
    source = (FIXTURES / "model.safetensors").read_bytes()
    entries = json.loads(source[8 : 8 + int.from_bytes(source[:8], "little")])
    data = 8 + int.from_bytes(source[:8], "little")
    whole = {
        name for name, entry in entries.items() if name != "__metadata__" and data + entry["data_offsets"][1] <= cut
    }
    path, out = tmp_path / "cut.safetensors", tmp_path / "out.safetensors"
    path.write_bytes(source[:cut])
    if not whole:
        with pytest.raises(MalformedError, match="nothing can be saved"):
            ckptool.salvage(path)
        return
    found = ckptool.salvage(path)
    ckptool.save(found.checkpoint, out)
    found.checkpoint.close()
    tensors, expected = load_file(out), load_file(FIXTURES / "model.safetensors")
    assert (set(tensors), found.saved, found.verified) == (whole, len(whole), False)
    assert len(found.lost) == len(expected) - len(whole)
    assert all(torch.equal(tensors[name], expected[name]) for name in whole)
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt"}


# -- out -------------------------------------------------------------------------------------------------------

EDITS: dict[str, Callable[[ckptool.Checkpoint], ckptool.Checkpoint]] = {
    "strip-module": ckptool.strip_module,
    "add-module": ckptool.add_module,
    "rename": lambda checkpoint: ckptool.rename(checkpoint, glob=("module.*", "net.*")),
    "drop": lambda checkpoint: ckptool.drop(checkpoint, ["module.a"]),
    "keep": lambda checkpoint: ckptool.keep(checkpoint, ["module.a"]),
    "cast": lambda checkpoint: ckptool.cast(checkpoint, "float16"),
    "slim": ckptool.slim,
    "repack": ckptool.repack,
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_safetensors_file_stays_one_and_keeps_its_texts(name: str, tmp_path: Path) -> None:
    source, there, back = (tmp_path / name for name in ("in.safetensors", "out.safetensors", "back.safetensors"))
    save_file(load_file(FIXTURES / "model.safetensors"), source, metadata={"format": "pt", "license": "mit"})
    with ckptool.open(source) as checkpoint:
        ckptool.save(EDITS[name](checkpoint), there)
    # The same edit on a torch file, and the library writes what came of it.
    torch.save(load_file(source), tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        ckptool.save(EDITS[name](checkpoint), tmp_path / "out.pth")
    save_file(dict(oracle.load(tmp_path / "out.pth")), back, metadata={"format": "pt", "license": "mit"})
    found, expected = load_file(there), load_file(back)
    assert oracle.difference(dict(sorted(expected.items())), dict(sorted(found.items()))) == ""
    if name in ("rename", "slim", "repack"):
        assert list(found) == list(oracle.load(tmp_path / "out.pth")), "the order of the file"
    with safe_open(there, "pt") as file:
        assert file.metadata() == {"format": "pt", "license": "mit"}
    assert validation_report(str(there))["status"] == "valid"


def test_edits_that_leave_the_format_are_refused_with_a_way(tmp_path: Path) -> None:
    with ckptool.open(FIXTURES / "model.safetensors") as checkpoint:
        for edited in (ckptool.wrap(checkpoint, "state_dict"), ckptool.set(checkpoint, "epoch", 3)):
            with pytest.raises(RefusedError, match=r"call it .*model\.pth"):
                ckptool.save(edited, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_torch_loads_it_by_its_name_alone(tmp_path: Path) -> None:
    other = tmp_path / "model.bin"
    other.write_bytes((FIXTURES / "model.safetensors").read_bytes())
    assert oracle.load(FIXTURES / "model.safetensors").keys() == load_file(other).keys()
    with pytest.raises(Exception, match=r"weights_only|magic|Unpickl|load key|opcode|operand|stack"):
        oracle.load(other)
    for path, loads in ((FIXTURES / "model.safetensors", True), (other, False)):
        with ckptool.open(path) as checkpoint:
            assert inspection(checkpoint)["weights_only"]["loads"] is loads


class Tied(torch.nn.Module):
    """Weights that two modules share, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("tied", ["keep-first", "clone"])
def test_a_tied_model_comes_back(tied: Any, tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    torch.save(model.state_dict(), tmp_path / "tied.pth")
    with ckptool.open(tmp_path / "tied.pth") as checkpoint:
        with pytest.raises(RefusedError, match="tied='keep-first'"):
            ckptool.convert(checkpoint, "safetensors")
        ckptool.save(ckptool.convert(checkpoint, "safetensors", tied=tied), tmp_path / "x.safetensors")
    if tied == "keep-first":
        assert load_model(other, tmp_path / "x.safetensors") == (set(), [])
        with safe_open(tmp_path / "x.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    else:
        other.load_state_dict(load_file(tmp_path / "x.safetensors"))
    assert torch.equal(other.head.weight, model.head.weight)


@pytest.mark.parametrize("tied", ["keep-first", "clone"])
def test_views_that_overlap_and_differ_are_both_written(tied: Any, tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    tensors = {"whole": whole, "part": whole[2:6], "turned": whole.view(3, 4).t(), "again": whole}
    torch.save(tensors, tmp_path / "views.pth")
    with ckptool.open(tmp_path / "views.pth") as checkpoint:
        ckptool.save(
            ckptool.convert(checkpoint, "safetensors", tied=tied, allow_loss=["strides"]), tmp_path / "x.safetensors"
        )
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys() - ({"again"} if tied == "keep-first" else set())
    assert all(torch.equal(found[name], tensors[name]) for name in found)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=5))
@settings(max_examples=examples(40))
def test_sharing_is_what_save_file_calls_so(tmp_path: Path, parts: list[tuple[int, int]]) -> None:
    whole = torch.arange(14.0)
    tensors = {f"part{number}": whole[at : at + size] for number, (at, size) in enumerate(parts)}
    torch.save(tensors, tmp_path / "parts.pth")
    try:
        save_file(tensors, tmp_path / "theirs.safetensors")
    except RuntimeError as error:
        assert "share memory" in str(error)
        with ckptool.open(tmp_path / "parts.pth") as checkpoint, pytest.raises(RefusedError):
            ckptool.convert(checkpoint, "safetensors")
        return
    with ckptool.open(tmp_path / "parts.pth") as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "safetensors"), tmp_path / "ours.safetensors", force=True)
    ours, theirs = (load_file(tmp_path / f"{who}.safetensors") for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_torch_turns_round_when_it_reads_is_turned_round(tmp_path: Path) -> None:
    """Conjugated and negated views are flags beside the bytes, which safetensors does not have."""
    z, x = torch.randn(5, dtype=torch.complex64), torch.randn(3, 4)
    tensors = {
        "plain": z,
        "conj": z.conj(),
        "neg of conj": torch._neg_view(z.conj()),
        "imag": z.clone().conj().imag,
        "turned": torch._neg_view(x.t()),
        "half": torch._neg_view(x.bfloat16()),
        "integers": torch._neg_view(torch.tensor([1, -2, -(2**63)])),
        "bytes": torch._neg_view(torch.tensor([0, 1, 255], dtype=torch.uint8)),
    }
    torch.save(tensors, tmp_path / "lazy.pth")
    with ckptool.open(tmp_path / "lazy.pth") as checkpoint:
        edited = ckptool.convert(checkpoint, "safetensors", tied="keep-first", allow_loss=["strides"])
        ckptool.save(edited, tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name].resolve_conj().resolve_neg()) for name in found)


@needs_corpus
def test_real_safetensors_files_go_there_and_back(tmp_path: Path) -> None:
    for path in sorted(CORPUS.glob("*.safetensors")):
        try:
            with ckptool.open(path) as checkpoint:
                ckptool.save(ckptool.convert(checkpoint, "torch"), tmp_path / "x.pth", force=True)
        except UnreadableError as error:
            with pytest.raises((SafetensorError, KeyError)):
                load_file(path)
            assert "torch does not have" in str(error)
            continue
        assert oracle.difference(load_file(path), dict(oracle.load(tmp_path / "x.pth"))) == ""


# -- what the library refuses is refused -----------------------------------------------------------------------
# -0 where a whole number must be; and in fields that it does not know numbers out of range, lone surrogates, and
# nesting that is too deep for it.


def entry(offsets: str = "[0,4]", shape: str = "[1]", more: str = "") -> str:
    return f'{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}{more}}}}}'


# -- shapes of many dimensions ---------------------------------------------------------------------------------
# The product of 100,000 large numbers takes a minute. The library takes a shape of a million ones; here it is
# refused, as every way to use it is slow.


@pytest.mark.parametrize("size", [(1 << 64) - 1, 1, 0])
def test_a_shape_of_many_dimensions_is_refused_before_it_is_multiplied(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors: list[int] = []
    real = safetensors_header.prod
    monkeypatch.setattr(safetensors_header, "prod", lambda shape: (factors.append(len(shape)), real(shape))[1])

    def write(count: int) -> Path:
        entry = {"dtype": "U8", "shape": [size] * count, "data_offsets": [0, size]}
        header = json.dumps({"a": entry}).encode()
        path = tmp_path / "m.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(min(size, 1)))
        return path

    with pytest.raises(MalformedError, match="dimensions"):
        ckptool.open(write(100_000))
    assert max(factors, default=0) <= LIMITS.dimensions
    if size < 2:
        assert ckptool.keys(write(LIMITS.dimensions))["tensors"]
