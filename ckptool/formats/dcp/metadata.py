"""The content of a DCP folder as its ``.metadata`` lists it: tensors, objects, and where their pieces are.

``listing`` reads it. Here are its records, and how those of several ranks or folders become one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...base.dtypes import Dtype
from ...base.records import NamedTuple
from ...base.text import pluralize, quoted
from ..pieces.boxes import Box


class Item(NamedTuple):
    """A file range that holds an archive of its own: ``length`` bytes from byte ``at`` of ``file``. ``offset`` is the
    piece's offset in its tensor, None for an object. ``transforms`` names the extensions that changed the bytes, such
    as compression."""

    name: str
    offset: tuple[int, ...] | None
    file: str
    at: int
    length: int
    transforms: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The place of the item, for messages."""
        return f"{self.file} at byte {self.at:,}"


class ValueMetadata(NamedTuple):
    """A tensor of ``shape`` in pieces, or an object with ``dtype`` None."""

    dtype: Dtype | None
    shape: tuple[int, ...] = ()
    chunks: tuple[Box, ...] = ()


class Metadata(NamedTuple):
    """The content of a ``.metadata`` file.

    - ``end``: the size of the pickle in bytes.
    - ``values``: tensors and objects, in file order; ``paths``: their places in the nested object.
    - ``items``: the content of the data files.
    - ``flaws``: messages about invalid content.
    - ``subclasses``: the classes of other libraries.
    - ``copies``: pairs of items, where two ranks saved the same piece; the first item counts.
    """

    end: int
    values: dict[str, ValueMetadata]
    paths: Mapping[str, tuple[str | int, ...]]
    items: list[Item]
    version: str
    flaws: list[str]
    subclasses: list[str]
    copies: Sequence[tuple[Item, Item]] = ()


def merge_metadata(ranks: list[Metadata]) -> Metadata:
    """Merge metadata files that each rank wrote for itself. If several ranks have the same piece, the first one
    counts."""
    if len(ranks) == 1:
        return ranks[0]
    values: dict[str, ValueMetadata] = {}
    boxes: dict[str, dict[Box, None]] = {}
    items: dict[tuple[str, tuple[int, ...] | None], Item] = {}
    flaws: list[str] = []
    copies: list[tuple[Item, Item]] = []
    for rank in ranks:
        flaws += rank.flaws
        for name, value in rank.values.items():
            known = values.setdefault(name, value)
            if (known.dtype, known.shape) != (value.dtype, value.shape):
                flaws.append(f"the ranks do not agree on the dtype and shape of {quoted(name)}")
            else:
                boxes.setdefault(name, {}).update(dict.fromkeys(value.chunks))
        for item in rank.items:
            first = items.setdefault((item.name, item.offset), item)
            copies += [(first, item)] if first is not item and item.offset is not None else []
    values = {name: value._replace(chunks=tuple(boxes[name])) for name, value in values.items()}
    paths = {name: path for rank in reversed(ranks) for name, path in rank.paths.items()}
    version = f"{pluralize(len(ranks), 'rank')}, each with its own metadata"
    subclasses = [name for rank in ranks for name in rank.subclasses]
    return Metadata(0, values, paths, list(items.values()), version, flaws, subclasses, copies)


def placed(read: Metadata, folder: str, *, apart: bool) -> Metadata:
    """Return the metadata of a subfolder with paths from its parent; ``apart`` puts its values under the folder's
    name."""
    items = [item._replace(file=f"{folder}/{item.file}") for item in read.items]
    if not apart:
        return read._replace(items=items)

    def name_of(name: str) -> str:
        return f"{folder}.{name}"

    return read._replace(
        values={name_of(name): value for name, value in read.values.items()},
        paths={name_of(name): (folder, *read.paths.get(name, (name,))) for name in read.values},
        items=[item._replace(name=name_of(item.name)) for item in items],
    )


def united(parts: Sequence[Metadata]) -> Metadata:
    """Merge the metadata of several folders with distinct names."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return first._replace(
        values={name: value for part in parts for name, value in part.values.items()},
        paths={name: path for part in parts for name, path in part.paths.items()},
        items=[item for part in parts for item in part.items],
        flaws=[flaw for part in parts for flaw in part.flaws],
        subclasses=[name for part in parts for name in part.subclasses],
    )
