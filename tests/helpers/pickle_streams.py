"""Random pickle streams: instructions in an order that mostly makes sense, over all opcodes."""

from __future__ import annotations

import pickletools
import random
import struct
from typing import Any

from pickle_oracle import EXTENSIONS

from ckptool.pickles import opcodes as op

__all__ = ["stream"]

#: Those without an argument: for whatever size or number others happened to find, CPython would reserve memory.
_ANY = [ord(info.code) for info in pickletools.opcodes if info.arg is None]
_HEADS = (b"", b"\x80\x02", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"\x80\x00")
_NAMES = (b"os\nsystem\n", b"torch\nFloatStorage\n", b"a\nb\n", b"collections\nOrderedDict\n")
_TEXTS = ("", "a", "os", "system", "naïve \ud800\n\\", "x" * 9)
_INTS = (0, 1, 255, 256, 65_535, 65_536, -1, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 2**64, -128, 127)
_FLOATS = (0.0, -0.0, 1.5, float("inf"), float("-inf"), float("nan"), -float("nan"), 1e300)
_LINES = (
    b"S'a'\n",
    b'S"\\x00\\n\\"\\\\q"\n',
    b"S'\\101\xe9'\n",
    b"Vabc\n",
    b"V\\u20ac\\U0001f600\n",
    b"V\xe9\n",
    b"V\n",
)
_LINES += (b"I01\n", b"I00\n", b"I1\n", b"I-7\n", b"I0x1F\n", b"L5L\n", b"L-99999999999999999999\n", b"L0\n", b"Pid\n")
_LINES += (b"F1.5\n", b"Fnan\n", b"F-inf\n", b"F-nan\n")


def _literal(rng: random.Random) -> tuple[bytes, str]:
    """An instruction that pushes one value, and the kind of that."""
    kind = rng.randrange(12)
    if kind < 3:
        return rng.choice(((b"]", "list"), (b"}", "dict"), (b"\x8f", "set"), (b")", "tuple"), (b"\x97", "buffer")))
    if kind < 5:
        return rng.choice((b"N", b"\x88", b"\x89", b"K\x05", b"M\x05\x00", b"J\x05\x00\x00\x00")), "plain"
    if kind == 5:
        code = rng.choice(_LINES)
        return code, "object" if code[:1] == b"P" else "text" if code[:1] in b"SV" else "plain"
    if kind == 6:
        value = rng.choice(_INTS)
        raw = value.to_bytes(value.bit_length() // 8 + 1 + rng.randrange(2), "little", signed=True)
        short = len(raw) < 256
        return (b"\x8a" + bytes((len(raw),)) if short else b"\x8b" + struct.pack("<i", len(raw))) + raw, "plain"
    if kind == 7:
        return b"G" + struct.pack(">d", rng.choice(_FLOATS)), "plain"
    if kind == 8:
        raw, codes, made = rng.randbytes(rng.choice((0, 1, 4))), b"TUBC\x8e\x96", "bytes"
    else:
        raw, codes, made = rng.choice(_TEXTS).encode("utf-8", "surrogatepass"), b"XX\x8c\x8dTU", "text"
    code = rng.choice([code for code in codes if len(raw) < 256 or code not in b"UC\x8c"])
    width = 1 if code in b"UC\x8c" else 8 if code in b"\x8d\x8e\x96" else 4
    made = "text" if code in b"TU" else "array" if code == 0x96 else made
    return bytes((code,)) + len(raw).to_bytes(width, "little") + raw, made


class _Writer:
    """Keeps the kinds of the values on the stack, so that most instructions find what they need."""

    def __init__(self, rng: random.Random, accepted: bool) -> None:
        self.rng = rng
        self.accepted = accepted
        self.out = bytearray(rng.choice(_HEADS))
        self.stacks: list[list[str]] = [[]]
        self.memo: dict[int, str] = {}

    def emit(self, code: bytes, pops: int = 0, *pushes: str) -> None:
        if self.accepted and code[0] not in op.ACCEPTED:
            return
        self.out += code
        stack = self.stacks[-1]
        del stack[len(stack) - pops :]
        stack += pushes

    def step(self) -> None:
        rng, stack = self.rng, self.stacks[-1]
        top = stack[-1] if stack else ""
        choice = rng.random()
        if choice < 0.005:
            # Anything anywhere: mostly the end of a good stream.
            self.emit(bytes((rng.choice(_ANY),)))
        elif choice < 0.25:
            code, kind = _literal(rng)
            self.emit(code, 0, kind)
        elif choice < 0.33:
            self.object()
        elif choice < 0.42:
            self.out += b"("
            self.stacks.append([])
        elif choice < 0.55 and len(self.stacks) > 1:
            self.close(stack)
        elif choice < 0.67 and stack:
            self.put(top)
        elif choice < 0.80 and self.memo:
            index = rng.choice(list(self.memo))
            codes = [b"g%d\n" % index, b"j" + struct.pack("<I", index)] + [b"h%c" % (index & 255)] * (index < 256) * 3
            self.emit(rng.choice(codes), 0, self.memo[index])
        elif len(stack) >= 2 and choice < 0.95:
            self.fill(stack)
        elif stack:
            codes: list[tuple[Any, ...]] = [(b"0", 1), (b"2", 0, top), (b"\x85", 1, "tuple"), (b"Q", 1, "object")]
            if top in ("bytes", "buffer"):
                codes.append((b"\x98", 1, "buffer"))
            self.emit(*rng.choice(codes))

    def object(self) -> None:
        rng = self.rng
        name, code = rng.choice(_NAMES), rng.choice(EXTENSIONS)
        width = 1 if code < 256 else 2 if code < 65_536 else 4
        module, attribute = (b"\x8c%c%b" % (len(part), part) for part in name.split(b"\n")[:2])
        made = (
            b"c" + name,
            module + attribute + b"\x93",
            b"(i" + name,
            bytes((0x81 + width - width // 4,)) + code.to_bytes(width, "little"),
        )
        way = rng.choice((0, 0, 0, 1, 2, 3))
        # CPython makes one object of all EXT with one code, so none of them is filled here.
        self.emit(made[way], 0, "object" if way < 3 else "plain")

    def put(self, top: str) -> None:
        rng = self.rng
        index = len(self.memo) if rng.random() < 0.9 else rng.choice((0, 1, 5, 300))
        codes = [b"p%d\n" % index, b"r" + struct.pack("<I", index)] + [b"q%c" % (index & 255)] * (index < 256) * 3
        code = rng.choice((*codes, b"\x94"))
        if code == b"\x94":
            index = len(self.memo)
        if not self.accepted or code[0] in op.ACCEPTED:
            self.emit(code)
            self.memo[index] = top

    def close(self, items: list[str]) -> None:
        """Use up what lies above the last MARK."""
        rng = self.rng
        below = self.stacks[-2][-1] if self.stacks[-2] else ""
        codes = [(b"t", "tuple")]
        if below in ("list", "object"):
            codes += [(b"e", "")] * 3
        if below in ("dict", "object") and len(items) % 2 == 0:
            codes += [(b"u", "")] * 3
        if not self.accepted:
            codes += [(b"l", "list"), (b"1", "")]
            if len(items) % 2 == 0:
                codes.append((b"d", "dict"))
            if items[:1] == ["object"]:
                codes.append((b"o", "object"))
            if not {"list", "dict", "set", "tuple", "array"} & set(items):
                codes += [(b"\x91", "plain")] + [(b"\x90", "")] * 2 * (below in ("set", "object"))
        code, made = rng.choice(codes)
        self.stacks.pop()
        self.emit(code, 0, *([made] if made else []))

    def fill(self, stack: list[str]) -> None:
        """Use the last two or three values."""
        second, last = stack[-2:]
        codes: list[tuple[bytes, int, str]] = [(b"\x86", 2, "tuple")]
        if second in ("list", "object"):
            codes += [(b"a", 1, "")] * 3
        if second == "object":
            codes += [(b"b", 1, "")] + [(b"R", 2, "object"), (b"\x81", 2, "object")] * (last == "tuple") * 3
        if second == last == "text":
            codes.append((b"\x93", 2, "object"))
        if len(stack) >= 3:
            third = stack[-3]
            codes.append((b"\x87", 3, "tuple"))
            if third in ("dict", "object"):
                codes += [(b"s", 2, "")] * 3
            if (third, second, last) == ("object", "tuple", "dict"):
                codes.append((b"\x92", 3, "object"))
        code, pops, made = self.rng.choice(codes)
        self.emit(code, pops, *([made] if made else []))


def stream(rng: random.Random, length: int, *, accepted: bool = False) -> bytes:
    """A stream of about ``length`` instructions and a STOP; ``accepted`` takes only those that weights_only knows."""
    writer = _Writer(rng, accepted)
    for _ in range(length):
        writer.step()
    while len(writer.stacks) > 1:
        writer.stacks.pop()
        writer.emit(b"t", 0, "tuple")
    return bytes(writer.out) + (b"." if writer.stacks[-1] else b"N.")
