"""The format of an output: what its name and the options say, and the conversion that this takes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from shlex import quote
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from ..base import lazy
from ..base.errors import Again, RefusedError, TargetError
from ..base.steps import as_step, command, suggested_output
from ..base.suffixes import SAFETENSORS, TARGETS, TORCH
from ..base.text import join_limited
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.selection import normal_path
from ..formats.parts import keeps_number, part_of
from ..formats.planning import DEFAULT_SHARD_SIZE, is_folder_name, makes_folder

if TYPE_CHECKING:
    from ..formats.safetensors.writer import Tied

#: Those that are a folder of files.
FOLDERS: Final = frozenset(("dcp",))
#: Those that are split into shards on request.
SHARDED: Final = frozenset(("torch", "safetensors"))
#: The format that an edit of a file keeps, by the writer of the file.
_KEPT: Final = {"safetensors": "safetensors", "dcp": "dcp"}


class Conversion(NamedTuple):
    """What an output is to be, as ``convert`` takes it: ``format`` is "" for what its name says.

    ``single`` asks for one file where a folder would be written; ``weights`` for others than those that were opened.
    ``alone`` says that the key chooses what is written, in formats that hold more than one state dict as well.
    ``part`` lets a file that is one part of a checkpoint be written as a file of its own.
    """

    format: str = ""
    tied: Tied = ""
    allow_loss: Collection[str] = ()
    metadata: Mapping[str, str] = MappingProxyType({})
    shard_size: int = 0
    single: bool = False
    weights: str = ""
    alone: bool = False
    part: bool = False

    def format_of(self, checkpoint: Checkpoint, output: str) -> str:
        """Return the format to convert to for an output of this name, "" where the file keeps its own.

        Raise TargetError if neither names one.
        """
        if self.format:
            return self.format
        named = suffix_format(output)
        if self.shard_size or self.single or self.tied or self.metadata:
            return named or _sharded_format(checkpoint, output)
        kept = "" if checkpoint.traits.joined else _KEPT.get(checkpoint.traits.writer_key, "torch")
        return named if named != kept else ""

    def makes_folder(self, checkpoint: Checkpoint, output: str) -> bool:
        """Return whether the output is a folder: shards of a folder stay one unless the name says a file."""
        target = self.format_of(checkpoint, output)
        if not target:
            return makes_folder(checkpoint, output)
        if self.single or self.shard_size or target not in SHARDED:
            return bool(self.shard_size) or target in FOLDERS
        return checkpoint.traits.sharded and makes_folder(checkpoint, output)

    def called(self, name: str) -> str:
        """Return the name of the output for an input of this name, in a folder of outputs."""
        stem, suffix = os.path.splitext(name)
        suffixes = TARGETS[self.format] if self.format else ()
        if self.shard_size:
            return stem
        if not self.format or suffix.lower() in (suffixes or TORCH):
            return name
        return stem + (suffixes[0] if suffixes and ".pth" not in suffixes else ".pth")

    def applied(
        self, checkpoint: Checkpoint, output: str, key: str | None = None, *, edited: bool = False
    ) -> Checkpoint:
        """Return the checkpoint as it is to be written under this name.

        ``key`` names the state dict for a format that holds one, ``edited`` says that edits took it for theirs: then it
        may be gone, and may be given for other formats. Raise as ``convert`` does.
        """
        target = self.format_of(checkpoint, output) or ("torch" if checkpoint.traits.joined else "")
        size = self.shard_size
        if not size and target in SHARDED and self.makes_folder(checkpoint, output):
            size = DEFAULT_SHARD_SIZE
        if edited and key is not None and not (holds_one(target, size) and _has(checkpoint, key)):
            key = None
        if not (self.alone or holds_one(target, size)):
            refuse_key(checkpoint, key)
        if not target:
            return checkpoint
        converted: Checkpoint = lazy.module("edits.convert").convert(
            checkpoint,
            target,
            key=key,
            tied=self.tied,
            allow_loss=self.allow_loss,
            metadata=self.metadata,
            max_shard_size=size,
            weights=self.weights,
            part=self.part,
        )
        return converted

    def refuse_part(self, checkpoint: Checkpoint, output: str | None) -> None:
        """Raise RefusedError as ``refuse_part``, unless the part was asked for or nothing is written."""
        if output is not None and not self.part:
            refuse_part(checkpoint, output)


def refuse_part(checkpoint: Checkpoint, output: str = "") -> None:
    """Raise RefusedError for a file that is one part of a checkpoint, if its output would pass for the whole.

    An output whose name keeps the number of the part passes for a part, as does one that holds the other parts too.
    ``output`` is "" for another format, which always passes for the whole.
    """
    if output and keeps_number(output, checkpoint.path):
        return
    # Edits change names and tensors, by which the files beside it are recognised.
    part = part_of(Checkpoint.of(checkpoint.path, checkpoint.source, checkpoint.container))
    if part is None or part.code != "part":
        return
    if part.others and {*part.others} <= {os.path.realpath(source.name) for source in checkpoint.sources}:
        return  # merged
    step = as_step("--part writes this part alone")
    if part.folder:
        step += "; the whole is here: " + command("inspect", part.folder)
    raise RefusedError(part.message, path=checkpoint.path, next=step)


def suggested_edit(checkpoint: Checkpoint, word: str) -> str:
    """Return ``suggested_output``, as the name of a file for a folder that edits write as one."""
    return suggested_output(checkpoint.path, word, ".pth" if checkpoint.traits.joined else "")


def holds_one(target: str, shard_size: int) -> bool:
    """Return whether an output holds one state dict and nothing else."""
    return target == "safetensors" or bool(shard_size)


def refuse_key(checkpoint: Checkpoint, key: str | None) -> None:
    """Raise TargetError for a ``key`` of an output that holds the whole checkpoint."""
    if key is not None:
        message = "the output holds the whole checkpoint: --key is for formats that hold one state dict"
        path = checkpoint.path
        step = command("extract", path, key, output=suggested_output(path, "weights"))
        raise TargetError(message, path=path, next=step)


def _has(checkpoint: Checkpoint, key: str) -> bool:
    return any(state_dict.path == normal_path(key) for state_dict in checkpoint.state_dicts)


def suffix_format(path: str) -> str:
    """Return the format that the suffix of a name means, "" for none."""
    name = os.path.basename(path).lower()
    return next((target for target, suffixes in TARGETS.items() if name.endswith(suffixes)), "")


def output_format(path: str) -> str:
    """Return the format that the suffix of an output means; raise TargetError if it means none."""
    target = suffix_format(path)
    if target:
        return target
    if is_folder_name(path):
        message = "the name is that of a folder, which takes a format and the size of a shard"
        step = "say both: --to-format safetensors --max-shard-size 5GB"
        again = Again((("--to-format", "safetensors"), ("--max-shard-size", "5GB")))
        raise TargetError(message, path=path, next=step, again=again)
    stem, suffix = os.path.splitext(path)
    known = f"there are {join_limited(list(TARGETS))}"
    if suffix and not suffix[1:].isdecimal():  # model-1.5 is a folder
        name = stem + SAFETENSORS
        message, step = f"the suffix {suffix!r} means no format; {known}", f"call it {quote(name)}, or --to-format"
        raise TargetError(message, path=path, next=step, again=Again((("-o", name),)))
    message, step = f"the name has no suffix that means a format; {known}", "say it: --to-format safetensors"
    raise TargetError(message, path=path, next=step, again=Again((("--to-format", "safetensors"),)))


def _sharded_format(checkpoint: Checkpoint, path: str) -> str:
    """Return the format of a checkpoint for an output whose name means none; raise TargetError if it is not sharded."""
    own = checkpoint.traits.writer_key
    own = "torch" if own == "same" else own
    return own if own in SHARDED else output_format(path)
