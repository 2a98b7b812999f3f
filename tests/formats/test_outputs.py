"""The table of formats that ckptool writes: each fact in it is true of a file or folder that was written."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FIXTURES

import ckptool
from ckptool.base.errors import ChangedError, RefusedError, TargetError
from ckptool.checkpoint.checkpoint import Checkpoint
from ckptool.checkpoint.sharding import is_sharded
from ckptool.formats.outputs import OUTPUTS, TARGETS, OutputFormat
from ckptool.formats.planning import plan_of

EVERY = [OUTPUTS[name] for name in TARGETS]


def name_of(known: OutputFormat) -> str:
    return known.name


@pytest.fixture(params=EVERY, ids=name_of)
def known(request: pytest.FixtureRequest) -> OutputFormat:
    output: OutputFormat = request.param
    return output


@pytest.fixture
def written(known: OutputFormat, tmp_path: Path) -> Path:
    out = tmp_path / f"out{known.extension}"
    with ckptool.open(FIXTURES / "bare.pth") as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, known.name, allow_loss=["all"]), out)
    return out


def test_an_output_reads_as_its_format_and_is_a_folder_where_the_table_says_so(
    known: OutputFormat, written: Path
) -> None:
    assert written.is_dir() is known.folder
    with ckptool.open(written) as checkpoint:
        assert checkpoint.format == known.reads_as


def test_only_formats_with_shards_take_a_size(known: OutputFormat, tmp_path: Path) -> None:
    with ckptool.open(FIXTURES / "bare.pth") as checkpoint:
        if not known.shards:
            with pytest.raises(TargetError, match="no reader"):
                ckptool.convert(checkpoint, known.name, max_shard_size=80)
            return
        converted = ckptool.convert(checkpoint, known.name, allow_loss=["all"], max_shard_size=80)
        ckptool.save(converted, tmp_path / "shards")
    assert any(path.name.endswith(".index.json") for path in (tmp_path / "shards").iterdir())


def test_a_tensor_of_one_rank_is_plain_where_the_table_says_so(known: OutputFormat, tmp_path: Path) -> None:
    out = tmp_path / f"out{known.extension}"
    with ckptool.open(FIXTURES / "sharded" / "dtensors.rank0.pth") as checkpoint:
        if known.plain:
            with pytest.raises(RefusedError, match="shards") as refused:
                ckptool.convert(checkpoint, known.name)
            assert refused.value.exit_code == 4
            converted = ckptool.convert(checkpoint, known.name, allow_loss=["all"])
            assert any("the mark that tensors are only one rank's part" in note for note in converted.changes[-1].notes)
            return
        with pytest.raises(RefusedError, match="shards that rank 0 of 4 saved"):
            ckptool.convert(checkpoint, known.name)
        ckptool.save(converted := ckptool.convert(checkpoint, known.name, allow_loss="shards"), out)
    assert any("still a part" in note for note in converted.changes[-1].notes)
    with ckptool.open(out) as checkpoint:
        assert any(is_sharded(entry.tensor) for entry in checkpoint.survey.tensors)


def test_a_suffix_of_another_format_is_refused_where_it_misleads(known: OutputFormat, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        converted = ckptool.convert(checkpoint, known.name)
        for other in EVERY:
            if other.misread and known.extension not in other.suffixes:
                with pytest.raises(RefusedError, match="the name says"):
                    ckptool.save(converted, tmp_path / f"out{other.extension}")


# -- A plan is plain data: another process that is handed a pickle of it writes the same bytes.


_WRITE = """
import pickle, sys
from ckptool.files.sources import Plan
from ckptool.files.write.output import write_file, write_folder
with open(sys.argv[1], "rb") as file:
    plan = pickle.load(file)
(write_file if isinstance(plan, Plan) else write_folder)(plan, sys.argv[2], ())
"""


def _converted(target: str, **how: Any) -> Callable[[Checkpoint], Checkpoint]:
    return lambda checkpoint: ckptool.convert(checkpoint, target, key="model", allow_loss=["all"], **how)


EDITS: dict[str, tuple[str, Callable[[Checkpoint], Checkpoint], str]] = {
    "strip": ("in.pth", ckptool.strip_module, "out.pth"),
    "relative": ("in.pth", ckptool.strip_module, "out.pth"),
    "fresh": ("in.pth", ckptool.repack, "out.pth"),
    "deflated": ("deflated.pth", ckptool.repack, "out.pth"),
    "legacy": ("in.pth", lambda c: ckptool.convert(c, "legacy"), "out.pth"),
    "from-legacy": ("in.legacy.pth", ckptool.repack, "out.pth"),
    "safetensors": ("in.pth", _converted("safetensors", tied="clone"), "out.safetensors"),
    "shards": ("in.pth", _converted("safetensors", tied="clone", max_shard_size=64), "out"),
    "torch-shards": ("in.pth", _converted("torch", max_shard_size=64), "out"),
    "dcp": ("in.pth", lambda c: ckptool.convert(c, "dcp", allow_loss=["all"]), "out"),
    "cast": ("in.pth", lambda c: ckptool.cast(c, "float16"), "out.pth"),
    "average": ("in.pth", lambda c: ckptool.average([c, c]), "out.pth"),
    "merge": ("in.pth", lambda c: ckptool.merge(c, c, key="model", other_key="model"), "out.pth"),
    "slim": ("part.pth", ckptool.slim, "out.pth"),
    "big-endian": ("big_endian.pth", lambda c: ckptool.cast(c, "float64"), "out.pth"),
    "from-dcp": ("dcp", lambda c: ckptool.convert(c, "torch"), "out.pth"),
    "from-shards": ("shards", ckptool.strip_module, "out"),
    "member": ("archive.tar!in.pth", ckptool.strip_module, "out.pth"),
    "tar": ("torch01.tar", lambda c: ckptool.remap(c, {"cpu": "cuda:1"}), "out.pth"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    shared = torch.arange(24.0)
    state = OrderedDict((("module.a", shared[:12].reshape(3, 4)), ("module.b", shared[12:]), ("module.c", shared.t())))
    value = {"model": state, "epoch": 3}
    torch.save(value, folder / "in.pth")
    torch.save(value, folder / "in.legacy.pth", _use_new_zipfile_serialization=False)
    torch.save({"model": {"a": torch.arange(999.0)[:10], "b": torch.zeros(9, 9).t()[1:]}}, folder / "part.pth")
    shutil.copyfile(FIXTURES / "torch01.tar", folder / "torch01.tar")
    shutil.copyfile(FIXTURES / "big_endian.pth", folder / "big_endian.pth")
    with zipfile.ZipFile(folder / "in.pth") as old, zipfile.ZipFile(folder / "deflated.pth", "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with tarfile.open(folder / "archive.tar", "w") as archive:
        archive.add(folder / "in.pth", "in.pth")
    with ckptool.open(folder / "in.pth") as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "dcp", allow_loss=["all"]), folder / "dcp")
        ckptool.save(_converted("safetensors", tied="clone", max_shard_size=64)(checkpoint), folder / "shards")
    return folder


def _content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name if path.is_dir() else "": file.read_bytes() for file in files}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("edit", EDITS)
def test_another_process_writes_the_same_bytes(
    edit: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, make, output = EDITS[edit]
    monkeypatch.chdir(inputs)
    path = name if edit == "relative" else inputs / name
    with ckptool.open(path) as checkpoint:
        edited = make(checkpoint)
        plan, _ = plan_of(edited, output)
        (tmp_path / "plan").write_bytes(pickle.dumps(plan))
        here, there = tmp_path / "here", tmp_path / "there"
        here.mkdir()
        there.mkdir()
        ckptool.save(edited, here / output)
    command = [sys.executable, "-c", _WRITE, str(tmp_path / "plan"), str(there / output)]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert _content(there / output) == _content(here / output)


def test_a_pickled_plan_of_a_changed_input_is_refused(inputs: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    shutil.copyfile(inputs / "in.pth", path)
    with ckptool.open(path) as checkpoint:
        data = pickle.dumps(plan_of(ckptool.strip_module(checkpoint), "out.pth")[0])
    os.utime(path, (1, 1))
    with pytest.raises(ChangedError, match="changed since the plan was made"):
        pickle.loads(data)
