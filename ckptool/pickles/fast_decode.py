"""A peephole for ``decode``: read in one step the pattern that torch.save repeats for each tensor.

In a checkpoint of 200,000 tensors, nine tenths of the pickle are 200,000 repetitions of one pattern of 30
instructions::

    GET function, MARK, MARK, GET 'storage', GET class, key, device, size, TUPLE, BINPERSID,
        offset, shape, strides, flag, (GET class, EMPTY_TUPLE, REDUCE), TUPLE, REDUCE

A LONG_BINPUT follows everything that can be shared. The loop of ``decode`` would turn once for each instruction; one
regular expression reads the whole pattern. The pattern has no meaning here. ``read_pattern`` adds the nodes that the
loop would have added, with the same numbers, or declines and changes nothing, and the loop goes on. So everything
unusual (the first tensors, small memo indices, scalars, other protocols, hostile files) is left to the loop.

TorchScript's pickler (``torch/csrc/jit/serialization/pickler.cpp``) writes the same objects differently: it memoizes
only the strings and the storage, writes every tuple with MARK and TUPLE, and may reuse an earlier string as a key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from struct import Struct
from typing import Final

from ..base.lazy import regex
from .machine import Machine, Template, TemplateRefs
from .nodes import Call, Dict, Global, Persistent, Ref


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
#: The groups of ``_TORCH_SAVE`` with the memo indices.
_PUTS: Final = (3, 5, 8, 11, 13, 15, 16, 17)
#: A dict of one pair, such as the metadata of a module.
_PAIR: Final = regex(b"}r(....)(%b)(%b|[\x88\x89N])s" % (_GET, _INT), re.DOTALL)
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

#: Packers for 1 to 8 memo indices.
_u32s = tuple([Struct(f"<{count}I").pack for count in range(1, 9)])
_u32 = Struct("<I").unpack_from
_long_binput = Struct("<BI").pack
#: LONG_BINPUT, EMPTY_DICT, LONG_BINPUT.
_memoized_dict = Struct("<BIBBI").pack

#: The most templates to remember; a model has a few dozen.
_MAX_TEMPLATES: Final = 4096


def read_pattern(machine: Machine, stack: list[Ref], pos: int, stop: int) -> int:
    """Read the pattern whose first MARK is at ``pos``, and the patterns that follow it, up to ``stop`` at most.

    The function of the first pattern is on top of the stack. In a state dict, a key and the function follow each
    pattern, then the next pattern. Return the offset after the last one; the stack then ends with the calls, and the
    keys between them. Return -1 and change nothing if no pattern matches.
    """
    data, nodes, memo, function = machine.data, machine.nodes, machine.memo, stack[-1]
    if type(nodes[function]) is not Global:
        return -1
    found = _recognized(machine, pos, stop, len(memo))
    if found is None:
        return _read_torchscript(machine, stack, pos, stop)
    key, template, pos = found
    text_refs, text_offsets = machine.texts
    unmemoized, stop = machine.unmemoized, min(stop, len(data))
    # Shapes repeat in the same order in each layer of a model. So the template that followed the last two is tried
    # first: it predicts every byte of the pattern except the key, without the regular expression.
    followers: dict[tuple[int, int], Template] = {}
    before, get = -1, b""
    stack.pop()
    while True:
        name = len(nodes)
        number, refs, _, _, _, _, device, distance = template
        word, cls, place, numel, begin, lengths, steps, flag, hooks, no_args = refs
        nodes.append(key)
        memo.append(name)
        if device is not None:
            place = name + 1
            nodes.append(device)
            memo.append(place)
            text_refs.append(place)
            text_offsets.append(pos - distance)
        pid = len(nodes)
        storage, first, second, hook, args, call = pid + 1, pid + 2, pid + 3, pid + 4, pid + 5, pid + 6
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
        unmemoized.append(storage)
        stack.append(call)
        end = pos + 5 + _u32(data, pos + 1)[0] if pos + 15 <= stop and data[pos] == 0x58 else stop
        if end + 10 > stop:
            return pos
        if not get:
            get = data[end + 5 : end + (7 if data[end + 5] == 0x68 else 10)]
            if get[0] not in b"hj" or _pushed(machine, get) != function:
                return pos
        count, order = len(memo), (before, number)
        guess = followers.get(order, template)
        _, _, start, base, step, size, _, _ = guess
        head = _long_binput(0x72, count) + get
        at = end + len(head) + len(start)
        tail = at + 4 + data[at] if at < stop else stop
        if (
            tail + size <= stop
            and data.startswith(head + start, end)
            and data.startswith((base + (count + 1) * step).to_bytes(size, "little"), tail)
            and data[at + 1 : at + 4] == b"\0\0\0"
            and (raw := data[at + 4 : tail]).isascii()
        ):
            key, tail = raw.decode(), tail + size
        else:
            found = _recognized(machine, end + len(head), stop, count + 1) if data.startswith(head, end) else None
            if found is None:
                return pos
            key, guess, tail = found
            followers[order] = guess
        try:
            text = data[pos + 5 : end].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return pos  # the loop reports it
        ref = len(nodes)
        nodes.append(text)
        memo.append(ref)
        text_refs.append(ref)
        text_offsets.append(pos)
        stack.append(ref)
        before, template, pos = number, guess, tail


def read_pairs(machine: Machine, stack: list[Ref], pos: int, stop: int) -> int:
    """Read the dict of one known pair whose EMPTY_DICT is at ``pos``, and the dicts that follow it.

    torch.save writes ``{"version": 1}`` for each module, after its name. Return the offset after the last dict; the
    stack then ends with the dicts, and the names between them. Return -1 and change nothing for anything else.
    """
    data, nodes, memo = machine.data, machine.nodes, machine.memo
    match = _PAIR.match(data, pos, min(stop, len(data)))
    if match is None or match[1] != _u32s[0](len(memo)):
        return -1
    key, value = _pushed(machine, match[2]), _pushed(machine, match[3])
    if key < 0 or value < 0 or type(nodes[key]) is not str:
        return -1
    pos, rest = match.end(), data[match.start(2) : match.end()]
    text_refs, text_offsets = machine.texts
    filled_at, stop = machine.filled_at, min(stop, len(data))
    while True:
        ref = len(nodes)
        nodes.append(Dict([key, value]))
        memo.append(ref)
        stack.append(ref)
        filled_at[ref] = ref + 1
        end = pos + 5 + _u32(data, pos + 1)[0] if pos + 15 <= stop and data[pos] == 0x58 else stop
        count = len(memo)
        after = _memoized_dict(0x72, count, 0x7D, 0x72, count + 1) + rest
        if end + len(after) > stop or not data.startswith(after, end):
            return pos
        try:
            text = data[pos + 5 : end].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return pos  # the loop reports it
        ref += 1
        nodes.append(text)
        memo.append(ref)
        text_refs.append(ref)
        text_offsets.append(pos)
        stack.append(ref)
        pos = end + len(after)


def _recognized(machine: Machine, pos: int, stop: int, count: int) -> tuple[str, Template, int] | None:
    """Return the storage key, the template and the end of the pattern at ``pos``, or None if no pattern matches.

    ``count`` is the next memo index.
    """
    data = machine.data
    match = _TORCH_SAVE.match(data, pos)
    if match is None or match.end() > stop:
        return None
    start, key, put, device, put2, get, size, put3, offset, shape, put4, strides, put5, end, put6, put7, put8 = (
        match.groups()
    )
    puts = (
        (put, put3, put4, put5, put6, put7, put8) if put2 is None else (put, put2, put3, put4, put5, put6, put7, put8)
    )
    if b"".join(puts) != _u32s[len(puts) - 1](*range(count, count + len(puts))):
        return None
    parts = start, device, get, size, offset, shape, strides, end
    template = machine.templates.get(parts)
    if template is None:
        refs = _template_refs(machine, (start, get, size, offset, shape, strides, end))
        if refs is None:
            return None
        tail = match.end(2)
        places = [match.start(group) - tail for group in _PUTS if match.start(group) >= 0]
        step = sum([1 << 8 * place for place in places])
        template = machine.templates[parts] = Template(
            len(machine.templates),
            refs,
            start + b"X",
            int.from_bytes(data[tail : match.end()], "little") - count * step,
            step,
            match.end() - tail,
            _device(machine, device) if device is not None else None,
            match.end() - match.start(4),
        )
    return key[5:].decode(), template, match.end()


def _read_torchscript(machine: Machine, stack: list[Ref], pos: int, stop: int) -> int:
    """Read one pattern as TorchScript's pickler writes it; see ``read_pattern``."""
    match = _TORCHSCRIPT.match(machine.data, pos)
    if match is None or match.end() > stop:
        return -1
    start, key, put, key_get, device, put2, get, size, put3, offset, shape, strides, end = match.groups()
    nodes, memo = machine.nodes, machine.memo
    count = len(memo)
    puts = [number for number in (put, put2, put3) if number is not None]
    if b"".join(puts) != _u32s[len(puts) - 1](*range(count, count + len(puts))):
        return -1
    parts = start, get, size, offset, shape, strides, end
    template = machine.templates.get(parts)
    refs = template.refs if template is not None else _template_refs(machine, parts)
    name = len(nodes) if key_get is None else _pushed(machine, key_get)
    empty = machine.singletons[0x74]
    if refs is None or name < 0:
        return -1
    if template is None:
        machine.templates[parts] = Template(len(machine.templates), refs)
    word, cls, place, numel, begin, lengths, steps, flag, hooks, no_args = refs
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
    nodes += (Call(0x52, hooks, no_args), (storage, begin, first, second, flag, hook), Call(0x52, stack[-1], hook + 1))
    stack[-1] = len(nodes) - 1
    return match.end()


def _device(machine: Machine, code: bytes) -> str:
    """Return the string of a BINUNICODE; equal strings become one Python object, although each device is a new node."""
    text = machine.strings[code] = code[5:].decode()
    return text


def _template_refs(machine: Machine, parts: Sequence[bytes | None]) -> TemplateRefs | None:
    """Look up the nodes that the instructions push; return None if one of them pushes something new or unusual.

    ``parts`` are the instructions before the key, for the device, size, offset, shape and strides, and the last ones.
    """
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
    return word, cls, device, size, offset, tuple(shape), tuple(strides), flag, hooks, no_args


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
