"""Files next to an output until it is in place: files that tasks write to, and outputs made for a comparison."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..sources import FolderPlan, Plan, Source
from .output import (
    STAGED,
    TEMPORARY,
    check_folder_target,
    check_output,
    create,
    discarded_on_error,
    remove_leftovers,
    remove_temporary,
    temporary_name,
)


def is_staged(path: str) -> bool:
    """Return whether a path is a staged file or folder, or a file in a staged folder."""
    names = path.split(os.sep)[-2:]
    plain = os.path.isabs(path) and os.path.normpath(path) == path
    return plain and any(name.startswith(".") and name.endswith((STAGED, TEMPORARY)) for name in names)


def staged_name(path: str) -> str:
    """Return a name for the file, or the folder of files, to which tasks write an output."""
    return os.path.splitext(temporary_name(*os.path.split(os.path.realpath(path))))[0] + STAGED


def stage(plan: Plan | FolderPlan, path: str, staged: str, sources: Sequence[Source], *, force: bool = False) -> None:
    """Create the file, or the folder of files, to which tasks write an output, in full size and consisting of holes.

    ``staged`` is its path, from ``staged_name``. Raises as ``write_file`` and ``write_folder`` do.
    """
    check = check_folder_target if isinstance(plan, FolderPlan) else check_output
    check(path, sources, force=force)
    files = plan.files if isinstance(plan, FolderPlan) else (("", plan),)
    names = [name for name, _ in plan.files] if isinstance(plan, FolderPlan) else None
    with discarded_on_error(staged, path, names):
        if isinstance(plan, FolderPlan):
            os.mkdir(staged)
        for name, file in files:
            fd = create(os.path.join(staged, name) if name else staged)
            try:
                os.ftruncate(fd, file.size)
            finally:
                os.close(fd)


@contextmanager
def scratch_output(path: str) -> Iterator[str]:
    """Yield a path with the same name in a temporary folder next to an output; the file written there is removed."""
    folder, name = os.path.split(os.path.realpath(path))
    remove_leftovers(folder, name)
    scratch = temporary_name(folder, name)
    with discarded_on_error(scratch, path):
        os.mkdir(scratch)
        try:
            yield os.path.join(scratch, name)
        finally:
            remove_temporary(os.path.join(scratch, name))
            remove_temporary(scratch)
