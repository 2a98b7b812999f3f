"""The files of a Hugging Face folder: weights, their index, and companion files; the family of a model.

Sources: transformers (``modeling_utils``: which weights are loaded from a folder), huggingface_hub
(``serialization/_torch.py``: how shards and their index are written), peft and accelerate (names of companion files).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatch
from functools import cache
from itertools import islice
from typing import Any, Final

from ...base.errors import MalformedError, RefusedError
from ...base.lazy import regex, table
from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...base.suffixes import WEIGHTS
from ...base.text import quoted
from ...files.sources import JOURNAL, Source
from ..safetensors.header import strict_json
from .numbered import shards_of_folder

#: Weight file names before the suffix, in load order. Other names come last.
_STEMS: Final = ("model", "pytorch_model", "adapter_model", "diffusion_pytorch_model")
#: Single weight files as (stem, suffix).
_SINGLE: Final = (
    *((stem, "safetensors") for stem in ("model", "adapter_model", "diffusion_pytorch_model")),
    *((stem, "bin") for stem in ("pytorch_model", "adapter_model", "diffusion_pytorch_model")),
)
#: The endings of all such files, alone or in shards.
_WEIGHTS: Final = (".safetensors", ".bin")
#: A name that from_pretrained builds for ``variant=``, such as ``model.fp16``.
_VARIANT: Final = regex(rf"({'|'.join(_STEMS)})\.([\w-]+)\Z")
#: The variant precedes the number, or follows it in folders of older diffusers versions.
_SHARD: Final = regex(r"(.+)-(\d{5})-of-(\d{5})(?:\.([\w-]+))?\.(safetensors|bin)\Z")
#: One rank's pieces, written by ``HuggingFaceStorageWriter``: see ``ranks``.
_OF_RANK: Final = regex(r"shard-\d{5}-model-")
_INDEXED: Final = regex(r"(.+)\.(safetensors|bin)\.index(?:\.([\w-]+))?\.json\Z")
#: A string of JSON, and the string that it has as a value.
_STRINGS: Final = regex(r'("(?:[^"\\]|\\.)*")(?:(\s*:\s*)("(?:[^"\\]|\\.)*"))?')
#: The most bytes of an index that are read: 100 for each of a million names.
_MAX_INDEX: Final = 100_000_000

#: Suffixes of the companions that describe a model.
_OF_MODEL: Final = (".json", ".txt", ".model", ".jinja", ".md")
#: The settings of an adapter, which PEFT reads beside ``adapter_model``.
ADAPTER_CONFIG: Final = "adapter_config.json"
#: Files that prove the folder to be one checkpoint, even with a single weight file.
_SURE: Final = ("config.json", ADAPTER_CONFIG, "trainer_state.json", "training_args.bin")
_CHECKPOINTS: Final = (*WEIGHTS, ".tar", ".distcp", ".gguf", ".onnx")


class Weights(NamedTuple):
    """The weights of a folder. ``files`` are the weight files that exist; ``index_name`` is "" without an index.

    - ``shards``: the number of shards by the file names, 0 for a single file.
    - ``others``: weights in the same folder that are not loaded.
    - ``stem``: "" for shards with other names, such as torchtune's.
    - ``variant``: the ``variant`` argument of from_pretrained, such as "fp16", or "".
    - ``absent``: shards missing by the file names, if there is no index.
    """

    suffix: str
    index_name: str
    files: tuple[str, ...]
    shards: int
    others: tuple[str, ...]
    stem: str
    variant: str
    absent: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether the names of the shards say that they are one complete set."""
        return len(self.files) == self.shards > 0 and not _absent(self.files, self.shards)

    @property
    def name(self) -> str:
        """The file that represents the weights: the index, or the first weight file."""
        return self.index_name or self.files[0]


class Index(NamedTuple):
    """A shard index: the file of each tensor, in order, and the total size in bytes, -1 if not given. ``described``
    tells whether there is a "metadata" object; without one transformers raises KeyError (``get_checkpoint_shard_files``
    in utils/hub.py)."""

    files: Mapping[str, str]
    total: int
    described: bool


def is_checkpoint(names: Collection[str]) -> bool:
    """Return whether a folder is one checkpoint by its file names. A single weight file must be the only one, unless a
    file such as config.json proves it."""
    weights = weights_of(names)
    if weights is None:
        return False
    if weights.index_name or weights.shards or any(name in names for name in _SURE):
        return True
    own = {*weights.files, *weights.others}
    return not any(name.endswith(_CHECKPOINTS) and name not in own and not _description(name) for name in names)


def is_index(name: str) -> bool:
    """Return whether a file has the name of a shard index."""
    return bool(_INDEXED.match(os.path.basename(name)))


def index_name(stem: str, suffix: str, variant: str = "") -> str:
    """Return the name of a shard index."""
    return f"{stem}.{suffix}.index{variant and '.' + variant}.json"


def weights_of(names: Collection[str], index: str = "") -> Weights | None:
    """Return the weights that transformers loads from a folder, or None if there are none. Weights without a variant
    come first, then safetensors, then single files before shards. ``index`` is an index that the user named instead."""
    variants = any(name in names for name in _SURE)
    ordered = sorted(name for name in names if name.endswith(_WEIGHTS))
    candidates = [weights for name in ordered if (weights := _single_file(name, variants)) is not None]
    shards: dict[tuple[str, str, str], list[str]] = {}
    counts: dict[tuple[str, str, str], int] = {}
    for name in ordered:
        match = _SHARD.match(name)
        if match and not _OF_RANK.match(name):
            stem, variant = _split_variant(match[1])
            family = (stem, match[5], match[4] or variant)
            shards.setdefault(family, []).append(name)
            counts[family] = max(counts.get(family, 0), int(match[3]))
    indexes = [match for name in names if name.endswith(".json") and (match := _INDEXED.match(name))]
    indexed = {(match[1], match[2], match[3] or "") for match in indexes}
    for stem, suffix, variant in sorted(shards.keys() | indexed):
        family = (stem, suffix, variant)
        name, files = index_name(*family), tuple(shards.get(family, ()))
        own = name if name in names else ""
        absent = () if own or not files else _absent(files, counts[family])
        candidates.append(Weights(suffix, own, files, counts.get(family, 0), (), stem, variant, absent))
    known = {file for item in candidates for file in item.files}
    for parts in reversed(shards_of_folder(names)):  # the last of several epochs
        files = tuple(parts.files.values())
        if known.isdisjoint(files):
            suffix, absent = files[0].rpartition(".")[2], tuple(parts.missing)
            candidates.append(Weights(suffix, "", files, len(parts.every), (), "", "", absent))
    candidates.sort(key=_load_order)
    chosen = next((item for item in candidates if not index or item.index_name == index), None)
    return chosen and chosen._replace(others=tuple(item.name for item in candidates if item is not chosen))


def _absent(files: Collection[str], count: int) -> tuple[str, ...]:
    head, of, tail = next(iter(files)).rpartition("-of-")
    every = (f"{head[:-5]}{number:05d}{of}{tail}" for number in range(1, count + 1))
    return tuple(islice((name for name in every if name not in files), LIMITS.listed))


def _single_file(name: str, variants: bool) -> Weights | None:
    """Return single-file weights, or None for another file. ``variants`` allows names with a variant."""
    whole, _, suffix = name.rpartition(".")
    stem, variant = _split_variant(whole) if variants and not _SHARD.match(name) else (whole, "")
    return Weights(suffix, "", (name,), 0, (), stem, variant) if (stem, suffix) in _SINGLE else None


def _split_variant(stem: str) -> tuple[str, str]:
    match = _VARIANT.match(stem)
    return (match[1], match[2]) if match else (stem, "")


def _load_order(weights: Weights) -> tuple[bool, bool, bool, int, bool, str]:
    stem = _STEMS.index(weights.stem) if weights.stem in _STEMS else len(_STEMS)
    order = not weights.stem, bool(weights.variant), weights.suffix != "safetensors", stem
    return *order, bool(weights.index_name or weights.shards), weights.name * bool(weights.stem)


def side_files(names: Collection[str]) -> list[tuple[str, str]]:
    """Return the known companion files as (name, description)."""
    return [(name, text) for name in sorted(names) if (text := _description(name))]


def companions(names: Collection[str]) -> list[str]:
    """Return the files to copy with the weights: configuration, tokenizer, optimizer, code, texts. Other weights are
    excluded, and so are unknown files that may hold weights."""
    return [name for name in sorted(names) if not name.startswith(".") and _is_companion(name)]


def model_files(names: Collection[str]) -> list[str]:
    """Return the companions that describe a model: configuration, tokenizer, texts."""
    return [name for name in companions(names) if name.endswith(_OF_MODEL)]


def _is_companion(name: str) -> bool:
    if name.endswith((".safetensors", ".distcp", JOURNAL)) or is_index(name):
        return False
    return bool(_description(name)) or not name.endswith(tuple(_companions()["may_be_weights"].split()))


@cache
def _companions() -> dict[str, Any]:
    return table("formats/names/companions")


def _description(name: str) -> str:
    known = _companions()["side_files"].items()
    return next((text for text, patterns in known if any(fnmatch(name, each) for each in patterns.split())), "")


def read_index(source: Source) -> Index:
    """Read an index; raise MalformedError with the violated rule. All files that it names must be in its own folder."""
    path = source.name
    if source.size > _MAX_INDEX:
        raise _broken(path, f"it has {source.size:,} bytes, {_MAX_INDEX:,} are the most")
    try:
        value: Any = strict_json(source.read(0, source.size), "it")
    except ValueError as error:
        raise _broken(path, str(error)) from None
    files = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise _broken(path, "weight_map must name the file of every tensor")
    match = _INDEXED.match(os.path.basename(path))
    suffix = match[2] if match else ""
    for file in set(files.values()):
        if file != os.path.basename(file) or "\\" in file or "\0" in file or file in ("", ".", ".."):
            raise _broken(path, f"it names {quoted(file)}, which is not the name of a file in its folder")
        if not file.endswith("." + suffix):
            raise _broken(path, f"it names {quoted(file)}, which is not a .{suffix} file")
    metadata = value.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers store the size as a float or as a string. A string counts as unknown.
    total = int(total) if isinstance(total, int | float) and 0 <= total < 1 << 63 else -1
    return Index(files, total, isinstance(metadata, dict))


def renamed_in_index(source: Source, file: str, names: Mapping[str, str]) -> bytes | None:
    """Return an index in which tensors of a file have their new names; everything else is unchanged, byte for byte.
    ``names`` maps old names to new ones. Return None if the index has none of them in that file. Raises RefusedError if
    another tensor has a new name, MalformedError as ``read_index`` does."""
    files, index = read_index(source).files, os.path.basename(source.name)
    moved = {old: new for old, new in names.items() if files.get(old) == file}
    taken = next((new for new in moved.values() if new in files and new not in moved), None)
    if taken is not None:
        what = f"{index} names a tensor {quoted(taken)} already, in {files[taken]}"
        raise RefusedError(what, path=source.name, next="choose another name")
    if not moved:
        return None
    text = source.read(0, source.size).decode()

    def renamed(match: re.Match[str]) -> str:
        key, colon, value = match.groups()
        name = moved.get(json.loads(key)) if value and json.loads(value) == file else None
        return match[0] if name is None else json.dumps(name, ensure_ascii=text.isascii()) + colon + value

    return _STRINGS.sub(renamed, text).encode()


def _broken(path: str, rule: str) -> MalformedError:
    what = f"{os.path.basename(path)} is not a valid index of shards: {rule}"
    return MalformedError(what, next="get the index again")  # the caller adds the path of the folder


#: Keys that are looked at; every family shows within its first layers.
_LOOKED_AT: Final = 4_000
_NUMBER: Final = regex(r"\.\d+(?=\.)")


def family_of_model(names: Iterable[str]) -> str:
    """Return the family of a model with these keys, such as "GPT-2", or "" if the names show none."""
    text = _NUMBER.sub(".#", "." + "\n.".join(islice(names, _LOOKED_AT)))
    rows = table("formats/names/families")["families"]
    return next((family for family, *parts in rows if all(part in text for part in parts)), "")
