"""From one format to another: which target is meant, and what it cannot hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from shlex import quote
from typing import Final, NamedTuple

from ..base.errors import Again, RefusedError, TargetError
from ..base.text import argument, human_bytes, listed
from ..checkpoint.changes import Change
from ..checkpoint.checkpoint import Checkpoint, Target
from ..checkpoint.programs import NO_WEIGHTS, program_of
from ..checkpoint.selection import selected
from ..checkpoint.sharding import is_sharded
from ..checkpoint.survey import StateDict
from ..checkpoint.tensors import Tensor
from ..formats.dcp.writer import has_ordered_dicts, losses
from ..formats.hf.writer import parse_size
from ..formats.losses import KINDS, Loss, refuse
from ..formats.safetensors import writer as safetensors_writer
from ..formats.safetensors.writer import Tied
from ..formats.torch import legacy_writer
from ..values.elements import tensor_size
from .sharded import local_parts

#: The formats that are written, and the suffixes that mean them.
TARGETS: Final = {
    "torch": (".pt", ".pth", ".ckpt", ".bin", ".th"),
    "safetensors": (".safetensors",),
    "dcp": (".dcp",),
    "legacy": (),
}
#: Those that are a folder of files.
FOLDERS: Final = frozenset(("dcp",))
#: Those that are split into shards on request.
SHARDED: Final = frozenset(("torch", "safetensors"))


class _Wanted(NamedTuple):
    """What ``convert`` was asked for; ``beside`` is what a program has beside its weights, ``shard_size`` in bytes."""

    key: str | None
    tied: Tied
    allow: Collection[str]
    metadata: Mapping[str, str]
    shard_size: int
    beside: list[Loss]

    def shape(self, tensor_bytes: int) -> str:
        """The words for one file, one in a folder, or several."""
        if not self.shard_size:
            return ""
        if tensor_bytes <= self.shard_size:
            return ", one file in a folder"
        return f" in shards of at most {human_bytes(self.shard_size)}"


def says_format(path: str) -> str:
    """The format that the suffix of a name says, "" for none."""
    suffix = os.path.splitext(path)[1].lower()
    return next((name for name, suffixes in TARGETS.items() if suffix in suffixes), "")


def target_of(path: str) -> str:
    """The format that the suffix of an output says; raises TargetError where it says none."""
    found = says_format(path)
    if not found:
        suffix = os.path.splitext(path)[1]
        if suffix[1:].isdecimal():  # a folder called model-1.5
            suffix = ""
        known = f"there are {listed(list(TARGETS))}"
        if suffix:
            called = os.path.splitext(path)[0] + TARGETS["safetensors"][0]
            what, step = f"the suffix {suffix!r} says no format; {known}", f"call it {quote(called)}, or --to-format"
            raise TargetError(what, path=path, next=step, again=Again((("-o", called),)))
        what, step = f"the name has no suffix that says a format; {known}", "say it: --to-format safetensors"
        raise TargetError(what, path=path, next=step, again=Again((("--to-format", "safetensors"),)))
    return found


def own_target(checkpoint: Checkpoint, path: str) -> str:
    """The format that a checkpoint has and an output called ``path`` keeps; raises TargetError where it is not sharded.

    The name of the output says no format.
    """
    own = checkpoint.traits.written
    own = "torch" if own == "same" else own
    return own if own in SHARDED else target_of(path)


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
    """The checkpoint in another format when it is saved: "torch", "safetensors", "dcp" or "legacy" (before torch 1.6).

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
    size = parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    if size and target not in SHARDED:
        what = f"no reader of {target} knows shards with an index"
        raise TargetError(what, path=checkpoint.path, next="leave --max-shard-size out")
    program = program_of(checkpoint)
    if program is not None and not checkpoint.survey.tensors:
        step = f"what it holds: ckptool inspect {argument(checkpoint.path)}"
        what = f"{program.kind} of which there is nothing to convert: {NO_WEIGHTS}"
        raise RefusedError(what, path=checkpoint.path, next=step)
    beside = [Loss("entries", tuple(program.beside))] if program is not None and program.beside else []
    return _WAYS[target](checkpoint, _Wanted(key, tied, allow, metadata or {}, size, beside))


def _torch(checkpoint: Checkpoint, wanted: _Wanted) -> Checkpoint:
    """A zip of the whole object."""
    if wanted.shard_size:
        return _torch_shards(checkpoint, wanted)
    _refuse_texts(checkpoint, wanted)
    refuse(wanted.beside, wanted.allow, checkpoint.path, "a state dict")
    change = Change("convert", "", 1, 0, f"{checkpoint.format} -> torch-zip", _without(wanted.beside))
    return checkpoint.changed(checkpoint.graph, [change], anew=True, target=Target("torch"))


def _torch_shards(checkpoint: Checkpoint, wanted: _Wanted) -> Checkpoint:
    """A folder of zips, a part of the state dict each."""
    _refuse_texts(checkpoint, wanted)
    chosen = _one(checkpoint, wanted.key)
    lost = tuple(safetensors_writer.outside(checkpoint, chosen))
    found = wanted.beside + ([Loss("entries", lost)] if lost else [])
    refuse(found, wanted.allow, checkpoint.path, "a folder of shards")
    notes = (*_without(found), *_layout_notes(checkpoint, chosen))
    storages = checkpoint.survey.reader.storages
    own = {tensor.storage for tensor in _tensors(checkpoint, chosen) if tensor.storage}
    shape = wanted.shape(sum(storages[key].nbytes for key in own))
    change = Change("convert", chosen.path, 1, 0, f"{checkpoint.format} -> torch-zip{shape}", notes)
    target = Target("torch", chosen.path, shard_size=wanted.shard_size)
    return checkpoint.changed(checkpoint.graph, [change], anew=True, target=_called(target, checkpoint))


def _safetensors(checkpoint: Checkpoint, wanted: _Wanted) -> Checkpoint:
    """A file of one state dict, or a folder of shards."""
    checkpoint, parts = _with_parts(checkpoint, wanted, _one(checkpoint, wanted.key))
    chosen = _one(checkpoint, wanted.key)
    found = wanted.beside + parts + safetensors_writer.losses(checkpoint, chosen, wanted.tied)
    # Where the first name is kept, other views of the same memory are copied: that is said, and was asked for.
    refuse(found, [*wanted.allow, "sharing"] if wanted.tied else wanted.allow, checkpoint.path, "safetensors")
    left_out = _names_left_out(checkpoint, chosen, wanted.tied)
    notes = (*_without(found), *left_out, *_layout_notes(checkpoint, chosen))
    shape = wanted.shape(sum(map(tensor_size, _tensors(checkpoint, chosen))))
    change = Change("convert", chosen.path, 1, 0, f"{checkpoint.format} -> safetensors{shape}", notes)
    texts = {"format": "pt", **checkpoint.container.metadata, **wanted.metadata}
    target = Target("safetensors", chosen.path, wanted.tied, texts, wanted.shard_size)
    return checkpoint.changed(checkpoint.graph, [change], target=_called(target, checkpoint))


def _tensors(checkpoint: Checkpoint, chosen: StateDict) -> Iterator[Tensor]:
    """The tensors of a state dict."""
    return (entry.tensor for entry in checkpoint.survey.tensors_in([chosen.path]))


def _names_left_out(checkpoint: Checkpoint, chosen: StateDict, tied: Tied) -> tuple[str, ...]:
    """What "keep-first" leaves out: names, each with the one that is kept."""
    names = safetensors_writer.chosen_tensors(checkpoint, chosen, tied).names if tied == "keep-first" else {}
    told = listed([f"{other!r} for {kept!r}" for other, kept in names.items()], most=3)
    return (f"without the second names of tied tensors, noted in the header: {told}",) if names else ()


def _called(target: Target, checkpoint: Checkpoint) -> Target:
    """Its files are called as those of the input, where both formats call them so."""
    stem, variant = (getattr(checkpoint.container, name, "") for name in ("stem", "variant"))
    return target._replace(stem=stem if stem in ("adapter_model", "diffusion_pytorch_model") else "", variant=variant)


def _with_parts(
    checkpoint: Checkpoint, wanted: _Wanted, chosen: StateDict | None = None
) -> tuple[Checkpoint, list[Loss]]:
    """The checkpoint with the parts that one rank had as plain tensors, and the loss that this is.

    ``chosen`` is the one state dict that is asked for.
    """
    survey = checkpoint.survey
    entries = survey.tensors if chosen is None else survey.tensors_in([chosen.path])
    spread = [entry for entry in entries if is_sharded(entry.tensor)]
    if not spread:
        return checkpoint, []
    names = tuple(entry.path if chosen is None else entry.key for entry in spread)
    return local_parts(checkpoint), [Loss("shards", names)]


def _without(losses: Collection[Loss]) -> tuple[str, ...]:
    return tuple(f"without {loss.words}" for loss in losses)


def _refuse_texts(checkpoint: Checkpoint, wanted: _Wanted) -> None:
    if wanted.metadata:
        what = "a file of torch.save has no texts beside its objects"
        raise TargetError(what, path=checkpoint.path, next=f"ckptool set {quote(checkpoint.path)} KEY=VALUE")


def _layout_notes(checkpoint: Checkpoint, chosen: StateDict) -> tuple[str, ...]:
    """What no reader of a state dict misses, and a file of torch.save has: said, and not refused."""
    gone = ["its OrderedDict"] if chosen.container == "OrderedDict" else []
    gone += ["_metadata, the versions of modules"] if chosen.metadata >= 0 else []
    return (f"without {' and '.join(gone)}; keys in the order of the format",) if gone else ()


def _dcp(checkpoint: Checkpoint, wanted: _Wanted) -> Checkpoint:
    """The whole checkpoint as a DCP folder."""
    if wanted.key is not None or wanted.metadata:
        what = "a DCP folder holds the whole checkpoint, and no texts beside it"
        step = f"take the state dict out first: ckptool extract {quote(checkpoint.path)}"
        raise TargetError(what, path=checkpoint.path, next=step if wanted.key is not None else "leave --metadata out")
    if wanted.tied == "keep-first":
        raise TargetError("a DCP folder has no place for other names of a tensor", next="--tied clone copies each")
    checkpoint, parts = _with_parts(checkpoint, wanted)
    found = wanted.beside + parts + losses(checkpoint, tied=wanted.tied == "clone")
    refuse(found, wanted.allow, checkpoint.path, "a DCP folder", {"sharing": ("--allow-loss", "sharing")})
    notes = _without(found)
    if has_ordered_dicts(checkpoint):
        notes += ("OrderedDicts come back as dicts, without the versions of modules",)
    change = Change("convert", "", 1, 0, f"{checkpoint.format} -> dcp", notes)
    return checkpoint.changed(checkpoint.graph, [change], target=Target("dcp", "", wanted.tied))


def _legacy(checkpoint: Checkpoint, wanted: _Wanted) -> Checkpoint:
    """The sequential format; a file that has it keeps its own pickles and keys where it can."""
    _refuse_texts(checkpoint, wanted)
    lost = legacy_writer.losses(checkpoint)
    found = wanted.beside + lost
    refuse(found, wanted.allow, checkpoint.path, "a legacy file that torch loads", {})
    change = Change("convert", "", 1, 0, f"{checkpoint.format} -> torch-legacy", _without(found))
    graph = legacy_writer.without(checkpoint) if lost else checkpoint.graph
    anew = not checkpoint.traits.in_a_row or bool(lost)
    return checkpoint.changed(graph, [change], anew=anew, target=Target("legacy"))


#: How each format is made, by its name.
_WAYS: Final[Mapping[str, Callable[[Checkpoint, _Wanted], Checkpoint]]] = {
    "torch": _torch,
    "safetensors": _safetensors,
    "dcp": _dcp,
    "legacy": _legacy,
}


def _one(checkpoint: Checkpoint, key: str | None) -> StateDict:
    """The one state dict."""
    chosen = selected(checkpoint, key)
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        step = f"what is in it: ckptool inspect {quote(checkpoint.path)} --tree"
        raise RefusedError("there is no state dict in it", path=checkpoint.path, next=step)
    places = [item.path or "." for item in chosen]
    what = f"there are {len(chosen)} state dicts, {listed(list(map(repr, places)))}, and such an output holds one"
    step = f"choose, such as --key {quote(places[0])}"
    raise TargetError(what, path=checkpoint.path, next=step, again=Again((("--key", places[0]),)))
