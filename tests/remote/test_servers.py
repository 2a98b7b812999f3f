"""The same tests on servers by other people: what holds on ours must hold elsewhere.

``make test`` runs them on our own server and on moto, ``make test-remote`` on all of ``servers.py``.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from command_line import Said, say
from conftest import FIXTURES
from remote.servers import SERVERS, Place

pytest.importorskip("obstore")

from ckptool.base.addresses import shown
from ckptool.remote.source import open_remote, open_store
from ckptool.remote.store import Failed, Store, at_once, current

ALL = os.environ.get("CKPTOOL_SERVERS") == "all"
MIB = 1 << 20
DATA = random.Random(1).randbytes(3 * MIB)
FILES = ("zip.pth", "legacy.pth", "model.safetensors", "run 1/epoch=3,step+5 (ü) 100%.pth")
FOLDERS = ("dcp4", "shards")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of 3.8 MB, so that commands need several requests, and with folders of checkpoints."""
    torch: Any = pytest.importorskip("torch")
    safetensors: Any = pytest.importorskip("safetensors.torch")
    folder = tmp_path_factory.mktemp("local")
    state = {f"module.layers.{at}.weight": torch.full((200, 200), float(at)) for at in range(24)}
    for name in FILES:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".safetensors":
            safetensors.save_file(state, path)
        else:
            torch.save({"state_dict": state, "epoch": 3}, path, _use_new_zipfile_serialization="legacy" not in name)
    shutil.copytree(FIXTURES / "dcp4", folder / "dcp4")
    (folder / "shards").mkdir()
    shards = {f"model-0000{number}-of-00002.safetensors": [*state][number - 1 :: 2] for number in (1, 2)}
    for name, keys in shards.items():
        safetensors.save_file({key: state[key] for key in keys}, folder / "shards" / name)
    index = {"metadata": {}, "weight_map": {key: name for name, keys in shards.items() for key in keys}}
    (folder / "shards" / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=[name for name in SERVERS if ALL or name in ("own", "moto")])
def started(request: pytest.FixtureRequest, local: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with SERVERS[request.param](tmp_path_factory.mktemp("server")) as place:
        for path in (path for path in local.rglob("*") if path.is_file()):
            place.put(path.relative_to(local).as_posix(), path.read_bytes())
        yield place


@pytest.fixture
def place(started: Place, alone: None, monkeypatch: pytest.MonkeyPatch) -> Place:
    enter(started.variables, monkeypatch)
    return started


def enter(variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def plain(said: Said, root: str) -> tuple[int, str, str]:
    """What a command said, without the folder of its file, the next steps and the width of tables."""
    texts = (unquote(text).replace(f"{root}/", "") for text in (said.out, said.err))
    texts = (re.sub(r"-> .*", "->", text) for text in texts)
    return said.code, *(re.sub(r"[\s─-]+", " ", text) for text in texts)  # type: ignore[return-value]


def store_of(address: str) -> tuple[Store, str]:
    return open_store(address, current())


# -- reading ------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("call", [["keys"], ["inspect"], ["validate"], ["hash"], ["scan"]], ids=" ".join)
@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_command_says_the_same_as_of_a_local_file(name: str, call: list[str], place: Place, local: Path) -> None:
    remote = say(*call, place.at(name))
    assert remote.code == 0, remote.all
    assert plain(remote, shown(place.address)) == plain(say(*call, local / name), str(local))


def test_conditions_and_a_range_behind_the_end(place: Place) -> None:
    place.put("conditions", DATA)
    store, key = store_of(place.at("conditions"))
    facts = store.head(key)
    assert facts.size == len(DATA)
    assert store.get(key, MIB, 10, facts.etag) == (DATA[MIB : MIB + 10], facts)
    assert store.get(key, len(DATA) - 5, 10).data == DATA[-5:]
    if store.has_tail:
        assert store.get(key, None, 7) == (DATA[-7:], facts)
    with pytest.raises(Failed) as caught:
        store.get(key, len(DATA) + 1, 5)
    assert caught.value.status == 416
    if place.conditions:
        with pytest.raises(Failed) as caught:
            store.get(key, MIB, 10, '"another"')
        assert caught.value.status == 412
    else:  # then the ETag of the answer is compared
        assert store.get(key, MIB, 10, '"another"').facts == facts


def test_names_that_are_not_there(place: Place) -> None:
    nowhere = f"{place.address.removesuffix('bucket')}nowhere/a.pth"
    for address, what in ((place.at("none.pth"), "no such file"), (nowhere, place.no_bucket)):
        said = say("keys", address)
        assert (said.code, said.out) == (3, "")
        assert f"{shown(address)}: {what}" in said.err


def test_a_wrong_key(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if place.stranger is None:
        pytest.skip("this server accepts any key")
    address, variables = place.stranger
    enter(variables, monkeypatch)
    for call in (["keys", f"{address}/zip.pth"], ["validate", f"{address}/dcp4/"]):
        said = say(*call)
        assert said.code == 3
        assert re.search("does not accept the credentials|no permission to read it|wants credentials", said.err), (
            said.err
        )
        secrets = [word for word in variables.values() if word in said.all]
        assert [word for word in secrets if word not in shown(address) and "/" not in word] == []


@pytest.mark.parametrize("name", ["zip.pth", "model.safetensors", "empty.pth"])
def test_a_signed_address(name: str, place: Place, local: Path, tmp_path: Path) -> None:
    """It is signed for GET alone, not for HEAD."""
    if place.sign is None:
        pytest.skip("this server has no signatures")
    (local / "empty.pth").touch()
    place.put("empty.pth", b"")
    address = place.sign("GET", name, timedelta(minutes=5))
    root = shown(address).removesuffix(f"/{name}")
    for call in (["keys"], ["validate"], ["hash"]):
        remote, here = say(*call, address), say(*call, local / name)
        code, out, err = plain(here, str(local))
        assert plain(remote, root) == (code, out, err.replace("write or download it again", "check the link"))
        assert "ignature" not in remote.all and "sig=" not in remote.all
    if name == "zip.pth":
        for path, output in ((address, "one.pth"), (local / name, "two.pth")):
            assert say("strip-module", path, "-o", tmp_path / output).code == 0
        assert (tmp_path / "one.pth").read_bytes() == (tmp_path / "two.pth").read_bytes()


@pytest.mark.skipif(not ALL, reason="it puts 1,050 objects, for make test-remote")
def test_a_listing_of_more_than_a_page(place: Place) -> None:
    names = [f"many/{at // 100}/{at}.pth" for at in range(1050)]
    at_once(names, lambda name: place.put(name, b"x"))
    store, _ = store_of(place.at(names[0]))
    assert sorted(facts.key for facts in store.list("many")) == sorted(names)
    assert [facts.key for facts in store.list("many/10")] == sorted(names[1000:])


# -- writing ------------------------------------------------------------------------------------------------------


@pytest.fixture
def large(place: Place, local: Path) -> str:
    """The address of a file of 12 MB, which is written in several parts, with a local copy of the same name."""
    if not place.writes:
        pytest.skip("this server takes no files")
    torch: Any = pytest.importorskip("torch")
    path = local / "large.pth"
    if not path.exists():
        torch.save({f"module.{at}": torch.full((750_000,), float(at)) for at in range(4)}, path)
    place.put(path.name, path.read_bytes())
    return place.at(path.name)


def content(address: str) -> bytes:
    found = open_remote(address)
    return found.read(0, found.size)


@pytest.mark.parametrize("call", [["strip-module"], ["edit", "--set", "epoch=3"], ["convert"]], ids=" ".join)
def test_an_output_on_the_server_is_the_local_output(
    call: list[str], large: str, place: Place, local: Path, tmp_path: Path
) -> None:
    name = f"{call[0]}.{'safetensors' if call[0] == 'convert' else 'pth'}"
    first, *rest = call
    assert say(first, local / "large.pth", *rest, "-o", tmp_path / name).code == 0
    for source in (large, local / "large.pth"):
        target = place.at(f"written/{Path(str(source)).parent.name}/{name}")
        said = say(first, source, *rest, "-o", target)
        assert said.code == 0, said.err
        assert content(target) == (tmp_path / name).read_bytes()
    assert place.leftovers() == []


def test_an_output_that_exists(large: str, place: Place, local: Path, tmp_path: Path) -> None:
    target = place.at("existing.pth")
    for size in (10, 20 * MIB):
        place.put("existing.pth", DATA[:10] + bytes(size))
        said = say("strip-module", large, "-o", target)
        assert said.code == 4 and "the output exists" in said.err, said.all
        assert content(target) == DATA[:10] + bytes(size)
        said = say("strip-module", large, "-o", target, "--force")
        assert said.code == 0, said.err
        assert say("strip-module", local / "large.pth", "-o", tmp_path / f"{size}.pth").code == 0
        assert content(target) == (tmp_path / f"{size}.pth").read_bytes()
    small = say("strip-module", place.at("zip.pth"), "-o", target)  # one request
    assert small.code == 4, small.all
    assert say("strip-module", place.at("zip.pth"), "-o", target, "--force").code == 0
    assert place.leftovers() == []


def test_an_output_that_cannot_be_written(
    place: Place, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, variables = (place.address, {}) if not place.writes else place.stranger or (None, {})
    if address:
        enter(variables, monkeypatch)
        for path in (FIXTURES / "bare_module.pth", local / "zip.pth"):
            said = say("strip-module", path, "-o", f"{address}/denied.pth")
            assert said.code == (4 if address.startswith("https:") else 5), said.all
        enter(place.variables, monkeypatch)
        assert "no such file" in say("keys", place.at("denied.pth")).err
    if place.writes:
        nowhere = f"{place.address.removesuffix('bucket')}nowhere/a.pth"
        said = say("strip-module", local / "zip.pth", "-o", nowhere)
        assert said.code == 5 and f"{shown(nowhere)}: {place.no_bucket}" in said.err, said.all
    assert place.leftovers() == []
