"""Rank files that torch, accelerate and the way of verl wrote, against the tensors that torch gathered of them."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from conftest import FIXTURES
from safetensors.torch import load_file

import ckptool
from ckptool.base.errors import CkptoolError

RANKS = FIXTURES / "ranks"
#: Where the model and the states of its optimizer are in the whole.
PLACES = {
    "accelerate_sharded": ("pytorch_model_fsdp_0", "optimizer_0"),
    "fsdp1": ("model", "optimizer"),
    "fsdp1_layers": ("model", ""),
    "fsdp1_mesh": ("model", "optimizer"),
    "fsdp2_2": ("", ""),
    "fsdp2_3": ("model", "optimizer"),
    "fsdp2_tied": ("", ""),
    "fsdp2_tp": ("state_dict", ""),
    "hsdp1": ("model", ""),
    "hsdp2": ("", ""),
    "placements": ("", ""),
    "tp_2": ("state_dict", ""),
    "tp_3": ("state_dict", ""),
    "verl_fsdp1": ("model", ""),
    "verl_fsdp2": ("model", "optim"),
}
every = pytest.mark.parametrize("name", PLACES)


def oracle(name: str) -> dict[str, dict[str, torch.Tensor]]:
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in load_file(RANKS / f"{name}.safetensors").items():
        kind, _, rest = key.partition(".")
        kinds.setdefault(kind, {})[rest] = value
    return kinds


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, and of one dtype and shape."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pair = (value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(*pair)


def whole(folder: Path, out: Path) -> Any:
    ckptool.save(ckptool.convert(folder, "torch"), out)
    return torch.load(out)


@every
def test_weights_are_those_that_torch_gathers(name: str, tmp_path: Path) -> None:
    state = whole(RANKS / name, tmp_path / "one.pth")
    model = state[PLACES[name][0]] if PLACES[name][0] else state
    weights = oracle(name)["weights"]
    assert model.keys() == weights.keys()
    assert all(same(model[key], value) for key, value in weights.items())
    assert ckptool.validate(tmp_path / "one.pth")["valid"]


@pytest.mark.parametrize("name", [name for name, places in PLACES.items() if places[1]])
def test_states_of_the_optimizer_are_those_that_torch_gathers(name: str, tmp_path: Path) -> None:
    state = whole(RANKS / name, tmp_path / "one.pth")
    model, optimizer = (state[place] for place in PLACES[name])
    expected = oracle(name)
    names = [key for key in model if key in expected["exp_avg"]]
    states = optimizer["state"]
    if 0 in states:  # torch's own goes by the order of parameters
        states = dict(zip(names, (states[number] for number in sorted(states))))
    assert states.keys() == set(names)
    for kind in ("exp_avg", "exp_avg_sq"):
        assert all(same(states[key][kind], expected[kind][key]) for key in names)
    assert optimizer["param_groups"]


def test_flat_states_of_verl_are_vectors(tmp_path: Path) -> None:
    states = whole(RANKS / "verl_fsdp1", tmp_path / "one.pth")["optim"]["state"]
    expected = oracle("verl_fsdp1")["exp_avg"]
    order = ("short", "first.weight", "first.bias", "second.weight", "second.bias")
    flat = torch.cat([expected[name].flatten() for name in order if name in expected])
    assert same(states[0]["exp_avg"][: flat.numel()], flat)


#: The order of the model's names in the fixtures.
ORDER = ("short", "scale", "seen", "first.weight", "first.bias", "second.weight", "second.bias")
LOCAL = ("local_2", "local_3", "local_layers", "local_orig_2", "local_orig_3")


@pytest.fixture
def like(tmp_path: Path) -> Path:
    """A checkpoint of the model that was flattened, with other values."""
    weights = oracle("local_2")["weights"]
    torch.save({name: torch.zeros_like(weights[name]) for name in ORDER}, tmp_path / "like.pth")
    return tmp_path / "like.pth"


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("lock", [False, True])
def test_flat_parameters_become_those_of_the_model(name: str, lock: bool, like: Path, tmp_path: Path) -> None:
    if lock:
        ckptool.write_lock(like, tmp_path / "like.lock")
    target = tmp_path / "like.lock" if lock else like
    for kind in ("torch", "safetensors"):
        out = tmp_path / f"one.{kind}"
        ckptool.save(ckptool.convert(RANKS / name, kind, unflatten=target), out)
        state = torch.load(out) if kind == "torch" else load_file(out)
        weights = oracle(name)["weights"]
        assert state.keys() == weights.keys()
        assert all(same(state[key], value) for key, value in weights.items())


@pytest.mark.parametrize("name", LOCAL)
def test_flat_parameters_are_refused_without_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(CkptoolError, match="flat vectors of FSDP1") as error:
        whole(RANKS / name, tmp_path / "one.pth")
    assert "unflatten=" in error.value.next


@pytest.mark.parametrize("name", LOCAL)
def test_another_model_is_refused(name: str, tmp_path: Path) -> None:
    weights = {key: oracle(name)["weights"][key] for key in ORDER}
    other = weights | {"second.weight": torch.zeros(7, 6)}
    torch.save(other, tmp_path / "like.pth")
    with pytest.raises(CkptoolError, match=r"has (35|42|84) elements, and"):
        ckptool.convert(RANKS / name, "torch", unflatten=tmp_path / "like.pth")


@pytest.mark.parametrize("name", LOCAL[:3])
def test_an_order_that_is_not_that_of_the_model_is_refused(name: str, like: Path, tmp_path: Path) -> None:
    ckptool.save(ckptool.convert(like, "safetensors"), tmp_path / "like.safetensors")
    ckptool.write_lock(tmp_path / "like.safetensors", tmp_path / "like.lock")
    ckptool.save(ckptool.convert(tmp_path / "like.safetensors", "torch"), tmp_path / "by-name.pth")
    for target in ("like.safetensors", "like.lock", "by-name.pth"):
        with pytest.raises(CkptoolError, match="in the order of the model"):
            ckptool.convert(RANKS / name, "torch", unflatten=tmp_path / target)


def test_a_callable_may_give_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = oracle("local_2")["weights"]
    shapes = {name: list(weights[name].shape) for name in ORDER}
    text = f"import torch\ndef build():\n    return {{k: torch.zeros(v) for k, v in {shapes}.items()}}\n"
    (tmp_path / "flat_model.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "one.safetensors"
    run = say("convert", RANKS / "local_2", "-o", out, "--model", "flat_model:build")
    assert run.code == 0 and "--model imports and runs flat_model:build" in run.err
    state = load_file(out)
    assert all(same(state[key], value) for key, value in weights.items())


def test_partial_sums_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CkptoolError, match=r"sum.weight.*Partial"):
        whole(RANKS / "partial", tmp_path / "one.pth")


# -- states that FSDP1 has cut, which say nothing of themselves --------------------------------------------------------


def edited(folder: Path, name: str, change: Any) -> None:
    """Save a file again, by way of a buffer: the names of its records do not say which it was."""
    state, data = torch.load(folder / name, weights_only=False), io.BytesIO()
    change(state)
    torch.save(state, data)
    (folder / name).write_bytes(data.getvalue())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state["state"][0].update(exp_avg=state["state"][0]["exp_avg"].bfloat16()), "different dtypes"),
        (lambda state: state["state"][0].pop("exp_avg"), "it is not in optim_world_size_2_rank_1.pt"),
        (lambda state: state["state"].pop(0), "it is not in optim_world_size_2_rank_1.pt"),
        (lambda state: state["state"][0].update(exp_avg=state["state"][0]["exp_avg"][:-1].clone()), "other numbers"),
        (None, "one file is a copy of another"),
    ],
)
def test_states_that_ranks_have_unlike_are_not_joined(change: Any, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(RANKS / "verl_fsdp1", folder)
    if change is None:
        edited(folder, "optim_world_size_2_rank_0.pt", lambda state: None)
        shutil.copy(folder / "optim_world_size_2_rank_0.pt", folder / "optim_world_size_2_rank_1.pt")
    else:
        edited(folder, "optim_world_size_2_rank_1.pt", change)
    assert not ckptool.validate(folder)["valid"]
    with pytest.raises(CkptoolError, match=words):
        whole(folder, tmp_path / "one.pth")


def test_bytes_that_differ_are_no_random_state(tmp_path: Path) -> None:
    """Quantized weights are uint8 as well."""
    folder = tmp_path / "run"
    shutil.copytree(RANKS / "fsdp2_2", folder)
    for rank in range(2):
        extra = {"packed": torch.full((6,), rank, dtype=torch.uint8), "rng_state": torch.full((16,), rank).byte()}
        edited(folder, f"model.rank{rank}.pth", lambda state, extra=extra: state.update(extra))
    with ckptool.open(folder) as checkpoint:
        texts = [item.message for item in checkpoint.container.problems]
    assert any("packed" in text and "do not say how they fit together" in text for text in texts)
    assert any("rng_state" in text and "values of their own" in text for text in texts)
