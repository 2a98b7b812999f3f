"""``match`` names the recipe under which a model has exactly the names and shapes of the target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import FIXTURES

import ckptool

PARTS = FIXTURES / "llama_parts"


def converted(path: Path, out: Path, **more: str) -> Path:
    ckptool.save(ckptool.convert(path, "torch" if out.suffix == ".pth" else "safetensors", **more), out)
    return out


def test_a_table_is_offered_both_ways(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_bytes((PARTS / "params.json").read_bytes())
    meta = converted(PARTS, tmp_path / "meta.pth")
    hf = converted(PARTS, tmp_path / "hf.safetensors", to_names="hf:llama")
    for source, target in ((meta, hf), (hf, meta), (PARTS, hf)):
        report = ckptool.match(source, target)
        assert not report["fits"] and report["fix"] is not None and report["fix"]["complete"]
        [step] = [step for step in report["fix"]["steps"] if step["option"] == "to-names"]
        assert str(step["value"]).startswith("hf:" if target == hf else "meta:")
        made = ckptool.edit(source, [("to-names", step["value"])])
        out = tmp_path / "made.pth"
        ckptool.save(made, out, force=True)
        assert ckptool.match(out, target)["fits"]
        assert ckptool.hash(out)["content"] == ckptool.hash(converted(target, tmp_path / "same.pth"))["content"]
        (tmp_path / "same.pth").unlink()


@pytest.mark.parametrize("change", ["shape", "name", "number"])
def test_no_table_is_offered_where_it_does_not_fit_exactly(change: str, tmp_path: Path) -> None:
    if change != "number":
        (tmp_path / "params.json").write_bytes((PARTS / "params.json").read_bytes())
    meta = converted(PARTS, tmp_path / "meta.pth")
    hf = converted(PARTS, tmp_path / "hf.pth", to_names="hf:llama")
    state = torch.load(hf)
    if change == "shape":
        state["model.norm.weight"] = torch.ones(9)
    elif change == "name":
        state["model.extra.weight"] = torch.ones(2)
    torch.save(state, hf)
    fix = ckptool.match(meta, hf)["fix"]
    assert fix is None or not any(step["option"] == "to-names" for step in fix["steps"])
