"""The search on names alone: what was done to names is undone, whatever the names are."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.base.errors import RefusedError
from ckptool.edits.matching.names import Shape, agrees, fillable, pair_in_order, pair_names, score
from ckptool.edits.matching.search import FixStep, cost, renaming, search

Names = dict[str, Shape]

WORDS = ("conv", "norm", "attn", "mlp", "fc1", "fc2", "down", "proj", "module", "net")
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


def prefixed(text: str) -> Callable[[str], str]:
    return lambda name: text + name


def renamed(old: str, new: str) -> Callable[[str], str]:
    return lambda name: re.sub(rf"(^|\.){old}(?=\.|$)", rf"\g<1>{new}", name)


def stripped(text: str) -> Callable[[str], str]:
    return lambda name: name.removeprefix(text)


#: What training and other libraries do to names.
DONE: dict[str, Callable[[str], str]] = {
    "module.": prefixed("module."),
    "_orig_mod.": prefixed("_orig_mod."),
    "model.": prefixed("model."),
    "backbone.body.": prefixed("backbone.body."),
    "FSDP": renamed(r"(layers|blocks|features)\.(\d+)", r"\2.\3._fsdp_wrapped_module"),
    "stack": renamed("(layers|blocks|features)", "stages"),
    "attn": renamed("attn", "attention"),
    "norm": renamed("norm", "layer_norm"),
    "head": renamed("head", "classifier"),
    "weight": renamed("weight", "gamma"),
    "numbered": renamed(r"fc(\d)", r"lin\2"),
}
changes = st.lists(st.sampled_from(sorted(DONE)), min_size=0, max_size=2, unique=True)


def after(names: Names, done: list[str]) -> Names:
    for change in done:
        names = {DONE[change](name): shape for name, shape in names.items()}
    return names


def found_for(have: Names, wanted: Names, target: str = "target.pth"):
    return search(list(have), list(have.values()), wanted, frozenset(), target)


@given(models(), changes)
@settings(max_examples=examples(2000))
def test_what_was_done_to_names_is_undone(model: Names, done: list[str]) -> None:
    trained = after(model, done)
    found = found_for(trained, model)
    assert found.score.problems == 0, (done, found.steps)
    assert found.names == list(model), (done, found.steps)
    assert bool(found.steps) == (trained != model)


@given(models(), changes)
@settings(max_examples=examples(2000))
def test_and_done_where_it_is_wanted(model: Names, done: list[str]) -> None:
    wanted = after(model, done)
    found = found_for(model, wanted)
    assert found.score.problems == 0, (done, found.steps)
    assert found.names == list(wanted), (done, found.steps)


@given(models(), changes, st.randoms())
@settings(max_examples=examples(200))
def test_what_is_said_to_fit_by_name_does_not_hang_on_order(model: Names, done: list[str], random: object) -> None:
    """With the keys of the target in another order: no name gets another's tensor, unless the report says "guess"."""
    trained = after(model, done)
    expected = dict(zip(trained, model))
    order = list(model)
    random.shuffle(order)  # type: ignore[attr-defined]
    found = found_for(trained, {name: model[name] for name in order})
    if not any(step.guess for step in found.steps):
        right = [expected[name] == new for name, new in zip(trained, found.names) if new in model]
        assert all(right), (done, found.steps)


@given(models(), models())
@settings(max_examples=examples(200))
def test_a_search_loses_no_name_and_never_worsens(one: Names, other: Names) -> None:
    found = found_for(one, other)
    start = score(list(one), list(one.values()), other, frozenset())
    assert len(set(found.names)) == len(one)
    assert found.score.rank >= start.rank
    assert found.score == score(found.names, list(one.values()), other, frozenset())
    if not any(step.option in ("rename-like", "by-order") for step in found.steps):
        names = list(one)
        for step in found.steps:
            rename = renaming(step, names)
            names = [rename(name) for name in names]
        assert names == found.names


@given(models(), models())
@settings(max_examples=examples(200))
def test_pairs_are_one_to_one_and_keep_equal_names(one: Names, other: Names) -> None:
    pairs = pair_names(one, other)
    assert len(set(pairs.values())) == len(pairs)
    assert pairs.keys() <= one.keys() and set(pairs.values()) <= other.keys()
    assert all(pairs[name] == name for name in one if name in other)
    assert all(one[own] == other[name] for own, name in pairs.items() if own not in other)


def test_layers_with_the_number_and_shape_of_others_are_not_taken_for_them() -> None:
    have: Names = {f"layers.{n}.{part}.weight": (8,) for n in range(3) for part in ("a", "b")}
    wanted: Names = {f"x.{n}.weight": (8,) for n in range(6)}
    assert pair_names(have, wanted) == {}
    found = found_for(have, wanted)
    assert [step.option for step in found.steps] == ["by-order"] and found.steps[0].guess
    assert found.names == list(wanted)


def test_a_layer_that_may_have_moved_is_told_as_a_guess() -> None:
    have: Names = {f"net.{n}.weight": (4, 4) for n in range(5)}
    wanted: Names = {f"net.{n + 1}.weight": (4, 4) for n in range(5)}
    found = found_for(have, wanted)
    assert found.names == list(wanted) and any(step.guess for step in found.steps)


def test_what_many_files_need() -> None:
    """Names of TensorFlow, a prefix, and a head too much."""
    parts = ("query", "key", "value", "output.dense")
    plain: Names = {f"encoder.layer.{n}.{part}.weight": (8, 8) for n in range(4) for part in parts}
    plain |= {f"encoder.layer.{n}.LayerNorm.{end}": (8,) for n in range(4) for end in ("weight", "bias")}
    have = {
        "bert." + re.sub("Norm.bias$", "Norm.beta", re.sub("Norm.weight$", "Norm.gamma", n)): s
        for n, s in plain.items()
    }
    found = found_for(have | {"cls.weight": (2, 8)}, plain)
    assert found.names == [*plain, "cls.weight"]
    assert sorted(step.option for step in found.steps) == ["rename-regex", "rename-regex", "strip-prefix"]
    assert not any(step.guess for step in found.steps)
    numbered: Names = {f"layer{n}.{m}.w": (n, m) for n in range(1, 6) for m in range(3)}
    renamed: Names = {name.replace("layer", "stage"): shape for name, shape in numbered.items()}
    found = found_for(numbered, renamed)
    assert found.names == list(renamed) and len(found.steps) == 1


@pytest.mark.parametrize("layers", [40, 700])
def test_what_is_rare_is_found_in_large_models(layers: int) -> None:
    """Votes are a sample where names are many; two keys of thousands are heard all the same."""
    parts = ("q", "k", "v", "out", "fc1", "fc2")
    plain: Names = {f"blocks.{n}.{part}.weight": (8, n % 3 + 1) for n in range(layers) for part in parts}
    plain |= {"head.weight": (5, 8), "head.bias": (5,), "stem.weight": (3, 3), "stem.bias": (3,)}
    changes = (("head", "classifier"), ("stem", "embed"), (r"blocks", "layers"))
    have = {f"module.{name}": shape for name, shape in plain.items()}
    for count in range(len(changes)):
        old, new = changes[count]
        have = {renamed(old, new)(name): shape for name, shape in have.items()}
        found = found_for(have, plain, target="")
        assert found.names == list(plain), found.steps
        assert len(found.steps) <= count + 2
    little = {renamed("stem", "embed")(renamed("head", "classifier")(name)): shape for name, shape in plain.items()}
    found = found_for(little, plain, target="")
    assert found.names == list(plain) and len(found.steps) == 2


def test_by_order_names_the_first_disagreement() -> None:
    assert pair_in_order({"a": (3,), "b": ()}, {"x": (3,), "y": ()}) == {"a": "x", "b": "y"}
    with pytest.raises(RefusedError, match=r"key 2 is 'b' of shape 4 here, 'y' of shape 2x2 there"):
        pair_in_order({"a": (3,), "b": (4,)}, {"x": (3,), "y": (2, 2)})
    with pytest.raises(RefusedError, match=r"2 keys here, 1 there; the first without a partner is 'b'"):
        pair_in_order({"a": (3,), "b": (4,)}, {"x": (3,)})
    with pytest.raises(RefusedError, match="without a shape"):
        pair_in_order({"a": (3,)}, {"x": None})


@pytest.mark.parametrize(
    ("step", "name", "expected"),
    [
        (FixStep("strip-module"), "module.module.a", "module.a"),
        (FixStep("wrappers"), "a._fsdp_wrapped_module.b", "a.b"),
        (FixStep("strip-prefix", "model."), "model.a", "a"),
        (FixStep("strip-prefix", "model."), "models.a", "models.a"),
        (FixStep("add-prefix", "x.y."), "a", "x.y.a"),
        (FixStep("rename", "a.*=b.c.*"), "a.x", "b.c.x"),
        (FixStep("rename", "a.*=b.*"), "aa.x", "aa.x"),
        (FixStep("rename", "a.gamma=a.weight"), "a.gamma", "a.weight"),
        (FixStep("rename", "a.gamma=a.weight"), "a.gamma.x", "a.gamma.x"),
        (FixStep("rename-regex", r"s/(^|\.)gamma$/\1weight/"), "gamma", "weight"),
        (FixStep("rename-regex", r"s/(^|\.)gamma$/\1weight/"), "x.gamma", "x.weight"),
        (FixStep("rename-regex", r"s/(^|\.)gamma$/\1weight/"), "x.dgamma", "x.dgamma"),
    ],
)
def test_steps(step: FixStep, name: str, expected: str) -> None:
    assert renaming(step, [name])(name) == expected


def test_fewer_steps_cost_less() -> None:
    assert cost([FixStep("rename", "a" * 200 + ".*=b.*")]) < cost(
        [FixStep("strip-module"), FixStep("add-prefix", "b.")]
    )
    assert cost([FixStep("strip-module")]) < cost([FixStep("wrappers")]) < cost([FixStep("strip-prefix", "module.")])
    assert cost([FixStep("rename-like", "/a/long/path" * 40)]) == cost([FixStep("rename-like", "b")])


def test_shapes_that_torch_takes_for_others() -> None:
    assert agrees((1,), ()) and agrees((3,), None) and agrees(None, None)
    assert not agrees((), (1,)) and not agrees(None, (3,)) and not agrees((2,), ()) and not agrees((3, 4), (4, 3))
    wanted = ("bn.running_mean", "bn.num_batches_tracked", "other.num_batches_tracked", "num_batches_tracked")
    assert fillable(wanted) == {"bn.num_batches_tracked"}


@pytest.mark.parametrize("odd", ["a*b", "a=b", "a?b", "a/b", "a\\b", "a\nb", "a[0]", "(", "", "$", "é", "1"])
def test_odd_names_are_no_obstacle(odd: str) -> None:
    model: Names = {f"{odd}.x.weight": (3,), f"{odd}.y.weight": (4,), "z.bias": (5,)}
    assert found_for(after(model, ["module."]), model).names == list(model)
    assert found_for(model, after(model, ["model."])).names == list(after(model, ["model."]))
    changed: Names = {f"{odd}.x.weight": (3,), f"{odd}{odd}q.y.weight": (4,), "z.bias": (5,)}
    assert found_for(model, changed).names == list(changed)
    assert found_for(changed, model).names == list(model)
