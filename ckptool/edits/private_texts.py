"""The texts of a checkpoint beside its object: headers, extra records and comments of archives, files of the folder.

A text that an edit rewrites can be redacted. Any other text stays, and is listed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

from ..base.errors import CkptoolError
from ..base.lazy import regex
from ..base.records import NamedTuple
from ..base.steps import is_remote
from ..checkpoint.checkpoint import Checkpoint
from ..files.archives import read_bytes
from ..files.sources import FolderSource
from ..files.zips.reader import content_chunks

#: What becomes of a text: it is rewritten, removed with its record, kept, or "pickle" for a file with an object.
Use: TypeAlias = Literal["header", "json", "removed", "kept", "pickle", "unread"]

#: The largest text and the largest pickle beside the weights that are read.
_LARGEST: Final = 16 << 20
#: Files whose words are vocabulary: a change would change the tokens.
_VOCABULARY: Final = regex(
    r"(?:tokenizer|vocab|added_tokens)\.json\Z|(?:vocab|merges)\.txt\Z|.*\.(?:model|tiktoken|spm)\Z"
)
#: The end of a zip without its comment, whose length is in the last two bytes.
_ZIP_END: Final = b"PK\x05\x06"
_END_SIZE: Final = 22
_LONGEST_COMMENT: Final = 0xFFFF
#: Characters that no text contains.
CONTROL: Final = regex("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufffd]")


class Text(NamedTuple):
    """A text beside the object. ``file`` is its file in a folder, or "", and ``name`` its entry or record."""

    use: Use
    file: str
    name: str
    text: str

    @property
    def path(self) -> str:
        """Where it is, for people."""
        name = f"__metadata__.{self.name}" if self.use == "header" else self.name
        return ": ".join(filter(None, (self.file, name)))


def texts_beside(checkpoint: Checkpoint) -> Iterator[Text]:
    """Yield every text beside the object, and files that may hold texts and are not read."""
    if checkpoint.texts is None:
        for file, entries in checkpoint.container.texts():
            yield from (Text("header", file, name, text) for name, text in entries.items())
    else:
        yield from (Text("header", "", name, text) for name, text in checkpoint.texts.items())
    if isinstance(checkpoint.source, FolderSource):
        for path in (*checkpoint.source.beside, *checkpoint.source.links):
            yield from _in_file(checkpoint, path)
    else:
        yield from _in_archive(checkpoint)


def _in_file(checkpoint: Checkpoint, path: str) -> Iterator[Text]:
    name = os.path.basename(path)
    if _VOCABULARY.match(name):
        return
    data = checkpoint.companions.get(name)
    try:
        if data is None and not is_remote(path) and os.path.getsize(path) > _LARGEST:
            yield Text("unread", name, "", "")
            return
        data = read_bytes(path, _LARGEST) if data is None else data
    except (CkptoolError, OSError):
        yield Text("unread", name, "", "")
        return
    text = data.decode("utf-8", "replace")
    if CONTROL.search(text):
        yield Text("pickle" if name not in checkpoint.companions else "unread", name, "", path)
    else:
        yield Text("json" if name.endswith((".json", ".jsonl")) else "kept", name, "", text)


def _in_archive(checkpoint: Checkpoint) -> Iterator[Text]:
    """Yield records without a storage and the comment of a zip. A new layout has neither; other edits keep them."""
    source, container = checkpoint.source, checkpoint.container
    kept = not container.drops_records
    use: Use = "kept" if kept else "removed"
    begin = max(source.size - _END_SIZE - _LONGEST_COMMENT, 0)
    tail = source.read(begin, source.size - begin)
    end, comment = tail[at:][:_END_SIZE] if (at := tail.rfind(_ZIP_END)) >= 0 else b"", tail[at + _END_SIZE :]
    if end and comment and int.from_bytes(end[-2:], "little") == len(comment):
        yield Text(use, "", "the comment of the zip", comment.decode("utf-8", "replace"))
    for record in container.records() if container.keeps_format or kept else ():
        if record.key or (not kept and record.name.endswith("/data.pkl")):
            continue
        if record.size > _LARGEST:
            yield Text("unread", "", record.name, "")
            continue
        data = b"".join(content_chunks(record.span, record.size, record.compressed, record.name))
        yield Text(
            use,
            "",
            record.name,
            f"{record.name}\n{data.decode('utf-8', 'replace')}" if kept else data.decode("latin-1"),
        )
