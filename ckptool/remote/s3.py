"""Buckets of S3, whose requests follow https://docs.aws.amazon.com/AmazonS3/latest/API/ and are sent by ``wire``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import lru_cache, partial
from io import BytesIO
from typing import Any, Final
from urllib.parse import quote
from xml.sax.saxutils import escape, unescape

from ..base.lazy import regex
from ..base.limits import LIMITS
from . import aws, wire
from .store import Copier, Facts, Failed, Origin, Range, Settings, Spend, Store, at_once, check_bucket
from .web import Web, etag_of

#: Seconds to wait for the answer that makes an upload visible, or that copies a part of up to 5 GiB.
_SLOW: Final = 600.0
#: Unfinished uploads that are older were left by a killed run.
_OLD: Final = timedelta(days=1)
#: Bytes of an answer that neither lists objects nor brings the content of one.
_SMALL: Final = 1 << 20
_SIZE: Final = regex(r"[0-9]{1,18}")
_NAMES: Final = "http://s3.amazonaws.com/doc/2006-03-01/"


def open_store(address: str, settings: Settings) -> tuple[Store, str]:
    """Return the bucket of an address, and the key of its object; raises Failed, for example without credentials."""
    parts = check_bucket(address)
    account = aws.account(settings.endpoint_url, settings.anonymous, settings.profile, aws.variables())
    return _bucket(parts.host, account), parts.path


@lru_cache(maxsize=8)  # a bucket remembers its region
def _bucket(name: str, account: aws.Account) -> Store:
    return S3(name, account)


class S3(Web):
    """A bucket. It is also the ``Copier`` of its objects, which copies from all buckets of the same account."""

    def __init__(self, bucket: str, account: aws.Account) -> None:
        self.bucket, self.account, self._region = bucket, account, account.region
        self.has_tail = True

    def request(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] = {},
        headers: Mapping[str, str] = {},
        body: bytes | bytearray = b"",
        most: int = _SMALL,
        **options: Any,
    ) -> wire.Reply:
        """Send a request once, and again if the answer tells that the bucket is in another region; raises Failed."""
        while True:
            region = self._region
            account = self.account._replace(region=region)
            server = account.endpoint.rstrip("/") or f"https://s3.{region}.amazonaws.com"
            text = "&".join(f"{name}={_quoted(query[name])}" for name in sorted(query))
            url = f"{server}/{self.bucket}{'/' if key else ''}{quote(key)}{'?' if text else ''}{text}"
            try:
                given = account.signed(method, url, headers, body)
                reply = wire.ask(method, url, given, most, body, follow=False, **options)
            except Failed as failed:
                if failed.region in ("", region) or region != self.account.region:
                    raise
                self._region = failed.region
                continue
            if "patience" in options and b"<Error>" in reply.body[:1000]:  # it failed after its answer had begun
                raise Failed("", 500)
            return reply

    def send(self, method: str, key: str, headers: Mapping[str, str], most: int) -> wire.Reply:
        return self.request(method, key, {}, headers, b"", most)

    def head(self, key: str) -> Facts:
        return self._head(key)

    def list(self, prefix: str, spend: Spend | None = None) -> Sequence[Facts]:
        return at_once([prefix], lambda one: self._list(one.strip("/"), spend), LIMITS.listing_seconds)[0]

    def _list(self, prefix: str, spend: Spend | None) -> Sequence[Facts]:
        found: list[Facts] = []
        query, left = {"list-type": "2", "prefix": f"{prefix}/" if prefix else ""}, LIMITS.answer_bytes
        while True:
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
            if after == query.get("continuation-token"):
                raise Failed("endless")
            query = {**query, "continuation-token": after}

    def put(self, key: str, chunks: Iterable[bytes], size: int, former: str) -> None:
        """Write a small object in one request."""
        data = b"".join(chunks)

        def put(condition: Mapping[str, str]) -> None:
            wire.retried(lambda: self.request("PUT", key, {}, condition, data))

        try:
            put({"if-match": former} if former else {"if-none-match": "*"})
        except Failed as failed:
            if failed.status != 412 or not former or self.head(key).etag != former:
                raise
            put({"if-match": former.strip('"')})  # it is the same: Ceph 16 compares with the ETag without its quotes

    # -- uploads in parts -----------------------------------------------------------------------------------------

    def copies(self) -> Copier | None:
        return self

    def copies_from(self, other: Copier) -> bool:
        return isinstance(other, S3) and self.account == other.account

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
            return _field(self.request("POST", key, {"uploads": ""}).body, "UploadId")

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
        query = {"prefix": key, "uploads": ""}
        try:
            reply = wire.retried(lambda: self.request("GET", "", query, most=LIMITS.answer_bytes))
        except Failed as failed:
            if failed.status not in (403, 404, 405, 501):
                raise
            return {}  # no permission to list, or not supported
        rows = (row for row in _rows(reply.body, "Upload") if row.get("Key") == key)
        return {row["UploadId"]: _time(row.get("Initiated", "")) for row in rows if "UploadId" in row}

    def part(self, key: str, upload: str, number: int, data: bytes | bytearray) -> str:
        query = {"partNumber": str(number), "uploadId": upload}
        reply = wire.retried(lambda: self.request("PUT", key, query, body=data))
        if "etag" not in reply.headers:
            raise Failed("answer")
        return reply.headers["etag"]

    def copy(self, key: str, upload: str, number: int, origin: Origin, span: Range) -> str:
        query = {"partNumber": str(number), "uploadId": upload}
        headers = {"x-amz-copy-source": f"/{quote(f'{origin.copier.bucket}/{origin.key}')}"}
        headers["x-amz-copy-source-range"] = f"bytes={span[0]}-{span[0] + span[1] - 1}"
        if not origin.etag.startswith("W/"):
            headers["x-amz-copy-source-if-match"] = origin.etag
        reply = wire.retried(lambda: self.request("PUT", key, query, headers, patience=_SLOW))
        return _field(reply.body, "ETag")

    def complete(self, key: str, upload: str, etags: Sequence[str], former: str) -> None:
        parts = (
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
            for number, etag in enumerate(etags, 1)
        )
        body = f'<CompleteMultipartUpload xmlns="{_NAMES}">{"".join(parts)}</CompleteMultipartUpload>'.encode()
        condition = {"if-match": former} if former else {"if-none-match": "*"}
        wire.retried(lambda: self.request("POST", key, {"uploadId": upload}, condition, body, patience=_SLOW))

    def abort(self, key: str, upload: str) -> None:
        try:
            wire.retried(lambda: self.request("DELETE", key, {"uploadId": upload}))
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
