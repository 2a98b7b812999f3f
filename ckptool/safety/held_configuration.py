"""Find configuration in the values of a pickle: dicts and texts that a loader reads after the tensors.

``torch.load`` runs none of it. Lightning imports the name in ``_instantiator`` among the hyperparameters
(lightning/pytorch/core/saving.py), mmengine runs ``cfg`` as Python (mmengine/infer/infer.py), and hydra's
``instantiate`` calls the name in a saved ``_target_``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..pickles.nodes import Call, Dict, Graph, List, Node, Persistent, Ref

if TYPE_CHECKING:
    from .configuration import ActivePart

#: Every key in the rules of ``configuration``, listed here because most pickles have none of them and need not import
#: the rules; a test compares the two.
KEYS: Final = frozenset(
    (
        *("cfg", "class_name", "class_path", "imports", "loader_module", "parent_library", "target", "type", "types"),
        *("_attn_implementation", "_class_name", "_class_path", "_component_", "_instantiator", "_target_"),
        *("__kind__", "__loader__", ":serialized:", "activation_fn", "activation_function", "attn_implementation"),
        *("auto_map", "custom_generate", "custom_imports", "custom_ops_library", "custom_pipeline"),
        *("custom_pipelines", "megatron_core", "sbert_ce_default_activation_function", "tokenizer_class"),
        *("trust_remote_code", "py/function", "py/iterator", "py/mod", "py/newargs", "py/newargsex", "py/newobj"),
        *("py/object", "py/property", "py/reduce", "py/repr", "py/type"),
    )
)
#: Shorter texts hold no configuration.
_SHORT: Final = 8
#: A text that may hold a key with its value, a tag, a call, a template, or a base64 pickle. Names of tensors and
#: modules do not look like this.
_TEXT: Final = r"[\s\S]{0,4096}?[:={!(][\s\S]{5}|gA|UEsDB"
#: Each such text has one of these. Most pickles have none in all their texts together, which is soon seen.
_MARKS: Final = (":", "=", "{", "!", "(", "gA", "UEsDB")
#: Maximum characters of text read in one pickle, and the cost of each text in addition to its characters.
_MAX_TEXT: Final = 40 << 20
_COST: Final = 100


def held_findings(graph: Graph) -> list[ActivePart]:
    """Return the keys and texts among the values of a pickle that make a loader run code."""
    nodes = graph.nodes
    texts = _texts(graph) if _has_marks(graph.strings) else []
    has_keys = not KEYS.isdisjoint(graph.strings)
    if not texts and not has_keys:
        return []
    from ..base.text import human_bytes

    # imported only if something looks like configuration
    from .configuration import ActivePart, key_findings, text_findings
    from .outcomes import UNKNOWN

    found: list[ActivePart] = []
    if has_keys:
        for pairs in _mappings(graph):
            names = [(nodes[key], value) for key, value in zip(pairs[::2], pairs[1::2], strict=False)]
            if any(type(name) is str and name in KEYS for name, _ in names):
                others = {name: _value(nodes, value) for name, value in names if type(name) is str}
                found += (item for name, value in others.items() for item in key_findings(name, value, others))
    left = _MAX_TEXT
    for text in dict.fromkeys(texts):
        left -= len(text) + _COST
        if left < 0:
            return [
                *found,
                ActivePart(f"only {human_bytes(_MAX_TEXT)} of its texts are read", UNKNOWN),
            ]
        found += text_findings(text)
        found += (item._replace(message=item.message.lstrip(": ")) for item in key_findings("", text, {}))
    return found


def may_be_configuration(strings: Collection[str]) -> bool:
    """Return whether ``held_findings`` may find anything in a pickle with these strings."""
    return not KEYS.isdisjoint(strings) or _has_marks(strings)


def _has_marks(strings: Iterable[str]) -> bool:
    together = "\n".join([text for text in strings if len(text) > _SHORT])
    return any(mark in together for mark in _MARKS)


def _texts(graph: Graph) -> list[str]:
    """Return the texts that may hold configuration, except the source code in the persistent ids of old files."""
    nodes, is_text = graph.nodes, re.compile(_TEXT).match
    sources = {text for _, node in graph.of_type(Persistent) for text in _parts(nodes[node.pid])}
    return [
        node
        for ref, node in enumerate(nodes)
        if type(node) is str and len(node) > _SHORT and is_text(node) and ref not in sources
    ]


def _parts(pid: Node) -> Sequence[Ref]:
    """Return the parts of a persistent id, where old torch files keep the source code of a class."""
    return pid if type(pid) is tuple else ()


def _mappings(graph: Graph) -> Iterator[Sequence[Ref]]:
    """Yield the keys and values, alternating, of each dict and of each object that is filled like a dict."""
    for _, node in graph.of_type(Dict):
        yield node.pairs
    for _, call in graph.of_type(Call):
        if call.filling is not None and call.pairs:
            yield call.pairs


def _value(nodes: Sequence[Node], ref: Ref) -> Any:
    """Return a value in the form returned by ``read_json``."""
    from .documents import NUMBER, UNSEEN, Nested

    node = nodes[ref]
    if node is None or type(node) in (str, bool):
        return node
    if type(node) in (int, float):
        return NUMBER
    if isinstance(node, Dict):
        inner = [nodes[item] for item in node.pairs[1::2]]
        return Nested(not inner, [], [text for text in inner if type(text) is str])
    if isinstance(node, tuple | List):
        items = node if isinstance(node, tuple) else node.items
        return [nodes[item] if type(nodes[item]) is str else UNSEEN for item in items[:4]]
    return UNSEEN
