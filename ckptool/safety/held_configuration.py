"""Find text in the values of a pickle on which a program may act after ``torch.load``, which runs none of it.

Lightning imports the name in ``_instantiator`` among the hyperparameters (lightning/pytorch/core/saving.py), mmengine
runs ``cfg`` as Python (mmengine/infer/infer.py), and hydra's ``instantiate`` calls the name in a saved ``_target_``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

from ..base.lazy import regex
from ..base.text import human_bytes
from ..checkpoint.objects import callable_name, called_constant, initial_pairs, list_items, mapped_name
from ..pickles.nodes import Call, Dict, Global, Graph, List, Node, Persistent, Ref, children
from .rules import UNKNOWN, acting_rules, word_lists

if TYPE_CHECKING:
    from .configuration import ActivePart

#: A string with none of these, and no colon but as in ``cuda:0``, is neither code, settings, a template nor base64.
_MARKS: Final = ("(", "{", "!", "\n", "=", "\\", "gA", "UEsDB", "import ", "import\t", "__.", "__]")
_ENCODE, _ARRAY = "_codecs.encode", "builtins.bytearray"
_FIRST: Final = regex(r"[^\w.](\w+)\.\w")  # the first part of a dotted name
#: Maximum characters of text read in one pickle, with the cost of each string, and of containers in its path.
_MAX_TEXT, _COST, _MAX_PATH = 40 << 20, 100, 20


def held_findings(graph: Graph) -> list[ActivePart]:
    """Return the keys and strings among the values of a pickle on which a program may act."""
    unusual = any(_makes_bytes(graph))
    if not (unusual or may_be_configuration(graph.strings)):
        return []
    from .configuration import ActivePart, key_findings, string_findings  # rarely needed

    nodes = graph.nodes
    found = [ActivePart("a call makes bytes in an unusual way, and is not followed", UNKNOWN)] * unusual
    owners: dict[Ref, tuple[Ref, Ref]] = {}  # the container of a value, and its key, or -1
    made = ((ref, [*(initial_pairs(graph, call) or ()), *call.pairs]) for ref, call in graph.of_type(Call))
    for ref, pairs in chain(((ref, node.pairs) for ref, node in graph.of_type(Dict)), made):
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
    encoded = [call.args for _, call in graph.of_type(Call) if callable_name(graph, call.func) == _ENCODE]
    hidden = {*encoded, *(node.pid for _, node in graph.of_type(Persistent))}
    members = chain.from_iterable(node for ref in hidden if type(node := nodes[ref]) is tuple)
    sources = {member for member in members if type(text := nodes[member]) is str and _may_be_text(text)}
    elsewhere = (other for ref, other in enumerate(nodes if sources else ()) if ref not in hidden)
    sources.difference_update(chain.from_iterable(map(children, elsewhere)))
    left, seen = _MAX_TEXT, set[str]()
    for ref, text in enumerate(nodes):
        if type(text) is not str or ref in sources or text in seen or not _may_be_text(text):
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


def _makes_bytes(graph: Graph) -> Iterator[bool]:
    """Yield, for each call that makes bytes, whether Python's pickler never writes it so."""
    makers = {mapped_name(node) for _, node in graph.of_type(Global)} & {_ENCODE, _ARRAY}
    for ref, call in graph.of_type(Call) if makers else ():
        if (name := callable_name(graph, call.func)) in makers:
            args = [called_constant(graph, arg) or graph.nodes[arg] for arg in list_items(graph.nodes[call.args])]
            usual = not args or args[1:] == ["latin-1"] or (len(args) == 1 and type(args[0]) is bytes)
            yield called_constant(graph, ref) is None and not (usual and name == _ARRAY)


def may_be_configuration(strings: Collection[str]) -> bool:
    """Return whether ``held_findings`` may find anything in a pickle with these strings."""
    return not acting_rules().keys().isdisjoint(strings) or _may_be_text("\0".join(strings))


def _may_be_text(text: str) -> bool:
    if any(mark in text for mark in _MARKS) or text.count(":") > text.count("cuda:") + text.count("cpu:"):
        return True
    return "." in text and not word_lists()["acting_roots"].isdisjoint(_FIRST.findall(f"\0{text}"))


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
