"""The benchmark group for rank files: join the parts that four ranks saved into one file."""

from __future__ import annotations

import sys
from pathlib import Path

from bench import files
from bench.files import Spec, made
from bench.jobs import Check, Group, Job, Row, Target
from bench.references import COPY, SLOW

WORLD = 4
JOIN = "convert, four rank files to one"
CAT = "torch.load of each + cat + save_file"
_CAT = (
    "import sys, pathlib, torch, torch.distributed.tensor; from safetensors.torch import save_file\n"
    "paths = sorted(pathlib.Path(sys.argv[1]).iterdir())\n"
    "parts = [torch.load(path, weights_only=False) for path in paths]\n"
    "def whole(name):\n"
    "    dim = parts[0][name].placements[0].dim\n"
    "    return torch.cat([part[name].to_local() for part in parts], dim)\n"
    "save_file({name: whole(name) for name in parts[0]}, sys.argv[2])\n"
)


def group(tool: list[str], spec: Spec, work: Path) -> Group:
    """Join the parts of a checkpoint from four ranks: a quarter of the tensors is cut by columns, the rest by rows."""
    stem = f"ranks-{Path(spec.name).stem}"
    source, folder, output = work / spec.name, work / stem, work / "output.safetensors"
    reads = tuple(folder / f"model_rank{rank}.pt" for rank in range(WORLD))
    check = Check("convert", source, output)
    join = Job(JOIN, (*tool, "convert", str(folder), "-o", str(output)), reads, output, check)
    script = 'mkdir -p "$2" && cp "$1"/* "$2" && sync "$2"/*'
    copy = Job(COPY, ("sh", "-c", script, "sh", str(folder), str(work / "output.ranks")), reads, work / "output.ranks")
    cat = Job(CAT, (sys.executable, "-c", _CAT, str(folder), str(output)), reads, output, check, most=SLOW)
    near = Target(1.2, peak=64) if spec == files.BIG else None
    rows = (Row(JOIN, COPY, near, reader=spec == files.BIG), Row(JOIN, CAT, reader=spec == files.BIG))
    setup = (
        made(lambda unfinished: files.make(spec, unfinished), source),
        made(lambda unfinished: files.run_torch("ranks", unfinished, source, WORLD), folder),
    )
    return Group("join", f"{WORLD} rank files of {spec.label}", (join, copy, cat), rows, setup)
