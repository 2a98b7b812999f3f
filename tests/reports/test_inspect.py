"""What ``inspect`` says agrees with the manifest of the fixtures, and with torch where torch can be asked."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import oracle
import pytest
import torch
from conftest import CHECKPOINTS, FIXTURES, LOADABLE, MANIFEST, Fixture, by_name

import ckptool
from ckptool.base.errors import MalformedError, NotACheckpointError
from ckptool.formats import FORMATS
from ckptool.formats.zip_kinds import ZIPS

#: The zip has lost its directory: there is nothing to inspect before salvage.
NO_DIRECTORY = {"truncated.pth", "zip_leading.pth"}
READABLE = [item for item in CHECKPOINTS if item.path.name not in NO_DIRECTORY]
readable = pytest.mark.parametrize("fixture", READABLE, ids=by_name)

KINDS = {"lfs-pointer": "git-lfs-pointer", "other": None}


@readable
def test_container_layout_and_state_dicts(fixture: Fixture) -> None:
    report = ckptool.inspect(fixture.path)
    assert report["format"] == fixture.container
    assert report["layout"]["kind"] == fixture.layout
    assert [item["key"] for item in report["state_dicts"] if item["confidence"] == "high"] == fixture.state_dicts


@readable
def test_module_prefix(fixture: Fixture) -> None:
    report = ckptool.inspect(fixture.path)
    told = {
        item["prefix"]["status"] if item["prefix"]["name"].startswith("module.") else "none"
        for item in report["state_dicts"]
        if item["confidence"] == "high"
    }
    if fixture.prefix in ("all", "none"):
        assert told == {fixture.prefix}
    elif fixture.prefix == "some":  # of the keys, or of the state dicts
        assert "some" in told or len(told) > 1


@readable
def test_locations(fixture: Fixture) -> None:
    if fixture.path.name == "legacy_protocol0.pth":
        pytest.skip("protocol 0 writes persistent ids as text: no storage can be told")
    locations = {item["location"] for item in ckptool.inspect(fixture.path)["devices"]}
    assert locations - {"meta"} == set(fixture.locations)


@readable
def test_weights_only_agrees_with_torch(fixture: Fixture) -> None:
    verdict = ckptool.inspect(fixture.path)["weights_only"]
    assert verdict["loads"] == fixture.loads
    assert bool(verdict["blockers"]) is not fixture.loads
    assert all(("global" in blocker) != ("rule" in blocker) and blocker["count"] for blocker in verdict["blockers"])


@pytest.mark.parametrize("fixture", LOADABLE, ids=by_name)
def test_every_tensor_is_described_as_torch_loads_it(fixture: Fixture) -> None:
    if fixture.path.name == "zip_two_pickles.pth":
        pytest.skip("which pickle counts depends on the reader")
    with ckptool.open(fixture.path) as checkpoint:
        entries = checkpoint.survey.tensors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = oracle.load(fixture.path)
    for entry in entries:
        found = oracle.at(loaded, entry.path)
        tensor = entry.tensor
        if found is None or tensor.kind in ("nested", "jagged"):
            continue
        assert str(found.dtype) == f"torch.{tensor.dtype}", entry.path
        assert tuple(found.shape) == tensor.shape, entry.path
        assert found.requires_grad == tensor.requires_grad, entry.path
        if tensor.kind in ("dense", "quantized") and found.device.type != "meta":
            assert found.stride() == tensor.stride, entry.path
            if fixture.path.name != "py2_views.pth":  # torch makes a storage of each view, we count from the root
                assert found.storage_offset() == tensor.offset, entry.path
            assert isinstance(found, torch.nn.Parameter) == (tensor.cls == "Parameter"), entry.path


#: Formats that are read, with tests of their own.
OTHERS = {known.name for known in (*FORMATS, *ZIPS)} - {"torch-zip", "torch-legacy"}


@pytest.mark.parametrize(
    "fixture", [item for item in MANIFEST if item not in READABLE and item.container not in OTHERS], ids=by_name
)
def test_what_is_no_checkpoint_is_named(fixture: Fixture) -> None:
    with pytest.raises(MalformedError if fixture.path.name in NO_DIRECTORY else NotACheckpointError) as caught:
        ckptool.open(fixture.path)
    error = caught.value
    assert error.exit_code == 3 and error.path == str(fixture.path) and len(error.what) > 10
    expected = KINDS.get(fixture.container, fixture.container)
    if isinstance(error, NotACheckpointError) and expected:
        assert error.kind == expected


def test_bytes_are_accounted_for() -> None:
    report = ckptool.inspect(FIXTURES / "slice_of_big.pth")
    assert report["unused_bytes"] == 4000 * 4 - 3 * 4
    assert sum(item["bytes"] for item in report["devices"]) == report["storage_bytes"]
    report = ckptool.inspect(FIXTURES / "ddp4_training.pth")
    assert sum(entry["bytes"] for entry in report["entries"]) == report["storage_bytes"]
    assert report["unused_bytes"] == 0


def test_findings_have_one_next_command_for_all_that_write() -> None:
    findings = {item["code"]: item for item in ckptool.inspect(FIXTURES / "ddp4_training.pth")["findings"]}
    assert {findings["prefix"]["next"], findings["device"]["next"]} == {""}
    assert " --strip-module --to cpu -o " in findings["together"]["next"]
    (one,) = [item for item in ckptool.inspect(FIXTURES / "bare_module.pth")["findings"] if item["code"] == "prefix"]
    assert one["next"].startswith("ckptool strip-module ")


@pytest.mark.parametrize("copy", [True, False])
def test_a_state_dict_inside_a_state_dict_is_named_and_only_a_copy_is_dropped(copy: bool, tmp_path: Path) -> None:
    path = tmp_path / "nested.ckpt"
    state = {f"layers.{number}.weight": torch.ones(2, 2) for number in range(5)}
    inner = state if copy else {key: value + 1 for key, value in state.items()}
    torch.save({"state_dict": {**state, "state_dict": inner}}, path)
    found = {item["code"]: item for item in ckptool.inspect(path)["findings"]}["inner-state-dict"]
    assert "'state_dict.state_dict'" in found["message"]
    assert bool(found["next"]) == copy


def test_no_report_depends_on_the_order_of_sets() -> None:
    """Python hashes strings with another seed in each process; the same file still has the same report."""
    code = "import sys; from ckptool.cli.main import run; [run(['inspect', path, '--json']) for path in sys.argv[1:]]"
    paths = sorted(str(path) for path in FIXTURES.iterdir() if path.is_file())
    said = set()
    for seed in "0123":
        words, environment = [sys.executable, "-c", code, *paths], os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(words, env=environment, capture_output=True, check=False)
        said.add((done.stdout, done.stderr))
    assert len(said) == 1 and said.pop()[0]
