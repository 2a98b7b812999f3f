"""The door to torch."""

from __future__ import annotations

from typing import Any

from ..errors import UnreadableError

__all__ = ["need_torch"]


def need_torch(purpose: str, path: str = "") -> Any:
    """The module torch; raises UnreadableError where it is not installed."""
    try:
        import torch
    except ImportError as error:
        hint = "pip install torch (a CPU build is enough)"
        raise UnreadableError(f"{purpose} needs torch, which is not installed", path=path, next=hint) from error
    return torch
