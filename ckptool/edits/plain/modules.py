"""Pickled modules: the state dict that ``module.state_dict()`` would give.

Sources: ``torch/nn/modules/module.py`` (``state_dict``, ``_save_to_state_dict``), the ``_version`` of torch's modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...human import counted
from ...objects import elements, mapping
from ...pickles.nodes import Call, Dict, Ref, Set
from ...tensors import TensorReader
from .case import UNKNOWN, Case, Plain, Verdict

__all__ = ["is_module", "state_dict_of"]

_DEPTH: Final = 200
#: The modules whose state dict says version 2, where they count batches; all others of torch's own say 1.
_NORMS: Final = ("BatchNorm", "InstanceNorm", "SyncBatchNorm")
_PARTS: Final = frozenset(("_parameters", "_buffers", "_modules"))


def is_module(case: Case) -> bool:
    """Has it the attributes that every nn.Module has?"""
    if not case.node.states:
        return False
    nodes = case.graph.nodes
    return {nodes[key] for key, _ in case.state() or () if isinstance(nodes[key], str)} >= _PARTS


def state_dict_of(case: Case, reader: TensorReader) -> Verdict:
    """Parameters and persistent buffers by their dotted names, with ``_metadata``."""
    entries: list[tuple[str, Ref]] = []
    versions: list[tuple[str, int]] = []
    if not _collect(case, reader, "", entries, versions, 0):
        return UNKNOWN
    rewrite = case.rewrite
    pairs = [part for name, ref in entries for part in (rewrite.add(name), ref)]
    metadata = case.call("collections", "OrderedDict")
    held = []
    for path, number in versions:
        held += [rewrite.add(path), rewrite.add(Dict([rewrite.constant("version"), rewrite.constant(number)]))]
    state = Dict([rewrite.constant("_metadata"), rewrite.add(metadata.filled((), held, ()))])
    made = case.call("collections", "OrderedDict").filled((), pairs, (rewrite.add(state),))
    words = f"state dict, {counted(len(entries), 'tensor')}; other attributes of the module are left out"
    return Plain(made, words)


def _collect(
    case: Case,
    reader: TensorReader,
    prefix: str,
    entries: list[tuple[str, Ref]],
    versions: list[tuple[str, int]],
    depth: int,
) -> bool:
    """Add what one module and those in it hold; False for modules without end or of another shape."""
    nodes = case.graph.nodes
    parts = {nodes[key]: value for key, value in case.state() or () if isinstance(nodes[key], str)}
    if depth > _DEPTH or not parts.keys() >= _PARTS:
        return False
    names = [name for name, _ in _named(case, parts["_buffers"])]
    versions.append((prefix.removesuffix("."), _version(case.name, names)))
    skipped = {nodes[ref] for ref in _members(case, parts.get("_non_persistent_buffers_set", -1))}
    for name, ref in _named(case, parts["_parameters"]):
        if nodes[ref] is not None:
            entries.append((prefix + name, _inner(case, reader, ref)))
    for name, ref in _named(case, parts["_buffers"]):
        if nodes[ref] is not None and name not in skipped:
            entries.append((prefix + name, ref))
    for name, ref in _named(case, parts["_modules"]):
        node = nodes[ref]
        if node is None:
            continue
        if not isinstance(node, Call):
            return False
        inner = Case(case.rewrite, ref, node, case.storages)
        if not _collect(inner, reader, f"{prefix}{name}.", entries, versions, depth + 1):
            return False
    return True


def _named(case: Case, ref: Ref) -> Iterator[tuple[str, Ref]]:
    nodes = case.graph.nodes
    for key, value in mapping(case.graph, ref) or ():
        name = nodes[key]
        if isinstance(name, str):
            yield name, value


def _members(case: Case, ref: Ref) -> tuple[Ref, ...]:
    """What is in a set, written either way."""
    node = case.graph.nodes[ref] if ref >= 0 else None
    if isinstance(node, Set):
        return tuple(node.items)
    args = case.graph.nodes[node.args] if isinstance(node, Call) else ()
    return elements(case.graph.nodes[args[0]]) if type(args) is tuple and args else ()


def _inner(case: Case, reader: TensorReader, ref: Ref) -> Ref:
    """The tensor in a Parameter: a state dict holds it detached."""
    node = case.graph.nodes[ref]
    args = case.graph.nodes[node.args] if isinstance(node, Call) else ()
    if type(args) is tuple and args and reader.tensor(args[0]) is not None:
        return args[0]
    return ref


def _version(name: str, buffers: list[str]) -> int:
    last = name.rpartition(".")[2]
    norm = last.startswith(_NORMS) or last.endswith("BatchNorm")
    return (
        2 if norm and name.startswith("torch.nn.modules.") and ("num_batches_tracked" in buffers or not buffers) else 1
    )
