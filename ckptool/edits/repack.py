"""Rewrite a checkpoint cleanly, in the layout of torch.save."""

from __future__ import annotations

from ..base.text import human_bytes, pluralize
from ..checkpoint.changes import Change
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.graph_editor import used_storages
from ..checkpoint.programs import program_of
from ..formats.opening import takes_path


@takes_path
def repack(checkpoint: Checkpoint) -> Checkpoint:
    """Rewrite the file in torch's layout: only its own records, in its order, aligned and uncompressed.

    Unused storages, old versions and dead bytes are removed, so ``torch.load(mmap=True)`` works on every output. A file
    as torch 2.7 and later write it stays the same byte for byte. A legacy file becomes a zip.

    >>> ckptool.repack("training.pth").changes[0].words
    'rewritten in the layout of torch.save'
    """
    if program_of(checkpoint) is not None:
        # The program's code refers to records by name, so all of them are kept.
        change = Change("repack", "", 1, 0, "rewritten in the layout of torch")
        return checkpoint.changed(checkpoint.graph, [change], needs_relayout=True)
    used = used_storages(checkpoint.graph, checkpoint.path)
    deflated = sum((body := checkpoint.body(key)) is not None and body.compressed for key in used)
    notes = [f"{pluralize(deflated, 'deflated storage')} inflated"] if deflated else []
    unused = [record for record in checkpoint.container.records() if record.key and record.key not in used]
    if unused:
        size = human_bytes(sum(record.span.size for record in unused))
        notes.append(f"{pluralize(len(unused), 'storage')} that nothing uses left out, {size}")
    writer = "torch.save" if checkpoint.pickled else "safetensors"
    change = Change("repack", "", 1, 0, f"rewritten in the layout of {writer}", tuple(notes))
    return checkpoint.changed(checkpoint.graph, [change], needs_relayout=True)
