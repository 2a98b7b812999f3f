"""``convert``: the same checkpoint in another format."""

from __future__ import annotations

import os
from typing import Any

import click

import ckptool

from ..checkpoint.checkpoint import Checkpoint
from ..edits.convert import FOLDERS, SHARDED, TARGETS, kept_format, output_format, suffix_format
from ..files.archives import file_name
from ..formats.hf.writer import parse_size
from ..formats.losses import KINDS
from ..formats.planning import DEFAULT_SHARD_SIZE, makes_folder
from .editing import Job, edit_all
from .options import NoOutput, Writing, key_option, paths, writing

EPILOG = """\b
Examples:
  ckptool convert model.pth -o model.safetensors
  ckptool convert model.safetensors -o model.pth
  ckptool convert training.ckpt -o model.safetensors --key state_dict --allow-loss entries
  ckptool convert model.pth -o model-folder --to-format safetensors --max-shard-size 5GB
  ckptool convert model-folder -o smaller --max-shard-size 200MB
  ckptool convert model-folder -o model.safetensors
  ckptool convert model.pth -o model.dcp --to-format dcp
  ckptool convert model.pth -o old.pth --to-format legacy
  ckptool convert tied.pth -o model.safetensors --tied keep-first --metadata license=mit

\b
What may be lost, and is refused unless --allow-loss names it:
""" + "\n".join(f"  {kind:<14} {text}" for kind, text in KINDS.items())


@click.command(epilog=EPILOG)
@paths
@click.option(
    "--to-format", "target", type=click.Choice(tuple(TARGETS)), help="The format.  [default: by the suffix of -o]"
)
@click.option(
    "--allow-loss", "allow", multiple=True, type=click.Choice((*KINDS, "all")), help="Accept this loss; repeatable."
)
@click.option(
    "--tied",
    type=click.Choice(("keep-first", "clone")),
    help="For tensors that share memory: keep the first name, or copy each.",
)
@click.option("--max-shard-size", metavar="SIZE", help="Write a folder of shards: 5GB, 200MB (powers of ten).")
@click.option("--single", is_flag=True, help="Write one file even if the input is a folder and -o has no suffix.")
@click.option("--metadata", "texts", multiple=True, metavar="KEY=VALUE", help="Add an entry to the header; repeatable.")
@key_option
@writing
def convert(
    paths: tuple[str, ...],
    target: str | None,
    allow: tuple[str, ...],
    tied: Any,
    max_shard_size: str | None,
    single: bool,
    texts: tuple[str, ...],
    key: str | None,
    how: Writing,
) -> int:
    """Write the same checkpoint in another format: torch, safetensors, dcp, or legacy (torch 1.5 and earlier).

    What the target cannot hold is listed before anything is written, and refused unless you allow the loss. The bytes
    of tensors stream from file to file.
    """
    wrong = next((text for text in texts if "=" not in text), None)
    if wrong is not None:
        raise click.BadParameter(f"{wrong!r} is not KEY=VALUE", param_hint="--metadata")
    metadata = {name: value for name, _, value in (text.partition("=") for text in texts)}
    # New shards keep the format of a folder; any other output has a suffix that names one.
    output = how.output
    resharded = max_shard_size is not None and output is not None and not suffix_format(output)
    if target is None and output is None:
        message = "Name the format: with --to-format, or by the suffix of -o."
        raise NoOutput(message, click.get_current_context())
    chosen = target or ("" if resharded else output_format(output or ""))

    if single and max_shard_size is not None:
        raise click.UsageError("--single writes one file, --max-shard-size a folder of several: choose one.")
    size = parse_size(max_shard_size) if max_shard_size is not None else 0

    def called(name: str) -> str:
        """Return the name of an output in --out-dir."""
        stem, suffix = os.path.splitext(name)
        suffixes = TARGETS[chosen] or TARGETS["torch"]
        if size or suffix.lower() in suffixes:
            return stem if size else name
        return stem + (".pth" if ".pth" in suffixes else suffixes[0])

    def folder(checkpoint: Checkpoint, output: str) -> bool:
        """Return whether the output is a folder: shards of a folder stay one unless the name says a file."""
        if single or size or chosen not in SHARDED:
            return bool(size) or chosen in FOLDERS
        return checkpoint.traits.sharded and makes_folder(checkpoint, output)

    def edit(checkpoint: Checkpoint) -> Checkpoint:
        written = how.output or called(file_name(checkpoint.path))
        most = size or (DEFAULT_SHARD_SIZE if chosen in SHARDED and folder(checkpoint, written) else 0)
        return ckptool.convert(
            checkpoint,
            chosen or kept_format(checkpoint, written),
            key=key,
            tied=tied or "",
            allow=allow,
            metadata=metadata,
            max_shard_size=most,
        )

    return edit_all(Job("convert", edit, called=called, folder=folder), paths, how)
