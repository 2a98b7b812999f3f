"""Law 7, one way: imports between the rooms of ckptool run in one direction, and each dangerous thing has one place."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import ROOT

from ckptool.base.lazy import regex

PACKAGE = ROOT / "ckptool"

#: The rooms from the bottom up: a module imports from rooms earlier in this list, and from its own. Rooms in one line
#: know nothing of each other. ``ckptool`` is the package itself, ``ckptool/__init__.py``.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"base"}),
    frozenset({"files", "pickles"}),
    frozenset({"remote"}),
    frozenset({"checkpoint"}),
    frozenset({"values", "safety"}),
    frozenset({"formats"}),
    frozenset({"edits"}),
    frozenset({"reports"}),
    frozenset({"saving"}),
    frozenset({"ckptool"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)


#: The same inside ``formats``: its folders, and the modules in none of them. ``formats`` itself is their list.
FORMATS: tuple[frozenset[str], ...] = (
    frozenset({"formats"}),
    frozenset({"losses", "rescue", "zip_kinds"}),
    frozenset({"outputs", "repickled"}),
    frozenset({"search"}),
    frozenset({"foreign"}),
    frozenset({"claims", "folders", "tensor_table"}),
    frozenset({"safetensors", "torch"}),
    frozenset({"bare_pickle", "gguf", "plain_pickle"}),
    frozenset({"names", "programs"}),
    frozenset({"pieces"}),
    frozenset({"joined", "recipes"}),
    frozenset({"deepspeed", "fsdp", "hf", "megatron", "parts"}),
    frozenset({"dcp"}),
    frozenset({"rank_part"}),
    frozenset({"checkpoint_search", "headers", "planning", "readback"}),
    frozenset({"opening"}),
)


class Import(NamedTuple):
    """One import: ``target`` as an absolute name, ``local`` when it stands in a function, ``typing`` when it is for
    type checkers only."""

    target: str
    line: int
    local: bool
    typing: bool


class Module(NamedTuple):
    """A module of ckptool: its dotted name, and its path from the root of the repository.

    ``imports`` holds its imports, wherever they stand, and ``calls`` each call with the dotted name of the function, or
    with "" if it has none.
    """

    name: str
    path: str
    imports: list[Import]
    calls: list[tuple[str, ast.Call]]
    lines: int

    @property
    def room(self) -> str:
        return self.name.split(".")[1] if "." in self.name else "ckptool"


def module_of(name: str, text: str, path: str = "") -> Module:
    tree = ast.parse(text)
    imports = [
        Import(target, node.lineno, local, typing)
        for node, local, typing in _walk(tree, False, False)
        for target in _targets(name, node)
    ]
    calls = [(dotted(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return Module(name, path or name.replace(".", "/") + ".py", imports, calls, text.count("\n"))


#: The files of ckptool by the names of their modules.
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
PACKAGES = {name for name, path in FILES.items() if path.name == "__init__.py"}


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    """Every module of ckptool, parsed once for all tests of this file."""
    return [
        module_of(name, path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))) for name, path in FILES.items()
    ]


def _walk(node: ast.AST, local: bool, typing: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, local, typing
        elif isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for part in child.body:
                yield from _walk(ast.Module([part], []), local, True)
            for part in child.orelse:
                yield from _walk(ast.Module([part], []), local, typing)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, local or function, typing)


def _targets(name: str, node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the modules that an import in the module of this name names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        parts = name.split(".")
        package = parts if name in PACKAGES else parts[:-1]
        package = package[: len(package) - node.level + 1]
        base = ".".join([*package, *([base] if base else [])])
    # ``from . import batches`` imports a module, not a name of the package.
    return [full if (full := f"{base}.{alias.name}") in FILES else base for alias in node.names]


def level(room: str) -> int:
    return _level(room, LAYERS)


def _level(name: str, layers: tuple[frozenset[str], ...]) -> int:
    return next((number for number, names in enumerate(layers) if name in names), -1)


def upward(module: Module) -> list[str]:
    """The imports of a module that do not run downwards."""
    wrong = []
    for found in module.imports:
        if found.target.split(".")[0] != "ckptool":
            continue
        room = found.target.split(".")[1] if "." in found.target else "ckptool"
        if room != module.room and level(room) >= level(module.room):
            wrong.append(f"{module.path}:{found.line} imports {found.target}")
    return wrong


def format_of(name: str) -> str:
    """The folder or module of ``formats`` that a module belongs to; "" for a module of another room."""
    _, room, *inner = [*name.split("."), "", ""]
    return "" if room != "formats" else inner[0] or "formats"


def upward_in_formats(module: Module) -> list[str]:
    """The imports of a module of ``formats`` that do not run downwards inside the room."""
    own = format_of(module.name)
    others = [(found, format_of(found.target)) for found in module.imports if own]
    return [
        f"{module.path}:{found.line} imports {found.target}"
        for found, other in others
        if other and other != own and _level(other, FORMATS) >= _level(own, FORMATS)
    ]


def outside(module: Module) -> dict[str, list[Import]]:
    """What is imported from outside of ckptool, by the name of the package."""
    found: dict[str, list[Import]] = {}
    for one in module.imports:
        top = one.target.split(".")[0]
        if top != "ckptool":
            found.setdefault(top, []).append(one)
    return found


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else f".{node.attr}"
    return ""


# -- direction ------------------------------------------------------------------------------------------------


def test_every_room_has_its_layer(modules: list[Module]) -> None:
    rooms = {module.room for module in modules}
    assert rooms - frozenset().union(*LAYERS) == set()
    assert frozenset().union(*LAYERS) - rooms == set()
    assert sum(map(len, LAYERS)) == len(frozenset().union(*LAYERS))


def test_imports_run_downwards(modules: list[Module]) -> None:
    assert [wrong for module in modules for wrong in upward(module)] == []


def test_imports_inside_formats_run_downwards(modules: list[Module]) -> None:
    every = {format_of(module.name) for module in modules} - {""}
    assert every == frozenset().union(*FORMATS)
    assert [wrong for module in modules for wrong in upward_in_formats(module)] == []


def upward_by_name(module: Module) -> set[str]:
    """The modules of rooms above that a module imports by their names, with ``base.lazy``."""
    names = [
        part.value
        for name, call in module.calls
        if name == "lazy.module"
        for part in ast.walk(call)
        if isinstance(part, ast.Constant)
    ]
    return {name for name in names if level(name.split(".")[0]) > level(module.room)}


def test_imports_by_name_run_downwards_too(modules: list[Module]) -> None:
    # Higher rooms make what a Checkpoint shows in Python and in a notebook, and write it, when it is asked for.
    face = {"reports.entries", "reports.inspection", "reports.html", "saving"}
    found = {module.path: names for module in modules if (names := upward_by_name(module))}
    # The room of remote files is imported once an address is opened.
    remote = {f"ckptool/files/{name}.py": {"remote.source"} for name in ("archives", "downloads")}
    remote["ckptool/files/downloads.py"].add("remote.store")
    remote["ckptool/files/folders.py"] = {"remote.folder"}
    assert found == {"ckptool/checkpoint/checkpoint.py": face, **remote}


def test_there_is_no_cycle_not_even_within_a_room(modules: list[Module]) -> None:
    graph = {module.name: {found.target for found in module.imports if found.target in FILES} for module in modules}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a cycle: {' -> '.join(error.args[1])}")
    assert set(order) == FILES.keys()


#: An option of ckptool in a text: options of dask, pip and git are another matter. In backticks it is spelled for
#: Python or a shell when it is shown.
_OPTION = re.compile(r"(?<![-`\w])--(?!nthreads|upgrade|include {path})[a-z]")


def spelled_options(path: Path) -> list[str]:
    """The string literals of a module that spell an option of ckptool, apart from docstrings."""
    source = path.read_text(encoding="utf-8")
    if not _OPTION.search(source):
        return []
    tree = ast.parse(source)
    prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    literals = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in prose]
    texts = [(node.lineno, node.value) for node in literals if isinstance(node.value, str)]
    return [f"{path.relative_to(ROOT)}:{line} spells {text!r}" for line, text in texts if _OPTION.search(text)]


def test_options_are_spelled_in_cli_only() -> None:
    rooms = [path for name, path in FILES.items() if not name.startswith("ckptool.cli")]
    assert [text for path in rooms for text in spelled_options(path)] == []
    assert spelled_options(PACKAGE / "cli" / "options.py")


# -- one place for each thing -----------------------------------------------------------------------------------


def test_torch_is_imported_in_functions_of_values_torch_only(modules: list[Module]) -> None:
    for module in modules:
        for name in {"torch", "numpy", "safetensors"} & outside(module).keys():
            for found in outside(module)[name]:
                assert found.typing or (found.local and module.name.startswith("ckptool.values.torch.")), (
                    f"{module.path}:{found.line}"
                )


def test_the_rest_is_the_standard_library_and_click_and_tabulate_in_the_cli(modules: list[Module]) -> None:
    found = {module.path: others for module in modules if (others := outside(module).keys() - allowed_in(module))}
    assert found == {}


#: Packages that one module may import, besides what all modules may.
OWN_PACKAGES = {
    "ckptool/cli/render.py": {"click", "tabulate"},
    "ckptool/base/toml.py": {"tomli"},  # tomllib under Python 3.10
    "ckptool/files/cluster.py": {"dask", "distributed"},  # the extra ckptool[dask]
    "ckptool/files/compressed.py": {"zstandard", "compression"},  # the extra ckptool[zstd], and Python 3.14
    "ckptool/remote/libraries.py": {"obstore", "fsspec"},  # the extra ckptool[remote]; torch requires fsspec
    "ckptool/remote/s3.py": {"botocore"},  # the extra ckptool[s3]
    "ckptool/values/dequantized.py": {"gguf"},  # the extra ckptool[gguf]
    "ckptool/remote/web.py": {"huggingface_hub"},  # the extra ckptool[hf]
}


def allowed_in(module: Module) -> set[str]:
    """Return the packages that a module may import."""
    allowed = {*sys.stdlib_module_names, "torch", "numpy", "tomllib", *(["click"] if module.room == "cli" else [])}
    return allowed | OWN_PACKAGES.get(module.path, set())


#: Modules of the standard library that execute what they are given, or reach out of the process.
DANGEROUS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "ctypes", "subprocess", "socket", "runpy"}
DANGEROUS |= {"code", "multiprocessing", "urllib", "http", "importlib", "pkgutil", "zipimport", "tempfile", "shutil"}


def test_nothing_that_executes_is_within_reach(modules: list[Module]) -> None:
    exceptions = {
        ("ckptool/base/lazy.py", "importlib"),  # modules of ckptool by their names in tables
        ("ckptool/files/write/output.py", "ctypes"),  # system calls that Python does not have
        ("ckptool/files/write/space.py", "ctypes"),
        ("ckptool/formats/dcp/listing.py", "pickle"),  # its unpickler, with a stand-in for every name
        ("ckptool/files/compressed.py", "tempfile"),  # what is too large for memory, in a file without a name
        ("ckptool/files/engine.py", "multiprocessing"),  # more processes of this program, for --jobs
        ("ckptool/files/write/workers.py", "pickle"),  # plans on their way to them
        ("ckptool/files/cluster.py", "multiprocessing"),  # the same for --engine dask
        ("ckptool/files/cluster.py", "tempfile"),  # what its workers write
        ("ckptool/cli/validation_formats.py", "urllib"),  # quotes a path for a URI
        ("ckptool/remote/web.py", "urllib"),  # quotes a revision
        ("ckptool/remote/s3.py", "urllib"),  # the same for a key
        ("ckptool/remote/wire.py", "urllib"),  # splits addresses
        ("ckptool/remote/wire.py", "socket"),  # sends requests
        ("ckptool/remote/wire.py", "http"),  # reads answers
        ("ckptool/values/torch/loads.py", "ctypes"),  # the BLAS of the installed torch, for products of matrices
        ("ckptool/values/torch/loads.py", "tempfile"),  # a copy of a remote file
        ("ckptool/values/torch/loads.py", "pickle"),  # the class of an error that torch.load raises
        ("ckptool/values/torch/loads.py", "importlib"),  # the model that match --model names, and says that it runs
    }
    assert {(module.path, name) for module in modules for name in outside(module).keys() & DANGEROUS} == exceptions
    executing = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "breakpoint", "input"}
    assert [(module.path, name) for module in modules for name, _ in module.calls if name in executing] == []


#: Definitions that take longer than those of ``base.records`` and ``base.lazy``, and are often not used in a run.
_EXPENSIVE = re.compile(
    r"^from typing import .*\b(?:NamedTuple|TypedDict)\b|^[A-Za-z_]\w*(?:: Final)? = re\.compile\(.*", re.MULTILINE
)


def test_named_tuples_and_regular_expressions_are_cheap_to_define(modules: list[Module]) -> None:
    texts = {module.path: (ROOT / module.path).read_text(encoding="utf-8") for module in modules}
    expensive = {path: _EXPENSIVE.findall(text) for path, text in texts.items()}
    assert {path: lines for path, lines in expensive.items() if lines} == {}
    assert _EXPENSIVE.search("from typing import Final, NamedTuple")
    assert _EXPENSIVE.search('_NAME: Final = re.compile("a")')


def test_regular_expressions_compile() -> None:
    expressions = [
        value
        for name in FILES
        if name != "ckptool.__main__"
        for value in vars(importlib.import_module(name)).values()
        if type(value) is type(regex(""))
    ]
    assert len(expressions) > 150
    assert all(isinstance(expression.pattern, str | bytes) for expression in expressions)


def test_only_render_prints(modules: list[Module]) -> None:
    printers = {"ckptool/cli/render.py"}
    errors = {"ckptool/cli/render.py", "ckptool/cli/main.py"}  # what went wrong at the very top
    found = [(module, name, call) for module in modules for name, call in module.calls]
    for module, name, call in found:
        where = f"{module.path}:{call.lineno}"
        assert name not in ("print", "click.secho", "pprint.pprint", "warnings.warn", "logging.info"), where
        if name in ("sys.stdout.write", "sys.stderr.write"):
            assert module.path in printers, where
        if name == "click.echo":
            assert module.path in errors, where
            assert module.path in printers or any(word.arg == "err" for word in call.keywords), where


#: Calls that change a file system, but for ``open``.
WRITERS = {
    f"os.{name}"
    for name in (
        *("remove", "unlink", "rename", "renames", "replace", "link", "symlink", "mkdir", "makedirs", "rmdir", "chmod"),
        *("fchmod", "chown", "truncate", "ftruncate", "utime", "write", "pwrite", "copy_file_range", "sendfile"),
        *("mkfifo", "mknod", "removedirs", "setxattr", "posix_fallocate", "fsync", "fdatasync"),
    )
}
WRITERS |= {".write_text", ".write_bytes", ".touch", ".unlink", ".mkdir", ".rename", ".hardlink_to", ".symlink_to"}


def writes(module: Module) -> list[tuple[str, int]]:
    """Calls that open for writing or change the file system: (name, line)."""
    found = []
    for name, call in module.calls:
        words = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
        flags = words & {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"}
        mode = call.args[1] if len(call.args) > 1 else None
        mode = next((word.value for word in call.keywords if word.arg == "mode"), mode)
        plain = mode is None or (isinstance(mode, ast.Constant) and not set("wax+") & set(str(mode.value)))
        methods = {part for part in WRITERS if part.startswith(".")}
        if (
            name in WRITERS
            or any(name.endswith(method) for method in methods)
            or (name == "os.open" and (flags or not words & {"O_RDONLY"}))
            or (name in ("open", "io.open", "os.fdopen") and not plain)
            or (name == "click.open_file")
        ):
            found.append((name, call.lineno))
    return found


def test_only_write_writes(modules: list[Module]) -> None:
    exceptions = {
        ("ckptool/cli/editing.py", "os.makedirs"),  # the folder of --out-dir
        ("ckptool/cli/main.py", "os.open"),  # /dev/null in place of a stdout whose reader has gone
    }
    others = [module for module in modules if not module.name.startswith("ckptool.files.write")]
    assert {(module.path, name) for module in others for name, _ in writes(module)} == exceptions


def test_a_source_is_opened_for_reading() -> None:
    tree = ast.parse((PACKAGE / "files" / "sources.py").read_text(encoding="utf-8"))
    words = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert "O_RDONLY" in words
    assert words & {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"} == set()


def test_no_reader_but_ckptools_own(modules: list[Module]) -> None:
    """zipfile sees other bytes than torch does (docs/readers.md), pickle runs them."""
    for module in modules:
        assert outside(module).keys() & {"zipfile", "tarfile", "pickletools"} == set(), module.path


# -- formats answer for themselves -----------------------------------------------------------------------------


#: The facts of ``Traits`` that any room may read. The others mean one format: a method of ``Container`` answers for it.
SHARED_FACTS = {"no_checksums", "size_source", "loads", "loader", "writes_as", "storages_in_sequence"}
#: The rooms that know formats by their answers only.
SHARED_ROOMS = {"safety", "values", "edits", "reports", "saving", "cli"}


def facts_of_one_format(text: str) -> set[str]:
    """The facts about formats that a module reads though they mean one format, and formats that it compares."""
    tree = ast.parse(text)
    found = set()
    read = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node.value).endswith("traits") and node.attr not in SHARED_FACTS:
            found.add(node.attr)
        if isinstance(node, ast.Attribute) and node.attr == "traits" and id(node) not in read:
            found.add("traits")  # passed on, its facts would be read unseen
        if isinstance(node, ast.Compare) and dotted(node.left).endswith((".format", ".traits.writes_as")):
            found |= {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return found


def test_shared_rooms_ask_no_question_that_means_one_format(modules: list[Module]) -> None:
    shared = [module for module in modules if module.room in SHARED_ROOMS]
    found = {module.path: facts_of_one_format((ROOT / module.path).read_text(encoding="utf-8")) for module in shared}
    exceptions = {"ckptool/edits/salvage.py": {"traits"}}  # what is rescued keeps the facts of its file
    assert {path: names for path, names in found.items() if names} == exceptions


# -- size ---------------------------------------------------------------------------------------------------------


def test_modules_can_be_read_in_one_go(modules: list[Module]) -> None:
    assert {module.path: module.lines for module in modules if module.lines > 600} == {}


# -- the rules can fail ---------------------------------------------------------------------------------------------


def upward_of(name: str, text: str) -> int:
    return len(upward(module_of(f"ckptool.{name}", text)))


def test_an_upward_import_is_found() -> None:
    assert upward_of("base.errors", "from ..files import sources")
    assert upward_of("pickles.decode", "def f():\n    from ..checkpoint.checkpoint import Checkpoint")
    assert upward_of("checkpoint.survey", "import ckptool.formats") and upward_of("reports.x", "from .. import saving")
    assert upward_of("edits.keys", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..cli import render")
    assert not upward_of("edits.keys", "from .optimizers import Optimizer\nfrom ..base import errors")
    assert not upward_of("cli.show", "from ..reports.keys import keys_report")


WRITES = (
    "open('x', 'wb')",
    "open('x', mode='r+')",
    "open('x', mode=how)",
    "os.open('x', flags)",
    "os.replace('a', 'b')",
)
WRITES += ("os.open('x', os.O_RDONLY | os.O_CREAT)", "Path('x').write_bytes(b'')")
READS = ("open('x')", "open('x', 'rb')", "os.open('x', os.O_RDONLY)")


def test_a_write_is_found() -> None:
    assert all(writes(module_of("ckptool.x", text)) for text in WRITES)
    assert not any(writes(module_of("ckptool.x", text)) for text in READS)


QUESTIONS = {
    "checkpoint.container.traits.assembled": {"assembled"},
    "traits = checkpoint.traits": {"traits"},
    "checkpoint.container.format in ('hf-torch', 'dcp')": {"hf-torch", "dcp"},
    "checkpoint.traits.writes_as != 'program'": {"program"},
    "checkpoint.traits.loads == 'file' and checkpoint.pickled": set(),
}


def test_a_question_about_one_format_is_found() -> None:
    assert {text: facts_of_one_format(text) for text in QUESTIONS} == QUESTIONS
