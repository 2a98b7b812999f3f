"""Calls that have no business in a checkpoint: what loading it without weights_only would run."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import Final

from ..human import cut
from ..objects import mapped_name
from ..pickles.nodes import Call, Dict, FrozenSet, Global, Graph, List, Node, Ref, Set, children

__all__ = ["suspicious_calls"]

#: Modules whose functions act on the machine or reach other functions. This list decides how loudly a call is
#: named, never that one is harmless: every global outside of torch's list is named in any case.
_MODULES: Final = frozenset(
    (
        *("os", "posix", "nt", "subprocess", "sys", "runpy", "importlib", "pty", "shutil", "socket", "ctypes", "code"),
        *("codeop", "webbrowser", "pickle", "_pickle", "marshal", "pip", "platform", "tempfile", "urllib.request"),
        *("http.client", "ftplib", "smtplib", "operator", "_operator", "timeit", "cProfile", "profile", "pdb", "bdb"),
        *("doctest", "asyncio", "multiprocessing", "torch.hub", "torch.utils.cpp_extension", "torch.storage"),
        *("numpy.testing", "numpy.f2py", "pkgutil", "io", "_io", "_posixsubprocess", "_winapi", "_thread", "threading"),
        *("pydoc", "trace", "venv", "ensurepip", "requests", "aiohttp", "httpx", "ssl", "telnetlib", "imaplib"),
        *("poplib", "socketserver", "xmlrpc", "shelve", "joblib", "http.server", "_socket", "select", "nntplib"),
        *("imp", "_imp", "_frozen_importlib", "_frozen_importlib_external", "py_compile", "compileall", "zipapp"),
        *("gzip", "bz2", "fileinput", "glob", "linecache", "tokenize", "filecmp", "mailbox", "mmap", "_pyio", "netrc"),
        *("sqlite3", "_sqlite3", "dbm", "gc", "fcntl", "faulthandler", "getpass", "readline", "site", "_posixshmem"),
        *("tkinter", "_tkinter", "turtle", "antigravity", "_xxsubinterpreters", "_interpreters", "_testcapi"),
        *("concurrent.futures", "pathlib.Path", "pathlib.PosixPath", "pathlib.WindowsPath", "test.support"),
        *("torch.distributed.run", "torch.distributed.launcher", "torch.utils.model_zoo"),
        *("distutils.file_util", "idlelib", "lib2to3", "zipimport", "_ctypes", "cffi", "posixpath.expandvars"),
        *("torch.serialization", "torch.utils.collect_env", "torch.utils.bottleneck", "torch.utils._config_module"),
        *("torch._inductor.codecache", "torch.jit.unsupported_tensor_ops", "torch.package"),
    )
)
#: Modules of those that hold classes and tables as well, which files name: what of them acts.
_PARTS: Final = {
    "torch.storage": frozenset(("_load_from_bytes",)),
    "torch.serialization": frozenset(("load", "_load", "_legacy_load")),
    "io": frozenset(("open", "open_code", "FileIO")),
    "_io": frozenset(("open", "open_code", "FileIO")),
    "threading": frozenset(("Thread", "Timer")),
    "torch.package": frozenset(("PackageImporter",)),
    "joblib": frozenset(("load",)),
}
_BUILTINS: Final = frozenset(
    (
        *("eval", "exec", "compile", "__import__", "getattr", "setattr", "delattr", "open", "input", "apply"),
        *("execfile", "breakpoint", "map", "filter", "globals", "locals", "vars", "help", "exit", "quit", "file"),
    )
)
#: Single functions elsewhere that run, import or read what they are given.
_FUNCTIONS: Final = frozenset(
    (
        *("functools.reduce", "itertools.starmap", "itertools.filterfalse", "itertools.takewhile"),
        *("itertools.dropwhile", "itertools.accumulate", "itertools.groupby", "types.FunctionType", "types.CodeType"),
        *("types.LambdaType", "functools.partialmethod", "numpy.load", "pandas.read_pickle"),
        *("numpy.ctypeslib.load_library", "logging.config.listen", "logging.config._resolve", "torch.load"),
        *("torch.jit.load", "uuid._get_command_stdout", "_osx_support._read_output", "site.execsitecustomize"),
        *("torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression", "builtins.object.__reduce__"),
        *("torch._dynamo.guards.GuardBuilder.get", "sched.scheduler", "atexit.register", "weakref.finalize"),
        *("tarfile.open", "tarfile.TarFile", "tarfile.TarFile.open", "zipfile.ZipFile", "zipfile.PyZipFile"),
        *("lzma.open", "lzma.LZMAFile", "codecs.open", "wave.open", "logging.FileHandler", "pstats.Stats"),
        *("signal.signal", "signal.raise_signal", "signal.alarm", "signal.setitimer", "signal.pthread_kill"),
        *("resource.setrlimit", "resource.prlimit", "tracemalloc.Snapshot.load", "unittest.main", "fsspec.open"),
        *("numpy.save", "numpy.savez", "numpy.savetxt", "numpy.fromfile", "numpy.loadtxt", "numpy.genfromtxt"),
        *("torch.save", "torch.from_file", "torch.jit._serialization.load", "torch.jit.save", "torch.onnx.export"),
        *("torch.ops.load_library", "torch.classes.load_library", "torch._C._load_for_lite_interpreter"),
        *("torch._C.import_ir_module", "torch._dynamo.utils.import_module", "pandas.eval", "numexpr.evaluate"),
        *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "dill.load", "dill.loads", "cloudpickle.load"),
        *("cloudpickle.loads", "sympy.sympify", "sympy.core.sympify.sympify", "psutil.Process", "psutil.Popen"),
        *("pkg_resources.run_script", "setuptools.setup", "IPython.embed", "IPython.start_ipython"),
    )
)
#: Parts of the longest name in these lists.
_DEEPEST: Final = max(name.count(".") + 1 for name in _MODULES | _FUNCTIONS)
#: It only holds a function with arguments, as models do (a layer's class with its options): what calls it matters.
_PARTIAL: Final = "functools.partial"
#: Containers: what is in them is not called.
_HOLDERS: Final = frozenset(
    (
        *("collections.OrderedDict", "collections.Counter", "builtins.dict", "builtins.list", "builtins.tuple"),
        *("builtins.set", "builtins.frozenset"),
    )
)


def _acts(name: str) -> bool:
    """Is it a function that acts on the machine, or takes a function or a name and may call what that is?"""
    module, _, function = name.rpartition(".")
    if module == "builtins":
        return function in _BUILTINS
    if name in _FUNCTIONS:
        return True
    # The package itself, and what is in it: os.path, or STACK_GLOBAL's os with path.join.__globals__.
    parts = module.split(".", _DEEPEST)
    for end in range(1, min(len(parts), _DEEPEST) + 1):
        root = ".".join(parts[:end])
        if root in _MODULES:
            return root not in _PARTS or (end == len(parts) and function in _PARTS[root])
    return False


def _acts_within(path: str) -> bool:
    """Does a dotted name lead into another module, ``argparse`` with ``_os.remove``?"""
    parts = [part.lstrip("_") for part in path.split(".")]
    # As many as a name of the lists has, and one to tell a longer name from it: of a megabyte of dots all is looked at.
    return any(_acts(".".join(parts[at : at + _DEEPEST + 2])) for at in range(len(parts) - 1))


def suspicious_calls(graph: Graph) -> list[str]:
    """The calls as a reader would write them, ``posix.system('echo')``, in the order of the pickle.

    So is one that is given what acts, as an argument, in a container or in a state: ``map(posix.system, ...)``.
    """
    nodes = graph.nodes
    names: dict[Ref, str] = {}
    partial: set[Ref] = set()
    for ref, node in enumerate(nodes):
        if type(node) is Global:
            name = mapped_name(node)
            if _acts(name) or ("." in node.name and _acts_within(node.name)):
                names[ref] = name
            elif name == _PARTIAL:
                partial.add(ref)
    if not names and not partial:
        return []
    calls = [(ref, node) for ref, node in enumerate(nodes) if type(node) is Call]
    called = {node.func for _, node in calls}
    harmless = {
        ref
        for ref, node in calls
        if names.get(node.func) == "builtins.getattr" and _is_harmless(graph, ref, node, names, called)
    }
    found = {ref for ref, node in calls if node.func in names and ref not in harmless}
    # What is made by a partial runs what that holds.
    found |= {ref for ref, node in calls if type(held := nodes[node.func]) is Call and held.func in partial}
    found |= _given(graph, calls, names.keys() - {node.func for ref, node in calls if ref in harmless}, found)
    said = {ref: f"{_called(graph, node, names)}({_arguments(graph, node)})" for ref, node in calls if ref in found}
    for ref in found - said.keys():
        node = nodes[ref]
        assert isinstance(node, Global)
        said[ref] = f"setattr({mapped_name(node)}, ...)"
    return [said[ref] for ref in sorted(said)]


def _called(graph: Graph, node: Call, names: Mapping[Ref, str]) -> str:
    """What a call calls: a name, or what a call gave."""
    if node.func in names:
        return names[node.func]
    func = graph.nodes[node.func]
    if isinstance(func, Call):
        return (
            f"{_called(graph, func, names)}({_arguments(graph, func)})"
            if type(graph.nodes[func.func]) is Global
            else "..."
        )
    return mapped_name(func) if isinstance(func, Global) else type(func).__name__.lower()


def _given(
    graph: Graph, calls: Sequence[tuple[Ref, Call]], acting: Collection[Ref], found: Collection[Ref]
) -> set[Ref]:
    """The calls and classes that what acts is given to: from each such global upwards, through whatever holds it."""
    nodes = graph.nodes
    if not acting:
        return set()
    above: dict[Ref, list[Ref]] = {}
    for ref, node in enumerate(nodes):
        if isinstance(node, tuple | List | Dict | Set | FrozenSet | Call | Global):
            held = children(node)
            # Names and calls of them are said already.
            for child in held if not isinstance(node, Call) else [part for part in held if part != node.func]:
                above.setdefault(child, []).append(ref)
    given: set[Ref] = set()
    seen, work = set(acting), list(acting)
    while work:
        for ref in above.get(work.pop(), ()):
            if ref in seen:
                continue
            seen.add(ref)
            work.append(ref)
            node = nodes[ref]
            if isinstance(node, Call) and ref not in found:
                func = nodes[node.func]
                if not (isinstance(func, Global) and mapped_name(func) in _HOLDERS):
                    given.add(ref)
            elif isinstance(node, Global) and node.filling is not None:
                given.add(ref)  # BUILD on a class: what is made of it calls its __setstate__
    return given


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
    if not _is_member(graph, node, names):
        return False
    # Protocol 2 names a class within a class like this; to make one of it runs no more than of any class.
    inner = graph.nodes[refs[1]] if type(refs) is tuple else None
    return ref not in called or (type(inner) is str and inner.lstrip("_")[:1].isupper())


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
    return cut(", ".join(cut(_word(value), 80) for value in values))


def _word(value: Node) -> str:
    if isinstance(value, Global):
        return mapped_name(value)
    return repr(value) if isinstance(value, str | bytes | float | bool) else type(value).__name__
