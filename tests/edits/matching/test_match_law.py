"""The law of ``match``: an offered edit, run as printed, gives every key that it claims the value of the target.

Both files hold the values of one model, each in a layout of its own, so a value in the wrong place is seen.
"""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CORPUS
from model_layouts import FAMILIES, HARMLESS, REARRANGED, State
from safetensors.torch import load_file

import ckptool
from ckptool.checkpoint.paths import parse_path
from ckptool.cli.main import run
from ckptool.edits.matching import values
from ckptool.edits.matching.pairing import names_agree


def saved(value: object, path: Path) -> Path:
    torch.save(value, path)
    return path


def loaded(path: Path) -> Any:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path)


def at(loaded: Any, path: str) -> State:
    for step in parse_path(path):
        loaded = loaded[step]
    return dict(loaded)


def check(source: Path, target: Path, out: Path) -> tuple[dict[str, Any], str]:
    """Match two files and run what is offered; fail if a key that is said to load has another value.

    Return the report, and "fits", "complete", "partial" or "nothing".
    """
    report = ckptool.match(source, target)
    wanted = at(loaded(target), report["target_state_dict"])
    if report["fits"]:
        compare(at(loaded(source), report["state_dict"]), wanted, len(wanted))
        return report, "fits"
    fix = report["fix"]
    offered = [(fix["command"], fix["loads"])] if fix else []
    if report["next"].startswith(("ckptool edit", "ckptool drop")):
        more = len((fix or report)["missing"]) if "same layer" in report["advice"] else 0
        offered.append((report["next"], (fix or report)["loads"] + more))
    for command, loads in offered:
        words = shlex.split(command)
        assert words[0] == "ckptool" and words[-2] == "-o"
        assert run([*words[1:-1], str(out), "--force", "-q"]) == 0
        compare(at(loaded(out), report["target_state_dict"]), wanted, loads)
    if not fix:
        return report, "nothing" if not offered else "partial"
    return report, "complete" if fix["complete"] else "partial"


def compare(result: State, wanted: State, loads: int) -> None:
    """Check that as many keys load as are claimed, and that each has the value of the target."""
    loading = [name for name, value in wanted.items() if name in result and result[name].shape == value.shape]
    assert len(loading) == loads
    wrong = [name for name in loading if not torch.equal(result[name], wanted[name])]
    assert not wrong, f"{len(wrong)} of {loads} keys have another value: {wrong[:5]}"


PAIRS = [
    (family, have, want)
    for family, (_, layouts) in FAMILIES.items()
    for have, want in itertools.product(layouts, layouts)
]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(("family", "have", "want"), PAIRS)
def test_what_is_offered_gives_the_values_of_the_target(family: str, have: str, want: str, tmp_path: Path) -> None:
    made, layouts = FAMILIES[family]
    target = saved(layouts[want](made()), tmp_path / "b.pth")
    ways = list(HARMLESS)
    for around in ways if have == want else ("plain", ways[1 + PAIRS.index((family, have, want)) % (len(ways) - 1)]):
        source = saved(HARMLESS[around](layouts[have](made())), tmp_path / f"{around}.pth")
        verdict = check(source, target, tmp_path / "out.pth")[1]
        assert have != want or verdict in ("fits", "complete"), around


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("rows", ["whole", "few"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", REARRANGED)
def test_values_in_the_wrong_place_do_not_fit(
    how: str, family: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does any edit that is offered bring them there; with "few" all tensors count as large."""
    if rows == "few":
        monkeypatch.setattr(values, "_ROW", 4)
        monkeypatch.setattr(values, "_WHOLE", 64)
    made, layouts = FAMILIES[family]
    for layout in layouts.values():
        state = layout(made())
        wrong = REARRANGED[how](state)
        if all(torch.equal(wrong[name], state[name]) for name in state):
            continue  # it has no such tensors
        for around, source, target in (("plain", wrong, state), ("parallel", state, wrong)):
            here, there = saved(HARMLESS[around](source), tmp_path / "a.pth"), saved(target, tmp_path / "b.pth")
            report, verdict = check(here, there, tmp_path / "out.pth")
            assert verdict in ("nothing", "partial")
            assert "wrong place" in report["advice"] or "no edit is offered" in " ".join(report["notes"])


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("family", FAMILIES)
def test_another_training_fits(family: str, tmp_path: Path) -> None:
    """Values that differ are no contradiction: all of them, those of the second layer, or those that are not frozen."""
    made, layouts = FAMILIES[family]
    for layout in layouts.values():
        state = layout(made())
        trained = {name: value + torch.randn(value.shape) for name, value in state.items()}
        layer = {name: trained[name] if ".1." in name else value for name, value in state.items()}
        matrices = {name: trained[name] if value.dim() > 1 else value for name, value in state.items()}
        student = {f"{side}.{name}": value for side in ("student", "teacher") for name, value in state.items()}
        taught = student | {f"student.{name}": value for name, value in trained.items()}
        for source, target in ((trained, state), (layer, state), (matrices, state), (student, taught)):
            for around, one, other in (("plain", source, target), ("parallel", target, source)):
                there = saved(other, tmp_path / "b.pth")
                report = ckptool.match(saved(HARMLESS[around](one), tmp_path / "a.pth"), there)
                assert report["fits"] or report["fix"]["complete"], (around, report["notes"])


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(("family", "have", "want"), PAIRS)
def test_names_and_shapes_alone_pair_no_other_names(family: str, have: str, want: str, tmp_path: Path) -> None:
    """A lock file has no values: only names that agree segment by segment are offered, or a built-in recipe."""
    made, layouts = FAMILIES[family]
    source, target = saved(layouts[have](made()), tmp_path / "a.pth"), layouts[want](made())
    lock = tmp_path / "x.lock"
    assert run(["lock", str(saved(target, tmp_path / "b.pth")), "-o", str(lock), "-q"]) == 0
    report = ckptool.match(source, lock)
    if report["fix"] and not any(step["option"] == "to-names" for step in report["fix"]["steps"]):
        assert run([*shlex.split(report["fix"]["command"])[1:-1], str(tmp_path / "out.pth"), "-q"]) == 0
        names = zip(torch.load(source), torch.load(tmp_path / "out.pth"))
        pairs = [(own, name) for own, name in names if own != name and name in target]
        assert pairs and all(names_agree(own, name) for own, name in pairs)


#: The result of arithmetic, which looks like another training.
ARITHMETIC = ("task-arith",)
RECIPES = CORPUS.parent / "recipes"


@pytest.mark.skipif(not RECIPES.is_dir(), reason="the folder of recipes is not here")
@pytest.mark.parametrize(
    "recipe", [path.name for path in sorted(RECIPES.glob("*/")) if path.is_dir() and path.name not in ARITHMETIC]
)
def test_conversions_of_other_libraries(recipe: str, tmp_path: Path) -> None:
    """Each file as its framework writes it against the result of the library that converts it, in both directions."""
    result = RECIPES / recipe / "expected.safetensors"
    for path in sorted((RECIPES / recipe / "in").iterdir()):
        if path.suffix != ".json":
            check(path, result, tmp_path / f"forth{path.suffix}")
            check(result, path, tmp_path / "back.safetensors")
