"""What the rows of ``errors.toml`` ask a file: its signs, words for the answer, steps, and answers to lists of keys."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, Literal, TypeAlias

from ...base.addresses import is_folder
from ...base.errors import CkptoolError
from ...base.globs import escaped
from ...base.lazy import regex
from ...base.prefixes import adapter_keys
from ...base.records import NamedTuple
from ...base.steps import STDIN, AnyStep, Line, Step, as_step, command, in_shell, suggested_output, tree_step
from ...base.text import join_limited, pluralize, shape_text
from ...checkpoint.checkpoint import Checkpoint, Target, Tied
from ...checkpoint.container import is_complete
from ...checkpoint.objects import mapping, values_of
from ...checkpoint.paths import spell_key, within
from ...checkpoint.programs import convert_step, program_of
from ...checkpoint.quantized import quantization
from ...checkpoint.survey import StateDict
from ...edits.matching.candidates import LAYOUT, edit_command
from ...edits.matching.causes import EMBEDDINGS, HEADS, size_causes, sizes_text
from ...edits.matching.match import MatchReport, match_checkpoint
from ...edits.matching.state_dict_errors import Mismatch, StateDictError, prefix_between, read_error
from ...edits.matching.targets import target_in_error
from ...edits.optimizers import Optimizer, drop_step, entries_to_drop, optimizers, parameter_states
from ...edits.sanitize.sanitizer import loadable
from ...files.sources import FolderSource
from ...formats.losses import entries_outside
from ...formats.outputs import OUTPUTS
from ...formats.rank_part import GATHER, empty_weights
from ...pickles.nodes import Global
from ..edit_steps import cast_step, edit_step, pickled_suffix, sanitize_step
from ..inspection import inspection
from .known_errors import (
    COMPUTED,
    MODEL_ENTRIES,
    Case,
    Details,
    KnownError,
    command_line,
    filled,
    load_lines,
    named,
    sentence,
)

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
    a pickled module, ``complete`` if no file of several is missing, ``dequantizes`` if the weights are quantized and
    can be turned back, and ``converts: peft`` if a LoRA can be given that layout and has another.
    """
    survey, container = checkpoint.survey, checkpoint.container
    yes = {
        "folder": isinstance(checkpoint.source, FolderSource),
        "tensors": bool(survey.tensors),
        "module": bool(survey.modules),
        "complete": is_complete(container.problems),
        "dequantizes": survey.may_be_quantized and quantization(checkpoint).is_reversible,
    }
    findings = inspection(checkpoint, judged=False)["findings"]
    return [
        f"format: {checkpoint.format}",
        *(word for word, true in yes.items() if true),
        *(f"{name} = {value}" for name, value in details.items()),
        *(f"finding: {item['code']}" for item in findings),
        *(f"converts: {layout}" for layout in _lora_layouts(checkpoint)),
        *(f"metadata: {name}" for name in container.metadata),
        *(f"state dict: {item.path}" for item in checkpoint.state_dicts),
        *(f"entry: {path}" for path in _entries(checkpoint)),
        *dict.fromkeys(f"dtype: {entry.tensor.dtype}" for entry in survey.tensors),
        *(f"class: {name}" for name in global_names(checkpoint)),
        *(f"key: {entry.key}" for entry in survey.tensors),
        *(f"path: {entry.path}" for entry in survey.tensors),
    ]


def _lora_layouts(checkpoint: Checkpoint) -> list[str]:
    """Return the layouts that a LoRA can be given, without the one that it has."""
    if not adapter_keys([entry.key for entry in checkpoint.survey.tensors[:3]]):
        return []
    from ...edits.lora_layouts import possible_layouts  # only for adapters

    return possible_layouts(checkpoint)


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
    """Return the command that writes the weights as safetensors, or "" if tensors with values would be lost."""
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
    if OUTPUTS["legacy"].writer().fit(checkpoint, Target("legacy")).losses:
        return ""
    return edit_step("convert", checkpoint.path, word="legacy", to_format="legacy").line


def _moved(checkpoint: Checkpoint, argument: str) -> str:
    """Return the command that gives the likeliest state dict a name; ``argument``: the name, and a purpose, or none."""
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


def _cast(checkpoint: Checkpoint, dtype: str) -> str:
    return as_step(cast_step(checkpoint, dtype, lambda edited: True)).line


def _wrapped(checkpoint: Checkpoint, name: str) -> str:
    if checkpoint.container.in_blocks:
        return ""
    return edit_step("edit", checkpoint.path, word="nested", extension=pickled_suffix(checkpoint), wrap=name).line


def _added(checkpoint: Checkpoint, entry: str) -> str:
    if mapping(checkpoint.graph, checkpoint.graph.root) is None:
        return ""
    return edit_step("edit", checkpoint.path, word="new", set=entry).line


#: Steps that depend on more than the path, by the name that a case gives them: functions of the checkpoint and the
#: words after the name. They return "" if no command helps.
STEPS: Final[Mapping[str, Callable[[Checkpoint, str], str]]] = {
    "@safetensors": _to_safetensors,
    "@legacy": _to_legacy,
    "@move": _moved,
    "@cast": _cast,
    "@wrap": _wrapped,
    "@set": _added,
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


class Answer(NamedTuple):
    """The answer for one file: the cause in words, the step, and Python lines.

    ``cause`` is "file" if the file causes the message, "elsewhere" if it has no sign of the cause, and "unknown" for a
    message that is not known.
    """

    why: str
    step: AnyStep = ""
    python: str = ""
    cause: Literal["file", "elsewhere", "unknown"] = "file"


#: A function of the checkpoint, the text, the known error and its details. It returns None to leave the answer to the
#: findings of the error's topic.
_Function: TypeAlias = Callable[[Checkpoint, str, KnownError, Details], Answer | None]

#: What the keys of a file can prove: loaders may rename keys before load_state_dict sees them.
_ANOTHER: Final = "The message is about another file, or the program renames the keys first"
#: The parts that PEFT adds to the names of an adapter when it loads one.
_ADAPTER_NAME: Final = regex(r"(?:\.modules_to_save\.[a-z]\w*|(?<=\.lora_[AB])\.default)(?=\.)")


# -- lists of keys -----------------------------------------------------------------------------------------------------


def _for_keys(checkpoint: Checkpoint, text: str, known: KnownError, details: Details) -> Answer | None:
    path = checkpoint.path
    names = {str(checkpoint.graph.nodes[key]) for item in checkpoint.state_dicts for key, _ in item.items}
    if adapter_keys(names) and not any(map(_ADAPTER_NAME.search, names)):
        text = _ADAPTER_NAME.sub("", text)
    error = read_error(text)
    if error is None:
        return None
    if not checkpoint.state_dicts:
        return Answer(f"{path}: there is no state dict in it", tree_step(path), cause="elsewhere")
    if _is_another_file(checkpoint, error, names):
        return Answer(f"{_ANOTHER}: {path} has other keys or shapes.", cause="elsewhere")
    if any(item.saved == (0,) for item in error.mismatched) and (empty := empty_weights(checkpoint)):
        return Answer(f"{path}: {empty}", GATHER)
    log = "error.txt" if details["log"] == STDIN else details["log"]
    try:
        report, steps, edited = match_checkpoint(checkpoint, target_in_error(checkpoint, text, log))
    except CkptoolError as other:
        return Answer(f"{path}: {other.what}", other.step, cause="elsewhere")
    if report["fits"]:
        fits = f"{path} has the {pluralize(report['keys'], 'key')} that the model wants"
        if any(".parametrizations." in f".{key}" for key in error.missing):
            return Answer(f"{fits}: torch renames those of weight_norm when it loads them.", cause="elsewhere")
        return Answer(f"{_ANOTHER}: {fits}.", cause="elsewhere")
    fix, load = report["fix"], load_lines(path, report["state_dict"])
    line = report["next"] or (fix["command"] if fix is not None else "")
    why = f"{path}: {_difference(report, error)}"
    if differing := (fix or report)["size_mismatches"]:
        keys = ", ".join(json.dumps(item["key"]) for item in report["size_mismatches"] or differing)
        python = f"{load}\nfor key in [{keys}]:\n    del state[key]\nmodel.load_state_dict(state, strict=False)"
        more = f" {sentence(report['advice'])}" if line and report["causes"] else ""
        return Answer(f"{why}{more}", line_step(line), python if line and report["advice"] else "")
    if fix is None:
        lenient = f"{load}\nmodel.load_state_dict(state, strict=False)" if "strict=False" in report["advice"] else ""
        return Answer(why, line_step(line), "" if line else lenient)
    moves = [step for step in steps or () if step.name != "drop"]
    python = known.python_for(path, details, report["state_dict"]) if details.get("renamed") else ""
    if all(step.name in ("extract", "to") for step in moves):
        python = f"{load}\nmodel.load_state_dict(state)"
    dropped = fix["dropped"]
    if dropped and python:
        python = f"{python[:-1]}, strict=False)"
    if dropped and not all(key.endswith(COMPUTED) for key in dropped):
        # strict=False ignores these keys, and no edit needs to remove them.
        renames = any(step.name not in LAYOUT for step in moves)
        why = f"{path}: the model has no place for {pluralize(len(dropped), 'key')}: {join_limited(dropped, most=3)}."
        why += " strict=False ignores them; if they matter, build the model with the layers that they belong to."
        why += " The other keys have other names in the model, which the command changes." if renames else ""
        step = edit_command(path, moves, suggested_output(path, "fits"), edited) if renames else ""
        return Answer(why, step, python)
    if in_shell("`--error`") in line and details["log"] == STDIN:
        return Answer(f"{why} Save the message as error.txt, then '{line}'.")
    return Answer(why, line_step(line), python if fix["complete"] else "")


def line_step(line: str) -> AnyStep:
    """Return a command line as a step; "" stays none."""
    return as_step(Line(line)) if line else ""


def _is_another_file(checkpoint: Checkpoint, error: StateDictError, names: set[str]) -> bool:
    own = error.with_keys_of(names)
    if own.unexpected and not {*own.unexpected} & (names | {entry.key for entry in checkpoint.survey.entries}):
        before, added = prefix_between(own.unexpected, names), prefix_between(own.unexpected, error.missing)
        if not before or (added and f".{added}" in f".{before}"):
            return True
    shapes = {(f".{entry.key}", entry.tensor.shape) for entry in checkpoint.survey.tensors}
    return bool(own.mismatched) and not any(
        shape == item.saved and key.endswith(f".{item.key}") for item in own.mismatched for key, shape in shapes
    )


def _difference(report: MatchReport, error: StateDictError) -> str:
    fix, wanted = report["fix"], pluralize(report["wanted"], "key")
    causes = [cause["message"] for cause in report["causes"]]
    reasons = " ".join(map(sentence, causes or [report["advice"]]))
    if differing := (fix or report)["size_mismatches"]:
        shapes = {item.key: item for item in error.mismatched}
        shown = [shapes[item["key"]] for item in differing if item["key"] in shapes] or list(error.mismatched)
        return f"{sizes_text(shown)}. {reasons}"
    if fix is None and not (report["loads"] or report["wanted"] != report["keys"] or causes):
        by_order = edit_step("edit", report["path"], word="fits", rename_like="names.pth", by_order=True)
        return (
            "all keys have other names than the model's keys. If it is the same model with its layers renamed, save the"
            f" model's with torch.save(model.state_dict(), 'names.pth'); '{by_order}' pairs them by order and shape."
        )
    if fix is None:
        absent = f" Not in it: {join_limited(report['missing'], most=3)}." if report["loads"] else ""
        return f"{report['loads']:,} of {wanted} of the model are in it.{absent} {reasons}".rstrip()
    if causes:
        what = "; ".join(causes)
    elif report["state_dict"] and not report["placed"]:
        what = f"the weights are in its entry {report['state_dict']!r}"
    elif prefix := prefix_between(error.missing, error.unexpected):
        what = f"its keys begin with {prefix!r}, and the model's keys do not"
    elif prefix := prefix_between(error.unexpected, error.missing):
        what = f"keys of the model begin with {prefix!r}, and the file's keys do not"
    elif not error.missing:
        what = "it has keys that the model does not have"
    else:
        what = "its keys have other names than the model's keys"
    text = f"{what}. {fix['loads']:,} of {wanted} load after the command."
    if not fix["complete"]:
        both = (("still missing", fix["missing"]), ("still unexpected", fix["unexpected"]))
        rest = "; ".join(f"{kind}: {join_limited(keys, most=3)}" for kind, keys in both if keys)
        untrained = " With strict=False the missing keys stay untrained, with initial values." if fix["missing"] else ""
        text += f" {sentence(rest)}{untrained}"
    return text


# -- one key, one shape ------------------------------------------------------------------------------------------------


def _for_one_key(checkpoint: Checkpoint, text: str, known: KnownError, details: Details) -> Answer | None:
    path, wanted = checkpoint.path, details["entry"]
    names = {str(checkpoint.graph.nodes[key]): item for item in checkpoint.state_dicts for key, _ in item.items}
    tied = next((name for name in names if name.endswith(EMBEDDINGS)), "")
    if tied and wanted.endswith(HEADS):
        base = names[tied].path
        copy = f"{path}:{spell_key(base, tied)}={spell_key(base, wanted)}"
        output = suggested_output(path, "untied", pickled_suffix(checkpoint))
        why = f"{path} has no {wanted!r}: it is tied to {tied!r}. The code needs the tensor under both names."
        return Answer(why, command("edit", path, output=output, merge_entry=copy))
    why = f"{path} has no key {wanted!r}: it has another prefix, or the code expects another model or version."
    return Answer(why, command("keys", path))


def _for_a_shape(checkpoint: Checkpoint, text: str, known: KnownError, details: Details) -> Answer | None:
    saved, wanted = (tuple(map(int, details[name].replace(",", " ").split())) for name in ("saved", "wanted"))
    entries = [entry for entry in checkpoint.survey.tensors if entry.tensor.shape == saved]
    entries = [entry for entry in entries if entry.key.endswith(details["name"])] or entries
    if not entries:
        why = f"{checkpoint.path}: no tensor in it has the shape {shape_text(saved)}"
        return Answer(f"{why}. The message is about another file.", cause="elsewhere")
    found = [Mismatch(entry.key, saved, wanted) for entry in entries[:NAMED]]
    causes = size_causes(found, len({entry.key for entry in checkpoint.survey.tensors}))
    why = " ".join(sentence(cause.message) for cause in causes)
    return Answer(f"{checkpoint.path}: {sizes_text(found)}. {why}")


# -- optimizers --------------------------------------------------------------------------------------------------------


def _for_an_optimizer(checkpoint: Checkpoint, text: str, known: KnownError, details: Details) -> Answer | None:
    path, found, wanted = checkpoint.path, optimizers(checkpoint.graph), details.get("entry", "")
    if not found:
        return Answer(f"{path} holds no optimizer: {contents(checkpoint)}.", cause="elsewhere")
    reasons = {item.path: _lack(checkpoint, item, wanted) if wanted else "" for item in found}
    broken = [item for item in found if reasons[item.path] or not wanted]
    if not broken:
        return Answer(f"{path} has {wanted!r} wherever its optimizer needs it.", cause="elsewhere")
    why = "; ".join(filter(None, reasons.values())) or "it holds an optimizer of another number of parameters or groups"
    why = f"{path}: {why}. The weights load without the optimizer, which then starts afresh."
    return Answer(why, drop_step(path, entries_to_drop(checkpoint, broken).values()))


def _lack(checkpoint: Checkpoint, optimizer: Optimizer, wanted: str) -> str:
    graph, place = checkpoint.graph, repr(optimizer.path) if optimizer.path else "the optimizer"
    states = parameter_states(graph, optimizer)
    lacking = [own for own in states.values() if wanted not in own]
    options = {name for group in optimizer.groups for name in values_of(graph, group.ref)}
    if wanted in options or (states and not lacking):
        return ""
    if len(lacking) == len(states):
        others = join_limited(list(lacking[0] if lacking else options))
        return f"another optimizer saved {place}: it has {others}, and yours looks for {wanted!r}"
    return f"{place} lacks {wanted!r} for {len(lacking):,} of {pluralize(len(states), 'parameter')}"


#: The functions by the names that rows of the table give as their ``answer``.
ANSWERS: Final[Mapping[str, _Function]] = {
    "keys": _for_keys,
    "one key": _for_one_key,
    "shape": _for_a_shape,
    "optimizer": _for_an_optimizer,
}
