"""Ways to rename the keys of a state dict: wrappers and prefixes, then the names of the target one by one.

A way is made of steps: options of ``ckptool edit``, each a function of a name or a change of the whole file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

from ...base.errors import TargetError
from ...base.globs import Globs
from ...base.patterns import escaped
from ...base.prefixes import WRAPPERS, unwrapper
from ...base.records import NamedTuple
from ...base.steps import NextStep, Step, command
from ..keys import Rename, parse_regex, stripping
from .pairing import Agreement, Comparison, Pairing, Spec, compare, heads_agree, pair_names, suffixes

#: Options that do not change names.
LAYOUT: Final = frozenset(
    ("extract", "wrap", "drop", "to", "sanitize", "as-state-dict", "drop-unknown", "local-parts", "merge-entry")
)
#: Options that apply to the whole file.
WHOLE: Final = LAYOUT - {"extract", "wrap", "drop"}
#: The most patterns by which a fix drops keys: more are no shorter than the list of keys.
_DROPS: Final = 4
#: Characters that prevent a prefix from being written as a glob.
NOT_IN_GLOBS: Final = frozenset("*?=[]{}\\")
#: The most changes of a prefix that are tried at once: ``student.``, ``teacher.`` and the like have equal votes.
_TRIED: Final = 4
#: The most changes of prefixes in a row; the names of the target are easier to read than more.
_IN_A_ROW: Final = 2
#: Names that tools are known to change: weight_norm before torch 2.0, norms of TensorFlow, DenseNet in torchvision
#: before 0.3, and the adapter's name in a live PEFT model.
_KNOWN: Final = tuple(
    tuple(Step("rename", text) for text in texts)
    for texts in (
        (r"s/parametrizations\.(\w+)\.original0$/\1_g/", r"s/parametrizations\.(\w+)\.original1$/\1_v/"),
        (r"s/(^|\.)gamma$/\1weight/", r"s/(^|\.)beta$/\1bias/"),
        (r"s/(^|\.)(norm|conv)\.([12])\./\1\2\3./",),
        (r"s/\b(lora_\w+)\.default\b/\1/",),
    )
)

Steps: TypeAlias = tuple[Step, ...]


class Candidate(NamedTuple):
    """The names after some steps, in the order of the checkpoint, and how they fit.

    ``agreement`` is what the values say of the new names.
    """

    steps: Steps
    names: list[str]
    fit: Comparison
    agreement: Agreement

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """The quality of the fit; larger is better: values in the right place, fewer problems, fewer steps."""
        loads, problems = self.fit.rank
        wrong = len(self.agreement.contradicted)
        return loads - wrong, problems, -wrong, -len(self.steps)


class Space(NamedTuple):
    """What renamings are compared with; ``filled`` are keys that may be missing."""

    specs: Mapping[str, Spec]
    wanted: Mapping[str, Spec]
    filled: frozenset[str]
    pairing: Pairing

    def candidate(self, steps: Steps, names: list[str]) -> Candidate:
        fit = compare(dict(zip(names, self.specs.values())), self.wanted, self.filled)
        original = dict(zip(names, self.specs))
        return Candidate(steps, names, fit, self.pairing.agreement((original[name], name) for name in fit.loads))


def best_renaming(space: Space, start: Candidate, target: str) -> Candidate:
    """Return the best renaming of a state dict; ``start`` if nothing is better than its own names.

    ``target`` is the name that "rename-like" takes ("" for no name).
    """
    if start.fit.complete:
        return start
    best = start
    unwrapped = _after(start, Step("wrappers"))
    # Wrappers hide the segments that would be recognised, so names without them are followed as well.
    for begin in (start, *([space.candidate(*unwrapped)] if unwrapped else [])):
        current = begin
        for _ in range(_IN_A_ROW):
            tries = (*((step,) for step in _prefix_steps(current.names, space.wanted)), *_KNOWN)
            found = (_after(current, *steps) for steps in tries)
            tried = [each for new in found if new and _gains(current, each := space.candidate(*new))]
            current = max((current, *tried), key=lambda candidate: candidate.rank)
            if not tried or current.fit.complete:
                break
        best = max(best, current, key=lambda candidate: candidate.rank)
    if target and not best.fit.complete:
        have, wanted = ({name: spec.shape for name, spec in side.items()} for side in (space.specs, space.wanted))
        partners = pair_names(have, wanted, space.pairing)
        names = [partners.get(name, name) for name in space.specs]
        if names != start.names and len({*names}) == len(names):
            new = space.candidate((Step("rename-like", target),), names)
            best = max(best, new, key=lambda candidate: candidate.rank)
    return best


def _after(candidate: Candidate, *steps: Step) -> tuple[Steps, list[str]] | None:
    """Return the steps and names after more steps, or None if they change nothing or two names would become equal."""
    names, taken = candidate.names, candidate.steps
    for step in steps:
        before = names
        names = list(map(renaming(step, names), names))
        taken = (*taken, step) if names != before else taken
    if names == candidate.names or len({*names}) < len(names) or "" in names:
        return None
    return taken, names


def _gains(before: Candidate, after: Candidate) -> bool:
    """Return whether a step helps at least half of the keys that it changes, or of those that are missing."""
    changed = sum(a != b for a, b in zip(before.names, after.names))
    missing = [*before.fit.missing, *before.fit.filled]
    found = len(missing) - len(after.fit.missing) - len(after.fit.filled)
    return found * 2 >= min(changed, len(missing)) and found > 0


def _prefix_steps(names: Sequence[str], wanted: Mapping[str, Spec]) -> Iterator[Step]:
    """Yield the steps that remove, add or replace a prefix, as the ends of names suggest, the most frequent first."""
    have = {*names}
    free, left = [name for name in names if name not in wanted], [name for name in wanted if name not in have]
    votes: Counter[tuple[str, str]] = Counter()
    by_end: dict[str, str] = {}
    for name in left:
        for end in suffixes(name):
            by_end.setdefault(end, name)
            if end in have:
                votes["", name[: len(name) - len(end)]] += 1
    for name in free:
        longest = ""
        for end in suffixes(name):
            if end in wanted:
                votes[name[: len(name) - len(end)], ""] += 1
            longest = end if end in by_end else longest
        if longest:
            old, new = name[: len(name) - len(longest)], by_end[longest].removesuffix(longest)
            size = longest.count(".") + 1
            if old and new and heads_agree(old.split(".")[:-1], new.split(".")[:-1], size):
                votes[old, new] += 1
    for (old, new), _ in votes.most_common(_TRIED):
        if old == "module." and not new:
            yield Step("strip-module")
        elif old and not new and {*old[:-1].split(".")} <= WRAPPERS.keys():
            yield Step("wrappers")
        elif not new or not old:
            yield Step("strip-prefix", old) if old else Step("add-prefix", new)
        elif not NOT_IN_GLOBS & {*old, *new}:
            yield Step("rename", f"{old}*={new}*")


# -- steps


def renaming(step: Step, names: Iterable[str]) -> Rename:
    """Return the function by which a step renames one name, given all names in the state dict.

    Raise TargetError for a step that does not rename.
    """
    value = str(step.value)
    if step.name in ("strip-module", "strip-prefix"):
        return stripping("module." if step.name == "strip-module" else value)
    if step.name == "wrappers":
        return unwrapper(names)
    if step.name == "add-prefix":
        return value.__add__
    if step.name == "rename" and value.startswith("s/"):
        pattern, replacement, count = parse_regex(value)
        return partial(pattern.sub, replacement, count=count)
    if step.name == "rename":  # made by this package: a prefix, and a star on both sides
        old, new = (side.removesuffix("*") for side in value.split("=", 1))
        return lambda name: new + name.removeprefix(old) if name.startswith(old) else name
    raise TargetError(f"{step.name!r} does not rename")


def edit_command(path: str, steps: Sequence[Step], output: str, key: str | None) -> NextStep:
    """Return the command that applies the steps."""
    settings: list[Step] = []
    keyed = key is None
    for step in steps:
        if step.name not in WHOLE and not keyed:
            settings.append(Step("key", key or "."))  # it applies to the edits after it
            keyed = True
        settings.append(step)
    return command("edit", path, output=output, steps=settings)


def drop_steps(names: Collection[str], unexpected: Sequence[str]) -> Steps:
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
                return tuple(Step("drop", pattern) for pattern in patterns)
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
