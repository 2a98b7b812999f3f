"""Pickles as data: decode to a graph, edit it, encode it again. Knows nothing of torch."""

from __future__ import annotations

from .compare import difference
from .decode import Decoded, decode
from .encode import encode
from .phrase_comparing import Outside, Refs
from .respelled import respelled

__all__ = ["Decoded", "Outside", "Refs", "decode", "difference", "encode", "respelled"]
