"""The claims of an input are looked at while its bytes are copied, by a thread of its own.

A format without checksums would give wrong bytes a good name: what the input says of them is checked the last time that
anybody can.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from ..errors import MalformedError
from ..human import salvage_step
from ..source import Claim
from ..zips.checksum import checksum

__all__ = ["Verifier"]


#: Bytes from which on a thread of its own pays.
_WORTH_IT: Final = 2 << 20


class _Stop(Exception):
    """Nobody waits for the answer any more."""


class Verifier:
    """Checks claims in the background, as a context; ``finish`` waits for the answer."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        self._claims = claims
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        worth_it = sum(claim.span.size for claim in claims) >= _WORTH_IT
        self._thread = threading.Thread(target=self._run, daemon=True) if worth_it else None

    def __enter__(self) -> Verifier:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._thread:
            self._thread.join()

    def finish(self) -> None:
        """Wait for the last claim; raises MalformedError for the first that is not true, and what reading raises."""
        if self._thread:
            self._thread.join()
        else:
            self._run()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for claim in self._claims:
                if checksum(claim.span, claim.size, claim.compressed, claim.where, self._advance) != claim.crc:
                    path = claim.span.source.name
                    what = f"{claim.where} does not agree with its checksum: it is damaged"
                    raise MalformedError(what, path=path, next=salvage_step(path))
        except _Stop:
            pass
        except BaseException as error:
            self._error = error

    def _advance(self, size: int) -> None:
        if self._stopped.is_set():
            raise _Stop
