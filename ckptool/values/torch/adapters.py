"""Merge adapter tensors into a weight, block by block: the arithmetic of PEFT's ``merge_and_unload``, to the bit.

PEFT (``tuners/lora/layer.py``, ``variants.py``, ``dora.py``; ``tuners/ia3/layer.py``) computes B @ A in float32, then
multiplies by the scale, adds the weight, and rounds once. torch multiplies blocks of 48 rows and more as it multiplies
the whole matrix, but not always smaller ones, so blocks have at least 64 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite, isqrt, lcm, prod
from typing import Any, Final, TypeAlias

from ...base.dtypes import BY_NAME, Dtype
from ...base.errors import RefusedError
from ...base.records import NamedTuple
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.tensors import Tensor, extent, is_contiguous
from ..arrays import arrays
from ..elements import StorageReader, elements, gather, storage_reader, swapped
from .compute import as_bytes
from .loads import float32_product, need_torch, one_thread, torch_dtype

#: Elements of a weight that are computed at once, and the fewest rows of a block.
_BLOCK: Final = 1 << 18
_FEWEST_ROWS: Final = 64
#: The most bytes of matrices of all experts that are kept for the next expert.
_CACHED: Final = 64 << 20
#: Kinds of steps that need only the same rows of the tensor of an adapter for a block, and whose tensors these are.
_BY_ROWS: Final = ("copy", "sum")
_OWNER: Final = " of the adapter"
#: The dtypes that are computed in float32.
_WIDENED: Final = ("float32", "float16", "bfloat16")
#: The most columns that one matrix rotates, unless a block is larger.
_MOST_COLUMNS: Final = 4096


class StoredTensor(NamedTuple):
    """A tensor as plain data: its name for messages, its storage, and its place there."""

    name: str
    storage: StorageReader
    view: Tensor

    @classmethod
    def of(cls, checkpoint: Checkpoint, name: str, tensor: Tensor) -> StoredTensor:
        """Return a tensor of a checkpoint; one without dimensions gets one with a single element."""
        view = tensor if tensor.shape else tensor._replace(shape=(1,), stride=(1,))
        return cls(name, storage_reader(checkpoint, tensor.storage), view)

    @property
    def values(self) -> bytes:
        """All bytes of the tensor."""
        return b"".join(elements(self.storage, self.view))

    def equals(self, other: StoredTensor) -> bool:
        """Return whether another tensor has the same dtype, shape and bytes."""
        one, two = self.view, other.view
        return (one.shape, one.dtype) == (two.shape, two.dtype) and self.values == other.values

    def rows(self, begin: int, count: int) -> StoredTensor:
        """Return ``count`` rows of the tensor, from ``begin`` on."""
        view = self.view
        rows = view._replace(shape=(count, *view.shape[1:]), offset=view.offset + begin * view.stride[0])
        return self._replace(view=rows)


class AdapterStep(NamedTuple):
    """One change of a weight by tensors of an adapter.

    These kinds add a value times ``factor``: ``product`` B @ A (``tensors``: B, A, and perhaps DoRA's magnitude, one
    for each row of the weight, or for each column with ``transposed``); ``adalora`` B @ (A * E), divided by ``rank``;
    ``vera`` B @ A with scaled rows (``tensors``: B, A, and the scales of both); ``hadamard`` (A1 @ B1) * (A2 @ B2),
    perhaps with a core before each pair; ``kronecker`` the Kronecker product of two factors (the first ``rank`` tensors
    give the first one); ``sum`` a tensor. The others have no factor: ``copy`` replaces the weight, ``rows`` the rows
    with the numbers ``rows``, ``scale`` multiplies. ``butterfly`` rotates the columns by blocks (1 x blocks x size x
    size) and multiplies each row by a number. ``rotation`` rotates by the upper triangles of the blocks: by a series of
    ``rank`` terms, or exactly with 0.

    With ``round_first`` a product is rounded to the dtype of the weight, as PEFT does for embeddings; with ``in_model``
    to the dtype of the tensors, because PEFT casts an adapter to 32 bits only when it loads it. With ``transposed`` the
    transpose is added. Otherwise B may have fewer rows than the weight, for its rows from ``first_row`` on. ``row`` is
    the number of elements in a row of the weight, if its shape does not say it: for a tensor of experts.
    """

    kind: str
    tensors: tuple[StoredTensor, ...]
    factor: float = 1.0
    transposed: bool = False
    round_first: bool = False
    in_model: bool = False
    rows: tuple[int, ...] = ()
    first_row: int = 0
    row: int = 0
    rank: int = 0


def merged_elements(
    weight: StoredTensor, dtype: Dtype, steps: tuple[AdapterStep, ...], width: int, begin: int, size: int
) -> Iterator[bytes]:
    """Yield ``size`` bytes from ``begin`` on of a weight with all steps applied, in row-major order.

    ``width`` is the size of the numbers that are byte-swapped. The blocks do not depend on ``begin``. Raise
    RefusedError if a tensor of the adapter, or the result, holds NaN or infinity.
    """
    shape, path = weight.view.shape, weight.storage.path
    row, rows, first, last = prod(shape[1:]) * dtype.itemsize, shape[0], 0, 0
    # DoRA divides columns by their norms.
    at_once = any(step.kind == "product" and len(step.tensors) == 3 and step.transposed for step in steps)
    many = rows if at_once else max(_FEWEST_ROWS, _BLOCK // max(prod(shape[1:]), 1))
    merged = _merged_without_torch(weight, steps) or _merged_by_torch(weight, dtype, steps)
    while last < rows:
        # A short rest belongs to the block before it.
        first, last = last, rows if rows - last - many < _FEWEST_ROWS else last + many
        if first * row >= begin + size or last * row <= begin:
            continue
        data, finite = merged(first, last)
        if not finite:
            finite_values(need_torch("merging an adapter", path), weight.rows(first, last - first), " of the base")
            what = f"{weight.name} would hold NaN or infinity after the merge"
            way = "cast the base to a dtype with a larger range first, such as float32"
            raise RefusedError(what, path=path, next=way)
        yield swapped(data, width)[max(begin - first * row, 0) : begin + size - first * row]


#: Returns the merged rows of a weight from the first number to the last, and whether all values in them are finite.
_Merged: TypeAlias = Callable[[int, int], tuple[bytes, bool]]


def _merged_by_torch(weight: StoredTensor, dtype: Dtype, steps: tuple[AdapterStep, ...]) -> _Merged:
    torch = need_torch("merging an adapter", weight.storage.path)
    shape, wide = weight.view.shape, torch.float64 if dtype.name == "float64" else torch.float32
    prepared = [_prepared(torch, step, wide, prod(shape[1:])) for step in steps]

    def merged(first: int, last: int) -> tuple[bytes, bool]:
        if steps and steps[0].kind == "copy":
            values = torch.empty((last - first, *shape[1:]), dtype=torch_dtype(torch, dtype.name))
        else:
            values = _elements(torch, weight.rows(first, last - first))
        # Several pieces are computed at the same time, in threads of their own.
        with one_thread(torch):
            for step, tensors in zip(steps, prepared):
                _apply(torch, values, step, tensors, first)
        return as_bytes(torch, values, values.dtype), _is_finite(torch, values)

    return merged


def _merged_without_torch(weight: StoredTensor, steps: tuple[AdapterStep, ...]) -> _Merged | None:
    """Return the merge of steps that only add products of two finite matrices; None if torch is needed."""
    plain = AdapterStep("product", ())
    for step in steps:
        if step._replace(tensors=(), factor=1.0, first_row=0, row=0) != plain or len(step.tensors) > 2:
            return None
    views = [weight.view, *(part.view for step in steps for part in step.tensors)]
    fit = all(view.dtype in _WIDENED and is_contiguous(view) and 0 not in view.shape for view in views)
    multiplied = float32_product() if fit and prod(weight.view.shape[1:]) > 1 else None
    if multiplied is None:
        return None
    library = arrays(weight.storage.path)

    def matrix(data: bytes, view: Tensor) -> Any:
        return library.floats(data, view.dtype).reshape(-1, prod(view.shape[1:]))

    pairs = [[matrix(part.values, part.view) for part in step.tensors] for step in steps]
    if not all(library.is_finite(values) for pair in pairs for values in pair):
        return None  # torch's part raises the error

    def merged(first: int, last: int) -> tuple[bytes, bool]:
        data, finite = weight.rows(first, last - first).values, True
        with library.quiet():
            for step, (b, a) in zip(steps, pairs):
                values = matrix(data, weight.view)
                begin, end = max(first, step.first_row), min(last, step.first_row + len(b))
                if begin < end:
                    delta = multiplied(b[begin - step.first_row : end - step.first_row], a)
                    delta *= step.factor
                    values[begin - first : end - first] += delta
                data, lost = library.stored(values, weight.view.dtype)
                finite = finite and not lost and library.is_finite(values)
        return data, finite

    return merged


def _apply(torch: Any, values: Any, step: AdapterStep, tensors: Any, first: int) -> None:
    """Apply a step to the rows of a block that it changes. ``first`` is the number of the block's first row."""
    begin, end = max(first, step.first_row), first + values.shape[0]
    if step.kind in ("product", "sum") and not step.transposed:
        end = min(end, step.first_row + step.tensors[0].view.shape[0])
    if begin < end:
        inside = begin - step.first_row, end - step.first_row
        if step.kind in _BY_ROWS:
            tensors = [finite_values(torch, part.rows(inside[0], end - begin), _OWNER) for part in step.tensors]
        part = values[begin - first : end - first]
        part.copy_(_STEPS[step.kind](_Rows(torch, part, *inside), tensors, step))


def _elements(torch: Any, part: StoredTensor) -> Any:
    """Return a tensor in its own dtype."""
    view = part.view
    data = bytearray(part.values) if is_contiguous(view) else _strided(part)
    if not data:
        return torch.empty(view.shape, dtype=torch_dtype(torch, view.dtype))
    return torch.frombuffer(data, dtype=torch_dtype(torch, view.dtype)).reshape(view.shape)


def _strided(part: StoredTensor) -> bytearray:
    """Return the elements of a view with gaps. All bytes around them are cached, because neighbours follow."""
    view, cache = part.view, part.storage.cache
    whole = view._replace(shape=(extent(view.shape, view.stride) + view.offset,), stride=(1,), offset=0)
    width = BY_NAME[view.dtype].itemsize
    if whole.numel * width > _CACHED:
        return bytearray(part.values)
    if cache.last[0] != whole.storage or len(cache.last[1]) < whole.numel * width:
        cache.last = whole.storage, b"".join(elements(part.storage, whole))
    data = memoryview(cache.last[1])[view.offset * width : whole.numel * width]
    return bytearray(gather(data, view.shape, view.stride, width))


def finite_values(torch: Any, part: StoredTensor, owner: str = "") -> Any:
    """Return the values of a tensor; raise RefusedError, which names its ``owner``, if one is NaN or infinite."""
    values = _elements(torch, part)
    if not _is_finite(torch, values):
        raise RefusedError(f"{part.name}{owner} holds NaN or infinity", path=part.storage.path)
    return values


def _is_finite(torch: Any, values: Any) -> bool:
    """Return whether no value is NaN or infinite; the extremes tell, in a twentieth of the time of ``isfinite``."""
    if not values.numel():
        return True
    extremes = torch.aminmax(values if values.element_size() > 1 else values.float())
    return all(isfinite(float(value)) for value in extremes)


class _Rows(NamedTuple):
    """The rows of a weight that a step changes: their values, and the numbers of the first and the last in the step."""

    torch: Any
    values: Any
    first: int
    last: int


def _product(rows: _Rows, tensors: Any, step: AdapterStep) -> Any:
    torch, values, first, last = rows
    b, a = tensors[0].flatten(1), tensors[1].flatten(1)
    if step.transposed:
        delta = (b @ a[:, first:last].contiguous()).T * step.factor
    elif step.in_model and tensors[1].dim() > 2 and tensors[1].shape[2:4] != (1, 1):  # PEFT convolves
        delta = (_convolved(torch, tensors[1], tensors[0][first:last]) * step.factor).reshape(values.shape)
    else:
        delta = (b[first:last] @ a).mul_(step.factor).reshape(values.shape)
    if step.rank:
        return values + delta / (torch.tensor(float(step.rank), dtype=delta.dtype) + 1e-5)
    own = [torch_dtype(torch, part.view.dtype) if step.in_model else delta.dtype for part in step.tensors]
    delta = delta.to(own[0])
    if len(tensors) == 2:
        delta = delta.to(values.dtype) if step.round_first else delta
        return values + delta if step.round_first or step.in_model else delta.add_(values)
    magnitude = tensors[2].flatten().to(own[2])
    total = values + delta
    if step.transposed:
        norm = torch.linalg.norm(values.T + delta.T, dim=1)
        return (magnitude / norm).view(1, -1) * total
    others = tuple(range(1, values.dim()))
    norm = torch.linalg.norm(total, dim=1) if len(others) == 1 else total.norm(p=2, dim=others, keepdim=True).flatten()
    return (magnitude[first:last] / norm).view(-1, *(1,) * (values.dim() - 1)) * total


def _convolved(torch: Any, a: Any, b: Any) -> Any:
    """Return the product of the two matrices of a convolution, by the library that torch takes with several threads."""
    if a.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        a, b = (part.unsqueeze(2) if part.dim() == 3 else part for part in (a, b))
        sides = a.dim() - 2
        made = torch.mkldnn_convolution(a.transpose(0, 1), b, None, [0] * sides, [1] * sides, [1] * sides, 1)
        return made.transpose(0, 1)
    return getattr(torch, f"conv{a.dim() - 2}d")(a.transpose(0, 1), b).transpose(0, 1)


def _hadamard(rows: _Rows, tensors: Any, step: AdapterStep) -> Any:
    own = slice(rows.first, rows.last)
    delta = tensors[0][own]
    if len(tensors) > 1:
        delta = (delta @ tensors[1]) * (tensors[2][own] @ tensors[3])
    return rows.values + (delta * step.factor).view(rows.values.shape)


def _prepared(torch: Any, step: AdapterStep, dtype: Any, columns: int) -> Any:
    """Return the tensors of a step with what all blocks of a weight need computed once."""
    if step.kind in _BY_ROWS:
        return ()
    tensors = tuple(finite_values(torch, part, _OWNER).to(dtype) for part in step.tensors)
    if step.kind == "adalora":
        return tensors[0], tensors[1] * tensors[2].view(-1, 1)
    if step.kind == "vera":
        return tuple(vector.view(-1, 1) * matrix for matrix, vector in zip(tensors[:2], tensors[2:]))
    if step.kind == "hadamard" and len(tensors) == 6:
        pairs = (tensors[0], tensors[2], tensors[1]), (tensors[3], tensors[5], tensors[4])
        one, two = (torch.einsum("i j k l, j r, i p -> p r k l", *parts) for parts in pairs)
        return (one * two,)
    if step.kind == "kronecker":
        first, second = tensors[: step.rank], tensors[step.rank :]
        if len(second) == 3:
            second = (torch.einsum("i j k l, i p, j r -> p r k l", *second),)
        one, two = (part[0] if len(part) == 1 else part[0] @ part[1] for part in (first, second))
        return one, two.flatten(1)
    if step.kind == "butterfly":
        blocks = tensors[0].flatten(0, 1)
        return _cayley(torch, 0.5 * (blocks - blocks.transpose(1, 2))), *tensors[1:]
    if step.kind == "rotation":
        rotations = _from_triangles(torch, tensors[0], step.rank)
        return (rotations.expand(columns // rotations.shape[1], -1, -1),)
    return tensors


def _cayley(torch: Any, skew: Any) -> Any:
    """Return the rotations (I - S) / (I + S) of skew-symmetric matrices."""
    # MKL of torch 2.13 returns wrong values for batches of large matrices with more than one thread.
    unit = torch.eye(skew.shape[1], dtype=skew.dtype).expand_as(skew)
    with one_thread(torch):
        return torch.linalg.solve(unit + skew, unit - skew, left=False)


def _from_triangles(torch: Any, triangles: Any, terms: int) -> Any:
    """Return the rotations of skew-symmetric matrices, given their upper triangles; with ``terms``, by PEFT's series.

    The series is I + 2 S + 2 S^2 + ... + S^n: the last power counts once, and 4 terms are the same as 3.
    """
    size = (1 + isqrt(1 + 8 * triangles.shape[1])) // 2
    half = triangles.new_zeros(len(triangles), size, size)
    rows, columns = torch.triu_indices(size, size, 1)
    half[:, rows, columns] = triangles
    skew = half - half.transpose(1, 2)
    if not terms:
        return _cayley(torch, skew)
    total, power = torch.eye(size, dtype=skew.dtype).repeat(len(skew), 1, 1), skew
    if terms > 1:
        total.add_(skew, alpha=2.0)
    for left in reversed(range(max(terms - 2, 2) if terms > 2 else 0)):
        power = torch.bmm(power, skew)
        total.add_(power, alpha=2.0 if left else 1.0)
    return total


def _rotation(rows: _Rows, tensors: Any, step: AdapterStep) -> Any:
    """Rotate the columns, some blocks at a time.

    PEFT multiplies one matrix for all columns. With more than 768 columns its last bits depend on how many columns the
    CPU adds at once.
    """
    rotations = tensors[0]
    values = rows.values.flatten(1).to(rotations.dtype)
    rotated = rows.torch.empty_like(values)
    size = rotations.shape[1]
    width = min(lcm(size, 768), max(_MOST_COLUMNS, size)) // size
    for first in range(0, len(rotations), width):
        matrix = rows.torch.block_diag(*rotations[first : first + width])
        own = slice(first * size, first * size + len(matrix))
        rotated[:, own] = (matrix @ values[:, own].T).T
    for scales in tensors[1:]:
        rotated.mul_(scales.view(-1, 1)[rows.first : rows.last])
    return rotated.view(rows.values.shape)


def _kronecker(rows: _Rows, tensors: Any, step: AdapterStep) -> Any:
    one, two = tensors
    numbers = rows.torch.arange(rows.first, rows.last)
    delta = one[numbers // len(two)].unsqueeze(2) * two[numbers % len(two)].unsqueeze(1)
    return rows.values + delta.mul_(step.factor).view(rows.values.shape)


def _sum(rows: _Rows, tensors: Any, step: AdapterStep) -> Any:
    wide = rows.torch.promote_types(rows.values.dtype, rows.torch.float32)
    return rows.values + (tensors[0] if step.in_model else tensors[0].to(wide)) * step.factor


def _replace_rows(rows: _Rows, tensors: Any, step: AdapterStep) -> Any:
    for number, row in enumerate(step.rows):
        if rows.first <= row < rows.last:
            rows.values[row - rows.first] = tensors[0][number]
    return rows.values


def _scale(rows: _Rows, tensors: Any, step: AdapterStep) -> Any:
    factor = tensors[0].T if step.transposed else tensors[0]
    if rows.values.dim() == 1:
        factor = factor.flatten()
    return rows.values * (factor[rows.first : rows.last] if factor.shape[0] > 1 else factor)


#: The functions of all steps. The steps of an adapter apply in this order.
_STEPS: Final = {
    "copy": lambda rows, tensors, step: tensors[0],
    "product": _product,
    "adalora": _product,
    "vera": _product,
    "hadamard": _hadamard,
    "kronecker": _kronecker,
    "butterfly": _rotation,
    "rotation": _rotation,
    "scale": _scale,
    "sum": _sum,
    "rows": _replace_rows,
}
ORDER: Final = tuple(_STEPS)
#: Those that replace or multiply values.
NOT_ADDED: Final = ("copy", "butterfly", "rotation", "scale", "rows")
