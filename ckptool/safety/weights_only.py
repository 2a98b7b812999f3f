"""Predict, without torch, whether ``torch.load(weights_only=True)`` accepts a file, and what stops it.

The lists are in ``torch_lists``; the rules follow ``torch/_weights_only_unpickler.py``. Names are matched, not objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Final

from ..base.findings import Finding
from ..base.records import NamedTuple
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.objects import callable_name, mapped_name
from ..checkpoint.programs import program_of
from ..pickles import opcodes as op
from ..pickles.nodes import Call, Extension, Global, Graph, Instance, Node, Persistent, Ref, non_utf8_strings
from .torch_lists import DEFAULT, Rules, allowed, maps_python2, newobj_targets, refused_opcodes, registered, rules

#: Modules that torch always refuses, whatever the user lists.
BLOCKED_MODULES: Final = frozenset(("sys", "os", "posix", "nt"))

#: The rule that stops torch.load in both modes: it decodes such strings strictly unless the caller names another
#: encoding (``pickle_load_args`` in ``load``, ``load_binstring`` in _pickle.c, SHORT_BINSTRING in
#: _weights_only_unpickler.py).
NOT_UTF8: Final = "byte strings of Python 2 that are not UTF-8: UnicodeDecodeError"
#: The rule that stops torch.load at a pickle that is named like a safetensors file.
WRONG_SUFFIX: Final = "the name ends in .safetensors, so torch.load reads it as that"

#: The rule broken by a persistent id that torch.load does not know: torch raises an error, and runs nothing.
NOT_A_STORAGE: Final = "persistent id of something other than a storage"
_APPENDS: Final = "APPENDS to something other than a list"
_SETITEMS: Final = "SETITEMS on something other than a dict"
_DICTS: Final = ("collections.OrderedDict", "collections.Counter")

_FLAWS: Final = {
    "missing-storage": "bytes of a storage are missing",
    "storage-size": "a storage has another size than the pickle says",
    "geometry": "a tensor reaches beyond its storage",
}


ALLOWED: Final = "allowed"
NOT_LISTED: Final = "not on torch's list"
CALLED: Final = "called when loaded"
EXTENSION: Final = "copyreg extension"


class Blocker(NamedTuple):
    """One reason why torch.load refuses a file: a global that is not on its list, or a broken rule.

    Exactly one of ``name`` (as Python 3 resolves it) and ``rule`` is set. ``called`` says that loading without
    weights_only would call the global.
    """

    name: str
    rule: str
    number: int
    called: bool = False


class LoadPrediction(NamedTuple):
    """Whether this version of ``torch`` ``loads`` a file; ``blockers`` are the reasons against it."""

    torch: str
    loads: bool
    blockers: tuple[Blocker, ...]


def weights_only(checkpoint: Checkpoint, flaws: Sequence[Finding], torch: str = DEFAULT) -> LoadPrediction:
    """Predict ``torch.load(path, weights_only=True, map_location="cpu")`` in the version ``torch``, such as "2.6".

    ``flaws`` come from ``storage_flaws``. Failures that depend on the machine, such as a missing device, are not
    predicted.
    """
    program = program_of(checkpoint)
    if program is not None:
        # Its pickles are for another unpickler, so their names say nothing about torch.load.
        return LoadPrediction(torch, False, (Blocker("", f"{program.kind} is read by {program.loader}", 1),))
    if not checkpoint.pickled:
        refused = (problem.message for problem in checkpoint.container.problems if problem.refused_by_torch)
        rule = next(refused, "") or checkpoint.container.load_rule(checkpoint.source, torch)
        return LoadPrediction(torch, not rule, (Blocker("", rule, 1),) if rule else ())
    blockers = graph_blockers(checkpoint.graph, torch)
    for other in checkpoint.container.others if not checkpoint.needs_relayout else ():
        # Blockers that the main object also has, such as protocol rules, are listed once.
        known = {(blocker.name, blocker.rule) for blocker in blockers}
        blockers += [item for item in graph_blockers(other, torch) if (item.name, item.rule) not in known]
    broken = _container_rules(checkpoint, flaws, torch)
    blockers += [Blocker("", rule, count) for rule, count in broken.items()]
    return LoadPrediction(torch, not blockers, tuple(blockers))


def graph_blockers(graph: Graph, torch: str = DEFAULT) -> list[Blocker]:
    """Return the blockers in a pickle, whichever file holds it."""
    broken = Counter({f"opcode {op.NAMES[code]}": count for code, count in graph.refused.items()})
    if op.BINFLOAT in refused_opcodes(torch) and any(type(node) is float for node in graph.nodes):
        broken["opcode BINFLOAT"] += 1
    broken.update(broken_rules(graph, torch))
    broken.update(NOT_UTF8 for _ in non_utf8_strings(graph))
    return _globals_outside(graph, torch) + [Blocker("", rule, count) for rule, count in broken.items()]


def _globals_outside(graph: Graph, torch: str) -> list[Blocker]:
    """Return every global in the pickle that is not on torch's list, including popped ones, most frequent first."""
    listed = allowed(torch) | registered(torch)
    mapped = maps_python2(torch, graph.style.protocol)
    counts, called = Counter[str](), set[str]()
    for item in named_globals(graph, "", torch):
        name = item.mapped if mapped else f"{item.module}.{item.name}"
        if item.module != EXTENSION and (name not in listed or item.module in BLOCKED_MODULES):
            counts[item.mapped] += item.times
            if item.word == CALLED:
                called.add(item.mapped)
    return [Blocker(name, "", count, name in called) for name, count in counts.most_common()]


class NamedGlobal(NamedTuple):
    """A global as one pickle names it.

    ``module`` and ``name`` are spelled as in the pickle. ``mapped`` is ``module.name`` as Python 3 resolves it.
    ``word`` is one of the constants above; only a global that is not on torch's list is CALLED. ``times`` counts how
    often it is named. ``pickle`` is the place of the pickle.
    """

    module: str
    name: str
    mapped: str
    word: str
    times: int
    pickle: str


def named_globals(graph: Graph, where: str, torch: str) -> Iterator[NamedGlobal]:
    """Yield the globals of a pickle, each once, in the order of first use."""
    named: list[tuple[Ref, Global | Extension]] = [*graph.of_type(Global), *graph.of_type(Extension)]
    listed = allowed(torch) | registered(torch)
    times: dict[tuple[str, str], int] = {}
    called: set[tuple[str, str] | None] = set()
    for _, node in sorted(named, key=itemgetter(0)):
        spelling = _spelling(node)
        assert spelling is not None
        times[spelling] = times.get(spelling, 0) + 1
        if node.filling is not None:
            called.add(spelling)
    called.update(_spelling(graph.nodes[func]) for func in {node.func for _, node in graph.of_type(Call)})
    for spelling, count in times.items():
        mapped = mapped_name(Global(*spelling))
        word = ALLOWED if mapped in listed else CALLED if spelling in called else NOT_LISTED
        yield NamedGlobal(*spelling, mapped, word, count, where)


def _spelling(node: Node) -> tuple[str, str] | None:
    if type(node) is Global:
        return (node.module, node.name)
    return (EXTENSION, str(node.code)) if type(node) is Extension else None


def broken_rules(graph: Graph, torch: str) -> Counter[str]:
    """Count the objects in the pickle that break structural rules of the restricted unpickler."""
    known: Counter[str] | None = graph.cache.get((f"rules of torch {torch}", 0))
    if known is not None:
        return known
    broken: Counter[str] = Counter()
    graph.cache[f"rules of torch {torch}", 0] = broken
    nodes = graph.nodes
    version = rules(torch)
    makes = newobj_targets(torch)
    for _, outside in graph.of_type(Persistent):
        pid = nodes[outside.pid]
        first = nodes[pid[0]] if type(pid) is tuple and pid else None
        if first == "module" or first == b"module":
            broken["persistent id 'module': a class with its source"] += 1
        elif first != "storage" and first != b"storage":
            broken[NOT_A_STORAGE] += 1
        if outside.filling is not None and (outside.items or outside.pairs or outside.states):
            broken["change to a storage"] += 1
    for _, call in graph.of_type(Call):
        func = nodes[call.func]
        if type(func) is not Global:
            # a class from a 'module' record in the legacy format, or something invented
            broken["call of something other than a global"] += 1
        elif call.op == op.NEWOBJ or call.filling is not None:
            name = mapped_name(func)
            if call.op == op.NEWOBJ and not version.newobj_listed and name not in makes:
                broken[f"NEWOBJ of {name}"] += 1
            broken.update(_broken_by_filling(name, call, version))
    changed = sum(1 for _, cls in graph.of_type(Global) if cls.items or cls.pairs or cls.states)
    if changed:
        broken["change to a global"] += changed
    for ref, steps in graph.style.batches.items():
        # An empty batch leaves no trace in the node, but torch still checks the object.
        node, empty = nodes[ref], {code for code, count in steps if not count}
        if isinstance(node, Instance) and op.APPENDS in empty:
            broken[_APPENDS] += 1
        mapping = isinstance(node, Call) and callable_name(graph, node.func) in _DICTS
        if isinstance(node, Instance) and op.SETITEMS in empty and not mapping:
            broken[_SETITEMS] += 1
    return broken


def exploits(graph: Graph, torch: str) -> list[str]:
    """Return the actions that this torch's restricted unpickler performs, and that later versions refuse."""
    if rules(torch).checks_setitem:
        return []
    filled = (graph.nodes[call.func] for _, call in graph.of_type(Call) if call.filling is not None and call.pairs)
    changed = any(type(func) is Global and mapped_name(func).startswith("torch.") for func in filled)
    return [f"SETITEM changes a tensor: weights_only of torch {torch} does it, CVE-2026-24747"] if changed else []


def _broken_by_filling(name: str, node: Call, version: Rules) -> Iterator[str]:
    if node.items and not (version.appends_registered and name == "traceback.StackSummary"):
        yield _APPENDS
    if node.pairs and version.checks_setitem and name not in _DICTS:
        yield _SETITEMS
    buildable = name in ("torch.Tensor", "torch.nn.parameter.Parameter", "collections.OrderedDict")
    if version.build_listed:  # a class that is not on the list is already a blocker by name
        buildable = name not in ("_codecs.encode", "torch.serialization._get_layout")
    rebuilt = name.startswith("torch._utils._rebuild") or name == "torch._tensor._rebuild_from_type_v2"
    if node.states and not (rebuilt or buildable):
        yield "BUILD on something other than a tensor, parameter or OrderedDict"


def _container_rules(checkpoint: Checkpoint, flaws: Sequence[Finding], torch: str) -> Counter[str]:
    broken: Counter[str] = Counter()
    version = rules(torch)
    in_sequence = checkpoint.traits.storages_in_sequence
    for problem in checkpoint.container.problems:
        # A new layout keeps nothing from the container.
        if problem.refused_by_torch and not checkpoint.needs_relayout:
            broken[problem.message] += 1
    if checkpoint.path.endswith(".safetensors") and version.reads_safetensors:
        # torch.load decides by this suffix alone (torch/serialization.py, ``load``).
        broken[WRONG_SUFFIX] += 1
    for code, rule in _FLAWS.items():
        count = sum(flaw.code == code for flaw in flaws)
        if count and (code != "storage-size" or in_sequence or version.checks_record_size):
            broken[rule] += count
    broken.update(flaw.message for flaw in flaws if flaw.code == "arguments")
    for storage in checkpoint.survey.reader.storages.values():
        if storage.location == "meta" and not in_sequence:
            continue
        if storage.dtype.name == "unknown" or storage.cls == "_UntypedStorage":
            broken[f"storage class {storage.cls}"] += 1
    return broken
