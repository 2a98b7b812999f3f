"""Findings: facts that a user should know about a checkpoint, each with the next command."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ..base.findings import ADAPTER, DANGEROUS_CALL, EMPTY_WEIGHTS, FLAT_MESSAGE, FLAT_PARAMETERS, Finding
from ..base.globs import escaped
from ..base.limits import LIMITS
from ..base.map_location import MapLocation, restored_location
from ..base.prefixes import Naming, adapter_keys
from ..base.steps import AnyStep, advised, as_step, option
from ..base.text import human_bytes, join_limited, pluralize, shown
from ..checkpoint.backends import QUANTIZERS
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.paths import spell_key
from ..checkpoint.programs import program_of
from ..checkpoint.quantized import UNKNOWN_LAYOUT, Quantization
from ..checkpoint.survey import Account
from ..checkpoint.tensors import view_id
from ..files.archives import is_address
from ..files.sources import FolderSource
from ..formats.rank_part import part_of, shards_of
from .edit_steps import TOGETHER, as_one_file, companions_step, edit_step, stops_edits, together
from .facts import WEIGHTS_ONLY, Facts, weights_step

_LEVELS: Final = ("error", "warning", "note")


def findings(
    checkpoint: Checkpoint,
    known: Facts,
    account: Account,
    namings: Sequence[Naming],
    map_location: MapLocation = None,
    quantized: Quantization | None = None,
    *,
    steps: bool = True,
) -> list[Finding]:
    """Return the ``known`` facts and remarks on the contents, errors first. A device that ``map_location`` replaces is
    not reported.

    ``namings`` are the namings of the state dicts, in order. Without ``steps``, no finding has a next step, and none
    is there for the sake of its step.
    """
    problems = checkpoint.container.problems
    edits = [*_prefixes(checkpoint, namings), *_devices(checkpoint, account, map_location)]
    refused = any(stops_edits(problem) or problem.level == "error" for problem in problems)
    if refused or any(fact.refused_by_torch for fact in known.others):
        # An edit would be refused, or would keep the damage, so its command would not help.
        edits = [finding._replace(next="") for finding in edits]
    part = part_of(checkpoint)
    runs = any(fact.code == DANGEROUS_CALL for fact in known.others)
    swapped = Finding("big-endian", "note", "the numbers are big-endian; torch swaps them when it loads")
    every = [
        *known.problems,
        *([swapped] if checkpoint.container.byteorder == "big" else ()),
        *_without_repeats(checkpoint, [fact for fact in known.others if not (runs and fact.code == WEIGHTS_ONLY)]),
        *_companions(checkpoint),
        *_adapter(checkpoint),
        *edits,
        *_process_group(checkpoint),
        *_kinds(checkpoint),
        *_quantized(quantized),
        *_state_dicts(checkpoint),
        *_only_loader(checkpoint),
        *_bytes(checkpoint, account),
    ]
    if not steps:
        every.sort(key=lambda finding: _LEVELS.index(finding.level))
        return [item._replace(next="") for item in every[: LIMITS.listed]]
    program = program_of(checkpoint)
    # An edit of one part, or of weights without values, would make nothing useful.
    useless = (part is not None and part.cut and part.folder) or any(item.code == EMPTY_WEIGHTS for item in every)

    def helps(item: Finding) -> bool:
        if runs:
            return item.code == DANGEROUS_CALL  # suggest no command that writes another file that runs code
        if useless and item.level != "error" and not (part is not None and item.code == part.code):
            return False
        commands = as_step(item.next).commands
        return program is None or all(each.name in ("convert", "salvage", *program.edits) for each in commands)

    every = [item if helps(item) else item._replace(next="") for item in every]
    if program is None:
        every = _in_one_pass(checkpoint, every)
        every = [item._replace(next=as_one_file(checkpoint, item.next)) for item in every]
        every += _in_archive(checkpoint, every)
    every.sort(key=lambda finding: _LEVELS.index(finding.level))
    return [item._replace(message=advised(item.message, item.next)) for item in every[: LIMITS.listed]]


def _in_archive(checkpoint: Checkpoint, every: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a note on a checkpoint in an archive that needs no other edit than to become a file."""
    if is_address(checkpoint.path) and not any(item.next or item.level == "error" for item in every):
        step = edit_step("edit", checkpoint.path, repack=True)
        yield Finding("in-archive", "note", "it is inside an archive, where torch.load does not find it", next=step)


def _only_loader(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a note on a folder that only one library loads, with the command that makes it one file."""
    loads = checkpoint.container.only_loader
    if loads and (step := weights_step(checkpoint)):
        message = f"{loads}; the weights as one file for the rest"
        yield Finding("in-pieces", "note", message, next=step)


def _quantized(found: Quantization | None) -> Iterator[Finding]:
    if found is not None and (problems := found.problems):
        message = (
            f"{pluralize(len(problems), 'quantized weight')} cannot be understood: {join_limited(problems, most=2)}"
        )
        sound = all(problem.endswith(UNKNOWN_LAYOUT) for problem in problems)
        yield Finding("quantized", "note" if sound else "warning", message)


def _kinds(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield notes on tensors that only their own library can make: unknown kinds, and quantized subclasses."""
    kinds = Counter((entry.tensor.kind == "unknown", entry.tensor.cls) for entry in checkpoint.survey.tensors)
    for (unknown, cls), count in kinds.items():
        package, tensors = cls.partition(".")[0], pluralize(count, "tensor")
        if unknown:
            message = f"{tensors} of a kind that ckptool does not know ({cls}): edits keep them"
            where = f"where {package} is installed" if "." in cls else "with the library that wrote it"
            step = f"for plain tensors, load it {where} and save them again"
            yield Finding("unknown-kind", "note", message, next=step)
        elif package in QUANTIZERS:
            message = f"{tensors} quantized by {QUANTIZERS[package]} ({cls}): edits keep them"
            step = f"torch.load needs {package} imported, with weights_only=False"
            yield Finding("quantized", "note", message, next=step)


def _without_repeats(checkpoint: Checkpoint, every: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the facts, those of one code as one finding. Missing parts of a folder are reported by file instead."""
    in_files = isinstance(checkpoint.source, FolderSource)
    lost = in_files and any(problem.blocks_edits for problem in checkpoint.container.problems)
    alike: dict[str, list[Finding]] = {}
    for fact in every:
        if not (lost and fact.code == "missing-storage"):
            alike.setdefault(fact.code, []).append(fact)
    for facts_of_code in alike.values():
        rest = len(facts_of_code) - shown(1)
        message = "; ".join(fact.message for fact in facts_of_code[: shown(1)])
        yield facts_of_code[0]._replace(message=message + (f" (and {rest:,} more)" if rest > 0 else ""))


def _companions(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a warning if torch refuses files beside the weights of a folder."""
    if not isinstance(checkpoint.source, FolderSource) or not checkpoint.source.beside:
        return
    from ..edits.sanitize.companions import refused_companions  # only for folders

    names = list(map(os.path.basename, refused_companions(checkpoint)))
    if names:
        message = f"torch.load(weights_only=True) refuses {join_limited(names)} beside the weights"
        yield Finding("weights-only", "warning", message, next=companions_step(checkpoint))


def _adapter(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield what an adapter changes, and the command that merges it into its base, if the base is here."""
    beside = checkpoint.source.beside if isinstance(checkpoint.source, FolderSource) else ()
    names = [entry.key for entry in checkpoint.survey.tensors[:3]]
    known = os.path.basename(checkpoint.path).startswith("adapter_model.") or adapter_keys(names)
    if not known and not any(path.endswith(os.sep + "adapter_config.json") for path in beside):
        return
    from ..edits.adapters import description
    from ..edits.lora import step_with_base  # only for adapters

    if message := description(checkpoint):
        yield Finding(ADAPTER, "note", message, next=step_with_base(checkpoint))


def _process_group(checkpoint: Checkpoint) -> Iterator[Finding]:
    shards = shards_of(checkpoint)
    if shards is not None and "ShardedTensor" in shards.kinds:
        message = "torch loads a ShardedTensor only in the group of ranks that saved it, and with weights_only=False"
        from ..edits.sharded import local_parts_step  # only for sharded tensors

        step = "torch.distributed.init_process_group(...), or " + local_parts_step(checkpoint)
        yield Finding("process-group", "warning", message, next=step)


def _prefixes(checkpoint: Checkpoint, namings: Sequence[Naming]) -> Iterator[Finding]:
    path = checkpoint.path
    for state_dict, (names, prefix, inner) in zip(checkpoint.state_dicts, namings):
        if state_dict.confidence != "high":
            continue
        where = f" in {state_dict.path!r}" if state_dict.path else ""
        bare = set(names)
        twins = sum(name.startswith(prefix.name) and name[len(prefix.name) :] in bare for name in names)
        if prefix.keys and twins:
            message = (
                f"{pluralize(twins, 'key')}{where} with and without the prefix {prefix.name!r}: it cannot be removed"
            )
            yield Finding("prefix-collision", "warning", message, next="remove one of each pair with drop")
        elif prefix.keys:
            share = "all" if prefix.status == "all" else f"{prefix.keys:,} of {prefix.total:,}"
            message = f"prefix {prefix.name!r} on {share} keys{where}: a model without that wrapper does not load them"
            nested = inner.keys() - {"module"} or any(name.startswith(prefix.name * 2) for name in names)
            step = edit_step("strip-module", path, word="plain", wrappers=bool(nested) or prefix.name.count(".") > 1)
            if "n_averaged" in bare:  # AveragedModel: its counter is in the way as well
                step = edit_step("edit", path, word="ema", use_ema=True)
            yield Finding("prefix", "warning", message, next=step)
        elif inner.keys() - {"module"}:
            segments = join_limited([f"'{name}.'" for name in inner if name != "module"])
            message = f"{segments} inside keys{where}: a model without these wrappers does not load them"
            step = edit_step("strip-module", path, word="plain", wrappers=True)
            yield Finding("wrappers", "warning", message, next=step)


def _devices(checkpoint: Checkpoint, account: Account, map_location: MapLocation) -> Iterator[Finding]:
    path, devices = checkpoint.path, checkpoint.survey.devices
    tags = [share.name for share in account.devices]
    if isinstance(map_location, Mapping):
        unused = [device for device in map_location if device not in tags]
        if unused:
            yield Finding("map-location", "warning", f"no storage is tagged {join_limited(unused)}")
    away = [
        tag
        for tag in tags
        if tag not in ("cpu", "meta", "") and restored_location(tag, map_location) not in ("cpu", "meta")
    ]
    objects = [f"{item.path} = {item.device}" for item in devices if item.is_object and item.device != "cpu"]
    remap = edit_step("remap", path, word="cpu", to="cpu") if away or objects else ""
    if away:
        program = program_of(checkpoint)
        loader = "torch.load" if program is None else program.loader
        maps = program is None or program.maps
        needs = f"{loader} needs map_location" if maps else f"{loader} fails, as it has no map_location"
        device = "that device" if len(away) == 1 else "these devices"
        yield Finding(
            "device", "warning", f"tagged {join_limited(away)}: on a machine without {device}, {needs}", next=remap
        )
    without = next((share.tensors for share in account.devices if share.name == "meta"), 0)
    if without:
        verb = "has no values" if without == 1 else "have no values"
        message = f"{pluralize(without, 'tensor')} on the device meta {verb}"
        yield Finding("meta", "warning", message, next="save the model again after its weights are loaded")
    strings = [f"{item.path} = {item.device!r}" for item in devices if not item.is_object]
    if strings:
        message = f"plain strings name a device: {join_limited(strings)}; remap leaves them"
        step = "with `--strings` it changes them"
        yield Finding("device-strings", "note", message, next=step)
    if objects:
        message = f"torch.device objects: {join_limited(objects)}; map_location does not reach them, remap does"
        yield Finding("device-objects", "note", message, next="" if away else remap)


def _in_one_pass(checkpoint: Checkpoint, every: Sequence[Finding]) -> list[Finding]:
    """Return the findings with one next step for all edits of the file, because each edit alone leaves the others
    undone.
    """
    extension = ".pth" if checkpoint.pickled and checkpoint.path.endswith(".safetensors") else ""
    step = together(checkpoint.path, [finding.next for finding in every], extension)
    if step is None:
        return list(every)
    rest = [item._replace(next="") if _writes(item.next) else item for item in every]
    converts = any(part.name == "convert" for item in rest for part in as_step(item.next).commands)
    return [
        *rest,
        Finding("together", "note", f"to {'make these edits' if converts else 'fix everything'} at once", next=step),
    ]


def _writes(step: AnyStep) -> bool:
    return any(part.name in TOGETHER for part in as_step(step).commands) or as_step(step).line.startswith("mv ")


def _state_dicts(checkpoint: Checkpoint) -> Iterator[Finding]:
    survey, nodes = checkpoint.survey, checkpoint.graph.nodes
    problems = checkpoint.container.problems
    for state_dict in survey.state_dicts:
        if not problems and any(str(nodes[key]).endswith("_flat_param") for key, _ in state_dict.items):
            ranks = "of a file of one rank, name the folder with all ranks"
            yield Finding(FLAT_PARAMETERS, "warning", FLAT_MESSAGE, next=ranks)
        if state_dict.confidence == "low":
            message = f"{state_dict.path!r} may be a state dict or just a mapping of tensors: edits leave it alone"
            step = f"{option('key', state_dict.path)} names it"
            yield Finding("low-confidence", "note", message, next=step)
    if survey.modules:
        top = survey.modules[0] or "the whole file"
        message = f"a pickled module ({top}): loading it needs its classes and runs their code"
        yield Finding("module", "warning", message)  # the finding weights-only suggests the command
    yield from _inner_state_dicts(checkpoint)
    if not survey.tensors and program_of(checkpoint) is None:
        yield Finding("no-tensors", "note", "it holds no tensors")


def _inner_state_dicts(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield notes on state dicts that hold another one, which no model expects there."""
    survey, nodes = checkpoint.survey, checkpoint.graph.nodes
    inner = Counter(entry.holder for entry in survey.tensors if entry.state_dict < 0)
    for number, item in enumerate(survey.state_dicts if inner else ()):
        for key, value in item.items:
            if not inner[value] or not isinstance(nodes[key], str):
                continue
            path = spell_key(item.path, str(nodes[key]))
            message = (
                f"{item.path or 'the state dict'!r} holds another state dict, {path!r} ({inner[value]:,} tensors),"
                " which load_state_dict and safetensors do not expect"
            )
            # A copy is the same storages under other names, so nothing is lost without it.
            own = {view_id(entry.tensor) for entry in survey.tensors if entry.state_dict == number}
            is_copy = all(view_id(entry.tensor) in own for entry in survey.tensors if entry.holder == value)
            step = edit_step("drop", checkpoint.path, escaped(path), word="plain") if is_copy else ""
            yield Finding("inner-state-dict", "note", message, next=step)


def _bytes(checkpoint: Checkpoint, account: Account) -> Iterator[Finding]:
    if account.unused_bytes:
        uses = []
        for path, used, size in account.wasteful[: shown(1)]:
            sizes = human_bytes(used), human_bytes(size)
            if sizes[0] == sizes[1]:
                sizes = f"{used:,} bytes", f"{size:,} bytes"  # both would be rounded to the same size
            uses.append(f"{path or 'the tensor'} uses {sizes[0]} of a storage of {sizes[1]}")
        rest = len(account.wasteful) - len(uses)
        more = f" and {pluralize(rest, 'more storage')}" if rest else ""
        message = f"{human_bytes(account.unused_bytes)} are stored but used by no tensor: {', '.join(uses)}{more}"
        editable = not any(stops_edits(problem) for problem in checkpoint.container.problems)
        step = edit_step("slim", checkpoint.path, word="slim") if editable else ""
        yield Finding("unused-bytes", "note", message, next=step)
    if account.shared_storages:
        count = pluralize(account.shared_storages, "storage")
        yield Finding("shared", "note", f"{count} used by more than one tensor (tied weights or views)")
