"""Give a LoRA the names and the layout that another program reads, without its base model.

A name has three parts, and each is mapped by itself: whose tensor it is, the module, and the part of the change. The
values move unchanged. They are computed only where a program fuses modules that another one has apart, and where the
target has no place for alpha: then ``alpha / rank`` becomes part of both matrices, as diffusers does it.

Sources: diffusers (``loaders/lora_conversion_utils.py``, ``utils/state_dict_utils.py``), sd-scripts
(``networks/convert_flux_lora.py``), musubi-tuner (``convert_lora.py``), PEFT (``utils/save_and_load.py``), ComfyUI
(``comfy/lora.py``, ``comfy/weight_adapter``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from math import frexp, prod
from typing import Any, Final

from ..base.dtypes import BY_NAME
from ..base.errors import CkptoolError, TargetError, adding_path
from ..base.records import NamedTuple
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint, Target
from ..checkpoint.selection import only_one, selected
from ..files.archives import parsed_object, read_object
from ..files.sources import Computed
from ..formats.names.hf import ADAPTER_CONFIG
from ..formats.opening import takes_path
from ..formats.recipes.loras import families
from ..pickles.nodes import Ref
from ..values.matrices import Block, pasted
from ..values.numeric import ROUNDED, to_numbers
from ..values.torch.adapters import StoredTensor
from .adapter_names import PEFT_PREFIX, Modules
from .adapter_settings import (
    ALPHAS,
    BY_PEFT,
    RANKS,
    Adapter,
    adapter_config,
    base_in_header,
    check_product,
    check_rank,
    check_settings,
    check_tensors,
    settings_in_header,
)
from .adapters import product_scale
from .lora_modules import DOWN, LAYOUTS, UP, LoraModule, Out, Renaming, modules_of
from .model_config import LOOKUP
from .ranks import STALE, of_peft, rank_settings
from .recompute import Recomputation, tensors_of

_MID: Final = "lora_mid.weight"
_BIAS: Final = "lora_B.bias"
_NORMS: Final = "lora_magnitude_vector.weight"
#: Parts that are rows of the weight or the bias, and move with them.
_ROWS: Final = (UP, _BIAS, _NORMS, "diff", "diff_b")
#: The names of parts in kohya's layout, and in that of PEFT and diffusers.
_KOHYA: Final = {
    DOWN: "lora_down.weight",
    UP: "lora_up.weight",
    _MID: "lora_mid.weight",
    _BIAS: "diff_b",
    _NORMS: "dora_scale",
}
_PEFT: Final = {DOWN: DOWN, UP: UP, _BIAS: _BIAS, _NORMS: "lora_magnitude_vector"}
#: Parts that only PEFT has: embeddings, and modules that were trained as a whole.
_PEFT_ALONE: Final = {
    **{name: name for name in ("lora_embedding_A", "lora_embedding_B")},
    **{"copy.weight": "weight", "copy.bias": "bias"},
}


class _Part(NamedTuple):
    """A tensor of the output: its blocks and its shape."""

    blocks: tuple[Block, ...]
    shape: tuple[int, ...]


class _Change(NamedTuple):
    """The parts of a module of the output, the factor of its product, and what the target cannot hold."""

    parts: Mapping[str, _Part]
    scale: float
    alpha: str = ""


@takes_path
def convert_lora(
    checkpoint: Checkpoint,
    layout: str,
    *,
    model: str | None = None,
    key: str | None = None,
    config: str | Mapping[str, Any] | None = None,
    allow_loss: Collection[str] = (),
) -> Checkpoint:
    """Give a LoRA the layout of another program: "kohya", "comfyui", "diffusers" or "peft".

    ``layout`` may end with the family of the base model, as in "kohya:sdxl", if the names fit several. ``model`` is one
    of the models that the file changes, such as "unet": PEFT has a folder for each. ``config`` is PEFT's
    ``adapter_config.json`` for a file without one beside it, or its content. ``allow_loss`` with "entries" leaves out
    what the layout has no place for. Raise RefusedError if the modules are not known, or something would be lost;
    TargetError for an unknown layout.

    >>> ckptool.convert_lora("adapter", "kohya").changes[0].words
    "1 module in the layout of kohya's sd-scripts"
    """
    lossy = "entries" in allow_loss or "all" in allow_loss
    return _Conversion(checkpoint, layout, key, config, lossy).done(model)


def lora_models(checkpoint: Checkpoint, layout: str, **how: Any) -> list[str]:
    """Return the models that get a folder each in the layout; none for a single file."""
    if not layout.removeprefix("lora:").startswith("peft"):
        return []
    return _Conversion(checkpoint, layout, how.get("key"), how.get("config"), True).names.models


def possible_layouts(checkpoint: Checkpoint) -> list[str]:
    """Return the layouts that a LoRA can be given as it is, without the one that it has."""
    found = []
    for layout in LAYOUTS:
        with suppress(CkptoolError):
            edited = convert_lora(checkpoint, layout)
            old, new = ({entry.key for entry in each.survey.tensors} for each in (checkpoint, edited))
            found += [layout] if old != new else []
    return found


class _Conversion:
    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: str,
        key: str | None,
        config: str | Mapping[str, Any] | None,
        lossy: bool,
    ) -> None:
        name, _, family = layout.removeprefix("lora:").partition(":")
        if name not in LAYOUTS or (family and family not in families()):
            kinds = [*LAYOUTS] if name not in LAYOUTS else [f"{name}:{each}" for each in families()]
            raise TargetError(f"{layout!r} is not a layout of LoRAs", next=f"one of {join_limited(kinds, most=20)}")
        self.work = Recomputation(checkpoint)
        self.layout, self.lossy = name, lossy
        self.path = checkpoint.path
        self.state_dict = only_one(checkpoint, selected(checkpoint, key))
        nodes = self.work.checkpoint.graph.nodes
        self.refs = {str(nodes[name]): ref for name, ref in self.state_dict.items}
        given = read_object(config) if isinstance(config, str) else config
        header = parsed_object(checkpoint.metadata.get(ADAPTER_CONFIG, ""))
        self.config = dict(given or header or adapter_config(checkpoint) or {})
        tensors = tensors_of(self.work.checkpoint, self.state_dict)
        self.adapter = Adapter(self.work.checkpoint, self.config, tensors, of_pipeline=True)
        check_tensors(self.adapter)
        with adding_path(self.path):
            self.modules = modules_of(self.refs.keys())
        if not self.config and any(key.startswith(PEFT_PREFIX) for key in self.refs):
            what = f"there is no {ADAPTER_CONFIG} beside it, and without lora_alpha the scale is not known"
            raise self.adapter.refusal(what, "give the file: `--config adapter_config.json`")
        check_settings(self.adapter)
        kind = self.config.get("peft_type", "LORA")
        if name != "peft" and (kind != "LORA" or self.adapter.has_parameters):
            what = "one of experts" if kind == "LORA" else str(kind)[:40]
            raise self.adapter.refusal(f"only LoRA has other layouts, and it is {what}", BY_PEFT)
        for module in self.modules:
            if DOWN in module.parts:
                check_product(self.adapter, module.parts[DOWN], module.parts[UP])
        with adding_path(self.path):
            self.names = Renaming(self.modules, name, family, lambda key: tensors[key].shape)
        self.family, self.outs, self.notes = self.names.family, self.names.outs, self.names.notes
        self.lost: list[str] = []

    # -- values

    def _stored(self, key: str) -> StoredTensor:
        return self.adapter.stored(key)

    def _whole(self, key: str, factor: float = 1.0) -> _Part:
        stored, shape = self._stored(key), self.adapter.tensors[key].shape
        rows = stored.view.shape[0]
        wide = prod(shape) // max(rows, 1)
        return _Part((Block(stored, 0, rows, 0, wide, factor=factor),), shape)

    def _rows(self, key: str, begin: int, count: int, row: int = 0) -> Block:
        stored = self._stored(key)
        return Block(stored, begin, count, 0, stored.view.numel // max(stored.view.shape[0], 1), row)

    def _scale(self, module: LoraModule) -> float:
        if DOWN not in module.parts:
            return 1.0
        alpha, rank = module.parts.get("alpha", ""), self.adapter.tensors[module.parts[DOWN]].shape[0]
        model = Modules("diffusers", module.label, {}, {})
        own = self.adapter._replace(
            config=settings_in_header(self.adapter.checkpoint, model) if module.label else self.config
        )
        if not alpha and not own.config:  # every program that reads it takes the rank, whatever the header says
            return 1.0
        if not alpha:
            check_rank(own, module.parts[DOWN], rank)
        return product_scale(own, module.name, module.parts, alpha)

    def _change(self, out: Out) -> _Change:
        first = next(self.modules[at] for at in out.sources if at is not None)
        if out.kind == "join":
            return self._joined(out)
        parts = {part: key for part, key in first.parts.items() if part != "alpha"}
        alpha, scale = first.parts.get("alpha", ""), self._scale(first)
        if out.kind == "padded":
            return _Change(self._padded(out, first), scale)
        if out.kind == "same":
            return _Change({part: self._whole(key) for part, key in parts.items()}, scale, alpha)
        self._refuse_other_parts(first)
        if out.kind == "swap":
            made = {part: self._swapped(key) if part in _ROWS else self._whole(key) for part, key in parts.items()}
            return _Change(made, scale)
        if alpha and self.layout == "diffusers":  # diffusers divides the tensor, and so rounds the scale to its dtype
            scale = self._rounded(scale, self.adapter.tensors[alpha].dtype)
        return _Change(self._split(out, first), scale)

    def _refuse_other_parts(self, module: LoraModule) -> None:
        odd = next((key for part, key in module.parts.items() if part not in (*_ROWS, DOWN, "alpha")), "")
        if odd:
            what = f"{quoted(odd)} cannot be split, joined or turned: only plain matrices can"
            raise self.adapter.refusal(what, "convert it to a layout that has the same modules")

    def _rounded(self, number: float, dtype: str) -> float:
        dtype = dtype if dtype in ROUNDED else "float32"  # the quotient of integers
        (value,) = to_numbers(ROUNDED[dtype](number), dtype)
        return float(complex(value).real)

    def _padded(self, out: Out, module: LoraModule) -> dict[str, _Part]:
        """Return the parts of a module with zeros for its last rows: ``out.at`` of its shares are there."""
        self._refuse_other_parts(module)
        made = {part: self._whole(key) for part, key in module.parts.items() if part != "alpha"}
        if odd := next((part for part in (_NORMS, "diff") if part in made), ""):
            raise self.adapter.refusal(f"{quoted(module.parts[odd])} is only a part of the one that the layout has")
        for part in made.keys() & {*_ROWS}:
            shape = made[part].shape
            _, one = self._share(module.parts[part], shape[0], Out("", "", "", (), out.shares[: out.at]))
            made[part] = made[part]._replace(shape=(one // out.shares[0] * sum(out.shares), *shape[1:]))
        return made

    def _swapped(self, key: str) -> _Part:
        shape = self._stored(key).view.shape
        half, odd = divmod(shape[0], 2)
        if odd:
            raise self.adapter.refusal(f"{quoted(key)} has {shape[0]:,} rows, and its halves change places")
        return _Part((self._rows(key, half, half), self._rows(key, 0, half, half)), shape)

    def _split(self, out: Out, module: LoraModule) -> dict[str, _Part]:
        made: dict[str, _Part] = {}
        number = len(out.shares)
        for part, key in module.parts.items():
            if part not in _ROWS:
                continue
            shape = self._stored(key).view.shape
            begin, count = self._share(key, shape[0], out)
            made[part] = _Part((self._rows(key, begin, count),), (count, *shape[1:]))
        if DOWN in module.parts:
            down, up = module.parts[DOWN], module.parts[UP]
            shape = self.adapter.tensors[down].shape
            rank, odd = divmod(shape[0], number)
            if odd or not self._is_blockwise(up, out):
                made[DOWN] = self._whole(down)
            else:
                made[DOWN] = _Part((self._rows(down, out.at * rank, rank),), (rank, *shape[1:]))
                (block,) = made[UP].blocks
                block = block._replace(first_column=out.at * rank, columns=rank)
                made[UP] = _Part((block,), (block.rows, rank, *self.adapter.tensors[up].shape[2:]))
        return made

    def _share(self, key: str, rows: int, out: Out) -> tuple[int, int]:
        """Return the first row and the number of rows of a part."""
        one, odd = divmod(rows, sum(out.shares))
        if odd:
            what = f"{quoted(key)} has {pluralize(rows, 'row')}, and {sum(out.shares)} equal parts are needed"
            raise self.adapter.refusal(what)
        return one * sum(out.shares[: out.at]), one * out.shares[out.at]

    def _is_blockwise(self, up: str, out: Out) -> bool:
        """Return whether all of a matrix outside of its diagonal blocks is zero."""
        stored, shape = self._stored(up), self.adapter.tensors[up].shape
        view, wide = stored.view, shape[1] // len(out.shares)
        for at in range(len(out.shares)):
            begin, count = self._share(up, shape[0], out._replace(at=at))
            for first, last in ((0, at * wide), ((at + 1) * wide, shape[1])):
                start = view.offset + begin * view.stride[0] + first * view.stride[1]
                outside = view._replace(shape=(count, last - first, *view.shape[2:]), offset=start)
                if last > first and not _is_zero(stored._replace(view=outside)):
                    return False
        return True

    def _joined(self, out: Out) -> _Change:
        """Make one module of several: down one below the other, up block-diagonal with zeros."""
        parts = [None if at is None else self.modules[at] for at in out.sources]
        present = [(number, module) for number, module in enumerate(parts) if module is not None]
        for _, module in present:
            self._refuse_other_parts(module)
        first_number, first = present[0]
        scales = {number: self._scale(module) for number, module in present}
        made: dict[str, _Part] = {}
        kinds = list(dict.fromkeys(part for _, module in present for part in module.parts if part in (*_ROWS, DOWN)))
        same = len({*scales.values()}) == 1
        rows = self._heights(out, present)
        total = sum(rows)
        for part in kinds:
            keys = {number: module.parts[part] for number, module in present if part in module.parts}
            if part in (UP, DOWN):
                continue
            if part == _NORMS and len(keys) < len(parts):
                raise self.adapter.refusal(f"{quoted(next(iter(keys.values())))} is DoRA, and its neighbours are not")
            shape = self._stored(next(iter(keys.values()))).view.shape
            blocks = tuple(self._rows(key, 0, rows[n], sum(rows[:n])) for n, key in keys.items())
            made[part] = _Part(blocks, (total, *shape[1:]))
        if DOWN not in first.parts:
            return _Change(made, 1.0)
        downs = {number: module.parts[DOWN] for number, module in present if DOWN in module.parts}
        ups = {number: module.parts[UP] for number, module in present if UP in module.parts}
        shape, high = self.adapter.tensors[downs[first_number]].shape, self.adapter.tensors[ups[first_number]].shape
        stored = self._stored(downs[first_number])
        if same and all(stored.equals(self._stored(key)) for key in downs.values()):
            made[DOWN] = self._whole(downs[first_number])
            blocks = tuple(self._rows(key, 0, rows[n], sum(rows[:n])) for n, key in ups.items())
            made[UP] = _Part(blocks, (total, shape[0], *high[2:]))
            return _Change(made, scales[first_number])
        ranks = {number: self.adapter.tensors[key].shape[0] for number, key in downs.items()}
        down_blocks, up_blocks, rank = list[Block](), list[Block](), 0
        for number, key in downs.items():
            down_factor, up_factor = (1.0, 1.0) if same else _halves(scales[number])
            block = self._rows(key, 0, ranks[number], rank)
            down_blocks.append(block._replace(factor=down_factor))
            block = self._rows(ups[number], 0, rows[number], sum(rows[:number]))
            up_blocks.append(block._replace(column=rank, factor=up_factor))
            rank += ranks[number]
        made[DOWN] = _Part(tuple(down_blocks), (rank, *shape[1:]))
        made[UP] = _Part(tuple(up_blocks), (total, rank, *high[2:]))
        return _Change(made, scales[first_number] if same else 1.0)

    def _heights(self, out: Out, present: Sequence[tuple[int, LoraModule]]) -> list[int]:
        """Return the rows of each part of a joined module; the others say how many a missing part has."""
        known = {}
        for number, module in present:
            key = next(module.parts[part] for part in _ROWS if part in module.parts)
            known[number] = self._stored(key).view.shape[0]
        number, rows = next(iter(known.items()))
        return [known.get(at, rows * share // out.shares[number]) for at, share in enumerate(out.shares)]

    # -- the output

    def done(self, model: str | None) -> Checkpoint:
        """Return the adapter in its new layout."""
        if self.layout == "peft" and len(self.names.models) > 1:
            if model is None:
                what = f"it changes several models, and PEFT has a folder for each: {join_limited(self.names.models)}"
                way = f"`ckptool lora convert` writes all of them with -o; in Python, model={self.names.models[0]!r}"
                raise TargetError(what, path=self.path, next=way)
            if model not in self.names.models:
                raise TargetError(f"it does not change {model!r}", path=self.path, next=join_limited(self.names.models))
            self.outs = [out for out in self.outs if out.model == model]
        items: list[tuple[str, Ref]] = []
        settings: dict[str, tuple[float, int]] = {}
        rounded = written = 0
        for out in self.outs:
            change = self._change(out)
            made, is_rounded = self._written(out, change)
            rounded += is_rounded
            written += bool(made)
            items += made
            if made and DOWN in change.parts:
                settings[out.name] = change.scale, change.parts[DOWN].shape[0]
        self._refuse_lost(rest=bool(items))
        if not items:
            raise self.adapter.refusal("it changes nothing: all of its values are zero")
        old = self.state_dict.items[0][0]
        named = [(self.work.editor.text(old, key), ref) for key, ref in items]
        self.work.editor.refill(self.state_dict.ref, named)
        folded = f"alpha / rank is no power of 2 in {pluralize(rounded, 'module')}: their values are rounded once"
        notes = [*self.notes, *([folded] if rounded else [])]
        return self._described(notes, settings, items, written)

    def _described(
        self,
        notes: list[str],
        settings: Mapping[str, tuple[float, int]],
        items: Sequence[tuple[str, Ref]],
        written: int,
    ) -> Checkpoint:
        what = f"{pluralize(written, 'module')} in the layout of {LAYOUTS[self.layout]}"
        what = f"LoRA of {self.names.base}: {what}" if self.names.base else what
        if self.layout == "peft" and not self.config:
            notes.append(f"{ADAPTER_CONFIG} does not say the base model and the dropout: the file does not record them")
        if self.layout == "diffusers" and self.family is not None and self.family.model == "unet":
            notes.append("ComfyUI does not load the attention under these names; it and diffusers load lora:kohya")
        if any("magnitude" in key or "dora_scale" in key for key, _ in items):
            notes.append("DoRA: ComfyUI and PEFT do not divide by the same norm, so its effect may differ")
        edited = self.work.done([Change("lora convert", "", written, 0, what, tuple(notes))])
        # Without alpha, the header must not say one.
        untrue = (*STALE, ADAPTER_CONFIG, *((*ALPHAS, *RANKS) if self.layout == "diffusers" else ()))
        texts = {name: text for name, text in edited.metadata.items() if name not in untrue}
        target = Target("safetensors", self.state_dict.path, "", {"format": "pt", **texts})
        if self.layout != "peft":
            return edited.replace(texts=target.metadata, target=target)
        edited = of_peft(edited, self._settings(settings, items), {})
        return edited.replace(target=edited.target and edited.target._replace(key=self.state_dict.path))

    def _refuse_lost(self, *, rest: bool) -> None:
        if not self.lost:
            return
        what = f"{LAYOUTS[self.layout]} has no place for {pluralize(len(self.lost), 'tensor')}"
        what += f": {join_limited([quoted(key) for key in self.lost], most=3)}"
        if not (self.lossy and rest):
            raise self.adapter.refusal(what, "`--allow-loss entries` leaves them out" if rest else "")
        self.notes.append(f"left out: {join_limited([quoted(key) for key in self.lost], most=6)}")

    def _written(self, out: Out, change: _Change) -> tuple[list[tuple[str, Ref]], bool]:
        """Return the tensors of a module under their new names, and whether values were rounded."""
        prefix, parts, scale = self.names.prefix(out), dict(change.parts), change.scale
        sources = [self.modules[at] for at in out.sources if at is not None]
        keys = [key for module in sources for part, key in module.parts.items() if part != "alpha"]
        # PEFT and diffusers have other names and the transpose for a table; lora_mid is a factor of the product.
        table = out.model not in ("unet", "transformer") and LOOKUP.search(out.name)
        unfit = self.layout in ("peft", "diffusers") and DOWN in parts and (table or _MID in parts)
        if not prefix or unfit:
            self.lost += () if all(map(self._is_nothing, sources)) else keys
            return [], False
        name = prefix + (out.name.replace(".", "_") if self.layout == "kohya" else out.name)
        kohya = self.layout in ("kohya", "comfyui")
        spelled: Mapping[str, str] = _KOHYA if kohya else {**_PEFT, **(_PEFT_ALONE if self.layout == "peft" else {})}
        if self.layout == "comfyui" and _MID not in parts:
            spelled = {**_KOHYA, DOWN: DOWN, UP: UP}
        factors = self._factors(parts, scale)
        if not kohya and "diff_b" in parts and DOWN in parts:
            parts[_BIAS] = parts.pop("diff_b")
        for part in [part for part in parts if not self._holds(part, parts, spelled)]:
            own = [module.parts[part] for module in sources if part in module.parts]
            if not (part.startswith("diff") and all(_is_zero(self._stored(key)) for key in own)):
                self.lost += own  # differences of zero are left over from a training
            del parts[part]
        for part, factor in factors.items():
            parts[part] = _times(parts[part], factor)
        if _NORMS in parts:
            parts[_NORMS] = parts[_NORMS]._replace(shape=self._norm_shape(parts, kohya))
        items = [(f"{name}.{spelled.get(part, part)}", self._tensor(part, each)) for part, each in parts.items()]
        if kohya:
            items += self._alpha(out, name, change, sources)
        return items, not all(map(_is_power, factors.values()))

    def _is_nothing(self, module: LoraModule) -> bool:
        """Return whether a module is left over from a training that did not change it."""
        zero = (part for part in (UP, DOWN) if part in module.parts)
        return {*module.parts} <= {UP, DOWN, "alpha"} and any(_is_zero(self._stored(module.parts[p])) for p in zero)

    def _factors(self, parts: Mapping[str, _Part], scale: float) -> dict[str, float]:
        """Return by which number each part is multiplied: PEFT scales the bias, too, and diffusers has no alpha."""
        if scale == 1 or DOWN not in parts:
            return {}
        factors: dict[str, float] = {}
        if self.layout == "diffusers":
            factors[DOWN], factors[UP] = _halves(scale)
        if _BIAS in parts and self.layout != "peft":
            factors[_BIAS] = scale
        if "diff_b" in parts and self.layout == "peft":
            if _BIAS in parts or not scale:
                raise self.adapter.refusal(f"PEFT cannot hold {quoted(parts['diff_b'].blocks[0].source.name)}")
            factors[_BIAS] = 1 / scale
        return factors

    def _holds(self, part: str, parts: Mapping[str, _Part], spelled: Mapping[str, str]) -> bool:
        """Return whether the layout has a place for a part."""
        if part in _PEFT_ALONE or self.layout in ("peft", "diffusers"):
            shape = parts[part].shape
            by_column = part == _NORMS and len(shape) == 2 and shape[0] == 1 < shape[1]
            return part in spelled and not by_column
        return True

    def _norm_shape(self, parts: Mapping[str, _Part], kohya: bool) -> tuple[int, ...]:
        """Return the shape of DoRA's norms: flat in PEFT, else with as many dimensions as the weight."""
        shape = parts[_NORMS].shape
        if not kohya:
            return (prod(shape),)
        return shape if len(shape) > 1 or DOWN not in parts else (*shape, *(1,) * (len(parts[DOWN].shape) - 1))

    def _alpha(self, out: Out, name: str, change: _Change, sources: Sequence[LoraModule]) -> list[tuple[str, Ref]]:
        """Return the alpha of a module, as it is in the input if nothing about it changed."""
        if (
            out.kind == "same"
            and change.alpha
            and (self.layout == "kohya" or change.scale != 1 or DOWN not in change.parts)
        ):
            return [(f"{name}.alpha", self.refs[change.alpha])]
        if DOWN not in change.parts or (self.layout == "comfyui" and change.scale == 1):
            return []
        rank, dtype = change.parts[DOWN].shape[0], self.adapter.tensors[sources[0].parts[DOWN]].dtype
        value = change.scale * rank
        if dtype not in ROUNDED or self._rounded(value, dtype) != value:
            dtype = "float32"
        data = ROUNDED[dtype](value)
        return [(f"{name}.alpha", self.work.tensor(f"{name}.alpha", BY_NAME[dtype], (), data))]

    def _tensor(self, part: str, made: _Part) -> Ref:
        """Return the tensor for a part: the one of the input if nothing about it changes."""
        first = made.blocks[0]
        key = first.source.name
        old = self.adapter.tensors[key]
        rows, wide = made.shape[0] if made.shape else 1, prod(made.shape[1:])
        if len(made.blocks) == 1 and made.shape == old.shape and first == self._whole(key).blocks[0]:
            return self.refs[key]
        dtype = BY_NAME[old.dtype]
        if odd := next((b for b in made.blocks if b.source.view.dtype != old.dtype), None):
            raise self.adapter.refusal(f"{quoted(key)} and {quoted(odd.source.name)} have different dtypes")
        size = prod(made.shape) * dtype.itemsize
        piece = Computed(size, pasted, (dtype, rows, wide, made.blocks, self.work.width(dtype)))
        return self.work.tensor(f"{key}.{part}", dtype, made.shape, piece, old.location)

    def _settings(self, settings: Mapping[str, tuple[float, int]], items: Sequence[tuple[str, Ref]]) -> dict[str, Any]:
        """Return the settings of PEFT: the input's own, if it has PEFT's names."""
        if self.config and not any(module.label for module in self.modules):
            return self.config
        names = [key for key, _ in items]
        return {
            "peft_type": "LORA",
            "task_type": None,
            "base_model_name_or_path": base_in_header(self.work.original) or None,
            "lora_dropout": 0.0,
            "target_modules": sorted(settings),
            **rank_settings(
                {name: rank for name, (_, rank) in settings.items()},
                {name: scale * rank for name, (scale, rank) in settings.items()},
            ),
            "bias": "none",
            "use_dora": any(name.endswith("lora_magnitude_vector") for name in names),
            "lora_bias": any(name.endswith("lora_B.bias") for name in names),
            "fan_in_fan_out": False,
            "inference_mode": True,
        }


def _is_zero(tensor: StoredTensor) -> bool:
    """Return whether all values are zero; -0 is, too."""
    data, size = tensor.values, BY_NAME[tensor.view.dtype].itemsize
    return not (data[size - 1 :: size].translate(None, b"\0\x80") or any(any(data[at::size]) for at in range(size - 1)))


def _halves(scale: float) -> tuple[float, float]:
    """Return the factors of down and up that make a scale, near each other, as diffusers chooses them."""
    down, up = scale, 1.0
    while 0 < down * 2 < up:
        down, up = down * 2, up / 2
    return down, up


def _is_power(scale: float) -> bool:
    """Return whether a number is 0 or a power of 2: a product with it is exact."""
    return abs(frexp(scale)[0]) in (0, 0.5)


def _times(part: _Part, factor: float) -> _Part:
    return part._replace(blocks=tuple(block._replace(factor=block.factor * factor) for block in part.blocks))
