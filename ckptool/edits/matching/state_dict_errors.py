"""Read messages about keys: missing and unexpected keys, and keys that have another shape in the model.

Sources: ``Module.load_state_dict`` and ``_load_from_state_dict`` in torch/nn/modules/module.py, also before torch 0.4;
``_IncompatibleKeys``, its result with strict=False; ``_load_pretrained_model`` of transformers 4, and
utils/loading_report.py of transformers 5; ``from_pretrained`` and ``load_lora_adapter`` of diffusers; core/saving.py of
Lightning; models/_builder.py of timm; peft_model.py of PEFT; runner/checkpoint.py of mmengine and mmcv;
common/checkpoint.py of fvcore (detectron2); ``load_model`` of CenterNet; utils/checkpoints.py of SpeechBrain.
DeepSpeed, fairseq, accelerate and open_clip pass torch's own message on.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice, product
from typing import Final

from ...base.lazy import regex
from ...base.records import NamedTuple

_BLANKS: Final = regex(r"\s+")
_DOT: Final = regex(r"\.")
_KEYS: Final = regex(r'"([^"]*)"')
_COLOUR: Final = regex(r"\x1b\[[\d;]*m")
#: A line break that a terminal added, perhaps within a key.
_WRAP: Final = regex(r"[ \t]*\r?\n[ \t]*")
#: Quoted keys with commas between them, and the rest of the line after the last, or the text up to the next list: a
#: message may have been pasted as one line.
_LIST: Final = r'\s+in\s+state_dict:((?:\s*"[^"]*"\s*,)*(?:\s*"[^"]*")?(?:(?!(?:Missing|Unexpected)\s+key\(s\))[^\n])*)'
_MISSING: Final = regex(rf"Missing\s+key\(s\){_LIST}")
_UNEXPECTED: Final = regex(rf"Unexpected\s+key\(s\){_LIST}")
#: The end of a list that somebody shortened.
_CUT: Final = regex(r"""["'],?\s*(?:\.\.\.|\u2026)""")
_MODEL: Final = regex(r"Error\(s\) in loading state_dict for ([^:\n]+):")

# -- lists that Python printed, or that are joined by commas

_STRING: Final = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_ITEM: Final = rf"(?:{_STRING}|[\w./:@-]+)"
_PRINTED: Final = rf"[ \t]{{0,8}}\n?[ \t]{{0,40}}(?:\w+\()?[\[{{(]?\s{{0,40}}((?:{_ITEM}\s*,\s*)*{_ITEM})"
_ITEMS: Final = regex(_ITEM)
#: What stands before such a list. The first words are enough where they are unusual.
_ABOUT: Final = r"""[^\n:=\[{(']{0,80}"""
_MISSING_LISTS: Final = regex(
    rf"(?:missing_keys=|are newly initialized:|following keys are missing:|not found in the checkpoint:"
    rf"|in the model state dict but not in the checkpoint:"
    rf"|(?i:missing[ _](?:adapter )?keys?)(?! in checkpoint)(?:{_ABOUT}[:=]| (?=\()))"
    rf"{_PRINTED}"
)
_UNEXPECTED_LISTS: Final = regex(
    rf"(?:unexpected_keys=|were not used when initializing[^\n:]*:|keys that are not used by the model:"
    rf"|not in the model state dict but in the checkpoint:|(?i:unexpected[ _]keys?)(?:{_ABOUT}[:=]| (?=\()))"
    rf"{_PRINTED}"
)

# -- one key in each message or line

_MISSING_EACH: Final = regex(
    r"""No param ([\w.]+?)\.(?=\s|$)|did not have parameters for the key: ([\w.]+)"""
    r"""|^[ \t]{0,8}(\S[^|\n]{0,600})\|[ \t]*MISSING[ \t]*\|""",
    re.MULTILINE,
)
_UNEXPECTED_EACH: Final = regex(
    r"""Drop(?:ping)? parameter ([\w.]+?)\.?(?=\s|$)|The param with the key: ([\w.]+) is discarded"""
    r"""|unexpected key "([^"\n]+)" in state_dict|^[ \t]{0,8}(\S[^|\n]{0,600})\|[ \t]*UNEXPECTED[ \t]*\|""",
    re.MULTILINE,
)
#: Keys in lines of their own, as fvcore prints them: ``backbone.conv1.{bias, weight}``.
_BLOCKS: Final = r":[ \t]*\n((?:[ \t]*[\w.]+(?:\{[^}\n]*\})?[ \t]*(?:\n|$))+)"
_MISSING_BLOCK: Final = regex(rf"model parameters or buffers are not found in the checkpoint{_BLOCKS}")
_UNEXPECTED_BLOCK: Final = regex(rf"contains keys that are not used by the model{_BLOCKS}")
_BRACES: Final = regex(r"\{([^}\n]*)\}")
_RANGE: Final = regex(r"(\d+)\.\.\.(\d+)\Z")
#: The most keys that a text may stand for.
_MOST_KEYS: Final = 500_000

# -- shapes

_SIZE: Final = r"torch\.Size\(\[{}\]\)"
_SAVED: Final = _SIZE.format(r"(?P<saved>[\d,\s]*)")
_WANTED: Final = _SIZE.format(r"(?P<wanted>[\d,\s]*)")
#: A key may hold any character. It ends where the text after it begins, and contains no other message.
_KEY: Final = r"(?P<key>(?:(?!size\s+mismatch\s+for\s).)+?)"
_SIZES: Final = f": copying a param with shape {_SAVED} from checkpoint, the shape in current model is {_WANTED}"
#: Torch 0.4.1 and 1.0.0 name the two shapes in the wrong order (https://github.com/pytorch/pytorch/issues/15720).
_SWAPPED_SIZES: Final = f": copying a param of {_WANTED} from checkpoint, where the shape is {_SAVED} in current model"
_MISMATCHES: Final = (
    regex(r"size\s+mismatch\s+for\s+" + _KEY + _SIZES.replace(" ", r"\s+"), re.DOTALL),
    regex(r"size\s+mismatch\s+for\s+" + _KEY + _SWAPPED_SIZES.replace(" ", r"\s+"), re.DOTALL),
    regex(rf"- (?P<key>\S+): found shape {_SAVED} in the checkpoint and {_WANTED} in the model"),
    regex(
        rf'While copying the parameter named "?(?P<key>[^\s",]+)"?,\s+whose dimensions in the model are {_WANTED} '
        rf"and\s+whose dimensions in the checkpoint are {_SAVED}"
    ),
    regex(
        r"Skip loading parameter '(?P<key>[^'\n]+)' to the model due to incompatible shapes: \((?P<saved>[\d, ]*)\) in "
        r"the checkpoint but \((?P<wanted>[\d, ]*)\) in the model"
    ),
    regex(rf"Skip loading parameter:? (?P<key>[^\s,]+), required shape:? ?{_WANTED}, ?loaded shape:? ?{_SAVED}"),
    regex(
        r"because (?P<key>[\w.]+) expected shape (?:tensor\([^\n]*?size=\(|torch\.Size\(\[)(?P<wanted>[\d, ]+)"
        rf"[^\n]*?, but got {_SAVED}"
    ),
    regex(rf"^\|\s*(?P<key>\S+)\s*\|\s*{_WANTED}\s*\|\s*{_SAVED}\s*\|", re.MULTILINE),
    regex(
        r"^[ \t]{0,8}(?P<key>\S[^|\n]{0,600})\|[ \t]*MISMATCH[ \t]*\|"
        r"[^\n]*?ckpt: (?:torch\.Size)?\(\[?(?P<saved>[\d, ]*)"
        r"[^\n]*? vs model: ?(?:torch\.Size)?\(\[?(?P<wanted>[\d, ]*)",
        re.MULTILINE,
    ),
)
#: The buffers of BatchNorm, after the module's name.
_MEAN: Final = "running_mean"
_VARIANCE: Final = "running_var"
COUNTER: Final = "num_batches_tracked"


class Mismatch(NamedTuple):
    """A key with its shape in the checkpoint and its shape in the model."""

    key: str
    saved: tuple[int, ...]
    wanted: tuple[int, ...]


class StateDictError(NamedTuple):
    """The complaints of ``load_state_dict``, in the order of the message; ``model`` is the class of the model.

    ``cut``: a list of keys ends with "...", as people shorten it.
    """

    model: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]
    cut: bool = False

    def with_keys_of(self, names: Iterable[str]) -> StateDictError:
        """Return the error with the keys spelled as in the checkpoint: a line break may have cost a space."""
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
    text = _COLOUR.sub("", text)
    quoted = (_WRAP.sub("", key) for keys in _MISSING.findall(text) for key in _KEYS.findall(keys))
    missing = chain(quoted, _keys(text, _MISSING_LISTS, _MISSING_BLOCK, _MISSING_EACH))
    quoted = (_WRAP.sub("", key) for keys in _UNEXPECTED.findall(text) for key in _KEYS.findall(keys))
    unexpected = chain(quoted, _keys(text, _UNEXPECTED_LISTS, _UNEXPECTED_BLOCK, _UNEXPECTED_EACH))
    mismatched = (
        Mismatch(key, saved, wanted)
        for pattern in _MISMATCHES
        for match in pattern.finditer(text)
        if (saved := _numbers(match["saved"])) != (wanted := _numbers(match["wanted"]))  # else copying failed
        for key in _expanded(_WRAP.sub("", match["key"]))
    )
    model = _MODEL.search(text)
    error = StateDictError(
        model[1] if model else "",
        tuple(dict.fromkeys(islice(missing, _MOST_KEYS))),
        tuple(dict.fromkeys(islice(unexpected, _MOST_KEYS))),
        tuple(dict.fromkeys(islice(mismatched, _MOST_KEYS))),
        _CUT.search(text) is not None,
    )
    return error if error.missing or error.unexpected or error.mismatched else None


def _keys(text: str, lists: re.Pattern[str], blocks: re.Pattern[str], each: re.Pattern[str]) -> Iterator[str]:
    """Yield the keys in printed lists, in blocks of lines, and in single messages."""
    for match in lists.finditer(text):
        items = [
            (ast.literal_eval(_WRAP.sub("", item)) if item[0] in "'\"" else item.rstrip(".:"), item[0] in "'\"")
            for item in _ITEMS.findall(match[1])
        ]
        # Words without quotes are keys only if they look like keys.
        if any(quoted or "." in item or "_" in item for item, quoted in items):
            yield from (key for item, _ in items for key in (_split(item) if len(items) == 1 else [item]))
    for match in blocks.finditer(text):
        yield from (key for line in match[1].splitlines() if line.strip() for key in _expanded(line.strip()))
    for match in each.finditer(text):
        yield from _expanded(next(filter(None, match.groups())))


def _split(item: str) -> Iterable[str]:
    """Return the keys in one printed string: diffusers joins them, and torch 0.3 printed a set."""
    if item.startswith("{"):
        return (text[1:-1] for text in re.findall(_STRING, item.replace("\\'", "'")))
    return filter(None, item.split(", "))


def _expanded(text: str) -> Iterator[str]:
    """Yield the keys that braces stand for: ``layers.{0, 1}.w``, ``layers.{0...31}.w``, ``norm.{bias, weight}``."""
    parts = _BRACES.split(text.strip())
    choices = [[part] if number % 2 == 0 else _choices(part) for number, part in enumerate(parts)]
    yield from islice(map("".join, product(*choices)), _MOST_KEYS)


def _choices(text: str) -> list[str]:
    span = _RANGE.match(text.strip())
    if span and int(span[2]) - int(span[1]) < _MOST_KEYS:
        return [str(number) for number in range(int(span[1]), int(span[2]) + 1)]
    return [part.strip() for part in text.split(",")]


def counters_left_out(error: StateDictError, inside: Iterable[str] = ()) -> list[str]:
    """Return the keys of BatchNorm counters that torch does not call missing.

    ``inside`` are the keys of the state dict, if the model was given a dict around it.

    If the checkpoint's metadata has no version for the module, for example because it has another name, torch assumes a
    checkpoint from before there were counters, and adds them (``_NormBase._load_from_state_dict``).
    """
    missing = set(error.missing)
    modules = [name.removesuffix(_MEAN) for name in error.missing if name.endswith(_MEAN)]
    counters = [name + COUNTER for name in modules if name + _VARIANCE in missing and name + COUNTER not in missing]
    saved = sum(name.endswith(COUNTER) for name in (*error.unexpected, *inside))
    return counters if saved >= len(counters) else []


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.replace(",", " ").split())


def prefix_between(names: Iterable[str], others: Collection[str]) -> str:
    """Return what ``others`` have before most of ``names``: "module." for "a" and "module.a"; otherwise ""."""
    names = list(names)
    ends: dict[str, list[str]] = {}
    lengths = {len(name) for name in names}  # a name may have very many segments
    for other in others:
        for match in _DOT.finditer(other):
            if len(other) - match.end() in lengths:
                ends.setdefault(other[match.end() :], []).append(other[: match.end()])
    counts = Counter(prefix for name in names for prefix in ends.get(name, ()))
    if not counts:
        return ""
    prefix, count = min(counts.items(), key=lambda item: (-item[1], len(item[0])))
    return prefix if count * 2 > len(names) else ""
