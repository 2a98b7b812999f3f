"""Turn quantized weights back into plain ones, a few rows at a time while the output is written."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from ..base.dtypes import BY_NAME
from ..base.errors import MalformedError, RefusedError
from ..base.lazy import regex
from ..base.steps import command
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.configurations import CONFIG_FIELDS, OTHER_CONFIGS, configurations, quantization_config
from ..checkpoint.objects import mapping
from ..checkpoint.quantized import UNKNOWN_LAYOUT, Quantization, QuantizedWeight, quantization
from ..checkpoint.survey import TensorEntry
from ..files.sources import Computed, Deferred
from ..formats.opening import takes_path
from ..pickles.nodes import Ref
from ..values.dequantized import Dequantization, dequantized
from ..values.numeric import ROUNDED
from ..values.torch.adapters import StoredTensor
from .cast import cast, check_dtype
from .model_config import CONFIG, config_fields
from .recompute import Recomputation, refuse_blocks

#: Names of tensors that change the inputs of a layer: without them the plain weight computes something else.
_RESCALED: Final = regex(r"(?:\.|_)(?:pre_quant_scale|act_pre_scale)\Z|\.(?:input|output|weight)_transform\.")
_FIELDS: Final = ("dtype", "torch_dtype")


@takes_path
def dequantize(checkpoint: Checkpoint, to_dtype: object = None, *, key: str | None = None) -> Checkpoint:
    """Replace quantized weights by plain ones: the values that the library of their format computes, bit for bit.

    ``to_dtype`` is a name or a torch dtype, to which all other floating-point tensors are cast as well; by default the
    weights get the dtype of the model, from its ``config.json`` or its other tensors. Scales, zero points and the
    states of the quantization are left out, with the scales of activations, and ``quantization_config`` of the
    ``config.json``. The values are computed while the output is written. Raise RefusedError if nothing is quantized, if
    a part is missing or does not fit, if a format is not supported, or if a value does not fit into the dtype.

    >>> ckptool.dequantize("quantized.pth", torch.bfloat16)["fc.weight"].dtype
    'bfloat16'
    """
    work = Recomputation(checkpoint, key)
    found = _chosen(work)
    _refuse_unfit(work, found)
    dtype = _of_model(work, found) if to_dtype is None else check_dtype(str(to_dtype).removeprefix("torch.")).name
    if dtype not in ROUNDED:
        what = f"plain weights are not written as {dtype}"
        raise RefusedError(what, path=checkpoint.path, next="`--to-dtype bfloat16`")
    made: dict[int, dict[str, tuple[str, Ref]]] = {}
    wrapped: dict[str, Deferred] = {}
    for weight in found.weights:
        entry = weight.parts[0][1]
        if entry.state_dict < 0:
            raise RefusedError(f"{quoted(entry.path)} is in no state dict", path=checkpoint.path)
        made.setdefault(entry.state_dict, {})[entry.key] = weight.name, _made(work, weight, dtype, wrapped)
    parts = [*found.others, *(part for weight in found.weights for _, part in weight.parts)]
    for number, inside in made.items():
        ref, gone = work.checkpoint.survey.state_dicts[number].ref, {e.key for e in parts if e.state_dict == number}
        work.editor.refill(ref, list(_items(work, ref, inside, gone)))
    formats = join_limited([*dict.fromkeys(weight.format for weight in found.weights)], most=3)
    what = f"{pluralize(len(found.weights), 'weight')} turned back into {dtype} ({formats})"
    notes = [f"{pluralize(len(found.others), 'tensor')} for activations left out"] if found.others else []
    if any(weight.numbers.get("round_scale") for weight in found.weights):
        notes.append(f"as modelopt does, with the scale rounded to {dtype} first; engines multiply by the scale itself")
    notes += [f"{CONFIG} of an output folder: without quantization_config"] if config_fields(checkpoint) else []
    changes = [Change("dequantize", key or "", len(found.weights), 0, what, tuple(notes))]
    edited = work.done(changes, deferred_changes=(partial(_of_wrapped, wrapped),))
    edited = _described(edited, dtype, to_dtype is not None)
    return cast(edited, dtype, key=key) if to_dtype is not None else edited


def _chosen(work: Recomputation) -> Quantization:
    """Return the quantized weights among the chosen tensors: states of an optimizer are none."""
    found, paths = quantization(work.checkpoint, exact=True), {entry.path for entry in work.chosen}
    weights = tuple(weight for weight in found.weights if weight.parts[0][1].path in paths)
    others, left = ([entry for entry in each if entry.path in paths] for each in (found.others, found.left_over))
    return found._replace(weights=weights, others=tuple(others), left_over=tuple(left))


def _refuse_unfit(work: Recomputation, found: Quantization) -> None:
    """Raise RefusedError if nothing is quantized, or not all of it can be turned back."""
    path, config = work.checkpoint.path, quantization_config(work.checkpoint)
    if not (found.weights or found.left_over):
        what, method = "none of its weights is quantized", config.get("quant_method", "")
        what = f"its configuration says that it is quantized ({method}), and its tensors are not" if method else what
        raise RefusedError(what, path=path, next="see its tensors: " + command("keys", path))
    if problems := [*_unsupported(found.weights), *(text for text in found.problems if UNKNOWN_LAYOUT not in text)]:
        raise RefusedError(f"not every weight can be turned back: {join_limited(problems, most=3)}", path=path)
    refuse_blocks(work.checkpoint, found)
    codes = {part.ref for weight in found.weights for _, part in weight.parts}
    for entry in work.chosen:
        if _RESCALED.search(entry.key):
            what = f"{quoted(entry.key)} changes the inputs of a weight, and plain weights have no place for it"
            raise RefusedError(what, path=path)
        if entry.tensor.dtype.startswith("float8") and entry.ref not in codes and config:
            raise RefusedError(f"{quoted(entry.path)} is {entry.tensor.dtype}, and has no scale", path=path)


def plain_of(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with plain weights; one without quantized weights as it is."""
    checkpoint = checkpoint.in_full()
    found = _chosen(Recomputation(checkpoint))
    return dequantize(checkpoint) if found.weights or found.left_over else checkpoint


def _items(
    work: Recomputation, ref: Ref, made: Mapping[str, tuple[str, Ref]], gone: set[str]
) -> Iterator[tuple[Ref, Ref]]:
    """Yield the entries of a state dict with plain weights in place of their parts."""
    nodes = work.checkpoint.graph.nodes
    before = [(str(nodes[name]), name, value) for name, value in mapping(work.checkpoint.graph, ref) or ()]
    names = {key for key, _, _ in before} - gone
    for key, name, value in before:
        if key in made:
            title, plain = made[key]
            if title in names:
                raise RefusedError(f"{quoted(title)} exists beside its quantized form", path=work.checkpoint.path)
            yield work.editor.text(name, title), plain
        elif key not in gone:
            yield name, value


def _unsupported(weights: tuple[QuantizedWeight, ...]) -> Iterator[str]:
    """Yield why weights cannot be turned back although nothing is wrong with them."""
    unknown = (each for each in weights if (not each.arithmetic and not each.problem) or each.problem == UNKNOWN_LAYOUT)
    for name in dict.fromkeys(weight.format for weight in unknown):
        yield f"ckptool does not know how to decode {name}"


def _of_model(work: Recomputation, found: Quantization) -> str:
    """Return the dtype of the model: from its config.json, else of its quantized weights, else of its other tensors."""
    config = configurations(work.checkpoint).get(CONFIG, {})
    parts = sorted(_parts_of(config), key=lambda each: not {*CONFIG_FIELDS} & each.keys())
    named = [each.get(name) for each in parts if each is config or {*CONFIG_FIELDS} & each.keys() for name in _FIELDS]
    named += [weight.dtype for weight in found.weights]
    plain: Counter[str] = Counter()
    for entry in work.checkpoint.survey.tensors:
        if entry.tensor not in found.tensors:
            plain[entry.tensor.dtype] += entry.tensor.own_bytes
    named += [name for name, _ in plain.most_common()]
    return next((str(name) for name in named if name in ROUNDED), "bfloat16")


def _of_wrapped(wrapped: Mapping[str, Deferred]) -> list[Change]:
    """Return what to say of GPTQ's zero points that are all ones where they are stored less one; empty without any."""
    names = [name for name, count in wrapped.items() if count.value]
    what = f"zero points stored as all ones are 0 here, and 2^bits for some kernels: in {join_limited(names, most=3)}"
    return [Change("dequantize", "", len(names), 0, what)] if names else []


def _made(work: Recomputation, weight: QuantizedWeight, dtype: str, wrapped: dict[str, Deferred]) -> Ref:
    """Add the plain tensor of a quantized weight; ``wrapped`` gets the count of its zero points that are ambiguous."""
    assert weight.shape is not None
    parts = {role: _stored(work, entry) for role, entry in weight.parts if entry.tensor.storage}
    numbers = dict(weight.numbers)
    if numbers.get("offset", 0) is None:
        numbers["offset"] = _offset(parts["qzeros"], numbers["bits"])
    if numbers.get("offset"):
        numbers["wrapped"] = wrapped[weight.name] = Deferred()
    narrow = weight.dtype in ROUNDED and weight.dtype not in (dtype, "float32")
    rounds = (weight.dtype, dtype) if narrow else (dtype,)
    target = BY_NAME[dtype]
    size, width = weight.numel * target.itemsize, work.width(target)
    how = Dequantization(weight.name, weight.arithmetic, tuple(parts.items()), weight.shape, rounds, numbers, width)
    return work.tensor(weight.name, target, weight.shape, Computed(size, dequantized, (how,)))


def _offset(zeros: StoredTensor, bits: int) -> int:
    """Return what GPTQ's first version takes off zero points, 1, or 0 for its second version.

    Without a configuration, only the zero point in the middle of all codes tells which it is.
    """
    middle = {2: (0xAA, 0x55), 4: (0x88, 0x77), 8: (0x80, 0x7F)}.get(bits, ())
    found = {*zeros.values}
    if len(found) == 1 and found <= {*middle}:
        return middle.index(*found)
    what = "GPTQ has two versions of zero points, and no quantize_config.json beside the weights says which"
    raise RefusedError(what, path=zeros.storage.path)


def _stored(work: Recomputation, entry: TensorEntry) -> StoredTensor:
    if work.checkpoint.body(entry.tensor.storage) is None:
        raise MalformedError(f"the bytes of {quoted(entry.path)} are missing", path=work.checkpoint.path)
    return StoredTensor.of(work.checkpoint, entry.path, entry.tensor)


def _parts_of(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a configuration and its parts at any depth, such as ``text_config``."""
    return [fields, *(part for each in fields.values() if isinstance(each, dict) for part in _parts_of(each))]


def _described(checkpoint: Checkpoint, dtype: str, everywhere: bool) -> Checkpoint:
    """Return the checkpoint with files and a header that speak of plain weights; ``everywhere``: of one dtype."""
    fields = config_fields(checkpoint)
    companions = dict(checkpoint.companions)
    if fields:
        for each in _parts_of(fields):
            described = [each.pop(name) for name in CONFIG_FIELDS if name in each]
            if each is fields or described or everywhere:
                each |= dict.fromkeys({*_FIELDS} & each.keys(), dtype)
        if not {*_FIELDS} & fields.keys():
            fields["torch_dtype"] = dtype
        companions[CONFIG] = (json.dumps(fields, indent=2) + "\n").encode()
        companions |= dict.fromkeys(OTHER_CONFIGS, b"")
    texts = {n: text for n, text in checkpoint.metadata.items() if n != "tensor_names" and '"_type"' not in text}
    return checkpoint.replace(companions=companions, texts=texts)
