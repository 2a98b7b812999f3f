"""Stores that are reached with libraries: Google Cloud Storage and Azure with obstore, all others with fsspec.

obstore starts fast and finds credentials, but its errors are pages with the whole address, and its retries take
minutes. This module sets limits, and turns errors into ``Failed``. obstore has no limit for the bytes of an error page
or of one page of a listing.

fsspec knows other protocols, such as SFTP. Their files are only read, and looked at again after each answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, TypeVar

from ..base.addresses import parse
from ..base.lazy import regex
from ..base.limits import LIMITS
from ..base.text import words
from .store import Answer, Facts, Failed, Settings, Spend, Store, at_once, check_bucket, check_server, failures
from .web import etag_of
from .wire import certificates

T = TypeVar("T")
_PROCESS: Final = os.getpid()
#: Bytes of one part of an upload, at least, and the most parts that S3 and Google Cloud Storage take.
PART: Final = 8 << 20
MOST_PARTS: Final = 10_000
#: Bytes of an answer that are counted at a time.
_CHUNK: Final = 1 << 18
#: The beginnings of variables that a store depends on.
_DEPENDS: Final = ("GOOGLE_", "AZURE_", "SSL_", "HOME")
#: Parts of an error's text that quote the server or the address; removed before its words are looked for.
_FOREIGN: Final = regex(r'uri: Some\(\s*\S+\s*\)|(path|error|message): "(\\.|[^"\\])*"')


def open_store(address: str, settings: Settings) -> tuple[Store, str]:
    """Return the store of an address, and the key of its object; raises Failed, for example without credentials."""
    if parse(address).scheme not in ("gs", "az", "abfs", "abfss"):
        return _open_system(address)
    parts = check_bucket(address)
    environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith(_DEPENDS)))
    return asked(lambda: _bucket(parts.scheme, parts.host, settings, environment)), parts.path


def _library() -> Any:
    """Return the stores of obstore; raises Failed without the extra ckptool[remote]."""
    try:
        from obstore import store
    except ImportError:
        raise Failed("obstore") from None
    return store


@lru_cache(maxsize=8)  # connections and credentials are shared by all files of a bucket
def _bucket(scheme: str, host: str, settings: Settings, environment: tuple[tuple[str, str], ...]) -> Store:
    check_server(settings.endpoint_url)
    more: dict[str, Any] = _client(settings.endpoint_url)
    if settings.anonymous:
        more["skip_signature"] = True
    else:
        _check_credentials(scheme, dict(environment))
    if scheme == "gs":
        more |= {"base_url": settings.endpoint_url} if settings.endpoint_url else {}
        return ObStore(_library().GCSStore(host, **more), by_etag=False)
    container, _, account = host.partition("@")
    more |= {"account_name": account.partition(".")[0]} if account else {}
    more |= {"endpoint": settings.endpoint_url} if settings.endpoint_url else {}
    return ObStore(_library().AzureStore(container, **more), has_tail=False)


def _check_credentials(scheme: str, variables: dict[str, str]) -> None:
    """Raise Failed if neither variables nor files nor the metadata of the machine have credentials."""
    google = scheme == "gs"
    gcloud = "~/.config/gcloud/application_default_credentials.json"
    path = os.path.expanduser(variables.get("GOOGLE_APPLICATION_CREDENTIALS", gcloud))
    known = any(name.startswith("GOOGLE_" if google else "AZURE_") for name in variables)
    if known or (google and os.path.exists(path)):
        return
    metadata = "http://metadata.google.internal" if google else "http://169.254.169.254"
    options: Any = {"allow_http": True, "timeout": timedelta(seconds=1)}
    store = _library().HTTPStore(metadata, client_options=options, retry_config={"max_retries": 0})
    try:
        store.head("")
    except Exception as error:
        if failed_of(error).status in (0, 407, 502, 503):  # no server answered, at most a proxy
            raise Failed("none") from None


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
    retries = {
        "max_retries": LIMITS.retries,
        "retry_timeout": timedelta(seconds=LIMITS.retry_seconds),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5)},
    }
    return {"client_options": options, "retry_config": retries}


def failed_of(error: BaseException) -> Failed:
    """Return the facts of an error of obstore."""
    text = str(error)
    _, _, debug = text.partition("Debug source:")
    if regex(r"http://(169\.254\.|metadata\.google\.internal)").search(text):
        return Failed("none")
    code = regex(r"<Code>(\w{1,64})</Code>").search(debug)
    if status := regex(r"\bstatus: (\d{3}),").search(debug):
        return Failed("", int(status[1]), code[1] if code else "")
    if isinstance(error, FileNotFoundError):
        return Failed("", 404)
    plain = _FOREIGN.sub("", debug or text)
    return Failed(next((kind for kind, text in failures()["words"].items() if regex(text).search(plain)), ""))


def asked(do: Callable[[], T], facts_of: Callable[[BaseException], Failed] = failed_of) -> T:
    """Return the result of a call of a library; raises Failed with the facts of its error."""
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
    raise facts_of(caught)  # out of reach of the error of the library: no traceback shows it


def _body(found: Any, size: int) -> bytes:
    """Return the bytes of an answer. A body of more than ``size`` bytes is not read to its end: it may have none."""
    data = bytearray()
    for part in found.stream(min_chunk_size=max(min(size, _CHUNK), 1)):
        data += part
        if len(data) > size:
            raise Failed("length")
    return bytes(data)


class ObStore(Store):
    """A bucket or container. ``by_etag`` says whether a condition of a write can be an ETag."""

    def __init__(self, store: Any, *, has_tail: bool = True, by_etag: bool = True) -> None:
        self._store, self.has_tail, self._by_etag = store, has_tail, by_etag

    def facts(self, meta: Any) -> Facts:
        """Return the facts of an object; listings of Azure have ETags without the quotes that they have elsewhere."""
        changed = str(meta["last_modified"]) if meta["last_modified"].year > 1970 else ""
        return Facts(meta["path"], meta["size"], etag_of(meta["e_tag"] or "", changed))

    def head(self, key: str) -> Facts:
        return asked(lambda: self.facts(self._store.head(key)))

    def get(self, key: str, begin: int | None, size: int, etag: str = "") -> Answer:
        options: Any = {"range": {"suffix": size} if begin is None else (begin, begin + size)}
        if etag and not etag.startswith("W/"):  # a weak ETag matches no condition
            options["if_match"] = etag

        def ask() -> Answer:
            found = self._store.get(key, options=options)
            facts = self.facts(found.meta)
            first = max(facts.size - size, 0) if begin is None else begin
            data = _body(found, size)
            if found.range[0] != first or len(data) != min(size, facts.size - first):
                raise Failed("length")
            return Answer(data, facts)

        return asked(ask)

    def list(self, prefix: str, spend: Spend | None = None) -> Sequence[Facts]:
        found: list[Facts] = []

        def ask() -> None:
            for page in self._store.list(prefix.strip("/") or None, chunk_size=1000):
                found.extend(map(self.facts, page))
                if len(found) > LIMITS.remote_files:
                    raise Failed("many")

        at_once([ask], asked, LIMITS.listing_seconds)
        return found

    def put(self, key: str, chunks: Iterable[bytes], size: int, former: str) -> None:
        """Write an object: a small one in one request, a larger one in parts. Only a few parts are in memory."""
        if size >= PART:
            part = max(PART, -(-size // MOST_PARTS))
            asked(lambda: self._store.put(key, iter(chunks), chunk_size=part, max_concurrency=3))
            return
        data = b"".join(chunks)
        mode: Any = {"e_tag": former} if former and self._by_etag else "overwrite" if former else "create"
        asked(lambda: self._store.put(key, data, mode=mode))


# -- fsspec

#: Protocols of fsspec that read local files, keep caches on the disk, or wrap other protocols.
_LOCAL: Final = words(
    "file local asynclocal git simplecache filecache blockcache cached reference zip tar libarchive dir generic "
    "async_wrapper asyncwrapper data dask"
)
#: What file systems call the ETag, or the time of the last change.
_MARKS: Final = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "last_modified", "modify", "created")


def _open_system(address: str) -> tuple[Store, str]:
    parts = parse(address)
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise Failed("fsspec") from None
    if parts.scheme in _LOCAL:
        raise Failed("scheme")
    system, path = _ask(lambda: url_to_fs(address))
    end = parts.path.rstrip("/")
    if not path.endswith(end):
        raise Failed("scheme")
    return _System(system, path.removesuffix(end)), parts.path


def _ask(do: Callable[[], T]) -> T:
    """Return the result of a call of fsspec; raises Failed by the nearest class of its exception in the table."""
    known = failures()["exceptions"]

    def facts_of(error: BaseException) -> Failed:
        return next(Failed(*known[each.__name__]) for each in type(error).__mro__ if each.__name__ in known)

    return asked(do, facts_of)


class _System(Store):
    """The files of a file system of fsspec whose paths begin with ``base``."""

    def __init__(self, system: Any, base: str) -> None:
        self._system, self._base = system, base
        self._first: dict[str, Facts] = {}

    def head(self, key: str) -> Facts:
        _ask(self._system.invalidate_cache)
        found = _ask(lambda: self._system.info(self._base + key))
        if found.get("type") == "directory":
            raise Failed("", 404)
        return _facts(key, found)

    def get(self, key: str, begin: int | None, size: int, etag: str = "") -> Answer:
        assert begin is not None, "it has no tail"
        before = self._first.get(key) or self._first.setdefault(key, self.head(key))
        end = min(begin + size, before.size)
        data = bytes(_ask(lambda: self._system.cat_file(self._base + key, begin, end)))
        if self.head(key) != before or etag not in ("", before.etag):
            raise Failed("", 412)
        if len(data) != end - begin:
            raise Failed("length")
        return Answer(data, before)

    def list(self, prefix: str, spend: Spend | None = None) -> Sequence[Facts]:
        found: Mapping[str, Any] = _ask(lambda: self._system.find(self._base + prefix, detail=True))
        if len(found) > LIMITS.remote_files:
            raise Failed("many")
        return [_facts(path.removeprefix(self._base), facts) for path, facts in sorted(found.items())]


def _facts(key: str, found: Mapping[str, Any]) -> Facts:
    marks = [found[name] for name in _MARKS if name in found]
    marks = [mark.timestamp() if hasattr(mark, "timestamp") else mark for mark in marks]
    return Facts(key, found.get("size") or 0, f"W/{marks}" if any(marks) else "")
