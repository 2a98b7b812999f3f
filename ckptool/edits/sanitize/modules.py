"""Pickled modules: the state dict that ``module.state_dict()`` would give.

Sources: ``torch/nn/modules/module.py`` (``state_dict``, ``_save_to_state_dict``), the ``_version`` of torch's modules.
"""

from __future__ import annotations

from typing import Final

from ...base.text import counted
from ...checkpoint.objects import elements, mapping
from ...checkpoint.tensors import TensorReader
from ...pickles.nodes import Call, Dict, Ref, Set
from .case import UNKNOWN, Case, Plain, Verdict

_DEPTH: Final = 200
_PARTS: Final = frozenset(("_parameters", "_buffers", "_modules"))
#: The buffers of the modules whose state dict says version 2: that is since they count batches.
_NORM: Final = frozenset(("running_mean", "running_var", "num_batches_tracked"))
#: Torch's own modules with another version than 1, by the beginning of their name.
_VERSIONS: Final = (
    (("torch.nn.modules.batchnorm.", "torch.nn.modules.instancenorm."), 2),
    (tuple(f"torch.ao.nn.intrinsic.qat.modules.conv_fused.ConvBn{end}" for end in ("1d", "2d", "3d", "ReLU")), 2),
    (
        tuple(
            f"{module}.observer.{name}"
            for module in ("torch.ao.quantization", "torch.quantization")
            for name in ("MinMax", "MovingAverage", "PerChannelMinMax", "Histogram")
        ),
        3,
    ),
)
#: Modules that put more in their state dict than parameters and buffers: packed weights, which no tensor holds.
_PACKED: Final = (
    *("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.", "torch.ao.nn.sparse.quantized."),
    *("torch.nn.quantized.", "torch.nn.intrinsic.quantized."),
)
_SPECTRAL: Final = "torch.nn.utils.spectral_norm.SpectralNormStateDictHook"


class _State:
    """A state dict in the making: its entries, the metadata of each module, and how many hooks are not run."""

    def __init__(self, reader: TensorReader) -> None:
        self.reader = reader
        self.entries: list[tuple[str, Ref]] = []
        self.metadata: list[tuple[str, list[tuple[Ref, Ref]]]] = []
        self.hooks = 0
        #: Modules that were entered: a shared one once for each name, but not without end.
        self.open: set[Ref] = set()


def is_module(case: Case) -> bool:
    """Has it the attributes that every nn.Module has?"""
    if not case.node.states:
        return False
    nodes = case.graph.nodes
    return {nodes[key] for key, _ in case.state() or () if isinstance(nodes[key], str)} >= _PARTS


def state_dict_of(case: Case, reader: TensorReader) -> Verdict:
    """Parameters and persistent buffers by their dotted names, with ``_metadata``."""
    state = _State(reader)
    if not _collect(case, state, ""):
        return UNKNOWN
    rewrite = case.rewrite
    pairs = [part for name, ref in state.entries for part in (rewrite.add(name), ref)]
    held = []
    for path, facts in state.metadata:
        held += [rewrite.add(path), rewrite.add(case.dict_of(facts))]
    metadata = case.call("collections", "OrderedDict").filled((), held, ())
    attributes = Dict([rewrite.constant("_metadata"), rewrite.add(metadata)])
    made = case.call("collections", "OrderedDict").filled((), pairs, (rewrite.add(attributes),))
    words = f"state dict, {counted(len(state.entries), 'tensor')}; other attributes of the module are left out"
    if state.hooks:
        words += f", {counted(state.hooks, 'hook')} of it not run"
    return Plain(made, words)


def _collect(case: Case, state: _State, prefix: str) -> bool:
    """Add what one module and those in it hold; False for modules without end or of another shape."""
    nodes = case.graph.nodes
    parts = {nodes[key]: value for key, value in case.state() or () if isinstance(nodes[key], str)}
    if case.ref in state.open or len(state.open) > _DEPTH or not parts.keys() >= _PARTS:
        return False
    if case.name.startswith(_PACKED):
        return False
    buffers, parameters = _named(case, parts["_buffers"]), _named(case, parts["_parameters"])
    constant = case.rewrite.constant
    facts = [(constant("version"), constant(_version(case.name, {name for name, _ in buffers})))]
    skipped = {nodes[ref] for ref in _members(case, parts.get("_non_persistent_buffers_set", -1))}
    state.entries += (
        (prefix + name, _inner(case, state.reader, ref)) for name, ref in parameters if nodes[ref] is not None
    )
    state.entries += ((prefix + name, ref) for name, ref in buffers if nodes[ref] is not None and name not in skipped)
    state.metadata.append((prefix.removesuffix("."), facts))
    _hooks(case, state, parts.get("_state_dict_hooks", -1), facts)
    state.open.add(case.ref)
    for name, ref in _named(case, parts["_modules"]):
        node = nodes[ref]
        if node is None:
            continue
        if not isinstance(node, Call):
            return False
        if not _collect(Case(case.rewrite, ref, node, case.storages), state, f"{prefix}{name}."):
            return False
    state.open.discard(case.ref)
    return True


def _hooks(case: Case, state: _State, ref: Ref, facts: list[tuple[Ref, Ref]]) -> None:
    """What the hooks of a module add to its state dict: known of spectral_norm, which notes its version."""
    versions = []
    for _, hook in (mapping(case.graph, ref) or ()) if ref >= 0 else ():
        node = case.graph.nodes[hook]
        inner = Case(case.rewrite, hook, node, case.storages) if isinstance(node, Call) else None
        name = _spectral(inner) if inner is not None and inner.name == _SPECTRAL else None
        if name is None:
            state.hooks += 1
        else:
            versions.append((case.rewrite.add(f"{name}.version"), case.rewrite.constant(1)))
    if versions:
        facts.append((case.rewrite.constant("spectral_norm"), case.rewrite.add(case.dict_of(versions))))


def _spectral(hook: Case) -> str | None:
    fn = hook.attribute("fn")
    node = hook.graph.nodes[fn] if fn >= 0 else None
    if not isinstance(node, Call):
        return None
    name = Case(hook.rewrite, fn, node, hook.storages).attribute("name")
    text = hook.graph.nodes[name] if name >= 0 else None
    return text if isinstance(text, str) else None


def _named(case: Case, ref: Ref) -> list[tuple[str, Ref]]:
    nodes = case.graph.nodes
    pairs = mapping(case.graph, ref) or ()
    return [(name, value) for key, value in pairs if isinstance(name := nodes[key], str)]


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


def _version(name: str, buffers: set[str]) -> int:
    """The ``_version`` of the class. It is not in the file: known of torch's own, and what counts batches has 2."""
    if name.startswith("torch."):
        version = next((number for names, number in _VERSIONS if name.startswith(names)), 1)
        return version if version != 2 or "num_batches_tracked" in buffers or not buffers & _NORM else 1
    return 2 if buffers >= _NORM else 1
