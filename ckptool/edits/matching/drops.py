"""Find the patterns that drop exactly the keys that a target does not have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from ...base.globs import Globs
from ...base.patterns import escaped
from .search import FixStep

#: Maximum number of patterns by which a fix drops keys.
_DROPS: Final = 4


def drop_steps(names: Collection[str], unexpected: Sequence[str]) -> tuple[FixStep, ...]:
    """Return the steps that drop exactly the unexpected keys; empty if a few patterns cannot do that."""
    bad = set(unexpected)
    kept = [name for name in names if name not in bad]
    by_module = _module_patterns(kept, unexpected)
    ends = Counter(name.rpartition(".")[2] for name in unexpected)
    for name in kept:
        ends.pop(name.rpartition(".")[2], None)
    # What a profiler adds to every module has an end of its own.
    many = [end for end, count in ends.items() if count >= _DROPS]
    others = [name for name in unexpected if name.rpartition(".")[2] not in many]
    by_end = [*(f"*{escaped(end)}" for end in many), *_module_patterns(kept, others)]
    for patterns in (by_module, by_end):
        if len(patterns) <= _DROPS:
            match = Globs(patterns)
            if {name for name in names if match.match(name)} == bad:
                return tuple(FixStep("drop", pattern) for pattern in patterns)
    return ()


def _module_patterns(kept: Iterable[str], unexpected: Sequence[str]) -> list[str]:
    """Return the patterns of the modules that hold only unexpected keys, at most one more than a fix may have."""
    wanted = {name[:at] for name in kept for at, char in enumerate(name) if char == "."}
    patterns: dict[str, None] = {}
    for name in unexpected:
        # Use the shortest prefix that no wanted key has; for a name alone in its module, the whole name.
        ends = (at for at, char in enumerate(name) if char == ".")
        head = next((name[:at] for at in ends if name[:at] not in wanted), None)
        patterns[escaped(name) if head is None else escaped(head) + ".*"] = None
        if len(patterns) > _DROPS:
            break
    return list(patterns)
