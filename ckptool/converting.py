"""From one format to another: which target is meant, and what it cannot hold."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from shlex import quote
from typing import Final

from .checkpoint import Change, Checkpoint, Target
from .edits.select import selected
from .errors import RefusedError, TargetError
from .human import human_bytes, listed
from .outputs import safetensors
from .outputs.losses import KINDS, Loss, refuse
from .outputs.safetensors import Tied
from .outputs.shards import parse_size
from .survey import StateDict

__all__ = ["TARGETS", "convert", "target_of"]

#: The formats that are written, and the suffixes that mean them.
TARGETS: Final = {
    "torch": (".pt", ".pth", ".ckpt", ".bin", ".th"),
    "safetensors": (".safetensors",),
}


def target_of(path: str) -> str:
    """The format that the suffix of an output says; raises TargetError where it says none."""
    suffix = os.path.splitext(path)[1].lower()
    found = next((name for name, suffixes in TARGETS.items() if suffix in suffixes), "")
    if not found:
        what = f"the suffix {suffix!r} says no format" if suffix else "the name has no suffix that says a format"
        raise TargetError(what, path=path, next=f"say it: --to-format {'|'.join(TARGETS)}")
    return found


def convert(
    checkpoint: Checkpoint,
    target: str,
    *,
    key: str | None = None,
    tied: Tied = "",
    allow: Collection[str] = (),
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str = 0,
) -> Checkpoint:
    """The checkpoint in another format, "torch" or "safetensors", when it is saved.

    ``key`` names the state dict for formats that hold one only; ``tied`` says what becomes of tensors that share
    memory: "keep-first" name, recorded as ``safetensors.torch.save_model`` does, or "clone" each. ``metadata`` are
    texts for the header of safetensors. ``max_shard_size``, in bytes or text such as "5GB", makes a folder of shards
    with an index, as huggingface_hub splits them; 0 a single file.

    Raises RefusedError where the format cannot hold something whose kind
    (``losses.KINDS``, or "all") is not in ``allow``; TargetError for a format that is not known.
    """
    if target not in TARGETS:
        raise TargetError(f"{target!r} is no format that is written", next=f"one of {listed(list(TARGETS))}")
    unknown = [kind for kind in allow if kind not in (*KINDS, "all")]
    if unknown:
        raise TargetError(f"{unknown[0]!r} is no kind of loss", next=f"one of {listed(list(KINDS), most=9)}")
    source = checkpoint.format
    size = parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    shape = f" in shards of at most {human_bytes(size)}" if size else ""
    if target == "torch" and size:
        path = _one(checkpoint, key)
        chosen = next(item for item in checkpoint.state_dicts if item.path == path)
        lost = tuple(safetensors.outside(checkpoint, chosen))
        found = [Loss("entries", lost)] if lost else []
        refuse(found, allow, checkpoint.path, "a folder of shards")
        notes = (*(f"without {loss.words}" for loss in found), *_layout_notes(checkpoint, chosen))
        change = Change("convert", path, 1, 0, f"{source} -> torch-zip{shape}", notes)
        return checkpoint.changed(checkpoint.graph, [change], anew=True, target=Target("torch", path, shard_size=size))
    if target == "torch":
        if metadata:
            what = "a file of torch.save has no texts beside its objects"
            raise TargetError(what, path=checkpoint.path, next=f"ckptool set {quote(checkpoint.path)} KEY=VALUE")
        change = Change("convert", "", 1, 0, f"{source} -> torch-zip")
        return checkpoint.changed(checkpoint.graph, [change], anew=True, target=Target("torch"))
    path = _one(checkpoint, key)
    chosen = next(item for item in checkpoint.state_dicts if item.path == path)
    found = safetensors.losses(checkpoint, chosen, tied)
    refuse(found, allow, checkpoint.path, "safetensors")
    notes = (*(f"without {loss.words}" for loss in found), *_layout_notes(checkpoint, chosen))
    change = Change("convert", path, 1, 0, f"{source} -> safetensors{shape}", notes)
    texts = {"format": "pt", **checkpoint.container.metadata, **(metadata or {})}
    return checkpoint.changed(checkpoint.graph, [change], target=Target("safetensors", path, tied, texts, size))


def _layout_notes(checkpoint: Checkpoint, chosen: StateDict) -> tuple[str, ...]:
    """What no reader of a state dict misses, and a file of torch.save has: said, and not refused."""
    gone = ["its OrderedDict"] if chosen.container == "OrderedDict" else []
    gone += ["_metadata, the versions of modules"] if chosen.metadata >= 0 else []
    return (f"without {' and '.join(gone)}; keys in the order of the format",) if gone else ()


def _one(checkpoint: Checkpoint, key: str | None) -> str:
    """The path of the one state dict."""
    chosen = selected(checkpoint, key)
    if len(chosen) == 1:
        return chosen[0].path
    if not chosen:
        step = f"ckptool inspect {quote(checkpoint.path)} says what is in it"
        raise RefusedError("there is no state dict in it", path=checkpoint.path, next=step)
    places = [item.path or "." for item in chosen]
    what = f"there are {len(chosen)} state dicts, and safetensors holds one"
    raise TargetError(what, path=checkpoint.path, next=f"choose: --key {listed(places)}")
