"""What ckptool says about an input, in this process, in bounded time and memory."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ckptool
from ckptool.checkpoint.checkpoint import Checkpoint
from ckptool.checkpoint.paths import parse_path

from .finds import BOUNDS, CRASH, OTHER, Find

_SECONDS = 10.0
_MEMORY = 512 << 20


class TooLong(BaseException):
    """More processor time than allowed; no ``except Exception`` may swallow it."""


def _too_long(_number: int, _frame: object) -> None:
    raise TooLong


@contextlib.contextmanager
def bounded(seconds: float = _SECONDS, memory: int = _MEMORY) -> Iterator[None]:
    """Raises TooLong after so much processor time, MemoryError for so much more address space. Not to be nested."""
    signal.signal(signal.SIGPROF, _too_long)
    with open("/proc/self/statm") as lines:
        space = int(lines.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (space + memory, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


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


@contextlib.contextmanager
def guarded(doing: str) -> Iterator[None]:
    """Raises Bad for anything but ckptool's own errors, and for too much time or memory."""
    try:
        with bounded():
            yield
    except ckptool.CkptoolError:
        raise
    except TooLong as error:
        raise Bad(Find(BOUNDS, f"{doing}: over {_SECONDS:g} s", place(error))) from error
    except MemoryError as error:
        raise Bad(Find(BOUNDS, f"{doing}: over {_MEMORY >> 20} MB", place(error))) from error
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
        facts = (tensor.kind, tensor.dtype, tensor.shape, tensor.stride, tensor.offset, tensor.storage)
        found.append(Entry(entry.path, steps, *facts, tensor.requires_grad, content))
    return found


def _content(checkpoint: Checkpoint, path: str) -> bytes | None:
    try:
        value = ckptool.get(checkpoint, path)
        return value.tobytes() if isinstance(value, ckptool.TensorValue) else None
    except ckptool.CkptoolError:
        return None


def listed(path: str, said: Said, finds: list[Find]) -> list[Entry] | None:
    """The tensors of an input, or None if it cannot be opened, which is a find if it is valid. Raises Bad."""
    try:
        with guarded("get"), ckptool.open(path) as checkpoint:
            return tensors_of(checkpoint)
    except ckptool.CkptoolError:
        if said.valid:
            finds.append(Find(OTHER, "valid, and cannot be opened", ""))
        return None


def saved(name: str, path: str, out: str, make: Callable[[Checkpoint], Checkpoint]) -> bool:
    """Save an edit of an input; return whether there is an output, or ckptool refused it. Raises Bad."""
    Path(out).unlink(missing_ok=True)
    try:
        with guarded(name), ckptool.open(path) as checkpoint:
            ckptool.save(make(checkpoint), out, force=True)
    except ckptool.CkptoolError:
        return False
    return True
