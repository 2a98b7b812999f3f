"""Read the message of ``load_state_dict``: the keys that are missing, unexpected, or have another shape.

Sources: ``Module.load_state_dict`` and ``_load_from_state_dict`` in torch/nn/modules/module.py, whose error quotes only
the keys in its lists, and whose result with strict=False is printed as ``_IncompatibleKeys(...)``;
``_load_pretrained_model`` in transformers/modeling_utils.py, which logs warnings.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

_BLANKS: Final = re.compile(r"\s+")
_DOT: Final = re.compile(r"\.")
_KEYS: Final = re.compile(r'"([^"]*)"')
#: A line break that a terminal added, perhaps within a key.
_WRAP: Final = re.compile(r"[ \t]*\r?\n[ \t]*")
#: Quoted keys with commas between them, and the rest of the line after the last, or the text up to the next list: a
#: message may have been pasted as one line.
_LIST: Final = r'\s+in\s+state_dict:((?:\s*"[^"]*"\s*,)*(?:\s*"[^"]*")?(?:(?!(?:Missing|Unexpected)\s+key\(s\))[^\n])*)'
_MISSING: Final = re.compile(rf"Missing\s+key\(s\){_LIST}")
_UNEXPECTED: Final = re.compile(rf"Unexpected\s+key\(s\){_LIST}")
_MODEL: Final = re.compile(r"Error\(s\) in loading state_dict for ([^:\n]+):")
_SHAPE: Final = r"torch\.Size\(\[([\d,\s]*)\]\)"
#: A key may hold any character. It ends where the text after it begins, and contains no other message.
_KEY: Final = r"((?:(?!size\s+mismatch\s+for\s).)+?)"
_SIZES: Final = rf": copying a param with shape {_SHAPE} from checkpoint, the shape in current model is {_SHAPE}"
_MISMATCH: Final = re.compile(r"size\s+mismatch\s+for\s+" + _KEY + _SIZES.replace(" ", r"\s+"), re.DOTALL)
#: A list of strings, as Python prints it.
_PRINTED: Final = r"""\[((?:\s*(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\s*,?)*)\s*\]"""
_STRING: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_PRINTED_MISSING: Final = (
    re.compile(rf"_IncompatibleKeys\(missing_keys={_PRINTED}"),
    re.compile(rf"not initialized from the model checkpoint at [^\n]*? and are newly initialized: {_PRINTED}"),
)
_PRINTED_UNEXPECTED: Final = (
    re.compile(rf"unexpected_keys={_PRINTED}"),
    re.compile(rf"were not used when initializing \w+: {_PRINTED}"),
)
#: The buffers of BatchNorm, after the module's name.
_MEAN: Final = "running_mean"
_VARIANCE: Final = "running_var"
_COUNTER: Final = "num_batches_tracked"


class Mismatch(NamedTuple):
    """A key with its shape in the checkpoint and its shape in the model."""

    key: str
    saved: tuple[int, ...]
    wanted: tuple[int, ...]


class StateDictError(NamedTuple):
    """The complaints of ``load_state_dict``, in the order of the message; ``model`` is the class of the model."""

    model: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]

    def with_keys_of(self, names: Iterable[str]) -> StateDictError:
        """Return the error with the keys spelled as in the checkpoint: a line break in the message may have cost a
        space.
        """
        spelled = {_BLANKS.sub("", name): name for name in names}

        def spell(key: str) -> str:
            return spelled.get(_BLANKS.sub("", key), key)

        return self._replace(
            unexpected=tuple(map(spell, self.unexpected)),
            mismatched=tuple(item._replace(key=spell(item.key)) for item in self.mismatched),
        )

    def with_prefix(self, prefix: str) -> StateDictError:
        """Return the error with a prefix before every key: the program that printed it had removed the prefix."""
        return self._replace(
            missing=tuple(prefix + key for key in self.missing),
            unexpected=tuple(prefix + key for key in self.unexpected),
            mismatched=tuple(item._replace(key=prefix + item.key) for item in self.mismatched),
        )


def read_error(text: str) -> StateDictError | None:
    """Read the message in a traceback or log; return None if it is missing."""
    missing = tuple(dict.fromkeys(_listed(text, _MISSING, _PRINTED_MISSING)))
    unexpected = tuple(dict.fromkeys(_listed(text, _UNEXPECTED, _PRINTED_UNEXPECTED)))
    mismatched = tuple(
        dict.fromkeys(
            Mismatch(_WRAP.sub("", key), _numbers(saved), _numbers(wanted))
            for key, saved, wanted in _MISMATCH.findall(text)
        )
    )
    if not (missing or unexpected or mismatched):
        return None
    model = _MODEL.search(text)
    return StateDictError(model[1] if model else "", missing, unexpected, mismatched)


def _listed(text: str, quoted: re.Pattern[str], printed: Sequence[re.Pattern[str]]) -> Iterator[str]:
    """Yield the keys in a message's lists: keys in double quotes, and keys that Python printed."""
    for keys in quoted.findall(text):
        yield from (_WRAP.sub("", key) for key in _KEYS.findall(keys))
    for lists in printed:
        for keys in lists.findall(text):
            yield from (ast.literal_eval(_WRAP.sub("", literal)) for literal in _STRING.findall(keys))


def counters_left_out(error: StateDictError) -> list[str]:
    """Return the keys of BatchNorm counters that torch does not call missing.

    If the checkpoint's metadata has no version for the module, for example because it has another name, torch assumes a
    checkpoint from before there were counters, and adds them (``_NormBase._load_from_state_dict``).
    """
    missing = set(error.missing)
    modules = [name.removesuffix(_MEAN) for name in error.missing if name.endswith(_MEAN)]
    counters = [name + _COUNTER for name in modules if name + _VARIANCE in missing and name + _COUNTER not in missing]
    saved = sum(name.endswith(_COUNTER) for name in error.unexpected)
    return counters if saved >= len(counters) else []


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.replace(",", " ").split())


def prefix_between(names: Iterable[str], others: Collection[str]) -> str:
    """Return the segments that ``others`` have before most of ``names``: "module." for "a" and "module.a"; otherwise
    "".
    """
    names = list(names)
    ends: dict[str, list[str]] = {}
    for other in others:
        for match in _DOT.finditer(other):
            ends.setdefault(other[match.end() :], []).append(other[: match.end()])
    counts = Counter(prefix for name in names for prefix in ends.get(name, ()))
    if not counts:
        return ""
    prefix, count = min(counts.items(), key=lambda item: (-item[1], len(item[0])))
    return prefix if count * 2 > len(names) else ""
