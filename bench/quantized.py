"""The benchmark groups for dequantize: FP8 with block scales, and nf4 of bitsandbytes, each made into 1 GB and more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.files import made
from bench.jobs import Check, Group, Job, Row, Target
from bench.references import SLOW

DEQUANTIZE = "dequantize"
FLOOR = "cp && sync of the result"
WHOLE = {"fp8": "load_file + W.float() * scales + save_file", "nf4": "load_file + table[codes] * absmax + save_file"}

# Width of a square weight, and how to make the model. The codes 0x7f and 0xff are NaN.
_WIDTH = 4096
_MAKE = {
    "fp8": """
for layer in range(count):
    name = f"model.layers.{layer}.mlp.down_proj"
    codes = torch.randint(0, 127, (width, width), dtype=torch.uint8)
    state[name + ".weight"] = codes.view(torch.float8_e4m3fn)
    state[name + ".weight_scale_inv"] = torch.rand(width // 128, width // 128)
config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
""",
    "nf4": """
for layer in range(count):
    name = f"model.layers.{layer}.mlp.down_proj.weight"
    state[name] = torch.randint(0, 256, (width * width // 2, 1), dtype=torch.uint8)
    state[name + ".absmax"] = torch.rand(width * width // 64)
    state[name + ".quant_map"] = torch.linspace(-1, 1, 16)
    made = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [width, width]}
    state[name + ".quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(made).encode()), dtype=torch.uint8)
config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
""",
}
_WRITE = """
import json, os, sys, torch
from safetensors.torch import save_file
folder, count, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
os.makedirs(folder)
state = {}
%s
with open(folder + "/config.json", "w") as file:
    json.dump({"model_type": "llama", "torch_dtype": "bfloat16", "quantization_config": config}, file)
save_file(state, folder + "/model.safetensors", {"format": "pt"})
"""
_PLAIN = {
    "fp8": """
for name in [name for name in state if name.endswith(".weight")]:
    scales = state.pop(name + "_scale_inv").repeat_interleave(128, 0).repeat_interleave(128, 1)
    state[name] = (state[name].float() * scales).bfloat16()
""",
    "nf4": """
for name in [name for name in state if name.endswith(".weight")]:
    codes, table, absmax = state[name].flatten(), state.pop(name + ".quant_map"), state.pop(name + ".absmax")
    made = json.loads(bytes(state.pop(name + ".quant_state.bitsandbytes__nf4").tolist()))
    values = table[torch.stack((codes >> 4, codes & 15), 1).flatten().long()]
    state[name] = (values.view(-1, 64) * absmax[:, None]).bfloat16().view(made["shape"])
""",
}
_SCRIPT = """
import json, sys, torch
from safetensors.torch import load_file, save_file
state = load_file(sys.argv[1])
%s
save_file(state, sys.argv[2], {"format": "pt"})
"""


def group(tool: list[str], quick: bool, kind: str, work: Path) -> Group:
    """Turn a model back into plain weights. The floor copies the result, which is two or four times as large."""
    count, width = (2, 256) if quick else ({"fp8": 30, "nf4": 46}[kind], _WIDTH)
    folder, output = work / f"input-{kind}-{count}x{width}", work / "output.safetensors"
    weights, expected = folder / "model.safetensors", folder / "expected.bin"
    whole = (sys.executable, "-c", _SCRIPT % _PLAIN[kind], str(weights))
    jobs = (
        Job(
            DEQUANTIZE, (*tool, "dequantize", str(weights), "-o", str(output)), (weights,), output,
            Check("tensors", expected, output),
        ),
        Job(FLOOR, ("sh", "-c", 'cp "$1" "$2" && sync "$2"', "sh", str(expected), str(output)), (expected,), output),
        Job(WHOLE[kind], (*whole, str(output)), (weights,), output, Check("tensors", expected, output), most=SLOW),
    )  # fmt: skip
    rows = (
        Row(DEQUANTIZE, FLOOR, None if quick else Target(peak=100)),
        Row(DEQUANTIZE, WHOLE[kind], Target(ratio=1), reader=not quick),
    )

    def write(unfinished: Path) -> None:
        words = (sys.executable, "-c", _WRITE % _MAKE[kind], str(unfinished), str(count), str(width))
        subprocess.run(words, check=True)

    def plain(unfinished: Path) -> None:
        subprocess.run([*whole, str(unfinished)], check=True)

    label = {"fp8": "500 MB of FP8 in blocks", "nf4": "430 MB of nf4"}[kind]
    return Group(
        "dequantize", "a small model" if quick else label, jobs, rows, (made(write, folder), made(plain, expected))
    )
