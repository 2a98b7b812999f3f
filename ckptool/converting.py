"""From one format to another: which target is meant, and what it cannot hold."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from shlex import quote
from typing import Final

from .checkpoint import Change, Checkpoint, Target
from .edits.select import selected
from .errors import RefusedError, TargetError
from .human import listed
from .outputs import dcp, safetensors, torch_legacy
from .outputs.losses import KINDS, Loss, refuse
from .outputs.safetensors import Tied
from .programs import program_of

__all__ = ["FOLDERS", "TARGETS", "convert", "target_of"]

#: The formats that are written, and the suffixes that mean them.
TARGETS: Final = {
    "torch": (".pt", ".pth", ".ckpt", ".bin", ".th"),
    "safetensors": (".safetensors",),
    "dcp": (".dcp",),
    "legacy": (),
}
#: Those that are a folder of files.
FOLDERS: Final = frozenset(("dcp",))


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
) -> Checkpoint:
    """The checkpoint in another format when it is saved: "torch", "safetensors", "dcp" or "legacy" (before torch 1.6).

    ``key`` names the state dict for formats that hold one only; ``tied`` says what becomes of tensors that share
    memory: "keep-first" name, recorded as ``safetensors.torch.save_model`` does, or "clone" each. ``metadata`` are
    texts for the header of safetensors. Raises RefusedError where the format cannot hold something whose kind
    (``losses.KINDS``, or "all") is not in ``allow``; TargetError for a format that is not known.
    """
    if target not in TARGETS:
        raise TargetError(f"{target!r} is no format that is written", next=f"one of {listed(list(TARGETS))}")
    unknown = [kind for kind in allow if kind not in (*KINDS, "all")]
    if unknown:
        raise TargetError(f"{unknown[0]!r} is no kind of loss", next=f"one of {listed(list(KINDS), most=9)}")
    source = checkpoint.format
    program = program_of(checkpoint)
    beside = [Loss("entries", tuple(program.beside))] if program is not None and program.beside else []
    if target in ("torch", "legacy"):
        if metadata:
            what = "a file of torch.save has no texts beside its objects"
            raise TargetError(what, path=checkpoint.path, next=f"ckptool set {quote(checkpoint.path)} KEY=VALUE")
        refuse(beside, allow, checkpoint.path, "a state dict")
        if target == "legacy":
            return _legacy(checkpoint, allow)
        notes = tuple(f"without {loss.words}" for loss in beside)
        change = Change("convert", "", 1, 0, f"{source} -> torch-zip", notes)
        return checkpoint.changed(checkpoint.graph, [change], anew=True, target=Target("torch"))
    if target == "dcp":
        return _dcp(checkpoint, key, tied, allow, metadata)
    path = _one(checkpoint, key)
    chosen = next(item for item in checkpoint.state_dicts if item.path == path)
    found = beside + safetensors.losses(checkpoint, chosen, tied)
    refuse(found, allow, checkpoint.path, "safetensors")
    notes = tuple(f"without {loss.words}" for loss in found)
    change = Change("convert", path, 1, 0, f"{source} -> safetensors", notes)
    texts = {"format": "pt", **checkpoint.container.metadata, **(metadata or {})}
    return checkpoint.changed(checkpoint.graph, [change], target=Target("safetensors", path, tied, texts))


def _dcp(
    checkpoint: Checkpoint, key: str | None, tied: Tied, allow: Collection[str], metadata: Mapping[str, str] | None
) -> Checkpoint:
    """The whole checkpoint as a DCP folder."""
    if key is not None or metadata:
        what = "a DCP folder holds the whole checkpoint, and no texts beside it"
        step = f"take the state dict out first: ckptool extract {quote(checkpoint.path)}"
        raise TargetError(what, path=checkpoint.path, next=step if key is not None else "leave --metadata out")
    if tied == "keep-first":
        raise TargetError("a DCP folder has no place for other names of a tensor", next="--tied clone copies each")
    found = dcp.losses(checkpoint, tied=tied == "clone")
    refuse(found, allow, checkpoint.path, "a DCP folder")
    notes = [f"without {loss.words}" for loss in found]
    if dcp.has_ordered_dicts(checkpoint):
        notes.append("OrderedDicts come back as dicts, without the versions of modules")
    change = Change("convert", "", 1, 0, f"{checkpoint.format} -> dcp", tuple(notes))
    return checkpoint.changed(checkpoint.graph, [change], target=Target("dcp", "", tied))


def _legacy(checkpoint: Checkpoint, allow: Collection[str]) -> Checkpoint:
    """The sequential format; a file that has it keeps its own pickles and keys where it can."""
    found = torch_legacy.losses(checkpoint)
    refuse(found, allow, checkpoint.path, "a legacy file that torch loads")
    notes = tuple(f"without {loss.words}" for loss in found)
    change = Change("convert", "", 1, 0, f"{checkpoint.format} -> torch-legacy", notes)
    graph = torch_legacy.without(checkpoint) if found else checkpoint.graph
    anew = checkpoint.format != "torch-legacy" or bool(found)
    return checkpoint.changed(graph, [change], anew=anew, target=Target("legacy"))


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
