"""The get command: print one entry or tensor, or save it as .npy."""

from __future__ import annotations

import re

import click

import ckptool

from ..base.errors import RefusedError
from ..base.steps import as_step, command
from ..base.suffixes import CHECKPOINTS, SAFETENSORS
from ..base.text import human_bytes, shape_text
from ..checkpoint.checkpoint import file_mode
from ..files.archives import refuse_address
from ..files.downloads import expect_plan
from ..files.write.output import check_output, write_file
from ..formats.claims import claims_of
from ..reports.entries import entry_lines, find_value, json_pieces
from ..values.npy import array_of, npy_plan
from .help import GroupedCommand
from .options import AnyPath, completed, force_option, format_option, one_path
from .render import clean, emit, emit_pieces, say, say_problems


@click.command(cls=GroupedCommand)
@one_path
@click.argument("key", metavar="KEY", shell_complete=completed("keys"))
@click.option("-o", "--output", type=AnyPath(), metavar="OUT", help="Save the tensor as .npy, for numpy.load.")
@force_option
@format_option()
def get(path: str, key: str, output: str | None, force: bool, style: str) -> int:
    """Print one entry or tensor: a scalar as it is, a dict as a tree, a tensor with its numbers.

    A tensor of more than 1,000 elements is shown by its edges; --json and -o give all of it. This needs neither
    torch nor NumPy, and runs nothing in the file.
    """
    if style != "table" and output is not None:
        raise click.UsageError("--format and -o exclude each other.")
    if force and output is None:
        raise click.UsageError("--force is for -o.")
    if output is not None:
        refuse_address(output)
    with ckptool.open(path) as opened:
        say_problems(opened)
        checkpoint, place = find_value(opened, key)
        if output is not None:
            check_output(output, checkpoint.sources, force=force)
            array = array_of(checkpoint, place.ref, place.path)
            if output.lower().endswith(CHECKPOINTS):
                place_of = place.path or "."
                step = as_step(command("extract", path, place_of, output=output))
                if output.lower().endswith(SAFETENSORS):
                    step = as_step(command("edit", path, keep=place_of, output=output))
                raise RefusedError("get writes arrays (.npy)", path=output, next=step)
            if array.widened:
                say(f"{place.path or 'the tensor'}: {array.dtype} becomes {array.widened}, which has all its values")
            mode = file_mode(checkpoint.source)
            plan = npy_plan(array)
            plan = plan._replace(expected_checksums=claims_of(checkpoint, [plan]))
            expect_plan(plan, checkpoint.path)
            written = write_file(plan, output, checkpoint.sources, force=force, mode=mode)
            what = f"{array.widened or array.dtype} {shape_text(array.shape)}, {human_bytes(written.size)}"
            emit(clean(f"{path} {place.path or '.'} -> {written.path}: {what}"))
        elif style != "table":
            pieces = json_pieces(checkpoint, place.ref, place.path)
            # Strings in JSON contain no line breaks, so every line break here is layout between values.
            emit_pieces(pieces if style == "json" else (re.sub("\n *", "", piece) for piece in pieces))
        else:
            for line in entry_lines(checkpoint, place.ref, place.path):
                emit(clean(line))
    return 0
