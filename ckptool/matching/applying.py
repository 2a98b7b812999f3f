"""The steps of a fix, done to a checkpoint. The only place that knows how a step becomes an edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote

from ..checkpoint import Checkpoint
from ..edits import add_prefix, strip_prefix, strip_wrappers
from ..edits.entries import drop, extract, wrap
from ..edits.rename import by_glob, by_regex, by_table, parse_glob, parse_regex
from ..errors import RefusedError, TargetError
from ..human import listed
from ..names import EVERY, Globs
from .comparison import Shape
from .pairing import in_order, paired
from .steps import Step
from .wanted import chosen_of, names_of

__all__ = ["apply", "named_like"]


def apply(
    checkpoint: Checkpoint, steps: Sequence[Step], wanted: Mapping[str, Shape], *, key: str | None = None
) -> Checkpoint:
    """The checkpoint after the steps, in order; ``key`` is the state dict whose names they change.

    ``wanted`` are the names and shapes that "like" and "by-order" take. Raises what the edits raise: RefusedError where
    two keys would become one.
    """
    for step in steps:
        if step.option == "extract":
            # What was at ``key`` is now the whole.
            checkpoint, key = extract(checkpoint, step.value), None
        elif step.option == "wrap":
            checkpoint = wrap(checkpoint, step.value)
        elif step.option == "drop":
            checkpoint = drop(checkpoint, [step.value], key=key)
        elif step.option in ("strip-module", "strip-prefix"):
            checkpoint = strip_prefix(checkpoint, step.value or "module.", key=key)
        elif step.option == "wrappers":
            checkpoint = strip_wrappers(checkpoint, key=key)
        elif step.option == "add-prefix":
            checkpoint = add_prefix(checkpoint, step.value, key=key)
        elif step.option == "rename":
            checkpoint = by_glob(checkpoint, *parse_glob(step.value), key=key)
        elif step.option == "rename-regex":
            pattern, new, count = parse_regex(step.value)
            checkpoint = by_regex(checkpoint, pattern, new, count=count, key=key)
        else:
            by_order = step.option == "by-order"
            checkpoint = named_like(checkpoint, wanted, step.value, by_order=by_order, key=key)
    return checkpoint


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
    return by_table(checkpoint, table, key=key, only=only, told=f"renamed like {source}")
