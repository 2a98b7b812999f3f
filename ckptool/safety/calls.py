"""Calls that have no business in a checkpoint: what loading it without weights_only would run."""

from __future__ import annotations

import sys
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Final

from ..base.limits import LIMITS
from ..base.text import cut
from ..checkpoint.objects import mapped_name
from ..pickles.nodes import Call, Dict, FrozenSet, Global, Graph, List, Node, Ref, Set, children
from ..pickles.opcodes import NEWOBJ
from .torch_lists import NEWEST, allowed

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
        *("setuptools", "distutils", "pkg_resources", "transformers.dynamic_module_utils", "unittest.mock"),
        *("transformers.utils.import_utils", "pandas.core.computation", "pandas.io.common", "pandas.io.pickle"),
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
        *("IPython.embed", "IPython.start_ipython", "torch._C.PyTorchFileWriter", "torch._C.PyTorchFileReader"),
        *("torch.PyTorchFileWriter", "torch.PyTorchFileReader", "types.new_class", "typing.get_type_hints"),
        *("torch._C.FileCheck", "numpy.memmap", "numpy.core.memmap.memmap", "numpy._core.memmap.memmap"),
    )
)
#: Modules of Python, torch and NumPy are known: what a pickle calls of theirs is harmless by name, or else is not.
#: Such modules of Python, of which every function is.
_HARMLESS: Final = frozenset(
    (
        *("collections", "datetime", "_datetime", "decimal", "_decimal", "_pydecimal", "fractions", "uuid"),
        *("re", "_sre"),
        *("_codecs", "array", "math", "cmath", "itertools", "copyreg", "copy_reg", "zoneinfo", "ipaddress", "enum"),
        *("string", "time", "calendar", "numbers", "statistics", "heapq", "bisect", "queue", "_queue", "base64"),
        *("binascii", "struct", "zlib", "hashlib", "json", "collections.abc", "_collections", "_weakref", "weakref"),
        *("builtins", "__builtin__", "pathlib", "pathlib._local", "locale", "difflib", "textwrap", "html", "colorsys"),
    )
)
#: Single functions of other modules: what torch, NumPy and Python write when they pickle something of their own.
_REBUILDING: Final = frozenset(
    (
        *("logging.getLogger", "functools.partial", "_functools.partial", "torch.serialization._get_layout"),
        *("torch.nn.backends.thnn._get_thnn_function_backend", "torch.distributed.remote_device._remote_device"),
    )
)
#: Parts of torch with functions that compile, import or read what they are given.
_TOOLS: Final = (
    *("torch.fx", "torch._inductor", "torch._dynamo", "torch._C", "torch._functorch", "torch._export", "torch.export"),
    *("torch.utils", "torch.package", "torch.hub", "torch.jit", "torch.onnx", "torch.testing", "torch.multiprocessing"),
    *("torch._ops", "torch.ops", "torch._classes", "torch.classes", "torch.distributed", "torch._library"),
    *("torch.library", "torch.compiler", "torch._subclasses", "torch._higher_order_ops", "torch.profiler"),
    *("torch.monitor", "torch.backends", "torch.cuda", "torch.xpu", "torch.mps", "torch._logging", "torch._appdirs"),
)
_RESTORING: Final = ("torch.jit._pickle", "torch._utils", "torch._tensor")
#: Functions and small classes of NumPy that make arrays, scalars and generators of random numbers.
_OF_NUMPY: Final = frozenset(
    (
        *(
            "_reconstruct",
            "scalar",
            "dtype",
            "ndarray",
            "_frombuffer",
            "frombuffer",
            "_mareconstruct",
            "array",
            "asarray",
        ),
        *(
            "zeros",
            "ones",
            "empty",
            "full",
            "arange",
            "linspace",
            "concatenate",
            "matrix",
            "recarray",
            "record",
            "void",
        ),
        *("poly1d", "generic", "number", "integer", "floating", "inexact", "flexible", "character", "object_", "str_"),
        *("bytes_", "bool_", "bool", "int_", "intc", "intp", "uint", "uintc", "uintp", "half", "single", "double"),
        *("longdouble", "csingle", "cdouble", "clongdouble", "datetime64", "timedelta64", "string_", "unicode_"),
        *(
            f"{kind}{bits}"
            for kind in ("int", "uint", "float", "complex")
            for bits in (8, 16, 32, 64, 96, 128, 192, 256)
        ),
        *(
            "longlong",
            "ulonglong",
            "short",
            "ushort",
            "byte",
            "ubyte",
            "long",
            "ulong",
            "masked_array",
            "bitwise_count",
        ),
    )
)
#: Attributes that lead from a function or class to everything else.
_WAYS_OUT: Final = frozenset(
    f"__{name}__"
    for name in (
        *("builtins", "globals", "subclasses", "dict", "class", "bases", "base", "mro", "getattribute", "getattr"),
        *("import", "loader", "spec", "code", "self", "func", "wrapped", "closure", "reduce", "reduce_ex", "module"),
        *("setattr", "delattr", "init_subclass", "getitem", "path", "file"),
    )
)
#: Parts of the longest name in these lists.
_DEEPEST: Final = max(name.count(".") + 1 for name in _MODULES | _FUNCTIONS)
#: How cloudpickle writes a class of Python by its name, which is then called: files of fastai are full of it.
_TYPES: Final = "cloudpickle.cloudpickle._builtin_type"
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


def _leads_out(path: str) -> bool:
    """Is a dotted name one of ``function.__globals__`` and the like?"""
    first, *rest = path.split(".")
    return any(part in _WAYS_OUT for part in rest) or first in _WAYS_OUT


def _runs(name: str) -> bool:
    """Is it a function of Python, torch or NumPy that no library calls to make an object of a pickle?"""
    module, _, last = name.rpartition(".")
    package = module.partition(".")[0]
    if package not in _KNOWN or name in _REBUILDING or not last.lstrip("_")[:1].islower():
        return False
    if package == "numpy":
        return last not in _OF_NUMPY and not last.startswith("__")
    if package == "torch":
        # A method: torch.UntypedStorage.from_file.
        if any(part.lstrip("_")[:1].isupper() for part in module.split(".")):
            return name not in _LISTED
        within = module.startswith(tuple(f"{tool}." for tool in _TOOLS)) or module in _TOOLS
        return within and module not in _RESTORING and not last.startswith("_rebuild") and name not in _LISTED
    return module not in _HARMLESS


_ACTS, _RUNS, _NAMES = "acts", "runs", "names"


def _kind(node: Global) -> str:
    """Which of these a global is, "" for none: it acts wherever it is given to, it runs when it is called, it is a
    function that only looks up a class."""
    name = mapped_name(node)
    dotted = "." in node.name
    if _acts(name) or (dotted and (_acts_within(node.name) or _leads_out(node.name))) or node.name in _WAYS_OUT:
        return _ACTS
    return _RUNS if _runs(name) else _NAMES if name == _TYPES else ""


_LISTED: Final = allowed(NEWEST)
_KNOWN: Final = frozenset(("torch", "numpy", *sys.stdlib_module_names))


def suspicious_calls(graph: Graph) -> list[str]:
    """The calls as a reader would write them, ``posix.system('echo')``, in the order of the pickle.

    So is one that is given what acts, as an argument, in a container or in a state: ``map(posix.system, ...)``.
    """
    nodes = graph.nodes
    names: dict[Ref, str] = {}
    running, types = set[Ref](), set[Ref]()
    kinds: dict[tuple[str, str], str] = {}  # a million globals may have one name
    calls: list[tuple[Ref, Call]] = []
    for ref, node in enumerate(nodes):
        if type(node) is Global:
            spelled = (node.module, node.name)
            kind = kinds.get(spelled)
            if kind is None:
                kind = kinds[spelled] = _kind(node)
            if kind == _ACTS:
                names[ref] = mapped_name(node)
            elif kind == _RUNS:
                running.add(ref)
            elif kind == _NAMES:
                types.add(ref)
        elif type(node) is Call:
            calls.append((ref, node))
    again = [ref for ref, node in calls if type(nodes[node.func]) is Call]
    if not (names or running or again):
        return []
    called = {node.func for _, node in calls}
    harmless = {
        ref
        for ref, node in calls
        if names.get(node.func) == "builtins.getattr" and _is_harmless(graph, ref, node, names, called)
    }
    found = {ref for ref, node in calls if node.func in names and ref not in harmless}
    found |= {ref for ref, node in calls if node.func in running and node.op != NEWOBJ}
    # What a call gave is called: nobody knows what that is, but where it is a class that was looked up by its name.
    found |= {
        ref
        for ref, node in calls
        if type(held := nodes[node.func]) is Call and node.func not in harmless and held.func not in types
    }
    found |= _given(graph, calls, names.keys() - {node.func for ref, node in calls if ref in harmless}, found)
    said = []
    for ref in sorted(found)[: LIMITS.listed]:
        node = nodes[ref]
        if isinstance(node, Call):
            said.append(f"{_called(graph, node, names)}({_arguments(graph, node)})")
        elif isinstance(node, Global):
            said.append(f"setattr({mapped_name(node)}, ...)")
    more = len(found) - len(said)
    return [*said, f"{more:,} more calls"] if more else said


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
    seen, work = set(acting), list(acting)
    if all(seen.isdisjoint(_held(node)) for node in nodes):
        return set()
    above: dict[Ref, list[Ref]] = {}
    for ref, node in enumerate(nodes):
        for child in _held(node):
            above.setdefault(child, []).append(ref)
    given: set[Ref] = set()
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


def _held(node: Node) -> Sequence[Ref]:
    """What a node holds, but for what a call calls: that is found already."""
    if type(node) is tuple:  # of tuples and calls there may be a million
        return node
    if type(node) is Call and node.filling is None and node.kwargs < 0:
        return (node.args,)
    if isinstance(node, Call):
        return [part for part in children(node) if part != node.func]
    return children(node) if isinstance(node, (List, Dict, Set, FrozenSet, Global)) else ()


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
