"""Text for people: numbers, lists, shell words and the next steps that messages suggest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import chain, count
from shlex import quote

from .limits import LIMITS


def words(text: str) -> frozenset[str]:
    """Return the words of a text, for long sets of names in the code."""
    return frozenset(text.split())


def human_bytes(size: int) -> str:
    """Format bytes as ``512 bytes``, ``26.1 kB``, ``2.00 GB``: powers of ten, three digits."""
    if size < 1000:
        return "1 byte" if size == 1 else f"{size} bytes"
    value, unit = size / 1000, 0
    while value >= 999.5 and unit < 5:
        value, unit = value / 1000, unit + 1
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {('kB', 'MB', 'GB', 'TB', 'PB', 'EB')[unit]}"


def human_count(count: int) -> str:
    """Format a number of parameters as ``3,205``, ``11.2 M``, ``6.74 B``."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= limit:
            value = count / limit
            return f"{value:.{2 if value < 10 else 1}f} {unit}"
    return f"{count:,}"


def cut(text: str, size: int = LIMITS.cell_chars) -> str:
    """Truncate a text that is too long for one cell."""
    return text if len(text) <= size else text[: size - 3] + "..."


def quoted(text: str) -> str:
    """Quote a text, truncated if it is too long."""
    return repr(cut(text))


def argument(path: str) -> str:
    """Quote a path as a command-line argument that can be pasted into a shell."""
    if path.startswith("-"):
        path = f"./{path}"
    if path.isprintable():
        return quote(path)

    def octal(char: str) -> str:
        return "".join(f"\\{byte:03o}" for byte in char.encode("utf-8", "surrogateescape"))

    # Control characters must not reach the terminal. Bash, zsh and POSIX 2024 read this form.
    return "$'" + "".join(char if char.isalnum() or char in " ./_-" else octal(char) for char in path) + "'"


def shell_command(name: str, *arguments: str, options: Sequence[str] = (), output: str = "") -> str:
    """Spell a command of ckptool as it is typed; no other place does. ``output`` is the file for -o, "" for none."""
    words = [argument(word) for word in (name, *arguments)] + [quote(option) for option in options]
    return " ".join(["ckptool", *words, *(("-o", argument(output)) if output else ())])


def salvage_step(path: str) -> str:
    """Return the next step for a partly damaged file or folder."""
    if os.path.isdir(path):
        return "get the files again that are missing or damaged"
    return f"save what is intact: {shell_command('salvage', path, output=suggested_output(path, 'saved'))}"


def tree_step(path: str) -> str:
    """Return the command that shows every path in a checkpoint."""
    return shell_command("inspect", path, options=("--tree",))


def suggested_output(path: str, word: str = "", extension: str = "") -> str:
    """Return a free name beside the input: ``model.pth`` gives ``model.cpu.pth``, or ``model.cpu.2.pth`` if that is
    taken; ``x.pth.tar`` gives ``x.cpu.pth.tar``, the folder ``v1.5`` gives ``v1.5.cpu``.

    An address within an archive, ``outer.zip!run/a.pth``, gives a name after its member: ``a.cpu.pth``.
    """
    if "!" in path and not os.path.lexists(path):
        path = os.path.basename(path.rpartition("!")[2])
    stem, suffix = os.path.splitext(os.path.normpath(path))
    if os.path.isdir(path):
        stem, suffix = os.path.normpath(path), ""
    if suffix == ".tar" and stem.endswith((".pth", ".pt", ".ckpt")):
        stem, inner = os.path.splitext(stem)
        suffix = inner + suffix
    elif suffix == ".tar":
        suffix = ".pth"  # an edited torch 0.1 file becomes a zip
    stem = f"{stem}.{word}" if word else stem
    suffix = extension or suffix
    names = (f"{stem}.{number}{suffix}" for number in count(2))
    return next(name for name in chain((stem + suffix,), names) if not os.path.lexists(name))


def rename_step(path: str, extension: str) -> str:
    """Return the next step for a file whose extension belongs to another format."""
    return f"mv {argument(path)} {argument(suggested_output(path, extension=extension))}"


def undo_step(path: str) -> str:
    """Return the command that takes back the last edit in place of a file."""
    return shell_command("undo", path)


def pluralize(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 tensor``, ``2,000 tensors``."""
    if count == 1:
        return f"1 {noun}"
    plural = noun[:-1] + "ies" if noun.endswith("ry") else noun + "s"
    return f"{count:,} {plural}"


def shape_text(shape: Iterable[int]) -> str:
    """Format a shape as ``64x3x7x7``; one without dimensions is ``scalar``."""
    return "x".join(map(str, shape)) or "scalar"


def join_limited(items: Sequence[str], total: int | None = None, most: int = 5) -> str:
    """Join items as ``a, b and c``; of more than ``most``, the others are counted: ``a, b and 7 more``."""
    total = len(items) if total is None else total
    first = [cut(item) for item in items[:most]]
    if total > len(first):
        return f"{', '.join(first)} and {total - len(first):,} more"
    *front, last = first or [""]
    return f"{', '.join(front)} and {last}" if front else last
