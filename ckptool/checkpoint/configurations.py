"""Read the configurations of a model that lie beside its weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..base.addresses import is_remote
from ..files.archives import parsed_object, read_object
from ..files.sources import FolderSource
from .checkpoint import Checkpoint

#: The fields of a configuration that describe the quantization.
CONFIG_FIELDS: Final = ("quantization_config", "compression_config")
#: Files that hold the configuration of the quantization, apart from config.json.
OTHER_CONFIGS: Final = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


def values_of(config: object, *names: str, depth: int = 5) -> Iterator[Any]:
    """Yield the values of fields with these names in a configuration, and in those inside it."""
    for name, value in config.items() if isinstance(config, Mapping) else ():
        if name in names and value is not None:
            yield value
        elif isinstance(value, Mapping) and depth:
            yield from values_of(value, *names, depth=depth - 1)


def configurations(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return the objects in config.json and OTHER_CONFIGS beside the weights, by name; edits may have changed them."""
    source, names = checkpoint.source, ("config.json", *OTHER_CONFIGS)
    beside = {os.path.basename(path): path for path in source.beside} if isinstance(source, FolderSource) else {}
    if not beside and not is_remote(checkpoint.path):
        folder = os.path.dirname(checkpoint.path)
        beside = {name: path for name in names if os.path.isfile(path := os.path.join(folder, name))}
    edited = {name: parsed_object(checkpoint.companions[name]) for name in names if name in checkpoint.companions}
    objects = {name: read_object(beside[name]) for name in names if name in beside and name not in edited} | edited
    return {name: found for name, found in objects.items() if found}


def quantization_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the configuration of the quantization, from the files beside the weights; empty without one."""
    objects = configurations(checkpoint)
    fields = values_of(objects.pop("config.json", None), *CONFIG_FIELDS)
    if found := next((item for item in fields if isinstance(item, dict)), None):
        return {**({"quant_method": "modelopt"} if "quant_algo" in found else {}), **found}
    for other in objects.values():
        method = "modelopt" if "quantization" in other else "awq" if "w_bit" in other else "gptq"
        return {"quant_method": method, **other}
    return {}
