"""The names that plans may use in JSON: classes of their parts, and operations that compute bytes."""

from __future__ import annotations

from typing import Final

from ..files.codec import Vocabulary, Word

_CLASSES: Final = {
    "Span": Word("files.sources:Span"),
    "Computed": Word("files.sources:Computed", ("size", "operation", "parameters")),
    "Deferred": Word("files.sources:Deferred", ()),
    "DeferredCrc": Word("files.zips.writer:DeferredCrc", ()),
    "Slice": Word("files.sources:SliceSource", ("source", "offset", "size", "name")),
    "Zstd": Word("files.zstd:ZstdSource", ("source", "at", "length", "most", "name")),
    "Chunked": Word("formats.pieces.chunks:ChunkedSource", ("shape", "width", "chunks", "name")),
    "Chunk": Word("formats.pieces.chunks:Chunk"),
    "Item": Word("formats.dcp.metadata:Item"),
    "Pieces": Word("formats.dcp.items:PiecesSource", ("name", "dtype", "shape", "boxes", "items", "files", "checked")),
    "Rows": Word("formats.pieces.chunks:RowSource", ("source", "begin", "shape", "stride", "width", "name")),
    "Signs": Word("formats.pieces.chunks:SignSource", ("source", "begin", "size", "signs")),
    "NewRows": Word("edits.resize:NewRows", ("reader", "tensor", "rows", "number", "mean")),
    "Sums": Word("formats.pieces.sums:SumSource", ("terms", "dtype", "width", "divisor", "name")),
    "StorageReader": Word("values.elements:StorageReader"),
    "StorageData": Word("checkpoint.container:StorageData"),
    "ReadCache": Word("checkpoint.checkpoint:ReadCache", ()),
    "Tensor": Word("checkpoint.tensors:Tensor"),
    "Reading": Word("values.interpretation:Reading"),
    "Casting": Word("edits.cast:Casting"),
    "Averaging": Word("edits.average:Averaging"),
    "StoredTensor": Word("values.torch.adapters:StoredTensor"),
    "AdapterStep": Word("values.torch.adapters:AdapterStep"),
}

_OPERATIONS: Final = {
    "summed": Word("files.zips.writer:summed"),
    "inflated": Word("files.zips.reader:content_chunks"),
    "stored": Word("values.elements:StorageReader.stored"),
    "loaded": Word("values.elements:StorageReader.loaded"),
    "elements": Word("values.elements:elements"),
    "resolved": Word("values.interpretation:resolved_bytes"),
    "gathered": Word("edits.slim:as_in_file"),
    "elementwise": Word("edits.recompute:elementwise"),
    "resized": Word("edits.resize:resized"),
    "folded": Word("edits.weight_norm:folded"),
    "merged": Word("values.torch.adapters:merged_elements"),
    "swapped": Word("edits.merge:swapped_storage"),
}

#: The complete vocabulary of ``ckptool.tasks/1``.
VOCABULARY: Final = Vocabulary(_CLASSES, _OPERATIONS)
