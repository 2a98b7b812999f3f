"""use-ema against the averages that torch, and the classes of other libraries, keep."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command_line import say
from output_checks import saved
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckptool
from ckptool.base.errors import RefusedError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class LitEma(nn.Module):
    """ldm/modules/ema.py: names without dots, because a buffer has none in its name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.register_buffer("decay", torch.tensor(0.9))
        self.register_buffer("num_updates", torch.tensor(0))
        for name, parameter in model.named_parameters():
            self.register_buffer(name.replace(".", ""), parameter.detach().clone() + 1)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 2)))


def averaged(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data += 1
    return other


def used(state: Any, folder: Path, **how: Any) -> Any:
    steps = [*how.items(), ("use-ema", True)]
    with ckptool.open(saved(state, folder / "in.pth")) as checkpoint:
        ckptool.save(ckptool.edit(checkpoint, steps), folder / "out.pth", force=True)
    return oracle.load(folder / "out.pth")


def expected(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of the average, and the buffers of the model."""
    parameters = {name for name, _ in model.named_parameters()}
    return {name: value + 1 if name in parameters else value for name, value in model.state_dict().items()}


def same(one: dict[str, Any], other: dict[str, Any], names: Iterable[str] = ()) -> None:
    assert list(one) == list(names or other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_lit_ema_of_stable_diffusion(tmp_path: Path) -> None:
    class Diffusion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.ModuleDict({"diffusion_model": network()})
            self.model_ema = LitEma(self.model)
            self.first_stage_model = network()

    own = Diffusion()
    found = used({"state_dict": own.state_dict(), "global_step": 3}, tmp_path)
    assert found["global_step"] == 3
    wanted = {name: value for name, value in own.state_dict().items() if not name.startswith("model_ema.")}
    average = expected(own.model)
    wanted |= {f"model.{name}": value for name, value in average.items()}
    same(found["state_dict"], wanted)


def test_a_state_dict_beside_the_model(tmp_path: Path) -> None:
    own = network()
    ema = averaged(own).state_dict()
    for entry in ("state_dict_ema", "ema_state_dict", "ema", "swa"):
        found = used({"epoch": 1, "state_dict": own.state_dict(), entry: ema}, tmp_path)
        assert list(found) == ["epoch", "state_dict"]
        same(found["state_dict"], expected(own))


def test_the_average_of_a_wrapped_model_beside_the_model(tmp_path: Path) -> None:
    own = network()
    swa = AveragedModel(own)
    swa.module.load_state_dict(averaged(own).state_dict())
    found = used({"model": own.state_dict(), "swa_model": swa.state_dict()}, tmp_path)
    assert list(found) == ["model"]
    same(found["model"], expected(own))


def test_a_file_that_is_the_average(tmp_path: Path) -> None:
    own = network()
    swa = AveragedModel(own)
    found = used(swa.state_dict(), tmp_path)
    same(found, own.state_dict())
    network().load_state_dict(found)
    found = used({"ema": own.state_dict(), "epoch": 1}, tmp_path)
    same(found["ema"], own.state_dict())


ONES = torch.ones(2)


def lit_ema(*names: str) -> dict[str, Any]:
    return {"state_dict": dict.fromkeys([*names, "model_ema.num_updates"], ONES)}


REFUSED: dict[str, Any] = {
    "holds no averaged weights": {"model": {"a.weight": ONES}},
    "could stand for several names": lit_ema("model.a.b1.w", "model.ab.1.w", "model_ema.ab1w"),
    "model_ema.* could stand for several": lit_ema("model.a.b", "model.ab", "model_ema.ab"),
    "differ in shape": {"model": {"a.weight": ONES}, "ema": {"a.weight": torch.ones(3)}},
    "no model in it has the names": {"model": {"a.weight": ONES}, "ema": {"a.weight": ONES, "b.weight": ONES}},
    "there are several": {"model": {"a.weight": ONES}, "ema": {"a.weight": ONES}, "swa": {"a.weight": ONES}},
    "already": {"state_dict": {"a.weight": ONES}, "averaging_state": {}, "current_model_state": {"a.weight": ONES}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_clear_is_refused(message: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=message):
        used(REFUSED[message], tmp_path)


def test_two_models_need_a_name(tmp_path: Path) -> None:
    state = {"model": {"a.weight": ONES}, "teacher": {"a.weight": ONES}, "ema": {"a.weight": ONES + 1}}
    with pytest.raises(RefusedError, match="there are several"):
        used(state, tmp_path)
    found = used(state, tmp_path, key="model")
    assert list(found) == ["model", "teacher"]
    assert torch.equal(found["model"]["a.weight"], ONES + 1) and torch.equal(found["teacher"]["a.weight"], ONES)


def test_the_pickled_modules_of_yolo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = network()
    torch.save({"epoch": 3, "model": own, "ema": averaged(own)}, "best.pt")
    step = say("edit", "best.pt", "--use-ema", "-o", "out.pt").err.rpartition("-> ")[2].split()
    assert say(*step[1:]).code == 0
    found = oracle.load(Path(step[-1]))
    assert list(found) == ["epoch", "model"]
    same(found["model"], expected(own))
