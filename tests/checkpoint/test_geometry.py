"""Impossible geometry: nobody checks it, and torch's mmap path trusts it. For every function that rebuilds a tensor."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from crafted_files import (
    FLOATS,
    TENSOR,
    Code,
    by_key,
    call,
    legacy,
    name,
    notes,
    ordered,
    plain,
    put,
    report_of,
    storage,
    tensor,
    with_status,
)
from dcp_folders import archive

UTILS = "torch._utils"
#: Shape, stride and offset of views that do not lie in a storage of four floats.
WRONG: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "one too many": ((5,), (1,), 0),
    "offset too far": ((4,), (1,), 1),
    "offset at the end": ((1,), (1,), 4),
    "stride too wide": ((2,), (4,), 0),
    "two dimensions": ((2, 3), (3, 1), 0),
    "a negative size": ((-1,), (1,), 0),
    "two negative sizes": ((-2, -2), (2, 1), 0),
    "a negative stride": ((4,), (-1,), 3),
    "a negative offset": ((2,), (1,), -2),
    "sizes and strides differ in number": ((4,), (1, 1), 0),
    "no strides": ((4,), (), 0),
    "2^61 elements": ((1 << 61,), (1,), 0),
    "2^62 elements": ((1 << 62,), (1,), 0),
    "2^63 elements": ((1 << 63,), (1,), 0),
    "2^32 x 2^32": ((1 << 32, 1 << 32), (1 << 32, 1), 0),
    "2^32 x 2^32 expanded": ((1 << 32, 1 << 32, 2), (0, 0, 4), 0),
    "offset 2^61": ((1,), (1,), 1 << 61),
    "offset 2^62": ((1,), (1,), 1 << 62),
    "offset -2^62": ((1,), (1,), -(1 << 62)),
    "stride 2^61": ((2,), (1 << 61,), 0),
    "stride 2^62": ((2,), (1 << 62,), 0),
    "2,000 dimensions": ((2,) + (1,) * 1999, (4,) + (1,) * 1999, 0),
}


Made = Callable[[Any, Any, int], Code]


def rebuilt(function: str, *arguments: object) -> Code:
    return call(name(UTILS, function), *arguments)


def longs() -> Code:
    """The second storage, as integers."""
    return storage("1", 2, "LongStorage")


def sparse(layout: str, *data: object) -> Code:
    return rebuilt("_rebuild_sparse_tensor", name("torch", layout), data)


def quantized(of: Code, scheme: tuple[object, ...], offset: int, shape: Any, stride: Any) -> Code:
    return rebuilt("_rebuild_qtensor", of, offset, shape, stride, scheme, False, ordered())


HALF = Code(b"G" + struct.pack(">d", 0.5))
AFFINE, BY_CHANNEL = name("torch", "per_tensor_affine"), name("torch", "per_channel_affine")
NJT = name("torch.nested._internal.nested_tensor", "_rebuild_njt")
#: Tensors of a shape, strides and an offset, by every function that rebuilds one.
MADE: dict[str, Made] = {
    "dense": tensor,
    "old": lambda shape, stride, offset: rebuilt("_rebuild_tensor", storage(), offset, shape, stride),
    "third": lambda *view: tensor(
        *view, storage("0", 16, "UntypedStorage"), "_rebuild_tensor_v3", [name("torch", "float32")]
    ),
    "parameter": lambda *view: rebuilt("_rebuild_parameter", tensor(*view), True, ordered()),
    "parameter with a state": lambda *view: rebuilt(
        "_rebuild_parameter_with_state", tensor(*view), True, ordered(), {"a": 1}
    ),
    "quantized": lambda shape, stride, offset: quantized(
        storage("0", 4, "QInt32Storage"), (AFFINE, HALF, 0), offset, shape, stride
    ),
    # Per channel: the scales are a tensor of their own.
    "scales": lambda *view: quantized(
        storage("1", 4, "QInt32Storage"), (BY_CHANNEL, tensor(*view), tensor((1,)), 0), 0, (4,), (1,)
    ),
    "sparse values": lambda *view: sparse("sparse_coo", tensor((1, 2), (2, 1), of=longs()), tensor(*view), (4,), True),
    "sparse indices": lambda *view: sparse("sparse_coo", tensor(*view, longs()), tensor((2,)), (4,), True),
    "sparse CSR": lambda *view: sparse(
        "sparse_csr", tensor((2,), of=longs()), tensor((1,), of=longs()), tensor(*view), (1, 4)
    ),
    "nested": lambda *view: rebuilt(
        "_rebuild_nested_tensor", tensor(*view), *[tensor((1, 1), (1, 1), of=longs()) for _ in range(3)]
    ),
    "nested table": lambda *view: rebuilt("_rebuild_nested_tensor", TENSOR, *[tensor(*view, longs())] * 3),
    "typed": lambda shape, stride, offset: call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        *(name(UTILS, "_rebuild_tensor_v2"), name("torch", "Tensor")),
        *((storage(), offset, shape, stride, False, ordered()), {"a": 1}),
    ),
    "backend": lambda *view: rebuilt(
        "_rebuild_device_tensor_from_cpu_tensor", tensor(*view), name("torch", "float32"), "xla:0", False
    ),
    "jagged": lambda *view: call(NJT, {"_values": tensor(*view)}),
}
STORED = {"0": FLOATS, "1": struct.pack("<2q", 0, 1)}


def findings(report: dict[str, Any]) -> set[str]:
    return notes(report, "error") & {"geometry", "storage-size", "missing-storage"}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("made", MADE)
def test_a_view_that_fits_is_no_flaw(made: str, tmp_path: Path) -> None:
    """Two elements of whatever has room for them: what fails below fails for its geometry."""
    held = STORED | ({"1": struct.pack("<4i", 1, 2, 3, 4)} if made == "scales" else {})
    shape, stride = ((1, 2), (2, 1)) if made == "sparse indices" else ((2,), (1,))
    report = report_of(tmp_path / "seed.pth", plain({"w": MADE[made](shape, stride, 0)}, held))
    assert findings(report) == set()
    assert say("keys", tmp_path / "seed.pth").code == 0


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("view", by_key(WRONG))
def test_impossible_geometry_fails(made: str, view: tuple[Any, Any, int], tmp_path: Path) -> None:
    held = STORED | ({"1": struct.pack("<4i", 1, 2, 3, 4)} if made == "scales" else {})
    report = report_of(tmp_path / "seed.pth", plain({"w": MADE[made](*view)}, held))
    assert (report["status"], "geometry" in findings(report)) == ("invalid", True), notes(report)


# -- storages ---------------------------------------------------------------------------------------------------

STORAGES = {
    "one element too many": storage("0", 5),
    "one element too few": storage("0", 3),
    "a wider class": storage("0", 4, "DoubleStorage"),
    "a narrower class": storage("0", 4, "HalfStorage"),
    "no elements": storage("0", 0),
    "-1 elements": storage("0", -1),
    "2^61 elements": storage("0", 1 << 61),
    "2^62 elements": storage("0", 1 << 62),
    "2^64 elements": storage("0", 1 << 64),
    "elements are text": Code(put(("storage", name("torch", "FloatStorage"), "0", "cpu", "4")) + b"Q"),
    "elements are None": Code(put(("storage", name("torch", "FloatStorage"), "0", "cpu", None)) + b"Q"),
    "a key that is no record": storage("../../version", 4),
    "a class that is none": storage("0", 4, "NoSuchStorage"),
    "a class that is a function": Code(put(("storage", name("posix", "system"), "0", "cpu", 4)) + b"Q"),
    "a place that is no text": Code(put(("storage", name("torch", "FloatStorage"), "0", 7, 4)) + b"Q"),
    "a persistent id of another kind": Code(put(("module", name("torch", "FloatStorage"), "0", "cpu", 4)) + b"Q"),
    "a persistent id too short": Code(put(("storage", "0")) + b"Q"),
    "no tuple": Code(put("0") + b"Q"),
    "no storage at all": Code(b"N"),
}


@pytest.mark.parametrize("held", by_key(STORAGES))
def test_a_storage_that_cannot_be_fails(held: Code, tmp_path: Path) -> None:
    path = tmp_path / "seed.pth"
    report = report_of(path, plain({"w": tensor(of=held)}))
    assert report["status"] == "invalid", notes(report)
    with pytest.raises(Exception):  # noqa: B017 - a dozen kinds
        torch.load(path, weights_only=True)


def test_what_torch_maps_without_a_look(tmp_path: Path) -> None:
    """2^61 elements: refused by torch.load, taken by its mmap path."""
    path = tmp_path / "seed.pth"
    report = report_of(path, plain({"w": tensor(of=storage("0", 1 << 61))}))
    assert {"sizes"} <= set(with_status(report, "fail"))
    with pytest.raises(RuntimeError):
        torch.load(path, weights_only=True)
    assert torch.load(path, weights_only=True, mmap=True)["w"].shape == (4,)


# -- arguments of the wrong kind --------------------------------------------------------------------------------


def with_arguments(*arguments: object) -> Code:
    return call(name(UTILS, "_rebuild_tensor_v2"), *arguments)


NONSENSE = {
    "the shape is text": with_arguments(storage(), 0, "4", (1,), False, ordered()),
    "the shape holds text": with_arguments(storage(), 0, ("4",), (1,), False, ordered()),
    "the shape is None": with_arguments(storage(), 0, None, (1,), False, ordered()),
    "the offset is text": with_arguments(storage(), "0", (4,), (1,), False, ordered()),
    "the strides hold None": with_arguments(storage(), 0, (4,), (None,), False, ordered()),
    "two arguments": with_arguments(storage(), 0),
    "no arguments": with_arguments(),
}


@pytest.mark.parametrize("value", by_key(NONSENSE))
def test_arguments_that_make_no_tensor_fail(value: Code, tmp_path: Path) -> None:
    path = tmp_path / "seed.pth"
    report = report_of(path, plain({"w": value, "v": TENSOR}))
    with pytest.raises(Exception):  # noqa: B017 - a dozen kinds
        torch.load(path, weights_only=True)
    assert report["status"] == "invalid", notes(report)


# -- where a tensor may hide ------------------------------------------------------------------------------------

BAD = tensor((5,))
#: The arguments of a good tensor before its hooks.
VIEW = (storage(), 0, (4,), (1,), False)
PLACES = {
    "the root": BAD,
    "a dict": {"w": BAD},
    "a dict without text keys": {1: BAD},
    "a list": [BAD],
    "a tuple": (1, BAD),
    "a list in a list": [[[BAD]]],
    "a key": Code(b"}(" + BAD.raw + b"K\x01u"),
    "a set": Code(b"\x8f(" + BAD.raw + b"\x90"),
    "a frozenset": Code(b"(" + BAD.raw + b"\x91"),
    "OrderedDict's arguments": call(name("collections", "OrderedDict"), [["w", BAD]]),
    "a state": Code(ordered().raw + put({"_metadata": {"w": BAD}}) + b"b"),
    "the state of an unknown object": Code(name("who", "Knows").raw + b")\x81" + put({"w": BAD}) + b"b"),
    "the arguments of an unknown call": call(name("who", "knows"), BAD),
    "the arguments of an unknown object": Code(name("who", "Knows").raw + put((BAD,)) + b"\x81"),
    "what is popped": Code(BAD.raw + b"0N"),
    "backward hooks": with_arguments(*VIEW, call(name("collections", "OrderedDict"), [["w", BAD]])),
    "metadata": with_arguments(*VIEW, ordered(), {"w": BAD}),
}


@pytest.mark.parametrize("value", by_key(PLACES))
def test_impossible_geometry_is_found_wherever_it_hides(value: Code, tmp_path: Path) -> None:
    report = report_of(tmp_path / "seed.pth", plain(pickled=b"\x80\x04" + put(value) + b"."))
    assert (report["status"], "geometry" in findings(report)) == ("invalid", True), notes(report)


def test_impossible_geometry_in_a_legacy_file(tmp_path: Path) -> None:
    held = Code(put(("storage", name("torch", "FloatStorage"), "0", "cpu", 4, None)) + b"Q")
    report = report_of(tmp_path / "seed.pth", legacy({"w": tensor((5,), of=held)}))
    assert findings(report) == {"geometry"}


VIEWS = {
    "it begins at the end": (("9", 4, 4), 1),
    "it begins far outside": (("9", 1 << 61, 1), 1),
    "it begins before its base": (("9", -1, 2), 1),
    "the tensor is larger than the view": (("9", 1, 1), 2),
}


@pytest.mark.parametrize("case", by_key(VIEWS))
def test_a_legacy_view_must_lie_in_its_base(case: tuple[tuple[str, int, int], int], tmp_path: Path) -> None:
    view, size = case
    held = Code(put(("storage", name("torch", "FloatStorage"), "0", "cpu", 4, view)) + b"Q")
    path = tmp_path / "seed.pth"
    report = report_of(path, legacy({"w": tensor((size,), of=held)}))
    with pytest.raises(Exception):  # noqa: B017 - a dozen kinds
        torch.load(path, weights_only=True)
    assert report["status"] == "invalid", notes(report)


# -- what is legal ----------------------------------------------------------------------------------------------


LEGAL = {
    "an expanded view of 4 PiB": archive(torch.ones(1).expand(1 << 25, 1 << 25)),
    "an empty view far outside": plain({"w": tensor((0, 9), (9, 1), 0)}),
    "an empty view with an offset at the end": plain({"w": tensor((0,), (1,), 4)}),
    "a scalar": archive(torch.tensor(2.0)),
    "overlapping strides": archive(torch.arange(5.0).as_strided((3, 3), (1, 1))),
    "meta, however large": archive(torch.empty(1 << 40, device="meta")),
}


@pytest.mark.parametrize("data", LEGAL.values(), ids=LEGAL.keys())
def test_legal_geometry_passes(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "seed.pth"
    report = report_of(path, data)
    assert (report["status"], findings(report)) == ("valid", set())
    torch.load(path, weights_only=True)
