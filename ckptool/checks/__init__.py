"""Checks: what can be said about a checkpoint, as plain data."""

from __future__ import annotations

from .findings import Finding, findings
from .storages import Flaw, storage_flaws
from .weights_only import Blocker, Verdict, weights_only

__all__ = ["Blocker", "Finding", "Flaw", "Verdict", "findings", "storage_flaws", "weights_only"]
