"""Tensors at one go, when a pickle is read: what it repeats for each of its tensors, in one step.

Of a checkpoint of 200,000 tensors nine tenths are one phrase of 30 instructions, said 200,000 times::

    GET function, MARK, MARK, GET 'storage', GET class, key, device, size, TUPLE, BINPERSID,
        offset, shape, strides, flag, (GET class, EMPTY_TUPLE, REDUCE), TUPLE, REDUCE

with a LONG_BINPUT behind all that can be shared. Instruction by instruction that costs a turn of the loop for
each; here one regular expression reads the phrase. ``read`` does what the loop of ``decode`` would have done, node
for node and number for number, or declines: then the loop goes on as if nobody had asked. So whatever is in any way
unusual (the first tensors, small memo numbers, scalars, other protocols, what a hostile file made up) is left to
the loop, which decides what it means. ``phrase_writing`` is the other direction.

The pickler of TorchScript (``torch/csrc/jit/serialization/pickler.cpp``) says the same otherwise: it memoises the
strings and the storage alone, writes every tuple with MARK and TUPLE, and a key may be a string that was met before.
"""

from __future__ import annotations

import re
from struct import Struct
from typing import Final

from .machine import Kind, Machine
from .nodes import Call, Global, Persistent, Ref

__all__ = ["read"]


def _text(*sizes: int) -> bytes:
    """BINUNICODE with so many characters of ASCII."""
    return b"X(?:%b)" % b"|".join(b"\\x%02x\\0\\0\\0[ -~]{%d}" % (size, size) for size in sizes)


_GET: Final = b"(?:h.|j....)"
_PUT: Final = b"r(....)"
_INT: Final = b"(?:K.|M..|J....)"
#: A tuple of numbers, not empty: a shape or strides. Whether TUPLE1 takes one and TUPLE2 two ``_kind`` looks at.
_ROW: Final = b"(?:(?:%b){1,3}[\x85-\x87]|\\((?:%b){4,16}t)" % (_INT, _INT)
#: From the first MARK to the last LONG_BINPUT; the device is a new string or one met before.
_PHRASE: Final = re.compile(
    b"(\\(\\(%b%b)(%b)%b" % (_GET, _GET, _text(*range(1, 9)), _PUT)
    + b"(?:(%b)%b|(%b))(%bt)%b" % (_text(*range(3, 9)), _PUT, _GET, _INT, _PUT)
    + b"Q(%b)(%b)%b(%b)%b" % (_INT, _ROW, _PUT, _ROW, _PUT)
    + b"([\x88\x89]%b\\)R)%bt%bR%b" % (_GET, _PUT, _PUT, _PUT),
    re.DOTALL,
).match
#: The same by the pickler of TorchScript, from the first MARK to REDUCE; a scalar has empty tuples.
_NATIVE: Final = re.compile(
    b"(\\(\\(%b%b)(?:(%b)%b|(%b))" % (_GET, _GET, _text(*range(1, 9)), _PUT, _GET)
    + b"(?:(%b)%b|(%b))(%bt)Q%b(%b)" % (_text(*range(3, 9)), _PUT, _GET, _INT, _PUT, _INT)
    + b"(\\((?:%b){0,16}t)(\\((?:%b){0,16}t)([\x88\x89]%b\\)R)tR" % (_INT, _INT, _GET),
    re.DOTALL,
).match
#: The instructions inside a part of the phrase, one by one.
_WORDS: Final = re.compile(b"%b|%b|." % (_GET, _INT), re.DOTALL).findall
#: Words that make something of the others, and stand for nothing themselves.
_MAKERS: Final = frozenset(b"(tR\x85\x86\x87")

_numbers7, _numbers8 = Struct("<7I").pack, Struct("<8I").pack
_numbers = (Struct("<I").pack, Struct("<2I").pack, Struct("<3I").pack)

#: Kinds that are remembered: a model has some dozens.
_KINDS: Final = 4096


def read(machine: Machine, function: Ref, pos: int, stop: int) -> int:
    """Read the phrase whose first MARK is at ``pos`` and that ends before ``stop``.

    ``function`` is on top of the stack. Returns the offset behind the phrase, where the last node is the call that
    takes the place of the function, or -1 with nothing changed.
    """
    found = _PHRASE(machine.data, pos)
    if found is None:
        return _native(machine, function, pos, stop)
    if found.end() > stop:
        return -1
    start, key, put, device, put2, met, size, put3, offset, shape, put4, strides, put5, end, put6, put7, put8 = (
        found.groups()
    )
    nodes, memo = machine.nodes, machine.memo
    count = len(memo)
    if met is None:
        puts = _numbers8(count, count + 1, count + 2, count + 3, count + 4, count + 5, count + 6, count + 7)
        usual = b"".join((put, put2, put3, put4, put5, put6, put7, put8)) == puts
    else:
        puts = _numbers7(count, count + 1, count + 2, count + 3, count + 4, count + 5, count + 6)
        usual = b"".join((put, put3, put4, put5, put6, put7, put8)) == puts
    if not usual:
        return -1
    mark = (start, met, size, offset, shape, strides, end)
    kind = machine.kinds.get(mark) or _kind(machine, mark)
    if kind is None or type(nodes[function]) is not Global:
        return -1
    word, cls, place, numel, begin, lengths, steps, flag, hooks, nothing = kind
    name = len(nodes)
    nodes.append(key[5:].decode())
    memo.append(name)
    if met is None:
        place = name + 1
        nodes.append(machine.words.get(device) or _device(machine, device))
        memo.append(place)
        machine.texts[0].append(place)
        machine.texts[1].append(found.start(4))
    pid, outside, first, second, hook, args, call = range(len(nodes), len(nodes) + 7)
    nodes += (
        (word, cls, name, place, numel),
        Persistent(pid),
        lengths,
        steps,
        Call(0x52, hooks, nothing),
        (outside, begin, first, second, flag, hook),
        Call(0x52, function, args),
    )
    memo += (pid, first, second, hook, args, call)
    machine.bare.append(outside)
    return found.end()


def _native(machine: Machine, function: Ref, pos: int, stop: int) -> int:
    """As ``read``, for what the pickler of TorchScript wrote."""
    found = _NATIVE(machine.data, pos)
    if found is None or found.end() > stop:
        return -1
    start, key, put, again, device, put2, met, size, put3, offset, shape, strides, end = found.groups()
    nodes, memo = machine.nodes, machine.memo
    count = len(memo)
    puts = [one for one in (put, put2, put3) if one is not None]
    if b"".join(puts) != _numbers[len(puts) - 1](*range(count, count + len(puts))):
        return -1
    mark = (start, met, size, offset, shape, strides, end)
    kind = machine.kinds.get(mark) or _kind(machine, mark)
    name = len(nodes) if again is None else _ref(machine, again)
    empty = machine.single[0x74]
    if kind is None or name < 0 or type(nodes[function]) is not Global:
        return -1
    word, cls, place, numel, begin, lengths, steps, flag, hooks, nothing = kind
    if empty < 0 and not (lengths and steps):
        return -1
    if again is None:
        nodes.append(key[5:].decode())
        memo.append(name)
    if met is None:
        place = len(nodes)
        nodes.append(machine.words.get(device) or _device(machine, device))
        memo.append(place)
    outside = len(nodes) + 1
    nodes += ((word, cls, name, place, numel), Persistent(outside - 1))
    memo.append(outside)
    machine.bare.append(outside)
    first = second = empty
    forms = machine.style.forms
    if lengths:
        first = len(nodes)
        nodes.append(lengths)
        if len(lengths) < 4:
            forms[first] = 0x74
    if steps:
        second = len(nodes)
        nodes.append(steps)
        if len(steps) < 4:
            forms[second] = 0x74
    hook = len(nodes)
    nodes += (
        Call(0x52, hooks, nothing),
        (outside, begin, first, second, flag, hook),
        Call(0x52, function, hook + 1),
    )
    return found.end()


def _device(machine: Machine, word: bytes) -> str:
    """The string of a device: each a node of its own, and all of them one object of Python's."""
    text = machine.words[word] = word[5:].decode()
    return text


def _kind(machine: Machine, mark: tuple[bytes | None, ...]) -> Kind | None:
    """Look up what the words of a phrase stand for; None where one of them is not known yet, or not usual."""
    parts = [[_ref(machine, word) for word in _WORDS(part or b"") if word[0] not in _MAKERS] for part in mark]
    (word, cls), met, (size,), (offset,), shape, strides, (flag, hooks, nothing) = parts
    if not (_takes_all(mark[4], shape) and _takes_all(mark[5], strides)):
        return None
    if min(word, cls, *met, size, offset, *shape, *strides, flag, hooks, nothing) < 0:
        return None
    if type(machine.nodes[hooks]) is not Global:
        return None
    if len(machine.kinds) >= _KINDS:
        machine.kinds.clear()
    device = met[0] if met else -1
    kind = Kind(word, cls, device, size, offset, tuple(shape), tuple(strides), flag, hooks, nothing)
    machine.kinds[mark] = kind
    return kind


def _takes_all(row: bytes | None, refs: list[Ref]) -> bool:
    """Does the last instruction of a row make one tuple of everything in it?"""
    return row is not None and (row[:1] == b"(" or row[-1] == 0x84 + len(refs))


def _ref(machine: Machine, word: bytes) -> Ref:
    """What one instruction pushes; -1 where that is not made yet."""
    code, value = word[0], int.from_bytes(word[1:], "little")
    if code == 0x68 or code == 0x6A:  # BINGET, LONG_BINGET
        return machine.get(value) if value < len(machine.memo) and machine.memo[value] >= 0 else -1
    if code == 0x4B:  # BININT1
        return machine.tiny[value]
    return machine.consts.get(word, -1) if len(word) > 1 else machine.single[code]
