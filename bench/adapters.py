"""The benchmark group for lora merge: a base in bfloat16 of 500 MB, and a LoRA of all its linear layers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench import files, peers
from bench.files import Spec, made
from bench.jobs import Check, Group, Job, Row, Target
from bench.references import SLOW

MERGE = "lora merge"
FLOOR = "cp && sync, and import torch"
WHOLE = "load_file + W + s * (B @ A) + save_file"
_WHOLE = """
import json, sys
from safetensors.torch import load_file, save_file

base, adapter, output = sys.argv[1:]
weights, matrices = load_file(base + "/model.safetensors"), load_file(adapter + "/adapter_model.safetensors")
with open(adapter + "/adapter_config.json") as file:
    config = json.load(file)
for key, a in matrices.items():
    if ".lora_A." in key:
        name = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
        delta = matrices[key.replace("lora_A", "lora_B")] @ a * (config["lora_alpha"] / config["r"])
        weights[name] = (weights[name].float() + delta).to(weights[name].dtype)
save_file(weights, output, {"format": "pt"})
"""


def group(tool: list[str], spec: Spec, work: Path) -> Group:
    """Merge a LoRA into its base. The floor copies the base, and imports torch, which the sums need."""
    is_big = spec == files.BIG
    width, layers = (1024, 16) if is_big else (64, 2)
    folder, output = work / f"input-lora-{width}x{layers}", work / "output.merged"
    base, adapter, expected = folder / "base", folder / "adapter", folder / "expected.safetensors"
    weights = base / "model.safetensors"
    reads = weights, adapter / "adapter_model.safetensors"
    script = 'mkdir -p "$2" && cp "$1" "$2" && sync "$2"/* && "$3" -c "import torch"'
    whole = (sys.executable, "-c", _WHOLE, str(base), str(adapter))
    check = Check("tensors", expected, output / weights.name)
    one_file = work / "output.safetensors"
    jobs = (
        Job(MERGE, (*tool, "lora merge", str(base), str(adapter), "-o", str(output)), reads, output, check),
        Job(FLOOR, ("sh", "-c", script, "sh", str(weights), str(output), sys.executable), reads, output),
        Job(WHOLE, (*whole, str(one_file)), reads, one_file, Check("tensors", expected, one_file), most=SLOW),
        peers.merge_and_unload(work, base, adapter, output)._replace(reads=reads, writes=output, check=check),
    )
    rows = (
        Row(MERGE, FLOOR, Target(1.5, peak=400) if is_big else None, reader=is_big),
        *(Row(MERGE, job.name, reader=is_big) for job in jobs[2:]),
    )

    def merge_whole(unfinished: Path) -> None:
        subprocess.run([*whole, str(unfinished)], check=True)

    make = made(lambda unfinished: files.run_torch("lora", unfinished, width, layers), folder)
    label = "500 MB in bfloat16" if is_big else "a small base"
    return Group("adapters", label, jobs, rows, (make, made(merge_whole, expected)))
