"""Tensors that an unknown library makes: they are listed and carried, and nothing drops the bytes that they own.

The law: whatever holds a storage, wherever, an edit keeps its bytes once, or refuses. Every command that is printed
about such a file keeps them too.
"""

from __future__ import annotations

import collections
import copyreg
import functools
import hashlib
import itertools
import shlex
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import say
from stand_ins import called, put_away, stand_in
from zip_copies import rewritten

import ckptool
from ckptool.base.errors import CkptoolError, RefusedError

_MODULE = "research_lab.quant"


class Object:
    """An object of a class that ckptool does not know."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Plain(Object):
    """Made by ``__new__`` with arguments, or with keyword arguments."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def __new__(cls, *args: Any, **keywords: Any) -> Plain:
        made = object.__new__(cls)
        made.args, made.keywords = args, keywords
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.keywords:
            return copyreg.__newobj_ex__, (Plain, self.args, self.keywords)
        return copyreg.__newobj__, (Plain, *self.args)


class Items(list):  # type: ignore[type-arg]
    pass


class Entries(dict):  # type: ignore[type-arg]
    pass


def _rebuild(*args: Any, **keywords: Any) -> Any:
    return args, keywords


class Call:
    """Pickled as any call."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.fixture(autouse=True, scope="module")
def library() -> Iterator[None]:
    """The library is there when a file is written, in this process."""
    module = types.ModuleType(_MODULE)
    for thing in (Object, Plain, Items, Entries, _rebuild):
        thing.__module__ = _MODULE
        setattr(module, thing.__name__, thing)
    sys.modules["research_lab"], sys.modules[_MODULE] = types.ModuleType("research_lab"), module
    yield
    del sys.modules["research_lab"], sys.modules[_MODULE]


#: Where the storages of an object are: the object that holds them.
PLACES: dict[str, Callable[[Any], Any]] = {
    "function": lambda s: Call(_rebuild, (s, 0, (2, 3), (3, 1))),
    "function of a function": lambda s: Call(_rebuild, (Call(_rebuild, (s,)), 1)),
    "list in an argument": lambda s: Call(_rebuild, ([1, [s]], {"a": 1})),
    "class": lambda s: Call(Object, (), (s, (2, 3))),
    "class that is called": lambda s: Call(Plain, (s, (2, 3))),
    "NEWOBJ": lambda s: Plain(s, (2, 3)),
    "NEWOBJ_EX": lambda s: Plain(1, data=s),
    "state": lambda s: Call(Object, (), {"data": s, "shape": (2, 3)}),
    "state of a function": lambda s: Call(_rebuild, ("x",), {"data": s}),
    "list items": lambda s: Call(Items, (), None, iter([s, 1])),
    "dict items": lambda s: Call(Entries, (), None, None, iter([("data", s)])),
    "partial": lambda s: Call(functools.partial(_rebuild, s), ()),
    "method": lambda s: Call(getattr, (Call(_rebuild, (s,)), "data")),
}
#: What the object holds: an untyped storage, a tensor or an array.
CONTENTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "storage": lambda tensor: torch.storage.TypedStorage(
        wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True
    ),
    "tensor": lambda tensor: tensor,
    "array": lambda tensor: tensor.numpy(),
}

EDITS: dict[str, Callable[[ckptool.Checkpoint], ckptool.Checkpoint]] = {
    "add-module": lambda c: ckptool.add_module(c),
    "rename": lambda c: ckptool.rename(c, regex=("^a", "b")),
    "wrap": lambda c: ckptool.wrap(c, "all"),
    "set": lambda c: ckptool.set(c, "epoch", 4),
    "drop": lambda c: ckptool.drop(c, "epoch"),
    "keep": lambda c: ckptool.keep(c, ["state_dict", "other"]),
    "drop the weights": lambda c: ckptool.drop(c, "*.bias"),
    "remap": lambda c: ckptool.remap(c, "cuda:0"),
    "cast": lambda c: ckptool.cast(c, "bfloat16"),
    "slim": lambda c: ckptool.slim(c, dedupe=True, purpose="inference"),
    "redact": lambda c: ckptool.redact(c),
    "repack": lambda c: ckptool.repack(c),
    "sanitize": lambda c: ckptool.sanitize(c),
    "sanitize, dropping": lambda c: ckptool.sanitize(c, drop_unknown=True, as_state_dict=True),
    "legacy": lambda c: ckptool.convert(c, "legacy"),
    "dcp": lambda c: ckptool.convert(c, "dcp"),
    "safetensors": lambda c: ckptool.convert(c, "safetensors", key="state_dict"),
}


def written(path: Path, place: str, content: str, protocol: int = 2) -> Path:
    """Write a checkpoint with the object twice, beside a tensor that shares its memory and one that does not."""
    values = torch.arange(6.0).reshape(2, 3) + 1
    thing = PLACES[place](CONTENTS[content](values))
    whole = {"epoch": 3, "state_dict": {"a.weight": thing, "a.bias": torch.tensor([-1.0, -2.0])}, "other": [thing]}
    torch.save(whole, path, pickle_protocol=protocol)
    return path


_VALUES = (torch.arange(6.0) + 1).numpy().tobytes()


def copies(path: Path) -> int:
    """Count the storages and arrays that hold the values."""
    with ckptool.open(path) as checkpoint:
        graph, reader = checkpoint.graph, checkpoint.survey.reader
        used = {storage.key for ref in graph.reachable() if (storage := reader.storage(ref))}
        count = 0
        for key in used:
            body = checkpoint.container.stored(key)
            assert body.span is not None
            count += body.span.source.read(body.span.offset, body.span.size) == _VALUES
        texts = (graph.nodes[ref] for ref in graph.reachable())
        return count + sum(
            node in (_VALUES, _VALUES.decode("latin-1")) for node in texts if isinstance(node, str | bytes)
        )


KINDS = list(itertools.product(PLACES, CONTENTS))


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("place,content", KINDS)
def test_every_edit_keeps_the_bytes_once_or_refuses(place: str, content: str, protocol: int, tmp_path: Path) -> None:
    path = written(tmp_path / "in.pth", place, content, protocol)
    assert copies(path) == 1
    kept = 0
    for number, (name, edit) in enumerate(EDITS.items()):
        out = tmp_path / f"{number}.{'safetensors' if name == 'safetensors' else 'out'}"
        try:
            with ckptool.open(path) as checkpoint:
                ckptool.save(edit(checkpoint), out)
        except CkptoolError as error:
            assert error.exit_code < 70 and not out.exists(), name
            continue
        kept += 1
        if name == "cast":
            continue  # known tensors have other bytes now
        # Items of a DCP folder share nothing: an array in two of them is there twice.
        assert copies(out) == (2 if name == "dcp" and content == "array" else 1), name
    assert kept >= 9


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("place,content", KINDS)
def test_every_printed_command_keeps_the_bytes(place: str, content: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "in.pth", place, content)
    asked = [["inspect"], ["validate"], ["scan"], ["sanitize", "-o", "a.pth"], ["convert", "-o", "b.safetensors"]]
    asked += [["sanitize", "--drop-unknown", "-o", "c.pth"], ["convert", "--to-format", "dcp", "-o", "d"]]
    asked += [["convert", "--to-format", "legacy", "-o", "e.pth"], ["strip-module", "-o", "f.pth"]]
    printed = dict[str, None]()
    for command, *options in asked:
        said = say(command, "in.pth", *options)
        assert (
            "--drop-unknown" not in said.all.replace("which --drop-unknown", "")
            and "--allow-loss layouts" not in said.all
        )
        printed |= dict.fromkeys(line.strip()[3:] for line in said.all.splitlines() if line.strip().startswith("-> "))
    for line in printed:
        words = shlex.split(line)
        assert words[0] == "ckptool", line
        assert say(*words[1:]).code in (0, 1), line
    for out in tmp_path.iterdir():
        assert copies(out) >= 1, (out, list(printed))


@pytest.mark.parametrize("place", ["function", "function of a function", "class", "class that is called", "NEWOBJ"])
def test_they_are_listed_with_their_bytes_and_make_a_state_dict(place: str, tmp_path: Path) -> None:
    path = written(tmp_path / "in.pth", place, "storage")
    with ckptool.open(path) as checkpoint:
        entries = {entry.path: entry.tensor for entry in checkpoint.survey.tensors}
        assert list(entries) == ['state_dict["a.weight"]', 'state_dict["a.bias"]', "other[0]"]
        assert entries["other[0]"].kind == "unknown" and entries["other[0]"].cls.startswith("research_lab.quant.")
        assert entries["other[0]"].own_bytes == 24
        assert [item.path for item in checkpoint.state_dicts] == ["state_dict"]
        ckptool.save(ckptool.add_module(checkpoint), tmp_path / "out.pth")
    assert list(ckptool.open(tmp_path / "out.pth")["state_dict"]) == ["module.a.weight", "module.a.bias"]
    said = say("inspect", path).all
    assert "2 tensors of a kind that ckptool does not know (research_lab.quant." in said
    assert "load it where research_lab is installed" in said


def test_only_drop_with_its_path_gives_one_up(tmp_path: Path) -> None:
    path, out = written(tmp_path / "in.pth", "function", "storage"), tmp_path / "out.pth"
    with pytest.raises(RefusedError, match="hold values of tensors") as refusal:
        ckptool.sanitize(path, drop_unknown=True)
    assert "load it where its classes are" in refusal.value.next
    assert (
        "ckptool drop" not in say("sanitize", path, "--drop-unknown", "-o", out).all
    )  # never advised, as it has values
    ckptool.save(ckptool.sanitize(ckptool.drop(path, ['state_dict["a.weight"]', "other"])), out)
    assert list(torch.load(out, weights_only=True)["state_dict"]) == ["a.bias"]


# -- an output without tensors


def _bare(path: Path) -> Path:
    torch.save({"epoch": 3, "state_dict": {"w": torch.ones(2), "b": torch.zeros(2)}, "args": {"lr": 0.1}}, path)
    return path


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "command", [["drop", "*"], ["drop", "re:[wb]"], ["drop", "s*"], ["edit", "--keep", "e*"]], ids=" ".join
)
def test_no_edit_leaves_a_file_without_tensors_by_a_pattern(command: list[str], in_place: bool, tmp_path: Path) -> None:
    path, out = _bare(tmp_path / "in.pth"), tmp_path / "out.pth"
    before = path.read_bytes()
    said = say(command[0], path, *command[1:], *(["--in-place"] if in_place else ["-o", out]))
    assert said.code not in (0, 70) and "the output would hold no tensor, and the input has 2 tensors" in said.all
    assert path.read_bytes() == before and not out.exists()


@pytest.mark.parametrize("command", ["extract epoch", "extract args", "drop state_dict", "edit --keep epoch"])
def test_what_the_user_names_may_leave_none(command: str, tmp_path: Path) -> None:
    path, out = _bare(tmp_path / "in.pth"), tmp_path / "out.pth"
    name, *more = command.split()
    said = say(name, path, *more, "-o", out)
    assert said.code == 0, said.all
    assert "w" not in str(torch.load(out, weights_only=True))


# -- tensors of other devices


def _device_calls() -> dict[str, Any]:
    """Return tensors as other devices pickle them, all of the values 1 to 6."""
    values = torch.arange(6.0).reshape(2, 3) + 1
    dense = (CONTENTS["storage"](values), 0, (2, 3), (3, 1), False, collections.OrderedDict())
    given = (torch.float32, "cpu", False)
    from_array = torch._utils._rebuild_device_tensor_from_numpy
    return {
        "npu": called("torch_npu.utils.storage._rebuild_npu_tensor", *dense, 2),
        "npu with metadata": called("torch_npu.utils.storage._rebuild_npu_tensor", *dense, True),
        "xla of torch 1.0": called("torch._utils._rebuild_xlatensor", *dense, "xla:0"),
        "xla": called("torch._utils._rebuild_xla_tensor", values.numpy(), *given),
        "xla from a tensor": called("torch._utils._rebuild_xla_tensor", values, *given),
        "array": Call(from_array, (values.numpy(), *given)),
        "array in Fortran order": Call(from_array, (np.asfortranarray(values.numpy()), *given)),
        "CPU tensor": Call(torch._utils._rebuild_device_tensor_from_cpu_tensor, (values, *given)),
        "hpu": called("habana_frameworks.torch.core._rebuild_hpu_tensor", values.numpy(), *given),
        "mlc": called("torch._utils._rebuild_mlc_tensor", values.numpy(), *given),
        "bfloat16": Call(from_array, (values.numpy(), torch.bfloat16, "cpu", False)),
    }


DEVICES = [
    *("npu", "npu with metadata", "xla of torch 1.0", "xla", "xla from a tensor", "array", "array in Fortran order"),
    *("CPU tensor", "hpu", "mlc", "bfloat16"),
]


@pytest.fixture(autouse=True)
def _modules_are_removed() -> Iterator[None]:
    """Remove what a test has added: transformers takes a module torch_npu for an installed library."""
    yield
    put_away()


def test_every_device_is_tested() -> None:
    assert [*_device_calls()] == DEVICES


@pytest.mark.parametrize("name", DEVICES)
def test_tensors_of_other_devices_become_plain(name: str, tmp_path: Path) -> None:
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    torch.save({"state_dict": {"w": _device_calls()[name]}}, path)
    with ckptool.open(path) as checkpoint:
        (entry,) = checkpoint.survey.tensors
        assert entry.tensor.shape == (2, 3) and entry.tensor.kind in ("dense", "array")
        assert [item.path for item in checkpoint.state_dicts] == ["state_dict"]
    said = say("sanitize", path, "-o", out)
    assert said.code == 0, said.all
    loaded = torch.load(out, weights_only=True)["state_dict"]["w"]
    expected = torch.arange(6.0).reshape(2, 3) + 1
    assert loaded.dtype == (torch.bfloat16 if name == "bfloat16" else torch.float32)
    assert torch.equal(loaded.float(), expected)


@pytest.mark.parametrize("module,name", [("torchao.dtypes", "AffineTensor"), ("bitsandbytes.nn.modules", "Params4bit")])
def test_quantized_subclasses_are_kept_and_named(module: str, name: str, tmp_path: Path) -> None:
    """Without their class, quantized values mean nothing: no plain tensor is made of them."""
    path = tmp_path / "in.pth"
    data, scale = torch.arange(6, dtype=torch.uint8), torch.ones(2)
    cls = stand_in(f"{module}.{name}")
    dense = (CONTENTS["storage"](data), 0, (6,), (1,), False, {})
    whole = Call(
        torch._tensor._rebuild_from_type_v2, (torch._utils._rebuild_tensor_v2, cls, dense, {"scale": scale, "bits": 4})
    )
    torch.save({"w": whole, "b": torch.ones(1)}, path)
    said = say("inspect", path).all
    assert f"1 tensor quantized by {module.partition('.')[0]} ({module}.{name})" in said
    with pytest.raises(RefusedError, match=r": w .*they hold values of tensors"):
        ckptool.sanitize(path, drop_unknown=True)
    digest = hashlib.sha256(data.numpy().tobytes()).hexdigest()
    ckptool.save(ckptool.wrap(path, "x"), tmp_path / "out.pth")
    with ckptool.open(tmp_path / "out.pth") as checkpoint:
        bodies = [checkpoint.container.stored(key).span for key in checkpoint.survey.reader.storages]
        found = {hashlib.sha256(span.source.read(span.offset, span.size)).hexdigest() for span in bodies if span}
    assert digest in found


@pytest.mark.parametrize("place", [place for place in PLACES if not place.endswith("items") and place != "method"])
def test_salvage_leaves_one_out_that_has_lost_its_bytes(place: str, tmp_path: Path) -> None:
    """It is dropped as a whole: without its storage it is no tensor, however deep in its arguments that is."""
    path, less, out = written(tmp_path / "in.pth", place, "storage"), tmp_path / "less.pth", tmp_path / "out.pth"
    rewritten(path, less, lambda _, data: None if data == _VALUES else data)
    said = say("salvage", less, "-o", out)
    assert said.code == 1 and "a.weight" in said.all, said.all
    loaded = torch.load(out, weights_only=True)
    assert list(loaded["state_dict"]) == ["a.bias"] and loaded["other"] == [None]


def test_a_fingerprint_of_values_in_arrays_is_refused(tmp_path: Path) -> None:
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    torch.save({"w": _device_calls()["array"]}, path)
    with pytest.raises(RefusedError, match="the values of w are in a NumPy array"):
        ckptool.hash(path)
    ckptool.save(ckptool.sanitize(path), out)
    torch.save({"w": torch.arange(6.0).reshape(2, 3) + 1}, path)
    assert ckptool.hash(out)["content"] == ckptool.hash(path)["content"]
