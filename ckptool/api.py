"""The library: ``import ckptool`` gives these. Neither torch nor click is imported by it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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
    "drop",
    "extract",
    "inspect",
    "keep",
    "keys",
    "load",
    "match",
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
