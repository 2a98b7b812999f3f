"""Programs with weights, such as TorchScript archives: their kind, and what a state dict of them would lack."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, TypedDict

from ..base.steps import NextStep, command, suggested_output
from ..base.text import words
from .checkpoint import Checkpoint
from .container import Container
from .survey import DeviceName

#: The text for a program without a tensor in its state dict.
NO_WEIGHTS: Final = "it has no parameters and no buffers by name"

#: The records about the archive itself, which torch.save writes beside the object and the storages.
ARCHIVE_RECORDS: Final = words("version byteorder .format_version .storage_alignment .data/serialization_id")


class NamedDevice(NamedTuple):
    """A device named ``number`` times where no edit reaches it, such as in a file of code; ``what`` names it."""

    where: str
    device: str
    number: int
    what: str = "the code"


class CodeDevice(TypedDict):
    """A device that is named in the code, or in what else no edit reaches, and how often."""

    where: str
    device: str
    number: int
    what: str


class AttributeDevice(TypedDict):
    """A device in an object of the program, outside of the state dict."""

    path: str
    device: str


class _CodeDevices(TypedDict):
    code: list[CodeDevice]


class ProgramDevices(_CodeDevices, total=False):
    """The devices outside of the storages; ``attributes`` only of TorchScript, which has such objects."""

    attributes: list[AttributeDevice]


class ProgramFacts(TypedDict, total=False):
    """What a program holds, as far as its kind has such things, by number or by name."""

    code_files: int
    compiled_files: int
    models: list[str]
    parameters: int
    buffers: int
    tensors: int
    attributes: list[str]
    constants: int | list[str]
    traced: bool
    mobile: bool
    restored_by_code: list[str]
    pickles: list[str]
    sources: int
    extern: list[str]
    reduced: int
    programs: list[str]
    extra_files: list[str]


class ProgramReport(ProgramFacts):
    """A program: its kind, such as "a TorchScript archive", what it holds, and the devices named in it."""

    kind: str
    executable: bool
    devices: ProgramDevices


class Program(Container):
    """The container of a program; its graph holds the weights.

    ``kind`` is its name ("a TorchScript archive"), ``loader`` the function of torch that reads it, ``edits`` are the
    commands that edit it as it is, ``maps`` says whether the loader takes a map_location. Names in its pickles that
    begin with one of ``own_names`` are not names of Python. ``beside`` lists as text what it holds besides the weights,
    ``described`` is the same for JSON, ``named_devices`` are devices that are named where no edit reaches them,
    ``attribute_devices`` those of the program's objects outside of the state dict, with references of the graph.
    """

    kind: str
    loader: str
    edits: Collection[str]
    maps: bool = True
    own_names: tuple[str, ...] = ()
    beside: Sequence[str]
    described: ProgramReport
    named_devices: Sequence[NamedDevice]
    attribute_devices: Sequence[DeviceName] = ()


def program_of(checkpoint: Checkpoint) -> Program | None:
    """Return the container of a checkpoint if it is a program, else None."""
    container = checkpoint.container
    return container if isinstance(container, Program) else None


def extra_records(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the records of a program besides its weights (code, constants, objects): size and checksum by name.

    Records that differ between two runs of one writer, such as debug information, are left out.
    """
    reader = checkpoint.survey.reader
    weights = {part.storage for entry in checkpoint.survey.tensors for part in reader.parts(entry.tensor)}
    root = f"{checkpoint.container.root}/"
    records = [record for record in checkpoint.container.records() if record.key not in weights]
    named = [(record.name.removeprefix(root), record) for record in records]
    return {
        name: f"{record.size:,} bytes, CRC-32 {record.crc or 0:08x}"
        for name, record in named
        if name not in ARCHIVE_RECORDS and not name.endswith(".debug_pkl")
    }


def convert_step(checkpoint: Checkpoint) -> NextStep:
    """Return the command that extracts the weights of a program, to the CPU where its tags can be edited."""
    path, program = checkpoint.path, program_of(checkpoint)
    output = suggested_output(path, "weights", ".pth")
    tags = {storage.location for storage in checkpoint.survey.reader.storages.values()}
    if program is not None and "remap" in program.edits and tags - {"cpu", "meta"}:
        return command(
            "remap", path, options=("--to", "cpu", "--to-format", "torch", "--allow-loss", "entries"), output=output
        )
    return command("convert", path, options=("--allow-loss", "entries"), output=output)
