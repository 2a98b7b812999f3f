"""A peephole for ``encode``: write the pattern of ``fast_decode`` in one step.

``PatternWriter.write`` returns the bytes that the loop of ``encode`` would have written, and leaves the memo in the
same state. Otherwise it declines and changes nothing, and the loop goes on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final, TypeAlias

from .nodes import Call, Dict, Node, Persistent, Ref

#: Values in place of a memo index: the node was not reached yet (UNSEEN), or was written but not memoized (UNMEMOIZED).
UNSEEN: Final = -1
UNMEMOIZED: Final = -3

#: The opcodes of tuples by length.
TUPLES: Final = (b"", b"\x85", b"\x86", b"\x87")

_u32 = Struct("<I").pack
_long_binput = Struct("<BI").pack


#: The bytes that many tensors share: the packer that inserts key, device and memo indices; the bytes before the key;
#: the bytes before the device; and four parts that each precede a memo index.
_Template: TypeAlias = tuple[Callable[..., bytes], bytes, bytes, bytes, bytes, bytes, bytes]


class PatternWriter:
    """Writes the patterns of one run of ``encode``, and shares its ``nodes``, ``memo`` and ``codes``."""

    def __init__(self, nodes: Sequence[Node], memo: array[int], codes: list[bytes | None]) -> None:
        self.nodes = nodes
        self.memo = memo
        self.codes = codes
        self.templates: dict[tuple[object, ...], _Template] = {}

    def write(self, ref: Ref, node: Node, index: int) -> bytes:
        """Return the instructions for a call that matches the pattern, or for a dict of one known pair; else b"".

        ``index`` is the next memo index. Afterwards ``memo[ref]`` is the last index in use.
        """
        if index < 0x100 or self.memo[ref] != UNSEEN:
            return b""
        if type(node) is Call:
            return self.write_call(ref, node, index)
        return self.write_pair(ref, node, index) if type(node) is Dict else b""

    def write_call(self, ref: Ref, call: Call, index: int) -> bytes:
        """Return the instructions for a call that matches the pattern.

        Return b"" if the call does not match, or if a part was written before. Also return b"" if a shared part (class,
        numbers) was not written twice yet, because its bytes are unknown until then.
        """
        nodes, memo, codes = self.nodes, self.memo, self.codes
        args = nodes[call.args]
        if type(args) is not tuple or len(args) != 6 or call.op != 0x52 or call.filling is not None:
            return b""
        outside, offset, lengths, steps, flag, hooks = args
        storage, hook, shape, strides = nodes[outside], nodes[hooks], nodes[lengths], nodes[steps]
        if type(storage) is not Persistent or storage.text or storage.filling is not None:
            return b""
        if type(hook) is not Call or hook.op != 0x52 or hook.filling is not None:
            return b""
        pid = nodes[storage.pid]
        if type(pid) is not tuple or len(pid) != 5 or type(shape) is not tuple or type(strides) is not tuple:
            return b""
        word, cls, name, place, size = pid
        key, device = nodes[name], nodes[place]
        if type(key) is not str or type(device) is not str or not key.isascii() or not device.isascii():
            return b""
        if not UNSEEN == memo[call.args] == memo[outside] == memo[storage.pid] == memo[name]:
            return b""
        if not UNSEEN == memo[lengths] == memo[steps] == memo[hooks] or lengths == steps or name == place:
            return b""
        new_device = memo[place] == UNSEEN
        common = (call.func, word, cls, size, offset, flag, hook.func, hook.args)
        parts = (common, shape, strides, len(key), len(device) if new_device else place, new_device)
        template = self.templates.get(parts)
        if template is None:
            template = self.new_template(common, shape, strides, key, device if new_device else None, place)
            if template is None:
                return b""
            self.templates[parts] = template
        pack, start, middle, one, two, three, four = template
        # The memo indices follow the order in which the instructions make their objects.
        memo[name], memo[outside], codes[name] = index, UNMEMOIZED, b""
        last = index
        if new_device:
            last += 1
            memo[place], codes[place] = last, b""
        for node in (storage.pid, lengths, steps, hooks, call.args, ref):
            last += 1
            memo[node], codes[node] = last, b""
        rest = one, last - 5, two, last - 4, three, last - 3, four, last - 2, b"tr", last - 1, b"Rr", last
        if new_device:
            return pack(start, key.encode(), b"r", index, middle, device.encode(), b"r", index + 1, *rest)
        return pack(start, key.encode(), b"r", index, *rest)

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

    def new_template(
        self,
        common: Sequence[Ref],
        shape: Sequence[Ref],
        strides: Sequence[Ref],
        key: str,
        device: str | None,
        place: Ref,
    ) -> _Template | None:
        """Return the template of these parts, or None until each of them was written twice."""
        codes = [self.codes[ref] or b"" for ref in (*common, *shape, *strides)]
        if device is None:
            codes.append(self.codes[place] or b"")
        if not (shape and strides and all(codes)):
            return None
        func, word, cls, size, offset, flag, hook, no_args = codes[:8]
        start = b"%b((%b%bX%b" % (func, word, cls, _u32(len(key)))
        two = b"Q%b%br" % (offset, self.ints(shape))
        three = self.ints(strides) + b"r"
        four = b"%b%b%bRr" % (flag, hook, no_args)
        if device is None:
            middle, one = b"", b"%b%btr" % (codes[-1], size)
            layout = f"<{len(start)}s{len(key)}scI"
        else:
            middle, one = b"X" + _u32(len(device)), size + b"tr"
            layout = f"<{len(start)}s{len(key)}scI5s{len(device)}scI"
        packer = Struct(f"{layout}{len(one)}sI{len(two)}sI{len(three)}sI{len(four)}sI2sI2sI")
        return packer.pack, start, middle, one, two, three, four

    def ints(self, refs: Sequence[Ref]) -> bytes:
        """Return the bytes of a tuple from the bytes of its elements."""
        codes = b"".join([self.codes[ref] or b"" for ref in refs])
        return codes + TUPLES[len(refs)] if len(refs) < len(TUPLES) else b"(%bt" % codes
