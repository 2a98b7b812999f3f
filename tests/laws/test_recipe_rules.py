"""A rule moves every element to its place: random rules and tensors, against an oracle that counts indices."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.base.errors import RefusedError
from ckptool.formats import pieces

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128, torch.float8_e4m3fn, torch.bool)


class Case(NamedTuple):
    """A rule as text, the sizes of its symbols, and the blocks of both sides with their factors by dimension.

    On each side there is one list of dimensions for each block; the blocks lie one behind the other along ``along``,
    in one tensor or in tensors of their own.
    """

    sizes: dict[str, int]
    a: list[list[list[str]]]
    b: list[list[list[str]]]
    joined_a: bool
    joined_b: bool
    along_a: int
    along_b: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    common = [f"f{letter}" for letter in "abcd"[: draw(st.integers(1, 4))]]
    count = draw(st.integers(1, 3))
    own = [f"s{letter}" for letter in "xyz"[:count]] if draw(st.booleans()) else ["sx"] * count
    sizes = {symbol: draw(st.integers(1, 4)) for symbol in {*common, *own}}
    sides = []
    for _ in range(2):
        order = draw(st.permutations(common))
        cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=2)))
        dimensions = [list(part) for part in itertools.pairwise([0, *cuts, len(order)])]
        plan = [order[begin:end] for begin, end in dimensions if end > begin]
        along = draw(st.integers(0, len(plan)))
        place = draw(st.integers(0, len(plan[along]))) if along < len(plan) else 0
        joined = draw(st.booleans())
        sides.append((plan, along, place, joined))
    blocks = []
    for plan, along, place, _ in sides:
        side = []
        for symbol in own:
            dimensions = [list(part) for part in plan]
            if along < len(plan):
                dimensions[along].insert(place, symbol)
            else:
                dimensions.append([symbol])
            side.append(dimensions)
        blocks.append(side)
    return Case(sizes, *blocks, sides[0][3], sides[1][3], sides[0][1], sides[1][1])


def text(side: list[list[list[str]]], joined: bool, along: int, name: str) -> list[str]:
    """The patterns of one side."""
    if not joined or len(side) == 1:
        return [f"{name}{at} : {', '.join(' '.join(part) for part in block)}" for at, block in enumerate(side)]
    place = next(at for at, symbol in enumerate(side[0][along]) if symbol.startswith("s"))
    sections = "(" + "|".join(block[along][place] for block in side) + ")"
    dimensions = [list(part) for part in side[0]]
    dimensions[along][place] = sections
    return [f"{name} : {', '.join(' '.join(part) for part in dimensions)}"]


def made(case: Case, which: int, values: list[torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The tensors of one side: each block from its values, whose dimensions are its factors in sorted order."""
    side, joined, along = (case.a, case.joined_a, case.along_a) if which == 0 else (case.b, case.joined_b, case.along_b)
    parts = []
    for block, value in zip(side, values):
        names = sorted(symbol for part in block for symbol in part)
        flat = [symbol for part in block for symbol in part]
        parts.append(value.permute([names.index(symbol) for symbol in flat]).reshape([case.sizes[s] for s in flat]))
    if not joined or len(side) == 1:
        shapes = [[_product(case, part) for part in block] for block in side]
        return {f"{name}{at}": part.reshape(shape) for at, (part, shape) in enumerate(zip(parts, shapes))}
    flat = [symbol for part in side[0] for symbol in part]
    axis = next(at for at, symbol in enumerate(flat) if symbol.startswith("s"))
    whole = torch.cat(parts, dim=axis)
    shape = []
    for at, part in enumerate(side[0]):
        others = _product(case, [symbol for symbol in part if not symbol.startswith("s")])
        shape.append(others * (whole.shape[axis] if at == along else 1))
    return {name: whole.reshape(shape)}


def _product(case: Case, symbols: list[str]) -> int:
    product = 1
    for symbol in symbols:
        product *= case.sizes[symbol]
    return product


def content(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements, row by row."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def converted(path: Path, recipe: Path, out: Path, config: dict[str, int]) -> dict[str, Any]:
    out.unlink(missing_ok=True)
    ckptool.save(ckptool.convert(path, "torch", recipe=str(recipe), config=config), out)
    loaded: dict[str, Any] = torch.load(out)
    return loaded


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), dtype=st.sampled_from(DTYPES), turn=st.booleans(), window=st.sampled_from([16, 64, 1 << 22]))
def test_every_element_gets_to_its_place(
    case: Case, dtype: torch.dtype, turn: bool, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_WINDOW", window)
    values, start = [], 0
    for block in case.a:
        shape = [case.sizes[symbol] for symbol in sorted(symbol for part in block for symbol in part)]
        numel = _product(case, [symbol for part in block for symbol in part])
        numbers = torch.arange(start, start + numel).reshape(shape)
        start += numel
        values.append(numbers.bool() if dtype is torch.bool else numbers.to(torch.uint8 if numel > 200 else dtype))
    values = [value.to(values[0].dtype) for value in values]
    a, b = made(case, 0, values, "in"), made(case, 1, values, "out")
    if turn:  # a view whose elements lie in another order
        a = {name: value.t().contiguous().t() if value.dim() == 2 else value for name, value in a.items()}
    symbols = sorted(case.sizes)
    recipe = tmp_path / "rule.toml"
    numbers_text = "".join(f'{symbol} = "{symbol}"\n' for symbol in symbols)
    sides = [text(case.a, case.joined_a, case.along_a, "in"), text(case.b, case.joined_b, case.along_b, "out")]
    recipe.write_text(f"[numbers]\n{numbers_text}[[rule]]\na = {sides[0]}\nb = {sides[1]}\n".replace("'", '"'))
    torch.save(a, tmp_path / "a.pth")
    there = converted(tmp_path / "a.pth", recipe, tmp_path / "b.pth", case.sizes)
    assert there.keys() == b.keys()
    for name, value in b.items():
        assert there[name].shape == value.shape
        assert torch.equal(content(there[name]), content(value)), name
    back = converted(tmp_path / "b.pth", recipe, tmp_path / "again.pth", case.sizes)
    assert {name: value.tolist() for name, value in back.items()} == {name: value.tolist() for name, value in a.items()}


def test_elements_of_less_than_a_byte_are_not_cut(tmp_path: Path) -> None:
    packed = torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    torch.save({"x": packed}, tmp_path / "packed.pth")
    (tmp_path / "turn.toml").write_text('[[rule]]\na = "x : i, o"\nb = "y : o, i"\n')
    with pytest.raises(RefusedError, match="cannot be cut: it is packed"):
        ckptool.convert(tmp_path / "packed.pth", "torch", recipe=str(tmp_path / "turn.toml"))
    (tmp_path / "name.toml").write_text('[[rule]]\na = "x"\nb = "y"\n')
    assert list(ckptool.convert(tmp_path / "packed.pth", "torch", recipe=str(tmp_path / "name.toml"))) == ["y"]
