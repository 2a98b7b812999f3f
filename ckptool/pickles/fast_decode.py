"""A peephole for ``decode``: read in one step the pattern that torch.save repeats for each tensor.

In a checkpoint of 200,000 tensors, nine tenths of the pickle are 200,000 repetitions of one pattern of 30
instructions::

    GET function, MARK, MARK, GET 'storage', GET class, key, device, size, TUPLE, BINPERSID,
        offset, shape, strides, flag, (GET class, EMPTY_TUPLE, REDUCE), TUPLE, REDUCE

A LONG_BINPUT follows everything that can be shared. The loop of ``decode`` would turn once for each instruction; one
regular expression reads the whole pattern. The pattern has no meaning here. ``read_pattern`` adds the nodes that the
loop would have added, with the same numbers, or declines and changes nothing, and the loop goes on. So everything
unusual (the first tensors, small memo indices, scalars, other protocols, hostile files) is left to the loop.
``fast_encode`` is the other direction.

TorchScript's pickler (``torch/csrc/jit/serialization/pickler.cpp``) writes the same objects differently: it memoizes
only the strings and the storage, writes every tuple with MARK and TUPLE, and may reuse an earlier string as a key.
"""

from __future__ import annotations

import re
from struct import Struct
from typing import Final

from ..base.lazy import regex
from .machine import Machine, Template
from .nodes import Call, Global, Persistent, Ref


def _text(*sizes: int) -> bytes:
    """Return the pattern of a BINUNICODE whose number of ASCII characters is one of ``sizes``."""
    return b"X(?:%b)" % b"|".join(b"\\x%02x\\0\\0\\0[ -~]{%d}" % (size, size) for size in sizes)


_GET: Final = b"(?:h.|j....)"
_PUT: Final = b"r(....)"
_INT: Final = b"(?:K.|M..|J....)"
_KEY: Final = b"(%b)%b" % (_text(*range(1, 9)), _PUT)
#: A new string, or an earlier one.
_DEVICE: Final = b"(?:(%b)%b|(%b))" % (_text(*range(3, 9)), _PUT, _GET)
#: A non-empty tuple of integers: a shape or strides. ``_takes_all`` checks that TUPLE1 takes one integer, TUPLE2 two.
_INTS: Final = b"(?:(?:%b){1,3}[\x85-\x87]|\\((?:%b){4,16}t)" % (_INT, _INT)
#: From the first MARK to the last LONG_BINPUT.
_TORCH_SAVE: Final = regex(
    b"(\\(\\(%b%b)%b%b(%bt)%b" % (_GET, _GET, _KEY, _DEVICE, _INT, _PUT)
    + b"Q(%b)(%b)%b(%b)%b" % (_INT, _INTS, _PUT, _INTS, _PUT)
    + b"([\x88\x89]%b\\)R)%bt%bR%b" % (_GET, _PUT, _PUT, _PUT),
    re.DOTALL,
)
#: The same from TorchScript's pickler, from the first MARK to REDUCE; a scalar has empty tuples.
_TORCHSCRIPT: Final = regex(
    b"(\\(\\(%b%b)(?:%b|(%b))%b(%bt)Q%b(%b)" % (_GET, _GET, _KEY, _GET, _DEVICE, _INT, _PUT, _INT)
    + b"(\\((?:%b){0,16}t)(\\((?:%b){0,16}t)([\x88\x89]%b\\)R)tR" % (_INT, _INT, _GET),
    re.DOTALL,
)
#: Splits a part of the pattern into its instructions.
_INSTRUCTIONS: Final = regex(b"%b|%b|." % (_GET, _INT), re.DOTALL)
#: Instructions that combine others and push no new value.
_COMBINING: Final = frozenset(b"(tR\x85\x86\x87")

_u32s7, _u32s8 = Struct("<7I").pack, Struct("<8I").pack
_u32s = (Struct("<I").pack, Struct("<2I").pack, Struct("<3I").pack)

#: The most templates to remember; a model has a few dozen.
_MAX_TEMPLATES: Final = 4096


def read_pattern(machine: Machine, function: Ref, pos: int, stop: int) -> int:
    """Read the pattern whose first MARK is at ``pos`` and that ends before ``stop``.

    ``function`` is on top of the stack. Return the offset after the pattern; the last node is then the call that
    replaces the function. Return -1 and change nothing if the pattern does not match.
    """
    match = _TORCH_SAVE.match(machine.data, pos)
    if match is None:
        return _read_torchscript(machine, function, pos, stop)
    if match.end() > stop:
        return -1
    start, key, put, device, put2, get, size, put3, offset, shape, put4, strides, put5, end, put6, put7, put8 = (
        match.groups()
    )
    nodes, memo = machine.nodes, machine.memo
    count = len(memo)
    if get is None:
        puts = _u32s8(count, count + 1, count + 2, count + 3, count + 4, count + 5, count + 6, count + 7)
        in_order = b"".join((put, put2, put3, put4, put5, put6, put7, put8)) == puts
    else:
        puts = _u32s7(count, count + 1, count + 2, count + 3, count + 4, count + 5, count + 6)
        in_order = b"".join((put, put3, put4, put5, put6, put7, put8)) == puts
    if not in_order:
        return -1
    parts = (start, get, size, offset, shape, strides, end)
    template = machine.templates.get(parts) or _new_template(machine, parts)
    if template is None or type(nodes[function]) is not Global:
        return -1
    word, cls, place, numel, begin, lengths, steps, flag, hooks, no_args = template
    name = len(nodes)
    nodes.append(key[5:].decode())
    memo.append(name)
    if get is None:
        place = name + 1
        nodes.append(machine.strings.get(device) or _device(machine, device))
        memo.append(place)
        machine.texts[0].append(place)
        machine.texts[1].append(match.start(4))
    pid, storage, first, second, hook, args, call = range(len(nodes), len(nodes) + 7)
    nodes += (
        (word, cls, name, place, numel),
        Persistent(pid),
        lengths,
        steps,
        Call(0x52, hooks, no_args),
        (storage, begin, first, second, flag, hook),
        Call(0x52, function, args),
    )
    memo += (pid, first, second, hook, args, call)
    machine.unmemoized.append(storage)
    return match.end()


def _read_torchscript(machine: Machine, function: Ref, pos: int, stop: int) -> int:
    """Read the pattern as TorchScript's pickler writes it; see ``read_pattern``."""
    match = _TORCHSCRIPT.match(machine.data, pos)
    if match is None or match.end() > stop:
        return -1
    start, key, put, key_get, device, put2, get, size, put3, offset, shape, strides, end = match.groups()
    nodes, memo = machine.nodes, machine.memo
    count = len(memo)
    puts = [number for number in (put, put2, put3) if number is not None]
    if b"".join(puts) != _u32s[len(puts) - 1](*range(count, count + len(puts))):
        return -1
    parts = (start, get, size, offset, shape, strides, end)
    template = machine.templates.get(parts) or _new_template(machine, parts)
    name = len(nodes) if key_get is None else _pushed(machine, key_get)
    empty = machine.singletons[0x74]
    if template is None or name < 0 or type(nodes[function]) is not Global:
        return -1
    word, cls, place, numel, begin, lengths, steps, flag, hooks, no_args = template
    if empty < 0 and not (lengths and steps):
        return -1
    if key_get is None:
        nodes.append(key[5:].decode())
        memo.append(name)
    if get is None:
        place = len(nodes)
        nodes.append(machine.strings.get(device) or _device(machine, device))
        memo.append(place)
    storage = len(nodes) + 1
    nodes += ((word, cls, name, place, numel), Persistent(storage - 1))
    memo.append(storage)
    machine.unmemoized.append(storage)
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
    nodes += (Call(0x52, hooks, no_args), (storage, begin, first, second, flag, hook), Call(0x52, function, hook + 1))
    return match.end()


def _device(machine: Machine, code: bytes) -> str:
    """Return the string of a BINUNICODE; equal strings become one Python object, although each device is a new node."""
    text = machine.strings[code] = code[5:].decode()
    return text


def _new_template(machine: Machine, parts: tuple[bytes | None, ...]) -> Template | None:
    """Look up the nodes that the instructions push; return None if one of them pushes something new or unusual."""
    refs = [
        [_pushed(machine, code) for code in _INSTRUCTIONS.findall(part or b"") if code[0] not in _COMBINING]
        for part in parts
    ]
    (word, cls), get, (size,), (offset,), shape, strides, (flag, hooks, no_args) = refs
    known = all(ref >= 0 for row in refs for ref in row) and type(machine.nodes[hooks]) is Global
    if not (known and _takes_all(parts[4], shape) and _takes_all(parts[5], strides)):
        return None
    if len(machine.templates) >= _MAX_TEMPLATES:
        machine.templates.clear()
    device = get[0] if get else -1
    template = word, cls, device, size, offset, tuple(shape), tuple(strides), flag, hooks, no_args
    machine.templates[parts] = template
    return template


def _takes_all(code: bytes | None, refs: list[Ref]) -> bool:
    """Return whether the last instruction makes one tuple from all ``refs``."""
    return code is not None and (code[:1] == b"(" or code[-1] == 0x84 + len(refs))


def _pushed(machine: Machine, instruction: bytes) -> Ref:
    """Return the node that an instruction pushes, or -1 if it does not exist yet."""
    code, value = instruction[0], int.from_bytes(instruction[1:], "little")
    if code == 0x68 or code == 0x6A:  # BINGET, LONG_BINGET
        return machine.get(value) if value < len(machine.memo) and machine.memo[value] >= 0 else -1
    if code == 0x4B:  # BININT1
        return machine.small_ints[value]
    return machine.consts.get(instruction, -1) if len(instruction) > 1 else machine.singletons[code]
