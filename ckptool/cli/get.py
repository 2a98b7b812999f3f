"""``get``."""

from __future__ import annotations

import click

import ckptool

from ..base.text import human_bytes
from ..checkpoint.checkpoint import file_mode
from ..files.write.output import check_output, write_plan
from ..reports.entry_json import json_pieces
from ..reports.entry_text import entry_lines
from ..reports.get import find_value
from ..values.npy import array_of, npy_plan
from .options import one_path
from .render import clean, emit, emit_pieces, say, say_problems

GET_EPILOG = """\b
Examples:
  ckptool get training.pth epoch
  ckptool get training.pth state_dict.conv1.weight
  ckptool get training.pth hyper_parameters --json
  ckptool get model.pth conv1.weight --npy weight.npy

\b
KEY is a path as inspect prints it; the dots in the keys of a state dict need no
quotes, "." is the whole file. With --json a tensor is a list in lists, NaN and
Inf are the texts "nan", "inf" and "-inf", bytes {"base64": ...}, objects of other
classes {"class": ..., "attributes": ...}, quantized tensors their integers and
scale; what is in itself, or long and written before, is {"ref": path}.
A .npy file is little-endian; bfloat16 and float8, which NumPy does not have, are
widened to float32, which holds every value of them.
"""


@click.command(epilog=GET_EPILOG)
@one_path
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
@click.option("--npy", metavar="OUT", type=click.Path(), help="Write the tensor to a file that numpy.load reads.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def get(path: str, key: str, as_json: bool, npy: str | None, force: bool) -> int:
    """Print one entry or tensor: a scalar as it is, a dict as a tree, a tensor with its numbers.

    A tensor of more than 1,000 elements is shown by its edges; --json and --npy give all of it. This needs neither
    torch nor NumPy, and runs nothing in the file.
    """
    if as_json and npy is not None:
        raise click.UsageError("--json and --npy exclude each other.")
    if force and npy is None:
        raise click.UsageError("--force is for --npy.")
    with ckptool.open(path) as opened:
        say_problems(opened)
        checkpoint, found = find_value(opened, key)
        if npy is not None:
            check_output(npy, checkpoint.sources, force=force)
            array = array_of(checkpoint, found.ref, found.path)
            if array.widened:
                say(f"{found.path or 'the tensor'}: {array.dtype} becomes {array.widened}, which holds all its values")
            written = write_plan(
                npy_plan(array), npy, checkpoint.sources, force=force, mode=file_mode(checkpoint.source)
            )
            shape = "x".join(map(str, array.shape)) or "scalar"
            what = f"{array.widened or array.dtype} {shape}, {human_bytes(written.size)}"
            emit(clean(f"{path} {found.path or '.'} -> {written.path}: {what}"))
        elif as_json:
            emit_pieces(json_pieces(checkpoint, found.ref, found.path))
        else:
            for line in entry_lines(checkpoint, found.ref, found.path):
                emit(clean(line))
    return 0
