"""Run one command and print what it cost: wall seconds, CPU seconds, peak memory (KiB), exit code.

`python -I -S probe.py LOG COMMAND ...`; the command's stdout goes to /dev/null, its stderr to LOG.

This is a separate program because Linux starts a child's ru_maxrss at the peak of the process that
spawned it: a runner that has imported anything would hide the memory of a small command. This program
imports only modules that the interpreter has already loaded, so it hides little; measure.py measures how much.
"""

import os
import sys
import time


def main(log: str, command: list[str]) -> None:
    """Spawn `command`, wait for it and for everything it waited for, and print one line."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_OPEN, 2, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
    ]
    began = time.perf_counter()
    process = os.posix_spawnp(command[0], command, os.environ, file_actions=actions)
    _, status, usage = os.wait4(process, 0)  # also covers the children that a shell has waited for
    seconds = time.perf_counter() - began
    print(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
