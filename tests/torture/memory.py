"""Checkpoints in memory: everything that ckptool says and does about some bytes, without a file."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Callable
from typing import Any, NamedTuple

import ckptool
from ckptool.base.errors import CkptoolError
from ckptool.checkpoint.checkpoint import Checkpoint
from ckptool.checkpoint.selection import select_entries
from ckptool.cli.show import summary
from ckptool.files.sources import BytesSource, Computed, Piece
from ckptool.formats import read_container
from ckptool.formats.planning import plan_of
from ckptool.reports.inspection import inspection
from ckptool.reports.keys import keys_report

__all__ = ["EDITS", "Told", "acting", "edited", "opened", "tell", "torch_loads"]

#: The edits, as the commands make them.
EDITS: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "strip-module": lambda checkpoint: ckptool.strip_module(checkpoint),
    "add-module": lambda checkpoint: ckptool.add_module(checkpoint),
    "remap": lambda checkpoint: ckptool.remap(checkpoint, {"cpu": "cuda:3", "cuda:*": "cpu"}),
}
_BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


class Told(NamedTuple):
    """What was said about some bytes: ``error`` is that of opening them, ``words`` everything printed."""

    error: str
    words: str


def opened(data: bytes) -> Checkpoint:
    """A checkpoint of bytes; raises CkptoolError."""
    source = BytesSource(data)
    return Checkpoint.of("<bytes>", source, read_container(source))


def tell(data: bytes) -> Told:
    """Everything that ``inspect`` and ``keys --all`` print; a CkptoolError is an answer as well."""
    try:
        checkpoint = opened(data)
        report = inspection(checkpoint)
        words = [summary(report)]
        words += [problem.message for problem in checkpoint.container.problems if problem.message.isprintable()]
        keys_report(checkpoint, select_entries(checkpoint, everything=True))
    except CkptoolError as error:
        return Told(str(error), "")
    return Told("", "\n".join(words))


def edited(data: bytes, edit: str) -> bytes | None:
    """The output of an edit; None where it is refused."""
    try:
        checkpoint = EDITS[edit](opened(data))
        plan, _ = plan_of(checkpoint)
        parts = [_bytes_of(piece) for piece in plan.pieces]
    except CkptoolError:
        return None
    return b"".join(parts)


def _bytes_of(piece: Piece) -> bytes:
    if isinstance(piece, Computed):
        return b"".join(piece.chunks())
    return piece if isinstance(piece, bytes) else piece.source.read(*piece[1:])


def torch_loads(data: bytes) -> Any:
    """What torch.load(weights_only=True) makes of bytes; None where it refuses them."""
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:
        # Torch refuses with any class there is; that it does is all that counts.
        return None


def acting(text: str) -> list[str]:
    """The characters of a text that a terminal would act on (as in tests/laws/test_inert.py)."""
    return [
        f"U+{ord(char):04X}"
        for char in set(text) - {"\n"}
        if unicodedata.category(char) in ("Cc", "Zl", "Zp", "Cs")
        or unicodedata.bidirectional(char) in _BIDI
        or char in "\u061c\u200e\u200f\ufeff"
    ]
