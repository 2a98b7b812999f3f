"""The verdict on what loading a file may do: one word, and the reasons for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ..base.errors import UnreadableError, of_file
from ..base.findings import PROGRAM
from ..base.limits import LIMITS
from ..base.records import NamedTuple
from ..base.text import join_limited, words
from ..checkpoint.container import FoundPickle
from ..pickles.nodes import Call, Extension, Global, Graph, Persistent
from .calls import suspicious_calls
from .held_configuration import held_findings
from .rules import UNKNOWN, UNSAFE, VERDICTS, WEIGHTS_ONLY
from .torch_lists import list_of
from .weights_only import ALLOWED, EXTENSION, NOT_A_STORAGE, NamedGlobal, broken_rules, exploits, named_globals

#: All names that a pickle can use from this module; another name there is a flipped bit.
_COLLECTIONS: Final = words("OrderedDict Counter defaultdict deque ChainMap UserDict UserList UserString namedtuple")


def is_name(item: NamedGlobal) -> bool:
    """Return whether such a name can exist in Python, unlike ``LongStor!ge``, or ``OrderedDigt`` in ``collections``."""
    if item.module == EXTENSION:
        return True
    words = (*item.module.split("."), *item.name.split("."))
    # Nested functions have <locals> in their qualified name.
    if not all(word.isidentifier() or word in ("<locals>", "<lambda>") for word in words):
        return False
    return item.module != "collections" or item.name in _COLLECTIONS


#: Maximum number of globals named in one reason.
_NAMED: Final = 3


class ExaminedPickle(NamedTuple):
    """A pickle in a file: what loading it names, calls and breaks, without its graph.

    The first six fields are as in ``FoundPickle``. ``protocol`` is 2 if the pickle cannot be followed. ``oddities`` are
    the decoder's remarks, as (offset in bytes, text). ``calls`` are the suspicious calls as a reader would write them.
    ``rules`` are the structural rules of weights_only that it breaks, and the flaws of old weights_only versions that
    it uses.
    """

    where: str
    error: str = ""
    rest: int = 0
    unchecked: bool = False
    program: str = ""
    note: str = ""
    protocol: int = 2
    oddities: Sequence[tuple[int, str]] = ()
    names: tuple[NamedGlobal, ...] = ()
    calls: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()

    def described(self, text: str) -> str:
        """Return a text about this pickle, with its place."""
        return f"{self.where}: {text}" if self.where else text

    def in_file(self, name: str) -> ExaminedPickle:
        """Return the same pickle, located in this file in a folder."""
        where = self._replace(where=name).described(self.where) if self.where else name
        return self._replace(where=where, names=tuple(item._replace(pickle=where) for item in self.names))


def examine_all(pickles: Iterable[FoundPickle], torch: str) -> list[ExaminedPickle]:
    """Examine every pickle in a search. If an error ends the search, the last result is unchecked and has the error.

    Raises the error if a server failed.
    """
    found: list[ExaminedPickle] = []
    try:
        found.extend(examine(pickles, torch))
    except UnreadableError as error:
        found.append(ExaminedPickle("the rest of the file", of_file(error).what, unchecked=True))
    return found


def examine(pickles: Iterable[FoundPickle], torch: str, own: tuple[str, ...] = ()) -> Iterator[ExaminedPickle]:
    """Examine the pickles one at a time, because a file may hold many, and their graphs take memory.

    ``own`` are beginnings of names that refer to something in the file itself; such names are left out.
    """
    for where, graph, error, rest, unchecked, program, note in pickles:
        pickle = ExaminedPickle(where, error, rest, unchecked, program, note)
        yield pickle if graph is None else _examined(pickle, graph, torch, own)


def _examined(pickle: ExaminedPickle, graph: Graph, torch: str, own: tuple[str, ...]) -> ExaminedPickle:
    words: dict[str, list[str]] = {PROGRAM: [], UNKNOWN: []}
    for finding in held_findings(graph):
        words[finding.verdict].append(finding.text)
    programs, notes = ("; ".join(texts[:_NAMED]) for texts in words.values())
    pickle = pickle._replace(program=pickle.program or programs, note=pickle.note or notes)
    pickle = pickle._replace(protocol=graph.style.protocol, oddities=graph.oddities)
    if not graph.has(Global, Extension, Call, Persistent):  # such a pickle makes only numbers and strings
        return pickle
    names = tuple(item for item in named_globals(graph, pickle.where, torch) if not item.mapped.startswith(own))
    calls, rules = tuple(suspicious_calls(graph)), (*broken_rules(graph, torch), *exploits(graph, torch))
    return pickle._replace(names=names, calls=calls, rules=rules)


class Verdict(NamedTuple):
    """One of VERDICTS, with the reasons; WEIGHTS_ONLY needs none."""

    word: str
    reasons: tuple[str, ...] = ()


def verdict_of(
    pickles: Sequence[ExaminedPickle], torch: str, *, program: str = "", unclear: Iterable[str] = ()
) -> Verdict:
    """Return the verdict on a file with these ``pickles``.

    ``program`` is the kind of program if the file is one, otherwise "". ``unclear`` are further reasons for UNKNOWN.
    """
    calls = [f"{call} when unpickled" for pickle in pickles for call in pickle.calls]
    if calls:
        return Verdict(UNSAFE, tuple(dict.fromkeys(calls[: LIMITS.listed])))
    programs = [program] if program else [pickle.described(pickle.program) for pickle in pickles if pickle.program]
    if programs:
        return Verdict(PROGRAM, tuple(dict.fromkeys(programs))[: LIMITS.listed])
    names = (item for pickle in pickles for item in pickle.names)
    outside = list(dict.fromkeys(item.mapped for item in names if item.word != ALLOWED))
    reasons = [f"not on {list_of(torch, outside)}: {join_limited(outside, most=_NAMED)}"] if outside else []
    reasons += unclear
    for pickle in pickles:
        reasons += [pickle.described(text) for text in (pickle.note, pickle.error) if text]
        if not pickle.error:
            reasons += [rule for rule in pickle.rules if rule != NOT_A_STORAGE]
    reasons = list(dict.fromkeys(reasons))[: LIMITS.listed]
    return Verdict(UNKNOWN, tuple(reasons)) if reasons else Verdict(WEIGHTS_ONLY)


def worst_verdict(words: Iterable[str]) -> str:
    """Return the worst of the verdicts; WEIGHTS_ONLY if there are none."""
    return min(words, key=VERDICTS.index, default=WEIGHTS_ONLY)
