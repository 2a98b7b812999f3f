"""Files within archives: ``outer.zip!policy.pth``."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from command_line import say
from conftest import CORPUS, FIXTURES, needs_corpus
from safetensors.torch import save

import ckptool
from ckptool.base.errors import MalformedError, NotACheckpointError, RefusedError, UnreadableError
from ckptool.base.limits import LIMITS
from ckptool.files.archives import checkpoints_in, file_name, is_address, open_any
from ckptool.files.sources import BytesSource, MemberSource, SliceSource

INNER = (FIXTURES / "checkpoint.pth.tar").read_bytes()


def zipped(path: Path, parts: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in parts.items():
            file.writestr(zipfile.ZipInfo(name), data, method)
    return path


def tarred(path: Path, parts: dict[str, bytes], mode: str = "w:") -> Path:
    with tarfile.open(path, mode) as file:  # type: ignore[call-overload]
        for name, data in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


PARTS = {"config.json": b"{}", "run/policy.pth": INNER, "run/b.pth": (FIXTURES / "bare.pth").read_bytes()}


@pytest.fixture(params=["stored", "deflated", "tar", "tar.gz"])
def outer(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "stored":
        return zipped(tmp_path / "outer.zip", PARTS)
    if request.param == "deflated":
        return zipped(tmp_path / "outer.zip", PARTS, zipfile.ZIP_DEFLATED)
    if request.param == "tar":
        return tarred(tmp_path / "outer.tar", PARTS)
    return tarred(tmp_path / "outer.tar.gz", PARTS, "w:gz")


def _without_checksums(name: str) -> bytes:
    tensor = torch.arange(1000.0)
    if name == "m.safetensors":
        return save({"w": tensor})
    out = io.BytesIO()
    torch.save({"w": tensor}, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


@pytest.mark.parametrize("command", ["convert", "convert-back", "add-module", "cast", "get", "validate"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", ["m.pth", "m.safetensors"])
def test_damage_that_only_the_archive_records_is_not_passed_on(
    name: str, nested: bool, command: str, tmp_path: Path
) -> None:
    data = _without_checksums(name)
    path = zipped(tmp_path / "outer.zip", {name: data})
    if nested:
        path = zipped(tmp_path / "outer.zip", {"inner.zip": path.read_bytes()})
    address = f"{path}!inner.zip!{name}" if nested else f"{path}!{name}"
    output = tmp_path / {"get": "x.npy", "convert-back": "x.safetensors"}.get(command, "x.pth")
    arguments = {
        "convert": ("convert", address, "--to-format", "torch", "-o", output),
        "convert-back": ("convert", address, "--to-format", "safetensors", "-o", output),
        "add-module": ("add-module", address, "-o", output),
        "cast": ("cast", address, "--to-dtype", "float16", "-o", output.with_suffix(".pth")),
        "get": ("get", address, "w", "-o", output),
        "validate": ("validate", address),
    }[command]
    assert say(*arguments).code == 0
    output.unlink(missing_ok=True)
    raw = bytearray(path.read_bytes())
    raw[raw.find(torch.arange(1000.0).numpy().tobytes()) + 2001] ^= 8
    path.write_bytes(raw)
    said = say(*arguments)
    assert said.code == (1 if command == "validate" else 3) and not output.exists(), said.all
    assert f"the member {name} of the archive does not match its checksum" in said.all


def test_a_member_is_the_file(outer: Path, tmp_path: Path) -> None:
    address = f"{outer}!run/policy.pth"
    with ckptool.open(address) as checkpoint, ckptool.open(FIXTURES / "checkpoint.pth.tar") as plain:
        assert checkpoint.path == address
        assert [entry.path for entry in checkpoint.survey.tensors] == [entry.path for entry in plain.survey.tensors]
        ckptool.save(checkpoint, tmp_path / "copy.pth")
    assert (tmp_path / "copy.pth").read_bytes() == INNER
    assert ckptool.validate(address)["valid"]


def test_the_archive_is_an_input(outer: Path) -> None:
    with ckptool.open(f"{outer}!run/policy.pth") as checkpoint:
        edited = ckptool.strip_module(checkpoint, "module.")
        with pytest.raises(RefusedError, match="the output is the input"):
            ckptool.save(edited, outer, force=True)
        with pytest.raises(RefusedError, match="cannot be edited in place"):
            ckptool.save_in_place(edited)


def test_stored_members_are_not_copied(tmp_path: Path) -> None:
    for path in (zipped(tmp_path / "a.zip", PARTS), tarred(tmp_path / "a.tar", PARTS)):
        source = open_any(f"{path}!run/policy.pth")
        assert isinstance(source, MemberSource) and isinstance(source.source, SliceSource)
        source.close()


def test_archives_in_archives(tmp_path: Path) -> None:
    inner = zipped(tmp_path / "b.zip", PARTS).read_bytes()
    middle = tarred(tmp_path / "m.tar.gz", {"x/b.zip": inner}, "w:gz").read_bytes()
    path = zipped(tmp_path / "a.zip", {"m.tar.gz": middle})
    with ckptool.open(f"{path}!m.tar.gz!x/b.zip!run/policy.pth") as checkpoint:
        assert checkpoint.survey.tensors
    with pytest.raises(NotACheckpointError, match="a gzipped tar archive that holds") as caught:
        ckptool.open(f"{path}!m.tar.gz")
    assert caught.value.next == f"ckptool inspect '{path}!m.tar.gz!x/b.zip'"
    with pytest.raises(NotACheckpointError) as caught:
        ckptool.open(f"{path}!m.tar.gz!x/b.zip")
    assert caught.value.next == f"ckptool inspect '{path}!m.tar.gz!x/b.zip!run/policy.pth'"


def test_a_file_with_a_mark_is_that_file(tmp_path: Path) -> None:
    zipped(tmp_path / "a.zip", {"b!c.pth": INNER, "d.zip!e.pth": INNER})
    (tmp_path / "a.zip!b!c.pth").write_bytes((FIXTURES / "bare.pth").read_bytes())
    assert not is_address(str(tmp_path / "a.zip!b!c.pth"))
    with ckptool.open(tmp_path / "a.zip!b!c.pth") as checkpoint:
        assert checkpoint.state_dicts[0].path == ""
    os.remove(tmp_path / "a.zip!b!c.pth")
    for name in ("b!c.pth", "d.zip!e.pth"):
        with ckptool.open(tmp_path / f"a.zip!{name}") as checkpoint:
            assert checkpoint.source.size == len(INNER)
    zipped(tmp_path / "odd!name.zip", {"c.pth": INNER})
    with ckptool.open(tmp_path / "odd!name.zip!c.pth") as checkpoint:
        assert checkpoint.source.size == len(INNER)
    assert file_name(str(tmp_path / "odd!name.zip!c.pth")) == "c.pth"
    assert file_name("x/no!such.pth") == "no!such.pth"


def test_a_thousand_marks(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", PARTS)
    for rest in ("!x" * 1000, "!" * 100_000, "!run/policy.pth" * 1000):
        with pytest.raises(UnreadableError):
            ckptool.open(f"{path}{rest}")
    data = INNER
    for _ in range(20):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            file.writestr("a", data)
        data = buffer.getvalue()
    path.write_bytes(data)
    with pytest.raises(UnreadableError, match=f"more than {LIMITS.nesting} nested archives are not followed"):
        ckptool.open(f"{path}{'!a' * 20}")
    with ckptool.open(_chained(tmp_path / "few.zip", LIMITS.nesting)) as checkpoint:
        assert checkpoint.source.size == len(INNER)


def _chained(path: Path, count: int) -> str:
    data = INNER
    for _ in range(count):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            file.writestr("a", data)
        data = buffer.getvalue()
    path.write_bytes(data)
    return f"{path}{'!a' * count}"


def test_bombs(tmp_path: Path) -> None:
    bomb = zipped(tmp_path / "bomb.zip", {"a.pth": bytes(100 << 20)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(MalformedError, match="a decompression bomb, not a pickle"):
        ckptool.open(f"{bomb}!a.pth")
    with pytest.raises(NotACheckpointError, match="a zip archive that holds"):
        ckptool.open(bomb)
    big = tmp_path / "big.tar.gz"
    header = tarfile.TarInfo("a.pth")
    header.size = 400 << 20
    with gzip.open(big, "wb", compresslevel=1) as file:
        file.write(header.tobuf())
        for _ in range(400):
            file.write(bytes(1 << 20))
    with pytest.raises(UnreadableError, match="inflate"):
        ckptool.open(f"{big}!a.pth")
    with pytest.raises(UnreadableError, match="it inflates to more than"):
        ckptool.open(f"{big}!b.pth")


def test_too_large_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptool.files.archives.LIMITS", LIMITS._replace(member_bytes=1000))
    for path, step in (
        (zipped(tmp_path / "a.zip", PARTS, zipfile.ZIP_DEFLATED), "unzip"),
        (tarred(tmp_path / "a.tar.gz", PARTS, "w:gz"), "tar -xzf"),
    ):
        with pytest.raises(UnreadableError, match="not inflated to memory") as caught:
            ckptool.open(f"{path}!run/policy.pth")
        assert caught.value.next == f"{step} {path} run/policy.pth, then name the file inside"
    for path in (zipped(tmp_path / "b.zip", PARTS), tarred(tmp_path / "b.tar", PARTS)):
        ckptool.open(f"{path}!run/policy.pth").close()


def test_damage_never_crashes(tmp_path: Path) -> None:
    for path in (
        zipped(tmp_path / "a.zip", PARTS, zipfile.ZIP_DEFLATED),
        tarred(tmp_path / "a.tar", PARTS),
        tarred(tmp_path / "a.tar.gz", PARTS, "w:gz"),
    ):
        data = path.read_bytes()
        for at in range(0, len(data), max(len(data) // 150, 1)):
            for bad in (data[:at], data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]):
                path.write_bytes(bad)
                for address in (str(path), f"{path}!run/policy.pth"):
                    try:
                        ckptool.open(address).close()
                    except UnreadableError as error:
                        assert str(error)


def test_several_gzip_streams(tmp_path: Path) -> None:
    data = tarred(tmp_path / "a.tar", PARTS).read_bytes()
    half = len(data) // 2
    (tmp_path / "a.tgz").write_bytes(gzip.compress(data[:half]) + gzip.compress(data[half:]) + bytes(100))
    with ckptool.open(tmp_path / "a.tgz!run/policy.pth") as checkpoint:
        assert checkpoint.source.read(0, len(INNER)) == INNER


def test_folders_links_and_sparse_members_are_no_files(tmp_path: Path) -> None:
    path = tmp_path / "odd.tar"
    with tarfile.open(path, "w:", format=tarfile.GNU_FORMAT) as file:
        for name, kind in (("dir.pth", tarfile.DIRTYPE), ("link.pth", tarfile.SYMTYPE), ("s.pth", b"S")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "elsewhere"
            file.addfile(info)
    for name in ("link.pth", "s.pth"):
        with pytest.raises(UnreadableError, match="is not a regular file, or is a sparse one"):
            ckptool.open(f"{path}!{name}")
    assert checkpoints_in(BytesSource(path.read_bytes())) == []


def test_the_last_of_two_members_counts(tmp_path: Path) -> None:
    """As tar itself unpacks them."""
    path = tmp_path / "twice.tar"
    with tarfile.open(path, "w:") as file:
        for data in (b"first", INNER):
            info = tarfile.TarInfo("./a.pth")
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    for name in ("a.pth", "./a.pth"):
        with ckptool.open(f"{path}!{name}") as checkpoint:
            assert checkpoint.source.size == len(INNER)


@needs_corpus
def test_real_ones() -> None:
    with ckptool.open(f"{CORPUS / 'allenai__allennlp__model.tar.gz'}!weights.th") as checkpoint:
        assert len(checkpoint.survey.tensors) == 9
    path = CORPUS / "DLR-RM__rl-trained-agents__CartPole-v1.zip"
    with pytest.raises(NotACheckpointError) as caught:
        ckptool.open(path)
    assert caught.value.next == f"ckptool inspect '{path}!policy.pth'"
    with zipfile.ZipFile(path) as file:
        expected = torch.load(io.BytesIO(file.read("policy.pth")), weights_only=True)
    found = ckptool.load(f"{path}!policy.pth")
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["model.pth.gz", "model.pth"])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_gzipped_checkpoint(name: str, legacy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"module.w": torch.arange(6.0)}
    torch.save(state, "plain.pth", _use_new_zipfile_serialization=not legacy)
    Path(name).write_bytes(gzip.compress(Path("plain.pth").read_bytes()))
    said = say("inspect", name)
    assert said.code == 3 and f"ckptool inspect '{name}!model.pth'" in said.err
    address = f"{name}!model.pth"
    assert say("validate", address).code == 0
    assert say("strip-module", address, "-o", "out.pth").code == 0
    assert torch.equal(torch.load("out.pth")["w"], state["module.w"])
    said = say("inspect", f"{name}!other.pth")
    assert said.code == 3 and f"ckptool inspect '{address}'" in said.err
    Path(name).write_bytes(Path(name).read_bytes()[:-40])
    said = say("validate", address)
    assert said.code in (1, 3) and "cut" in said.all


def test_gzip_data_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptool.files.archives.LIMITS", LIMITS._replace(member_bytes=1 << 20))
    path = tmp_path / "m.pth.gz"
    path.write_bytes(gzip.compress(b"PK\3\4" + os.urandom(2 << 20)))
    with pytest.raises(UnreadableError, match="not inflated to memory") as caught:
        open_any(f"{path}!m.pth")
    assert "gunzip -c" in caught.value.next
