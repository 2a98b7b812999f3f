"""Recognise quantized weights: which tensors belong together as one weight, and what it is without the quantization.

Names, dtypes and shapes decide; the ``quantization_config`` of a model says what they cannot tell. No values are read,
apart from tensors of a few bytes that hold a shape. A number is a code only if the tensors that give it a meaning are
there, because plain models have tensors named ``scale`` too. ``quantized.toml`` lists the formats.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, cached_property
from math import prod
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from ..base import toml
from ..base.addresses import is_remote
from ..base.dtypes import BY_NAME, is_block
from ..base.errors import CkptoolError, RefusedError
from ..base.lazy import regex, table
from ..base.records import NamedTuple
from ..base.text import join_limited, quoted, words
from ..files.archives import parsed_object, read_bytes
from ..files.sources import Span
from .backends import QUANTIZERS
from .checkpoint import Checkpoint
from .configurations import quantization_config, values_of
from .objects import state_items
from .survey import TensorEntry
from .tensors import Tensor, rebuild_calls

Shape: TypeAlias = tuple[int, ...]

_E8M0: Final = "float8_e8m0fnu"
_FP8: Final = frozenset(name for name in BY_NAME if name.startswith("float8_") and name != _E8M0)
_BYTES: Final = frozenset(("uint8", "int8", "float4_e2m1fn_x2"))
_CODES: Final = _FP8 | _BYTES | {"int16", "uint16", "int32", "uint32"}
_FLOATS: Final = frozenset(("bfloat16", "float16", "float32"))
_EXPONENTS: Final = frozenset((_E8M0, "uint8"))
_DTYPES: Final = {
    **{"any": frozenset(BY_NAME), "bytes": _BYTES, "fp8": _FP8, "codes": _CODES},
    **{"floats": _FLOATS, "exponents": _EXPONENTS, "scales": _FLOATS | _EXPONENTS, "index": {"int32", "int64"}},
}
_STATE: Final = ".quant_state.bitsandbytes__"
#: Ends of the names of tensors; the table describes each kind.
_MARKS, _PARTS, _BESIDE = (tuple(words(" ".join(lines[1:]))) for lines in table("checkpoint/quantized_names").values())
#: The end of a name of a scale, of whatever format.
_SCALE: Final = regex(r"(?<!logit_)(scal|absmax|amax|SCB)[^.]*$")
_OF_TORCH: Final = (".scale", ".zero_point")
#: The problem of a format that is recognised, and whose layout is not in the table.
UNKNOWN_LAYOUT: Final = "its layout is not known"
#: The classes of torchao whose codes are in rows, as they are.
_TORCHAO: Final = frozenset(("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor"))
#: 1 / 127 in float32.
_ONE_127TH: Final = 0.007874015718698502
#: The most bytes of a tensor that holds a shape or a state.
_TINY: Final = 1 << 16


class QuantizedWeight(NamedTuple):
    """Tensors that are one quantized weight.

    ``name``, ``shape`` and ``dtype`` describe the plain weight: the shape is None if it is not known, the dtype "" for
    the dtype of the model. ``format`` names the format and its library. ``parts`` are the tensors by role, the ``code``
    first. ``problem`` says why the weight cannot be understood, or is "". ``arithmetic`` names the rule for
    the plain values, or is "", and ``numbers`` are its parameters.
    """

    name: str
    format: str
    parts: tuple[tuple[str, TensorEntry], ...]
    shape: Shape | None
    dtype: str
    problem: str
    arithmetic: str = ""
    numbers: Mapping[str, Any] = MappingProxyType({})

    @property
    def code(self) -> Tensor:
        """The tensor with the codes."""
        return self.parts[0][1].tensor

    @property
    def tensors(self) -> frozenset[Tensor]:
        """The tensors of its parts."""
        return frozenset(entry.tensor for _, entry in self.parts)

    @property
    def numel(self) -> int:
        """The number of weights; the number of stored elements if the shape is not known."""
        return self.code.numel if self.shape is None else prod(self.shape)


class Quantization(NamedTuple):
    """The quantized weights of a checkpoint, and what else belongs to its quantization.

    ``others`` are tensors such as the scales of activations, ``left_over`` parts without the weight they belong to, and
    ``tensors`` all of these.
    """

    weights: tuple[QuantizedWeight, ...] = ()
    others: tuple[TensorEntry, ...] = ()
    left_over: tuple[TensorEntry, ...] = ()
    tensors: frozenset[Tensor] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.tensors)

    @property
    def words(self) -> str:
        """The formats, such as "bitsandbytes nf4", or the name of a part without its weight."""
        formats = list(dict.fromkeys(weight.format for weight in self.weights))
        return join_limited(formats, most=3) if formats else f"it holds {self.left_over[0].key}"

    def surplus(self, tensors: Iterable[Tensor]) -> int:
        """Return how many more weights these tensors stand for than they have elements; each of them counts once."""
        numels = {weight.code: weight.numel for weight in self.weights}
        return sum(numels.get(tensor, 0) - tensor.numel for tensor in self.tensors.intersection(tensors))

    @property
    def is_reversible(self) -> bool:
        """Whether all plain weights can be computed."""
        return bool(self.weights) and all(each.arithmetic for each in self.weights) and not self.problems

    @property
    def problems(self) -> list[str]:
        """What is wrong, each with the name of its weight or tensor."""
        found = [f"{weight.name}: {weight.problem}" for weight in self.weights if weight.problem]
        return found + [f"{entry.path}: the weight that it belongs to is missing" for entry in self.left_over]


class _Case:
    """The tensors of one weight, by the ends of their names ("" for the code), as a format sees them."""

    def __init__(self, search: _Search, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.checkpoint, self.config = search.checkpoint, search.config
        self.name, self.tensors = name, tensors
        self.code: Shape = tensors[""].shape
        self.dtype: str = tensors[""].dtype
        self.remote = search.remote  # small tensors are not worth a request each

    def shape(self, end: str) -> Shape:
        """Return the shape of a part; () for one that is absent."""
        return self.tensors[end].shape if end in self.tensors else ()

    def end(self, part: str) -> str:
        return next(end for end in self.tensors if part in end)

    def read(self, end: str) -> bytes:
        """Return the bytes of a tiny tensor; b"" if they are remote, compressed or too many."""
        tensor, dtype = self.tensors[end], BY_NAME.get(self.tensors[end].dtype)
        body = self.checkpoint.body(tensor.storage) if tensor.storage and not self.remote else None
        if body is None or not isinstance(body.piece, Span) or body.compressed or dtype is None:
            return b""
        begin, size = tensor.offset * dtype.itemsize, tensor.own_bytes
        inside = size <= _TINY and 0 <= begin <= body.size - size
        with suppress(CkptoolError):  # a damaged file
            return body.piece.source.read(body.piece.offset + begin, size) if inside else b""
        return b""

    def numbers(self, end: str) -> Shape:
        """Return the integers in a tiny tensor, or () if they cannot be read."""
        if end not in self.tensors:
            return ()
        width, data = BY_NAME[self.tensors[end].dtype].itemsize, self.read(end)
        order: Any = "big" if self.checkpoint.container.byteorder == "big" else "little"
        return tuple(int.from_bytes(data[at : at + width], order) for at in range(0, len(data), width))


class Plain(NamedTuple):
    """The weight that a quantized one stands for, with what is wrong, and a more precise name of the format.

    ``numbers`` are for the arithmetic; None if no rule gives these values.
    """

    shape: Shape | None
    problem: str = ""
    format: str = ""
    dtype: str = ""
    numbers: Mapping[str, Any] | None = MappingProxyType({})


def _fitting(
    case: _Case, end: str, shape: Shape | None, fits: bool, known: str = "", dtype: str = "", **numbers: Any
) -> Plain:
    """Return the weight, with the problem that the part with this end does not fit unless ``fits``."""
    name = end.lstrip("._") or "the code"
    misfit = f"{name} of shape {list(case.shape(end))} does not fit codes of shape {list(case.code)}"
    numbers["sizes"] = [*values_of(case.config, "group_size", "q_group_size")]  # of groups, for all weights
    return Plain(shape, "" if fits else misfit, known, dtype, numbers)


def _bnb(case: _Case) -> Plain:
    state = parsed_object(case.read(case.end(_STATE))) or {}
    shape, block, size = state.get("shape"), state.get("blocksize"), case.tensors[""].own_bytes
    if case.remote:
        return Plain((2 * size,))
    if type(block) is not int or type(shape) is not list or not all(type(n) is int and n > 0 for n in [*shape, block]):
        return Plain(None, "quant_state cannot be read")
    blocks = -(-prod(shape) // block)
    fits = -(-prod(shape) // 2) == size and blocks == prod(case.shape(".absmax")) and block % 2 == 0
    numbers = {name: state[name] for name in ("blocksize", "nested_blocksize", "nested_offset") if name in state}
    if case.code[:1] == (1,) and len(case.code) == 2 and size > 1:
        return Plain(tuple(shape), "it is transposed")
    if case.tensors[".absmax"].dtype not in ("uint8", "float32") or prod(case.shape(".quant_map")) != 16:
        return Plain(tuple(shape), "absmax or quant_map is of another dtype or size than bitsandbytes writes")
    if case.tensors[".absmax"].dtype == "uint8":
        nested, offset = state.get("nested_blocksize"), state.get("nested_offset", 0.0)
        known = {".nested_absmax", ".nested_quant_map"} <= case.tensors.keys() and type(offset) in (int, float)
        if not known or type(nested) is not int or nested < 1 or prod(case.shape(".nested_quant_map")) != 256:
            return Plain(tuple(shape), "its nested state is missing or cannot be read")
        fits = fits and prod(case.shape(".nested_absmax")) == -(-blocks // nested)
    return _fitting(case, ".absmax", tuple(shape), fits, dtype=str(state.get("dtype", "")), **numbers)


def _awq(case: _Case) -> Plain | None:
    scales, zeros = case.shape(".scales"), case.shape(".qzeros")
    if len(case.code) != 2 or len(scales) != 2 or case.code[1] * 8 != scales[1]:
        return None
    version = str(case.config.get("version", "gemm")).lower()
    if version != "gemm":
        return Plain(None, f"the version {version} has another layout")
    return _fitting(case, ".qzeros", (scales[1], case.code[0]), zeros == (scales[0], case.code[1]))


def _gptq(case: _Case) -> Plain:
    """Codes fill the rows of words; ``qzeros`` and ``g_idx`` tell how many bits they have."""
    scales, zeros = case.shape(".scales"), case.shape(".qzeros")
    if not len(case.code) == len(scales) == len(zeros) == 2 or scales[1] != case.code[1] or 0 in case.code:
        return _fitting(case, ".scales", None, fits=False)
    rows, outputs = case.code
    inputs = prod(case.shape(".g_idx")) if ".g_idx" in case.tensors else 0
    ways = [n for n in (2, 3, 4, 8) if not 32 * rows % n and inputs in (0, 32 * rows // n)]
    ways = [n for n in ways if zeros == (scales[0], -(-outputs * n // 32))]
    bits, *others = [n for n in values_of(case.config, "bits") if n in ways] or ways or [0]
    known, shape = f"GPTQ {bits} bit", (outputs, 32 * rows // bits) if bits else None
    if set(others) - {bits}:
        return Plain(None, f"its codes may have {bits} bits or {others[0]}", "GPTQ")
    said = {str(each).lower() for each in values_of(case.config, "checkpoint_format", "packing_format", "quant_method")}
    if other := said & {"marlin", "bitblas", "gptq_p"} or case.config.get("is_marlin_format"):
        return Plain(shape, f"its layout is {join_limited(sorted(other)) if other is not True else 'marlin'}", known)
    # Version 1 stores zero points less one (AutoGPTQ); version 2 of GPTQModel and auto-round store them as they are.
    offset = int(not said & {"gptq_v2", "auto_round"}) if case.config else None
    return _fitting(case, ".qzeros", shape, bool(bits), known if bits else "GPTQ", bits=bits, offset=offset)


def _packed(case: _Case) -> Plain:
    *rows, width = case.code or (0,)
    said, of = {n for n in values_of(case.config, "num_bits") if n in range(1, 9)}, case.tensors[".weight_scale"].dtype
    shape = (*rows, width * 32 // (*said, 4)[0]) if case.remote else case.numbers(".weight_shape")
    if len(shape) < 2 or not shape[-1]:
        return Plain(None, "weight_shape cannot be read")
    # A row is a stream of bits; before version 0.20 a word had whole codes only, and its highest bits were unused.
    ways = [(n, True) for n in said or range(2, 9) if width == -(-shape[-1] * n // 32)]
    ways += [(n, False) for n in said or range(2, 9) if 32 % n and width == -(-shape[-1] // (32 // n))]
    if len(ways) > 1:
        may = " or ".join(f"{n} bits{'' if dense else ' padded to words'}" for n, dense in ways)
        return Plain(shape, f"its codes may have {may}", "", of)
    (bits, dense), known = ways[0] if ways else (0, True), f"compressed-tensors int{ways[0][0]}" if ways else ""
    outputs, scale, zero = prod(rows), case.shape(".weight_scale"), ".weight_zero_point"
    of_zero = -(-outputs * bits // 32), scale[-1] if prod(scale) > 1 else 1
    wrong = {
        "": not ways or prod(shape[:-1]) != outputs,
        ".weight_scale": prod(scale) > 1 and scale[:-1] != (*rows,),
        zero: zero in case.tensors and case.shape(zero) != of_zero,
    }
    misfit = next((end for end in wrong if wrong[end]), None)
    return _fitting(case, misfit or "", shape, misfit is None, known, of, bits=bits, dense=dense)


def _pairs(case: _Case, group: int = 32) -> Plain:
    """Two codes in a byte, with a scale for each group of codes in a row."""
    *rows, width = case.code or (0,)
    end = next((each for each in (".weight_scale", "_scale") if each in case.tensors), "") or case.end("scale")
    of_all = (each for each in (".weight_global_scale", ".weight_scale_2") if prod(case.shape(each)) != 1)
    if other := next(of_all, ""):
        return _fitting(case, other, (*rows, 2 * width), False)
    fits = case.shape(end) == (*rows, -(-2 * width // group))
    return _fitting(case, end, (*rows, 2 * width), fits, group=group)


def _blocks(case: _Case) -> Plain | None:
    """Blocks of 16 bytes, two codes in each. transformers has the fused experts transposed."""
    if len(case.code) < 3:
        return None
    *rows, groups, width = case.code
    end, inputs = case.end("scales"), groups * width * 2
    if (turned := end == "_scales") and len(rows) != 2:
        return Plain(None, UNKNOWN_LAYOUT)
    shape = (rows[0], inputs, rows[1]) if turned else (*rows, inputs)
    return _fitting(case, end, shape, case.shape(end) == case.code[:-1], group=2 * width, turned=turned)


def _scaled(case: _Case, *blocks: Any) -> Plain:
    """Codes of 8 bits, with one scale, one for each row, or one for each block, of these sizes or the usual ones."""
    end, code = case.end("scale"), case.code
    scale, method = case.shape(end), str(case.config.get("quant_method", "")).replace("fp8", "").strip("_-")
    known = f"{method} {'int8' if case.dtype == 'int8' else 'FP8'}".strip()
    zero = next((each for each in case.tensors if each.endswith("zero_point")), "")
    # compressed-tensors multiplies in the dtype of the scale; modelopt rounds the scale to the dtype of the model.
    own = case.tensors[end].dtype in _FLOATS and ("compressed" in method or "quark" in method)

    def fitting(each: str, **numbers: Any) -> Plain:
        numbers["round_scale"] = "modelopt" in method
        fits, of = not zero or prod(case.shape(zero)) == prod(scale), case.tensors[end].dtype if own else ""
        return _fitting(case, zero or end, code, fits, f"{known} with {each}", of, **numbers)

    scale = scale[::2] if len(scale) == 4 and scale[1::2] == (1, 1) and len(code) == 2 else scale  # of modelopt
    # The first dimensions have a scale each, and the others share it: none, the experts or filters, or the rows.
    shared = (n for n in range(len(code)) if scale[:n] == code[:n] and prod(scale[n:]) == 1)
    if (count := next(shared, None)) is not None:
        high = prod(code[count:-1])
        each = "a scale for each channel" if count == len(code) - 1 else "a scale for each slice"
        return fitting(each if count else "one scale for each weight", block=(high, 0), outputs=high)
    given = [*blocks, *values_of(case.config, "weight_block_size", "block_structure")]
    given = [[int(n) for n in re.findall(r"\d+", size)] if isinstance(size, str) else size for size in given]
    if len(scale) == len(code) >= 2 and scale[:-2] == code[:-2] and 0 not in scale:
        even = not (code[-2] % scale[-2] or code[-1] % scale[-1])
        sizes = [*given, (128, 128), (code[-2] // scale[-2], code[-1] // scale[-1]) if even else None]
        for block in (size for size in sizes if isinstance(size, list | tuple) and len(size) == 2):
            if all(type(n) is int and n > 0 and -(-c // n) == s for n, c, s in zip(block, code[-2:], scale[-2:])):
                return fitting(f"{block[0]}x{block[1]} block scales", block=tuple(block))
    return _fitting(case, end, code, False, known)


def _torchao(case: _Case) -> Plain:
    """The header of the file describes each weight, in JSON under its name."""
    described = parsed_object(str(case.checkpoint.container.metadata.get(case.name, ""))) or {}
    kind = str(described.get("_type", ""))
    native = next((each.get("_data") for each in values_of(described, "dtype") if isinstance(each, dict)), "")
    if kind in _TORCHAO:
        held = "_scale" in case.tensors
        plain = _scaled(case, *values_of(described, "block_size")) if held else Plain(None, "scale is missing")
        return plain._replace(format=f"torchao {kind}", dtype=str(native))
    shape = case.code if case.dtype == "int8" or case.dtype in _FP8 else None
    shape = (*case.code[:-1], 2 * case.code[-1]) if kind == "Int4Tensor" else shape
    problem = "" if kind else "the header does not describe it"
    return Plain(shape, problem, f"torchao {kind}".strip(), str(native), None)


def _rows(case: _Case) -> Plain:
    """bitsandbytes: code * maximum of the row * 1/127 (``int8_vectorwise_dequant``)."""
    if any(case.numbers(".weight_format")):
        return Plain(case.code, "its weight_format is a layout of GPU kernels")
    fits = len(case.code) == 2 and case.shape(".SCB") == case.code[:1]
    return _fitting(case, ".SCB", case.code, fits, block=(1, 0), factor=_ONE_127TH)


_FUNCTIONS: Final[Mapping[str, Callable[[_Case], Plain | None]]] = {
    "same": lambda case: Plain(case.code),
    "one_scale": lambda case: _scaled(case)._replace(format=""),
    "turned": lambda case: Plain(case.code[::-1]),
    "unknown": lambda case: Plain(None, UNKNOWN_LAYOUT),
    "hqq": lambda case: Plain(case.numbers(".shape") or None),
    "quanto": lambda case: Plain(None, numbers=None) if case.dtype == "uint8" else _scaled(case)._replace(format=""),
    "pairs16": lambda case: _pairs(case, 16),
    **{"rows": _rows, "bnb": _bnb, "awq": _awq, "gptq": _gptq, "packed": _packed, "pairs32": _pairs},
    **{"blocks": _blocks, "scaled": _scaled, "torchao": _torchao},
}


class _Format(NamedTuple):
    """A row of ``quantized.toml``.

    ``parts`` are the marks of its parts by the ends of their names, ``allowed`` their dtypes, and ``key`` the ends
    of those without which it is another format.
    """

    name: str
    code: str
    dtypes: frozenset[str]
    key: tuple[str, ...]
    parts: dict[str, str]
    allowed: dict[str, frozenset[str]]
    plain: Callable[[_Case], Plain | None]
    dtype: str
    values: str

    def base(self, name: str, names: Mapping[str, TensorEntry]) -> str | None:
        """Return the name of a code without its end; None if its tensors are those of another format."""
        base = name[: len(name) - len(self.code)]
        if not name.endswith(self.code) or names[name].tensor.dtype not in self.dtypes:
            return None
        beside = ((end, names.get(base + end)) for end in self.key)
        return base if all(each and each.tensor.dtype in self.allowed[end] for end, each in beside) else None


@cache
def formats() -> list[_Format]:
    """Return the rows of ``quantized.toml``, which explains the columns."""
    path = os.path.join(os.path.dirname(__file__), "quantized.toml")
    rows = []
    for row in toml.parsed(read_bytes(path, 1 << 20), path, "the table of formats")["format"]:
        described = [part.partition(":") for part in row["parts"].split()]
        parts = {end.lstrip("+?"): end[0] for end, _, _ in described}
        code, *allowed = (
            frozenset().union(*(_DTYPES.get(name, {name}) for name in dtypes.split(",")))
            for dtypes in (row["dtypes"], *(dtypes or "any" for _, _, dtypes in described))
        )
        key = tuple(end for end, mark in parts.items() if mark not in "+?*")
        found = code, key, parts, dict(zip(parts, allowed)), _FUNCTIONS[row["plain"]], row.get("dtype", "")
        rows.append(_Format(row["name"], row["code"], *found, row.get("values", "")))
    return rows


def quantization(checkpoint: Checkpoint, *, exact: bool = False) -> Quantization:
    """Return the quantized weights of a checkpoint; an empty Quantization, which is false, if there are none.

    ``exact`` reads the small tensors of shapes and states also of a remote file, with a request each.
    """
    tensors = checkpoint.survey.tensors
    kinds = {(entry.tensor.kind, entry.tensor.dtype, entry.tensor.cls) for entry in tensors}
    plain = all(kind in ("dense", "meta") and dtype not in _CODES and not cls for kind, dtype, cls in kinds)
    if plain and not any(is_block(dtype) for _, dtype, _ in kinds):
        names = "\n".join([entry.key for entry in tensors])  # most checkpoints are done here
        if not any(mark in names for mark in (*_MARKS, *_PARTS, _STATE)):
            return Quantization()
    return _Search(checkpoint, exact).run()


def refuse_torn(checkpoint: Checkpoint, edited: Checkpoint, who: str) -> None:
    """Raise RefusedError if an edit of names took a quantized weight apart: its tensors go together, or stay."""
    before = quantization(checkpoint)
    after = {weight.tensors for weight in quantization(edited).weights} if before else ()
    left = {entry.tensor for entry in edited.survey.tensors} if before else ()
    for weight in before.weights:
        if not weight.problem and weight.tensors not in after and weight.tensors & set(left):
            what = f"{who} takes only a part of the quantized weight {quoted(weight.name)} ({weight.format})"
            parts = [quoted(entry.key) for entry in checkpoint.survey.tensors if entry.tensor in weight.tensors]
            raise RefusedError(what, path=checkpoint.path, next=f"take all of it: {' '.join(parts)}")


class _Search:
    """The search for quantized weights in one checkpoint. Each name begins with a dot here, also at the root."""

    def __init__(self, checkpoint: Checkpoint, exact: bool) -> None:
        self.checkpoint, self.reader = checkpoint, checkpoint.survey.reader
        self.remote = is_remote(checkpoint.path) and not exact
        self.weights: list[QuantizedWeight] = []
        self.others: list[TensorEntry] = []
        self.left_over: list[TensorEntry] = []
        #: The names of one state dict by the modules that hold them.
        self.below: tuple[object, Mapping[str, list[str]]] = None, {}

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return quantization_config(self.checkpoint)

    def run(self) -> Quantization:
        scopes: dict[int, dict[str, TensorEntry]] = {}
        for entry in self.checkpoint.survey.tensors:
            path = entry.path.replace('["', ".").replace('"]', "") if entry.state_dict < 0 else entry.key
            if not self.add_subclass(path, entry):
                scopes.setdefault(entry.state_dict, {})[f".{path.removeprefix('.')}"] = entry
        by_torch = any(weight.code.kind == "quantized" for weight in self.weights)
        for names in scopes.values():
            self.search(names, by_torch)
        if not (self.weights or self.left_over):
            return Quantization()
        tensors = frozenset(entry.tensor for entry in (*self.others, *self.left_over))
        tensors = tensors.union(*(weight.tensors for weight in self.weights))
        return Quantization(tuple(self.weights), tuple(self.others), tuple(self.left_over), tensors)

    def add_subclass(self, name: str, entry: TensorEntry) -> bool:
        """Add a tensor in blocks, or with a class of quantized tensors in it; return whether it is one."""
        tensor, graph = entry.tensor, self.checkpoint.graph
        if is_block(tensor.dtype):
            known, code = f"GGUF {tensor.dtype}", (("code", entry),)
            self.weights.append(QuantizedWeight(name, known, code, tensor.shape, "float32", "", "gguf"))
            return True
        if tensor.kind in ("dense", "meta") and not tensor.cls:
            return False
        classes = [part.cls for part in self.reader.parts(tensor) if part.cls.partition(".")[0] in QUANTIZERS]
        if not classes and tensor.kind != "quantized":
            return False
        library, _, kind = classes[0].partition(".") if classes else ("torch", "", tensor.dtype)
        state = next((call.state for call in rebuild_calls(graph, entry.ref) if call.state >= 0), -1)
        roles = {ref: str(graph.nodes[key]) for key, ref in state_items(graph, state)} if state >= 0 else {}
        inner = ((ref, self.reader.tensor(ref)) for ref in tensor.parts)
        parts = [(roles.get(ref, ""), entry._replace(ref=ref, tensor=part)) for ref, part in inner if part is not None]
        known = f"{QUANTIZERS.get(library, library)} {kind.rpartition('.')[2]}"
        shape = None if tensor.kind == "unknown" else tensor.shape
        made = QuantizedWeight(name, known, (("code", entry), *parts), shape, tensor.dtype, "")
        self.weights.append(self.of_torchao(made, kind.rpartition(".")[2]) if library == "torchao" else made)
        return True

    def of_torchao(self, weight: QuantizedWeight, kind: str) -> QuantizedWeight:
        """Return a tensor of torchao with the rule for its values, if there is one."""
        tensors = {("" if role == "qdata" else f"_{role}"): entry.tensor for role, entry in weight.parts[1:]}
        if kind not in _TORCHAO or not {"", "_scale"} <= tensors.keys():
            return weight
        plain = _scaled(_Case(self, weight.name, tensors))
        return weight._replace(problem=plain.problem, arithmetic="scaled", numbers=plain.numbers or {})

    def search(self, names: Mapping[str, TensorEntry], by_torch: bool) -> None:
        """Add the weights among the tensors with these names, and the rest of their quantization."""
        used, start = set[str](), len(self.weights)
        codes = [name for name, entry in names.items() if entry.tensor.dtype in _CODES]
        marks = (".absmax", ".quant_map", _STATE)
        others = [name.partition(mark)[0] for mark in marks for name in names if mark in name]
        others += [name for name in names if name.endswith(".Qidxs")]
        for name in dict.fromkeys([*codes, *others]):
            if name in names and name not in used:
                used |= self.match(name, names)
        scaled = any(weight.code.dtype in _FP8 for weight in self.weights[start:])
        for name in codes:
            if name not in used:
                given = bool(self.config) or (scaled and names[name].tensor.dtype in _FP8)
                used |= self.unknown(name, names, used, given)
        within = bool(used or self.config)
        for name, entry in ((name, entry) for name, entry in names.items() if name not in used):
            of_heads = entry.tensor.numel > 1 and name.endswith((".q_scale", ".k_scale", ".v_scale"))  # or of norms
            if name.endswith(_MARKS) or _STATE in name or (within and name.endswith(_PARTS)):
                self.left_over.append(entry)
            elif (name.endswith(_BESIDE) and within and not of_heads) or (name.endswith(_OF_TORCH) and by_torch):
                self.others.append(entry)

    def match(self, name: str, names: Mapping[str, TensorEntry]) -> set[str]:
        """Add the weight whose code has this name, if a format fits; return the names of its tensors."""
        for number, form in enumerate(formats()):
            base = form.base(name, names)
            if base is None:
                continue
            found = {"": name} | {end: base + end for end in form.parts if base + end in names}
            if "*" in form.parts:
                found |= {other[len(base) :]: other for other in self.module(name, names) if other != name}
            tensors = {end: names[part].tensor for end, part in found.items()}
            lost = [end for end in form.parts if end not in found and form.parts[end] == "+"]
            odd = [(end, t.dtype) for end, t in tensors.items() if t.dtype not in form.allowed.get(end, {t.dtype})]
            problems = [f"{end.lstrip('._')} is missing" for end in lost]
            problems += [f"{end.lstrip('._')} is {own}" for end, own in odd]
            case = _Case(self, _plain_name(base, form.code), tensors)
            plain = Plain(None, join_limited(problems)) if problems else form.plain(case)
            if plain is not None:
                native = tensors[form.dtype].dtype if form.dtype and form.dtype in tensors else form.dtype
                problem = plain.problem or self.rival(name, names, found, formats()[number + 1 :])
                parts = tuple((end.lstrip("._") or "code", names[part]) for end, part in found.items())
                rule = "" if plain.numbers is None else form.values, plain.numbers or {}
                about = plain.format or form.name, parts, plain.shape, plain.dtype or native, problem
                self.weights.append(QuantizedWeight(case.name, *about, *rule))
                return set(found.values())
        return set()

    def rival(self, name: str, names: Mapping[str, TensorEntry], found: dict[str, str], others: list[_Format]) -> str:
        """Add to ``found`` the parts that codes have in other formats; return the problem if there are some, or ""."""
        keys = ((base, form.key) for form in others if (base := form.base(name, names)) is not None)
        more = {end: base + end for base, key in keys for end in key if base + end not in found.values()}
        found |= more
        return f"{join_limited([end.lstrip('._') for end in more])} belongs to another format" if more else ""

    def near(self, name: str, names: Mapping[str, TensorEntry]) -> list[str]:
        """Return the names beside codes, if one is a scale: in the module of a ``weight``, else with the same start."""
        module, _, last = name.rpartition(".")
        stem = f"{module}.{'' if last == 'weight' else last.rpartition('_')[0] if '_' in last else last}"
        matrix = last == "weight" and len(names[name].tensor.shape) > 1
        own = _FP8 if names[name].tensor.dtype in _FP8 else ()  # a scale in float8 is part of a plain cast
        near = [other for other in self.module(name, names) if other.startswith(stem) and other != name]
        for end, dtype in ((other[len(stem) :], names[other].tensor.dtype) for other in near):
            beside = matrix and dtype in _FLOATS and "." not in end and not end.endswith("bias")
            if dtype not in own and (beside or _SCALE.search(end)):
                return near
        return []

    def unknown(self, name: str, names: Mapping[str, TensorEntry], used: set[str], given: bool) -> set[str]:
        """Add codes that no format explains, if a scale is near or the model is said to be quantized (``given``).

        Return the names of the tensors added; ``used`` ones are left out."""
        last, tensor, near = name.rpartition(".")[2], names[name].tensor, self.near(name, names)
        plain = last in ("bias", "position_ids", "token_type_ids") or "mask" in last
        if plain or not (near or (given and len(tensor.shape) > 1)):
            return set()
        beside = [other for other in near or self.module(name, names) if other not in used and other != name]
        what = "its scale is missing" if tensor.dtype in _FP8 and not near else UNKNOWN_LAYOUT
        method = str(self.config.get("quant_method", f"packed {tensor.dtype}" if near else tensor.dtype))
        parts = (("code", names[name]), *((other, names[other]) for other in beside))
        self.weights.append(QuantizedWeight(_plain_name(name, ""), method, parts, None, "", what))
        return {name, *beside}

    def module(self, name: str, names: Mapping[str, TensorEntry]) -> list[str]:
        """Return the names of the tensors in the module of a code, and one level below, except its bias."""
        if self.below[0] is not names:
            below: dict[str, list[str]] = {}
            for each in names:
                module = each.rpartition(".")[0]
                for above in {module, module.rpartition(".")[0] or module}:
                    below.setdefault(above, []).append(each)
            self.below = names, below
        return [other for other in self.below[1][name.rpartition(".")[0]] if not other.endswith(".bias")]


def _plain_name(base: str, code: str) -> str:
    """Return the name of the weight; ``base`` is the name of the code without its end."""
    module, _, last = base.removeprefix(".").rpartition(".")
    if code == "_qdata":
        return f"{module}.{last.removeprefix('_')}".removeprefix(".")
    return base.removeprefix(".") + (".weight" if code in (".weight", ".qweight", ".weight_packed", ".W_q") else "")
