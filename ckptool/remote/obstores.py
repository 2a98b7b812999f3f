"""Google Cloud Storage and Azure through obstore, and the credentials and settings of S3 and of web servers.

obstore starts fast, but its errors are pages with the whole address, retries take minutes, and profiles of AWS are
unknown to it. This module sets limits, finds credentials where people have them, and turns errors into ``Failed``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, TypeVar

from ..base.addresses import parse
from ..base.lazy import regex
from ..base.limits import LIMITS
from .store import ARRIVED, Account, Answer, Facts, Failed, Settings, Spend, Store, at_once
from .wire import ask, certificates

T = TypeVar("T")
_PROCESS: Final = os.getpid()
#: Bytes of one part of an upload, at least, and the most parts that S3 and Google Cloud Storage take.
PART: Final = 8 << 20
MOST_PARTS: Final = 10_000
_PARTS_AT_ONCE: Final = 3
#: Bytes of an answer that are counted at a time.
_CHUNK: Final = 1 << 18
#: Seconds to find out whether the machine has credentials of its own.
_METADATA_SECONDS: Final = 1
#: Variables with the endpoint of S3: the first one counts, unless the setting turns all endpoints off.
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_IGNORED: Final = "ignore_configured_endpoint_urls"
#: Where a machine in a cloud asks for its credentials, by scheme.
_METADATA: Final = {"s3": "http://169.254.169.254", "gs": "http://metadata.google.internal"}
_METADATA_URL: Final = regex(r"http://(169\.254\.|metadata\.google\.internal|\[fd00:ec2)")
#: Files with credentials, and variables from which obstore takes them, by scheme.
_FILES: Final = {
    "s3": (("AWS_CONFIG_FILE", "~/.aws/config"), ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")),
    "gs": (("GOOGLE_APPLICATION_CREDENTIALS", "~/.config/gcloud/application_default_credentials.json"),),
}
_VARIABLES: Final = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_CONTAINER_", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    "gs": ("GOOGLE_",),
}
_SERVER: Final = regex(r"https?://(?:[^/?#\s]*@)?(?:[\w.~-]+|\[[\da-fA-F:.]+\])(?::(\d{1,5}))?(?:[/?#]\S*)?")
_BUCKET: Final = regex(r"[\w.@$~-]+")
_STATUS: Final = regex(r"\bstatus: (\d{3}),")
_CODE: Final = regex(r"<Code>(\w{1,64})</Code>")
#: Parts of an error's text that quote the server or the address; removed before ``_WORDS`` are looked for.
_FOREIGN: Final = regex(r'uri: Some\(\s*\S+\s*\)|(path|error|message): "(\\.|[^"\\])*"')
#: The kinds of failures by words in the text of an error, in the order in which they are looked for.
_WORDS: Final = (
    ("region", regex("BareRedirect")),
    ("whole", regex("NotPartial|RangeNotSupported|ParseContentRange")),
    ("key", regex("InvalidPath|EmptySegment|Could not parse path|BadSegment|Expected string path")),
    ("keys", regex("Missing(AccessKeyId|SecretAccessKey)")),
    ("account", regex("MissingAccount|[Aa]ccount must be specified")),
    ("expired", regex("PyErr")),  # the profile of boto3 gives no credentials any more
    ("redirect", regex("kind: Redirect|BadScheme")),
    ("answer", regex("ContentRange|UnexpectedRange|MissingContentLength|InvalidListResponse")),
    ("name", regex("dns error")),
    ("proxy", regex("Tunnel|ConnectFailed")),
    ("timeout", regex("kind: Timeout|TimedOut")),
    ("tls", regex("[Cc]ertificate|InvalidMessage|InvalidContentType|[Tt]ls|HandshakeFailure|AlertReceived")),
    ("route", regex("Connect")),
    ("body", regex("kind: (Body|Decode|Interrupted)")),
    ("reset", regex("IncompleteMessage|kind: Request")),
)


def open_store(address: str, settings: Settings) -> tuple[Store, str]:
    """Return the store of an address, and the key of its object; raises Failed, for example without credentials."""
    parts = parse(address)
    if parts.scheme in ("http", "https"):
        check_server(f"{parts.scheme}://{parts.host}")
        from .web import Web
        from .wire import basic

        headers = {"authorization": basic(parts.user)} if parts.user else {}
        # Azure knows no suffix ranges. Its signatures are two of the parameters.
        azure = parts.host.endswith(".core.windows.net") or ("sig=" in parts.query and "sv=" in parts.query)
        url = str(parts._replace(user=""))
        return Web(lambda key: url, headers, has_tail=not azure), ""
    if parts.query:
        raise Failed("query")
    if not _BUCKET.fullmatch(parts.host):
        raise Failed("bucket")
    if parts.path.startswith("/"):
        raise Failed("key")  # obstore would drop the slash, and botocore would not
    names = ("AWS_", "GOOGLE_", "AZURE_", "SSL_", "HOME")
    environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith(names)))
    return asked(lambda: _bucket(parts.scheme, parts.host, settings, environment)), parts.path


def check_server(url: str) -> None:
    """Raise Failed unless a URL, or "", has the form that obstore takes: it panics at many others."""
    found = _SERVER.fullmatch(url)
    if url and (not found or int(found[1] or 0) > 65_535):
        raise Failed("server")


def _library() -> Any:
    """Return the stores of obstore; raises Failed without the extra ckptool[remote]."""
    try:
        from obstore import store
    except ImportError:
        raise Failed("obstore") from None
    return store


@lru_cache(maxsize=8)  # connections and credentials are shared by all files of a bucket
def _bucket(scheme: str, host: str, settings: Settings, environment: tuple[tuple[str, str], ...]) -> Store:
    variables = dict(environment)
    signed = not settings.anonymous
    more = _credentials(scheme, variables, settings.profile) if signed else {"skip_signature": True}
    endpoint = settings.endpoint_url or (_configured(settings.profile, variables) if scheme == "s3" else "")
    check_server(endpoint)
    if scheme == "s3":
        from .s3 import S3

        reached = Account(endpoint, settings.profile, settings.anonymous, environment)

        def in_region(**changed: Any) -> S3:
            options = more | changed
            near = [options.get("region"), variables.get("AWS_REGION"), variables.get("AWS_DEFAULT_REGION")]
            region = next(filter(None, near), "us-east-1")
            # obstore would read the variables with the endpoint, even if they are to be ignored.
            options["endpoint"] = endpoint or f"https://s3.{region}.amazonaws.com"

            def make(**given: Any) -> Any:
                return _library().S3Store(host, **options | given, **_client(endpoint))

            base = f"{options['endpoint'].rstrip('/')}/{host}"
            elsewhere = None if changed else lambda: in_region(region=_region(host, endpoint))
            return S3(host, make, _sign, base, reached, lambda: _copier(host, reached), elsewhere)

        return in_region()
    if scheme == "gs":
        more |= {"base_url": endpoint} if endpoint else {}
        return ObStore(_library().GCSStore(host, **more, **_client(endpoint)), by_etag=False)
    container, _, account = host.partition("@")
    more |= {"account_name": account.partition(".")[0]} if account else {}
    more |= {"endpoint": endpoint} if endpoint else {}
    return ObStore(_library().AzureStore(container, **more, **_client(endpoint)), has_tail=False)


def _region(bucket: str, endpoint: str) -> str:
    """Return the region of a bucket, which S3 tells everybody in a header that obstore hides; raises Failed."""
    url = f"{endpoint.rstrip('/') or 'https://s3.amazonaws.com'}/{bucket}"
    with suppress(Failed):
        if region := ask("HEAD", url, {}, 0, follow=False, whatever=True).headers.get("x-amz-bucket-region"):
            return region
    raise Failed("region")


def _configured(profile: str, variables: dict[str, str]) -> str:
    """Return the endpoint of S3 that boto3 would use, "" for Amazon's; raises Failed.

    Variables go first. Only botocore reads the files; it is not imported for files that have no endpoint.
    """
    given = next(filter(None, map(variables.get, _ENDPOINTS)), "")
    text = ""
    for path in _paths("s3", variables):
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


def _paths(scheme: str, variables: dict[str, str]) -> list[str]:
    """Return the paths of the files with credentials."""
    return [os.path.expanduser(variables.get(name, path)) for name, path in _FILES.get(scheme, ())]


@lru_cache(maxsize=8)
def _copier(bucket: str, account: Account) -> Any:
    """Return what copies within S3, or None without the extra ckptool[s3]."""
    try:
        from .copies import S3Copier
    except ImportError:
        return None
    return S3Copier(bucket, account)


def _credentials(scheme: str, variables: dict[str, str], profile: str) -> dict[str, Any]:
    """Return the options of obstore with credentials; raises Failed if there are none.

    obstore asks variables, files of Google and the metadata of a machine, botocore the profiles of AWS.
    """
    found = any(map(os.path.exists, _paths(scheme, variables)))
    given = any(name.startswith(_VARIABLES.get(scheme, ("AZURE_",))) for name in variables)
    if scheme == "s3" and (profile or (not given and (found or "AWS_PROFILE" in variables))):
        return _session(profile, variables)
    if given or found:
        return {}
    metadata = variables.get("AWS_METADATA_ENDPOINT", _METADATA.get(scheme, _METADATA["s3"]))
    disabled = scheme == "s3" and variables.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    options: Any = {"allow_http": True, "timeout": timedelta(seconds=_METADATA_SECONDS)}
    try:
        if not disabled:
            _library().HTTPStore(metadata, client_options=options, retry_config={"max_retries": 0}).head("")
    except Failed:
        raise
    except Exception as error:
        disabled = failed_of(error).status in (0, 407, 502, 503)  # no server answered, at most a proxy
    if disabled:
        raise Failed("none")
    return {}


def _client(endpoint: str) -> dict[str, Any]:
    """Return the limits of all requests to an endpoint, and the certificates that they trust."""
    options: dict[str, Any] = {
        "allow_http": endpoint.startswith("http:"),
        "connect_timeout": timedelta(seconds=LIMITS.connect_seconds),
        "read_timeout": timedelta(seconds=LIMITS.read_seconds),
        "timeout": timedelta(seconds=LIMITS.request_seconds),
    }
    for path in certificates()[:1]:
        with open(path, "rb") as file:
            options["root_certificate"] = file.read()
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5)}
    retries = {
        "max_retries": LIMITS.retries,
        "retry_timeout": timedelta(seconds=LIMITS.retry_seconds),
        "backoff": backoff,
    }
    return {"client_options": options, "retry_config": retries}


def _session(profile: str, variables: dict[str, str]) -> dict[str, Any]:
    """Return credentials and region of a profile, as boto3 finds them; raises Failed."""
    try:
        from json import JSONDecodeError

        from botocore import exceptions
        from botocore.session import Session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise Failed("botocore") from None
    found = Session(profile=profile or None)
    try:
        provider = Boto3CredentialProvider(found, ttl=timedelta(minutes=15))
        provider()  # an expired sign-in fails here already, with an error that says so
        region = found.get_config_variable("region")
    except exceptions.ProfileNotFound:
        raise Failed("profile") from None
    except (exceptions.SSOError, exceptions.TokenRetrievalError):
        raise Failed("expired") from None
    except (exceptions.BotoCoreError, OSError, JSONDecodeError):  # also from the program in credential_process
        raise Failed("gives") from None
    except exceptions.ClientError as error:  # the role of the profile was refused
        code = str(error.response.get("Error", {}).get("Code", ""))
        raise Failed("expired" if code.startswith("Expired") else "gives") from None
    except ValueError:
        raise Failed("none") from None
    more: dict[str, Any] = {"region": region} if region and "AWS_REGION" not in variables else {}
    return {"credential_provider": provider, **more}


def _sign(make: Callable[[], Any], method: str, key: str) -> str:
    """Return the signed address of a request to S3, which is valid for half an hour; raises Failed."""
    from obstore import sign

    return asked(lambda: str(sign(make(), method, key, timedelta(minutes=30))))


def failed_of(error: BaseException) -> Failed:
    """Return the facts of an error of obstore."""
    text = str(error)
    _, _, debug = text.partition("Debug source:")
    if _METADATA_URL.search(text):
        return Failed("none")
    code = _CODE.search(debug)
    if status := _STATUS.search(debug):
        return Failed("", int(status[1]), code[1] if code else "")
    if isinstance(error, FileNotFoundError):
        return Failed("", 404)
    plain = _FOREIGN.sub("", debug or text)
    return Failed(next((kind for kind, words in _WORDS if words.search(plain)), ""))


def asked(do: Callable[[], T]) -> T:
    """Return the result of a call of obstore; raises Failed."""
    if os.getpid() != _PROCESS:  # the threads of obstore do not live on in a forked process: it would wait for ever
        raise Failed("fork")
    try:
        return do()
    except (Failed, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # a panic of obstore
            raise
        caught = error
    raise failed_of(caught)  # out of reach of the error of obstore: no traceback shows it


def _body(found: Any, size: int) -> bytes:
    """Return the bytes of an answer. A body of more than ``size`` bytes is not read to its end: it may have none."""
    data = bytearray()
    for part in found.stream(min_chunk_size=max(min(size, _CHUNK), 1)):
        data += part
        ARRIVED.add(len(part))
        if len(data) > size:
            raise Failed("length")
    return bytes(data)


class ObStore(Store):
    """A bucket or container. ``by_etag`` says whether a condition of a write can be an ETag."""

    def __init__(self, store: Any, *, has_tail: bool = True, by_etag: bool = True) -> None:
        self._store, self.has_tail, self._by_etag = store, has_tail, by_etag

    def facts(self, meta: Any) -> Facts:
        """Return the facts of an object. Without an ETag, the time of its last change takes its place.

        Listings of Azure have ETags without the quotes that are part of them everywhere else.
        """
        etag = meta["e_tag"] or (f'W/"{meta["last_modified"]}"' if meta["last_modified"].year > 1970 else "")
        if etag and not etag.endswith('"'):
            etag = f'"{etag}"'
        return Facts(meta["path"], meta["size"], etag)

    def head(self, key: str) -> Facts:
        return asked(lambda: self.facts(self._store.head(key)))

    def get(self, key: str, begin: int, size: int, etag: str = "") -> Answer:
        return self._answer(key, (begin, begin + size), size, etag)

    def tail(self, key: str, size: int) -> Answer:
        return self._answer(key, {"suffix": size}, size, "")

    def _answer(self, key: str, span: Any, size: int, etag: str) -> Answer:
        options: Any = {"range": span}
        if etag and not etag.startswith("W/"):  # a weak ETag matches no condition
            options["if_match"] = etag

        def ask() -> Answer:
            found = self._store.get(key, options=options)
            facts = self.facts(found.meta)
            begin = span[0] if isinstance(span, tuple) else max(facts.size - size, 0)
            data = _body(found, size)
            if found.range[0] != begin or len(data) != min(size, facts.size - begin):
                raise Failed("length")
            return Answer(data, facts)

        return asked(ask)

    def list(self, prefix: str, spend: Spend | None = None) -> Sequence[Facts]:
        return at_once([prefix], lambda one: asked(lambda: self._list(one)), LIMITS.listing_seconds)[0]

    def _list(self, prefix: str) -> Sequence[Facts]:
        found: list[Facts] = []
        for page in self._store.list(prefix.strip("/") or None, chunk_size=1000):
            found += map(self.facts, page)
            if len(found) > LIMITS.remote_files:
                raise Failed("many")
        return found

    def put(self, key: str, chunks: Iterable[bytes], size: int, former: str) -> None:
        """Write an object: a small one in one request, a larger one in parts. Only a few parts are in memory."""
        if size >= PART:
            part = max(PART, -(-size // MOST_PARTS))
            asked(lambda: self._store.put(key, iter(chunks), chunk_size=part, max_concurrency=_PARTS_AT_ONCE))
            return
        data = b"".join(chunks)
        mode: Any = {"e_tag": former} if former and self._by_etag else "overwrite" if former else "create"
        asked(lambda: self._store.put(key, data, mode=mode))
