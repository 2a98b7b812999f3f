"""Tensors at one go, when two pickles are compared: the nodes that ``phrase_reading`` makes of one, in one step.

They stand in a row, in both graphs: the persistent id, what it stands for, shape, strides, the call that makes the
hooks, the arguments and the call itself. ``twins`` finds the two rows alike in how they hold each other, or declines:
then the loop of ``difference`` goes on node by node, as it does for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from .nodes import Call, Node, Persistent, Ref

__all__ = ["BEHIND", "Outside", "Refs", "twins"]

Refs: TypeAlias = tuple[Ref, ...]
#: What decides whether two persistent ids mean the same: of the references in both, those that must be equal. Raises
#: ValueError with words where they do not.
Outside: TypeAlias = Callable[[Refs, Refs], tuple[Refs, Refs]]

_Phrase: TypeAlias = tuple[Refs, Refs, Refs, Refs]

#: Nodes of a phrase before its call.
BEHIND: Final = 6
_UNMET: Final = [-1] * BEHIND


def twins(
    ours: Sequence[Node],
    theirs: Sequence[Node],
    left: Ref,
    right: Ref,
    forward: list[Ref],
    backward: list[Ref],
    outside: Outside | None,
) -> tuple[Refs, Refs] | None:
    """Pair the nodes of two phrases, whose calls are ``left`` and ``right``, and return what is left to compare.

    ``forward`` and ``backward`` are the pairs that are known. None, and nothing is paired, for anything unusual.
    """
    before, behind = left - BEHIND, right - BEHIND
    if before < 0 or behind < 0 or forward[before:left] != _UNMET or backward[behind:right] != _UNMET:
        return None
    here, there = _phrase(ours, before, left), _phrase(theirs, behind, right)
    if here is None or there is None:
        return None
    own, lengths, steps, rest = here
    other, sizes, strides, others = there
    if outside is not None:
        try:
            own, other = outside(own, other)
        except ValueError:
            return None
    if len(own) != len(other) or len(lengths) != len(sizes) or len(steps) != len(strides):
        return None
    forward[before:left] = range(behind, right)
    backward[behind:right] = range(before, left)
    one, two = (*rest, *lengths, *steps), (*others, *sizes, *strides)
    # Nearly all of these were met before: the function, dimensions, the empty hooks.
    return (own, other) if (*map(forward.__getitem__, one),) == two else ((*own, *one), (*other, *two))


def _phrase(nodes: Sequence[Node], begin: Ref, end: Ref) -> _Phrase | None:
    """The references of a persistent id, of a shape, of strides, and of all else in a phrase; None for no phrase."""
    pid, outer, lengths, steps, hooks, args, call = nodes[begin : end + 1]
    if (
        type(pid) is tuple
        and type(outer) is Persistent
        and type(lengths) is tuple
        and type(steps) is tuple
        and type(hooks) is Call
        and type(args) is tuple
        and type(call) is Call
        and len(args) == BEHIND
        and outer.pid == begin
        and not outer.text
        and outer.filling is None is hooks.filling
        and hooks.kwargs < 0
        and call.args == begin + 5
    ):
        outside, offset, first, second, flag, last = args
        if outside == begin + 1 and first == begin + 2 and second == begin + 3 and last == begin + 4:
            # An empty tuple has no identity.
            return (
                (pid, lengths, steps, (hooks.func, hooks.args, offset, flag, call.func)) if lengths and steps else None
            )
    return None
