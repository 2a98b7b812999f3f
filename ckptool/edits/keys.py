"""Edits of the keys of state dicts. ``_metadata``, which is keyed by module, follows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from ..changes import Change
from ..checkpoint import Checkpoint
from ..errors import RefusedError, TargetError
from ..human import counted, listed, shown
from ..names import EVERY, Globs
from ..objects import mapping
from ..paths import spell_key
from ..pickles.nodes import Ref
from ..prefixes import common_prefix, unwrapping, wrapper_counts
from ..survey import StateDict
from .optimizers import renamed_parameters
from .rewrite import Rewrite
from .select import selected

__all__ = [
    "add_module",
    "add_prefix",
    "rename_keys",
    "renamed_modules",
    "strip_module",
    "strip_prefix",
    "strip_wrappers",
    "stripping",
]

Rename = Callable[[str], str]


def strip_prefix(
    checkpoint: Checkpoint,
    prefix: str = "module.",
    *,
    key: str | None = None,
    repeat: int | Literal["all"] = 1,
    only: Globs = EVERY,
) -> Checkpoint:
    """Take a prefix of whole segments off the keys that have it; the others stay.

    ``prefix`` "module." and "module" mean the same. ``key`` is the path of one state dict (default: every
    one found), ``only`` chooses keys. ``repeat`` takes it off so many times, or "all" as long as it is there. The
    entry of ``_metadata`` for the stripped module replaces the one for "" in its place, as torch's
    ``consume_prefix_in_state_dict_if_present`` does.

    Raises RefusedError when two keys would become one, TargetError when there is no state dict at ``key``.
    """
    head = _segments(prefix)
    strip = stripping(prefix, repeat)

    def remark(names: Sequence[str]) -> tuple[str, ...]:
        stripped = [strip(name) for name in names]
        still = sum(name.startswith(head) for name in stripped)
        notes = (f"{still:,} of them still begin with it: --repeat all",) if still else ()
        inside = [name for name in wrapper_counts(stripped) if name + "." != head]
        return (*notes, f"{listed([repr(name) for name in inside])} still inside: --wrappers") if inside else notes

    what, nothing = f"prefix {head!r} taken off", f"no key has the prefix {head!r}"
    return rename_keys(
        checkpoint, strip, key=key, only=only, edit="strip-prefix", what=what, nothing=nothing, remark=remark
    )


def stripping(prefix: str, repeat: int | Literal["all"] = 1) -> Rename:
    """The function of a name that takes the prefix off."""
    head = _segments(prefix)
    limit = repeat if isinstance(repeat, int) else 1 << 30
    if limit < 1:
        raise TargetError("the prefix must be stripped at least once")

    def strip(name: str) -> str:
        left, at = limit, 0
        while left and name.startswith(head, at):
            at += len(head)
            left -= 1
        return name[at:]

    return strip


def strip_wrappers(checkpoint: Checkpoint, *, key: str | None = None, only: Globs = EVERY) -> Checkpoint:
    """Take out the segments of all known wrappers wherever they stand: ``prefixes.WRAPPERS``.

    Parameters and errors as for ``strip_prefix``.
    """
    return rename_keys(
        checkpoint,
        None,
        key=key,
        only=only,
        together=unwrapping,
        edit="strip-wrappers",
        what="wrapper names taken out of",
        nothing="no key has the name of a wrapper in it",
    )


def add_prefix(
    checkpoint: Checkpoint, prefix: str = "module.", *, key: str | None = None, only: Globs = EVERY
) -> Checkpoint:
    """Put a prefix of whole segments before every key, also before one that has it already.

    In ``_metadata`` the entry for "" stays, and the model's own keys have it under the prefix, too. Parameters and
    errors as for ``strip_prefix``.
    """
    head = _segments(prefix)

    def add(name: str) -> str:
        return head + name

    def remark(names: Sequence[str]) -> tuple[str, ...]:
        had = sum(name.startswith(head) for name in names)
        return (f"{had:,} of them had it already and have it twice now",) if had else ()

    what = f"prefix {head!r} put before"
    return rename_keys(checkpoint, add, key=key, only=only, edit="add-prefix", what=what, remark=remark)


def rename_keys(
    checkpoint: Checkpoint,
    renaming: Rename | None,
    *,
    key: str | None = None,
    only: Globs = EVERY,
    together: Callable[[Sequence[str]], Rename] | None = None,
    edit: str = "rename",
    what: str = "renamed",
    nothing: str = "no key is renamed",
    remark: Callable[[Sequence[str]], tuple[str, ...]] | None = None,
) -> Checkpoint:
    """Rename the keys of state dicts by a function of the name; ``only`` chooses those that it is asked about.

    ``together`` gives the function for all names of one state dict, in place of ``renaming``.

    ``_metadata`` follows: a module path in it is renamed as ``rename(path + ".")`` less the dot, and goes where the
    keys of the module itself go, to several places if need be. So do the names of parameters in the states of
    optimizers. Raises RefusedError when two keys would become one.
    """
    rewrite = Rewrite(checkpoint.graph)
    changes = []
    known: dict[str, str] = {}
    chosen_dicts = selected(checkpoint, key)
    for state_dict in chosen_dicts:
        names = [str(checkpoint.graph.nodes[ref]) for ref, _ in state_dict.items]
        chosen = _chosen(state_dict, names, only)
        rename = together(names) if together is not None else renaming
        assert rename is not None, "there is one of the two"
        renamed = [rename(name) if name in chosen else name for name in names]
        known.update(zip(names, renamed))
        _refuse_collisions(checkpoint, state_dict, names, renamed)
        count = sum(old != new for old, new in zip(names, renamed))
        if count:
            fresh = [(rewrite.text(ref, new), value) for (ref, value), new in zip(state_dict.items, renamed)]
            rewrite.refill(state_dict.ref, fresh)
            if state_dict.metadata >= 0:
                moves = _of_modules(rename, only, names, chosen)
                _follow(rewrite, state_dict.metadata, moves, list(zip(names, renamed)))
        notes = remark(names) if remark else ()
        if not count:
            shared = common_prefix(names)
            notes += (f"they begin with {shared!r}",) if shared else ()
        changes.append(Change(edit, state_dict.path, count, len(names) - count, what if count else nothing, notes))
    others = [item for item in selected(checkpoint, None) if item not in chosen_dicts]
    changes += renamed_parameters(checkpoint, rewrite, known, others)
    return checkpoint.changed(rewrite.done(), changes)


def _chosen(state_dict: StateDict, names: Sequence[str], only: Globs) -> Collection[str]:
    if not only:
        return frozenset(names)
    return {name for name in names if only.match(name, spell_key(state_dict.path, name))}


def _of_modules(rename: Rename, only: Globs, names: Sequence[str], chosen: Collection[str]) -> Rename:
    """The function for paths of modules: with a choice of keys, a module goes where all of its keys go."""
    if not only:
        return rename
    staying = sorted(name for name in names if name not in chosen)
    moving = sorted(chosen)

    def has(ordered: Sequence[str], path: str) -> bool:
        at = bisect_left(ordered, path)
        return at < len(ordered) and ordered[at].startswith(path)

    return lambda path: rename(path) if has(moving, path) and not has(staying, path) else path


def _follow(rewrite: Rewrite, metadata: Ref, rename: Rename, pairs: Sequence[tuple[str, str]]) -> None:
    """Rename the module paths of ``_metadata``; ``pairs`` are the keys of the state dict, old and new."""
    items = mapping(rewrite.graph, metadata) or []
    paths = [rewrite.graph.nodes[ref] for ref, _ in items]
    if not all(type(path) is str for path in paths):
        return
    fresh = [
        (rewrite.text(items[place][0], path), items[source][1])
        for path, place, source in renamed_modules([str(path) for path in paths], rename, pairs)
    ]
    if fresh != items:
        rewrite.refill(metadata, fresh)


def renamed_modules(
    paths: Sequence[str], rename: Rename, pairs: Iterable[tuple[str, str]] = ()
) -> list[tuple[str, int, int]]:
    """New module paths: (path, number of the entry whose place it takes, number of the one whose value it has).

    Of paths that become one, the later value takes the place of the earlier: so the entry of ``module`` replaces
    that of "" when the prefix goes. A module whose own keys go elsewhere (``pairs``, old and new) goes with them: it
    has an entry wherever one of them is, as ``load_state_dict`` looks for its version there.
    """
    homes: dict[str, dict[str, None]] = {}
    for old, new in pairs:
        (module, _, name), (home, _, other) = old.rpartition("."), new.rpartition(".")
        if name == other or old.count(".") == new.count("."):
            homes.setdefault(module, {})[home] = None
    whole = [rename(path + ".").removesuffix(".") if path else path for path in paths]
    # Where a module's own keys are all elsewhere, the name of the module says nothing.
    first = [
        new if not path or new in homes.get(path, (new,)) else next(iter(homes[path]))
        for path, new in zip(paths, whole)
    ]
    taken = set(first)
    found: dict[str, tuple[int, int]] = {}
    for number, (path, new) in enumerate(zip(paths, first)):
        found[new] = (found[new][0] if new in found else number, number)
        for home in homes.get(path, ()):
            if home not in taken:
                found[home] = (number, number)
    return [(path, place, source) for path, (place, source) in found.items()]


def _refuse_collisions(
    checkpoint: Checkpoint, state_dict: StateDict, names: Sequence[str], renamed: Sequence[str]
) -> None:
    first: dict[str, str] = {}
    pairs = []
    for old, new in zip(names, renamed):
        other = first.setdefault(new, old)
        if other != old:
            pairs.append((other, old, new))
        if not new:
            raise RefusedError(f"the key {shown(old)} would have no name left", path=checkpoint.path)
    if pairs:
        other, old, new = pairs[0]
        where = f" in {state_dict.path!r}" if state_dict.path else ""
        more = f", and {counted(len(pairs) - 1, 'more pair')} likewise" if len(pairs) > 1 else ""
        what = f"the keys {shown(other)} and {shown(old)}{where} would both be called {shown(new)}{more}"
        raise RefusedError(what, path=checkpoint.path, next="take one of each pair out with drop")


def _segments(prefix: str) -> str:
    """The prefix with its closing dot; raises TargetError for an empty one."""
    head = prefix.rstrip(".") + "."
    if head == ".":
        raise TargetError("the prefix is empty", next="give a prefix such as 'module.'")
    return head


#: The edits by the names of their commands.
strip_module, add_module = strip_prefix, add_prefix
