"""Making a checkpoint plain, and making sure that it is: the edit, and the check that torch.load takes its result."""

from __future__ import annotations

from .checkpoint import Checkpoint
from .checks.torch_lists import NEWEST, allowed, registered
from .checks.weights_only import graph_blockers
from .edits.sanitize import sanitize as sanitized
from .errors import RefusedError
from .human import listed
from .pickles import decode, encode

__all__ = ["sanitize"]


def sanitize(checkpoint: Checkpoint, *, as_state_dict: bool = False, drop_unknown: bool = False) -> Checkpoint:
    """Make everything plain that ``torch.load(path)`` of torch 2.6 and later does not load by default.

    See ``ckptool.edits.sanitize``; raises RefusedError as well where torch would still refuse the result.
    """
    # The dtypes that newer versions list cannot be changed into others; what they register is not there before.
    names = allowed(NEWEST) | registered("2.6")
    edited = sanitized(checkpoint, names, as_state_dict=as_state_dict, drop_unknown=drop_unknown)
    left = graph_blockers(decode(encode(edited.graph)).graph) if edited.edited else []
    if left:
        reasons = listed([blocker.name or blocker.rule for blocker in left])
        raise RefusedError(f"torch.load would still refuse it: {reasons}", path=checkpoint.path)
    return edited
