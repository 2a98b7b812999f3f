"""Give a LoRA the names and the layout that another program reads, without its base model.

A name has three parts, and each is mapped separately: the model, the module, and the part of the change. The base model
is recognised by the names and shapes of the modules. If several fit, each is tried: a user must choose only if the new
names differ. Values move unchanged, except where one program fuses modules that another keeps apart, and where the
target has no place for alpha: then ``alpha / rank`` becomes part of both matrices, as in diffusers.

Sources: diffusers (``loaders/lora_conversion_utils.py``, ``utils/state_dict_utils.py``), sd-scripts
(``networks/convert_flux_lora.py``), musubi-tuner (``convert_lora.py``), PEFT (``utils/save_and_load.py``), ComfyUI
(``comfy/lora.py``, ``comfy/weight_adapter``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from math import frexp, prod
from typing import Any, Final

from ..base.dtypes import BY_NAME
from ..base.errors import CkptoolError, RefusedError, TargetError, adding_path
from ..base.records import NamedTuple
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint, Target
from ..checkpoint.tensors import Tensor
from ..files.archives import read_object
from ..files.sources import Computed
from ..formats.names.hf import ADAPTER_CONFIG
from ..formats.opening import takes_path
from ..formats.recipes.loras import Family, Place, families
from ..pickles.nodes import Ref
from ..values.numeric import ROUNDED, to_numbers
from ..values.torch.adapters import StoredTensor
from .adapter_names import DOWN, MODELS, NORMS, PEFT_PREFIX, TABLE, UP, Modules, Parts, inside
from .adapter_settings import ALPHAS, BY_PEFT, RANKS, Adapter, adapter_config, base_in_header, merge_step
from .matrices import Block, pasted
from .model_config import LOOKUP
from .ranks import NEW_SETTINGS, STALE, peft_folder, rank_settings, stated
from .recompute import Recomputation, named_tensors

#: For each layout, the program that reads it, and how it spells the models and the parts.
_LAYOUTS: Final[Mapping[str, Any]] = TABLE["layouts"]
LAYOUTS: Final[Mapping[str, str]] = {name: layout["reader"] for name, layout in _LAYOUTS.items()}
#: Parts of embeddings, of single tokens, and of modules that were trained as a whole. kohya and ComfyUI keep the names
#: of parts that are not in their tables, except of these; PEFT and diffusers have no place for others.
_ONLY_PEFT: Final = _LAYOUTS["peft"]["parts"].keys() - _LAYOUTS["diffusers"]["parts"].keys()
_MID: Final = "lora_mid.weight"
_BIAS: Final = "lora_B.bias"
#: Parts that are rows of the weight or the bias, and move with them.
_ROWS: Final = (UP, _BIAS, NORMS, "diff", "diff_b")


class SourceRows(NamedTuple):
    """Rows for a new module: the share number ``at`` of a module of the input; zeros if ``source`` is None."""

    source: int | None
    shares: tuple[int, ...] = (1,)
    at: int = 0


class NewModule(NamedTuple):
    """A module of the output: its model, its name, and the rows that it is made of."""

    model: str
    name: str
    rows: tuple[SourceRows, ...]

    @property
    def is_same(self) -> bool:
        """Whether it is a module of the input under another name."""
        return len(self.rows) == len(self.rows[0].shares) == 1


class Renaming:
    """The modules of a LoRA in another ``layout``: ``new``.

    ``family`` belongs to the base model, or is None. ``base`` lists the models with these names. ``wanted`` is the key
    of a family, or "". Raise RefusedError if no family has the modules, or several have them under different names.
    """

    def __init__(self, models: Sequence[Modules], layout: str, wanted: str, tensors: Mapping[str, Tensor]) -> None:
        #: Each module that the LoRA changes: its model, its name as spelled, and the keys of its parts.
        self.modules = [(model, *item) for model in models for item in model.parts.items()]
        self._has_second = any(model.model == "text_encoder_2" for model in models)
        self.layout, self._tensors = layout, tensors
        self.notes: list[str] = []
        self.family, self.base, self.new = self._chosen(wanted)
        #: The models that the output changes.
        self.models = list(dict.fromkeys(new.model for new in self.new))

    def title(self, new: NewModule) -> str:
        """Return the full name of a module of the output; "" if the program has no such model."""
        prefix: str = _LAYOUTS[self.layout]["prefixes"].get(new.model, "")
        return prefix and prefix + (new.name.replace(".", "_") if self.layout == "kohya" else new.name)

    def _chosen(self, wanted: str) -> tuple[Family | None, str, list[NewModule]]:
        """Return the family of the base model, the models with its names, and the modules of the output."""
        # A module without the name of a model may belong to a text encoder.
        is_text = [
            owner.model != "unet" or (not owner.label and self._in_encoder(at) is not None)
            for at, (owner, _, _) in enumerate(self.modules)
        ]
        texts, core = ([at for at, each in enumerate(is_text) if each is which] for which in (True, False))
        known = [families()[wanted]] if wanted else [*families().values()]
        found: dict[tuple[tuple[str, NewModule], ...], tuple[list[Family], list[NewModule]]] = {}
        for family in known if core else ():
            places = self._places(family, core)
            if len(places) == len(core) and (wanted or self._fits(family, places)):
                every = [*self._renamed(places, family), *self._renamed_texts(texts, family)]
                # Different names in dots may be the same without.
                named = tuple((title := self.title(new), new._replace(name="" if title else new.name)) for new in every)
                found.setdefault(named, ([], every))[0].append(family)
        if not found:
            owners = [self.modules[at][0] for at in core]
            labels = {owner.label for owner in owners}
            # An unknown model keeps the names of its modules if the target uses the same ones.
            keeps = labels == {""} or (self.layout in ("peft", "diffusers") and labels <= {"unet", "transformer"})
            if core and (not keeps or any(owner.dotless for owner in owners)):
                raise self._unknown(core, known)
            same_names = (NewModule("model", self.modules[at][1], (SourceRows(at),)) for at in core)
            return None, "", [*same_names, *self._renamed_texts(texts, None)]
        (same, every), *ways = sorted(found.values(), key=lambda way: not way[0][0].is_usual)
        chosen = same[0]
        others = [family for way, _ in ways for family in way]
        if others and not chosen.is_usual:
            keys = [f"{self.layout}:{family.key}" for family in (chosen, *others)]
            what = f"its names fit several models, and {LAYOUTS[self.layout]} call their modules differently"
            raise RefusedError(what, next=f"say which it is: one of {join_limited(keys, most=9)}")
        if others:
            way = f"lora:{self.layout}:{others[0].key}"
            self.notes.append(f"taken for a LoRA of {chosen.name}; for one of {others[0].name}, name it: {way}")
        counts = Counter((self.layout == "peft" and new.model, self.title(new)) for new in every)
        if twice := next((name for (_, name), number in counts.items() if name and number > 1), ""):
            raise RefusedError(f"two of its modules would become {quoted(twice)}")
        return chosen, " or ".join(family.name for family in same), every

    def _fits(self, family: Family, places: Mapping[int, Place]) -> bool:
        if family.model == "text_encoder" or (family.text_encoders == 1 and self._has_second):
            return False
        for at, place in places.items():
            names, parts = place.names(1), self.modules[at][2]
            _, wide = self._sides(parts)
            is_context = ".attn2.to_" in names[0] and names[0].endswith(("to_k", "to_v")) and wide in (768, 1024, 2048)
            if any(map(family.lacks, names)) or (family.context and is_context and wide != family.context):
                return False
        return True

    def _sides(self, parts: Parts) -> tuple[int, int]:
        """Return the rows and the columns of a product of two matrices; 0 without such a matrix."""
        up, down = (self._tensors[parts[part]].shape if part in parts else () for part in (UP, DOWN))
        return up[0] if up else 0, down[-1] if down else 0

    def _places(self, family: Family, which: Sequence[int]) -> dict[int, Place]:
        found = {}
        for at in which:
            owner, name, parts = self.modules[at]
            places = family.places(name, dotless=owner.dotless)
            if not places and family.key == "clip":
                places = family.places(f"text_model{'_' if owner.dotless else '.'}{name}", dotless=owner.dotless)
            if len(places) > 1:  # one of them for a norm with two halves of as many rows as it has columns
                rows, columns = self._sides(parts)
                halves = UP in parts and rows == 2 * columns
                places = [place for place in places if place.rule.swapped is halves] or places
            if places:
                found[at] = places[0]
        return found

    def _in_encoder(self, at: int) -> tuple[str, Place] | None:
        """Return the text encoder that has a module, and its place there, or None."""
        found = ((key, self._places(families()[key], [at]).get(at)) for key in ("clip", "t5"))
        return next(((key, place) for key, place in found if place), None)

    def _renamed(self, places: Mapping[int, Place], family: Family) -> Iterator[NewModule]:
        """Yield the modules of the output for the modules of a model, given their places in its family."""
        side = {"kohya": family.kohya, "comfyui": family.comfyui}.get(self.layout, 1)
        joined: dict[str, list[SourceRows]] = {}
        for at, place in places.items():
            rule, shares, names = place.rule, place.rule.shares, place.names(side)
            rows: tuple[SourceRows, ...] = (SourceRows(at),)
            if side == 0 and rule.one_way:  # this name is only read: write the name of the other rule with this side b
                other = next((each for each in family.places(place.names(1)[0], dotless=False) if each.side), None)
                if other is not None:
                    own, rest = sum(other.rule.shares[: len(rule.b)]), sum(other.rule.shares[len(rule.b) :])
                    rows = (SourceRows(at, (own,)), SourceRows(None, (rest,))) if rest else rows
                    yield NewModule(family.model, other.names(0)[0], rows)
            elif place.side == side:
                yield NewModule(family.model, names[place.at], rows)
            elif len(rule.b) == 1:
                halves = SourceRows(at, (1, 1), 1), SourceRows(at, (1, 1), 0)
                yield NewModule(family.model, names[0], halves if rule.swapped else rows)
            elif side:
                yield from (NewModule(family.model, name, (SourceRows(at, shares, n),)) for n, name in enumerate(names))
            else:
                row = joined.setdefault(names[0], [SourceRows(None, (share,)) for share in shares])
                row[place.at] = SourceRows(at, row[place.at].shares)
        yield from (NewModule(family.model, name, tuple(rows)) for name, rows in joined.items())

    def _renamed_texts(self, which: Sequence[int], family: Family | None) -> Iterator[NewModule]:
        for at in which:
            if (found := self._in_encoder(at)) is None:
                raise self._unknown([at], [*families().values()])
            label = self.modules[at][0].label
            encoder = "text_encoder_3" if found[0] == "t5" else MODELS.get(label, "text_encoder")
            # The only text encoder of a model has no number in kohya's layout.
            alone = family.text_encoders == 1 if family is not None else label != "te1" and not self._has_second
            only = self.layout == "kohya" and encoder == "text_encoder" and alone
            yield NewModule("only text_encoder" if only else encoder, found[1].names(1)[0], (SourceRows(at),))

    def _unknown(self, which: Sequence[int], known: Sequence[Family]) -> RefusedError:
        found = max((self._places(family, which) for family in known), key=len)
        owner, name, _ = self.modules[next((at for at in which if at not in found), which[0])]
        what = f"{known[0].name} has no module" if len(known) == 1 else "no known model has the module"
        what += f" {quoted(name)}{'' if len(known) == 1 or not found else ' beside the others'}"
        if owner.dotless:
            what += ', and which "_" stand for dots is not in the file'
        return RefusedError(what, next="convert it with the program that trained it")


class _Part(NamedTuple):
    """A tensor of the output: its blocks and its shape."""

    blocks: tuple[Block, ...]
    shape: tuple[int, ...]


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
    return _Conversion(checkpoint, layout, key, config).done(model, lossy=lossy)


def lora_models(checkpoint: Checkpoint, layout: str, **how: Any) -> list[str]:
    """Return the models that get a folder each in the layout; none for a single file."""
    if not layout.removeprefix("lora:").startswith("peft"):
        return []
    return _Conversion(checkpoint, layout, how.get("key"), how.get("config")).names.models


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
        self, checkpoint: Checkpoint, layout: str, key: str | None, config: str | Mapping[str, Any] | None
    ) -> None:
        name, _, family = layout.removeprefix("lora:").partition(":")
        if name not in LAYOUTS or (family and family not in families()):
            kinds = [*LAYOUTS] if name not in LAYOUTS else [f"{name}:{each}" for each in families()]
            raise TargetError(f"{layout!r} is not a layout of LoRAs", next=f"one of {join_limited(kinds, most=20)}")
        self.work = Recomputation(checkpoint)
        self.layout, self.path = name, checkpoint.path
        self.state_dict, self.refs, tensors = named_tensors(self.work.checkpoint, key)
        if found := inside(self.refs):
            what = "it is a model with an adapter inside, not a LoRA"
            raise RefusedError(what, path=self.path, next=merge_step(checkpoint, found, "adapter"))
        given = read_object(config) if isinstance(config, str) else config
        self.config = dict(given or adapter_config(checkpoint) or {})
        self.adapter = adapter = Adapter(self.work.checkpoint, self.config, tensors, of_pipeline=True)
        adapter.check_tensors()
        models = adapter.modules(to_merge=False)
        if not self.config and any(key.startswith(PEFT_PREFIX) for key in self.refs):
            what = f"there is no {ADAPTER_CONFIG} beside it, and without lora_alpha the scale is not known"
            raise adapter.refusal(what, "give the file: `--config adapter_config.json`")
        adapter.check_settings()
        kind = self.config.get("peft_type", "LORA")
        if kind != "LORA" or (name != "peft" and adapter.config.get("target_parameters")):
            what = "one of experts" if kind == "LORA" else str(kind)[:40]
            raise adapter.refusal(f"only LoRA has other layouts, and it is {what}", BY_PEFT)
        with adding_path(self.path):
            self.names = Renaming(models, name, family, tensors)
        self.modules = self.names.modules
        #: For each module, the adapter with the settings that apply to it.
        self.own = [adapter.of(model) for model in models for _ in model.parts]
        for _, _, parts in self.modules:
            if DOWN in parts:
                adapter.check_product(parts[DOWN], parts[UP])
        self.lost: list[str] = []

    # -- values

    def _rows(self, key: str, begin: int = 0, count: int | None = None, row: int = 0) -> Block:
        stored = self.adapter.stored(key)
        rows = stored.view.shape[0]
        return Block(stored, begin, rows if count is None else count, 0, stored.view.numel // max(rows, 1), row)

    def _whole(self, key: str) -> _Part:
        return _Part((self._rows(key),), self.adapter.tensors[key].shape)

    def _scale(self, at: int) -> float:
        (_, name, parts), own = self.modules[at], self.own[at]
        # Without alpha, every program that reads it takes the rank, whatever the header says.
        unscaled = DOWN not in parts or not ("alpha" in parts or own.config)
        return 1.0 if unscaled else own.product_scale(name, parts)

    def _parts(self, new: NewModule) -> list[Parts]:
        """Return the parts of the module that the rows come from, for each; none for rows of zeros."""
        return [{} if rows.source is None else self.modules[rows.source][2] for rows in new.rows]

    def _content(self, new: NewModule) -> tuple[dict[str, _Part], float, str]:
        """Return the parts of a module, the factor of its product, and the key of its alpha in the input, or ""."""
        keys = self._parts(new)
        at = new.rows[0].source
        if new.is_same and at is not None:
            parts = {part: self._whole(key) for part, key in keys[0].items() if part != "alpha"}
            return parts, self._scale(at), keys[0].get("alpha", "")
        for part, key in (item for parts in keys for item in parts.items()):
            if part not in (*_ROWS, DOWN, "alpha"):
                what = f"{quoted(key)} cannot be split, joined or turned: only plain matrices can"
                raise self.adapter.refusal(what, "convert it to a layout that has the same modules")
        # A missing module gets rows of zeros, by its share.
        known = {
            n: self._share(key, new.rows[n])[1]
            for n, parts in enumerate(keys)
            if (key := next((parts[part] for part in _ROWS if part in parts), ""))
        }
        n, height = next(iter(known.items()))
        one = new.rows[n].shares[new.rows[n].at]
        heights = [known.get(n, height * sum(rows.shares) // one) for n, rows in enumerate(new.rows)]
        made: dict[str, _Part] = {}
        for part in dict.fromkeys(part for parts in keys for part in parts if part in _ROWS):
            own = [(n, parts[part]) for n, parts in enumerate(keys) if part in parts]
            if part == NORMS and len(own) < len(keys):
                raise self.adapter.refusal(f"{quoted(own[0][1])} is DoRA, and its neighbours are not")
            blocks = (self._rows(key, *self._share(key, new.rows[n]), sum(heights[:n])) for n, key in own)
            made[part] = _Part(tuple(blocks), (sum(heights), *self.adapter.stored(own[0][1]).view.shape[1:]))
        downs = {n: parts[DOWN] for n, parts in enumerate(keys) if DOWN in parts}
        if not downs:
            return made, 1.0, ""
        first, *others = dict.fromkeys(downs.values())
        scales = {n: self._scale(at) for n in downs if (at := new.rows[n].source) is not None}
        scale = next(iter(scales.values()))
        same = len({*scales.values()}) == 1
        shares, shape = new.rows[0].shares, self.adapter.tensors[first].shape
        if len(shares) > 1 and len(new.rows) == 1:
            if self.layout == "diffusers" and "alpha" in keys[0]:
                # diffusers divides the tensor, and so rounds the scale to its dtype.
                _, scale = _rounded(scale, self.adapter.tensors[keys[0]["alpha"]].dtype)
            if shape[0] % len(shares) == 0 and self._is_blockwise(keys[0][UP], shares):
                rank = shape[0] // len(shares)
                begin = new.rows[0].at * rank
                made[DOWN] = _Part((self._rows(first, begin, rank),), (rank, *shape[1:]))
                (block,), high = made[UP]
                made[UP] = _Part((block._replace(first_column=begin, columns=rank),), (high[0], rank, *high[2:]))
                return made, scale, ""
        if same and all(self.adapter.stored(first).equals(self.adapter.stored(key)) for key in others):
            return {DOWN: self._whole(first), **made}, scale, ""
        # Several products are blocks on a diagonal.
        down_blocks, up_blocks, rank = list[Block](), list[Block](), 0
        for (n, key), block in zip(downs.items(), made[UP].blocks):
            factors = (1.0, 1.0) if same else _halves(scales[n])
            down_blocks.append(self._rows(key, row=rank)._replace(factor=factors[0]))
            up_blocks.append(block._replace(column=rank, factor=factors[1]))
            rank += down_blocks[-1].rows
        made[DOWN] = _Part(tuple(down_blocks), (rank, *shape[1:]))
        made[UP] = _Part(tuple(up_blocks), (made[UP].shape[0], rank, *made[UP].shape[2:]))
        return made, scale if same else 1.0, ""

    def _share(self, key: str, rows: SourceRows) -> tuple[int, int]:
        """Return the first of these rows, and their number, in a tensor."""
        every, number = self.adapter.stored(key).view.shape[0], sum(rows.shares)
        if every % number:
            what = f"{quoted(key)} has {pluralize(every, 'row')}, and {number} equal parts are needed"
            raise self.adapter.refusal(what)
        return every // number * sum(rows.shares[: rows.at]), every // number * rows.shares[rows.at]

    def _is_blockwise(self, up: str, shares: tuple[int, ...]) -> bool:
        """Return whether all of a matrix outside of its diagonal blocks is zero."""
        stored, columns = self.adapter.stored(up), self.adapter.tensors[up].shape[1]
        view, wide = stored.view, columns // len(shares)
        for at in range(len(shares)):
            begin, count = self._share(up, SourceRows(None, shares, at))
            for first, last in ((0, at * wide), ((at + 1) * wide, columns)):
                start = view.offset + begin * view.stride[0] + first * view.stride[1]
                outside = view._replace(shape=(count, last - first, *view.shape[2:]), offset=start)
                if last > first and not _is_zero(stored._replace(view=outside)):
                    return False
        return True

    # -- the output

    def done(self, model: str | None, *, lossy: bool) -> Checkpoint:
        """Return the adapter in its new layout; ``lossy`` leaves out tensors that have no place there."""
        names, every = self.names, self.names.new
        if self.layout == "peft" and len(names.models) > 1:
            if model not in names.models:
                what = "it changes several models, and PEFT has a folder for each"
                what = f"{what if model is None else f'it does not change {model!r}'}: {join_limited(names.models)}"
                way = f"`ckptool lora convert` writes all of them with -o; in Python, model={names.models[0]!r}"
                raise TargetError(what, path=self.path, next=way)
            every = [new for new in every if new.model == model]
        items: list[tuple[str, Ref]] = []
        ranks: dict[str, int] = {}
        alphas: dict[str, float] = {}
        rounded = written = 0
        for new in every:
            parts, scale, alpha = self._content(new)
            made, is_rounded = self._written(new, {**parts}, scale, alpha)
            rounded += is_rounded
            written += bool(made)
            items += made
            if made and DOWN in parts:
                ranks[new.name] = rank = parts[DOWN].shape[0]
                alphas[new.name] = scale * rank
        notes = names.notes
        if self.lost:
            which = [quoted(key) for key in self.lost]
            if not (lossy and items):
                what = f"{LAYOUTS[self.layout]} has no place for {pluralize(len(which), 'tensor')}"
                step = "`--allow-loss entries` leaves them out" if items else ""
                raise self.adapter.refusal(f"{what}: {join_limited(which, most=3)}", step)
            notes.append(f"left out: {join_limited(which, most=6)}")
        if not items:
            raise self.adapter.refusal("it changes nothing: all of its values are zero")
        old = self.state_dict.items[0][0]
        self.work.editor.refill(self.state_dict.ref, [(self.work.editor.text(old, key), ref) for key, ref in items])
        what = f"{pluralize(written, 'module')} in the layout of {LAYOUTS[self.layout]}"
        what = f"LoRA of {names.base}: {what}" if names.base else what
        unet = self.layout == "diffusers" and names.family is not None and names.family.model == "unet"
        remarks = {
            f"alpha / rank is no power of 2 in {pluralize(rounded, 'module')}: their values are rounded once": rounded,
            f"{ADAPTER_CONFIG} does not say the base model and the dropout: the file does not record them": (
                self.layout == "peft" and not self.config
            ),
            "ComfyUI does not load the attention under these names; it and diffusers load lora:kohya": unet,
            "DoRA: ComfyUI and PEFT do not divide by the same norm, so its effect may differ": any(
                "magnitude" in key or "dora_scale" in key for key, _ in items
            ),
        }
        notes += (note for note, true in remarks.items() if true)
        edited = self.work.done([Change("lora convert", "", written, 0, what, tuple(notes))])
        # Without alpha, the header must not say one.
        untrue = (*STALE, ADAPTER_CONFIG, *((*ALPHAS, *RANKS) if self.layout == "diffusers" else ()))
        texts = {name: text for name, text in edited.metadata.items() if name not in untrue}
        if not all(new.is_same for new in every):
            texts |= stated(texts, ranks, alphas)
        target = Target("safetensors", self.state_dict.path, "", {"format": "pt", **texts})
        if self.layout != "peft":
            return edited.replace(texts=target.metadata, target=target)
        settings = self.config  # its own, if it has PEFT's names
        if not settings or any(owner.label for owner, _, _ in self.modules):
            settings = {
                **NEW_SETTINGS,
                "base_model_name_or_path": base_in_header(self.work.original) or None,
                "target_modules": sorted(ranks),
                **rank_settings(ranks, alphas),
                "use_dora": any(name.endswith("lora_magnitude_vector") for name, _ in items),
                "lora_bias": any(name.endswith(_BIAS) for name, _ in items),
            }
        edited = peft_folder(edited, settings, {})
        return edited.replace(target=edited.target and edited.target._replace(key=self.state_dict.path))

    def _written(
        self, new: NewModule, parts: dict[str, _Part], scale: float, alpha: str
    ) -> tuple[list[tuple[str, Ref]], bool]:
        """Return the tensors of a module under their new names, and whether values were rounded."""
        name, down = self.names.title(new), parts.get(DOWN)
        sources = [each for each in self._parts(new) if each]
        kohya = self.layout in ("kohya", "comfyui")
        # PEFT and diffusers have other names and the transpose for a table; lora_mid is a factor of the product.
        is_table = new.model not in ("unet", "transformer") and LOOKUP.search(new.name)
        if not name or (not kohya and DOWN in parts and (is_table or _MID in parts)):
            keys = dict.fromkeys(key for own in sources for part, key in own.items() if part != "alpha")
            self.lost += () if all(map(self._is_nothing, sources)) else keys
            return [], False
        # ComfyUI reads lora_mid beside kohya's names only.
        spelled = _LAYOUTS["kohya" if kohya and _MID in parts else self.layout]["parts"]
        # PEFT also scales the bias, and diffusers has no alpha.
        factors: dict[str, float] = {}
        if scale != 1 and DOWN in parts:
            if self.layout == "diffusers":
                factors[DOWN], factors[UP] = _halves(scale)
            if _BIAS in parts and self.layout != "peft":
                factors[_BIAS] = scale
            if "diff_b" in parts and self.layout == "peft":
                if _BIAS in parts or not scale:
                    raise self.adapter.refusal(f"PEFT cannot hold {quoted(parts['diff_b'].blocks[0].source.name)}")
                factors[_BIAS] = 1 / scale
        if not kohya and "diff_b" in parts and DOWN in parts:
            parts[_BIAS] = parts.pop("diff_b")
        for part, (_, shape) in [*parts.items()]:
            by_column = part == NORMS and len(shape) == 2 and shape[0] == 1 < shape[1]
            if (part in spelled and not by_column) or (kohya and part not in _ONLY_PEFT):
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
        needed = self.layout == "kohya" or scale != 1
        if kohya and alpha and (needed or down is None):  # an unchanged module keeps its tensor
            items.append((f"{name}.alpha", self.refs[alpha]))
        elif kohya and needed and down is not None:
            value, dtype = scale * down.shape[0], down.blocks[0].source.view.dtype
            data, stored = _rounded(value, dtype)
            if dtype not in ROUNDED or stored != value:
                dtype, (data, _) = "float32", _rounded(value, "float32")
            items.append((f"{name}.alpha", self.work.tensor(f"{name}.alpha", BY_NAME[dtype], (), data)))
        # A product with 0 or a power of 2 is exact.
        return items, any(abs(frexp(factor)[0]) not in (0, 0.5) for factor in factors.values())

    def _is_nothing(self, parts: Parts) -> bool:
        """Return whether a module is left over from a training that did not change it."""
        zero = (parts[part] for part in (UP, DOWN) if part in parts)
        return {*parts} <= {UP, DOWN, "alpha"} and any(_is_zero(self.adapter.stored(key)) for key in zero)

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
