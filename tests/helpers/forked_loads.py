"""Load the pickle in each folder, in a process of its own whose current folder it is: python forked_loads.py FOLDER ...

torch is imported once, before the processes part.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from contextlib import suppress

#: Seconds for one pickle.
_LIMIT = 60


def main() -> None:
    import torch  # noqa: F401

    for folder in sys.argv[1:]:
        child = os.fork()
        if not child:
            _load(folder)
        os.waitpid(child, 0)


def _load(folder: str) -> None:
    """Load a pickle, write what was raised into ``error``, and end the process."""
    signal.alarm(_LIMIT)
    os.setsid()
    os.chdir(folder)
    sys.path.insert(0, folder)
    for stream, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, flags), stream)
    try:
        with open("sample.pkl", "rb") as file:
            pickle.load(file)
    except BaseException:
        with suppress(OSError), open("error", "w") as file:
            traceback.print_exc(file=file)
    os._exit(0)


if __name__ == "__main__":
    main()
