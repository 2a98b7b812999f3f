"""Calls that have no business in a checkpoint: what loading it without weights_only would run."""

from __future__ import annotations

from typing import Final

from ..human import cut
from ..objects import mapped_name
from ..pickles.nodes import Call, Global, Graph, Ref

__all__ = ["suspicious_calls"]

#: Modules whose functions act on the machine or reach other functions. This list decides how loudly a call is
#: named, never that one is harmless: every global outside of torch's list is named in any case.
_MODULES: Final = frozenset(
    (
        *("os", "posix", "nt", "subprocess", "sys", "runpy", "importlib", "pty", "shutil", "socket", "ctypes", "code"),
        *("codeop", "webbrowser", "pickle", "_pickle", "marshal", "pip", "platform", "tempfile", "urllib.request"),
        *("http.client", "ftplib", "smtplib", "operator", "timeit", "cProfile", "pdb", "bdb", "doctest", "asyncio"),
        *("multiprocessing", "torch.hub", "torch.utils.cpp_extension", "torch.storage", "numpy.testing"),
    )
)
_BUILTINS: Final = frozenset(
    ("eval", "exec", "compile", "__import__", "getattr", "setattr", "delattr", "open", "input", "apply", "execfile")
)


def suspicious_calls(graph: Graph) -> list[str]:
    """The calls as a reader would write them, ``posix.system('echo')``, in the order of the pickle."""
    names: dict[Ref, str] = {}
    for ref, node in enumerate(graph.nodes):
        if type(node) is Global:
            name = mapped_name(node)
            module, _, function = name.rpartition(".")
            # torch.storage holds classes as well, which every checkpoint names.
            if module == "torch.storage" and function != "_load_from_bytes":
                continue
            roots = (module, module.partition(".")[0])
            if any(root in _MODULES for root in roots) or (module == "builtins" and function in _BUILTINS):
                names[ref] = name
    calls = (node for node in graph.nodes if type(node) is Call and node.func in names) if names else ()
    calls = (node for node in calls if not _is_nested_class(graph, node, names[node.func]))
    return [f"{names[node.func]}({_arguments(graph, node)})" for node in calls]


#: Classes within classes that torch itself pickles, which protocol 2 does by ``getattr(outer, name)``: of them nothing
#: is run. (outer class, name): ``ShardedTensor.__getstate__`` in torch/distributed/_shard/sharded_tensor/api.py.
_NESTED: Final = frozenset(
    (f"torch.distributed.{module}.ShardedTensor", "ProcessGroupState")
    for module in ("_shard.sharded_tensor.api", "_sharded_tensor.api")
)


def _is_nested_class(graph: Graph, node: Call, name: str) -> bool:
    refs = graph.nodes[node.args]
    if name != "builtins.getattr" or type(refs) is not tuple or len(refs) != 2:
        return False
    outer, inner = graph.nodes[refs[0]], graph.nodes[refs[1]]
    return type(outer) is Global and type(inner) is str and (mapped_name(outer), inner) in _NESTED


def _arguments(graph: Graph, node: Call) -> str:
    refs = graph.nodes[node.args]
    values = [graph.nodes[ref] for ref in refs[:4]] if type(refs) is tuple else []
    words = [repr(value) if isinstance(value, str | bytes | float | bool) else type(value).__name__ for value in values]
    return cut(", ".join(cut(word, 80) for word in words))
