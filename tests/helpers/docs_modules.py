"""Modules of ``docs``, which is no part of the package."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from conftest import ROOT

__all__ = ["docs_module"]


def docs_module(name: str) -> ModuleType:
    """Return a module of ``docs``: the folder above it need not be on the path."""
    sys.path.insert(0, str(ROOT))
    try:
        return importlib.import_module(f"docs.{name}")
    finally:
        sys.path.remove(str(ROOT))
