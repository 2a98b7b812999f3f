"""``convert``: the same checkpoint in another format."""

from __future__ import annotations

import click

from ..edits.outputs import output_format, suffix_format
from ..formats.losses import KINDS
from .editing import Job, edit_all
from .options import NoOutput, Writing, paths, writing

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
@writing
def convert(paths: tuple[str, ...], how: Writing) -> int:
    """Write the same checkpoint in another format: torch, safetensors, dcp, or legacy (torch 1.5 and earlier).

    What the target cannot hold is listed before anything is written, and refused unless you allow the loss. The bytes
    of tensors stream from file to file. Every other command that writes takes the same options, and does the same
    after its edit.
    """
    if not how.conversion.format:
        if how.output is None:
            message = "Name the format: with --to-format, or by the suffix of -o."
            raise NoOutput(message, click.get_current_context())
        # New shards keep the format of a folder; any other output has a suffix that names one.
        if not how.conversion.shard_size or suffix_format(how.output):
            how = how._replace(conversion=how.conversion._replace(format=output_format(how.output)))
    return edit_all(Job("convert", lambda checkpoint: checkpoint), paths, how)
