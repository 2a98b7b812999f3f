"""Remedies: the edits after which a checkpoint is as a policy expects, each tried before it is suggested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from ..base.errors import CkptoolError
from ..base.map_location import restorable
from ..base.prefixes import wrapper_prefix
from ..base.records import NamedTuple
from ..base.steps import AnyStep, Setting, as_step, command, suggested_output
from ..checkpoint.checkpoint import Checkpoint, away, layout_of
from ..files.sources import FolderSource
from ..formats.outputs import OUTPUTS
from ..safety.storages import storage_flaws
from ..safety.weights_only import weights_only
from .checks import FAIL
from .edit_steps import as_one_file, companions_step, sanitize_step, together, where_installed
from .expectations import Policy, accepts, expectations

#: Checks that pass once ``torch.load(weights_only=True)`` takes the file.
_SAFE: Final = frozenset(("weights-only", "verdict", "expect-weights-only"))
#: The step where several state dicts would have to become one.
_SEVERAL: Final = "each state dict makes a file of its own: extract them"
_SOME: Final = "some keys have the prefix already: take it off them first, with strip-module"
_VALUES: Final = "no edit mends NaN and Inf: take a checkpoint from before they appeared"
_PAIRS: Final = "remove one key of each pair with drop"


class _Remedy(NamedTuple):
    """An edit that may make a ``check`` pass: the command, its further argument or "", its settings, and a word for
    the output. ``instead`` is the advice if the edit does not help.
    """

    check: str
    command: str
    argument: str = ""
    settings: tuple[Setting, ...] = ()
    word: str = ""
    instead: str = ""

    def step(self, path: str, extension: str) -> AnyStep:
        """Return the command."""
        output = suggested_output(path, self.word, extension)
        return command(self.command, path, *filter(None, [self.argument]), output=output, settings=self.settings)

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint after the edit."""
        from ..edits.pipeline import edit  # imports all edits, which only a failed policy needs
        from ..edits.table import MODIFIERS

        steps = [(setting.name.replace("_", "-"), setting.value or True) for setting in self.settings]
        steps.sort(key=lambda step: step[0] not in MODIFIERS)  # a modifier comes before its edit
        if self.argument:
            steps.append((self.command, self.argument))
        if self.command == "strip-module" and not steps:
            steps.append(("strip-module", True))
        return edit(checkpoint, steps)


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
    found: list[_Remedy] = []
    advice = ""
    for item in _remedies(checkpoint, policy):
        if item.check not in _failing(checkpoint, policy):
            continue
        after = _tried(checkpoint, item)
        if after is None or item.check in _failing(after, policy):
            advice = advice or item.instead
        else:
            found.append(item)
            checkpoint = after
    own = OUTPUTS.get(before.traits.writes_as)
    flat = isinstance(before.source, FolderSource) or (own is not None and own.one_state_dict)
    extension = ".pth" if flat and any(item.command in ("edit", "remap") for item in found) else ""
    steps += [item.step(path, extension) for item in found]
    if steps and not any(item.device for item in policy.each) and not policy.map_location and away(before):
        # without this it would not load on a machine without a GPU
        steps.append(_Remedy("", "remap", settings=(Setting("to", "cpu"),), word="cpu").step(path, extension))
    values = bad.get("finite") == FAIL
    if steps:
        step = as_one_file(before, together(path, steps, extension) or steps[0])
        return f"{_VALUES}; for the rest: " + as_step(step) if values else step
    if values:
        return _VALUES
    names = [blocker.name for blocker in weights_only(before, storage_flaws(before)).blockers if blocker.name]
    return advice or (where_installed(before, names) if names and _SAFE & bad.keys() else "")


def _failing(checkpoint: Checkpoint, policy: Policy) -> set[str]:
    """Return the expectations that a checkpoint does not meet."""
    verdict = weights_only(checkpoint, storage_flaws(checkpoint))
    return {check.name for check in expectations(checkpoint, policy, verdict) if check.status == FAIL}


def _tried(checkpoint: Checkpoint, item: _Remedy) -> Checkpoint | None:
    """Return the checkpoint after an edit, or None if the edit is refused."""
    try:
        return item.applied(checkpoint)
    except CkptoolError:
        return None


def _remedies(checkpoint: Checkpoint, policy: Policy) -> Iterator[_Remedy]:
    """Yield the edits that may help, in the order in which they are applied."""
    keys = [item for item in checkpoint.state_dicts if item.confidence == "high"]
    names = [str(checkpoint.graph.nodes[key]) for item in keys for key, _ in item.items]
    prefixes = {item.prefix for item in policy.each if item.prefix}
    if prefixes == {"none"}:
        wrappers = (Setting("wrappers"),) if wrapper_prefix(names).name != "module." else ()
        yield _Remedy("prefix", "strip-module", settings=wrappers, word="plain", instead=_PAIRS if names else "")
    elif len(prefixes) == 1:
        (prefix,) = prefixes
        bare = not any(name.startswith(f"{prefix.rstrip('.')}.") for name in names)
        settings = (Setting("add_prefix", prefix),) if bare else ()
        yield _Remedy("prefix", "add-module", settings=settings, word="prefixed", instead="" if bare else _SOME)
    devices = [item.device for item in policy.each if item.device]
    named = (
        tag.replace("*", "0") if tag.endswith(":*") else "cuda:0" if tag == "cuda" else tag for tag in sum(devices, ())
    )
    device = next((tag for tag in named if all(accepts(tags, tag) for tags in devices)), "")
    if restorable(device):
        for more in ((), (Setting("include_cpu"),)):
            yield _Remedy("device", "remap", settings=(Setting("to", device), *more), word=device.replace(":", ""))
    layout, _ = layout_of(checkpoint)
    if layout == "wrapped" and len(keys) == 1:
        yield _Remedy("layout", "extract", keys[0].path, word="weights")
    elif layout == "wrapped":
        yield _Remedy("layout", "extract", "", word="weights", instead=_SEVERAL)
    else:
        yield _Remedy("layout", "edit", settings=(Setting("wrap", "state_dict"),), word="nested")
    for dtype in dict.fromkeys(dtype for item in policy.each for dtype in item.dtype):
        yield _Remedy("dtype", "cast", settings=(Setting("to_dtype", dtype),), word=dtype)
