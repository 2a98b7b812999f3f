"""Convert between formats: find the intended target, and refuse what it cannot hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from ..base.errors import CkptoolError, RefusedError, TargetError, adding_path
from ..base.findings import INNER
from ..base.globs import escaped
from ..base.prefixes import wrapper_prefix
from ..base.records import NamedTuple
from ..base.steps import AnyStep, NextStep, Step, argument, command, folder_of, option, suggested_output, tree_step
from ..base.text import human_bytes, join_limited
from ..checkpoint.checkpoint import Change, Checkpoint, Target, Tied, rescue_step
from ..checkpoint.paths import within
from ..checkpoint.programs import NO_WEIGHTS, program_of
from ..checkpoint.selection import normal_path, selected
from ..checkpoint.survey import StateDict
from ..checkpoint.tensors import is_sharded
from ..files.archives import is_address
from ..files.folders import open_folder
from ..formats import folder_format
from ..formats.empty_weights import GATHER, empty_weights
from ..formats.losses import KINDS, Loss, entries_outside, paths_beside, refuse
from ..formats.opening import takes_path
from ..formats.outputs import OUTPUTS, TARGETS, OutputFormat
from ..formats.planning import refuse_damage
from ..formats.rank_part import part_of
from ..safety.storages import storage_flaws
from .entries import extract
from .flat_params import refuse_flat, unflatten
from .optimizers import optimizers
from .outputs import refuse_part, takes_part
from .sharded import local_parts

#: The report of a Hugging Face folder that is made from a file.
_WITHOUT_CONFIG: Final = (
    "the folder has no config.json: transformers needs it beside the weights; take it from the model that was trained,"
    " or write it with model.config.save_pretrained(FOLDER)"
)


class _Request(NamedTuple):
    """The arguments of ``convert``.

    ``beside`` lists the entries that a program holds in addition to its weights; ``shard_size`` is in bytes.
    """

    key: str | None
    tied: Tied
    allow_loss: Collection[str]
    metadata: Mapping[str, str]
    shard_size: int
    deepspeed_16bit: bool = False
    unflatten: Any = None
    use_ema: bool = False
    to_names: str = ""
    recipe: str = ""
    config: Any = None
    strict: bool = False
    beside: Sequence[Loss] = ()

    def shape(self, tensor_bytes: int) -> str:
        """Return the part of a message that says whether the output is a file, a file in a folder, or shards."""
        if not self.shard_size:
            return ""
        if tensor_bytes <= self.shard_size:
            return ", one file in a folder"
        return f" in shards of at most {human_bytes(self.shard_size)}"


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
        message = f"{to_format!r} is not a format that can be written"
        raise TargetError(message, next=f"one of {join_limited(TARGETS)}")
    unknown = [kind for kind in allow_loss if kind not in (*KINDS, "all")]
    if unknown:
        raise TargetError(f"{unknown[0]!r} is not a kind of loss", next=f"one of {join_limited(list(KINDS), most=9)}")
    size = _bytes_of(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    output = OUTPUTS[to_format]
    if size and not output.shards:
        message = f"no reader of {to_format} supports shards with an index"
        raise TargetError(message, path=checkpoint.path, next="leave `--max-shard-size=` out")
    request = _Request(
        key,
        tied,
        allow_loss,
        metadata or {},
        size,
        deepspeed_16bit,
        unflatten,
        use_ema,
        to_names,
        recipe,
        config,
        strict,
    )
    try:
        if not takes_part(allow_loss):
            refuse_part(checkpoint)
        return _converted(checkpoint, output, request)
    except (RefusedError, TargetError) as error:
        better = _elsewhere(checkpoint, output, request, error)
        if better is not None:
            raise better from error
        raise


def _converted(checkpoint: Checkpoint, output: OutputFormat, request: _Request) -> Checkpoint:
    """Convert as ``convert`` does; errors concern this checkpoint only, and suggest no other path."""
    key, holds_one = request.key, output.holds_one(request.shard_size)
    if request.deepspeed_16bit:
        checkpoint = with_weights(checkpoint, "module")
    if request.unflatten is not None:
        from .matching.targets import match_target

        checkpoint = unflatten(checkpoint, match_target(request.unflatten))
    refuse_flat(checkpoint, key)
    if empty := empty_weights(checkpoint):
        raise RefusedError(empty, path=checkpoint.path, next=GATHER)
    if request.use_ema:
        from .averages import use_ema  # imported only for averages

        checkpoint = use_ema(checkpoint, key=key)
    if request.to_names or request.recipe:
        from .recipes import apply_recipe, named_as  # imported only for other names

        if request.to_names:
            checkpoint = named_as(
                checkpoint, request.to_names, key=key, config=request.config, allow_loss=request.allow_loss
            )
        if request.recipe:
            checkpoint = apply_recipe(checkpoint, request.recipe, key=key, config=request.config)
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
            plain_name = suggested_output(checkpoint.path, "plain")
            error.step = "make plain tensors of the arrays first: " + command(
                "sanitize", checkpoint.path, output=plain_name
            )
        raise


def _elsewhere(
    checkpoint: Checkpoint, output: OutputFormat, request: _Request, error: CkptoolError
) -> CkptoolError | None:
    """Return a better error if another path is meant, or None."""
    part = None if takes_part(request.allow_loss) else part_of(checkpoint)
    if part is not None and part.folder and (part.cut or isinstance(error, RefusedError)):
        return RefusedError(part.message, path=checkpoint.path, next=_step_at(part.folder, output, request))
    for problem in checkpoint.container.problems:
        if problem.code == INNER and isinstance(error, TargetError):
            message = f"{error.what}; {problem.message}"
            return TargetError(message, path=checkpoint.path, next=_step_at(problem.where, output, request))
    return None


def _step_at(path: str, output: OutputFormat, request: _Request) -> NextStep:
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


def _written_as(checkpoint: Checkpoint, output: OutputFormat, request: _Request) -> Checkpoint:
    """Return the checkpoint with a format as its target; raise RefusedError for losses that are not allowed."""
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
        beside = paths_beside(checkpoint, chosen) if request.key is not None else ()
        left_out = [*beside, *(place for loss in lost if loss.kind == "entries" for place in loss.where)]
        # A remark on unchanged tensors would contradict that they are left out.
        kept = (one for one in checkpoint.changes if one.number or not any(within(one.path, out) for out in left_out))
        checkpoint = checkpoint.replace(changes=tuple(kept))
        notes = [*([f"left out: {join_limited(beside, most=6)}"] if beside else []), *notes, *_layout_notes(chosen)]
        notes += _prefix_notes(checkpoint, chosen)
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
    change = Change(
        "convert", key, 1, 0, f"{checkpoint.format} -> {output.reads_as}{request.shape(fit.size)}", tuple(notes)
    )
    graph = fit.graph() if fit.graph is not None else checkpoint.graph
    return checkpoint.changed(graph, [change], needs_relayout=fit.relayout, target=fit.target)


def _without_config(checkpoint: Checkpoint) -> tuple[str, ...]:
    from .model_config import CONFIG, config_of

    if config_of(checkpoint) is not None:
        return ()
    folder = folder_of(checkpoint.path)
    if is_address(checkpoint.path) or open_folder(folder).size(CONFIG) is None:
        return (_WITHOUT_CONFIG,)
    if folder_format(folder) is None:
        return (f"{CONFIG} is not copied: transformers needs it beside the weights; it is in {folder}",)
    return (f"{CONFIG} is not copied: give the folder, {argument(folder)}, in place of the file, and it is",)


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


def _prefix_notes(checkpoint: Checkpoint, chosen: StateDict) -> tuple[str, ...]:
    nodes = checkpoint.graph.nodes
    prefix = wrapper_prefix([str(nodes[key]) for key, _ in chosen.items])
    if not prefix.keys:
        return ()
    which = "all keys" if prefix.keys == prefix.total else f"{prefix.keys:,} of {prefix.total:,} keys"
    return (f"{which} keep the prefix {prefix.name!r}; strip-module removes it from the output",)


def _layout_notes(chosen: StateDict) -> tuple[str, ...]:
    """Return the note on details that only torch.save files keep and that loading a state dict does not need."""
    gone = ["the type OrderedDict"] if chosen.container == "OrderedDict" else []
    gone += ["_metadata (versions of modules)"] if chosen.metadata >= 0 else []
    return (f"not kept: {join_limited([*gone, 'the order of keys'])}",) if gone else ()


def _bytes_of(size: str) -> int:
    from ..formats.hf.writer import parse_size

    return parse_size(size)


def _only_dict(checkpoint: Checkpoint, key: str | None, output: OutputFormat) -> StateDict:
    chosen = selected(checkpoint, key)
    if not chosen:
        step: AnyStep = tree_step(checkpoint.path)
        what = "there is no state dict in it"
        if checkpoint.survey.modules:
            from .sanitize.trial import loadable_step  # imported only after a refusal

            what += ", but a pickled module, whose state dict the command takes"
            step = loadable_step(checkpoint, (Step("to_format", output.name),), output.extension) or step
        raise RefusedError(what, path=checkpoint.path, next=step)
    return chosen[0]
