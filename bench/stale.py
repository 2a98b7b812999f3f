"""Which published figures are older than the code that they measured.

Each row of bench/figures.json has the commit that it was measured on, and the modules of ckptool that its command
imported. It is stale once one of these modules has changed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, Final

from bench.measure import ROOT

#: Follows a commit if files of the package differed from it.
CHANGED: Final = "+"


def commit() -> str:
    """Return the commit of this checkout, with ``CHANGED`` after it if the package differs; "" outside a repository."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return head + CHANGED * bool(head and _git("status", "--porcelain", "--", "ckptool"))


def described(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each row that must be measured again, with the reason."""
    for row in document["rows"]:
        why = "" if row.get("fails") else _why(row.get("commit", ""), row.get("modules", "").split())
        if why:
            yield f"{row['group']}, {row['file']}: {row['job']}: {why}"


def _why(measured: str, modules: Collection[str]) -> str:
    """Return why a figure that was measured on a commit is stale, or ""."""
    if not measured or measured.endswith(CHANGED):
        return "it does not say which commit it was measured on"
    changed = _changed_since(measured)
    if changed is None:
        return f"the commit {measured} is unknown here"
    mine = sorted(changed.intersection(modules))
    more = f" and {len(mine) - 3} more" if len(mine) > 3 else ""
    return f"since {measured} these changed: {', '.join(mine[:3])}{more}" if mine else ""


@cache
def _changed_since(measured: str) -> frozenset[str] | None:
    """Return the modules that differ from a commit, or None if the commit is unknown."""
    if not _git("rev-parse", "--quiet", "--verify", f"{measured}^{{commit}}"):
        return None
    paths = _git("diff", "--name-only", measured, "--", "ckptool").splitlines()
    return frozenset(path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths)


def _git(*words: str) -> str:
    done = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if not done.returncode else ""
