"""What a pickle means to torch: the same to ckptool, or refused. The oracle is torch.load(weights_only=True)."""

from __future__ import annotations

import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import examples
from crafted_files import Code, call, name, plain, put, storage, tensor
from crafted_files import ordered as empty
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import load
from safetensors.torch import load_file

import ckptool
from ckptool.base.errors import CkptoolError, RefusedError, UnreadableError

FLOATS, NINES = struct.pack("<4f", 1, 2, 3, 4), struct.pack("<4f", 9, 9, 9, 9)
STORED = {"0": FLOATS, "1": NINES}
GIVEN = settings(max_examples=examples(60))


def ordered(*pairs: tuple[Any, Any]) -> Code:
    """An OrderedDict that is filled after it was made."""
    flat = (part for pair in pairs for part in pair)
    return raw(empty(), b"(", *flat, b"u") if pairs else empty()


def written(path: Path, thing: Any, stored: dict[str, bytes] = STORED) -> Path:
    path.write_bytes(plain(thing, stored))
    return path


def raw(*parts: Any) -> Code:
    return Code(b"".join(part if isinstance(part, bytes) else put(part) for part in parts))


def takes(path: Path) -> tuple[str, str]:
    """The status, and that of the check weights-only."""
    report = ckptool.validate(path)
    return report["status"], next(check["status"] for check in report["checks"] if check["name"] == "weights-only")


def loads(path: Path) -> bool:
    try:
        load(path)
    except Exception:
        return False
    return True


# -- values -----------------------------------------------------------------------------------------------------

A, B = tensor((4,)), tensor((4,), of=storage("1"))
TENSOR = "torch._utils"
BUILDS: dict[str, Code] = {
    "set_(storage, offset, size, stride)": raw(A, (storage("1"), 0, (4,), (1,)), b"b"),
    "set_(tensor)": raw(A, (B,), b"b"),
    "twice": raw(A, (storage("1"), 0, (4,), (1,)), b"b", (storage("0"), 0, (4,), (1,)), b"b"),
    "a parameter": raw(call(name("torch.nn.parameter", "Parameter"), A, False), (storage("1"), 0, (4,), (1,)), b"b"),
    "a parameter by five": raw(
        call(name("torch.nn.parameter", "Parameter"), A, False), (B, None, ordered(), False, None), b"b"
    ),
    "data as an attribute": call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("torch._utils", "_rebuild_tensor_v2"),
        name("torch", "Tensor"),
        (storage(), 0, (4,), (1,), False, ordered()),
        {"data": B},
    ),
    "data as an attribute of a parameter": call(
        name("torch._utils", "_rebuild_parameter_with_state"), A, False, ordered(), {"data": B}
    ),
}


@pytest.mark.parametrize("made", BUILDS.values(), ids=BUILDS.keys())
def test_a_tensor_that_is_changed_after_it_was_made_is_refused(made: Code, tmp_path: Path) -> None:
    path = written(tmp_path / "a.pth", ordered(("a", made)))
    assert load(path)["a"].tolist() == [9, 9, 9, 9] or made is BUILDS["twice"]
    assert takes(path) == ("invalid", "not possible")
    with ckptool.open(path) as checkpoint:
        for command in (ckptool.repack, ckptool.strip_module, lambda found: found.survey):
            with pytest.raises(UnreadableError, match="does not follow"):
                command(checkpoint)
    for report in (ckptool.keys, ckptool.hash, ckptool.lock, lambda found: ckptool.get(found, "")):
        with pytest.raises(UnreadableError, match="does not follow"):
            report(path)


IDS: dict[str, Any] = {
    "a location of bytes": (name("torch", "FloatStorage"), "1", call(name("_codecs", "encode"), "cpu", "latin1"), 4),
    "no location": (name("torch", "FloatStorage"), "1", None, 4),
    "a device as location": (name("torch", "FloatStorage"), "1", call(name("torch", "device"), "cpu"), 4),
    "a number as location": (name("torch", "FloatStorage"), "1", 7, 4),
    "as many as true": (name("torch", "FloatStorage"), "1", "cpu", True),
    "0 beside '0'": (name("torch", "FloatStorage"), 0, "cpu", 4),
}


@pytest.mark.parametrize("parts", IDS.values(), ids=IDS.keys())
@pytest.mark.parametrize(
    "kind", ["storage", call(name("_codecs", "encode"), "storage", "latin1")], ids=["text", "bytes"]
)
def test_storages_that_cannot_be_read_are_never_unused(parts: Any, kind: Any, tmp_path: Path) -> None:
    size = 1 if parts[3] is True else 4
    made = call(name(TENSOR, "_rebuild_tensor_v2"), raw((kind, *parts), b"Q"), 0, (size,), (1,), False, ordered())
    path = written(tmp_path / "a.pth", {"a": A, "b": made}, {"0": FLOATS, "1": NINES[: 4 * size]})
    assert loads(path)
    for edit in (ckptool.repack, lambda found: ckptool.keep(found, ["a"]), lambda found: ckptool.remap(found, "cpu")):
        with pytest.raises(CkptoolError), ckptool.open(path) as checkpoint:
            ckptool.save(edit(checkpoint), tmp_path / "out.pth")
    assert takes(path)[0] == "invalid"


@pytest.mark.parametrize("other", [("ByteStorage", 4), ("FloatStorage", 1), ("DoubleStorage", 2)])
def test_the_description_that_torch_takes_is_not_left_out(other: tuple[str, int], tmp_path: Path) -> None:
    """Of a storage that is described in two ways the first counts: without it the file would hold another one."""
    cls, numel = other
    second = call(
        name(TENSOR, "_rebuild_tensor_v2"),
        raw(("storage", name("torch", cls), "0", "cpu", numel), b"Q"),
        *(0, (1,), (1,), False, ordered()),
    )
    path, out = written(tmp_path / "a.pth", {"a": A, "b": second}, {"0": FLOATS}), tmp_path / "out.pth"
    assert loads(path)
    with ckptool.open(path) as checkpoint:
        with pytest.raises(RefusedError, match="described in two ways"):
            ckptool.drop(checkpoint, ["a"])
        ckptool.save(ckptool.drop(checkpoint, ["b"]), out)
    assert load(out)["a"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("parts", [5, 6])
def test_ids_of_shards_are_those_of_their_format(parts: int, tmp_path: Path) -> None:
    """Six values are for legacy files; torch refuses them in a zip, also where a pickle throws them away."""
    path = tmp_path / "pytorch_model.bin"
    id_of = raw(("storage", name("torch", "FloatStorage"), "0", "cpu", 4, None)[:parts], b"Q")
    made = call(name("torch._utils", "_rebuild_tensor_v2"), id_of, 0, (4,), (1,), False, ordered())
    for thing in ({"a": made}, raw(id_of, b"0", {"a": tensor((4,))})):
        path.write_bytes(plain(thing, {"0": struct.pack("<4f", 1, 2, 3, 4)}))
        assert (ckptool.validate(tmp_path)["status"] == "valid") is (parts == 5)


@pytest.mark.parametrize("flags", [{"neg": False}, {"neg": True}, {"neg": 1}, {"neg": None}, {"other": True}, {}])
def test_a_flag_of_a_tensor_counts_by_being_there(flags: dict[str, Any], tmp_path: Path) -> None:
    made = call(name(TENSOR, "_rebuild_tensor_v2"), storage(), 0, (4,), (1,), False, empty(), flags)
    path, out = written(tmp_path / "a.pth", {"a": made}, {"0": FLOATS}), tmp_path / "out.pth"
    wanted = load(path)["a"].tolist()
    assert takes(path) == ("valid", "pass")
    assert ckptool.get(path, "a").tolist() == wanted
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "safetensors", allow_loss=["all"]), out.with_suffix(".safetensors"))
    assert load_file(out.with_suffix(".safetensors"))["a"].tolist() == wanted
    plain_one = written(tmp_path / "b.pth", {"a": A}, {"0": FLOATS})
    assert (ckptool.hash(path)["content"] == ckptool.hash(plain_one)["content"]) is (wanted == [1, 2, 3, 4])


ONE = Code(b"G" + struct.pack(">d", 1.0))
KEYS = st.sampled_from(["a", "b", "module.c", 1, True, 0, None, ONE, (1, 2), (1, "x")])
PAIRS = st.lists(st.tuples(KEYS, st.sampled_from([A, B, 5, "x"])), max_size=4)


def listed(pairs: list[tuple[Any, Any]], form: str) -> Any:
    if form == "dict":
        return raw(b"}(", *(part for pair in pairs for part in pair), b"u")
    if form == "OrderedDict":
        return ordered(*pairs)
    couples = [list(pair) if form[-1] == "s" else pair for pair in pairs]
    return couples if form.startswith("list") else tuple(couples)


FORMS = ["dict", "OrderedDict", "list", "lists", "tuple", "tuples", "characters", "set"]


@GIVEN
@given(
    pairs=PAIRS,
    more=PAIRS,
    form=st.sampled_from(FORMS),
    cls=st.sampled_from(["OrderedDict", "Counter"]),
    new=st.booleans(),
    late=st.booleans(),
    built=st.booleans(),
    levels=st.integers(0, 4),
)
def test_a_mapping_of_a_mapping_is_what_torch_makes_or_refused(
    tmp_path: Path, pairs: Any, more: Any, form: str, cls: str, new: bool, late: bool, built: bool, levels: int
) -> None:
    source = ["ab", "cd"] if form == "characters" else raw(b"c__builtin__\nset\n", (["ab"],), b"R")
    source = listed(pairs, form) if form not in ("characters", "set") else source
    for _ in range(levels):
        source = raw(name("collections", cls), (source,), b"R", b"(", "inner", A, b"u")
    made = raw(name("collections", cls), (source,), b"\x81" if new else b"R")
    if more:
        made = raw(made, b"(", *(part for pair in more for part in pair), b"u")
    if built:
        made = raw(made, {"_metadata": ordered()}, b"b")
    whole: Any = made
    if late and not levels and form in ("list", "lists", "dict"):
        # The argument is filled once more, after the call has copied it.
        again = raw(b"h\xfe", put("late"), put(1), b"s") if form == "dict" else raw(b"h\xfe", ["late", 1], b"a")
        whole = raw(b"]", name("collections", cls), source, b"q\xfe\x85", b"\x81" if new else b"R", b"a", again, b"a")
    path = written(tmp_path / "a.pth", whole)
    try:
        theirs = load(path)
    except Exception:
        assert takes(path)[1] != "pass"
        return
    try:
        ours = ckptool.get(path, "")
    except CkptoolError:
        assert takes(path)[1] != "pass"
        return
    assert takes(path)[1] == "pass"
    assert plainly(ours) == plainly(theirs)


def test_a_mapping_of_mappings_is_read(tmp_path: Path) -> None:
    made: Any = {"a": A}
    for key in ("b", "c"):
        made = raw(name("collections", "OrderedDict"), (made,), b"R(", put(key), B, b"u")
    path, out = written(tmp_path / "a.pth", made), tmp_path / "out.pth"
    with ckptool.open(path) as checkpoint:
        assert list(checkpoint) == ["a", "b", "c"]
        ckptool.save(ckptool.add_module(checkpoint), out)
    assert [key for key, _ in plainly(load(out))] == [repr(f"module.{key}") for key in "abc"]


def plainly(value: Any) -> Any:
    if isinstance(value, dict):
        return [(repr(key), plainly(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [plainly(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


@GIVEN
@given(pairs=st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from([A, B])), min_size=1, max_size=5))
def test_edits_of_repeated_keys_keep_what_torch_sees(tmp_path: Path, pairs: Any) -> None:
    path, out = written(tmp_path / "a.pth", listed(pairs, "dict")), tmp_path / "out.pth"
    theirs = load(path)
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.add_module(checkpoint, "p."), out, force=True)
        assert plainly(load(out)) == plainly({f"p.{key}": value for key, value in theirs.items()})
    if len(theirs) > 1:
        first = next(iter(theirs))
        with ckptool.open(path) as checkpoint:
            ckptool.save(ckptool.drop(checkpoint, [first]), out, force=True)
            assert plainly(load(out)) == plainly({key: value for key, value in theirs.items() if key != first})


# -- arguments --------------------------------------------------------------------------------------------------

ODD = st.sampled_from(
    [
        *(None, True, False, 0, 1, 4, -1, 1 << 63, "", "cpu", "cuda:-1", "latin1"),
        *((), (4,), (1,), (-4,), (4, 4), [4], {}, {"a": 1}),
    ]
)
UNTYPED = raw(("storage", name("torch.storage", "UntypedStorage"), "0", "cpu", 16), b"Q")
CALLS = {
    "v2": (TENSOR, "_rebuild_tensor_v2", (storage(), 0, (4,), (1,), False, ordered())),
    "v3": (*(TENSOR, "_rebuild_tensor_v3"), (UNTYPED, 0, (4,), (1,), False, ordered(), name("torch", "float32"))),
    "parameter": (TENSOR, "_rebuild_parameter", (A, True, ordered())),
    "with state": (TENSOR, "_rebuild_parameter_with_state", (A, True, ordered(), {"a": 1})),
    "Parameter": ("torch.nn.parameter", "Parameter", (A, False)),
    "typed": (
        *("torch._tensor", "_rebuild_from_type_v2"),
        (name(TENSOR, "_rebuild_tensor_v2"), name("torch", "Tensor"), (storage(), 0, (4,), (1,), False, ordered()), {}),
    ),
    "meta": (TENSOR, "_rebuild_meta_tensor_no_storage", (name("torch", "float32"), (4,), (1,), False)),
    "Size": ("torch", "Size", ((1, 2),)),
    "device": ("torch", "device", ("cuda", 1)),
    "layout": ("torch.serialization", "_get_layout", ("torch.strided",)),
    "encode": ("_codecs", "encode", ("x", "latin1")),
    "bytearray": ("__builtin__", "bytearray", ("x", "latin1")),
    "set": ("__builtin__", "set", ([1, 2],)),
    "complex": ("__builtin__", "complex", (1, 2)),
}


#: The arguments, by place, that are checked: metadata, states, and what Python itself takes are not.
CHECKED = {"v2": 5, "parameter": 2, "Parameter": 2, "typed": 2, "Size": 1, "device": 2, "layout": 1}


@settings(max_examples=examples(150))
@given(data=st.data())
def test_arguments_are_those_that_torch_takes(tmp_path: Path, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(CALLS)))
    module, function, arguments = CALLS[kind]
    changed = list(arguments)
    how = data.draw(st.sampled_from(["none", "change", "remove"])) if kind in CHECKED else "none"
    if how != "none":
        place = data.draw(st.integers(0, CHECKED[kind] - 1))
        changed[place : place + 1] = [data.draw(ODD)] if how == "change" else []
    path = written(tmp_path / "a.pth", {"a": raw(name(module, function), tuple(changed), b"R")})
    if takes(path)[1] == "pass":
        load(path)
    elif how == "none":
        raise AssertionError("what torch itself writes is refused")


def test_requires_grad_of_old_parameters_is_that_of_their_state(tmp_path: Path) -> None:
    made = raw(call(name("torch.nn.parameter", "Parameter"), A), (False, False, ordered()), b"b")
    path = written(tmp_path / "a.pth", {"a": made})
    assert load(path)["a"].requires_grad is False
    assert takes(path) == ("valid", "pass")
    with ckptool.open(path) as checkpoint:
        assert [entry.tensor.requires_grad for entry in checkpoint.survey.tensors] == [False]


def test_nested_tensors_of_legacy_files_are_refused(tmp_path: Path) -> None:
    """``_legacy_load`` fills the storages last; the sizes of a nested tensor are in one."""
    value = {"n": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)])}
    for file, legacy, status in (("zip.pth", False, "valid"), ("legacy.pth", True, "invalid")):
        torch.save(value, tmp_path / file, _use_new_zipfile_serialization=not legacy)
        assert ckptool.validate(tmp_path / file)["status"] == status


#: What has members, and what has not.
MEMBERS: list[Any] = [[1, 2], (1, 2), {1}, frozenset([1]), b"ab", b"", bytearray(b"ab"), bytearray(), {}, {1: 2}]
MEMBERS += [{"a": 1}, "", "ab", set(), {"a"}, {(1,)}, OrderedDict(), OrderedDict({1: 2}), torch.Size([3]), [True]]
MEMBERS += [[1 << 63], None, 1.5, [None], [1.5], [-(1 << 70)]]


@pytest.mark.parametrize("members", MEMBERS, ids=repr)
def test_a_size_takes_numbers(members: Any, tmp_path: Path) -> None:
    class Size:
        def __reduce__(self) -> Any:
            return torch.Size, (members,)

    path = tmp_path / "size.pth"
    torch.save({"a": Size()}, path)
    report = ckptool.inspect(path)["weights_only"]
    assert loads(path) or not report["loads"]
    if isinstance(members, list | tuple) and all(type(item) is int for item in members):
        assert report["loads"]


@pytest.mark.parametrize("dtype", ["float16", "int64", "bool", "float32"])
def test_a_tensor_that_is_cast_when_it_is_read_is_not_followed(dtype: str, tmp_path: Path) -> None:
    function = name("torch._utils", "_rebuild_device_tensor_from_cpu_tensor")
    made = call(function, tensor(), name("torch", dtype), "cpu", False)
    path = tmp_path / "moved.pth"
    path.write_bytes(plain({"w": made}, {"0": bytes(16)}))
    assert str(torch.load(path)["w"].dtype) == f"torch.{dtype}"
    assert (ckptool.validate(path)["status"] == "valid") == (dtype == "float32")
