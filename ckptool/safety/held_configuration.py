"""Find text in the values of a pickle on which a program may act after ``torch.load``, which runs none of it.

Lightning imports the name in ``_instantiator`` among the hyperparameters (lightning/pytorch/core/saving.py), mmengine
runs ``cfg`` as Python (mmengine/infer/infer.py), and hydra's ``instantiate`` calls the name in a saved ``_target_``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

from ..base.lazy import regex
from ..base.text import human_bytes
from ..checkpoint.objects import mapped_name
from ..pickles.nodes import Call, Dict, Global, Graph, List, Node, Persistent, Ref, children
from .rules import UNKNOWN, acting_rules, word_lists

if TYPE_CHECKING:
    from .configuration import ActivePart

#: Shorter strings hold no text.
_SHORT: Final = 4
#: A string without any of these is neither code, settings, a template nor a pickle in base64. ``cuda:0`` has none. Each
#: begins with a fixed character, so the search skips all other characters.
_MARKS: Final = regex(r"\(|\{|!|\n|=|:(?!\d)|gA|UEsDB|import ")
#: Maximum characters of text read in one pickle, and the cost of each string in addition to its characters.
_MAX_TEXT: Final = 40 << 20
_COST: Final = 100
#: Maximum number of containers in the path of a string.
_MAX_PATH: Final = 20


def held_findings(graph: Graph) -> list[ActivePart]:
    """Return the keys and strings among the values of a pickle on which a program may act."""
    if not may_be_configuration(graph.strings):
        return []
    # imported only if something looks like configuration
    from .configuration import ActivePart, key_findings, string_findings

    nodes, found = graph.nodes, list[ActivePart]()
    owners: dict[Ref, tuple[Ref, Ref]] = {}  # the container of a value, and its key, or -1
    filled = ((ref, call.pairs) for ref, call in graph.of_type(Call) if call.filling is not None)
    for ref, pairs in chain(((ref, node.pairs) for ref, node in graph.of_type(Dict)), filled):
        keys, values = pairs[::2], pairs[1::2]
        for key, value in zip(keys, values, strict=False):
            if type(node := nodes[value]) is Call and node.filling is None:
                continue  # tensors are many, and hold no text
            owners[value] = (ref, -1 if value in owners and nodes[owners[value][1]] != nodes[key] else key)
        if not acting_rules().keys().isdisjoint([node for key in keys if type(node := nodes[key]) is str]):
            others = {str(nodes[key]): _value(nodes[value]) for key, value in zip(keys, values, strict=False)}
            found += [part for name, item in others.items() for part in key_findings(name, item, others)]
    for ref, node in graph.of_type(List):
        owners.update((item, (ref, -1)) for item in node.items if type(nodes[item]) is str)
    # Old torch files keep the source code of a class in a persistent id, and protocols 0 to 2 write bytes as text.
    functions = ((call.args, nodes[call.func]) for _, call in graph.of_type(Call))
    encoded = [args for args, func in functions if type(func) is Global and mapped_name(func) == "_codecs.encode"]
    parts_of = [*encoded, *(node.pid for _, node in graph.of_type(Persistent))]
    sources = {text for ref in parts_of if type(node := nodes[ref]) is tuple for text in node}
    left, seen = _MAX_TEXT, set[str]()
    for ref, text in enumerate(nodes):
        if type(text) is not str or ref in sources or not _may_be_text(text) or text in seen:
            continue
        seen.add(text)
        left -= len(text) + _COST
        if left < 0:
            return [*found, ActivePart(f"only {human_bytes(_MAX_TEXT)} of its texts are read", UNKNOWN)]
        path = _path(nodes, owners, ref)
        parts = string_findings(text, path[-1] if path and owners[ref][1] >= 0 else "")
        place = ".".join(path)
        found += [part._replace(keys=(place, *part.keys) if place else part.keys) for part in parts]
    return found


def may_be_configuration(strings: Collection[str]) -> bool:
    """Return whether ``held_findings`` may find anything in a pickle with these strings."""
    text = "\0".join(strings)
    if not acting_rules().keys().isdisjoint(strings) or _MARKS.search(text):
        return True
    roots = {name.partition(".")[0] for name in strings} if "." in text else strings
    return not word_lists()["acting_roots"].isdisjoint(roots)


def _may_be_text(text: str) -> bool:
    return len(text) > _SHORT and bool(_MARKS.search(text) or text.partition(".")[0] in word_lists()["acting_roots"])


def _value(node: Node) -> object:
    plain = node is None or type(node) in (str, bool, int, float)
    return node if plain else list(children(node)) if isinstance(node, Dict | List | tuple) else "..."


def _path(nodes: Sequence[Node], owners: dict[Ref, tuple[Ref, Ref]], ref: Ref) -> list[str]:
    keys: list[str] = []
    for _ in range(_MAX_PATH):
        if ref not in owners:
            break
        ref, key = owners[ref]
        name = nodes[key] if key >= 0 else None
        keys += [name] if type(name) is str else []
    return keys[::-1]
