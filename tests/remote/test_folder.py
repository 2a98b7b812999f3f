"""A remote folder is one listing, and its files are opened at the same time."""

from __future__ import annotations

import io
import json
from contextlib import closing
from typing import Any

import pytest
import remote.server as server_module
from command_line import say
from conftest import FIXTURES
from remote.server import MIB, Server

pytest.importorskip("obstore")

from ckptool.base.errors import ChangedError, UnreadableError
from ckptool.remote import folder as folder_module
from ckptool.remote import s3, source
from ckptool.remote.folder import RemoteFolder, open_folder
from ckptool.remote.source import ENDS
from ckptool.remote.store import Failed, Settings

FILES = {f"model-0000{number}-of-00008.safetensors": bytes([number]) * MIB for number in range(1, 9)}
FILES |= {"model.safetensors.index.json": b'{"weight_map": {}}', "config.json": b"{}", "rank0/optim.pt": bytes(10)}


@pytest.fixture(autouse=True)
def files(server: Server) -> None:
    for name, data in FILES.items():
        server.put("bucket", f"run/{name}", data)
    for name in ("run/", "run/rank0/"):  # what a console makes of a new folder
        server.put("bucket", name, b"")
    server.put("bucket", "run2/other.pth", b"other")


def folder(server: Server, address: str = "s3://bucket/run/", **settings: Any) -> RemoteFolder:
    return open_folder(address, Settings(server.url, **settings))


@pytest.mark.parametrize("address", ["s3://bucket/run", "s3://bucket/run/"])
def test_names_and_sizes_come_from_one_request(address: str, server: Server) -> None:
    found = folder(server, address)
    assert server.count() == 0
    assert found.names() == {name.partition("/")[0] for name in FILES}
    assert {name: found.size(name) for name in FILES} == {name: len(data) for name, data in FILES.items()}
    assert found.is_folder("rank0") and not found.is_folder("config.json") and not found.is_folder("rank")
    assert (found.size("none"), found.size("rank0")) == (None, None)
    inner = found.inner("rank0")
    assert (inner.names(), inner.size("optim.pt"), inner.name) == ({"optim.pt"}, 10, "rank0")
    assert (inner.path, inner.join("optim.pt")) == (found.join("rank0"), found.join("rank0", "optim.pt"))
    assert found.inner("none").names() == frozenset()
    with pytest.raises(UnreadableError, match="no such file") as caught:
        found.open("none")
    assert caught.value.path == "s3://bucket/run/none"
    assert server.count() == 1


def test_a_whole_bucket_and_an_empty_folder(server: Server) -> None:
    assert folder(server, "s3://bucket").names() == {"run", "run2"}
    assert folder(server, "s3://bucket/none/").names() == frozenset()
    assert folder(server, "s3://bucket/run").outer().names() == {"run", "run2"}
    assert (folder(server).name, folder(server).outer().path) == ("run", "s3://bucket")


@pytest.mark.parametrize("address", ["s3://bucket/both/", "s3://bucket/both/*.pth", "s3://bucket/**"])
def test_an_object_with_the_name_of_a_folder_is_not_skipped(address: str, server: Server) -> None:
    unsafe = b"cos\nsystem\n(S'true'\ntR."
    server.put("bucket", "both/model.pth", unsafe)
    server.put("bucket", "both/model.pth/other.pth", unsafe)
    said = say("scan", address)
    assert said.code == 3 and "s3://bucket/both/model.pth: it is a file and a folder at once" in said.err, said.all
    server.put("bucket", "both/model.pth", b"")
    folder_module._OPENED.clear()
    assert "at once" not in say("scan", address).all  # an empty object stands for the folder
    server.put("bucket", "both/", b"not empty")
    folder_module._OPENED.clear()
    assert "s3://bucket/both/: it is a file and a folder at once" in say("scan", "s3://bucket/both/").err


@pytest.mark.parametrize("name", ["run", "run.pth"])
@pytest.mark.parametrize("words", [("{}/", "{}"), ("{}", "{}/"), ("{}",)])
def test_a_folder_does_not_hide_the_object_of_its_name(name: str, words: tuple[str, ...], server: Server) -> None:
    server.put("hiding", name, b"cos\nsystem\n(S'true'\ntR.")
    server.put("hiding", f"{name}/ok.pth", (FIXTURES / "bare.pth").read_bytes())
    said = say("scan", *(word.format(f"s3://hiding/{name}") for word in words))
    assert said.code == 1 and f"s3://hiding/{name}: unsafe" in said.out, said.all


def test_a_shard_without_permission_is_not_a_missing_shard(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of a model must not pass for the whole; a server that fails says nothing about the file."""
    torch = pytest.importorskip("torch")
    names = [f"pytorch_model-0000{at}-of-00002.bin" for at in (1, 2)]
    for at, name in enumerate(names):
        file = io.BytesIO()
        torch.save({f"layer{at}.weight": torch.full((200_000,), float(at))}, file)
        server.put("bucket", f"half/{name}", file.getvalue())
    index = {"metadata": {}, "weight_map": {f"layer{at}.weight": name for at, name in enumerate(names)}}
    server.put("bucket", "half/pytorch_model.bin.index.json", json.dumps(index).encode())
    commands = [["keys"], ["inspect"], ["hash"], ["lock"], ["stats"], ["diff", "s3://bucket/half"]]
    monkeypatch.setenv("CKPTOOL_MAX_DOWNLOAD", "1000000")
    for words in commands:
        said = say(words[0], "s3://bucket/half", *words[1:])
        assert said.code == 4 and "it would download " in said.err and not said.out, said.all
    judged = [["match", "s3://bucket/half"], ["validate"], ["validate", "--quick"], ["scan"]]
    for words in judged:
        said = say(words[0], "s3://bucket/half", *words[1:])
        assert said.code in (3, 4) and f"{names[1]}: it would download " in said.err, said.all
    monkeypatch.delenv("CKPTOOL_MAX_DOWNLOAD")
    found = Server.object

    def denied(self: Server, bucket: str, key: str) -> Any:
        if key == f"half/{names[1]}":
            raise server_module.Failure(403, "AccessDenied")
        return found(self, bucket, key)

    monkeypatch.setattr(Server, "object", denied)
    for words in commands:
        said = say(words[0], "s3://bucket/half", *words[1:])
        assert said.code == 3 and "no permission to read it" in said.err and not said.out, said.all
    for words in judged:
        said = say(words[0], "s3://bucket/half", *words[1:])
        assert said.code == 3 and f"{names[1]}: no permission to read it" in said.err, said.all


def test_a_long_listing_comes_in_pages(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.page = 3
    assert len(folder(server).names()) == 11
    assert server.count() == 5
    monkeypatch.setattr(s3, "LIMITS", s3.LIMITS._replace(remote_files=5))
    with pytest.raises(UnreadableError, match="it has more than"):
        folder(server).names()


def test_shards_and_their_index_take_two_round_trips(server: Server) -> None:
    def opened() -> RemoteFolder:
        found = folder(server)
        assert found.read("model.safetensors.index.json", 100) == FILES["model.safetensors.index.json"]
        return found

    found = server.slowly(opened, 2)
    assert (server.count(), server.round_trips) == (10, 2)
    for number, name in enumerate(sorted(name for name in found.names() if "-of-" in name), 1):
        with closing(found.open(name)) as source:
            assert source.read(8, 4) == bytes([number]) * 4
            assert source.name == f"s3://bucket/run/{name}"
    with closing(found.open("model-00003-of-00008.safetensors")) as source:  # again
        assert source.read(0, ENDS) == bytes([3]) * ENDS
    assert (server.count(), server.round_trips) == (10, 2)
    assert found.read("rank0/optim.pt", 7) == bytes(7)
    assert server.count() == 11


def test_files_that_are_opened_first_and_read_later_are_asked_for_together(server: Server) -> None:
    def read() -> None:
        found = folder(server)
        shards = [found.open(name) for name in sorted(found.names()) if "-of-" in name]
        assert [source.read(0, 1) for source in shards] == [bytes([number]) for number in range(1, 9)]

    server.slowly(read, 2)
    assert (server.count(), server.round_trips) == (10, 2)  # the index belongs to them


def test_etags_in_a_listing_may_have_no_quotes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = server_module._facts
    monkeypatch.setattr(server_module, "_facts", lambda one: facts(one).replace('"', ""))  # as on Azure
    found = folder(server)
    assert found.read("config.json", 100) == FILES["config.json"]


def test_a_shard_that_fails_does_not_fail_the_others(server: Server) -> None:
    found = folder(server)
    found.names()
    server.put("bucket", "run/model-00005-of-00008.safetensors", b"replaced")
    assert found.open("model-00001-of-00008.safetensors").read(0, 2) == bytes([1, 1])
    with pytest.raises(ChangedError) as caught:
        found.open("model-00005-of-00008.safetensors").read(0, 2)
    assert caught.value.path == "s3://bucket/run/model-00005-of-00008.safetensors"


# -- writing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replaced", [False, True])
def test_a_server_that_compares_etags_without_quotes(replaced: bool, server: Server) -> None:
    store, key = source.open_store("s3://bucket/new", Settings(server.url))
    former = server.put("bucket", "new", b"one").etag
    server.unquoted = True
    if replaced:
        server.replaced = {1: ("bucket", "new", b"two")}
        with pytest.raises(Failed) as caught:
            store.put(key, [b"three"], 5, former)
        assert caught.value.status == 412
    else:
        store.put(key, [b"three"], 5, former)
    assert server.get("bucket", "new") == (b"two" if replaced else b"three")
