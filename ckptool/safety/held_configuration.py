"""Find text in the values of a pickle on which a program may act after ``torch.load``, which runs none of it.

Lightning imports the name in ``_instantiator`` among the hyperparameters (lightning/pytorch/core/saving.py), mmengine
runs ``cfg`` as Python (mmengine/infer/infer.py), and hydra's ``instantiate`` calls the name in a saved ``_target_``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..base.text import cut, human_bytes, quoted
from ..checkpoint.objects import mapped_name
from ..pickles.nodes import Call, Dict, Global, Graph, List, Node, Persistent, Ref
from .outcomes import UNKNOWN
from .rules import acting_rules, word_lists

if TYPE_CHECKING:
    from .configuration import ActivePart

#: Shorter strings hold no text.
_SHORT: Final = 4
#: A string without any of these is neither code, settings, a template nor a pickle in base64.
_MARKS: Final = ("(", "{", "!", "\n", "=", ":", "gA", "UEsDB", "import ")
#: Maximum characters of text read in one pickle, and the cost of each string in addition to its characters.
_MAX_TEXT: Final = 40 << 20
_COST: Final = 100
#: Maximum number of containers in the path of a string.
_MAX_PATH: Final = 20


def held_findings(graph: Graph) -> tuple[list[ActivePart], str]:
    """Return the keys and strings among the values of a pickle on which a program may act, and a remark.

    The remark says where the pickle holds settings as text, which torch.load does not read; it may be "".
    """
    if not may_be_configuration(graph.strings):
        return [], ""
    # imported only if something looks like configuration
    from .configuration import ActivePart, holds_settings, key_findings, string_findings

    nodes, found, remark = graph.nodes, list[ActivePart](), ""
    owners: dict[Ref, tuple[Ref, Ref]] = {}
    for ref, pairs in _mappings(graph):
        for key, value in zip(pairs[::2], pairs[1::2], strict=False):
            if type(node := nodes[value]) is Call and node.filling is None:
                continue  # tensors are many, and hold no text
            owners[value] = (ref, -1 if value in owners and nodes[owners[value][1]] != nodes[key] else key)
        names = [nodes[key] for key in pairs[::2]]
        if not acting_rules().keys().isdisjoint([name for name in names if type(name) is str]):
            others = {str(name): _value(nodes, value) for name, value in zip(names, pairs[1::2], strict=False)}
            found += [part for name, value in others.items() for part in key_findings(name, value, others)]
    for ref, node in graph.of_type(List):
        owners.update((item, (ref, -1)) for item in node.items if type(nodes[item]) is str)
    sources = {text for _, node in graph.of_type(Persistent) for text in _parts(nodes[node.pid])}
    sources |= {
        text for _, call in graph.of_type(Call) if _is_bytes(nodes[call.func]) for text in _parts(nodes[call.args])
    }
    left, seen = _MAX_TEXT, set[str]()
    for ref, text in enumerate(nodes):
        if type(text) is not str or ref in sources or not _may_be_text(text) or text in seen:
            continue
        seen.add(text)
        left -= len(text) + _COST
        if left < 0:
            return [*found, ActivePart(f"only {human_bytes(_MAX_TEXT)} of its texts are read", UNKNOWN)], remark
        path = _path(nodes, owners, ref)
        parts = string_findings(text, path[-1] if path and owners[ref][1] >= 0 else "")
        if parts or (not remark and holds_settings(text)):
            place = ".".join(path)
            found += [part._replace(keys=(place, *part.keys) if place else part.keys) for part in parts]
            if not parts:
                under = f" under {quoted(cut(place, 120))}" if place else ""
                remark = f"holds {human_bytes(len(text))} of text{under}; programs that evaluate it run it"
    return found, remark


def may_be_configuration(strings: Collection[str]) -> bool:
    """Return whether ``held_findings`` may find anything in a pickle with these strings."""
    if not acting_rules().keys().isdisjoint(strings):
        return True
    together = "\0".join([text for text in strings if len(text) > _SHORT])
    return any(mark in together for mark in _MARKS) or any(map(_may_be_text, strings))


def _may_be_text(text: str) -> bool:
    if len(text) <= _SHORT:
        return False
    return any(mark in text for mark in _MARKS) or text.partition(".")[0] in word_lists()["acting_roots"]


def _is_bytes(func: Node) -> bool:
    """Return whether a function makes bytes of text, as protocols 0 to 2 write them."""
    return type(func) is Global and mapped_name(func) == "_codecs.encode"


def _parts(pid: Node) -> Sequence[Ref]:
    """Return the parts of a persistent id, where old torch files keep the source code of a class, or arguments."""
    return pid if type(pid) is tuple else ()


def _path(nodes: Sequence[Node], owners: dict[Ref, tuple[Ref, Ref]], ref: Ref) -> list[str]:
    """Return the keys that lead to a node."""
    keys: list[str] = []
    for _ in range(_MAX_PATH):
        if ref not in owners:
            break
        ref, key = owners[ref]
        name = nodes[key] if key >= 0 else None
        keys += [name] if type(name) is str else []
    return keys[::-1]


def _mappings(graph: Graph) -> Iterator[tuple[Ref, Sequence[Ref]]]:
    """Yield each dict, and each object that is filled like a dict, with its keys and values, alternating."""
    for ref, node in graph.of_type(Dict):
        yield ref, node.pairs
    for ref, call in graph.of_type(Call):
        if call.filling is not None and call.pairs:
            yield ref, call.pairs


def _value(nodes: Sequence[Node], ref: Ref) -> Any:
    """Return a value as plain Python data; an unknown object counts as text."""
    node = nodes[ref]
    if node is None or type(node) in (str, bool):
        return node
    if type(node) in (int, float):
        return 0
    if isinstance(node, Dict):
        return dict.fromkeys(node.pairs)
    return list(node if isinstance(node, tuple) else node.items) if isinstance(node, tuple | List) else "..."
