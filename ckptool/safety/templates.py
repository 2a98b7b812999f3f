"""Jinja templates that leave the values that they are given: a chat template that reaches the attributes of classes.

transformers renders chat templates in a sandbox that refuses these attributes; other programs render the same text
without one (CVE-2024-34359 of llama-cpp-python). The tokens are those of ``jinja2/lexer.py`` with its default
delimiters.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Final

_OPEN: Final = re.compile(r"\{[{%#]")
_TOKEN: Final = re.compile(
    r"""\s+|("(?:[^"\\]|\\[\s\S])*"|'(?:[^'\\]|\\[\s\S])*')|([^\W\d]\w*)|\d[\w.]*|([-+]?[%}]\}|[\s\S])"""
)
#: Names by which Python leads from any value to its classes and modules: ``__class__``, ``_Template__context``.
_DUNDER: Final = re.compile(r"_\w*__\w*")
#: Filters, methods and operators that make a string of others, so that no literal shows all of it.
_FILTERS: Final = frozenset(("join", "format", "reverse", "replace", "string", "map", "first", "last", "list"))
_METHODS: Final = frozenset(("join", "format", "replace", "lower", "swapcase", "translate", "strip"))
_OPERATORS: Final = frozenset("~+*%")
_KEYWORDS: Final = frozenset(("in", "not", "and", "or", "if", "else", "elif", "is", "set", "for", "with", "call"))
_STRING: Final = "string"
_KEY: Final = re.compile("chat_template")
#: Keys from which a text is read once more: a file of a tokenizer has one to three.
_MAX_KEYS: Final = 16
#: Brackets that are open at once: Jinja itself ends with a RecursionError before.
_MAX_DEPTH: Final = 200


def is_template(text: str) -> bool:
    """Return whether a text has an expression or a statement of Jinja."""
    return "{{" in text or "{%" in text


def reached_attribute(text: str) -> str:
    """Return how a template reaches attributes of Python, such as ``__class__`` or ``|attr``; "" if it does not.

    The text may hold more than the template, such as the YAML around it. There ``{#`` need not begin a comment of
    Jinja, and a quote may be left open. So expressions in comments are read too, and the text is read once more from
    each key ``chat_template``.
    """
    keys = [match.end() for match in islice(_KEY.finditer(text), _MAX_KEYS)]
    ways = ((start, comments) for start in (0, *keys) for comments in (True, False))
    return next(filter(None, (_reached(text, start, comments) for start, comments in ways)), "")


def _reached(text: str, at: int, comments: bool) -> str:
    made: set[str] = set()  # variables whose value is a string put together
    while (begin := _OPEN.search(text, at)) is not None:
        if begin[0] == "{#":
            end = text.find("#}", begin.end()) if comments else -1
            comments = end >= 0  # none ends behind this one either
            at = end + 2 if comments else begin.end()
            continue
        reason, at = _expression(text, begin.end(), made)
        if reason:
            return reason
    return ""


class _Scope:
    """An expression, or what stands in its brackets: whether it holds a string, and whether it makes one of others."""

    def __init__(self, subscript: bool) -> None:
        self.subscript = subscript
        self.strings = self.makes = False


def _expression(text: str, at: int, made: set[str]) -> tuple[str, int]:
    """Read one expression or statement: return how it reaches an attribute or "", and the offset after it."""
    last = target = literal = ""
    scopes = [_Scope(False)]
    stringed = False
    while (token := _TOKEN.match(text, at)) is not None:
        string, name, mark = token.groups()
        at = token.end()
        if string is not None:
            literal = _value(string)
            if "__" in literal or literal in ("attr", "%c"):
                return repr(literal), at
            if _is_underscores(literal) and last in _OPERATORS:
                return "a name put together of underscores", at
            for scope in scopes:
                scope.strings = True
            last = _STRING
        elif name is not None:
            if _DUNDER.fullmatch(name) or (name == "attr" and last == "|"):
                return f"|{name}" if last == "|" else name, at
            if (last == "|" and name in _FILTERS) or (last == "." and name in _METHODS) or name in made:
                for scope in scopes:
                    scope.makes = True
                    scope.strings = scope.strings or name in made or name == "string"
            stringed = name == "string" and last == "|"
            if last in ("set", "for"):
                target = name
            last = name
        elif mark is not None:
            if len(mark) > 1:
                if len(scopes) == 1:
                    if scopes[0].strings and scopes[0].makes and target:
                        made.add(target)
                    return "", at
                at = token.start() + 1  # it closes a dict, and then the expression
                mark = mark[0]
            stringed = stringed and mark in ")["
            if mark in _OPERATORS:
                for scope in scopes:
                    scope.makes = True
                if last == _STRING and _is_underscores(literal):
                    return "a name put together of underscores", at
            elif mark in "[({":
                if mark == "[" and stringed:
                    return "characters of a value's text", at
                if len(scopes) > _MAX_DEPTH:
                    return "brackets too deep to follow", at
                value = last in (")", "]", _STRING) or (last.isidentifier() and last not in _KEYWORDS)
                scopes.append(_Scope(mark == "[" and value))
            elif mark in "])}" and len(scopes) > 1:
                closed = scopes.pop()
                if closed.subscript and closed.strings and closed.makes:
                    return "an attribute whose name is put together", at
            last = mark
    return "", len(text)


def _is_underscores(literal: str) -> bool:
    return bool(literal) and not literal.strip("_")


def _value(token: str) -> str:
    """Return the value of a string literal, which Jinja decodes as Python does; "" where that fails."""
    try:
        return token[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
    except UnicodeDecodeError:
        return ""
