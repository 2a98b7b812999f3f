"""Resolve paths from the command line to a node, an entry of a mapping, or the state dicts to edit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

from ..base.errors import TargetError
from ..base.globs import Glob, Globs
from ..base.records import NamedTuple
from ..base.steps import command, option, tree_step
from ..base.text import join_limited
from ..pickles.nodes import Call, Graph, Ref
from ..pickles.opcodes import REDUCE
from .checkpoint import Checkpoint
from .objects import mapping
from .paths import PathStep, as_children, bounded, child, children, joined, match_step, parse_steps, spell_key, within
from .survey import StateDict, Survey, TensorEntry

if TYPE_CHECKING:
    from .graph_editor import GraphEditor


class Located(NamedTuple):
    """A node and its path, as ``inspect`` prints it."""

    ref: Ref
    path: str


class Slot(NamedTuple):
    """The place of an existing or possible entry in a mapping.

    ``holder`` is the mapping and ``items`` its (key, value) references. ``number`` is the position of the entry, or -1
    if it does not exist. ``key`` is the key as a Python value, or NO_VALUE if it has none.
    """

    holder: Ref
    items: list[tuple[Ref, Ref]]
    number: int
    key: Any


def follow(graph: Graph, steps: Sequence[PathStep]) -> Located | None:
    """Return the node that the steps lead to from the root, or None."""
    path, ref = "", graph.root
    for step in steps:
        found = child(graph, ref, step)
        if found is None:
            return None
        path = step.step if step.step.startswith("(#") else joined(bounded(path, ref), found.step)
        ref = found.ref
    return Located(ref, path)


def slot(checkpoint: Checkpoint, path: str) -> Slot | None:
    """Return the slot of the entry at a path; None if no mapping would hold it. Raises TargetError for the root."""
    steps = parse_steps(path)
    if not steps:
        raise TargetError("the whole checkpoint is not an entry", path=checkpoint.path, next="name an entry")
    graph, last = checkpoint.graph, steps[-1]
    holder = follow(graph, steps[:-1])
    items = mapping(graph, holder.ref) if holder is not None else None
    if holder is None or items is None:
        root = mapping(graph, graph.root) if checkpoint.traits.flat_names else None
        names = [graph.nodes[key] for key, _ in root or ()]  # a dot in them has no meaning
        if root is None or (path not in names and any(_plain(each.path) == path for each in _readings(graph, path))):
            return None
        return Slot(graph.root, root, names.index(path) if path in names else -1, path)
    entries = as_children(graph, items)
    entry = match_step(graph, entries, last)
    return Slot(holder.ref, items, -1 if entry is None else entries.index(entry), last.value)


def new_key(checkpoint: Checkpoint, rewrite: GraphEditor, path: str, key: Any) -> Ref:
    """Add a node for a key, as a pickler writes it; raise TargetError if the key is not made of plain values."""
    has_bytes = checkpoint.graph.style.protocol >= _BYTES
    if key is None or isinstance(key, bool | int | float | str) or (has_bytes and isinstance(key, bytes)):
        return rewrite.add(key)
    if isinstance(key, bytes):
        args = (rewrite.add(key.decode("latin-1")), rewrite.add("latin1"))
        return rewrite.add(Call(REDUCE, rewrite.named("_codecs", "encode"), rewrite.add(args)))
    if isinstance(key, tuple):
        return rewrite.add(tuple(new_key(checkpoint, rewrite, path, part) for part in key))
    message = f"no entry can be added at {path!r}: its key is not made of numbers, strings, bytes and tuples"
    raise TargetError(message, path=checkpoint.path)


#: The first protocol with bytes; earlier ones write a call (``_codecs.encode``).
_BYTES: Final = 3


def selected(checkpoint: Checkpoint, key: str | None) -> list[StateDict]:
    """Return the state dict at the path ``key``, or raise TargetError; for None, all of high confidence."""
    state_dicts = checkpoint.state_dicts
    if key is None:
        return [item for item in state_dicts if item.confidence == "high"]
    place = follow(checkpoint.graph, parse_steps("" if key == "." else key))
    chosen = [item for item in state_dicts if place is not None and item.ref == place.ref]
    if not chosen:
        known = join_limited([repr(item.path) if item.path else "'.' (the whole file)" for item in state_dicts], most=8)
        message = f"no state dict at {key!r}" + (f"; there is {known}" if state_dicts else ", nor elsewhere")
        raise TargetError(message, path=checkpoint.path, next=tree_step(checkpoint.path))
    return chosen


def only_one(checkpoint: Checkpoint, state_dicts: Sequence[StateDict], parameter: str = "key") -> StateDict:
    """Return the only state dict; raise TargetError for none, and for several, which ``parameter`` chooses from."""
    if len(state_dicts) == 1:
        return state_dicts[0]
    if not state_dicts:
        raise TargetError("there is no state dict in it", path=checkpoint.path, next=tree_step(checkpoint.path))
    paths = [item.path or "." for item in state_dicts]
    raise TargetError(
        f"there are {len(paths)} state dicts: {join_limited(list(map(repr, paths)))}",
        path=checkpoint.path,
        next=f"choose one, for example {option(parameter, paths[0])}",
    )


class ChosenKeys:
    """The places in a checkpoint that patterns select: each match, with everything in it."""

    def __init__(self, only: Globs) -> None:
        self.only = only
        self._containers: dict[str, bool | None] = {"": not only.include}

    def __contains__(self, path: str) -> bool:
        """Return whether a path, as ``inspect`` spells it, is selected."""
        return not self.only or bool(self._state(path))

    def key(self, state_dict: str, key: str) -> bool:
        """Return whether a key of the state dict at a path is selected."""
        return not self.only or spell_key(state_dict, key) in self

    def tensors(self, survey: Survey) -> list[TensorEntry]:
        """Return the selected tensors."""
        dicts = survey.state_dicts
        return [
            entry
            for entry in survey.tensors
            if (entry.path in self if entry.state_dict < 0 else self.key(dicts[entry.state_dict].path, entry.key))
        ]

    def _state(self, path: str) -> bool | None:
        """Return whether a path is selected, or None if it or its container is excluded."""
        if path not in self._containers:
            outer, state = "", self._containers[""]
            for step in parse_steps(path):
                outer = joined(outer, step.step)
                if outer not in self._containers:
                    key = step.value if isinstance(step.value, str) else step.step
                    decided = self.only.decide(key, outer)
                    self._containers[outer] = None if state is None or decided is False else state or bool(decided)
                state = self._containers[outer]
            self._containers[path] = state
        return self._containers[path]


#: The path of the texts that are stored with the tensors; ``__metadata__.NAME`` is one of them.
TEXTS: Final = "__metadata__"


def text_names(checkpoint: Checkpoint, path: str) -> list[str] | None:
    """Return the names of the texts stored with the tensors that a path means; None if it means something else.

    ``__metadata__`` means all of them, and ``__metadata__.NAME`` one that need not exist. NAME alone means an existing
    one, unless a tensor has that name.
    """
    texts, target = checkpoint.metadata, checkpoint.target
    if not checkpoint.container.holds_texts or (target is not None and not target.metadata):
        return None
    if path == TEXTS:
        return list(texts)
    if path.startswith(f"{TEXTS}."):
        return [path[len(TEXTS) + 1 :]]
    if path.startswith(f"{TEXTS}["):
        last = parse_steps(path)[-1].value
        return [last] if isinstance(last, str) else None
    return [path] if path in texts and all(entry.key != path for entry in checkpoint.survey.tensors) else None


def normal_path(key: str) -> str:
    """Return the path as the survey spells it; "" and "." are the root."""
    path = ""
    for step in parse_steps("" if key == "." else key):
        path = joined(path, step.step)
    return path


#: Maximum number of readings tried for one text. Each key with dots adds one, and a hostile file has many.
_READINGS: Final = 10_000
#: Maximum number of places in one container to compare with a path that leads nowhere.
_SHOWN: Final = 10_000


def lookup(checkpoint: Checkpoint, text: str) -> Located:
    """Return the node that ``text`` leads to.

    A path as ``inspect`` prints it comes first: ``state_dict["conv1.weight"]``. If nothing is there, keys with dots may
    be unquoted: ``state_dict.conv1.weight``. Raise TargetError, with similar paths, if nothing is found, and if the
    text can be read in two ways.
    """
    graph = checkpoint.graph
    if text in ("", "."):
        return Located(graph.root, "")
    with suppress(TargetError):
        exact = follow(graph, parse_steps(text))
        if exact is not None:
            return exact
    matches: dict[Ref, str] = {}
    deepest = Located(graph.root, "")
    for reading in _readings(graph, text):
        if _plain(reading.path) == text:
            matches.setdefault(reading.ref, reading.path)
        if len(reading.path) > len(deepest.path):
            deepest = reading
    if len(matches) == 1:
        ((ref, path),) = matches.items()
        return Located(ref, path)
    if matches:
        spelled = list(matches.values())
        message = f"{text!r} can be read as {join_limited(spelled, most=4)}"
        raise TargetError(message, path=checkpoint.path, next=f"name one: {quote(spelled[0])}")
    raise _nothing(checkpoint, text, deepest)


def _readings(graph: Graph, text: str) -> Iterator[Located]:
    """Yield every node that a text, or its beginning, leads to if keys with dots are unquoted."""
    work = [Located(graph.root, "")]
    for _ in range(_READINGS):
        if not work:
            return
        here = work.pop()
        yield here
        base = bounded(here.path, here.ref)
        places = (Located(child.ref, joined(base, child.step)) for child in children(graph, here.ref))
        work += [place for place in places if within(text, _plain(place.path))]


def _nothing(checkpoint: Checkpoint, text: str, deepest: Located) -> TargetError:
    """Return the error for a path that leads nowhere, with similar paths."""
    from ..base.nearest import nearest

    survey, graph = checkpoint.survey, checkpoint.graph
    same = [entry.path for entry in survey.tensors if entry.key == text or entry.path.endswith(f".{text}")]
    near = same[:3]
    if not near:
        inside = [joined(deepest.path, child.step) for child in islice(children(graph, deepest.ref), _SHOWN)]
        places = [*(entry.path for entry in survey.entries), *(entry.path for entry in survey.tensors)]
        everything = {_plain(path): path for path in (*inside, *places)}
        near = [everything[name] for name in nearest(_plain(text), everything)]
    reached = f"; {deepest.path!r} is there" if deepest.path and not near else ""
    meant = f"; is it {' or '.join(map(repr, near))}?" if near else ""
    storages = (entry.tensor.storage for entry in survey.tensors if entry.path in near[:1] and entry.tensor.storage)
    shown = near and all(checkpoint.stored_size(storage) is not None for storage in storages)
    step = command("get", checkpoint.path, near[0]) if shown else tree_step(checkpoint.path)
    return TargetError(f"there is nothing at {text!r}{reached}{meant}", path=checkpoint.path, next=step)


def _plain(path: str) -> str:
    """Return a path without brackets and quotes, as a user would type it."""
    return path.replace('["', ".").replace('"]', "").lstrip(".")


def dotted(globs: Globs, *checkpoints: Checkpoint) -> Globs:
    """Return the selection where ``model.fc.*`` also means ``model["fc.*"]``, unless keys begin with ``model.``."""
    include, exclude = (
        [each for text in texts for each in _undotted(text, checkpoints)] for texts in (globs.include, globs.exclude)
    )
    return globs if (*include, *exclude) == globs.include + globs.exclude else Globs(include, exclude)


def _undotted(pattern: str, checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Return a dotted pattern, as a path that matches, or both: only keys without a dot have a dotted path."""
    paths = (item.path for checkpoint in checkpoints for item in checkpoint.state_dicts)
    base = max((path for path in paths if path and pattern.startswith(f"{path}.")), key=len, default="")
    rest = pattern[len(base) + 1 :]
    if not base or not rest or '"' in rest:
        return [pattern]
    surveys = [checkpoint.survey for checkpoint in checkpoints]
    names = [(entry.key, entry.path) for survey in surveys for entry in survey.tensors]
    names += [(entry.key, entry.path) for survey in surveys for entry in survey.entries]
    typed, meant = Glob(pattern), Glob(f'{base}["{rest}"]')
    if any(typed.matches(key) for key, _ in names) or not any(meant.matches(*name) for name in names):
        return [pattern]
    return [pattern, meant.pattern] if any(typed.matches(*name) for name in names) else [meant.pattern]


def select_entries(
    checkpoint: Checkpoint, key: str | None = None, everything: bool = False, globs: Globs = Globs(), sort: str = "file"
) -> list[TensorEntry]:
    """Return the tensors in the state dicts found with high confidence, or in the one at ``key``.

    ``everything`` returns all tensors in the file, or all below the path ``key``. Without any state dict, all are
    returned. ``sort`` is "file", "name" or "bytes" (largest first). Raise TargetError if nothing is at ``key``.
    """
    entries = candidates(checkpoint, key, everything)
    if globs:
        globs = dotted(globs, checkpoint)
        entries = [entry for entry in entries if globs.match(entry.key, entry.path)]
    if sort == "name":
        return sorted(entries, key=lambda entry: entry.path if everything else entry.key)
    if sort == "bytes":
        return sorted(entries, key=lambda entry: -entry.tensor.own_bytes)
    return entries


def candidates(checkpoint: Checkpoint, key: str | None, everything: bool) -> list[TensorEntry]:
    """Return the tensors among which the patterns of ``select_entries`` choose."""
    survey = checkpoint.survey
    if everything and key is not None:
        top = lookup(checkpoint, key)
        inside = survey.inside(top.ref)
        below = [entry for entry in survey.tensors if entry.holder in inside or entry.ref == top.ref]
        if not below:
            step = command("keys", checkpoint.path, all=True)
            raise TargetError(f"no tensor below {key!r}", path=checkpoint.path, next=step)
        return below
    chosen = [] if everything else selected(checkpoint, key)
    return survey.tensors_in([item.path for item in chosen]) if chosen else survey.tensors
