"""Addresses that lost a slash."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import say
from conftest import FIXTURES
from remote.server import Server

import ckptool

pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def objects(server: Server) -> None:
    for name in ("bare.pth", "bare_module.pth"):
        server.put("bucket", name, (FIXTURES / name).read_bytes())


def test_an_address_that_lost_a_slash(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from pathlib.Path("s3://...")."""
    monkeypatch.chdir(tmp_path)
    what = "an address has two slashes after its scheme"
    for words in (
        ["keys", "s3:/bucket/bare.pth"],
        ["validate", "s3:/bucket/run/"],
        ["strip-module", FIXTURES / "bare_module.pth", "-o", "s3:/bucket/y.pth"],
        ["strip-module", FIXTURES / "bare_module.pth", "--out-dir", "gs:/bucket/y"],
        ["lock", FIXTURES / "bare.pth", "-o", "S3:/bucket/y.json"],
    ):
        said = say(*words)
        assert said.code in (3, 4) and what in said.err and "mkdir" not in said.err, said.all
    said = say("keys", "s3:/bucket/bare.pth")
    assert "write it as text: s3://bucket/bare.pth" in said.err
    for call in ("keys", "validate", "scan", "hash", "lock", "inspect", "get"):
        key = ["x"] if call == "get" else []
        said = say(call, "https:/user:SECRET@host/a.pth?Signature=SECRET", *key)
        assert said.code == 3 and what in said.err and "SECRET" not in said.all, said.all
    with pytest.raises(ckptool.errors.RefusedError) as caught, ckptool.open(FIXTURES / "bare_module.pth") as checkpoint:
        ckptool.save(ckptool.strip_module(checkpoint), Path("s3://bucket/p.pth"))
    assert caught.value.next == "write it as text: s3://bucket/p.pth"
    assert "p.pth" not in server.buckets["bucket"]
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    (tmp_path / "s3:" / "bucket" / "bare.pth").write_bytes((FIXTURES / "bare.pth").read_bytes())
    assert say("keys", "s3:/bucket/bare.pth").code == 0
