"""weight-norm against torch's own modules, hooks and parametrizations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command_line import say
from output_checks import saved
from torch import nn
from torch.nn.utils import parametrizations

import ckptool
from ckptool.base.errors import RefusedError

pytestmark = pytest.mark.filterwarnings("ignore")

#: Modules, and the dimension of the norm.
MODULES = {
    "conv": (lambda: nn.Conv1d(4, 6, 3), 0),
    "turned": (lambda: nn.ConvTranspose1d(4, 6, 3), 1),
    "linear": (lambda: nn.Linear(5, 3), 0),
    "last": (lambda: nn.Linear(5, 3), 1),
    "all": (lambda: nn.Linear(5, 3), None),
    "one row": (lambda: nn.Conv1d(4, 1, 3), 0),
    "large": (lambda: nn.Linear(700, 3001), 0),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def model(name: str, form: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    make, axis = MODULES[name]
    wrap: Any = nn.utils.weight_norm if form == "old" else parametrizations.weight_norm
    made = nn.Sequential(wrap(make(), dim=axis), nn.ReLU()).to(dtype)
    for parameter in made.parameters():
        parameter.data.normal_()
    return made


def edited(state: Any, folder: Path, form: str) -> Any:
    with ckptool.open(saved(state, folder / "in.pth")) as checkpoint:
        ckptool.save(ckptool.edit(checkpoint, [("weight-norm", form)]), folder / "out.pth", force=True)
    return oracle.load(folder / "out.pth")


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(("old", "new"), [("old", "new"), ("new", "old")])
def test_the_other_names_load_into_torchs_other_module(name: str, old: str, new: str, tmp_path: Path) -> None:
    state = model(name, old).state_dict()
    found = edited(state, tmp_path, new)
    theirs = model(name, new)
    assert list(theirs.state_dict()) == list(found)
    theirs.load_state_dict(found)
    for one, other in zip(state.values(), found.values()):
        assert oracle.difference(one, other) == ""
    assert oracle.difference(dict(edited(found, tmp_path, old)), dict(state)) == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["old", "new"])
@pytest.mark.parametrize("name", MODULES)
def test_a_folded_weight_is_the_one_that_torch_computes(
    name: str, form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    own = model(name, form, dtype)
    state = own.state_dict()
    found = edited(state, tmp_path, "fold")
    plain = nn.Sequential(MODULES[name][0](), nn.ReLU()).to(dtype)
    plain.load_state_dict(found)
    g, v = (state[key] for key in state if key.endswith(("_g", "_v", "original0", "original1")))
    axis = MODULES[name][1]
    expected = torch._weight_norm(v, g, -1 if axis is None else axis)
    assert oracle.difference(expected, found["0.weight"]) == ""
    assert oracle.difference(state["0.bias"], found["0.bias"]) == ""


REFUSED = {
    "another parametrization": {
        "c.parametrizations.weight.original0": torch.ones(3, 1),
        "c.parametrizations.weight.original1": torch.ones(3, 4),
        "c.parametrizations.weight.1.base": torch.ones(3),
    },
    "exists beside": {"c.weight_g": torch.ones(3, 1), "c.weight_v": torch.ones(3, 4), "c.weight": torch.ones(3, 4)},
    "is not a plain": {"c.weight_g": torch.ones(3, 1), "c.weight_v": torch.ones(3, 4).half()},
    "no weight norm": {"mix_g": torch.ones(3, 4), "mix_v": torch.ones(3, 4)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_folded_is_refused(message: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=message):
        edited(REFUSED[message], tmp_path, "fold")


def test_a_tensor_that_must_be_in_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"c.weight_g": torch.ones(1, 4), "c.weight_v": torch.ones(300, 4)}
    monkeypatch.setattr("ckptool.edits.weight_norm._MOST", 4800)
    assert list(edited(state, tmp_path, "fold")) == ["c.weight"]
    monkeypatch.setattr("ckptool.edits.weight_norm._MOST", 4799)
    with pytest.raises(RefusedError, match="in memory"):
        edited(state, tmp_path, "fold")


def test_patterns_choose_norms(tmp_path: Path) -> None:
    state = {f"{name}.weight_{part}": torch.ones(2, 1 if part == "g" else 3) for name in "ab" for part in "gv"}
    with ckptool.open(saved(state, tmp_path / "in.pth")) as checkpoint:
        edit = ckptool.edit(checkpoint, [("include", "a.*"), ("weight-norm", "fold")])
        ckptool.save(edit, tmp_path / "out.pth")
    assert list(oracle.load(tmp_path / "out.pth")) == ["a.weight", "b.weight_g", "b.weight_v"]


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    state = model("conv", "old").state_dict()
    path = saved(state, tmp_path / "in.pth")
    whole = path.read_bytes()
    for name in ("0.weight_g", "0.weight_v"):
        data = bytearray(whole)
        data[data.index(state[name].numpy().tobytes()) + 3] ^= 1
        path.write_bytes(data)
        said = say("rename", path, "--weight-norm", "fold", "-o", tmp_path / "out.pth")
        assert said.code == 3 and not (tmp_path / "out.pth").exists(), said.all
