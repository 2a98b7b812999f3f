"""Next steps that edit a checkpoint: one command for several edits, and those that only a trial can tell."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from ..base.errors import CkptoolError
from ..base.findings import Finding
from ..base.steps import (
    AnyStep,
    Command,
    NextStep,
    Step,
    advised,
    as_step,
    command,
    rename_step,
    suggested_output,
)
from ..base.suffixes import PICKLES, WEIGHTS
from ..base.text import join_limited
from ..checkpoint.checkpoint import Checkpoint, Target
from ..files.sources import FolderSource
from ..safety.storages import storage_flaws
from ..safety.weights_only import WRONG_SUFFIX, weights_only


def edit_step(
    name: str,
    path: str,
    *arguments: str,
    word: str = "",
    extension: str = "",
    steps: Iterable[Step] = (),
    **more: str | bool | Sequence[str] | None,
) -> NextStep:
    """Return a command that writes its output beside the input, to ``suggested_output``."""
    return command(name, path, *arguments, output=suggested_output(path, word, extension), steps=steps, **more)


def pickled_suffix(checkpoint: Checkpoint) -> str:
    """Return the suffix for an output that holds entries or devices, if the checkpoint's own format does not, or ""."""
    return "" if checkpoint.pickled and not isinstance(checkpoint.source, FolderSource) else ".pth"


def cast_step(checkpoint: Checkpoint, dtype: str, done: Callable[[Checkpoint], bool]) -> AnyStep:
    """Return the command that casts to a dtype if ``done`` accepts its result, otherwise why it is of no use.

    The cast is tried without output, and computes no values.
    """
    from ..edits.cast import cast  # imported only for files that are to be cast

    try:
        if not done(cast(checkpoint, dtype)):
            return f"ckptool cast does not make all of them {dtype}"
    except CkptoolError as error:
        return error.step if error.step.line else advised(error.what, error.step)
    return as_one_file(checkpoint, edit_step("cast", checkpoint.path, word=dtype, to_dtype=dtype))


def stops_edits(problem: Finding) -> bool:
    """Return whether edits are refused because of a problem."""
    return problem.blocks_edits or problem.ambiguous


#: The commands that ``edit`` combines, in this order: the edit that each is, "" if its settings are the edits; how
#: ``edit`` calls its settings, if differently; and the word for the output name.
TOGETHER: Final[Mapping[str, tuple[str, Mapping[str, str], str]]] = {
    "sanitize": ("sanitize", {}, "loadable"),
    "strip-module": ("strip_module", {}, "plain"),
    "add-module": ("", {"prefix": "add_prefix"}, "prefixed"),
    "remap": ("", {}, "cpu"),
    "extract": ("", {}, "weights"),
    "cast": ("", {}, "cast"),
    "slim": ("slim", {}, "slim"),
    "edit": ("", {}, "clean"),
}


def together(path: str, steps: Iterable[AnyStep], extension: str = "") -> NextStep | None:
    """Return one command that replaces several which write from the same file; None if there are not several."""
    commands = dict.fromkeys(part for step in steps for part in as_step(step).commands)
    given = {name: [part for part in commands if part.name == name] for name in TOGETHER}
    if sum(map(bool, given.values())) < 2 and max(map(len, given.values())) < 2:
        return None
    settings: list[Step] = []
    words = []
    for name, (edit, renamed, word) in TOGETHER.items():
        if not given[name]:
            continue
        own = [setting for part in given[name] for setting in part.options]
        own += [Step(name, key) for part in given[name] for key in part.arguments[1:]]
        own = list(dict.fromkeys(own))
        if edit and Step("wrappers") not in own:
            settings.append(Step(edit))
        settings += [setting._replace(name=renamed.get(setting.name, setting.name)) for setting in own]
        words.append(word)
    return edit_step("edit", path, word=".".join(words), extension=extension, steps=settings)


def as_one_file(checkpoint: Checkpoint, step: AnyStep) -> AnyStep:
    """Return a next step whose outputs are files, if the checkpoint cannot be written as the folder that it is."""
    if not (step and (not checkpoint.traits.writes_as or _is_beyond_its_format(checkpoint))):
        return step

    def named(part: str | Command) -> str | Command:
        if not isinstance(part, Command) or not part.output or part.output.endswith(WEIGHTS):
            return part
        return part._replace(output=suggested_output(part.output, extension=f"{os.path.splitext(part.output)[1]}.pth"))

    return NextStep(tuple(map(named, as_step(step).parts)))


def _is_beyond_its_format(checkpoint: Checkpoint) -> bool:
    if not isinstance(checkpoint.source, FolderSource):
        return False
    from ..formats.outputs import OUTPUTS  # imported late, as few checkpoints get this far

    own = OUTPUTS[checkpoint.traits.writes_as]
    if not own.folder:
        return False
    losses = own.writer().fit(checkpoint, Target(own.name)).losses
    return any(loss.kind in ("keys", "containers") for loss in losses)


def sanitize_step(checkpoint: Checkpoint) -> AnyStep:
    """Return the ``sanitize`` command after which plain ``torch.load(path)`` works, or "".

    The edit is tried without output, because only this shows which options it needs.
    """
    if any(stops_edits(problem) for problem in checkpoint.container.problems):
        return ""
    extension = ".pth" if checkpoint.path.endswith(PICKLES) else ""
    if checkpoint.path.endswith(".safetensors"):
        blockers = weights_only(checkpoint, storage_flaws(checkpoint)).blockers
        if all(blocker.rule == WRONG_SUFFIX for blocker in blockers):
            return rename_step(checkpoint.path, ".pth")
        extension = ".pth"
    from ..edits.sanitize.sanitizer import options_that_work  # imported only for files that need it

    options = options_that_work(checkpoint)
    if options is not None and "drop_unknown" in options and not checkpoint.survey.tensors:
        return ""  # such as a tokenizer: nothing of use would be left
    if options is not None:
        step = edit_step("sanitize", checkpoint.path, word="loadable", extension=extension, steps=map(Step, options))
        return as_one_file(checkpoint, step)
    return ""


def companions_step(checkpoint: Checkpoint) -> AnyStep:
    """Return the command that writes a folder with plain files beside its weights, or "" if none would be plain."""
    from ..edits.sanitize.sanitizer import sanitize

    for flags in ((), ("as_state_dict",), ("drop_unknown",), ("as_state_dict", "drop_unknown")):
        try:
            edited = sanitize(checkpoint, as_state_dict="as_state_dict" in flags, drop_unknown="drop_unknown" in flags)
        except CkptoolError:
            return ""
        if edited.companions:
            return edit_step("sanitize", checkpoint.path, word="loadable", steps=map(Step, flags))
    return ""


def where_installed(checkpoint: Checkpoint, names: Iterable[str]) -> str:
    """Return the advice for objects that only their own classes turn into tensors; "" for a file that is damaged."""
    if any(stops_edits(problem) for problem in checkpoint.container.problems):
        return ""
    packages = dict.fromkeys(name.partition(".")[0] for name in names)
    others = [name for name in packages if name not in ("torch", "collections", "builtins", "numpy", "__main__")]
    where = f"where {join_limited(others)} is installed" if others else "with the code that saved it"
    return f"load it {where}, if you trust it, and save its state dict"
