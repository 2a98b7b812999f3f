"""Accounts of S3: credentials, region and endpoint where boto3 looks for them, and the signatures of requests."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, cast
from urllib.parse import urlsplit

from ..base.records import NamedTuple
from .store import Failed, check_server

#: Variables with the endpoint: the first one counts, unless the setting turns all endpoints off.
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
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
        """Return the headers of a request with its signature; raises Failed."""
        if self.credentials is None:
            return dict(headers)
        keys = self.credentials if isinstance(self.credentials, Keys) else _frozen(self.credentials)
        return signed(method, url, headers, body, keys, self.region)


def signed(
    method: str, url: str, headers: Mapping[str, str], body: bytes | bytearray, keys: Keys, region: str
) -> dict[str, str]:
    """Return the headers of a request with a signature of version 4, whose query string is in order and quoted.

    See https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html.
    """
    from hashlib import sha256  # imported late: loads OpenSSL
    from hmac import digest

    parts, when = urlsplit(url), time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    content = "UNSIGNED-PAYLOAD" if parts.scheme == "https" else sha256(body).hexdigest()  # TLS protects the body
    headers = {**headers, "x-amz-date": when, "x-amz-content-sha256": content}
    headers |= {"x-amz-security-token": keys.token} if keys.token else {}
    included = {name: text for name, text in headers.items() if name.startswith("x-amz-")}
    included["host"] = parts.netloc.rpartition("@")[2]
    names = ";".join(sorted(included))
    lines = [method, parts.path, parts.query, *(f"{name}:{included[name]}" for name in sorted(included))]
    request = "\n".join([*lines, "", names, content])
    scope = [when[:8], region, "s3", "aws4_request"]
    secret = f"AWS4{keys.secret}".encode()
    for word in scope:
        secret = digest(secret, word.encode(), "sha256")
    text = "\n".join(["AWS4-HMAC-SHA256", when, "/".join(scope), sha256(request.encode()).hexdigest()])
    signature = digest(secret, text.encode(), "sha256").hex()
    place = f"{keys.access}/{'/'.join(scope)}"
    headers["authorization"] = f"AWS4-HMAC-SHA256 Credential={place},SignedHeaders={names},Signature={signature}"
    return headers


def variables() -> tuple[tuple[str, str], ...]:
    """Return the variables that an account depends on."""
    return tuple(sorted(item for item in os.environ.items() if item[0].startswith(("AWS_", "HOME"))))


@lru_cache(maxsize=8)
def account(given: str, anonymous: bool, profile: str, environment: tuple[tuple[str, str], ...]) -> Account:
    """Return the account at an endpoint, "" for the configured one; raises Failed, for example without credentials."""
    found = dict(environment)
    region, credentials = "", cast(Any, None)
    key, secret = found.get("AWS_ACCESS_KEY_ID", ""), found.get("AWS_SECRET_ACCESS_KEY", "")
    if key and not profile and not anonymous:
        if not secret:
            raise Failed("keys")
        credentials = Keys(key, secret, found.get("AWS_SESSION_TOKEN", ""))
    elif not anonymous:
        region, credentials = _session(profile)
    endpoint = given or _configured(profile, found)
    check_server(endpoint)
    near = (found.get("AWS_REGION"), region, found.get("AWS_DEFAULT_REGION"), "us-east-1")
    return Account(endpoint, next(filter(None, near)), credentials)


def _configured(profile: str, variables: Mapping[str, str]) -> str:
    """Return the endpoint that boto3 would use, "" for Amazon's; raises Failed.

    Variables go first. Only botocore reads the files; it is not imported for files that have no endpoint.
    """
    given = next(filter(None, map(variables.get, _ENDPOINTS)), "")
    text = ""
    for name, path in _FILES:
        path = os.path.expanduser(variables.get(name, path))
        with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            text += file.read()
    ignored = variables.get(f"AWS_{_IGNORED.upper()}", "").lower() == "true"
    if ignored or (_IGNORED if given else "endpoint_url") not in text:
        return "" if ignored else given
    try:
        from botocore import exceptions
        from botocore.session import Session
    except ImportError:
        raise Failed("botocore") from None
    found = Session(profile=profile or None)
    try:
        if found.get_config_variable(_IGNORED):
            return ""
        own, services = found.get_scoped_config(), found.full_config.get("services", {})
    except exceptions.ProfileNotFound:
        raise Failed("profile") from None
    except exceptions.BotoCoreError:
        raise Failed("config") from None
    service = services.get(own["services"]) if "services" in own else {}
    if service is None:
        raise Failed("config")
    s3 = service.get("s3", {})
    return str(given or (isinstance(s3, dict) and s3.get("endpoint_url")) or own.get("endpoint_url") or "")


def _session(profile: str) -> tuple[str, Any]:
    """Return the region and the credentials of a profile or of the machine, as boto3 finds them; raises Failed."""
    try:
        from botocore.session import Session
    except ImportError:
        raise Failed("botocore") from None
    found = Session(profile=profile or None)
    credentials = _botocore(found.get_credentials)
    if credentials is None:
        raise Failed("none")
    _frozen(credentials)  # an expired sign-in fails here already, with an error that says so
    return _botocore(lambda: found.get_config_variable("region")) or "", credentials


def _frozen(credentials: Any) -> Keys:
    """Return the keys of credentials that botocore renews; raises Failed."""
    keys = _botocore(credentials.get_frozen_credentials)
    return Keys(keys.access_key, keys.secret_key, keys.token or "")


def _botocore(do: Any) -> Any:
    """Return the result of a call of botocore; raises Failed."""
    from json import JSONDecodeError

    from botocore import exceptions

    try:
        return do()
    except exceptions.ProfileNotFound:
        kind = "profile"
    except (exceptions.SSOError, exceptions.TokenRetrievalError):
        kind = "expired"
    except exceptions.ClientError as error:  # the role of the profile was refused
        code = str(error.response.get("Error", {}).get("Code", ""))
        kind = "expired" if code.startswith("Expired") else "gives"
    except (exceptions.BotoCoreError, OSError, JSONDecodeError):  # also from the program in credential_process
        kind = "gives"
    raise Failed(kind)  # not inside ``except``: no traceback shows the error of botocore
