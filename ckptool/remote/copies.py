"""Parts of an upload to S3 that the server copies: botocore signs the request, which has headers of Amazon's."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

import botocore.session
from botocore import UNSIGNED, exceptions
from botocore.config import Config

from ..base.limits import LIMITS
from .store import Account, Failed, Origin, Range
from .wire import retried

#: Seconds to wait for the copy of a part of up to 5 GiB.
_COPY_SECONDS: Final = 600
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
    """What copies parts to objects in one bucket."""

    def __init__(self, bucket: str, account: Account) -> None:
        self.bucket = bucket
        self.account = account

    @cached_property
    def _client(self) -> Any:
        session = botocore.session.Session(profile=self.account.profile or None)
        endpoint, _, anonymous, environment = self.account
        variables = dict(environment)
        region = variables.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
        config = Config(
            connect_timeout=LIMITS.connect_seconds,
            read_timeout=_COPY_SECONDS,
            retries={"mode": "standard", "total_max_attempts": 1},
            max_pool_connections=LIMITS.requests,
            signature_version=UNSIGNED if anonymous else None,
            request_checksum_calculation="when_required",  # other servers do not know the new checksums
            response_checksum_validation="when_required",
            ignore_configured_endpoint_urls=True,  # the store found the endpoint
            s3={"addressing_style": "path"} if endpoint else {},
        )
        authority = variables.get("AWS_CA_BUNDLE", variables.get("SSL_CERT_FILE"))
        return session.create_client("s3", region, endpoint_url=endpoint or None, verify=authority, config=config)

    def copy(self, key: str, upload: str, number: int, origin: Origin, span: Range) -> str:
        more: dict[str, Any] = {"CopySource": {"Bucket": origin.copier.bucket, "Key": origin.key}}
        more["CopySourceRange"] = f"bytes={span[0]}-{span[0] + span[1] - 1}"
        if not origin.etag.startswith("W/"):
            more["CopySourceIfMatch"] = origin.etag
        return retried(lambda: self._ask(Key=key, UploadId=upload, PartNumber=number, **more))

    def _ask(self, **parameters: Any) -> str:
        """Return the ETag of a copied part; raises Failed."""
        try:
            found = self._client.upload_part_copy(Bucket=self.bucket, **parameters)
            return str(found["CopyPartResult"]["ETag"])
        except exceptions.ClientError as error:
            facts = error.response.get("ResponseMetadata", {})
            failed = Failed("", facts.get("HTTPStatusCode", 0), str(error.response.get("Error", {}).get("Code", "")))
        except exceptions.BotoCoreError as error:
            failed = Failed(next((kind for known, kind in _KINDS if isinstance(error, known)), ""))
        except KeyError:
            failed = Failed("answer")
        raise failed  # not inside ``except``: no traceback shows the error of botocore
