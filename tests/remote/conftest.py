"""The server of most tests here, and the variables that lead to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from remote.server import KEY, SECRET, Server

from ckptool.remote import source, wire

#: Variables with credentials, addresses, certificates or settings of the person who runs the tests.
PREFIXES = ("AWS_", "AZURE_", "CKPTOOL_", "GOOGLE_", "HF_", "HUGGING_FACE_", "SSL_", "REQUESTS_", "CURL_")
PREFIXES += ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
#: Settings that options of a command set for the rest of the process.
OPTIONS = ("ENDPOINT_URL", "ANONYMOUS", "PROFILE", "MAX_DOWNLOAD", "ALLOW_UNVERSIONED")


@pytest.fixture(scope="session", autouse=True)
def no_waiting() -> Iterator[None]:
    """Send requests again at once, and let all sessions of botocore share the descriptions of services (0.1 s each)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "_PAUSE", 0.001)
        if find_spec("botocore"):
            session: Any = import_module("botocore.session")
            patch.setattr(session, "create_loader", cache(session.create_loader))
        yield


@pytest.fixture(scope="session")
def empty_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home without files of credentials, the same for all tests: clients are made anew for another one."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, empty_home: Path) -> None:
    """Remove the variables and the home of the person who runs the tests; options of commands end with the test."""
    for name in [name for name in os.environ if name.upper().startswith(PREFIXES)]:
        monkeypatch.delenv(name)
    for name in OPTIONS:
        monkeypatch.setenv(f"CKPTOOL_{name}", "")
    monkeypatch.setenv("HOME", str(empty_home))
    monkeypatch.setenv("HF_HOME", str(empty_home))


@pytest.fixture
def served() -> Iterator[Server]:
    """A running server; most modules put objects into one of their own, which all their tests share."""
    with Server() as found:
        yield found


@pytest.fixture
def server(served: Server, alone: None, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, without counts and faults, and the variables with its address and its key."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", served.url)
    served.clear()
    source._OPENED.clear()
    return served
