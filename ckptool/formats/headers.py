"""Replace and restore the header of a file; the index of a folder of shards follows the names in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing

from ..base.errors import CkptoolError, RefusedError
from ..base.text import human_bytes
from ..files.folders import open_folder
from ..files.sources import FileSource, HeaderPlan, Plan, open_source
from ..files.write.headers import journal_of, read_journal, replace_header, restore_header
from ..files.write.in_place import StagedFile
from ..files.write.output import write_file
from ..files.write.planned import Check
from . import read_container
from .names.hf import is_index, renamed_in_index


def header_writer(
    plan: HeaderPlan, source: FileSource, before: Sequence[str], after: Sequence[str], force: bool
) -> tuple[Callable[[Check], None], str]:
    """Return a function that executes a plan, and the path of the journal that then has the old header.

    ``before`` and ``after`` are the names of the tensors, in one order. Raise RefusedError if the file must be written
    again, unless ``force`` allows that; and if the index beside a shard cannot have the new names.
    """
    if not plan.fits:
        what = f"the new header is {'longer' if len(plan.new) > len(plan.old) else 'shorter'} than the old one"
        if source.links > 1:
            what += f", and the file has {source.links:,} names (hard links)"
            raise RefusedError(what, path=source.name, next="write a new file with `-o=`")
        if not force:
            what += f", so all {human_bytes(plan.whole.size)} must be written again"
            step = "to do that, add `--force=`, or write a new file with `-o=`"
            raise RefusedError(what, path=source.name, next=step)
    finish = _index_writer(source.name, before, after)
    return lambda check: replace_header(plan, source, check, finish), journal_of(source.name)


def undo_header(path: str) -> None:
    """Undo the last edit of a header in place; raise RefusedError if the former version cannot be read."""
    with closing(open_source(path)) as source:
        last, before, after = read_journal(source), list[str](), list[str]()
        if last is not None and last.state != "other":
            end = len(last.old if last.state == "old" else last.new)
            files = (StagedFile(source, 0, end, header) for header in (last.new, last.old))
            try:
                before, after = (list(read_container(file).manifest()) for file in files)
            except CkptoolError as error:
                what = f"the former version cannot be read, so nothing is undone: {error.what}"
                raise RefusedError(what, path=path) from error
        restore_header(source, _index_writer(path, before, after))


def _index_writer(path: str, before: Sequence[str], after: Sequence[str]) -> Callable[[bool], object]:
    """Return a function that gives the tensors of a shard their new names in the index beside it, or for False their
    old names. It does nothing without an index."""
    gone, new = ([name for name in one if name not in other] for one, other in ((before, {*after}), (after, {*before})))
    folder, file = os.path.split(path)
    names = open_folder(folder or os.curdir).names() if gone else ()
    for index in sorted(filter(is_index, names)):
        with closing(open_source(os.path.join(folder, index))) as source:
            text, former = renamed_in_index(source, file, dict(zip(gone, new))), source.read(0, source.size)
        if text is not None and len(gone) != len(new):
            what = f"the edit removes tensors that {index} names"
            raise RefusedError(what, path=path, next="edit the folder, with `-o=`")
        if text is not None:
            pieces = {True: Plan((text,)), False: Plan((former,))}
            return lambda renamed: write_file(pieces[renamed], source.name, (), force=True)
    return lambda renamed: None
