"""The exception hierarchy.

::

    CkptoolError                 exit   cause
    ├── UnreadableError            3    the input cannot be read as a checkpoint
    │   ├── NotACheckpointError    3    ... because it is another kind of file, named by the message
    │   ├── ChangedError           3    ... because it changed while it was read; 5 once an output was begun
    │   ├── WorkerDiedError        3    ... because its worker processes died, most likely for lack of memory
    │   └── MalformedError         3    ... because its bytes violate the format, at a stated offset
    │       └── PickleError        3    ... inside a pickle stream
    │           ├── TruncatedPickleError  3  ... which ends too early
    │           └── PickleLimitError      3  ... which exceeds a limit of ckptool, although an unpickler may accept it
    ├── RefusedError               4    the request would lose or overwrite something
    ├── TargetError                2    the request itself makes no sense (an unknown key, a bad device tag)
    ├── EngineError                3    the chosen engine is not installed, cannot be reached, or was lost
    ├── OutputError                5    the output could not be written
    └── ReadBackError             70    the staged output does not read as planned: a bug in ckptool, no output

Every error carries its facts as fields; ``str()`` formats them. ``next`` is the command or step that helps the user as
text, or ""; ``step`` is the same as data. This module knows nothing of click.

>>> issubclass(ckptool.errors.MalformedError, ckptool.errors.UnreadableError)
True
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from copyreg import __newobj__  # type: ignore[attr-defined]
from typing import Final

from .addresses import conceal, is_remote
from .lazy import regex
from .steps import AnyStep, as_step


class CkptoolError(Exception):
    """Base of everything that ckptool raises on purpose.

    ``what`` is one sentence without the path. ``path`` is the file concerned, or "" if unknown. ``step`` is the next
    step for the user, as prose and commands; it may be empty.

    >>> try:
    ...     ckptool.get("training.pth", "epohc")
    ... except ckptool.CkptoolError as error:
    ...     print(error.what)
    ...     print(error.next)
    there is nothing at 'epohc'; is it 'epoch'?
    ckptool get training.pth epoch
    """

    exit_code: int = 70
    #: Whether a request to a server failed or was not allowed, which says nothing about the file.
    of_server: bool = False

    def __init__(self, what: str, *, path: str = "", next: AnyStep = "") -> None:
        super().__init__(what)
        self.what = what
        self.path = path
        self.step = as_step(next)
        if next and hasattr(self, "add_note"):  # Python 3.11: shown below a traceback
            self.add_note(f"-> {self.next}")

    @property
    def next(self) -> str:
        """The next step as text, or ""."""
        return str(self.step)

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" if self.path else self.what

    def __reduce__(self) -> tuple[object, ...]:
        # By default, an exception is unpickled by calling its class with ``args``, without the keyword arguments such
        # as ``kind``. The call fails, and a process pool hangs on that error.
        return __newobj__, (type(self), *self.args), self.__dict__


def of_file(error: CkptoolError) -> CkptoolError:
    """Return an error that says something about a file; raise it if a server failed instead."""
    if error.of_server:
        raise error
    return error


class UnreadableError(CkptoolError):
    """The input cannot be read: it is missing, not permitted, not a regular file, or has too large a record."""

    exit_code = 3


class NotACheckpointError(UnreadableError):
    """The input is an intact file of another kind; ``kind`` is its short name ("git-lfs-pointer")."""

    def __init__(self, what: str, *, kind: str, path: str = "", next: AnyStep = "") -> None:
        super().__init__(what, path=path, next=next)
        self.kind = kind


class ChangedError(UnreadableError):
    """The input changed or shrank while it was being read. While an output is being written, the exit code is 5."""


class WorkerDiedError(UnreadableError):
    """The worker processes died, most likely because memory ran out."""


class MalformedError(UnreadableError):
    """The bytes violate the format at ``offset``, counted in bytes from the start of ``where``; -1 if unknown.

    ``where`` names the record or the part of the file ("data.pkl", "central directory").
    """

    def __init__(self, what: str, *, where: str = "", offset: int = -1, path: str = "", next: AnyStep = "") -> None:
        super().__init__(what, path=path, next=next)
        self.where = where
        self.offset = offset

    def __str__(self) -> str:
        place = self.where
        if self.offset >= 0:
            place = f"{place} at byte {self.offset:,}".lstrip()
        text = f"{self.what} ({place})" if place else self.what
        return f"{self.path}: {text}" if self.path else text


class PickleError(MalformedError):
    """A pickle stream that cannot be decoded.

    ``seen`` holds the nodes before the failure; a reader that executes pickles has executed them.
    """

    seen: list[object] | tuple[object, ...] = ()


class TruncatedPickleError(PickleError):
    """A pickle stream that ends before STOP, or declares more bytes than it has."""


class PickleLimitError(PickleError):
    """A pickle stream that exceeds a limit of ckptool; whatever follows was not examined."""


class RefusedError(CkptoolError):
    """The request would lose or overwrite something."""

    exit_code = 4


class TargetError(CkptoolError):
    """The request is invalid for any file, or names something this file does not have."""

    exit_code = 2


class EngineError(CkptoolError):
    """The chosen engine is not installed, cannot be reached, or was lost before all work was done."""

    exit_code = 3


class OutputError(CkptoolError):
    """The output could not be written; any earlier file at its path is untouched."""

    exit_code = 5


class ReadBackError(CkptoolError):
    """The staged output does not read as the edit promised and was discarded: a bug in ckptool.

    ``promised`` and ``read`` describe the difference. ``report`` holds the lines of a bug report; callers that know the
    edit complete it. They name tensors and versions, but no paths.
    """

    def __init__(self, what: str, *, promised: str = "", read: str = "", path: str = "", next: AnyStep = "") -> None:
        super().__init__(what, path=path, next=next)
        self.promised = promised
        self.read = read
        self.report: tuple[str, ...] = ()


@contextmanager
def adding_path(path: str) -> Iterator[None]:
    """Add the path to an error that names no file."""
    try:
        yield
    except CkptoolError as error:
        error.path = error.path or path
        raise


#: The message for a missing file.
NO_FILE = "no such file"
#: An address with one slash in place of two.
_ONE_SLASH: Final = regex(r"(?i)(s3a?|gc?s|az|abfss?|wasbs?|https?|hf|s?ftp|ssh|hdfs):/(?!/)")


def refuse_file_uri(path: str) -> None:
    """Raise UnreadableError if a path is a ``file`` URI."""
    if path.lower().startswith("file:///"):
        raise UnreadableError("it is the URI of a local file", path=path, next=f"name its path: {path[7:]}")


def lost_a_slash(path: str) -> bool:
    """Return whether a path is an address that lost a slash, as in a ``pathlib.Path``."""
    return ":/" in path and _ONE_SLASH.match(path) is not None and not os.path.lexists(path)


def without_secrets(path: str) -> str:
    """Return an address that lost a slash without user information and query string, which may be secrets."""
    return conceal(path.replace(":/", "://", 1)).replace("://", ":/", 1)


def refuse_one_slash(path: str, error: type[CkptoolError]) -> None:
    """Raise an error of this class if a path is an address that lost a slash."""
    if lost_a_slash(path):
        shown = without_secrets(path)
        step = f"write it as text: {shown.replace(':/', '://', 1)}"
        raise error("an address has two slashes after its scheme", path=shown, next=step)


def refuse_remote(
    path: str,
    what: str = "this must be a local file",
    step: str = "download it first, then run the command on the file",
) -> None:
    """Raise UnreadableError if a path to read is the address of a remote file, or a ``file`` URI."""
    if is_remote(path):
        refuse_file_uri(path)
        raise UnreadableError(what, path=conceal(path), next=step)
