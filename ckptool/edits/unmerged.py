"""Split the state dict of a PEFT model, which has an unmerged adapter inside, into its base and the adapter.

PEFT keeps the weight of a module ``X`` as ``X.base_layer.weight``, and the matrices of an adapter as
``X.lora_A.NAME.weight``. ``X.modules_to_save.NAME.weight`` replaces ``X.original_module.weight``. Sources: PEFT
(``tuners/tuners_utils.py``, ``utils/other.py``, ``utils/save_and_load.py``).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, Final

from ..base.errors import RefusedError
from ..base.lazy import regex
from ..base.prefixes import adapter_keys
from ..base.records import NamedTuple
from ..base.steps import NextStep, as_step, command, option, suggested_output
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.selection import only_one, selected
from ..files.archives import read_object
from .adapter_names import PEFT_PREFIX, adapter_key
from .adapter_settings import BY_PEFT, CONFIG, adapter_config, changes_base
from .entries import drop_keys, extract
from .keys import by_table

#: Segments that PEFT puts before the base's own tensors.
_WRAPPED: Final = regex(r"\.(?:token_adapter\.)?base_layer(?=\.)|\.original_module(?=\.)")
_MARK: Final = ".base_layer."
_SAVED: Final = ".modules_to_save."
_PREFIX: Final = regex(r"(?:\A|(?<=\.))base_model\.model\.")


class Inside(NamedTuple):
    """The keys of a model with adapters inside: ``base`` maps the keys of the model to its own names.

    ``adapters`` maps the name of each adapter to its keys, and these to the names that PEFT saves.
    """

    base: Mapping[str, str]
    adapters: Mapping[str, Mapping[str, str]]

    @property
    def words(self) -> str:
        """The names of the adapters."""
        return join_limited([quoted(name) for name in self.adapters])


def inside(keys: Collection[str]) -> Inside | None:
    """Return the adapters inside a model with these keys, or None."""
    if not any(_MARK in key for key in keys):
        return None
    base: dict[str, str] = {}
    adapters: dict[str, dict[str, str]] = {}
    for key in keys:
        bare = _PREFIX.sub("", key, count=1)
        if found := adapter_key(bare):
            adapters.setdefault(found[0], {})[key] = PEFT_PREFIX + found[1]
        else:
            base[key] = _WRAPPED.sub("", bare)
    # A saved adapter has keys without its name. It may hold some tensors of its base.
    return Inside(base, adapters) if adapters and "" not in adapters else None


def unmerged(checkpoint: Checkpoint) -> Inside | None:
    """Return the adapters inside the first state dict that has some, or None."""
    nodes = checkpoint.graph.nodes
    found = (inside([str(nodes[name]) for name, _ in item.items]) for item in checkpoint.state_dicts)
    return next(filter(None, found), None)


def merge_step(checkpoint: Checkpoint, found: Inside, keep: str = "") -> NextStep:
    """Return the command that merges the adapter inside a model, or with ``keep`` "adapter" extracts it.

    Return a sentence if the settings are missing, or a name must be chosen.
    """
    name, does = "ckptool lora merge", "merges it"
    if keep:
        name, does = f"{name} with {option('keep', keep)}", "extracts it"
    if adapter_config(checkpoint) is None:
        what = f"the scale is only in the {CONFIG} that was saved with it: put that beside it"
        return as_step(f"{what}, and {name} {does}")
    if len(found.adapters) > 1:
        return as_step(f"{name} takes one of its adapters, {found.words}, with `--adapter NAME`")
    output = suggested_output(checkpoint.path, keep or "merged", ".safetensors" if keep else "")
    return command("lora merge", checkpoint.path, output=output, keep=keep)


def taken_apart(
    checkpoint: Checkpoint, key: str | None, name: str | None = None, *, to_merge: bool = False
) -> tuple[Checkpoint, Checkpoint, tuple[str, ...]] | None:
    """Return the base model, the adapter with the names that PEFT saves, and notes; None without an adapter inside.

    ``key`` is the path of the state dict, ``name`` the adapter's. ``to_merge``: modules that were trained as a whole
    are in the base already. Raise RefusedError for several adapters without a name, and if a key is not known.
    """
    place = only_one(checkpoint, selected(checkpoint, key))
    every = [str(checkpoint.graph.nodes[ref]) for ref, _ in place.items]
    found = inside(every)
    if found is None:
        return None
    if name not in found.adapters and (name is not None or len(found.adapters) > 1):
        what = f"it holds {pluralize(len(found.adapters), 'adapter')}, {found.words}"
        what = what if name is None else f"{what}, and none is called {quoted(name)}"
        raise RefusedError(what, path=checkpoint.path, next=f"name one with `--adapter {next(iter(found.adapters))}`")
    if unknown := adapter_keys(found.base.values()):
        message = f"its tensor {quoted(unknown[0])} is not known, and would not be used"
        raise RefusedError(message, path=checkpoint.path, next=BY_PEFT)
    names, own = {**found.base}, {**found.adapters[name or next(iter(found.adapters))]}
    others = sum(map(len, found.adapters.values())) - len(own)
    notes = (f"{pluralize(others, 'tensor')} of other adapters left out",) if others else ()
    trained = {key: name.removeprefix(PEFT_PREFIX) for key, name in own.items() if _SAVED in key}
    if to_merge:
        own = {key: name for key, name in own.items() if key not in trained}
        names = {key: name for key, name in names.items() if name not in {*trained.values()}} | trained
    if lacking := sorted({*trained.values()} - {*names.values()}):
        which = join_limited([quoted(name) for name in lacking])
        notes = (*notes, f"the base has no {which}: only the trained one is there")
    base, alone = (drop_keys(checkpoint, place.path, {*every} - each.keys()) for each in (names, own))
    beside = {**checkpoint.companions, CONFIG: b""}
    base = by_table(base, names, key=key).replace(changes=checkpoint.changes, companions=beside)
    return base, by_table(extract(alone, place.path) if place.path else alone, own), notes


def settings(checkpoint: Checkpoint, path: str | os.PathLike[str] | None) -> Mapping[str, Any] | None:
    """Return the settings of an adapter inside a model, from the file at ``path`` or beside the model, or None.

    Initializations that change the base are removed, because the model already has the changed base.
    """
    config = adapter_config(checkpoint) if path is None else read_object(os.fspath(path))
    if config is None and path is not None:
        raise RefusedError("it is not a JSON object", path=os.fspath(path))
    return {**config, "init_lora_weights": True} if config and changes_base(config) else config
