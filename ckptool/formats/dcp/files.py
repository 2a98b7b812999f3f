"""The files of a DCP folder: which ones list its content, and which data files can be opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Final

from ...base.errors import CkptoolError, MalformedError, UnreadableError
from ...base.steps import is_remote
from ...base.text import pluralize
from ...files.downloads import prefetch
from ...files.folders import Folder
from ...files.sources import Source, Span
from ..foreign.identification import explain_placeholder
from ..names.dcp import DATA, OF_RANK
from .items import edges
from .metadata import Item

#: The first bytes of a data file, by which a placeholder is recognised.
_HEAD: Final = 1024


def metadata_names(folder: Folder, names: Sequence[str]) -> list[str]:
    """Return the metadata names: the common file, or one file per rank. Raises MalformedError if there are none."""
    if ".metadata" in names:
        return [".metadata"]
    ranks = sorted((int(match[1]), name) for name in names if (match := OF_RANK.match(name)))
    if ranks:
        return [name for _, name in ranks]
    if any(name.endswith(".metadata.tmp") for name in names):
        what = "the checkpoint is not finished: there is .metadata.tmp, and .metadata is written last"
        raise MalformedError(what, path=folder.path, next="wait until it is saved")
    data = pluralize(sum(name.endswith(DATA) for name in names), "file")
    what = f"{data} of torch.distributed.checkpoint, and no .metadata to say what they hold"
    raise MalformedError(what, path=folder.path, next="get the folder again, with its hidden files")


def ask_for(folder: Folder, metadata: Sequence[str]) -> None:
    """Announce that metadata files are read next, as a whole."""
    if is_remote(folder.path):  # there it takes no request to open a file
        prefetch(Span(file, 0, file.size) for file in map(folder.open, metadata))


def open_data(
    folder: Folder, names: Sequence[str], items: Sequence[Item], opened: list[Source], stack: ExitStack
) -> tuple[dict[str, Source], dict[str, CkptoolError]]:
    """Return the open data files, and the errors of the files that cannot be opened, both by name.

    The ``items`` that are objects are read next.
    """
    files: dict[str, Source] = {}
    closed: dict[str, CkptoolError] = {}
    for name in names:
        try:
            files[name] = folder.open(name)
        except UnreadableError as error:
            closed[name] = error
            continue
        stack.callback(files[name].close)
        opened.append(files[name])
    heads = _heads(files, items)
    prefetch(chain(heads.values(), *(edges(item, files) for item in items if item.offset is None)))
    for name in heads:
        placeholder = explain_placeholder(files[name])
        if placeholder is not None:
            closed[name] = placeholder
            del files[name]
    return files, closed


def _heads(files: Mapping[str, Source], items: Iterable[Item]) -> dict[str, Span]:
    """Return the first bytes of files that may be placeholders, by name.

    A remote file with room for its items is not looked at. A rank with nothing to write leaves an empty file.
    """
    ends: dict[str, int] = {}
    for item in items:
        ends[item.file] = max(ends.get(item.file, 0), item.at + item.length)
    return {
        name: Span(file, 0, _HEAD)
        for name, file in files.items()
        if file.size and (file.size < ends.get(name, file.size + 1) or not file.missing([(0, _HEAD)]))
    }
