"""Every call that runs code is named. Each sample is loaded in a process of its own, and leaves a mark there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from conftest import ROOT
from crafted_files import Code, call, dumped, name, put

from ckptool.reports.scan import scan_file

#: What samples run: each leaves a file in the current folder, which is a new one.
SHELL = "echo > mark"
CODE = "open('mark', 'w').close()"
#: A library whose constructor leaves the mark.
LIBRARY = '#include <stdio.h>\n__attribute__((constructor)) static void go(void) { fclose(fopen("mark", "w")); }\n'


class Ran(NamedTuple):
    """A sample: what the verdict names, and the objects of the pickle, made one after the other."""

    names: str
    objects: tuple[Code, ...]


def ran(names: str, *objects: Code) -> Ran:
    return Ran(names, objects)


def runs(function: str, *arguments: object) -> Ran:
    """A call of the function that the verdict names."""
    module, _, last = function.rpartition(".")
    return ran(function, call(name(module, last), *arguments))


def at(module: str, path: str) -> Code:
    """STACK_GLOBAL, whose name may be dotted."""
    return Code(b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, path)) + b"\x93")


def method(module: str, path: str, *arguments: object) -> Ran:
    """A call of a method, or of what a module has under a dotted name."""
    return ran(f"{module}.{path}", call(at(module, path), *arguments))


def built(made: Code, state: object) -> Code:
    """BUILD."""
    return Code(made.raw + put(state) + b"b")


def new(cls: Code, *arguments: object) -> Code:
    """NEWOBJ."""
    return Code(cls.raw + put(tuple(arguments)) + b"\x81")


def appended(made: Code, item: object) -> Code:
    return Code(made.raw + put(item) + b"a")


def with_item(made: Code, key: object, value: object) -> Code:
    return Code(made.raw + put(key) + put(value) + b"s")


def extension(opcode: bytes, function: object) -> Code:
    """The function of a code in copyreg's registry, called."""
    return Code(opcode + put((function,)) + b"R")


SYSTEM, EXEC, LIST = name("posix", "system"), name("builtins", "exec"), name("builtins", "list")
#: A function of a package that ckptool does not know.
GO = name("helper", "go")
GETATTR, PARTIAL = name("builtins", "getattr"), name("functools", "partial")
NAMESPACE = name("argparse", "Namespace")
OS = call(name("importlib", "import_module"), "os")
EVIL = dumped(call(SYSTEM, SHELL))
SH = ["sh", "-c", SHELL]

#: The files in the folder of a sample.
FILES = {
    "marking.py": CODE.encode(),
    "helper.py": f"def go(*_, **__):\n    {CODE}\n    return 1\ngo_now = go\n\ndef idle(*_):\n    pass\n".encode(),
    "modules/behind.py": f"def x(*_):\n    {CODE}\n".encode(),
    "hubconf.py": CODE.encode(),
    "evil.pth": b"import marking",
    "evil.sh": SHELL.encode(),
    "evil.pkl": EVIL,
}

SAMPLES = [
    # -- functions that run code or commands
    ran("posix.system('echo > mark')", call(SYSTEM, SHELL)),
    runs("os.popen", SHELL),
    runs("os.spawnlp", 0, "sh", *SH),
    runs("posix.posix_spawn", "/bin/sh", SH, {}),
    runs("subprocess.Popen", SH),
    runs("subprocess.getoutput", SHELL),
    runs("pty.spawn", SH),
    runs("builtins.eval", CODE),
    ran("builtins.exec", call(EXEC, CODE)),
    runs("runpy.run_path", "marking.py"),
    runs("runpy.run_module", "marking"),
    runs("runpy._run_code", CODE, {}),
    runs("importlib.import_module", "marking"),
    runs("builtins.__import__", "marking"),
    runs("pkgutil.resolve_name", "marking:x"),
    runs("pydoc.locate", "marking.x"),
    runs("pydoc.safeimport", "marking"),
    runs("pydoc.pipepager", "text", SHELL),
    runs("logging.config._resolve", "marking.x"),
    runs(
        "logging.config.dictConfig",
        {"version": 1, "handlers": {"h": {"()": "helper.go", "x": 1}}, "root": {"handlers": ["h"]}},
    ),
    runs("unittest.main.TestProgram", "marking"),
    runs("timeit.timeit", CODE),
    runs("timeit.main", ["-n", "1", CODE]),
    runs("cProfile.run", CODE, "stats"),
    runs("profile.run", CODE, "stats"),
    method("bdb", "Bdb.run", call(name("bdb", "Bdb")), CODE, {}, {}),
    method("code", "InteractiveInterpreter.runsource", call(name("code", "InteractiveInterpreter")), CODE),
    method("trace", "Trace.run", call(name("trace", "Trace"), 0, 0), CODE),
    ran("ctypes.CDLL", call(call(GETATTR, call(name("ctypes", "CDLL"), None), "system"), SHELL.encode())),
    runs("multiprocessing.util.spawnv_passfds", b"/bin/sh", [b"sh", b"-c", SHELL.encode()], [0, 1, 2]),
    runs("asyncio.run", call(name("asyncio.subprocess", "create_subprocess_shell"), SHELL)),
    method("webbrowser", "GenericBrowser.open", call(name("webbrowser", "GenericBrowser"), ["sh", "evil.sh"]), "x"),
    runs("imaplib.IMAP4_stream", SHELL),
    runs("test.support.script_helper.run_python_until_end", "-c", CODE),
    runs("distutils.spawn.spawn", SH),
    method("lib2to3.pgen2.grammar", "Grammar.loads", call(name("lib2to3.pgen2.grammar", "Grammar")), EVIL),
    runs("idlelib.calltip.get_entity", CODE),
    runs("uuid._get_command_stdout", "sh", "evil.sh"),
    runs("_osx_support._read_output", SHELL),
    runs("pickle.loads", EVIL),
    runs("_pickle.loads", EVIL),
    ran("shelve.Shelf", call(at("shelve", "Shelf.__getitem__"), call(name("shelve", "Shelf"), {b"k": EVIL}), "k")),
    runs("site.addpackage", ".", "evil.pth", None),
    ran("sched.scheduler", call(at("sched", "scheduler.enter"), call(name("sched", "scheduler"), GO, GO), 0, 0, GO)),
    ran("threading.Thread", call(at("threading", "Thread.run"), call(name("threading", "Thread"), None, GO))),
    # -- functions that call what they are given, or lead to other functions
    ran("builtins.map", call(LIST, call(name("builtins", "map"), GO, [1]))),
    ran("builtins.map", call(name("collections", "deque"), call(name("builtins", "map"), SYSTEM, [SHELL]))),
    ran("builtins.filter", call(LIST, call(name("builtins", "filter"), GO, [1]))),
    runs("functools.reduce", GO, [1, 2]),
    ran("itertools.starmap", call(LIST, call(name("itertools", "starmap"), GO, [(1,)]))),
    ran("itertools.accumulate", call(LIST, call(name("itertools", "accumulate"), [1, 2], GO))),
    ran("itertools.dropwhile", call(LIST, call(name("itertools", "dropwhile"), GO, [1]))),
    ran("builtins.iter", call(LIST, call(name("builtins", "iter"), GO, 1))),
    ran("functools.partial(posix.system)", call(call(PARTIAL, SYSTEM), SHELL)),
    ran("functools.partial(helper.go)", call(call(PARTIAL, GO), 1)),
    ran("functools.partial", call(built(call(PARTIAL, LIST), (SYSTEM, (SHELL,), {}, None)))),
    ran("operator.methodcaller", call(call(name("operator", "methodcaller"), "system", SHELL), OS)),
    ran("operator.attrgetter", call(call(call(name("operator", "attrgetter"), "system"), OS), SHELL)),
    ran("builtins.getattr", call(call(GETATTR, OS, "system"), SHELL)),
    runs("_operator.call", SYSTEM, SHELL),
    ran(
        "types.FunctionType",
        call(call(name("types", "FunctionType"), call(name("builtins", "compile"), CODE, "", "exec"), {})),
    ),
    ran("types.MethodType", call(call(name("types", "MethodType"), SYSTEM, SHELL))),
    method("collections", "defaultdict.__missing__", call(name("collections", "defaultdict"), GO), 1),
    ran("weakref.finalize", call(call(name("weakref", "finalize"), NAMESPACE, GO))),
    ran("_codecs.register", call(name("_codecs", "register"), GO), call(name("_codecs", "lookup"), "marking")),
    ran("builtins.type", call(call(name("builtins", "type"), "T", (), {"__init__": GO}))),
    ran("abc.ABCMeta", call(call(name("abc", "ABCMeta"), "T", (), {"__init__": GO}))),
    runs("types.new_class", "T", (), {}, GO),
    method("argparse", "_os.system", SHELL),
    method("uuid", "os.system", SHELL),
    method("enum", "bltns.exec", CODE),
    method("logging", "os.system", SHELL),
    runs("copyreg._reconstructor", name("subprocess", "Popen"), name("subprocess", "Popen"), SH),
    # -- the registry of extensions
    ran("copyreg.add_extension", call(name("copyreg", "add_extension"), "helper", "go", 7), extension(b"\x82\x07", 1)),
    *(
        ran(
            f"copyreg extension {code}('echo > mark')",
            call(name("copyreg", "add_extension"), "posix", "system", code),
            extension(opcode, SHELL),
        )
        for code, opcode in ((9, b"\x82\x09"), (700, b"\x83\xbc\x02"), (70000, b"\x84\x70\x11\x01\x00"))
    ),
    # -- changes to a module, class, function, list or dict that is there already
    ran(
        "setattr(json.decoder, 'scan', helper.go)",
        built(name("json", "decoder"), {"scan": GO}),
        call(name("json.decoder", "scan")),
    ),
    ran(
        "setattr(json.decoder, 'scan', helper.go)",
        built(name("json", "decoder"), (None, {"scan": GO})),
        call(name("json.decoder", "scan")),
    ),
    ran(
        "setattr(helper.idle, '__code__', helper.go.__code__)",
        built(name("helper", "idle"), (None, {"__code__": at("helper", "go.__code__")})),
        call(name("helper", "idle")),
    ),
    ran(
        "setattr(argparse.Namespace, '__setstate__', helper.go)",
        built(NAMESPACE, (None, {"__setstate__": GO})),
        built(new(NAMESPACE), 1),
    ),
    ran(
        "setattr(collections.UserList, 'extend', helper.go)",
        built(name("collections", "UserList"), (None, {"extend": GO})),
        appended(call(name("collections", "UserList")), 1),
    ),
    ran(
        "setattr(logging.getLogger('some'), 'filters', ",
        built(call(name("logging", "getLogger"), "some"), {"filters": [GO]}),
        call(at("logging", "Logger.error"), call(name("logging", "getLogger"), "some"), "text"),
    ),
    ran("sys.path.append('modules')", appended(name("sys", "path"), "modules"), call(name("behind", "x"))),
    ran(
        "sys.modules['json'] =",
        with_item(name("sys", "modules"), "json", call(name("importlib", "import_module"), "helper")),
        call(name("json", "go")),
    ),
    ran(
        "copyreg.dispatch_table[",
        with_item(name("copyreg", "dispatch_table"), NAMESPACE, GO),
        call(name("copy", "copy"), new(NAMESPACE)),
    ),
    # -- methods that an unpickler looks up on the object itself
    ran("argparse.Namespace", appended(built(new(NAMESPACE), {"append": SYSTEM}), SHELL)),
    ran("argparse.Namespace", appended(built(new(NAMESPACE), {"append": GO}), 1)),
    ran("argparse.Namespace", appended(built(new(NAMESPACE), (None, {"append": GO})), 1)),
    ran("argparse.Namespace", appended(built(new(NAMESPACE), {"append": call(PARTIAL, GO)}), 1)),
    ran("argparse.Namespace", Code(built(new(NAMESPACE), {"extend": GO}).raw + b"(K\x01K\x02e")),
    ran("argparse.Namespace", Code(built(new(NAMESPACE), {"add": GO}).raw + b"(K\x01\x90")),
    ran("argparse.Namespace", built(built(new(NAMESPACE), {"__setstate__": GO}), 1)),
    # -- NumPy
    runs("numpy.load", "evil.npy", None, True),
    runs("numpy.lib._npyio_impl.load", "evil.npy", None, True),
    runs("numpy.testing._private.utils.runstring", CODE, {}),
    runs("numpy.testing.rundocs", "marking.py"),
    runs("numpy.f2py.crackfortran.myeval", CODE),
    # -- torch
    runs("torch.jit.unsupported_tensor_ops.execWrapper", CODE, {}, {}),
    runs("torch.fx.graph_module._exec_with_source", CODE, {}),
    method(
        "torch.fx.experimental.symbolic_shapes",
        "ShapeEnv.evaluate_guards_expression",
        None,
        "__import__('marking')",
        [],
    ),
    runs("torch.utils.collect_env.run", SHELL),
    runs("torch.utils.data.datapipes.utils.decoder.basichandlers", "pickle", EVIL),
    method("torch.utils._config_module", "ConfigModule.load_config", None, EVIL),
    ran(
        "torch.utils.data.datapipes.datapipe._IterDataPipeSerializationWrapper",
        built(new(name("torch.utils.data.datapipes.datapipe", "_IterDataPipeSerializationWrapper")), (EVIL, False)),
    ),
    ran(
        "torch.utils.data.datapipes.datapipe._DataPipeSerializationWrapper",
        built(new(name("torch.utils.data.datapipes.datapipe", "_DataPipeSerializationWrapper")), (EVIL, False)),
    ),
    ran(
        "torch.onnx._internal._lazy_import._LazyModule",
        built(call(name("torch.onnx._internal._lazy_import", "_LazyModule"), "marking"), {}),
    ),
    runs("torch.nn.attention._fa3._fa3_import_module", "marking"),
    runs("torch.nn.attention._fa4._fa4_import_module", "marking"),
    ran(
        "torch._tensor._rebuild_from_type_v2(torch.nn.attention._fa3._fa3_import_module",
        call(
            name("torch._tensor", "_rebuild_from_type_v2"),
            *(name("torch.nn.attention._fa3", "_fa3_import_module"), name("torch", "Tensor"), ("marking",), {}),
        ),
    ),
    ran(
        "torch.nn.utils._deprecation_utils.lazy_deprecated_import",
        call(call(name("torch.nn.utils._deprecation_utils", "lazy_deprecated_import"), ["x"], "a", "marking"), "x"),
    ),
    runs("torch._utils._import_dotted_name", "marking.x"),
    runs("torch._utils._augment_memory_snapshot_stack_traces", "evil.pkl"),
    runs("torch.hub._load_local", ".", "x"),
    ran("posix.system", call(name("torch.storage", "_load_from_bytes"), EVIL)),
    runs("torch.utils._pytree.tree_map", GO, [1]),
    method("torch.nn.modules.module", "Module.apply", call(name("torch.nn", "Identity")), GO),
    method("torch.serialization", "os.system", SHELL),
    ran(
        "setattr(torch.serialization, 'load', posix.system)",
        built(name("torch", "serialization"), {"load": SYSTEM}),
        call(name("torch.serialization", "load"), SHELL),
    ),
    method("torch", "ops.load_library", "./evil.so"),
    method("torch._ops", "_Ops.load_library", name("torch", "ops"), "./evil.so"),
    method("torch", "classes.load_library", "./evil.so"),
    runs("torch.cuda.memory.CUDAPluggableAllocator", "./evil.so", "a", "b"),
    runs("torch.cuda.CUDAPluggableAllocator", "./evil.so", "a", "b"),
    runs("torch.xpu.memory.XPUPluggableAllocator", "./evil.so", "a", "b"),
    runs("numpy.ctypeslib.load_library", "evil.so", "."),
    # -- other packages
    runs("cloudpickle.loads", EVIL),
    runs("yaml.unsafe_load", "!!python/object/apply:os.system ['echo > mark']"),
    runs("sympy.core.sympify.sympify", "__import__('marking')"),
    runs("setuptools._distutils.spawn.spawn", SH),
    runs("IPython.utils.process.getoutput", SHELL),
    runs("tornado.util.import_object", "marking.x"),
    runs("dask.utils.import_required", "marking", "no"),
    runs("pexpect.run", "sh evil.sh"),
    runs("psutil.Popen", SH),
]


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Path]]:
    """A folder for each sample that is tried in this run, in which it was loaded, by the number of the sample."""
    base = tmp_path_factory.mktemp("loads")
    if shutil.which("cc"):
        (base / "evil.c").write_text(LIBRARY)
        subprocess.run(["cc", "-shared", "-o", base / "evil.so", base / "evil.c"], check=True, timeout=60)
    np.save(base / "evil.npy", np.array([None], dtype=object), allow_pickle=True)
    array = (base / "evil.npy").read_bytes()
    files = FILES | {"evil.npy": array[: 10 + int.from_bytes(array[8:10], "little")] + EVIL}
    own = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module
    ]
    tried = {item.callspec.params["number"] for item in own if item.function is test_the_sample_runs_code}
    made = {number: base / str(number) for number in sorted(tried)}
    for number, folder in made.items():
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        if (base / "evil.so").exists():
            os.link(base / "evil.so", folder / "evil.so")
        (folder / "sample.pkl").write_bytes(pickled(SAMPLES[number]))
    loads = [sys.executable, ROOT / "tests" / "helpers" / "forked_loads.py", *made.values()]
    subprocess.run(loads, check=True, timeout=600)
    yield made


def pickled(sample: Ran) -> bytes:
    return b"\x80\x04](" + b"".join(made.raw for made in sample.objects) + b"e."


NUMBERED = [pytest.param(number, id=f"{number} {sample.names}") for number, sample in enumerate(SAMPLES)]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("number", NUMBERED)
def test_the_sample_runs_code(number: int, folders: dict[int, Path]) -> None:
    """Otherwise it would prove nothing that the scan names it."""
    folder = folders[number]
    if b"evil.so" in pickled(SAMPLES[number]) and not (folder / "evil.so").exists():
        pytest.skip("no compiler for a library")
    error = folder / "error"
    assert (folder / "mark").exists(), error.read_text() if error.exists() else "no error"


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("number", NUMBERED)
def test_the_scan_names_the_call(number: int, tmp_path: Path) -> None:
    sample = SAMPLES[number]
    (tmp_path / "sample.pkl").write_bytes(pickled(sample))
    report = scan_file(str(tmp_path / "sample.pkl"))
    assert report["verdict"] == "unsafe", report["reasons"]
    assert any(sample.names in reason for reason in report["reasons"]), report["reasons"]
