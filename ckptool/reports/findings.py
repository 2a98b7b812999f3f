"""Findings with next commands: facts that ``inspect`` and ``validate`` share, and remarks of ``inspect`` alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

from ..base.findings import (
    ADAPTER,
    CUT,
    DAMAGED,
    DANGEROUS_CALL,
    DEFLATED,
    EDITED,
    EMPTY_WEIGHTS,
    FLAT_MESSAGE,
    FLAT_PARAMETERS,
    INNER,
    JOINED,
    MISPLACED,
    NO_INDEX,
    OTHER_FILES,
    PROGRAM,
    STALE_INDEX,
    TRANSFORMED,
    UNJOINED,
    UNMERGED,
    Effect,
    Finding,
    codes,
)
from ..base.globs import escaped
from ..base.limits import LIMITS
from ..base.map_location import MapLocation, restored_location
from ..base.prefixes import Prefix, adapter_keys
from ..base.records import NamedTuple
from ..base.steps import RENAME_BACK, AnyStep, advised, as_step, command, option, rename_step, undo_step
from ..base.text import human_bytes, join_limited, pluralize, quoted, shown
from ..checkpoint.backends import QUANTIZERS
from ..checkpoint.checkpoint import Checkpoint, rescue_step
from ..checkpoint.paths import spell_key
from ..checkpoint.programs import convert_step, program_of
from ..checkpoint.quantized import UNKNOWN_LAYOUT, Quantization, quantization
from ..checkpoint.survey import Account
from ..checkpoint.tensors import view_id
from ..files.archives import is_address
from ..files.sources import FolderSource
from ..formats.rank_part import GATHER, WHOLE, empty_weights, part_of, shards_of
from ..safety.calls import has_acting_call, suspicious_calls
from ..safety.storages import storage_flaws
from ..safety.torch_lists import DEFAULT, list_of
from ..safety.weights_only import NOT_UTF8, WRONG_SUFFIX, LoadPrediction, weights_only
from .edit_steps import (
    TOGETHER,
    as_one_file,
    companions_step,
    edit_step,
    sanitize_step,
    stops_edits,
    together,
    where_installed,
)

#: The code of a file that torch.load refuses by default.
WEIGHTS_ONLY: Final = "weights-only"
#: Beginnings of classes that torch adds to its list when one of its modules is imported, and that module.
_REGISTERED: Final = (("torch.distributed.", "torch.distributed.tensor"), ("torch._dynamo.", "torch._dynamo"))
#: Codes of damage for which ``salvage`` helps. Compressed or encrypted values are not damaged.
_BLOCKING: Final = {name for name, code in codes().items() if Effect.BLOCKS_EDITS in code.effect} - {TRANSFORMED}
_LEVELS: Final = ("error", "warning", "note")


class Naming(NamedTuple):
    """The keys of a state dict in order, their wrapper prefix, and the result of ``wrapper_counts``."""

    names: list[str]
    prefix: Prefix
    wrappers: dict[str, int]


class Facts(NamedTuple):
    """The facts about a checkpoint, each with its next step.

    ``problems`` come from its container, ``others`` do not. ``verdict`` predicts torch.load.
    """

    problems: list[Finding]
    others: list[Finding]
    verdict: LoadPrediction


def facts(
    checkpoint: Checkpoint,
    *,
    read: bool = False,
    torch: str = DEFAULT,
    steps: bool = True,
    quantized: Quantization | None = None,
) -> Facts:
    """Return what is wrong with a checkpoint, what is missing, and why torch.load may refuse it.

    With ``read`` the container is also searched for records and bytes that its directory does not list. Without
    ``steps`` no edit is tried to find a step. A finding of the check ``shards`` or ``part`` with the level "note" says
    that nothing is missing. ``quantized`` are the quantized weights, if they are known.
    """
    container, survey = checkpoint.container, checkpoint.survey
    flaws = storage_flaws(checkpoint)
    verdict = weights_only(checkpoint, flaws, torch)
    problems = [*container.problems, *(container.audit(survey.reader.storages) if read else ())]
    known = _problem_steps(checkpoint, {problem.code for problem in problems})
    found = []
    for problem in problems:
        elsewhere = problem.code in (INNER, "other-steps", OTHER_FILES) and problem.where
        step = command("inspect", problem.where) if elsewhere else known.get(problem.code, "")
        found.append(problem._replace(next=step))
    plain = sanitize_step(checkpoint) if steps and checkpoint.pickled and not verdict.loads else ""
    quantized = quantization(checkpoint) if quantized is None else quantized
    missing = *_missing(checkpoint, flaws), *_unmerged(checkpoint)
    others = *missing, *_quantized(quantized), *_loading(checkpoint, verdict, plain)
    return Facts(found, list(others), verdict)


def _quantized(found: Quantization) -> Iterator[Finding]:
    problems = found.problems
    lost = [problem for problem in problems if not problem.endswith(UNKNOWN_LAYOUT)]
    if problems:
        message = f"{pluralize(len(problems), 'quantized weight')} cannot be understood"
        message += f": {join_limited(lost or problems, most=2)}"
        yield Finding("quantized-part" if lost else "quantized", "warning" if lost else "note", message)


def _missing(checkpoint: Checkpoint, flaws: Sequence[Finding]) -> Iterator[Finding]:
    survey = checkpoint.survey
    for key in sorted(survey.reader.disagreeing):
        message = f"storage {quoted(key)} is described in two ways; torch takes the first"
        yield Finding("storage-twice", "warning", message, key)
    if empty := empty_weights(checkpoint):
        yield Finding(EMPTY_WEIGHTS, "error", empty, next=GATHER)
    for message, count in Counter(survey.unsupported.values()).items():
        times = f" ({count:,} times)" if count > 1 else ""
        yield Finding("not-followed", "error", f"{message}{times}, which ckptool does not follow")
    if refused := [flaw for flaw in flaws if flaw.refused_by_torch]:
        rescue = rescue_step(checkpoint)
        yield from (flaw._replace(next=rescue) for flaw in refused)
    if (part := part_of(checkpoint)) is not None:
        alone: AnyStep = part.whole if part.cut else "get the missing parts into this folder" if part.alone else ""
        step = command("inspect", part.folder) if part.folder else alone
        level = "error" if part.alone and part.level != "note" else part.level
        yield Finding(part.code, level, part.message, next=step)
    shards = shards_of(checkpoint)
    if shards is not None and not shards.partial:
        from ..edits.sharded import local_parts_step  # only for sharded tensors

        message = f"{pluralize(shards.tensors, 'tensor')} spread over {shards.over}, each of them whole in this file"
        yield Finding("shards", "note", message, next=local_parts_step(checkpoint))


def _unmerged(checkpoint: Checkpoint) -> Iterator[Finding]:
    if ".base_layer." not in "\n".join([entry.key for entry in checkpoint.survey.tensors]):
        return
    from ..edits.adapter_settings import merge_step, unmerged  # only for models with adapters

    if (found := unmerged(checkpoint)) is not None:
        message = f"a model with an unmerged LoRA ({found.words}): transformers would load it without the training"
        yield Finding(UNMERGED, "error", message, next=merge_step(checkpoint, found))


def dangerous_call(calls: Sequence[str], where: str = "", next: AnyStep = "") -> Finding:
    """Return the finding for functions that loading a pickle would call."""
    message = f"torch.load(weights_only=False) would run {join_limited(calls, most=3)}"
    return Finding(DANGEROUS_CALL, "error", message, where, next=next)


def _loading(checkpoint: Checkpoint, verdict: LoadPrediction, plain: AnyStep) -> Iterator[Finding]:
    calls = suspicious_calls(checkpoint.graph)
    if calls and has_acting_call(checkpoint.graph):
        yield dangerous_call(calls, next="do not load it; delete it, or report it where it came from")
    elif calls:
        trust = "load it only if you trust the one who made it"
        yield dangerous_call(calls, next=plain or trust)
    if not checkpoint.pickled:
        suffix = checkpoint.container.misnamed(checkpoint.source)
        for rule in _rules(checkpoint, verdict) if suffix else ():
            yield Finding(WEIGHTS_ONLY, "warning", rule, next=rename_step(checkpoint.path, suffix))
    elif not verdict.loads:
        yield from _refusal(checkpoint, verdict, plain)


def _rules(checkpoint: Checkpoint, verdict: LoadPrediction) -> list[str]:
    known = {problem.message for problem in checkpoint.container.problems}
    return [blocker.rule for blocker in verdict.blockers if blocker.rule and blocker.rule not in known]


def _refusal(checkpoint: Checkpoint, verdict: LoadPrediction, plain: AnyStep) -> Iterator[Finding]:
    names = [blocker.name for blocker in verdict.blockers if blocker.name]
    rules, call = _rules(checkpoint, verdict), "torch.load(weights_only=True)"
    step: AnyStep = ""
    own = names and not any(name.startswith("torch.distributed._shard") for name in names)
    modules = [module for start, module in _REGISTERED if own and all(name.startswith(start) for name in names)]
    if modules:
        message = f"{call} takes {join_limited(names, most=2)} only when {modules[0]} is imported"
        step = f"import {modules[0]} before torch.load"
    elif names:
        message = f"{call} refuses it: {join_limited(names)} not on {list_of(verdict.torch, names)}"
        if any(blocker.called for blocker in verdict.blockers):
            message += f"; with weights_only=False {'its' if len(names) == 1 else 'their'} code runs"
        step = plain or where_installed(checkpoint, names)
    elif rules and not any(problem.refused_by_torch for problem in checkpoint.container.problems):
        message = f"{call} refuses it: {join_limited(_rule_texts(rules, checkpoint.graph.style.protocol))}"
        if any(rule.startswith("opcode") or rule in (NOT_UTF8, WRONG_SUFFIX) for rule in rules):
            step = plain
    else:
        return
    yield Finding(WEIGHTS_ONLY, "warning", message, next=step)


def _rule_texts(rules: Sequence[str], protocol: int) -> list[str]:
    opcodes = [rule.removeprefix("opcode ") for rule in rules if rule.startswith("opcode ")]
    others = [rule for rule in rules if not rule.startswith("opcode ")]
    if len(opcodes) > 1 and protocol != 2:
        return [f"it was saved with pickle protocol {protocol}, weights_only reads protocol 2", *others]
    return [f"its pickle uses {join_limited(opcodes)}", *others] if opcodes else others


def _problem_steps(checkpoint: Checkpoint, codes: Collection[str]) -> dict[str, AnyStep]:
    """Map these codes of container problems to the next step; codes without a step may be missing or have ""."""
    path = checkpoint.path
    # Functions, because each step looks for a free file name, and most files have no problem.
    known: dict[str, Callable[[], AnyStep]] = {
        CUT: lambda: rescue_step(checkpoint),
        "legacy-untyped": lambda: sanitize_step(checkpoint),
        DAMAGED: lambda: "get the file again",
        UNJOINED: lambda: WHOLE,
        MISPLACED: lambda: RENAME_BACK,
        "torch-tar": lambda: edit_step("convert", path, word="converted"),
        "unpacked": lambda: edit_step("convert", path, extension=".pth"),
        "in-pieces": lambda: edit_step("convert", path, extension=".safetensors"),
        JOINED: lambda: weights_step(checkpoint),
        "unfinished-edit": lambda: undo_step(path),
        PROGRAM: lambda: convert_step(checkpoint) if checkpoint.survey.tensors else "",
        **dict.fromkeys(
            (DEFLATED, NO_INDEX, STALE_INDEX, "no-folder", EDITED),
            lambda: edit_step("edit", path, word="clean", repack=True),
        ),
    }
    if isinstance(checkpoint.source, FolderSource):
        known = {**dict.fromkeys(_BLOCKING, known[CUT]), **known}
    return {code: known[code]() for code in codes if code in known}


def weights_step(checkpoint: Checkpoint) -> AnyStep:
    """Return the command that makes one file of weights that are in pieces, or "" if some are missing."""
    survey = checkpoint.survey
    chosen = [item for item in survey.state_dicts if item.confidence == "high"]
    if not (checkpoint.container.in_pieces and chosen) or any(
        stops_edits(item) or item.code == FLAT_PARAMETERS for item in checkpoint.container.problems
    ):
        return ""
    path = chosen[0].path
    tensors = survey.tensors_in([path])
    storages = [entry.tensor.storage for entry in tensors if entry.tensor.storage]
    whole = len(chosen[0].items) if path else len(survey.entries)
    tied, others = len(set(storages)) < len(storages), len(tensors) < whole
    return edit_step(
        "convert",
        checkpoint.path,
        extension=".safetensors",
        key=path,
        tied="keep-first" if tied else "",
        allow_loss="entries" if others else "",
    )


# -- remarks of inspect alone


def findings(
    checkpoint: Checkpoint,
    known: Facts,
    account: Account,
    namings: Sequence[Naming],
    map_location: MapLocation = None,
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
    if is_address(checkpoint.path) and not any(item.next or item.level == "error" for item in every):
        step = edit_step("edit", checkpoint.path, repack=True)
        yield Finding("in-archive", "note", "it is inside an archive, where torch.load does not find it", next=step)


def _only_loader(checkpoint: Checkpoint) -> Iterator[Finding]:
    loads = checkpoint.container.only_loader
    if loads and (step := weights_step(checkpoint)):
        message = f"{loads}; the weights as one file for the rest"
        yield Finding("in-pieces", "note", message, next=step)


def _kinds(checkpoint: Checkpoint) -> Iterator[Finding]:
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
    if not isinstance(checkpoint.source, FolderSource) or not checkpoint.source.beside:
        return
    from ..edits.sanitize.companions import refused_companions  # only for folders

    names = list(map(os.path.basename, refused_companions(checkpoint)))
    if names:
        message = f"torch.load(weights_only=True) refuses {join_limited(names)} beside the weights"
        yield Finding("weights-only", "warning", message, next=companions_step(checkpoint))


def _adapter(checkpoint: Checkpoint) -> Iterator[Finding]:
    beside = checkpoint.source.beside if isinstance(checkpoint.source, FolderSource) else ()
    names = [entry.key for entry in checkpoint.survey.tensors[:3]]
    known = os.path.basename(checkpoint.path).startswith("adapter_model.") or adapter_keys(names)
    if any(_unmerged(checkpoint)) or (
        not known and not any(path.endswith(os.sep + "adapter_config.json") for path in beside)
    ):
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
    """Return the findings with one next step for all edits, because each edit alone leaves the others undone."""
    extension = ".pth" if checkpoint.pickled and checkpoint.path.endswith(".safetensors") else ""
    step = together(checkpoint.path, [finding.next for finding in every], extension)
    if step is None:
        return list(every)
    steps = [as_step(item.next) for item in every]
    combined = [{part.name for part in own.commands} & TOGETHER.keys() or own.line.startswith("mv ") for own in steps]
    rest = [item._replace(next="") if in_it else item for item, in_it in zip(every, combined)]
    message = "to fix at once what one command can fix"
    return [*rest, Finding("together", "note", message, next=step)]


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
