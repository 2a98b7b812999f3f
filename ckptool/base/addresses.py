"""Addresses of remote files, such as ``s3://bucket/run/model.pth``: the only module that takes them apart.

``!member`` may follow the path or the query string. User information and query strings may be secrets, which are never
printed: ``conceal`` replaces an address by a text without them as soon as it comes in, and only the module that opens
it calls ``reveal``.
"""

from __future__ import annotations

import os
import posixpath
from itertools import count
from typing import Final

from .lazy import regex
from .records import NamedTuple

#: The scheme and host of an address. One letter is a drive of Windows. Any path may follow, even one with a line feed.
_ADDRESS: Final = regex(r"[A-Za-z][A-Za-z0-9+.-]+://[^/\n]*(?:/|\Z)")
#: Schemes whose text before ``@`` is a container or a repository, not user information.
_AT_IS_PLAIN: Final = frozenset(("abfs", "abfss", "hf", "wasb", "wasbs"))
#: Schemes whose query string may have any names. In other addresses ``?`` belongs to a key or a pattern, except before
#: a version or a secret.
_HTTP: Final = frozenset(("http", "https"))
#: User information, up to ``@``. AWS keys have slashes: a colon that begins no port leads up to the first ``@``.
_USER: Final = regex(r"[^/?#@]*:(?!\d*(?:[/?#]|\Z))[^?#@]*@|[^/?#]*@")
_QUERY: Final = regex(r"(?s)[?#].*\Z")
_QUERY_OF_VALUES: Final = regex(r"(?si)\?(?=[^?]*(version|generation|x-|sig|token|key|secret|cred|pass))[^?]*=.*\Z")
_MEMBER: Final = "!"


def is_remote(text: str) -> bool:
    """Return whether a text is the address of a remote file or folder, such as ``s3://bucket/model.pth``."""
    return "://" in text and _ADDRESS.match(text) is not None


class Address(NamedTuple):
    """The parts of an address. ``str()`` returns it whole, with its secrets.

    ``scheme`` is in lower case. ``host`` is the bucket, container or host, ``path`` what follows it without the first
    slash, ``!member`` included. ``user`` is the user information and ``query`` the query string, each "" if absent.
    """

    scheme: str
    user: str
    host: str
    path: str
    query: str

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        path = f"/{self.path}" if self.path else ""
        return f"{self.scheme}://{user}{self.host}{path}{self.query}"


def parse(text: str) -> Address:
    """Return the parts of an address; ``text`` must be one."""
    scheme, _, rest = text.partition("://")
    scheme = scheme.lower()
    user = _USER.match(rest) if scheme not in _AT_IS_PLAIN else None
    rest = rest[user.end() :] if user else rest
    found = (_QUERY if scheme in _HTTP else _QUERY_OF_VALUES).search(rest)
    query = found.group() if found else ""
    host, _, path = rest.removesuffix(query).partition("/")
    query, separator, member = query.partition(_MEMBER)
    return Address(scheme, user.group()[:-1] if user else "", host, path + separator + member, query)


def join(address: str, *names: str) -> str:
    """Return the address of a file in a folder; ``..`` is resolved, but leads no higher than the bucket or host."""
    parts = parse(address)
    path = posixpath.join(parts.path, *(name.lstrip("/") for name in names))
    if {".", ".."} & {*path.split("/")}:  # else leave it: a key may have empty parts
        path = posixpath.normpath(f"/{path}").removeprefix("/")
    return str(parts._replace(path=path))


def parent(address: str) -> str:
    """Return the address of the folder of a file or folder, without a slash at its end."""
    parts = parse(address)
    return str(parts._replace(path=posixpath.dirname(parts.path.rstrip("/"))))


def name(address: str) -> str:
    """Return the name of the file, folder or last member; without a path, the bucket or host."""
    parts = parse(address)
    return posixpath.basename(parts.path.rstrip("/").rpartition(_MEMBER)[2]) or parts.host


def shown(address: str) -> str:
    """Return an address as it may be printed: without query string and user information."""
    return str(parse(address)._replace(user="", query=""))


#: The addresses that this process was given, by the text that stands for each.
_GIVEN: Final[dict[str, str]] = {}


def conceal(address: str) -> str:
    """Return the text that stands for an address from now on, without its secrets, which ``reveal`` knows.

    Two addresses get two texts: one that differs from an earlier one in its secrets alone gets a number. A path, or a
    text that stands for an address already, is returned unchanged.
    """
    if address in _GIVEN or not is_remote(address):
        return address
    text = plain = shown(address)
    if address == plain and not plain.startswith("http"):
        return address  # only on the web does a query string name another file
    for number in count(2):
        if _GIVEN.setdefault(text, address) == address:
            break
        text = f"{plain}#{number}"
    return text


def reveal(text: str) -> str:
    """Return the address that ``conceal`` was given for a text, or the text itself. Never print it."""
    return _GIVEN.get(text, text)


#: Addresses at which a folder was found, without a slash at the end.
_FOLDERS: Final[set[str]] = set()


def found_folder(text: str) -> None:
    """Remember that there is a folder at an address."""
    _FOLDERS.add(text.rstrip("/"))


def is_folder(path: str) -> bool:
    """Return whether a path is a folder's. Nobody is asked about a remote one, which was opened before."""
    return path.rstrip("/") in _FOLDERS if is_remote(path) else os.path.isdir(path)


def split_member(text: str) -> tuple[str, str]:
    """Split the text of an address at its first ``!`` into the file and the members; ("", "") without members."""
    parts = parse(reveal(text))
    file, _, members = parts.path.partition(_MEMBER)
    return (conceal(str(parts._replace(path=file))), members) if members else ("", "")
