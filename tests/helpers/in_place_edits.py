"""What edits in place are tried with: each edit as a function, and every way in which torch reads the file."""

from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import oracle
import pytest
import torch
from output_checks import CRASHES, UNSUMMED, faked, on_meta, saved, works

import ckptool
from ckptool.base.errors import CkptoolError, RefusedError, TargetError
from ckptool.edits.entries import unset
from ckptool.files.sources import open_source
from ckptool.files.zips.reader import Archive, read_archive

#: Torch reads garbage from deflated storages when it maps them.
UNMAPPABLE = ("zip_deflated.pth",)
MARK = b"ckptool1"


class Edit(NamedTuple):
    """An edit by its name; ``make`` raises TargetError or RefusedError where there is nothing to edit."""

    name: str
    make: Callable[[ckptool.Checkpoint], ckptool.Checkpoint]


def _key(checkpoint: ckptool.Checkpoint) -> str:
    """An entry of the root, if it is a dict: its path."""
    loaded = ckptool.inspect(checkpoint.path)["entries"]
    if not loaded:
        raise TargetError("no entry")
    return str(loaded[0]["key"])


def _extracted(checkpoint: ckptool.Checkpoint) -> ckptool.Checkpoint:
    return ckptool.extract(checkpoint, _key(checkpoint))


def _without_first(checkpoint: ckptool.Checkpoint) -> ckptool.Checkpoint:
    return unset(checkpoint, _key(checkpoint))


def _without_tensor(checkpoint: ckptool.Checkpoint) -> ckptool.Checkpoint:
    tensors = [entry.key for entry in checkpoint.survey.tensors if entry.key and entry.state_dict >= 0]
    if not tensors:
        raise TargetError("no key")
    return ckptool.drop(checkpoint, [tensors[0]])


def _only_last(checkpoint: ckptool.Checkpoint) -> ckptool.Checkpoint:
    tensors = [entry.key for entry in checkpoint.survey.tensors if entry.key and entry.state_dict >= 0]
    if not tensors:
        raise TargetError("no key")
    return ckptool.keep(checkpoint, [tensors[-1]])


EDITS = (
    Edit("strip-module", ckptool.strip_module),
    Edit("add-module", lambda c: ckptool.add_module(c)),
    Edit("add-long-prefix", lambda c: ckptool.add_module(c, "a.prefix." * 30)),
    Edit("remap", lambda c: ckptool.remap(c, "cuda:7")),
    Edit("rename", lambda c: ckptool.rename(c, regex=("^", "net."))),
    Edit("extract", _extracted),
    Edit("wrap", lambda c: ckptool.wrap(c, "wrapped")),
    Edit("drop", _without_tensor),
    Edit("keep", _only_last),
    Edit("set", lambda c: ckptool.set(c, "of_the_test", 41)),
    Edit("unset", _without_first),
    Edit("edit", lambda c: ckptool.edit(c, [("wrap", "inner"), ("to", "cpu")])),
)
NAMES = {edit.name: edit for edit in EDITS}
#: Five different ones in a row.
FIVE = ("add-module", "wrap", "set", "add-long-prefix", "remap")


def in_place(path: Path, edit: Callable[[ckptool.Checkpoint], ckptool.Checkpoint]) -> int:
    """Edit a file in place; the bytes appended."""
    with ckptool.open(path) as checkpoint:
        return ckptool.save_in_place(edit(checkpoint)).appended


def copied(path: Path, folder: Path) -> Path:
    """A copy of a fixture that can be written to."""
    copy = folder / path.name
    shutil.copyfile(path, copy)
    return copy


def archive_of(path: Path) -> Archive:
    return read_archive(open_source(path))


def sha(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def mapped(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def by_offsets(path: Path) -> Any:
    """Mapped, at the offsets that torch computes after ``.format_version``."""
    with torch.utils.serialization.config.patch({"load.calculate_storage_offsets": True}):
        return mapped(path)


def storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Every storage of a plain object, in its order, once for each tensor."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
        yield value.untyped_storage()
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from storages(inner)


class Facts(NamedTuple):
    """What torch, ``validate`` and unzip say of a file: the modes in which torch reads it, and their verdicts."""

    modes: frozenset[Callable[[Path], Any]]
    complaints: frozenset[str]
    status: str
    unzipped: int


@functools.lru_cache(maxsize=2)
def _facts(name: str, data: bytes, path: Path) -> Facts:
    modes: list[Callable[[Path], Any]] = [*(() if name in UNMAPPABLE else (mapped, by_offsets))]
    modes += [*(() if name in CRASHES else (on_meta, faked))]
    report = ckptool.validate(path)
    working = frozenset(mode for mode in modes if works(mode, path))
    return Facts(working, frozenset(complaints_in(report)), report["status"], 0 if name in UNSUMMED else unzip(path))


def facts(path: Path) -> Facts:
    """Return what is known of a file. Many edits of one file ask for the same."""
    return _facts(path.name, path.read_bytes(), path)


def check_modes(path: Path, before: Path) -> int:
    """Torch reads the file alike in every mode in which it reads the one before; returns how many."""
    loaded = oracle.load(path)
    modes = 1
    working = facts(before).modes
    if before.name not in UNMAPPABLE:
        for mode in (mapped, by_offsets):
            if mode in working:
                assert oracle.difference(loaded, mode(path)) == "", mode.__name__
                modes += 1
    if before.name in CRASHES:
        return modes
    if on_meta in working:
        on = torch.load(path, map_location="meta", weights_only=True)
        data = path.read_bytes()
        for there, here in zip(storages(on), storages(loaded), strict=True):
            if before.name not in UNMAPPABLE and here.nbytes():
                if there.device == here.device:  # it was on meta when it was saved
                    continue
                at = there._checkpoint_offset
                assert data[at : at + here.nbytes()] == bytes(here.tolist()), f"torch computes a wrong offset: {at}"
        modes += 1
    if faked in working:
        faked(path)
        modes += 1
    return modes


def complaints(path: Path) -> set[str]:
    """Codes of all that ``validate`` says beyond notes."""
    return complaints_in(ckptool.validate(path))


def complaints_in(report: Any) -> set[str]:
    """Codes of all that a report of ``validate`` says beyond notes."""
    return {
        note["code"] for check in report["checks"] for note in check["notes"] if note["level"] in ("error", "warning")
    }


def check_zip(path: Path, before: Path) -> None:
    """Python's zipfile and unzip find what they found, and nothing wrong."""
    if before.name in UNSUMMED:
        return
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    assert unzip(path) <= facts(before).unzipped


def unzip(path: Path) -> int:
    """Return the exit code of unzip for a file, or 0 where there is no unzip."""
    if not shutil.which("unzip"):
        return 0
    return subprocess.run(["unzip", "-tqq", str(path)], capture_output=True, check=False).returncode


def check_edit(edit: Edit, path: Path, out: Path) -> bool:
    """One edit in place: the law of all of them. False where there is nothing to edit in this file."""
    before = path.parent / "before" / path.name
    before.parent.mkdir(exist_ok=True)
    shutil.copyfile(path, before)
    told = facts(before)
    try:
        with ckptool.open(before) as checkpoint:
            edited = edit.make(checkpoint)
            changed = edited.edited
            ckptool.save(edited, out, force=True)
    except CkptoolError as error:
        with pytest.raises(type(error)):
            in_place(path, edit.make)
        assert path.read_bytes() == before.read_bytes()
        return False
    try:
        appended = in_place(path, edit.make)
    except RefusedError as error:
        assert "bytes follow the archive" in error.what and path.read_bytes() == before.read_bytes()
        return False
    data, old = path.read_bytes(), before.read_bytes()
    assert data[: len(old)] == old and len(data) - len(old) == appended
    assert bool(appended) is changed
    if changed:
        assert len(data) % 4096 == 0
        assert oracle.difference(oracle.load(path), oracle.load(out)) == ""
        check_modes(path, before)
        check_zip(path, before)
        report = ckptool.validate(path)
        assert complaints_in(report) <= told.complaints | complaints(out), "validate complains"
        assert report["status"] == told.status
        assert [entry[0] for entry in _history(path)] == [len(old), len(data)]
        ckptool.undo(path)
    assert path.read_bytes() == old
    before.unlink()
    return changed


def _history(path: Path) -> list[tuple[int, str | None]]:
    return [(version["bytes"], version["edit"]) for version in ckptool.history(path)["versions"]]


SIZES = {"small": 3000, "large": 300_000}  # of the pickle: the second is longer than readers search for an end
each_size = pytest.mark.parametrize("size", SIZES)


def checkpoint_of(path: Path, size: str, **how: Any) -> Path:
    value = {"n": 0, "text": "t" * SIZES[size], "weight": torch.arange(40.0), "more": torch.ones(3)}
    return saved(value, path, **how)


def to_one(checkpoint: ckptool.Checkpoint) -> ckptool.Checkpoint:
    return ckptool.set(checkpoint, "n", 1)


def read(path: Path) -> int:
    """Which version torch reads, 0 or 1; its tensors are right."""
    for loaded in (torch.load(path, weights_only=True), mapped(path)):
        assert torch.equal(loaded["weight"], torch.arange(40.0)) and torch.equal(loaded["more"], torch.ones(3))
    return int(loaded["n"])
