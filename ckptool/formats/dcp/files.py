"""The files of a DCP folder: which ones list its content, and which data files can be opened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

#: The first bytes of a data file, by which a placeholder is recognised. Objects come first, too: see
#: ``_write_files_from_queue`` in torch/distributed/checkpoint/filesystem.py.
_HEAD: Final = 16 << 10


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


def ask_for(folder: Folder, metadata: Sequence[str], data: Sequence[str], items: Iterable[Item] = ()) -> None:
    """Announce what is read next: metadata files, the first bytes of data files, and items in these."""
    if is_remote(folder.path):  # there it takes no request to open a file
        files = {name: folder.open(name) for name in (*metadata, *data)}
        begins = (Span(file, 0, file.size if name in metadata else _HEAD) for name, file in files.items())
        prefetch(chain(begins, *(edges(item, files) for item in items)))


def open_data(
    folder: Folder, names: Sequence[str], items: Sequence[Item], opened: list[Source], stack: ExitStack
) -> tuple[dict[str, Source], dict[str, CkptoolError]]:
    """Return the open data files, and the errors of the files that cannot be opened, both by name."""
    files: dict[str, Source] = {}
    closed: dict[str, CkptoolError] = {}
    ask_for(folder, (), names, (item for item in items if item.offset is None))
    for name in names:
        try:
            source = folder.open(name)
        except UnreadableError as error:
            closed[name] = error
            continue
        stack.callback(source.close)
        opened.append(source)
        # A rank with nothing to write leaves an empty file.
        placeholder = explain_placeholder(source) if source.size else None
        if placeholder is not None:
            closed[name] = placeholder
        else:
            files[name] = source
    return files, closed
