"""The law of edits: loading our output equals the same edit done naively on what torch loaded."""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest
from conftest import CHECKPOINTS, LOADABLE, Fixture, by_name
from naive_edits import strip, without_metadata

import ckptool
from ckptool.base.errors import RefusedError
from ckptool.checkpoint.paths import parse_path

#: Two records of one name, or overlapping ones: nobody knows what an edit would mean, and it is refused (test_zip.py).
AMBIGUOUS = {"zip_two_pickles.pth"}
CLEAR = [item for item in LOADABLE if item.path.name not in AMBIGUOUS]
loadable = pytest.mark.parametrize("fixture", CLEAR, ids=by_name)
every = pytest.mark.parametrize("fixture", CHECKPOINTS, ids=by_name)

CUT = {"truncated.pth", "truncated_legacy.pth", "zip_leading.pth"}


def edited(fixture: Fixture, out: Path, edit: str) -> ckptool.Checkpoint:
    with ckptool.open(fixture.path) as checkpoint:
        if edit == "strip":
            result = ckptool.strip_module(checkpoint)
        elif edit == "add":
            result = ckptool.add_module(checkpoint)
        else:
            result = ckptool.remap(checkpoint, edit)
        ckptool.save(result, out)
        return result


def paths_of(fixture: Fixture) -> list[list[str | int]]:
    with ckptool.open(fixture.path) as checkpoint:
        return [parse_path(item.path) for item in checkpoint.state_dicts if item.confidence == "high"]


@loadable
def test_strip_equals_the_naive_edit(fixture: Fixture, out: Path) -> None:
    if fixture.path.name == "collision.pth":
        with pytest.raises(RefusedError, match=r"'a.*module.a|module.a.*'a"):
            edited(fixture, out, "strip")
        assert not out.exists()
        return
    edited(fixture, out, "strip")
    expected = oracle.rename(oracle.load(fixture.path), paths_of(fixture), strip)
    assert oracle.difference(without_metadata(expected), without_metadata(oracle.load(out))) == ""


@loadable
def test_add_equals_the_naive_edit(fixture: Fixture, out: Path) -> None:
    edited(fixture, out, "add")
    expected = oracle.rename(oracle.load(fixture.path), paths_of(fixture), "module.".__add__)
    assert oracle.difference(without_metadata(expected), without_metadata(oracle.load(out))) == ""


@loadable
@pytest.mark.parametrize("target", ["cpu", "cuda:0"])
def test_remap_changes_the_tags_and_nothing_else(fixture: Fixture, target: str, out: Path) -> None:
    edited(fixture, out, target)
    before = oracle.tags(fixture.path)
    assert oracle.tags(out) == [tag if tag in ("cpu", "meta") else target for tag in before]
    if fixture.path.name != "devices_in_config.pth":  # torch.device objects follow
        assert oracle.difference(oracle.load(fixture.path), oracle.load(out)) == ""


@every
def test_without_an_edit_the_output_is_the_input(fixture: Fixture, out: Path) -> None:
    if fixture.path.name in CUT:
        pytest.skip("not whole")
    with ckptool.open(fixture.path) as checkpoint:
        ckptool.save(checkpoint, out)
    assert out.read_bytes() == fixture.path.read_bytes()


@every
def test_add_then_strip_gives_back_the_input(fixture: Fixture, tmp_path: Path) -> None:
    if fixture.path.name in AMBIGUOUS | CUT | {"legacy_protocol0.pth"}:
        pytest.skip("refused")
    one, two = tmp_path / "one.pth", tmp_path / "two.pth"
    added = edited(fixture, one, "add")
    with ckptool.open(one) as checkpoint:
        ckptool.save(ckptool.strip_module(checkpoint), two)
    if fixture.path.name in FOREIGN or not added.edited:
        return
    assert two.read_bytes() == fixture.path.read_bytes()


#: Archives that torch.save did not write (dead bytes, deflated records), and a pickle that no pickler writes.
FOREIGN = {"hostile_inst.pth", "zip_after_stop.pth", "zip_deflated.pth", "zip_deflated_pickle.pth", "zip_gaps.pth"}
