"""Candidates from names and shapes alone: what training and other libraries did to names is undone, and no more."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.base.errors import RefusedError
from ckptool.base.steps import Step
from ckptool.edits.matching.candidates import Candidate, Space, best_renaming, renaming
from ckptool.edits.matching.pairing import (
    Pairing,
    Shape,
    Spec,
    agrees,
    fillable,
    names_agree,
    pair_in_order,
    pair_names,
)
from ckptool.edits.matching.values import Values

Names = dict[str, Shape]

WORDS = ("conv", "norm", "attn", "mlp", "fc1", "fc2", "down", "proj", "block", "net")
SHAPES: tuple[Shape, ...] = ((4,), (4, 4), (8, 4), (2, 3, 3), ())


@st.composite
def models(draw: st.DrawFn) -> Names:
    """The names of a model: a stem, numbered layers that are alike, a head."""
    found: Names = {}
    parts = draw(st.lists(st.sampled_from(WORDS), min_size=2, max_size=5, unique=True))
    layers = draw(st.integers(1, 4))
    stack = draw(st.sampled_from(("layers", "blocks", "encoder.layer", "features")))
    for part in parts:
        shape = draw(st.sampled_from(SHAPES))
        found |= {f"{stack}.{n}.{part}.weight": shape for n in range(layers)}
        if draw(st.booleans()):
            found |= {f"{stack}.{n}.{part}.bias": (4,) for n in range(layers)}
    found["stem.weight"] = draw(st.sampled_from(SHAPES))
    found["head.weight"] = draw(st.sampled_from(SHAPES))
    found["head.bias"] = (7,)
    return found


#: What training and other libraries do to names.
DONE: dict[str, Callable[[str], str]] = {
    "module.": "module.".__add__,
    "_orig_mod.": "_orig_mod.".__add__,
    "model.": "model.".__add__,
    "backbone.body.": "backbone.body.".__add__,
    "FSDP": lambda name: re.sub(r"(layers|blocks|features)\.(\d+)\.", r"\1.\2._fsdp_wrapped_module.", name),
    "gamma": lambda name: re.sub("norm.weight$", "norm.gamma", name),
}
changes = st.lists(st.sampled_from(sorted(DONE)), min_size=0, max_size=2, unique=True)


def after(names: Names, done: list[str]) -> Names:
    for change in done:
        names = {DONE[change](name): shape for name, shape in names.items()}
    return names


def found_for(have: Names, wanted: Names, target: str = "target.pth") -> Candidate:
    sides = [{name: Spec(shape, "float32") for name, shape in side.items()} for side in (have, wanted)]
    space = Space(sides[0], sides[1], frozenset(), Pairing(Values("nowhere", ""), None))
    return best_renaming(space, space.candidate((), [*have]), target)


@given(models(), changes)
@settings(max_examples=examples(500))
def test_what_was_done_to_names_is_undone(model: Names, done: list[str]) -> None:
    for have, wanted in ((after(model, done), model), (model, after(model, done))):
        found = found_for(have, wanted)
        assert found.names == list(wanted), (done, found.steps)
        assert bool(found.steps) == (have != wanted)


@given(models(), models(), st.randoms())
@settings(max_examples=examples(200))
def test_no_renaming_loses_a_name_or_claims_what_names_do_not_show(one: Names, other: Names, random: object) -> None:
    order = list(other)
    random.shuffle(order)  # type: ignore[attr-defined]
    found = found_for(one, {name: other[name] for name in order})
    assert len(set(found.names)) == len(one)
    assert found.rank >= found_for(one, other, target="").rank or found.steps
    assert all(names_agree(own, name) for own, name in zip(one, found.names) if own != name and name in other)
    if not any(step.name == "rename-like" for step in found.steps):
        names = list(one)
        for step in found.steps:
            rename = renaming(step, names)
            names = [rename(name) for name in names]
        assert names == found.names


def test_layers_with_the_number_and_shape_of_others_are_not_taken_for_them() -> None:
    have: Names = {f"layers.{n}.{part}.weight": (8,) for n in range(3) for part in ("a", "b")}
    wanted: Names = {f"x.{n}.weight": (8,) for n in range(6)}
    assert pair_names(have, wanted) == {}
    assert found_for(have, wanted).steps == ()


@pytest.mark.parametrize("layers", [40, 700])
def test_two_prefixes_in_large_models(layers: int) -> None:
    parts = ("q", "k", "v", "out", "fc1", "fc2")
    plain: Names = {f"blocks.{n}.{part}.weight": (8, n % 3 + 1) for n in range(layers) for part in parts}
    plain |= {"head.weight": (5, 8), "head.bias": (5,)}
    for begin in ("module.", "module.model.", "net._orig_mod."):
        found = found_for({begin + name: shape for name, shape in plain.items()}, plain, target="")
        assert found.names == list(plain) and len(found.steps) <= 2
    found = found_for({f"encoder.{name}": shape for name, shape in plain.items()}, after(plain, ["model."]), target="")
    assert found.steps == (Step("rename", "encoder.*=model.*"),)


def test_by_order_names_the_first_disagreement() -> None:
    assert pair_in_order({"a": (3,), "b": ()}, {"x": (3,), "y": ()}) == {"a": "x", "b": "y"}
    with pytest.raises(RefusedError, match=r"key 2 is 'b' of shape 4 here, 'y' of shape 2x2 there"):
        pair_in_order({"a": (3,), "b": (4,)}, {"x": (3,), "y": (2, 2)})
    with pytest.raises(RefusedError, match=r"2 keys here, 1 there; the first without a partner is 'b'"):
        pair_in_order({"a": (3,), "b": (4,)}, {"x": (3,)})
    with pytest.raises(RefusedError, match="without a shape"):
        pair_in_order({"a": (3,)}, {"x": None})


def test_shapes_that_torch_takes_for_others() -> None:
    assert agrees((1,), ()) and agrees((3,), None) and agrees(None, None)
    assert not agrees((), (1,)) and not agrees(None, (3,)) and not agrees((2,), ()) and not agrees((3, 4), (4, 3))
    wanted = ("bn.running_mean", "bn.num_batches_tracked", "other.num_batches_tracked", "num_batches_tracked")
    assert fillable(wanted) == {"bn.num_batches_tracked"}
