"""Edits: pure functions from a checkpoint to another. They open no file and print nothing."""

from __future__ import annotations

from .devices import DeviceMap, remap_devices
from .keys import add_prefix, rename_keys, strip_prefix, strip_wrappers

__all__ = ["DeviceMap", "add_prefix", "remap_devices", "rename_keys", "strip_prefix", "strip_wrappers"]
