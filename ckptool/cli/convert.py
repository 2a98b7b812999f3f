"""The convert command: write the same checkpoint in another format."""

from __future__ import annotations

import os
from functools import partial

import click

from ..edits.outputs import output_format
from ..edits.pipeline import Call, applied
from ..edits.table import CONFIG
from ..formats.losses import KINDS
from ..formats.outputs import named_format
from .editing import EditRequest, edit_all
from .edits import step_option
from .help import GroupedCommand
from .options import InputPath, Writing, model_option, paths, writing
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
  ckptool convert checkpoint-100 -o model.safetensors --key module --deepspeed-16bit
  ckptool convert local-folder -o model.pth --unflatten init.pth
  ckptool convert local-folder -o model.pth --model mypackage.models:build
  ckptool convert iter_0000100 -o model.safetensors --key model --to-names hf:llama
  ckptool convert llama-2-7b -o hf --to-format safetensors --max-shard-size 5GB --to-names hf:llama
  ckptool convert model.safetensors -o split.safetensors --recipe my-model.toml
  ckptool convert training.ckpt -o model.safetensors --use-ema
  ckptool convert tied.pth -o model.safetensors --tied keep-first --metadata license=mit

\b
A recipe for --recipe is a TOML file of rules, names and axes on two sides; docs/recipes.md
has all of it. This one splits a projection of queries, keys and values in every layer:
  rest = "keep"
  [[rule]]
  a = "blocks.{L}.qkv.weight : (e|e|e), i"
  b = ["blocks.{L}.q.weight : e, i", "blocks.{L}.k.weight : e, i", "blocks.{L}.v.weight : e, i"]

\b
Left out and listed, unless you say --strict: device tags, optimizer states and all other
entries without weights, requires_grad, the order of elements that are not contiguous.

\b
What else may be lost, and is refused unless --allow-loss names it:
""" + "\n".join(f"  {kind:<14} {text}" for kind, text in KINDS.items())


@click.command(cls=GroupedCommand, epilog=EPILOG)
@paths
@click.option(
    "--deepspeed-16bit",
    flag_value="module",
    type=click.Choice(("module",)),
    help="For DeepSpeed folders: use the 16-bit model weights, not the optimizer's fp32 masters.",
)
@step_option("unflatten", multiple=False)
@model_option
@step_option("use-ema", multiple=False)
@step_option("to-names", multiple=False)
@step_option("recipe", multiple=False)
@click.option("--config", metavar=CONFIG.metavar, type=InputPath(), help=CONFIG.help)
@writing
def convert(
    paths: tuple[str, ...],
    deepspeed_16bit: str | None,
    unflatten: str | None,
    model: str | None,
    use_ema: bool,
    to_names: str | None,
    recipe: str | None,
    config: str | None,
    how: Writing,
) -> int:
    """Write the same checkpoint in another format: torch, safetensors, dcp, or legacy (torch 1.5 and earlier).

    A single state dict is converted at once; what the target cannot hold beside it is left out and listed. Nothing is
    written if tensors would be lost. The bytes of tensors stream from file to file. Every other command that writes
    takes the same options, and does the same after its edit.
    """
    if unflatten is not None and model is not None:
        raise click.UsageError("--unflatten and --model exclude each other.")
    if model is not None:
        say_model(model)
    if not how.conversion.format:
        if how.output is None:
            raise click.UsageError("Name the format: with --to-format, or by the suffix of -o.")
        # Shards hold weights alone, so they are safetensors; any other output needs a suffix that names its format.
        named = named_format(how.output) is not None or not how.conversion.shard_size
        target = output_format(how.output) if named else "safetensors"
        how = how._replace(conversion=how.conversion._replace(format=target))
    how = how._replace(conversion=how.conversion._replace(deepspeed_16bit=bool(deepspeed_16bit), alone=True))
    edits = []
    if unflatten is not None or model is not None:
        edits.append(Call("unflatten", {"other": unflatten, "model": model}))
    if use_ema:
        edits.append(Call("use-ema", {"key": how.key}))
    if to_names is not None:
        allowed = {"allow_loss": how.conversion.allow_loss}
        edits.append(Call("to-names", {"family": to_names, "key": how.key, "config": config, **allowed}))
    if recipe is not None:
        edits.append(Call("recipe", {"recipe": recipe, "key": how.key, "config": config}))
    if config is not None and recipe is None and to_names is None:
        raise click.UsageError("--config goes with --to-names or --recipe.")
    inputs = tuple(path for path in (unflatten, recipe, config) if path and os.path.exists(path))
    return edit_all(EditRequest("convert", partial(applied, edits=edits), inputs=inputs), paths, how)
