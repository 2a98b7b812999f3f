"""The next command for a checkpoint, as findings and verdicts print it: it works, or it is not printed."""

from __future__ import annotations

from .checkpoint import Checkpoint
from .checks.findings import command
from .checks.storages import storage_flaws
from .checks.weights_only import WRONG_SUFFIX, weights_only
from .container import AMBIGUOUS, CUT, DAMAGED, UNEDITABLE
from .errors import CkptoolError
from .human import rename_step
from .sanitizing import sanitize
from .sharding import is_sharded

__all__ = ["sanitize_step"]

#: Objects of a pickle beyond which the edit is not tried for the sake of a hint: it takes as long as ``sanitize``.
_MOST_TRIED = 100_000
_HOPELESS = AMBIGUOUS | UNEDITABLE | {CUT, DAMAGED}


def sanitize_step(checkpoint: Checkpoint) -> str:
    """The ``sanitize`` that makes plain ``torch.load(path)`` take the checkpoint, "" where none would.

    The edit is tried, without output: only that shows which options it takes.
    """
    if len(checkpoint.graph.nodes) > _MOST_TRIED:
        return ""
    if any(problem.code in _HOPELESS for problem in checkpoint.container.problems):
        return ""
    extension = ""
    if checkpoint.path.endswith(".safetensors"):
        if all(
            blocker.rule == WRONG_SUFFIX for blocker in weights_only(checkpoint, storage_flaws(checkpoint)).blockers
        ):
            return rename_step(checkpoint.path, ".pth")
        extension = ".pth"
    sharded = any(is_sharded(entry.tensor) for entry in checkpoint.survey.tensors)
    modules = bool(checkpoint.survey.modules)
    for drop_unknown in (False, True):
        try:
            sanitize(checkpoint, as_state_dict=modules, drop_unknown=drop_unknown, local_parts=sharded)
        except CkptoolError:
            continue
        asked = {"--as-state-dict": modules, "--local-parts": sharded, "--drop-unknown": drop_unknown}
        options = (name for name, wanted in asked.items() if wanted)
        return command("sanitize", checkpoint.path, *options, word="loadable", extension=extension)
    return ""
