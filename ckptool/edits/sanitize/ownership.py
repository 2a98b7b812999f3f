"""Find the bytes that objects own, which an edit would lose by dropping an object without a plain form."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from ...base.errors import RefusedError
from ...base.steps import AnyStep, command, suggested_output
from ...base.text import join_limited, pluralize
from ...checkpoint.backends import array_layout
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.graph_editor import leading_to, used_storages
from ...checkpoint.objects import callable_name
from ...pickles.nodes import Call, Graph, Ref, children
from ..entries import is_entry

#: Packages that are always installed, so that an error need not name them.
_PYTHON: Final = ("builtins", "functools", "copyreg", "torch")


def lost_values(checkpoint: Checkpoint, kept: Graph, gone: Collection[Ref]) -> set[Ref]:
    """Return the storages, arrays and tensors with bytes that are not in ``kept``, the graph without ``gone``."""
    graph, survey = checkpoint.graph, checkpoint.survey
    left = used_storages(kept, checkpoint.path)
    reachable = set(kept.reachable())
    lost = {ref for ref, storage in survey.reader.uses() if storage.key not in left and storage.nbytes}
    calls = dict(graph.of_type(Call))
    arrays = {ref for ref in calls.keys() - reachable if (layout := array_layout(graph, ref)) and layout.nbytes}
    if arrays:
        # A generator's seed array goes with it, because only its state matters.
        random = (ref for ref, node in calls.items() if callable_name(graph, node.func).startswith("numpy.random."))
        lost |= arrays - below(graph, random)
    lost.update(entry.ref for entry in survey.tensors if entry.ref in gone and entry.tensor.own_bytes)
    return lost.intersection(graph.reachable()) if lost else lost


def below(graph: Graph, refs: Iterable[Ref]) -> set[Ref]:
    """Return these references and everything that they lead to."""
    below, work = set[Ref](), [ref for ref in refs if ref < len(graph.nodes)]
    while work:
        ref = work.pop()
        if ref not in below:
            below.add(ref)
            work += children(graph.nodes[ref])
    return below


def left_out(checkpoint: Checkpoint, lost: Collection[Ref]) -> tuple[int, str]:
    """Return how many tensors and storages lead to something lost, and a text with their paths."""
    leading = leading_to(checkpoint.graph, lost)
    paths = [entry.path for entry in checkpoint.survey.tensors if entry.ref in leading]
    paths += [path for path, ref, _ in checkpoint.survey.storages if ref in lost]
    return len(paths), join_limited(paths or ["arrays among the attributes of an object"], most=3)


def owning_error(checkpoint: Checkpoint, owners: Sequence[tuple[str, str]]) -> RefusedError:
    """Return the error for objects with tensor values, which only ``drop`` removes."""
    places = join_limited([f"{place} ({name})" for place, name in owners], most=3)
    message = f"{pluralize(len(owners), 'object')} cannot become plain, and hold values of tensors: {places}"
    every = dict.fromkeys(name.partition(".")[0] for _, name in owners if "." in name)
    packages = [package for package in every if package not in _PYTHON]
    where = f"where {join_limited(packages)} is installed" if packages else "with the library that wrote it"
    step: AnyStep = f"load it {where} and save plain tensors"
    if all(is_entry(checkpoint, place) for place, _ in owners):
        output = suggested_output(checkpoint.path, "rest")
        step += ", or drop them: " + command("drop", checkpoint.path, *(place for place, _ in owners), output=output)
    return RefusedError(message, path=checkpoint.path, next=step)
