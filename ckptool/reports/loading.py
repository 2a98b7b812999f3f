"""Really loading a checkpoint, and explaining torch's answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..base.errors import UnreadableError
from ..base.map_location import MapLocation
from ..base.text import argument, suggested_output
from ..files.sources import FileSource
from ..formats.hf.files import is_index
from ..formats.opening import in_several_files, open_checkpoint

#: (what torch says, what it means)
_MEANINGS = (
    ("Attempting to deserialize object on", "a tag names a device that this machine lacks: give --map-location cpu"),
    ("don't know how to restore data location", "a tag names a device that this torch does not know"),
    ("Invalid device string", "a tag is no device: ckptool remap --to cpu mends the file"),
    ("Unsupported global", "the file names a class that torch does not load by default"),
    ("Unsupported operand", "the pickle uses an instruction that weights_only refuses (protocol 4 or 5?)"),
    ("Weights only load failed", "the file holds more than tensors and plain values"),
)


def load_whole(path: str, map_location: MapLocation) -> Any:
    """What torch.load gives for a file, and for a folder of Hugging Face what it gives for each file, as one dict.

    Raises UnreadableError with what torch says.
    """
    from ..values.torch.loads import load_object

    if not in_several_files(path):
        return load_object(path, map_location)
    with open_checkpoint(path) as checkpoint:
        if checkpoint.traits.loads == "converted":
            output = suggested_output(path, extension=".pth")
            step = f"make one of it: ckptool convert {argument(path)} -o {argument(output)}"
            raise UnreadableError("torch.load reads files, and this is a folder of parts", path=path, next=step)
        files = [source.name for source in checkpoint.sources if isinstance(source, FileSource)]
    found: dict[str, Any] = {}
    for file in files:
        if not is_index(file):
            found |= load_object(file, map_location)
    return found


def load_report(path: str, map_location: MapLocation) -> dict[str, Any]:
    """``ok``, the number of tensors by ``devices``, or torch's ``error`` and what it means."""
    from ..values.torch.loads import tensors_in

    try:
        loaded = load_whole(path, map_location)
    except UnreadableError as error:
        meaning = next((meaning for text, meaning in _MEANINGS if text in error.what), "")
        said = f"{error.what} ({meaning})" if meaning else error.what
        return {"ok": False, "error": said, "devices": {}}
    devices = Counter(str(tensor.device) for tensor in tensors_in(loaded))
    return {"ok": True, "error": None, "devices": dict(devices)}
