"""Parameter names: shared leading segments, the segments that module wrappers insert, and the keys of adapters."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from os.path import commonprefix
from typing import Final

from .records import NamedTuple

#: The segments that wrappers insert into names, each with the tools that insert it.
WRAPPERS: Final = {
    "module": "DataParallel, DistributedDataParallel, DeepSpeed",
    "_orig_mod": "torch.compile",
    "_forward_module": "Lightning Fabric",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_fpw_module": "FullyShardedDataParallel before torch 1.13",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
#: A substring of every wrapper segment, for a fast first test.
_IN_ALL: Final = "mod"
#: The most wrapper segments to examine in one name. Real models nest fewer; a crafted name may have a million.
_MAX_WRAPPERS: Final = 32


class Prefix(NamedTuple):
    """The wrapper segments at the start of names, such as "module." or "module._orig_mod."; ``name`` is "" without one.

    ``keys`` of the ``total`` names start with it.
    """

    name: str
    keys: int
    total: int

    @property
    def status(self) -> str:
        """How many names start with the prefix: "all", "some" or "none"."""
        return "none" if not self.keys else "all" if self.keys == self.total else "some"


def wrapper_prefix(names: Sequence[str]) -> Prefix:
    """Return the wrapper prefix of a state dict.

    It is the most common first wrapper, followed by the wrappers that all names with this first wrapper share.
    """
    total = len(names)
    prefix, wrapped = "", list(names)
    for _ in range(_MAX_WRAPPERS):
        heads = (key[len(prefix) :].partition(".") for key in wrapped)
        counts = Counter(head for head, dot, _ in heads if dot and head in WRAPPERS)
        if not counts:
            break
        [(head, count)] = counts.most_common(1)
        if prefix and count < len(wrapped):
            break
        prefix += head + "."
        wrapped = [key for key in wrapped if key.startswith(prefix)]
    return Prefix(prefix, len(wrapped) if prefix else 0, total)


def wrapper_counts(names: Iterable[str]) -> dict[str, int]:
    """Count the names that contain each wrapper segment, anywhere before the last segment."""
    keys = list(names)
    if not any(_IN_ALL in key for key in keys):
        return {}
    spans_in, counts = _NameTree(keys).spans, Counter[str]()
    # The parameters of one module have the same wrappers.
    for module, number in Counter([key.rpartition(".")[0] for key in keys]).items():
        key = f"{module}."
        for segment in dict.fromkeys(key[start:end] for start, end in spans_in(key)):
            counts[segment] += number
    return dict(counts)


def unwrapper(names: Iterable[str]) -> Callable[[str], str]:
    """Return a function that removes the wrapper segments from a name; ``names`` are all names of the model.

    A segment is a wrapper only if all its siblings are wrappers. So ``_forward_module`` next to ``_reverse_module`` is
    an ordinary module of the model. ``module`` is also an ordinary name: it counts as a wrapper only at the start, or
    next to another wrapper.
    """
    return _NameTree(names).unwrap


class _NameTree:
    """The names of one model; finds which of their segments are wrappers."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted({name for name in names if "." in name})
        self._wrapped: dict[str, bool] = {}

    def _is_wrapped(self, prefix: str) -> bool:
        """Return whether a wrapper follows ``prefix`` in every name that starts with it; one bisection per wrapper."""
        known = self._wrapped.get(prefix)
        if known is None:
            at = bisect_left(self._names, prefix)
            end = bisect_left(self._names, prefix[:-1] + "/") if prefix else len(self._names)
            while at < end:
                segment, _, _ = self._names[at][len(prefix) :].partition(".")
                if segment not in WRAPPERS or self._names[at] == prefix + segment:
                    break
                at = bisect_left(self._names, f"{prefix}{segment}/", at)
            known = self._wrapped[prefix] = at >= end
        return known

    def spans(self, name: str) -> list[tuple[int, int]]:
        """Return the start and end of each wrapper in a name; the last segment is always the parameter."""
        if _IN_ALL not in name:
            return []
        # A regular expression would take three times as long, which is noticeable for tens of thousands of names.
        candidates: list[tuple[int, int]] = []
        end = 0
        for _ in range(_MAX_WRAPPERS):
            at = name.find(_IN_ALL, end)
            end = name.find(".", at) if at >= 0 else -1
            if end < 0:
                break
            start = name.rfind(".", 0, at) + 1
            if name[start:end] in WRAPPERS and self._is_wrapped(name[:start]):
                candidates.append((start, end))
        spans: list[tuple[int, int]] = []
        front = 0
        for number, (start, end) in enumerate(candidates):
            if start == front:
                front = end + 1
            elif name[start:end] == "module":
                follows = bool(spans) and spans[-1][1] + 1 == start
                after = candidates[number + 1] if number + 1 < len(candidates) else (-1, -1)
                if not follows and (after[0] != end + 1 or name[after[0] : after[1]] == "module"):
                    continue
            spans.append((start, end))
        return spans

    def unwrap(self, name: str) -> str:
        """Return the name without its wrapper segments."""
        kept, at = "", 0
        for start, end in self.spans(name):
            kept += name[at:start]
            at = end + 1
        return kept + name[at:]


def common_prefix(names: Sequence[str]) -> str:
    """Return the longest run of whole segments that all names start with, including its dot."""
    shared = commonprefix(names)  # noqa: RUF071 (character by character is what is wanted)
    return shared[: shared.rfind(".") + 1]


#: Keys of adapters: LoRA and DoRA in each library, LoHa, LoKr, IA3, prompts, trained tokens, OFT, BOFT and VeRA.
_ADAPTER: Final = (
    r"(?:\A|[._])(?:lora_?(?:A|B|E|a|b|embedding_[AB]|magnitude_vector|down|up|mid)|lora\.(?:down|up)|dora_scale"
    r"|hada_[wt]\d(?:_[ab])?|lokr_[wt]\d(?:_[ab])?|ia3_l|prompt_embeddings|trainable_tokens_delta|b?oft_[RSrs]|vera_lambda_[bd])(?:\.|\Z)"
)


def adapter_keys(names: Iterable[str]) -> list[str]:
    """Return the names of adapter tensors, which change a base model when merged into it, but are not its weights.

    Sources: PEFT (``utils/save_and_load.py``), kohya's sd-scripts (``networks/lora.py``), LyCORIS, torchtune, mlx-lm.
    """
    return [name for name in names if re.search(_ADAPTER, name)]
