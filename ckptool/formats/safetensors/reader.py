"""safetensors files: a header in JSON, and the bytes of contiguous tensors. Nothing in them can be run.

Source: the format as huggingface/safetensors describes it; see ``header`` for its rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

from ...base.dtypes import BY_SAFETENSORS
from ...base.errors import MalformedError, RefusedError
from ...checkpoint.container import Container, Manifest, Problem, StoredBytes, StoredRecord, Traits
from ...checkpoint.graph_builder import Builder, PlainTensor, contiguous
from ...files.sources import Appending, Plan, Source, Span, merged
from ...pickles.nodes import Graph
from ..foreign.identification import explain
from .header import MAX_HEADER, TensorEntry, read_header
from .sharding_info import is_piece

#: Elements of a torch dtype for each of the format, where they are not one.
_TWO = 2
#: What `explain` says of a damaged file that is called by the suffix of the format.
_OURS = ("unknown", "safetensors")


class Safetensors(Container):
    """A safetensors file: a dict of tensors. ``metadata`` are the texts of its header."""

    format = "safetensors"
    traits = Traits(pickled=False, unsummed="safetensors", written="safetensors", named=True)

    def __init__(self, source: Source, *, cut: bool = False) -> None:
        self.source = source
        header = read_header(source, cut=cut)
        self.metadata: Mapping[str, str] = header.metadata
        self.problems = [Problem("odd-header", "warning", text) for text in header.odd]
        if is_piece(self.metadata):
            what = "its tensors are pieces of larger ones, what one rank had: the folder that it is in has the whole"
            self.problems.append(Problem("piece", "warning", what))
        self.entries = {str(number): entry for number, entry in enumerate(_in_file(header.entries))}
        keys = {entry.name: key for key, entry in self.entries.items()}
        #: Every tensor by its name, as ``load_file`` has them: in the order of the file.
        self.tensors: list[tuple[str, PlainTensor]] = []
        for entry in self.entries.values():
            dtype = BY_SAFETENSORS.get(entry.dtype)
            if dtype is None:
                what = f"tensor {entry.name!r} is {entry.dtype}, a dtype that torch does not have"
                raise MalformedError(what, path=source.name, where=entry.name)
            shape = entry.shape
            if entry.dtype == "F4":
                # A torch element is a byte of two values, and the format counts values.
                if not shape or shape[-1] % _TWO:
                    what = f"tensor {entry.name!r} is F4, of which torch holds rows of an even number of values only"
                    raise MalformedError(what, path=source.name, where=entry.name)
                shape = (*shape[:-1], shape[-1] // _TWO)
            self.tensors.append((entry.name, contiguous(dtype, shape, keys[entry.name])))
        kind = {"pt": "torch", "tf": "TensorFlow", "flax": "Flax", "np": "NumPy", "mlx": "MLX"}
        self.writer = (
            f"safetensors for {kind.get(self.metadata['format'], self.metadata['format'])}"
            if ("format" in self.metadata)
            else "safetensors"
        )

    @cached_property
    def graph(self) -> Graph:  # type: ignore[override]
        """A dict of the tensors; made at the first use, as a shard of a folder needs none."""
        builder = Builder()
        items = [(name, builder.tensor(tensor)) for name, tensor in self.tensors]
        return builder.graph(builder.mapping(items))

    def stored_size(self, key: str) -> int | None:
        entry = self.entries.get(key)
        return None if entry is None or entry.end > self.source.size else entry.end - entry.begin

    def stored(self, key: str) -> StoredBytes:
        entry = self.entries.get(key)
        if entry is None or entry.end > self.source.size:
            return StoredBytes(None, 0)
        size = entry.end - entry.begin
        return StoredBytes(Span(self.source, entry.begin, size), size)

    def records(self) -> Iterator[StoredRecord]:
        for key, entry in self.entries.items():
            if entry.end > self.source.size:
                continue
            size = entry.end - entry.begin
            yield StoredRecord(entry.name, Span(self.source, entry.begin, size), size, None, False, key)

    def manifest(self, *, checked: bool = False) -> Manifest:
        return {entry.name: (entry.dtype, entry.shape) for entry in self.entries.values()}

    def plan(self, pickle: bytes | None) -> Plan:
        if pickle is not None:
            raise AssertionError("a safetensors file has no pickle to replace")
        return Plan(merged([Span(self.source, 0, self.source.size)]))

    def append(self, pickle: bytes, keys: Sequence[str], gone: Collection[str], edit: str, time: int) -> Appending:
        what = "a safetensors file must end with its last tensor, so nothing can be appended to it"
        raise RefusedError(what, path=self.source.name, next="write a new file with -o")


def _in_file(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    return sorted(entries, key=lambda entry: (entry.begin, entry.end))


def sniff(head: bytes, source: Source) -> bool:
    """Nothing marks the format: a length, and JSON behind it. By its name a damaged one is told as well."""
    size = int.from_bytes(head[:8], "little")
    text = head[8:].lstrip(b" \t\r\n")
    if (
        len(head) > 8
        and text[:1] == b"{"
        and size <= MAX_HEADER
        and text[1:2] in (b'"', b"}", b" ", b"\r", b"\n", b"\t", b"")
    ):
        return True
    # A web page, a pointer or a zip of that name is named as what it is.
    return source.name.endswith(".safetensors") and getattr(explain(head, source), "kind", "") in _OURS


def read_cut(source: Source) -> Safetensors:
    """What is there of a file that may be cut: storages that are not all there have no bytes.

    Raises MalformedError where the header is not whole, or breaks another rule.
    """
    return Safetensors(source, cut=True)


def read(source: Source) -> Safetensors:
    """Read the header; raises MalformedError with the rule of the format that the file breaks."""
    return Safetensors(source)
