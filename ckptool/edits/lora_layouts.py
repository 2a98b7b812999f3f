"""Give a LoRA the names and the layout that another program reads, without its base model.

A name has three parts, and each is mapped separately: the model, the module, and the part of the change. Values move
unchanged, except where one program fuses modules that another keeps apart, and where the target has no place for alpha:
then ``alpha / rank`` becomes part of both matrices, as in diffusers.

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
from ..base.errors import CkptoolError, RefusedError, TargetError, adding_path
from ..base.records import NamedTuple
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint, Target
from ..checkpoint.selection import only_one, selected
from ..files.archives import read_object
from ..files.sources import Computed
from ..formats.names.hf import ADAPTER_CONFIG
from ..formats.opening import takes_path
from ..formats.recipes.loras import families
from ..pickles.nodes import Ref
from ..values.matrices import Block, pasted
from ..values.numeric import ROUNDED, to_numbers
from ..values.torch.adapters import StoredTensor
from .adapter_names import DOWN, NORMS, PEFT_PREFIX, UP, Parts
from .adapter_settings import (
    ALPHAS,
    BY_PEFT,
    RANKS,
    Adapter,
    adapter_config,
    base_in_header,
    check_product,
    check_settings,
    check_tensors,
    product_scale,
)
from .lora_modules import LAYOUTS, Out, Piece, Renaming
from .model_config import LOOKUP
from .ranks import NEW_SETTINGS, STALE, peft_folder, rank_settings, stated
from .recompute import Recomputation, tensors_of
from .unmerged import inside, merge_step

_MID: Final = "lora_mid.weight"
_BIAS: Final = "lora_B.bias"
#: Parts that are rows of the weight or the bias, and move with them.
_ROWS: Final = (UP, _BIAS, NORMS, "diff", "diff_b")
#: How the layouts spell parts. kohya and ComfyUI keep the names of others; PEFT and diffusers have no place for them.
_KOHYA: Final = {
    **{DOWN: "lora_down.weight", UP: "lora_up.weight", _MID: "lora_mid.weight"},
    **{_BIAS: "diff_b", NORMS: "dora_scale"},
}
_DIFFUSERS: Final = {DOWN: DOWN, UP: UP, _BIAS: _BIAS, NORMS: "lora_magnitude_vector"}
#: Only PEFT has embeddings, single tokens, and modules that were trained as a whole.
_PEFT: Final = {
    **_DIFFUSERS,
    **{name: name for name in ("lora_embedding_A", "lora_embedding_B")},
    **{"copy.weight": "weight", "copy.bias": "bias"},
    "trainable_tokens_delta": "token_adapter.trainable_tokens_delta",
}


class _Part(NamedTuple):
    """A tensor of the output: its blocks and its shape."""

    blocks: tuple[Block, ...]
    shape: tuple[int, ...]


class _Change(NamedTuple):
    """The parts of a module of the output, the factor of its product, and the key of its alpha in the input, or ""."""

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
    """Return the layouts to which a LoRA can be converted without loss, except its own."""
    found = []
    for layout in LAYOUTS:
        with suppress(CkptoolError):
            edited = convert_lora(checkpoint, layout)
            old, new = ({entry.key for entry in each.survey.tensors} for each in (checkpoint, edited))
            found += [layout] if old != new else []
    return found


class _Conversion:
    def __init__(
        self, checkpoint: Checkpoint, layout: str, key: str | None, config: str | Mapping[str, Any] | None, lossy: bool
    ) -> None:
        name, _, family = layout.removeprefix("lora:").partition(":")
        if name not in LAYOUTS or (family and family not in families()):
            kinds = [*LAYOUTS] if name not in LAYOUTS else [f"{name}:{each}" for each in families()]
            raise TargetError(f"{layout!r} is not a layout of LoRAs", next=f"one of {join_limited(kinds, most=20)}")
        self.work = Recomputation(checkpoint)
        self.layout, self.lossy, self.path = name, lossy, checkpoint.path
        self.state_dict = only_one(checkpoint, selected(checkpoint, key))
        nodes = self.work.checkpoint.graph.nodes
        self.refs = {str(nodes[name]): ref for name, ref in self.state_dict.items}
        if found := inside(self.refs):
            what = "it is a model with an adapter inside, not a LoRA"
            raise RefusedError(what, path=self.path, next=merge_step(checkpoint, found, "adapter"))
        given = read_object(config) if isinstance(config, str) else config
        self.config = dict(given or adapter_config(checkpoint) or {})
        tensors = tensors_of(self.work.checkpoint, self.state_dict)
        self.adapter = adapter = Adapter(self.work.checkpoint, self.config, tensors, of_pipeline=True)
        check_tensors(adapter)
        self.models = adapter.modules(to_merge=False)
        if not self.config and any(key.startswith(PEFT_PREFIX) for key in self.refs):
            what = f"there is no {ADAPTER_CONFIG} beside it, and without lora_alpha the scale is not known"
            raise adapter.refusal(what, "give the file: `--config adapter_config.json`")
        check_settings(adapter)
        kind = self.config.get("peft_type", "LORA")
        if kind != "LORA" or (name != "peft" and adapter.has_parameters):
            what = "one of experts" if kind == "LORA" else str(kind)[:40]
            raise adapter.refusal(f"only LoRA has other layouts, and it is {what}", BY_PEFT)
        with adding_path(self.path):
            self.names = Renaming(self.models, name, family, lambda key: tensors[key].shape)
        #: For each module, the adapter with the settings that apply to it.
        self.own = [adapter.of(model) for model in self.models for _ in model.parts]
        self.modules = self.names.modules
        for module in self.modules:
            if DOWN in module.parts:
                check_product(adapter, module.parts[DOWN], module.parts[UP])
        self.outs, self.notes = self.names.outs, self.names.notes
        self.lost: list[str] = []

    # -- values

    def _rows(self, key: str, begin: int = 0, count: int | None = None, row: int = 0) -> Block:
        stored = self.adapter.stored(key)
        rows = stored.view.shape[0]
        return Block(stored, begin, rows if count is None else count, 0, stored.view.numel // max(rows, 1), row)

    def _whole(self, key: str) -> _Part:
        return _Part((self._rows(key),), self.adapter.tensors[key].shape)

    def _scale(self, at: int) -> float:
        parts, own = self.modules[at].parts, self.own[at]
        # Without alpha, every program that reads it takes the rank, whatever the header says.
        unscaled = DOWN not in parts or not ("alpha" in parts or own.config)
        return 1.0 if unscaled else product_scale(own, self.modules[at].name, parts)

    def _change(self, out: Out) -> _Change:
        """Return the parts of a module: its pieces are rows below each other, several products blocks on a diagonal."""
        sources = [at for at in dict.fromkeys(piece.source for piece in out.pieces) if at is not None]
        if out.is_same:
            parts = {part: self._whole(key) for part, key in self.modules[sources[0]].parts.items() if part != "alpha"}
            return _Change(parts, self._scale(sources[0]), self.modules[sources[0]].parts.get("alpha", ""))
        keys = [{} if piece.source is None else self.modules[piece.source].parts for piece in out.pieces]
        for part, key in (item for parts in keys for item in parts.items()):
            if part not in (*_ROWS, DOWN, "alpha"):
                what = f"{quoted(key)} cannot be split, joined or turned: only plain matrices can"
                raise self.adapter.refusal(what, "convert it to a layout that has the same modules")
        rows = self._heights(out, keys)
        made: dict[str, _Part] = {}
        for part in dict.fromkeys(part for parts in keys for part in parts if part in _ROWS):
            own = [(n, parts[part]) for n, parts in enumerate(keys) if part in parts]
            if part == NORMS and len(own) < len(keys):
                raise self.adapter.refusal(f"{quoted(own[0][1])} is DoRA, and its neighbours are not")
            blocks = (self._rows(key, *self._share(key, out.pieces[n]), sum(rows[:n])) for n, key in own)
            made[part] = _Part(tuple(blocks), (sum(rows), *self.adapter.stored(own[0][1]).view.shape[1:]))
        downs = {n: parts[DOWN] for n, parts in enumerate(keys) if DOWN in parts}
        if not downs:
            return _Change(made, 1.0)
        first, *others = dict.fromkeys(downs.values())
        scales = {n: self._scale(at) for n in downs if (at := out.pieces[n].source) is not None}
        scale = next(iter(scales.values()))
        same = len({*scales.values()}) == 1
        shares = out.pieces[0].shares
        rank = self.adapter.tensors[first].shape[0]
        if len(shares) > 1 and len(out.pieces) == 1:
            if self.layout == "diffusers" and "alpha" in keys[0]:
                # diffusers divides the tensor, and so rounds the scale to its dtype.
                _, scale = _rounded(scale, self.adapter.tensors[keys[0]["alpha"]].dtype)
            if rank % len(shares) == 0 and self._is_blockwise(keys[0][UP], shares):
                rank //= len(shares)
                begin = out.pieces[0].at * rank
                made[DOWN] = _Part((self._rows(first, begin, rank),), (rank, *self.adapter.tensors[first].shape[1:]))
                (block,), high = made[UP]
                block = block._replace(first_column=begin, columns=rank)
                made[UP] = _Part((block,), (high[0], rank, *high[2:]))
                return _Change(made, scale)
        if same and all(self.adapter.stored(first).equals(self.adapter.stored(key)) for key in others):
            return _Change({DOWN: self._whole(first), **made}, scale)
        down_blocks, up_blocks, rank = list[Block](), list[Block](), 0
        for (n, key), block in zip(downs.items(), made[UP].blocks):
            factors = (1.0, 1.0) if same else _halves(scales[n])
            down_blocks.append(self._rows(key, row=rank)._replace(factor=factors[0]))
            up_blocks.append(block._replace(column=rank, factor=factors[1]))
            rank += down_blocks[-1].rows
        made[DOWN] = _Part(tuple(down_blocks), (rank, *self.adapter.tensors[first].shape[1:]))
        made[UP] = _Part(tuple(up_blocks), (made[UP].shape[0], rank, *made[UP].shape[2:]))
        return _Change(made, scale if same else 1.0)

    def _share(self, key: str, piece: Piece) -> tuple[int, int]:
        """Return the first row and the number of rows of a piece in a tensor."""
        rows, number = self.adapter.stored(key).view.shape[0], sum(piece.shares)
        if rows % number:
            rows_text = pluralize(rows, "row")
            raise self.adapter.refusal(f"{quoted(key)} has {rows_text}, and {number} equal parts are needed")
        return rows // number * sum(piece.shares[: piece.at]), rows // number * piece.shares[piece.at]

    def _heights(self, out: Out, keys: Sequence[Parts]) -> list[int]:
        """Return the number of rows of each piece; a missing module gets rows of zeros, by its share."""
        known = {}
        for n, (piece, parts) in enumerate(zip(out.pieces, keys)):
            if key := next((parts[part] for part in _ROWS if part in parts), ""):
                known[n] = self._share(key, piece)[1]
        n, rows = next(iter(known.items()))
        one = out.pieces[n].shares[out.pieces[n].at]
        return [known.get(n, rows * sum(piece.shares) // one) for n, piece in enumerate(out.pieces)]

    def _is_blockwise(self, up: str, shares: tuple[int, ...]) -> bool:
        """Return whether all of a matrix outside of its diagonal blocks is zero."""
        stored, columns = self.adapter.stored(up), self.adapter.tensors[up].shape[1]
        view, wide = stored.view, columns // len(shares)
        for at in range(len(shares)):
            begin, count = self._share(up, Piece(None, shares, at))
            for first, last in ((0, at * wide), ((at + 1) * wide, columns)):
                start = view.offset + begin * view.stride[0] + first * view.stride[1]
                outside = view._replace(shape=(count, last - first, *view.shape[2:]), offset=start)
                if last > first and not _is_zero(stored._replace(view=outside)):
                    return False
        return True

    # -- the output

    def done(self, model: str | None) -> Checkpoint:
        """Return the adapter in its new layout."""
        models = self.names.models
        if self.layout == "peft" and len(models) > 1:
            if model not in models:
                what = "it changes several models, and PEFT has a folder for each"
                what = f"{what if model is None else f'it does not change {model!r}'}: {join_limited(models)}"
                way = f"`ckptool lora convert` writes all of them with -o; in Python, model={models[0]!r}"
                raise TargetError(what, path=self.path, next=way)
            self.outs = [out for out in self.outs if out.model == model]
        items: list[tuple[str, Ref]] = []
        numbers: dict[str, tuple[float, int]] = {}
        rounded = written = 0
        for out in self.outs:
            change = self._change(out)
            made, is_rounded = self._written(out, change)
            rounded += is_rounded
            written += bool(made)
            items += made
            if made and DOWN in change.parts:
                numbers[out.name] = change.scale, change.parts[DOWN].shape[0]
        if self.lost:
            which = [quoted(key) for key in self.lost]
            what = f"{LAYOUTS[self.layout]} has no place for {pluralize(len(which), 'tensor')}"
            if not (self.lossy and items):
                step = "`--allow-loss entries` leaves them out" if items else ""
                raise self.adapter.refusal(f"{what}: {join_limited(which, most=3)}", step)
            self.notes.append(f"left out: {join_limited(which, most=6)}")
        if not items:
            raise self.adapter.refusal("it changes nothing: all of its values are zero")
        old = self.state_dict.items[0][0]
        named = [(self.work.editor.text(old, key), ref) for key, ref in items]
        self.work.editor.refill(self.state_dict.ref, named)
        what = f"{pluralize(written, 'module')} in the layout of {LAYOUTS[self.layout]}"
        what = f"LoRA of {self.names.base}: {what}" if self.names.base else what
        family = self.names.family
        undescribed = self.layout == "peft" and not self.config
        unet = self.layout == "diffusers" and family is not None and family.model == "unet"
        dora = any("magnitude" in key or "dora_scale" in key for key, _ in items)
        remarks = {
            f"alpha / rank is no power of 2 in {pluralize(rounded, 'module')}: their values are rounded once": rounded,
            f"{ADAPTER_CONFIG} does not say the base model and the dropout: the file does not record them": undescribed,
            "ComfyUI does not load the attention under these names; it and diffusers load lora:kohya": unet,
            "DoRA: ComfyUI and PEFT do not divide by the same norm, so its effect may differ": dora,
        }
        notes = (*self.notes, *(note for note, true in remarks.items() if true))
        edited = self.work.done([Change("lora convert", "", written, 0, what, notes)])
        ranks = {name: rank for name, (_, rank) in numbers.items()}
        alphas = {name: scale * rank for name, (scale, rank) in numbers.items()}
        # Without alpha, the header must not say one.
        untrue = (*STALE, ADAPTER_CONFIG, *((*ALPHAS, *RANKS) if self.layout == "diffusers" else ()))
        texts = {name: text for name, text in edited.metadata.items() if name not in untrue}
        if not all(out.is_same for out in self.outs):
            texts |= stated(texts, ranks, alphas)
        target = Target("safetensors", self.state_dict.path, "", {"format": "pt", **texts})
        if self.layout != "peft":
            return edited.replace(texts=target.metadata, target=target)
        edited = peft_folder(edited, self._settings(ranks, alphas, items))
        return edited.replace(target=edited.target and edited.target._replace(key=self.state_dict.path))

    def _written(self, out: Out, change: _Change) -> tuple[list[tuple[str, Ref]], bool]:
        """Return the tensors of a module under their new names, and whether values were rounded."""
        name, parts, scale = self.names.title(out), dict(change.parts), change.scale
        sources = [self.modules[piece.source].parts for piece in out.pieces if piece.source is not None]
        kohya = self.layout in ("kohya", "comfyui")
        # PEFT and diffusers have other names and the transpose for a table; lora_mid is a factor of the product.
        table = out.model not in ("unet", "transformer") and LOOKUP.search(out.name)
        if not name or (not kohya and DOWN in parts and (table or _MID in parts)):
            keys = dict.fromkeys(key for own in sources for part, key in own.items() if part != "alpha")
            self.lost += () if all(map(self._is_nothing, sources)) else keys
            return [], False
        spelled: Mapping[str, str] = _KOHYA if kohya else _PEFT if self.layout == "peft" else _DIFFUSERS
        if self.layout == "comfyui" and _MID not in parts:
            spelled = {**_KOHYA, DOWN: DOWN, UP: UP}
        factors = self._factors(parts, scale)
        if not kohya and "diff_b" in parts and DOWN in parts:
            parts[_BIAS] = parts.pop("diff_b")
        for part, (_, shape) in [*parts.items()]:
            by_column = part == NORMS and len(shape) == 2 and shape[0] == 1 < shape[1]
            if (part in spelled and not by_column) or (kohya and part not in _PEFT.keys() - _DIFFUSERS.keys()):
                continue
            keys = dict.fromkeys(own[part] for own in sources if part in own)
            if not (part.startswith("diff") and all(_is_zero(self.adapter.stored(key)) for key in keys)):
                self.lost += keys  # differences of zero are left over from a training
            del parts[part]
        for part, factor in factors.items():
            blocks = (block._replace(factor=block.factor * factor) for block in parts[part].blocks)
            parts[part] = parts[part]._replace(blocks=tuple(blocks))
        if NORMS in parts:  # flat in PEFT, else with as many dimensions as the weight
            shape = parts[NORMS].shape
            ones = len(parts[DOWN].shape) - 1 if len(shape) == 1 and DOWN in parts else 0
            parts[NORMS] = parts[NORMS]._replace(shape=(*shape, *(1,) * ones) if kohya else (prod(shape),))
        items = [(f"{name}.{spelled.get(part, part)}", self._tensor(part, each)) for part, each in parts.items()]
        if kohya and (alpha := self._alpha(f"{name}.alpha", change, sources)):
            items.append((f"{name}.alpha", alpha))
        # A product with 0 or a power of 2 is exact.
        return items, any(abs(frexp(factor)[0]) not in (0, 0.5) for factor in factors.values())

    def _is_nothing(self, parts: Parts) -> bool:
        """Return whether a module is left over from a training that did not change it."""
        zero = (parts[part] for part in (UP, DOWN) if part in parts)
        return {*parts} <= {UP, DOWN, "alpha"} and any(_is_zero(self.adapter.stored(key)) for key in zero)

    def _factors(self, parts: Mapping[str, _Part], scale: float) -> dict[str, float]:
        """Return the factor of each part that changes: PEFT also scales the bias, and diffusers has no alpha."""
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

    def _alpha(self, key: str, change: _Change, sources: Sequence[Parts]) -> Ref | None:
        """Return the alpha of a module, None if it needs none; an unchanged module keeps its tensor."""
        needed = self.layout == "kohya" or change.scale != 1
        if change.alpha and (needed or DOWN not in change.parts):
            return self.refs[change.alpha]
        if DOWN not in change.parts or not needed:
            return None
        value = change.scale * change.parts[DOWN].shape[0]
        dtype = self.adapter.tensors[next(own[DOWN] for own in sources if DOWN in own)].dtype
        data, stored = _rounded(value, dtype)
        if dtype not in ROUNDED or stored != value:
            dtype, (data, _) = "float32", _rounded(value, "float32")
        return self.work.tensor(key, BY_NAME[dtype], (), data)

    def _tensor(self, part: str, made: _Part) -> Ref:
        """Return the tensor for a part: the one of the input if nothing about it changes."""
        key = made.blocks[0].source.name
        old = self.adapter.tensors[key]
        if made == self._whole(key):
            return self.refs[key]
        dtype = BY_NAME[old.dtype]
        if odd := next((block for block in made.blocks if block.source.view.dtype != old.dtype), None):
            raise self.adapter.refusal(f"{quoted(key)} and {quoted(odd.source.name)} have different dtypes")
        rows, wide = made.shape[0] if made.shape else 1, prod(made.shape[1:])
        piece = Computed(rows * wide * dtype.itemsize, pasted, (dtype, rows, wide, made.blocks, self.work.width(dtype)))
        return self.work.tensor(f"{key}.{part}", dtype, made.shape, piece, old.location)

    def _settings(
        self, ranks: Mapping[str, int], alphas: Mapping[str, float], items: Sequence[tuple[str, Ref]]
    ) -> dict[str, Any]:
        """Return the settings of PEFT: the input's own, if it has PEFT's names."""
        if self.config and not any(model.label for model in self.models):
            return self.config
        return {
            **NEW_SETTINGS,
            "base_model_name_or_path": base_in_header(self.work.original) or None,
            "target_modules": sorted(ranks),
            **rank_settings(ranks, alphas),
            "use_dora": any(name.endswith("lora_magnitude_vector") for name, _ in items),
            "lora_bias": any(name.endswith(_BIAS) for name, _ in items),
        }


def _rounded(number: float, dtype: str) -> tuple[bytes, float]:
    """Return an element of a dtype for a number, and the number that it is; float32 for integers."""
    dtype = dtype if dtype in ROUNDED else "float32"
    data = ROUNDED[dtype](number)
    return data, float(complex(to_numbers(data, dtype)[0]).real)


def _is_zero(tensor: StoredTensor) -> bool:
    """Return whether all values are 0 or -0."""
    data, size = tensor.values, BY_NAME[tensor.view.dtype].itemsize
    return not (data[size - 1 :: size].translate(None, b"\0\x80") or any(any(data[at::size]) for at in range(size - 1)))


def _halves(scale: float) -> tuple[float, float]:
    """Return the factors of down and up that make a scale, near each other, as diffusers chooses them."""
    down, up = scale, 1.0
    while 0 < down * 2 < up:
        down, up = down * 2, up / 2
    return down, up
