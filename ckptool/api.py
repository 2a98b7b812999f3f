"""The library: ``import ckptool`` gives these. Neither torch nor click is imported by it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .checkpoint import Change, Checkpoint, file_mode
from .checks.policy import Policy, policy_of
from .edits import DeviceMap, add_prefix, remap_devices, strip_prefix, strip_wrappers
from .edits.entries import Scalar, drop, extract, keep, set_entry, unset, wrap
from .errors import CkptoolError, RefusedError, TargetError
from .human import listed
from .locations import MapLocation
from .names import Globs
from .objects import parse_path
from .opening import open_checkpoint
from .planning import plan_of
from .report import inspection, key_listing
from .salvaging import Lost, Salvaged, salvage
from .source import Plan
from .survey import StateDict, TensorEntry
from .tensors import Tensor
from .write import Written, check_output, write_plan

if TYPE_CHECKING:
    import torch


__all__ = [
    "Change",
    "Checkpoint",
    "CkptoolError",
    "DeviceMap",
    "Lost",
    "Policy",
    "Salvaged",
    "Scalar",
    "StateDict",
    "Tensor",
    "TensorEntry",
    "Written",
    "add_prefix",
    "diff",
    "drop",
    "extract",
    "hash",
    "inspect",
    "keep",
    "keys",
    "load",
    "lock",
    "open",
    "remap_devices",
    "salvage",
    "sanitize",
    "save",
    "set_entry",
    "strip_prefix",
    "strip_wrappers",
    "unset",
    "validate",
    "wrap",
    "write_lock",
]

Path = str | os.PathLike[str]

open = open_checkpoint


def validate(
    path: Path,
    policy: Policy | Mapping[str, Any] | None = None,
    *,
    quick: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """What ``ckptool validate --format json`` prints of one file, schema ``ckptool.validate/1``.

    ``policy`` is what is expected, as a Policy or by the names that a policy file has. ``quick`` leaves out the
    checksums. Raises TargetError for a policy that makes no sense; what is wrong with the file is in the report.
    """
    from .validating import validation_report

    expected = policy if isinstance(policy, Policy) else policy_of(policy or {})
    return validation_report(os.fspath(path), expected, quick=quick, progress=progress)


def diff(
    a: Path,
    b: Path,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    ignore: Collection[str] = (),
    key: str | None = None,
    other_key: str | None = None,
    count: bool = True,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """What ``ckptool diff --format json`` prints, schema ``ckptool.diff/1``: ``same`` is the answer.

    Values are compared bit for bit; with ``rtol`` or ``atol`` by torch.allclose's rule, which needs torch. ``ignore``
    are words of ``comparing.difference.IGNORABLE``: device, prefix, order, container, dtype, stride, sharing,
    requires-grad. ``key`` and ``other_key`` (by default the same) name one state dict of each. Without ``count`` it is
    not counted how many elements differ. Raises UnreadableError for what is no checkpoint, TargetError for a key or
    word that there is not.
    """
    from .comparing.diff_report import diff_report

    with open(a) as one, open(b) as other:
        return diff_report(
            one,
            other,
            rtol=rtol,
            atol=atol,
            ignore=ignore,
            key=key,
            other_key=other_key,
            count=count,
            progress=progress,
        )


def lock(path: Path, *, content: bool = False, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    """What ``ckptool lock`` writes, schema ``ckptool.lock/1``: keys, shapes, dtypes, devices, types of entries.

    With ``content`` a hash of each tensor's values, too. ``validate(path, {"lock": FILE})`` compares with it.
    """
    from .comparing.lock import lock_of

    with open(path) as checkpoint:
        return lock_of(checkpoint, content=content, progress=progress)


def write_lock(
    path: Path,
    output: Path,
    *,
    content: bool = False,
    force: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Written:
    """Write the lock of a checkpoint to a file, whole or not at all; parameters and errors as for lock and save."""
    from .comparing.lock import lock_of, lock_text

    name = os.fspath(output)
    with open(path) as checkpoint:
        check_output(name, checkpoint.sources, force=force)
        text = lock_text(lock_of(checkpoint, content=content, progress=progress))
        return write_plan(Plan((text.encode("ascii"),)), name, checkpoint.sources, force=force)


def hash(
    path: Path,
    *,
    key: str | None = None,
    structure: bool = False,
    each: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """What ``ckptool hash --format json`` prints, schema ``ckptool.hash/1``.

    ``content`` is a fingerprint of names, shapes, dtypes and values alone, ``structure`` one without values. What goes
    in stands in ``comparing.fingerprint``. With ``structure`` no values are read; ``each`` adds a hash of each tensor.
    """
    from .comparing.fingerprint import fingerprint_report

    with open(path) as checkpoint:
        return fingerprint_report(checkpoint, key=key, structure=structure, each=each, progress=progress)


def sanitize(checkpoint: Checkpoint, *, as_state_dict: bool = False, drop_unknown: bool = False) -> Checkpoint:
    """Make everything plain that ``torch.load(path)`` of torch 2.6 and later does not load by default.

    Objects become dicts of their attributes, numpy scalars numbers, numpy arrays tensors, paths strings, and so on;
    ``as_state_dict`` turns pickled modules into their state dicts. Nothing is run. Raises RefusedError for what
    cannot be carried, which ``drop_unknown`` leaves out instead.
    """
    from .checks.torch_lists import NEWEST, allowed, registered
    from .checks.weights_only import graph_blockers
    from .edits.sanitize import sanitize as sanitized
    from .pickles import decode, encode

    # The dtypes that newer versions list cannot be changed into others; what they register is not there before.
    names = allowed(NEWEST) | registered("2.6")
    edited = sanitized(checkpoint, names, as_state_dict=as_state_dict, drop_unknown=drop_unknown)
    left = graph_blockers(decode(encode(edited.graph)).graph) if edited.edited else []
    if left:
        reasons = listed([blocker.name or blocker.rule for blocker in left])
        raise RefusedError(f"torch.load would still refuse it: {reasons}", path=checkpoint.path)
    return edited


def save(
    checkpoint: Checkpoint, path: Path, *, force: bool = False, progress: Callable[[int], None] | None = None
) -> Written:
    """Write a checkpoint: the edited metadata and the untouched bytes of its tensors.

    An unedited one is copied byte for byte. The output appears whole or not at all, with the mode of the
    input, or with ``force`` that of the file it replaces. ``progress`` is called with numbers of bytes.
    Raises RefusedError when the output exists or is the input, OutputError when it cannot be written.
    """
    name = os.fspath(path)
    # What cannot be written is said before the work, not after.
    check_output(name, checkpoint.sources, force=force)
    plan, _ = plan_of(checkpoint)
    mode = file_mode(checkpoint.source)
    return write_plan(plan, name, checkpoint.sources, force=force, mode=mode, progress=progress)


def inspect(path: Path, *, map_location: MapLocation = None) -> dict[str, Any]:
    """What ``ckptool inspect --format json`` prints, schema ``ckptool.inspect/1``."""
    with open(path) as checkpoint:
        return inspection(checkpoint, map_location)


def keys(
    path: Path,
    *,
    key: str | None = None,
    everything: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    sort: Literal["file", "name", "bytes"] = "file",
) -> dict[str, Any]:
    """What ``ckptool keys --format json`` prints, schema ``ckptool.keys/1``."""
    with open(path) as checkpoint:
        return key_listing(checkpoint, key=key, everything=everything, globs=Globs(include, exclude), sort=sort)


def load(
    path: Path,
    map_location: MapLocation = None,
    strip_prefix: str | None = None,
    key: str | None = None,
) -> dict[str, torch.Tensor]:
    """The state dict of a checkpoint as real tensors, ready for ``model.load_state_dict``.

    Loads with ``torch.load(weights_only=True, map_location=...)`` and takes the one state dict out, wherever
    it is; ``key`` names it where there are several. ``strip_prefix`` (such as "module.") is taken off the
    keys that have it. Raises TargetError when there is no state dict, or more than one and no ``key``.
    """
    from .edits.keys import renamed_modules, stripping
    from .edits.select import selected
    from .runtime import at_path, load_object

    with open(path) as checkpoint:
        chosen = selected(checkpoint, key)
        if len(chosen) != 1:
            there = ", ".join(repr(item.path) for item in chosen)
            what = f"there are {len(chosen)} state dicts: {there}" if chosen else "there is no state dict in it"
            raise TargetError(what, path=checkpoint.path, next="name one by key=..." if chosen else "torch.load it")
        steps = parse_path(chosen[0].path)
    found: Any = at_path(load_object(checkpoint.path, map_location), steps)
    if strip_prefix is None:
        return found  # type: ignore[no-any-return]
    rename = stripping(strip_prefix)
    renamed = type(found)((rename(name), value) for name, value in found.items())
    if len(renamed) < len(found):
        first: dict[str, str] = {}
        one, other = next((first[rename(key)], key) for key in found if first.setdefault(rename(key), key) != key)
        what = f"the keys {one!r} and {other!r} would both be called {rename(one)!r}"
        raise RefusedError(what, path=checkpoint.path, next="load it without strip_prefix and choose")
    metadata = getattr(found, "_metadata", None)
    if metadata is not None:
        # load_state_dict reads the versions of modules from it.
        values = list(metadata.values())
        moved = renamed_modules(list(metadata), rename)
        renamed._metadata = type(metadata)((path, values[source]) for path, _, source in moved)
    return renamed  # type: ignore[no-any-return]
