"""What ckptool asks of a store of remote objects, and the errors for everything that fails there.

A store is a module with one class that has the methods of ``Store``. It raises ``Failed`` with plain facts;
``error_of`` turns them into errors of ckptool. The text of a library is never shown: it may contain signatures.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from ..base.addresses import Address, conceal, parse
from ..base.errors import NO_FILE, ChangedError, CkptoolError, OutputError, RefusedError, UnreadableError
from ..base.lazy import regex
from ..base.limits import LIMITS
from ..base.records import NamedTuple
from ..base.steps import AnyStep, Line, Setting, advice
from ..base.text import human_bytes, parse_bytes

T = TypeVar("T")
#: What counts the bytes of an answer while they arrive, and raises RefusedError if they are too many.
Spend = Callable[[int], None]
Result = TypeVar("Result")
#: A range of an object: its first byte, and its size in bytes.
Range = tuple[int, int]


class Settings(NamedTuple):
    """How stores are reached. An empty field means that the environment tells.

    ``max_download`` is the most bytes that one command reads from afar. ``allow_unversioned`` accepts servers that
    do not say whether a file was replaced between two answers.
    """

    endpoint_url: str = ""
    anonymous: bool = False
    profile: str = ""
    max_download: int = LIMITS.download_bytes
    allow_unversioned: bool = False


def current() -> Settings:
    """Return the settings of this process: the options of a command are in variables, which its workers inherit.

    Raises TargetError if the limit of downloads is not a number of bytes.
    """
    endpoint_url, anonymous, profile, most, unversioned = (
        os.environ.get(f"CKPTOOL_{name.upper()}", "") for name in Settings._fields
    )
    limit = parse_bytes(most) if most else LIMITS.download_bytes
    return Settings(endpoint_url, bool(anonymous), profile, limit, bool(unversioned))


class Facts(NamedTuple):
    """An object: its key, its size in bytes, and its ETag, which changes with its bytes; "" if the server has none."""

    key: str
    size: int
    etag: str


class Answer(NamedTuple):
    """Bytes of an object, and the facts of the object that they come from."""

    data: bytes
    facts: Facts


class Store:
    """One bucket, container or server. Every method may be called from several threads, and raises ``Failed``.

    A store that is only read has ``head``, ``get`` and ``list``; one with ``has_tail`` also ``tail``.
    """

    #: Whether ``tail`` returns the last bytes of an object whose size is unknown.
    has_tail = False

    def head(self, key: str) -> Facts:
        """Return the facts of an object."""
        raise NotImplementedError

    def get(self, key: str, begin: int, size: int, etag: str = "") -> Answer:
        """Return ``size`` bytes from ``begin``, fewer at the end; with ``etag``, only from the object that has it."""
        raise NotImplementedError

    def tail(self, key: str, size: int) -> Answer:
        """Return the last ``size`` bytes, or all if there are fewer."""
        raise NotImplementedError

    def list(self, prefix: str, spend: Spend | None = None) -> Sequence[Facts]:
        """Return all objects whose keys begin with ``prefix`` and "/"; all objects if it is "".

        ``spend`` is called with the sizes of what arrives.
        """
        raise NotImplementedError

    def put(self, key: str, chunks: Iterable[bytes], size: int, former: str) -> None:
        """Write an object of ``size`` bytes. ``former`` is the ETag of what it may replace, "" if there must be none.

        Nothing is visible before the last chunk. If the chunks raise an error, nothing is written; ``Failed`` may take
        the place of the error. A large object takes no condition.
        """
        raise Failed("writing")

    def copies(self) -> Copier | None:
        """Return what writes objects from parts that the server copies from other objects, or None."""
        return None


class Copier(Protocol):
    """A bucket that takes uploads in parts of 5 MiB to 5 GiB; the last one may be smaller.

    Its server copies parts from other objects. Every method may be called from several threads, and raises ``Failed``.
    """

    bucket: str

    def copies_from(self, other: Copier) -> bool:
        """Return whether parts can be copied from another bucket: it belongs to the same account."""
        ...

    def begin(self, key: str) -> str:
        """Begin an upload and return its id. Unfinished ones of the same key that are older than a day are removed."""
        ...

    def part(self, key: str, upload: str, number: int, data: bytes | bytearray) -> str:
        """Send a part and return its ETag. The first part has the number 1."""
        ...

    def copy(self, key: str, upload: str, number: int, origin: Origin, span: Range) -> str:
        """Let the server copy a part from an object, unless that was replaced, and return the ETag of the part."""
        ...

    def complete(self, key: str, upload: str, etags: Sequence[str], former: str) -> None:
        """Make the object visible; ``former`` is as for ``put``."""
        ...

    def abort(self, key: str, upload: str) -> None:
        """Remove an unfinished upload."""
        ...


class Origin(NamedTuple):
    """An object whose bytes the server can copy: its bucket, its key and ETag."""

    copier: Copier
    key: str
    etag: str


class Failed(Exception):
    """A request that failed: the HTTP status (0 without an answer), the server's code, and the kind of failure.

    The code is one word, such as ``NoSuchBucket``. The kind is a key of ``MESSAGES``, or "". ``region`` is where the
    bucket is, if the server says so. ``once`` tells that the request was sent once only: no earlier answer was lost.
    """

    def __init__(self, kind: str = "", status: int = 0, code: str = "", region: str = "") -> None:
        super().__init__(kind, status, code)
        self.kind, self.status, self.code, self.region, self.once = kind, status, code, region, False


_SERVER: Final = regex(r"https?://(?:[^/?#\s]*@)?(?:[\w.~-]+|\[[\da-fA-F:.]+\])(?::(\d{1,5}))?(?:[/?#]\S*)?")
_BUCKET: Final = regex(r"[\w.@$~-]+")
#: An empty part of a key, except at its end, a dot or two as a part, and control characters.
_ODD_KEY: Final = regex(r"(\A|/)\.{0,2}/|(\A|/)\.{1,2}\Z|[\x00-\x1f\x7f]")


def check_server(url: str) -> None:
    """Raise Failed unless a URL, or "", names a server."""
    found = _SERVER.fullmatch(url)
    if url and (not found or int(found[1] or 0) > 65_535):
        raise Failed("server")


def check_bucket(address: str) -> Address:
    """Return the parts of an address in a bucket; raises Failed if there can be no such bucket or key."""
    parts = parse(address)
    if parts.query:
        raise Failed("query")
    if not _BUCKET.fullmatch(parts.host):
        raise Failed("bucket")
    if _ODD_KEY.search(parts.path):
        raise Failed("key")
    return parts


_ANONYMOUS: Final = Setting("anonymous")
#: Messages and next steps by the kind of a failure that has no status, or whose code says more than its status.
MESSAGES: Final[dict[str, tuple[str, AnyStep]]] = {
    "name": (
        "{host} cannot be found: there is no host of this name",
        "check the spelling, the endpoint and the network",
    ),
    "route": ("no connection to {host}", "check the network, and the port of the address or endpoint"),
    "timeout": ("{host} does not answer", "try again, or check the network"),
    "tls": (
        "no secure connection to {host}: it does not speak TLS, or its certificate is not trusted",
        "name the certificates of your network in SSL_CERT_FILE, or check http:// and https://",
    ),
    "proxy": ("the proxy gives no connection to {host}", "check HTTPS_PROXY and NO_PROXY"),
    "body": ("{host} broke off its answer, also when asked again", "try again later"),
    "slow": (f"{{host}} sends too slowly: an answer took {LIMITS.request_seconds:.0f} seconds", "try again later"),
    "large": (
        f"{{host}} answers with more than {human_bytes(LIMITS.answer_bytes)}, or more than may be downloaded",
        advice("check the address, or allow more with ", Setting("max_download", None)),
    ),
    "length": ("{host} sends a wrong number of bytes, also when asked again", "try again later"),
    "reset": ("{host} broke off the connection, also when asked again", "try again later"),
    "whole": ("{host} cannot send a part of a file", "download it first"),
    "region": ("the bucket {bucket} is in another region", "set AWS_REGION to the region of the bucket"),
    "expired": ("the credentials have expired", "sign in again, for example with aws sso login"),
    "address": ("the signed address has expired", "get a new one"),
    "skew": ("{host} refuses all requests, because the clock of this machine is wrong", "set the clock"),
    "keys": ("{host} does not accept the credentials", "check the key, the secret and the profile"),
    "none": ("there are no credentials for {host}", advice("sign in, or read a public bucket with ", _ANONYMOUS)),
    "profile": ("there is no such profile", "see which there are: aws configure list-profiles"),
    "gives": (
        "the profile gives no credentials",
        "check its keys in ~/.aws/credentials and its settings in ~/.aws/config",
    ),
    "config": ("the settings of the profile cannot be read", "check ~/.aws/config and ~/.aws/credentials"),
    "account": ("the storage account is not known", "set AZURE_STORAGE_ACCOUNT_NAME, or use abfs://CONTAINER@ACCOUNT/"),
    "bucket": ("there is no bucket {bucket}", "check its name, and the endpoint"),
    "listing": ("{host} cannot list files", "name one file"),
    "endless": (f"listing its files takes more than {LIMITS.listing_seconds:.0f} seconds", "name one file"),
    "answer": ("{host} does not answer as it should", "check the address and the endpoint, or download it first"),
    "parts": ("{host} does not have all parts of the upload", "try again"),
    "server": ("the address or the endpoint does not name a server", "write it as https://HOST or https://HOST:PORT"),
    "redirect": ("{host} redirects to an address that cannot be reached, or in a circle", "check the address"),
    "key": (
        "one of its names has an empty part, a dot or two as a part, a control character, or looks like a query",
        "download it first",
    ),
    "query": ("parameters behind a question mark are not supported", "name the object alone"),
    "unversioned": (
        "{host} sends neither ETag nor Last-Modified: if the file is replaced meanwhile, its parts would be mixed",
        advice("download it first, or accept this with ", Setting("allow_unversioned")),
    ),
    "writing": ("ckptool does not write to {host}", "write to a local path, then upload it"),
    "both": ("it is a file and a folder at once", "rename one of them, or name single files"),
    "many": (f"it has more than {LIMITS.remote_files:,} files", "name a folder with fewer files"),
    "obstore": (
        "obstore is not installed, which reaches Google Cloud Storage and Azure",
        Line("pip install 'ckptool[remote]'"),
    ),
    "botocore": (
        "boto3 is not installed, which reads profiles and finds the credentials of a machine",
        advice("pip install 'ckptool[s3]', or read a public bucket with ", _ANONYMOUS),
    ),
    "fork": ("a forked process cannot read what its parent opened", "start processes with spawn or forkserver"),
    "repository": (
        "there is no such repository, or it is private",
        "check the name, or set an HF_TOKEN that may read it",
    ),
    "revision": ("the repository has no such revision", "see its branches and tags on its page"),
    "gated": ("the repository is for those who accepted its terms", "accept them on its page, and set HF_TOKEN"),
    "names": ("it is not an address of the hub", "write hf://ORGANISATION/MODEL/FILE"),
    "hub": ("huggingface_hub is not installed, which knows the hub", Line("pip install 'ckptool[hf]'")),
    "fsspec": ("fsspec is not installed, which reads {scheme}://", Line("pip install fsspec")),
    "package": ("a package is missing that fsspec needs for {scheme}://", "install it, or download the file first"),
    "scheme": ("addresses with {scheme}:// are not supported", "download it first"),
    "unsigned": ("{host} wants credentials", advice("sign in, or read a public bucket with ", _ANONYMOUS)),
    "archived": ("it is in an archive such as Glacier", "restore it first, then try again"),
    "kms": ("the KMS key that encrypts it cannot be used", "check its state and the permission kms:Decrypt"),
    "password": ("{host} wants credentials", "check the address"),
    "denied": (
        "no permission to {verb} it, or no such file and no permission to list {bucket}",
        "check the name and the permissions",
    ),
    "refused": ("{host} refuses it", "check the address; signed ones expire"),
    "missing": (NO_FILE, ""),
    "changed": ("the file changed while it was read", "try again when nobody writes to it"),
    "removed": ("the upload was removed meanwhile", "try again"),
    "written": ("somebody else wrote to it meanwhile", "see what is there, then try again"),
    "fails": ("{host} fails with status {status}, also when asked again", "try again later"),
    "status": ("{host} answers with status {status}", "check the address"),
    "unknown": ("the request failed", "try again, or download it first"),
}
#: The kinds of failures by the codes of S3, Google Cloud Storage and Azure.
_CODES: Final = {
    "NoSuchBucket": "bucket",
    "ContainerNotFound": "bucket",
    "PermanentRedirect": "region",
    "AuthorizationHeaderMalformed": "region",
    "IllegalLocationConstraintException": "region",
    "ExpiredToken": "expired",
    "TokenRefreshRequired": "expired",
    "InvalidToken": "expired",
    "RequestTimeTooSkewed": "skew",
    "InvalidAccessKeyId": "keys",
    "SignatureDoesNotMatch": "keys",
    "AuthenticationFailed": "keys",
    "InvalidPart": "parts",
    "InvalidObjectState": "archived",
    "KMS": "kms",
}
#: The kinds of failures by the status of an answer, and those that mean something else while writing or in a scheme.
_STATUSES = {401: "unsigned", 403: "denied", 404: "missing", 407: "proxy", 410: "missing", 412: "changed"}
_STATUSES |= {416: "changed", 429: "fails"}
_WEB: Final = {401: "password", 403: "refused"}
_STATUSES_OF: Final = {"hf": {401: "repository", 403: "gated"}, "http": _WEB, "https": _WEB}
_STATUSES_OF["writing"] = {404: "removed", 409: "written", 412: "written"}
#: The beginnings of variables with credentials.
_CREDENTIALS: Final = ("AWS_", "GOOGLE_", "AZURE_", "HF_")
_HOSTS = {"s3": "S3", "gs": "Google Cloud Storage", "hf": "the hub"} | dict.fromkeys(("az", "abfs", "abfss"), "Azure")


def kind_of(failed: Failed) -> str:
    """Return the kind that the server's code stands for, otherwise the kind of the failure."""
    return _CODES.get(failed.code, failed.kind)


def error_of(failed: Failed, address: str, *, writing: bool = False) -> CkptoolError:
    """Return the error for a failed request about the object at an address."""
    parts, status, kind = parse(address), failed.status, kind_of(failed)
    host, bucket = _HOSTS.get(parts.scheme, f"{parts.scheme}://{parts.host}"), parts.host.partition("@")[0]
    if parts.scheme in ("http", "https"):  # the codes of a signed address say nothing about credentials of the user
        host = parts.host
        kind = "address" if kind == "expired" else "redirect" if failed.kind == "region" else failed.kind
    statuses = _STATUSES | _STATUSES_OF.get("writing" if writing else parts.scheme, {})
    said = kind or statuses.get(status) or ("fails" if status >= 500 else "status" if status else "unknown")
    what, step = MESSAGES[said]
    if said == "none" and parts.scheme == "s3":
        keys = "set AWS_ACCESS_KEY_ID and its secret, choose a "
        step = advice(keys, Setting("profile", None), ", or read a public bucket with ", _ANONYMOUS)
    what = what.format(
        host=host, bucket=bucket, scheme=parts.scheme, status=status, verb="write" if writing else "read"
    )
    error: type[CkptoolError] = OutputError if writing else UnreadableError
    error = {"writing": RefusedError, "unversioned": RefusedError, "changed": ChangedError}.get(said, error)
    found = error(what, path=conceal(address), next=step)
    found.of_server = kind != "listing" and (kind != "" or status not in (401, 403, 404, 410))
    return found


class Arrived:
    """Counts the bytes of answers, also of those that are under way, for progress bars."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count bytes, from any thread."""
        with self._lock:
            self.nbytes += nbytes


#: What has arrived in this process.
ARRIVED: Final = Arrived()


class Recent(Generic[T]):
    """What was found at addresses within the last ``seconds``, with the same settings and credentials.

    Finding out what an address is, and opening it, are separate calls; together they take one request. At most ``most``
    things are kept.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._found: dict[object, tuple[float, T]] = {}

    def get(self, address: str) -> T | None:
        """Return what was found at an address, or None."""
        when, found = self._found.get(_asked(address), (0.0, None))
        return found if time.monotonic() - when < self._seconds else None

    def keep(self, address: str, found: T) -> T:
        """Keep what was found, and return it."""
        if len(self._found) >= self._most:
            self._found.clear()
        self._found[_asked(address)] = time.monotonic(), found
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._found.clear()

    def take(self, address: str) -> T | None:
        """Return what was found at an address, or None, and forget it."""
        found = self.get(address)
        self._found.pop(_asked(address), None)
        return found


def _asked(address: str) -> object:
    """Return the same for two questions about an address that have the same answer."""
    return address, current(), tuple(item for item in os.environ.items() if item[0].startswith(_CREDENTIALS))


def alone(request: Callable[[], Result]) -> Result:
    """Return the result of one request, which runs in a thread as in ``at_once``."""
    return together([request])[0]


def together(requests: Sequence[Callable[[], Result]]) -> list[Result]:
    """Return the results of several requests, in order; they run and fail as in ``at_once``."""
    return at_once(requests, lambda request: request())


def at_once(work: Sequence[T], do: Callable[[T], Result], seconds: float | None = None) -> list[Result]:
    """Return the results of ``do`` for each item, in order, from up to ``LIMITS.requests`` threads.

    Raises the first error; the threads then stop at their next item. Even one item runs in a thread: libraries wait for
    an answer without looking at signals, so ^C would have no effect for as long. Raises Failed after ``seconds``.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    items, lock, done = iter(enumerate(work)), threading.Lock(), threading.Event()

    def run() -> None:
        try:
            while not done.is_set():
                with lock:
                    at, item = next(items, (-1, None))
                if item is None:
                    return
                results[at] = do(item)
        except BaseException as error:
            errors.append(error)
            done.set()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(len(work), LIMITS.requests))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds)
            if thread.is_alive():
                raise Failed("endless")
    finally:
        done.set()
    if errors:
        raise errors[0]
    return [results[at] for at in range(len(work))]
