"""Convert between formats: find the target that a name and the options of an output mean, and refuse what it lacks."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..base.errors import CkptoolError, RefusedError, TargetError, adding_path
from ..base.findings import INNER
from ..base.globs import escaped
from ..base.prefixes import wrapper_prefix
from ..base.records import NamedTuple
from ..base.steps import AnyStep, NextStep, Step, command, folder_of, option, suggested_output, tree_step
from ..base.suffixes import TORCH
from ..base.text import human_bytes, join_limited
from ..checkpoint.checkpoint import Change, Checkpoint, Target, Tied, rescue_step
from ..checkpoint.paths import within
from ..checkpoint.programs import NO_WEIGHTS, program_of
from ..checkpoint.selection import normal_path, selected
from ..checkpoint.survey import StateDict
from ..checkpoint.tensors import is_sharded
from ..files.archives import is_address
from ..files.folders import open_folder
from ..formats.losses import KINDS, Loss, entries_outside, outside, refuse
from ..formats.names.numbered import keeps_number
from ..formats.opening import takes_path
from ..formats.outputs import OUTPUTS, TARGETS, OutputFormat, named_format
from ..formats.planning import DEFAULT_SHARD_SIZE, makes_folder, makes_shards, refuse_damage
from ..formats.rank_part import GATHER, empty_weights, part_of
from ..safety.storages import storage_flaws
from .entries import extract
from .flat_params import refuse_flat, unflatten_by
from .optimizers import optimizers
from .sharded import local_parts


@takes_path
def convert(
    checkpoint: Checkpoint,
    to_format: str,
    *,
    key: str | None = None,
    tied: Tied = "",
    allow_loss: Collection[str] = (),
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str = 0,
    deepspeed_16bit: bool = False,
    unflatten: Any = None,
    use_ema: bool = False,
    to_names: str = "",
    recipe: str = "",
    config: str | Mapping[str, Any] | None = None,
    strict: bool = False,
) -> Checkpoint:
    """Convert to the format to save in: "torch", "safetensors", "dcp" or "legacy" (before torch 1.6).

    A single state dict is written without the rest of the file: optimizer states, device tags and all entries that hold
    no weights are left out, and ``Checkpoint.changes`` lists them; ``strict`` refuses that. ``key`` names the state
    dict to write if there are several, or if other entries may hold weights. ``tied`` chooses what to do with tensors
    that share memory: "keep-first" keeps one name and records the others as ``safetensors.torch.save_model`` does,
    "clone" copies each. ``metadata`` are strings for the safetensors header. ``max_shard_size``, in bytes or text such
    as "5GB", makes a folder of shards with an index, split as huggingface_hub does; 0 makes a single file.
    ``deepspeed_16bit`` takes the 16-bit model weights of a DeepSpeed folder, not the optimizer's fp32 masters.
    ``unflatten`` is a target as for ``match``: a checkpoint, a lock file or a model with the names and shapes that flat
    parameters of FSDP1 lack. ``use_ema`` gives the model its averaged weights, as the edit does. ``to_names`` gives a
    model the names and the layout of another library, such as "hf:llama", ``recipe`` those that a TOML file describes;
    ``config`` has numbers of the model, as a JSON file or a dict.
    Raise RefusedError if the format cannot hold something else whose kind (``losses.KINDS``, or "all") is not in
    ``allow_loss``, TargetError for an unknown format. "shards" also converts a file that is one part of a checkpoint,
    such as ``consolidated.00.pth``, on its own.

    >>> with ckptool.open("model.pth") as checkpoint:
    ...     saved = ckptool.save(ckptool.convert(checkpoint, "safetensors"), "converted.safetensors")
    >>> ckptool.open("converted.safetensors").format
    'safetensors'
    """
    # A string is one kind of loss, not one kind per letter.
    allow_loss = (allow_loss,) if isinstance(allow_loss, str) else allow_loss
    if to_format not in TARGETS:
        message, step = f"{to_format!r} is not a format that can be written", f"one of {join_limited(TARGETS)}"
        if to_format in OUTPUTS and OUTPUTS[to_format].layout == "GGUF":
            step = "python convert_hf_to_gguf.py FOLDER of llama.cpp makes it from a folder with config.json"
        raise TargetError(message, next=step)
    unknown = [kind for kind in allow_loss if kind not in (*KINDS, "all")]
    if unknown:
        raise TargetError(f"{unknown[0]!r} is not a kind of loss", next=f"one of {join_limited(list(KINDS), most=9)}")
    size = max_shard_size
    if isinstance(size, str):
        from ..formats.hf.writer import parse_size

        size = parse_size(size)
    output = OUTPUTS[to_format]
    if size and not output.shards:
        message = f"no reader of {to_format} supports shards with an index"
        raise TargetError(message, path=checkpoint.path, next="leave `--max-shard-size=` out")
    request = Conversion("", tied, allow_loss, metadata or {}, size, deepspeed_16bit, strict=strict, key=key)
    whole = checkpoint
    try:
        if not takes_part(allow_loss):
            refuse_part(checkpoint)
        if deepspeed_16bit:
            checkpoint = with_weights(checkpoint, "module")
        if unflatten is not None:
            checkpoint = unflatten_by(checkpoint, unflatten)
        if checkpoint.container.in_blocks:
            from .originals import with_originals  # imported only for GGUF

            checkpoint = with_originals(checkpoint)
        refuse_flat(checkpoint, key)
        if empty := empty_weights(checkpoint):
            raise RefusedError(empty, path=checkpoint.path, next=GATHER)
        if use_ema:
            from . import averages  # imported only for averages

            checkpoint = averages.use_ema(checkpoint, key=key)
        if to_names or recipe:
            from .recipes import apply_recipe, named_as  # imported only for other names

            if to_names:
                checkpoint = named_as(checkpoint, to_names, key=key, config=config, allow_loss=allow_loss)
                if checkpoint.target is not None:
                    return checkpoint  # the layout of a LoRA has a format of its own
            if recipe:
                checkpoint = apply_recipe(checkpoint, recipe, key=key, config=config)
        return _converted(checkpoint, output, request)
    except (RefusedError, TargetError) as error:
        better = _elsewhere(whole, output, request, error)
        if better is not None:
            raise better from error
        raise


def _converted(checkpoint: Checkpoint, output: OutputFormat, request: Conversion) -> Checkpoint:
    """Write with the options; errors concern this checkpoint only, and suggest no other path."""
    key, holds_one = request.key, output.holds_one(request.shard_size)
    if key is not None and not holds_one:
        if normal_path(key):
            checkpoint = extract(checkpoint, *(item.path for item in selected(checkpoint, key)))
        key, request = None, request._replace(key=None)
    program = program_of(checkpoint)
    if program is not None and not checkpoint.survey.tensors:
        step = command("inspect", checkpoint.path)
        message = f"there is nothing to convert in {program.kind}: {NO_WEIGHTS}"
        raise RefusedError(message, path=checkpoint.path, next=step)
    beside = (Loss("entries", tuple(program.beside)),) if program is not None and program.beside else ()
    request = request._replace(beside=beside)
    chosen = selected(checkpoint, key) if holds_one else []
    if key is None and len(chosen) > 1:
        keys = [item.path or "." for item in chosen]
        message = f"there are {len(keys)} state dicts, {join_limited(list(map(repr, keys)))}, and the output holds one"
        raise TargetError(message, path=checkpoint.path, next=f"choose one, for example {option('key', keys[0])}")
    try:
        return _written_as(checkpoint, output, request)
    except RefusedError as error:
        # Missing bytes must be reported before any question about permitted losses.
        refuse_damage(checkpoint)
        flaw = next((flaw for flaw in storage_flaws(checkpoint) if flaw.refused_by_torch), None)
        if flaw is not None:
            raise RefusedError(flaw.message, path=checkpoint.path, next=rescue_step(checkpoint)) from error
        if program is not None and program.unnamed and not {"entries", "all"} & {*request.allow_loss}:
            raise RefusedError(program.lacking, path=checkpoint.path, next=program.keeping) from error
        if any(entry.tensor.kind == "array" for entry in checkpoint.survey.tensors):
            step = command("sanitize", checkpoint.path, output=suggested_output(checkpoint.path, "plain"))
            error.step = "make plain tensors of the arrays first: " + step
        raise


def _elsewhere(
    checkpoint: Checkpoint, output: OutputFormat, request: Conversion, error: CkptoolError
) -> CkptoolError | None:
    part = None if takes_part(request.allow_loss) else part_of(checkpoint)
    if part is not None and part.folder and (part.cut or isinstance(error, RefusedError)):
        return RefusedError(part.message, path=checkpoint.path, next=_step_at(part.folder, output, request))
    for problem in checkpoint.container.problems:
        if problem.code == INNER and isinstance(error, TargetError):
            message = f"{error.what}; {problem.message}"
            return TargetError(message, path=checkpoint.path, next=_step_at(problem.where, output, request))
    return None


def _step_at(path: str, output: OutputFormat, request: Conversion) -> NextStep:
    given: dict[str, Any] = {"key": request.key, "deepspeed_16bit": request.deepspeed_16bit, "tied": request.tied}
    if request.shard_size:
        given |= {"to_format": output.name, "max_shard_size": str(request.shard_size)}
    extension = "" if request.shard_size else output.extension
    return command("convert", path, output=suggested_output(path, "joined", extension), **given)


def with_weights(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """Return an unedited checkpoint with other weights from its files; raise TargetError if there are none."""
    with adding_path(checkpoint.path):
        graph = checkpoint.container.other_weights(name)
        dtypes = checkpoint.container.other_dtypes(name)
    if graph is not checkpoint.graph:
        return checkpoint.changed(graph, [Change("weights", "", 1, 0, f"the weights of {name!r} taken")])
    from .cast import cast  # imported late, because it computes values

    own = {entry.key: entry.tensor.dtype for entry in checkpoint.survey.tensors_in([name])}
    names: dict[str, list[str]] = {}
    for key, dtype in dtypes.items():
        if own.get(key, dtype) != dtype:
            names.setdefault(dtype, []).append(escaped(key))
    for dtype, keys in names.items():
        checkpoint = cast(checkpoint, dtype, key=name, include=keys)
    return checkpoint


def _written_as(checkpoint: Checkpoint, output: OutputFormat, request: Conversion) -> Checkpoint:
    chosen = _only_dict(checkpoint, request.key, output) if output.holds_one(request.shard_size) else None
    parts: list[Loss] = []
    if output.plain:
        checkpoint, parts = _with_parts(checkpoint, chosen)
        chosen = chosen and _only_dict(checkpoint, request.key, output)
    key = chosen.path if chosen is not None else ""
    target = Target(output.name, key, request.tied, request.metadata, request.shard_size)
    fit = output.writer(request.shard_size).fit(checkpoint, target)
    named = request.key is not None
    training = {optimizer.ref for optimizer in optimizers(checkpoint.graph)}
    entries = entries_outside(checkpoint, chosen, named=named, training=training) if chosen is not None else []
    lost = [*request.beside, *parts, *entries, *fit.losses]
    # "keep-first" copies other views of the same memory. The user asked for this, so it is reported, not refused.
    allowed = [*request.allow_loss, "sharing"] if request.tied else request.allow_loss
    refuse(lost, allowed, checkpoint.path, fit.holder, fit.ways, strict=request.strict)
    notes = [loss.report for loss in lost] + [*fit.notes]
    if chosen is not None:
        beside = tuple(path for path, _ in outside(checkpoint, chosen)) if request.key is not None else ()
        left_out = [*beside, *(place for loss in lost if loss.kind == "entries" for place in loss.where)]
        # A remark on unchanged tensors would contradict that they are left out.
        kept = (one for one in checkpoint.changes if one.number or not any(within(one.path, out) for out in left_out))
        checkpoint = checkpoint.replace(changes=tuple(kept))
        notes = [*([f"left out: {join_limited(beside, most=6)}"] if beside else []), *notes]
        # Details that only torch.save files keep, and that loading a state dict does not need.
        gone = ["the type OrderedDict"] if chosen.container == "OrderedDict" else []
        gone += ["_metadata (versions of modules)"] if chosen.metadata >= 0 else []
        notes += [f"not kept: {join_limited([*gone, 'the order of keys'])}"] if gone else []
        prefix = wrapper_prefix([str(checkpoint.graph.nodes[key]) for key, _ in chosen.items])
        if prefix.keys:
            which = "all keys" if prefix.keys == prefix.total else f"{prefix.keys:,} of {prefix.total:,} keys"
            notes.append(f"{which} keep the prefix {prefix.name!r}; strip-module removes it from the output")
    elif not output.plain and (part := part_of(checkpoint)) is not None:
        notes.append(f"still a part: {part.message}")
    if request.shard_size:
        inside = checkpoint.survey.tensors_in([chosen.path]) if chosen is not None else []
        large = [entry.key for entry in inside if entry.tensor.own_bytes > request.shard_size]
        if large and fit.size > request.shard_size:
            size = human_bytes(request.shard_size)
            notes.append(f"larger than {size}, so each has a shard of its own: {join_limited(large, most=3)}")
        notes += _without_config(checkpoint)
    if (save := checkpoint.container.rank_save) is not None and not save.recorded:
        notes.append(save.unsure)
    files = ""
    if request.shard_size:
        shards = f" in shards of at most {human_bytes(request.shard_size)}"
        files = ", one file in a folder" if fit.size <= request.shard_size else shards
    what = f"{checkpoint.format} -> {output.reads_as}{files}"
    change = Change("convert", key, 1, 0, what, tuple(notes))
    graph = fit.graph() if fit.graph is not None else checkpoint.graph
    return checkpoint.changed(graph, [change], needs_relayout=fit.relayout, target=fit.target)


def _without_config(checkpoint: Checkpoint) -> tuple[str, ...]:
    from ..formats.names.hf import ADAPTER_CONFIG
    from .model_config import CONFIG, config_of

    if config_of(checkpoint) is not None or checkpoint.companions.get(ADAPTER_CONFIG):
        return ()
    folder = folder_of(checkpoint.path)
    is_there = not is_address(checkpoint.path) and open_folder(folder).size(CONFIG) is not None
    made = "take it from the model that was trained, or write it with model.config.save_pretrained(FOLDER)"
    way = f"copy it from {folder}" if is_there else made
    return (f"the folder has no {CONFIG}: transformers needs it beside the weights; {way}",)


def _with_parts(checkpoint: Checkpoint, chosen: StateDict | None = None) -> tuple[Checkpoint, list[Loss]]:
    """Return the checkpoint with one rank's parts of tensors made plain tensors, and the resulting loss."""
    survey = checkpoint.survey
    entries = survey.tensors if chosen is None else survey.tensors_in([chosen.path])
    spread = [entry for entry in entries if is_sharded(entry.tensor)]
    if not spread:
        part = part_of(checkpoint)
        names = tuple(entry.path if chosen is None else entry.key for entry in entries)
        return checkpoint, [Loss("shards", names)] if part is not None and part.cut else []
    names = tuple(entry.path if chosen is None else entry.key for entry in spread)
    return local_parts(checkpoint), [Loss("shards", names)]


def _only_dict(checkpoint: Checkpoint, key: str | None, output: OutputFormat) -> StateDict:
    chosen = selected(checkpoint, key)
    if not chosen:
        step: AnyStep = tree_step(checkpoint.path)
        what = "there is no state dict in it"
        if checkpoint.survey.modules:
            # imported only after a refusal
            from .sanitize.sanitizer import loadable_step, options_that_work, sanitize

            options = options_that_work(checkpoint)
            made = sanitize(checkpoint, **dict.fromkeys(options, True)) if options else checkpoint
            if len(selected(made, None)) > 1:
                what += ", but pickled modules: make state dicts of them, then convert one"
                step = loadable_step(checkpoint) or step
            else:
                what += ", but a pickled module, whose state dict the command takes"
                step = loadable_step(checkpoint, (Step("to_format", output.name),), output.extension) or step
        raise RefusedError(what, path=checkpoint.path, next=step)
    return chosen[0]


# -- the options of an output


class Conversion(NamedTuple):
    """The options of an output, as ``convert`` takes them. With ``format`` "" the file name decides.

    ``deepspeed_16bit`` takes the 16-bit weights of DeepSpeed. ``alone`` says that the key chooses what is written, even
    in formats that hold several state dicts. ``strict`` refuses every loss. ``convert`` itself sets ``key``, its state
    dict, and ``beside``, a program's entries that are no weights.
    """

    format: str = ""
    tied: Tied = ""
    allow_loss: Collection[str] = ()
    metadata: Mapping[str, str] = MappingProxyType({})
    shard_size: int = 0
    deepspeed_16bit: bool = False
    alone: bool = False
    strict: bool = False
    key: str | None = None
    beside: Sequence[Loss] = ()

    def format_of(self, checkpoint: Checkpoint, output: str) -> str:
        """Return the format to convert to for an output with this name, or "" if the file keeps its own.

        Raise TargetError if a conversion is needed but neither the options nor the name give a format.
        """
        if self.format:
            return self.format
        known = named_format(output)
        named = known.name if known is not None else ""
        if self.shard_size or self.tied or self.metadata:
            present = OUTPUTS[checkpoint.traits.writes_as or "torch"]
            return named or (present.like if present.shards else output_format(output))
        own = OUTPUTS.get(checkpoint.traits.writes_as)
        kept = own.like if own is not None else ""
        return named if named != kept else ""

    def makes_folder(self, checkpoint: Checkpoint, output: str) -> bool:
        """Return whether the output is a folder. Shards in a folder stay a folder unless the name looks like a file."""
        target = self.format_of(checkpoint, output)
        if not target:
            return makes_folder(checkpoint, output)
        if self.shard_size or not OUTPUTS[target].shards:
            return bool(self.shard_size) or OUTPUTS[target].folder
        return makes_shards(checkpoint, output)

    def called(self, name: str) -> str:
        """Return the output's name, in a folder of outputs, for an input with this name."""
        stem, suffix = os.path.splitext(name)
        if self.shard_size:
            return stem
        if not self.format or suffix.lower() in (OUTPUTS[self.format].suffixes or TORCH):
            return name
        return stem + OUTPUTS[self.format].extension

    def applied(
        self, checkpoint: Checkpoint, output: str, key: str | None = None, *, edited: bool = False
    ) -> Checkpoint:
        """Return the checkpoint converted for an output with this name.

        ``key`` names the state dict for a format that holds one. ``edited`` says that edits used the same key: it may
        then be missing by now, and is ignored by formats that hold everything. Raise the same errors as ``convert``.
        """
        made, named = checkpoint.target, named_format(output)
        if made is not None and self == Conversion() and (named is None or named.name == made.format):
            return checkpoint  # an edit chose the format
        target = self.format_of(checkpoint, output) or ("" if checkpoint.traits.writes_as else "torch")
        size = self.shard_size
        if not size and target and OUTPUTS[target].shards and self.makes_folder(checkpoint, output):
            size = DEFAULT_SHARD_SIZE
        holds_one = OUTPUTS[target].holds_one(size) if target else False
        if edited and key is not None:
            place = normal_path(key)
            key = key if holds_one and any(each.path == place for each in checkpoint.state_dicts) else None
        if not (self.alone or holds_one):
            refuse_key(checkpoint, key)
        if not target:
            return checkpoint
        return convert(
            checkpoint,
            target,
            key=key,
            tied=self.tied,
            allow_loss=self.allow_loss,
            metadata=self.metadata,
            max_shard_size=size,
            deepspeed_16bit=self.deepspeed_16bit,
            strict=self.strict,
        )

    def refuse_part(self, checkpoint: Checkpoint, output: str | None) -> None:
        """Call the function ``refuse_part``, unless the part was asked for or nothing is written."""
        if output is not None and not takes_part(self.allow_loss):
            refuse_part(checkpoint, output, ranks=False)


def takes_part(allow_loss: Collection[str]) -> bool:
    """Return whether these losses allow a file that is one part of a checkpoint to be written as a standalone file."""
    return "shards" in allow_loss or "all" in allow_loss


def refuse_part(checkpoint: Checkpoint, output: str = "", *, ranks: bool = True) -> None:
    """Raise RefusedError for a file that is one part of a checkpoint, if its output could be taken for the whole.

    An output whose name keeps the part's number is still a part. An output that also holds the other parts is the
    whole. ``output`` is "" for a conversion, whose output is always taken for the whole. Without ``ranks``, files of
    one rank are accepted, whose tensors or whose content show that they are parts.
    """
    if output and keeps_number(output, checkpoint.path):
        return
    # Edits may change the names and tensors by which files of one checkpoint are recognised: use the unedited file.
    part = part_of(Checkpoint.of(checkpoint.path, checkpoint.source, checkpoint.container))
    if part is None or (not ranks and part.code != "part"):
        return
    if part.others and {*part.others} <= {os.path.realpath(source.name) for source in checkpoint.sources}:
        return  # all parts are merged
    step: AnyStep = "`--allow-loss shards` writes this part alone"
    if part.folder:
        step += "; the whole is here: " + command("inspect", part.folder)
    elif part.cut:
        step += f"; for the whole, {part.whole}"
    raise RefusedError(part.message, path=checkpoint.path, next=step)


def suggested_edit(checkpoint: Checkpoint, word: str) -> str:
    """Return ``suggested_output``, as the name of a file if the checkpoint was joined from several files."""
    return suggested_output(checkpoint.path, word, "" if checkpoint.traits.writes_as else ".pth")


def refuse_key(checkpoint: Checkpoint, key: str | None) -> None:
    """Raise TargetError if ``key`` is given for an output that holds the whole checkpoint."""
    if key is not None:
        message = "the output holds the whole checkpoint: a key is for formats that hold one state dict"
        path = checkpoint.path
        step = command("extract", path, key, output=suggested_output(path, "weights"))
        raise TargetError(message, path=path, next=step)


def output_format(path: str) -> str:
    """Return the format that the suffix of an output means; raise TargetError if it means none."""
    known = named_format(path)
    if known is not None:
        return known.name
    what, step = "the name has no suffix that means a format", "say it: `--to-format safetensors`"
    if path.endswith(os.sep):
        what, step = "the name means a folder", "say its format: `--to-format safetensors` `--max-shard-size 5GB`"
    raise TargetError(f"{what}; there are {join_limited(TARGETS)}", path=path, next=step)
