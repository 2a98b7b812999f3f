"""Edits of ckptool on an input, and the same done naively on what torch loads."""

from __future__ import annotations

import os
import random
import struct
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import oracle
import torch
from torture.compare import same, same_values, stripped, tensors

import ckptool
from ckptool.base.limits import LIMITS
from ckptool.checkpoint.checkpoint import Checkpoint
from ckptool.checkpoint.paths import parse_path

from .asking import saved
from .finds import EDIT, Find
from .reading import comparable, error_text, load, undefined
from .sandbox import contained


class Edit(NamedTuple):
    """``make`` gives the edited checkpoint, ``right`` says what is wrong about what torch makes of the output, "" for
    nothing. ``damage`` says what may become of an input that torch refuses: "stays" in the output (or the edit is
    refused), "framing" may be mended around the same bytes, "reading" may be another in the other format where the
    input was not called valid, "any" may go with what is left out."""

    name: str
    make: Callable[[Checkpoint], Checkpoint]
    right: Callable[[Any, Any, Checkpoint], str]
    suffix: str = ".pth"
    damage: str = "stays"


def _alike(before: Any, after: Any, checkpoint: Checkpoint) -> str:
    told = oracle.difference(before, after)
    if "storage" in told and checkpoint.container.format == "torch-legacy" and same(before, after):
        return ""  # a view of a storage, which only the legacy format has
    return told


def _moved(before: Any, after: Any, checkpoint: Checkpoint) -> str:
    return _alike(_on_cpu(before), after, checkpoint)


def _on_cpu(value: Any) -> Any:
    """The same containers, in which objects of torch.device are another one."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, dict):
        for key, inner in list(value.items()):
            if type(inner) in (torch.device, dict, OrderedDict, Counter, list, tuple):
                value[key] = _on_cpu(inner)
    elif type(value) is list:
        value[:] = map(_on_cpu, value)
    elif type(value) is tuple:
        return tuple(map(_on_cpu, value))
    return value


def _stripped(before: Any, after: Any, checkpoint: Checkpoint) -> str:
    # A key may make a mapping one that is no state dict for ckptool; it then stays as it is.
    if same(after, stripped(before)) or same(after, before):
        return ""
    return "" if same_values(after, before) and _renamed(before, after, "module.") else "keys or values differ"


def _added(before: Any, after: Any, _: Checkpoint) -> str:
    return "" if same_values(after, before) and _renamed(after, before, "fuzz.") else "keys or values differ"


def _renamed(long: Any, short: Any, prefix: str) -> bool:
    """Whether keys differ in nothing but a prefix that one side has."""
    if isinstance(long, Mapping) and isinstance(short, Mapping):
        if len(long) != len(short):
            return False
        return all(
            (oracle.alike_key(a) == oracle.alike_key(b) or (isinstance(a, str) and a.removeprefix(prefix) == b))
            and _renamed(long[a], short[b], prefix)
            for a, b in zip(long, short)
        )
    if isinstance(long, list | tuple) and isinstance(short, list | tuple):
        return len(long) == len(short) and all(_renamed(a, b, prefix) for a, b in zip(long, short))
    return True


def _dropped(before: Any, after: Any, checkpoint: Checkpoint) -> str:
    name = _first_key(checkpoint)
    old, new = tensors(before), tensors(after)
    for path, tensor in new.items():
        if path not in old:
            return "a tensor that was not there"
        if not same(old[path], tensor):
            return "another tensor"
    gone = [path for path in old if path not in new]
    if any(not path.endswith(f"/{name}") and "/state/" not in path for path in gone):
        return "more is dropped than was asked for"
    return ""


def _first_key(checkpoint: Checkpoint) -> str:
    roots = {found.path for found in checkpoint.survey.state_dicts}  # by such a name all of it is dropped
    for entry in checkpoint.survey.tensors:
        if (
            entry.key not in roots
            and entry.state_dict >= 0
            and entry.key.replace(".", "").replace("_", "").isalnum()
            and entry.key.isascii()
        ):
            return entry.key
    raise ckptool.errors.RefusedError("no key to drop")


def _kept(before: Any, after: Any, _: Checkpoint) -> str:
    """After sanitize: every tensor is where it was, or in a mapping that an object became."""
    old, new = tensors(before), tensors(after)
    for path, tensor in old.items():
        if any(len(part) > LIMITS.path_chars and part.isdecimal() for part in path.split("/")):
            continue  # an integer that torch does not take becomes a string, and that is said
        if path not in new:
            return "a tensor is missing"
        if not same(tensor.detach().requires_grad_(False), new[path].detach().requires_grad_(False)):
            return "another tensor"
    return ""


def _as_safetensors(before: Any, after: Any, checkpoint: Checkpoint) -> str:
    chosen = [
        item for item in checkpoint.survey.state_dicts if item.confidence == "high"
    ] or checkpoint.survey.state_dicts
    steps = parse_path(chosen[0].path) if chosen else []
    state = before
    try:
        for step in steps:
            state = state[step]
    except (KeyError, IndexError, TypeError):
        return ""
    if not isinstance(state, Mapping):
        return ""
    wanted = {key: value for key, value in state.items() if hasattr(value, "untyped_storage")}
    for name, tensor in after.items():
        if name not in wanted:
            return "a tensor that was not there"
        old = wanted[name].detach().resolve_conj().resolve_neg()
        if old.shape != tensor.shape or not same(old.contiguous().requires_grad_(False), tensor):
            return "another tensor"
    return "" if len(after) == len(wanted) else "a tensor is missing"


EDITS: tuple[Edit, ...] = (
    Edit("save", lambda c: c, _alike),
    Edit("strip-module", lambda c: ckptool.strip_module(c), _stripped),
    Edit("add-module", lambda c: ckptool.add_module(c, "fuzz."), _added),
    Edit("remap", lambda c: ckptool.remap(c, "cpu"), _moved),
    Edit("repack", lambda c: ckptool.repack(c), _alike, damage="framing"),
    Edit("rename", lambda c: ckptool.rename(c, glob=("*", "fuzz.*")), _added),
    Edit("drop", lambda c: ckptool.drop(c, [_first_key(c)]), _dropped, damage="any"),
    Edit(
        "convert-legacy",
        lambda c: ckptool.convert(c, "legacy"),
        lambda a, b, _: "" if same(a, b) else "another object",
        ".pt",
        damage="reading",
    ),
    Edit(
        "convert-safetensors",
        lambda c: ckptool.convert(c, "safetensors", tied="clone"),
        _as_safetensors,
        ".safetensors",
        damage="any",
    ),
    Edit("sanitize", lambda c: ckptool.sanitize(c), _kept, damage="any"),
)


def edited(
    path: str, folder: str, before: Any, refusal: str, valid: bool, chance: random.Random, most: int
) -> list[Find]:
    """What is wrong with the outputs of some edits; ``before`` is what torch loads, ``refusal`` why it does not."""
    finds = []
    for edit in chance.sample(EDITS, min(most, len(EDITS))):
        told = _one(edit, path, folder, before, refusal, valid)
        if told:
            finds.append(Find(EDIT, f"{edit.name} ends with 0", told))
    return finds


#: How errors of torch begin that are about an archive, not about the pickle in it.
_OF_ARCHIVES = ("RuntimeError: PytorchStreamReader", "RuntimeError: [enforce fail", "EOFError", "OSError")


#: Bytes of storages at the end of a legacy file that are compared.
_TAIL = 32


def _one(edit: Edit, path: str, folder: str, before: Any, refusal: str, valid: bool) -> str:
    out = os.path.join(folder, "out" + edit.suffix)
    if not saved(edit.name, path, out, edit.make):
        return ""
    try:
        after = _loaded(out)
    except Exception as error:
        return (
            "" if refusal or undefined(path, before) else f"the input loads, the output does not: {error_text(error)}"
        )
    if refusal:
        # Damage that is gone although nobody repaired it.
        if "can't allocate memory" in refusal:
            return ""
        told = f"the input does not load, the output does: {refusal}"
        if edit.damage == "any" or (edit.damage == "reading" and not valid):
            return ""
        # What torch failed over in the pickle may have stood in the place of what was changed; the bytes are the same.
        mended = edit.damage == "framing" or not refusal.startswith(_OF_ARCHIVES)
        # Said in the verdict, with no promise: globals that are not on the list, and texts of Python 2.
        named = "Unsupported global" in refusal or refusal.startswith("UnicodeDecodeError")
        if mended and (named or not valid) and _same_records(path, out):
            return ""
        return "" if refusal.startswith("UnpicklingError") and _spelled_otherwise(edit, path, folder, after) else told
    if not comparable(before):
        return ""
    with ckptool.open(path) as checkpoint:
        wrong = edit.right(before, after, checkpoint)
    if not wrong or undefined(path, before):
        return ""
    return f"the output holds something else: {wrong}"


def _spelled_otherwise(edit: Edit, path: str, folder: str, after: Any) -> bool:
    """Whether only weights_only minded the input: an opcode, or what a pickle makes and throws away, which an edit does
    not write again. Then the plain load of the input gives what the output holds."""

    def compared() -> str:
        before = load(path, weights_only=False)
        if not comparable(before):
            return ""
        with ckptool.open(path) as checkpoint:
            return edit.right(before, after, checkpoint)

    answer = contained(compared, folder)
    # What would run is not in the output, or weights_only would refuse that, too; nor are classes that are not here.
    absent = (
        *("ModuleNotFoundError", "AttributeError: Can't get attribute", "ValueError: unregistered extension code"),
        "TypeError: 'module' object is not callable",
    )
    missing = answer.error.startswith(absent)
    if answer.error.startswith(("UnicodeDecodeError", "MemoryError")):
        return _same_records(path, os.path.join(folder, "out" + edit.suffix))  # said in the verdict, too
    return bool(answer.ran) or missing or not (answer.error or answer.died or answer.value)


def _same_records(path: str, out: str) -> bool:
    """Whether the output has the storages of the input, byte for byte under right checksums, as zipfile reads both."""
    data, written = Path(path).read_bytes(), Path(out).read_bytes()
    if written[:2] != b"PK":
        return written[-_TAIL:] == data[-_TAIL:]  # a legacy file, whose storages are its end
    storages = []
    try:
        # By their bytes: an output has numbers of its own, and the checksums of its input, right or wrong.
        with zipfile.ZipFile(out) as new:
            storages = [_stored(written, info) for info in new.infolist() if "/data/" in info.filename]
        with zipfile.ZipFile(path) as old:
            there = {_stored(data, info) for info in old.infolist()}
    except (zipfile.BadZipFile, NotImplementedError, ValueError, zlib.error, struct.error, OSError):
        return all(storage in data for storage in storages)  # zipfile does not read it
    return all(storage in there for storage in storages)


def _stored(data: bytes, info: zipfile.ZipInfo) -> bytes:
    """A record as the directory has it, whatever its local header calls it."""
    name, extra = struct.unpack_from("<HH", data, info.header_offset + 26)
    begin = info.header_offset + 30 + name + extra
    packed = data[begin : begin + info.compress_size]
    return zlib.decompress(packed, -15) if info.compress_type == zipfile.ZIP_DEFLATED else packed


def _loaded(out: str) -> Any:
    if out.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(out)
    return load(out)
