"""Edit a graph: collect changed and added nodes, and remove objects."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

from ..base.errors import RefusedError
from ..base.steps import command
from ..pickles.nodes import Call, Dict, FrozenSet, Global, Graph, List, Node, Persistent, Ref, Set, children
from .graph_builder import Constants
from .objects import callable_name, initial_pairs, last_pairs, list_items, pair_list
from .tensors import Storage, TensorReader


class GraphEditor(Constants):
    """A collection of changes to a graph.

    The string to be changed may be the same object as another string of the user. For example, ``'cpu'`` is interned,
    and a key may also be part of a config. So no string is changed in place: ``text`` returns another string to hold
    instead. It returns the same one each time, so places that shared a string still share one.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.changed: dict[Ref, Node] = {}
        self._like: dict[Ref, Ref] = {}
        self._texts: dict[tuple[Ref, str], Ref] = {}

    def add(self, node: Node, like: Ref = -1) -> Ref:
        """Add a node, written in the style of the node ``like``."""
        ref = len(self.graph.nodes) + super().add(node)
        if like >= 0:
            self._like[ref] = like
        return ref

    def put(self, ref: Ref, node: Node) -> None:
        """Replace the node of an old or new reference."""
        old = len(self.graph.nodes)
        if ref < old:
            self.changed[ref] = node
        else:
            self.nodes[ref - old] = node

    def node(self, ref: Ref) -> Node:
        """Return the current node of a reference."""
        if ref in self.changed:
            return self.changed[ref]
        old = len(self.graph.nodes)
        return self.graph.nodes[ref] if ref < old else self.nodes[ref - old]

    def text(self, ref: Ref, value: str) -> Ref:
        """Return a node with the text ``value`` to replace the string ``ref``; equal calls return the same node."""
        if self.graph.nodes[ref] == value:
            return ref
        known = self._texts.get((ref, value))
        if known is None:
            known = self._texts[ref, value] = self.add(value, ref)
        return known

    def refill(self, ref: Ref, items: list[tuple[Ref, Ref]]) -> None:
        """Replace the entries of a mapping, in whichever form it is written."""
        nodes = self.graph.nodes
        node = nodes[ref]
        flat = [part for item in items for part in item]
        if not isinstance(node, Call):
            self.changed[ref] = Dict(flat)
            return
        listed = pair_list(self.graph, node)
        if listed is None and initial_pairs(self.graph, node):
            # The mapping is constructed from another one, which may also be held elsewhere: fill it with items instead.
            kept = list_items(nodes[node.args])[:-1]
            empty = Call(node.op, node.func, self.add(kept) if kept else self.constant(()))
            self.changed[ref] = empty.filled(node.items, flat, node.states)
            return
        if listed is not None:
            # OrderedDict([[k, v], ...]): another mapping may be constructed from the same pairs, so this one gets new
            # pairs.
            pairs = [
                pair if list_items(nodes[pair]) == item else self.add(_sequence(nodes[pair], item), pair)
                for pair, item in zip(listed, items)
            ]
            if pairs != listed:
                (holder,) = list_items(nodes[node.args])
                args = self.add((self.add(_sequence(nodes[holder], pairs), holder),), node.args)
                node = Call(node.op, node.func, args, node.kwargs).filled(node.items, node.pairs, node.states)
            flat = flat[2 * len(listed) :]
        self.changed[ref] = node.filled(node.items, flat, node.states)

    def done(self, root: Ref | None = None) -> Graph:
        """Return the edited graph, or the old one if nothing changed; ``root`` is another root."""
        if not self.changed and root is None:
            return self.graph
        return self.graph.edited(self.changed, self.nodes, root, self._like)


def _sequence(like: Node, refs: Sequence[Ref]) -> Node:
    """Return a tuple or a list, whichever ``like`` is."""
    return tuple(refs) if type(like) is tuple else List(list(refs))


# -- removing objects


def storage_mentions(graph: Graph, reader: TensorReader | None = None) -> Sequence[tuple[Ref, Storage | None]]:
    """Return each persistent id that is reachable from the root, except of modules, in the order of reading.

    Each comes with its storage, or None if it describes none. Planning, numbering and the promise share the result.
    """
    place = "storage mentions", graph.root
    if place not in graph.cache:
        reader, nodes = reader or TensorReader(graph), graph.nodes
        modules = frozenset(reader.modules)
        refs = [ref for ref in graph.reachable() if type(nodes[ref]) is Persistent and ref not in modules]
        graph.cache[place] = tuple(zip(refs, map(reader.storage, refs)))
    found: Sequence[tuple[Ref, Storage | None]] = graph.cache[place]
    return found


def used_storages(graph: Graph, path: str = "", reader: TensorReader | None = None) -> dict[str, Storage]:
    """Return the storages reachable from the root, by key, in the order in which a reader meets them.

    Raises RefusedError for a persistent id that does not describe a storage as torch does: the bytes that it needs are
    unknown, and must not be treated as unused.
    """
    storages: dict[str, Storage] = {}
    for _, storage in storage_mentions(graph, reader):
        if storage is None:
            message = "it refers to a storage in a way that torch.save never does, so its bytes could be lost"
            step = command("validate", path) if path else ""
            raise RefusedError(message, path=path, next=step)
        storages[storage.key] = storage
    return storages


def removed_with(graph: Graph, lost: Collection[Ref]) -> set[Ref]:
    """Return ``lost``, and all calls that depend on a lost or removed node. Containers stay, with fewer elements."""
    nodes = graph.nodes
    gone = set(lost)
    holding: set[Ref] = set()
    before = -1
    refs = range(len(nodes))
    # In a pickle, the dependencies of a node come before it; in nodes copied from other graphs, after it. A forward
    # pass and a backward pass find nearly all of them.
    while before < len(gone) + len(holding):
        before = len(gone) + len(holding)
        for ref in chain(refs, reversed(refs)):
            node = nodes[ref]
            if type(node) is tuple:
                if not (gone.isdisjoint(node) and holding.isdisjoint(node)):
                    holding.add(ref)
            elif type(node) is Call and ref not in gone:
                parts = node.func, node.args, node.kwargs, *node.states
                if not (gone.isdisjoint(parts) and holding.isdisjoint(parts)):
                    gone.add(ref)
    return gone


def leading_to(graph: Graph, refs: Collection[Ref]) -> set[Ref]:
    """Return these references and every node from which one of them is reachable."""
    above: dict[Ref, list[Ref]] = {}
    for ref, node in enumerate(graph.nodes if refs else ()):
        for child in children(node):
            above.setdefault(child, []).append(ref)
    leading, work = set(refs), list(refs)
    while work:
        new = [ref for ref in above.get(work.pop(), ()) if ref not in leading]
        leading.update(new)
        work += new
    return leading


def prune(editor: GraphEditor, gone: AbstractSet[Ref]) -> None:
    """Remove the nodes ``gone`` from every container (see ``removed_with``), and make each of them None."""
    graph = editor.graph
    editor.changed.update(_without_lost(graph, gone))
    for ref, old in enumerate(graph.nodes):
        new = _without(editor, editor.changed.get(ref, old), gone) if ref not in gone else None
        if new is not None or ref in gone:
            editor.changed[ref] = new


def _without(editor: GraphEditor, node: Node, gone: AbstractSet[Ref]) -> Node | None:
    """Return the node without references to nodes in ``gone``, or None if it has no such references."""
    if isinstance(node, Call):
        if gone.isdisjoint(node.items) and gone.isdisjoint(node.pairs):
            return None
        return node.filled(_replaced(editor, node.items, gone), _pairs(editor.graph, node.pairs, gone), node.states)
    if isinstance(node, Dict):
        return Dict(_pairs(editor.graph, node.pairs, gone)) if not gone.isdisjoint(node.pairs) else None
    parts = node if isinstance(node, tuple) else node.items if isinstance(node, List | Set | FrozenSet) else ()
    if gone.isdisjoint(parts):
        return None
    if isinstance(node, Set | FrozenSet):
        return type(node)([part for part in parts if part not in gone])
    return _sequence(node, _replaced(editor, parts, gone))


def _replaced(editor: GraphEditor, parts: Sequence[Ref], gone: AbstractSet[Ref]) -> list[Ref]:
    """Return the parts, with None in place of each part in ``gone``."""
    return [editor.constant(None) if part in gone else part for part in parts]


def _pairs(graph: Graph, pairs: Sequence[Ref], gone: AbstractSet[Ref]) -> Sequence[Ref]:
    if gone.isdisjoint(pairs):
        return pairs
    kept: list[Ref] = []
    # If a key is written twice, its first value must not come back when the last one is removed.
    for key, value in last_pairs(graph, pairs):
        if key not in gone and value not in gone:
            kept += (key, value)
    return kept


def _without_lost(graph: Graph, gone: AbstractSet[Ref]) -> dict[Ref, Node]:
    """Return the shortened lists in ``OrderedDict([[k, v], ...])`` and ``set([...])``; these hold no placeholders."""
    nodes = graph.nodes
    changes: dict[Ref, Node] = {}
    for _, node in graph.of_type(Call):
        is_set = callable_name(graph, node.func) == "builtins.set"
        if not is_set and pair_list(graph, node) is None:
            continue
        for holder in list_items(nodes[node.args])[:1]:
            members = list_items(nodes[holder])
            kept = [one for one in members if one not in gone and (is_set or gone.isdisjoint(list_items(nodes[one])))]
            if len(kept) < len(members):
                changes[holder] = _sequence(nodes[holder], kept)
    return changes


def without_views(graph: Graph) -> Graph:
    """Return the graph with the persistent ids of the zip format, which have five elements and describe only storages.

    A legacy id ends with None or (view key, offset, size), with the offset in elements; a tensor's own offset counts
    from there (torch/serialization.py, ``_legacy_load``). Raises RefusedError for a view outside of tensors.
    """
    nodes = graph.nodes
    changes: dict[Ref, Node] = {}
    added: list[Node] = []
    views: set[Ref] = set()
    for ref, node in graph.of_type(Persistent):
        pid = nodes[node.pid]
        if type(pid) is not tuple:
            continue
        if len(pid) == 6:
            changes[node.pid] = pid[:5]
            if nodes[pid[5]] is not None:
                views.add(ref)
        elif len(pid) == 4 and nodes[pid[0]] == "module" and type(cls := nodes[pid[1]]) is Global:
            # (module, class, file, source): torch takes the class, and warns if the source has changed since.
            changes[ref] = Global(cls.module, cls.name, cls.parts)
    if views:
        changes |= _with_whole_storages(graph, views, added)
    return graph.edited(changes, added) if changes else graph


def _with_whole_storages(graph: Graph, views: set[Ref], added: list[Node]) -> dict[Ref, Node]:
    """Return the arguments of tensors over views, with offsets that count from the beginning of the storage."""
    reader, nodes = TensorReader(graph), graph.nodes
    changes: dict[Ref, Node] = {}
    for ref, node in enumerate(nodes):
        # This includes the inner arguments of _rebuild_from_type_v2.
        if type(node) is tuple and len(node) > 3 and node[0] in views and type(own := nodes[node[1]]) is int:
            begin, _ = reader.view(node[0])
            changes[ref] = (node[0], len(nodes) + len(added), *node[2:])
            added.append(own + begin)
    for ref in graph.reachable():
        for place, child in enumerate(children(nodes[ref])):
            if child in views and not (place == 0 and ref in changes):
                raise RefusedError("it holds a view of a storage by itself, which no other format has")
    return changes
