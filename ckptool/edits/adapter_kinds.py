"""Adapters of PEFT other than LoRA: LoHa and LoKr make a weight of products, BOFT and OFT rotate its columns.

Sources: ``tuners/loha``, ``tuners/lokr``, ``tuners/boft``, ``tuners/oft``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import isqrt, prod
from typing import Final

from ..base.text import pluralize, quoted, shape_text
from ..checkpoint.tensors import Tensor
from ..values.torch.adapters import AdapterStep
from .adapter_settings import BY_PEFT, CONFIG, Adapter, WeightChange, by_pattern, check_rank, fit, scale, stored

#: The tensors of LoHa: two products of two matrices, each of convolutions perhaps with a core.
LOHA: Final = ("t1", "w1_a", "w1_b", "t2", "w2_a", "w2_b")
#: The tensors of LoKr, and which of them make two factors: matrices, or products of them.
LOKR: Final = ("w1", "w1_a", "w1_b", "w2", "t2", "w2_a", "w2_b")
_LOKR_FORMS: Final = tuple(
    (*first, *second)
    for first in (("w1",), ("w1_a", "w1_b"))
    for second in (("w2",), ("w2_a", "w2_b"), ("t2", "w2_a", "w2_b"))
)
#: The most columns that a butterfly may mix: their rotation is one square matrix in memory.
_MOST_COLUMNS: Final = 4096
#: The most terms of a series, and the PEFT release 0.N that changed the series of OFT.
_MOST_TERMS: Final = 100
_SERIES_CHANGED: Final = 18


def hadamard(
    adapter: Adapter, module: str, keys: Mapping[str, str], base: Mapping[str, Tensor], path: str, weight: float
) -> WeightChange:
    """Return the change of LoHa: the product, element by element, of two products of matrices.

    A convolution is a matrix with a row for each output, or each product has a core for the kernel (t1, t2).
    """
    with_core = keys["t1"] != ""
    if not all(keys[name] for name in LOHA if name[0] == "w") or with_core is not bool(keys["t2"]):
        raise adapter.refusal(f"{quoted(next(filter(None, keys.values())))} has no partners: the file is incomplete")
    found = {name: adapter.tensors[key].shape for name, key in keys.items() if key}
    target, wanted = f"{module}.weight", base.get(f"{module}.weight")
    rank, *_ = found["w1_b"] or (0,)
    kernel = found["t1"][2:] if with_core else ()
    out, inner = (*found["w1_a"], 0, 0)[1 if with_core else 0], (*found["w1_b"], 0, 0)[1]
    side = (rank, out) if with_core else (out, rank)
    fitting: dict[str, tuple[int, ...]] = {"w1_a": side, "w1_b": (rank, inner), "w2_a": side, "w2_b": (rank, inner)}
    fitting |= {name: (rank, rank, *kernel) for name in ("t1", "t2") if with_core}
    if found != fitting:
        raise adapter.refusal(f"{quoted(keys['w1_a'])} and its partners are not matrices of one rank", BY_PEFT)
    check_rank(adapter, keys["w1_b"], rank)
    shape = (out, inner, *kernel)
    if wanted is not None and wanted.shape:
        # One row for each output, as a matrix; a Conv1d has a kernel with a second side of 1.
        forms = ((wanted.shape[0], prod(wanted.shape[1:])), (*wanted.shape, 1) if with_core else wanted.shape)
        shape = wanted.shape if shape in forms else shape
    fit(adapter, keys["w1_a"], shape, target, wanted, path)
    tensors = tuple(stored(adapter, keys[name]) for name in LOHA if keys[name])
    step = AdapterStep("hadamard", tensors, scale(adapter, module, rank, "alpha") * weight)
    return WeightChange(target, step)


def kronecker(
    adapter: Adapter, module: str, keys: Mapping[str, str], base: Mapping[str, Tensor], path: str, weight: float
) -> WeightChange:
    """Return the change of LoKr: the Kronecker product of two matrices, which may be products themselves."""
    found = {name: adapter.tensors[key].shape for name, key in keys.items()}
    first, second = ([name for name in LOKR if name in found and number in name] for number in "12")
    if (*first, *second) not in _LOKR_FORMS or adapter.config.get("peft_type") != "LOKR":
        raise adapter.refusal(f"{quoted(next(iter(keys.values())))} and its partners are not the two factors of LoKr")
    target, wanted = f"{module}.weight", base.get(f"{module}.weight")
    rank = by_pattern(adapter, module, "rank_pattern", adapter.config.get("r", 8))
    if type(rank) is not int or rank < 1:
        raise adapter.refusal(f"its rank {json.dumps(rank)[:80]} is not a positive number")
    if wanted is not None:
        rows, columns, *kernel = (*wanted.shape, 1, 1)[: max(len(wanted.shape), 2)]
        height, width = (*found[first[0]], 1)[0], (*found[first[-1]], 1, 1)[1]
        below, inside = rows // max(height, 1), columns // max(width, 1)
        mixed = "t2" in found
        fitting = {
            "w1": (height, width),
            "w1_a": (height, rank),
            "w1_b": (rank, width),
            "w2": (below, inside, *kernel),
            "t2": (rank, rank, *kernel, 1)[:4],
            "w2_a": (rank, below) if mixed else (below, rank),
            "w2_b": (rank, inside if mixed else inside * prod(kernel)),
        }
        wrong = next((name for name, shape in found.items() if shape != fitting[name]), "")
        if wrong or (height * below, width * inside) != (rows, columns):
            key, shape = keys[wrong or first[0]], found[wrong or first[0]]
            message = f"{quoted(key)} is {shape_text(shape)} and the rank {rank:,}, but {quoted(target)} of {path} is"
            raise adapter.refusal(f"{message} {shape_text(wanted.shape)}: another base")
        if len(kernel) == 1 and "w2" in found:
            raise adapter.refusal(f"{quoted(keys['w2'])} changes a Conv1d, which is not supported", BY_PEFT)
    tensors = tuple(stored(adapter, keys[name]) for name in (*first, *second))
    step = AdapterStep("kronecker", tensors, scale(adapter, module, rank, "alpha") * weight, rank=len(first))
    return WeightChange(target, step)


def butterfly(
    adapter: Adapter, module: str, rotations: str, scales: str, base: Mapping[str, Tensor], path: str
) -> WeightChange:
    """Return the change of BOFT: a product of block-diagonal rotations, and a scale for each row."""
    if not (rotations and scales):
        other = "boft_s" if rotations else "boft_R"
        raise adapter.refusal(f"{quoted(rotations or scales)} has no partner {other}: the file is incomplete")
    shape, config = adapter.tensors[rotations].shape, adapter.config
    if len(shape) != 4 or shape[2] != shape[3]:
        raise adapter.refusal(f"{quoted(rotations)} is {shape_text(shape)}, which is not the shape of BOFT rotations")
    factors, blocks, size, _ = shape
    says = config.get("boft_block_size", 4), config.get("boft_block_num", 0)
    if config.get("peft_type") != "BOFT" or says not in ((size, 0), (0, blocks)):
        message = f"{quoted(rotations)} has {pluralize(blocks, 'block')} of size {size:,}"
        raise adapter.refusal(f"{message}, and {CONFIG} gives boft_block_size {says[0]} and boft_block_num {says[1]}")
    # Without its CUDA extension, PEFT trains one factor, whatever the settings say.
    wanted_factors = config.get("boft_n_butterfly_factor", 1)
    if factors not in (1, wanted_factors):
        message = f"{quoted(rotations)} has {factors:,} butterfly factors, and {CONFIG} says {wanted_factors}"
        raise adapter.refusal(message)
    if factors > 1 and (size % 2 or blocks % 2 ** (factors - 1)):
        message = f"{pluralize(blocks, 'block')} of size {size:,} cannot have {factors:,} butterfly factors"
        raise adapter.refusal(f"{quoted(rotations)}: {message}")
    if factors > 1 and size * 2 ** (factors - 1) > _MOST_COLUMNS:
        raise adapter.refusal(f"{quoted(rotations)} mixes more than {_MOST_COLUMNS:,} columns", BY_PEFT)
    target = f"{module}.weight"
    if (weight := base.get(target)) is not None:
        _fit_columns(adapter, rotations, blocks * size, target, weight, path)
        rows = (weight.shape[0], 1) if len(weight.shape) == 2 else (1, weight.shape[0])
        if adapter.tensors[scales].shape != rows:
            found = shape_text(adapter.tensors[scales].shape)
            raise adapter.refusal(f"{quoted(scales)} is {found}, and the weight needs {shape_text(rows)}")
    return WeightChange(target, AdapterStep("butterfly", (stored(adapter, rotations), stored(adapter, scales))))


def rotation(adapter: Adapter, module: str, key: str, base: Mapping[str, Tensor], path: str) -> WeightChange:
    """Return the change of OFT: one block-diagonal rotation, stored as the upper triangle of each block."""
    shape, config = adapter.tensors[key].shape, adapter.config
    shared = config.get("block_share") is True
    size = (1 + isqrt(1 + 8 * shape[-1])) // 2 if len(shape) == 2 else 0
    if config.get("peft_type") != "OFT" or not size or size * (size - 1) != 2 * shape[1] or (shape[0] > 1 and shared):
        raise adapter.refusal(f"{quoted(key)} is {shape_text(shape)}, which is not the shape of OFT rotations")
    series, terms = config.get("use_cayley_neumann"), config.get("num_cayley_neumann_terms", 5)
    if type(series) is not bool or type(terms) is not int or not 1 <= terms <= _MOST_TERMS:
        raise adapter.refusal(f"{CONFIG} does not say how the rotation is computed (use_cayley_neumann)", BY_PEFT)
    version = re.match(r"0\.(\d{1,4})\.|[1-9]", str(config.get("peft_version")))
    if series and (version is None or int(version[1] or _SERIES_CHANGED) < _SERIES_CHANGED):
        message = f"it was trained with another Cayley-Neumann series than that of PEFT 0.{_SERIES_CHANGED} and later"
        raise adapter.refusal(message, "merge it with the PEFT that trained it")
    if config.get("coft"):
        raise adapter.refusal("a constrained OFT (coft) is not supported", BY_PEFT)
    target = f"{module}.weight"
    if (weight := base.get(target)) is not None:
        columns = prod(weight.shape[1:]) // size * size if shared else shape[0] * size
        _fit_columns(adapter, key, columns, target, weight, path)
    step = AdapterStep("rotation", (stored(adapter, key),), rank=terms if series else 0)
    return WeightChange(target, step)


def _fit_columns(adapter: Adapter, key: str, columns: int, target: str, weight: Tensor, path: str) -> None:
    """Raise RefusedError if a weight has another number of columns, or is of a layer that PEFT does not rotate."""
    shape = weight.shape
    if len(shape) not in (2, 4) or shape[2:3] != shape[3:]:
        layers = "linear layers and convolutions with square kernels"
        raise adapter.refusal(f"{quoted(target)} of {path} is {shape_text(shape)}: PEFT rotates only {layers}")
    if prod(shape[1:]) != columns:
        fit(adapter, key, (shape[0], columns), target, weight, path)
