"""What the fuzzer finds: classes, single finds, and their causes."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

VALID_FAILS: Final = "valid but fails"
RUNS: Final = "valid and runs"
OTHER: Final = "other names, values, sharing"
EDIT: Final = "edit unlike the naive edit"
CRASH: Final = "exit 70"
BOUNDS: Final = "over 10 s or 512 MB"
LOADS: Final = "said to fail, but loads"
#: Each class, and whether none of it may be.
CLASSES: Final = {RUNS: True, OTHER: True, EDIT: True, CRASH: True, BOUNDS: True, VALID_FAILS: False, LOADS: False}


class Find(NamedTuple):
    """One disagreement: its class, what ckptool says, and what the reader says or does."""

    kind: str
    says: str
    reader: str

    @property
    def cause(self) -> str:
        return cause_of(f"{self.says} | {self.reader}" if self.kind != VALID_FAILS else self.reader)


class Verdict(NamedTuple):
    """What was found out about one input: ``valid`` as ckptool says, ``counts`` of other words for the table."""

    valid: bool = False
    opened: bool = False
    words: tuple[str, ...] = ()
    finds: tuple[Find, ...] = ()


def cause_of(text: str) -> str:
    """A message without what differs from case to case: two with the same cause are one bug, mostly."""
    text = re.sub(r"0x[0-9a-f]+|'[^']*'|\"[^\"]*\"|b'[^']*'", "'...'", text)
    text = re.sub(r"-?\d[\d,.]*", "#", text)
    text = re.sub(r"\[[^\]]*\]|\([#, ]*\)", "[...]", text)
    return re.sub(r"[^\x20-\x7e]+", "?", text)[:220]
