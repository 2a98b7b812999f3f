"""The modules that a LoRA changes, and their names in another layout: which model it is for, and what becomes of each.

Nothing is read but names and shapes. If several models fit, each is tried: only if the names differ must a user say
which one it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from ..base.errors import RefusedError
from ..base.records import NamedTuple
from ..base.text import join_limited, quoted
from ..formats.recipes.loras import Family, Place, families
from .adapter_names import MODELS, PEFT_PREFIX, any_name, peft_name

#: The layouts, and what people call the programs that read them.
LAYOUTS: Final = {
    "kohya": "kohya's sd-scripts",
    "comfyui": "ComfyUI",
    "diffusers": "diffusers",
    "peft": "PEFT",
}
#: Parts of a module, by PEFT's names for them.
DOWN: Final = "lora_A.weight"
UP: Final = "lora_B.weight"
_COMFYUI_ENCODERS: Final = ("clip_l", "clip_g", "t5xxl")
#: The text encoders under the names of each program.
_ENCODERS: Final = {
    "kohya": {"text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_", "text_encoder_3": "lora_te3_"},
    "comfyui": {
        "text_encoder": "text_encoders.clip_l.transformer.",
        "text_encoder_2": "text_encoders.clip_g.transformer.",
        "text_encoder_3": "text_encoders.t5xxl.transformer.",
    },
    "diffusers": {"text_encoder": "text_encoder.", "text_encoder_2": "text_encoder_2."},
}


class LoraModule(NamedTuple):
    """A module that a LoRA changes: its model in a pipeline ("" if the names do not say), its name as spelled, and the
    keys of its parts. ``dotless``: the name has "_" for dots."""

    label: str
    name: str
    dotless: bool
    parts: Mapping[str, str]

    @property
    def is_text(self) -> bool:
        """Whether it belongs to a text encoder of a pipeline."""
        return MODELS.get(self.label, "unet") != "unet"


class Out(NamedTuple):
    """A module of the output: its model, its name, and how it is made of modules of the input (None: not there).

    ``kind`` is same, swap (the halves of the rows), split (the part ``at`` of the ``shares``), join, or padded (the
    first ``at`` of the shares are there, and zeros follow).
    """

    model: str
    name: str
    kind: str
    sources: tuple[int | None, ...]
    shares: tuple[int, ...] = (1,)
    at: int = 0


def modules_of(keys: Collection[str]) -> list[LoraModule]:
    """Return the modules that a LoRA with these keys changes; raise RefusedError for a key of another kind."""
    found: dict[tuple[str, str, bool], dict[str, str]] = {}
    for key in keys:
        if ".original_module." in key and key.replace(".original_module.", ".modules_to_save.default.") in keys:
            continue  # the base's own values beside the trained ones
        name = any_name(key)
        if name is None and key.startswith(PEFT_PREFIX):  # of a module that was trained as a whole
            name = peft_name(key.removeprefix(PEFT_PREFIX))
        if name is None:
            raise RefusedError(f"{quoted(key)} does not belong to a LoRA", next="give the file of the adapter alone")
        parts = found.setdefault((name.label, name.module, name.layout == "kohya"), {})
        if parts.setdefault(name.part, key) != key:
            raise RefusedError(f"{quoted(key)} and {quoted(parts[name.part])} mean the same tensor")
    for parts in found.values():
        lone = next((part for part, other in ((DOWN, UP), (UP, DOWN)) if part in parts and other not in parts), "")
        if lone or {*parts} == {"alpha"}:
            raise RefusedError(f"{quoted(parts[lone or 'alpha'])} has no partner: the file is incomplete")
    return [LoraModule(*which, parts) for which, parts in found.items()]


def base_of(modules: Sequence[LoraModule], shape: Callable[[str], tuple[int, ...]]) -> str:
    """Return the names of the models that have all modules of a LoRA, or "" if none is known."""
    try:
        return Renaming(modules, "diffusers", "", shape).base
    except RefusedError:
        return ""


def layout_of(modules: Sequence[LoraModule]) -> str:
    """Return the program whose names a LoRA of a pipeline has."""
    if any(module.dotless for module in modules):
        return "kohya"
    comfyui = any(module.label in ("diffusion_model", *_COMFYUI_ENCODERS) for module in modules)
    return "ComfyUI" if comfyui else "diffusers"


class Renaming:
    """The modules of a LoRA in another ``layout``: ``outs``, for the ``family`` of its base model, if one fits.
    ``base`` names all models that have the same names.

    ``wanted`` is the key of a family, or "". ``shape`` returns the shape of the tensor with a key. Raise RefusedError
    if no family has the modules, or several have them under different names.
    """

    def __init__(
        self, modules: Sequence[LoraModule], layout: str, wanted: str, shape: Callable[[str], tuple[int, ...]]
    ) -> None:
        self.modules, self.layout, self._shape = modules, layout, shape
        self.notes: list[str] = []
        self.family, self.base, self.outs = self._chosen(wanted)

    @property
    def models(self) -> list[str]:
        """The models that the output changes."""
        return list(dict.fromkeys(out.model for out in self.outs))

    def prefix(self, out: Out) -> str:
        """Return the prefix of a module; "" if the program has no such model."""
        if self.layout == "peft":
            return PEFT_PREFIX
        encoders = _ENCODERS[self.layout]
        if out.model.startswith(("text_encoder", "lora_te")):
            return out.model if out.model == "lora_te_" else encoders.get(out.model, "")
        core = {"kohya": "lora_unet_", "comfyui": "diffusion_model.", "diffusers": f"{out.model}."}[self.layout]
        return "" if core == "model." else core

    def _chosen(self, wanted: str) -> tuple[Family | None, str, list[Out]]:
        """Return the family of the base model, its name, and the modules of the output; raise RefusedError if families
        with different names fit."""
        texts = [at for at, module in enumerate(self.modules) if module.is_text or self._is_clip(at)]
        core = [at for at in range(len(self.modules)) if at not in texts]
        fitting = [families()[wanted]] if wanted else [each for each in families().values() if self._fits(each, core)]
        found: dict[tuple[tuple[str, Out], ...], tuple[list[Family], list[Out]]] = {}
        for family in fitting if core else ():
            places = self._places(family, core)
            if len(places) == len(core):
                outs = [*self._outs(places, family), *self._text_outs(texts, family)]
                # Different names in dots may be the same without.
                named = tuple((self._title(out), out._replace(name="")) for out in outs)
                found.setdefault(named, ([], outs))[0].append(family)
        if not found and (not core or self._keeps_names(core)):
            outs = [Out("model", self.modules[at].name, "same", (at,)) for at in core]
            return None, "", [*outs, *self._text_outs(texts, None)]
        if not found:
            raise self._unknown(core, wanted)
        ways = list(found.values())
        ways.sort(key=lambda way: not way[0][0].is_usual)
        (chosen, *_), outs = ways[0]
        others = [family for way, _ in ways[1:] for family in way]
        if others and not chosen.is_usual:
            keys = [f"{self.layout}:{family.key}" for family in (chosen, *others)]
            what = f"its names fit several models, and {LAYOUTS[self.layout]} call their modules differently"
            raise RefusedError(what, next=f"say which it is: one of {join_limited(keys, most=9)}")
        if others:
            way = f"lora:{self.layout}:{others[0].key}"
            self.notes.append(f"taken for a LoRA of {chosen.name}; for one of {others[0].name}, name it: {way}")
        names = Counter(map(self._title, outs))
        if twice := next((name for name, number in names.items() if number > 1), ""):
            raise RefusedError(f"two of its modules would become {quoted(twice)}")
        return chosen, " or ".join(family.name for family in ways[0][0]), outs

    def _title(self, out: Out) -> str:
        """Return the name of a module in the output; its model stands before it."""
        name = out.name.replace(".", "_") if self.layout == "kohya" else out.name
        return f"{out.model}/{name}" if self.layout == "peft" else self.prefix(out) + name

    def _keeps_names(self, core: Sequence[int]) -> bool:
        """Return whether the names of an unknown model are right as they are: its library wrote them."""
        labels = {self.modules[at].label for at in core}
        own = labels == {""} or (self.layout in ("peft", "diffusers") and labels <= {"unet", "transformer"})
        return own and not any(self.modules[at].dotless for at in core)

    def _is_clip(self, at: int) -> bool:
        """Return whether a module without the name of a model is one of a text encoder."""
        return not self.modules[at].label and any(self._places(families()[key], [at]) for key in ("clip", "t5"))

    def _fits(self, family: Family, core: Sequence[int]) -> bool:
        labels = {MODELS[module.label] for module in self.modules if module.is_text}
        several = "text_encoder_2" in labels
        if family.model == "text_encoder" or (family.text_encoders == 1 and several):
            return False
        places = self._places(family, core)
        if len(places) < len(core):
            return False
        contexts = {768, 1024, 2048}
        for at, place in places.items():
            if any(family.lacks(name) for name in place.names(1)):
                return False
            module = self.modules[at]
            if family.context and DOWN in module.parts and ".attn2.to_" in (name := place.names(1)[0]):
                wide = self._shape(module.parts[DOWN])[-1]
                if name.endswith(("to_k", "to_v")) and wide in contexts and wide != family.context:
                    return False
        return True

    def _places(self, family: Family, which: Sequence[int]) -> dict[int, Place]:
        found = {}
        for at in which:
            module = self.modules[at]
            places = family.places(module.name, dotless=module.dotless)
            if not places and family.key == "clip":
                prefix = "text_model_" if module.dotless else "text_model."
                places = family.places(prefix + module.name, dotless=module.dotless)
            if len(places) > 1:  # one of them for a norm with two halves of as many rows as it has columns
                shapes = [self._shape(module.parts[part]) for part in (UP, DOWN) if part in module.parts]
                halves = len(shapes) == 2 and shapes[0][0] == 2 * shapes[1][-1]
                places = [place for place in places if place.rule.swapped is halves] or places
            if places:
                found[at] = places[0]
        return found

    def _outs(self, places: Mapping[int, Place], family: Family) -> Iterator[Out]:
        """Yield the modules of the output for the modules of a model, given their places in its family."""
        side = {"kohya": family.kohya, "comfyui": family.comfyui}.get(self.layout, 1)
        joined: dict[tuple[Any, ...], dict[int, int]] = {}
        rules: dict[tuple[Any, ...], Place] = {}
        for at, place in places.items():
            rule = place.rule
            if side == 0 and rule.one_way:  # only read: take the name of the rule with the same other side
                other = next((each for each in family.places(place.names(1)[0], dotless=False) if each.side), None)
                if other is not None:
                    kind = "same" if len(other.rule.b) == len(rule.b) else "padded"
                    yield Out(family.model, other.names(0)[0], kind, (at,), other.rule.shares, len(rule.b))
            elif place.side == side:
                yield Out(family.model, place.names(side)[place.at], "same", (at,))
            elif len(rule.b) == 1:
                yield Out(family.model, place.names(side)[0], "swap" if rule.swapped else "same", (at,))
            elif side:
                for number, name in enumerate(place.names(1)):
                    yield Out(family.model, name, "split", (at,), rule.shares, number)
            else:
                which = rule.a.text, place.values
                joined.setdefault(which, {})[place.at], rules[which] = at, place
        for which, parts in joined.items():
            rule = rules[which].rule
            sources = tuple(parts.get(number) for number in range(len(rule.b)))
            yield Out(family.model, rules[which].names(0)[0], "join", sources, rule.shares)

    def _text_outs(self, which: Sequence[int], family: Family | None) -> Iterator[Out]:
        for at in which:
            module = self.modules[at]
            for key in ("clip", "t5"):
                if place := self._places(families()[key], [at]).get(at):
                    encoder = "text_encoder_3" if key == "t5" else MODELS.get(module.label, "text_encoder")
                    if self.layout == "kohya" and encoder == "text_encoder" and self._is_only_encoder(module, family):
                        encoder = "lora_te_"
                    yield Out(encoder, place.names(1)[0], "same", (at,))
                    break
            else:
                raise self._unknown([at], "")

    def _is_only_encoder(self, module: LoraModule, family: Family | None) -> bool:
        """Return whether the model has one text encoder, whose name in kohya's layout has no number."""
        if family is not None:
            return family.text_encoders == 1
        second = any(MODELS.get(each.label) == "text_encoder_2" for each in self.modules)
        return module.label != "te1" and not second

    def _unknown(self, which: Sequence[int], wanted: str) -> RefusedError:
        known = [families()[wanted]] if wanted else [*families().values()]
        found = max((self._places(family, which) for family in known), key=len)
        first = self.modules[next((at for at in which if at not in found), which[0])]
        what = f"{known[0].name} has no module" if wanted else "no model that is known here has the module"
        what += f" {quoted(first.name)}{'' if wanted or not found else ' beside the others'}"
        if first.dotless:
            what += ', and which "_" stand for dots is not in the file'
        return RefusedError(what, next="convert it with the program that trained it")
