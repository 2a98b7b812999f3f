"""Recognise errors whose messages list keys: how the file's keys and the model's keys differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from ...base.lazy import regex
from ...base.patterns import escaped
from ...base.prefixes import WRAPPERS, unwrapper
from ...base.text import join_limited
from ...edits.matching.sizes import size_causes
from ...edits.matching.state_dict_errors import COUNTER, StateDictError, prefix_between, read_error
from ...safety.calls import acts

#: The details of an error; None if a message has another error.
_Details: TypeAlias = Mapping[str, str] | None

#: Endings of buffers that a model computes itself or that a profiler left. A copy without them loses nothing.
COMPUTED: Final = (
    "total_ops", "total_params", "num_batches_tracked", "position_ids", "inv_freq", "masked_bias", "attn.bias",
    "rotary_emb.freqs", "relative_position_index", "attn_mask", "n_averaged", "num_updates", ".decay",
)  # fmt: skip
#: Entries under which training scripts keep a model.
MODEL_ENTRIES: Final = (
    "state_dict", "model_state_dict", "model", "net", "network", "module", "weights", "params", "params_ema", "ema",
    "generator", "teacher", "student", "model_state", "model_ema", "ema_model", "ema_state_dict", "state_dict_ema",
    "net_state_dict", "model_weights", "weight", "backbone", "encoder", "net_g", "netG", "G_ema", "g_ema", "gen",
)  # fmt: skip
_GLOBAL: Final = regex(r"(?:Unsupported global: |unsupported )GLOBAL (?P<name>[\w.]+)(?P<blocked> whose module)?")


def lists_keys(name: str, text: str) -> _Details:
    """Return the details if a text has this error of ``load_state_dict``, otherwise None."""
    error = read_error(text)
    return None if error is None else _JUDGES[name](error)


def acting_global(text: str) -> _Details:
    """Find a global that acts on the machine, among the globals that weights_only refuses."""
    for match in _GLOBAL.finditer(text):
        name = match["name"].rstrip(".")
        if match["blocked"] or acts(name if "." in name else f"builtins.{name}"):
            return {"name": name}
    return None


def _module_prefix(error: StateDictError) -> _Details:
    """Find the prefix "module." in the file's keys."""
    return _added_prefix(error) if _prefix(error) == "module." else None


def _wrapper_prefix(error: StateDictError) -> _Details:
    """Find other wrapper names in the file's keys, also within them."""
    prefix = _prefix(error)
    if prefix and all(part in WRAPPERS for part in prefix[:-1].split(".")):
        return _added_prefix(error)
    unwrap = unwrapper([*error.unexpected])
    if not error.missing or not {unwrap(key) for key in error.unexpected} >= set(error.missing):
        return None
    inner = [f"{name}." for name in WRAPPERS if any(f"{name}." in key for key in error.unexpected)]
    return {"renamed": _if_enough("key" + "".join(f'.replace("{name}", "")' for name in inner), unwrap, error)}


def _added_prefix(error: StateDictError) -> _Details:
    """Find any other prefix in the file's keys; ``renamed`` is the Python expression that removes it."""
    prefix = _prefix(error)
    renamed = _if_enough(f'key.removeprefix("{prefix}")', lambda key: key.removeprefix(prefix), error)
    return {"prefix": prefix, "renamed": renamed} if prefix else None


def _missing_prefix(error: StateDictError) -> _Details:
    """Find a prefix that keys of the model have and the file's keys lack; ``renamed`` as in ``_added_prefix``."""
    prefix = prefix_between(error.unexpected, error.missing)
    return {"prefix": prefix, "renamed": _if_enough(f'"{prefix}" + key', prefix.__add__, error)} if prefix else None


def _prefix(error: StateDictError) -> str:
    """Return the prefix that the checkpoint's keys have and the model's keys lack, or ""."""
    return prefix_between(error.missing, error.unexpected)


def _if_enough(expression: str, rename: Callable[[str], str], error: StateDictError) -> str:
    """Return the Python expression if it gives all unexpected keys the names of the missing keys, otherwise ""."""
    # Torch does not call every counter missing, see ``counters_left_out``.
    renamed = {name for key in error.unexpected if not key.endswith(COUNTER) for name in (rename(key),)}
    missing = {key for key in error.missing if not key.endswith(COUNTER)}
    return expression if renamed == missing and not error.mismatched else ""


def _computed(error: StateDictError) -> _Details:
    """Find buffers that the model computes itself, if only these are missing or too many."""
    keys = (*error.missing, *error.unexpected)
    if not keys or error.mismatched or not all(key.endswith(COMPUTED) for key in keys):
        return None
    return {"keys": join_limited(keys, most=3)}


def _nested(error: StateDictError) -> _Details:
    """Find the entry that holds the weights."""
    entry = next((name for name in MODEL_ENTRIES if name in error.unexpected), "")
    return {"entry": entry} if entry and error.missing else None


def _emptied(error: StateDictError) -> _Details:
    """Find keys that are empty in the checkpoint but not in the model."""
    return {} if any(item.saved == (0,) != item.wanted for item in error.mismatched) else None


def _mismatched(error: StateDictError) -> _Details:
    """Find keys with another shape, if nothing else is wrong; ``listed`` has those that are trained again anyway."""
    if not error.mismatched or error.missing or error.unexpected:
        return None
    causes = size_causes(error.mismatched, len(error.mismatched))
    keys = [item.key for item in error.mismatched]
    lost = any(not cause.replaceable for cause in causes)
    return {
        "causes": " ".join(sentence(cause.message) for cause in causes),
        "keys": "\n".join(map(escaped, keys)),
        "listed": "" if lost else ", ".join(map(json.dumps, keys)),
    }


def _other_layout(error: StateDictError) -> _Details:
    """Find the family of names of the model, if a built-in recipe leads from the file's keys to the model's."""
    from ...edits.recipes import family_between  # imported late: it reads all recipes

    both = error.unexpected and error.missing
    family = family_between(error.unexpected, error.missing, error.model) if both else ""
    return {"family": family} if family else None


def sentence(text: str) -> str:
    """Return a message as a sentence; a name or a call at its beginning stays unchanged."""
    first = text.partition(" ")[0]
    return f"{text[:1].upper() if first.isalpha() else text[:1]}{text[1:]}." if text else ""


#: Each returns the details if the lists have the error of this name.
_JUDGES: Final[Mapping[str, Callable[[StateDictError], _Details]]] = {
    "module-prefix": _module_prefix,
    "wrapper-prefix": _wrapper_prefix,
    "added-prefix": _added_prefix,
    "missing-prefix": _missing_prefix,
    "computed-buffers": _computed,
    "nested-state-dict": _nested,
    "empty-weights": _emptied,
    "size-mismatch": _mismatched,
    "other-layout": _other_layout,
    "other-keys": lambda error: {},
}
