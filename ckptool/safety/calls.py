"""Calls that do not belong in a checkpoint: loading it without weights_only would run them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Final

from ..base.limits import LIMITS
from ..base.text import cut, words
from ..checkpoint.objects import mapped_name
from ..pickles.nodes import Call, Dict, FrozenSet, Global, Graph, List, Node, Ref, Set, children
from ..pickles.opcodes import NEWOBJ
from .torch_lists import NEWEST, allowed

#: Modules whose functions act on the machine or reach other functions. This list decides how loudly a call is reported,
#: never that one is harmless: every global outside of torch's list is reported in any case.
_MODULES: Final = words("""
    os posix nt subprocess sys runpy importlib pty shutil socket ctypes code codeop webbrowser pickle _pickle marshal
    pip platform tempfile urllib.request http.client ftplib smtplib operator _operator timeit cProfile profile pdb bdb
    doctest asyncio multiprocessing torch.hub torch.utils.cpp_extension torch.storage numpy.testing numpy.f2py pkgutil
    io _io _posixsubprocess _winapi _thread threading pydoc trace venv ensurepip requests aiohttp httpx ssl telnetlib
    imaplib poplib socketserver xmlrpc shelve joblib http.server _socket select nntplib imp _imp _frozen_importlib
    _frozen_importlib_external py_compile compileall zipapp gzip bz2 fileinput glob linecache tokenize filecmp mailbox
    mmap _pyio netrc sqlite3 _sqlite3 dbm gc fcntl faulthandler getpass readline site _posixshmem tkinter _tkinter
    turtle antigravity _xxsubinterpreters _interpreters _testcapi concurrent.futures pathlib.Path pathlib.PosixPath
    pathlib.WindowsPath test.support torch.distributed.run torch.distributed.launcher torch.utils.model_zoo
    distutils.file_util idlelib lib2to3 zipimport _ctypes cffi posixpath.expandvars torch.serialization
    torch.utils.collect_env torch.utils.bottleneck torch.utils._config_module torch._inductor.codecache
    torch.jit.unsupported_tensor_ops torch.package setuptools distutils pkg_resources transformers.dynamic_module_utils
    unittest.mock transformers.utils.import_utils pandas.core.computation pandas.io.common pandas.io.pickle
""")
#: The acting members of those modules that also hold classes and tables which files name.
_ACTING_MEMBERS: Final = {
    "torch.storage": frozenset(("_load_from_bytes",)),
    "torch.serialization": frozenset(("load", "_load", "_legacy_load")),
    **dict.fromkeys(("io", "_io"), frozenset(("open", "open_code", "FileIO"))),
    "threading": frozenset(("Thread", "Timer")),
    "torch.package": frozenset(("PackageImporter",)),
    "joblib": frozenset(("load",)),
}
_BUILTINS: Final = words("""
    eval exec compile __import__ getattr setattr delattr open input apply execfile breakpoint map filter globals locals
    vars help exit quit file
""")
#: Functions of other modules that run, import or read what they are given.
_FUNCTIONS: Final = words("""
    functools.reduce itertools.starmap itertools.filterfalse itertools.takewhile itertools.dropwhile
    itertools.accumulate itertools.groupby types.FunctionType types.CodeType types.LambdaType functools.partialmethod
    numpy.load pandas.read_pickle numpy.ctypeslib.load_library logging.config.listen logging.config._resolve torch.load
    torch.jit.load uuid._get_command_stdout _osx_support._read_output site.execsitecustomize
    torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression builtins.object.__reduce__
    torch._dynamo.guards.GuardBuilder.get sched.scheduler atexit.register weakref.finalize tarfile.open tarfile.TarFile
    tarfile.TarFile.open zipfile.ZipFile zipfile.PyZipFile lzma.open lzma.LZMAFile codecs.open wave.open
    logging.FileHandler pstats.Stats signal.signal signal.raise_signal signal.alarm signal.setitimer signal.pthread_kill
    resource.setrlimit resource.prlimit tracemalloc.Snapshot.load unittest.main fsspec.open numpy.save numpy.savez
    numpy.savetxt numpy.fromfile numpy.loadtxt numpy.genfromtxt torch.save torch.from_file torch.jit._serialization.load
    torch.jit.save torch.onnx.export torch.ops.load_library torch.classes.load_library
    torch._C._load_for_lite_interpreter torch._C.import_ir_module torch._dynamo.utils.import_module pandas.eval
    numexpr.evaluate yaml.load yaml.unsafe_load yaml.full_load dill.load dill.loads cloudpickle.load cloudpickle.loads
    sympy.sympify sympy.core.sympify.sympify psutil.Process psutil.Popen IPython.embed IPython.start_ipython
    torch._C.PyTorchFileWriter torch._C.PyTorchFileReader torch.PyTorchFileWriter torch.PyTorchFileReader
    types.new_class typing.get_type_hints torch._C.FileCheck numpy.memmap numpy.core.memmap.memmap
    numpy._core.memmap.memmap
""")
#: Modules of Python of which every function is harmless. Those of Python, torch and NumPy are known: a function of
#: theirs that none of the following lists names is not harmless.
_HARMLESS: Final = words("""
    collections datetime _datetime decimal _decimal _pydecimal fractions uuid re _sre _codecs array math cmath itertools
    copyreg copy_reg zoneinfo ipaddress enum string time calendar numbers statistics heapq bisect queue _queue base64
    binascii struct zlib hashlib json collections.abc _collections _weakref weakref builtins __builtin__ pathlib
    pathlib._local locale difflib textwrap html colorsys
""")
#: Functions of other modules that torch, NumPy and Python write when they pickle objects of their own.
_REBUILDING: Final = words("""
    logging.getLogger functools.partial _functools.partial torch.serialization._get_layout
    torch.nn.backends.thnn._get_thnn_function_backend torch.distributed.remote_device._remote_device
""")
#: Packages of torch with functions that compile, import or read what they are given.
_TOOLS: Final = words("""
    torch.fx torch._inductor torch._dynamo torch._C torch._functorch torch._export torch.export torch.utils
    torch.package torch.hub torch.jit torch.onnx torch.testing torch.multiprocessing torch._ops torch.ops torch._classes
    torch.classes torch.distributed torch._library torch.library torch.compiler torch._subclasses
    torch._higher_order_ops torch.profiler torch.monitor torch.backends torch.cuda torch.xpu torch.mps torch._logging
    torch._appdirs
""")
_RESTORING: Final = ("torch.jit._pickle", "torch._utils", "torch._tensor")
#: Functions and small classes of NumPy that make arrays, scalars and generators of random numbers.
_NUMPY: Final = words("""
    _reconstruct scalar dtype ndarray _frombuffer frombuffer _mareconstruct array asarray zeros ones empty full arange
    linspace concatenate matrix recarray record void poly1d generic number integer floating inexact flexible character
    object_ str_ bytes_ bool_ bool int_ intc intp uint uintc uintp half single double longdouble csingle cdouble
    clongdouble datetime64 timedelta64 string_ unicode_ longlong ulonglong short ushort byte ubyte long ulong
    masked_array bitwise_count
""") | {f"{kind}{bits}" for kind in ("int", "uint", "float", "complex") for bits in (8, 16, 32, 64, 96, 128, 192, 256)}
#: Attributes that lead from a function or class to everything else.
_WAYS_OUT: Final = frozenset(
    f"__{name}__"
    for name in words("""
        builtins globals subclasses dict class bases base mro getattribute getattr import loader spec code self func
        wrapped closure reduce reduce_ex module setattr delattr init_subclass getitem path file
    """)
)
#: Components of the longest name in these lists.
_DEEPEST: Final = max(name.count(".") + 1 for name in _MODULES | _FUNCTIONS)
#: cloudpickle's way to write a class of Python by its name, which is then called: files of fastai are full of it.
_TYPE_LOOKUP: Final = "cloudpickle.cloudpickle._builtin_type"
#: Containers: they do not call what they are given.
_CONTAINERS: Final = words("collections.OrderedDict collections.Counter") | {
    f"builtins.{name}" for name in ("dict", "list", "tuple", "set", "frozenset")
}


def acts(name: str) -> bool:
    """Return whether a function acts on the machine, or takes a function or a name and may call it."""
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
            members = _ACTING_MEMBERS.get(root)
            return members is None or (end == len(parts) and function in members)
    return False


def _acts_within(path: str) -> bool:
    """Return whether a dotted name leads into another module, as ``_os.remove`` of ``argparse`` does."""
    parts = [part.lstrip("_") for part in path.split(".")]
    # As many as the longest name of the lists has, and one to tell a longer one from it: every part of a megabyte of
    # dots is looked at, but not all of the rest at each.
    return any(acts(".".join(parts[at : at + _DEEPEST + 2])) for at in range(len(parts) - 1))


def _runs(name: str) -> bool:
    """Return whether it is a function of Python, torch or NumPy that no library calls to make an object of a pickle."""
    module, _, last = name.rpartition(".")
    package = module.partition(".")[0]
    if package not in _KNOWN or name in _REBUILDING or not last.lstrip("_")[:1].islower():
        return False
    if package == "numpy":
        return last not in _NUMPY and not last.startswith("__")
    if package == "torch":
        # A method: torch.UntypedStorage.from_file.
        if any(part.lstrip("_")[:1].isupper() for part in module.split(".")):
            return name not in _LISTED
        within = module.startswith(tuple(f"{tool}." for tool in _TOOLS)) or module in _TOOLS
        return within and module not in _RESTORING and not last.startswith("_rebuild") and name not in _LISTED
    return module not in _HARMLESS


#: The effects of a global: it acts wherever it is passed to, it runs when it is called, it looks up a class.
_ACTS, _RUNS, _LOOKS_UP = "acts", "runs", "looks up"


def _effect(node: Global) -> str:
    """Return the effect of a global, "" for none."""
    name = mapped_name(node)
    leads_out = not _WAYS_OUT.isdisjoint(node.name.split("."))  # function.__globals__ and the like
    if acts(name) or leads_out or ("." in node.name and _acts_within(node.name)):
        return _ACTS
    return _RUNS if _runs(name) else _LOOKS_UP if name == _TYPE_LOOKUP else ""


_LISTED: Final = allowed(NEWEST)
_KNOWN: Final = frozenset(("torch", "numpy", *sys.stdlib_module_names))


def suspicious_calls(graph: Graph) -> list[str]:
    """Return the calls as a reader would write them, ``posix.system('echo')``, in the order of the pickle.

    They include calls with an acting function in an argument, a container or a state: ``map(posix.system, ...)``.
    """
    found: list[str] | None = graph.cache.get((_SUSPICIOUS, graph.root))
    if found is None:
        found = graph.cache[_SUSPICIOUS, graph.root] = _suspicious_calls(graph)
    return found


_SUSPICIOUS: Final = "suspicious calls"


def _suspicious_calls(graph: Graph) -> list[str]:
    nodes = graph.nodes
    names: dict[Ref, str] = {}
    running, lookups = set[Ref](), set[Ref]()
    effects: dict[tuple[str, str], str] = {}  # a million globals may have one name
    for ref, node in graph.of_type(Global):
        spelling = (node.module, node.name)
        effect = effects.get(spelling)
        if effect is None:
            effect = effects[spelling] = _effect(node)
        if effect == _ACTS:
            names[ref] = mapped_name(node)
        elif effect:
            (running if effect == _RUNS else lookups).add(ref)
    calls = list(graph.of_type(Call))
    # Calls of the result of another call: (the call, the other call, the function of that one).
    results = [(ref, node.func, inner.func) for ref, node in calls if type(inner := nodes[node.func]) is Call]
    if not (names or running or results):
        return []
    called = {node.func for _, node in calls}
    harmless = {
        ref: node.func
        for ref, node in calls
        if names.get(node.func) == "builtins.getattr" and _is_harmless(graph, ref, node, names, called)
    }
    suspects = {ref for ref, node in calls if node.func in names and ref not in harmless}
    suspects |= {ref for ref, node in calls if node.func in running and node.op != NEWOBJ}
    # The result of another call is unknown, unless it is a class that was looked up by its name.
    suspects |= {ref for ref, result, func in results if result not in harmless and func not in lookups}
    suspects |= _recipients(graph, names.keys() - set(harmless.values()), suspects)
    messages = [_call_text(graph, nodes[ref], names) for ref in sorted(suspects)[: LIMITS.listed]]
    more = len(suspects) - len(messages)
    return [*messages, f"{more:,} more calls"] if more else messages


def _call_text(graph: Graph, node: Node, names: Mapping[Ref, str]) -> str:
    """Spell a call, or the change of a class."""
    if isinstance(node, Call):
        return f"{_callee(graph, node, names)}({_arguments(graph, node)})"
    return f"setattr({mapped_name(node)}, ...)" if isinstance(node, Global) else ""


def _callee(graph: Graph, node: Call, names: Mapping[Ref, str]) -> str:
    """Spell the function of a call: a name, or the result of another call."""
    if node.func in names:
        return names[node.func]
    func = graph.nodes[node.func]
    if not isinstance(func, Call):
        return mapped_name(func) if isinstance(func, Global) else type(func).__name__.lower()
    if type(graph.nodes[func.func]) is not Global:
        return "..."
    return _call_text(graph, func, names)


def _recipients(graph: Graph, acting: Collection[Ref], suspects: Collection[Ref]) -> set[Ref]:
    """Return the calls and classes that are given an acting global, found upwards through its holders."""
    nodes = graph.nodes
    seen, work = set(acting), list(acting)
    if all(seen.isdisjoint(_members(node)) for node in nodes):
        return set()
    holders: dict[Ref, list[Ref]] = {}
    for ref, node in enumerate(nodes):
        for child in _members(node):
            holders.setdefault(child, []).append(ref)
    recipients: set[Ref] = set()
    while work:
        for ref in holders.get(work.pop(), ()):
            if ref in seen:
                continue
            seen.add(ref)
            work.append(ref)
            node = nodes[ref]
            if isinstance(node, Call) and ref not in suspects:
                func = nodes[node.func]
                if not (isinstance(func, Global) and mapped_name(func) in _CONTAINERS):
                    recipients.add(ref)
            elif isinstance(node, Global) and node.filling is not None:
                recipients.add(ref)  # BUILD on a class: an object of it calls its __setstate__
    return recipients


def _members(node: Node) -> Sequence[Ref]:
    """Return the references in a node, without the function of a call, which is checked already."""
    if type(node) is tuple:  # of tuples and calls there may be a million
        return node
    if type(node) is Call and node.filling is None and node.kwargs < 0:
        return (node.args,)
    if isinstance(node, Call):
        return [part for part in children(node) if part != node.func]
    return children(node) if isinstance(node, (List, Dict, Set, FrozenSet, Global)) else ()


#: Classes within classes that torch itself pickles, which protocol 2 does by ``getattr(outer, name)``: nothing of them
#: is run. (outer class, name): ``ShardedTensor.__getstate__`` in torch/distributed/_shard/sharded_tensor/api.py.
_NESTED: Final = frozenset(
    (f"torch.distributed.{module}.ShardedTensor", "ProcessGroupState")
    for module in ("_shard.sharded_tensor.api", "_sharded_tensor.api")
)


def _is_harmless(graph: Graph, ref: Ref, node: Call, names: Container[Ref], called: Container[Ref]) -> bool:
    """Return whether ``getattr(Class, 'name')`` names a class of torch's own, or a method or class that nothing calls.

    Python pickles a method like this, or a class within a class. What is called with it, or is itself called, is
    another matter.
    """
    args = graph.nodes[node.args]
    if type(args) is not tuple or len(args) != 2:
        return False
    owner, name = graph.nodes[args[0]], graph.nodes[args[1]]
    if type(owner) is not Global or type(name) is not str:
        return False
    if (mapped_name(owner), name) in _NESTED:
        return True
    if args[0] in names or node.filling is not None or not name.isidentifier() or name.startswith("__"):
        return False
    # Modules and functions are in lower case: what looks like a class is one, or the name of one at least.
    words = owner.name.split(".")
    if mapped_name(owner).partition(".")[0] == "builtins" or not all(word.lstrip("_")[:1].isupper() for word in words):
        return False
    # To make an object of a class within a class runs no more than of any class.
    return ref not in called or name.lstrip("_")[:1].isupper()


def _arguments(graph: Graph, node: Call) -> str:
    refs = graph.nodes[node.args]
    values = [graph.nodes[ref] for ref in refs[:4]] if type(refs) is tuple else []
    return cut(", ".join(cut(_spelled(value), 80) for value in values))


def _spelled(value: Node) -> str:
    if isinstance(value, Global):
        return mapped_name(value)
    return repr(value) if isinstance(value, str | bytes | float | bool) else type(value).__name__
