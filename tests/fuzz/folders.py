"""Mutations of folders: Hugging Face (index, shards, what is beside them) and torch.distributed.checkpoint."""

from __future__ import annotations

import json
import random

from .headers import mutated_json, mutated_safetensors
from .opcodes import bytewise
from .pickles import mutated_pickle
from .zips import mutated_zip

Files = dict[str, bytes]


def mutated_hf(files: Files, chance: random.Random) -> Files:
    """A folder with an index after one mutation: of the index, of one shard, of the names of files."""
    files = dict(files)
    index = next((name for name in files if name.endswith(".index.json")), "")
    shards = sorted(name for name in files if name.endswith((".safetensors", ".bin")))
    way = chance.random()
    if way < 0.4 and index:
        files[index] = _index(files[index], shards, chance)
    elif way < 0.8 and shards:
        name = chance.choice(shards)
        inner = mutated_zip if name.endswith(".bin") else mutated_safetensors
        files[name] = inner(files[name], chance)
    elif shards:
        _named(files, shards, index, chance)
    return files


def _index(data: bytes, shards: list[str], chance: random.Random) -> bytes:
    try:
        table = json.loads(data)
        found = table["weight_map"]
        names = sorted(found)
    except (ValueError, KeyError, TypeError, RecursionError):
        return mutated_json(data, chance)
    if chance.random() < 0.15 or not names or not isinstance(found, dict):
        return mutated_json(data, chance)
    name = chance.choice(names)
    way = chance.randrange(12)
    if way == 0:
        del found[name]
    elif way == 1:
        found["new.weight"] = chance.choice(shards or ["x"])
    elif way == 2:
        found[name] = chance.choice(shards or ["x"])
    elif way == 3:
        place = str(found[name])
        odd = ("", "../x.safetensors", "/dev/zero", "a/b.safetensors", "x\x00y", None, 1, ["x"])
        found[name] = chance.choice((*odd, "./" + place, place.upper()))
    elif way == 4:
        found[name.upper()] = found.pop(name)
    elif way == 5:
        sizes = [{"total_size": size} for size in (1, "x", -1, 1e9)]
        table["metadata"] = chance.choice((*sizes, {}, None, []))
    elif way == 6:
        table.pop("metadata", None)
    elif way == 7:
        table["weight_map"] = chance.choice(({}, None, [], "x", list(found.items())))
    elif way == 8:
        table["extra"] = chance.choice((None, {"a": 1}))
    elif way == 9:  # the same name twice
        text = json.dumps(table)
        twin = json.dumps(name) + ": " + json.dumps(chance.choice(shards or ["x"]))
        return text.replace('"weight_map": {', '"weight_map": {' + twin + ", ", 1).encode()
    elif way == 10:
        table["weight_map"] = dict(chance.sample(list(found.items()), len(found)))
    else:
        found[name], other = found[chance.choice(names)], found[name]
        found[chance.choice(names)] = other
    return json.dumps(table).encode()


def _named(files: Files, shards: list[str], index: str, chance: random.Random) -> None:
    name = chance.choice(shards)
    way = chance.randrange(8)
    if way < 5:
        stem = chance.choice(("model", "pytorch_model", "adapter_model", "model-00009-of-00009"))
        moved_files(files, shards, (name + ".bak", f"{stem}.{name.rpartition('.')[2]}"), chance)
    elif way == 5:
        files[name] = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123\n"
    elif way == 6 and index:
        del files[index]
    else:
        others = ("config.json", "pytorch_model.bin", "model.safetensors.index.json", "README.md", "training_args.bin")
        files[chance.choice(others)] = chance.choice((b"", b"{}", b"\x80\x02N.", files[name]))


def moved_files(files: Files, names: list[str], others: tuple[str, ...], chance: random.Random) -> None:
    """One of the files goes away, changes places, has another name too, or is longer or shorter."""
    name, other = chance.choice(names), chance.choice(names)
    way = chance.randrange(7)
    if way == 0:
        del files[name]
    elif way == 1:
        files[name], files[other] = files[other], files[name]
    elif way == 2:
        files[name] = files[other]
    elif way == 3:
        files[chance.choice(others)] = files[name]
    elif way == 4:
        files[chance.choice(others)] = files.pop(name)
    elif way == 5:
        files[name] += chance.choice((b"x", b"\x00"))
    else:
        files[name] = files[name][: chance.randrange(len(files[name]) + 1)]


def mutated_dcp(files: Files, chance: random.Random) -> Files:
    """A folder of DCP after one mutation: of .metadata, of an item, of the names of files."""
    files = dict(files)
    parts = sorted(name for name in files if name.endswith(".distcp"))
    way = chance.random()
    if way < 0.55 and ".metadata" in files:
        files[".metadata"] = mutated_pickle(files[".metadata"], chance)
    elif way < 0.9 and parts:
        name = chance.choice(parts)
        files[name] = _items(files[name], chance)
    elif way > 0.985:
        files.pop(".metadata", None)
    elif parts:
        others = ("__9_0.distcp", ".metadata.bak", "x.pt", "model.safetensors", "__0_0.distcp.tmp")
        moved_files(files, parts, others, chance)
    return files


def _items(data: bytes, chance: random.Random) -> bytes:
    """One of the archives in a file of DCP, as long as before where that can be."""
    begins = [0]
    while (at := data.find(b"PK\x05\x06", begins[-1])) >= 0:
        begins.append(at + 22)
    if len(begins) < 2 or chance.random() < 0.2:
        return bytewise(data, chance)
    at = chance.randrange(len(begins) - 1)
    item = data[begins[at] : begins[at + 1]]
    new = mutated_zip(item, chance)
    if chance.random() < 0.7:  # what follows stays in its place
        new = new[: len(item)].ljust(len(item), b"\x00")
    return data[: begins[at]] + new + data[begins[at + 1] :]
