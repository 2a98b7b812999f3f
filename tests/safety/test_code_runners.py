"""The survey of functions that run what they are given: ckptool names a call of each, under each of its names."""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import subprocess
import sys
import types
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
