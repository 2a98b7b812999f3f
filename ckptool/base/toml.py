"""Read TOML: with the standard library, or with the package tomli on Python 3.10."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

from .errors import MalformedError, TargetError
from .lazy import regex

#: The strings and comments of a TOML file. A string without an end takes the rest, so that each byte is read once.
_TEXTS: Final = regex(
    rb'"""(?:[^\\]|\\.?)*?(?:"{3,5}|\Z)|"(?:[^"\\\n]|\\.?)*"?' rb"|'''.*?(?:'{3,5}|\Z)|'[^'\n]*'?|#[^\n]*", re.DOTALL
)
#: The most dots in a line. The library takes a time that grows with the square of the parts of a dotted key.
_MOST_DOTS: Final = 64


def parsed(data: bytes, path: str, subject: str) -> dict[str, Any]:
    """Return the table that ``data`` describes; ``subject`` names the file at ``path`` in errors.

    Raise MalformedError if it is not TOML, TargetError if nothing can read it.
    """
    try:
        if sys.version_info >= (3, 11):
            import tomllib as toml
        else:
            import tomli as toml
    except ImportError:
        what = f"reading {subject} needs Python 3.11 or the package tomli"
        raise TargetError(what, path=path, next="pip install tomli") from None
    if any(line.count(b".") > _MOST_DOTS for line in _TEXTS.sub(b"", data).split(b"\n")):
        raise MalformedError(f"{subject} has a line with more than {_MOST_DOTS} dots outside of texts", path=path)
    try:
        return dict(toml.loads(data.decode("utf-8")))
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{subject} is not TOML: {error}", path=path) from error
