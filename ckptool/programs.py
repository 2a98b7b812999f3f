"""Files that are programs with weights beside them: what they are, and what a state dict of them would lack."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from shlex import quote
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from .checkpoint import Checkpoint

__all__ = ["ABOUT", "PROGRAM", "NamedDevice", "Program", "convert_step", "program_of"]

#: The code of the problem that says so, and those of all that is said of a program.
PROGRAM: Final = "program"
ABOUT: Final = frozenset((PROGRAM, "program-parts", "code-devices", "code-unread", "code-missing", "hidden-state"))


class NamedDevice(NamedTuple):
    """A device that the program names where no edit reaches it: in a file of code, so many times."""

    where: str
    device: str
    number: int


@runtime_checkable
class Program(Protocol):
    """What a container of a program tells beside its graph, which is the state dict."""

    @property
    def kind(self) -> str:
        """What it is, in words: "a TorchScript archive"."""
        ...

    @property
    def loader(self) -> str:
        """What of torch reads it: "torch.jit.load"."""
        ...

    @property
    def edits(self) -> Collection[str]:
        """The commands that edit it as it is."""
        ...

    @property
    def beside(self) -> Sequence[str]:
        """What it holds beside the state dict, each in words."""
        ...

    @property
    def described(self) -> Mapping[str, Any]:
        """The same as JSON-ready data."""
        ...

    @property
    def named_devices(self) -> Sequence[NamedDevice]:
        """Devices named where no edit reaches them."""
        ...


def program_of(checkpoint: Checkpoint) -> Program | None:
    """The container of a checkpoint where it is one of a program."""
    container = checkpoint.container
    return container if isinstance(container, Program) else None


def convert_step(path: str) -> str:
    """The command that takes the weights out of a program."""
    stem = path.rpartition(".")[0] or path
    return f"ckptool convert {quote(path)} --allow-loss entries -o {quote(stem + '.weights.pth')}"
