"""Which files of a Hugging Face folder are its weights, what its index says, and what the other files are.

Sources: transformers (``modeling_utils``: which weights a folder is loaded from), huggingface_hub
(``serialization/_torch.py``: how shards and their index are written), peft and accelerate for names beside them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from typing import Any, Final, NamedTuple

from ..errors import MalformedError
from ..human import shown
from ..source import open_source

__all__ = ["INDEX", "Index", "Weights", "read_index", "side_files", "sniff", "weights_of"]

#: How the name of an index ends.
INDEX: Final = ".index.json"
#: Names of weights before the suffix, in the order in which a folder is loaded from them; then any other.
_STEMS: Final = ("model", "pytorch_model", "adapter_model", "diffusion_pytorch_model")
_SINGLE: Final = tuple(
    f"{stem}{suffix}"
    for stem, suffix in (
        ("model", ".safetensors"),
        ("adapter_model", ".safetensors"),
        ("diffusion_pytorch_model", ".safetensors"),
        ("pytorch_model", ".bin"),
        ("adapter_model", ".bin"),
        ("diffusion_pytorch_model", ".bin"),
    )
)
_SHARD: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)\Z")
_INDEXED: Final = re.compile(r"(.+)\.(safetensors|bin)\.index\.json\Z")
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
    "global_step*": "a DeepSpeed checkpoint, a part a rank",
    "zero_to_fp32.py": "DeepSpeed's script",
}
#: What such a folder holds for sure, so that weights in one file beside it are its own.
_SURE: Final = ("config.json", "adapter_config.json", "trainer_state.json", "training_args.bin")
_CHECKPOINTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".tar", ".th", ".distcp", ".gguf", ".onnx")


class Weights(NamedTuple):
    """The weights of a folder: ``index_name`` is "" where there is none, ``files`` those that the names alone tell.

    ``shards`` is the number of shards that their names speak of, 0 for a single file. ``others`` are weights of the
    same folder that are passed over for these.
    """

    suffix: str
    index_name: str
    files: tuple[str, ...]
    shards: int
    others: tuple[str, ...]


class Index(NamedTuple):
    """An index: the file of each tensor in its order, and the bytes that it speaks of, -1 where it does not."""

    files: Mapping[str, str]
    total: int


class _Doubled(Exception):
    """A JSON object has a name twice."""


def sniff(names: Collection[str]) -> bool:
    """Is a folder one checkpoint, by the names of its files? A single file of weights must not stand among others."""
    found = weights_of(names)
    if found is None:
        return False
    if found.index_name or found.shards or any(name in names for name in _SURE):
        return True
    own = {*found.files, *found.others}
    return not any(name.endswith(_CHECKPOINTS) and name not in own and not _words(name) for name in names)


def weights_of(names: Collection[str], index: str = "") -> Weights | None:
    """The weights that transformers loads a folder from: safetensors first, and a single file before shards.

    ``index`` is the one that somebody named instead.
    """
    found: list[Weights] = [Weights(_suffix(name), "", (name,), 0, ()) for name in _SINGLE if name in names]
    shards: dict[tuple[str, str], list[str]] = {}
    counts: dict[tuple[str, str], int] = {}
    for name in sorted(names):
        match = _SHARD.match(name)
        if match:
            family = (match[1], match[4])
            shards.setdefault(family, []).append(name)
            counts[family] = max(counts.get(family, 0), int(match[3]))
    indexed = {(match[1], match[2]) for match in map(_INDEXED.match, names) if match}
    for stem, suffix in sorted(shards.keys() | indexed):
        name = f"{stem}.{suffix}{INDEX}"
        files = tuple(shards.get((stem, suffix), ()))
        found.append(Weights(suffix, name if name in names else "", files, counts.get((stem, suffix), 0), ()))
    found.sort(key=_rank)
    chosen = next((item for item in found if item.index_name == index), None) if index else next(iter(found), None)
    if chosen is None:
        return None
    passed = tuple((item.index_name or item.files[0]) for item in found if item is not chosen)
    return chosen._replace(others=passed)


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


def _rank(weights: Weights) -> tuple[bool, int, bool]:
    name = weights.index_name or weights.files[0]
    stem = next((number for number, stem in enumerate(_STEMS) if name.startswith((f"{stem}.", f"{stem}-"))), 9)
    return weights.suffix != "safetensors", stem, bool(weights.index_name or weights.shards)


def side_files(names: Collection[str]) -> list[tuple[str, str]]:
    """The files beside the weights that are known, each with what it is."""
    return [(name, words) for name in sorted(names) if (words := _words(name))]


def _words(name: str) -> str:
    return next((words for pattern, words in _BESIDE.items() if fnmatch(name, pattern)), "")


def read_index(path: str) -> Index:
    """Read an index; raises MalformedError with what is wrong about it.

    A file that it names must be in its own folder: an index that leads out of it is refused.
    """
    source = open_source(path)
    try:
        if source.size > _MOST_INDEX:
            raise _broken(path, f"it has {source.size:,} bytes, {_MOST_INDEX:,} are the most")
        raw = source.read(0, source.size)
    finally:
        source.close()
    try:
        told: Any = json.loads(raw.decode("utf-8"), object_pairs_hook=_once)
    except _Doubled as error:
        raise _broken(path, f"the name {shown(str(error))} stands in it twice") from None
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"it is no JSON: {error}") from None
    files = told.get("weight_map") if isinstance(told, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise _broken(path, "weight_map must say the file of every tensor")
    suffix = path.removesuffix(INDEX).rpartition(".")[2]
    for file in set(files.values()):
        if file != os.path.basename(file) or "\\" in file or "\0" in file or file in ("", ".", ".."):
            raise _broken(path, f"it leads to {shown(file)}, which is no name of a file in its folder")
        if not file.endswith("." + suffix):
            raise _broken(path, f"it leads to {shown(file)}, which is no .{suffix} file")
    metadata = told.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers have it as a float, and some as text.
    return Index(files, int(total) if isinstance(total, int | float) and 0 <= total < 1 << 63 else -1)


def _broken(path: str, rule: str) -> MalformedError:
    return MalformedError(f"no valid index of shards: {rule}", path=path, next="get the index again")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        raise _Doubled(next(name for name, _ in pairs if name in seen or seen.add(name)))  # type: ignore[func-returns-value]
    return found
