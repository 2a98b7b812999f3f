"""A tensor in a checkpoint that reads its numbers on demand, with the protocols of NumPy and torch."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from operator import index as as_index
from typing import Any, SupportsIndex

from ..base.dtypes import BY_NAME
from ..base.errors import RefusedError
from ..base.text import shape_text
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.tensors import Tensor
from ..pickles.nodes import Ref
from .elements import storage_reader
from .interpretation import Reading, lazy_bits, numbers_in, resolved_bytes
from .npy import WIDENED, array_of
from .numeric import Number
from .tensor_text import interpret_for_display, nested

#: The code for the CPU in DLPack (dlpack.h, ``kDLCPU``).
_CPU = 1


class TensorValue:
    """A tensor in a checkpoint. Its numbers are read on demand; the file stays open while the tensor exists.

    ``dtype`` is a name, ``device`` the location tag in the file; the numbers are always read to the CPU. A slice,
    ``value[:10]``, is another TensorValue, which reads only its own elements. ``numpy.asarray(value)``,
    ``torch.as_tensor(value)`` and ``torch.from_dlpack(value)`` make new arrays and tensors; ckptool imports NumPy and
    torch only for these.

    >>> weight = ckptool.open("model.pth")["conv1.weight"]
    >>> weight
    <TensorValue '["conv1.weight"]' float32 4x3x1x1 cpu>
    >>> weight.shape, weight.dtype, weight.device, weight.nbytes
    ((4, 3, 1, 1), 'float32', 'cpu', 48)
    >>> weight[0, :2, 0, 0].tolist()
    [0.171875, 1.859375]
    >>> numpy.asarray(weight[0]).shape
    (3, 1, 1)
    >>> torch.as_tensor(weight).dtype
    torch.float32
    """

    def __init__(self, checkpoint: Checkpoint, ref: Ref, tensor: Tensor, path: str) -> None:
        self._checkpoint = checkpoint
        self._ref = ref
        #: The tensor's description in the pickle: strides, storage, class.
        self.tensor = tensor
        #: The path in the file, spelled as in ``inspect``; for a slice the path of the whole tensor.
        self.path = path

    def __repr__(self) -> str:
        return f"<TensorValue {self.path!r} {self.dtype} {shape_text(self.shape)} {self.device}>"

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def device(self) -> str:
        return self.tensor.location

    @property
    def requires_grad(self) -> bool:
        return self.tensor.requires_grad

    @property
    def ndim(self) -> int:
        return len(self.tensor.shape)

    @property
    def numel(self) -> int:
        return self.tensor.numel

    @property
    def nbytes(self) -> int:
        """The bytes of the elements, counted once per index; 0 for an unknown dtype."""
        dtype = BY_NAME.get(self.tensor.dtype)
        return 0 if dtype is None else -(-self.numel // dtype.packed) * dtype.itemsize

    def numbers(self) -> Iterator[Number]:
        """Yield the elements as Python numbers, in row-major order; a quantized tensor gives its integers.

        Raise RefusedError if the tensor has no numbers, MalformedError if bytes are missing.
        """
        for piece in numbers_in(self._reading("elements", "dequantized")):
            yield from piece

    def tolist(self) -> Any:
        """Return nested lists, or the number of a scalar, as torch's ``tolist()`` does."""
        return nested(self.numbers(), list(map(range, self.shape)))

    def item(self) -> Number:
        """Return the only element as a Python number; raise ValueError if there are more."""
        if self.numel != 1:
            raise ValueError(f"a tensor of {self.numel:,} elements is not one number")
        return next(self.numbers())

    def tobytes(self) -> bytes:
        """Return the elements in row-major order, little-endian; a quantized tensor gives its integers.

        A conjugated or negated tensor gives the values that torch reads. Raise RefusedError for a tensor without its
        own elements in the file: sparse, nested, made of other tensors, or on meta.
        """
        tensor, checkpoint = self.tensor, self._checkpoint
        if not tensor.storage or tensor.location == "meta" or tensor.dtype not in BY_NAME:
            reading = interpret_for_display(checkpoint, self._ref)
            what = f"its {reading.of} are in other tensors" if isinstance(reading, Reading) else reading
            raise RefusedError(f"{self.path or 'the tensor'} ({tensor.kind}): {what}", path=checkpoint.path)
        storage = storage_reader(checkpoint, tensor.storage)
        bits = lazy_bits(checkpoint.survey.reader, self._ref)
        return b"".join(resolved_bytes(Reading(tensor, storage, "elements", *bits)))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no len()")
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())  # type: ignore[arg-type]

    def __int__(self) -> int:
        return int(self.item())  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> TensorValue:
        """Return the view that integers, slices with positive steps, None and ``...`` select, as in torch."""
        tensor, dtype = self.tensor, BY_NAME.get(self.tensor.dtype)
        if tensor.kind != "dense" or len(tensor.stride) != len(tensor.shape) or dtype is None or dtype.packed > 1:
            raise TypeError(f"a tensor of the kind {tensor.kind}, {tensor.dtype}, has no slices")
        return TensorValue(self._checkpoint, self._ref, _sliced(tensor, index), self.path)

    def __iter__(self) -> Iterator[TensorValue]:
        return (self[number] for number in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return a new array.

        Raise TypeError for a dtype that NumPy does not have, unless another one is requested, and RefusedError for a
        tensor that cannot be an array.
        """
        if copy is False:
            raise ValueError("a tensor in a file is read into new memory: there is nothing to share without a copy")
        if dtype is None and self.dtype in WIDENED:
            wider = WIDENED[self.dtype]
            other = f", or numpy.asarray(value, dtype={wider!r})" if wider else ""
            raise TypeError(f"NumPy has no {self.dtype}: use torch.as_tensor(value){other}")
        array = array_of(self._checkpoint, self._ref, self.path, self.tensor)
        if array.shape != self.shape:
            message = f"{self.path or 'the tensor'}: only a part of it, {shape_text(array.shape)}, is in this file"
            raise RefusedError(message, path=self._checkpoint.path)
        from .torch.compute import numpy_module

        result = numpy_module().ndarray(array.shape, array.descr, bytearray().join(array.elements.chunks()))
        return result if dtype is None else result.astype(dtype, copy=False)

    def numpy(self) -> Any:
        """Return a new NumPy array, as ``numpy.asarray(value)`` does, with the same errors."""
        return self.__array__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    def __dlpack__(self, **options: Any) -> Any:
        """Return the capsule of a new, contiguous torch tensor on the CPU, made by its own ``__dlpack__``."""
        from .torch.loads import need_torch, torch_dtype

        reading, torch = self._reading("elements"), need_torch("making a tensor of it")
        dtype, shape = torch_dtype(torch, reading.tensor.dtype), reading.tensor.shape
        data = bytearray().join(resolved_bytes(reading))
        tensor = torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
        return tensor.__dlpack__(**options)

    def _reading(self, *roles: str) -> Reading:
        """Return how to read the elements; raise RefusedError for a tensor without numbers in one of these roles."""
        reading, path = interpret_for_display(self._checkpoint, self._ref), self._checkpoint.path
        if isinstance(reading, str):
            raise RefusedError(f"{self.path or 'the tensor'}: {reading}", path=path)
        if reading.of not in roles:
            raise RefusedError(f"{self.path or 'the tensor'} is a tensor of the kind {self.tensor.kind}", path=path)
        return reading._replace(tensor=self.tensor)


def _sliced(tensor: Tensor, index: Any) -> Tensor:
    """Return the view of a tensor that an index selects; raise IndexError and TypeError as torch does."""
    parts = list(index) if isinstance(index, tuple) else [index]
    named = sum(part is not None and part is not Ellipsis for part in parts)
    gaps = [number for number, part in enumerate(parts) if part is Ellipsis] or [len(parts)]
    if len(gaps) > 1:
        raise IndexError("an index has one ... at most, as in NumPy")
    if named > len(tensor.shape):
        raise IndexError(f"too many indices for a tensor of {len(tensor.shape)} dimensions")
    parts[gaps[0] : gaps[0] + 1] = [slice(None)] * (len(tensor.shape) - named)
    axes = iter(zip(tensor.shape, tensor.stride))
    shape: list[int] = []
    strides: list[int] = []
    offset = tensor.offset
    for part in parts:
        if part is None:
            shape.append(1)
            strides.append(1)
            continue
        size, stride = next(axes)
        if isinstance(part, slice):
            begin, end, step = part.indices(size)
            if step < 1:
                raise ValueError("the step of a slice must be positive, as in torch")
            shape.append(len(range(begin, end, step)))
            strides.append(stride * step)
            offset += begin * stride if shape[-1] else 0
            continue
        if isinstance(part, bool | Sized) or not isinstance(part, SupportsIndex):
            what = f"indices are integers, slices, None and ..., not {type(part).__name__}"
            raise TypeError(f"{what}: torch.as_tensor(value) can be indexed by tensors")
        place = as_index(part)
        if not -size <= place < size:
            raise IndexError(f"index {place} is out of range for a dimension of {size}")
        offset += place % size * stride
    return tensor._replace(shape=tuple(shape), stride=tuple(strides), offset=offset)
