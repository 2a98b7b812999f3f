"""What an object that torch does not load by default becomes: the nearest plain thing, one module a family.

A rule takes a ``Case`` and gives the node to stand in its place, with a word for what it is now; or None, when it
has nothing to say; or ``UNKNOWN``, when it knows that nothing plain carries this.
"""

from __future__ import annotations

from .case import UNKNOWN, Case, Plain, Verdict, called, hashable
from .classes import CLASS_RULES, of_class
from .modules import is_module, state_dict_of
from .numpy_values import array, numpy_scalar
from .python import PYTHON_RULES

__all__ = [
    "CLASS_RULES",
    "PYTHON_RULES",
    "UNKNOWN",
    "Case",
    "Plain",
    "Verdict",
    "array",
    "called",
    "hashable",
    "is_module",
    "numpy_scalar",
    "of_class",
    "state_dict_of",
]
