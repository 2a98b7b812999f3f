"""Judge a Jinja template, such as a model's chat template: data, or a program.

Hugging Face renders templates in a sandbox, other programs do not. Code runs in a template only by a call, so a
template is data if it calls nothing but the methods of texts and dicts, its own macros, and a few functions that
renderers provide; all names are in ``text_rules.json``. Attributes and names in brackets are literals that do not begin
with an underscore; other brackets hold a slice, or a number that the template counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ..base.lazy import regex
from ..base.records import NamedTuple
from .rules import word_lists

_BEGIN: Final = regex(r"\{[{%#]")
#: The tokens of jinja2/lexer.py. Names that are not ASCII are none of them.
_TOKEN: Final = regex(
    r"""\s+|(?P<end>[-+]?%\}|-?\}\})|(?P<name>[A-Za-z_][A-Za-z_0-9]*)|(?P<number>\d\w*)"""
    r"""|(?P<text>'(?:[^'\\]|\\[\s\S])*'|"(?:[^"\\]|\\[\s\S])*")|(?P<mark>//|\*\*|[=!<>]=|[-+/*%~\[\](){}<>=.:|,;])"""
)
_INNER: Final = regex(r"(?:^|\.)(?:_|(?:gi|cr|ag|tb|f|co|func|im)_)")
_KEYWORDS: Final = frozenset(("and", "or", "not", "in", "is", "if", "else", "elif", "for", "recursive"))
_VALUES: Final = (")", "]", "}")
#: Filters whose result is a number, and numbers of a loop.
_COUNTING: Final = ("length", "count", "int")
_PLACES: Final = ("index", "index0", "revindex", "revindex0", "length")
#: Maximum number of tokens that are read; the longest templates of published models have some ten thousand.
_MAX_TOKENS: Final = 200_000
#: Maximum depth of brackets.
_MAX_DEPTH: Final = 50
_TOO_LONG: Final = "more tokens than are followed"


class _Unclear(Exception):
    """A part of a template that is not understood; its text says which."""


class _Token(NamedTuple):
    kind: str
    text: str


_NONE: Final = _Token("", "")


def is_template(text: str) -> bool:
    """Return whether a text has an expression or statement of Jinja."""
    return "{{" in text or "{%" in text


def unclear_part(text: str) -> str:
    """Return the first part of a template that is not plain data, such as "the name lipsum", or "" if all of it is."""
    try:
        statements = list(_statements(text))
        template = _Template(statements)
        for statement in statements:
            template.check(statement)
    except _Unclear as error:
        return str(error)
    except RecursionError:  # a long chain of variables
        return _TOO_LONG
    return ""


def _statements(text: str) -> Iterator[list[_Token]]:
    """Yield the tokens of each expression and statement; a statement begins with its tag."""
    left, begin = _MAX_TOKENS, _BEGIN.search(text)
    while begin is not None:
        at = begin.end()
        if begin[0] == "{#":
            at = text.find("#}", at) + 2
            if at < 2:
                raise _Unclear("a comment without an end")
            begin = _BEGIN.search(text, at)
            continue
        tokens, depth = list[_Token](), 0
        if text[at : at + 1] in ("-", "+"):
            at += 1
        while True:
            match = _TOKEN.match(text, at)
            left -= 1
            if match is None or left < 0 or depth > _MAX_DEPTH:
                raise _Unclear(_TOO_LONG if match else "characters that are not Jinja")
            at, kind = match.end(), match.lastgroup or ""
            if kind == "end":
                if not depth and match[0][-2:] == ("%}" if begin[0] == "{%" else "}}"):
                    break
                kind, at = "mark", match.start() + 1  # "}}" closes a dict first, then the expression
            if kind:
                depth += (text[match.start()] in "[({") - (text[match.start()] in "])}") if kind == "mark" else 0
                tokens.append(_Token(kind, text[match.start() : at]))
        if begin[0] == "{%" and (not tokens or tokens[0].text not in word_lists("template")["tags"]):
            raise _Unclear(f"the tag {tokens[0].text if tokens else ''}".strip())
        yield tokens if begin[0] == "{%" else [_NONE, *tokens]
        begin = _BEGIN.search(text, at)


class _Template:
    """The statements of a template; ``bound`` maps a variable, or ".name" of a namespace, to all of its values."""

    def __init__(self, statements: Sequence[Sequence[_Token]]) -> None:
        self.lists = word_lists("template")
        self.bound: dict[str, list[Sequence[_Token]]] = {}
        self.macros = {tokens[1].text for tokens in statements if tokens[0].text == "macro" and len(tokens) > 1}
        self.counts: dict[str, bool] = {}
        for tokens in statements:
            self._bind(tokens)

    def _bind(self, tokens: Sequence[_Token]) -> None:
        texts = [token.text for token in tokens]
        if texts[0] == "set" and texts[2:3] == ["="]:
            self.bound.setdefault(texts[1], []).append(tokens[3:])
        elif texts[0] == "set" and texts[2:3] == ["."] and texts[4:5] == ["="]:
            self.bound.setdefault(f".{texts[3]}", []).append(tokens[5:])
        elif texts[0] in ("set", "for", "macro"):
            end = texts.index("in") if texts[0] == "for" and "in" in texts else None
            for name in texts[1 + (texts[0] == "macro") : end]:
                self.bound.setdefault(name, []).append(())  # may be anything
        for n, text in enumerate(texts[:-1]):
            if text == "namespace" and texts[n + 1] == "(":
                for part in _arguments(tokens, n + 1):
                    if len(part) < 3 or part[1].text != "=":
                        raise _Unclear("a namespace made from a value")
                    self.bound.setdefault(f".{part[0].text}", []).append(part[2:])

    def check(self, tokens: Sequence[_Token]) -> None:
        """Raise _Unclear if a statement has a name, call or attribute that is not plain."""
        previous, before = tokens[0], _NONE
        for n, token in enumerate(tokens[1:], 1):
            following = tokens[n + 1] if n + 1 < len(tokens) else _NONE
            text, called = token.text, following.text == "("
            if token.kind == "name":
                if previous.text == ".":
                    if not _is_plain_name(text):
                        raise _Unclear(f"the attribute {text}")
                    if called and text not in self.lists["methods"]:
                        raise _Unclear(f"a call of {text}")
                elif previous.text in ("|", "filter"):
                    if text not in self.lists["filters"]:
                        raise _Unclear(f"the filter {text}")
                    if called and text in self.lists["by_attribute"]:
                        self._check_attributes(text, list(_arguments(tokens, n + 1)))
                elif previous.text == "is" or (previous.text == "not" and before.text == "is"):
                    if text not in self.lists["tests"] and text != "not":
                        raise _Unclear(f"the test {text}")
                elif text in self.lists["forbidden"]:
                    raise _Unclear(f"the name {text}")
                elif called and text not in _KEYWORDS and not self._is_function(text):
                    raise _Unclear(f"a call of {text}")
            elif text == "(" and (previous.text in _VALUES or previous.kind in ("text", "number")):
                raise _Unclear("a call of a value")
            elif text == "[" and _is_value(previous):
                self._check_subscript(tokens[n + 1 : _end(tokens, n)])
            before, previous = previous, token

    def _is_function(self, name: str) -> bool:
        return (name in self.macros or name in self.lists["functions"]) and name not in self.bound

    def _check_subscript(self, inner: Sequence[_Token]) -> None:
        if len(inner) == 1 and inner[0].kind == "text":
            if not _is_plain_name(inner[0].text):
                raise _Unclear(f"the attribute {inner[0].text}")
        elif not any(part.text == ":" for part in inner) and not self._is_number(inner):
            raise _Unclear(f"the attribute {' '.join(part.text for part in inner)}")

    def _check_attributes(self, name: str, arguments: Sequence[Sequence[_Token]]) -> None:
        """Check the arguments of a filter that say which attribute it reads, or which filter it applies."""
        for n, part in enumerate(arguments):
            keyword = part[0].text if len(part) > 2 and part[1].text == "=" else ""
            value = part[2:] if keyword else part
            if keyword not in ("", "attribute") or (not keyword and n != (name == "join")):
                continue
            text = value[0].text[1:-1] if len(value) == 1 and value[0].kind == "text" else "_"
            applied = text in self.lists["filters"] - self.lists["by_attribute"] or name != "map" or keyword
            if not self._is_number(value) and not (_is_plain_name(text) and applied):
                raise _Unclear(f"an attribute that {name} reads")

    def _is_number(self, tokens: Sequence[_Token]) -> bool:
        """Return whether a value is counted by the template: numbers, places in loops, lengths, and sums of these."""
        texts = ["", *(token.text for token in tokens), "", ""]
        for n, token in enumerate(tokens, 1):
            before, following = texts[n - 1], texts[n + 1 : n + 3]
            if token.kind != "name":
                known = token.kind == "number" or token.text in (*"()+-*%.|", "//")
            elif before == "|":
                known = token.text in _COUNTING
            elif following[0] == ".":
                known = True  # its attribute decides
            elif before == "." and texts[n - 2] == "loop":
                known = token.text in _PLACES and "loop" not in self.bound
            else:
                known = (following[0] == "|" and following[1] in _COUNTING) or self._is_counted(
                    "." * (before == ".") + token.text
                )
            if not known:
                return False
        return bool(tokens)

    def _is_counted(self, name: str) -> bool:
        known = self.counts.get(name)
        if known is None:
            self.counts[name] = True  # a value that refers to itself
            known = self.counts[name] = name in self.bound and all(map(self._is_number, self.bound[name]))
        return known


def _is_value(token: _Token) -> bool:
    return token.text in _VALUES or token.kind == "text" or (token.kind == "name" and token.text not in _KEYWORDS)


def _is_plain_name(name: str) -> bool:
    """Return whether an attribute cannot lead from a value to its class, frame or code."""
    return not _INNER.search(name.strip("'\"")) and "__" not in name and "\\" not in name


def _end(tokens: Sequence[_Token], begin: int) -> int:
    depth = 0
    for n in range(begin, len(tokens)):
        depth += (tokens[n].text in ("[", "(", "{")) - (tokens[n].text in _VALUES)
        if not depth:
            return n
    raise _Unclear("a bracket without an end")


def _arguments(tokens: Sequence[_Token], begin: int) -> Iterator[Sequence[_Token]]:
    end = _end(tokens, begin)
    first, depth = begin + 1, 0
    for n in range(begin + 1, end + 1):
        depth += (tokens[n].text in ("[", "(", "{")) - (tokens[n].text in _VALUES)
        if n == end or (tokens[n].text == "," and not depth):
            if n > first:
                yield tokens[first:n]
            first = n + 1
