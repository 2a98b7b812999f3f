"""Turn the tensors of an adapter into changes of weights: check their shapes, and choose the step for each kind.

Sources: PEFT (``tuners/lora``, ``adalora``, ``loha``, ``lokr``, ``boft``, ``oft``, ``vera``, ``ia3``,
``trainable_tokens``). The arithmetic is in ``values/torch/adapters.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isqrt, prod
from typing import Any, Final, TypeAlias

from ..base.errors import RefusedError
from ..base.records import NamedTuple
from ..base.steps import command, suggested_output
from ..base.text import pluralize, quoted, shape_text
from ..values.torch.adapters import AdapterStep
from .adapter_names import PROJECTIONS, TABLE, UNKNOWN
from .adapter_settings import BY_PEFT, CONFIG, Adapter

#: The keys of the tensors of one kind, by their parts without ".weight".
Keys: TypeAlias = Mapping[str, str]
Shape: TypeAlias = "tuple[int, ...]"
#: The key of a weight in the base, and the step that changes it.
WeightChange: TypeAlias = "tuple[str, AdapterStep]"

#: For each kind of adapter, the parts and the shapes of its tensors.
_FORMS: Final[dict[str, Any]] = TABLE["shapes"]
#: The most terms of a series, and the PEFT release 0.N that changed the series of OFT.
_MOST_TERMS: Final = 100
_SERIES_CHANGED: Final = 18


class Module(NamedTuple):
    """A module that an adapter changes: its keys, its name in the base, and the shapes of the base at ``path``."""

    adapter: Adapter
    name: str
    parts: Keys
    place: str
    base: Mapping[str, Shape]
    path: str

    @property
    def key(self) -> str:
        """The key of its weight in the base."""
        return f"{self.place}.weight"

    @property
    def own(self) -> Shape:
        """The shape of its weight in the base."""
        return self.base[self.key]

    def shape(self, key: str) -> Shape:
        """Return the shape of a tensor of the adapter."""
        return self.adapter.tensors[key].shape

    def sizes(self, keys: Keys, forms: Mapping[str, str]) -> dict[str, Any]:
        """Return the size of each letter (a tuple with ``*``); raise RefusedError if the shapes do not fit together."""
        first = next(iter(keys.values()))
        if lacking := next((part for part in forms if part not in keys), ""):
            raise self.adapter.refusal(f"{quoted(first)} has no partner {lacking}: the file is incomplete")
        if other := next((key for part, key in keys.items() if part not in forms), ""):
            raise self.adapter.refusal(UNKNOWN.format(quoted(other)), BY_PEFT)
        found: dict[str, Any] = {"1": 1}
        for part, form in forms.items():
            letters, shape = form.split(), self.shape(keys[part])
            values: list[Any] = [*shape]
            if letters[-1].endswith("*"):
                rest = shape[len(letters) - 1 :]
                values[len(letters) - 1 :] = [prod(rest) if letters[-1] == "1*" else rest]
            names = [letter.removesuffix("*") for letter in letters]
            if len(values) != len(names) or any(found.setdefault(*pair) != pair[1] for pair in zip(names, values)):
                shapes = [f"{quoted(keys[part])} is {shape_text(self.shape(keys[part]))}" for part in forms]
                raise self.adapter.refusal(f"shapes that do not fit together: {', '.join(shapes)}", BY_PEFT)
        return found

    def unfit(self, key: str, reason: str) -> RefusedError:
        """Return the error about a tensor that contradicts the settings, or that cannot be merged."""
        return self.adapter.refusal(f"{quoted(key)} is {shape_text(self.shape(key))}: {reason}", BY_PEFT)

    def fit(self, key: str, shape: Shape, target: str = "") -> None:
        """Raise RefusedError if a change has another shape than the weight, or the tensor ``target``, in the base."""
        target = target or self.key
        if (wanted := self.base.get(target, shape)) == shape:
            return
        if len(shape) == 2 == len(wanted) and shape[1] == wanted[1] and re.search(r"embed|wte|lm_head|token", target):
            message = f"the adapter has {pluralize(shape[0], 'token')} ({quoted(key)}), the base {wanted[0]:,}"
            output = suggested_output(self.path, "resized")
            resized = command("resize", self.path, vocab=str(shape[0]), output=output)
            raise self.adapter.refusal(message, "resize the base first: " + resized)
        there = f"{quoted(target)} of {self.path} is {shape_text(wanted)}: another base"
        raise self.adapter.refusal(f"{quoted(key)} changes a weight of {shape_text(shape)}, and {there}")

    def change(self, kind: str, keys: Iterable[str], factor: float = 1.0, **how: Any) -> WeightChange:
        """Return a change of the weight by these tensors, with ``factor`` times the weight of the adapter."""
        tensors, own = tuple(map(self.adapter.stored, keys)), self.adapter.in_model
        return self.key, AdapterStep(kind, tensors, factor * self.adapter.weight, in_model=own, **how)


def module_changes(module: Module) -> list[WeightChange] | None:
    """Return the changes of one module, or None if the base lacks it; refuse tensors that have no use or do not fit."""
    kinds: dict[str, dict[str, str]] = {}
    peft_type = module.adapter.config.get("peft_type")
    for part, key in module.parts.items():
        kind = next((kind for kind in _KINDS if part.startswith(kind)), "")
        types, _ = _KINDS.get(kind, ("", None))
        if part != "alpha" and (not kind or (peft_type and types and str(peft_type) not in types)):
            raise module.adapter.refusal(UNKNOWN.format(quoted(key)), BY_PEFT)
        if kind:
            kinds.setdefault(kind, {})[part.removesuffix(".weight")] = key
    if module.key not in module.base and kinds.keys() != {"copy"}:
        return None
    return [change for kind, keys in kinds.items() for change in _KINDS[kind][1](module, keys)]


def _copies(module: Module, keys: Keys) -> Iterator[WeightChange]:
    """Yield the replacements of tensors that were trained as a whole."""
    adapter, base = module.adapter, module.base
    for part, key in keys.items():
        # The part of a weight is "copy", because the end ".weight" is removed.
        target = f"{module.place}.{part.partition('.')[2] or 'weight'}".removeprefix(".")
        if target not in base and target.endswith(".bias"):
            others = (name for name in adapter.tensors if name.endswith(".bias") and name != key and name in base)
            if any(adapter.stored(key).equals(adapter.stored(name)) for name in others):
                continue  # the model ties it to one that the base holds
        module.fit(key, module.shape(key), target)
        yield target, AdapterStep("copy", (adapter.stored(key),))


def _lora(module: Module, keys: Keys) -> Iterator[WeightChange]:
    """Yield the change by a product of two matrices, perhaps with DoRA's magnitudes or AdaLoRA's singular values."""
    adapter, config = module.adapter, module.adapter.config
    embedding = any("embedding" in part for part in keys)
    adaptive = config.get("peft_type") == "ADALORA"
    third = {part: form for part, form in _FORMS["third"].items() if part in keys}
    forms = {**_FORMS["embedding" if embedding else "lora"], **third}
    matrices = {part: key for part, key in keys.items() if part != "lora_B.bias"}
    factor = 1.0 if adaptive else adapter.product_scale(module.name, module.parts)
    if matrices:
        if adaptive is not ("lora_E" in third):
            raise adapter.refusal(f"{quoted(module.name)} needs lora_E with AdaLoRA, and cannot have it otherwise")
        size = module.sizes(matrices, forms)
        shape = (size["o"], size["i"], *size.get("k", ()))
        _, first, *more = tensors = [keys[part] for part in forms]
        transposed = len(shape) == 2 and (embedding or adapter.is_set("fan_in_fan_out"))
        module.fit(first, shape[::-1] if transposed else shape)
        if prod(size.get("m", (size["o"],))) != size["o"]:
            raise module.unfit(more[0], f"{size['o']:,} elements are needed")
        dora = "lora_magnitude_vector" in third
        if config.get("use_dora", dora) is not dora:  # PEFT would ignore the vector
            what = f"{'a' if dora else 'no'} lora_magnitude_vector"
            raise adapter.refusal(f"use_dora is {'not ' * dora}set, and {quoted(module.name)} has {what}")
        if adaptive:
            initial = adapter.number(config.get("init_r", 12), "init_r")
            alpha = adapter.number(config.get("lora_alpha", 8), "lora_alpha")
            factor = alpha if alpha > 0 else initial
            yield module.change("adalora", tensors, factor, transposed=transposed, rank=int(initial))
        else:
            yield module.change("product", tensors, factor, transposed=transposed, round_first=embedding)
    if bias := keys.get("lora_B.bias"):
        target = f"{module.place}.bias"
        if target not in module.base:
            raise adapter.refusal(f"it changes the bias of {quoted(module.name)}, which has none in the base")
        module.fit(bias, module.shape(bias), target)
        yield target, module.change("sum", (bias,), factor)[1]


def _loha(module: Module, keys: Keys) -> Iterator[WeightChange]:
    """Yield the change of LoHa: (w1_a @ w1_b) * (w2_a @ w2_b), or the same with a core for the kernel (t1, t2)."""
    with_core = "hada_t1" in keys or "hada_t2" in keys
    forms = _FORMS["hada with cores" if with_core else "hada"]
    size, own = module.sizes(keys, forms), module.own
    module.adapter.check_rank(keys["hada_w1_b"], size["r"])
    shape: Shape = (size["o"], size["i"], *size.get("k", ()))
    # One row for each output, as a matrix; a Conv1d has a kernel with a second side of 1.
    matrix = own and shape in ((own[0], prod(own[1:])), (*own, 1) if with_core else own)
    module.fit(keys["hada_w1_a"], own if matrix else shape)
    factor = module.adapter.scale(module.name, size["r"], "alpha")
    yield module.change("hadamard", (keys[part] for part in forms), factor)


def _lokr(module: Module, keys: Keys) -> Iterator[WeightChange]:
    """Yield the change of LoKr: the Kronecker product of two matrices, which may be products themselves."""
    adapter, own = module.adapter, module.own
    found: list[dict[str, str]] = [
        next((forms for forms in _FORMS[name] if forms.keys() <= keys.keys()), {})
        for name in ("first lokr", "second lokr")
    ]
    first, second = found
    if not (first and second):
        raise adapter.refusal(f"{quoted(next(iter(keys.values())))} and its partners are not the two factors of LoKr")
    size = module.sizes(keys, {**first, **second})
    rank = adapter.by_pattern(module.name, "rank_pattern", adapter.config.get("r", 8))
    key = keys[next(iter(second))]
    if type(rank) is not int or size.get("r", rank) != rank:
        raise adapter.refusal(f"{quoted(key)} has the rank {size.get('r')}, and {CONFIG} says {str(rank)[:80]}")
    rows, columns, inner = size["a"] * size["c"], size["b"] * size["d"], size.get("k", ())
    shape, kernel = (rows, columns, *inner), own[2:]
    fits = len(own) > 1 and own[0] == rows and prod(own[1:]) == columns * prod(inner)
    if fits and own[1] % max(size["b"], 1) == 0 and size.get("k", kernel) in (kernel, (*kernel, 1)):
        shape = own
    if len(kernel) == 1 and "lokr_w2" in keys:
        raise adapter.refusal(f"{quoted(key)} changes a Conv1d, which is not supported", BY_PEFT)
    module.fit(keys[next(iter(first))], shape)
    tensors = (keys[part] for part in (*first, *second))
    yield module.change("kronecker", tensors, adapter.scale(module.name, rank, "alpha"), rank=len(first))


def _vera(module: Module, keys: Keys) -> Iterator[WeightChange]:
    """Yield the change of VeRA: the product of parts of two shared matrices, whose rows are scaled."""
    adapter = module.adapter
    if not adapter.is_set("save_projection") or not adapter.tensors.keys() >= set(PROJECTIONS):
        raise adapter.refusal("it lacks the random matrices that its modules share (save_projection is false)", BY_PEFT)
    every = {**keys, "vera_A": PROJECTIONS[0], "vera_B": PROJECTIONS[1]}
    size = module.sizes(every, _FORMS["vera"])
    rank, out, inner = size["r"], size["o"], size["w"]
    if size["m"] < out:
        raise adapter.refusal(f"{quoted(keys['vera_lambda_b'])} does not fit the shared matrices")
    adapter.check_rank(PROJECTIONS[0], rank)
    transposed = adapter.is_set("fan_in_fan_out")
    if len(module.own) == 2:
        inner = min(inner, module.own[0 if transposed else 1])
    module.fit(keys["vera_lambda_b"], (inner, out) if transposed else (out, inner))
    b, a, *vectors = (adapter.stored(every[part]) for part in _FORMS["vera"])
    a, b = a._replace(view=a.view._replace(shape=(rank, inner))), b._replace(view=b.view._replace(shape=(out, rank)))
    yield module.key, AdapterStep("vera", (b, a, *vectors), adapter.weight, transposed)


def _boft(module: Module, keys: Keys) -> Iterator[WeightChange]:
    """Yield the change of BOFT: one block-diagonal rotation (more only merge on a GPU), and a scale for each row."""
    config, own = module.adapter.config, module.own
    size = module.sizes(keys, _FORMS["boft"])
    rotations, scales = (keys[part] for part in _FORMS["boft"])
    blocks, side = size["n"], size["s"]
    says = config.get("boft_block_size", 4), config.get("boft_block_num", 0)
    if says not in ((side, 0), (0, blocks)):
        raise module.unfit(rotations, f"{CONFIG} gives boft_block_size {says[0]} and boft_block_num {says[1]}")
    if size["f"] != 1:
        raise module.unfit(rotations, "only 1 butterfly factor is supported")
    _fit_columns(module, rotations, blocks * side)
    rows = (own[0], 1) if len(own) == 2 else (1, own[0])
    if module.shape(scales) != rows:
        raise module.unfit(scales, f"the weight needs {shape_text(rows)}")
    yield module.change("butterfly", (rotations, scales))


def _oft(module: Module, keys: Keys) -> Iterator[WeightChange]:
    """Yield the change of OFT: one block-diagonal rotation, stored as the upper triangle of each block."""
    adapter, config = module.adapter, module.adapter.config
    size = module.sizes(keys, {"oft_R": "n t"})
    (key,), blocks, shared = keys.values(), size["n"], adapter.is_set("block_share")
    side = (1 + isqrt(1 + 8 * size["t"])) // 2
    if side * (side - 1) != 2 * size["t"] or (blocks > 1 and shared):
        raise module.unfit(key, "not the shape of OFT rotations")
    series, terms = config.get("use_cayley_neumann"), config.get("num_cayley_neumann_terms", 5)
    version = re.match(r"0\.(\d{1,4})\.|[1-9]", str(config.get("peft_version")))
    is_new = version is not None and int(version[1] or _SERIES_CHANGED) >= _SERIES_CHANGED
    known = type(series) is bool and type(terms) is int and 1 <= terms <= _MOST_TERMS
    if not known or (series and not is_new) or config.get("coft"):
        message = f"{CONFIG} has a rotation of OFT that is not supported: coft, or one that PEFT 0.{_SERIES_CHANGED} "
        raise adapter.refusal(message + "and later do not have", "merge it with the PEFT that trained it")
    _fit_columns(module, key, prod(module.own[1:]) // max(side, 1) * side if shared else blocks * side)
    yield module.change("rotation", (key,), rank=terms if series else 0)


def _fit_columns(module: Module, key: str, columns: int) -> None:
    """Raise RefusedError if a weight has another number of columns, or is of a layer that PEFT does not rotate."""
    own = module.own
    if len(own) not in (2, 4) or own[2:3] != own[3:]:
        message = f"{quoted(module.key)} of {module.path} is {shape_text(own)}: PEFT rotates only "
        raise module.adapter.refusal(message + "linear layers and convolutions with square kernels")
    if prod(own[1:]) != columns:
        module.fit(key, (own[0], columns))


def _ia3(module: Module, keys: Keys) -> Iterator[WeightChange]:
    """Yield the changes by a factor of IA3: of the weight, and of the bias unless the factor is for the input."""
    module.sizes(keys, {"ia3_l": "x y"})
    (key,), bias = keys.values(), f"{module.place}.bias"
    shape = module.shape(key)
    if 1 not in shape:
        raise module.unfit(key, "only IA3 of linear layers can be merged")
    forward, transposed = shape[0] == 1, module.adapter.is_set("fan_in_fan_out")
    sizes = module.own[::-1] if transposed else module.own
    if len(sizes) != 2 or sizes[forward] != shape[forward]:
        module.fit(key, shape[::-1] if transposed else shape)
    change = module.change("scale", (key,), transposed=transposed)
    yield change
    if not forward and bias in module.base:
        module.fit(key, shape[:1], bias)
        yield bias, change[1]._replace(transposed=False)


def _token_rows(module: Module, keys: Keys) -> Iterator[WeightChange]:
    size = module.sizes(keys, {"trainable_tokens_delta": "n d"})
    (key,), adapter, own = keys.values(), module.adapter, module.own
    given = adapter.config.get("trainable_token_indices") or adapter.config.get("token_indices")
    if isinstance(given, dict):
        given = next((rows for name, rows in given.items() if f".{module.name}".endswith(f".{name}")), None)
    rows = given if isinstance(given, list) and all(type(row) is int for row in given) else []
    if len(rows) != size["n"]:
        raise module.unfit(key, f"{CONFIG} lists {pluralize(len(rows), 'token')} for it")
    module.fit(key, (*own[:1], size["d"]))
    if outside := [row for row in rows if not 0 <= row < own[0]]:
        message = f"it was trained for token {max(outside):,}, and the base has {own[0]:,}"
        raise adapter.refusal(message, "resize the vocabulary of the base first")
    yield module.change("rows", (key,), rows=tuple(rows))


#: By the start of a part: the types of adapters that have it ("" for any), and the function for its changes.
_KINDS: Final[Mapping[str, tuple[str, Callable[[Module, Keys], Iterator[WeightChange]]]]] = {
    "copy": ("", _copies),
    "lora_": ("LORA, ADALORA", _lora),
    "hada_": ("LOHA", _loha),
    "lokr_": ("LOKR", _lokr),
    "vera_": ("VERA", _vera),
    "boft_": ("BOFT", _boft),
    "oft_R": ("OFT", _oft),
    "ia3_l": ("IA3", _ia3),
    "trainable_tokens_delta": ("", _token_rows),
}
