"""Read the names of the tensors of an adapter, as each program spells them.

A name has three parts: the model of the pipeline, the module that the tensor changes, and its role there, called part.
Parts get PEFT's names, so no other module knows how a program spells them. kohya writes "_" for the dots of a module,
which cannot be reversed: names are compared in the form that ``Modules.form`` returns.

Sources: PEFT (``utils/save_and_load.py``, ``tuners/lora/layer.py``), sd-scripts (``networks/lora.py``,
``networks/merge_lora.py``), diffusers (``utils/state_dict_utils.py``, ``loaders/lora_conversion_utils.py``), ComfyUI
(``comfy/lora.py``, ``comfy/weight_adapter``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, Literal, TypeAlias

from ..base.errors import RefusedError
from ..base.lazy import regex, table
from ..base.prefixes import adapter_keys
from ..base.records import NamedTuple
from ..base.text import join_limited, quoted
from ..values.torch.adapters import StoredTensor

#: Facts about adapters; the file explains them.
TABLE: Final = table("edits/adapters")
#: How a name is written. "bare" are the first LoRAs of diffusers, which do not name the model: it is a U-Net.
Layout: TypeAlias = Literal["peft", "kohya", "diffusers", "bare"]
Parts: TypeAlias = Mapping[str, str]

#: PEFT puts this before each key, once.
PEFT_PREFIX: Final = "base_model.model."
#: The two matrices that all modules of VeRA share; their names have no module.
PROJECTIONS: Final = ("base_model.vera_A", "base_model.vera_B")
#: PEFT's names of the parts of a LoRA: its two matrices, and the norms of DoRA.
DOWN: Final = "lora_A.weight"
UP: Final = "lora_B.weight"
NORMS: Final = "lora_magnitude_vector.weight"

#: The models of a pipeline, by what the programs call them in the names of an adapter.
MODELS: Final[Mapping[str, str]] = {label: model for model, labels in TABLE["models"].items() for label in labels}
#: A key for a pipeline: the model, and the rest of it.
_MODEL: Final = regex(
    r"(?:(?:lora_(?P<kohya>unet|te[123]?|transformer)|(?P<other>lycoris|Hunyuan_video_I2V_lora))__?"
    r"|(?P<diffusers>unet|transformer|diffusion_model|text_encoder(?:_[23])?)\.(?:base_model\.model\.)?"
    r"|text_encoders\.(?P<comfyui>clip_l|clip_g|t5xxl)\.transformer\."
    r"|(?=(?:down_blocks|mid_block|up_blocks)\.))(?P<rest>.+)"
)
#: The rest, or a key of PEFT: the module, the part, and the adapter's name in a raw state dict. ``base_layer`` may
#: stand between for a parameter that is no module; see ``adapters``. PEFT has none of the ``own`` parts.
_PART: Final = regex(
    r"(?P<module>.+?)(?:\.(?P<base>base_layer)|(?:(?P<old>_lora[12]?)\.|\.lora(?:_linear_layer)?\.|\.lora_)"
    r"(?P<matrix>down|up|mid|A|B)(?:\.(?!weight\Z|bias\Z)(?P<name>[^.]+))?"
    r"|\.(?P<peft>lora_(?:E|embedding_[AB]|magnitude_vector)|hada_\w+|lokr_\w+|ia3_l|b?oft_\w+|vera_lambda_[bd]"
    r"|modules_to_save|(?:token_adapter\.)?trainable_tokens_delta)(?:\.(?!weight\Z|bias\Z)(?P<adapter>[^.]+))?"
    r"|\.(?P<own>alpha|diff|diff_b|[wb]_norm|set_weight|reshape_weight|dora_scale|magnitude|[ab][12]))"
    r"(?:\.(?P<last>weight|bias))?\Z"
)
_MATRICES: Final = {"down": "lora_A", "up": "lora_B", "A": "lora_A", "B": "lora_B", "mid": "lora_mid"}
#: In a model with an adapter inside: a key of a module that was trained as a whole, the segments that PEFT puts before
#: the base's own tensors, and the prefix of all keys.
_SAVED: Final = regex(r"(?P<module>.+?)\.modules_to_save\.(?P<name>[^.]+)(?P<rest>\..+)\Z")
_WRAPPED: Final = regex(r"\.(?:token_adapter\.)?base_layer(?=\.)|\.original_module(?=\.)")
_PREFIX: Final = regex(r"(?:\A|(?<=\.))base_model\.model\.")
#: Marks the former parameters of a module that was trained as a whole.
_ORIGINAL: Final = ".original_module."
#: Modules whose LoRA early versions of diffusers wrote behind the attention, in a U-Net and in a text encoder.
_OLD_UNET: Final = {"to_out": "to_out.0"}
_OLD_TEXT: Final = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
UNKNOWN: Final = "its tensor {} is not known, and would not be used"
WITH_DIFFUSERS: Final = "with diffusers: pipe.load_lora_weights(), pipe.fuse_lora(), pipe.save_pretrained()"


class Modules(NamedTuple):
    """The modules of one model that an adapter changes: ``parts`` has the key of each tensor by module and part."""

    layout: Layout
    label: str
    parts: Mapping[str, Parts]

    @property
    def model(self) -> str:
        """The model of the pipeline: "unet" also for a diffusion transformer, and without a label."""
        return MODELS.get(self.label, "unet")

    @property
    def dotless(self) -> bool:
        """Whether names have "_" for dots."""
        return self.layout == "kohya"

    def form(self, module: str) -> str:
        """Return the form in which a name is compared; text encoders lack ``text_model`` since transformers 5."""
        name = module.replace(".", "_") if self.dotless else module
        return name if self.model == "unet" else name.removeprefix("text_model_" if self.dotless else "text_model.")


def is_of_pipeline(keys: Collection[str]) -> bool:
    """Return whether kohya or diffusers wrote these keys: all name a model of a pipeline, some a matrix."""
    return all(map(_MODEL.match, keys)) and any(map(_PART.match, keys))


def modules(
    keys: Collection[str], prefix: str = "", stored: Callable[[str], StoredTensor] | None = None
) -> list[Modules]:
    """Return the modules of each model that an adapter with these keys changes; ``prefix`` was removed from the keys.

    ``stored`` returns a tensor. Raise RefusedError for an unknown key, for several adapters, for a part without its
    partner, and for different tensors with one meaning.
    """
    found: dict[tuple[Layout, str], dict[str, dict[str, str]]] = {}
    adapters: set[str] = set()
    for key in keys:
        trained = [key.replace(_ORIGINAL, by) for by in (".", ".modules_to_save.default.")] if _ORIGINAL in key else []
        if key in PROJECTIONS or any(name in keys for name in trained):  # shared, or the base's own values
            continue
        which, module, part, adapter = _read(prefix + key)
        adapters.add(adapter)
        known = found.setdefault(which, {}).setdefault(module, {}).setdefault(part, key)
        if known != key and len(adapters - {""}) < 2 and not (stored and stored(key).equals(stored(known))):
            raise RefusedError(f"{quoted(key)} and {quoted(known)} mean the same tensor")
    if len(adapters - {""}) > 1:
        raise RefusedError(f"it holds several adapters: {join_limited(sorted(adapters - {''}))}")
    if not found:
        raise RefusedError("it holds no tensor that changes a weight: the file is incomplete")
    for parts in (each for modules in found.values() for each in modules.values()):
        lacking = {DOWN: "partner lora_B", UP: "partner lora_A"} if (DOWN in parts) is not (UP in parts) else {}
        lacking |= {"alpha": "matrices beside it"} if parts.keys() == {"alpha"} else {}
        if alone := next((part for part in lacking if part in parts), ""):
            what = f"{quoted(parts[alone])} has no {lacking[alone]}: the file is incomplete"
            raise RefusedError(what, next="get the file again")
    return [Modules(*which, parts) for which, parts in found.items()]


class Inside(NamedTuple):
    """The keys of a model with adapters inside: ``base`` maps the keys of the model to its own names.

    ``adapters`` maps the name of each adapter to its keys, and these to the names that PEFT saves. PEFT keeps the
    weight of a module ``X`` as ``X.base_layer.weight``, and the matrices as ``X.lora_A.NAME.weight``.
    ``X.modules_to_save.NAME.weight`` replaces ``X.original_module.weight``.
    """

    base: Mapping[str, str]
    adapters: Mapping[str, Mapping[str, str]]

    @property
    def words(self) -> str:
        """The names of the adapters."""
        return join_limited([quoted(name) for name in self.adapters])


def inside(keys: Collection[str]) -> Inside | None:
    """Return the adapters inside a model with these keys, or None."""
    if not any(".base_layer." in key for key in keys):
        return None
    base: dict[str, str] = {}
    adapters: dict[str, dict[str, str]] = {}
    for key in keys:
        bare = _PREFIX.sub("", key, count=1)
        saved, match = _SAVED.match(bare), _PART.match(bare)
        if saved:
            adapters.setdefault(saved["name"], {})[key] = PEFT_PREFIX + saved["module"] + saved["rest"]
        elif match and (match["matrix"] or match["peft"] not in (None, "modules_to_save")):
            last = f".{match['last']}" if match["last"] and match["peft"] != "lora_magnitude_vector" else ""
            name, end = match["name"] or match["adapter"] or "", match.end("matrix" if match["matrix"] else "peft")
            adapters.setdefault(name, {})[key] = PEFT_PREFIX + bare[:end] + last
        else:
            base[key] = _WRAPPED.sub("", bare)
    # A saved adapter has keys without its name. It may hold some tensors of its base.
    return Inside(base, adapters) if adapters and "" not in adapters else None


def _read(key: str) -> tuple[tuple[Layout, str], str, str, str]:
    """Return the layout and the label of the model, the module, the part, and the adapter's name, for a key.

    The label is the model's name in a pipeline, "" for PEFT. The part is PEFT's name of it, with its end for matrices
    ("lora_A.weight"), "alpha", or "copy.END" for a tensor that replaces another. Only a raw state dict of PEFT names
    the adapter. Raise RefusedError if the key is not known.
    """
    start = _MODEL.match(key)
    is_peft, bare = key.startswith(PEFT_PREFIX), start["rest"] if start else key.removeprefix(PEFT_PREFIX)
    match = _PART.match(bare)
    if match is None or (is_peft and match["own"]):
        if not is_peft or adapter_keys([bare]):
            raise RefusedError(UNKNOWN.format(quoted(bare if is_peft else key)))
        module, _, last = bare.rpartition(".")
        return ("peft", ""), module, f"copy.{last}", ""
    layout: Layout = "bare" if start else "peft"
    label, module, last, old = "unet" if start else "", match["module"], match["last"] or "weight", match["old"]
    if start and (name := start["kohya"] or start["other"]):
        layout, label, module = "kohya", name, module.strip("_")
    elif start and (name := start["diffusers"] or start["comfyui"]):
        layout, label = "diffusers", name
    if old and module.endswith((".processor.qkv", ".processor.proj")):
        module += old  # of XLabs: the number says which stream the processor is for
    elif not is_peft:
        before, dot, end = module.replace(".processor.", ".").removesuffix(".processor").rpartition(".")
        renamed = (_OLD_UNET if MODELS.get(label, "unet") == "unet" else _OLD_TEXT) if old else {}
        module = before + dot + renamed.get(end, end)
    if match["matrix"] or match["base"] or match["peft"] == "modules_to_save":
        part = f"{_MATRICES.get(match['matrix'], 'copy')}.{last}"
    elif "magnitude" in (part := match["peft"] or match["own"]) or part == "dora_scale":
        part = NORMS
    elif match["own"]:
        part += f".{last}" if match["last"] else ""
    return (layout, label), module, part.removeprefix("token_adapter."), match["name"] or match["adapter"] or ""
