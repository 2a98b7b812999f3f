"""Checkpoints that a real GPU wrote: tags, devices and values as torch itself sees them. Skipped without CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptool

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GPU = "cuda:0"


def _trained() -> dict[str, Any]:
    """A training checkpoint: model, Adam, gradient scaler, scheduler and random states."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(4, 8, device=GPU)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "scheduler": schedule.state_dict(),
        "cuda_rng": torch.cuda.get_rng_state_all(),
        "device": torch.device(GPU),
        "map": "cuda:0",
    }


def _views() -> dict[str, Any]:
    """Views of one storage, strides, and lazy bits on the GPU."""
    base = torch.arange(64, dtype=torch.float32, device=GPU)
    image = torch.randn(2, 3, 4, 5, device=GPU).to(memory_format=torch.channels_last)
    complex_ = torch.randn(4, dtype=torch.complex64, device=GPU)
    return {
        "base": base,
        "rows": base.view(8, 8)[::2],
        "column": base.view(8, 8).t()[3],
        "image": image,
        "conj": complex_.conj(),
        "expanded": torch.ones(1, device=GPU).expand(6),
        "empty": torch.empty(0, 3, device=GPU),
        "scalar": torch.tensor(2.5, device=GPU),
        "host": torch.ones(3),
        "pinned": torch.ones(3).pin_memory(),
        "parameter": torch.nn.Parameter(torch.ones(2, device=GPU)),
    }


def _dtypes() -> dict[str, Any]:
    """A tensor of each dtype. Torch cannot read float8 and unsigned ones back from the legacy format."""
    names = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"]
    names += ["complex64", "complex128"]
    return {name: torch.ones(5, device=GPU).to(getattr(torch, name)) for name in names}


def _new_dtypes() -> dict[str, Any]:
    names = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint16", "uint32", "uint64")
    return {name: torch.ones(5, device=GPU).to(getattr(torch, name)) for name in names}


def _sparse() -> dict[str, Any]:
    coo = torch.eye(4, device=GPU).to_sparse()
    return {"coo": coo, "csr": torch.eye(4, device=GPU).to_sparse_csr(), "dense": torch.eye(4, device=GPU)}


def _compiled() -> dict[str, Any]:
    model = torch.compile(torch.nn.DataParallel(torch.nn.Linear(4, 4).to(GPU), device_ids=[0]))
    return {"state_dict": model.state_dict(), "epoch": 3}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "trained": _trained,
    "views": _views,
    "dtypes": _dtypes,
    "new dtypes": _new_dtypes,
    "sparse": _sparse,
    "compiled": _compiled,
}


@pytest.fixture(
    params=[
        f"{name}-{form}" for name in CASES for form in ("zip", "legacy") if (name, form) != ("new dtypes", "legacy")
    ]
)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint saved from the GPU, in the zip format or the one before torch 1.6."""
    name, _, form = request.param.partition("-")
    path = tmp_path / "gpu.pth"
    torch.save(CASES[name](), path, _use_new_zipfile_serialization=form == "zip")
    return path


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """The tensors in a loaded object, by path."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {name: leaf for key, inner in items for name, leaf in _leaves(inner, f"{path}/{key}").items()}


def _equal(one: Any, other: Any) -> None:
    """Assert that two loaded objects have equal tensors: dtype, device, shape, strides, and every bit."""
    ours, theirs = _leaves(one), _leaves(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        twin = theirs[name]
        assert (tensor.dtype, tensor.device, tensor.shape, tensor.layout) == (
            twin.dtype,
            twin.device,
            twin.shape,
            twin.layout,
        ), name
        if tensor.layout is torch.strided:
            assert tensor.stride() == twin.stride(), name
        a, b = (value.detach().resolve_conj().resolve_neg().to_dense().cpu().contiguous() for value in (tensor, twin))
        assert a.flatten().view(torch.uint8).equal(b.flatten().view(torch.uint8)) if a.numel() else True, name


def _load(path: Path, **how: Any) -> Any:
    return torch.load(path, weights_only=True, **how)


def test_remap_to_the_cpu_is_what_map_location_does(written: Path, tmp_path: Path) -> None:
    """The output needs no GPU, and no other tensor."""
    out = tmp_path / "cpu.pth"
    with ckptool.open(written) as checkpoint:
        ckptool.save(ckptool.remap(checkpoint, "cpu"), out)
    loaded = _load(out)
    assert {tensor.device.type for tensor in _leaves(loaded).values()} == {"cpu"}
    _equal(loaded, _load(written, map_location="cpu"))


def test_a_tag_of_another_gpu_comes_back(written: Path, tmp_path: Path) -> None:
    """Remapped to a device that does not exist here, torch refuses the file; mapped back, it is the same again."""
    away, back = tmp_path / "away.pth", tmp_path / "back.pth"
    with ckptool.open(written) as checkpoint:
        ckptool.save(ckptool.remap(checkpoint, {"cuda:0": "cuda:7"}), away)
    with pytest.raises(RuntimeError, match="CUDA device 7") as refusal:
        _load(away)
    assert f"remap {away} --to cuda:0" in _ckptool("explain", str(refusal.value), str(away)).stdout
    with ckptool.open(away) as checkpoint:
        ckptool.save(ckptool.remap(checkpoint, {"cuda:7": "cuda:0"}), back)
    _equal(_load(back), _load(written))


def test_a_device_that_is_hidden(written: Path, tmp_path: Path) -> None:
    """With no visible GPU, torch refuses the file, and the command that ``explain`` prints makes it load."""
    program = "import sys, torch; torch.load(sys.argv[1], weights_only=True)"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run([sys.executable, "-c", program, written], env=hidden, capture_output=True, text=True)
    assert ran.returncode and "Attempting to deserialize object on a CUDA device" in ran.stderr
    assert "--to cpu" in _ckptool("explain", ran.stderr, str(written)).stdout
    out = tmp_path / "cpu.pth"
    assert _ckptool("remap", str(written), "--to", "cpu", "-o", str(out)).returncode == 0
    subprocess.run([sys.executable, "-c", program, out], env=hidden, check=True)


def test_distributed_checkpoint_of_a_gpu(tmp_path: Path) -> None:
    """A folder that FSDP2 saved from the GPU has the same tensors in one file."""
    program = """
import os, sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, StateDictOptions
from torch.distributed.fsdp import fully_shard
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
dist.init_process_group("nccl")
torch.cuda.set_device(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)).cuda()
fully_shard(model)
dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=sys.argv[1] + "/dcp")
torch.save(get_model_state_dict(model), sys.argv[1] + "/shard.pth")
torch.save(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), sys.argv[1] + "/full.pth")
dist.destroy_process_group()
"""
    ran = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    if ran.returncode:
        pytest.skip(ran.stderr[-300:])
    full = _load(tmp_path / "full.pth", map_location="cpu")
    for name, command in (
        ("dcp", ("convert",)),
        ("shard.pth", ("convert", "--to-format", "torch", "--allow-loss", "shards")),
    ):
        out = tmp_path / f"{name}.out.pth"
        written = _ckptool(*command, str(tmp_path / name), "-o", str(out))
        assert written.returncode == 0, written.stderr
        loaded = _load(out, map_location="cpu")
        _equal(loaded.get("model", loaded), dict(full))


def _ckptool(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ckptool", *words], capture_output=True, text=True)
