"""Structured text as its loaders read it: keys, values and YAML tags, after every escape is decoded.

``read_json`` follows JSON exactly. ``loose_items`` and ``tags`` read any other text: YAML, TOML, JSON with comments.
They never miss a key or a tag that a loader finds, and may report one that only stands in a string or a comment: to
follow all rules of quotes as each loader does is what an attacker hopes for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

#: Characters of a text that ``read_json`` takes: objects of Python take up to twenty times the memory of the text.
MAX_JSON: Final = 8 << 20
#: Keys that are followed in one text: more take seconds.
_MAX_ITEMS: Final = 50_000
#: ``%TAG`` lines that are followed in one text; YAML files have one or two.
_MAX_HANDLES: Final = 64

#: Values of an object that are kept for the key that holds it.
_TEXTS: Final = 100

_T = TypeVar("_T")


class Unseen:
    """The value of a key that ``loose_items`` does not read: it follows in other lines, or elsewhere."""


UNSEEN: Final = Unseen()


class Number:
    """A number in JSON: its value is never needed, and may have a million digits."""


NUMBER: Final = Number()


class Nested(NamedTuple, Generic[_T]):
    """An object of JSON that was read: whether it is empty, what was found in it, with paths, and its first texts."""

    empty: bool
    found: list[tuple[str, _T]]
    texts: list[str]


# -- JSON ----------------------------------------------------------------------------------------------------------


def read_json(text: str, visit: Callable[[str, Any, Mapping[str, Any]], list[_T]]) -> list[tuple[str, _T]] | None:
    """Return what ``visit`` finds in a JSON text, with its paths such as ``model.layers[0]``; None for other text.

    ``visit`` gets each key of an object, its value, and the other keys of the object. The key is "" for a value in a
    list. Strings are decoded, numbers are NUMBER, objects are Nested. A key that comes twice is visited twice: loaders
    differ in which they take. Objects are released as they are read. Also None for text that is too long or too deep.
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
    """Yield what was found in a value, and what ``visit`` finds in the strings of lists in it."""
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

_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8})|\r?\n[ \t]*|([\s\S]))")
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "f": "\f", "b": "\b", "_": "\xa0", "N": "\x85"}


def unescaped(text: str) -> list[str]:
    """Return a text with the escapes of JSON, YAML and TOML decoded, wherever they stand.

    Two texts where a line ends with a backslash: only within quotes does it go on in the next line.
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
        return ""  # the line goes on in the next one
    return _ESCAPES.get(character, character if not character.isalnum() else match[0])


#: What may stand between a key and its value: the end of its quotes, blanks, a comment.
_SEPARATOR: Final = re.compile(r"""(["']?)\s*(#[^\n]{0,1000}\n\s*)?(:(?!:)|=(?!=)>?|#)[ \t\x85\u2028\u2029]*""")
_VALUE: Final = re.compile(
    r"""(?:[!&][^\s,{}\[\]]{0,200}[ \t]{1,9}){0,3}"""
    r"""(?:"([^"\n]{0,500})"|'([^'\n]{0,500})'|(\{\s{0,99}\}|\[\s{0,99}\]|[^\n\r,}\]]{0,500}))"""
)
_NEXT: Final = re.compile(
    r"""\s{0,200}(?:[!&][^\s,{}\[\]]{0,200}\s{1,200}){0,3}(?:[|>][-+0-9]{0,3}[ \t]{0,9}\n\s{0,200})?"""
    r"""(?:"([^"\n]{1,500})"|'([^'\n]{1,500})'|([^\n\r,}\]#]{1,500}))"""
)
_ANCHOR: Final = re.compile(r"&([^\s,\[\]{}]+)[ \t\n]+")
_COMMENT: Final = re.compile(r"(?:^|\s)#.*")
#: A key that another place refers to: an anchor or a tag before it.
_NAMED: Final = re.compile(r"""[&!][^\s,\[\]{}]*[ \t\r\n]+["']?\Z""")


class LooseItem(NamedTuple):
    """A key of a text, its value or UNSEEN, and the offset of the key.

    ``separator`` is ":" or "="; ``quoted`` tells whether the value is in quotes, ``first`` whether the key is the first
    of its line.
    """

    key: str
    value: str | Unseen
    offset: int
    separator: str
    quoted: bool
    first: bool


def loose_items(text: str, keys: Collection[str]) -> Iterator[LooseItem | None]:
    """Yield every place in a text where one of ``keys`` may be a key; None where the rest is not followed."""
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
    if match[3] == "#":  # a comment too long to look behind
        return LooseItem(key, UNSEEN, at, ":", False, first)
    value = _VALUE.match(text, match.end())
    assert value is not None  # it matches nothing, too
    if value[1] is not None or value[2] is not None:
        return LooseItem(key, value[1] if value[1] is not None else value[2], at, match[3][0], True, first)
    plain = _COMMENT.sub("", value[3]).strip()
    if not plain or plain[0] in "&*|>!":
        elsewhere = _elsewhere(text, plain, match.end() + len(value[0]), anchors)
        return LooseItem(key, elsewhere, at, match[3][0], False, first)
    return LooseItem(key, plain, at, match[3][0], False, first)


class _Anchors:
    """The anchors of a YAML text, ``&name``, which are looked for once, when one is needed."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.ends: dict[str, int] | None = None

    def end(self, name: str) -> int:
        """Return the offset behind an anchor and the blanks after it, -1 where there is none, or more than one."""
        if self.ends is None:
            self.ends = {}
            for match in _ANCHOR.finditer(self.text):
                self.ends[match[1]] = -1 if match[1] in self.ends else match.end()
        return self.ends.get(name, -1)


def _elsewhere(text: str, plain: str, end: int, anchors: _Anchors) -> str | Unseen:
    """Return the first line of a value that does not begin behind its key: in the next line, or at an anchor."""
    if plain[:1] == "*":
        end = anchors.end(plain[1:])
        if end < 0:
            return UNSEEN
    line = _NEXT.match(text, end)
    found = line[1] or line[2] or line[3] if line is not None else None
    return found.strip() if found and found.strip()[:1] not in "&*|>!" else UNSEEN


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


# -- tags of YAML --------------------------------------------------------------------------------------------------

_CORE: Final = "tag:yaml.org,2002:"
_DIRECTIVE: Final = re.compile(r"(?:^|[\n\r\x85\u2028\u2029]|\ufeff)%TAG[ \t]+(!\S*)[ \t]+(\S+)")
_RUN: Final = re.compile(r"!\S+")


def tags(text: str) -> Iterator[str | None]:
    """Yield each tag of a YAML text as a loader resolves it, ``tag:yaml.org,2002:python/tuple``; None for too many.

    ``%`` is decoded, and the handles that ``%TAG`` names are replaced, in every way that the text allows. A local tag
    begins with "!". A tag ends at a blank, and may have more behind it.
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
