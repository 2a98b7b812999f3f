"""Compare ckptool with torch, with cp, with other tools and with a bare start of Python, in one run on one machine.

`python -m bench` makes its own checkpoints (kept in bench/scratch for the next time), checks the output of ckptool,
measures, and prints tables. Only the ratios carry over to other machines: each comes from runs that alternated on the
same files. `--quick` uses small files, to test the benchmark itself. The exit code is 0 if everything ran, whatever
the times; it is 1 if a ckptool command failed or its output was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import (
    adapters,
    dcp,
    figures,
    files,
    groups,
    images,
    instant,
    machine,
    peaks,
    peers,
    quantized,
    ranks,
    remote,
    stale,
    tables,
)
from bench.jobs import Group, mentions
from bench.measure import JobError, measure, peak_floor

_SMALL_FILES = 1000
_SMALL_PICKLES = 5000


class Options(NamedTuple):
    """The parsed command line."""

    work: Path
    quick: bool
    large: bool
    clean: bool
    repeat: int
    json: Path | None
    tool: list[str]
    only: str


def parse(arguments: Sequence[str]) -> Options:
    """Parse the command line. End the process on a usage error, as argparse does."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path(__file__).parent / "scratch", help="folder for the files")
    parser.add_argument("--quick", action="store_true", help="small files, one run each: does it work?")
    parser.add_argument("--large", action="store_true", help="also a file of 200,000 tensors (a quarter of an hour)")
    parser.add_argument(
        "--repeat", type=int, metavar="N", help="timed rounds after the warm-up (default 5; at most 3 for torch)"
    )
    parser.add_argument("--exe", nargs="?", const="ckptool", help="measure this console script, not python -m ckptool")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE; with --only into it")
    parser.add_argument("--only", default="", metavar="TEXT", help="only groups with TEXT in their name, file or jobs")
    parser.add_argument("--list", action="store_true", help="print the groups and their jobs, and do nothing else")
    parser.add_argument(
        "--stale", action="store_true", help="list the published figures that are older than their code"
    )
    parser.add_argument("--clean", action="store_true", help="remove the files of earlier runs, and do nothing else")
    given = parser.parse_args(arguments)
    repeat = given.repeat if given.repeat is not None else 0 if given.quick else 5
    if repeat < 0:
        parser.error("--repeat must be at least 0")
    tool = [sys.executable, "-m", "ckptool"]
    if given.exe is not None:
        found = shutil.which(given.exe)
        if found is None:
            parser.error(f"--exe: no such program: {given.exe}")
        tool = [str(Path(found).absolute())]  # absolute, because the jobs run in another folder
    options = Options(
        given.work.absolute(), given.quick, given.large, given.clean, repeat, given.json, tool, given.only
    )
    if given.stale:
        old = dict.fromkeys(stale.described(figures.published()))
        print(*old, f"{len(old)} figures are stale", sep="\n")
        parser.exit(bool(old))
    if given.list:
        for group in chosen(options):
            print(f"{group.name}: {group.file}", *(f"  {job.name}" for job in group.jobs), sep="\n")
        parser.exit()
    return options


def tell(text: str) -> None:
    """Print progress to stderr; stdout is only for the result."""
    print(text, file=sys.stderr, flush=True)


def chosen(options: Options) -> list[Group]:
    """Return the groups to run, in order. Groups on the same filesystem image are adjacent."""
    tool, work = options.tool, options.work
    big, many = (files.QUICK_BIG, files.QUICK_MANY) if options.quick else (files.BIG, files.MANY)
    small = 20 if options.quick else _SMALL_FILES
    ready = [*groups.of(tool, big, work), *groups.of(tool, many, work)[: 2 if options.quick else None]]
    for stage in (2, 3):
        folder = groups.zero_folder(big, work, stage)
        ready.append(groups.joining(tool, big, work, stage, peers.zero_to_fp32(work, folder, stage)))
    for kind in images.KINDS:
        ready += instant.sharing(tool, kind, big, files.SPARSE_20, work)
    ready += [instant.in_place(tool, spec, work) for spec in (big, files.SPARSE_100)]
    ready.append(instant.header(tool, big, work))
    ready.append(groups.small(tool, work, small, peers.over_folder(work, groups.small_folder(work, small))))
    samples = groups.pickles_folder(work, 20 if options.quick else _SMALL_PICKLES)
    ready.append(groups.pickles(tool, samples, peers.over_folder(work, samples)))
    ready.append(groups.reporting(tool, work, files.QUICK_ONES if options.quick else files.ONES))
    # ResNet-50 has 320 tensors; 10 is a handful.
    for tensors in (320, 10):
        ready.append(groups.fleet(tool, work, *((20, tensors, 2, 4) if options.quick else (2000, tensors, 20, 200))))
    ready += [groups.by_workers(tool, big, work), ranks.group(tool, big, work), ranks.named(tool, big, work)]
    ready += [adapters.group(tool, big, work), peaks.group(tool, big, work)]
    ready += [quantized.group(tool, options.quick, kind, work) for kind in ("fp8", "nf4")]
    counts = (50, 64) if options.quick else (1000, 1024)
    ready += [dcp.pieces(tool, work, *counts), dcp.planning(tool, work, *counts, 64 if options.quick else 655_360)]
    ready += dcp.conversions(tool, big, many, work)
    ready += [*peers.groups(tool, big, work, heavy=True), *peers.groups(tool, many, work, heavy=False)]
    ready.append(peers.start_up(tool, work))
    ready.append(remote.group(tool, files.QUICK_REMOTE if options.quick else files.REMOTE, work))
    if options.large:
        ready += [*groups.of(tool, files.LARGE, work), groups.linear(tool, work, work / "output.pt")]
    return [group for group in ready if mentions(group, options.only)]


def clean(work: Path) -> None:
    """Remove the files of earlier runs, matched by name, and the folder if it is then empty."""
    for kind in images.KINDS:
        images.remove(kind, work)
    for pattern in (
        "input-*",
        "sparse-*",
        "in-place-*",
        "small-*",
        "ranks-*",
        "output.*",
        "*.html",
        ".output.*",
        "hostile.pth",
        "peers",
    ):
        for leftover in work.glob(pattern):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    if work.is_dir() and not any(work.iterdir()):
        work.rmdir()


def check_room(options: Options, wanted: Sequence[Group]) -> None:
    """Check that the disk has enough room. End the process if not."""
    options.work.mkdir(parents=True, exist_ok=True)
    used = [spec for spec in files.EVERY_SPEC if any(spec.label == group.file for group in wanted)]
    missing = [spec for spec in used if not (options.work / spec.name).exists()]
    # At any time there are at most an output and three more copies of a file.
    need = sum(spec.size for spec in missing) + 4 * max((spec.size for spec in used), default=0)
    free = shutil.disk_usage(options.work).free
    tell(f"{options.work}: {free / 1e9:.1f} GB free, {need / 1e9:.1f} GB needed")
    if free < need:
        sys.exit("not enough room: free some, choose another folder with --work, or use --quick")


@contextlib.contextmanager
def _ready(group: Group) -> Iterator[None]:
    """Make the files of a group, and remove its leftovers at the end. Files that other runs can reuse stay."""
    try:
        for step in group.setup:
            step()
        with group.during():
            yield
    finally:
        for path in group.leftovers:
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)


def run(options: Options, wanted: Sequence[Group], floor: int) -> tuple[list[Any], list[Any]]:
    """Run the groups. Return their rows, and the groups that were left out, with the reason. Raises JobError."""
    rows: list[figures.Figures] = []
    left_out: list[dict[str, str]] = []
    log = options.work / "output.log"
    with contextlib.ExitStack() as stack:
        mount = ""
        absent: dict[str, str] = {}
        for group in wanted:
            tell(f"== {group.name}: {group.file}")
            if group.image != mount:
                stack.close()
                mount = group.image
                try:
                    if mount:
                        stack.enter_context(images.mounted(mount, options.work))
                except images.ImageError as error:
                    absent[mount] = str(error)
            reason = absent.get(mount) or group.skip()
            if reason:
                tell(f"left out: {reason}")
                left_out.append({"what": f"{group.name}, {group.file}", "why": reason})
                continue
            with _ready(group):
                results = measure(group, options.repeat, log, tell)
            filesystem = group.image or machine.filesystem(options.work)
            rows += figures.figures_of(group, filesystem, results, floor)
    return rows, left_out


def main(arguments: Sequence[str]) -> None:
    """Measure and print the tables, or clean up."""
    options = parse(arguments)
    if options.clean:
        clean(options.work)
        return
    if not sys.platform.startswith("linux"):
        sys.exit("the figures of the operating system are read as Linux gives them; run this on Linux")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit runs the code that unmounts images
    wanted = chosen(options)
    check_room(options, wanted)
    facts = machine.describe(options.work, max(spec.size for spec in files.EVERY_SPEC if not spec.sparse))
    floor = peak_floor(options.work / "output.log")
    try:
        rows, left_out = run(options, wanted, floor)
    except JobError as error:
        sys.exit(str(error))
    tool = "console script" if options.tool[0] != sys.executable else "python -m ckptool"
    facts.append(f"ckptool as: {tool}; rounds after the warm-up: {options.repeat}, fewer of what takes long")
    folder = options.work / "peers"
    others = [
        {"package": peer.package, "version": peers.version(peer, folder), "does": peer.does} for peer in peers.PEERS
    ]
    document = {
        "schema": figures.SCHEMA, "machine": facts, "peers": others, "rows": rows, "left_out": left_out,
    }  # fmt: skip
    print(tables.machine(document), tables.NOTES, "", tables.plain(document), sep="\n")
    if options.json:
        if options.only and options.json.exists():
            document = figures.put_into(document, json.loads(options.json.read_text(encoding="utf-8")))
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
