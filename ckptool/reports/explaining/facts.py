"""What the rows of ``errors.toml`` ask a file: its signs, words for the answer, and steps that depend on it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from ...base.patterns import escaped
from ...base.steps import Step, as_step, command, is_folder, suggested_output
from ...base.text import join_limited, pluralize
from ...checkpoint.checkpoint import Checkpoint, Target, Tied
from ...checkpoint.container import is_complete
from ...checkpoint.objects import mapping
from ...checkpoint.paths import within
from ...checkpoint.programs import convert_step, program_of
from ...checkpoint.survey import StateDict
from ...edits.sanitize.trial import loadable
from ...files.sources import FolderSource
from ...formats.losses import entries_outside
from ...formats.outputs import OUTPUTS
from ...pickles.nodes import Global
from ..edit_steps import edit_step, sanitize_step
from ..inspection import inspection
from .key_lists import MODEL_ENTRIES, Details
from .known_errors import Case, command_line, filled, named

#: State dicts and findings named in an answer.
NAMED: Final = 3
#: The most entries of one mapping that are signs.
_MOST_ENTRIES: Final = 1000


def signs(checkpoint: Checkpoint, details: Details) -> list[str]:
    """Return the facts that ``has`` and ``lacks`` of a case are searched in, a line for each.

    ``format: torch-zip``, ``key: fc.weight`` and ``path: model["fc.weight"]`` for a tensor, ``entry: optimizer.state``
    for an entry or an entry of an entry, ``class: numpy.dtype`` for a class or function in the pickles, ``dtype:
    float16``, ``finding: adapter`` for a finding of ``inspect``, ``metadata: format`` for a field of a header, ``state
    dict: model``, ``entry = epoch`` for a detail of the message; and the words ``folder``, ``tensors``, ``module`` for
    a pickled module, and ``complete`` if no file of several is missing.
    """
    survey, container = checkpoint.survey, checkpoint.container
    yes = {
        "folder": isinstance(checkpoint.source, FolderSource),
        "tensors": bool(survey.tensors),
        "module": bool(survey.modules),
        "complete": is_complete(container.problems),
    }
    findings = inspection(checkpoint, judged=False)["findings"]
    return [
        f"format: {checkpoint.format}",
        *(word for word, true in yes.items() if true),
        *(f"{name} = {value}" for name, value in details.items()),
        *(f"finding: {item['code']}" for item in findings),
        *(f"metadata: {name}" for name in container.metadata),
        *(f"state dict: {item.path}" for item in checkpoint.state_dicts),
        *(f"entry: {path}" for path in _entries(checkpoint)),
        *dict.fromkeys(f"dtype: {entry.tensor.dtype}" for entry in survey.tensors),
        *(f"class: {name}" for name in global_names(checkpoint)),
        *(f"key: {entry.key}" for entry in survey.tensors),
        *(f"path: {entry.path}" for entry in survey.tensors),
    ]


def _entries(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the entries of the root, and of its entries: ``optimizer``, ``optimizer.state``."""
    nodes = checkpoint.graph.nodes
    for key, ref in islice(mapping(checkpoint.graph, checkpoint.graph.root) or (), _MOST_ENTRIES):
        yield str(nodes[key])
        inner = islice(mapping(checkpoint.graph, ref) or (), _MOST_ENTRIES)
        yield from (f"{nodes[key]!s}.{nodes[name]!s}" for name, _ in inner)


def global_names(checkpoint: Checkpoint) -> list[str]:
    """Return the dotted names of the classes and functions in the pickles of a checkpoint."""
    return [f"{node.module}.{node.name}" for _, node in checkpoint.graph.of_type(Global)]


def fitting_case(cases: Iterable[Case], lines: Sequence[str], details: Details) -> Case | None:
    """Return the first case whose signs are among these lines, or None."""
    known = {name: re.escape(value) for name, value in details.items()}

    def is_sign(pattern: str) -> bool:
        search = re.compile(filled(pattern, known)).search
        return any(map(search, lines))

    for case in cases:
        if not case.unreadable and all(map(is_sign, case.has)) and not any(map(is_sign, case.lacks)):
            return case
    return None


def words(checkpoint: Checkpoint, details: Details) -> dict[str, str]:
    """Return the details of the message, and facts about the file that an answer can name in braces.

    ``contents``, ``format``, ``writer``, ``entries``, and ``place``, the path of the state dict that the code probably
    means, as ``where`` also in words.
    """
    keys = [entry.key for entry in checkpoint.survey.entries]
    bare = any(item.path == "" for item in checkpoint.state_dicts)
    place = likeliest(checkpoint, details.get("entry", "")).path if checkpoint.state_dicts else ""
    return {
        **details,
        "contents": contents(checkpoint),
        "format": checkpoint.format,
        "writer": checkpoint.container.writer,
        "entries": "nothing but weights" if bare else join_limited(keys) or "nothing",
        "place": place,
        "where": f"in its entry {place!r}" if place else "at its top level",
    }


def contents(checkpoint: Checkpoint) -> str:
    """Describe the contents in a few words, for a file without a flaw."""
    if not checkpoint.state_dicts:
        return pluralize(len(checkpoint.survey.tensors), "tensor")
    places = [
        f"a state dict of {pluralize(len(item.items), 'key')}" + (f" in {item.path!r}" if item.path else "")
        for item in checkpoint.state_dicts
    ]
    return join_limited(places, most=NAMED)


def likely_dicts(checkpoint: Checkpoint) -> Sequence[StateDict]:
    """Return the state dicts that are surely ones, or all."""
    return [item for item in checkpoint.state_dicts if item.confidence == "high"] or checkpoint.state_dicts


def likeliest(checkpoint: Checkpoint, wanted: str) -> StateDict:
    """Return the state dict that code means by an entry: averaged weights only where it asks for them."""

    def rank(item: StateDict) -> tuple[bool, int, int]:
        averaged = "ema" in item.path.lower()
        known = MODEL_ENTRIES.index(item.path) if item.path in MODEL_ENTRIES else len(MODEL_ENTRIES)
        return averaged != ("ema" in wanted.lower()), known, -len(item.items)

    return min(likely_dicts(checkpoint), key=rank)


# -- steps -------------------------------------------------------------------------------------------------------------


def step_of(case: Case, checkpoint: Checkpoint, details: Details) -> str:
    """Return the command of a case for a file, or ""."""
    name, _, argument = case.step.partition(" ")
    if name in STEPS:
        return STEPS[name](checkpoint, named(argument, checkpoint.path, details))
    return command_line(case.step, checkpoint.path, details) if case.step else ""


def _to_safetensors(checkpoint: Checkpoint, output: str) -> str:
    """Return the command that writes the weights as safetensors, with a choice wherever ``convert`` needs one; "" if
    there are several state dicts, or tensors with values would be lost.
    """
    if program_of(checkpoint) is not None:
        return convert_step(checkpoint).line
    chosen, *others = likely_dicts(checkpoint)
    tensors = checkpoint.survey.tensors_in([chosen.path])
    shared = [entry.tensor.storage for entry in tensors if entry.tensor.storage]
    tied: Tied = "keep-first" if len(set(shared)) < len(shared) else ""
    inside = [entry.tensor for entry in checkpoint.survey.tensors if within(entry.path, chosen.path)]
    extra = chosen.path and any(tensor.storage not in shared for tensor in inside)  # such as tensors in an extra state
    target = Target("safetensors", chosen.path, tied)
    losses = [*entries_outside(checkpoint, chosen), *OUTPUTS["safetensors"].writer().fit(checkpoint, target).losses]
    if others or extra or os.path.exists(output) or any(loss.drops for loss in losses if loss.kind != "entries"):
        return ""
    output = output or named("{path:.safetensors}", checkpoint.path, {})
    key = "" if chosen.confidence == "high" else chosen.path or "."
    kinds = [*dict.fromkeys(loss.kind for loss in losses)]
    return command("convert", checkpoint.path, output=output, key=key, tied=tied, allow_loss=kinds).line


def _to_legacy(checkpoint: Checkpoint, argument: str) -> str:
    """Return the command that writes the format of torch 1.5, or "" if that cannot hold the contents."""
    if OUTPUTS["legacy"].writer().fit(checkpoint, Target("legacy")).losses:
        return ""
    return edit_step("convert", checkpoint.path, word="legacy", to_format="legacy").line


def _moved(checkpoint: Checkpoint, argument: str) -> str:
    """Return the command that gives the likeliest state dict a name and keeps everything else; "" if the file holds no
    mapping. ``argument`` is the name, and the purpose of the file if it has one.
    """
    name, _, purpose = argument.partition(" ")
    path, place = checkpoint.path, likeliest(checkpoint, name).path
    output = suggested_output(path, purpose or "renamed", ".ckpt" if purpose else pickled_suffix(checkpoint))
    if mapping(checkpoint.graph, checkpoint.graph.root) is None:
        return ""
    if place in ("", name):
        return command("edit", path, output=output, for_=purpose).line
    settings = [Step("merge_entry", f"{path}:{place}={name}")]
    settings += [Step("drop", escaped(entry.key)) for entry in checkpoint.survey.entries if entry.path == place]
    return command("edit", path, output=output, steps=settings, for_=purpose).line


def pickled_suffix(checkpoint: Checkpoint) -> str:
    """Return the suffix for an output that holds entries, which safetensors files do not."""
    return "" if checkpoint.pickled and not isinstance(checkpoint.source, FolderSource) else ".pth"


#: Steps that depend on more than the path, by the name that a case gives them: functions of the checkpoint and the
#: words after the name. They return "" if no command helps.
STEPS: Final[Mapping[str, Callable[[Checkpoint, str], str]]] = {
    "@safetensors": _to_safetensors,
    "@legacy": _to_legacy,
    "@move": _moved,
    "@plain": lambda checkpoint, argument: as_step(sanitize_step(checkpoint)).line,
}


def runnable(checkpoint: Checkpoint, python: str) -> str:
    """Return Python lines that work for the file, or "" where torch.load does not read it as they say."""
    if "torch.load(" not in python:
        return python
    if checkpoint.traits.loader != "torch.load" or program_of(checkpoint) is not None or is_folder(checkpoint.path):
        return ""
    if not checkpoint.survey.modules:
        python = python.replace(").state_dict()", ")")
    return python if "weights_only" in python or loadable(checkpoint) else ""
