"""System calls: which ones a run makes, and a run in which one of them is the last, or fails."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple, Protocol

from .rows import ROOT, Skipped
from .stage import ENVIRONMENT, Answer

#: Everything that touches files, and the end. "?" lets a machine do without the ones it does not have.
_CALLS = (
    "open openat openat2 creat read pread64 readv preadv lseek stat fstat lstat newfstatat statx access faccessat"
    " faccessat2 getdents64 getrandom flock fcntl copy_file_range sendfile splice write pwrite64 writev pwritev"
    " truncate ftruncate fallocate chmod fchmod fchmodat chown fchown utimensat fsync fdatasync sync_file_range close"
    " link linkat rename renameat renameat2 unlink unlinkat mkdir mkdirat symlinkat exit_group"
)
#: Where modules come from.
_CODE = (f"{ROOT}/ckptool/", sys.prefix, sys.base_prefix, "/usr/lib")
_LINE = re.compile(r"(?P<pid>\d+) +(?P<name>\w+)\((?P<rest>.*)")


class Point(NamedTuple):
    """The ``number``-th call of ``name`` in its thread; ``text`` is the whole call as strace writes it."""

    name: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.name} no. {self.number}"


class Hit(NamedTuple):
    """A run with an injection: how it ended, and the call that was hit ("" when the run did not get so far)."""

    answer: Answer
    call: str


def need_strace() -> None:
    if shutil.which("strace") is None:
        raise Skipped("strace is not installed")
    probe = subprocess.run(["strace", "-f", "-o", "/dev/null", "true"], capture_output=True, check=False)
    if probe.returncode:
        raise Skipped("strace may not trace here")


class Run(Protocol):
    """What is put to the test: the file that it opens, and its command line."""

    source: Path

    def process(self) -> list[str]: ...


def points(stage: Run, log: Path) -> list[Point]:
    """The calls of a run from the opening of its input on: what Python does to start is none of ours."""
    names = ",".join("?" + name for name in _CALLS.split())
    _strace(stage, log, ["-e", f"trace={names}"])
    counts: Counter[tuple[str, str]] = Counter()
    found: list[Point] = []
    code: set[str] = set()  # descriptors of modules that Python reads late: neither input nor output
    begun = False
    for match in map(_LINE.match, log.read_text(errors="replace").splitlines()):
        if match is None:  # a signal, an exit, or the second half of a call that another thread interrupted
            continue
        pid, name, rest = match.group("pid", "name", "rest")
        counts[pid, name] += 1
        begun = begun or (name.startswith("open") and f'"{stage.source}"' in rest)
        if any(f'"{place}' in rest for place in _CODE):
            code |= {rest.rpartition(" = ")[2]} if name.startswith("open") else set()
        elif (fd := re.split("[,)]", rest, maxsplit=1)[0]) in code:
            code -= {fd} if name == "close" else set()
        elif begun:
            found.append(Point(name, counts[pid, name], f"{name}({rest}"))
    return found


def inject(stage: Run, log: Path, name: str, what: str) -> Hit:
    """A run in which something happens to a call; ``what`` is in strace's words: "signal=KILL:when=3"."""
    # The filter in the kernel makes a run twice as fast, but strace 6.1 then forgets the signals.
    filtered = [] if "signal=" in what else ["--seccomp-bpf"]
    done = _strace(stage, log, ["-e", f"trace={name}", "-e", f"inject={name}:{what}", *filtered])
    lines = log.read_text(errors="replace").splitlines()
    calls = [match.group("name", "rest") for match in map(_LINE.match, lines) if match]
    if "signal=KILL" in what:
        hit = [*calls[-1:]] if any("killed by SIGKILL" in line for line in lines) else []
    else:
        hit = [call for call in calls if "(INJECTED)" in call[1]]
    return Hit(done, "(".join(hit[0]) if hit else "")


def _strace(stage: Run, log: Path, options: list[str]) -> Answer:
    command = ["strace", "-f", "-q", "-s", "300", "-o", str(log), *options, *stage.process()]
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120, errors="replace"
    )
    return Answer(done.returncode, done.stdout, done.stderr)
