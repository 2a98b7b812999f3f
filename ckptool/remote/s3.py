"""S3: obstore finds the credentials and signs addresses, and the requests are sent by ``wire``.

The requests follow the S3 API, https://docs.aws.amazon.com/AmazonS3/latest/API/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from io import BytesIO
from typing import Any, Final, Protocol
from urllib.parse import quote
from xml.sax.saxutils import escape, unescape

from ..base.lazy import regex
from ..base.limits import LIMITS
from . import wire
from .store import Account, Copier, Facts, Failed, Origin, Range, at_once, kind_of
from .web import Web, etag_of

#: Seconds to wait for the answer that makes an upload visible.
_SLOW: Final = 600.0
#: Unfinished uploads that are older were left by a killed run.
_OLD: Final = timedelta(days=1)
#: Bytes of an answer that neither lists objects nor brings the content of one.
_SMALL: Final = 1 << 20
_SIZE: Final = regex(r"[0-9]{1,18}")
_NAMES: Final = "http://s3.amazonaws.com/doc/2006-03-01/"


class Copying(Protocol):
    """What lets the server copy a part; see ``Copier.copy``."""

    def copy(self, key: str, upload: str, number: int, origin: Origin, span: Range) -> str: ...


class S3(Web):
    """A bucket at the address ``base``. ``make`` returns a store of obstore for it, with changed options, and ``sign``
    the address of a request that such a store signed.

    ``copier`` returns what copies on the server, or None; ``elsewhere`` the same bucket in the region where it is.
    """

    def __init__(
        self,
        bucket: str,
        make: Callable[..., Any],
        sign: Callable[[Callable[[], Any], str, str], str],
        base: str,
        account: Account,
        copier: Callable[[], Copying | None],
        elsewhere: Callable[[], S3] | None = None,
    ) -> None:
        self.bucket, self._sign = bucket, sign
        self._make, self._base, self.account, self._copier, self._elsewhere = make, base, account, copier, elsewhere
        self._store = make()
        self._there: S3 | None = None
        self.has_tail = True

    def _signed(self, method: str, key: str, query: str) -> str:
        """Return the signed address of a request; raises Failed without credentials."""
        path = f"{self._base}/{quote(key)}" if key else self._base
        if self.account.anonymous:
            return f"{path}?{query}" if query else path
        if not query:
            return self._sign(lambda: self._store, method, key)
        # obstore signs the path in the address of its endpoint, and adds a slash: to a parameter without a meaning.
        place = f"{path}?{query}&x-id="
        return self._sign(lambda: self._make(endpoint=place, virtual_hosted_style_request=True), method, "")

    def request(
        self,
        method: str,
        key: str,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        body: bytes | bytearray = b"",
        most: int = _SMALL,
        **options: Any,
    ) -> wire.Reply:
        """Send a request once, to the region where the bucket is; raises Failed."""
        if self._there is not None:
            return self._there.request(method, key, query, headers, body, most, **options)
        url = self._signed(method, key, query)
        try:
            reply = wire.ask(method, url, headers or {}, most, body, follow=False, **options)
        except Failed as failed:
            # An answer to HEAD has no code.
            elsewhere = kind_of(failed) == "region" or (failed.status, failed.code) == (400, "")
            if not (elsewhere and self._elsewhere):
                raise
            self._there = self._elsewhere()
            return self._there.request(method, key, query, headers, body, most, **options)
        if method == "POST" and b"<Error>" in reply.body[:1000]:
            raise Failed("", 500)
        return reply

    def send(self, method: str, key: str, headers: Mapping[str, str], most: int) -> wire.Reply:
        return self.request(method, key, "", headers, b"", most)

    def head(self, key: str) -> Facts:
        return self._head(key)

    def list(self, prefix: str, spend: Callable[[int], None] | None = None) -> Sequence[Facts]:
        return at_once([prefix], lambda one: self._list(one.strip("/"), spend), LIMITS.listing_seconds)[0]

    def _list(self, prefix: str, spend: Callable[[int], None] | None) -> Sequence[Facts]:
        found: list[Facts] = []
        token, left = "", LIMITS.answer_bytes
        while True:
            query = f"list-type=2&prefix={_quoted(f'{prefix}/' if prefix else '')}"
            query += f"&continuation-token={_quoted(token)}" if token else ""
            reply = wire.retried(partial(self.request, "GET", "", query, most=left, spend=spend))
            left -= len(reply.body)
            if b"ListBucketResult" not in reply.body[:1000]:
                raise Failed("answer")
            for row in _rows(reply.body, "Contents"):
                if not _SIZE.fullmatch(row.get("Size", "")) or "Key" not in row:
                    raise Failed("answer")
                etag = etag_of(row.get("ETag", ""), row.get("LastModified", ""))
                found.append(Facts(row["Key"].removesuffix("/"), int(row["Size"]), etag))
            if len(found) > LIMITS.remote_files:
                raise Failed("many")
            after = _field(reply.body, "NextContinuationToken", "")
            after = after if _field(reply.body, "IsTruncated", "") == "true" else ""
            if not after:
                return found
            if after == token:
                raise Failed("endless")
            token = after

    def put(self, key: str, chunks: Iterable[bytes], size: int, former: str) -> None:
        """Write a small object in one request."""
        data = b"".join(chunks)

        def put(condition: Mapping[str, str]) -> None:
            wire.retried(lambda: self.request("PUT", key, "", condition, data))

        try:
            put({"if-match": former} if former else {"if-none-match": "*"})
        except Failed as failed:
            if failed.status != 412 or not former or self.head(key).etag != former:
                raise
            put({"if-match": former.strip('"')})  # it is the same: Ceph 16 compares with the ETag without its quotes

    def copies(self) -> Copier | None:
        return Uploads(self, self._copier())


class Uploads:
    """The uploads to one bucket, in parts; see ``Copier``. ``copier`` copies parts on the server, if any."""

    def __init__(self, store: S3, copier: Copying | None) -> None:
        self._store, self._copier = store, copier
        self.bucket, self.account, self.can_copy = store.bucket, store.account, copier is not None

    def begin(self, key: str) -> str:
        known = self._unfinished(key)
        for upload, begun in known.items():
            if begun < datetime.now(timezone.utc) - _OLD:
                with suppress(Failed):
                    self.abort(key, upload)
        upload, sent = "", 0

        def create() -> str:
            nonlocal sent
            sent += 1
            return _field(self._store.request("POST", key, "uploads=").body, "UploadId")

        try:
            upload = wire.retried(create)
            return upload
        finally:
            if sent > 1 or not upload:  # the server may have begun an upload, and its answer was lost
                with suppress(Failed):
                    for lost in self._unfinished(key).keys() - known.keys() - {upload}:
                        self.abort(key, lost)

    def _unfinished(self, key: str) -> Mapping[str, datetime]:
        """Return when each unfinished upload of a key began, by its id; {} if unknown."""
        try:
            query = f"prefix={_quoted(key)}&uploads="
            reply = wire.retried(lambda: self._store.request("GET", "", query, most=LIMITS.answer_bytes))
        except Failed as failed:
            if failed.status not in (403, 404, 405, 501):
                raise
            return {}  # no permission to list, or not supported
        rows = (row for row in _rows(reply.body, "Upload") if row.get("Key") == key)
        return {row["UploadId"]: _time(row.get("Initiated", "")) for row in rows if "UploadId" in row}

    def send(self, key: str, upload: str, number: int, data: bytes | bytearray) -> str:
        query = f"partNumber={number}&uploadId={_quoted(upload)}"
        reply = wire.retried(lambda: self._store.request("PUT", key, query, body=data))
        if "etag" not in reply.headers:
            raise Failed("answer")
        return reply.headers["etag"]

    def copy(self, key: str, upload: str, number: int, origin: Origin, span: Range) -> str:
        assert self._copier is not None, "can_copy says so"
        return self._copier.copy(key, upload, number, origin, span)

    def complete(self, key: str, upload: str, etags: Sequence[str], former: str) -> None:
        parts = (
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
            for number, etag in enumerate(etags, 1)
        )
        body = f'<CompleteMultipartUpload xmlns="{_NAMES}">{"".join(parts)}</CompleteMultipartUpload>'.encode()
        condition = {"if-match": former} if former else {"if-none-match": "*"}
        query = f"uploadId={_quoted(upload)}"
        wire.retried(lambda: self._store.request("POST", key, query, condition, body, patience=_SLOW))

    def abort(self, key: str, upload: str) -> None:
        query = f"uploadId={_quoted(upload)}"
        try:
            wire.retried(lambda: self._store.request("DELETE", key, query))
        except Failed as failed:
            if failed.status != 404:  # it is gone
                raise


def _quoted(text: str) -> str:
    return quote(text, safe="")


def _rows(data: bytes, name: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each element of this name in an answer; raises Failed for other answers."""
    from xml.etree import ElementTree  # only for lists

    try:
        for _, element in ElementTree.iterparse(BytesIO(data)):
            if element.tag.rpartition("}")[2] == name:
                yield {child.tag.rpartition("}")[2]: child.text or "" for child in element}
                element.clear()
    except ElementTree.ParseError:
        raise Failed("answer") from None


def _field(data: bytes, name: str, default: str | None = None) -> str:
    """Return the first field of this name in an answer; without one, ``default``, or raises Failed."""
    found = regex(rf"<(?:\w+:)?{name}>([^<]*)<").search(data.decode("utf-8", "replace"))
    if not found and default is None:
        raise Failed("answer")
    return unescape(found[1], {"&quot;": '"', "&apos;": "'"}) if found else str(default)


def _time(text: str) -> datetime:
    """Return a time; now, if it cannot be read."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return datetime.now(timezone.utc)
