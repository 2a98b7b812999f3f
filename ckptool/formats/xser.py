"""Checkpoints of torch_xla's ``xser.save`` and of AWS Neuron: one file, and a folder with one file per tensor.

``FILE`` holds a ``TensorReference`` for each tensor, whose ``tid`` names ``FILE.tensors/tensor_TID.pt``, written by
``torch.save``. Source: ``torch_xla/utils/serialization.py``, ``neuronx_distributed/parallel_layers``.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Final

from ..base.findings import INCOMPLETE, Finding
from ..base.text import join_limited, pluralize
from ..checkpoint.objects import attributes, callable_name
from ..files.folders import Folder, open_folder
from ..files.sources import FolderSource
from ..pickles.nodes import Call, Global, Graph, Ref
from .folders import opening
from .joined import RankFile, RankFiles

#: The folder has the name of the file with this suffix.
TENSORS: Final = ".tensors"
_REFERENCE: Final = "TensorReference"


class Referenced(RankFiles):
    """The file, with its references replaced by the tensors that they name."""

    format = "xser"
    parts_words = "the file and the files of its tensors"

    def __init__(self, folder: Folder, name: str, stack: ExitStack) -> None:
        super().__init__(folder)
        main = self.open_file(name, stack)
        if main is None:
            raise self.errors[0]
        self.references = references(main.graph)
        if not self.references:
            return
        tensors: dict[int, RankFile | None] = {}
        for ref, tid in self.references.items():
            if tid not in tensors:
                tensors[tid] = self.open_file(f"{name}{TENSORS}/tensor_{tid}.pt", stack)
            file = tensors[tid]
            if file is not None:
                self.put(main, ref, self.graft(file, file.graph.root))
        self.build(self.graft(main, main.graph.root))
        self.writer = f"torch_xla's xser.save: {pluralize(len(tensors), 'tensor')} in {name}{TENSORS}"


def references(graph: Graph) -> dict[Ref, int]:
    """Return the references to tensors in other files, with the numbers of these files; {} for most graphs."""
    if not any(node.name == _REFERENCE for _, node in graph.of_type(Global)):
        return {}
    found: dict[Ref, int] = {}
    for ref, node in graph.of_type(Call):
        made = callable_name(graph, node.func)
        args = graph.nodes[node.args]
        if made.startswith("copyreg.") and type(args) is tuple and args:
            made = callable_name(graph, args[0])
        if made.rpartition(".")[2] == _REFERENCE:
            values = {graph.nodes[key]: graph.nodes[value] for key, value in attributes(graph, node)}
            tid = values.get("tid")
            if type(tid) is int and 0 <= tid < 1 << 48:
                found[ref] = tid
    return found


def missing_tensors(graph: Graph, path: str) -> list[Finding]:
    """Return the problem of a file whose folder of tensors is missing; [] for any other file."""
    tids = sorted(set(references(graph).values()))
    if not tids:
        return []
    files = join_limited([f"tensor_{tid}.pt" for tid in tids], most=3)
    what = f"its tensors are in {os.path.basename(path)}{TENSORS}, which is not there: {files}"
    return [Finding(INCOMPLETE, "error", what, refused=True)]


def read(path: str) -> tuple[FolderSource, Referenced] | None:
    """Open a file with its folder of tensors; return None for a file without references. Raises UnreadableError or a
    subclass if the file itself cannot be read. A missing tensor file becomes a problem of the container."""
    folder, name = os.path.split(path)
    with opening(path) as stack:
        container = Referenced(open_folder(folder), name, stack)
        if container.references:
            return FolderSource(path, container.files, folder=path + TENSORS), container
    stack.close()
    return None
