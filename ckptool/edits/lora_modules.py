"""Recognise the base model of a LoRA by its modules, and name these modules in another layout.

Only names and shapes are read. If several models fit, each is tried: a user must choose only if the names differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from ..base.errors import RefusedError
from ..base.records import NamedTuple
from ..base.text import join_limited, quoted
from ..formats.recipes.loras import Family, Place, families
from .adapter_names import DOWN, MODELS, PEFT_PREFIX, UP, Modules, Parts

Shape: TypeAlias = Callable[[str], tuple[int, ...]]

#: The layouts, and what people call the programs that read them.
LAYOUTS: Final = {"kohya": "kohya's sd-scripts", "comfyui": "ComfyUI", "diffusers": "diffusers", "peft": "PEFT"}
#: The prefixes of the models in the names of each program; "" stands for a U-Net or a transformer.
_PREFIXES: Final = {
    "kohya": {"": "lora_unet_", "lora_te_": "lora_te_", "text_encoder": "lora_te1_"}
    | {f"text_encoder_{number}": f"lora_te{number}_" for number in (2, 3)},
    "comfyui": {"": "diffusion_model."}
    | {
        f"text_encoder{number}": f"text_encoders.{name}.transformer."
        for number, name in (("", "clip_l"), ("_2", "clip_g"), ("_3", "t5xxl"))
    },
    "diffusers": {name: f"{name}." for name in ("unet", "transformer", "text_encoder", "text_encoder_2")},
    "peft": {"": PEFT_PREFIX},
}


class LoraModule(NamedTuple):
    """A module that a LoRA changes: its model, its name as spelled, and the keys of its parts."""

    owner: Modules
    name: str
    parts: Parts

    @property
    def is_text(self) -> bool:
        """Whether it belongs to a text encoder of a pipeline."""
        return self.owner.model != "unet"


class Piece(NamedTuple):
    """Rows of a module of the output: the share number ``at`` of a module of the input; zeros if ``source`` is None."""

    source: int | None
    shares: tuple[int, ...] = (1,)
    at: int = 0


class Out(NamedTuple):
    """A module of the output: its model, its name, and the pieces that its rows are made of."""

    model: str
    name: str
    pieces: tuple[Piece, ...]

    @property
    def is_same(self) -> bool:
        """Whether it is a module of the input under another name."""
        return len(self.pieces) == len(self.pieces[0].shares) == 1


def base_of(models: Sequence[Modules], shape: Shape) -> str:
    """Return the names of the models that have all modules of a LoRA, or "" if none is known."""
    try:
        return Renaming(models, "diffusers", "", shape).base
    except RefusedError:
        return ""


def layout_of(models: Sequence[Modules]) -> str:
    """Return the program whose names a LoRA of a pipeline has."""
    if any(model.dotless for model in models):
        return "kohya"
    comfyui = any(model.label in ("diffusion_model", "clip_l", "clip_g", "t5xxl") for model in models)
    return "ComfyUI" if comfyui else "diffusers"


class Renaming:
    """The modules of a LoRA in another ``layout``: ``outs``.

    ``family`` belongs to the base model, or is None. ``base`` lists the models with these names. ``wanted`` is the key
    of a family, or "". ``shape`` returns the shape of the tensor with a key. Raise RefusedError if no family has the
    modules, or several have them under different names.
    """

    def __init__(self, models: Sequence[Modules], layout: str, wanted: str, shape: Shape) -> None:
        self.modules = [LoraModule(model, *item) for model in models for item in model.parts.items()]
        self._has_second = any(model.model == "text_encoder_2" for model in models)
        self.layout = layout
        self._shape: Shape = lambda key: shape(key) or (0,)
        self.notes: list[str] = []
        self.family, self.base, self.outs = self._chosen(wanted)
        #: The models that the output changes.
        self.models = list(dict.fromkeys(out.model for out in self.outs))

    def title(self, out: Out) -> str:
        """Return the full name of a module of the output; "" if the program has no such model."""
        prefixes = _PREFIXES[self.layout]
        is_text = self.layout != "peft" and out.model.startswith(("text_encoder", "lora_te"))
        prefix = prefixes.get(out.model, "" if is_text else prefixes.get("", ""))
        return prefix and prefix + (out.name.replace(".", "_") if self.layout == "kohya" else out.name)

    def _chosen(self, wanted: str) -> tuple[Family | None, str, list[Out]]:
        """Return the family of the base model, the models with its names, and the modules of the output."""
        texts = [at for at, module in enumerate(self.modules) if module.is_text or self._is_clip(at)]
        core = [at for at in range(len(self.modules)) if at not in texts]
        found: dict[tuple[tuple[str, Out], ...], tuple[list[Family], list[Out]]] = {}
        for family in ([families()[wanted]] if wanted else families().values()) if core else ():
            places = self._places(family, core)
            if len(places) == len(core) and (wanted or self._fits(family, places)):
                outs = [*self._outs(places, family), *self._text_outs(texts, family)]
                # Different names in dots may be the same without.
                named = tuple((title := self.title(out), out._replace(name="" if title else out.name)) for out in outs)
                found.setdefault(named, ([], outs))[0].append(family)
        if not found and (not core or self._keeps_names(core)):
            outs = [Out("model", self.modules[at].name, (Piece(at),)) for at in core]
            return None, "", [*outs, *self._text_outs(texts, None)]
        if not found:
            raise self._unknown(core, wanted)
        (same, outs), *ways = sorted(found.values(), key=lambda way: not way[0][0].is_usual)
        chosen = same[0]
        others = [family for way, _ in ways for family in way]
        if others and not chosen.is_usual:
            keys = [f"{self.layout}:{family.key}" for family in (chosen, *others)]
            what = f"its names fit several models, and {LAYOUTS[self.layout]} call their modules differently"
            raise RefusedError(what, next=f"say which it is: one of {join_limited(keys, most=9)}")
        if others:
            way = f"lora:{self.layout}:{others[0].key}"
            self.notes.append(f"taken for a LoRA of {chosen.name}; for one of {others[0].name}, name it: {way}")
        counts = Counter((self.layout == "peft" and out.model, self.title(out)) for out in outs)
        if twice := next((name for (_, name), number in counts.items() if name and number > 1), ""):
            raise RefusedError(f"two of its modules would become {quoted(twice)}")
        return chosen, " or ".join(family.name for family in same), outs

    def _keeps_names(self, core: Sequence[int]) -> bool:
        """Return whether an unknown model keeps the names of its modules: the target uses the same ones."""
        owners = [self.modules[at].owner for at in core]
        labels = {owner.label for owner in owners}
        own = labels == {""} or (self.layout in ("peft", "diffusers") and labels <= {"unet", "transformer"})
        return own and not any(owner.dotless for owner in owners)

    def _is_clip(self, at: int) -> bool:
        """Return whether a module without the name of a model belongs to a text encoder."""
        return not self.modules[at].owner.label and any(self._places(families()[key], [at]) for key in ("clip", "t5"))

    def _fits(self, family: Family, places: Mapping[int, Place]) -> bool:
        if family.model == "text_encoder" or (family.text_encoders == 1 and self._has_second):
            return False
        for at, place in places.items():
            names, parts = place.names(1), self.modules[at].parts
            wide = self._shape(parts[DOWN])[-1] if DOWN in parts else 0
            is_context = ".attn2.to_" in names[0] and names[0].endswith(("to_k", "to_v")) and wide in (768, 1024, 2048)
            if any(map(family.lacks, names)) or (family.context and is_context and wide != family.context):
                return False
        return True

    def _places(self, family: Family, which: Sequence[int]) -> dict[int, Place]:
        found = {}
        for at in which:
            owner, name, parts = self.modules[at]
            dotless = owner.dotless
            places = family.places(name, dotless=dotless)
            if not places and family.key == "clip":
                places = family.places(f"text_model{'_' if dotless else '.'}{name}", dotless=dotless)
            if len(places) > 1:  # one of them for a norm with two halves of as many rows as it has columns
                halves = UP in parts and self._shape(parts[UP])[0] == 2 * self._shape(parts[DOWN])[-1]
                places = [place for place in places if place.rule.swapped is halves] or places
            if places:
                found[at] = places[0]
        return found

    def _outs(self, places: Mapping[int, Place], family: Family) -> Iterator[Out]:
        """Yield the modules of the output for the modules of a model, given their places in its family."""
        side = {"kohya": family.kohya, "comfyui": family.comfyui}.get(self.layout, 1)
        joined: dict[str, list[Piece]] = {}
        for at, place in places.items():
            rule, shares, names = place.rule, place.rule.shares, place.names(side)
            pieces: tuple[Piece, ...] = (Piece(at),)
            if side == 0 and rule.one_way:  # this name is only read: write the name of the other rule with this side b
                other = next((each for each in family.places(place.names(1)[0], dotless=False) if each.side), None)
                if other is not None:
                    own, rest = sum(other.rule.shares[: len(rule.b)]), sum(other.rule.shares[len(rule.b) :])
                    pieces = (Piece(at, (own,)), Piece(None, (rest,))) if rest else pieces
                    yield Out(family.model, other.names(0)[0], pieces)
            elif place.side == side:
                yield Out(family.model, names[place.at], pieces)
            elif len(rule.b) == 1:
                halves = Piece(at, (1, 1), 1), Piece(at, (1, 1), 0)
                yield Out(family.model, names[0], halves if rule.swapped else pieces)
            elif side:
                yield from (Out(family.model, name, (Piece(at, shares, n),)) for n, name in enumerate(names))
            else:
                row = joined.setdefault(names[0], [Piece(None, (share,)) for share in shares])
                row[place.at] = Piece(at, row[place.at].shares)
        yield from (Out(family.model, name, tuple(pieces)) for name, pieces in joined.items())

    def _text_outs(self, which: Sequence[int], family: Family | None) -> Iterator[Out]:
        for at in which:
            found = ((key, self._places(families()[key], [at]).get(at)) for key in ("clip", "t5"))
            key, place = next(((key, place) for key, place in found if place), ("", None))
            if place is None:
                raise self._unknown([at], "")
            label = self.modules[at].owner.label
            encoder = "text_encoder_3" if key == "t5" else MODELS.get(label, "text_encoder")
            # The only text encoder of a model has no number in kohya's layout.
            alone = family.text_encoders == 1 if family is not None else label != "te1" and not self._has_second
            only = self.layout == "kohya" and encoder == "text_encoder" and alone
            yield Out("lora_te_" if only else encoder, place.names(1)[0], (Piece(at),))

    def _unknown(self, which: Sequence[int], wanted: str) -> RefusedError:
        known = [families()[wanted]] if wanted else [*families().values()]
        found = max((self._places(family, which) for family in known), key=len)
        first = self.modules[next((at for at in which if at not in found), which[0])]
        what = f"{known[0].name} has no module" if wanted else "no known model has the module"
        what += f" {quoted(first.name)}{'' if wanted or not found else ' beside the others'}"
        if first.owner.dotless:
            what += ', and which "_" stand for dots is not in the file'
        return RefusedError(what, next="convert it with the program that trained it")
