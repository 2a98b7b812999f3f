"""GGUF files as checkpoints: a dict of the metadata and of the tensors, alone or in the files of a split.

Quantized tensors have a dtype of ``base.dtypes.BLOCKS``: their shape counts values, their bytes are blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from ...base.dtypes import BY_NAME
from ...base.errors import MalformedError
from ...base.findings import INCOMPLETE, Finding
from ...base.lazy import regex
from ...base.steps import folder_of
from ...base.text import cut, join_limited, pluralize, quoted
from ...checkpoint.container import FoundPickle, Original, Traits
from ...checkpoint.graph_builder import Builder, PlainTensor
from ...checkpoint.tensors import contiguous_strides
from ...files.sources import FolderSource, Source, is_unfinished
from ...pickles.nodes import Graph, Ref
from ..tensor_table import TableContainer, TensorEntry, repeated
from .header import MAGIC, STRING, Array, Header, elements, read_header, type_name

#: The name of a file of a split (llama.cpp: ``llama_split_path``).
SPLIT: Final = regex(r"(.*)-(\d{5})-of-(\d{5})\.gguf\Z")
#: The tokens of a model, on which no program acts.
_TOKENS: Final = "tokenizer.ggml."


class GGUF(TableContainer):
    """The files of a model, the one with the metadata first. ``values`` are the entries of the metadata, in which long
    arrays are an ``Array``."""

    format = "gguf"
    traits = Traits(
        pickled=False,
        size_source="header",
        no_checksums="GGUF",
        loads="converted",
        loader="gguf-py",
        suffix=".gguf",
        writes_as="gguf",
        blocks=True,
        flat_names=True,
    )

    def __init__(self, files: Sequence[tuple[Source, Header]]) -> None:
        self.files, self.sources = files, [source for source, _ in files]
        self.source, self.header = files[0]
        self.values = self.header.metadata
        self.header_size = min(self.header.data, self.source.size) if len(files) == 1 else 0
        self.byteorder = "big" if self.header.order == ">" else "little"
        self.writer = f"a converter for llama.cpp (GGUF version {self.header.version})"
        self.problems = [problem for _, each in files for problem in each.problems]
        every = [(source, entry) for source, each in files for entry in each.entries]
        self.entries = {str(number): entry for number, (_, entry) in enumerate(every)}
        self._sources = [source for source, _ in every]
        names = [*self.values, *(entry.name for _, entry in every)]
        if (twice := repeated(names)) is not None:
            raise MalformedError(f"two of its entries and tensors are called {quoted(twice)}", path=self.source.name)
        from .names import lacking  # imported late, because it reads a table

        if lacks := lacking(self.values, names[len(self.values) :]):
            architecture = quoted(str(self.values["general.architecture"]))
            what = f"the header lacks what llama.cpp needs for {architecture}: {join_limited(lacks)}"
            self.problems.append(Finding("gguf-lacks", "note", what))

    @property
    def model(self) -> str:  # type: ignore[override]
        """The architecture, size, context and tokenizer of the model, as far as the metadata has them."""
        value = self.values.get
        name, tokens = value("general.architecture"), value("tokenizer.ggml.tokens")
        number = tokens.number if isinstance(tokens, Array) else len(tokens) if type(tokens) is list else None
        sizes = value("general.size_label"), value(f"{name}.context_length")
        labels = ("", "size ", "context ", "tokenizer ", "vocabulary ")
        facts = zip(labels, (name, *sizes, value("tokenizer.ggml.model"), number))
        known = [(label, fact) for label, fact in facts if type(fact) in (int, str)]
        return ", ".join(label + (cut(fact, 60) if isinstance(fact, str) else f"{fact:,}") for label, fact in known)

    @cached_property
    def graph(self) -> Graph:  # type: ignore[override]
        return object_of(self.values, self.entries.values())

    def in_full(self, key: str = "") -> GGUF:
        arrays = {name: value for name, value in self.values.items() if isinstance(value, Array)}
        wanted = {name: value for name, value in arrays.items() if key in ("", ".") or name in key}
        whole = GGUF(self.files)
        whole.values, whole.problems = (
            {**self.values, **elements(self.source, wanted, self.header.order)},
            self.problems,
        )
        return whole

    def source_of(self, key: str) -> Source:
        return self._sources[int(key)]

    def originals(self) -> Mapping[str, Sequence[Original]]:
        from .names import originals  # imported late, because it reads a table

        return originals(self.values, {entry.name: entry.shape for entry in self.entries.values()})

    def held_texts(self) -> Iterable[tuple[str, Mapping[str, str]]]:
        """Yield the texts of the metadata, also those in arrays, except tokens. Programs act on chat templates only."""
        own = {name: value for name, value in self.values.items() if not name.startswith(_TOKENS)}
        long = {name: value for name, value in own.items() if isinstance(value, Array) and value.kind == STRING}
        listed = {**own, **elements(self.source, long, self.header.order)}
        texts = {name: value for name, value in self.values.items() if isinstance(value, str)}
        for name, value in ((name, value) for name, value in listed.items() if isinstance(value, list)):
            texts |= {f"{name}[{n}]": each for n, each in enumerate(value) if isinstance(each, str)}
        return [("", texts)] if texts else []

    def pickles(self, *, quick: bool = False) -> Iterator[FoundPickle]:
        """Yield a note if the file may also be a pickle: more than 255 tensors begin with an opcode after a number."""
        for source, header in self.files:
            if source.read(9, 1) != b"\0" and header.order == "<":
                from ..safetensors.pickle_twin import names_global  # hardly any model has so many tensors

                found = names_global(source, header.data, whole=not quick)
                if found or (found is None and not quick):
                    yield FoundPickle("", None, "it is a GGUF file, and may be a pickle at once", unchecked=True)


def object_of(values: Mapping[str, Any], tensors: Iterable[TensorEntry]) -> Graph:
    """Return a dict of metadata and of tensors. An array that is not decoded is described by a text."""
    builder = Builder()

    def node(value: Any) -> Ref:
        value = described(value)
        return builder.sequence([*map(node, value)]) if isinstance(value, list) else builder.constant(value)

    items = [(name, node(value)) for name, value in values.items()]
    for number, (name, dtype, shape, begin, end) in enumerate(tensors):
        plain = PlainTensor(BY_NAME[dtype], shape, contiguous_strides(shape), str(number), end - begin)
        items.append((name, builder.tensor(plain)))
    return builder.graph(builder.mapping(items))


def described(value: Any) -> Any:
    """Return a value as the object has it: a text for an array that is not decoded."""
    return f"[{pluralize(value.number, type_name(value.kind))}]" if isinstance(value, Array) else value


def sniff(head: bytes, source: Source) -> bool:
    """Return whether a file begins as GGUF, or an edit in place of one was not finished."""
    return head.startswith(MAGIC) or (source.name.endswith(".gguf") and is_unfinished(source))


def read(source: Source) -> GGUF:
    """Read one file; raise MalformedError with the rule of the format that it breaks."""
    header = read_header(source)
    container = GGUF([(source, header)])
    number, count = (header.metadata.get(f"split.{name}", 0) for name in ("no", "count"))
    if type(count) is int and type(number) is int and count > 1:
        what = f"it is file {number + 1:,} of the {count:,} of a model: the name of the first file opens all of them"
        container.problems.append(Finding("piece", "warning", what))
    return container


def read_split(path: str) -> tuple[FolderSource, GGUF] | None:
    """Open all files of a split by the name of its first one; return None for any other name.

    A missing or damaged file is a problem of the container.
    """
    match = SPLIT.match(os.path.basename(path))
    if match is None or int(match[2]) != 1 or int(match[3]) < 2:
        return None
    from ...files.folders import open_folder  # most models are one file
    from ..folders import opening

    folder, count = open_folder(folder_of(path)), int(match[3])
    names = folder.names()
    first, *others = (f"{match[1]}-{number:05d}-of-{match[3]}.gguf" for number in range(1, count + 1))
    absent = [name for name in others if name not in names]
    files = list[tuple[Source, Header]]()
    with opening(path) as stack:
        for name in (first, *(name for name in others if name not in absent)):
            source = folder.open(name)
            stack.callback(source.close)
            if source.read(0, len(MAGIC)) != MAGIC:
                raise MalformedError("it is no GGUF file", path=source.name, next="get the file again")
            files.append((source, read_header(source)))
        container = GGUF(files)
        if absent:
            what = f"the model is in {count:,} files, and {join_limited(absent, most=3)} are not there"
            container.problems.append(Finding(INCOMPLETE, "error", what, refused=True))
        for name, (source, header) in zip((first, *others), files):
            declared = header.metadata.get("split.count", count)
            if declared != count:
                what = f"{source.name}: it is one of {declared} files"
                container.problems.append(Finding(INCOMPLETE, "error", what, name))
        return FolderSource(path, container.sources, folder=folder.path), container
