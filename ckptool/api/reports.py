"""From paths to reports: the JSON of the commands, typed."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..base.errors import TargetError
from ..base.globs import Globs
from ..base.map_location import MapLocation
from ..base.text import join_limited
from ..checkpoint.checkpoint import Checkpoint
from ..formats.opening import open_checkpoint as open

if TYPE_CHECKING:
    import torch

    from ..files.write.output import Written
    from ..reports.comparing.diff import DiffReport
    from ..reports.comparing.fingerprint import HashReport
    from ..reports.comparing.lock import Lock
    from ..reports.expectations import Policy
    from ..reports.inspection import InspectReport
    from ..reports.keys import KeysReport
    from ..reports.stats import StatsReport
    from ..reports.validate import ValidateReport


Path = str | os.PathLike[str]


def inspect(path: Path, *, map_location: MapLocation = None) -> InspectReport:
    """Return the JSON of ``ckptool inspect``, schema ``ckptool.inspect/1``."""
    from ..reports.inspection import inspection

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
) -> KeysReport:
    """Return the JSON of ``ckptool keys``, schema ``ckptool.keys/1``."""
    from ..reports.keys import key_listing

    with open(path) as checkpoint:
        return key_listing(checkpoint, key=key, everything=everything, globs=Globs(include, exclude), sort=sort)


def stats(
    path: Path,
    *,
    key: str | None = None,
    everything: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    sort: str = "file",
    progress: Callable[[int], None] | None = None,
) -> StatsReport:
    """Return the JSON of ``ckptool stats``, schema ``ckptool.stats/1``. Needs torch for the arithmetic.

    ``sort`` is "file", "name", or the name of a number, the largest first: "bytes", "numel", "min", "max", "mean",
    "std", "norm", "zeros", "nans" or "infs". ``progress`` is called with numbers of bytes. Tensors whose bytes are
    missing are named in ``summary.missing``.
    """
    from ..reports.stats import SORTS, statistics_of

    if sort not in SORTS:
        raise TargetError(f"rows cannot be sorted by {sort!r}", next=f"sort by {join_limited(SORTS, most=len(SORTS))}")
    globs = Globs(include, exclude)
    with open(path) as checkpoint:
        return statistics_of(checkpoint, key=key, everything=everything, globs=globs, sort=sort, progress=progress)


def get(source: Path | Checkpoint, key: str) -> Any:
    """Return the value at ``key``, a path as ``inspect`` prints it ("" or "." for the whole file), as Python values.

    Scalars, bytes, dicts, lists, tuples and sets are Python's own. A tensor is a ``TensorValue``: dtype, shape,
    location, and ``tolist()``, ``tobytes()``, ``numbers()``, ``numpy.asarray(value)``, which read from the file. An
    object of another class is an ``ObjectValue`` with its attributes. Nothing is run, and neither torch nor NumPy is
    needed. Raises TargetError where there is nothing at ``key``.
    """
    from ..reports.get import find_value, value_of

    # Tensors read from the file later: it is closed when the last of them goes.
    checkpoint, place = find_value(source if isinstance(source, Checkpoint) else open(source), key)
    return value_of(checkpoint, place.ref, place.path)


def validate(
    path: Path,
    policy: Policy | Mapping[str, Any] | None = None,
    *,
    quick: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ValidateReport:
    """Return the JSON of ``ckptool validate`` on one file, schema ``ckptool.validate/1``.

    ``policy`` says what is expected, as a Policy or with the keys of a policy file. ``quick`` leaves out the
    checksums. Raises TargetError for an invalid policy; what is wrong with the file is in the report.
    """
    from ..reports.expectations import Policy, policy_of
    from ..reports.validate import validation_report

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
) -> DiffReport:
    """Return the JSON of ``ckptool diff``, schema ``ckptool.diff/1``: ``same`` is the answer.

    Values are compared bit for bit; with ``rtol`` or ``atol`` by torch.allclose's rule, which needs torch. ``ignore``
    are words of ``comparing.diff.IGNORABLE``: device, prefix, order, container, dtype, stride, sharing,
    requires-grad. ``key`` and ``other_key`` (by default the same) name one state dict of each. Without ``count``
    differing elements are not counted. Raises UnreadableError for a file that is not a checkpoint, TargetError for an
    unknown key or word.
    """
    from ..reports.comparing.diff import diff_report

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


def lock(path: Path, *, content: bool = False, progress: Callable[[int], None] | None = None) -> Lock:
    """Return what ``ckptool lock`` writes, schema ``ckptool.lock/1``: keys, shapes, dtypes, devices, types of entries.

    ``content`` adds a hash of each tensor's values. ``validate(path, {"lock": FILE})`` compares with it.
    """
    from ..reports.comparing.lock import lock_of

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
    """Write the lock of a checkpoint to a file, atomically; parameters and errors are those of lock and save."""
    from ..files.sources import Plan
    from ..files.write.output import check_output, write_plan
    from ..reports.comparing.lock import lock_of, lock_text

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
) -> HashReport:
    """Return the JSON of ``ckptool hash``, schema ``ckptool.hash/1``.

    ``content`` is a fingerprint of names, shapes, dtypes and values alone, ``structure`` one without values;
    ``comparing.fingerprint`` says what is hashed. With ``structure`` no values are read; ``each`` adds a hash of each
    tensor.
    """
    from ..reports.comparing.fingerprint import hash_report

    with open(path) as checkpoint:
        return hash_report(checkpoint, key=key, structure=structure, each=each, progress=progress)


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
    """Return the JSON of ``ckptool match``, schema ``ckptool.match/1``: what would load, and the shortest edit.

    ``target`` is another checkpoint, a lock file, a model, or a mapping of names to tensors; ``model`` names a
    callable, "package.module:callable", that is imported and run. ``key`` and ``target_key`` choose among several
    state dicts. With ``anywhere`` it does not matter where in the file the state dict stands, without ``strict``
    neither do missing and unexpected keys. Raises TargetError where one of the two has no state dict.
    """
    from ..edits.like.match import match_checkpoint
    from ..edits.like.targets import match_target

    wanted = match_target(target, model, target_key)
    with open(path) as checkpoint:
        return match_checkpoint(checkpoint, wanted, key=key, anywhere=anywhere, strict=strict).report
