"""Find Jinja templates that escape from their values: chat templates that reach attributes of Python classes.

transformers renders chat templates in a sandbox that refuses these attributes. Other programs render the same text
without one (CVE-2024-34359 in llama-cpp-python). The tokens follow ``jinja2/lexer.py`` with its default
delimiters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from ..base.lazy import regex

_OPEN: Final = regex(r"\{[{%#]")
_TOKEN: Final = regex(
    r"""\s+|("(?:[^"\\]|\\[\s\S])*"|'(?:[^'\\]|\\[\s\S])*')|([^\W\d]\w*)|\d[\w.]*|([-+]?[%}]\}|[\s\S])"""
)
#: Names by which Python leads from any value to its classes and modules: ``__class__``, ``_Template__context``.
_DUNDER: Final = regex(r"_\w*__\w*")
#: Filters, methods and operators that make a string from others, so that no literal shows the whole string.
_FILTERS: Final = frozenset(("join", "format", "reverse", "replace", "string", "map", "first", "last", "list"))
_METHODS: Final = frozenset(("join", "format", "replace", "lower", "swapcase", "translate", "strip"))
_OPERATORS: Final = frozenset("~+*%")
#: Filters that take the name of an attribute.
_BY_ATTRIBUTE: Final = frozenset(
    ("map", "sort", "groupby", "selectattr", "rejectattr", "sum", "unique", "min", "max", "select", "reject")
)
#: Statements that assign values or text to variables.
_ASSIGNING: Final = frozenset(("set", "for", "with", "macro"))
_KEYWORDS: Final = frozenset(("in", "not", "and", "or", "if", "else", "elif", "is", "set", "for", "with", "call"))
_STRING: Final = "string"
_KEY: Final = regex("chat_template")
#: Maximum number of keys from which a text is read again; a tokenizer file has one to three.
_MAX_KEYS: Final = 16
#: Maximum number of open brackets; Jinja itself fails earlier with a RecursionError.
_MAX_DEPTH: Final = 200
#: Maximum number of tokens read in one text: about two seconds of work.
_MAX_STEPS: Final = 1_000_000
#: The number of + signs needed to assemble ``__class__`` in an attribute name; indices have one or two.
_MANY_SUMS: Final = 3
_UNDERSCORES: Final = "a name put together of underscores"
TOO_DEEP: Final = "brackets too deep to follow"
TOO_LONG: Final = "more of a template than is followed"


def is_template(text: str) -> bool:
    """Return whether a text has a Jinja expression or statement."""
    return "{{" in text or "{%" in text


def reached_attribute(texts: Sequence[str]) -> str:
    """Return how a template reaches attributes of Python, such as ``__class__`` or ``|attr``; "" if it does not.

    Return ``TOO_LONG`` if the template is too long to follow. ``texts`` are possible readings of the surrounding text,
    such as YAML. There ``{#`` need not begin a Jinja comment, and a quote may be left open. So expressions in comments
    are read too, and the text is read again from each key ``chat_template``.
    """
    steps = iter(range(_MAX_STEPS))
    for text in texts:
        keys = [match.end() for match in islice(_KEY.finditer(text), _MAX_KEYS)]
        for start in (*keys, 0):  # read the template itself first, because the text before it may use up all steps
            for comments in (True, False) if text.find("{#", start) >= 0 else (True,):
                if reason := _Reader(text, steps).read(start, comments):
                    return reason
    return ""


class _Scope:
    """An expression, or the content of its brackets.

    ``named``: it gives the name of an attribute, like a subscript or the argument of a filter. ``strings``: it holds a
    string. ``makes``: it makes a string from others. ``sums``: the number of its ``+`` signs. ``arguments``: the names
    of its keyword arguments; the last one is ``open`` until a comma ends it.
    """

    def __init__(self, named: bool) -> None:
        self.named = named
        self.strings = self.makes = self.open = False
        self.sums = 0
        self.arguments: list[str] = []

    def is_put_together(self) -> bool:
        return (self.strings and self.makes) or self.sums >= _MANY_SUMS


class _Reader:
    """Reads the expressions in a text. ``steps`` are the remaining steps for all readings of the text."""

    def __init__(self, text: str, steps: Iterator[int]) -> None:
        self.text = text
        self.steps = steps
        #: Variables whose value is an assembled string, and variables whose value is a string in the template.
        self.made: set[str] = set()
        self.strings: set[str] = set()

    def read(self, at: int, comments: bool) -> str:
        """Return how the expressions, starting at an offset, reach an attribute, or ""."""
        while (begin := _OPEN.search(self.text, at)) is not None:
            if begin[0] == "{#":
                end = self.text.find("#}", begin.end()) if comments else -1
                comments = end >= 0  # no later comment ends either
                at = end + 2 if comments else begin.end()
                continue
            reason, at = self._expression(begin.end(), begin[0] == "{%")
            if reason:
                return reason
        return ""

    def _expression(self, at: int, statement: bool) -> tuple[str, int]:
        """Read one expression or statement; return how it reaches an attribute (or ""), and the offset after it."""
        text = self.text
        last = literal = keyword = ""
        before = ""  # the token before the last one
        targets: list[str] = []
        scopes = [_Scope(False)]
        assigned = stringed = False
        while (token := _TOKEN.match(text, at)) is not None:
            string, name, mark = token.groups()
            at = token.end()
            if next(self.steps, None) is None:
                return TOO_LONG, at
            if string is not None:
                if last == _STRING:  # Jinja joins adjacent strings
                    _each(scopes, makes=True)
                    if _is_underscores(literal) or _is_underscores(_value(string)):
                        return _UNDERSCORES, at
                literal = _value(string)
                if "__" in literal or literal in ("attr", "%c"):
                    return repr(literal), at
                if _is_underscores(literal) and last in _OPERATORS:
                    return _UNDERSCORES, at
                if last != "=" or before not in ("=", "!"):  # a string that is compared is not the value
                    if scopes[-1].open:
                        self.strings.add(scopes[-1].arguments[-1])
                    _each(scopes, strings=True)
                before, last = last, _STRING
            elif name is not None:
                if _DUNDER.fullmatch(name) or (name == "attr" and last == "|"):
                    return f"|{name}" if last == "|" else name, at
                if (last == "|" and name in _FILTERS) or (last == "." and name in _METHODS) or name in self.made:
                    _each(scopes, makes=True, strings=name in self.made or name in ("string", "join"))
                elif name in self.strings:
                    _each(scopes, strings=True)
                stringed = name == "string" and last == "|"
                if not keyword and statement:
                    keyword = name
                elif keyword in _ASSIGNING and not assigned:
                    assigned = name == "in"
                    if last == ".":
                        targets.clear()  # this is an attribute of a namespace
                    targets += [] if assigned else [name]
                before, last = last, name
            elif mark is not None:
                if len(mark) > 1:
                    if len(scopes) == 1:
                        self._assign(keyword, targets, assigned, scopes[0])
                        return "", at
                    at = token.start() + 1  # it closes a dict first, then the expression
                    mark = mark[0]
                stringed = stringed and mark in ")["
                if mark == "=" and last.isidentifier() and text[at : at + 1] != "=":
                    if len(scopes) == 1:
                        targets += [last] if assigned and keyword == "with" else []
                        assigned = True
                    elif last.strip("_") != last:
                        return _UNDERSCORES, at  # dict(_=1) makes a string from the name
                    elif scopes[-1].named is False:
                        scopes[-1].arguments.append(last)
                        scopes[-1].open = True
                elif mark == ",":
                    scopes[-1].open = False
                if mark in _OPERATORS:
                    _each(scopes, makes=True, strings=mark == "~")
                    scopes[-1].sums += mark == "+"
                    if last == _STRING and _is_underscores(literal):
                        return _UNDERSCORES, at
                elif mark in "[({":
                    if mark == "[" and stringed:
                        return "characters of a value's text", at
                    if len(scopes) > _MAX_DEPTH:
                        return TOO_DEEP, at
                    value = last in (")", "]", _STRING) or (last.isidentifier() and last not in _KEYWORDS)
                    of_filter = mark == "(" and before == "|" and last in _BY_ATTRIBUTE
                    scopes.append(_Scope((mark == "[" and value) or of_filter))
                elif mark in "])}" and len(scopes) > 1:
                    closed = scopes.pop()
                    if closed.is_put_together():
                        self.made.update(closed.arguments)
                    scopes[-1].sums += closed.sums if not closed.named else 0
                    if closed.named and closed.is_put_together():
                        return "an attribute whose name is put together", at
                before, last = last, mark
        return "", len(text)

    def _assign(self, keyword: str, targets: list[str], assigned: bool, whole: _Scope) -> None:
        """Record which variables are strings after a statement."""
        text_follows = keyword == "macro" or (keyword == "set" and not assigned)  # up to the end of the block
        if text_follows or whole.is_put_together():
            self.made.update(targets)
        elif whole.strings:
            self.strings.update(targets)


def _each(scopes: list[_Scope], *, makes: bool = False, strings: bool = False) -> None:
    """Mark the innermost brackets, and all outer ones whose value they become a part of."""
    for scope in reversed(scopes):
        if scope.makes >= makes and scope.strings >= strings:
            return  # the outer ones are already marked
        scope.makes = scope.makes or makes
        scope.strings = scope.strings or strings
        if scope.named or scope.open:
            return


def _is_underscores(literal: str) -> bool:
    return bool(literal) and not literal.strip("_")


def _value(token: str) -> str:
    """Return the value of a string literal, decoded as in Python and Jinja; "" if that fails."""
    try:
        return token[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
    except UnicodeDecodeError:
        return ""
