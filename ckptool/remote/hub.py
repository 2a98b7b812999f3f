"""The Hugging Face hub: one request names the commit and lists its files, and all bytes come from that commit."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

from ..base.addresses import Address
from ..base.lazy import regex
from ..base.limits import LIMITS
from .obstores import Http, check_server, http_store, may_pass, retried
from .store import Facts, Failed, Settings, Store

_SITE: Final = "https://huggingface.co"
_KINDS: Final = ("models", "datasets", "spaces")
#: Pages of a repository, of a folder or of a file, and links to download a file.
_PAGE: Final = regex(r"((?:(?:datasets|spaces)/)?[^/]+/[^/]+)(?:/(?:blob|resolve|raw|tree)/([^/]+)(/.*)?)?/?")
_PATH: Final = regex(r"(?:(models|datasets|spaces)/)?([^/]+/[^/@]+)(?:@(refs/[^/]+/[^/]+|[^/]+))?(?:/(.*))?")
#: A commit, as it stands in addresses.
_COMMIT: Final = regex(r"[0-9A-Za-z]{4,128}")
#: The kinds of failures by the names and texts of errors of huggingface_hub and its HTTP client; the first one counts.
_WORDS: Final = (
    ("timeout", regex("Timeout")),
    ("redirect", regex("TooManyRedirects|UnsupportedProtocol|InvalidURL")),
    ("proxy", regex("ProxyError")),
    ("tls", regex("ConnectError: .*(SSL|TLS|certificate)")),
    ("name", regex("ConnectError: .*(Name or service not known|nodename nor servname|getaddrinfo)")),
    ("route", regex("ConnectError|OfflineMode")),
    ("reset", regex("ReadError|WriteError|CloseError|RemoteProtocolError|LocalProtocolError")),
    ("answer", regex("")),
)


def page_shows(parts: Address) -> str:
    """Return the ``hf://`` address of what a web page of the hub shows, or "" for any other address."""
    site = f"{os.environ.get('HF_ENDPOINT', _SITE).rstrip('/')}/"
    address = f"{parts.scheme}://{parts.host}/{parts.path}"
    page = _PAGE.fullmatch(address[len(site) :]) if address.startswith(site) else None
    if not page:
        return ""
    revision = f"@{page[2]}" if page[2] not in (None, "main") else ""
    return f"hf://{page[1]}{revision}{page[3] or ''}"


def open_store(path: str, settings: Settings) -> tuple[Store, str]:
    """Return the repository of an address on the hub, and the path of the file in it; raises Failed."""
    found = _PATH.fullmatch(path)
    if not found:
        raise Failed("names")
    try:
        from huggingface_hub import get_token
    except ImportError:
        raise Failed("hub") from None
    kind, name, revision, file = found.groups()
    token = "" if settings.anonymous else get_token() or ""
    site = settings.endpoint_url or os.environ.get("HF_ENDPOINT", _SITE)
    check_server(site)
    minute = int(time.monotonic() // 60)  # a branch may move
    return _repository(site.rstrip("/"), kind or "models", name, unquote(revision or "main"), token, minute), file or ""


@lru_cache(maxsize=8)
def _repository(site: str, kind: str, name: str, revision: str, token: str, _minute: int) -> Store:
    found = retried(lambda: _listed(site, kind, name, revision, token), may_pass)
    return _Repository(site, kind, name, token, *found)


def _listed(site: str, kind: str, name: str, revision: str, token: str) -> tuple[str, dict[str, int]]:
    """Return the commit of a revision, and its files with their sizes in bytes; raises Failed."""
    from huggingface_hub import HfApi, errors

    try:
        api, timeout = HfApi(endpoint=site, token=token or False), LIMITS.read_seconds
        found = api.repo_info(name, repo_type=kind[:-1], revision=revision, timeout=timeout, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
        sound = all(isinstance(path, str) and isinstance(size, int) and size >= 0 for path, size in sizes.items())
        if not sound or not _COMMIT.fullmatch(found.sha):
            raise ValueError
        return found.sha, sizes
    except errors.HFValidationError:
        failed = Failed("names")
    except errors.GatedRepoError:
        failed = Failed("gated")
    except errors.RevisionNotFoundError:
        failed = Failed("revision")
    except errors.RepositoryNotFoundError:
        failed = Failed("repository")
    except errors.HfHubHTTPError as error:
        failed = Failed("", error.response.status_code)
    except MemoryError:
        raise
    except Exception as error:  # errors of httpx, and of parsing whatever was answered
        failed = Failed(next(kind for kind, words in _WORDS if words.search(f"{type(error).__name__}: {error}")))
    raise failed


class _Repository(Http):
    """A repository at one commit. The hub redirects every request to another host, which never sees the token."""

    def __init__(self, site: str, kind: str, name: str, token: str, commit: str, sizes: dict[str, int]) -> None:
        folder = name if kind == "models" else f"{kind}/{name}"
        headers = {"authorization": f"Bearer {token}"} if token else {}
        super().__init__(http_store(f"{site}/{folder}/resolve/{commit}", headers))
        self._commit, self._sizes = commit, sizes

    def facts(self, meta: Any) -> Facts:
        # Servers behind the hub have ETags of their own; at one commit, a name always means the same bytes.
        return Facts(meta["path"], meta["size"], f'W/"{self._commit}"')

    def head(self, key: str) -> Facts:
        if key not in self._sizes:
            raise Failed("", 404)
        return self.facts({"path": key, "size": self._sizes[key]})

    def list(self, prefix: str) -> Sequence[Facts]:
        start = f"{prefix}/" if prefix else ""
        if len(self._sizes) > LIMITS.remote_files:
            raise Failed("many")
        return [self.head(key) for key in self._sizes if key.startswith(start)]
