"""The table of formats that ckptool writes: each fact in it is true of a file or folder that was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import FIXTURES

import ckptool
from ckptool.base.errors import RefusedError, TargetError
from ckptool.checkpoint.sharding import is_sharded
from ckptool.formats.outputs import OUTPUTS, TARGETS, OutputFormat

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
