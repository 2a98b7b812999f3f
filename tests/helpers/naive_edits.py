"""Edits done naively on what torch loads."""

from __future__ import annotations


def strip(name: str) -> str:
    return name[7:] if name.startswith("module.") else name


def without_metadata(loaded: object) -> object:
    """``_metadata`` follows the keys, which test_metadata.py checks against torch's own function."""
    work = [loaded]
    while work:
        value = work.pop()
        getattr(value, "__dict__", {}).pop("_metadata", None)
        work += list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return loaded
