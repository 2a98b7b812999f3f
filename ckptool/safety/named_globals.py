"""Every global that a pickle names, marked as allowed, not on torch's list, or called when loaded."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Final, NamedTuple

from ..base.text import words
from ..checkpoint.objects import mapped_name
from ..pickles.nodes import Call, Extension, Global, Graph, Node, Ref
from .torch_lists import allowed, registered

ALLOWED: Final = "allowed"
NOT_LISTED: Final = "not on torch's list"
CALLED: Final = "called when loaded"
_EXTENSION: Final = "copyreg extension"
#: All names that a pickle can use from this module; another name there is a flipped bit.
_COLLECTIONS: Final = words("OrderedDict Counter defaultdict deque ChainMap UserDict UserList UserString namedtuple")


class NamedGlobal(NamedTuple):
    """A global as one pickle names it.

    ``module`` and ``name`` are spelled as in the pickle. ``mapped`` is ``module.name`` as Python 3 resolves it.
    ``word`` is one of the constants above; only a global that is not on torch's list is CALLED. ``times`` counts how
    often it is named. ``pickle`` is the place of the pickle.
    """

    module: str
    name: str
    mapped: str
    word: str
    times: int
    pickle: str


def named_globals(graph: Graph, where: str, torch: str) -> Iterator[NamedGlobal]:
    """Yield the globals of a pickle, each once, in the order of first use."""
    named: list[tuple[Ref, Global | Extension]] = [*graph.of_type(Global), *graph.of_type(Extension)]
    listed = allowed(torch) | registered(torch)
    times: dict[tuple[str, str], int] = {}
    called: set[tuple[str, str] | None] = set()
    for _, node in sorted(named, key=itemgetter(0)):
        spelling = _spelling(node)
        assert spelling is not None
        times[spelling] = times.get(spelling, 0) + 1
        if node.filling is not None:
            called.add(spelling)
    called.update(_spelling(graph.nodes[func]) for func in {node.func for _, node in graph.of_type(Call)})
    for spelling, count in times.items():
        mapped = mapped_name(Global(*spelling))
        word = ALLOWED if mapped in listed else CALLED if spelling in called else NOT_LISTED
        yield NamedGlobal(*spelling, mapped, word, count, where)


def _spelling(node: Node) -> tuple[str, str] | None:
    """Return the module and name of a global as spelled in the pickle, or None for other nodes."""
    if type(node) is Global:
        return (node.module, node.name)
    return (_EXTENSION, str(node.code)) if type(node) is Extension else None


def is_name(item: NamedGlobal) -> bool:
    """Return whether such a name can exist in Python, unlike ``LongStor!ge``, or ``OrderedDigt`` in ``collections``."""
    if item.module == _EXTENSION:
        return True
    words = (*item.module.split("."), *item.name.split("."))
    # Nested functions have <locals> in their qualified name.
    if not all(word.isidentifier() or word in ("<locals>", "<lambda>") for word in words):
        return False
    return item.module != "collections" or item.name in _COLLECTIONS
