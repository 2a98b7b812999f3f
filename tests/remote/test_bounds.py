"""A command that would download too much is refused before it reads any value, with the size and both ways out."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from command_line import say
from remote.server import MIB, Server

from ckptool.base.limits import ANNOUNCED
from ckptool.remote.source import ENDS

pytest.importorskip("obstore")
torch: Any = pytest.importorskip("torch")

#: Six tensors of 1 MB in each of two files, all with other values.
TENSORS, NUMBERS = 6, 250_000


@pytest.fixture(scope="module")
def served() -> Any:
    with Server() as server:
        for name, start in (("a", 0), ("b", 100)):
            file = io.BytesIO()
            state = {f"module.{at}": torch.full((NUMBERS,), float(start + at)) for at in range(TENSORS)}
            torch.save({"state_dict": state}, file)
            server.put("bucket", f"{name}.pth", file.getvalue())
        yield server


@pytest.fixture(autouse=True)
def little(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow 3 MiB, half of a file."""
    monkeypatch.setenv("CKPTOOL_MAX_DOWNLOAD", str(3 * MIB))


A, B = "s3://bucket/a.pth", "s3://bucket/b.pth"
CALLS = [
    *(["validate", A], ["validate", "--quick", "--finite", A], ["validate", "--quick", "--load", A]),
    *(["hash", A], ["lock", A, "--content", "-o", "OUT.json"], ["stats", A], ["report", A, "-o", "OUT.html"]),
    *(["inspect", "--load", A], ["get", A, "state_dict", "--format", "json"], ["diff", A, B]),
    *(["strip-module", A, "-o", "OUT.pth"], ["cast", A, "--to-dtype", "float16", "-o", "OUT.pth"]),
    *(["convert", A, "-o", "OUT.safetensors"], ["average", A, B, "-o", "OUT.pth"], ["slim", A, "-o", "OUT.pth"]),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: " ".join(word for word in call if "://" not in word))
def test_a_command_is_refused_before_it_reads_values(call: list[str], server: Server, tmp_path: Path) -> None:
    words = [word.replace("OUT", str(tmp_path / "out")) for word in call]
    said = say(*words)
    assert said.code in (3, 4), said.all
    assert "it would download " in said.all and ", more than 3.15 MB" in said.all
    assert "download the file first, or allow more with --max-download" in said.all
    # Only the ends of files and the headers of records were read.
    assert server.down < 2 * (2 * ENDS + 200_000)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("out")] == []
    assert say(*words, "--max-download", "40MB").code in (0, 1)


def test_a_tensor_is_refused_by_its_own_size(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CKPTOOL_MAX_DOWNLOAD", "900000")
    for rest in (["--format", "json"], ["-o", str(tmp_path / "out.npy")]):
        said = say("get", A, "state_dict.module.2", *rest)
        assert (said.code, "it would download 9" in said.err) == (4, True), said.all  # the rest is in memory
        monkeypatch.setenv("CKPTOOL_MAX_DOWNLOAD", str(2 * MIB))
        assert say("get", A, "state_dict.module.2", *rest).code == 0
        monkeypatch.setenv("CKPTOOL_MAX_DOWNLOAD", "900000")


def test_a_limit_that_is_no_number_is_never_ignored(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert say("hash", A, "--max-download", "1X").code == 2
    monkeypatch.setenv("CKPTOOL_MAX_DOWNLOAD", "1X")
    said = say("hash", A)
    assert said.code == 2 and "'1X' is not a number of bytes; write 4096" in said.err, said.all


def test_what_needs_no_values_is_not_refused(server: Server, tmp_path: Path) -> None:
    for call in (["keys"], ["inspect"], ["validate", "--quick"], ["scan"], ["hash", "--no-values"]):
        assert say(*call, A).code == 0
    assert say("strip-module", A, "-o", tmp_path / "out.pth", "--dry-run").code == 0
    assert say("diff", A, B, "--ignore", "values").code == 0


def test_the_files_of_a_command_count_together(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTOOL_MAX_DOWNLOAD", str(8 * MIB))
    assert say("hash", A).code == say("hash", B).code == 0
    for call in (["diff", A, B], ["hash", A, B], ["validate", A, B]):
        said = say(*call)
        assert said.code in (3, 4)
        assert "it would download " in said.all
    assert "s3://bucket/b.pth: it would download 5." in said.all
    assert " after 5." in said.all
    assert ANNOUNCED.get() is None


# -- folders --------------------------------------------------------------------------------------------------------


@pytest.fixture
def dcp(server: Server, tmp_path: Path) -> str:
    """The files of a DCP folder with 24 tensors of 160 kB, and as many small ones."""
    state = {f"layers.{at}.weight": torch.full((40_000,), float(at)) for at in range(24)}
    state |= {f"layers.{at}.bias": torch.full((4,), float(at)) for at in range(24)}
    torch.save(state, tmp_path / "model.pth")
    assert say("convert", tmp_path / "model.pth", "-o", tmp_path / "dcp", "--to-format", "dcp").code == 0
    for path in (tmp_path / "dcp").iterdir():
        server.put("bucket", f"dcp/{path.name}", path.read_bytes())
    server.clear()
    return str(tmp_path / "dcp")


@pytest.mark.parametrize("call", [["validate"], ["hash"], ["stats"], ["convert", "-o", "OUT.safetensors"]])
def test_a_folder_is_refused_as_a_whole(call: list[str], dcp: str, server: Server, tmp_path: Path) -> None:
    words = [word.replace("OUT", str(tmp_path / "out")) for word in call]
    said = say(*words, "s3://bucket/dcp", "--max-download", "2MB")
    assert said.code in (3, 4)
    assert "it would download 3." in said.all and "more than 2.00 MB" in said.all
    assert server.down < MIB
