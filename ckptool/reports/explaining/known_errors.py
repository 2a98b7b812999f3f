"""The known errors, which are rows of ``errors.toml``, and how a text is recognised as one of them.

``docs/errors.md`` is generated from the same rows.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from shlex import quote
from typing import Any, Final, TypeAlias

from ...base import addresses
from ...base.addresses import is_remote
from ...base.findings import Effect, codes
from ...base.globs import escaped
from ...base.lazy import regex
from ...base.prefixes import WRAPPERS, unwrapper
from ...base.records import NamedTuple
from ...base.steps import argument, suggested_output
from ...base.text import cut, join_limited
from ...base.toml import parsed
from ...checkpoint.paths import parse_path
from ...edits.matching.causes import size_causes
from ...edits.matching.state_dict_errors import COUNTER, StateDictError, prefix_between, read_error
from ...safety.calls import acts

#: Facts taken from a text, by name: a prefix, a key, a number.
Details: TypeAlias = Mapping[str, str]
_FILE: Final = os.path.join(os.path.dirname(__file__), "errors.toml")
#: The path of the file in a step, or with a word, a suffix or both, an unused name next to it: ``{path:cpu.pth}``.
_PATH: Final = regex(r"\{path(?::(\w*)(\.\w+|/)?)?\}")
#: The name of a file in the folder of the path.
_BESIDE: Final = regex(r"\{beside:([^{}]*)\}")
#: Signs in a traceback, by name: a frame of ``torch.load``, or the line that calls it; a line about a checkpoint.
_PLACES: Final = {
    "loading": r"torch[/\\]serialization\.py|torch\.load|[Uu]npickl|pickle\.load|find_class",
    "file": r"(?i)load|ckpt|checkpoint|state|weight|resume|saved|pretrain",
}
_TRACEBACK: Final = "Traceback (most recent call last)"
#: Colour codes, which torch and notebooks put into messages.
_COLOUR: Final = regex(r"\x1b\[[\d;]*m")
#: Line breaks that a mail, a forum or a narrow terminal added; not those before a traceback frame.
_WRAP: Final = regex(r"(?<![ \t])[ \t]*\r?\n(?!  File \"|Traceback|\r?\n)[ \t]*")
#: The first line of an exception, as Python, pytest and torchrun print it.
_RAISED: Final = regex(r"^(?:E\s+|\[rank\d+\]:\s*)*((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Warning)\b.*)")
#: The longest message that a report repeats, in characters.
_LONGEST: Final = 240


class Topic(NamedTuple):
    """What to look at in a file for a message.

    ``looks_at`` names it. ``codes`` are the findings that confirm the cause. If the file has none of them, ``absent``
    says what to compare. With ``whole``, every byte is read, because no metadata shows the damage. With ``sure``, these
    findings confirm the error's own cause.
    """

    looks_at: str
    codes: frozenset[str]
    absent: str
    whole: bool = False
    sure: bool = True


class Case(NamedTuple):
    """What to answer for a file with these signs.

    ``has`` and ``lacks`` are patterns for the lines of ``signs``, with details filled in: each of ``has`` and none of
    ``lacks`` must match a line. ``unreadable`` is a pattern for the error of a file that cannot be read as a
    checkpoint; other cases do not apply to such a file. ``step`` and ``python`` are written as in ``KnownError``; a
    step that begins with @ is computed (``STEPS``). ``elsewhere`` marks an answer for a file that is not the cause.
    """

    why: str
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    unreadable: str = ""
    step: str = ""
    python: str = ""
    elsewhere: bool = False


class KnownError(NamedTuple):
    """A known error. ``message`` is its text as the library prints it, shortened by "..."; ``name`` is its anchor.

    A text has the message if ``pattern`` matches; without a pattern, its lists of keys tell (``key_error``). With
    ``where``, a traceback counts only if this pattern, or the one of this name in ``_PLACES``, matches in it, or with
    ``last`` in its last frame; a message alone always counts, because the user asks about a checkpoint. The named
    groups of a match are the details, which are filled in where ``why``, ``step`` and ``python`` have a name in
    braces, such as ``{prefix}``.

    ``step`` is a command; ``{path}`` stands for the file, ``{path:cpu}`` for an unused name next to it. ``python`` has
    lines that do the same, for the file ``example``; "" if there are none. ``alike`` are other messages with the same
    cause. The first of the ``cases`` whose signs the file has is the answer; without one, the function ``answer``
    looks at the file itself, and then the findings of ``topic`` count.
    """

    name: str
    message: str
    why: str
    pattern: str = ""
    where: str = ""
    last: bool = False
    step: str = "inspect {path}"
    python: str = ""
    alike: tuple[str, ...] = ()
    example: str = "model.pth"
    topic: Topic = Topic("", frozenset(), "")
    answer: str = ""
    cases: tuple[Case, ...] = ()

    def python_for(self, path: str, details: Details, place: str = "") -> str:
        """Return the Python lines for the state dict at a place in a file; "" if a detail that they need is empty."""
        if any(not value and f"{{{name}}}" in self.python for name, value in details.items()):
            return ""
        lines = self.python.strip().replace(f'"{self.example}"', as_python(path))
        return filled(lines, {**details, "load": load_lines(path, place)})


class Explanation(NamedTuple):
    """A known error found in a text, with the details taken from the text."""

    error: KnownError
    details: Details


# -- the table ---------------------------------------------------------------------------------------------------------


with open(_FILE, "rb") as _file:
    _TABLE: Final[dict[str, Any]] = parsed(_file.read(), _FILE, "the table of errors")
#: Entries under which training scripts keep a model.
MODEL_ENTRIES: Final[tuple[str, ...]] = tuple(_TABLE["model_entries"])
#: Endings of buffers that a model computes itself or that a profiler left. A copy without them loses nothing.
COMPUTED: Final[tuple[str, ...]] = tuple(_TABLE["computed"])


def _errors(table: Mapping[str, Any]) -> Iterator[KnownError]:
    for row in table["error"]:
        fields = {key: _listed(value) for key, value in row.items()}
        fields["pattern"] = fields.get("pattern", "").replace("{model_entries}", "|".join(MODEL_ENTRIES))
        topic = table["topics"][fields.setdefault("topic", "FILE")]
        effects = {getattr(Effect, name) for name in topic.get("effects", ())}
        found = {name for name, code in codes().items() if any(effect in code.effect for effect in effects)}
        fields["topic"] = Topic(
            topic["looks_at"],
            frozenset(found | {*topic["codes"]} | {*fields.pop("codes", ())}),
            fields.pop("absent", topic["absent"]),
            topic.get("whole", False),
            sure="codes" in row or fields["topic"] != "FILE",
        )
        cases = [each for each in table["case"] if row["name"] in each["of"]]
        own = tuple(Case(**{key: _listed(value) for key, value in case.items() if key != "of"}) for case in cases)
        yield KnownError(**fields, cases=own)


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


#: The first error that matches counts.
KNOWN_ERRORS: Final = tuple(_errors(_TABLE))


# -- lists of keys -----------------------------------------------------------------------------------------------------

_GLOBAL: Final = regex(r"(?:Unsupported global: |unsupported )GLOBAL (?P<name>[\w.]+)(?P<blocked> whose module)?")


def acting_global(text: str) -> Details | None:
    """Find a global that acts on the machine, among the globals that weights_only refuses."""
    for match in _GLOBAL.finditer(text):
        name = match["name"].rstrip(".")
        if match["blocked"] or acts(name if "." in name else f"builtins.{name}"):
            return {"name": name}
    return None


@lru_cache(4)  # each row without a pattern asks
def key_error(text: str) -> tuple[str, Details] | None:
    """Return the name of the error of ``load_state_dict`` in a text and its details, or None.

    ``renamed`` is a Python expression that gives a key of the file the model's name, or "".
    """
    error = read_error(text)
    if error is None:
        return None
    missing, unexpected, mismatched = error.missing, error.unexpected, error.mismatched
    if prefix := prefix_between(missing, unexpected):
        wrapper = all(part in WRAPPERS for part in prefix[:-1].split("."))
        name = "module-prefix" if prefix == "module." else "wrapper-prefix" if wrapper else "added-prefix"
        renamed = _if_enough(f'key.removeprefix("{prefix}")', lambda key: key.removeprefix(prefix), error)
        return name, {"prefix": prefix, "renamed": renamed}
    unwrap = unwrapper([*unexpected])
    if missing and {unwrap(key) for key in unexpected} >= {*missing}:
        inner = [f"{name}." for name in WRAPPERS if any(f"{name}." in key for key in unexpected)]
        expression = "key" + "".join(f'.replace("{name}", "")' for name in inner)
        return "wrapper-prefix", {"renamed": _if_enough(expression, unwrap, error)}
    if prefix := prefix_between(unexpected, missing):
        return "missing-prefix", {"prefix": prefix, "renamed": _if_enough(f'"{prefix}" + key', prefix.__add__, error)}
    keys = (*missing, *unexpected)
    if keys and not mismatched and all(key.endswith(COMPUTED) for key in keys):
        return "computed-buffers", {"keys": join_limited(keys, most=3)}
    entry = next((name for name in MODEL_ENTRIES if name in unexpected), "")
    if entry and missing:
        return "nested-state-dict", {"entry": entry}
    if any(item.saved == (0,) != item.wanted for item in mismatched):
        return "empty-weights", {}
    if mismatched and not keys:
        causes = size_causes(mismatched, len(mismatched))
        names = [item.key for item in mismatched]
        lost = any(not cause.replaceable for cause in causes)
        return "size-mismatch", {
            "causes": " ".join(sentence(cause.message) for cause in causes),
            "keys": "\n".join(map(escaped, names)),
            "listed": "" if lost else ", ".join(map(json.dumps, names)),
        }
    if unexpected and missing:
        from ...edits.recipes import family_between  # imported late: it reads all recipes

        if family := family_between(unexpected, missing, error.model):
            return "other-layout", {"family": family}
    return "other-keys", {}


def _if_enough(expression: str, rename: Callable[[str], str], error: StateDictError) -> str:
    # Torch does not call every counter missing, see ``counters_left_out``.
    renamed = {rename(key) for key in error.unexpected if not key.endswith(COUNTER)}
    missing = {key for key in error.missing if not key.endswith(COUNTER)}
    return expression if renamed == missing and not error.mismatched else ""


def sentence(text: str) -> str:
    """Return a message as a sentence; a name or a call at its beginning stays unchanged."""
    first = text.partition(" ")[0]
    return f"{text[:1].upper() if first.isalpha() else text[:1]}{text[1:]}." if text else ""


# -- recognising a text ------------------------------------------------------------------------------------------------


def explanation(text: str) -> Explanation | None:
    """Return the known error in a message or a traceback, or None."""
    plain = without_colours(text)
    wrapped = (_WRAP.sub(between, plain) for between in (" ", ""))
    for each in chain((plain,), wrapped):
        for error in KNOWN_ERRORS:
            if (details := _details(error, each)) is not None:
                return Explanation(error, details)
    return None


def without_colours(text: str) -> str:
    """Return a text without the colour codes of a terminal."""
    return _COLOUR.sub("", text)


def _details(error: KnownError, text: str) -> Details | None:
    if not error.pattern:
        name, found = (
            ("acting-global", acting_global(text)) if error.name == "acting-global" else key_error(text) or ("", {})
        )
        return found if name == error.name else None
    _, *tracebacks = text.split(_TRACEBACK)
    if not error.where or not tracebacks:
        return _searched(error.pattern, text)
    where = _PLACES.get(error.where, error.where)
    for traceback in tracebacks:
        place = traceback.rpartition('  File "')[2] if error.last else traceback
        details = _searched(error.pattern, traceback)
        if details is not None and re.search(where, place):
            return details
    return None


def _searched(pattern: str, text: str) -> Details | None:
    """Return the named groups of the last match: a traceback shows the line of code that makes a message first."""
    matches = [*re.finditer(pattern, text)]
    return {name: value or "" for name, value in matches[-1].groupdict().items()} if matches else None


def message_in(text: str, found: Explanation | None) -> str:
    """Return the message in a text, in one line and shortened: the last exception that has the known error.

    Without an exception, it is the first line that has the known error; for an unknown error, the last exception, or
    else the first line.
    """
    lines = [line.strip() for line in without_colours(text).splitlines() if line.strip()]
    raised = [match[1] for line in lines if (match := _RAISED.match(line))]
    candidates = [*reversed(raised), *lines]
    if found is not None:
        candidates.sort(key=lambda each: _details(found.error, each) is None)  # keeps the order of equal candidates
    return cut(candidates[0], _LONGEST) if candidates else ""


# -- filling in --------------------------------------------------------------------------------------------------------


def filled(text: str, details: Details) -> str:
    """Return a text with names of details replaced by their values; other braces are Python code."""
    for name, value in details.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def named(text: str, path: str, details: Details) -> str:
    """Return a text with the path, names next to it, and the details filled in."""

    def unused(match: re.Match[str]) -> str:
        word, suffix = match[1], match[2] or ""
        if word is None:
            return path
        if suffix == "/":  # a folder
            return suggested_output(f"{os.path.splitext(path)[0]}.{word}")
        output = suggested_output(path, word, suffix)
        return output if output != path else suggested_output(path, "2", suffix)

    text = _BESIDE.sub(lambda match: os.path.join(os.path.dirname(path), match[1]), filled(text, details))
    return _PATH.sub(unused, text)


def command_line(step: str, path: str, details: Details) -> str:
    """Return the command that a step describes, ready to type; ``{keys}`` stands for several arguments."""
    words = []
    for word in shlex.split(step):
        if word == "{keys}":
            words += [quote(key) for key in details["keys"].split("\n")]
        else:
            spell = argument if word.startswith(("{path", "{beside")) else quote
            words.append(spell(named(word, path, details)))
    return " ".join(words if words[0] == "git" else ["ckptool", *words])


def as_python(path: str) -> str:
    """Return a path as a Python string, in double quotes if possible; of an address, the name of the file."""
    path = addresses.name(path) if is_remote(path) else path
    return f'"{path}"' if path.isprintable() and not set(path) & {'"', "\\"} else ascii(path)


def load_lines(path: str, place: str = "") -> str:
    """Return the line of Python that loads a file, or what is at a place in it."""
    steps = parse_path(place) if place else []
    return f'state = torch.load({as_python(path)}, map_location="cpu")' + "".join(f"[{step!r}]" for step in steps)
