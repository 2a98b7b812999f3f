"""The table of torch dtypes, with the width, storage class and safetensors name of each.

Source: ``torch/storage.py`` (``_dtype_to_storage_type_map``, ``_new_dtypes``), torch 2.15; safetensors 0.8.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from .records import NamedTuple

#: Common short names of dtypes.
_SHORT_NAMES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


class Dtype(NamedTuple):
    """A torch dtype.

    ``itemsize`` is the number of bytes per storage element. ``packed`` is the number of values per storage element (2
    for quint4x2). ``storage`` is the ``torch`` class that denotes the dtype in a persistent id; it is "" if such
    tensors are saved with UntypedStorage and ``_rebuild_tensor_v3``. ``safetensors`` is the safetensors name, or "".
    """

    name: str
    itemsize: int
    storage: str
    safetensors: str
    floating: bool = False
    packed: int = 1


DTYPES: Final = (
    Dtype("float64", 8, "DoubleStorage", "F64", True),
    Dtype("float32", 4, "FloatStorage", "F32", True),
    Dtype("float16", 2, "HalfStorage", "F16", True),
    Dtype("bfloat16", 2, "BFloat16Storage", "BF16", True),
    Dtype("float8_e5m2", 1, "", "F8_E5M2", True),
    Dtype("float8_e4m3fn", 1, "", "F8_E4M3", True),
    Dtype("float8_e5m2fnuz", 1, "", "F8_E5M2FNUZ", True),
    Dtype("float8_e4m3fnuz", 1, "", "F8_E4M3FNUZ", True),
    Dtype("float8_e8m0fnu", 1, "", "F8_E8M0", True),
    # One torch element is one byte holding two values, and shapes count bytes.
    Dtype("float4_e2m1fn_x2", 1, "", "F4", True),
    Dtype("complex128", 16, "ComplexDoubleStorage", ""),
    Dtype("complex64", 8, "ComplexFloatStorage", "C64"),
    Dtype("complex32", 4, "", ""),
    # A pair of bfloat16; torch 2.14 and later.
    Dtype("bcomplex32", 4, "", ""),
    Dtype("int64", 8, "LongStorage", "I64"),
    Dtype("int32", 4, "IntStorage", "I32"),
    Dtype("int16", 2, "ShortStorage", "I16"),
    Dtype("int8", 1, "CharStorage", "I8"),
    Dtype("uint8", 1, "ByteStorage", "U8"),
    Dtype("uint16", 2, "", "U16"),
    Dtype("uint32", 4, "", "U32"),
    Dtype("uint64", 8, "", "U64"),
    Dtype("bool", 1, "BoolStorage", "BOOL"),
    Dtype("qint8", 1, "QInt8Storage", ""),
    Dtype("quint8", 1, "QUInt8Storage", ""),
    Dtype("qint32", 4, "QInt32Storage", ""),
    Dtype("quint4x2", 1, "QUInt4x2Storage", "", packed=2),
    Dtype("quint2x4", 1, "QUInt2x4Storage", "", packed=4),
    Dtype("bits8", 1, "", ""),
    Dtype("bits16", 2, "", ""),
    Dtype("bits1x8", 1, "", ""),
    Dtype("bits2x4", 1, "", ""),
    Dtype("bits4x2", 1, "", ""),
)

#: Types of GGUF: blocks of so many values in so many bytes (``GGML_QUANT_SIZES`` of gguf/constants.py). torch has none.
BLOCKS: Final = tuple(
    Dtype(name, size, "", "", packed=values)
    for values, types in (
        (32, (("Q4_0", 18), ("Q4_1", 20), ("Q5_0", 22), ("Q5_1", 24), ("Q8_0", 34), ("Q8_1", 40), ("IQ4_NL", 18))),
        (256, (("Q2_K", 84), ("Q3_K", 110), ("Q4_K", 144), ("Q5_K", 176), ("Q6_K", 210), ("Q8_K", 292))),
        (256, (("IQ2_XXS", 66), ("IQ2_XS", 74), ("IQ2_S", 82), ("IQ3_XXS", 98), ("IQ3_S", 110), ("IQ1_S", 50))),
        (256, (("IQ1_M", 56), ("IQ4_XS", 136), ("TQ1_0", 54), ("TQ2_0", 66))),
        *((32, (("MXFP4", 17),)), (64, (("NVFP4", 36),)), (128, (("Q1_0", 18),))),
    )
    for name, size in types
)

#: Aliases that torch exposes for the same dtypes.
_ALIASES: Final = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "cdouble": "complex128",
    "cfloat": "complex64",
    "chalf": "complex32",
    "long": "int64",
    "int": "int32",
    "short": "int16",
}

BY_NAME: Final = {dtype.name: dtype for dtype in DTYPES}
BY_NAME.update({alias: BY_NAME[name] for alias, name in _ALIASES.items()})
#: The names that torch has.
TORCH_NAMES: Final = frozenset(BY_NAME)
BY_NAME.update({dtype.name: dtype for dtype in BLOCKS})
BY_STORAGE: Final = {dtype.storage: dtype for dtype in DTYPES if dtype.storage}
BY_SAFETENSORS: Final = {dtype.safetensors: dtype for dtype in DTYPES if dtype.safetensors}


def is_complex(name: str) -> bool:
    """Return whether the elements of a dtype are pairs of numbers."""
    return "complex" in name


def dtype_named(name: str) -> Dtype | None:
    """Return the dtype with this torch name or short name (``bf16``), or None."""
    name = _SHORT_NAMES.get(name, name)
    return BY_NAME[name] if name in TORCH_NAMES else None


def is_block(name: str) -> bool:
    """Return whether a dtype is a type of GGUF, with blocks of quantized values."""
    return name in BY_NAME and name not in TORCH_NAMES


_UNTYPED: Final = Dtype("untyped", 1, "UntypedStorage", "")
_UNKNOWN: Final = Dtype("unknown", 1, "", "")


@lru_cache(maxsize=64)
def storage_dtype(class_name: str) -> Dtype:
    """Return the dtype denoted by a storage class.

    UntypedStorage gives the one-byte dtype ``untyped``; a class unknown to torch gives ``unknown``. Only the part after
    the last dot counts, because torch accepts both ``torch`` with ``cuda.FloatStorage`` and ``torch.cuda`` with
    ``FloatStorage``.
    """
    class_name = class_name.rpartition(".")[2]
    if class_name in ("UntypedStorage", "_UntypedStorage", "TypedStorage"):
        return _UNTYPED
    return BY_STORAGE.get(class_name, _UNKNOWN)
