"""The commands that combine checkpoints: merge and average."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

import ckptool

from ..base.globs import Globs
from ..checkpoint.checkpoint import Checkpoint
from ..formats.planning import blaming_damage
from .editing import Job, edit_all
from .options import InputPath, Writing, choosing, one_path, other_key_option, paths, writing

MERGE_EPILOG = """\b
Examples:
  ckptool merge new_head.pth backbone.pth --exclude 'fc.*' -o model.pth
  ckptool merge training.pth ema.pth --entry ema_state_dict=state_dict -o model.pth
"""


@click.command(epilog=MERGE_EPILOG)
@one_path
@click.argument("other", metavar="OTHER", type=InputPath())
@click.option(
    "--entry", "entries", multiple=True, metavar="FROM[=TO]", help="Copy a whole entry of OTHER, by its path."
)
@other_key_option
@click.option("--no-new", is_flag=True, help="Replace existing keys only; add none.")
@choosing
@writing
def merge(
    path: str,
    other: str,
    entries: tuple[str, ...],
    other_key: str | None,
    no_new: bool,
    only: Globs,
    how: Writing,
) -> int:
    """Copy the tensors of another checkpoint into this one: existing keys are replaced, others added.

    --include and --exclude select keys of OTHER. A key whose shape differs is refused. With --entry, whole entries
    are copied instead, tensors or not.
    """
    pairs = [(origin, target or origin) for origin, _, target in (text.partition("=") for text in entries)]
    if entries and only:
        raise click.UsageError("--entry takes whole entries: --include and --exclude cannot be used with it.")
    scope: dict[str, Any] = {"key": how.key, "other_key": other_key, **only.patterns}
    edit = partial(_merged, other=other, entry=pairs, no_new=no_new, **scope)
    return edit_all(Job("merge", edit, inputs=(other,), keyed=True), (path,), how)


def _merged(checkpoint: Checkpoint, other: str, **options: Any) -> Checkpoint:
    foreign = click.get_current_context().with_resource(ckptool.open(other))
    with blaming_damage(foreign):
        return ckptool.merge(checkpoint, foreign, **options)


AVERAGE_EPILOG = """\b
Examples:
  ckptool average epoch_1.pth epoch_2.pth epoch_3.pth -o average.pth
  ckptool average a.pth b.pth --weights 0.7,0.3 -o mixed.pth
"""


@click.command(epilog=AVERAGE_EPILOG)
@paths
@click.option("--weights", metavar="W,W...", help="One weight per checkpoint, normalized to a sum of 1.")
@click.option("--sum-dtype", metavar="DTYPE", default="float64", show_default=True,
              help="The dtype to sum in: float64 or float32.")  # fmt: skip
@choosing
@writing
def average(paths: tuple[str, ...], weights: str | None, sum_dtype: str, only: Globs, how: Writing) -> int:
    """Average the weights of several checkpoints of one model.

    The output is the first checkpoint with the mean of all in place of its floating-point tensors; integers, and
    everything outside of state dicts, stay as in the first. The mean is computed piece by piece while writing.
    """
    scope: dict[str, Any] = {"key": how.key, **only.patterns}
    edit = partial(_averaged, others=paths[1:], weights=_numbers(weights), sum_dtype=sum_dtype, **scope)
    return edit_all(Job("average", edit, inputs=paths[1:], keyed=True, only=only), paths[:1], how)


def _averaged(checkpoint: Checkpoint, others: tuple[str, ...], **options: Any) -> Checkpoint:
    context = click.get_current_context()
    opened = [context.with_resource(ckptool.open(path)) for path in others]
    with blaming_damage(*opened):
        return ckptool.average([checkpoint, *opened], **options)


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list like 0.7,0.3", param_hint="--weights") from None
