"""Find constructs that torch would execute and ckptool does not follow, because no library writes them.

Examples are a tensor that BUILD changes after its creation, a mapping made of anything but mappings and pairs, or a
container that changes after a call has copied it. For these, ``TensorReader`` and ``objects.mapping`` would see other
values than torch.load. ``Checkpoint.survey`` raises an error for them, because any storage may be in use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Final

from ..base.text import words
from ..pickles import opcodes as op
from ..pickles.nodes import CONTAINERS, Buffer, Call, Dict, Global, Graph, Instance, Node, Persistent, Ref, children
from .objects import MAPPING_CLASSES, callable_name, initial_pairs, list_items, mapping, state_items
from .tensors import OLD_PARAMETERS, USUAL, TensorReader, view_id

#: Classes that copy their argument when called.
_COPYING: Final = MAPPING_CLASSES | words(
    "builtins.set builtins.frozenset builtins.list builtins.tuple builtins.bytearray torch.Size collections.deque"
)
_WITH_STATE: Final = "torch._utils._rebuild_parameter_with_state"
#: Functions that make a Parameter from their first argument; None gives an empty Parameter.
_PARAMETERS: Final = OLD_PARAMETERS | {"torch._utils._rebuild_parameter", _WITH_STATE}
#: Functions whose fourth argument sets attributes.
_STATEFUL: Final = ("torch._tensor._rebuild_from_type_v2", _WITH_STATE)
#: Attributes of a tensor that are descriptors: setting one changes the values or the kind of the tensor.
_DESCRIPTORS: Final = words("""
    data grad requires_grad names real imag grad_dtype volatile name H T mH mT _backward_hooks _base _cdata _grad
    _grad_fn _post_accumulate_grad_hooks _version device dtype grad_fn is_leaf is_nested is_quantized is_sparse itemsize
    layout nbytes ndim output_nr retains_grad shape
""")


def unsupported(graph: Graph, reader: TensorReader) -> dict[Ref, str]:
    """Return a description of each unsupported construct, by reference; {} for a pickle that a library wrote."""
    nodes, texts = graph.nodes, dict[Ref, str]()
    names: dict[Ref, str] = {}  # the names of called functions; "" for an uninteresting one
    copies: list[tuple[Ref, Call]] = []
    # The ids of storages and the arguments of tensor calls that could also be used as values.
    parts = set[Ref]()
    changed, fetched, storage = graph.filled_at.keys(), graph.fetched, reader.storage
    # Nearly all of hundreds of thousands of nodes are usual, so each extra test per node costs as much as reading it.
    for ref, node in graph.of_type(Call):
        name = names.get(node.func)
        if name is None:
            name = callable_name(graph, node.func)
            name = names[node.func] = name if _is_watched(name) else ""
        if not name:
            continue
        args = nodes[node.args]
        if name not in MAPPING_CLASSES:
            if name not in _COPYING and (fetched is None or node.args in fetched or type(args) is not tuple):
                parts.add(node.args)
            usual = name == USUAL and type(args) is tuple and len(args) > 0 and changed.isdisjoint(args)
        else:
            usual = args == ()
        if not usual or node.filling is not None:
            text = _call_text(graph, reader, ref, node, name, copies)
            if text:
                texts[ref] = text
    for ref, mention in graph.of_type(Persistent):
        if fetched is not None and mention.pid not in fetched and mention.filling is None and storage(ref) is not None:
            continue  # nearly every mention
        if fetched is None or mention.pid in fetched or type(nodes[mention.pid]) is not tuple:
            parts.add(mention.pid)
        if storage(ref) is None:
            # Torch may read the id as a storage although ``TensorReader`` does not.
            pid = nodes[mention.pid]
            tag = nodes[pid[0]] if type(pid) is tuple and pid else None
            if isinstance(pid, Call) or isinstance(tag, Call) or tag == "storage" or tag == b"storage":
                texts[ref] = "a storage is described in a way that no version of torch writes"
        elif mention.filling is not None and (mention.items or mention.pairs or mention.states):
            texts[ref] = "a storage is changed after it is created"
    texts = dict(sorted(texts.items()))
    if graph.refused.get(op.NEXT_BUFFER):
        text = "the pickle takes bytes from outside of the file"
        texts.update((ref, text) for ref, node in graph.of_type(Buffer) if node.inner < 0)
    if copies:
        texts.update(_shared_or_changed(graph, copies))
    # An edit gives a storage another id, and its tensors other arguments. A value must not change with them.
    text = "the id of a storage, or an argument of a tensor, is used as a value, too"
    if parts:
        texts.update((ref, text) for ref in _values(nodes, parts) if nodes[ref] != ())
    return texts


def _values(nodes: Sequence[Node], parts: set[Ref]) -> set[Ref]:
    """Return the members of ``parts`` that are also held by a container or by an object that is filled."""
    tuples = [node for node in nodes if type(node) is tuple]
    held = [children(node) for node in nodes if type(node) in CONTAINERS]
    for node in nodes:
        if isinstance(node, Instance) and node.filling is not None:
            held += node.items, node.pairs, node.states
    return parts.intersection(chain(chain.from_iterable(tuples), chain.from_iterable(held)))


def _is_watched(name: str) -> bool:
    if name in _COPYING or name in OLD_PARAMETERS:
        return True
    module, _, last = name.rpartition(".")
    if module in ("torch._utils", "torch._tensor", "torch.tensor"):
        return last.startswith("_rebuild")
    return module in ("torch", "torch.cuda", "torch.sparse", "torch.cuda.sparse") and last.endswith("Tensor")


def _call_text(
    graph: Graph, reader: TensorReader, ref: Ref, node: Call, name: str, copies: list[tuple[Ref, Call]]
) -> str:
    """Describe the unsupported construct in a call, or return "". Add a call that copies its argument to ``copies``."""
    nodes, args = graph.nodes, graph.nodes[node.args]
    given = list_items(args)
    first = reader.tensor(given[0]) if given else None
    if name == "torch._utils._rebuild_device_tensor_from_cpu_tensor" and first is not None and len(given) > 1:
        dtype = nodes[given[1]]
        if isinstance(dtype, Global) and dtype.name != first.dtype:
            return "a tensor becomes one of another dtype when it is read"
    if name in _COPYING:
        if first is not None and isinstance(nodes[given[0]], Call | Persistent):
            return "a container is made from the elements of a tensor"
        if given:
            copies.append((ref, node))
        return _mapping_text(graph, node, name, args) if name in MAPPING_CLASSES else ""
    if name in _PARAMETERS and (not args or (given and nodes[given[0]] is None)):
        return "a parameter is created without a tensor"
    if node.filling is not None and (node.items or node.pairs or node.states):
        # Torch 0.1 to 0.3 wrote the state (requires_grad, volatile, hooks) of a parameter.
        state = list_items(nodes[node.states[0]]) if len(node.states) == 1 and not (node.items or node.pairs) else ()
        if name not in OLD_PARAMETERS or len(state) != 3 or type(nodes[state[0]]) is not bool:
            return "a tensor is changed after it is created"
    if name in OLD_PARAMETERS:
        return ""
    if name.endswith("Tensor"):
        return f"a tensor is created by {name}"
    if name in _STATEFUL and len(given) > 3 and _sets_descriptor(graph, reader, name, given):
        return "a special attribute of a tensor is set"
    is_late = any(graph.filled_at.get(arg, 0) > ref for arg in given)
    return "an argument of a tensor is changed after the call" if is_late else ""


def _mapping_text(graph: Graph, node: Call, name: str, args: Node) -> str:
    short = name.rpartition(".")[2]
    if initial_pairs(graph, node) is None:
        return f"a mapping is made from something other than pairs: {short}(...)"
    if node.items:
        return f"a mapping is filled like a list: {short}"
    if node.states and short == "OrderedDict":
        if len(node.states) > 1:
            return "a mapping is built twice"
        state = graph.nodes[node.states[0]]
        if state is not None and mapping(graph, node.states[0]) is None:
            return "a mapping has a state that is not a dict"
    return ""


def _sets_descriptor(graph: Graph, reader: TensorReader, name: str, args: Sequence[Ref]) -> bool:
    """Return whether the state of a tensor sets more than plain attributes (``_set_obj_state`` in torch/_utils.py)."""
    nodes = graph.nodes
    for key, value in state_items(graph, args[3]):
        attribute = nodes[key]
        if type(attribute) is not str or not (attribute in _DESCRIPTORS or attribute.startswith(("__", "is_"))):
            continue
        own, other = (reader.tensor(args[0]), reader.tensor(value)) if attribute == "data" else (None, None)
        same = own is not None and other is not None and own.storage and view_id(own) == view_id(other)
        same = same or (attribute == "requires_grad" and type(nodes[value]) is bool and nodes[value] is nodes[args[1]])
        if not (same and name == _WITH_STATE):
            return True
    return False


def _shared_or_changed(graph: Graph, copies: Sequence[tuple[Ref, Call]]) -> dict[Ref, str]:
    """Describe copied containers that change after the call, and copied mappings that are also used elsewhere."""
    nodes, filled_at, texts = graph.nodes, graph.filled_at, dict[Ref, str]()
    #: The argument of each mapping call, and when each argument was filled last.
    contents: dict[Ref, Ref] = {}
    latest: dict[tuple[Ref, bool], int] = {}
    for ref, node in copies:
        if node.op in (op.NEWOBJ, op.NEWOBJ_EX):
            continue
        args, is_mapping = list_items(nodes[node.args]), callable_name(graph, node.func) in MAPPING_CLASSES
        for source in args:
            if (source, is_mapping) not in latest:
                copied = (source, *list_items(nodes[source])) if is_mapping else (source,)
                latest[source, is_mapping] = max(filled_at.get(part, 0) for part in copied)
        if any(latest[source, is_mapping] > ref for source in args):
            texts[ref] = "a container is changed after a call copied it"
        elif is_mapping:
            contents[ref] = args[-1]
    wanted = {ref for ref in contents.values() if isinstance(nodes[ref], Dict | Call) or list_items(nodes[ref])}
    uses: Counter[Ref] = Counter()
    for other in nodes if wanted else ():
        uses.update(wanted.intersection(children(other)))
    text = "a mapping is made from one that is used elsewhere, too"
    return texts | {ref: text for ref, content in contents.items() if uses[content] > 1}
