"""Judge text in a file: whether it is understood as data, or a program may evaluate it or act on it.

Understood are JSON whose texts have keys from the table of plain keys, chat templates that call nothing
(``templates``), texts for people and lists of words. All other text is UNKNOWN, however harmless it looks, because only
the program that reads it knows what it means. PROGRAM are the few keys from which loaders run code by themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any, Final

from ..base.findings import PROGRAM
from ..base.lazy import regex
from ..base.records import NamedTuple
from ..base.text import cut, human_bytes, quoted
from .calls import acts
from .rules import UNKNOWN, acting_rules, plain_keys, word_lists
from .templates import is_template, unclear_part

#: Maximum characters, and maximum commas and brackets, of JSON that is parsed: its Python objects take up to 200 bytes
#: each. The largest tokenizers of published models have 35 MB and 1.3 million commas.
_MAX_JSON: Final = 40 << 20
_MAX_VALUES: Final = 2_000_000
#: Maximum depth of JSON within the strings of JSON; deeper nesting is hostile.
_MAX_DEPTH: Final = 4
#: Maximum number of findings listed for one text.
_MAX_FINDINGS: Final = 50


class ActivePart(NamedTuple):
    """A text on which a program may act: ``verdict`` is PROGRAM, or UNKNOWN if that depends on the program.

    ``keys`` are the paths that lead to it, one for each nested text.
    """

    message: str
    verdict: str = PROGRAM
    keys: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The finding as a sentence: 'key "model._target_" (os.system): ...'."""
        colon = "" if self.message.startswith((":", " ")) else ": "
        return f"key {quoted(cut(' > '.join(self.keys), 120))}{colon}{self.message}" if self.keys else self.message


# -- strings -------------------------------------------------------------------------------------------------------

#: Statements of Python, calls of values, functions that run or look up what they are given, tags of YAML, escapes and
#: resolvers: what makes a string more than a value.
_SYNTAX: Final = regex(
    r"""(?:^|[;:$"'\n\r\f])[ \t]*(?:import\s+\w|from\s+[\w.]+\s+import\b|class\s+\w+\s*[:(]|def\s+\w+\s*\()"""
    r"""|[\])}]\(|(?<![\w.-])(?:exec|eval|execfile|getattr|setattr|globals|locals|vars|breakpoint)\b(?!\s*[\w=:,.-])"""
    r"""|(?:^|[\s\[{,:"'-])!{1,2}[\w<%]|%TAG|:=|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[0-7]{3}|\$\{[\w.]+:"""
    r"""|(?<!\w)__\w{1,60}__\s*[\](.]"""
)
_DOTTED: Final = regex(r"(?<![\w.])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?![\w.])")
#: Endings of file and host names, which look like dotted names.
_ENDINGS: Final = regex(
    r"\.(?:json|jsonl|safetensors|txt|md|[ct]sv|onnx|gguf|com|org|net|io|ai|pt|pth|bin|ckpt|pkl|npz|npy|h5|ya?ml|toml"
    r"|jinja|png|jpe?g|model|tar|gz|zip|py|tiktoken|msgpack|parquet|v\d+)\Z"
)
_STARTS: Final = regex(r"\ufeff?\s*[{\[]")


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
    if "." in text and (name := next((match[0] for match in _DOTTED.finditer(text) if _acts(match[0])), "")):
        return name
    acting = _acting_key().search(text) if ":" in text or "=" in text else None
    return acting[1] if acting else ""


def _acts(name: str) -> bool:
    return name.partition(".")[0] in word_lists()["acting_roots"] and acts(name) and not _ENDINGS.search(name)


@cache
def _acting_key() -> re.Pattern[str]:
    keys = "|".join(map(re.escape, sorted(acting_rules())))
    return re.compile(rf"""(?<![\w/])({keys})["']?\s*[:=]""")


# -- keys ----------------------------------------------------------------------------------------------------------

#: Texts that turn a key off.
_NOTHING: Final = ("", "null", "~", "none", "false")
#: The class of a Keras layer, as JSON in any number of strings.
_KERAS_CODE: Final = regex(r"""class_name\\*["']\s*:\s*\\*["']([\w.>]{1,80})\\*["']""")


def keras_parts(text: str) -> Iterator[ActivePart]:
    """Yield the layers that hold code in the configuration of a Keras model, as JSON among other bytes."""
    for name in dict.fromkeys(match[1] for match in _KERAS_CODE.finditer(text)):
        yield from key_findings("class_name", name, {})


def key_findings(key: str, value: Any, others: Mapping[str, Any]) -> Iterator[ActivePart]:
    """Yield the part for a key on which loaders act; ``value`` is plain Python data, beside the keys ``others``."""
    text = "true" if value is True else value if type(value) is str and value.lower() not in _NOTHING else ""
    for rule in acting_rules().get(key, ()):
        fits = rule.value.fullmatch(text) if text else rule.filled and type(value) in (list, dict) and value
        if fits and rule.beside <= others.keys():
            shown = f" ({cut(value, 80)})" if type(value) is str else ""
            yield ActivePart(f"{shown}: {rule.loader}", rule.verdict, keys=(key,))
            return


# -- JSON ----------------------------------------------------------------------------------------------------------


def _parsed(text: str) -> Any:
    """Return the value of a JSON object or list, each object as a list of pairs in a tuple; None for other text."""
    if len(text) > _MAX_JSON or not _STARTS.match(text) or sum(map(text.count, ",[{")) > _MAX_VALUES:
        return None
    try:
        # The values of numbers are never needed, and may have a million digits.
        return json.loads(text.lstrip("\ufeff"), object_pairs_hook=tuple, parse_int=len, parse_float=len, strict=False)
    except (ValueError, RecursionError):
        return None


def _in_json(root: Any, depth: int, *, file: bool) -> Iterator[ActivePart]:
    """Yield the parts of a JSON value. In a ``file``, texts need a plain key."""
    plain, named = plain_keys() if file else (), word_lists()
    work: list[tuple[str, str, Any]] = [("", "", root)]
    unknown: dict[str, None] = {}
    while work:
        path, key, value = work.pop()
        if type(value) is tuple:
            others = dict(value)
            pipeline = file and "_diffusers_version" in others
            for name, inner in reversed(value):
                where = f"{path}.{name}" if path else name
                shown = dict(inner) if type(inner) is tuple else inner
                for part in key_findings(name, shown, others):
                    yield part._replace(keys=(where,))
                if pipeline and _is_component(inner):
                    continue
                free = key in named["maps"] or name.isdigit()
                work.append((where, key if free else name, inner))
        elif type(value) is list:
            work += [(path, key, item) for item in reversed(value)]
        elif type(value) is str:
            if file and key not in plain and key not in named["maps"] and value:
                unknown[path or "a list"] = None
            yield from (
                part._replace(keys=(path, *part.keys) if path else part.keys)
                for part in _in_value(value, key, depth, file=file)
            )
    if unknown:
        count = f" and {len(unknown) - 3:,} more" if len(unknown) > 3 else ""
        listed = ", ".join(quoted(cut(path, 60)) for path in [*unknown][:3])
        yield ActivePart(f"text under {listed}{count}, on which a program may act", UNKNOWN)


def _is_component(value: Any) -> bool:
    pair = type(value) is list and len(value) == 2 and all(item is None or type(item) is str for item in value)
    return pair and (value[0] is None or value[0].partition(".")[0] in word_lists()["pipeline_packages"])


def _in_value(text: str, key: str, depth: int, *, file: bool) -> Iterator[ActivePart]:
    if file and key in word_lists()["free_text"] and not is_template(text):
        return
    if (inner := _parsed(text)) is not None:
        if depth < _MAX_DEPTH:
            yield from _in_json(inner, depth + 1, file=False)
        else:
            yield ActivePart(f"texts within texts more than {_MAX_DEPTH} deep are not followed", UNKNOWN)
    elif part := evaluated_part(text, key):
        what = f"holds {human_bytes(len(text))} of text with {quoted(cut(part, 60))}"
        yield ActivePart(f"{what}; programs that evaluate it run it, torch.load does not", UNKNOWN)
    elif file and key not in word_lists()["module_paths"] and key not in acting_rules() and _is_importable(text):
        yield ActivePart(f" ({cut(text, 80)}): a name that a program may import", UNKNOWN)


def _is_importable(text: str) -> bool:
    """Return whether a text is a dotted name, not of a file, outside of the packages whose names are plain."""
    if not _DOTTED.fullmatch(text) or _ENDINGS.search(text):
        return False
    return not any(text.startswith(f"{package}.") for package in word_lists()["packages"])


def _unique(found: Iterator[ActivePart]) -> list[ActivePart]:
    """Return each finding once, and the first of those that name the same reason; programs first."""
    kept: dict[object, ActivePart] = {}
    for item in islice(found, _MAX_FINDINGS):
        kept.setdefault(item if item.verdict == PROGRAM else item.message.rpartition("): ")[2], item)
    return sorted(kept.values(), key=lambda item: item.verdict != PROGRAM)


def mapping_findings(mapping: Mapping[str, str]) -> list[ActivePart]:
    """Return the findings in named texts, such as ``__metadata__`` of safetensors."""
    return _unique(_in_json(tuple(mapping.items()), 0, file=False))


def string_findings(text: str, key: str) -> list[ActivePart]:
    """Return the findings in a string of a checkpoint, which stands under a ``key`` or "" if there are several."""
    return _unique(_in_value(text, key, 0, file=False))


# -- files ---------------------------------------------------------------------------------------------------------

#: Letters and digits as escapes of JSON (``\u0041``), in which no encoded bytes would be found.
_ESCAPED: Final = regex(r"(?<!\\)(?:\\\\)*\\u00(?:3\d|[46][1-9a-fA-F]|[57][\daA])")
_PROSE: Final = (".md", ".rst", ".html", ".htm", ".svg", ".log", ".gitattributes", ".gitignore")
_TABLES: Final = (".csv", ".tsv", ".txt")
#: The first line of a table: names of at least two columns, which are no statement.
_COLUMNS: Final = regex(r"""\ufeff?["'\w .\-/]+(?:[,;\t]["'\w .\-/]+)+\r?\n""")
#: Files of tokens, two columns in each line.
_TOKENS: Final = (".vocab", ".bpe", ".tiktoken")
_PAIRS: Final = regex(r"(?:#version[^\n]*\n)?(?:[^\s]+[ \t][^\s]+\s*\n)*(?:[^\s]+[ \t][^\s]+)?")
_POINTER: Final = regex(r"version https://git-lfs[^\n]*\n(?:(?:ext|oid|size)[^\n]*\n?)*")
#: Lists of words and tokens, and files that hold one word, such as ``latest``.
_WORDS: Final = regex(r"\ufeff?[\w\-.,'@*<>| \t\r\n]*")
_WORD: Final = regex(r"[\w\-./]{1,200}\s*")


def text_findings(text: str, name: str = "") -> list[ActivePart]:
    """Return the findings in the text of a file; none if it is understood as data. ``name`` is the name of the file."""
    name = name.replace("\\", "/").rpartition("/")[2].lower()
    return _unique(_in_file(text, name))


def _in_file(text: str, name: str) -> Iterator[ActivePart]:
    names, stem = word_lists(), name.removesuffix(".txt")
    known = name.endswith(_PROSE) or stem in names["prose"] or name in names["word_lists"]
    words = _WORDS if name.endswith(_TABLES) and "requirements" not in name else _WORD
    if (value := _parsed(text)) is not None:
        yield from _in_json(value, 0, file=True)
        if _ESCAPED.search(text):
            yield ActivePart("letters and digits of its texts are escaped", UNKNOWN)
    elif name.endswith((".jinja", ".jinja2", ".j2")):
        if part := unclear_part(text):
            yield ActivePart(f"a template with {part}: Jinja without a sandbox may run it", UNKNOWN)
    elif not (
        known
        or _POINTER.fullmatch(text)
        or (name.endswith(_TABLES[:2]) and _COLUMNS.match(text))
        or (name.endswith(_TOKENS) and _PAIRS.fullmatch(text))
        or ((words is _WORDS or "." not in name) and words.fullmatch(text) and not evaluated_part(text))
    ):
        yield ActivePart(f"holds {human_bytes(len(text))} of text, on which a program may act", UNKNOWN)
