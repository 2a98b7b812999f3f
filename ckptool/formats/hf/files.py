"""Which files of a Hugging Face folder are its weights, what its index says, and what the other files are.

Sources: transformers (``modeling_utils``: which weights a folder is loaded from), huggingface_hub
(``serialization/_torch.py``: how shards and their index are written), peft and accelerate for names beside them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from typing import Any, Final, NamedTuple

from ...base.errors import MalformedError
from ...base.text import shown
from ...files.sources import Source
from ..safetensors.header import DoubledError, strict_json

#: Names of weights before the suffix, in the order in which a folder is loaded from them; then any other.
_STEMS: Final = ("model", "pytorch_model", "adapter_model", "diffusion_pytorch_model")
#: Weights in one file: their stem and suffix.
_SINGLE: Final = (
    *((stem, "safetensors") for stem in ("model", "adapter_model", "diffusion_pytorch_model")),
    *((stem, "bin") for stem in ("pytorch_model", "adapter_model", "diffusion_pytorch_model")),
)
#: A name as ``variant=`` of from_pretrained makes it: ``model.fp16``.
_VARIANT: Final = re.compile(rf"({'|'.join(_STEMS)})\.([\w-]+)\Z")
#: The variant stands before the number, or behind it in folders of older versions of diffusers.
_SHARD: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})(?:\.([\w-]+))?\.(safetensors|bin)\Z")
#: What a rank of ``HuggingFaceStorageWriter`` had: see ``hf_ranks``.
_OF_RANK: Final = re.compile(r"shard-\d{5}-model-")
_INDEXED: Final = re.compile(r"(.+)\.(safetensors|bin)\.index(?:\.([\w-]+))?\.json\Z")
#: Bytes of an index that are read: 100 for each of a million names.
_MOST_INDEX: Final = 100_000_000

#: What stands beside the weights, by patterns of names.
_BESIDE: Final = {
    "optimizer.pt": "the optimizer's state",
    "optimizer.bin": "the optimizer's state",
    "scheduler.pt": "the learning rate schedule",
    "scheduler.bin": "the learning rate schedule",
    "scaler.pt": "the gradient scaler",
    "rng_state*.pth": "random generators",
    "random_states_*.pkl": "random generators",
    "custom_checkpoint_*.pkl": "other objects that accelerate saved",
    "sampler*.bin": "where the data stood",
    "modules.json": "the modules of a sentence-transformers model",
    "training_args.bin": "the trainer's arguments, a pickled class",
    "trainer_state.json": "the trainer's progress",
    "config.json": "the model's configuration",
    "adapter_config.json": "the adapter's configuration",
    "generation_config.json": "how text is generated",
    "tokenizer*": "the tokenizer",
    "special_tokens_map.json": "the tokenizer",
    "vocab.*": "the tokenizer",
    "merges.txt": "the tokenizer",
    "spiece.model": "the tokenizer",
    "preprocessor_config.json": "the preprocessor",
    "sharded": "what each rank had of the same tensors",
    "shard-?????-model-?????-of-?????.safetensors": "what a rank had of the same tensors",
    "global_step*": "a DeepSpeed checkpoint, a part a rank",
    "zero_to_fp32.py": "DeepSpeed's script",
}
#: What such a folder holds for sure, so that weights in one file beside it are its own.
_SURE: Final = ("config.json", "adapter_config.json", "trainer_state.json", "training_args.bin")
_MAY_BE_WEIGHTS: Final = (
    *(
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".tar",
        ".th",
        ".pkl",
        ".h5",
        ".keras",
        ".msgpack",
        ".onnx",
        ".onnx_data",
        ".gguf",
    ),
    *(".npz", ".npy", ".tflite", ".pb", ".ot", ".mlmodel", ".pt2", ".pte", ".ptl", ".zip", ".gz", ".index.json"),
)
_CHECKPOINTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".tar", ".th", ".distcp", ".gguf", ".onnx")


class Weights(NamedTuple):
    """The weights of a folder: ``index_name`` is "" where there is none, ``files`` those that the names alone tell.

    ``shards`` is the number of shards that their names speak of, 0 for a single file. ``others`` are weights of the
    same folder that are passed over for these. ``variant`` is what from_pretrained calls so: "fp16", "" for none.
    """

    suffix: str
    index_name: str
    files: tuple[str, ...]
    shards: int
    others: tuple[str, ...]
    stem: str
    variant: str

    @property
    def name(self) -> str:
        """The file that stands for them: their index, or the first."""
        return self.index_name or self.files[0]


class Index(NamedTuple):
    """An index: the file of each tensor in its order, and the bytes that it speaks of, -1 where it does not.

    ``described`` is whether it has the object "metadata", without which transformers ends with a KeyError
    (``get_checkpoint_shard_files`` in utils/hub.py).
    """

    files: Mapping[str, str]
    total: int
    described: bool


def is_checkpoint(names: Collection[str]) -> bool:
    """Is a folder one checkpoint, by the names of its files? A single file of weights must not stand among others."""
    found = weights_of(names)
    if found is None:
        return False
    if found.index_name or found.shards or _is_sure(names):
        return True
    own = {*found.files, *found.others}
    return not any(name.endswith(_CHECKPOINTS) and name not in own and not _words(name) for name in names)


def _is_sure(names: Collection[str]) -> bool:
    return any(name in names for name in _SURE)


def is_index(name: str) -> bool:
    """Is a file called as an index is?"""
    return bool(_INDEXED.match(os.path.basename(name)))


def index_name(stem: str, suffix: str, variant: str = "") -> str:
    """How the index of shards is called."""
    return f"{stem}.{suffix}.index{variant and '.' + variant}.json"


def weights_of(names: Collection[str], index: str = "") -> Weights | None:
    """The weights that transformers loads a folder from: those of no variant, safetensors first, and a single file
    before shards.

    ``index`` is the one that somebody named instead.
    """
    found = [one for name in sorted(names) if (one := _single(name, _is_sure(names))) is not None]
    shards: dict[tuple[str, str, str], list[str]] = {}
    counts: dict[tuple[str, str, str], int] = {}
    for name in sorted(names):
        match = _SHARD.match(name)
        if match and not _OF_RANK.match(name):
            stem, variant = _parted(match[1])
            family = (stem, match[5], match[4] or variant)
            shards.setdefault(family, []).append(name)
            counts[family] = max(counts.get(family, 0), int(match[3]))
    indexed = {(match[1], match[2], match[3] or "") for match in map(_INDEXED.match, names) if match}
    for stem, suffix, variant in sorted(shards.keys() | indexed):
        family = (stem, suffix, variant)
        name, files = index_name(*family), tuple(shards.get(family, ()))
        own = name if name in names else ""
        found.append(Weights(suffix, own, files, counts.get(family, 0), (), stem, variant))
    found.sort(key=_rank)
    chosen = next((item for item in found if item.index_name == index), None) if index else next(iter(found), None)
    if chosen is None:
        return None
    return chosen._replace(others=tuple(item.name for item in found if item is not chosen))


def _single(name: str, variants: bool) -> Weights | None:
    """Weights in one file. One of a variant is told from any other file by what stands beside it."""
    whole, _, suffix = name.rpartition(".")
    stem, variant = _parted(whole) if variants and not _SHARD.match(name) else (whole, "")
    return Weights(suffix, "", (name,), 0, (), stem, variant) if (stem, suffix) in _SINGLE else None


def _parted(stem: str) -> tuple[str, str]:
    """A stem and its variant, "" for none."""
    match = _VARIANT.match(stem)
    return (match[1], match[2]) if match else (stem, "")


def _rank(weights: Weights) -> tuple[bool, bool, int, bool, str]:
    stem = _STEMS.index(weights.stem) if weights.stem in _STEMS else len(_STEMS)
    sharded = bool(weights.index_name or weights.shards)
    return bool(weights.variant), weights.suffix != "safetensors", stem, sharded, weights.name


def side_files(names: Collection[str]) -> list[tuple[str, str]]:
    """The files beside the weights that are known, each with what it is."""
    return [(name, words) for name in sorted(names) if (words := _words(name))]


def companions(names: Collection[str]) -> list[str]:
    """The files that go with the weights wherever these go: configuration, tokenizer, optimizer, code, texts.

    Not other weights, which would be others than those beside them, nor what nobody knows and may hold some.
    """
    return [name for name in sorted(names) if not name.startswith(".") and _goes_along(name)]


def _goes_along(name: str) -> bool:
    if name.endswith((".safetensors", ".distcp")) or is_index(name):
        return False
    return bool(_words(name)) or not name.endswith(_MAY_BE_WEIGHTS)


def _words(name: str) -> str:
    return next((words for pattern, words in _BESIDE.items() if fnmatch(name, pattern)), "")


def read_index(source: Source) -> Index:
    """Read an index; raises MalformedError with what is wrong about it.

    A file that it names must be in its own folder: an index that leads out of it is refused.
    """
    path = source.name
    if source.size > _MOST_INDEX:
        raise _broken(path, f"it has {source.size:,} bytes, {_MOST_INDEX:,} are the most")
    raw = source.read(0, source.size)
    try:
        told: Any = strict_json(raw.decode("utf-8"))
    except DoubledError as error:
        raise _broken(path, f"the name {shown(str(error))} stands in it twice") from None
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"it is no JSON: {error}") from None
    files = told.get("weight_map") if isinstance(told, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise _broken(path, "weight_map must say the file of every tensor")
    match = _INDEXED.match(os.path.basename(path))
    suffix = match[2] if match else ""
    for file in set(files.values()):
        if file != os.path.basename(file) or "\\" in file or "\0" in file or file in ("", ".", ".."):
            raise _broken(path, f"it leads to {shown(file)}, which is no name of a file in its folder")
        if not file.endswith("." + suffix):
            raise _broken(path, f"it leads to {shown(file)}, which is no .{suffix} file")
    metadata = told.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers have it as a float, and some as text.
    total = int(total) if isinstance(total, int | float) and 0 <= total < 1 << 63 else -1
    return Index(files, total, isinstance(metadata, dict))


def _broken(path: str, rule: str) -> MalformedError:
    what = f"{os.path.basename(path)} is no valid index of shards: {rule}"
    return MalformedError(what, next="get the index again")  # the path is that of the folder
