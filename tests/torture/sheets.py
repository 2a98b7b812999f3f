"""Outputs in tasks (``plan``, ``run``, ``commit``) whose processes are killed, signalled, or meet a failing disk."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from .rows import FIXTURES, Options, Skipped, Tally
from .stage import ENVIRONMENT, OLD, OLD_MODE, Answer, answer
from .straced import Point, inject, need_strace, points

__all__ = ["COMMANDS", "Sheet", "commits", "ended", "errors", "plans", "runs", "small_disk", "together"]

#: Commands that write: a file, shards, a folder, several outputs; some over an old output.
COMMANDS: Final = {
    "strip-module": "strip-module {in}/t.pth -o {out}/o.pth",
    "strip-module --force": "strip-module {in}/t.pth -o {out}/o.pth --force",
    "strip-module to {hash8}": "strip-module {in}/t.pth -o {out}/o-{hash8}.pth",
    "cast": "cast {in}/t.pth --to-dtype bfloat16 -o {out}/o.pth",
    "safetensors": "convert {in}/t.pth --key state_dict --allow-loss all -o {out}/o.safetensors",
    "torch": "convert {in}/zero --to-format torch --allow-loss all -o {out}/o.pth",
    "dcp": "convert {in}/t.pth --to-format dcp --allow-loss all -o {out}/o",
    "shards": "convert {in}/t.pth --key state_dict --max-shard-size 2kB --allow-loss all -o {out}/o",
    "shards --force": "convert {in}/t.pth --key state_dict --max-shard-size 2kB --allow-loss all -o {out}/o --force",
    "join": "convert {in}/zero --allow-loss all -o {out}/o.safetensors",
    "join to dcp": "convert {in}/dist --to-format dcp --allow-loss all -o {out}/o",
    "out-dir": "remap {in}/t.pth {in}/u.pth --to cpu --out-dir {out}/all",
}
_SIZE: Final = "300"
_HIDDEN: Final = (".ckptool-part", ".ckptool-tmp")
#: Seconds that a run may take before it counts as one that hangs.
_PATIENCE: Final = 120.0

Tree = dict[str, tuple[bytes, int]]


class _Call(NamedTuple):
    """A command line as ``straced`` takes it: it begins where ``source`` is opened."""

    source: Path
    words: list[str]

    def process(self) -> list[str]:
        return [sys.executable, "-m", "ckptool", *self.words]


class Sheet:
    """A writing command in a folder of its own, as a file of tasks. ``expected`` is what it writes by itself."""

    def __init__(self, folder: Path, name: str, size: str = _SIZE) -> None:
        self.name, self.size = name, size
        self.inputs, self.outputs, self.folder = (folder / part for part in ("in", "out", "tasks"))
        for path in (self.inputs, self.outputs, self.folder):
            path.mkdir(parents=True)
        shutil.copyfile(FIXTURES / "ddp4_training.pth", self.inputs / "t.pth")
        shutil.copyfile(FIXTURES / "cuda1.pth", self.inputs / "u.pth")
        shutil.copytree(FIXTURES / "ranks" / "zero2_bf16", self.inputs / "zero")
        shutil.copytree(FIXTURES / "ranks" / "megatron_dist_tp2", self.inputs / "dist")
        self.path = self.folder / "t.jsonl"
        self.words = [
            word.replace("{in}", str(self.inputs)).replace("{out}", str(self.outputs))
            for word in COMMANDS[name].split()
        ]
        self.former: Tree = {}
        self._write()
        if "--force" in self.words:
            self._old = min(self.expected)
            self.reset()
            self._write()
        self.before = tree(self.inputs)
        #: The outputs by themselves: files, or folders of them.
        self.roots = {name if name.startswith("all/") else name.partition("/")[0] for name in self.expected}
        self.reset()

    def _write(self) -> None:
        done = answer(self.words)
        if done.code:
            raise AssertionError(f"{self.name} ends with {done.code}: {done.err}")
        self.expected = tree(self.outputs)

    def reset(self) -> None:
        """As before a plan: no output, or with ``--force`` an old one."""
        for folder in (self.outputs, self.folder):
            shutil.rmtree(folder)
            folder.mkdir()
        if "--force" in self.words:
            old = self.outputs / self._old
            old.parent.mkdir(exist_ok=True)
            old.write_bytes(OLD)
            old.chmod(OLD_MODE)
            self.former = tree(self.outputs)

    def plan(self) -> None:
        """A new plan, and nothing done of it."""
        self.reset()
        self._must("plan", "--tasks", str(self.path), "--task-size", self.size, *self.words)

    def run(self) -> None:
        """A new plan, all done but committed."""
        self.plan()
        self._must("run", str(self.path))

    def _must(self, *words: str) -> None:
        done = answer(list(words))
        if done.code:
            raise AssertionError(f"{' '.join(words)} ends with {done.code}: {done.err}")

    def call(self, command: str, *more: str) -> _Call:
        if command == "plan":
            words = ["plan", "--tasks", str(self.path), "--task-size", self.size, *self.words]
        else:
            words = [command, str(self.path), *more]
        return _Call(self.path, words)

    def hidden(self) -> list[str]:
        """What is staged, or temporary."""
        return sorted(str(path) for path in self.outputs.rglob(".*") if path.name.endswith(_HIDDEN))

    def visible(self) -> Tree:
        return {name: value for name, value in tree(self.outputs).items() if not _is_hidden(name)}

    def check_nothing(self, tally: Tally) -> None:
        """No output under its name, or the old one; the inputs as they were."""
        tally.check(self.visible() == self.former, f"there is {sorted(self.visible())}, not what was before")
        tally.check(tree(self.inputs) == self.before, "the inputs are not what they were")

    def check_each(self, tally: Tally) -> None:
        """Each output is there as a whole, or as it was before."""
        there = self.visible()
        for root in self.roots:
            mine = _below(there, root)
            whole = mine in (_below(self.former, root), _below(self.expected, root))
            tally.check(whole, f"{root} is neither the former nor the new one: {sorted(mine)}")
        strange = [name for name in there if not any(_below({name: there[name]}, root) for root in self.roots)]
        tally.check(not strange, f"there is {strange}")
        tally.check(tree(self.inputs) == self.before, "the inputs are not what they were")

    def check_resumed(self, tally: Tally) -> None:
        """Run and commit again: the output is the one that the command alone writes, and nothing else is left."""
        for command in ("run", "commit"):
            done = answer([command, str(self.path)])
            # All may be committed, and what was staged is gone then.
            tally.check(not done.code, f"{command} again ends with {done.code}: {done.err.strip()}")
        self.check_committed(tally)

    def check_committed(self, tally: Tally) -> None:
        there = tree(self.outputs)
        other = sorted(name for name in {*there, *self.expected} if there.get(name) != self.expected.get(name))
        tally.check(not other, f"the output differs in {other}")
        left = sorted(os.listdir(self.folder))
        tally.check(left == ["t.jsonl", "t.jsonl.journal"], f"beside the tasks there is {left}")
        tally.check(tree(self.inputs) == self.before, "the inputs are not what they were")


def tree(folder: Path) -> Tree:
    """The bytes of all files below, and their modes."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
    return found


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") and part.endswith(_HIDDEN) for part in name.split("/"))


def _below(files: Tree, root: str) -> Tree:
    return {name: value for name, value in files.items() if name == root or name.startswith(root + "/")}


def sheets(options: Options) -> list[Sheet]:
    names = [name for name in COMMANDS if not options.quick or name in ("strip-module", "shards --force", "out-dir")]
    return [Sheet(options.scratch / str(number), name) for number, name in enumerate(names)]


def _changing(sheet: Sheet, command: str, log: Path) -> list[Point]:
    """The calls of a command that change the disk, from the opening of the tasks on."""
    return [point for point in points(sheet.call(command), log) if _changes(point)]


def _changes(point: Point) -> bool:
    if point.name in ("open", "openat"):
        return any(flag in point.text for flag in ("O_CREAT", "O_RDWR", "O_WRONLY"))
    if point.name == "write":
        return not point.text.startswith(("write(1,", "write(2,"))
    names = "pwrite64 copy_file_range sendfile ftruncate fchmod chmod fsync link rename renameat2 unlink mkdir"
    return point.name in names.split()


def _spread(chance: random.Random, found: list[Point], amount: int) -> list[Point]:
    """So many of the calls: one of each name at least, the others at random."""
    first = list({point.name: point for point in reversed(found)}.values())
    rest = [point for point in found if point not in first]
    return [*first, *chance.sample(rest, min(max(amount - len(first), 0), len(rest)))]


def runs(tally: Tally, options: Options) -> None:
    """``run`` killed at system calls that change the disk, and at random moments."""
    need_strace()
    chance, log = random.Random(options.seed), options.scratch / "log"
    for sheet in sheets(options):
        sheet.plan()
        begun = time.monotonic()
        found = _changing(sheet, "run", log)
        seconds = time.monotonic() - begun
        for point in _spread(chance, found, options.amount(14, 5)):
            sheet.plan()
            hit = inject(sheet.call("run"), log, point.name, f"signal=KILL:when={point.number}")
            if hit.call:
                tally.case(f"run of {sheet.name}, killed at {point} {hit.call[:120]}")
                sheet.check_nothing(tally)
                sheet.check_resumed(tally)
        for turn in range(options.amount(6, 2)):
            sheet.plan()
            delay, more = chance.uniform(0.05, seconds), ("--jobs", "2") if turn % 2 else ()
            tally.case(f"run {' '.join(more)} of {sheet.name}, killed after {delay:.3f} s")
            with _started(sheet.call("run", *more)) as process:
                time.sleep(delay)
                process.kill()
            sheet.check_nothing(tally)
            sheet.check_resumed(tally)


def _started(call: _Call, errors: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    return subprocess.Popen(
        call.process(), env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=errors, text=True, errors="replace"
    )


def together(tally: Tally, options: Options) -> None:
    """Three processes that carry out the same tasks, one of which is killed."""
    chance = random.Random(options.seed)
    twice = 0
    for sheet in sheets(options):
        for turn in range(options.amount(4, 1)):
            sheet.plan()
            more = ("--jobs", "2") if turn % 2 else ()
            delay = chance.uniform(0.15, 0.8)
            tally.case(f"three runs {' '.join(more)} of {sheet.name}, one killed after {delay:.3f} s")
            three = [_started(sheet.call("run", *more), subprocess.PIPE) for _ in range(3)]
            time.sleep(delay)
            three[0].kill()
            for number, process in enumerate(three):
                _, err = process.communicate(timeout=_PATIENCE)
                tally.check(not number or not process.returncode, f"one ends with {process.returncode}: {err.strip()}")
            sheet.check_nothing(tally)
            lines = (sheet.folder / "t.jsonl.journal").read_text().splitlines()
            ids = [json.loads(line)["task"] for line in lines]
            twice += len(ids) - len(set(ids))
            done = answer(["commit", str(sheet.path)])
            tally.check(not done.code, f"commit ends with {done.code}: {done.err.strip()}")
            sheet.check_committed(tally)
    tally.note(f"{twice:,} tasks were carried out more than once")


def commits(tally: Tally, options: Options) -> None:
    """``commit`` killed at every call that changes the disk."""
    need_strace()
    log = options.scratch / "log"
    for sheet in sheets(options):
        sheet.run()
        found = _changing(sheet, "commit", log)
        for point in found if not options.quick else found[::4]:
            sheet.run()
            hit = inject(sheet.call("commit"), log, point.name, f"signal=KILL:when={point.number}")
            if hit.call:
                tally.case(f"commit of {sheet.name}, killed at {point} {hit.call[:120]}")
                sheet.check_each(tally)
                done = answer(["commit", str(sheet.path)])
                tally.check(not done.code, f"commit again ends with {done.code}: {done.err.strip()}")
                sheet.check_committed(tally)


def plans(tally: Tally, options: Options) -> None:
    """``plan`` killed at every call that changes the disk; what is there then is taken away by ``--abort``."""
    need_strace()
    log = options.scratch / "log"
    for sheet in sheets(options):
        sheet.reset()
        found = _changing(sheet, "plan", log)
        for point in found if not options.quick else found[::4]:
            sheet.reset()
            hit = inject(sheet.call("plan"), log, point.name, f"signal=KILL:when={point.number}")
            if hit.call:
                tally.case(f"plan of {sheet.name}, killed at {point} {hit.call[:120]}")
                sheet.check_nothing(tally)
                if sheet.path.exists():
                    done = answer(["commit", str(sheet.path), "--abort"])
                    tally.check(not done.code, f"commit --abort ends with {done.code}: {done.err.strip()}")
                tally.check(not os.listdir(sheet.folder), f"left beside the tasks: {os.listdir(sheet.folder)}")
                tally.check(not sheet.hidden(), f"left behind: {sheet.hidden()}")
                sheet.check_nothing(tally)


def errors(tally: Tally, options: Options) -> None:
    """ENOSPC and EIO in ``plan``, ``run`` and ``commit``, once and for good; ``ulimit -f`` of a part of the output."""
    need_strace()
    chance, log = random.Random(options.seed), options.scratch / "log"
    prepare: dict[str, Callable[[Sheet], None]] = {"plan": Sheet.reset, "run": Sheet.plan, "commit": Sheet.run}
    for sheet in sheets(options):
        for command, make in prepare.items():
            make(sheet)
            found = [point for point in _changing(sheet, command, log) if point.name != "unlink"]
            for point in _spread(chance, found, options.amount(9, 3)):
                code, lasting = chance.choice(("ENOSPC", "EIO")), chance.choice(("", "+"))
                make(sheet)
                hit = inject(sheet.call(command), log, point.name, f"error={code}:when={point.number}{lasting}")
                if hit.call:
                    tally.case(f"{command} of {sheet.name}, {code} at {point}{lasting} {hit.call[:120]}")
                    _check_failed(tally, sheet, command, hit.answer)
        size = max(len(data) for data, _ in sheet.expected.values())
        for _ in range(options.amount(4, 1)):
            sheet.plan()
            limit, more = chance.randrange(size), chance.choice(((), ("--jobs", "2")))
            tally.case(f"run {' '.join(more)} of {sheet.name} with ulimit -f of {limit:,} of {size:,} bytes")
            done = subprocess.run(
                sheet.call("run", *more).process(),
                env=ENVIRONMENT,
                capture_output=True,
                text=True,
                check=False,
                timeout=_PATIENCE,
                preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)),
            )
            _check_failed(tally, sheet, "run", Answer(done.returncode, done.stdout, done.stderr))


def _check_failed(tally: Tally, sheet: Sheet, command: str, done: Answer) -> None:
    """One sentence and a code; no output before the commit, the right one after another attempt."""
    tally.check(done.code in (0, 3, 5), f"it ends with {done.code}: {done.err.strip()}")
    tally.check("Traceback" not in done.err and "a bug in" not in done.err, f"it says {done.err.strip()!r}")
    if command == "commit":
        sheet.check_each(tally)
    else:
        sheet.check_nothing(tally)
    if command == "plan" and done.code:
        tally.check(not sheet.hidden(), f"left behind: {sheet.hidden()}")
        tally.check(not os.listdir(sheet.folder), f"left beside the tasks: {os.listdir(sheet.folder)}")
        sheet.plan()
    sheet.check_resumed(tally)


def ended(tally: Tally, options: Options) -> None:
    """SIGINT and SIGTERM in ``plan``, ``run`` and ``commit``, at calls that change the disk."""
    need_strace()
    chance, log = random.Random(options.seed), options.scratch / "log"
    prepare: dict[str, Callable[[Sheet], None]] = {"plan": Sheet.reset, "run": Sheet.plan, "commit": Sheet.run}
    for sheet in sheets(options):
        for command, make in prepare.items():
            make(sheet)
            for point in _spread(chance, _changing(sheet, command, log), options.amount(6, 2)):
                number = chance.choice((signal.SIGINT, signal.SIGTERM))
                make(sheet)
                what = f"signal={number.name.removeprefix('SIG')}:when={point.number}"
                hit = inject(sheet.call(command), log, point.name, what)
                tally.case(f"{command} of {sheet.name}, {number.name} at {point} {point.text[:120]}")
                done = hit.answer
                tally.check(done.code in (0, 128 + number, -number), f"it ends with {done.code}: {done.err.strip()}")
                tally.check("Traceback" not in done.err, f"it says {done.err.strip()!r}")
                if command == "commit":
                    sheet.check_each(tally)
                else:
                    sheet.check_nothing(tally)
                if command == "plan" and done.code:
                    if sheet.path.exists():  # the signal came when it was just made
                        tally.check(not answer(["commit", str(sheet.path), "--abort"]).code, "abort fails")
                    tally.check(not sheet.hidden(), f"left behind: {sheet.hidden()}")
                    sheet.plan()
                sheet.check_resumed(tally)


#: In a mount namespace that ends with the command: a disk of $1, planned for, filled up but for $2 bytes, then freed.
_ON_SMALL_DISK: Final = """
    mount -t tmpfs -o size="$1",mode=0777 none "$OUT" || exit 99
    filler="$OUT/filler"; room="$2"; shift 2
    "$@" plan --tasks "$TASKS" --task-size 300 $WORDS >/dev/null || exit 98
    cat /dev/zero 2>/dev/null > "$filler"; truncate -s "-$room" "$filler"
    "$@" run "$TASKS" $MORE >/dev/null; echo "first $?"
    rm "$filler"; ls "$OUT" | sed 's/^/there /'
    "$@" run "$TASKS" >/dev/null; echo "run $?"; "$@" commit "$TASKS" >/dev/null; echo "commit $?"
    cp -a "$OUT" "$COPY"
"""


def small_disk(tally: Tally, options: Options) -> None:
    """A tmpfs that is full when ``run`` comes to write, in this process or in its workers; then there is room again."""
    enter = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], capture_output=True, check=False).returncode:
        raise Skipped("no mount namespace for this user")
    chance = random.Random(options.seed)
    full = 0
    for sheet in sheets(options):
        if sheet.former:
            continue
        for turn in range(options.amount(4, 1)):
            sheet.reset()
            more, room = "--jobs 2" if turn % 2 else "", 4096 * chance.randrange(4)
            tally.case(f"run {more} of {sheet.name} on a disk with {room:,} bytes of room")
            copy = sheet.outputs.parent / f"copy{turn}"
            script = ["sh", "-c", _ON_SMALL_DISK, "sh", "2m", str(room), sys.executable, "-m", "ckptool"]
            places = {"OUT": str(sheet.outputs), "TASKS": str(sheet.path), "COPY": str(copy), "MORE": more}
            environment = ENVIRONMENT | places | {"WORDS": " ".join(sheet.words)}
            done = subprocess.run([*enter, *script], env=environment, capture_output=True, text=True, check=False)
            if done.returncode in (98, 99):
                raise Skipped(f"no tmpfs can be mounted here: {done.stderr.strip()[:200]}")
            lines = done.stdout.splitlines()
            full += "first 5" in lines
            tally.check(lines[:1] in (["first 5"], ["first 0"]), f"it says {lines} {done.stderr.strip()}")
            there = [line for line in lines if line.startswith("there ") and line != "there all"]
            tally.check(not there, f"before the commit there is {there}")
            tally.check(lines[-2:] == ["run 0", "commit 0"], f"with room it says {lines} {done.stderr.strip()}")
            tally.check("Traceback" not in done.stderr, f"it says {done.stderr.strip()!r}")
            tally.check(copy.is_dir() and tree(copy) == sheet.expected, "the output is another one")
    tally.note(f"{full} of {tally.amount} runs met a full disk")
