"""Laws of the edits on checkpoints that nobody thought of."""

from __future__ import annotations

import copy
import pickle
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensor_storages import held, needed, same_sharing, same_values

import ckptool
from ckptool import Checkpoint
from ckptool.edits.convert import Conversion
from ckptool.edits.pipeline import Step
from ckptool.edits.table import EDITS
from ckptool.edits.table import STEPS as TABLE
from ckptool.files.sources import Plan
from ckptool.files.write.output import write_file
from ckptool.formats.planning import plan_of
from ckptool.reports.validate import validation_report

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

laws = settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "uint8", "bool", "complex64",
          "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint16", "uint32")  # fmt: skip
FLOATS = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")

segments = st.sampled_from(["a", "b", "layer0", "layer1", "x-y", "ü", "weight", "module"])
names = st.lists(segments, min_size=1, max_size=4).map(".".join)


@st.composite
def views(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Views of a few storages: any offset, shape and strides, overlaps, expanded, empty, scalar; tied ones."""
    found: dict[str, torch.Tensor] = {}
    for number in range(draw(st.integers(1, 3))):
        dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
        count = draw(st.sampled_from([0, 1, 7, 100, 1500]))
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count * dtype.itemsize,)).to(torch.uint8)
        flat = raw.view(dtype) if count else torch.empty(0, dtype=dtype)
        for place in range(draw(st.integers(1, 4))):
            shape = draw(st.lists(st.integers(0, 4), max_size=3))
            steps = draw(st.lists(st.integers(0, 40), min_size=len(shape), max_size=len(shape)))
            reach = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, steps))
            if reach > count:
                shape, steps, reach = [0], [1], 0
            offset = draw(st.integers(0, count - reach))
            found[f"s{number}.v{place}"] = flat.as_strided(shape, steps, offset)
    if draw(st.booleans()):
        found["tied.w"] = next(iter(found.values()))
    return found


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """The elements one after the other, also where strides of dimensions of one element say otherwise."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def without_payloads(tensor: torch.Tensor) -> torch.Tensor:
    """With zeros for NaN: which NaN it becomes is up to torch, whose vectors make another one than its scalars."""
    if not tensor.is_floating_point():
        return tensor
    return torch.where(tensor.double().isnan(), torch.zeros((), dtype=torch.float64), tensor.double())


@contextmanager
def opened(value: Any, **how: Any) -> Iterator[tuple[Checkpoint, Path]]:
    """A checkpoint of a value, and a name for an output beside it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.pth"
        torch.save(value, path, **how)
        with ckptool.open(path) as checkpoint:
            yield checkpoint, Path(folder) / "out.pth"


def written(checkpoint: Checkpoint, out: Path) -> Any:
    ckptool.save(checkpoint, out, force=True)
    report = validation_report(str(out))
    assert report["status"] == "valid", report
    if zipfile.is_zipfile(out):
        with zipfile.ZipFile(out) as archive:
            assert archive.testzip() is None
    return oracle.load(out)


@laws
@given(st.lists(names, min_size=1, max_size=8, unique=True), st.data(), st.booleans())
def test_a_table_and_its_inverse_give_back_the_file(keys: list[str], data: st.DataObject, bare: bool) -> None:
    state: dict[str, Any] = {key: torch.arange(float(number)) for number, key in enumerate(keys)}
    state = state if bare else {"net": state, "note": "no key", "cpu": "cpu"}
    new = data.draw(st.lists(names, min_size=len(keys), max_size=len(keys), unique=True))
    table = {old: fresh for old, fresh in zip(keys, new) if data.draw(st.booleans())}
    with opened(state) as (checkpoint, out):
        if not any(item.confidence == "high" for item in checkpoint.state_dicts) or not table:
            return
        if len({table.get(key, key) for key in keys}) < len(keys):
            return
        ckptool.save(ckptool.rename(checkpoint, table), out)
        with ckptool.open(out) as renamed:
            found = next((item.path for item in renamed.state_dicts), None)
            if found is None:
                return
            back = {fresh: old for old, fresh in table.items()}
            ckptool.save(ckptool.rename(renamed, back, key=found or "."), out.with_name("back.pth"))
        assert out.with_name("back.pth").read_bytes() == Path(checkpoint.path).read_bytes()


@laws
@given(views(), st.booleans(), st.booleans())
def test_slim_keeps_every_value_and_never_grows(state: dict[str, torch.Tensor], legacy: bool, dedupe: bool) -> None:
    if legacy and any(tensor.dtype in CLASSLESS for tensor in state.values()):
        return
    with opened(state, _use_new_zipfile_serialization=not legacy) as (checkpoint, out):
        before = oracle.load(checkpoint.path)
        after = written(ckptool.slim(checkpoint, dedupe=dedupe), out)
        same_values(before, after)
        if not dedupe:
            same_sharing(before, after)
        assert held(after) <= (needed(before) if not dedupe else held(before))
        assert legacy or out.stat().st_size <= Path(checkpoint.path).stat().st_size


CLASSLESS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16, torch.uint32)


@laws
@given(views(), st.lists(st.sampled_from(FLOATS), min_size=1, max_size=3))
def test_casts_equal_those_of_torch(state: dict[str, torch.Tensor], targets: list[str]) -> None:
    with opened(state) as (checkpoint, out):
        expected = oracle.load(checkpoint.path)
        for target in targets:
            checkpoint = ckptool.cast(checkpoint, target, optimizer=True)
            expected = {key: value.to(getattr(torch, target)) if value.is_floating_point() else value
                        for key, value in expected.items()}  # fmt: skip
        found = written(checkpoint, out)
        for key, value in expected.items():
            one, two = without_payloads(rows(value)), without_payloads(rows(found[key]))
            assert oracle.difference(one, two) == "", key
            assert found[key].stride() == state[key].stride()


def adam() -> dict[str, Any]:
    """The state of a real optimizer after one step: ``step`` and two moments for each parameter."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def trained(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A checkpoint with these tensors, a scale without arithmetic, and the state of a real optimizer."""
    scales = torch.tensor([1.0, 2.0]).to(torch.float8_e8m0fnu)
    table = torch.arange(15.0).view(5, 3)
    state = state | {"s.scale": scales, "wte.weight": table, "head.weight": table}
    state |= {"conv.weight_g": torch.ones(4, 1), "conv.weight_v": torch.arange(20.0).view(4, 5) + 1}
    state |= {"ema.convweight_g": torch.zeros(4, 1), "ema.num_updates": torch.tensor(3)}
    return {"state_dict": state, "optimizer": adam(), "log": "/data/secret/x.txt"}


#: Every edit of the table, with a valid text, except for the edits in ``WITH_OTHER_FILES``.
STEPS: tuple[Step, ...] = (
    ("strip-module", True), ("add-module", True), ("add-prefix", "net"), ("wrappers", True), ("slim", True),
    ("dedupe", True), ("to-dtype", "bfloat16"), ("to-dtype", "float32"), ("to-dtype", "float8_e5m2"), ("to", "cuda:1"),
    ("rename", r"s/^s(\d)/part\1/"), ("set", "epoch=3"), ("for", "inference"), ("redact", "paths"),
    ("sanitize", True), ("repack", True), ("wrap", "inner"), ("extract", "state_dict"), ("drop", "*.scale"),
    ("keep", "state_dict,optimizer"), ("drop", "log"), ("vocab", "7"),
    ("tie", "other.weight=wte.weight"), ("untie", "head.weight"), ("use-ema", True), ("weight-norm", "new"),
    ("weight-norm", "fold"),
)  # fmt: skip
#: Edits that need a second checkpoint, or one of Megatron-LM or FSDP1.
WITH_OTHER_FILES = {"dequantize", "merge", "merge-entry", "average", "to-names", "recipe", "unflatten"}
WITH_OTHER_FILES |= {"lora convert", "lora merge", "lora extract", "lora resize"}
#: Steps that remove the optimizer, or move it to another path.
WITHOUT_OPTIMIZER = ("for", "extract", "wrap")
each_step = pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step[0]}-{step[1]}")


def test_every_edit_of_the_table_is_tried_here() -> None:
    assert {TABLE[name][0].name for name, _ in STEPS} | WITH_OTHER_FILES == EDITS.keys()


@laws
@given(views(), st.lists(st.sampled_from(STEPS), min_size=1, max_size=5))
def test_steps_in_one_pass_are_the_steps_one_by_one(state: dict[str, torch.Tensor], steps: list[Step]) -> None:
    with opened(trained(state)) as (checkpoint, out):
        where = Path(checkpoint.path)
        try:
            once = written(ckptool.edit(checkpoint, steps), out)
        except ckptool.CkptoolError as error:
            once = type(error)
        try:
            for number, step in enumerate(steps):
                following = where.with_name(f"{number}.pth")
                with ckptool.open(where) as current:
                    ckptool.save(ckptool.edit(current, [step]), following)
                where = following
            many = oracle.load(where)
        except ckptool.CkptoolError as error:
            many = type(error)
        if isinstance(once, type) or isinstance(many, type):
            assert once is many
        else:
            assert oracle.difference(copy.deepcopy(many), copy.deepcopy(once)) == ""


def two_layers(step: Step) -> dict[str, Any]:
    """A trained checkpoint in which the step finds something to do."""
    prefix = "module." if step[0] == "strip-module" else ""
    return trained({f"{prefix}s0.w": torch.randn(4, 4), f"{prefix}s1.w": torch.randn(4)})


@pytest.mark.sampled(every=3)
@each_step
def test_no_edit_changes_an_optimizer_that_it_was_not_told_to_change(step: Step) -> None:
    """Every value and dtype in it, where the edit keeps it at all."""
    with opened(two_layers(step)) as (checkpoint, out):
        before = oracle.load(checkpoint.path)["optimizer"]
        after = written(ckptool.edit(checkpoint, [step]), out)
    assert ("optimizer" in after) is (step[0] not in WITHOUT_OPTIMIZER)
    assert oracle.difference(before, after.get("optimizer", before)) == ""


@pytest.mark.sampled(every=3)
@each_step
def test_the_pickle_of_a_plan_writes_what_the_edit_writes(step: Step) -> None:
    """Another process gets it, so all that computes bytes must be plain data."""
    with opened(two_layers(step)) as (checkpoint, out):
        parts = out.with_name("parts.pth")
        ckptool.save(ckptool.edit(checkpoint, [step]), out)
        edited = Conversion().applied(ckptool.edit(checkpoint, [step]), str(parts))
        plan, _ = plan_of(edited, str(parts))
        assert isinstance(plan, Plan)
        write_file(pickle.loads(pickle.dumps(plan)), str(parts), ())
        assert parts.read_bytes() == out.read_bytes()
