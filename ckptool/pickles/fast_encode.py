"""Tensors at one go, when a pickle is written: the other direction of ``phrase_reading``, which shows the phrase.

``Phrases.write`` gives the bytes that the loop of ``writer`` would have written and leaves its marks as that would
have left them, or declines with nothing changed: then the loop goes on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final, NamedTuple

from .nodes import Call, Dict, Node, Persistent, Ref

#: The mark of a node that has no memo number: not reached yet; made, but not memoised.
NEW: Final = -1
LOOSE: Final = -3

_u32 = Struct("<I").pack
_long_binput = Struct("<BI").pack
_MAKERS: Final = (b"", b"\x85", b"\x86", b"\x87")


class _Kind(NamedTuple):
    """What the phrases of many tensors share, and the packer that key, device and memo numbers go into.

    ``start`` stands before the key, ``middle`` before the device, the others each before a memo number.
    """

    pack: Callable[..., bytes]
    start: bytes
    middle: bytes
    one: bytes
    two: bytes
    three: bytes
    four: bytes


class Phrases:
    """The phrases of one ``Writer``: ``nodes``, ``marks`` and ``ready`` are its own."""

    def __init__(self, nodes: Sequence[Node], marks: array[int], ready: list[bytes | None]) -> None:
        self.nodes = nodes
        self.marks = marks
        self.ready = ready
        self.kinds: dict[tuple[object, ...], _Kind] = {}

    def write(self, ref: Ref, node: Node, number: int) -> bytes:
        """The instructions for a node, if it is the call of a phrase or a dict like many others; else b"".

        ``number`` is the next memo number; that of the node itself is the last one given.
        """
        if number < 0x100 or self.marks[ref] != NEW:
            return b""
        if type(node) is Call:
            return self.write_call(ref, node, number)
        return self.write_pair(ref, node, number) if type(node) is Dict else b""

    def write_call(self, ref: Ref, call: Call, number: int) -> bytes:
        """The instructions for a call that rebuilds a tensor.

        Returns b"" where it is another call, where some of it was written before, or where what it takes from
        others (class, numbers) was not written twice yet: only then is it known how to write it.
        """
        nodes, marks, ready = self.nodes, self.marks, self.ready
        args = nodes[call.args]
        if type(args) is not tuple or len(args) != 6 or call.op != 0x52 or call.filling is not None:
            return b""
        outside, offset, rows, steps, flag, hooks = args
        storage, hook, shape, strides = nodes[outside], nodes[hooks], nodes[rows], nodes[steps]
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
        if not NEW == marks[call.args] == marks[outside] == marks[storage.pid] == marks[name]:
            return b""
        if not NEW == marks[rows] == marks[steps] == marks[hooks] or rows == steps or name == place:
            return b""
        fresh = marks[place] == NEW
        used = (call.func, word, cls, size, offset, flag, hook.func, hook.args)
        mark = (used, shape, strides, len(key), len(device) if fresh else place, fresh)
        kind = self.kinds.get(mark)
        if kind is None:
            kind = self.kind(used, shape, strides, key, device if fresh else None, place)
            if kind is None:
                return b""
            self.kinds[mark] = kind
        pack, start, middle, one, two, three, four = kind
        # The memo numbers in the order in which the instructions make their objects.
        marks[name], marks[outside], ready[name] = number, LOOSE, b""
        here = number
        if fresh:
            here += 1
            marks[place], ready[place] = here, b""
        for node in (storage.pid, rows, steps, hooks, call.args, ref):
            here += 1
            marks[node], ready[node] = here, b""
        rest = one, here - 5, two, here - 4, three, here - 3, four, here - 2, b"tr", here - 1, b"Rr", here
        if fresh:
            return pack(start, key.encode(), b"r", number, middle, device.encode(), b"r", number + 1, *rest)
        return pack(start, key.encode(), b"r", number, *rest)

    def write_pair(self, ref: Ref, node: Dict, number: int) -> bytes:
        """The instructions for a dict of one pair that was written before, such as the metadata of a module."""
        if len(node.pairs) != 2:
            return b""
        key, value = self.ready[node.pairs[0]], self.ready[node.pairs[1]]
        if not key or not value:
            return b""
        self.marks[ref], self.ready[ref] = number, b""
        return b"}%b%b%bs" % (_long_binput(0x72, number), key, value)

    def kind(
        self,
        used: Sequence[Ref],
        shape: Sequence[Ref],
        strides: Sequence[Ref],
        key: str,
        device: str | None,
        place: Ref,
    ) -> _Kind | None:
        """How to write tensors with this in common; None as long as some of it was not written twice."""
        codes = [self.ready[ref] for ref in (*used, *shape, *strides)]
        if device is None:
            codes.append(self.ready[place])
        if not (shape and strides and all(codes)):
            return None
        func, word, cls, size, offset, flag, hook, nothing = (self.ready[ref] or b"" for ref in used)
        start = b"%b((%b%bX%b" % (func, word, cls, _u32(len(key)))
        two = b"Q%b%br" % (offset, self.row(shape))
        three = self.row(strides) + b"r"
        four = b"%b%b%bRr" % (flag, hook, nothing)
        if device is None:
            middle, one = b"", b"%b%btr" % (self.ready[place] or b"", size)
            text = f"<{len(start)}s{len(key)}scI"
        else:
            middle, one = b"X" + _u32(len(device)), size + b"tr"
            text = f"<{len(start)}s{len(key)}scI5s{len(device)}scI"
        layout = Struct(f"{text}{len(one)}sI{len(two)}sI{len(three)}sI{len(four)}sI2sI2sI")
        return _Kind(layout.pack, start, middle, one, two, three, four)

    def row(self, refs: Sequence[Ref]) -> bytes:
        """A tuple of what has its code already."""
        codes = b"".join([self.ready[ref] or b"" for ref in refs])
        return codes + _MAKERS[len(refs)] if len(refs) < len(_MAKERS) else b"(%bt" % codes
