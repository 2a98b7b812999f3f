"""Matrices made of blocks of others: rows and columns are moved as bytes, and multiplied by a number where needed."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from ..base.dtypes import Dtype
from ..base.errors import RefusedError
from ..base.records import NamedTuple
from ..values.arrays import arrays
from ..values.elements import swapped
from ..values.torch.adapters import StoredTensor


class Block(NamedTuple):
    """Rows and columns of a matrix, and where their first element goes; ``factor`` multiplies the elements.

    A tensor is a matrix of its first dimension by all others.
    """

    source: StoredTensor
    first_row: int
    rows: int
    first_column: int
    columns: int
    row: int = 0
    column: int = 0
    factor: float = 1.0


def pasted(dtype: Dtype, rows: int, columns: int, blocks: tuple[Block, ...], width: int) -> Iterator[bytes]:
    """Yield a matrix of zeros with these blocks in it; numbers of ``width`` bytes are swapped.

    The products are computed in float32 (float64 in float64), and rounded once.
    """
    size = dtype.itemsize
    out = bytearray(rows * columns * size)
    for block in blocks:
        data = block.source.values
        if block.factor != 1:
            data = _multiplied(data, dtype.name, block.factor)
        wide = len(data) // max(block.source.view.shape[0], 1)
        # Whole rows that stay whole are one run of bytes.
        run = max(block.rows, 1) if wide == columns * size == block.columns * size else 1
        for at in range(0, block.rows, run):
            begin = (block.first_row + at) * wide + block.first_column * size
            into = ((block.row + at) * columns + block.column) * size
            out[into : into + run * block.columns * size] = data[begin : begin + run * block.columns * size]
    yield swapped(bytes(out), width)


def _multiplied(data: bytes, dtype: str, factor: float) -> bytes:
    if dtype == "float64":
        return array("d", (number * factor for number in array("d", data))).tobytes()
    library = arrays()
    with library.quiet():
        product = library.floats(data, dtype) * factor
        made, lost = library.stored(product, dtype)
    if lost:
        raise RefusedError(f"a number times {factor:g} does not fit into {dtype}")
    return made
