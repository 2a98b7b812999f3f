"""All known errors: the message, its cause, the command that helps, and Python code that does the same.

The tables are data: ``explanation`` finds the entry for a text, and ``docs/errors.md`` is generated from all entries.
New errors and cases are rows of ``errors.toml``.
"""

from __future__ import annotations

from typing import Final

from .answers import entry_answer, key_answer
from .class_errors import CLASS_ERRORS
from .file_errors import DEVICE_ERRORS, FILE_ERRORS, FORMAT_ERRORS
from .library_errors import LIBRARY_ERRORS
from .state_dict_errors import STATE_DICT_ERRORS
from .table import with_rows

#: The first error that matches counts.
KNOWN_ERRORS: Final = with_rows(
    (*STATE_DICT_ERRORS, *DEVICE_ERRORS, *FILE_ERRORS, *FORMAT_ERRORS, *CLASS_ERRORS, *LIBRARY_ERRORS),
    {"entry": entry_answer, "key": key_answer},
)
