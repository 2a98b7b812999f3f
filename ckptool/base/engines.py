"""Parse the names of engines, which carry out work on many files (see ``files/engine.py``)."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from .errors import TargetError

Answer = TypeVar("Answer")

LOCAL: Final = "local"
DASK: Final = "dask"
#: The accepted values of ``--engine``, for messages and the help.
SPECS: Final = f"{LOCAL}, {DASK}, or {DASK}=tcp://HOST:PORT"


def engine_address(spec: str) -> str | None:
    """Return the address of the scheduler: "" to start Dask workers on this machine, None for a local process pool.

    Raises TargetError for any other spec.
    """
    kind, given, address = spec.partition("=")
    if kind not in (LOCAL, DASK) or (given and (kind == LOCAL or not all(address.partition("://")))):
        raise TargetError(f"there is no engine {spec!r}: it is {SPECS}")
    return None if kind == LOCAL else address


class Precomputed(Generic[Answer]):
    """A precomputed answer in the place of an item, so that the engine has no work to do for it."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
