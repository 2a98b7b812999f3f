"""Uploads to S3 in parts, through botocore. The server copies some parts; obstore has no request for that.

The requests are CreateMultipartUpload, UploadPart, UploadPartCopy, CompleteMultipartUpload, AbortMultipartUpload and
ListMultipartUploads of the S3 API, https://docs.aws.amazon.com/AmazonS3/latest/API/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import cached_property
from typing import Any, Final

import botocore.session
from botocore import UNSIGNED, exceptions
from botocore.config import Config

from ..base.limits import LIMITS
from .store import Account, Failed, Origin, Range

#: Seconds to wait for the slow requests: to copy a part of up to 5 GiB, and to complete an upload.
_COPY_SECONDS: Final = 600
_SLOW: Final = ("upload_part_copy", "complete_multipart_upload")
#: Unfinished uploads that are older were left by a killed run.
_OLD: Final = timedelta(days=1)
#: The kinds of failures by errors of botocore, in the order in which they are looked for.
_KINDS: Final = (
    (exceptions.SSLError, "tls"),
    (exceptions.ProxyConnectionError, "proxy"),
    ((exceptions.ConnectTimeoutError, exceptions.ReadTimeoutError), "timeout"),
    (exceptions.EndpointConnectionError, "route"),
    (exceptions.ProfileNotFound, "profile"),
    (exceptions.NoCredentialsError, "none"),
    (exceptions.PartialCredentialsError, "keys"),
    ((exceptions.SSOError, exceptions.TokenRetrievalError), "expired"),
    (exceptions.HTTPClientError, "reset"),
)


class S3Copier:
    """The uploads to one bucket."""

    def __init__(self, bucket: str, account: Account) -> None:
        self.bucket = bucket
        self.account = account

    @cached_property
    def _clients(self) -> tuple[Any, Any]:
        """The client of most requests, and the client of those whose answer may take minutes.

        They share a session, which reads the descriptions of S3 once: that takes 70 ms.
        """
        session = botocore.session.Session(profile=self.account.profile or None)
        return self._connected(session, LIMITS.read_seconds), self._connected(session, _COPY_SECONDS)

    def _connected(self, session: Any, seconds: float) -> Any:
        endpoint, _, anonymous, environment = self.account
        variables = dict(environment)
        region = variables.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
        config = Config(
            connect_timeout=LIMITS.connect_seconds,
            read_timeout=seconds,
            retries={"mode": "standard", "total_max_attempts": 1 + LIMITS.retries},
            max_pool_connections=LIMITS.requests,
            signature_version=UNSIGNED if anonymous else None,
            request_checksum_calculation="when_required",  # other servers do not know the new checksums
            response_checksum_validation="when_required",
            ignore_configured_endpoint_urls=True,  # the store found the endpoint
            s3={"addressing_style": "path"} if endpoint else {},
        )
        authority = variables.get("AWS_CA_BUNDLE", variables.get("SSL_CERT_FILE"))
        return session.create_client("s3", region, endpoint_url=endpoint or None, verify=authority, config=config)

    def begin(self, key: str) -> str:
        known = self._unfinished(key)
        for upload, begun in known.items():
            if begun < datetime.now(timezone.utc) - _OLD:
                self.abort(key, upload)
        upload, retries = "", 0
        try:
            found = self._ask("create_multipart_upload", Key=key)
            retries = found["ResponseMetadata"].get("RetryAttempts", 0)
            upload = _field(found, "UploadId")
            return upload
        finally:
            if retries or not upload:  # the server may have begun an upload, and its answer was lost
                with suppress(Failed):
                    for lost in self._unfinished(key).keys() - known.keys() - {upload}:
                        self.abort(key, lost)

    def _unfinished(self, key: str) -> Mapping[str, datetime]:
        """Return when each unfinished upload of a key began, by its id; {} if unknown."""
        try:
            found = self._ask("list_multipart_uploads", Prefix=key)
        except Failed as failed:
            if failed.status not in (403, 405, 501):
                raise
            return {}  # no permission to list, or not supported
        return {one["UploadId"]: one["Initiated"] for one in found.get("Uploads", ()) if one["Key"] == key}

    def send(self, key: str, upload: str, number: int, data: bytes | bytearray) -> str:
        found = self._ask("upload_part", Key=key, UploadId=upload, PartNumber=number, Body=data)
        return _field(found, "ETag")

    def copy(self, key: str, upload: str, number: int, origin: Origin, span: Range) -> str:
        more: dict[str, Any] = {"CopySource": {"Bucket": origin.copier.bucket, "Key": origin.key}}
        more["CopySourceRange"] = f"bytes={span[0]}-{span[0] + span[1] - 1}"
        if not origin.etag.startswith("W/"):
            more["CopySourceIfMatch"] = origin.etag
        found = self._ask("upload_part_copy", Key=key, UploadId=upload, PartNumber=number, **more)
        return _field(found.get("CopyPartResult", {}), "ETag")

    def complete(self, key: str, upload: str, etags: Sequence[str], former: str) -> None:
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        condition = {"IfMatch": former} if former else {"IfNoneMatch": "*"}
        self._ask("complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload={"Parts": parts}, **condition)

    def abort(self, key: str, upload: str) -> None:
        with suppress(Failed):
            self._ask("abort_multipart_upload", Key=key, UploadId=upload)

    def _ask(self, name: str, **parameters: Any) -> Any:
        """Return the answer to a request; raises Failed."""
        try:
            return getattr(self._clients[name in _SLOW], name)(Bucket=self.bucket, **parameters)
        except exceptions.ClientError as error:
            facts = error.response.get("ResponseMetadata", {})
            code = str(error.response.get("Error", {}).get("Code", ""))
            failed = Failed("", facts.get("HTTPStatusCode", 0), code, once=facts.get("RetryAttempts") == 0)
        except exceptions.BotoCoreError as error:
            failed = Failed(next((kind for known, kind in _KINDS if isinstance(error, known)), ""))
        raise failed  # not inside ``except``: no traceback shows the error of botocore


def _field(answer: Mapping[str, Any], name: str) -> str:
    """Return a field of an answer; raises Failed without it."""
    if name not in answer:
        raise Failed("answer")
    return str(answer[name])
