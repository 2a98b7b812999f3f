"""The library: ``import ckptool`` gives these. Neither torch nor click is imported by it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .checkpoint import Change, Checkpoint, file_mode
from .checks.policy import Policy, policy_of
from .edits import DeviceMap, add_prefix, remap_devices, strip_prefix, strip_wrappers
from .edits.entries import Scalar, drop, extract, keep, set_entry, unset, wrap
from .edits.keys import EVERY
from .errors import CkptoolError, RefusedError, TargetError
from .locations import MapLocation
from .names import Globs
from .objects import parse_path
from .opening import open_checkpoint
from .planning import plan_of
from .report import inspection, key_listing
from .salvaging import Lost, Salvaged, salvage
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
    "drop",
    "edit",
    "extract",
    "inspect",
    "keep",
    "keys",
    "load",
    "match",
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
        from .matching import named_like, wanted_of_checkpoint

        shapes = {name: value.shape for name, value in wanted_of_checkpoint(like, same=key).tensors.items()}
        return named_like(checkpoint, shapes, like.path, by_order=by_order, key=key, only=only)
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


def match(
    path: Path,
    target: Path | Mapping[str, Any] | torch.nn.Module | None = None,
    *,
    model: str | None = None,
    key: str | None = None,
    target_key: str | None = None,
    anywhere: bool = False,
    strict: bool = True,
) -> dict[str, Any]:
    """What ``ckptool match --format json`` prints, schema ``ckptool.match/1``: what would load, and the shortest edit.

    ``target`` is another checkpoint, a lock file, a model, or a mapping of names to tensors; ``model`` names a
    callable, "package.module:callable", that is imported and run. ``key`` and ``target_key`` choose among several
    state dicts. With ``anywhere`` it does not matter where in the file the state dict stands, without ``strict``
    neither do missing and unexpected keys. Raises TargetError where one of the two has no state dict.
    """
    from .matching import match_checkpoint, wanted_of

    wanted = wanted_of(target, model, target_key)
    with open(path) as checkpoint:
        return match_checkpoint(checkpoint, wanted, key=key, anywhere=anywhere, strict=strict).report


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
