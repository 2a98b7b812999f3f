"""Findings: what a user should know about a checkpoint, each with the next command."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from ..accounting import Account
from ..archives import is_address
from ..checkpoint import Checkpoint
from ..container import AMBIGUOUS, CUT, DAMAGED, DEFLATED, EDITED, INCOMPLETE, UNEDITABLE, Container
from ..human import (
    argument,
    counted,
    human_bytes,
    listed,
    rename_step,
    salvage_step,
    suggested_output,
    undo_step,
)
from ..limits import LIMITS
from ..locations import MapLocation, lands_on
from ..prefixes import Naming, Prefix
from ..programs import PROGRAM, convert_step, program_of
from ..sharding import spread
from ..source import FolderSource
from .calls import suspicious_calls
from .storages import Flaw
from .weights_only import MISNAMED, NOT_UTF8, WRONG_SUFFIX, Blocker, Verdict

__all__ = ["Finding", "command", "findings", "rescue_step", "rule_words"]


class Finding(NamedTuple):
    """``level`` is note, warning or error; ``next`` the command to type, or ""."""

    code: str
    level: str
    message: str
    next: str = ""


def command(name: str, path: str, *options: str, word: str = "", extension: str = "") -> str:
    """Return a command line that writes beside the input, under a name as of ``suggested_output``."""
    output = argument(suggested_output(path, word, extension))
    return " ".join(["ckptool", name, argument(path), *map(shlex.quote, options), "-o", output])


def rescue_step(checkpoint: Checkpoint) -> str:
    """Return the next step for a damaged checkpoint: ``salvage`` where the bytes of some tensor are in the file."""
    tensors = (entry.tensor for entry in checkpoint.survey.tensors)
    left = any(not tensor.storage or checkpoint.body(tensor.storage) is not None for tensor in tensors)
    if not left and not isinstance(checkpoint.source, FolderSource):
        return "get another copy of the file"
    return salvage_step(checkpoint.path)


def findings(
    checkpoint: Checkpoint,
    account: Account,
    verdict: Verdict,
    flaws: Sequence[Flaw],
    namings: Sequence[Naming],
    map_location: MapLocation = None,
    sanitize_step: Callable[[Checkpoint], str] = lambda checkpoint: "",
) -> list[Finding]:
    """Everything worth saying, errors first.

    ``namings`` are those of the state dicts, in order. ``map_location`` is the one that the user asks about: devices
    that it takes care of are no finding.
    ``sanitize_step`` gives the command that makes a checkpoint plain, where there is one.
    """
    problems = checkpoint.container.problems
    edits = [*_prefixes(checkpoint, namings), *_devices(checkpoint, account, map_location)]
    edits += _together(checkpoint.path, edits)
    if any(problem.code in _NO_EDITS or problem.level == "error" for problem in problems) or any(
        f.refused for f in flaws
    ):
        # An edit would be refused, or carry the damage on: no command is suggested that does not work.
        edits = [finding._replace(next="") for finding in edits]
    found = [
        *_container(checkpoint, flaws, sanitize_step),
        *_unfollowed(checkpoint),
        *_weights_only(checkpoint, verdict, sanitize_step),
        *edits,
        *_shards(checkpoint),
        *_state_dicts(checkpoint),
        *_elsewhere(checkpoint),
        *_shard(checkpoint.path),
        *_bytes(checkpoint, account),
    ]
    if any(finding.code == "dangerous-call" for finding in found):
        # Nor one that makes another file of the same kind.
        found = [finding if finding.code == "dangerous-call" else finding._replace(next="") for finding in found]
    program = program_of(checkpoint)
    if program is not None:
        ways = ("convert", "salvage", *program.edits)
        found = [item if _is_way(item.next, ways) else item._replace(next="") for item in found]
    order = {"error": 0, "warning": 1, "note": 2}
    found.sort(key=lambda finding: order[finding.level])
    return found[: LIMITS.listed]


def _elsewhere(checkpoint: Checkpoint) -> list[Finding]:
    """A model file of DeepSpeed without weights: with ZeRO stage 3 each rank has its parts of them elsewhere."""
    inner = [entry.tensor for entry in checkpoint.survey.tensors if entry.state_dict >= 0]
    deepspeed = any(entry.key == "ds_version" for entry in checkpoint.survey.entries)
    if not deepspeed or not inner or any(0 not in tensor.shape for tensor in inner):
        return []
    what = "all tensors of the state dict are empty: with ZeRO stage 3 the weights are in the files of the optimizer"
    folder = os.path.dirname(checkpoint.path) or os.curdir
    return [Finding("weights-elsewhere", "warning", what, _inspect(folder))]


#: A shard, as huggingface_hub and transformers name them.
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\b.*\.(safetensors|bin)\Z")


def _shard(path: str) -> list[Finding]:
    """One shard of several, which somebody took for the whole."""
    found = _SHARD.search(os.path.basename(path))
    if found is None or is_address(path) or int(found[2]) < 2:
        return []
    what = f"it is shard {int(found[1])} of {int(found[2])}: the rest of the checkpoint is in its folder"
    return [Finding("shard", "note", what, _inspect(os.path.dirname(path) or os.curdir))]


def _is_way(step: str, commands: Sequence[str]) -> bool:
    """Is the next step one of these commands, or none of ckptool's?"""
    return not step.startswith("ckptool ") or step.split()[1] in commands


#: Problems on whose account an edit is refused.
_NO_EDITS = UNEDITABLE | AMBIGUOUS


def _container(
    checkpoint: Checkpoint, all_flaws: Sequence[Flaw], sanitize_step: Callable[[Checkpoint], str]
) -> list[Finding]:
    container = checkpoint.container
    rescue = rescue_step(checkpoint)
    ways = {
        CUT: rescue,
        "legacy-untyped": sanitize_step(checkpoint) if _has(container, "legacy-untyped") else "",
        DAMAGED: "get the file again",
        DEFLATED: command("repack", checkpoint.path, word="clean"),
        INCOMPLETE: "get the files again that are missing or damaged",
        "torch-tar": command("convert", checkpoint.path, word="converted"),
        "in-pieces": command("convert", checkpoint.path, extension=".safetensors"),
        EDITED: command("repack", checkpoint.path, word="clean"),
        "unfinished-edit": undo_step(checkpoint.path),
        PROGRAM: convert_step(checkpoint.path) if checkpoint.survey.tensors else "",
    }
    found = [
        Finding(p.code, p.level, p.message, _inspect(p.where) if p.code == "inner-weights" else ways.get(p.code, ""))
        for p in container.problems
    ]
    flaws: dict[str, list[str]] = {}
    for flaw in (flaw for flaw in all_flaws if flaw.refused):
        flaws.setdefault(flaw.code, []).append(flaw.message)
    for code, messages in flaws.items():
        more = f" (and {len(messages) - 1:,} more)" if len(messages) > 1 else ""
        found.append(Finding(code, "error", messages[0] + more, rescue))
    if container.byteorder == "big":
        found.append(Finding("big-endian", "note", "the numbers are big-endian; torch swaps them when it loads"))
    return found


def _has(container: Container, code: str) -> bool:
    return any(problem.code == code for problem in container.problems)


def _unfollowed(checkpoint: Checkpoint) -> list[Finding]:
    """What the pickle means to torch and not here: every other command refuses it."""
    found = list(dict.fromkeys(checkpoint.survey.unfollowed.values()))
    return [Finding("not-followed", "error", f"{what}, which ckptool does not follow") for what in found]


def _inspect(path: str) -> str:
    return f"ckptool inspect {argument(path)}"


def _weights_only(
    checkpoint: Checkpoint, verdict: Verdict, sanitize_step: Callable[[Checkpoint], str]
) -> list[Finding]:
    calls = suspicious_calls(checkpoint.graph)
    if calls:
        what = f"torch.load(weights_only=False) would run {listed(calls, most=3)}"
        return [Finding("dangerous-call", "error", what, "do not load it; delete it, or report it where it came from")]
    if not checkpoint.pickled:
        step = rename_step(checkpoint.path, ".safetensors")
        told = [blocker.rule for blocker in verdict.blockers if blocker.rule.startswith(MISNAMED)]
        return [Finding("weights-only", "warning", rule, step) for rule in told]
    names = [blocker.name for blocker in verdict.blockers if blocker.name]
    known = {problem.message for problem in checkpoint.container.problems}
    rules = [blocker for blocker in verdict.blockers if blocker.rule and blocker.rule not in known]
    found = []
    if names:
        modules = [module for start, module in _REGISTERED if all(_begins(name, start) for name in names)]
        if modules:
            what = f"torch.load(weights_only=True) takes {listed(names, most=2)} only when {modules[0]} is imported"
            return [Finding("weights-only", "warning", what, f"import {modules[0]} before torch.load")]
        what = f"torch.load(weights_only=True) refuses it: {listed(names)} not on torch {verdict.torch}'s list"
        if any(blocker.called for blocker in verdict.blockers):
            what += "; with weights_only=False their code runs"
        found.append(Finding("weights-only", "warning", what, sanitize_step(checkpoint)))
    elif rules and not any(problem.refused for problem in checkpoint.container.problems):
        what = f"torch.load(weights_only=True) refuses it: {listed(rule_words(rules, checkpoint.graph.style.protocol))}"
        mendable = any(rule.rule.startswith("opcode") or rule.rule in (NOT_UTF8, WRONG_SUFFIX) for rule in rules)
        found.append(Finding("weights-only", "warning", what, sanitize_step(checkpoint) if mendable else ""))
    return found


#: Classes that torch itself puts on the list when a module of its own is imported.
_REGISTERED = (
    ("torch.distributed.", "torch.distributed.tensor"),
    ("torch._dynamo.", "torch._dynamo"),
)


def _begins(name: str, start: str) -> bool:
    return name.startswith(start) and not name.startswith("torch.distributed._shard")


def rule_words(rules: Sequence[Blocker], protocol: int) -> list[str]:
    """The rules that stop weights_only, the many opcodes of a protocol as one."""
    opcodes = [blocker.rule.removeprefix("opcode ") for blocker in rules if blocker.rule.startswith("opcode ")]
    others = [blocker.rule for blocker in rules if blocker.rule and not blocker.rule.startswith("opcode ")]
    if len(opcodes) > 1 and protocol != 2:
        return [f"it was saved with pickle protocol {protocol}, weights_only reads protocol 2", *others]
    return [f"its pickle uses {listed(opcodes)}", *others] if opcodes else others


def _shards(checkpoint: Checkpoint) -> list[Finding]:
    """What one rank had: that it is no whole checkpoint, and where one comes from."""
    shards = spread(checkpoint.survey.reader, checkpoint.survey.tensors)
    if shards is None:
        return []
    found = []
    if shards.partial:
        share = "all" if shards.partial == len(checkpoint.survey.tensors) else f"{shards.partial:,}"
        what = f"{share} tensors are what {shards.owner} had of larger ones, spread over {shards.over}"
        found.append(
            Finding("shards", "warning", f"{what}: the files of all ranks together are the checkpoint", _WHOLE)
        )
    else:
        step = command("sanitize", checkpoint.path, "--local-parts", word="plain")
        what = f"{counted(shards.tensors, 'tensor')} spread over {shards.over}, each of them whole in this file"
        found.append(Finding("shards", "note", what, step))
    if _SHARDED in shards.kinds:
        mesh = max((mesh.ranks for mesh in shards.meshes), default=0)
        group = f"a group of {counted(mesh, 'rank')}" if mesh else "the group of ranks that saved it"
        rank = f", by rank {shards.ranks[0]} alone" if len(shards.ranks) == 1 else ""
        what = f"torch loads a ShardedTensor only in {group}{rank}, and with weights_only=False"
        step = command("sanitize", checkpoint.path, "--local-parts", word="plain")
        found.append(Finding("process-group", "warning", what, f"torch.distributed.init_process_group(...), or {step}"))
    return found


_SHARDED: Final = "ShardedTensor"
#: How a job makes whole tensors of its parts, with FSDP of both kinds and with tensor parallelism.
_WHOLE: Final = (
    "have the job save whole tensors: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
    " of torch.distributed.checkpoint.state_dict"
)


def _prefixes(checkpoint: Checkpoint, namings: Sequence[Naming]) -> list[Finding]:
    found = []
    for state_dict, (names, prefix, inner) in zip(checkpoint.state_dicts, namings):
        if state_dict.confidence != "high":
            continue
        where = f" in {state_dict.path!r}" if state_dict.path else ""
        bare = set(names)
        twins = sum(name.startswith(prefix.name) and name[len(prefix.name) :] in bare for name in names)
        if prefix.keys and twins:
            what = f"{counted(twins, 'key')}{where} with and without the prefix {prefix.name!r}: it cannot be taken off"
            found.append(Finding("prefix-collision", "warning", what, "take one of each pair out with drop"))
        elif prefix.keys:
            found.append(_prefix_finding(checkpoint.path, prefix, where, bool(inner.keys() - {"module"})))
        elif inner.keys() - {"module"}:
            segments = listed([f"'{name}.'" for name in inner if name != "module"])
            what = f"{segments} inside of keys{where}: a model without these wrappers does not load them"
            step = command("strip-module", checkpoint.path, "--wrappers", word="plain")
            found.append(Finding("wrappers", "warning", what, step))
    return found


def _prefix_finding(path: str, prefix: Prefix, where: str, wrappers: bool) -> Finding:
    share = "all" if prefix.status == "all" else f"{prefix.keys:,} of {prefix.total:,}"
    what = f"prefix {prefix.name!r} on {share} keys{where}: a model without that wrapper does not load them"
    option = ["--wrappers"] if wrappers or prefix.name.count(".") > 1 else []
    return Finding("prefix", "warning", what, command("strip-module", path, *option, word="plain"))


def _devices(checkpoint: Checkpoint, account: Account, map_location: MapLocation) -> list[Finding]:
    tags = [share.name for share in account.devices if share.name not in ("cpu", "meta", "")]
    path = checkpoint.path
    found = []
    if isinstance(map_location, Mapping):
        there = {share.name for share in account.devices}
        unused = [device for device in map_location if device not in there]
        if unused:
            found.append(Finding("map-location", "warning", f"no storage is tagged {listed(unused)}"))
    away = [tag for tag in tags if lands_on(tag, map_location) not in ("cpu", "meta")]
    remedy = command("remap", path, "--to", "cpu", word="cpu") if away else ""
    if away:
        kind = "that device" if len(away) == 1 else "these devices"
        what = f"tagged {listed(away)}: on a machine without {kind}, {_mapping(checkpoint)}"
        found.append(Finding("device", "warning", what, remedy))
    strings = [name for name in checkpoint.survey.devices if not name.is_object]
    if strings:
        places = listed([f"{name.path} = {name.device!r}" for name in strings[:5]], len(strings))
        what = f"plain strings name a device: {places}; remap leaves them, with --strings it changes them"
        found.append(Finding("device-strings", "note", what))
    objects = [name for name in checkpoint.survey.devices if name.is_object and name.device != "cpu"]
    if objects:
        places = listed([f"{name.path} = {name.device}" for name in objects[:5]], len(objects))
        what = f"torch.device objects: {places}; map_location does not reach them, remap does"
        step = "" if remedy else command("remap", path, "--to", "cpu", word="cpu")
        found.append(Finding("device-objects", "note", what, step))
    return found


def _mapping(checkpoint: Checkpoint) -> str:
    """What a load on another machine needs."""
    program = program_of(checkpoint)
    loader = "torch.load" if program is None else program.loader
    if program is None or program.maps:
        return f"{loader} needs map_location"
    return f"{loader} fails, which knows no map_location"


def _together(path: str, edits: Sequence[Finding]) -> list[Finding]:
    """One command for the prefix and the device, where both are to be edited."""
    names = [finding for finding in edits if finding.code in ("prefix", "wrappers")]
    devices = [finding for finding in edits if finding.code == "device" and finding.next]
    if not (names and devices):
        return []
    option = "--wrappers" if any("--wrappers" in finding.next for finding in names) else "--strip-module"
    step = command("edit", path, option, "--to", "cpu", word="plain.cpu")
    return [Finding("together", "note", "names and devices in one pass", step)]


def _state_dicts(checkpoint: Checkpoint) -> list[Finding]:
    found = []
    survey = checkpoint.survey
    for state_dict in survey.state_dicts:
        if state_dict.confidence == "low":
            what = f"{state_dict.path!r} may be a state dict or just a mapping of tensors: edits leave it alone"
            found.append(Finding("low-confidence", "note", what, f"name it by --key {shlex.quote(state_dict.path)}"))
    if survey.modules:
        top = survey.modules[0] or "the whole file"
        what = f"a pickled module ({top}): loading it needs its classes and runs their code"
        found.append(Finding("module", "warning", what))  # weights-only has the way out
    if not survey.tensors and program_of(checkpoint) is None:
        found.append(Finding("no-tensors", "note", "there is no tensor in it"))
    return found


def _bytes(checkpoint: Checkpoint, account: Account) -> list[Finding]:
    found = []
    if account.unused_bytes:
        path, used, size = account.wasteful[0]
        rest = f" and {counted(len(account.wasteful) - 1, 'more storage')}" if len(account.wasteful) > 1 else ""
        words = human_bytes(used), human_bytes(size)
        if words[0] == words[1]:
            words = f"{used:,} bytes", f"{size:,} bytes"  # rounded, they would be the same
        what = (
            f"{human_bytes(account.unused_bytes)} are stored but used by no tensor: {path or 'the tensor'} uses"
            f" {words[0]} of a storage of {words[1]}{rest}"
        )
        edited = not any(problem.code in _NO_EDITS for problem in checkpoint.container.problems)
        step = command("slim", checkpoint.path, word="slim") if edited else ""
        found.append(Finding("unused-bytes", "note", what, step))
    if account.shared_storages:
        count = counted(account.shared_storages, "storage")
        found.append(Finding("shared", "note", f"{count} used by more than one tensor (tied weights or views)"))
    return found
