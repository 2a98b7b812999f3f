"""Benchmark groups for torch.distributed.checkpoint folders: list very many pieces, and convert."""

from __future__ import annotations

import sys
from pathlib import Path

from bench import files, references
from bench.files import Spec, made
from bench.jobs import Group, Job, Row, Target
from bench.references import COPY, command

_LOAD = "import sys, pickle, torch.distributed.checkpoint; pickle.load(open(sys.argv[1] + '/.metadata', 'rb'))"
_PICKLE = "pickle.load of .metadata"
TO_SAFETENSORS, TO_DCP = "convert, to safetensors", "convert, to DCP"


def pieces(tool: list[str], work: Path, tensors: int, ranks: int) -> Group:
    """List the tensors of a folder that many ranks wrote, against torch's own load of the metadata."""
    folder = work / f"pieces-{tensors}x{ranks}-r{files.RECIPE}"
    make = made(lambda unfinished: files.run_torch("pieces", unfinished, tensors, ranks, 64), folder)
    listing = [
        command(tool, name, source=folder)._replace(most=references.SLOW, reads=()) for name in ("keys", "inspect")
    ]
    load = Job(_PICKLE, (sys.executable, "-c", _LOAD, str(folder)), most=references.SLOW)
    target = Target(1, peak=800)
    rows = tuple(Row(job.name, _PICKLE, target, reader=True) for job in listing)
    return Group("pieces", f"{tensors * ranks:,} pieces", (*listing, load), rows, (make,))


def planning(tool: list[str], work: Path, tensors: int, ranks: int, columns: int) -> Group:
    """Plan the conversion of a folder that many ranks wrote. Its data are holes, and nothing is written."""
    folder, output = work / f"sparse-{tensors}x{ranks}x{columns}-r{files.RECIPE}", work / "output.safetensors"
    make = made(lambda unfinished: files.run_torch("pieces", unfinished, tensors, ranks, columns), folder)
    job = command(tool, "convert", "--dry-run", "--key", ".", source=folder)
    job = job._replace(words=(*job.words, "-o", str(output)), most=references.SLOW, reads=())
    label = f"{tensors * ranks:,} pieces of {16 * columns:,} bytes, planned"
    return Group("planning", label, (job,), (Row(job.name, target=Target(seconds=60, peak=1000)),), (make,))


def conversions(tool: list[str], big: Spec, many: Spec, work: Path) -> tuple[Group, ...]:
    """Convert a folder to safetensors, against cp; convert many tensors to a folder, against safetensors."""
    folder, path, output = work / f"dcp-{big.name}", work / many.name, work / "output.safetensors"
    source = made(lambda unfinished: files.make(big, unfinished), work / big.name)
    saved = made(lambda unfinished: files.run_torch("dcp", unfinished, work / big.name), folder)
    whole = folder / "__0_0.distcp"
    job = command(tool, "convert", "--key", ".", source=folder, output=output)
    back = job._replace(name=TO_SAFETENSORS, reads=(whole,))
    to_safetensors, to_folder = (
        command(
            tool, "convert", "--allow-loss", "all", "--to-format", name, source=path, output=work / f"output-{name}"
        )
        for name in ("safetensors", "dcp")
    )
    jobs = to_safetensors._replace(name=TO_SAFETENSORS), to_folder._replace(name=TO_DCP)
    return (
        Group(
            "dcp", big.label, (back, references.copy(whole, work / "output.copy")),
            (Row(TO_SAFETENSORS, COPY, Target(1.2), reader=big == files.BIG),), (source, saved),
        ),
        Group(
            "dcp", many.label, jobs, (Row(TO_DCP, TO_SAFETENSORS, Target(1.5)),),
            (made(lambda unfinished: files.make(many, unfinished), path),),
        ),
    )  # fmt: skip
