"""``scan`` judges a pickle in a tensor, as TransformerEngine unpickles it, in every format that holds tensors."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from crafted_files import SYSTEM, by_key, dumped
from dcp_folders import write_ranks
from packed_files import Recorded, tarred
from safetensors.torch import save_file

from ckptool.reports.scan import FileScan, scan_path
from ckptool.reports.validate import validation_report


def _scan(path: str) -> FileScan:
    (report,) = scan_path(path)
    return report


def _in_torch_file() -> bytes:
    torch.save({"x": Recorded()}, out := io.BytesIO())
    return out.getvalue()


CALLS = {
    "protocol 4": pickle.dumps(Recorded()),
    "protocol 2": pickle.dumps({"scale": 1.0, "x": Recorded()}, 2),
    "protocol 0": pickle.dumps(Recorded(), 0),
    "second pickle": dumped({"a": 1}) + dumped(SYSTEM),
    "behind long bytes": pickle.dumps({"pad": bytes(100_000), "x": Recorded()}),
    "behind long text": b"T" + (70_000).to_bytes(4, "little") + b"x" * 70_000 + b"0" + pickle.dumps(Recorded(), 0),
    "in a file of torch": _in_torch_file(),
}


def _tensor(data: bytes, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    data += bytes(-len(data) % 8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


def _offset(data: bytes) -> torch.Tensor:
    return torch.cat([torch.full((13,), 7, dtype=torch.uint8), _tensor(data)])[13:]


def _every_second(data: bytes) -> torch.Tensor:
    return torch.stack([_tensor(data), torch.zeros_like(_tensor(data))], 1)[:, 0]


def _transposed(data: bytes) -> torch.Tensor:
    plain = _tensor(data + bytes(-len(data) % 16)).view(-1, 4)
    return plain.t().contiguous().t()


#: Ways in which a tensor may have the bytes as its values.
LAYOUTS: dict[str, Callable[[bytes], torch.Tensor]] = {
    "uint8": _tensor,
    "int8": lambda data: _tensor(data, torch.int8),
    "bool": lambda data: _tensor(data, torch.bool),
    "float32": lambda data: _tensor(data, torch.float32),
    "a view": _offset,
    "strided": _every_second,
    "transposed": _transposed,
}


def _save_zip(state: dict[str, torch.Tensor], folder: Path, new: bool = True) -> Path:
    torch.save(state, folder / "m.pth", _use_new_zipfile_serialization=new)
    return folder / "m.pth"


def _save_safetensors(state: dict[str, torch.Tensor], folder: Path) -> Path:
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, folder / "m.safetensors")
    return folder / "m.safetensors"


def _save_folder(state: dict[str, torch.Tensor], folder: Path) -> Path:
    (folder / "hf").mkdir()
    _save_safetensors(state, folder).rename(folder / "hf" / "model.safetensors")
    (folder / "hf" / "config.json").write_text("{}")
    return folder / "hf"


def _save_dcp(state: dict[str, torch.Tensor], folder: Path) -> Path:
    write_ranks(folder / "dcp", state, 1)
    return folder / "dcp"


def _save_in_tar(state: dict[str, torch.Tensor], folder: Path) -> Path:
    (folder / "x.tar.gz").write_bytes(tarred(_save_zip(state, folder).read_bytes(), "a/m.pth", "w:gz"))
    return folder / "x.tar.gz"


FORMATS: dict[str, Callable[[dict[str, torch.Tensor], Path], Path]] = {
    "zip": _save_zip,
    "legacy": lambda state, folder: _save_zip(state, folder, new=False),
    "safetensors": _save_safetensors,
    "folder": _save_folder,
    "dcp": _save_dcp,
    "in a tar": _save_in_tar,
}


@pytest.mark.parametrize("save", by_key(FORMATS))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_a_tensor_is_unsafe(
    name: str, layout: str, save: Callable[[dict[str, torch.Tensor], Path], Path], tmp_path: Path
) -> None:
    key = "layer._extra_state"
    if (layout, save) == ("bool", _save_dcp):
        pytest.skip("the helper clones tensors, and a clone has 1 for every other byte")
    tensor = LAYOUTS[layout](CALLS[name])
    # The bytes that ``set_extra_state`` of TransformerEngine gives to ``pickle.loads``.
    assert tensor.detach().cpu().numpy().tobytes().startswith(CALLS[name])
    path = save({"layer.weight": torch.ones(2, 2), key: tensor}, tmp_path)
    report = _scan(str(path))
    assert report["verdict"] == "unsafe", report
    assert "posix.system('true')" in report["reasons"][0]
    assert validation_report(str(path))["runs_code"]


@pytest.mark.parametrize("save", by_key(FORMATS))
@pytest.mark.parametrize("key", ["layer._extra_state", "weird.buffer"])
def test_a_plain_pickle_in_a_tensor_is_unknown(
    key: str, save: Callable[[dict[str, torch.Tensor], Path], Path], tmp_path: Path
) -> None:
    path = save({"w": torch.ones(2, 2), key: _tensor(pickle.dumps({"scale": 1.0, "amax": [1, 2]}))}, tmp_path)
    report = _scan(str(path))
    assert (report["verdict"], len(report["reasons"])) == ("unknown", 1), report
    assert key in report["reasons"][0]
    if save is not _save_in_tar:
        assert validation_report(str(path))["valid"]


@pytest.mark.parametrize("save", by_key(FORMATS))
def test_tensors_of_bytes_without_a_pickle_are_weights_only(
    save: Callable[[dict[str, torch.Tensor], Path], Path], tmp_path: Path
) -> None:
    chance = np.random.default_rng(7)
    state = {f"q.{number}": torch.from_numpy(chance.integers(0, 256, 3000, dtype=np.uint8)) for number in range(200)}
    state |= {f"s.{number}": torch.full((64,), number, dtype=torch.uint8) for number in range(256)}
    state |= {f"i.{number}": torch.arange(number, number + 200).to(torch.int8) for number in range(0, 256, 5)}
    state |= {"rng": torch.get_rng_state(), "mask": torch.ones(9, dtype=torch.bool), "x._extra_state": torch.empty(0)}
    state |= {"y._extra_state": torch.randn(100), "z._extra_state": torch.zeros(40, dtype=torch.uint8)}
    report = _scan(str(save(state, tmp_path)))
    assert (report["verdict"], report["reasons"]) == ("weights-only", [])
