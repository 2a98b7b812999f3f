"""Files that are programs with weights beside them: what they are, and what a state dict of them would lack."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..base.text import argument, suggested_output
from .checkpoint import Checkpoint
from .container import Container
from .survey import DeviceName

#: The code of the problem that says so, and those of all that is said of a program.
PROGRAM: Final = "program"
ABOUT: Final = frozenset(
    (
        *(PROGRAM, "program-parts", "code-devices", "code-unread", "code-missing", "hidden-state"),
        "untold-buffers",
    )
)
#: What is said of one without a single tensor in its state dict.
NO_WEIGHTS: Final = "it has no parameters and no buffers by name"

#: Records about the archive itself.
_OF_WRITERS: Final = frozenset(("version", "byteorder", ".format_version", ".storage_alignment")) | {
    ".data/serialization_id"
}


class NamedDevice(NamedTuple):
    """A device that is named where no edit reaches it, such as a file of code, so many times; ``what`` names it."""

    where: str
    device: str
    number: int
    what: str = "the code"


class Program(Container):
    """What a container of a program tells beside its graph, which are its weights.

    ``kind`` says what it is ("a TorchScript archive"), ``loader`` what of torch reads it, ``edits`` which commands edit
    it as it is, ``maps`` whether the loader takes a map_location. Names in its pickles that begin with one of
    ``own_names`` are none of Python. ``beside`` is what it holds beside the weights, each in words, ``described`` the
    same as JSON-ready data, ``named_devices`` the devices that are named where no edit reaches them,
    ``attribute_devices`` those of the program's objects that are no part of the state dict, with references of the
    graph.
    """

    kind: str
    loader: str
    edits: Collection[str]
    maps: bool = True
    own_names: tuple[str, ...] = ()
    beside: Sequence[str]
    described: Mapping[str, Any]
    named_devices: Sequence[NamedDevice]
    attribute_devices: Sequence[DeviceName] = ()


def program_of(checkpoint: Checkpoint) -> Program | None:
    """The container of a checkpoint where it is one of a program."""
    container = checkpoint.container
    return container if isinstance(container, Program) else None


def parts_beside(checkpoint: Checkpoint) -> dict[str, str]:
    """Return what a program holds beside its weights: code, constants, objects, by name; sizes and checksums as text.

    What no two runs of a writer have in common, such as the lines of debug information, is not in it.
    """
    reader = checkpoint.survey.reader
    weights = {part.storage for entry in checkpoint.survey.tensors for part in reader.parts(entry.tensor)}
    root = f"{checkpoint.container.root}/"
    named = {
        record.name.removeprefix(root): f"{record.size:,} bytes, CRC-32 {record.crc or 0:08x}"
        for record in checkpoint.container.records()
        if record.key not in weights
    }
    return {name: told for name, told in named.items() if name not in _OF_WRITERS and not name.endswith(".debug_pkl")}


def convert_step(path: str) -> str:
    """The command that takes the weights out of a program."""
    output = suggested_output(path, "weights", ".pth")
    return f"ckptool convert {argument(path)} --allow-loss entries -o {argument(output)}"
