"""Load a checkpoint with torch, and explain torch's answer."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, TypedDict

from ..base.errors import UnreadableError
from ..base.map_location import MapLocation
from ..base.steps import command, suggested_output
from ..files.sources import FileSource
from ..formats.opening import in_several_files, open_checkpoint

#: (a part of torch's message, its meaning)
_MEANINGS: Final = (
    ("Attempting to deserialize object on", "a tag names a device that this machine lacks: give --map-location cpu"),
    ("don't know how to restore data location", "a tag names a device that this torch does not know"),
    ("Invalid device string", "a tag is not a device: ckptool remap --to cpu mends the file"),
    ("Unsupported global", "the file names a class that torch does not load by default"),
    ("Unsupported operand", "the pickle uses an instruction that weights_only refuses (protocol 4 or 5?)"),
    ("Weights only load failed", "the file holds more than tensors and plain values"),
)


class LoadReport(TypedDict):
    """The result of torch.load: the number of tensors by device, or torch's error with its meaning."""

    ok: bool
    error: str | None
    devices: dict[str, int]


def load_whole(path: str, map_location: MapLocation) -> Any:
    """Return the result of torch.load for a file; for a Hugging Face folder, the objects of all files as one dict.

    Raise UnreadableError with torch's message.
    """
    from ..formats.names.hf import is_index
    from ..values.torch.loads import load_object

    if not in_several_files(path):
        return load_object(path, map_location)
    with open_checkpoint(path) as checkpoint:
        if checkpoint.traits.loads == "converted":
            output = suggested_output(path, extension=".pth")
            step = "convert it to one: " + command("convert", path, output=output)
            raise UnreadableError("torch.load reads files, and this is a folder of parts", path=path, next=step)
        files = [source.name for source in checkpoint.sources if isinstance(source, FileSource)]
    loaded: dict[str, Any] = {}
    for file in files:
        if not is_index(file):
            loaded |= load_object(file, map_location)
    return loaded


def load_report(path: str, map_location: MapLocation) -> LoadReport:
    """Load a file with torch and return the report."""
    from ..values.torch.loads import tensors_in

    try:
        loaded = load_whole(path, map_location)
    except UnreadableError as error:
        meaning = next((meaning for text, meaning in _MEANINGS if text in error.what), "")
        return {"ok": False, "error": f"{error.what} ({meaning})" if meaning else error.what, "devices": {}}
    return {"ok": True, "error": None, "devices": dict(Counter(str(tensor.device) for tensor in tensors_in(loaded)))}
