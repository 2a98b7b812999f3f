"""``match`` infers a recipe where values and shapes prove every rule, and only there; ``--apply`` gives the target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import say

import ckptool

State = dict[str, torch.Tensor]


def fused(layers: int = 3) -> State:
    torch.manual_seed(layers)
    state: State = {"embed.weight": torch.randn(10, 8)}
    for n in range(layers):
        state[f"blocks.{n}.attn.in_proj_weight"] = torch.randn(24, 8)
        state[f"blocks.{n}.attn.in_proj_bias"] = torch.randn(24)
        state[f"blocks.{n}.attn.out_proj.weight"] = torch.randn(8, 8)
        state[f"blocks.{n}.mlp.weight"] = torch.randn(8, 16)
        state[f"blocks.{n}.point.weight"] = torch.randn(8, 8, 1, 1)
    return state


def split(state: State, sizes: tuple[int, int, int] = (8, 8, 8)) -> State:
    made: State = {}
    for name, value in state.items():
        if "in_proj" in name:
            kind = name.rpartition("_")[2]
            for letter, part in zip("qkv", value.split(sizes)):
                made[name.replace(f"in_proj_{kind}", f"{letter}_proj.{kind}")] = part.clone()
        elif name.endswith("mlp.weight"):
            made[name] = value.t().contiguous()
        else:
            made[name] = value.reshape(8, 8) if "point" in name else value
    return made


def saved(folder: Path, **states: State) -> list[Path]:
    for name, state in states.items():
        torch.save(state, folder / f"{name}.pth")
    return [folder / f"{name}.pth" for name in states]


@pytest.mark.parametrize("layers", [1, 3, 11])
@pytest.mark.parametrize("turned", [False, True])
def test_the_recipe_gives_the_target(layers: int, turned: bool, tmp_path: Path) -> None:
    sides = fused(layers), split(fused(layers))
    a, b = saved(tmp_path, a=sides[turned], b=sides[not turned])
    report = ckptool.match(a, b)
    assert report["fix"] is not None and report["fix"]["complete"]
    [text] = [str(step["value"]) for step in report["fix"]["steps"] if step["option"] == "recipe"]
    assert text.count("[[rule]]") == 4 and text.startswith('rest = "keep"')  # one rule for all layers
    (tmp_path / "rules.toml").write_text(text)
    ckptool.save(ckptool.convert(a, "torch", recipe=str(tmp_path / "rules.toml")), tmp_path / "made.pth")
    made, wanted = torch.load(tmp_path / "made.pth"), torch.load(b)
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[name], value) for name, value in wanted.items())
    assert "match" in report["fix"]["command"] and "apply" in report["fix"]["command"]


def test_sections_of_other_sizes(tmp_path: Path) -> None:
    state = fused()
    a, b = saved(tmp_path, a=state, b=split(state, (16, 4, 4)))
    fix = ckptool.match(a, b)["fix"]
    assert fix is not None and any("(16|4|4), i" in str(step["value"]) for step in fix["steps"])


def test_numbers_that_follow_from_others(tmp_path: Path) -> None:
    state = {f"net.{n}.up{k}.weight": torch.randn(4, 6) for n in range(4) for k in (1, 2)}
    other = {
        f"layer{n + 1}.up{k}.weight": state[f"net.{n}.up{k}.weight"].t().contiguous() for n in range(4) for k in (1, 2)
    }
    a, b = saved(tmp_path, a=state, b={name.replace("layer", "net.layer"): value for name, value in other.items()})
    fix = ckptool.match(a, b)["fix"]
    texts = [str(step["value"]) for step in fix["steps"] if step["option"] == "recipe"] if fix else []
    assert all("{L+1}" in text and text.count("[[rule]]") == 2 for text in texts)


def stacked(state: State, experts: int = 3, layers: int = 2) -> tuple[State, State]:
    """Experts one by one, with gate and up side by side, and as stacks."""
    torch.manual_seed(experts)
    one: State = dict(state)
    two: State = dict(state)
    for n in range(layers):
        gates, ups, downs = torch.randn(experts, 4, 6), torch.randn(experts, 4, 6), torch.randn(experts, 6, 4)
        biases = torch.randn(experts, 6)
        for e in range(experts):
            own = f"layers.{n}.moe.experts.{e}"
            one |= {f"{own}.w1.weight": gates[e].clone(), f"{own}.w3.weight": ups[e].clone()}
            one |= {f"{own}.w2.weight": downs[e].clone(), f"{own}.w2.bias": biases[e].clone()}
        two |= {f"layers.{n}.mlp.experts.gate_up": torch.cat([ups, gates], dim=1)}
        two |= {f"layers.{n}.mlp.experts.down": downs, f"layers.{n}.mlp.experts.down_bias": biases}
    return one, two


def by_recipe(a: Path, b: Path, folder: Path) -> str:
    """The recipe that match infers, once it was tried; "" if there is none."""
    fix = ckptool.match(a, b)["fix"]
    texts = [str(step["value"]) for step in fix["steps"] if step["option"] == "recipe"] if fix else []
    for text in texts:
        (folder / "rules.toml").write_text(text)
        ckptool.save(ckptool.convert(a, "torch", recipe=str(folder / "rules.toml")), folder / "made.pth", force=True)
        assert say("match", a, b, "--apply", "-o", folder / "fits.pth", "--force").code == 0
        wanted = torch.load(b)
        for made in (torch.load(folder / "made.pth"), torch.load(folder / "fits.pth")):
            assert made.keys() == wanted.keys()
            assert all(torch.equal(made[name], value) for name, value in wanted.items())
    return "".join(texts)


@pytest.mark.parametrize("experts", [2, 3, 11])
@pytest.mark.parametrize("turned", [False, True])
def test_stacks_of_experts(experts: int, turned: bool, tmp_path: Path) -> None:
    sides = stacked({"embed.weight": torch.randn(9, 6)}, experts)
    a, b = saved(tmp_path, a=sides[turned], b=sides[not turned])
    text = by_recipe(a, b, tmp_path)
    # The order of gate and up is that of the values.
    assert text.count("[[rule]]") == 3 and "e, (s|s), i" in text and ".w3.weight" in text.partition(".w1.weight")[0]


def swapped(state: State) -> State:
    """Two experts in each other's place."""
    names = {0: 1, 1: 0}
    return {
        name.replace(f"experts.{e}.", f"experts.{names.get(e, e)}.") if f"experts.{e}." in name else name: value
        for name, value in state.items()
        for e in [next((e for e in range(3) if f"experts.{e}." in name), 0)]
    }


@pytest.mark.parametrize(
    "change",
    [
        swapped,
        lambda state: {name: value for name, value in state.items() if "experts.2.w1" not in name},
        lambda state: {name: value.flip(0) if ".w3." in name else value for name, value in state.items()},
        lambda state: {name: torch.ones_like(value) if ".w3." in name else value for name, value in state.items()},
        lambda state: {name: value.double() if ".w3." in name else value for name, value in state.items()},
    ],
)
def test_no_stack_is_a_guess(change: Callable[[State], State], tmp_path: Path) -> None:
    one, two = stacked({})
    a, b = saved(tmp_path, a=change(one), b=two)
    assert by_recipe(a, b, tmp_path) == ""
    assert by_recipe(b, a, tmp_path) == ""
    lock = tmp_path / "b.lock.json"
    lock.write_text(json.dumps(ckptool.lock(b)))
    a, _ = saved(tmp_path, a=one, b=two)
    fix = ckptool.match(a, lock)["fix"]  # without values
    assert fix is None or not any(step["option"] == "recipe" for step in fix["steps"])


@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_padding(turned: bool, tmp_path: Path) -> None:
    table, head, bias = torch.randn(10, 6), torch.randn(10, 6), torch.randn(10)
    plain = {"embed.weight": table, "head.weight": head, "head.bias": bias, "norm.weight": torch.ones(6)}
    padded = {name: torch.cat([value, torch.zeros(6, *value.shape[1:])]) for name, value in plain.items()}
    padded["norm.weight"] = plain["norm.weight"]
    sides = padded, plain
    a, b = saved(tmp_path, a=sides[turned], b=sides[not turned])
    text = by_recipe(a, b, tmp_path)
    assert text.count("(10|_)") == 3 and ('_ = "=6"' in text) is turned


@pytest.mark.parametrize(
    "change",
    [
        lambda value: torch.cat([torch.zeros(6, 6), value]),
        lambda value: torch.cat([value, torch.ones(6, 6)]),
        lambda value: torch.cat([value.flip(0), torch.zeros(6, 6)]),
        lambda value: torch.cat([value.double(), torch.zeros(6, 6)]),
    ],
)
def test_no_padding_is_a_guess(change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    plain = {"embed.weight": torch.randn(10, 6), "norm.weight": torch.ones(6)}
    a, b = saved(tmp_path, a=plain, b=plain | {"embed.weight": change(plain["embed.weight"])})
    assert by_recipe(a, b, tmp_path) == ""


def interleaved(state: State) -> State:
    return {
        name: value.reshape(2, 3, 4, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
        if "in_proj" in name
        else value
        for name, value in state.items()
    }


@pytest.mark.parametrize(
    "change",
    [
        interleaved,
        lambda state: {name: value.flip(0) if "in_proj" in name else value for name, value in state.items()},
        lambda state: {name: torch.zeros_like(value) if "in_proj" in name else value for name, value in state.items()},
        lambda state: state | {"head.weight": torch.ones(3, 3)},
    ],
)
def test_nothing_is_inferred_from_a_guess(change: Callable[[State], State], tmp_path: Path) -> None:
    a, b = saved(tmp_path, a=change(fused()), b=split(fused()))
    fix = ckptool.match(a, b)["fix"]
    assert fix is None or not any(step["option"] == "recipe" for step in fix["steps"])


def test_without_values_only_shapes_count(tmp_path: Path) -> None:
    square = {name: value for name, value in fused().items() if "in_proj" not in name}
    plain = {name: value for name, value in square.items() if "out_proj" not in name}
    a, b, c, d = saved(tmp_path, a=plain, b=split(plain), c=fused(), d=split(fused()))
    e, f = saved(tmp_path, e=square, f=split(square))  # the square ones may be transposed as well
    for source, target, known in ((a, b, True), (c, d, False), (e, f, False)):
        lock = tmp_path / f"{target.stem}.lock.json"
        lock.write_text(json.dumps(ckptool.lock(target)))
        fix = ckptool.match(source, lock)["fix"]
        assert (fix is not None and any(step["option"] == "recipe" for step in fix["steps"])) is known
