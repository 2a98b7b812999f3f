"""Losses: the parts of a checkpoint that a format cannot hold, found before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from shlex import quote
from typing import Final, NamedTuple

from ..base.errors import Again, RefusedError
from ..base.steps import suggested_output
from ..base.text import join_limited, pluralize
from ..checkpoint.checkpoint import Checkpoint, Target
from ..checkpoint.survey import StateDict
from ..pickles.nodes import Persistent, Ref, children

#: A description of each kind of loss, for messages.
KINDS: Final = {
    "entries": "what is not of the state dict",
    "keys": "entries under keys that have no name: tuples, bytes, objects",
    "containers": "dicts that are empty, and keys that are not strings",
    "shards": "that tensors are the shards of one rank, or a part of a larger model",
    "strides": "the order of the elements of tensors that are not contiguous",
    "sharing": "that tensors share memory",
    "dtypes": "tensors of dtypes that the format lacks",
    "layouts": "tensors of layouts that the format lacks, such as nested or meta",
    "attributes": "the classes of tensors, and attributes that were set on them",
    "requires-grad": "that tensors require gradients, or are Parameters",
    "devices": "the devices that tensors were on",
}

#: Kinds of loss that are allowed by their own option instead of --allow-loss.
_WAYS: Final[Mapping[str, tuple[str, str]]] = {"sharing": ("--tied", "keep-first")}
#: Options that avoid a loss.
_INSTEAD: Final = {"sharing": "--tied clone copies them"}


class Loss(NamedTuple):
    """Content that the output would lack: its kind, and the paths or names that have it.

    ``drops``: tensors with values would be lost, so no option that allows the loss is suggested.
    """

    kind: str
    where: tuple[str, ...]
    drops: bool = False

    @property
    def words(self) -> str:
        """A description of the loss."""
        return f"{KINDS[self.kind]}: {join_limited([place or '(the whole file)' for place in self.where], most=3)}"


def storages_within(checkpoint: Checkpoint, ref: Ref) -> list[str]:
    """Return the nonempty storages within a value at any depth, each once and in order."""
    graph, reader = checkpoint.graph, checkpoint.survey.reader
    keys: dict[str, None] = {}  # a set would give messages a different order in each run
    seen, work = set[Ref](), [ref]
    while work:
        part = work.pop()
        if part in seen:
            continue
        seen.add(part)
        storage = reader.storage(part)
        if storage is not None and storage.nbytes:
            keys[storage.key] = None
        work += children(graph.nodes[part])
    return list(keys)


def refuse(
    losses: Sequence[Loss],
    allowed: Collection[str],
    path: str,
    target: str,
    ways: Mapping[str, tuple[str, str]] = _WAYS,
) -> None:
    """Raise RefusedError unless every loss is of an allowed kind; the error names all other losses.

    ``ways`` has the options that allow a kind of loss; ``--allow-loss`` allows any other kind.
    """
    left = [loss for loss in losses if loss.kind not in allowed and "all" not in allowed]
    what = f"{target} cannot hold " + "; nor ".join(loss.words for loss in left)
    if any(loss.drops for loss in left):
        step = "torch's usual format (.pth) holds them; for others save plain tensors with the library that made them"
        raise RefusedError(what, path=path, next=step)
    if left:
        options = tuple(ways.get(loss.kind, ("--allow-loss", loss.kind)) for loss in left)
        instead = [text for kind, text in _INSTEAD.items() if ways and any(loss.kind == kind for loss in left)]
        may = f"if that may be lost{''.join(f' ({text})' for text in instead)}: "
        step = " ".join(f"{name} {value}" for name, value in options)
        raise RefusedError(what, path=path, next=may + step, again=Again(options, may))


def refuse_emptied(checkpoint: Checkpoint, kept: int | None = None) -> None:
    """Raise RefusedError for an output without tensors from an input with tensors, unless the user named what to
    remove.

    ``kept`` is the number of tensors in the output, or None if the output has all tensors of the checkpoint.
    """
    graph = checkpoint.graph
    if (
        kept
        or checkpoint.by_name
        or (kept is None and any(type(graph.nodes[ref]) is Persistent for ref in graph.reachable()))
    ):
        return
    if kept is None and checkpoint.survey.tensors:
        return
    own = Checkpoint.of(checkpoint.path, checkpoint.source, checkpoint.container).tolerating()
    names = [entry.path for entry in own.survey.tensors]
    if names:
        what = f"the output would hold no tensor, and the input has {pluralize(len(names), 'tensor')}"
        step = "name the entries or keys that may go, without a pattern"
        raise RefusedError(f"{what}: {join_limited(names, most=3)}", path=checkpoint.path, next=step)


def refuse_edited(checkpoint: Checkpoint, losses: Callable[[], list[Loss]], output: str) -> None:
    """Raise RefusedError for edited content that the file's format cannot hold; ``convert`` has checked it before."""
    if checkpoint.target is None and (lost := losses()):
        raise _unfit(checkpoint, f"{output} cannot hold {lost[0].words}")


def whole_state_dict(checkpoint: Checkpoint, target: Target, output: str) -> StateDict:
    """Return the state dict for an output that holds nothing else; raise RefusedError if it does not exist."""
    for state_dict in checkpoint.state_dicts:
        if state_dict.path == target.key:
            return state_dict
    raise _unfit(checkpoint, f"{output} holds tensors by their names and nothing else")


def _unfit(checkpoint: Checkpoint, what: str) -> RefusedError:
    """Return the error for an edit whose result does not fit the file's format, with torch's format as the next
    step."""
    name = suggested_output(checkpoint.path, extension=".pth")
    return RefusedError(what, path=checkpoint.path, next=f"call it {quote(name)}", again=Again(suffix=".pth"))
