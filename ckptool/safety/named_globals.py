"""Every global that a pickle names, as one of: allowed, not on torch's list, called when loaded."""

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
#: Everything that a pickle can name in this module; any other name there is a flipped bit.
_COLLECTIONS: Final = words("OrderedDict Counter defaultdict deque ChainMap UserDict UserList UserString namedtuple")


class NamedGlobal(NamedTuple):
    """A global as one pickle names it.

    ``module`` and ``name`` as they are spelled there; ``mapped`` is ``module.name`` as Python 3 resolves it; ``word``
    is one of the constants above, CALLED only for those that are not on torch's list; ``times`` counts how often it is
    named; ``pickle`` says where.
    """

    module: str
    name: str
    mapped: str
    word: str
    times: int
    pickle: str


def named_globals(graph: Graph, where: str, torch: str) -> Iterator[NamedGlobal]:
    """Yield the globals of a pickle, each once, in the order of their first use."""
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
    """Return the module and name of a global as the pickle spells them, None for anything else."""
    if type(node) is Global:
        return (node.module, node.name)
    return (_EXTENSION, str(node.code)) if type(node) is Extension else None


def is_name(item: NamedGlobal) -> bool:
    """Return whether such a name can exist in Python: not ``LongStor!ge``, nor ``OrderedDigt`` in ``collections``."""
    if item.module == _EXTENSION:
        return True
    words = (*item.module.split("."), *item.name.split("."))
    # Functions within functions have <locals> in their qualified name.
    if not all(word.isidentifier() or word in ("<locals>", "<lambda>") for word in words):
        return False
    return item.module != "collections" or item.name in _COLLECTIONS
