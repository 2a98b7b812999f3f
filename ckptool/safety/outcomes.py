"""The words of a verdict on what loading a file may do."""

from __future__ import annotations

from typing import Final

#: Every pickle names only globals on torch's weights_only list, or there is no pickle; nothing is run.
WEIGHTS_ONLY: Final = "weights-only"
#: Something acts on the machine when it is unpickled.
UNSAFE: Final = "unsafe"
#: The file is a program, which runs by design.
PROGRAM: Final = "program"
#: A pickle names something that is not on the list, or cannot be followed to its end.
UNKNOWN: Final = "unknown"
#: All verdicts, the worst first.
VERDICTS: Final = (UNSAFE, PROGRAM, UNKNOWN, WEIGHTS_ONLY)
