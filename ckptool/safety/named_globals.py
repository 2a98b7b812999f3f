"""Every global that any pickle of a file names, in three words: allowed, not on torch's list, called when loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from ..checkpoint.container import FoundPickle
from ..checkpoint.objects import mapped_name
from ..pickles.nodes import Call, Extension, Global, Graph, Instance, Node
from .calls import suspicious_calls
from .torch_lists import allowed, registered

ALLOWED: Final = "allowed"
NOT_LISTED: Final = "not on torch's list"
CALLED: Final = "called when loaded"


class NamedGlobal(NamedTuple):
    """A global as one pickle names it.

    ``module`` and ``name`` as they are spelled there; ``mapped`` is ``module.name`` as Python 3 resolves it;
    ``word`` is one of the three words: "called when loaded" is for those that are not on torch's list only;
    ``times`` how often it is named; ``pickle`` where.
    """

    module: str
    name: str
    mapped: str
    word: str
    times: int
    pickle: str


def named_globals(pickles: Iterable[FoundPickle], torch: str) -> list[NamedGlobal]:
    """The globals of all pickles, each once a pickle, in the order of the file."""
    listed = allowed(torch) | registered(torch)
    found = []
    for pickle in pickles:
        if pickle.graph is not None:
            found += _of(pickle.graph, pickle.where, listed)
    return found


def _of(graph: Graph, where: str, listed: frozenset[str]) -> list[NamedGlobal]:
    times: dict[tuple[str, str], int] = {}
    called: set[tuple[str, str]] = set()
    for node in graph.nodes:
        pair = _pair(node)
        if pair is not None:
            times[pair] = times.get(pair, 0) + 1
            if isinstance(node, Instance) and node.filling is not None:
                called.add(pair)
        elif type(node) is Call:
            func = _pair(graph.nodes[node.func])
            if func is not None:
                called.add(func)
    found = []
    for pair, count in times.items():
        mapped = mapped_name(Global(*pair))
        word = ALLOWED if mapped in listed else CALLED if pair in called else NOT_LISTED
        found.append(NamedGlobal(*pair, mapped, word, count, where))
    return found


#: All that a pickle can name in this module; anything else there is a flipped bit.
_COLLECTIONS: Final = frozenset(
    ("OrderedDict", "Counter", "defaultdict", "deque", "ChainMap", "UserDict", "UserList", "UserString", "namedtuple")
)


def is_name(item: NamedGlobal) -> bool:
    """Could it be a name? ``LongStor!ge`` is none, and ``collections`` has no ``OrderedDigt``."""
    if item.module == "copyreg extension":
        return True
    words = (*item.module.split("."), *item.name.split("."))
    # Functions within functions have <locals> in their qualified name.
    if not all(word.isidentifier() or word == "<locals>" or word == "<lambda>" for word in words):
        return False
    return item.module != "collections" or item.name in _COLLECTIONS


def _pair(node: Node) -> tuple[str, str] | None:
    """Module and name, as the pickle spells them."""
    if type(node) is Global:
        return (node.module, node.name)
    return ("copyreg extension", str(node.code)) if type(node) is Extension else None


def dangerous_calls(pickles: Iterable[FoundPickle]) -> list[tuple[str, str]]:
    """Calls that have no business in a checkpoint, as (the pickle, the call as a reader would write it)."""
    return [
        (pickle.where, call)
        for pickle in pickles
        if pickle.graph is not None
        for call in suspicious_calls(pickle.graph)
    ]
