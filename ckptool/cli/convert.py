"""The convert command: write the same checkpoint in another format."""

from __future__ import annotations

import os
from functools import partial
from textwrap import wrap

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
  ckptool convert training.ckpt -o model.safetensors
  ckptool convert model.pth -o model-folder --to-format safetensors --max-shard-size 5GB
  ckptool convert iter_0000100 -o model.safetensors --key model --to-names hf:llama
  ckptool convert local-folder -o model.pth --unflatten init.pth

\b
Left out and listed, unless you say --strict: device tags, optimizer states and all other
entries without weights, requires_grad, the order of elements that are not contiguous.
Refused, unless --allow-loss names it (all accepts every kind):
""" + "\n".join(wrap(", ".join(KINDS), 90, initial_indent="  ", subsequent_indent="  "))


@click.command(cls=GroupedCommand, epilog=EPILOG)
@paths
@click.option(
    "--deepspeed-16bit",
    flag_value="module",
    type=click.Choice(("module",)),
    help="Take the 16-bit weights of a DeepSpeed folder.",
)
@step_option("unflatten", multiple=False)
@model_option
@step_option("use-ema", multiple=False)
@step_option("to-names", multiple=False)
@step_option("recipe", multiple=False)
@click.option("--config", metavar=CONFIG.metavar, type=InputPath(), help="Numbers of the model, as config.json.")
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

    Nothing is written if tensors would be lost. DeepSpeed folders are converted with the fp32 masters of the optimizer
    unless --deepspeed-16bit is given. Every other command that writes takes --to-format, too.
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
