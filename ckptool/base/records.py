"""Named tuples that are cheap to define.

``typing.NamedTuple`` compiles a constructor and every annotation when a class is defined, which takes 0.15 ms. A short
command imports a hundred such classes and uses a third of them. Here defining a class takes 0.02 ms, and its first
object compiles the constructor. Otherwise the classes are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:
    # The descriptors of fields that ``collections.namedtuple`` uses.
    from collections import _tuplegetter, namedtuple

    def _constructor(kind):
        return namedtuple(kind.__name__, kind._fields, defaults=kind._field_defaults.values()).__new__

    class _Signature:
        """The signature of the constructor, for ``help`` and editors."""

        def __get__(self, _made, kind):
            import inspect

            signature = inspect.signature(_constructor(kind))
            return signature.replace(parameters=[*signature.parameters.values()][1:])

    class _Record(tuple):
        """The methods of all named tuples, as ``collections.namedtuple`` has them."""

        __slots__ = ()
        __signature__ = _Signature()

        def __new__(cls, *values, **fields):
            home = next(kind for kind in cls.__mro__ if "_fields" in vars(kind))  # ``cls`` may be a subclass of it
            home.__new__ = _constructor(home)
            return home.__new__(cls, *values, **fields)

        @classmethod
        def _make(cls, values):
            made = tuple.__new__(cls, values)
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

    class _Definition(type):
        def __new__(cls, name, bases, namespace):
            fields = tuple(namespace.get("__annotations__", ()))
            defaults = {field: namespace[field] for field in fields if field in namespace}
            getters = {
                field: _tuplegetter(place, f"Alias for field number {place}") for place, field in enumerate(fields)
            }
            facts = {"__slots__": (), "__match_args__": fields, "_fields": fields, "_field_defaults": defaults}
            bases = tuple(_Record if base is NamedTuple else base for base in bases)
            return type(name, bases, {**namespace, **getters, **facts})

    NamedTuple = type.__new__(_Definition, "NamedTuple", (), {})
