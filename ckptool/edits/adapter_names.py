"""The names that each layout gives the tensors of an adapter: PEFT's, and those of kohya and diffusers for a pipeline.

A name has three parts: the model of the pipeline, the module that the tensor changes, and the part that it is to the
module. Every layout is read with PEFT's names for the parts, so no other module knows how a library spells them. kohya
writes "_" for the dots of a module. The way back is not unique: names are compared in the form that ``Modules.form``
returns.

Sources: PEFT (``utils/save_and_load.py``, ``tuners/lora/layer.py``), sd-scripts (``networks/lora.py``,
``networks/merge_lora.py``), diffusers (``utils/state_dict_utils.py``, ``loaders/lora_conversion_utils.py``), ComfyUI
(``comfy/lora.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, Literal, TypeAlias

from ..base.errors import RefusedError
from ..base.lazy import regex
from ..base.prefixes import adapter_keys
from ..base.records import NamedTuple
from ..base.text import join_limited, quoted

#: How a name is written. "bare" are the first LoRAs of diffusers, which do not name the model: it is a U-Net.
Layout: TypeAlias = Literal["peft", "kohya", "diffusers", "bare"]

#: PEFT puts this before each key, once.
PEFT_PREFIX: Final = "base_model.model."
#: The two matrices that all modules of VeRA share; their names have no module.
PROJECTIONS: Final = ("base_model.vera_A", "base_model.vera_B")
#: A key of PEFT: the module, the part, and the adapter's name in a raw state dict. ``base_layer`` may stand between
#: for a parameter that is no module; see ``adapters``.
_PEFT: Final = regex(
    r"(?P<module>.+?)\.(?P<part>lora_A|lora_B|lora_E|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|hada_w[12]_[ab]|hada_t[12]|lokr_w[12](?:_[ab])?|lokr_t2|ia3_l|b?oft_R|boft_s|vera_lambda_[bd]|base_layer"
    r"|modules_to_save|(?:token_adapter\.)?trainable_tokens_delta)(?:\.(?!weight\Z|bias\Z)(?P<name>[^.]+))?"
    r"(?:\.(?P<last>weight|bias))?\Z"
)
#: A key of a model with an adapter inside, of a module that was trained as a whole.
_SAVED: Final = regex(r"(?P<module>.+?)\.modules_to_save\.(?P<name>[^.]+)(?P<rest>\..+)\Z")
#: Before the name of a parameter in a module that was trained as a whole: the parameter before the training.
_ORIGINAL: Final = ".original_module."
#: Keys of mlx-lm and torchtune, and of LyCORIS for language models.
_OTHERS: Final = regex(r"lora_(?:down|up|mid|a|b)\b|lora\.(?:down|up)|lokr_|hada_|\Alora_(?:unet|te\d?|transformer)_")

#: The models of a pipeline, by what the programs call them in the names of an adapter.
MODELS: Final = {
    "unet": "unet",
    "transformer": "unet",
    "diffusion_model": "unet",
    "lycoris": "unet",
    "Hunyuan_video_I2V_lora": "unet",
    "te": "text_encoder",
    "te1": "text_encoder",
    "text_encoder": "text_encoder",
    "clip_l": "text_encoder",
    "te2": "text_encoder_2",
    "text_encoder_2": "text_encoder_2",
    "clip_g": "text_encoder_2",
    "te3": "text_encoder_3",
    "text_encoder_3": "text_encoder_3",
    "t5xxl": "text_encoder_3",
}
#: A key for a pipeline: the model, and the rest of it.
_MODEL: Final = regex(
    r"(?:(?:lora_(?P<kohya>unet|te[123]?|transformer)|(?P<other>lycoris|Hunyuan_video_I2V_lora))__?"
    r"|(?P<diffusers>unet|transformer|diffusion_model|text_encoder(?:_[23])?)\.(?:base_model\.model\.)?"
    r"|text_encoders\.(?P<comfyui>clip_l|clip_g|t5xxl)\.transformer\."
    r"|(?=(?:down_blocks|mid_block|up_blocks)\.))(?P<rest>.+)"
)
#: The rest: the module, and the part.
_PART: Final = regex(
    r"(?P<module>.+?)(?:(?P<old>_lora[12]?)\.(?P<first>down|up)|\.lora(?:_linear_layer)?\.(?P<second>down|up)"
    r"|\.lora_(?P<third>down|up|mid)|\.lora_(?P<fourth>[AB])(?:\.(?!weight\Z|bias\Z)(?P<name>\w+))?"
    r"|\.(?P<table>lora_embedding_[AB])(?:\.\w+)?|\.(?P<saved>modules_to_save)\.\w+(?=\.)"
    r"|\.(?P<norms>lora_magnitude_vector|dora_scale|magnitude)(?:\.(?!weight\Z)\w+)?"
    r"|\.(?P<own>alpha|diff|diff_b|[wb]_norm|set_weight|reshape_weight|hada_\w+|lokr_\w+|oft_\w+|[ab][12]))"
    r"(?:\.(?P<last>weight|bias))?\Z"
)
#: PEFT's names of the two matrices.
_MATRICES: Final = {"down": "lora_A", "up": "lora_B", "mid": "lora_mid", "A": "lora_A", "B": "lora_B"}
#: The parts that a merge can use.
_MERGED: Final = ("alpha", "lora_A", "lora_B", "lora_magnitude_vector")
#: Modules whose LoRA early versions of diffusers wrote behind the attention, in a U-Net and in a text encoder.
_OLD_UNET: Final = {"to_out": "to_out.0"}
_OLD_TEXT: Final = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
#: Text encoders have this before their names, or lack it since transformers 5.
_TEXT_MODEL: Final = "text_model."
WITH_DIFFUSERS: Final = "with diffusers: pipe.load_lora_weights(), pipe.fuse_lora(), pipe.save_pretrained()"


class Name(NamedTuple):
    """A key of an adapter, read.

    ``label`` is the model's name in a pipeline, "" for PEFT. ``part`` is PEFT's name of the part with the end
    ("lora_A.weight"), "alpha", or "copy.END" for a tensor that replaces another. ``adapter`` is the adapter's name in a
    raw state dict of PEFT.
    """

    layout: Layout
    label: str
    module: str
    part: str
    adapter: str = ""


class Modules(NamedTuple):
    """The modules of one model that an adapter changes.

    ``parts`` has the key of each tensor by module and part, ``alphas`` the keys of numbers by module.
    """

    layout: Layout
    label: str
    parts: Mapping[str, Mapping[str, str]]
    alphas: Mapping[str, str]

    @property
    def model(self) -> str:
        """The model of the pipeline: "unet" also for a diffusion transformer."""
        return MODELS[self.label]

    @property
    def tensors(self) -> int:
        """The number of tensors."""
        return sum(map(len, self.parts.values())) + len(self.alphas)

    def form(self, module: str) -> str:
        """Return a name in the form in which names of the adapter and the base are compared."""
        dotless = self.layout == "kohya"
        name = module.replace(".", "_") if dotless else module
        prefix = _TEXT_MODEL.replace(".", "_") if dotless else _TEXT_MODEL
        return name.removeprefix(prefix) if self.model != "unet" else name


def is_of_pipeline(keys: Collection[str]) -> bool:
    """Return whether keys are those that kohya or diffusers give to an adapter: all have a model, some a matrix."""
    return all(map(_MODEL.match, keys)) and any(map(_PART.match, keys))


def is_of_other_library(keys: Collection[str]) -> bool:
    """Return whether some keys are those of mlx-lm, torchtune, or LyCORIS for language models."""
    return any(map(_OTHERS.search, keys))


def modules(
    keys: Collection[str], peft_type: object = None, are_equal: Callable[[str, str], bool] = lambda one, other: True
) -> list[Modules]:
    """Return the modules of each model that an adapter with these keys changes.

    ``peft_type`` is the type in the settings of PEFT, or None for an adapter of a pipeline. ``are_equal`` returns
    whether two tensors have the same values. Raise RefusedError for a key that is not known, for two adapters, and for
    different tensors with one meaning.
    """
    parts: dict[tuple[Layout, str], dict[str, dict[str, str]]] = {}
    alphas: dict[tuple[Layout, str], dict[str, str]] = {}
    adapters: set[str] = set()
    for key in keys:
        if peft_type == "VERA" and key in PROJECTIONS:
            continue
        if _ORIGINAL in key and key.replace(_ORIGINAL, ".") in keys:
            continue  # the base's own values, which bias="all" saves beside the trained ones
        name = pipeline_name(key) if peft_type is None else peft_name(key)
        adapters.add(name.adapter)
        which = name.layout, name.label
        own, numbers = parts.setdefault(which, {}), alphas.setdefault(which, {})
        known = (
            numbers.setdefault(name.module, key)
            if name.part == "alpha"
            else own.setdefault(name.module, {}).setdefault(name.part, key)
        )
        if known != key and not are_equal(key, known):
            raise RefusedError(f"{quoted(key)} and {quoted(known)} mean the same tensor")
    if len(adapters - {""}) > 1:
        raise RefusedError(f"it holds several adapters: {join_limited(sorted(adapters - {''}))}")
    if not parts:
        raise RefusedError("it holds no tensor that changes a weight: the file is incomplete")
    models = [Modules(*which, parts[which], alphas[which]) for which in parts]
    for model in models:
        if alone := next((key for module, key in model.alphas.items() if module not in model.parts), ""):
            raise RefusedError(f"{quoted(alone)} has no matrices beside it: the file is incomplete")
    return models


def adapter_key(key: str) -> tuple[str, str] | None:
    """Return the adapter of a key in a model with adapters inside, and the key as PEFT saves it; None for the model's.

    Without a name of an adapter in the key, the first is "".
    """
    if saved := _SAVED.match(key):
        return saved["name"], saved["module"] + saved["rest"]
    match = _PEFT.match(key)
    if match is None or match["part"] in ("base_layer", "modules_to_save"):
        return None
    last = f".{match['last']}" if match["last"] and match["part"] != "lora_magnitude_vector" else ""
    return match["name"] or "", key[: match.end("part")] + last


def peft_name(key: str) -> Name:
    """Read a key of PEFT without its prefix; raise RefusedError if it belongs to another kind of adapter."""
    match = _PEFT.match(key)
    if match is None:
        if adapter_keys([key]):
            raise RefusedError(f"its tensor {quoted(key)} is not known, and would not be used")
        module, _, last = key.rpartition(".")
        return Name("peft", "", module, f"copy.{last}")
    part = "copy" if match["part"] in ("base_layer", "modules_to_save") else match["part"]
    last = match["last"] or "weight"
    return Name("peft", "", match["module"], f"{part.removeprefix('token_adapter.')}.{last}", match["name"] or "")


def pipeline_name(key: str) -> Name:
    """Read a key of kohya or diffusers; raise RefusedError if it is not known, or no merge uses its part."""
    name = any_name(key) if _MODEL.match(key) else None
    if name is None or not name.part.startswith(_MERGED):
        raise RefusedError(f"its tensor {quoted(key)} is not known, and would not be used", next=WITH_DIFFUSERS)
    return name


def any_name(key: str) -> Name | None:
    """Read a key of any layout, with or without a model before the module; None for one that is not known."""
    start = _MODEL.match(key)
    match = _PART.match(start["rest"] if start else key.removeprefix(PEFT_PREFIX))
    if match is None:
        return None
    label = (start["kohya"] or start["other"] or start["diffusers"] or start["comfyui"] or "unet") if start else ""
    layout: Layout = "peft"
    if start:
        dotless = start["kohya"] or start["other"]
        layout = "kohya" if dotless else "diffusers" if start["diffusers"] or start["comfyui"] else "bare"
    module, last = match["module"], match["last"] or "weight"
    if match["old"] and module.endswith((".processor.qkv", ".processor.proj")):
        module += match["old"]  # of XLabs: the number says which stream the processor is for
    else:
        module = module.replace(".processor.", ".").removesuffix(".processor")
        if match["old"]:
            before, dot, end = module.rpartition(".")
            module = before + dot + (_OLD_UNET if MODELS.get(label, "unet") == "unet" else _OLD_TEXT).get(end, end)
    if layout == "kohya":
        module = module.strip("_")
    matrix = match["first"] or match["second"] or match["third"] or match["fourth"]
    if matrix or match["saved"]:
        part = f"{_MATRICES[matrix] if matrix else 'copy'}.{last}"
    else:
        own = match["own"] and match["own"] + (f".{match['last']}" if match["last"] else "")
        part = "lora_magnitude_vector.weight" if match["norms"] else match["table"] or own
    return Name(layout, label, module, part, match["name"] or "")
