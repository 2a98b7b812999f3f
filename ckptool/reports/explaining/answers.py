"""Answers for one file: open it, find the cause of a message in it, and name the command for its own keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Final

from ...base.errors import CkptoolError
from ...base.findings import FLAT_MESSAGE, FLAT_PARAMETERS
from ...base.lazy import regex
from ...base.patterns import escaped
from ...base.steps import STDIN, AnyStep, Line, NextStep, Setting, as_step, command, suggested_output, tree_step
from ...base.suffixes import PICKLES
from ...base.text import join_limited, pluralize, shape_text
from ...checkpoint.checkpoint import Checkpoint, away
from ...checkpoint.objects import mapping
from ...checkpoint.paths import parse_path, spell_key
from ...checkpoint.programs import convert_step, program_of
from ...checkpoint.survey import StateDict
from ...edits.flat_params import flat_state_dicts
from ...edits.matching.causes import EMBEDDINGS, HEADS
from ...edits.matching.match import match_checkpoint
from ...edits.matching.report import MatchReport
from ...edits.matching.sizes import sizes_text
from ...edits.matching.state_dict_errors import StateDictError, prefix_between, read_error
from ...edits.matching.steps import FROM_TARGET, LAYOUT, REARRANGING, Steps, edit_command, renaming
from ...edits.matching.targets import specs_of, target_in_error
from ...edits.purposes import LIGHTNING
from ...edits.sanitize.trial import loadable_step
from ...files.sources import FolderSource
from ...formats.empty_weights import empty_weights, gather_step
from ...formats.opening import open_checkpoint
from ...formats.rank_part import part_of
from ...safety.storages import storage_flaws
from ..edit_steps import edit_step, sanitize_step, together
from ..inspection import FindingReport, inspection
from ..validate import report_on
from .finders import (
    CLASSES,
    COMPUTED,
    DEVICES,
    FILE,
    MODEL_ENTRIES,
    UNKNOWN,
    Answer,
    Details,
    KnownError,
    as_python,
    sentence,
)
from .table import fitting_case, global_names, of_case, runnable, unreadable_case

#: Findings named in an answer.
NAMED: Final = 3
#: Entries that only Lightning writes.
_LIGHTNING_ENTRIES: Final = frozenset(
    ("pytorch-lightning_version", "hyper_parameters", "optimizer_states", "lr_schedulers", "callbacks")
)
#: Entries that count: a fresh run starts with 0.
COUNTERS: Final = ("epoch", "epochs", "iter", "iteration", "iterations", "step", "steps", "global_step", "start_epoch")
#: Findings of ``inspect`` that do not explain a message by themselves.
_REMARKS: Final = frozenset(("together", "shared", "device-strings", "big-endian", "other-names"))


def answer_for(path: str, text: str, error: KnownError | None, details: Details) -> Answer:
    """Return the answer for a file; ``error`` is the known error in the text, or None.

    ``details`` also has the ``log`` that the text comes from, or ``-``.
    Raise UnreadableError if there is no such file.
    """
    unknown = error is None and bool(text.strip())
    try:
        checkpoint = open_checkpoint(path)
    except FileNotFoundError:
        raise
    except CkptoolError as unreadable:
        if isinstance(unreadable.__cause__, OSError):
            raise  # there is no such file, or it must not be read
        if error is not None and (case := unreadable_case(error, unreadable.what)) is not None:
            return of_case(case, path, details, f"{path}: {unreadable.what}. ")
        answer = Answer(f"{path}: {unreadable.what}", unreadable.step)
        return _unknown(answer, path, damaged=True) if unknown else answer
    with checkpoint:
        checkpoint = checkpoint.lenient()
        flaws = [*checkpoint.container.problems, *storage_flaws(checkpoint)]
        part = part_of(checkpoint)
        if part is not None and part.cut:
            whole = command("inspect", part.folder) if part.folder else part.whole
            answer = Answer(f"{path}: {part.message}", whole)  # an edit of one part alone would be useless
        elif any(flaw.code == FLAT_PARAMETERS for flaw in flaws) or flat_state_dicts(checkpoint):
            answer = Answer(f"{path}: {FLAT_MESSAGE}")
        elif error is None or any(flaw.level == "error" for flaw in flaws):
            answer = _by_findings(checkpoint, error, details)  # no edit of a damaged file is possible
        elif (case := fitting_case(error, checkpoint)) is not None:
            answer = of_case(case, path, details)
        elif error.answer is None or any(flaw.effect for flaw in flaws):
            answer = _by_findings(checkpoint, error, details)
        else:
            own = error.answer(checkpoint, text, details) or _by_findings(checkpoint, error, details)
            answer = _of_program(checkpoint, own)
        if unknown:
            return _unknown(answer, path, damaged=any(flaw.level == "error" for flaw in flaws))
        if error is None and answer.cause == "elsewhere":
            answer = answer._replace(why=f"{answer.why}. {_GIVE_IT}.")
        return answer._replace(python=runnable(checkpoint, answer.python))


def _unknown(answer: Answer, path: str, *, damaged: bool) -> Answer:
    """Return the answer to a message that is not known: what inspect finds. Only for a file that is damaged or no
    checkpoint, the step of inspect follows: nobody knows what else the message needs.
    """
    findings = answer.why.removeprefix(f"{path}: ").rstrip(".")
    step = as_step(answer.step) if damaged else NextStep()
    end = "" if step.advice else "."  # advice follows
    return Answer(f"{UNKNOWN} inspect says of {path}: {findings}{end}", step, cause="unknown")


def _of_program(checkpoint: Checkpoint, answer: Answer) -> Answer:
    """Return the answer; for a program, whose entries no command edits, with the command that takes its weights out."""
    program = program_of(checkpoint)
    commands = as_step(answer.step).commands
    if program is None or not commands or all(part.name == "salvage" for part in commands):
        return answer
    step = convert_step(checkpoint) if checkpoint.state_dicts else as_step("")
    why = f"{checkpoint.path} is a program with its code, not a file of weights"
    return Answer(f"{why}: take the weights out first." if step.commands or not step else f"{why}.", step)


#: The end of the answer without a message, for a file without findings.
_GIVE_IT: Final = "If a program does not load it, give explain the message too"
#: What known errors say of ``sanitize``, for a file that it cannot help.
_SANITIZE: Final = regex(r"(?:The weights need no code: )?\bsanitize [^.]*\. ")


def _by_findings(checkpoint: Checkpoint, error: KnownError | None, details: Details) -> Answer:
    """Return the findings of ``inspect`` and ``validate`` that explain the error; all of them without a known one."""
    topic = error.topic if error is not None else FILE
    every = inspection(checkpoint, judged=False)["findings"]
    mine = [item for item in every if item["code"] in topic.codes]
    errors = [item for item in every if item["level"] == "error"]
    if error is None and not errors:
        mine = [item for item in every if item["code"] not in _REMARKS and (item["level"] != "note" or item["next"])]
    name = details.get("name", "") if topic is CLASSES and not errors else ""
    if name and not name.isdigit() and not any(name in each for each in global_names(checkpoint)):
        why = f"{checkpoint.path}: {contents(checkpoint)}. It does not name {name}. {topic.absent}."
        return Answer(why, cause="elsewhere")
    mine = list({item["message"]: item for item in (*errors, *mine)}.values())
    whole = topic.whole and error is not None
    if not errors and (whole or not mine):
        validated = report_on(checkpoint, quick=not whole)
        bad = [check for check in validated["checks"] if check["status"] == "fail"]
        if bad:
            step = Line(validated["next"]) if validated["next"] else validated["advice"]
            return Answer(f"{checkpoint.path}: {'; '.join(check['message'] for check in bad)}", as_step(step))
    if not mine and error is None:
        return Answer(f"{checkpoint.path}: {contents(checkpoint)}, without findings", cause="elsewhere")
    if not mine:
        searched = "Every byte of it was read, and no damage was found" if whole else "It shows no cause of the message"
        why = f"{checkpoint.path}: {contents(checkpoint)}. {searched}. {topic.absent}."
        return Answer(why, cause="elsewhere")
    cause = "" if error is None or topic is FILE or errors else f"{error.why_of(details)} "
    messages = join_sentences(item["message"] for item in mine[:NAMED])
    python = error.python_for(checkpoint.path, details) if error is not None and cause else ""
    helps = _step_of(every, mine) if error is None else _step_for(checkpoint, mine, error, details)
    if not as_step(helps).commands:
        cause = _SANITIZE.sub("", cause)
    return Answer(f"{cause}{checkpoint.path}: {messages}.", helps, python)


def join_sentences(messages: Iterable[str]) -> str:
    """Return messages as one text, separated by semicolons."""
    return "; ".join(message.rstrip(".") for message in messages)


def _step_of(every: Sequence[FindingReport], mine: Sequence[FindingReport]) -> NextStep:
    """Return the command for some findings: the one that makes all edits, if inspect has one."""
    steps = [item["next"] for item in mine if item["next"]]
    together = [item["next"] for item in every if item["code"] == "together"]
    if together and all(item["code"] != "dangerous-call" for item in mine):
        steps = together
    return as_step(Line(steps[0])) if steps else NextStep()


def _step_for(checkpoint: Checkpoint, mine: Sequence[FindingReport], error: KnownError, details: Details) -> AnyStep:
    """Return the command for the findings that explain a known error, and for nothing else in the file."""
    codes = {item["code"] for item in mine}
    path = checkpoint.path
    to_cpu = edit_step("remap", path, word="cpu", to="cpu")
    if codes <= DEVICES.codes:
        # A machine that names its number of GPUs has one.
        return to_cpu if error.topic is not DEVICES else error.step(path, details)
    if codes <= CLASSES.codes and not codes & {"dangerous-call"} and (plain := sanitize_step(checkpoint)):
        return together(path, [plain, to_cpu] if away(checkpoint) else [plain]) or plain
    return _step_of((), mine)


def contents(checkpoint: Checkpoint) -> str:
    """Describe the contents in a few words, for a file without a flaw."""
    if not checkpoint.state_dicts:
        return pluralize(len(checkpoint.survey.tensors), "tensor")
    places = [
        f"a state dict of {pluralize(len(item.items), 'key')}" + (f" in {item.path!r}" if item.path else "")
        for item in checkpoint.state_dicts
    ]
    return join_limited(places, most=NAMED)


# -- keys of a state dict ----------------------------------------------------------------------------------------------


def key_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer for the keys that ``load_state_dict`` complains of: match the file with the model in the message."""
    path = checkpoint.path
    names = {str(checkpoint.graph.nodes[key]) for item in checkpoint.state_dicts for key, _ in item.items}
    if any(map(_LORA.search, names)) and not any(map(_ADAPTER_NAME.search, names)):
        text = _ADAPTER_NAME.sub("", text)
    error = read_error(text)
    if error is None:
        return None
    if not checkpoint.state_dicts:
        return Answer(f"{path}: there is no state dict in it", tree_step(path), cause="elsewhere")
    entries = {entry.key for entry in checkpoint.survey.entries}
    own = error.with_keys_of(names).unexpected
    before = "" if {*own} & (names | entries) else prefix_between(own, names)
    added = prefix_between(own, error.missing)
    if before and added and f".{added}" in f".{before}":
        why = f"the keys of {path} begin with {before!r}, which has {added!r} in it"
        return Answer(f"{_ANOTHER}: {why}.", cause="elsewhere")
    if own and not {*own} & (names | entries) and not before:
        why = f"{path} has none of the keys that the model does not expect, such as {error.unexpected[0]!r}"
        return Answer(f"{_ANOTHER}: {why}.", cause="elsewhere")
    if error.missing and own and {*error.missing} <= names and not {*own} & (names | entries):
        why = f"{path} has the keys that the message calls missing, such as {error.missing[0]!r}"
        return Answer(f"{_ANOTHER}: {why}.", cause="elsewhere")
    empty = empty_weights(checkpoint) if any(item.saved == (0,) for item in error.mismatched) else ""
    if empty:
        return Answer(f"{path}: {empty}", gather_step(checkpoint))
    shapes = {(entry.key, entry.tensor.shape) for entry in checkpoint.survey.tensors}
    if error.mismatched and not any(
        shape == item.saved and f".{key}".endswith(f".{item.key}")
        for item in error.with_keys_of(names).mismatched
        for key, shape in shapes
    ):
        first = error.mismatched[0]
        why = f"{path} has no {first.key!r} of the shape {shape_text(first.saved)}"
        return Answer(f"{_ANOTHER}: {why}.", cause="elsewhere")
    try:
        report, steps, edited = match_checkpoint(checkpoint, target_in_error(checkpoint, text, "the message"))
    except CkptoolError as other:
        return Answer(f"{path}: {other.what}", other.step, cause="elsewhere")
    fix = report["fix"]
    mismatched = fix["size_mismatches"] if fix is not None else report["size_mismatches"]
    if mismatched:
        return _size_answer(checkpoint, error, report)
    if report["fits"]:
        if any(".parametrizations." in f".{key}" for key in error.missing):
            why = f"{path} has the names of weight_norm before torch 2.0, which torch renames when it loads"
            return Answer(f"{why}. A newer transformers does not warn of that.", cause="elsewhere")
        why = f"{path} has the {pluralize(report['keys'], 'key')} that the model wants"
        return Answer(f"{_ANOTHER}: {why}.", cause="elsewhere")
    if fix is None:
        lenient = f"{load_lines(path, report['state_dict'])}\nmodel.load_state_dict(state, strict=False)"
        why = _without_fix(path, report)
        line = report["next"]
        return Answer(
            why, Line(line) if line else "", "" if line or "strict=False" not in report["advice"] else lenient
        )
    fewer = prefix_between(error.missing, error.unexpected)
    more = prefix_between(error.unexpected, error.missing)
    if fix["dropped"] and not all(key.endswith(COMPUTED) for key in fix["dropped"]):
        others = [step for step in steps or () if step.option != "drop"]
        renames = any(step.option not in LAYOUT for step in others)
        step = edit_command(path, others, suggested_output(path, "fits"), edited) if renames else NextStep()
        lines = _python_lines(checkpoint, report, tuple(others), fewer, more)
        return _ignored(checkpoint, report, fix["dropped"], step, lines)
    sizes = f"{sizes_text(error.mismatched)}. " if error.mismatched else ""
    why = f"{path}: {sizes}{_cause(report, fewer, more)}"
    if not fix["complete"]:
        why += f" {_remaining(report)}"
    if Setting("error").option in fix["command"]:
        error_file = "error.txt" if details["log"] == STDIN else details["log"]
        by_name = command("match", path, error=error_file, apply=True, output=suggested_output(path, "fits"))
        moved = any(step["option"] in REARRANGING for step in fix["steps"])
        why += " Its tensors have to be rearranged" if moved else " The names have to be paired one by one"
        if details["log"] != STDIN:
            return Answer(f"{why}.", by_name)
        return Answer(f"{why}: save the message as error.txt, then '{by_name}'.")
    lines = _python_lines(checkpoint, report, steps or (), fewer, more) if fix["complete"] else ""
    return Answer(why, Line(report["next"] or fix["command"]), lines)


#: What the keys of a file can prove: loaders may rename keys before load_state_dict sees them.
_ANOTHER: Final = "The message is about another file, or the program renames the keys first"
#: Names of factors of an adapter, and the parts that PEFT adds to names when it loads one.
_LORA: Final = regex(r"\.lora_(?:[AB]|embedding_[AB]|magnitude_vector)\b")
_ADAPTER_NAME: Final = regex(r"(?:\.modules_to_save\.[a-z]\w*|(?<=\.lora_[AB])\.default)(?=\.)")
#: Who puts a prefix before every key.
_PREFIXES: Final = {
    "module.": "DataParallel or DistributedDataParallel put 'module.' before every key",
    "_orig_mod.": "torch.compile put '_orig_mod.' before every key",
    "_forward_module.": "Lightning Fabric put '_forward_module.' before every key",
    "base_model.model.": "PEFT put 'base_model.model.' before every key",
}


def _without_fix(path: str, report: MatchReport) -> str:
    share = f"{report['loads']:,} of {pluralize(report['wanted'], 'key')} of the model are in it"
    absent = f" Not in it: {join_limited(report['missing'], most=3)}." if report["loads"] and report["missing"] else ""
    why = f"{path}: {share}.{absent} {causes_text(report)}"
    if report["loads"] or report["wanted"] != report["keys"] or report["causes"]:
        return why
    by_order = command("edit", path, rename_like="names.pth", by_order=True, output=suggested_output(path, "fits"))
    return (
        f"{path}: all {report['keys']:,} keys have other names than the {report['wanted']:,} of the model. If it is the"
        " same model with its layers renamed, the names have to be paired one by one: save those of your model with"
        f" torch.save(model.state_dict(), 'names.pth'), then '{by_order}' pairs them by order and shape."
    )


#: Steps for which Python needs no line: torch.load has an option for the device, and an index takes out an entry.
_IN_LOAD_LINES: Final = frozenset(("extract", "to"))


def _python_lines(checkpoint: Checkpoint, report: MatchReport, steps: Steps, fewer: str, more: str) -> str:
    """Return Python lines that do what the command does, without or with a prefix; "" if it does anything else."""
    place = report["state_dict"]
    load = load_lines(checkpoint.path, place)
    renames = [step for step in steps if step.option not in _IN_LOAD_LINES]
    if not renames:
        return f"{load}\nmodel.load_state_dict(state)" if place else ""
    if any(step.option in LAYOUT | FROM_TARGET | REARRANGING for step in renames):
        return ""
    names = next(specs_of(checkpoint, item) for item in checkpoint.state_dicts if item.path == place)
    after = list(names)
    for step in renames:
        after = list(map(renaming(step, after), after))
    table, unexpected = dict(zip(names, after)), {*report["unexpected"]}
    new, plain = (
        (f"key.removeprefix({fewer!r})", lambda name: name.removeprefix(fewer))
        if fewer
        else (f"{more!r} + key", more.__add__)
    )
    if all(plain(name) == other for name, other in table.items()):
        return f"{load}\nmodel.load_state_dict({{{new}: value for key, value in state.items()}})"
    if all((plain(name) if name in unexpected else name) == other for name, other in table.items()):
        renamed = f"{{key if key in own else {new}: value for key, value in state.items()}}"
        return f"{load}\nown = model.state_dict().keys()\nmodel.load_state_dict({renamed})"
    return ""


def _cause(report: MatchReport, fewer: str, more: str) -> str:
    """Say how the keys in the file differ from the keys of the model."""
    place = report["state_dict"]
    fix = report["fix"]
    loads = fix["loads"] if fix is not None else report["loads"]
    after = f"{loads:,} of {pluralize(report['wanted'], 'key')} load after the command."
    if report["causes"]:
        return f"{'; '.join(cause['message'] for cause in report['causes'])}. {after}"
    if place and not report["placed"]:
        return f"the weights are in its entry {place!r}. {after}"
    if fix is not None and fix["dropped"] and not report["missing"]:
        return f"it has keys that the model does not have, and the command {'; '.join(fix['notes'])}. {after}"
    if fewer and report["loads"]:
        return f"some of its keys begin with {fewer!r}, and the same keys of the model do not. {after}"
    if fewer:
        who = _PREFIXES.get(fewer, f"its keys begin with {fewer!r}")
        return f"{who}, and the keys of the model have no such prefix. {after}"
    if more and report["loads"]:
        return f"it has some keys of the model without the prefix {more!r}. {after}"
    if more:
        return f"the keys of the model begin with {more!r}, and its keys do not. {after}"
    if any(".parametrizations." in f".{key}" for key in report["unexpected"]):
        return f"its keys have the names that weight_norm has since torch 2.0, and the model the former ones. {after}"
    return f"its keys have other names than the keys of the model. {after}"


def _remaining(report: MatchReport) -> str:
    """Say which keys still do not load after the fix."""
    fix = report["fix"]
    assert fix is not None
    parts = [
        f"{kind}: {join_limited(keys, most=3)}"
        for kind, keys in (("still missing", fix["missing"]), ("still unexpected", fix["unexpected"]))
        if keys
    ]
    untrained = " With strict=False the missing keys stay untrained, with initial values." if fix["missing"] else ""
    return sentence("; ".join(parts)) + untrained


def _ignored(checkpoint: Checkpoint, report: MatchReport, keys: Sequence[str], step: NextStep, lines: str) -> Answer:
    """Answer for keys that the model does not have: strict=False ignores them, and no edit needs to remove them.

    ``step`` and ``lines`` give the other keys the names of the model.
    """
    why = (
        f"{checkpoint.path}: {pluralize(len(keys), 'key')} of it have no place in the model:"
        f" {join_limited(list(keys), most=3)}. All keys of the model are there"
        f"{' under other names, which the command changes' if step else ''}. strict=False ignores the others; if they"
        " matter, build the model with the layers that they belong to."
    )
    if not step:
        lines = f"{load_lines(checkpoint.path, report['state_dict'])}\nmodel.load_state_dict(state)"
        held = any("_extra_state" in entry.path for entry in checkpoint.survey.tensors)
        if not held and all(key.endswith("_extra_state") for key in keys):
            step = command("drop", checkpoint.path, "*_extra_state", output=suggested_output(checkpoint.path, "plain"))
    return Answer(why, step, f"{lines.removesuffix(')')}, strict=False)" if lines else "")


def _size_answer(checkpoint: Checkpoint, error: StateDictError, report: MatchReport) -> Answer:
    """Answer for tensors of another size: name the cause, and drop only what is trained again in any case."""
    fix = report["fix"]
    differing = fix["size_mismatches"] if fix is not None else report["size_mismatches"]
    shapes = {item.key: item for item in error.mismatched}
    shown = [shapes[item["key"]] for item in differing if item["key"] in shapes] or list(error.mismatched)
    why = f"{checkpoint.path}: {sizes_text(shown)}. {causes_text(report)}"
    if not report["next"] or not report["advice"]:
        return Answer(why, Line(report["next"]) if report["next"] else "")
    why += f" {sentence(report['advice'])}"
    keys = ", ".join(json.dumps(item["key"]) for item in report["size_mismatches"] or differing)
    lines = f"{load_lines(checkpoint.path, report['state_dict'])}\nfor key in [{keys}]:\n    del state[key]"
    return Answer(why, Line(report["next"]), python=f"{lines}\nmodel.load_state_dict(state, strict=False)")


def causes_text(report: MatchReport) -> str:
    """Return the causes in a match as sentences; its advice if there are none."""
    messages = [cause["message"] for cause in report["causes"]] or [report["advice"]]
    return " ".join(map(sentence, messages))


# -- entries -----------------------------------------------------------------------------------------------------------


def entry_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer for ``KeyError: 'state_dict'``: find where the weights are, and put them under the wanted name."""
    wanted = details["entry"]
    path = checkpoint.path
    keys = [entry.key for entry in checkpoint.survey.entries]
    if wanted in keys:
        return Answer(
            f"{path} has the entry {wanted!r}. The message comes from another file, or the code looks for"
            f" {wanted!r} inside another entry ({join_limited(keys)}).",
            cause="elsewhere",
        )
    if wanted in _LIGHTNING_ENTRIES:
        return _lightning_answer(checkpoint, wanted, keys)
    dicts = [item for item in checkpoint.state_dicts if item.confidence == "high"] or checkpoint.state_dicts
    if any(item.path == "" for item in dicts) and wanted in MODEL_ENTRIES:
        number = pluralize(len(checkpoint.survey.tensors), "tensor")
        why = f"{path} is the state dict itself ({number}). The code expects it in an entry {wanted!r}."
        return Answer(why, _wrapped(checkpoint, wanted), _either_way(path, wanted))
    if wanted not in MODEL_ENTRIES:
        return _other_entry(checkpoint, wanted, keys)
    if not dicts and checkpoint.survey.modules:
        why = f"{path} holds a whole model (a pickled module). The code expects its state dict in an entry {wanted!r}."
        extension = ".pth" if path.endswith(PICKLES) else ""
        return Answer(why, loadable_step(checkpoint, [Setting("wrap", wanted)], extension))
    if not dicts:
        return Answer(f"{path} holds no state dict: {join_limited(keys) or 'nothing'} is all that is in it.")
    chosen = likeliest(dicts, wanted)
    others = [item.path for item in dicts if item is not chosen]
    also = f" ({join_limited(others)} also hold tensors)" if others else ""
    why = f"{path} has no entry {wanted!r}: its weights are in {chosen.path!r}{also}. The code expects {wanted!r}."
    lines = load_lines(path, chosen.path)
    if not _is_mapping(checkpoint):
        return Answer(why, python=lines)
    output = suggested_output(path, "renamed", _torch_suffix(checkpoint))
    return Answer(why, command("edit", path, output=output, settings=_moved(checkpoint, chosen.path, wanted)), lines)


def likeliest(dicts: Sequence[StateDict], wanted: str) -> StateDict:
    """Return the state dict that the code probably means: averaged weights only where it asks for them."""

    def rank(item: StateDict) -> tuple[bool, int, int]:
        averaged = "ema" in item.path.lower()
        known = MODEL_ENTRIES.index(item.path) if item.path in MODEL_ENTRIES else len(MODEL_ENTRIES)
        return averaged != ("ema" in wanted.lower()), known, -len(item.items)

    return min(dicts, key=rank)


def load_lines(path: str, place: str = "") -> str:
    """Return the line of Python that loads a file, or what is at a place in it."""
    steps = parse_path(place) if place else []
    return f'state = torch.load({as_python(path)}, map_location="cpu")' + "".join(f"[{step!r}]" for step in steps)


def _either_way(path: str, wanted: str) -> str:
    return f'{load_lines(path)}\nmodel.load_state_dict(state.get("{wanted}", state))'


def _wrapped(checkpoint: Checkpoint, name: str) -> NextStep:
    output = suggested_output(checkpoint.path, "nested", _torch_suffix(checkpoint))
    return command("wrap", checkpoint.path, name, output=output)


def _torch_suffix(checkpoint: Checkpoint) -> str:
    """Return the suffix for an output that holds entries, which safetensors files do not."""
    return "" if checkpoint.pickled and not isinstance(checkpoint.source, FolderSource) else ".pth"


def _moved(checkpoint: Checkpoint, place: str, wanted: str) -> list[Setting]:
    """Return the settings of ``edit`` that give an entry a name at the top level and keep everything else."""
    own = Setting("merge_entry", f"{checkpoint.path}:{place}={wanted}")
    top = [Setting("drop", escaped(entry.key)) for entry in checkpoint.survey.entries if entry.path == place]
    return [own, *top]


def _is_mapping(checkpoint: Checkpoint) -> bool:
    """Return whether the file holds a mapping, to which entries can be added."""
    return mapping(checkpoint.graph, checkpoint.graph.root) is not None


def _lightning_answer(checkpoint: Checkpoint, wanted: str, keys: Sequence[str]) -> Answer:
    """Answer for a file that Lightning did not save: add the entries that its loader reads."""
    path = checkpoint.path
    if wanted not in LIGHTNING:
        have = "its weights load" if "state_dict" in keys else "it has no 'state_dict' either"
        return Answer(
            f"{path} has no entry {wanted!r}; {have}. Pass the arguments of the model to load_from_checkpoint(...), or"
            " load the state dict into a model that you build.",
        )
    dicts = [item for item in checkpoint.state_dicts if item.confidence == "high"] or checkpoint.state_dicts
    lacking = [name for name in LIGHTNING if name not in keys]
    if dicts and not _is_mapping(checkpoint):
        return Answer(f"{path} holds a list of state dicts, and load_from_checkpoint wants one in 'state_dict'.")
    if not dicts:
        return Answer(f"{path} holds no state dict, and load_from_checkpoint wants one in 'state_dict'.")
    if not lacking:
        return Answer(
            f"{path} has the entries that Lightning reads. The message comes from another file.", cause="elsewhere"
        )
    output = suggested_output(path, "lightning", ".ckpt")
    chosen = likeliest(dicts, "state_dict")
    where = "its weights are at the top level" if not chosen.path else f"its weights are in {chosen.path!r}"
    names = join_limited([repr(name) for name in lacking])
    why = f"{path} was not saved by Lightning: it has no {names}, which load_from_checkpoint reads, and {where}."
    if chosen.path in ("", "state_dict"):
        return Answer(why, command("wrap", path, output=output, for_="lightning"))
    settings = [*_moved(checkpoint, chosen.path, "state_dict"), Setting("for", "lightning")]
    return Answer(why, command("edit", path, output=output, settings=settings))


def _other_entry(checkpoint: Checkpoint, wanted: str, keys: Sequence[str]) -> Answer | None:
    """Answer for an entry other than the weights: a key of the state dict, or a value of the training run."""
    path = checkpoint.path
    names = {str(checkpoint.graph.nodes[key]): item for item in checkpoint.state_dicts for key, _ in item.items}
    if "." in wanted:
        return _key_in_code(checkpoint, wanted, names)
    bare = any(item.path == "" for item in checkpoint.state_dicts)
    listed = "nothing but weights" if bare else join_limited(list(keys))
    if wanted in COUNTERS and not bare and checkpoint.state_dicts and _is_mapping(checkpoint):
        step = command("set", path, f"{wanted}=0", output=suggested_output(path, "new", _torch_suffix(checkpoint)))
        return Answer(f"{path} has no entry {wanted!r}: it holds {listed}. A fresh run starts with 0.", step)
    return Answer(
        f"{path} has no entry {wanted!r}: it holds {listed}. It is not a checkpoint of the same program, or of another"
        " version of it: resume from a file that this program saved, or load the weights alone.",
    )


def _key_in_code(checkpoint: Checkpoint, wanted: str, names: dict[str, StateDict]) -> Answer:
    """Answer for a tensor that the code takes out of the state dict by its name."""
    path = checkpoint.path
    if wanted in names:
        return Answer(
            f"{path} has the key {wanted!r}. The message comes from another file or state dict.",
            cause="elsewhere",
        )
    fewer = next((name.removesuffix(wanted) for name in names if name.endswith("." + wanted)), "")
    if fewer and not all(name.startswith(fewer) for name in names):
        why = f"{path} has {fewer + wanted!r} in place of {wanted!r}, and other keys do not begin with {fewer!r}"
        return Answer(f"{why}: match compares all names with a file that the code loads.")
    if fewer:
        why = f"{path}: its keys begin with {fewer!r}, and the code expects {wanted!r} without it."
        return Answer(why, edit_step("strip-module", path, word="plain", strip_prefix=fewer))
    more = next((wanted.removesuffix(name) for name in names if wanted.endswith("." + name)), "")
    if more and not any(name.startswith(more) for name in names):
        why = f"{path}: its keys lack the prefix {more!r} that the code expects in {wanted!r}."
        return Answer(why, edit_step("add-module", path, word="prefixed", add_prefix=more))
    tied = next((name for name in names if name.endswith(EMBEDDINGS)), "")
    if tied and wanted.endswith(HEADS):
        base = names[tied].path
        own = f"{path}:{spell_key(base, tied)}={spell_key(base, wanted)}"
        output = suggested_output(path, "untied", _torch_suffix(checkpoint))
        step = command("edit", path, output=output, settings=[Setting("merge_entry", own)])
        why = f"{path} has no {wanted!r}: it is tied to {tied!r}. The code needs the tensor under both names."
        return Answer(why, step)
    return Answer(
        f"{path} has no key {wanted!r}. The code expects another model, or another version of it; 'keys' lists the"
        " names.",
        command("keys", path),
    )
