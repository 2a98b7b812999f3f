"""Recognise errors in a text: parse the message of ``load_state_dict``, and search for other messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from ...base import addresses
from ...base.findings import CODES, JOINED, NO_INDEX, PROGRAM, Effect
from ...base.lazy import regex
from ...base.patterns import escaped
from ...base.prefixes import WRAPPERS, unwrapper
from ...base.records import NamedTuple
from ...base.steps import AnyStep, Line, NextStep, argument, as_step, command, is_remote, suggested_output
from ...base.text import join_limited
from ...edits.matching.sizes import size_causes
from ...edits.matching.state_dict_errors import COUNTER, StateDictError, prefix_between, read_error
from ...pickles import opcodes
from ...safety.calls import acts

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint


class Topic(NamedTuple):
    """What to look at in a file for a message.

    ``looks_at`` names it. ``codes`` are the findings that confirm the cause. If the file has none of them, ``absent``
    says what was looked for. With ``whole``, every byte is read, because no metadata shows the damage.
    """

    looks_at: str
    codes: frozenset[str]
    absent: str
    whole: bool = False


class Case(NamedTuple):
    """What to answer for a file that has all these signs.

    ``codes``: findings of ``inspect``, at least one. ``formats``: the format is one of these. ``keys``: patterns, each
    for a key or an entry. ``entries``: paths that it has. ``classes``: a pattern for a name in its pickles. ``empty``:
    it has no tensor. ``unreadable``: a pattern for the error of a file that cannot be read as a checkpoint; other cases
    do not apply to it. ``step`` is the command (see ``table.typed``).
    """

    why: str
    codes: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()
    classes: str = ""
    empty: bool = False
    unreadable: str = ""
    step: str = ""
    python: str = ""


class Answer(NamedTuple):
    """The answer for one file: the cause in words, the step, and Python lines.

    ``cause`` is "file" if the file causes the message, "elsewhere" if it has no sign of the cause, and "unknown" for a
    message that is not known.
    """

    why: str
    step: AnyStep = ""
    python: str = ""
    cause: Literal["file", "elsewhere", "unknown"] = "file"


#: The beginning of the answer to a message that is not known.
UNKNOWN: Final = "No explanation is known for this message."
#: The topic of messages about the kind of a file: any error that inspect finds confirms them.
FILE: Final = Topic(
    "what kind of file it is, and whether it is whole",
    frozenset(name for name, code in CODES.items() if Effect.REFUSED_BY_TORCH in code.effect)
    | {"torch-tar", "unpacked", "no-folder", NO_INDEX, "bare-pickle"},
    "Compare the path, the size and the date with the file that the program opens",
)
#: The topic of messages about programs, such as TorchScript.
PROGRAMS: Final = FILE._replace(codes=FILE.codes | {PROGRAM})
#: The topic of messages that no finding explains.
CODE: Final = FILE._replace(codes=frozenset())
#: The topic of messages about a folder where a file is expected.
FOLDER: Final = FILE._replace(codes=FILE.codes | {"in-pieces", JOINED})
DAMAGE: Final = Topic(
    "which parts of it are missing or damaged",
    frozenset(name for name, code in CODES.items() if Effect.LOSES_VALUES in code.effect),
    "Compare the path and the size with the file that the program opens, and load it only after the program that"
    " writes it has finished",
    whole=True,
)
DEVICES: Final = Topic(
    "which devices its tensors are tagged with",
    frozenset(("device", "device-objects", "map-location")),
    "Look for model.cuda() or model.to('cuda') in the code, and compare the path with the file that the program opens",
)
CLASSES: Final = Topic(
    "which classes it needs, and whether plain tensors can replace them",
    frozenset(("weights-only", "module", "dangerous-call")),
    "Compare the path with the file that the program opens, and the version of torch with the one that saved it",
)
KEYS: Final = Topic(
    "which keys it has, and finds the edit that gives them the names of your model",
    frozenset(),
    "Print the keys that your code passes to load_state_dict",
)
#: The topics by the names that the table of errors uses.
TOPICS: Final = {
    "FILE": FILE, "FOLDER": FOLDER, "DAMAGE": DAMAGE, "DEVICES": DEVICES, "CLASSES": CLASSES, "KEYS": KEYS,
    "PROGRAMS": PROGRAMS, "CODE": CODE,
}  # fmt: skip


class KnownError(NamedTuple):
    """A known error. ``message`` is its text as the library prints it, shortened by "..."; ``name`` is its anchor.

    ``find`` returns the details if a text has the message, otherwise None. ``step`` returns the command for a
    checkpoint. ``python`` has lines that do the same, or "" if only another file helps. In ``why`` and ``python``,
    names of details in braces, such as ``{prefix}``, are filled in. ``alike`` are other messages with the same cause,
    for example from other versions. ``example`` is the file name to use if none is given. ``topic`` says what to look
    at in the user's file. The first of the ``cases`` whose signs the file has is the answer; without one ``answer``
    looks at the file itself, and returns None to leave it to the topic.
    """

    name: str
    message: str
    why: str
    find: Finder
    step: Callable[[str, Details], NextStep]
    python: str = ""
    alike: tuple[str, ...] = ()
    example: str = "model.pth"
    topic: Topic = FILE
    answer: Callable[[Checkpoint, str, Details], Answer | None] | None = None
    cases: tuple[Case, ...] = ()

    def why_of(self, details: Details) -> str:
        """Return the cause, with the details filled in."""
        return filled(self.why, details)

    def python_for(self, path: str, details: Details) -> str:
        """Return the Python lines for a file, with the details filled in; "" if a detail that they need is empty."""
        if any(not value and f"{{{name}}}" in self.python for name, value in details.items()):
            return ""
        return filled(self.python.replace(f'"{self.example}"', as_python(path)), details)


def filled(text: str, details: Details) -> str:
    """Return a text with names of details replaced by their values; other braces are Python code."""
    for name, value in details.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def sentence(text: str) -> str:
    """Return a message as a sentence; a name or a call at its beginning stays as it is."""
    first = text.partition(" ")[0]
    return f"{text[:1].upper() if first.isalpha() else text[:1]}{text[1:]}." if text else ""


def as_python(path: str) -> str:
    """Return a path as a Python string, in double quotes if possible; of an address, the name of the file."""
    path = addresses.name(path) if is_remote(path) else path
    return f'"{path}"' if path.isprintable() and not set(path) & {'"', "\\"} else ascii(path)


def edited(name: str, *, word: str, **values: Any) -> Callable[[str, Details], NextStep]:
    """Return a step that is one edit; ``{...}`` in a value stands for a detail."""

    def step(path: str, details: Details) -> NextStep:
        own: dict[str, Any] = {
            key: filled(value, details) if isinstance(value, str) else value for key, value in values.items()
        }
        return command(name, path, output=suggested_output(path, word), **own)

    return step


def shown(name: str, **values: Any) -> Callable[[str, Details], NextStep]:
    """Return a step that is a command which writes nothing."""
    return lambda path, details: command(name, path, **values)


def shell(text: str) -> Callable[[str, Details], NextStep]:
    """Return a step that is another program's command; ``{path}`` stands for the file."""
    return lambda path, details: as_step(Line(text.format(path=argument(path))))


def dropped(path: str, details: Details) -> NextStep:
    """Return the step that drops the keys."""
    keys = tuple(details["keys"].split("\n"))
    return command("drop", path, *keys, output=suggested_output(path, "rest"))


def converted(path: str, details: Details) -> NextStep:
    """Return the step that converts to safetensors."""
    output = suggested_output(path, extension=".safetensors")
    return command("convert", path, output=output if output != path else suggested_output(path, "2"))


#: Endings of buffers that a model computes itself or that a profiler left. A copy without them loses nothing.
COMPUTED: Final = (
    "total_ops", "total_params", "num_batches_tracked", "position_ids", "inv_freq", "masked_bias", "attn.bias",
    "rotary_emb.freqs", "relative_position_index", "attn_mask", "n_averaged", "num_updates", ".decay",
)  # fmt: skip
#: Facts taken from the text: a prefix, a name, a number.
Details: TypeAlias = Mapping[str, str]
#: Returns the details if a text has the error, otherwise None.
Finder: TypeAlias = Callable[[str], Details | None]

#: Entries under which training scripts keep a model.
MODEL_ENTRIES: Final = (
    "state_dict", "model_state_dict", "model", "net", "network", "module", "weights", "params", "params_ema", "ema",
    "generator", "teacher", "student", "model_state", "model_ema", "ema_model", "ema_state_dict", "state_dict_ema",
    "net_state_dict", "model_weights", "weight", "backbone", "encoder", "net_g", "netG", "G_ema", "g_ema", "gen",
)  # fmt: skip
_TRACEBACK: Final = "Traceback (most recent call last)"
#: Signs of ``torch.load`` in a traceback: its frames, or the line that calls it.
_LOADING: Final = r"torch[/\\]serialization\.py|torch\.load|[Uu]npickl|pickle\.load|find_class"


def searched(pattern: str) -> Finder:
    """Return a function that searches for a pattern; its named groups are the details.

    The last match counts: in a traceback, the line of code that makes the message comes before the message.
    """

    def find(text: str) -> Details | None:
        matches = [*re.finditer(pattern, text)]
        return {name: value or "" for name, value in matches[-1].groupdict().items()} if matches else None

    return find


def raised(pattern: str, where: str = _LOADING, *, last: bool = False) -> Finder:
    """Return a function that finds a message which other code raises too.

    A traceback counts only if ``where`` matches in it, or with ``last`` in its last frame. A message alone always
    counts, because the user asks about a checkpoint.
    """
    find = searched(pattern)

    def judged(text: str) -> Details | None:
        alone, *tracebacks = text.split(_TRACEBACK)
        if not tracebacks:
            return find(alone)
        for traceback in tracebacks:
            place = traceback.rpartition('  File "')[2] if last else traceback
            if (details := find(traceback)) is not None and re.search(where, place):
                return details
        return None

    return judged


def either(*finders: Finder) -> Finder:
    """Return a function that finds what one of several functions finds."""

    def find(text: str) -> Details | None:
        return next((details for each in finders if (details := each(text)) is not None), None)

    return find


def of_keys(judge: Callable[[StateDictError], Details | None]) -> Finder:
    """Return a function that applies ``judge`` to the message of ``load_state_dict``."""

    def find(text: str) -> Details | None:
        error = read_error(text)
        return None if error is None else judge(error)

    return find


def module_prefix(error: StateDictError) -> Details | None:
    """Find the prefix "module." in the file's keys."""
    return added_prefix(error) if _prefix(error) == "module." else None


def wrapper_prefix(error: StateDictError) -> Details | None:
    """Find other wrapper names in the file's keys."""
    prefix = _prefix(error)
    if prefix and all(part in WRAPPERS for part in prefix[:-1].split(".")):
        return added_prefix(error)
    unwrap = unwrapper([*error.unexpected])
    if not error.missing or not {unwrap(key) for key in error.unexpected} >= set(error.missing):
        return None
    inner = [f"{name}." for name in WRAPPERS if any(f"{name}." in key for key in error.unexpected)]

    def rename(key: str) -> str:
        for name in inner:
            key = key.replace(name, "")
        return key

    return {"renamed": _if_enough("key" + "".join(f'.replace("{name}", "")' for name in inner), rename, error)}


def added_prefix(error: StateDictError) -> Details | None:
    """Find any other prefix in the file's keys; ``renamed`` is the Python expression that removes it."""
    prefix = _prefix(error)
    renamed = _if_enough(f'key.removeprefix("{prefix}")', lambda key: key.removeprefix(prefix), error)
    return {"prefix": prefix, "renamed": renamed} if prefix else None


def missing_prefix(error: StateDictError) -> Details | None:
    """Find a prefix that keys of the model have and the file's keys lack; ``renamed`` as in ``added_prefix``."""
    prefix = prefix_between(error.unexpected, error.missing)
    return {"prefix": prefix, "renamed": _if_enough(f'"{prefix}" + key', prefix.__add__, error)} if prefix else None


def _if_enough(expression: str, rename: Callable[[str], str], error: StateDictError) -> str:
    """Return the Python expression if it gives all unexpected keys the names of the missing keys, otherwise ""."""
    # Torch does not call every counter missing, see ``counters_left_out``.
    renamed = {name for key in error.unexpected if not key.endswith(COUNTER) for name in (rename(key),)}
    missing = {key for key in error.missing if not key.endswith(COUNTER)}
    return expression if renamed == missing and not error.mismatched else ""


def nested(error: StateDictError) -> Details | None:
    """Find the entry that holds the weights."""
    entry = next((name for name in MODEL_ENTRIES if name in error.unexpected), "")
    return {"entry": entry} if entry and error.missing else None


def mismatched(error: StateDictError) -> Details | None:
    """Find keys with another shape, if nothing else is wrong; ``listed`` has those that are trained again anyway."""
    if not error.mismatched or error.missing or error.unexpected:
        return None
    causes = size_causes(error.mismatched, {item.key: item.saved for item in error.mismatched})
    lost = any(not cause.replaceable for cause in causes)
    keys = [item.key for item in error.mismatched]
    return {
        "causes": " ".join(sentence(cause.message) for cause in causes),
        "keys": "\n".join(map(escaped, keys)),
        "listed": "" if lost else ", ".join(map(json.dumps, keys)),
    }


def computed(error: StateDictError) -> Details | None:
    """Find buffers that the model computes itself, if only these are missing or too many."""
    keys = (*error.missing, *error.unexpected)
    if not keys or error.mismatched or not all(key.endswith(COMPUTED) for key in keys):
        return None
    return {"keys": join_limited(keys, most=3)}


def emptied(error: StateDictError) -> Details | None:
    """Find keys that are empty in the checkpoint but not in the model."""
    return {} if any(item.saved == (0,) != item.wanted for item in error.mismatched) else None


def transferred(text: str) -> Details | None:
    """Find how many tensors ultralytics took, if it did not take all."""
    match = re.search(r"Transferred (\d+)/(\d+) items from", text)
    if match is None or match[1] == match[2]:
        return None
    return {"left": str(int(match[2]) - int(match[1])), "all": match[2]}


def other_layout(error: StateDictError) -> Details | None:
    """Find the family of names of the model, if a built-in recipe leads from the file's keys to the model's."""
    from ...edits.recipes import family_between  # imported late: it reads all recipes

    both = error.unexpected and error.missing
    family = family_between(error.unexpected, error.missing, error.model) if both else ""
    return {"family": family} if family else None


def any_keys(error: StateDictError) -> Details | None:
    """Accept every other message."""
    return {}


def first_byte(byte: str, number: int) -> str:
    """Return the pattern for torch.load's message on a file that begins with this byte, with or without
    weights_only.
    """
    return rf"invalid load key, '(?:{byte})'|Unsupported operand {number}\b"


def _prefix(error: StateDictError) -> str:
    """Return the prefix that the checkpoint's keys have and the model's keys lack, or ""."""
    return prefix_between(error.missing, error.unexpected)


#: Numbers in "Unsupported operand" that are not pickle opcodes.
NOT_OPCODES: Final = rf"(?!(?:{'|'.join(map(str, sorted(opcodes.NAMES)))})\b)\d+"
_GLOBAL: Final = regex(r"(?:Unsupported global: |unsupported )GLOBAL (?P<name>[\w.]+)(?P<blocked> whose module)?")


def acting_global(text: str) -> Details | None:
    """Find a global that acts on the machine, among the globals that weights_only refuses."""
    for match in _GLOBAL.finditer(text):
        name = match["name"].rstrip(".")
        if match["blocked"] or acts(name if "." in name else f"builtins.{name}"):
            return {"name": name}
    return None
