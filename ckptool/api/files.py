"""From checkpoints to files, and to real tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ..base.errors import RefusedError, TargetError
from ..base.map_location import MapLocation
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.paths import parse_path
from ..formats.opening import open_checkpoint as open

if TYPE_CHECKING:
    import torch

    from ..files.write.output import Written


Path = str | os.PathLike[str]


def save(
    checkpoint: Checkpoint,
    path: Path,
    *,
    force: bool = False,
    follow_links: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Written:
    """Write a checkpoint: the edited metadata and the untouched bytes of its tensors.

    An unedited one is copied byte for byte. The output appears whole or not at all, with the mode of the
    input, or with ``force`` that of the file it replaces. Of a folder, links to files outside of it are
    written with ``follow_links`` only. Before it takes its name it is read back: its structure,
    names, shapes, dtypes, sizes and sharing must be those of the checkpoint. ``progress`` is called with numbers of
    bytes. Raises RefusedError when the output exists or is the input, OutputError when it cannot be written,
    ReadBackError where it does not read as it must.
    """
    from ..files.write.output import Written
    from ..saving import save as saved

    found = saved(
        checkpoint, os.fspath(path), force=force, follow_links=follow_links, watch=lambda size: nullcontext(progress)
    )
    return Written(found.path, found.planned.size)


def load(
    path: Path,
    map_location: MapLocation = None,
    strip_prefix: str | None = None,
    key: str | None = None,
) -> dict[str, torch.Tensor]:
    """The state dict of a checkpoint as real tensors, ready for ``model.load_state_dict``.

    Loads with ``torch.load(weights_only=True, map_location=...)`` and takes the one state dict out, wherever
    it is; ``key`` names it where there are several. ``strip_prefix`` (such as "module.") is taken off the
    keys that have it. Raises TargetError when there is no state dict, or more than one and no ``key``.
    """
    from ..checkpoint.selection import selected
    from ..edits.keys import renamed_modules, stripping
    from ..reports.loading import load_whole
    from ..values.torch.loads import at_path

    with open(path) as checkpoint:
        chosen = selected(checkpoint, key)
        if len(chosen) != 1:
            there = ", ".join(repr(item.path) for item in chosen)
            what = f"there are {len(chosen)} state dicts: {there}" if chosen else "there is no state dict in it"
            raise TargetError(what, path=checkpoint.path, next="name one by key=..." if chosen else "torch.load it")
        steps = parse_path(chosen[0].path)
    found: Any = at_path(load_whole(checkpoint.path, map_location), steps)
    if strip_prefix is None:
        return found  # type: ignore[no-any-return]
    rename = stripping(strip_prefix)
    renamed = type(found)((rename(name), value) for name, value in found.items())
    if len(renamed) < len(found):
        first: dict[str, str] = {}
        one, other = next((first[rename(key)], key) for key in found if first.setdefault(rename(key), key) != key)
        what = f"the keys {one!r} and {other!r} would both be called {rename(one)!r}"
        raise RefusedError(what, path=checkpoint.path, next="load it without strip_prefix and choose")
    metadata = getattr(found, "_metadata", None)
    if metadata is not None:
        # load_state_dict reads the versions of modules from it.
        values = list(metadata.values())
        moved = renamed_modules(list(metadata), rename)
        renamed._metadata = type(metadata)((path, values[source]) for path, _, source in moved)
    return renamed  # type: ignore[no-any-return]
