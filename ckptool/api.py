"""The library: ``import ckptool`` gives these. Neither torch nor click is imported by it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal

from .checkpoint import Change, Checkpoint, file_mode
from .errors import CkptoolError, RefusedError, TargetError
from .locations import MapLocation
from .names import EVERY, Globs
from .objects import parse_path
from .opening import open_checkpoint
from .survey import StateDict, TensorEntry
from .tensors import Tensor

if TYPE_CHECKING:
    import torch

    from .checks.policy import Policy
    from .edits.devices import DeviceMap, remap_devices
    from .edits.entries import Scalar, drop, extract, keep, set_entry, unset, wrap
    from .edits.keys import add_prefix, strip_prefix, strip_wrappers
    from .salvaging import Lost, Salvaged, salvage
    from .write import Written

#: Names whose modules are imported when they are first asked for: a command needs one or two of them.
_LATE: Final = {
    "Policy": "checks.policy",
    **dict.fromkeys(("DeviceMap", "remap_devices"), "edits.devices"),
    **dict.fromkeys(("Scalar", "drop", "extract", "keep", "set_entry", "unset", "wrap"), "edits.entries"),
    **dict.fromkeys(("add_prefix", "strip_prefix", "strip_wrappers"), "edits.keys"),
    **dict.fromkeys(("Lost", "Salvaged", "salvage"), "salvaging"),
    "Written": "write",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f".{_LATE[name]}", __package__), name)
        return found


__all__ = [
    "Change",
    "Checkpoint",
    "CkptoolError",
    "DeviceMap",
    "Globs",
    "Lost",
    "Policy",
    "Salvaged",
    "Scalar",
    "StateDict",
    "Tensor",
    "TensorEntry",
    "Written",
    "add_prefix",
    "average",
    "cast",
    "diff",
    "drop",
    "edit",
    "extract",
    "hash",
    "inspect",
    "keep",
    "keys",
    "load",
    "lock",
    "merge",
    "open",
    "redact",
    "remap_devices",
    "rename",
    "salvage",
    "sanitize",
    "save",
    "set_entry",
    "slim",
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
    from .checks.policy import Policy, policy_of
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
    from .source import Plan
    from .write import check_output, write_plan

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
    from .sanitizing import sanitize as sanitized

    return sanitized(checkpoint, as_state_dict=as_state_dict, drop_unknown=drop_unknown)


def rename(
    checkpoint: Checkpoint,
    table: Mapping[str, str] | None = None,
    *,
    glob: tuple[str, str] | None = None,
    regex: tuple[str, str] | None = None,
    like: Checkpoint | None = None,
    by_order: bool = False,
    key: str | None = None,
    only: Globs = EVERY,
) -> Checkpoint:
    """Rename keys of state dicts, in exactly one way: by a table of names, by ``glob`` (old, new), by ``regex``
    (expression, replacement), or after the state dict of the checkpoint ``like``, by name or ``by_order``.

    ``_metadata`` and the names of parameters in optimizers follow. Raises RefusedError where nothing matches or two
    keys would become one, TargetError for patterns that make no sense.
    """
    from .edits import rename as renaming

    if sum(way is not None for way in (table, glob, regex, like)) != 1:
        raise TargetError("one way to rename is needed", next="table, glob=, regex= or like=")
    if glob is not None:
        return renaming.by_glob(checkpoint, *glob, key=key, only=only)
    if regex is not None:
        return renaming.by_regex(checkpoint, *regex, key=key, only=only)
    if like is not None:
        table = renaming.ordered_table(checkpoint, like, key=key)
    return renaming.by_table(checkpoint, table or {}, key=key, only=only)


def slim(
    checkpoint: Checkpoint, *, dedupe: bool = False, purpose: Literal["inference"] | None = None, only: Globs = EVERY
) -> Checkpoint:
    """Leave out the bytes that no tensor reads; ``purpose`` "inference" drops optimizers, schedulers and EMA first,
    ``dedupe`` makes storages with the same bytes one. See ``ckptool.edits.slim``."""
    from .edits.slim import slim as slimmed

    return slimmed(checkpoint, dedupe=dedupe, purpose=purpose, only=only)


def cast(
    checkpoint: Checkpoint, dtype: str, *, key: str | None = None, only: Globs = EVERY, strict: bool = False
) -> Checkpoint:
    """Give floating tensors another dtype, as ``Tensor.to`` does; the values are computed while ``save`` writes.

    With patterns to include in ``only`` just what matches is cast, whatever its dtype. Tensors that share a storage go
    on sharing it. ``strict`` lets ``save`` raise RefusedError where a finite value would become infinite or NaN.
    """
    from .edits.cast import cast as casted
    from .runtime import cast_elements

    return casted(checkpoint, dtype, cast_elements, key=key, only=only, strict=strict)


def merge(
    checkpoint: Checkpoint,
    other: Checkpoint,
    *,
    entries: Sequence[tuple[str, str]] = (),
    key: str | None = None,
    other_key: str | None = None,
    only: Globs = EVERY,
    add: bool = True,
) -> Checkpoint:
    """Take tensors of another checkpoint's state dict into this one, or with ``entries`` whole entries (path there,
    path here). ``other`` must stay open until the result is saved. See ``ckptool.edits.merge``."""
    from .edits import merge as merging

    if entries:
        return merging.merge_entries(checkpoint, other, entries)
    return merging.merge(checkpoint, other, key=key, other_key=other_key, only=only, add=add)


def average(
    checkpoints: Sequence[Checkpoint],
    *,
    weights: Sequence[float] | None = None,
    dtype: Literal["float64", "float32"] = "float64",
    key: str | None = None,
    only: Globs = EVERY,
) -> Checkpoint:
    """The first checkpoint with the mean of all in place of its floating tensors; computed while ``save`` writes.

    All of them must stay open until then. Raises RefusedError where they do not go together.
    """
    from .edits.average import average as averaged
    from .runtime import mean_elements

    return averaged(checkpoints, mean_elements, weights=weights, dtype=dtype, key=key, only=only)


def redact(
    checkpoint: Checkpoint,
    kinds: Sequence[Literal["paths", "users", "sources", "args"]] = ("paths", "users", "sources", "args"),
    *,
    only: Globs = EVERY,
) -> Checkpoint:
    """Take out what a published file should not tell. See ``ckptool.edits.redact``."""
    from .edits.redact import redact as redacted

    return redacted(checkpoint, kinds, only=only)


def edit(checkpoint: Checkpoint, steps: Iterable[tuple[str, str | bool]]) -> Checkpoint:
    """Several edits in the order given, as ``ckptool edit`` has them: ``[("extract", "state_dict"), ("to", "cpu")]``.

    Raises TargetError for a step that does not exist, and what the edits raise.
    """
    from .steps import edit as edited

    return edited(checkpoint, steps)


def save(
    checkpoint: Checkpoint, path: Path, *, force: bool = False, progress: Callable[[int], None] | None = None
) -> Written:
    """Write a checkpoint: the edited metadata and the untouched bytes of its tensors.

    An unedited one is copied byte for byte. The output appears whole or not at all, with the mode of the
    input, or with ``force`` that of the file it replaces. ``progress`` is called with numbers of bytes.
    Raises RefusedError when the output exists or is the input, OutputError when it cannot be written.
    """
    from .planning import plan_of
    from .write import check_output, write_plan

    name = os.fspath(path)
    # What cannot be written is said before the work, not after.
    check_output(name, checkpoint.sources, force=force)
    plan, _ = plan_of(checkpoint)
    mode = file_mode(checkpoint.source)
    return write_plan(plan, name, checkpoint.sources, force=force, mode=mode, progress=progress)


def inspect(path: Path, *, map_location: MapLocation = None) -> dict[str, Any]:
    """What ``ckptool inspect --format json`` prints, schema ``ckptool.inspect/1``."""
    from .report import inspection

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
    from .report import key_listing

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
