"""The names and rules of ``torch.load(weights_only=True)``, by torch version: a base, and the changes in each version.

``torch_lists.json`` has the lists and their source; ``make torch-lists`` compares them. A version is written "2.6",
because releases within a minor version never differ here. CUDA and CPU builds have the same lists.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Final

from ..base.lazy import regex, table
from ..base.records import NamedTuple
from ..pickles import opcodes as op


class ListChange(NamedTuple):
    """Names that a version added to or removed from the default list, and names that it ``registered`` separately.

    Registered names are on the user's own list after a plain ``import torch``; ``unregistered`` names no longer are.
    """

    version: str
    added: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
    registered: frozenset[str] = frozenset()
    unregistered: frozenset[str] = frozenset()


def qualified(module: str, names: str) -> frozenset[str]:
    """Return the names in ``names``, which spaces separate, with their module."""
    return frozenset(f"{module}.{name}" for name in names.split())


def _names(by_module: Mapping[str, str]) -> frozenset[str]:
    return frozenset[str]().union(*(qualified(module, names) for module, names in by_module.items()))


#: All versions, from oldest to newest; torch 1.13 is the first with weights_only.
HISTORY: Final = tuple(
    ListChange(row["version"], *(_names(row.get(field, {})) for field in ListChange._fields[1:]))
    for row in table("safety/torch_lists")["versions"]
)

NEWEST: Final = "2.15"
VERSIONS: Final[tuple[str, ...]] = tuple(change.version for change in HISTORY)
_VERSION: Final = regex(r"__version__ = ['\"](\d+)\.(\d+)")


def installed_version(folders: Iterable[str]) -> str:
    """Return the version of the torch in the first of these folders that has one, as listed here, or "" without one.

    torch is not imported. A version that is newer or older than all listed ones counts as the nearest.
    """
    for folder in folders:
        with suppress(OSError, ValueError), open(os.path.join(folder, "torch", "version.py"), encoding="utf-8") as file:
            if match := _VERSION.search(file.read(1000)):
                known = [tuple(map(int, version.split("."))) for version in VERSIONS]
                own = min(max((int(match[1]), int(match[2])), known[0]), known[-1])
                return VERSIONS[known.index(own)] if own in known else NEWEST
    return ""


#: The version of the installed torch, "" without one.
INSTALLED: Final = installed_version(sys.path)
#: The version that verdicts are about unless another is named.
DEFAULT: Final = INSTALLED or NEWEST


class Rules(NamedTuple):
    """The rules, apart from lists, in which versions differ. In 2.15 all are true except one.

    ``newobj_listed``: NEWOBJ makes any listed class, not only
    Parameter. ``build_listed``: BUILD sets the state of any listed class, not only of Tensor, Parameter and
    OrderedDict. ``checks_setitem``: SETITEM and SETITEMS apply only to dict, OrderedDict and Counter, not to other
    objects that accept them (a list, a tensor, a bytearray). ``appends_registered``: APPEND and APPENDS also apply to a
    registered class that is a list (only in 2.14). ``checks_record_size``: a storage in a zip file must have the size
    given in the pickle. ``reads_safetensors``: a file named .safetensors is read as safetensors.
    """

    newobj_listed: bool
    build_listed: bool
    checks_setitem: bool
    appends_registered: bool
    checks_record_size: bool
    reads_safetensors: bool


@cache
def allowed(version: str) -> frozenset[str]:
    """Return the globals ("module.name") that are allowed by default."""
    names: frozenset[str] = frozenset()
    for change in _history(version):
        names = (names - change.removed) | change.added
    return names


@cache
def registered(version: str) -> frozenset[str]:
    """Return the names that a plain ``import torch`` adds to the user's list."""
    names: frozenset[str] = frozenset()
    for change in _history(version):
        names = (names - change.unregistered) | change.registered
    return names


@cache
def ever_listed() -> frozenset[str]:
    """Return the names that any version lists or registers."""
    return frozenset().union(*(change.added | change.registered for change in HISTORY))


def list_of(version: str, names: Collection[str]) -> str:
    """Return the words for the list of a version; without the number if no version ever listed one of the names."""
    return "torch's list" if ever_listed().isdisjoint(names) else f"torch {version}'s list"


@cache
def refused_opcodes(version: str) -> frozenset[int]:
    """Return the opcodes that the restricted unpickler does not know; torch 1.13 cannot read a float."""
    return frozenset(op.NAMES) - op.ACCEPTED | (frozenset() if _since(version, "2.0") else {op.BINFLOAT})


def maps_python2(version: str, protocol: int = 2) -> bool:
    """Return whether Python 2 names (``__builtin__.set``) are replaced before they are looked up.

    torch 2.4 and 2.5 do this only in a pickle whose PROTO says 2; a pickle without PROTO counts as another protocol.
    """
    return _since(version, "2.6") or (protocol == 2 and _since(version, "2.4"))


def newobj_targets(version: str) -> frozenset[str]:
    """Return the names that NEWOBJ does not refuse by name; names that are not classes fail at run time."""
    if rules(version).newobj_listed:
        return allowed(version) | registered(version)
    return frozenset(("torch.nn.parameter.Parameter",))


@cache
def rules(version: str) -> Rules:
    """Return the rules apart from the lists."""
    return Rules(
        newobj_listed=_since(version, "2.6"),
        build_listed=_since(version, "2.6"),
        checks_setitem=_since(version, "2.10"),
        appends_registered=version == "2.14",
        checks_record_size=_since(version, "2.10"),
        reads_safetensors=_since(version, "2.13"),
    )


def _since(version: str, first: str) -> bool:
    return len(_history(version)) >= len(_history(first))


def _history(version: str) -> tuple[ListChange, ...]:
    if version not in VERSIONS:
        raise ValueError(f"no lists for torch {version!r}; there are lists for {', '.join(VERSIONS)}")
    return HISTORY[: VERSIONS.index(version) + 1]
