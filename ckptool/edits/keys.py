"""Edits of the keys of state dicts. ``_metadata``, which is keyed by module, follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from ..checkpoint import Change, Checkpoint
from ..errors import RefusedError, TargetError
from ..objects import mapping
from ..pickles.nodes import Ref
from ..prefixes import without_wrappers
from ..survey import StateDict
from .rewrite import Rewrite
from .select import selected

__all__ = ["add_prefix", "rename_keys", "strip_prefix", "strip_wrappers"]

Rename = Callable[[str], str]


def strip_prefix(
    checkpoint: Checkpoint, prefix: str = "module.", *, key: str | None = None, repeat: int | Literal["all"] = 1
) -> Checkpoint:
    """Take a prefix of whole segments off the keys that have it; the others stay.

    ``prefix`` "module." and "module" mean the same. ``key`` is the path of one state dict (default: every
    one found). ``repeat`` takes it off so many times, or "all" as long as it is there. The entry of
    ``_metadata`` for the stripped module replaces the one for "" in its place, as torch's
    ``consume_prefix_in_state_dict_if_present`` does.

    Raises RefusedError when two keys would become one, TargetError when there is no state dict at ``key``.
    """
    head = _segments(prefix)
    limit = repeat if isinstance(repeat, int) else 1 << 30
    if limit < 1:
        raise TargetError("the prefix must be stripped at least once")

    def strip(name: str) -> str:
        left = limit
        while left and name.startswith(head):
            name = name[len(head) :]
            left -= 1
        return name

    what, nothing = f"prefix {head!r} taken off", f"no key has the prefix {head!r}"
    return rename_keys(checkpoint, strip, key=key, edit="strip-prefix", what=what, nothing=nothing)


def strip_wrappers(checkpoint: Checkpoint, *, key: str | None = None) -> Checkpoint:
    """Take out the segments of all known wrappers wherever they stand: ``prefixes.WRAPPERS``.

    Parameters and errors as for ``strip_prefix``.
    """
    return rename_keys(
        checkpoint,
        without_wrappers,
        key=key,
        edit="strip-wrappers",
        what="wrapper names taken out of",
        nothing="no key has the name of a wrapper in it",
    )


def add_prefix(checkpoint: Checkpoint, prefix: str = "module.", *, key: str | None = None) -> Checkpoint:
    """Put a prefix of whole segments before every key, also before one that has it already.

    In ``_metadata`` the entry for "" stays and the others gain the prefix. Parameters and errors as for
    ``strip_prefix``.
    """
    head = _segments(prefix)

    def add(name: str) -> str:
        return head + name

    def remark(names: Sequence[str]) -> tuple[str, ...]:
        had = sum(name.startswith(head) for name in names)
        return (f"{had:,} of them had it already and have it twice now",) if had else ()

    return rename_keys(checkpoint, add, key=key, edit="add-prefix", what=f"prefix {head!r} put before", remark=remark)


def rename_keys(
    checkpoint: Checkpoint,
    rename: Rename,
    *,
    key: str | None = None,
    edit: str = "rename",
    what: str = "renamed",
    nothing: str = "no key is renamed",
    remark: Callable[[Sequence[str]], tuple[str, ...]] | None = None,
) -> Checkpoint:
    """Rename the keys of state dicts by a function of the name; ``_metadata`` follows.

    A module path in ``_metadata`` is renamed as ``rename(path + ".")`` less the dot. Raises RefusedError
    when two keys would become one.
    """
    rewrite = Rewrite(checkpoint.graph)
    changes = []
    for state_dict in selected(checkpoint, key):
        names = [str(checkpoint.graph.nodes[ref]) for ref, _ in state_dict.items]
        renamed = [rename(name) for name in names]
        _refuse_collisions(checkpoint, state_dict, names, renamed)
        count = sum(old != new for old, new in zip(names, renamed))
        if count:
            fresh = [(rewrite.text(ref, new), value) for (ref, value), new in zip(state_dict.items, renamed)]
            rewrite.refill(state_dict.ref, fresh)
            if state_dict.metadata >= 0:
                _follow(rewrite, state_dict.metadata, rename)
        notes = remark(names) if remark else ()
        changes.append(Change(edit, state_dict.path, count, len(names) - count, what if count else nothing, notes))
    return checkpoint.changed(rewrite.done(), changes)


def _follow(rewrite: Rewrite, metadata: Ref, rename: Rename) -> None:
    """Rename the module paths of ``_metadata``. What becomes one: the later value, in the earlier place."""
    items = mapping(rewrite.graph, metadata) or []
    places: dict[str, int] = {}
    fresh: list[tuple[Ref, Ref]] = []
    for ref, value in items:
        path = rewrite.graph.nodes[ref]
        if type(path) is not str:
            fresh.append((ref, value))
            continue
        new = rename(path + ".").removesuffix(".") if path else path
        place = places.get(new)
        if place is None:
            places[new] = len(fresh)
            fresh.append((rewrite.text(ref, new), value))
        else:
            fresh[place] = (fresh[place][0], value)
    if fresh != items:
        rewrite.refill(metadata, fresh)


def _refuse_collisions(
    checkpoint: Checkpoint, state_dict: StateDict, names: Sequence[str], renamed: Sequence[str]
) -> None:
    first: dict[str, str] = {}
    for old, new in zip(names, renamed):
        other = first.setdefault(new, old)
        if other != old:
            where = f" in {state_dict.path!r}" if state_dict.path else ""
            what = f"the keys {other!r} and {old!r}{where} would both be called {new!r}"
            raise RefusedError(what, path=checkpoint.path, next="name one state dict by --key, or rename one key first")
        if not new:
            raise RefusedError(f"the key {old!r} would have no name left", path=checkpoint.path)


def _segments(prefix: str) -> str:
    """The prefix with its closing dot; raises TargetError for an empty one."""
    head = prefix.rstrip(".") + "."
    if head == ".":
        raise TargetError("the prefix is empty", next="give a prefix such as 'module.'")
    return head
