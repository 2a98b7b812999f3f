"""torch.export archives, torch.package and the TorchScript of torch 1.0: their weights are those that torch gives."""

from __future__ import annotations

import io
import json
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from conftest import CORPUS, FIXTURES, needs_corpus
from torch import nn
from zip_copies import rewritten

import ckptool
from ckptool.base.errors import CkptoolError, MalformedError, RefusedError


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def converted(path: Path, out: Path, **options: Any) -> Any:
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch", allow_loss=["entries"], **options), out)
    return torch.load(out, weights_only=True)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].stride() == tensor.stride(), name
        assert found[name].shape == tensor.shape and raw(found[name]) == raw(tensor), name


# -- torch.export -------------------------------------------------------------------------------------


class Exported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.register_buffer("gone", torch.ones(3), persistent=False)
        self.register_buffer("short", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("scalar", torch.tensor(7))
        self.register_buffer("eight", torch.arange(4.0).to(torch.float8_e4m3fn))
        self.register_buffer("view", torch.arange(10.0)[2:6])
        self.register_buffer("wave", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.constant = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(4, device=torch.device("cpu"))
        return self.b(self.a(x)) + self.gone.sum() + self.constant + self.turned.sum() + self.view + zeros


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "x.pt2"
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(Exported(), (torch.ones(1, 4),)), str(path))
    return path


def test_export_gives_the_state_dict(exported: Path, tmp_path: Path) -> None:
    program = torch.export.load(str(exported))
    found = converted(exported, tmp_path / "w.pth")
    same(found, program.state_dict)
    assert found["a.weight"].untyped_storage().data_ptr() == found["b.weight"].untyped_storage().data_ptr()
    rows = ckptool.keys(exported)["tensors"]
    assert [(row["key"], row["dtype"]) for row in rows] == [
        (key, dtype_of(value)) for key, value in program.state_dict.items()
    ]
    report = ckptool.inspect(exported)
    assert report["format"] == "pt2" and report["writer"].startswith(f"torch {torch.__version__}")
    assert set(report["program"]["constants"]) == set(program.constants)
    assert report["program"]["parameters"] == 4


def old_export(path: Path, state: dict[str, torch.Tensor], name: str = "serialized_state_dict.pt") -> Path:
    """As torch.export.save wrote it before torch 2.8: a plain zip without a folder."""
    data = io.BytesIO()
    torch.save(state, data)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("version", "8.1")
        archive.writestr("serialized_exported_program.json", '{"torch_version": "2.5.1", "graph_module": {}}')
        archive.writestr(name, data.getvalue())
        archive.writestr("serialized_constants.pt", data.getvalue())
        archive.writestr("serialized_example_inputs.pt", data.getvalue())
    return path


@pytest.mark.parametrize("name", ["serialized_state_dict.pt", "serialized_state_dict.json"])
def test_old_exports(name: str, tmp_path: Path) -> None:
    layer = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state = dict(layer.state_dict())
    path = old_export(tmp_path / "old.pt2", state, name)
    assert [row["key"] for row in ckptool.keys(path)["tensors"]] == list(state)
    assert ckptool.inspect(path)["writer"].startswith("torch 2.5.1")
    same(converted(path, tmp_path / "w.pth"), state)


def test_pickled_weights_of_an_export(exported: Path, tmp_path: Path) -> None:
    """Tensors of subclasses stand in the archive as files of torch.save."""
    value = torch.arange(5.0)
    data = io.BytesIO()
    torch.save(value, data)

    def change(name: str, old: bytes) -> bytes:
        if name == "data/weights/weight_1":
            return data.getvalue()
        if name.endswith("weights_config.json"):
            config = json.loads(old)
            for meta in config["config"].values():
                meta["use_pickle"] = meta["path_name"] == "weight_1"
            return json.dumps(config).encode()
        return old

    path = rewritten(exported, tmp_path / "p.pt2", change)
    expected = torch.export.load(str(exported)).state_dict
    found = converted(path, tmp_path / "w.pth")
    assert list(found) == list(expected) and torch.equal(found["a.bias"], value)


def test_devices_of_an_export_are_named(exported: Path, tmp_path: Path) -> None:
    path = rewritten(
        exported,
        tmp_path / "c.pt2",
        lambda name, data: data.replace(b'"type": "cpu", "index": null', b'"type": "cuda", "index": 1'),
    )
    assert {item["location"] for item in ckptool.inspect(path)["devices"]} == {"cuda:1"}
    said = say("inspect", path)
    assert "its program names devices: cuda:1" in said.all
    said = say("remap", path, "--to", "cpu", "-o", tmp_path / "out.pt2")
    assert said.code == 4 and "a state dict would lack 2 constants (constant and gone): keep the program" in said.all


def _meta(**facts: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["config"]["a.bias"]["tensor_meta"].update(facts)


def _weight(**facts: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["config"]["a.bias"].update(facts)


BAD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no list": lambda config: {"config": []},
    "no file": _weight(path_name="../../etc/passwd"),
    "no name": _weight(path_name=None),
    "nothing": _weight(tensor_meta=None),
    "negative": _meta(sizes=[{"as_int": -4}]),
    "huge": _meta(sizes=[{"as_int": 1 << 70}]),
    "symbolic": _meta(sizes=[{"as_expr": "s0"}]),
    "dtype": _meta(dtype=99),
    "dtype list": _meta(dtype=[7]),
    "layout": _meta(layout=1),
    "ranks": _meta(strides=[]),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_descriptions(name: str, exported: Path, tmp_path: Path) -> None:
    def change(record: str, data: bytes) -> bytes:
        if not record.endswith("weights_config.json"):
            return data
        config = json.loads(data)
        return json.dumps(BAD[name](config) or config).encode()

    with pytest.raises(MalformedError):
        ckptool.open(rewritten(exported, tmp_path / "bad.pt2", change))


@pytest.mark.parametrize("text", [b"[" * 200_000, b"{", b"\xff\xfe", b'{"config": ' + b"1" * 10_000 + b"}", b""])
def test_json_that_is_none(text: bytes, exported: Path, tmp_path: Path) -> None:
    path = rewritten(exported, tmp_path / "b.pt2", lambda n, data: text if n.endswith("weights_config.json") else data)
    with pytest.raises(MalformedError):
        ckptool.open(path)


def test_a_bomb_of_json_is_not_inflated(exported: Path, tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt2"
    with zipfile.ZipFile(exported) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, b" " * (96 << 20) + data if name.endswith("weights_config.json") else data)
    with pytest.raises(CkptoolError):
        ckptool.open(path)


# -- torch.package ------------------------------------------------------------------------------------


def packed(path: Path, **pickles: object) -> Path:
    from torch.package.package_exporter import PackageExporter

    with warnings.catch_warnings(), PackageExporter(str(path)) as exporter:
        warnings.simplefilter("ignore")
        exporter.extern(["torch.**", "collections", "sys", "numpy.**"])
        exporter.save_source_string("net", "def name():\n    return 'net'\n")
        exporter.save_text("texts", "note.txt", "hello")
        for name, value in pickles.items():
            exporter.save_pickle("weights", f"{name}.pkl", value)
    return path


def test_every_pickle_of_a_package(tmp_path: Path) -> None:
    from torch.package.package_importer import PackageImporter

    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    shared = torch.arange(6.0)
    path = packed(
        tmp_path / "p.pt", state=net.state_dict(), two={"a.b": shared, "c.d": shared[2:]}, raw=b"bytes", one=shared
    )
    importer = PackageImporter(str(path))
    report = ckptool.inspect(path)
    assert report["format"] == "torch-package"
    assert report["program"]["pickles"] == [f"weights/{name}.pkl" for name in ("state", "two", "raw", "one")]
    assert "torch" in report["program"]["extern"]
    found = converted(path, tmp_path / "w.pth")
    for name in ("state", "two"):
        same(dict(found[f"weights/{name}.pkl"]), dict(importer.load_pickle("weights", f"{name}.pkl")))
    assert found["weights/raw.pkl"] == b"bytes"
    same({"": found["weights/one.pkl"]}, {"": shared})
    two = found["weights/two.pkl"]
    assert two["a.b"].untyped_storage().data_ptr() == two["c.d"].untyped_storage().data_ptr()
    assert found["weights/one.pkl"].untyped_storage().data_ptr() == two["a.b"].untyped_storage().data_ptr()


def test_objects_that_a_package_rebuilds(tmp_path: Path) -> None:
    """``reduce_package``: a persistent id that is no storage, and no damage."""
    path = packed(tmp_path / "p.pt", state={"w": torch.ones(2)})
    pickle = b"\x80\x03}X\x01\x00\x00\x00g(X\x0e\x00\x00\x00reduce_packageK\x07cnet\nname\n)tQs."
    path = rewritten(path, tmp_path / "r.pt", lambda name, data: pickle if name.endswith("state.pkl") else data)
    report = ckptool.inspect(path)
    assert report["program"]["reduced"] == 1
    assert not [finding for finding in report["findings"] if finding["level"] == "error"]


def test_a_broken_pickle_of_a_package_is_said(tmp_path: Path) -> None:
    path = packed(tmp_path / "p.pt", state={"w": torch.ones(2)}, other={"x.y": torch.zeros(3)})
    assert "COMPLETE" in say("validate", path).out
    path = rewritten(path, tmp_path / "b.pt", lambda name, data: data[:-5] if name.endswith("state.pkl") else data)
    assert (said := say("validate", path)).code == 1 and "state.pkl" in said.all
    assert [row["path"] for row in ckptool.keys(path, all=True)["tensors"]]


def test_edits_of_a_package_are_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "p.pt", state=nn.Linear(2, 2).state_dict())
    with ckptool.open(path) as checkpoint, pytest.raises(RefusedError) as caught:
        ckptool.save(ckptool.add_module(checkpoint), tmp_path / "out.pt")
    assert "ckptool convert" in caught.value.next


# -- torch 1.0 ----------------------------------------------------------------------------------------


def model_json(path: Path, change: Callable[[dict[str, Any]], Any] = lambda model: None) -> Path:
    """An archive as torch 1.0 wrote it: protobuf as JSON, bytes beside it."""
    model: dict[str, Any] = {
        "protoVersion": "3",
        "mainModule": {
            "torchscriptArena": {"key": "code/m.py"},
            "name": "m",
            "parameters": [{"tensorId": "0", "name": "scale"}],
            "submodules": [
                {
                    "name": "layer",
                    "attributes": [{"type": "Tensor", "id": "0", "name": "plain"}],
                    "parameters": [{"tensorId": "1", "name": "weight"}, {"tensorId": "2", "name": "bias"}],
                    "submodules": [{"name": "deep", "parameters": [{"isBuffer": True, "tensorId": "3", "name": "n"}]}],
                },
                {"name": "tied", "parameters": [{"tensorId": "1", "name": "weight"}]},
            ],
        },
        "producerName": "pytorch",
        "producerVersion": "1.0",
        "tensors": [
            {"dims": [], "offset": "0", "strides": [], "requiresGrad": True, "dataType": "DOUBLE"},
            {"dims": ["2", "3"], "offset": "0", "strides": ["1", "2"], "requiresGrad": True, "dataType": "FLOAT"},
            {"dims": ["2"], "offset": "6", "strides": ["1"], "dataType": "FLOAT"},
            {"dims": ["1"], "strides": ["1"], "dataType": "INT64"},
        ],
    }
    for number, key in enumerate(("tensors/0", "tensors/1", "tensors/1", "tensors/2")):
        model["tensors"][number] |= {"data": {"key": key}, "device": "cuda:0" if number == 3 else "cpu"}
    change(model)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/version", "1\n")
        archive.writestr("m/code/m.py", "op_version_set = 0\ndef forward(self): return self.scale\n")
        archive.writestr("m/tensors/0", struct.pack("<d", 2.5))
        archive.writestr("m/tensors/1", struct.pack("<8f", *range(8)))
        archive.writestr("m/tensors/2", struct.pack("<q", 11))
        archive.writestr("m/model.json", json.dumps(model))
    return path


def test_model_json(tmp_path: Path) -> None:
    path = model_json(tmp_path / "m.pt")
    rows = ckptool.keys(path)["tensors"]
    assert [(row["key"], row["location"]) for row in rows] == [
        ("scale", "cpu"),
        ("layer.weight", "cpu"),
        ("layer.bias", "cpu"),
        ("layer.deep.n", "cuda:0"),
        ("tied.weight", "cpu"),
    ]
    with ckptool.open(path) as checkpoint:
        weights = ckptool.convert(checkpoint, "torch", allow_loss=["entries"])
        ckptool.save(ckptool.remap(weights, "cpu"), tmp_path / "w.pth")
    found = torch.load(tmp_path / "w.pth", weights_only=True)
    assert found["scale"].item() == 2.5 and found["layer.deep.n"].tolist() == [11]
    assert torch.equal(found["layer.weight"], torch.arange(6.0).reshape(3, 2).t())
    assert found["layer.bias"].tolist() == [6, 7] and found["tied.weight"] is found["layer.weight"]
    report = ckptool.inspect(path)
    assert report["format"] == "torchscript-1.0" and report["writer"] == "torch 1.0"


WORSE: list[Callable[[dict[str, Any]], Any]] = [
    lambda model: model["tensors"].clear(),
    lambda model: model["tensors"][1].update(data={"key": "tensors/9"}),
    lambda model: model["tensors"][1].update(data=None),
    lambda model: model["tensors"][1].update(dims=["1" * 30]),
    lambda model: model["tensors"][1].update(dataType="STRING"),
    lambda model: model["tensors"].__setitem__(1, 7),
    lambda model: model.update(mainModule=[]),
    lambda model: model.update(tensors={}),
]


@pytest.mark.parametrize("spoil", WORSE)
def test_damaged_model_json(spoil: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    with pytest.raises(MalformedError):
        ckptool.open(model_json(tmp_path / "m.pt", spoil))


# -- all of them --------------------------------------------------------------------------------------

FILES = ("exported.pt2", "package.pt", "torchscript.pt")


@pytest.mark.parametrize("name", FILES)
def test_no_edit_in_place(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes((FIXTURES / name).read_bytes())
    said = say("remap", path, "--map", "cpu=cuda:0", "--in-place")
    assert said.code == 4, said.all
    assert path.read_bytes() == (FIXTURES / name).read_bytes()


@needs_corpus
def test_the_real_one() -> None:
    rows = ckptool.keys(CORPUS / "LaurentMazare__tch-rs__foo.pt")["tensors"]
    assert [(row["key"], row["dtype"], row["shape"]) for row in rows] == [("value", "float32", [1])]
