"""The convert command: write the same checkpoint in another format."""

from __future__ import annotations

from functools import partial

import click

from ..checkpoint.checkpoint import Checkpoint
from ..edits.outputs import output_format
from ..edits.table import EDITS
from ..formats.losses import KINDS
from ..formats.outputs import named_format
from .editing import EditRequest, edit_all
from .help import GroupedCommand
from .options import InputPath, NoOutput, Writing, model_option, paths, writing
from .render import say_model

EPILOG = """\b
Examples:
  ckptool convert model.pth -o model.safetensors
  ckptool convert model.safetensors -o model.pth
  ckptool convert training.ckpt -o model.safetensors
  ckptool convert gan.pth -o generator.safetensors --key netG
  ckptool convert model.pth -o model-folder --to-format safetensors --max-shard-size 5GB
  ckptool convert model-folder -o smaller --max-shard-size 200MB
  ckptool convert model-folder -o model.safetensors
  ckptool convert model.pth -o model.dcp --to-format dcp
  ckptool convert model.pth -o old.pth --to-format legacy
  ckptool convert checkpoint-100 -o model.safetensors --key module --weights module
  ckptool convert local-folder -o model.pth --like init.pth
  ckptool convert local-folder -o model.pth --model mypackage.models:build
  ckptool convert iter_0000100 -o model.safetensors --key model --to-names hf:llama
  ckptool convert tied.pth -o model.safetensors --tied keep-first --metadata license=mit

\b
Left out and listed, unless you say --strict: device tags, optimizer states and all other
entries without weights, requires_grad, the order of elements that are not contiguous.

\b
What else may be lost, and is refused unless --allow-loss names it:
""" + "\n".join(f"  {kind:<14} {text}" for kind, text in KINDS.items())


@click.command(cls=GroupedCommand, epilog=EPILOG)
@paths
@click.option(
    "--weights",
    type=click.Choice(("module",)),
    help="For DeepSpeed folders: use the 16-bit model weights, not the optimizer's fp32 masters.",
)
@click.option(
    "--like",
    type=InputPath(),
    metavar="OTHER",
    help="A checkpoint that torch saved, or its lock file, with the names, shapes and order of the tensors that are"
    " end to end in flat parameters of FSDP1.",
)
@model_option
@click.option("--to-names", metavar="FAMILY", help=EDITS["to-names"].title)
@writing
def convert(
    paths: tuple[str, ...],
    weights: str | None,
    like: str | None,
    model: str | None,
    to_names: str | None,
    how: Writing,
) -> int:
    """Write the same checkpoint in another format: torch, safetensors, dcp, or legacy (torch 1.5 and earlier).

    A single state dict is converted at once; what the target cannot hold beside it is left out and listed. Nothing is
    written if tensors would be lost. The bytes of tensors stream from file to file. Every other command that writes
    takes the same options, and does the same after its edit.
    """
    if like is not None and model is not None:
        raise click.UsageError("--like and --model exclude each other.")
    if model is not None:
        say_model(model)
    if not how.conversion.format:
        if how.output is None:
            message = "Name the format: with --to-format, or by the suffix of -o."
            raise NoOutput(message, click.get_current_context())
        # New shards keep the format of a folder; any other output needs a suffix that names its format.
        if not how.conversion.shard_size or named_format(how.output) is not None:
            how = how._replace(conversion=how.conversion._replace(format=output_format(how.output)))
    how = how._replace(conversion=how.conversion._replace(weights=weights or "", alone=True))
    request = EditRequest(
        "convert",
        partial(_prepared, like=like, model=model, to_names=to_names, key=how.key),
        inputs=(like,) if like else (),
    )
    return edit_all(request, paths, how)


def _prepared(
    checkpoint: Checkpoint, like: str | None, model: str | None, to_names: str | None, key: str | None
) -> Checkpoint:
    """Split FSDP1 flat parameters into tensors and rename the keys, where the options ask for it."""
    if like is not None or model is not None:
        from ..edits.flat_params import unflatten
        from ..edits.matching.targets import match_target

        checkpoint = unflatten(checkpoint, match_target(like, model))
    if to_names is not None:
        from ..edits.megatron_names import named_as

        checkpoint = named_as(checkpoint, to_names, key=key)
    return checkpoint
