"""tie and untie against the tensors that torch loads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command_line import say
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from output_checks import saved

import ckptool
from ckptool.base.errors import RefusedError, TargetError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def edited(state: Any, folder: Path, *steps: tuple[str, str]) -> Any:
    with ckptool.open(saved(state, folder / "in.pth")) as checkpoint:
        ckptool.save(ckptool.edit(checkpoint, steps), folder / "out.pth", force=True)
    return oracle.load(folder / "out.pth")


def same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_equal_tensors_are_tied(tmp_path: Path) -> None:
    table = torch.randn(5, 3)
    state = {"head.weight": table.clone(), "wte.weight": table, "b": torch.ones(2)}
    found = edited(state, tmp_path, ("tie", "head.weight=wte.weight"))
    assert same_storage(found["head.weight"], found["wte.weight"])
    assert list(found) == list(state) and all(torch.equal(found[name], state[name]) for name in state)
    assert (tmp_path / "out.pth").stat().st_size < (tmp_path / "in.pth").stat().st_size


def test_a_missing_name_is_added(tmp_path: Path) -> None:
    found = edited({"model": {"wte.weight": torch.ones(2, 2)}, "epoch": 1}, tmp_path, ("tie", "head.weight=wte.weight"))
    assert list(found["model"]) == ["wte.weight", "head.weight"]
    assert same_storage(found["model"]["head.weight"], found["model"]["wte.weight"])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.ones(2, 3), torch.ones(3, 2)),
        (torch.ones(2, 3), torch.ones(2, 3).double()),
        (torch.zeros(2, 3), -torch.zeros(2, 3)),
        (torch.zeros(2), torch.arange(2.0)),
    ],
)
def test_different_tensors_are_not_tied(one: torch.Tensor, other: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(RefusedError):
        edited({"a": one, "b": other}, tmp_path, ("tie", "a=b"))


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(0, 4), st.sampled_from(["plain", "part", "turned", "expanded"]), st.booleans())
def test_an_untied_tensor_has_its_own_storage(rows: int, layout: str, legacy: bool) -> None:
    whole = torch.randn(6, 4)
    view = {"plain": whole[:rows], "part": whole[1 : 1 + rows, 1:3], "turned": whole.t()[:, :rows],
            "expanded": whole[0].expand(rows, 4)}[layout]  # fmt: skip
    state = {"whole": whole, "view": view.requires_grad_(not legacy)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(state, folder / "in.pth", _use_new_zipfile_serialization=not legacy)
        with ckptool.open(folder / "in.pth") as checkpoint:
            ckptool.save(ckptool.edit(checkpoint, [("untie", "view")]), folder / "out.pth")
        found = oracle.load(folder / "out.pth")
    assert list(found) == ["whole", "view"]
    assert torch.equal(found["view"], view) and found["view"].requires_grad is not legacy
    assert found["view"].untyped_storage().nbytes() == view.numel() * 4
    assert not view.numel() or not same_storage(found["view"], found["whole"])
    assert oracle.difference(whole, found["whole"]) == ""


def test_what_is_not_there_or_not_tied(tmp_path: Path) -> None:
    state = {"layer.weight": torch.ones(2)}
    with pytest.raises(RefusedError, match="shares its storage with no other"):
        edited(state, tmp_path, ("untie", "layer.weight"))
    for step in (("untie", "weight"), ("tie", "a=weight"), ("tie", "a"), ("tie", "a=a")):
        with pytest.raises(TargetError):
            edited(state, tmp_path, step)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    table = torch.randn(20, 4)
    path = saved({"a": table, "b": table}, tmp_path / "in.pth")
    data = bytearray(path.read_bytes())
    data[data.index(table.numpy().tobytes()) + 9] ^= 1
    path.write_bytes(data)
    said = say("slim", path, "--untie", "a", "-o", tmp_path / "out.pth")
    assert said.code == 3 and not (tmp_path / "out.pth").exists(), said.all


def _negated() -> torch.Tensor:
    """A tensor whose values are the negated bytes of its storage."""
    return torch._neg_view(torch.randn(6, 4))


@pytest.mark.parametrize("kind", ["recipe", "tie", "weight-norm", "lora merge", "adapter"])
def test_bytes_of_negated_tensors_are_not_taken_for_their_values(kind: str, tmp_path: Path) -> None:
    recipe = tmp_path / "turned.toml"
    recipe.write_text('[[rule]]\na = "x : o, i"\nb = "y : i, o"\n')
    negated, factor = _negated(), torch.ones(6, 2)
    lora = {"fc.lora_A.weight": torch.ones(2, 4), "fc.lora_B.weight": factor}
    states: dict[str, dict[str, torch.Tensor]] = {
        "recipe": {"x": negated},
        "tie": {"x": negated, "y": -negated.resolve_neg()},
        "weight-norm": {"fc.weight_v": negated, "fc.weight_g": torch.ones(6, 1)},
        "lora merge": {"fc.weight": negated},
        "adapter": {"fc.weight": torch.ones(6, 4)},
    }
    torch.save(states[kind], tmp_path / "model.pth")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    lora |= {"fc.lora_B.weight": torch._neg_view(factor)} if kind == "adapter" else {}
    torch.save(lora, tmp_path / "adapter/adapter_model.bin")
    ways: dict[str, Callable[[Path], object]] = {
        "recipe": lambda path: ckptool.convert(path, "torch", recipe=str(recipe)),
        "tie": lambda path: ckptool.edit(path, [("tie", "x=y")]),
        "weight-norm": lambda path: ckptool.edit(path, [("weight-norm", "fold")]),
    }
    with pytest.raises(RefusedError, match="conjugate or negative bit"):
        ways.get(kind, lambda path: ckptool.merge_lora(path, tmp_path / "adapter"))(tmp_path / "model.pth")
