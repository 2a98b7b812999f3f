"""The hub: one listing at one commit, a redirect for each range, and a token that no other host sees."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from remote.server import MIB, TOKEN, Server

from ckptool.base.errors import CkptoolError
from ckptool.remote import web
from ckptool.remote.folder import open_folder
from ckptool.remote.source import ENDS, open_remote
from ckptool.remote.store import Settings

pytest.importorskip("obstore")
pytest.importorskip("huggingface_hub")

DATA = random.Random(1).randbytes(2 * MIB)


class Hub:
    """The hub and the host to which it redirects."""

    def __init__(self, site: Server, other: Server) -> None:
        self.site, self.other = site, other
        self.url = f"{site.url}/hub"

    def put(self, repository: str, name: str, data: bytes) -> None:
        self.site.put(repository.replace("/", "--"), name, data)
        self.other.put("plain", f"{repository.replace('/', '--')}/{name}", data)

    def counts(self) -> tuple[int, int, int]:
        """How many listings, redirects and answers of the other host there were."""
        paths = [each.path for each in self.site.seen if each.path.startswith(("/hub/api/models", "/hub/org"))]
        return sum("/api/" in path for path in paths), sum("/resolve/" in path for path in paths), self.other.count()


@pytest.fixture
def site(alone: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    web._repository.cache_clear()
    with Server() as one, Server() as other:
        monkeypatch.setenv("HF_ENDPOINT", f"{one.url}/hub")
        one.redirect = other.url.replace("127.0.0.1", "localhost")
        found = Hub(one, other)
        for number in range(1, 9):
            found.put("org/model", f"model-0000{number}-of-00008.safetensors", DATA[number:])
        found.put("org/model", "config.json", b"{}")
        found.put("org/model", "old/model.pth", DATA)
        yield found


def test_a_file(site: Hub) -> None:
    found = open_remote("hf://org/model/old/model.pth")
    assert (found.size, found.name) == (len(DATA), "hf://org/model/old/model.pth")
    assert site.counts() == (1, 2, 2)
    assert found.read(MIB, 1000) == DATA[MIB : MIB + 1000]
    found.check_unchanged()
    assert site.counts() == (1, 3, 3)
    assert {each.path.split("/")[5] for each in site.site.seen if "/resolve/" in each.path} == {site.site.commit}


def test_shards_are_one_listing_and_a_range_each(site: Hub) -> None:
    folder = open_folder("hf://org/model")
    assert folder.names() == frozenset(
        [f"model-0000{at}-of-00008.safetensors" for at in range(1, 9)] + ["config.json", "old"]
    )
    assert folder.size("model-00003-of-00008.safetensors") == len(DATA) - 3
    assert site.counts() == (1, 0, 0)
    shards = [folder.open(name) for name in sorted(folder.names()) if "-of-" in name]
    assert [shard.read(0, 9) for shard in shards] == [DATA[at : at + 9] for at in range(1, 9)]
    assert site.counts() == (1, 8, 8)
    assert site.other.down == 8 * ENDS
    assert folder.read("config.json", 10) == b"{}"  # not redirected
    assert site.counts() == (1, 9, 8)
    assert open_folder("hf://org/model/old/").names() == {"model.pth"}
    assert site.counts() == (1, 9, 8)


@pytest.mark.parametrize(
    "address",
    [
        "hf://org/model@main/old/model.pth",
        "hf://models/org/model/old/model.pth",
        "hf://org/model@0123456789abcdef0123456789abcdef01234567/old/model.pth",
        "{site}/org/model/blob/main/old/model.pth",
        "{site}/org/model/resolve/main/old/model.pth",
    ],
)
def test_ways_to_name_a_file(address: str, site: Hub) -> None:
    assert open_remote(address.format(site=site.url)).read(5, 5) == DATA[5:10]
    assert site.counts() == (1, 2, 2)


def test_the_token_goes_to_the_hub_alone(site: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    site.put("org/private", "model.pth", DATA)
    with pytest.raises(CkptoolError) as caught:
        open_remote("hf://org/private/model.pth")
    assert caught.value.what == "there is no such repository, or it is private"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    found = open_remote("hf://org/private/model.pth")
    assert found.read(MIB, 5) == DATA[MIB : MIB + 5]
    sent = {each.headers.get("authorization") for each in site.site.seen if "/resolve/" in each.path}
    assert sent == {f"Bearer {TOKEN}"}
    assert {each.headers.get("authorization") for each in site.other.seen} == {None}
    with pytest.raises(CkptoolError):
        open_remote("hf://org/private/model.pth", Settings(anonymous=True))


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("hf://org/none/model.pth", "there is no such repository, or it is private"),
        ("hf://org/model@none/model.pth", "the repository has no such revision"),
        ("hf://org/model/none.pth", "no such file"),
        ("hf://org/model", "it is the address of a folder, not of a file"),
        ("hf://model.pth", "it is not an address of the hub"),
    ],
)
def test_errors(address: str, what: str, site: Hub) -> None:
    with pytest.raises(CkptoolError) as caught:
        open_remote(address)
    assert (caught.value.what, caught.value.path) == (what, address)
    assert TOKEN not in f"{caught.value} {caught.value.next}"


def test_no_hub(site: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CkptoolError, match="no connection to the hub"):
        open_remote("hf://org/model/model.pth")
