"""The comparison of scanners: its hostile samples run, its clean ones do not alarm ckptool, and answers are read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import pickle
import posix
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import say

from bench import scanners
from bench.samples import Sample, samples
from bench.scanners import ALARM, DOUBT, QUIET, Said

EVERY = list(samples())
#: Kinds that are unpacked before a loader reads what is in them.
PACKED = ("in a ", "compressed", "joblib, each")


def test_samples_have_names_of_their_own() -> None:
    assert len({item.name for item in EVERY}) == len(EVERY)
    assert {item.kind for item in EVERY if item.hostile}.isdisjoint(item.kind for item in EVERY if not item.hostile)


# -- the samples -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(every=5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("item", [item for item in EVERY if item.hostile], ids=lambda item: item.name)
def test_a_hostile_sample_runs_when_it_is_opened(item: Sample, tmp_path: Path) -> None:
    """In another process: some change classes and registries of Python."""
    child = os.fork()
    if not child:
        os._exit(0 if _runs(item, tmp_path / item.name) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _runs(item: Sample, path: Path) -> bool:
    calls: list[str] = []
    os.system = posix.system = calls.append  # type: ignore[assignment]
    for data in _unpacked(item.data) if item.kind.startswith(PACKED) else [item.data]:
        path.write_bytes(data)
        for load in (_torch, _numpy, _pickles):
            with suppress(Exception):
                load(path)
            if calls:
                return True
    return False


def _torch(path: Path) -> None:
    torch.load(path, weights_only=False)


def _numpy(path: Path) -> None:
    loaded = np.load(path, allow_pickle=True)
    for name in loaded.files:
        loaded[name]


def _pickles(path: Path) -> None:
    with path.open("rb") as file:
        while True:
            pickle.load(file)


def _unpacked(data: bytes) -> Iterator[bytes]:
    """What is in an archive or compressed data, to any depth."""
    for read in (_decompressed, _zip, _tar):
        members: list[bytes] = []
        with suppress(Exception):
            members = read(data)
        for member in members:
            yield member
            yield from _unpacked(member)


def _decompressed(data: bytes) -> list[bytes]:
    if data.startswith(b"\x04\x22\x4d\x18"):
        return [data[11:-4]]  # the one block of lz4, which is stored
    for unpack in (zlib.decompress, gzip.decompress, bz2.decompress, lzma.decompress):
        with suppress(Exception):
            return [unpack(data)]
    return []


def _zip(data: bytes) -> list[bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [archive.read(name) for name in archive.namelist()]


def _tar(data: bytes) -> list[bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        files = [archive.extractfile(member) for member in archive]
        return [file.read() for file in files if file]


# -- ckptool's answers -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("item", EVERY, ids=lambda item: item.name)
def test_ckptool_misses_nothing_and_gives_no_false_alarm(item: Sample, tmp_path: Path) -> None:
    [(_, path)] = scanners.written([item], tmp_path)
    said = say(*scanners.CKPTOOL.arguments(str(path), ""))
    found = scanners.read_ckptool(Said(said.code, said.out, ""))
    assert found in ((ALARM, DOUBT) if item.hostile else (QUIET, DOUBT))
    if item.hostile:
        # Of lz4 it says that it does not unpack it.
        assert found == ALARM or item.name == "lz4.joblib"
