"""Builders of jobs: ckptool's commands, and the programs to compare them with, as short as users write them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import files
from bench.jobs import Check, Job
from bench.measure import child_environment

SLOW = 3  # timed rounds of slow jobs

# The files are tagged as saved on a GPU, so torch.load needs map_location.
_LOAD = "import sys, torch; state = torch.load(sys.argv[1], map_location='cpu'{mmap}); "
KEYS = "print(*state, sep='\\n')"
SAVE = "torch.save(state, sys.argv[2])"
STRIP = (
    "from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present as strip; "
    f"strip(state, '{files.PREFIX}'); {SAVE}"
)
CAST = "state = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}; " + SAVE
FIGURES = (
    "at = torch.tensor([0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99], dtype=torch.float64)\n"
    "for t in state.values():\n"
    "    t = t.double().flatten()\n"
    "    print(t.min(), t.max(), t.mean(), t.std(), t.norm(), (t == 0).sum(), t.isnan().sum(), t.isinf().sum(),"
    " t.histc(10), t.quantile(at))"
)
TO_SAFETENSORS = "from safetensors.torch import save_file; save_file(dict(state), sys.argv[2])"
# Stages 1 and 2 cut the concatenation of all tensors into parts, stage 3 cuts each tensor.
_JOIN = (
    "import sys, torch; from safetensors.torch import save_file\n"
    "model, *parts = [torch.load(path) for path in sys.argv[2:]]\n"
    "shapes = model['param_shapes'][0]\n"
    "states = [part['optimizer_state_dict'] for part in parts]\n"
)
JOIN = {
    2: _JOIN + "whole = torch.cat([state['single_partition_of_fp32_groups'][0] for state in states])\n"
    "flat = whole.split([shape.numel() for shape in shapes.values()])\n"
    "save_file({name: part.view(shape) for (name, shape), part in zip(shapes.items(), flat)}, sys.argv[1])",
    3: _JOIN + "flats = [state['fp32_flat_groups'][0] for state in states]\n"
    "cut = [flat.split([shape.numel() // len(flats) for shape in shapes.values()]) for flat in flats]\n"
    "save_file({name: torch.cat(part).view(shape) for (name, shape), *part in zip(shapes.items(), *cut)}, sys.argv[1])",
}
_FROM_SAFETENSORS = (
    "import sys, torch; from safetensors.torch import load_file; torch.save(load_file(sys.argv[1]), sys.argv[2])"
)
_NAMES = "import sys, torch; a, b = (set(torch.load(p, map_location='meta')) for p in sys.argv[1:]); print(len(a & b))"
_EACH = (
    "import sys, pathlib, torch\n"
    "for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):\n"
    "    state = torch.load(path, map_location='cpu')\n"
    "    print(path, len(state), sum(tensor.numel() for tensor in state.values()))\n"
)

# The least that any check must do: read and sum every byte, in Python, on one core.
_SUM = (
    "import sys, zlib\n"
    "crc, buffer = 0, bytearray(1 << 20)\n"
    "view = memoryview(buffer)\n"
    "with open(sys.argv[1], 'rb', buffering=0) as file:\n"
    "    while size := file.readinto(buffer):\n"
    "        crc = zlib.crc32(view[:size], crc)\n"
)

IMPORTS = 'python -c "import click"'
COPY = "cp && sync"
REFLINK = "cp --reflink && sync"
SUM = "read + zlib.crc32 loop"
FROM_SAFETENSORS = "load_file + torch.save"
LOAD_CAT = "torch.load + cat + save_file"
NAMES = "torch.load of both to meta"


def command(tool: list[str], *words: str, source: Path, output: Path | None = None, check: str = "") -> Job:
    """Return the job of a ckptool command on a file, with an output if one is given."""
    out = ("-o", str(output)) if output else ()
    full = (*tool, words[0], str(source), *words[1:], *out)
    return Job(" ".join(words), full, (source,), output, Check(check, source, output) if output and check else None)


def torch_job(name: str, code: str, source: Path, output: Path | None = None, mmap: bool = False) -> Job:
    """Return the job of a torch program. `{mmap}` in its name shows whether it loads with mmap."""
    program = _LOAD.format(mmap=", mmap=True" if mmap else "") + code
    words = (sys.executable, "-c", program, str(source), *([str(output)] if output else []))
    return Job(name.format(mmap=", mmap" if mmap else ""), words, (source,), output, most=SLOW)


def both(name: str, code: str, source: Path, output: Path | None = None) -> tuple[Job, Job]:
    """Return the same program with a plain torch.load, and with mmap."""
    return torch_job(name, code, source, output), torch_job(name, code, source, output, mmap=True)


def imports() -> Job:
    """Return a job that starts Python and imports the library that the command line is built on."""
    return Job(IMPORTS, (sys.executable, "-c", "import click"))


def copy(source: Path, output: Path, label: str = COPY) -> Job:
    """Return a job of cp with the sync that ckptool also does. A label with "reflink" shares blocks."""
    option = " --reflink=always" if "reflink" in label else ""
    return Job(
        label, ("sh", "-c", f'cp{option} "$1" "$2" && sync "$2"', "sh", str(source), str(output)), (source,), output
    )


def checksum(source: Path) -> Job:
    """Return a job that reads and sums every byte."""
    return Job(SUM, (sys.executable, "-c", _SUM, str(source)), (source,))


def from_safetensors(source: Path, output: Path) -> Job:
    """Return a job that turns a safetensors file into a torch file with the two libraries."""
    words = (sys.executable, "-c", _FROM_SAFETENSORS, str(source), str(output))
    return Job(FROM_SAFETENSORS, words, (source,), output, most=SLOW)


def join(stage: int, model: Path, parts: Sequence[Path], output: Path) -> Job:
    """Return a job that joins the weights of DeepSpeed's ZeRO into a safetensors file with torch."""
    words = (sys.executable, "-c", JOIN[stage], str(output), str(model), *map(str, parts))
    return Job(LOAD_CAT, words, (model, *parts), output, most=SLOW)


def copy_all(parts: Sequence[Path], folder: Path) -> Job:
    """Return a job of cp for several files, with the sync that ckptool also does."""
    script = 'out="$1"; shift; mkdir -p "$out" && cp "$@" "$out" && sync "$out"/*'
    return Job(COPY, ("sh", "-c", script, "sh", str(folder), *map(str, parts)), tuple(parts), folder)


def names_of_two(one: Path, two: Path) -> Job:
    """Return a job that counts with torch which names two files share."""
    return Job(NAMES, (sys.executable, "-c", _NAMES, str(one), str(two)), (one, two), most=SLOW)


def load_each(folder: Path) -> Job:
    """Return a job that calls torch.load on every file of a folder, in one process."""
    return Job("torch.load of each", (sys.executable, "-c", _EACH, str(folder)), most=SLOW)


def answers(*words: str) -> tuple[int, str]:
    """Run a command in the root of the repository. Return its exit code, and its stdout followed by its stderr."""
    done = subprocess.run(words, cwd=files.ROOT, env=child_environment(), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def understands(tool: list[str], name: str, option: str = "") -> bool:
    """Return whether ckptool has a command, and the command an option."""
    code, text = answers(*tool, name, "--help")
    return code == 0 and option in text
