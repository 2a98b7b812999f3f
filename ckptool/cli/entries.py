"""The commands that edit entries: extract, wrap, drop, keep, set and unset."""

from __future__ import annotations

from functools import partial

import click

import ckptool

from ..base.globs import Globs
from ..checkpoint.checkpoint import Checkpoint
from ..edits.entries import as_scalar
from .editing import Job, edit_all
from .options import Writing, choosing, complete_keys, one_path, writing_in_place

EXTRACT_EPILOG = """\b
Examples:
  ckptool extract training.pth state_dict -o weights.pth
  ckptool extract lightning.ckpt hyper_parameters -o hparams.pth
"""


@click.command(epilog=EXTRACT_EPILOG)
@one_path
@click.argument("entry", metavar="KEY", shell_complete=complete_keys)
@writing_in_place
def extract(path: str, entry: str, how: Writing) -> int:
    """Save one entry as a checkpoint of its own: a state dict without the training around it.

    KEY is its path as inspect prints it. Tensors that only other entries use are dropped.
    """
    return edit_all(Job("extract", partial(ckptool.extract, key=entry)), (path,), how)


WRAP_EPILOG = """\b
Examples:
  ckptool wrap weights.pth state_dict -o wrapped.pth
"""


@click.command(epilog=WRAP_EPILOG)
@one_path
@click.argument("entry", metavar="KEY")
@writing_in_place
def wrap(path: str, entry: str, how: Writing) -> int:
    """Nest the whole checkpoint under the KEY of a new dict: the reverse of extract."""
    return edit_all(Job("wrap", partial(ckptool.wrap, key=entry)), (path,), how)


DROP_EPILOG = """\b
Examples:
  ckptool drop training.pth optimizer lr_schedulers -o small.pth
  ckptool drop model.pth 'head.*' -o backbone.pth
  ckptool drop training.pth 'fc.*' --prune-optimizer -o headless.pth
"""

_prune = click.option(
    "--prune-optimizer", "prune", is_flag=True, help="Also remove the optimizer state of removed parameters."
)
_globs = click.argument("globs", nargs=-1, required=True, metavar="GLOB...", shell_complete=complete_keys)


@click.command(epilog=DROP_EPILOG)
@one_path
@_globs
@_prune
@choosing
@click.option("--reclaim", is_flag=True, help="With --in-place: give the dropped bytes back to the disk. No undo.")
@writing_in_place
def drop(path: str, globs: tuple[str, ...], prune: bool, only: Globs, how: Writing) -> int:
    """Remove entries or keys: the optimizer, the schedulers, a head.

    A pattern (*, ?, [45], [a-c], [!x], {a,b} or re:REGEX) matches top-level entries, and keys of state dicts by name or
    by full path; with --key, only keys of that state dict. Bytes that nothing else uses are dropped. A pattern without
    a match is refused.

    With --in-place they stay in the file, for undo. --reclaim makes them holes, which take no space, and cannot be
    undone; it needs Linux and a filesystem that has holes.
    """
    if how.reclaim and not how.in_place:
        raise click.UsageError("--reclaim is for --in-place: a new file has no dropped bytes.")
    edit = partial(ckptool.drop, globs=globs, key=how.key, **only.patterns, prune_optimizer=prune)
    return edit_all(Job("drop", edit, keyed=True, only=only), (path,), how)


KEEP_EPILOG = """\b
Examples:
  ckptool keep training.pth state_dict epoch -o small.pth
  ckptool keep model.pth 'backbone.*' -o backbone.pth
"""


@click.command(epilog=KEEP_EPILOG)
@one_path
@_globs
@_prune
@choosing
@writing_in_place
def keep(path: str, globs: tuple[str, ...], prune: bool, only: Globs, how: Writing) -> int:
    """Keep some entries or keys and remove the rest.

    A pattern (*, ?, [45], [a-c], [!x], {a,b} or re:REGEX) that matches top-level entries removes the others; one that
    matches keys of a state dict removes its other keys. With --key, only keys of that state dict are removed; --include
    and --exclude select among these.
    """
    edit = partial(ckptool.keep, globs=globs, key=how.key, **only.patterns, prune_optimizer=prune)
    return edit_all(Job("keep", edit, keyed=True, only=only), (path,), how)


SET_EPILOG = """\b
Examples:
  ckptool set model.pth epoch=0 -o model.new.pth
  ckptool set model.pth config.name=resnet18 config.pretrained=true -o model.new.pth

\b
A value is JSON (0, 0.5, true, null, "text"); anything else is taken as a string.
"""


@click.command("set", epilog=SET_EPILOG)
@one_path
@click.argument("pairs", nargs=-1, required=True, metavar="KEY=VALUE...", shell_complete=complete_keys)
@writing_in_place
def set_entry(path: str, pairs: tuple[str, ...], how: Writing) -> int:
    """Set scalar entries to other values, or add them to an existing dict."""
    return edit_all(Job("set", partial(_set_entries, values=[_pair(text) for text in pairs])), (path,), how)


def _set_entries(checkpoint: Checkpoint, values: list[tuple[str, ckptool.Scalar]]) -> Checkpoint:
    for key, value in values:
        checkpoint = ckptool.set_entry(checkpoint, key, value)
    return checkpoint


def _pair(text: str) -> tuple[str, ckptool.Scalar]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise click.BadParameter(f"{text!r} is not KEY=VALUE, such as epoch=0", param_hint="KEY=VALUE")
    return key.strip(), as_scalar(value)


UNSET_EPILOG = """\b
Examples:
  ckptool unset model.pth config.secret -o model.new.pth
"""


@click.command(epilog=UNSET_EPILOG)
@one_path
@click.argument("keys", nargs=-1, required=True, metavar="KEY...", shell_complete=complete_keys)
@writing_in_place
def unset(path: str, keys: tuple[str, ...], how: Writing) -> int:
    """Remove entries by their exact path, whatever they are."""
    return edit_all(Job("unset", partial(_unset_entries, keys=keys)), (path,), how)


def _unset_entries(checkpoint: Checkpoint, keys: tuple[str, ...]) -> Checkpoint:
    for key in keys:
        checkpoint = ckptool.unset(checkpoint, key)
    return checkpoint
