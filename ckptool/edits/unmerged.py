"""A model with an unmerged adapter inside, as the state dict of a PEFT model: taken apart into a base and an adapter.

PEFT keeps the weight of a module ``X`` as ``X.base_layer.weight``, and the matrices of an adapter as
``X.lora_A.NAME.weight``. ``X.modules_to_save.NAME.weight`` replaces ``X.original_module.weight``. Sources: PEFT
(``tuners/tuners_utils.py``, ``utils/other.py``, ``utils/save_and_load.py``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ..base.errors import RefusedError
from ..base.lazy import regex
from ..base.prefixes import adapter_keys
from ..base.records import NamedTuple
from ..base.steps import NextStep, as_step, command, suggested_output
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.selection import only_one, selected
from ..files.archives import read_object
from ..files.sources import FolderSource
from ..formats.planning import DEFAULT_SHARD_SIZE
from .adapter_names import PEFT_PREFIX, adapter_key
from .adapter_settings import BY_PEFT, CHANGES_BASE, CONFIG, adapter_config
from .convert import convert
from .entries import drop_keys, extract
from .keys import by_table

#: Segments that PEFT puts before the base's own tensors.
_WRAPPED: Final = regex(r"\.(?:token_adapter\.)?base_layer(?=\.)|\.original_module(?=\.)")
_MARK: Final = ".base_layer."
_SAVED: Final = ".modules_to_save."
_PREFIX: Final = regex(r"(?:\A|(?<=\.))base_model\.model\.")


class Inside(NamedTuple):
    """The keys of a model with adapters inside: ``base`` maps the keys of the model to its own names.

    ``adapters`` maps the name of each adapter to its keys, and these to the names that PEFT saves. ``saved`` are the
    keys of modules that were trained as a whole, of all adapters.
    """

    base: Mapping[str, str]
    adapters: Mapping[str, Mapping[str, str]]
    saved: frozenset[str]

    def merged(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the keys of the base, with the modules that an adapter trained as a whole in place of the original."""
        trained = {key: name.removeprefix(PEFT_PREFIX) for key, name in own.items() if key in self.saved}
        return {key: name for key, name in self.base.items() if name not in {*trained.values()}} | trained

    @property
    def words(self) -> str:
        """The names of the adapters."""
        return join_limited([quoted(name) for name in self.adapters])


def inside(keys: Iterable[str]) -> Inside | None:
    """Return the adapters inside a model with these keys, or None."""
    names = list(keys)
    if not any(_MARK in key for key in names):
        return None
    base: dict[str, str] = {}
    adapters: dict[str, dict[str, str]] = {}
    for key in names:
        bare = _PREFIX.sub("", key, count=1)
        if found := adapter_key(bare):
            adapters.setdefault(found[0], {})[key] = PEFT_PREFIX + found[1]
        else:
            base[key] = _WRAPPED.sub("", bare)
    # A saved adapter has keys without its name. It may hold some tensors of its base.
    saved = frozenset(key for keys in adapters.values() for key in keys if _SAVED in key)
    return Inside(base, adapters, saved) if adapters and "" not in adapters else None


def unmerged(checkpoint: Checkpoint) -> Inside | None:
    """Return the adapters inside the first state dict that has some, or None."""
    found = (inside(map(str, names)) for names in _names(checkpoint))
    return next((each for each in found if each is not None), None)


def _names(checkpoint: Checkpoint) -> Iterable[Iterable[object]]:
    nodes = checkpoint.graph.nodes
    return ([nodes[name] for name, _ in item.items] for item in checkpoint.state_dicts)


def merge_step(checkpoint: Checkpoint, found: Inside) -> NextStep:
    """Return the command that merges the adapter inside a model, or a sentence if something is missing for that."""
    if adapter_config(checkpoint) is None:
        what = f"the scale is only in the {CONFIG} that was saved with it: put that beside it"
        return as_step(f"{what}, and ckptool lora merge merges it")
    if len(found.adapters) > 1:
        return as_step(f"ckptool lora merge takes one of its adapters, {found.words}, with `--adapter NAME`")
    return command("lora merge", checkpoint.path, output=suggested_output(checkpoint.path, "merged"))


def taken_apart(
    checkpoint: Checkpoint, key: str | None, name: str | None = None, *, to_merge: bool = False
) -> tuple[Checkpoint, Checkpoint, tuple[str, ...]] | None:
    """Return the base model, the adapter with the names that PEFT saves, and notes; None without an adapter inside.

    ``key`` is the path of the state dict, ``name`` the adapter's. ``to_merge``: modules that were trained as a whole
    are in the base already. Raise RefusedError for several adapters without a name, and if a key is not known.
    """
    place = only_one(checkpoint, selected(checkpoint, key))
    found = inside(str(checkpoint.graph.nodes[ref]) for ref, _ in place.items)
    if found is None:
        return None
    if name not in found.adapters and (name is not None or len(found.adapters) > 1):
        what = f"it holds {pluralize(len(found.adapters), 'adapter')}, {found.words}"
        what = what if name is None else f"{what}, and none is called {quoted(name)}"
        raise RefusedError(what, path=checkpoint.path, next=f"name one with `--adapter {next(iter(found.adapters))}`")
    if unknown := adapter_keys(found.base.values()):
        message = f"its tensor {quoted(unknown[0])} is not known, and would not be used"
        raise RefusedError(message, path=checkpoint.path, next=BY_PEFT)
    own = dict(found.adapters[name or next(iter(found.adapters))])
    others = [key for keys in found.adapters.values() for key in keys if key not in own]
    notes = (f"{pluralize(len(others), 'tensor')} of other adapters left out",) if others else ()
    names = found.merged(own) if to_merge else found.base
    trained = [name.removeprefix(PEFT_PREFIX) for key, name in own.items() if key in found.saved]
    if lacking := sorted({*trained} - {*names.values()}):
        which = join_limited([quoted(name) for name in lacking])
        notes = (*notes, f"the base has no {which}: only the trained one is there")
    own = {key: name for key, name in own.items() if not (to_merge and key in found.saved)}
    every = [str(checkpoint.graph.nodes[ref]) for ref, _ in place.items]
    base = by_table(drop_keys(checkpoint, place.path, {*every} - names.keys()), names, key=key)
    alone = drop_keys(checkpoint, place.path, {*every} - own.keys())
    adapter = by_table(extract(alone, place.path) if place.path else alone, own)
    beside = {**checkpoint.companions, CONFIG: b""}
    return base.replace(changes=checkpoint.changes, companions=beside), adapter, notes


def settings(checkpoint: Checkpoint, path: str | os.PathLike[str] | None) -> Mapping[str, Any] | None:
    """Return the settings of an adapter inside a model, from the file at ``path`` or beside the model; None without.

    Some ways to start a training change the base. The model has that changed base, so they are removed.
    """
    config = adapter_config(checkpoint) if path is None else read_object(os.fspath(path))
    if config is None:
        if path is not None:
            raise RefusedError("it is not a JSON object", path=os.fspath(path))
        return None
    start = config.get("init_lora_weights")
    changed = isinstance(start, str) and start.lower().startswith(CHANGES_BASE)
    return {**config, "init_lora_weights": True} if changed else config


def adapter_folder(adapter: Checkpoint, config: Mapping[str, Any], changes: tuple[Change, ...]) -> Checkpoint:
    """Return an adapter as it is saved by PEFT: a folder with its tensors and its settings."""
    text = json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n"
    beside = adapter.source.beside if isinstance(adapter.source, FolderSource) else ()
    # Nothing else of a folder with a model belongs to the adapter.
    companions = {**dict.fromkeys(map(os.path.basename, beside), b""), CONFIG: text.encode()}
    made = convert(
        adapter.replace(companions=companions), "safetensors", tied="keep-first", max_shard_size=DEFAULT_SHARD_SIZE
    )
    return made.replace(changes=changes)
