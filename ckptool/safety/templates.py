"""Judge a Jinja template, such as a model's chat template: data, or a program.

Hugging Face renders templates in a sandbox, other programs do not. Code runs in a template only by a call, so a
template is data if it calls nothing but the methods of texts and dicts, its own macros, and a few functions that
renderers provide; all names are in ``text_rules.json``. No attribute begins with an underscore, and the name in
brackets is a literal, a number, or a key that the template reads from its input.
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
    """The statements of a template, with all values that each variable may have.

    ``bound`` maps a variable, or ".name" for an attribute of a namespace, to the tokens of these values.
    """

    def __init__(self, statements: Sequence[Sequence[_Token]]) -> None:
        self.lists = word_lists("template")
        self.bound: dict[str, list[Sequence[_Token]]] = {}
        self.macros: dict[str, list[str]] = {}
        self.seen: dict[str, bool] = {}
        for tokens in statements:
            if tokens[0].text == "macro" and len(tokens) > 1:
                self.macros[tokens[1].text] = [part[0].text for part in _arguments(tokens, 2) if part]
        for tokens in statements:
            self._bind(tokens)

    def _bind(self, tokens: Sequence[_Token]) -> None:
        tag = tokens[0].text
        if tag in ("set", "for"):
            equals = next((n for n, token in enumerate(tokens) if token.text == ("=" if tag == "set" else "in")), 0)
            if tag == "set" and (len(tokens) < 3 or tokens[2].text not in ("=", ",", ".")):
                equals = 0
            targets = tokens[1:equals] if equals else tokens[1:2]
            # The value of a block is put together.
            whole = list(_results(tokens[equals + 1 :])) if equals else [_Token("text", "''")]
            if len(targets) > 1 and targets[1].text == ".":
                targets = [_Token("name", f".{targets[2].text}")]
            for target in targets:
                self.bound.setdefault(target.text, []).append(whole)
        for n, token in enumerate(tokens[:-1]):
            name = token.text
            if tokens[n + 1].text != "(" or (name != "namespace" and name not in self.macros):
                continue
            for place, part in enumerate(_arguments(tokens, n + 1)):
                keyword = part[0].text if len(part) > 2 and part[1].text == "=" else ""
                if name == "namespace":
                    if not keyword:
                        raise _Unclear("a namespace made from a value")
                    self.bound.setdefault(f".{keyword}", []).append(part[2:])
                elif keyword or place < len(self.macros[name]):
                    value = part[2:] if keyword else part if tag != "macro" or n != 1 else []
                    self.bound.setdefault(keyword or self.macros[name][place], []).append(value)

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
        elif not any(part.text == ":" for part in inner) and not self.is_plain(inner):
            raise _Unclear(f"the attribute {' '.join(part.text for part in inner)}")

    def _check_attributes(self, name: str, arguments: Sequence[Sequence[_Token]]) -> None:
        """Check the arguments of a filter that say which attribute it reads, or which filter it applies."""
        for n, part in enumerate(arguments):
            keyword = part[0].text if len(part) > 2 and part[1].text == "=" else ""
            value = part[2:] if keyword else part
            if keyword != "attribute" if keyword else n != (name == "join"):
                continue
            plain = self.is_plain(value)
            if len(value) == 1 and value[0].kind == "text":
                plain = _is_plain_name(value[0].text)
                applied = value[0].text[1:-1] if name == "map" and not keyword else "list"
                plain = plain and applied in self.lists["filters"] and applied not in self.lists["by_attribute"]
            if not plain:
                raise _Unclear(f"an attribute that {name} reads")

    def is_plain(self, tokens: Sequence[_Token]) -> bool:
        """Return whether a value is a number or comes from the input of the template; text made here does not count."""
        previous = before = _NONE
        tokens = list(_results(tokens))
        for n, token in enumerate(tokens):
            following = tokens[n + 1].text if n + 1 < len(tokens) else ""
            text = token.text
            if token.kind == "text":
                subscript = previous.text == "[" and _is_value(before) and following == "]"
                argument = previous.text == "(" and before.text == "get"
                key = following == ":" and "_" not in text and "\\" not in text
                if not (subscript or argument or key or previous.text in ("==", "!=")):
                    return False
            elif text == "~":
                return False
            elif token.kind == "name" and previous.text == "|":
                if text not in self.lists["plain_filters"]:
                    return False
            elif token.kind == "name" and previous.text == ".":
                if following == "(" and text not in self.lists["plain_methods"]:
                    return False
                if before.text != "loop" and not self._has_plain_values(f".{text}"):
                    return False
            elif token.kind == "name" and text not in _KEYWORDS and previous.text not in ("is", "not"):
                rest = [part.text for part in tokens[n + 1 : n + 3]]
                counted = rest == ["|", "length"] or (rest[:1] == ["."] and f".{rest[1]}" in self.bound)
                if not counted and ((following == "(" and text != "range") or not self._has_plain_values(text)):
                    return False
            before, previous = previous, token
        return True

    def _has_plain_values(self, name: str) -> bool:
        known = self.seen.get(name)
        if known is None:
            self.seen[name] = True  # a value that refers to itself
            known = self.seen[name] = all(map(self.is_plain, self.bound.get(name, ())))
        return known


def _results(tokens: Sequence[_Token]) -> Iterator[_Token]:
    """Yield the tokens of a value without the conditions in it, from ``if`` to ``else`` or the closing bracket."""
    depth, skipped = 0, -1
    for token in tokens:
        depth -= token.text in _VALUES
        if skipped > depth or (skipped == depth and token.text in ("else", ",")):
            skipped = -1
        elif token.text == "if" and skipped < 0:
            skipped = depth
        if skipped < 0:
            yield token
        depth += token.text in ("[", "(", "{")


def _is_value(token: _Token) -> bool:
    return token.text in _VALUES or token.kind == "text" or (token.kind == "name" and token.text not in _KEYWORDS)


def _is_plain_name(name: str) -> bool:
    """Return whether an attribute cannot lead from a value to its class, frame or code."""
    return not _INNER.search(name.strip("'\"")) and "__" not in name and "\\" not in name


def _end(tokens: Sequence[_Token], begin: int) -> int:
    """Return the number of the token that closes the bracket at ``begin``."""
    depth = 0
    for n in range(begin, len(tokens)):
        depth += (tokens[n].text in ("[", "(", "{")) - (tokens[n].text in _VALUES)
        if not depth:
            return n
    raise _Unclear("a bracket without an end")


def _arguments(tokens: Sequence[_Token], begin: int) -> Iterator[Sequence[_Token]]:
    """Yield the arguments in the brackets that open at ``begin``."""
    end = _end(tokens, begin)
    first, depth = begin + 1, 0
    for n in range(begin + 1, end + 1):
        depth += (tokens[n].text in ("[", "(", "{")) - (tokens[n].text in _VALUES)
        if n == end or (tokens[n].text == "," and not depth):
            if n > first:
                yield tokens[first:n]
            first = n + 1
