"""match against torch: the fix that is found is done, and ``load_state_dict(strict=True)`` takes the result."""

from __future__ import annotations

import itertools
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import typed
from conftest import CHECKPOINTS, FIXTURES, Fixture, by_name, sample
from torch import nn
from trained_models import TRAINED, Backbone, Block, Flat, Net, filled, fsdp, state

import ckptool
from ckptool.base.errors import RefusedError, TargetError
from ckptool.checkpoint.paths import parse_path
from ckptool.cli.main import run
from ckptool.edits.matching.match import match_checkpoint
from ckptool.edits.matching.targets import match_target
from ckptool.edits.pipeline import apply_fix


def saved(made: Any, path: Path) -> Path:
    torch.save(state(made), path)
    return path


def at(loaded: Any, path: str) -> Any:
    for step in parse_path(path):
        loaded = loaded[step]
    return loaded


def fixed(source: Path, target: Path, out: Path, **how: Any) -> dict[str, Any]:
    """Match two files, do what is found, and return the report.

    It is done twice: by ``apply``, and by the command line that is printed; both give the same file.
    """
    wanted = match_target(target)
    with ckptool.open(source) as checkpoint:
        found = match_checkpoint(checkpoint, wanted, **how)
        assert found.steps is not None, found.report
        ckptool.save(apply_fix(checkpoint, found.steps, wanted, key=found.key), out)
    if found.report["fix"]:
        printed = out.with_name("printed.pth")
        assert typed(found.report["fix"]["command"], printed) == 0
        assert printed.read_bytes() == out.read_bytes()
    return found.report


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(("have", "want"), sample(list(itertools.permutations(TRAINED, 2)), 3))
def test_every_form_is_brought_into_every_other(have: str, want: str, tmp_path: Path) -> None:
    made, other = TRAINED[have](), TRAINED[want]()
    source, target, out = saved(made, tmp_path / "a.pth"), saved(other, tmp_path / "b.pth"), tmp_path / "out.pth"
    report = fixed(source, target, out)
    if report["fits"]:
        assert {have, want} == {"plain", "plain dict"}
        return
    fix = report["fix"]
    assert fix["complete"], fix
    assert fix["loads"] == report["wanted"] == len(filled(Net()).state_dict())
    expected = at(torch.load(target), report["target_state_dict"])
    result = at(torch.load(out), report["target_state_dict"])
    # Both were filled alike, so equal values say that every name has the tensor that it should have.
    assert list(result) == list(expected)
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    if isinstance(other, torch.nn.Module):
        other.load_state_dict(torch.load(out), strict=True)
    assert ckptool.match(out, target)["fits"]


def matched(have: Any, want: Any, tmp_path: Path, **how: Any) -> dict[str, Any]:
    return ckptool.match(saved(have, tmp_path / "a.pth"), saved(want, tmp_path / "b.pth"), **how)


@pytest.mark.parametrize("form", [name for name in TRAINED if name not in ("renamed backbone", "other names")])
def test_another_number_of_classes_is_named(form: str, tmp_path: Path) -> None:
    """All but the head is brought into place; the head is said, and what remains loads without it."""
    target, out = saved(Net(10), tmp_path / "b.pth"), tmp_path / "out.pth"
    source = saved(TRAINED[form](), tmp_path / "a.pth")
    report = ckptool.match(source, target)
    rest = report["fix"] or report
    assert not report["fits"] and not (report["fix"] or {}).get("complete")
    assert rest["size_mismatches"] == [
        {"key": "head.weight", "have": "5x12", "wanted": "10x12"},
        {"key": "head.bias", "have": "5", "wanted": "10"},
    ]
    assert rest["loads"] == report["wanted"] - 2 and not rest["missing"] and not rest["unexpected"]
    assert "strict=False" in report["advice"] and "--drop 'head.*'" in report["next"]
    if report["fix"]:
        fixed(source, target, out)
    # The way out that is told.
    assert typed(report["next"], tmp_path / "last.pth") == 0
    model = Net(10)
    loaded = at(torch.load(tmp_path / "last.pth"), report["target_state_dict"])
    assert model.load_state_dict(loaded, strict=False).missing_keys == ["head.weight", "head.bias"]
    assert torch.equal(model.backbone.stem.weight, filled(Net()).backbone.stem.weight)


def test_what_the_target_does_not_have_is_dropped_by_name(tmp_path: Path) -> None:
    plain = filled(Net()).state_dict()
    state = {f"student.{name}": value for name, value in plain.items()}
    state |= {f"teacher.{name}": value + 1 for name, value in plain.items()} | {"loss.weight": torch.ones(2)}
    source, target = saved({"state_dict": state}, tmp_path / "a.pth"), saved(Net(), tmp_path / "b.pth")
    report = fixed(source, target, tmp_path / "out.pth")
    fix = report["fix"]
    assert fix["complete"]
    assert [(step["option"], step["value"]) for step in fix["steps"]] == [
        ("extract", "state_dict"),
        ("strip-prefix", "student."),
        ("drop", "teacher.*"),
        ("drop", "loss.*"),
    ]
    assert len(fix["dropped"]) == len(plain) + 1 and "drops 25 keys" in fix["notes"][0]
    model = Net()
    model.load_state_dict(torch.load(tmp_path / "out.pth"), strict=True)
    assert torch.equal(model.head.weight, plain["head.weight"])


def test_of_several_state_dicts_the_best_is_meant_or_the_named(tmp_path: Path) -> None:
    plain = filled(Net()).state_dict()
    made = {"other": Block(3).state_dict(), "model": plain, "ema": {f"module.{n}": v for n, v in plain.items()}}
    report = matched(made, Net(), tmp_path)
    assert report["state_dict"] == "model"
    assert report["fix"]["steps"] == [{"option": "extract", "value": "model"}]
    assert "--key" in report["notes"][0] and "'ema' (fits as well)" in report["notes"][0]
    report = matched(made, Net(), tmp_path, key="ema")
    assert [step["option"] for step in report["fix"]["steps"]] == ["extract", "strip-module"]
    assert report["notes"] == []
    report = matched(made, Net(), tmp_path, key="model", anywhere=True)
    assert report["fits"] and report["fix"] is None
    report = matched(Net(), made, tmp_path)
    assert report["target_state_dict"] == "model" and "--other-key" in report["notes"][0]
    report = matched(Block(3), made, tmp_path, other_key="other")
    assert report["fix"]["steps"] == [{"option": "wrap", "value": "other"}]


def test_the_counters_that_torch_fills_in_are_not_missing(tmp_path: Path) -> None:
    """As in files from before torch 0.4.1: no _metadata, no num_batches_tracked."""
    old = {name: value for name, value in filled(Net()).state_dict().items() if "tracked" not in name}
    Net().load_state_dict(old, strict=True)
    report = matched(old, Net(), tmp_path)
    assert report["fits"] and len(report["filled_in"]) == 3
    # A layer that is not there is missing with its counter.
    less = {name: value for name, value in old.items() if "layers.2.bn" not in name}
    report = matched(less, Net(), tmp_path)
    assert len(report["filled_in"]) == 2 and "backbone.layers.2.bn.num_batches_tracked" in report["missing"]
    new = filled(Net()).state_dict()
    for name in [name for name in new if "tracked" in name]:
        del new[name]
    with pytest.raises(RuntimeError):
        Net().load_state_dict(new, strict=True)
    report = matched(new, Net(), tmp_path)
    assert not report["fits"] and len(report["missing"]) == 3 and report["filled_in"] == []


def test_without_strict_only_sizes_are_an_obstacle(tmp_path: Path) -> None:
    backbone = {name: value for name, value in Net().state_dict().items() if name.startswith("backbone.")}
    assert not matched(backbone, Net(), tmp_path)["fits"]
    report = matched(backbone, Net(), tmp_path, lenient=True)
    assert report["fits"] and report["missing"] == ["head.weight", "head.bias"]
    assert not matched(Net(), Net(7), tmp_path, lenient=True)["fits"]
    report = matched(Backbone(), Net(), tmp_path)
    assert [step["option"] for step in report["fix"]["steps"]] == ["add-prefix"] and not report["fix"]["complete"]
    assert matched(Backbone(), Net(), tmp_path, lenient=True)["fix"]["complete"]
    # Of two models that share nothing, nothing loads: that is no fit either.
    assert not matched(Block(3), Net(), tmp_path, lenient=True)["fits"]


def test_names_after_another_checkpoint(tmp_path: Path) -> None:
    """``rename --rename-like``, by name and by order, in the library."""
    plain, other = saved(filled(Net()), tmp_path / "a.pth"), saved(fsdp(filled(Net())), tmp_path / "b.pth")
    flat = saved(filled(Flat()), tmp_path / "c.pth")
    with ckptool.open(plain) as one, ckptool.open(other) as two, ckptool.open(flat) as three:
        ckptool.save(ckptool.rename(one, like=two), tmp_path / "1.pth")
        ckptool.save(ckptool.rename(two, like=one), tmp_path / "2.pth")
        ckptool.save(ckptool.rename(three, like=one, by_order=True), tmp_path / "3.pth")
        with pytest.raises(RefusedError, match="no key can be matched by its name and shape"):
            ckptool.rename(one, like=ckptool.open(FIXTURES / "bare.pth"))
        with pytest.raises(RefusedError, match=r"key 1 is 'backbone\.stem\.weight' of shape"):
            ckptool.rename(one, like=ckptool.open(FIXTURES / "bare.pth"), by_order=True)
        with ckptool.open(FIXTURES / "gan.pth") as several, pytest.raises(TargetError, match="2 state dicts"):
            ckptool.rename(several, like=one)
    assert list(torch.load(tmp_path / "1.pth")) == list(fsdp(Net()))
    for name in ("2.pth", "3.pth"):
        model = Net()
        model.load_state_dict(torch.load(tmp_path / name), strict=True)
        assert torch.equal(model.head.weight, filled(Net()).head.weight)


def test_models_and_mappings_as_targets(tmp_path: Path) -> None:
    source = saved(filled(Net()), tmp_path / "a.pth")
    assert ckptool.match(source, Net())["fits"]
    assert ckptool.match(source, Net().state_dict())["fits"]
    with torch.device("meta"):
        assert ckptool.match(source, Net())["fits"]
    assert ckptool.match(source, Flat())["fix"] is None  # names by order alone
    # A lazy layer takes the shape that it is given.
    assert ckptool.match(saved(nn.Linear(3, 4), tmp_path / "l.pth"), nn.LazyLinear(4))["fits"]
    for wrong in ({3: torch.ones(2)}, 7):
        with pytest.raises(TargetError):
            ckptool.match(source, wrong)  # type: ignore[arg-type]
    with pytest.raises(TargetError):
        ckptool.match(source)
    with pytest.raises(TargetError):
        ckptool.match(source, Net(), other_key="x")
    with pytest.raises(TargetError, match="pickled module"):
        ckptool.match(source, FIXTURES / "whole_model.pth")
    with pytest.raises(TargetError, match="no state dict"):
        ckptool.match(FIXTURES / "no_tensors.pth", source)


# -- models that are named ------------------------------------------------------------------------------------------


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the current folder, as a user has it."""
    monkeypatch.chdir(tmp_path)
    name = f"user_code_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "import sys, torch\n"
        "from torch import nn\n"
        "print('hello from the model')\n"
        "def build(): return nn.Linear(3, 4)\n"
        "class Inner:\n    make = staticmethod(build)\n"
        "state = {'weight': torch.zeros(4, 3), 'bias': torch.zeros(4)}\n"
        "def real():\n    return nn.Linear(3, int(torch.ones(1).item()))\n"
        "def leaves(): sys.exit(3)\n"
        "def nothing(): return 7\n"
        "huge = lambda: nn.Linear(1 << 20, 1 << 20)\n",
        encoding="utf-8",
    )
    return Path(name)


@pytest.mark.parametrize("what", ["build", "Inner.make", "state"])
def test_a_model_by_name(what: str, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = list(sys.path)
    torch.save({"model": nn.DataParallel(nn.Linear(3, 4)).state_dict()}, "a.pth")
    assert run(["match", "a.pth", "--model", f"{code}:{what}", "--format", "json"]) == 1
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert report["target_kind"] == "model"
    assert [step["option"] for step in report["fix"]["steps"]] == ["extract", "strip-module"]
    assert f"--model imports and runs {code}:{what}" in told.err
    assert "hello from the model" in told.err
    assert sys.path == before


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("build", "is not PACKAGE.MODULE:CALLABLE"),
        (":build", "is not PACKAGE.MODULE:CALLABLE"),
        ("a-b:build", "is not PACKAGE.MODULE:CALLABLE"),
        ("nowhere_at_all:build", "importing nowhere_at_all ends with ModuleNotFoundError: No module named"),
        ("CODE:biuld", "has no attribute 'biuld'"),
        ("CODE:real", "calling it on the meta device ends with RuntimeError: "),
        ("CODE:leaves", "calling it on the meta device ends with SystemExit: 3"),
        ("CODE:nothing", "it gives int, where a torch.nn.Module or a state dict is wanted"),
    ],
)
def test_a_model_that_cannot_be_made(spec: str, words: str, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), "a.pth")
    before = list(sys.path)
    assert run(["match", "a.pth", "--model", spec.replace("CODE", str(code))]) == 2
    told = capsys.readouterr()
    assert words in told.err and told.out == ""
    assert sys.path == before


# -- real checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", CHECKPOINTS, ids=by_name)
def test_fixtures_fit_themselves_and_break_nothing(item: Fixture, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(item.path)
    code = run(["match", path, path])
    assert code in ((0,) if item.state_dicts and "truncated" not in path else (0, 2, 3))
    for other in ("bare.pth", "ddp4_training.pth", "gan.pth", "list_of_states.pt", "ema_odd_names.pth"):
        for call in ([path, str(FIXTURES / other)], [str(FIXTURES / other), path]):
            assert run(["match", *call]) in (0, 1, 2, 3)
            assert run(["match", *call, "--format", "json"]) in (0, 1, 2, 3)
    told = capsys.readouterr()
    assert told.out.replace("\n", "").isprintable() and told.err.replace("\n", "").isprintable()


# -- the message of load_state_dict ---------------------------------------------------------------------------------


#: Parts of names that a message of torch prints as they are.
ODD_NAMES = ("class a", "b: copying", "c, d", "e[0]", "größe", "it's", "a  b")


@pytest.mark.parametrize("odd", ODD_NAMES)
@pytest.mark.parametrize("wrap", [str, lambda text: text.replace(" ", "\n\t"), lambda text: textwrap.fill(text, 40)])
def test_every_key_of_a_message_is_read(odd: str, wrap: Callable[[str], str], tmp_path: Path) -> None:
    """Every form that torch prints, with every name that a module may have, wrapped by terminals or not."""

    def model(size: int, prefix: str = "") -> nn.Module:
        inner = nn.ModuleDict({prefix + odd: nn.Linear(2, size), "plain": nn.Linear(2, 2)})
        return nn.Sequential(nn.Linear(2, 2), inner)

    torch.save(model(5).state_dict(), tmp_path / "a.pth")
    for target in (model(3), model(5, "x")):
        with pytest.raises(RuntimeError) as caught:
            target.load_state_dict(torch.load(tmp_path / "a.pth"))
        report = ckptool.match(tmp_path / "a.pth", error=wrap(str(caught.value)))
        wrong = [item["key"] for item in report["size_mismatches"]] or report["unexpected"]
        assert sorted(wrong) == [f"1.{odd}.bias", f"1.{odd}.weight"]
    keys = str(model(5, "x").load_state_dict(torch.load(tmp_path / "a.pth"), strict=False))
    report = ckptool.match(tmp_path / "a.pth", error=keys)
    assert sorted(report["unexpected"]) == [f"1.{odd}.bias", f"1.{odd}.weight"]
    assert sorted(report["missing"]) == [f"1.x{odd}.bias", f"1.x{odd}.weight"]


def test_a_message_about_another_checkpoint(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "a.pth")
    with pytest.raises(RuntimeError) as caught:
        nn.BatchNorm1d(4).load_state_dict({**nn.BatchNorm1d(4).state_dict(), "running_mean": torch.ones(3)})
    with pytest.raises(TargetError, match=r"another checkpoint: what it says of running_mean is not so in this one"):
        ckptool.match(tmp_path / "a.pth", error=str(caught.value))
    with pytest.raises(TargetError, match="no message of load_state_dict"):
        ckptool.match(tmp_path / "a.pth", error="KeyError: 'a'")


def trained(path: Path, *sizes: int) -> tuple[torch.optim.Optimizer, nn.Module]:
    """Save a training run whose optimizer has groups of these sizes, of the parameters of four layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    parameters = iter(model.parameters())
    groups = [{"params": list(itertools.islice(parameters, size))} for size in sizes]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    return optimizer, model


@pytest.mark.parametrize("have", [(8,), (4, 4), (2, 6)])
@pytest.mark.parametrize("wanted", [(8,), (4, 4), (2,)])
def test_groups_of_optimizers_are_compared_as_torch_does(
    have: tuple[int, ...], wanted: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs, out = tmp_path / "ours.pth", tmp_path / "theirs.pth", tmp_path / "out.pth"
    trained(ours, *have)
    optimizer, model = trained(theirs, *wanted)
    refusal = ""
    try:
        optimizer.load_state_dict(torch.load(ours)["optimizer"])
    except ValueError as error:
        refusal = str(error)
    report = ckptool.match(ours, theirs)
    assert [(item["have"], item["wanted"]) for item in report["optimizers"]] == [([*have], [*wanted])]
    assert report["fits"] == (not refusal)
    assert run(["match", str(ours), str(theirs)]) == int(bool(refusal))
    assert ("which load_state_dict refuses" in capsys.readouterr().out) == bool(refusal)
    if refusal:
        assert typed(report["next"], out) == 0
        model.load_state_dict(torch.load(out)["model"])
        assert "optimizer" not in torch.load(out)
