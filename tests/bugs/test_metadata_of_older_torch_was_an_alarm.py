"""Metadata of torch before 2.3 names classes of another module: it was said that torch never writes that, and it did.

That of torch 1.13 could not be read at all."""

from __future__ import annotations

from ckptool.formats.dcp.metadata import EXPECTED


def test_names_of_older_versions_are_expected() -> None:
    old = "torch.distributed._shard"
    assert f"{old}.sharded_tensor.metadata.TensorProperties" in EXPECTED
    assert f"{old}.sharded_tensor.metadata.MEM_FORMAT_ENCODING" in EXPECTED
    assert f"{old}.checkpoint.metadata.Metadata" in EXPECTED
    assert "builtins.getattr" not in EXPECTED
