"""GGUF is written by llama.cpp; ckptool only says so."""

from __future__ import annotations

from typing import NoReturn

from ...base.errors import RefusedError
from ...base.steps import command, suggested_output
from ...checkpoint.checkpoint import Checkpoint, Target


def plan(checkpoint: Checkpoint, target: Target) -> NoReturn:
    """Raise RefusedError, with the command that takes the weights out."""
    what = "llama.cpp writes GGUF, ckptool reads it: convert_hf_to_gguf.py makes it from a folder of safetensors"
    output = suggested_output(checkpoint.path, "plain", ".safetensors")
    raise RefusedError(what, path=checkpoint.path, next=command("convert", checkpoint.path, output=output))


promise = plan
