"""From checkpoints to checkpoints: the edits that need more than a graph, with what they need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from ..base.errors import TargetError
from ..base.globs import MATCH_ALL, Globs
from ..checkpoint.checkpoint import Checkpoint

if TYPE_CHECKING:
    from ..edits.redact import Kind


def sanitize(
    checkpoint: Checkpoint, *, as_state_dict: bool = False, drop_unknown: bool = False, local_parts: bool = False
) -> Checkpoint:
    """Make everything plain that ``torch.load(path)`` of torch 2.6 and later does not load by default.

    Objects become dicts of their attributes, numpy scalars numbers, numpy arrays tensors, paths strings, and so on;
    ``as_state_dict`` turns pickled modules into their state dicts. Nothing is run. Raises RefusedError for what
    cannot be carried, which ``drop_unknown`` leaves out instead. ``local_parts`` puts plain tensors in the place of
    those that are spread over ranks (DTensor, ShardedTensor): the parts of them that are in the file.
    """
    from ..edits.sanitize.sanitizer import sanitize as sanitized

    return sanitized(checkpoint, as_state_dict=as_state_dict, drop_unknown=drop_unknown, local_parts=local_parts)


def rename(
    checkpoint: Checkpoint,
    table: Mapping[str, str] | None = None,
    *,
    glob: tuple[str, str] | None = None,
    regex: tuple[str, str] | None = None,
    like: Checkpoint | None = None,
    by_order: bool = False,
    key: str | None = None,
    only: Globs = MATCH_ALL,
) -> Checkpoint:
    """Rename keys of state dicts, in exactly one way: by a table of names, by ``glob`` (old, new), by ``regex``
    (expression, replacement), or after the state dict of the checkpoint ``like``, by name or ``by_order``.

    ``_metadata`` and the names of parameters in optimizers follow. Raises RefusedError where nothing matches or two
    keys would become one, TargetError for patterns that make no sense.
    """
    from ..edits import keys as renaming

    if sum(way is not None for way in (table, glob, regex, like)) != 1:
        raise TargetError("one way to rename is needed", next="table, glob=, regex= or like=")
    if glob is not None:
        return renaming.by_glob(checkpoint, *glob, key=key, only=only)
    if regex is not None:
        return renaming.by_regex(checkpoint, *regex, key=key, only=only)
    if like is not None:
        from ..edits.like.targets import rename_like, target_in_checkpoint

        shapes = target_in_checkpoint(like, preferred=key).shapes
        return rename_like(checkpoint, shapes, like.path, by_order=by_order, key=key, only=only)
    return renaming.by_table(checkpoint, table or {}, key=key, only=only)


def slim(
    checkpoint: Checkpoint,
    *,
    dedupe: bool = False,
    purpose: Literal["inference"] | None = None,
    only: Globs = MATCH_ALL,
) -> Checkpoint:
    """Leave out the bytes that no tensor reads; ``purpose`` "inference" drops optimizers, schedulers and EMA first,
    ``dedupe`` makes storages with the same bytes one. See ``ckptool.edits.slim``."""
    from ..edits.slim import slim as slimmed

    return slimmed(checkpoint, dedupe=dedupe, purpose=purpose, only=only)


def cast(
    checkpoint: Checkpoint,
    dtype: str,
    *,
    key: str | None = None,
    only: Globs = MATCH_ALL,
    strict: bool = False,
    everything: bool = False,
) -> Checkpoint:
    """Give floating tensors another dtype, as ``Tensor.to`` does; the values are computed while ``save`` writes.

    The states of optimizers stay, but with ``everything``. With patterns to include in ``only`` just what matches is
    cast, whatever its dtype. Tensors that share a storage go on sharing it. ``strict`` lets ``save`` raise RefusedError
    where a finite value would become infinite or NaN.
    """
    from ..edits.cast import cast as casted
    from ..values.torch.compute import cast_elements

    return casted(checkpoint, dtype, cast_elements, key=key, only=only, strict=strict, everything=everything)


def merge(
    checkpoint: Checkpoint,
    other: Checkpoint,
    *,
    entries: Sequence[tuple[str, str]] = (),
    key: str | None = None,
    other_key: str | None = None,
    only: Globs = MATCH_ALL,
    add: bool = True,
) -> Checkpoint:
    """Take tensors of another checkpoint's state dict into this one, or with ``entries`` whole entries (path there,
    path here). ``other`` must stay open until the result is saved. See ``ckptool.edits.merge``."""
    from ..edits import merge as merging

    if entries:
        return merging.merge_entries(checkpoint, other, entries)
    return merging.merge(checkpoint, other, key=key, other_key=other_key, only=only, add=add)


def average(
    checkpoints: Sequence[Checkpoint],
    *,
    weights: Sequence[float] | None = None,
    dtype: Literal["float64", "float32"] = "float64",
    key: str | None = None,
    only: Globs = MATCH_ALL,
) -> Checkpoint:
    """The first checkpoint with the mean of all in place of its floating tensors; computed while ``save`` writes.

    All of them must stay open until then. Raises RefusedError where they do not go together.
    """
    from ..edits.average import average as averaged
    from ..values.torch.compute import mean_elements
    from ..values.torch.loads import need_torch

    need_torch("averaging values", checkpoints[0].path if checkpoints else "")
    return averaged(checkpoints, mean_elements, weights=weights, dtype=dtype, key=key, only=only)


def redact(
    checkpoint: Checkpoint,
    kinds: Kind | Sequence[Kind] = ("paths", "users", "sources", "args"),
    *,
    only: Globs = MATCH_ALL,
) -> Checkpoint:
    """Take out what a published file should not tell. See ``ckptool.edits.redact``."""
    from ..edits.redact import redact as redacted

    # One text is one kind, not one for each of its letters.
    return redacted(checkpoint, [kinds] if isinstance(kinds, str) else kinds, only=only)


def edit(checkpoint: Checkpoint, steps: Iterable[tuple[str, str | bool]]) -> Checkpoint:
    """Several edits in the order given, as ``ckptool edit`` has them: ``[("extract", "state_dict"), ("to", "cpu")]``.

    Raises TargetError for a step that does not exist, and what the edits raise.
    """
    from ..edits.pipeline import edit as edited

    return edited(checkpoint, steps)
