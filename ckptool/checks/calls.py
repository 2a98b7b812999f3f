"""Calls that have no business in a checkpoint: what loading it without weights_only would run."""

from __future__ import annotations

from collections.abc import Container
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
    if not names:
        return []
    calls = [(ref, node) for ref, node in enumerate(graph.nodes) if type(node) is Call and node.func in names]
    called = {node.func for node in graph.nodes if type(node) is Call}
    return [
        f"{names[node.func]}({_arguments(graph, node)})"
        for ref, node in calls
        if not (names[node.func] == "builtins.getattr" and _is_harmless(graph, ref, node, names, called))
    ]


#: Classes within classes that torch itself pickles, which protocol 2 does by ``getattr(outer, name)``: of them nothing
#: is run. (outer class, name): ``ShardedTensor.__getstate__`` in torch/distributed/_shard/sharded_tensor/api.py.
_NESTED: Final = frozenset(
    (f"torch.distributed.{module}.ShardedTensor", "ProcessGroupState")
    for module in ("_shard.sharded_tensor.api", "_sharded_tensor.api")
)


def _is_harmless(graph: Graph, ref: Ref, node: Call, names: Container[Ref], called: Container[Ref]) -> bool:
    """Is a call of ``getattr`` one that only names a class of torch's own, or a method or class that nothing calls?"""
    refs = graph.nodes[node.args]
    if type(refs) is tuple and len(refs) == 2:
        outer, inner = graph.nodes[refs[0]], graph.nodes[refs[1]]
        if type(outer) is Global and type(inner) is str and (mapped_name(outer), inner) in _NESTED:
            return True
    return ref not in called and _is_member(graph, node, names)


def _is_member(graph: Graph, node: Call, names: Container[Ref]) -> bool:
    """Is it ``getattr(Class, 'name')``, as Python pickles a method, or a class within a class, and nothing that the
    names above reach? What is called with it, or is itself called, is another matter."""
    args = graph.nodes[node.args]
    if type(args) is not tuple or len(args) != 2 or args[0] in names or node.filling is not None:
        return False
    owner, name = graph.nodes[args[0]], graph.nodes[args[1]]
    if type(owner) is not Global or type(name) is not str or not name.isidentifier() or name.startswith("__"):
        return False
    # Modules and functions are in lower case: what looks like a class is one, or the name of one at least.
    words = owner.name.split(".")
    return mapped_name(owner).partition(".")[0] != "builtins" and all(word.lstrip("_")[:1].isupper() for word in words)


def _arguments(graph: Graph, node: Call) -> str:
    refs = graph.nodes[node.args]
    values = [graph.nodes[ref] for ref in refs[:4]] if type(refs) is tuple else []
    words = [repr(value) if isinstance(value, str | bytes | float | bool) else type(value).__name__ for value in values]
    return cut(", ".join(cut(word, 80) for word in words))
