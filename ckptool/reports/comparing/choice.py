"""The part of two object graphs that patterns choose, by the paths of containers.

A pattern matches by key or by whole path: a tensor, an entry, or a container with all its content. The choice is by
place and not by object, because one file may share an object that the other has twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from ...base.errors import Again, MalformedError, TargetError
from ...base.globs import Glob, Globs
from ...base.limits import LIMITS
from ...base.steps import tree_step
from ...base.text import join_limited
from ...checkpoint.objects import holds_constants
from ...checkpoint.paths import parse_steps
from ...pickles.nodes import Ref
from .places import Side, join_path

#: The children of a container by the steps under which they are compared: without prefixes if these are ignored.
Children: TypeAlias = Callable[[Ref], Mapping[str, Ref]]

_METADATA: Final = "._metadata"


class ChosenParts:
    """The sub-objects chosen for comparison in two graphs, with the containers that lead to them.

    Elements of a list of plain values are chosen together. Raise TargetError if a pattern matches nothing in either
    graph or nothing is chosen, MalformedError beyond ``LIMITS.places`` plus four places per node.
    """

    def __init__(self, sides: Sequence[Side], children: Sequence[Children], only: Globs) -> None:
        self.only = only
        #: By path: True if all is chosen that is not in ``dropped``, False if only places in ``kept`` are.
        self.containers: dict[str, bool] = {}
        self.kept: set[str] = set()
        self.dropped: set[str] = set()
        self._bases = list({side.base: side for side in sides}.values())
        self._unmatched = [Glob(pattern) for pattern in (*only.include, *only.exclude)]
        self._names: dict[tuple[str, str], None] = {}
        self._holders: dict[str, str] = {}
        self._chosen = False
        for side, children_of in zip(sides, children):
            self._follow(side, children_of)
        if self._unmatched or not self._chosen:
            raise self._nothing_matches(sides[0])
        self._names.clear()

    def of(self, path: str, children: Mapping[str, Ref]) -> dict[str, Ref]:
        """Return the chosen children of a container, whose path is in ``containers``."""
        whole = self.containers[path]
        places = {step: join_path(path, step) for step in children}
        return {
            step: ref
            for step, ref in children.items()
            if (places[step] not in self.dropped if whole else places[step] in self.kept)
        }

    def _follow(self, side: Side, children: Children) -> None:
        """Follow one side, and note which places in its containers are chosen."""
        left = LIMITS.places + 4 * len(side.graph.nodes)
        metadata = {item.metadata for item in side.checkpoint.state_dicts}
        within: set[Ref] = set()
        # The containers to enter: chosen (True), not chosen (False), or excluded (None). A negative reference leaves
        # one.
        work: list[tuple[Ref, str, bool | None]] = []
        state = self._state("", "", not self.only.include)
        if self._is_entered(side, side.root, state):
            work.append((side.root, "", state))
        while work:
            ref, path, state = work.pop()
            if ref < 0:
                within.discard(~ref)
                continue
            if ref in within:
                self.containers.setdefault(path, False)
                continue
            within.add(ref)
            work.append((~ref, path, state))
            below = children(ref)
            left -= len(below)
            if left < 0:
                raise MalformedError("its objects are at too many places to follow", path=side.checkpoint.path)
            if state is not None:
                self.containers[path] = state
            chosen, inside = [], []
            for step, child in below.items():
                if step == _METADATA and child in metadata:
                    continue
                place, key = join_path(path, step), step_key(step)
                now = self._state(key, place, state)
                self._holders[place] = path
                if now:
                    chosen.append(key)
                    self._keep(place)
                elif now is None:
                    self.dropped.add(place)
                if self._is_entered(side, child, now):
                    inside.append((child, place, now))
            work += reversed(inside)
            if state is not None and below.get(_METADATA) in metadata:
                place = join_path(path, _METADATA)
                self._holders[place] = path
                self._modules(place, children(below[_METADATA]), state, chosen, map(step_key, below))

    def _keep(self, place: str) -> None:
        """Note that a place is chosen, and with it all containers around it."""
        while place not in self.kept:
            self.kept.add(place)
            place = self._holders.get(place, "")

    def _is_entered(self, side: Side, ref: Ref, state: bool | None) -> bool:
        """Return whether the members of a container must be examined, because patterns may choose or exclude them."""
        if state is not False and not self._unmatched and not (state and self.only.exclude):
            return False
        if side.tensor(ref) is not None or side.leaf(ref) is not None or side.is_set(ref):
            return False
        return side.elements(ref) is None or not holds_constants(side.graph, ref)

    def _modules(
        self, path: str, modules: Mapping[str, Ref], whole: bool, chosen: Iterable[str], keys: Iterable[str]
    ) -> None:
        """Choose the entries of a state dict's ``_metadata`` for modules with chosen keys.

        If everything is chosen that is not excluded, modules without keys stay too.
        """
        self.containers[path] = whole
        inside, known = _modules_of(chosen), _modules_of(keys)
        if inside:
            self._keep(path)
        for step in modules:
            module = step_key(step)
            if module in inside or (whole and module not in known and self.only.decide(module) is not False):
                self.kept.add(join_path(path, step))
            else:
                self.dropped.add(join_path(path, step))

    def _state(self, key: str, place: str, outer: bool | None) -> bool | None:
        """Return whether a place is chosen, inside a container with the state ``outer``; None if patterns
        exclude it.
        """
        paths = [side.path_in_file(place) for side in self._bases]
        if self._unmatched:
            self._names.update({(key, path): None for path in paths})
            self._unmatched = [glob for glob in self._unmatched if not any(glob.matches(key, path) for path in paths)]
        decided = {self.only.decide(key, path) for path in paths}
        if outer is None or False in decided:
            return None
        state = outer or True in decided
        self._chosen |= state
        return state

    def _nothing_matches(self, side: Side) -> TargetError:
        step = tree_step(side.checkpoint.path)
        if not self._unmatched:
            return TargetError("every key is excluded", next=step)
        from ...base.nearest import nearest_pattern

        missing = [glob.pattern for glob in self._unmatched]
        near = nearest_pattern(missing[0], [key for key, _ in self._names], [path for _, path in self._names])
        message = f"no key matches {join_limited([repr(pattern) for pattern in missing])} in either file"
        if not near:
            return TargetError(message, next=step)
        return TargetError(f"{message}; did you mean {near!r}?", again=Again(words=((missing[0], near),)))


def step_key(step: str) -> str:
    """Return the key of a step that leads to a string key, otherwise the step."""
    if step.startswith('["'):
        return str(parse_steps(step)[0].value)
    return step.removeprefix(".")


def _modules_of(keys: Iterable[str]) -> set[str]:
    """Return the keys and all modules that contain them; "" is the outermost."""
    modules: set[str] = set()
    for name in keys:
        while name not in modules:
            modules.add(name)
            name = name.rpartition(".")[0]
    return modules
