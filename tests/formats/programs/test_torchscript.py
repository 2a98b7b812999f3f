"""TorchScript archives: the state dict that torch.jit.load gives, tags edited in place, the program left alone."""

from __future__ import annotations

import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from conftest import CORPUS, WHOLE, needs_corpus
from torch import nn
from torch.jit.mobile import _load_for_lite_interpreter

import ckptool
from ckptool.base.errors import MalformedError, RefusedError
from ckptool.checkpoint.checkpoint import Checkpoint
from ckptool.edits.keys import by_glob as by_pattern
from ckptool.pickles.compare import difference
from ckptool.pickles.decode import decode
from ckptool.pickles.encode import encode
from ckptool.pickles.nodes import Persistent
from ckptool.reports.validate import validation_report

SOURCE = """
import torch
from torch import nn
from typing import List


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity()])
        self.layers[1].weight = self.layers[0].weight
        self.again = self.layers[0]
        self.named = nn.ModuleDict({"a b": nn.Linear(2, 2, bias=False), "ü": nn.LayerNorm(2)})
        self.register_buffer("short_lived", torch.zeros(3), persistent=False)
        self.register_buffer("strided", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("none", None)
        self.register_buffer("sixteen", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.plain = torch.ones(2)
        self.pair = [torch.ones(1), torch.zeros(1)]
        self.where = torch.device("cpu")
        self.names = ["cpu", "b"]
        self.scale = nn.Parameter(torch.tensor(2.5), requires_grad=False)

    def forward(self, x):
        if bool(x.sum() > 1e9):
            y = torch.zeros(2, device=torch.device("cuda:0"))
        else:
            y = torch.zeros(2)
        x = self.norm(self.conv(x)).flatten(1)[:, :4]
        for layer in self.layers:
            x = layer(x)
        return x + y.sum() + self.scale + self.plain.sum()
"""

Maker = Callable[[Path], torch.jit.ScriptModule]


def scripted(path: Path) -> torch.jit.ScriptModule:
    import importlib.util

    source = path.with_suffix(".py")
    source.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("scripted_net", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(1)
    return torch.jit.script(module.Net().eval())


def traced(path: Path) -> torch.jit.ScriptModule:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.table = torch.arange(4.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.table + torch.zeros(4)

    return torch.jit.trace(Net().eval(), torch.ones(1, 4))


def quantized(path: Path) -> torch.jit.ScriptModule:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return torch.jit.script(torch.ao.quantization.quantize_dynamic(net, {nn.Linear}).eval())


def frozen(path: Path) -> torch.jit.ScriptModule:
    return torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(4, 4)).eval()))


MAKERS: list[Maker] = [scripted, traced, quantized, frozen]
#: The tensors that the state dict lacks.
LACKS: dict[Maker, str] = {
    scripted: "3 storages outside of its parameters and buffers",
    traced: "1 storage outside of its parameters and buffers",
    quantized: "2 storages outside of its parameters and buffers",
}


def make(maker: Maker, path: Path, mobile: bool = False) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = maker(path)
        if mobile:
            module._save_for_lite_interpreter(str(path))
        else:
            module.save(str(path))
    return path


def loaded(path: Path | str, **options: Any) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.load(str(path), **options)


def tags(path: Path) -> list[str]:
    with ckptool.open(path) as checkpoint:
        return sorted({storage.location for _, storage in checkpoint.survey.reader.uses()})


def records(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


every = pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)


@every
@pytest.mark.parametrize("mobile", [False, True], ids=["script", "mobile"])
def test_the_state_dict_is_that_of_torch(maker: Maker, mobile: bool, tmp_path: Path) -> None:
    path = make(maker, tmp_path / "m.pt", mobile)
    expected = loaded(path).state_dict()
    rows = ckptool.keys(path)["tensors"]
    assert [(row["key"], row["dtype"], tuple(row["shape"])) for row in rows] == [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in expected.items()
    ]
    with ckptool.open(path) as checkpoint:
        assert checkpoint.format == "torchscript"
        if not expected:
            with pytest.raises(RefusedError, match="no parameters and no buffers"):
                ckptool.convert(checkpoint, "torch", allow_loss=["all"])
            return
        ckptool.save(ckptool.convert(checkpoint, "torch", allow_loss=["entries"]), tmp_path / "w.pth")
    found = torch.load(tmp_path / "w.pth", weights_only=True)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and found[name].stride() == tensor.stride()
        assert not found[name].requires_grad
    pointers = [tensor.untyped_storage().data_ptr() for tensor in found.values() if tensor.numel()]
    theirs = [tensor.untyped_storage().data_ptr() for tensor in expected.values() if tensor.numel()]
    assert [pointers.index(one) for one in pointers] == [theirs.index(one) for one in theirs]


@every
@pytest.mark.parametrize("mobile", [False, True], ids=["script", "mobile"])
def test_tags_there_and_back(maker: Maker, mobile: bool, tmp_path: Path) -> None:
    path, away, back = make(maker, tmp_path / "m.pt", mobile), tmp_path / "away.pt", tmp_path / "back.pt"
    original = path.read_bytes()
    for source, devices, out in ((path, {"cpu": "cuda:1"}, away), (away, {"cuda:1": "cpu"}, back)):
        with ckptool.open(source) as checkpoint:
            ckptool.save(ckptool.remap(checkpoint, devices), out)
        assert tags(out) in ([next(iter(devices.values()))], [])
    expected = loaded(path)
    for file in (away, back):
        found = loaded(file, map_location="cpu").state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.state_dict().items())
    x = torch.ones(1, 1, 5, 5) if maker is scripted else torch.ones(1, 4)
    assert torch.equal(loaded(back)(x), expected(x))
    assert path.read_bytes() == original
    assert_same_program(path, back)
    changed = {name for name, data in records(away).items() if data != records(path)[name]}
    assert changed <= {"data.pkl", "constants.pkl", "bytecode.pkl", "traced_inputs.pkl"}
    if mobile:
        assert _load_for_lite_interpreter(str(back)) is not None


def assert_same_program(path: Path, other: Path) -> None:
    """Every record the same, pickles as graphs: a tag that was one object with another string is one of its own."""
    left, right = records(path), records(other)
    assert left.keys() == right.keys()
    for name, data in left.items():
        if data != right[name]:
            assert name.endswith(".pkl")
            assert difference(decode(data).graph, decode(right[name]).graph, texts_by_value=True) == ""


def test_devices_in_code_are_named_and_left(tmp_path: Path) -> None:
    path = make(scripted, tmp_path / "m.pt")
    said = say("remap", path, "--to", "cpu", "-o", tmp_path / "out.pt")
    assert said.code == 0 and "the code names cuda:0" in said.all and "scripted_net" in said.all
    report = ckptool.inspect(path)
    (named,) = report["program"]["devices"]["code"]
    assert named["where"].startswith("code/__torch__/scripted_net") and named["device"] == "cuda:0"
    assert report["program"]["devices"]["attributes"] == [{"path": "where", "device": "cpu"}]
    assert report["program"]["executable"] is True and report["program"]["attributes"] == ["plain"]


EDITS: list[Callable[[Checkpoint], Checkpoint]] = [
    ckptool.add_module,
    lambda checkpoint: by_pattern(checkpoint, "conv.*", "x.*"),
    lambda checkpoint: ckptool.cast(checkpoint, "float16"),
    lambda checkpoint: ckptool.drop(checkpoint, ["conv.*"]),
]


@pytest.mark.parametrize("edit", EDITS)
def test_other_edits_of_a_program_are_refused(edit: Callable[[Checkpoint], Checkpoint], tmp_path: Path) -> None:
    path = make(scripted, tmp_path / "m.pt")
    with ckptool.open(path) as checkpoint, pytest.raises(RefusedError) as caught:
        ckptool.save(edit(checkpoint), tmp_path / "out.pt")
    assert "a state dict would lack 3 storages outside" in caught.value.next
    assert not (tmp_path / "out.pt").exists()


class Views(nn.Module):
    """Its attributes share the memory of a parameter, or have none; 0.5 is a tensor in the code of a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.row = self.layer.weight.detach()[0]
        self.none = torch.zeros(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * 0.5


@pytest.mark.parametrize(
    ("maker", "lacks"),
    [
        (lambda path: torch.jit.script(Views()), ""),
        (lambda path: torch.jit.trace(Views(), torch.ones(1, 4)), ""),
        *((maker, lacks) for maker, lacks in LACKS.items()),
    ],
)
def test_a_state_dict_that_lacks_tensors_is_not_suggested(
    maker: Maker, lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, message = make(maker, Path("m.pt")), "'RecursiveScriptModule' object has no attribute 'copy'"
    lines = ["inspect m.pt", "validate m.pt", "match m.pt m.pt", "add-module m.pt -o x.pt", "convert m.pt -o w.pth"]
    for words in (*map(str.split, lines), ["explain", message, "m.pt"]):
        said = say(*words)
        text = " ".join(said.all.split())
        assert ("ckptool convert" in text or "--allow-loss entries" in text) != bool(lacks), text
        assert f"a state dict would lack {lacks}" in text or not lacks, text
    own = torch.jit.load(path).state_dict()
    assert say("convert", "m.pt", "-o", "w.pth", "--allow-loss", "entries").code == 0
    assert torch.load("w.pth", weights_only=True).keys() == own.keys()


@pytest.mark.parametrize("frozen_one", [False, True])
@pytest.mark.parametrize("mobile", [False, True])
def test_a_program_without_parameters(frozen_one: bool, mobile: bool, tmp_path: Path) -> None:
    path, out = tmp_path / "m.pt", tmp_path / "out"
    module = torch.jit.freeze(torch.jit.script(torch.nn.Linear(3, 2).eval())) if frozen_one else None
    module = module or torch.jit.script(torch.nn.ReLU())
    module._save_for_lite_interpreter(str(path)) if mobile else module.save(str(path))
    assert not torch.jit.load(path).state_dict()
    assert "a program without parameters and buffers by name" in say("inspect", path).out
    for command in ("inspect", "validate", "salvage", "sanitize"):
        written = ("-o", out) if command in ("salvage", "sanitize") else ()
        said = say(command, path, *written)
        assert "convert" not in said.all, said.all
    for name in ("w.pth", "w.safetensors"):
        said = say("convert", path, "-o", tmp_path / name, "--allow-loss", "all")
        assert said.code == 4 and "no parameters and no buffers by name" in said.all


def test_buffers_of_old_writers_are_what_torch_takes_for_some(tmp_path: Path) -> None:
    """Before torch 1.6 the code did not tell buffers from attributes; later ones take none of them for a buffer."""
    path = make(scripted, tmp_path / "m.pt")

    def old(name: str, data: bytes) -> bytes:
        lines = [line for line in data.splitlines(True) if b"__buffers__" not in line]
        return b"".join(lines) if name.endswith(".py") else data

    again(path, tmp_path / "old.pt", old)
    keys = [row["key"] for row in ckptool.keys(tmp_path / "old.pt")["tensors"]]
    state = torch.jit.load(tmp_path / "old.pt").state_dict()
    assert keys == list(state)
    (device,) = ckptool.inspect(tmp_path / "old.pt")["devices"]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in state.values()}
    assert device["bytes"] - device["other_bytes"] == sum(storages.values())


def again(path: Path, out: Path, change: Callable[[str, bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            method = zipfile.ZIP_DEFLATED if "/code/" in name else zipfile.ZIP_STORED
            target.writestr(name, change(name, source.read(name)), method)


def test_a_bomb_of_code_is_not_inflated(tmp_path: Path) -> None:
    out = tmp_path / "bomb.pt"
    again(make(traced, tmp_path / "m.pt"), out, lambda name, data: data)
    with (
        zipfile.ZipFile(out, "a", zipfile.ZIP_DEFLATED) as target,
        target.open("m/code/__torch__/bomb.py", "w") as file,
    ):
        for _ in range(1024):
            file.write(bytes(1 << 20))
    report = ckptool.inspect(out)
    assert [finding["code"] for finding in report["findings"]].count("code-unread") == 1
    assert report["tensors"] == 2


def test_modules_within_themselves_end(tmp_path: Path) -> None:
    path = make(traced, tmp_path / "m.pt")
    pickle = b"\x80\x02c__torch__.torch.nn.modules.linear\nLinear\nq\x00)\x81q\x01}(X\x05\x00\x00\x00layerh\x01ub."
    again(path, tmp_path / "out.pt", lambda name, data: pickle if name.endswith("/data.pkl") else data)
    with pytest.raises(MalformedError, match="nest"):
        ckptool.open(tmp_path / "out.pt")


def test_one_module_at_many_places_ends(tmp_path: Path) -> None:
    """Forty modules, each twice in the next: 2^40 places."""
    path = make(traced, tmp_path / "m.pt")
    make_one = b"c__torch__.torch.nn.modules.linear\nLinear\n)\x81}"
    body = b"\x80\x02" + make_one + b"bq\x00"
    for number in range(40):
        last, this = bytes([number]), bytes([number + 1])
        body += b"0" + make_one + b"(X\x01\x00\x00\x00ah%bX\x01\x00\x00\x00bh%bubq%b" % (last, last, this)
    again(path, tmp_path / "out.pt", lambda name, data: body + b"." if name.endswith("/data.pkl") else data)
    with pytest.raises(MalformedError, match="nest"):
        ckptool.open(tmp_path / "out.pt")


def test_code_that_is_missing_is_said(tmp_path: Path) -> None:
    path = make(traced, tmp_path / "m.pt")
    again(path, tmp_path / "out.pt", lambda name, data: b"" if name.endswith(".py") else data)
    report = ckptool.inspect(tmp_path / "out.pt")
    assert "code-missing" in [finding["code"] for finding in report["findings"]]
    assert {row["key"] for row in ckptool.keys(tmp_path / "out.pt")["tensors"]} >= {"layer.weight", "layer.bias"}


@needs_corpus
def test_the_real_ones() -> None:
    found = {
        name: ckptool.inspect(CORPUS / name)
        for name in (
            "Improbable-AI__walk-these-ways__unitree_go1.pt",
            "LaurentMazare__tch-rs__foo4.pt",
            "dotnet__TorchSharp__func.script.dat",
            "snakers4__silero-vad__model_micro.jit",
        )
    }
    assert {report["format"] for report in found.values()} == {"torchscript"}
    go1, foo4, func, vad = found.values()
    assert [item["location"] for item in go1["devices"]] == ["cuda:0"] and go1["tensors"] == 6 + 2 * 0
    assert foo4["tensors"] == func["tensors"] == 0
    assert vad["program"]["code_files"] == 41 and vad["tensors"]


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Negated(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


def test_two_programs_without_weights_are_not_the_same(tmp_path: Path) -> None:
    one, other, twin = (tmp_path / name for name in ("one.pt", "other.pt", "twin.pt"))
    torch.jit.script(Doubled()).save(str(one))
    torch.jit.script(Negated()).save(str(other))
    twin.write_bytes(one.read_bytes())
    assert ckptool.diff(one, twin)["same"]
    report = ckptool.diff(one, other)
    assert not report["same"]
    assert any(item["what"].startswith("code/__torch__") for item in report["program"])  # mangled if scripted twice
    assert say("diff", one, other).code == 1
    for function in (ckptool.hash, ckptool.lock):
        with pytest.raises(RefusedError, match="no parameters and no buffers"):
            function(one)


# -- code is read in bounded time and memory -------------------------------------------------------------------
# One line of a megabyte, all escaped quotes, once took hours; a million classes, or devices by a million numbers,
# took gigabytes. All files of code are read, however many: those left out would count as parameters.


HEAD = "class Net(Module):\n  __parameters__ = ["
#: Enough to tell bounded from unbounded work; four times as many in ``make torture``.
MANY = 1 << (20 if WHOLE else 18)

HOSTILE = {
    "escapes": HEAD + '"' + '\\"' * MANY + ", ]\n",
    "quotes": HEAD + '"' * MANY + "]\n",
    "backslashes": HEAD + '"' + "\\" * MANY + "]",
    "one line": "x" * MANY,
    "brackets": "class Net(Module):\n" + "(" * MANY,
    "lines": "\n" * (8 * MANY),
    "devices": "".join(f'"cuda:{number}"' for number in range(MANY)),
    "one device": '"cuda:0" ' * MANY,
    "classes": "".join(f"class A{number}(Module):\n" for number in range(MANY)),
}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "m.pt"
    torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)).save(str(path))
    return path


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_code_takes_bounded_memory(kind: str, script: Path, tmp_path: Path) -> None:
    out = tmp_path / "h.pt"
    with zipfile.ZipFile(script) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
        target.writestr("m/code/__torch__/more.py", HOSTILE[kind], zipfile.ZIP_DEFLATED)
    tracemalloc.start()
    try:
        rows = ckptool.keys(out)["tensors"]
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [row["key"] for row in rows] == ["weight", "bias"]
    assert most < 200_000_000


def same(one: Any, other: Any) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_storage_ids_of_six_values(tmp_path: Path) -> None:
    """As in the demo of PyTorch for iOS: the sixth value is None, and ``torch.jit.load`` ignores it."""
    module = torch.jit.script(torch.nn.Linear(3, 4))
    path, six, out = tmp_path / "five.pt", tmp_path / "six.pt", tmp_path / "out.pth"
    torch.jit.save(module, path)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(six, "w") as longer:
        for record in archive.infolist():
            data = archive.read(record)
            if record.filename.endswith("/data.pkl"):
                graph = decode(data).graph
                ids = {node.pid: graph.nodes[node.pid] for _, node in graph.of_type(Persistent)}
                longer_ids: dict[int, Any] = {pid: (*value, len(graph.nodes)) for pid, value in ids.items()}  # type: ignore[misc]
                data = encode(graph.edited(longer_ids, [None]))
            longer.writestr(record.filename, data)
    expected = module.state_dict()
    assert same(torch.jit.load(six).state_dict(), expected)
    assert validation_report(str(six))["valid"]
    ckptool.save(ckptool.convert(str(six), "torch", allow_loss=["entries"]), out)
    assert same(torch.load(out, weights_only=True), expected)
    edited = tmp_path / "edited.pt"
    ckptool.save(ckptool.remap(str(six), {"cpu": "cuda:0"}), edited)
    assert same(torch.jit.load(edited, map_location="cpu").state_dict(), expected)
