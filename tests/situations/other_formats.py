"""Situations in which the file has another format than its reader expects, or is damaged."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import torch
from conftest import FIXTURES
from stand_ins import Net, state
from torch import nn

from .situation import Situation, error_of, holds, register

SITUATIONS: list[Situation] = []
situation = register(SITUATIONS)


def in_bytes(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@situation(ends=holds(entry="weight"))
def gpt_sovits() -> str:
    Path("s2Gv2Pro.pth").write_bytes(b"05" + in_bytes({"weight": state(), "config": {"lr": 1}, "info": "v2Pro"})[2:])
    return error_of(torch.load, "s2Gv2Pro.pth")


@situation()
def lfs_pointer() -> str:
    shutil.copy(FIXTURES / "lfs_pointer.pth", "model.pth")
    return error_of(torch.load, "model.pth", weights_only=False)


@situation()
def web_page() -> str:
    Path("model.pth").write_text("<!DOCTYPE html>\n<html><body>Sign in</body></html>\n", encoding="utf-8")
    return error_of(torch.load, "model.pth", weights_only=False)


@situation(ends=lambda output: _has_some(output))
def broken_download() -> str:
    whole = in_bytes({f"layers.{number}.weight": torch.ones(64, 64) for number in range(4)})
    Path("model.pth").write_bytes(whole[: len(whole) * 2 // 3])
    return error_of(torch.load, "model.pth")


def _has_some(output: str) -> None:
    value = torch.load(output, weights_only=True)
    assert value and all(torch.equal(each, torch.ones(64, 64)) for each in value.values())


@situation(ends=lambda output: _has_some(output))
def wrong_size() -> str:
    value = {f"layers.{number}.weight": torch.ones(64, 64) for number in range(4)}
    torch.save(value, "whole.pth", _use_new_zipfile_serialization=False)
    data = Path("whole.pth").read_bytes()
    Path("model.pth").write_bytes(data[: len(data) * 2 // 3])
    os.remove("whole.pth")
    return error_of(torch.load, "model.pth")


@situation(ends=holds())
def zip_of_a_folder() -> str:
    with zipfile.ZipFile("model.zip", "w") as archive:
        archive.writestr("release/README.md", "# Weights\n")
        archive.writestr("release/model.pth", in_bytes(state()))
    return error_of(torch.load, "model.zip")


@situation(ends=holds())
def unpacked() -> str:
    torch.save(state(), "archive.pth")
    with zipfile.ZipFile("archive.pth") as archive:
        archive.extractall(".")
    os.rename("archive", "best_seen.pth")
    os.remove("archive.pth")
    return error_of(torch.load, "best_seen.pth")


@situation(ends=holds())
def gzipped() -> str:
    with tarfile.open("model.pth.tar.gz", "w:gz") as archive:
        data = in_bytes(state())
        member = tarfile.TarInfo("model.pth")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return error_of(torch.load, "model.pth.tar.gz", weights_only=False)


class Program(nn.Module):
    """What a TorchScript archive is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = Net().fc

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


WEIGHTS = {"fc.weight": torch.ones(2, 4), "fc.bias": torch.zeros(2)}


def save_program(path: str) -> None:
    model = Program()
    model.load_state_dict(WEIGHTS)
    torch.jit.script(model).save(path)


@situation(ends=holds(WEIGHTS))
def torchscript() -> str:
    save_program("model.pt")
    return error_of(torch.load, "model.pt")


@situation(ends=lambda output: _is_legacy(output))
def old_torch() -> str:
    torch.save(state(), "model.pth")
    return "RuntimeError: model.pth is a zip archive (did you mean to use torch.jit.load()?)"


def _is_legacy(output: str) -> None:
    assert not zipfile.is_zipfile(output)
    holds()(output)
