"""The per-rank files of a Megatron-LM folder: the rank of each, by folder name.

Source: Megatron-LM, ``megatron/training/checkpointing.py`` (``get_checkpoint_name``, ``read_metadata``).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from math import prod
from typing import Final, TypeAlias

from ...base.errors import NotACheckpointError
from ...base.lazy import regex
from ...base.steps import command
from ...base.text import join_limited, pluralize
from ...checkpoint.objects import callable_name, named_attributes
from ...files.folders import Folder
from ...pickles.nodes import CONSTANTS, Call, Global, Graph
from ..folders import read_tag
from .numbered import MAX_RANKS, StepFolder, by_number, numbered

LATEST: Final = "latest_checkpointed_iteration.txt"
ITERATION: Final = regex(r"(?:iter_\d+|release)\Z")
_RANK: Final = regex(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?\Z")
#: Weight file names of a rank, in search order.
_WEIGHTS: Final = ("model_optim_rng.pt", "model_rng.pt", "model_states.pt")
_WORDS: Final = ("tensor", "pipeline", "expert")

#: Tensor-parallel and pipeline rank.
Rank: TypeAlias = tuple[int, int]


def tag_of(text: str) -> str:
    """Return the folder name for the content of the file ``LATEST``: a number, or "release"."""
    return f"iter_{int(text):07d}" if text.isascii() and text.isdigit() and len(text) < 12 else text


def latest_folder(folder: Folder, names: Collection[str]) -> Folder | None:
    """Return the folder that the file ``LATEST`` names, or None if it does not exist."""
    tag = tag_of(read_tag(folder, LATEST)) if LATEST in names else ""
    return folder.inner(tag) if tag and tag in names else None


def iteration(folder: Folder, names: Collection[str]) -> StepFolder | None:
    """Return the folder that holds the rank folders: ``folder``, or the one that its file ``LATEST`` names; None if
    neither."""
    if LATEST not in names:
        return StepFolder(folder, frozenset(names), None) if folders_of_ranks(names) else None
    inner = latest_folder(folder, names)
    inside = inner.names() if inner else frozenset[str]()
    return StepFolder(inner, inside, folder) if inner and folders_of_ranks(inside) else None


def folders_of_ranks(names: Collection[str]) -> dict[tuple[int, ...], str]:
    """Return the rank folders by their numbers; {} for a folder in torch's distributed format."""
    return {} if ".metadata" in names else by_number(numbered(_RANK, names))[0]


def files_of_ranks(folder: Folder, names: Collection[str]) -> tuple[dict[Rank, str], list[tuple[str, str]]] | None:
    """Return the weight files by tensor-parallel and pipeline rank, and the pairs of files for the same rank; None if
    there are none, or experts have their own ranks."""
    if any(len(numbers) > 2 for numbers in folders_of_ranks(names)):
        return None
    files, twice = by_number(_weights(folder, names))
    return (dict(sorted(files.items())), twice) if files else None


def _weights(folder: Folder, names: Collection[str]) -> Iterator[tuple[Rank, str]]:
    for numbers, inner in numbered(_RANK, names):
        inside = folder.inner(inner).names()
        name = next((name for name in _WEIGHTS if name in inside), "")
        if name:
            yield (numbers[0], numbers[1] if len(numbers) > 1 else 0), os.path.join(inner, name)


def name_like(files: Mapping[Rank, str], rank: Rank) -> str:
    """Return the file name of a rank, whether or not it exists."""
    folder, name = os.path.split(next(iter(files.values())))
    return os.path.join(f"mp_rank_{rank[0]:02d}" + (f"_{rank[1]:03d}" if folder.count("_") > 2 else ""), name)


def explain(folder: Folder, names: Collection[str]) -> NotACheckpointError | None:
    """Return the error that describes a Megatron-LM folder and its missing files; None for any other folder."""
    ranks = folders_of_ranks(names)
    if not ranks or not any(map(folder.is_folder, ranks.values())):
        return None
    empty = [name for name in sorted(ranks.values()) if not folder.inner(name).names() & {*_WEIGHTS}]
    length = max(map(len, ranks))
    sizes = [max(rank[place] + 1 for rank in ranks if len(rank) > place) for place in range(length)]
    lost = [rank for rank in product(*map(range, sizes)) if rank not in ranks] if prod(sizes) <= MAX_RANKS else []
    missing = ["mp_rank_" + "_".join(f"{number:0{3 if at else 2}d}" for at, number in enumerate(rank)) for rank in lost]
    what = f"it is a Megatron-LM checkpoint of {len(ranks):,} of {prod(sizes):,} ranks"
    what += f"; missing: {join_limited(missing + empty)}" if missing or empty else ""
    what += "; the ranks of experts are not joined" if length > 2 else ""
    if files_of_ranks(folder, names) is not None:
        step = "it is read as one: " + command("inspect", folder.path)
    else:
        step = "its files: " + command("inspect", folder.join("*/*.pt"))
    return NotACheckpointError(what, kind="megatron", path=folder.path, next=step)


def ranks_in_words(sizes: Rank) -> str:
    """Return the number of ranks of each kind, as text."""
    words = [f"{size} {kind}-parallel" for size, kind in zip(sizes, _WORDS) if size > 1]
    return f"{join_limited(words)} {'ranks' if prod(sizes) > 1 else ''}".rstrip() if words else pluralize(1, "rank")


_NAME: Final = "Namespace"
_CLASS: Final = f"argparse.{_NAME}"
#: An argument of every run, which hardly any other program has.
_MARK: Final = "num_attention_heads"

#: Numbers, strings, bools and None by argument name.
Arguments: TypeAlias = Mapping[str, object]


def arguments(graph: Graph) -> Arguments:
    """Return the run's arguments that are numbers, strings, bools or None; {} if the pickle has none."""
    if not any(node.name == _NAME for _, node in graph.of_type(Global)):
        return {}
    for ref, node in graph.of_type(Call):
        if callable_name(graph, node.func) != _CLASS:
            continue
        values = {name: graph.nodes[value] for name, value in named_attributes(graph, ref).items()}
        if _MARK in values:
            return {name: value for name, value in values.items() if isinstance(value, (*CONSTANTS, str))}
    return {}


def number(values: Arguments, name: str) -> int:
    """Return an argument that is a positive whole number, or 0."""
    value = values.get(name)
    return value if type(value) is int and 0 < value < 1 << 40 else 0
