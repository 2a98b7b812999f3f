"""Files that are programs with weights beside them: what they are, and what a state dict of them would lack."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from .checkpoint import Checkpoint
from .human import argument, suggested_output
from .survey import DeviceName

__all__ = ["ABOUT", "NO_WEIGHTS", "PROGRAM", "NamedDevice", "Program", "convert_step", "program_of"]

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


class NamedDevice(NamedTuple):
    """A device that is named where no edit reaches it, such as a file of code, so many times; ``what`` names it."""

    where: str
    device: str
    number: int
    what: str = "the code"


class Program:
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


def convert_step(path: str) -> str:
    """The command that takes the weights out of a program."""
    output = suggested_output(path, "weights", ".pth")
    return f"ckptool convert {argument(path)} --allow-loss entries -o {argument(output)}"
