"""Read TOML: with the standard library, or with the package tomli on Python 3.10."""

from __future__ import annotations

import sys
from typing import Any

from .errors import MalformedError, TargetError


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
    try:
        return dict(toml.loads(data.decode("utf-8")))
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{subject} is not TOML: {error}", path=path) from error
