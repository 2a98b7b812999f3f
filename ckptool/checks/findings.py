"""Findings: what a user should know about a checkpoint, each with the next command."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from ..accounting import Account
from ..checkpoint import Checkpoint
from ..human import counted, human_bytes, listed
from ..limits import LIMITS
from ..prefixes import Prefix, prefix_of, wrapper_counts
from .storages import Flaw
from .weights_only import Verdict

__all__ = ["Finding", "findings", "suggested_output"]


class Finding(NamedTuple):
    """``level`` is note, warning or error; ``next`` the command to type, or ""."""

    code: str
    level: str
    message: str
    next: str = ""


def suggested_output(path: str, word: str) -> str:
    """A name beside the input: ``model.pth`` gives ``model.cpu.pth``."""
    stem, extension = os.path.splitext(path)
    return f"{stem}.{word}{extension}"


def command(name: str, path: str, *options: str, word: str) -> str:
    """A command line that writes beside the input, quoted for a shell."""
    words = ["ckptool", name, path, *options, "-o", suggested_output(path, word)]
    return " ".join(shlex.quote(part) for part in words)


def findings(checkpoint: Checkpoint, account: Account, verdict: Verdict, flaws: Sequence[Flaw]) -> list[Finding]:
    """Everything worth saying, errors first."""
    found = [
        *_container(checkpoint, flaws),
        *_weights_only(checkpoint, verdict),
        *_prefixes(checkpoint),
        *_devices(checkpoint, account),
        *_state_dicts(checkpoint),
        *_bytes(account),
    ]
    order = {"error": 0, "warning": 1, "note": 2}
    found.sort(key=lambda finding: order[finding.level])
    return found[: LIMITS.listed]


def _container(checkpoint: Checkpoint, all_flaws: Sequence[Flaw]) -> list[Finding]:
    container = checkpoint.container
    found = [Finding(p.code, p.level, p.message, "") for p in container.problems]
    flaws: dict[str, list[str]] = {}
    for flaw in all_flaws:
        flaws.setdefault(flaw.code, []).append(flaw.message)
    for code, messages in flaws.items():
        more = f" (and {len(messages) - 1:,} more)" if len(messages) > 1 else ""
        found.append(Finding(code, "error", messages[0] + more, "get a whole copy of the file"))
    if container.byteorder == "big":
        found.append(Finding("big-endian", "note", "the numbers are big-endian; torch swaps them when it loads"))
    return found


def _weights_only(checkpoint: Checkpoint, verdict: Verdict) -> list[Finding]:
    if verdict.loads:
        return []
    names = [blocker.name for blocker in verdict.blockers if blocker.name]
    rules = [blocker.rule for blocker in verdict.blockers if blocker.rule]
    found = []
    called = [blocker.name for blocker in verdict.blockers if blocker.called]
    if names:
        rest = ", called when it is loaded without" if called else ""
        what = (
            f"torch.load(weights_only=True) refuses it: {listed(names)} not on the list of torch {verdict.torch}{rest}"
        )
        classes = ", ".join(names[:3])
        step = f"if you trust its source: torch.serialization.add_safe_globals([{classes}]), or weights_only=False"
        found.append(Finding("weights-only", "warning", what, step))
    if rules and not names:
        what = f"torch.load(weights_only=True) refuses it: {listed(rules)}"
        step = "if you trust its source: torch.load(..., weights_only=False), and save it again with protocol 2"
        found.append(Finding("weights-only", "warning", what, step if rules[0].startswith("opcode") else ""))
    return found


def _prefixes(checkpoint: Checkpoint) -> list[Finding]:
    nodes = checkpoint.graph.nodes
    found = []
    for state_dict in checkpoint.state_dicts:
        if state_dict.confidence != "high":
            continue
        names = [str(nodes[key]) for key, _ in state_dict.items]
        prefix = prefix_of(names)
        where = f" in {state_dict.path!r}" if state_dict.path else ""
        inner = wrapper_counts(names)
        if prefix.keys:
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


def _devices(checkpoint: Checkpoint, account: Account) -> list[Finding]:
    tags = [share.name for share in account.devices if share.name not in ("cpu", "meta", "")]
    path = checkpoint.path
    found = []
    if tags:
        kind = "that GPU" if len(tags) == 1 and tags[0].startswith("cuda") else "these devices"
        what = f"tagged {listed(tags)}: on a machine without {kind}, torch.load needs map_location"
        found.append(Finding("device", "warning", what, command("remap", path, "--to", "cpu", word="cpu")))
    strings = [name for name in checkpoint.survey.devices if not name.is_object]
    if strings:
        places = listed([f"{name.path} = {name.device!r}" for name in strings[:5]], len(strings))
        step = command("remap", path, "--to", "cpu", "--strings", word="cpu")
        found.append(Finding("device-strings", "note", f"plain strings name a device: {places}", step))
    objects = [name for name in checkpoint.survey.devices if name.is_object and name.device != "cpu"]
    if objects:
        places = listed([f"{name.path} = {name.device}" for name in objects[:5]], len(objects))
        what = f"torch.device objects: {places}; map_location does not reach them"
        found.append(Finding("device-objects", "note", what, command("remap", path, "--to", "cpu", word="cpu")))
    return found


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
        found.append(Finding("module", "warning", what, "save model.state_dict() instead where you can"))
    if not survey.tensors:
        found.append(Finding("no-tensors", "note", "there is no tensor in it"))
    return found


def _bytes(account: Account) -> list[Finding]:
    found = []
    if account.unused_bytes:
        path, used, size = account.wasteful[0]
        rest = f" and {counted(len(account.wasteful) - 1, 'more storage')}" if len(account.wasteful) > 1 else ""
        what = (
            f"{human_bytes(account.unused_bytes)} are stored but used by no tensor: {path or 'the tensor'} uses"
            f" {human_bytes(used)} of a storage of {human_bytes(size)}{rest}"
        )
        found.append(Finding("unused-bytes", "note", what, "tensor.clone() before torch.save stores only what is used"))
    if account.shared_storages:
        count = counted(account.shared_storages, "storage")
        found.append(Finding("shared", "note", f"{count} used by more than one tensor (tied weights or views)"))
    return found
