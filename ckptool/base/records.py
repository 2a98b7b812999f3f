"""Named tuples and typed dicts that are cheap to define.

``typing.NamedTuple`` compiles a constructor and every annotation when a class is defined, which takes 0.15 ms, and a
short command imports a hundred such classes. Here a definition takes 0.02 ms, because all classes have one constructor,
and annotations stay strings. Otherwise the classes are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
    from typing import TypedDict as TypedDict
else:
    import sys

    # The descriptors of fields that ``collections.namedtuple`` uses.
    from collections import _tuplegetter

    _make_tuple = tuple.__new__

    class _Signature:
        """The signature of the constructor, for ``help`` and editors."""

        def __get__(self, _made, kind):
            from inspect import Parameter, Signature

            return Signature(
                Parameter(
                    name, Parameter.POSITIONAL_OR_KEYWORD, default=kind._field_defaults.get(name, Parameter.empty)
                )
                for name in kind._fields
            )

    class _Record(tuple):
        """The methods of all named tuples, as ``collections.namedtuple`` has them."""

        __slots__ = ()
        __signature__ = _Signature()

        def __new__(cls, *values, **fields):
            if fields:
                values = _ordered(cls, values, fields)
            rest = cls._rest.get(len(values))
            if rest is None:
                raise TypeError(f"{cls.__name__}() takes the fields {', '.join(cls._fields)}: got {len(values)} values")
            return _make_tuple(cls, values + rest)

        @classmethod
        def _make(cls, values):
            made = _make_tuple(cls, values)
            if len(made) != len(cls._fields):
                raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
            return made

        def _replace(self, **fields):
            values = self._make(map(fields.pop, self._fields, self))
            if fields:
                raise ValueError(f"Got unexpected field names: {list(fields)!r}")
            return values

        __replace__ = _replace

        def _asdict(self):
            return dict(zip(self._fields, self))

        def __getnewargs__(self):
            return tuple(self)

        def __repr__(self):
            fields = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self))
            return f"{self.__class__.__name__}({fields})"

    def _ordered(kind, values, fields):
        """Return all values in the order of the fields. ``values`` are given by position, ``fields`` by name."""
        defaults = kind._field_defaults
        rest = []
        used = 0
        for name in kind._fields[len(values) :]:
            if name in fields:
                rest.append(fields[name])
                used += 1
            elif name in defaults:
                rest.append(defaults[name])
            else:
                raise TypeError(f"{kind.__name__}() misses {name}")
        if used < len(fields):
            raise TypeError(f"{kind.__name__}() takes {', '.join(kind._fields)}, each once: got {', '.join(fields)}")
        return (*values, *rest)

    class _Definition(type):
        def __new__(cls, name, bases, namespace):
            fields = tuple(namespace.get("__annotations__", ()))
            defaults = {field: namespace[field] for field in fields if field in namespace}
            getters = {field: _tuplegetter(place, "") for place, field in enumerate(fields)}
            facts = {"__slots__": (), "__match_args__": fields, "_fields": fields, "_field_defaults": defaults}
            # The defaults that complete so many values.
            first = len(fields) - len(defaults)
            facts["_rest"] = {size: tuple(defaults.values())[size - first :] for size in range(first, len(fields) + 1)}
            bases = tuple(_Record if base is NamedTuple else base for base in bases)
            return type(name, bases, {**namespace, **getters, **facts})

    NamedTuple = type.__new__(_Definition, "NamedTuple", (), {})

    class _TypedDictDefinition(type):
        """The class of typed dicts. ``__optional_keys__`` has the fields of classes with ``total=False``."""

        def __new__(cls, name, bases, namespace, total=True):
            optional = [getattr(base, "__optional_keys__", ()) for base in bases]
            own = () if total else namespace.get("__annotations__", ())
            # ``typing.get_type_hints`` begins with the last base; fields are listed from the first one on.
            made = type.__new__(cls, name, bases[::-1], namespace)
            made.__optional_keys__ = frozenset().union(*optional, own)
            return made

        def __call__(cls, *arguments, total=True, **fields):
            if cls is not TypedDict:
                return dict(*arguments, **fields)
            name, fields = arguments
            namespace = {"__annotations__": fields, "__module__": sys._getframe(1).f_globals["__name__"]}
            return _TypedDictDefinition(name, (TypedDict,), namespace, total=total)

    TypedDict = type.__new__(_TypedDictDefinition, "TypedDict", (dict,), {})


def is_typed_dict(kind: object) -> bool:
    """Return whether a type is a typed dict of this module."""
    return hasattr(kind, "__optional_keys__")
