"""A checkpoint that plain ``torch.load(path)`` takes: everything that torch does not load by default made plain.

The graph is walked from its root; each object that is not on torch's list is replaced, in its own slot, by the
nearest plain thing (``plain``), so that what was shared still is. Nothing is run to find out what that is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from ...base.errors import MalformedError, RefusedError
from ...base.text import argument, counted, listed, salvage_step
from ...checkpoint.changes import Change
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.container import CUT, DAMAGED, DEFLATED
from ...checkpoint.graph_editor import GraphEditor, prune, removed_with, used_storages
from ...checkpoint.objects import callable_name, elements
from ...checkpoint.sharding import is_sharded
from ...checkpoint.tensors import Storage
from ...pickles.cycles import cycles
from ...pickles.decode import decode
from ...pickles.encode import encode
from ...pickles.nodes import Call, Global, Graph, List, Ref, Style
from ...safety.storages import storage_flaws
from ...safety.torch_lists import NEWEST, allowed, registered
from ...safety.weights_only import WRONG_SUFFIX, weights_only
from ...values.elements import added_storages
from ..sharded import local_parts as parts_of
from .walk import Walk

#: What makes a file unloadable that no other pickle can mend.
_BROKEN: Final = frozenset((CUT, DAMAGED))


def make_plain(
    checkpoint: Checkpoint,
    listed_names: Collection[str],
    unfit: Collection[Ref] = (),
    *,
    as_state_dict: bool = False,
    drop_unknown: bool = False,
) -> Checkpoint:
    """Make everything plain that is not on the list ``listed_names`` of torch's globals ("module.name").

    ``unfit`` are objects that no form of theirs makes loadable: calls that torch fails at, or that are not followed.

    ``as_state_dict`` turns pickled modules into their state dicts; ``drop_unknown`` leaves out what cannot be carried
    (an entry of a mapping goes, in a list None takes its place). Each change is in ``changes`` with its path.
    Raises RefusedError for what cannot be carried otherwise, MalformedError for a damaged file.
    """
    damage = [problem for problem in checkpoint.container.problems if problem.code in _BROKEN]
    if damage:
        raise MalformedError(damage[0].message, path=checkpoint.path, next=salvage_step(checkpoint.path))
    walk = Walk(checkpoint, frozenset(listed_names), unfit, as_state_dict)
    walk.run()
    unknown = walk.unknown
    if (unknown or walk.lost) and (not drop_unknown or checkpoint.graph.root in unknown):
        raise _refusal(checkpoint, walk, checkpoint.graph.root in unknown)
    graph = _plain_style(_untied(checkpoint, walk))
    changes = walk.changes
    if unknown:
        gone = removed_with(graph, unknown.keys())
        if graph.root in gone:
            raise _refusal(checkpoint, walk, True)
        others = walk.places(gone - unknown.keys()) if len(gone) > len(unknown) else []
        rewrite = GraphEditor(graph)
        prune(rewrite, gone)
        graph = rewrite.done()
        changes += [Change("drop", path, 1, 0, f"{name}: dropped") for path, name in unknown.values()]
        changes += [Change("drop", path, 1, 0, f"{name}: dropped with a part of it") for path, name in others]
    changes += [Change("drop", path, 1, 0, f"{name}: dropped") for path, name in walk.lost]
    # To a plain torch.load deflated storages are fine; to one that maps the file they are not.
    anew = bool(walk.storages) or any(
        problem.refused or (problem.code == DEFLATED and problem.level == "error")
        for problem in checkpoint.container.problems
    )
    # What is left out must not stay behind as bytes that nothing uses.
    before, after = used_storages(checkpoint.graph, checkpoint.path), used_storages(graph, checkpoint.path)
    # And the layout contract of .format_version wants them in the order in which a reader meets them.
    anew = anew or bool(before.keys() - after.keys())
    anew = anew or (checkpoint.format == "torch-zip" and list(before) != [key for key in after if key in before])
    if before.keys() & walk.storages.keys():
        raise MalformedError("it has storages under names that no torch writes", path=checkpoint.path)
    _check_bytes(checkpoint, [storage for key, storage in after.items() if key not in walk.storages])
    untyped = any(problem.code == "legacy-untyped" for problem in checkpoint.container.problems)
    if checkpoint.traits.in_a_row and (untyped or anew or checkpoint.graph.refused):
        # Five pickles in one protocol, and storages that it cannot hold: all of it is laid out anew.
        anew = True
    if not (changes or walk.rewrite.changed or checkpoint.graph.refused or anew):
        return checkpoint
    if checkpoint.graph.refused:
        protocol = checkpoint.graph.style.protocol
        what = f"pickle protocol {protocol} -> 2" if protocol != 2 else "instructions that weights_only refuses"
        changes.insert(0, Change("protocol", "", 1, 0, what))
    if anew and not changes and checkpoint.format == "torch-zip":
        changes = [Change("repack", "", 1, 0, "laid out anew, as torch.save does")]
    made = added_storages(checkpoint, walk.storages, after)
    return checkpoint.changed(graph, changes, made, anew=anew)


def _check_bytes(checkpoint: Checkpoint, storages: Iterable[Storage]) -> None:
    """Raise MalformedError where the bytes of a storage are missing, or torch refuses their number."""
    for storage in storages:
        if storage.location == "meta" or not storage.nbytes or storage.dtype.name == "unknown":
            continue
        stored = checkpoint.body(storage.key)
        if stored is None:
            raise MalformedError(
                f"the bytes of storage {storage.key!r} are not in the file",
                path=checkpoint.path,
                next=salvage_step(checkpoint.path),
            )
        if checkpoint.format == "torch-zip" and stored.size != storage.nbytes:
            what = f"storage {storage.key!r} has {stored.size:,} bytes where the pickle says {storage.nbytes:,}"
            raise MalformedError(what, path=checkpoint.path, next=salvage_step(checkpoint.path))


def _untied(checkpoint: Checkpoint, walk: Walk) -> Graph:
    """The graph of the walk, where objects that became tuples and are in themselves became lists instead.

    An object can be among its own attributes, a tuple cannot be among its elements: it is made of them.
    """
    graph = walk.rewrite.done()
    made_sets = checkpoint.graph.refused and walk.rewrite.changed
    tied = [ref for cycle in cycles(graph) for ref in cycle.dependent] if walk.tuples or made_sets else []
    for ref in tied:
        if ref in walk.tuples:
            items = elements(graph.nodes[ref])
            walk.rewrite.changed[ref] = List(list(items))
            walk.note(walk.tuples[ref], "tuple", "list, because it is in itself")
    left = [ref for ref in tied if ref not in walk.tuples and type(graph.nodes[ref]) is Call]
    if len(left) < len(tied):
        # A knot may be untied by one of its members.
        graph = walk.rewrite.done()
        left = [ref for cycle in cycles(graph) for ref in cycle.dependent if type(graph.nodes[ref]) is Call]
    sets = [ref for ref in left if callable_name(graph, _function(graph, ref)) == "builtins.set"]
    if sets:
        raise RefusedError("a set leads to itself, for which there is no plain form", path=checkpoint.path)
    return graph


def _function(graph: Graph, ref: Ref) -> Ref:
    node = graph.nodes[ref]
    assert isinstance(node, Call)
    return node.func


def _refusal(checkpoint: Checkpoint, walk: Walk, root_goes: bool) -> RefusedError:
    """``root_goes`` says that nothing would be left without what cannot be carried."""
    places = [f"{path or 'the root'} ({name})" for path, name in (*walk.unknown.values(), *walk.lost)]
    what = f"{counted(len(places), 'object')} cannot be made plain: {listed(places)}"
    if walk.modules:
        what = f"it holds a pickled module at {listed([path or 'the root' for path in walk.modules])}"
        return RefusedError(what, path=checkpoint.path, next="--as-state-dict makes it its state dict")
    if walk.packed:
        what += "; the state dict of such a module only its own class can make"
    if root_goes:
        step = "load it where its classes are, if you trust it, and save module.state_dict()" if walk.packed else ""
        return RefusedError(f"{what}; nothing would be left without it", path=checkpoint.path, next=step)
    step = "--drop-unknown leaves them out"
    if any(is_sharded(entry.tensor) for entry in checkpoint.survey.tensors):
        step = f"--local-parts makes plain tensors of what one rank had, {step}"
    return RefusedError(what, path=checkpoint.path, next=step)


def _plain_style(graph: Graph) -> Graph:
    """The graph in the protocol that torch reads, written as CPython would."""
    # The two strings of a STACK_GLOBAL have no place there.
    nodes = [Global(n.module, n.name) if type(n) is Global and n.parts is not None else n for n in graph.nodes]
    return Graph(nodes, graph.root, Style(2), None, ())


# -- Making a checkpoint plain, and making sure that it is: the edit, and the check that torch.load takes its result

#: What became plain may be what torch fails at: a second look finds it.
_ROUNDS = 3


def sanitize(
    checkpoint: Checkpoint, *, as_state_dict: bool = False, drop_unknown: bool = False, local_parts: bool = False
) -> Checkpoint:
    """Make everything plain that ``torch.load(path)`` of torch 2.6 and later does not load by default.

    ``local_parts`` puts what one rank had in the place of tensors that are spread over ranks. See
    ``ckptool.edits.sanitize``; raises RefusedError as well where torch would still refuse the result.
    """
    # The dtypes that newer versions list cannot be changed into others; what they register is not there before.
    names = allowed(NEWEST) | registered("2.6")
    if local_parts:
        checkpoint = parts_of(checkpoint)
    edited = checkpoint.tolerating()
    for _ in range(_ROUNDS if drop_unknown else 1):
        unfit = _unfit(edited)
        edited = make_plain(edited, names, unfit, as_state_dict=as_state_dict, drop_unknown=drop_unknown).tolerating()
        if not _unfit(edited):
            break
    return _checked(edited)


def _unfit(checkpoint: Checkpoint) -> set[Ref]:
    """What no other form makes loadable: calls that torch fails at, and what is not followed."""
    flaws = (flaw for flaw in storage_flaws(checkpoint) if flaw.code in ("geometry", "arguments") and flaw.refused)
    return {*checkpoint.survey.unfollowed, *(flaw.ref for flaw in flaws)}


def _checked(edited: Checkpoint) -> Checkpoint:
    """Return the result without what no longer leads anywhere; RefusedError where ``validate`` would refuse it."""
    written = edited.regraphed(decode(encode(edited.graph)).graph) if edited.edited else edited
    flaws = storage_flaws(written)
    found = weights_only(written, flaws)
    left = [blocker.name or blocker.rule for blocker in found.blockers if blocker.rule != WRONG_SUFFIX]
    left += dict.fromkeys(written.survey.unfollowed.values())
    if left:
        step = salvage_step(edited.path) if flaws else f"ckptool validate {argument(edited.path)} says where"
        raise RefusedError(f"torch.load would still refuse it: {listed(left)}", path=edited.path, next=step)
    return written
