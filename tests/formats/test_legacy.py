"""The legacy format as torch reads it: keys, views, lists of storages and heads, against ``torch.load``."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import difference

import ckptool
from ckptool.base.errors import CkptoolError

MAGIC = 0x1950A86A20F9469CFC6C
_SEEDS = {torch.FloatStorage: "f", torch.ShortStorage: "h", torch.DoubleStorage: "d"}


class Id(NamedTuple):
    """What the pickler writes as a persistent id: the tuple ``parts``."""

    parts: tuple[Any, ...]


class Tensor(NamedTuple):
    """A tensor over the storage of an id."""

    id: Id
    shape: tuple[int, ...]
    offset: int = 0


class _Call:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> object:
        strides, step = [], 1
        for size in reversed(self.tensor.shape):
            strides.insert(0, step)
            step *= size
        holder = _Holder(self.tensor.id)
        args = (holder, self.tensor.offset, self.tensor.shape, tuple(strides), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, args


class _Holder:
    def __init__(self, id: Id) -> None:
        self.id = id


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> object:
        return obj.id.parts if isinstance(obj, _Holder) else None


def dumped(value: object, protocol: int = 2) -> bytes:
    out = io.BytesIO()
    _Pickler(out, protocol=protocol).dump(value)
    return out.getvalue()


def storage(
    key: object, numel: object = 8, view: object = None, cls: Any = torch.FloatStorage, at: object = "cpu"
) -> Id:
    return Id(("storage", cls, key, at, numel, view))


def legacy(
    tensors: dict[Any, Tensor | Id],
    keys: object,
    bodies: list[tuple[str, int]],
    magic: object = MAGIC,
    version: object = 1001,
    info: object = None,
) -> bytes:
    """A file: ``bodies`` are (code of struct, number of elements), which are 0, 1, 2 ..., one series for all."""
    state = {key: _Holder(value) if isinstance(value, Id) else _Call(value) for key, value in tensors.items()}
    data = b"".join(map(dumped, (magic, version, info if info is not None else {}, state, keys)))
    first = 0
    for code, count in bodies:
        data += struct.pack(f"<q{count}{code}", count, *range(first, first + count))
        first += count
    return data


def by_torch(path: Path, weights_only: bool = True) -> Any:
    """What torch loads, None where it does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(path, weights_only=weights_only)
        except Exception:
            return None


def takes(path: Path) -> bool:
    """Does validate say that the file is whole and that weights_only takes it?"""
    report = ckptool.validate(path)
    return report["valid"] and all(
        check["status"] == "pass" for check in report["checks"] if check["name"] == "weights-only"
    )


def agree(path: Path) -> None:
    """What validate takes torch loads in both modes, and ``get`` gives the same values."""
    if not takes(path):
        return
    loaded = by_torch(path)
    assert loaded is not None
    assert not difference(loaded, by_torch(path, False))
    for name, value in loaded.items():
        if isinstance(value, torch.Tensor):
            assert ckptool.get(path, f"[{name!r}]" if not isinstance(name, str) else name).tolist() == value.tolist()


_KEYS: Any = st.sampled_from(("0", "1", 0, "v"))
_SIZES = st.sampled_from((8, 8, 8, 4, 0))


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Files that are nearly right: keys of two kinds, views, sizes and lists that may disagree."""
    tensors: dict[Any, Tensor | Id] = {}
    sizes: dict[object, tuple[Any, int]] = {}
    odd = draw(st.integers(0, 2)) == 0
    for name in "abcd"[: draw(st.integers(1, 4))]:
        key = draw(_KEYS) if odd else draw(st.sampled_from(("0", "1")))
        cls = draw(st.sampled_from(tuple(_SEEDS))) if odd else torch.FloatStorage
        known, numel = sizes.get(key, (cls, draw(_SIZES)))
        if not odd or draw(st.booleans()):
            cls = known
        if odd and not draw(st.integers(0, 3)):
            numel = draw(_SIZES)
        sizes.setdefault(key, (cls, numel))
        view = None
        if draw(st.booleans()):
            begin, size = draw(st.sampled_from(((0, 4), (4, 4), (2, 2), (0, 8), (6, 4)) if odd else ((0, 4), (2, 2))))
            view = (draw(st.sampled_from(("v", "w", 7, "0") if odd else ("v", "w"))), begin, size)
        place: object = draw(st.sampled_from(("cpu", "cpu", "cpu", b"cpu", None, 7))) if odd else "cpu"
        made = storage(key, numel, view, cls, place)
        if odd and not draw(st.integers(0, 5)):
            parts = (*made.parts[:5], *made.parts[5:] * draw(st.integers(0, 2)))
            made = Id(draw(st.sampled_from((parts, (b"storage", *parts[1:]), ("other", *parts[1:]), parts[:3]))))
        tensors[name] = Tensor(made, (draw(st.sampled_from((0, 1, 2, 4))),), draw(st.sampled_from((0, 0, 1, 4))))
    keys: Any = sorted(sizes, key=str)
    if odd and draw(st.booleans()):
        keys = draw(st.sampled_from((keys[1:], keys * 2, ["0"], [0], tuple(keys), None, "0", 5, [None], ["v", *keys])))
    listed = [key for key in keys if key in sizes] if isinstance(keys, list | tuple) else []
    bodies = [(_SEEDS[sizes[key][0]], sizes[key][1]) for key in listed]
    return legacy(tensors, keys, bodies) + draw(st.sampled_from((b"", b"", b"more", b"\0" * 600)))


@settings(max_examples=examples(150))
@given(files())
def test_what_is_valid_torch_loads_with_the_same_values(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("legacy") / "f.pth"
    path.write_bytes(data)
    agree(path)


@pytest.mark.parametrize("root", [torch.ShortStorage, torch.FloatStorage])
def test_a_view_of_another_class_than_its_storage_is_not_valid(root: Any, tmp_path: Path) -> None:
    """To torch it has the dtype of its own class."""
    other = torch.FloatStorage if root is torch.ShortStorage else torch.ShortStorage
    ids = {"a": storage("0", 8, None, root), "b": storage("0", 8, ("v", 4, 4), other)}
    path = tmp_path / "f.pth"
    path.write_bytes(legacy({key: Tensor(id, (2,)) for key, id in ids.items()}, ["0"], [(_SEEDS[root], 8)]))
    assert not takes(path)
    with ckptool.open(path) as checkpoint, pytest.raises(CkptoolError, match="no version of torch writes"):
        ckptool.add_module(checkpoint, "m.")


@pytest.mark.parametrize("name", ["drop", "add"])
def test_views_of_one_key_are_not_edited_in_their_format(name: str, tmp_path: Path) -> None:
    """Without the first of them the second would count."""
    views = {"a": storage("0", 8, ("v", 0, 4)), "b": storage("0", 8, ("v", 4, 4))}
    path = tmp_path / "f.pth"
    path.write_bytes(legacy({key: Tensor(id, (4,)) for key, id in views.items()}, ["0"], [("f", 8)]))
    assert ckptool.get(path, "b").tolist() == by_torch(path)["b"].tolist() == [0, 1, 2, 3]
    with ckptool.open(path) as checkpoint:
        edited = ckptool.drop(checkpoint, ["a"]) if name == "drop" else ckptool.add_module(checkpoint, "m.")
        with pytest.raises(CkptoolError, match="share a key"):
            ckptool.save(edited, tmp_path / "out.pth")


@pytest.mark.parametrize(
    "parts",
    [
        {"magic": MAGIC + 1},
        {"magic": "x"},
        {"version": 1000},
        {"version": 1001.0},
        {"version": "1001"},
        {"info": _Holder(storage("0"))},
        {"info": [1, None, 2.5]},
        {"magic": _Holder(storage("0"))},
    ],
)
def test_heads(parts: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "f.pth"
    path.write_bytes(legacy({"a": Tensor(storage("0"), (4,))}, ["0"], [("f", 8)], **parts))
    assert takes(path) == (by_torch(path) is not None)


def test_a_zip_behind_a_legacy_file_is_ambiguous(tmp_path: Path) -> None:
    """zipfile, and transformers with it, takes the file for a zip archive."""
    torch.save({"b": torch.ones(2)}, tmp_path / "zip.pth")
    path = tmp_path / "f.pth"
    path.write_bytes(legacy({"a": Tensor(storage("0"), (4,))}, ["0"], [("f", 8)]) + (tmp_path / "zip.pth").read_bytes())
    assert by_torch(path) is not None
    assert not ckptool.validate(path)["valid"]


# -- strings of Python 2 -----------------------------------------------------------------------------------


def _strings(path: Path, values: list[tuple[str, bytes]], zipped: bool) -> None:
    """A checkpoint of a dict with these strings as its keys and values, by the opcodes of Python 2."""
    spelled = []
    for code, data in values:
        if code == "U":
            spelled.append(b"U%c%b" % (len(data), data))
        elif code == "T":
            spelled.append(b"T" + struct.pack("<i", len(data)) + data)
        else:
            spelled.append(b"S%b\n" % repr(data)[1:].encode())
    body = b"\x80\x02}(" + b"".join(word + b"K\x01" for word in spelled) + b"X\x04\0\0\0list]("
    body += b"".join(spelled) + b"eu."
    if not zipped:
        path.write_bytes(dumped(MAGIC) + dumped(1001) + dumped({}) + body + dumped([]))
        return
    torch.save({}, path)
    with zipfile.ZipFile(path) as seed:
        parts = {info.filename: seed.read(info) for info in seed.infolist()}
    with zipfile.ZipFile(path, "w") as out:
        for name, data in parts.items():
            out.writestr(name, body if name.endswith("data.pkl") else data)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


_BYTES = st.one_of(st.text(max_size=4).map(lambda text: text.encode("utf-8", "surrogatepass")), st.binary(max_size=5))


@settings(max_examples=examples(40))
@given(
    st.lists(
        st.tuples(st.sampled_from("UUUTS"), _BYTES),
        min_size=1,
        max_size=3,
        unique_by=lambda item: item[1].decode("latin-1"),
    ),
    st.booleans(),
)
def test_strings_of_python_2(
    tmp_path_factory: pytest.TempPathFactory, values: list[tuple[str, bytes]], zipped: bool
) -> None:
    """Torch decodes them strictly in both modes; ``sanitize`` makes text of what is not UTF-8."""
    path = tmp_path_factory.mktemp("py2") / "f.pth"
    _strings(path, values, zipped)
    assert takes(path) == (by_torch(path) is not None)
    if by_torch(path, False) is None:
        assert "UnicodeDecodeError" in str(ckptool.validate(path)["checks"])
    texts = {_text(data) for _, data in values}
    if len(texts) < len(values):
        return  # two keys that would become one
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.sanitize(checkpoint), path.with_name("plain.pth"))
    assert by_torch(path.with_name("plain.pth")) is not None


# -- a legacy module laid out anew as a zip --------------------------------------------------------------------
# The persistent ids of the legacy format, such as ('module', ...), are unknown to the zip format.


def test_a_legacy_module_loads_after_a_cast(tmp_path: Path) -> None:
    old, new = tmp_path / "old.pth", tmp_path / "new.pth"
    module = torch.nn.Linear(3, 2)
    torch.save(module, old, _use_new_zipfile_serialization=False)
    with ckptool.open(old) as checkpoint:
        ckptool.save(ckptool.cast(checkpoint, "float64"), new)
    loaded = torch.load(new, weights_only=False)
    assert torch.equal(loaded.weight, module.weight.double())
