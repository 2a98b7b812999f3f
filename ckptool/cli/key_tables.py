"""The output of ``keys`` for one file: names, rows for programs, tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from ..base.text import human_bytes, pluralize, shape_text
from ..checkpoint.sharding import is_sharded, sharding, sharding_summary
from ..checkpoint.survey import Survey, TensorEntry
from ..checkpoint.tensors import Tensor
from .options import PLAIN_KINDS
from .render import clean, cleaned, column_table
from .terminal import bar


def labels(entries: Sequence[TensorEntry]) -> Sequence[str]:
    """Return the keys if all tensors are in one state dict, otherwise the paths; "." for a tensor that is the file."""
    places = {entry.state_dict for entry in entries}
    if len(places) == 1 and -1 not in places:
        return cleaned([entry.key or "." for entry in entries])
    return cleaned([entry.path or "." for entry in entries])


def cells(survey: Survey, entry: TensorEntry) -> tuple[str, ...]:
    """Return a row for programs, which always has the same columns."""
    tensor = entry.tensor
    where = survey.state_dicts[entry.state_dict].path if entry.state_dict >= 0 else ""
    return where, entry.key, entry.path, tensor.dtype, shape_text(tensor.shape), tensor.location, str(tensor.own_bytes)


class Section(NamedTuple):
    """A table as a list of columns, and the line below it."""

    headers: tuple[str, ...]
    columns: tuple[list[str], ...]
    total: str


def sections(survey: Survey, listed: Sequence[TensorEntry], bars: bool = False) -> list[Section]:
    """Return a table per state dict, and one for the tensors outside of them. ``bars`` adds a column of byte shares."""
    groups: dict[int, list[TensorEntry]] = {}
    for entry in listed:
        groups.setdefault(entry.state_dict, []).append(entry)
    # Many tensors share few dtypes, shapes and sizes, so each shape and size is formatted only once.
    shape, size = cache(shape_text), cache("{:,}".format)
    tables = []
    for place, entries in groups.items():
        tensors = [entry.tensor for entry in entries]
        inner = sharding_summary(survey.reader, entries)
        columns = (
            [entry.path or "." for entry in entries] if place < 0 else [entry.key or "." for entry in entries],
            [_dtype(tensor) for tensor in tensors],
            [shape(tensor.shape) for tensor in tensors],
            *(_parts(survey, entries) if inner else ()),
            [tensor.location for tensor in tensors],
            [size(tensor.own_bytes) for tensor in tensors],
            *([_shares(tensors)] if bars else []),
        )
        base = survey.state_dicts[place].path if place >= 0 else None
        where = f" in {base!r}" if base else "" if base is not None or len(groups) == 1 else " outside of them"
        total = human_bytes(sum(tensor.own_bytes for tensor in tensors))
        headers = ("path" if place < 0 else "key", "dtype", "shape", *(_PARTS if inner else ()), "device", "bytes")
        headers += ("share",) if bars else ()
        line = f"{pluralize(len(entries), 'tensor')}{clean(where)}, {total}"
        if inner:
            line += clean(f": what {inner.owner} had, spread over {inner.over}")
        tables.append(Section(headers, columns, line))
    return tables


#: Columns for tensors spread over ranks: the shape of the part in this file, its indices, and how it was cut.
_PARTS = ("here", "indices", "placements")


def _parts(survey: Survey, entries: Sequence[TensorEntry]) -> tuple[list[str], ...]:
    rows = []
    for entry in entries:
        cut = sharding(survey.reader, entry.ref, entry.tensor)
        rows.append((cut.here, cut.slices(entry.tensor.shape), ", ".join(cut.placements)) if cut else ("", "", ""))
    return tuple(list(column) for column in zip(*rows))


def _shares(tensors: Sequence[Tensor]) -> list[str]:
    """Return each tensor's share of all bytes, as a bar with a percentage."""
    total = sum(tensor.own_bytes for tensor in tensors) or 1
    shares = (tensor.own_bytes / total for tensor in tensors)
    return [f"{bar(share)} {share:5.1%}" for share in shares]


def _dtype(tensor: Tensor) -> str:
    plain = tensor.kind in PLAIN_KINDS or is_sharded(tensor)
    return tensor.dtype if plain else f"{tensor.dtype} ({tensor.kind})"


def _table(headers: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    size = headers.index("bytes")
    # A narrow terminal loses the bars first, then the columns about rank parts.
    spare = [headers.index(name) for name in ("share", *_PARTS) if name in headers]
    return column_table(headers, columns, right=range(size, len(headers)), spare=spare)


def drawn(sections: Sequence[Section], rest: int) -> str:
    """Return the tables one below the other. ``rest`` is the number of tensors that they do not list."""
    tables = [_table(part.headers, part.columns) for part in sections]
    parts = [f"{text}\n\n{part.total}" for text, part in zip(tables, sections)]
    return "\n\n".join(parts or ["no tensors"]) + (f"; {rest:,} more in the file: --all" if rest else "")
