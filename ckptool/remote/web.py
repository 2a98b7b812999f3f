"""Files that are read with plain requests, such as a web server's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..base.addresses import parse
from ..base.lazy import regex
from . import wire
from .store import Answer, Facts, Failed, Settings, Spend, Store, check_server

_RANGE: Final = regex(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")


def open_store(address: str, settings: Settings) -> tuple[Store, str]:
    """Return the store whose only file is the one at an address; raises Failed."""
    parts = parse(address)
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

    def get(self, key: str, begin: int, size: int, etag: str = "") -> Answer:
        return self._answer(key, f"bytes={begin}-{begin + size - 1}", begin, size, etag)

    def tail(self, key: str, size: int) -> Answer:
        return self._answer(key, f"bytes=-{size}", None, size, "")

    def send(self, method: str, key: str, headers: Mapping[str, str], most: int) -> wire.Reply:
        """Send a request that reads, once; raises Failed."""
        return wire.ask(method, self._url(key), {**self._headers, **headers}, most)

    def list(self, prefix: str, spend: Spend | None = None) -> Sequence[Facts]:
        raise Failed("listing")

    def _head(self, key: str) -> Facts:
        reply = wire.retried(lambda: self.send("HEAD", key, {}, 0))
        length = reply.headers.get("content-length", "")
        if not length.isdecimal():
            raise Failed("answer")
        return self.facts(key, int(length), reply)

    def _answer(self, key: str, span: str, begin: int | None, size: int, etag: str) -> Answer:
        headers = {"range": span}
        if etag and not etag.startswith("W/"):  # a weak ETag matches no condition
            headers["if-match"] = etag

        def ask() -> Answer:
            reply = self.send("GET", key, headers, size)
            found = _RANGE.fullmatch(reply.headers.get("content-range", ""))
            if not found:
                raise Failed("whole")
            first, last, total = map(int, found.groups())
            wanted = max(total - size, 0) if begin is None else begin
            if (first, last + 1) != (wanted, min(wanted + size, total)) or len(reply.body) != last + 1 - first:
                raise Failed("length")
            return Answer(reply.body, self.facts(key, total, reply))

        return wire.retried(ask)
