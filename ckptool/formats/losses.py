"""What a format cannot hold of a checkpoint, as data: found before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

from ..base.errors import Again, RefusedError
from ..base.text import argument, join_limited, suggested_output
from ..checkpoint.checkpoint import Checkpoint, Target
from ..checkpoint.survey import StateDict

#: Every kind of loss, and what it means.
KINDS: Final = {
    "entries": "what is no tensor of the state dict",
    "keys": "entries under keys that have no name: tuples, bytes, objects",
    "containers": "dicts that are empty, and keys that are no texts",
    "shards": "that tensors are what one rank had of larger ones (DTensor, ShardedTensor)",
    "strides": "the order of the elements of tensors that are not contiguous",
    "sharing": "that tensors share memory",
    "dtypes": "tensors of dtypes that the format lacks",
    "layouts": "tensors of layouts that the format lacks, such as nested or meta",
    "attributes": "the classes of tensors, and attributes that were set on them",
    "requires-grad": "that tensors require gradients, or are Parameters",
    "devices": "the devices that tensors were on",
}


#: Losses that another option is about.
_WAYS: Final[Mapping[str, tuple[str, str]]] = {"sharing": ("--tied", "keep-first")}
#: What there is instead of an option.
_INSTEAD: Final = {"sharing": "--tied clone copies them"}


class Loss(NamedTuple):
    """Something that would not be in the output: its kind, and where (paths or names)."""

    kind: str
    where: tuple[str, ...]

    @property
    def words(self) -> str:
        """The loss in words."""
        return f"{KINDS[self.kind]}: {join_limited([place or '(the whole file)' for place in self.where], most=3)}"


def refuse(
    losses: Sequence[Loss],
    allowed: Collection[str],
    path: str,
    target: str,
    ways: Mapping[str, tuple[str, str]] = _WAYS,
) -> None:
    """Raise RefusedError unless every loss is of an allowed kind; the error names all that are not.

    ``ways`` are the options that take the place of an allowance, by kinds of losses.
    """
    left = [loss for loss in losses if loss.kind not in allowed and "all" not in allowed]
    if left:
        what = f"{target} cannot hold " + "; nor ".join(loss.words for loss in left)
        options = tuple(ways.get(loss.kind, ("--allow-loss", loss.kind)) for loss in left)
        instead = [text for kind, text in _INSTEAD.items() if ways and any(loss.kind == kind for loss in left)]
        may = f"if that may be lost{''.join(f' ({text})' for text in instead)}: "
        step = " ".join(f"{name} {value}" for name, value in options)
        raise RefusedError(what, path=path, next=may + step, again=Again(options, may + "{}"))


def refuse_edited(checkpoint: Checkpoint, losses: Callable[[], list[Loss]], output: str) -> None:
    """Raise RefusedError for what the format of the file cannot hold after an edit; ``convert`` has asked before."""
    found = losses() if checkpoint.target is None else []
    if found:
        raise RefusedError(f"{output} cannot hold {found[0].words}", path=checkpoint.path, next=_way_out(checkpoint))


def whole_state_dict(checkpoint: Checkpoint, target: Target, output: str) -> StateDict:
    """Return the state dict that goes into an output of one alone; raise RefusedError where there is none."""
    found = state_dict_of(checkpoint, target)
    if found is None:
        what = f"{output} holds tensors by their names and nothing else"
        raise RefusedError(what, path=checkpoint.path, next=_way_out(checkpoint))
    return found


def state_dict_of(checkpoint: Checkpoint, target: Target) -> StateDict | None:
    """Return the state dict that goes into an output of one alone."""
    return next((item for item in checkpoint.state_dicts if item.path == target.key), None)


def _way_out(checkpoint: Checkpoint) -> str:
    path, output = checkpoint.path, suggested_output(checkpoint.path, extension=".pth")
    return f"make a torch file of it first: ckptool convert {argument(path)} -o {argument(output)}"
