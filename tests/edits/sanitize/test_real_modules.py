"""Real pickled modules: every tensor that stands in their files is in the state dict, bit for bit, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import oracle
import pytest
import torch
from conftest import CORPUS, needs_corpus

import ckptool

#: File, and the key under which it holds the module: "" for a file that is one.
MODULES = (("tracel-ai__burn__mnist.pt", ""), ("twtygqyy__pytorch-vdsr__model_epoch_50.pth", "model"))


@needs_corpus
@pytest.mark.parametrize(("name", "key"), MODULES)
def test_the_state_dict_is_what_the_file_holds(name: str, key: str, out: Path) -> None:
    with ckptool.open(CORPUS / name) as checkpoint:
        ckptool.save(ckptool.sanitize(checkpoint, as_state_dict=True), out)
        loaded = oracle.load(out)
        state = loaded[key] if key else loaded
        seen = set()
        for entry in checkpoint.survey.tensors:
            # model._modules.conv1._parameters.weight is conv1.weight.
            path = re.sub(r'\["?([^"\]]*)"?\]', r".\1", entry.path.removeprefix(key)).split(".")
            short = ".".join(step for step in path if step not in ("", "_modules", "_parameters", "_buffers"))
            span, tensor = checkpoint.container.stored(entry.tensor.storage).span, entry.tensor
            assert span is not None
            raw = bytearray(span.source.read(span.offset, span.size))
            values = torch.frombuffer(raw, dtype=getattr(torch, tensor.dtype))
            assert torch.equal(state[short], values.as_strided(tensor.shape, tensor.stride, tensor.offset)), short
            seen.add(short)
    assert seen == set(state)
