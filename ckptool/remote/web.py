"""Files that are read with plain requests: a web server's, and repositories of the Hugging Face hub.

On the hub, one request names the commit and lists its files, and all bytes come from that commit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

from ..base.addresses import Address, parse
from ..base.lazy import regex
from ..base.limits import LIMITS
from ..files.archives import parsed_object
from . import wire
from .store import Answer, Facts, Failed, Settings, Spend, Store, check_server

_SITE: Final = "https://huggingface.co"
#: Pages of a repository, of a folder or of a file, and links to download a file.
_PAGE: Final = regex(r"((?:(?:datasets|spaces)/)?[^/]+/[^/]+)(?:/(?:blob|resolve|raw|tree)/([^/]+)(/.*)?)?/?")
_PATH: Final = regex(r"(?:(models|datasets|spaces)/)?([^/]+/[^/@]+)(?:@(refs/[^/]+/[^/]+|[^/]+))?(?:/(.*))?")


def open_store(address: str, settings: Settings) -> tuple[Store, str]:
    """Return the store whose only file is the one at an address, or a repository of the hub; raises Failed."""
    parts = parse(address)
    if parts.scheme == "hf":
        return open_hub(parts, settings)
    check_server(f"{parts.scheme}://{parts.host}")
    headers = {"authorization": wire.basic(parts.user)} if parts.user else {}
    # Azure knows no suffix ranges. Its signatures are two of the parameters.
    azure = parts.host.endswith(".core.windows.net") or ("sig=" in parts.query and "sv=" in parts.query)
    url = str(parts._replace(user=""))
    return Web(lambda key: url, headers, has_tail=not azure), ""


def etag_of(etag: str, changed: str) -> str:
    """Return an ETag in quotes. Without one, the time of the last change takes its place; "" if there is neither."""
    etag = etag or (f'W/"{changed}"' if changed else "")
    return etag if not etag or etag.endswith('"') else f'"{etag}"'


class Web(Store):
    """The files whose addresses ``url`` returns for their keys; all requests have these ``headers``."""

    def __init__(self, url: Callable[[str], str], headers: Mapping[str, str], *, has_tail: bool = True) -> None:
        self._url, self._headers, self.has_tail = url, headers, has_tail

    def facts(self, key: str, size: int, reply: wire.Reply) -> Facts:
        """Return the facts of an object from an answer."""
        return Facts(key, size, etag_of(reply.headers.get("etag", ""), reply.headers.get("last-modified", "")))

    def head(self, key: str) -> Facts:
        """Return the facts of a file from a request for its first byte: signed addresses are signed for GET alone."""
        try:
            return self.get(key, 0, 1).facts
        except Failed as failed:
            if failed.status == 416:
                return Facts(key, 0, "")
            if failed.kind != "whole":  # an empty file, or no ranges
                raise
        return self._head(key)

    def send(self, method: str, key: str, headers: Mapping[str, str], most: int) -> wire.Reply:
        """Send a request that reads, once; raises Failed."""
        return wire.ask(method, self._url(key), {**self._headers, **headers}, most)

    def _head(self, key: str) -> Facts:
        reply = wire.retried(lambda: self.send("HEAD", key, {}, 0))
        length = reply.headers.get("content-length", "")
        if not length.isdecimal():
            raise Failed("answer")
        return self.facts(key, int(length), reply)

    def get(self, key: str, begin: int | None, size: int, etag: str = "") -> Answer:
        headers = {"range": f"bytes=-{size}" if begin is None else f"bytes={begin}-{begin + size - 1}"}
        if etag and not etag.startswith("W/"):  # a weak ETag matches no condition
            headers["if-match"] = etag

        def ask() -> Answer:
            reply = self.send("GET", key, headers, size)
            given = reply.headers.get("content-range", "")
            found = regex(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})").fullmatch(given)
            if not found:
                raise Failed("whole")
            first, last, total = map(int, found.groups())
            wanted = max(total - size, 0) if begin is None else begin
            if (first, last + 1) != (wanted, min(wanted + size, total)) or len(reply.body) != last + 1 - first:
                raise Failed("length")
            return Answer(reply.body, self.facts(key, total, reply))

        return wire.retried(ask)


# -- the hub


def page_shows(parts: Address) -> str:
    """Return the ``hf://`` address of what a web page of the hub shows, or "" for any other address."""
    site = f"{os.environ.get('HF_ENDPOINT', _SITE).rstrip('/')}/"
    address = f"{parts.scheme}://{parts.host}/{parts.path}"
    page = _PAGE.fullmatch(address[len(site) :]) if address.startswith(site) else None
    if not page:
        return ""
    revision = f"@{page[2]}" if page[2] not in (None, "main") else ""
    return f"hf://{page[1]}{revision}{page[3] or ''}"


def open_hub(parts: Address, settings: Settings) -> tuple[Store, str]:
    """Return the repository of an address on the hub, and the path of the file in it; raises Failed."""
    found = _PATH.fullmatch(f"{parts.host}/{parts.path}")
    if not found:
        raise Failed("names")
    try:
        from huggingface_hub import get_token
    except ImportError:
        raise Failed("hub") from None
    kind, name, revision, file = found.groups()
    token = "" if settings.anonymous else get_token() or ""
    site = settings.endpoint_url or os.environ.get("HF_ENDPOINT", _SITE)
    check_server(site)
    minute = int(time.monotonic() // 60)  # a branch may move
    key = site.rstrip("/"), kind or "models", name, unquote(revision or "main"), token, settings.max_download, minute
    return _repository(*key), file or ""


@lru_cache(maxsize=8)
def _repository(site: str, kind: str, name: str, revision: str, token: str, most: int, _minute: int) -> Store:
    url = f"{site}/api/{kind}/{quote(name)}/revision/{quote(revision, safe='')}?blobs=true"
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        found = parsed_object(wire.retried(lambda: wire.ask("GET", url, headers, min(LIMITS.answer_bytes, most))).body)
    except Failed as failed:
        if failed.status in (401, 403, 404) and not failed.code:
            failed.kind = "gated" if failed.status == 403 else "repository"
        kinds = {"GatedRepo": "gated", "RevisionNotFound": "revision", "RepoNotFound": "repository"}
        failed.kind = kinds.get(failed.code, failed.kind)
        raise
    files = (found or {}).get("siblings")
    files = files if isinstance(files, list) and all(isinstance(file, dict) for file in files) else [{}]
    sizes = {file.get("rfilename"): file.get("size") or 0 for file in files}
    sound = all(isinstance(path, str) and isinstance(size, int) and size >= 0 for path, size in sizes.items())
    commit = (found or {}).get("sha")
    if not sound or not isinstance(commit, str) or not regex(r"[0-9A-Za-z]{4,128}").fullmatch(commit):
        raise Failed("answer")
    folder = name if kind == "models" else f"{kind}/{name}"
    return _Repository(f"{site}/{quote(folder)}/resolve/{commit}", headers, commit, sizes)


class _Repository(Web):
    """A repository at one commit. The hub redirects every request to another host, which never sees the token."""

    def __init__(self, base: str, headers: Mapping[str, str], commit: str, sizes: Mapping[str, int]) -> None:
        super().__init__(lambda key: f"{base}/{quote(key)}", headers)
        self._commit, self._sizes = commit, sizes

    def facts(self, key: str, size: int, reply: wire.Reply | None = None) -> Facts:
        # Servers behind the hub have ETags of their own; at one commit, a name always means the same bytes.
        return Facts(key, size, f'W/"{self._commit}"')

    def head(self, key: str) -> Facts:
        if key not in self._sizes:
            raise Failed("", 404)
        return self.facts(key, self._sizes[key])

    def list(self, prefix: str, spend: Spend | None = None) -> Sequence[Facts]:
        start = f"{prefix}/" if prefix else ""
        if len(self._sizes) > LIMITS.remote_files:
            raise Failed("many")
        return [self.head(key) for key in self._sizes if key.startswith(start)]
