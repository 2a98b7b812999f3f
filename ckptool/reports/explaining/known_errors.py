"""All known errors: the message, its cause, the command that helps, and Python code that does the same.

The tables are data: ``explanation`` finds the entry for a text, and ``docs/errors.md`` is generated from all entries.
"""

from __future__ import annotations

from typing import Final

from .class_errors import CLASS_ERRORS
from .file_errors import DEVICE_ERRORS, FILE_ERRORS, FORMAT_ERRORS
from .library_errors import LIBRARY_ERRORS
from .state_dict_errors import STATE_DICT_ERRORS

#: The first error that matches counts.
KNOWN_ERRORS: Final = (
    *STATE_DICT_ERRORS,
    *DEVICE_ERRORS,
    *FILE_ERRORS,
    *FORMAT_ERRORS,
    *CLASS_ERRORS,
    *LIBRARY_ERRORS,
)
