"""Update the ``config.json`` of a Hugging Face folder when edits of the weights contradict it.

Field names come from transformers: https://huggingface.co/docs/transformers/main_classes/configuration
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..base.errors import RefusedError
from ..base.lazy import regex
from ..base.records import NamedTuple
from ..base.text import join_limited, words
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.survey import Survey
from ..files.archives import parsed_object
from ..files.folders import open_folder
from ..files.sources import FolderSource
from ..formats.opening import takes_path

CONFIG: Final = "config.json"
#: Maximum bytes read from a config, and maximum depth of nested configs.
_LONGEST: Final = 16_000_000
_DEEPEST: Final = 4
#: Fields that give the number of layers in a list of modules.
_LAYERS: Final = words(
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers num_encoder_layers"
)
_DTYPES: Final = ("dtype", "torch_dtype")
_FLOATS: Final = words("float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2")
#: Names of token embeddings and of heads.
EMBEDDING: Final = regex(
    r"(?:\A|\.)(?:embed_tokens|wte|word_embeddings?|shared|embed_in|tok_embeddings|tokens_embed|token_embeddings?)"
    r"\.weight\Z"
)
HEAD: Final = regex(
    r"(?:(?:\A|\.)(?:(?:generator_)?lm_head(?:\.decoder)?|embed_out|output_layer|cls\.predictions\.decoder)|\A(?:(?:model\.)?output|proj_out))"
    r"\.weight\Z"
)
#: Modules that look up rows, by their last name: PEFT gives their matrices other names, and multiplies the transpose.
LOOKUP: Final = regex(
    r"(?:embed(?:ding|dings|_tokens|_positions|_in)?|_embeddings?|wte|wpe|shared|relative_attention_bias)\Z"
)
#: Words that name a part of a model, in fields and in keys.
_PARTS: Final = (("encoder",), ("decoder",), ("vision", "visual"), ("audio", "speech"))
_NUMBER: Final = regex(r"(?:\A|\.)(\d+)(?=\.)")


class Untrue(NamedTuple):
    """A ``config.json`` field that the weights contradict: its path, its value, and the value that would be true."""

    field: str
    old: Any
    new: Any


class Reading(NamedTuple):
    """The facts that weights reveal about a model.

    ``layers`` has the module numbers in each list of modules, ``dtype`` covers the most bytes, ``vocabulary`` is the
    number of rows of the token embedding (0 without one), and ``head`` says whether there is a separate head.
    """

    layers: Mapping[str, frozenset[int]]
    dtype: str
    vocabulary: int
    head: bool


@takes_path
def update_config(checkpoint: Checkpoint) -> Checkpoint:
    """Update the ``config.json`` of a Hugging Face folder after edits; it is written beside the weights.

    Updated are the number of layers, the dtype, the vocabulary size, and whether the head is tied to the embedding, if
    they agreed with the weights before the edits and disagree now. Raise RefusedError if there is no ``config.json``,
    or if layers are missing in the middle, because no config describes that.

    >>> edited = ckptool.update_config(ckptool.drop("hub", ["block.1.*"]))
    >>> edited.changes[-1].words
    'config.json: n_layer 2 -> 1'
    """
    if config_of(checkpoint) is None:
        raise RefusedError(f"there is no {CONFIG} beside its weights", path=checkpoint.path)
    gaps = missing_layers(checkpoint)
    if gaps:
        step = "drop the last layers instead, or rename the later ones so that the numbers have no gap"
        what = f"layers after {join_limited(gaps, most=3)} stay: transformers would make new ones in their place"
        raise RefusedError(what, path=checkpoint.path, next=step)
    return _written(checkpoint, untrue_fields(checkpoint), "update-config", CONFIG)


def with_vocabulary(checkpoint: Checkpoint, old: int, new: int) -> Checkpoint:
    """Change the vocabulary size in the ``config.json`` of a folder, if there is one that says ``old``."""
    config = config_fields(checkpoint)
    sizes = (Reading({}, "", size, head=False) for size in (old, new))
    return _written(checkpoint, [*_contradictions(config, "", *sizes)], "resize", f"{CONFIG} of an output folder")


def _written(checkpoint: Checkpoint, found: Sequence[Untrue], edit: str, title: str) -> Checkpoint:
    config: Any = config_fields(checkpoint)
    if not found:
        return checkpoint
    for item in found:
        *outer, name = item.field.split(".")
        inner = config
        for step in outer:
            inner = inner[step]
        inner[name] = item.new
    written = json.dumps(config, indent=2) + "\n"
    what = f"{title}: " + ", ".join(f"{each.field} {json.dumps(each.old)} -> {json.dumps(each.new)}" for each in found)
    change = Change(edit, "", len(found), 0, what)
    beside = {**checkpoint.companions, CONFIG: written.encode()}
    return checkpoint.replace(companions=beside, changes=(*checkpoint.changes, change))


def config_of(checkpoint: Checkpoint) -> str | None:
    """Return the text of the folder's ``config.json``, with earlier updates, or None without such a file."""
    source = checkpoint.source
    if CONFIG in checkpoint.companions:
        return checkpoint.companions[CONFIG].decode()
    paths = source.beside if isinstance(source, FolderSource) else ()
    path = next((path for path in paths if os.path.basename(path) == CONFIG), "")
    folder = open_folder(os.path.dirname(path))
    if not path or folder.size(CONFIG) is None:
        return None
    return folder.read(CONFIG, _LONGEST).decode(errors="replace")


def config_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the fields of the folder's ``config.json``, with earlier updates; empty without such an object."""
    return parsed_object(config_of(checkpoint) or "{}") or {}


def untrue_fields(checkpoint: Checkpoint) -> list[Untrue]:
    """Return the ``config.json`` fields that the edits made untrue; empty if there is no such file."""
    config = config_fields(checkpoint) if checkpoint.edited else {}
    if not config:
        return []
    before = _reading(Checkpoint.of(checkpoint.path, checkpoint.source, checkpoint.container).survey)
    after = _reading(checkpoint.survey)
    if any(change.edit == "to-names" for change in checkpoint.changes):
        # Other names do not say how many layers there are, and a config.json is for those that it was made for.
        before, after = (Reading({}, each.dtype, 0, head=False) for each in (before, after))
    return list(_contradictions(config, "", before, after))


def missing_layers(checkpoint: Checkpoint) -> list[str]:
    """Return the modules that edits removed from the middle of a list of modules."""
    before = _reading(Checkpoint.of(checkpoint.path, checkpoint.source, checkpoint.container).survey)
    after = _reading(checkpoint.survey)
    gone = []
    for path, numbers in after.layers.items():
        held = before.layers.get(path, frozenset())
        if held == frozenset(range(len(held))) and numbers < held:
            gone += [f"{path}.{number}" for number in sorted(set(range(max(numbers) + 1)) - numbers)]
    return gone


def _reading(survey: Survey) -> Reading:
    layers: dict[str, set[int]] = {}
    sizes: Counter[str] = Counter()
    vocabulary, head = 0, False
    for entry in survey.tensors:
        for match in _NUMBER.finditer(entry.key):
            layers.setdefault(entry.key[: match.start()], set()).add(int(match[1]))
        if entry.tensor.dtype in _FLOATS:
            sizes[entry.tensor.dtype] += entry.tensor.own_bytes
        if not vocabulary and len(entry.tensor.shape) == 2 and EMBEDDING.search(entry.key):
            vocabulary = entry.tensor.shape[0]
        head = head or bool(HEAD.search(entry.key))
    dtype = max(sizes, key=lambda name: sizes[name], default="")
    return Reading({path: frozenset(numbers) for path, numbers in layers.items()}, dtype, vocabulary, head)


def _contradictions(config: Mapping[str, Any], path: str, before: Reading, after: Reading) -> Iterator[Untrue]:
    """Yield the fields that agree with the weights before the edits and disagree after them, at any depth."""
    for name, value in config.items():
        if "." in name:
            continue  # its path would look like a nested field
        if isinstance(value, dict) and path.count(".") < _DEEPEST:
            yield from _contradictions(value, f"{path}{name}.", before, after)
        elif name in _LAYERS and type(value) is int:
            count = _layers_now(path + name, value, before, after)
            if count is not None and count != value:
                yield Untrue(path + name, value, count)
                # Lists with one element per layer, such as layer_types.
                lists = ((other, items) for other, items in config.items() if isinstance(items, list))
                yield from (Untrue(path + other, items, items[:count]) for other, items in lists if len(items) == value)
        elif name in _DTYPES and value == before.dtype and after.dtype not in ("", value):
            yield Untrue(path + name, value, after.dtype)
        elif name == "vocab_size" and value == before.vocabulary and after.vocabulary not in (0, value):
            yield Untrue(path + name, value, after.vocabulary)
        elif name == "tie_word_embeddings" and after.vocabulary and before.head is not value and after.head is value:
            yield Untrue(path + name, value, not value)


def _layers_now(field: str, count: int, before: Reading, after: Reading) -> int | None:
    """Return the number of layers, after the edits, in the list that had ``count`` layers; None if there is no such
    list.

    Among several lists, prefer the one whose part of the model the field names, then one that the edits changed.
    """
    lists = [path for path, numbers in before.layers.items() if numbers == frozenset(range(count))]
    named = [part for part in _PARTS if any(word in field for word in part)]
    # T5 has num_layers for its encoder and num_decoder_layers for its decoder.
    others = [word for part in _PARTS if part not in named for word in part if word != "encoder"]
    lists = [path for path in lists if all(any(word in path for word in part) for part in named)]
    # OPT has layers only in a decoder.
    lists = [path for path in lists if not any(word in path for word in others)] or lists
    counts = []
    for path in lists:
        last = path.rpartition(".")[2]
        # The list may have been renamed: match its last step, or any new list.
        like = (other for other in after.layers if other.rpartition(".")[2] == last or other not in before.layers)
        now = after.layers.get(path) or after.layers.get(next(like, ""))
        counts.append(len(now) if now else 0)
    return next((number for number in counts if number != count), count if counts else None)
