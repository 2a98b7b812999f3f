"""Compute the plain values of quantized weights, bit for bit as the library that owns the format does.

Each rule yields float32 in the order of the plain weight, a few rows at a time; then the values are rounded to the
dtypes in ``rounds``, one after the other. Sources of the formulas: transformers integrations/finegrained_fp8.py and
mxfp4.py, compressed-tensors compressors and quantization/lifecycle/forward_helpers.py, bitsandbytes
backends/default/ops.py, GPTQModel nn_modules/qlinear, AutoAWQ utils/packing_utils.py, modelopt
torch/quantization/qtensor, torchao quantization/quant_primitives.py, optimum-quanto tensor/weights/qbytes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from math import prod
from typing import Any, Final

from ..base.dtypes import BY_NAME, is_block
from ..base.errors import RefusedError
from ..base.records import NamedTuple
from ..base.text import pluralize, quoted
from ..checkpoint.tensors import is_contiguous
from .arrays import Arrays, arrays
from .elements import elements, reblocked, swapped
from .numeric import E2M1
from .torch.adapters import StoredTensor

#: Elements that are computed at once: they stay in the cache of a core.
_STEP: Final = 1 << 16
#: Bytes of blocks of GGUF that are computed at once.
_BLOCKS: Final = 1 << 18
#: The most bytes of codes that are kept where the file has them turned.
_KEPT: Final = 16 << 20
#: The fewest rows of a block for which a table of products pays off.
_ALIKE: Final = 16
#: Where in a word of AWQ its eight outputs begin, in bits.
_AWQ: Final = b"".join((4 * place).to_bytes(4, "little") for place in (0, 4, 1, 5, 2, 6, 3, 7))
_SCALES: Final = ("weight_scale_inv", "scale_inv", "weight_scale", "scale_weight", "scales", "scale", "SCB")


class Dequantization(NamedTuple):
    """How to compute one weight, as plain data.

    ``parts`` has its tensors by role, ``code`` first; ``shape`` is the shape of the plain weight. The values are
    rounded to the dtypes in ``rounds``, one after the other. ``rule`` and ``numbers`` come from the format.
    """

    name: str
    rule: str
    parts: tuple[tuple[str, StoredTensor], ...]
    shape: tuple[int, ...]
    rounds: tuple[str, ...]
    numbers: Mapping[str, Any]
    width: int = 1

    @property
    def code(self) -> StoredTensor:
        """The tensor with the codes."""
        return self.parts[0][1]

    @property
    def scale(self) -> StoredTensor:
        """The tensor with the scales."""
        return next(part for end in _SCALES for role, part in self.parts if role.endswith(end))

    def part(self, end: str) -> StoredTensor | None:
        """Return the tensor whose role has this end, or None."""
        return next((part for role, part in self.parts if role.endswith(end)), None)

    def named(self, role: str) -> StoredTensor:
        """Return the tensor with this role."""
        return dict(self.parts)[role]


def dequantized(how: Dequantization) -> Iterator[bytes]:
    """Yield the elements of the plain weight, in the byte order of the output.

    Raise RefusedError if a scale is not finite, or a value does not fit into the dtype.
    """
    xp = arrays(how.code.storage.path)
    pieces = _pieces(xp, how)
    while True:
        with xp.quiet():
            data = next(pieces, None)
        if data is None:
            return
        yield swapped(data, how.width)


def _pieces(xp: Arrays, how: Dequantization) -> Iterator[bytes]:
    if how.rule == "scaled" and (grid := _Grid.of(xp, how)).makes_tables:
        yield from _by_tables(xp, how, grid)
        return
    for values in _RULES[how.rule](xp, how):
        for dtype in how.rounds[:-1]:
            before, values = values, xp.rounded(values, dtype)
            if not xp.is_finite(values) and xp.is_finite(before):
                what = f"{quoted(how.name)}: finite values would be infinite in {dtype}, in which its library computes"
                raise RefusedError(what, path=how.code.storage.path)
        yield _stored(xp, how, values)


def _results(xp: Arrays, how: Dequantization, values: Any) -> tuple[bytes, int]:
    """Return values in the last dtype, and how many do not fit; those of float8_e5m2 and GGUF may be infinite."""
    data, lost = xp.stored(values, how.rounds[-1])
    infinite = how.rule == "gguf" or how.code.view.dtype == "float8_e5m2"
    return data, lost + (0 if infinite else xp.infinite(values))


def _stored(xp: Arrays, how: Dequantization, values: Any) -> bytes:
    """Return values in the last dtype; raise RefusedError if one does not fit."""
    data, lost = _results(xp, how, values)
    if lost:
        what = f"{quoted(how.name)}: {pluralize(lost, 'finite value')} would be infinite or NaN in {how.rounds[-1]}"
        raise RefusedError(what, path=how.code.storage.path, next="`--to-dtype bfloat16` holds them")
    return data


def _floats(xp: Arrays, how: Dequantization, part: StoredTensor) -> Any:
    """Return all values of a part as float32; raise RefusedError if one is not finite."""
    dtype = part.view.dtype
    # Exponents are stored as bytes where a library has no dtype for them.
    values = xp.floats(part.values, "float8_e8m0fnu" if dtype == "uint8" else dtype)
    return _finite(xp, how, values, part.name)


def _finite(xp: Arrays, how: Dequantization, values: Any, name: str) -> Any:
    """Return numbers; raise RefusedError if one is not finite."""
    if not xp.is_finite(values):
        raise RefusedError(f"{quoted(name)} is not finite", path=how.code.storage.path)
    return values


def _rows(part: StoredTensor, width: int, most: int = _STEP) -> Iterator[tuple[int, bytes]]:
    """Yield the number of the first row and the bytes of some rows of ``width`` bytes each."""
    count = max(1, most // max(width, 1))
    for number, data in enumerate(reblocked(elements(part.storage, part.view), count * width)):
        yield number * count, data


# -- codes of a byte ---------------------------------------------------------------------------------------------------


class _Grid(NamedTuple):
    """The scales of blocks of rows and columns: how ``high`` and ``wide`` a block is, and how many cover one matrix."""

    scales: Any
    high: int
    wide: int
    down: int
    across: int
    makes_tables: bool

    @classmethod
    def of(cls, xp: Arrays, how: Dequantization) -> _Grid:
        """Return the grid of a weight."""
        outputs, inputs = _matrix(how)
        high, wide = (given or max(size, 1) for given, size in zip(how.numbers["block"], (outputs, inputs)))
        down, across = -(-outputs // high), -(-inputs // wide)
        scales = _floats(xp, how, how.scale)
        scales = scales.reshape(-1, across) if len(scales) > 1 else scales.reshape(1, 1)
        if how.numbers.get("round_scale"):
            scales = _finite(xp, how, xp.rounded(scales, how.rounds[-1]), how.scale.name)
        # A block of rows has few different products: the 256 of its codes.
        alike = high >= _ALIKE and how.part("zero_point") is None and len(how.rounds) == 1
        alike = alike and is_contiguous(how.code.view)
        return cls(scales, high, wide, down, across, alike and BY_NAME[how.rounds[0]].itemsize == 2)

    def at(self, rows: Any, outputs: int) -> Any:
        """Return the row of the grid for each row of the weight."""
        return (rows // outputs * self.down + rows % outputs // self.high) % len(self.scales)


def _matrix(how: Dequantization) -> tuple[int, int]:
    """Return the rows and columns of a weight, or of each of its slices with scales of their own."""
    *_, outputs, inputs = 1, *how.shape
    return how.numbers.get("outputs", outputs), inputs


def _by_tables(xp: Arrays, how: Dequantization, grid: _Grid) -> Iterator[bytes]:
    """Yield the elements of a weight from the products of all codes with the scale of a block."""
    outputs, inputs = _matrix(how)
    table = xp.floats(bytes(range(256)), how.code.view.dtype)
    view = how.code.view
    rows = prod(view.shape[:-1])
    code = how.code._replace(view=view._replace(shape=(rows, inputs), stride=(inputs, 1)))
    step = max(1, 4 * _STEP // max(inputs, 1))
    begin = 0
    while begin < rows:
        end = min(begin - begin % outputs + (begin % outputs // grid.high + 1) * grid.high, rows)
        end = min(end, begin - begin % outputs + outputs, begin + step)
        scales = grid.scales[grid.at(xp.indices(begin, begin + 1), outputs)]
        products, lost = _results(xp, how, table.reshape(1, -1) * scales.reshape(-1, 1))
        codes = xp.codes(code.rows(begin, end - begin).values).reshape(-1, inputs)
        if lost:  # of codes that need not occur
            values = xp.lookup(table, codes).reshape(-1, inputs) * xp.repeat(scales, grid.wide)[:, :inputs]
            yield _stored(xp, how, values)
        else:
            yield xp.block_lookup(products, codes, grid.wide)
        begin = end


def _scaled(xp: Arrays, how: Dequantization) -> Iterator[Any]:
    """(code - zero point) * scale, with one scale for each block of rows and columns, and * factor."""
    grid, (outputs, inputs) = _Grid.of(xp, how), _matrix(how)
    zero, factor = how.part("zero_point"), how.numbers.get("factor")
    zeros = None if zero is None else xp.floats(zero.values, zero.view.dtype).reshape(grid.scales.shape)
    table = xp.floats(bytes(range(256)), how.code.view.dtype)
    for begin, data in _rows(how.code, inputs):
        at = grid.at(xp.indices(begin, begin + len(data) // max(inputs, 1)), outputs)
        values = xp.lookup(table, xp.codes(data)).reshape(-1, inputs)
        scales, less = (
            each if each is None or grid.across == 1 else xp.repeat(each, grid.wide)[:, :inputs]
            for each in (grid.scales[at], None if zeros is None else zeros[at])
        )
        values = (values if less is None else values - less) * scales
        yield values if factor is None else values * xp.numbers([factor])


# -- two codes in a byte -----------------------------------------------------------------------------------------------


def _nibbles(xp: Arrays, how: Dequantization) -> Iterator[Any]:
    """bitsandbytes: the table in the file times the maximum of a block of the flat order, high nibble first."""
    numel, block = prod(how.shape), how.numbers["blocksize"]
    absmax, lookup = how.named("absmax"), how.named("quant_map")
    maxima = _nested(xp, how, absmax) if absmax.view.dtype == "uint8" else _floats(xp, how, absmax)
    table = [float(number) for number in _floats(xp, how, lookup)]
    pairs = xp.numbers([each for byte in range(256) for each in (table[byte >> 4], table[byte & 15])]).reshape(-1, 2)
    step = max(1, _STEP // block)
    for number, data in enumerate(reblocked(elements(how.code.storage, how.code.view), step * block // 2)):
        values = xp.lookup(pairs, xp.codes(data))[: numel - number * step * block]
        scales = maxima[number * step : (number + 1) * step].reshape(1, -1)
        yield values * xp.repeat(scales, block).reshape(-1)[: len(values)]


def _nested(xp: Arrays, how: Dequantization, absmax: StoredTensor) -> Any:
    """Return maxima that are quantized themselves: two roundings to float32, as in the library."""
    table, scales = (_floats(xp, how, how.named(name)) for name in ("nested_quant_map", "nested_absmax"))
    values = xp.lookup(table, xp.codes(absmax.values))
    factors = xp.repeat(scales.reshape(1, -1), how.numbers["nested_blocksize"]).reshape(-1)[: len(values)]
    return values * factors + xp.numbers([how.numbers.get("nested_offset", 0.0)])


def _e2m1(xp: Arrays, how: Dequantization) -> Iterator[Any]:
    """MXFP4 and NVFP4: E2M1, low nibble first, times the scale of a group in the row."""
    divisor, factor = how.part("global_scale"), how.part("weight_scale_2")
    table = E2M1 if factor is None else [each or 0.0 for each in E2M1]  # modelopt has no negative zero
    pairs = xp.numbers([each for byte in range(256) for each in (table[byte & 15], table[byte >> 4])]).reshape(-1, 2)
    group = how.numbers["group"]
    scales = _floats(xp, how, how.scale).reshape(-1, how.scale.view.shape[-1])
    if divisor is not None:
        by = _floats(xp, how, divisor)
        if not float(by.reshape(-1)[0]):
            raise RefusedError(f"{quoted(divisor.name)} is 0", path=how.code.storage.path)
        scales = scales / by
    if factor is not None:
        scales = scales * _floats(xp, how, factor)
    scales = _finite(xp, how, scales, how.scale.name)
    width = prod(how.code.view.shape) // max(len(scales), 1)

    def plain(codes: Any, scale: Any) -> Any:
        values = xp.lookup(pairs, codes).reshape(len(scale), -1)
        return values * xp.repeat(scale, group)[:, : values.shape[1]]

    if not how.numbers.get("turned"):
        for begin, data in _rows(how.code, width, _STEP // 2):
            codes = xp.codes(data).reshape(-1, width)
            yield plain(codes, scales[begin : begin + len(codes)])
        return
    experts, inputs, outputs = how.shape[0], how.shape[-2], how.shape[-1]
    step = max(1, 4 * _STEP // (outputs * group))
    for expert in range(experts):  # one expert is a few MB
        codes = xp.codes(how.code.rows(expert, 1).values).reshape(outputs, -1)
        own = scales[expert * outputs : (expert + 1) * outputs]
        for begin in range(0, inputs // group, step):
            part_of = codes[:, begin * group // 2 : (begin + step) * group // 2]
            yield plain(part_of, own[:, begin : begin + step]).swapaxes(0, 1)


# -- codes in words ----------------------------------------------------------------------------------------------------


def fields(xp: Arrays, words: Any, bits: int, count: int, *, dense: bool = True) -> Any:
    """Return ``count`` codes of each column of words: a stream of bits, the lowest first.

    Without ``dense`` a word has whole codes only, and its highest bits may be unused.
    """
    numbers = xp.indices(0, count)
    if not dense:
        at, shift = numbers // (32 // bits), numbers % (32 // bits) * bits
        return (words[at] >> shift.reshape(-1, 1)) & ((1 << bits) - 1)
    at, shift = numbers * bits // 32, (numbers * bits % 32).reshape(-1, 1)
    found = words[at] >> shift
    if 32 % bits:  # a code may begin in one word and end in the next
        found = found | (words[(at + 1) % len(words)] << (32 - shift))
    return found & ((1 << bits) - 1)


def _packed(xp: Arrays, how: Dequantization) -> Iterator[Any]:
    """compressed-tensors: rows of codes with an offset; zero points are packed along the rows."""
    bits, inputs = how.numbers["bits"], how.shape[-1]
    half, dense = 1 << (bits - 1), how.numbers["dense"]
    zero, order, scales = how.part("zero_point"), how.part("g_idx"), _floats(xp, how, how.scale)
    groups = 1 if len(scales) == 1 else how.scale.view.shape[-1]
    scales, zeros = scales.reshape(-1, groups), None
    if zero is not None:
        packed = xp.words(zero.values).reshape(-1, groups)
        zeros = xp.as_float(fields(xp, packed, bits, prod(how.shape[:-1]), dense=dense) - half)
    columns = _groups(xp, how, order, groups, inputs)
    width = how.code.view.shape[-1]
    for begin, data in _rows(how.code, 4 * width):
        words = xp.words(data).reshape(-1, width).swapaxes(0, 1)
        values = xp.as_float(fields(xp, words, bits, inputs, dense=dense).swapaxes(0, 1) - half)
        rows = slice(begin, begin + len(values)) if len(scales) > 1 else slice(None)
        if zeros is not None:
            values = values - zeros[rows][:, columns]
        yield values * scales[rows][:, columns]


def _groups(xp: Arrays, how: Dequantization, order: StoredTensor | None, groups: int, inputs: int) -> Any:
    """Return the group of each input; raise RefusedError if there is no such group."""
    if order is not None:
        found = xp.words(order.values)[:: BY_NAME[order.view.dtype].itemsize // 4]
        if len(found) == inputs and bool((found < groups).all()):
            return found
        if not bool((found == 0xFFFFFFFF).all()):
            raise RefusedError(f"{quoted(order.name)} names groups that do not exist", path=how.code.storage.path)
    sizes = [n for n in how.numbers["sizes"] if type(n) is int and n > 0 and -(-inputs // n) == groups]
    if not sizes and (not groups or inputs % groups):
        what = f"{quoted(how.name)}: {inputs} columns do not divide into {groups} groups, and nothing says how they do"
        raise RefusedError(what, path=how.code.storage.path)
    return xp.indices(0, inputs) // max([*sizes, inputs // groups][0], 1)


def _turned(xp: Arrays, how: Dequantization) -> Iterator[Any]:
    """GPTQ and AWQ: weights are stored with the inputs first, so some outputs are computed at a time."""
    awq, bits = how.rule == "awq", how.numbers.get("bits", 4)
    outputs, inputs = how.shape
    scale, zero = how.named("scales"), how.named("qzeros")
    groups = scale.view.shape[0]
    columns = _groups(xp, how, how.part("g_idx"), groups, inputs)
    scales = _floats(xp, how, scale).reshape(groups, outputs)
    words = xp.words(zero.values).reshape(groups, -1)
    zeros = _awq(xp, words) if awq else fields(xp, words.swapaxes(0, 1), bits, outputs).swapaxes(0, 1)
    if how.numbers.get("offset"):
        how.numbers["wrapped"].value = int((zeros == (1 << bits) - 1).sum())
        zeros = (zeros + 1) & ((1 << bits) - 1)
    zeros = xp.as_float(zeros)
    rows, width = how.code.view.shape
    kept = xp.words(how.code.values).reshape(rows, width) if 4 * rows * width <= _KEPT else None
    # Fewer columns at a time would need many short reads.
    step = max(1 if kept is not None else 64, 4 * _STEP // (inputs * (8 if awq else 1)))
    for begin in range(0, width, step):
        part = kept[:, begin : begin + step] if kept is not None else _columns(xp, how.code, begin, step)
        codes = _awq(xp, part) if awq else fields(xp, part, bits, inputs)
        at = slice(begin * 8, begin * 8 + codes.shape[1]) if awq else slice(begin, begin + codes.shape[1])
        values = (xp.as_float(codes) - zeros[:, at][columns]) * scales[:, at][columns]
        yield values.swapaxes(0, 1)


def _awq(xp: Arrays, words: Any) -> Any:
    """Return the codes of eight outputs in each word."""
    outputs = xp.indices(0, 8 * words.shape[1])
    return (words[:, outputs // 8] >> xp.words(_AWQ)[outputs % 8]) & 15


def _columns(xp: Arrays, code: StoredTensor, begin: int, count: int) -> Any:
    """Read some columns of words, row by row."""
    rows, width = code.view.shape
    count = min(count, width - begin)
    down, across = code.view.stride
    view = code.view._replace(shape=(count,), stride=(across,), offset=code.view.offset + begin * across)
    parts = (view._replace(offset=view.offset + row * down) for row in range(rows))
    data = b"".join(b"".join(elements(code.storage, part)) for part in parts)
    return xp.words(data).reshape(rows, count)


# -- blocks of GGUF ----------------------------------------------------------------------------------------------------


def need_gguf(types: Collection[str], path: str) -> None:
    """Raise RefusedError if the gguf package is not installed, or does not dequantize one of these types."""
    name = ""
    try:
        from gguf import GGMLQuantizationType, quants

        xp = arrays(path)
        for name in types:
            quants.dequantize(xp.codes(bytes(BY_NAME[name].itemsize)).reshape(1, -1), GGMLQuantizationType[name])
    except ImportError:
        what = "the gguf package computes the values of quantized tensors, and it is not installed"
        raise RefusedError(what, path=path, next="pip install 'ckptool[gguf]'") from None
    except (NotImplementedError, KeyError):
        what = f"the installed gguf package does not dequantize {name}"
        raise RefusedError(what, path=path, next="pip install --upgrade gguf") from None


def rearranged(code: StoredTensor, heads: int, swap: int = 1) -> Iterator[bytes]:
    """Yield the rows of a tensor some at a time, in the order in which each head has its even rows first.

    llama.cpp's ``permute`` interleaves the two halves of a head. Without ``heads`` the order stays. Numbers of ``swap``
    bytes come out in the other byte order.
    """
    dtype, (*_, columns) = BY_NAME[code.view.dtype], (1, *code.view.shape)
    rows, width = code.view.numel // max(columns, 1), columns // dtype.packed * dtype.itemsize
    if heads and len(code.view.shape) == 1:  # a bias
        rows, width = columns, dtype.itemsize
    high = rows // heads if heads else 1
    for _, data in _rows(code, high * width, _BLOCKS):
        if heads:
            every = [data[at : at + width] for at in range(0, len(data), width)]
            halves = (every[at + half : at + high : 2] for at in range(0, len(every), high) for half in (0, 1))
            data = b"".join(chain.from_iterable(halves))
        yield swapped(data, swap)


def _blocks(xp: Arrays, how: Dequantization) -> Iterator[Any]:
    """GGUF: what ``gguf.quants.dequantize`` returns, less what the converter added to a norm."""
    from gguf import GGMLQuantizationType, quants

    code, added = how.code, how.numbers.get("added", 0.0)
    dtype, (*_, columns) = BY_NAME[code.view.dtype], (1, *code.view.shape)
    for data in rearranged(code, how.numbers.get("heads", 0)):
        if is_block(dtype.name):
            width = columns // dtype.packed * dtype.itemsize
            values = quants.dequantize(xp.codes(data).reshape(-1, width), GGMLQuantizationType[dtype.name])
        else:
            values = xp.floats(data, dtype.name)
        yield values - xp.numbers([added]) if added else values


_RULES: Final[Mapping[str, Callable[[Arrays, Dequantization], Iterator[Any]]]] = {
    **{"scaled": _scaled, "bnb4": _nibbles, "nvfp4": _e2m1, "mxfp4": _e2m1},
    **{"packed": _packed, "gptq": _turned, "awq": _turned, "gguf": _blocks},
}
