"""Benchmark groups for one checkpoint in the work folder: read, write, check, cast, compare and more."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from bench import files, references
from bench.files import Spec, made
from bench.jobs import Check, Each, Group, Job, Row, Target
from bench.references import COPY, IMPORTS, NAMES, SUM, both, command

FIVE = "edit, five edits in one pass"
_FIVE = ("--strip-module", "--rename", "*=net.*", "--add-prefix", "model", "--to", "cpu", "--wrap", "state_dict")
DIFF, CMP = "diff, one bit differs", "cmp, one bit differs"
CMP_TORCH = "cmp, one bit differs + import torch"
DIFF_SAME, CMP_SAME = "diff, the same", "cmp, the same"
CONVERT, CONVERT_BACK = "convert, to safetensors", "convert, to torch"
MATCH = "match, with a prefix"
HALVES = "stats, bfloat16"
SALVAGE = "salvage, half a file"
SHARDS, BY_JOBS, BY_DASK = "convert, to shards", "convert, to shards, --jobs 2", "convert, to shards, 2 workers of Dask"
_CONVERT = "torch.load{mmap} + save_file"
_FIGURES = "torch.load + the same figures"
_KEYS, _STRIP, _REMAP, _CAST = (
    "torch.load{mmap} + print keys", "torch.load{mmap} + strip + save", "torch.load{mmap} to cpu + save",
    "torch.load{mmap} + cast + save",
)  # fmt: skip


def of(tool: list[str], spec: Spec, work: Path) -> tuple[Group, ...]:
    """Return every group for one checkpoint."""
    path = work / spec.name
    make = _making(spec, path)
    ready = [_reading(tool, spec, path), _writing(tool, spec, path)]
    if spec != files.LARGE:
        ready += [_checking(tool, spec, path), _casting(tool, spec, path), _editing(tool, spec, path)]
        ready += [_comparing(tool, spec, path), _matching(tool, spec, path), _converting(tool, spec, path)]
        ready.append(_measuring(tool, spec, path))
    else:
        ready = [
            group._replace(jobs=tuple(job._replace(most=references.SLOW) for job in group.jobs)) for group in ready
        ]
    return tuple(group._replace(setup=(make, *group.setup)) for group in ready)


def linear(tool: list[str], work: Path, output: Path) -> Group:
    """Ten times as many tensors should take about ten times as long: 200,000 against 20,000."""
    jobs, rows = [], []
    for name, words in (("keys", ("keys",)), ("strip-module", ("strip-module",))):
        pair = []
        for spec in (files.LARGE, files.MANY):
            job = command(tool, *words, source=work / spec.name, output=output if name != "keys" else None)
            pair.append(job._replace(name=f"{name}, {spec.label}", most=references.SLOW))
        jobs += pair
        rows.append(Row(pair[0].name, pair[1].name, Target(ratio=11), reader=True))
    setup = tuple(_making(spec, work / spec.name) for spec in (files.LARGE, files.MANY))
    return Group("linear", "200,000 against 20,000 tensors", tuple(jobs), tuple(rows), setup)


def _making(spec: Spec, path: Path) -> Callable[[], None]:
    """Return the step that makes a checkpoint."""
    return made(lambda unfinished: files.make(spec, unfinished), path)


def _reading(tool: list[str], spec: Spec, path: Path) -> Group:
    keys, names, inspect = (
        command(tool, *words, source=path) for words in (("keys",), ("keys", "--names"), ("inspect",))
    )
    loads = both(_KEYS, references.KEYS, path)
    light = Target(1.7, peak=35) if spec == files.BIG else None
    sixth = {files.MANY: Target(1 / 6), files.LARGE: Target(peak=450)}.get(spec)
    rows = [
        Row(keys.name, IMPORTS, light, reader=spec == files.BIG),
        Row(names.name, IMPORTS),
        Row(inspect.name, IMPORTS, light, reader=spec == files.BIG),
    ]
    for load in loads:
        reader = "mmap" in load.name
        rows += [Row(keys.name, load.name, sixth if reader else None, reader=reader), Row(names.name, load.name)]
        rows.append(Row(inspect.name, load.name))
    return Group("read", spec.label, (keys, names, inspect, references.imports(), *loads), tuple(rows))


def _writing(tool: list[str], spec: Spec, path: Path) -> Group:
    output = path.with_name("output.pt")
    strip = command(tool, "strip-module", source=path, output=output, check="strip")
    remap = command(tool, "remap", "--to", "cpu", source=path, output=output, check="remap")
    strips, remaps = both(_STRIP, references.STRIP, path, output), both(_REMAP, references.SAVE, path, output)
    near = Target(1.1, peak=64) if spec == files.BIG else None
    quarter = {files.MANY: Target(0.25), files.LARGE: Target(peak=900)}.get(spec)
    rows = [Row(strip.name, COPY, near, reader=spec == files.BIG)]
    rows += [
        Row(strip.name, job.name, quarter if "mmap" in job.name else None, reader="mmap" in job.name) for job in strips
    ]
    rows.append(Row(remap.name, COPY, near, reader=spec == files.BIG))
    rows += [Row(remap.name, job.name) for job in remaps]
    copy = references.copy(path, output)
    return Group("write", spec.label, (strip, remap, copy, *strips, *remaps), tuple(rows))


def _checking(tool: list[str], spec: Spec, path: Path) -> Group:
    output, cut = path.with_name("output.pt"), path.with_suffix(".cut")
    validate, total = command(tool, "validate", source=path), references.checksum(path)
    # Half of the file is lost, so salvage ends with exit code 1.
    salvage = command(tool, "salvage", source=cut, output=output, check="loads")._replace(name=SALVAGE, code=1)
    loop = Target(1.3, peak=64) if spec == files.BIG else None
    rows = (Row(validate.name, SUM, loop, reader=spec == files.BIG), Row(SALVAGE, SUM, reader=spec == files.BIG))
    setup = (made(files.half_of(path), cut),)
    return Group("check", spec.label, (validate, total, salvage), rows, setup, (cut,))


def _casting(tool: list[str], spec: Spec, path: Path) -> Group:
    output = path.with_name("output.pt")
    cast = command(tool, "cast", "--to-dtype", "bfloat16", source=path, output=output, check="cast")
    plain, mapped = both(_CAST, references.CAST, path, output)
    third = Target(1 / 3, peak=1050) if spec == files.BIG else None
    rows = (Row(cast.name, plain.name, third, reader=True), Row(cast.name, mapped.name))
    return Group("cast", spec.label, (cast, plain, mapped), rows)


def _measuring(tool: list[str], spec: Spec, path: Path) -> Group:
    narrow = path.with_suffix(".bfloat16")
    wide, half = command(tool, "stats", source=path), command(tool, "stats", source=narrow)._replace(name=HALVES)
    load = references.torch_job(_FIGURES, references.FIGURES, path)._replace(most=0)
    other = references.torch_job(f"{_FIGURES}, bfloat16", references.FIGURES, narrow)._replace(most=0)
    rows = (Row(wide.name, load.name, torch=True), Row(half.name, other.name, torch=True))

    def cast(unfinished: Path) -> None:
        subprocess.run([*tool, "cast", "--to-dtype", "bfloat16", str(path), "-o", str(unfinished)], check=True)

    return Group("measure", spec.label, (wide, half, load, other), rows, (made(cast, narrow),), (narrow,))


def _converting(tool: list[str], spec: Spec, path: Path) -> Group:
    output, there = path.with_name("output.pt"), path.with_name("output.safetensors")
    same = path.with_suffix(".safetensors")
    to = command(tool, "convert", "--allow-loss", "devices", source=path, output=there, check="convert")
    to = to._replace(name=CONVERT)
    back = command(tool, "convert", source=same, output=output, check="loads")._replace(name=CONVERT_BACK)
    plain, mapped = both(_CONVERT, references.TO_SAFETENSORS, path, there)
    copy, load = references.copy(path, there), references.from_safetensors(same, output)
    near = Target(1.3, peak=64) if spec == files.BIG else None
    rows = (
        Row(to.name, COPY, near, reader=spec == files.BIG), Row(to.name, plain.name),
        Row(to.name, mapped.name, reader=True),
        Row(back.name, COPY), Row(back.name, load.name, reader=spec == files.BIG),
    )  # fmt: skip
    setup = (made(lambda unfinished: files.run_torch("safetensors", unfinished, path), same),)
    return Group("convert", spec.label, (to, back, copy, plain, mapped, load), rows, setup, (same,))


def zero_folder(spec: Spec, work: Path, stage: int) -> Path:
    """Return the folder that DeepSpeed's ZeRO wrote at one stage."""
    return work / f"{Path(spec.name).stem}-zero{stage}"


def joining(tool: list[str], spec: Spec, work: Path, stage: int, script: Job) -> Group:
    """Join the weights that two ranks of DeepSpeed's ZeRO wrote into one file. ``script`` does it with DeepSpeed."""
    folder, output = zero_folder(spec, work, stage), work / "output.safetensors"
    make = made(
        lambda unfinished: files.run_torch("zero", unfinished, stage, spec.tensors, spec.rows, spec.columns), folder
    )
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    parts = files.zero_parts(folder)
    join = command(tool, "convert", "--key", "module", source=folder, output=output, check=f"zero{stage}")
    join = join._replace(name=f"convert, ZeRO stage {stage}", reads=(folder / name, *parts))
    copy, load = references.copy_all(parts, work / "output.parts"), references.join(stage, folder / name, parts, output)
    near = Target(1.2, peak=64) if spec == files.BIG else None
    others = tuple(Row(join.name, other.name, reader=True) for other in (load, script))
    rows = (Row(join.name, copy.name, near, reader=spec == files.BIG), *others)
    return Group(f"join, stage {stage}", spec.label, (join, copy, load, script), rows, (make,))


def by_workers(tool: list[str], spec: Spec, work: Path) -> Group:
    """Write a folder of eight files with one process, with two, and with two workers of Dask."""
    source, output = work / spec.name, work / "output.shards"
    alone = source.with_suffix(".shards")
    size = f"{spec.size / 8e6:.1f}MB"
    words = ("convert", str(source), "--to-format", "safetensors", "--max-shard-size", size, "--allow-loss", "devices")

    def convert(unfinished: Path) -> None:
        subprocess.run([*tool, *words, "-q", "-o", str(unfinished)], check=True, cwd=files.ROOT)

    jobs = tuple(
        Job(name, (*tool, *words, "-q", "-o", str(output), *more), (source,), output, Check("same", alone, output))
        for name, more in (
            (SHARDS, ()),
            (BY_JOBS, ("--jobs", "2")),
            (BY_DASK, ("--engine", "dask", "--jobs", "2")),
        )
    )
    setup = (_making(spec, source), made(convert, alone))
    rows = (Row(BY_JOBS, SHARDS), Row(BY_DASK, SHARDS))
    return Group("workers", spec.label, jobs, rows, setup, (alone,), skip=_without_dask)


def _without_dask() -> str:
    return "" if importlib.util.find_spec("distributed") else "dask is not installed"


def _editing(tool: list[str], spec: Spec, path: Path) -> Group:
    output = path.with_name("output.pt")
    five = command(tool, "edit", *_FIVE, source=path, output=output, check="five")._replace(name=FIVE)
    strip = command(tool, "strip-module", source=path, output=output)
    target = Target(1.2) if spec == files.BIG else None
    rows = (Row(FIVE, strip.name, target, reader=spec == files.BIG),)
    return Group("edit", spec.label, (five, strip), rows)


def _comparing(tool: list[str], spec: Spec, path: Path) -> Group:
    other, twin = path.with_suffix(".flipped"), path.with_suffix(".twin")

    def job(name: str, words: list[str], against: Path, code: int) -> Job:
        return Job(name, (*words, str(path), str(against)), (path, against), code=code)

    # diff measures the tensors that differ, with torch.
    both_steps = ("sh", "-c", f'cmp "$0" "$1"; {shlex.quote(sys.executable)} -c "import torch"; exit 1')
    jobs = (
        job(DIFF, [*tool, "diff"], other, 1), job(CMP, ["cmp"], other, 1), job(CMP_TORCH, [*both_steps], other, 1),
        job(DIFF_SAME, [*tool, "diff"], twin, 0), job(CMP_SAME, ["cmp"], twin, 0),
    )  # fmt: skip
    target = Target(1.3, peak=128) if spec == files.BIG else None
    near = Target(1.3) if spec == files.BIG else None
    rows = (
        Row(DIFF, CMP_TORCH, near, reader=spec == files.BIG), Row(DIFF, CMP), Row(DIFF_SAME, CMP_SAME, target),
    )  # fmt: skip
    setup = (made(files.flipped(path), other), made(files.copy_of(path), twin))
    return Group("compare", spec.label, jobs, rows, setup, (other, twin))


def _matching(tool: list[str], spec: Spec, path: Path) -> Group:
    plain = path.with_suffix(".plain")

    def strip(unfinished: Path) -> None:
        subprocess.run([*tool, "strip-module", path, "-o", unfinished, "-q"], check=True, cwd=files.ROOT)

    # The file fits only after an edit, so match ends with exit code 1.
    match = Job(MATCH, (*tool, "match", str(path), str(plain)), (path, plain), code=1)
    rows = (Row(MATCH, NAMES, reader=True),)
    jobs = (match, references.names_of_two(path, plain))
    return Group("match", spec.label, jobs, rows, (made(strip, plain),), (plain,))


def small_folder(work: Path, count: int) -> Path:
    """Return the folder of small files."""
    return work / f"small-{count}-r{files.RECIPE}"


def small(tool: list[str], work: Path, count: int, scan: Job) -> Group:
    """Commands over a folder of small files. `scan` runs another tool over the same folder.

    The time per file is the time for the folder, minus the time for one file, divided by the number of other files.
    """
    folder = small_folder(work, count)
    one = folder / "epoch_0000.pth"
    make = made(lambda unfinished: files.run_torch("small", unfinished, count), folder)
    evil = made(files.hostile, work / "hostile.pth")
    each = references.load_each(folder)
    jobs, rows = [], []
    for name, options in (("inspect", ()), ("validate", ()), ("validate", ("--quick",)), ("scan", ())):
        full = " ".join((name, *options))
        whole = Job(f"{full} DIR", (*tool, name, *options, str(folder)))
        start = Job(f"{full} FILE", (*tool, name, *options, str(one)))
        jobs += [whole, start]
        per_file = Each(start.name, count - 1)
        if not options and name != "scan":
            rows.append(
                Row(whole.name, each.name, Target(each=0.002) if count >= 1000 else None, per_file, reader=True)
            )
        target = Target(0.9 if options else 1) if count >= 1000 else None
        rows.append(Row(whole.name, scan.name, target, per_file, reader=True))
    return Group("many files", f"{count:,} small files", (*jobs, each, scan), tuple(rows), (make, evil))


def pickles(tool: list[str], folder: Path, scan: Job) -> Group:
    """Scan a folder of small pickles. `scan` runs another tool over it."""
    count = int(folder.name.split("-")[2])
    ours = Job("scan DIR", (*tool, "scan", str(folder)))
    setup = (
        made(lambda unfinished: files.write_pickles(unfinished, count), folder),
        made(files.hostile, folder.parent / "hostile.pth"),
    )
    rows = (Row(ours.name, scan.name, Target(1) if count >= 1000 else None, reader=True),)
    return Group("many files", f"{count:,} small pickles", (ours, scan), rows, setup)


def pickles_folder(work: Path, count: int) -> Path:
    """Return the folder of small pickles."""
    return work / f"small-pickles-{count}-r{files.RECIPE}"


def reporting(tool: list[str], work: Path, spec: Spec) -> Group:
    """Write a page about two files of many tensors with one element each."""
    path, page = work / spec.name, work / "output.html"
    other = path.with_suffix(".flipped")
    report = Job("report", (*tool, "report", str(path), str(other), "-o", str(page)), (path, other), page)
    target = Target(seconds=3) if spec == files.ONES else None
    setup = (_making(spec, path), made(files.flipped(path), other))
    return Group("report", f"two files of {spec.label}", (report,), (Row(report.name, target=target),), setup, (other,))


#: The engines that read a fleet: one process, two processes, two workers of Dask.
ALONE, TWO, DASK = "validate, --jobs 1", "validate, --jobs 2", "validate, --engine dask, two workers"


def fleet(tool: list[str], work: Path, small: int, tensors: int, large: int, megabytes: int) -> Group:
    """Validate a folder of many small files and some large ones with each engine.

    Dask takes a second to start its workers, which weighs more the less work there is.
    """
    folder = work / f"small-fleet-{small}x{tensors}-{large}-r{files.RECIPE}"
    make = made(lambda unfinished: files.run_torch("fleet", unfinished, small, tensors, large, megabytes), folder)
    engines = {ALONE: ("--jobs", "1"), TWO: ("--jobs", "2"), DASK: ("--engine", "dask", "--jobs", "2")}
    jobs = tuple(
        Job(name, (*tool, "validate", "--quiet", *options, str(folder)), (folder / "large_0000.pth",))
        for name, options in engines.items()
    )
    promised = small * tensors >= 640_000
    rows = (
        Row(TWO, ALONE, Target(0.6) if promised else None, reader=True),
        Row(DASK, TWO, Target(1.15) if promised else None, reader=True),
    )
    label = f"{small:,} files of {tensors:,} small tensors, {large:,} of {megabytes:,} MB"
    return Group("fleet", label, jobs, rows, (make,), skip=_no_dask)


def _no_dask() -> str:
    return "" if find_spec("distributed") else "dask is not installed"
