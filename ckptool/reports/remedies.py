"""Remedies: the edits after which a checkpoint is as a policy expects."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Final

from ..base.dtypes import BY_NAME
from ..base.map_location import restorable
from ..base.prefixes import wrapper_prefix
from ..base.steps import AnyStep, as_step
from ..checkpoint.checkpoint import Checkpoint, away, layout_of
from ..files.sources import FolderSource
from ..formats.outputs import OUTPUTS
from ..safety.storages import storage_flaws
from ..safety.weights_only import weights_only
from .checks import FAIL
from .edit_steps import as_one_file, companions_step, edit_step, sanitize_step, stops_edits, together, where_installed
from .expectations import Policy, accepts, expectations

#: Checks that pass once ``torch.load(weights_only=True)`` takes the file.
_SAFE: Final = frozenset(("weights-only", "verdict", "expect-weights-only"))
#: The step where several state dicts would have to become one.
_SEVERAL: Final = "each state dict makes a file of its own: extract them"
_SOME: Final = "some keys have the prefix already: take it off them first, with strip-module"
_VALUES: Final = "no edit mends NaN and Inf: take a checkpoint from before they appeared"
_PAIRS: Final = "remove one key of each pair with drop"


def remedy(checkpoint: Checkpoint, policy: Policy, bad: Mapping[str, str]) -> AnyStep:
    """Return the command after which a checkpoint is as the policy expects, advice, or "".

    ``bad`` maps the names of checks to their status. A pickled module becomes a state dict first.
    """
    path, before = checkpoint.path, checkpoint
    steps: list[AnyStep] = []
    if checkpoint.pickled and _SAFE & bad.keys() and (plain := sanitize_step(checkpoint)):
        from ..edits.sanitize.trial import sanitized  # imported only for files that need it

        steps.append(plain)
        checkpoint = sanitized(checkpoint) or checkpoint
    elif "beside" in bad and isinstance(checkpoint.source, FolderSource) and (plain := companions_step(checkpoint)):
        steps.append(plain)
    verdict = weights_only(checkpoint, storage_flaws(checkpoint))
    failing = {check.name for check in expectations(checkpoint, policy, verdict) if check.status == FAIL}
    own = OUTPUTS.get(before.traits.writes_as)
    flat = isinstance(before.source, FolderSource) or (own is not None and own.one_state_dict)
    extension = ".pth" if flat and ("device" in failing or _wraps(checkpoint, policy, failing)) else ""
    refused = any(stops_edits(problem) for problem in checkpoint.container.problems)
    mends = [] if refused else list(_mends(checkpoint, policy, failing, extension))
    steps += [step for step in mends if as_step(step).commands]
    if steps and not any(item.device for item in policy.each) and not policy.map_location and away(before):
        # without this it would not load on a machine without a GPU
        steps.append(edit_step("remap", path, word="cpu", extension=extension, to="cpu"))
    values = bad.get("finite") == FAIL
    if steps:
        step = as_one_file(before, together(path, steps, extension) or steps[0])
        return f"{_VALUES}; for the rest: " + as_step(step) if values else step
    if values:
        return _VALUES
    names = [blocker.name for blocker in weights_only(before, storage_flaws(before)).blockers if blocker.name]
    advice = next(iter(mends), "")
    return advice or (where_installed(before, names) if names and _SAFE & bad.keys() else "")


def _wraps(checkpoint: Checkpoint, policy: Policy, failing: Collection[str]) -> bool:
    """Return whether a bare state dict should be the entry of a dict."""
    wanted = {item.layout for item in policy.each if item.layout}
    return "layout" in failing and wanted == {"wrapped"} and layout_of(checkpoint)[0] == "bare"


def _mends(checkpoint: Checkpoint, policy: Policy, failing: Collection[str], extension: str) -> Iterator[AnyStep]:
    """Yield the edit for each failing expectation, or advice where no edit helps, in the order of the edits."""
    keys = [item for item in checkpoint.state_dicts if item.confidence == "high"]
    nodes = checkpoint.graph.nodes
    names = [{str(nodes[key]) for key, _ in item.items} for item in keys]
    write = partial(edit_step, extension=extension)
    path = checkpoint.path
    prefixes = {item.prefix for item in policy.each if item.prefix} if "prefix" in failing and keys else set()
    if prefixes == {"none"}:
        prefix = wrapper_prefix([name for own in names for name in own]).name
        pairs = any(name != (bare := name.removeprefix(prefix)) and bare in own for own in names for name in own)
        yield _PAIRS if pairs else write("strip-module", path, word="plain", wrappers=prefix != "module.")
    elif len(prefixes) == 1:
        (prefix,) = prefixes
        some = any(name.startswith(f"{prefix.rstrip('.')}.") for own in names for name in own)
        yield _SOME if some else write("add-module", path, word="prefixed", add_prefix=prefix)
    devices = [item.device for item in policy.each if item.device] if "device" in failing else []
    named = (
        tag.replace("*", "0") if tag.endswith(":*") else "cuda:0" if tag == "cuda" else tag for tag in sum(devices, ())
    )
    device = next((tag for tag in named if all(accepts(tags, tag) for tags in devices)), "")
    if restorable(device):
        cpu = any(storage.location == "cpu" for storage in checkpoint.survey.reader.storages.values())
        also = cpu and not all(accepts(tags, "cpu") for tags in devices)
        yield write("remap", path, word=device.replace(":", ""), to=device, include_cpu=also)
    if _wraps(checkpoint, policy, failing):
        yield write("edit", path, word="nested", wrap="state_dict")
    elif "layout" in failing and layout_of(checkpoint)[0] == "wrapped":
        yield write("extract", path, keys[0].path, word="weights") if len(keys) == 1 else _SEVERAL
    wanted = [item.dtype for item in policy.each if item.dtype] if "dtype" in failing else []
    allowed = dict.fromkeys(sum(wanted, ()))
    held = {entry.tensor.dtype for entry in checkpoint.survey.tensors if entry.state_dict >= 0} - allowed.keys()
    if held and (all(map(_is_floating, allowed)) or all(map(_is_floating, held))):
        dtype = next((dtype for dtype in allowed if _is_floating(dtype) and all(dtype in each for each in wanted)), "")
        if dtype:
            yield write("cast", path, word=dtype, to_dtype=dtype)


def _is_floating(dtype: str) -> bool:
    return dtype in BY_NAME and BY_NAME[dtype].floating
