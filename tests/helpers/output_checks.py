"""What every output of an edit must be: valid, and readable by torch in every way in which the input is."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import LOADABLE, by_name
from torch._subclasses.fake_tensor import FakeTensorMode

import ckptool
from ckptool.reports.validate import validation_report

__all__ = ["VIEWS", "WHOLE", "at", "checked", "edited", "every", "saved"]

#: torch 2.13 itself ends with a segmentation fault on meta.
CRASHES = ("big_endian.pth",)
#: Torch loads these by chance, or does not look: no edit, or an output that is as damaged as its input.
DAMAGED = ("zip_two_pickles.pth", "zip_wrong_crc.pth")
#: Written with checksums of zero, which stand for "not computed"; they are carried over.
UNSUMMED = ("no_crc.pth",)
#: Views that torch makes storages of their own when it loads the legacy format; in a zip they are views of one.
VIEWS = ("py2_views.pth",)
WHOLE = [item for item in LOADABLE if item.path.name not in DAMAGED]
every = pytest.mark.parametrize("item", WHOLE, ids=by_name)


def plainly(path: Path) -> None:
    torch.load(path, map_location="cpu", weights_only=True)


def mapped(path: Path) -> None:
    torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def on_meta(path: Path) -> None:
    torch.load(path, map_location="meta", weights_only=True)


def faked(path: Path) -> None:
    with FakeTensorMode():
        torch.load(path, weights_only=True)


def works(mode: Callable[[Path], None], path: Path) -> bool:
    """Does torch load this file in this mode? Some tensors have no meta form, and legacy files no mmap."""
    try:
        mode(path)
    except Exception:
        return False
    return True


def edited(path: Path, out: Path, edit: Callable[[ckptool.Checkpoint], ckptool.Checkpoint]) -> Any:
    """What torch loads after an edit; the file must be valid, and load in every mode."""
    out = named_for(path, out)
    with ckptool.open(path) as checkpoint:
        ckptool.save(edit(checkpoint), out, force=True)
    return checked(out, path)


def named_for(path: Path, out: Path) -> Path:
    """The output with the suffix that an edit of ``path`` must have: torch goes by it for safetensors."""
    return out.with_suffix(".safetensors") if path.suffix == ".safetensors" else out


def failures(path: Path) -> set[str]:
    """The codes of what makes a checkpoint not valid."""
    checks = validation_report(str(path))["checks"]
    return {note["code"] for check in checks if check["status"] == "fail" for note in check["notes"]}


def checked(out: Path, *paths: Path) -> Any:
    """What torch loads of an output that was made of ``paths``, after all checks.

    An edit carries deflated storages over as they are, so its output is as invalid as its input; nothing else may fail.
    """
    assert failures(out) <= {"deflated"} & set().union(*map(failures, paths)), validation_report(str(out))["checks"]
    loaded = oracle.load(out)
    names = {path.name for path in paths}
    for mode in (plainly, mapped) if names & set(CRASHES) else (plainly, mapped, on_meta, faked):
        if all(works(mode, path) for path in paths):
            mode(out)
    if zipfile.is_zipfile(out) and not names & set(UNSUMMED):
        with zipfile.ZipFile(out) as archive:
            assert archive.testzip() is None
    return loaded


def at(loaded: Any, steps: list[str | int]) -> Any:
    """What the steps of a path lead to."""
    for step in steps:
        loaded = loaded[step]
    return loaded


def saved(value: Any, path: Path, **how: Any) -> Path:
    """A file that torch.save wrote."""
    torch.save(value, path, **how)
    return path
