"""The answer to "what may loading this file do?", in one word and the reasons for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ..base.limits import LIMITS
from ..base.text import join_limited
from ..checkpoint.container import FoundPickle
from .named_globals import ALLOWED, NamedGlobal, dangerous_calls
from .weights_only import NOT_A_STORAGE, broken_rules

#: Every pickle names what is on torch's list for weights_only, and nothing else; or there is none, and nothing is run.
WEIGHTS_ONLY: Final = "weights-only"
#: Something acts on the machine when it is unpickled.
UNSAFE: Final = "unsafe"
#: It is a program, which runs by design.
PROGRAM: Final = "program"
#: It names what is not on the list, or cannot be followed to its end.
UNKNOWN: Final = "unknown"
#: The worst first.
VERDICTS: Final = (UNSAFE, PROGRAM, UNKNOWN, WEIGHTS_ONLY)
#: Globals named in one reason.
_NAMED: Final = 3


class Verdict(NamedTuple):
    """One of VERDICTS, and the reasons for any but the last."""

    word: str
    reasons: tuple[str, ...] = ()


def verdict_of(
    pickles: Sequence[FoundPickle],
    names: Iterable[NamedGlobal],
    torch: str,
    *,
    program: str = "",
    unclear: Iterable[str] = (),
) -> Verdict:
    """Return the verdict on a file with these ``pickles``, which name these globals.

    ``program`` is the kind of program that it is, "" for none. ``unclear`` are other reasons for UNKNOWN.
    """
    calls = [f"{call} when unpickled" for _, call in dangerous_calls(pickles)]
    if calls:
        return Verdict(UNSAFE, tuple(dict.fromkeys(calls[: LIMITS.listed])))
    if program:
        return Verdict(PROGRAM, (program,))
    outside = list(dict.fromkeys(item.mapped for item in names if item.word != ALLOWED))
    reasons = [f"not on torch {torch}'s list: {join_limited(outside, most=_NAMED)}"] if outside else []
    reasons += unclear
    for pickle in pickles:
        if pickle.error:
            reasons.append(f"{pickle.where}: {pickle.error}")
        elif pickle.graph is not None:
            reasons += [rule for rule in broken_rules(pickle.graph, torch) if rule != NOT_A_STORAGE]
    reasons = list(dict.fromkeys(reasons))[: LIMITS.listed]
    return Verdict(UNKNOWN, tuple(reasons)) if reasons else Verdict(WEIGHTS_ONLY)


def worst_verdict(words: Iterable[str]) -> str:
    """Return the worst of the words; WEIGHTS_ONLY for none."""
    return min(words, key=VERDICTS.index, default=WEIGHTS_ONLY)
