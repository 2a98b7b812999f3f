"""Files for the benchmark to measure on, and the program that makes them with torch.

`python -m bench.files KIND PATH ...` makes one file in its own process, so that the measuring process never holds
torch and two gigabytes of tensors.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# Part of each file name. Raise it with every change of the recipe below, so that older files are not reused.
RECIPE = 2
PREFIX = "module."
TAG = "cuda:0"
_PARTS = ("attn.query", "attn.key", "attn.value", "attn.out", "mlp")
_TENSORS_PER_LAYER = 2 * len(_PARTS)
# Bytes that torch.save adds to the data of one tensor here (measured: 345 to 380): its part of the pickle, a zip
# header, the padding to 64 bytes and an entry in the zip directory.
_OVERHEAD = 400
#: The number of ranks that write a DeepSpeed folder.
ZERO_RANKS = 2
_SMALL_TENSORS, _SMALL_SIDE = 10, 16


class Spec(NamedTuple):
    """A checkpoint with `tensors` float32 tensors of `rows` x `columns` elements. If `sparse`, its data are holes."""

    label: str
    tensors: int
    rows: int
    columns: int
    sparse: bool = False

    @property
    def name(self) -> str:
        """The name of the file in the work folder."""
        kind = "sparse" if self.sparse else "input"
        return f"{kind}-{self.tensors}x{self.rows}x{self.columns}-r{RECIPE}.pt"

    @property
    def size(self) -> int:
        """The bytes that the file takes on the disk, estimated a little too high."""
        data = 0 if self.sparse else self.rows * self.columns * 4
        return self.tensors * (data + _OVERHEAD + (4096 if self.sparse else 0))


# 5,000,000 bytes per tensor is not a multiple of 64 or 4096. As in real files, the records need padding.
BIG = Spec("2 GB, 400 tensors", 400, 1000, 1250)
MANY = Spec("20,000 tensors", 20_000, 1, 220)
LARGE = Spec("200,000 tensors", 200_000, 1, 220)
ONES = Spec("20,000 tensors of one element", 20_000, 1, 1)
QUICK_ONES = Spec("200 tensors of one element", 200, 1, 1)
SMALL = Spec("a small file, 10 tensors", 10, 16, 16)
REMOTE = Spec("300 MB, 680 tensors", 680, 350, 315)
QUICK_REMOTE = Spec("10 MB, 68 tensors", 68, 105, 350)
QUICK_BIG = Spec("100 MB, 100 tensors", 100, 500, 500)
QUICK_MANY = Spec("2,000 tensors", 2_000, 1, 220)
SPARSE_20 = Spec("20 GB (sparse), 400 tensors", 400, 5000, 2500, sparse=True)
#: A transformer of 25 billion parameters has this many tensors.
SPARSE_100 = Spec("100 GB (sparse), 700 tensors", 700, 5000, 7143, sparse=True)
EVERY_SPEC = (
    BIG, MANY, LARGE, ONES, SMALL, REMOTE, QUICK_ONES, QUICK_BIG, QUICK_MANY, QUICK_REMOTE, SPARSE_20, SPARSE_100,
)  # fmt: skip


def run_torch(kind: str, path: Path, *words: object) -> None:
    """Make a file in another process. Raises CalledProcessError if that fails."""
    command = [sys.executable, "-m", "bench.files", kind, str(path), *map(str, words)]
    subprocess.run(command, check=True, cwd=ROOT)


def make(spec: Spec, path: Path) -> None:
    """Write the checkpoint to `path`."""
    run_torch("sparse" if spec.sparse else "input", path, spec.tensors, spec.rows, spec.columns)


def made(make: Callable[[Path], None], path: Path) -> Callable[[], None]:
    """Return a step that makes a file or folder if it is missing. It gets its name only once it is complete."""

    def step() -> None:
        if path.exists():
            return
        unfinished = path.with_suffix(".unfinished")  # keeps the stem, from which torch.save names its records
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        unfinished.unlink(missing_ok=True)
        make(unfinished)
        os.replace(unfinished, path)

    return step


def copy_of(source: Path) -> Callable[[Path], None]:
    """Return a function that copies the whole file; holes stay holes."""

    def copy(path: Path) -> None:
        subprocess.run(["cp", str(source), str(path)], check=True)

    return copy


def half_of(source: Path) -> Callable[[Path], None]:
    """Return a function that copies the first half of a file."""

    def cut(path: Path) -> None:
        shutil.copyfile(source, path)
        os.truncate(path, source.stat().st_size // 2)

    return cut


def flipped(source: Path) -> Callable[[Path], None]:
    """Return a function that copies a file and flips one bit in its last tensor.

    The last tensor is not at the end of the file, because torch.save writes some small records after it.
    """

    def flip(path: Path) -> None:
        shutil.copyfile(source, path)
        with zipfile.ZipFile(source) as archive:
            last = [entry for entry in archive.infolist() if "/data/" in entry.filename][-1]
        with path.open("r+b") as file:
            file.seek(last.header_offset + 26)
            sizes = file.read(4)
            place = last.header_offset + 30 + int.from_bytes(sizes[:2], "little") + int.from_bytes(sizes[2:], "little")
            file.seek(place + last.file_size - 4)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))

    return flip


def hostile(path: Path) -> None:
    """Write a checkpoint that runs `true` when it is unpickled, for scanners to find."""
    pickle = b"\x80\x02cos\nsystem\nq\x00X\x04\x00\x00\x00trueq\x01\x85q\x02Rq\x03."
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (("data.pkl", pickle), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(f"hostile/{name}", data)


def write_pickles(folder: Path, count: int) -> None:
    """Fill a folder with small pickles of plain data, such as a data loader caches for each sample."""
    folder.mkdir()
    for number in range(count):
        sample = {"id": number, "words": [f"word{(number * 7 + place) % 1000}" for place in range(20)], "score": 0.5}
        sample |= {"box": (number, 2 * number, 64, 48), "label": ("cat", "dog")[number % 2], "crop": bytes(200)}
        (folder / f"sample_{number:05}.pkl").write_bytes(pickle.dumps(sample, protocol=4))


def tensor_names(count: int) -> list[str]:
    """Return `count` keys named as in a transformer wrapped in DataParallel."""
    names = []
    for index in range(count):
        layer, place = divmod(index, _TENSORS_PER_LAYER)
        part, is_bias = divmod(place, 2)
        names.append(f"{PREFIX}layers.{layer}.{_PARTS[part]}.{'bias' if is_bias else 'weight'}")
    return names


def module_versions(names: list[str]) -> dict[str, dict[str, int]]:
    """Return the `_metadata` of a state dict with these keys: an entry per module, outer modules first."""
    versions: dict[str, dict[str, int]] = {"": {"version": 1}}
    for name in names:
        segments = name.split(".")
        for end in range(1, len(segments)):
            versions.setdefault(".".join(segments[:end]), {"version": 1})
    return versions


def _write(path: Path, tensors: int, rows: int, columns: int) -> None:
    """Save a state dict of random numbers with storages tagged as on a GPU."""
    from collections import OrderedDict

    import torch

    generator = torch.Generator().manual_seed(tensors)
    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name in tensor_names(tensors):
        # Use random data: zeros could be stored sparse or compressed, and then copied at no cost.
        state[name] = torch.rand((rows, columns), generator=generator)
    _save(state, path)


def _write_sparse(path: Path, tensors: int, rows: int, columns: int) -> None:
    """Save a state dict whose tensors are holes. Names, sizes and offsets are right, and checksums are 0."""
    from collections import OrderedDict

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        state = OrderedDict((name, torch.empty(rows, columns, device=TAG)) for name in tensor_names(tensors))
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            _save(state, path)


def _save(state: Any, path: Path) -> None:
    import torch

    state._metadata = type(state)(module_versions(list(state)))

    def tag_of(storage: object) -> str:
        return f"{TAG[:-1]}{0}"  # torch makes a new string per storage too, so the pickle repeats it instead of sharing

    # torch.save looks this function up at each call. Replacing it tags storages as on a GPU without having one.
    keep, torch.serialization.location_tag = torch.serialization.location_tag, tag_of
    try:
        torch.save(state, path)
    finally:
        torch.serialization.location_tag = keep


def _write_fleet(folder: Path, small: int, tensors: int, large: int, megabytes: int) -> None:
    """Fill a folder with `small` checkpoints of `tensors` small tensors each, and with hard links to a large one."""
    _write_small(folder, small, tensors)
    first = folder / "large_0000.pth"
    _write(first, max(megabytes // 4, 1), 1024, 1024)
    for number in range(1, large):
        os.link(first, folder / f"large_{number:04}.pth")


def _write_small(folder: Path, count: int, tensors: int = _SMALL_TENSORS) -> None:
    """Fill a folder with checkpoints of small tensors, ten each by default."""
    folder.mkdir()
    for number in range(count):
        _write(folder / f"epoch_{number:04}.pth", tensors, _SMALL_SIDE, _SMALL_SIDE)


def zero_parts(folder: Path) -> tuple[Path, ...]:
    """Return the files of a DeepSpeed folder that contain the weights, in the order of the ranks."""
    return tuple(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ZERO_RANKS))


def _write_zero(folder: Path, stage: int, tensors: int, rows: int, columns: int) -> None:
    """Write float32 weights as two ranks of DeepSpeed's ZeRO do, without moments and 16-bit weights."""
    import torch

    folder.mkdir()
    shapes = {name: torch.Size((rows, columns)) for name in tensor_names(tensors)}
    model: dict[str, Any] = {
        "module": {}, "param_shapes": [shapes], "frozen_param_shapes": None, "shared_params": {}, "buffer_names": [],
        "global_steps": 1, "dp_world_size": ZERO_RANKS, "ds_version": "0.19.8",
    }  # fmt: skip
    for rank, path in enumerate(zero_parts(folder)):
        if stage == 3 or not rank:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            torch.save(model, folder / name)
        flat = [torch.randn(tensors * rows * columns // ZERO_RANKS)]
        base = {"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]}
        states: dict[int, dict[str, Any]] = {
            2: {"single_partition_of_fp32_groups": flat, "base_optimizer_state": base, "partition_count": [ZERO_RANKS]},
            3: {"fp32_flat_groups": flat, "optimizer_state_dict": base, "partition_count": ZERO_RANKS},
        }
        torch.save({"optimizer_state_dict": {"zero_stage": stage, **states[stage]}}, path)


def _write_safetensors(path: Path, source: str) -> None:
    """Save the tensors of a checkpoint as a safetensors file."""
    import torch
    from safetensors.torch import save_file

    save_file(dict(torch.load(source, map_location="cpu", mmap=True)), path)


def _write_ranks(folder: Path, source: str, world: str) -> None:
    """Write a file per rank of a mesh with its parts of a checkpoint: every fourth tensor cut by columns.

    The other tensors are cut by rows.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    folder.mkdir()
    state = torch.load(source, map_location="cpu", mmap=True)
    for rank in range(int(world)):
        dist.init_process_group("fake", rank=rank, world_size=int(world), store=FakeStore())
        mesh = init_device_mesh("cpu", (int(world),))
        parts = {
            name: distribute_tensor(tensor, mesh, [Shard(int(number % 4 == 0))], src_data_rank=None)
            for number, (name, tensor) in enumerate(state.items())
        }
        torch.save(parts, folder / f"model_rank{rank}.pt")
        dist.destroy_process_group()


def _write_meta(folder: Path, parts: int, width: int, layers: int) -> None:
    """Write the parts of a Llama 2 with the names and cuts of Meta, in bfloat16, and its ``params.json``."""
    import json

    import torch

    folder.mkdir()
    heads, kv_heads, hidden, vocab = 16, 4, 8 * width // 3 // 64 * 64, 21 * width
    keys = kv_heads * width // heads
    shapes = {"tok_embeddings": (vocab, width // parts), "output": (vocab // parts, width)}
    for layer in range(layers):
        own = {
            "attention.wq": (width // parts, width), "attention.wk": (keys // parts, width),
            "attention.wv": (keys // parts, width), "attention.wo": (width, width // parts),
            "feed_forward.w1": (hidden // parts, width), "feed_forward.w2": (width, hidden // parts),
            "feed_forward.w3": (hidden // parts, width),
        }  # fmt: skip
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    norms = [f"layers.{layer}.{name}" for layer in range(layers) for name in ("attention_norm", "ffn_norm")]
    for part in range(parts):
        torch.manual_seed(part)
        tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
        tensors |= {name: torch.linspace(0, 1, width) for name in ("norm", *norms)}
        whole = {f"{name}.weight": tensor.bfloat16() for name, tensor in tensors.items()}
        torch.save(whole, folder / f"consolidated.{part:02}.pth")
    numbers = {"dim": width, "n_layers": layers, "n_heads": heads, "n_kv_heads": kv_heads, "norm_eps": 1e-5}
    (folder / "params.json").write_text(json.dumps({**numbers, "vocab_size": vocab}))


def _write_lora(folder: Path, width: int, layers: int) -> None:
    """Write a Llama in bfloat16 with an untied head, and a LoRA of rank 16 for its linear layers in float32."""
    import json

    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    inner, vocab = 11 * width // 4, 125 * width // 4
    shapes = {f"self_attn.{name}_proj": (width // (1 + (name in "kv")), width) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    base = {f"{name}.weight": torch.randn(vocab, width) / 50 for name in ("model.embed_tokens", "lm_head")}
    base["model.norm.weight"] = torch.ones(width)
    adapter = {}
    for layer in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            base[f"model.layers.{layer}.{name}.weight"] = torch.ones(width)
        for name, (rows, columns) in shapes.items():
            module = f"model.layers.{layer}.{name}"
            base[f"{module}.weight"] = torch.randn(rows, columns) / 50
            adapter[f"base_model.model.{module}.lora_A.weight"] = torch.randn(16, columns) / 50
            adapter[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, 16) / 50
    for name in ("base", "adapter"):
        (folder / name).mkdir(parents=True)
    whole = {name: tensor.bfloat16() for name, tensor in base.items()}
    save_file(whole, folder / "base" / "model.safetensors", {"format": "pt"})
    save_file(adapter, folder / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": layers}
    sizes = {"hidden_size": width, "intermediate_size": inner, "vocab_size": vocab, "tie_word_embeddings": False}
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", **heads, **sizes}
    (folder / "base" / "config.json").write_text(json.dumps(model))
    targets = [name.partition(".")[2] for name in shapes]
    lora = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 16, "lora_alpha": 32, "target_modules": targets}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(lora))


def _write_dcp(folder: Path, source: str) -> None:
    """Save the tensors of a checkpoint to a DCP folder, as a single process does."""
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    save(dict(torch.load(source, map_location="cpu", mmap=True)), checkpoint_id=folder)


def _write_pieces(folder: Path, tensors: int, ranks: int, columns: int) -> None:
    """Write a DCP folder in which every rank has a piece of four rows of each tensor.

    The files of all ranks are hard links to one file. Its elements are zeros, written as holes.
    """
    import io
    import pickle

    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    out = io.BytesIO()
    torch.save(torch.zeros(4, columns), out)
    item = out.getvalue()
    head = item[: item.index(bytes(16 * columns))]
    folder.mkdir()
    with (folder / "__0_0.distcp").open("wb") as data:
        for _ in range(tensors):
            data.write(head)
            data.seek(16 * columns, os.SEEK_CUR)
            data.write(item[len(head) + 16 * columns :])
    names = [f"layers.{number}.weight" for number in range(tensors)]
    chunks: list[list[ChunkStorageMetadata]] = [[] for _ in names]
    places: dict[MetadataIndex, _StorageInfo] = {}
    for rank in range(ranks):
        file = f"__{rank}_0.distcp"
        if rank:
            os.link(folder / "__0_0.distcp", folder / file)
        boxes = [ChunkStorageMetadata(torch.Size((4 * rank, 0)), torch.Size((4, columns))) for _ in names]
        rows = [
            (MetadataIndex(name, torch.Size((4 * rank, 0)), rank), _StorageInfo(file, len(item) * place, len(item)))
            for place, name in enumerate(names)
        ]
        # Pickle a copy: pieces gathered from different ranks share no strings.
        boxes, rows = pickle.loads(pickle.dumps((boxes, rows)))
        for mine, box in zip(chunks, boxes):
            mine.append(box)
        places.update(rows)
    shape, properties = torch.Size((4 * ranks, columns)), TensorProperties(dtype=torch.float32)
    listed = {name: TensorStorageMetadata(properties, shape, mine) for name, mine in zip(names, chunks)}
    metadata = Metadata(dict(listed), {name: (name,) for name in names}, places, StorageMeta(), "1.0.0")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _main(kind: str, path: str, *words: str) -> None:
    target = Path(path)
    if kind == "safetensors":
        _write_safetensors(target, words[0])
    elif kind == "ranks":
        _write_ranks(target, *words)
    elif kind == "meta":
        _write_meta(target, *map(int, words))
    elif kind == "lora":
        _write_lora(target, *map(int, words))
    elif kind == "dcp":
        _write_dcp(target, words[0])
    elif kind == "pieces":
        _write_pieces(target, *map(int, words))
    elif kind == "fleet":
        _write_fleet(target, *map(int, words))
    elif kind == "small":
        _write_small(target, int(words[0]))
    elif kind == "zero":
        _write_zero(target, *map(int, words))
    else:
        (_write_sparse if kind == "sparse" else _write)(target, *map(int, words))


if __name__ == "__main__":
    _main(*sys.argv[1:])
