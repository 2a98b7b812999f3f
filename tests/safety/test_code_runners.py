"""The survey of functions that run what they are given: ckptool names a call of each, under each of its names."""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, WHOLE, sample

from ckptool.base.text import words
from ckptool.safety.calls import _HARMLESS, ACTS, effect_of

runners = SimpleNamespace(**runpy.run_path(str(ROOT / "fixtures" / "generators" / "code_runners.py")))

SOURCE = """
import importlib, os
from subprocess import Popen as Start

def direct(code):
    exec(code)

def through_names(given):
    for part in given:
        with open(os.devnull) as file:
            command = f"{file} {part}"
    os.system(command)

def through_another(name):
    return direct(f"import {name}")

def of_its_own():
    exec("pass")

class Made:
    def __init__(self, command):
        self.done = Start(command)

class Heir(Made):
    pass

class Lazy:
    def __getattr__(self, name):
        return importlib.import_module(self.module)

class Later:
    def run(self, code):
        eval(code)

def makes(command):
    return Made(command)
"""


def test_the_survey_follows_arguments(tmp_path: Path) -> None:
    (tmp_path / "seed.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("exec(")
    found = {(item.name, item.method, item.reaches) for item in runners.survey([tmp_path])}
    assert found == {
        ("direct", "", "exec"),
        ("through_names", "", "os.system"),
        ("through_another", "", "seed.direct"),
        ("Made", "__init__", "subprocess.Popen"),
        ("Heir", "__init__", "subprocess.Popen"),
        ("Lazy", "__getattr__", "importlib.import_module"),
        ("Later.run", "", "eval"),
        ("makes", "", "seed.Made"),
    }


def test_a_wheel_is_read_like_a_folder(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "torch-9.9.whl", "w") as wheel:
        wheel.writestr("torch/__init__.py", "")
        wheel.writestr("torch/nn/functional.py", SOURCE)
        wheel.writestr("other/__init__.py", SOURCE)
        wheel.writestr("torch/include/header.py", SOURCE)
    found = runners.survey([tmp_path / "torch-9.9.whl"])
    assert {item.module for item in found} == {"torch.nn.functional", "other"}
    assert "direct" in {item.name for item in runners.uncovered(found)}


def test_what_ckptool_does_not_know_is_listed(tmp_path: Path) -> None:
    """Of a package that is not known, nothing is; NEWOBJ runs no constructor, but BUILD calls a method."""
    folder = tmp_path / "torch" / "nn" / "functional"
    folder.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (folder / "__init__.py").write_text(SOURCE)
    found = {item.name for item in runners.uncovered(runners.survey([tmp_path / "torch"]))}
    assert found == {"direct", "through_names", "through_another", "Made", "Heir", "Lazy", "makes"}


@functools.cache
def installed() -> list[Any]:
    """Return the survey of the installed Python, torch and NumPy: of every fifth module, or all in ``make torture``."""
    return surveyed(module for place in runners.folders() for module in sample([*runners.modules(place)], 5))


def surveyed(modules: Iterable[tuple[str, bytes]]) -> list[Any]:
    """Return the survey of modules, each given by its path and source."""
    return [item for path, source in modules for item in runners._in_module(path, source)]


@pytest.mark.sampled
def test_every_function_that_runs_what_it_is_given_is_known() -> None:
    """Of the installed Python, torch and NumPy. ``make torch-lists`` says the same of a torch to come."""
    pytest.importorskip("torch")
    assert [place.name for place in runners.folders()[1:]] == ["torch", "numpy"]
    assert len(installed()) > (400 if WHOLE else 80)
    assert runners.uncovered(installed()) == []


def test_reviewed_functions_are_there() -> None:
    """An entry that nothing needs any more would hide a function of that name."""
    known = ("collections", "dis.", "zoneinfo/_")
    modules = [item for item in runners.modules(runners.folders()[0]) if item[0].startswith(known)]
    found = {f"{item.module}.{item.name}" for item in surveyed(modules)}
    stale = {name for name in runners.REVIEWED if name.startswith(("collections.", "dis.", "zoneinfo._"))} - found
    assert not stale


#: Members of modules that count as a whole, which start nothing themselves.
QUIET = words("""
    RLock Lock LockType _CRLock ExceptHookArgs Config LoggingTensorMode _Pickler StrobelightCompileTimeProfiler _RT mul
""")


def members() -> Iterator[tuple[str, str, object]]:
    """Every function and class of the modules that ``import torch`` runs, under each name that it has there.

    Also of the modules of Python whose functions count as harmless.
    """
    pytest.importorskip("torch")
    for harmless in _HARMLESS:
        with suppress(ImportError):  # those of Python 2
            importlib.import_module(harmless)
    known = (*sys.stdlib_module_names, "torch", "numpy")
    for module in [sys.modules[name] for name in sorted(sys.modules) if name.partition(".")[0] in known]:
        for name, member in sorted(vars(module).items()) if isinstance(module, types.ModuleType) else ():
            if isinstance(member, types.FunctionType | types.BuiltinFunctionType | type):
                yield module.__name__, name, member


def hidden() -> list[str]:
    """Return the other names of functions that act, where such a name counts as harmless."""
    found = []
    for module, name, member in members():
        origin, own = getattr(member, "__module__", None), getattr(member, "__qualname__", "")
        if name in QUIET or (isinstance(member, type) and issubclass(member, BaseException)):
            continue
        if isinstance(origin, str) and effect_of(origin, own) == ACTS and not effect_of(module, name):
            found.append(f"{module}.{name} is {origin}.{own}")
    return found


def test_a_function_that_acts_does_so_under_every_name() -> None:
    """``from subprocess import Popen`` in any module makes another name for it.

    In a process of its own: other tests import more of torch.
    """
    pytest.importorskip("torch")
    here = Path(__file__).resolve()
    places = [ROOT, ROOT / "tests", ROOT / "tests" / "helpers", here.parent]
    script = f"import {here.stem} as module; print(*module.hidden(), sep='\\n', end='')"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
