"""Findings: facts that ckptool reports about a checkpoint, each with a code that programs can rely on.

``findings.json`` is the table of all codes: the meaning, the effects, and the check of ``validate`` that lists the
finding (by default "structure"). docs/codes.md is generated from it.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Flag
from functools import cache, reduce
from operator import or_
from typing import Final

from .lazy import table
from .records import NamedTuple
from .steps import AnyStep, in_shell


class Effect(Flag):
    """The consequences of a finding, independent of its level."""

    NONE = 0
    #: Values are missing or damaged.
    LOSES_VALUES = 1
    #: Every edit is refused: its output would pass the damage on as if it were sound.
    BLOCKS_EDITS = 2
    #: Two programs may read the file differently. Edits are refused.
    AMBIGUOUS = 4
    #: ``torch.load`` raises an error.
    REFUSED_BY_TORCH = 8


class Code(NamedTuple):
    """The meaning of a code, its effects, and the check of ``validate`` that lists the finding."""

    meaning: str
    effect: Effect
    check: str


@cache
def codes() -> dict[str, Code]:
    """Return the table of all codes."""
    rows = table("base/findings").items()
    effects = {name: reduce(or_, map(Effect.__getitem__, row.get("effects", ())), Effect.NONE) for name, row in rows}
    return {name: Code(row["meaning"], effects[name], row.get("check", "structure")) for name, row in rows}


class Finding(NamedTuple):
    """One fact that a user should know about a checkpoint.

    ``level`` is "note", "warning" or "error". ``where`` is a record, file, path or key, or "". ``offset`` is in bytes
    from the start of the file, or -1. ``refused`` adds to the effects of the code that ``torch.load`` raises an error.
    ``storages`` holds the keys of all storages that may be affected, or None if unknown; an output without these
    storages is intact. ``ref`` is the object in the pickle, or -1. ``next`` is the next step, or "".
    """

    code: str
    level: str
    message: str
    where: str = ""
    offset: int = -1
    refused: bool = False
    storages: Collection[str] | None = None
    ref: int = -1
    next: AnyStep = ""

    @property
    def effect(self) -> Effect:
        """The effects of the code, and of this finding."""
        return codes()[self.code].effect | (Effect.REFUSED_BY_TORCH if self.refused else Effect.NONE)

    @property
    def check(self) -> str:
        """The check of ``validate`` that lists this finding."""
        return codes()[self.code].check

    @property
    def blocks_edits(self) -> bool:
        """Whether edits are refused because their output would pass the damage on."""
        return Effect.BLOCKS_EDITS in self.effect

    @property
    def ambiguous(self) -> bool:
        """Whether two programs may read the file differently."""
        return Effect.AMBIGUOUS in self.effect

    @property
    def refused_by_torch(self) -> bool:
        """Whether ``torch.load`` raises an error."""
        return Effect.REFUSED_BY_TORCH in self.effect


# -- codes that other modules ask for ------------------------------------------------------------------------------

DAMAGED: Final = "damaged"
CUT: Final = "cut"
DEFLATED: Final = "deflated"
EDITED: Final = "edited-in-place"
INCOMPLETE: Final = "incomplete"
MISPLACED: Final = "misplaced"
JOINED: Final = "joined"
UNJOINED: Final = "unjoined"
COPIES: Final = "unequal-copies"
FLAT_PARAMETERS: Final = "flat-parameters"
#: The message of that finding.
FLAT_MESSAGE: Final = in_shell(
    "its parameters are flat vectors of FSDP1: convert `--unflatten OTHER` gives them names and shapes"
)
NO_INDEX: Final = "no-index"
STALE_INDEX: Final = "stale-index"
INNER: Final = "inner-weights"
RANK_SETS: Final = "rank-sets"
OTHER_FILES: Final = "other-files"
TRANSFORMED: Final = "transformed-item"
UNCHECKED: Final = "not-checked"
TWO_FORMATS: Final = "two-formats"
ODD_MEMBER: Final = "odd-member"
PROGRAM: Final = "program"
EMPTY_WEIGHTS: Final = "empty-weights"
CONFIGURATION: Final = "runs-code"
CARRIED: Final = "carried-pickle"
DANGEROUS_CALL: Final = "dangerous-call"
ADAPTER: Final = "adapter"
UNMERGED: Final = "unmerged-adapter"
