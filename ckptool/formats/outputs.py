"""The formats that ckptool writes: one record of facts for each, and the writer module, imported on first use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol, cast

from ..base import lazy
from ..base.records import NamedTuple
from ..base.suffixes import SAFETENSORS, TORCH

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint, Target
    from ..files.sources import FolderPlan, Plan
    from .losses import Fit, Promise


class Writer(Protocol):
    """The functions of a writer module.

    ``plan`` returns the output, and whether its pickle is proven byte-exact. ``promise`` returns what the output must
    hold, derived from the checkpoint alone. Formats of ``TARGETS`` also have ``fit``: it returns what the format cannot
    hold, and raises TargetError for a target that the format has no place for.
    """

    def plan(self, checkpoint: Checkpoint, target: Target) -> tuple[Plan | FolderPlan, bool]: ...

    def promise(self, checkpoint: Checkpoint, target: Target) -> Promise: ...

    def fit(self, checkpoint: Checkpoint, target: Target) -> Fit: ...


class OutputFormat(NamedTuple):
    """A format that ckptool writes; ``module`` has the functions of ``Writer``.

    - ``suffixes``: the file name suffixes that select it; ``extension`` is the one for suggested names.
    - ``reads_as``: the name under which a reader knows the output; "" for an input with another pickle.
    - ``like``: the name of the format that ``convert`` would write, for such an input; else its own name.
    - ``folder``: it is always a folder of files. ``shards``: it can be split into shards on request.
    - ``one_state_dict``: it holds one state dict and nothing else.
    - ``plain``: it cannot hold the part that one rank has of a tensor, except as a plain tensor.
    - ``checksums``: it records them. ``every_record``: all records but the pickles are copied whole.
    - ``layout``: the program whose layout it has. ``loader``: the function that loads it.
    - ``misread``: the consequence of its suffix on a file of another format.
    """

    name: str
    module: str
    suffixes: tuple[str, ...] = ()
    extension: str = ".pth"
    reads_as: str = ""
    like: str = ""
    folder: bool = False
    shards: bool = False
    one_state_dict: bool = False
    plain: bool = False
    checksums: bool = True
    every_record: bool = False
    layout: str = "torch.save"
    loader: str = "torch.load"
    misread: str = ""

    def writer(self, shard_size: int = 0) -> Writer:
        """Return the writer module; ``shard_size`` is not 0 for a folder of shards."""
        return cast(Writer, lazy.module(f"formats.{'hf.writer' if shard_size else self.module}"))

    def holds_one(self, shard_size: int) -> bool:
        """Return whether an output holds one state dict and nothing else."""
        return self.one_state_dict or bool(shard_size)


#: Every format by its name, which is also the ``format`` of a ``Target`` and the ``writes_as`` of ``Traits``.
OUTPUTS: Final[Mapping[str, OutputFormat]] = {
    known.name: known
    for known in (
        OutputFormat(
            "torch",
            "torch.zip_writer",
            TORCH,
            reads_as="torch-zip",
            like="torch",
            shards=True,
            misread="older versions of torch.load refuse it",
        ),
        OutputFormat(
            "safetensors",
            "safetensors.writer",
            (SAFETENSORS,),
            SAFETENSORS,
            reads_as="safetensors",
            like="safetensors",
            shards=True,
            one_state_dict=True,
            plain=True,
            checksums=False,
            layout="safetensors",
            loader="safetensors.torch.load_file",
            misread="no library would load it",
        ),
        OutputFormat(
            "gguf", "gguf.writer", (".gguf",), ".gguf", like="gguf", checksums=False, layout="GGUF", loader="gguf-py"
        ),
        OutputFormat("dcp", "dcp.writer", (".dcp",), ".dcp", "dcp", "dcp", folder=True, plain=True),
        OutputFormat("legacy", "torch.legacy_writer", reads_as="torch-legacy", like="torch", checksums=False),
        OutputFormat("same", "repickled", like="torch", shards=True, every_record=True),
        OutputFormat("program", "programs.writer", like="torch", every_record=True),
    )
}

#: The names of the formats that can be asked for.
TARGETS: Final = tuple(name for name, known in OUTPUTS.items() if known.reads_as)


def named_format(path: str) -> OutputFormat | None:
    """Return the format that the suffix of a file name means, or None."""
    name = os.path.basename(path).lower()
    return next((known for known in OUTPUTS.values() if known.suffixes and name.endswith(known.suffixes)), None)
