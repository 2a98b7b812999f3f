"""match against torch: the fix that is found is done, and ``load_state_dict(strict=True)`` takes the result."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from models import TRAINED, Net, filled, state

import ckptool
from ckptool.matching import apply, match_checkpoint, wanted_of
from ckptool.objects import parse_path


def saved(made: Any, path: Path) -> Path:
    torch.save(state(made), path)
    return path


def at(loaded: Any, path: str) -> Any:
    for step in parse_path(path):
        loaded = loaded[step]
    return loaded


def fixed(source: Path, target: Path, out: Path, **how: Any) -> dict[str, Any]:
    """Match two files, do what is found, and return the report."""
    wanted = wanted_of(target)
    with ckptool.open(source) as checkpoint:
        found = match_checkpoint(checkpoint, wanted, **how)
        assert found.steps is not None, found.report
        shapes = {name: value.shape for name, value in wanted.tensors.items()}
        ckptool.save(apply(checkpoint, found.steps, shapes, key=found.key), out)
    return found.report


@pytest.mark.parametrize(("have", "want"), list(itertools.permutations(TRAINED, 2)))
def test_every_form_is_brought_into_every_other(have: str, want: str, tmp_path: Path) -> None:
    made, other = TRAINED[have](), TRAINED[want]()
    source, target, out = saved(made, tmp_path / "a.pth"), saved(other, tmp_path / "b.pth"), tmp_path / "out.pth"
    report = fixed(source, target, out)
    if report["fits"]:
        assert {have, want} == {"plain", "plain dict"}
        return
    fix = report["fix"]
    assert fix["complete"], fix
    assert fix["loads"] == report["wanted"] == len(filled(Net()).state_dict())
    expected = at(torch.load(target), report["target_state_dict"])
    result = at(torch.load(out), report["target_state_dict"])
    # Both were filled alike, so equal values say that every name has the tensor that it should have.
    assert list(result) == list(expected)
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    if isinstance(other, torch.nn.Module):
        other.load_state_dict(torch.load(out), strict=True)
    assert ckptool.match(out, target)["fits"]
