"""Programs with weights, such as TorchScript archives: their kind, and the parts that a state dict cannot hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from ..base.records import TypedDict
from ..base.steps import NextStep, as_step, command, suggested_output
from ..base.text import join_limited
from .checkpoint import Checkpoint, wanted_storages
from .container import ARCHIVE_RECORDS, Container
from .survey import DeviceName

#: The message for a program without a tensor in its state dict.
NO_WEIGHTS: Final = "it has no parameters and no buffers by name"


class CodeDevice(TypedDict):
    """A device named where edits do not reach, such as in a file of code.

    ``number`` counts the mentions; ``what`` names the part of the program.
    """

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
    """The devices outside of the storages. Only TorchScript has ``attributes``, because it stores objects."""

    attributes: list[AttributeDevice]


class ProgramFacts(TypedDict, total=False):
    """The contents of a program as counts or names; each kind of program has some of these fields."""

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
    """A program in JSON reports: its kind, such as "a TorchScript archive", its contents, and the devices it names."""

    kind: str
    executable: bool
    devices: ProgramDevices


class Program(Container):
    """The container of a program; its graph holds the weights.

    ``kind`` is the name of the kind ("a TorchScript archive"). ``loader`` is the torch function that reads it.
    ``edits`` are the commands that edit it in its format. ``maps`` says whether the loader takes a map_location. Names
    in its pickles that start with one of ``own_names`` are not Python names. ``beside`` lists as text the contents
    other than the weights; ``described`` lists them for JSON. ``named_devices`` are devices named where edits do not
    reach. ``attribute_devices`` are devices of the program's objects outside of the state dict, with references into
    the graph. ``unnamed`` lists as text the contents with tensors that the state dict lacks.
    """

    kind: str
    loader: str
    edits: Collection[str]
    maps: bool = True
    own_names: tuple[str, ...] = ()
    beside: Sequence[str]
    unnamed: Sequence[str] = ()
    described: ProgramReport
    named_devices: Sequence[CodeDevice]
    attribute_devices: Sequence[DeviceName] = ()

    @property
    def lacking(self) -> str:
        """What a state dict would lack."""
        return f"a state dict would lack {join_limited(self.unnamed, most=3)}"

    @property
    def keeping(self) -> str:
        """The advice where a state dict would lack tensors."""
        return f"keep the program, which {self.loader} reads"


def program_of(checkpoint: Checkpoint) -> Program | None:
    """Return the container of a checkpoint if it is a program, else None."""
    container = checkpoint.container
    return container if isinstance(container, Program) else None


def extra_records(checkpoint: Checkpoint) -> dict[str, str]:
    """Return size and checksum, by name, of a program's records other than weights, except those that always differ."""
    weights, root = wanted_storages(checkpoint), f"{checkpoint.container.root}/"
    records = [record for record in checkpoint.container.records() if record.key not in weights]
    named = [(record.name.removeprefix(root), record) for record in records]
    return {
        name: f"{record.size:,} bytes, CRC-32 {record.crc or 0:08x}"
        for name, record in named
        if name not in ARCHIVE_RECORDS and not name.endswith(".debug_pkl")
    }


def convert_step(checkpoint: Checkpoint) -> NextStep:
    """Return the command that extracts the weights of a program, to the CPU if possible; else the advice to keep it."""
    path, program = checkpoint.path, program_of(checkpoint)
    if program is not None and program.unnamed:
        return as_step(f"{program.lacking}: {program.keeping}")
    output = suggested_output(path, "weights", ".pth")
    tags = {storage.location for storage in checkpoint.survey.reader.storages.values()}
    if program is not None and "remap" in program.edits and tags - {"cpu", "meta"}:
        return command("remap", path, output=output, to="cpu", to_format="torch", allow_loss="entries")
    return command("convert", path, output=output, allow_loss="entries")
