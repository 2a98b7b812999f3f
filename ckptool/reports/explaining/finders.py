"""How an error is recognised in a text: the message of ``load_state_dict`` judged, others searched."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from ...base.patterns import escaped
from ...base.prefixes import WRAPPERS, unwrapper
from ...edits.like.state_dict_errors import StateDictError, prefix_between, read_error
from ...pickles import opcodes
from ...safety.calls import acts

#: What was taken from the text: a prefix, a name, a number.
Details: TypeAlias = Mapping[str, str]
#: Returns the details of a text that has the error, None for another text.
Finder: TypeAlias = Callable[[str], Details | None]

#: Entries under which training scripts keep a model.
MODEL_ENTRIES: Final = (
    "state_dict", "model_state_dict", "model", "net", "network", "module", "weights", "params", "params_ema", "ema",
    "generator", "teacher", "student",
)  # fmt: skip
_TRACEBACK: Final = "Traceback (most recent call last)"
#: Signs of ``torch.load`` in a traceback: frames of it, or the line that calls it.
_LOADING: Final = r"torch[/\\]serialization\.py|torch\.load|[Uu]npickl|pickle\.load|find_class"


def searched(pattern: str) -> Finder:
    """Return a function that finds a pattern; its named groups are the details.

    The last place counts: a traceback also has the line that makes the message, before the message.
    """

    def find(text: str) -> Details | None:
        matches = [*re.finditer(pattern, text)]
        return {name: value or "" for name, value in matches[-1].groupdict().items()} if matches else None

    return find


def raised(pattern: str, where: str = _LOADING, *, last: bool = False) -> Finder:
    """Return a function that finds a message which other code raises, too: a traceback counts only if ``where`` is in
    it, or with ``last`` in its last frame.

    A message alone counts: somebody who loads a checkpoint asks.
    """
    find = searched(pattern)

    def judged(text: str) -> Details | None:
        alone, *tracebacks = text.split(_TRACEBACK)
        if not tracebacks:
            return find(alone)
        for traceback in tracebacks:
            place = traceback.rpartition('  File "')[2] if last else traceback
            if (details := find(traceback)) is not None and re.search(where, place):
                return details
        return None

    return judged


def of_keys(judge: Callable[[StateDictError], Details | None]) -> Finder:
    """Return a function that judges the message of ``load_state_dict``."""

    def find(text: str) -> Details | None:
        error = read_error(text)
        return None if error is None else judge(error)

    return find


def module_prefix(error: StateDictError) -> Details | None:
    """Find "module." before the keys of the file."""
    prefix = _prefix(error)
    return {"prefix": prefix} if prefix == "module." else None


def wrapper_prefix(error: StateDictError) -> Details | None:
    """Find the names of other wrappers in the keys of the file; ``plain`` is the Python that removes them."""
    prefix = _prefix(error)
    if prefix and all(part in WRAPPERS for part in prefix[:-1].split(".")):
        return {"plain": f'key.removeprefix("{prefix}")'}
    unwrap = unwrapper([*error.unexpected])
    if not error.missing or not {unwrap(key) for key in error.unexpected} >= set(error.missing):
        return None
    inner = [name for name in WRAPPERS if any(f"{name}." in key for key in error.unexpected)]
    return {"plain": "key" + "".join(f'.replace("{name}.", "")' for name in inner)}


def added_prefix(error: StateDictError) -> Details | None:
    """Find another prefix of the keys of the file."""
    prefix = _prefix(error)
    return {"prefix": prefix} if prefix else None


def missing_prefix(error: StateDictError) -> Details | None:
    """Find a prefix that the keys of the model have, and those of the file have not."""
    prefix = prefix_between(error.unexpected, error.missing)
    return {"prefix": prefix, "attribute": prefix[:-1]} if prefix else None


def nested(error: StateDictError) -> Details | None:
    """Find the entry in which the weights are."""
    entry = next((name for name in MODEL_ENTRIES if name in error.unexpected), "")
    return {"entry": entry} if entry and error.missing else None


def mismatched(error: StateDictError) -> Details | None:
    """Find the keys of another size, if there is nothing else."""
    if not error.mismatched or error.missing or error.unexpected:
        return None
    keys = [item.key for item in error.mismatched]
    return {"keys": "\n".join(map(escaped, keys)), "listed": ", ".join(map(json.dumps, keys))}


def emptied(error: StateDictError) -> Details | None:
    """Find keys that have no elements in the checkpoint, and some in the model."""
    return {} if any(item.saved == (0,) != item.wanted for item in error.mismatched) else None


def any_keys(error: StateDictError) -> Details | None:
    """Take every other message."""
    return {}


def first_byte(byte: str, number: int) -> str:
    """Return the pattern of what torch.load says of a file that begins with a byte, with and without weights_only."""
    return rf"invalid load key, '(?:{byte})'|Unsupported operand {number}\b"


def _prefix(error: StateDictError) -> str:
    """Return the prefix that the keys of the checkpoint have, and those of the model have not."""
    return prefix_between(error.missing, error.unexpected)


#: Numbers of "Unsupported operand" that begin no pickle.
NOT_OPCODES: Final = rf"(?!(?:{'|'.join(map(str, sorted(opcodes.NAMES)))})\b)\d+"
_GLOBAL: Final = re.compile(r"(?:Unsupported global: |unsupported )GLOBAL (?P<name>[\w.]+)(?P<blocked> whose module)?")


def acting_global(text: str) -> Details | None:
    """Find a global that acts on the machine, among those that weights_only refuses."""
    for match in _GLOBAL.finditer(text):
        name = match["name"].rstrip(".")
        if match["blocked"] or acts(name if "." in name else f"builtins.{name}"):
            return {"name": name}
    return None
