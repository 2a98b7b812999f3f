"""What ckptool says about an input, in this process and within its bounds."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import ckptool
from ckptool.checkpoint.checkpoint import Checkpoint
from ckptool.checkpoint.paths import parse_path

from .finds import BOUNDS, CRASH, Find
from .limits import MEMORY, SECONDS, TooLong, bounded

__all__ = ["Bad", "Entry", "Said", "ask", "guarded", "tensors_of"]


class Entry(NamedTuple):
    """A tensor as ckptool reads it: ``steps`` of its path, None where it has none; ``content`` row-major bytes."""

    path: str
    steps: tuple[str | int, ...] | None
    kind: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: str
    requires_grad: bool
    content: bytes | None


class Said(NamedTuple):
    """The verdict of validate: ``valid``, ``loads`` under weights_only (None where it does not say), ``failed`` the
    checks that failed, ``ambiguous`` whether it says that readers differ."""

    valid: bool
    loads: bool | None
    failed: tuple[str, ...]
    report: dict[str, Any]


class Bad(Exception):
    """ckptool broke a promise."""

    def __init__(self, find: Find) -> None:
        super().__init__(find.says)
        self.find = find


@contextmanager
def guarded(doing: str) -> Iterator[None]:
    """Raises Bad for anything but ckptool's own errors, and for too much time or memory."""
    try:
        with bounded():
            yield
    except ckptool.CkptoolError:
        raise
    except TooLong as error:
        raise Bad(Find(BOUNDS, f"{doing}: over {SECONDS:g} s", place(error))) from error
    except MemoryError as error:
        raise Bad(Find(BOUNDS, f"{doing}: over {MEMORY >> 20} MB", place(error))) from error
    except Exception as error:
        raise Bad(Find(CRASH, f"{doing}: {type(error).__name__}: {str(error)[:200]}", place(error))) from error


def place(error: BaseException) -> str:
    """The innermost line of ckptool that is to blame: "pickles/machine.py:120"."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if "/ckptool/" in frame.filename]
    return f"{lines[-1].filename.rpartition('/ckptool/')[2]}:{lines[-1].lineno}" if lines else "tests"


def ask(path: str) -> Said:
    """What validate says. Raises Bad."""
    with guarded("validate"):
        report = ckptool.validate(path)
    status = {check["name"]: check["status"] for check in report["checks"]}
    loads = {"pass": True, "warning": False, "fail": False}.get(status.get("weights-only", ""))
    failed = tuple(f"{check['name']}: {check['message']}" for check in report["checks"] if check["status"] == "fail")
    return Said(report["status"] == "valid", loads, failed, report)


def tensors_of(checkpoint: Checkpoint, most: int = 64) -> list[Entry]:
    """The tensors with their bytes, as get reads them. Raises Bad, CkptoolError."""
    found = []
    for entry in checkpoint.survey.tensors[:most]:
        tensor = entry.tensor
        try:
            steps: tuple[str | int, ...] | None = tuple(parse_path(entry.path))
        except ckptool.CkptoolError:
            steps = None
        content = None
        if tensor.kind in ("dense", "parameter") and tensor.numel <= 1 << 16:
            content = _content(checkpoint, entry.path)
        storage = tensor.storage
        found.append(
            Entry(
                entry.path,
                steps,
                tensor.kind,
                tensor.dtype,
                tensor.shape,
                tensor.stride,
                tensor.offset,
                storage,
                tensor.requires_grad,
                content,
            )
        )
    return found


def _content(checkpoint: Checkpoint, path: str) -> bytes | None:
    try:
        value = ckptool.get(checkpoint, path)
    except ckptool.CkptoolError:
        return None
    if not isinstance(value, ckptool.TensorValue):
        return None
    try:
        return value.tobytes()
    except ckptool.CkptoolError:
        return None
