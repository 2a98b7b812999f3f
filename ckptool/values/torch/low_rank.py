"""The two matrices of a LoRA whose product is closest to a difference of two weights, or to another product.

The closest product of a rank keeps the largest singular values (Eckart and Young). A large difference is decomposed by
subspace iteration from seeded random vectors (Halko, Martinsson and Tropp, 2011), a product without forming it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from threading import Lock
from typing import Any, Final, TypeAlias

from ...base.errors import RefusedError
from ...base.records import NamedTuple
from ...files.sources import Deferred
from ..elements import swapped
from .adapters import StoredTensor, finite_values
from .compute import as_bytes
from .loads import need_torch, one_thread, torch_dtype

#: Left singular vectors (columns), singular values, right singular vectors (rows), and the square of the whole norm.
_Decomposed: TypeAlias = "tuple[Any, Any, Any, float]"

_SEED: Final = 0
#: Random vectors beyond the rank, and the smaller side of a matrix up to which the exact decomposition is as fast.
_MORE: Final = 16
_SMALL: Final = 256
#: Rounds end when one adds less than these parts of the lost and the whole square of the norm to the kept one.
_SETTLED, _PRECISION = 1e-5, 1e-8
_MOST_ROUNDS: Final = 16
#: The unit in which a kept part is deferred.
PARTS: Final = 1_000_000


class Difference(NamedTuple):
    """A tuned weight minus its base, as a matrix with the first dimension, or with ``transposed`` its transpose."""

    tuned: StoredTensor
    base: StoredTensor
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the difference."""
        return self.tuned.view.shape[::-1] if self.transposed else self.tuned.view.shape

    def decomposed(self, torch: Any, rank: int) -> _Decomposed:
        """Decompose the difference, with at least the ``rank`` largest singular values."""
        values = finite_values(torch, self.tuned)
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        delta = values.to(wide).sub_(finite_values(torch, self.base).to(wide)).float().flatten(1)
        return _leading(torch, delta.T.contiguous() if self.transposed else delta, rank)


class Product(NamedTuple):
    """B @ A, both with more than two dimensions if they change a convolution."""

    b: StoredTensor
    a: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the product."""
        return self.b.view.shape[0], *self.a.view.shape[1:]

    def decomposed(self, torch: Any, rank: int) -> _Decomposed:
        """Decompose the product in float64, with all singular values that are not 0."""
        left, upper = torch.linalg.qr(finite_values(torch, self.b).double().flatten(1))
        right, lower = torch.linalg.qr(finite_values(torch, self.a).double().flatten(1).T)
        u, values, v = torch.linalg.svd(upper @ lower.T)
        return left @ u, values, v @ right.T, float(values.square().sum())


class Pair(Deferred):
    """The elements of both matrices until both were requested, and the kept part of the norm, in millionths."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()
        self.elements: tuple[bytes, bytes] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return Pair, ()  # another process computes them again


class LowRank(NamedTuple):
    """Two matrices of a ``rank``, whose product is ``factor`` times the closest one to ``source``.

    Both get the square roots of the singular values; further columns are 0. ``width`` is the size of the numbers that
    are byte-swapped. It is a tuple, because the checksums of what a plan reads are looked for in tuples.
    """

    source: Difference | Product
    rank: int
    dtype: str
    width: int
    factor: float
    pair: Pair


def factor_elements(how: LowRank, which: int) -> Iterator[bytes]:
    """Yield the elements of B (``which`` is 0) or of A (1); both are computed at the first request, and refused if one
    is NaN or infinite."""
    torch = need_torch("computing a low rank")
    with how.pair.lock:
        made, how.pair.elements = how.pair.elements, None
        if made is None:
            with one_thread(torch):
                made = how.pair.elements = _computed(torch, how)
    yield swapped(made[which], how.width)


def singular_values(source: Product) -> list[float]:
    """Return the singular values of a product, the largest first."""
    torch = need_torch("computing a rank", source.a.storage.path)
    with one_thread(torch):
        return [float(value) for value in source.decomposed(torch, 0)[1]]


def _computed(torch: Any, how: LowRank) -> tuple[bytes, bytes]:
    """Return the elements of B and A, and set the kept part of the norm."""
    u, values, v, total = how.source.decomposed(torch, how.rank)
    count = min(how.rank, len(values))
    square = float(values[:count].double().square().sum())
    how.pair.value = round(PARTS * (min(sqrt(square / total), 1.0) if total else 1.0))
    root = (values[:count] * abs(how.factor)).sqrt()
    b, a = u.new_zeros(len(u), how.rank), v.new_zeros(how.rank, v.shape[1])
    b[:, :count], a[:count] = u[:, :count] * root.copysign(how.factor), v[:count] * root[:, None]
    dtype = torch_dtype(torch, how.dtype)
    if not all(bool(torch.isfinite(matrix.to(dtype)).all()) for matrix in (b, a)):
        what = f"a value of a low rank does not fit into {how.dtype}"
        raise RefusedError(what, next="take a dtype with a larger range: `--to-dtype float32`")
    return as_bytes(torch, b, dtype), as_bytes(torch, a, dtype)


def _leading(torch: Any, matrix: Any, rank: int) -> _Decomposed:
    """Return the largest singular values of a matrix, at least ``rank``, with their vectors."""
    total, width = float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2, rank + _MORE
    if min(matrix.shape) <= max(_SMALL, 2 * width):
        return *torch.linalg.svd(matrix, full_matrices=False), total
    random = torch.Generator().manual_seed(_SEED)
    basis, before = torch.randn(matrix.shape[1], width, generator=random), -1.0
    for _ in range(_MOST_ROUNDS):
        left = torch.linalg.qr(matrix @ basis)[0]
        basis, small = torch.linalg.qr(matrix.T @ left)
        kept = float(torch.linalg.svdvals(small)[:rank].double().square().sum())
        if kept - before <= _SETTLED * (total - kept) + _PRECISION * total:
            break
        before = kept
    u, values, v = torch.linalg.svd(small.T)
    return left @ u, values, v @ basis.T, total
