"""A peephole for ``encode``: write the pattern of ``fast_decode`` in one step.

``PatternWriter.write`` returns the bytes that the loop of ``encode`` would have written, and leaves the memo in the
same state. Otherwise it declines and changes nothing, and the loop goes on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import Final, TypeAlias, cast

from .nodes import Call, Dict, Node, Persistent, Ref

#: Values in place of a memo index: the node was not reached yet (UNSEEN), or was written but not memoized (UNMEMOIZED).
UNSEEN: Final = -1
UNMEMOIZED: Final = -3

#: The opcodes of tuples by length.
TUPLES: Final = (b"", b"\x85", b"\x86", b"\x87")

_u32 = Struct("<I").pack
_long_binput = Struct("<BI").pack


#: The bytes that many tensors share: the bytes before the key, and the bytes after it as a little-endian number of
#: ``size`` bytes, which is ``base + index * step`` if ``index`` is the next memo index: (start, base, step, size).
_Template: TypeAlias = tuple[bytes, int, int, int]


class PatternWriter:
    """Writes the patterns of one run of ``encode``, and shares its ``nodes``, ``memo`` and ``codes``."""

    def __init__(self, nodes: Sequence[Node], memo: array[int], codes: list[bytes | None]) -> None:
        self.nodes = nodes
        self.memo = memo
        self.codes = codes
        self.templates: dict[tuple[object, ...], _Template] = {}
        #: The last template and the parts that it was made from; in nearly all files, it fits the next tensor too.
        self.last: tuple[tuple[object, ...], _Template] = (), (b"", 0, 0, 0)

    def write(self, ref: Ref, node: Node, index: int) -> bytes:
        """Return the instructions for a call that matches the pattern, or for a dict of one known pair; else b"".

        Also return b"" if a part was written before, or if a shared part (class, numbers) was not written twice yet,
        because its bytes are unknown until then. ``index`` is the next memo index. Afterwards ``memo[ref]`` is the last
        index in use.
        """
        nodes, memo, codes = self.nodes, self.memo, self.codes
        if index < 0x100 or memo[ref] != UNSEEN:
            return b""
        if type(node) is not Call:
            return self.write_pair(ref, node, index) if type(node) is Dict else b""
        args = nodes[node.args]
        if type(args) is not tuple or len(args) != 6 or node.op != 0x52 or node.filling is not None:
            return b""
        outside, offset, lengths, steps, flag, hooks = args
        storage, hook, shape, strides = nodes[outside], nodes[hooks], nodes[lengths], nodes[steps]
        if type(storage) is not Persistent or storage.text or storage.filling is not None:
            return b""
        if type(hook) is not Call or hook.op != 0x52 or hook.filling is not None:
            return b""
        place_of_id = storage.pid
        pid = nodes[place_of_id]
        if type(pid) is not tuple or len(pid) != 5 or type(shape) is not tuple or type(strides) is not tuple:
            return b""
        word, cls, name, place, size = pid
        key, device = nodes[name], nodes[place]
        if type(key) is not str or type(device) is not str or not key.isascii() or not device.isascii():
            return b""
        if not UNSEEN == memo[node.args] == memo[outside] == memo[place_of_id] == memo[name]:
            return b""
        if not UNSEEN == memo[lengths] == memo[steps] == memo[hooks] or lengths == steps or name == place:
            return b""
        new_device = memo[place] == UNSEEN
        parts = (
            *(node.func, word, cls, size, offset, flag, hook.func, hook.args, shape, strides),
            *(len(key), device if new_device else place),
        )
        if parts == self.last[0]:
            template = self.last[1]
        else:
            known = self.templates.get(parts) or self.new_template(parts, key, device if new_device else None, place)
            if known is None:
                return b""
            self.templates[parts] = template = known
            self.last = parts, template
        start, base, step, length = template
        # The memo indices follow the order in which the instructions make their objects.
        memo[name], memo[outside], codes[name] = index, UNMEMOIZED, b""
        last = index
        if new_device:
            last += 1
            memo[place], codes[place] = last, b""
        memo[place_of_id], memo[lengths], memo[steps] = last + 1, last + 2, last + 3
        memo[hooks], memo[node.args], memo[ref] = last + 4, last + 5, last + 6
        codes[place_of_id] = codes[lengths] = codes[steps] = codes[hooks] = codes[node.args] = codes[ref] = b""
        return start + key.encode() + (base + index * step).to_bytes(length, "little")

    def write_items(self, refs: Sequence[Ref], at: int, index: int, out: bytearray) -> tuple[int, int]:
        """Write the pairs of ``refs`` from ``at`` on, as long as each is a new string and a value that ``write`` takes.

        ``index`` is the next memo index. Return the place of the first pair that is not written, and the next index.
        """
        nodes, memo, codes, write = self.nodes, self.memo, self.codes, self.write
        while at < len(refs):
            key, value = refs[at], refs[at + 1]
            text = nodes[key]
            if type(text) is not str or memo[key] != UNSEEN or index < 0x100:
                break
            memo[key] = index
            code = write(value, nodes[value], index + 1)
            if not code:
                memo[key] = UNSEEN
                break
            codes[key] = b""
            raw = text.encode("utf-8", "surrogatepass")
            out += b"X%b%b%b%b" % (_u32(len(raw)), raw, _long_binput(0x72, index), code)
            index = memo[value] + 1
            at += 2
        return at, index

    def write_pair(self, ref: Ref, node: Dict, index: int) -> bytes:
        """Return the instructions for a dict of one pair that was written before, such as the metadata of a module;
        else b"".
        """
        if len(node.pairs) != 2:
            return b""
        key, value = self.codes[node.pairs[0]], self.codes[node.pairs[1]]
        if not key or not value:
            return b""
        self.memo[ref], self.codes[ref] = index, b""
        return b"}%b%b%bs" % (_long_binput(0x72, index), key, value)

    def new_template(self, parts: Sequence[object], key: str, device: str | None, place: Ref) -> _Template | None:
        """Return the template of the parts listed in ``write``, or None until each of them was written twice."""
        shared = cast("tuple[Ref, ...]", parts[:8])
        shape, strides = cast("tuple[tuple[Ref, ...], ...]", parts[8:10])
        codes = [self.codes[ref] or b"" for ref in (*shared, *shape, *strides)]
        if device is None:
            codes.append(self.codes[place] or b"")
        if not (shape and strides and all(codes)):
            return None
        func, word, cls, size, offset, flag, hook, no_args = codes[:8]
        # Each of these precedes a memo index.
        before = [b"r", size + b"tr"] if device is not None else [b"r", codes[-1] + size + b"tr"]
        if device is not None:
            before.insert(1, b"X%b%br" % (_u32(len(device)), device.encode()))
        before += [b"Q%b%br" % (offset, self.ints(shape)), self.ints(strides) + b"r"]
        before += [b"%b%b%bRr" % (flag, hook, no_args), b"tr", b"Rr"]
        tail, step = b"", 0
        for number, code in enumerate(before):
            tail += code
            step += 1 << 8 * len(tail)
            tail += _u32(number)
        return b"%b((%b%bX%b" % (func, word, cls, _u32(len(key))), int.from_bytes(tail, "little"), step, len(tail)

    def ints(self, refs: Sequence[Ref]) -> bytes:
        """Return the bytes of a tuple from the bytes of its elements."""
        codes = b"".join([self.codes[ref] or b"" for ref in refs])
        return codes + TUPLES[len(refs)] if len(refs) < len(TUPLES) else b"(%bt" % codes
