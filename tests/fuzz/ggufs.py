"""GGUF: mutations of a header in its parts, and the gguf package as the judge: its reader, and its ``dequantize``."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from gguf_files import ARRAY, STRING, entry, made, tensor, text

import ckptool

from .asking import Entry, Said, listed, saved
from .finds import EDIT, OTHER, VALID_FAILS, Find, Verdict
from .opcodes import WIDE, bytewise

#: Types of tensors: blocks of so many values in so many bytes.
_SIZES = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 12: (256, 144), 24: (1, 1), 30: (1, 2), 39: (32, 17)}


def base(arch: str, order: str = "<", alignment: int = 32) -> bytes:
    """A file with tensors of eight types, and values of all types."""
    chance = random.Random(arch)
    numbers = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
    entries = [entry("general.architecture", STRING, text(arch, order), order)]
    entries.append(entry("general.alignment", 4, struct.pack(f"{order}I", alignment), order))
    entries += [entry(f"n.{kind}", kind, struct.pack(order + code, 1), order) for kind, code in numbers.items()]
    texts = b"".join(text("x" * n, order) for n in range(9))
    entries.append(entry("tokens", ARRAY, struct.pack(f"{order}IQ", STRING, 9) + texts, order))
    inner = struct.pack(f"{order}IQ2I", 4, 2, 1, 2)
    entries.append(entry("nested", ARRAY, struct.pack(f"{order}IQ", ARRAY, 2) + inner * 2, order))
    entries.append(entry("tokenizer.chat_template", STRING, text("{{ m['content'] }}", order), order))
    tensors, data = list[bytes](), b""
    for number, (kind, (values, size)) in enumerate(_SIZES.items()):
        shape = (2, 256) if number % 2 else (256,)
        tensors.append(tensor(f"blk.{number}.attn_v.weight", shape, kind, len(data), order))
        data += chance.randbytes((512 if number % 2 else 256) // values * size)
        data += bytes(-len(data) % alignment)
    return made(entries, tensors, data, order=order, alignment=alignment)


def mutated_gguf(data: bytes, chance: random.Random) -> bytes:
    """A file after one mutation: a number of its header, a byte, a cut, or a part of it once more."""
    order = ">" if data[4:6] == b"\0\0" else "<"
    way = chance.randrange(10)
    if way == 0:
        return bytewise(data, chance)
    if way == 1:
        return data[: chance.randrange(len(data) + 1)]
    changed = bytearray(data)
    if way == 2:  # the counts
        at = chance.choice((8, 16))
        number = int.from_bytes(data[at : at + 8], "little" if order == "<" else "big")
        number = chance.choice((number + 1, max(number - 1, 0), 0, *WIDE))
        changed[at : at + 8] = struct.pack(f"{order}Q", number & (1 << 64) - 1)
        return bytes(changed)
    # A length, type, dimension or offset lies behind a name: those of the table and of the tensors.
    name = chance.choice((b"n.", b"tokens", b"nested", b"general.", b"blk.", b"tokenizer"))
    places = [at for at in range(len(data)) if data.startswith(name, at)]
    if not places:
        return bytewise(data, chance)
    at = chance.choice(places)
    end = at + int.from_bytes(data[max(at - 8, 0) : at], "little" if order == "<" else "big")
    if way == 3:  # the length of the name
        changed[at - 8 : at] = struct.pack(f"{order}Q", chance.choice((end - at + 1, 0, *WIDE)) & (1 << 64) - 1)
    elif way == 4:  # another name
        changed[at : at + 2] = chance.choice((b"n.", b"\xff\xfe", b"\0\0", b"\x1b[", b"bl"))
    elif way == 5 and end < at + 200:  # once more, or not at all
        size = chance.randrange(8, 60)
        changed[at - 8 : at - 8 + chance.choice((0, size))] = data[at - 8 : at - 8 + size]
    else:
        place = min(end, len(data)) + chance.choice((0, 4, 8, 12, 16, 20, 24))
        form = chance.choice(("I", "Q"))
        number = chance.choice((*range(50), *WIDE, *WIDE))
        raw = struct.pack(order + form, number & (1 << (32 if form == "I" else 64)) - 1)
        changed[place : place + len(raw)] = raw
    return bytes(changed)


def judged_gguf(path: str, out: str, said: Said, tried: Callable[[Callable[[], Any]], tuple[Any, str]]) -> Verdict:
    """Read it with the package, and convert it."""
    finds: list[Find] = []
    entries = listed(path, said, finds)
    if find_spec("gguf") is None:
        return Verdict(said.valid, entries is not None, ("not judged",), tuple(finds))
    read, refusal = tried(lambda: _read(path))
    if said.valid and refusal:
        finds.append(Find(VALID_FAILS, "valid", refusal))
    if entries is not None and not refusal and (difference := _unlike(read, entries)):
        finds.append(Find(OTHER, "valid" if said.valid else "not valid", difference))
    if entries is not None and saved("convert", path, out, lambda c: ckptool.convert(c, "safetensors")):
        plain, refused = tried(lambda: _plain(read, out) if not refusal else _loaded(out))
        if refused or (plain and not refusal):
            finds.append(Find(EDIT, "convert ends with 0", refused or plain))
    word = "loaded by gguf" if not refusal else "refused by gguf"
    return Verdict(said.valid, entries is not None, (word,), tuple(finds))


def _read(path: str) -> Any:
    import gguf

    return gguf.GGUFReader(path)


def _unlike(reader: Any, entries: list[Entry]) -> str:
    """Where ckptool reads other names, shapes or bytes."""
    if len(entries) >= 64:
        return ""
    found = {(entry.steps or (entry.path,))[-1]: entry for entry in entries}
    if [each.name for each in reader.tensors] != [*found]:
        return "other names"
    for each in reader.tensors:
        own = found[each.name]
        if own.shape != tuple(reversed(each.shape.tolist())):
            return "another shape"
        content = own.content if reader.byte_order == "I" else None  # the reader swaps no blocks
        if content is not None and content != each.data.tobytes():
            return "other bytes"
    return ""


def _loaded(out: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(out)


def _plain(reader: Any, out: str) -> str:
    """Where a converted tensor has other values, of those whose names and rows stay."""
    import gguf

    found = _loaded(out)
    if len(found) != len(reader.tensors):
        return "another number of tensors"
    for each in reader.tensors:
        block = gguf.GGML_QUANT_SIZES[each.tensor_type][0] > 1
        if block and each.data.size and each.name in found:
            wanted = gguf.dequantize(each.data.reshape(-1, each.data.shape[-1]), each.tensor_type)
            if found[each.name].numpy().tobytes() != wanted.tobytes():
                return "other values"
    return ""
