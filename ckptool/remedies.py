"""The next command for a checkpoint, as findings and verdicts print it: it works, or it is not printed."""

from __future__ import annotations

from .checkpoint import Checkpoint
from .checks.findings import command
from .checks.torch_lists import NEWEST, allowed, registered
from .container import AMBIGUOUS, CUT, DAMAGED, UNEDITABLE
from .edits.sanitize import sanitize
from .edits.sharded import local_parts
from .errors import CkptoolError
from .sharding import is_sharded

__all__ = ["sanitize_step"]

_HOPELESS = AMBIGUOUS | UNEDITABLE | {CUT, DAMAGED}


def sanitize_step(checkpoint: Checkpoint) -> str:
    """The ``sanitize`` that makes plain ``torch.load(path)`` take the checkpoint, "" where none would.

    The edit is tried, without output: which options it takes is nothing that can be told from outside.
    """
    if any(problem.code in _HOPELESS for problem in checkpoint.container.problems):
        return ""
    sharded = any(is_sharded(entry.tensor) for entry in checkpoint.survey.tensors)
    modules = bool(checkpoint.survey.modules)
    names = allowed(NEWEST) | registered("2.6")
    for drop_unknown in (False, True):
        try:
            whole = local_parts(checkpoint) if sharded else checkpoint
            sanitize(whole, names, as_state_dict=modules, drop_unknown=drop_unknown)
        except CkptoolError:
            continue
        asked = {"--as-state-dict": modules, "--local-parts": sharded, "--drop-unknown": drop_unknown}
        return command(
            "sanitize", checkpoint.path, *(name for name, wanted in asked.items() if wanted), word="loadable"
        )
    return ""
