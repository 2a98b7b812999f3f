"""Giving a checkpoint the names of another."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote

from ...base.errors import RefusedError, TargetError
from ...base.globs import EVERY, Globs
from ...base.text import listed
from ...checkpoint.checkpoint import Checkpoint
from ..keys import by_table
from .comparison import Shape
from .pairing import in_order, paired
from .wanted import chosen_of, names_of


def named_like(
    checkpoint: Checkpoint,
    wanted: Mapping[str, Shape],
    source: str,
    *,
    by_order: bool = False,
    key: str | None = None,
    only: Globs = EVERY,
) -> Checkpoint:
    """The checkpoint with the names of ``wanted``: those that surely mean the same, or ``by_order`` one by one.

    ``source`` is where they come from, in words.
    Raises TargetError where there are several state dicts and no ``key``, RefusedError where no name has a sure
    partner, or by order the shapes do not agree.
    """
    chosen = chosen_of(checkpoint, key)
    if len(chosen) > 1:
        what = f"there are {len(chosen)} state dicts: {listed([repr(item.path or '.') for item in chosen])}"
        raise TargetError(what, path=checkpoint.path, next="name one with --key")
    names = names_of(checkpoint, chosen[0])
    have = {name: value.shape for name, value in names.items()}
    if by_order and None not in wanted.values():
        # Where only tensors are wanted, what is no tensor has no place in the order.
        have = {name: shape for name, shape in have.items() if shape is not None}
    try:
        table = in_order(have, wanted) if by_order else paired(have, wanted)
    except RefusedError as error:
        step = f"ckptool match {quote(checkpoint.path)} {quote(source)}"
        raise RefusedError(f"by order {error.what}", path=checkpoint.path, next=step) from error
    if not table:
        what = "no key has a partner that its name and shape tell"
        raise RefusedError(what, path=checkpoint.path, next="--by-order takes names one by one, where shapes agree")
    return by_table(checkpoint, table, key=key, only=only, label=f"renamed like {source}")
