"""Look up a path that a user typed: as ``inspect`` prints it, or with unquoted keys that contain dots."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from typing import Final, NamedTuple

from ..base.errors import Again, TargetError
from ..base.prefixes import common_length
from ..base.steps import command, tree_step
from ..base.text import join_limited
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.objects import attributes, mapping
from ..checkpoint.paths import parse_steps, spell_key
from ..checkpoint.selection import Place, follow
from ..pickles.nodes import Call, Graph, Ref

#: Maximum number of names searched for similar ones. Names with the longest common beginning are preferred.
_NEAR: Final = 500
#: Maximum number of readings tried for one text. Each key with dots adds one, and a hostile file has many.
_READINGS: Final = 10_000


class Located(NamedTuple):
    """A node and its path, as ``inspect`` prints it."""

    ref: Ref
    path: str


def lookup(checkpoint: Checkpoint, text: str) -> Located:
    """Return the node that ``text`` leads to.

    A path as ``inspect`` prints it comes first: ``state_dict["conv1.weight"]``. If nothing is there, keys with dots may
    be unquoted: ``state_dict.conv1.weight``. Raise TargetError, with similar paths, if nothing is found, and if the
    text can be read in two ways.
    """
    graph = checkpoint.graph
    if text in ("", "."):
        return Located(graph.root, "")
    exact = _place(graph, text)
    if exact is not None:
        return Located(exact.ref, exact.path)
    matches: dict[Ref, str] = {}
    deepest = Located(graph.root, "")
    for reading, rest in _readings(graph, text):
        if rest == "":
            matches.setdefault(reading.ref, reading.path)
        if len(reading.path) > len(deepest.path):
            deepest = reading
    if len(matches) == 1:
        ((ref, path),) = matches.items()
        return Located(ref, path)
    if matches:
        spelled = list(matches.values())
        message = f"{text!r} can be read as {join_limited(spelled, most=4)}"
        raise TargetError(message, path=checkpoint.path, next=f"name one: {quote(spelled[0])}")
    raise _nothing(checkpoint, text, deepest)


def _place(graph: Graph, text: str, start: Ref = -1) -> Place | None:
    """Return the place at a path as ``inspect`` prints it, from ``start`` (-1 for the root), or None."""
    try:
        result = follow(graph, parse_steps(text), start)
    except TargetError:
        return None
    return result if isinstance(result, Place) else None


def _readings(graph: Graph, text: str) -> Iterator[tuple[Located, str]]:
    """Yield every node that the beginning of a text leads to, with the rest of the text."""
    work = [(Located(graph.root, ""), text)]
    seen: set[tuple[Ref, int]] = set()
    while work and len(seen) < _READINGS:
        here, rest = work.pop()
        if (here.ref, len(rest)) in seen:
            continue
        seen.add((here.ref, len(rest)))
        yield here, rest
        # Every name except the first has a dot before it.
        starts = (rest, rest[1:]) if rest.startswith(".") else (rest,) if not here.path else ()
        work += [
            (Located(ref, spell_key(here.path, name)), start[len(name) :])
            for name, ref in _named(graph, here.ref).items()
            for start in starts
            if start.startswith(name) and start[len(name) :][:1] in ("", ".", "[")
        ]
        if rest.startswith("["):
            step, bracket, after = rest.partition("]")
            there = _place(graph, step + bracket, here.ref)
            if there is not None:
                work.append((Located(there.ref, here.path + there.path), after))


def _named(graph: Graph, ref: Ref) -> dict[str, Ref]:
    """Return the entries of a mapping and the attributes of an object that have string names, the last of each name."""
    node = graph.nodes[ref]
    pairs = mapping(graph, ref) or []
    if isinstance(node, Call):
        pairs = attributes(graph, node) + pairs
    return {name: value for key, value in pairs if type(name := graph.nodes[key]) is str and name}


def _nothing(checkpoint: Checkpoint, text: str, deepest: Located) -> TargetError:
    """Return the error for a path that leads nowhere, with similar paths."""
    from difflib import get_close_matches
    from heapq import nlargest

    survey, graph = checkpoint.survey, checkpoint.graph
    same = [entry.path for entry in survey.tensors if entry.key == text or entry.path.endswith(f".{text}")]
    near = [_shortest(checkpoint, path) for path in same[:3]]
    if not near:
        wanted = _plain(text)
        inside = (spell_key(deepest.path, name) for name in _named(graph, deepest.ref))
        places = [*(entry.path for entry in survey.entries), *(entry.path for entry in survey.tensors)]
        everything = {_plain(path): path for path in (*inside, *places)}
        plain = {name: everything[name] for name in nlargest(_NEAR, everything, key=lambda n: common_length(n, wanted))}
        names = get_close_matches(wanted, plain, 1, 0.85) or get_close_matches(wanted, plain, 3, 0.6)
        near = [_shortest(checkpoint, plain[name]) for name in names]
    reached = f"; {deepest.path!r} is there" if deepest.path and not near else ""
    meant = f"; is it {' or '.join(map(repr, near))}?" if near else ""
    message = f"there is nothing at {text!r}{reached}{meant}"
    if not near:
        return TargetError(message, path=checkpoint.path, next=tree_step(checkpoint.path))
    step = command("get", checkpoint.path, near[0])
    return TargetError(message, path=checkpoint.path, next=step, again=Again(words=((text, near[0]),)))


def _shortest(checkpoint: Checkpoint, path: str) -> str:
    """Return the path without brackets and quotes, if it then leads to the same node; otherwise unchanged."""
    short = _plain(path)
    if "[" in short or '"' in short:
        return path
    exact = _place(checkpoint.graph, short)
    if exact is not None:
        return short if exact.path == path else path
    whole = {reading.path for reading, rest in _readings(checkpoint.graph, short) if rest == ""}
    return short if whole == {path} else path


def _plain(path: str) -> str:
    """Return a path without brackets and quotes, as a user would type it."""
    return path.replace('["', ".").replace('"]', "").lstrip(".")
