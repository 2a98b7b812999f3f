"""Arithmetic on arrays of float32 by NumPy, or by torch where NumPy is not installed: the same numbers from both."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol, cast

from ..base.dtypes import BY_NAME
from .numeric import to_numbers
from .torch.compute import cast_elements, numpy_module
from .torch.loads import need_torch, torch_dtype

_BYTES: Final = bytes(range(256))


class Arrays(Protocol):
    """What both libraries do. Arrays support the operators of Python, slices, ``reshape`` and ``swapaxes``."""

    _library: Any

    def codes(self, data: bytes) -> Any:
        """Return bytes as an array."""

    def words(self, data: bytes) -> Any:
        """Return little-endian words of 32 bits without a sign, as int64."""

    def floats(self, data: bytes, dtype: str) -> Any:
        """Return little-endian elements of a dtype as float32."""

    def numbers(self, values: list[float]) -> Any:
        """Return numbers as float32."""

    def indices(self, begin: int, end: int) -> Any:
        """Return the integers from ``begin`` to ``end``."""
        return self._library.arange(begin, end)

    def lookup(self, table: Any, codes: Any) -> Any:
        """Return the number of the table, or both numbers of its row, for each code, in one dimension."""

    def block_lookup(self, tables: bytes, codes: Any, wide: int) -> bytes:
        """Return the elements for codes, from a table of 256 elements of 2 bytes for each ``wide`` columns."""

    def repeat(self, array: Any, times: int) -> Any:
        """Repeat each column."""

    def as_float(self, array: Any) -> Any:
        """Return integers as float32."""

    def rounded(self, array: Any, dtype: str) -> Any:
        """Round to a narrower dtype, ties to even, and widen again."""
        return array if dtype == "float32" else self.floats(self.stored(array, dtype)[0], dtype).reshape(array.shape)

    def stored(self, array: Any, dtype: str) -> tuple[bytes, int]:
        """Return the elements in a dtype, and how many finite ones became infinite or NaN."""

    def is_finite(self, array: Any) -> bool:
        """Return whether all elements are finite."""
        return bool(self._library.isfinite(array).all())

    def infinite(self, array: Any) -> int:
        """Return how many elements are infinite."""
        return int(self._library.isinf(array).sum())

    def quiet(self) -> AbstractContextManager[Any]:
        """Return a context in which numbers that are too large cause no warning."""
        return nullcontext()


def arrays(path: str = "") -> Arrays:
    """Return the library that is installed, NumPy first; raise UnreadableError if neither is."""
    numpy = numpy_module()
    return _Numpy(numpy) if numpy is not None else _Torch(need_torch("computing values, without numpy,", path))


class _Numpy(Arrays):
    def __init__(self, numpy: Any) -> None:
        self._library = numpy

    def codes(self, data: bytes) -> Any:
        return self._library.frombuffer(data, "u1")

    def words(self, data: bytes) -> Any:
        return self._library.frombuffer(data, "<u4").astype("i8")

    def floats(self, data: bytes, dtype: str) -> Any:
        numpy = self._library
        if dtype == "bfloat16":
            return (numpy.frombuffer(data, "<u2").astype("u4") << 16).view("f4")
        if BY_NAME[dtype].itemsize == 1:
            return self.numbers([complex(number).real for number in to_numbers(_BYTES, dtype)])[self.codes(data)]
        known = {"float32": "<f4", "float16": "<f2", "float64": "<f8", "int16": "<i2", "int32": "<i4", "int64": "<i8"}
        return numpy.frombuffer(data, known[dtype]).astype("f4")

    def numbers(self, values: list[float]) -> Any:
        return self._library.array(values, "f4")

    def lookup(self, table: Any, codes: Any) -> Any:
        # Without "clip" the codes are checked, which takes longer than the lookup.
        if table.ndim == 1:
            return table.take(codes.reshape(-1), mode="clip")
        return table.view("u8").reshape(-1).take(codes.reshape(-1), mode="clip").view("f4")

    def block_lookup(self, tables: bytes, codes: Any, wide: int) -> bytes:
        numpy, rows = self._library, self._library.frombuffer(tables, "<u2").reshape(-1, 256)
        out = numpy.empty(codes.shape, "<u2")
        for number, table in enumerate(rows):
            columns = slice(number * wide, (number + 1) * wide)
            out[:, columns] = table.take(codes[:, columns], mode="clip")
        return bytes(out.data)

    def repeat(self, array: Any, times: int) -> Any:
        return self._library.repeat(array, times, axis=1)

    def as_float(self, array: Any) -> Any:
        return array.astype("f4")

    def stored(self, array: Any, dtype: str) -> tuple[bytes, int]:
        numpy, flat = self._library, self._library.ascontiguousarray(array)
        if dtype == "float32":
            return flat.tobytes(), 0
        if dtype == "float16":
            half = flat.astype("<f2")
            lost = numpy.isinf(half).sum() - numpy.isinf(flat).sum()
            return half.tobytes(), int(lost)
        return cast_elements(flat.reshape(-1).view("u1").data, "float32", dtype)

    def quiet(self) -> AbstractContextManager[Any]:
        return cast("AbstractContextManager[Any]", self._library.errstate(all="ignore"))


class _Torch(Arrays):
    def __init__(self, torch: Any) -> None:
        self._library = torch

    def codes(self, data: bytes) -> Any:
        return self._library.frombuffer(bytearray(data), dtype=self._library.uint8)

    def words(self, data: bytes) -> Any:
        return self._library.frombuffer(bytearray(data), dtype=self._library.int32).long() & 0xFFFFFFFF

    def floats(self, data: bytes, dtype: str) -> Any:
        return self._library.frombuffer(bytearray(data), dtype=torch_dtype(self._library, dtype)).float()

    def numbers(self, values: list[float]) -> Any:
        return self._library.tensor(values, dtype=self._library.float32)

    def lookup(self, table: Any, codes: Any) -> Any:
        return table[codes.reshape(-1).long()].reshape(-1)

    def block_lookup(self, tables: bytes, codes: Any, wide: int) -> bytes:
        torch = self._library
        rows = torch.frombuffer(bytearray(tables), dtype=torch.int16).reshape(-1, 256)
        out = bytearray(2 * codes.numel())
        result = torch.frombuffer(out, dtype=torch.int16).reshape(codes.shape)
        for number, table in enumerate(rows):
            columns = slice(number * wide, (number + 1) * wide)
            result[:, columns] = table[codes[:, columns].long()]
        return bytes(out)

    def repeat(self, array: Any, times: int) -> Any:
        return array.repeat_interleave(times, dim=1)

    def as_float(self, array: Any) -> Any:
        return array.float()

    def stored(self, array: Any, dtype: str) -> tuple[bytes, int]:
        flat = array.contiguous().reshape(-1)
        out = bytearray(4 * flat.numel())
        self._library.frombuffer(out, dtype=self._library.float32).copy_(flat)
        return (bytes(out), 0) if dtype == "float32" else cast_elements(bytes(out), "float32", dtype)
