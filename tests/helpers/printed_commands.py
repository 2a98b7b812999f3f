"""Run every command that ckptool prints for a checkpoint, and those that its outputs lead to, to the end."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from command_line import Said, say
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckptool
from ckptool.base.errors import CkptoolError
from ckptool.checkpoint.tensors import Tensor, TensorReader
from ckptool.values.lazy_tensor import TensorValue

__all__ = ["FIRST", "POLICIES", "Walk", "output_of", "steps"]

#: Steps from a file that somebody has to one that loads.
LONGEST = 4
#: Commands that keep every tensor, wherever it is. All others keep the weights, as far as they are asked for.
KEEP_ALL = frozenset(("strip-module", "add-module", "rename", "remap", "wrap", "set", "repack", "sanitize"))
#: Edits that leave out what is not the weights, or not asked for.
NARROW = frozenset(("slim", "drop", "keep", "extract", "to-format", "to-names"))
#: Commands that only answer. Exit code 1 is an answer.
ANSWERS = frozenset(("inspect", "keys", "get", "stats", "validate", "scan", "diff", "match", "hash", "explain", "lock"))

Words: TypeAlias = tuple[str, ...]
Tensors: TypeAlias = "collections.Counter[tuple[str, tuple[int, ...], str]]"


#: What people type first for a checkpoint. Errors have next steps, too.
FIRST = """
explain FILE
inspect FILE
get FILE .
keys FILE
validate FILE
validate FILE --quick
validate FILE --weights-only --device cpu --prefix none
validate FILE --layout bare
validate FILE --layout wrapped --device cuda:0
validate FILE --prefix module
validate FILE --dtype float16
validate FILE --safe --strict
validate FILE --load
validate FILE --max-bytes 100
validate FILE --require *.wieght --forbid *.bias
validate FILE --finite
validate FILE --policy release.toml
validate FILE --policy training.toml
scan FILE
stats FILE --no-values
hash FILE
get FILE statedict
get FILE fc.wieght
diff FILE target.pth
diff target.pth FILE
match FILE target.pth
match target.pth FILE
match FILE target.pth --lenient
strip-module FILE -o made.pth
strip-module FILE
strip-module FILE --in-place
add-module FILE -o made.pth
sanitize FILE -o made.pth
sanitize FILE
edit FILE --sanitize --to cpu -o made.pth
edit FILE --strip-module --to cpu --in-place
remap FILE --cpu -o made.pth
remap FILE cpu
remap FILE --map cuda:2=cuda:0 -o made.pth
remap FILE --to cuda -o made.pth
extract FILE statedict -o made.pth
extract FILE state_dict -o made.pth
wrap FILE state_dict -o made.pth
drop FILE fc.weight fc.bias
drop FILE optimizr -o made.pth
keep FILE state_dict -o made.pth
rename FILE a=b
rename FILE fc.wieght head.weight
set FILE epoch=1 -o made.safetensors
slim FILE -o made.pth
slim FILE --for inference -o made.pth
cast FILE --to-dtype float16 -o made.pth
repack FILE -o made.pth
salvage FILE
redact FILE -o made.pth
merge FILE target.pth -o made.pth
average FILE target.pth -o made.pth
convert FILE
convert FILE -o made.safetensors
convert FILE -o made.safetensors --strict
convert FILE -o made.dcp
convert FILE -o made/ --to-format safetensors --max-shard-size 500
convert FILE --to-format torch
convert FILE -o made.onnx
load FILE
FILE
"""
POLICIES = {
    "release.toml": 'layout = "bare"\nprefix = "none"\ndevice = ["cpu"]\nweights-only = true\n',
    "training.toml": 'layout = "wrapped"\ndevice = ["cpu", "cuda:*"]\nsafe = true\n[files."*.ckpt"]\nprefix = "none"\n',
}


class Printed(NamedTuple):
    """A printed line of commands, and the command that printed it first."""

    line: str
    asker: str = ""


def printed(text: str, asker: str = "") -> list[Printed]:
    """The commands behind the arrows, each once; nothing else is there."""
    lines = [row.partition("-> ")[2] for row in text.splitlines() if re.match(r" *-> ", row)]
    for line in lines:
        assert shlex.split(line)[0] in ("ckptool", "mv", "mkdir", "sha256sum"), line
    return [Printed(line, asker) for line in dict.fromkeys(lines)]


def steps(text: str) -> list[str]:
    """The lines of commands behind the arrows."""
    return [item.line for item in printed(text)]


def output_of(step: str) -> Path | None:
    words = shlex.split(step)
    return Path(words[words.index("-o") + 1]) if "-o" in words else Path(words[-1]) if words[0] == "mv" else None


def loads(path: Path) -> None:
    """Load it with what reads its format, as on a machine without a GPU."""
    with ckptool.open(path) as checkpoint:
        kind = checkpoint.format
    if kind == "dcp":
        planner = _EmptyStateDictLoadPlanner()
        _load_state_dict({}, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
    elif kind == "gguf":
        pytest.importorskip("gguf").GGUFReader(path)
    elif kind == "torchscript":
        torch.jit.load(path)
    elif path.is_dir():
        for file in path.iterdir():
            if file.suffix in (".safetensors", ".bin"):
                loads(file)
    elif path.suffix == ".safetensors":
        load_file(path)
    else:
        torch.load(path, weights_only=True)


def refusal(path: Path) -> str:
    """Why the library of its format does not load it; "" if it does."""
    try:
        loads(path)
    except Exception as error:  # whatever torch raises is the answer
        return f"{type(error).__name__}: {error}"[:500]
    return ""


def tensors(path: str, key: str | None = None, everywhere: bool = True, values: bool = True) -> Tensors:
    """The tensors with values, tied ones once, by dtype, shape and digest.

    ``key``: those under it. Not ``everywhere``: those in state dicts. Without ``values`` only the shapes count.
    """
    found: dict[object, tuple[str, tuple[int, ...], str]] = {}
    with ckptool.open(path) as opened:
        checkpoint = opened.lenient()
        survey = checkpoint.survey
        sure = {number for number, item in enumerate(survey.state_dicts) if item.confidence == "high"}
        for entry in survey.tensors:
            tensor = entry.tensor
            if not tensor.own_bytes or not (everywhere or entry.state_dict in sure):
                continue
            if key is not None and not entry.path.startswith(key) and entry.path != key:
                continue
            for part in _owners(survey.reader, tensor):
                shape = tuple(part.shape)
                try:
                    data = TensorValue(checkpoint, entry.ref, part, entry.path).tobytes() if values else b""
                    digest = hashlib.sha256(data).hexdigest()[:12] if values else ""
                except CkptoolError:
                    digest = "?"  # its bytes are not in the file, or not numbers
                view = (part.storage or entry.ref, part.offset, part.dtype, shape, tuple(part.stride))
                found[view] = (part.dtype if values else "", shape, digest)
    return collections.Counter(found.values())


def _owners(reader: TensorReader, tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with bytes of their own that a tensor is made of; itself if it has them."""
    parts = [] if tensor.storage else [reader.tensor(ref) for ref in tensor.parts]
    if not parts:
        yield tensor
    for part in parts:
        if part is not None:
            yield from _owners(reader, part)


def storage_bytes(path: str) -> int:
    """The bytes of the storages in a zip of torch."""
    if not zipfile.is_zipfile(path):
        return 0
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(item.file_size for item in archive.infolist() if "/data/" in item.filename)
    except zipfile.BadZipFile:
        return 0


@contextlib.contextmanager
def as_before(path: str) -> Iterator[None]:
    """Put a file or folder back as it was."""
    with tempfile.TemporaryDirectory() as folder:
        kept = os.path.join(folder, "kept")
        (shutil.copytree if os.path.isdir(path) else shutil.copy2)(path, kept)
        try:
            yield
        finally:
            removed(path)
            removed(f"{path}.ckptool-undo")
            shutil.move(kept, path)


def removed(path: str | Path) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def signature(line: str) -> str:
    """The edits of a line, without the names of files; a line that only asks is itself."""
    words = shlex.split(line)
    if words[1] in ANSWERS:
        return line
    kept = [word for n, word in enumerate(words) if words[n - 1] != "-o" and word not in ("-o", "ckptool")]
    output = output_of(line)
    return " ".join([word for word in kept if not os.path.lexists(word)] + [output.suffix if output else ""])


def findings(path: str) -> list[Any]:
    """What inspect says of a checkpoint."""
    said = say("inspect", path, "--format", "json")
    return json.loads(said.out)["findings"] if said.code == 0 else [{"level": "error"}]


class Walk:
    """Follows printed commands in the working folder, and counts them."""

    def __init__(self) -> None:
        self.commands = 0
        self.problems: list[str] = []
        self._done: set[str] = set()

    def wrong(self, trail: Sequence[str], *words: object) -> None:
        self.problems.append(" | ".join([*trail, *map(str, words)]))

    def follow(self, lines: Sequence[Words], trail: Words = (), seen: Words = ()) -> None:
        """Run ``lines``, then what they print. ``seen`` has the edits that led to these commands."""
        askers: dict[str, list[Words]] = {}
        every: dict[str, Printed] = {}
        for words in lines:
            with as_before(words[1]) if "--in-place" in words else contextlib.nullcontext():
                own, good = self.asked(words, trail)
                for item in own:
                    every.setdefault(item.line, item)
                    askers.setdefault(item.line, []).extend([words] if good and words[0] in ANSWERS else [])
                    if "--in-place" in words:  # what it prints is about the edited file
                        self.step(every.pop(item.line), [], (*trail, shlex.join(words)), seen)
        for line, item in every.items():
            self.step(item, askers[line], trail or (item.asker,), seen)

    def asked(self, words: Words, trail: Words = ()) -> tuple[list[Printed], bool]:
        """Run one command and return what it prints, and whether it gave an answer; take away what it wrote."""
        before = set(os.listdir())
        said = say(*words)
        if said.code >= 70:
            self.wrong(trail, shlex.join(words), said.all)
        kept = {f"{word}.ckptool-undo" for word in words[1:2] if "--in-place" in words}  # by which undo goes back
        for name in set(os.listdir()) - before - kept:
            removed(name)
        try:
            return printed(said.all, shlex.join(words)), said.code in (0, 1)
        except AssertionError as error:
            self.wrong(trail, shlex.join(words), error)
            return [], False

    def step(self, item: Printed, askers: Sequence[Words], trail: Words, seen: Words) -> None:
        """Run a printed line, check its outputs, and follow what is printed for them."""
        if item.line in self._done:
            return None
        self._done.add(item.line)
        self.commands += len(item.line.split(" && "))
        edit = signature(item.line)
        trail = (*trail, item.line)
        if edit in seen:
            return self.wrong(trail, "a circle")
        if len(seen) >= LONGEST:
            return self.wrong(trail, "no end")
        seen = (*seen, edit) if askers or seen else seen  # a correction is what was typed
        before = set(os.listdir())
        path = next((word for word in shlex.split(item.line)[1:] if os.path.exists(word)), "")
        changes = bool(path) and ("--in-place" in item.line or item.line.startswith(("mv ", "ckptool undo ")))
        with as_before(path) if changes else contextlib.nullcontext():
            said = self.run(item.line, trail)
            if said is None:
                return None
            outputs = [str(out) for part in item.line.split(" && ") if (out := output_of(part)) is not None]
            outputs = outputs or ([path] if changes else [])
            if not outputs or said.code in (3, 4):  # damage that nobody had read before
                for other in printed(said.all):
                    self.step(other, [], trail, seen)
                return None
            for out in outputs:
                if not os.path.lexists(out):
                    self.wrong(trail, f"{out} is not there")
                elif not out.endswith((".json", ".html", ".npy")):
                    self.check(path, out, item, askers, said, trail, seen)
        for name in (set(os.listdir()) - before) | {*outputs} - {path}:
            removed(name)
        return None

    def run(self, line: str, trail: Words) -> Said | None:
        """Run a printed line; None if it fails."""
        said = Said(0, "", "")
        for part in line.split(" && "):
            words = shlex.split(part)
            if words[0] != "ckptool":
                done = subprocess.run(words, check=False, capture_output=True, text=True)
                said = Said(done.returncode, done.stdout, done.stderr)
            else:
                said = say(*words[1:])
                if said.code in (3, 4) and "ckptool salvage" in said.err and words[1] != "salvage":
                    return said
            if said.code > (words[1] in ANSWERS or words[1] == "salvage"):
                self.wrong(trail, f"exit {said.code}", said.all)
                return None
        return said

    def check(
        self, path: str, out: str, item: Printed, askers: Sequence[Words], said: Said, trail: Words, seen: Words
    ) -> None:
        """Check that an output loads, has the tensors of its source, and that the reason for the command is gone."""
        lost = self.lost(path, out, item, said)
        if lost:
            self.wrong(trail, "lost", lost)
        again = [tuple(out if path == word or path.startswith(f"{word}/") else word for word in own) for own in askers]
        for words in again:
            for other in self.asked(words, trail)[0]:
                if signature(other.line) == signature(item.line):
                    return self.wrong(trail, f"{shlex.join(words)} prints it again", other.line)
        again += [words for words in (("inspect", out), ("validate", out)) if words not in again]
        self.follow(again, trail, seen)
        why = refusal(Path(out))
        if why and not any(note["level"] in ("error", "warning") or note["next"] for note in findings(out)):
            self.wrong(trail, "does not load, and inspect says nothing", why)
        return None

    def lost(self, path: str, out: str, item: Printed, said: Said) -> str:
        """The tensors that an output lacks, in words; "" if it has all."""
        words = shlex.split(item.line)
        verb = words[1] if words[0] == "ckptool" else "mv"
        if "&&" in words or verb == "salvage" or not os.path.exists(path):
            return ""
        source = path
        edits = {verb, *(word[2:] for word in words if word.startswith("--"))}
        narrow = edits & NARROW or out.endswith((".safetensors", ".dcp")) or os.path.isdir(out)
        everywhere = (verb in KEEP_ALL or verb == "edit") and not narrow
        values = not edits & {"cast", "to-dtype"}
        key = words[words.index("--key") + 1] if "--key" in words else None
        key = words[3] if verb == "extract" else words[words.index("--extract") + 1] if "--extract" in words else key
        if edits & {"drop", "keep"} and item.asker.split()[0] in ("match", "drop", "keep"):
            return ""  # what the model lacks, and what people ask for
        try:
            have = tensors(source, key, everywhere, values)
        except CkptoolError:
            return ""
        written = tensors(out, None, True, values)
        if "to-names" in edits:  # the same numbers are cut in another way, without the padding of the vocabulary
            cut = re.search(r"cut from (\d+) to (\d+) rows", said.all)
            rows = {int(cut[1]): int(cut[2])} if cut else {}
            before = sum(math.prod((rows.get(shape[0], shape[0]), *shape[1:])) for _, shape, _ in have.elements())
            after = sum(math.prod(shape) for _, shape, _ in written.elements())
            return "" if before <= after else f"{before:,} elements became {after:,}"
        missing = have - written
        if (
            everywhere
            and values
            and storage_bytes(source) > storage_bytes(out)
            and not edits & {"as-state-dict", "repack"}
        ):
            return f"{storage_bytes(source)} bytes of storages became {storage_bytes(out)}"
        if missing and "as-state-dict" in edits and "left out" in said.all:
            return ""
        return str(list(missing.items())[:3]) if missing else ""
