"""Outputs that cannot be written where they are to go: limits on files, full devices, a small disk."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .rows import FIXTURES, Options, Skipped, Tally
from .stage import ENVIRONMENT, OLD, SUFFIX, Stage, limited, writing

#: Commands that read.
_READING = ("inspect", "keys", "validate", "diff")


def file_size_limit(tally: Tally, options: Options) -> None:
    """``ulimit -f`` at every 256 bytes up to the size of the output."""
    for item in writing(folders=False):
        stage = Stage(options.scratch / item.name, item)
        size = len(stage.expected)
        for limit in range(0, size + 256, options.amount(256, 2048)):
            stage.reset(force=True)
            tally.case(f"{item.name} with ulimit -f of {limit:,} of {size:,} bytes")
            done = limited(stage.process(), limit)
            there = stage.check_promise(tally, leftovers=0)
            if limit >= size:
                tally.check(done.code == stage.code and there == "new", f"it ends with {done.code}")
            else:
                tally.check(done.code == 5 and there == "old", f"it ends with {done.code}, {there}")
                stage.check_message(tally, done.err, os.strerror(errno.EFBIG), [str(stage.out)])


def full_stdout(tally: Tally, options: Options) -> None:
    """Every command with stdout on a device that is full. What was to be written is written all the same."""
    if not Path("/dev/full").exists():
        raise Skipped("there is no /dev/full")
    for item in writing():
        stage = Stage(options.scratch / item.name, item)
        for more in ([], ["--format", "json"], ["--format", "jsonl"]):
            for force in (False, True):
                stage.reset(force)
                tally.case(f"{item.name} {' '.join(more)} > /dev/full")
                code, err = _to_full(stage.process(*more))
                tally.check(code == 5, f"it ends with {code}")
                stage.check_message(tally, err, os.strerror(errno.ENOSPC), ["stdout"])
                tally.check(stage.check_promise(tally, 0) == "new", f"the output holds {stage.holds()}")
    for name in _READING:
        for fixture in ("bare.pth", "ddp4_training.pth", "legacy_cuda.pth"):
            inputs = [str(FIXTURES / fixture)] * (2 if name == "diff" else 1)
            tally.case(f"{name} {fixture} > /dev/full")
            code, err = _to_full([sys.executable, "-m", "ckptool", name, *inputs])
            tally.check(code == 5, f"it ends with {code}")
            told = "stdout" in err and os.strerror(errno.ENOSPC) in err and "Traceback" not in err
            tally.check(told and "Exception ignored" not in err, f"it says {err.strip()!r}")


def _to_full(command: list[str]) -> tuple[int, str]:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


#: In a mount namespace that ends with the command: an old output on a disk of $2, and a run over it.
_ON_SMALL_DISK = """
    mount -t tmpfs -o size="$2",mode=0777 none "$1" && cp "$3" "$1/$OUT" || exit 99
    shift 3; "$@"; echo "exit $?"; cmp -s "$OLD" "$PLACE/$OUT" && echo old
    cmp -s "$NEW" "$PLACE/$OUT" && echo new; ls -A "$PLACE"
"""


def small_disk(tally: Tally, options: Options) -> None:
    """A tmpfs of a few pages, from one that holds hardly the old output to one that holds both."""
    if shutil.which("unshare") is None:
        raise Skipped("there is no unshare")
    enter = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*enter, "true"], capture_output=True, check=False).returncode:
        raise Skipped("no mount namespace for this user")
    old, new, place = (options.scratch / name for name in ("old", "new", "small"))
    old.write_bytes(OLD)
    place.mkdir()
    for item in writing(folders=False):
        stage = Stage(options.scratch / item.name, item, _swollen(options.scratch, item.fixture))
        new.write_bytes(stage.expected)
        pages = -(-len(OLD) // 4096) + -(-len(stage.expected) // 4096)
        stage.out, stage.force = place / stage.out.name, True
        for size in range(1, pages + 3):
            tally.case(f"{item.name} on a disk of {size * 4} KiB")
            script = ["sh", "-c", _ON_SMALL_DISK, "sh", str(place), f"{size * 4}k", str(old), *stage.process("-q")]
            environment = ENVIRONMENT | {"OLD": str(old), "NEW": str(new), "PLACE": str(place), "OUT": stage.out.name}
            done = subprocess.run([*enter, *script], env=environment, capture_output=True, text=True, check=False)
            if done.returncode == 99 or "exit" not in done.stdout:
                raise Skipped(f"no tmpfs can be mounted here: {done.stderr.strip()[:200]}")
            lines = done.stdout.split("\n")
            tally.check(not any(SUFFIX in line for line in lines), f"left behind: {lines}")
            if lines[0] == f"exit {stage.code}":
                tally.check("new" in lines, f"it ends well, but on the disk is {lines}")
            else:
                tally.check(lines[0] == "exit 5" and "old" in lines, f"it leaves {lines}")
                stage.check_message(tally, done.stderr, os.strerror(errno.ENOSPC), [str(stage.out)])


def _swollen(folder: Path, fixture: str) -> Path | None:
    """A larger input where torch can make one, so that the disk fills up in the middle of the copy."""
    if fixture not in ("bare_module.pth", "cuda0.pth", "legacy_bare.pth"):
        return None
    import torch

    path = folder / f"larger-{fixture}"
    values = {f"module.layer{n}.weight": torch.full((1500,), float(n)) for n in range(6)}
    torch.save(values, path, _use_new_zipfile_serialization="legacy" not in fixture)
    return path
