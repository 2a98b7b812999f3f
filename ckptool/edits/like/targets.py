"""From what a caller names to what it wants: a file, a lock file, a model, a mapping."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...base.errors import TargetError
from ...formats.opening import open_checkpoint
from ...values.torch.loads import model_state
from .wanted import Wanted, is_lock, wanted_of_checkpoint, wanted_of_lock, wanted_of_names


def wanted_of(target: Any, model: str | None = None, key: str | None = None, *, same: str | None = None) -> Wanted:
    """What a target wants: a path, a model, a mapping of names to tensors; or ``model``, which names a callable that
    is imported and run.

    ``key`` chooses among the state dicts of a file, ``same`` is the path of one that is preferred. Raises TargetError
    where there is nothing to match with.
    """
    if (target is None) == (model is None):
        raise TargetError("match takes a target or a model, one of them", next="name a file, or --model")
    if model is not None or not isinstance(target, str | os.PathLike):
        if key is not None:
            raise TargetError("--target-key goes with a file: a model has one state dict")
        if model is not None:
            return wanted_of_names(model_state(model), model, "model")
        state = target.state_dict() if hasattr(target, "state_dict") else target
        if not isinstance(state, Mapping):
            raise TargetError(f"a {type(target).__name__} is no path, no model and no mapping")
        return wanted_of_names(state, type(target).__name__)
    name = os.fspath(target)
    if is_lock(name):
        return wanted_of_lock(name, key, same=same)
    with open_checkpoint(name) as checkpoint:
        return wanted_of_checkpoint(checkpoint, key, same=same)
