"""Taking entries or tensors of one checkpoint into another."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from shlex import quote

from ..base.errors import RefusedError, TargetError
from ..base.globs import EVERY, Globs
from ..base.prefixes import unwrapping
from ..base.text import counted, listed, shown
from ..checkpoint.changes import Change
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.container import Body
from ..checkpoint.graph_editor import Rewrite
from ..checkpoint.objects import mapping
from ..checkpoint.paths import literal_identity, spell_key
from ..checkpoint.selection import new_key, selected, slot
from ..checkpoint.survey import StateDict
from ..files.sources import Computed
from ..pickles.nodes import Buffer, ByteArray, Extension, FrozenSet, Node, Persistent, Ref, Set, children
from ..pickles.relocate import moved
from ..values.elements import number_width, stored_bytes, swapped, whole_chunks
from .lookup import lookup
from .storages import with_plain_ids


def merge(
    original: Checkpoint,
    other: Checkpoint,
    *,
    key: str | None = None,
    other_key: str | None = None,
    only: Globs = EVERY,
    add: bool = True,
) -> Checkpoint:
    """Take tensors of another checkpoint's state dict into ours: those of the same key are replaced, new ones added.

    ``key`` and ``other_key`` are the paths of the state dicts; by default those at the same path in both are merged,
    or the only one of each. ``only`` chooses keys of the other. Without ``add`` only keys that are there are replaced.
    Raises RefusedError where a shape differs or nothing is taken, TargetError where it is not clear which state dicts
    are meant.
    """
    pairs = _pairs(original, other, key, other_key)
    graft = _Graft(with_plain_ids(original), with_plain_ids(other))
    changes = [change for pair in pairs if (change := _merged(graft, *pair, only, add)) is not None]
    if not changes:
        step = f"find names that fit: ckptool match {quote(other.path)} {quote(original.path)}"
        raise RefusedError("nothing is taken: no key of it is chosen", path=other.path, next=step)
    return graft.done(changes)


def _pairs(
    original: Checkpoint, other: Checkpoint, key: str | None, other_key: str | None
) -> list[tuple[StateDict, StateDict]]:
    ours, theirs = selected(original, key), selected(other, other_key)
    if key is None and other_key is None:
        there = {item.path: item for item in theirs}
        both = [(item, there[item.path]) for item in ours if item.path in there]
        if both:
            return both
    for checkpoint, chosen, option in ((original, ours, "--key"), (other, theirs, "--from")):
        if len(chosen) != 1:
            paths = listed([repr(item.path or ".") for item in chosen])
            what = f"there are {len(chosen)} state dicts: {paths}" if chosen else "there is no state dict in it"
            raise TargetError(what, path=checkpoint.path, next=f"name one with {option}" if chosen else "")
    return [(ours[0], theirs[0])]


def _merged(graft: _Graft, ours: StateDict, theirs: StateDict, only: Globs, add: bool) -> Change | None:
    """Merge one state dict into another; None where nothing of it is chosen."""
    here, there = graft.checkpoint, graft.foreign
    places = {str(here.graph.nodes[name]): number for number, (name, _) in enumerate(ours.items)}
    items = list(ours.items)
    new: list[str] = []
    replaced = recast = 0
    for name, value in theirs.items:
        text = str(there.graph.nodes[name])
        if (only and not only.match(text, spell_key(theirs.path, text))) or (text not in places and not add):
            continue
        if text not in places:
            new.append(text)
            items.append((graft.ref(name), graft.ref(value)))
            continue
        number = places[text]
        old, fresh = here.survey.reader.tensor(items[number][1]), there.survey.reader.tensor(value)
        if old is not None and fresh is not None and old.shape != fresh.shape:
            what = f"{shown(text)} has the shape {list(fresh.shape)} there and {list(old.shape)} here"
            raise RefusedError(what, path=there.path, next=f"leave it out: --exclude {quote(text)}")
        recast += old is not None and fresh is not None and old.dtype != fresh.dtype
        items[number] = (items[number][0], graft.ref(value))
        replaced += 1
    if not (new or replaced):
        return None
    graft.rewrite.refill(ours.ref, items)
    _modules(graft, ours, theirs, new)
    parts = [f"{counted(replaced, 'key')} replaced"] if replaced else []
    parts += [f"{counted(len(new), 'key')} added"] if new else []
    what = f"{' and '.join(parts)} from {there.path}"
    notes: tuple[str, ...] = (f"{counted(recast, 'key')} of another dtype now",) if recast else ()
    notes += _untied(here, ours, items)
    if not replaced and set(map(unwrapping(places), places)) & set(map(unwrapping(new), new)):
        step = f"ckptool match {quote(there.path)} {quote(here.path)}"
        notes += (f"but for the names of wrappers these keys were there before, and are there twice now: {step}",)
    return Change("merge", ours.path, replaced + len(new), len(ours.items) - replaced, what, notes)


def _untied(checkpoint: Checkpoint, state_dict: StateDict, items: Sequence[tuple[Ref, Ref]]) -> tuple[str, ...]:
    """A remark on keys that were one tensor with another key, and are not any more."""
    reader, nodes = checkpoint.survey.reader, checkpoint.graph.nodes
    tied: dict[str, list[tuple[str, bool]]] = {}
    for (name, old), (_, new) in zip(state_dict.items, items):
        tensor = reader.tensor(old)
        if tensor is not None and tensor.storage:
            tied.setdefault(tensor.storage, []).append((str(nodes[name]), old != new))
    torn = [name for names in tied.values() if len({moved for _, moved in names}) > 1 for name, moved in names if moved]
    return (
        (f"no longer tied to what shared their storage: {listed([repr(name) for name in torn], most=3)}",)
        if torn
        else ()
    )


def merge_entries(original: Checkpoint, other: Checkpoint, entries: Sequence[tuple[str, str]]) -> Checkpoint:
    """Take whole entries of another checkpoint, (path there, path here): what stands here is replaced.

    Raises TargetError where there is nothing at a path there, or no mapping to hold it here.
    """
    checkpoint, foreign = with_plain_ids(original), with_plain_ids(other)
    graft = _Graft(checkpoint, foreign)
    changes = []
    for origin, target in entries:
        found = lookup(foreign, origin)
        there = slot(checkpoint, target)
        if there is None:
            what = f"there is no mapping that could hold {target!r}"
            raise TargetError(what, path=original.path, next=f"ckptool inspect {quote(original.path)} --tree")
        holder = there.holder
        known = graft.filled.setdefault(holder, list(there.items))
        added = graft.keys.setdefault(holder, {})
        wanted = literal_identity(there.key)
        number = there.number if there.number >= 0 else added.get(wanted, -1)
        value = graft.ref(found.ref)
        if number < 0:
            added[wanted] = len(known)
            known.append((new_key(checkpoint, graft.rewrite, target, there.key), value))
        else:
            known[number] = (known[number][0], value)
        graft.rewrite.refill(holder, known)
        words = "added" if number < 0 else "replaced"
        changes.append(Change("merge", target, 1, 0, f"{words} by {origin!r} of {other.path}"))
    return graft.done(changes)


def _modules(graft: _Graft, ours: StateDict, theirs: StateDict, added: Sequence[str]) -> None:
    """Bring the ``_metadata`` of the modules that came with new keys."""
    if ours.metadata < 0 or theirs.metadata < 0 or not added:
        return
    here = mapping(graft.checkpoint.graph, ours.metadata) or []
    known = {graft.checkpoint.graph.nodes[name] for name, _ in here}
    heads = {name[:at] for name in added for at, char in enumerate(name) if char == "."}
    more = []
    for name, value in mapping(graft.foreign.graph, theirs.metadata) or []:
        path = graft.foreign.graph.nodes[name]
        if path in heads and path not in known:
            more.append((graft.ref(name), graft.ref(value)))
    if more:
        graft.rewrite.refill(ours.metadata, [*here, *more])


class _Graft:
    """Copies nodes of another graph, each once, so that what is shared there is shared here."""

    def __init__(self, checkpoint: Checkpoint, foreign: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.foreign = foreign
        self.rewrite = Rewrite(checkpoint.graph)
        #: Mappings with entries that came: all of their items, and the numbers of the new ones by their keys.
        self.filled: dict[Ref, list[tuple[Ref, Ref]]] = {}
        self.keys: dict[Ref, dict[Hashable, int]] = {}
        self._copies: dict[Ref, Ref] = {}
        self._bodies: dict[str, Body] = {}
        self._keys: dict[str, str] = {}
        self._taken = {*checkpoint.survey.reader.storages, *checkpoint.added}

    def done(self, changes: Sequence[Change]) -> Checkpoint:
        """The checkpoint with what was copied."""
        graph = self.rewrite.done()
        return self.checkpoint.changed(
            graph, changes, self._bodies, anew=True, also=self.foreign.sources, later=self.foreign.later
        )

    def ref(self, root: Ref) -> Ref:
        """Our reference of one of theirs, copied with all that it leads to."""
        nodes = self.foreign.graph.nodes
        fresh: list[Ref] = []
        work = [root]
        while work:
            ref = work.pop()
            if ref in self._copies:
                continue
            # A place for each first: objects may lead back to each other.
            self._copies[ref] = self.rewrite.add(None)
            fresh.append(ref)
            work.extend(reversed(children(nodes[ref])))
        for ref in fresh:
            self.rewrite.put(self._copies[ref], self._copied(ref))
        return self._copies[root]

    def _copied(self, ref: Ref) -> Node:
        graph = self.foreign.graph
        storage = self.foreign.survey.reader.storage(ref)
        node = graph.nodes[ref]
        if storage is not None and isinstance(node, Persistent):
            pid = graph.nodes[node.pid]
            assert type(pid) is tuple
            key = self._key(storage.key)
            copied = [self._copies[part] for part in pid]
            return Persistent(self.rewrite.add((*copied[:2], self.rewrite.constant(key), *copied[3:])))
        if graph.style.protocol != self.checkpoint.graph.style.protocol and isinstance(
            node, bytes | ByteArray | Buffer | Extension | Set | FrozenSet
        ):
            what = f"it is written in pickle protocol {graph.style.protocol}, and holds what the other's does not know"
            raise RefusedError(what, path=self.foreign.path, next=f"ckptool sanitize {quote(self.foreign.path)} first")
        return moved(node, self._copies)

    def _key(self, key: str) -> str:
        """A key of ours for a storage of theirs."""
        known = self._keys.get(key)
        if known is not None:
            return known
        name = f"merged.{key}"
        while name in self._taken:
            name = f"merged.{name}"
        self._taken.add(name)
        self._keys[key] = name
        body = self.foreign.body(key)
        if body is not None:
            self._bodies[name] = self._turned(key, body)
        return name

    def _turned(self, key: str, body: Body) -> Body:
        """The bytes in the byte order of our file."""
        if self.foreign.container.byteorder == self.checkpoint.container.byteorder:
            return body
        dtype = self.foreign.survey.reader.storages[key].dtype
        if dtype.name == "unknown":
            what = f"storage {key!r} has another byte order, and a dtype that is not known"
            raise RefusedError(what, path=self.foreign.path)
        foreign, width = self.foreign, number_width(dtype)

        def chunks() -> Iterator[bytes]:
            return (swapped(data, width) for data in whole_chunks(stored_bytes(foreign, key), width))

        return Body(Computed(body.size, chunks), body.size)
