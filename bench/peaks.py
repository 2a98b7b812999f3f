"""The peak memory of every command on one large file: one run each, no comparison."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

from bench import files
from bench.files import Spec, made
from bench.jobs import Check, Group, Job, Row, Target

NAME = "peaks"
_LIMIT = Target(peak=64)
_GLOB = f"{files.PREFIX}layers.1.*"
_KEY = f"{files.PREFIX}layers.1.mlp.weight"
_TWIN = "{twin}"  # stands for a copy of the file, used as the second input


class Command(NamedTuple):
    """A command: its name, the words after the path of the file, and the option that names an output, or "".

    `on` is the suffix of another input made from the file, or "". `code` is the exit code of success, `suffix` the
    suffix of the output.
    """

    name: str
    words: tuple[str, ...] = ()
    out: str = "-o"
    torch: bool = False
    code: int = 0
    on: str = ""
    suffix: str = "pt"


COMMANDS = (
    Command("inspect", out=""), Command("keys", out=""), Command("get", (_KEY,), suffix="npy"),
    Command("scan", out=""), Command("validate", out=""), Command("hash", out=""), Command("lock --content"),
    Command("diff", (_TWIN,), out=""), Command("match", (_TWIN,), out=""), Command("redact", out=""),
    Command("strip-module"), Command("add-module"), Command("remap --to cpu"),
    Command("rename", ("--rename", "module.*=net.*")),
    Command("extract", ("state_dict",), on=".wrapped"), Command("drop", (_GLOB,)), Command("edit", ("--keep", _GLOB)),
    Command("set", ("epoch=3",), on=".wrapped"),
    Command("edit --strip-module --to cpu"), Command("merge", (_TWIN,)), Command("slim"),
    Command("slim --dedupe"), Command("redact --redact all"), Command("sanitize"),
    Command("salvage", on=".cut", code=1),
    Command("convert --to-format safetensors --allow-loss devices", suffix="safetensors"),
    Command("cast --to-dtype bfloat16", torch=True), Command("average", (_TWIN,), torch=True),
    Command("resize --vocab 2000", ("--include", _KEY), torch=True),
    Command("stats", out="", torch=True), Command("validate --finite", out="", torch=True),
    Command("report", torch=True),
)  # fmt: skip


def group(tool: list[str], spec: Spec, work: Path) -> Group:
    """Return one group with every command on one checkpoint."""
    path = work / spec.name
    wrapped, cut, twin = (path.with_suffix(suffix) for suffix in (".wrapped", ".cut", ".twin"))

    def wrap(unfinished: Path) -> None:
        edits = ("--wrap", "state_dict", "--set", "epoch=2")
        subprocess.run([*tool, "edit", path, *edits, "-o", unfinished, "-q"], check=True, cwd=files.ROOT)

    jobs = tuple(_job(tool, each, path) for each in COMMANDS)
    target = _LIMIT if spec == files.BIG else None
    rows = tuple(Row(each.name, target=None if each.torch else target, torch=each.torch) for each in COMMANDS)
    setup = (
        made(lambda unfinished: files.make(spec, unfinished), path), made(wrap, wrapped),
        made(files.half_of(path), cut), made(files.copy_of(path), twin),
    )  # fmt: skip
    return Group(NAME, spec.label, jobs, rows, setup, (wrapped, cut, twin))


def _job(tool: list[str], given: Command, path: Path) -> Job:
    source = path.with_suffix(given.on) if given.on else path
    output = path.with_name(f"output.{given.suffix}") if given.out else None
    name, *options = given.name.split()
    rest = (word if word != _TWIN else str(path.with_suffix(".twin")) for word in given.words)
    words = (*tool, name, str(source), *options, *rest, *((given.out, str(output)) if output else ()))
    check = Check("loads", source, output) if output and name not in ("lock", "get", "report", "convert") else None
    return Job(given.name, words, (source,), output, check, most=0, code=given.code)
