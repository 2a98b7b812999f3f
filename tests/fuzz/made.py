"""Clean inputs to begin with, made by the libraries themselves: small, and with everything that has a rule."""

from __future__ import annotations

import io
import json
import tempfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .ggufs import base
from .texts import bases as texts


class Made(NamedTuple):
    """A clean input: its kind, and its files."""

    kind: str
    files: Callable[[], dict[str, bytes]]


def _saved(value: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def _numbers(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) + 1).to(dtype)


def _plain() -> Any:
    return OrderedDict(
        [("module.a.weight", _numbers(6).view(2, 3)), ("module.a.bias", _numbers(2)), ("module.n", torch.tensor(3))]
    )


def _views() -> Any:
    base = _numbers(12)
    return {
        "a": base[:6].view(2, 3).t(),
        "b": base[3:9],
        "c": base,
        "d": base[::2],
        "e": base[0].expand(3),
        "f": torch.empty(0),
        "g": base[5],
    }


def _kinds() -> Any:
    square, tagged = _numbers(4).view(2, 2), _numbers(2)
    tagged.tag = "x"
    scales, zeros = torch.tensor([0.5, 1.0]), torch.tensor([0, 1])
    made = {"p": torch.nn.Parameter(square.clone()), "buffer": torch.nn.Buffer(_numbers(2)), "tagged": tagged}
    made |= {"q": torch.quantize_per_tensor(_numbers(4), 0.5, 1, torch.qint8)}
    made |= {"qc": torch.quantize_per_channel(square, scales, zeros, 0, torch.qint8)}
    made |= {"coo": torch.eye(2).to_sparse(), "csr": torch.eye(2).to_sparse_csr()}
    made |= {"meta": torch.empty(2, 2, device="meta"), "grad": _numbers(2).requires_grad_()}
    made |= {"conj": torch.tensor([1 + 2j, 3j]).conj(), "neg": torch._neg_view(_numbers(2))}
    made |= {"f8": _numbers(2).to(torch.float8_e4m3fn), "bool": torch.tensor([True, False])}
    return made | {"bf": _numbers(2, torch.bfloat16), "u16": _numbers(2, torch.uint16)}


def _training() -> Any:
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_numbers(parameter.numel()).view(parameter.shape))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"module." + key: value for key, value in model.state_dict().items()}
    return {
        "state_dict": state,
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "args": {"lr": 0.1, "name": "x"},
        "best": None,
    }


def _objects() -> Any:
    counts: defaultdict[str, int] = defaultdict(int, a=1)
    plain = {"size": torch.Size([1, 2]), "dtype": torch.float16, "device": torch.device("cpu"), "counts": dict(counts)}
    plain |= {"counter": Counter("aab"), "ordered": OrderedDict(a=1), "set": {1, 2}, "frozen": frozenset([1])}
    plain |= {"bytes": b"\x00\xff", "array": bytearray(b"ab"), "complex": 1 + 2j, "tuple": (1, (2, 3)), "big": 1 << 70}
    keys = {1: "one", (1, 2): "pair", b"k": "bytes", None: 0, 1.5: 1, "float": 0.5, "text": "caf\u00e9"}
    nested = {"weights": {"a.b": _numbers(2), "c": [_numbers(1), (_numbers(2),)]}}
    return {**plain, **keys, "nested": nested, "storage": _numbers(2).untyped_storage()}


def _shared() -> Any:
    one = _numbers(3)
    inner = {"a": one}
    return {
        "x": inner,
        "y": inner,
        "z": [one, one, one.view(3, 1)],
        "s": {"a": one, "b": _numbers(2), "a.b": _numbers(1)},
    }


def _modules() -> Any:
    """A state dict with _metadata, as a real module gives it."""
    return torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2)).state_dict()


_VALUES: dict[str, Callable[[], Any]] = {
    "plain": _plain,
    "views": _views,
    "kinds": _kinds,
    "training": _training,
    "objects": _objects,
    "shared": _shared,
    "tensor": lambda: _numbers(4),
    "modules": _modules,
}
#: What the legacy format holds: no storage without a class of its own.
_OLD = ("plain", "views", "training", "shared", "tensor", "modules")


def _legacy(value: Any, **options: Any) -> bytes:
    return _saved(value, _use_new_zipfile_serialization=False, **options)


def _safetensors(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    from safetensors.torch import save

    return save(tensors, metadata)


def _many() -> dict[str, torch.Tensor]:
    types = (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
        *(torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32),
        *(torch.uint64, torch.complex64),
    )
    return {f"t.{str(dtype)[6:]}": _numbers(3, dtype) for dtype in types}


def _few() -> dict[str, torch.Tensor]:
    return {
        "module.a.weight": _numbers(6).view(2, 3),
        "module.a.bias": _numbers(2),
        "s": torch.tensor(1.0),
        "e": torch.empty(0, 3),
    }


def _sharded(ending: str, save: Callable[[Any], bytes]) -> dict[str, bytes]:
    """As huggingface_hub writes shards, with an index."""
    parts = [
        {"a.weight": _numbers(6).view(2, 3), "a.bias": _numbers(2)},
        {"b.weight": _numbers(4)},
        {"c": torch.tensor([1.0])},
    ]
    stem = "model" if ending == "safetensors" else "pytorch_model"
    files: dict[str, bytes] = {}
    places: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"{stem}-{number:05}-of-{len(parts):05}.{ending}"
        files[name] = save(part)
        places |= dict.fromkeys(part, name)
    total = sum(tensor.nbytes for part in parts for tensor in part.values())
    files[f"{stem}.{ending}.index.json"] = json.dumps(
        {"metadata": {"total_size": total}, "weight_map": places}
    ).encode()
    return files


def _ranks(ranks: int) -> dict[str, bytes]:
    from dcp_folders import write_ranks

    state = {
        "model.a.weight": _numbers(12).view(4, 3),
        "model.a.bias": _numbers(4),
        "model.s": torch.tensor(2.0),
        "epoch": 3,
        "opt.lr": [0.1],
    }
    with tempfile.TemporaryDirectory() as folder:
        found = write_ranks(Path(folder) / "dcp", state, ranks)
        return {path.name: path.read_bytes() for path in sorted(found.iterdir())}


def _by_dcp() -> dict[str, bytes]:
    """As torch writes it in one process."""
    import torch.distributed.checkpoint as dcp

    state = {
        "model": {"a.weight": _numbers(6).view(2, 3), "a.bias": _numbers(2)},
        "optim": {"lr": 0.5, "step": torch.tensor(1)},
        "epoch": 3,
    }
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def _all() -> dict[str, Made]:
    def one(data: Callable[[], bytes]) -> Callable[[], dict[str, bytes]]:
        return lambda: {"": data()}

    found: dict[str, Made] = {}
    for name, value in _VALUES.items():
        found[f"made-{name}.pth"] = Made("zip", one(lambda value=value: _saved(value())))  # type: ignore[misc]
        if name in _OLD:
            found[f"made-{name}-legacy.pth"] = Made("legacy", one(lambda value=value: _legacy(value())))  # type: ignore[misc]
    for protocol in (0, 1, 3, 4, 5):
        found[f"made-protocol{protocol}.pth"] = Made(
            "zip", one(lambda p=protocol: _saved(_training(), pickle_protocol=p))
        )  # type: ignore[misc]
    found["made-few.safetensors"] = Made("safetensors", one(lambda: _safetensors(_few(), {"format": "pt"})))
    found["made-many.safetensors"] = Made("safetensors", one(lambda: _safetensors(_many())))
    found["made-llama.gguf"] = Made("gguf", one(lambda: base("llama")))
    found["made-other.gguf"] = Made("gguf", one(lambda: base("other", alignment=8)))
    found["made-big.gguf"] = Made("gguf", one(lambda: base("llama", ">")))
    found["made-hf-safetensors"] = Made(
        "hf", lambda: _sharded("safetensors", lambda part: _safetensors(part, {"format": "pt"}))
    )
    found["made-hf-bin"] = Made("hf", lambda: _sharded("bin", _saved))
    found["made-dcp-1"] = Made("dcp", lambda: _ranks(1))
    found["made-dcp-3"] = Made("dcp", lambda: _ranks(3))
    found["made-dcp-torch"] = Made("dcp", _by_dcp)
    for name, text in texts():
        found[name] = Made("text", one(lambda text=text: text))  # type: ignore[misc]
    return found


MADE = _all()
