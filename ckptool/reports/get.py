"""Read the value at a path as Python values, and show a checkpoint as a mapping."""

from __future__ import annotations

from typing import Any

from ..checkpoint.checkpoint import Checkpoint
from ..edits.lookup import Located, lookup
from ..edits.sanitize.numpy_values import with_plain_numpy
from ..formats.opening import CheckpointOrPath, as_checkpoint
from ..values import objects


def find_value(checkpoint: Checkpoint, key: str) -> tuple[Checkpoint, Located]:
    """Return the checkpoint with NumPy's values made plain, and the place in it that ``key`` leads to.

    Raise UnreadableError if the pickle uses a feature that ckptool does not support, TargetError if nothing is at
    ``key``.
    """
    checkpoint = with_plain_numpy(checkpoint)
    _ = checkpoint.survey  # raises UnreadableError for unsupported features
    return checkpoint, lookup(checkpoint, key)


def contents(checkpoint: Checkpoint) -> objects.MappingView:
    """Return the mapping view of a checkpoint, with NumPy's values made plain.

    Raise UnreadableError as ``find_value`` does.
    """
    checkpoint = with_plain_numpy(checkpoint)
    _ = checkpoint.survey
    return objects.contents(checkpoint)


def get(path: CheckpointOrPath, key: str = "") -> Any:
    """Return the value at ``key``, a path as ``inspect`` prints it ("" or "." for the whole file), as Python values.

    Scalars, bytes, dicts, lists, tuples and sets become Python's own. A tensor becomes a ``TensorValue``, which reads
    its numbers from the file on demand; an object of another class becomes an ``ObjectValue`` with its attributes.
    Nothing is executed, and neither torch nor NumPy is needed. Raise TargetError if nothing is at ``key``.

    >>> ckptool.get("training.pth", "epoch")
    41
    >>> ckptool.get("training.pth", "optimizer.param_groups[0].lr")
    0.001
    >>> ckptool.get("training.pth", "state_dict.module.head.bias")
    <TensorValue 'state_dict["module.head.bias"]' float32 5 cuda:0>
    """
    # Tensors read from the file later. It is closed when the last of them is gone.
    checkpoint, place = find_value(as_checkpoint(path), key)
    return objects.value_of(checkpoint, place.ref, place.path)
