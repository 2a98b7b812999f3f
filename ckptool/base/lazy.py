"""Modules of ckptool that are imported by their names, when they are first needed: the one place that does so."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def module(name: str) -> ModuleType:
    """Import and return ``ckptool.NAME``."""
    return import_module(f"ckptool.{name}")
