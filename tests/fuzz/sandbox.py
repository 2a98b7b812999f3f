"""Loads that may run code, in a process of their own that stops before anything is run.

A child is forked for each load. An audit hook there looks at every event of the interpreter: what reading a checkpoint
needs passes, an import of anything new fails as if it were not installed, and everything else ends the child at once.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

#: Events of reading files, of pickles, and of a temporary folder (the tar of old torch is unpacked into one).
_QUIET = {
    *("pickle.find_class", "object.__getattr__", "object.__setattr__", "object.__delattr__", "sys._getframe"),
    *("builtins.id", "os.listdir", "os.scandir", "mmap.__new__", "gc.get_objects", "gc.get_referrers"),
    *("sys.unraisablehook", "code.__new__", "os.putenv", "sys.excepthook", "sys._getframemodulename"),
    *("array.__new__", "fcntl.flock", "os.fwalk", "os.walk", "glob.glob"),
}
#: Events whose first argument is a path: in the folder of the load they are its own business.
_ON_PATHS = {
    *("os.mkdir", "os.rmdir", "os.remove", "os.chmod", "os.chown", "os.utime", "os.rename", "shutil.rmtree"),
    *("tempfile.mkdtemp", "tempfile.mkstemp", "os.truncate", "os.symlink", "os.link", "shutil.copyfile"),
    *("shutil.move", "os.setxattr"),
}
_PROJECT = str(Path(__file__).resolve().parents[2])
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Answer(NamedTuple):
    """``value`` is what the function returned, ``error`` what it raised in words, ``ran`` what it was about to run, ""
    for nothing; ``died`` how the process ended otherwise."""

    value: Any = None
    error: str = ""
    ran: str = ""
    died: str = ""


def contained(function: Callable[[], Any], folder: str, *, seconds: float = 20, memory: int = 4 << 30) -> Answer:
    """Call a function in a child in which nothing else than loading what is in ``folder`` can happen."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _confined(function, folder, writer, memory)
    os.close(writer)
    data = b""
    until = time.monotonic() + seconds
    try:
        while select.select([reader], [], [], max(0.0, until - time.monotonic()))[0]:
            part = os.read(reader, 1 << 16)
            if not part:
                break
            data += part
        else:
            os.kill(child, signal.SIGKILL)
            return Answer(died=f"took more than {seconds:g} s")
    finally:
        os.close(reader)
        _, status = os.waitpid(child, 0)
    try:
        return Answer(*pickle.loads(data))
    except (EOFError, pickle.UnpicklingError):
        return Answer(died=f"ended with status {status}")


def _confined(function: Callable[[], Any], folder: str, writer: int, memory: int) -> None:
    """The child: it never returns."""
    # Written with the descriptor alone: nothing that a load may have changed is called.
    write, end, dumps = os.write, os._exit, pickle.dumps
    loaded = set(sys.modules)
    armed = True

    def stop(what: str) -> None:
        write(writer, dumps((None, "", what[:300], "")))
        end(0)

    def hook(event: str, arguments: Any) -> None:
        nonlocal armed
        if not armed or event in _QUIET:
            return
        armed = False  # what this hook itself does
        try:
            if event == "import":
                name = str(arguments[0])
                if name not in loaded:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            elif event == "open":
                path, _, flags = arguments
                if _within(path, folder):
                    return
                if (flags or 0) & _WRITING or not _of_python(path):
                    stop(f"open {path!r}")
            elif not _is_harmless(event, arguments, folder):
                stop(f"{event} {_shown(arguments)}")
        finally:
            armed = True

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + memory, resource.RLIM_INFINITY))
    sys.addaudithook(hook)
    value, error = None, ""
    try:
        value = function()
    except BaseException as raised:
        armed = False
        error = f"{type(raised).__name__}: {str(raised)[:500]}"
    armed = False
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    view = memoryview(dumps((value, error, "", "")))
    while view:
        view = view[write(writer, view) :]
    end(0)


def _within(path: Any, folder: str) -> bool:
    if isinstance(path, int):
        return False
    name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    return name == folder or (name.startswith(folder + "/") and "/../" not in name)


def _is_harmless(event: str, arguments: Any, folder: str) -> bool:
    """Whether an event is about the folder of the load, or only looks like code."""
    if event == "compile":  # ast.parse, by which a traceback finds what to underline: nothing of it is run
        return len(arguments) > 1 and arguments[1] == "<unknown>"
    if event in ("os.remove", "os.rmdir") and _within(_folder_of(arguments[-1]), folder):
        return True
    named = -1 if event in ("os.symlink", "os.link") else 0
    return event in _ON_PATHS and bool(arguments) and _within(arguments[named], folder)


def _folder_of(descriptor: Any) -> str:
    """The folder that shutil.rmtree walks in."""
    if not isinstance(descriptor, int) or descriptor < 0:
        return ""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def _of_python(path: Any) -> bool:
    """Lines of source that a warning or a traceback quotes."""
    if not isinstance(path, str | bytes):
        return False
    name = os.fsdecode(path)
    return name.startswith((sys.prefix, sys.base_prefix, _PROJECT)) and name.endswith((".py", ".pyc", ".pth", ".so"))


def _shown(arguments: Any) -> str:
    try:
        return repr(arguments)[:200]
    except Exception:
        # repr() of what a hostile pickle made may raise anything.
        return "?"


def _address_space() -> int:
    with open("/proc/self/statm") as lines:
        return int(lines.read().split()[0]) * resource.getpagesize()
