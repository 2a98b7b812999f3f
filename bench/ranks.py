"""Benchmark groups for rank files: join what four ranks of a mesh saved, and the two parts of a Llama of Meta."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench import files
from bench.files import Spec, made
from bench.jobs import Check, Group, Job, Row, Target
from bench.references import COPY, SLOW

WORLD = 4
JOIN = "convert, four rank files to one"
CAT = "torch.load of each + cat + save_file"
_CAT = (
    "import sys, pathlib, torch, torch.distributed.tensor; from safetensors.torch import save_file\n"
    "paths = sorted(pathlib.Path(sys.argv[1]).iterdir())\n"
    "parts = [torch.load(path, weights_only=False) for path in paths]\n"
    "def whole(name):\n"
    "    dim = parts[0][name].placements[0].dim\n"
    "    return torch.cat([part[name].to_local() for part in parts], dim)\n"
    "save_file({name: whole(name) for name in parts[0]}, sys.argv[2])\n"
)
NAMED = "convert, two parts to hf:llama"
JOIN_NAMED = "torch.load of each + cat, permute, rename + save_file"
_PARTS = 2
#: The join that transformers does in convert_llama_weights_to_hf.py (write_model), for Llama 2.
_JOIN_NAMED = """
import json, pathlib, sys, torch
from safetensors.torch import save_file

folder = pathlib.Path(sys.argv[1])
numbers = json.loads((folder / "params.json").read_text())
parts = [torch.load(path) for path in sorted(folder.glob("*.pth"))]
names = {
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "layers.": "model.layers.", "tok_embeddings": "model.embed_tokens", "output": "lm_head",
}
whole = {}
for name in parts[0]:
    own = [part[name] for part in parts]
    columns = any(text in name for text in ("wo", "w2", "tok_embeddings"))
    tensor = own[0] if "norm" in name else torch.cat(own, dim=int(columns))
    if "wq" in name or "wk" in name:
        heads = numbers["n_heads" if "wq" in name else "n_kv_heads"]
        tensor = tensor.view(heads, -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    new = "model.norm.weight" if name == "norm.weight" else name
    for text, other in names.items():
        new = new.replace(text, other)
    whole[new] = tensor
save_file(whole, sys.argv[2])
"""


def group(tool: list[str], spec: Spec, work: Path) -> Group:
    """Join the parts of a checkpoint from four ranks: a quarter of the tensors is cut by columns, the rest by rows."""
    stem = f"ranks-{Path(spec.name).stem}"
    source, folder, output = work / spec.name, work / stem, work / "output.safetensors"
    reads = tuple(folder / f"model_rank{rank}.pt" for rank in range(WORLD))
    check = Check("convert", source, output)
    join = Job(JOIN, (*tool, "convert", str(folder), "-o", str(output)), reads, output, check)
    script = 'mkdir -p "$2" && cp "$1"/* "$2" && sync "$2"/*'
    copy = Job(COPY, ("sh", "-c", script, "sh", str(folder), str(work / "output.ranks")), reads, work / "output.ranks")
    cat = Job(CAT, (sys.executable, "-c", _CAT, str(folder), str(output)), reads, output, check, most=SLOW)
    near = Target(1.2, peak=64) if spec == files.BIG else None
    rows = (Row(JOIN, COPY, near, reader=spec == files.BIG), Row(JOIN, CAT, reader=spec == files.BIG))
    setup = (
        made(lambda unfinished: files.make(spec, unfinished), source),
        made(lambda unfinished: files.run_torch("ranks", unfinished, source, WORLD), folder),
    )
    return Group("join", f"{WORLD} rank files of {spec.label}", (join, copy, cat), rows, setup)


def named(tool: list[str], spec: Spec, work: Path) -> Group:
    """Join the two parts of a Llama as Meta saves it, and give it the names and the layout of transformers."""
    width, layers = (1536, 6) if spec == files.BIG else (256, 1)
    folder, output = work / f"ranks-meta-{width}x{layers}", work / "output.safetensors"
    reads = tuple(folder / f"consolidated.{part:02}.pth" for part in range(_PARTS))
    expected = folder / "expected.safetensors"
    check = Check("tensors", expected, output)
    words = (*tool, "convert", str(folder), "--to-names", "hf:llama", "-o", str(output))
    join = Job(NAMED, words, reads, output, check)
    script = 'mkdir -p "$2" && cp "$1"/*.pth "$2" && sync "$2"/*'
    copy = Job(COPY, ("sh", "-c", script, "sh", str(folder), str(work / "output.ranks")), reads, work / "output.ranks")
    torch_join = (sys.executable, "-c", _JOIN_NAMED, str(folder))
    other = Job(JOIN_NAMED, (*torch_join, str(output)), reads, output, check, most=SLOW)
    near = Target(1.3, peak=64) if spec == files.BIG else None
    rows = (Row(NAMED, COPY, near, reader=spec == files.BIG), Row(NAMED, JOIN_NAMED, reader=spec == files.BIG))

    def join_with_torch(unfinished: Path) -> None:
        subprocess.run([*torch_join, str(unfinished)], check=True)

    setup = (
        made(lambda unfinished: files.run_torch("meta", unfinished, _PARTS, width, layers), folder),
        made(join_with_torch, expected),
    )
    label = "2 parts of 250 MB of a Llama" if spec == files.BIG else "2 parts of a small Llama"
    return Group("join", label, (join, copy, other), rows, setup)
