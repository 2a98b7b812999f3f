"""From every format that is read to every format that is written: the same names, shapes, dtypes and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command_line import say
from conftest import FIXTURES
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckptool
from ckptool.base.errors import RefusedError
from ckptool.checkpoint.checkpoint import Target
from ckptool.cli.main import run
from ckptool.formats import outputs
from ckptool.formats.losses import entries_outside

#: A checkpoint of each format, most of them made of one zip.
SOURCES = ("torch", "legacy", "safetensors", "dcp", "torch shards", "safetensors shards", "torchscript", "tar")
TARGETS = ("torch", "legacy", "safetensors", "dcp", "torch shards", "safetensors shards")


def convert(source: Path, kind: str, out: Path) -> Path:
    target, _, shards = kind.partition(" ")
    with ckptool.open(source) as checkpoint:
        size = 80 if shards else 0
        ckptool.save(ckptool.convert(checkpoint, target, tied="clone", allow_loss=["all"], max_shard_size=size), out)
    return out


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    made = {kind: convert(FIXTURES / "bare.pth", kind, folder / kind.replace(" ", "-")) for kind in TARGETS}
    return made | {"torchscript": FIXTURES / "script_net.pt", "tar": FIXTURES / "torch01.tar"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_the_tensors_are_the_same(source: str, target: str, sources: dict[str, Path], tmp_path: Path) -> None:
    out = convert(sources[source], target, tmp_path / "out")
    assert ckptool.hash(out)["content"] == ckptool.hash(sources[source])["content"]
    assert out.is_dir() == (target == "dcp" or "shards" in target)
    assert ckptool.validate(out)["valid"]


# -- the last step of any edit ---------------------------------------------------------------------------------

#: An edit with every command that writes, each with a fixture that it changes.
EDITS = """\
strip-module bare_module.pth
add-module model.safetensors --add-prefix model.
remap legacy_cuda.pth --to cpu
drop gan.pth netD
extract gan.pth netG
cast bare.pth --to-dtype bfloat16
slim slice_of_big.pth
rename bare.pth --rename fc.*=head.*
edit wrapped.pth --set epoch=7
sanitize args_namespace.pth
redact lightning.ckpt --redact all
merge bare.pth bare.pth
average bare.pth bare.pth
edit zip_deflated.pth --repack
salvage zip_wrong_crc.pth
edit dcp4 --extract model --to-dtype float16
edit bare.pth --add-module --to cuda:0""".splitlines()
#: Outputs and their formats.
OUTPUTS = (
    *("a.safetensors --to-format safetensors", "a.dcp --to-format dcp", "a.pth --to-format legacy"),
    *("a.pth --to-format torch", "a --to-format safetensors --max-shard-size 200"),
)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("line", EDITS)
def test_an_edit_into_another_format_is_the_edit_and_then_the_conversion(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FIXTURES)
    command, source, *_ = line.split()
    between = tmp_path / ("between" + (Path(source).suffix or ".dcp"))
    assert run([*line.split(), "-o", str(between), "-q"]) in (0, 1)
    for number, (name, *options) in enumerate(map(str.split, OUTPUTS)):
        one, two = (tmp_path / f"{number}{way}{name}" for way in "ab")
        options += ["--allow-loss", "all", "--tied", "clone", "-q"]
        first = say(*line.split(), "-o", one, *options)
        second = say("convert", between, "-o", two, *options)
        assert first.code == second.code or (command == "salvage" and second.code == 0), (first.all, second.all)
        if not second.code:
            assert ckptool.validate(one)["valid"]
            assert ckptool.hash(one)["content"] == ckptool.hash(two)["content"]
            if name == "a.safetensors" and first.code == 0:
                assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("naming", ["--key", "--extract"])
def test_a_state_dict_that_is_named_leaves_the_rest_out(naming: str, tmp_path: Path) -> None:
    out, source = tmp_path / "a.safetensors", FIXTURES / "wrapped.pth"
    assert say("edit", source, "--slim", "--strict", "-o", out).code == 4
    assert say("edit", source, "--slim", "--strict", naming, "model", "-o", out).code == 0
    wanted = torch.load(source, weights_only=True)["model"]
    assert {name: value.tolist() for name, value in load_file(out).items()} == {
        name: value.tolist() for name, value in wanted.items()
    }


# -- odd tensors: kept, refused, or named as a loss ------------------------------------------------------------


def converted(value: Any, target: str, folder: Path, *, legacy: bool = False, **how: Any) -> Path:
    source, out = folder / "in.pth", folder / "out"
    torch.save(value, source, _use_new_zipfile_serialization=not legacy)
    with ckptool.open(source) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, target, **how), out)
    return out


def loaded_dcp(folder: Path) -> Any:
    found: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(found, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
    return found


def noted() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.note = "x"  # type: ignore[attr-defined]
    return tensor


def odd() -> dict[str, torch.Tensor]:
    """Tensors that are more than their elements."""
    return {
        "conj": torch.tensor([1 + 2j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.empty(3, device="meta"),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "noted": noted(),
    }


@pytest.mark.parametrize("target", ["torch", "legacy", "dcp"])
def test_a_key_chooses_one_state_dict_in_formats_that_hold_several(target: str, tmp_path: Path) -> None:
    states = {"model": {"a": torch.arange(3.0)}, "other": {"b": torch.ones(2)}, "epoch": 3}
    torch.save(states, tmp_path / "a.pth")
    for key, expected in (("model", states["model"]), (".", states)):
        out = tmp_path / f"{target}{key}"
        said = say("convert", tmp_path / "a.pth", "--key", key, "--to-format", target, "-o", out)
        assert said.code == 0, said.all
        torch.save(expected, tmp_path / "expected.pth")
        assert ckptool.hash(out)["content"] == ckptool.hash(tmp_path / "expected.pth")["content"]
    said = say("convert", tmp_path / "a.pth", "--key", "epoch", "-o", tmp_path / "none.pth")
    assert said.code == 2 and not (tmp_path / "none.pth").exists()


def test_shards_of_torch_keep_what_tensors_are(tmp_path: Path) -> None:
    out = converted(
        {**odd(), "tied": (both := odd())["sparse"], "again": both["sparse"]}, "torch", tmp_path, max_shard_size=1
    )
    back = tmp_path / "back.pth"
    with ckptool.open(out) as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "torch"), back)
    whole = {}
    for file in sorted(out.glob("*.bin")):
        whole |= oracle.load(file)
    again = oracle.load(back)
    assert oracle.difference({name: whole[name] for name in again}, again) == ""
    before = oracle.load(tmp_path / "in.pth")
    assert oracle.difference(before, {name: again[name] for name in before}) == ""


def test_objects_of_legacy_files_come_back_from_a_dcp_folder(tmp_path: Path) -> None:
    value = {"state": (torch.arange(4.0)[1:], torch.ones(2)), "note": noted()}
    assert oracle.difference(value, loaded_dcp(converted(value, "dcp", tmp_path, legacy=True))) == ""


@pytest.mark.parametrize(
    "value",
    [[noted()], [[noted()], torch.ones(1)], [{}, noted()], [{"b": {}}, torch.ones(1), {}]],
    ids=["one", "inner", "empty", "holes"],
)
def test_lists_of_objects_come_back_from_a_dcp_folder(value: list[Any], tmp_path: Path) -> None:
    assert oracle.difference({"x": value}, loaded_dcp(converted({"x": value}, "dcp", tmp_path))) == ""


@pytest.mark.parametrize("other", [lambda t: (t,), lambda t: torch.sparse_coo_tensor([[0, 1]], t), lambda t: t.conj()])
def test_memory_shared_with_objects_of_a_dcp_folder_is_refused(other: Any, tmp_path: Path) -> None:
    tensor = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(RefusedError, match="shared memory between tensors: a and b"):
        converted({"a": tensor, "b": other(tensor)}, "dcp", tmp_path)


def kinds(value: dict[str, Any], folder: Path, **how: Any) -> dict[str, tuple[str, ...]]:
    torch.save(value, folder / "in.pth")
    with ckptool.open(folder / "in.pth") as checkpoint:
        chosen = checkpoint.state_dicts[0]
        fit = outputs.OUTPUTS["safetensors"].writer().fit(checkpoint, Target("safetensors", chosen.path, **how))
        return {loss.kind: loss.where for loss in [*entries_outside(checkpoint, chosen), *fit.losses]}


def test_losses_to_safetensors_are_named_by_kind(tmp_path: Path) -> None:
    value = odd() | {"int4": torch.empty(2, dtype=torch.complex128), "buffer": torch.nn.Buffer(torch.ones(1))}
    found = kinds(value, tmp_path)
    assert found["layouts"] == ("sparse", "nested", "meta")
    assert found["dtypes"] == ("quantized", "int4")
    assert found["attributes"] == ("noted", "buffer")
    assert found["requires-grad"] == ("parameter",)


def test_a_float8_tensor_and_its_bytes_are_both_kept(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).to(torch.float8_e5m2)
    for first, second in ((tensor, tensor.view(torch.uint8)), (tensor.view(torch.uint8), tensor)):
        value = {"a.weight": first, "b.weight": second}
        out = converted(value, "safetensors", tmp_path, tied="clone")
        found = load_file(out)
        assert (
            oracle.difference({name: tensor.clone() for name, tensor in value.items()}, {n: found[n] for n in value})
            == ""
        )
        report = ckptool.diff(tmp_path / "in.pth", out, ignore=["container", "sharing", "order"])
        assert report["same"]
        out.unlink()


def test_the_containers_of_the_state_dict_are_no_loss(tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(1)}
    assert kinds({"runs": [{"model": state}]}, tmp_path) == {}
    assert kinds({"runs": [{"model": state, "epoch": 1}], "x": 2}, tmp_path) == {"entries": ("x", "runs[0].epoch")}


@pytest.mark.parametrize("shards", [0, 1])
def test_names_that_no_header_can_hold_are_refused(shards: int, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="half a surrogate pair"):
        converted({"a\ud800": torch.ones(1), "b": torch.ones(1)}, "safetensors", tmp_path, max_shard_size=shards)
    assert not (tmp_path / "out").exists()


def test_a_header_too_large_to_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptool.formats.safetensors.writer.MAX_HEADER", 1000)
    with pytest.raises(RefusedError, match="reads none of more than 1,000"):
        converted({"a" * 1000: torch.ones(1)}, "safetensors", tmp_path)
