"""Policy files of validate: TOML, with sections for files by glob. --policy names one, or ckptool finds it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from ..base import toml
from ..base.addresses import is_remote
from ..base.errors import MalformedError, TargetError, UnreadableError, refuse_remote
from ..base.globs import Glob
from ..base.records import NamedTuple
from ..base.steps import as_step
from ..base.text import quoted
from ..files.archives import beside, file_of, read_bytes
from ..files.sources import open_source
from ..reports.expectations import Policy, all_of, policy_of

#: The policy files that ckptool finds by itself; in pyproject.toml the policy is the table [tool.ckptool].
_NAME: Final = "ckptool.toml"
_PROJECT: Final = "pyproject.toml"
#: The largest accepted policy file, in bytes. A policy is written by hand and much smaller.
_MAX_BYTES: Final = 1 << 20
#: Keys allowed only in a policy that --policy names: they may loosen the checks, or load files for real.
_NAMED_ONLY: Final = ("torch", "load", "map_location")


class PolicySet(NamedTuple):
    """The expectations for all files, and the additional ones for files that match a glob.

    ``path`` is the file in which ckptool found the policy, or "" if --policy named it or it came from options.
    Globs match paths relative to ``folder``, and an address or what follows any of its slashes.
    """

    path: str
    folder: str
    policy: Policy
    sections: tuple[tuple[Glob, Policy], ...] = ()

    @property
    def every(self) -> tuple[Policy, ...]:
        """All policies of the set: the general one and the one of each section."""
        return tuple(item for policy in (self.policy, *(item for _, item in self.sections)) for item in policy.each)

    def of(self, path: str) -> Policy:
        """Return the combined expectations for the file at ``path``."""
        if is_remote(path):
            parts = path.split("/")
            names = [path, *("/".join(parts[at:]) for at in range(2, len(parts)))]
        else:
            names = [os.path.relpath(_absolute(path), self.folder).replace(os.sep, "/")]
        return all_of(self.policy, *(policy for glob, policy in self.sections if any(map(glob.matches, names))))

    def with_found(self, found: PolicySet) -> PolicySet:
        """Return this set with the requirements of a policy file that ckptool found added to it."""
        policy = all_of(self.policy, found.policy)._replace(source=found.path)
        return PolicySet(found.path, found.folder, policy, found.sections)


def policy_set(path: str | None, options: Mapping[str, Any], search: bool) -> PolicySet:
    """Return the policy of the file ``path``, with the options overriding its values.

    Without a path, return the policy of the options; if ``search``, add the policy file found for the working folder.
    """
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items() if value}
    if path is not None:
        values = _toml(path)
        base, sections = _split(values, path)
        policy_of(base, path)
        policy = policy_of({key.replace("-", "_"): value for key, value in base.items()} | given)
        return PolicySet("", os.path.dirname(_absolute(path)), policy, sections)
    mine = PolicySet("", os.getcwd(), policy_of(given))
    found = _found() if search else None
    return mine if found is None else mine.with_found(found)


def _split(values: Mapping[str, Any], path: str) -> tuple[dict[str, Any], tuple[tuple[Glob, Policy], ...]]:
    """Return the keys for all files, and the policies of the sections. Make locks relative to the policy file."""

    def placed(table: Mapping[str, Any]) -> dict[str, Any]:
        lock = table.get("lock")
        return {**table, "lock": beside(path, lock)} if isinstance(lock, str) else dict(table)

    files = values.get("files", {})
    if not isinstance(files, dict) or not all(isinstance(table, dict) for table in files.values()):
        raise TargetError("'files' is not a table of tables", path=path, next='write [files."detector/*.pth"]')
    sections = tuple((Glob(pattern), policy_of(placed(table), path)) for pattern, table in files.items())
    return placed({key: value for key, value in values.items() if key != "files"}), sections


def _found() -> PolicySet | None:
    """Return the policy nearest to the working folder, searched up to the root of its repository, or None."""
    for folder in _folders():
        for name in (_NAME, _PROJECT):
            path = os.path.join(folder, name)
            if not os.path.isfile(path):
                continue
            shown = os.path.relpath(path)
            try:
                values = _toml(path) if name == _NAME else _project_table(path)
                if values is None:
                    continue
                base, sections = _split(values, path)
                for table in (base, *values.get("files", {}).values()):
                    _check_adds(table)
                policies = PolicySet(shown, folder, policy_of(base), sections)
                for lock in filter(None, (item.lock for item in policies.every)):
                    _check_file(lock)
                return policies
            except TargetError as error:
                error.path = shown
                error.step = error.step if error.next else as_step("mend it, or leave it aside with --no-policy")
                raise
    return None


def _folders() -> list[str]:
    """Return the working folder and its parents up to the one with .git; without .git, only the working folder."""
    folder = os.getcwd()
    folders = [folder]
    while not os.path.exists(os.path.join(folder, ".git")):
        folder, before = os.path.dirname(folder), folder
        if folder == before:
            return folders[:1]
        folders.append(folder)
    return folders


def _check_adds(table: Mapping[str, Any]) -> None:
    """Raise TargetError if a policy that ckptool found by itself contains a key that could loosen the checks."""
    for key, value in table.items():
        if key.replace("-", "_") in _NAMED_ONLY or value is False:
            what = f"a policy that is found can only add requirements, and has {key!r}"
            raise TargetError(what, next="name it with --policy, or leave it aside with --no-policy")


def _check_file(lock: str) -> None:
    """Raise TargetError if the lock of a policy that ckptool found is not a regular file.

    Only a policy that --policy names may read its lock from an open descriptor.
    """
    try:
        refuse_remote(lock)
        open_source(file_of(lock)).close()
    except UnreadableError as error:
        raise TargetError(f"the lock {quoted(lock)} cannot be read: {error.what}", next=error.step) from error


def _project_table(path: str) -> dict[str, Any] | None:
    """Return the table [tool.ckptool] of a pyproject.toml, or None if it has no such table."""
    if b"ckptool" not in _content(path):
        return None
    table = _toml(path).get("tool", {})
    table = table.get("ckptool") if isinstance(table, dict) else None
    return table if isinstance(table, dict) else None


def _toml(path: str) -> dict[str, Any]:
    try:
        return toml.parsed(_content(path), path, "the policy")
    except MalformedError as error:
        raise TargetError(error.what, path=path) from error


def _content(path: str) -> bytes:
    try:
        return read_bytes(path, _MAX_BYTES)
    except UnreadableError as error:
        step = error.step or "a policy is a TOML file of expectations, such as: weights-only = true"
        raise TargetError(f"the policy cannot be read: {error.what}", path=path, next=step) from error


def _absolute(path: str) -> str:
    """Return the absolute path without resolving links, so that a link is matched by its own name."""
    return os.path.normpath(os.path.join(os.getcwd(), path))
