"""The entry point of ``python -m ckptool`` and of the command ``ckptool``.

Importing the command line takes most of the time of a short run. ^C during the import exits as quietly as later.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from types import FrameType


def _quietly(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def _leave(code: int) -> None:
    """Exit at once, because freeing all objects takes longer than a short command.

    Nothing remains to be done: files are closed, and temporary files are removed.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
    os._exit(code)


def main() -> None:
    """Run the command line and exit with its code."""
    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler  # a shell that runs ckptool in the background ignores SIGINT
    if ours:
        # An exception during an import may be swallowed, or turn into another one.
        signal.signal(signal.SIGINT, _quietly)
    # Imports and commands make millions of small objects and few cycles. Scanning the objects would take longer than
    # making them.
    gc.disable()
    try:
        from .cli.main import main as run

        if ours:
            signal.signal(signal.SIGINT, before)
        run()
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
    except SystemExit as end:
        if ours:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work is done, and its exit code stands
        _leave(end.code if isinstance(end.code, int) else 1)


if __name__ == "__main__":
    main()
