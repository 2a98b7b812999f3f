"""Read structured text as its loaders do: keys, values and YAML tags, with every escape decoded.

``read_json`` follows JSON exactly. ``loose_items`` and ``tags`` read any other text: YAML, TOML, JSON with comments.
They never miss a key or tag that a loader finds, but may report one inside a string or comment. Following each loader's
quoting rules exactly would give an attacker ways to hide a key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, Generic, TypeVar

from ..base.lazy import regex
from ..base.records import NamedTuple

#: Maximum characters that ``read_json`` accepts: Python objects take up to twenty times the memory of the text.
MAX_JSON: Final = 8 << 20
#: Maximum number of keys followed in one text; more would take seconds.
_MAX_ITEMS: Final = 50_000
#: Maximum number of ``%TAG`` lines followed in one text; YAML files have one or two.
_MAX_HANDLES: Final = 64

#: Maximum number of an object's values kept for the key that holds it.
_TEXTS: Final = 100

_T = TypeVar("_T")


class Unseen:
    """The value of a key that ``loose_items`` does not read, because it is on other lines or elsewhere."""


UNSEEN: Final = Unseen()


class Number:
    """A number in JSON. Its value is never needed, and may have a million digits."""


NUMBER: Final = Number()


class Nested(NamedTuple, Generic[_T]):
    """A JSON object that was read: whether it is empty, the findings in it with their paths, and its first texts."""

    empty: bool
    found: list[tuple[str, _T]]
    texts: list[str]


# -- JSON ----------------------------------------------------------------------------------------------------------


def read_json(text: str, visit: Callable[[str, Any, Mapping[str, Any]], list[_T]]) -> list[tuple[str, _T]] | None:
    """Return the results of ``visit`` in a JSON text, with paths such as ``model.layers[0]``; None for other text.

    ``visit`` gets each key of an object, its value, and the other keys of the object. For a value in a list the key is
    "". Strings are decoded, numbers are NUMBER, objects are Nested. A duplicate key is visited twice, because loaders
    differ in which value they use. Objects are released as they are read. None is also returned for text that is too
    long or deep.
    """
    if len(text) > MAX_JSON:
        return None

    def visited(pairs: list[tuple[str, Any]]) -> Nested[_T]:
        found: list[tuple[str, _T]] = []
        siblings = dict(pairs)
        for key, value in pairs:
            found += [(key, item) for item in visit(key, value, siblings)]
            found += _inner(key, value, visit)
        return Nested(not pairs, found, [value for _, value in pairs[:_TEXTS] if type(value) is str])

    def number(_: str) -> Number:
        return NUMBER

    try:
        root = json.loads(
            text.lstrip("\ufeff"), object_pairs_hook=visited, parse_int=number, parse_float=number, strict=False
        )
    except (ValueError, RecursionError):
        return None
    found: list[tuple[str, _T]] = [("", item) for item in visit("", root, {})] if isinstance(root, str) else []
    return [*found, *_inner("", root, visit)]


def _inner(path: str, value: Any, visit: Callable[[str, Any, Mapping[str, Any]], list[_T]]) -> Iterator[tuple[str, _T]]:
    """Yield the findings in a value, and the results of ``visit`` for strings in its lists."""
    work = [(path, value)]
    while work:
        where, part = work.pop()
        if isinstance(part, Nested):
            yield from ((f"{where}.{inner}" if where else inner, item) for inner, item in part.found)
        elif type(part) is list:
            if part is not value or type(value) is list:
                strings = ((number, item) for number, item in enumerate(part) if type(item) is str)
                yield from ((f"{where}[{number}]", found) for number, item in strings for found in visit("", item, {}))
            inner = [(number, item) for number, item in enumerate(part) if type(item) in (list, Nested)]
            work += [(f"{where}[{number}]", item) for number, item in reversed(inner)]


# -- any other text ------------------------------------------------------------------------------------------------

_ESCAPE: Final = regex(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8})|\r?\n[ \t]*|([\s\S]))")
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "f": "\f", "b": "\b", "_": "\xa0", "N": "\x85"}


def unescaped(text: str) -> list[str]:
    """Return a text with the escapes of JSON, YAML and TOML decoded, wherever they occur.

    If a line ends with a backslash, return two texts, because only quoted text continues on the next line.
    """
    if "\\" not in text:
        return [text]
    plain = _ESCAPE.sub(_unescape, text)
    return [plain, text] if "\\\n" in text or "\\\r" in text else [plain]


def _unescape(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code:
        value = int(code, 16)
        return chr(value) if value < 0x110000 else "\ufffd"
    character = match[4]
    if character is None:
        return ""  # the line continues on the next one
    return _ESCAPES.get(character, character if not character.isalnum() else match[0])


#: The text that may stand between a key and its value: a closing quote, spaces, a comment.
_SEPARATOR: Final = regex(r"""(["']?)\s*(#[^\n]{0,1000}\n\s*)?(:(?!:)|=(?!=)>?|#)[ \t\x85\u2028\u2029]*""")
_VALUE: Final = regex(
    r"""(?:[!&][^\s,{}\[\]]{0,200}[ \t\x85\u2028\u2029]{1,9}){0,3}"""
    r"""(?:"([^"\n]{0,500})"|'([^'\n]{0,500})'|(\{\s{0,99}\}|\[\s{0,99}\]|[^\n\r,}\]]{0,500}))"""
)
_NEXT: Final = regex(
    r"""\s{0,200}(?:[!&][^\s,{}\[\]]{0,200}\s{1,200}){0,3}(?:[|>][-+0-9]{0,3}[ \t]{0,9}\n\s{0,200})?"""
    r"""(?:"([^"\n]{1,500})"|'([^'\n]{1,500})'|([^\n\r,}\]#]{1,500}))"""
)
_ANCHOR: Final = regex(r"&([^\s,\[\]{}]+)\s+")
_NOTHING: Final = frozenset(("", "~", "null", "none", "false"))
#: What follows the beginning of a longer value or key on its line.
_GOES_ON: Final = regex(r"(?:[}\]]*|[ \t]+)[^\s,}\]#]")
_COMMENT: Final = regex(r"(?:^|\s)#.*")
#: A key that another place refers to, with an anchor or tag before it.
_NAMED: Final = regex(r"""[&!][^\s,\[\]{}]*\s+["']?\Z""")


class LooseItem(NamedTuple):
    """A key in a text, its value or UNSEEN, and the offset of the key.

    ``separator`` is ":" or "="; ``quoted`` says whether the value is in quotes, ``first`` whether the key is the first
    on its line.
    """

    key: str
    value: str | Unseen
    offset: int
    separator: str
    quoted: bool
    first: bool


def loose_items(text: str, keys: Collection[str]) -> Iterator[LooseItem | None]:
    """Yield every place in a text where one of ``keys`` may be a key; None if there are too many to follow."""
    left = _MAX_ITEMS
    anchors = _Anchors(text)
    for key in keys:
        at = text.find(key)
        while at >= 0:
            left -= 1
            if left < 0:
                yield None
                return
            item = _item_at(text, key, at, anchors)
            if item is not None:
                yield item
            at = text.find(key, at + len(key))


def _item_at(text: str, key: str, at: int, anchors: _Anchors) -> LooseItem | None:
    end = at + len(key)
    before, after = text[at - 1 : at], text[end : end + 1]
    if (_is_word(before) and _is_word(key[0])) or (_is_word(after) and _is_word(key[-1])):
        return None
    line = text[max(at - 200, 0) : at].rpartition("\n")[2]
    first = not line.strip(" \t\r-?\"'{[(,")
    match = _SEPARATOR.match(text, end)
    if match is None:
        named = _NAMED.search(text[max(at - 200, 0) : at]) is not None
        return LooseItem(key, UNSEEN, at, ":", False, first) if named else None
    if match[3] == "#":  # a comment that is too long to skip
        return LooseItem(key, UNSEEN, at, ":", False, first)
    value = _VALUE.match(text, match.end())
    assert value is not None  # the pattern also matches empty text
    if value[1] is not None or value[2] is not None:
        quoted = value[1] if value[1] is not None else value[2]
        return LooseItem(key, _seen(quoted, text, value.end()), at, match[3][0], True, first)
    plain = _COMMENT.sub("", value[3]).strip()
    if not plain or plain[0] in "&*|>!":
        elsewhere = _elsewhere(text, plain, match.end() + len(value[0]), anchors)
        return LooseItem(key, elsewhere, at, match[3][0], False, first)
    return LooseItem(key, plain, at, match[3][0], False, first)


class _Anchors:
    """The anchors of a YAML text, ``&name``, found once when one is needed."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.ends: dict[str, int] | None = None

    def end(self, name: str) -> int:
        """Return the offset after an anchor and the spaces behind it; -1 if it is missing or ambiguous."""
        if self.ends is None:
            self.ends = {}
            for match in _ANCHOR.finditer(self.text):
                self.ends[match[1]] = -1 if match[1] in self.ends else match.end()
        return self.ends.get(name, -1)


def _elsewhere(text: str, plain: str, end: int, anchors: _Anchors) -> str | Unseen:
    """Return the first line of a value that is on the next line or at an anchor, or UNSEEN."""
    if plain[:1] == "*":
        end = anchors.end(plain[1:])
        if end < 0:
            return UNSEEN
    line = _NEXT.match(text, end)
    if line is None:
        return UNSEEN
    found = _seen(line[1] or line[2] or line[3], text, line.end())
    if isinstance(found, Unseen) or not found.strip() or found.strip()[0] in "&*|>!":
        return UNSEEN
    return found.strip()


def _seen(value: str, text: str, end: int) -> str | Unseen:
    """Return a value; UNSEEN if it looks like nothing, but is the beginning of something else, such as a key."""
    return UNSEEN if value.strip().lower() in _NOTHING and _GOES_ON.match(text, end) else value


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


# -- tags of YAML --------------------------------------------------------------------------------------------------

_CORE: Final = "tag:yaml.org,2002:"
_DIRECTIVE: Final = regex(r"(?:^|[\n\r\x85\u2028\u2029]|\ufeff)%TAG[ \t]+(!\S*)[ \t]+(\S+)")
_RUN: Final = regex(r"!\S+")


def tags(text: str) -> Iterator[str | None]:
    """Yield each tag in a YAML text as a loader resolves it, ``tag:yaml.org,2002:python/tuple``; None if there are too
    many.

    ``%`` escapes are decoded, and handles named by ``%TAG`` are replaced in every possible way. A local tag begins with
    "!". A tag ends at a space, so more text may follow it.
    """
    found = _DIRECTIVE.finditer(text) if "%TAG" in text else iter(())
    handles = {(match[1], _percent(match[2])) for match in found}
    known = (("!!", _CORE), ("!<", ""), *sorted(handles)[:_MAX_HANDLES], ("!", "!"))
    left = _MAX_ITEMS if len(handles) <= _MAX_HANDLES else 0
    for run in _RUN.finditer(text):
        word = _percent(run[0])
        for handle, prefix in known:
            at = word.find(handle)
            while at >= 0:
                left -= 1
                if left < 0:
                    yield None
                    return
                yield prefix + word[at + len(handle) : at + len(handle) + 256]
                at = word.find(handle, at + len(handle))


def _percent(text: str) -> str:
    return re.sub("%([0-9a-fA-F]{2})", lambda match: chr(int(match[1], 16)), text) if "%" in text else text
