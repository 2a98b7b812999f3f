"""Making a checkpoint plain, and making sure that it is: the edit, and the check that torch.load takes its result."""

from __future__ import annotations

from .checkpoint import Checkpoint
from .checks.storages import storage_flaws
from .checks.torch_lists import NEWEST, allowed, registered
from .checks.weights_only import WRONG_SUFFIX, weights_only
from .edits.sanitize import sanitize as sanitized
from .edits.sharded import local_parts as parts_of
from .errors import RefusedError
from .human import argument, listed, salvage_step
from .pickles import decode, encode
from .pickles.nodes import Ref

__all__ = ["sanitize"]

#: What became plain may be what torch fails at: a second look finds it.
_ROUNDS = 3


def sanitize(
    checkpoint: Checkpoint, *, as_state_dict: bool = False, drop_unknown: bool = False, local_parts: bool = False
) -> Checkpoint:
    """Make everything plain that ``torch.load(path)`` of torch 2.6 and later does not load by default.

    ``local_parts`` puts what one rank had in the place of tensors that are spread over ranks. See
    ``ckptool.edits.sanitize``; raises RefusedError as well where torch would still refuse the result.
    """
    # The dtypes that newer versions list cannot be changed into others; what they register is not there before.
    names = allowed(NEWEST) | registered("2.6")
    if local_parts:
        checkpoint = parts_of(checkpoint)
    edited = checkpoint.tolerating()
    for _ in range(_ROUNDS if drop_unknown else 1):
        unfit = _unfit(edited)
        edited = sanitized(edited, names, unfit, as_state_dict=as_state_dict, drop_unknown=drop_unknown).tolerating()
        if not _unfit(edited):
            break
    return _checked(edited)


def _unfit(checkpoint: Checkpoint) -> set[Ref]:
    """What no other form makes loadable: calls that torch fails at, and what is not followed."""
    flaws = (flaw for flaw in storage_flaws(checkpoint) if flaw.code in ("geometry", "arguments") and flaw.refused)
    return {*checkpoint.survey.unfollowed, *(flaw.ref for flaw in flaws)}


def _checked(edited: Checkpoint) -> Checkpoint:
    """Return the result without what no longer leads anywhere; RefusedError where ``validate`` would refuse it."""
    written = edited.regraphed(decode(encode(edited.graph)).graph) if edited.edited else edited
    flaws = storage_flaws(written)
    found = weights_only(written, flaws)
    left = [blocker.name or blocker.rule for blocker in found.blockers if blocker.rule != WRONG_SUFFIX]
    left += dict.fromkeys(written.survey.unfollowed.values())
    if left:
        step = salvage_step(edited.path) if flaws else f"ckptool validate {argument(edited.path)} says where"
        raise RefusedError(f"torch.load would still refuse it: {listed(left)}", path=edited.path, next=step)
    return written
