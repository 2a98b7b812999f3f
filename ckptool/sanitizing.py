"""Making a checkpoint plain, and making sure that it is: the edit, and the check that torch.load takes its result."""

from __future__ import annotations

from .checkpoint import Checkpoint
from .checks.torch_lists import NEWEST, allowed, registered
from .checks.weights_only import graph_blockers
from .edits.sanitize import sanitize as sanitized
from .edits.sharded import local_parts as parts_of
from .errors import RefusedError
from .human import listed
from .pickles import decode, encode

__all__ = ["sanitize"]


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
    edited = sanitized(checkpoint, names, as_state_dict=as_state_dict, drop_unknown=drop_unknown)
    left = graph_blockers(decode(encode(edited.graph)).graph) if edited.edited else []
    if left:
        reasons = listed([blocker.name or blocker.rule for blocker in left])
        raise RefusedError(f"torch.load would still refuse it: {reasons}", path=checkpoint.path)
    return edited
