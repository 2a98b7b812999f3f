"""Benchmark groups for edits that copy no tensor: shared blocks on XFS and btrfs, and edits in place."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from bench import files, images, references
from bench.files import Spec, made
from bench.jobs import SPARSE, WARM, Check, Group, Job, Row, Target
from bench.measure import JobError
from bench.references import COPY, REFLINK, command

_SHARED = Target(seconds=0.25)
_IN_PLACE = Target(seconds=0.15)
_TAIL = 1 << 16


def sharing(tool: list[str], kind: str, spec: Spec, sparse: Spec, work: Path) -> tuple[Group, ...]:
    """Edit to a new file on a filesystem that can share blocks: an ordinary file, and a larger sparse one."""
    place = images.folder(kind, work)
    source, output = place / spec.name, place / "output.pt"
    make = made(lambda unfinished: files.make(spec, unfinished), work / spec.name)
    bring = made(files.copy_of(work / spec.name), source)

    def skip() -> str:
        # Without sharing, the edited sparse file would not fit, so try the sharing on the ordinary file first.
        make()
        bring()
        before = images.free(place)
        subprocess.run([*tool, "strip-module", source, "-o", output, "-q"], check=True, cwd=files.ROOT)
        used = before - images.free(place)
        output.unlink()
        return "" if used < source.stat().st_size / 10 else "strip-module copies the blocks; they would not fit"

    full = _sharing(tool, kind, spec, source, output, "strip", "remap")
    large = _sharing(tool, kind, sparse, place / sparse.name, output, "strip-meta", "remap-meta")
    make_large = made(lambda unfinished: files.make(sparse, unfinished), place / sparse.name)
    return (
        full._replace(setup=(make, bring)),
        large._replace(setup=(make_large,), skip=skip, cache=SPARSE),
    )


def _sharing(tool: list[str], kind: str, spec: Spec, source: Path, output: Path, *checks: str) -> Group:
    strip = command(tool, "strip-module", source=source, output=output, check=checks[0])
    remap = command(tool, "remap", "--to", "cpu", source=source, output=output, check=checks[1])
    jobs = tuple(_dry(job) if spec.sparse else job for job in (strip, remap, references.copy(source, output, REFLINK)))
    target = None if spec in (files.QUICK_BIG,) else _SHARED
    rows = (Row(strip.name, REFLINK, target, reader=True), Row(remap.name, REFLINK, target, reader=spec.sparse))
    return Group(f"share blocks ({kind})", spec.label, jobs, rows, image=kind, disk=True)


def _dry(job: Job) -> Job:
    """Return the job without reading its input into the page cache: the input is all holes."""
    return job._replace(reads=())


def in_place(tool: list[str], spec: Spec, work: Path) -> Group:
    """Edit a file in place, and undo the edit. Each run starts from the unedited file."""
    original, path, output = work / spec.name, work / f"in-place-{spec.name}", work / "output.pt"
    make = made(lambda unfinished: files.make(spec, unfinished), original)
    twin = made(files.copy_of(original), path)
    back = _back(path)
    edit = (*tool, "strip-module", "--in-place", str(path))
    check = Check("strip-meta" if spec.sparse else "strip", original, path)
    strip = Job("strip-module --in-place", edit, (path,), check=check, reset=back)
    same = check._replace(name="same")
    undo = Job("undo", (*tool, "undo", str(path)), (path,), check=same, reset=_edited(back, edit))
    jobs, rows = [strip, undo], [Row(job.name, target=_IN_PLACE, reader=True) for job in (strip, undo)]
    if spec.sparse:
        jobs = [_dry(job) for job in jobs]
    else:
        jobs.append(references.copy(path, output)._replace(reset=back))
        rows = [row._replace(against=COPY) for row in rows]
        if references.understands(tool, "edit"):
            repack = command(tool, "edit", "--repack", source=path, output=output)
            repaired = Check("strip", original, output)
            jobs.append(repack._replace(reset=_edited(back, edit), check=repaired))
            rows.append(Row(repack.name, COPY, reader=True))

    def skip() -> str:
        missing = [
            words for words in (("strip-module", "--in-place"), ("undo",)) if not references.understands(tool, *words)
        ]
        return f"this ckptool has no {' '.join(missing[0])}" if missing else ""

    return Group(
        "in place", spec.label, tuple(jobs), tuple(rows), (make, twin), (path,),
        SPARSE if spec.sparse else WARM, skip=skip,
    )  # fmt: skip


def header(tool: list[str], spec: Spec, work: Path) -> Group:
    """Edit the header of a safetensors file: in place, undone after each run, and to a new file."""
    original, path = work / spec.name, work / f"in-place-{spec.name}.safetensors"
    output = work / "output.safetensors"

    def convert(unfinished: Path) -> None:
        made(lambda place: files.make(spec, place), original)()
        words = ("convert", str(original), "--to-format", "safetensors", "--metadata", "epoch=3")
        subprocess.run([*tool, *words, "-o", str(unfinished), "--force", "-q"], check=True, cwd=files.ROOT)

    def back() -> None:
        if Path(f"{path}.ckptool-undo").exists():
            subprocess.run([*tool, "undo", str(path), "-q"], check=True, cwd=files.ROOT)

    words, new = ("edit", "--set", "epoch=4"), ("edit", "--set", "__metadata__.notes=new")
    edit = Job(f"{' '.join(words)} --in-place", (*tool, words[0], str(path), *words[1:], "--in-place"), (path,))
    write = command(tool, *new, source=path, output=output, check="tensors")
    jobs = (edit._replace(reset=back), write, references.copy(path, output))
    rows = (Row(edit.name, COPY, _IN_PLACE, reader=True), Row(write.name, COPY, Target(ratio=1.0), reader=True))
    return Group("in place, safetensors", spec.label, jobs, rows, (made(convert, path),), (path, output), WARM)


def _back(path: Path) -> Callable[[], None]:
    """Return a step that cuts a file to its first length. Raises JobError if it is then not the first file again."""
    first: list[tuple[int, bytes]] = []

    def step() -> None:
        if not first:
            first.append((path.stat().st_size, _tail(path)))
        size, tail = first[0]
        os.truncate(path, size)
        if _tail(path) != tail:
            raise JobError(f"{path}: cut to its former length it is not as it was: it was not edited by appending")

    return step


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        return file.read()


def _edited(back: Callable[[], None], edit: tuple[str, ...]) -> Callable[[], None]:
    """Return a step that restores the first file and edits it once."""

    def step() -> None:
        back()
        subprocess.run([*edit, "-q"], check=True, cwd=files.ROOT)

    return step
