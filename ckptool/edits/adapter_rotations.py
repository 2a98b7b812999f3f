"""Adapters that rotate the columns of a weight: BOFT and OFT of PEFT (``tuners/boft``, ``tuners/oft``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isqrt, prod
from typing import Final

from ..base.text import pluralize, quoted, shape_text
from ..checkpoint.tensors import Tensor
from ..values.torch.adapters import AdapterStep
from .adapter_settings import BY_PEFT, CONFIG, Adapter, WeightChange, fit, stored

#: The most columns that a butterfly may mix: their rotation is one square matrix in memory.
_MOST_COLUMNS: Final = 4096
#: The most terms of a series, and the PEFT release 0.N that changed the series of OFT.
_MOST_TERMS: Final = 100
_SERIES_CHANGED: Final = 18


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
