"""The record of what an edit did, for reports."""

from __future__ import annotations

from typing import NamedTuple

from ..base.text import pluralize

#: Edits whose text is followed by the number of keys.
KEY_EDITS = ("strip-prefix", "strip-wrappers", "add-prefix", "rename")


class Change(NamedTuple):
    """One change by an edit at one path.

    ``edit`` is its name ("strip-prefix", "add-prefix", "remap"); ``number`` how many things changed and ``kept`` how
    many of the same sort did not; ``what`` is the description, ``notes`` are remarks.

    >>> [change.words for change in ckptool.strip_prefix("training.pth").changes]
    ["state_dict: prefix 'module.' taken off 14 keys"]
    """

    edit: str
    path: str
    number: int
    kept: int
    what: str
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The change as text with its remarks."""
        return "; ".join([self.head, *self.notes])

    @property
    def head(self) -> str:
        """The path, the description, and for edits of keys the number of keys."""
        where = f"{self.path}: " if self.path else ""
        if self.edit not in KEY_EDITS or not self.number:
            return f"{where}{self.what}"
        others = f", {pluralize(self.kept, 'other key')} as before" if self.kept else ""
        return f"{where}{self.what} {pluralize(self.number, 'key')}{others}"
