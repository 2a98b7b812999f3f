"""Every function takes a path or a Checkpoint, with the same result, and says what it expected of anything else."""

from __future__ import annotations

import inspect
import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FIXTURES

import ckptool
from ckptool.pickles.compare import difference

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

#: The arguments after the checkpoint, for every function but those that name an output.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("hash", "history", "inspect", "keys", "load", "lock", "scan", "stats", "undo", "validate"), ()),
    **dict.fromkeys(("add_module", "redact", "repack", "salvage", "sanitize", "slim"), ()),
    **dict.fromkeys(("strip_module", "strip_wrappers"), ()),
    "cast": ("bfloat16",),
    "convert": ("torch",),
    "drop": (["*.bias"],),
    "edit": ([("wrappers", True), ("to", "cpu")],),
    "extract": ("state_dict",),
    "get": ("state_dict",),
    "keep": (["*.bias"],),
    "match": (FIXTURES / "bare.pth",),
    "remap": ("cpu",),
    "rename": ({"module.conv1.weight": "first"},),
    "set": ("epoch", 3),
    "wrap": ("inner",),
}
#: Those that take two or more checkpoints, or write, or take a folder, a text, or a model of some kind.
OTHERS = {"open", "average", "diff", "explain", "merge", "report", "resize", "save", "save_in_place", "update_config"}
OTHERS |= {"convert_lora", "dequantize", "extract_lora", "merge_lora", "resize_lora", "write_lock"}
FUNCTIONS = [name for name in ckptool.__all__ if inspect.isfunction(getattr(ckptool, name))]
#: What is about the file and not about the checkpoint.
OF_FILES = {"history", "load", "salvage", "scan", "undo", "validate"}

WRONG = [3, None, 1.5, [], {}, b"x.pth", io.BytesIO(b""), Path, torch.zeros(1)]


def function(name: str) -> Callable[..., Any]:
    chosen: Callable[..., Any] = getattr(ckptool, name)
    return chosen


def comparable(result: Any) -> Any:
    """What can be compared of a result: a report without paths, a graph, what is in a dict."""
    if isinstance(result, ckptool.Salvaged):
        result = result.checkpoint
    if isinstance(result, ckptool.Checkpoint):
        return result.changes
    return repr(result)


def test_every_function_is_listed() -> None:
    assert set(FUNCTIONS) == ARGUMENTS.keys() | OTHERS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    shutil.copy(FIXTURES / "wrapped_module.pth", tmp_path / "a.pth")
    return tmp_path / "a.pth"


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_path_and_a_checkpoint_give_the_same(name: str, path: Path) -> None:
    from_path = function(name)(path, *ARGUMENTS[name])
    from_text = function(name)(str(path), *ARGUMENTS[name])
    with ckptool.open(path) as checkpoint:
        from_checkpoint = function(name)(checkpoint, *ARGUMENTS[name])
        assert comparable(from_path) == comparable(from_text) == comparable(from_checkpoint)
        if isinstance(from_path, ckptool.Checkpoint):
            assert difference(from_path.graph, from_checkpoint.graph) == ""
        assert checkpoint["epoch"] is not None  # it is still open


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("wrong", WRONG, ids=lambda value: type(value).__name__)
def test_anything_else_is_refused_in_words(name: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=rf"a path .* or a Checkpoint is expected, not {type(wrong).__name__}"):
        function(name)(wrong, *ARGUMENTS[name])


@pytest.mark.parametrize("name", sorted(OF_FILES))
def test_what_is_about_the_file_refuses_an_unsaved_edit(name: str, path: Path) -> None:
    with ckptool.open(path) as checkpoint, pytest.raises(ckptool.CkptoolError, match="not saved") as caught:
        function(name)(ckptool.strip_module(checkpoint))
    assert "save" in caught.value.next


def test_two_checkpoints(path: Path, tmp_path: Path) -> None:
    with ckptool.open(path) as checkpoint:
        other = ckptool.strip_module(checkpoint)
        assert ckptool.diff(path, path)["same"] and ckptool.diff(checkpoint, path)["same"]
        assert not ckptool.diff(path, other)["same"] and ckptool.diff(path, other, ignore=["prefix"])["same"]
        assert ckptool.match(path, other)["schema"] == ckptool.match(checkpoint, FIXTURES / "bare.pth")["schema"]
        renamed = ckptool.rename(other, like=path)
        assert list(renamed["state_dict"]) == list(checkpoint["state_dict"])
        merged = ckptool.merge(checkpoint, path)
        assert merged.changes == ckptool.merge(path, checkpoint).changes
        assert ckptool.average([path, checkpoint]).changes == ckptool.average([checkpoint, str(path)]).changes
        for wrong in WRONG:
            for call in (
                lambda wrong=wrong: ckptool.open(wrong),
                lambda wrong=wrong: ckptool.update_config(wrong),
                lambda wrong=wrong: ckptool.resize(wrong, 4),
                lambda wrong=wrong: ckptool.diff(path, wrong),
                lambda wrong=wrong: ckptool.merge(path, wrong),
                lambda wrong=wrong: ckptool.average([path, wrong]),
                lambda wrong=wrong: ckptool.save(path, wrong),
                lambda wrong=wrong: ckptool.save(wrong, tmp_path / "b.pth"),
                lambda wrong=wrong: ckptool.save_in_place(wrong),
                lambda wrong=wrong: ckptool.write_lock(path, wrong),
            ):
                with pytest.raises(TypeError, match=r"is expected, not|takes a path as"):
                    call()


def test_what_writes_takes_a_path(path: Path, tmp_path: Path) -> None:
    ckptool.save(path, tmp_path / "copy.pth")
    assert (tmp_path / "copy.pth").read_bytes() == path.read_bytes()
    ckptool.write_lock(path, tmp_path / "a.lock")
    assert ckptool.validate(path, {"lock": tmp_path / "a.lock"})["valid"]
    assert ckptool.save_in_place(path).appended == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "bf16", "torch.bfloat16"], ids=str)
def test_a_dtype_is_a_name_or_one_of_torch(dtype: Any, path: Path) -> None:
    assert ckptool.cast(path, dtype)["state_dict"]["module.conv1.weight"].dtype == "bfloat16"


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_can_be_pickled(name: str) -> None:
    assert pickle.loads(pickle.dumps(function(name))) is function(name)
