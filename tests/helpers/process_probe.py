"""An interpreter without torch and numpy that runs ckptool and reports what it imported and the memory it took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import NamedTuple

from conftest import ROOT

#: Modules that cost more than all of ckptool. (tabulate brings ``email`` along, by way of importlib.metadata.)
HEAVY = ("torch", "numpy", "safetensors", "pandas", "asyncio", "multiprocessing", "unittest")

#: Runs a command in an interpreter that has no torch and no numpy, and tells what was imported or wanted.
PROBE = """
    import json, os, sys

    class Absent:
        wanted = []
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("torch", "numpy", "safetensors"):
                self.wanted.append(name)
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Absent())
    code = 0
    try:
        exec(sys.argv[1])
    except SystemExit as end:
        code = end.code
    with open("/proc/self/status") as lines:
        peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    told = {"code": code, "wanted": Absent.wanted, "modules": sorted(sys.modules), "peak": peak}
    os.write(int(sys.argv[2]), json.dumps(told).encode())
"""


class Probe(NamedTuple):
    """What a probed interpreter told: exit code, modules asked for in vain, modules loaded, peak memory in bytes."""

    code: int
    wanted: list[str]
    modules: set[str]
    peak: int
    out: str
    err: str


def probe(statement: str) -> Probe:
    """Execute a statement in an interpreter without torch and numpy."""
    reading, writing = os.pipe()
    arguments = [sys.executable, "-c", textwrap.dedent(PROBE), statement, str(writing)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        arguments, env=environment, capture_output=True, text=True, pass_fds=(writing,), timeout=600, check=False
    )
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = json.loads(pipe.read() or "{}")
    assert told, done.stderr
    return Probe(told["code"], told["wanted"], set(told["modules"]), told["peak"], done.stdout, done.stderr)


def command(*arguments: str) -> Probe:
    return probe(f"from ckptool.cli.main import main; main({list(arguments)!r})")
