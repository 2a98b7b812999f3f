"""Choose the format of an output from its name and the options, and convert to it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from types import MappingProxyType

from ..base import lazy
from ..base.errors import RefusedError, TargetError
from ..base.records import NamedTuple
from ..base.steps import AnyStep, command, suggested_output
from ..base.suffixes import TORCH
from ..base.text import join_limited
from ..checkpoint.checkpoint import Checkpoint, Tied
from ..checkpoint.selection import normal_path
from ..formats.names.parts import keeps_number
from ..formats.outputs import OUTPUTS, TARGETS, named_format
from ..formats.planning import DEFAULT_SHARD_SIZE, is_folder_name, makes_folder, makes_shards
from ..formats.rank_part import part_of


class Conversion(NamedTuple):
    """The options of an output, as ``convert`` takes them. With ``format`` "" the file name decides.

    ``deepspeed_16bit`` takes the 16-bit weights of DeepSpeed. ``alone`` says that the key chooses what is written, even
    in formats that hold several state dicts. ``strict`` refuses every loss.
    """

    format: str = ""
    tied: Tied = ""
    allow_loss: Collection[str] = ()
    metadata: Mapping[str, str] = MappingProxyType({})
    shard_size: int = 0
    deepspeed_16bit: bool = False
    alone: bool = False
    strict: bool = False

    def format_of(self, checkpoint: Checkpoint, output: str) -> str:
        """Return the format to convert to for an output with this name, or "" if the file keeps its own.

        Raise TargetError if a conversion is needed but neither the options nor the name give a format.
        """
        if self.format:
            return self.format
        known = named_format(output)
        named = known.name if known is not None else ""
        if self.shard_size or self.tied or self.metadata:
            return named or _sharded_format(checkpoint, output)
        own = OUTPUTS.get(checkpoint.traits.writes_as)
        kept = own.like if own is not None else ""
        return named if named != kept else ""

    def makes_folder(self, checkpoint: Checkpoint, output: str) -> bool:
        """Return whether the output is a folder. Shards in a folder stay a folder unless the name looks like a file."""
        target = self.format_of(checkpoint, output)
        if not target:
            return makes_folder(checkpoint, output)
        if self.shard_size or not OUTPUTS[target].shards:
            return bool(self.shard_size) or OUTPUTS[target].folder
        return makes_shards(checkpoint, output)

    def called(self, name: str) -> str:
        """Return the output's name, in a folder of outputs, for an input with this name."""
        stem, suffix = os.path.splitext(name)
        if self.shard_size:
            return stem
        if not self.format or suffix.lower() in (OUTPUTS[self.format].suffixes or TORCH):
            return name
        return stem + OUTPUTS[self.format].extension

    def applied(
        self, checkpoint: Checkpoint, output: str, key: str | None = None, *, edited: bool = False
    ) -> Checkpoint:
        """Return the checkpoint converted for an output with this name.

        ``key`` names the state dict for a format that holds one. ``edited`` says that edits used the same key: it may
        then be missing by now, and is ignored by formats that hold everything. Raise the same errors as ``convert``.
        """
        target = self.format_of(checkpoint, output) or ("" if checkpoint.traits.writes_as else "torch")
        size = self.shard_size
        if not size and target and OUTPUTS[target].shards and self.makes_folder(checkpoint, output):
            size = DEFAULT_SHARD_SIZE
        holds_one = OUTPUTS[target].holds_one(size) if target else False
        if edited and key is not None and not (holds_one and _has(checkpoint, key)):
            key = None
        if not (self.alone or holds_one):
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
            deepspeed_16bit=self.deepspeed_16bit,
            strict=self.strict,
        )
        return converted

    def refuse_part(self, checkpoint: Checkpoint, output: str | None) -> None:
        """Call the function ``refuse_part``, unless the part was asked for or nothing is written."""
        if output is not None and not takes_part(self.allow_loss):
            refuse_part(checkpoint, output, ranks=False)


def takes_part(allow_loss: Collection[str]) -> bool:
    """Return whether these losses allow a file that is one part of a checkpoint to be written as a standalone file."""
    return "shards" in allow_loss or "all" in allow_loss


def refuse_part(checkpoint: Checkpoint, output: str = "", *, ranks: bool = True) -> None:
    """Raise RefusedError for a file that is one part of a checkpoint, if its output could be taken for the whole.

    An output whose name keeps the part's number is still a part. An output that also holds the other parts is the
    whole. ``output`` is "" for a conversion, whose output is always taken for the whole. Without ``ranks``, files of
    one rank are accepted, whose tensors or whose content show that they are parts.
    """
    if output and keeps_number(output, checkpoint.path):
        return
    # Edits may change the names and tensors by which files of one checkpoint are recognised: use the unedited file.
    part = part_of(Checkpoint.of(checkpoint.path, checkpoint.source, checkpoint.container))
    if part is None or (not ranks and part.code != "part"):
        return
    if part.others and {*part.others} <= {os.path.realpath(source.name) for source in checkpoint.sources}:
        return  # all parts are merged
    step: AnyStep = "`--allow-loss shards` writes this part alone"
    if part.folder:
        step += "; the whole is here: " + command("inspect", part.folder)
    elif part.cut:
        step += f"; for the whole, {part.whole}"
    raise RefusedError(part.message, path=checkpoint.path, next=step)


def suggested_edit(checkpoint: Checkpoint, word: str) -> str:
    """Return ``suggested_output``, as the name of a file if the checkpoint was joined from several files."""
    return suggested_output(checkpoint.path, word, "" if checkpoint.traits.writes_as else ".pth")


def refuse_key(checkpoint: Checkpoint, key: str | None) -> None:
    """Raise TargetError if ``key`` is given for an output that holds the whole checkpoint."""
    if key is not None:
        message = "the output holds the whole checkpoint: a key is for formats that hold one state dict"
        path = checkpoint.path
        step = command("extract", path, key, output=suggested_output(path, "weights"))
        raise TargetError(message, path=path, next=step)


def _has(checkpoint: Checkpoint, key: str) -> bool:
    return any(state_dict.path == normal_path(key) for state_dict in checkpoint.state_dicts)


def output_format(path: str) -> str:
    """Return the format that the suffix of an output means; raise TargetError if it means none."""
    known = named_format(path)
    if known is not None:
        return known.name
    what, step = "the name has no suffix that means a format", "say it: `--to-format safetensors`"
    if is_folder_name(path):
        what, step = "the name means a folder", "say its format: `--to-format safetensors` `--max-shard-size 5GB`"
    raise TargetError(f"{what}; there are {join_limited(TARGETS)}", path=path, next=step)


def _sharded_format(checkpoint: Checkpoint, path: str) -> str:
    """Return the checkpoint's own format if it can be sharded, otherwise the format that the output's name means."""
    own = OUTPUTS[checkpoint.traits.writes_as or "torch"]
    return own.like if own.shards else output_format(path)
