"""The only room that opens files for writing: it runs plans.

``output`` makes a new file, whole or not at all; ``in_place`` appends to one, so that it is the old version or the
new one at every instant; ``copying`` moves the bytes of both.
"""

from __future__ import annotations

from .copying import rehearse
from .folder import check_folder, write_files
from .in_place import append, check_idle, shorten
from .output import HASH, Written, check_output, write_plan
from .staged import as_planned

__all__ = [
    "HASH",
    "Written",
    "append",
    "as_planned",
    "check_folder",
    "check_idle",
    "check_output",
    "rehearse",
    "shorten",
    "write_files",
    "write_plan",
]
