"""Constants of a torch.export archive that are no tensors are pickles, which torch.export.load runs. They stand where
storages do in files of torch.save, and so nobody looked into them: ``validate`` called an attack valid."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("echo attacked",)


def archive(path: Path, name: str, data: bytes) -> Path:
    config = json.dumps({"config": {}})
    inputs = io.BytesIO()
    torch.save(((), {}), inputs)
    records = {
        "data/weights/model_weights_config.json": config,
        "data/constants/model_constants_config.json": config,
        "data/sample_inputs/model.pt": inputs.getvalue(),
        "models/model.json": "{}",
        "archive_format": "pt2",
        "archive_version": "0",
    }
    with zipfile.ZipFile(path, "w") as target:
        for record, content in (records | {name: data}).items():
            target.writestr(f"m/{record}", content)
    return path


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_constants(protocol: int, tmp_path: Path) -> None:
    path = archive(tmp_path / "m.pt2", "data/constants/opaque_obj_0", pickle.dumps(Attack(), protocol))
    said = say("validate", path)
    assert said.code == 1 and "echo attacked" in said.all
    assert "1 pickled object (data/constants/opaque_obj_0)" in say("inspect", path).all


def test_inputs(tmp_path: Path) -> None:
    """These torch.export.load reads with weights_only first, and without where that refuses."""
    data = io.BytesIO()
    torch.save(((Attack(),), {}), data)
    said = say("validate", archive(tmp_path / "m.pt2", "data/sample_inputs/model.pt", data.getvalue()))
    assert said.code == 1 and "echo attacked" in said.all
