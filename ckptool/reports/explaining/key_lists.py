"""Recognise errors whose messages list keys: how the file's keys and the model's keys differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, TypeAlias

from ...base.lazy import regex
from ...base.patterns import escaped
from ...base.prefixes import WRAPPERS, unwrapper
from ...base.text import join_limited
from ...edits.matching.sizes import size_causes
from ...edits.matching.state_dict_errors import COUNTER, StateDictError, prefix_between, read_error
from ...safety.calls import acts

#: Facts taken from a text, by name: a prefix, a key, a number.
Details: TypeAlias = Mapping[str, str]

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


def acting_global(text: str) -> Details | None:
    """Find a global that acts on the machine, among the globals that weights_only refuses."""
    for match in _GLOBAL.finditer(text):
        name = match["name"].rstrip(".")
        if match["blocked"] or acts(name if "." in name else f"builtins.{name}"):
            return {"name": name}
    return None


@lru_cache(4)  # each row without a pattern asks
def key_error(text: str) -> tuple[str, Details] | None:
    """Return the name of the error of ``load_state_dict`` in a text and its details, or None.

    ``renamed`` is a Python expression that gives a key of the file the model's name, or "".
    """
    error = read_error(text)
    if error is None:
        return None
    missing, unexpected, mismatched = error.missing, error.unexpected, error.mismatched
    if prefix := prefix_between(missing, unexpected):
        wrapper = all(part in WRAPPERS for part in prefix[:-1].split("."))
        name = "module-prefix" if prefix == "module." else "wrapper-prefix" if wrapper else "added-prefix"
        renamed = _if_enough(f'key.removeprefix("{prefix}")', lambda key: key.removeprefix(prefix), error)
        return name, {"prefix": prefix, "renamed": renamed}
    unwrap = unwrapper([*unexpected])
    if missing and {unwrap(key) for key in unexpected} >= {*missing}:
        inner = [f"{name}." for name in WRAPPERS if any(f"{name}." in key for key in unexpected)]
        expression = "key" + "".join(f'.replace("{name}", "")' for name in inner)
        return "wrapper-prefix", {"renamed": _if_enough(expression, unwrap, error)}
    if prefix := prefix_between(unexpected, missing):
        return "missing-prefix", {"prefix": prefix, "renamed": _if_enough(f'"{prefix}" + key', prefix.__add__, error)}
    keys = (*missing, *unexpected)
    if keys and not mismatched and all(key.endswith(COMPUTED) for key in keys):
        return "computed-buffers", {"keys": join_limited(keys, most=3)}
    entry = next((name for name in MODEL_ENTRIES if name in unexpected), "")
    if entry and missing:
        return "nested-state-dict", {"entry": entry}
    if any(item.saved == (0,) != item.wanted for item in mismatched):
        return "empty-weights", {}
    if mismatched and not keys:
        causes = size_causes(mismatched, len(mismatched))
        names = [item.key for item in mismatched]
        lost = any(not cause.replaceable for cause in causes)
        return "size-mismatch", {
            "causes": " ".join(sentence(cause.message) for cause in causes),
            "keys": "\n".join(map(escaped, names)),
            "listed": "" if lost else ", ".join(map(json.dumps, names)),
        }
    if unexpected and missing:
        from ...edits.recipes import family_between  # imported late: it reads all recipes

        if family := family_between(unexpected, missing, error.model):
            return "other-layout", {"family": family}
    return "other-keys", {}


def _if_enough(expression: str, rename: Callable[[str], str], error: StateDictError) -> str:
    """Return the Python expression if it gives all unexpected keys the names of the missing keys, otherwise ""."""
    # Torch does not call every counter missing, see ``counters_left_out``.
    renamed = {rename(key) for key in error.unexpected if not key.endswith(COUNTER)}
    missing = {key for key in error.missing if not key.endswith(COUNTER)}
    return expression if renamed == missing and not error.mismatched else ""


def sentence(text: str) -> str:
    """Return a message as a sentence; a name or a call at its beginning stays unchanged."""
    first = text.partition(" ")[0]
    return f"{text[:1].upper() if first.isalpha() else text[:1]}{text[1:]}." if text else ""
