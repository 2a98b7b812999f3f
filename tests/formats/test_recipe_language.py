"""The keys of a recipe: what each allows, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.base.errors import MalformedError, RefusedError, TargetError

PARTS = """
prefixes = ["model.unet.", "unet.", ""]
[[rule]]
a = "layers.{L}.w"
b = "blocks.{L}.weight"
[[rule]]
a = "layers.{L}.skip"
b = "blocks.{L}.shortcut"
optional = "layer"
"""


def names(recipe: str, tensors: Iterable[str], folder: Path) -> list[str]:
    """The names that a recipe gives to tensors."""
    (folder / "recipe.toml").write_text(recipe)
    torch.save({name: torch.ones(2, 3) for name in tensors}, folder / "model.pth")
    return list(ckptool.convert(folder / "model.pth", "torch", recipe=str(folder / "recipe.toml")))


@pytest.mark.parametrize("prefix", ["model.unet.", "unet.", ""])
def test_a_part_is_taken_out_of_a_file_with_several_models(prefix: str, tmp_path: Path) -> None:
    own = [f"{prefix}layers.{number}.w" for number in range(2)]
    others = ["vae.layers.0.w", "text.w"] if prefix else []
    assert names(PARTS, [*own, *others], tmp_path) == ["blocks.0.weight", "blocks.1.weight"]


def test_a_tensor_of_the_part_needs_a_rule(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"b has no name for 'unet.other'"):
        names(PARTS, ["unet.layers.0.w", "unet.other", "vae.layers.0.w"], tmp_path)


def test_the_inverse_writes_the_first_prefix(tmp_path: Path) -> None:
    assert names(PARTS, ["blocks.0.weight"], tmp_path) == ["model.unet.layers.0.w"]


def test_some_layers_may_lack_what_is_optional_by_layer(tmp_path: Path) -> None:
    assert len(names(PARTS, ["layers.0.w", "layers.1.w", "layers.1.skip"], tmp_path)) == 3
    with pytest.raises(RefusedError, match=r"'layers.1.skip' is missing"):
        names(PARTS.replace('"layer"', "true"), ["layers.0.w", "layers.0.skip", "layers.1.w"], tmp_path)


@pytest.mark.parametrize("missing", ["layers.1.0.a", "layers.0.1.b"])
def test_each_pair_of_numbers_has_the_same_tensors(missing: str, tmp_path: Path) -> None:
    recipe = '[[rule]]\na = "layers.{L}.{J}.{a|b}"\nb = "blocks.{L}.units.{J}.{x|y}"\n'
    every = [f"layers.{layer}.{unit}.{name}" for layer in range(2) for unit in range(2) for name in "ab"]
    assert len(names(recipe, every, tmp_path)) == 8
    with pytest.raises(RefusedError, match=f"'{missing}' is missing"):
        names(recipe, [name for name in every if name != missing], tmp_path)


SAMPLER = """
[[rule]]
a = "layers.{L}.1.attn"
b = "blocks.{L}.attention"
optional = "layer"
[[rule]]
a = "layers.{L}.1.conv"
b = "blocks.{L}.sampler"
where = { b = "not blocks.{L}.attention" }
optional = "layer"
[[rule]]
a = "layers.{L}.2.conv"
b = "blocks.{L}.sampler"
where = { b = "blocks.{L}.attention" }
optional = "layer"
"""


def test_the_inverse_looks_at_the_neighbours_of_a_tensor(tmp_path: Path) -> None:
    own, others = ["layers.0.1.conv", "layers.1.1.attn", "layers.1.2.conv"], ["sampler", "attention", "sampler"]
    blocks = [f"blocks.{number}.{name}" for number, name in zip((0, 1, 1), others)]
    assert names(SAMPLER, own, tmp_path) == blocks
    assert names(SAMPLER, blocks, tmp_path) == own


LAST = """
prefixes = ["model."]
[[rule]]
a = "layers.{L}.scale"
b = "blocks.{L}.first"
where = { a = "layers.{L}.mlp", b = "blocks.{L}.ff" }
optional = "layer"
[[rule]]
a = "layers.{L}.scale"
b = "blocks.{L}.last"
where = { a = "not layers.{L}.mlp" }
optional = "layer"
[[rule]]
a = "layers.{L}.mlp"
b = "blocks.{L}.ff"
optional = "layer"
"""


def test_a_tensor_with_one_name_becomes_another_in_the_last_layer(tmp_path: Path) -> None:
    own = ["model.layers.0.scale", "model.layers.0.mlp", "model.layers.1.scale"]
    blocks = ["blocks.0.first", "blocks.0.ff", "blocks.1.last"]
    assert names(LAST, own, tmp_path) == blocks
    assert names(LAST, blocks, tmp_path) == own


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_neighbour_has_the_holes_of_its_side(side: str, tmp_path: Path) -> None:
    recipe = f'[[rule]]\na = "x.{{L}}"\nb = "y.{{L}}"\nwhere = {{ {side} = "z.{{M}}" }}\n'
    with pytest.raises(MalformedError, match="rule 1: the names in where have no other holes"):
        names(recipe, ["x.0"], tmp_path)


@pytest.mark.parametrize("value", ["1 + x", "x - 1", "sum"])
def test_no_rule_computes_values(value: str, tmp_path: Path) -> None:
    with pytest.raises(MalformedError, match="rule 1: it has a and b"):
        names(f'[[rule]]\na = "x"\nb = "y"\nvalue = "{value}"\n', ["x"], tmp_path)


NINES = "9" * 5000
WORDS = ".".join("{" + "|".join(f"w{number}" for number in range(300)) + "}" for _ in range(7))
RENAMES = '[[rule]]\na = "x.{L}"\nb = "y.{L}"\n'


@pytest.mark.parametrize(
    ("recipe", "error"),
    [
        (f'[[rule]]\na = "x.{{L+{NINES}}}"\nb = "y.{{L}}"\n', "is not a sum, as"),
        (f'[[rule]]\na = "x : {NINES}"\nb = "y : {NINES}"\n', "is not expected there"),
        (f'[numbers]\nh = "={NINES}"\n{RENAMES}', "is not a formula"),
        (f'[[rule]]\na = "x.{WORDS}"\nb = "y.{WORDS}"\n', "stands for more than 256 names"),
        ('[[rule]]\na = "x.{A}{B}"\nb = "y.{A}.{B}"\n', "which is which"),
        ('[[rule]]\na = "x.{A}1{B}"\nb = "y.{A}.{B}"\n', "which is which"),
        (f'[[rule]]\na = "x : {", ".join(["(a|b|c)"] * 8)}"\nb = "y : 1"\n', "has more than 64 blocks"),
        (f'stacked = "x"\n[[rule]]\na = "x"\nb = "y"\n{RENAMES}', "stacked is the part of a name"),
        (f"[config]\nd = 2020-01-01\n{RENAMES}", "config.d is not a value that JSON has"),
        (f"[config]\nd = nan\n{RENAMES}", "config.d is not a value that JSON has"),
        (f"[config]\nd = {{}}\n{RENAMES}", "config.d is a table with from"),
        (f"[config]\nd = {{ from = 3 }}\n{RENAMES}", "config.d.from is a text"),
        (f'[config]\nd = {{ if = 3, from = "n" }}\n{RENAMES}', "config.d is a table with from"),
    ],
)
def test_what_a_recipe_cannot_mean_is_refused_when_it_is_read(recipe: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(MalformedError, match=error):
        names(recipe, ["x.0"], tmp_path)


@pytest.mark.parametrize("place", ["", "a#b"])
def test_a_place_that_no_configuration_has_leaves_a_number_unknown(place: str, tmp_path: Path) -> None:
    recipe = f'[numbers]\nh = ["{place}"]\n[[rule]]\na = "x : h r, i"\nb = "y : r h, i"\n'
    with pytest.raises(RefusedError, match="not known"):
        names(recipe, ["x"], tmp_path)


def test_formulas_of_formulas_make_no_endless_numbers(tmp_path: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    chains = [f'{p}{two} = "={p}{one} * {p}{one}"' for p in "xyz" for one, two in pairwise(letters)]
    starts = ['xa = "=999999999"', 'ya = "=xz"', 'za = "=yz"']
    assert names("\n".join(["[numbers]", *starts, *chains, RENAMES]), ["x.0"], tmp_path) == ["y.0"]


@pytest.mark.parametrize("own", [["x.2000000000"], ["x.0", "x.2000000000"]])
def test_a_huge_number_in_a_name_costs_no_memory(own: list[str], tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=rf"'x\.{len(own) - 1}' is missing"):
        names(RENAMES, own, tmp_path)


def test_numbers_in_names_are_not_negative(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"'x.0' would become 'y.-5'"):
        names(RENAMES.replace("y.{L}", "y.{L-5}"), ["x.0"], tmp_path)


EXPERTS = '[[rule]]\na = "x.{L}.{e}.w : o, i"\nb = "y.{L} : e, o, i"\n'


@pytest.mark.parametrize(
    ("own", "missing"),
    [
        (["x.0.0.w", "x.0.1.w", "x.1.0.w"], "x.1.1.w"),
        (["x.0.0.w", "x.1.0.w", "x.1.1.w"], "x.0.1.w"),
        (["x.0.0.w", "x.0.2.w"], "x.0.1.w"),
        (["x.0.0.w", "x.0.2000000000.w"], "x.0.1.w"),
    ],
)
def test_each_layer_has_all_experts(own: list[str], missing: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=f"'{missing}' is missing"):
        names(EXPERTS, own, tmp_path)


def test_a_recipe_that_fits_two_models_needs_the_key_of_one(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RENAMES)
    one, two = ({f"x.{layer}": torch.full((2,), value) for layer in range(2)} for value in (1.0, 2.0))
    torch.save({"model": one, "ema": two}, tmp_path / "model.pth")
    how: dict[str, str] = {"to_format": "torch", "recipe": str(tmp_path / "recipe.toml")}
    with pytest.raises(TargetError, match="the recipe fits 2 state dicts: 'model' and 'ema'"):
        ckptool.convert(tmp_path / "model.pth", **how)
    found = ckptool.convert(tmp_path / "model.pth", key="ema", **how)
    assert list(found) == ["y.0", "y.1"]


@pytest.mark.parametrize("axes", [(" : o, i", " : i, o"), ("", "")])
def test_a_recipe_says_that_the_optimizer_no_longer_fits(axes: tuple[str, str], tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "model.pth")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'rest = "keep"\n[[rule]]\na = "weight{axes[0]}"\nb = "w{axes[1]}"\n')
    found = ckptool.convert(tmp_path / "model.pth", "torch", recipe=str(recipe))
    notes = [note for change in found.changes for note in change.notes]
    assert any("optimizer" in note for note in notes) == bool(axes[0])


@pytest.mark.parametrize(
    "axes", [("v, i", "(v|_), i"), ("v, i", "(_|v), i"), ("v, i", "i, (v|_)"), ("(a|a), i", "(a|_|a), i")]
)
def test_padding_is_zeros(axes: tuple[str, str], tmp_path: Path) -> None:
    """Also where nothing else lies between the rows and the next tensor of the file."""
    (tmp_path / "recipe.toml").write_text(f'[numbers]\n_ = "=2"\n[[rule]]\na = "x : {axes[0]}"\nb = "y : {axes[1]}"\n')
    whole = torch.arange(1, 31).reshape(10, 3)
    torch.save({"x": whole[:4].clone()}, tmp_path / "one.pth")
    torch.save({"x": whole[:4]}, tmp_path / "part.pth")  # the rows behind it are in the file
    rows, zeros = whole[:4], torch.zeros(2, 3, dtype=torch.int64)
    places = {"(v|_), i": (rows, zeros), "(_|v), i": (zeros, rows), "i, (v|_)": (rows, zeros)}
    wanted = torch.cat(places.get(axes[1], (rows[:2], zeros, rows[2:])))
    for name in ("one", "part"):
        made = ckptool.convert(tmp_path / f"{name}.pth", "torch", recipe=str(tmp_path / "recipe.toml"))
        ckptool.save(made, tmp_path / "made.pth", force=True)
        assert torch.equal(torch.load(tmp_path / "made.pth")["y"], wanted.t() if axes[1][0] == "i" else wanted)
