"""merge against ``{**ours, **theirs}`` on what torch loads, between all kinds of files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import FIXTURES, Fixture, by_name
from output_checks import VIEWS, WHOLE, at, checked, saved
from torch import nn

import ckptool
from ckptool.base.errors import RefusedError, TargetError
from ckptool.base.globs import Globs
from ckptool.checkpoint.paths import parse_path

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def single(item: Fixture) -> bool:
    """Is there just one state dict, so that nothing needs to be said?"""
    with ckptool.open(item.path) as checkpoint:
        return sum(found.confidence == "high" for found in checkpoint.state_dicts) == 1


PLAIN = [item for item in WHOLE if item.path.name not in VIEWS and single(item)]


def merged(path: Path, other: Path, out: Path, **how: Any) -> Any:
    with ckptool.open(path) as checkpoint, ckptool.open(other) as foreign:
        ckptool.save(ckptool.merge(checkpoint, foreign, **how), out, force=True)
    return checked(out, path, other)


def state_of(loaded: Any, path: Path) -> Any:
    with ckptool.open(path) as checkpoint:
        found = next(item for item in checkpoint.state_dicts if item.confidence == "high")
    return at(loaded, parse_path(found.path))


def naive(path: Path, other: Path, only: Globs | None = None) -> Any:
    loaded, theirs = oracle.load(path), state_of(oracle.load(other), other)
    ours = state_of(loaded, path)
    for key, value in theirs.items():
        if only is None or only.match(key):
            ours[key] = value
    # Modules that came with new keys bring their entries.
    for module, entry in getattr(theirs, "_metadata", {}).items():
        if hasattr(ours, "_metadata") and any(key.startswith(module + ".") for key in theirs if key in ours):
            ours._metadata.setdefault(module, entry)
    return loaded


def without_metadata(loaded: Any) -> Any:
    for value in [loaded, *(loaded.values() if isinstance(loaded, dict) else ())]:
        getattr(value, "__dict__", {}).pop("_metadata", None)
    return loaded


def clash(path: Path, other: Path) -> bool:
    """Is there a key with another shape?"""
    ours, theirs = (state_of(oracle.load(one), one) for one in (path, other))
    return any(
        isinstance(ours.get(key), torch.Tensor) and isinstance(value, torch.Tensor)
        and not value.is_nested and ours[key].shape != value.shape
        for key, value in theirs.items()
    )  # fmt: skip


@pytest.mark.parametrize("item", PLAIN, ids=by_name)
def test_every_file_into_another_and_back(item: Fixture, out: Path, tmp_path: Path) -> None:
    for path, other in ((FIXTURES / "wrapped.pth", item.path), (item.path, FIXTURES / "wrapped.pth")):
        if clash(path, other):
            continue
        found = merged(path, other, out)
        assert oracle.difference(without_metadata(naive(path, other)), without_metadata(found)) == ""


@pytest.mark.parametrize("one", [2, 3, 4, 5])
@pytest.mark.parametrize("two", [2, 3, 4, 5])
def test_between_pickle_protocols(one: int, two: int, tmp_path: Path, out: Path) -> None:
    """What torch's own restricted unpickler does not read is read by the full one, of files made here."""
    base = torch.arange(8.0)
    ours: dict[str, Any] = {"model": {"a.w": torch.ones(2), "b.w": torch.zeros(2)}, "epoch": 1 << 70}
    theirs: dict[str, Any] = {
        "a.w": base[:2],
        "c.w": base,
        "d.w": nn.Parameter(torch.ones(3)),
        "e._extra_state": (1, "x"),
    }
    path = saved(ours, tmp_path / "in.pth", pickle_protocol=one)
    other = saved(theirs, tmp_path / "other.pth", pickle_protocol=two)
    with ckptool.open(path) as checkpoint, ckptool.open(other) as foreign:
        ckptool.save(ckptool.merge(checkpoint, foreign), out)
    expected = copy.deepcopy(ours)
    expected["model"] |= theirs
    assert oracle.difference(expected, torch.load(out, weights_only=False)) == ""


def test_entries(out: Path) -> None:
    path, other = FIXTURES / "gan.pth", FIXTURES / "ddp4_training.pth"
    loaded, theirs = oracle.load(path), oracle.load(other)
    entries = [("state_dict", "netG"), ("optimizer", "more"), ("epoch", "epoch"), ("epoch", "netD.count")]
    loaded["netG"] = theirs["state_dict"]
    loaded["more"], loaded["epoch"] = theirs["optimizer"], theirs["epoch"]
    loaded["netD"]["count"] = theirs["epoch"]
    assert oracle.difference(loaded, merged(path, other, out, entry=entries)) == ""


def test_the_versions_of_new_modules_come_along(tmp_path: Path, out: Path) -> None:
    ours, theirs = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    path, other = (saved(m.state_dict(), tmp_path / name) for m, name in ((ours, "in.pth"), (theirs, "other.pth")))
    found = merged(path, other, out)
    assert found._metadata["1"] == {"version": 2}
    theirs.load_state_dict(found, strict=True)


def test_what_does_not_go_together(tmp_path: Path) -> None:
    path = saved({"a.w": torch.ones(3)}, tmp_path / "1.pth")
    other = saved({"a.w": torch.ones(2)}, tmp_path / "2.pth")
    with ckptool.open(path) as checkpoint, ckptool.open(other) as foreign, ckptool.open(FIXTURES / "gan.pth") as gan:
        with pytest.raises(RefusedError, match=r"'a\.w' has the shape \[2\] there and \[3\] here"):
            ckptool.merge(checkpoint, foreign)
        with pytest.raises(RefusedError, match="nothing is taken"):
            ckptool.merge(checkpoint, foreign, include=["b.*"])
        with pytest.raises(TargetError, match="2 state dicts"):
            ckptool.merge(checkpoint, gan)
        with pytest.raises(TargetError, match="nowhere"):
            ckptool.merge(checkpoint, foreign, entry=[("nowhere", "x")])
        with pytest.raises(TargetError, match="no mapping"):
            ckptool.merge(checkpoint, foreign, entry=[(".", 'nowhere["x"]')])
