"""The facts about the machine that a reader needs to judge the figures. None of them identifies it."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe(work: Path, largest: int) -> list[str]:
    """Describe the machine in lines of text. `largest` is the size of the largest input in bytes."""
    available = _available_memory()
    cache = "warm (each input is read through before each run)"
    if available < 3 * largest:  # the input, the output and torch's copy of the tensors must fit
        cache = "not kept warm by this machine: too little memory for input, output and torch's copy"
    load = os.getloadavg()[0]
    cpus = len(os.sched_getaffinity(0))
    kernel = ".".join(platform.release().split(".")[:2])
    return [
        f"machine: {cpus} CPUs, {available / 1e9:.0f} GB memory free, Linux {kernel}, load {load:.1f} at the start",
        f"work folder: {filesystem(work)}; XFS and btrfs: images in it, mounted through a loop device; cache: {cache}",
        f"python {platform.python_version()}, torch {_version('torch')}, click {_version('click')}, "
        f"tabulate {_version('tabulate')}, {_copy_version()}",
    ]


def filesystem(path: Path) -> str:
    """Return the type of the filesystem that holds `path`, from the innermost mount above it."""
    best, kind = Path("/"), "unknown filesystem"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        # Field 5 is the mount point, with spaces written in octal (proc_pid_mountinfo(5)).
        point = Path(before.split()[4].replace("\\040", " "))
        if path.resolve().is_relative_to(point) and point.is_relative_to(best):
            best, kind = point, after.split()[0]  # a later mount at the same point hides the earlier one
    return kind


def touch_memory() -> None:
    """Use half of the free memory once.

    A virtual machine returns freed memory to its host, and the next program to use it waits for the host. Without this
    step, every second copy of 2 GB took up to three times as long, whatever the program.
    """
    size = _memory("MemFree") // 2
    if size and hasattr(mmap, "MAP_POPULATE"):
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


def _available_memory() -> int:
    """Return the bytes available without swapping."""
    return _memory("MemAvailable")


def _memory(name: str) -> int:
    """Return the bytes that the kernel reports under a name, or 0 if it does not report it."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _copy_version() -> str:
    """Return the first line of `cp --version`, which only GNU cp has."""
    answer = subprocess.run(["cp", "--version"], capture_output=True, text=True, check=False)
    return answer.stdout.partition("\n")[0] or "cp of unknown version"
