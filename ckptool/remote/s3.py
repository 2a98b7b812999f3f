"""Buckets of S3, whose requests follow https://docs.aws.amazon.com/AmazonS3/latest/API/ and are sent by ``wire``.

Credentials, region and endpoint are found where boto3 looks for them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from io import BytesIO
from typing import Any, Final, cast
from urllib.parse import quote, urlsplit
from xml.sax.saxutils import escape, unescape

from ..base.lazy import regex
from ..base.limits import LIMITS
from ..base.records import NamedTuple
from . import wire
from .store import Facts, Failed, Range, Settings, Spend, Store, at_once, check_bucket, check_server
from .web import Web, etag_of

#: Seconds to wait for the answer that makes an upload visible, or that copies a part of up to 5 GiB.
_SLOW: Final = 600.0
_IGNORED: Final = "ignore_configured_endpoint_urls"
#: Files with profiles, each with the variable that names another file.
_FILES: Final = (("AWS_CONFIG_FILE", "~/.aws/config"), ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"))


class Keys(NamedTuple):
    """An access key, its secret, and the token of a temporary one, or ""."""

    access: str
    secret: str
    token: str


class Account(NamedTuple):
    """How S3 is reached: its endpoint, "" for Amazon's, the region, and the credentials.

    The credentials are keys, an object of botocore that renews them, or None for requests without a signature.
    """

    endpoint: str
    region: str
    credentials: Any

    def signed(self, method: str, url: str, headers: Mapping[str, str], body: bytes | bytearray) -> dict[str, str]:
        """Return the headers of a request with its signature of version 4; raises Failed.

        The query string must be in order and quoted. See
        https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html.
        """
        if self.credentials is None:
            return dict(headers)
        from hashlib import sha256  # imported late: loads OpenSSL
        from hmac import digest

        keys = self.credentials if isinstance(self.credentials, Keys) else _frozen(self.credentials)
        parts, when = urlsplit(url), time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        content = "UNSIGNED-PAYLOAD" if parts.scheme == "https" else sha256(body).hexdigest()  # TLS protects the body
        headers = {**headers, "x-amz-date": when, "x-amz-content-sha256": content}
        headers |= {"x-amz-security-token": keys.token} if keys.token else {}
        included = {name: text for name, text in headers.items() if name.startswith("x-amz-")}
        included["host"] = parts.netloc.rpartition("@")[2]
        names = ";".join(sorted(included))
        lines = [method, parts.path, parts.query, *(f"{name}:{included[name]}" for name in sorted(included))]
        request = "\n".join([*lines, "", names, content])
        scope = [when[:8], self.region, "s3", "aws4_request"]
        secret = f"AWS4{keys.secret}".encode()
        for word in scope:
            secret = digest(secret, word.encode(), "sha256")
        text = "\n".join(["AWS4-HMAC-SHA256", when, "/".join(scope), sha256(request.encode()).hexdigest()])
        signature = digest(secret, text.encode(), "sha256").hex()
        place = f"{keys.access}/{'/'.join(scope)}"
        headers["authorization"] = f"AWS4-HMAC-SHA256 Credential={place},SignedHeaders={names},Signature={signature}"
        return headers


@lru_cache(maxsize=8)
def _account(given: str, anonymous: bool, profile: str, environment: tuple[tuple[str, str], ...]) -> Account:
    """Return the account at an endpoint, "" for the configured one; raises Failed, for example without credentials."""
    found = dict(environment)
    region, credentials = "", cast(Any, None)
    key, secret = found.get("AWS_ACCESS_KEY_ID", ""), found.get("AWS_SECRET_ACCESS_KEY", "")
    if key and not profile and not anonymous:
        if not secret:
            raise Failed("keys")
        credentials = Keys(key, secret, found.get("AWS_SESSION_TOKEN", ""))
    elif not anonymous:
        session = _botocore(lambda session: session(profile=profile or None))
        credentials, region = _botocore(lambda _: (session.get_credentials(), session.get_config_variable("region")))
        if credentials is None:
            raise Failed("none")
        _frozen(credentials)  # an expired sign-in fails here already, with an error that says so
    endpoint = given or _configured(profile, found)
    check_server(endpoint)
    near = (found.get("AWS_REGION"), region, found.get("AWS_DEFAULT_REGION"), "us-east-1")
    return Account(endpoint, next(filter(None, near)), credentials)


def _configured(profile: str, variables: Mapping[str, str]) -> str:
    """Return the endpoint that boto3 would use, "" for Amazon's; raises Failed.

    Only botocore reads the files; it is not imported for files that have no endpoint.
    """
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    given = next(filter(None, map(variables.get, names)), "")
    text = ""
    for name, path in _FILES:
        path = os.path.expanduser(variables.get(name, path))
        with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            text += file.read()
    if variables.get(f"AWS_{_IGNORED.upper()}", "").lower() == "true":
        return ""
    if (_IGNORED if given else "endpoint_url") not in text:
        return given
    keys = {"aws_access_key_id": "unused", "aws_secret_access_key": "unused"}
    found = _botocore(lambda session: session(profile=profile or None).create_client("s3", "us-east-1", **keys))
    return "" if found.meta.endpoint_url == "https://s3.amazonaws.com" else str(found.meta.endpoint_url)


def _frozen(credentials: Any) -> Keys:
    """Return the keys of credentials that botocore renews; raises Failed."""
    keys = _botocore(lambda _: credentials.get_frozen_credentials())
    return Keys(keys.access_key, keys.secret_key, keys.token or "")


def _botocore(do: Callable[[Any], Any]) -> Any:
    """Return what ``do`` returns for the class of botocore's sessions; raises Failed."""
    from json import JSONDecodeError

    try:
        from botocore import exceptions
        from botocore.session import Session
    except ImportError:
        raise Failed("botocore") from None
    try:
        return do(Session)
    except exceptions.ProfileNotFound:
        kind = "profile"
    except (exceptions.InvalidConfigError, exceptions.ConfigParseError):
        kind = "config"
    except (exceptions.SSOError, exceptions.TokenRetrievalError):
        kind = "expired"
    except exceptions.ClientError as error:  # the role of the profile was refused
        code = str(error.response.get("Error", {}).get("Code", ""))
        kind = "expired" if code.startswith("Expired") else "gives"
    except (exceptions.BotoCoreError, OSError, JSONDecodeError):  # also from the program in credential_process
        kind = "gives"
    raise Failed(kind)  # not inside ``except``: no traceback shows the error of botocore


def open_store(address: str, settings: Settings) -> tuple[Store, str]:
    """Return the bucket of an address, and the key of its object; raises Failed, for example without credentials."""
    parts = check_bucket(address)
    environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith(("AWS_", "HOME"))))
    account = _account(settings.endpoint_url, settings.anonymous, settings.profile, environment)
    return _bucket(parts.host, account), parts.path


class S3(Web):
    """A bucket. It takes uploads in parts of 5 MiB to 5 GiB; the last part may be smaller.

    Its server copies parts from all buckets of the same account.
    """

    def __init__(self, bucket: str, account: Account) -> None:
        self.name, self.account, self._region = bucket, account, account.region
        self.has_tail = True

    def request(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] = {},
        headers: Mapping[str, str] = {},
        body: bytes | bytearray = b"",
        most: int = 1 << 20,
        **options: Any,
    ) -> wire.Reply:
        """Send a request once, and again if the answer tells that the bucket is in another region; raises Failed."""
        while True:
            region = self._region
            account = self.account._replace(region=region)
            server = account.endpoint.rstrip("/") or f"https://s3.{region}.amazonaws.com"
            text = "&".join(f"{name}={quote(query[name], safe='')}" for name in sorted(query))
            url = f"{server}/{self.name}{'/' if key else ''}{quote(key)}{'?' if text else ''}{text}"
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
                if not regex(r"[0-9]{1,18}").fullmatch(row.get("Size", "")) or "Key" not in row:
                    raise Failed("answer")
                etag = etag_of(row.get("ETag", ""), row.get("LastModified", ""))
                found.append(Facts(row["Key"].removesuffix("/"), int(row["Size"]), etag))
            if len(found) > LIMITS.remote_files:
                raise Failed("many")
            after = _field(reply.body, "NextContinuationToken", "")
            if not after or _field(reply.body, "IsTruncated", "") != "true":
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
            put(_condition(former))
        except Failed as failed:
            if failed.status != 412 or not former or self.head(key).etag != former:
                raise
            put(_condition(former.strip('"')))  # it is the same: Ceph 16 compares with the ETag without its quotes

    # -- uploads in parts -----------------------------------------------------------------------------------------

    def copies_from(self, other: Store) -> bool:
        """Return whether parts can be copied from another store: it is a bucket of the same account."""
        return isinstance(other, S3) and self.account == other.account

    def begin(self, key: str) -> str:
        """Begin an upload and return its id. Unfinished ones of the same key that are older than a day are removed."""
        known = self._unfinished(key)
        for upload, begun in known.items():
            if "" < begun < time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - 24 * 3600)):
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

    def _unfinished(self, key: str) -> Mapping[str, str]:
        """Return when each unfinished upload of a key began, as ISO 8601 in UTC, by its id; {} if unknown."""
        query = {"prefix": key, "uploads": ""}
        try:
            reply = wire.retried(lambda: self.request("GET", "", query, most=LIMITS.answer_bytes))
        except Failed as failed:
            if failed.status not in (403, 404, 405, 501):
                raise
            return {}  # no permission to list, or not supported
        rows = (row for row in _rows(reply.body, "Upload") if row.get("Key") == key)
        return {row["UploadId"]: row.get("Initiated", "") for row in rows if "UploadId" in row}

    def part(self, key: str, upload: str, number: int, data: bytes | bytearray) -> str:
        """Send a part and return its ETag. The first part has the number 1."""
        query = {"partNumber": str(number), "uploadId": upload}
        reply = wire.retried(lambda: self.request("PUT", key, query, body=data))
        if "etag" not in reply.headers:
            raise Failed("answer")
        return reply.headers["etag"]

    def copy(self, key: str, upload: str, number: int, store: Store, other: Facts, span: Range) -> str:
        """Let the server copy a part from another object, unless that was replaced, and return the ETag of the part."""
        query = {"partNumber": str(number), "uploadId": upload}
        assert isinstance(store, S3)
        headers = {"x-amz-copy-source": f"/{quote(f'{store.name}/{other.key}')}"}
        headers["x-amz-copy-source-range"] = f"bytes={span[0]}-{span[0] + span[1] - 1}"
        if not other.etag.startswith("W/"):
            headers["x-amz-copy-source-if-match"] = other.etag
        reply = wire.retried(lambda: self.request("PUT", key, query, headers, patience=_SLOW))
        return _field(reply.body, "ETag")

    def complete(self, key: str, upload: str, etags: Sequence[str], former: str) -> None:
        """Make the object visible; ``former`` is as for ``put``."""
        parts = (
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
            for number, etag in enumerate(etags, 1)
        )
        names = "http://s3.amazonaws.com/doc/2006-03-01/"
        body = f'<CompleteMultipartUpload xmlns="{names}">{"".join(parts)}</CompleteMultipartUpload>'.encode()
        query, condition = {"uploadId": upload}, _condition(former)
        wire.retried(lambda: self.request("POST", key, query, condition, body, patience=_SLOW))

    def abort(self, key: str, upload: str) -> None:
        try:
            wire.retried(lambda: self.request("DELETE", key, {"uploadId": upload}))
        except Failed as failed:
            if failed.status != 404:  # it is gone
                raise


_bucket = lru_cache(maxsize=8)(S3)  # a bucket remembers its region


def _condition(former: str) -> dict[str, str]:
    """Return the header of a request that may replace the object with the ETag ``former``, or no object if it is ""."""
    return {"if-match": former} if former else {"if-none-match": "*"}


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
