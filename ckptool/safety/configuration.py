"""Judge text in a file: whether it is understood as data, or a program may evaluate it or act on it.

Understood are JSON whose texts have keys from the table of plain keys, chat templates that call nothing
(``templates``), texts for people and lists of words. All other text is UNKNOWN, however harmless it looks, because only
the program that reads it knows what it means. PROGRAM are the few keys from which loaders run code by themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final

from ..base.lazy import regex
from ..base.records import NamedTuple
from ..base.text import cut, human_bytes, quoted, words
from .calls import acts
from .outcomes import PROGRAM, UNKNOWN
from .rules import ActingRule, acting_rules, plain_keys, word_lists
from .templates import is_template, unclear_part

#: Maximum characters of JSON that are parsed: Python objects take up to twenty times the memory of the text.
_MAX_JSON: Final = 8 << 20
#: Maximum depth of JSON within the strings of JSON; deeper nesting is hostile.
_MAX_DEPTH: Final = 4
#: Maximum number of findings listed for one text.
_MAX_FINDINGS: Final = 50
#: Maximum number of brackets in a text that are examined for calls.
_MAX_CALLS: Final = 50_000


class ActivePart(NamedTuple):
    """A text on which a program may act: ``verdict`` is PROGRAM, or UNKNOWN if that depends on the program.

    ``keys`` are the paths that lead to it, one for each nested text. ``payload`` has bytes from base64 that a loader
    unpickles; they must be judged separately.
    """

    message: str
    verdict: str = PROGRAM
    payload: bytes = b""
    keys: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The finding as a sentence: 'key "model._target_" (os.system): ...'."""
        colon = "" if self.message.startswith((":", " ")) else ": "
        return f"key {quoted(cut(' > '.join(self.keys), 120))}{colon}{self.message}" if self.keys else self.message


# -- strings -------------------------------------------------------------------------------------------------------

#: Statements of Python, tags of YAML, escapes and resolvers: what makes a string more than a value.
_SYNTAX: Final = regex(
    r"""(?:^|[;:$"'\n\r\f])[ \t]*(?:import\s+\w|from\s+[\w.]+\s+import\b|class\s+\w+\s*[:(]|def\s+\w+\s*\()"""
    r"""|(?:^|[\s\[{,:"'-])!{1,2}[\w<%]|%TAG|:=|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[0-7]{3}|\$\{[\w.]+:"""
    r"""|(?<!\w)__\w{1,60}__\s*[\](.]"""
)
#: The text before an opening bracket that makes it a call, behind another word in prose.
_CALLEE: Final = regex(r"""(?:(\w+)[ \t]+)?([\w.]+|[\])}"'`])((?:\s|\\\n)*)\Z""")
#: Words in brackets, and all that could make a call of them: strings, and functions that act.
_ASIDE: Final = regex(r"\([\w\s.,%/+-]*\w[\w\s.,%/+-]*\)")
_LITERAL: Final = regex(
    r"""(?<![\w])[bBrRuUfF]{0,2}["']|\\|\b(?:exec|eval|compile|open|input|getattr|globals|locals|vars|breakpoint)\b"""
)
_KEYWORDS: Final = words("""
    and as assert await class def del elif else except for if in is lambda not or print raise return while with yield
""")
_DOTTED: Final = regex(r"(?<![\w.])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?![\w.])")
#: Endings of file and host names, which look like dotted names.
_ENDINGS: Final = regex(
    r"\.(?:json|jsonl|safetensors|txt|md|[ct]sv|onnx|gguf|com|org|net|io|ai|pt|pth|bin|ckpt|pkl|npz|npy|h5|ya?ml|toml"
    r"|jinja|png|jpe?g|model|tar|gz|zip|py|tiktoken|msgpack|parquet|v\d+)\Z"
)
_STARTS: Final = regex(r"\ufeff?\s*[{\[]")
#: The first characters, in base64, of a pickle with protocol 2 to 5 and of a zip archive.
_BASE64: Final = regex(r"gA[I-X]|UEsDB")


def evaluated_part(text: str, key: str = "") -> str:
    """Return the first part of a string on which a program may act: a call, a statement, a tag, a name that acts, a
    template, or "". The text under the ``key`` of a template is always read as a template.
    """
    if is_template(text):
        part = unclear_part(text)
        if part or (key.endswith("template") and text[:1] != "$"):
            return f"a template with {part}" if part else ""
    if match := _SYNTAX.search(text):
        return match[0].strip()
    if "(" in text and (call := _call(text)):
        return call
    if "." in text and (name := next((match[0] for match in _DOTTED.finditer(text) if _acts(match[0])), "")):
        return name
    acting = _acting_key().search(text) if ":" in text or "=" in text else None
    return acting[1] if acting else ""


def _acts(name: str) -> bool:
    return name.partition(".")[0] in word_lists()["acting_roots"] and acts(name) and not _ENDINGS.search(name)


def _call(text: str) -> str:
    """Return the first call in a text, except of functions that make plain values, or ""."""
    plain, literal = word_lists()["data_calls"], _LITERAL.search(text)
    made = False
    for number, match in enumerate(re.finditer(r"\(", text)):
        if number == _MAX_CALLS:
            return "more brackets than are followed"
        at = match.start()
        before = text[max(at - 200, 0) : at]
        gap = before[len(before.rstrip()) :]
        if len(gap) == 200 or ("\n" in gap and "#" in text):
            return "a bracket behind spaces or a comment"
        callee = _CALLEE.search(before)
        if callee is None:
            continue
        if callee[2] in plain:
            made = True
        elif callee[2] not in _KEYWORDS and not callee[2][0].isdigit():
            prose = callee[1] and callee[1] not in _KEYWORDS and callee[3] and "\n" not in callee[3]
            if not prose and (literal or not _ASIDE.match(text, at)):
                return f"{cut(callee[2], 60)}(...)"
    return "another meaning of a plain name" if made and _renamed().search(text) else ""


def _alternatives(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(names)))


@cache
def _renamed() -> re.Pattern[str]:
    """Return a pattern of code that gives another meaning to a function that makes plain values."""
    names = _alternatives(word_lists()["data_calls"])
    targets = rf"\bas\s+(?:{names})\b|\b(?:{names})\b[\w\s,)]{{0,40}}\bin\b|\blambda\b"
    return re.compile(rf"(?:^|[\n;])[ \t]*(?:{names})[ \t]*=(?!=)|{targets}")


@cache
def _acting_key() -> re.Pattern[str]:
    return re.compile(rf"""(?<![\w/])({_alternatives(acting_rules())})["']?\s*[:=]""")


# -- keys ----------------------------------------------------------------------------------------------------------

#: Keras layers that hold code: a function as marshalled bytecode or source, or a torch pickle.
_KERAS_CODE: Final = ("Lambda", "TFOpLambda", "SlicingOpLambda", "__lambda__", "TorchModuleWrapper")
_KERAS_TEXT: Final = regex(rf"""class_name\\*["']\s*:\s*\\*["'](?:[\w.]*[.>])?({"|".join(_KERAS_CODE)})\\*["']""")


def keras_parts(text: str) -> Iterator[ActivePart]:
    """Yield the layers that hold code in the configuration of a Keras model, as JSON among other bytes."""
    for name in dict.fromkeys(match[1] for match in _KERAS_TEXT.finditer(text)):
        yield ActivePart(f' "class_name" ({name}): keras runs code that is in the model')


def _applies(rule: ActingRule, value: Any, others: Mapping[str, Any]) -> bool:
    """Return whether a rule applies to a value; ``others`` are the other keys of its object."""
    text = value if type(value) is str and value.lower() not in ("", "null", "~", "none", "false") else ""
    if rule.when == "given":
        numbers = type(value) is list and all(type(item) in (int, float) for item in value)
        return bool(text) or value is True or (type(value) in (list, dict) and bool(value) and not numbers)
    if rule.when == "true":
        return value is True or text.lower() in ("true", "yes", "on", "1")
    if rule.when == "callable":
        return _DOTTED.fullmatch(text) is not None and not _ENDINGS.search(text.lower())
    if rule.when == "outside":
        return bool(text) and not any(f"{text}.".startswith(f"{module}.") for module in rule.known)
    if rule.when == "kernel":
        return "/" in text and not text.startswith("kernels-community/")
    if rule.when == "keras code":
        return re.split(r"[.>]", text)[-1] in _KERAS_CODE
    return bool(text) and (rule.when != "keras object" or {"module", "config"} <= others.keys())


def key_findings(key: str, value: Any, others: Mapping[str, Any]) -> Iterator[ActivePart]:
    """Yield the part for a key on which loaders act; ``value`` is plain Python data."""
    for rule in acting_rules().get(key, ()):
        if _applies(rule, value, others):
            shown = f" ({cut(value, 80)})" if type(value) is str else ""
            yield ActivePart(f"{shown}: {rule.loader}", rule.verdict, keys=(key,))
            return


def _payload(text: str, key: str) -> bytes:
    """Return the bytes of a pickle or archive in base64, or b"" for other text."""
    if key == ":serialized:" or (len(text) > 8 and _BASE64.match(text.lstrip()[:5])):
        import base64  # imported only for pickles in text

        try:
            return base64.b64decode(text.encode("ascii", "ignore"))
        except ValueError:
            return b""
    return b""


# -- JSON ----------------------------------------------------------------------------------------------------------


def _parsed(text: str) -> Any:
    """Return the value of a JSON object or list, each object as a list of pairs in a tuple; None for other text."""
    if len(text) > _MAX_JSON or not _STARTS.match(text):
        return None
    try:
        return json.loads(
            text.lstrip("\ufeff"), object_pairs_hook=tuple, parse_int=_number, parse_float=_number, strict=False
        )
    except (ValueError, RecursionError):
        return None


def _number(_: str) -> int:
    return 0  # its value is never needed, and may have a million digits


def _pairs_of(value: Any) -> dict[str, Any]:
    return dict(value) if type(value) is tuple else {}


def _in_json(root: Any, depth: int, *, file: bool) -> Iterator[ActivePart]:
    """Yield the parts of a JSON value. In a ``file``, texts need a plain key."""
    plain, named = plain_keys() if file else (), word_lists()
    work: list[tuple[str, str, Any]] = [("", "", root)]
    unknown: dict[str, None] = {}
    while work:
        path, key, value = work.pop()
        if type(value) is tuple:
            others = _pairs_of(value)
            pipeline = file and "_diffusers_version" in others
            for name, inner in reversed(value):
                where = f"{path}.{name}" if path else name
                shown = _pairs_of(inner) if type(inner) is tuple else inner
                for part in key_findings(name, shown, others):
                    yield part._replace(keys=(where,))
                if pipeline and _is_component(inner):
                    continue
                free = key in named["maps"] or name.isdigit()
                work.append((where, key if free else name, inner))
        elif type(value) is list:
            work += [(f"{path}[{number}]", key, item) for number, item in reversed([*enumerate(value)])]
        elif type(value) is str:
            if file and key not in plain and key not in named["maps"] and value:
                unknown[path.partition("[")[0] or "a list"] = None
            yield from (
                part._replace(keys=(path, *part.keys) if path else part.keys)
                for part in _in_value(value, key, depth, file=file)
            )
    if unknown:
        count = f" and {len(unknown) - 3:,} more" if len(unknown) > 3 else ""
        listed = ", ".join(quoted(cut(path, 60)) for path in [*unknown][:3])
        yield ActivePart(f"text under {listed}{count}, on which a program may act", UNKNOWN)


def _is_component(value: Any) -> bool:
    """Return whether a value is a component of a diffusers pipeline, from a library that diffusers uses."""
    pair = type(value) is list and len(value) == 2 and all(item is None or type(item) is str for item in value)
    return pair and (value[0] is None or value[0].partition(".")[0] in word_lists()["pipeline_packages"])


def _in_value(text: str, key: str, depth: int, *, file: bool) -> Iterator[ActivePart]:
    if data := _payload(text, key):
        yield ActivePart("base64 of a pickle", UNKNOWN, data)
        return
    if file and key in word_lists()["free_text"] and not is_template(text):
        return
    if (inner := _parsed(text)) is not None:
        yield from _deeper(inner, depth)
    elif part := evaluated_part(text, key):
        yield ActivePart(_described(text, part), UNKNOWN)
    elif file and key not in word_lists()["module_paths"] and key not in acting_rules() and _is_importable(text):
        yield ActivePart(f" ({cut(text, 80)}): a name that a program may import", UNKNOWN)


def _is_importable(text: str) -> bool:
    """Return whether a text is a dotted name, not of a file, outside of the packages whose names are plain."""
    if not _DOTTED.fullmatch(text) or _ENDINGS.search(text):
        return False
    return not any(text.startswith(f"{package}.") for package in word_lists()["packages"])


def _deeper(value: Any, depth: int) -> Iterator[ActivePart]:
    if depth < _MAX_DEPTH:
        yield from _in_json(value, depth + 1, file=False)
    else:
        yield ActivePart(f"texts within texts more than {_MAX_DEPTH} deep are not followed", UNKNOWN)


def _described(text: str, part: str) -> str:
    size = human_bytes(len(text))
    return f"holds {size} of text with {quoted(cut(part, 60))}; programs that evaluate it run it, torch.load does not"


def _unique(found: Iterator[ActivePart]) -> list[ActivePart]:
    """Return each finding once, and the first of those that name the same reason; programs first."""
    kept: dict[object, ActivePart] = {}
    for item in found:
        if item.payload or len(kept) < _MAX_FINDINGS:  # payloads are never omitted
            whole = item.payload or item.verdict == PROGRAM
            kept.setdefault(item if whole else item.message.rpartition("): ")[2], item)
    return sorted(kept.values(), key=lambda item: item.verdict != PROGRAM)


def mapping_findings(mapping: Mapping[str, str]) -> list[ActivePart]:
    """Return the findings in named texts, such as ``__metadata__`` of safetensors."""
    return _unique(_in_json(tuple(mapping.items()), 0, file=False))


def string_findings(text: str, key: str) -> list[ActivePart]:
    """Return the findings in a string of a checkpoint, which stands under a ``key`` or "" if there are several."""
    return _unique(_in_value(text, key, 0, file=False))


def holds_settings(text: str) -> bool:
    """Return whether a string has several lines that give values to keys."""
    return "\n" in text.strip() and not _STARTS.match(text) and _SETTING.search(text) is not None


# -- files ---------------------------------------------------------------------------------------------------------

_PROSE: Final = (".md", ".rst", ".html", ".htm", ".svg", ".log", ".gitattributes", ".gitignore")
_TABLES: Final = (".csv", ".tsv", ".txt", ".vocab", ".bpe", ".tiktoken")
#: The first line of a table: names of at least two columns, which are no statement.
_COLUMNS: Final = regex(r"""\ufeff?["'\w .\-/]+(?:[,;\t]["'\w .\-/]+)+\r?\n""")
_FRONT: Final = regex(r"\ufeff?\s*---[ \t]*\r?\n([\s\S]*?)\n(?:---|\.\.\.)")
#: A line that gives a value to a key, as in YAML, TOML and INI files.
_SETTING: Final = regex(
    r"""(?m)^[ \t]*(?:-[ \t]+)?["']?[\w.\-/][\w.\-/ ]{0,80}["']?[ \t]{0,9}[:=]|^[ \t]*\[[\w. ]+\][ \t]*$"""
)
_POINTER: Final = regex(r"version https://git-lfs[^\n]*\n(?:(?:ext|oid|size)[^\n]*\n?)*")
_WORD: Final = regex(r"[\w\-./ ]{1,200}\s*")
#: A string, with the colon after a key; the characters between strings in JSON.
_STRING: Final = regex(r'"((?:[^"\\]|\\.)*)"(?:\s*:\s*(["\[{tfn])?)?')
_BETWEEN: Final = regex(r"(?:[\s\d{}\[\],:.eE+-]|true|false|null)*")


def text_findings(text: str, name: str = "") -> list[ActivePart]:
    """Return the findings in the text of a file; none if it is understood as data. ``name`` is the name of the file."""
    name = name.replace("\\", "/").rpartition("/")[2].lower()
    return _unique(_in_file(text, name))


def _in_file(text: str, name: str) -> Iterator[ActivePart]:
    stem = name.partition(".")[0] or name[1:]
    names = word_lists()
    if len(text) > _MAX_JSON and _STARTS.match(text):
        if not _is_vocabulary(text):
            yield ActivePart(f"holds {human_bytes(len(text))} of JSON with keys on which a program may act", UNKNOWN)
    elif (value := _parsed(text)) is not None:
        yield from _in_json(value, 0, file=True)
    elif name.endswith((".jinja", ".jinja2", ".j2")):
        if part := unclear_part(text):
            yield ActivePart(f"a template with {part}: Jinja without a sandbox may run it", UNKNOWN)
    elif stem in names["prose"] or name.endswith(_PROSE):
        front = _FRONT.match(text)
        if front and (part := evaluated_part(front[1])):
            yield ActivePart(f"front matter with {quoted(cut(part, 60))}", UNKNOWN)
    elif (
        name in names["word_lists"] or _POINTER.fullmatch(text) or (name.endswith(_TABLES[:2]) and _COLUMNS.match(text))
    ):
        return
    elif _SETTING.search(text) or is_template(text) or not (name.endswith(_TABLES) or _WORD.fullmatch(text)):
        yield ActivePart(f"holds {human_bytes(len(text))} of text, on which a program may act", UNKNOWN)
    elif part := evaluated_part(text):
        yield ActivePart(_described(text, part), UNKNOWN)


def _is_vocabulary(text: str) -> bool:
    """Return whether the keys of long JSON, except those of numbers, are plain."""
    plain, end = plain_keys(), 0
    for match in _STRING.finditer(text):
        if match[2] and match[1] not in plain and not match[1].isdigit():
            return False
        if not _BETWEEN.fullmatch(text, end, match.start()):
            return False
        end = match.end() - bool(match[2])
    return _BETWEEN.fullmatch(text, end) is not None
