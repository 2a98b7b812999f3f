"""Pickles as data: decode to a graph, edit it, encode it again. Knows nothing of torch."""

from __future__ import annotations

from .compare import Outside, difference
from .decode import Decoded, decode
from .encode import encode

__all__ = ["Decoded", "Outside", "decode", "difference", "encode"]
