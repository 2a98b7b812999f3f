"""The report of ``ckptool hash``: fingerprints of the tensors in a checkpoint. What it hashes is a contract, version 1.

Each tensor is a line of ASCII, compact JSON and a newline::

    [PATH, KIND, DTYPE, SHAPE, DIGEST]\\n        for the content
    [PATH, KIND, DTYPE, SHAPE]\\n                for the structure

- PATH is spelled as in ``inspect``, relative to the root of the file or to the state dict that ``--key`` names. So a
  bare file and one that wraps the same state dict agree. A tensor at several places counts at each.
- KIND is dense, sparse_coo and so on, quantized, nested, meta, or storage for a bare storage.
- DIGEST is the SHA-256, in hex, of the elements in row-major order, little-endian, whatever strides and byte order the
  file has. For a tensor without elements or on meta it is the SHA-256 of nothing. For a tensor that is conjugated or
  negated lazily, is quantized, or consists of other tensors, it is the SHA-256 of compact JSON ``[DIGEST of its own
  elements, FACTS, [[KIND, DTYPE, SHAPE, DIGEST] of each inner tensor]]``. FACTS are the names of the lazy flags, or the
  quantizer's scheme, scale, zero point and axis.

The fingerprint is the SHA-256 of these lines, sorted by their bytes. It does not depend on container, file and folder
names, key order, devices, compression, strides, sharing, requires_grad, classes of tensors, or anything that is not a
tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Literal

from ...base.errors import RefusedError, TargetError
from ...base.findings import COPIES
from ...base.globs import Globs, Patterns
from ...base.records import TypedDict
from ...base.steps import Line, argument, command, suggested_output
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.programs import NO_WEIGHTS, program_of
from ...checkpoint.selection import dotted
from ...checkpoint.sharding import sharding
from ...checkpoint.tensors import Tensor, ViewId, view_id
from ...files.downloads import expect_reads
from ...files.threads import from_threads, read_blocks, run_in_threads
from ...formats.opening import CheckpointOrPath, opened
from ...pickles.nodes import Ref
from ...values.elements import elements, read_for, storage_reader, stored_span, tensor_size
from ..keys import near_pattern
from .places import Place, Side, has_values, side_of, tensor_attributes

if TYPE_CHECKING:
    from typing import NotRequired

    from ...files.write.copying import Progress

CONTENT: Final = "ckptool:1:"
STRUCTURE: Final = "ckptool-structure:1:"


class TensorHash(TypedDict):
    """The digest of one tensor; None if only the structure was requested."""

    path: str
    kind: str
    dtype: str
    shape: list[int]
    hash: str | None


class HashReport(TypedDict):
    """The report of ``hash``, schema ``ckptool.hash/1``. ``content`` is None if only the structure was requested.

    ``unequal_copies`` has a message per set of files whose copies of a tensor differ: ``content`` is made of the first
    copies.
    """

    schema: Literal["ckptool.hash/1"]
    path: str
    key: str | None
    tensors: int
    content: str | None
    structure: str
    each: NotRequired[list[TensorHash]]
    unequal_copies: NotRequired[list[str]]


def _report(
    checkpoint: Checkpoint, key: str | None, only: Globs, no_values: bool, each: bool, progress: Progress | None
) -> HashReport:
    side = side_of(checkpoint, key)
    places = list(side.tensors())
    if only:
        chosen = dotted(only, checkpoint)
        keys = {entry.path: entry.key for entry in checkpoint.survey.tensors}
        paths = [side.path_in_file(place.path) for place in places]
        places = [place for place, path in zip(places, paths) if chosen.match(keys.get(path, path), path)]
        if not places:
            message = f"no key matches{near_pattern(only, checkpoint.survey.tensors)}"
            raise TargetError(message, path=checkpoint.path, next=command("keys", checkpoint.path))
    if not places and program_of(checkpoint) is not None:
        message = f"{NO_WEIGHTS}: a fingerprint covers tensors only, and would be the same for every such program"
        raise RefusedError(message, path=checkpoint.path, next=Line(f"sha256sum {argument(checkpoint.path)}"))
    digests, unequal = Digests(side, progress), []
    if not no_values:
        storages = {part.storage for place in places for part in side.reader.parts(place.tensor)}
        checkpoint.container.compare_copies(storages)
        copies = [item for item in checkpoint.container.problems if item.code == COPIES]
        unequal = [item.message for item in copies if not storages.isdisjoint(item.storages or storages)]
        digests.add(places)
    hashes = [None if no_values else digests.digest_of(place.ref, place.tensor) for place in places]
    report: HashReport = {
        "schema": "ckptool.hash/1",
        "path": checkpoint.path,
        "key": key,
        "tensors": len(places),
        "content": None if no_values else CONTENT + _fingerprint(map(_line, places, hashes)),
        "structure": STRUCTURE + _fingerprint(_line(place, None) for place in places),
    }
    if unequal:
        report["unequal_copies"] = unequal
    if each:
        report["each"] = [
            {
                "path": place.path,
                "kind": place.tensor.kind,
                "dtype": place.tensor.dtype,
                "shape": list(place.tensor.shape),
                "hash": digest,
            }
            for place, digest in zip(places, hashes)
        ]
    return report


def _line(place: Place, digest: str | None) -> bytes:
    tensor = place.tensor
    fields = [place.path, tensor.kind, tensor.dtype, tensor.shape]
    return _compact(fields if digest is None else [*fields, digest]) + b"\n"


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def _fingerprint(lines: Iterable[bytes]) -> str:
    return sha256(b"".join(sorted(lines))).hexdigest()


class Digests:
    """The digests of tensors. The elements of each stored tensor are read once, however often it occurs."""

    def __init__(self, side: Side, progress: Progress | None = None) -> None:
        self.side = side
        self.advance = from_threads(progress)
        self.elements: dict[ViewId, str] = {}
        self.tensors: dict[Ref, str] = {}

    def add(self, places: Iterable[Place]) -> None:
        """Read the tensors that the digests of these places need, in file order.

        Raise RefusedError for a tensor whose values are in a NumPy array, which has no storage.
        """
        for entry in self.side.checkpoint.survey.tensors:
            if entry.tensor.kind == "array" or (entry.tensor.kind == "unknown" and entry.tensor.dtype == "unknown"):
                path = self.side.checkpoint.path
                message = f"the values of {entry.path} are in a NumPy array, which a fingerprint does not cover"
                step = command("sanitize", path, output=suggested_output(path, "plain"))
                raise RefusedError(message, path=path, next=step if entry.tensor.kind == "array" else "")
        wanted: dict[ViewId, Tensor] = {}
        for place in places:
            for part in self.side.reader.parts(place.tensor):
                if has_values(part):
                    wanted.setdefault(view_id(part), part)
        tensors, checkpoint = list(wanted.values()), self.side.checkpoint
        readers = (storage_reader(checkpoint, tensor.storage) for tensor in tensors)
        expect_reads(map(read_for, readers, tensors), path=checkpoint.path)
        run_in_threads(tensors, self.read, map(tensor_size, tensors))

    def read(self, tensor: Tensor) -> None:
        """Compute the digest of one tensor's elements."""
        checkpoint = self.side.checkpoint
        digest = sha256()
        storage = storage_reader(checkpoint, tensor.storage)
        span = stored_span(storage, tensor)
        for data in elements(storage, tensor) if span is None else read_blocks(span):
            digest.update(data)
            self.advance(len(data))
        self.elements[view_id(tensor)] = digest.hexdigest()

    def digest_of(self, ref: Ref, tensor: Tensor) -> str:
        """Return the digest of a tensor that was added."""
        if ref in self.tensors:
            return self.tensors[ref]
        own = self.elements[view_id(tensor)] if has_values(tensor) else sha256().hexdigest()
        facts = _facts(self.side, ref)
        parts = self.side.reader.parts(tensor)[1:]
        if facts or parts:
            inner = [
                [part.kind, part.dtype, part.shape, self.elements[view_id(part)] if has_values(part) else ""]
                for part in parts
            ]
            own = sha256(_compact([own, facts, inner])).hexdigest()
        self.tensors[ref] = own
        return own


def _facts(side: Side, ref: Ref) -> list[object]:
    """Return what besides elements decides the values: lazy flags, a quantizer, or which part of a tensor it is."""
    tensor = side.tensor(ref)
    shard = sharding(side.reader, ref, tensor) if tensor is not None else None
    if shard is not None:
        return ["part", shard.placements, [part.ranges for part in shard.parts]]
    attributes = tensor_attributes(side, ref)
    if ".quantizer" in attributes:
        return _quantizer(side, attributes[".quantizer"])
    return [flag for flag in ("conj", "neg") if f".{flag}" in attributes]


def _quantizer(side: Side, ref: Ref) -> list[object]:
    """Return the name of the scheme, then numbers; tensors in it are parts of the tensor."""
    params = side.graph.nodes[ref]
    facts: list[object] = []
    for item in params if type(params) is tuple else ():
        leaf = side.leaf(item)
        if leaf is not None and isinstance(leaf.value, bool | int | float | str):
            facts.append(leaf.value.rpartition(".")[2] if leaf.type == "global" else leaf.value)  # type: ignore[union-attr]
    return facts


def hash(
    path: CheckpointOrPath,
    *,
    key: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
    no_values: bool = False,
    each: bool = False,
    progress: Progress | None = None,
) -> HashReport:
    """Return the JSON of ``ckptool hash``, schema ``ckptool.hash/1``.

    ``content`` is a fingerprint of names, shapes, dtypes and values only; ``structure`` is one without values.
    ``comparing.fingerprint`` lists what is hashed. With ``no_values`` no values are read; ``each`` adds a hash of each
    tensor. ``include`` and ``exclude`` are patterns for keys. Raise TargetError for an unknown key, MalformedError if
    bytes are missing, RefusedError for a program without weights.

    >>> ckptool.hash("model.pth")["content"] == ckptool.hash("model.safetensors")["content"]
    True
    """
    with opened(path) as checkpoint:
        return _report(checkpoint, key, Globs(include, exclude), no_values, each, progress)
