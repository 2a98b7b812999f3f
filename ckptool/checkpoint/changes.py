"""What an edit did, for reports."""

from __future__ import annotations

from typing import NamedTuple

from ..base.text import counted

#: Kinds of changes that are told with the number of keys.
_OF_KEYS = ("strip-prefix", "strip-wrappers", "add-prefix", "rename")


class Change(NamedTuple):
    """What one edit did at one place.

    ``edit`` is the kind ("strip-prefix", "add-prefix", "remap"); ``path`` where; ``number`` how many things
    changed and ``kept`` how many of the same kind did not; ``what`` says it in words; ``notes`` are remarks.
    """

    edit: str
    path: str
    number: int
    kept: int
    what: str
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """What was done and where, with the number of keys for edits of keys, and the remarks."""
        return "; ".join([self.head, *self.notes])

    @property
    def head(self) -> str:
        """The same without the remarks."""
        where = f"{self.path}: " if self.path else ""
        if self.edit not in _OF_KEYS or not self.number:
            return f"{where}{self.what}"
        others = f", {counted(self.kept, 'other key')} as before" if self.kept else ""
        return f"{where}{self.what} {counted(self.number, 'key')}{others}"
