"""What is measured: the commands of ckptool, what they are compared with, and the targets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import files

# Builds a command from the paths of the input and the output.
Command = Callable[[Path, Path], list[str]]


@dataclass(frozen=True)
class Job:
    """One command; `slow` ones are repeated less often; `edit` names the check of correctness.py, if any."""

    name: str
    command: Command
    slow: bool = False
    edit: str = ""


@dataclass(frozen=True)
class Target:
    """What was promised: a ratio of times, and a peak in MB where one was promised."""

    ratio: float
    peak: float | None = None


@dataclass(frozen=True)
class Row:
    """One comparison, by the names of the two jobs."""

    job: str
    reference: str


@dataclass(frozen=True)
class Group:
    """Jobs that take turns on the same file, and the comparisons drawn from them."""

    jobs: tuple[Job, ...]
    rows: tuple[Row, ...]


# The references, as short as a user would write them. map_location is needed because the files come from a GPU.
_LOAD = "import sys, torch; state = torch.load(sys.argv[1], map_location='cpu'{mmap}); "
_KEYS = "print(*state, sep='\\n')"
_STRIP = (
    "from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present as strip; "
    f"strip(state, '{files.PREFIX}'); torch.save(state, sys.argv[2])"
)
_SAVE = "torch.save(state, sys.argv[2])"

# What checking cannot do without: every byte read and summed, in Python, by one core.
_SUM = (
    "import sys, zlib\n"
    "crc, buffer = 0, bytearray(1 << 20)\n"
    "view = memoryview(buffer)\n"
    "with open(sys.argv[1], 'rb', buffering=0) as file:\n"
    "    while size := file.readinto(buffer):\n"
    "        crc = zlib.crc32(view[:size], crc)\n"
)

FIVE = "edit, five edits in one pass"
_FIVE = ("--strip-module", "--rename", "*=net.*", "--add-prefix", "model", "--to", "cpu", "--wrap", "state_dict")
DIFF, CMP = "diff, one bit differs at the end", "cmp, one bit differs at the end"
DIFF_SAME, CMP_SAME = "diff, the same", "cmp, the same"
MATCH, NAMES = "match, prefix to be stripped", "two torch.load to meta, intersect the names"
IMPORTS = 'python -c "import click, tabulate"'
COPY = "cp && sync"
SUM = "read + zlib.crc32 loop"
SALVAGE = "salvage, half of the file cut off"


def _ckptool(tool: list[str], *words: str, edit: str = "") -> Job:
    def command(source: Path, output: Path) -> list[str]:
        return [*tool, words[0], str(source), *words[1:], *(["-o", str(output)] if edit else [])]

    return Job(" ".join(words), command, edit=edit)


def _torch(name: str, code: str, mmap: bool) -> Job:
    program = _LOAD.format(mmap=", mmap=True" if mmap else "") + code

    def command(source: Path, output: Path) -> list[str]:
        return [sys.executable, "-c", program, str(source), str(output)]

    return Job(name.format(mmap=", mmap" if mmap else ""), command, slow=True)


def _imports(source: Path, output: Path) -> list[str]:
    return [sys.executable, "-c", "import click, tabulate"]


def _copy(source: Path, output: Path) -> list[str]:
    return ["sh", "-c", 'cp "$1" "$2" && sync "$2"', "sh", str(source), str(output)]


def _sum(source: Path, output: Path) -> list[str]:
    return [sys.executable, "-c", _SUM, str(source)]


def _salvage(tool: list[str]) -> Job:
    def command(source: Path, output: Path) -> list[str]:
        cut = source.with_suffix(files.CUT)
        if not cut.exists():
            files.cut_in_half(source, cut)
        # Something is lost, so it ends with 1.
        return ["sh", "-c", '"$@" > /dev/null; test $? -eq 1', "sh", *tool, "salvage", str(cut), "-o", str(output)]

    return Job(SALVAGE, command)


def _other(source: Path) -> Path:
    """A copy of the file in which the last byte of the last tensor has a flipped bit."""
    other = source.with_suffix(files.FLIPPED)
    if not other.exists():
        files.flip_one(source, other)
    return other


def _comparing(words: list[str]) -> Command:
    def command(source: Path, output: Path) -> list[str]:
        # They differ, so it ends with 1.
        return ["sh", "-c", '"$@" > /dev/null; test $? -eq 1', "sh", *words, str(source), str(_other(source))]

    return command


def _same(words: list[str]) -> Command:
    def command(source: Path, output: Path) -> list[str]:
        return ["sh", "-c", '"$@" > /dev/null', "sh", *words, str(source), str(_copied(source))]

    return command


def _copied(source: Path) -> Path:
    twin = source.with_suffix(files.TWIN)
    if not twin.exists():
        files.copy(source, twin)
    return twin


def _matching(tool: list[str]) -> Command:
    def command(source: Path, output: Path) -> list[str]:
        plain = source.with_suffix(files.PLAIN)
        if not plain.exists():
            subprocess.run([*tool, "strip-module", str(source), "-o", str(plain), "-q"], check=True)
        # It fits after an edit, so it ends with 1.
        return ["sh", "-c", '"$@" > /dev/null; test $? -eq 1', "sh", *tool, "match", str(source), str(plain)]

    return command


def _names(source: Path, output: Path) -> list[str]:
    code = (
        "import sys, torch; a, b = (set(torch.load(p, map_location='meta')) for p in sys.argv[1:]); print(len(a & b))"
    )
    return [sys.executable, "-c", code, str(source), str(source.with_suffix(files.PLAIN))]


def _cast(mmap: bool) -> Job:
    code = "state = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}; " + _SAVE
    return _torch("torch.load{mmap} + cast + save", code, mmap)


def groups(tool: list[str]) -> tuple[Group, ...]:
    """The groups of jobs, those that read, write and check, with `tool` as the command that starts ckptool."""
    keys, names, inspect = _ckptool(tool, "keys"), _ckptool(tool, "keys", "--names"), _ckptool(tool, "inspect")
    strip = _ckptool(tool, "strip-module", edit="strip")
    remap = _ckptool(tool, "remap", "--to", "cpu", edit="remap")
    imports, copy = Job(IMPORTS, _imports), Job(COPY, _copy)
    torch_keys = tuple(_torch("torch.load{mmap} + print keys", _KEYS, mmap) for mmap in (False, True))
    torch_strip = tuple(_torch("torch.load{mmap} + strip + save", _STRIP, mmap) for mmap in (False, True))
    torch_remap = tuple(_torch("torch.load{mmap} to cpu + save", _SAVE, mmap) for mmap in (False, True))
    reading = Group(
        (keys, names, inspect, imports, *torch_keys),
        (
            *(Row(job.name, IMPORTS) for job in (keys, names, inspect)),
            *(Row(job.name, reference.name) for job in (keys, names) for reference in torch_keys),
        ),
    )
    writing = Group(
        (strip, remap, copy, *torch_strip, *torch_remap),
        (
            *(Row(strip.name, reference.name) for reference in (copy, *torch_strip)),
            *(Row(remap.name, reference.name) for reference in (copy, *torch_remap)),
        ),
    )
    validate, total, salvage = _ckptool(tool, "validate"), Job(SUM, _sum), _salvage(tool)
    checking = Group((validate, total, salvage), (Row(validate.name, SUM), Row(SALVAGE, SUM)))
    cast, plain = _ckptool(tool, "cast", "--dtype", "bfloat16", edit="cast"), tuple(map(_cast, (False, True)))
    casting = Group((cast, *plain), tuple(Row(cast.name, reference.name) for reference in plain))
    five = Job(FIVE, _ckptool(tool, "edit", *_FIVE, edit="five").command, edit="five")
    editing = Group((five, strip), (Row(FIVE, strip.name),))
    compare, cmp = Job(DIFF, _comparing([*tool, "diff"])), Job(CMP, _comparing(["cmp"]))
    same, cmp_same = Job(DIFF_SAME, _same([*tool, "diff"])), Job(CMP_SAME, _same(["cmp"]))
    comparing = Group((compare, cmp, same, cmp_same), (Row(DIFF, CMP), Row(DIFF_SAME, CMP_SAME)))
    match, torch_names = Job(MATCH, _matching(tool)), Job(NAMES, _names)
    matching = Group((match, torch_names), (Row(MATCH, NAMES),))
    return reading, writing, checking, casting, editing, comparing, matching


def target(spec: files.Spec, row: Row) -> Target | None:
    """The target of one comparison; None where none was set. The quick files are too small for any."""
    if spec == files.BIG and row == Row("keys", IMPORTS):
        return Target(2.0, 40)
    if spec == files.MANY and row.job == "keys" and row.reference != IMPORTS:
        return Target(0.25)
    if spec == files.BIG and row == Row("strip-module", COPY):
        return Target(1.3, 64)
    if spec == files.BIG and row.job.startswith("cast") and "mmap" not in row.reference:
        return Target(1 / 3, 1050)
    if spec == files.BIG and row.job in (DIFF, DIFF_SAME):
        return Target(1.3, 128)
    if spec == files.BIG and row.job == FIVE:
        return Target(1.2)
    if spec == files.BIG and row == Row("validate", SUM):
        return Target(1.3, 64)
    return None
