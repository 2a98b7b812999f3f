"""Files and folders that are read to their end come in few large requests, and no byte of a tensor comes twice."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import gguf_files
import pytest
from command_line import say
from remote.server import MIB, Server

pytest.importorskip("obstore")
torch: Any = pytest.importorskip("torch")
safetensors: Any = pytest.importorskip("safetensors.torch")

from ckptool.remote import source  # noqa: E402

#: 96 tensors of 200 kB.
COUNT, NUMBERS = 96, 50_000


@pytest.fixture
def files(server: Server) -> dict[str, bytes]:
    state = {f"layers.{at:03}.weight": torch.full((NUMBERS,), float(at)) for at in range(COUNT)}
    zipped, legacy = io.BytesIO(), io.BytesIO()
    torch.save({"state_dict": state, "epoch": 3}, zipped)
    torch.save(state, legacy, _use_new_zipfile_serialization=False)
    found = {"a.pth": zipped.getvalue(), "old.pth": legacy.getvalue(), "a.safetensors": safetensors.save(state)}
    for name, data in found.items():
        server.put("bucket", name, data)
        server.put("bucket", f"other-{name}", data)
    return found


@pytest.mark.parametrize("command", ["validate", "hash", "diff"])
@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
def test_a_large_file_is_read_in_large_ranges(command: str, name: str, files: dict[str, bytes], server: Server) -> None:
    words = [command, f"s3://bucket/{name}", *([f"s3://bucket/other-{name}"] if command == "diff" else [])]
    count = 2 if command == "diff" else 1
    said = server.slowly(lambda: say(*words), 20 * count)
    assert said.code == 0, said.all
    assert server.down <= count * (1.02 * len(files[name]) + 2 * source.ENDS)
    assert server.round_trips <= 20 * count


@pytest.mark.parametrize("command", ["keys", "inspect"])
def test_the_metadata_is_read_without_a_tensor(command: str, files: dict[str, bytes], server: Server) -> None:
    assert say(command, "s3://bucket/a.pth").code == 0
    assert server.down <= 2 * source.ENDS and server.count() <= 4


@pytest.mark.parametrize("command", ["validate", "hash", "stats"])
def test_small_tensors_of_a_file_larger_than_memory(
    command: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their headers are so close together that joined requests for them would take the whole file."""
    state, file = {f"layers.{at}.weight": torch.full((15_000,), float(at)) for at in range(400)}, io.BytesIO()
    torch.save({"state_dict": state}, file)
    monkeypatch.setattr(source, "LIMITS", source.LIMITS._replace(remote_bytes=6 * MIB))
    server.put("bucket", "a.pth", file.getvalue())
    assert say(command, "s3://bucket/a.pth").code == 0
    assert server.down <= 1.02 * len(file.getvalue()) + 2 * source.ENDS
    assert server.count() < 480


@pytest.mark.parametrize("command", ["inspect", "scan", "validate"])
@pytest.mark.parametrize(("count", "size"), [(300, 20_000), (400, 100)])
def test_a_dcp_folder_takes_six_round_trips(
    command: str, count: int, size: int, server: Server, tmp_path: Path
) -> None:
    dcp: Any = pytest.importorskip("torch.distributed.checkpoint")
    state = {f"layers.{at}.weight": torch.full((size,), float(at)) for at in range(count)}
    dcp.save({"model": state, "step": 7}, checkpoint_id=tmp_path)
    for path in tmp_path.iterdir():
        server.put("bucket", f"dcp/{path.name}", path.read_bytes())
    said = server.slowly(lambda: say(command, "s3://bucket/dcp/"), 6)
    assert said.code == 0, said.all
    assert server.round_trips <= 6


@pytest.mark.parametrize("command", ["keys", "inspect", "get general.name"])
@pytest.mark.parametrize(("vocabulary", "requests"), [(0, 1), (4_000, 1), (128_000, 3)])
def test_the_header_of_a_gguf_takes_three_requests(
    vocabulary: int, requests: int, command: str, server: Server
) -> None:
    """Its vocabulary lies before the tensors, and nothing says how large it is: 8 MB in a model of today."""
    texts = b"".join(gguf_files.text("t" * (1 + at % 11)) for at in range(vocabulary))
    merges = b"".join(gguf_files.text("ab" * (1 + at % 7)) for at in range(2 * vocabulary))
    arrays = {"tokenizer.ggml.tokens": (vocabulary, texts), "tokenizer.ggml.merges": (2 * vocabulary, merges)}
    entries = [gguf_files.entry("general.name", gguf_files.STRING, gguf_files.text("n"))]
    entries += [
        gguf_files.entry(name, gguf_files.ARRAY, struct.pack("<IQ", gguf_files.STRING, number) + data)
        for name, (number, data) in arrays.items()
    ]
    data = gguf_files.made(entries, [gguf_files.tensor("t.weight", (1 << 20,))], bytes(4 << 20))
    server.put("bucket", "m.gguf", data)
    name, *more = command.split()
    said = say(name, "s3://bucket/m.gguf", *more)
    assert said.code == 0, said.all
    assert server.count() <= requests
