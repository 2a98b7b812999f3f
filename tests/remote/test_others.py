"""Other protocols through fsspec, on its file system in memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from traceback import format_exception
from typing import Any

import pytest

from ckptool.base.errors import ChangedError, CkptoolError
from ckptool.remote.folder import open_folder
from ckptool.remote.source import open_remote

fsspec: Any = pytest.importorskip("fsspec")

DATA = random.Random(1).randbytes(3 << 20)


@pytest.fixture
def files() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    for name in ("a.pth", "b.pth", "sub/c.json"):
        system.pipe(f"/bucket/run/{name}", DATA)
    yield system
    system.rm("/bucket", recursive=True)


def test_random_reads(files: Any) -> None:
    found = open_remote("memory://bucket/run/a.pth")
    chance = random.Random(2)
    for _ in range(100):
        offset, size = chance.randrange(len(DATA)), chance.randrange(1, 100_000)
        assert found.read(offset, size) == DATA[offset : offset + size]
    found.prefetch([(1 << 20, 10), (2 << 20, 10)])
    found.check_unchanged()


def test_a_folder(files: Any) -> None:
    found = open_folder("memory://bucket/run/")
    assert found.names() == {"a.pth", "b.pth", "sub"}
    assert found.inner("sub").size("c.json") == len(DATA)
    assert [found.open(name).read(5, 5) for name in ("a.pth", "b.pth")] == [DATA[5:10]] * 2


@pytest.mark.parametrize("moment", ["cat_file", "info"])
def test_a_file_replaced_between_two_calls(moment: str, files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = open_remote("memory://bucket/run/a.pth")
    real = getattr(type(files), moment)

    def replacing(self: Any, *args: Any, **more: Any) -> Any:
        monkeypatch.undo()
        files.pipe("/bucket/run/a.pth", DATA[::-1])
        return real(self, *args, **more)

    monkeypatch.setattr(type(files), moment, replacing)
    with pytest.raises(ChangedError):
        found.read(1 << 20, 10)


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("memory://bucket/run/none.pth", "no such file"),
        ("memory://bucket/run/sub", "no such file"),
        ("memory://bucket/run/", "it is the address of a folder, not of a file"),
        ("nix://bucket/a.pth", "addresses with nix:// are not supported"),
        ("simplecache://bucket/a.pth", "addresses with simplecache:// are not supported"),
        ("local://etc/passwd", "addresses with local:// are not supported"),
    ],
)
def test_errors(address: str, what: str, files: Any) -> None:
    with pytest.raises(CkptoolError) as caught:
        open_remote(address)
    assert (caught.value.what, caught.value.path) == (what, address)


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (PermissionError("SECRET"), "no permission to read it, or no such file and no permission to list bucket"),
        (ConnectionResetError("SECRET"), "no connection to memory://bucket"),
        (TimeoutError("SECRET"), "memory://bucket does not answer"),
        (ImportError("SECRET"), "a package is missing that fsspec needs for memory://"),
        (KeyError("SECRET"), "the request failed"),
    ],
)
def test_exceptions_of_file_systems(error: Exception, what: str, files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = open_remote("memory://bucket/run/a.pth")

    def fail(*args: object, **more: object) -> None:
        raise error

    monkeypatch.setattr(type(files), "cat_file", fail)
    with pytest.raises(CkptoolError) as caught:
        found.read(1 << 20, 10)
    assert caught.value.what == what
    assert "SECRET" not in "".join(format_exception(caught.value))
    assert caught.value.__context__ is not None and caught.value.__context__.__context__ is None
