"""The state of the stack machine that ``decode`` drives.

Where CPython's unpickler imports or calls, this one makes a node. Lengths are checked against the bytes
that are there before anything is allocated; there is no recursion. Frequent opcodes are executed by
``decode``, the others by ``rare`` and ``literals``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Final, NamedTuple, NoReturn

from ..errors import PickleError, TruncatedPickleError
from ..limits import Limits
from . import opcodes as op
from .filling import steps_so_far
from .nodes import (
    Buffer,
    ByteArray,
    Call,
    Dict,
    Extension,
    Filling,
    FrozenSet,
    Global,
    Instance,
    List,
    Node,
    Persistent,
    Ref,
    Set,
    Style,
)

__all__ = ["Kind", "Machine"]

#: Kinds of which each value has a hash, as far as can be known without running anything; of a tuple it depends.
_HASHABLE = frozenset(
    (type(None), bool, int, float, str, bytes, FrozenSet, Global, Call, Persistent, Extension, Buffer)
)
_UNHASHABLE = (List, Dict, Set, ByteArray)

#: When a container was filled that an object had taken as its state before: after every call.
LATE = 1 << 62


class Kind(NamedTuple):
    """What many tensors have in common (``phrase_reading``), as references; ``device`` -1 where it is always new."""

    word: Ref
    cls: Ref
    device: Ref
    size: Ref
    offset: Ref
    shape: tuple[Ref, ...]
    strides: tuple[Ref, ...]
    flag: Ref
    hooks: Ref
    nothing: Ref


#: Eight bytes for each number, where a list takes forty.
_NUMBERS: Final = array("Q")


class Machine:
    """The state of one run over a pickle.

    ``outer`` are the stacks that wait below a MARK. ``memo`` holds what was memoised in order, as every
    pickler does; numbers out of order are in ``sparse``, so that a PUT of four billion costs nothing, and
    ``gaps`` is set. ``bare`` are the nodes that a pickler never memoises, ascending. ``filled`` says of each container
    how many nodes there were when it was last filled; ``given`` are those that went to BUILD, ``fetched`` those
    that were taken a second time.
    """

    def __init__(self, data: bytes, start: int, where: str, limits: Limits, style: Style) -> None:
        self.data = data
        self.start = start
        self.pos = start
        self.at = start
        self.where = where
        self.limits = limits
        self.style = style
        self.dialect = style.dialect
        self.most = min(limits.nodes, limits.few_nodes + (len(data) - start) // limits.bytes_per_node)
        self.nodes: list[Node] = []
        self.stack: list[Ref] = []
        self.outer: list[list[Ref]] = []
        self.memo: list[Ref] = []
        self.sparse: dict[int, Ref] = {}
        self.sparse_heap: list[int] = []
        self.gaps = False
        self.consts: dict[bytes, Ref] = {}
        self.tiny: list[Ref] = [-1] * 256
        self.single: list[Ref] = [-1] * 256
        self.bare: list[Ref] = []
        self.steps: dict[Ref, list[tuple[int, int]]] = {}
        self.refused: dict[int, int] = {}
        self.oddities: list[tuple[int, str]] = []
        self.words: dict[bytes, str] = {}
        self.names: dict[bytes, tuple[str, str]] = {}
        self.kinds: dict[tuple[bytes | None, ...], Kind] = {}
        self.frame_end = -1
        self.hashed: set[Ref] = set()
        self.filled: dict[Ref, int] = {}
        self.texts = _NUMBERS[:], _NUMBERS[:]
        self.given: set[Ref] = set()
        self.fetched: set[Ref] = set()

    # -- errors and remarks ---------------------------------------------------------------------

    def fail(self, what: str) -> NoReturn:
        """Give up at the current instruction."""
        raise PickleError(what, where=self.where, offset=self.at)

    def short(self, size: int) -> NoReturn:
        """Give up, because ``size`` bytes should follow and do not."""
        what = f"{size:,} bytes are announced, but the pickle ends before"
        raise TruncatedPickleError(what, where=self.where, offset=self.at)

    def odd(self, what: str) -> None:
        """Note what no pickler writes."""
        if len(self.oddities) < self.limits.listed:
            self.oddities.append((self.at, what))

    def look_around(self, pos: int) -> int:
        """What need not be looked at after each instruction: the number of nodes, the end of a FRAME.

        Fails for too many nodes; returns the offset behind which it must be called again.
        """
        left = self.most - len(self.nodes)
        if left < 0:
            self.fail(f"more than {self.most:,} objects in {len(self.data) - self.start:,} bytes, which is the limit")
        if 0 <= self.frame_end < pos:
            self.odd("a FRAME ends inside an instruction")
            self.frame_end = -1
        elif self.frame_end == pos:
            self.frame_end = -1
        return min(pos + left, self.frame_end - 1) if self.frame_end > pos else pos + left

    # -- reading and pushing --------------------------------------------------------------------

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        if size > len(self.data) - self.pos:
            self.short(size)
        raw = self.data[self.pos : self.pos + size]
        self.pos += size
        return raw

    def line(self) -> bytes:
        """The bytes before the next line feed, which is passed."""
        end = self.data.find(b"\n", self.pos)
        if end < 0:
            raise TruncatedPickleError("the pickle ends in the middle of a line", where=self.where, offset=self.at)
        text = self.data[self.pos : end]
        self.pos = end + 1
        return text

    def push(self, node: Node, form: int = -1) -> None:
        """A new node; ``form`` is the opcode where it is not the default one."""
        ref = len(self.nodes)
        self.stack.append(ref)
        self.nodes.append(node)
        if form >= 0:
            self.style.forms[ref] = form

    def add_bare(self, node: Node, form: int = -1) -> Ref:
        """A new node that no pickler memoises; it is not pushed."""
        ref = len(self.nodes)
        self.bare.append(ref)
        self.nodes.append(node)
        if form >= 0:
            self.style.forms[ref] = form
        return ref

    def pop_mark(self) -> list[Ref]:
        """What lies above the last MARK."""
        items = self.stack
        self.stack = self.outer.pop()
        return items

    # -- parts of the frequent opcodes that are seldom needed -----------------------------------

    def put(self, index: int, ref: Ref) -> None:
        """Memoise out of order."""
        memo = self.memo
        if index < len(memo):
            if memo[index] >= 0 and memo[index] != ref:
                self.odd(f"memo {index} is written twice")
            memo[index] = ref
            self.kinds.clear()
        elif index == 1 and not memo and not self.sparse:
            # Python 2 numbers its memo from 1.
            memo += [-1, ref]
            self.gaps = True
        else:
            self.gaps = True
            if index > self.limits.memo:
                self.odd(f"memo {index:,}: pickle.load runs out of memory for it")
            if index not in self.sparse:
                heappush(self.sparse_heap, index)
            elif self.sparse[index] != ref:
                self.odd(f"memo {index} is written twice")
            self.sparse[index] = ref

    def memoize(self, ref: Ref) -> None:
        """MEMOIZE: the number is the count of those in use, which in a memo with gaps may be taken."""
        memo, sparse, heap = self.memo, self.sparse, self.sparse_heap
        while heap and heap[0] < len(memo):
            # The memo in order has reached it meanwhile.
            del sparse[heappop(heap)]
        count = len(memo) - bool(memo and memo[0] < 0) + len(sparse)
        if count == len(memo):
            memo.append(ref)
        else:
            self.odd("MEMOIZE in a memo with gaps")
            self.put(count, ref)

    def get(self, index: int) -> Ref:
        """What was memoised under a number, in order or not."""
        memo = self.memo
        ref = memo[index] if index < len(memo) else -1
        if ref < 0:
            if index not in self.sparse:
                self.fail(f"memo {index} is read before it is written")
            ref = self.sparse[index]
        self.fetched.add(ref)
        return ref

    def tiny_int(self, value: int) -> Ref:
        """The first BININT1 of a value."""
        ref = self.tiny[value] = self.add_bare(value, -1 if self.dialect else op.BININT1)
        return ref

    def small_int(self, code: int, key: bytes) -> Ref:
        """The first BININT2 or BININT of a value; ``key`` is the whole instruction."""
        size = 2 if code == op.BININT2 else 4
        if len(key) <= size:
            self.short(size)
        value = int.from_bytes(key[1:], "little", signed=code == op.BININT)
        default = op.int_opcode(value, self.dialect)
        ref = self.consts[key] = self.add_bare(value, -1 if default == code else code)
        return ref

    def singleton(self, code: int) -> Ref:
        """The first EMPTY_TUPLE, NONE, NEWTRUE or NEWFALSE, or TUPLE of nothing."""
        value: Node = None if code == op.NONE else () if code in (op.EMPTY_TUPLE, op.TUPLE) else code == op.NEWTRUE
        usual = {op.TUPLE: self.dialect == 0, op.EMPTY_TUPLE: self.dialect > 0, op.NONE: True}
        ref = self.single[code] = self.add_bare(value, -1 if usual.get(code, self.dialect >= 2) else code)
        return ref

    def check_call(self, func: Ref, args: Ref, code: int) -> None:
        """Fail for a call that CPython refuses before it is made."""
        node = self.nodes[args]
        if type(node) is not tuple and not isinstance(node, Instance):
            self.fail(f"{op.NAMES[code]} with arguments that are no tuple")
        if not isinstance(self.nodes[func], Instance):
            self.fail(f"{op.NAMES[code]} calls a {type(self.nodes[func]).__name__}")

    def check_keys(self, keys: Iterable[Ref]) -> None:
        """Fail for what cannot be a key of a dict or a member of a set."""
        nodes, hashed = self.nodes, self.hashed
        work = [ref for ref in keys if type(nodes[ref]) not in _HASHABLE]
        while work:
            ref = work.pop()
            node = nodes[ref]
            if isinstance(node, _UNHASHABLE):
                self.fail(f"a {type(node).__name__.lower()} as a key of a dict or in a set")
            if isinstance(node, tuple) and ref not in hashed:
                # Each tuple once: it may be in a million others.
                hashed.add(ref)
                work += node

    def dropped(self, ref: Ref) -> None:
        """After a POP: was it the call of an object that was made once more among its own arguments?

        That is how the pickler writes such an object (``save_reduce`` in _pickle.c): it finds it in the memo
        when it has just called for it, throws the result away and fetches the other.
        """
        node = self.nodes[ref]
        if type(node) is not Call or ref != len(self.nodes) - 1:
            return
        code, rest = self.data[self.pos : self.pos + 1], self.data[self.pos + 1 : self.pos + 20]
        size = 1 if code == b"h" else 4 if code == b"j" else 0
        number = rest.partition(b"\n")[0] if code == b"g" else b"%d" % int.from_bytes(rest[:size], "little")
        if (size or code == b"g") and number.isdigit() and int(number) < len(self.memo):
            inner = self.memo[int(number)]
            twin = self.nodes[inner]
            if inner >= 0 and type(twin) is Call and (twin.op, twin.func) == (node.op, node.func):
                self.style.remade[inner] = ref

    # -- filling --------------------------------------------------------------------------------

    def set_pairs(self, ref: Ref, pairs: list[Ref], code: int) -> None:
        """SETITEM and SETITEMS."""
        if len(pairs) & 1:
            self.fail(f"{op.NAMES[code]} with a key that has no value")
        node = self.nodes[ref]
        self.filled[ref] = len(self.nodes) if ref not in self.given else LATE
        count = len(pairs) >> 1
        if isinstance(node, Dict):
            self.not_whole(ref)
            self.check_keys(pairs[::2])
            held = node.pairs
            usual = not held and (code == op.SETITEM or 2 <= count < op.BATCH)
            if not usual or ref in self.steps:
                self.note_step(ref, code, count, Filling(pairs=held))
            if isinstance(held, list):
                held += pairs
            elif pairs:
                node.pairs = pairs
        elif isinstance(node, Instance):
            filling = node.filling
            usual = filling is None and (code == op.SETITEM or 2 <= count <= op.BATCH)
            if filling is None:
                filling = node.filling = Filling()
            if not usual or ref in self.steps:
                self.note_step(ref, code, count, filling)
            if isinstance(filling.pairs, list):
                filling.pairs += pairs
            else:
                filling.pairs = pairs
        else:
            self.fail(f"{op.NAMES[code]} on a {type(node).__name__}")

    def add_items(self, ref: Ref, items: list[Ref], code: int) -> None:
        """APPEND, APPENDS and ADDITEMS."""
        node = self.nodes[ref]
        self.filled[ref] = len(self.nodes) if ref not in self.given else LATE
        count = len(items)
        if isinstance(node, List if code != op.ADDITEMS else Set):
            held = node.items
            self.not_whole(ref)
            if code == op.ADDITEMS:
                self.check_keys(items)
                usual = not held and 1 <= count < op.BATCH
            else:
                usual = not held and (code == op.APPEND or 2 <= count <= op.BATCH)
            if not usual or ref in self.steps:
                self.note_step(ref, code, count, Filling(items=held))
            if isinstance(held, list):
                held += items
            elif items:
                node.items = items
        elif isinstance(node, Instance):
            filling = node.filling
            usual = filling is None and (code == op.APPEND or (code == op.APPENDS and 2 <= count <= op.BATCH))
            if filling is None:
                filling = node.filling = Filling()
            if not usual or ref in self.steps:
                self.note_step(ref, code, count, filling)
            if isinstance(filling.items, list):
                filling.items += items
            else:
                filling.items = items
        else:
            self.fail(f"{op.NAMES[code]} on a {type(node).__name__}")

    def not_whole(self, ref: Ref) -> None:
        """A list or dict that LIST or DICT made is filled further: it may hold itself, and is no whole any more."""
        forms = self.style.forms
        if forms and forms.get(ref) in (op.LIST, op.DICT):
            del forms[ref]

    def note_step(self, ref: Ref, code: int, count: int, before: Filling) -> None:
        """Remember how a container is filled from its first unusual step on; ``before`` came in usual ones."""
        steps = self.steps.get(ref)
        if steps is None:
            steps = self.steps[ref] = steps_so_far(before, code == op.ADDITEMS)
        steps.append((code, count))

    def build(self, ref: Ref, state: Ref) -> None:
        """BUILD."""
        node = self.nodes[ref]
        if not isinstance(node, Instance):
            self.fail(f"BUILD on a {type(node).__name__}")
        parts = self.nodes[state]
        self.given.update(parts if type(parts) is tuple else (state,))
        self.filled[ref] = len(self.nodes) if ref not in self.given else LATE
        if ref in self.steps:
            self.steps[ref].append((op.BUILD, 1))
        filling = node.filling
        if filling is None:
            filling = node.filling = Filling()
        if isinstance(filling.states, list):
            self.odd("an object is built twice")
            filling.states.append(state)
        else:
            filling.states = [state]
