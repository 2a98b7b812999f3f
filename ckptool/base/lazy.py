"""Import modules of ckptool by name when they are first needed; no other module does so."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType


@cache
def module(name: str) -> ModuleType:
    """Import and return ``ckptool.NAME``."""
    return import_module(f"ckptool.{name}")
