"""Record what an edit changed, for reports."""

from __future__ import annotations

from typing import NamedTuple

from ..base.text import pluralize

#: Edits whose description is followed by the number of keys.
KEY_EDITS = ("strip-prefix", "strip-wrappers", "add-prefix", "rename")


class Change(NamedTuple):
    """One change that an edit made at one path.

    ``edit`` is the name of the edit ("strip-prefix", "add-prefix", "remap"). ``number`` counts the changed things,
    ``kept`` the unchanged ones of the same sort. ``what`` is the description; ``notes`` are remarks.

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
        """The change and its remarks as text."""
        return "; ".join([self.head, *self.notes])

    @property
    def head(self) -> str:
        """The path and the description; for edits of keys, also the number of keys."""
        where = f"{self.path}: " if self.path else ""
        if self.edit not in KEY_EDITS or not self.number:
            return f"{where}{self.what}"
        others = f", {pluralize(self.kept, 'other key')} as before" if self.kept else ""
        return f"{where}{self.what} {pluralize(self.number, 'key')}{others}"
