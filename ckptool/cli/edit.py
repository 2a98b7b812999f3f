"""The commands strip-module, add-module and remap."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

import ckptool

from ..base.globs import Globs
from ..edits.devices import device_pairs
from ..edits.keys import parse_repeat
from .editing import Job, edit_all
from .options import Writing, choosing, device, paths, repeatable, writing_in_place

_prefix = click.option(
    "--prefix", default="module.", show_default=True, metavar="TEXT", help="The prefix, in whole segments."
)

STRIP_EPILOG = """\b
Examples:
  ckptool strip-module model.pth -o plain.pth
  ckptool strip-module model.pth -o plain.pth --wrappers
  ckptool strip-module model.pth -o plain.pth --prefix model. --key state_dict
  ckptool strip-module *.pth --out-dir plain/ --dry-run
"""


@click.command("strip-module", epilog=STRIP_EPILOG)
@paths
@_prefix
@click.option("--repeat", default="1", metavar="N|all", show_default=True, help="How often to remove the prefix.")
@click.option(
    "--wrappers", is_flag=True, help="Remove the segments of all known wrappers: _orig_mod, _fsdp_wrapped_module, ..."
)
@choosing
@writing_in_place
def strip_module(paths: tuple[str, ...], prefix: str, repeat: str, wrappers: bool, only: Globs, how: Writing) -> int:
    """Remove the prefix 'module.' from the keys of every state dict in the file.

    Keys without it, and everything else in the file, stay as they are, byte for byte. With --wrappers the segments of
    wrappers are removed anywhere in the name, module only at the start and next to another wrapper.
    """
    if wrappers and (prefix, repeat) != ("module.", "1"):
        raise click.UsageError("--wrappers removes all known wrappers: --prefix and --repeat cannot be used with it.")
    scope: dict[str, Any] = {"key": how.key, **only.patterns}
    if wrappers:
        edit = partial(ckptool.strip_wrappers, **scope)
    else:
        edit = partial(ckptool.strip_prefix, prefix=prefix, repeat=parse_repeat(repeat), **scope)
    return edit_all(Job("strip-module", edit, of_keys=True, keyed=True, only=only), paths, how)


ADD_EPILOG = """\b
Examples:
  ckptool add-module model.pth -o parallel.pth
  ckptool add-module model.pth -o lightning.pth --prefix model. --key state_dict
"""


@click.command("add-module", epilog=ADD_EPILOG)
@paths
@_prefix
@choosing
@writing_in_place
def add_module(paths: tuple[str, ...], prefix: str, only: Globs, how: Writing) -> int:
    """Add the prefix 'module.' to every key of every state dict in the file.

    A model wrapped in DataParallel or DistributedDataParallel can then load it.
    """
    edit = partial(ckptool.add_prefix, prefix=prefix, key=how.key, **only.patterns)
    return edit_all(Job("add-module", edit, of_keys=True, keyed=True, only=only), paths, how)


REMAP_EPILOG = """\b
Examples:
  ckptool remap model.pth --to cpu -o model.cpu.pth
  ckptool remap model.pth --map cuda:1=cuda:0 -o model.gpu0.pth
  ckptool remap model.pth --map 'cuda:*=cpu' -o model.cpu.pth
  CUDA_VISIBLE_DEVICES=1,3 saved with physical numbers:
  ckptool remap model.pth --visible 1,3 -o model.logical.pth
"""


@click.command("remap", epilog=REMAP_EPILOG)
@paths
@click.option("--to", metavar="DEVICE", default="", callback=device, help="Move what is not on cpu or meta.")
@repeatable("--map", "pairs", metavar="FROM=TO", help="Move one device to another, as in cuda:*=cpu")
@click.option("--visible", metavar="N,N", help="Renumber physical GPUs to logical ones, like CUDA_VISIBLE_DEVICES.")
@click.option("--include-cpu", is_flag=True, help="With --to: also move what is on cpu or meta.")
@click.option("--strings", is_flag=True, help="Also change plain strings that name a device.")
@choosing
@writing_in_place
def remap(
    paths: tuple[str, ...],
    to: str,
    pairs: tuple[str, ...],
    visible: str | None,
    include_cpu: bool,
    strings: bool,
    only: Globs,
    how: Writing,
) -> int:
    """Retarget devices: location tags of storages, and torch.device objects. No GPU is needed.

    Tensors on cpu stay there unless --include-cpu or --map moves them: optimizer steps and random states belong there.
    """
    devices = ckptool.DeviceMap(to, device_pairs(pairs), _numbers(visible), include_cpu)
    devices.check()
    edit = partial(ckptool.remap, devices=devices, strings=strings, key=how.key, **only.patterns)
    return edit_all(Job("remap", edit, keyed=True, only=only), paths, how)


def _numbers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise click.BadParameter("numbers of GPUs, such as 1,3", param_hint="--visible")
    return tuple(map(int, parts))
