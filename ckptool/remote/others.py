"""Every other protocol that fsspec knows, such as SFTP. Files are only read, and looked at again after each answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from ..base.addresses import parse
from ..base.limits import LIMITS
from .store import Answer, Facts, Failed, Settings, Spend, Store

T = TypeVar("T")
#: Protocols of fsspec that read local files, keep caches on the disk, or wrap other protocols.
_LOCAL: Final = frozenset(
    ("file", "local", "asynclocal", "git", "simplecache", "filecache", "blockcache", "cached", "reference", "zip")
) | frozenset(("tar", "libarchive", "dir", "generic", "async_wrapper", "asyncwrapper", "data", "dask"))
#: What file systems call the ETag, or the time of the last change.
_MARKS: Final = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "last_modified", "modify", "created")
#: The failures by the exceptions of Python.
_EXCEPTIONS: Final[tuple[tuple[type[Exception], str, int], ...]] = (
    (FileNotFoundError, "", 404),
    (PermissionError, "", 403),
    (TimeoutError, "timeout", 0),
    (OSError, "route", 0),
    (ImportError, "package", 0),
    (ValueError, "scheme", 0),
    (Exception, "", 0),
)


def open_store(address: str, settings: Settings) -> tuple[Store, str]:
    """Return the store of an address, and the path of the file; raises Failed."""
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
    """Return the result of a call of fsspec; raises Failed."""
    try:
        return do()
    except (Failed, MemoryError):
        raise
    except Exception as error:
        failed = next(Failed(kind, status) for known, kind, status in _EXCEPTIONS if isinstance(error, known))
    raise failed


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

    def get(self, key: str, begin: int, size: int, etag: str = "") -> Answer:
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
