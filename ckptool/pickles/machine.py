"""The state of the stack machine that ``decode`` drives.

Where CPython's unpickler imports or calls, this machine makes a node. Lengths are checked against the available bytes
before anything is allocated, and nothing recurses. ``decode`` executes the frequent opcodes, ``uncommon_opcodes`` the
others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any, Final, NoReturn, TypeAlias

from ..base.errors import PickleError, PickleLimitError, TruncatedPickleError
from ..base.limits import Limits
from ..base.records import NamedTuple
from . import opcodes as op
from .batches import BATCH_SIZE, Batch, default_batches
from .nodes import HASHABLE, UNHASHABLE, Call, Dict, Filling, Instance, List, Node, Ref, Set, Style

#: The container that each opcode fills; it may also be an Instance.
_CONTAINERS: Final = {op.APPEND: List, op.APPENDS: List, op.ADDITEMS: Set, op.SETITEM: Dict, op.SETITEMS: Dict}
#: The value in ``filled_at`` of a container that was filled after becoming part of a state, that is, after every call.
_AFTER_EVERY_CALL: Final = 1 << 62

#: Eight bytes for each number; a list takes forty.
_NUMBERS: Final = array("Q")


#: Called after each BUILD with the nodes, the reference of the built object, and the offset of the next opcode. Returns
#: that offset, or a later one if bytes follow that the object reads itself.
Foreign: TypeAlias = Callable[[list[Node], Ref, int], int]
#: The references that many repetitions of the ``fast_decode`` pattern share: "storage", the class, the device (-1 if
#: each repetition has a new string), size, offset, the numbers of the shape and of the strides, requires_grad, the
#: class of the hooks and its arguments.
TemplateRefs: TypeAlias = tuple[Ref, Ref, Ref, Ref, Ref, tuple[Ref, ...], tuple[Ref, ...], Ref, Ref, Ref]


class Template(NamedTuple):
    """What many repetitions of the ``fast_decode`` pattern share.

    ``refs`` are the nodes, ``device`` is the text of a device that each repetition repeats, ``number`` the place among
    the templates. The pattern begins with ``start``. The ``size`` bytes after the storage key, read as one
    little-endian number, are ``base + count * step`` if ``count`` is the next memo index. The BINUNICODE of the device
    is ``device_distance`` bytes before the end.
    """

    number: int
    refs: TemplateRefs
    start: bytes = b""
    base: int = 0
    step: int = 0
    size: int = 0
    device: str | None = None
    device_distance: int = 0


class Machine:
    """The state of one run over a pickle.

    ``pos`` is the offset of the next byte, ``op_start`` the offset of the current opcode. ``outer`` are the stacks
    below the MARKs. ``memo`` holds the objects that were memoized in order, as every pickler does. Indices out of order
    are in ``sparse``, so that a PUT of four billion costs nothing; ``gaps`` is then True. ``consts``, ``small_ints``
    (BININT1) and ``singletons`` (by opcode) map to the nodes of constants. ``unmemoized`` are the nodes that a pickler
    never memoizes, ascending; ``state_parts`` are the nodes that went to BUILD. ``filled_at``, ``texts`` and
    ``fetched`` become the attributes of the graph with these names.
    """

    def __init__(self, data: bytes, start: int, where: str, limits: Limits, style: Style) -> None:
        self.data = data
        self.start = self.pos = self.op_start = start
        self.where = where
        self.limits = limits
        self.style = style
        self.dialect = style.dialect
        self.max_nodes = min(limits.nodes, limits.few_nodes + (len(data) - start) // limits.bytes_per_node)
        self.nodes: list[Node] = []
        self.stack: list[Ref] = []
        self.outer: list[list[Ref]] = []
        self.memo: list[Ref] = []
        self.sparse: dict[int, Ref] = {}
        self.sparse_heap: list[int] = []
        self.gaps = False
        self.consts: dict[bytes, Ref] = {}
        self.small_ints: list[Ref] = [-1] * 256
        self.singletons: list[Ref] = [-1] * 256
        self.unmemoized: list[Ref] = []
        self.batches: dict[Ref, list[Batch]] = {}
        self.refused: dict[int, int] = {}
        self.oddities: list[tuple[int, str]] = []
        self.strings: dict[bytes, str] = {}
        self.global_names: dict[bytes, tuple[str, str]] = {}
        self.templates: dict[tuple[bytes | None, ...], Template] = {}
        self.frame_end = -1
        self.discards = self.names = 0
        self.foreign: Foreign | None = None
        self.hashable: set[Ref] = set()
        self.filled_at: dict[Ref, int] = {}
        self.texts = _NUMBERS[:], _NUMBERS[:]
        self.fetched: set[Ref] = set()
        self.state_parts: set[Ref] = set()

    # -- errors and remarks

    def fail(self, message: str) -> NoReturn:
        """Raise PickleError at the current opcode."""
        raise PickleError(message, where=self.where, offset=self.op_start)

    def fail_limit(self, message: str) -> NoReturn:
        """Raise PickleLimitError at the current opcode."""
        raise PickleLimitError(message, where=self.where, offset=self.op_start)

    def fail_short(self, size: int) -> NoReturn:
        """Raise TruncatedPickleError, because fewer than ``size`` bytes follow."""
        message = f"{size:,} bytes are announced, but the pickle ends before"
        raise TruncatedPickleError(message, where=self.where, offset=self.op_start)

    def note_oddity(self, text: str) -> None:
        """Record something that no pickler writes."""
        if len(self.oddities) < self.limits.listed:
            self.oddities.append((self.op_start, text))

    def check_progress(self, pos: int) -> int:
        """Check the limits on nodes and open marks, and note a FRAME that ends inside an instruction.

        Return the offset after which to check again, because not every opcode needs it. Raises PickleError beyond a
        limit.
        """
        if len(self.outer) > self.limits.marks:
            self.fail_limit(f"more than {self.limits.marks:,} marks are open at once, which is the limit")
        left = self.max_nodes - len(self.nodes)
        if left < 0:
            size = len(self.data) - self.start
            self.fail_limit(f"more than {self.max_nodes:,} objects in {size:,} bytes, which is the limit")
        if 0 <= self.frame_end < pos:
            self.note_oddity("a FRAME ends inside an instruction")
        if self.frame_end <= pos:
            self.frame_end = -1
        return min(pos + left, self.frame_end - 1) if self.frame_end > pos else pos + left

    # -- reading and pushing

    def take(self, size: int) -> bytes:
        """Read the next ``size`` bytes."""
        if size > len(self.data) - self.pos:
            self.fail_short(size)
        raw = self.data[self.pos : self.pos + size]
        self.pos += size
        return raw

    def line(self) -> bytes:
        """Read up to the next line feed, and skip the line feed."""
        end = self.data.find(b"\n", self.pos)
        if end < 0:
            message = "the pickle ends in the middle of a line"
            raise TruncatedPickleError(message, where=self.where, offset=self.op_start)
        text = self.data[self.pos : end]
        self.pos = end + 1
        return text

    def push(self, node: Node, form: int = -1) -> None:
        """Push a new node; ``form`` is its opcode, or -1 if that is the default."""
        ref = len(self.nodes)
        self.stack.append(ref)
        self.nodes.append(node)
        if form >= 0:
            self.style.forms[ref] = form

    def add_unmemoized(self, node: Node, form: int = -1) -> Ref:
        """Add a node that no pickler memoizes, without pushing it."""
        ref = len(self.nodes)
        self.unmemoized.append(ref)
        self.nodes.append(node)
        if form >= 0:
            self.style.forms[ref] = form
        return ref

    def pop_mark(self) -> list[Ref]:
        """Pop everything above the last MARK."""
        items = self.stack
        self.stack = self.outer.pop()
        return items

    # -- uncommon cases of the frequent opcodes

    def put(self, index: int, ref: Ref) -> None:
        """Memoize an object out of order."""
        memo = self.memo
        if index < len(memo):
            if memo[index] >= 0 and memo[index] != ref:
                self.note_oddity(f"memo {index} is written twice")
            memo[index] = ref
            self.templates.clear()
        elif index == 1 and not memo and not self.sparse:
            # Python 2 numbers its memo from 1.
            memo += [-1, ref]
            self.gaps = True
        else:
            self.gaps = True
            if index > self.limits.memo:
                self.note_oddity(f"memo {index:,}: pickle.load runs out of memory for it")
            if index not in self.sparse:
                heappush(self.sparse_heap, index)
            elif self.sparse[index] != ref:
                self.note_oddity(f"memo {index} is written twice")
            self.sparse[index] = ref

    def memoize(self, ref: Ref) -> None:
        """Execute MEMOIZE. The new index is the number of indices in use, which may be taken in a memo with gaps."""
        memo, sparse, heap = self.memo, self.sparse, self.sparse_heap
        while heap and heap[0] < len(memo):
            # The memo in order has reached this index meanwhile.
            del sparse[heappop(heap)]
        count = len(memo) - bool(memo and memo[0] < 0) + len(sparse)
        if count == len(memo):
            memo.append(ref)
        else:
            self.note_oddity("MEMOIZE in a memo with gaps")
            self.put(count, ref)

    def get(self, index: int) -> Ref:
        """Return the object with a memo index, in order or not; raise PickleError if it has none."""
        memo = self.memo
        ref = memo[index] if index < len(memo) else -1
        if ref < 0:
            if index not in self.sparse:
                self.fail(f"memo {index} is read before it is written")
            ref = self.sparse[index]
        self.fetched.add(ref)
        return ref

    def new_small_int(self, value: int) -> Ref:
        """Add the node of a BININT1."""
        ref = self.small_ints[value] = self.add_unmemoized(value, -1 if self.dialect else op.BININT1)
        return ref

    def new_int(self, code: int, key: bytes) -> Ref:
        """Add the node of a BININT2 or BININT; ``key`` is the opcode with its argument."""
        size = 2 if code == op.BININT2 else 4
        if len(key) <= size:
            self.fail_short(size)
        value = int.from_bytes(key[1:], "little", signed=code == op.BININT)
        default = op.int_opcode(value, self.dialect)
        ref = self.consts[key] = self.add_unmemoized(value, -1 if default == code else code)
        return ref

    def new_singleton(self, code: int) -> Ref:
        """Add the node of EMPTY_TUPLE, NONE, NEWTRUE, NEWFALSE, or of TUPLE without elements."""
        value: Node = None if code == op.NONE else () if code in (op.EMPTY_TUPLE, op.TUPLE) else code == op.NEWTRUE
        default = {op.TUPLE: self.dialect == 0, op.EMPTY_TUPLE: self.dialect > 0, op.NONE: True}
        ref = self.singletons[code] = self.add_unmemoized(value, -1 if default.get(code, self.dialect >= 2) else code)
        return ref

    def check_call(self, func: Ref, args: Ref, code: int) -> None:
        """Raise PickleError for a call that CPython refuses before making it."""
        node = self.nodes[args]
        if type(node) is not tuple and not isinstance(node, Instance):
            self.fail(f"{op.NAMES[code]} with arguments that are not a tuple")
        if not isinstance(self.nodes[func], Instance):
            self.fail(f"{op.NAMES[code]} calls a {type(self.nodes[func]).__name__}")

    def check_keys(self, keys: Iterable[Ref]) -> None:
        """Raise PickleError for an object that cannot be a dict key or a set member."""
        nodes, hashable = self.nodes, self.hashable
        work = [ref for ref in keys if type(nodes[ref]) not in HASHABLE]
        while work:
            ref = work.pop()
            node = nodes[ref]
            if isinstance(node, UNHASHABLE):
                self.fail(f"a {type(node).__name__.lower()} as a key of a dict or in a set")
            if isinstance(node, tuple) and ref not in hashable:
                # Check each tuple once, because it may be in a million others.
                hashable.add(ref)
                work += node

    def note_discarded(self, ref: Ref) -> None:
        """Record the first call for an object that is among its own arguments; the pickle has just popped its result.

        The pickler writes such an object this way (``save_reduce`` in _pickle.c): right after the call, it finds the
        object in the memo, discards the result and fetches the memoized object.
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
                self.style.discarded[inner] = ref

    # -- filling

    def fill(self, ref: Ref, refs: list[Ref], code: int) -> None:
        """Execute APPEND, APPENDS, ADDITEMS, SETITEM or SETITEMS."""
        node: Any = self.nodes[ref]
        self.filled_at[ref] = len(self.nodes) if ref not in self.state_parts else _AFTER_EVERY_CALL
        container = _CONTAINERS[code]
        count, attribute = (len(refs) >> 1, "pairs") if container is Dict else (len(refs), "items")
        if container is Dict and len(refs) & 1:
            self.fail(f"{op.NAMES[code]} with a key that has no value")
        if type(node) is container:
            if self.style.forms.get(ref) in (op.LIST, op.DICT):
                # It may hold itself by now, so it is written empty and then filled.
                del self.style.forms[ref]
            if container is not List:
                self.check_keys(refs[::2] if container is Dict else refs)
            present = getattr(node, attribute)
            first = not present
            target = node
        elif isinstance(node, Instance):
            first = node.filling is None
            target = node.filling = node.filling or Filling()
            present = getattr(target, attribute)
        else:
            self.fail(f"{op.NAMES[code]} on a {type(node).__name__}")
        default = code in (op.SETITEM, op.APPEND) or (2 <= count < BATCH_SIZE and code != op.ADDITEMS)
        if not (first and default) or ref in self.batches:
            # Record batches from the first unusual one on. Before it, the node was filled in the default batches of
            # protocol 1 or later.
            if ref not in self.batches:
                self.batches[ref] = default_batches(node, 2)
            self.batches[ref].append((code, count))
        if isinstance(present, list):
            present += refs
        elif refs:
            setattr(target, attribute, refs)

    def build(self, ref: Ref, state: Ref) -> None:
        """Execute BUILD."""
        node = self.nodes[ref]
        if not isinstance(node, Instance):
            self.fail(f"BUILD on a {type(node).__name__}")
        parts = self.nodes[state]
        self.state_parts.update(parts if type(parts) is tuple else (state,))
        self.filled_at[ref] = len(self.nodes) if ref not in self.state_parts else _AFTER_EVERY_CALL
        if ref in self.batches:
            self.batches[ref].append((op.BUILD, 1))
        if node.filling is None:
            node.filling = Filling()
        if isinstance(node.filling.states, list):
            self.note_oddity("an object is built twice")
            node.filling.states.append(state)
        else:
            node.filling.states = [state]
