"""What a checkpoint would load into: names and shapes against names and shapes, and the edit that makes them meet.

Two mappings of names and shapes come in, plain data goes out: no tensor bytes are read. Only ``targets`` opens files,
and builds the model that is named to it.
"""

from __future__ import annotations

from .applying import named_like
from .pairing import in_order, paired
from .result import Match, match_checkpoint
from .targets import wanted_of
from .wanted import Shaped, Wanted, names_of, wanted_of_checkpoint, wanted_of_lock, wanted_of_names

__all__ = [
    "Match",
    "Shaped",
    "Wanted",
    "in_order",
    "match_checkpoint",
    "named_like",
    "names_of",
    "paired",
    "wanted_of",
    "wanted_of_checkpoint",
    "wanted_of_lock",
    "wanted_of_names",
]
