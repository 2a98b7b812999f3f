"""The names and the layout that tensors of GGUF had before they were converted; ``names.toml`` has the table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from ...base.errors import MalformedError
from ...base.text import pluralize, quoted
from ...checkpoint.container import Original

#: The architectures of ``names.toml``, which need not be read for others, and the entries that each needs in llama.cpp
#: (``load_hparams`` and ``load_vocab``).
KNOWN: Final = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "phi3")
_NEEDED: Final = ("context_length", "embedding_length", "block_count", "attention.layer_norm_rms_epsilon")
_TOKENIZER: Final = "tokenizer.ggml.model"


@cache
def _table() -> Mapping[str, Any]:
    from ...base import toml  # most commands need no names of other programs
    from ...files.archives import read_bytes

    path = os.path.join(os.path.dirname(__file__), "names.toml")
    return toml.parsed(read_bytes(path, 1 << 20), path, "the table of names")


def originals(values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Sequence[Original]]:
    """Return the tensors from which a converter made those with these shapes; {} for an unknown architecture.

    ``values`` are the entries of the metadata. Tensors that the table does not have are left out. Raise MalformedError
    if the number of heads does not fit a tensor.
    """
    architecture = values.get("general.architecture")
    if architecture not in KNOWN:
        return {}
    own = _table()[architecture]
    names = {**_table()["all"]["names"], **own.get("names", {})}
    found: dict[str, Sequence[Original]] = {}
    for name, shape in shapes.items():
        base, _, end = name.rpartition(".")
        form, numbers = _form(base)
        wanted = names.get(form) if end in ("weight", "bias") else None
        if wanted is None:
            continue
        before = Original(f"{wanted.format(**{'e': '{e}', **numbers})}.{end}")
        if entry := own.get("interleaved", {}).get(form):
            before = before._replace(heads=_heads(values, f"{architecture}.{entry}", numbers["L"], name, shape))
        if name.endswith("norm.weight"):
            before = before._replace(added=own.get("added", 0.0))
        stack = "{e}" in before.name
        parts = range(shape[0]) if stack and shape else ()
        found[name] = [before._replace(name=before.name.format(e=n), part=n) for n in parts] if stack else [before]
    return found


def _form(base: str) -> tuple[str, dict[str, str]]:
    """Return a name with {L} and {e} in place of its numbers, and the numbers."""
    parts, numbers = base.split("."), dict[str, str]()
    for place, letter in ((1, "L"), (3, "e")):
        if parts[0] == "blk" and len(parts) > place and parts[place].isdecimal():
            numbers[letter], parts[place] = parts[place], f"{{{letter}}}"
    return ".".join(parts), numbers


def _heads(values: Mapping[str, Any], entry: str, layer: str, name: str, shape: tuple[int, ...]) -> int:
    """Return the number of heads in a tensor: one for all layers, or one for each."""
    number = values.get(entry, values.get(entry.removesuffix("_kv")))
    if isinstance(number, list):
        number = number[int(layer)] if int(layer) < len(number) else None
    if type(number) is not int or number < 1 or not shape or shape[0] % (2 * number):
        state = "is missing" if number is None else f"is {quoted(str(number))}"
        rows = pluralize(shape[0] if shape else 1, "row")
        what = f"{entry} {state}, and must tell how the {rows} of {quoted(name)} are ordered"
        raise MalformedError(what, where=name)
    return number


def lacking(values: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the entries and tensors that llama.cpp needs for a known architecture and that are not there."""
    architecture = values.get("general.architecture")
    if architecture not in KNOWN or values.get("general.type", "model") != "model":
        return []
    entries = [f"{architecture}.{name}" for name in _NEEDED] + [_TOKENIZER]
    entries += ["tokenizer.ggml.tokens"] if values.get(_TOKENIZER) != "none" else []
    lacks = [entry for entry in entries if entry not in values]
    layers: dict[str, set[str]] = {}
    for name in names:
        _, numbers = _form(name)
        if "L" in numbers:
            layers.setdefault(numbers["L"], set()).add(name.split(".", 2)[2])
    number = values.get(f"{architecture}.block_count")
    if names and "token_embd.weight" not in names:
        lacks.append("token_embd.weight")
    if names and type(number) is int and number > len(layers):
        lacks.append(f"{number - len(layers):,} of {pluralize(number, 'layer')}")
    every = {*()}.union(*layers.values())
    return lacks + [f"blk.{layer}.{name}" for layer, own in layers.items() for name in sorted(every - own)]
