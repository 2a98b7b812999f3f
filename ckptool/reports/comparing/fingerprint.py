"""Fingerprints of what a checkpoint holds: the work of ``ckptool hash``. What goes in is a contract, version 1.

Of each tensor a line of ASCII goes in, compact JSON with a newline behind it::

    [PATH, KIND, DTYPE, SHAPE, DIGEST]\\n        for the content
    [PATH, KIND, DTYPE, SHAPE]\\n                for the structure

- PATH as ``inspect`` spells it, from the root of the file or of the one state dict that ``--key`` names: so a bare
  file and one that wraps the same state dict agree. A tensor at several places counts at each.
- KIND is dense, sparse_coo and so on, quantized, nested, meta, or storage for a bare storage.
- DIGEST is the SHA-256, in hex, of the elements one after the other in the order in which they count (the last
  dimension fastest), little-endian, whatever strides and byte order the file has; of nothing for a tensor without
  elements or on meta. Where a tensor is conjugated or negated lazily, is quantized, or is made of tensors, it is the
  SHA-256 of compact JSON ``[DIGEST of its own elements, FACTS, [[KIND, DTYPE, SHAPE, DIGEST] of each tensor in it]]``,
  FACTS being the names of those flags, or the scheme, scale, zero point and axis of the quantizer.

The fingerprint is the SHA-256 of these lines in the order of their bytes. Container, file and folder names, key order,
devices, compression, strides, sharing, requires_grad, classes of tensors, and everything that is no tensor do not
count.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from ...base.errors import RefusedError
from ...base.text import argument
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.programs import NO_WEIGHTS, program_of
from ...checkpoint.sharding import sharding
from ...checkpoint.tensors import Tensor, ViewId, view_id
from ...files.sources import Span
from ...files.threads import blocks, in_threads
from ...pickles.nodes import Ref
from ...values.elements import elements, tensor_size
from .belongings import belongings
from .closeness import has_values, raw_of
from .places import Place, Side, side_of

CONTENT: Final = "ckptool:1:"
STRUCTURE: Final = "ckptool-structure:1:"


def fingerprint_report(
    checkpoint: Checkpoint,
    *,
    key: str | None = None,
    structure: bool = False,
    each: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """The report of ``hash``, schema ``ckptool.hash/1``.

    With ``structure`` no values are read, and ``content`` is None. ``each`` adds the digest of every tensor. Raises
    TargetError for a key that there is not, MalformedError where bytes are missing, RefusedError for a program without
    weights.
    """
    side = side_of(checkpoint, key)
    places = list(side.tensors())
    if not places and program_of(checkpoint) is not None:
        what = f"{NO_WEIGHTS}: a fingerprint is of tensors alone, and would be that of every such program"
        raise RefusedError(what, path=checkpoint.path, next=f"sha256sum {argument(checkpoint.path)}")
    digests = Digests(side, progress)
    if not structure:
        digests.add(place for place in places)
    bones = [_line(place, None) for place in places]
    full = [] if structure else [_line(place, digests.of(place.ref, place.tensor)) for place in places]
    report: dict[str, Any] = {
        "schema": "ckptool.hash/1",
        "path": checkpoint.path,
        "key": key,
        "tensors": len(places),
        "content": None if structure else CONTENT + _summed(full),
        "structure": STRUCTURE + _summed(bones),
    }
    if each:
        report["each"] = [
            {
                "path": place.path,
                "kind": place.tensor.kind,
                "dtype": place.tensor.dtype,
                "shape": list(place.tensor.shape),
                "hash": None if structure else digests.of(place.ref, place.tensor),
            }
            for place in places
        ]
    return report


def _line(place: Place, digest: str | None) -> bytes:
    tensor = place.tensor
    fields = [place.path, tensor.kind, tensor.dtype, tensor.shape]
    return _compact(fields if digest is None else [*fields, digest]) + b"\n"


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def _summed(lines: Iterable[bytes]) -> str:
    from hashlib import sha256

    return sha256(b"".join(sorted(lines))).hexdigest()


class Digests:
    """The digests of tensors: the elements of each stored tensor are read once, however often it stands there."""

    def __init__(self, side: Side, progress: Callable[[int], None] | None = None) -> None:
        self.side = side
        self.progress = progress
        self.found: dict[ViewId, str] = {}
        self.made: dict[Ref, str] = {}
        self.lock = threading.Lock()

    def add(self, places: Iterable[Place]) -> None:
        """Read what is needed for the digests of these, in the order of the file."""
        wanted: dict[ViewId, Tensor] = {}
        for place in places:
            for part in self.side.reader.parts(place.tensor):
                if has_values(part):
                    wanted.setdefault(view_id(part), part)
        tensors = list(wanted.values())
        in_threads(tensors, self.read, sum(map(tensor_size, tensors)))

    def read(self, tensor: Tensor) -> None:
        """Digest the elements of one tensor."""
        from hashlib import sha256

        checkpoint = self.side.checkpoint
        digest = sha256()
        raw = raw_of(checkpoint, tensor)
        if raw is None:
            for data in elements(checkpoint, tensor):
                digest.update(data)
                self.advance(len(data))
        else:
            for block in blocks(Span(*raw)):
                digest.update(block)
                self.advance(len(block))
        self.found[view_id(tensor)] = digest.hexdigest()

    def advance(self, size: int) -> None:
        if self.progress:
            with self.lock:
                self.progress(size)

    def of(self, ref: Ref, tensor: Tensor) -> str:
        """The digest of a tensor whose elements, and those of the tensors in it, were read."""
        known = self.made.get(ref)
        if known is None:
            known = self.made[ref] = self._of(ref, tensor)
        return known

    def _of(self, ref: Ref, tensor: Tensor) -> str:
        from hashlib import sha256

        own = self.found[view_id(tensor)] if has_values(tensor) else sha256().hexdigest()
        facts = _facts(self.side, ref)
        parts = self.side.reader.parts(tensor)[1:]
        if not facts and not parts:
            return own
        inner = [
            [part.kind, part.dtype, part.shape, self.found[view_id(part)] if has_values(part) else ""] for part in parts
        ]
        return sha256(_compact([own, facts, inner])).hexdigest()


def _facts(side: Side, ref: Ref) -> list[object]:
    """What decides the values of a tensor beside its elements: lazy flags, or the parameters of its quantizer, or
    which part it is of a tensor that is spread over ranks."""
    tensor = side.tensor(ref)
    spread = sharding(side.reader, ref, tensor) if tensor is not None else None
    if spread is not None:
        return ["part", spread.placements, [part.ranges for part in spread.parts]]
    held = belongings(side, ref)
    if ".quantizer" in held:
        return _quantizer(side, held[".quantizer"])
    return [flag for flag in ("conj", "neg") if f".{flag}" in held]


def _quantizer(side: Side, ref: Ref) -> list[object]:
    """The scheme by its name, then numbers; the tensors in it are parts of the tensor."""
    params = side.graph.nodes[ref]
    found: list[object] = []
    for item in params if type(params) is tuple else ():
        leaf = side.leaf(item)
        if leaf is not None and isinstance(leaf.value, bool | int | float | str):
            found.append(leaf.value.rpartition(".")[2] if leaf.type == "global" else leaf.value)  # type: ignore[union-attr]
    return found
