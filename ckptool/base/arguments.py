"""Check the arguments of public functions: a wrong type is named at once, in the caller's words."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from typing import Any, Final, TypeAlias

from .lazy import regex

#: Tells whether a value may be given for an annotation.
_Test: TypeAlias = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_several(value: Any) -> bool:
    """Return whether a value has several elements. A single string would count as its letters."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _are_texts(value: Any) -> bool:
    """Return whether a value has several texts. An iterator is not read for the answer."""
    return _are_several(value) and (not isinstance(value, Collection) or all(map(_is_text, value)))


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _is_device(value: Any) -> bool:
    """Return whether a value is a torch.device; torch is not imported for the answer."""
    return f"{type(value).__module__}.{type(value).__name__}" == "torch.device"


def _is_named(name: str) -> _Test:
    """Return a test for instances of a class, which is not imported for the answer."""
    return lambda value: any(base.__name__ == name for base in type(value).__mro__)


#: The words and the test for annotations, or for their part before the bracket. Functions check the others themselves.
_TESTS: Final[Mapping[str, tuple[str, _Test]]] = {
    "None": ("None", lambda value: value is None),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "int": ("an int", lambda value: hasattr(value, "__index__")),
    "float": ("a number", lambda value: hasattr(value, "__float__") and not isinstance(value, str)),
    "str": ("a str", _is_text),
    "Tied": ("a str", _is_text),
    "Purpose": ("a str", _is_text),
    "Kind": ("a str", _is_text),
    "FilePath": ("a path", _is_path),
    "os.PathLike": ("a path", _is_path),
    "tuple": ("a tuple", lambda value: isinstance(value, tuple | list)),
    "Mapping": ("a dict", lambda value: isinstance(value, Mapping)),
    "Patterns": ("a str or several", lambda value: _is_text(value) or _are_texts(value)),
    "Collection[str]": ("several str", _are_texts),
    "Sequence[CheckpointOrPath]": ("a list of paths", _are_several),
    "Sequence": ("several values", _are_several),
    "Iterable": ("several values", _are_several),
    "MapLocation": (
        "a str, a dict, a torch.device or None",
        lambda value: value is None or isinstance(value, str | Mapping) or callable(value) or _is_device(value),
    ),
    "DeviceMap": ("a DeviceMap", lambda value: _is_named("DeviceMap")(value) or _is_device(value)),
    "Policy": ("a Policy", _is_named("Policy")),
    "WriteRequest": ("a WriteRequest", _is_named("WriteRequest")),
    "Executor": ("an Executor", lambda value: hasattr(value, "submit")),
    "Progress": ("a function", callable),
    "OnProgress": ("a function", callable),
    "Callable": ("a function", callable),
}
#: The bars between the alternatives of an annotation, outside its brackets.
_ALTERNATIVES: Final = regex(r" \| (?![^\[]*\])")


def _row(annotation: str) -> tuple[str, _Test] | None:
    """Return the words and the test for an annotation without alternatives; None if it is not checked."""
    name, _, rest = annotation.partition("[")
    if name == "Literal":
        words = rest.rstrip("]").replace("'", "").split(", ")
        return " or ".join(map(repr, words)), lambda value: isinstance(value, str) and value in words
    return _TESTS.get(annotation) or _TESTS.get(name)


def _accepted(annotation: object) -> tuple[str, list[_Test]] | None:
    """Return what an annotation accepts: the words and the tests of its alternatives; None if it is not checked."""
    rows = [_row(part) for part in _ALTERNATIVES.split(str(annotation))]
    known = [row for row in rows if row is not None]
    if len(known) < len(rows):
        return None
    return " or ".join(dict.fromkeys(words for words, _ in known)), [test for _, test in known]


def checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a public function under its public name, which checks its arguments.

    It raises TypeError for an argument of a wrong type, with the name of the argument. A single str in place of
    several is one of them.
    """
    accepted: dict[str, tuple[str, list[_Test]]] = {}
    positions: list[str] = []
    several: set[str] = set()

    @wraps(function)
    def with_check(*args: Any, **kwargs: Any) -> Any:
        if not positions:
            _read(function, accepted, positions, several)
        for argument in several.intersection(kwargs):
            if isinstance(kwargs[argument], str):
                kwargs[argument] = (kwargs[argument],)
        for argument, value in (*zip(positions, args), *kwargs.items()):
            words, tests = accepted.get(argument, ("", None))
            if tests is not None and not any(test(value) for test in tests):
                raise TypeError(f"{name}() takes {words} as {argument!r}, not {_described(value)}")
        return function(*args, **kwargs)

    with_check.__module__, with_check.__name__, with_check.__qualname__ = "ckptool", name, name
    return with_check


def _read(
    function: Callable[..., Any],
    accepted: dict[str, tuple[str, list[_Test]]],
    positions: list[str],
    several: set[str],
) -> None:
    """Fill in the tests of the parameters, the names of those given by position, and of those that take several str."""
    from inspect import Parameter, signature

    for parameter in signature(function).parameters.values():
        if parameter.annotation == "Collection[str]":
            several.add(parameter.name)
        if (known := _accepted(parameter.annotation)) is not None:
            accepted[parameter.name] = known
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            positions.append(parameter.name)


def _described(value: Any) -> str:
    return f"the str {value!r}" if isinstance(value, str) else type(value).__name__
