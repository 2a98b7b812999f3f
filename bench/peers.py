"""Other tools from PyPI: each is installed in its own environment, must prove that it works, and is compared."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench import files, references
from bench.files import Spec, made
from bench.jobs import Check, Group, Job, Row, Target
from bench.references import answers, command


class Peer(NamedTuple):
    """Another tool: its package, the arguments for pip, its program, whether it needs torch, and what it does."""

    package: str
    wanted: tuple[str, ...]
    program: str
    torch: bool
    does: str


PEERS = (
    Peer(
        "sft-cli", ("sft-cli",), "sft", False,
        "edits safetensors files: `tree` is compared with `keys`, `rename` with `strip-module`, `stat` with `stats`, "
        "on the same tensors. It has no location tags, no sharing and no `_metadata` to keep.",
    ),
    Peer(
        "ckptkit", ("ckptkit[cli]",), "ckptkit", True,
        "`info` lists the tensors of a .pth through `torch.load`: compared with `keys`. Its `validate`, `diff` and "
        "`stats` are other jobs.",
    ),
    Peer(
        "weightlens", ("weightlens",), "lens", True,
        "`lens analyze` computes numbers of each tensor, after `torch.load(weights_only=True)`: compared with `stats`.",
    ),
    Peer(
        "picklescan", ("picklescan",), "picklescan", False,
        "looks for dangerous imports in pickles: compared with `scan`, and with `validate --quick`, which looks at the "
        "structure, too.",
    ),
    Peer(
        "hayward", ("hayward",), "hayward", False,
        "looks for code in models of many kinds: `hayward scan` is compared with `validate --quick` and `scan`.",
    ),
    Peer(
        "safetensors-print", ("safetensors-print",), "safetensors-print", False,
        "prints and checks the header of a safetensors file: `--tensors` is compared with `keys`.",
    ),
    Peer(
        "whybig", ("whybig",), "whybig", False,
        "lists the records of an archive by size, not the names of tensors: compared with `keys`.",
    ),
    Peer(
        "pt-safe-loader", ("pt-safe-loader",), "python", False,
        "is a library in Rust that reads a .pth without running it: its `metadata()` is compared with `keys`. It "
        "refuses many state dicts (BUILD with a state), among them those with `_metadata`.",
    ),
    Peer(
        "fickling", ("fickling", "typing_extensions"), "fickling", False,
        "decompiles pickles and rates their safety. `--check-safety` takes bare pickles; `scan_zip_archive` of its "
        "library is measured, too.",
    ),
    Peer(
        "deepspeed", ("deepspeed", "huggingface_hub", "safetensors"), "python", True,
        "`zero_to_fp32.py`, which DeepSpeed puts into each of its checkpoints, makes a state dict of the partitions of "
        "ZeRO: compared with `convert`. It loads them with torch, and leaves the moments of the optimizer out.",
    ),
    Peer(
        "s3fs", ("s3fs",), "python", True,
        "opens an object of S3 as a file, which `torch.load(map_location=\"meta\")` reads: compared with `keys` of the "
        "same address. It reads ahead 5 MB at each seek.",
    ),
    Peer(
        "peft", ("peft",), "python", True,
        "`PeftModel.merge_and_unload()` adds an adapter to its base: compared with `lora merge`, whose output has the "
        "same bytes. It loads the whole model into memory, with transformers.",
    ),
)  # fmt: skip

EVIL = "hostile.pth"
_PEFT = (
    "import sys, os, peft, transformers\n"
    "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype='auto')\n"
    "model = peft.PeftModel.from_pretrained(model, sys.argv[2]).merge_and_unload()\n"
    "model.save_pretrained(sys.argv[3])\n"
    "os.sync()\n"
)
_PT_LOADER = "import sys; from pt_loader import PtCheckpoint; print(PtCheckpoint.load(sys.argv[1]).metadata())"
_FICKLING = (
    "import sys, fickling; found = fickling.scan_zip_archive(sys.argv[1]); "
    "print(*(result.severity.name for result in found.values())); "
    "sys.exit(not found or not all(found.values()))"
)


def install(peer: Peer, folder: Path) -> str:
    """Make the environment of a peer if it is missing. Return the reason why that fails, or ""."""
    home = folder / peer.package
    if (home / "ready").exists():
        return ""
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    extra = []
    if peer.torch:
        # Lend the installed torch through a path file, and pin its version, so that pip does not install another.
        site = next(home.glob("lib/python*/site-packages"))
        (site / "torch_of_the_benchmark.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
        fixed = home / "constraints.txt"
        fixed.write_text(f"torch=={importlib.metadata.version('torch')}\n", encoding="utf-8")
        extra = ["--constraint", str(fixed)]
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *extra, *peer.wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"pip cannot install it: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
    (home / "ready").touch()
    return ""


def version(peer: Peer, folder: Path) -> str:
    """Return the installed version of a peer, or "" if it is not installed."""
    name = peer.package.replace("-", "_")
    found = list((folder / peer.package).glob(f"lib/python*/site-packages/{name}-*.dist-info"))
    return found[0].name.removeprefix(f"{name}-").removesuffix(".dist-info") if found else ""


def groups(tool: list[str], spec: Spec, work: Path, heavy: bool) -> tuple[Group, ...]:
    """Return the comparisons with peers on one checkpoint. `heavy` adds those that read every value."""
    path, output = work / spec.name, work / "output.safetensors"
    same, evil = path.with_suffix(".safetensors"), work / EVIL
    make = made(lambda unfinished: files.make(spec, unfinished), path)
    convert = made(lambda unfinished: files.run_torch("safetensors", unfinished, path), same)
    names = files.tensor_names(spec.tensors)
    listing = partial(shows, names)
    job = partial(job_of, work / "peers")

    keys = command(tool, "keys", source=path)
    listers = (
        job("ckptkit", "ckptkit info --json", ("info", "--json", str(path)), path, listing),
        job("sft-cli", "sft tree (.safetensors)", ("tree", str(same)), same, partial(shows, [names[0][-6:]])),
        job("pt-safe-loader", "pt_loader, metadata()", ("-c", _PT_LOADER, str(path)), path, listing),
        *_light_listers(job, path, same, names),
    )
    lists = Group(
        "peers: list the tensors", spec.label,
        (keys._replace(proof=listing(keys.words)), *listers),
        tuple(Row(keys.name, other.name, reader=heavy) for other in listers),
        (make, convert), () if heavy else (same,),
    )  # fmt: skip
    scans = scanning(tool, work, path, evil)
    quick = scans[0].name
    scan = Group(
        "peers: look for dangerous imports", spec.label, scans,
        tuple(Row(quick, other.name, reader=heavy) for other in scans[1:]),
        (make, made(files.hostile, evil)), (evil,),
    )  # fmt: skip
    if not heavy:
        return lists, scan
    strip = command(tool, "strip-module", source=path, output=path.with_name("output.pt"), check="strip")
    rename = "sft rename (.safetensors)"
    words = ("rename", str(same), "--sub", "^module\\.", "--sub", "", "-o", str(output))
    renaming = job("sft-cli", rename, words, same)._replace(writes=output, check=Check("safetensors", path, output))
    strips = Group(
        "peers: take the prefix off", spec.label, (strip, renaming), (Row(strip.name, rename, reader=heavy),),
        (make, convert),
    )  # fmt: skip
    # These take minutes of arithmetic, so a single timed round is enough.
    stats = command(tool, "stats", source=path)._replace(most=1)
    others = (
        job(
            "weightlens", "lens analyze", ("analyze", str(path)), path, partial(shows, ["COMPLETE", f"{spec.tensors}"])
        ),
        job("sft-cli", "sft stat (.safetensors)", ("stat", str(same)), same, listing),
    )
    computing = Group(
        "peers: numbers of every tensor", spec.label,
        (stats._replace(proof=listing(stats.words)), *(other._replace(most=1) for other in others)),
        tuple(Row(stats.name, other.name, reader=heavy) for other in others), (make, convert), (same,),
    )  # fmt: skip
    return lists, scan, strips, computing


def _light_listers(job: Callable[..., Job], path: Path, same: Path, names: list[str]) -> tuple[Job, ...]:
    """Return the jobs of listings that start as fast as ckptool."""
    return (
        job(
            "safetensors-print", "safetensors-print --tensors (.safetensors)", ("--tensors", str(same)), same,
            partial(shows, names),
        ),
        job("whybig", "whybig --top", ("--top", "1000000", str(path)), path, partial(shows, ["data.pkl"])),
    )  # fmt: skip


def start_up(tool: list[str], work: Path) -> Group:
    """Return the comparison of short commands on a small file, where starting takes most of the time."""
    spec = files.SMALL
    path, output, evil = work / spec.name, work / "output.pt", work / EVIL
    same = path.with_suffix(".safetensors")
    make = made(lambda unfinished: files.make(spec, unfinished), path)
    convert = made(lambda unfinished: files.run_torch("safetensors", unfinished, path), same)
    keys, inspect, scan = (command(tool, word, source=path) for word in ("keys", "inspect", "scan"))
    strip = command(tool, "strip-module", source=path, output=output, check="strip")
    picklescan = next(other for other in scanning(tool, work, path, evil) if other.name == "picklescan -p")
    listers = _light_listers(partial(job_of, work / "peers"), path, same, files.tensor_names(spec.tensors))
    bounds = ((keys, 1.4), (inspect, 1.7), (scan, 1.6), (strip, 1.8))
    return Group(
        "peers: start-up", spec.label,
        (references.imports(), keys, inspect, scan, strip, *listers, picklescan),
        (
            *(Row(job.name, references.IMPORTS, Target(ratio=ratio), reader=True) for job, ratio in bounds),
            *(Row(keys.name, other.name, Target(ratio=1.0), reader=True) for other in listers),
            Row(scan.name, picklescan.name, Target(ratio=1.0), reader=True),
        ),
        (make, convert, made(files.hostile, evil)), (evil,),
    )  # fmt: skip


def scanning(tool: list[str], work: Path, path: Path, evil: Path) -> tuple[Job, ...]:
    """Return the jobs of the scanners for a file or folder, ckptool first.

    Each scanner must first prove that it finds a hostile file and accepts a harmless one.
    """
    folder = work / "peers"
    python, program = (str(folder / "fickling" / "bin" / name) for name in ("python", "fickling"))
    checking = (program, "--check-safety", "--json-output", os.devnull, str(path))
    proof = partial(_tells_apart, path, evil)
    quick = Job("validate --quick", (*tool, "validate", "--quick", str(path)), (path,))
    others = (
        ("hayward", "hayward scan", (str(folder / "hayward" / "bin" / "hayward"), "scan", str(path))),
        ("picklescan", "picklescan -p", (str(folder / "picklescan" / "bin" / "picklescan"), "-p", str(path))),
        ("fickling", "fickling scan_zip_archive", (python, "-c", _FICKLING, str(path))),
        ("fickling", "fickling --check-safety", checking),
    )
    return (
        quick._replace(proof=proof(quick.words[:-1])),
        *(_peer(package, work, Job(name, words, (path,)), proof) for package, name, words in others),
    )


def zero_to_fp32(work: Path, folder: Path, stage: int) -> Job:
    """Return the job of DeepSpeed's own script for the folder of one stage."""
    python, output = str(work / "peers" / "deepspeed" / "bin" / "python"), work / "output.fp32"
    where = ("--tag", folder.name, str(folder.parent), str(output))
    words = (python, "-m", "deepspeed.utils.zero_to_fp32", "--safe_serialization", *where)
    check = Check(f"zero{stage}", folder, output / "model.safetensors")
    job = Job("zero_to_fp32.py", words, files.zero_parts(folder), output, check, most=references.SLOW)
    peer = next(peer for peer in PEERS if peer.package == "deepspeed")
    return _installed(peer, work / "peers", job, job.proof)


def merge_and_unload(work: Path, base: Path, adapter: Path, output: Path) -> Job:
    """Return the job of PEFT for an adapter and its base, both folders."""
    python = str(work / "peers" / "peft" / "bin" / "python")
    job = Job("PEFT", (python, "-c", _PEFT, str(base), str(adapter), str(output)), most=references.SLOW)
    return _installed(next(peer for peer in PEERS if peer.package == "peft"), work / "peers", job, job.proof)


def over_folder(work: Path, folder: Path) -> Job:
    """Return the job of picklescan for a folder, in one process. The hostile file must exist before it runs."""
    picklescan = str(work / "peers" / "picklescan" / "bin" / "picklescan")
    job = Job("picklescan -p DIR", (picklescan, "-p", str(folder)))
    return _peer("picklescan", work, job, partial(_tells_apart, folder, work / EVIL))


Proof = Callable[[tuple[str, ...]], Callable[[], str]]


def job_of(
    folder: Path, package: str, name: str, words: tuple[str, ...], source: Path, proof: Proof | None = None
) -> Job:
    """Return the job of a peer that is installed in ``folder``; ``words`` follow its program."""
    peer = next(peer for peer in PEERS if peer.package == package)
    full = (str(folder / package / "bin" / peer.program), *words)
    job = Job(name, full, (source,), most=references.SLOW)
    return _installed(peer, folder, job, proof(full) if proof else job.proof)


def _peer(package: str, work: Path, job: Job, proof: Proof) -> Job:
    peer = next(peer for peer in PEERS if peer.package == package)
    return _installed(peer, work / "peers", job._replace(most=references.SLOW), proof(job.words[:-1]))


def _installed(peer: Peer, folder: Path, job: Job, proof: Callable[[], str]) -> Job:
    """Return the job with the installation before its proof. If that fails, so does the job, with the same reason."""
    return job._replace(proof=lambda: install(peer, folder) or proof(), may_fail=True)


def shows(wanted: list[str], words: tuple[str, ...]) -> Callable[[], str]:
    """Return a proof that a command succeeds and prints all the wanted texts."""

    def proof() -> str:
        code, text = answers(*words)
        if code:
            return _first(text) or f"exit code {code}"
        missing = [name for name in wanted if name not in text]
        return f"does not show {missing[0]!r}" if missing else ""

    return proof


def _tells_apart(good: Path, evil: Path, words: tuple[str, ...]) -> Callable[[], str]:
    """Return a proof that a scanner accepts a harmless file and reports one that runs a command."""

    def proof() -> str:
        code, text = answers(*words, str(good))
        if code:
            return f"says of a harmless file: {_first(text) or f'exit code {code}'}"
        return "" if answers(*words, str(evil))[0] else "passes a file that runs a command"

    return proof


def _first(text: str) -> str:
    """Return the first line that is not blank, or "". It names the reason; tools add advice in later lines."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0].strip() if lines else ""
