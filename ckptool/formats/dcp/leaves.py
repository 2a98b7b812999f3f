"""The items that a checkpoint becomes in a DCP folder.

Source: ``traverse_state_dict`` (torch/distributed/checkpoint/_traverse.py).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ...base.dtypes import BY_NAME, Dtype
from ...base.errors import RefusedError
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.objects import callable_name, class_name, mapping
from ...checkpoint.objects import elements as elements_of
from ...checkpoint.paths import as_children, joined
from ...checkpoint.tensors import Tensor
from ...checkpoint.views import without_views
from ...pickles.nodes import Call, Graph, List, Ref
from ..promises import Facts

#: Mappings within mappings that are followed.
_DEPTH: Final = 200
#: Arguments of ``_rebuild_tensor_v2`` without the dict of its bits.
_PLAIN_ARGUMENTS: Final = 6


class Leaf(NamedTuple):
    """What becomes an item: its flat name, its place in the object, and in words as ``inspect`` spells it.

    ``tensor`` is None for an object; ``plain`` says that it becomes a tensor in pieces rather than an object.
    """

    name: str
    path: tuple[str | int, ...]
    where: str
    ref: Ref
    tensor: Tensor | None
    plain: bool


class Items:
    """The items of an object, and what does not come through."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.graph = checkpoint.graph
        self.reader = checkpoint.survey.reader
        self.leaves: list[Leaf] = []
        #: Paths of containers that are another kind afterwards, or gone.
        self.containers: list[str] = []
        #: Paths of entries whose keys nothing can be called after: tuples, bytes, objects.
        self.nameless: list[str] = []
        self._terminal: dict[Ref, bool] = {}
        if mapping(self.graph, self.graph.root) is None or self.reader.tensor(self.graph.root):
            what = f"a DCP folder holds a dict, and this is {class_name(self.graph, self.graph.root)}"
            raise RefusedError(what, path=checkpoint.path, next="torch.save holds any object")
        self._follow(self.graph.root, (), "", 0)
        names: dict[str, str] = {}
        for leaf in self.leaves:
            if leaf.name in names:
                what = f"{names[leaf.name]} and {leaf.where} would both be called {leaf.name!r}"
                raise RefusedError(what, path=checkpoint.path, next="rename one: ckptool rename")
            names[leaf.name] = leaf.where

    def _follow(self, ref: Ref, path: tuple[str | int, ...], where: str, depth: int) -> None:
        if depth > _DEPTH:
            raise RefusedError(f"it is nested deeper than {_DEPTH} levels", path=self.checkpoint.path)
        node = self.graph.nodes[ref]
        tensor = self.reader.tensor(ref)
        inner = None if tensor else mapping(self.graph, ref)
        if inner is not None:
            if not inner and path:
                self.containers.append(where)
            for step, value, key_ref in as_children(self.graph, inner):
                spelled = joined(where, step)
                key = self.graph.nodes[key_ref]
                if type(key) not in (str, int, float, bool, type(None)):
                    self.nameless.append(spelled)
                    continue
                if not isinstance(key, str):
                    self.containers.append(spelled)
                self._follow(value, (*path, str(key)), spelled, depth + 1)
        elif isinstance(node, List) and not self._is_terminal(ref, depth):
            for number, value in enumerate(node.items):
                place, spelled = (*path, number), f"{where}[{number}]"
                if mapping(self.graph, value) is not None and not self._has_items(value, depth):
                    self._leaf(value, place, spelled)  # nobody loads a list with a hole
                else:
                    self._follow(value, place, spelled, depth + 1)
        else:
            self._leaf(ref, path, where)

    def _leaf(self, ref: Ref, path: tuple[str | int, ...], where: str) -> None:
        tensor = self.reader.tensor(ref)
        self.leaves.append(Leaf(".".join(map(str, path)), path, where, ref, tensor, self._is_plain(ref)))

    def _is_plain(self, ref: Ref) -> bool:
        tensor = self.reader.tensor(ref)
        return tensor is not None and plain_dtype(tensor) is not None and self._is_bare(ref)

    def _is_bare(self, ref: Ref) -> bool:
        """Is it a tensor or Parameter and nothing else: no attributes, no class of its own, no conjugate bit?

        What is more than that becomes an object, which keeps it.
        """
        node = self.graph.nodes[ref]
        if not isinstance(node, Call) or node.states:
            return False
        args = elements_of(self.graph.nodes[node.args])
        name = callable_name(self.graph, node.func).rpartition(".")[2]
        if name == "_rebuild_parameter" and args:
            return self._is_bare(args[0])
        if name not in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return False
        return len(args) <= _PLAIN_ARGUMENTS or not mapping(self.graph, args[-1])

    def _is_terminal(self, ref: Ref, depth: int) -> bool:
        """Is it a list that is stored as it is? One with mappings or plain tensors in it, in any list in it, is not.

        Who loads it looks at the list that the items make: what became an object is no tensor to him, and an empty
        mapping is not there.
        """
        if ref in self._terminal:
            return self._terminal[ref]
        if depth > _DEPTH:
            raise RefusedError(f"it is nested deeper than {_DEPTH} levels", path=self.checkpoint.path)
        self._terminal[ref] = True  # where it leads back to itself
        node = self.graph.nodes[ref]
        found = True
        for part in node.items if isinstance(node, List) else ():
            inner = self.graph.nodes[part]
            if isinstance(inner, List):
                found = found and self._is_terminal(part, depth + 1)
            elif self._is_plain(part) or self._has_items(part, depth):
                found = False
        self._terminal[ref] = found
        return found

    def _has_items(self, ref: Ref, depth: int) -> bool:
        """Is it a mapping with something else than empty mappings in it?"""
        if depth > _DEPTH:
            raise RefusedError(f"it is nested deeper than {_DEPTH} levels", path=self.checkpoint.path)
        inner = None if self.reader.tensor(ref) else mapping(self.graph, ref)
        return any(mapping(self.graph, value) is None or self._has_items(value, depth + 1) for _, value in inner or ())


def leaves(checkpoint: Checkpoint) -> list[Leaf]:
    """What becomes items. Raises RefusedError where two would have one name, or a folder cannot hold it."""
    return Items(checkpoint).leaves


def plain_dtype(tensor: Tensor) -> Dtype | None:
    """The dtype of a tensor that DCP stores in pieces; it copies elements, which not every dtype of torch allows."""
    dtype = BY_NAME.get(tensor.dtype)
    if tensor.kind != "dense" or not tensor.storage or dtype is None:
        return None
    odd = dtype.packed > 1 or dtype.name.startswith(("q", "bits", "float4"))
    return None if odd else dtype


def tensor_items(checkpoint: Checkpoint) -> Facts:
    """Return dtype and shape of each tensor that is stored in pieces, by the name of its item."""
    return {
        leaf.name: (leaf.tensor.dtype, leaf.tensor.shape)
        for leaf in leaves(checkpoint)
        if leaf.plain and leaf.tensor is not None
    }


def object_items(checkpoint: Checkpoint) -> dict[str, Graph]:
    """Return each object that is an item of its own, by name."""
    graph = without_views(checkpoint.graph)
    return {leaf.name: Graph(graph.nodes, leaf.ref, graph.style) for leaf in leaves(checkpoint) if not leaf.plain}
