"""safetensors files: a JSON header, and the bytes of contiguous tensors. Nothing in them can be executed.

Source: the format description of huggingface/safetensors; see ``header`` for its rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

from ...base.dtypes import BY_SAFETENSORS
from ...base.errors import MalformedError
from ...base.findings import TWO_FORMATS, Finding
from ...checkpoint.container import Container, FoundPickle, Traits
from ...checkpoint.graph_builder import Builder, PlainTensor, contiguous
from ...files.sources import Source
from ...pickles.nodes import Graph
from ..foreign.identification import explain
from ..tensor_table import TableContainer, TensorEntry
from .header import MAX_HEADER, in_file_order, is_piece, read_header

#: F4 values in one torch element, which is a byte.
_F4_VALUES: Final = 2
#: The kinds that `explain` gives a damaged file with the suffix of the format.
_OWN_KINDS: Final = ("unknown", "safetensors")
_FRAMEWORKS: Final = {"pt": "torch", "tf": "TensorFlow", "flax": "Flax", "np": "NumPy", "mlx": "MLX"}


#: The facts about the format, also for folders of such files.
TRAITS: Final = Traits(
    pickled=False,
    size_source="header",
    no_checksums="safetensors",
    loader="safetensors.torch.load_file",
    suffix=".safetensors",
    writes_as="safetensors",
    flat_names=True,
)


def load_rule(container: Container, source: Source, torch: str) -> str:
    """Return why torch.load does not pass a file to the safetensors library, or "". It decides only by the file name
    (torch/serialization.py, ``load``)."""
    from ...safety.torch_lists import rules  # imported late, because few commands predict torch.load

    if container.misnamed(source):
        what = "torch.load knows it by .safetensors only, safetensors.torch.load_file reads it"
        return f"safetensors under another name: {what}"
    if not rules(torch).reads_safetensors:
        return f"torch {torch} does not read safetensors: safetensors.torch.load_file does"
    return ""


#: Pickle opcodes that skip the zeros in the header size: strings, numbers and persistent ids. Others cannot begin a
#: pickle here: PUT and GET need a memo, the size in FRAME would include a byte of the JSON, GLOBAL would name zeros.
_SWALLOWING: Final = frozenset(bytes([code]) for code in b"XTBUC\x8c\x8a\x8bVSILFP")


class Safetensors(TableContainer):
    """A safetensors file: a dict of tensors. ``metadata`` has the texts in its header."""

    format = "safetensors"
    traits = TRAITS
    load_rule = load_rule
    holds_texts = True

    def __init__(self, source: Source, *, cut: bool = False) -> None:
        self.source, self.sources = source, (source,)
        header = read_header(source, cut=cut)
        self.header_size = 8 + int.from_bytes(source.read(0, 8), "little")
        self.metadata: Mapping[str, str] = header.metadata
        self.problems = [Finding("odd-header", "warning", text) for text in header.oddities]
        if is_piece(self.metadata):
            what = "its tensors are pieces of larger ones, what one rank had: the folder that it is in has the whole"
            self.problems.append(Finding("piece", "warning", what))
        #: Whether it may also be a pickle: the bytes that were read to open the file do not tell.
        self._doubtful = False
        if source.read(0, 1) in _SWALLOWING:
            twin = self._twin(whole=False)
            self._doubtful = twin is None
            self.problems += twin or ()
        self.entries = {str(number): entry for number, entry in enumerate(in_file_order(header.entries))}
        for key, entry in self.entries.items():
            if entry.dtype not in BY_SAFETENSORS or entry.dtype == "F4":
                self._tensor(key, entry)  # raises if torch has no such tensor
        framework = self.metadata.get("format")
        self.writer = "safetensors" + ("" if framework is None else f" for {_FRAMEWORKS.get(framework, framework)}")

    @property
    def tensors(self) -> Iterator[tuple[str, PlainTensor]]:
        """Every tensor by name, in file order like ``load_file``."""
        return ((entry.name, self._tensor(key, entry)) for key, entry in self.entries.items())

    def _tensor(self, key: str, entry: TensorEntry) -> PlainTensor:
        """Return a tensor as torch has it; raise MalformedError if torch has no such tensor."""
        dtype, shape = BY_SAFETENSORS.get(entry.dtype), entry.shape
        if dtype is None:
            what = f"tensor {entry.name!r} is {entry.dtype}, a dtype that torch does not have"
            raise MalformedError(what, path=self.source.name, where=entry.name)
        if entry.dtype == "F4":
            if not shape or shape[-1] % _F4_VALUES:
                what = f"tensor {entry.name!r} is F4, and torch holds only rows with an even number of values"
                raise MalformedError(what, path=self.source.name, where=entry.name)
            shape = (*shape[:-1], shape[-1] // _F4_VALUES)
        return contiguous(dtype, shape, key)

    @cached_property
    def graph(self) -> Graph:  # type: ignore[override]
        """A dict of the tensors, built at first use: a shard of a folder needs none."""
        builder = Builder()
        items = [(name, builder.tensor(tensor)) for name, tensor in self.tensors]
        return builder.graph(builder.mapping(items))

    def fitted(self, header: bytes) -> bytes:
        """Return a header that ends with as many spaces as it takes to fill the place of the old one."""
        text = header[8:].rstrip(b" ").ljust(self.header_size - 8)
        return header if 8 + len(text) > self.header_size else (len(text)).to_bytes(8, "little") + text

    def _twin(self, *, whole: bool) -> list[Finding] | None:
        """Return the finding that the file is also a pickle, if it is; None if the bytes do not tell. Only ``whole``
        reads values to find out."""
        from .pickle_twin import names_global  # needed for one file in ten

        found = names_global(self.source, self.header_size, whole=whole)
        what = "it is a safetensors file and a pickle at once: torch.load takes it for a pickle under other names"
        return [Finding(TWO_FORMATS, "error", what, refused=True)] if found else None if found is None else []

    @cached_property
    def _doubts(self) -> list[Finding]:
        """The findings of a look into the values, for a file whose header does not tell whether it is also a pickle."""
        twin = self._twin(whole=True) if self._doubtful else []
        if twin is None and self.source.read(0, 1) != b"P":  # pickle.load itself refuses a persistent id
            what = "it is a safetensors file and may be a pickle at once: its first 64 MiB do not tell"
            return [Finding(TWO_FORMATS, "warning", what)]
        return twin or []

    def pickles(self, *, quick: bool = False) -> Iterator[FoundPickle]:
        """Yield a note if the file may also be a pickle, which a search through nested files asks for."""
        for problem in () if quick else self._doubts:
            yield FoundPickle("", None, problem.message, unchecked=True)

    def audit(self, keys: Collection[str]) -> Sequence[Finding]:
        return [*self._doubts, *super().audit(keys)]


def sniff(head: bytes, source: Source) -> bool:
    """Return whether a file begins with a length and JSON; a damaged file is recognised by its name."""
    text = head[8:].lstrip(b" \t\r\n")
    starts_object = text[:1] == b"{" and text[1:2] in (b'"', b"}", b" ", b"\r", b"\n", b"\t", b"")
    if starts_object and int.from_bytes(head[:8], "little") <= MAX_HEADER:
        return True
    # A web page, a pointer file or a zip with this name is reported by its own kind.
    return source.name.endswith(".safetensors") and getattr(explain(head, source), "kind", "") in _OWN_KINDS


def read(source: Source, *, cut: bool = False) -> Safetensors:
    """Read the header; raise MalformedError with the format rule that the file breaks. With ``cut``, the file may be
    cut after the header: incomplete storages have no bytes."""
    return Safetensors(source, cut=cut)
