"""The tree of errors.

::

    CkptoolError                 exit   what happened
    ├── UnreadableError            3    the input cannot be read as a checkpoint
    │   ├── NotACheckpointError    3    ... because it is something else, which the message names
    │   ├── ChangedError           3    ... because it changed while it was read; 5 where an output was begun
    │   └── MalformedError         3    ... because its bytes break the format, at a stated place
    │       └── PickleError        3    ... inside a pickle stream
    │           └── TruncatedPickleError  3  ... which ends too early
    ├── RefusedError               4    done as asked it would lose or overwrite something
    ├── TargetError                2    the request itself makes no sense (an unknown key, a bad device tag)
    ├── OutputError                5    the output could not be written
    └── ReadBackError             70    what was written does not read as it must: a bug in ckptool, and no output

Every error carries its facts as fields and is worded late, by ``str()``. ``next`` is the command or
step that gets the user further; it may be empty. This module knows nothing of click.
"""

from __future__ import annotations

from copyreg import __newobj__  # type: ignore[attr-defined]
from typing import NamedTuple


class Again(NamedTuple):
    """The same command with other words.

    Each of ``options`` is an option with its value, in the place of the one that it had or at the end; ``words`` are
    arguments, each with the right one. ``around`` is the line with ``{}`` where the command stands. A program that was
    called otherwise, as a library for example, shows ``next`` instead.
    """

    options: tuple[tuple[str, str], ...] = ()
    around: str = "{}"
    words: tuple[tuple[str, str], ...] = ()


class CkptoolError(Exception):
    """Base of everything that ckptool raises on purpose.

    ``what`` is one sentence without the path; ``path`` the file concerned ("" when unknown);
    ``next`` what to do now ("" when there is nothing to say);
    ``again`` the same as options of the command that failed, None where it is something else.
    """

    exit_code: int = 70

    def __init__(self, what: str, *, path: str = "", next: str = "", again: Again | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.path = path
        self.next = next
        self.again = again
        if next and hasattr(self, "add_note"):  # Python 3.11: shown below a traceback
            self.add_note(f"-> {next}")

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" if self.path else self.what

    def __reduce__(self) -> tuple[object, ...]:
        # An exception comes out of a pickle by calling its class with ``args`` alone, and then ``kind`` is missing:
        # a pool of processes hangs on such an error.
        return __newobj__, (type(self), *self.args), self.__dict__


class UnreadableError(CkptoolError):
    """The input cannot be read: missing, not permitted, not a regular file, too large a record."""

    exit_code = 3


class NotACheckpointError(UnreadableError):
    """The input is a whole file of another kind; ``kind`` is its short name ("git-lfs-pointer")."""

    def __init__(self, what: str, *, kind: str, path: str = "", next: str = "") -> None:
        super().__init__(what, path=path, next=next)
        self.kind = kind


class ChangedError(UnreadableError):
    """The input changed or shrank while it was being read. ``write`` gives it the code of OutputError, when what it
    was read for was an output."""


class MalformedError(UnreadableError):
    """The bytes break the format. ``offset`` counts bytes from the start of ``where``.

    ``where`` names the record or the part of the file ("data.pkl", "central directory").
    """

    def __init__(self, what: str, *, where: str = "", offset: int = -1, path: str = "", next: str = "") -> None:
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
    """A pickle stream that the machine cannot follow; ``seen`` are the nodes up to there, which a reader that
    executes has executed."""

    seen: list[object] | tuple[object, ...] = ()


class TruncatedPickleError(PickleError):
    """A pickle stream that ends before its STOP, or announces more bytes than there are."""


class RefusedError(CkptoolError):
    """Doing this would lose or overwrite something."""

    exit_code = 4


class TargetError(CkptoolError):
    """The request cannot be carried out on any file, or names what this file does not have."""

    exit_code = 2


class OutputError(CkptoolError):
    """The output could not be written; what was at its path before is still there."""

    exit_code = 5


class ReadBackError(CkptoolError):
    """What was staged does not read as the edit promised, so it was thrown away: a bug in ckptool.

    ``promised`` and ``read`` say where the two differ; ``report`` are the lines of a report to its authors, complete
    once the error has passed whoever knows what was edited. They name tensors and versions, and no paths.
    """

    def __init__(self, what: str, *, promised: str = "", read: str = "", path: str = "", next: str = "") -> None:
        super().__init__(what, path=path, next=next)
        self.promised = promised
        self.read = read
        self.report: tuple[str, ...] = ()
