"""The words of a verdict: what loading a file may do."""

from __future__ import annotations

from typing import Final

#: Every pickle names what is on torch's list for weights_only, and nothing else; or there is none, and nothing is run.
WEIGHTS_ONLY: Final = "weights-only"
#: Something acts on the machine when it is unpickled.
UNSAFE: Final = "unsafe"
#: It is a program, which runs by design.
PROGRAM: Final = "program"
#: It names what is not on the list, or cannot be followed to its end.
UNKNOWN: Final = "unknown"
#: The worst first.
VERDICTS: Final = (UNSAFE, PROGRAM, UNKNOWN, WEIGHTS_ONLY)
