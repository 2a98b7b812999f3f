"""Recognise quantized weights: which tensors belong together as one weight, and what it is without the quantization.

Names, dtypes and shapes decide; the ``quantization_config`` of a model says what they cannot tell. No values are read,
apart from tensors of a few bytes that hold a shape. A number is a code only if the tensors that give it a meaning are
there, because plain models have tensors named ``scale`` too. Sources: bitsandbytes ``functional.QuantState``,
compressed-tensors ``compressors``, GPTQModel ``nn_modules/qlinear``, AutoAWQ ``packing_utils``, transformers
``integrations`` (``finegrained_fp8``, ``mxfp4``, ``hqq``), modelopt ``qtensor``, torchao ``prototype/safetensors``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from math import prod
from typing import Any, Final, TypeAlias

from ..base.dtypes import BY_NAME
from ..base.records import NamedTuple
from ..base.steps import is_remote
from ..base.text import join_limited, pluralize
from ..files.archives import parsed_object, read_object
from ..files.sources import FolderSource, Span
from ..pickles.nodes import Call
from .backends import QUANTIZERS
from .checkpoint import Checkpoint
from .objects import state_items
from .survey import TensorEntry
from .tensors import Tensor

Shape: TypeAlias = tuple[int, ...]

_E8M0: Final = "float8_e8m0fnu"
_FP8: Final = frozenset(name for name in BY_NAME if name.startswith("float8_") and name != _E8M0)
_BYTES: Final = frozenset(("uint8", "int8", "float4_e2m1fn_x2"))
_INT8: Final = frozenset(("int8",))
_UINT8: Final = frozenset(("uint8",))
_INT32: Final = frozenset(("int32",))
#: Dtypes of codes. A code of bitsandbytes may have any other, too.
_CODES: Final = _FP8 | _BYTES | {"int16", "uint16", "int32"}
#: Ends of names that no plain tensor has: parts of a quantized weight even where its code is missing.
_MARKS: Final = (
    *(".SCB", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".qzeros", ".g_idx", ".weight_scale_inv"),
)
_STATE: Final = ".quant_state.bitsandbytes__"
#: Ends of names that are parts of a weight in a quantized model, and may be anything in a plain one.
_PARTS: Final = (
    *(".weight_scale", ".weight_scale_2", ".weight_zero_point", ".weight_g_idx", ".weight_shape", ".scales"),
    *(".weight_global_scale", ".scale_weight"),
)
#: Ends of names of scales of activations, and other tensors beside the weights of a quantized model.
_BESIDE: Final = (
    *(".input_scale", ".output_scale", ".input_scale_ub", ".input_global_scale", ".input_zero_point"),
    *(".output_zero_point", ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_output_scale", ".weight_format"),
    *(".scale_input", ".activation_scale", ".comfy_quant", ".pre_quant_scale", "scaled_fp8"),
)
#: Files that hold the configuration of the quantization, apart from config.json.
_OTHER_CONFIGS: Final = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
#: The most bytes of a tensor that holds a shape or a state.
_TINY: Final = 1 << 16


class Plain(NamedTuple):
    """The weight that a quantized one stands for: its shape and dtype, None and "" if not known; and what is wrong."""

    shape: Shape | None
    dtype: str = ""
    problem: str = ""
    format: str = ""


class QuantizedWeight(NamedTuple):
    """Tensors that are one quantized weight.

    ``name`` is that of the plain weight, ``format`` the format with the library, ``parts`` are the tensors by role, the
    ``code`` first. ``shape`` and ``dtype`` are those of the plain weight; None if the shape is not known, "" for the
    dtype of the model. ``problem`` says why it cannot be understood, or is "".
    """

    name: str
    format: str
    parts: tuple[tuple[str, TensorEntry], ...]
    shape: Shape | None
    dtype: str
    problem: str

    @property
    def code(self) -> TensorEntry:
        """The tensor with the codes."""
        return self.parts[0][1]

    @property
    def tensors(self) -> frozenset[Tensor]:
        """Its tensors."""
        return frozenset(entry.tensor for _, entry in self.parts)

    @property
    def numel(self) -> int:
        """The number of weights; the number of stored elements if the shape is not known."""
        return self.code.tensor.numel if self.shape is None else prod(self.shape)


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
        return bool(self.weights or self.left_over)

    @property
    def entries(self) -> Iterator[TensorEntry]:
        """Every tensor that is not a plain one."""
        yield from (entry for weight in self.weights for _, entry in weight.parts)
        yield from (*self.others, *self.left_over)

    @property
    def sizes(self) -> dict[Tensor, int]:
        """How many weights each of the tensors stands for: all at the codes, and none elsewhere."""
        return dict.fromkeys(self.tensors, 0) | {weight.code.tensor: weight.numel for weight in self.weights}

    @property
    def words(self) -> str:
        """The formats, such as "bitsandbytes nf4", or the name of a part without its weight."""
        formats = list(dict.fromkeys(weight.format for weight in self.weights))
        return join_limited(formats, most=3) if formats else f"it holds {self.left_over[0].key}"

    @property
    def problems(self) -> list[str]:
        """What is wrong, each with the name of its weight or tensor."""
        found = [f"{weight.name}: {weight.problem}" for weight in self.weights if weight.problem]
        return found + [f"{entry.path}: the weight that it belongs to is missing" for entry in self.left_over]


class _Case:
    """The tensors of one weight, by the ends of their names ("" for the code), as a layout sees them."""

    def __init__(self, checkpoint: Checkpoint, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]):
        self.checkpoint, self.name, self.tensors, self.config = checkpoint, name, tensors, config
        self.code = tensors[""].shape
        self.method = str(config.get("quant_method", ""))

    def shape(self, end: str) -> Shape:
        return self.tensors[end].shape

    def read(self, end: str) -> bytes:
        """Return the bytes of a tiny tensor; b"" if they are remote, compressed or too many."""
        tensor = self.tensors[end]
        body = self.checkpoint.body(tensor.storage) if tensor.storage else None
        size, dtype = tensor.own_bytes, BY_NAME.get(tensor.dtype)
        if body is None or not isinstance(body.piece, Span) or body.compressed or size > _TINY or dtype is None:
            return b""
        begin = tensor.offset * dtype.itemsize
        if is_remote(self.checkpoint.path) or begin < 0 or begin + size > body.size:
            return b""
        return body.piece.source.read(body.piece.offset + begin, size)

    def numbers(self, end: str) -> Shape:
        """Return the integers in a tiny tensor, or () if they cannot be read."""
        data, width = self.read(end), BY_NAME[self.tensors[end].dtype].itemsize
        order = "big" if self.checkpoint.container.byteorder == "big" else "little"
        return tuple(int.from_bytes(data[at : at + width], order) for at in range(0, len(data), width))  # type: ignore[arg-type]


def _misfit(case: _Case, end: str) -> str:
    return f"{end.lstrip('._')} of shape {list(case.shape(end))} does not fit codes of shape {list(case.code)}"


def _same(case: _Case) -> Plain:
    return Plain(case.code)


def _bitsandbytes4(case: _Case) -> Plain:
    end = next((end for end in case.tensors if _STATE in end), "")
    if not end:
        return Plain(None, problem="quant_state is missing")
    name = f"bitsandbytes {end.rpartition('__')[2]}"
    state = parsed_object(case.read(end) or b"{}") or {}
    shape, block, dtype = state.get("shape"), state.get("blocksize"), str(state.get("dtype", ""))
    size = case.tensors[""].own_bytes
    if not state and is_remote(case.checkpoint.path):
        return Plain((2 * size,), format=name)  # not worth a request for each weight
    if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape) or type(block) is not int:
        return Plain(None, problem="quant_state cannot be read", format=name)
    fits = -(-prod(shape) // 2) == size and -(-prod(shape) // max(block, 1)) == prod(case.shape(".absmax"))
    return Plain(tuple(shape), dtype, "" if fits else f"a weight of shape {shape} has other sizes", name)


def _bitsandbytes8(case: _Case) -> Plain:
    return Plain(case.code, problem="" if case.shape(".SCB") == case.code[:1] else _misfit(case, ".SCB"))


def _is_awq(case: _Case) -> bool:
    scales = case.tensors.get(".scales")
    if scales is None or ".g_idx" in case.tensors:
        return False
    return len(case.code) == len(scales.shape) == 2 and case.code[1] * 8 == scales.shape[1]


def _awq(case: _Case) -> Plain:
    groups, outputs = case.shape(".scales")
    version = str(case.config.get("version", "gemm")).lower()
    wrong = _misfit(case, ".qzeros") if case.shape(".qzeros") != (groups, case.code[1]) else ""
    wrong = wrong or (f"the version {version} has another layout" if version != "gemm" else "")
    return Plain((outputs, case.code[0]), problem=wrong)


def _gptq(case: _Case) -> Plain:
    """Inputs of several bits fill the rows of words; ``qzeros`` and ``g_idx`` tell how many bits."""
    scales, zeros = case.shape(".scales"), case.shape(".qzeros")
    if not len(case.code) == len(scales) == len(zeros) == 2 or not case.code[0] or scales[1] != case.code[1]:
        return Plain(None, problem=_misfit(case, ".scales"))
    rows, outputs = case.code
    inputs = prod(case.shape(".g_idx")) if ".g_idx" in case.tensors else 0
    bits = 32 * rows // inputs if inputs else 32 * zeros[1] // max(outputs, 1)
    fits = bits in (2, 3, 4, 8) and 32 * rows % bits == 0 and zeros == (scales[0], -(-outputs * bits // 32))
    fits = fits and (not inputs or inputs * bits == 32 * rows)
    said = case.config.get("bits", bits)
    wrong = (
        "" if fits and said == bits else _misfit(case, ".qzeros") if not fits else f"the configuration says {said} bits"
    )
    return Plain(
        (outputs, 32 * rows // bits) if fits else None, problem=wrong, format=f"GPTQ {bits} bit" if fits else ""
    )


def _packed(case: _Case) -> Plain:
    *rows, width = case.code or (0,)
    shape = case.numbers(".weight_shape")
    said = next(_values(case.config, "num_bits"), 0)
    if not shape and is_remote(case.checkpoint.path):
        bits = said or 4
        return Plain((*rows, width * 32 // bits), format=f"compressed-tensors int{bits}")
    if len(shape) != 2 or not shape[1]:
        return Plain(None, problem="weight_shape cannot be read")
    bits = said or 32 * width // shape[1]
    fits = 0 < bits <= 8 and width in (-(-shape[1] * bits // 32), -(-shape[1] // (32 // max(bits, 1))))
    wrong = "" if fits and shape[0] == prod(rows) else f"weight_shape {list(shape)} does not fit {list(case.code)}"
    return Plain(shape, problem=wrong, format=f"compressed-tensors int{bits}")


def _pairs(group: int) -> Callable[[_Case], Plain]:
    """Return the layout of two codes in a byte, with a scale for each group of codes in a row."""

    def plain(case: _Case) -> Plain:
        end = next(end for end in (".weight_scale", ".scale") if end in case.tensors)
        *rows, width = case.code or (0,)
        fits = case.shape(end) == (*rows, -(-2 * width // group))
        return Plain((*rows, 2 * width), problem="" if fits else _misfit(case, end))

    return plain


def _blocks(case: _Case) -> Plain:
    """Blocks of 16 bytes, two codes in each. Fused experts are stored transposed by transformers."""
    end = next(end for end in case.tensors if end)
    *rows, groups, width = case.code
    wrong = "" if case.shape(end) == case.code[:-1] else _misfit(case, end)
    inputs = groups * width * 2
    return Plain((*rows[:-1], inputs, rows[-1]) if end == "_scales" else (*rows, inputs), problem=wrong)


def _scaled(case: _Case) -> Plain:
    """Codes of 8 bits, and one scale, one for each row, or one for each block."""
    end = next(end for end in case.tensors if "scale" in end)
    code, scale = case.code, case.shape(end)
    of = "int8" if case.tensors[""].dtype == "int8" else "FP8"
    library = {"FP8": case.method, "int8": ""}[of].replace("fp8", "").strip("_-")
    start = "compressed-tensors int8" if of == "int8" else f"{library} FP8".strip()
    if prod(scale) == 1:
        return Plain(code, format=f"{start} with one scale for each weight")
    if len(code) > 1 and scale in (code[:-1], (*code[:-1], 1), (code[0], *(1 for _ in code[1:]))):
        return Plain(code, format=f"{start} with a scale for each channel")
    given = next(_values(case.config, "weight_block_size", "block_structure"), None)
    sizes = [tuple(given)] if isinstance(given, list) and len(given) == 2 else []
    if len(scale) == len(code) >= 2 and scale[:-2] == code[:-2] and 0 not in scale:
        quotient = code[-2] // scale[-2], code[-1] // scale[-1]
        even = (quotient[0] * scale[-2], quotient[1] * scale[-1]) == code[-2:]
        for block in [*sizes, (128, 128), *([quotient] if even else [])]:
            if all(type(n) is int and n > 0 and -(-c // n) == s for n, c, s in zip(block, code[-2:], scale[-2:])):
                return Plain(code, format=f"{start} with {block[0]}x{block[1]} block scales")
    return Plain(code, problem=_misfit(case, end), format=start)


def _reversed(case: _Case) -> Plain:
    return Plain(case.code[::-1])


def _hqq(case: _Case) -> Plain:
    shape = case.numbers(".shape") if ".shape" in case.tensors else ()
    return Plain(shape or None)


def _torchao(case: _Case) -> Plain:
    described = parsed_object(str(case.checkpoint.container.metadata.get(case.name, ""))) or {}
    data = described.get("_data")
    dtype = data.get("dtype") if isinstance(data, dict) else None
    kind = str(described.get("_type", ""))
    codes = case.tensors[""].dtype
    shape = case.code if codes == "int8" or codes in _FP8 else None
    if kind == "Int4Tensor":
        shape = (*case.code[:-1], 2 * case.code[-1])
    wrong = "" if kind else "the header does not describe it"
    return Plain(
        shape, str(dtype.get("_data", "")) if isinstance(dtype, dict) else "", wrong, f"torchao {kind}".strip()
    )


def _quanto(case: _Case) -> Plain:
    return Plain(None if case.tensors[""].dtype == "uint8" else case.code)


class _Layout(NamedTuple):
    """How a format stores a weight, by the ends of names: the code, and the tensors beside it.

    Without the parts in ``key`` it is another format, without those in ``wants`` it is damaged. ``dtype`` is the dtype
    of the plain weight, or the part that has it.
    """

    format: str
    code: str
    dtypes: frozenset[str]
    key: tuple[str, ...]
    wants: tuple[str, ...]
    may: tuple[str, ...]
    plain: Callable[[_Case], Plain] = _same
    dtype: str = ""
    fits: Callable[[_Case], bool] | None = None


_ANY: Final = frozenset(BY_NAME)
_NESTED: Final = (".nested_absmax", ".nested_quant_map", f"{_STATE}nf4", f"{_STATE}fp4")
_ZERO: Final = (".weight_zero_point", ".weight_g_idx", ".weight_offset")
_HQQ: Final = tuple(
    f".{meta}{name}"
    for meta in ("", "meta.")
    for name in (
        *("zero", "nbits", "group_size", "shape", "axis", "channel_wise", "compute_dtype", "packing", "view_as_float"),
        *("unpack_view_dtype", "optimize", "round_zero", "quant_scale", "quant_zero", "offload_meta", "scale_q"),
        *("stores_quant_config", "zero_q", "meta_scale", "meta_zero"),
    )
)
#: The formats. The first that fits counts.
_LAYOUTS: Final = (
    _Layout("bitsandbytes 4 bit", "", _ANY, (".absmax",), (".quant_map",), _NESTED, _bitsandbytes4),
    _Layout("bitsandbytes int8", ".weight", _INT8, (".SCB",), (), (".weight_format",), _bitsandbytes8),
    _Layout("AWQ 4 bit", ".qweight", _INT32, (".scales",), (".qzeros",), (), _awq, ".scales", _is_awq),
    _Layout("GPTQ", ".qweight", _INT32, (), (".scales", ".qzeros"), (".g_idx",), _gptq, ".scales"),
    _Layout(
        *("compressed-tensors packed", ".weight_packed", _INT32, (), (".weight_scale", ".weight_shape"), _ZERO),
        *(_packed, ".weight_scale"),
    ),
    _Layout(
        *("compressed-tensors NVFP4", ".weight_packed", _BYTES, (".weight_global_scale",), (".weight_scale",)),
        *((".input_global_scale",), _pairs(16), "bfloat16"),
    ),
    _Layout("compressed-tensors MXFP4", ".weight_packed", _BYTES, (), (".weight_scale",), (), _pairs(32), "bfloat16"),
    _Layout("modelopt NVFP4", ".weight", _BYTES, (".weight_scale_2",), (".weight_scale",), (), _pairs(16)),
    _Layout("MXFP4", "_blocks", _UINT8, ("_scales",), (), (), _blocks, "bfloat16", lambda case: len(case.code) > 2),
    _Layout("MXFP4", ".blocks", _UINT8, (".scales",), (), (), _blocks, "bfloat16", lambda case: len(case.code) > 2),
    _Layout("FP8", "", _FP8, ("_scale_inv",), (), (), _scaled),
    _Layout("FP8", ".weight", _FP8, (".scale",), (), (), _scaled),
    _Layout(
        *("FP4 of DeepSeek", ".weight", _BYTES, (".scale",), (), (), _pairs(32), ""),
        lambda case: case.tensors[".scale"].dtype == _E8M0,
    ),
    _Layout("FP8", "", _FP8, ("_scale",), (), ("_zero_point",), _scaled),
    _Layout("FP8 of ComfyUI", ".weight", _FP8, (".scale_weight",), (), (".scale_input",)),
    _Layout("compressed-tensors int8", "", _INT8, ("_scale",), (), ("_zero_point",), _scaled, "_scale"),
    _Layout("packed", "", _BYTES, ("_scale",), (), (), lambda case: Plain(None, problem="its layout is not known")),
    _Layout(
        *("torchao", "_qdata", _CODES, (), ("_scale",), ("_zero_point", "_scale_and_zero", "_per_tensor_scale")),
        _torchao,
    ),
    _Layout("optimum-quanto", "._data", _CODES, ("._scale",), (), ("._shift", "._zeropoint"), _quanto, "._scale"),
    _Layout("EETQ int8", ".weight", _INT8, (".weight_scales",), (), (), _reversed, ".weight_scales"),
    _Layout("HQQ", ".W_q", _ANY, (".scale",), (), _HQQ, _hqq),
    _Layout("HQQ", ".W_q", _ANY, (".meta.scale",), (), _HQQ, _hqq),
    _Layout("HQQ", ".W_q", _ANY, (), (".scale",), _HQQ, _hqq),
    *(
        _Layout("bitsandbytes 8-bit optimizer", f".state{n}", _UINT8, (f".absmax{n}",), (f".qmap{n}",), ())
        for n in (1, 2)
    ),
)


def quantization(checkpoint: Checkpoint) -> Quantization:
    """Return the quantized weights of a checkpoint; an empty Quantization, which is false, if there are none."""
    tensors = checkpoint.survey.tensors
    kinds = {(entry.tensor.kind, entry.tensor.dtype) for entry in tensors}
    if all(kind in ("dense", "meta") and dtype not in _CODES for kind, dtype in kinds):
        names = "\n".join([entry.key for entry in tensors])  # most checkpoints are done here
        if not any(mark in names for mark in (*_MARKS, _STATE, ".W_q")):
            return Quantization()
    return _Search(checkpoint).run()


class _Search:
    """The search for quantized weights in one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.reader = checkpoint, checkpoint.survey.reader
        self.weights: list[QuantizedWeight] = []
        self.others: list[TensorEntry] = []
        self.left_over: list[TensorEntry] = []

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The configuration of the quantization, from the files beside the weights; empty without one."""
        return quantization_config(self.checkpoint)

    def run(self) -> Quantization:
        scopes: dict[int, dict[str, TensorEntry]] = {}
        for entry in self.checkpoint.survey.tensors:
            inside = entry.state_dict >= 0
            name = entry.key if inside else entry.path.replace('["', ".").replace('"]', "")
            if entry.tensor.kind == "quantized" or entry.tensor.cls.partition(".")[0] in QUANTIZERS:
                self.add_subclass(name, entry)
            else:
                scopes.setdefault(entry.state_dict, {})[name] = entry
        for names in scopes.values():
            self.search(names)
        found = Quantization(tuple(self.weights), tuple(self.others), tuple(self.left_over))
        return found._replace(tensors=frozenset(entry.tensor for entry in found.entries))

    def add_subclass(self, name: str, entry: TensorEntry) -> None:
        """Add a tensor whose class means that it is quantized; it holds its parts."""
        tensor, graph = entry.tensor, self.checkpoint.graph
        package, _, _ = tensor.cls.partition(".")
        known = f"{QUANTIZERS.get(package, 'torch')} {tensor.cls.rpartition('.')[2] or tensor.dtype}"
        call = graph.nodes[entry.ref]
        args = graph.nodes[call.args] if isinstance(call, Call) else ()
        state = state_items(graph, args[3]) if type(args) is tuple and len(args) > 3 else ()
        roles = {ref: str(graph.nodes[key]) for key, ref in state}
        inner = [(ref, part) for ref in tensor.parts if (part := self.reader.tensor(ref)) is not None]
        parts = [(roles.get(ref, "part"), entry._replace(ref=ref, tensor=part)) for ref, part in inner]
        shape = tensor.shape if tensor.kind in ("wrapper", "quantized") else None
        self.weights.append(QuantizedWeight(name, known, (("code", entry), *parts), shape, tensor.dtype, ""))

    def search(self, names: Mapping[str, TensorEntry]) -> None:
        """Add the weights of one state dict, and the rest of their quantization."""
        used: set[str] = set()
        for name, entry in names.items():
            if entry.tensor.dtype in _CODES or f"{name}.absmax" in names or name.endswith(".W_q"):
                used |= self.match(name, names)
        method = str(self.config.get("quant_method", "")) if len(used) < len(names) else ""
        scaled = any(weight.code.tensor.dtype in _FP8 for weight in self.weights)
        for name, entry in names.items():
            dtype = entry.tensor.dtype
            if name not in used and dtype in _CODES and (method or (scaled and dtype in _FP8)):
                used |= self.unknown(name, names, used, method)
        quantized = bool(used or method)
        for name, entry in names.items():
            if name in used:
                continue
            if name.endswith(_MARKS) or _STATE in name or (quantized and name.endswith(_PARTS)):
                self.left_over.append(entry)
            elif quantized and name.endswith(_BESIDE):
                self.others.append(entry)

    def match(self, name: str, names: Mapping[str, TensorEntry]) -> set[str]:
        """Add the weight whose code has this name, if a layout fits; return the names of its tensors."""
        dtype = names[name].tensor.dtype
        for layout in _LAYOUTS:
            if dtype not in layout.dtypes or not name.endswith(layout.code):
                continue
            base = name[: len(name) - len(layout.code)]
            if any(base + end not in names for end in layout.key):
                continue
            ends = (*layout.key, *layout.wants, *layout.may)
            found = {"": name} | {end: base + end for end in ends if base + end in names}
            weight = _plain_name(base, layout.code)
            tensors = {end: names[part].tensor for end, part in found.items()}
            case = _Case(self.checkpoint, weight, tensors, self.config)
            if layout.fits is not None and not layout.fits(case):
                continue
            missing = [end.lstrip("._") for end in layout.wants if end not in found]
            plain = Plain(None, problem=f"{join_limited(missing)} is missing") if missing else layout.plain(case)
            of = tensors[layout.dtype].dtype if layout.dtype in tensors and layout.dtype else layout.dtype
            parts = tuple((end.lstrip("._") or "code", names[part]) for end, part in found.items())
            item = QuantizedWeight(
                weight, plain.format or layout.format, parts, plain.shape, plain.dtype or of, plain.problem
            )
            self.weights.append(item)
            return set(found.values())
        return set()

    def unknown(self, name: str, names: Mapping[str, TensorEntry], used: set[str], method: str) -> set[str]:
        """Add codes that no layout explains, in a model that is quantized; return the names of the module's tensors."""
        module, _, last = name.rpartition(".")
        tensor = names[name].tensor
        if last in ("bias", "position_ids", "token_type_ids") or "mask" in last or len(tensor.shape) < 2:
            return set()
        beside = [other for other in names if other.rpartition(".")[0] == module and other not in (*used, name)]
        parts = [name, *(other for other in beside if not other.endswith(".bias"))]
        what = "its scale is missing" if tensor.dtype in _FP8 else "its layout is not known"
        roles = tuple((other.rpartition(".")[2] if other != name else "code", names[other]) for other in parts)
        self.weights.append(QuantizedWeight(f"{module}.weight", method or "FP8", roles, None, "", what))
        return set(parts)


def _plain_name(base: str, code: str) -> str:
    if code == "_qdata":
        module, _, last = base.rpartition(".")
        return f"{module}.{last.removeprefix('_')}" if module else last.removeprefix("_")
    return f"{base}.weight" if code in (".weight", ".qweight", ".weight_packed", ".W_q") else base


def _values(config: object, *names: str) -> Iterator[Any]:
    """Yield the values of fields with these names, at any depth."""
    for name, value in config.items() if isinstance(config, Mapping) else ():
        if name in names and value is not None:
            yield value
        elif isinstance(value, Mapping):
            yield from _values(value, *names)


def quantization_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the configuration of the quantization, from the files beside the weights; empty without one."""
    source = checkpoint.source
    folder = checkpoint.path if isinstance(source, FolderSource) else os.path.dirname(checkpoint.path)
    config = parsed_object(checkpoint.companions.get("config.json", b"")) or _object(folder, "config.json")
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, dict) else {}):
        if isinstance(found := place.get("quantization_config"), dict):
            return found
    for name in _OTHER_CONFIGS if config else ():
        other = _object(folder, name)
        if isinstance(modelopt := other.get("quantization"), dict):
            return {"quant_method": "modelopt", **modelopt}
        if other:
            return {"quant_method": "awq" if "w_bit" in other else "gptq", **other}
    return {}


def _object(folder: str, name: str) -> Mapping[str, Any]:
    return read_object(f"{folder.rstrip('/')}/{name}" if folder else name) or {}
